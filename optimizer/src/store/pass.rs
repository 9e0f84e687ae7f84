//! The loop over the tiles of a run.
//!
//! A tile is read whole before anything is written, so that LLVM vectorizes without asking whether slices overlap; the
//! last tile of a run is padded with zeros.

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut, from_bytes_mut};

use super::noise::Noise;
use super::widen::Widen;
use super::{LANES, Master, Moment, Order, Rule, Slices, TILE};
use crate::split::canonical;

/// One update of a run, to be instantiated for an instruction set.
pub(super) struct Pass<'a, R, G, O, P, M, V> {
    pub(super) rule: R,
    pub(super) seed: u32,
    pub(super) gradient: &'a [G],
    pub(super) slices: Slices<'a>,
    pub(super) stored: std::marker::PhantomData<(O, P, M, V)>,
}

impl<R: Rule, G: Widen, O: Order, P: Master, M: Moment, V: Moment> pulp::NullaryFnOnce
    for Pass<'_, R, G, O, P, M, V>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { rule, seed, gradient, slices, .. } = self;
        let (tiles, tail) = gradient.as_chunks::<TILE>();
        let (m_bytes, v_bytes) =
            (size_of::<M::Stored>() + M::SCALE_BYTES, size_of::<V::Stored>() + V::SCALE_BYTES);
        for (at, gradient) in tiles.iter().enumerate() {
            let (m, m_scale) = split_scale::<M>(&mut slices.m[at * m_bytes..][..m_bytes]);
            let (v, v_scale) = split_scale::<V>(&mut slices.v[at * v_bytes..][..v_bytes]);
            let (weights, rests) = (tile_of(slices.weights, at), tile_of(slices.rests, at));
            let mut tile =
                Tile::<P, M, V> { weights, rests, m: tile_of(m, 0), v: tile_of(v, 0), m_scale, v_scale };
            tile.update::<R, G, O>(&rule, seed, gradient);
        }
        if !tail.is_empty() {
            let at = tiles.len();
            let mut gradient = [G::default(); TILE];
            gradient[..tail.len()].copy_from_slice(tail);
            // Where there are scales, the last block is whole.
            let (m, m_scale) = split_scale::<M>(&mut slices.m[at * m_bytes..]);
            let (v, v_scale) = split_scale::<V>(&mut slices.v[at * v_bytes..]);
            let (mut weights, mut rests) = (read_short(slices.weights, at), read_short(slices.rests, at));
            let (mut m_codes, mut v_codes) = (read_short(m, 0), read_short(v, 0));
            let mut tile = Tile::<P, M, V> {
                weights: &mut weights,
                rests: &mut rests,
                m: &mut m_codes,
                v: &mut v_codes,
                m_scale,
                v_scale,
            };
            tile.update::<R, G, O>(&rule, seed, &gradient);
            write_short(slices.weights, at, &weights);
            write_short(slices.rests, at, &rests);
            write_short(m, 0, &m_codes);
            write_short(v, 0, &v_codes);
        }
    }
}

/// The state of a tile.
struct Tile<'a, P: Master, M: Moment, V: Moment> {
    weights: &'a mut P::Weights,
    rests: &'a mut P::Rests,
    m: &'a mut M::Stored,
    v: &'a mut V::Stored,
    m_scale: &'a mut [u8],
    v_scale: &'a mut [u8],
}

/// A parameter after the update, before it is rounded.
#[derive(Clone, Copy)]
struct New {
    master: f32,
    m: f32,
    v: f32,
    noise: Noise,
}

impl<P: Master, M: Moment, V: Moment> Tile<'_, P, M, V> {
    #[inline(always)]
    fn update<R: Rule, G: Widen, O: Order>(&mut self, rule: &R, seed: u32, gradient: &[G; TILE]) {
        let Self { weights, rests, m, v, m_scale, v_scale } = self;
        let scales = (M::scale(m_scale), V::scale(v_scale));
        let mut waiting = Waiting::default();
        let (m_largest, v_largest) =
            first_half::<R, G, O, P, M, V>(rule, seed, gradient, weights, rests, m, v, scales, &mut waiting);
        if const { M::SCALE_BYTES + V::SCALE_BYTES == 0 } {
            return;
        }
        let (m_largest, v_largest) = if m_largest > M::LARGEST || v_largest > V::LARGEST {
            waiting.tame::<M, V>()
        } else {
            (m_largest, v_largest)
        };
        let scales = (M::rescale(m_scale, m_largest), V::rescale(v_scale, v_largest));
        second_half::<M, V>(&waiting, scales, m, v);
    }
}

/// Updates masters, and moments that need no scale; leaves those that do in `waiting`, and returns the bits of the
/// largest magnitudes.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "each is a slice of its own, which is what lets the loop be vectorized"
)]
fn first_half<R: Rule, G: Widen, O: Order, P: Master, M: Moment, V: Moment>(
    rule: &R,
    seed: u32,
    gradient: &[G; TILE],
    weights: &mut P::Weights,
    rests: &mut P::Rests,
    m: &mut M::Stored,
    v: &mut V::Stored,
    scales: (M::Scale, V::Scale),
    waiting: &mut Waiting,
) -> (u32, u32) {
    let (mut m_largest, mut v_largest) = (0, 0);
    for lane in 0..LANES {
        /// The update of parameter `Q` of the lane.
        macro_rules! new {
            ($q:literal) => {{
                let gradient = G::load::<O, $q>(gradient, lane);
                let master = P::load::<$q>(weights, rests, lane);
                let (m, v) = (M::load::<$q>(m, scales.0, lane), V::load::<$q>(v, scales.1, lane));
                let noise = Noise::new(seed, gradient, master);
                let (master, m, v) = rule.apply(gradient, master, m, v);
                New { master: canonical(master), m, v, noise }
            }};
        }
        /// The update of a pair.
        macro_rules! pair {
            ($pair:literal, $even:literal, $odd:literal) => {
                let news = [new!($even), new!($odd)];
                let noise = news.map(|new| new.noise);
                P::store::<$pair>(weights, rests, lane, news.map(|new| new.master), noise);
                let (m_new, v_new) = (news.map(|new| new.m), news.map(|new| new.v));
                if const { M::SCALE_BYTES + V::SCALE_BYTES == 0 } {
                    M::store::<$pair>(m, M::rescale(&mut [], 0), lane, m_new, noise);
                    V::store::<$pair>(v, V::rescale(&mut [], 0), lane, v_new, noise);
                } else {
                    waiting.pairs[$pair].put(lane, m_new, v_new, noise);
                    m_largest = m_new.map(magnitude).into_iter().fold(m_largest, u32::max);
                    v_largest = v_new.map(magnitude).into_iter().fold(v_largest, u32::max);
                }
            };
        }
        pair!(0, 0, 1);
        pair!(1, 2, 3);
    }
    (m_largest, v_largest)
}

/// Stores the moments that waited for their scale.
#[inline(always)]
fn second_half<M: Moment, V: Moment>(
    waiting: &Waiting,
    scales: (M::Scale, V::Scale),
    m: &mut M::Stored,
    v: &mut V::Stored,
) {
    for lane in 0..LANES {
        let (m_new, v_new, noise) = waiting.pairs[0].at(lane);
        M::store::<0>(m, scales.0, lane, m_new, noise);
        V::store::<0>(v, scales.1, lane, v_new, noise);
        let (m_new, v_new, noise) = waiting.pairs[1].at(lane);
        M::store::<1>(m, scales.0, lane, m_new, noise);
        V::store::<1>(v, scales.1, lane, v_new, noise);
    }
}

/// Moments until the scale of their tile is known.
#[derive(Default)]
struct Waiting {
    pairs: [WaitingPair; 2],
}

#[derive(Default)]
struct WaitingPair {
    m: [[f32; LANES]; 2],
    v: [[f32; LANES]; 2],
    noise: [[Noise; LANES]; 2],
}

impl WaitingPair {
    #[inline(always)]
    fn put(&mut self, lane: usize, m: [f32; 2], v: [f32; 2], noise: [Noise; 2]) {
        for q in 0..2 {
            self.m[q][lane] = m[q];
            self.v[q][lane] = v[q];
            self.noise[q][lane] = noise[q];
        }
    }

    #[inline(always)]
    fn at(&self, lane: usize) -> ([f32; 2], [f32; 2], [Noise; 2]) {
        let (m, v, noise) = (&self.m, &self.v, &self.noise);
        ([m[0][lane], m[1][lane]], [v[0][lane], v[1][lane]], [noise[0][lane], noise[1][lane]])
    }
}

impl Waiting {
    /// Replaces what cannot be stored. The new largest magnitudes.
    #[cold]
    fn tame<M: Moment, V: Moment>(&mut self) -> (u32, u32) {
        let mut largest = (0, 0);
        for pair in &mut self.pairs {
            for m in pair.m.as_flattened_mut() {
                *m = M::tamed(*m);
                largest.0 = largest.0.max(magnitude(*m));
            }
            for v in pair.v.as_flattened_mut() {
                *v = V::tamed(*v);
                largest.1 = largest.1.max(magnitude(*v));
            }
        }
        largest
    }
}

/// The bits of |x|.
#[inline(always)]
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

/// Stores `value` as every moment of `bytes`.
pub(super) fn fill<M: Moment>(bytes: &mut [u8], value: f32) {
    if value == 0.0 {
        return bytes.fill(0);
    }
    for block in bytes.chunks_mut(size_of::<M::Stored>() + M::SCALE_BYTES) {
        let (codes, scale) = block.split_at_mut(block.len() - M::SCALE_BYTES);
        let scale = M::rescale(scale, magnitude(value));
        let mut tile = M::Stored::zeroed();
        for lane in 0..LANES {
            M::store::<0>(&mut tile, scale, lane, [value; 2], [Noise::NEAREST; 2]);
            M::store::<1>(&mut tile, scale, lane, [value; 2], [Noise::NEAREST; 2]);
        }
        write_short(codes, 0, &tile);
    }
}

/// Stores `values` as masters.
pub(super) fn masters<O: Order, P: Master>(values: &[f32], weights: &mut [u8], rests: &mut [u8]) {
    for (at, values) in values.chunks(TILE).enumerate() {
        let (mut high, mut low) = (P::Weights::zeroed(), P::Rests::zeroed());
        let value = |place| canonical(values.get(place).copied().unwrap_or(0.0));
        for lane in 0..LANES {
            let places = [O::place::<0>(lane), O::place::<1>(lane), O::place::<2>(lane), O::place::<3>(lane)];
            P::store(&mut high, &mut low, lane, places.map(value), [Noise::NEAREST; 4]);
        }
        write_short(weights, at, &high);
        write_short(rests, at, &low);
    }
}

#[inline(always)]
fn tile_of<S: Pod>(bytes: &mut [u8], at: usize) -> &mut S {
    from_bytes_mut(&mut bytes[at * size_of::<S>()..][..size_of::<S>()])
}

/// The codes of a block and its scale.
#[inline(always)]
fn split_scale<M: Moment>(block: &mut [u8]) -> (&mut [u8], &mut [u8]) {
    block.split_at_mut(block.len() - M::SCALE_BYTES)
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
