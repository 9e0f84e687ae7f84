//! Every interleaving of what a ticket's owner and its engine may do at once, explored by loom.
//!
//! `RUSTFLAGS="--cfg terrace_loom" cargo test -p terrace-aio --release --test loom_ticket`
//!
//! The buffers come from a home that counts: whatever the order, each goes home exactly once, the owner sees the result
//! exactly once, and nobody waits for ever (loom reports that as a deadlock).
#![cfg(terrace_loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use std::path::Path;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll, Wake, Waker};
use terrace_aio::{BUF_ALIGN, BufHome, Completer, IoBuf, IoError, IoErrorKind, Ticket};

/// Counts the buffers that came home.
struct Home(AtomicUsize);

impl Home {
    fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self(AtomicUsize::new(0)))
    }

    fn buf(self: &std::sync::Arc<Self>) -> IoBuf {
        let aligned = NonNull::new(std::ptr::without_provenance_mut(BUF_ALIGN)).unwrap();
        // SAFETY: a buffer without bytes needs no memory.
        unsafe { IoBuf::from_home(aligned, 0, std::sync::Arc::clone(self) as std::sync::Arc<dyn BufHome>, 0) }
    }

    fn returned(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl BufHome for Home {
    fn give_back(&self, _: usize) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn failure() -> IoError {
    IoError::new(IoErrorKind::Device, "reading", Path::new("x"), 0, 0, "made".to_owned())
}

/// Completes with a buffer of `home` on another thread, while `owner` does what it does with the ticket.
fn against_completion(owner: fn(Ticket, &Home)) {
    loom::model(move || {
        let home = Home::new();
        let (ticket, completer) = Ticket::new();
        let buf = home.buf();
        let engine = thread::spawn(move || completer.complete(Ok(buf)));
        owner(ticket, &home);
        engine.join().unwrap();
        assert_eq!(home.returned(), 1, "the buffer goes home exactly once");
    });
}

#[test]
fn waiting() {
    against_completion(|ticket, home| {
        let buf = ticket.wait().unwrap();
        assert_eq!(home.returned(), 0, "the owner has it");
        drop(buf);
    });
}

#[test]
fn asking_then_waiting() {
    against_completion(|ticket, _| {
        let was_done = ticket.is_done();
        let is_done = ticket.is_done();
        assert!(is_done || !was_done, "what is done stays done");
        drop(ticket.wait().unwrap());
    });
}

#[test]
fn dropping() {
    against_completion(|ticket, _| drop(ticket));
}

#[test]
fn waiting_without_the_buffer() {
    against_completion(|ticket, home| {
        let buf = ticket.without_buffer().wait().unwrap();
        assert_eq!((buf.len(), home.returned()), (0, 1), "the buffer is home before the wait ends");
    });
}

#[test]
fn dropping_without_the_buffer() {
    against_completion(|ticket, _| drop(ticket.without_buffer()));
}

#[test]
fn a_lost_completer() {
    loom::model(|| {
        let (ticket, completer) = Ticket::new();
        let engine = thread::spawn(move || drop(completer));
        assert_eq!(ticket.wait().unwrap_err().kind, IoErrorKind::Closed);
        engine.join().unwrap();
    });
}

#[test]
fn a_failed_request() {
    loom::model(|| {
        let (ticket, completer) = Ticket::new();
        let engine = thread::spawn(move || completer.complete(Err(failure())));
        assert_eq!(ticket.without_buffer().wait().unwrap_err().kind, IoErrorKind::Device);
        engine.join().unwrap();
    });
}

/// Attaches two observers, then goes on with `owner`; both must have run once when the result is seen.
fn observed(owner: fn(Ticket, &AtomicUsize), complete: fn(Completer)) {
    loom::model(move || {
        let seen = Arc::new(AtomicUsize::new(0));
        let (ticket, completer) = Ticket::new();
        let engine = thread::spawn(move || complete(completer));
        let observer = || {
            let seen = Arc::clone(&seen);
            move |_: &Result<IoBuf, IoError>| {
                seen.fetch_add(1, Ordering::SeqCst);
            }
        };
        owner(ticket.observed(observer()).observed(observer()), &seen);
        engine.join().unwrap();
        assert_eq!(seen.load(Ordering::SeqCst), 2, "every observer runs once");
    });
}

#[test]
fn observing_and_waiting() {
    let owner = |ticket: Ticket, seen: &AtomicUsize| {
        drop(ticket.wait());
        assert_eq!(seen.load(Ordering::SeqCst), 2, "observers run before the owner sees the result");
    };
    observed(owner, |completer| completer.complete(Ok(IoBuf::empty())));
    observed(owner, drop);
}

#[test]
fn observing_and_dropping() {
    observed(|ticket, _| drop(ticket), |completer| completer.complete(Ok(IoBuf::empty())));
}

/// The smallest executor: sleeps until it is woken.
struct Alarm {
    rings: loom::sync::Mutex<usize>,
    ringing: loom::sync::Condvar,
}

impl Wake for Alarm {
    fn wake(self: std::sync::Arc<Self>) {
        *self.rings.lock().unwrap() += 1;
        self.ringing.notify_one();
    }
}

impl Alarm {
    fn new() -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { rings: loom::sync::Mutex::new(0), ringing: loom::sync::Condvar::new() })
    }

    fn sleep(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.ringing.wait(rings).unwrap();
        }
        *rings -= 1;
    }
}

fn poll(ticket: &mut Ticket, alarm: &std::sync::Arc<Alarm>) -> Poll<Result<IoBuf, IoError>> {
    let waker = Waker::from(std::sync::Arc::clone(alarm));
    Pin::new(ticket).poll(&mut Context::from_waker(&waker))
}

fn block_on(mut ticket: Ticket) -> Result<IoBuf, IoError> {
    let alarm = Alarm::new();
    loop {
        match poll(&mut ticket, &alarm) {
            Poll::Ready(result) => return result,
            Poll::Pending => alarm.sleep(),
        }
    }
}

#[test]
fn awaiting() {
    against_completion(|ticket, _| drop(block_on(ticket).unwrap()));
}

#[test]
fn awaiting_without_the_buffer() {
    against_completion(|ticket, _| assert_eq!(block_on(ticket.without_buffer()).unwrap().len(), 0));
}

#[test]
fn a_task_that_moves_is_woken_by_its_last_waker() {
    against_completion(|mut ticket, _| {
        if let Poll::Ready(result) = poll(&mut ticket, &Alarm::new()) {
            drop(result.unwrap());
            return;
        }
        drop(block_on(ticket).unwrap());
    });
}

#[test]
fn giving_up_after_a_poll() {
    against_completion(|mut ticket, _| {
        if let Poll::Ready(result) = poll(&mut ticket, &Alarm::new()) {
            drop(result.unwrap());
        }
    });
}
