//! How the training state of a parameter is stored: which kinds of state exist and how many bytes each takes.
//!
//! The engine sizes its chunks, extents and buffers from a [`StateLayout`] and never looks inside the bytes; the
//! update loops of this crate are the only code that does.

use std::fmt;
use std::str::FromStr;

use crate::error::{OptimizerError, Result};

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
}

/// The type in which compute uses a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// 32-bit floats: the weight is its own master.
    F32,
    /// bfloat16: every update also produces the rounded weight.
    Bf16,
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
    /// The running mean of the gradient (`exp_avg` in torch).
    Moment1,
    /// The running mean of the squared gradient (`exp_avg_sq` in torch).
    Moment2,
}

/// The kinds of state that one [`StateFormat`] keeps for one [`WeightType`].
///
/// ```
/// use terrace_optimizer::{StateFormat, StateLayout, WeightType};
///
/// let layout = StateLayout::new(StateFormat::Split, WeightType::Bf16)?;
/// assert_eq!(layout.bytes_per_param(), 12);
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayout {
    format: StateFormat,
    weight: WeightType,
}

impl StateLayout {
    /// The layout of `format` for weights that compute uses as `weight`.
    ///
    /// # Errors
    /// [`OptimizerError::UnsupportedLayout`] for [`StateFormat::Split`] with f32 weights: there is nothing to split.
    pub fn new(format: StateFormat, weight: WeightType) -> Result<Self> {
        match (format, weight) {
            (StateFormat::Split, WeightType::F32) => {
                Err(OptimizerError::UnsupportedLayout { format, weight })
            }
            _ => Ok(Self { format, weight }),
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

    /// Every kind with its bytes per parameter, in the order in which an update takes the slices.
    /// [`StateKind::Weight`] always comes first.
    pub fn kinds(&self) -> &'static [(StateKind, usize)] {
        use StateKind::{Master, MasterLow, Moment1, Moment2, Weight};
        match (self.format, self.weight) {
            (StateFormat::Fp32, WeightType::F32) => &[(Weight, 4), (Moment1, 4), (Moment2, 4)],
            (StateFormat::Fp32, WeightType::Bf16) => &[(Weight, 2), (Master, 4), (Moment1, 4), (Moment2, 4)],
            (StateFormat::Split, _) => &[(Weight, 2), (MasterLow, 2), (Moment1, 4), (Moment2, 4)],
        }
    }

    /// Bytes of all kinds together, per parameter.
    pub fn bytes_per_param(&self) -> usize {
        self.kinds().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Refuses slices that are not exactly `params` parameters of this layout.
    pub(crate) fn check(&self, params: usize, state: &[&mut [u8]]) -> Result<()> {
        let kinds = self.kinds();
        if state.len() != kinds.len() {
            return Err(OptimizerError::KindCount { expected: kinds.len(), found: state.len() });
        }
        for (&(kind, bytes), slice) in kinds.iter().zip(state) {
            let expected_bytes = params * bytes;
            if slice.len() != expected_bytes {
                let found_bytes = slice.len();
                return Err(OptimizerError::KindLength { kind, params, expected_bytes, found_bytes });
            }
            // Every kind so far is an array of scalars as wide as its bytes per parameter.
            if !slice.as_ptr().addr().is_multiple_of(bytes) {
                return Err(OptimizerError::Misaligned { kind, align: bytes });
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
        })
    }
}

impl FromStr for StateFormat {
    type Err = OptimizerError;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "fp32" => Ok(Self::Fp32),
            "split" => Ok(Self::Split),
            _ => Err(OptimizerError::UnknownFormat(text.to_owned())),
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl fmt::Display for StateKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Weight => "weight",
            Self::Master => "master",
            Self::MasterLow => "master_low",
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
        let bytes = |format, weight| StateLayout::new(format, weight).map(|l| l.bytes_per_param());
        assert_eq!(bytes(StateFormat::Fp32, WeightType::F32), Ok(12));
        assert_eq!(bytes(StateFormat::Fp32, WeightType::Bf16), Ok(14));
        assert_eq!(bytes(StateFormat::Split, WeightType::Bf16), Ok(12));
    }

    #[test]
    fn split_of_f32_is_refused_with_the_way_out() {
        let error = StateLayout::new(StateFormat::Split, WeightType::F32).unwrap_err();
        assert!(error.to_string().contains("use `fp32`"), "{error}");
    }

    #[test]
    fn format_names_round_trip() {
        for format in [StateFormat::Fp32, StateFormat::Split] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("fp8".parse::<StateFormat>().is_err());
    }
}
