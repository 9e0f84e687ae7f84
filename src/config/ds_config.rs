//! DeepSpeed configuration files: which keys are honoured, and what they mean here.
//!
//! The semantics are DeepSpeed 0.19's: `"auto"` is the default, unknown keys are refused in `zero_optimization`, its offload
//! sections, `bf16` and `fp16` and are a warning elsewhere, and the batch sizes are a triple of which two give the third. Three
//! things are deliberately stricter, because DeepSpeed fails on them later or ignores them silently: `nvme` without `nvme_path`,
//! optimizers and schedulers that do not exist here, and options that would change the numbers.

use super::hjson;
use super::schedule::{SCHEDULERS, ScheduleChoice};
use super::section::{Section, SectionError};
use crate::cli::args::{Dtype, Offload, OptimizerName};
use crate::error::advice;
use std::path::{Path, PathBuf};
use terrace_aio::engine::{BLOCK_BYTES_MAX, QUEUE_DEPTH_MAX};
use terrace_optimizer::{LossScaleConfig, OptimizerError, ScheduleKind};

/// What a configuration file asks for. `None` means that it does not say.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DsConfig {
    /// Sequences per step.
    pub batch: Option<u64>,
    /// Sequences per micro-batch.
    pub micro_batch: Option<u64>,
    /// Micro-batches per step.
    pub grad_accum: Option<u64>,
    /// The `optimizer` section.
    pub optimizer: Option<DsOptimizer>,
    /// The `scheduler` section.
    pub schedule: Option<ScheduleChoice>,
    /// Largest global gradient norm; 0 turns clipping off.
    pub gradient_clipping: Option<f64>,
    /// `bf16.enabled`.
    pub bf16: Option<bool>,
    /// `fp16.enabled`.
    pub fp16: Option<bool>,
    /// The loss scale that the `fp16` section describes.
    pub loss_scale: Option<LossScaleConfig>,
    /// ZeRO stage. Every stage is the same on one rank; the sections say what is offloaded.
    pub stage: Option<u64>,
    /// Where parameters are offloaded to.
    pub offload_param: Option<DsOffload>,
    /// Where optimizer state is offloaded to.
    pub offload_optimizer: Option<DsOffload>,
    /// Share of the optimizer that runs on the host, 0 to 1 (Twin-Flow).
    pub offload_ratio: Option<f64>,
    /// Bytes per disk operation.
    pub aio_block_size: Option<u64>,
    /// Disk operations in flight.
    pub aio_queue_depth: Option<u64>,
    /// What the user should know: keys without effect, deprecated forms.
    pub warnings: Vec<String>,
}

/// The `optimizer` section.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct DsOptimizer {
    /// The algorithm.
    pub name: Option<OptimizerName>,
    /// Learning rate.
    pub lr: Option<f64>,
    /// Decay rates of the moments.
    pub betas: Option<(f64, f64)>,
    /// Added to the denominator.
    pub eps: Option<f64>,
    /// Weight decay.
    pub weight_decay: Option<f64>,
    /// Momentum of SGD.
    pub momentum: Option<f64>,
    /// Nesterov's form of momentum.
    pub nesterov: Option<bool>,
}

/// Where a section offloads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DsOffload {
    /// Nowhere.
    None,
    /// Host memory.
    Host,
    /// The disk at this path.
    Disk(PathBuf),
}

/// Why a configuration file is refused.
#[derive(Debug, thiserror::Error)]
pub enum DsConfigError {
    /// It could not be read.
    #[error("--config {}: {source}; {}", path.display(), advice(source))]
    File {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// It is not Hjson.
    #[error("{}:{source}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: hjson::SyntaxError,
    },
    /// A key has a value that makes no sense.
    #[error("{}:{source}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: SectionError,
    },
}

/// Sections that change what is trained, or on what, where they are enabled.
const ALTERING: [&str; 5] =
    ["curriculum_learning", "data_efficiency", "elasticity", "progressive_layer_drop", "quantize_training"];
/// The section whose parts, and parts of those, change what is trained where they are enabled.
const COMPRESSION: &str = "compression_training";
/// DeepSpeed's keys that are about DeepSpeed's own machinery.
const TOP_UNUSED: &[&str] = &[
    "activation_checkpointing",
    "autotuning",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compile",
    COMPRESSION,
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "disable_allgather",
    "dump_state",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "gradient_predivide_factor",
    "graph_harvesting",
    "memory_breakdown",
    "nebula",
    "pipeline",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sparse_attention",
    "sparse_gradients",
    "steps_per_print",
    "tensorboard",
    "torch_autocast",
    "use_data_before_expert_parallelism",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
];
const ZERO_UNUSED: &[&str] = &[
    "allgather_bucket_size",
    "allgather_partitions",
    "allgather_sequential",
    "compute_grad_norm",
    "cpu_offload_use_pin_memory",
    "contiguous_gradients",
    "elastic_checkpoint",
    "ignore_unused_parameters",
    "gather_16bit_weights_on_model_save",
    "legacy_stage1",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "max_live_parameters",
    "max_reuse_distance",
    "mics_hierarchical_params_gather",
    "mics_shard_size",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "memory_efficient_linear",
    "overlap_comm",
    "override_module_apply",
    "parameter_alignment",
    "param_persistence_threshold",
    "pipeline_loading_checkpoint",
    "prefetch_bucket_size",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "save_muon_momentum_buffer_in_memory",
    "stage3_allgather_sequential",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_use_all_reduce_for_fetch_params",
    "sub_group_size",
    "use_all_reduce_for_fetch_params",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
    "zeropp_loco_param",
    "zenflow",
    "enable_sanity_checks",
    "leaf_module",
];
const PARAM_UNUSED: &[&str] = &["buffer_count", "buffer_size", "max_in_cpu", "pin_memory"];
const OPTIMIZER_UNUSED: &[&str] = &[
    "buffer_count",
    "fast_init",
    "pin_memory",
    "pipeline",
    "pipeline_read",
    "pipeline_write",
    "super_offload",
    "cpuadam_cores_perc",
];
const AIO_UNUSED: &[&str] =
    &["intra_op_parallelism", "overlap_events", "single_submit", "thread_count", "use_gds"];
const BF16_UNUSED: &[&str] = &[
    "immediate_grad_update",
    "check_grad_overflow",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
];
const FP16_UNUSED: &[&str] = &["auto_cast", "fp16_master_weights_and_grads", "fp16_optimizer_states"];
const ADAM_UNUSED: &[&str] = &["fp32_optimizer_states", "fused", "foreach", "set_grad_none"];

/// What torch's AdamW decays weights by where nothing is said.
const TORCH_ADAMW_DECAY: f64 = 0.01;

impl DsConfig {
    /// The number type that the file asks for.
    pub fn dtype(&self) -> Option<Dtype> {
        match (self.fp16, self.bf16) {
            (Some(true), _) => Some(Dtype::Fp16),
            (Some(false), None) | (_, Some(false)) => Some(Dtype::Fp32),
            (_, Some(true)) => Some(Dtype::Bf16),
            (None, None) => None,
        }
    }

    /// Sequences per micro-batch and micro-batches per step, where flags go ahead of the file's entries. Of the triple two give the
    /// third; `train_batch_size` alone is one micro-batch.
    ///
    /// # Errors
    /// `train_batch_size` is not a multiple of the one that is given.
    pub fn batches(
        &self,
        micro_batch: Option<u64>,
        grad_accum: Option<u64>,
    ) -> Result<(Option<u64>, Option<u64>), String> {
        let others = [
            (micro_batch, self.micro_batch, "--batch-size", "train_micro_batch_size_per_gpu"),
            (grad_accum, self.grad_accum, "--grad-accum", "gradient_accumulation_steps"),
        ];
        let [micro, accum] = others.map(|(flag, entry, flag_name, entry_name)| match flag {
            Some(value) => Some((value, flag_name)),
            None => entry.map(|value| (value, entry_name)),
        });
        let divide = |total: u64, (by, name): (u64, &str)| {
            let quotient = total.is_multiple_of(by).then_some(total / by);
            quotient.ok_or_else(|| format!("{total} is not a multiple of {name} {by}"))
        };
        Ok(match (self.batch, micro, accum) {
            (Some(total), Some(micro), None) => (Some(micro.0), Some(divide(total, micro)?)),
            (Some(total), None, Some(accum)) => (Some(divide(total, accum)?), Some(accum.0)),
            (Some(total), None, None) => (Some(total), Some(1)),
            (_, micro, accum) => (micro.map(|m| m.0), accum.map(|a| a.0)),
        })
    }

    /// The slowest tier that the offload sections name.
    pub fn offload(&self) -> Option<Offload> {
        let tier = |section: &DsOffload| match section {
            DsOffload::None => Offload::None,
            DsOffload::Host => Offload::Host,
            DsOffload::Disk(_) => Offload::Disk,
        };
        [&self.offload_param, &self.offload_optimizer].into_iter().flatten().map(tier).max()
    }

    /// Reads a configuration file.
    ///
    /// # Errors
    /// The file cannot be read, is not Hjson, or asks for something that makes no sense.
    pub fn load(path: &Path) -> Result<Self, DsConfigError> {
        let owned = || path.to_path_buf();
        let text =
            std::fs::read_to_string(path).map_err(|source| DsConfigError::File { path: owned(), source })?;
        let value = hjson::parse(&text).map_err(|source| DsConfigError::Syntax { path: owned(), source })?;
        read(&value).map_err(|source| DsConfigError::Value { path: owned(), source })
    }

    /// Reads a configuration from text; `name` stands for the file in messages.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn parse(text: &str, name: &str) -> Result<Self, DsConfigError> {
        let value =
            hjson::parse(text).map_err(|source| DsConfigError::Syntax { path: name.into(), source })?;
        read(&value).map_err(|source| DsConfigError::Value { path: name.into(), source })
    }
}

type Result<T, E = SectionError> = std::result::Result<T, E>;

/// What the warnings are made of.
#[derive(Default)]
struct Notes {
    unused: Vec<String>,
    unknown: Vec<String>,
    other: Vec<String>,
}

fn read(value: &hjson::Value) -> Result<DsConfig> {
    let root = Section::root(value)?;
    let mut config = DsConfig::default();
    let mut notes = Notes::default();
    batch_triple(&root, &mut config)?;
    if let Some(section) = root.section("optimizer")? {
        config.optimizer = Some(optimizer(&section, &mut notes)?);
    }
    if let Some(section) = root.section("scheduler")? {
        config.schedule = Some(scheduler(&section, &mut notes)?);
    }
    config.gradient_clipping = root.not_negative("gradient_clipping")?;
    precision(&root, &mut config, &mut notes)?;
    if let Some(section) = root.section("zero_optimization")? {
        zero(&section, &mut config, &mut notes)?;
    }
    if let Some(section) = root.section("aio")? {
        config.aio_block_size = section.at_most("block_size", BLOCK_BYTES_MAX as u64)?;
        config.aio_queue_depth = section.at_most("queue_depth", QUEUE_DEPTH_MAX as u64)?;
        notes.unused.extend(section.unused(AIO_UNUSED));
        notes.unknown.extend(section.unknown());
    }
    for key in ALTERING {
        if root.section(key)?.map_or(Ok(None), |section| section.boolean("enabled"))? == Some(true) {
            return Err(root.error(key, "not available, and it would change what is trained; take it out"));
        }
    }
    if root.section(COMPRESSION)?.is_some_and(|section| section.is_enabled_within()) {
        let message = "something in it is enabled that is not available, and it would change what is trained; take it out";
        return Err(root.error(COMPRESSION, message));
    }
    notes.unused.extend(root.unused(TOP_UNUSED));
    notes.unknown.extend(root.unknown());
    config.warnings = notes.other;
    if !notes.unused.is_empty() {
        config.warnings.push(format!("without effect here: {}", notes.unused.join(", ")));
    }
    if !notes.unknown.is_empty() {
        config.warnings.push(format!("unknown keys, ignored: {}", notes.unknown.join(", ")));
    }
    Ok(config)
}

/// `train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps` on one rank.
fn batch_triple(root: &Section<'_>, config: &mut DsConfig) -> Result<()> {
    config.batch = root.positive("train_batch_size")?;
    config.micro_batch = root.positive("train_micro_batch_size_per_gpu")?;
    config.grad_accum = root.positive("gradient_accumulation_steps")?;
    if let (Some(b), Some(m), Some(a)) = (config.batch, config.micro_batch, config.grad_accum)
        && m.checked_mul(a) != Some(b)
    {
        let message = format!(
            "{b} is not train_micro_batch_size_per_gpu {m} × gradient_accumulation_steps {a}; drop one of the three"
        );
        return Err(root.error("train_batch_size", &message));
    }
    config.batches(None, None).map(drop).map_err(|message| root.error("train_batch_size", &message))
}

fn optimizer(section: &Section<'_>, notes: &mut Notes) -> Result<DsOptimizer> {
    let kind = section.string("type")?.unwrap_or("AdamW");
    let mut name = match kind.to_ascii_lowercase().as_str() {
        "adam" | "adamw" => OptimizerName::Adamw,
        "adagrad" => OptimizerName::Adagrad,
        "lion" => OptimizerName::Lion,
        "sgd" => OptimizerName::Sgd,
        _ => {
            let message = format!("\"{kind}\" is not available; use AdamW, Adam, Adagrad, Lion or SGD");
            return Err(section.error("type", &message));
        }
    };
    let mut optimizer = DsOptimizer::default();
    let params = section.section("params")?;
    if let Some(params) = &params {
        if params.has("max_grad_norm") {
            return Err(params.error(
                "max_grad_norm",
                "not an optimizer parameter; set gradient_clipping at the top level",
            ));
        }
        for (key, wanted) in [("amsgrad", false), ("bias_correction", true), ("maximize", false)] {
            if params.boolean(key)?.is_some_and(|value| value != wanted) {
                return Err(params.error(key, &format!("only {wanted} is available")));
            }
        }
        optimizer.lr = params.not_negative("lr")?;
        let takes =
            |key: &str, without: &[OptimizerName]| !without.contains(&name) || params.leaves_open(key);
        if takes("betas", &[OptimizerName::Adagrad, OptimizerName::Sgd]) {
            optimizer.betas = params.pair("betas")?;
        }
        if let Some((a, b)) = optimizer.betas
            && !((0.0..1.0).contains(&a) && (0.0..1.0).contains(&b))
        {
            return Err(
                params.error("betas", &format!("both must be at least 0 and below 1, found {a} and {b}"))
            );
        }
        if takes("eps", &[OptimizerName::Lion, OptimizerName::Sgd]) {
            optimizer.eps = params.not_negative("eps")?;
        }
        // What transformers' trainer fills in, whichever the optimizer is.
        if name == OptimizerName::Adagrad && params.leaves_open("eps") {
            optimizer.eps = Some(1e-8);
        }
        optimizer.weight_decay = params.not_negative("weight_decay")?;
        // DeepSpeed's "Adam" decouples the decay as well, unless told not to; "AdamW" always does.
        let coupled = name == OptimizerName::Adamw && params.boolean("adam_w_mode")? == Some(false);
        if coupled && kind.eq_ignore_ascii_case("adam") {
            name = OptimizerName::Adam;
        }
        // Of torch's AdamW, where DeepSpeed's own has none.
        let torch = params.boolean("torch_adam")? == Some(true) && name == OptimizerName::Adamw;
        if torch && !params.has("weight_decay") && !params.leaves_open("weight_decay") {
            optimizer.weight_decay = Some(TORCH_ADAMW_DECAY);
        }
        if name == OptimizerName::Sgd {
            optimizer.momentum = params.not_negative("momentum")?;
            optimizer.nesterov = params.boolean("nesterov")?;
        }
        notes.unused.extend(params.unused(ADAM_UNUSED));
        params.refuse_unknown()?;
    }
    notes.unused.extend(section.unused(&["legacy_fusion"]));
    notes.unknown.extend(section.unknown());
    optimizer.name = Some(name);
    let is_left_out = |key| !params.as_ref().is_some_and(|params| params.leaves_open(key));
    // What DeepSpeed's optimizers, and torch's where it has none of its own, do without.
    if is_left_out("lr") {
        optimizer.lr.get_or_insert(if name == OptimizerName::Adagrad { 1e-2 } else { 1e-3 });
    }
    // Of its betas transformers' trainer fills in the same, which are Adam's.
    if name == OptimizerName::Lion {
        optimizer.betas.get_or_insert((0.9, 0.999));
    }
    if name == OptimizerName::Sgd && is_left_out("momentum") {
        optimizer.momentum.get_or_insert(0.0);
    }
    Ok(optimizer)
}

fn scheduler(section: &Section<'_>, notes: &mut Notes) -> Result<ScheduleChoice> {
    let Some(name) = section.string("type")? else {
        return Err(section.error("type", &format!("missing; use {SCHEDULERS}")));
    };
    let empty =
        hjson::Value { at: hjson::Position { line: 1, column: 1 }, kind: hjson::Kind::Object(Vec::new()) };
    let params = match section.section("params")? {
        Some(params) => params,
        None => Section::root(&empty)?,
    };
    notes.unused.extend(params.unused(&["last_batch_iteration"]));
    let Some(mut choice) = ScheduleChoice::read(name, &params)? else {
        return Err(section.error("type", &format!("\"{name}\" is not available; use {SCHEDULERS}")));
    };
    // Of all of DeepSpeed's schedules this one alone goes up to a rate of its own where the file names none.
    if matches!(choice.kind, ScheduleKind::WarmupDecayLr { .. }) && !params.leaves_open("warmup_max_lr") {
        choice.base_lr.get_or_insert(0.001);
    }
    notes.unknown.extend(section.unknown());
    Ok(choice)
}

/// The `bf16` (or `bfloat16`) and `fp16` sections.
fn precision(root: &Section<'_>, config: &mut DsConfig, notes: &mut Notes) -> Result<()> {
    let (key, section) = match (root.section("bf16")?, root.section("bfloat16")?) {
        (Some(_), Some(_)) => {
            return Err(root.error("bfloat16", "an old name of bf16; both stand in the file"));
        }
        (Some(section), None) => ("bf16", Some(section)),
        (None, section) => ("bfloat16", section),
    };
    if let Some(section) = section {
        config.bf16 = section.boolean("enabled")?;
        notes.unused.extend(section.unused(BF16_UNUSED));
        section.refuse_unknown()?;
    }
    let Some(section) = root.section("fp16")? else { return Ok(()) };
    config.fp16 = section.boolean("enabled")?;
    config.loss_scale = Some(loss_scale(&section)?);
    let unused = section.unused(FP16_UNUSED);
    section.refuse_unknown()?;
    if config.fp16 == Some(true) {
        notes.unused.extend(unused);
        if config.bf16 == Some(true) {
            return Err(root.error("fp16", &format!("enabled together with {key}; choose one")));
        }
    }
    Ok(())
}

fn loss_scale(section: &Section<'_>) -> Result<LossScaleConfig> {
    let default = LossScaleConfig::default();
    // What is beyond u32 is beyond every bound as well.
    let small = |key| Ok(section.integer(key)?.map(|value| u32::try_from(value).unwrap_or(u32::MAX)));
    let power = small("initial_scale_power")?.unwrap_or(default.initial_scale_power);
    let window = section.integer("loss_scale_window")?.unwrap_or(default.loss_scale_window);
    let consecutive = section.boolean("consecutive_hysteresis")?;
    let scale = LossScaleConfig {
        loss_scale: section.not_negative("loss_scale")?.unwrap_or(default.loss_scale),
        initial_scale_power: power,
        loss_scale_window: window,
        hysteresis: small("hysteresis")?.unwrap_or(default.hysteresis),
        consecutive_hysteresis: consecutive.unwrap_or(default.consecutive_hysteresis),
        min_loss_scale: section.not_negative("min_loss_scale")?.unwrap_or(default.min_loss_scale),
    };
    match scale.validate() {
        Ok(()) => Ok(scale),
        Err(OptimizerError::Hyperparameter { name, value, expected }) => {
            Err(section.error(name, &format!("must be {expected}, found {value}")))
        }
        Err(error) => Err(section.error("loss_scale", &error.to_string())),
    }
}

fn zero(section: &Section<'_>, config: &mut DsConfig, notes: &mut Notes) -> Result<()> {
    config.stage = section.integer("stage")?;
    if config.stage.is_some_and(|stage| stage > 3) {
        return Err(section.error("stage", "must be 0, 1, 2 or 3"));
    }
    if let Some(param) = section.section("offload_param")? {
        config.offload_param = Some(offload(&param)?);
        notes.unused.extend(param.unused(PARAM_UNUSED));
        param.refuse_unknown()?;
    }
    if let Some(optimizer) = section.section("offload_optimizer")? {
        config.offload_optimizer = Some(offload(&optimizer)?);
        config.offload_ratio = optimizer.not_negative("ratio")?;
        if config.offload_ratio.is_some_and(|ratio| ratio > 1.0) {
            return Err(optimizer.error("ratio", "must be between 0 and 1"));
        }
        notes.unused.extend(optimizer.unused(OPTIMIZER_UNUSED));
        optimizer.refuse_unknown()?;
    }
    old_offload(section, "cpu_offload", "offload_optimizer", &mut config.offload_optimizer, notes)?;
    for old in ["cpu_offload_param", "cpu_offload_params"] {
        old_offload(section, old, "offload_param", &mut config.offload_param, notes)?;
    }
    notes.unused.extend(section.unused(ZERO_UNUSED));
    section.refuse_unknown()
}

/// The deprecated `cpu_offload: true` and its like.
fn old_offload(
    section: &Section<'_>,
    old: &'static str,
    new: &str,
    place: &mut Option<DsOffload>,
    notes: &mut Notes,
) -> Result<()> {
    let Some(on) = section.boolean(old)? else { return Ok(()) };
    if place.is_some() {
        return Err(section.error(old, &format!("the old form of {new}; both stand in the file")));
    }
    notes.other.push(format!("{} is deprecated, write {new}: {{\"device\": \"cpu\"}}", section.name(old)));
    if on {
        *place = Some(DsOffload::Host);
    }
    Ok(())
}

fn offload(section: &Section<'_>) -> Result<DsOffload> {
    let path = section.string("nvme_path")?;
    match section.string("device")?.unwrap_or("none") {
        "none" => Ok(DsOffload::None),
        "cpu" => Ok(DsOffload::Host),
        "nvme" => match path {
            Some("") => Err(section.error("nvme_path", "empty; give a folder on the disk")),
            Some(path) => Ok(DsOffload::Disk(path.into())),
            None => Err(section.error("nvme_path", "missing, but device is \"nvme\"")),
        },
        other => {
            Err(section
                .error("device", &format!("expected \"none\", \"cpu\" or \"nvme\", found \"{other}\"")))
        }
    }
}
