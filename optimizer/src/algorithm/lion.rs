//! Lion (Chen et al., <https://arxiv.org/abs/2302.06675>).
//!
//! For each parameter `p` with gradient `g` (already multiplied by `grad_scale`), in this order and with every
//! intermediate rounded to f32:
//!
//! ```text
//! c ← β₁·m + (1 − β₁)·g
//! p ← p · (1 − lr·λ) − lr · sign(c)
//! m ← β₂·m + (1 − β₂)·g
//! ```
//!
//! These are the operations of the authors' PyTorch program, and with torch's kernels that do not fuse multiply and add
//! every bit agrees. DeepSpeed's CPU kernel computes the same, except for `c = 0`: it takes the sign bit, and moves a weight
//! that has no gradient and no momentum (an embedding row that was never looked up) by the learning rate. Here, as in the
//! paper, such a weight only decays. A `c` that is not a number makes the weight not a number: a sign would hide it.

use super::Elementwise;
use crate::error::Result;
use crate::ranges::{check_args, check_beta, check_non_negative};
use crate::store::{Absent, Moment, Rule};
use crate::update::StepArgs;

/// The hyperparameters of Lion. Its momentum is kept as the first moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Share of the momentum in the direction of a step.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Lion {
    /// Refuses values for which the update is undefined.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`](crate::OptimizerError::Hyperparameter) names the first offending value.
    pub fn validate(&self) -> Result<()> {
        check_beta("beta1", self.beta1)?;
        check_beta("beta2", self.beta2)?;
        check_non_negative("weight_decay", self.weight_decay)
    }
}

impl Default for Lion {
    /// The authors' defaults; DeepSpeed's decay of the momentum is 0.999.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

impl Elementwise for Lion {
    type Rule = Scalars;

    fn rule(&self, args: &StepArgs) -> Result<Scalars> {
        self.validate()?;
        check_args(args)?;
        Ok(Scalars {
            grad_scale: args.grad_scale,
            decay: (1.0 - args.lr * args.weight_decay) as f32,
            beta1: self.beta1 as f32,
            beta1_rest: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            beta2_rest: (1.0 - self.beta2) as f32,
            lr: args.lr as f32,
        })
    }
}

/// The scalars of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalars {
    grad_scale: f32,
    decay: f32,
    beta1: f32,
    beta1_rest: f32,
    beta2: f32,
    beta2_rest: f32,
    lr: f32,
}

impl Rule for Scalars {
    type First<S: Moment> = S;
    type Second<S: Moment> = Absent;

    #[inline(always)]
    fn first(&self, gradient: f32, master: f32, m: f32, _: f32) -> (f32, f32) {
        let gradient = gradient * self.grad_scale;
        let direction = m * self.beta1 + gradient * self.beta1_rest;
        // Zero and NaN stand for their own step.
        let step = if direction.abs() > 0.0 { self.lr.copysign(direction) } else { direction };
        let master = master * self.decay - step;
        let m = m * self.beta2 + gradient * self.beta2_rest;
        (master, m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(gradient: f32, master: f32, m: f32) -> (f32, f32) {
        let args = StepArgs { step: 1, lr: 0.25, grad_scale: 1.0, weight_decay: 0.0 };
        Lion::default().rule(&args).unwrap().first(gradient, master, m, 1.0)
    }

    #[test]
    fn without_gradient_and_momentum_nothing_moves() {
        assert_eq!(apply(0.0, 1.0, 0.0).0, 1.0);
        assert_eq!(apply(-0.0, 1.0, -0.0).0, 1.0);
        assert_eq!(apply(1e-30, 1.0, 0.0).0, 0.75);
        assert_eq!(apply(0.0, 1.0, -1e-30).0, 1.25);
    }

    #[test]
    fn not_a_number_is_not_hidden_by_the_sign() {
        let (master, m) = apply(f32::NAN, 1.0, 0.0);
        assert!(master.is_nan() && m.is_nan());
    }
}
