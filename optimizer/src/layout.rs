//! How the training state of a parameter is stored: which kinds of state exist and how many bytes each takes.
//!
//! The engine sizes its chunks, extents and buffers from a [`StateLayout`] and never looks inside the bytes; the
//! update loops of this crate are the only code that does.

use std::fmt;
use std::str::FromStr;

use crate::error::{OptimizerError, Result};
use terrace_kernels::DType;

/// The format of a parameter's training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StateFormat {
    /// Master weight and both moments in f32: the reference, and what DeepSpeed stores.
    Fp32,
    /// The master weight is the bf16 weight plus a signed 16-bit remainder. Lossless, so the numbers are
    /// bit-identical to [`StateFormat::Fp32`] for two bytes per parameter less.
    #[default]
    Split,
    /// The split master weight, and both moments in bf16, rounded stochastically: 8 bytes per parameter. One rounding
    /// of a moment is wrong by less than 2⁻⁷ of it, and right in the mean.
    Bf16,
    /// The bf16 weight with an 8-bit remainder, and both moments as 8-bit codes with a scale per block of
    /// [`COMPACT_BLOCK`]: 5.0625 bytes per parameter. One rounding is right in the mean, and wrong by less than 2⁻¹⁵ of
    /// a master and 2⁻⁴ of a moment, or, for moments far below the largest M of their block, by less than M·2⁻⁹ (first)
    /// and M·2⁻¹⁷ (second).
    Compact,
}

/// The type in which compute uses a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// 32-bit floats: the weight is its own master.
    F32,
    /// bfloat16: every update also produces the rounded weight.
    Bf16,
    /// IEEE half precision, likewise. Its gradients need a [loss scale](crate::LossScaler).
    F16,
}

impl WeightType {
    /// The type of weights that compute has as `dtype`, if they can be trained.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            _ => None,
        }
    }
}

/// One array of a parameter's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// The weight as compute uses it.
    Weight,
    /// The f32 master weight.
    Master,
    /// The signed 16-bit remainder that turns the bf16 weight into the f32 master.
    MasterLow,
    /// The signed 8-bit remainder that brings the bf16 weight within a 256th of its spacing of the master.
    MasterLow8,
    /// The running mean of the gradient (`exp_avg` in torch).
    Moment1,
    /// The running mean of the squared gradient (`exp_avg_sq` in torch).
    Moment2,
}

/// Which moments an algorithm keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Moments {
    /// A running mean of the gradient: momentum, Lion.
    First,
    /// A running sum or mean of the squared gradient: Adagrad.
    Second,
    /// Both: Adam and AdamW.
    #[default]
    Both,
}

/// How one kind of state is stored: `bytes` for every `params` parameters, the last such block always whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KindLayout {
    /// The kind.
    pub kind: StateKind,
    /// Bytes of one block.
    pub bytes: usize,
    /// Parameters of one block: 1 for plain arrays.
    pub params: usize,
}

impl KindLayout {
    /// Bytes of `params` parameters from the start of a block.
    pub const fn bytes_for(&self, params: usize) -> usize {
        params.div_ceil(self.params) * self.bytes
    }

    /// What the address of a slice must be a multiple of, in bytes.
    pub const fn align(&self) -> usize {
        if self.params == 1 { self.bytes } else { 1 }
    }
}

/// An array with an element for every parameter.
const fn plain(kind: StateKind, bytes: usize) -> KindLayout {
    KindLayout { kind, bytes, params: 1 }
}

/// A block of 8-bit elements.
const fn block(kind: StateKind) -> KindLayout {
    KindLayout { kind, bytes: COMPACT_BLOCK, params: COMPACT_BLOCK }
}

/// A block of 8-bit codes, followed by its bf16 scale.
const fn scaled(kind: StateKind) -> KindLayout {
    KindLayout { kind, bytes: COMPACT_BLOCK + 2, params: COMPACT_BLOCK }
}

/// Parameters that share a scale in [`StateFormat::Compact`], and whose bytes are stored in an order of its own.
pub const COMPACT_BLOCK: usize = terrace_kernels::update::COMPACT_BLOCK;

/// The most kinds that a layout has.
pub(crate) const KINDS_MAX: usize = 4;

/// The kinds of state that one [`StateFormat`] keeps for one [`WeightType`].
///
/// ```
/// use terrace_optimizer::{StateFormat, StateLayout, WeightType};
///
/// let layout = StateLayout::new(StateFormat::Split, WeightType::Bf16)?;
/// assert_eq!(layout.bytes_for(100), 1200);
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayout {
    format: StateFormat,
    weight: WeightType,
    moments: Moments,
}

impl StateLayout {
    /// The layout of `format` with both moments, for weights that compute uses as `weight`.
    ///
    /// # Errors
    /// [`OptimizerError::UnsupportedLayout`] for every format but [`StateFormat::Fp32`] with f32 or f16 weights: their masters
    /// start from the bf16 weight.
    pub fn new(format: StateFormat, weight: WeightType) -> Result<Self> {
        Self::with_moments(format, weight, Moments::Both)
    }

    /// As [`new`](Self::new) for an algorithm that keeps only some of the moments.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_moments(format: StateFormat, weight: WeightType, moments: Moments) -> Result<Self> {
        match (format, weight) {
            (StateFormat::Fp32, _) | (_, WeightType::Bf16) => Ok(Self { format, weight, moments }),
            (_, WeightType::F32 | WeightType::F16) => {
                Err(OptimizerError::UnsupportedLayout { format, weight })
            }
        }
    }

    /// The state format.
    pub fn format(&self) -> StateFormat {
        self.format
    }

    /// The type in which compute uses the weight.
    pub fn weight(&self) -> WeightType {
        self.weight
    }

    /// The moments that are kept.
    pub fn moments(&self) -> Moments {
        self.moments
    }

    /// Every kind, in the order in which an update takes the slices. [`StateKind::Weight`] always comes first, the
    /// moments last.
    pub fn kinds(&self) -> &'static [KindLayout] {
        use StateKind::{Master, MasterLow, MasterLow8, Moment1, Moment2, Weight};
        /// The weights with the first, the second and both of the two moments.
        macro_rules! kinds {
            ([$($weight:expr),*], $first:expr, $second:expr) => {
                match self.moments {
                    Moments::First => const { &[$($weight,)* $first] },
                    Moments::Second => const { &[$($weight,)* $second] },
                    Moments::Both => const { &[$($weight,)* $first, $second] },
                }
            };
        }
        match (self.format, self.weight) {
            (StateFormat::Fp32, WeightType::F32) => {
                kinds!([plain(Weight, 4)], plain(Moment1, 4), plain(Moment2, 4))
            }
            (StateFormat::Fp32, WeightType::Bf16 | WeightType::F16) => {
                kinds!([plain(Weight, 2), plain(Master, 4)], plain(Moment1, 4), plain(Moment2, 4))
            }
            (StateFormat::Split, _) => {
                kinds!([plain(Weight, 2), plain(MasterLow, 2)], plain(Moment1, 4), plain(Moment2, 4))
            }
            (StateFormat::Bf16, _) => {
                kinds!([plain(Weight, 2), plain(MasterLow, 2)], plain(Moment1, 2), plain(Moment2, 2))
            }
            (StateFormat::Compact, _) => {
                kinds!([plain(Weight, 2), block(MasterLow8)], scaled(Moment1), scaled(Moment2))
            }
        }
    }

    /// Bytes of all kinds together for `params` parameters.
    pub fn bytes_for(&self, params: usize) -> usize {
        self.kinds().iter().map(|kind| kind.bytes_for(params)).sum()
    }

    /// Refuses slices that are not exactly `params` parameters of this layout.
    pub(crate) fn check(&self, params: usize, state: &[&mut [u8]]) -> Result<()> {
        self.check_places(params, state.iter().map(|slice| (slice.len(), slice.as_ptr().addr())))
    }

    /// As [`check`](Self::check), for the bytes and the address of each slice, wherever it is.
    pub(crate) fn check_places(
        &self,
        params: usize,
        state: impl ExactSizeIterator<Item = (usize, usize)>,
    ) -> Result<()> {
        let kinds = self.kinds();
        if state.len() != kinds.len() {
            return Err(OptimizerError::KindCount { expected: kinds.len(), found: state.len() });
        }
        for (kind, (found_bytes, address)) in kinds.iter().zip(state) {
            let (expected_bytes, align) = (kind.bytes_for(params), kind.align());
            let kind = kind.kind;
            if found_bytes != expected_bytes {
                return Err(OptimizerError::KindLength { kind, params, expected_bytes, found_bytes });
            }
            if !address.is_multiple_of(align) {
                return Err(OptimizerError::Misaligned { kind, align });
            }
        }
        Ok(())
    }
}

impl fmt::Display for StateFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fp32 => "fp32",
            Self::Split => "split",
            Self::Bf16 => "bf16",
            Self::Compact => "compact",
        })
    }
}

impl FromStr for StateFormat {
    type Err = OptimizerError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "fp32" => Ok(Self::Fp32),
            "split" => Ok(Self::Split),
            "bf16" => Ok(Self::Bf16),
            "compact" => Ok(Self::Compact),
            _ => Err(OptimizerError::UnknownFormat(text.to_owned())),
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weight => "weight",
            Self::Master => "master",
            Self::MasterLow => "master_low",
            Self::MasterLow8 => "master_low8",
            Self::Moment1 => "moment1",
            Self::Moment2 => "moment2",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_per_parameter() {
        let bytes = |format, weight| StateLayout::new(format, weight).map(|l| l.bytes_for(64));
        assert_eq!(bytes(StateFormat::Fp32, WeightType::F32), Ok(12 * 64));
        assert_eq!(bytes(StateFormat::Fp32, WeightType::Bf16), Ok(14 * 64));
        assert_eq!(bytes(StateFormat::Fp32, WeightType::F16), Ok(14 * 64));
        assert_eq!(bytes(StateFormat::Split, WeightType::Bf16), Ok(12 * 64));
        assert_eq!(bytes(StateFormat::Bf16, WeightType::Bf16), Ok(8 * 64));
        assert_eq!(bytes(StateFormat::Compact, WeightType::Bf16), Ok(5 * 64 + 2 * 2));
    }

    #[test]
    fn a_short_block_is_stored_whole() {
        let layout = StateLayout::with_moments(StateFormat::Compact, WeightType::Bf16, Moments::First);
        let kinds = layout.unwrap().kinds();
        assert_eq!(kinds.iter().map(|k| k.bytes_for(65)).collect::<Vec<_>>(), [130, 128, 132]);
    }

    #[test]
    fn split_of_other_weights_is_refused_with_the_way_out() {
        for weight in [WeightType::F32, WeightType::F16] {
            let error = StateLayout::new(StateFormat::Split, weight).unwrap_err();
            assert!(error.to_string().contains("use `fp32`"), "{error}");
        }
    }

    #[test]
    fn format_names_round_trip() {
        for format in [StateFormat::Fp32, StateFormat::Split, StateFormat::Bf16, StateFormat::Compact] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("fp8".parse::<StateFormat>().is_err());
    }
}
