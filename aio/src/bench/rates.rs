//! The rates of a profile: what each of several directories does alone, and what all of them do at once.
//!
//! Each directory gets a file that has no name from the moment it is open, so that a kill after it leaves nothing behind; what a kill
//! before it left is removed by the next measurement there. Every block of it is written before anything is measured: preallocated
//! blocks that never were are read without touching the drive.

use super::left_over;
use super::load::{Lane, Load, Manner, Tally, Timing, Watch};
use super::mix::{Direction, Mix, Schedule};
use super::pattern::Key;
use super::region::Region;
use super::space;
use crate::engine::{EngineConfig, open_default};
use crate::profile::{DiskProfile, PathProfile};
use crate::{BUF_ALIGN, FileId, IoBuf, IoEngine, IoError, OpenMode};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An optimizer reads and writes the same number of bytes.
const MIX: Mix = Mix { read: 1, write: 1 };
/// Blocks in a file at least: each direction of a mixed load has one of its own.
const BLOCKS_MIN: u64 = 2;
/// The part of the free space that a file takes at most: one in this many bytes.
const FREE_ONE_IN: u64 = 4;
/// How often a load is tried of which nothing is completed, and how much longer each time.
const TRIES: usize = 3;
const LONGER: f64 = 8.0;

/// What the names of the files begin with, before the number of the process.
const PREFIX: &str = ".terrace-measure-";

/// Held while a file of this process has a name.
static NAMING: Mutex<()> = Mutex::new(());

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Bytes of each directory's file, less where space is short.
    pub file_bytes: u64,
    /// Bytes of memory for the blocks in flight of a directory at most.
    pub memory_bytes: u64,
    /// Length of each measurement; a quarter of it is run before.
    pub seconds: f64,
    /// Whether nothing is run before, and the `fdatasync` after a measurement that writes is part of its time: what a drive, and the host
    /// of a virtual one, keep up when their caches are full, over times in which they are. A commit of a step is such a sync.
    pub sustained: bool,
}

/// Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Reading alone.
    pub read: f64,
    /// Writing alone.
    pub write: f64,
    /// Reading and writing as much, both together.
    pub mixed: f64,
}

/// What was measured.
#[derive(Debug)]
pub struct DiskRates {
    /// The settings, and each directory alone.
    pub profile: DiskProfile,
    /// All directories at once.
    pub together: Rates,
    /// What a reader of the figures must know.
    pub notes: Vec<String>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum RatesError {
    /// A directory cannot be used.
    #[error("{}: {source}", path.display())]
    Directory {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is too little space for anything that could be measured.
    #[error("{}: too little free space to measure ({free} bytes); free some or name another directory", path.display())]
    Space {
        /// Where.
        path: PathBuf,
        /// What there is.
        free: u64,
    },
    /// A transfer failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Nothing was completed, however long was waited.
    #[error("{}: nothing was transferred in {seconds} s; the disk is too slow or too busy to measure", path.display())]
    Nothing {
        /// Where.
        path: PathBuf,
        /// How long was waited.
        seconds: f64,
    },
}

/// As [`Disks::open`] and [`Disks::rates`].
///
/// # Errors
/// A directory cannot be used, has no space, or a transfer failed.
pub fn measure(config: &EngineConfig, dirs: &[PathBuf], effort: Effort) -> Result<DiskRates, RatesError> {
    Disks::open(config, dirs, effort)?.rates()
}

/// A mixed load on all directories, and what it did to other work.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beside {
    /// Bytes per second of the load, in both directions together.
    pub bytes_per_second: f64,
    /// Seconds of a call of the work before the load.
    pub alone: f64,
    /// The same during it.
    pub beside: f64,
}

/// The settings with blocks that are whole pages, of which a file has enough.
fn measurable(config: &EngineConfig, effort: Effort) -> EngineConfig {
    let most = usize::try_from(effort.file_bytes / BLOCKS_MIN).unwrap_or(usize::MAX);
    let block = config.block_bytes.min(most);
    EngineConfig {
        block_bytes: (block - block % BUF_ALIGN).max(BUF_ALIGN),
        queue_depth: config.queue_depth.max(1),
        ..config.clone()
    }
}

struct TestFile {
    id: FileId,
    dir: PathBuf,
    path: PathBuf,
    blocks: u64,
}

/// Directories with a file in each, which are open as long as this lives.
pub struct Disks {
    engine: Arc<dyn IoEngine>,
    config: EngineConfig,
    effort: Effort,
    files: Vec<TestFile>,
}

impl std::fmt::Debug for Disks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dirs = self.files.iter().map(|file| &file.dir);
        f.debug_list().entries(dirs).finish()
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for file in &self.files {
            // They have no names, and nobody reads them again.
            let _ = self.engine.close(file.id);
        }
    }
}

/// How much of a load.
#[derive(Debug, Clone, Copy)]
enum Amount {
    /// In each file.
    Blocks(u64),
    Seconds(f64),
    /// See [`Effort::sustained`].
    Sustained(f64),
}

impl Amount {
    fn blocks(self) -> Option<u64> {
        match self {
            Self::Blocks(blocks) => Some(blocks),
            Self::Seconds(_) | Self::Sustained(_) => None,
        }
    }

    fn longer(self) -> Self {
        match self {
            Self::Blocks(blocks) => Self::Blocks(blocks),
            Self::Seconds(seconds) => Self::Seconds(seconds * LONGER),
            Self::Sustained(seconds) => Self::Sustained(seconds * LONGER),
        }
    }
}

/// Nobody watches, and nobody stops it.
struct Nobody(AtomicBool);

impl Watch for Nobody {
    fn progress(&mut self, _: Duration, _: u64) {}

    fn stop_flag(&self) -> &AtomicBool {
        &self.0
    }
}

impl TestFile {
    fn make(
        engine: &Arc<dyn IoEngine>,
        config: &EngineConfig,
        dir: &Path,
        index: usize,
        effort: Effort,
    ) -> Result<Self, RatesError> {
        let failed = |source| RatesError::Directory { path: dir.to_owned(), source };
        let whole = dir.canonicalize().map_err(failed)?;
        let _naming = NAMING.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock: no other file of this process has a name.
        left_over::remove(&whole, PREFIX);
        let (total, free) = space::space_of(&whole).map_err(failed)?;
        let block = config.block_bytes as u64;
        // A file system that does not count its space has none in total.
        let room = if total == 0 { u64::MAX } else { free / FREE_ONE_IN };
        let blocks = effort.file_bytes.min(room) / block;
        if blocks < BLOCKS_MIN {
            return Err(RatesError::Space { path: dir.to_owned(), free });
        }
        let path = whole.join(format!("{PREFIX}{}-{index}.dat", std::process::id()));
        let id = engine.open(&path, OpenMode::CreateNew { len: blocks * block })?;
        match std::fs::remove_file(&path) {
            // Somebody in another container took it for a leftover.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            removed => removed.map_err(failed)?,
        }
        Ok(Self { id, dir: whole, path, blocks })
    }

    fn note(&self, engine: &dyn IoEngine, config: &EngineConfig) -> Result<Option<String>, RatesError> {
        let facts = engine.file_facts(self.id)?;
        let dir = self.dir.display();
        Ok(if space::is_in_memory(&self.dir) {
            Some(format!("{dir} is a file system in memory: its figures are not a drive's"))
        } else if config.direct && !facts.is_direct {
            let why = facts.refusal.as_deref().unwrap_or("it does not say why");
            Some(format!("{dir} refuses direct I/O ({why}): its figures went through the page cache"))
        } else {
            None
        })
    }
}

impl Disks {
    /// Prepares to measure `dirs`, which exist, through an engine with the settings that a run uses: its blocks are cut to whole pages, and
    /// to what the files have room for. All of each file is written.
    ///
    /// # Errors
    /// A directory cannot be used, has no space, or a transfer failed.
    pub fn open(config: &EngineConfig, dirs: &[PathBuf], effort: Effort) -> Result<Self, RatesError> {
        let config = measurable(config, effort);
        let engine = open_default(&config)?;
        let mut disks = Self { engine, config, effort, files: Vec::new() };
        for (index, dir) in dirs.iter().enumerate() {
            disks.files.push(TestFile::make(&disks.engine, &disks.config, dir, index, effort)?);
        }
        for file in &disks.files {
            disks.run(std::slice::from_ref(file), Direction::Write, Amount::Blocks(file.blocks))?;
        }
        Ok(disks)
    }

    /// What each directory does alone, and all do at once.
    ///
    /// # Errors
    /// A transfer failed.
    pub fn rates(&self) -> Result<DiskRates, RatesError> {
        let (config, files) = (&self.config, &self.files);
        let mut notes = Vec::new();
        for file in files {
            notes.extend(file.note(&*self.engine, config)?);
        }
        let mut paths = Vec::new();
        for file in files {
            let Rates { read, write, mixed } = self.rates_of(std::slice::from_ref(file))?;
            paths.push(PathProfile {
                path: file.dir.clone(),
                read_bytes_per_second: read,
                write_bytes_per_second: write,
                mixed_bytes_per_second: mixed,
            });
        }
        let together = match &paths[..] {
            [one] => Rates {
                read: one.read_bytes_per_second,
                write: one.write_bytes_per_second,
                mixed: one.mixed_bytes_per_second,
            },
            _ => self.rates_of(files)?,
        };
        let profile = DiskProfile {
            engine: if self.engine.name() == "threads" { "threads" } else { "uring" }.to_owned(),
            block_bytes: config.block_bytes,
            queue_depth: config.queue_depth,
            rings: config.rings,
            register: config.register,
            threads: config.threads,
            paths,
        };
        Ok(DiskRates { profile, together, notes })
    }

    /// Calls `work` again and again for so many seconds while nothing else runs, then while the directories carry as much as they can in
    /// both directions; `rounds` times.
    ///
    /// # Errors
    /// A transfer failed.
    pub fn beside(
        &self,
        seconds: f64,
        rounds: usize,
        mut work: impl FnMut(),
    ) -> Result<Vec<Beside>, RatesError> {
        let mut mean = |goes_on: &dyn Fn(Duration) -> bool| {
            let (began, mut calls) = (Instant::now(), 0);
            while calls == 0 || goes_on(began.elapsed()) {
                work();
                calls += 1;
            }
            began.elapsed().as_secs_f64() / f64::from(calls)
        };
        mean(&|_| false);
        let round = |_| {
            let alone = mean(&|since| since.as_secs_f64() < seconds);
            std::thread::scope(|scope| {
                let load =
                    scope.spawn(|| self.run(&self.files, Direction::Mixed(MIX), Amount::Seconds(seconds)));
                let beside = mean(&|_| !load.is_finished());
                let load = load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                Ok(Beside { bytes_per_second: load?, alone, beside })
            })
        };
        (0..rounds).map(round).collect()
    }

    fn rates_of(&self, files: &[TestFile]) -> Result<Rates, RatesError> {
        let Effort { seconds, sustained, .. } = self.effort;
        let amount = if sustained { Amount::Sustained(seconds) } else { Amount::Seconds(seconds) };
        Ok(Rates {
            read: self.run(files, Direction::Read, amount)?,
            write: self.run(files, Direction::Write, amount)?,
            mixed: self.run(files, Direction::Mixed(MIX), amount)?,
        })
    }

    /// Bytes per second of one load on `files`. One that a busy disk completes nothing of is tried again for longer.
    fn run(&self, files: &[TestFile], direction: Direction, amount: Amount) -> Result<f64, RatesError> {
        let longer = std::iter::successors(Some(amount), |amount| Some(amount.longer()));
        let mut last = 0.0;
        for amount in longer.take(TRIES) {
            let tally = self.load(files, direction, amount)?;
            let rate = tally.bytes() as f64 / tally.seconds;
            if rate.is_finite() && rate >= 1.0 {
                // A profile reads back as it was written.
                return Ok(rate.round());
            }
            last = tally.seconds;
        }
        Err(RatesError::Nothing { path: files[0].dir.clone(), seconds: last })
    }

    fn load(&self, files: &[TestFile], direction: Direction, amount: Amount) -> Result<Tally, RatesError> {
        let memory_bytes = self.effort.memory_bytes;
        let block = self.config.block_bytes;
        let blocks = files.iter().map(|file| file.blocks).min().unwrap_or(1);
        // A mixed load goes through half of the blocks in each direction.
        let most = blocks.min(memory_bytes / block as u64).max(1) as usize;
        let depth = self.config.queue_depth.min(most);
        let region = Region::new(block * depth * files.len())
            .map_err(|source| RatesError::Directory { path: files[0].dir.clone(), source })?;
        let registered = self.config.register.then(|| region.register(&*self.engine));
        let mut buffers = region.cut(block);
        fill(&mut buffers);
        let is_direct = files.iter().try_fold(true, |all, file| {
            self.engine.file_facts(file.id).map(|facts| all && facts.is_direct)
        })?;
        let counted = !is_direct || matches!(amount, Amount::Sustained(_));
        let manner = Manner { validate: false, count_sync: counted && direction.writes() };
        let lanes = files.iter().enumerate().map(|(index, file)| Lane {
            file: file.id,
            path: file.path.clone(),
            key: Key { seed: 0, file: index as u64 },
            schedule: Schedule::new(direction, file.blocks, None),
            left: amount.blocks(),
        });
        let timing = match amount {
            Amount::Blocks(_) => Timing::of_passes(),
            Amount::Seconds(seconds) => Timing::of(seconds / 4.0, seconds),
            Amount::Sustained(seconds) => Timing::of(0.0, seconds),
        };
        let load = Load::new(&*self.engine, lanes.collect(), buffers, manner);
        let tally = load.run(timing, &mut Nobody(AtomicBool::new(false)))?;
        drop(registered);
        Ok(tally)
    }
}

/// Content that no file system or drive compresses away.
fn fill(buffers: &mut [IoBuf]) {
    for (slot, buffer) in (0..).zip(buffers) {
        Key { seed: slot, file: u64::MAX }.fill(buffer, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{ThrottleConfig, ThrottleLayer};

    const EFFORT: Effort =
        Effort { file_bytes: 4 << 20, memory_bytes: 1 << 20, seconds: 0.02, sustained: false };

    fn config() -> EngineConfig {
        EngineConfig { block_bytes: 64 << 10, queue_depth: 4, ..EngineConfig::default() }
    }

    #[test]
    fn every_directory_alone_and_all_at_once() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let dirs = [a.path().to_owned(), b.path().to_owned()];
        let found = measure(&config(), &dirs, EFFORT).unwrap();
        assert_eq!(found.profile.paths.len(), 2);
        assert_eq!(found.profile.paths[1].path, b.path().canonicalize().unwrap());
        assert!(found.together.read > 0.0 && found.together.write > 0.0 && found.together.mixed > 0.0);
        let text = found.profile.to_json().to_string();
        assert_eq!(DiskProfile::from_json(&text).unwrap(), found.profile);
        for dir in dirs {
            assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "nothing is left behind");
        }
    }

    /// An engine whose syncs take longer than what is measured.
    #[derive(Debug)]
    struct SlowSyncs {
        engine: Arc<dyn IoEngine>,
    }

    const SYNC_SECONDS: f64 = 0.4;

    impl IoEngine for SlowSyncs {
        crate::pass_files_on!(engine);

        fn submit(&self, request: crate::Request) -> crate::Ticket {
            self.engine.submit(request)
        }

        fn sync(&self, file: FileId) -> crate::Ticket {
            std::thread::sleep(Duration::from_secs_f64(SYNC_SECONDS));
            self.engine.sync(file)
        }
    }

    #[test]
    fn syncs_count_in_what_a_disk_keeps_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut disks = Disks::open(&config(), &[dir.path().to_owned()], EFFORT).unwrap();
        disks.engine = Arc::new(SlowSyncs { engine: Arc::clone(&disks.engine) });
        let is_direct = disks.engine.file_facts(disks.files[0].id).unwrap().is_direct;
        for direction in [Direction::Write, Direction::Mixed(MIX)] {
            let kept_up = disks.load(&disks.files, direction, Amount::Sustained(EFFORT.seconds)).unwrap();
            assert!(kept_up.seconds >= kept_up.sync_seconds && kept_up.sync_seconds >= SYNC_SECONDS);
            let began = Instant::now();
            let briefly = disks.load(&disks.files, direction, Amount::Seconds(EFFORT.seconds)).unwrap();
            let (whole, both) = (began.elapsed().as_secs_f64(), briefly.seconds + briefly.sync_seconds);
            // Through the page cache they always count.
            assert!(!is_direct || whole >= both, "{direction:?}: {whole} s, {both} s");
        }
        let reading = disks.load(&disks.files, Direction::Read, Amount::Sustained(EFFORT.seconds)).unwrap();
        assert!(reading.bytes() > 0);
    }

    #[test]
    fn a_disk_that_is_busy_for_longer_than_a_measurement_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let mut disks = Disks::open(&config(), &[dir.path().to_owned()], EFFORT).unwrap();
        // The first of its blocks is there when a measurement is over.
        let rate = config().block_bytes as f64 / (8.0 * EFFORT.seconds);
        let slow = ThrottleConfig {
            read_bytes_per_second: rate,
            write_bytes_per_second: rate,
            ..Default::default()
        };
        disks.engine = Arc::new(ThrottleLayer::new(Arc::clone(&disks.engine), slow));
        let found = disks.rates().unwrap().together;
        assert!(found.read >= 1.0 && found.write >= 1.0 && found.mixed >= 1.0, "{found:?}");
    }

    #[test]
    fn work_goes_on_beside_a_load() {
        let dir = tempfile::tempdir().unwrap();
        let mut calls = 0;
        let disks = Disks::open(&config(), &[dir.path().to_owned()], EFFORT).unwrap();
        let found = disks.beside(EFFORT.seconds, 3, || {
            calls += 1;
            std::thread::sleep(Duration::from_millis(1));
        });
        let found = found.unwrap();
        assert_eq!(found.len(), 3);
        assert!(found.iter().all(|round| round.bytes_per_second >= 1.0 && round.alone >= 1e-3), "{found:?}");
        assert!(found.iter().all(|round| round.beside >= 1e-3), "{found:?}");
        assert!(calls > 2 * 3, "one to warm up, and in every round one of each: {calls}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }

    #[test]
    fn blocks_that_cannot_be_are_brought_to_ones_that_can() {
        let dir = tempfile::tempdir().unwrap();
        let effort = Effort { memory_bytes: 16 << 20, ..EFFORT };
        // No whole pages, longer than the file, and none.
        for (block_bytes, used) in [(1_000_000, 999_424), (1 << 30, 2 << 20), (0, 4096)] {
            let config = EngineConfig { block_bytes, ..config() };
            let found = measure(&config, &[dir.path().to_owned()], effort).unwrap();
            assert_eq!(found.profile.block_bytes, used, "{block_bytes}");
        }
        let config = EngineConfig { queue_depth: 0, ..config() };
        assert_eq!(measure(&config, &[dir.path().to_owned()], effort).unwrap().profile.queue_depth, 1);
    }

    #[test]
    fn files_of_processes_that_were_killed_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let left = |process: u32, index: u32| dir.path().join(format!("{PREFIX}{process}-{index}.dat"));
        // No process has the first number; the second was that of one in another container, and is this one's now; the third lives.
        let gone = [left(u32::MAX, 0), left(std::process::id(), 0), left(std::process::id(), 7)];
        let kept = [left(std::os::unix::process::parent_id(), 0), dir.path().join(".terrace-measurements")];
        gone.iter().chain(&kept).for_each(|path| std::fs::write(path, "x").unwrap());
        measure(&config(), &[dir.path().to_owned()], EFFORT).unwrap();
        assert!(gone.iter().all(|path| !path.exists()));
        assert!(kept.iter().all(|path| path.exists()));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let missing = PathBuf::from("/nowhere/at/all");
        let error = measure(&config(), &[missing], EFFORT).unwrap_err().to_string();
        assert!(error.contains("/nowhere/at/all"), "{error}");
    }
}
