//! `terrace export`: training state to a Hugging Face folder, without data and without training.

use super::args::ExportArgs;
use super::identity::Identity;
use super::{checks, finetune, print_json, shown, stored};
use crate::error::CliError;
use crate::progress::ByteProgress;
use serde_json::json;
use std::time::Instant;
use terrace_kernels::DType;
use terrace_models::{Model, export_folder};
use terrace_tiers::{Access, Commit, TierError};
use terrace_zero::{EngineError, ParamSpec, StoredWeights, WeightReader};

/// Runs the command.
///
/// # Errors
/// There is no state, it is in use, damaged or of another model, or the folder cannot be written.
pub fn export(args: &ExportArgs) -> Result<(), CliError> {
    let began = Instant::now();
    checks::model(&args.model)?;
    let config_text = finetune::read_config(&args.model)?;
    let model = Model::from_folder(&args.model).map_err(CliError::failed)?;
    let view = stored::open(&args.state, Access::Look)?;
    let commit = if args.previous { Commit::Previous } else { Commit::Last };
    let last = view.commit(Commit::Last).map(|facts| facts.step);
    let identity = Identity::of(view.spec());
    let dtype = identity.dtype(view.spec())?;
    let recoveries = view.recoveries().to_vec();
    let weights = StoredWeights::open(view, commit, model.blocks, dtype)?;
    identity.check_config(&args.model.join("config.json"), &config_text)?;
    identity.check_order(&model.config)?;
    checks::export_output(&args.output, &args.model)?;

    stored::say(&recoveries);
    let (step, parameters) = (weights.step(), weights.parameters());
    let total = parameters * dtype.size() as u64;
    let progress = ByteProgress::new(format!("writing step {step}"));
    let mut reader = Watched { weights, progress, done: 0, total };
    let result =
        export_folder(&mut reader, Some(&args.model), &args.output, args.max_shard_size.0, &config_text);
    reader.progress.finish();
    result.map_err(|error| match (error, last) {
        (EngineError::Tier(TierError::Damaged { path, detail }), Some(last)) if args.previous => {
            CliError::Failed(format!(
                "step {step} is no longer whole: in {}: {detail}. A step that is begun after a commit is written over the step \
                 before it; without --previous this exports step {last}",
                path.display()
            ))
        }
        (error, _) => error.into(),
    })?;
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("the model of step {step} is in {}", args.output.display());
    if !args.json {
        return Ok(());
    }
    print_json(&json!({
        "output": shown(&args.output),
        "step": step,
        "dtype": dtype.to_string(),
        "parameters": parameters,
        "bytes": total,
        "seconds": seconds,
        "state": stored::dirs(&args.state).iter().map(shown).collect::<Vec<_>>(),
    }))
}

/// Weights whose reading is shown.
struct Watched {
    weights: StoredWeights,
    progress: ByteProgress,
    done: u64,
    total: u64,
}

impl WeightReader for Watched {
    fn dtype(&self) -> DType {
        self.weights.dtype()
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.weights.params()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> terrace_zero::Result {
        self.weights.read(param, start, out)?;
        self.done += out.len() as u64;
        self.progress.set(self.done, self.total);
        Ok(())
    }
}
