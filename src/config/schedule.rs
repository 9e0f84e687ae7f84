//! The learning rate as a pure function of the step.
//!
//! Two families: those of Hugging Face's trainer (`constant`, `linear`, `cosine`, all with a linear warm-up) and DeepSpeed's
//! `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.
//!
//! DeepSpeed advances its schedulers *after* the optimizer, so the step with index `k` runs at the schedule's iteration
//! `k − 1`, and step 0 at the minimum. That is kept: curves of both systems lie on top of each other.

use serde::Serialize;
use std::f64::consts::PI;

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
        /// Ratio of the first step.
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
        match *self {
            Self::Constant { warmup_steps } => base * warmup(step, warmup_steps).unwrap_or(1.0),
            Self::Linear { warmup_steps } => {
                let decay =
                    || total.saturating_sub(step) as f64 / total.saturating_sub(warmup_steps).max(1) as f64;
                base * warmup(step, warmup_steps).unwrap_or_else(decay)
            }
            Self::Cosine { warmup_steps } => {
                let span = total.saturating_sub(warmup_steps).max(1) as f64;
                let decay =
                    || (0.5 * (1.0 + (PI * step.saturating_sub(warmup_steps) as f64 / span).cos())).max(0.0);
                base * warmup(step, warmup_steps).unwrap_or_else(decay)
            }
            Self::Warmup { min, max, warmup_steps, shape, decay_steps } => {
                let Some(iteration) = step.checked_sub(1) else { return min };
                let gamma = shape.gamma(iteration, warmup_steps).unwrap_or_else(|| {
                    decay_steps.map_or(1.0, |end| {
                        end.saturating_sub(iteration) as f64 / end.saturating_sub(warmup_steps).max(1) as f64
                    })
                });
                min + (max - min) * gamma
            }
            Self::WarmupCosine { min_ratio, cos_min_ratio, warmup_steps, shape, total_steps } => {
                let Some(iteration) = step.checked_sub(1) else { return base * min_ratio };
                let ratio = shape.gamma(iteration, warmup_steps).map_or_else(
                    || {
                        let done = (iteration - warmup_steps + 1) as f64;
                        let span = total_steps.saturating_sub(warmup_steps).max(1) as f64;
                        let cosine = (1.0 + (PI * done / span).cos()) / 2.0;
                        (cos_min_ratio + (1.0 - cos_min_ratio) * cosine).max(0.0)
                    },
                    |gamma| min_ratio + (1.0 - min_ratio) * gamma,
                );
                base * ratio
            }
        }
    }
}

fn warmup(step: u64, warmup_steps: u64) -> Option<f64> {
    (step < warmup_steps).then(|| step as f64 / warmup_steps as f64)
}

impl WarmupShape {
    /// The fraction of the way up, `None` once the warm-up is over.
    fn gamma(self, iteration: u64, warmup_steps: u64) -> Option<f64> {
        (iteration < warmup_steps).then(|| match self {
            Self::Log => ((iteration + 1) as f64).ln() / (warmup_steps.max(2) as f64).ln(),
            Self::Linear => iteration as f64 / warmup_steps as f64,
        })
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
        close(&rates(cosine, 5, 2.0), &[1.0, 1.0, 1.5, 1.0, 0.0]);
    }
}
