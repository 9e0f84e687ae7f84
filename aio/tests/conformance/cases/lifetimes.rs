//! Who owns a buffer when, and that every ticket resolves.

use crate::rig::{Rig, pattern};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use terrace_aio::{IoErrorKind, Request, Ticket};

pub fn dropped_tickets_park_their_buffers(rig: Rig) {
    const COUNT: usize = 40;
    const LEN: usize = 50_001;
    let file = rig.create("a", (COUNT * LEN) as u64);
    let pool = rig.pool(2 * COUNT, LEN);
    let bytes = pattern(COUNT * LEN, 5);
    for (slot, part) in bytes.chunks(LEN).enumerate() {
        let mut buf = pool.buf(slot);
        buf.copy_from_slice(part);
        drop(rig.engine.submit(Request::write(file, (slot * LEN) as u64, buf)));
    }
    for slot in COUNT..2 * COUNT {
        drop(rig.engine.submit(Request::read(file, 0, pool.buf(slot))));
    }
    pool.wait_all();
    // The pool poisons what comes back: a buffer returned too early would have written that poison.
    assert!(rig.read(file, 0, bytes.len()) == bytes, "a buffer came back before its write was done");
}

pub fn failed_requests_give_their_buffers_back(rig: Rig) {
    let file = rig.create("a", 1000);
    let pool = rig.pool(3, 4096);
    let read = Request::read(file, 0, pool.buf(0));
    assert!(rig.engine.submit(read).wait().is_err());
    rig.engine.close(file).unwrap();
    assert!(rig.engine.submit(Request::read(file, 0, pool.buf(1))).wait().is_err());
    drop(rig.engine.submit(Request::write(file, 0, pool.buf(2))));
    pool.wait_all();
}

pub fn an_engine_may_be_dropped_with_requests_in_flight(rig: Rig) {
    const COUNT: usize = 30;
    let file = rig.create("a", 200_000);
    let pool = rig.pool(COUNT, 200_000);
    let submit = |slot: usize| {
        let buf = pool.buf(slot);
        rig.engine.submit(if slot.is_multiple_of(2) {
            Request::read(file, 0, buf)
        } else {
            Request::write(file, 0, buf)
        })
    };
    let mut tickets: Vec<Ticket> = (0..COUNT).map(submit).collect();
    tickets.push(rig.engine.sync(file));
    tickets.truncate(COUNT - 3);
    drop(rig);
    for ticket in tickets {
        match ticket.wait() {
            Ok(buf) => assert_eq!(buf.len(), 200_000),
            Err(error) => assert_eq!(error.kind, IoErrorKind::Closed, "{error}"),
        }
    }
    pool.wait_all();
}

pub fn closing_waits_for_requests(rig: Rig) {
    let bytes = pattern(300_000, 6);
    let file = rig.create("a", bytes.len() as u64);
    let tickets: Vec<Ticket> = bytes
        .chunks(10_000)
        .enumerate()
        .map(|(i, part)| rig.engine.submit(Request::write(file, i as u64 * 10_000, rig.buf_of(part))))
        .collect();
    rig.engine.close(file).unwrap();
    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    let file = rig.engine.open(&rig.path("a"), terrace_aio::OpenMode::Read).unwrap();
    assert!(rig.read(file, 0, bytes.len()) == bytes);
}

pub fn syncing_resolves_to_nothing(rig: Rig) {
    let file = rig.create("a", 10_000);
    rig.write(file, 0, &[1; 10_000]);
    for _ in 0..3 {
        assert_eq!(rig.engine.sync(file).wait().unwrap().len(), 0);
    }
}

pub fn tickets_are_futures(rig: Rig) {
    let bytes = pattern(100_000, 7);
    let file = rig.create("a", bytes.len() as u64);
    block_on(rig.engine.submit(Request::write(file, 0, rig.buf_of(&bytes)))).unwrap();
    let read = |i: usize| rig.engine.submit(Request::read(file, i as u64 * 100, rig.zeroed(50_000)));
    let mut tickets: Vec<Option<Ticket>> = (0..20).map(|i| Some(read(i))).collect();
    // All are polled together, so that each has a waker before any is done.
    let all = std::future::poll_fn(|cx| {
        for (i, slot) in tickets.iter_mut().enumerate() {
            if let Some(ticket) = slot
                && let Poll::Ready(result) = pin!(ticket).poll(cx)
            {
                assert!(result.unwrap()[..] == bytes[i * 100..i * 100 + 50_000]);
                *slot = None;
            }
        }
        if tickets.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    });
    block_on(all);
}

pub fn observers_run_once_and_first(rig: Rig) {
    let file = rig.create("a", 100_000);
    let seen = Arc::new(AtomicUsize::new(0));
    for round in 1..=20 {
        let also_seen = Arc::clone(&seen);
        let ticket = rig.engine.submit(Request::read(file, 0, rig.zeroed(100_000))).observed(move |result| {
            assert_eq!(result.as_ref().unwrap().len(), 100_000);
            also_seen.fetch_add(1, Ordering::SeqCst);
        });
        ticket.wait().unwrap();
        assert_eq!(seen.load(Ordering::SeqCst), round);
    }
}

/// The smallest executor: parks the thread between polls.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
