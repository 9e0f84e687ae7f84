//! The one error type of the crate.

use crate::{StateFormat, StateKind, WeightType};

/// Why an update, a layout or a norm was refused.
///
/// Every variant is detected before the first byte of state is written, so a refused update leaves the chunk as
/// it was.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// The format cannot store a parameter whose weight has this type.
    #[error("state format `{format}` needs bf16 weights, but the weights are {weight}: use `fp32` instead")]
    UnsupportedLayout {
        /// The format that was asked for.
        format: StateFormat,
        /// The weight type that was asked for.
        weight: WeightType,
    },
    /// The text names no state format.
    #[error("unknown state format `{0}`: use `fp32`, `split`, `bf16` or `compact`")]
    UnknownFormat(String),
    /// The text names no schedule.
    #[error("unknown learning-rate schedule `{0}`: use `constant`, `linear` or `cosine`")]
    UnknownSchedule(String),
    /// The caller passed a different number of slices than the layout has kinds.
    #[error(
        "the state layout has {expected} kinds but {found} slices were given: pass one slice per entry of \
         StateLayout::kinds(), in that order"
    )]
    KindCount {
        /// Kinds in the layout.
        expected: usize,
        /// Slices given.
        found: usize,
    },
    /// A state slice does not hold exactly one chunk.
    #[error("{kind} holds {found_bytes} bytes, but {params} parameters need {expected_bytes}")]
    KindLength {
        /// Which slice.
        kind: StateKind,
        /// Parameters in the chunk, from the gradient or the initial weights.
        params: usize,
        /// Bytes that many parameters occupy.
        expected_bytes: usize,
        /// Bytes given.
        found_bytes: usize,
    },
    /// A state slice starts at an address that its elements cannot have.
    #[error(
        "{kind} starts at an address that is not a multiple of {align}: pass buffers aligned to 64 bytes"
    )]
    Misaligned {
        /// Which slice.
        kind: StateKind,
        /// Alignment its elements need, in bytes.
        align: usize,
    },
    /// A hyperparameter is outside its range.
    #[error("{name} is {value}, but must be {expected}")]
    Hyperparameter {
        /// Name as in the configuration.
        name: &'static str,
        /// The offending value.
        value: f64,
        /// The range in words.
        expected: &'static str,
    },
    /// The global gradient norm is infinite or not a number.
    #[error(
        "the global gradient norm is {0}: some gradient is infinite or not a number; skip the step, lower the \
         learning rate, or look for a bad sample"
    )]
    NonFiniteNorm(f64),
}

/// Results of this crate.
pub type Result<T, E = OptimizerError> = std::result::Result<T, E>;
