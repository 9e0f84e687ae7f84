//! One measurement: an engine with its files open, a load, and what the figures say.

use crate::diagnosis::{Diagnosis, Evidence};
use crate::failure::Failure;
use crate::files::DataFile;
use crate::progress::Meter;
use crate::sustained::{self, Sustained};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::bench::histogram::Histogram;
use terrace_aio::bench::load::{Lane, Load, Manner, Side, Tally, Timing};
use terrace_aio::bench::mix::{Direction, Schedule};
use terrace_aio::bench::pattern::{Key, PAGE_BYTES};
use terrace_aio::bench::region::Region;
use terrace_aio::engine::{EngineChoice, EngineConfig, open_default};
use terrace_aio::{EngineFacts, FileFacts, FileId, IoBuf, IoEngine, IoError, OpenMode};

/// Depth at which files are filled and checked outside of measurements.
const FILL_DEPTH: usize = 16;

/// How the bytes move.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    pub engine: EngineChoice,
    pub block_bytes: u64,
    pub queue_depth: usize,
    pub rings: usize,
    pub threads: Option<usize>,
    pub register: bool,
    pub sq_poll: bool,
    pub io_poll: bool,
    pub direct: bool,
}

/// What is asked of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    pub direction: Direction,
    pub random: bool,
    pub seed: u64,
    pub validate: bool,
    /// Passes over each direction's blocks; time decides when `None`.
    pub loops: Option<u64>,
}

/// An open engine with the files open in it.
pub struct Session {
    engine: Arc<dyn IoEngine>,
    settings: Settings,
    files: Vec<(FileId, FileFacts)>,
}

/// The result of a measurement.
#[derive(Debug)]
pub struct Measured {
    pub settings: Settings,
    pub workload: Workload,
    pub engine: String,
    pub facts: EngineFacts,
    pub is_registered: bool,
    pub is_direct: bool,
    pub dirs: Vec<PathBuf>,
    /// Operations in flight at most, over all directories.
    pub depth: usize,
    pub tally: Tally,
    pub gain_at_twice_the_depth: Option<f64>,
    pub sustained: Option<Sustained>,
}

impl Settings {
    /// Threads of the threads engine.
    pub fn threads(&self, dirs: usize) -> usize {
        self.threads.unwrap_or_else(|| (self.queue_depth * dirs).clamp(1, 32))
    }

    fn config(&self, dirs: usize) -> EngineConfig {
        // Directories may share a device, and then they share its queue as well.
        let in_flight = self.queue_depth * dirs;
        EngineConfig {
            choice: self.engine,
            block_bytes: self.block_bytes as usize,
            queue_depth: in_flight,
            requests_max: in_flight.max(1) * 2,
            rings: self.rings,
            threads: self.threads(dirs),
            register: self.register,
            sq_poll: self.sq_poll,
            io_poll: self.io_poll,
            direct: self.direct,
            ..EngineConfig::default()
        }
    }
}

impl Session {
    /// Opens the engine, and every file in it.
    pub fn open(settings: &Settings, files: &[DataFile]) -> Result<Self, Failure> {
        let engine = open_default(&settings.config(files.len()))?;
        let open = |file: &DataFile| -> Result<(FileId, FileFacts), IoError> {
            let id = engine.open(&file.open_path(), OpenMode::ReadWrite)?;
            Ok((id, engine.file_facts(id)?))
        };
        let open_named = |file: &DataFile| open(file).map_err(|e| named(e, file));
        let opened = files.iter().map(open_named).collect::<Result<_, Failure>>()?;
        Ok(Self { engine, settings: settings.clone(), files: opened })
    }

    /// Whether it is the engine of threads.
    pub fn has_threads(&self) -> bool {
        self.engine.name() == "threads"
    }

    /// Why each file that is not read and written directly is not.
    pub fn refusals<'a>(&'a self, files: &'a [DataFile]) -> impl Iterator<Item = (&'a Path, &'a str)> {
        let facts = self.files.iter().map(|(_, facts)| facts);
        files.iter().zip(facts).filter_map(|(file, facts)| {
            let refusal = facts.refusal.as_deref().unwrap_or("it does not say why");
            (!facts.is_direct && self.settings.direct).then_some((file.dir.as_path(), refusal))
        })
    }

    /// Runs one load to its end.
    pub fn measure(
        &self,
        files: &mut [DataFile],
        workload: Workload,
        timing: Timing,
        meter: &mut Meter,
    ) -> Result<Measured, Failure> {
        if workload.direction.writes() && !workload.validate {
            files.iter_mut().try_for_each(|file| file.set_stamped(false))?;
        }
        let blocks = files.iter().map(|file| file.data_bytes / self.settings.block_bytes).min().unwrap_or(1);
        let depth = self.settings.queue_depth.min(blocks as usize).max(1);
        let block_bytes = self.settings.block_bytes as usize;
        let region = Region::new(block_bytes * depth * files.len()).map_err(|e| {
            Failure::failed(format!("mapping memory for the blocks: {e}; lower --queue-depth"))
        })?;
        let mut registered = None;
        if self.settings.register {
            registered = Some(region.register(&*self.engine));
        }
        let is_registered = registered.as_ref().is_some_and(terrace_aio::bench::region::Registered::is_real);
        let mut buffers = region.cut(block_bytes);
        fill(&mut buffers);
        let is_direct = self.files.iter().all(|(_, facts)| facts.is_direct);
        let count_sync = counts_sync(is_direct, workload.direction);
        let manner = Manner { validate: workload.validate, count_sync };
        let timing = if workload.loops.is_some() { Timing::of_passes() } else { timing };
        let load = Load::new(&*self.engine, self.lanes(files, workload), buffers, manner);
        let tally = load.run(timing, meter).map_err(|e| self.rename(e, files))?;
        drop(registered);
        Ok(Measured {
            settings: self.settings.clone(),
            workload,
            engine: self.engine.name().to_owned(),
            facts: self.engine.facts(),
            is_registered,
            is_direct,
            dirs: files.iter().map(|file| file.dir.clone()).collect(),
            depth: depth * files.len(),
            tally,
            gain_at_twice_the_depth: None,
            sustained: None,
        })
    }

    fn lanes(&self, files: &[DataFile], workload: Workload) -> Vec<Lane> {
        let lane = |(file, (id, _)): (&DataFile, &(FileId, FileFacts))| {
            let blocks = file.data_bytes / self.settings.block_bytes;
            let seed = workload.random.then_some(workload.seed ^ (file.key.file << 32) ^ 0x6a09_e667);
            Lane {
                file: *id,
                path: file.path.clone(),
                key: file.key,
                schedule: Schedule::new(workload.direction, blocks, seed),
                left: workload.loops.map(|loops| loops * blocks),
            }
        };
        files.iter().zip(&self.files).map(lane).collect()
    }

    /// Names the file as the user knows it.
    fn rename(&self, error: IoError, files: &[DataFile]) -> Failure {
        match files.iter().find(|file| file.open_path() == error.path) {
            Some(file) => named(error, file),
            None => error.into(),
        }
    }
}

fn named(mut error: IoError, file: &DataFile) -> Failure {
    error.path = file.path.clone();
    error.into()
}

/// Content that no file system or drive compresses away, made before the clock starts.
fn fill(buffers: &mut [IoBuf]) {
    for (slot, buffer) in (0..).zip(buffers) {
        Key { seed: slot, file: u64::MAX }.fill(buffer, 0);
    }
}

/// Writes every page that is not known to hold what its key says.
pub fn stamp(files: &mut [DataFile], buffered: bool, meter: &mut Meter) -> Result<(), Failure> {
    for index in 0..files.len() {
        let one = &mut files[index..=index];
        if one[0].is_stamped {
            continue;
        }
        let done = pass(one, Direction::Write, buffered, meter)?;
        if !done.tally.interrupted {
            one[0].set_stamped(true)?;
        }
    }
    Ok(())
}

/// Reads everything and checks it.
pub fn verify(files: &mut [DataFile], buffered: bool, meter: &mut Meter) -> Result<Tally, Failure> {
    Ok(pass(files, Direction::Read, buffered, meter)?.tally)
}

fn pass(
    files: &mut [DataFile],
    direction: Direction,
    buffered: bool,
    meter: &mut Meter,
) -> Result<Measured, Failure> {
    let settings = Settings {
        engine: EngineChoice::Auto,
        block_bytes: block_for(files),
        queue_depth: FILL_DEPTH,
        rings: 1,
        threads: None,
        register: false,
        sq_poll: false,
        io_poll: false,
        direct: !buffered,
    };
    let session = Session::open(&settings, files)?;
    let workload = Workload { direction, random: false, seed: 0, validate: true, loops: Some(1) };
    session.measure(files, workload, Timing::of_passes(), meter)
}

/// The largest block up to 1 MiB that divides every length.
fn block_for(files: &[DataFile]) -> u64 {
    let mut block = 1 << 20;
    while block > PAGE_BYTES as u64 && !files.iter().all(|file| file.data_bytes.is_multiple_of(block)) {
        block /= 2;
    }
    block
}

impl Measured {
    /// Bytes of both directions per second, in 10⁹.
    pub fn gigabytes_per_second(&self) -> f64 {
        per_second(self.tally.bytes() as f64 / 1e9, self.tally.seconds)
    }

    /// Operations per second.
    pub fn iops(&self) -> f64 {
        per_second(self.tally.ops() as f64, self.tally.seconds)
    }

    /// Processor seconds per 10⁹ bytes.
    pub fn cpu_seconds_per_gigabyte(&self) -> f64 {
        per_second(self.tally.cpu.process, self.tally.bytes() as f64 / 1e9)
    }

    /// The latencies of both directions.
    pub fn latency(&self) -> Histogram {
        let mut all = self.tally.read.latency.clone();
        all.merge(&self.tally.write.latency);
        all
    }

    /// The direction's name with its mix.
    pub fn title(&self) -> String {
        let direction = self.workload.direction;
        direction.mix().map_or_else(|| direction.name().to_owned(), |mix| format!("mixed {mix}"))
    }

    /// One kind's rate in 10⁹ bytes per second.
    pub fn side_gigabytes_per_second(&self, side: &Side) -> f64 {
        per_second(side.bytes as f64 / 1e9, self.tally.seconds)
    }

    /// Each directory's rate in 10⁹ bytes per second.
    pub fn dir_rates(&self) -> impl Iterator<Item = (&Path, f64)> {
        let rate = |lane: &[u64; 2]| per_second((lane[0] + lane[1]) as f64 / 1e9, self.tally.seconds);
        self.dirs.iter().map(PathBuf::as_path).zip(self.tally.lanes.iter().map(rate))
    }

    /// Bytes of each full window, both directions.
    pub fn windows(&self) -> Vec<u64> {
        self.windows_of(self.tally.seconds)
    }

    /// The same without an `fdatasync` that counts: no block completes in it, which is no drop of the rate.
    fn windows_before_sync(&self) -> Vec<u64> {
        self.windows_of(self.seconds_before_sync())
    }

    fn seconds_before_sync(&self) -> f64 {
        let counted = counts_sync(self.is_direct, self.workload.direction);
        self.tally.seconds - if counted { self.tally.sync_seconds } else { 0.0 }
    }

    fn windows_of(&self, seconds: f64) -> Vec<u64> {
        let full = (seconds / self.tally.window.as_secs_f64()) as usize;
        let mut windows: Vec<u64> = self.tally.series.iter().take(full).map(|[r, w]| r + w).collect();
        // Windows at the end in which nothing completed are windows all the same.
        windows.resize(full.min(1 << 16), 0);
        windows
    }

    /// What limited it.
    pub fn diagnose(&self) -> Diagnosis {
        let tally = &self.tally;
        let submitter = per_second(tally.cpu.thread, tally.seconds);
        let threads = self.settings.threads(self.dirs.len());
        let windows = self.windows_before_sync();
        let evidence = Evidence {
            ops_per_second: per_second(tally.ops() as f64, self.seconds_before_sync()),
            mean_latency_ns: self.latency().mean(),
            depth: self.depth,
            submitter_busy: submitter,
            engine_busy: per_second(tally.cpu.process, tally.seconds) - submitter,
            engine_threads: if self.engine == "threads" { threads } else { self.settings.rings },
            polls: self.facts.features.iter().any(|feature| ["sqpoll", "iopoll"].contains(feature)),
            processors: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            windows: &windows,
            gain_at_twice_the_depth: self.gain_at_twice_the_depth,
            is_direct: self.is_direct,
        };
        evidence.diagnose()
    }

    /// Looks for a drop of the rate.
    pub fn examine_series(&mut self) {
        self.sustained = sustained::examine(&self.windows_before_sync(), self.tally.window.as_secs_f64());
    }
}

/// Whether the measured time ends with the `fdatasync`: through the page cache a rate without it would flatter.
fn counts_sync(is_direct: bool, direction: Direction) -> bool {
    !is_direct && direction.writes()
}

/// `amount` per `seconds`; 0 when there were none.
fn per_second(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::Interrupt;
    use std::time::Duration;
    use terrace_aio::engine::{SimConfig, SimEngine};

    /// A measurement in which nothing was moved.
    fn measured(is_direct: bool, direction: Direction) -> Measured {
        let (engine, mut meter) = (SimEngine::new(SimConfig::default()), Meter::new(Interrupt::default()));
        let manner = Manner { validate: false, count_sync: counts_sync(is_direct, direction) };
        let load = Load::new(&engine, Vec::new(), Vec::new(), manner);
        Measured {
            settings: Settings {
                engine: EngineChoice::Auto,
                block_bytes: 1 << 20,
                queue_depth: 1,
                rings: 1,
                threads: None,
                register: false,
                sq_poll: false,
                io_poll: false,
                direct: is_direct,
            },
            workload: Workload { direction, random: false, seed: 0, validate: false, loops: None },
            engine: "sim".to_owned(),
            facts: EngineFacts::default(),
            is_registered: false,
            is_direct,
            dirs: Vec::new(),
            depth: 1,
            tally: load.run(Timing::of_passes(), &mut meter).unwrap(),
            gain_at_twice_the_depth: None,
            sustained: None,
        }
    }

    /// A second of even windows, and as long a sync.
    fn even(is_direct: bool, direction: Direction, seconds: f64) -> Measured {
        let mut measured = measured(is_direct, direction);
        let tally = &mut measured.tally;
        (tally.series, tally.window) = (vec![[0, 1 << 20]; 8], Duration::from_millis(125));
        (tally.seconds, tally.sync_seconds) = (seconds, 1.0);
        tally.write.ops = 8;
        tally.write.latency.record(125_000_000);
        measured.examine_series();
        measured
    }

    #[test]
    fn a_sync_that_counts_is_no_drop_of_the_rate() {
        let cached = even(false, Direction::Write, 2.0);
        assert_eq!(cached.diagnose().limit, "cache");
        assert_eq!(cached.sustained.as_ref().map(|s| (s.kept, s.drop.clone())), Some((1.0, None)));
        assert_eq!(cached.windows().len(), 16, "the series is of all that was measured");
        // Elsewhere the time measured is without it.
        for (is_direct, direction) in [(true, Direction::Write), (false, Direction::Read)] {
            assert_eq!(even(is_direct, direction, 1.0).windows_before_sync().len(), 8);
            assert_eq!(even(is_direct, direction, 2.0).diagnose().limit, "throttled");
        }
    }
}
