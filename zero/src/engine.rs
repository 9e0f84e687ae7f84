//! The engine as the embedder holds it: built from a plan, then driven step by step.

use crate::activations::Activations;
use crate::batch::InputShapes;
use crate::cache::StateCache;
use crate::copies::Copies;
use crate::device_state::{DeviceGradients, DeviceState};
use crate::device_weights::DeviceWeights;
use crate::fetch::{Ahead, SlotClasses};
use crate::gradients::GradientPark;
use crate::kept::KeptAway;
use crate::kv::{KvLayout, KvPlan};
use crate::lane::Lane;
use crate::network::Network;
use crate::overlap::Pending;
use crate::plan::{EnginePlan, GroupPlacement, Placer, Planner, PlanningRuns};
use crate::rounds::Rounds;
use crate::runs::Runs;
use crate::saving::Saves;
use crate::scale::{self, LossScale};
use crate::state::{Resident, StateHome, StateKinds, Stored, needs_disk};
use crate::turns::Turns;
use crate::update::UpdateSlots;
use crate::work::{StepWork, step_work};
use crate::{
    Backend, BatchLimits, BatchUse, Block, EngineConfig, EngineError, MicroBatch, Placement, Result,
    WeightSource, WindowOverrides, checkpoint,
};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_kernels::{DType, Packing};
use terrace_optimizer::{DeviceOptimizer, Optimizer};
use terrace_tiers::{DiskStore, MemoryPlan, Pool, Recovery, Striping, SyncAhead, Tier};

/// A network under training, evaluation or generation.
///
/// An error leaves the last committed state intact on disk; the engine that returned it is not used further. Where state is kept
/// once ([`Durability::None`](crate::Durability::None)) it can be lost with the step that failed, which the error says
/// ([`EngineError::Lost`]).
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) backend: Backend,
    pub(crate) network: Network,
    pub(crate) kinds: StateKinds,
    pub(crate) runs: Runs,
    pub(crate) optimizer: Option<Arc<dyn Optimizer>>,
    /// The betas of `optimizer`, unless they are the configured ones.
    pub(crate) betas: Option<(f64, f64)>,
    pub(crate) plan: EnginePlan,
    pub(crate) lane: Lane,
    pub(crate) home: StateHome,
    pub(crate) weight_slots: Option<SlotClasses>,
    /// Frozen weights that are being read for the next pass.
    pub(crate) ahead: Ahead,
    pub(crate) device_weights: DeviceWeights,
    /// State that is on the device, and what updates it there.
    pub(crate) device_state: Option<DeviceState>,
    pub(crate) device_optimizer: Option<DeviceOptimizer>,
    pub(crate) park: Option<GradientPark>,
    pub(crate) rounds: Rounds,
    /// Gradients in f32 between the rounds of a step, if there are several.
    pub(crate) sums: Option<GradientPark>,
    pub(crate) signals: Signals,
    /// What blocks keep elsewhere than in the arena, if any do.
    pub(crate) kept_away: Option<KeptAway>,
    /// Where a block's weights stay packed, if the plan has room for that.
    pub(crate) packing: Option<Packing>,
    /// Held by the key/value cache while there is one.
    pub(crate) cache_alive: Arc<()>,
    pub(crate) update_slots: Arc<UpdateSlots>,
    pub(crate) pool: rayon::ThreadPool,
    pub(crate) step: u64,
    /// The loss scale of the next step.
    pub(crate) loss_scale: Option<LossScale>,
    /// The update of the last step, if it was left for the next one.
    pub(crate) pending: Option<Pending>,
    /// Steps, up to the last, whose updates their norms did not change.
    pub(crate) unclipped: u64,
    /// Of the batches that it was planned for.
    pub(crate) inputs: InputShapes,
    /// What a save commits, if state on disk waits for one.
    pub(crate) unsaved: Option<Unsaved>,
    /// Of resident state.
    pub(crate) saves: Saves,
    /// What the trainer noted of the last step, for saves of resident state.
    pub(crate) note: Vec<u8>,
}

/// Steps that no save has committed yet.
#[derive(Debug)]
pub(crate) struct Unsaved {
    /// They changed the state, and not only a loss scale.
    pub(crate) changed: bool,
    /// What is committed with them.
    pub(crate) words: Vec<u8>,
}

/// Memory for signals between blocks.
#[derive(Debug)]
pub(crate) enum Signals {
    Training(Box<Activations>),
    ForwardOnly(Pool),
}

/// What a directory of training state says about itself.
#[derive(Debug, Clone)]
pub struct StoredState {
    /// Optimizer steps done.
    pub step: u64,
    /// The words it was created with.
    pub identity: String,
    /// What was damaged, and what is used in its place.
    pub recoveries: Vec<Recovery>,
}

/// What is known of an engine that was never built.
#[derive(Debug, Clone)]
pub struct Outlook {
    /// The bytes of every tier.
    pub memory: MemoryPlan,
    /// What of every group is where.
    pub placement: Vec<GroupPlacement>,
    /// What a step does.
    pub work: StepWork,
    /// One line that says which windows the planner chose.
    pub summary: String,
    /// The windows: given as overrides, they leave the planner no choice but this plan.
    pub windows: WindowOverrides,
    /// Blocks that could keep intermediates for backward.
    pub keepers: usize,
    /// Bytes of host memory that hold copies of state on disk.
    pub copied_bytes: u64,
    /// Number of parameters, shared ones counted once.
    pub parameters: u64,
    /// Bytes of the keys and values of one position in all blocks.
    pub kv_bytes: u64,
    /// Those of them that are in host memory or on disk between passes, and cross a link if the device has memory of its own.
    pub kv_away_bytes: u64,
    /// Those of them that are on disk between passes.
    pub kv_disk_bytes: u64,
}

impl Engine {
    /// Plans, allocates and loads initial weights from `source`. With state on disk, this commits step 0.
    ///
    /// `sample` has the shape of the largest micro-batch, which is that of the limits.
    ///
    /// # Errors
    /// The plan does not fit, the source lacks a tensor, or a tier failed. Nothing is written before the plan fits.
    pub fn create(
        config: EngineConfig,
        backend: Backend,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
        source: &mut dyn WeightSource,
    ) -> Result<Self> {
        let parts = Parts::new(config, &backend, blocks, sample, None, &PlanningRuns::default())?;
        let home = match parts.config.placement {
            Placement::Disk => {
                let striping = parts.config.striping()?;
                let store = DiskStore::create(&backend.io, &striping, parts.plan.spec.clone());
                let store = store.map_err(|error| match parts.config.training {
                    Some(_) => error,
                    None => {
                        let smaller = "add another directory to EngineConfig::disks, choose a smaller QuantFormat, or keep them in memory (Placement::Host)";
                        error.too_small_for("a copy of the weights", smaller)
                    }
                })?;
                parts.on_disk(store, &backend)?
            }
            Placement::None | Placement::Host => parts.resident(&backend)?,
        };
        let mut engine = Self::assemble(parts, backend, home)?;
        checkpoint::initialize(&mut engine, source)?;
        Ok(engine)
    }

    /// Plans, allocates and continues from the committed state in the configured directories, all of which is read and verified before
    /// a step overwrites any of the one before.
    ///
    /// # Errors
    /// There is no state, it belongs to another model or configuration, it was kept once and being overwritten, the plan does not
    /// fit, or a tier failed.
    pub fn resume(
        mut config: EngineConfig,
        backend: Backend,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
    ) -> Result<Self> {
        if config.disks.is_empty() {
            return Err(EngineError::Config(
                "resuming needs the directory of the state: set EngineConfig::disks".into(),
            ));
        }
        let store = DiskStore::open(&backend.io, &config.disks)?;
        // The cut into chunks is a property of the files.
        config.overrides.chunk_elements = Some(store.spec().chunk_elements as usize);
        let wanted = config.striping()?;
        if wanted != *store.striping() {
            let (stored, wanted) = (store.striping().shares(), wanted.shares());
            tracing::debug!(
                ?stored,
                ?wanted,
                "the state keeps the parts per directory that it was made with"
            );
        }
        let mut parts =
            Parts::new(config, &backend, blocks, sample, Some(store.striping()), &PlanningRuns::default())?;
        checkpoint::compare(&parts.plan.spec, store.spec())?;
        let step = store.committed().step;
        parts.loss_scale = LossScale::committed(&parts.config, step, &store.committed().trainer)?;
        if parts.config.placement == Placement::Disk {
            let home = parts.on_disk(store, &backend)?;
            let mut engine = Self::assemble(parts, backend, home)?;
            engine.step = step;
            engine.refresh()?;
            engine.verify_committed()?;
            return Ok(engine);
        }
        let home = parts.resident(&backend)?;
        let mut engine = Self::assemble(parts, backend, home)?;
        engine.step = step;
        checkpoint::load_resident(&engine, &store)?;
        engine.note = scale::note(&store.committed().trainer).to_vec();
        engine.saves.store = Some(Arc::new(store));
        Ok(engine)
    }

    /// What state the directories hold. What it says is durable.
    ///
    /// # Errors
    /// There is none, it is in use, it is damaged, it was being overwritten, or it cannot be written.
    pub fn stored(io: &Arc<dyn IoEngine>, disks: &[PathBuf]) -> Result<StoredState> {
        let store = DiskStore::open(io, disks)?;
        let (step, identity) = (store.committed().step, store.spec().identity.clone());
        Ok(StoredState { step, identity, recoveries: store.recoveries().to_vec() })
    }

    /// How many stripes of a cycle of its state each directory takes, which is settled when state is made; empty without state on disk.
    pub fn disk_shares(&self) -> Vec<f64> {
        let shares = self.home.disk().map_or(&[][..], |store| store.striping().shares());
        shares.iter().map(|share| *share as f64).collect()
    }

    /// What was damaged in the state that the engine was resumed from, and what is used in its place.
    pub fn recoveries(&self) -> &[Recovery] {
        let store = self.home.disk().or(self.saves.store.as_deref());
        store.map_or(&[], DiskStore::recoveries)
    }

    /// Plans without allocating: the bytes of every tier, or a refusal with the smallest change that would work.
    ///
    /// # Errors
    /// The plan does not fit.
    pub fn plan_only(
        config: EngineConfig,
        backend: &Backend,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
    ) -> Result<MemoryPlan> {
        Ok(Self::outlook(config, backend, blocks, sample, &PlanningRuns::default())?.memory)
    }

    /// As [`plan_only`](Self::plan_only), with what a step would have to do. `planning` remembers what was found for plans of the
    /// same network, dtype and kind of device.
    ///
    /// # Errors
    /// The plan does not fit.
    pub fn outlook(
        config: EngineConfig,
        backend: &Backend,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
        planning: &PlanningRuns,
    ) -> Result<Outlook> {
        let Parts { config, network, kinds, plan, .. } =
            Parts::new(config, backend, blocks, sample, None, planning)?;
        let unified = backend.device.unified();
        let work = step_work(&config, &network, &kinds, &plan, Some(sample), unified);
        let placement = Placer::new(&config, &network, &kinds, &plan, unified).all();
        let (summary, parameters) = (plan.summary(), network.parameters());
        let (windows, keepers) = (plan.overrides(&config), plan.windows.keeping.of);
        let copies = |kind| plan.windows.caching.bytes_of(&network, kind, &kinds);
        let copied_bytes = (0..kinds.blobs.len()).map(copies).sum();
        let layouts = KvLayout::all(&network, config.dtype, config.limits);
        let kv_bytes = layouts.iter().flatten().map(|layout| layout.bytes_of(1) as u64).sum();
        let kv = KvPlan::new(&config, &network, unified, plan.windows.kv_room);
        let on = |tier| kv.as_ref().map_or(0, |kv| kv.position_bytes(tier));
        let kv_disk_bytes = on(Tier::Disk);
        Ok(Outlook {
            memory: plan.memory,
            placement,
            work,
            summary,
            windows,
            keepers,
            copied_bytes,
            parameters,
            kv_bytes,
            kv_away_bytes: on(Tier::Host) + kv_disk_bytes,
            kv_disk_bytes,
        })
    }

    fn assemble(parts: Parts, backend: Backend, home: StateHome) -> Result<Self> {
        let Parts { config, network, kinds, runs, optimizer, device_optimizer, plan, loss_scale, inputs } =
            parts;
        let windows = &plan.windows;
        let copies = match &config.timeline {
            Some(timeline) if !backend.device.unified() => {
                let names = network.groups.iter().map(|group| group.name.clone()).collect();
                Some(Copies::look(timeline, names)?)
            }
            _ => None,
        };
        let lane = Lane::new(&backend, windows.arena_bytes, windows.signals_stay, copies)?;
        let packing = Some(windows.packed_bytes).filter(|&bytes| bytes > 0).map(Packing::new).transpose()?;
        let on_disk = home.disk().is_some();
        let slot_io = on_disk.then_some(&backend.io);
        let slot_classes = || SlotClasses::new(&windows.classes, network.groups.len(), &backend);
        let weight_slots = on_disk.then(slot_classes).transpose()?;
        let device_weights = DeviceWeights::new(&backend, &network, windows.device_room)?;
        let device_state = DeviceState::new(&backend, &network, &kinds, windows.device_room)?;
        let spills = windows.gradients_on_disk || windows.activations_on_disk;
        let striping = if spills { Some(config.striping()?) } else { None };
        let disks =
            |wanted: bool| striping.as_ref().filter(|_| wanted).map(|striping| (&backend.io, striping));
        let new_park = |name, dtype, chunks| {
            let (device, disks) = (&*backend.device, disks(windows.gradients_on_disk));
            GradientPark::new(name, dtype, &plan.spec, chunks, device, disks, windows.gradients_whole)
        };
        let trains = config.training.is_some();
        let rounds = Rounds::new(config.accumulation, config.limits, &network);
        let park = trains.then(|| new_park("gradients", config.dtype, windows.gradient_chunks));
        let mut park = park.transpose()?;
        if let Some(park) = &mut park {
            park.turns = Turns::new(&*backend.device, &windows.turn_bytes)?;
            park.on_device = DeviceGradients::new(&backend, &network, config.dtype, windows.device_room)?;
        }
        let sums = trains && rounds.are_several();
        let sums = sums.then(|| new_park("gradient-sums", DType::F32, windows.sum_chunks)).transpose()?;
        let signals = if trains {
            Signals::Training(Box::new(Activations::new(
                network.last(),
                rounds,
                windows.signal_bytes,
                &*backend.device,
                disks(windows.activations_on_disk),
            )?))
        } else {
            Signals::ForwardOnly(Pool::new("signals", 2, windows.signal_bytes)?.pinned_for(&*backend.device))
        };
        let kept_away = plan.kept_away(&config, &backend, rounds)?;
        let slots = if trains && on_disk { windows.update_slots } else { 2 };
        let update_slots = UpdateSlots::new(&kinds, slots, windows.slot_elements, slot_io)?;
        let pool = update_pool(&config)?;
        home.populate(&pool);
        Ok(Self {
            config,
            backend,
            network,
            kinds,
            runs,
            optimizer,
            betas: None,
            plan,
            lane,
            home,
            weight_slots,
            ahead: Ahead::default(),
            device_weights,
            device_state,
            device_optimizer,
            park,
            rounds,
            sums,
            signals,
            kept_away,
            packing,
            cache_alive: Arc::default(),
            update_slots: Arc::new(update_slots),
            pool,
            step: 0,
            loss_scale,
            pending: None,
            unclipped: 0,
            inputs,
            unsaved: None,
            saves: Saves::default(),
            note: Vec::new(),
        })
    }

    /// Steps done, those among them that a loss scale skipped included.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The step that a process which ended now would go back to; `None` if nothing is on disk, or what is there is being
    /// overwritten. It may be one less than [`step`](Self::step), whose update goes on in the next, or that of the last save.
    pub fn durable_step(&self) -> Option<u64> {
        let store = self.home.disk().or(self.saves.store.as_deref());
        let store = store.filter(|store| store.is_committed() && !store.is_changing());
        store.map(|store| store.committed().step)
    }

    /// Updates of the weights done: what a schedule counts. Fewer than [`step`](Self::step) where a loss scale skipped some.
    pub fn updates(&self) -> u64 {
        self.step - self.loss_scale.map_or(0, |scale| scale.skipped.min(self.step))
    }

    /// The note that was committed last; empty if there was none.
    pub fn noted(&self) -> Vec<u8> {
        let store = self.home.disk().or(self.saves.store.as_deref());
        store.map_or_else(Vec::new, |store| scale::note(&store.committed().trainer).to_vec())
    }

    /// The bytes of every tier.
    pub fn memory_plan(&self) -> &MemoryPlan {
        &self.plan.memory
    }

    /// One line that says which windows the planner chose.
    pub fn plan_summary(&self) -> String {
        self.plan.summary()
    }

    /// The windows of the plan: given as overrides, they leave the planner no choice but this one.
    pub fn windows(&self) -> WindowOverrides {
        self.plan.overrides(&self.config)
    }

    /// Number of blocks that keep intermediates from forward to backward where they compute, and of those that could; the rest has them
    /// [elsewhere](Self::kept_elsewhere) or recomputes them.
    pub fn kept_blocks(&self) -> (usize, usize) {
        let keeping = self.plan.windows.keeping;
        (keeping.counts.here, keeping.of)
    }

    /// Numbers of blocks that keep intermediates from forward to backward in the host's memory, where the device has its own, and on disk.
    pub fn kept_elsewhere(&self) -> (usize, usize) {
        let counts = self.plan.windows.keeping.counts;
        (counts.on_host, counts.on_disk)
    }

    /// Number of parameters, shared ones counted once.
    pub fn parameters(&self) -> u64 {
        self.network.parameters()
    }

    /// Floating-point operations of one step of the largest batch.
    pub fn flops_per_step(&self) -> u64 {
        self.plan.windows.flops_per_step
    }

    /// The configuration it was built with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Deletes the engine's files; for frozen weights that were only streamed from disk.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove_state(mut self) -> Result {
        self.pending = None;
        self.ahead = Ahead::default();
        match std::mem::replace(&mut self.home, StateHome::Resident(Resident::default())) {
            StateHome::Disk(stored) => {
                Arc::into_inner(stored.store).map_or(Ok(()), |store| Ok(store.remove()?))
            }
            StateHome::Resident(_) => Ok(()),
        }
    }
}

/// Threads for updates.
fn update_pool(config: &EngineConfig) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(config.threads)
        .thread_name(|i| format!("terrace-update-{i}"))
        .start_handler(terrace_device::affinity::on_start(config.pinned))
        .build()
        .map_err(|e| EngineError::Config(format!("cannot start {} threads: {e}", config.threads)))
}

/// Everything that is known before the first allocation.
struct Parts {
    config: EngineConfig,
    network: Network,
    kinds: StateKinds,
    runs: Runs,
    optimizer: Option<Arc<dyn Optimizer>>,
    device_optimizer: Option<DeviceOptimizer>,
    plan: EnginePlan,
    loss_scale: Option<LossScale>,
    inputs: InputShapes,
}

impl Parts {
    fn new(
        config: EngineConfig,
        backend: &Backend,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
        stored: Option<&Striping>,
        planning: &PlanningRuns,
    ) -> Result<Self> {
        needs_disk(&config)?;
        config.check()?;
        let network = Network::new(blocks, config.dtype)?;
        if config.training.is_some() {
            Rounds::new(config.accumulation, config.limits, &network).check(&network)?;
        }
        require_sample(sample, &config, &network)?;
        let (mut kinds, optimizer) = StateKinds::new(&config, &network)?;
        let optimizer: Option<Arc<dyn Optimizer>> = optimizer.map(Arc::from);
        let device_optimizer = device_optimizer(&config, backend, optimizer.as_deref());
        let runs = match &config.training {
            Some(training) => Runs::new(&network, training)?,
            None => Runs::default(),
        };
        if runs.any_frozen() {
            // What an update leaves alone is written to the next generation as it was read.
            kinds.read_by_update.fill(true);
        }
        let planner = Planner {
            config: &config,
            backend,
            network: &network,
            kinds: &kinds,
            sample,
            stored,
            runs: planning,
            device_updates: device_optimizer.is_some(),
        };
        let plan = planner.plan()?;
        let scaling = config.training.as_ref().and_then(|t| t.loss_scale);
        let loss_scale = scaling.map(LossScale::new).transpose()?;
        let inputs = sample.input_shapes();
        Ok(Self { config, network, kinds, runs, optimizer, device_optimizer, plan, loss_scale, inputs })
    }

    /// Memory for state of the host, which is what the device has not.
    fn resident(&self, backend: &Backend) -> Result<StateHome> {
        let Self { network, kinds, plan, .. } = self;
        StateHome::resident(network, kinds, &*backend.device, plan.windows.device_room)
    }

    /// State in `store`, with memory for the planned copies.
    fn on_disk(&self, store: DiskStore, backend: &Backend) -> Result<StateHome> {
        let caching = &self.plan.windows.caching;
        let cache = StateCache::new(caching, &self.network, &self.kinds, &*backend.device)?;
        let saves = self.config.commits_at_saves();
        // What saves commit may be overwritten often before.
        let sync_ahead = if saves { SyncAhead::Never } else { self.config.overrides.sync_ahead() };
        let store = store.sync_ahead(sync_ahead);
        Ok(StateHome::Disk(Box::new(Stored::new(store, cache, saves))))
    }
}

/// Refuses a sample that the blocks do not take, or of another shape than the batches of the plan.
fn require_sample(sample: &MicroBatch, config: &EngineConfig, network: &Network) -> Result {
    let BatchLimits { sequences, length, .. } = config.limits;
    if (sample.sequences, sample.length) != (sequences, length) {
        return Err(EngineError::Config(format!(
            "the sample batch has {} sequences of {} positions, BatchLimits {sequences} of {length}: make one with their numbers",
            sample.sequences, sample.length
        )));
    }
    sample.check_inputs(&sample.input_shapes())?;
    network.check(sample, BatchUse::Sample)
}

/// What updates state in the memory of a device that has its own, if anything there can.
fn device_optimizer(
    config: &EngineConfig,
    backend: &Backend,
    optimizer: Option<&dyn Optimizer>,
) -> Option<DeviceOptimizer> {
    let (training, kernels) = (config.training.as_ref()?, backend.updates.as_ref()?);
    if backend.device.unified() {
        return None;
    }
    DeviceOptimizer::new(kernels, training.optimizer, *optimizer?.layout()).ok()
}

/// Does what [`flush`](Engine::flush) does, whose errors nobody sees here: call that where they matter.
impl Drop for Engine {
    fn drop(&mut self) {
        // Resident state goes with the engine, and one that panicked may be anywhere in a step.
        let commits = self.pending.as_ref().is_some_and(|pending| pending.words.is_some());
        if self.home.disk().is_some() && commits && !std::thread::panicking() {
            let _ = self.flush();
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("step", &self.step)
            .field("plan", &self.plan.summary())
            .finish_non_exhaustive()
    }
}
