//! Random bits for stochastic rounding, and the rounding to bf16 that uses them.
//!
//! Rounding up with the probability that the discarded bits say is unbiased: its mean is the value itself.
//! Rounding to nearest is not, and state needs it not to be: a running mean with decay β moves by `(1 − β)·(x −
//! mean)` a step, which for β₂ = 0.999 is a small fraction of the spacing of bf16 (2⁻⁷ to 2⁻⁸ of the value), so a
//! mean rounded to nearest would stay where it is for ever. For m with β₁ = 0.9 nearest would stop within 5 half
//! spacings of the true mean, and for larger β₁ sooner; stochastic rounding costs one spacing of noise that
//! averages out, so both moments use it.
//!
//! The bits are a hash of the parameter's own gradient, old state and the step, so that an update stays a pure
//! function of one parameter: no generator to carry along, no index, and the same result for any cut and any
//! number of threads. Two parameters whose gradients and states are all equal are rounded alike.

/// 32 random bits of one parameter in one step.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Noise(u32);

impl Noise {
    /// Not random: a half, or next to it, for everything, which makes rounding one to nearest.
    pub(crate) const NEAREST: Self = Self(0x8080_8000);

    /// What a step contributes.
    pub(crate) fn seed(step: u64) -> u32 {
        // The finalizer of splitmix64.
        let x = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) as u32
    }

    /// The rounds of `lowbias32` (Wellons) with an input before each.
    #[inline(always)]
    pub(crate) fn new(seed: u32, gradient: f32, master: f32, m: f32, v: f32) -> Self {
        let x = (gradient.to_bits() ^ seed).wrapping_mul(0x9e37_79b1);
        let x = ((x ^ x >> 16) ^ master.to_bits()).wrapping_mul(0x7feb_352d);
        let x =
            (x ^ x >> 15).wrapping_add(m.to_bits().rotate_left(16) ^ v.to_bits()).wrapping_mul(0x846c_a68b);
        Self(x ^ x >> 16)
    }

    /// 16 bits for the first moment.
    #[inline(always)]
    pub(crate) fn first(self) -> u32 {
        self.0 & 0xffff
    }

    /// 16 bits for the second moment.
    #[inline(always)]
    pub(crate) fn second(self) -> u32 {
        self.0 >> 16
    }

    /// 8 bits for the master: the low ones of the second moment's, where they hardly count.
    #[inline(always)]
    pub(crate) fn master(self) -> u32 {
        self.0 >> 16 & 0xff
    }
}

/// The bf16 bits of a canonical value, rounded away from zero with the probability that the discarded 16 bits say.
///
/// Exact values, infinities, zeros and the NaN stay what they are.
#[inline(always)]
pub(crate) fn stochastic_bf16(x: f32, random: u32) -> u16 {
    (x.to_bits().wrapping_add(random) >> 16) as u16
}
