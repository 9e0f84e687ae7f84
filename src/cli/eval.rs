//! `terrace eval`: the mean negative log-likelihood of a data set.

use super::args::EvalArgs;
use super::frozen_knobs::{FrozenKnobs, Number};
use super::generate::{Frozen, frozen_config};
use super::inputs::{ModelFacts, open_data};
use super::session::{self, Session};
use super::{checks, print_json, print_text};
use crate::config::run;
use crate::data::Dataset;
use crate::error::CliError;
use crate::interrupt::Interrupt;
use serde_json::json;
use std::num::NonZeroUsize;
use terrace_models::{ModelConfig, Row, TokenBatch};
use terrace_zero::{BatchLimits, Engine, Evaluation};

/// Runs the command.
///
/// # Errors
/// A setting, the model, the data or a tier is refused.
pub fn eval(args: &EvalArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    checks::disks(&args.placement.disk)?;
    args.trace.iter().try_for_each(|path| checks::file("--trace", path))?;
    checks::model(&args.model)?;
    let model = ModelConfig::from_folder(&args.model).map_err(CliError::failed)?;
    let profile = session::disk_profile(&args.placement, threads)?;
    let io = session::io_config(profile.as_ref());
    let session = Session::open(&args.placement, &io, threads, args.trace.is_some())?;
    let facts = ModelFacts::read(&args.model)?;
    let seq_len = run::seq_len(args.seq_len.map(NonZeroUsize::get), facts.positions_max)?;
    let work_dir = tempdir()?;
    let data = open_data(&args.model, facts, &args.data, seq_len, args.pack, work_dir.path())?;
    let batch = args.batch_size.get().min(data.len());
    run::micro_batch(batch, seq_len, false)?;
    let builder = TokenBatch::for_model(&args.model, &model).map_err(CliError::failed)?;
    let limits = |sequences: usize, length: usize| BatchLimits {
        sequences,
        length,
        micro_batches: 1,
        cache_length: 0,
        cache_pages: 0,
    };
    let dtype = session::dtype(args.dtype.unwrap_or_default());
    let config = frozen_config(&args.placement, dtype, &session, limits(batch, seq_len));
    let numbers: [Number<'_>; 2] = [
        ("--batch-size", batch, &|batch| limits(batch, seq_len)),
        ("--seq-len", seq_len, &|seq_len| limits(batch, seq_len)),
    ];
    let knobs = FrozenKnobs {
        backend: &session.backend,
        model: &model,
        weights: args.weights,
        kv: None,
        numbers: &numbers,
    };
    let mut frozen = Frozen::open(
        config,
        &args.placement,
        profile.as_ref(),
        &session,
        &args.model,
        &builder.shape(batch, seq_len),
        knobs,
    )?;
    let total = evaluate(frozen.engine(), &builder, &data, batch, seq_len);
    let traced = frozen.trace(args.trace.as_deref(), &session, None);
    let closed = frozen.close();
    let total = total?;
    if total.loss_terms == 0 {
        return Err(CliError::Failed(format!("{}: no token carries loss", args.data.display())));
    }
    let nll = total.loss_sum / total.loss_terms as f64;
    if nll.is_nan() {
        let reason = "the model's loss is not a number; try --dtype fp32, and check the weights";
        return Err(CliError::Failed(format!("{}: {reason}", args.model.display())));
    }
    let document = json!({ "nll": nll, "perplexity": nll.exp(), "tokens": total.loss_terms });
    if args.json {
        print_json(&document)?;
    } else {
        print_text(&format!("nll {nll:.4} · perplexity {:.3} · {} tokens", nll.exp(), total.loss_terms))?;
    }
    closed.and(traced)
}

/// Evaluates all samples, `batch` at once; the user may stop it after any batch.
fn evaluate(
    engine: &mut Engine,
    builder: &TokenBatch,
    data: &Dataset,
    batch: usize,
    seq_len: usize,
) -> Result<Evaluation, CliError> {
    let interrupt = Interrupt::listen();
    let mut total = Evaluation::default();
    for first in (0..data.len()).step_by(batch) {
        if interrupt.requested() {
            return Err(CliError::Stopped);
        }
        let indices: Vec<usize> = (first..data.len().min(first + batch)).collect();
        let samples = data.samples(&indices)?;
        let rows: Vec<Row<'_>> = samples.iter().map(|s| Row { ids: &s.ids, labels: &s.labels }).collect();
        let batch = builder.train(&rows, batch, seq_len).map_err(CliError::failed)?;
        let part = engine.evaluate(&batch)?;
        total.loss_sum += part.loss_sum;
        total.loss_terms += part.loss_terms;
    }
    Ok(total)
}

/// A directory for the tokens of this run, removed when dropped.
struct WorkDir(std::path::PathBuf);

fn tempdir() -> Result<WorkDir, CliError> {
    let (folder, process) = (std::env::temp_dir(), std::process::id());
    // Containers may share the folder, and have processes of the same number.
    for attempt in 0_u32.. {
        let path = folder.join(format!("terrace-eval-{process}-{attempt}"));
        match std::fs::create_dir(&path) {
            Ok(()) => return Ok(WorkDir(path)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(CliError::Failed(format!("creating {}: {error}", path.display()))),
        }
    }
    unreachable!("folders do not have as many names as there are numbers")
}

impl WorkDir {
    fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // Only tokens that this process made; a leftover in the temporary directory does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
