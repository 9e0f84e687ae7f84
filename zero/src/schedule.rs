//! The order of a training step's work, from its plan alone: which block computes when, on which weights, what it waits for and what
//! follows it. [`StepWork`](crate::StepWork) has the same bytes and operations as sums.
//!
//! Of several ranks it is the order of one, with whom all others keep step; what goes through disks and cores of its node is that of
//! all ranks of the node.

use crate::activations::{Activations, SPILL_SLOTS};
use crate::gradients::DOWNLOAD_WINDOW;
use crate::ranks::Traffic;
use crate::speculation::may_speculate;
use crate::work::Count;
use crate::{Mode, Placement};
use std::collections::HashSet;
use std::ops::Range;

/// A step's work in its order; empty for frozen weights, which have none but one pass over the blocks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Schedule {
    /// When the update is done.
    pub update: UpdateTime,
    /// Blocks as a step goes through them.
    pub passes: Vec<BlockPass>,
    /// The groups that have parameters, in their order.
    pub groups: Vec<GroupUpdate>,
    /// Slots for weights on their way from disk, by class of size.
    pub weight_slots: Vec<usize>,
    /// Slots for chunks of state on their way from disk through the update and back.
    pub update_slots: usize,
    /// Chunks of gradients for which there is memory while groups are updated beside backward; `None` if it is enough for all.
    pub gradient_chunks: Option<usize>,
    /// Uploads of weights that may be in flight or waiting for their use.
    pub uploads_ahead: usize,
    /// Passes whose activations may still be on their way to disk while a later one computes.
    pub spills_ahead: usize,
    /// While steps are not clipped, the next are updated as by [`unclipped`](Self::unclipped).
    pub speculates: bool,
}

/// When an update is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UpdateTime {
    /// When backward is over, and nothing beside it.
    #[default]
    After,
    /// In backward, a group's as soon as its gradient is complete, and nothing beside it.
    InTurn,
    /// During the next forward, ahead of it.
    Deferred,
    /// Beside backward; what does not end with it goes on in the next forward.
    Beside,
}

/// One direction of one block, for the micro-batches that go through it together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockPass {
    /// Its index.
    pub block: usize,
    /// Backward, with what it repeats of forward.
    pub is_backward: bool,
    /// Floating-point operations.
    pub operations: u64,
    /// Its weights, in the order in which they are fetched.
    pub weights: Vec<WeightUse>,
    /// Spilled and kept activations that it starts from, read from disk while the pass before computes.
    pub spill_read_bytes: u64,
    /// Activations that it leaves to be written to disk.
    pub spill_write_bytes: u64,
    /// Parked gradients that it goes on from, read from disk before it computes.
    pub gradient_read_bytes: u64,
    /// Gradients that it parks on disk.
    pub gradient_write_bytes: u64,
    /// Copied to a device with its own memory before it computes.
    pub upload_bytes: u64,
    /// Copied to it while the pass before computes, if it was read by then.
    pub early_upload_bytes: u64,
    /// Gradients that are scattered among ranks when it has computed, before they are copied back.
    pub scatters: Traffic,
    /// Copied back while nothing is computed.
    pub download_bytes: u64,
    /// Copied back while the next pass computes.
    pub late_download_bytes: u64,
    /// The place in [`Schedule::groups`] of the group whose gradient is complete with it.
    pub completes: Option<usize>,
}

/// One use of a group's weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightUse {
    /// The group's place in [`Schedule::groups`].
    pub group: usize,
    /// Read from disk, into a slot of this class; none where the weights are in memory.
    pub read_bytes: u64,
    /// Read from disk where the step before is not updated in this one's forward, which hands them over.
    pub handed_bytes: u64,
    /// The class of the slot.
    pub class: usize,
    /// Copied to a device with its own memory; none where they are there.
    pub upload_bytes: u64,
    /// What ranks then gather of them; none where all of them are there.
    pub gathers: Traffic,
}

impl WeightUse {
    /// Whether it takes memory of the device on its way.
    pub fn comes(&self) -> bool {
        self.upload_bytes > 0 || self.gathers != Traffic::default()
    }
}

/// The update of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupUpdate {
    /// Parameters that the host steps, with padding.
    pub parameters: u64,
    /// Chunks that it is done in.
    pub chunks: usize,
    /// Those of its gradient that take up [`Schedule::gradient_chunks`].
    pub parked_chunks: usize,
    /// State, and its gradient where that is on disk, read from disk.
    pub read_bytes: u64,
    /// State written to disk with it.
    pub write_bytes: u64,
    /// State written to disk from copies in memory when all groups are updated.
    pub late_write_bytes: u64,
    /// Updated in the next forward even where others are updated beside backward.
    pub is_late: bool,
}

impl Schedule {
    /// The order of steps that their gradient's norm does not change, where it is another: updated beside backward, before the norm is
    /// known.
    #[must_use]
    pub fn unclipped(&self) -> Option<Self> {
        self.speculates.then(|| {
            let mut schedule = Self { update: UpdateTime::Beside, ..self.clone() };
            for group in &mut schedule.groups {
                group.write_bytes += std::mem::take(&mut group.late_write_bytes);
            }
            for used in schedule.passes.iter_mut().flat_map(|pass| &mut pass.weights) {
                // The group that is complete last is always updated in the next forward.
                let handed = std::mem::take(&mut used.handed_bytes);
                used.read_bytes += if used.group == 0 { 0 } else { handed };
            }
            schedule
        })
    }

    /// The order of a step in which the weights of the uses of `read` are read from disk, or of `handed` where no update hands them over, and
    /// `inputs` are uploaded.
    pub(crate) fn new(count: &Count<'_>, read: &[bool], handed: &[bool], inputs: u64) -> Self {
        let windows = &count.plan.windows;
        let update = count.update_time();
        let network = count.network;
        let with_parameters: Vec<usize> =
            (0..network.groups.len()).filter(|&group| network.groups[group].elements > 0).collect();
        let groups = with_parameters.iter().map(|&group| group_update(count, group, update)).collect();
        let shared: usize = with_parameters
            .iter()
            .filter(|&&g| network.is_shared(g) && !count.is_on_device(g))
            .map(|&g| count.plan.spec.chunks(g))
            .sum();
        let bounded = count.config.update_follows() && !windows.gradients_on_disk;
        let spilled_at_once =
            if windows.activations_on_disk { SPILL_SLOTS / count.rounds.together } else { 1 };
        let mut places = vec![usize::MAX; network.groups.len()];
        with_parameters.iter().enumerate().for_each(|(place, &group)| places[group] = place);
        Self {
            update,
            passes: Passes { count, places, read, handed, used: HashSet::new(), parked: HashSet::new() }
                .all(inputs),
            groups,
            weight_slots: windows.classes.iter().map(|class| class.slots).collect(),
            update_slots: windows.update_slots,
            gradient_chunks: bounded.then(|| windows.gradient_chunks.saturating_sub(shared)),
            uploads_ahead: windows.uploads_ahead,
            spills_ahead: spilled_at_once.max(1),
            speculates: may_speculate(count.config, &count.plan.spec, &windows.caching),
        }
    }
}

fn group_update(count: &Count<'_>, group: usize, update: UpdateTime) -> GroupUpdate {
    let (kinds, network) = (count.kinds, count.network);
    let elements = count.state.groups[group].elements as u64;
    let chunks = count.plan.spec.chunks(group);
    if count.is_on_device(group) {
        // The device does that between two passes, at the speed of its memory.
        return GroupUpdate { chunks, ..GroupUpdate::default() };
    }
    let own_room = !network.is_shared(group);
    let mut found = GroupUpdate {
        parameters: elements,
        chunks,
        parked_chunks: if own_room { chunks } else { 0 },
        is_late: update == UpdateTime::Deferred && count.plan.windows.caching.has_all(group),
        ..GroupUpdate::default()
    };
    if count.config.placement != Placement::Disk {
        return found;
    }
    for (kind, blob) in kinds.blobs.iter().enumerate() {
        let bytes = blob.bytes(elements);
        match count.plan.windows.caching.has(group, kind, kinds) {
            true if count.config.commits_at_saves() => {}
            true if update == UpdateTime::Deferred => found.late_write_bytes += bytes,
            true => found.write_bytes += bytes,
            false => {
                found.read_bytes += if kinds.read_by_update[kind] { bytes } else { 0 };
                found.write_bytes += bytes;
            }
        }
    }
    if count.plan.windows.gradients_on_disk {
        found.read_bytes += elements * count.config.dtype.size() as u64;
    }
    found
}

/// Makes the passes of a step, in their order.
struct Passes<'a> {
    count: &'a Count<'a>,
    /// Of groups in [`Schedule::groups`].
    places: Vec<usize>,
    /// By use, those not yet come to.
    read: &'a [bool],
    /// The same, of what the update of the step before hands over.
    handed: &'a [bool],
    /// Groups that were used.
    used: HashSet<usize>,
    /// Groups of which a gradient was parked in the last round.
    parked: HashSet<usize>,
}

impl Passes<'_> {
    fn all(mut self, inputs: u64) -> Vec<BlockPass> {
        let (last, rounds) = (self.count.network.last(), self.count.rounds);
        let mut passes = Vec::new();
        for round in rounds.all() {
            passes.extend((0..last).map(|block| self.forward(block, &round)).collect::<Vec<_>>());
            let lowest = usize::from(rounds.waits(0) && !rounds.is_last(&round));
            passes
                .extend((lowest..=last).rev().map(|block| self.backward(block, &round)).collect::<Vec<_>>());
        }
        if let Some(first) = passes.first_mut() {
            first.upload_bytes += inputs;
        }
        passes
    }

    fn forward(&mut self, block: usize, round: &Range<usize>) -> BlockPass {
        let (windows, together) = (&self.count.plan.windows, round.len() as u64);
        let mut pass = self.pass(block, false, together);
        let output = together * self.signal(block);
        let is_spilled =
            |at| windows.activations_on_disk && Activations::can_spill(at, self.count.network.last());
        if is_spilled(block) {
            pass.spill_write_bytes = output;
        }
        pass.spill_write_bytes += together * self.count.kept_on_disk(block);
        if !self.count.unified {
            pass.late_download_bytes = together * self.count.kept_across(block);
            // What goes on to the disk is waited for, and comes from the host's memory to the next block.
            let comes = |below: &usize| !windows.signals_stay || is_spilled(*below);
            let below = block.checked_sub(1).filter(comes);
            pass.upload_bytes = below.map_or(0, |below| together * self.signal(below));
            if windows.signals_stay && !is_spilled(block) {
                pass.late_download_bytes += output;
            } else {
                pass.download_bytes = output;
            }
        }
        pass
    }

    fn backward(&mut self, block: usize, round: &Range<usize>) -> BlockPass {
        let (network, rounds) = (self.count.network, self.count.rounds);
        let windows = &self.count.plan.windows;
        let together = rounds.backward_of(block, round).len() as u64;
        let mut pass = self.pass(block, true, together);
        let above = if block < network.last() { together * self.signal(block) } else { 0 };
        let below = block.checked_sub(1).map_or(0, |below| together * self.signal(below));
        if windows.activations_on_disk && block < network.last() {
            pass.spill_read_bytes = below;
        }
        pass.spill_read_bytes += together * self.count.kept_on_disk(block);
        if !self.count.unified {
            let waits = block.checked_sub(1).is_some_and(|below| rounds.waits(below));
            if windows.signals_stay {
                // The last block's input stayed, and what comes from above does but where it waits.
                pass.upload_bytes = if block < network.last() { below } else { 0 };
                pass.upload_bytes += if rounds.waits(block) { above } else { 0 };
                pass.download_bytes = if waits { below } else { 0 };
            } else {
                (pass.upload_bytes, pass.download_bytes) = (below + above, below);
            }
        }
        pass.early_upload_bytes = together * self.count.kept_across(block);
        self.gradients(&mut pass, round);
        pass
    }

    /// What backward adds to, and parks.
    fn gradients(&mut self, pass: &mut BlockPass, round: &Range<usize>) {
        let (network, rounds) = (self.count.network, self.count.rounds);
        let (is_last, block) = (rounds.is_last(round), pass.block);
        let groups = network.groups_of(block);
        let bytes = |group: usize, size: usize| (self.count.state.groups[group].elements * size) as u64;
        let (mut before, mut parked, mut chunks) = (0, 0, 0);
        pass.scatters = self.count.plan.ranks.traffic(groups.iter().map(|&group| bytes(group, 4)).sum());
        for &group in &groups {
            let own = bytes(group, self.count.config.dtype.size());
            let sums = rounds.are_several() && !rounds.waits(block);
            if self.count.is_on_device(group) && (!sums || is_last) {
                // It stays there, but for what earlier rounds summed.
                before += if sums && round.start > 0 { bytes(group, 4) } else { 0 };
                continue;
            }
            if sums && round.start > 0 {
                before += bytes(group, 4);
            } else if !sums && self.parked.contains(&group) {
                before += own;
            }
            parked += if is_last { own } else { bytes(group, 4) };
            chunks += self.count.plan.spec.chunks(group) as u64;
        }
        if is_last {
            self.parked.extend(&groups);
            pass.completes = groups.contains(&block).then(|| self.places[block]);
        }
        if self.count.plan.windows.gradients_on_disk {
            (pass.gradient_read_bytes, pass.gradient_write_bytes) = (before, parked);
        }
        if !self.count.unified {
            pass.upload_bytes += before;
            // All or the last chunks are on their way down while the next block computes, unless an update is to have them.
            let lands = pass.completes.is_some() && self.count.config.update_follows();
            // Where the next block goes on from sums of earlier rounds, a chunk lands before it begins.
            let goes_on = rounds.are_several() && round.start > 0 && !is_last;
            let late = match self.count.plan.windows.gradients_whole {
                _ if lands => 0,
                true => chunks,
                false => ((DOWNLOAD_WINDOW - usize::from(goes_on)) as u64).min(chunks),
            };
            pass.late_download_bytes = parked * late / chunks.max(1);
            pass.download_bytes += parked - pass.late_download_bytes;
        }
    }

    fn pass(&mut self, block: usize, is_backward: bool, together: u64) -> BlockPass {
        let network = self.count.network;
        let keeps = self.count.plan.windows.keeping.asks(block);
        let of = &self.count.plan.blocks[block];
        let operations = match (is_backward, keeps) {
            (false, _) => of.forward,
            (true, false) => of.backward,
            (true, true) => of.backward_of_kept,
        };
        let weights = network.groups_of(block).into_iter().map(|group| self.weight_use(group)).collect();
        BlockPass { block, is_backward, operations: operations * together, weights, ..BlockPass::default() }
    }

    fn weight_use(&mut self, group: usize) -> WeightUse {
        let bytes = self.count.weights(&[group]);
        let (read, later) = self.read.split_first().expect("a use for each group of each pass");
        self.read = later;
        let (handed, later) = self.handed.split_first().expect("as many");
        self.handed = later;
        let class = self.count.plan.windows.classes.iter().position(|class| class.groups.contains(&group));
        let is_first = self.used.insert(group);
        let comes = !self.count.unified && (is_first || !self.count.stays(group));
        let sent = comes && !self.count.is_on_device(group);
        WeightUse {
            group: self.places[group],
            read_bytes: if *read { bytes } else { 0 },
            handed_bytes: if *handed { bytes } else { 0 },
            class: class.unwrap_or(0),
            upload_bytes: if sent { bytes } else { 0 },
            gathers: self.count.plan.ranks.traffic(if comes { bytes } else { 0 }),
        }
    }

    /// Bytes of the signal that a block writes for a micro-batch.
    fn signal(&self, block: usize) -> u64 {
        let (limits, dtype) = (self.count.config.limits, self.count.config.dtype);
        self.count.network.output(block, limits.sequences, limits.length, dtype, Mode::Train).bytes() as u64
    }
}
