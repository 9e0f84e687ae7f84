//! Master weights and moments as f32, whichever way they are stored, and the one loop that updates them.
//!
//! An algorithm is a [`Rule`] over four floats. [`update`] applies it to a run of parameters in tiles of
//! [`TILE`]: load a tile, compute, store it. Tiles are arrays of fixed size that are read whole before anything
//! is written, so that LLVM vectorizes without asking whether slices overlap; the last tile of a run is padded
//! with zeros. The tile is the block of [`StateFormat::Compact`], the only format in which the bits of one
//! parameter depend on its neighbours.
//!
//! A [`Master`] or [`Moment`] is one way of storing. Those that keep fewer bits than f32 round with [`Noise`].

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut, from_bytes};
use half::{bf16, f16};

use crate::compact::{Compact8, Scaled1, Scaled2};
use crate::isa::Isa;
use crate::layout::{COMPACT_BLOCK, StateFormat, StateLayout, WeightType};
use crate::noise::{Noise, stochastic_bf16};
use crate::split::{canonical, join, remainder, round_bf16};
use crate::update::Gradient;
use crate::widen::{Narrow, Widen};

/// Parameters that one pass of the loop works on.
pub(crate) const TILE: usize = COMPACT_BLOCK;

/// An optimizer's arithmetic on one parameter.
pub(crate) trait Rule: Copy + Send + Sync {
    /// How the first moment is stored when the format stores it as `S`: `S`, or [`Absent`].
    type First<S: Moment>: Moment;
    /// How the second moment is stored when the format stores it as `S`: `S`, or [`Absent`].
    type Second<S: Moment>: Moment;

    /// The new `(master, m, v)`. An absent moment is given as zero, and what is returned for it is dropped.
    fn apply(&self, gradient: f32, master: f32, m: f32, v: f32) -> (f32, f32, f32);
}

/// How a master weight is stored: as the weight that compute uses, and what is missing from it.
pub(crate) trait Master {
    /// The weights of a tile.
    type Weights: Pod;
    /// The rest of a tile; zero bytes when nothing is missing.
    type Rests: Pod;

    fn load(weights: &Self::Weights, rests: &Self::Rests, i: usize) -> f32;

    /// Stores a [`canonical`] value.
    fn store(weights: &mut Self::Weights, rests: &mut Self::Rests, i: usize, value: f32, noise: Noise);
}

/// How a moment is stored.
pub(crate) trait Moment {
    /// The codes of a tile.
    type Stored: Pod;
    /// What the values of a tile share.
    type Scale: Copy;
    /// Bytes of the stored scale, which follows the codes.
    const SCALE_BYTES: usize = 0;

    /// The scale of a tile from its bytes.
    fn scale(bytes: &[u8]) -> Self::Scale;

    fn load(stored: &Self::Stored, scale: Self::Scale, i: usize) -> f32;

    /// `value` as it can be stored: [`canonical`], or without what there are no codes for.
    #[inline(always)]
    fn storable(value: f32) -> f32 {
        canonical(value)
    }

    /// The scale with which to store values of which this is the largest magnitude, in bits; and its bytes.
    fn rescale(bytes: &mut [u8], extent: u32) -> Self::Scale;

    /// Stores a [`storable`](Self::storable) value.
    fn store(stored: &mut Self::Stored, scale: Self::Scale, i: usize, value: f32, noise: Noise);
}

/// Applies `rule` to a run of parameters. `state` has passed `layout`'s check.
pub(crate) fn update<R: Rule>(
    isa: Isa,
    layout: &StateLayout,
    rule: R,
    step: u64,
    gradient: Gradient<'_>,
    state: &mut [&mut [u8]],
) {
    match gradient {
        Gradient::Bf16(values) => update_from::<R, bf16>(isa, layout, rule, step, values, state),
        Gradient::F16(values) => update_from::<R, f16>(isa, layout, rule, step, values, state),
        Gradient::F32(values) => update_from::<R, f32>(isa, layout, rule, step, values, state),
    }
}

/// Stores `weights` as masters, and `moment` as every moment. `state` has passed `layout`'s check.
pub(crate) fn initialize(layout: &StateLayout, weights: &[f32], moment: f32, state: &mut [&mut [u8]]) {
    let slices = Slices::new(layout, state);
    for bytes in [slices.m, slices.v] {
        match layout.format() {
            StateFormat::Fp32 | StateFormat::Split => fill::<Full>(bytes, moment),
            StateFormat::Bf16 => fill::<Bf16Moment<true>>(bytes, moment),
            // No moment begins below zero, so codes without a sign serve both.
            StateFormat::Compact => fill::<Scaled2>(bytes, moment),
        }
    }
    let (high, low) = (slices.weights, slices.rests);
    match (layout.format(), layout.weight()) {
        (StateFormat::Fp32, WeightType::F32) => initialize_as::<WeightIsMaster>(weights, high, low),
        (StateFormat::Fp32, WeightType::Bf16) => initialize_as::<FullMaster<bf16>>(weights, high, low),
        (StateFormat::Fp32, WeightType::F16) => initialize_as::<FullMaster<f16>>(weights, high, low),
        (StateFormat::Split | StateFormat::Bf16, _) => initialize_as::<Split16>(weights, high, low),
        (StateFormat::Compact, _) => initialize_as::<Compact8>(weights, high, low),
    }
}

fn update_from<R: Rule, G: Widen>(
    isa: Isa,
    layout: &StateLayout,
    rule: R,
    step: u64,
    gradient: &[G],
    state: &mut [&mut [u8]],
) {
    let slices = Slices::new(layout, state);
    let seed = Noise::seed(step);
    /// The pass for one way of storing masters and each moment.
    macro_rules! pass {
        ($master:ty, $first:ty, $second:ty) => {
            isa.run(Pass::<R, G, $master, R::First<$first>, R::Second<$second>> {
                rule,
                seed,
                gradient,
                slices,
                stored: std::marker::PhantomData,
            })
        };
    }
    match (layout.format(), layout.weight()) {
        (StateFormat::Fp32, WeightType::F32) => pass!(WeightIsMaster, Full, Full),
        (StateFormat::Fp32, WeightType::Bf16) => pass!(FullMaster<bf16>, Full, Full),
        (StateFormat::Fp32, WeightType::F16) => pass!(FullMaster<f16>, Full, Full),
        (StateFormat::Split, _) => pass!(Split16, Full, Full),
        (StateFormat::Bf16, _) => pass!(Split16, Bf16Moment<false>, Bf16Moment<true>),
        (StateFormat::Compact, _) => pass!(Compact8, Scaled1, Scaled2),
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

/// One update of a run, to be instantiated for an instruction set.
struct Pass<'a, R, G, P, M, V> {
    rule: R,
    seed: u32,
    gradient: &'a [G],
    slices: Slices<'a>,
    stored: std::marker::PhantomData<(P, M, V)>,
}

impl<R: Rule, G: Widen, P: Master, M: Moment, V: Moment> pulp::NullaryFnOnce for Pass<'_, R, G, P, M, V> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { rule, seed, gradient, slices, .. } = self;
        let (tiles, tail) = gradient.as_chunks::<TILE>();
        let (m_bytes, v_bytes) =
            (size_of::<M::Stored>() + M::SCALE_BYTES, size_of::<V::Stored>() + V::SCALE_BYTES);
        for (at, gradient) in tiles.iter().enumerate() {
            let m = &mut slices.m[at * m_bytes..][..m_bytes];
            let v = &mut slices.v[at * v_bytes..][..v_bytes];
            let (m, m_scale) = m.split_at_mut(size_of::<M::Stored>());
            let (v, v_scale) = v.split_at_mut(size_of::<V::Stored>());
            let old = (read(slices.weights, at), read(slices.rests, at), read(m, 0), read(v, 0));
            let tile = Tile::<P, M, V>::updated(&rule, seed, gradient, old, m_scale, v_scale);
            write(slices.weights, at, &tile.weights);
            write(slices.rests, at, &tile.rests);
            write(m, 0, &tile.m);
            write(v, 0, &tile.v);
        }
        if !tail.is_empty() {
            let at = tiles.len();
            let (m, v) = (&mut slices.m[at * m_bytes..], &mut slices.v[at * v_bytes..]);
            // Where there are scales, the last block is whole.
            let (m_codes, v_codes) = (m.len() - M::SCALE_BYTES, v.len() - V::SCALE_BYTES);
            let mut gradient = [G::default(); TILE];
            gradient[..tail.len()].copy_from_slice(tail);
            let (m, m_scale) = m.split_at_mut(m_codes);
            let (v, v_scale) = v.split_at_mut(v_codes);
            let weights = read_short(slices.weights, at);
            let rests = read_short(slices.rests, at);
            let old = (&weights, &rests, &read_short(m, 0), &read_short(v, 0));
            let tile = Tile::<P, M, V>::updated(&rule, seed, &gradient, old, m_scale, v_scale);
            write_short(slices.weights, at, &tile.weights);
            write_short(slices.rests, at, &tile.rests);
            write_short(m, 0, &tile.m);
            write_short(v, 0, &tile.v);
        }
    }
}

struct Tile<P: Master, M: Moment, V: Moment> {
    weights: P::Weights,
    rests: P::Rests,
    m: M::Stored,
    v: V::Stored,
}

impl<P: Master, M: Moment, V: Moment> Tile<P, M, V> {
    #[inline(always)]
    fn updated<R: Rule, G: Widen>(
        rule: &R,
        seed: u32,
        gradient: &[G; TILE],
        (weights, rests, m_old, v_old): (&P::Weights, &P::Rests, &M::Stored, &V::Stored),
        m_scale_bytes: &mut [u8],
        v_scale_bytes: &mut [u8],
    ) -> Self {
        let (m_scale, v_scale) = (M::scale(m_scale_bytes), V::scale(v_scale_bytes));
        let mut tile = Self {
            weights: P::Weights::zeroed(),
            rests: P::Rests::zeroed(),
            m: M::Stored::zeroed(),
            v: V::Stored::zeroed(),
        };
        let (mut ms, mut vs) = ([0f32; TILE], [0f32; TILE]);
        let mut noises = [Noise::default(); TILE];
        let (mut m_largest, mut v_largest) = (0, 0);
        for i in 0..TILE {
            let gradient = gradient[i].widen();
            let master = P::load(weights, rests, i);
            let (m, v) = (M::load(m_old, m_scale, i), V::load(v_old, v_scale, i));
            let noise = Noise::new(seed, gradient, master, m, v);
            let (master, m, v) = rule.apply(gradient, master, m, v);
            let (m, v) = (M::storable(m), V::storable(v));
            P::store(&mut tile.weights, &mut tile.rests, i, canonical(master), noise);
            if const { M::SCALE_BYTES + V::SCALE_BYTES == 0 } {
                M::store(&mut tile.m, M::rescale(&mut [], 0), i, m, noise);
                V::store(&mut tile.v, V::rescale(&mut [], 0), i, v, noise);
            } else {
                (ms[i], vs[i], noises[i]) = (m, v, noise);
                m_largest = (m.to_bits() & MAGNITUDE).max(m_largest);
                v_largest = (v.to_bits() & MAGNITUDE).max(v_largest);
            }
        }
        if const { M::SCALE_BYTES + V::SCALE_BYTES == 0 } {
            return tile;
        }
        let (m_scale, v_scale) = (M::rescale(m_scale_bytes, m_largest), V::rescale(v_scale_bytes, v_largest));
        for i in 0..TILE {
            M::store(&mut tile.m, m_scale, i, ms[i], noises[i]);
            V::store(&mut tile.v, v_scale, i, vs[i], noises[i]);
        }
        tile
    }
}

/// All bits of an f32 but its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Stores `value` as every moment of `bytes`.
fn fill<M: Moment>(bytes: &mut [u8], value: f32) {
    if value == 0.0 {
        return bytes.fill(0);
    }
    let value = M::storable(value);
    for block in bytes.chunks_mut(size_of::<M::Stored>() + M::SCALE_BYTES) {
        let (codes, scale) = block.split_at_mut(block.len() - M::SCALE_BYTES);
        let scale = M::rescale(scale, value.to_bits() & MAGNITUDE);
        let mut tile = M::Stored::zeroed();
        (0..TILE).for_each(|i| M::store(&mut tile, scale, i, value, Noise::NEAREST));
        write_short(codes, 0, &tile);
    }
}

fn initialize_as<P: Master>(values: &[f32], weights: &mut [u8], rests: &mut [u8]) {
    for (at, values) in values.chunks(TILE).enumerate() {
        let (mut high, mut low) = (P::Weights::zeroed(), P::Rests::zeroed());
        for (i, value) in values.iter().enumerate() {
            P::store(&mut high, &mut low, i, canonical(*value), Noise::NEAREST);
        }
        write_short(weights, at, &high);
        write_short(rests, at, &low);
    }
}

#[inline(always)]
fn read<S: Pod>(bytes: &[u8], at: usize) -> &S {
    from_bytes(&bytes[at * size_of::<S>()..][..size_of::<S>()])
}

#[inline(always)]
fn write<S: Pod>(bytes: &mut [u8], at: usize, tile: &S) {
    bytes[at * size_of::<S>()..][..size_of::<S>()].copy_from_slice(bytes_of(tile));
}

/// A tile of which only the first bytes may exist; zeros follow them.
#[inline(always)]
fn read_short<S: Pod>(bytes: &[u8], at: usize) -> S {
    let bytes = &bytes[at * size_of::<S>()..];
    let mut tile = S::zeroed();
    let len = bytes.len().min(size_of::<S>());
    bytes_of_mut(&mut tile)[..len].copy_from_slice(&bytes[..len]);
    tile
}

#[inline(always)]
fn write_short<S: Pod>(bytes: &mut [u8], at: usize, tile: &S) {
    let bytes = &mut bytes[at * size_of::<S>()..];
    let len = bytes.len().min(size_of::<S>());
    bytes[..len].copy_from_slice(&bytes_of(tile)[..len]);
}

/// f32 weights: the weight is the master.
struct WeightIsMaster;

impl Master for WeightIsMaster {
    type Weights = [f32; TILE];
    type Rests = [u8; 0];

    #[inline(always)]
    fn load(weights: &Self::Weights, _: &Self::Rests, i: usize) -> f32 {
        weights[i]
    }

    #[inline(always)]
    fn store(weights: &mut Self::Weights, _: &mut Self::Rests, i: usize, value: f32, _: Noise) {
        weights[i] = value;
    }
}

/// An f32 master, and the weight rounded from it.
struct FullMaster<W>(std::marker::PhantomData<W>);

impl<W: Narrow> Master for FullMaster<W> {
    type Weights = [u16; TILE];
    type Rests = [f32; TILE];

    #[inline(always)]
    fn load(_: &Self::Weights, rests: &Self::Rests, i: usize) -> f32 {
        rests[i]
    }

    #[inline(always)]
    fn store(weights: &mut Self::Weights, rests: &mut Self::Rests, i: usize, value: f32, _: Noise) {
        weights[i] = W::narrow(value);
        rests[i] = value;
    }
}

/// The bf16 weight and its 16-bit remainder.
struct Split16;

impl Master for Split16 {
    type Weights = [u16; TILE];
    type Rests = [i16; TILE];

    #[inline(always)]
    fn load(weights: &Self::Weights, rests: &Self::Rests, i: usize) -> f32 {
        join(weights[i], rests[i])
    }

    #[inline(always)]
    fn store(weights: &mut Self::Weights, rests: &mut Self::Rests, i: usize, value: f32, _: Noise) {
        weights[i] = round_bf16(value);
        rests[i] = remainder(value);
    }
}

/// An f32 moment.
pub(crate) struct Full;

impl Moment for Full {
    type Stored = [f32; TILE];
    type Scale = ();

    #[inline(always)]
    fn scale(_: &[u8]) {}

    #[inline(always)]
    fn load(stored: &Self::Stored, (): (), i: usize) -> f32 {
        stored[i]
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store(stored: &mut Self::Stored, (): (), i: usize, value: f32, _: Noise) {
        stored[i] = value;
    }
}

/// A moment in bf16, rounded stochastically: see [`stochastic_bf16`]. `SECOND` says which half of the noise it
/// uses, so that two moments of a parameter are rounded independently.
pub(crate) struct Bf16Moment<const SECOND: bool>;

impl<const SECOND: bool> Moment for Bf16Moment<SECOND> {
    type Stored = [u16; TILE];
    type Scale = ();

    #[inline(always)]
    fn scale(_: &[u8]) {}

    #[inline(always)]
    fn load(stored: &Self::Stored, (): (), i: usize) -> f32 {
        f32::from_bits(u32::from(stored[i]) << 16)
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store(stored: &mut Self::Stored, (): (), i: usize, value: f32, noise: Noise) {
        stored[i] = stochastic_bf16(value, if SECOND { noise.second() } else { noise.first() });
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
    fn load(_: &Self::Stored, (): (), _: usize) -> f32 {
        0.0
    }

    #[inline(always)]
    fn rescale(_: &mut [u8], _: u32) {}

    #[inline(always)]
    fn store(_: &mut Self::Stored, (): (), _: usize, _: f32, _: Noise) {}
}
