//! Which of many requests are done, in the order in which they finish.

use crate::Ticket;
use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Collects the completions of many tickets, for a loop that keeps a window of requests in flight.
///
/// Tracking a ticket allocates nothing, and a thread that waits for several completions is woken once.
///
/// ```
/// use terrace_aio::engine::{EngineConfig, open_default};
/// use terrace_aio::{CompletionQueue, IoBuf, OpenMode, Request};
///
/// let engine = open_default(&EngineConfig::default())?;
/// let path = std::env::temp_dir().join(format!("terrace-aio-queue-{}", std::process::id()));
/// let file = engine.open(&path, OpenMode::CreateNew { len: 1 << 20 })?;
/// let queue = CompletionQueue::new(4);
/// let read = |tag| engine.submit(Request::read(file, tag as u64 * 4096, IoBuf::zeroed(4096)));
/// let mut tickets: Vec<_> = (0..4).map(|tag| Some(queue.track(read(tag), tag))).collect();
/// let mut done = Vec::new();
/// queue.wait(4, &mut done);
/// for tag in done {
///     let ticket = tickets[tag].take().expect("each tag comes once");
///     assert_eq!(ticket.wait()?.len(), 4096);
/// }
/// engine.close(file)?;
/// engine.remove(&path)?;
/// # Ok::<(), terrace_aio::IoError>(())
/// ```
#[derive(Debug)]
pub struct CompletionQueue {
    shared: Arc<Tags>,
}

/// The part that tickets hold on to.
#[derive(Debug)]
pub(crate) struct Tags {
    state: Mutex<State>,
    enough: Condvar,
}

#[derive(Debug)]
struct State {
    done: Vec<usize>,
    /// A thread sleeps until this many are done; 0 when none does.
    wanted: usize,
}

impl CompletionQueue {
    /// A queue with room for `capacity` completions that were not taken yet; more make it grow.
    pub fn new(capacity: usize) -> Self {
        let state = State { done: Vec::with_capacity(capacity), wanted: 0 };
        Self { shared: Arc::new(Tags { state: Mutex::new(state), enough: Condvar::new() }) }
    }

    /// The same ticket; its completion is reported here as `tag`, also if the ticket is dropped. Once the tag
    /// is reported, [`Ticket::wait`] does not block.
    pub fn track(&self, ticket: Ticket, tag: usize) -> Ticket {
        ticket.tracked(Arc::clone(&self.shared), tag)
    }

    /// Appends the tags of what is done to `done`, after waiting until there are at least `at_least`. One thread waits at
    /// a time. Tickets that nobody's thread moves (the simulation's) are to be waited for themselves.
    pub fn wait(&self, at_least: usize, done: &mut Vec<usize>) {
        let mut state = self.shared.lock();
        while state.done.len() < at_least {
            state.wanted = at_least;
            state = self.shared.enough.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.wanted = 0;
        done.append(&mut state.done);
    }
}

impl CompletionQueue {
    /// As [`wait`](Self::wait), for no longer than `timeout`; returns whether there were enough.
    pub fn wait_timeout(&self, at_least: usize, timeout: Duration, done: &mut Vec<usize>) -> bool {
        let mut state = self.shared.lock();
        if state.done.len() < at_least {
            // One that is further away than the clock goes never comes.
            let deadline = Instant::now().checked_add(timeout);
            while state.done.len() < at_least {
                let left =
                    deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
                if left.is_zero() {
                    break;
                }
                state.wanted = at_least;
                let waited = self.shared.enough.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.wanted = 0;
        let is_enough = state.done.len() >= at_least;
        done.append(&mut state.done);
        is_enough
    }
}

impl Tags {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn report(self: Arc<Self>, tag: usize) {
        let mut state = self.lock();
        state.done.push(tag);
        let is_enough = state.wanted > 0 && state.done.len() >= state.wanted;
        if is_enough {
            state.wanted = 0;
        }
        drop(state);
        if is_enough {
            wake_later_or_now(self);
        }
    }
}

thread_local! {
    /// Queues whose sleeper is to be woken when this thread has reported all that it has; `None` when it is to be woken
    /// at once.
    static TO_WAKE: RefCell<Option<Vec<Arc<Tags>>>> = const { RefCell::new(None) };
}

/// Between its making and its end, threads that wait for completions which this thread reports are not woken: once for
/// the whole batch is enough, and on one core a thread that is woken early only gets in the way.
pub(crate) struct Batch;

impl Batch {
    pub fn begin() -> Self {
        TO_WAKE.with_borrow_mut(|to_wake| {
            to_wake.get_or_insert_default();
        });
        Self
    }

    /// Wakes whoever is waiting; the batch goes on.
    pub fn wake(&self) {
        // Taken out one by one: waking runs nothing of ours, but the list is kept for its allocation.
        while let Some(tags) = TO_WAKE.with_borrow_mut(|to_wake| to_wake.as_mut().and_then(Vec::pop)) {
            tags.enough.notify_one();
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.wake();
        TO_WAKE.with_borrow_mut(|to_wake| *to_wake = None);
    }
}

fn wake_later_or_now(tags: Arc<Tags>) {
    let now = TO_WAKE.with_borrow_mut(|to_wake| match to_wake {
        Some(list) => {
            list.push(tags);
            None
        }
        None => Some(tags),
    });
    if let Some(tags) = now {
        tags.enough.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoBuf;

    #[test]
    fn tags_come_in_the_order_of_completion() {
        let queue = CompletionQueue::new(2);
        let (first, completes_first) = Ticket::new();
        let (second, completes_second) = Ticket::new();
        let (first, second) = (queue.track(first, 1), queue.track(second, 2));
        completes_second.complete(Ok(IoBuf::empty()));
        completes_first.complete(Ok(IoBuf::empty()));
        let mut done = Vec::new();
        queue.wait(1, &mut done);
        assert_eq!(done, [2, 1]);
        assert!(first.is_done() && second.is_done());
    }

    #[test]
    fn a_finished_ticket_is_reported_at_once_and_a_dropped_one_too() {
        let queue = CompletionQueue::new(2);
        drop(queue.track(Ticket::ready(Ok(IoBuf::empty())), 7));
        let (dropped, completer) = Ticket::new();
        drop(queue.track(dropped, 8));
        drop(completer);
        let mut done = Vec::new();
        queue.wait(2, &mut done);
        assert_eq!(done, [7, 8]);
    }

    #[test]
    fn waiting_ends_with_the_time_too() {
        let queue = CompletionQueue::new(2);
        let (ticket, completer) = Ticket::new();
        let ticket = queue.track(ticket, 3);
        let mut done = Vec::new();
        assert!(!queue.wait_timeout(1, Duration::from_millis(1), &mut done));
        assert!(done.is_empty());
        completer.complete(Ok(IoBuf::empty()));
        assert!(queue.wait_timeout(1, Duration::ZERO, &mut done));
        assert_eq!((done, ticket.is_done()), (vec![3], true));
    }

    #[test]
    fn a_time_without_end_is_waited_for() {
        let queue = CompletionQueue::new(1);
        let (ticket, completer) = Ticket::new();
        drop(queue.track(ticket, 5));
        let finisher = std::thread::spawn(move || drop(completer));
        let mut done = Vec::new();
        assert!(queue.wait_timeout(1, Duration::MAX, &mut done));
        finisher.join().unwrap();
        assert_eq!(done, [5]);
    }

    #[test]
    fn waiting_ends_when_enough_are_done() {
        let queue = CompletionQueue::new(2);
        let completers: Vec<_> = (0..3)
            .map(|tag| {
                let (ticket, completer) = Ticket::new();
                drop(queue.track(ticket, tag));
                completer
            })
            .collect();
        let finisher = std::thread::spawn(move || drop(completers));
        let mut done = Vec::new();
        queue.wait(3, &mut done);
        finisher.join().unwrap();
        done.sort_unstable();
        assert_eq!(done, [0, 1, 2]);
    }
}
