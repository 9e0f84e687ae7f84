//! What a training step, or a pass of frozen weights, has to do in operations and bytes, from its plan alone: what a floor of its
//! time is made of.
//!
//! Bytes of disk and link are those that the engine moves. Where a group's second fetch may share the memory of the first,
//! depending on timing, it is not counted, so that the sums are never more than what is moved.
//! Bytes of host memory are what cannot be avoided, each counted once: transfers of disk and link, the update's state and
//! gradients, and on a unified device the weights and gradients that kernels go through.
//!
//! Of several ranks (`ranks.rs`) a step is that of a node and one of its devices: disks, host memory and the network are those of a
//! node; operations and the link those of a device; tokens those of all ranks.

use crate::network::Network;
use crate::plan::EnginePlan;
use crate::ranks::Traffic;
use crate::rounds::Rounds;
use crate::state::StateKinds;
use crate::{Engine, EngineConfig, MicroBatch, Mode, Placement};
use terrace_optimizer::StateFormat;

/// The work of one step of the largest batch; of frozen weights, of one pass of the planned batch, as it is when others came before.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Floating-point operations on the device, backward and recomputation included.
    pub operations: u64,
    /// Positions of all sequences.
    pub tokens: u64,
    /// Parameters that the optimizer steps, with padding.
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
    /// Frozen weights that kernels read from the memory of a device that has its own.
    pub device_memory_bytes: u64,
    /// Weights that several ranks gather, each time that they are uploaded.
    pub gathers: Traffic,
    /// Gradients in f32 that they scatter, each time that they come down.
    pub scatters: Traffic,
    /// Whether the device's memory and cores are the host's.
    pub unified: bool,
    /// What of it is done when.
    pub phases: Phases,
}

/// The order of a step's work. Forward and backward take turns; what they share otherwise is done beside them. What is not said here
/// is spread evenly over both.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// When the update is done.
    pub update: UpdateTime,
    /// Of [`StepWork::operations`], those before backward.
    pub forward_operations: u64,
    /// Read from disk by the update, gradients that are parked there included.
    pub update_read_bytes: u64,
    /// Written to disk by the update, group after group.
    pub update_write_bytes: u64,
    /// Written from copies in memory beside the next backward.
    pub late_write_bytes: u64,
    /// Written to disk in backward: gradients that are parked there.
    pub gradient_write_bytes: u64,
    /// Spilled activations, written in forward and read in backward.
    pub spilled_bytes: u64,
}

/// When an update is done.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum UpdateTime {
    /// When backward is over, and nothing beside it.
    #[default]
    After,
    /// During the next forward, ahead of it.
    Deferred,
    /// Beside backward; up to this part of it can go on in the next forward.
    Beside(f64),
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
    let count = Count { config, network, state: shards.as_ref().unwrap_or(network), plan, rounds };
    plan.ranks.work_of_node(count.of_rank(kinds, sample, unified))
}

struct Count<'a> {
    config: &'a EngineConfig,
    network: &'a Network,
    /// The groups as a rank's state has them: those of `network`, or shards of them.
    state: &'a Network,
    plan: &'a EnginePlan,
    rounds: Rounds,
}

impl Count<'_> {
    /// A step of one rank.
    fn of_rank(&self, kinds: &StateKinds, sample: Option<&MicroBatch>, unified: bool) -> StepWork {
        let Self { config, network, state, plan, rounds } = *self;
        let limits = config.limits;
        let tokens = (limits.sequences * limits.length * limits.micro_batches) as u64;
        let operations = plan.windows.flops_per_step;
        let Some(training) = &config.training else {
            return StepWork { operations, tokens, unified, ..self.pass(kinds, unified) };
        };
        let elements = state.elements();
        let mut work = StepWork {
            operations,
            tokens,
            parameters: elements,
            state: Some(training.state),
            unified,
            ..StepWork::default()
        };
        work.phases.update = self.update_time(unified);
        work.phases.forward_operations = plan.windows.forward_flops;
        let (gradients, sums) = (self.gradient_bytes(), self.sum_bytes());
        if config.placement == Placement::Disk {
            self.disks(&mut work, kinds);
        }
        if !unified {
            let inputs = sample.map_or(0, |sample| sample.inputs.iter().map(|t| t.bytes.len() as u64).sum());
            self.link(&mut work, inputs * limits.micro_batches as u64);
        }
        let parked = elements * config.dtype.size() as u64;
        work.memory_bytes =
            work.disk_read_bytes + work.disk_write_bytes + work.upload_bytes + work.download_bytes;
        let read_by_update: u64 =
            (0..kinds.blobs.len()).map(|kind| read_by_update(kinds, kind, elements)).sum();
        work.memory_bytes += read_by_update + kinds.bytes(elements) + parked;
        if unified {
            // Weights are read in both directions; accumulators are zeroed, added to by every micro-batch and read once more.
            let passes = 2 + 2 * limits.micro_batches as u64;
            // Sums are copied out of accumulators and back.
            let weights = self.weight_bytes(rounds.order(network), |_| true);
            work.memory_bytes += weights + elements * 4 * passes + gradients + 4 * sums;
        }
        work
    }

    /// What state on disk moves, and what is parked there.
    fn disks(&self, work: &mut StepWork, kinds: &StateKinds) {
        let Self { config, network, state, plan, rounds } = *self;
        let (elements, caching) = (state.elements(), &plan.windows.caching);
        let all_kinds = 0..kinds.blobs.len();
        let copied = |kind| caching.elements(state, kind, kinds).sum::<u64>();
        let read: u64 =
            all_kinds.clone().map(|kind| read_by_update(kinds, kind, elements - copied(kind))).sum();
        let order = rounds.order(network);
        work.disk_read_bytes =
            self.weight_bytes(order, |group| !caching.has(group, kinds.weight, kinds)) + read;
        let saved = |kind| if config.commits_at_saves() { copied(kind) } else { 0 };
        let written = |unwritten: &dyn Fn(usize) -> u64| -> u64 {
            all_kinds.clone().map(|kind| kinds.blobs[kind].bytes(elements - unwritten(kind))).sum()
        };
        work.disk_write_bytes = written(&saved);
        let phases = &mut work.phases;
        (phases.update_read_bytes, phases.update_write_bytes) = (read, work.disk_write_bytes);
        if phases.update == UpdateTime::Deferred {
            phases.update_write_bytes = written(&copied);
            phases.late_write_bytes = work.disk_write_bytes - phases.update_write_bytes;
        }
        if plan.windows.gradients_on_disk {
            let (gradients, sums) = (self.gradient_bytes(), self.sum_bytes());
            work.disk_read_bytes += gradients + sums;
            work.disk_write_bytes += gradients + sums;
            phases.update_read_bytes += gradients;
            phases.gradient_write_bytes = gradients;
        }
        if plan.windows.activations_on_disk {
            phases.spilled_bytes = self.signals(0..network.last().saturating_sub(1));
            work.disk_read_bytes += phases.spilled_bytes;
            work.disk_write_bytes += phases.spilled_bytes;
        }
    }

    /// What frozen weights move in one pass. Those that stay somewhere are there already.
    fn pass(&self, kinds: &StateKinds, unified: bool) -> StepWork {
        let blocks = 0..=self.network.last();
        let order: Vec<usize> = blocks.flat_map(|block| self.network.groups_of(block)).collect();
        let caching = &self.plan.windows.caching;
        let comes = |group: usize| unified || !self.stays(group);
        let read = |group| comes(group) && !caching.has(group, kinds.weight, kinds);
        let mut work = StepWork::default();
        if self.config.placement == Placement::Disk {
            work.disk_read_bytes = self.weight_bytes(order.clone(), read);
        }
        if unified {
            work.memory_bytes = work.disk_read_bytes + self.weights(&order);
        } else {
            let sent: Vec<usize> = order.iter().copied().filter(|&group| comes(group)).collect();
            work.upload_bytes = self.weights(&sent);
            work.memory_bytes = work.disk_read_bytes + work.upload_bytes;
            work.device_memory_bytes = self.weights(&order);
        }
        work
    }

    fn update_time(&self, unified: bool) -> UpdateTime {
        let on_disk = self.config.placement == Placement::Disk;
        if !self.config.overrides.overlap() || (unified && !on_disk) {
            return UpdateTime::After;
        }
        if !self.config.update_follows() {
            return UpdateTime::Deferred;
        }
        let windows = &self.plan.windows;
        // One group is in backward and one in the update whatever happens.
        let trailing = windows.gradient_groups.saturating_sub(2) as f64 / self.network.groups.len() as f64;
        UpdateTime::Beside(if windows.gradients_on_disk { 1.0 } else { trailing.min(1.0) })
    }

    /// Weights, a rank's part of them, of the groups of `order` that count as they are read in that order. A second use shares the memory of the first while
    /// that is alive, if everything between fits into the slots beside it; whether it is depends on timing, so that it is not counted.
    fn weight_bytes(&self, mut order: Vec<usize>, counts: impl Fn(usize) -> bool) -> u64 {
        order.retain(|group| counts(*group));
        let read = |&at: &usize| {
            let before = order[..at].iter().rposition(|group| *group == order[at]);
            before.is_none_or(|before| !self.stays(order[at]) && !self.fit_together(&order[before..at]))
        };
        let groups: Vec<usize> = (0..order.len()).filter(read).map(|at| order[at]).collect();
        self.weights(&groups)
    }

    /// Whether a group's weights stay on the device.
    fn stays(&self, group: usize) -> bool {
        self.plan.windows.device_room.stays(self.network, group)
    }

    /// Whether the groups of a stretch of the schedule can be in memory at once.
    fn fit_together(&self, stretch: &[usize]) -> bool {
        self.plan.windows.classes.iter().all(|class| {
            let held = class.groups.iter().filter(|group| stretch.contains(group)).count();
            held <= class.slots
        })
    }

    fn weights(&self, groups: &[usize]) -> u64 {
        let bytes = |&group: &usize| (self.state.groups[group].elements * self.state.element_bytes) as u64;
        groups.iter().map(bytes).sum()
    }

    /// Gradients as they come down: a shared group's after each of its uses.
    fn gradient_bytes(&self) -> u64 {
        let groups = (0..=self.network.last()).flat_map(|block| self.network.groups_of(block));
        let elements: u64 = groups.map(|group| self.state.groups[group].elements as u64).sum();
        elements * self.config.dtype.size() as u64
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
        let own = self.state.elements() * self.config.dtype.size() as u64;
        let order = self.rounds.order(self.network);
        let sent = |&at: &usize| !self.stays(order[at]) || !order[..at].contains(&order[at]);
        let weights = self.weights(&(0..order.len()).filter(sent).map(|at| order[at]).collect::<Vec<_>>());
        let stay = self.plan.windows.signals_stay;
        // Forward: outputs come down; inputs go up, unless they stayed. Backward: checkpoints go up, the last of which may
        // have stayed; gradients of signals cross both ways unless they stay.
        let (up, down) = if stay { (all - last, all) } else { (3 * all - last, 2 * all) };
        // What waits for the last round crosses both ways.
        let waits = if stay && self.rounds.waits(0) { self.signals(0..1) } else { 0 };
        let sums = self.sum_bytes();
        work.upload_bytes = inputs + weights + (gradients - own) + up + waits + sums;
        work.download_bytes = gradients + down + waits + sums;
        let ranks = self.plan.ranks;
        work.gathers = ranks.traffic(weights);
        work.scatters = ranks.traffic(gradients / self.config.dtype.size() as u64 * 4 + sums);
    }
}

/// What an update reads of a kind.
fn read_by_update(kinds: &StateKinds, kind: usize, elements: u64) -> u64 {
    if kinds.read_by_update[kind] { kinds.blobs[kind].bytes(elements) } else { 0 }
}
