//! Rounds: which micro-batches of a step go through the blocks together.
//!
//! *Vertical* accumulation is one round of all, so that weights travel twice a step. *Horizontal* accumulation is a round for each:
//! activations of one micro-batch are in memory, and weights travel twice for each. What a round has added to a gradient is parked
//! in f32 until the next one goes on from there (`Engine::sums`), so that every element is summed over micro-batches 0, 1, …, M−1
//! either way, and not rounded in between: the numbers are the same bits.
//!
//! Parameters that two blocks use (tied embeddings) need more for that. The vertical order adds all of what the later block
//! gives, rounds it, and adds all of what the earlier block gives. So the earlier one, which must be block 0, *waits*: its
//! backward runs once, after the last round, on gradients of signals that each round left in host memory.

use crate::network::Network;
use crate::{Accumulation, BatchLimits, EngineError, Result};
use std::ops::Range;

/// The rounds of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rounds {
    micro_batches: usize,
    /// Micro-batches of a round.
    pub(crate) together: usize,
    first_waits: bool,
}

impl Rounds {
    pub(crate) fn new(accumulation: Accumulation, limits: BatchLimits, network: &Network) -> Self {
        let micro_batches = limits.micro_batches;
        let several = accumulation == Accumulation::Horizontal && micro_batches > 1;
        Self {
            micro_batches,
            together: if several { 1 } else { micro_batches },
            first_waits: several && network.is_shared(0),
        }
    }

    /// One round of all.
    #[cfg(test)]
    pub(crate) fn vertical(micro_batches: usize) -> Self {
        Self { micro_batches, together: micro_batches, first_waits: false }
    }

    /// Refuses a network whose gradients only vertical accumulation sums in the right order.
    pub(crate) fn check(&self, network: &Network) -> Result {
        let users =
            |group: usize| (0..=network.last()).filter(|&b| network.groups_of(b).contains(&group)).count();
        let unfit = (0..network.groups.len()).find(|&group| {
            let most = if group == 0 { 2 } else { 1 };
            users(group) > most
        });
        match unfit.filter(|_| self.are_several()) {
            None => Ok(()),
            Some(group) => Err(EngineError::Config(format!(
                "horizontal accumulation cannot sum the gradients of block {}, whose parameters {} blocks use: it can for those of the \
                 first block, shared with one other. Accumulate vertically",
                network.groups[group].name,
                users(group)
            ))),
        }
    }

    pub(crate) fn are_several(&self) -> bool {
        self.together < self.micro_batches
    }

    /// Of all rounds.
    pub(crate) fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// The micro-batches of every round, in order.
    pub(crate) fn all(self) -> impl Iterator<Item = Range<usize>> {
        (0..self.micro_batches).step_by(self.together.max(1)).map(move |start| start..start + self.together)
    }

    pub(crate) fn is_last(&self, round: &Range<usize>) -> bool {
        round.end == self.micro_batches
    }

    /// Whether the backward of `block` runs once, after the last round.
    pub(crate) fn waits(&self, block: usize) -> bool {
        block == 0 && self.first_waits
    }

    /// Signals that wait for it while the last round runs.
    pub(crate) fn waiting(&self) -> usize {
        if self.first_waits { self.micro_batches - 1 } else { 0 }
    }

    /// The micro-batches that go through the backward of `block` in `round`.
    pub(crate) fn backward_of(&self, block: usize, round: &Range<usize>) -> Range<usize> {
        if self.waits(block) { 0..self.micro_batches } else { round.clone() }
    }

    /// The groups in the order in which a step uses them.
    pub(crate) fn order(self, network: &Network) -> Vec<usize> {
        let blocks = self.all().flat_map(|round| {
            let lowest = usize::from(self.first_waits && !self.is_last(&round));
            (0..network.last()).chain((lowest..=network.last()).rev())
        });
        blocks.flat_map(|block| network.groups_of(block)).collect()
    }
}
