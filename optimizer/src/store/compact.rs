//! The state format of five bytes per parameter: see [`StateFormat::Compact`](crate::StateFormat::Compact).
//!
//! ```text
//!  weight       bf16      nearest, ties away from zero, of the master
//!  remainder    i8        master = (bits of weight << 16) + (remainder << 8): the upper 24 bits of an f32
//!
//!  a block of 64 moments, 66 bytes
//!  m:  [ s eee mmmm ] × 64  [ scale bf16 ]     s: sign     value = scale · 2^(e−7)·(1 + m/16),   e = 0: 2^−6·m/16
//!  v:  [ eeee  mmmm ] × 64  [ scale bf16 ]                 value = scale · 2^(e−15)·(1 + m/16),  e = 0: 2^−14·m/16
//! ```
//!
//! # Masters
//!
//! 16 significant bits: neighbours are 2⁻¹⁵ to 2⁻¹⁶ of the value apart. A step of size lr is smaller than that
//! for weights above 2¹⁵·lr, so masters are rounded stochastically, without bias, and no step that f32 can
//! add is too small to count. The error of one rounding is below 2⁻¹⁵ of the master.
//!
//! # Moments
//!
//! The codes are logarithmic in pieces: sixteen steps in every power of two, equal steps in the lowest. With `S`
//! the scale, one rounding is wrong by less than
//!
//! ```text
//!  m:  max(|m|·2⁻⁴, S·2⁻¹⁰)        v:  max(v·2⁻⁴, S·2⁻¹⁸)
//! ```
//!
//! and, because a code is linear between neighbours, adding random bits below the last one kept and truncating is
//! unbiased, which rounding on a curve (a square root, a power) is not. v then fluctuates about its mean by up to
//! a fifth of it (a twentieth in [`StateFormat::Bf16`](crate::StateFormat::Bf16)), and √v by half as much.
//!
//! The scale is a power of two, the largest not above 32/31 of the largest magnitude. Then a value's neighbours
//! do not depend on the scale: a value that does not change is stored as it was, although its block's maximum
//! moves every step. With the maximum itself as the scale, every step would round every value anew, and that
//! noise, summed over the 1/(1 − β₂) steps that v remembers, would come to about half of v.
//!
//! v is never stored as zero but at least as the smallest code: m / (√0 + ε) would be a leap. The smallest √v is
//! 2⁻⁹·√S, next to 2⁻¹⁰·S for m, so that the noise of tiny entries moves a weight by about lr, not more.
//!
//! # What is not finite
//!
//! There are no codes for it. A NaN moment is stored as zero; it comes from a gradient or weight that was NaN or
//! infinite, and the NaN is in the weight, where the next loss shows it. Magnitudes of 1.6·10³⁸ and above,
//! infinity among them, are stored as that; an overflow of v stops its block where it would stop a parameter in
//! other formats. The smallest scale is 2⁻¹⁰³, that of a block of zeros; one that has never been stored has the scale 0,
//! which is read as that.
//!
//! # The order of bytes
//!
//! The four parameters of a lane ([`Words`]) are the four bytes of a 32-bit word: byte `4l + q` of a block, of a remainder
//! or a moment, belongs to parameter `32·⌊q/2⌋ + 2l + q mod 2`.

use super::noise::Noise;
use super::{Halves, LANES, Master, Moment, Order, Pair, Words};

/// 8-bit elements of a tile: those of lane `l` are the bytes of word `l`.
type Codes = [[u8; 4]; LANES];

/// The bf16 weight and its 8-bit remainder.
pub(super) struct Compact8;

impl Master for Compact8 {
    type Weights = Halves;
    type Rests = Codes;

    #[inline(always)]
    fn load<const Q: usize>(weights: &Halves, rests: &Codes, lane: usize) -> f32 {
        let remainder = top::<Q>(rests, lane) as i32 >> 16 & !0xff;
        f32::from_bits(Words::high::<Q>(weights, lane).wrapping_add(remainder as u32))
    }

    #[inline(always)]
    fn random_bits<const PAIR: usize>(weights: &Halves, rests: &Codes, lane: usize) -> u32 {
        Words::word::<PAIR>(weights, lane).wrapping_add(u32::from_le_bytes(rests[lane]) << (8 * PAIR))
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        weights: &mut Halves,
        rests: &mut Codes,
        lane: usize,
        values: Pair<f32>,
        noise: Noise,
    ) {
        put::<8, PAIR>(rests, lane, put_weights::<PAIR>(weights, lane, values, noise));
    }

    #[inline(always)]
    fn store_both(
        weights: &mut Halves,
        rests: &mut Codes,
        lane: usize,
        [low, high]: [Pair<f32>; 2],
        noise: [Noise; 2],
    ) {
        let low = put_weights::<0>(weights, lane, low, noise[0]);
        put_both::<8>(rests, lane, [low, put_weights::<1>(weights, lane, high, noise[1])]);
    }
}

/// Stores the weights of a pair. The bits of its masters, rounded to a multiple of 256 by who does not look at the last byte.
#[inline(always)]
fn put_weights<const PAIR: usize>(
    weights: &mut Halves,
    lane: usize,
    values: Pair<f32>,
    noise: Noise,
) -> Pair<u32> {
    let bits = values.zip(noise.bits8()).map(|(value, random)| value.to_bits().wrapping_add(random));
    Words::put_high::<PAIR>(weights, lane, bits.map(|bits| bits.wrapping_add(0x8000)));
    bits
}

/// What the codes of a tile are multiplied with: a power of two, by its exponent in the encoding of f32.
#[derive(Clone, Copy)]
pub(super) struct Scale(u32);

impl Scale {
    /// With less, what is made of the smallest codes would be subnormal, which processors take ten times as long for: v begins at 2⁻¹⁸ of
    /// the scale, and a gradient of zero (an embedding that no text has) multiplies that by β₂ in every step. Five powers of two are left.
    const SMALLEST: u32 = 24;

    #[inline(always)]
    fn load(bytes: &[u8]) -> Self {
        let exponent = u32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) >> 7;
        Self(exponent.max(Self::SMALLEST))
    }

    /// Stores and returns the scale for values up to the magnitude `largest`.
    #[inline(always)]
    fn store(bytes: &mut [u8], largest: u32) -> Self {
        // From 31/16 of a power of two on, the next one: rounding up must not leave the codes.
        let exponent = ((largest + (1 << 19)) >> 23).max(Self::SMALLEST);
        bytes.copy_from_slice(&((exponent << 7) as u16).to_ne_bytes());
        Self(exponent)
    }

    /// The bits of 2^−`top` times the scale.
    #[inline(always)]
    fn base(self, top: u32) -> u32 {
        (self.0 - top) << 23
    }

    /// 2^(1−`top`) times the scale: the smallest value with an exponent of its own.
    #[inline(always)]
    fn knee(self, top: u32) -> f32 {
        f32::from_bits((self.0 + 1 - top) << 23)
    }

    /// The value of a code, given in bits 19 and up; `top` is the largest exponent of a code.
    ///
    /// Read as the exponent and mantissa of a float, it is the value from the knee on. Below the knee k the float f goes
    /// from k/2 to k where the value goes from 0 to k, and 2f − k is smaller than f there and larger elsewhere.
    #[inline(always)]
    fn decode(self, code: u32, top: u32) -> f32 {
        let float = f32::from_bits(code + self.base(top));
        let small = float + float - self.knee(top);
        if small < float { small } else { float }
    }

    /// The code of a magnitude in bits 19 and up, rounded up with the probability that what is discarded says, and
    /// below that what was discarded.
    #[inline(always)]
    fn encode(self, magnitude: f32, random: u32, top: u32) -> u32 {
        let small = (magnitude + self.knee(top)) * 0.5;
        let float = if small > magnitude { small } else { magnitude };
        float.to_bits() - self.base(top) + random
    }
}

/// A moment in codes: `SIGNED` with a sign, 3 bits of exponent and 4 of mantissa, otherwise with 4 and 4.
pub(super) struct Scaled<const SIGNED: bool>;

impl<const SIGNED: bool> Scaled<SIGNED> {
    /// The largest exponent.
    const TOP: u32 = if SIGNED { 7 } else { 15 };
    /// The bits of exponent and mantissa, from bit 19.
    const MAGNITUDE: u32 = (if SIGNED { 0x7f } else { 0xff }) << 19;

    /// The codes of a pair of values, from bit 19.
    #[inline(always)]
    fn codes(scale: Scale, values: Pair<f32>, noise: Noise) -> Pair<u32> {
        values.zip(noise.bits19()).map(|(value, random)| {
            let magnitude = if SIGNED { value.abs() } else { value };
            let code = scale.encode(magnitude, random, Self::TOP);
            if SIGNED { code | value.to_bits() >> 5 & 1 << 26 } else { code.max(1 << 19) }
        })
    }
}

impl<const SIGNED: bool> Moment for Scaled<SIGNED> {
    type Stored = Codes;
    type Scale = Scale;
    const SCALE_BYTES: usize = 2;
    const LARGEST: u32 = LARGEST;

    #[inline(always)]
    fn scale(bytes: &[u8]) -> Scale {
        Scale::load(bytes)
    }

    #[inline(always)]
    fn load<const Q: usize>(stored: &Codes, scale: Scale, lane: usize) -> f32 {
        let code = top::<Q>(stored, lane);
        let magnitude = scale.decode(code >> 5 & Self::MAGNITUDE, Self::TOP);
        if SIGNED { f32::from_bits(magnitude.to_bits() | code & SIGN) } else { magnitude }
    }

    fn tamed(value: f32) -> f32 {
        // A zero from a NaN is positive: nothing promises the sign of a NaN.
        if value.is_nan() { 0.0 } else { value.abs().min(f32::from_bits(LARGEST)).copysign(value) }
    }

    #[inline(always)]
    fn rescale(bytes: &mut [u8], largest: u32) -> Scale {
        Scale::store(bytes, largest)
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        stored: &mut Codes,
        scale: Scale,
        lane: usize,
        values: Pair<f32>,
        noise: Noise,
    ) {
        put::<19, PAIR>(stored, lane, Self::codes(scale, values, noise));
    }

    #[inline(always)]
    fn store_both(
        stored: &mut Codes,
        scale: Scale,
        lane: usize,
        [low, high]: [Pair<f32>; 2],
        noise: [Noise; 2],
    ) {
        put_both::<19>(stored, lane, [Self::codes(scale, low, noise[0]), Self::codes(scale, high, noise[1])]);
    }
}

const SIGN: u32 = 1 << 31;

/// The bits of the largest magnitude there is a code for: above it, rounding up could leave the codes.
const LARGEST: u32 = 253 << 23 | 0x77_ffff;

/// The 8 bits of parameter `Q` of a lane as the top ones of a word; those of parameters before it follow.
#[inline(always)]
fn top<const Q: usize>(codes: &Codes, lane: usize) -> u32 {
    u32::from_le_bytes(codes[lane]) << (24 - 8 * Q)
}

/// Stores bits `AT` to `AT + 8` of each of a pair of values, beside those of the other pair.
#[inline(always)]
fn put<const AT: u32, const PAIR: usize>(codes: &mut Codes, lane: usize, Pair(a, b): Pair<u32>) {
    let pair = (a >> AT & 0xff) | (b >> AT & 0xff) << 8;
    let old = u32::from_le_bytes(codes[lane]);
    let word = if PAIR == 0 { old & 0xffff_0000 | pair } else { old & 0xffff | pair << 16 };
    codes[lane] = word.to_le_bytes();
}

/// Stores bits `AT` to `AT + 8` of both pairs of values.
#[inline(always)]
fn put_both<const AT: u32>(codes: &mut Codes, lane: usize, [Pair(a, b), Pair(c, d)]: [Pair<u32>; 2]) {
    let byte = |value: u32, place: u32| {
        let mask = 0xff << place;
        if place < AT { value >> (AT - place) & mask } else { value << (place - AT) & mask }
    };
    codes[lane] = (byte(a, 0) | byte(b, 8) | byte(c, 16) | byte(d, 24)).to_le_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a gradient of zero makes of them in a step, too, with any β₂ that is in use.
    #[test]
    fn nothing_that_is_stored_is_subnormal() {
        let smallest = Scale::load(&[0, 0]);
        let (m, v) = (smallest.decode(1 << 19, 7), smallest.decode(1 << 19, 15));
        assert!(m * 0.5 >= f32::MIN_POSITIVE && v * 0.1 >= f32::MIN_POSITIVE, "{m:e} {v:e}");
        let mut bytes = [0; 2];
        let stored = Scale::store(&mut bytes, v.to_bits());
        assert_eq!(
            (stored.0, Scale::load(&bytes).0),
            (smallest.0, smallest.0),
            "a block of them has the same scale"
        );
    }
}
