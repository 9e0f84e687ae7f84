//! From budgets to windows: what fits, and the smallest change that would.
//!
//! Peak host memory of a training step on a unified device is the sum of these terms, each allocated once:
//!
//! | term | bytes |
//! |---|---|
//! | copies of state on disk | of each group that fits: its weights, or all kinds |
//! | weights | Σ classes slots × slot (disk), or all groups (resident) |
//! | optimizer state | update slots × chunk × bytes of all kinds (disk), or all of it (resident) |
//! | gradients | parked chunks × chunk × weight bytes (and × 4 bytes between the rounds of horizontal accumulation) |
//! | gradients in turns | Σ over blocks that keep: the larger of gradient and kept activations, where all gradients wait for the norm |
//! | activations | signal slots × signal (+ spill slots) |
//! | kept activations | of a device with its own memory, slots × slot: all pieces of what blocks keep in host memory |
//! | kept activations in flight | slots × slot, where blocks keep some on disk: all pieces of one block's for one micro-batch, or twice that, or less |
//! | device arena | accumulators, inputs, block workspaces and kept activations (but those in turns): the exact peak of a planning run |
//! | packed weights | what one block's take both ways, or less |
//! | kernel scratch, checksum tables, loading and export buffers | fixed |
//!
//! On a device with memory of its own the arena and the device's weight slots are device memory instead. The planner walks
//! a fixed list of choices from roomy to tight and takes the first that fits with every block recomputed in backward. What is
//! then left of the budget goes to blocks that keep their intermediates (`kept.rs`), the last ones first, as many as fit: a kept
//! block saves operations but never costs a window, without which the disk would be waited for. In turns with gradients it may even
//! take less memory than recomputing, and is then kept where nothing else fits. Where the update follows backward,
//! up to half of what remains after that parks gradients of more groups ([`TRAILING_PART`]), whose update the disk then does during
//! the next forward instead of holding backward up. Weights that stay on the device (`device_weights.rs`) get what its memory has
//! left, then the state of groups whose weights all stay (`device_state.rs`), copies of state on disk (`cache.rs`) the rest of the
//! host's. State that the host has no room for goes to the device before anything else does.

mod device;
mod kept;
mod keys;
pub(crate) mod packed;
mod placement;
mod size;
mod turns;

pub(crate) use placement::Placer;
pub use placement::{Content, GroupPlacement, Place, Placed};

use crate::activations::{Activations, SPILL_SLOTS};
use crate::cache::Caching;
use crate::device_weights::DeviceRoom;
use crate::dry::{BlockCost, DryCost, DryRun, Staying};
use crate::fetch::{SlotClass, UPLOAD_WINDOW, plan_classes};
use crate::gradients::STAGING_SLOTS;
use crate::kept::{Keeping, KeptSlots};
use crate::kv::KvRoom;
use crate::network::Network;
use crate::on_demand;
use crate::ranks::Ranks;
use crate::rounds::Rounds;
use crate::state::{StateKinds, store_spec};
use crate::{
    Accumulation, Backend, BatchLimits, DEVICE_BUDGET, EXPORT_BUFFER_BYTES, EngineConfig, EngineError,
    HOST_BUDGET, MicroBatch, Mode, Placement, Result, WindowOverrides,
};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use terrace_tiers::{
    ByteSize, DiskStore, MemoryPlan, PlanRefusal, Scratch, StoreSpec, Striping, Tier, TierError,
};

/// Elements of a chunk of state.
const CHUNK_CHOICES: [usize; 4] = [1 << 20, 1 << 18, 1 << 16, 1 << 14];
/// Of state on disk. What is read of a chunk, some 6 MiB, is in a third-level cache from its verification through its update to its
/// checksums: steps on a machine without a card were 1.07 times as fast as with chunks, and half as many slots, of twice the size.
const DISK_CHUNK_CHOICES: [usize; 4] = [1 << 19, 1 << 18, 1 << 16, 1 << 14];
const WEIGHT_SLOT_CHOICES: [usize; 3] = [4, 2, 1];
const UPDATE_SLOT_CHOICES: [usize; 3] = [12, 6, 2];
/// Gradients of one in this many groups may wait for the next forward, which is that part of what a step computes: backward
/// takes twice as long.
const TRAILING_PART: usize = 3;

/// Most pairs of a block and a micro-batch that leave something in the arena of a planning run, which has to go through each of them.
const LEAVING_MAX: usize = 1 << 15;

/// The windows that a plan settled on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Windows {
    pub(crate) weight_slots: usize,
    pub(crate) chunk_elements: usize,
    /// Elements of the longest chunk there is: no group may fill a chunk.
    pub(crate) slot_elements: usize,
    pub(crate) classes: Vec<SlotClass>,
    pub(crate) update_slots: usize,
    pub(crate) gradient_chunks: usize,
    pub(crate) gradient_groups: usize,
    /// Chunks of gradients in f32 between the rounds of a step.
    pub(crate) sum_chunks: usize,
    pub(crate) gradients_on_disk: bool,
    pub(crate) activations_on_disk: bool,
    pub(crate) signals_stay: bool,
    pub(crate) uploads_ahead: usize,
    pub(crate) gradients_whole: bool,
    pub(crate) signal_bytes: usize,
    pub(crate) arena_bytes: usize,
    /// Of every block: memory that its gradient and what it keeps have in turns; 0 where they do not.
    pub(crate) turn_bytes: Vec<usize>,
    /// What is kept in it.
    pub(crate) kept_in_turns: usize,
    pub(crate) keeping: Keeping,
    /// Leases for what blocks keep elsewhere than in the arena.
    pub(crate) kept_slots: KeptSlots,
    pub(crate) caching: Caching,
    pub(crate) device_room: DeviceRoom,
    pub(crate) kv_room: KvRoom,
    /// Host memory in which a block's weights stay packed.
    pub(crate) packed_bytes: usize,
    pub(crate) flops_per_step: u64,
}

/// A finished plan.
#[derive(Debug, Clone)]
pub(crate) struct EnginePlan {
    pub(crate) memory: MemoryPlan,
    pub(crate) windows: Windows,
    pub(crate) spec: StoreSpec,
    /// Host memory and disks are those of a node of so many, windows and `spec` those of one.
    pub(crate) ranks: Ranks,
    /// What every block does with a micro-batch; empty for frozen weights.
    pub(crate) blocks: Arc<[BlockCost]>,
}

#[derive(Debug, Clone, Copy)]
struct Choice {
    chunk_elements: usize,
    weight_slots: usize,
    update_slots: usize,
    gradients_on_disk: bool,
    activations_on_disk: bool,
    /// On a device with its own memory: signals stay there from one block to the next.
    signals_stay: bool,
    /// On a device with its own memory: weights on their way there or waiting, beside those in use.
    uploads_ahead: usize,
    /// On a device with its own memory: a group's gradient comes down whole.
    gradients_whole: bool,
    /// See [`WindowOverrides::gradient_groups`](crate::WindowOverrides).
    gradient_groups: usize,
    keeping: Keeping,
    /// Leases for what blocks keep on disk, if any do.
    kept_slots: usize,
    /// Groups whose weights stay on a device with its own memory.
    device_groups: usize,
    /// Those of them whose state is there, too.
    state_groups: usize,
    kv_room: KvRoom,
    packed_bytes: usize,
}

/// What a planning run depends on beside the network: elements of a chunk where gradients are copied and whether they come down whole, whether
/// the update follows backward, which signals and which gradients stay, who keeps, the batch with its
/// order, where the key/value cache is, and whether gradients take turns with what is kept.
type CostKey =
    ((usize, bool), bool, Staying, usize, Keeping, BatchLimits, Accumulation, (Tier, KvRoom), bool);

/// What each block's cost depends on beside the network: sequences of a micro-batch, and their length.
type Shape = (usize, usize);

/// What planning runs of one network on one kind of device found. Plans that differ in state, placement or budgets alone share
/// most of it, also where several threads plan at once.
#[derive(Debug, Default)]
pub struct PlanningRuns {
    found: Known<CostKey, DryCost>,
    blocks: Known<Shape, Arc<[BlockCost]>>,
    ranks: Ranks,
    /// What one of several ranks holds of the state.
    shard: OnceLock<Network>,
}

/// What was found so far, by what it depends on.
#[derive(Debug)]
struct Known<K, V>(Mutex<Vec<(K, V)>>);

impl<K, V> Default for Known<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: PartialEq, V: Clone> Known<K, V> {
    /// Finds it, if it is not known. Nobody waits meanwhile: two threads may find the same.
    fn get_or_find(&self, key: K, find: impl FnOnce() -> Result<V>) -> Result<V> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, value)) = lock().iter().find(|(known, _)| *known == key) {
            return Ok(value.clone());
        }
        let value = find()?;
        lock().push((key, value.clone()));
        Ok(value)
    }
}

impl PlanningRuns {
    /// For an outlook of so many ranks that train one network together. Budgets of host memory and the [outlook](crate::Outlook)'s host
    /// memory, disks and their bytes are then those of a node, except that its `copied_bytes` are of whole groups.
    pub fn of(ranks: Ranks) -> Self {
        Self { ranks, ..Self::default() }
    }
}

pub(crate) struct Planner<'a> {
    pub(crate) config: &'a EngineConfig,
    pub(crate) backend: &'a Backend,
    pub(crate) network: &'a Network,
    pub(crate) kinds: &'a StateKinds,
    pub(crate) sample: &'a MicroBatch,
    /// How the state is shared among the directories, if it exists already.
    pub(crate) stored: Option<&'a Striping>,
    /// What planning runs have found so far, by what they depend on.
    pub(crate) runs: &'a PlanningRuns,
    /// Whether the device can update state in memory of its own.
    pub(crate) device_updates: bool,
}

impl Planner<'_> {
    /// The first choice that fits every budget.
    pub(crate) fn plan(&self) -> Result<EnginePlan> {
        self.ranks().check(self.config.training.is_some(), self.backend.device.unified())?;
        let mut smallest: Option<EnginePlan> = None;
        let keepers = self.keepers()?;
        let o = self.config.overrides;
        let fixed_state = self.fixed_state_groups()?;
        let copies = Caching::of(
            self.state(),
            self.network.groups.len() - fixed_state.unwrap_or(0),
            o.copied_weights.unwrap_or(0),
            o.copied_groups.unwrap_or(0),
        );
        let mut choices = self.choices(&keepers)?;
        choices.retain(|&choice| self.leaving(choice, &keepers) <= LEAVING_MAX);
        if choices.is_empty() {
            let micro_batches = self.config.limits.micro_batches;
            return Err(EngineError::Config(format!(
                "{micro_batches} micro-batches are too many where blocks keep their activations for each: lower BatchLimits::micro_batches to {}, or \
                 leave WindowOverrides::kept_blocks to the plan",
                LEAVING_MAX / keepers.len().max(self.network.last()).max(1)
            )));
        }
        for choice in choices {
            let choice = Choice { state_groups: fixed_state.unwrap_or(0), ..choice };
            let plan = self.evaluate(choice, &copies)?;
            let (choice, plan) = self.hold_on_host_what_fits(choice, plan, &keepers)?;
            let (choice, plan) =
                if fixed_state.is_none() { self.relieve_host(choice, plan)? } else { (choice, plan) };
            let (choice, plan) = self.settle_where_it_saves(choice, plan)?;
            let (choice, plan) = self.keep_where_it_saves(choice, plan, &keepers)?;
            if self.fits(&plan) {
                let plan = self.keep_what_fits(choice, plan, &keepers)?;
                let choice = Choice { keeping: plan.windows.keeping, ..choice };
                let (choice, plan) = self.park_what_fits(choice, plan)?;
                let (choice, plan) = self.settle_what_fits(choice, plan)?;
                let (choice, plan) = match fixed_state {
                    None => self.own_what_fits(choice, plan)?,
                    Some(_) => (choice, plan),
                };
                let plan = self.cache_what_fits(choice, plan)?;
                let (choice, plan) = self.pack_what_fits(choice, plan)?;
                return self.hold_what_fits(choice, plan);
            }
            if smallest.as_ref().is_none_or(|s| self.size(&plan) < self.size(s)) {
                smallest = Some(plan);
            }
        }
        let smallest = smallest.expect("there is at least one choice");
        Err(TierError::Plan(self.refusal(&smallest)).into())
    }

    fn ranks(&self) -> Ranks {
        self.runs.ranks
    }

    /// The groups as a rank's state has them: the network's own, or shards of them.
    fn state(&self) -> &Network {
        match self.ranks().count() {
            1 => self.network,
            ranks => self.runs.shard.get_or_init(|| self.network.shard(ranks)),
        }
    }

    /// Raises the number of groups whose gradients can wait for an update that follows backward. `plan` is that of `choice`.
    fn park_what_fits(&self, choice: Choice, plan: EnginePlan) -> Result<(Choice, EnginePlan)> {
        let fixed = self.config.overrides.gradient_groups.is_some() || !self.config.overrides.overlap();
        if fixed || !self.config.update_follows() || choice.gradients_on_disk {
            return Ok((choice, plan));
        }
        let chunk = plan.windows.slot_elements as u64 * self.network.element_bytes as u64;
        let left = self.room(Tier::Host, &plan) / 2;
        let more = |groups: usize| {
            let chunks = self.gradient_chunks(Choice { gradient_groups: groups, ..choice });
            (chunks - plan.windows.gradient_chunks) as u64 * chunk
        };
        let most = choice.gradient_groups + self.network.groups.len() / TRAILING_PART;
        let fitting = (choice.gradient_groups + 1..=most).rev().find(|&groups| more(groups) <= left);
        let Some(gradient_groups) = fitting else { return Ok((choice, plan)) };
        let choice = Choice { gradient_groups, ..choice };
        let plan = self.evaluate(choice, &plan.windows.caching)?;
        Ok((choice, plan))
    }

    /// Copies as much of the state on disk as still fits beside `plan`, which is that of `choice`.
    fn cache_what_fits(&self, choice: Choice, mut plan: EnginePlan) -> Result<EnginePlan> {
        let WindowOverrides { copied_weights, copied_groups, .. } = self.config.overrides;
        if self.config.placement != Placement::Disk || copied_weights.or(copied_groups).is_some() {
            return Ok(plan);
        }
        let most = self.ranks().share(self.config.cache_bytes);
        let mut room = most;
        // Groups whose weights are copied need no slots, which makes room for more.
        loop {
            let mut caching = plan.windows.caching.clone();
            let left = room.min(self.room(Tier::Host, &plan));
            let on_disk = self.first_not_read(plan.windows.device_room);
            if !caching.extend(self.state(), on_disk, self.kinds, left) {
                return Ok(plan);
            }
            plan = self.evaluate(choice, &caching)?;
            let copies = |kind| caching.bytes_of(self.state(), kind, self.kinds);
            let taken: u64 = (0..self.kinds.blobs.len()).map(copies).sum();
            room = most.saturating_sub(taken);
        }
    }

    /// What every block does in training. It depends on nothing that a plan chooses.
    fn blocks(&self) -> Result<Arc<[BlockCost]>> {
        if self.config.training.is_none() {
            return Ok(Arc::default());
        }
        let shape = (self.sample.sequences, self.sample.length);
        self.runs.blocks.get_or_find(shape, || {
            let run = self.dry_run(CHUNK_CHOICES[0], Staying::None, Keeping::default(), 0);
            Ok(run.blocks()?.into())
        })
    }

    /// Where the arena is.
    fn arena_tier(&self) -> Tier {
        if self.backend.device.unified() { Tier::Host } else { Tier::Device }
    }

    fn choices(&self, keepers: &[(usize, usize)]) -> Result<Vec<Choice>> {
        let o = self.config.overrides;
        let keeping = self.keeping(keepers, o.kept_blocks.unwrap_or(0), self.most_on_host());
        let only = |fixed: Option<usize>, all: &[usize]| fixed.map_or_else(|| all.to_vec(), |f| vec![f]);
        let on_disk = self.config.placement == Placement::Disk && self.config.training.is_some();
        let places = |fixed: Option<bool>| match fixed {
            Some(place) => vec![place],
            None if on_disk => vec![false, true],
            None => vec![false],
        };
        let chunks: &[usize] = if on_disk { &DISK_CHUNK_CHOICES } else { &CHUNK_CHOICES };
        let of_parts =
            if self.config.training.is_none() { on_demand::chunk_elements(self.network) } else { None };
        let chunk = o.chunk_elements.or(of_parts);
        let mut choices = Vec::new();
        // Every window may be as small as it can be in a tight choice.
        let groups = |tight: bool| o.gradient_groups.unwrap_or(if tight || !o.overlap() { 1 } else { 2 });
        let stays = match o.signals_stay {
            _ if self.backend.device.unified() => vec![false],
            Some(stay) => vec![stay],
            None => vec![true, false],
        };
        let windows = |tight: bool, all: &'static [usize]| if tight { all } else { &all[..2] };
        let kept_slots = self.kept_slot_choices()?;
        let trains = self.config.training.is_some() && !self.backend.device.unified();
        // An update that follows backward waits for all of a gradient before the next block begins.
        let comes = |on_disk: bool| match o.gradients_whole {
            _ if !trains || on_disk || self.config.update_follows() => vec![false],
            Some(whole) => vec![whole],
            None => vec![true, false],
        };
        for (&signals_stay, tight) in stays.iter().flat_map(|stay| [(stay, false), (stay, true)]) {
            for &gradients_on_disk in &places(o.gradients_on_disk) {
                for &activations_on_disk in &places(o.activations_on_disk) {
                    for &kept_slots in &kept_slots {
                        for &chunk_elements in &only(chunk, windows(tight, chunks)) {
                            for &weight_slots in &only(o.weight_slots, windows(tight, &WEIGHT_SLOT_CHOICES)) {
                                for &update_slots in
                                    &only(o.update_slots, windows(tight, &UPDATE_SLOT_CHOICES))
                                {
                                    for gradients_whole in comes(gradients_on_disk) {
                                        choices.push(Choice {
                                            chunk_elements,
                                            weight_slots,
                                            update_slots,
                                            gradients_on_disk,
                                            activations_on_disk,
                                            signals_stay,
                                            uploads_ahead: o.uploads_ahead.unwrap_or(UPLOAD_WINDOW),
                                            gradients_whole,
                                            gradient_groups: groups(tight),
                                            keeping,
                                            kept_slots,
                                            device_groups: o.device_groups.unwrap_or(0),
                                            state_groups: 0,
                                            kv_room: KvRoom {
                                                device: o.kv_on_device.unwrap_or(0),
                                                host: o.kv_on_host.unwrap_or(0),
                                            },
                                            packed_bytes: o.packed_bytes.unwrap_or(0),
                                        });
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
        self.add_fewer_uploads(&mut choices);
        Ok(choices)
    }

    fn evaluate(&self, choice: Choice, caching: &Caching) -> Result<EnginePlan> {
        let (config, network, state) = (self.config, self.network, self.state());
        let windows = self.windows(choice, caching)?;
        let spec = store_spec(config, state, self.kinds, choice.chunk_elements);
        let mut memory = MemoryPlan::default();
        let weight_bytes = network.element_bytes as u64;
        let chunk = windows.slot_elements as u64;
        if config.placement == Placement::Disk {
            for class in &windows.classes {
                let size = ByteSize(class.slot_bytes as u64);
                memory.add(
                    Tier::Host,
                    format!("weights in flight and in use, of groups up to {size}"),
                    class.slots as u64,
                    page(class.slot_bytes),
                );
            }
            if config.training.is_some() {
                for blob in &self.kinds.blobs {
                    let what = format!("optimizer state in flight: {}", blob.kind.words());
                    memory.add(
                        Tier::Host,
                        what,
                        windows.update_slots as u64,
                        page(blob.bytes(chunk) as usize),
                    );
                }
            } else {
                memory.add(Tier::Host, "loading weights", 2, chunk * weight_bytes);
            }
            for (kind, blob) in self.kinds.blobs.iter().enumerate() {
                let bytes = caching.bytes_of(state, kind, self.kinds);
                if bytes > 0 {
                    let what = format!("copies of state on disk: {}", blob.kind.words());
                    memory.add(Tier::Host, what, 1, bytes);
                }
            }
            let new = config.striping()?;
            let striping = self.stored.unwrap_or(&new);
            let stored = DiskStore::bytes_per_dir(&spec, striping);
            let what = match config.keeps_once() {
                _ if config.training.is_none() => "weights",
                true => "training state, kept once",
                false => "training state, all generations",
            };
            add_disk(&mut memory, what, striping, &stored);
            if windows.gradients_on_disk {
                let chunks = (0..spec.groups.len()).map(|g| spec.chunks(g)).sum();
                let chunk_bytes = windows.slot_elements * config.dtype.size();
                let gradients = Scratch::bytes_per_dir(&new, chunks, chunk_bytes);
                add_disk(&mut memory, "parked gradients", &new, &gradients);
                if windows.sum_chunks > 0 {
                    let sums = Scratch::bytes_per_dir(&new, chunks, windows.slot_elements * 4);
                    add_disk(&mut memory, "parked sums of gradients between micro-batches", &new, &sums);
                }
            }
            if windows.activations_on_disk {
                let signals = network.last() * self.rounds().together;
                let activations = Scratch::bytes_per_dir(&new, signals, windows.signal_bytes);
                add_disk(&mut memory, "spilled activations", &new, &activations);
            }
        } else {
            for blob in &self.kinds.blobs {
                let of_group = |group: &crate::network::ParamGroup| blob.bytes(group.elements as u64);
                let bytes = state.groups[..windows.device_room.first_with_state(state)].iter().map(of_group);
                memory.add(Tier::Host, format!("resident state: {}", blob.kind.words()), 1, bytes.sum());
            }
            memory.add(Tier::Host, "saving and loading state", 2, self.kinds.bytes(chunk));
        }
        if config.training.is_some() {
            memory.add(Tier::Host, "gradients", windows.gradient_chunks as u64, chunk * weight_bytes);
            memory.add(
                Tier::Host,
                "sums of gradients between micro-batches",
                windows.sum_chunks as u64,
                chunk * 4,
            );
        }
        self.add_signals(&mut memory, &windows);
        self.add_kept_away(&mut memory, &windows)?;
        self.add_logits(&mut memory);
        if let Some(kv) = self.kv_plan(choice.kv_room) {
            kv.add_to(&mut memory, config)?;
        }
        self.add_arena(&mut memory, &windows);
        let (slots, bytes) = windows.device_room.slots(network);
        memory.add(Tier::Device, "weights in turn on the device", slots, bytes);
        self.add_device_room(&mut memory, windows.device_room);
        memory.add(self.arena_tier(), "kernel scratch", 1, self.backend.kernel_scratch_bytes);
        memory.add(Tier::Host, "a block's weights, packed for its products", 1, windows.packed_bytes as u64);
        // Weights come in as f32.
        memory.add(Tier::Host, "loading and export buffers", 1, self.export_bytes(chunk).max(chunk * 4));
        // The table of the live and the next generation, and a manifest slot on its way out.
        let entries: usize = (0..spec.groups.len()).map(|g| spec.chunks(g)).sum::<usize>() * spec.kinds.len();
        memory.add(Tier::Host, "checksum tables", entries as u64 * 4, 8);
        let (ranks, blocks) = (self.ranks(), self.blocks()?);
        Ok(EnginePlan { memory: ranks.memory_of_node(memory), windows, spec, ranks, blocks })
    }

    /// Weights go out through a chunk of them, what a block asks to have at once, and a buffer of the file.
    fn export_bytes(&self, chunk: u64) -> u64 {
        let held = self.network.blocks.iter().map(|block| block.export_elements()).max().unwrap_or(0) as u64;
        match self.config.training {
            Some(_) => (chunk + held) * self.network.element_bytes as u64 + EXPORT_BUFFER_BYTES as u64,
            None => 0,
        }
    }

    /// The first group that is on the device for good, so that a copy in host memory would save nothing.
    fn first_not_read(&self, room: DeviceRoom) -> usize {
        match self.config.training {
            Some(_) => room.first_with_state(self.network),
            None => self.network.groups.len() - room.staying,
        }
    }

    /// Logits on their way to whoever picks tokens, and what one is picked from: a number and a logit for every token there is.
    fn add_logits(&self, memory: &mut MemoryPlan) {
        if self.config.limits.cache_length == 0 {
            return;
        }
        let (sequences, last) = (self.sample.sequences, self.network.last());
        let logits = self.network.output(last, sequences, 1, self.network.dtype, Mode::Generate);
        let bytes = logits.bytes();
        memory.add(Tier::Host, "logits", 2, bytes as u64);
        memory.add(Tier::Host, "tokens to pick from", 1, (2 * bytes / sequences.max(1)) as u64);
    }

    fn add_arena(&self, memory: &mut MemoryPlan, windows: &Windows) {
        let arena_tier = self.arena_tier();
        let Keeping { counts, of, bytes, .. } = windows.keeping;
        let count = counts.here;
        // All of them are there at once, when backward begins.
        let kept = (bytes * self.rounds().together).saturating_sub(windows.kept_in_turns) as u64;
        let others = windows.arena_bytes as u64 - kept;
        let what = match self.config.training {
            Some(_) => "block workspaces and gradient accumulators",
            None => "block workspaces",
        };
        memory.add(arena_tier, what, 1, others);
        if count > 0 {
            let what = format!("activations that {count} of {of} blocks keep for backward");
            memory.add(arena_tier, what, 1, kept);
            let in_turns = windows.turn_bytes.iter().map(|&bytes| page(bytes)).sum();
            let what = format!("activations that {count} of {of} blocks keep, in turns with their gradients");
            memory.add(arena_tier, what, 1, in_turns);
        }
    }

    fn add_signals(&self, memory: &mut MemoryPlan, windows: &Windows) {
        let slot = page(windows.signal_bytes);
        if self.config.training.is_none() {
            memory.add(Tier::Host, "signals between blocks", 2, slot);
            return;
        }
        let boundaries = self.network.last();
        let slots = Activations::slots(boundaries, self.rounds(), windows.activations_on_disk) as u64;
        memory.add(Tier::Host, "activations and their gradients", slots, slot);
        if windows.activations_on_disk {
            memory.add(Tier::Host, "activations in flight", SPILL_SLOTS as u64, slot);
        }
    }

    fn windows(&self, choice: Choice, caching: &Caching) -> Result<Windows> {
        let (config, network, state) = (self.config, self.network, self.state());
        let weight_bytes = network.element_bytes;
        let training = config.training.as_ref();
        let modes: &[Mode] = if training.is_some() {
            &[Mode::Train, Mode::Evaluate]
        } else if config.limits.cache_length > 0 {
            &[Mode::Generate]
        } else {
            &[Mode::Evaluate]
        };
        let cost = self.cost(choice, modes)?;
        let turn_bytes = self.turn_bytes(choice, &cost);
        let (sequences, length) = (self.sample.sequences, self.sample.length);
        let signal = |b: usize| network.output(b, sequences, length, config.dtype, Mode::Evaluate).bytes();
        let device_room = self.device_room(choice);
        let mut classes = plan_classes(network, weight_bytes, choice.weight_slots, |group| {
            !caching.has(group, self.kinds.weight, self.kinds) && !device_room.has_state(network, group)
        });
        // Slots of host memory hold what the state does.
        for class in &mut classes {
            let longest = class.groups.iter().map(|&group| state.groups[group].elements).max();
            class.slot_bytes = longest.unwrap_or(0) * weight_bytes;
        }
        Ok(Windows {
            weight_slots: choice.weight_slots,
            chunk_elements: choice.chunk_elements,
            slot_elements: choice.chunk_elements.min(state.group_elements_max()),
            classes,
            update_slots: choice.update_slots,
            gradient_chunks: self.gradient_chunks(choice) - self.chunks_in_turns(choice, &turn_bytes),
            gradient_groups: choice.gradient_groups,
            sum_chunks: self.sum_chunks(choice),
            gradients_on_disk: choice.gradients_on_disk,
            activations_on_disk: choice.activations_on_disk,
            signals_stay: choice.signals_stay,
            uploads_ahead: choice.uploads_ahead,
            gradients_whole: choice.gradients_whole,
            signal_bytes: (0..network.last()).map(signal).max().unwrap_or(0),
            arena_bytes: cost.arena_bytes.max(256),
            turn_bytes,
            kept_in_turns: cost.left_bytes.iter().sum(),
            keeping: choice.keeping,
            kept_slots: self.kept_slots(choice)?,
            caching: caching.clone(),
            device_room,
            kv_room: choice.kv_room,
            packed_bytes: choice.packed_bytes,
            flops_per_step: cost.flops,
        })
    }

    fn rounds(&self) -> Rounds {
        Rounds::new(self.config.accumulation, self.config.limits, self.network)
    }

    fn dry_run(
        &self,
        chunk_elements: usize,
        staying: Staying,
        keeping: Keeping,
        state_groups: usize,
    ) -> DryRun<'_> {
        DryRun {
            network: self.network,
            state: self.state(),
            dtype: self.config.dtype,
            unified: self.backend.device.unified(),
            staying,
            sample: self.sample,
            rounds: self.rounds(),
            chunk_elements,
            come_whole: false,
            update_follows: self.config.update_follows(),
            limits: self.config.limits,
            kv: None,
            keeping,
            in_turns: false,
            state_groups,
        }
    }

    /// What planning runs of `choice` find. Most choices differ in nothing that a run depends on, and share one.
    fn cost(&self, choice: Choice, modes: &[Mode]) -> Result<DryCost> {
        let unified = self.backend.device.unified();
        let chunks = if unified { (0, false) } else { (choice.chunk_elements, choice.gradients_whole) };
        let (config, follows) = (self.config, !unified && self.config.update_follows());
        let keeping = choice.keeping;
        let staying = Staying::of(choice.signals_stay, choice.activations_on_disk);
        let state_groups = if unified { 0 } else { choice.state_groups };
        let kv = (config.kv_place(unified), choice.kv_room);
        let in_turns = self.is_in_turns(choice);
        let (limits, order) = (config.limits, config.accumulation);
        let key = (chunks, follows, staying, state_groups, keeping, limits, order, kv, in_turns);
        self.runs.found.get_or_find(key, || {
            let mut cost = DryCost::default();
            for &mode in modes {
                let run = self.dry_run(choice.chunk_elements, staying, keeping, state_groups);
                let (kv, come_whole) = (self.kv_plan(choice.kv_room), choice.gradients_whole);
                let dry = DryRun { kv, in_turns, come_whole, ..run }.measure(mode)?;
                cost.arena_bytes = cost.arena_bytes.max(dry.arena_bytes);
                cost.flops = cost.flops.max(dry.flops);
                if mode == Mode::Train {
                    cost.left_bytes = dry.left_bytes;
                }
            }
            Ok(cost)
        })
    }

    /// Gradient chunks in host memory: all of them when clipping must see the norm first (or state is resident), else those of
    /// the group in backward and of groups that come in parts.
    fn gradient_chunks(&self, choice: Choice) -> usize {
        if choice.gradients_on_disk {
            return STAGING_SLOTS;
        }
        let chunks = |g: usize| self.state().groups[g].elements.div_ceil(choice.chunk_elements);
        let all = 0..self.device_room(choice).first_with_state(self.network);
        if self.config.update_follows() {
            let (shared, own): (Vec<usize>, Vec<usize>) = all.partition(|&g| self.network.is_shared(g));
            let mut own: Vec<usize> = own.into_iter().map(chunks).collect();
            own.sort_unstable_by(|a, b| b.cmp(a));
            own.truncate(choice.gradient_groups);
            return own.into_iter().chain(shared.into_iter().map(chunks)).sum();
        }
        all.map(chunks).sum()
    }

    /// Chunks of gradients in f32 in host memory, between the rounds of a step.
    fn sum_chunks(&self, choice: Choice) -> usize {
        if !self.rounds().are_several() || self.config.training.is_none() {
            return 0;
        }
        if choice.gradients_on_disk {
            return STAGING_SLOTS;
        }
        self.state().groups.iter().map(|group| group.elements.div_ceil(choice.chunk_elements)).sum()
    }

    fn refusal(&self, smallest: &EnginePlan) -> PlanRefusal {
        let [host, device] = [
            (HOST_BUDGET, Tier::Host, self.config.host_budget),
            (DEVICE_BUDGET, Tier::Device, self.config.device_budget),
        ];
        let is_small = |budget: (&str, Tier, u64)| smallest.memory.total(budget.1) > budget.2;
        let (what, tier, budget) = if is_small(host) { host } else { device };
        let also = Some(device).filter(|_| is_small(host) && is_small(device));
        let mut knobs = Vec::new();
        if self.config.overrides.kept_blocks.is_some_and(|blocks| blocks > 0) {
            knobs.push("let fewer blocks keep their activations (WindowOverrides::kept_blocks None)".into());
        }
        if self.config.placement != Placement::Disk {
            let place = if self.config.training.is_some() { "" } else { " with EngineConfig::disks" };
            let stays = tier == Tier::Device && self.config.placement == Placement::None;
            let host = if stays { "Placement::Host or " } else { "" };
            knobs.push(format!("use {host}Placement::Disk{place}"));
        }
        let limits = self.config.limits;
        if limits.cache_length > 0 {
            let unified = self.backend.device.unified();
            let (host, disk) =
                ("EngineConfig::kv_tier Host", "EngineConfig::kv_tier Disk with EngineConfig::disks");
            match (self.config.kv_place(unified), tier) {
                (Tier::Device, Tier::Device) => knobs.push(format!("use {host} or {disk}")),
                (Tier::Device | Tier::Host, Tier::Host) => knobs.push(format!("use {disk}")),
                _ => {}
            }
        }
        if smallest.windows.sum_chunks > 0 {
            knobs.push("accumulate vertically (Accumulation::Vertical)".into());
        }
        if limits.cache_length > 0 {
            knobs.push(format!(
                "shorten the prompt or lower BatchLimits::cache_length (now {} together)",
                limits.cache_length
            ));
        } else if limits.length > 1 {
            knobs.push(format!("shorten BatchLimits::length (now {})", limits.length));
        }
        if limits.sequences > 1 {
            let instead =
                if self.config.training.is_some() { " and raise BatchLimits::micro_batches" } else { "" };
            knobs.push(format!("lower BatchLimits::sequences (now {}){instead}", limits.sequences));
        }
        PlanRefusal {
            what,
            budget,
            minimum: smallest.memory.total(tier),
            also: also.map(|(what, tier, _)| (what, smallest.memory.total(tier))).into_iter().collect(),
            breakdown: smallest.memory.breakdown(tier),
            alternatives: knobs.join(", or "),
        }
    }
}

/// One term if the directories take turns, else one for each.
pub(crate) fn add_disk(memory: &mut MemoryPlan, what: &str, striping: &Striping, bytes: &[u64]) {
    if striping.shares().iter().all(|&share| share == 1) {
        return memory.add(Tier::Disk, what, 1, bytes.iter().sum());
    }
    for (dir, &bytes) in striping.dirs().iter().zip(bytes) {
        memory.add(Tier::Disk, format!("{what}, in {}", dir.display()), 1, bytes);
    }
}

pub(crate) fn page(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(4096)
}
