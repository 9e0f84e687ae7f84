//! What `--save-every` asks for: model folders of steps on the way, written beside the steps that follow.

use super::floor::{Summary, time};
use super::retention;
use crate::config::TrainConfig;
use crate::error::CliError;
use crate::progress::Progress;
use std::path::PathBuf;
use std::time::Instant;
use terrace_models::{export_folder, holds_weights, remove_weights};
use terrace_zero::{Engine, EngineError, Exporting};

/// Where the model of a step goes.
fn folder(run: &TrainConfig, step: u64) -> PathBuf {
    run.output.join(format!("checkpoint-{step}"))
}

/// Whether the model of a step was saved, as a whole: what names its weights comes last.
pub(super) fn is_there(run: &TrainConfig, step: u64) -> bool {
    holds_weights(&folder(run, step))
}

/// Removes the weights that an earlier run left where those of a step will go: before the step is committed, so that who resumes it does not
/// find them there.
pub(super) fn make_way(run: &TrainConfig, step: u64) -> Result<(), CliError> {
    remove_weights(&folder(run, step)).map_err(CliError::failed)
}

/// A save that is being written.
pub(super) struct Saving {
    step: u64,
    folder: PathBuf,
    export: Exporting<Result<(), EngineError>>,
    began: Instant,
    /// How long training waited for it so far.
    waited: f64,
}

impl Saving {
    /// Begins to save the last step. `config_text` is that of the model's `config.json`.
    pub(super) fn begin(engine: &mut Engine, run: &TrainConfig, config_text: &str) -> Result<Self, CliError> {
        let (began, step) = (Instant::now(), engine.step());
        let folder = folder(run, step);
        let (model, shard, config) = (run.model.clone(), run.max_shard_size.0, config_text.to_owned());
        let out = folder.clone();
        let export = engine
            .export_beside(move |weights| export_folder(weights, Some(&model), &out, shard, &config))?;
        Ok(Self { step, folder, export, began, waited: began.elapsed().as_secs_f64() })
    }

    /// Whether nothing is left to wait for.
    pub(super) fn is_finished(&mut self) -> bool {
        self.export.is_finished()
    }

    /// Waits for its end, says so, and removes saves that are too many.
    pub(super) fn finish(
        self,
        engine: &mut Engine,
        run: &TrainConfig,
        progress: &mut Progress,
        summary: &mut Summary,
    ) -> Result<(), CliError> {
        let Self { step, folder, export, began, waited } = self;
        let waiting = Instant::now();
        let written = export.wait();
        engine.finish_save().map_err(|error| {
            CliError::Failed(format!(
                "{} was not written, since its step was not saved: {error}",
                folder.display()
            ))
        })?;
        let Some(written) = written else {
            let folder = folder.display();
            return Err(CliError::Failed(format!(
                "{folder} was not written: its step was never committed, or no thread could be started for it. What was committed last can be \
                 written by `terrace export`"
            )));
        };
        written.map_err(|error| {
            let folder = folder.display();
            CliError::Failed(format!(
                "{folder} was not written: {error}. Steps that follow leave it out: what was committed last can be written by `terrace \
                 export`"
            ))
        })?;
        summary.add_save(waited + waiting.elapsed().as_secs_f64());
        progress.note(&format!("saved {} in {}", folder.display(), time(began.elapsed().as_secs_f64())));
        if let Some(limit) = run.save_total_limit {
            match retention::prune(&run.output, step, limit) {
                Ok(removed) => retention::say_removed(&removed, progress),
                // What is too much is no reason to end a run.
                Err(error) => progress.note(&format!("warning: {error}")),
            }
        }
        Ok(())
    }
}
