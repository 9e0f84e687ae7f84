//! Master weights and moments as f32, whichever way they are stored, and the one loop that updates them.
//!
//! An algorithm is a [`Rule`] over four floats. [`update`] applies it to a run of parameters in tiles of
//! [`TILE`] (`pass`). A [`Master`] or [`Moment`] is one way of storing. Those that keep fewer bits than f32
//! round with [`Noise`].
//!
//! # Lanes
//!
//! The loops are plain Rust that LLVM vectorizes. What it vectorizes well are the same operations on 32-bit
//! elements side by side, and what it does badly is to change widths in between. So a tile is worked on as
//! [`LANES`] lanes of four parameters, and a format says which four share a lane ([`Order`]): in the order of
//! addresses when the moments are f32; in [`Words`] when they are narrower, where a lane is a 32-bit word of two
//! 16-bit elements and shifts and masks are all it takes to get at them.

mod compact;
mod master;
mod moment;
mod noise;
mod pass;
mod widen;

pub(crate) use moment::Absent;
pub(crate) use noise::Noise;
pub(crate) use widen::Widen;

use half::{bf16, f16};

use crate::isa::Isa;
use crate::layout::{COMPACT_BLOCK, StateFormat, StateLayout, WeightType};
use crate::update::Gradient;
use compact::{Compact8, Scaled};
use master::{FullMaster, Split16, WeightIsMaster};
use moment::{Bf16Moment, Full};
use pass::Pass;

/// Parameters that one pass of the loop works on: a block of [`StateFormat::Compact`], the only format in which the
/// bits of one parameter depend on its neighbours.
pub(crate) const TILE: usize = COMPACT_BLOCK;

/// Lanes of a tile, each with four parameters: two vectors of AVX2, one of AVX-512.
pub(crate) const LANES: usize = TILE / 4;

/// An optimizer's arithmetic on one parameter.
pub(crate) trait Rule: Copy + Send + Sync {
    /// How the first moment is stored when the format stores it as `S`: `S`, or [`Absent`].
    type First<S: Moment>: Moment;
    /// How the second moment is stored when the format stores it as `S`: `S`, or [`Absent`].
    type Second<S: Moment>: Moment;

    /// The new second moment, and what it divides the step by: without one, nothing.
    #[inline(always)]
    fn second(&self, _gradient: f32, _master: f32, v: f32) -> (f32, f32) {
        (v, 1.0)
    }

    /// The new master and first moment. An absent moment is given as zero, and what is returned for it is dropped.
    fn first(&self, gradient: f32, master: f32, m: f32, divisor: f32) -> (f32, f32);
}

/// Which parameters of a tile are the four of a lane.
pub(crate) trait Order {
    /// The place in the tile of parameter `Q` of lane `lane`.
    fn place<const Q: usize>(lane: usize) -> usize;

    /// The 16 bits there as the upper half of a word.
    fn high<const Q: usize>(elements: &Halves, lane: usize) -> u32;
}

/// Parameters 0 and 1 of a lane, or 2 and 3.
// Not an array: compilers may pass one of eight bytes as a 64-bit integer, and the vectorizer then takes it apart.
#[derive(Clone, Copy)]
pub(crate) struct Pair<T>(T, T);

impl<T> Pair<T> {
    #[inline(always)]
    fn map<U>(self, mut f: impl FnMut(T) -> U) -> Pair<U> {
        Pair(f(self.0), f(self.1))
    }

    #[inline(always)]
    fn zip<U>(self, other: Pair<U>) -> Pair<(T, U)> {
        Pair((self.0, other.0), (self.1, other.1))
    }
}

/// 16-bit elements of a tile, at any address.
pub(crate) type Halves = [[u8; 2]; TILE];

/// In the order of addresses: lane `l` has the parameters `l`, `LANES + l`, …
pub(crate) struct Sequence;

impl Order for Sequence {
    #[inline(always)]
    fn place<const Q: usize>(lane: usize) -> usize {
        Q * LANES + lane
    }

    #[inline(always)]
    fn high<const Q: usize>(elements: &Halves, lane: usize) -> u32 {
        u32::from(u16::from_ne_bytes(elements[Self::place::<Q>(lane)])) << 16
    }
}

/// By words of 16-bit elements: lane `l` has the two parameters of word `l` and the two of word `LANES + l`.
pub(crate) struct Words;

impl Words {
    /// Puts the upper halves of a pair of values where [`Order::high`] finds them.
    #[inline(always)]
    fn put_high<const PAIR: usize>(elements: &mut Halves, lane: usize, Pair(even, odd): Pair<u32>) {
        Self::put::<PAIR>(elements, lane, even >> 16 | odd & 0xffff_0000);
    }

    /// Puts the lower halves of a pair of values there.
    #[inline(always)]
    fn put_low<const PAIR: usize>(elements: &mut Halves, lane: usize, Pair(even, odd): Pair<u32>) {
        Self::put::<PAIR>(elements, lane, even & 0xffff | odd << 16);
    }

    #[inline(always)]
    fn put<const PAIR: usize>(elements: &mut Halves, lane: usize, word: u32) {
        let words: &mut [[u8; 4]; TILE / 2] = bytemuck::cast_mut(elements);
        words[PAIR * LANES + lane] = word.to_le_bytes();
    }

    /// The word of a pair.
    #[inline(always)]
    fn word<const PAIR: usize>(elements: &Halves, lane: usize) -> u32 {
        let words: &[[u8; 4]; TILE / 2] = bytemuck::cast_ref(elements);
        u32::from_le_bytes(words[PAIR * LANES + lane])
    }
}

impl Order for Words {
    #[inline(always)]
    fn place<const Q: usize>(lane: usize) -> usize {
        2 * (Q / 2 * LANES + lane) + Q % 2
    }

    #[inline(always)]
    fn high<const Q: usize>(elements: &Halves, lane: usize) -> u32 {
        let words: &[[u8; 4]; TILE / 2] = bytemuck::cast_ref(elements);
        let word = u32::from_le_bytes(words[Q / 2 * LANES + lane]);
        if Q.is_multiple_of(2) { word << 16 } else { word & 0xffff_0000 }
    }
}

const _: () = assert!(cfg!(target_endian = "little"), "words and halves are the same bytes");

/// How a master weight is stored: as the weight that compute uses, and what is missing from it.
pub(crate) trait Master {
    /// The weights of a tile.
    type Weights: bytemuck::Pod;
    /// The rest of a tile; zero bytes when nothing is missing.
    type Rests: bytemuck::Pod;

    fn load<const Q: usize>(weights: &Self::Weights, rests: &Self::Rests, lane: usize) -> f32;

    /// Sixteen bits of each master of a pair for [`Noise`]; none where nothing is rounded at random.
    #[inline(always)]
    fn random_bits<const PAIR: usize>(_weights: &Self::Weights, _rests: &Self::Rests, _lane: usize) -> u32 {
        0
    }

    /// Stores the [canonical](crate::split::canonical) values of a pair of a lane: parameters 0 and 1, then 2 and 3.
    fn store<const PAIR: usize>(
        weights: &mut Self::Weights,
        rests: &mut Self::Rests,
        lane: usize,
        values: Pair<f32>,
        noise: Noise,
    );

    /// Stores both pairs of a lane.
    #[inline(always)]
    fn store_both(
        weights: &mut Self::Weights,
        rests: &mut Self::Rests,
        lane: usize,
        [low, high]: [Pair<f32>; 2],
        noise: [Noise; 2],
    ) {
        Self::store::<0>(weights, rests, lane, low, noise[0]);
        Self::store::<1>(weights, rests, lane, high, noise[1]);
    }
}

/// How a moment is stored.
pub(crate) trait Moment {
    /// The codes of a tile.
    type Stored: bytemuck::Pod;
    /// What the values of a tile share.
    type Scale: Copy;
    /// Bytes of the stored scale, which follows the codes.
    const SCALE_BYTES: usize = 0;

    /// The scale of a tile from its bytes.
    fn scale(bytes: &[u8]) -> Self::Scale;

    fn load<const Q: usize>(stored: &Self::Stored, scale: Self::Scale, lane: usize) -> f32;

    /// `value` without what there are no codes for, when a magnitude of the tile is above [`LARGEST`](Self::LARGEST).
    #[inline(always)]
    fn tamed(value: f32) -> f32 {
        value
    }

    /// The bits of the largest magnitude that a tile with a scale can store.
    const LARGEST: u32 = u32::MAX;

    /// The scale with which to store values of which this is the largest magnitude, in bits; and its bytes.
    fn rescale(bytes: &mut [u8], extent: u32) -> Self::Scale;

    /// Stores the values of a pair of a lane: parameters 0 and 1, then 2 and 3.
    fn store<const PAIR: usize>(
        stored: &mut Self::Stored,
        scale: Self::Scale,
        lane: usize,
        values: Pair<f32>,
        noise: Noise,
    );

    /// Stores both pairs of a lane.
    #[inline(always)]
    fn store_both(
        stored: &mut Self::Stored,
        scale: Self::Scale,
        lane: usize,
        [low, high]: [Pair<f32>; 2],
        noise: [Noise; 2],
    ) {
        Self::store::<0>(stored, scale, lane, low, noise[0]);
        Self::store::<1>(stored, scale, lane, high, noise[1]);
    }
}

/// Applies `rule` to a run of parameters, with the noise of `seed`. `state` has passed `layout`'s check.
pub(crate) fn update<R: Rule>(
    isa: Isa,
    layout: &StateLayout,
    rule: R,
    seed: u32,
    gradient: Gradient<'_>,
    state: &mut [&mut [u8]],
) {
    match gradient {
        Gradient::Bf16(values) => update_from::<R, bf16>(isa, layout, rule, seed, values, state),
        Gradient::F16(values) => update_from::<R, f16>(isa, layout, rule, seed, values, state),
        Gradient::F32(values) => update_from::<R, f32>(isa, layout, rule, seed, values, state),
    }
}

/// Stores `weights` as masters, and `moment` as every moment. `state` has passed `layout`'s check.
pub(crate) fn initialize(layout: &StateLayout, weights: &[f32], moment: f32, state: &mut [&mut [u8]]) {
    let slices = Slices::new(layout, state);
    for bytes in [slices.m, slices.v] {
        match layout.format() {
            StateFormat::Fp32 | StateFormat::Split => pass::fill::<Full>(bytes, moment),
            StateFormat::Bf16 => pass::fill::<Bf16Moment>(bytes, moment),
            // No moment begins below zero, so codes without a sign serve both.
            StateFormat::Compact => pass::fill::<Scaled<false>>(bytes, moment),
        }
    }
    let (high, low) = (slices.weights, slices.rests);
    match (layout.format(), layout.weight()) {
        (StateFormat::Fp32, WeightType::F32) => pass::masters::<Sequence, WeightIsMaster>(weights, high, low),
        (StateFormat::Fp32, WeightType::Bf16) => {
            pass::masters::<Sequence, FullMaster<bf16>>(weights, high, low);
        }
        (StateFormat::Fp32, WeightType::F16) => {
            pass::masters::<Sequence, FullMaster<f16>>(weights, high, low);
        }
        (StateFormat::Split | StateFormat::Bf16, _) => {
            pass::masters::<Words, Split16<Words>>(weights, high, low);
        }
        (StateFormat::Compact, _) => pass::masters::<Words, Compact8>(weights, high, low),
    }
}

fn update_from<R: Rule, G: Widen>(
    isa: Isa,
    layout: &StateLayout,
    rule: R,
    seed: u32,
    gradient: &[G],
    state: &mut [&mut [u8]],
) {
    let slices = Slices::new(layout, state);
    /// The pass for one order and one way of storing masters and each moment.
    macro_rules! pass {
        ($order:ty, $master:ty, $first:ty, $second:ty) => {
            isa.run(Pass::<R, G, $order, $master, R::First<$first>, R::Second<$second>> {
                rule,
                seed,
                gradient,
                slices,
                stored: std::marker::PhantomData,
            })
        };
    }
    match (layout.format(), layout.weight()) {
        (StateFormat::Fp32, WeightType::F32) => pass!(Sequence, WeightIsMaster, Full, Full),
        (StateFormat::Fp32, WeightType::Bf16) => pass!(Sequence, FullMaster<bf16>, Full, Full),
        (StateFormat::Fp32, WeightType::F16) => pass!(Sequence, FullMaster<f16>, Full, Full),
        (StateFormat::Split, _) => pass!(Sequence, Split16<Sequence>, Full, Full),
        (StateFormat::Bf16, _) => pass!(Words, Split16<Words>, Bf16Moment, Bf16Moment),
        (StateFormat::Compact, _) => pass!(Words, Compact8, Scaled<true>, Scaled<false>),
    }
}

/// The state of a run of parameters; what the layout does not have is empty.
struct Slices<'a> {
    weights: &'a mut [u8],
    rests: &'a mut [u8],
    m: &'a mut [u8],
    v: &'a mut [u8],
}

impl<'a> Slices<'a> {
    fn new(layout: &StateLayout, state: &'a mut [&mut [u8]]) -> Self {
        use crate::layout::StateKind::{Master, MasterLow, MasterLow8, Moment1, Moment2, Weight};
        let mut slices = Self {
            weights: Default::default(),
            rests: Default::default(),
            m: Default::default(),
            v: Default::default(),
        };
        for (kind, slice) in layout.kinds().iter().zip(state) {
            match kind.kind {
                Weight => slices.weights = slice,
                Master | MasterLow | MasterLow8 => slices.rests = slice,
                Moment1 => slices.m = slice,
                Moment2 => slices.v = slice,
            }
        }
        slices
    }
}
