//! Learning-rate schedules, as pure functions of the number of finished steps.
//!
//! `lr(done)` is the rate of the step that follows `done` finished ones: the first step uses `lr(0)`, and
//! [`StepArgs::step`](crate::StepArgs::step) (which counts from 1) goes with `lr(step - 1)`. This is how torch's
//! `LambdaLR` and transformers' trainer count; with warm-up the first step therefore has rate zero.
//!
//! A schedule holds no state, so resuming at any step needs nothing but the step's number.

mod one_cycle;

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

pub use one_cycle::{MomentumCycle, OneCycle};

use crate::error::{OptimizerError, Result};
use crate::ranges::check;

/// A learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The shape.
    pub kind: ScheduleKind,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps of the whole run; kinds without an end ignore it.
    pub total_steps: u64,
    /// The rate at the end of warm-up; [`ScheduleKind::OneCycle`] has its own rates.
    pub base_lr: f64,
    /// The share of `base_lr` at which the decay of the linear and cosine kinds ends; the others ignore it.
    pub min_ratio: f64,
}

/// The shape of a [`Schedule`].
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum ScheduleKind {
    /// transformers' `get_constant_schedule_with_warmup`.
    Constant,
    /// transformers' `get_linear_schedule_with_warmup`; `min_ratio` scales the decay as it does for the cosine.
    Linear,
    /// transformers' `get_cosine_schedule_with_warmup`, or `get_cosine_with_min_lr_schedule_with_warmup` with
    /// `min_ratio` as `min_lr_rate`; past `total_steps` it stays at its end, where theirs rises again.
    Cosine,
    /// transformers' `get_cosine_with_hard_restarts_schedule_with_warmup`: several half cosines, each from the top.
    CosineWithRestarts {
        /// How many.
        cycles: u32,
    },
    /// transformers' `get_polynomial_decay_schedule_with_warmup`.
    Polynomial {
        /// The power of what is left of the decay: 1 is a straight line.
        power: f64,
        /// The rate at the end, below `base_lr`.
        end_lr: f64,
    },
    /// transformers' `get_inverse_sqrt_schedule`.
    InverseSqrt {
        /// Steps after which the rate of an endless decay has fallen to `1/√2`, counted from the end of warm-up; the
        /// steps of warm-up when absent, or 10 000 without warm-up.
        timescale: Option<u64>,
    },
    /// DeepSpeed's `WarmupLR`: `base_lr` is `warmup_max_lr`.
    WarmupLr {
        /// Shape of the warm-up.
        warmup: Warmup,
        /// `warmup_min_lr`: the rate at which warm-up begins.
        min_lr: f64,
    },
    /// DeepSpeed's `WarmupDecayLR`: `base_lr` is `warmup_max_lr`, and the decay is linear down to `min_lr`.
    WarmupDecayLr {
        /// Shape of the warm-up.
        warmup: Warmup,
        /// `warmup_min_lr`: the rate at which warm-up begins and the decay ends.
        min_lr: f64,
    },
    /// DeepSpeed's `WarmupCosineLR`: `base_lr` is the optimizer's `lr` and `min_ratio` is `cos_min_ratio`.
    WarmupCosineLr {
        /// Shape of the warm-up.
        warmup: Warmup,
        /// `warmup_min_ratio`: the share of `base_lr` at which warm-up begins.
        warmup_min_ratio: f64,
    },
    /// DeepSpeed's `OneCycle`, which moves the momentum too: see [`Schedule::betas`].
    OneCycle(OneCycle),
    /// DeepSpeed's `LRRangeTest`: `base_lr` is `lr_range_test_min_lr`, and the rate grows without end.
    LrRangeTest {
        /// `lr_range_test_step_size`: steps of one interval.
        step_size: u64,
        /// `lr_range_test_step_rate`: by how many `base_lr` the rate grows in an interval.
        step_rate: f64,
        /// `lr_range_test_staircase`: whether it grows at the ends of intervals only.
        staircase: bool,
    },
}

/// DeepSpeed's `warmup_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Warmup {
    /// With the logarithm of the step: DeepSpeed's default.
    #[default]
    Log,
    /// In proportion to the step.
    Linear,
}

impl ScheduleKind {
    /// Whether the rate of a step depends on [how many there are](Schedule::total_steps).
    pub fn has_end(&self) -> bool {
        !matches!(
            self,
            Self::Constant
                | Self::InverseSqrt { .. }
                | Self::WarmupLr { .. }
                | Self::OneCycle(_)
                | Self::LrRangeTest { .. }
        )
    }
}

impl Schedule {
    /// The rate `base_lr` at every step.
    pub fn constant(base_lr: f64) -> Self {
        Self { kind: ScheduleKind::Constant, warmup_steps: 0, total_steps: 0, base_lr, min_ratio: 0.0 }
    }

    /// The learning rate of the step that follows `done` finished steps.
    pub fn lr(&self, done: u64) -> f64 {
        match self.kind {
            ScheduleKind::Constant => self.base_lr * self.ramp(done).unwrap_or(1.0),
            ScheduleKind::Linear => {
                self.base_lr * self.ramp(done).unwrap_or_else(|| self.floored(self.decay_left(done)))
            }
            ScheduleKind::Cosine => {
                let decay = || self.floored(half_cosine(self.decay_progress(done)));
                self.base_lr * self.ramp(done).unwrap_or_else(decay)
            }
            ScheduleKind::CosineWithRestarts { cycles } => {
                let decay = || match self.decay_progress(done) {
                    1.0.. => self.floored(0.0),
                    progress => self.floored(half_cosine((f64::from(cycles) * progress) % 1.0)),
                };
                self.base_lr * self.ramp(done).unwrap_or_else(decay)
            }
            ScheduleKind::Polynomial { power, end_lr } => match self.ramp(done) {
                Some(ramp) => self.base_lr * ramp,
                None => {
                    let left = 1.0 - self.decay_progress(done);
                    (self.base_lr - end_lr) * left.powf(power) + end_lr
                }
            },
            ScheduleKind::InverseSqrt { timescale } => {
                let default = if self.warmup_steps == 0 { INVERSE_SQRT_TIMESCALE } else { self.warmup_steps };
                let timescale = timescale.unwrap_or(default).max(1) as f64;
                let decay = || 1.0 / (((done - self.warmup_steps) as f64 + timescale) / timescale).sqrt();
                self.base_lr * self.ramp(done).unwrap_or_else(decay)
            }
            ScheduleKind::WarmupLr { warmup, min_lr } => {
                self.between(min_lr, done, |last| self.warm(warmup, last).unwrap_or(1.0))
            }
            ScheduleKind::WarmupDecayLr { warmup, min_lr } => self.between(min_lr, done, |last| {
                let span = self.total_steps.saturating_sub(self.deepspeed_warmup()).max(1);
                let left = self.total_steps.saturating_sub(last);
                self.warm(warmup, last).unwrap_or(left as f64 / span as f64)
            }),
            ScheduleKind::WarmupCosineLr { warmup, warmup_min_ratio } => {
                self.base_lr * self.warmup_cosine(warmup, warmup_min_ratio, done)
            }
            ScheduleKind::OneCycle(cycle) => cycle.lr(done),
            ScheduleKind::LrRangeTest { step_size, step_rate, staircase } => {
                let intervals = done as f64 / step_size.max(1) as f64;
                self.base_lr * (1.0 + step_rate * if staircase { intervals.floor() } else { intervals })
            }
        }
    }

    /// The betas of the step that follows `done` finished steps, for [`Algorithm::with_betas`](crate::Algorithm::with_betas),
    /// of a schedule that moves them.
    ///
    /// That is [`OneCycle`] with a momentum cycle. Its second beta is 0.99 throughout: DeepSpeed writes it over the configured
    /// one.
    pub fn betas(&self, done: u64) -> Option<(f64, f64)> {
        match self.kind {
            ScheduleKind::OneCycle(cycle) => Some((cycle.momentum(done)?, ONE_CYCLE_BETA2)),
            _ => None,
        }
    }

    /// The schedule, if it [is one](Self::validate): what `Schedule { … }` is followed by where the numbers are not known to be right.
    ///
    /// # Errors
    /// Those of [`validate`](Self::validate).
    pub fn checked(self) -> Result<Self> {
        self.validate().map(|()| self)
    }

    /// Refuses values for which the schedule is undefined, in DeepSpeed's and transformers' ranges, and a warm-up that is longer than
    /// a run with an end: the rate would fall from its height to its end at once.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`] or [`OptimizerError::Warmup`] names the first offending value.
    pub fn validate(&self) -> Result<()> {
        let non_negative = |name, value: f64| {
            check(name, value, "finite and not negative", value.is_finite() && value >= 0.0)
        };
        non_negative("learning rate", self.base_lr)?;
        check("min_ratio", self.min_ratio, "between 0 and 1", (0.0..=1.0).contains(&self.min_ratio))?;
        if self.kind.has_end() && self.warmup_steps > self.total_steps {
            let (warmup, total) = (self.warmup_steps, self.total_steps);
            return Err(OptimizerError::Warmup { warmup, total });
        }
        match self.kind {
            ScheduleKind::Constant | ScheduleKind::Linear | ScheduleKind::Cosine => Ok(()),
            ScheduleKind::CosineWithRestarts { cycles } => {
                check("num_cycles", f64::from(cycles), "at least 1", cycles >= 1)
            }
            ScheduleKind::Polynomial { power, end_lr } => {
                check("power", power, "finite and positive", power.is_finite() && power > 0.0)?;
                non_negative("lr_end", end_lr)?;
                check("lr_end", end_lr, "below the learning rate", end_lr < self.base_lr)
            }
            ScheduleKind::InverseSqrt { timescale } => {
                check("timescale", 0.0, "at least 1", timescale != Some(0))
            }
            ScheduleKind::WarmupLr { min_lr, .. } | ScheduleKind::WarmupDecayLr { min_lr, .. } => {
                non_negative("warmup_min_lr", min_lr)
            }
            ScheduleKind::WarmupCosineLr { warmup_min_ratio, .. } => {
                non_negative("warmup_min_ratio", warmup_min_ratio)
            }
            ScheduleKind::OneCycle(cycle) => {
                non_negative("cycle_min_lr", cycle.cycle_min_lr)?;
                non_negative("cycle_max_lr", cycle.cycle_max_lr)?;
                non_negative("decay_lr_rate", cycle.decay_lr_rate)?;
                let first = cycle.cycle_first_step_size;
                check("cycle_first_step_size", first as f64, "at least 1", first >= 1)?;
                let Some(momentum) = cycle.momentum else { return Ok(()) };
                let beta =
                    |name, value| check(name, value, "at least 0 and below 1", (0.0..1.0).contains(&value));
                beta("cycle_min_mom", momentum.cycle_min_mom)?;
                beta("cycle_max_mom", momentum.cycle_max_mom)?;
                non_negative("decay_mom_rate", momentum.decay_mom_rate)
            }
            ScheduleKind::LrRangeTest { step_size, step_rate, .. } => {
                let (size, name) = (step_size as f64, "lr_range_test_step_size");
                check(name, size, "at least 1", step_size >= 1)?;
                non_negative("lr_range_test_step_rate", step_rate)
            }
        }
    }

    /// DeepSpeed's `WarmupCosineLR` as a share of the base rate; zero before its first step.
    fn warmup_cosine(&self, warmup: Warmup, warmup_min_ratio: f64, done: u64) -> f64 {
        let Some(last) = done.checked_sub(1) else { return 0.0 };
        match self.warm(warmup, last) {
            Some(warm) => warmup_min_ratio + (1.0 - warmup_min_ratio) * warm,
            None => {
                let span = self.total_steps.saturating_sub(self.deepspeed_warmup()).max(1);
                let since = last - self.deepspeed_warmup() + 1;
                self.floored(half_cosine((since as f64 / span as f64).min(1.0)))
            }
        }
    }

    /// transformers' linear warm-up, while it lasts.
    fn ramp(&self, done: u64) -> Option<f64> {
        (done < self.warmup_steps).then(|| done as f64 / self.warmup_steps as f64)
    }

    /// How much of the steps after warm-up is done, at most 1.
    fn decay_progress(&self, done: u64) -> f64 {
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        ((done - self.warmup_steps) as f64 / span as f64).min(1.0)
    }

    /// How much of the steps after warm-up is left. Not `1 − decay_progress`, which loses digits towards the end.
    fn decay_left(&self, done: u64) -> f64 {
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1);
        (self.total_steps.saturating_sub(done)) as f64 / span as f64
    }

    /// A decay from 1 to 0 made to end at `min_ratio`.
    fn floored(&self, factor: f64) -> f64 {
        factor * (1.0 - self.min_ratio) + self.min_ratio
    }

    /// DeepSpeed never warms up in fewer than two steps.
    fn deepspeed_warmup(&self) -> u64 {
        self.warmup_steps.max(2)
    }

    /// DeepSpeed's warm-up factor, while it lasts.
    fn warm(&self, warmup: Warmup, last: u64) -> Option<f64> {
        let steps = self.deepspeed_warmup();
        (last < steps).then(|| match warmup {
            Warmup::Log => (last as f64 + 1.0).ln() / (steps as f64).ln(),
            Warmup::Linear => last as f64 / steps as f64,
        })
    }

    /// A factor applied between `min_lr` and `base_lr`. DeepSpeed's `last_batch_iteration` is one behind: its
    /// scheduler is stepped after the optimizer, and before that the rate is `min_lr`.
    fn between(&self, min_lr: f64, done: u64, gamma: impl Fn(u64) -> f64) -> f64 {
        done.checked_sub(1).map_or(min_lr, |last| min_lr + (self.base_lr - min_lr) * gamma(last))
    }
}

/// From 1 at progress 0 down to 0 at progress 1.
fn half_cosine(progress: f64) -> f64 {
    0.5 * (1.0 + (PI * progress).cos())
}

impl FromStr for ScheduleKind {
    type Err = OptimizerError;

    /// transformers' names, with its defaults for what the names do not say.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "constant" | "constant_with_warmup" => Ok(Self::Constant),
            "linear" => Ok(Self::Linear),
            "cosine" | "cosine_with_min_lr" => Ok(Self::Cosine),
            "cosine_with_restarts" => Ok(Self::CosineWithRestarts { cycles: 1 }),
            "polynomial" => Ok(Self::Polynomial { power: 1.0, end_lr: 1e-7 }),
            "inverse_sqrt" => Ok(Self::InverseSqrt { timescale: None }),
            _ => Err(OptimizerError::UnknownSchedule(text.to_owned())),
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineWithRestarts { .. } => "cosine_with_restarts",
            Self::Polynomial { .. } => "polynomial",
            Self::InverseSqrt { .. } => "inverse_sqrt",
            Self::WarmupLr { .. } => "WarmupLR",
            Self::WarmupDecayLr { .. } => "WarmupDecayLR",
            Self::WarmupCosineLr { .. } => "WarmupCosineLR",
            Self::OneCycle(_) => "OneCycle",
            Self::LrRangeTest { .. } => "LRRangeTest",
        })
    }
}

/// The timescale of transformers' inverse square root without warm-up.
const INVERSE_SQRT_TIMESCALE: u64 = 10_000;

/// The second beta that DeepSpeed's `OneCycle` sets.
const ONE_CYCLE_BETA2: f64 = 0.99;

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind) -> Schedule {
        Schedule { kind, warmup_steps: 10, total_steps: 110, base_lr: 2.0, min_ratio: 0.0 }
    }

    #[test]
    fn closed_forms() {
        let linear = schedule(ScheduleKind::Linear);
        assert_eq!([linear.lr(0), linear.lr(5), linear.lr(10), linear.lr(60)], [0.0, 1.0, 2.0, 1.0]);
        assert_eq!([linear.lr(110), linear.lr(1000)], [0.0, 0.0]);
        let cosine = Schedule { min_ratio: 0.5, ..schedule(ScheduleKind::Cosine) };
        assert_eq!([cosine.lr(10), cosine.lr(110), cosine.lr(210)], [2.0, 1.0, 1.0]);
        assert!((cosine.lr(60) - 1.5).abs() < 1e-15);
        assert_eq!(Schedule::constant(3.0).lr(0), 3.0);
    }

    #[test]
    fn no_schedule_panics_or_leaves_its_range() {
        let kinds = [
            ScheduleKind::Constant,
            ScheduleKind::Linear,
            ScheduleKind::Cosine,
            ScheduleKind::WarmupLr { warmup: Warmup::Log, min_lr: 0.5 },
            ScheduleKind::WarmupDecayLr { warmup: Warmup::Linear, min_lr: 0.0 },
            ScheduleKind::WarmupCosineLr { warmup: Warmup::Log, warmup_min_ratio: 0.1 },
            ScheduleKind::CosineWithRestarts { cycles: 3 },
            ScheduleKind::Polynomial { power: 0.5, end_lr: 0.1 },
            ScheduleKind::InverseSqrt { timescale: None },
            ScheduleKind::OneCycle(OneCycle { cycle_first_step_size: 7, ..OneCycle::new(0.5, 2.0) }),
            ScheduleKind::OneCycle(OneCycle { cycle_first_step_size: 0, ..OneCycle::new(0.5, 2.0) }),
            ScheduleKind::LrRangeTest { step_size: 0, step_rate: 0.0, staircase: true },
        ];
        for kind in kinds {
            for (warmup_steps, total_steps) in [(0, 0), (0, 1), (1, 1), (5, 3), (3, 20), (20, 20)] {
                let schedule = Schedule { warmup_steps, total_steps, ..schedule(kind) };
                for done in 0..50 {
                    let lr = schedule.lr(done);
                    assert!((0.0..=2.0).contains(&lr), "{kind} {warmup_steps}/{total_steps} at {done}: {lr}");
                }
            }
        }
    }

    #[test]
    fn names_round_trip() {
        for name in ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"] {
            assert_eq!(name.parse::<ScheduleKind>().unwrap().to_string(), name);
            let error = "plateau".parse::<ScheduleKind>().unwrap_err().to_string();
            assert!(error.contains(&format!("`{name}`")), "{error}");
        }
    }
}
