//! Makes a fast disk as slow as another: so many bytes a second.
//!
//! Each direction is a lane: a request of `n` bytes occupies its lane for `n / rate` seconds after those before it, and its ticket
//! resolves at the end of that time, or when the real transfer ends if that is later. The transfer itself starts at once. Whenever a lane is
//! free a thread chooses the next request, urgent ones first. With a shared lane reads and writes take turns, as they do on one
//! drive. The longest-run rate is exact; unlike a token bucket with a burst, an idle lane saves nothing up.

use super::pass_files_on;
use crate::urgency::Line;
use crate::{Completer, FileId, IoEngine, OpKind, Request, Ticket, Urgency};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
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
    /// Requests of a lane and an urgency that wait before `submit` blocks.
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

/// What requests occupy one after the other. Dropping it hands on all of them, no longer waiting for their time.
#[derive(Debug)]
struct Lane {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<State>,
    /// Something waits, or the end.
    work: Condvar,
    /// There is room, by urgency.
    room: [Condvar; 2],
    waiting_max: usize,
}

#[derive(Debug)]
struct State {
    line: Line<Waiting>,
    /// When the last request so far leaves the lane.
    free_at: Instant,
    is_closed: bool,
}

/// A request whose transfer has started.
#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    completer: Completer,
    urgency: Urgency,
    since: Instant,
    cost: Duration,
}

impl ThrottleLayer {
    /// Limits `upstream`.
    ///
    /// # Panics
    /// If a rate is not positive, or no thread can be started.
    pub fn new(upstream: Arc<dyn IoEngine>, config: ThrottleConfig) -> Self {
        config.check();
        let count = if config.is_shared { 1 } else { 2 };
        let lane = || Lane::start(config.queue_depth.max(1));
        Self { lanes: std::iter::repeat_with(lane).take(count).collect(), upstream, config }
    }
}

impl Lane {
    fn start(waiting_max: usize) -> Self {
        let state =
            State { line: Line::with_capacity(waiting_max), free_at: Instant::now(), is_closed: false };
        let queue = Arc::new(Queue {
            state: Mutex::new(state),
            work: Condvar::new(),
            room: Urgency::ALL.map(|_| Condvar::new()),
            waiting_max,
        });
        let thread = std::thread::Builder::new()
            .name("aio-throttle".to_owned())
            .spawn({
                let queue = Arc::clone(&queue);
                move || queue.run()
            })
            .expect("a process that simulates disks may start one more thread");
        Self { queue, thread: Some(thread) }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket that resolves as `ticket` does, when its request has occupied the lane for `cost`.
    fn enter(&self, ticket: Ticket, urgency: Urgency, cost: Duration) -> Ticket {
        let (held, completer) = Ticket::new();
        let room = &self.room[urgency as usize];
        let full = |state: &mut State| state.line.len(urgency) >= self.waiting_max;
        let mut state = room.wait_while(self.lock(), full).unwrap_or_else(PoisonError::into_inner);
        state.line.push(urgency, Waiting { ticket, completer, urgency, since: Instant::now(), cost });
        drop(state);
        self.work.notify_one();
        held
    }

    fn run(&self) {
        while let Some((Waiting { ticket, completer, urgency, .. }, due)) = self.next() {
            self.room[urgency as usize].notify_one();
            let result = ticket.wait();
            self.wait_until(due);
            completer.complete(result);
        }
    }

    /// The request whose turn it is, and when it leaves the lane; `None` once the lane is closed and empty.
    fn next(&self) -> Option<(Waiting, Instant)> {
        let idle = |state: &mut State| state.line.is_empty() && !state.is_closed;
        let mut guard = self.work.wait_while(self.lock(), idle).unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        // The lane was not idle since whoever waits longest came, even if another is chosen now, a little late.
        let longest = state.line.fronts().map(|waiting| waiting.since).min()?;
        let next = state.line.turn().and_then(VecDeque::pop_front)?;
        state.free_at = state.free_at.max(longest) + next.cost;
        Some((next, state.free_at))
    }

    /// Waits for a moment, or for the end.
    fn wait_until(&self, due: Instant) {
        let mut state = self.lock();
        while !state.is_closed {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            // What comes meanwhile wakes it, too.
            state = self.work.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.work.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has closed its tickets, and those that wait are closed with the queue.
            crate::engine::join(thread);
        }
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
        let (urgency, cost) = (request.urgency, Duration::from_secs_f64(request.bytes() as f64 / rate));
        lane.queue.enter(self.upstream.submit(request), urgency, cost)
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

    #[test]
    fn urgent_requests_go_ahead_of_what_waits() {
        let upstream = Arc::new(SimEngine::new(SimConfig::default()));
        let config =
            ThrottleConfig { read_bytes_per_second: 1e3, is_shared: true, ..ThrottleConfig::default() };
        let slow = ThrottleLayer::new(upstream, config);
        let file = slow.open("/a".as_ref(), OpenMode::CreateNew { len: 40_000 }).unwrap();
        let read =
            |len, urgency| slow.submit(Request::read(file, 0, IoBuf::zeroed(len)).with_urgency(urgency));
        // A tenth of a second, and ten seconds each.
        let first = read(100, Urgency::Whenever);
        let others: Vec<Ticket> = (0..20).map(|_| read(10_000, Urgency::Whenever)).collect();
        read(10, Urgency::Soon).wait().unwrap();
        assert!(others.iter().filter(|ticket| ticket.is_done()).count() < 10);
        drop(slow);
        others.into_iter().chain([first]).for_each(|ticket| drop(ticket.wait().unwrap()));
    }
}
