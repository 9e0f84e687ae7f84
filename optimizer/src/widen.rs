//! Gradient elements in f32.

use half::{bf16, f16};

/// A gradient element that widens to f32 without rounding.
///
/// On the bits, because the conversions of `half` have branches for NaNs that are moot here: every update ends in
/// [`canonical`](crate::split::canonical), and a NaN stays a NaN.
pub(crate) trait Widen: Copy + Default + bytemuck::Pod + Send + Sync {
    fn widen(self) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Widen for f16 {
    /// Exponent and mantissa move to their places in f32 and the exponent is rebased: by addition for normal
    /// numbers and infinities, by a subtraction of floats, which is exact, for zeros and subnormals.
    #[inline(always)]
    fn widen(self) -> f32 {
        const REBASE: u32 = (127 - 15) << 23;
        const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
        let bits = u32::from(self.to_bits());
        let sign = (bits & 0x8000) << 16;
        let magnitude = (bits & 0x7fff) << 13;
        // An infinite or NaN exponent is rebased twice, from 31 to 255.
        let wide = magnitude + if magnitude >= 31 << 23 { 2 * REBASE } else { REBASE };
        let small = f32::from_bits(magnitude + SMALLEST_NORMAL) - f32::from_bits(SMALLEST_NORMAL);
        f32::from_bits(sign | if magnitude < 1 << 23 { small.to_bits() } else { wide })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, half) = (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32());
            assert_eq!(ours.is_nan(), half.is_nan(), "{bits:#06x}");
            assert!(ours.is_nan() || ours.to_bits() == half.to_bits(), "{bits:#06x}: {ours} {half}");
        }
    }
}
