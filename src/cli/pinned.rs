//! A plan in a file: `terrace plan --save` and `terrace finetune --save-plan` write it, `terrace finetune --plan` runs it.
//!
//! ```text
//! { "version": 1,
//!   "model":   { "parameters": …, "layers": …, … },          compared with the model of a run
//!   "run":     { "batch_size": …, "dtype": "bf16", … },      settings that a run takes from here
//!   "budget":  { "host_bytes": …, "device_bytes": null },    what the plan was allowed; null: without bound
//!   "windows": { "weight_slots": …, "kept_blocks": …, … },   what the planner chose, all of it
//!   "bytes":   { "host": …, "device": …, "disk": … },        and what that takes
//!   "memory":  [ { "tier": "host", "purpose": "weights …", … } ],
//!   "placement": [ { "first": "layers.0", …, "parts": [ { "what": "weights", "place": "disk", … } ] } ],
//!   "step":    { "operations": …, "seconds": { "disk": … }, "bound_by": "disk", … } }
//! ```
//!
//! The windows leave a run's planner no choice, so that a run of the file is the same run whatever memory happens to be free. What
//! contradicts the file is refused, never settled silently. A budget is not pinned: that of the run is its machine's, and the
//! plan fits it or is refused. `memory`, `placement` and `step` are for readers, and of `bytes` a run only asks whether they fit;
//! there are files without `placement`. Unknown keys are refused: one that was meant to say something must not be ignored.

use super::args::{Accumulation, Activations, Dtype, DurabilityFlag, FinetuneArgs, Offload, StateFormat};
use super::placement::PlacedGroups;
use crate::config::DsConfig;
use crate::error::{CliError, advice};
use crate::floor::Floor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use terrace_models::{ModelConfig, param_count};
use terrace_tiers::{ByteSize, MemoryPlan, Tier};
use terrace_zero::{StepWork, Traffic, WindowOverrides};

/// The version that this build writes and reads.
pub const VERSION: u64 = 1;
/// What to do where a plan is of something else.
const ANOTHER: &str = "make a plan of this run with `terrace plan --save` or `terrace finetune --save-plan`";

/// What is in the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// See [`VERSION`].
    pub version: u64,
    /// The model.
    pub model: ModelShape,
    /// The settings.
    pub run: Settings,
    /// What the plan was allowed.
    pub budget: Budget,
    /// What was chosen.
    pub windows: Windows,
    /// What it takes.
    pub bytes: Totals,
    /// The same, term by term.
    pub memory: Vec<Term>,
    /// What of which groups is where; nothing is said by files without it.
    #[serde(default)]
    pub placement: Vec<PlacedGroups>,
    /// What a step does and takes at least.
    pub step: Step,
}

/// The measures of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are those of the model's configuration")]
pub struct ModelShape {
    pub parameters: u64,
    pub layers: usize,
    pub hidden: usize,
    pub feed_forward: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub vocab: usize,
}

/// The settings that a plan depends on, and that a run of it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Sequences per micro-batch.
    pub batch_size: u64,
    /// Micro-batches per step.
    pub grad_accum: u64,
    /// Their order.
    pub accumulation: Accumulation,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Number type of weights and activations.
    pub dtype: Dtype,
    /// Format of the state.
    pub state: StateFormat,
    /// Slowest tier in use.
    pub offload: Offload,
    /// When state on disk becomes durable.
    pub durability: DurabilityFlag,
    /// Whose memory the device computes in.
    pub device_memory: DeviceMemory,
    /// Ranks that train together, of which a run is one.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: usize,
    /// The nodes that they are on.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub nodes: usize,
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_one(count: &usize) -> bool {
    *count == 1
}

/// Whose memory a device computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceMemory {
    /// The host's.
    Host,
    /// Its own.
    Own,
}

/// Bytes that a plan was allowed; `None` is without bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Budget {
    pub host_bytes: Option<u64>,
    pub device_bytes: Option<u64>,
}

/// What the planner chose: [`WindowOverrides`], whose documentation says what they mean.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are those of WindowOverrides")]
pub struct Windows {
    pub weight_slots: usize,
    pub chunk_elements: usize,
    pub update_slots: usize,
    pub gradient_groups: usize,
    pub gradients_on_disk: bool,
    pub activations_on_disk: bool,
    pub signals_stay: bool,
    /// Two, where a plan says nothing.
    #[serde(default = "uploads_ahead")]
    pub uploads_ahead: usize,
    #[serde(default)]
    pub gradients_whole: bool,
    pub copied_weights: usize,
    pub copied_groups: usize,
    #[serde(default)]
    pub device_groups: usize,
    #[serde(default)]
    pub state_groups: usize,
    #[serde(default)]
    pub packed_bytes: usize,
    pub kept_blocks: usize,
    #[serde(default)]
    pub kept_on_host: usize,
    #[serde(default)]
    pub kept_on_disk: usize,
    #[serde(default)]
    pub kept_slots: usize,
    /// Blocks that could keep.
    pub kept_blocks_max: usize,
    pub overlap: bool,
}

/// Bytes by tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names of the tiers")]
pub struct Totals {
    pub host: u64,
    pub device: u64,
    pub disk: u64,
}

/// A term of a tier's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Term {
    pub tier: String,
    pub purpose: String,
    pub count: u64,
    pub unit_bytes: u64,
    pub bytes: u64,
}

/// What a step does, and what each resource takes for that alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are those of `terrace plan --json`")]
pub struct Step {
    pub operations: u64,
    pub tokens: u64,
    pub disk_read_bytes: u64,
    pub disk_write_bytes: u64,
    pub upload_bytes: u64,
    pub download_bytes: u64,
    pub memory_bytes: u64,
    /// Of several ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_bytes: Option<u64>,
    /// By resource, those that are used and known.
    pub seconds: BTreeMap<String, f64>,
    /// The longest of them.
    pub step_seconds: Option<f64>,
    /// What a step is expected to take.
    #[serde(default)]
    pub expected_seconds: Option<f64>,
    /// The same while no step is clipped, if that makes a difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unclipped_seconds: Option<f64>,
    pub bound_by: Option<String>,
}

impl PlanFile {
    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written; the message begins with `flag`.
    pub fn write(&self, flag: &str, path: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(self).map_err(CliError::failed)?;
        std::fs::write(path, text + "\n")
            .map_err(|e| CliError::Failed(format!("{flag} {}: {e}; {}", path.display(), advice(&e))))?;
        eprintln!("the plan is in {}", path.display());
        Ok(())
    }
}

impl ModelShape {
    /// The shape of a model.
    pub fn of(model: &ModelConfig) -> Self {
        Self {
            parameters: param_count(model),
            layers: model.layers,
            hidden: model.hidden,
            feed_forward: model.feed_forward,
            heads: model.heads,
            kv_heads: model.kv_heads,
            head_size: model.head_size,
            vocab: model.vocab,
        }
    }

    fn measures(&self) -> [(&'static str, u64); 8] {
        [
            ("layers", self.layers as u64),
            ("hidden", self.hidden as u64),
            ("feed_forward", self.feed_forward as u64),
            ("heads", self.heads as u64),
            ("kv_heads", self.kv_heads as u64),
            ("head_size", self.head_size as u64),
            ("vocab", self.vocab as u64),
            ("parameters", self.parameters),
        ]
    }
}

impl Budget {
    /// Of an engine, which has no bound at the largest number.
    pub fn new(host: u64, device: u64) -> Self {
        let bound = |bytes| Some(bytes).filter(|&bytes| bytes < u64::MAX);
        Self { host_bytes: bound(host), device_bytes: bound(device) }
    }
}

fn uploads_ahead() -> usize {
    2
}

impl Windows {
    /// Of a finished plan, in which none is open.
    pub fn new(chosen: WindowOverrides, kept_blocks_max: usize) -> Self {
        let WindowOverrides {
            weight_slots: Some(weight_slots),
            chunk_elements: Some(chunk_elements),
            update_slots: Some(update_slots),
            gradient_groups: Some(gradient_groups),
            gradients_on_disk: Some(gradients_on_disk),
            activations_on_disk: Some(activations_on_disk),
            signals_stay: Some(signals_stay),
            uploads_ahead: Some(uploads_ahead),
            gradients_whole: Some(gradients_whole),
            kept_blocks: Some(kept_blocks),
            kept_on_host: Some(kept_on_host),
            kept_on_disk: Some(kept_on_disk),
            kept_slots: Some(kept_slots),
            copied_weights: Some(copied_weights),
            copied_groups: Some(copied_groups),
            device_groups: Some(device_groups),
            state_groups: Some(state_groups),
            // Nothing is generated in training.
            kv_on_device: _,
            kv_on_host: _,
            packed_bytes: Some(packed_bytes),
            overlap: Some(overlap),
            // It is no part of a plan.
            sync_ahead: _,
        } = chosen
        else {
            unreachable!("a finished plan has settled every window: {chosen:?}")
        };
        Self {
            weight_slots,
            chunk_elements,
            update_slots,
            gradient_groups,
            gradients_on_disk,
            activations_on_disk,
            signals_stay,
            uploads_ahead,
            gradients_whole,
            copied_weights,
            copied_groups,
            device_groups,
            state_groups,
            packed_bytes,
            kept_blocks,
            kept_on_host,
            kept_on_disk,
            kept_slots,
            kept_blocks_max,
            overlap,
        }
    }

    /// For an engine.
    pub fn overrides(&self) -> WindowOverrides {
        WindowOverrides {
            weight_slots: Some(self.weight_slots),
            chunk_elements: Some(self.chunk_elements),
            update_slots: Some(self.update_slots),
            gradient_groups: Some(self.gradient_groups),
            gradients_on_disk: Some(self.gradients_on_disk),
            activations_on_disk: Some(self.activations_on_disk),
            signals_stay: Some(self.signals_stay),
            uploads_ahead: Some(self.uploads_ahead),
            gradients_whole: Some(self.gradients_whole),
            kept_blocks: Some(self.kept_blocks),
            kept_on_host: Some(self.kept_on_host),
            kept_on_disk: Some(self.kept_on_disk),
            kept_slots: Some(self.kept_slots),
            copied_weights: Some(self.copied_weights),
            copied_groups: Some(self.copied_groups),
            device_groups: Some(self.device_groups),
            state_groups: Some(self.state_groups),
            kv_on_device: Some(0),
            kv_on_host: Some(0),
            packed_bytes: Some(self.packed_bytes),
            overlap: Some(self.overlap),
            sync_ahead: None,
        }
    }
}

impl Totals {
    /// Of a plan.
    pub fn new(memory: &MemoryPlan) -> Self {
        Self {
            host: memory.total(Tier::Host),
            device: memory.total(Tier::Device),
            disk: memory.total(Tier::Disk),
        }
    }
}

impl Term {
    /// Of a plan.
    pub fn all(memory: &MemoryPlan) -> Vec<Self> {
        let terms = memory.entries().iter().map(|term| Self {
            tier: match term.tier {
                Tier::Device => "device",
                Tier::Host => "host",
                Tier::Disk => "disk",
            }
            .to_owned(),
            purpose: term.purpose.clone(),
            count: term.count,
            unit_bytes: term.unit_bytes,
            bytes: term.bytes(),
        });
        terms.collect()
    }
}

impl Step {
    /// Of a plan.
    pub fn new(work: &StepWork, floor: &Floor) -> Self {
        let (bound, exchanged) = (floor.bound(), work.exchanged());
        let several = exchanged != Traffic::default();
        Self {
            operations: work.operations,
            tokens: work.tokens,
            disk_read_bytes: work.disk_read_bytes,
            disk_write_bytes: work.disk_write_bytes,
            upload_bytes: work.upload_bytes,
            download_bytes: work.download_bytes,
            memory_bytes: work.memory_bytes,
            network_bytes: several.then_some(exchanged.network_bytes),
            peer_bytes: several.then_some(exchanged.peer_bytes),
            seconds: floor.seconds.iter().map(|&(name, seconds)| (name.to_owned(), seconds)).collect(),
            step_seconds: bound.map(|(_, seconds)| seconds),
            expected_seconds: floor.expected,
            unclipped_seconds: floor.unclipped,
            bound_by: bound.map(|(name, _)| name.to_owned()),
        }
    }
}

/// A plan that a run was given.
#[derive(Debug, Clone, PartialEq)]
pub struct Pinned {
    path: PathBuf,
    /// What it says.
    pub file: PlanFile,
}

impl Pinned {
    /// Reads the file that `--plan` names.
    ///
    /// # Errors
    /// It cannot be read, has another version or an unknown key, or says what cannot be.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let refused = |what: String| {
            let wrote = "it takes a file that `terrace plan --save` or `terrace finetune --save-plan` wrote";
            Err(CliError::Usage(format!("--plan {}: {what}; {wrote}", path.display())))
        };
        #[derive(Deserialize)]
        struct Version {
            version: Option<u64>,
        }
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) => return refused(format!("{e}; {}", advice(&e))),
        };
        match serde_json::from_str(&text) {
            Ok(Version { version: Some(VERSION) }) => {}
            Ok(Version { version: Some(other) }) => {
                return refused(format!("version is {other}, and this build reads {VERSION}"));
            }
            Ok(Version { version: None }) => return refused("there is no version".to_owned()),
            Err(e) => return refused(format!("not a plan: {e}")),
        }
        let file: PlanFile = match serde_json::from_str(&text) {
            Ok(file) => file,
            Err(e) => return refused(e.to_string()),
        };
        let pinned = Self { path: path.to_owned(), file };
        pinned.check_ranks()?;
        pinned.check_places()?;
        Ok(pinned)
    }

    /// A run is one rank.
    fn check_ranks(&self) -> Result<(), CliError> {
        let Settings { ranks, nodes, .. } = self.file.run;
        if ranks == 1 && nodes == 1 {
            return Ok(());
        }
        Err(self.refused(format!(
            "run.ranks is {ranks} and run.nodes {nodes}, and this build runs one rank: such a plan says what a machine would need; \
             {ANOTHER}, without --ranks"
        )))
    }

    /// Nothing of a step goes to disk in a run without one.
    fn check_places(&self) -> Result<(), CliError> {
        let (run, windows) = (&self.file.run, &self.file.windows);
        let places = [
            ("gradients_on_disk", windows.gradients_on_disk, "true".to_owned()),
            ("activations_on_disk", windows.activations_on_disk, "true".to_owned()),
            ("kept_on_disk", windows.kept_on_disk > 0, windows.kept_on_disk.to_string()),
        ];
        match places.iter().find(|(_, on_disk, _)| *on_disk && run.offload != Offload::Disk) {
            Some((key, _, value)) => Err(self.refused(format!(
                "windows.{key} is {value}, but run.offload is {}: only a run with --offload disk can do that; correct one of the two",
                name(run.offload)
            ))),
            None => Ok(()),
        }
    }

    fn refused(&self, what: impl Display) -> CliError {
        CliError::Usage(format!("--plan {}: {what}", self.path.display()))
    }

    /// The flags of a run of this plan: what they and the configuration file leave open is filled in.
    ///
    /// # Errors
    /// A flag or the configuration file says otherwise.
    pub fn settle(&self, args: &FinetuneArgs, config: Option<&DsConfig>) -> Result<FinetuneArgs, CliError> {
        let (run, windows) = (&self.file.run, &self.file.windows);
        let (none, mut args) = (DsConfig::default(), args.clone());
        let config = config.unwrap_or(&none);
        let count = |flag: Option<NonZeroU64>| flag.map(u64::from);
        self.agree("run.batch_size", &run.batch_size, "--batch-size", count(args.batch_size))?;
        self.agree("run.grad_accum", &run.grad_accum, "--grad-accum", count(args.grad_accum))?;
        let accumulation = args.accumulation.map(name);
        self.agree("run.accumulation", &name(run.accumulation), "--accumulation", accumulation)?;
        self.agree("run.seq_len", &run.seq_len, "--seq-len", args.seq_len.map(usize::from))?;
        self.agree("run.dtype", &name(run.dtype), "--dtype", args.dtype.map(name))?;
        self.agree("run.state", &name(run.state), "--state", args.state.map(name))?;
        self.agree("run.offload", &name(run.offload), "--offload", args.placement.offload.map(name))?;
        let window = args.placement.window.map(usize::from);
        self.agree("windows.weight_slots", &windows.weight_slots, "--window", window)?;
        let overlap = args.placement.no_overlap.then_some(false);
        self.agree("windows.overlap", &windows.overlap, "--no-overlap: overlap", overlap)?;
        self.agree("run.durability", &name(run.durability), "--durability", args.durability.map(name))?;
        let copies = (args.placement.disk_cache.0 == 0).then_some(0);
        self.agree("windows.copied_weights", &windows.copied_weights, "--disk-cache: the number", copies)?;
        let kept = match args.activations {
            Some(Activations::Keep) => Some(windows.kept_blocks_max),
            Some(Activations::Recompute) => Some(0),
            Some(Activations::Auto | Activations::Host | Activations::Disk) | None => None,
        };
        self.agree("windows.kept_blocks", &windows.kept_blocks, "--activations: the number", kept)?;
        let kept_on_disk = match args.activations {
            Some(Activations::Disk) => {
                let in_memory = windows.kept_blocks + windows.kept_on_host;
                Some(windows.kept_blocks_max.saturating_sub(in_memory))
            }
            Some(Activations::Keep | Activations::Host | Activations::Recompute) => Some(0),
            Some(Activations::Auto) | None => None,
        };
        let kept_on_host = match args.activations {
            Some(Activations::Keep | Activations::Recompute) => Some(0),
            Some(Activations::Auto | Activations::Host | Activations::Disk) | None => None,
        };
        self.agree("windows.kept_on_host", &windows.kept_on_host, "--activations: the number", kept_on_host)?;
        self.agree("windows.kept_on_disk", &windows.kept_on_disk, "--activations: the number", kept_on_disk)?;
        if args.optimizer_ratio.is_some() {
            let message = "the plan says whose state the device updates, group by group; leave --optimizer-ratio out, or make a plan with it";
            return Err(self.refused(message));
        }
        // A flag that agrees with the plan wins over the configuration, as everywhere.
        if args.batch_size.is_none() {
            let key = "--config: train_micro_batch_size_per_gpu";
            self.agree("run.batch_size", &run.batch_size, key, config.micro_batch)?;
        }
        if args.grad_accum.is_none() {
            let key = "--config: gradient_accumulation_steps";
            self.agree("run.grad_accum", &run.grad_accum, key, config.grad_accum)?;
        }
        if args.batch_size.is_none() || args.grad_accum.is_none() {
            let step = run.batch_size.saturating_mul(run.grad_accum);
            self.agree("run.batch_size × grad_accum", &step, "--config: train_batch_size", config.batch)?;
        }
        if args.dtype.is_none() {
            self.agree("run.dtype", &name(run.dtype), "--config: the number type", config.dtype().map(name))?;
        }
        if args.placement.offload.is_none() {
            let key = "--config: the slowest device of the offload sections";
            self.agree("run.offload", &name(run.offload), key, config.offload().map(name))?;
        }
        let positive = |key: &str| self.refused(format!("run.{key} is 0 and must be at least 1; correct it"));
        args.batch_size = Some(NonZeroU64::new(run.batch_size).ok_or_else(|| positive("batch_size"))?);
        args.grad_accum = Some(NonZeroU64::new(run.grad_accum).ok_or_else(|| positive("grad_accum"))?);
        args.seq_len = Some(NonZeroUsize::new(run.seq_len).ok_or_else(|| positive("seq_len"))?);
        args.accumulation = Some(run.accumulation);
        args.durability = Some(run.durability);
        args.dtype = Some(run.dtype);
        args.state = Some(run.state);
        args.placement.offload = Some(run.offload);
        Ok(args)
    }

    /// Refuses a setting that is given and differs.
    fn agree<T: PartialEq + Display>(
        &self,
        key: &str,
        pinned: &T,
        flag: &str,
        given: Option<T>,
    ) -> Result<(), CliError> {
        match given.filter(|given| given != pinned) {
            None => Ok(()),
            Some(given) => {
                let what = format!("{key} is {pinned}, but {flag} is {given}; leave that out, or {ANOTHER}");
                Err(self.refused(what))
            }
        }
    }

    /// Refuses sequences that are longer than the model takes: another model was planned for.
    ///
    /// # Errors
    /// They are.
    pub fn check_length(&self, positions_max: Option<usize>) -> Result<(), CliError> {
        let planned = self.file.run.seq_len;
        match positions_max {
            Some(most) if planned > most => Err(self.refused(format!(
                "run.seq_len is {planned}, but that of --model takes {most} positions at most; give the model that was planned for, or {ANOTHER}"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses another model, and another kind of device.
    ///
    /// # Errors
    /// It is one.
    pub fn check_model(&self, model: &ModelConfig, unified: bool) -> Result<(), CliError> {
        let here = ModelShape::of(model);
        for ((key, planned), (_, found)) in self.file.model.measures().into_iter().zip(here.measures()) {
            if planned != found {
                let what = format!(
                    "model.{key} is {planned}, but that of --model is {found}; give the model that was planned for, or {ANOTHER}"
                );
                return Err(self.refused(what));
            }
        }
        let (planned, found) =
            (self.file.run.device_memory, if unified { DeviceMemory::Host } else { DeviceMemory::Own });
        if planned != found {
            let words = |memory| match memory {
                DeviceMemory::Host => "host (the CPU)",
                DeviceMemory::Own => "own (a card)",
            };
            let (planned, found) = (words(planned), words(found));
            let what = format!(
                "run.device_memory is {planned}, but that of this run is {found}; choose another --device, or {ANOTHER}"
            );
            return Err(self.refused(what));
        }
        Ok(())
    }

    /// Refuses budgets that the plan's own figures do not fit.
    ///
    /// # Errors
    /// They do not.
    pub fn check_budget(&self, host: u64, device: u64) -> Result<(), CliError> {
        let bytes = &self.file.bytes;
        for (key, flag, needed, budget) in
            [("host", "--host-memory", bytes.host, host), ("device", "--device-memory", bytes.device, device)]
        {
            if needed > budget {
                let (needed, budget) = (ByteSize(needed).rounded_up(), ByteSize(budget));
                let what = format!(
                    "bytes.{key} is {needed}, but this run may take {budget} ({flag}, or what is free); free memory, raise {flag} to \
                     {needed}, or {ANOTHER}"
                );
                return Err(self.refused(what));
            }
        }
        Ok(())
    }

    /// Refuses copies of state that take more than `--disk-cache`.
    ///
    /// # Errors
    /// They do.
    pub fn check_copies(&self, copied: u64, most: u64) -> Result<(), CliError> {
        if copied <= most {
            return Ok(());
        }
        let (copied, most) = (ByteSize(copied).rounded_up(), ByteSize(most));
        Err(self.refused(format!(
            "windows.copied_weights and windows.copied_groups are copies of {copied}, but --disk-cache is {most}; leave that \
             out, raise it to {copied}, or {ANOTHER}"
        )))
    }

    /// Compares the windows of a run with those of the plan.
    ///
    /// # Errors
    /// They differ.
    pub fn check_windows(&self, here: &Windows) -> Result<(), CliError> {
        let fields = |windows: &Windows| match serde_json::to_value(windows) {
            Ok(serde_json::Value::Object(fields)) => fields,
            other => unreachable!("windows are an object: {other:?}"),
        };
        let (planned, found) = (fields(&self.file.windows), fields(here));
        match planned.iter().find(|(key, planned)| found[*key] != **planned) {
            None => Ok(()),
            Some((key, planned)) => Err(self.refused(format!(
                "windows.{key} is {planned}, but in this run it can only be {}; correct it, or {ANOTHER}",
                found[key]
            ))),
        }
    }

    /// An error of planning with these windows.
    pub fn explain(&self, error: terrace_zero::EngineError) -> CliError {
        match CliError::from(error) {
            CliError::Usage(what) => self.refused(format!("{what}; or {ANOTHER}")),
            other => other,
        }
    }
}

/// The word for a choice in files and flags.
pub(super) fn name(choice: impl Serialize) -> String {
    match serde_json::to_value(choice) {
        Ok(serde_json::Value::String(name)) => name,
        other => unreachable!("choices are words: {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_all_there() {
        let chosen = WindowOverrides {
            weight_slots: Some(3),
            chunk_elements: Some(1 << 14),
            update_slots: Some(5),
            gradient_groups: Some(1),
            gradients_on_disk: Some(true),
            activations_on_disk: Some(false),
            signals_stay: Some(true),
            uploads_ahead: Some(1),
            gradients_whole: Some(true),
            kept_blocks: Some(7),
            kept_on_host: Some(2),
            kept_on_disk: Some(1),
            kept_slots: Some(8),
            copied_weights: Some(6),
            copied_groups: Some(2),
            packed_bytes: Some(4096),
            device_groups: Some(4),
            state_groups: Some(2),
            kv_on_device: Some(0),
            kv_on_host: Some(0),
            overlap: Some(false),
            sync_ahead: None,
        };
        let windows = Windows::new(chosen, 9);
        assert_eq!(windows.overrides(), chosen);
        let text = serde_json::to_string(&windows).unwrap();
        assert_eq!(serde_json::from_str::<Windows>(&text).unwrap(), windows);
    }

    #[test]
    fn choices_have_their_names() {
        assert_eq!((name(Dtype::Fp16), name(Offload::Disk)), ("fp16".to_owned(), "disk".to_owned()));
    }
}
