//! A disk that takes its time of a [`VirtualClock`].
//!
//! As the [throttle](super::ThrottleLayer) each direction is a lane, or both share one, which a request occupies for its bytes over
//! the rate; here the transfer happens at the end of that time, when everybody waits, and its ticket resolves.

use super::{ThrottleConfig, pass_files_on};
use crate::{FileId, IoEngine, OpKind, Request, Ticket, VirtualClock};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Passes requests on when the time is over that they take.
#[derive(Debug)]
pub struct TimedLayer {
    upstream: Arc<dyn IoEngine>,
    clock: Arc<VirtualClock>,
    config: ThrottleConfig,
    /// When the last request so far leaves its lane: reads and writes.
    free_at: Mutex<[Duration; 2]>,
}

impl TimedLayer {
    /// Lets `upstream`, which must not need a thread of this process that waits for the clock, take as much time as `config` says. Its queue
    /// has no end.
    ///
    /// # Panics
    /// If a rate is not positive.
    pub fn new(upstream: Arc<dyn IoEngine>, clock: Arc<VirtualClock>, config: ThrottleConfig) -> Self {
        config.check();
        Self { upstream, clock, config, free_at: Mutex::default() }
    }

    /// The time at which a request of so many bytes is done.
    fn occupy(&self, kind: OpKind, bytes: u64) -> Duration {
        let (lane, rate) = self.config.lane(kind);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        free_at[lane] = free_at[lane].max(self.clock.now()) + Duration::from_secs_f64(bytes as f64 / rate);
        free_at[lane]
    }

    fn at(&self, time: Duration, start: impl FnOnce(&dyn IoEngine) -> Ticket + Send + 'static) -> Ticket {
        let (ticket, completer) = Ticket::new();
        let upstream = Arc::clone(&self.upstream);
        self.clock.at(time, move || completer.complete(start(&*upstream).wait()));
        ticket
    }
}

impl IoEngine for TimedLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let time = self.occupy(request.kind, request.bytes());
        self.at(time, move |upstream| upstream.submit(request))
    }

    /// Takes no time: it covers completed writes only, and those have taken theirs.
    fn sync(&self, file: FileId) -> Ticket {
        self.at(self.clock.now(), move |upstream| upstream.sync(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{SimConfig, SimEngine};
    use crate::{IoBuf, OpenMode};

    const HOUR: Duration = Duration::from_secs(3600);

    fn disk(is_shared: bool) -> (Arc<VirtualClock>, TimedLayer, FileId) {
        let clock = Arc::new(VirtualClock::new().unwrap());
        let config = ThrottleConfig {
            read_bytes_per_second: 100.0 / 3600.0,
            write_bytes_per_second: 50.0 / 3600.0,
            is_shared,
            ..ThrottleConfig::default()
        };
        let disk =
            TimedLayer::new(Arc::new(SimEngine::new(SimConfig::default())), Arc::clone(&clock), config);
        let file = disk.open("/a".as_ref(), OpenMode::CreateNew { len: 1000 }).unwrap();
        (clock, disk, file)
    }

    fn submit_both(disk: &TimedLayer, file: FileId) -> [Ticket; 2] {
        let write = disk.submit(Request::write(file, 0, IoBuf::zeroed(100)));
        [write, disk.submit(Request::read(file, 500, IoBuf::zeroed(100)))]
    }

    #[test]
    fn requests_take_as_long_as_their_bytes() {
        for (is_shared, hours) in [(true, [2, 3]), (false, [2, 1])] {
            let (clock, disk, file) = disk(is_shared);
            let [write, read] = submit_both(&disk, file);
            let (first, second) = if is_shared { (write, read) } else { (read, write) };
            first.wait().unwrap();
            assert_eq!(clock.now(), HOUR * hours[0].min(hours[1]));
            second.wait().unwrap();
            assert_eq!(clock.now(), HOUR * hours[0].max(hours[1]));
            disk.sync(file).wait().unwrap();
            assert_eq!(clock.now(), HOUR * hours[0].max(hours[1]));
        }
    }

    #[test]
    fn what_is_on_its_way_arrives_without_the_layer() {
        let (clock, disk, file) = disk(true);
        let tickets = submit_both(&disk, file);
        drop(disk);
        tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
        assert_eq!(clock.now(), HOUR * 3);
    }
}
