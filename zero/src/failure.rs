//! What a step that fails leaves behind.
//!
//! Where a step is committed it goes to another generation than the last, so a failure goes back to the last commit, whatever failed.
//! State that is kept once ([`Durability::None`](crate::Durability::None)) has no other generation: what failed after its first write
//! since the last save leaves no step, and the engine says so and is of no more use. Only a step that *diverged* is known to have
//! written nothing, as long as its update waits for the norm; it leaves the state of the step before, which can be saved, also where the
//! last commit is some steps behind ([`Durability::Checkpoint`](crate::Durability::Checkpoint)).

use crate::EngineError;
use crate::engine::{Engine, Signals};
use crate::gradients::GradientPark;
use crate::kept::KeptAway;
use crate::scale::LossScale;
use crate::state::StateHome;

impl Engine {
    /// Gives up a step that failed: its writes are waited for and forgotten. The step is that of the state again. Gives the error,
    /// with what it means for state that is kept once.
    pub(crate) fn give_up(&mut self, error: EngineError) -> EngineError {
        let mut lost = None;
        if let StateHome::Disk(stored) = &mut self.home {
            // What failed is why the step is given up, or was found beside that.
            let _ = stored.end_save();
            stored.store.abandon();
            stored.after_commit().clear();
            stored.outdated = true;
            self.unsaved = None;
            let committed = stored.store.committed();
            self.step = committed.step;
            // What this engine committed, it can read.
            if let Ok(scale) = LossScale::committed(&self.config, committed.step, &committed.trainer) {
                self.loss_scale = scale;
            }
            lost = stored.store.require_whole().err();
        }
        self.forget_step();
        match lost {
            None => error,
            Some(lost) => EngineError::Lost { cause: Box::new(error), lost },
        }
    }

    /// As [`give_up`](Self::give_up), for a step of which nothing was updated if it diverged: state that no step commits stays as the step
    /// before left it.
    pub(crate) fn give_up_before_update(&mut self, error: EngineError) -> EngineError {
        if !self.config.commits_at_saves() || !matches!(error, EngineError::Diverged(_)) {
            return self.give_up(error);
        }
        self.forget_step();
        error
    }

    /// Forgets what a step has in memory beside state.
    fn forget_step(&mut self) {
        // Its gradients are gone.
        self.pending = None;
        self.device_weights.outdate();
        self.update_slots.forget_ahead();
        self.park.iter().chain(&self.sums).for_each(GradientPark::clear);
        if let Signals::Training(activations) = &mut self.signals {
            activations.clear();
        }
        self.kept_away.iter_mut().for_each(KeptAway::clear);
    }

    /// The error of a step whose gradient is not finite.
    pub(crate) fn norm_not_finite(&self) -> EngineError {
        let safe = match self.home.disk() {
            // Groups were updated beside backward.
            Some(store) if self.config.update_follows() => {
                (!self.config.keeps_once()).then(|| store.committed().step)
            }
            _ => Some(self.step),
        };
        not_finite("gradient norm", self.step + 1, self.updates() == 0, safe)
    }

    /// The error of a step whose scaled gradient overflowed, where a lower scale is no help: the loss, which no scale changes, is not finite
    /// with the weights that the run began with. Later the weights of one bad update would look the same, and such steps are skipped.
    pub(crate) fn overflow_without_end(&self, loss: f64) -> Option<EngineError> {
        let is_first = self.updates() == 0;
        (is_first && !loss.is_finite()).then(|| not_finite("loss", self.step + 1, is_first, Some(self.step)))
    }
}

/// `is_first` if nothing was updated before the step, and `safe` is the step that the error goes back to, if that is known.
pub(crate) fn not_finite(what: &str, step: u64, is_first: bool, safe: Option<u64>) -> EngineError {
    let still = safe.map_or_else(String::new, |safe| format!("; the state is still that of step {safe}"));
    let advice = if is_first {
        "Nothing was updated before it: look for broken weights in the model's folder, not numbers or too large for EngineConfig::dtype, and for broken \
         rows in the data"
    } else {
        "Lower the learning rate, clip gradients (TrainingConfig::clip 1.0) or look for broken rows in the data"
    };
    EngineError::Diverged(format!("the {what} of step {step} is not finite{still}. {advice}"))
}
