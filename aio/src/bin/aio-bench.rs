//! `aio-bench`: what a disk can really do, through the engine that the rest of Terrace uses.
//!
//! It writes and reads its own files sequentially, block by block, keeping a fixed number of blocks in flight. The
//! files are unlinked as soon as they are open, so nothing is left behind however the program ends. Writing is
//! timed to the end of the `fdatasync`; reading starts only when every block of the files was really written, for
//! preallocated blocks that were not are read without touching the drive.

use clap::{Parser, ValueEnum};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use terrace_aio::engine::{EngineChoice, EngineConfig, QUEUE_DEPTH_MAX, open_default};
use terrace_aio::{BUF_ALIGN, FileId, IoBuf, IoEngine, IoError, OpKind, OpenMode, Request, Ticket};

/// Measures sequential disk reads and writes.
#[derive(Debug, Parser)]
#[command(name = "aio-bench", version)]
struct Options {
    /// Directory on the disk to measure; several are used at once, in turn.
    #[arg(long = "dir", value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    /// Measure reading (without this and --write: both).
    #[arg(long)]
    read: bool,
    /// Measure writing.
    #[arg(long)]
    write: bool,
    /// Bytes of one operation.
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = parse_size)]
    block_size: u64,
    /// Blocks in flight in each directory.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    queue_depth: u32,
    /// Bytes of the file in each directory.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_size)]
    file_size: u64,
    /// How long to measure each direction.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// How the bytes move.
    #[arg(long, value_enum, default_value_t = Engine::Auto)]
    engine: Engine,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Engine {
    Auto,
    Uring,
    Threads,
    #[cfg(feature = "tokio_uring")]
    TokioUring,
}

/// One direction's figures.
struct Measured {
    kind: OpKind,
    bytes: u64,
    seconds: f64,
    cpu_seconds: f64,
    /// Sorted.
    latencies: Vec<Duration>,
}

/// The files being measured, as one sequence of blocks that takes the directories in turn.
struct Bench {
    engine: Arc<dyn IoEngine>,
    files: Vec<FileId>,
    block_bytes: usize,
    blocks_per_file: u64,
    in_flight: usize,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Err(problem) = check(&options) {
        eprintln!("aio-bench: {problem}");
        return ExitCode::from(2);
    }
    match measure(&options) {
        Ok((engine, results)) => {
            report(&options, &engine, &results);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("aio-bench: {error}");
            ExitCode::from(1)
        }
    }
}

fn check(options: &Options) -> Result<(), String> {
    let (block, file) = (options.block_size, options.file_size);
    if block == 0 || block % BUF_ALIGN as u64 != 0 || block > 1 << 30 {
        return Err(format!("--block-size must be a multiple of {BUF_ALIGN} bytes, at most 1 GiB"));
    }
    if file < block {
        return Err("--file-size must be at least one block".to_owned());
    }
    if !options.seconds.is_finite() || !(0.0..=86_400.0).contains(&options.seconds) {
        return Err("--seconds must be between 0 and 86400".to_owned());
    }
    if options.dirs.len() * options.queue_depth as usize > QUEUE_DEPTH_MAX {
        return Err(format!("--queue-depth times the directories must be at most {QUEUE_DEPTH_MAX}"));
    }
    Ok(())
}

fn measure(options: &Options) -> Result<(String, Vec<Measured>), IoError> {
    let bench = Bench::open(options)?;
    let both = options.read == options.write;
    let least = Duration::from_secs_f64(options.seconds);
    let all_blocks = bench.blocks_per_file * bench.files.len() as u64;
    let mut results = Vec::new();
    let mut written_blocks = 0;
    if options.write || both {
        let written = bench.run(OpKind::Write, 0, |_, elapsed| elapsed < least)?;
        written_blocks = written.bytes / bench.block_bytes as u64;
        results.push(written);
    }
    if options.read || both {
        bench.run(OpKind::Write, written_blocks, |block, _| block < all_blocks)?;
        results.push(bench.run(OpKind::Read, 0, |_, elapsed| elapsed < least)?);
    }
    Ok((bench.engine.name().to_owned(), results))
}

impl Bench {
    fn open(options: &Options) -> Result<Self, IoError> {
        let in_flight = options.dirs.len() * options.queue_depth as usize;
        let block_bytes = options.block_size as usize;
        let choice = match options.engine {
            Engine::Auto => EngineChoice::Auto,
            Engine::Uring => EngineChoice::Uring,
            Engine::Threads => EngineChoice::Threads,
            #[cfg(feature = "tokio_uring")]
            Engine::TokioUring => EngineChoice::TokioUring,
        };
        let engine = open_default(&EngineConfig {
            choice,
            block_bytes,
            queue_depth: in_flight,
            threads: in_flight,
            ..EngineConfig::default()
        })?;
        let blocks_per_file = options.file_size / options.block_size;
        let len = blocks_per_file * options.block_size;
        let mut files = Vec::new();
        for (index, dir) in options.dirs.iter().enumerate() {
            let path = dir.join(format!(".aio-bench-{}-{index}", std::process::id()));
            // CreateNew refuses to touch a file that is there.
            files.push(engine.open(&path, OpenMode::CreateNew { len })?);
            std::fs::remove_file(&path).map_err(|e| IoError::from_os("unlinking", &path, 0, 0, &e))?;
        }
        Ok(Self { engine, files, block_bytes, blocks_per_file, in_flight })
    }

    /// Moves blocks, from number `first` on and round and round, while `goes_on(block, elapsed)`; always at least one
    /// window of them unless it says no at once.
    fn run(
        &self,
        kind: OpKind,
        first: u64,
        goes_on: impl Fn(u64, Duration) -> bool,
    ) -> Result<Measured, IoError> {
        let (done, is_done) = mpsc::channel();
        let mut tickets: Vec<Option<Ticket>> = (0..self.in_flight).map(|_| None).collect();
        let mut idle: Vec<(usize, IoBuf)> =
            (0..self.in_flight).map(|slot| (slot, self.buffer(slot))).collect();
        let (mut latencies, mut moved, mut block) = (Vec::new(), 0u64, first);
        let cpu_before = cpu_seconds();
        let start = Instant::now();
        loop {
            while goes_on(block, start.elapsed()) {
                let Some((slot, buf)) = idle.pop() else { break };
                let (done, submitted) = (done.clone(), Instant::now());
                let ticket = self.submit(kind, block, buf).observed(move |_| {
                    // The receiver outlives every ticket of this loop but after an error.
                    let _ = done.send((slot, submitted.elapsed()));
                });
                tickets[slot] = Some(ticket);
                block += 1;
            }
            if idle.len() == self.in_flight {
                break;
            }
            let (slot, latency) = is_done.recv().expect("this function holds a sender");
            let ticket = tickets[slot].take().expect("a completion belongs to a ticket");
            idle.push((slot, ticket.wait()?));
            latencies.push(latency);
            moved += self.block_bytes as u64;
        }
        if kind == OpKind::Write {
            let syncs: Vec<Ticket> = self.files.iter().map(|&file| self.engine.sync(file)).collect();
            syncs.into_iter().try_for_each(|ticket| ticket.wait().map(drop))?;
        }
        let seconds = start.elapsed().as_secs_f64();
        latencies.sort_unstable();
        Ok(Measured { kind, bytes: moved, seconds, cpu_seconds: cpu_seconds() - cpu_before, latencies })
    }

    fn submit(&self, kind: OpKind, block: u64, buf: IoBuf) -> Ticket {
        let dirs = self.files.len() as u64;
        let file = self.files[(block % dirs) as usize];
        let offset = (block / dirs) % self.blocks_per_file * self.block_bytes as u64;
        self.engine.submit(match kind {
            OpKind::Read => Request::read(file, offset, buf),
            OpKind::Write => Request::write(file, offset, buf),
        })
    }

    /// A block that no file system or drive compresses away.
    fn buffer(&self, slot: usize) -> IoBuf {
        let mut buf = IoBuf::zeroed(self.block_bytes);
        let mut state = slot as u64 + 1;
        for word in buf.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&(state ^ (state >> 29)).to_ne_bytes());
        }
        buf
    }
}

impl Measured {
    fn gigabytes(&self) -> f64 {
        self.bytes as f64 / 1e9
    }

    fn latency_us(&self, quantile: f64) -> f64 {
        let rank = (self.latencies.len() as f64 * quantile).ceil() as usize;
        self.latencies.get(rank.saturating_sub(1)).map_or(0.0, |latency| latency.as_secs_f64() * 1e6)
    }

    fn name(&self) -> &'static str {
        if self.kind == OpKind::Read { "read" } else { "write" }
    }
}

fn report(options: &Options, engine: &str, results: &[Measured]) {
    let rate = |m: &Measured| m.gigabytes() / m.seconds.max(1e-9);
    let cpu = |m: &Measured| m.cpu_seconds / m.gigabytes().max(1e-9);
    if !options.json {
        for m in results {
            println!(
                "{:5}  {:7.3} GB/s   p50 {:7.0} us   p99 {:7.0} us   {:.3} CPU s/GB   ({engine})",
                m.name(),
                rate(m),
                m.latency_us(0.5),
                m.latency_us(0.99),
                cpu(m)
            );
        }
        return;
    }
    let result = |m: &Measured| {
        json!({
            "direction": m.name(), "bytes": m.bytes, "seconds": m.seconds, "gigabytes_per_second": rate(m),
            "latency_us_p50": m.latency_us(0.5), "latency_us_p99": m.latency_us(0.99),
            "cpu_seconds_per_gigabyte": cpu(m),
        })
    };
    let document = json!({
        "engine": engine, "dirs": options.dirs, "block_bytes": options.block_size,
        "queue_depth": options.queue_depth, "file_bytes": options.file_size,
        "results": results.iter().map(result).collect::<Vec<_>>(),
    });
    println!("{document:#}");
}

/// Processor time of this process so far, user and system.
fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills in the structure, which is plain numbers and valid as zeros too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// `4096`, `512KiB`, `1MiB`, `2GiB`.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" | "K" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        other => return Err(format!("{other} is not a unit: use KiB, MiB, GiB or TiB")),
    };
    let count: u64 = digits.trim().parse().map_err(|_| format!("{text} is not a size such as 512MiB"))?;
    count.checked_mul(unit).ok_or_else(|| format!("{text} is too large"))
}
