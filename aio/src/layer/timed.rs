//! A disk that takes its time of a [`VirtualClock`].
//!
//! As the [throttle](super::ThrottleLayer) each direction is a lane, or both share one, which a request occupies for its bytes over
//! the rate; here the transfer happens at the end of that time, when everybody waits, and its ticket resolves. Which request is next is
//! decided when everybody waits, too, so that whoever was woken by the last one has submitted what follows.

use super::{ThrottleConfig, pass_files_on};
use crate::urgency::Line;
use crate::virtual_clock::Shared;
use crate::{Completer, FileId, IoEngine, Request, Ticket, VirtualClock};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Passes requests on when the time is over that they take.
#[derive(Debug)]
pub struct TimedLayer {
    upstream: Arc<dyn IoEngine>,
    clock: Arc<VirtualClock>,
    config: ThrottleConfig,
    /// Reads and writes; all of them in the first one, if they share it.
    lanes: [Arc<Lane>; 2],
}

/// What requests occupy one after the other. Its events keep it until the last of them is done, with or without the layer.
#[derive(Debug)]
struct Lane {
    upstream: Arc<dyn IoEngine>,
    clock: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    line: Line<Waiting>,
    /// A request occupies the lane, or the next one is about to be chosen.
    is_busy: bool,
}

#[derive(Debug)]
struct Waiting {
    request: Request,
    completer: Completer,
    cost: Duration,
}

impl TimedLayer {
    /// Lets `upstream`, which must not need a thread of this process that waits for the clock, take as much time as `config` says. Its queue
    /// has no end.
    ///
    /// # Panics
    /// If a rate is not positive.
    pub fn new(upstream: Arc<dyn IoEngine>, clock: Arc<VirtualClock>, config: ThrottleConfig) -> Self {
        config.check();
        let lane = || {
            let state = State { line: Line::with_capacity(0), is_busy: false };
            Arc::new(Lane {
                upstream: Arc::clone(&upstream),
                clock: clock.shared(),
                state: Mutex::new(state),
            })
        };
        let lanes = [lane(), lane()];
        Self { upstream, clock, config, lanes }
    }
}

impl Lane {
    fn enter(self: &Arc<Self>, request: Request, cost: Duration) -> Ticket {
        let (ticket, completer) = Ticket::new();
        let mut state = self.lock();
        state.line.push(request.urgency, Waiting { request, completer, cost });
        if !std::mem::replace(&mut state.is_busy, true) {
            self.choose_when_all_wait();
        }
        ticket
    }

    fn choose_when_all_wait(self: &Arc<Self>) {
        let lane = Arc::clone(self);
        self.clock.at(self.clock.now(), move || lane.choose());
    }

    /// Lets the next request occupy the lane for its time.
    fn choose(self: &Arc<Self>) {
        let mut state = self.lock();
        let Some(next) = state.line.turn().and_then(VecDeque::pop_front) else {
            state.is_busy = false;
            return;
        };
        drop(state);
        let lane = Arc::clone(self);
        let Waiting { request, completer, cost } = next;
        self.clock.at(self.clock.now() + cost, move || {
            completer.complete(lane.upstream.submit(request).wait());
            lane.choose_when_all_wait();
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IoEngine for TimedLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let (lane, rate) = self.config.lane(request.kind);
        let cost = Duration::from_secs_f64(request.bytes() as f64 / rate);
        self.lanes[lane].enter(request, cost)
    }

    /// Takes no time: it covers completed writes only, and those have taken theirs.
    fn sync(&self, file: FileId) -> Ticket {
        let (ticket, completer) = Ticket::new();
        let upstream = Arc::clone(&self.upstream);
        self.clock.at(self.clock.now(), move || completer.complete(upstream.sync(file).wait()));
        ticket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{SimConfig, SimEngine};
    use crate::{IoBuf, OpenMode, URGENT_IN_A_ROW_MAX, Urgency};

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

    /// Each takes an hour; the urgent ones are submitted when the first of the others has begun.
    #[test]
    fn urgent_requests_go_ahead_of_what_waits() {
        let (clock, disk, file) = disk(true);
        let read = |urgency| disk.submit(Request::read(file, 0, IoBuf::zeroed(100)).with_urgency(urgency));
        let others: Vec<Ticket> = (0..3).map(|_| read(Urgency::Whenever)).collect();
        clock.sleep(HOUR / 2);
        let urgent: Vec<Ticket> = (0..URGENT_IN_A_ROW_MAX + 2).map(|_| read(Urgency::Soon)).collect();
        let hour = |ticket: Ticket| {
            ticket.wait().unwrap();
            clock.now().as_secs() / 3600
        };
        let mut others = others.into_iter().map(hour);
        let ahead = URGENT_IN_A_ROW_MAX as u64;
        assert_eq!(others.next(), Some(1), "it was not interrupted");
        let hours: Vec<u64> = urgent.into_iter().map(hour).collect();
        assert_eq!(hours[..URGENT_IN_A_ROW_MAX], (2..2 + ahead).collect::<Vec<_>>());
        assert_eq!(hours[URGENT_IN_A_ROW_MAX..], [ahead + 3, ahead + 4], "one of the others had its turn");
        assert_eq!(others.next_back(), Some(ahead + 5));
    }
}
