//! The flags of `terrace plan`: those of a run as far as they change what it needs, and a machine that is not here.

use super::args::{
    Accumulation, Activations, DeviceName, DiskCache, Dtype, DurabilityFlag, KvTier, Offload, OptimizerName,
    RanksArgs, StateFormat, WeightFormat,
};
use super::values::{count, not_negative_float, parameters, part, positive_float};
use crate::config::ByteSize;
use crate::error::CliError;
use clap::{ArgGroup, Args};
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// `terrace plan`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true).args(["model", "params"]))]
pub struct PlanArgs {
    /// Model folder, or a config.json alone; weights are not read
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Number of parameters, such as 40b; a Llama-like shape is chosen for it
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parameters)]
    pub params: Option<u64>,
    /// Sequences per micro-batch
    #[arg(long, value_name = "B", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "1")]
    pub batch_size: NonZeroUsize,
    /// Micro-batches per step
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "1")]
    pub grad_accum: NonZeroUsize,
    /// Order of the micro-batches: all of them through a block before the next, or one after the other through the whole model
    #[arg(long, value_name = "HOW", default_value = "vertical")]
    pub accumulation: Accumulation,
    /// Tokens per sequence [default: 1024, at most what the model takes]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>)]
    pub seq_len: Option<NonZeroUsize>,
    /// Number type of weights and activations
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub dtype: Dtype,
    /// How training state is stored [default: split; fp32 unless --dtype bf16]
    #[arg(long, value_name = "FORMAT")]
    pub state: Option<StateFormat>,
    /// Largest global gradient norm, 0 for none [default: 1.0]: an update that has to know the norm waits for the next forward
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = not_negative_float)]
    pub clip: Option<f64>,
    /// Slowest tier in use [default: disk, with --generate too]; the table of choices has no other if it is given
    #[arg(long, value_name = "TIER")]
    pub offload: Option<Offload>,
    /// Optimization algorithm
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    pub optimizer: OptimizerName,
    /// Which blocks keep what they computed from forward to backward
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub activations: Activations,
    /// The part of the state that the host holds and updates, as in `terrace finetune`
    #[arg(long, value_name = "R", allow_negative_numbers = true, value_parser = part)]
    pub optimizer_ratio: Option<f64>,
    /// Folder on a disk that the state would go to
    #[arg(long, value_name = "PATH")]
    pub disk: Vec<PathBuf>,
    /// Space on all disks together [default: any]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub disk_space: Option<ByteSize>,
    /// Host memory to use [default: what is free here, less a reserve]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub host_memory: Option<ByteSize>,
    /// Host memory for copies of what is on disk, which is then written as ever but read no more: auto takes what the budget has
    /// left, none takes nothing
    #[arg(long, value_name = "SIZE", default_value = "auto", allow_negative_numbers = true)]
    pub disk_cache: DiskCache,
    /// Device memory to use [default: what is free here, less a reserve]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub device_memory: Option<ByteSize>,
    /// Where to compute: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceName,
    /// Plan `terrace generate` instead: --batch-size prompts of --seq-len tokens at a time
    #[arg(
        long,
        conflicts_with_all = [
            "grad_accum", "accumulation", "state", "clip", "durability", "optimizer", "activations", "optimizer_ratio", "save", "ranks",
            "nodes"
        ]
    )]
    pub generate: bool,
    /// Most new tokens per prompt
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "128", requires = "generate")]
    pub max_new_tokens: NonZeroUsize,
    /// Number type of linear layers as they are kept and travel; bf16 means that of --dtype
    #[arg(long, value_name = "TYPE", default_value = "bf16", requires = "generate")]
    pub weights: WeightFormat,
    /// Lowest tier that the key/value cache may be in between its uses: blocks that have no room above it are there. On a CPU, memory
    /// of the device is that of the host
    #[arg(long, value_name = "TIER", default_value = "device", requires = "generate")]
    pub kv: KvTier,
    /// What the machine can do, written by `terrace calibrate` [default: that of this machine, unless another is described]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// When training state on disk becomes durable: with every step; with every checkpoint and the end, which writes less; or (none)
    /// kept once, in half the space, and lost if the run is killed
    #[arg(long, value_name = "WHEN", default_value = "step")]
    pub durability: DurabilityFlag,

    /// Memory of a card, here or not
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        help_heading = "A machine that is not here"
    )]
    pub gpu_memory: Option<ByteSize>,
    /// Bytes per second of its memory, such as 1TB
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        help_heading = "A machine that is not here"
    )]
    pub gpu_bandwidth: Option<ByteSize>,
    /// Bytes per second of its link in each direction, such as 25GB
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        help_heading = "A machine that is not here"
    )]
    pub link: Option<ByteSize>,
    /// Operations per second that its matrix products sustain, in 10¹²
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = positive_float, help_heading = "A machine that is not here")]
    pub tflops: Option<f64>,
    /// Bytes per second of host memory, such as 80GB
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        help_heading = "A machine that is not here"
    )]
    pub dram: Option<ByteSize>,
    /// Bytes per second that all disks together read
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        requires = "disk_write",
        help_heading = "A machine that is not here"
    )]
    pub disk_read: Option<ByteSize>,
    /// Bytes per second that they write
    #[arg(
        long,
        value_name = "SIZE",
        allow_negative_numbers = true,
        requires = "disk_read",
        help_heading = "A machine that is not here"
    )]
    pub disk_write: Option<ByteSize>,
    /// Several cards.
    #[command(flatten)]
    pub ranks: RanksArgs,
    /// Write the plan, for `terrace finetune --plan`
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Print one JSON document to stdout
    #[arg(long)]
    pub json: bool,
}

impl PlanArgs {
    /// Refuses a rate of zero, with which whatever it is the rate of would never end.
    ///
    /// # Errors
    /// There is one.
    pub fn check_rates(&self) -> Result<(), CliError> {
        let rates = [
            ("--gpu-bandwidth", self.gpu_bandwidth),
            ("--link", self.link),
            ("--dram", self.dram),
            ("--disk-read", self.disk_read),
            ("--disk-write", self.disk_write),
        ];
        match rates.into_iter().chain(self.ranks.rates()).find(|(_, rate)| *rate == Some(ByteSize(0))) {
            Some((flag, _)) => {
                Err(CliError::Usage(format!("{flag} of 0 moves nothing: give the bytes of a second")))
            }
            None => Ok(()),
        }
    }
}
