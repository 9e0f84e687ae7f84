//! Updates that do not wait for the gradient's norm although it may change them.
//!
//! Clipping needs the norm of the whole gradient, which is known when backward ends. A deferred update (`overlap.rs`) then has only
//! the next forward for its reads and writes, and the disk is idle in backward. Most steps of most runs are not clipped, though. So
//! after some steps that were not, groups are updated beside backward as if this one would not be either, which is what is done without
//! clipping. Their gradients stay parked. When the norm is known and changes nothing, the update is the real one, whatever of it is
//! left is deferred, and the gradients are let go. Otherwise what was written is forgotten, the whole update is deferred, and the next
//! steps do not speculate. Weights are the same bits either way. SuperOffload (arXiv 2509.21271) speculates so for state in host
//! memory, and takes the update back where it must; here the step before is still the live generation on disk, and there is nothing
//! to take back.
//!
//! Groups of which all state is copied are left to the deferred update, since copies are updated where they are. Where they are a quarter
//! of the state or more, nothing is done ahead: then their writes use the disk in backward, and nothing would be gained. Of the other groups some have copies of
//! their weights, which are read again after an update in vain.
//!
//! State whose saves alone are durable is overwritten from the second step after one on, so it waits for the norm.

use crate::cache::Caching;
use crate::engine::Engine;
use crate::update::{ChunkAt, Items};
use crate::{Durability, EngineConfig, Placement, Result, StepReport, TrainingConfig};
use terrace_tiers::StoreSpec;

/// Steps without a clipped one after which the next is taken for another. An update in vain costs more than one that is kept saves, so
/// that a coin's tosses had better not be guessed.
const UNCLIPPED_MIN: u64 = 2;

impl Engine {
    /// Whether the update of this step runs beside backward as if its norm changed nothing. The same from its beginning until its norm
    /// is known.
    pub(crate) fn speculates(&self) -> bool {
        self.unclipped >= UNCLIPPED_MIN
            && may_speculate(&self.config, &self.plan.spec, &self.plan.windows.caching)
    }

    /// The norm is known, and changes nothing if `is_same`; `report` hears whether that was speculated on. Gives what is left of an update that ran beside backward and came to all
    /// but `left`, in order; `None` if all is still to be done, since there was none or it was in vain.
    ///
    /// # Errors
    /// A copy cannot be read.
    pub(crate) fn validate(
        &self,
        is_same: bool,
        left: Vec<ChunkAt>,
        report: &mut StepReport,
    ) -> Result<Option<Vec<ChunkAt>>> {
        let (Some(park), Some(stored), true) = (&self.park, self.home.stored(), self.speculates()) else {
            return Ok(None);
        };
        report.speculated = Some(is_same);
        let done = Items::all(&self.plan.spec, park).filter(|chunk| left.binary_search(chunk).is_err());
        if is_same {
            done.for_each(|chunk| park.forget(chunk));
            return Ok(Some(left));
        }
        stored.store.abandon();
        let mut groups: Vec<usize> = done.map(|chunk| chunk.0).collect();
        groups.dedup();
        stored.cache.read(&stored.store, &self.kinds, &self.update_slots, groups.into_iter())?;
        Ok(None)
    }
}

/// Whether steps of a plan speculate: with state in `spec`, of which there are the copies of `caching`.
pub(crate) fn may_speculate(config: &EngineConfig, spec: &StoreSpec, caching: &Caching) -> bool {
    let waits = config.training.as_ref().is_some_and(TrainingConfig::waits_for_norm);
    let can_be_done_again = config.placement == Placement::Disk && config.durability == Durability::Step;
    let elements = |copied: bool| -> u64 {
        let groups = spec.groups.iter().enumerate().filter(|(group, _)| caching.has_all(*group) == copied);
        groups.map(|(_, group)| group.elements).sum()
    };
    waits && can_be_done_again && config.overrides.overlap() && elements(true) * 3 < elements(false)
}
