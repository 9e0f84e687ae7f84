//! Memory that gradients and kept activations have in turns.

use super::{Choice, EnginePlan, LEAVING_MAX, Planner};
use crate::Result;
use crate::dry::DryCost;
use crate::state::store_spec;
use crate::turns::{Turns, gradient_bytes};

impl Planner<'_> {
    /// Whether blocks that keep have such memory: all gradients wait in host memory, where compute is, too.
    pub(super) fn is_in_turns(&self, choice: Choice) -> bool {
        let config = self.config;
        let waits = config.training.is_some() && !config.update_follows() && !choice.gradients_on_disk;
        waits && self.backend.device.unified()
    }

    /// `plan`, which is that of `choice`, or one in which all blocks keep, if `plan` does not fit and that takes less: memory that a
    /// block's gradient has anyway takes what it keeps, and no block has to recompute that elsewhere.
    pub(super) fn keep_where_it_saves(
        &self,
        choice: Choice,
        plan: EnginePlan,
        keepers: &[(usize, usize)],
    ) -> Result<(Choice, EnginePlan)> {
        let is_fixed = self.config.overrides.kept_blocks.is_some();
        if is_fixed || self.fits(&plan) || !self.is_in_turns(choice) {
            return Ok((choice, plan));
        }
        let choice_of_all =
            Choice { keeping: self.keeping(keepers, self.keep_at_most(choice, keepers), 0), ..choice };
        let plan_of_all = self.evaluate(choice_of_all, &plan.windows.caching)?;
        let saves = plan_of_all.bytes() < plan.bytes();
        Ok(if saves { (choice_of_all, plan_of_all) } else { (choice, plan) })
    }

    /// The most blocks that may keep.
    pub(super) fn keep_at_most(&self, choice: Choice, keepers: &[(usize, usize)]) -> usize {
        let wanted = self.config.keep_at_most.unwrap_or(usize::MAX).min(keepers.len());
        let keeping =
            |count| Choice { keeping: self.keeping(keepers, count, choice.keeping.counts.on_host), ..choice };
        let counts = (0..=wanted).rev();
        let is_few = |&count: &usize| self.leaving(keeping(count), keepers) <= LEAVING_MAX;
        counts.into_iter().find(is_few).unwrap_or(0)
    }

    /// Pairs of a block and a micro-batch that leave something in the arena.
    pub(super) fn leaving(&self, choice: Choice, keepers: &[(usize, usize)]) -> usize {
        if self.config.training.is_none() {
            return 0;
        }
        let rounds = self.rounds();
        let in_turns = |block: usize| self.is_in_turns(choice) && Turns::can(self.network, block, &rounds);
        let moves = |block| !self.backend.device.unified() && choice.keeping.sends(block);
        let stays = |block| choice.keeping.has(block) && !in_turns(block);
        let kept = keepers.iter().filter(|&&(block, _)| stays(block) || moves(block)).count();
        let signals = if choice.signals_stay { self.network.last() } else { 0 };
        kept.max(signals).saturating_mul(self.rounds().together)
    }

    /// Its bytes, by block, where planning runs found what blocks leave in it.
    pub(super) fn turn_bytes(&self, choice: Choice, cost: &DryCost) -> Vec<usize> {
        let spec = store_spec(self.config, self.state(), self.kinds, choice.chunk_elements);
        let gradient = |block| gradient_bytes(&spec, block, self.config.dtype.size());
        let bytes = |(block, &left): (usize, &usize)| if left == 0 { 0 } else { left.max(gradient(block)) };
        cost.left_bytes.iter().enumerate().map(bytes).collect()
    }

    /// Chunks of gradients that are parked there.
    pub(super) fn chunks_in_turns(&self, choice: Choice, turn_bytes: &[usize]) -> usize {
        let groups = self.state().groups.iter().zip(turn_bytes).filter(|(_, bytes)| **bytes > 0);
        groups.map(|(group, _)| group.elements.div_ceil(choice.chunk_elements)).sum()
    }
}
