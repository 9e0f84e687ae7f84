//! `terrace finetune`: data and model in, a trained Hugging Face folder out.

use super::args::{FinetuneArgs, Offload, PlacementArgs, StateFormat as StateFlag};
use super::earlier::Earlier;
use super::inputs::{FinetuneInputs, trains_as_it_says};
use super::knobs::Knobs;
use super::pinned::{
    self, Budget, DeviceMemory, ModelShape, PlanFile, Settings, Step, Term, Totals, Windows,
};
use super::placement::PlacedGroups;
use super::saving::{self, Saving};
use super::session::{self, Session};
use super::trace::Seen;
use super::{checks, finetune_checks, floor, identity, keeping, print_json, retention, shown, trace};
use crate::config::{ByteSize, TrainConfig, run, schedule};
use crate::data::Dataset;
use crate::error::CliError;
use crate::floor::{Capabilities, Floor};
use crate::interrupt::Interrupt;
use crate::metrics::{MetricsWriter, StepMetrics};
use crate::progress::{Progress, count, duration};
use crate::tensorboard::EventWriter;
use serde_json::json;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use terrace_aio::engine::EngineConfig as IoConfig;
use terrace_aio::layer::Stats;
use terrace_aio::memory::peak_resident_bytes;
use terrace_aio::profile::DiskProfile;
use terrace_models::{Model, ModelConfig, Row, SafetensorsSource, TokenBatch, export_folder};
use terrace_optimizer::{Schedule, StateFormat};
use terrace_tiers::{Access, StoreView, Tier};
use terrace_zero::{
    BatchLimits, Block, Engine, EngineConfig, EngineError, MicroBatch, ParamSpec, PlanningRuns, StepRates,
    StepReport, TrainingConfig, WeightSource, WindowOverrides,
};

/// Runs the command.
///
/// # Errors
/// A setting, the model, the data or a tier is refused; the error knows its exit code.
pub fn finetune(args: &FinetuneArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    checks::model(&args.model)?;
    let model = Model::from_folder(&args.model).map_err(CliError::failed)?;
    let mut source = SafetensorsSource::for_model(&args.model, &model).map_err(CliError::failed)?;
    checks::warn_of_unused(&source, &model, &args.model);
    let summary = train(args, threads, model, &mut source)?;
    if args.json { print_json(&summary) } else { Ok(()) }
}

/// Trains and exports; gives the document of `--json`. The demo comes in here with fresh weights.
///
/// # Errors
/// As [`finetune`].
pub fn train(
    args: &FinetuneArgs,
    threads: Option<NonZeroUsize>,
    model: Model,
    source: &mut dyn WeightSource,
) -> Result<serde_json::Value, CliError> {
    // State that is there was made with this configuration, and is not to be lost.
    if !args.resume {
        trains_as_it_says(&args.model, &model.config)?;
    }
    let _claim = checks::run_output(&args.output, &args.model, args.save_every, !args.resume)?;
    let (mut session, mut profile) = (None, None);
    let inputs = FinetuneInputs::load_after(args, |run| {
        let disks = if run.offload == Offload::Disk { state_dirs(run) } else { Vec::new() };
        let threads_here = session::compute_threads(threads);
        profile = floor::profile(args.placement.profile.as_ref(), threads_here, &disks)?;
        let io = io_config(run, profile.as_ref().and_then(|found| found.disk.as_ref()));
        let opened = Session::open(&args.placement, &io, threads, run.trace.is_some())?;
        finetune_checks::before_data(run, args, &opened, &model)?;
        session = Some(opened);
        Ok(())
    })?;
    let session = session.expect("opened when the run was resolved");
    let FinetuneInputs { run, data, sampler, steps, metrics } = inputs;
    say_what(&run, &data);
    let config_text = read_config(&run.model)?;
    let identity = identity::of_run(&run, (&model.config, &config_text), data.fingerprint(), steps);
    let mut config = engine_config(&run, &args.placement, &session, identity)?;
    let disk_profile = profile.as_ref().and_then(|found| found.disk.as_ref());
    config.disk_weights = session::disk_weights(disk_profile, &config.disks);
    let can = floor::capabilities(profile.as_ref(), &session, &run, &config);
    let builder = TokenBatch::for_source(&model.config, source).map_err(CliError::failed)?;
    let shape = ModelShape::of(&model.config);
    let sample = builder.shape(run.batch_size, run.seq_len);
    if run.resume {
        config.overrides.chunk_elements =
            stored_chunks(&session, &config).or(config.overrides.chunk_elements);
    }
    keep_what_pays(&mut config, &can, &session, &model.config, &sample, run.resume)?;

    let earlier = if run.resume { Earlier::default() } else { Earlier::set_aside(&metrics, &run.output)? };
    let mut events = event_writer(run.tensorboard.as_deref()).inspect_err(|_| earlier.put_back())?;
    let loading = Instant::now();
    let fresh = if run.resume { None } else { Some(source) };
    let opened = open_engine(config, &session, model, &sample, fresh).and_then(|engine| {
        finetune_checks::has_steps_left(&engine, steps, &run)?;
        finetune_checks::room_for_saves(&engine, &run)?;
        Ok(engine)
    });
    let engine = opened.inspect_err(|_| {
        earlier.put_back();
        events.take().into_iter().for_each(EventWriter::discard);
    })?;
    earlier.say();
    let windows = say_plan(&engine, &run, loading);
    // The cut into chunks is a property of state that is resumed.
    run.pinned.as_ref().map_or(Ok(()), |pinned| pinned.check_windows(&windows))?;
    let floor = floor::of_engine(&engine, can);
    if let Some(path) = &run.save_plan {
        plan_of(&run, shape, windows, &engine, &session, &floor).write("--save-plan", path)?;
    }
    let last = session.stats.snapshot();
    let metrics_file = open_metrics(&metrics, &engine, last.write.bytes)?;
    let mut trainer = Trainer {
        floor,
        summary: floor::Summary::default(),
        schedule: run.schedule(steps),
        metrics: metrics_file,
        metrics_path: metrics,
        events,
        progress: Progress::new(steps, engine.step()),
        last,
        kept: engine.step(),
        is_torn: false,
        engine,
        run: &run,
        session: &session,
        builder,
        config_text,
        finished: None,
        saving: None,
    };
    let began = Instant::now();
    let result = trainer.run(steps, |step| Ok(data.samples(&sampler.batch_indices(step))?));
    trainer.end(result)?;
    let seconds = began.elapsed().as_secs_f64();
    let last = trainer.finished;
    let state = state_dirs(&run);
    say_where(&run, &state);
    Ok(json!({
        "output": shown(&run.output),
        "steps": trainer.engine.step(),
        "parameters": trainer.engine.parameters(),
        "loss": last.as_ref().map(|m| m.loss),
        "tokens_per_second": trainer.summary.tokens_per_second(),
        "seconds": seconds,
        "host_peak_bytes": peak_resident_bytes(),
        "state": state.iter().map(shown).collect::<Vec<_>>(),
    }))
}

/// Lets blocks keep no more of forward than makes a step shorter.
fn keep_what_pays(
    config: &mut EngineConfig,
    can: &Capabilities,
    session: &Session,
    model: &ModelConfig,
    sample: &MicroBatch,
    resumes: bool,
) -> Result<(), EngineError> {
    // The best of single products, which is all that a start measures, says too little about a step.
    if can.predicts && config.overrides.kept_blocks.is_none() {
        let runs = PlanningRuns::default();
        let found = keeping::cheapest(
            config,
            &session.backend,
            model,
            sample,
            can,
            &runs,
            session::disk_room(config),
        );
        let (keep, _) = found.map_err(|error| advise(error, config, session, model, resumes))?;
        *config = keep.of(config);
    }
    Ok(())
}

/// Makes training state of `source`, or continues what is there without one.
fn open_engine(
    config: EngineConfig,
    session: &Session,
    model: Model,
    sample: &MicroBatch,
    source: Option<&mut dyn WeightSource>,
) -> Result<Engine, CliError> {
    let (wanted, backend, resumes) = (config.clone(), session.backend.clone(), source.is_none());
    session.warn_of_host_memory(&config, || terrace_models::build(&model.config), sample);
    let engine = match source {
        None => {
            eprintln!("reading and verifying the training state");
            Engine::resume(config, backend, model.blocks, sample)
        }
        Some(source) => Engine::create(config, backend, model.blocks, sample, source),
    };
    let engine = engine.map_err(|error| match error {
        EngineError::AnotherRun { stored, given } => identity::another_run(stored, given),
        error => advise(error, &wanted, session, &model.config, resumes).into(),
    })?;
    session.warn_of_slow_copies();
    Ok(engine)
}

/// A plan that does not fit, with what would.
pub(super) fn advise(
    error: EngineError,
    config: &EngineConfig,
    session: &Session,
    model: &ModelConfig,
    resumes: bool,
) -> EngineError {
    let (backend, runs) = (&session.backend, PlanningRuns::default());
    Knobs { config, backend, model, runs: &runs, disk_space: None, resumes }.advise(error)
}

/// The file of metrics, ready for the next step of an engine that has written so many bytes.
fn open_metrics(path: &Path, engine: &Engine, written: u64) -> Result<MetricsWriter, CliError> {
    let opened = MetricsWriter::open(path, engine.step(), &engine.noted());
    let mut metrics = opened.map_err(|e| CliError::Failed(format!("opening {}: {e}", path.display())))?;
    match metrics.damaged() {
        0 => {}
        1 => eprintln!("note: a damaged line of {} was dropped", path.display()),
        lines => eprintln!("note: {lines} damaged lines of {} were dropped", path.display()),
    }
    metrics.count(written);
    Ok(metrics)
}

/// How the state that is continued is cut into chunks, which a plan has to go by; what is wrong with it is said when it is opened.
fn stored_chunks(session: &Session, config: &EngineConfig) -> Option<usize> {
    if config.disks.is_empty() {
        return None;
    }
    let view = StoreView::open(&session.backend.io, &config.disks, Access::Look).ok()?;
    usize::try_from(view.spec().chunk_elements).ok()
}

/// Says what was loaded since `loading`, and the plan of the run. Gives its windows.
fn say_plan(engine: &Engine, run: &TrainConfig, loading: Instant) -> Windows {
    eprintln!(
        "{} parameters, state {} on {}, {} in {}",
        count(engine.parameters() as f64),
        run.state.name(),
        place_name(run),
        if run.resume { format!("resumed at step {}", engine.step()) } else { "loaded".into() },
        duration(loading.elapsed().as_secs_f64()),
    );
    eprintln!("{}", session::describe_plan(engine.memory_plan()));
    let (keeping, blocks) = engine.kept_blocks();
    let (on_host, on_disk) = engine.kept_elsewhere();
    let by = |blocks, place| if blocks > 0 { format!(", {blocks} {place}") } else { String::new() };
    let elsewhere = by(on_host, "in host memory") + &by(on_disk, "on disk");
    let rest = if keeping < blocks { ", the rest recomputes them" } else { "" };
    eprintln!("{keeping} of {blocks} blocks keep their activations for backward{elsewhere}{rest}");
    eprintln!("{}", engine.plan_summary());
    let note =
        run.durability.note(run.save_every.is_some(), run.resume).filter(|_| run.offload == Offload::Disk);
    if let Some(note) = note {
        eprintln!("note: {note}");
    }
    Windows::new(engine.windows(), blocks)
}

/// What `--save-plan` writes.
fn plan_of(
    run: &TrainConfig,
    model: ModelShape,
    windows: Windows,
    engine: &Engine,
    session: &Session,
    floor: &Floor,
) -> PlanFile {
    let unified = session.backend.device.unified();
    let config = engine.config();
    PlanFile {
        version: pinned::VERSION,
        model,
        run: Settings {
            batch_size: run.batch_size as u64,
            grad_accum: run.grad_accum as u64,
            accumulation: run.accumulation,
            seq_len: run.seq_len,
            dtype: run.dtype,
            state: run.state,
            offload: run.offload,
            durability: run.durability,
            device_memory: if unified { DeviceMemory::Host } else { DeviceMemory::Own },
            ranks: 1,
            nodes: 1,
        },
        budget: Budget::new(config.host_budget, config.device_budget),
        windows,
        bytes: Totals::new(engine.memory_plan()),
        memory: Term::all(engine.memory_plan()),
        placement: PlacedGroups::all(&engine.placement()),
        step: Step::new(&engine.step_work(), floor),
    }
}

/// Says what the run's settings are warned of, and what there is to train on.
fn say_what(run: &TrainConfig, data: &Dataset) {
    run.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let summary = data.summary();
    eprintln!(
        "data: {} samples, {} tokens, {} of them carry loss{}",
        count(data.len() as f64),
        count(summary.tokens as f64),
        count(summary.loss_tokens as f64),
        if summary.truncated > 0 { format!("; {} rows truncated", summary.truncated) } else { String::new() },
    );
}

/// Says where the results are.
fn say_where(run: &TrainConfig, state: &[PathBuf]) {
    eprintln!("the trained model is in {}", run.output.display());
    if run.offload == Offload::Disk {
        let dirs: Vec<_> = state.iter().map(|d| d.display().to_string()).collect();
        eprintln!("its training state is in {} (for --resume; delete it to free the space)", dirs.join(", "));
    } else if run.save_every.is_some() && state[0].exists() {
        let dir = state[0].display();
        eprintln!(
            "the training state of the last save is in {dir} (for --resume; delete it to free the space)"
        );
    }
}

/// A run in progress.
struct Trainer<'a> {
    engine: Engine,
    run: &'a TrainConfig,
    session: &'a Session,
    schedule: Schedule,
    builder: TokenBatch,
    config_text: String,
    metrics: MetricsWriter,
    metrics_path: PathBuf,
    events: Option<EventWriter>,
    progress: Progress,
    last: Stats,
    /// The step that it began at, or that was saved after an error: it need not be saved for one.
    kept: u64,
    /// A step failed in a way that may have changed a part of the state in memory.
    is_torn: bool,
    floor: Floor,
    summary: floor::Summary,
    finished: Option<StepMetrics>,
    saving: Option<Saving>,
}

impl Trainer<'_> {
    /// What is left to do after the steps, or after one that failed: the steps before it are not to be lost.
    fn end(&mut self, result: Result<(), CliError>) -> Result<(), CliError> {
        let run = self.run;
        self.progress.finish();
        let on_disk = run.offload == Offload::Disk;
        let flushed = if on_disk { self.engine.save() } else { self.engine.flush() };
        // What was never committed because of an error is not an error of its own.
        let saved = if flushed.is_ok() { self.finish_save() } else { Ok(()) };
        let in_memory = !on_disk && !self.is_torn && flushed.is_ok();
        let failed = saved.is_err() || result.as_ref().is_err_and(|e| !matches!(e, CliError::Interrupted));
        let mut is_kept = !(in_memory && failed) || self.keep_what_is_in_memory();
        // Neither the error nor the model may be lost to a timeline that cannot be written.
        let seen = Seen { engine: &self.engine, cache: None };
        let traced = trace::write(run.trace.as_deref(), self.session, seen);
        let counted = self.count_last_writes();
        // A save that failed leaves the model as it is, perhaps in memory alone.
        let trained = result.is_ok() && flushed.is_ok();
        let exported = if trained || !is_kept { self.export(&run.output) } else { Ok(()) };
        if exported.is_err() && is_kept {
            is_kept = if in_memory { self.keep_what_is_in_memory() } else { on_disk };
            if is_kept {
                eprintln!("the training state is saved: once the model can be written, --resume does that");
            }
        }
        self.say_what_it_took();
        if exported.is_ok() && (!is_kept || trained && saved.is_err()) {
            eprintln!("the model of step {} is in {}", self.engine.step(), run.output.display());
        }
        // The first is the error; the others are not to be lost.
        let all = [result, flushed.map_err(CliError::from), exported, saved, traced, counted];
        let mut errors = all.into_iter().filter_map(Result::err);
        let first = errors.next();
        errors.for_each(|error| eprintln!("error: {error}"));
        first.map_or(Ok(()), Err)
    }

    /// Saves state that nothing else has, after an error that has to do with something else: a full disk, data that cannot be read.
    /// Whether it is saved, or was before.
    fn keep_what_is_in_memory(&mut self) -> bool {
        let step = self.engine.step();
        if step == self.kept {
            return true;
        }
        if let Err(error) = self.engine.save() {
            eprintln!("error: step {step} was not saved: {}", CliError::from(error));
            return false;
        }
        eprintln!("step {step} is saved all the same; --resume continues from it");
        self.kept = step;
        true
    }

    fn say_what_it_took(&self) {
        if let Some(text) = self.summary.text(&self.floor) {
            eprintln!("{text}");
        }
        if let Some(text) = floor::wear(self.metrics.disk_written_bytes(), self.run.endurance) {
            eprintln!("  {text}");
        }
        if let Some(text) = self.summary.warning() {
            eprintln!("warning: {text}");
        }
    }

    /// The last update and save came after the last line.
    fn count_last_writes(&mut self) -> Result<(), CliError> {
        let now = self.session.stats.snapshot();
        let saved = now.since(&self.last).write.bytes;
        self.last = now;
        let counted = self.metrics.count_after_last(saved);
        counted.map_err(|e| {
            let (path, lacks) = (self.metrics_path.display(), self.metrics.lacks());
            CliError::Failed(format!("writing {path}: {e}; it lacks {lacks}"))
        })
    }

    /// Trains up to `steps`; the user may stop it after any step.
    fn run(
        &mut self,
        steps: u64,
        samples: impl Fn(u64) -> Result<Vec<crate::data::Sample>, CliError>,
    ) -> Result<(), CliError> {
        let interrupt = Interrupt::listen();
        self.make_up_for_saves()?;
        while self.engine.step() < steps {
            let step = self.engine.step();
            if self.saves_at(step + 1) {
                saving::make_way(self.run, step + 1)?;
            }
            let samples = samples(step)?;
            let batches = self.micro_batches(&samples)?;
            // A skipped step leaves the schedule where it was, as in DeepSpeed.
            let updates = self.engine.updates();
            let (lr, betas) = (self.schedule.lr(updates), self.schedule.betas(updates));
            let tokens = samples.iter().map(|s| s.ids.len() as u64).sum();
            let (stats, last, floor) = (&self.session.stats, self.last, self.floor.bound());
            let note = |report: &StepReport| {
                let metrics = step_metrics(report, lr, tokens, &stats.snapshot().since(&last), floor);
                serde_json::to_vec(&metrics).expect("metrics are plain data")
            };
            let report = self.engine.train_step_noting(&batches, StepRates { lr, betas }, note);
            // What diverged, and batches that cannot be, were found out before anything was changed.
            let is_before =
                |error: &EngineError| matches!(error, EngineError::Diverged(_) | EngineError::Batch(_));
            self.is_torn = report.as_ref().is_err_and(|error| !is_before(error));
            let report = report?;
            self.record(&report, lr, tokens);
            if self.saves_at(self.engine.step()) {
                self.save()?;
            }
            if self.saving.as_mut().is_some_and(Saving::is_finished) {
                self.finish_save()?;
            }
            if interrupt.requested() && self.engine.step() < steps {
                self.engine.save()?;
                return Err(CliError::Interrupted);
            }
        }
        Ok(())
    }

    /// Whether the model of a step is saved.
    fn saves_at(&self, step: u64) -> bool {
        step > 0 && self.run.save_every.is_some_and(|every| step.is_multiple_of(every))
    }

    /// Does what a process that ended left to do: the folder of the step that it committed, and those that were one too many.
    fn make_up_for_saves(&mut self) -> Result<(), CliError> {
        let (run, step) = (self.run, self.engine.step());
        // What is too much is no reason to end a run.
        let warn = |error: CliError| eprintln!("warning: {error}");
        retention::sweep(&run.output).unwrap_or_else(warn);
        if !run.resume {
            return Ok(());
        }
        if self.saves_at(step) && !saving::is_there(run, step) {
            return self.save();
        }
        if let Some(limit) = run.save_total_limit {
            match retention::prune(&run.output, step, limit) {
                Ok(removed) => retention::say_removed(&removed, &self.progress),
                Err(error) => warn(error),
            }
        }
        Ok(())
    }

    fn save(&mut self) -> Result<(), CliError> {
        self.finish_save()?;
        self.saving = Some(Saving::begin(&mut self.engine, self.run, &self.config_text)?);
        Ok(())
    }

    /// Waits for the save that is being written, if there is one.
    fn finish_save(&mut self) -> Result<(), CliError> {
        let Some(saving) = self.saving.take() else { return Ok(()) };
        saving.finish(&mut self.engine, self.run, &mut self.progress, &mut self.summary)
    }

    fn micro_batches(&self, samples: &[crate::data::Sample]) -> Result<Vec<MicroBatch>, CliError> {
        let batches = samples.chunks(self.run.batch_size).map(|samples| {
            let rows: Vec<Row<'_>> = samples.iter().map(|s| Row { ids: &s.ids, labels: &s.labels }).collect();
            self.builder.train(&rows, self.run.batch_size, self.run.seq_len).map_err(CliError::failed)
        });
        batches.collect()
    }

    fn record(&mut self, report: &StepReport, lr: f64, tokens: u64) {
        let now = self.session.stats.snapshot();
        let io = now.since(&self.last);
        self.last = now;
        let metrics = step_metrics(report, lr, tokens, &io, self.floor.bound());
        let was_behind = self.metrics.waiting() > 0;
        // Lines that cannot be written are no reason to end a run: they wait for room.
        if let Err(error) = self.metrics.append(&metrics)
            && !was_behind
        {
            let path = self.metrics_path.display();
            self.progress
                .note(&format!("warning: writing {path}: {error}; it is tried again with every step"));
        }
        let metrics = StepMetrics { disk_written_bytes: self.metrics.disk_written_bytes(), ..metrics };
        if let Some(mut events) = self.events.take() {
            match events.append(&metrics) {
                Ok(()) => self.events = Some(events),
                Err(error) => {
                    let (path, step) = (events.path().display(), metrics.step);
                    self.progress
                        .note(&format!("warning: writing {path}: {error}; it ends before step {step}"));
                }
            }
        }
        self.progress.step(&metrics);
        self.summary.add(&metrics);
        self.finished = Some(metrics);
    }

    fn export(&mut self, folder: &Path) -> Result<(), CliError> {
        let mut weights = self.engine.weights()?;
        let shard = self.run.max_shard_size.0;
        export_folder(&mut weights, Some(&self.run.model), folder, shard, &self.config_text)?;
        Ok(())
    }
}

/// What a step did, with the disk traffic since the step before it.
fn step_metrics(
    report: &StepReport,
    lr: f64,
    tokens: u64,
    io: &Stats,
    floor: Option<(&str, f64)>,
) -> StepMetrics {
    StepMetrics {
        step: report.step,
        loss: Some(report.loss),
        grad_norm: Some(report.grad_norm),
        loss_scale: report.loss_scale,
        skipped: report.loss_scale.map(|_| report.skipped),
        speculated: report.speculated,
        lr,
        tokens,
        step_seconds: report.seconds,
        tokens_per_second: tokens as f64 / report.seconds,
        floor_seconds: floor.map(|(_, seconds)| seconds),
        floor_fraction: floor.map(|(_, seconds)| seconds / report.seconds),
        bound_by: floor.map(|(bound, _)| bound.to_owned()),
        disk_read_bytes: io.read.bytes,
        disk_write_bytes: io.write.bytes,
        // The writer has counted.
        disk_written_bytes: 0,
        upload_bytes: report.upload_bytes,
        download_bytes: report.download_bytes,
        device_peak_bytes: report.device_peak_bytes,
        host_peak_bytes: peak_resident_bytes(),
        stall_seconds: [
            ("weights".to_owned(), report.weights_stall_seconds),
            ("activations".to_owned(), report.activations_stall_seconds),
            ("gradient_buffers".to_owned(), report.gradients_stall_seconds),
            ("optimizer_state".to_owned(), report.state_stall_seconds),
            ("commit".to_owned(), report.commit_seconds),
        ]
        .into(),
    }
}

fn event_writer(folder: Option<&Path>) -> Result<Option<EventWriter>, CliError> {
    let Some(folder) = folder else { return Ok(None) };
    let shown = folder.display();
    EventWriter::create(folder).map(Some).map_err(|e| {
        CliError::Failed(format!("--tensorboard {shown}: {e}; choose a folder that can be written"))
    })
}

/// Every parameter of a model.
pub(super) fn all_params(blocks: &[Box<dyn Block>]) -> Vec<ParamSpec> {
    blocks.iter().flat_map(|b| b.params().iter().cloned()).collect()
}

pub(super) fn read_config(model: &Path) -> Result<String, CliError> {
    let path = model.join("config.json");
    std::fs::read_to_string(&path).map_err(|e| CliError::Failed(format!("reading {}: {e}", path.display())))
}

/// The configuration file's `aio` section over the profile over the defaults.
fn io_config(run: &TrainConfig, profile: Option<&DiskProfile>) -> IoConfig {
    let measured = session::io_config(profile);
    IoConfig {
        block_bytes: run.aio_block_size.map_or(measured.block_bytes, |b| b as usize),
        queue_depth: run.aio_queue_depth.map_or(measured.queue_depth, |d| d as usize),
        ..measured
    }
}

pub(super) fn state_dirs(run: &TrainConfig) -> Vec<PathBuf> {
    // State in memory is saved to the default directory, when it is saved at all.
    if run.disks.is_empty() { vec![run::default_disk(&run.output)] } else { run.disks.clone() }
}

pub(super) fn engine_config(
    run: &TrainConfig,
    placement: &PlacementArgs,
    session: &Session,
    identity: String,
) -> Result<EngineConfig, CliError> {
    let state = match run.state {
        StateFlag::Fp32 => StateFormat::Fp32,
        StateFlag::Split => StateFormat::Split,
        StateFlag::Bf16 => StateFormat::Bf16,
        StateFlag::Compact => StateFormat::Compact,
    };
    let groups = run.groups.iter().map(|group| group.0.clone()).collect();
    // Every schedule has the same top, whatever the length of the run.
    let (optimizer, base_lr) = (run.optimizer, schedule::base_lr(&run.schedule(1)));
    Ok(EngineConfig {
        dtype: session::dtype(run.dtype),
        training: Some(TrainingConfig {
            state,
            optimizer,
            clip: run.clip,
            loss_scale: run.loss_scale,
            groups,
            base_lr,
            host_part: run.optimizer_ratio,
        }),
        placement: session::placement(run.offload),
        disks: state_dirs(run),
        disk_weights: None,
        host_budget: session::host_budget(placement),
        cache_bytes: placement.disk_cache.0,
        durability: run.durability.into(),
        device_budget: session.device_budget(placement),
        threads: session.threads,
        pinned: placement.pin_threads,
        limits: BatchLimits {
            sequences: run.batch_size,
            length: run.seq_len,
            micro_batches: run.grad_accum,
            cache_length: 0,
            cache_pages: 0,
        },
        accumulation: session::accumulation(run.accumulation),
        kv_tier: Tier::Device,
        keep_at_most: None,
        keep_on_host: session::keep_elsewhere(run.activations).0,
        keep_on_disk: session::keep_elsewhere(run.activations).1,
        overrides: windows(run),
        timeline: session.timeline.clone(),
        identity,
    })
}

/// The windows of the plan, or what flags fix.
fn windows(run: &TrainConfig) -> WindowOverrides {
    if let Some(pinned) = &run.pinned {
        return pinned.file.windows.overrides();
    }
    WindowOverrides {
        weight_slots: run.window,
        overlap: Some(run.overlap),
        kept_blocks: session::kept_blocks(run.activations),
        ..WindowOverrides::default()
    }
}

fn place_name(run: &TrainConfig) -> String {
    match run.offload {
        Offload::Disk => run.disks.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", "),
        Offload::Host => "host memory".into(),
        Offload::None => "the device (host memory on a CPU)".into(),
    }
}

impl StateFlag {
    /// The flag's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Split => "split",
            Self::Bf16 => "bf16",
            Self::Compact => "compact",
        }
    }
}

/// Bytes, for messages of this module's siblings.
pub(super) fn size(bytes: u64) -> ByteSize {
    ByteSize(bytes)
}
