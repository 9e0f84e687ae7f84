//! Adam with weight decay added to the gradient (Kingma and Ba, <https://arxiv.org/abs/1412.6980>).
//!
//! For each parameter `p` with gradient `g` (already multiplied by `grad_scale`), in this order and with every
//! intermediate rounded to f32:
//!
//! ```text
//! g ← g + λ·p                            when λ ≠ 0
//! m ← lerp(m, g, 1 − β₁)
//! v ← β₂·v + ((1 − β₂)·g)·g
//! p ← p + (−lr/(1 − β₁ᵗ) · m) / (√v · 1/√(1 − β₂ᵗ) + ε)
//! ```
//!
//! This is `torch.optim.Adam` operation for operation. Without decay it is [`AdamW`](crate::AdamW) without decay, bit for
//! bit. With decay the gradient contains the weight, and torch's weights carry an inexact square root, so the
//! moments agree within 1e-6 and not in every bit.

use super::{Elementwise, add_decay};
use crate::error::Result;
use crate::ranges::{check_args, check_beta, check_non_negative};
use crate::store::{Moment, Noise, Rule};
use crate::update::StepArgs;
use terrace_kernels::update::AdamStep;

/// The hyperparameters of Adam with L2 regularisation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator, outside the square root and after bias correction.
    pub eps: f64,
    /// Multiplied with the weight and added to its gradient.
    pub weight_decay: f64,
}

impl Adam {
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

impl Default for Adam {
    /// The defaults of `torch.optim.Adam`.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl Elementwise for Adam {
    type Rule = Scalars<false>;

    fn rule(&self, args: &StepArgs) -> Result<Self::Rule> {
        self.validate()?;
        Scalars::new(self.beta1, self.beta2, self.eps, args)
    }
}

/// The scalars of a step of Adam, and of AdamW when `DECOUPLED`, as they say themselves: computed in f64, rounded to f32 once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalars<const DECOUPLED: bool>(AdamStep);

impl<const DECOUPLED: bool> Scalars<DECOUPLED> {
    pub(super) fn new(beta1: f64, beta2: f64, eps: f64, args: &StepArgs) -> Result<Self> {
        check_args(args)?;
        let step = args.step as f64;
        let decay = if DECOUPLED { 1.0 - args.lr * args.weight_decay } else { args.weight_decay };
        // 1 − β₁ when below a half, else −β₁: torch's `lerp` starts from the nearer end.
        let lerp = (1.0 - beta1) as f32;
        let lerp_from_gradient = lerp >= 0.5;
        Ok(Self(AdamStep {
            grad_scale: args.grad_scale,
            decay: decay as f32,
            decoupled: DECOUPLED,
            lerp: if lerp_from_gradient { lerp - 1.0 } else { lerp },
            lerp_from_gradient,
            beta2: beta2 as f32,
            beta2_rest: (1.0 - beta2) as f32,
            bias2_sqrt_inverse: (1.0 / (1.0 - beta2.powf(step)).sqrt()) as f32,
            eps: eps as f32,
            step_size_negative: -(args.lr / (1.0 - beta1.powf(step))) as f32,
            seed: Noise::seed(args.step),
        }))
    }

    /// The rule with scalars that were computed before.
    pub(crate) fn from_step(step: AdamStep) -> Self {
        assert_eq!(step.decoupled, DECOUPLED, "the rule is the step's");
        Self(step)
    }

    /// The scalars.
    pub(crate) fn step(&self) -> AdamStep {
        self.0
    }

    /// The gradient as the moments see it.
    #[inline(always)]
    fn gradient(&self, gradient: f32, master: f32) -> f32 {
        let gradient = gradient * self.0.grad_scale;
        if DECOUPLED { gradient } else { add_decay(gradient, self.0.decay, master) }
    }
}

impl<const DECOUPLED: bool> Rule for Scalars<DECOUPLED> {
    type First<S: Moment> = S;
    type Second<S: Moment> = S;

    #[inline(always)]
    fn second(&self, gradient: f32, master: f32, v: f32) -> (f32, f32) {
        let gradient = self.gradient(gradient, master);
        let v = v * self.0.beta2 + self.0.beta2_rest * gradient * gradient;
        (v, v.sqrt() * self.0.bias2_sqrt_inverse + self.0.eps)
    }

    #[inline(always)]
    fn first(&self, gradient: f32, master: f32, m: f32, divisor: f32) -> (f32, f32) {
        let gradient = self.gradient(gradient, master);
        let master = if DECOUPLED { master * self.0.decay } else { master };
        let start = if self.0.lerp_from_gradient { gradient } else { m };
        let m = start + self.0.lerp * (gradient - m);
        (master + self.0.step_size_negative * m / divisor, m)
    }
}
