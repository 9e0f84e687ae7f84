//! Which blocks leave what backward would recompute, and where that is until then.

use super::{Choice, EnginePlan, Planner, Windows, add_disk, page};
use crate::kept::{Keeping, KeptAway, chunks, slot_bytes};
use crate::rounds::Rounds;
use crate::{Backend, EngineConfig, Placement, Result};
use terrace_tiers::{MemoryPlan, Striping, Tier};

/// Most planning runs in search of the number of blocks that keep. The first tries all blocks; what the arena takes grows by
/// nearly the same for each, so that two more mostly find the number.
const KEEPING_TRIES: usize = 8;

/// Parts of what a block leaves for a micro-batch for which there are leases on the way to disk and back, if blocks keep on disk. With all of
/// it nobody waits whom the disk does not hold up.
const KEPT_PARTS: [usize; 3] = [1, 2, 4];

impl Planner<'_> {
    /// Raises the number of blocks that keep to the most that fits beside the windows of `choice`, unless it is fixed. `plan` is
    /// that of `choice`.
    pub(super) fn keep_what_fits(
        &self,
        choice: Choice,
        mut plan: EnginePlan,
        keepers: &[(usize, usize)],
    ) -> Result<EnginePlan> {
        if self.config.overrides.kept_blocks.is_some() {
            return Ok(plan);
        }
        let tier = self.arena_tier();
        // Some number from `plan`'s up to below `too_many` is the one.
        let most = self.keep_at_most(choice, keepers);
        let (mut too_many, mut tried) = (most + 1, most);
        for _ in 0..KEEPING_TRIES {
            let fitting = plan.windows.keeping.count;
            if fitting + 1 >= too_many {
                break;
            }
            let keeping = self.keeping(keepers, tried.max(fitting + 1));
            let more = self.evaluate(Choice { keeping, ..choice }, &plan.windows.caching)?;
            let blocks = more.windows.keeping.count - fitting;
            let bytes = more.memory.total(tier).saturating_sub(plan.memory.total(tier));
            if self.fits(&more) {
                plan = more;
            } else {
                too_many = more.windows.keeping.count;
            }
            let room = self.room(tier, &plan);
            let fit = room.saturating_mul(blocks as u64) / bytes.max(1);
            tried = (plan.windows.keeping.count + fit.min(1 << 32) as usize).min(too_many - 1);
        }
        Ok(plan)
    }

    /// The blocks that can leave something for backward, in order, and the bytes that each leaves.
    pub(super) fn keepers(&self) -> Result<Vec<(usize, usize)>> {
        let blocks = self.blocks()?;
        Ok(blocks.iter().enumerate().filter_map(|(block, cost)| Some((block, cost.kept_bytes?))).collect())
    }

    /// The last `count` of `keepers` in memory, and before them on disk what is to be there.
    pub(super) fn keeping(&self, keepers: &[(usize, usize)], count: usize) -> Keeping {
        let fixed = self.config.overrides.kept_on_disk;
        // A block that waits for the last round would leave something in each of them.
        let waits = keepers.first().is_some_and(|&(block, _)| self.rounds().waits(block));
        let unfit = if waits { (keepers.len() - 1).saturating_sub(count) } else { usize::MAX };
        let on_disk = if self.may_keep_on_disk() { fixed.unwrap_or(self.config.keep_on_disk) } else { 0 };
        Keeping::last(keepers, count, on_disk.min(unfit))
    }

    /// Kernels have to write to host memory what goes to disk from there.
    fn may_keep_on_disk(&self) -> bool {
        let trains = self.config.training.is_some() && self.config.placement == Placement::Disk;
        trains && self.backend.device.unified()
    }

    /// Bytes of a lease, and pieces of what a block leaves for a micro-batch, the most of those that may go to disk.
    fn kept_pieces(&self, of: impl Fn(usize) -> bool) -> Result<(usize, usize)> {
        let blocks = self.blocks()?;
        let left = || {
            blocks.iter().enumerate().filter(|(block, _)| of(*block)).map(|(_, cost)| &cost.kept_tensors[..])
        };
        let slot = slot_bytes(left().map(|tensors| tensors.iter().sum()).max().unwrap_or(0));
        Ok((slot, left().map(|tensors| chunks(tensors, slot)).max().unwrap_or(0)))
    }

    /// Numbers of leases for what blocks keep on disk, roomy first.
    pub(super) fn kept_slot_choices(&self, keepers: &[(usize, usize)]) -> Vec<usize> {
        let keeping = self.keeping(keepers, self.config.overrides.kept_blocks.unwrap_or(0));
        match (self.config.overrides.kept_slots, keeping.on_disk) {
            (Some(slots), _) => vec![slots],
            (None, 0) => vec![0],
            // Of whichever blocks these will be.
            (None, _) => {
                let pieces = self.kept_pieces(|_| true).map_or(1, |(_, pieces)| pieces);
                KEPT_PARTS.map(|part| pieces.div_ceil(part).max(1)).to_vec()
            }
        }
    }

    /// Leases of a choice, and bytes of each.
    pub(super) fn kept_slots(&self, choice: Choice) -> Result<(usize, usize)> {
        if choice.keeping.on_disk == 0 {
            return Ok((0, 0));
        }
        let (bytes, pieces) = self.kept_pieces(|block| choice.keeping.sends(block))?;
        Ok((choice.kept_slots.clamp(1, pieces.max(1)), bytes))
    }

    pub(super) fn add_kept_on_disk(
        &self,
        memory: &mut MemoryPlan,
        windows: &Windows,
        striping: &Striping,
    ) -> Result {
        let (slots, bytes) = windows.kept_slots;
        if slots == 0 {
            return Ok(());
        }
        memory.add(Tier::Host, "kept activations in flight", slots as u64, page(bytes));
        let (blocks, together) = (self.blocks()?, self.rounds().together);
        let tensors = blocks.iter().map(|cost| &cost.kept_tensors[..]);
        let on_disk = KeptAway::bytes_per_dir(windows.keeping, tensors, bytes, together, striping);
        add_disk(memory, "kept activations", striping, &on_disk);
        Ok(())
    }
}

impl EnginePlan {
    /// What blocks keep on disk, as planned.
    pub(crate) fn kept_away(
        &self,
        config: &EngineConfig,
        backend: &Backend,
        rounds: Rounds,
    ) -> Result<Option<KeptAway>> {
        let Windows { keeping, kept_slots, .. } = self.windows;
        if kept_slots.0 == 0 {
            return Ok(None);
        }
        let tensors = self.blocks.iter().map(|cost| &cost.kept_tensors[..]);
        let disks = (&backend.io, &config.striping()?);
        KeptAway::new(keeping, tensors, kept_slots, rounds.together, disks).map(Some)
    }
}
