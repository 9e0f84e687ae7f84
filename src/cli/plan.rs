//! `terrace plan`: what a run would need and how long its steps would take, without weights, and of machines that are not there.

use super::args::{
    Accumulation, DeviceName, Dtype, DurabilityFlag, Offload, OptimizerName, PlacementArgs, PlanArgs,
    StateFormat as StateFlag,
};
use super::floor::time;
use super::inputs::trains_as_it_says;
use super::pinned::{
    self, Budget, DeviceMemory, ModelShape, PlanFile, Settings, Step, Term, Totals, Windows,
};
use super::placement::PlacedGroups;
use super::session::{self, Session};
use super::{keeping, placement, print_json, print_text, ranks};
use crate::config::run;
use crate::engine::{CUDA_SCRATCH_BYTES, host_updates};
use crate::error::CliError;
use crate::floor::{Capabilities, DISK, Floor, Unknown};
use crate::progress::count;
use crate::{cpu_backend, shape};
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::EngineConfig as IoConfig;
use terrace_device::host::HostDevice;
use terrace_kernels::{QuantFormat, dry};
use terrace_models::{ModelConfig, TokenBatch};
use terrace_optimizer::{LossScaleConfig, StateFormat};
use terrace_tiers::{ByteSize, Tier};
use terrace_zero::{
    Backend, BatchLimits, EngineConfig, EngineError, Outlook, PlanningRuns, Ranks, TrainingConfig,
    WindowOverrides,
};

/// What a drive of two terabytes is commonly warranted for.
const ENDURANCE_BYTES: f64 = 1200e12;
/// What the batch and the accumulation are multiplied with in the table of choices.
const BATCHES: [(usize, usize); 4] = [(1, 1), (1, 4), (4, 1), (4, 4)];

/// Of the table of choices.
pub(super) const HEADER: &str =
    "state    offload  batch  accum        host      device        disk   at least   expected      tok/s";

/// Most micro-batches times layers in horizontal accumulation.
const PASSES_MAX: usize = 1 << 16;

/// One combination of what can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    state: StateFormat,
    offload: Offload,
    pub(super) batch: usize,
    accum: usize,
}

/// Everything that choices have in common.
#[derive(Clone)]
pub(super) struct Planning<'a> {
    pub(super) args: &'a PlanArgs,
    pub(super) model: ModelConfig,
    pub(super) backend: Backend,
    threads: usize,
    pub(super) on_card: bool,
    pub(super) host_budget: u64,
    pub(super) device_budget: u64,
    pub(super) length: usize,
    disks: Vec<PathBuf>,
    /// The parts of the state that the disks take, where they differ.
    disk_weights: Option<Vec<f64>>,
    profile: Option<crate::calibrate::Profile>,
    /// Another machine is meant.
    described: bool,
    pub(super) runs: Arc<PlanningRuns>,
    ranks: Ranks,
}

/// A choice that fits.
pub(super) struct Planned {
    choice: Choice,
    pub(super) outlook: Outlook,
    floor: Floor,
    operations_rate: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// The model is refused, the plan does not fit, or a profile cannot be read.
pub fn plan(args: &PlanArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let planning = Planning::new(args, session::compute_threads(threads))?;
    if args.generate {
        return super::plan_generate::plan(&planning);
    }
    let state = args.state.unwrap_or(match args.dtype {
        Dtype::Bf16 => StateFlag::Split,
        _ => StateFlag::Fp32,
    });
    let chosen = Choice {
        state: format(state),
        offload: args.offload.unwrap_or(Offload::Disk),
        batch: args.batch_size.get(),
        accum: args.grad_accum.get(),
    };
    let planned = planning.of(chosen);
    let choices = planning.choices(chosen);
    let planned = match planned {
        Ok(planned) => planned,
        Err(error) => return Err(planning.refusal(error, chosen, &choices)),
    };
    planning.warn_of_host_memory(&planned.outlook);
    if let Some(path) = &args.save {
        planning.file(&planned, state).write("--save", path)?;
    }
    if args.json {
        return print_json(&planning.document(&planned, &choices));
    }
    print_text(planning.text(&planned, &choices).trim_end())
}

impl<'a> Planning<'a> {
    fn new(args: &'a PlanArgs, threads: usize) -> Result<Self, CliError> {
        args.check_rates()?;
        let model = model(args)?;
        if !args.generate {
            args.model.as_ref().map_or(Ok(()), |path| trains_as_it_says(path, &model))?;
        }
        // What is generated takes positions as well.
        let new_tokens = if args.generate { args.max_new_tokens.get() } else { 0 };
        let most = match args.seq_len {
            Some(_) => model.positions_max,
            None => model.positions_max.saturating_sub(new_tokens).max(1),
        };
        let length = run::seq_len(args.seq_len.map(usize::from), Some(most))?;
        for (flag, value) in [("--batch-size", args.batch_size), ("--grad-accum", args.grad_accum)] {
            run::count(flag, Some(value.get() as u64))?;
        }
        run::micro_batch(args.batch_size.get(), length, !args.generate)?;
        let placement = PlacementArgs {
            host_memory: args.host_memory,
            disk_cache: args.disk_cache,
            device_memory: args.device_memory.or(args.gpu_memory),
            device: args.device,
            ..PlacementArgs::default()
        };
        let io = IoConfig::default();
        let imagined = args.gpu_memory.is_some() || args.link.is_some();
        if imagined && args.device == DeviceName::Cpu {
            return Err(CliError::Usage(
                "--gpu-memory and --link describe a card, and --device cpu computes without one: leave one of them out".into(),
            ));
        }
        if args.link.is_some() && placement.device_memory.is_none() {
            return Err(CliError::Usage(
                "--link describes a card: give the memory that it has with --gpu-memory".into(),
            ));
        }
        let offload = args.offload.unwrap_or(Offload::Disk);
        run::shares_state(args.optimizer_ratio, offload, args.durability)?;
        let (backend, on_card, device_budget) = if imagined {
            // A card that is only imagined: memory of its own, and no kernels.
            let mut backend = cpu_backend(1, &io)?;
            backend.device = Arc::new(HostDevice::discrete());
            backend.kernels = dry::kernel_set().0;
            backend.updates = Some(host_updates(1)?);
            backend.kernel_scratch_bytes = CUDA_SCRATCH_BYTES;
            (backend, true, placement.device_memory.map_or(u64::MAX, |size| size.0))
        } else {
            let session = Session::open(&placement, &io, NonZeroUsize::new(threads), false)?;
            let budget = session.device_budget(&placement);
            (session.backend.clone(), session.on_card(), budget)
        };
        session::check_activations(args.activations, offload, backend.device.unified())?;
        let disks =
            if args.disk.is_empty() { vec![PathBuf::from("terrace-state")] } else { args.disk.clone() };
        // Figures of this machine say nothing about another. Other disks may be this machine's.
        let described = imagined || args.tflops.is_some() || args.dram.is_some();
        if !described && args.profile.is_none() {
            args.disk.iter().try_for_each(|dir| super::checks::planned_disk(dir))?;
        }
        let profile = if args.profile.is_some() || !described {
            super::floor::profile(args.profile.as_ref(), threads, &args.disk)?
        } else {
            None
        };
        let disk_weights =
            session::disk_weights(profile.as_ref().and_then(|profile| profile.disk.as_ref()), &args.disk);
        let host_budget = session::host_budget(&placement);
        let ranks = args.ranks.ranks(backend.device.unified())?;
        Ok(Self {
            args,
            model,
            backend,
            threads,
            on_card,
            host_budget,
            device_budget,
            length,
            disks,
            disk_weights,
            profile,
            described,
            runs: PlanningRuns::of(ranks).into(),
            ranks,
        })
    }

    /// Says so if a plan for this machine takes more host memory than there is.
    pub(super) fn warn_of_host_memory(&self, outlook: &Outlook) {
        if !self.described && !self.ranks.are_several() {
            session::warn_of_plan(&outlook.memory);
        }
    }

    /// Plans one choice.
    fn of(&self, choice: Choice) -> Result<Planned, EngineError> {
        self.of_durability(choice, self.args.durability)
    }

    pub(super) fn of_durability(
        &self,
        choice: Choice,
        durability: DurabilityFlag,
    ) -> Result<Planned, EngineError> {
        self.countable(choice.batch)?;
        self.playable(choice)?;
        let config = self.config_of(choice, durability);
        let sample = TokenBatch::new(&self.model).shape(choice.batch, self.length);
        // Rates of formats are those of AdamW; other algorithms move other bytes.
        let state = Some(choice.state).filter(|_| self.args.optimizer == OptimizerName::Adamw);
        let can = self.capabilities(state, None);
        let (_, outlook) = keeping::cheapest(
            &config,
            &self.backend,
            &self.model,
            &sample,
            &can,
            &self.runs,
            self.args.disk_space.map(|space| space.0),
        )?;
        self.enough_disk(&outlook.memory)?;
        let floor = Floor::complete(&outlook.work, &can, false);
        Ok(Planned { choice, outlook, floor, operations_rate: can.operations })
    }

    pub(super) fn config_of(&self, choice: Choice, durability: DurabilityFlag) -> EngineConfig {
        let limits = BatchLimits {
            sequences: choice.batch,
            length: self.length,
            micro_batches: choice.accum,
            cache_length: 0,
            cache_pages: 0,
        };
        let (keep_on_host, keep_on_disk) = session::keep_elsewhere(self.args.activations);
        let clip = Some(self.args.clip.unwrap_or(1.0)).filter(|&norm| norm > 0.0);
        EngineConfig {
            training: Some(TrainingConfig {
                state: choice.state,
                optimizer: run::algorithm_named(self.args.optimizer),
                clip,
                host_part: self.args.optimizer_ratio,
                loss_scale: (self.args.dtype == Dtype::Fp16).then(LossScaleConfig::default),
                ..TrainingConfig::default()
            }),
            accumulation: session::accumulation(self.args.accumulation),
            durability: durability.into(),
            keep_on_host,
            keep_on_disk,
            overrides: WindowOverrides {
                kept_blocks: session::kept_blocks(self.args.activations),
                ..WindowOverrides::default()
            },
            ..self.config(choice.offload, limits)
        }
    }

    /// Refuses a batch, in the table of choices perhaps a multiple of what was asked for, whose positions cannot be numbered.
    pub(super) fn countable(&self, batch: usize) -> Result<(), EngineError> {
        run::micro_batch(batch, self.length, !self.args.generate)
            .map_err(|error| EngineError::Config(error.to_string()))
    }

    /// Refuses a schedule that would take too long to go through: in horizontal accumulation every micro-batch has its own place in it.
    fn playable(&self, choice: Choice) -> Result<(), EngineError> {
        let most = (PASSES_MAX / self.model.layers.max(1)).max(1);
        if self.args.accumulation == Accumulation::Vertical || choice.accum <= most {
            return Ok(());
        }
        Err(EngineError::Config(format!(
            "--grad-accum {} with --accumulation horizontal is more than can be planned for {} layers, each of which every micro-batch \
             goes through on its own; lower --grad-accum to {most}, or accumulate vertically",
            choice.accum, self.model.layers
        )))
    }

    /// What all engines of the plan have in common, with frozen weights.
    pub(super) fn config(&self, offload: Offload, limits: BatchLimits) -> EngineConfig {
        EngineConfig {
            placement: session::placement(offload),
            disks: self.disks.clone(),
            disk_weights: self.disk_weights.clone(),
            host_budget: self.host_budget,
            cache_bytes: self.args.disk_cache.0,
            device_budget: self.device_budget,
            threads: self.threads,
            ..EngineConfig::new(session::dtype(self.args.dtype), limits)
        }
    }

    /// Where the state or the weights could be.
    pub(super) fn places(&self, chosen: Offload) -> Vec<Offload> {
        match (self.args.offload.is_some(), self.on_card) {
            (true, _) => vec![chosen],
            (false, true) => vec![Offload::None, Offload::Host, Offload::Disk],
            // Without a card memory of the device is that of the host.
            (false, false) => vec![Offload::Host, Offload::Disk],
        }
    }

    /// The profile's figures, and over them what was given by hand.
    pub(super) fn capabilities(
        &self,
        state: Option<StateFormat>,
        weights: Option<QuantFormat>,
    ) -> Capabilities {
        let (args, dtype) = (self.args, session::dtype(self.args.dtype));
        let disk = self.profile.as_ref().and_then(|profile| profile.disk.as_ref());
        let whole: Vec<PathBuf> = args.disk.iter().map(|dir| session::whole(dir, disk)).collect();
        let mut can = match &self.profile {
            Some(profile) => {
                // Without a directory in mind, all that were measured are meant.
                let measured = profile.disk.iter().flat_map(|disk| disk.paths.iter().map(|p| p.path.clone()));
                let dirs = if whole.is_empty() { measured.collect() } else { whole };
                let shares = self.disk_weights.as_deref();
                let can = Capabilities::of(profile, dtype, state, self.on_card, &dirs, shares);
                match weights {
                    Some(format) => can.with_weights(profile, format, self.on_card),
                    None => can,
                }
            }
            None => Capabilities::default(),
        };
        let rate = |size: Option<crate::config::ByteSize>| size.map(|size| size.0 as f64);
        if let Some(tflops) = args.tflops {
            (can.operations, can.training) = (Some(tflops * 1e12), None);
        }
        if let Some(link) = rate(args.link) {
            (can.upload, can.download, can.both) = (Some(link), Some(link), None);
        }
        can.memory = rate(args.dram).or(can.memory);
        can.device_memory = rate(args.gpu_bandwidth).or(can.device_memory);
        args.ranks.add_to(&mut can);
        if let (Some(read), Some(write)) = (rate(args.disk_read), rate(args.disk_write)) {
            let rates = crate::calibrate::Rates {
                read_bytes_per_second: read,
                write_bytes_per_second: write,
                // As one shared medium: a byte of each takes the time of both.
                mixed_bytes_per_second: 2.0 / (1.0 / read + 1.0 / write),
            };
            (can.disks, can.disks_together) = (vec![(1.0, rates)], None);
        }
        can
    }

    /// Why there is no time, and what would give one.
    pub(super) fn what_is_missing(&self, floor: &Floor) -> String {
        let disks: Vec<String> = self.args.disk.iter().map(|dir| dir.display().to_string()).collect();
        let words = |unknown: &Unknown| match (unknown.resource, disks.as_slice()) {
            (DISK, [_, ..]) => format!("--disk {}", disks.join(" and ")),
            ("compute", _) if self.profile.is_some() => match session::quant_format(self.args.weights) {
                Some(format) => format!("products with {format} weights"),
                None => format!("compute in {}", pinned::name(self.args.dtype)),
            },
            (resource, _) => resource.to_owned(),
        };
        let resources: Vec<String> = floor.unknown.iter().map(words).collect();
        let flags: Vec<&str> = floor.unknown.iter().map(|unknown| unknown.flags).collect();
        let mut advice = format!("give {}", flags.join(", "));
        if !self.described && self.args.profile.is_none() {
            let is_disk = floor.unknown.iter().any(|unknown| unknown.resource == DISK);
            let disks = match disks.as_slice() {
                [] if is_disk => " --disk PATH".into(),
                named => named.iter().map(|dir| format!(" --disk {dir}")).collect::<String>(),
            };
            advice = format!("run `terrace calibrate{disks}`, or {advice}");
        } else if self.args.profile.is_some() {
            advice += ", or name a --profile that knows it";
        }
        format!("nothing is known of the speed of {}; {advice}", resources.join(", "))
    }

    /// All combinations that are worth a look, with why one does not fit.
    fn choices(&self, chosen: Choice) -> Vec<(Choice, Result<Planned, EngineError>)> {
        let states: &[StateFormat] = match self.args.dtype {
            Dtype::Bf16 => &[StateFormat::Fp32, StateFormat::Split, StateFormat::Bf16, StateFormat::Compact],
            _ => &[StateFormat::Fp32],
        };
        let places = self.places(chosen.offload);
        let of_batch = |(batch, accum): (usize, usize)| {
            let choices =
                states.iter().flat_map(|&state| places.iter().map(move |&offload| (state, offload)));
            let choices = choices.map(|(state, offload)| Choice {
                state,
                offload,
                batch: batch * chosen.batch,
                accum: accum * chosen.accum,
            });
            choices.map(|choice| (choice, self.of(choice))).collect::<Vec<_>>()
        };
        // Choices of the same batch share what takes the time, so that each batch is one thread's. Where the system refuses threads, this
        // one does it alone.
        let found: Vec<_> = match rayon::ThreadPoolBuilder::new().build() {
            Ok(pool) => pool.install(|| BATCHES.into_par_iter().map(of_batch).collect()),
            Err(_) => BATCHES.into_iter().map(of_batch).collect(),
        };
        // State by state and place by place, as they are read.
        let mut batches: Vec<_> = found.into_iter().map(Vec::into_iter).collect();
        let rows = states.len() * places.len();
        (0..rows).flat_map(|_| batches.iter_mut().filter_map(Iterator::next).collect::<Vec<_>>()).collect()
    }

    fn text(&self, planned: &Planned, choices: &[(Choice, Result<Planned, EngineError>)]) -> String {
        let (mut text, outlook, several) = (String::new(), &planned.outlook, self.ranks.are_several());
        let mut line = |words: String| text += &format!("{words}\n");
        line(shape::words(&self.model, outlook.parameters));
        line(format!(
            "{}{}{}; {} tokens a step ({}{} × {} × {}{})",
            match self.args.optimizer {
                OptimizerName::Adamw => String::new(),
                other => format!("{}, ", pinned::name(other)),
            },
            planned.choice.words(),
            match (self.args.durability, planned.choice.offload) {
                (DurabilityFlag::None, Offload::Disk) => ", kept once",
                _ => "",
            },
            outlook.work.tokens,
            if several { format!("{} ranks × ", self.ranks.count()) } else { String::new() },
            planned.choice.accum,
            planned.choice.batch,
            self.length,
            match self.args.accumulation {
                Accumulation::Vertical => "",
                Accumulation::Horizontal => ", one micro-batch after the other",
            }
        ));
        if several {
            line(ranks::words(self.ranks));
        }
        line(session::describe_plan(&outlook.memory));
        line(outlook.summary.clone());
        let whose = if several { "what goes where, of one rank:" } else { "what goes where:" };
        line(format!("{whose}\n{}", placement::table(&outlook.placement)));
        let work = &outlook.work;
        line(format!(
            "a step: {} operations; disk {} read, {} written; link {} up, {} down; host memory {}",
            exponent(work.operations),
            ByteSize(work.disk_read_bytes),
            ByteSize(work.disk_write_bytes),
            ByteSize(work.upload_bytes),
            ByteSize(work.download_bytes),
            ByteSize(work.memory_bytes)
        ));
        if several {
            line(self.args.ranks.exchanged(work.exchanged()));
        }
        if work.disk_write_bytes > 0 {
            let each = if several { " by a node" } else { "" };
            line(format!("steps until 1,200 TB are written{each}: {}", count(planned.endurance())));
        }
        for (name, seconds) in &planned.floor.seconds {
            line(format!("  {name:<10} {:>10}", time(*seconds)));
        }
        line(match planned.floor.bound() {
            None => format!("no step time: {}", self.what_is_missing(&planned.floor)),
            Some((bound, seconds)) => format!(
                "a step takes at least {} ({} tok/s), bound by {bound}",
                time(seconds),
                count(work.tokens as f64 / seconds)
            ),
        });
        if let Some(seconds) = planned.floor.expected {
            let speed = count(work.tokens as f64 / seconds);
            let unclipped = planned.floor.unclipped.map_or_else(String::new, |seconds| {
                let speed = count(work.tokens as f64 / seconds);
                format!("; while nothing is clipped, {} ({speed} tok/s)", time(seconds))
            });
            line(format!(
                "in the order of its work it is expected to take {} ({speed} tok/s){unclipped}",
                time(seconds)
            ));
        }
        for resource in ["disk", "network", "peers"] {
            if let Some(tokens) = planned.tokens_that_hide(resource) {
                line(format!("tokens a step that hide the {resource}: {}", count(tokens)));
            }
        }
        line(format!("\n{HEADER}"));
        let best = fastest(choices);
        for (index, (choice, planned)) in choices.iter().enumerate() {
            line(row(*choice, planned.as_ref().ok(), best == Some(index)));
        }
        text
    }

    fn document(&self, planned: &Planned, choices: &[(Choice, Result<Planned, EngineError>)]) -> Value {
        let mut document = json!({
            "model": ModelShape::of(&self.model),
            "seq_len": self.length,
            "accumulation": self.args.accumulation,
            "optimizer": self.args.optimizer,
            "plan": planned.figures(),
            "memory": Term::all(&planned.outlook.memory),
            "placement": PlacedGroups::all(&planned.outlook.placement),
            "choices": rows(choices, fastest(choices), Choice::json, Planned::figures),
        });
        if self.ranks.are_several() {
            (document["ranks"], document["nodes"]) = (self.ranks.count().into(), self.ranks.nodes().into());
        }
        document
    }

    /// What `--save` writes.
    fn file(&self, planned: &Planned, state: StateFlag) -> PlanFile {
        let (choice, outlook) = (planned.choice, &planned.outlook);
        let unified = self.backend.device.unified();
        PlanFile {
            version: pinned::VERSION,
            model: ModelShape::of(&self.model),
            run: Settings {
                batch_size: choice.batch as u64,
                grad_accum: choice.accum as u64,
                accumulation: self.args.accumulation,
                seq_len: self.length,
                dtype: self.args.dtype,
                state,
                offload: choice.offload,
                durability: self.args.durability,
                device_memory: if unified { DeviceMemory::Host } else { DeviceMemory::Own },
                ranks: self.ranks.count(),
                nodes: self.ranks.nodes(),
            },
            budget: Budget::new(self.host_budget, self.device_budget),
            windows: Windows::new(outlook.windows, outlook.keepers),
            bytes: Totals::new(&outlook.memory),
            memory: Term::all(&outlook.memory),
            placement: PlacedGroups::all(&outlook.placement),
            step: Step::new(&outlook.work, &planned.floor),
        }
    }
}

impl Planned {
    fn seconds(&self) -> Option<f64> {
        self.floor.expected.or(self.floor.bound().map(|(_, seconds)| seconds))
    }

    /// Steps until a drive has taken what it is warranted for.
    fn endurance(&self) -> f64 {
        ENDURANCE_BYTES / self.outlook.work.disk_write_bytes as f64
    }

    /// Tokens with which computing takes as long as a resource whose bytes do not depend on them.
    fn tokens_that_hide(&self, resource: &str) -> Option<f64> {
        let seconds = self.floor.seconds.iter().find(|(name, _)| *name == resource)?.1;
        let work = &self.outlook.work;
        // Activations on disk are bytes of every token.
        let spills = work.schedule.passes.iter().any(|pass| pass.spill_write_bytes > 0);
        if spills && resource == "disk" {
            return None;
        }
        Some(seconds * self.operations_rate? / (work.operations as f64 / work.tokens as f64))
    }

    fn figures(&self) -> Value {
        let (work, memory) = (&self.outlook.work, &self.outlook.memory);
        let mut row = self.choice.json();
        let seconds = self.seconds();
        let step = json!(Step::new(work, &self.floor));
        let more = json!({
            "host_bytes": memory.total(Tier::Host),
            "device_bytes": memory.total(Tier::Device),
            "disk_bytes": memory.total(Tier::Disk),
            "tokens_per_second": seconds.map(|seconds| work.tokens as f64 / seconds),
            "steps_until_1200_tb": (work.disk_write_bytes > 0).then(|| self.endurance()),
            "unknown": self.floor.unknown,
            "tokens_that_hide_the_disk": self.tokens_that_hide("disk"),
        });
        for resource in ["network", "peers"] {
            if let Some(tokens) = self.tokens_that_hide(resource) {
                row[format!("tokens_that_hide_the_{resource}")] = tokens.into();
            }
        }
        for part in [step, more] {
            if let (Some(row), Value::Object(part)) = (row.as_object_mut(), part) {
                row.extend(part);
            }
        }
        row
    }
}

impl Choice {
    fn words(self) -> String {
        format!("state {} on {}", self.state, self.place())
    }

    fn place(self) -> String {
        pinned::name(self.offload)
    }

    fn json(self) -> Value {
        json!({
            "state": self.state.to_string(),
            "offload": self.place(),
            "batch_size": self.batch,
            "grad_accum": self.accum,
        })
    }
}

/// The rows of a table for `--json`. Those that do not fit say why.
pub(super) fn rows<C: Copy, P>(
    choices: &[(C, Result<P, EngineError>)],
    best: Option<usize>,
    name: impl Fn(C) -> Value,
    figures: impl Fn(&P) -> Value,
) -> Vec<Value> {
    let row = |(index, (choice, planned)): (usize, &(C, Result<P, EngineError>))| match planned {
        Ok(planned) => {
            let mut row = figures(planned);
            row["fastest"] = json!(best == Some(index));
            row
        }
        Err(error) => {
            let mut row = name(*choice);
            row["refused"] = json!(error.to_string());
            row
        }
    };
    choices.iter().enumerate().map(row).collect()
}

/// The feasible choice with the most tokens a second.
fn fastest(choices: &[(Choice, Result<Planned, EngineError>)]) -> Option<usize> {
    let speed = |planned: &Planned| Some(planned.outlook.work.tokens as f64 / planned.seconds()?);
    first_best(choices.iter().map(|(_, planned)| planned.as_ref().ok().and_then(speed)))
}

/// The row with the most tokens a second. Of those that read the same it is the first, whose numbers are the most precise and whose batch
/// is the smallest: differences that are too small to be shown are no reason for another.
pub(super) fn first_best(speeds: impl Iterator<Item = Option<f64>>) -> Option<usize> {
    let speeds: Vec<Option<f64>> = speeds.collect();
    let most = speeds.iter().flatten().copied().max_by(f64::total_cmp).map(count)?;
    speeds.iter().position(|speed| speed.map(count).as_ref() == Some(&most))
}

pub(super) fn row(choice: Choice, planned: Option<&Planned>, fastest: bool) -> String {
    let Choice { state, batch, accum, .. } = choice;
    let start = format!("{:<8} {:<7} {batch:>6} {accum:>6}", state.to_string(), choice.place());
    let Some(planned) = planned else { return format!("{start}   does not fit") };
    let size = |tier| ByteSize(planned.outlook.memory.total(tier)).to_string();
    let least = planned.floor.bound().map_or("–".into(), |(_, seconds)| time(seconds));
    let seconds = planned.seconds().map_or("–".into(), time);
    let speed =
        planned.seconds().map_or("–".into(), |seconds| count(planned.outlook.work.tokens as f64 / seconds));
    format!(
        "{start} {:>11} {:>11} {:>11} {least:>10} {seconds:>10} {speed:>10}{}",
        size(Tier::Host),
        size(Tier::Device),
        size(Tier::Disk),
        if fastest { "  ← fastest" } else { "" }
    )
}

/// The model that is planned: of a folder, of a `config.json`, or made up for a number of parameters.
fn model(args: &PlanArgs) -> Result<ModelConfig, CliError> {
    let refused = |error: &dyn std::fmt::Display| CliError::Usage(error.to_string());
    if let Some(params) = args.params {
        let text = shape::config_for(params).map_err(|why| CliError::Usage(format!("--params: {why}")))?;
        return ModelConfig::parse(&text.to_string()).map_err(|e| refused(&e));
    }
    let path = args.model.as_ref().expect("clap wants --model or --params");
    if path.is_file() {
        let text = std::fs::read_to_string(path)
            .map_err(|e| CliError::Usage(format!("--model {}: {e}", path.display())))?;
        return ModelConfig::parse(&text)
            .map_err(|e| CliError::Usage(format!("--model {}: {e}", path.display())));
    }
    super::checks::model(path)?;
    ModelConfig::from_folder(path).map_err(|e| refused(&e))
}

fn format(state: StateFlag) -> StateFormat {
    match state {
        StateFlag::Fp32 => StateFormat::Fp32,
        StateFlag::Split => StateFormat::Split,
        StateFlag::Bf16 => StateFormat::Bf16,
        StateFlag::Compact => StateFormat::Compact,
    }
}

/// `1.23e15`.
pub(super) fn exponent(value: u64) -> String {
    format!("{:.2e}", value as f64)
}
