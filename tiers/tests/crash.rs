//! The state on disk survives a power cut at every operation.
//!
//! A store over the simulated disk is created and taken through a few steps. The power is cut after the n-th operation, for
//! every n, and the disk comes up with some of the un-synced sectors lost and others not. What must hold then:
//! - the step whose commit returned last, or the one whose commit was under way, is there, and every byte of it is right;
//! - a cut before the first commit returned may leave no state at all, and then creation starts over;
//! - either way the run goes on from there.
//!
//! With one generation there is nothing between the first write of a step and its commit, and it must say so: a store that is
//! found whole is whole, and one that was written to is refused.
//!
//! Every failure names the seed. The canaries break the protocol on purpose and must be caught.

use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, IoErrorKind, Request, Ticket};
use terrace_tiers::{
    BlobKey, BlobKind, BlobSpec, DiskStore, Generation, GroupSpec, Lease, StoreSpec, Striping, SyncAhead,
    TierError,
};

/// Steps after the initial one, whose number is 0.
const STEPS: u64 = 2;

/// A layout and the directories it lies in.
struct Layout {
    spec: StoreSpec,
    dirs: Vec<PathBuf>,
    weights: Vec<f64>,
    block_bytes: usize,
    /// Whether steps 1, 4, 7, … write half of their chunks and are then given up, so that they change nothing.
    skips: bool,
}

/// How far a run came before its disk failed.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    /// The last step whose commit returned.
    returned: Option<u64>,
    /// The last step whose commit was called.
    called: Option<u64>,
    /// The last step of which something was to be written.
    touched: Option<u64>,
    /// The last step of which something was accepted for writing.
    begun: Option<u64>,
}

impl Layout {
    /// Some forty pages in one directory: many operations, each small.
    fn small() -> Self {
        let kinds = [(BlobKind::Weight, 2), (BlobKind::MasterLow, 2), (BlobKind::Moment1, 4)];
        Self::new(&[("embedding", 2560), ("layers.0", 1024), ("head", 1536)], &kinds, 1024, 1, 3000)
    }

    /// The same with one generation.
    fn once() -> Self {
        let small = Self::small();
        Self { spec: StoreSpec { generations: 1, ..small.spec }, ..small }
    }

    /// Both generations together cover three stripes, so that all three directories hold data.
    fn striped() -> Self {
        let kinds = [(BlobKind::Weight, 2), (BlobKind::Moment1, 4)];
        Self::new(&[("layers.0", (1 << 17) + (1 << 15)), ("head", 1 << 16)], &kinds, 1 << 17, 3, 1 << 19)
    }

    fn new(
        groups: &[(&str, u64)],
        kinds: &[(BlobKind, u64)],
        chunk_elements: u64,
        dirs: usize,
        block_bytes: usize,
    ) -> Self {
        let group = |&(name, elements): &(&str, u64)| GroupSpec { name: name.into(), elements };
        let kind = |&(kind, element_bytes): &(BlobKind, u64)| BlobSpec::plain(kind, element_bytes);
        let spec = StoreSpec {
            groups: groups.iter().map(group).collect(),
            kinds: kinds.iter().map(kind).collect(),
            chunk_elements,
            generations: 2,
            identity: "{\"run\":\"crash\"}".into(),
        };
        Self {
            spec,
            dirs: (0..dirs).map(|i| PathBuf::from(format!("/disk{i}"))).collect(),
            weights: vec![1.0; dirs],
            block_bytes,
            skips: false,
        }
    }

    fn is_skipped(&self, step: u64) -> bool {
        self.skips && step % 3 == 1
    }

    fn striping(&self) -> Striping {
        Striping::weighted(&self.dirs, &self.weights).expect("the weights are sound")
    }

    fn disk(&self, seed: u64) -> Arc<SimEngine> {
        let block_bytes = self.block_bytes;
        Arc::new(SimEngine::new(SimConfig { seed, block_bytes, ..SimConfig::default() }))
    }

    fn chunks(&self) -> Vec<(BlobKey, usize)> {
        let groups = 0..self.spec.groups.len();
        let blobs =
            groups.flat_map(|group| self.spec.kinds.iter().map(move |k| BlobKey { group, kind: k.kind }));
        blobs.flat_map(|key| (0..self.spec.chunks(key.group)).map(move |chunk| (key, chunk))).collect()
    }

    /// What a chunk holds after a step.
    fn contents(&self, step: u64, key: BlobKey, chunk: usize) -> Lease {
        let len = self.spec.chunk_bytes(key, chunk);
        let mut lease = Lease::standalone(len);
        let step = if self.is_skipped(step) { step - 1 } else { step };
        let mut state = (step << 32 | (key.group as u64) << 16 | (key.kind as u64) << 8 | chunk as u64) + 1;
        for word in lease.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        lease
    }

    /// One step as a trainer does it: read the live generation, write the next one, commit.
    fn step(&self, store: &mut DiskStore, step: u64, progress: &mut Progress) -> Result<(), TierError> {
        if self.is_skipped(step) {
            for (key, chunk) in self.chunks().into_iter().step_by(2) {
                store.write(key, chunk, self.contents(step + 1, key, chunk))?;
            }
            progress.called = Some(step);
            store.commit_unchanged(step, &step.to_le_bytes())?;
            progress.returned = Some(step);
            return Ok(());
        }
        for (key, chunk) in self.chunks() {
            if step > 0 {
                let _old = self.read(store, key, chunk, Generation::Live)?;
            }
            progress.touched = Some(step);
            store.write(key, chunk, self.contents(step, key, chunk))?;
            progress.begun = Some(step);
            if (chunk + step as usize).is_multiple_of(3) {
                let read_back = self.read(store, key, chunk, Generation::Next)?;
                assert_eq!(*read_back, *self.contents(step, key, chunk), "a read waits for the write");
            }
        }
        progress.called = Some(step);
        store.commit(step, &step.to_le_bytes())?;
        progress.returned = Some(step);
        Ok(())
    }

    fn read(
        &self,
        store: &DiskStore,
        key: BlobKey,
        chunk: usize,
        generation: Generation,
    ) -> Result<Lease, TierError> {
        let len = self.spec.chunk_bytes(key, chunk);
        store.read(key, chunk..chunk + 1, generation, Lease::standalone(len))?.wait()
    }

    /// Creates a store and takes all steps, until the disk fails.
    fn run(&self, engine: &Arc<dyn IoEngine>) -> (Progress, Option<TierError>) {
        let mut progress = Progress::default();
        let error = self.create_and_step(engine, &mut progress).err();
        (progress, error)
    }

    fn create_and_step(&self, engine: &Arc<dyn IoEngine>, progress: &mut Progress) -> Result<(), TierError> {
        let mut store = DiskStore::create(engine, &self.striping(), self.spec.clone())?;
        (0..=STEPS).try_for_each(|step| self.step(&mut store, step, progress))
    }

    /// Says what is wrong with a disk that came up after `progress`, and goes on from it if nothing is.
    fn examine(&self, engine: &Arc<dyn IoEngine>, progress: Progress) -> Result<(), String> {
        let mut store = match DiskStore::open(engine, &self.dirs) {
            Ok(store) => store,
            Err(TierError::NoState { .. }) if progress.returned.is_none() => {
                let (again, error) = self.run(engine);
                return match error {
                    None if again.returned == Some(STEPS) => Ok(()),
                    error => Err(format!("creation cannot start over: {error:?}")),
                };
            }
            Err(TierError::Changing { step, .. }) if self.spec.generations == 1 => {
                return self.is_rightly_refused(engine, step, progress);
            }
            Err(error) => return Err(format!("opening failed: {error}")),
        };
        let found = store.committed().clone();
        if self.spec.generations == 1 && progress.begun > Some(found.step) {
            return Err(format!("step {} is found whole, and was written over", found.step));
        }
        if Some(found.step) != progress.returned && Some(found.step) != progress.called {
            return Err(format!("found step {}", found.step));
        }
        self.intact(&store, found.step)?;
        let (next, mut after) = (found.step + 1, Progress::default());
        self.step(&mut store, next, &mut after).map_err(|e| format!("cannot go on: {e}"))?;
        self.intact(&store, next)
    }

    /// The only generation of step `last` is not whole: something was written over it, and nothing can be made in its place.
    fn is_rightly_refused(
        &self,
        engine: &Arc<dyn IoEngine>,
        last: u64,
        progress: Progress,
    ) -> Result<(), String> {
        if progress.returned != Some(last) || progress.touched <= Some(last) {
            return Err(format!("step {last} is refused, and nothing was written over it"));
        }
        match DiskStore::create(engine, &self.striping(), self.spec.clone()) {
            Err(TierError::Changing { .. }) => Ok(()),
            other => Err(format!("creating over it gives {other:?}")),
        }
    }

    fn intact(&self, store: &DiskStore, step: u64) -> Result<(), String> {
        if store.committed().trainer != step.to_le_bytes() {
            return Err(format!("step {step} has the words {:?}", store.committed().trainer));
        }
        for (key, chunk) in self.chunks() {
            let found = self.read(store, key, chunk, Generation::Live).map_err(|e| e.to_string())?;
            if *found != *self.contents(step, key, chunk) {
                return Err(format!("chunk {chunk} of {key:?} is not that of step {step}"));
            }
        }
        Ok(())
    }

    /// Cuts the power at every operation of a run; `wrap` puts layers over the disk. Gives the first violation.
    fn cut_everywhere(
        &self,
        seed: u64,
        wrap: impl Fn(Arc<SimEngine>) -> Arc<dyn IoEngine>,
    ) -> Result<u64, String> {
        let disk = self.disk(seed);
        let (progress, error) = self.run(&wrap(Arc::clone(&disk)));
        assert!(error.is_none() && progress.returned == Some(STEPS), "seed {seed}: {error:?}");
        let operations = disk.operations();
        for cut in 0..=operations {
            let disk = self.disk(seed);
            disk.power_cut_after(cut);
            let (progress, error) = self.run(&wrap(Arc::clone(&disk)));
            if let Some(error) = error {
                assert!(is_cut(&error), "seed {seed}, cut after {cut}: {error}");
            }
            for image in 0..2 {
                let image = seed.wrapping_mul(1009) + cut * 2 + image;
                let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(image));
                self.examine(&survivor, progress).map_err(|what| {
                    format!(
                        "seed {seed}, cut after {cut} of {operations}, image {image}, {progress:?}: {what}"
                    )
                })?;
            }
        }
        Ok(operations)
    }
}

fn is_cut(error: &TierError) -> bool {
    matches!(error, TierError::Io(IoError { kind: IoErrorKind::Closed, .. }))
}

fn bare(disk: Arc<SimEngine>) -> Arc<dyn IoEngine> {
    disk
}

#[test]
fn one_directory_survives_a_cut_at_every_operation() {
    let layout = Layout::small();
    for seed in 0..16 {
        let operations = layout.cut_everywhere(seed, bare).unwrap_or_else(|what| panic!("{what}"));
        assert!(operations > 100, "the cuts cover many operations: {operations}");
    }
}

#[test]
fn a_commit_of_unchanged_state_survives_a_cut_at_every_operation() {
    for seed in 20..28 {
        let layout = Layout { skips: true, ..Layout::small() };
        layout.cut_everywhere(seed, bare).unwrap_or_else(|what| panic!("{what}"));
    }
    let layout = Layout { skips: true, ..Layout::striped() };
    layout.cut_everywhere(120, bare).unwrap_or_else(|what| panic!("{what}"));
}

#[test]
fn three_directories_survive_a_cut_at_every_operation() {
    let layout = Layout::striped();
    for seed in 100..102 {
        layout.cut_everywhere(seed, bare).unwrap_or_else(|what| panic!("{what}"));
    }
}

#[test]
fn one_generation_is_whole_or_refused_after_a_cut_at_every_operation() {
    for seed in 600..616 {
        Layout::once().cut_everywhere(seed, bare).unwrap_or_else(|what| panic!("{what}"));
    }
}

#[test]
fn directories_of_different_speed_survive_a_cut_at_every_operation() {
    let layout = Layout { weights: vec![1.0, 2.0, 1.0], ..Layout::striped() };
    layout.cut_everywhere(110, bare).unwrap_or_else(|what| panic!("{what}"));
}

/// A second cut while the first one is being recovered from.
#[test]
fn a_cut_during_recovery_changes_nothing() {
    let layout = Layout::small();
    for seed in 200..206 {
        let disk = layout.disk(seed);
        layout.run(&bare(Arc::clone(&disk)));
        let operations = disk.operations();
        for cut in (0..operations).step_by(7) {
            let disk = layout.disk(seed);
            disk.power_cut_after(cut);
            let (mut progress, _) = layout.run(&bare(Arc::clone(&disk)));
            let second = Arc::new(disk.crash(seed + cut));
            second.power_cut_after(cut % 41);
            let engine = bare(Arc::clone(&second));
            match DiskStore::open(&engine, &layout.dirs) {
                Ok(mut store) => {
                    // What was found may be the step in flight; it is durable now.
                    let found = store.committed().step;
                    progress = Progress { returned: Some(found), called: Some(found), ..progress };
                    let _ = layout.step(&mut store, found + 1, &mut progress);
                }
                Err(TierError::NoState { .. }) => progress = layout.run(&engine).0,
                Err(error) => assert!(is_cut(&error), "seed {seed}, cut after {cut}: {error}"),
            }
            let survivor: Arc<dyn IoEngine> = Arc::new(second.crash(seed ^ cut));
            layout
                .examine(&survivor, progress)
                .unwrap_or_else(|what| panic!("seed {seed}, cut after {cut}, {progress:?}: {what}"));
        }
    }
}

/// A write or a sync fails at every place of a run, the trainer goes on with the next step as if nothing had happened, and
/// soon the power fails as well.
#[test]
fn a_failed_commit_is_not_built_upon() {
    for sync_ahead in [SyncAhead::Never, SyncAhead::Always] {
        let (failed_syncs, refused) = failing(&Layout::small(), sync_ahead);
        assert!(failed_syncs > 0 && refused > 0, "{failed_syncs} syncs failed, {refused} steps were refused");
    }
}

/// The same with one generation, which is lost with the step that failed.
#[test]
fn a_failed_step_of_the_only_generation_is_not_built_upon() {
    let (failed_syncs, refused) = failing(&Layout::once(), SyncAhead::Always);
    assert!(failed_syncs > 0 && refused > 0, "{failed_syncs} syncs failed, {refused} steps were refused");
}

/// How many syncs failed, and how many steps were refused after that.
fn failing(layout: &Layout, sync_ahead: SyncAhead) -> (u32, u32) {
    let (mut failed_syncs, mut refused) = (0, 0);
    for seed in 300..310 {
        for action in [Action::Sync, Action::Write] {
            for nth in 0.. {
                let disk = layout.disk(seed);
                let faults = Arc::new(FaultLayer::new(Arc::clone(&disk) as _, FaultConfig::default()));
                faults.fail_nth(action, nth, IoErrorKind::Device);
                let mut progress = Progress::default();
                let engine: Arc<dyn IoEngine> = Arc::clone(&faults) as _;
                let created = DiskStore::create(&engine, &layout.striping(), layout.spec.clone());
                if let Ok(mut store) = created.map(|store| store.sync_ahead(sync_ahead)) {
                    for step in 0..=STEPS {
                        match layout.step(&mut store, step, &mut progress) {
                            Ok(()) => {}
                            Err(TierError::Uncertain { .. } | TierError::Changing { .. }) => refused += 1,
                            Err(error) => {
                                assert!(error.to_string().contains(".bin"), "it names the file: {error}");
                                failed_syncs += u32::from(action == Action::Sync);
                                store.abandon();
                                disk.power_cut_after((seed * 13 + nth * 5) % 40);
                            }
                        }
                    }
                }
                let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(seed + nth));
                layout.examine(&survivor, progress).unwrap_or_else(|what| {
                    panic!("seed {seed}, {action:?} {nth} failed, {progress:?}: {what}")
                });
                if faults.injected() == 0 {
                    break;
                }
            }
        }
    }
    (failed_syncs, refused)
}

/// What was written is made durable in several syncs, of which one that failed is enough to refuse the commit: the next may say that all is
/// well.
#[test]
fn a_sync_ahead_that_failed_fails_the_commit() {
    let layout = Layout::small();
    let counts = [SyncAhead::Never, SyncAhead::Auto, SyncAhead::Always].map(|sync_ahead| {
        let mut failed = 0;
        for nth in 0.. {
            let disk = layout.disk(7);
            let faults = Arc::new(FaultLayer::new(disk as _, FaultConfig::default()));
            let engine: Arc<dyn IoEngine> = Arc::clone(&faults) as _;
            let mut progress = Progress::default();
            let store = DiskStore::create(&engine, &layout.striping(), layout.spec.clone()).unwrap();
            let mut store = store.sync_ahead(sync_ahead);
            layout.step(&mut store, 0, &mut progress).unwrap();
            faults.fail_nth(Action::Sync, nth, IoErrorKind::Device);
            let result = layout.step(&mut store, 1, &mut progress);
            assert_eq!(result.is_err(), faults.injected() == 1, "{sync_ahead:?}: sync {nth} failed");
            if result.is_ok() {
                break;
            }
            assert_eq!(store.committed().step, 0);
            failed += 1;
        }
        failed
    });
    // Of data and of the manifest.
    let [never, auto, always] = counts;
    assert!(never == auto && always >= never + 2 * layout.dirs.len(), "{counts:?} syncs");
}

/// A process ends between the write of a slot and its sync, or because of that sync. The next one sees the slot and goes on from
/// it, over the generation that the older slot refers to, until the power fails.
#[test]
fn a_commit_that_was_found_is_durable_before_it_is_built_upon() {
    let layout = Layout::small();
    let mut built_upon = 0;
    for seed in 500..506 {
        for nth in 0.. {
            let disk = layout.disk(seed);
            let faults = Arc::new(FaultLayer::new(Arc::clone(&disk) as _, FaultConfig::default()));
            faults.fail_nth(Action::Sync, nth, IoErrorKind::Device);
            let (mut progress, _) = layout.run(&(Arc::clone(&faults) as _));
            let engine = bare(Arc::clone(&disk));
            match DiskStore::open(&engine, &layout.dirs) {
                Ok(mut store) => {
                    let found = store.committed().step;
                    built_upon += u32::from(Some(found) != progress.returned);
                    progress = Progress { returned: Some(found), called: Some(found), ..progress };
                    disk.power_cut_after((seed * 13 + nth * 5) % 40);
                    let _ = layout.step(&mut store, found + 1, &mut progress);
                }
                Err(TierError::NoState { .. }) if progress.returned.is_none() => {}
                Err(error) => panic!("seed {seed}, sync {nth} failed, {progress:?}: {error}"),
            }
            let survivor: Arc<dyn IoEngine> = Arc::new(disk.crash(seed + nth));
            layout
                .examine(&survivor, progress)
                .unwrap_or_else(|what| panic!("seed {seed}, sync {nth} failed, {progress:?}: {what}"));
            if faults.injected() == 0 {
                break;
            }
        }
    }
    assert!(built_upon > 0, "some commits were found that nobody was told of");
}

/// An engine whose sync of some files returns at once and does nothing.
#[derive(Debug)]
struct LyingSync {
    upstream: Arc<SimEngine>,
    lies_about: &'static str,
}

impl IoEngine for LyingSync {
    terrace_aio::pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        self.upstream.submit(request)
    }

    fn sync(&self, file: FileId) -> Ticket {
        let path = self.upstream.path(file).unwrap_or_default();
        if path.ends_with(self.lies_about) {
            return Ticket::ready(Ok(IoBuf::empty()));
        }
        self.upstream.sync(file)
    }
}

fn is_caught(layout: &Layout, lies_about: &'static str) -> bool {
    let wrap = |upstream| Arc::new(LyingSync { upstream, lies_about }) as Arc<dyn IoEngine>;
    let caught = (400..410).find_map(|seed| layout.cut_everywhere(seed, wrap).err());
    println!("{lies_about}: {caught:?}");
    caught.is_some()
}

/// The canaries: a harness that sees nothing wrong with these proves nothing.
#[test]
fn a_commit_without_data_sync_is_caught() {
    assert!(is_caught(&Layout::small(), "state.bin"));
    assert!(is_caught(&Layout::once(), "state.bin"));
}

#[test]
fn a_commit_without_manifest_sync_is_caught() {
    assert!(is_caught(&Layout::small(), "manifest.bin"));
    assert!(is_caught(&Layout::once(), "manifest.bin"));
}
