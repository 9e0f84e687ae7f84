//! The ranges of hyperparameters, refused by name when a value lies outside.

use crate::error::{OptimizerError, Result};
use crate::update::StepArgs;

/// Refuses `value` unless the condition of its range holds; `expected` is that range in words.
pub(crate) fn check(name: &'static str, value: f64, expected: &'static str, holds: bool) -> Result<()> {
    if holds { Ok(()) } else { Err(OptimizerError::Hyperparameter { name, value, expected }) }
}

pub(crate) fn check_beta(name: &'static str, value: f64) -> Result<()> {
    check(name, value, "at least 0 and below 1", (0.0..1.0).contains(&value))
}

pub(crate) fn check_non_negative(name: &'static str, value: f64) -> Result<()> {
    check(name, value, "finite and not negative", value.is_finite() && value >= 0.0)
}

/// The arguments that every algorithm has.
pub(crate) fn check_args(args: &StepArgs) -> Result<()> {
    check("step", args.step as f64, "at least 1", args.step >= 1)?;
    check_non_negative("learning rate", args.lr)?;
    check_non_negative("weight_decay", args.weight_decay)?;
    // It would turn the gradient around, or every bit of the state into no number.
    check_non_negative("grad_scale", f64::from(args.grad_scale))
}
