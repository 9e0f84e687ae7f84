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

use crate::error::{OptimizerError, Result};
use crate::isa::Isa;
use crate::layout::StateLayout;
use crate::store::{self, Moment, Rule};
use crate::update::{Gradient, Optimizer, StepArgs};

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
    /// [`OptimizerError::Hyperparameter`] names the first offending value.
    pub fn validate(&self) -> Result<()> {
        in_range("beta1", self.beta1, "at least 0 and below 1", (0.0..1.0).contains(&self.beta1))?;
        in_range("beta2", self.beta2, "at least 0 and below 1", (0.0..1.0).contains(&self.beta2))?;
        in_range("eps", self.eps, NON_NEGATIVE, is_non_negative(self.eps))?;
        in_range("weight_decay", self.weight_decay, NON_NEGATIVE, is_non_negative(self.weight_decay))
    }
}

impl Default for AdamW {
    /// The defaults of `torch.optim.AdamW`.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

/// AdamW over state stored as `layout`, on the widest instruction set of this processor.
pub fn adamw(config: AdamW, layout: StateLayout) -> Box<dyn Optimizer> {
    adamw_on(Isa::best(), config, layout)
}

/// AdamW over state stored as `layout`, on an instruction set of choice: the bits are the same on all.
pub fn adamw_on(isa: Isa, config: AdamW, layout: StateLayout) -> Box<dyn Optimizer> {
    Box::new(Adam { isa, config, layout })
}

struct Adam {
    isa: Isa,
    config: AdamW,
    layout: StateLayout,
}

impl Optimizer for Adam {
    fn layout(&self) -> &StateLayout {
        &self.layout
    }

    fn update(&self, args: &StepArgs, gradient: Gradient<'_>, state: &mut [&mut [u8]]) -> Result<()> {
        let scalars = Scalars::new(&self.config, args)?;
        self.layout.check(gradient.len(), state)?;
        store::update(self.isa, &self.layout, scalars, args.step, gradient, state);
        Ok(())
    }

    fn initialize(&self, weights: &[f32], state: &mut [&mut [u8]]) -> Result<()> {
        self.layout.check(weights.len(), state)?;
        store::initialize(&self.layout, weights, state);
        Ok(())
    }
}

/// What is the same for every parameter of a step: computed in f64, rounded to f32 once.
#[derive(Debug, Clone, Copy)]
struct Scalars {
    grad_scale: f32,
    decay: f32,
    /// 1 − β₁ when below a half, else −β₁: torch's `lerp` starts from the nearer end.
    lerp: f32,
    lerp_from_gradient: bool,
    beta2: f32,
    beta2_rest: f32,
    bias2_sqrt_inverse: f32,
    eps: f32,
    step_size_negative: f32,
}

impl Scalars {
    fn new(config: &AdamW, args: &StepArgs) -> Result<Self> {
        config.validate()?;
        let step = args.step as f64;
        in_range("step", step, "at least 1", args.step >= 1)?;
        in_range("learning rate", args.lr, NON_NEGATIVE, is_non_negative(args.lr))?;
        in_range("weight_decay", args.weight_decay, NON_NEGATIVE, is_non_negative(args.weight_decay))?;
        let lerp = (1.0 - config.beta1) as f32;
        let lerp_from_gradient = lerp >= 0.5;
        Ok(Self {
            grad_scale: args.grad_scale,
            decay: (1.0 - args.lr * args.weight_decay) as f32,
            lerp: if lerp_from_gradient { lerp - 1.0 } else { lerp },
            lerp_from_gradient,
            beta2: config.beta2 as f32,
            beta2_rest: (1.0 - config.beta2) as f32,
            bias2_sqrt_inverse: (1.0 / (1.0 - config.beta2.powf(step)).sqrt()) as f32,
            eps: config.eps as f32,
            step_size_negative: -(args.lr / (1.0 - config.beta1.powf(step))) as f32,
        })
    }
}

impl Rule for Scalars {
    type First<S: Moment> = S;
    type Second<S: Moment> = S;

    #[inline(always)]
    fn apply(&self, gradient: f32, master: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let gradient = gradient * self.grad_scale;
        let master = master * self.decay;
        let start = if self.lerp_from_gradient { gradient } else { m };
        let m = start + self.lerp * (gradient - m);
        let v = v * self.beta2 + self.beta2_rest * gradient * gradient;
        let denominator = v.sqrt() * self.bias2_sqrt_inverse + self.eps;
        let master = master + self.step_size_negative * m / denominator;
        (master, m, v)
    }
}

const NON_NEGATIVE: &str = "finite and not negative";

fn is_non_negative(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

fn in_range(name: &'static str, value: f64, expected: &'static str, holds: bool) -> Result<()> {
    if holds { Ok(()) } else { Err(OptimizerError::Hyperparameter { name, value, expected }) }
}
