//! The command line, parsed. Flags only: what they mean together with a configuration file is
//! [`TrainConfig`](crate::config::TrainConfig)'s business.

pub use super::durability::DurabilityFlag;
pub use super::plan_args::PlanArgs;
pub use super::ranks::RanksArgs;
pub use super::values::{Betas, DeviceName, DiskCache};
use super::values::{
    count, not_negative_float, part, positive_float, positive_single, probability, shard_size, threads,
    token_id, whole,
};
use crate::config::{ByteSize, GroupFlag, SchedulerFlag};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

/// Train and run language models larger than memory.
#[derive(Debug, Parser)]
#[command(name = "terrace", version, about, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Threads that compute [default: one per core]
    #[arg(long, global = true, value_name = "N", allow_negative_numbers = true, value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fine-tune all parameters of a model
    Finetune(Box<FinetuneArgs>),
    /// Generate text
    Generate(Box<GenerateArgs>),
    /// Measure mean negative log-likelihood and perplexity on a data set
    Eval(Box<EvalArgs>),
    /// Show what a directory of training state holds, verify it, go back to the step before a damaged one
    Inspect(InspectArgs),
    /// Write the model of a directory of training state as a Hugging Face folder
    Export(ExportArgs),
    /// Make a small data set and model, train it, and generate from it: within 256 MiB of planned host memory and with the state in
    /// OUTPUT/state, if no flag says otherwise
    Demo(Box<DemoArgs>),
    /// Measure what disks, memory, processor and card of this machine can do
    Calibrate(CalibrateArgs),
    /// Say what a run would need and how long its steps would take
    Plan(Box<PlanArgs>),
    /// Show what Terrace finds on this machine
    Report(ReportArgs),
}

/// `terrace finetune`.
#[derive(Debug, Clone, Args)]
pub struct FinetuneArgs {
    /// Hugging Face model folder (config.json, safetensors, tokenizer.json)
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Training data: .jsonl rows or a plain .txt
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Folder for the trained model and metrics.jsonl
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// DeepSpeed configuration file; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Steps to train; wins over --epochs
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<u64>, help_heading = "Training")]
    pub steps: Option<u64>,
    /// Passes over the data, fractions allowed [default: 1]
    #[arg(long, value_name = "E", allow_negative_numbers = true, value_parser = positive_float, help_heading = "Training")]
    pub epochs: Option<f64>,
    /// Sequences per micro-batch [default: 1]
    #[arg(long, value_name = "B", allow_negative_numbers = true, value_parser = count::<NonZeroU64>, help_heading = "Training")]
    pub batch_size: Option<NonZeroU64>,
    /// Micro-batches per step [default: 1]
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = count::<NonZeroU64>, help_heading = "Training")]
    pub grad_accum: Option<NonZeroU64>,
    /// Order of the micro-batches: vertical, all of them through a block before the next, so that weights travel twice a step; or
    /// horizontal, one after the other through the whole model, which needs activations of one at a time. Numbers are the same
    /// [default: vertical]
    #[arg(long, value_name = "HOW", help_heading = "Training")]
    pub accumulation: Option<Accumulation>,
    /// Tokens per sequence [default: 1024, at most what the model takes]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, help_heading = "Training")]
    pub seq_len: Option<NonZeroUsize>,
    /// Learning rate [default: 1e-5]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float, help_heading = "Training")]
    pub learning_rate: Option<f64>,
    /// Optimization algorithm [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    pub optimizer: Option<OptimizerName>,
    /// Weight decay; decoupled from the gradient for adamw and lion [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float, help_heading = "Training")]
    pub weight_decay: Option<f64>,
    /// No weight decay for parameters whose names match; * stands for any characters, as in '*norm*'
    #[arg(long, value_name = "PATTERN", help_heading = "Training")]
    pub no_decay: Vec<String>,
    /// What parameters whose names match get: PATTERN,lr=X or lr-scale=X, weight-decay=X, frozen. The first match decides, --no-decay last
    #[arg(long, value_name = "PATTERN,…", help_heading = "Training")]
    pub param_group: Vec<GroupFlag>,
    /// Decay rates of the moments [default: 0.9,0.999; lion: 0.9,0.99]
    #[arg(long, value_name = "A,B", allow_hyphen_values = true, help_heading = "Training")]
    pub betas: Option<Betas>,
    /// Momentum of sgd [default: 0.9]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float, help_heading = "Training")]
    pub momentum: Option<f64>,
    /// Epsilon of the adaptive algorithms [default: 1e-8; adagrad: 1e-10]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float, help_heading = "Training")]
    pub eps: Option<f64>,
    /// Largest global gradient norm, 0 for none [default: 1.0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float, help_heading = "Training")]
    pub clip: Option<f64>,
    /// Steps of warm-up [default: 0; DeepSpeed's schedules: 1000]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole, help_heading = "Training")]
    pub warmup_steps: Option<u64>,
    /// How the learning rate moves [default: linear]: constant, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt,
    /// or DeepSpeed's WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest. Parameters follow the name, as in
    /// OneCycle,cycle_min_lr=1e-5,cycle_max_lr=1e-4
    #[arg(long, value_name = "NAME[,KEY=VALUE…]", help_heading = "Training")]
    pub scheduler: Option<SchedulerFlag>,
    /// Seed of the data order
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole, default_value_t = 0, help_heading = "Training")]
    pub seed: u64,
    /// Take the rows in file order
    #[arg(long, help_heading = "Training")]
    pub no_shuffle: bool,
    /// Pack rows of every kind into full sequences
    #[arg(long, help_heading = "Training")]
    pub pack: bool,
    /// Number type of weights and activations [default: bf16]
    #[arg(long, value_name = "TYPE", help_heading = "Training")]
    pub dtype: Option<Dtype>,

    /// How training state is stored: with Adam 14, 12, 8 or 5.1 bytes per parameter [default: split; fp32 unless --dtype bf16]
    #[arg(long, value_name = "FORMAT", help_heading = "Memory")]
    pub state: Option<StateFormat>,
    /// The part of the state, from 0 to 1, that a card with memory of its own leaves to the host, or to a disk with --durability
    /// checkpoint or none; it holds and updates the rest, the last blocks [default: what it has no room for]
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = part, help_heading = "Memory")]
    pub optimizer_ratio: Option<f64>,
    /// Which blocks keep what they computed from forward to backward instead of computing it again, and where (on disk only with
    /// --offload disk) [default: auto]
    #[arg(long, value_name = "HOW", help_heading = "Memory")]
    pub activations: Option<Activations>,
    /// When training state on disk becomes durable: with every step; with every checkpoint and the end, which writes less; or (none)
    /// kept once, in half the space, and lost if the run is killed [default: step]
    #[arg(long, value_name = "WHEN", help_heading = "Memory")]
    pub durability: Option<DurabilityFlag>,
    /// Bytes that the drives may be written over their life, which a run's writes are compared with
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "1200TB",
        allow_negative_numbers = true,
        help_heading = "Memory"
    )]
    pub endurance: ByteSize,
    /// Run exactly this plan, written by `terrace plan --save` or --save-plan: its windows, and its settings where no flag says
    /// the same
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub plan: Option<PathBuf>,
    /// Write the plan of this run, for --plan
    #[arg(long, value_name = "FILE", help_heading = "Memory")]
    pub save_plan: Option<PathBuf>,
    /// Where memory, offload and disk stand.
    #[command(flatten)]
    pub placement: PlacementArgs,

    /// Continue from the last committed step
    #[arg(long, help_heading = "Output")]
    pub resume: bool,
    /// Write a model folder every N steps
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroU64>, help_heading = "Output")]
    pub save_every: Option<NonZeroU64>,
    /// Keep the last N of the model folders that --save-every writes, and remove older ones [default: keep all]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, requires = "save_every", help_heading = "Output")]
    pub save_total_limit: Option<NonZeroUsize>,
    /// Largest safetensors file
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        value_parser = shard_size,
        default_value = "5GB",
        help_heading = "Output"
    )]
    pub max_shard_size: ByteSize,
    /// Write the metrics of every step for TensorBoard, too
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    pub tensorboard: Option<PathBuf>,
    /// Write a timeline: a page to look at if FILE ends in .html, else Chrome's trace format (Perfetto)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    /// Print one JSON document to stdout at the end
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// Where state lives and how much memory there is.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Memory")]
pub struct PlacementArgs {
    /// Slowest tier in use [default: disk; generate and eval: none, and host or a --disk for weights that do not fit]
    #[arg(long, value_name = "TIER")]
    pub offload: Option<Offload>,
    /// Folder on a local drive for offloaded state; several are striped [default of finetune: OUTPUT/.terrace]
    #[arg(long, value_name = "PATH")]
    pub disk: Vec<PathBuf>,
    /// What the machine was measured to do, written by `terrace calibrate` or `aio-bench tune`: settings of the disk engine, how much each --disk
    /// takes, and what steps are compared with [default: that of this machine that `calibrate` keeps in the cache folder]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Host memory to use, for example 24GiB [default: what is free, less a reserve]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub host_memory: Option<ByteSize>,
    /// Host memory for copies of what is on disk, which is then written as ever but read no more: auto takes what the budget has
    /// left, none takes nothing
    #[arg(long, value_name = "SIZE", default_value = "auto", allow_negative_numbers = true)]
    pub disk_cache: DiskCache,
    /// Device memory to use [default: what is free, less a reserve]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub device_memory: Option<ByteSize>,
    /// Where to compute: cpu, cuda:N, or auto: the first NVIDIA card if there is one that can be used, else the CPU
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceName,
    /// How disk operations are submitted
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: DiskEngine,
    /// Keep each computing thread on a core of its own: for a machine that has nothing else to do
    #[arg(long)]
    pub pin_threads: bool,
    /// Treat the CPU as a discrete device: copies are deferred and checked.
    #[arg(long, hide = true)]
    pub discrete: bool,
    /// Blocks fetched ahead of the one that computes.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, hide = true)]
    pub window: Option<NonZeroUsize>,
    /// Let compute wait for every update of state on disk, for comparison.
    #[arg(long, hide = true)]
    pub no_overlap: bool,
}

/// `terrace generate`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).args(["prompt", "prompt_ids", "prompts"])))]
pub struct GenerateArgs {
    /// Hugging Face model folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Token ids to continue, separated by commas; needs no tokenizer
    #[arg(long, value_name = "IDS", value_delimiter = ',', num_args = 1, value_parser = token_id, allow_hyphen_values = true)]
    pub prompt_ids: Option<Vec<u32>>,
    /// Prompts to continue: the lines of a .txt that are not blank, or .jsonl rows {"prompt"}, {"messages"} or {"prompt_ids"};
    /// - reads standard input
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Largest number of new tokens per prompt
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "128", help_heading = "Sampling")]
    pub max_new_tokens: NonZeroUsize,
    /// Sampling temperature; 0 takes the most likely token
    #[arg(long, value_name = "T", allow_negative_numbers = true, default_value = "0", value_parser = not_negative_float, help_heading = "Sampling")]
    pub temperature: f64,
    /// Sample from the smallest set of tokens whose probability reaches P
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability, help_heading = "Sampling")]
    pub top_p: Option<f64>,
    /// Sample from the K most likely tokens
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, help_heading = "Sampling")]
    pub top_k: Option<NonZeroUsize>,
    /// Make tokens that were there before less likely: their logits are divided by X, or multiplied if negative; 1 does nothing
    #[arg(long, value_name = "X", allow_negative_numbers = true, default_value = "1", value_parser = positive_single, help_heading = "Sampling")]
    pub repetition_penalty: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole, default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
    /// Go on past the end-of-text token
    #[arg(long, help_heading = "Sampling")]
    pub ignore_eos: bool,
    /// Prompts that run together [default: all]
    #[arg(long, value_name = "B", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>)]
    pub batch_size: Option<NonZeroUsize>,
    /// Number type of activations [default: bf16]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Dtype>,
    /// Number type of linear layers as they are kept and travel; bf16 means that of --dtype
    #[arg(long, value_name = "TYPE", default_value = "bf16", help_heading = "Memory")]
    pub weights: WeightFormat,
    /// Lowest tier that the key/value cache may be in between its uses: blocks that have no room above it are there. On a CPU, memory
    /// of the device is that of the host
    #[arg(long, value_name = "TIER", default_value = "device", help_heading = "Memory")]
    pub kv: KvTier,
    /// Where memory, offload and disk stand.
    #[command(flatten)]
    pub placement: PlacementArgs,
    /// Write a timeline: a page to look at if FILE ends in .html, else Chrome's trace format (Perfetto)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print one JSON document to stdout at the end
    #[arg(long)]
    pub json: bool,
}

/// `terrace eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Hugging Face model folder
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Data: .jsonl rows or a plain .txt
    #[arg(long, value_name = "FILE")]
    pub data: PathBuf,
    /// Tokens per sequence [default: 1024, at most what the model takes]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>)]
    pub seq_len: Option<NonZeroUsize>,
    /// Sequences that run together
    #[arg(long, value_name = "B", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "1")]
    pub batch_size: NonZeroUsize,
    /// Pack rows of every kind into full sequences
    #[arg(long)]
    pub pack: bool,
    /// Number type of weights and activations [default: bf16]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Dtype>,
    /// Number type of linear layers as they are kept and travel; bf16 means that of --dtype
    #[arg(long, value_name = "TYPE", default_value = "bf16", help_heading = "Memory")]
    pub weights: WeightFormat,
    /// Where memory, offload and disk stand.
    #[command(flatten)]
    pub placement: PlacementArgs,
    /// Write a timeline: a page to look at if FILE ends in .html, else Chrome's trace format (Perfetto)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Print one JSON document to stdout at the end
    #[arg(long)]
    pub json: bool,
}

/// Where training state is.
#[derive(Debug, Clone, Args)]
pub struct StateArgs {
    /// Folder of training state: a --disk of the run, or .terrace in its --output; several in their original order
    #[arg(value_name = "PATH", required_unless_present = "disk", conflicts_with = "disk")]
    pub dirs: Vec<PathBuf>,
    /// The same as a flag
    #[arg(long, value_name = "PATH")]
    pub disk: Vec<PathBuf>,
    /// How disk operations are submitted
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub engine: DiskEngine,
}

/// `terrace inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Where the state is.
    #[command(flatten)]
    pub state: StateArgs,
    /// Read every chunk of the last step and the one before, and compare its checksum; exit code 1 if any is not what was written
    #[arg(long)]
    pub verify: bool,
    /// If the last step is damaged and the one before it is whole, make that one the last. Changes nothing otherwise
    #[arg(long, requires = "verify")]
    pub restore_previous: bool,
    /// Print one JSON document to stdout
    #[arg(long)]
    pub json: bool,
}

/// `terrace export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Where the state is.
    #[command(flatten)]
    pub state: StateArgs,
    /// Hugging Face folder of the model that was trained; config.json and tokenizer are taken from it, its weights are not read
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Folder for the model; its weights have the number type of the run's --dtype
    #[arg(long, value_name = "DIR")]
    pub output: PathBuf,
    /// Take the step before the last one, as long as no further step was begun
    #[arg(long)]
    pub previous: bool,
    /// Largest safetensors file
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = shard_size, default_value = "5GB")]
    pub max_shard_size: ByteSize,
    /// Print one JSON document to stdout at the end
    #[arg(long)]
    pub json: bool,
}

/// `terrace demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Folder for everything the demo makes
    #[arg(long, value_name = "DIR", default_value = "terrace-demo")]
    pub output: PathBuf,
    /// Steps to train
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroU64>, default_value = "240")]
    pub steps: NonZeroU64,
    /// Seed of corpus, weights and data order
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole, default_value_t = 0)]
    pub seed: u64,
    /// Where memory, offload and disk stand.
    #[command(flatten)]
    pub placement: PlacementArgs,
    /// Print one JSON document to stdout at the end
    #[arg(long)]
    pub json: bool,
}

/// `terrace calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Folder on a disk to measure; several are measured one by one and all at once
    #[arg(long, value_name = "PATH")]
    pub disk: Vec<PathBuf>,
    /// File for the profile; other sections in it stay [default: profile.json in the cache folder, where later runs find it]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Measure for about 10 seconds instead of 35, less exactly
    #[arg(long)]
    pub quick: bool,
    /// Measure what disks keep up over a minute each of reading, writing and both, with caches full and syncs counted, as steps find them
    /// that move many gigabytes: some minutes a disk, and some hundred gigabytes written to a fast one
    #[arg(long, requires = "disk", conflicts_with = "quick")]
    pub sustained: bool,
    /// The device to measure beside the CPU: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceName,
    /// How disk operations are submitted
    #[arg(long, value_name = "ENGINE", default_value = "auto")]
    pub engine: DiskEngine,
    /// Print the profile to stdout too
    #[arg(long)]
    pub json: bool,
}

/// `terrace report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Write the kernels for cards to DIR as PTX, for machines without NVRTC; needs NVRTC here, and no card
    #[arg(long, value_name = "DIR")]
    pub ptx: Option<PathBuf>,
    /// Print one JSON document to stdout
    #[arg(long)]
    pub json: bool,
}

/// Number types of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    #[default]
    Bf16,
    /// Half precision, in training with a loss scale.
    Fp16,
    /// Single precision.
    Fp32,
}

/// Optimization algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    #[default]
    Adamw,
    /// Adam with weight decay in the gradient.
    Adam,
    /// Adagrad.
    Adagrad,
    /// Lion: one moment, and only the sign of the update.
    Lion,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

/// Formats of optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateFormat {
    /// fp32 master, fp32 moments (14 bytes per parameter).
    Fp32,
    /// The same numbers with the master split losslessly (12 bytes).
    #[default]
    Split,
    /// Split master, bf16 moments (8 bytes).
    Bf16,
    /// 8-bit remainder and moments (5.1 bytes).
    Compact,
}

/// The order in which the micro-batches of a step go through the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accumulation {
    /// All of them through a block before the next.
    #[default]
    Vertical,
    /// One after the other through all blocks.
    Horizontal,
}

/// Whether blocks keep their intermediates for backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// As many blocks as fit, others in the host's memory (of a card) or on disk where that is expected to be faster than computing again.
    #[default]
    Auto,
    /// All blocks, where they compute.
    Keep,
    /// Of a card: as many blocks as it has room for, and others in the host's memory.
    Host,
    /// All blocks, on disk what memory has no room for.
    Disk,
    /// No block.
    Recompute,
}

/// The slowest tier in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Everything stays where it computes.
    None,
    /// Host memory.
    Host,
    /// Disk.
    Disk,
}

/// Number types of weights in generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightFormat {
    /// bfloat16.
    #[default]
    Bf16,
    /// 8-bit groups.
    Int8,
    /// 4-bit groups.
    Int4,
    /// 4-bit floats; of gpt-oss, which is published so, the experts, exactly.
    Mxfp4,
}

/// Where the key/value cache lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvTier {
    /// Device memory
    #[default]
    Device,
    /// Host memory, from where a block's go to the device while the block before computes
    Host,
    /// The directories of --disk
    Disk,
}

/// How disk operations are submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskEngine {
    /// io_uring where the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring.
    Uring,
    /// A pool of threads.
    Threads,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("terrace").chain(line.split_whitespace()))
    }

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn finetune_takes_the_whole_contract() {
        let line = "finetune --model m --data d.jsonl --output o --config c.json --steps 3 --epochs 1.5 --batch-size 2 \
            --grad-accum 4 --accumulation horizontal --seq-len 128 --learning-rate 3e-4 --weight-decay 0.1 --betas 0.9,0.95 --eps 1e-6 --clip 0 \
            --warmup-steps 10 --scheduler cosine --dtype fp32 --state compact --offload host --disk a --disk b \
            --host-memory 24GiB --device-memory 1.5GB --device cuda:1 --seed 7 --no-shuffle --resume --save-every 5 --save-total-limit 2 \
            --no-decay *norm* --no-decay *.bias --param-group *embed*,lr=1e-6 --activations keep --plan p.json --save-plan q.json \
            --tensorboard runs --trace t.json --json --pack --engine threads --max-shard-size 1GB --discrete --window 2 --no-overlap --threads 3";
        let cli = parse(line).unwrap();
        assert_eq!(cli.threads, NonZeroUsize::new(3));
        let Command::Finetune(args) = cli.command else { panic!("another command") };
        assert_eq!(args.betas, Some(Betas(0.9, 0.95)));
        assert_eq!((args.no_decay.len(), args.param_group.len()), (2, 1));
        assert_eq!(args.activations, Some(Activations::Keep));
        assert_eq!(args.accumulation, Some(Accumulation::Horizontal));
        assert_eq!(args.plan, Some(PathBuf::from("p.json")));
        assert_eq!(args.placement.disk.len(), 2);
        assert_eq!(args.placement.device, DeviceName::Cuda(1));
        assert_eq!(args.placement.host_memory, Some(ByteSize(24 << 30)));
        assert!(args.placement.discrete && args.resume && args.json && args.pack && args.no_shuffle);
    }

    #[test]
    fn generate_wants_exactly_one_input() {
        assert!(parse("generate --model m").is_err());
        assert!(parse("generate --model m --prompt x --prompt-ids 1").is_err());
        let Command::Generate(args) = parse("generate --model m --prompt-ids 1,2,3").unwrap().command else {
            panic!("another command")
        };
        assert_eq!(args.prompt_ids, Some(vec![1, 2, 3]));
        assert_eq!((args.temperature, args.trace), (0.0, None));
    }

    #[test]
    fn whatever_runs_the_engine_takes_a_trace() {
        for line in [
            "finetune --model m --data d --output o",
            "generate --model m --prompt x",
            "eval --model m --data d",
        ] {
            let trace = match parse(&format!("{line} --trace t.html")).unwrap().command {
                Command::Finetune(args) => args.trace,
                Command::Generate(args) => args.trace,
                Command::Eval(args) => args.trace,
                _ => panic!("another command"),
            };
            assert_eq!(trace, Some(PathBuf::from("t.html")), "{line}");
        }
    }

    #[test]
    fn bad_values_are_usage_errors() {
        let finetune = "finetune --model m --data d --output o";
        for flag in [
            "--batch-size 0",
            "--grad-accum 0",
            "--seq-len 0",
            "--learning-rate -1",
            "--learning-rate nan",
            "--betas 0.9",
            "--betas 0.9,1.0",
            "--epochs 0",
            "--clip -1",
            "--host-memory 3parsecs",
            "--device gpu",
            "--state int8",
            "--offload cloud",
            "--unknown",
            "--threads 0",
            "--save-every 0",
            "--dtype fp8",
            "--accumulation diagonal",
            "--param-group *,lr=fast",
            "--param-group lr=1",
            "--scheduler exponential",
            "--scheduler OneCycle",
        ] {
            let error = parse(&format!("{finetune} {flag}")).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{flag}");
        }
        for line in [
            "generate --model m --prompt x --top-p 0",
            "generate --model m --prompt-ids 1,x",
            "inspect",
            "inspect --disk d --restore-previous",
            "export --disk d --model m",
            "plan",
            "calibrate --device gpu",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
