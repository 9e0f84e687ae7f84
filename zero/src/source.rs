//! Where initial weights come from and where trained ones go, tensor by tensor and range by range.
//!
//! Neither side ever holds a whole model: both are driven with small ranges.

use crate::{ParamSpec, Result};
use terrace_kernels::DType;

/// Supplies initial weights.
pub trait WeightSource {
    /// Fills `out` with elements `start..start + out.len()` of the parameter, widened to f32. Ranges of one parameter are
    /// asked for in increasing order.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or its file cannot be read.
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result;
}

/// What an export may hold of weights, beside what a [`WeightReader`] has: the engine's plan has room for so much.
pub const EXPORT_BUFFER_BYTES: usize = 1 << 20;

/// Gives out weights.
pub trait WeightReader {
    /// Element type of the weights.
    fn dtype(&self) -> DType;

    /// Every parameter, in the order of the blocks. Borrowed parameters are not listed twice.
    fn params(&self) -> Vec<ParamSpec>;

    /// Fills `out` with the little-endian bytes of the parameter's elements from `start` on.
    ///
    /// # Errors
    /// The state cannot be read.
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> Result;
}
