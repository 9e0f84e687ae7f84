//! `terrace generate`: continues prompts with a model whose weights are resident or stream from disk.

use super::args::{GenerateArgs, KvTier, Offload, PlacementArgs};
use super::finetune::all_params;
use super::frozen_knobs::{FrozenKnobs, Number};
use super::inputs::ModelFacts;
use super::knobs::advise;
use super::session::{self, Session};
use super::trace::{self, Seen};
use super::{checks, print_json, print_text};
use crate::data::{DataError, TextTokenizer};
use crate::error::CliError;
use crate::generate::{Continuation, Prompt, SamplingConfig, TokenSampler, read_prompts, stop_ids};
use crate::interrupt::Interrupt;
use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use terrace_aio::profile::DiskProfile;
use terrace_models::{Model, ModelConfig, SafetensorsSource, TokenBatch};
use terrace_tiers::{LOCK_FILE, Tier, TierError};
use terrace_zero::{
    Accumulation, BatchLimits, CACHE_PAGE, Durability, Engine, EngineConfig, EngineError, KvCache,
    MicroBatch, Placement, WindowOverrides,
};

/// Runs the command.
///
/// # Errors
/// A setting, the model, a prompt or a tier is refused.
pub fn generate(args: &GenerateArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let Continued { continuations, traced } = continued(args, threads)?;
    if args.json {
        print_json(&continuations)?;
        return traced;
    }
    for continuation in &continuations {
        match &continuation.text {
            Some(text) => print_text(text)?,
            None => print_text(&format!("{:?}", continuation.ids))?,
        }
    }
    traced
}

/// Continues every prompt.
///
/// # Errors
/// As [`generate`].
pub fn continue_prompts(
    args: &GenerateArgs,
    threads: Option<NonZeroUsize>,
) -> Result<Vec<Continuation>, CliError> {
    let Continued { continuations, traced } = continued(args, threads)?;
    traced.map(|()| continuations)
}

/// What there is to say, which is not lost to a timeline that cannot be written.
struct Continued {
    continuations: Vec<Continuation>,
    traced: Result<(), CliError>,
}

fn continued(args: &GenerateArgs, threads: Option<NonZeroUsize>) -> Result<Continued, CliError> {
    checks::disks(&args.placement.disk)?;
    args.trace.iter().try_for_each(|path| checks::file("--trace", path))?;
    if args.kv == KvTier::Disk && args.placement.disk.is_empty() {
        let message = "--kv disk needs a directory for the key/value cache: give --disk PATH";
        return Err(CliError::Usage(message.into()));
    }
    checks::model(&args.model)?;
    let model = Model::from_folder(&args.model).map_err(CliError::failed)?;
    let facts = ModelFacts::read(&args.model)?;
    let profile = session::disk_profile(&args.placement, threads)?;
    let io = session::io_config(profile.as_ref());
    let session = Session::open(&args.placement, &io, threads, args.trace.is_some())?;
    let tokenizer = TextTokenizer::find(&args.model)?;
    let prompts = prompts(args, facts.vocab_size, tokenizer.as_ref())?;
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
    let limits = |batch: usize, new_tokens: usize| BatchLimits {
        sequences: batch,
        length: longest,
        micro_batches: 1,
        cache_length: longest + new_tokens,
        cache_pages: most_pages(&prompts, batch, new_tokens),
    };
    let new_tokens = args.max_new_tokens.get();
    let sample = builder.blank(batch, longest);
    let dtype = session::dtype(args.dtype.unwrap_or_default());
    let config = EngineConfig {
        kv_tier: session::kv_tier(args.kv),
        ..frozen_config(&args.placement, dtype, &session, limits(batch, new_tokens))
    };
    let numbers: [Number<'_>; 2] = [
        ("--batch-size", batch, &|batch| limits(batch, new_tokens)),
        ("--max-new-tokens", new_tokens, &|new_tokens| limits(batch, new_tokens)),
    ];
    let knobs = FrozenKnobs {
        backend: &session.backend,
        model: &model.config,
        weights: args.weights,
        kv: Some(args.kv),
        numbers: &numbers,
    };
    let mut frozen =
        Frozen::open(config, &args.placement, profile.as_ref(), &session, &args.model, &sample, knobs)?;
    let vocab = model.config.vocab;
    let interrupt = Interrupt::listen();
    let mut cache = frozen.engine().new_cache(batch)?;
    let mut run = Run { engine: frozen.engine(), builder: &builder, args, stop: &stop, vocab, interrupt };
    let ends = run.all(&prompts, &mut cache);
    let traced = frozen.trace(args.trace.as_deref(), &session, Some(&cache));
    drop(cache);
    let mut continuations = Vec::with_capacity(prompts.len());
    for (prompt_ids, End { ids, seconds }) in prompts.into_iter().zip(ends?) {
        let text = tokenizer.as_ref().map(|t| t.decode(&ids)).transpose()?;
        continuations.push(Continuation { prompt_ids, ids, text, seconds });
    }
    frozen.close()?;
    Ok(Continued { continuations, traced })
}

/// The tokens of every prompt.
fn prompts(
    args: &GenerateArgs,
    vocab_size: usize,
    tokenizer: Option<&TextTokenizer>,
) -> Result<Vec<Vec<u32>>, CliError> {
    let prompts = match (&args.prompt, &args.prompt_ids, &args.prompts) {
        (Some(text), _, _) => vec![Prompt::Text(text.clone())],
        (_, Some(ids), _) => vec![Prompt::Ids(ids.clone())],
        (_, _, Some(file)) => read_prompts(file)?,
        (None, None, None) => return Err(CliError::Usage("give --prompt, --prompt-ids or --prompts".into())),
    };
    let name = |at: usize| match &args.prompts {
        Some(file) => format!("--prompts {}: prompt {}", file.display(), at + 1),
        None if args.prompt.is_some() => "--prompt".into(),
        None => "--prompt-ids".into(),
    };
    let ids = |(at, prompt): (usize, &Prompt)| {
        prompt.ids(tokenizer, &args.model, vocab_size).map_err(|error| match error {
            DataError::Prompt(reason) => CliError::Failed(format!("{}: {reason}", name(at))),
            other => other.into(),
        })
    };
    prompts.iter().enumerate().map(ids).collect()
}

/// Pages that any `batch` of the prompts need together.
fn most_pages(prompts: &[Vec<u32>], batch: usize, max_new_tokens: usize) -> usize {
    let of = |prompt: &Vec<u32>| (prompt.len() + max_new_tokens).div_ceil(CACHE_PAGE);
    let mut pages: Vec<usize> = prompts.iter().map(of).collect();
    pages.sort_unstable_by(|a, b| b.cmp(a));
    pages.iter().take(batch).sum()
}

/// Generation under way.
struct Run<'a> {
    engine: &'a mut Engine,
    builder: &'a TokenBatch,
    args: &'a GenerateArgs,
    stop: &'a [u32],
    vocab: usize,
    interrupt: Interrupt,
}

/// A prompt in a row of the batch.
struct Row {
    /// Its number in the input.
    prompt: usize,
    sampler: TokenSampler,
    ids: Vec<u32>,
    began: Instant,
}

/// What became of a prompt.
#[derive(Default)]
struct End {
    ids: Vec<u32>,
    seconds: f64,
}

impl Run<'_> {
    /// Continues every prompt, as many at once as `cache` has room for. Where one ends, the next takes its row and its pages (Yu et
    /// al., "Orca", OSDI 2022).
    ///
    /// # Errors
    /// The engine fails, or the user stopped it after a pass.
    fn all(&mut self, prompts: &[Vec<u32>], cache: &mut KvCache) -> Result<Vec<End>, CliError> {
        let batch = cache.lengths().len();
        let mut ends: Vec<End> = prompts.iter().map(|_| End::default()).collect();
        let mut rows: Vec<Option<Row>> = (0..batch).map(|_| None).collect();
        let mut waiting = prompts.iter().enumerate();
        let worth_a_pass = rows_worth_a_pass(batch, self.args.max_new_tokens.get());
        loop {
            let free: Vec<usize> = (0..batch).filter(|&row| rows[row].is_none()).collect();
            if free.len() == batch || free.len() >= worth_a_pass {
                let next: Vec<_> = free.into_iter().zip(waiting.by_ref()).collect();
                for &(row, (prompt, _)) in &next {
                    rows[row] = Some(self.row(prompt));
                }
                let (next, views): (Vec<usize>, Vec<&[u32]>) =
                    next.into_iter().map(|(row, (_, ids))| (row, &ids[..])).unzip();
                if let Some(longest) = views.iter().map(|ids| ids.len()).max() {
                    let batch = self.builder.prefill(&views, longest).map_err(CliError::failed)?;
                    let added: Vec<usize> = views.iter().map(|ids| ids.len()).collect();
                    self.pass(&batch, cache, (&next, &added), &mut rows, &mut ends)?;
                }
            }
            let (running, last): (Vec<usize>, Vec<u32>) = rows
                .iter()
                .enumerate()
                .filter_map(|(row, of)| Some((row, *of.as_ref()?.ids.last()?)))
                .unzip();
            if running.is_empty() && waiting.len() == 0 {
                return Ok(ends);
            }
            if !running.is_empty() {
                let lengths: Vec<usize> = running.iter().map(|&row| cache.lengths()[row]).collect();
                let batch = self.builder.decode(&last, &lengths).map_err(CliError::failed)?;
                self.pass(&batch, cache, (&running, &vec![1; running.len()]), &mut rows, &mut ends)?;
            }
        }
    }

    fn row(&self, prompt: usize) -> Row {
        let config = SamplingConfig {
            temperature: self.args.temperature,
            top_k: self.args.top_k.map(NonZeroUsize::get),
            top_p: self.args.top_p,
            seed: self.args.seed,
        };
        let sampler = TokenSampler::new(config, prompt as u64);
        Row { prompt, sampler, ids: Vec::new(), began: Instant::now() }
    }

    /// Runs a batch of some rows and picks a token for each.
    fn pass(
        &mut self,
        batch: &MicroBatch,
        cache: &mut KvCache,
        (of_batch, added): (&[usize], &[usize]),
        rows: &mut [Option<Row>],
        ends: &mut [End],
    ) -> Result<(), CliError> {
        if self.interrupt.requested() {
            return Err(CliError::Stopped);
        }
        let logits = self.engine.logits(batch, cache, of_batch, added)?;
        for (&at, logits) in of_batch.iter().zip(logits.chunks_exact(self.vocab)) {
            let row = rows[at].as_mut().expect("a row of the batch has a prompt");
            let id = row.sampler.pick(logits).map_err(CliError::failed)?;
            row.ids.push(id);
            if self.stop.contains(&id) || row.ids.len() == self.args.max_new_tokens.get() {
                let Row { prompt, ids, began, .. } = rows[at].take().expect("as above");
                ends[prompt] = End { ids, seconds: began.elapsed().as_secs_f64() };
                cache.clear(at);
            }
        }
        Ok(())
    }
}

/// Free rows for which the others wait a pass while prompts are read into them.
///
/// That pass costs each of B rows a token; with L tokens a prompt a row becomes free every L/B passes, so that waiting for k free rows
/// leaves k²·L/(2·B) places empty. For each of the k prompts that is B/k + k·L/(2·B), least at k = B·√(2/L).
fn rows_worth_a_pass(batch: usize, tokens: usize) -> usize {
    ((batch as f64 * (2.0 / tokens as f64).sqrt()).round() as usize).clamp(1, batch)
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
        kv_tier: Tier::Device,
        overrides: WindowOverrides {
            weight_slots: placement.window.map(NonZeroUsize::get),
            ..WindowOverrides::default()
        },
        timeline: session.timeline.clone(),
        identity: String::new(),
    }
}

/// What a directory for copies of weights is called, before the process id.
const OWN: &str = "terrace-weights-";

/// Removes copies of weights that processes left which were killed: those that nobody has locked. A model's size each, they would fill the
/// disk.
fn remove_left_over(disk: &Path) {
    for entry in std::fs::read_dir(disk).into_iter().flatten().flatten() {
        let id = entry.file_name().to_str().and_then(|name| name.strip_prefix(OWN)?.parse::<u32>().ok());
        let lock = id.and_then(|_| File::open(entry.path().join(LOCK_FILE)).ok());
        if lock.is_some_and(|lock| lock.try_lock().is_ok()) {
            // What cannot be removed is in nobody's way but for the space.
            let _ = std::fs::remove_dir_all(entry.path());
        }
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
        folder: &Path,
        sample: &MicroBatch,
        knobs: FrozenKnobs<'_>,
    ) -> Result<Self, CliError> {
        let weights = session::quant_format(knobs.weights);
        // A directory of its own per process, so that training state beside it is never touched.
        let own = |dir: &PathBuf| dir.join(format!("{OWN}{}", std::process::id()));
        placement.disk.iter().for_each(|dir| remove_left_over(dir));
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
            let engine = Engine::create(config, session.backend.clone(), model.blocks, sample, &mut source)?;
            session.warn_of_slow_copies();
            Ok(engine)
        };
        let mut frozen = Self { engine: None, dirs: Vec::new() };
        if config.kv_tier == Tier::Disk {
            config.disk_weights = session::disk_weights(profile, &dirs);
            config.disks.clone_from(&dirs);
            frozen.dirs.clone_from(&dirs);
        }
        // Without a tier asked for, weights that do not fit a card stream from memory, and from a disk if there is one.
        let mut tries = vec![config.placement];
        if placement.offload.is_none() && session.on_card() {
            tries.push(Placement::Host);
        }
        if wants_disk {
            tries.clear();
        }
        let may_use_disk = wants_disk || (placement.offload.is_none() && !dirs.is_empty());
        let places: Vec<Placement> =
            tries.iter().copied().chain(may_use_disk.then_some(Placement::Disk)).collect();
        let advised = |config: &EngineConfig, error| -> CliError {
            advise(error, || knobs.alternatives(config, &places)).into()
        };
        for (index, &place) in tries.iter().enumerate() {
            config.placement = place;
            let may_go_on = index + 1 < tries.len() || may_use_disk;
            match open(config.clone()) {
                Ok(engine) => {
                    frozen.engine = Some(engine);
                    return Ok(frozen);
                }
                Err(EngineError::Tier(TierError::Plan(_))) if may_go_on => {}
                Err(error) => return Err(advised(&config, error)),
            }
        }
        config.placement = Placement::Disk;
        config.disk_weights = session::disk_weights(profile, &dirs);
        config.disks.clone_from(&dirs);
        frozen.dirs = dirs;
        frozen.engine = Some(open(config.clone()).map_err(|error| advised(&config, error))?);
        Ok(frozen)
    }

    pub(super) fn engine(&mut self) -> &mut Engine {
        self.engine.as_mut().expect("open until closed")
    }

    /// Writes the timeline of what the engine did, if there is a file for it.
    pub(super) fn trace(
        &mut self,
        path: Option<&Path>,
        session: &Session,
        cache: Option<&KvCache>,
    ) -> Result<(), CliError> {
        if path.is_none() {
            return Ok(());
        }
        // With frozen weights there is nothing to flush but the timeline, which has every copy that is done then.
        let flushed = self.engine().flush();
        trace::write(path, session, Seen { engine: self.engine(), cache })?;
        Ok(flushed?)
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
