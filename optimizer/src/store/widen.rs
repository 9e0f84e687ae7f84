//! Between f32 and the types of gradients and weights.

use half::{bf16, f16};

use super::{LANES, Order, TILE, Words};
use crate::split::round_bf16;

/// A gradient element that widens to f32 without rounding.
///
/// On the bits, because the conversions of `half` have branches for NaNs that are moot here: every update ends in
/// [`canonical`](crate::split::canonical), and a NaN stays a NaN.
pub(crate) trait Widen: Copy + Default + bytemuck::Pod + Send + Sync {
    fn widen(self) -> f32;

    /// Parameter `Q` of a lane.
    #[inline(always)]
    fn load<O: Order, const Q: usize>(tile: &[Self; TILE], lane: usize) -> f32 {
        tile[O::place::<Q>(lane)].widen()
    }

    /// The upper 16 bits of the two gradients of a pair in [`Words`], widened.
    #[inline(always)]
    fn random_bits<const PAIR: usize>(tile: &[Self; TILE], lane: usize) -> u32 {
        let even = 2 * (PAIR * LANES + lane);
        tile[even].widen().to_bits() >> 16 | tile[even + 1].widen().to_bits() & 0xffff_0000
    }
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

    #[inline(always)]
    fn load<O: Order, const Q: usize>(tile: &[Self; TILE], lane: usize) -> f32 {
        f32::from_bits(O::high::<Q>(bytemuck::cast_ref(tile), lane))
    }

    // The same bits as above, without taking them apart.
    #[inline(always)]
    fn random_bits<const PAIR: usize>(tile: &[Self; TILE], lane: usize) -> u32 {
        Words::word::<PAIR>(bytemuck::cast_ref(tile), lane)
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

/// A weight that is rounded from its f32 master.
pub(crate) trait Narrow {
    /// The bits of a [canonical](crate::split::canonical) value.
    fn narrow(master: f32) -> u16;
}

impl Narrow for bf16 {
    #[inline(always)]
    fn narrow(master: f32) -> u16 {
        round_bf16(master)
    }
}

impl Narrow for f16 {
    /// To nearest even; what is too large becomes infinity.
    #[inline(always)]
    fn narrow(master: f32) -> u16 {
        const INFINITE: u32 = (127 + 16) << 23;
        const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
        let bits = master.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let nan = if magnitude > 0x7f80_0000 { 0x200 } else { 0 };
        let finite = magnitude.min(INFINITE);
        let normal = ((finite + 0xfff + (finite >> 13 & 1)) >> 13).wrapping_sub((127 - 15) << 10);
        // The spacing of f32 at a half is that of the subnormals of f16.
        let small = (f32::from_bits(finite) + 0.5).to_bits() - 0.5f32.to_bits();
        let rounded = if finite < SMALLEST_NORMAL { small } else { normal };
        (rounded | nan | bits >> 16 & 0x8000) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_to_f16_is_to_nearest_even() {
        // Every pattern of the upper bits around a tie of every kind, subnormals and overflow among them.
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x5000, 0x7000, 0x9000, 0xf000] {
                let x = f32::from_bits(high << 16 | low);
                let (ours, half) = (f16::from_bits(f16::narrow(x)), f16::from_f32_const(x));
                assert_eq!(ours.is_nan(), half.is_nan(), "{x:e}");
                assert!(ours.is_nan() || ours.to_bits() == half.to_bits(), "{x:e}: {ours} {half}");
            }
        }
    }

    #[test]
    fn every_f16_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, half) = (f16::from_bits(bits).widen(), f16::from_bits(bits).to_f32());
            assert_eq!(ours.is_nan(), half.is_nan(), "{bits:#06x}");
            assert!(ours.is_nan() || ours.to_bits() == half.to_bits(), "{bits:#06x}: {ours} {half}");
        }
    }
}
