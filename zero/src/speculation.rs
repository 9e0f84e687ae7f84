//! Updates that do not wait for the gradient's norm although it may change them.
//!
//! Clipping needs the norm of the whole gradient, which is known when backward ends. A deferred update (`overlap.rs`) then has only
//! the next forward for its reads and writes, and the disk is idle in backward. Most steps of most runs are not clipped, though. So
//! after some steps that were not, groups are updated beside backward as if this one would not be either, which is what is done without
//! clipping. Their gradients stay parked. When the norm is known and changes nothing, the update is the real one, whatever of it is
//! left is deferred, and the gradients are let go. Otherwise what was written is forgotten, the whole update is deferred, and the next
//! step does not speculate. Weights are the same bits either way. SuperOffload (arXiv 2509.21271) speculates so for state in host
//! memory, and takes the update back where it must; here the step before is still the live generation on disk, and there is nothing
//! to take back.
//!
//! Groups of which there are copies are left to the deferred update, since copies are updated where they are. Where they are most of
//! the state, nothing is done ahead: then their writes use the disk in backward.
//!
//! State whose saves alone are durable is overwritten from the second step after one on, so it waits for the norm.

use crate::cache::Caching;
use crate::engine::Engine;
use crate::gradients::GradientPark;
use crate::update::{ChunkAt, Items};
use crate::{Durability, EngineConfig, Placement, TrainingConfig};
use crossbeam::channel::Sender;
use std::collections::VecDeque;
use terrace_tiers::StoreSpec;

/// Steps without a clipped one after which the next is taken for another. An update in vain costs more than one that is kept saves, so
/// that a coin's tosses had better not be guessed.
const UNCLIPPED_MIN: u64 = 2;

/// Tells a thread that updates beside backward which chunks it can update.
pub(crate) struct Follower<'a> {
    pub(crate) spec: &'a StoreSpec,
    pub(crate) chunks: Sender<ChunkAt>,
    /// Which groups have copies, where the update may have to be done again.
    pub(crate) speculates: Option<&'a Caching>,
    /// Chunks whose gradients are complete, but still on their way down.
    landing: VecDeque<ChunkAt>,
    /// Chunks that wait for the norm.
    later: Vec<ChunkAt>,
}

impl<'a> Follower<'a> {
    pub(crate) fn new(spec: &'a StoreSpec, chunks: Sender<ChunkAt>, speculates: Option<&'a Caching>) -> Self {
        Self { spec, chunks, speculates, landing: VecDeque::new(), later: Vec::new() }
    }

    /// The gradient of a group is complete. Passes on every chunk that is in host memory or on disk.
    pub(crate) fn complete(&mut self, group: usize, park: &GradientPark) {
        let items = Items::of_group(self.spec, group);
        if self.speculates.is_some_and(|caching| caching.has_any(group)) {
            self.later.extend(items);
            return;
        }
        self.landing.extend(items);
        while let Some(&chunk) = self.landing.front().filter(|chunk| park.has(**chunk)) {
            // Whether it can still be heard of is found out when its thread is waited for.
            let _ = self.chunks.send(chunk);
            self.landing.pop_front();
        }
    }

    /// The thread ends when it has updated what it knows of. Gives what it was not told of.
    pub(crate) fn end(self) -> impl Iterator<Item = ChunkAt> {
        self.later.into_iter().chain(self.landing)
    }
}

impl Engine {
    /// Whether the update of this step runs beside backward as if its norm changed nothing. The same from its beginning until its norm
    /// is known.
    pub(crate) fn speculates(&self) -> bool {
        self.unclipped >= UNCLIPPED_MIN
            && may_speculate(&self.config, &self.plan.spec, &self.plan.windows.caching)
    }

    /// The norm is known, and changes nothing if `is_same`. Gives what is left of an update that ran beside backward and came to all
    /// but `left`, in order; `None` if all is still to be done, since there was none or it was in vain.
    pub(crate) fn validate(&self, is_same: bool, left: Vec<ChunkAt>) -> Option<Vec<ChunkAt>> {
        if !self.speculates() {
            return None;
        }
        let (park, stored) = (self.park.as_ref()?, self.home.stored()?);
        if !is_same {
            stored.store.abandon();
            return None;
        }
        let is_done = |chunk: &ChunkAt| left.binary_search(chunk).is_err();
        Items::all(&self.plan.spec, park).filter(is_done).for_each(|chunk| park.forget(chunk));
        Some(left)
    }
}

/// Whether steps of a plan speculate: with state in `spec`, of which there are the copies of `caching`.
pub(crate) fn may_speculate(config: &EngineConfig, spec: &StoreSpec, caching: &Caching) -> bool {
    let waits = config.training.as_ref().is_some_and(TrainingConfig::waits_for_norm);
    let can_be_done_again = config.placement == Placement::Disk && config.durability == Durability::Step;
    let elements = |copied: bool| -> u64 {
        let groups = spec.groups.iter().enumerate().filter(|(group, _)| caching.has_any(*group) == copied);
        groups.map(|(_, group)| group.elements).sum()
    };
    waits && can_be_done_again && config.overrides.overlap() && elements(true) < elements(false)
}
