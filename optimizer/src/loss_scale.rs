//! The loss scale of fp16 training, with DeepSpeed's semantics.
//!
//! Small gradients vanish in fp16, so the loss is multiplied by a scale before backward and gradients by its inverse
//! after. A dynamic scale rides the edge of overflow:
//!
//! ```text
//! overflow   hysteresis left > 1:   hysteresis −= 1
//!            else, scale > minimum: scale ← max(scale / 2, minimum)
//!            else:                  error
//! clean      a window of steps without overflow is full: scale ← 2 · scale, hysteresis refilled
//! ```
//!
//! With `consecutive_hysteresis` every clean step refills the hysteresis. Without it, a spent hysteresis stays spent until the
//! scale doubles, so that later overflows halve at once. The first doubling after the start or after an overflow comes with
//! the clean step number `window + 1`, the next ones every `window` clean steps. This is DeepSpeed's counting, kept so that
//! the scales of both are the same at every step.
//!
//! The scaler is a pure state machine: it never looks at a gradient. [`SumOfSquares::norm`](crate::SumOfSquares::norm)
//! tells whether there was an overflow.

use crate::error::{OptimizerError, Result};
use crate::ranges::check;

/// The `fp16` section of a DeepSpeed configuration, with its defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaleConfig {
    /// A scale that never changes, or 0 for a dynamic one.
    pub loss_scale: f64,
    /// A dynamic scale starts at two to this power.
    pub initial_scale_power: u32,
    /// Clean steps after which a dynamic scale doubles.
    pub loss_scale_window: u64,
    /// The overflow with this number since the last refill is the first to halve the scale.
    pub hysteresis: u32,
    /// Whether every clean step refills the hysteresis.
    pub consecutive_hysteresis: bool,
    /// A dynamic scale never goes below.
    pub min_loss_scale: f64,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        Self {
            loss_scale: 0.0,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        }
    }
}

impl LossScaleConfig {
    /// Whether the scale moves.
    pub fn is_dynamic(&self) -> bool {
        self.loss_scale == 0.0
    }

    /// Refuses values with which the scale would not work.
    ///
    /// Of a static scale only `loss_scale` is looked at. A hysteresis of 0 is refused, because DeepSpeed's never halves
    /// with it.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`] names the first offending value.
    pub fn validate(&self) -> Result<()> {
        let (scale, min) = (self.loss_scale, self.min_loss_scale);
        // Beyond, the scale or its inverse would not be a normal f32.
        let normal = f64::from(f32::MIN_POSITIVE)..=1.0 / f64::from(f32::MIN_POSITIVE);
        let expected = "from 2⁻¹²⁶ to 2¹²⁶ (0 for a dynamic scale)";
        check("loss_scale", scale, expected, self.is_dynamic() || normal.contains(&scale))?;
        if !self.is_dynamic() {
            return Ok(());
        }
        let power = self.initial_scale_power;
        check("initial_scale_power", f64::from(power), "at most 126", power <= 126)?;
        check("loss_scale_window", self.loss_scale_window as f64, "at least 1", self.loss_scale_window >= 1)?;
        check("hysteresis", f64::from(self.hysteresis), "at least 1", self.hysteresis >= 1)?;
        check("min_loss_scale", min, "finite and positive", min.is_finite() && min > 0.0)
    }
}

/// A loss scale on its way through a run.
///
/// ```
/// use terrace_optimizer::{LossScaleConfig, LossScaler};
///
/// let mut scaler = LossScaler::new(LossScaleConfig::default())?;
/// assert_eq!(scaler.scale(), 65536.0);
/// scaler.update(true)?; // spends the hysteresis
/// scaler.update(true)?;
/// assert_eq!(scaler.scale(), 32768.0);
/// let resumed = LossScaler::resume(LossScaleConfig::default(), scaler.state())?;
/// assert_eq!(resumed, scaler);
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScaler {
    config: LossScaleConfig,
    state: LossScalerState,
}

/// What a checkpoint keeps of a [`LossScaler`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerState {
    /// The scale of the next step.
    pub scale: f64,
    /// Finished steps, skipped ones included.
    pub iteration: u64,
    /// The index of the last step that overflowed.
    pub last_overflow: Option<u64>,
    /// Overflows until the scale halves.
    pub hysteresis: u32,
}

impl LossScaler {
    /// The scaler of a fresh run.
    ///
    /// # Errors
    /// As [`LossScaleConfig::validate`].
    pub fn new(config: LossScaleConfig) -> Result<Self> {
        config.validate()?;
        let dynamic = || f64::from(config.initial_scale_power).exp2();
        let scale = if config.is_dynamic() { dynamic() } else { config.loss_scale };
        let state =
            LossScalerState { scale, iteration: 0, last_overflow: None, hysteresis: config.hysteresis };
        Ok(Self { config, state })
    }

    /// The scaler of a run that goes on from `state`. A static scale is the configured one, whatever the state says,
    /// and the hysteresis left is at most the configured one.
    ///
    /// # Errors
    /// As [`LossScaleConfig::validate`], and a state that no scaler reaches.
    pub fn resume(config: LossScaleConfig, state: LossScalerState) -> Result<Self> {
        config.validate()?;
        let scale = if config.is_dynamic() { state.scale } else { config.loss_scale };
        let is_scale = scale.is_finite() && scale > 0.0;
        check("scale of the saved loss scaler", scale, "finite and positive", is_scale)?;
        if let Some(last) = state.last_overflow {
            let is_past = last < state.iteration;
            check("last overflow of the saved loss scaler", last as f64, "before its iteration", is_past)?;
        }
        let hysteresis = state.hysteresis.clamp(1, config.hysteresis.max(1));
        Ok(Self { config, state: LossScalerState { scale, hysteresis, ..state } })
    }

    /// What to multiply the loss of the next step with.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// What to multiply the gradients of the next step with, for [`StepArgs::grad_scale`](crate::StepArgs::grad_scale):
    /// exact, because dynamic scales are powers of two unless the minimum is not.
    pub fn inverse(&self) -> f32 {
        (1.0 / self.state.scale) as f32
    }

    /// What a checkpoint has to keep.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Ends a step. One with an overflow must have been skipped.
    ///
    /// A static scale stays what it is, and the step is skipped all the same.
    ///
    /// # Errors
    /// [`OptimizerError::LossScaleAtMinimum`] when the scale would have to go below its minimum; the state is then
    /// untouched.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        if self.config.is_dynamic() {
            if overflow { self.back_off()? } else { self.grow() }
        }
        if overflow {
            self.state.last_overflow = Some(self.state.iteration);
        }
        self.state.iteration += 1;
        Ok(())
    }

    fn back_off(&mut self) -> Result<()> {
        let (state, min) = (&mut self.state, self.config.min_loss_scale);
        if state.hysteresis > 1 {
            state.hysteresis -= 1;
        } else if state.scale == min {
            return Err(OptimizerError::LossScaleAtMinimum(min));
        } else {
            state.scale = (state.scale / 2.0).max(min);
        }
        Ok(())
    }

    fn grow(&mut self) {
        let (state, config) = (&mut self.state, &self.config);
        // DeepSpeed begins with the last overflow at −1.
        let clean = match state.last_overflow {
            Some(last) => state.iteration - last - 1,
            None => state.iteration,
        };
        let doubles = clean > 0 && clean.is_multiple_of(config.loss_scale_window);
        if doubles || config.consecutive_hysteresis {
            state.hysteresis = config.hysteresis;
        }
        if doubles {
            state.scale *= 2.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_update_changes_nothing() {
        let config = LossScaleConfig { initial_scale_power: 0, hysteresis: 1, ..LossScaleConfig::default() };
        let mut scaler = LossScaler::new(config).unwrap();
        let before = scaler;
        assert_eq!(scaler.update(true), Err(OptimizerError::LossScaleAtMinimum(1.0)));
        assert_eq!(scaler, before);
    }

    #[test]
    fn a_static_scale_stays() {
        let config = LossScaleConfig { loss_scale: 100.0, ..LossScaleConfig::default() };
        let mut scaler = LossScaler::new(config).unwrap();
        for step in 0..3000 {
            scaler.update(step % 3 == 0).unwrap();
        }
        assert_eq!((scaler.scale(), scaler.inverse()), (100.0, 0.01));
    }

    #[test]
    fn configurations_that_cannot_work_are_refused() {
        let good = LossScaleConfig::default();
        let cases = [
            (LossScaleConfig { loss_scale: -1.0, ..good }, "loss_scale"),
            (LossScaleConfig { loss_scale: f64::NAN, ..good }, "loss_scale"),
            (LossScaleConfig { loss_scale: 1e-50, ..good }, "loss_scale"),
            (LossScaleConfig { loss_scale: 2f64.powi(127), ..good }, "loss_scale"),
            (LossScaleConfig { initial_scale_power: 127, ..good }, "initial_scale_power"),
            (LossScaleConfig { loss_scale_window: 0, ..good }, "loss_scale_window"),
            (LossScaleConfig { hysteresis: 0, ..good }, "hysteresis"),
            (LossScaleConfig { min_loss_scale: 0.0, ..good }, "min_loss_scale"),
        ];
        for (config, name) in cases {
            let error = LossScaler::new(config).unwrap_err();
            assert!(matches!(error, OptimizerError::Hyperparameter { name: n, .. } if n == name), "{error}");
        }
        let unused = LossScaleConfig { loss_scale: 8.0, loss_scale_window: 0, ..good };
        assert!(LossScaler::new(unused).is_ok(), "a static scale has no window");
    }

    #[test]
    fn states_that_cannot_be_are_refused() {
        let config = LossScaleConfig::default();
        let good = LossScaler::new(config).unwrap().state();
        let zero = LossScalerState { scale: 0.0, ..good };
        let future = LossScalerState { last_overflow: Some(0), ..good };
        for (state, words) in [(zero, "scale of"), (future, "last overflow of")] {
            let error = LossScaler::resume(config, state).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }
}
