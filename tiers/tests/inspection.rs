//! What a store says about itself, that no damage goes unnoticed, and the way back to the step before.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::engine::{EngineChoice, EngineConfig, SimConfig, SimEngine, open_default};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{IoEngine, IoErrorKind};
use terrace_tiers::{
    Access, BlobKey, BlobKind, BlobSpec, Commit, DamageCause, DiskStore, Generation, GroupSpec, Lease,
    SlotState, StoreSpec, StoreView, Striping, TierError,
};

/// Where the first stripe begins in a file.
const HEADER_BYTES: u64 = 4096;
const STRIPE_BYTES: u64 = 1 << 20;

fn engine() -> Arc<dyn IoEngine> {
    open_default(&EngineConfig { choice: EngineChoice::Threads, ..EngineConfig::default() }).unwrap()
}

/// 6 bytes an element, and two generations: 2.6 MiB, so that two directories hold data of both. Groups end with a short chunk.
fn spec() -> StoreSpec {
    let kind = |(kind, element_bytes)| BlobSpec::plain(kind, element_bytes);
    StoreSpec {
        groups: [("embedding", 5 << 15), ("norm", 4096), ("head", (1 << 16) - 4096)]
            .map(|(name, elements)| GroupSpec { name: name.into(), elements })
            .to_vec(),
        kinds: [(BlobKind::Weight, 2), (BlobKind::Moment1, 4)].map(kind).to_vec(),
        chunk_elements: 1 << 14,
        generations: 2,
        identity: "{\"run\":\"inspection\"}".into(),
    }
}

fn chunks(spec: &StoreSpec) -> Vec<(BlobKey, usize)> {
    let blobs = (0..spec.groups.len())
        .flat_map(|group| spec.kinds.iter().map(move |k| BlobKey { group, kind: k.kind }));
    blobs.flat_map(|key| (0..spec.chunks(key.group)).map(move |chunk| (key, chunk))).collect()
}

/// Writes the chunks of a step without committing them.
fn write(store: &DiskStore, step: u64, chunks: &[(BlobKey, usize)]) {
    for &(key, chunk) in chunks {
        let mut lease = Lease::standalone(store.spec().chunk_bytes(key, chunk));
        lease.fill(step as u8 * 16 + key.group as u8 * 4 + chunk as u8 + 1);
        store.write(key, chunk, lease).unwrap();
    }
}

fn step(store: &DiskStore, step: u64) -> Result<(), TierError> {
    write(store, step, &chunks(&spec()));
    store.commit(step, &step.to_le_bytes())
}

/// A store in two directories below `root` with steps `0..=last`, closed.
fn made(root: &Path, last: u64) -> Vec<PathBuf> {
    let dirs = vec![root.join("a"), root.join("b")];
    let store = DiskStore::create(&engine(), &Striping::equal(&dirs), spec()).unwrap();
    (0..=last).for_each(|number| step(&store, number).unwrap());
    dirs
}

/// Opens the store as a trainer does, and reads all of it.
fn resumed(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<(DiskStore, u64), TierError> {
    let store = DiskStore::open(engine, dirs)?;
    let number = store.committed().step;
    assert_eq!(store.committed().trainer, number.to_le_bytes());
    for (key, chunk) in chunks(store.spec()) {
        let lease = Lease::standalone(store.spec().chunk_bytes(key, chunk));
        let bytes = store.read(key, chunk..chunk + 1, Generation::Live, lease)?.wait()?;
        let expected = number as u8 * 16 + key.group as u8 * 4 + chunk as u8 + 1;
        assert!(bytes.iter().all(|&b| b == expected), "chunk {chunk} of {key:?} at step {number}");
    }
    Ok((store, number))
}

fn look(dirs: &[PathBuf]) -> StoreView {
    StoreView::open(&engine(), dirs, Access::Look).unwrap()
}

/// Damages of both commits.
fn damages(view: &mut StoreView) -> [usize; 2] {
    [Commit::Last, Commit::Previous].map(|commit| {
        let found = view.verify(commit, &mut |_, _| {}).unwrap();
        found.map_or(0, |found| found.damages.len())
    })
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

/// Every file below `dir` with its bytes.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(&path).unwrap()))
        .collect();
    all.sort();
    all
}

#[test]
fn a_view_shows_the_layout_and_both_commits() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 3);
    let before: Vec<_> = dirs.iter().map(|dir| files(dir)).collect();
    let mut view = look(&dirs);
    let _another = look(&dirs);
    assert_eq!(*view.spec(), spec());
    assert_eq!(view.format_versions(), (3, 3));
    assert!(view.recoveries().is_empty());
    assert_eq!(view.striping().dirs(), dirs);
    let facts = |commit| view.commit(commit).map(|facts| (facts.step, facts.sequence, facts.generation));
    assert_eq!((facts(Commit::Last), facts(Commit::Previous)), (Some((3, 4, 1)), Some((2, 3, 0))));
    assert!(!view.is_unchanged());
    let (mut calls, mut done) = (0, 0);
    let found =
        view.verify(Commit::Last, &mut |now, total| (calls, done) = (calls + 1, now.min(total))).unwrap();
    let found = found.unwrap();
    assert_eq!((found.chunks, found.bytes), (chunks(&spec()).len(), spec().volume_bytes() / 2));
    assert!(found.damages.is_empty() && calls == found.chunks && done == found.bytes);
    assert_eq!(damages(&mut view), [0, 0]);
    assert!(
        matches!(DiskStore::open(&engine(), &dirs), Err(TierError::Locked { .. })),
        "a view keeps writers out"
    );
    assert_eq!(before, dirs.iter().map(|dir| files(dir)).collect::<Vec<_>>(), "looking changes nothing");
}

/// One byte in every few KiB of every file is flipped alone: each lies in exactly one chunk of one of the two commits, and
/// verification finds that one and says where it is. A chunk that verification skipped would be a flip without a damage.
#[test]
fn every_byte_of_both_generations_is_verified() {
    const EVERY: u64 = 12 << 10;
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 1);
    let mut hit = std::collections::HashSet::new();
    let mut beyond = 0;
    for (index, dir) in dirs.iter().enumerate() {
        let path = dir.join("state.bin");
        let len = std::fs::metadata(&path).unwrap().len();
        for offset in (HEADER_BYTES + 5..len - HEADER_BYTES).step_by(EVERY as usize) {
            let place = offset - HEADER_BYTES;
            let address = (place / STRIPE_BYTES * 2 + index as u64) * STRIPE_BYTES + place % STRIPE_BYTES;
            flip(&path, offset);
            let mut view = look(&dirs);
            let mut found = Vec::new();
            for commit in [Commit::Last, Commit::Previous] {
                let all = view.verify(commit, &mut |_, _| {}).unwrap().unwrap().damages;
                found.extend(all.into_iter().map(|damage| (commit == Commit::Last, damage)));
            }
            flip(&path, offset);
            // The last stripe of a file is longer than what is stored.
            if address >= spec().volume_bytes() {
                assert!(found.is_empty());
                beyond += 1;
                continue;
            }
            let [(is_last, damage)] = &found[..] else { panic!("offset {offset} of {path:?}: {found:?}") };
            assert_eq!(*is_last, address >= spec().volume_bytes() / 2, "step 1 is in the second half");
            let holds = |part: &&terrace_tiers::FilePart| {
                part.path == path && (part.offset..part.offset + part.len).contains(&offset)
            };
            assert_eq!(damage.parts.iter().filter(holds).count(), 1, "{damage}");
            assert!(matches!(damage.cause, DamageCause::Checksum { .. }));
            hit.insert((*is_last, damage.group.clone(), damage.kind, damage.chunk));
        }
    }
    println!("{} chunks hit, {beyond} flips beyond the end", hit.len());
    assert_eq!(hit.len(), 2 * chunks(&spec()).len(), "every chunk of both commits was hit");
    assert_eq!(damages(&mut look(&dirs)), [0, 0]);
}

#[test]
fn a_damaged_slot_is_named() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 2);
    let manifest = dirs[0].join("manifest.bin");
    // Step 2 is commit 3 and lies in slot 1.
    let view = look(&dirs);
    let places = view.slots().map(|slot| slot.offset + 100);
    drop(view);
    let state = |index: usize| look(&dirs).slots()[index].state;
    assert!(matches!(state(0), SlotState::Whole(facts) if facts.step == 1));
    flip(&manifest, places[1]);
    assert_eq!(state(1), SlotState::Torn { claimed_step: Some(2) });
    let view = look(&dirs);
    assert_eq!(view.commit(Commit::Last).map(|facts| facts.step), Some(1), "the older one counts");
    assert_eq!(view.commit(Commit::Previous), None);
    drop(view);
    flip(&manifest, places[0]);
    let mut view = look(&dirs);
    assert_eq!((view.commit(Commit::Last), view.commit(Commit::Previous)), (None, None));
    assert!(view.verify(Commit::Last, &mut |_, _| {}).unwrap().is_none());
    drop(view);
    flip(&manifest, places[1]);
    assert_eq!(state(0), SlotState::Torn { claimed_step: Some(1) });
    assert_eq!(damages(&mut look(&dirs)), [0, 0], "step 2 does not depend on it");
}

#[test]
fn a_read_that_fails_is_a_damage_with_its_place() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 1);
    let faults = Arc::new(FaultLayer::new(engine(), FaultConfig::default()));
    let mut view = StoreView::open(&(Arc::clone(&faults) as _), &dirs, Access::Look).unwrap();
    faults.fail_nth(Action::Read, 3, IoErrorKind::Device);
    let found = view.verify(Commit::Last, &mut |_, _| {}).unwrap().unwrap();
    let [damage] = &found.damages[..] else { panic!("{found:?}") };
    assert!(matches!(damage.cause, DamageCause::Unreadable(_)));
    let text = damage.to_string();
    assert!(text.contains("weights of group embedding, chunk 3, ") && text.contains("state.bin"), "{text}");
    assert_eq!(found.chunks, chunks(&spec()).len(), "the others are read all the same");
}

#[test]
fn the_step_before_is_restored_and_goes_on() {
    let root = tempfile::tempdir().unwrap();
    for last in [1, 2] {
        let dirs = made(&root.path().join(last.to_string()), last);
        let damage = look(&dirs);
        // Anywhere in the newer generation: its first chunk is at the start or the middle of the addresses.
        let address = damage.commit(Commit::Last).unwrap().generation * spec().volume_bytes() / 2;
        drop(damage);
        let (file, place) = ((address / STRIPE_BYTES) % 2, address / STRIPE_BYTES / 2 * STRIPE_BYTES);
        flip(&dirs[file as usize].join("state.bin"), HEADER_BYTES + place + address % STRIPE_BYTES);
        let mut view = StoreView::open(&engine(), &dirs, Access::Restore).unwrap();
        let early = view.restore_previous().unwrap_err().to_string();
        assert!(early.contains("was not verified") && early.contains("nothing was changed"), "{early}");
        assert_eq!(damages(&mut view), [1, 0]);
        assert_eq!(view.restore_previous().unwrap(), last - 1);
        assert_eq!(view.commit(Commit::Last).unwrap().step, last - 1);
        assert!(view.is_unchanged());
        assert_eq!(damages(&mut view), [0, 0]);
        drop(view);
        let (store, found) = resumed(&engine(), &dirs).unwrap();
        assert_eq!(found, last - 1);
        for number in last..last + 3 {
            step(&store, number).unwrap();
        }
        drop(store);
        assert_eq!(resumed(&engine(), &dirs).unwrap().1, last + 2);
        assert_eq!(damages(&mut look(&dirs)), [0, 0]);
    }
}

#[test]
fn a_step_that_was_begun_is_not_gone_back_over() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 2);
    let store = DiskStore::open(&engine(), &dirs).unwrap();
    write(&store, 3, &chunks(&spec())[7..9]);
    store.abandon();
    drop(store);
    let before = files(&dirs[0]);
    let mut view = StoreView::open(&engine(), &dirs, Access::Restore).unwrap();
    assert_eq!(damages(&mut view), [0, 2], "the next step is written over the one before");
    let error = view.restore_previous().unwrap_err();
    assert!(matches!(error, TierError::NoWayBack { .. }));
    assert!(error.to_string().contains("not whole either"), "{error}");
    drop(view);
    assert_eq!(files(&dirs[0]), before);
    assert_eq!(resumed(&engine(), &dirs).unwrap().1, 2);
}

#[test]
fn a_store_with_one_commit_has_nothing_before_it() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 0);
    let mut view = StoreView::open(&engine(), &dirs, Access::Restore).unwrap();
    assert_eq!(view.slots().map(|slot| slot.state == SlotState::Blank), [true, false]);
    assert_eq!(view.verify(Commit::Previous, &mut |_, _| {}).map(|found| found.is_none()).ok(), Some(true));
    let error = view.restore_previous().unwrap_err().to_string();
    assert!(error.contains("has no previous step"), "{error}");
}

/// A step that changed nothing names the same chunks: going back is no way around their damage.
#[test]
fn unchanged_steps_share_their_chunks() {
    let root = tempfile::tempdir().unwrap();
    let dirs = made(root.path(), 1);
    let store = DiskStore::open(&engine(), &dirs).unwrap();
    store.commit_unchanged(2, &2u64.to_le_bytes()).unwrap();
    drop(store);
    let address = spec().volume_bytes() / 2;
    flip(&dirs[1].join("state.bin"), HEADER_BYTES + address % STRIPE_BYTES);
    let mut view = StoreView::open(&engine(), &dirs, Access::Restore).unwrap();
    assert!(view.is_unchanged());
    assert_eq!(damages(&mut view), [1, 1]);
    assert!(view.restore_previous().is_err());
}

#[test]
fn looking_makes_nothing_and_respects_a_trainer() {
    let root = tempfile::tempdir().unwrap();
    let empty = root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let refused = |dirs: &[PathBuf], access| StoreView::open(&engine(), dirs, access).unwrap_err();
    for access in [Access::Look, Access::Restore] {
        let error = refused(std::slice::from_ref(&empty), access);
        assert!(matches!(error, TierError::NoState { .. }) && files(&empty).is_empty(), "{error}");
        let nowhere = root.path().join("nowhere");
        let error = refused(std::slice::from_ref(&nowhere), access);
        assert!(matches!(error, TierError::NoState { .. }) && !nowhere.exists(), "{error}");
    }
    let dirs = made(root.path(), 1);
    let missing = root.path().join("missing");
    let error = refused(&[dirs[0].clone(), missing.clone()], Access::Restore).to_string();
    assert!(error.contains("missing") && error.contains("no such directory") && !missing.exists(), "{error}");
    let error = refused(&[dirs[1].clone(), dirs[0].clone()], Access::Look).to_string();
    assert!(error.contains("manifest is in") && error.contains("original order"), "{error}");

    let store = DiskStore::open(&engine(), &dirs).unwrap();
    for access in [Access::Look, Access::Restore] {
        let error = refused(&dirs, access);
        assert!(matches!(error, TierError::Locked { .. }), "{error}");
    }
    drop(store);
    // A copy of the state without its lock files.
    for dir in &dirs {
        std::fs::remove_file(dir.join("terrace.lock")).unwrap();
    }
    assert_eq!(damages(&mut look(&dirs)), [0, 0]);
    assert!(!dirs[0].join("terrace.lock").exists());
    let path = dirs[1].join("state.bin");
    let last = std::fs::metadata(&path).unwrap().len() - HEADER_BYTES;
    for (offset, word) in [(0, "does not belong"), (20, "wrong checksum")] {
        let both = [offset, last + offset];
        both.iter().for_each(|&offset| flip(&path, offset));
        let error = refused(&dirs, Access::Look).to_string();
        assert!(error.contains("b/state.bin") && error.contains(word), "{error}");
        both.iter().for_each(|&offset| flip(&path, offset));
    }
}

/// The power fails while the step before is being restored: it is there afterwards, whatever was written of the slot.
#[test]
fn a_power_cut_while_restoring_leaves_the_step_before() {
    let dirs = [PathBuf::from("/disk0"), PathBuf::from("/disk1")];
    for seed in 0..8 {
        for cut in 0..40 {
            let disk =
                Arc::new(SimEngine::new(SimConfig { seed, block_bytes: 1 << 12, ..SimConfig::default() }));
            let engine: Arc<dyn IoEngine> = Arc::clone(&disk) as _;
            let store = DiskStore::create(&engine, &Striping::equal(&dirs), spec()).unwrap();
            for number in 0..3 {
                step(&store, number).unwrap();
            }
            drop(store);
            let mut view = StoreView::open(&engine, &dirs, Access::Restore).unwrap();
            assert_eq!(damages(&mut view), [0, 0]);
            disk.power_cut_after(cut);
            let restored = view.restore_previous();
            drop(view);
            let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(seed * 1000 + cut));
            let (_, found) =
                resumed(&survivor, &dirs).unwrap_or_else(|e| panic!("seed {seed}, cut {cut}: {e}"));
            match restored {
                Ok(number) => assert_eq!((number, found), (1, 1), "seed {seed}, cut {cut}"),
                // Nothing of the new slot may have reached the disk.
                Err(_) => assert!(found == 1 || found == 2, "seed {seed}, cut {cut}: {found}"),
            }
            if !disk.is_cut() {
                break;
            }
        }
    }
}

/// One generation: what is not whole says so, whoever asks, and nothing but all of it makes it whole.
#[test]
fn a_store_that_is_kept_once_is_whole_or_says_since_when_it_is_not() {
    let root = tempfile::tempdir().unwrap();
    let dirs = vec![root.path().join("a"), root.path().join("b")];
    let once = StoreSpec { generations: 1, ..spec() };
    let half = once.volume_bytes();
    assert_eq!(half * 2, spec().volume_bytes());
    let store = DiskStore::create(&engine(), &Striping::equal(&dirs), once).unwrap();
    (0..=2).for_each(|number| step(&store, number).unwrap());
    assert!(!store.is_changing() && store.require_whole().is_ok());
    drop(store);
    let mut view = look(&dirs);
    assert_eq!(view.commit(Commit::Last).map(|facts| (facts.step, facts.generation)), Some((2, 0)));
    assert_eq!((view.commit(Commit::Previous), view.changing_since()), (None, None));
    assert!(view.slots().iter().any(|slot| slot.state == SlotState::Changing { since_step: 1 }));
    assert_eq!(damages(&mut view), [0, 0]);
    drop(view);

    // A commit that changes nothing needs no mark.
    let (store, _) = resumed(&engine(), &dirs).unwrap();
    store.commit_unchanged(2, &2u64.to_le_bytes()).unwrap();
    write(&store, 3, &chunks(&spec())[..3]);
    assert!(store.is_changing());
    assert_eq!(store.committed().step, 2);
    let (key, chunk) = chunks(&spec())[0];
    let read = |generation| {
        let lease = Lease::standalone(store.spec().chunk_bytes(key, chunk));
        store.read(key, chunk..chunk + 1, generation, lease).and_then(terrace_tiers::PendingRead::wait)
    };
    assert!(read(Generation::Newest).is_ok() && store.require_whole().is_ok());
    store.abandon();
    for error in [read(Generation::Newest).unwrap_err(), store.require_whole().unwrap_err()] {
        assert!(matches!(&error, TierError::Changing { dir, step: 2 } if *dir == dirs[0]), "{error}");
    }
    drop(store);
    let before: Vec<_> = dirs.iter().map(|dir| files(dir)).collect();
    let error = DiskStore::open(&engine(), &dirs).unwrap_err().to_string();
    for part in
        [dirs[0].to_str().unwrap(), "last whole at step 2", "with Engine::create", "Durability::Step or"]
    {
        assert!(error.contains(part), "{part:?} is in: {error}");
    }
    let created = DiskStore::create(&engine(), &Striping::equal(&dirs), spec());
    assert!(matches!(created, Err(TierError::Changing { step: 2, .. })));
    let mut view = StoreView::open(&engine(), &dirs, Access::Restore).unwrap();
    assert_eq!((view.changing_since(), view.commit(Commit::Last)), (Some(2), None));
    assert_eq!(view.commit(Commit::Previous), None);
    assert!(view.verify(Commit::Last, &mut |_, _| {}).unwrap().is_none());
    assert!(matches!(view.restore_previous(), Err(TierError::Changing { .. })));
    drop(view);
    assert_eq!(before, dirs.iter().map(|dir| files(dir)).collect::<Vec<_>>(), "nobody changed anything");
}

/// One generation: a sync of the manifest that fails does not make anybody throw away what is whole.
#[test]
fn a_sync_that_fails_loses_nothing_that_is_kept_once() {
    let once = StoreSpec { generations: 1, ..spec() };
    let dirs = [PathBuf::from("/disk0"), PathBuf::from("/disk1")];
    let (mut marks, mut commits) = (0, 0);
    for nth in 0.. {
        let disk: Arc<dyn IoEngine> =
            Arc::new(SimEngine::new(SimConfig { seed: nth, ..SimConfig::default() }));
        let store = DiskStore::create(&disk, &Striping::equal(&dirs), once.clone()).unwrap();
        step(&store, 0).unwrap();
        drop(store);
        let faults = Arc::new(FaultLayer::new(Arc::clone(&disk), FaultConfig::default()));
        let (store, _) = resumed(&(Arc::clone(&faults) as _), &dirs).unwrap();
        faults.fail_nth(Action::Sync, nth, IoErrorKind::Device);
        let key = chunks(&once)[0];
        let lease = Lease::standalone(once.chunk_bytes(key.0, key.1));
        if store.write(key.0, key.1, lease).is_err() {
            // The mark: no chunk was overwritten.
            store.abandon();
            store.require_whole().unwrap();
            drop(store);
            assert_eq!(resumed(&disk, &dirs).unwrap().1, 0);
            marks += 1;
            continue;
        }
        match step(&store, 1) {
            Ok(()) if faults.injected() == 0 => break,
            Ok(()) => panic!("sync {nth} does not matter"),
            Err(_) if !store.is_uncertain() => {
                // The data: they may not be there.
                store.abandon();
                assert!(matches!(store.require_whole().unwrap_err(), TierError::Changing { .. }));
            }
            Err(_) => {
                store.abandon();
                let error = store.require_whole().unwrap_err();
                assert!(matches!(error, TierError::Uncertain { .. }), "{error}");
                drop(store);
                assert_eq!(resumed(&disk, &dirs).unwrap().1, 1);
                commits += 1;
            }
        }
    }
    assert_eq!((marks, commits), (1, 1));
}

/// Whoever has all of the state elsewhere writes it once more.
#[test]
fn what_was_given_up_becomes_whole_when_all_of_it_is_written_anew() {
    let root = tempfile::tempdir().unwrap();
    let dirs = vec![root.path().join("a"), root.path().join("b")];
    let once = StoreSpec { generations: 1, ..spec() };
    let store = DiskStore::create(&engine(), &Striping::equal(&dirs), once).unwrap();
    step(&store, 0).unwrap();
    write(&store, 1, &chunks(&spec())[..5]);
    store.abandon();
    step(&store, 1).unwrap();
    assert!(!store.is_changing() && store.require_whole().is_ok());
    drop(store);
    assert_eq!(resumed(&engine(), &dirs).unwrap().1, 1);
}
