//! `terrace generate`: continues prompts with a model whose weights are resident or stream from disk.

use super::args::{GenerateArgs, KvTier, Offload, PlacementArgs};
use super::frozen_knobs::{FrozenKnobs, Number};
use super::inputs::ModelFacts;
use super::knobs::advise;
use super::session::{self, Session};
use super::trace::{self, Seen};
use super::{checks, print_json, print_text};
use crate::config::run;
use crate::data::{DataError, TextTokenizer};
use crate::error::CliError;
use crate::generate::{
    Continuation, Prompt, SamplingConfig, TokenSampler, not_applied, penalize, read_prompts, stop_ids,
};
use crate::interrupt::{Interrupt, Interruptible};
use std::cell::OnceCell;
use std::collections::HashSet;
use std::fs::{File, Metadata, TryLockError};
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;
use terrace_aio::profile::DiskProfile;
use terrace_models::{Model, ModelConfig, SafetensorsSource, TokenBatch};
use terrace_tiers::{Tier, TierError};
use terrace_zero::{
    Accumulation, BatchLimits, CACHE_PAGE, Durability, Engine, EngineConfig, EngineError, KvCache,
    MicroBatch, Placement, WindowOverrides,
};

/// Runs the command.
///
/// # Errors
/// A setting, the model, a prompt or a tier is refused.
pub fn generate(args: &GenerateArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let Continued { continuations, prompts, ended } = continued(args, threads)?;
    let done = continuations.len();
    if done == 0 {
        return ended;
    }
    if done < prompts {
        eprintln!(
            "warning: {done} of {prompts} prompts were continued to their end; what there is of them follows"
        );
    }
    if args.json {
        print_json(&continuations)?;
        return ended;
    }
    for continuation in &continuations {
        match &continuation.text {
            Some(text) => print_text(text)?,
            None => print_text(&format!("{:?}", continuation.ids))?,
        }
    }
    ended
}

/// Continues every prompt.
///
/// # Errors
/// As [`generate`].
pub fn continue_prompts(
    args: &GenerateArgs,
    threads: Option<NonZeroUsize>,
) -> Result<Vec<Continuation>, CliError> {
    let Continued { continuations, ended, .. } = continued(args, threads)?;
    ended.map(|()| continuations)
}

/// What there is to say, which is not lost to what happens later: another prompt that fails, Ctrl-C, files that cannot be written or removed.
struct Continued {
    /// Of the prompts that came to their end.
    continuations: Vec<Continuation>,
    /// How many there are in all.
    prompts: usize,
    ended: Result<(), CliError>,
}

fn continued(args: &GenerateArgs, threads: Option<NonZeroUsize>) -> Result<Continued, CliError> {
    if args.temperature == 0.0 {
        for (flag, is_there) in [("--top-p", args.top_p.is_some()), ("--top-k", args.top_k.is_some())] {
            if is_there {
                return Err(CliError::Usage(format!(
                    "{flag} means nothing without --temperature: at 0 the most likely token is taken; give one, or leave it out"
                )));
            }
        }
    }
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
    countable(batch, longest)?;
    let builder = TokenBatch::for_model(&args.model, &model.config).map_err(CliError::failed)?;
    let builder = builder.reaching(positions);
    let stop = if args.ignore_eos { Vec::new() } else { stop_ids(&args.model)? };
    say_what_is_not_applied(args);
    let limits = |batch: usize, new_tokens: usize| BatchLimits {
        sequences: batch,
        length: longest,
        micro_batches: 1,
        cache_length: longest + new_tokens,
        cache_pages: most_pages(&prompts, batch, new_tokens),
    };
    let new_tokens = args.max_new_tokens.get();
    let sample = builder.shape(batch, longest);
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
    let engine = frozen.engine();
    let mut run =
        Run { engine, builder: &builder, args, stop: &stop, vocab, interrupt, candidates: Vec::new() };
    let mut ends: Vec<Option<End>> = prompts.iter().map(|_| None).collect();
    let ran = run.all(&prompts, &mut cache, &mut ends);
    let traced = frozen.trace(args.trace.as_deref(), &session, Some(&cache));
    drop(cache);
    let closed = frozen.close();
    let count = prompts.len();
    let mut continuations = Vec::with_capacity(count);
    for (prompt_ids, end) in prompts.into_iter().zip(ends) {
        let Some(End { ids, seconds }) = end else { continue };
        let text = tokenizer.as_ref().map(|t| t.decode_after(&prompt_ids, &ids)).transpose()?;
        continuations.push(Continuation { prompt_ids, ids, text, seconds });
    }
    Ok(Continued { continuations, prompts: count, ended: ran.and(closed).and(traced) })
}

/// Says which settings of `generation_config.json` the flags do not have.
fn say_what_is_not_applied(args: &GenerateArgs) {
    let given = |key: &str| match key {
        "do_sample" | "temperature" => args.temperature > 0.0,
        "top_p" => args.temperature > 0.0 && args.top_p.is_some(),
        "top_k" => args.temperature > 0.0 && args.top_k.is_some(),
        "repetition_penalty" => args.repetition_penalty != 1.0,
        _ => false,
    };
    // Whether the file can be read at all is for its end tokens to say.
    let settings = not_applied(&args.model).unwrap_or_default().into_iter();
    let settings: Vec<_> = settings.filter(|(key, _)| !given(key)).collect();
    if !settings.is_empty() {
        let settings: Vec<_> = settings.into_iter().map(|(key, value)| format!("{key} {value}")).collect();
        eprintln!(
            "note: of generation_config.json {} are not applied: how tokens are picked is for flags to say (--temperature, --top-p, --top-k, \
             --repetition-penalty)",
            settings.join(", ")
        );
    }
}

/// Refuses a batch whose positions cannot be numbered.
fn countable(batch: usize, longest: usize) -> Result<(), CliError> {
    let most = run::sequences_max(longest);
    if batch <= most {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{batch} prompts at once, of which the longest has {longest} tokens, are more than 2³¹ positions; lower --batch-size to {most}"
    )))
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
    /// Memory for what a token is picked from.
    candidates: Vec<(u32, f32)>,
}

/// A prompt in a row of the batch.
struct Row {
    /// Its number in the input.
    prompt: usize,
    sampler: TokenSampler,
    ids: Vec<u32>,
    /// Tokens of the prompt and of `ids`, where a repetition is penalized.
    seen: HashSet<u32>,
    began: Instant,
}

/// What became of a prompt.
struct End {
    ids: Vec<u32>,
    seconds: f64,
}

impl Run<'_> {
    /// Continues every prompt, as many at once as `cache` has room for. Where one ends, the next takes its row and its pages (Yu et
    /// al., "Orca", OSDI 2022).
    ///
    /// # Errors
    /// The engine fails, or the user stopped it after a pass. `ends` has those that came to their end before.
    fn all(
        &mut self,
        prompts: &[Vec<u32>],
        cache: &mut KvCache,
        ends: &mut [Option<End>],
    ) -> Result<(), CliError> {
        let batch = cache.lengths().len();
        let mut rows: Vec<Option<Row>> = (0..batch).map(|_| None).collect();
        let mut waiting = prompts.iter().enumerate();
        let worth_a_pass = rows_worth_a_pass(batch, self.args.max_new_tokens.get());
        loop {
            let free: Vec<usize> = (0..batch).filter(|&row| rows[row].is_none()).collect();
            if free.len() == batch || free.len() >= worth_a_pass {
                let next: Vec<_> = free.into_iter().zip(waiting.by_ref()).collect();
                for &(row, (prompt, _)) in &next {
                    rows[row] = Some(self.row(prompt, &prompts[prompt]));
                }
                let (next, views): (Vec<usize>, Vec<&[u32]>) =
                    next.into_iter().map(|(row, (_, ids))| (row, &ids[..])).unzip();
                if let Some(longest) = views.iter().map(|ids| ids.len()).max() {
                    let batch = self.builder.prefill(&views, longest).map_err(CliError::failed)?;
                    let added: Vec<usize> = views.iter().map(|ids| ids.len()).collect();
                    self.pass(&batch, cache, (&next, &added), &mut rows, ends)?;
                }
            }
            let (running, last): (Vec<usize>, Vec<u32>) = rows
                .iter()
                .enumerate()
                .filter_map(|(row, of)| Some((row, *of.as_ref()?.ids.last()?)))
                .unzip();
            if running.is_empty() && waiting.len() == 0 {
                return Ok(());
            }
            if !running.is_empty() {
                let lengths: Vec<usize> = running.iter().map(|&row| cache.lengths()[row]).collect();
                let batch = self.builder.decode(&last, &lengths).map_err(CliError::failed)?;
                self.pass(&batch, cache, (&running, &vec![1; running.len()]), &mut rows, ends)?;
            }
        }
    }

    fn row(&self, prompt: usize, of_prompt: &[u32]) -> Row {
        let config = SamplingConfig {
            temperature: self.args.temperature,
            top_k: self.args.top_k.map(NonZeroUsize::get),
            top_p: self.args.top_p,
            seed: self.args.seed,
        };
        let sampler = TokenSampler::new(config, prompt as u64);
        let seen = if self.penalizes() { of_prompt.iter().copied().collect() } else { HashSet::new() };
        Row { prompt, sampler, ids: Vec::new(), seen, began: Instant::now() }
    }

    fn penalizes(&self) -> bool {
        self.args.repetition_penalty != 1.0
    }

    /// Runs a batch of some rows and picks a token for each.
    fn pass(
        &mut self,
        batch: &MicroBatch,
        cache: &mut KvCache,
        (of_batch, added): (&[usize], &[usize]),
        rows: &mut [Option<Row>],
        ends: &mut [Option<End>],
    ) -> Result<(), CliError> {
        if self.interrupt.requested() {
            return Err(CliError::Stopped);
        }
        let mut logits = self.engine.logits(batch, cache, of_batch, added)?;
        let penalizes = self.penalizes();
        for (&at, logits) in of_batch.iter().zip(logits.chunks_exact_mut(self.vocab)) {
            let row = rows[at].as_mut().expect("a row of the batch has a prompt");
            if penalizes {
                penalize(logits, &row.seen, self.args.repetition_penalty);
            }
            let id = row.sampler.pick(logits, &mut self.candidates).map_err(CliError::failed)?;
            row.ids.push(id);
            if penalizes {
                row.seen.insert(id);
            }
            if self.stop.contains(&id) || row.ids.len() == self.args.max_new_tokens.get() {
                let Row { prompt, ids, began, .. } = rows[at].take().expect("as above");
                ends[prompt] = Some(End { ids, seconds: began.elapsed().as_secs_f64() });
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
        keep_on_host: 0,
        keep_on_disk: 0,
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

/// What a directory for copies of weights and a key/value cache is called, before the process id.
const OWN: &str = "terrace-weights-";
/// The file in it that its process has locked. What has none was made by somebody else, training state among it.
const OWN_LOCK: &str = "frozen.lock";

/// Names of directories that are tried.
const OWN_NAMES_MAX: usize = 1000;

/// Removes copies of weights and caches that processes left which were killed: those that nobody has locked. A model's size each, they would
/// fill the disk.
fn remove_left_over(disk: &Path) {
    for entry in std::fs::read_dir(disk).into_iter().flatten().flatten() {
        let is_own = entry.file_name().to_str().is_some_and(|name| name.starts_with(OWN));
        let name = entry.path().join(OWN_LOCK);
        // Locked until all is removed: what is there is then nobody else's to lock.
        let Some(lock) = is_own.then(|| File::open(&name).ok()).flatten() else { continue };
        if matches!(locked(lock, &name), Lock::Held(_lock)) {
            // What cannot be removed is in nobody's way but for the space.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// What came of locking a file.
enum Lock {
    Held(File),
    /// Another process has it, or has removed it.
    Theirs,
    /// There are no locks here.
    Unknown,
}

/// Locks `file`, which was opened as `name`. Whoever had the lock before may have removed it: the name is no more, or another file's.
fn locked(file: File, name: &Path) -> Lock {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return Lock::Theirs,
        Err(TryLockError::Error(_)) => return Lock::Unknown,
        Ok(()) => {}
    }
    let place = |found: &Metadata| (found.dev(), found.ino());
    match (file.metadata(), std::fs::metadata(name)) {
        (Ok(locked), Ok(named)) if place(&locked) != place(&named) => Lock::Theirs,
        (_, Err(error)) if error.kind() == ErrorKind::NotFound => Lock::Theirs,
        _ => Lock::Held(file),
    }
}

/// A directory that this process made, and removes.
struct OwnDir {
    path: PathBuf,
    _lock: Option<File>,
}

impl OwnDir {
    /// Makes one on each disk.
    fn make(disks: &[PathBuf]) -> Result<Vec<Self>, EngineError> {
        disks.iter().map(|disk| Self::on(disk)).collect()
    }

    fn on(disk: &Path) -> Result<Self, EngineError> {
        let failed =
            |path: &Path, source| TierError::File { doing: "creating", path: path.to_owned(), source };
        std::fs::create_dir_all(disk).map_err(|source| failed(disk, source))?;
        // In containers that share a disk, process ids are not one's own.
        let named = |number: usize| match number {
            0 => disk.join(format!("{OWN}{}", std::process::id())),
            _ => disk.join(format!("{OWN}{}-{number}", std::process::id())),
        };
        for path in (0..OWN_NAMES_MAX).map(named) {
            match std::fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(source) => return Err(failed(&path, source).into()),
            }
            if let Some(own) = Self::lock(&path).map_err(|source| failed(&path.join(OWN_LOCK), source))? {
                return Ok(own);
            }
        }
        Err(failed(&named(OWN_NAMES_MAX), ErrorKind::AlreadyExists.into()).into())
    }

    /// Makes the directory `path`, which is new, this process's; `None` where another took it for left over before it was locked, and removes it.
    fn lock(path: &Path) -> std::io::Result<Option<Self>> {
        let name = path.join(OWN_LOCK);
        let file = match File::create_new(&name) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                // It is empty, and without a lock nobody else would remove it.
                let _ = std::fs::remove_dir(path);
                return Err(error);
            }
        };
        let path = path.to_owned();
        Ok(match locked(file, &name) {
            Lock::Held(lock) => Some(Self { path, _lock: Some(lock) }),
            Lock::Theirs => None,
            // Where there are no locks, nobody removes what is left.
            Lock::Unknown => Some(Self { path, _lock: None }),
        })
    }
}

impl Drop for OwnDir {
    fn drop(&mut self) {
        // What cannot be removed now is removed by a later process.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// An engine with frozen weights, and the directories it made for them.
pub(super) struct Frozen {
    // Dropped before the directories that its files are in.
    engine: Option<Engine>,
    dirs: Vec<OwnDir>,
}

impl Frozen {
    /// Loads a model's weights, quantized if there is a format, into memory if they fit, else onto the disks given. The user may stop it, which
    /// leaves nothing there.
    ///
    /// # Errors
    /// A setting, the model or a tier is refused, or the user stopped it.
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
        placement.disk.iter().for_each(|dir| remove_left_over(dir));
        let wants_disk = placement.offload == Some(Offload::Disk);
        if wants_disk && placement.disk.is_empty() {
            let message = "--offload disk needs a directory for the weights: give --disk PATH";
            return Err(CliError::Usage(message.into()));
        }
        let (warned, interrupt) = (OnceCell::new(), Interrupt::listen());
        let open = |config: EngineConfig| -> Result<Engine, EngineError> {
            let model = Model::stored_as(ModelConfig::from_folder(folder)?, weights);
            let source = SafetensorsSource::for_model(folder, &model)?;
            warned.get_or_init(|| checks::warn_of_unused(&source, &model, folder));
            let mut source = Interruptible::new(source, interrupt.clone());
            let blocks = || Model::stored_as(model.config.clone(), weights).blocks;
            session.warn_of_host_memory(&config, blocks, sample);
            let engine = Engine::create(config, session.backend.clone(), model.blocks, sample, &mut source)?;
            session.warn_of_slow_copies();
            Ok(engine)
        };
        let mut frozen = Self { engine: None, dirs: Vec::new() };
        if config.kv_tier == Tier::Disk {
            frozen.use_disks(&mut config, placement, profile)?;
        }
        // Without a tier asked for, weights that do not fit a card stream from memory, and from a disk if there is one.
        let mut tries = vec![config.placement];
        if placement.offload.is_none() && session.on_card() {
            tries.push(Placement::Host);
        }
        if wants_disk {
            tries.clear();
        }
        let may_use_disk = wants_disk || (placement.offload.is_none() && !placement.disk.is_empty());
        let places: Vec<Placement> =
            tries.iter().copied().chain(may_use_disk.then_some(Placement::Disk)).collect();
        let advised = |config: &EngineConfig, error| match error {
            EngineError::Interrupted => CliError::Stopped,
            error => advise(error, || knobs.alternatives(config, &places)).into(),
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
        frozen.use_disks(&mut config, placement, profile)?;
        frozen.engine = Some(open(config.clone()).map_err(|error| advised(&config, error))?);
        Ok(frozen)
    }

    /// Has the files of `config` in directories of this process alone, so that training state beside them is never touched.
    fn use_disks(
        &mut self,
        config: &mut EngineConfig,
        placement: &PlacementArgs,
        profile: Option<&DiskProfile>,
    ) -> Result<(), CliError> {
        if self.dirs.is_empty() {
            self.dirs = OwnDir::make(&placement.disk)?;
            config.disks = self.dirs.iter().map(|dir| dir.path.clone()).collect();
            config.disk_weights = session::disk_weights(profile, &config.disks);
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Process ids repeat: after a restart, and in containers, in each of which it may be 1.
    #[test]
    fn directories_of_other_processes_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let others = disk.join(format!("{OWN}{}", std::process::id()));
        std::fs::create_dir_all(&others).unwrap();
        std::fs::write(others.join("state.bin"), b"theirs").unwrap();
        let own = OwnDir::make(&[disk.clone(), folder.path().join("other")]).unwrap();
        assert_eq!(own.len(), 2);
        assert_ne!(own[0].path, others);
        for dir in &own {
            assert!(dir.path.join(OWN_LOCK).exists());
            remove_left_over(dir.path.parent().unwrap());
            assert!(dir.path.exists(), "it is in use");
        }
        drop(own);
        let left: Vec<_> = std::fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, *std::slice::from_ref(&others));
        assert_eq!(std::fs::read(others.join("state.bin")).unwrap(), b"theirs");
    }

    /// Between making a directory and locking it, another process may take it for left over.
    #[test]
    fn directories_are_not_removed_while_they_are_made() {
        let folder = tempfile::tempdir().unwrap();
        let (disk, ended) = (folder.path(), AtomicBool::new(false));
        std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        remove_left_over(disk);
                    }
                });
            }
            let made: Vec<_> = (0..200).map(|_| OwnDir::on(disk)).collect();
            ended.store(true, Ordering::Relaxed);
            remove_left_over(disk);
            for own in made.iter().map(|own| own.as_ref().unwrap()) {
                assert!(own._lock.is_some(), "there are locks here");
                assert!(own.path.join(OWN_LOCK).exists(), "{} is in use", own.path.display());
            }
        });
        remove_left_over(disk);
        assert_eq!(std::fs::read_dir(disk).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_was_removed_is_not_locked() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join(OWN_LOCK);
        let first = File::create_new(&name).unwrap();
        let [waiting, late] = [File::open(&name).unwrap(), File::open(&name).unwrap()];
        let Lock::Held(held) = locked(first, &name) else { panic!("nobody else has it") };
        assert!(matches!(locked(waiting, &name), Lock::Theirs), "it is in use");
        std::fs::remove_file(&name).unwrap();
        assert!(matches!(locked(held, &name), Lock::Theirs), "it has no name");
        let _another = File::create_new(&name).unwrap();
        assert!(matches!(locked(late, &name), Lock::Theirs), "the name is another's");
    }
}
