//! What a training step, or a pass of frozen weights, has to do in operations and bytes, from its plan alone: what a floor of its
//! time is made of.
//!
//! Bytes of disk and link are those that the engine moves. Where a group's second fetch may share the memory of the first,
//! depending on timing, it is not counted, so that the sums are never more than what is moved. Of frozen weights with
//! [parts](crate::Block::parts) that counts which a pass is expected to use.
//! Bytes of host memory are what cannot be avoided, each counted once: transfers of disk and link, the update's state and
//! gradients, and on a unified device the weights and gradients that kernels go through.
//!
//! Of several ranks (`ranks.rs`) a step is that of a node and one of its devices: disks, host memory and the network are those of a
//! node; operations and the link those of a device; tokens those of all ranks.

use crate::network::Network;
use crate::on_demand::uses_few;
use crate::plan::EnginePlan;
use crate::ranks::Traffic;
use crate::rounds::Rounds;
use crate::schedule::{Schedule, UpdateTime};
use crate::state::StateKinds;
use crate::{Engine, EngineConfig, MicroBatch, Mode, Placement};
use std::ops::Range;
use terrace_optimizer::StateFormat;

/// The work of one step of the largest batch; of frozen weights, of one pass of the planned batch, as it is when others came before.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepWork {
    /// Floating-point operations on the device, backward and recomputation included.
    pub operations: u64,
    /// Positions of all sequences.
    pub tokens: u64,
    /// Parameters that the host steps, with padding.
    pub parameters: u64,
    /// The format they are in; `None` for frozen weights.
    pub state: Option<StateFormat>,
    /// Read from all disks.
    pub disk_read_bytes: u64,
    /// Written to all disks.
    pub disk_write_bytes: u64,
    /// Copied to a device that has its own memory.
    pub upload_bytes: u64,
    /// Copied back.
    pub download_bytes: u64,
    /// Read from and written to host memory.
    pub memory_bytes: u64,
    /// Read and written in the memory of a device that has its own: frozen weights by kernels, or state by its update.
    pub device_memory_bytes: u64,
    /// Weights that several ranks gather, each time that they are to come to the device.
    pub gathers: Traffic,
    /// Gradients in f32 that they scatter, each time that a block's backward is over.
    pub scatters: Traffic,
    /// Whether the device's memory and cores are the host's.
    pub unified: bool,
    /// The order of it, in training.
    pub schedule: Schedule,
}

impl StepWork {
    /// All that ranks exchange.
    pub fn exchanged(&self) -> Traffic {
        self.gathers + self.scatters
    }
}

impl Engine {
    /// The work of one step of the largest batch.
    pub fn step_work(&self) -> StepWork {
        let unified = self.backend.device.unified();
        step_work(&self.config, &self.network, &self.kinds, &self.plan, None, unified)
    }
}

/// The work of a step of `plan`; `sample` is the micro-batch whose inputs are uploaded, if they are to be counted.
pub(crate) fn step_work(
    config: &EngineConfig,
    network: &Network,
    kinds: &StateKinds,
    plan: &EnginePlan,
    sample: Option<&MicroBatch>,
    unified: bool,
) -> StepWork {
    let shards = plan.ranks.are_several().then(|| network.shard(plan.ranks.count()));
    let rounds = Rounds::new(config.accumulation, config.limits, network);
    let state = shards.as_ref().unwrap_or(network);
    let count = Count { config, network, state, kinds, plan, rounds, unified };
    plan.ranks.work_of_node(count.of_rank(sample))
}

/// What is counted.
pub(crate) struct Count<'a> {
    pub(crate) config: &'a EngineConfig,
    pub(crate) network: &'a Network,
    /// The groups as a rank's state has them: those of `network`, or shards of them.
    pub(crate) state: &'a Network,
    pub(crate) kinds: &'a StateKinds,
    pub(crate) plan: &'a EnginePlan,
    pub(crate) rounds: Rounds,
    pub(crate) unified: bool,
}

impl Count<'_> {
    /// A step of one rank.
    fn of_rank(&self, sample: Option<&MicroBatch>) -> StepWork {
        let Self { config, network, state, kinds, plan, rounds, unified } = *self;
        let limits = config.limits;
        let tokens = (limits.sequences * limits.length * limits.micro_batches) as u64;
        let operations = plan.windows.flops_per_step;
        let Some(training) = &config.training else {
            return StepWork { operations, tokens, unified, ..self.pass() };
        };
        // What the host updates.
        let elements = state.elements() - self.elements_on_device();
        let mut work = StepWork {
            operations,
            tokens,
            parameters: elements,
            state: Some(training.state),
            unified,
            device_memory_bytes: self.device_update_bytes(),
            ..StepWork::default()
        };
        let order = rounds.order(network);
        let (mut read_weights, mut handed) = (vec![false; order.len()], vec![false; order.len()]);
        if config.placement == Placement::Disk {
            let caching = &plan.windows.caching;
            read_weights = self
                .reads(&order, |group| !caching.has(group, kinds.weight, kinds) && !self.is_on_device(group));
            // An update in forward hands over new weights where compute waits for them. One beside backward comes to the group that is
            // complete last when backward is over.
            let is_first = |at: usize| !order[..at].contains(&order[at]);
            let hands_over = |at: usize| match self.update_time() {
                UpdateTime::Deferred => is_first(at),
                UpdateTime::Beside => is_first(at) && order[at] == 0,
                UpdateTime::After | UpdateTime::InTurn => false,
            };
            for (at, read) in read_weights.iter_mut().enumerate() {
                handed[at] = *read && hands_over(at);
                *read &= !handed[at];
            }
            self.disks(&mut work, &order, &read_weights);
        }
        let mut inputs = 0;
        if !unified {
            let each = |sample: &MicroBatch| sample.inputs.iter().map(|t| t.bytes.len() as u64).sum();
            inputs = sample.map_or(0, each) * limits.micro_batches as u64;
            self.link(&mut work, inputs);
        }
        work.schedule = Schedule::new(self, &read_weights, &handed, inputs);
        let parked = elements * config.dtype.size() as u64;
        work.memory_bytes =
            work.disk_read_bytes + work.disk_write_bytes + work.upload_bytes + work.download_bytes;
        work.memory_bytes += self.read_by_update(|_| elements) + kinds.bytes(elements) + parked;
        if unified {
            // Weights are read in both directions; accumulators are zeroed, added to by every micro-batch and read once more.
            let passes = 2 + 2 * limits.micro_batches as u64;
            // Sums are copied out of accumulators and back.
            let weights = self.weight_bytes(&order, &self.reads(&order, |_| true));
            let (gradients, sums) = (self.gradient_bytes(), self.sum_bytes());
            work.memory_bytes += weights + elements * 4 * passes + gradients + 4 * sums;
        }
        work
    }

    /// What state on disk moves, and what is parked there. Of `order` the uses of `read_weights` are read.
    fn disks(&self, work: &mut StepWork, order: &[usize], read_weights: &[bool]) {
        let Self { config, network, state, kinds, plan, .. } = *self;
        let copied = |kind| plan.windows.caching.elements(state, kind, kinds).sum::<u64>();
        let read = self.read_by_update(|kind| work.parameters - copied(kind));
        work.disk_read_bytes = self.weight_bytes(order, read_weights) + read;
        let saved = |kind| if config.commits_at_saves() { copied(kind) } else { 0 };
        let written = |kind: usize| kinds.blobs[kind].bytes(work.parameters - saved(kind));
        work.disk_write_bytes = (0..kinds.blobs.len()).map(written).sum();
        if plan.windows.gradients_on_disk {
            let parked = self.gradient_bytes() + self.sum_bytes();
            work.disk_read_bytes += parked;
            work.disk_write_bytes += parked;
        }
        if plan.windows.activations_on_disk {
            let spilled = self.signals(0..network.last().saturating_sub(1));
            work.disk_read_bytes += spilled;
            work.disk_write_bytes += spilled;
        }
        let kept: u64 = (0..plan.blocks.len()).map(|block| self.kept_on_disk(block)).sum();
        work.disk_read_bytes += kept * config.limits.micro_batches as u64;
        work.disk_write_bytes += kept * config.limits.micro_batches as u64;
    }

    /// What a block leaves on disk for the backward of a micro-batch.
    pub(crate) fn kept_on_disk(&self, block: usize) -> u64 {
        if self.plan.windows.keeping.sends_to_disk(block) { self.kept(block) } else { 0 }
    }

    /// What crosses to the memory of the host and back of what a block leaves for a micro-batch.
    pub(crate) fn kept_across(&self, block: usize) -> u64 {
        if !self.unified && self.plan.windows.keeping.sends(block) { self.kept(block) } else { 0 }
    }

    fn kept(&self, block: usize) -> u64 {
        self.plan.blocks[block].kept_tensors.iter().sum::<usize>() as u64
    }

    /// What an update reads of all kinds, each of so many elements.
    fn read_by_update(&self, elements: impl Fn(usize) -> u64) -> u64 {
        let read = (0..self.kinds.blobs.len()).filter(|&kind| self.kinds.read_by_update[kind]);
        read.map(|kind| self.kinds.blobs[kind].bytes(elements(kind))).sum()
    }

    /// What frozen weights move in one pass. Those that stay somewhere are there already.
    fn pass(&self) -> StepWork {
        let (kinds, unified) = (self.kinds, self.unified);
        let blocks = 0..=self.network.last();
        let order: Vec<usize> = blocks.flat_map(|block| self.network.groups_of(block)).collect();
        let caching = &self.plan.windows.caching;
        let comes = |group: usize| unified || !self.stays(group);
        let read = |group| comes(group) && !caching.has(group, kinds.weight, kinds);
        let mut work = StepWork::default();
        let mut left_out = 0;
        if self.config.placement == Placement::Disk {
            let reads = self.reads(&order, read);
            let read = order.iter().zip(&reads).filter(|(_, read)| **read).map(|(group, _)| *group);
            let in_parts = read.filter(|&group| uses_few(self.network, group, self.rows()));
            left_out = in_parts.map(|group| self.unused(group)).sum();
            work.disk_read_bytes = self.weight_bytes(&order, &reads) - left_out;
        }
        let unused: u64 = order.iter().map(|&group| self.unused(group)).sum();
        if unified {
            work.memory_bytes = work.disk_read_bytes + self.weights(&order) - unused;
        } else {
            let sent: Vec<usize> = order.iter().copied().filter(|&group| comes(group)).collect();
            work.upload_bytes = self.weights(&sent) - left_out;
            work.memory_bytes = work.disk_read_bytes + work.upload_bytes;
            work.device_memory_bytes = self.weights(&order) - unused;
        }
        work
    }

    pub(crate) fn update_time(&self) -> UpdateTime {
        let waits_for_nothing = self.unified && self.config.placement != Placement::Disk;
        match (self.config.overrides.overlap(), self.config.update_follows()) {
            (true, true) => UpdateTime::Beside,
            (false, true) => UpdateTime::InTurn,
            (true, false) if !waits_for_nothing => UpdateTime::Deferred,
            (_, false) => UpdateTime::After,
        }
    }

    /// Which uses of `order` are read, of those of groups that count. A second use shares the memory of the first while that is
    /// alive, if everything between fits into the slots beside it; whether it is depends on timing, so that it is not counted.
    fn reads(&self, order: &[usize], counts: impl Fn(usize) -> bool) -> Vec<bool> {
        let counted: Vec<usize> = (0..order.len()).filter(|&at| counts(order[at])).collect();
        let groups: Vec<usize> = counted.iter().map(|&at| order[at]).collect();
        let mut reads = vec![false; order.len()];
        for (place, &at) in counted.iter().enumerate() {
            let before = groups[..place].iter().rposition(|&group| group == order[at]);
            reads[at] = before
                .is_none_or(|before| !self.stays(order[at]) && !self.fit_together(&groups[before..place]));
        }
        reads
    }

    /// Weights of the uses of `order` that are read.
    fn weight_bytes(&self, order: &[usize], reads: &[bool]) -> u64 {
        let read = order.iter().zip(reads).filter(|(_, read)| **read);
        self.weights(&read.map(|(group, _)| *group).collect::<Vec<_>>())
    }

    /// Bytes of a group's parts of which the planned batch is expected to make no use.
    fn unused(&self, group: usize) -> u64 {
        let used = self.network.blocks[group].parts_used(self.rows());
        let elements: usize = self.network.parts(group).iter().map(Range::len).sum();
        ((1.0 - used) * (elements * self.network.element_bytes) as f64) as u64
    }

    /// Rows of the planned batch.
    fn rows(&self) -> usize {
        self.config.limits.sequences * self.config.limits.length
    }

    /// Whether a group's weights stay on the device.
    pub(crate) fn stays(&self, group: usize) -> bool {
        self.plan.windows.device_room.stays(self.network, group)
    }

    /// Whether the groups of a stretch of the schedule can be in memory at once.
    fn fit_together(&self, stretch: &[usize]) -> bool {
        self.plan.windows.classes.iter().all(|class| {
            let held = class.groups.iter().filter(|group| stretch.contains(group)).count();
            held <= class.slots
        })
    }

    /// Weights, a rank's part of them, of groups.
    pub(crate) fn weights(&self, groups: &[usize]) -> u64 {
        let bytes = |&group: &usize| (self.state.groups[group].elements * self.state.element_bytes) as u64;
        groups.iter().map(bytes).sum()
    }

    /// Whether all state of a group is on the device.
    pub(crate) fn is_on_device(&self, group: usize) -> bool {
        self.plan.windows.device_room.has_state(self.network, group)
    }

    fn elements_on_device(&self) -> u64 {
        let groups = (0..self.network.groups.len()).filter(|&group| self.is_on_device(group));
        self.elements_of(groups)
    }

    /// What the device's update of the state that it has reads and writes, and the norm's reading of its gradients.
    fn device_update_bytes(&self) -> u64 {
        let elements = self.elements_on_device();
        let gradients = 2 * elements * self.config.dtype.size() as u64;
        self.read_by_update(|_| elements) + self.kinds.bytes(elements) + gradients
    }

    /// Gradients as they come down: a shared group's after each of its uses.
    fn gradient_bytes(&self) -> u64 {
        let groups = (0..=self.network.last()).flat_map(|block| self.network.groups_of(block));
        self.elements_of(groups.filter(|&group| !self.is_on_device(group))) * self.config.dtype.size() as u64
    }

    fn elements_of(&self, groups: impl Iterator<Item = usize>) -> u64 {
        groups.map(|group| self.state.groups[group].elements as u64).sum()
    }

    /// Sums of gradients as they are parked between rounds: those of every group but what waits for the last.
    fn sum_bytes(&self) -> u64 {
        let rounds = self.rounds.all().count() as u64;
        rounds.saturating_sub(1) * self.state.elements() * 4
    }

    /// The signals that these blocks write, of all micro-batches.
    fn signals(&self, blocks: std::ops::Range<usize>) -> u64 {
        let limits = self.config.limits;
        let signal = |block| {
            self.network
                .output(block, limits.sequences, limits.length, self.config.dtype, Mode::Train)
                .bytes()
        };
        (blocks.map(signal).sum::<usize>() * limits.micro_batches) as u64
    }

    /// What crosses to a device with its own memory and back.
    fn link(&self, work: &mut StepWork, inputs: u64) {
        let all = self.signals(0..self.network.last());
        let last = self.network.last().checked_sub(1).map_or(0, |block| self.signals(block..block + 1));
        let gradients = self.gradient_bytes();
        let own = work.parameters * self.config.dtype.size() as u64;
        let order = self.rounds.order(self.network);
        let come = |&at: &usize| !self.stays(order[at]) || !order[..at].contains(&order[at]);
        let come: Vec<usize> = (0..order.len()).filter(come).map(|at| order[at]).collect();
        let sent: Vec<usize> = come.iter().copied().filter(|&group| !self.is_on_device(group)).collect();
        let weights = self.weights(&sent);
        let stay = self.plan.windows.signals_stay;
        // Forward: outputs come down; inputs go up, unless they stayed, as those do not of which a copy went to disk. Backward:
        // checkpoints go up, the last of which may have stayed; gradients of signals cross both ways unless they stay.
        let spilled = if self.plan.windows.activations_on_disk { all - last } else { 0 };
        let (up, down) = if stay { (all - last + spilled, all) } else { (3 * all - last, 2 * all) };
        // What waits for the last round crosses both ways.
        let waits = if stay && self.rounds.waits(0) { self.signals(0..1) } else { 0 };
        let sums = self.sum_bytes();
        let kept: u64 = (0..self.plan.blocks.len()).map(|block| self.kept_across(block)).sum();
        let kept = kept * self.config.limits.micro_batches as u64;
        work.upload_bytes = inputs + weights + (gradients - own) + up + waits + sums + kept;
        work.download_bytes = gradients + down + waits + sums + kept;
        let (ranks, blocks) = (self.plan.ranks, 0..=self.network.last());
        work.gathers = ranks.traffic(self.weights(&come));
        let scattered = self.elements_of(blocks.flat_map(|block| self.network.groups_of(block))) * 4;
        work.scatters = ranks.traffic(scattered + sums);
    }
}
