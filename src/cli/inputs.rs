//! What the commands read before the engine starts: facts about the model, its tokenizer, the data.

use super::checks;
use crate::config::{TrainConfig, run};
use crate::data::{DataConfig, DataError, Dataset, Sampler, TextTokenizer};
use crate::error::{CliError, advice};
use std::path::{Path, PathBuf};
use terrace_models::{ModelConfig, parse_json};

/// What data and flags are checked against, from a model folder's `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFacts {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest sequence, if the config says.
    pub positions_max: Option<usize>,
}

impl ModelFacts {
    /// Reads them.
    ///
    /// # Errors
    /// There is no such folder, no `config.json` in it, or no `vocab_size` in that.
    pub fn read(model: &Path) -> Result<Self, CliError> {
        let path = model.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|e| {
            CliError::Usage(format!(
                "reading {}: {e}; --model takes a Hugging Face model folder",
                path.display()
            ))
        })?;
        let config = parse_json(&text).map_err(|e| {
            CliError::Usage(format!(
                "{}: the file is not JSON: {e}; correct it or download it again",
                path.display()
            ))
        })?;
        // What is wrong with the model otherwise is said when it is loaded.
        let model = ModelConfig::parse(&text).ok();
        // Of several names for one number the largest: what is stretched may say so under one of them alone.
        let number =
            |names: &[&str]| names.iter().filter_map(|name| config[name].as_u64()).max().map(|n| n as usize);
        let vocab_size = model.as_ref().map(|model| model.vocab).or_else(|| number(&["vocab_size"]));
        Ok(Self {
            vocab_size: vocab_size.filter(|&size| size > 0).ok_or_else(|| {
                CliError::Usage(format!(
                    "{}: `vocab_size` is missing; does the folder hold a language model?",
                    path.display()
                ))
            })?,
            // Scaling may stretch them.
            positions_max: model.map_or_else(
                || number(&["max_position_embeddings", "n_positions", "max_sequence_length"]),
                |model| Some(model.positions_max),
            ),
        })
    }
}

/// Training computes no dropout, no noise and no loss that balances experts: a model that has them would be trained with other numbers than
/// its configuration says.
///
/// # Errors
/// The model of the folder, or the `config.json`, at `path` has one of them.
pub fn trains_as_it_says(path: &Path, model: &ModelConfig) -> Result<(), CliError> {
    if model.only_in_training.is_empty() {
        return Ok(());
    }
    let parts: Vec<String> =
        model.only_in_training.iter().map(|(key, part)| format!("`{key}` is {part}")).collect();
    let (parts, them) = (parts.join(" and "), if parts.len() == 1 { "it" } else { "each" });
    Err(CliError::Usage(format!(
        "--model {}: {parts} in config.json, which is not computed in training; set {them} to 0.0 to train without",
        path.display()
    )))
}

/// Reads `data`, which `--data` names, for a model into `work_dir`.
///
/// # Errors
/// As [`Dataset::build`] and [`TextTokenizer::find`].
pub fn open_data(
    model: &Path,
    facts: ModelFacts,
    data: &Path,
    seq_len: usize,
    pack: bool,
    work_dir: &Path,
) -> Result<Dataset, CliError> {
    DataError::check_file(data).map_err(|error| match error {
        DataError::File { source, .. } => {
            CliError::Failed(format!("--data {}: {source}; {}", data.display(), advice(&source)))
        }
        other => CliError::Failed(format!("--data {other}")),
    })?;
    let tokenizer = TextTokenizer::find(model)?;
    let tokenizer_path = TextTokenizer::file_of(model);
    let config = DataConfig { seq_len, pack, vocab_size: facts.vocab_size, tokenizer_path };
    let data = Dataset::build(data, tokenizer.as_ref(), &config, work_dir)?;
    if let Some(warning) = data.warning() {
        eprintln!("warning: {warning}");
    }
    Ok(data)
}

/// Rows that are looked at before a run begins: a second's worth.
const ROWS_LOOKED_AT: u64 = 10_000_000;

/// A step all of whose rows carry no loss has no gradient, and would end the run that comes to it.
fn every_step_has_loss(
    run: &TrainConfig,
    data: &Dataset,
    sampler: &Sampler,
    steps: u64,
) -> Result<(), CliError> {
    if data.all_carry_loss() {
        return Ok(());
    }
    // Of what comes later, a step without any is refused when the run comes to it.
    let soon = steps.min(ROWS_LOOKED_AT / run.samples_per_step().max(1) as u64 + 1);
    match (0..soon).find(|step| !data.carries_loss(&sampler.batch_indices(*step))) {
        None => Ok(()),
        Some(step) => Err(CliError::Failed(format!(
            "--data {}: step {} would have nothing to learn from: every label of its {} rows is masked, or cut off at --seq-len {}. Remove \
             such rows ({} of {}), raise --seq-len, or take more rows a step (--batch-size, --grad-accum)",
            run.data.display(),
            step + 1,
            run.samples_per_step(),
            run.seq_len,
            data.summary().without_loss,
            data.len()
        ))),
    }
}

/// Everything that `terrace finetune` knows before the engine is built.
#[derive(Debug)]
pub struct FinetuneInputs {
    /// The run, resolved.
    pub run: TrainConfig,
    /// The data, tokenised.
    pub data: Dataset,
    /// Which samples a step takes.
    pub sampler: Sampler,
    /// Optimizer steps of the whole run.
    pub steps: u64,
    /// Where `metrics.jsonl` goes.
    pub metrics: PathBuf,
}

impl FinetuneInputs {
    /// Resolves the run and reads the data.
    ///
    /// # Errors
    /// A setting, the model's config or the data is refused.
    pub fn load(args: &super::args::FinetuneArgs) -> Result<Self, CliError> {
        Self::load_after(args, |_| Ok(()))
    }

    /// As [`load`](Self::load), with a last word on the run before its data is read, which may take long.
    ///
    /// # Errors
    /// As [`load`](Self::load), or what `check` refuses.
    pub fn load_after(
        args: &super::args::FinetuneArgs,
        check: impl FnOnce(&TrainConfig) -> Result<(), CliError>,
    ) -> Result<Self, CliError> {
        let facts = ModelFacts::read(&args.model)?;
        let run = TrainConfig::resolve(args, facts.positions_max)?;
        checks::disks(&run.disks)?;
        let metrics = run.output.join("metrics.jsonl");
        for (flag, path) in [("--trace", &run.trace), ("--save-plan", &run.save_plan)] {
            let Some(path) = path else { continue };
            checks::file(flag, path)?;
            if std::path::absolute(path).ok() == std::path::absolute(&metrics).ok() {
                let path = path.display();
                return Err(CliError::Usage(format!(
                    "{flag} {path} is where the run writes its metrics; give another file"
                )));
            }
        }
        check(&run)?;
        let work_dir = run::default_disk(&run.output);
        let data = open_data(&run.model, facts, &run.data, run.seq_len, run.pack, &work_dir)?;
        let sampler = Sampler::new(data.len(), run.samples_per_step(), run.seed, run.shuffle);
        let steps = run.total_steps(data.len());
        run.check_schedule(steps)?;
        every_step_has_loss(&run, &data, &sampler, steps)?;
        Ok(Self { run, data, sampler, steps, metrics })
    }
}
