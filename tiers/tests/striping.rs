//! Stripes in proportion to the speed of the paths: what is written comes back, from where it was put, however it is opened.

use proptest::prelude::*;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{EngineChoice, EngineConfig, SimConfig, SimEngine, open_default};
use terrace_aio::{FileId, IoEngine, Registration, Request, Ticket};
use terrace_tiers::{
    BlobKey, BlobKind, BlobSpec, DiskStore, Generation, GroupSpec, Lease, Pool, STRIPE_BYTES, Scratch,
    ScratchChunk, StoreSpec, Striping, checksum,
};

const HEADER_BYTES: u64 = 4096;

fn spec(elements: u64) -> StoreSpec {
    StoreSpec {
        groups: vec![GroupSpec { name: "layers.0".into(), elements }],
        kinds: vec![BlobSpec::plain(BlobKind::Master, 4)],
        chunk_elements: 300 << 10,
        generations: 2,
        identity: "{}".into(),
    }
}

fn real() -> Arc<dyn IoEngine> {
    open_default(&EngineConfig { choice: EngineChoice::Threads, ..EngineConfig::default() }).unwrap()
}

fn contents(chunk: usize, len: usize) -> Lease {
    let mut lease = Lease::standalone(len);
    for (index, word) in lease.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((index as u64) << 20 | chunk as u64).to_le_bytes());
    }
    lease
}

const KEY: BlobKey = BlobKey { group: 0, kind: BlobKind::Master };

fn write(store: &mut DiskStore, step: u64) {
    for chunk in 0..store.spec().chunks(0) {
        let len = store.spec().chunk_len(0, chunk) * 4;
        store.write(KEY, chunk, contents(chunk, len)).unwrap();
    }
    store.commit(step, &[]).unwrap();
}

fn verify(store: &DiskStore) {
    for chunk in 0..store.spec().chunks(0) {
        let len = store.spec().chunk_len(0, chunk) * 4;
        let read = store.read(KEY, chunk..chunk + 1, Generation::Live, Lease::standalone(len)).unwrap();
        assert_eq!(*read.wait().unwrap(), *contents(chunk, len), "chunk {chunk}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Requests of 1.2 MiB over 1 to 4 paths of odd weights, on files of exactly the promised length.
    #[test]
    fn what_is_written_is_read_back(
        weights in prop::collection::vec(0.3..9.0, 1..5),
        pages in 600u64..2000,
        seed in 0u64..1000,
    ) {
        let disk: Arc<dyn IoEngine> = Arc::new(SimEngine::new(SimConfig { seed, ..SimConfig::default() }));
        let dirs: Vec<PathBuf> = (0..weights.len()).map(|i| PathBuf::from(format!("/disk{i}"))).collect();
        let striping = Striping::weighted(&dirs, &weights).unwrap();
        let spec = spec(pages * 1024);
        let promised = DiskStore::bytes_per_dir(&spec, &striping);
        let needed = spec.volume_bytes().div_ceil(STRIPE_BYTES) * STRIPE_BYTES;
        prop_assert_eq!(promised.iter().map(|bytes| bytes - 2 * HEADER_BYTES).sum::<u64>(), needed);
        let mut store = DiskStore::create(&disk, &striping, spec).unwrap();
        write(&mut store, 0);
        write(&mut store, 1);
        verify(&store);
        drop(store);
        for (dir, promised) in dirs.iter().zip(promised) {
            let file = disk.open(&dir.join("state.bin"), terrace_aio::OpenMode::Read).unwrap();
            prop_assert_eq!(disk.len(file).unwrap(), promised);
            disk.close(file).unwrap();
        }
        // Opening takes no weights: the files know theirs.
        let store = DiskStore::open(&disk, &dirs).unwrap();
        prop_assert_eq!(store.striping(), &striping);
        verify(&store);
    }
}

#[test]
fn directories_of_a_weighted_store_keep_their_order() {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["a", "b", "c"].map(|name| root.path().join(name));
    let striping = Striping::weighted(&dirs, &[3.0, 1.0, 2.0]).unwrap();
    write(&mut DiskStore::create(&real(), &striping, spec(2 << 20)).unwrap(), 0);
    let swapped = [dirs[0].clone(), dirs[2].clone(), dirs[1].clone()];
    let error = DiskStore::open(&real(), &swapped).unwrap_err().to_string();
    assert!(error.contains("c/state.bin") && error.contains("original order"), "{error}");
    let store = DiskStore::open(&real(), &dirs).unwrap();
    assert_eq!(store.striping().shares(), [3, 1, 2]);
    verify(&store);
}

/// Rewrites both copies of a header: `change` gets the page, the checksum is made anew as the version in it asks for.
fn with_header(path: &std::path::Path, change: impl Fn(&mut [u8])) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut page = vec![0; HEADER_BYTES as usize];
    file.read_exact_at(&mut page, 0).unwrap();
    change(&mut page);
    let sum = if page[8] == 1 {
        checksum(&page[..40])
    } else {
        page[40..48].fill(0);
        checksum(&page)
    };
    page[40..48].copy_from_slice(&sum.to_le_bytes());
    let last = file.metadata().unwrap().len() - HEADER_BYTES;
    for at in [0, last] {
        file.write_all_at(&page, at).unwrap();
    }
    file.sync_all().unwrap();
}

#[test]
fn versions_1_and_2_read_as_they_did_and_others_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["a", "b"].map(|name| root.path().join(name));
    let equal = Striping::equal(&dirs);
    write(&mut DiskStore::create(&real(), &equal, spec(1 << 20)).unwrap(), 0);
    for dir in &dirs {
        with_header(&dir.join("state.bin"), |page| {
            page[8] = 1;
            page[20..24].fill(0);
            page[48..].fill(0);
        });
    }
    let is_whole = || {
        let store = DiskStore::open(&real(), &dirs).unwrap();
        assert_eq!(store.striping(), &equal);
        assert!(store.recoveries().is_empty(), "there is no second copy to be damaged");
        verify(&store);
    };
    is_whole();
    for dir in &dirs {
        with_header(&dir.join("state.bin"), |page| {
            page[8] = 2;
            page[20] = 2;
            page[49] = 1;
        });
        // Nothing follows the stripes.
        let file = OpenOptions::new().write(true).open(dir.join("state.bin")).unwrap();
        file.set_len(file.metadata().unwrap().len() - HEADER_BYTES).unwrap();
    }
    is_whole();
    with_header(&dirs[1].join("state.bin"), |page| page[8] = 4);
    let error = DiskStore::open(&real(), &dirs).unwrap_err().to_string();
    assert!(error.contains("b/state.bin") && error.contains("format version 4"), "{error}");
}

#[test]
fn files_that_disagree_about_their_parts_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["a", "b"].map(|name| root.path().join(name));
    write(&mut DiskStore::create(&real(), &Striping::equal(&dirs), spec(1 << 20)).unwrap(), 0);
    let path = dirs[1].join("state.bin");
    let cycle = |table: &'static [u8]| {
        move |page: &mut [u8]| {
            page[20] = table.len() as u8;
            page[48..48 + table.len()].copy_from_slice(table);
        }
    };
    with_header(&path, cycle(&[0, 1, 0]));
    let error = DiskStore::open(&real(), &dirs).unwrap_err().to_string();
    assert!(error.contains("b/state.bin") && error.contains("in another way"), "{error}");
    // A cycle that names a third path, or leaves one out, is none.
    for table in [&[0, 2][..], &[1, 1]] {
        with_header(&path, cycle(table));
        assert!(DiskStore::open(&real(), &dirs).is_err(), "{table:?}");
    }
}

#[test]
fn a_chunk_that_is_given_up_leaves_its_space() {
    let root = tempfile::tempdir().unwrap();
    let dirs = ["a", "b"].map(|name| root.path().join(name));
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let striping = Striping::weighted(&dirs, &[2.0, 1.0]).unwrap();
    // Two stripes and a half each, so that every chunk touches both files.
    let len = (STRIPE_BYTES * 5 / 2) as usize;
    let scratch = Scratch::create(&real(), &striping, "parked.bin", 2, len).unwrap();
    for chunk in 0..2 {
        scratch.write(ScratchChunk(chunk), contents(chunk, len)).unwrap();
    }
    scratch.wait_writes().unwrap();
    let allocated = || -> u64 {
        dirs.iter().map(|dir| std::fs::metadata(dir.join("parked.bin")).unwrap().blocks() * 512).sum()
    };
    let lengths = || dirs.each_ref().map(|dir| std::fs::metadata(dir.join("parked.bin")).unwrap().len());
    let (full, long) = (allocated(), lengths());
    scratch.give_up(ScratchChunk(0)).unwrap();
    assert_eq!(allocated(), full - len as u64);
    assert_eq!(lengths(), long, "the files keep their lengths");
    let other = scratch.read(ScratchChunk(1), Lease::standalone(len)).unwrap().wait().unwrap();
    assert_eq!(*other, *contents(1, len), "the other chunk is untouched");
}

/// Remembers what is registered, and forgets it when it ends.
#[derive(Debug)]
struct Registry {
    upstream: SimEngine,
    live: Arc<std::sync::Mutex<Vec<(usize, usize)>>>,
}

impl IoEngine for Registry {
    fn name(&self) -> &str {
        "sim registry"
    }
    fn open(
        &self,
        path: &std::path::Path,
        mode: terrace_aio::OpenMode,
    ) -> Result<FileId, terrace_aio::IoError> {
        self.upstream.open(path, mode)
    }
    fn close(&self, file: FileId) -> Result<(), terrace_aio::IoError> {
        self.upstream.close(file)
    }
    fn path(&self, file: FileId) -> Option<PathBuf> {
        self.upstream.path(file)
    }
    fn len(&self, file: FileId) -> Result<u64, terrace_aio::IoError> {
        self.upstream.len(file)
    }
    fn exists(&self, path: &std::path::Path) -> bool {
        self.upstream.exists(path)
    }
    fn remove(&self, path: &std::path::Path) -> Result<(), terrace_aio::IoError> {
        self.upstream.remove(path)
    }
    fn submit(&self, request: Request) -> Ticket {
        self.upstream.submit(request)
    }
    fn sync(&self, file: FileId) -> Ticket {
        self.upstream.sync(file)
    }
    fn file_facts(&self, file: FileId) -> Result<terrace_aio::FileFacts, terrace_aio::IoError> {
        self.upstream.file_facts(file)
    }
    fn punch_hole(&self, file: FileId, offset: u64, len: u64) -> Result<(), terrace_aio::IoError> {
        self.upstream.punch_hole(file, offset, len)
    }
    unsafe fn register(&self, start: std::ptr::NonNull<u8>, len: usize) -> Registration {
        let part = (start.as_ptr() as usize, len);
        self.live.lock().unwrap().push(part);
        let live = Arc::clone(&self.live);
        Registration::new(move || live.lock().unwrap().retain(|other| *other != part))
    }
}

#[test]
fn a_registered_pool_is_registered_whole_and_only_while_it_lives() {
    let live = Arc::default();
    let engine: Arc<dyn IoEngine> =
        Arc::new(Registry { upstream: SimEngine::new(SimConfig::default()), live: Arc::clone(&live) });
    // 3 GiB of address space, of which nothing is touched; a slot of 400 MiB does not divide 1 GiB.
    let slot = 400 << 20;
    let pool = Pool::new_registered("test", 7, slot, &engine).unwrap();
    assert!(pool.is_registered());
    let parts = live.lock().unwrap().clone();
    assert_eq!(parts.iter().map(|(_, len)| len / slot).collect::<Vec<_>>(), [2, 2, 2, 1]);
    assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0), "{parts:?}");
    // A buffer that is out keeps the memory, and with it the registration.
    let lease = pool.acquire(4096);
    assert_eq!(lease.as_ptr() as usize, parts[0].0);
    drop(pool);
    assert_eq!(live.lock().unwrap().len(), 4);
    drop(lease);
    assert_eq!(live.lock().unwrap().len(), 0);
    let plain: Arc<dyn IoEngine> = Arc::new(SimEngine::new(SimConfig::default()));
    assert!(!Pool::new_registered("test", 1, 4096, &plain).unwrap().is_registered());
}
