//! A request that fails leaves no trace: not in the file, not in the engine, not in the pool.

use crate::rig::{Rig, pattern, segment};
use smallvec::smallvec;
use terrace_aio::layer::Action;
use terrace_aio::{IoErrorKind, OpKind, Request, Ticket};

/// The requests, of those in flight together, that are made to fail.
const FAILING: [(usize, IoErrorKind); 4] = [
    (0, IoErrorKind::NoSpace),
    (3, IoErrorKind::Device),
    (17, IoErrorKind::NoSpace),
    (29, IoErrorKind::Device),
];

const COUNT: usize = 30;
const LEN: usize = 20_011;

fn fail(rig: &Rig, action: Action) {
    let faults = rig.faults.as_ref().expect("these cases run under the layer that injects faults");
    FAILING.iter().for_each(|&(nth, kind)| faults.fail_nth(action, nth as u64, kind));
}

/// The kind that request `i` is made to fail with.
fn planned(i: usize) -> Option<IoErrorKind> {
    FAILING.iter().find(|(nth, _)| *nth == i).map(|(_, kind)| *kind)
}

pub fn failed_writes_leave_their_neighbours_alone(rig: Rig) {
    let names = ["a", "b", "c"];
    let old = pattern(COUNT * LEN, 1);
    let new = pattern(COUNT * LEN, 2);
    let files = names.map(|name| rig.create(name, old.len() as u64));
    files.iter().for_each(|&file| rig.write(file, 0, &old));
    let pool = rig.pool(COUNT, LEN);
    fail(&rig, Action::Write);
    let submit = |i: usize| {
        let mut buf = pool.buf(i);
        buf.copy_from_slice(&new[i * LEN..(i + 1) * LEN]);
        rig.engine.submit(Request::write(files[i % 3], (i * LEN) as u64, buf))
    };
    let tickets: Vec<Ticket> = (0..COUNT).map(submit).collect();
    for (i, ticket) in tickets.into_iter().enumerate() {
        match (ticket.wait(), planned(i)) {
            (Ok(buf), None) => {
                assert!(buf[..] == new[i * LEN..(i + 1) * LEN], "write {i} changed its buffer");
            }
            (Err(error), Some(kind)) => {
                let (offset, path) = ((i * LEN) as u64, rig.path(names[i % 3]));
                assert_eq!((error.kind, error.offset, error.len), (kind, offset, LEN as u64), "{error}");
                assert_eq!(error.path, path);
            }
            (result, plan) => panic!("write {i}: planned {plan:?}, got {result:?}"),
        }
    }
    pool.wait_all();
    for (which, file) in files.into_iter().enumerate() {
        let got = rig.read(file, 0, old.len());
        for i in 0..COUNT {
            let is_new = i % 3 == which && planned(i).is_none();
            let want = if is_new { &new } else { &old };
            assert!(got[i * LEN..(i + 1) * LEN] == want[i * LEN..(i + 1) * LEN], "file {which}, range {i}");
        }
    }
}

pub fn failed_reads_fail_alone(rig: Rig) {
    let bytes = pattern(COUNT * LEN, 3);
    let files = ["a", "b", "c"].map(|name| rig.create(name, bytes.len() as u64));
    files.iter().for_each(|&file| rig.write(file, 0, &bytes));
    let pool = rig.pool(COUNT, 3 * LEN);
    fail(&rig, Action::Read);
    let submit = |i: usize| {
        // One request, a part from each file.
        let at = |part: usize| ((i + part * 7) % COUNT * LEN) as u64;
        let segments = (0..3).map(|part| segment(files[part], at(part), part * LEN, LEN)).collect();
        rig.engine.submit(Request::new(OpKind::Read, pool.buf(i), segments))
    };
    let tickets: Vec<Ticket> = (0..COUNT).map(submit).collect();
    for (i, ticket) in tickets.into_iter().enumerate() {
        match (ticket.wait(), planned(i)) {
            (Ok(buf), None) => {
                for part in 0..3 {
                    let at = (i + part * 7) % COUNT * LEN;
                    assert!(
                        buf[part * LEN..(part + 1) * LEN] == bytes[at..at + LEN],
                        "read {i}, part {part}"
                    );
                }
            }
            (Err(error), Some(kind)) => assert_eq!(error.kind, kind, "{error}"),
            (result, plan) => panic!("read {i}: planned {plan:?}, got {result:?}"),
        }
    }
    pool.wait_all();
}

pub fn failed_syncs_can_be_repeated(rig: Rig) {
    let file = rig.create("a", 100);
    rig.faults.as_ref().unwrap().fail_nth(Action::Sync, 0, IoErrorKind::Device);
    rig.write(file, 0, &[5; 100]);
    assert_eq!(rig.engine.sync(file).wait().unwrap_err().kind, IoErrorKind::Device);
    rig.engine.sync(file).wait().unwrap();
    assert_eq!(rig.read(file, 0, 100), [5; 100]);
}

/// Errors from below the layer look the same through it.
pub fn real_and_injected_errors_mix(rig: Rig) {
    let file = rig.create("a", 50_000);
    rig.faults.as_ref().unwrap().fail_nth(Action::Read, 1, IoErrorKind::NoSpace);
    let read = |len: usize| {
        let segments = smallvec![segment(file, 10_000, 0, len)];
        rig.engine.submit(Request::new(OpKind::Read, rig.zeroed(len), segments))
    };
    let tickets = [read(40_001), read(100), read(40_000)];
    let kinds = tickets.map(|ticket| ticket.wait().err().map(|error| error.kind));
    assert_eq!(kinds, [Some(IoErrorKind::UnexpectedEof), Some(IoErrorKind::NoSpace), None]);
}
