//! The floor of a run: from the profile, or from a short measurement at its start.

use super::args::Offload;
use super::calibrate::host_gemm;
use super::session::{self, Session};
use crate::calibrate::measure::{self, Effort, Layer, MeasureError};
use crate::calibrate::{Calibration, Gemm, Machine, Profile, card};
use crate::config::{ByteSize, TrainConfig};
use crate::error::CliError;
use crate::floor::{Capabilities, Floor};
use crate::metrics::StepMetrics;
use crate::progress::count;
use std::collections::BTreeMap;
use std::path::PathBuf;
use terrace_kernels::DType;
use terrace_optimizer::{Algorithm, StateFormat, WeightType};
use terrace_tiers::existing_dir;
use terrace_zero::{Engine, EngineConfig, Placement};

/// A budget below which measuring takes the least memory that gives a figure.
const SMALL_BUDGET_BYTES: u64 = 512 << 20;
/// The part of the budget that a measurement takes: one in this many bytes.
const BUDGET_ONE_IN: u64 = 16;

/// What the run's resources can do. What the profile does not say is measured, in less than a second, before the engine takes
/// its memory; what cannot be measured is said and left out.
pub fn capabilities(
    profile: Option<&Profile>,
    session: &Session,
    run: &TrainConfig,
    config: &EngineConfig,
) -> Capabilities {
    let here = Machine::here(session.threads, session.card().map(|(name, _)| name));
    let on_disk = run.offload == Offload::Disk;
    let mut known = profile.cloned().unwrap_or_default();
    let whole = |dir: &PathBuf| session::whole(dir, known.disk.as_ref());
    let dirs: Vec<PathBuf> = if on_disk { config.disks.iter().map(whole).collect() } else { Vec::new() };
    // Without the card's figures a run on it must not take those of the processor.
    if let Some(calibration) = &known.calibration
        && session.on_card()
        && calibration.card.is_none()
    {
        known.calibration = None;
    }
    // Rates of formats are those of AdamW; other algorithms move other bytes.
    let state = config.training.as_ref().map(|training| training.state);
    let state = state.filter(|_| matches!(run.optimizer, Algorithm::AdamW(_)));
    let effort = effort(config.host_budget);
    let warned = |result: Result<(), MeasureError>| {
        if let Err(error) = result {
            eprintln!("warning: the floor of a step leaves something out: {error}");
        }
    };
    let of_profile = known.calibration.is_some();
    if known.calibration.is_none() {
        let mut calibration = Calibration::new(here, true);
        warned(host(&mut calibration, session, config, effort));
        known.calibration = Some(calibration);
    }
    if let Some(calibration) = &mut known.calibration {
        warned(of_the_type(calibration, session, state, config.dtype, effort));
    }
    let covered = known.disk.as_ref().is_some_and(|disk| dirs.iter().all(|dir| disk.path_of(dir).is_some()));
    if on_disk && !covered {
        let measured: Vec<PathBuf> = dirs.iter().map(|dir| existing_dir(dir)).collect();
        let opened = measure::open_disks(&session.io_config, &measured, effort);
        let rates = opened.and_then(|disks| measure::disks(&disks));
        warned(rates.map(|(mut disk, together, notes)| {
            notes.iter().for_each(|note| eprintln!("note: {note}"));
            disk.paths.iter_mut().zip(&dirs).for_each(|(entry, dir)| entry.path.clone_from(dir));
            known.disk = Some(disk);
            if let Some(calibration) = &mut known.calibration {
                calibration.disks_together = (dirs.len() > 1).then_some(together);
            }
        }));
    }
    let shares = config.disk_weights.as_deref();
    let can = Capabilities::of(&known, config.dtype, state, session.on_card(), &dirs, shares);
    let predicts = can.training.is_some() || (of_profile && session.on_card());
    Capabilities { predicts, ..can }
}

/// The floor of a step of `engine`, and a line that says it.
pub fn of_engine(engine: &Engine, can: Capabilities) -> Floor {
    // State that is resumed lies where it was made, whatever the profile says today.
    let can = can.with_shares(&engine.disk_shares());
    let mut floor = Floor::new(&engine.step_work(), &can);
    // The best of single products, which is all that a start measures, says too little about a step.
    floor.expected = floor.expected.filter(|_| can.predicts);
    floor.unclipped = floor.unclipped.filter(|_| can.predicts);
    if let Some((bound, seconds)) = floor.bound() {
        let unclipped =
            floor.unclipped.map_or(String::new(), |s| format!(", {} while nothing is clipped", time(s)));
        let expected = floor.expected.map_or(String::new(), |s| format!("; {} expected{unclipped}", time(s)));
        eprintln!("floor of a step: {}, bound by {bound}{expected}", time(seconds));
    }
    floor
}

/// The effort of a start, within a part of the memory that the run may take.
fn effort(budget: u64) -> Effort {
    let start = Effort::START.beyond_caches();
    let memory_bytes = start.memory_bytes.min((budget / BUDGET_ONE_IN) as usize).max(1 << 20);
    let layer = if budget < SMALL_BUDGET_BYTES {
        Layer { tokens: 64, hidden: 256, intermediate: 704 }
    } else {
        start.layer
    };
    Effort { memory_bytes, layer, file_bytes: start.file_bytes.min(memory_bytes as u64 * 4), ..start }
}

/// What there is for every type of weights.
fn host(
    calibration: &mut Calibration,
    session: &Session,
    config: &EngineConfig,
    effort: Effort,
) -> Result<(), MeasureError> {
    calibration.memory = Some(measure::memory(&measure::pool(session.threads)?, effort));
    if !session.on_card() && config.placement == Placement::Disk {
        let sums = measure::checksums(&measure::pool(1)?, effort);
        calibration.checksum_bytes_per_core_second = Some(sums);
    }
    Ok(())
}

/// The update and the products of weights of `dtype`, unless `calibration` has them: a profile may be of before they were measured.
fn of_the_type(
    calibration: &mut Calibration,
    session: &Session,
    state: Option<StateFormat>,
    dtype: DType,
    effort: Effort,
) -> Result<(), MeasureError> {
    let weights = WeightType::of(dtype).unwrap_or(WeightType::Bf16);
    let named = |state: StateFormat| {
        let (state, weights) = (state.to_string(), weights.to_string());
        calibration.optimizer.iter().any(|rate| rate.state == state && rate.weights == weights)
    };
    if let Some(state) = state.filter(|state| !named(*state)) {
        let pool = measure::pool(session.threads)?;
        calibration.optimizer.push(measure::update(&pool, state, weights, effort)?);
    }
    let has = |products: &[Gemm]| products.iter().any(|gemm| gemm.dtype == dtype.to_string());
    let Some((_, memory_bytes)) = session.card() else {
        if !has(&calibration.gemm) {
            calibration.gemm.extend(host_gemm(session.threads, dtype, effort, 2)?);
        }
        return Ok(());
    };
    if calibration.card.as_ref().is_some_and(|card| has(&card.gemm)) {
        return Ok(());
    }
    let (device, kernels) = (&*session.backend.device, &session.backend.kernels);
    let found = card::measure(device, kernels, memory_bytes, &[dtype], &[], card::Effort::START)?;
    match &mut calibration.card {
        Some(card) => card.gemm.extend(found.gemm),
        None => calibration.card = Some(found),
    }
    Ok(())
}

/// What a run's steps took, for a last word.
#[derive(Debug, Default)]
pub struct Summary {
    seconds: Vec<f64>,
    tokens: u64,
    /// Steps that changed nothing but the loss scale.
    skipped: usize,
    stalls: BTreeMap<String, f64>,
    /// Number of saves, and seconds in which no step went on because of them.
    saves: (u64, f64),
}

impl Summary {
    /// Counts a step.
    pub fn add(&mut self, metrics: &StepMetrics) {
        self.seconds.push(metrics.step_seconds);
        self.tokens += metrics.tokens;
        self.skipped += usize::from(metrics.skipped == Some(true));
        for (what, seconds) in &metrics.stall_seconds {
            *self.stalls.entry(what.clone()).or_default() += seconds;
        }
    }

    /// Counts a save that training waited for so long.
    pub fn add_save(&mut self, seconds: f64) {
        self.saves = (self.saves.0 + 1, self.saves.1 + seconds);
    }

    /// All steps and what was waited for between them.
    fn whole_seconds(&self) -> f64 {
        self.seconds.iter().sum::<f64>() + self.saves.1
    }

    /// The mean of all steps, with what was waited for between them; `None` if there were no steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (!self.seconds.is_empty()).then(|| self.tokens as f64 / self.whole_seconds().max(1e-9))
    }

    /// That nothing was trained, if steps did nothing but look for a loss scale.
    pub fn warning(&self) -> Option<String> {
        let steps = self.seconds.len();
        (steps > 0 && self.skipped == steps).then(|| {
            format!(
                "{}, because gradients overflowed in fp16: the model is what it was. Every overflow lowers a dynamic loss scale, so more \
                 steps may find one that does; or lower initial_scale_power (or loss_scale) of fp16 in --config, or use --dtype bf16",
                if steps == 1 { "the only step was skipped".into() } else { format!("all {steps} steps were skipped") }
            )
        })
    }

    /// Median step, floor, what binds, and a table of what compute waited for; `None` if there were no steps.
    pub fn text(&self, floor: &Floor) -> Option<String> {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = *sorted.get(sorted.len() / 2)?;
        let mut text = format!("median step {}", time(median));
        if let Some(expected) = floor.expected {
            text += &format!(", expected {}", time(expected));
        }
        if let Some(unclipped) = floor.unclipped {
            text += &format!(" ({} while nothing is clipped)", time(unclipped));
        }
        match floor.bound() {
            None => text += "; no floor: nothing was measured",
            Some((bound, seconds)) => {
                let percent = seconds / median * 100.0;
                text += &format!(", floor {} ({percent:.0} % of floor, bound by {bound})", time(seconds));
                let mut all = floor.seconds.clone();
                all.sort_by(|a, b| b.1.total_cmp(&a.1));
                let all: Vec<String> = all.iter().map(|(name, s)| format!("{name} {}", time(*s))).collect();
                text += &format!("\n  each resource alone: {}", all.join(", "));
            }
        }
        let (steps, (saves, saving)) = (self.seconds.len(), self.saves);
        let whole = self.whole_seconds();
        let share = |seconds: f64| seconds / whole.max(1e-9) * 100.0;
        text += &format!(
            "\n  {} for {steps} step{}, {} tok/s, of which",
            time(whole),
            if steps == 1 { "" } else { "s" },
            count(self.tokens_per_second().unwrap_or(0.0))
        );
        let mut row = |what: &str, seconds: f64| {
            text += &format!("\n    {what:<32} {:>10}  {:>5.1} %", time(seconds), share(seconds));
        };
        for (what, seconds) in &self.stalls {
            row(&format!("waiting for {}", what.replace('_', " ")), *seconds);
        }
        if saves > 0 {
            row(&format!("waiting for {saves} save{}", if saves == 1 { "" } else { "s" }), saving);
        }
        Some(text)
    }
}

/// What the steps and saves of a run wrote to disk as state, and what part of the drives' life that is; `None` for nothing.
pub fn wear(bytes: u64, endurance: ByteSize) -> Option<String> {
    let part = bytes as f64 / endurance.0.max(1) as f64 * 100.0;
    let part = if part < 0.01 { "less than 0.01".into() } else { format!("{part:.2}") };
    let (written, life) = (ByteSize(bytes), endurance.0 as f64 / 1e12);
    // Three digits: it may have been said in binary units.
    let life: f64 = format!("{life:.2e}").parse().unwrap_or(life);
    (bytes > 0).then(|| format!("written to disk so far: {written}, {part} % of the drives' {life} TB"))
}

/// Seconds with three digits, of any size.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 600.0 => crate::progress::duration(s),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// The profile that `--profile` names, else the one of this machine at the default place.
///
/// # Errors
/// `--profile` names no profile.
pub fn profile(
    flag: Option<&PathBuf>,
    threads: usize,
    dirs: &[PathBuf],
) -> Result<Option<Profile>, CliError> {
    use crate::calibrate::Found;
    let here = Machine::here(threads, None);
    let Some(path) = flag else {
        return Ok(match Profile::find(&here) {
            Found::Fits(profile) => {
                Some(profile.for_disks(|disk, dir| session::whole(dir, Some(disk)), dirs))
            }
            Found::Nothing => None,
            Found::Unfit(why) => {
                eprintln!("note: not used: {why}; `terrace calibrate` makes a new one");
                None
            }
        });
    };
    let refused = |what: String| {
        let path = path.display();
        let advice = "it takes a file that `aio-bench tune` or `terrace calibrate` wrote";
        CliError::Usage(format!("--profile {path}: {what}; {advice}"))
    };
    let profile = Profile::read(path).map_err(refused)?;
    if let Some(why) = profile.difference(&here) {
        eprintln!("warning: --profile {}: {why}; it is used all the same", path.display());
    }
    Ok(Some(profile))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_wears_drives() {
        assert_eq!(wear(0, ByteSize(1000)), None);
        let text = wear(3 << 20, ByteSize(2_000_000_000)).unwrap();
        assert_eq!(text, "written to disk so far: 3.00 MiB, 0.16 % of the drives' 0.002 TB");
        assert!(wear(1, ByteSize(1 << 30)).unwrap().contains("less than 0.01 %"));
        assert!(wear(1, ByteSize(100 << 40)).unwrap().ends_with("of the drives' 110 TB"));
        assert!(wear(1, ByteSize(1_200_000_000_000_000)).unwrap().ends_with("of the drives' 1200 TB"));
    }

    #[test]
    fn a_run_of_skipped_steps_is_said() {
        let mut summary = Summary::default();
        let step = |skipped| StepMetrics { skipped, ..StepMetrics::default() };
        summary.add(&step(Some(true)));
        assert!(summary.warning().unwrap().starts_with("the only step was skipped"));
        summary.add(&step(Some(true)));
        assert!(
            summary.warning().unwrap().starts_with("all 2 steps were skipped, because gradients overflowed")
        );
        summary.add(&step(Some(false)));
        assert_eq!(summary.warning(), None);
    }

    #[test]
    fn the_last_word() {
        let mut summary = Summary::default();
        let floor = Floor { seconds: vec![("compute", 0.5), ("disk", 1.5)], ..Floor::default() };
        assert_eq!(
            (summary.text(&floor), summary.tokens_per_second(), summary.warning()),
            (None, None, None)
        );
        for seconds in [9.0, 2.0, 1.0] {
            let stall_seconds = [("optimizer_state".to_owned(), 1.0)].into();
            let metrics =
                StepMetrics { tokens: 60, step_seconds: seconds, stall_seconds, ..StepMetrics::default() };
            summary.add(&metrics);
        }
        assert_eq!((summary.tokens_per_second(), summary.warning()), (Some(15.0), None));
        let head = "median step 2.00 s, floor 1.50 s (75 % of floor, bound by disk)\n  \
            each resource alone: disk 1.50 s, compute 500.0 ms\n";
        let stalls = "    waiting for optimizer state          3.00 s";
        assert_eq!(
            summary.text(&floor).unwrap(),
            format!("{head}  12.00 s for 3 steps, 15 tok/s, of which\n{stalls}   25.0 %")
        );
        summary.add_save(3.0);
        let saves = "    waiting for 1 save                   3.00 s";
        let expected =
            format!("{head}  15.00 s for 3 steps, 12 tok/s, of which\n{stalls}   20.0 %\n{saves}   20.0 %");
        assert_eq!(summary.text(&floor).unwrap(), expected);
        let unknown = summary.text(&Floor { expected: Some(1.9), ..Floor::default() }).unwrap();
        assert!(unknown.starts_with("median step 2.00 s, expected 1.90 s; no floor"), "{unknown}");
    }
}
