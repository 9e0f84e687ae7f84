//! Urgent requests go ahead of others that wait, and those do not starve.

use crate::rig::Rig;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use terrace_aio::{FileId, IoBuf, Request, Ticket, Urgency};

/// Requests that are not urgent: more than an engine has in flight at once, as each is several operations.
const OTHERS: usize = 40;
const OTHER_BYTES: usize = 512 << 10;
/// A thread that does not run in time finds a queue that is empty; a queue that ignores urgency is so every time.
const ATTEMPTS: usize = 50;

/// Urgent requests of a stream, and their bytes: more than an engine has in flight at once.
const STREAM: usize = 24;
const STREAM_BYTES: usize = 256 << 10;
/// Of these many the others must have had some turns.
const STREAM_MAX: usize = 2000;

pub fn urgent_requests_go_ahead_of_what_waits(rig: Rig) {
    let file = rig.create("a", OTHER_BYTES as u64);
    let attempts = (0..ATTEMPTS).map(|_| overtaken(&rig, file));
    let is_ahead = |&(waiting, first): &(usize, usize)| waiting >= OTHERS / 2 && first * 2 < waiting;
    let mut seen = Vec::new();
    let ahead = attempts.inspect(|attempt| seen.push(*attempt)).any(|attempt| is_ahead(&attempt));
    assert!(
        ahead,
        "requests that waited when an urgent one came, and those of them that were first: {seen:?}"
    );
}

/// How many of others are not done when an urgent request is submitted, and how many of those are before that is.
fn overtaken(rig: &Rig, file: FileId) -> (usize, usize) {
    let (done, others_first) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut requests: Vec<Request> =
        (0..OTHERS).map(|_| Request::read(file, 0, rig.zeroed(OTHER_BYTES))).collect();
    let urgent = Request::read(file, 0, rig.zeroed(1000)).with_urgency(Urgency::Soon);
    let mut others = Vec::new();
    rig.engine.submit_all(&mut requests, &mut others);
    let count = |ticket: Ticket| {
        let done = Arc::clone(&done);
        ticket.observed(move |_| {
            done.fetch_add(1, Ordering::SeqCst);
        })
    };
    let others: Vec<Ticket> = others.into_iter().map(count).collect();
    let before = done.load(Ordering::SeqCst);
    let (seen, at_end) = (Arc::clone(&done), Arc::clone(&others_first));
    let urgent = rig
        .engine
        .submit(urgent)
        .observed(move |_| at_end.store(seen.load(Ordering::SeqCst), Ordering::SeqCst));
    assert_eq!(urgent.wait().unwrap().len(), 1000);
    others.into_iter().for_each(|ticket| assert_eq!(ticket.wait().unwrap().len(), OTHER_BYTES));
    (OTHERS - before, others_first.load(Ordering::SeqCst).saturating_sub(before))
}

pub fn others_have_turns_beside_a_stream_of_urgent_requests(rig: Rig) {
    let file = rig.create("a", STREAM_BYTES as u64);
    let urgent = |buf: IoBuf| rig.engine.submit(Request::read(file, 0, buf).with_urgency(Urgency::Soon));
    let mut stream: VecDeque<Ticket> = (0..STREAM).map(|_| urgent(rig.zeroed(STREAM_BYTES))).collect();
    let other = rig.engine.submit(Request::read(file, 0, rig.zeroed(1000)));
    let mut finished = 0;
    while !other.is_done() {
        assert!(finished < STREAM_MAX, "{finished} urgent requests went ahead of another");
        let oldest = stream.pop_front().unwrap();
        stream.push_back(urgent(oldest.wait().unwrap()));
        finished += 1;
    }
    assert_eq!(other.wait().unwrap().len(), 1000);
    stream.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
}
