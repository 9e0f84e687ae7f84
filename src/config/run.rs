//! One training run, resolved: flags over the configuration file over defaults.

use super::ds_config::{DsConfig, DsOffload, DsOptimizer};
use super::groups::GroupFlag;
use super::schedule::ScheduleChoice;
use super::size::ByteSize;
use crate::cli::args::{
    Accumulation, Activations, DeviceName, DiskCache, DiskEngine, Dtype, DurabilityFlag, FinetuneArgs,
    Offload, OptimizerName, StateFormat,
};
use crate::cli::pinned::Pinned;
use crate::error::CliError;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use terrace_optimizer::{
    Adagrad, Adam, AdamW, Algorithm, Lion, LossScaleConfig, Schedule, ScheduleKind, Sgd,
};

/// Sequence length when neither flag nor model says otherwise.
pub const SEQ_LEN_DEFAULT: usize = 1024;

/// Of SGD, if nothing else is said.
const MOMENTUM: f64 = 0.9;

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Length {
    /// This many optimizer steps.
    Steps(u64),
    /// This many passes over the data.
    Epochs(f64),
}

/// Everything that determines a training run but the data itself.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainConfig {
    /// Model folder.
    pub model: PathBuf,
    /// Training data.
    pub data: PathBuf,
    /// Folder for the result.
    pub output: PathBuf,
    /// How long to train; [`total_steps`](Self::total_steps) turns it into steps.
    pub length: Length,
    /// Sequences per micro-batch.
    pub batch_size: usize,
    /// Micro-batches per step.
    pub grad_accum: usize,
    /// The order of a step's micro-batches.
    pub accumulation: Accumulation,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Base learning rate.
    pub learning_rate: f64,
    /// The optimization algorithm and its hyperparameters.
    pub optimizer: Algorithm,
    /// Parameters with another learning rate or weight decay, in the order in which the patterns are tried.
    pub groups: Vec<GroupFlag>,
    /// Largest global gradient norm; `None` does not clip.
    pub clip: Option<f64>,
    /// The learning rate's schedule; [`schedule`](Self::schedule) completes it.
    pub schedule: ScheduleChoice,
    /// Number type of weights and activations.
    pub dtype: Dtype,
    /// The loss scale, in fp16.
    pub loss_scale: Option<LossScaleConfig>,
    /// Format of optimizer state.
    pub state: StateFormat,
    /// Whether blocks keep their intermediates for backward.
    pub activations: Activations,
    /// Slowest tier in use.
    pub offload: Offload,
    /// The part of the state that the host holds and updates beside a device with its own memory, if it was said.
    pub optimizer_ratio: Option<f64>,
    /// Folders for state on disk; empty unless `offload` is [`Offload::Disk`].
    pub disks: Vec<PathBuf>,
    /// Host memory to use.
    pub host_memory: Option<ByteSize>,
    /// When state on disk becomes durable.
    pub durability: DurabilityFlag,
    /// Bytes that the drives may be written over their life.
    pub endurance: ByteSize,
    /// Most host memory for copies of what is on disk.
    pub disk_cache: DiskCache,
    /// Device memory to use.
    pub device_memory: Option<ByteSize>,
    /// Where to compute.
    pub device: DeviceName,
    /// How disk operations are submitted.
    pub engine: DiskEngine,
    /// Bytes per disk operation, if the file says.
    pub aio_block_size: Option<u64>,
    /// Disk operations in flight, if the file says.
    pub aio_queue_depth: Option<u64>,
    /// Blocks fetched ahead.
    pub window: Option<usize>,
    /// Update state on disk during other work.
    pub overlap: bool,
    /// Treat the CPU as a discrete device.
    pub discrete: bool,
    /// Seed of the data order.
    pub seed: u64,
    /// Shuffle every epoch.
    pub shuffle: bool,
    /// Pack rows of every kind.
    pub pack: bool,
    /// Continue from the last committed step.
    pub resume: bool,
    /// Write a model folder every so many steps.
    pub save_every: Option<u64>,
    /// How many of them to keep.
    pub save_total_limit: Option<usize>,
    /// Largest safetensors file.
    pub max_shard_size: ByteSize,
    /// Where to write metrics for TensorBoard.
    pub tensorboard: Option<PathBuf>,
    /// Where to write a timeline.
    pub trace: Option<PathBuf>,
    /// The plan that the run is to be.
    pub pinned: Option<Pinned>,
    /// Where to write the plan.
    pub save_plan: Option<PathBuf>,
    /// Print JSON at the end.
    pub json: bool,
    /// What the user should know before the run.
    pub warnings: Vec<String>,
}

impl TrainConfig {
    /// Resolves a run. `positions_max` is the longest sequence the model takes, if its config says.
    ///
    /// # Errors
    /// The configuration file is refused, or two settings contradict each other.
    pub fn resolve(args: &FinetuneArgs, positions_max: Option<usize>) -> Result<Self, CliError> {
        let file = match &args.config {
            Some(path) => Some(DsConfig::load(path).map_err(|e| CliError::Usage(e.to_string()))?),
            None => None,
        };
        let pinned = args.plan.as_deref().map(Pinned::read).transpose()?;
        pinned.as_ref().map_or(Ok(()), |plan| plan.check_length(positions_max))?;
        let settled = pinned.as_ref().map(|plan| plan.settle(args, file.as_ref())).transpose()?;
        let mut run = Self::combine(settled.as_ref().unwrap_or(args), file.as_ref(), positions_max)?;
        run.pinned = pinned;
        micro_batch(run.batch_size, run.seq_len, true)?;
        Ok(run)
    }

    /// Resolves a run from flags and a configuration that is already read.
    ///
    /// # Errors
    /// Two settings contradict each other.
    pub fn combine(
        args: &FinetuneArgs,
        file: Option<&DsConfig>,
        positions_max: Option<usize>,
    ) -> Result<Self, CliError> {
        let none = DsConfig::default();
        let given = file.unwrap_or(&none);
        let adam = given.optimizer.unwrap_or_default();
        let mut warnings = given.warnings.clone();
        if file.is_some() && given.bf16.is_none() && given.fp16.is_none() && args.dtype.is_none() {
            warnings.push(
                "the file enables neither bf16 nor fp16; training in bf16 (--dtype fp32 for the other)"
                    .into(),
            );
        }
        let dtype = args.dtype.or(given.dtype()).unwrap_or(Dtype::Bf16);
        let (batch_size, grad_accum) = batches(args, given, &mut warnings)?;
        let (offload, disks) = placement(args, given, &mut warnings)?;
        let optimizer_ratio = optimizer_ratio(args, given, offload, &mut warnings)?;
        let learning_rate = args.learning_rate.or(adam.lr).unwrap_or(1e-5);
        let optimizer = algorithm(args, &adam)?;
        let schedule = schedule(args, given, learning_rate)?;
        if file.is_some() && given.schedule.is_none() && args.scheduler.is_none() {
            let note = "the file names no scheduler; the learning rate falls linearly to 0 (--scheduler constant for DeepSpeed's way)";
            warnings.push(note.into());
        }
        if schedule.complete(1, learning_rate).betas(0).is_some()
            && optimizer.with_betas(0.5, 0.5) == optimizer
        {
            warnings.push(format!("{optimizer} has no betas: OneCycle moves the learning rate alone"));
        }
        if args.endurance.0 == 0 {
            return usage(
                "--endurance 0: drives that may not be written to hold no state; give what theirs is, for example 1200TB",
            );
        }
        let placed = &args.placement;
        Ok(Self {
            model: args.model.clone(),
            data: args.data.clone(),
            output: args.output.clone(),
            length: args.steps.map_or(Length::Epochs(args.epochs.unwrap_or(1.0)), Length::Steps),
            batch_size,
            grad_accum,
            accumulation: args.accumulation.unwrap_or_default(),
            seq_len: seq_len(args.seq_len.map(usize::from), positions_max)?,
            learning_rate,
            optimizer,
            groups: groups(args),
            clip: Some(args.clip.or(given.gradient_clipping).unwrap_or(1.0)).filter(|&norm| norm > 0.0),
            schedule,
            dtype,
            loss_scale: (dtype == Dtype::Fp16).then(|| given.loss_scale.unwrap_or_default()),
            state: state(args.state, dtype)?,
            activations: args.activations.unwrap_or_default(),
            offload,
            optimizer_ratio,
            disks,
            host_memory: placed.host_memory,
            durability: args.durability.unwrap_or_default(),
            endurance: args.endurance,
            disk_cache: placed.disk_cache,
            device_memory: placed.device_memory,
            device: placed.device,
            engine: placed.engine,
            aio_block_size: given.aio_block_size,
            aio_queue_depth: given.aio_queue_depth,
            window: placed.window.map(usize::from),
            overlap: !placed.no_overlap,
            discrete: placed.discrete,
            seed: args.seed,
            shuffle: !args.no_shuffle,
            pack: args.pack,
            resume: args.resume,
            save_every: args.save_every.map(u64::from),
            save_total_limit: args.save_total_limit.map(usize::from),
            max_shard_size: args.max_shard_size,
            tensorboard: args.tensorboard.clone(),
            trace: args.trace.clone(),
            pinned: None,
            save_plan: args.save_plan.clone(),
            json: args.json,
            warnings,
        })
    }

    /// Samples per optimizer step.
    pub fn samples_per_step(&self) -> usize {
        self.batch_size * self.grad_accum
    }

    /// Optimizer steps of the run over `samples` samples. An epoch that does not fill its last step counts as a whole step,
    /// which takes the missing samples from the next epoch.
    pub fn total_steps(&self, samples: usize) -> u64 {
        match self.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => {
                let per_step = self.samples_per_step() as f64;
                // The tolerance keeps 0.1 × 30 samples at 3 samples.
                ((epochs * samples as f64 / per_step - 1e-9).ceil() as u64).max(1)
            }
        }
    }

    /// Refuses a schedule that leaves its range before the end of a run of `total` steps. Only what grows without bounds can: it does so
    /// until the last step.
    ///
    /// # Errors
    /// It does.
    pub fn check_schedule(&self, total: u64) -> Result<(), CliError> {
        let (schedule, last) = (self.schedule(total), total.saturating_sub(1));
        let lr = schedule.lr(last);
        if !lr.is_finite() {
            return usage(format!(
                "{} has no finite learning rate at step {total}, the last",
                self.schedule.kind
            ));
        }
        let Some((beta1, beta2)) = schedule.betas(last) else { return Ok(()) };
        self.optimizer.with_betas(beta1, beta2).validate().map_err(|error| {
            let kind = self.schedule.kind;
            CliError::Usage(format!(
                "{kind} would end the run before step {total}, its last: {error} there; lower decay_mom_rate, or train fewer steps"
            ))
        })
    }

    /// The schedule of a run of `total` steps.
    pub fn schedule(&self, total: u64) -> Schedule {
        self.schedule.complete(total, self.learning_rate)
    }
}

/// The sequence length: `asked`, or the default capped by what the model takes.
///
/// # Errors
/// More was asked for than the model takes.
pub fn seq_len(asked: Option<usize>, positions_max: Option<usize>) -> Result<usize, CliError> {
    match (asked, positions_max) {
        (Some(asked), Some(max)) if asked > max => {
            usage(format!("--seq-len {asked} is longer than the model's max_position_embeddings {max}"))
        }
        (Some(asked), _) => Ok(asked),
        (None, max) => Ok(max.map_or(SEQ_LEN_DEFAULT, |max| max.min(SEQ_LEN_DEFAULT))),
    }
}

/// The folder for state on disk when none is named.
pub fn default_disk(output: &Path) -> PathBuf {
    output.join(".terrace")
}

fn usage<T>(message: impl Into<String>) -> Result<T, CliError> {
    Err(CliError::Usage(message.into()))
}

/// A batch dimension; u32 so that products of two never overflow.
///
/// # Errors
/// It is larger.
pub fn count(name: &str, value: Option<u64>) -> Result<usize, CliError> {
    match u32::try_from(value.unwrap_or(1)) {
        Ok(value) => Ok(value as usize),
        Err(_) => {
            usage(format!("{name} {} is too large: at most {} are possible", value.unwrap_or(1), u32::MAX))
        }
    }
}

/// Sequences per micro-batch and micro-batches per step.
fn batches(
    args: &FinetuneArgs,
    given: &DsConfig,
    warnings: &mut Vec<String>,
) -> Result<(usize, usize), CliError> {
    let flag = |flag: Option<NonZeroU64>| flag.map(u64::from);
    let found = given.batches(flag(args.batch_size), flag(args.grad_accum));
    let (micro, accum) =
        found.map_err(|reason| CliError::Usage(format!("--config: train_batch_size: {reason}")))?;
    let (micro, accum) = (count("--batch-size", micro)?, count("--grad-accum", accum)?);
    let step = micro as u64 * accum as u64;
    if let Some(total) = given.batch.filter(|total| *total != step) {
        warnings
            .push(format!("a step has {step} sequences, because flags win over train_batch_size {total}"));
    }
    Ok((micro, accum))
}

/// Refuses a micro-batch whose positions cannot be numbered; `accumulates` if a step may have more of them instead.
///
/// # Errors
/// It has more than 2³¹ of them.
pub fn micro_batch(batch_size: usize, seq_len: usize, accumulates: bool) -> Result<(), CliError> {
    if batch_size <= sequences_max(seq_len) {
        return Ok(());
    }
    usage(format!(
        "--batch-size {batch_size} of --seq-len {seq_len} is more tokens than a micro-batch can have ({}); lower \
         --batch-size{}",
        i32::MAX,
        if accumulates { " and raise --grad-accum" } else { "" }
    ))
}

/// Sequences of `length` whose positions can be numbered.
pub fn sequences_max(length: usize) -> usize {
    i32::MAX as usize / length.max(1)
}

/// Formats that need no f32 master are made for bf16 weights.
fn state(asked: Option<StateFormat>, dtype: Dtype) -> Result<StateFormat, CliError> {
    match (asked, dtype) {
        (asked, Dtype::Bf16) => Ok(asked.unwrap_or_default()),
        (None | Some(StateFormat::Fp32), _) => Ok(StateFormat::Fp32),
        (Some(other), _) => usage(format!(
            "--state {} is for --dtype bf16; leave it out, other types keep their state as fp32",
            other.name()
        )),
    }
}

fn groups(args: &FinetuneArgs) -> Vec<GroupFlag> {
    let no_decay = args.no_decay.iter().map(|pattern| GroupFlag::no_decay(pattern));
    args.param_group.iter().cloned().chain(no_decay).collect()
}

/// `--scheduler` replaces the file's scheduler as a whole: mixing halves of two gives a third that nobody asked for. The other
/// flags change what they name in either, or are refused.
fn schedule(args: &FinetuneArgs, given: &DsConfig, base_lr: f64) -> Result<ScheduleChoice, CliError> {
    let from_file = given.schedule.filter(|_| args.scheduler.is_none());
    let source = if from_file.is_some() { "the file's scheduler" } else { "--scheduler" };
    let own = args.scheduler.map_or(ScheduleChoice::new(ScheduleKind::Linear), |flag| flag.0);
    let mut choice = from_file.unwrap_or(own);
    if let Some(steps) = args.warmup_steps {
        if !choice.warms_up() {
            return usage(format!("--warmup-steps means nothing to {source} {}: leave it out", choice.kind));
        }
        choice.warmup_steps = steps;
    }
    if let Some(key) = choice.own_rate().filter(|_| args.learning_rate.is_some()) {
        if from_file.is_none() || key != "warmup_max_lr" {
            return usage(format!(
                "{source} {} has a rate of its own, {key}, and --learning-rate is given as well: leave one of them out",
                choice.kind
            ));
        }
        choice.base_lr = None;
    }
    // A run that ends within its warm-up is none the worse for it.
    match choice.complete(u64::MAX, base_lr).validate() {
        Ok(()) => Ok(choice),
        Err(error) => usage(format!("{source} {}: {error}", choice.kind)),
    }
}

/// Whether state can be shared between a card and a tier below it, as `ratio` asks for.
///
/// # Errors
/// It is asked for and cannot be.
pub fn shares_state(
    ratio: Option<f64>,
    offload: Offload,
    durability: DurabilityFlag,
) -> Result<bool, CliError> {
    let can = offload == Offload::Host || offload == Offload::Disk && durability.waits_for_saves();
    if ratio.is_some() && !can {
        return usage(
            "--optimizer-ratio shares the state between a card and the host or a disk that saves alone write: add --offload host, or \
             --offload disk and --durability checkpoint or none",
        );
    }
    Ok(can)
}

/// The flag over the file. State that every step writes to disk leaves no choice.
fn optimizer_ratio(
    args: &FinetuneArgs,
    given: &DsConfig,
    offload: Offload,
    warnings: &mut Vec<String>,
) -> Result<Option<f64>, CliError> {
    let choice = shares_state(args.optimizer_ratio, offload, args.durability.unwrap_or_default())?;
    let unused = match (choice, &args.plan) {
        (false, _) => Some(
            "sharing the state with a card takes --offload host, or --offload disk and --durability checkpoint or none",
        ),
        (true, Some(_)) => Some("the plan of --plan says whose state the device updates"),
        (true, None) => None,
    };
    if let Some(why) = unused.filter(|_| given.offload_ratio.is_some_and(|ratio| ratio < 1.0)) {
        warnings.push(format!("offload_optimizer.ratio is not used: {why}"));
    }
    Ok(args.optimizer_ratio.or(given.offload_ratio).filter(|_| choice))
}

/// Terrace places every group itself, so the two sections of the file become one bound: the slower of both tiers.
fn placement(
    args: &FinetuneArgs,
    given: &DsConfig,
    warnings: &mut Vec<String>,
) -> Result<(Offload, Vec<PathBuf>), CliError> {
    let sections = [&given.offload_param, &given.offload_optimizer];
    let tiers: Vec<_> = sections.iter().filter_map(|s| s.as_ref()).map(std::mem::discriminant).collect();
    let from_file = given.offload();
    if args.placement.offload.is_none() && tiers.len() == 2 && tiers[0] != tiers[1] {
        let slowest = if from_file == Some(Offload::Disk) { "disk" } else { "host" };
        warnings.push(format!(
            "offload_param and offload_optimizer name different devices; parameters and state both go as far as {slowest}"
        ));
    }
    let offload = args.placement.offload.or(from_file).unwrap_or(Offload::Disk);
    let mut disks = args.placement.disk.clone();
    if offload != Offload::Disk {
        if !disks.is_empty() && args.placement.offload.is_some() {
            return usage("--disk is of no use with --offload none or host; drop one of the two");
        }
        if !disks.is_empty() {
            return usage(
                "--disk is given, but the configuration file offloads to memory only; add --offload disk",
            );
        }
        return Ok((offload, disks));
    }
    if disks.is_empty() {
        for section in sections.into_iter().flatten() {
            if let DsOffload::Disk(path) = section
                && !disks.contains(path)
            {
                disks.push(path.clone());
            }
        }
    }
    if disks.is_empty() {
        disks.push(default_disk(&args.output));
    }
    match given_twice(&disks) {
        Some(what) => usage(format!("--disk {what}")),
        None => Ok((offload, disks)),
    }
}

/// Which of several folders is there twice, perhaps under two names, in words.
pub fn given_twice(dirs: &[PathBuf]) -> Option<String> {
    let place = |dir: &PathBuf| {
        dir.canonicalize().or_else(|_| std::path::absolute(dir)).unwrap_or_else(|_| dir.clone())
    };
    let mut places: Vec<_> = dirs.iter().map(|dir| (place(dir), dir)).collect();
    places.sort();
    let pair = places.windows(2).find(|pair| pair[0].0 == pair[1].0)?;
    let (a, b) = (pair[0].1, pair[1].1);
    let also = if a == b { String::new() } else { format!(", also as {}", b.display()) };
    Some(format!("{} is given twice{also}", a.display()))
}

/// An algorithm of which nothing but the name is said. What it keeps is that of any other of the name.
pub fn algorithm_named(name: OptimizerName) -> Algorithm {
    match name {
        OptimizerName::Adamw => Algorithm::AdamW(AdamW::default()),
        OptimizerName::Adam => Algorithm::Adam(Adam::default()),
        OptimizerName::Adagrad => Algorithm::Adagrad(Adagrad::default()),
        OptimizerName::Lion => Algorithm::Lion(Lion::default()),
        OptimizerName::Sgd => Algorithm::Sgd(Sgd { momentum: MOMENTUM, nesterov: false, weight_decay: 0.0 }),
    }
}

/// The algorithm: what the flags say, else the file, else the algorithm's own defaults (without weight decay).
fn algorithm(args: &FinetuneArgs, given: &DsOptimizer) -> Result<Algorithm, CliError> {
    let name = args.optimizer.or(given.name).unwrap_or_default();
    let weight_decay = args.weight_decay.or(given.weight_decay).unwrap_or(0.0);
    let betas = args.betas.map(|b| (b.0, b.1)).or(given.betas);
    let eps = args.eps.or(given.eps);
    let momentum = args.momentum.or(given.momentum);
    let has = |flag: &str, found: bool| {
        if found {
            return usage(format!(
                "{flag} means nothing to --optimizer {}: leave it out",
                format!("{name:?}").to_lowercase()
            ));
        }
        Ok(())
    };
    let is_adam = matches!(name, OptimizerName::Adamw | OptimizerName::Adam);
    has("--betas", args.betas.is_some() && !is_adam && name != OptimizerName::Lion)?;
    has("--eps", args.eps.is_some() && matches!(name, OptimizerName::Lion | OptimizerName::Sgd))?;
    has("--momentum", args.momentum.is_some() && name != OptimizerName::Sgd)?;
    let (beta1, beta2) = betas.unwrap_or((0.9, if is_adam { 0.999 } else { 0.99 }));
    Ok(match name {
        OptimizerName::Adamw => {
            Algorithm::AdamW(AdamW { beta1, beta2, eps: eps.unwrap_or(1e-8), weight_decay })
        }
        OptimizerName::Adam => Algorithm::Adam(Adam { beta1, beta2, eps: eps.unwrap_or(1e-8), weight_decay }),
        OptimizerName::Adagrad => {
            Algorithm::Adagrad(Adagrad { eps: eps.unwrap_or(1e-10), weight_decay, ..Adagrad::default() })
        }
        OptimizerName::Lion => Algorithm::Lion(Lion { beta1, beta2, weight_decay }),
        OptimizerName::Sgd => Algorithm::Sgd(Sgd {
            momentum: momentum.unwrap_or(MOMENTUM),
            nesterov: given.nesterov.unwrap_or(false),
            weight_decay,
        }),
    })
}
