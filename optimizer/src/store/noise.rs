//! Random bits for stochastic rounding, and the rounding to bf16 that uses them.
//!
//! Rounding up with the probability that the discarded bits say is unbiased: its mean is the value itself.
//! Rounding to nearest is not, and state needs it not to be: a running mean with decay β moves by `(1 − β)·(x −
//! mean)` a step, which for β₂ = 0.999 is a small fraction of the spacing of bf16 (2⁻⁷ to 2⁻⁸ of the value), so a
//! mean rounded to nearest would stay where it is for ever. For m with β₁ = 0.9 nearest would stop within 5 half
//! spacings of the true mean, and for larger β₁ sooner; stochastic rounding costs one spacing of noise that
//! averages out, so both moments use it.
//!
//! The bits are a hash of the step and of the parameter's own gradient and master, so that an update stays a pure
//! function: no generator to carry along, no index, and the same result for any cut and any number of threads. The
//! step contributes a word as good as random, and everything after it maps words to words one to one: for every
//! parameter the noise is uniform and independent from step to step, whatever its bits are. Within a step, one
//! multiplication tells parameters apart; two with the same gradient and master are rounded alike.
//!
//! One word serves the two parameters of a [`Pair`], half of it each, and a parameter's half all of its numbers: that
//! the roundings of m and v go the same way changes m/√v by half the product of their errors, which is below 2⁻¹⁶ of
//! it in bf16 and 2⁻¹⁰ in eight bits.

use super::Pair;

/// The random bits of a pair in one step.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Noise(u32);

impl Noise {
    /// Not random: a half, or next to it, for everything, which makes rounding one to nearest.
    pub(crate) const NEAREST: Self = Self(0x8000_8000);

    /// What a step contributes.
    pub(crate) fn seed(step: u64) -> u32 {
        // The finalizer of splitmix64.
        let x = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) as u32
    }

    /// `gradients` and `masters` hold some 16 bits of each parameter of the pair, the most random ones.
    #[inline(always)]
    pub(crate) fn new(seed: u32, gradients: u32, masters: u32) -> Self {
        Self((gradients ^ masters ^ seed).wrapping_mul(0x9e37_79b1))
    }

    /// 16 bits for each parameter.
    #[inline(always)]
    pub(crate) fn bits16(self) -> Pair<u32> {
        Pair(self.0 & 0xffff, self.0 >> 16)
    }

    /// 19 bits for each, the upper ones those of [`bits16`](Self::bits16).
    #[inline(always)]
    pub(crate) fn bits19(self) -> Pair<u32> {
        Pair(self.0 << 3 & 0x7_ffff, self.0 >> 13)
    }

    /// 8 bits for each, the upper ones of [`bits16`](Self::bits16).
    #[inline(always)]
    pub(crate) fn bits8(self) -> Pair<u32> {
        Pair(self.0 >> 8 & 0xff, self.0 >> 24)
    }
}
