//! Adagrad (Duchi, Hazan and Singer, <https://jmlr.org/papers/v12/duchi11a.html>).
//!
//! For each parameter `p` with gradient `g` (already multiplied by `grad_scale`), in this order and with every
//! intermediate rounded to f32:
//!
//! ```text
//! g ← g + λ·p                            when λ ≠ 0
//! s ← s + g·g
//! p ← p + (−lr/(1 + (t − 1)·lr_decay) · g) / (√s + ε)
//! ```
//!
//! This is `torch.optim.Adagrad` operation for operation. The sums agree bit for bit without decay; weights (and with
//! decay the sums) within 1e-6, for torch's square root is not always the nearest.

use super::{Elementwise, add_decay};
use crate::error::Result;
use crate::ranges::{check_args, check_non_negative};
use crate::store::{Absent, Moment, Rule};
use crate::update::StepArgs;

/// The hyperparameters of Adagrad. Its sum of squares is kept as the second moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Added to the denominator, outside the square root.
    pub eps: f64,
    /// Step `t` is divided by `1 + (t − 1) · lr_decay`.
    pub lr_decay: f64,
    /// Where the sum of squares begins.
    pub initial_accumulator_value: f64,
    /// Multiplied with the weight and added to its gradient.
    pub weight_decay: f64,
}

impl Adagrad {
    /// Refuses values for which the update is undefined, with torch's ranges.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`](crate::OptimizerError::Hyperparameter) names the first offending value.
    pub fn validate(&self) -> Result<()> {
        check_non_negative("eps", self.eps)?;
        check_non_negative("lr_decay", self.lr_decay)?;
        check_non_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        check_non_negative("weight_decay", self.weight_decay)
    }
}

impl Default for Adagrad {
    /// The defaults of `torch.optim.Adagrad`.
    fn default() -> Self {
        Self { eps: 1e-10, lr_decay: 0.0, initial_accumulator_value: 0.0, weight_decay: 0.0 }
    }
}

impl Elementwise for Adagrad {
    type Rule = Scalars;

    fn rule(&self, args: &StepArgs) -> Result<Scalars> {
        self.validate()?;
        check_args(args)?;
        let before = (args.step - 1) as f64;
        Ok(Scalars {
            grad_scale: args.grad_scale,
            decay: args.weight_decay as f32,
            eps: self.eps as f32,
            step_size_negative: -(args.lr / (1.0 + before * self.lr_decay)) as f32,
        })
    }

    fn initial_moment(&self) -> f32 {
        self.initial_accumulator_value as f32
    }
}

/// The scalars of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalars {
    grad_scale: f32,
    decay: f32,
    eps: f32,
    step_size_negative: f32,
}

impl Rule for Scalars {
    type First<S: Moment> = Absent;
    type Second<S: Moment> = S;

    #[inline(always)]
    fn second(&self, gradient: f32, master: f32, sum: f32) -> (f32, f32) {
        let gradient = add_decay(gradient * self.grad_scale, self.decay, master);
        let sum = sum + gradient * gradient;
        (sum, sum.sqrt() + self.eps)
    }

    #[inline(always)]
    fn first(&self, gradient: f32, master: f32, m: f32, divisor: f32) -> (f32, f32) {
        let gradient = add_decay(gradient * self.grad_scale, self.decay, master);
        (master + self.step_size_negative * gradient / divisor, m)
    }
}
