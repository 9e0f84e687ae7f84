//! Learning-rate schedules, as pure functions of the number of finished steps.
//!
//! `lr(done)` is the rate of the step that follows `done` finished ones: the first step uses `lr(0)`, and
//! [`StepArgs::step`](crate::StepArgs::step) (which counts from 1) goes with `lr(step - 1)`. This is how torch's
//! `LambdaLR` and transformers' trainer count; with warm-up the first step therefore has rate zero.
//!
//! A schedule holds no state, so resuming at any step needs nothing but the step's number.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use crate::error::{OptimizerError, Result};

/// A learning-rate schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The shape.
    pub kind: ScheduleKind,
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps of the whole run; the constant kinds ignore it.
    pub total_steps: u64,
    /// The rate at the end of warm-up.
    pub base_lr: f64,
    /// The share of `base_lr` at which the decay ends; the constant kinds ignore it.
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
                let decay = || self.floored(1.0 - self.decay_progress(done));
                self.base_lr * self.ramp(done).unwrap_or_else(decay)
            }
            ScheduleKind::Cosine => {
                let decay = || self.floored(half_cosine(self.decay_progress(done)));
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
                let Some(last) = done.checked_sub(1) else { return 0.0 };
                let ratio = match self.warm(warmup, last) {
                    Some(warm) => warmup_min_ratio + (1.0 - warmup_min_ratio) * warm,
                    None => {
                        let span = self.total_steps.saturating_sub(self.deepspeed_warmup()).max(1);
                        let since = last - self.deepspeed_warmup() + 1;
                        self.floored(half_cosine((since as f64 / span as f64).min(1.0)))
                    }
                };
                self.base_lr * ratio
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

    /// The names of the command line: `constant`, `linear`, `cosine`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "constant" => Ok(Self::Constant),
            "linear" => Ok(Self::Linear),
            "cosine" => Ok(Self::Cosine),
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
            Self::WarmupLr { .. } => "WarmupLR",
            Self::WarmupDecayLr { .. } => "WarmupDecayLR",
            Self::WarmupCosineLr { .. } => "WarmupCosineLR",
        })
    }
}

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
}
