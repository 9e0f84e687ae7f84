//! `terrace generate`: continues prompts with a model whose weights are resident or stream from disk.

use super::args::{GenerateArgs, KvTier, Offload, PlacementArgs};
use super::finetune::all_params;
use super::inputs::ModelFacts;
use super::session::{self, Session};
use super::{checks, print_json, print_text};
use crate::data::TextTokenizer;
use crate::error::CliError;
use crate::generate::{Continuation, Prompt, SamplingConfig, TokenSampler, read_prompts, stop_ids};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Instant;
use terrace_aio::profile::DiskProfile;
use terrace_kernels::QuantFormat;
use terrace_models::{Model, ModelConfig, SafetensorsSource, TokenBatch};
use terrace_zero::{
    Accumulation, BatchLimits, Durability, Engine, EngineConfig, EngineError, MicroBatch, Placement,
    WindowOverrides,
};

/// Runs the command.
///
/// # Errors
/// A setting, the model, a prompt or a tier is refused.
pub fn generate(args: &GenerateArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let continuations = continue_prompts(args, threads)?;
    if args.json {
        return print_json(&continuations);
    }
    for continuation in &continuations {
        match &continuation.text {
            Some(text) => print_text(text)?,
            None => print_text(&format!("{:?}", continuation.ids))?,
        }
    }
    Ok(())
}

/// Continues every prompt.
///
/// # Errors
/// As [`generate`].
pub fn continue_prompts(
    args: &GenerateArgs,
    threads: Option<NonZeroUsize>,
) -> Result<Vec<Continuation>, CliError> {
    refuse_unavailable(args)?;
    checks::disks(&args.placement.disk)?;
    checks::model(&args.model)?;
    let weights = session::quant_format(args.weights);
    let model = Model::from_folder(&args.model).map_err(CliError::failed)?;
    let facts = ModelFacts::read(&args.model)?;
    let profile = session::disk_profile(&args.placement, threads)?;
    let session = Session::open(&args.placement, &session::io_config(profile.as_ref()), threads, false)?;
    let tokenizer = TextTokenizer::find(&args.model)?;
    let prompts = match (&args.prompt, &args.prompt_ids, &args.prompts) {
        (Some(text), _, _) => vec![Prompt::Text(text.clone())],
        (_, Some(ids), _) => vec![Prompt::Ids(ids.clone())],
        (_, _, Some(file)) => read_prompts(file)?,
        (None, None, None) => return Err(CliError::Usage("give --prompt, --prompt-ids or --prompts".into())),
    };
    let prompts = prompts
        .iter()
        .map(|p| p.ids(tokenizer.as_ref(), &args.model, facts.vocab_size))
        .collect::<Result<Vec<_>, _>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(1);
    let positions = longest.saturating_add(args.max_new_tokens.get());
    if positions > model.config.positions_max {
        return Err(CliError::Usage(format!(
            "a prompt of {longest} tokens and --max-new-tokens {} exceed the model's {} positions",
            args.max_new_tokens, model.config.positions_max
        )));
    }
    let batch = args.batch_size.map_or(prompts.len(), NonZeroUsize::get).min(prompts.len());
    let builder = TokenBatch::new(&model.config);
    let stop = if args.ignore_eos { Vec::new() } else { stop_ids(&args.model)? };
    let limits = BatchLimits { sequences: batch, length: longest, micro_batches: 1, cache_length: positions };
    let sample = builder.blank(batch, longest);
    let config =
        frozen_config(&args.placement, session::dtype(args.dtype.unwrap_or_default()), &session, limits);
    let mut frozen =
        Frozen::open(config, &args.placement, profile.as_ref(), &session, (&args.model, weights), &sample)?;
    let vocab = model.config.vocab;
    let mut run = Run { engine: frozen.engine(), builder: &builder, args, stop: &stop, vocab };
    let mut all = Vec::with_capacity(prompts.len());
    for (index, prompts) in prompts.chunks(batch).enumerate() {
        let began = Instant::now();
        let new = run.batch(prompts, index * batch)?;
        let seconds = began.elapsed().as_secs_f64();
        for (prompt, ids) in prompts.iter().zip(new) {
            let text = tokenizer.as_ref().map(|t| t.decode(&ids)).transpose()?;
            all.push(Continuation { prompt_ids: prompt.clone(), ids, text, seconds });
        }
    }
    frozen.close()?;
    Ok(all)
}

fn refuse_unavailable(args: &GenerateArgs) -> Result<(), CliError> {
    if args.kv == Some(KvTier::Disk) {
        let message = "--kv disk is not available yet: the key/value cache is kept in memory";
        return Err(CliError::Usage(message.into()));
    }
    Ok(())
}

/// Generation under way.
struct Run<'a> {
    engine: &'a mut Engine,
    builder: &'a TokenBatch,
    args: &'a GenerateArgs,
    stop: &'a [u32],
    vocab: usize,
}

impl Run<'_> {
    /// Continues one batch of prompts; `first` is the number of its first prompt.
    fn batch(&mut self, prompts: &[Vec<u32>], first: usize) -> Result<Vec<Vec<u32>>, CliError> {
        let config = SamplingConfig {
            temperature: self.args.temperature,
            top_k: self.args.top_k.map(NonZeroUsize::get),
            top_p: self.args.top_p,
            seed: self.args.seed,
        };
        let rows = prompts.len();
        let mut samplers: Vec<_> =
            (0..rows).map(|row| TokenSampler::new(config, (first + row) as u64)).collect();
        let mut new: Vec<Vec<u32>> = vec![Vec::new(); rows];
        let mut done = vec![false; rows];
        let mut cache = self.engine.new_cache(rows)?;
        let views: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let longest = views.iter().map(|p| p.len()).max().unwrap_or(1);
        let mut batch = self.builder.prefill(&views, longest).map_err(CliError::failed)?;
        let mut added: Vec<usize> = views.iter().map(|p| p.len()).collect();
        for token in 0..self.args.max_new_tokens.get() {
            let logits = self.engine.logits(&batch, &mut cache, &added)?;
            let mut next = vec![0; rows];
            for (row, logits) in logits.chunks_exact(self.vocab).enumerate() {
                // A finished row keeps its place in the batch; what it says is not looked at.
                if done[row] {
                    continue;
                }
                next[row] = samplers[row].pick(logits).map_err(CliError::failed)?;
                new[row].push(next[row]);
                done[row] = self.stop.contains(&next[row]);
            }
            if done.iter().all(|&d| d) || token + 1 == self.args.max_new_tokens.get() {
                break;
            }
            batch = self.builder.decode(&next, cache.lengths()).map_err(CliError::failed)?;
            added = vec![1; rows];
        }
        Ok(new)
    }
}

/// The configuration of an engine with frozen weights.
pub(super) fn frozen_config(
    placement: &PlacementArgs,
    dtype: terrace_kernels::DType,
    session: &Session,
    limits: BatchLimits,
) -> EngineConfig {
    EngineConfig {
        dtype,
        training: None,
        placement: placement.offload.map_or(Placement::None, session::placement),
        disks: Vec::new(),
        disk_weights: None,
        host_budget: session::host_budget(placement),
        cache_bytes: placement.disk_cache.0,
        keep_at_most: None,
        durability: Durability::Step,
        device_budget: session.device_budget(placement),
        threads: session.threads,
        pinned: placement.pin_threads,
        limits,
        accumulation: Accumulation::default(),
        overrides: WindowOverrides {
            weight_slots: placement.window.map(NonZeroUsize::get),
            ..WindowOverrides::default()
        },
        timeline: session.timeline.clone(),
        identity: String::new(),
    }
}

/// An engine with frozen weights, and the directories it made for them.
pub(super) struct Frozen {
    engine: Option<Engine>,
    dirs: Vec<PathBuf>,
}

impl Frozen {
    /// Loads a model's weights, quantized if there is a format, into memory if they fit, else onto the disks given.
    pub(super) fn open(
        mut config: EngineConfig,
        placement: &PlacementArgs,
        profile: Option<&DiskProfile>,
        session: &Session,
        (folder, weights): (&std::path::Path, Option<QuantFormat>),
        sample: &MicroBatch,
    ) -> Result<Self, CliError> {
        // A directory of its own per process, so that training state beside it is never touched.
        let own = |dir: &PathBuf| dir.join(format!("terrace-weights-{}", std::process::id()));
        let dirs: Vec<PathBuf> = placement.disk.iter().map(own).collect();
        let wants_disk = placement.offload == Some(Offload::Disk);
        if wants_disk && dirs.is_empty() {
            let message = "--offload disk needs a directory for the weights: give --disk PATH";
            return Err(CliError::Usage(message.into()));
        }
        let open = |config: EngineConfig| -> Result<Engine, EngineError> {
            let model = Model::stored_as(ModelConfig::from_folder(folder)?, weights);
            let mut source = SafetensorsSource::open(folder)?;
            source.validate(&all_params(&model.blocks))?;
            Engine::create(config, session.backend.clone(), model.blocks, sample, &mut source)
        };
        let mut frozen = Self { engine: None, dirs: Vec::new() };
        // Without a tier asked for, weights that do not fit a card stream from memory, and from a disk if there is one.
        let mut tries = vec![config.placement];
        if placement.offload.is_none() && session.on_card() {
            tries.push(Placement::Host);
        }
        for (index, &place) in tries.iter().enumerate().filter(|_| !wants_disk) {
            config.placement = place;
            let may_go_on = index + 1 < tries.len() || (placement.offload.is_none() && !dirs.is_empty());
            match open(config.clone()) {
                Ok(engine) => return Ok(Self { engine: Some(engine), dirs: Vec::new() }),
                Err(EngineError::Tier(terrace_tiers::TierError::Plan(_))) if may_go_on => {}
                Err(error) => return Err(error.into()),
            }
        }
        config.placement = Placement::Disk;
        config.disk_weights = session::disk_weights(profile, &dirs);
        config.disks.clone_from(&dirs);
        frozen.dirs = dirs;
        frozen.engine = Some(open(config)?);
        Ok(frozen)
    }

    pub(super) fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("open until closed")
    }

    /// Removes what was written to disk.
    pub(super) fn close(mut self) -> Result<(), CliError> {
        match self.engine.take() {
            Some(engine) => Ok(engine.remove_state()?),
            None => Ok(()),
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.engine = None;
        for dir in &self.dirs {
            // Copies of weights; what cannot be removed now is named by its process id and safe to delete.
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}
