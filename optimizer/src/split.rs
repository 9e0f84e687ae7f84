//! The lossless split of an f32 into a bf16 and a signed 16-bit remainder.
//!
//! ```text
//!  bits of f32 x:    [ high 16 ............ | low 16 ............ ]
//!  hi  = (bits + 0x8000) >> 16              the bf16 weight: nearest, ties away from zero
//!  low = bits as i16                        in [-0x8000, 0x7fff]
//!  bits = (hi << 16) + sign_extend(low)     exact, modulo 2^32
//! ```
//!
//! When the low half is at least `0x8000` the high half was rounded up, and the same low half read as a signed
//! number is negative and takes the increment back: the pair is lossless for every finite value, both zeros,
//! subnormals, infinities, and for values that round up to infinity.
//!
//! # Why ties go away from zero
//!
//! bf16 is usually rounded to nearest, ties to even. Then a tie goes up or down according to the last bit of the
//! high half, its remainder is `+0x8000` or `-0x8000`, and 16 signed bits hold only one of the two: one of the
//! 2^16 + 1 remainders would be lost. With ties away from zero a tie always goes up in magnitude and the remainder
//! is always `-0x8000`. Both state formats use this rounding, so their bf16 weights are the same bits; it differs
//! from ties-to-even in one of 2^17 values of the f32 and has the same maximum error. (Storing the truncated high
//! half and the plain low half is lossless too, but truncation is a biased rounding with twice the error.)
//!
//! # Not-a-number
//!
//! All NaNs become the one pattern `0x7fc0_0000`: rounding a NaN's payload could carry it into an infinity, and
//! neither Rust nor LLVM promises which sign or payload an operation returns, so that keeping them would make two
//! builds of the same loop differ.

/// The one NaN that state ever holds: positive, quiet, no payload; bf16 `0x7fc0`, remainder 0.
pub const CANONICAL_NAN: u32 = 0x7fc0_0000;

/// `x` with every NaN replaced by [`CANONICAL_NAN`].
// Selects bits, because a selection among floats could be folded back into `x`.
#[inline(always)]
pub fn canonical(x: f32) -> f32 {
    f32::from_bits(if x.is_nan() { CANONICAL_NAN } else { x.to_bits() })
}

/// The bf16 bits of a [`canonical`] value: nearest, ties away from zero.
#[inline(always)]
pub fn round_bf16(x: f32) -> u16 {
    (x.to_bits().wrapping_add(0x8000) >> 16) as u16
}

/// The remainder that [`join`] needs beside [`round_bf16`]`(x)` to restore a [`canonical`] value.
#[inline(always)]
pub fn remainder(x: f32) -> i16 {
    x.to_bits() as i16
}

/// The f32 whose [`round_bf16`] is `hi` and whose [`remainder`] is `low`.
#[inline(always)]
pub fn join(hi: u16, low: i16) -> f32 {
    f32::from_bits((u32::from(hi) << 16).wrapping_add(i32::from(low) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trips(bits: u32) {
        let x = canonical(f32::from_bits(bits));
        assert_eq!(join(round_bf16(x), remainder(x)).to_bits(), x.to_bits(), "{bits:#010x}");
    }

    #[test]
    fn lossless_around_every_bf16() {
        for hi in 0..=u16::MAX {
            for low in [0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff] {
                round_trips(u32::from(hi) << 16 | low);
            }
        }
    }

    #[test]
    fn lossless_for_every_remainder() {
        for hi in [0x0000, 0x8000, 0x0001, 0x3f80, 0xbf80, 0x7f7f, 0xff7f, 0x7f80, 0xff80] {
            for low in 0..=u16::MAX {
                round_trips(hi << 16 | u32::from(low));
            }
        }
    }

    #[test]
    fn rounds_to_nearest() {
        let half_up = |bits: u32| round_bf16(f32::from_bits(bits));
        assert_eq!(half_up(0x3f80_7fff), 0x3f80);
        assert_eq!(half_up(0x3f80_8000), 0x3f81, "a tie above an even bf16 still goes away from zero");
        assert_eq!(half_up(0x3f81_8000), 0x3f82);
        assert_eq!(half_up(0xbf80_8000), 0xbf81);
        assert_eq!(half_up(f32::MAX.to_bits()), 0x7f80);
        assert_eq!(half_up(f32::INFINITY.to_bits()), 0x7f80);
    }

    #[test]
    fn agrees_with_half_except_at_ties() {
        let mut bits = 0x9e37_79b9_u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let x = f32::from_bits(bits);
            if !x.is_nan() && bits & 0xffff != 0x8000 {
                assert_eq!(round_bf16(x), half::bf16::from_f32(x).to_bits(), "{bits:#010x}");
            }
        }
    }

    #[test]
    fn nans_become_one() {
        for bits in [0x7f80_0001, 0x7fff_ffff, 0xffff_ffff, 0xffc0_0000, 0x7fc0_0000] {
            assert_eq!(canonical(f32::from_bits(bits)).to_bits(), CANONICAL_NAN);
        }
        assert_eq!(canonical(f32::NEG_INFINITY), f32::NEG_INFINITY);
    }
}
