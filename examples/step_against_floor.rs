//! How much of a step's disk traffic is hidden: steps with state on a disk of a chosen speed, beside their floor.
//!
//! A fast disk is throttled to two speeds, one at which it takes twice as long as compute and one at which it takes half as long:
//! without clipping, with a limit that no gradient reaches, with one that clips every step, and with copies of all state in memory as
//! well. At each, engines that update beside other work, that
//! do not, and that have everything in memory take turns, step by step, so that whatever else the machine does meets all of them.
//! The floor is the longer of what the engine in memory took and the bytes over the disk's speed: on a CPU the update needs the
//! cores as well, and is part of the former. What is expected is made of the same figures in the order of a step's work.
//!
//! Then, on the disk as it is, what the disk and clipping cost: engines with everything in memory, with state on disk, with clipping as
//! well, and with copies besides take turns again. What is expected of them has the disk's speed as it was measured just before.
//!
//! Usage: `step_against_floor [SIZE [STEPS [DIRECTORY [PART]]]]`, with SIZE `tiny` (default), `97m`, `315m` or `315m-short`, which has
//! an eighth of the tokens, and PART `throttled` or `real` for one of the two, or `slow` for the slower of the throttled disks.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace::aio::layer::{ThrottleConfig, ThrottleLayer};
use terrace::calibrate::{Rates, measure};
use terrace::floor::Capabilities;
use terrace::models::{ModelConfig, RandomSource, Row, TokenBatch, build};
use terrace::predict::{step_seconds, unclipped_step_seconds};
use terrace::{
    Backend, BatchLimits, DType, Engine, EngineConfig, IoConfig, MicroBatch, Placement, StepReport, StepWork,
    TrainingConfig, WindowOverrides, cpu_backend,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Hidden size, layers, intermediate size, vocabulary, sequences, positions.
type Shape = [usize; 6];

const SIZES: [(&str, Shape); 4] = [
    ("tiny", [128, 4, 384, 1024, 2, 128]),
    ("97m", [768, 12, 2048, 8192, 4, 256]),
    ("315m", [1024, 24, 2816, 8192, 4, 256]),
    ("315m-short", [1024, 24, 2816, 8192, 1, 128]),
];

/// Limits for the gradient's norm that clip every step, and none.
const EVERY_STEP: Option<f64> = Some(1e-6);
const NO_STEP: Option<f64> = Some(1e6);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let size = arguments.next().unwrap_or_else(|| "tiny".into());
    let steps: usize = arguments.next().map_or(Ok(4), |steps| steps.parse())?;
    let place = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let part = arguments.next();
    let (_, shape) =
        SIZES.iter().find(|(name, _)| *name == size).ok_or("SIZE is tiny, 97m, 315m or 315m-short")?;
    let case = Case::new(shape)?;

    let mut memory = case.engine(None, None, false, WindowOverrides::default())?;
    let compute = median((0..steps + 1).map(|_| Ok(case.step(&mut memory)?.seconds)).collect::<Result<_>>()?);
    println!("{size}: {} parameters, {compute:.3} s a step with everything in memory", memory.parameters());
    if !matches!(part.as_deref(), Some("throttled" | "slow")) {
        costs(&case, &mut memory, steps, tempfile::tempdir_in(&place)?.path())?;
    }
    if part.as_deref() == Some("real") {
        return Ok(());
    }
    println!(
        "clipped  copies  disk/compute  MB/s    floor s  beside s  × floor  × expected  after s  × floor  after/beside"
    );
    let slownesses: &[f64] = if part.as_deref() == Some("slow") { &[2.0] } else { &[2.0, 0.5] };
    for (clip, copies) in [(None, false), (NO_STEP, false), (EVERY_STEP, false), (EVERY_STEP, true)] {
        for &slowness in slownesses {
            let compare = Comparison { case: &case, clip, copies, slowness, compute, steps };
            compare.run(&mut memory, &tempfile::tempdir_in(&place)?.path().join("state"))?;
        }
    }
    Ok(())
}

/// What all engines do.
struct Case {
    model: ModelConfig,
    batch: MicroBatch,
    sequences: usize,
    length: usize,
    threads: usize,
    /// Bytes per second of checksums.
    checksums: f64,
}

impl Case {
    fn new(&[hidden, layers, intermediate, vocab, sequences, length]: &Shape) -> Result<Self> {
        let heads = hidden / 64;
        let model = ModelConfig::parse(&format!(
            r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": {vocab}, "hidden_size": {hidden},
                "intermediate_size": {intermediate}, "num_hidden_layers": {layers}, "num_attention_heads": {heads}}}"#
        ))?;
        let ids: Vec<u32> = (0..length).map(|i| (i * 37 % vocab) as u32).collect();
        let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let rows = vec![Row { ids: &ids, labels: &labels }; sequences];
        let batch = TokenBatch::new(&model).train(&rows, sequences, length)?;
        let threads = std::thread::available_parallelism()?.get();
        let checksums = measure::checksums(&measure::pool(threads)?, measure::Effort::QUICK);
        Ok(Self { model, batch, sequences, length, threads, checksums })
    }

    /// An engine with state in memory, or in a directory on a disk that is throttled so.
    fn engine(
        &self,
        disk: Option<(&PathBuf, ThrottleConfig)>,
        clip: Option<f64>,
        copies: bool,
        overrides: WindowOverrides,
    ) -> Result<Engine> {
        let limits = BatchLimits {
            sequences: self.sequences,
            length: self.length,
            micro_batches: 1,
            cache_length: 0,
            cache_pages: 0,
        };
        let training = Some(TrainingConfig { clip, ..TrainingConfig::default() });
        let mut config = EngineConfig {
            training,
            overrides,
            threads: self.threads,
            cache_bytes: if copies { u64::MAX } else { 0 },
            ..EngineConfig::new(DType::BF16, limits)
        };
        let mut backend = cpu_backend(self.threads, &IoConfig::default())?;
        if let Some((path, throttle)) = disk {
            config.placement = Placement::Disk;
            config.disks = vec![path.clone()];
            backend = Backend { io: Arc::new(ThrottleLayer::new(backend.io, throttle)), ..backend };
        }
        let sample = TokenBatch::new(&self.model).blank(self.sequences, self.length);
        Ok(Engine::create(config, backend, build(&self.model), &sample, &mut RandomSource::new(1))?)
    }

    /// What the machine can do, from the seconds of a step of `memory` and of the update in it.
    fn capabilities(&self, memory: &Engine, compute: f64, update: f64, disk: Rates) -> Capabilities {
        Capabilities {
            training: Some(memory.flops_per_step() as f64 / (compute - update)),
            updates: Some(memory.step_work().parameters as f64 / update),
            checksums: Some(self.checksums),
            disks: vec![(1.0, disk)],
            ..Capabilities::default()
        }
    }

    fn step(&self, engine: &mut Engine) -> Result<StepReport> {
        Ok(engine.train_step(std::slice::from_ref(&self.batch), 1e-4)?)
    }
}

/// Steps with everything in memory, and on the disk as it is: their medians, and the medians of the ratios within a round.
fn costs(case: &Case, memory: &mut Engine, steps: usize, path: &Path) -> Result<()> {
    const CASES: [(&str, Option<f64>, bool); 4] = [
        ("state on disk", None, false),
        ("not clipped", NO_STEP, false),
        ("clipped", EVERY_STEP, false),
        ("clipped, copies", EVERY_STEP, true),
    ];
    let mut engines = Vec::new();
    for (name, clip, copies) in CASES {
        let disk = (&path.join(name), ThrottleConfig::default());
        engines.push(case.engine(Some(disk), clip, copies, WindowOverrides::default())?);
    }
    let mut works = vec![memory.step_work()];
    works.extend(engines.iter().map(Engine::step_work));
    let profile = {
        let disks = measure::open_disks(&IoConfig::default(), &[path.to_owned()], measure::Effort::QUICK)?;
        measure::disks(&disks)?.0
    };
    let found = profile.paths.first().ok_or("a disk was measured")?;
    let (mut rounds, mut updates) = (Vec::new(), Vec::new());
    // The first steps find empty windows.
    for round in 0..=steps {
        let report = case.step(memory)?;
        let mut seconds = vec![report.seconds];
        for engine in &mut engines {
            seconds.push(case.step(engine)?.seconds);
        }
        if round > 0 {
            updates.push(report.update_seconds);
            rounds.push(seconds);
        }
    }
    let column = |index: usize| median(rounds.iter().map(|round| round[index]).collect());
    let can = case.capabilities(memory, column(0), median(updates), Rates::from(found));
    println!("                      s  × in memory  × on disk without clipping  × expected");
    for (index, name) in ["in memory"].into_iter().chain(CASES.map(|(name, ..)| name)).enumerate() {
        let to = |other: usize| median(rounds.iter().map(|round| round[index] / round[other]).collect());
        let clip = index.checked_sub(1).and_then(|case| CASES[case].1);
        let (seconds, expected) = (column(index), expected(&works[index], clip, &can));
        println!("{name:16}  {seconds:6.3}  {:11.3}  {:26.3}  {:10.3}", to(0), to(1), seconds / expected);
    }
    for engine in engines {
        engine.remove_state()?;
    }
    Ok(())
}

/// Engines on one disk.
struct Comparison<'a> {
    case: &'a Case,
    clip: Option<f64>,
    copies: bool,
    /// Seconds of the disk to those of compute.
    slowness: f64,
    compute: f64,
    steps: usize,
}

impl Comparison<'_> {
    fn run(&self, memory: &mut Engine, path: &Path) -> Result<()> {
        let engine = |name, throttle, overlap| {
            let overrides = WindowOverrides { overlap: Some(overlap), ..WindowOverrides::default() };
            self.case.engine(Some((&path.join(name), throttle)), self.clip, self.copies, overrides)
        };
        let fast = ThrottleConfig::default();
        let work = {
            let engine = engine("probe", fast, true)?;
            let work = engine.step_work();
            engine.remove_state()?;
            work
        };
        let bytes = work.disk_read_bytes + work.disk_write_bytes;
        let rate = bytes as f64 / (self.compute * self.slowness);
        let slow = ThrottleConfig {
            read_bytes_per_second: rate,
            write_bytes_per_second: rate,
            is_shared: true,
            ..fast
        };
        let mut beside = engine("beside", slow, true)?;
        let mut after = engine("after", slow, false)?;
        let mut seconds: [Vec<f64>; 3] = Default::default();
        let mut updates = Vec::new();
        // The first steps find empty windows.
        for round in 0..=self.steps {
            for (index, engine) in [&mut *memory, &mut beside, &mut after].into_iter().enumerate() {
                let report = self.case.step(engine)?;
                if round > 0 {
                    seconds[index].push(report.seconds);
                    updates.extend((index == 0).then_some(report.update_seconds));
                }
            }
        }
        let [compute, beside_seconds, after_seconds] = seconds.map(median);
        let update = median(updates);
        let floor = compute.max(bytes as f64 / rate);
        let rates =
            Rates { read_bytes_per_second: rate, write_bytes_per_second: rate, mixed_bytes_per_second: rate };
        let can = self.case.capabilities(memory, compute, update, rates);
        let expected = expected(&work, self.clip, &can);
        println!(
            "{:7}  {:6}  {:12.2}  {:6.0}  {floor:7.3}  {beside_seconds:8.3}  {:7.3}  {:10.3}  {after_seconds:7.3}  {:7.3}  {:12.2}",
            match self.clip {
                None => "off",
                NO_STEP => "never",
                Some(_) => "always",
            },
            if self.copies { "all" } else { "none" },
            bytes as f64 / rate / compute,
            rate / 1e6,
            beside_seconds / floor,
            beside_seconds / expected,
            after_seconds / floor,
            after_seconds / beside_seconds,
        );
        beside.remove_state()?;
        Ok(after.remove_state()?)
    }
}

/// Seconds that a step is expected to take.
fn expected(work: &StepWork, clip: Option<f64>, can: &Capabilities) -> f64 {
    let unclipped = if clip == NO_STEP { unclipped_step_seconds(work, can) } else { None };
    unclipped.or_else(|| step_seconds(work, can)).unwrap_or(f64::NAN)
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}
