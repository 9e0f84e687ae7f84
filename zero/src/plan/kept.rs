//! Which blocks leave what backward would recompute, and where that is until then.

use super::{Choice, EnginePlan, LEAVING_MAX, Planner, Windows, add_disk, page};
use crate::kept::{KeepCounts, Keeping, KeptAway, KeptSlots, chunks, slot_bytes};
use crate::rounds::Rounds;
use crate::{Backend, EngineConfig, Placement, Result};
use terrace_tiers::{MemoryPlan, Striping, Tier};

/// Most planning runs in search of the number of blocks that keep. The first tries all blocks; what the arena takes grows by
/// nearly the same for each, so that two more mostly find the number.
const KEEPING_TRIES: usize = 8;

/// Quarters of what a block leaves for a micro-batch for which there are leases on the way to disk and back, if blocks keep there. With all of
/// it nobody waits whom the disk does not hold up.
const QUARTERS: [usize; 3] = [4, 2, 1];
/// The same on a device with its own memory, where all of a pair is copied at once. With twice as many the next one is read meanwhile.
const QUARTERS_OF_A_DEVICE: [usize; 2] = [8, 4];

impl Planner<'_> {
    /// Raises the number of blocks that keep in the arena to the most that fits beside the windows of `choice`, unless it is fixed. `plan` is
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
        let on_host = choice.keeping.counts.on_host;
        // Some number from `plan`'s up to below `too_many` is the one.
        let most = self.keep_at_most(choice, keepers);
        let (mut too_many, mut tried) = (most + 1, most);
        for _ in 0..KEEPING_TRIES {
            let fitting = plan.windows.keeping.counts.here;
            if fitting + 1 >= too_many {
                break;
            }
            let keeping = self.keeping(keepers, tried.max(fitting + 1), on_host);
            let more = self.evaluate(Choice { keeping, ..choice }, &plan.windows.caching)?;
            let blocks = more.windows.keeping.counts.here - fitting;
            let bytes = more.memory.total(tier).saturating_sub(plan.memory.total(tier));
            if self.fits(&more) {
                plan = more;
            } else {
                too_many = more.windows.keeping.counts.here;
            }
            let room = self.room(tier, &plan);
            let fit = room.saturating_mul(blocks as u64) / bytes.max(1);
            tried = (plan.windows.keeping.counts.here + fit.min(1 << 32) as usize).min(too_many - 1);
        }
        Ok(plan)
    }

    /// Lowers the number of blocks that keep in the host's memory to what fits, unless it is fixed. `plan` is that of `choice`. Those that
    /// go to disk instead have leases on their way, so that it may take more than one try.
    pub(super) fn hold_on_host_what_fits(
        &self,
        mut choice: Choice,
        mut plan: EnginePlan,
        keepers: &[(usize, usize)],
    ) -> Result<(Choice, EnginePlan)> {
        loop {
            let KeepCounts { here, on_host, .. } = choice.keeping.counts;
            let excess = plan.memory.total(Tier::Host).saturating_sub(self.config.host_budget);
            if self.config.overrides.kept_on_host.is_some() || on_host == 0 || excess == 0 {
                return Ok((choice, plan));
            }
            let slots = plan.windows.kept_slots;
            let too_many = excess.div_ceil(page(slots.bytes) * self.ranks().per_node() as u64);
            let with = |on_host| self.keeping(keepers, here, on_host);
            let fits = |&on_host: &usize| {
                let fewer = self.slots_on_host(with(on_host), slots.bytes);
                fewer.is_ok_and(|fewer| (slots.on_host - fewer) as u64 >= too_many)
            };
            let fewer = (0..on_host).rev().find(fits).unwrap_or(0);
            choice.keeping = with(fewer);
            plan = self.evaluate(choice, &plan.windows.caching)?;
        }
    }

    /// The blocks that can leave something for backward, in order, and the bytes that each leaves.
    pub(super) fn keepers(&self) -> Result<Vec<(usize, usize)>> {
        let blocks = self.blocks()?;
        Ok(blocks.iter().enumerate().filter_map(|(block, cost)| Some((block, cost.kept_bytes?))).collect())
    }

    /// The last `here` of `keepers` in the arena, `on_host` before them in the host's memory, and before those on disk what is to be there.
    pub(super) fn keeping(&self, keepers: &[(usize, usize)], here: usize, on_host: usize) -> Keeping {
        let (config, unified) = (self.config, self.backend.device.unified());
        // A block that waits for the last round would leave something in each of them.
        let waits = keepers.first().is_some_and(|&(block, _)| self.rounds().waits(block));
        let mut fit = if waits { (keepers.len() - 1).saturating_sub(here) } else { usize::MAX };
        let others = keepers.len().saturating_sub(here);
        let on_host = if config.training.is_some() && !unified { on_host.min(fit).min(others) } else { 0 };
        fit -= on_host;
        let on_disk = self.most_on_disk().min(fit);
        Keeping::last(keepers, KeepCounts { here, on_host, on_disk })
    }

    /// Most blocks that keep in the host's memory: no more than planning runs can go through, where it is not fixed.
    pub(super) fn most_on_host(&self) -> usize {
        // Where everything is on the device, the host has nothing.
        let may = self.config.placement != Placement::None;
        let most = if may { self.config.keep_on_host } else { 0 };
        self.config.overrides.kept_on_host.unwrap_or(most.min(self.most_that_move()))
    }

    /// Most blocks that keep on disk.
    fn most_on_disk(&self) -> usize {
        if self.config.training.is_none() || self.config.placement != Placement::Disk {
            return 0;
        }
        let unified = self.backend.device.unified();
        let most = if unified { usize::MAX } else { self.most_that_move() };
        self.config.overrides.kept_on_disk.unwrap_or(self.config.keep_on_disk.min(most))
    }

    /// Blocks of which a planning run goes through every micro-batch, where half may have to be left to others.
    fn most_that_move(&self) -> usize {
        LEAVING_MAX / 2 / self.rounds().together.max(1)
    }

    /// Bytes of a lease for what the blocks that are meant leave for a micro-batch.
    fn kept_slot_bytes(&self, of: impl Fn(usize) -> bool) -> Result<usize> {
        let blocks = self.blocks()?;
        let meant = blocks.iter().enumerate().filter(|(block, _)| of(*block));
        Ok(slot_bytes(meant.map(|(_, cost)| cost.kept_tensors.iter().sum()).max().unwrap_or(0)))
    }

    /// Pieces that each of the blocks that are meant leaves for a micro-batch.
    fn kept_pieces(&self, slot_bytes: usize, of: impl Fn(usize) -> bool) -> Result<Vec<usize>> {
        let blocks = self.blocks()?;
        let meant = blocks.iter().enumerate().filter(|(block, _)| of(*block));
        Ok(meant.map(|(_, cost)| chunks(&cost.kept_tensors, slot_bytes)).collect())
    }

    /// Numbers of leases for what blocks keep on disk, roomy first.
    pub(super) fn kept_slot_choices(&self) -> Result<Vec<usize>> {
        if let Some(slots) = self.config.overrides.kept_slots {
            return Ok(vec![slots]);
        }
        if self.most_on_disk() == 0 {
            return Ok(vec![0]);
        }
        // Of whichever blocks these will be.
        let all = |_| true;
        let pieces = self.kept_pieces(self.kept_slot_bytes(all)?, all)?.into_iter().max().unwrap_or(0);
        let quarters: &[usize] =
            if self.backend.device.unified() { &QUARTERS } else { &QUARTERS_OF_A_DEVICE };
        Ok(quarters.iter().map(|quarters| (pieces * quarters).div_ceil(4).max(1)).collect())
    }

    /// Leases of a choice.
    pub(super) fn kept_slots(&self, choice: Choice) -> Result<KeptSlots> {
        let keeping = choice.keeping;
        if keeping.counts.on_disk + keeping.counts.on_host == 0 {
            return Ok(KeptSlots::default());
        }
        let bytes = self.kept_slot_bytes(|block| keeping.sends(block))?;
        let of_disk = self.kept_pieces(bytes, |block| keeping.sends_to_disk(block))?;
        let pieces = of_disk.into_iter().max().unwrap_or(0);
        let (least, most) =
            if self.backend.device.unified() { (pieces.min(1), pieces) } else { (pieces, 2 * pieces) };
        let in_flight = choice.kept_slots.clamp(least, most);
        Ok(KeptSlots { in_flight, on_host: self.slots_on_host(keeping, bytes)?, bytes })
    }

    fn slots_on_host(&self, keeping: Keeping, slot_bytes: usize) -> Result<usize> {
        let pieces = self.kept_pieces(slot_bytes, |block| keeping.sends_to_host(block))?;
        Ok(pieces.into_iter().sum::<usize>() * self.rounds().together)
    }

    pub(super) fn add_kept_away(&self, memory: &mut MemoryPlan, windows: &Windows) -> Result {
        let KeptSlots { in_flight, on_host, bytes } = windows.kept_slots;
        memory.add(Tier::Host, "kept activations", on_host as u64, page(bytes));
        memory.add(Tier::Host, "kept activations in flight", in_flight as u64, page(bytes));
        if in_flight > 0 {
            let (blocks, together) = (self.blocks()?, self.rounds().together);
            let tensors = blocks.iter().map(|cost| &cost.kept_tensors[..]);
            let striping = self.config.striping()?;
            let on_disk = KeptAway::bytes_per_dir(windows.keeping, tensors, bytes, together, &striping);
            add_disk(memory, "kept activations", &striping, &on_disk);
        }
        Ok(())
    }
}

impl EnginePlan {
    /// What blocks keep elsewhere than in the arena, as planned.
    pub(crate) fn kept_away(
        &self,
        config: &EngineConfig,
        backend: &Backend,
        rounds: Rounds,
    ) -> Result<Option<KeptAway>> {
        let Windows { keeping, kept_slots, .. } = self.windows;
        if kept_slots == KeptSlots::default() {
            return Ok(None);
        }
        let striping: Option<Striping> =
            if kept_slots.in_flight > 0 { Some(config.striping()?) } else { None };
        let disks = striping.as_ref().map(|striping| (&backend.io, striping));
        let tensors = self.blocks.iter().map(|cost| &cost.kept_tensors[..]);
        KeptAway::new(keeping, tensors, kept_slots, rounds.together, &*backend.device, disks).map(Some)
    }
}
