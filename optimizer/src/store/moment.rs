//! Moments that need no scale.

use super::master::in_sequence;
use super::noise::Noise;
use super::{Halves, Moment, Order, Pair, Sequence, TILE, Words};
use crate::split::canonical;

/// An f32 moment.
pub(crate) struct Full;

impl Moment for Full {
    type Stored = [f32; TILE];
    type Scale = ();

    #[inline(always)]
    fn scale(_: &[u8]) {}

    #[inline(always)]
    fn load<const Q: usize>(stored: &Self::Stored, (): (), lane: usize) -> f32 {
        stored[Sequence::place::<Q>(lane)]
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store<const PAIR: usize>(stored: &mut Self::Stored, (): (), lane: usize, values: Pair<f32>, _: Noise) {
        in_sequence::<_, PAIR>(stored, lane, values.map(canonical));
    }
}

/// A moment in bf16, rounded stochastically: away from zero with the probability that the discarded 16 bits say.
/// Exact values, infinities, zeros and the NaN stay what they are.
pub(crate) struct Bf16Moment;

impl Moment for Bf16Moment {
    type Stored = Halves;
    type Scale = ();

    #[inline(always)]
    fn scale(_: &[u8]) {}

    #[inline(always)]
    fn load<const Q: usize>(stored: &Halves, (): (), lane: usize) -> f32 {
        f32::from_bits(Words::high::<Q>(stored, lane))
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store<const PAIR: usize>(stored: &mut Halves, (): (), lane: usize, values: Pair<f32>, noise: Noise) {
        let rounded =
            values.zip(noise.bits16()).map(|(value, random)| canonical(value).to_bits().wrapping_add(random));
        Words::put_high::<PAIR>(stored, lane, rounded);
    }
}

/// A moment that the algorithm does not keep.
pub(crate) struct Absent;

impl Moment for Absent {
    type Stored = [u8; 0];
    type Scale = ();

    #[inline(always)]
    fn scale(_: &[u8]) {}

    #[inline(always)]
    fn load<const Q: usize>(_: &Self::Stored, (): (), _: usize) -> f32 {
        0.0
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store<const PAIR: usize>(_: &mut Self::Stored, (): (), _: usize, _: Pair<f32>, _: Noise) {}
}
