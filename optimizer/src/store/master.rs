//! Masters that keep every bit.

use std::marker::PhantomData;

use super::noise::Noise;
use super::widen::Narrow;
use super::{Halves, LANES, Master, Order, Sequence, TILE, Words};
use crate::split::{join, remainder, round_bf16};

/// f32 weights: the weight is the master.
pub(super) struct WeightIsMaster;

impl Master for WeightIsMaster {
    type Weights = [f32; TILE];
    type Rests = [u8; 0];

    #[inline(always)]
    fn load<const Q: usize>(weights: &Self::Weights, _: &Self::Rests, lane: usize) -> f32 {
        weights[Sequence::place::<Q>(lane)]
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        weights: &mut Self::Weights,
        _: &mut Self::Rests,
        lane: usize,
        values: [f32; 2],
        _: [Noise; 2],
    ) {
        in_sequence::<_, PAIR>(weights, lane, values);
    }
}

/// An f32 master, and the weight rounded from it.
pub(super) struct FullMaster<W>(PhantomData<W>);

impl<W: Narrow> Master for FullMaster<W> {
    type Weights = [u16; TILE];
    type Rests = [f32; TILE];

    #[inline(always)]
    fn load<const Q: usize>(_: &Self::Weights, rests: &Self::Rests, lane: usize) -> f32 {
        rests[Sequence::place::<Q>(lane)]
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        weights: &mut Self::Weights,
        rests: &mut Self::Rests,
        lane: usize,
        values: [f32; 2],
        _: [Noise; 2],
    ) {
        in_sequence::<_, PAIR>(weights, lane, values.map(W::narrow));
        in_sequence::<_, PAIR>(rests, lane, values);
    }
}

/// The bf16 weight and its 16-bit remainder, in one [`Order`] or the other: the bytes are the same.
pub(super) struct Split16<O>(PhantomData<O>);

impl Master for Split16<Sequence> {
    type Weights = [u16; TILE];
    type Rests = [i16; TILE];

    #[inline(always)]
    fn load<const Q: usize>(weights: &Self::Weights, rests: &Self::Rests, lane: usize) -> f32 {
        let place = Sequence::place::<Q>(lane);
        join(weights[place], rests[place])
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        weights: &mut Self::Weights,
        rests: &mut Self::Rests,
        lane: usize,
        values: [f32; 2],
        _: [Noise; 2],
    ) {
        in_sequence::<_, PAIR>(weights, lane, values.map(round_bf16));
        in_sequence::<_, PAIR>(rests, lane, values.map(remainder));
    }
}

impl Master for Split16<Words> {
    type Weights = Halves;
    type Rests = Halves;

    #[inline(always)]
    fn load<const Q: usize>(weights: &Halves, rests: &Halves, lane: usize) -> f32 {
        let remainder = Words::high::<Q>(rests, lane) as i32 >> 16;
        f32::from_bits(Words::high::<Q>(weights, lane).wrapping_add(remainder as u32))
    }

    #[inline(always)]
    fn store<const PAIR: usize>(
        weights: &mut Halves,
        rests: &mut Halves,
        lane: usize,
        values: [f32; 2],
        _: [Noise; 2],
    ) {
        let bits = values.map(f32::to_bits);
        Words::put_high::<PAIR>(weights, lane, bits.map(|bits| bits.wrapping_add(0x8000)));
        Words::put_low::<PAIR>(rests, lane, bits);
    }
}

/// Puts the values of a pair where [`Sequence`] has them.
#[inline(always)]
pub(super) fn in_sequence<T, const PAIR: usize>(tile: &mut [T; TILE], lane: usize, [a, b]: [T; 2]) {
    tile[2 * PAIR * LANES + lane] = a;
    tile[(2 * PAIR + 1) * LANES + lane] = b;
}
