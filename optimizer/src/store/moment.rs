//! Moments that need no scale.

use super::master::in_sequence;
use super::noise::Noise;
use super::{Halves, Moment, Order, Sequence, TILE, Words};
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
    fn store<const PAIR: usize>(
        stored: &mut Self::Stored,
        (): (),
        lane: usize,
        values: [f32; 2],
        _: [Noise; 2],
    ) {
        in_sequence::<_, PAIR>(stored, lane, values.map(canonical));
    }
}

/// A moment in bf16, rounded stochastically: away from zero with the probability that the discarded 16 bits say.
/// Exact values, infinities, zeros and the NaN stay what they are. `SECOND` says which half of the noise it uses, so
/// that two moments of a parameter are rounded independently.
pub(crate) struct Bf16Moment<const SECOND: bool>;

impl<const SECOND: bool> Moment for Bf16Moment<SECOND> {
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
    fn store<const PAIR: usize>(
        stored: &mut Halves,
        (): (),
        lane: usize,
        values: [f32; 2],
        noise: [Noise; 2],
    ) {
        let random = noise.map(|noise| if SECOND { noise.high16() } else { noise.low16() });
        let bits = values.map(|value| canonical(value).to_bits());
        let rounded = std::array::from_fn(|q| bits[q].wrapping_add(random[q]));
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
    fn store<const PAIR: usize>(_: &mut Self::Stored, (): (), _: usize, _: [f32; 2], _: [Noise; 2]) {}
}
