//! What the embedder decides.

use crate::network::PARAM_ALIGN;
use crate::{EngineError, Result, Timeline};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_kernels::{DType, KeyValues};
use terrace_optimizer::{AdamW, Algorithm, GroupRule, LossScaleConfig, NORM_BLOCK, StateFormat};
use terrace_tiers::{Striping, SyncAhead, Tier};

/// What a [refusal](terrace_tiers::PlanRefusal) calls the budget of host memory.
pub const HOST_BUDGET: &str = "EngineConfig::host_budget";
/// The same of device memory.
pub const DEVICE_BUDGET: &str = "EngineConfig::device_budget";

/// Where the training state lives between uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// On the device. On the CPU, device memory is host memory.
    None,
    /// In host memory; weights travel to the device as they are used.
    Host,
    /// On disk; only windows of it are in memory.
    #[default]
    Disk,
}

/// In which order the micro-batches of a step go through the blocks. It changes no number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accumulation {
    /// All of them through one block before the next: weights travel twice a step.
    #[default]
    Vertical,
    /// One after the other, each forward and backward through all blocks: activations of one at a time are in memory, and weights
    /// travel twice for each.
    Horizontal,
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Host => "host",
            Self::Disk => "disk",
        })
    }
}

/// When state on disk becomes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// With every step: a process that is killed loses no more than the one or two that were under way.
    #[default]
    Step,
    /// With every [`save`](crate::Engine::save): what is killed, or fails, goes back to the last one. Steps need no commit, and state
    /// of which there is a copy in memory ([`EngineConfig::cache_bytes`]) is only written then.
    Checkpoint,
    /// As with [`Checkpoint`](Self::Checkpoint), but the state is kept once, which takes half the space, and steps overwrite it in
    /// place. A save makes it whole; what is killed, or fails, after the next write to it is lost, and refused on resuming. State
    /// in memory is saved so, too: a save that is cut off has overwritten the one before.
    None,
}

/// How the state is updated; `None` in [`EngineConfig`] means frozen weights (evaluation, generation).
#[derive(Debug, Clone)]
pub struct TrainingConfig {
    /// Format of master weights and moments.
    pub state: StateFormat,
    /// The optimization algorithm and its hyperparameters.
    pub optimizer: Algorithm,
    /// Largest global norm of the gradient, above 0; larger ones are scaled down to it. `None` clips nothing.
    pub clip: Option<f64>,
    /// The loss scale of fp16: a step whose gradient overflows is skipped, and the scale moves. `None` is for types with a
    /// range that needs none; an overflow is then an error.
    pub loss_scale: Option<LossScaleConfig>,
    /// Parameters that get another learning rate or weight decay than the rest, by name: the first rule whose pattern matches
    /// decides. A frozen parameter keeps its place in the state, and its gradient does not count in the norm. Every pattern
    /// must match some parameter.
    pub groups: Vec<GroupRule>,
    /// The rate that the run's schedule is made of, which rules with a [rate of their own](terrace_optimizer::GroupLr::Own) are
    /// measured against; nothing else looks at it.
    pub base_lr: f64,
    /// The part of the parameters, from 0 to 1, whose state the host holds and updates where the device has memory of its own; the
    /// last groups, whose parameters come nearest to the rest, have their state on the device. `None` leaves it to the plan. It says
    /// something only where the device is not the host, with [`Placement::Host`], and with [`Placement::Disk`] where saves alone make
    /// steps [durable](Durability): nothing else writes what is on the device to disk.
    pub host_part: Option<f64>,
}

/// The largest batch that the plan has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// Sequences per micro-batch, B.
    pub sequences: usize,
    /// Positions per sequence, S.
    pub length: usize,
    /// Micro-batches per optimizer step, M.
    pub micro_batches: usize,
    /// Positions that the key/value cache holds per sequence (generation), C; 0 where nothing is generated.
    pub cache_length: usize,
    /// Pages of [`CACHE_PAGE`] positions that the caches of all sequences share; 0: as many as `sequences` of `cache_length` need.
    pub cache_pages: usize,
}

/// Positions in all micro-batches of a step, at most.
const STEP_TOKENS_MAX: usize = 1 << 44;

/// Positions of a page of the key/value cache.
pub const CACHE_PAGE: usize = KeyValues::PAGE_MIN;

impl BatchLimits {
    /// Pages of the longest sequence, M.
    pub(crate) fn pages_per_sequence(&self) -> usize {
        self.cache_length.div_ceil(CACHE_PAGE)
    }

    /// Refuses what no memory holds, before its bytes wrap and seem to fit. Rows and pages are counted in 32 bits.
    fn check_sizes(&self) -> Result {
        let Self { sequences, length, micro_batches, cache_length, cache_pages } = *self;
        let tokens = sequences.checked_mul(length).filter(|tokens| i32::try_from(*tokens).is_ok());
        if tokens.and_then(|tokens| tokens.checked_mul(micro_batches)).is_none_or(|all| all > STEP_TOKENS_MAX)
        {
            return Err(EngineError::Config(format!(
                "BatchLimits of {micro_batches} micro-batches of {sequences} × {length} positions are too large: a micro-batch has below \
                 2^31 positions, a step up to {STEP_TOKENS_MAX}"
            )));
        }
        let is_counted = |product: Option<usize>| product.is_some_and(|all| i32::try_from(all).is_ok());
        let pages = self.pages_per_sequence();
        if is_counted(pages.checked_mul(CACHE_PAGE))
            && is_counted(sequences.checked_mul(pages))
            && is_counted(Some(cache_pages))
        {
            return Ok(());
        }
        Err(EngineError::Config(format!(
            "BatchLimits::cache_length of {cache_length} for {sequences} sequences, in {cache_pages} pages, is too large: sequences have below \
             2^31 positions, caches below 2^31 pages"
        )))
    }

    /// Pages in all, N.
    pub(crate) fn pages(&self) -> usize {
        if self.cache_pages > 0 { self.cache_pages } else { self.sequences * self.pages_per_sequence() }
    }
}

/// Windows that the planner otherwise chooses; for tests and experiments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WindowOverrides {
    /// Weight slots per size class.
    pub weight_slots: Option<usize>,
    /// Elements per chunk of state: a multiple of [`NORM_BLOCK`](terrace_optimizer::NORM_BLOCK) in training, which is one of
    /// every state format's blocks too; else of 64.
    pub chunk_elements: Option<usize>,
    /// Chunks of optimizer state in memory.
    pub update_slots: Option<usize>,
    /// Groups whose gradients have room in host memory at once where the update follows backward: one at least, two so that one
    /// can be updated while the next is in backward, more so that the update of the rest can go on in the next forward.
    /// Elsewhere all have.
    pub gradient_groups: Option<usize>,
    /// Park gradients on disk.
    pub gradients_on_disk: Option<bool>,
    /// Spill activations to disk.
    pub activations_on_disk: Option<bool>,
    /// Leave signals on a device with its own memory from one block to the next.
    pub signals_stay: Option<bool>,
    /// Groups whose weights are on their way to a device with its own memory, or wait there, beside those in use. Where it is not fixed, two;
    /// where the device has no room for that, one, or none, so that compute waits for every group.
    pub uploads_ahead: Option<usize>,
    /// Bring a group's gradient down whole from a device with its own memory, while the next block computes. Where it is not fixed, where the
    /// device has room for the gradients of two groups; never where gradients are parked on disk, or the update follows backward.
    pub gradients_whole: Option<bool>,
    /// How many blocks, counted from the last, leave what their backward would otherwise recompute; as many as there are if
    /// there are fewer. Where it is not fixed, as many do as fit beside the other windows.
    pub kept_blocks: Option<usize>,
    /// How many blocks before those leave it in the host's memory in between, where the device has its own; as many as there are if there are
    /// fewer. Where it is not fixed, up to [`EngineConfig::keep_on_host`].
    pub kept_on_host: Option<usize>,
    /// How many blocks before those leave it on disk in between, where state is there; as many as there are if there are fewer. Where it is
    /// not fixed, [`EngineConfig::keep_on_disk`].
    pub kept_on_disk: Option<usize>,
    /// Buffers for that on its way to disk and back. Where it is not fixed, as many as what a block leaves for a micro-batch takes, or a half or a
    /// quarter of them; on a device with its own memory twice as many, or as many, which is the least.
    pub kept_slots: Option<usize>,
    /// How many groups' weights on disk have copies in memory, of all groups the smallest ones, the earlier first of equals.
    /// Where it is not fixed, as many as [`EngineConfig::cache_bytes`] and the budget have room for.
    pub copied_weights: Option<usize>,
    /// How many of those groups have copies of all their state.
    pub copied_groups: Option<usize>,
    /// How many groups, counted from the last, leave their weights on a device with its own memory until the next update; as many as
    /// there are if there are fewer. Where it is not fixed, as many as [`EngineConfig::device_budget`] has room for beside all else.
    pub device_groups: Option<usize>,
    /// How many groups, counted from the last, have all their state on a device with its own memory, which updates it; as many as
    /// there are if there are fewer. Where it is not fixed, all with [`Placement::None`], and with [`Placement::Host`] as many as
    /// the host has no room for, or as the device has room for beside all weights. With [`Placement::Disk`] the latter where saves
    /// alone make steps [durable](Durability), and otherwise none.
    pub state_groups: Option<usize>,
    /// How many blocks' keys and values stay on the device where [`EngineConfig::kv_tier`] is lower: of those that have any, the
    /// first. Where it is not fixed, as many as fit beside all else, on the CPU within [`EngineConfig::cache_bytes`].
    pub kv_on_device: Option<usize>,
    /// How many blocks' keys and values after those are in host memory where they may be on disk and the device has memory of its
    /// own. Where it is not fixed, as many as fit beside all else within [`EngineConfig::cache_bytes`].
    pub kv_on_host: Option<usize>,
    /// Bytes of host memory in which a block's weights may stay packed for the products of one micro-batch after the other, where kernels
    /// compute there. Where it is not fixed, what a block can use, up to a part of what is left beside all else.
    pub packed_bytes: Option<usize>,
    /// Update state on disk during other work: each group as backward completes its gradient or, where the update waits for
    /// the gradient's norm, just ahead of the next forward, or beside backward as long as the norm changes nothing. Otherwise compute
    /// waits for the update.
    pub overlap: Option<bool>,
    /// Sync state on disk along the way where every step is committed, or not. Where it is not fixed, as it
    /// [pays](terrace_tiers::SyncAhead::Auto).
    pub sync_ahead: Option<bool>,
}

impl WindowOverrides {
    pub(crate) fn overlap(&self) -> bool {
        self.overlap.unwrap_or(true)
    }

    pub(crate) fn sync_ahead(&self) -> SyncAhead {
        self.sync_ahead
            .map_or(SyncAhead::Auto, |always| if always { SyncAhead::Always } else { SyncAhead::Never })
    }
}

/// Everything that fixes an engine, beside its blocks and backends.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Element type of weights and activations: bf16, f16 or f32.
    pub dtype: DType,
    /// How to train; `None` for frozen weights.
    pub training: Option<TrainingConfig>,
    /// Where the state lives.
    pub placement: Placement,
    /// Directories for state on disk, striped in this order.
    pub disks: Vec<PathBuf>,
    /// How much of the state each of `disks` takes in proportion to the others, for example its bytes per second; `None` for
    /// equal parts. State that exists already keeps the parts it was made with.
    pub disk_weights: Option<Vec<f64>>,
    /// Most bytes of host memory that plan entries may take.
    pub host_budget: u64,
    /// Most bytes of host memory for copies of state on disk: what is left of the budget, up to this, holds weights and then
    /// all state of as many groups as fit, which are then written as ever but read no more. What that leaves of it holds keys and
    /// values that would otherwise be on disk. 0 for none.
    pub cache_bytes: u64,
    /// When training state on disk becomes durable.
    pub durability: Durability,
    /// Most bytes of device memory; unused on a unified device.
    pub device_budget: u64,
    /// Threads for the optimizer (kernels bring their own).
    pub threads: usize,
    /// Keep each of them [on a core of its own](terrace_device::affinity::stay_on_core).
    pub pinned: bool,
    /// The largest batch.
    pub limits: BatchLimits,
    /// The order of its micro-batches.
    pub accumulation: Accumulation,
    /// Where the key/value cache is between the uses of a pass (generation). It changes no number. On the CPU, device memory is host
    /// memory.
    pub kv_tier: Tier,
    /// Most blocks that keep intermediates for backward where no override fixes their number; what memory that leaves holds copies of
    /// state on disk, or weights and state on a device with its own. `None` for as many as fit.
    pub keep_at_most: Option<usize>,
    /// Most blocks that keep intermediates for backward in the host's memory, of those for which a device with its own has no room, where no
    /// override fixes their number: it takes the link's time instead of repeated operations. As many as fit, and none with
    /// [`Placement::None`].
    pub keep_on_host: usize,
    /// Most blocks that keep intermediates for backward on disk, of those for which memory has no room, where no override fixes their number:
    /// it takes the disk's time and space instead of repeated operations. Only with [`Placement::Disk`].
    pub keep_on_disk: usize,
    /// Windows fixed by hand.
    pub overrides: WindowOverrides,
    /// Hears of what is done when, if there is one.
    pub timeline: Option<Arc<Timeline>>,
    /// Words that are stored with the state and must be equal on resuming, for example a description of the model and data.
    pub identity: String,
}

impl Default for TrainingConfig {
    /// AdamW with torch's hyperparameters, twelve bytes of state per bf16 parameter, gradients clipped to a norm of 1.
    fn default() -> Self {
        Self {
            state: StateFormat::default(),
            optimizer: AdamW::default().into(),
            clip: Some(1.0),
            loss_scale: None,
            groups: Vec::new(),
            base_lr: 0.0,
            host_part: None,
        }
    }
}

impl TrainingConfig {
    /// Whether an update needs the norm of the whole gradient: to clip it, or to know that nothing overflowed.
    pub(crate) fn waits_for_norm(&self) -> bool {
        self.clip.is_some() || self.loss_scale.is_some()
    }
}

impl EngineConfig {
    /// Frozen weights that stay in memory, budgets without bound, a thread per core. The rest is set field by field:
    ///
    /// ```
    /// use terrace_kernels::DType;
    /// use terrace_zero::{BatchLimits, EngineConfig, TrainingConfig};
    ///
    /// let limits = BatchLimits { sequences: 2, length: 128, micro_batches: 4, cache_length: 0, cache_pages: 0 };
    /// let config = EngineConfig {
    ///     training: Some(TrainingConfig::default()),
    ///     host_budget: 4 << 30,
    ///     ..EngineConfig::new(DType::BF16, limits)
    /// };
    /// assert!(config.disks.is_empty());
    /// ```
    pub fn new(dtype: DType, limits: BatchLimits) -> Self {
        Self {
            dtype,
            training: None,
            placement: Placement::None,
            disks: Vec::new(),
            disk_weights: None,
            host_budget: u64::MAX,
            cache_bytes: 0,
            durability: Durability::Step,
            device_budget: u64::MAX,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            pinned: false,
            limits,
            accumulation: Accumulation::default(),
            kv_tier: Tier::Device,
            keep_at_most: None,
            keep_on_host: 0,
            keep_on_disk: 0,
            overrides: WindowOverrides::default(),
            timeline: None,
            identity: String::new(),
        }
    }

    /// Where the key/value cache really is.
    pub(crate) fn kv_place(&self, unified: bool) -> Tier {
        if unified && self.kv_tier == Tier::Host { Tier::Device } else { self.kv_tier }
    }

    /// Whether state on disk waits for a save.
    pub(crate) fn commits_at_saves(&self) -> bool {
        self.durability != Durability::Step && self.placement == Placement::Disk && self.training.is_some()
    }

    /// Whether training state is kept once on disk, and overwritten where it is.
    pub(crate) fn keeps_once(&self) -> bool {
        self.durability == Durability::None && self.training.is_some()
    }

    /// Whether groups on disk are updated during backward, each as its gradient is complete, since nothing depends on the norm.
    pub(crate) fn update_follows(&self) -> bool {
        self.placement == Placement::Disk && self.training.as_ref().is_some_and(|t| !t.waits_for_norm())
    }

    /// Refuses what no step can work with.
    pub(crate) fn check(&self) -> Result {
        let BatchLimits { sequences, length, micro_batches, .. } = self.limits;
        for (name, number) in [("sequences", sequences), ("length", length), ("micro_batches", micro_batches)]
        {
            if number == 0 {
                return Err(EngineError::Config(format!("BatchLimits::{name} is 0 and must be at least 1")));
            }
        }
        self.limits.check_sizes()?;
        let clip = self.training.as_ref().and_then(|training| training.clip);
        if let Some(clip) = clip.filter(|clip| !(clip.is_finite() && *clip > 0.0)) {
            return Err(EngineError::Config(format!(
                "TrainingConfig::clip is {clip}; it must be a norm above 0, or None to clip nothing"
            )));
        }
        self.check_overrides()
    }

    /// Refuses windows with which no step can work. The gradient's norm is summed in blocks that no chunk may cut.
    fn check_overrides(&self) -> Result {
        let WindowOverrides { weight_slots, chunk_elements, update_slots, gradient_groups, .. } =
            self.overrides;
        let unit = if self.training.is_some() { NORM_BLOCK } else { PARAM_ALIGN };
        if let Some(elements) = chunk_elements
            && (elements == 0 || !elements.is_multiple_of(unit))
        {
            let nearest = elements.checked_next_multiple_of(unit).unwrap_or(unit).max(unit);
            return Err(EngineError::Config(format!(
                "chunks of {elements} elements cannot be used: WindowOverrides::chunk_elements must be a multiple of {unit}, for \
                 example {nearest}"
            )));
        }
        for (name, slots) in [
            ("weight_slots", weight_slots),
            ("update_slots", update_slots),
            ("gradient_groups", gradient_groups),
        ] {
            // More than any model has groups or chunks of; their bytes are not to wrap.
            if slots.is_some_and(|slots| slots == 0 || slots > u32::MAX as usize) {
                return Err(EngineError::Config(format!(
                    "WindowOverrides::{name} is {} and must be at least 1 and below 2^32",
                    slots.unwrap_or_default()
                )));
            }
        }
        Ok(())
    }

    /// The directories and their parts of what is newly made there.
    pub(crate) fn striping(&self) -> Result<Striping> {
        let equal = || vec![1.0; self.disks.len()];
        let weights = self.disk_weights.clone().unwrap_or_else(equal);
        Ok(Striping::weighted(&self.disks, &weights)?)
    }
}
