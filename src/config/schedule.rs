//! What a run says about its learning rate: a schedule by name with its parameters, from a flag or from a file, to be completed
//! with the run's length and base rate. The formulas are the optimizer's.
//!
//! Two families of names: those of Hugging Face's trainer (`constant`, `linear`, `cosine`, …, all with a linear warm-up) and
//! DeepSpeed's (`WarmupLR`, …, `OneCycle`, `LRRangeTest`), each with the parameters that they have there.
//!
//! DeepSpeed advances its schedulers *after* the optimizer, so the step with index `k` runs at the schedule's iteration
//! `k − 1`, and step 0 at the minimum (zero for the cosine). That is kept: curves of both systems lie on top of each other.

use super::hjson::{Kind, Member, Position, Value};
use super::section::{Section, SectionError};
use std::str::FromStr;
use terrace_optimizer::{MomentumCycle, OneCycle, Schedule, ScheduleKind, Warmup};

/// How the learning rate moves over the steps, without what only the run knows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScheduleChoice {
    /// The shape.
    pub kind: ScheduleKind,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Where a decay ends; with the run if absent.
    pub total_steps: Option<u64>,
    /// The rate after the warm-up; the run's learning rate if absent.
    pub base_lr: Option<f64>,
    /// The share of the base rate at which a decay ends.
    pub min_ratio: f64,
}

/// The value of `--scheduler`: a name, and parameters as `key=value` after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulerFlag(pub ScheduleChoice);

impl ScheduleChoice {
    /// A schedule of this shape without warm-up, over the whole run.
    pub fn new(kind: ScheduleKind) -> Self {
        Self { kind, warmup_steps: 0, total_steps: None, base_lr: None, min_ratio: 0.0 }
    }

    /// The schedule of a run of `total_steps` with base rate `base_lr`.
    pub fn complete(&self, total_steps: u64, base_lr: f64) -> Schedule {
        Schedule {
            kind: self.kind,
            warmup_steps: self.warmup_steps,
            total_steps: self.total_steps.unwrap_or(total_steps),
            base_lr: self.base_lr.unwrap_or(base_lr),
            min_ratio: self.min_ratio,
        }
    }

    /// Whether the rate of a step depends on how long the run is.
    pub fn depends_on_length(&self) -> bool {
        self.kind.has_end() && self.total_steps.is_none()
    }

    /// Whether the schedule begins with a warm-up of so many steps.
    pub fn warms_up(&self) -> bool {
        !matches!(self.kind, ScheduleKind::OneCycle(_) | ScheduleKind::LrRangeTest { .. })
    }

    /// The parameter that says the rate in place of the run's learning rate, where there is one.
    pub fn own_rate(&self) -> Option<&'static str> {
        match self.kind {
            ScheduleKind::OneCycle(_) => Some("cycle_max_lr"),
            ScheduleKind::LrRangeTest { .. } => Some("lr_range_test_min_lr"),
            _ => self.base_lr.map(|_| "warmup_max_lr"),
        }
    }

    /// Reads the schedule called `name` from its parameters; `None` if there is none of that name.
    ///
    /// # Errors
    /// A parameter is missing, unknown, or no number of its kind.
    pub fn read(name: &str, params: &Section<'_>) -> Result<Option<Self>, SectionError> {
        let choice = match name {
            "WarmupLR" | "WarmupDecayLR" => warmup(params, name == "WarmupDecayLR")?,
            "WarmupCosineLR" => warmup_cosine(params)?,
            "OneCycle" => Self::new(ScheduleKind::OneCycle(one_cycle(params)?)),
            "LRRangeTest" => range_test(params)?,
            _ => match name.parse() {
                Ok(kind) => transformers(kind, params)?,
                Err(_) => return Ok(None),
            },
        };
        params.refuse_unknown()?;
        Ok(Some(choice))
    }
}

/// The rate that a schedule goes up to, or, for one without bounds, begins with.
pub fn base_lr(schedule: &Schedule) -> f64 {
    match schedule.kind {
        ScheduleKind::OneCycle(cycle) => cycle.cycle_max_lr,
        _ => schedule.base_lr,
    }
}

/// Every name that [`ScheduleChoice::read`] knows, for messages.
pub const SCHEDULERS: &str = "constant, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, WarmupLR, \
     WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest";

impl FromStr for SchedulerFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default().trim();
        let at = Position { line: 1, column: 1 };
        let mut members: Vec<Member> = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!("\"{part}\" is no parameter: write key=value after the name"));
            };
            let (key, value) = (key.trim(), value.trim());
            if members.iter().any(|member| member.key == key) {
                return Err(format!("{key} is given twice"));
            }
            let kind = match value.parse::<f64>() {
                Ok(_) => Kind::Number(value.to_owned()),
                Err(_) => Kind::String(value.to_owned()),
            };
            members.push(Member { key: key.to_owned(), at, value: Value { at, kind } });
        }
        let params = Value { at, kind: Kind::Object(members) };
        let choice = Section::root(&params).and_then(|params| ScheduleChoice::read(name, &params));
        match choice.map_err(|e| format!("{name}: {}", e.message))? {
            Some(choice) => Ok(Self(choice)),
            None => Err(format!("there is no schedule \"{name}\": use {SCHEDULERS}")),
        }
    }
}

type Result<T, E = SectionError> = std::result::Result<T, E>;

/// transformers' schedules; their warm-up is a flag of its own.
fn transformers(kind: ScheduleKind, params: &Section<'_>) -> Result<ScheduleChoice> {
    let mut choice = ScheduleChoice::new(kind);
    match &mut choice.kind {
        ScheduleKind::CosineWithRestarts { cycles } => {
            if let Some(given) = params.positive("num_cycles")? {
                *cycles = u32::try_from(given).map_err(|_| params.error("num_cycles", "is beyond reason"))?;
            }
        }
        ScheduleKind::Polynomial { power, end_lr } => {
            *power = params.not_negative("power")?.unwrap_or(*power);
            *end_lr = params.not_negative("lr_end")?.unwrap_or(*end_lr);
        }
        ScheduleKind::InverseSqrt { timescale } => *timescale = params.positive("timescale")?,
        _ => {}
    }
    if matches!(kind, ScheduleKind::Linear | ScheduleKind::Cosine | ScheduleKind::CosineWithRestarts { .. }) {
        choice.min_ratio = params.not_negative("min_lr_rate")?.unwrap_or(0.0);
    }
    choice.warmup_steps = params.integer("num_warmup_steps")?.unwrap_or(0);
    Ok(choice)
}

fn warmup(params: &Section<'_>, decays: bool) -> Result<ScheduleChoice> {
    let (warmup, min_lr) = (warmup_type(params)?, params.not_negative("warmup_min_lr")?.unwrap_or(0.0));
    let base_lr = params.not_negative("warmup_max_lr")?;
    let total_steps = if decays { params.positive("total_num_steps")? } else { None };
    let kind = match decays {
        true => ScheduleKind::WarmupDecayLr { warmup, min_lr },
        false => ScheduleKind::WarmupLr { warmup, min_lr },
    };
    let warmup_steps = warmup_steps(params)?;
    Ok(ScheduleChoice { warmup_steps, total_steps, base_lr, ..ScheduleChoice::new(kind) })
}

fn warmup_cosine(params: &Section<'_>) -> Result<ScheduleChoice> {
    let warmup_min_ratio = params.not_negative("warmup_min_ratio")?.unwrap_or(0.0);
    let kind = ScheduleKind::WarmupCosineLr { warmup: warmup_type(params)?, warmup_min_ratio };
    Ok(ScheduleChoice {
        warmup_steps: warmup_steps(params)?,
        total_steps: params.positive("total_num_steps")?,
        min_ratio: params.not_negative("cos_min_ratio")?.unwrap_or(0.0001),
        ..ScheduleChoice::new(kind)
    })
}

fn one_cycle(params: &Section<'_>) -> Result<OneCycle> {
    let required = |key: &'static str| {
        params.not_negative(key)?.ok_or_else(|| params.error(key, "missing; OneCycle has no default for it"))
    };
    let cycle = OneCycle::new(required("cycle_min_lr")?, required("cycle_max_lr")?);
    let momentum = MomentumCycle::default();
    let momentum = MomentumCycle {
        cycle_min_mom: params.not_negative("cycle_min_mom")?.unwrap_or(momentum.cycle_min_mom),
        cycle_max_mom: params.not_negative("cycle_max_mom")?.unwrap_or(momentum.cycle_max_mom),
        decay_mom_rate: params.not_negative("decay_mom_rate")?.unwrap_or(momentum.decay_mom_rate),
    };
    let first = params.positive("cycle_first_step_size")?;
    let first_stairs = params.integer("cycle_first_stair_count")?;
    Ok(OneCycle {
        decay_lr_rate: params.not_negative("decay_lr_rate")?.unwrap_or(cycle.decay_lr_rate),
        cycle_first_step_size: first.unwrap_or(cycle.cycle_first_step_size),
        cycle_second_step_size: params.integer("cycle_second_step_size")?,
        cycle_first_stair_count: first_stairs.unwrap_or(cycle.cycle_first_stair_count),
        cycle_second_stair_count: params.integer("cycle_second_stair_count")?,
        decay_step_size: params.integer("decay_step_size")?.unwrap_or(cycle.decay_step_size),
        momentum: params.boolean("cycle_momentum")?.unwrap_or(true).then_some(momentum),
        ..cycle
    })
}

fn range_test(params: &Section<'_>) -> Result<ScheduleChoice> {
    let kind = ScheduleKind::LrRangeTest {
        step_size: params.positive("lr_range_test_step_size")?.unwrap_or(2000),
        step_rate: params.not_negative("lr_range_test_step_rate")?.unwrap_or(1.0),
        staircase: params.boolean("lr_range_test_staircase")?.unwrap_or(false),
    };
    let base_lr = Some(params.not_negative("lr_range_test_min_lr")?.unwrap_or(1e-3));
    Ok(ScheduleChoice { base_lr, ..ScheduleChoice::new(kind) })
}

/// Left open they are the run's, which has none unless it says so: what transformers fills in.
fn warmup_steps(params: &Section<'_>) -> Result<u64> {
    let default = if params.leaves_open("warmup_num_steps") { 0 } else { 1000 };
    Ok(params.integer("warmup_num_steps")?.unwrap_or(default))
}

fn warmup_type(params: &Section<'_>) -> Result<Warmup> {
    match params.string("warmup_type")? {
        None | Some("log") => Ok(Warmup::Log),
        Some("linear") => Ok(Warmup::Linear),
        Some(other) => {
            let message = format!("expected \"log\" or \"linear\", found \"{other}\"");
            Err(params.error("warmup_type", &message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(flag: &str, total: u64, base: f64) -> Vec<f64> {
        let schedule = flag.parse::<SchedulerFlag>().unwrap().0.complete(total, base);
        assert_eq!(schedule.validate(), Ok(()), "{flag}");
        (0..total).map(|step| schedule.lr(step)).collect()
    }

    fn close(found: &[f64], expected: &[f64]) {
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 1e-12, "{found:?} instead of {expected:?}");
        }
    }

    #[test]
    fn hugging_face_schedules() {
        close(&rates("constant,num_warmup_steps=2", 4, 1.0), &[0.0, 0.5, 1.0, 1.0]);
        close(&rates("linear", 4, 2.0), &[2.0, 1.5, 1.0, 0.5]);
        close(&rates("linear,min_lr_rate=0.5", 4, 2.0), &[2.0, 1.75, 1.5, 1.25]);
        close(&rates("cosine", 4, 1.0), &[1.0, 0.853_553_390_593_273_8, 0.5]);
        close(&rates("cosine_with_restarts,num_cycles=2", 4, 1.0), &[1.0, 0.5, 1.0, 0.5]);
        close(&rates("polynomial,power=2,lr_end=0", 4, 1.0), &[1.0, 0.5625, 0.25, 0.0625]);
        close(&rates("inverse_sqrt,timescale=1", 4, 1.0), &[1.0, 0.5f64.sqrt(), 3f64.sqrt().recip(), 0.5]);
    }

    #[test]
    fn deepspeed_schedules() {
        let warmup = "warmup_max_lr=1,warmup_num_steps=4";
        let linear = format!("WarmupLR,{warmup},warmup_type=linear");
        close(&rates(&linear, 7, 9.0), &[0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]);
        let log = format!("WarmupLR,{warmup}");
        close(&rates(&log, 4, 9.0), &[0.0, 0.0, 0.5, 3f64.ln() / 4f64.ln()]);
        let decay = format!("WarmupDecayLR,{warmup},warmup_type=linear");
        close(&rates(&format!("{decay},total_num_steps=6"), 8, 9.0)[5..], &[1.0, 0.5, 0.0]);
        close(&rates(&decay, 6, 9.0)[4..], &[0.75, 1.0]);
        let cosine = "WarmupCosineLR,warmup_min_ratio=0.5,cos_min_ratio=0,warmup_num_steps=2,total_num_steps=4,\
            warmup_type=linear";
        close(&rates(cosine, 5, 2.0), &[0.0, 1.0, 1.5, 1.0, 0.0]);
        let range =
            "LRRangeTest,lr_range_test_min_lr=0.5,lr_range_test_step_size=2,lr_range_test_staircase=true";
        close(&rates(range, 5, 9.0), &[0.5, 0.5, 1.0, 1.0, 1.5]);
        let cycle = "OneCycle,cycle_min_lr=1,cycle_max_lr=3,cycle_first_step_size=2,cycle_second_step_size=1";
        close(&rates(cycle, 4, 9.0), &[1.0, 2.0, 3.0, 1.0]);
    }

    #[test]
    fn one_cycle_moves_the_betas_unless_told_not_to() {
        let betas = |flag: &str| flag.parse::<SchedulerFlag>().unwrap().0.complete(9, 1.0).betas(2);
        let cycle = "OneCycle,cycle_min_lr=1,cycle_max_lr=3,cycle_first_step_size=2,cycle_min_mom=0.5";
        assert_eq!(betas(cycle), Some((0.5, 0.99)));
        assert_eq!(betas(&format!("{cycle},cycle_momentum=false")), None);
        assert_eq!(betas("cosine"), None);
    }

    #[test]
    fn what_depends_on_the_length_of_the_run() {
        let depends = |flag: &str| flag.parse::<SchedulerFlag>().unwrap().0.depends_on_length();
        for flag in
            ["linear", "cosine", "cosine_with_restarts", "polynomial", "WarmupDecayLR", "WarmupCosineLR"]
        {
            assert!(depends(flag), "{flag}");
        }
        let ends = "WarmupDecayLR,total_num_steps=5";
        for flag in [
            "constant",
            "inverse_sqrt",
            "WarmupLR",
            "LRRangeTest",
            "OneCycle,cycle_min_lr=0,cycle_max_lr=1",
            ends,
        ] {
            assert!(!depends(flag), "{flag}");
        }
    }

    #[test]
    fn parameters_that_make_no_sense() {
        for (flag, reason) in [
            ("exponential", "use constant, linear"),
            ("onecycle", "OneCycle or LRRangeTest"),
            ("OneCycle", "OneCycle: cycle_min_lr: missing"),
            ("OneCycle,cycle_min_lr=1", "cycle_max_lr: missing"),
            ("linear,3", "\"3\" is no parameter"),
            ("linear,power=2", "linear: power: unknown key"),
            ("polynomial,power=fast", "power: expected a finite number"),
            ("polynomial,power=1,power=2", "power is given twice"),
            ("WarmupLR,warmup_type=cubic", "found \"cubic\""),
            ("WarmupLR,total_num_steps=3", "total_num_steps: unknown key"),
            ("cosine_with_restarts,num_cycles=0", "must be at least 1"),
            ("LRRangeTest,lr_range_test_staircase=maybe", "expected true or false"),
        ] {
            let error = flag.parse::<SchedulerFlag>().unwrap_err();
            assert!(error.contains(reason), "{flag}: {error}");
        }
    }
}
