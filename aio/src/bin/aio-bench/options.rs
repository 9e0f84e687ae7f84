//! The command line.

use crate::failure::Failure;
use crate::files::FilePlan;
use crate::measure::Settings;
use crate::units::{self, parse_size};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use terrace_aio::bench::mix::{Direction, Mix};
use terrace_aio::bench::pattern::PAGE_BYTES;
use terrace_aio::engine::{EngineChoice, QUEUE_DEPTH_MAX, RINGS_MAX};

/// The largest block.
const BLOCK_BYTES_MAX: u64 = 1 << 30;

/// Measures what disks really do, through the engine that Terrace uses.
///
/// Sizes take KiB, MiB, GiB, TiB; K, M, G, T mean the same (binary).
#[derive(Debug, Parser)]
#[command(
    name = "aio-bench",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub run: Run,
}

/// What to do instead of one measurement.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Tries block sizes, depths, rings and engines, and says what is best.
    Sweep(Sweep),
    /// Finds good settings and writes them for DeepSpeed and for Terrace.
    Tune(Tune),
    /// Runs fio beside itself with the same settings.
    Compare(Compare),
}

/// One measurement of each direction.
#[derive(Debug, Args)]
pub struct Run {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub shape: Shape,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub output: Output,
    /// Go on past the drive's cache: a time series, and where the rate dropped (60 s unless --seconds says otherwise).
    #[arg(long)]
    pub sustained: bool,
    /// Pass over each file this many times, instead of --seconds.
    #[arg(long, value_name = "N", conflicts_with_all = ["seconds", "sustained"], value_parser = clap::value_parser!(u64).range(1..))]
    pub loops: Option<u64>,
    /// Make every block's content from its place, check every block read, and read everything back after writing.
    #[arg(long)]
    pub validate: bool,
    /// Do not try twice the depth to find out what the limit is.
    #[arg(long)]
    pub no_probe: bool,
    #[command(flatten)]
    pub foreign: Foreign,
}

/// Where.
#[derive(Debug, Args)]
pub struct Place {
    /// Directory on the disk to measure; give several to use them at once, each with a window of its own.
    #[arg(long = "dir", alias = "folder", value_name = "DIR", required = true)]
    pub dirs: Vec<PathBuf>,
    /// Bytes of the file in each directory.
    #[arg(long, alias = "io_size", value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    pub file_size: u64,
    /// Leave the files (aio-bench-N.dat) in place.
    #[arg(long)]
    pub keep: bool,
    /// Use files that --keep left; make and keep them where there are none.
    #[arg(long)]
    pub reuse: bool,
    /// Bytes to leave free on each file system [default: 5 % of it or 1 GiB, whichever is more].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub reserve: Option<u64>,
    /// What the content and the random order follow from.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// Which directions, in which order.
#[derive(Debug, Args)]
pub struct Shape {
    /// Measure reading (without --read, --write and --mixed: all three).
    #[arg(long)]
    pub read: bool,
    /// Measure writing.
    #[arg(long)]
    pub write: bool,
    /// Measure reading and writing at once: reads in the file's first half, writes in its second.
    #[arg(long)]
    pub mixed: bool,
    /// Bytes read to bytes written in a mixed measurement [default: 1:1].
    #[arg(long, value_name = "R:W")]
    pub mix: Option<Mix>,
    /// Blocks in random order.
    #[arg(long)]
    pub random: bool,
}

/// How the bytes move.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// The engine.
    #[arg(long, value_enum, default_value_t = Engine::Auto)]
    pub engine: Engine,
    /// Rings, each with a thread of its own (uring) [default: 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=RINGS_MAX as i64))]
    pub rings: Option<u32>,
    /// Threads of the threads engine [default: one per block in flight, at most 32].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Option<u32>,
    /// Do not register memory and files with the kernel.
    #[arg(long, alias = "no-register")]
    pub unregistered: bool,
    /// Let a kernel thread poll for submissions.
    #[arg(long, alias = "sqpoll")]
    pub sq_poll: bool,
    /// Poll the drive for completions.
    #[arg(long, alias = "iopoll")]
    pub io_poll: bool,
    /// Go through the page cache.
    #[arg(long)]
    pub buffered: bool,
}

/// How much, for how long.
#[derive(Debug, Args)]
pub struct LoadArgs {
    /// Bytes of one operation.
    #[arg(long, alias = "block_size", value_name = "SIZE", default_value = "1MiB", value_parser = parse_block)]
    pub block_size: u64,
    /// Blocks in flight in each directory.
    #[arg(long, alias = "queue_depth", value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub queue_depth: u32,
    /// How long to measure each direction [default: 5].
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = parse_seconds)]
    pub seconds: Option<f64>,
    /// How long to run before that [default: a tenth of --seconds, at most 1].
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = parse_warm_up)]
    pub warm_up: Option<f64>,
}

/// Where the figures go, besides the table.
#[derive(Debug, Args)]
pub struct Output {
    /// Print one JSON document instead of the table.
    #[arg(long)]
    pub json: bool,
    /// Write the figures as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write a page with charts that needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// Options of ds_io: translated where they mean the same, explained where they do not.
#[derive(Debug, Args)]
pub struct Foreign {
    /// One transfer shared by N queues: N rings and N times the depth.
    #[arg(long = "io_parallel", value_name = "N", hide = true, conflicts_with_all = ["rings", "threads"],
        value_parser = clap::value_parser!(u32).range(1..=RINGS_MAX as i64))]
    pub io_parallel: Option<u32>,
    #[arg(long = "single_submit", hide = true)]
    single_submit: bool,
    #[arg(long = "sequential_requests", hide = true)]
    sequential_requests: bool,
    #[arg(long = "multi_process", hide = true)]
    multi_process: Option<u32>,
    #[arg(long = "folder_to_device_mapping", num_args = 1.., hide = true)]
    folder_to_device_mapping: Vec<String>,
    #[arg(long, hide = true)]
    gpu: bool,
    #[arg(long = "use_gds", hide = true)]
    use_gds: bool,
    #[arg(long, hide = true)]
    handle: bool,
    #[arg(long = "slow_bounce_buffer", hide = true)]
    slow_bounce_buffer: bool,
}

/// A table of settings.
#[derive(Debug, Args)]
pub struct Sweep {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub shape: Shape,
    #[command(flatten)]
    pub grid: GridArgs,
    #[command(flatten)]
    pub output: Output,
}

/// What to try.
#[derive(Debug, Args)]
pub struct GridArgs {
    /// Block sizes to try.
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_value = "256KiB,1MiB,4MiB", value_parser = parse_block)]
    pub block_sizes: Vec<u64>,
    /// Depths to try, in rising order; the rest is skipped when two steps gain less than 3 % each.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,4,8,16,32,64", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub queue_depths: Vec<u32>,
    /// Numbers of rings to try, on the best block sizes.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u32).range(1..=RINGS_MAX as i64))]
    pub rings: Vec<u32>,
    /// Engines to try; all but the first on the best block sizes only.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "auto,threads")]
    pub engines: Vec<Engine>,
    /// Whether memory and files are registered with the kernel.
    #[arg(long, value_enum, default_value_t = Register::Both)]
    pub registered: Register,
    /// How long to measure each point.
    #[arg(long, value_name = "S", allow_negative_numbers = true, default_value_t = 1.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// Go through the page cache.
    #[arg(long)]
    pub buffered: bool,
}

/// Settings to keep.
#[derive(Debug, Args)]
pub struct Tune {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub grid: GridArgs,
    /// A folder for aio.json and profile.json, or one .json file for both sections.
    #[arg(long, value_name = "DIR|FILE")]
    pub output: PathBuf,
    /// Print what was written as one JSON document.
    #[arg(long)]
    pub json: bool,
}

/// fio beside us.
#[derive(Debug, Args)]
pub struct Compare {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub shape: Shape,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    /// Pairs of runs, the two programs taking turns.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: u32,
    #[command(flatten)]
    pub output: Output,
}

/// A choice of engine. An engine that is built in by a feature adds a value here and in [`Engine::choice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// io_uring where the system allows it, else threads.
    Auto,
    /// io_uring or an error.
    Uring,
    /// A pool of threads that call pread and pwrite.
    Threads,
    /// The tokio-uring crate, for comparison.
    #[cfg(feature = "tokio_uring")]
    TokioUring,
}

/// Which of the two kinds of memory a sweep tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Register {
    Yes,
    No,
    Both,
}

impl Engine {
    /// As the library calls it.
    pub fn choice(self) -> EngineChoice {
        match self {
            Self::Auto => EngineChoice::Auto,
            Self::Uring => EngineChoice::Uring,
            Self::Threads => EngineChoice::Threads,
            #[cfg(feature = "tokio_uring")]
            Self::TokioUring => EngineChoice::TokioUring,
        }
    }
}

impl Place {
    /// The files to make, of whole blocks of `block` bytes.
    pub fn files(&self, block: u64, blocks_min: u64, copies: u64) -> Result<FilePlan, Failure> {
        let data_bytes = self.file_size / block * block;
        if data_bytes < blocks_min * block {
            let block = units::size(block);
            return Err(Failure::usage(format!(
                "--file-size must be at least {blocks_min} block(s) of {block}: raise it or lower --block-size"
            )));
        }
        Ok(FilePlan {
            dirs: self.dirs.clone(),
            data_bytes,
            keep: self.keep,
            reuse: self.reuse,
            reserve: self.reserve,
            seed: self.seed,
            copies,
        })
    }
}

impl Shape {
    /// Refuses a mix that is not measured.
    pub fn check(&self) -> Result<(), Failure> {
        if self.mix.is_some() && !self.mixed && (self.read || self.write) {
            return Err(Failure::usage("--mix is for a mixed measurement: add --mixed, or leave --mix out"));
        }
        Ok(())
    }

    /// The directions in the order they are measured.
    pub fn directions(&self) -> Vec<Direction> {
        let all = !(self.read || self.write || self.mixed);
        let wanted = [
            (self.read, Direction::Read),
            (self.write, Direction::Write),
            (self.mixed, Direction::Mixed(self.mix.unwrap_or(Mix { read: 1, write: 1 }))),
        ];
        wanted.into_iter().filter(|(asked, _)| *asked || all).map(|(_, direction)| direction).collect()
    }

    /// Blocks a file must have.
    pub fn blocks_min(&self) -> u64 {
        if self.directions().iter().any(|direction| direction.mix().is_some()) { 2 } else { 1 }
    }
}

impl EngineArgs {
    /// The flags that are given and do nothing with an engine.
    pub fn idle_flags(&self, engine: Engine) -> Vec<&'static str> {
        let of_rings =
            [("--rings", self.rings.is_some()), ("--sq-poll", self.sq_poll), ("--io-poll", self.io_poll)];
        let of_threads = [("--threads", self.threads.is_some())];
        let idle = match engine {
            Engine::Auto => &[][..],
            Engine::Uring => &of_threads,
            Engine::Threads => &of_rings,
            #[cfg(feature = "tokio_uring")]
            Engine::TokioUring => &[of_rings[0], of_rings[1], of_rings[2], of_threads[0]],
        };
        idle.iter().filter(|(_, is_given)| *is_given).map(|(flag, _)| *flag).collect()
    }

    /// Refuses flags that do nothing with an engine.
    pub fn check_for(&self, engine: Engine) -> Result<(), Failure> {
        let Some(flag) = self.idle_flags(engine).first().copied() else { return Ok(()) };
        let name = engine.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        Err(Failure::usage(format!(
            "{flag} does nothing with the engine {name}: leave it out, or name another --engine"
        )))
    }

    /// The settings for these arguments.
    pub fn settings(&self, load: &LoadArgs, dirs: usize) -> Result<Settings, Failure> {
        self.check_for(self.engine)?;
        let depth = load.queue_depth as usize;
        if dirs * depth > QUEUE_DEPTH_MAX {
            let text = format!("--queue-depth times the directories must be at most {QUEUE_DEPTH_MAX}");
            return Err(Failure::usage(text));
        }
        Ok(Settings {
            engine: self.engine.choice(),
            block_bytes: load.block_size,
            queue_depth: depth,
            rings: self.rings.unwrap_or(1) as usize,
            threads: self.threads.map(|threads| threads as usize),
            register: !self.unregistered,
            sq_poll: self.sq_poll,
            io_poll: self.io_poll,
            direct: !self.buffered,
        })
    }
}

impl LoadArgs {
    /// Seconds to measure and to warm up.
    pub fn times(&self, default_seconds: f64) -> (f64, f64) {
        let seconds = self.seconds.unwrap_or(default_seconds);
        (seconds, self.warm_up.unwrap_or((seconds / 10.0).min(1.0)))
    }
}

impl Foreign {
    /// Explains what has no counterpart here.
    pub fn check(&self) -> Result<(), Failure> {
        let refused = [
            (
                self.single_submit,
                "--single_submit",
                "the engine decides how many requests one system call submits",
            ),
            (
                self.sequential_requests,
                "--sequential_requests",
                "use --queue-depth 1 to wait for every request",
            ),
            (
                self.multi_process.is_some(),
                "--multi_process",
                "give --dir several times: one process uses them at once",
            ),
            (
                !self.folder_to_device_mapping.is_empty(),
                "--folder_to_device_mapping",
                "give --dir once per folder",
            ),
            (self.gpu, "--gpu", "only host memory is measured"),
            (self.use_gds, "--use_gds", "only host memory is measured"),
            (self.handle, "--handle", "every run uses one engine throughout"),
            (self.slow_bounce_buffer, "--slow_bounce_buffer", "only host memory is measured"),
        ];
        match refused.iter().find(|(given, ..)| *given) {
            Some((_, flag, hint)) => {
                Err(Failure::usage(format!("{flag} of ds_io has no counterpart: {hint}")))
            }
            None => Ok(()),
        }
    }
}

/// Bytes that can be moved directly.
fn parse_block(text: &str) -> Result<u64, String> {
    let block = parse_size(text)?;
    if block == 0 || !block.is_multiple_of(PAGE_BYTES as u64) || block > BLOCK_BYTES_MAX {
        return Err(format!("a block is a multiple of {PAGE_BYTES} bytes, from {PAGE_BYTES} to 1GiB"));
    }
    Ok(block)
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = parse_warm_up(text).ok().filter(|seconds| *seconds > 0.0);
    seconds.ok_or_else(|| "seconds are a number above 0 and at most 86400".to_owned())
}

fn parse_warm_up(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| "seconds are a number from 0 to 86400".to_owned())
}
