//! One damaged byte of what a store is found by costs nothing, or the newest step.
//!
//! Every byte of the manifest (of the padding of its slots, one in 64), and of both headers of every file with chunks, is flipped
//! alone. The store then opens, at the newest
//! step or the one before, says what it found, and has written a damaged copy anew. Two exceptions that the format cannot help have
//! tests of their own: the only commit there is, and the newest where state is kept once.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{IoBuf, IoEngine, IoErrorKind, OpenMode, Request};
use terrace_tiers::{
    Access, BlobKey, BlobKind, BlobSpec, Commit, DiskStore, FilePart, Generation, GroupSpec, Lease, Recovery,
    SlotState, StoreSpec, StoreView, Striping, TierError,
};

const PAGE: usize = 4096;
/// What a header of a manifest is, without its padding.
const HEAD: usize = 56;

fn disk(seed: u64) -> Arc<SimEngine> {
    let quiet = SimConfig { seed, short_one_in: 0, interrupt_one_in: 0, ..SimConfig::default() };
    Arc::new(SimEngine::new(SimConfig { delay_ticks_max: 0, ..quiet }))
}

fn dirs() -> Vec<PathBuf> {
    ["/disk0", "/disk1"].map(PathBuf::from).to_vec()
}

/// Two stripes, so that both directories hold data.
fn spec(generations: u64) -> StoreSpec {
    StoreSpec {
        groups: vec![
            GroupSpec { name: "layers.0".into(), elements: 3 << 16 },
            GroupSpec { name: "head".into(), elements: 1 << 16 },
        ],
        kinds: vec![BlobSpec::plain(BlobKind::Weight, 2), BlobSpec::plain(BlobKind::Moment1, 4)],
        chunk_elements: 1 << 16,
        generations,
        identity: "{\"run\":\"flips\"}".into(),
    }
}

fn chunks(spec: &StoreSpec) -> Vec<(BlobKey, usize)> {
    let keys = (0..spec.groups.len()).flat_map(|group| spec.kinds.iter().map(move |k| (group, k.kind)));
    let keys = keys.map(|(group, kind)| BlobKey { group, kind });
    keys.flat_map(|key| (0..spec.chunks(key.group)).map(move |chunk| (key, chunk))).collect()
}

fn value(step: u64, key: BlobKey, chunk: usize) -> u8 {
    (step * 16 + key.group as u64 * 5 + chunk as u64) as u8 + u8::from(key.kind == BlobKind::Weight)
}

fn step(store: &DiskStore, step: u64) {
    for (key, chunk) in chunks(store.spec()) {
        let mut lease = Lease::standalone(store.spec().chunk_bytes(key, chunk));
        lease.fill(value(step, key, chunk));
        store.write(key, chunk, lease).unwrap();
    }
    store.commit(step, &step.to_le_bytes()).unwrap();
}

/// A store with steps `0..=last`, closed.
fn made(engine: &Arc<dyn IoEngine>, generations: u64, last: u64) {
    let store = DiskStore::create(engine, &Striping::equal(&dirs()), spec(generations)).unwrap();
    (0..=last).for_each(|number| step(&store, number));
}

fn is_whole(store: &DiskStore) -> bool {
    let number = store.committed().step;
    let is_right = |&(key, chunk): &(BlobKey, usize)| {
        let lease = Lease::standalone(store.spec().chunk_bytes(key, chunk));
        let read = store
            .read(key, chunk..chunk + 1, Generation::Live, lease)
            .and_then(terrace_tiers::PendingRead::wait);
        read.is_ok_and(|bytes| bytes.iter().all(|&byte| byte == value(number, key, chunk)))
    };
    store.committed().trainer == number.to_le_bytes() && chunks(store.spec()).iter().all(is_right)
}

/// A file that is changed behind the store's back.
struct Behind {
    engine: Arc<dyn IoEngine>,
    path: PathBuf,
}

impl Behind {
    fn new(engine: &Arc<dyn IoEngine>, path: impl AsRef<Path>) -> Self {
        Self { engine: Arc::clone(engine), path: path.as_ref().to_owned() }
    }

    fn bytes(&self) -> Vec<u8> {
        let file = self.engine.open(&self.path, OpenMode::Read).unwrap();
        let len = self.engine.len(file).unwrap() as usize;
        let bytes = self.engine.submit(Request::read(file, 0, IoBuf::zeroed(len))).wait().unwrap().to_vec();
        self.engine.close(file).unwrap();
        bytes
    }

    /// The page at `at`.
    fn page(&self, at: usize) -> Vec<u8> {
        let file = self.engine.open(&self.path, OpenMode::Read).unwrap();
        let page = self.engine.submit(Request::read(file, at as u64, IoBuf::zeroed(PAGE))).wait().unwrap();
        self.engine.close(file).unwrap();
        page.to_vec()
    }

    fn flip(&self, at: usize) {
        let start = at / PAGE * PAGE;
        let mut page = IoBuf::zeroed(PAGE);
        page.copy_from_slice(&self.page(start));
        page[at - start] ^= 0x10;
        self.put(start, page);
    }

    /// Makes the page at `at` zeros.
    fn zero(&self, at: usize) {
        self.put(at, IoBuf::zeroed(PAGE));
    }

    fn put(&self, start: usize, page: IoBuf) {
        let file = self.engine.open(&self.path, OpenMode::ReadWrite).unwrap();
        self.engine.submit(Request::write(file, start as u64, page)).wait().unwrap();
        self.engine.sync(file).wait().unwrap();
        self.engine.close(file).unwrap();
    }

    fn len(&self) -> usize {
        let file = self.engine.open(&self.path, OpenMode::Read).unwrap();
        let len = self.engine.len(file).unwrap();
        self.engine.close(file).unwrap();
        len as usize
    }
}

/// Where the parts of a manifest are, by its header.
struct Places {
    layout: usize,
    slots: [usize; 2],
    slot: usize,
    layouts: [usize; 2],
    heads: [usize; 2],
    end: usize,
}

impl Places {
    fn of(manifest: &Behind) -> Self {
        let bytes = manifest.bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let (layout, slot) = (word(24), word(32));
        let first = PAGE + layout.next_multiple_of(PAGE);
        let copy = first + 2 * slot;
        let last = copy + layout.next_multiple_of(PAGE);
        assert_eq!(bytes.len(), last + PAGE, "the second header is the last page");
        assert_eq!(bytes[..PAGE], bytes[last..], "the headers are the same");
        assert_eq!(bytes[PAGE..first], bytes[copy..last], "the layouts are the same");
        Self {
            layout,
            slots: [first, first + slot],
            slot,
            layouts: [PAGE, copy],
            heads: [0, last],
            end: bytes.len(),
        }
    }

    /// The bytes of a slot that mean something.
    fn used(&self) -> usize {
        let spec = spec(2);
        let used = 48 + chunks(&spec).len() * 8 + 8 + 8;
        assert!(used <= self.slot);
        used
    }
}

/// What a store says of itself when it is opened.
#[derive(Debug, PartialEq, Eq, Hash, Clone)]
enum Said {
    Nothing,
    Copy { what: &'static str, part: (PathBuf, usize), is_mended: bool },
    Commit { lost: Option<u64> },
}

fn said(recoveries: &[Recovery]) -> Said {
    match recoveries {
        [] => Said::Nothing,
        [Recovery::Copy { copy, is_mended }] => {
            assert!(copy.unreadable.is_none());
            let FilePart { path, offset, .. } = copy.part.clone();
            Said::Copy { what: copy.what, part: (path, offset as usize), is_mended: *is_mended }
        }
        [Recovery::Commit { lost, .. }] => Said::Commit { lost: *lost },
        more => panic!("one byte was damaged: {more:?}"),
    }
}

/// Flips the byte at `at` and opens the store: gives the step that it finds and what it says. A view says the same. A copy is
/// afterwards as it was; any other byte is flipped back.
fn flipped(file: &Behind, original: &[u8], at: usize, whole: bool) -> (u64, Said) {
    file.flip(at);
    let viewed = whole.then(|| {
        let view = StoreView::open(&file.engine, &dirs(), Access::Look)
            .unwrap_or_else(|e| panic!("byte {at} of {:?}: {e}", file.path));
        (view.commit(Commit::Last).unwrap().step, said(view.recoveries()))
    });
    let store = DiskStore::open(&file.engine, &dirs())
        .unwrap_or_else(|e| panic!("byte {at} of {:?}: {e}", file.path));
    let (number, said) = (store.committed().step, said(store.recoveries()));
    if whole {
        assert!(is_whole(&store), "byte {at} of {:?}", file.path);
        for recovery in store.recoveries() {
            if let Recovery::Commit { step, dir, .. } = recovery {
                assert_eq!((*step, dir), (number, &dirs()[0]));
            }
        }
    }
    drop(store);
    // The slot that was found is written once more, padding and all.
    let page = at / PAGE * PAGE;
    let is_back = || file.page(page) == original[page..page + PAGE];
    if !is_back() {
        assert!(!matches!(said, Said::Copy { .. }), "byte {at} of {:?} is as it was", file.path);
        file.flip(at);
        assert!(is_back(), "only byte {at} of {:?} is another", file.path);
    }
    if let Some((viewed, mut as_viewed)) = viewed {
        if let Said::Copy { is_mended, .. } = &mut as_viewed {
            *is_mended = true;
        }
        assert_eq!((viewed, as_viewed), (number, said.clone()), "byte {at} of {:?}", file.path);
    }
    (number, said)
}

#[test]
fn every_byte_of_the_manifest() {
    let engine: Arc<dyn IoEngine> = disk(1);
    made(&engine, 2, 2);
    let manifest = Behind::new(&engine, "/disk0/manifest.bin");
    let places = Places::of(&manifest);
    let (original, used) = (manifest.bytes(), places.used());
    // Step 2 is commit 3 and so in slot 1.
    let [older, newer] = places.slots;
    let copy = |what, offset| {
        let part = (manifest.path.clone(), offset);
        (2, Said::Copy { what, part, is_mended: true })
    };
    let expected = |at: usize| -> (u64, Said) {
        let within = |start: usize, len: usize| (start..start + len).contains(&at).then(|| at - start);
        if let Some(&head) = places.heads.iter().find(|&&start| within(start, HEAD).is_some()) {
            return copy("header", head);
        }
        if let Some(&layout) = places.layouts.iter().find(|&&start| within(start, places.layout).is_some()) {
            return copy("layout", layout);
        }
        match (within(older, used), within(newer, used)) {
            // Whose magic or number is damaged says nothing about its age.
            (Some(0..16), _) => (2, Said::Commit { lost: None }),
            (_, Some(0..16)) => (1, Said::Commit { lost: None }),
            (_, Some(at @ 16..24)) => (1, Said::Commit { lost: Some(2 ^ (0x10 << ((at - 16) * 8))) }),
            (_, Some(_)) => (1, Said::Commit { lost: Some(2) }),
            _ => (2, Said::Nothing),
        }
    };
    let mut seen: HashMap<(u64, Said), usize> = HashMap::new();
    let is_padding =
        |at: usize| places.slots.iter().any(|&slot| (slot + used + 64..slot + places.slot).contains(&at));
    for at in (0..places.end).filter(|at| at % 64 == 0 || !is_padding(*at)) {
        let found = flipped(&manifest, &original, at, at % 64 == 0);
        assert_eq!(found, expected(at), "byte {at}");
        *seen.entry(found).or_default() += 1;
    }
    println!("{seen:#?}");
    for (what, len) in [(copy("header", 0), HEAD), (copy("layout", PAGE), places.layout)] {
        assert_eq!(seen[&what], len);
    }
    assert_eq!(manifest.bytes(), original);
}

#[test]
fn every_byte_of_the_headers_of_the_files() {
    let engine: Arc<dyn IoEngine> = disk(2);
    made(&engine, 2, 2);
    for dir in dirs() {
        let file = Behind::new(&engine, dir.join("state.bin"));
        let (original, last) = (file.bytes(), file.len() - PAGE);
        assert_eq!(original[..PAGE], original[last..], "the headers are the same");
        for header in [0, last] {
            for at in header..header + PAGE {
                let found = flipped(&file, &original, at, at % 64 == 0);
                let part = (file.path.clone(), header);
                assert_eq!(found, (2, Said::Copy { what: "header", part, is_mended: true }), "byte {at}");
            }
        }
        assert!(file.bytes() == original);
    }
}

/// What is damaged in both copies is not there; different parts may have lost different copies.
#[test]
fn both_copies_are_needed_for_an_error() {
    let engine: Arc<dyn IoEngine> = disk(3);
    made(&engine, 2, 2);
    let manifest = Behind::new(&engine, "/disk0/manifest.bin");
    let files = dirs().into_iter().map(|dir| Behind::new(&engine, dir.join("state.bin")));
    let files: Vec<Behind> = files.collect();
    let Places { heads, layouts, .. } = Places::of(&manifest);
    let last = files[1].len() - PAGE;
    for (file, places, error) in [
        (&manifest, heads, "neither copy of the manifest's header is one of ours"),
        (&manifest, layouts, "the manifest's layout has a wrong checksum"),
        (
            &files[1],
            [0, last],
            "its header, the first 4096 bytes, has a wrong checksum, and the last 4096 are no copy of it",
        ),
    ] {
        for (first, second) in [(9, 9), (30, 40)] {
            // Of a header's version, and of other words.
            let first = if std::ptr::eq(file, &raw const files[1]) { first.max(20) } else { first };
            let both = [places[0] + first, places[1] + second.max(first)];
            both.iter().for_each(|&at| file.flip(at));
            let found = DiskStore::open(&engine, &dirs()).unwrap_err();
            assert!(matches!(found, TierError::NoLayout { .. }), "{found}");
            let expected = format!(
                "the training state in {} is damaged: {error}. Every step is found by it, so none can be read: restore the \
                 directories from a copy, or remove them and start again with Engine::create",
                file.path.display()
            );
            assert_eq!(found.to_string(), expected);
            if std::ptr::eq(file, &raw const manifest) {
                let created = DiskStore::create(&engine, &Striping::equal(&dirs()), spec(2)).unwrap_err();
                assert!(matches!(created, TierError::NoLayout { .. }), "{created}");
            }
            both.iter().for_each(|&at| file.flip(at));
        }
    }
    // One copy of each.
    manifest.flip(heads[0] + 20);
    manifest.flip(layouts[1] + 20);
    files[0].flip(20);
    files[1].flip(last + 20);
    let store = DiskStore::open(&engine, &dirs()).unwrap();
    assert!(is_whole(&store) && store.committed().step == 2);
    let texts: Vec<String> = store.recoveries().iter().map(ToString::to_string).collect();
    let text = "one of two copies of the header, 4096 bytes at offset 0 of /disk0/manifest.bin, is damaged; it was written anew \
                from the other";
    assert!(texts.len() == 4 && texts[0] == text, "{texts:#?}");
    drop(store);
    assert!(DiskStore::open(&engine, &dirs()).unwrap().recoveries().is_empty(), "they are as they were");
}

/// The drive reports its own damage: such a copy has its substitute too.
#[test]
fn a_copy_that_cannot_be_read_is_damaged() {
    let fresh = || -> Arc<dyn IoEngine> {
        let disk: Arc<dyn IoEngine> = disk(4);
        made(&disk, 2, 2);
        disk
    };
    let (mut unreadable, mut steps) = (0, Vec::new());
    for nth in 0.. {
        let disk = fresh();
        let faults = Arc::new(FaultLayer::new(Arc::clone(&disk), FaultConfig::default()));
        faults.fail_nth(Action::Read, nth, IoErrorKind::Device);
        match DiskStore::open(&(Arc::clone(&faults) as _), &dirs()) {
            Ok(store) if faults.injected() == 0 => {
                assert!(store.recoveries().is_empty());
                break;
            }
            Ok(store) => {
                let [Recovery::Copy { copy, is_mended: true }] = store.recoveries() else {
                    panic!("read {nth}: {:?}", store.recoveries())
                };
                assert!(copy.unreadable.is_some() && copy.to_string().contains("cannot be read"), "{copy}");
                assert_eq!(store.committed().step, 2);
                unreadable += 1;
            }
            // A slot has no copy. The other one is the newest, or a step older that the next one may have written over.
            Err(TierError::UnreadableSlot { step, .. }) => {
                steps.push(step);
                assert_eq!(
                    DiskStore::open(&disk, &dirs()).unwrap().committed().step,
                    2,
                    "it can be read again"
                );
                restored(&disk, nth, step);
            }
            Err(error) => panic!("read {nth}: {error}"),
        }
    }
    // Two headers and two layouts of the manifest, two headers each of two files; two slots.
    steps.sort_unstable();
    assert_eq!((unreadable, steps), (8, vec![1, 2]));

    let disk = fresh();
    // With the first header damaged, what the drive says of the other is why nothing can be found.
    let manifest = Behind::new(&disk, "/disk0/manifest.bin");
    manifest.flip(Places::of(&manifest).heads[0]);
    let faults = Arc::new(FaultLayer::new(disk, FaultConfig::default()));
    faults.fail_nth(Action::Read, 1, IoErrorKind::Device);
    let error = DiskStore::open(&(faults as _), &dirs()).unwrap_err().to_string();
    assert!(error.contains("Input/output error") && error.contains("manifest.bin"), "{error}");
}

/// Goes on from the slot that can be read, of `step`, where the drive cannot read the other: it does not come back.
fn restored(disk: &Arc<dyn IoEngine>, nth: u64, step: u64) {
    let faults = Arc::new(FaultLayer::new(Arc::clone(disk), FaultConfig::default()));
    // A look at a store reads what opening it does.
    faults.fail_nth(Action::Read, nth, IoErrorKind::Device);
    let mut view = StoreView::open(&(Arc::clone(&faults) as _), &dirs(), Access::Restore).unwrap();
    assert!(view.slots().iter().any(|slot| slot.state == SlotState::Unreadable), "{:?}", view.slots());
    assert_eq!(view.commit(Commit::Last).unwrap().step, step);
    let early = view.restore_previous().unwrap_err().to_string();
    assert!(early.contains("was not verified"), "{early}");
    assert!(view.verify(Commit::Last, &mut |_, _| {}).unwrap().unwrap().damages.is_empty());
    assert_eq!(view.restore_previous().unwrap(), step);
    drop(view);
    let again = DiskStore::open(disk, &dirs()).unwrap();
    assert!(is_whole(&again) && again.committed().step == step && again.recoveries().is_empty());
    drop(again);
    // Earlier builds left zeros there.
    let manifest = Behind::new(disk, "/disk0/manifest.bin");
    let given_up =
        Places::of(&manifest).slots.into_iter().find(|&at| manifest.page(at)[0..8] == *b"TRCVOID1");
    manifest.zero(given_up.expect("what a place was given up for is said there"));
    let again = DiskStore::open(disk, &dirs()).unwrap();
    let [Recovery::Commit { step: found, lost: None, .. }] = again.recoveries() else {
        panic!("{:?}", again.recoveries())
    };
    assert!(is_whole(&again) && *found == step);
}

/// A sector that was lost reads as zeros: as much damage as any other bytes.
#[test]
fn zeros_in_the_place_of_a_commit_are_damage() {
    for generations in [1, 2] {
        for last in 0..4 {
            for slot in 0..2 {
                let engine: Arc<dyn IoEngine> = disk(6);
                made(&engine, generations, last);
                let manifest = Behind::new(&engine, "/disk0/manifest.bin");
                let at = Places::of(&manifest).slots[slot];
                let (holds, sequence) = {
                    let page = manifest.page(at);
                    (page[0..8].to_vec(), u64::from_le_bytes(page[8..16].try_into().unwrap()))
                };
                manifest.zero(at);
                let opened = DiskStore::open(&engine, &dirs());
                let what = format!("{generations} generations, step {last}, slot {slot}");
                match (&holds[..], sequence, last) {
                    // What was never written; the only commit there ever was.
                    ([0, ..], ..) => assert!(opened.unwrap().recoveries().is_empty(), "{what}"),
                    (_, 1, 0) => assert!(matches!(opened, Err(TierError::NoState { .. })), "{what}"),
                    // The newest slot of state that is kept once, beside the mark.
                    (b"TRCSLOT1", ..) if generations == 1 => {
                        assert!(matches!(opened, Err(TierError::Changing { .. })), "{what}");
                    }
                    // The second commit, which leaves what the first alone would.
                    (b"TRCSLOT1", 2, 1) => assert!(opened.unwrap().recoveries().is_empty(), "{what}"),
                    _ => {
                        let store = opened.unwrap();
                        let recoveries = store.recoveries();
                        assert!(
                            matches!(recoveries, [Recovery::Commit { lost: None, .. }]),
                            "{what}: {recoveries:?}"
                        );
                    }
                }
            }
        }
    }
}

/// The exceptions: what the format does not keep twice.
#[test]
fn the_only_commit_has_no_substitute() {
    let engine: Arc<dyn IoEngine> = disk(5);
    made(&engine, 2, 0);
    let manifest = Behind::new(&engine, "/disk0/manifest.bin");
    let places = Places::of(&manifest);
    // A first commit that was cut off looks the same. Nothing was trained before it.
    manifest.flip(places.slots[1] + 50);
    let error = DiskStore::open(&engine, &dirs()).unwrap_err();
    assert!(matches!(error, TierError::NoState { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "/disk0/manifest.bin holds no training state: its creation never finished; start again with Engine::create"
    );

    // State that is kept once has a mark where the commit before was.
    for path in dirs().iter().flat_map(|dir| ["manifest.bin", "state.bin"].map(|name| dir.join(name))) {
        if engine.exists(&path) {
            engine.remove(&path).unwrap();
        }
    }
    made(&engine, 1, 2);
    let places = Places::of(&manifest);
    let newest = (0..2).filter(|&slot| manifest.page(places.slots[slot])[0..8] == *b"TRCSLOT1");
    let newest: Vec<usize> = newest.collect();
    let [newest] = newest[..] else { panic!("a commit and a mark: {newest:?}") };
    manifest.flip(places.slots[newest] + 50);
    let error = DiskStore::open(&engine, &dirs()).unwrap_err();
    assert!(matches!(error, TierError::Changing { step: 1, .. }), "{error}");
    manifest.flip(places.slots[newest] + 50);
    // The mark is not needed any more.
    manifest.flip(places.slots[1 - newest] + 50);
    let store = DiskStore::open(&engine, &dirs()).unwrap();
    assert!(is_whole(&store) && store.committed().step == 2);
}

/// The power fails while a store is made: one header may be there without the other, and is replaced.
#[test]
fn one_header_alone_is_what_a_creation_replaces() {
    let mut alone = [0; 2];
    let mut torn_files = 0;
    for seed in 0..40 {
        for cut in 0.. {
            let disk = disk(seed);
            disk.power_cut_after(cut);
            let engine: Arc<dyn IoEngine> = Arc::clone(&disk) as _;
            let created = DiskStore::create(&engine, &Striping::equal(&dirs()), spec(2));
            let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(seed * 100 + cut));
            let manifest = Behind::new(&survivor, "/disk0/manifest.bin");
            if survivor.exists(&manifest.path) && manifest.len() > PAGE {
                let has = |at| manifest.page(at)[0..8] == *b"TRCMANIF";
                let heads = [has(0), has(manifest.len() - PAGE)];
                let one = heads.iter().filter(|&&has| has).count() == 1;
                alone[usize::from(heads[1])] += u32::from(one);
            }
            let file = Behind::new(&survivor, "/disk1/state.bin");
            if survivor.exists(&file.path) && file.len() > PAGE {
                let has = |at| file.page(at)[0..8] == *b"TRCVOLUM";
                torn_files += u32::from(has(0) != has(file.len() - PAGE));
            }
            let error = DiskStore::open(&survivor, &dirs()).unwrap_err();
            assert!(matches!(error, TierError::NoState { .. }), "seed {seed}, cut after {cut}: {error}");
            made(&survivor, 2, 1);
            assert!(is_whole(&DiskStore::open(&survivor, &dirs()).unwrap()), "seed {seed}, cut after {cut}");
            if created.is_ok() {
                break;
            }
        }
    }
    println!("{alone:?} manifests and {torn_files} files with one header");
    assert!(alone.iter().all(|&count| count > 0) && torn_files > 0, "{alone:?}, {torn_files}");
}

/// The power fails while a copy is written anew: the other one is still there, and so is the step.
#[test]
fn a_power_cut_while_mending_loses_nothing() {
    let mut mended = 0;
    for (name, at) in [("manifest.bin", 20), ("manifest.bin", PAGE + 20), ("state.bin", 20)] {
        for seed in 0..6 {
            for cut in 0.. {
                let disk = disk(seed);
                let engine: Arc<dyn IoEngine> = Arc::clone(&disk) as _;
                made(&engine, 2, 2);
                Behind::new(&engine, dirs()[0].join(name)).flip(at);
                disk.power_cut_after(cut);
                let is_open = DiskStore::open(&engine, &dirs()).is_ok();
                let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(seed * 100 + cut));
                let store = DiskStore::open(&survivor, &dirs())
                    .unwrap_or_else(|e| panic!("{name}, seed {seed}, cut after {cut}: {e}"));
                assert!(is_whole(&store) && store.committed().step == 2);
                let was_mended = store.recoveries().is_empty();
                assert!(was_mended || !is_open, "{name}, seed {seed}, cut after {cut}: it was durable");
                mended += u32::from(was_mended);
                if is_open {
                    break;
                }
            }
        }
    }
    assert!(mended > 0);
}
