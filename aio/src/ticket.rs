//! The claim on one request in flight.
//!
//! A ticket is a one-shot slot shared with the engine through a [`Completer`]. Waiting blocks the thread; polling
//! registers a waker, so a ticket works under any async runtime. Dropping a ticket does not cancel the transfer:
//! the engine still owns the buffer and drops it when the completion arrives. [`Ticket::cancel`] asks for an early end.
//!
//! Tickets are made for every request, so their shared slots are used again: the half that is done last hands the slot
//! to a bounded free list.
//!
//! Two hooks serve decorators and the simulation. An *observer* sees the result before the ticket's owner does; it
//! runs where the completion is delivered, with no lock held, and must neither submit nor wait, so completions
//! never nest. A *driver* is an engine without threads of its own: whoever waits for one of its tickets does its
//! work, step by step.

use crate::completions::Tags;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::{IoBuf, IoError, IoErrorKind};
use smallvec::SmallVec;
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// The claim on one request in flight. Wait for it, await it, or drop it (the buffer is then parked).
#[must_use = "a request's result is only seen through its ticket"]
pub struct Ticket {
    /// `None` only while it is being taken apart.
    shared: Option<Arc<Shared>>,
    driver: Option<std::sync::Arc<dyn Drive>>,
}

/// The engine's half of a [`Ticket`]. Completing it hands over the buffer or the error.
#[derive(Debug)]
pub struct Completer {
    shared: Option<Arc<Shared>>,
}

/// An engine that only moves when it is told to, so that one thread and a seed determine everything.
pub trait Drive: Send + Sync {
    /// Does one step of work; `false` when there was none to do. Called with no lock of a ticket held.
    fn advance(&self) -> bool;
}

type Observer = Box<dyn FnOnce(&Result<IoBuf, IoError>) + Send>;

/// Where a completion is reported once the result is there.
type Report = (std::sync::Arc<Tags>, usize);

struct Shared {
    slot: Mutex<Slot>,
    done: Condvar,
    is_cancelled: AtomicBool,
}

struct Slot {
    state: State,
    /// The ticket and the completer, while they exist.
    halves: u8,
    /// A thread sleeps in `wait`: only then is there somebody to notify.
    is_waited_for: bool,
    /// The buffer goes home as soon as the request is done, whether or not anybody waits.
    release_early: bool,
    observers: SmallVec<[Observer; 2]>,
    reports: SmallVec<[Report; 1]>,
}

/// Slots whose two halves are gone, for the next tickets. (Loom's mutexes are not made outside its models.)
#[cfg(not(terrace_loom))]
static SPARE: Mutex<Vec<Arc<Shared>>> = Mutex::new(Vec::new());

/// Spare slots kept at most.
#[cfg(not(terrace_loom))]
const SPARE_MAX: usize = 1024;

#[derive(Debug)]
enum State {
    Pending(Option<Waker>),
    Done(Result<IoBuf, IoError>),
    Taken,
    /// The ticket was dropped: the result is to be dropped as well.
    Abandoned,
}

impl Ticket {
    /// A ticket and the completer that resolves it.
    pub fn new() -> (Self, Completer) {
        let shared = spare().unwrap_or_else(|| Arc::new(Shared::new()));
        (Self { shared: Some(Arc::clone(&shared)), driver: None }, Completer { shared: Some(shared) })
    }

    /// A ticket of an engine that is driven by whoever waits. Dropping it unresolved drives it to its end.
    pub fn driven(driver: std::sync::Arc<dyn Drive>) -> (Self, Completer) {
        let (mut ticket, completer) = Self::new();
        ticket.driver = Some(driver);
        (ticket, completer)
    }

    /// The same claim without the buffer: it goes back to its pool as soon as the request is done, and
    /// [`wait`](Self::wait) gives an empty one. For writes that are only waited for at a fence.
    pub fn without_buffer(self) -> Self {
        let mut slot = self.shared().lock();
        slot.release_early = true;
        let mut released = None;
        match std::mem::replace(&mut slot.state, State::Taken) {
            State::Done(result) => {
                let (result, buffer) = split_buffer(result);
                slot.state = State::Done(result);
                released = buffer;
            }
            State::Pending(_) => slot.state = State::Pending(None),
            // Polled to its end: there is no buffer any more.
            State::Taken | State::Abandoned => {}
        }
        drop(slot);
        drop(released);
        self
    }

    /// A ticket that is already resolved.
    pub fn ready(result: Result<IoBuf, IoError>) -> Self {
        let (ticket, completer) = Self::new();
        completer.complete(result);
        ticket
    }

    /// The same ticket, with `observer` called once on its result before the owner can see it: where the
    /// completion is delivered, or right here if that has happened. It runs even if the ticket is dropped. It must
    /// be short, must not panic (where a completion is delivered that is caught, and the ticket resolves), and must neither submit a request
    /// nor wait for one.
    pub fn observed(self, observer: impl FnOnce(&Result<IoBuf, IoError>) + Send + 'static) -> Self {
        let mut slot = self.shared().lock();
        match std::mem::replace(&mut slot.state, State::Taken) {
            State::Done(result) => {
                // The completer is spent and the ticket is ours: nobody else can look at the slot meanwhile.
                drop(slot);
                observer(&result);
                self.shared().lock().state = State::Done(result);
            }
            pending => {
                slot.state = pending;
                slot.observers.push(Box::new(observer));
                drop(slot);
            }
        }
        self
    }

    /// See [`CompletionQueue::track`](crate::CompletionQueue::track).
    pub(crate) fn tracked(self, tags: std::sync::Arc<Tags>, tag: usize) -> Self {
        let mut slot = self.shared().lock();
        if matches!(slot.state, State::Pending(_)) {
            slot.reports.push((tags, tag));
            drop(slot);
        } else {
            drop(slot);
            tags.report(tag);
        }
        self
    }

    /// Asks for an early end: what the engine has not started yet it leaves out, and the request then fails with
    /// [`IoErrorKind::Cancelled`]; bytes of a read's buffer and of a write's range are then partly transferred. A request
    /// that is wholly under way or done is not affected. Either way the ticket resolves, and the buffer stays with the
    /// engine until then.
    pub fn cancel(&self) {
        self.shared().is_cancelled.store(true, Ordering::Release);
    }

    fn shared(&self) -> &Shared {
        self.shared.as_ref().expect("a ticket has its slot until it is dropped")
    }

    /// Whether the result is there, so that [`wait`](Self::wait) would not block.
    pub fn is_done(&self) -> bool {
        if self.shared().is_pending()
            && let Some(driver) = &self.driver
        {
            driver.advance();
        }
        matches!(self.shared().lock().state, State::Done(_))
    }

    /// Blocks until the request is done and gives back its buffer.
    ///
    /// # Errors
    /// The transfer's [`IoError`]; the buffer has then gone back to its pool.
    ///
    /// # Panics
    /// If it was polled until it was ready: its result is gone.
    pub fn wait(self) -> Result<IoBuf, IoError> {
        self.drive();
        let shared = self.shared();
        let mut slot = shared.lock();
        loop {
            match std::mem::replace(&mut slot.state, State::Taken) {
                State::Done(result) => return result,
                State::Taken => {
                    drop(slot);
                    panic!("a ticket is not waited for after it was polled and ready");
                }
                pending => slot.state = pending,
            }
            slot.is_waited_for = true;
            slot = shared.done.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Does the driver's work until this ticket is resolved or nothing is left to do, in which case another thread
    /// is about to resolve it.
    fn drive(&self) {
        if let Some(driver) = &self.driver {
            while self.shared().is_pending() && driver.advance() {}
        }
    }
}

impl Future for Ticket {
    type Output = Result<IoBuf, IoError>;

    /// # Panics
    /// If it is polled again after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let advanced = match &self.driver {
            Some(driver) if self.shared().is_pending() => driver.advance(),
            _ => false,
        };
        let mut slot = self.shared().lock();
        match std::mem::replace(&mut slot.state, State::Taken) {
            State::Done(result) => Poll::Ready(result),
            State::Pending(_) => {
                slot.state = State::Pending(Some(cx.waker().clone()));
                drop(slot);
                if advanced {
                    // There may be more to do, and only polling does it.
                    cx.waker().wake_by_ref();
                }
                Poll::Pending
            }
            State::Taken | State::Abandoned => panic!("a ticket is not polled after it was ready"),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.drive();
        let Some(shared) = self.shared.take() else { return };
        let mut slot = shared.lock();
        let last = std::mem::replace(&mut slot.state, State::Abandoned);
        let is_over = slot.let_go();
        drop(slot);
        if is_over {
            keep_spare(shared);
        }
        // A finished but unclaimed buffer goes home here, outside the lock.
        drop(last);
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Completer {
    /// Resolves the ticket. If the ticket was dropped, the result is dropped here.
    pub fn complete(mut self, result: Result<IoBuf, IoError>) {
        if let Some(shared) = self.shared.take() {
            resolve(shared, result);
        }
    }

    /// Whether the ticket's owner has asked for an early end.
    pub fn is_cancelled(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.is_cancelled.load(Ordering::Acquire))
    }
}

impl Drop for Completer {
    /// A completer that is dropped unresolved (an engine that died) fails its ticket instead of hanging it.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            let detail = "the engine ended without completing the request".to_owned();
            let (kind, path) = (IoErrorKind::Closed, Path::new("a request"));
            resolve(shared, Err(IoError::new(kind, "waiting for", path, 0, 0, detail)));
        }
    }
}

impl Shared {
    fn new() -> Self {
        let is_cancelled = AtomicBool::new(false);
        Self { slot: Mutex::new(Slot::new()), done: Condvar::new(), is_cancelled }
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_pending(&self) -> bool {
        matches!(self.lock().state, State::Pending(_))
    }
}

impl Slot {
    fn new() -> Self {
        Self {
            state: State::Pending(None),
            halves: 2,
            is_waited_for: false,
            release_early: false,
            observers: SmallVec::new(),
            reports: SmallVec::new(),
        }
    }

    /// One half is done with the slot; true, with the slot as new, when it was the second. Its state must be
    /// nothing that has to be dropped outside the lock.
    fn let_go(&mut self) -> bool {
        self.halves -= 1;
        if self.halves == 0 {
            *self = Self::new();
            return true;
        }
        false
    }
}

/// A slot that is as new.
#[cfg(not(terrace_loom))]
fn spare() -> Option<Arc<Shared>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

/// Takes back a slot that nobody will touch again. (The other half may still be about to drop its reference.)
#[cfg(not(terrace_loom))]
fn keep_spare(shared: Arc<Shared>) {
    shared.is_cancelled.store(false, Ordering::Release);
    let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
    if spare.len() < SPARE_MAX {
        spare.push(shared);
    }
}

#[cfg(terrace_loom)]
fn spare() -> Option<Arc<Shared>> {
    None
}

#[cfg(terrace_loom)]
fn keep_spare(shared: Arc<Shared>) {
    drop(shared);
}

/// Gives a ticket its result and lets go of the slot.
fn resolve(shared: Arc<Shared>, mut result: Result<IoBuf, IoError>) {
    let mut slot = shared.lock();
    let mut is_released = false;
    loop {
        if !slot.observers.is_empty() {
            let observers = std::mem::take(&mut slot.observers);
            drop(slot);
            for observer in observers {
                observe(observer, &result);
            }
        } else if slot.release_early && !is_released {
            // Home before the owner sees the result, so that a fence's end means a free slot.
            drop(slot);
            let (rest, released) = split_buffer(result);
            drop(released);
            (result, is_released) = (rest, true);
        } else {
            break;
        }
        slot = shared.lock();
    }
    let reports = std::mem::take(&mut slot.reports);
    if let State::Pending(waker) = &mut slot.state {
        let waker = waker.take();
        slot.state = State::Done(result);
        let is_waited_for = slot.is_waited_for;
        // The ticket is still there, so this is never the second half.
        slot.let_go();
        drop(slot);
        if is_waited_for {
            shared.done.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    } else {
        debug_assert!(matches!(slot.state, State::Abandoned), "a completer resolves its ticket once");
        let is_over = slot.let_go();
        drop(slot);
        if is_over {
            keep_spare(shared);
        }
        drop(result);
    }
    reports.into_iter().for_each(|(tags, tag)| tags.report(tag));
}

/// Runs an observer. One that panics, which the thread's hook reports, takes neither its engine nor who waits with it.
fn observe(observer: Observer, result: &Result<IoBuf, IoError>) {
    if cfg!(terrace_loom) {
        observer(result);
    } else {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| observer(result)));
    }
}

/// Takes the buffer out of a result, leaving an empty one.
fn split_buffer(result: Result<IoBuf, IoError>) -> (Result<IoBuf, IoError>, Option<IoBuf>) {
    match result {
        Ok(buffer) => (Ok(IoBuf::empty()), Some(buffer)),
        Err(error) => (Err(error), None),
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot = self.lock();
        f.debug_struct("Shared")
            .field("state", &slot.state)
            .field("observers", &slot.observers.len())
            .finish()
    }
}

#[cfg(all(test, not(terrace_loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn failure() -> IoError {
        IoError::new(IoErrorKind::Device, "reading", Path::new("x"), 0, 0, "made".to_owned())
    }

    #[test]
    fn observers_run_before_the_owner_sees_the_result() {
        let seen = Arc::new(AtomicUsize::new(0));
        let count = |seen: &Arc<AtomicUsize>| {
            let seen = Arc::clone(seen);
            move |result: &Result<IoBuf, IoError>| {
                assert!(result.is_err());
                seen.fetch_add(1, Ordering::SeqCst);
            }
        };
        let (ticket, completer) = Ticket::new();
        let ticket = ticket.observed(count(&seen)).observed(count(&seen));
        completer.complete(Err(failure()));
        assert_eq!(seen.load(Ordering::SeqCst), 2);
        let ticket = ticket.observed(count(&seen));
        assert_eq!(seen.load(Ordering::SeqCst), 3);
        assert_eq!(ticket.wait().unwrap_err().kind, IoErrorKind::Device);
    }

    #[test]
    fn observers_of_a_dropped_ticket_run() {
        let seen = Arc::new(AtomicUsize::new(0));
        let also_seen = Arc::clone(&seen);
        let (ticket, completer) = Ticket::new();
        drop(ticket.observed(move |_| also_seen.store(1, Ordering::SeqCst)));
        assert_eq!(seen.load(Ordering::SeqCst), 0);
        completer.complete(Ok(IoBuf::empty()));
        assert_eq!(seen.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn an_observer_that_panics_keeps_nobody_waiting() {
        let seen = Arc::new(AtomicUsize::new(0));
        let also_seen = Arc::clone(&seen);
        let (ticket, completer) = Ticket::new();
        let ticket = ticket.observed(|_| panic!("made"));
        let ticket = ticket.observed(move |_| also_seen.store(1, Ordering::SeqCst));
        std::thread::spawn(move || completer.complete(Ok(IoBuf::zeroed(3)))).join().unwrap();
        assert_eq!((ticket.wait().unwrap().len(), seen.load(Ordering::SeqCst)), (3, 1));
    }

    /// It hung.
    #[test]
    fn a_ticket_is_claimed_once() {
        for without_buffer in [false, true] {
            let mut ticket = Ticket::ready(Ok(IoBuf::zeroed(3)));
            let polled = Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Ready(Ok(buffer)) if buffer.len() == 3));
            let ticket = if without_buffer { ticket.without_buffer() } else { ticket };
            let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ticket.wait()));
            let why = *again.unwrap_err().downcast::<&str>().unwrap();
            assert!(why.contains("after it was polled"), "{why}");
        }
    }

    #[test]
    fn a_lost_completer_closes_the_ticket() {
        let (ticket, completer) = Ticket::new();
        drop(completer);
        assert_eq!(ticket.wait().unwrap_err().kind, IoErrorKind::Closed);
    }

    #[test]
    fn waiting_blocks_until_another_thread_completes() {
        let (ticket, completer) = Ticket::new();
        let waiter = std::thread::spawn(move || ticket.wait().map(|buf| buf.len()));
        std::thread::sleep(std::time::Duration::from_millis(5));
        completer.complete(Ok(IoBuf::zeroed(7)));
        assert_eq!(waiter.join().unwrap().unwrap(), 7);
    }
}
