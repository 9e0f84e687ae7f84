//! Makes a fast disk as slow as another: so many bytes a second.
//!
//! Each direction is a lane with a virtual clock: a request of `n` bytes occupies its lane for `n / rate` seconds after
//! those before it, and its ticket resolves at the end of that time, or when the real transfer ends if that is
//! later. The transfer itself starts at once. With a shared lane reads and writes take turns, as they do on one
//! drive. The longest-run rate is exact; unlike a token bucket with a burst, an idle lane saves nothing up.

use super::pass_files_on;
use super::relay::Relay;
use crate::{FileId, IoEngine, OpKind, Request, Ticket};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How slow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ThrottleConfig {
    /// Bytes a second for reads; infinite for no limit.
    pub read_bytes_per_second: f64,
    /// Bytes a second for writes; infinite for no limit.
    pub write_bytes_per_second: f64,
    /// Whether reads and writes occupy the same lane.
    pub is_shared: bool,
    /// Requests of a lane that wait before `submit` blocks.
    pub queue_depth: usize,
}

impl Default for ThrottleConfig {
    fn default() -> Self {
        Self {
            read_bytes_per_second: f64::INFINITY,
            write_bytes_per_second: f64::INFINITY,
            is_shared: false,
            queue_depth: 64,
        }
    }
}

impl ThrottleConfig {
    /// The lane of a request, and its bytes a second.
    pub(super) fn lane(&self, kind: OpKind) -> (usize, f64) {
        match kind {
            OpKind::Read => (0, self.read_bytes_per_second),
            OpKind::Write => (usize::from(!self.is_shared), self.write_bytes_per_second),
        }
    }

    /// # Panics
    /// If a rate is not positive.
    pub(super) fn check(&self) {
        let (read, write) = (self.read_bytes_per_second, self.write_bytes_per_second);
        assert!(
            read > 0.0 && write > 0.0,
            "a disk that moves nothing never finishes: {read} and {write} bytes/s"
        );
    }
}

/// Limits the bytes per second that pass through it.
#[derive(Debug)]
pub struct ThrottleLayer {
    // Declared before the engine below, so that held results are handed on while it still works.
    lanes: Vec<Lane>,
    upstream: Arc<dyn IoEngine>,
    config: ThrottleConfig,
}

#[derive(Debug)]
struct Lane {
    /// When the last request so far leaves the lane. Held while handing over, to keep the order.
    free_at: Mutex<Instant>,
    relay: Relay,
}

impl ThrottleLayer {
    /// Limits `upstream`.
    ///
    /// # Panics
    /// If a rate is not positive, or no thread can be started.
    pub fn new(upstream: Arc<dyn IoEngine>, config: ThrottleConfig) -> Self {
        config.check();
        let count = if config.is_shared { 1 } else { 2 };
        let lane = || Lane {
            free_at: Mutex::new(Instant::now()),
            relay: Relay::new("aio-throttle", config.queue_depth),
        };
        Self { lanes: std::iter::repeat_with(lane).take(count).collect(), upstream, config }
    }
}

impl IoEngine for ThrottleLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let (lane, rate) = self.config.lane(request.kind);
        let lane = &self.lanes[lane];
        if rate.is_infinite() {
            return self.upstream.submit(request);
        }
        let cost = Duration::from_secs_f64(request.bytes() as f64 / rate);
        let ticket = self.upstream.submit(request);
        let mut free_at = lane.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = (*free_at).max(Instant::now()) + cost;
        lane.relay.forward(ticket, *free_at)
    }

    /// Not limited: it covers completed writes only, and those have waited their time.
    fn sync(&self, file: FileId) -> Ticket {
        self.upstream.sync(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{SimConfig, SimEngine};
    use crate::{IoBuf, OpenMode};

    #[test]
    fn a_transfer_takes_at_least_its_time() {
        let upstream = Arc::new(SimEngine::new(SimConfig::default()));
        let config = ThrottleConfig { write_bytes_per_second: 1e6, ..ThrottleConfig::default() };
        let slow = ThrottleLayer::new(upstream, config);
        let file = slow.open("/a".as_ref(), OpenMode::CreateNew { len: 40_000 }).unwrap();
        let start = Instant::now();
        let tickets: Vec<Ticket> =
            (0..4).map(|i| slow.submit(Request::write(file, i * 10_000, IoBuf::zeroed(10_000)))).collect();
        tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
        assert!(start.elapsed() >= Duration::from_millis(40));
    }

    #[test]
    fn dropping_the_layer_does_not_wait_for_the_time() {
        let upstream = Arc::new(SimEngine::new(SimConfig::default()));
        let config = ThrottleConfig { read_bytes_per_second: 1.0, ..ThrottleConfig::default() };
        let slow = ThrottleLayer::new(upstream, config);
        let file = slow.open("/a".as_ref(), OpenMode::CreateNew { len: 1000 }).unwrap();
        let ticket = slow.submit(Request::read(file, 0, IoBuf::zeroed(1000)));
        drop(slow);
        assert_eq!(ticket.wait().unwrap().len(), 1000);
    }
}
