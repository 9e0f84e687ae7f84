//! The claim on one request in flight.
//!
//! A ticket is a one-shot slot shared with the engine through a [`Completer`]. Waiting blocks the thread; polling
//! registers a waker, so a ticket works under any async runtime. Dropping a ticket does not cancel the transfer:
//! the engine still owns the buffer and drops it when the completion arrives.

use crate::{IoBuf, IoError};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

/// The claim on one request in flight. Wait for it, await it, or drop it (the buffer is then parked).
#[must_use = "a request's result is only seen through its ticket"]
#[derive(Debug)]
pub struct Ticket {
    shared: Arc<Shared>,
}

/// The engine's half of a [`Ticket`]. Completing it hands over the buffer or the error.
#[derive(Debug)]
pub struct Completer {
    shared: Option<Arc<Shared>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

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
        let shared = Arc::new(Shared { state: Mutex::new(State::Pending(None)), done: Condvar::new() });
        (Self { shared: Arc::clone(&shared) }, Completer { shared: Some(shared) })
    }

    /// A ticket that is already resolved.
    pub fn ready(result: Result<IoBuf, IoError>) -> Self {
        let (ticket, completer) = Self::new();
        completer.complete(result);
        ticket
    }

    /// Whether the result is there, so that [`wait`](Self::wait) would not block.
    pub fn is_done(&self) -> bool {
        matches!(*self.shared.lock(), State::Done(_))
    }

    /// Blocks until the request is done and gives back its buffer.
    ///
    /// # Errors
    /// The transfer's [`IoError`]; the buffer has then gone back to its pool.
    pub fn wait(self) -> Result<IoBuf, IoError> {
        let mut state = self.shared.lock();
        loop {
            match std::mem::replace(&mut *state, State::Taken) {
                State::Done(result) => return result,
                pending => *state = pending,
            }
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Future for Ticket {
    type Output = Result<IoBuf, IoError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.lock();
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(result) => Poll::Ready(result),
            _ => {
                *state = State::Pending(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let last = std::mem::replace(&mut *state, State::Abandoned);
        drop(state);
        // A finished but unclaimed buffer goes home here, outside the lock.
        drop(last);
    }
}

impl Completer {
    /// Resolves the ticket. If the ticket was dropped, the result is dropped here.
    pub fn complete(mut self, result: Result<IoBuf, IoError>) {
        if let Some(shared) = self.shared.take() {
            shared.resolve(result);
        }
    }
}

impl Drop for Completer {
    /// A completer that is dropped unresolved (an engine that died) fails its ticket instead of hanging it.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.take() {
            let path = std::path::Path::new("");
            shared.resolve(Err(IoError::new(
                crate::IoErrorKind::Closed,
                "waiting for",
                path,
                0,
                0,
                "the engine ended without completing the request".into(),
            )));
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn resolve(&self, result: Result<IoBuf, IoError>) {
        let mut state = self.lock();
        match &mut *state {
            State::Pending(waker) => {
                let waker = waker.take();
                *state = State::Done(result);
                drop(state);
                self.done.notify_all();
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            State::Abandoned => {
                drop(state);
                drop(result);
            }
            State::Done(_) | State::Taken => unreachable!("a completer resolves its ticket once"),
        }
    }
}
