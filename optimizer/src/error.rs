//! The one error type of the crate.

use crate::{Moments, StateFormat, StateKind, WeightType};

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
    /// The text names no algorithm.
    #[error("unknown optimizer `{0}`: use `adamw`, `adam`, `adagrad`, `lion` or `sgd`")]
    UnknownAlgorithm(String),
    /// The algorithm cannot be computed element by element.
    #[error(
        "{0} works on whole matrices, but state is updated in chunks that begin and end anywhere in a matrix: use \
         `adamw` or `lion`"
    )]
    WholeMatrices(String),
    /// The layout keeps other moments than the algorithm.
    #[error(
        "{algorithm} keeps the moments {needed:?}, but the state layout has {found:?}: make the layout with \
         StateLayout::with_moments and Algorithm::moments"
    )]
    WrongMoments {
        /// Name of the algorithm.
        algorithm: String,
        /// What the algorithm keeps.
        needed: Moments,
        /// What the layout has.
        found: Moments,
    },
    /// State in device memory is updated by kernels, of which there is none for this algorithm.
    #[error(
        "there is no kernel that updates state by {0} in device memory: use `adamw` or `adam`, or update on the host"
    )]
    NotOnDevice(String),
    /// A kernel could not run.
    #[error(transparent)]
    Kernel(#[from] terrace_kernels::KernelError),
    /// The text names no schedule.
    #[error(
        "unknown learning-rate schedule `{0}`: use `constant`, `linear`, `cosine`, `cosine_with_restarts`, \
         `polynomial` or `inverse_sqrt`"
    )]
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
    /// A schedule ends before its warm-up does.
    #[error(
        "warmup_steps is {warmup}, but the schedule ends after total_steps, {total}: warm up in fewer, or train more steps"
    )]
    Warmup {
        /// Steps of warm-up.
        warmup: u64,
        /// Steps of the whole run.
        total: u64,
    },
    /// The pattern of a parameter-group rule matches no parameter.
    #[error("the parameter-group pattern `{0}` matches no parameter of the model: correct or remove it")]
    UnmatchedPattern(String),
    /// A gradient overflowed and the dynamic loss scale cannot go down.
    #[error(
        "a gradient overflowed although the loss scale is at its minimum, {0}: lower the learning rate, use bf16, or \
         look for a bad sample"
    )]
    LossScaleAtMinimum(f64),
    /// The global gradient norm is infinite or not a number.
    #[error(
        "the global gradient norm is {0}: some gradient is infinite or not a number; skip the step, lower the \
         learning rate, or look for a bad sample"
    )]
    NonFiniteNorm(f64),
}

/// Results of this crate.
pub type Result<T, E = OptimizerError> = std::result::Result<T, E>;
