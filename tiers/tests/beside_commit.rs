//! Reads of what is being written, on another thread, beside the commit: they see the new bytes, and a write that failed is
//! never committed, whoever learned of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use terrace_aio::engine::{EngineConfig, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{IoEngine, IoErrorKind};
use terrace_tiers::{
    BlobKey, BlobKind, BlobSpec, DiskStore, Generation, GroupSpec, Lease, StoreSpec, Striping, TierError,
};

const CHUNK: u64 = 1 << 12;
const CHUNKS: usize = 3;
const GROUPS: usize = 4;

fn spec() -> StoreSpec {
    let group = |g| GroupSpec { name: format!("layers.{g}"), elements: CHUNK * CHUNKS as u64 };
    StoreSpec {
        groups: (0..GROUPS).map(group).collect(),
        kinds: vec![BlobSpec::plain(BlobKind::Weight, 2)],
        chunk_elements: CHUNK,
        generations: 2,
        identity: "{}".into(),
    }
}

fn plain() -> Arc<dyn IoEngine> {
    Arc::new(ThreadsEngine::new(&EngineConfig::default()).unwrap())
}

fn key(group: usize) -> BlobKey {
    BlobKey { group, kind: BlobKind::Weight }
}

fn lease(chunks: usize, byte: u8) -> Lease {
    let mut lease = Lease::standalone(chunks * CHUNK as usize * 2);
    lease.fill(byte);
    lease
}

fn newest(store: &DiskStore, group: usize) -> Result<u8, TierError> {
    let bytes = store.read(key(group), 0..CHUNKS, Generation::Newest, lease(CHUNKS, 0))?.wait()?;
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "group {group} is of one step");
    Ok(bytes[0])
}

/// Whoever waited for it: a reader of the blob is told of the write, not of bytes that are not those of the step.
#[test]
fn a_write_that_failed_is_what_later_readers_hear_of() {
    let dir = tempfile::tempdir().unwrap();
    for generations in [1, 2] {
        let engine = Arc::new(FaultLayer::new(plain(), FaultConfig::default()));
        let disks = [dir.path().join(generations.to_string())];
        let spec = StoreSpec { generations, ..spec() };
        let store = DiskStore::create(&(Arc::clone(&engine) as _), &Striping::equal(&disks), spec).unwrap();
        let (written, read) = step(&store, 1);
        written.unwrap();
        read.unwrap();
        engine.fail_nth(Action::Write, 1, IoErrorKind::Device);
        for chunk in 0..CHUNKS {
            // A write that follows may learn of it, too.
            let _ = store.write(key(0), chunk, lease(1, 2));
        }
        let failed = store.settle().expect_err("one of them failed").to_string();
        for generation in [Generation::Newest, Generation::Next, Generation::Settled] {
            let read = store.read(key(0), 0..CHUNKS, generation, lease(CHUNKS, 0));
            assert_eq!(read.map(drop).expect_err("it was not written").to_string(), failed, "{generation:?}");
        }
    }
}

/// Writes a step, group after group, and commits it, while another thread reads every group as soon as it was written.
/// After a failed commit the step before is the newest again.
fn step(store: &DiskStore, step: u8) -> (Result<(), TierError>, Result<(), TierError>) {
    let written = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut is_old = false;
            for group in 0..GROUPS {
                while written.load(Ordering::Acquire) <= group {
                    std::hint::spin_loop();
                }
                if written.load(Ordering::Acquire) > GROUPS {
                    break;
                }
                let found = newest(store, group)?;
                assert!(found == step || found == step - 1, "group {group} is of step {found}");
                is_old |= found != step;
            }
            Ok(is_old)
        });
        let write = || {
            for group in 0..GROUPS {
                (0..CHUNKS).try_for_each(|chunk| store.write(key(group), chunk, lease(1, step)))?;
                written.fetch_add(1, Ordering::Release);
            }
            store.commit(u64::from(step), &[])
        };
        let result = write();
        // A reader that waits for more need not.
        written.store(GROUPS + usize::from(result.is_err()), Ordering::Release);
        let read = reader.join().expect("the reader does not panic");
        assert!(result.is_err() || !matches!(read, Ok(true)), "step {step} was written before it was read");
        (result, read.map(drop))
    })
}

#[test]
fn readers_see_the_step_that_is_being_committed() {
    let dir = tempfile::tempdir().unwrap();
    let store = DiskStore::create(&plain(), &Striping::equal(&[dir.path().join("state")]), spec()).unwrap();
    for number in 1..60 {
        let (written, read) = step(&store, number);
        written.unwrap();
        read.unwrap();
        assert_eq!(newest(&store, 0).unwrap(), number, "nothing newer is the live one");
    }
}

#[test]
fn a_write_that_a_reader_found_failed_is_not_committed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut by_reader, mut attempts) = (0, 0);
    for nth in 0..GROUPS * CHUNKS * 4 {
        let faults = Arc::new(FaultLayer::new(plain(), FaultConfig::default()));
        // Failures come late, too, so that readers wait for them.
        let late = FaultConfig {
            seed: nth as u64,
            delay_one_in: 1,
            delay_max: Duration::from_millis(2),
            ..FaultConfig::default()
        };
        let engine: Arc<dyn IoEngine> = Arc::new(FaultLayer::new(Arc::clone(&faults) as _, late));
        let disks = [dir.path().join(nth.to_string())];
        let store = DiskStore::create(&engine, &Striping::equal(&disks), spec()).unwrap();
        let (written, read) = step(&store, 1);
        written.unwrap();
        read.unwrap();
        faults.fail_nth(Action::Write, (nth % (GROUPS * CHUNKS)) as u64, IoErrorKind::Device);
        let (written, read) = step(&store, 2);
        assert_eq!(faults.injected(), 1, "{nth}");
        written.expect_err("nobody may commit this");
        store.abandon();
        by_reader += usize::from(read.is_err());
        attempts += 1;
        assert_eq!((store.committed().step, newest(&store, 0).unwrap()), (1, 1), "{nth}");
        // It was an error of the moment: the step can be done again.
        let (written, read) = step(&store, 2);
        written.unwrap();
        read.unwrap();
        assert_eq!(newest(&store, GROUPS - 1).unwrap(), 2);
    }
    println!("the reader learned of {by_reader} failures of {attempts}");
}

/// Whoever holds a commit reads it at leisure: the next step is written beside it, and committed when it is let go.
#[test]
fn a_commit_waits_for_who_holds_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let store = DiskStore::create(&plain(), &Striping::equal(&[dir.path().join("state")]), spec()).unwrap();
    let store = Arc::new(store);
    let write = |number: u64| {
        for (group, chunk) in (0..GROUPS).flat_map(|group| (0..CHUNKS).map(move |chunk| (group, chunk))) {
            store.write(key(group), chunk, lease(1, number as u8)).unwrap();
        }
        store.commit(number, &[])
    };
    write(1).unwrap();
    for number in 1..20 {
        let held = store.hold().unwrap();
        let also = store.hold().unwrap();
        std::thread::scope(|scope| {
            let next = scope.spawn(|| write(number + 1));
            for group in 0..GROUPS {
                let bytes = also.read(key(group), 0..CHUNKS, lease(CHUNKS, 0)).unwrap().wait().unwrap();
                assert!(
                    bytes.iter().all(|byte| u64::from(*byte) == number),
                    "group {group} of step {number}"
                );
            }
            drop(also);
            assert!(!next.is_finished(), "one of two still holds it");
            assert_eq!((held.committed().step, store.committed().step), (number, number));
            drop(held);
            next.join().expect("it does not panic").unwrap();
        });
        assert_eq!(store.committed().step, number + 1);
    }
}
