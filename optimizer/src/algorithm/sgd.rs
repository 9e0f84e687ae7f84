//! Stochastic gradient descent with momentum, dampening 0.
//!
//! For each parameter `p` with gradient `g` (already multiplied by `grad_scale`), in this order and with every
//! intermediate rounded to f32:
//!
//! ```text
//! g ← g + λ·p                            when λ ≠ 0
//! b ← μ·b + g
//! p ← p + −lr · b                        or, with Nesterov's momentum, −lr · (g + μ·b)
//! ```
//!
//! This is `torch.optim.SGD` operation for operation, and with torch's kernels that do not fuse multiply and add every
//! bit agrees. torch's first step copies the gradient into the buffer; here it is added to the zeros of a fresh one,
//! which differs in the sign of a zero alone. Without momentum the buffer holds the last gradient and nobody reads it:
//! state without moments has no layout.

use super::{Elementwise, add_decay};
use crate::error::Result;
use crate::ranges::{check, check_args, check_non_negative};
use crate::store::{Absent, Moment, Rule};
use crate::update::StepArgs;

/// The hyperparameters of SGD. Its momentum buffer is kept as the first moment.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sgd {
    /// Decay of the momentum buffer.
    pub momentum: f64,
    /// Whether a step looks one gradient ahead.
    pub nesterov: bool,
    /// Multiplied with the weight and added to its gradient.
    pub weight_decay: f64,
}

impl Sgd {
    /// Refuses values for which the update is undefined, with torch's ranges.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`](crate::OptimizerError::Hyperparameter) names the first offending value.
    pub fn validate(&self) -> Result<()> {
        check_non_negative("momentum", self.momentum)?;
        let expected = "positive with nesterov";
        check("momentum", self.momentum, expected, !self.nesterov || self.momentum > 0.0)?;
        check_non_negative("weight_decay", self.weight_decay)
    }
}

impl Elementwise for Sgd {
    type Rule = Scalars;

    fn rule(&self, args: &StepArgs) -> Result<Scalars> {
        self.validate()?;
        check_args(args)?;
        Ok(Scalars {
            grad_scale: args.grad_scale,
            decay: args.weight_decay as f32,
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
            lr_negative: -args.lr as f32,
        })
    }
}

/// The scalars of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalars {
    grad_scale: f32,
    decay: f32,
    momentum: f32,
    nesterov: bool,
    lr_negative: f32,
}

impl Rule for Scalars {
    type First<S: Moment> = S;
    type Second<S: Moment> = Absent;

    #[inline(always)]
    fn first(&self, gradient: f32, master: f32, buffer: f32, _: f32) -> (f32, f32) {
        let gradient = add_decay(gradient * self.grad_scale, self.decay, master);
        // A zero momentum must not turn an infinite buffer into NaN.
        let kept = if self.momentum == 0.0 { 0.0 } else { buffer * self.momentum };
        let buffer = kept + gradient;
        let step = if self.nesterov { gradient + self.momentum * buffer } else { buffer };
        let master = master + self.lr_negative * step;
        (master, buffer)
    }
}
