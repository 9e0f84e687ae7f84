//! What a run says about its learning rate: the choice of a schedule, to be completed with the run's length and base rate.
//! The formulas are the optimizer's.
//!
//! Two families: those of Hugging Face's trainer (`constant`, `linear`, `cosine`, all with a linear warm-up) and DeepSpeed's
//! `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.
//!
//! DeepSpeed advances its schedulers *after* the optimizer, so the step with index `k` runs at the schedule's iteration
//! `k − 1`, and step 0 at the minimum (zero for the cosine). That is kept: curves of both systems lie on top of each other.

use serde::Serialize;
use terrace_optimizer::{self as optimizer, ScheduleKind, Warmup};

/// How the learning rate moves over the steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Schedule {
    /// Warm-up, then the base rate.
    Constant {
        /// Steps of linear warm-up.
        warmup_steps: u64,
    },
    /// Warm-up, then a straight line to zero at the last step.
    Linear {
        /// Steps of linear warm-up.
        warmup_steps: u64,
    },
    /// Warm-up, then half a cosine to zero at the last step.
    Cosine {
        /// Steps of linear warm-up.
        warmup_steps: u64,
    },
    /// DeepSpeed's `WarmupLR` (`decay_steps` absent) and `WarmupDecayLR`: from `min` to `max`, then constant or a straight line
    /// to zero. The base rate plays no part.
    Warmup {
        /// Rate of the first step.
        min: f64,
        /// Rate after the warm-up.
        max: f64,
        /// Steps of warm-up; at least 2.
        warmup_steps: u64,
        /// Shape of the warm-up.
        shape: WarmupShape,
        /// `total_num_steps`, where the line reaches zero.
        decay_steps: Option<u64>,
    },
    /// DeepSpeed's `WarmupCosineLR`: the base rate times a ratio.
    WarmupCosine {
        /// Ratio at which the warm-up begins.
        min_ratio: f64,
        /// Ratio at the end.
        cos_min_ratio: f64,
        /// Steps of warm-up; at least 2.
        warmup_steps: u64,
        /// Shape of the warm-up.
        shape: WarmupShape,
        /// `total_num_steps`, where the cosine ends.
        total_steps: u64,
    },
}

/// The shape of DeepSpeed's warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmupShape {
    /// `ln(i + 1) / ln(n)`.
    Log,
    /// `i / n`.
    Linear,
}

impl Schedule {
    /// The learning rate of the step with index `step` (from zero) of a run of `total` steps with base rate `base`.
    pub fn rate(&self, step: u64, total: u64, base: f64) -> f64 {
        self.complete(total, base).lr(step)
    }

    /// The optimizer's schedule for a run of `total` steps with base rate `base`.
    fn complete(&self, total: u64, base: f64) -> optimizer::Schedule {
        let (kind, warmup_steps, total_steps, base_lr, min_ratio) = match *self {
            Self::Constant { warmup_steps } => (ScheduleKind::Constant, warmup_steps, total, base, 0.0),
            Self::Linear { warmup_steps } => (ScheduleKind::Linear, warmup_steps, total, base, 0.0),
            Self::Cosine { warmup_steps } => (ScheduleKind::Cosine, warmup_steps, total, base, 0.0),
            Self::Warmup { min, max, warmup_steps, shape, decay_steps } => {
                let (warmup, min_lr) = (shape.into(), min);
                let kind = match decay_steps {
                    None => ScheduleKind::WarmupLr { warmup, min_lr },
                    Some(_) => ScheduleKind::WarmupDecayLr { warmup, min_lr },
                };
                (kind, warmup_steps, decay_steps.unwrap_or(total), max, 0.0)
            }
            Self::WarmupCosine { min_ratio, cos_min_ratio, warmup_steps, shape, total_steps } => {
                let kind = ScheduleKind::WarmupCosineLr { warmup: shape.into(), warmup_min_ratio: min_ratio };
                (kind, warmup_steps, total_steps, base, cos_min_ratio)
            }
        };
        optimizer::Schedule { kind, warmup_steps, total_steps, base_lr, min_ratio }
    }
}

impl From<WarmupShape> for Warmup {
    fn from(shape: WarmupShape) -> Self {
        match shape {
            WarmupShape::Log => Self::Log,
            WarmupShape::Linear => Self::Linear,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, total: u64, base: f64) -> Vec<f64> {
        (0..total).map(|s| schedule.rate(s, total, base)).collect()
    }

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() < 1e-12, "{found:?} instead of {expected:?}");
        }
    }

    #[test]
    fn hugging_face_schedules() {
        close(&rates(Schedule::Constant { warmup_steps: 2 }, 4, 1.0), &[0.0, 0.5, 1.0, 1.0]);
        close(&rates(Schedule::Linear { warmup_steps: 0 }, 4, 2.0), &[2.0, 1.5, 1.0, 0.5]);
        close(&rates(Schedule::Linear { warmup_steps: 2 }, 4, 1.0), &[0.0, 0.5, 1.0, 0.5]);
        close(
            &rates(Schedule::Cosine { warmup_steps: 0 }, 4, 1.0)[..3],
            &[1.0, 0.853_553_390_593_273_8, 0.5],
        );
        close(&[Schedule::Linear { warmup_steps: 9 }.rate(5, 3, 9.0)], &[5.0]);
    }

    #[test]
    fn deepspeed_schedules() {
        let warmup =
            |shape, decay_steps| Schedule::Warmup { min: 0.0, max: 1.0, warmup_steps: 4, shape, decay_steps };
        close(&rates(warmup(WarmupShape::Linear, None), 7, 9.0), &[0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]);
        close(&rates(warmup(WarmupShape::Log, None), 4, 9.0), &[0.0, 0.0, 0.5, 3f64.ln() / 4f64.ln()]);
        close(&rates(warmup(WarmupShape::Linear, Some(6)), 8, 9.0)[5..], &[1.0, 0.5, 0.0]);
        let cosine = Schedule::WarmupCosine {
            min_ratio: 0.5,
            cos_min_ratio: 0.0,
            warmup_steps: 2,
            shape: WarmupShape::Linear,
            total_steps: 4,
        };
        close(&rates(cosine, 5, 2.0), &[0.0, 1.0, 1.5, 1.0, 0.0]);
    }
}
