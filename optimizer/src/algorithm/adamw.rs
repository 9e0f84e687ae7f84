//! AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, <https://arxiv.org/abs/1711.05101>).
//!
//! For each parameter `p` with gradient `g` (already multiplied by `grad_scale`), in this order and with every
//! intermediate rounded to f32:
//!
//! ```text
//! p ← p · (1 − lr·λ)
//! m ← lerp(m, g, 1 − β₁)                 m + (1 − β₁)·(g − m)
//! v ← β₂·v + ((1 − β₂)·g)·g
//! p ← p + (−lr/(1 − β₁ᵗ) · m) / (√v · 1/√(1 − β₂ᵗ) + ε)
//! ```
//!
//! This is `torch.optim.AdamW` operation for operation, including its scalars, which are computed in f64 and
//! rounded once, except that torch divides by √(1 − β₂ᵗ): division and square root
//! are what bounds the loop in cache. Where torch's kernels do not fuse multiply and add, the moments agree bit for bit; the
//! weights are within 1e-6, because torch takes its square root from a library that does not always round it
//! correctly.
//!
//! There is deliberately no `mul_add`: without FMA hardware it is a library call, and its single rounding would
//! make results depend on the instruction set.

use super::adam::Scalars;
use super::{Elementwise, Loops};
use crate::error::Result;
use crate::isa::Isa;
use crate::layout::{Moments, StateLayout};
use crate::ranges::{check_beta, check_non_negative};
use crate::update::{Optimizer, StepArgs};

/// The hyperparameters of AdamW. f64, because torch computes its scalars in f64.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator, outside the square root and after bias correction.
    pub eps: f64,
    /// Decoupled weight decay for parameter groups that do not say otherwise; [`AdamW::step`] puts it into
    /// [`StepArgs`], which are what an update obeys.
    pub weight_decay: f64,
}

impl AdamW {
    /// The arguments of step `step` (the first is 1) with this configuration's weight decay and unscaled gradients.
    pub fn step(&self, step: u64, lr: f64) -> StepArgs {
        StepArgs { step, lr, grad_scale: 1.0, weight_decay: self.weight_decay }
    }

    /// Refuses values for which the update is undefined, with torch's ranges.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`](crate::OptimizerError::Hyperparameter) names the first offending value.
    pub fn validate(&self) -> Result<()> {
        check_beta("beta1", self.beta1)?;
        check_beta("beta2", self.beta2)?;
        check_non_negative("eps", self.eps)?;
        check_non_negative("weight_decay", self.weight_decay)
    }
}

impl Default for AdamW {
    /// The defaults of `torch.optim.AdamW`.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// AdamW over state stored as `layout`, on the widest instruction set of this processor.
///
/// # Panics
/// If the layout lacks a moment.
pub fn adamw(config: AdamW, layout: StateLayout) -> Box<dyn Optimizer> {
    adamw_on(Isa::best(), config, layout)
}

/// AdamW over state stored as `layout`, on an instruction set of choice: the bits are the same on all.
///
/// # Panics
/// If the layout lacks a moment.
pub fn adamw_on(isa: Isa, config: AdamW, layout: StateLayout) -> Box<dyn Optimizer> {
    assert_eq!(layout.moments(), Moments::Both, "AdamW keeps both moments");
    Box::new(Loops { isa, algorithm: config, layout })
}

impl Elementwise for AdamW {
    type Rule = Scalars<true>;

    fn rule(&self, args: &StepArgs) -> Result<Self::Rule> {
        self.validate()?;
        Scalars::new(self.beta1, self.beta2, self.eps, args)
    }
}
