//! A store in hands that know it from its documentation alone: what is not to be is refused before anything is done.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_tiers::{
    BlobKey, BlobKind, BlobSpec, DiskStore, Generation, GroupSpec, Lease, PendingRead, Pool, StoreSpec,
    Striping, TRAINER_BYTES_MAX, TierError,
};

const CHUNK_BYTES: usize = 8192;

fn disk(seed: u64) -> Arc<dyn IoEngine> {
    Arc::new(SimEngine::new(SimConfig { seed, ..SimConfig::default() }))
}

/// Two groups of two chunks.
fn spec() -> StoreSpec {
    StoreSpec {
        groups: ["first", "second"].map(|name| GroupSpec { name: name.into(), elements: 8192 }).to_vec(),
        kinds: vec![BlobSpec::plain(BlobKind::Weight, 2)],
        chunk_elements: 4096,
        generations: 2,
        identity: String::new(),
    }
}

fn create(engine: &Arc<dyn IoEngine>, spec: StoreSpec) -> Result<DiskStore, TierError> {
    DiskStore::create(engine, &Striping::equal(&[PathBuf::from("/disk")]), spec)
}

fn key(group: usize) -> BlobKey {
    BlobKey { group, kind: BlobKind::Weight }
}

fn filled(value: u8) -> Lease {
    let mut lease = Lease::standalone(CHUNK_BYTES);
    lease.fill(value);
    lease
}

fn write_all(store: &DiskStore, value: u8) {
    for (group, chunk) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        store.write(key(group), chunk, filled(value)).unwrap();
    }
}

fn read(store: &DiskStore, group: usize, chunk: usize) -> Result<u8, String> {
    let lease = Lease::standalone(CHUNK_BYTES);
    let pending = store.read(key(group), chunk..chunk + 1, Generation::Live, lease);
    let lease = pending.and_then(PendingRead::wait).map_err(|error| error.to_string())?;
    assert!(lease.iter().all(|byte| *byte == lease[0]));
    Ok(lease[0])
}

fn panic_of(work: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(work)).expect_err("it panics");
    payload.downcast_ref::<String>().cloned().unwrap_or_default()
}

/// The next chunk's place is another group's.
#[test]
fn a_chunk_that_a_group_does_not_have() {
    let store = create(&disk(0), spec()).unwrap();
    write_all(&store, 7);
    let past = "chunk 2 is one of the 2 of group first";
    let message = panic_of(|| store.write(key(0), 2, filled(99)).unwrap());
    assert!(message.contains(past), "{message}");
    store.commit(1, b"").unwrap();
    let message = panic_of(|| drop(read(&store, 0, 2)));
    assert!(message.contains(past), "{message}");
    assert_eq!([read(&store, 1, 0), read(&store, 1, 1)], [Ok(7), Ok(7)]);
}

/// The writes of a chunk are not in flight at once: which comes last would be up to the drive.
#[test]
fn a_chunk_that_is_written_again() {
    for seed in 0..200 {
        let store = create(&disk(seed), spec()).unwrap();
        write_all(&store, 1);
        write_all(&store, 2);
        store.write(key(1), 0, filled(3)).unwrap();
        store.commit(1, b"").unwrap();
        let found = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(group, chunk)| read(&store, group, chunk));
        assert_eq!(found, [Ok(2), Ok(2), Ok(3), Ok(2)], "seed {seed}");
    }
}

#[test]
fn what_was_never_committed() {
    let store = Arc::new(create(&disk(0), spec()).unwrap());
    let nothing = "nothing was committed yet";
    assert!(read(&store, 0, 0).unwrap_err().contains(nothing));
    assert!(store.hold().unwrap_err().to_string().contains(nothing));
    write_all(&store, 1);
    store.commit(1, b"").unwrap();
    assert_eq!(read(&store, 0, 0), Ok(1));
}

/// Both panicked. The store is as it was, and what is missing can still be written.
#[test]
fn a_commit_of_what_was_not_written() {
    let said = |result: Result<(), TierError>| result.unwrap_err().to_string();
    for generations in [1, 2] {
        let store = create(&disk(0), StoreSpec { generations, ..spec() }).unwrap();
        let words = "4 of 4 were not: chunk 0 of the weights of group first is the first";
        assert!(said(store.commit(1, b"")).contains(words), "{generations}");
        assert!(said(store.commit_unchanged(1, b"")).contains("nothing was committed yet"));
        store.write(key(0), 0, filled(1)).unwrap();
        store.write(key(0), 1, filled(1)).unwrap();
        store.write(key(1), 1, filled(1)).unwrap();
        let words = "1 of 4 were not: chunk 0 of the weights of group second is the first";
        assert!(said(store.commit(1, b"")).contains(words), "{generations}");
        assert!(!store.is_committed() && !store.is_uncertain());
        store.write(key(1), 0, filled(1)).unwrap();
        store.commit(1, b"").unwrap();
        let chunks = [(0, 0), (0, 1), (1, 0), (1, 1)];
        assert_eq!(chunks.map(|(group, chunk)| read(&store, group, chunk)), [1; 4].map(Ok));
        assert!(said(store.commit(2, b"")).contains("4 of 4 were not"));
        store.write(key(0), 0, filled(2)).unwrap();
        let refused = store.commit_unchanged(2, b"");
        if generations == 1 {
            assert!(said(refused).contains("was being overwritten"));
            for (group, chunk) in [(0, 1), (1, 0), (1, 1)] {
                store.write(key(group), chunk, filled(2)).unwrap();
            }
            store.commit(2, b"").unwrap();
            assert_eq!(read(&store, 0, 0), Ok(2));
        } else {
            refused.unwrap();
            assert_eq!(read(&store, 0, 0), Ok(1));
        }
        assert_eq!(store.committed().step, 2);
    }
}

/// The store is as it was.
#[test]
fn a_note_that_is_too_long() {
    let store = create(&disk(0), spec()).unwrap();
    write_all(&store, 1);
    let (longest, longer) = (vec![5; TRAINER_BYTES_MAX], vec![5; TRAINER_BYTES_MAX + 1]);
    let refused = store.commit(1, &longer).unwrap_err().to_string();
    assert!(refused.contains("the trainer's note has 16385 bytes; a commit has room for 16384"), "{refused}");
    store.commit(1, &longest).unwrap();
    store.commit_unchanged(2, &longer).unwrap_err();
    store.commit_unchanged(2, b"").unwrap();
    assert_eq!(read(&store, 0, 0), Ok(1));
}

#[test]
fn layouts_that_are_none() {
    type Change = fn(&mut StoreSpec);
    let changes: [(Change, &str); 8] = [
        (|spec| spec.generations = 0, "has 0 generations; there may be 1 or 2"),
        (|spec| spec.generations = u64::MAX, "generations; there may be 1 or 2"),
        (|spec| spec.chunk_elements = 0, "chunks of no elements"),
        (|spec| spec.kinds[0].block_elements = 0, "weights in blocks of nothing"),
        (|spec| spec.kinds[0].block_elements = 3, "cuts blocks of 3 weights into chunks of 4096"),
        (|spec| spec.kinds.push(spec.kinds[0]), "has weights twice"),
        (|spec| spec.groups[1].elements = u64::MAX, "more bytes than files can"),
        (|spec| spec.kinds[0].block_bytes = 1 << 62, "more bytes than files can"),
    ];
    for (change, words) in changes {
        let mut spec = spec();
        change(&mut spec);
        let refused = create(&disk(0), spec).unwrap_err().to_string();
        assert!(refused.starts_with("the layout of a store ") && refused.contains(words), "{refused}");
    }
}

/// Sizes that wrap made pools of one page of which leases were given out that reach far beyond.
#[test]
fn pools_of_more_than_there_is() {
    for (slots, bytes) in [(1 << 20, 1 << 44), (4, usize::MAX), (usize::MAX, 1 << 20)] {
        Pool::new("too large", slots, bytes).unwrap_err();
    }
    let pool = Pool::new("small", 1, 4096).unwrap();
    assert!(panic_of(|| drop(pool.acquire(4097))).contains("fit a slot of pool small"));
    assert!(panic_of(|| drop(pool.try_acquire(4097))).contains("fit a slot of pool small"));
    // The slot was not lost.
    assert_eq!(pool.acquire(4096).len(), 4096);
}
