//! The state format of five bytes per parameter: see [`StateFormat::Compact`](crate::StateFormat::Compact).
//!
//! ```text
//!  weight       bf16      nearest, ties away from zero, of the master
//!  remainder    i8        master = (bits of weight << 16) + (remainder << 8): the upper 24 bits of an f32
//!
//!  a block of 32 moments, 34 bytes
//!  m:  [ s eee mmmm ] × 32  [ scale bf16 ]     s: sign     value = scale · 2^(e−7)·(1 + m/16),   e = 0: 2^−6·m/16
//!  v:  [ eeee  mmmm ] × 32  [ scale bf16 ]                 value = scale · 2^(e−15)·(1 + m/16),  e = 0: 2^−14·m/16
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
//! A positive v is never stored as zero but as the smallest code: m / (√0 + ε) would be a leap. The smallest √v is
//! 2⁻⁹·√S, next to 2⁻¹⁰·S for m, so that the noise of tiny entries moves a weight by about lr, not more.
//!
//! # What is not finite
//!
//! There are no codes for it. A NaN moment is stored as zero; it comes from a gradient or weight that was NaN or
//! infinite, and the NaN is in the weight, where the next loss shows it. Magnitudes of 1.6·10³⁸ and above,
//! infinity among them, are stored as that; an overflow of v stops its block where it would stop a parameter in
//! other formats. A block of zeros has the smallest scale, 2⁻¹²⁶, or, when it has never been stored, the scale 0;
//! f32 subnormals below the smallest code's reach are rounded as everything else.

use crate::noise::Noise;
use crate::split::round_bf16;
use crate::store::{Master, Moment, TILE};

/// The bf16 weight and its 8-bit remainder.
pub(crate) struct Compact8;

impl Master for Compact8 {
    type Weights = [u16; TILE];
    type Rests = [i8; TILE];

    #[inline(always)]
    fn load(weights: &Self::Weights, rests: &Self::Rests, i: usize) -> f32 {
        f32::from_bits((u32::from(weights[i]) << 16).wrapping_add((i32::from(rests[i]) << 8) as u32))
    }

    #[inline(always)]
    fn store(weights: &mut Self::Weights, rests: &mut Self::Rests, i: usize, value: f32, noise: Noise) {
        let bits = value.to_bits().wrapping_add(noise.master()) & !0xff;
        weights[i] = round_bf16(f32::from_bits(bits));
        rests[i] = (bits >> 8) as i8;
    }
}

/// The codes of a block.
type Codes = [u8; TILE];

/// A first moment: sign, 3 bits of exponent, 4 of mantissa.
pub(crate) struct Scaled1;

impl Moment for Scaled1 {
    type Stored = Codes;
    /// When loading the scale, when storing its inverse.
    type Scale = f32;
    const SCALE_BYTES: usize = 2;

    #[inline(always)]
    fn scale(bytes: &[u8]) -> f32 {
        scale(bytes)
    }

    #[inline(always)]
    fn load(stored: &Codes, scale: f32, i: usize) -> f32 {
        let code = u32::from(stored[i]);
        let magnitude = decode::<7>(code & 0x7f) * scale;
        f32::from_bits(magnitude.to_bits() | (code & 0x80) << 24)
    }

    #[inline(always)]
    fn storable(value: f32) -> f32 {
        // A zero from a NaN is positive: nothing promises the sign of a NaN.
        let magnitude = magnitude(value);
        f32::from_bits(if magnitude == 0 { 0 } else { magnitude | value.to_bits() & SIGN })
    }

    #[inline(always)]
    fn rescale(bytes: &mut [u8], extent: u32) -> f32 {
        rescale(bytes, extent)
    }

    #[inline(always)]
    fn store(stored: &mut Codes, inverse: f32, i: usize, value: f32, noise: Noise) {
        let bits = value.to_bits();
        let code = encode::<7>(bits & !SIGN, inverse, noise.first());
        stored[i] = (code | bits >> 24 & 0x80) as u8;
    }
}

/// A second moment: 4 bits of exponent, 4 of mantissa.
pub(crate) struct Scaled2;

impl Moment for Scaled2 {
    type Stored = Codes;
    /// When loading the scale, when storing its inverse.
    type Scale = f32;
    const SCALE_BYTES: usize = 2;

    #[inline(always)]
    fn scale(bytes: &[u8]) -> f32 {
        scale(bytes)
    }

    #[inline(always)]
    fn load(stored: &Codes, scale: f32, i: usize) -> f32 {
        decode::<15>(u32::from(stored[i])) * scale
    }

    #[inline(always)]
    fn storable(value: f32) -> f32 {
        f32::from_bits(magnitude(value))
    }

    #[inline(always)]
    fn rescale(bytes: &mut [u8], extent: u32) -> f32 {
        rescale(bytes, extent)
    }

    #[inline(always)]
    fn store(stored: &mut Codes, inverse: f32, i: usize, value: f32, noise: Noise) {
        let code = encode::<15>(value.to_bits(), inverse, noise.second());
        stored[i] = code.max(u32::from(value.to_bits() != 0)) as u8;
    }
}

const SIGN: u32 = 1 << 31;

/// The bits of the largest magnitude there is a code for: above it, rounding up could leave the codes.
const LARGEST: u32 = 253 << 23 | 0x77_ffff;

/// The bits of |x|; zero for NaN, at most [`LARGEST`].
#[inline(always)]
fn magnitude(x: f32) -> u32 {
    let bits = x.to_bits() & 0x7fff_ffff;
    if bits > 0x7f80_0000 { 0 } else { bits.min(LARGEST) }
}

#[inline(always)]
fn scale(bytes: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) << 16)
}

/// Stores the scale for values up to the magnitude `largest`; returns its inverse, which is exact.
#[inline(always)]
fn rescale(bytes: &mut [u8], largest: u32) -> f32 {
    // From 31/16 of a power of two on, the next one: rounding up must not leave the codes.
    let exponent = ((largest + (1 << 19)) >> 23).max(1);
    bytes.copy_from_slice(&((exponent << 7) as u16).to_ne_bytes());
    f32::from_bits((254 - exponent) << 23)
}

/// The value of a code with scale 1; `TOP` is the largest exponent.
#[inline(always)]
fn decode<const TOP: u32>(code: u32) -> f32 {
    let normal = f32::from_bits((code << 19) + ((127 - TOP) << 23));
    let step = f32::from_bits((127 - (TOP + 3)) << 23);
    let small = code as i32 as f32 * step;
    if code < 16 { small } else { normal }
}

/// The code of a magnitude, rounded up with the probability that what is discarded says. `random` is 16 bits.
#[inline(always)]
fn encode<const TOP: u32>(magnitude: u32, inverse: f32, random: u32) -> u32 {
    /// Adding it rounds a small float to an integer and leaves that in the low bits.
    const TO_INTEGER: f32 = (3 << 22) as f32;
    let x = f32::from_bits(magnitude) * inverse;
    let random = random << 3 | 4;
    let normal = (x.to_bits().wrapping_add(random) >> 19).wrapping_sub((127 - TOP) << 4);
    let steps = f32::from_bits((127 + (TOP + 3)) << 23);
    let shifted = x * steps + (random as i32 - (1 << 18)) as f32 * (1.0 / (1 << 19) as f32);
    let small = (shifted + TO_INTEGER).to_bits() & 0xff;
    if x < f32::from_bits((128 - TOP) << 23) { small } else { normal }
}
