//! The loop over the tiles of a run.
//!
//! # What does not help
//!
//! *Non-temporal stores*: an update writes the lines that it has just read, so there is no read for ownership to
//! save, and the lines would be evicted on the way. The weights of `fp32` are only written, 2 of 28 bytes: streaming them took 2 %
//! longer on Zen 3. *Software prefetch*: five to nine sequential streams in each
//! direction are what hardware prefetchers are for; 128 to 1024 parameters ahead it was 0.88 to 1.05 times as fast, in no format
//! faster at more than one distance. The formats that memory bounds run at the speed of a loop that only
//! reads, adds and writes (`benches/adamw.rs` has both).
//!
//! # Tiles
//!
//! A tile is updated in place, through arrays of fixed size that are borrowed apart; the last tile of a run is padded with
//! zeros. Where moments have a scale, which is known only when all of a block are, what is new waits on the stack.

use bytemuck::{Pod, Zeroable, bytes_of, bytes_of_mut, from_bytes_mut};

use super::noise::Noise;
use super::widen::Widen;
use super::{LANES, Master, Moment, Order, Pair, Rule, Slices, TILE};
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
        let Self { rule, seed, gradient, mut slices, .. } = self;
        let (tiles, tail) = gradient.as_chunks::<TILE>();
        let mut waiting = <[Waiting; 2]>::default();
        let (pairs, single) = tiles.as_chunks::<2>();
        for (pair, [first, second]) in pairs.iter().enumerate() {
            let (one, other) = (2 * pair, 2 * pair + 1);
            // The largest of a tile is known long after its last operation began: meanwhile a processor works on another.
            Tile::<P, M, V>::of(&mut slices, one).compute::<R, G, O>(&rule, seed, first, &mut waiting[0]);
            Tile::<P, M, V>::of(&mut slices, other).compute::<R, G, O>(&rule, seed, second, &mut waiting[1]);
            Tile::<P, M, V>::of(&mut slices, one).store(&mut waiting[0]);
            Tile::<P, M, V>::of(&mut slices, other).store(&mut waiting[1]);
        }
        if let [gradient] = single {
            let mut tile = Tile::<P, M, V>::of(&mut slices, tiles.len() - 1);
            tile.update::<R, G, O>(&rule, seed, gradient, &mut waiting[0]);
        }
        if !tail.is_empty() {
            let at = tiles.len();
            let mut gradient = [G::default(); TILE];
            gradient[..tail.len()].copy_from_slice(tail);
            // Where there are scales, the last block is whole.
            let (m, m_scale) = split_scale::<M>(&mut slices.m[at * block_bytes::<M>()..]);
            let (v, v_scale) = split_scale::<V>(&mut slices.v[at * block_bytes::<V>()..]);
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
            tile.update::<R, G, O>(&rule, seed, &gradient, &mut waiting[0]);
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

impl<P: Master, M: Moment, V: Moment> Tile<'_, P, M, V> {
    #[inline(always)]
    fn update<R: Rule, G: Widen, O: Order>(
        &mut self,
        rule: &R,
        seed: u32,
        gradient: &[G; TILE],
        waiting: &mut Waiting,
    ) {
        self.compute::<R, G, O>(rule, seed, gradient, waiting);
        self.store(waiting);
    }

    /// Whether no moment has a scale.
    const IN_PLACE: bool = M::SCALE_BYTES + V::SCALE_BYTES == 0;

    /// The whole tile `at`.
    #[inline(always)]
    fn of<'a>(slices: &'a mut Slices<'_>, at: usize) -> Tile<'a, P, M, V> {
        let (m_bytes, v_bytes) = (block_bytes::<M>(), block_bytes::<V>());
        let (m, m_scale) = split_scale::<M>(&mut slices.m[at * m_bytes..][..m_bytes]);
        let (v, v_scale) = split_scale::<V>(&mut slices.v[at * v_bytes..][..v_bytes]);
        let (weights, rests) = (tile_of(slices.weights, at), tile_of(slices.rests, at));
        Tile { weights, rests, m: tile_of(m, 0), v: tile_of(v, 0), m_scale, v_scale }
    }

    /// What is new: without storing it if scales have to be known first, else in place.
    #[inline(always)]
    fn compute<R: Rule, G: Widen, O: Order>(
        &mut self,
        rule: &R,
        seed: u32,
        gradient: &[G; TILE],
        waiting: &mut Waiting,
    ) {
        let Self { weights, rests, m, v, m_scale, v_scale } = self;
        if const { Self::IN_PLACE } {
            return in_place::<R, G, O, P, M, V>(rule, seed, gradient, weights, rests, m, v);
        }
        waiting.v_largest =
            waiting.second::<R, G, O, P, V>(rule, gradient, weights, rests, v, V::scale(v_scale));
        waiting.m_largest =
            waiting.first::<R, G, O, P, M>(rule, gradient, weights, rests, m, M::scale(m_scale));
        waiting.randomize::<G, P>(seed, gradient, weights, rests);
    }

    /// Stores what waits.
    #[inline(always)]
    fn store(&mut self, waiting: &mut Waiting) {
        if const { Self::IN_PLACE } {
            return;
        }
        let Self { weights, rests, m, v, m_scale, v_scale } = self;
        let Waiting { m_largest, v_largest, .. } = *waiting;
        let (m_scale, v_scale) = if m_largest > M::LARGEST || v_largest > V::LARGEST {
            (M::rescale(m_scale, tame::<M>(&mut waiting.m)), V::rescale(v_scale, tame::<V>(&mut waiting.v)))
        } else {
            (M::rescale(m_scale, m_largest), V::rescale(v_scale, v_largest))
        };
        // A loop for each array: two that are written in one would have to be proved apart for every tile.
        let Waiting { master, m: m_new, v: v_new, noise: [noise0, noise1], .. } = &*waiting;
        for lane in 0..LANES {
            P::store_both(weights, rests, lane, pairs(master, lane), [noise0[lane], noise1[lane]]);
        }
        for lane in 0..LANES {
            M::store_both(m, m_scale, lane, pairs(m_new, lane), [noise0[lane], noise1[lane]]);
        }
        for lane in 0..LANES {
            V::store_both(v, v_scale, lane, pairs(v_new, lane), [noise0[lane], noise1[lane]]);
        }
    }
}

/// Updates a tile whose moments have no scale. The square roots of a lane's four come before their divisions: a processor has room for
/// the work of about three vectors that waits for others', and what waits for a root in it keeps the next root out.
#[inline(always)]
fn in_place<R: Rule, G: Widen, O: Order, P: Master, M: Moment, V: Moment>(
    rule: &R,
    seed: u32,
    gradient: &[G; TILE],
    weights: &mut P::Weights,
    rests: &mut P::Rests,
    m: &mut M::Stored,
    v: &mut V::Stored,
) {
    let scales = (M::rescale(&mut [], 0), V::rescale(&mut [], 0));
    for lane in 0..LANES {
        /// The second moments of a pair and their divisors, with the pair's noise.
        macro_rules! second {
            ($pair:literal, $even:literal, $odd:literal) => {{
                let gradients = G::random_bits::<$pair>(gradient, lane);
                let noise = Noise::new(seed, gradients, P::random_bits::<$pair>(weights, rests, lane));
                let even = second!($even);
                let odd = second!($odd);
                V::store::<$pair>(v, scales.1, lane, Pair(even.0, odd.0), noise);
                (noise, even.1, odd.1)
            }};
            ($q:literal) => {{
                let gradient = G::load::<O, $q>(gradient, lane);
                let master = P::load::<$q>(weights, rests, lane);
                rule.second(gradient, master, V::load::<$q>(v, scales.1, lane))
            }};
        }
        /// The masters and first moments of a pair.
        macro_rules! first {
            ($pair:literal, $even:literal, $odd:literal, $second:ident) => {
                let (noise, even, odd) = $second;
                let (even, odd) = (first!($even, even), first!($odd, odd));
                P::store::<$pair>(weights, rests, lane, Pair(even.0, odd.0), noise);
                M::store::<$pair>(m, scales.0, lane, Pair(even.1, odd.1), noise);
            };
            ($q:literal, $divisor:ident) => {{
                let gradient = G::load::<O, $q>(gradient, lane);
                let master = P::load::<$q>(weights, rests, lane);
                let m = M::load::<$q>(m, scales.0, lane);
                let (master, m) = rule.first(gradient, master, m, $divisor);
                (canonical(master), m)
            }};
        }
        let low = second!(0, 0, 1);
        let high = second!(1, 2, 3);
        first!(0, 0, 1, low);
        first!(1, 2, 3, high);
    }
}

/// What is new in a tile until the scales of its moments are known.
#[derive(Default)]
struct Waiting {
    master: [[f32; LANES]; 4],
    m: [[f32; LANES]; 4],
    v: [[f32; LANES]; 4],
    divisor: [[f32; LANES]; 4],
    noise: [[Noise; LANES]; 2],
    /// The bits of the largest magnitudes.
    m_largest: u32,
    v_largest: u32,
}

/// In loops that are short enough for a processor to work on several turns at once: square roots and divisions take long.
impl Waiting {
    /// Computes the second moments. Returns the bits of the largest magnitude.
    #[inline(always)]
    fn second<R: Rule, G: Widen, O: Order, P: Master, V: Moment>(
        &mut self,
        rule: &R,
        gradient: &[G; TILE],
        weights: &P::Weights,
        rests: &P::Rests,
        v: &V::Stored,
        scale: V::Scale,
    ) -> u32 {
        let mut largest = 0;
        for lane in 0..LANES {
            /// The update of one of the four.
            macro_rules! one {
                ($q:literal) => {
                    let gradient = G::load::<O, $q>(gradient, lane);
                    let master = P::load::<$q>(weights, rests, lane);
                    let (v, divisor) = rule.second(gradient, master, V::load::<$q>(v, scale, lane));
                    (self.v[$q][lane], self.divisor[$q][lane]) = (v, divisor);
                    largest = magnitude(v).max(largest);
                };
            }
            one!(0);
            one!(1);
            one!(2);
            one!(3);
        }
        largest
    }

    /// Computes the first moments and the masters. Returns the bits of the largest magnitude of the moments.
    #[inline(always)]
    fn first<R: Rule, G: Widen, O: Order, P: Master, M: Moment>(
        &mut self,
        rule: &R,
        gradient: &[G; TILE],
        weights: &P::Weights,
        rests: &P::Rests,
        m: &M::Stored,
        scale: M::Scale,
    ) -> u32 {
        let mut largest = 0;
        for lane in 0..LANES {
            /// The update of one of the four.
            macro_rules! one {
                ($q:literal) => {
                    let gradient = G::load::<O, $q>(gradient, lane);
                    let master = P::load::<$q>(weights, rests, lane);
                    let m = M::load::<$q>(m, scale, lane);
                    let (master, m) = rule.first(gradient, master, m, self.divisor[$q][lane]);
                    (self.master[$q][lane], self.m[$q][lane]) = (canonical(master), m);
                    largest = magnitude(m).max(largest);
                };
            }
            one!(0);
            one!(1);
            one!(2);
            one!(3);
        }
        largest
    }

    /// Computes the random bits.
    #[inline(always)]
    fn randomize<G: Widen, P: Master>(
        &mut self,
        seed: u32,
        gradient: &[G; TILE],
        weights: &P::Weights,
        rests: &P::Rests,
    ) {
        for lane in 0..LANES {
            let gradients = [G::random_bits::<0>(gradient, lane), G::random_bits::<1>(gradient, lane)];
            let masters =
                [P::random_bits::<0>(weights, rests, lane), P::random_bits::<1>(weights, rests, lane)];
            self.noise[0][lane] = Noise::new(seed, gradients[0], masters[0]);
            self.noise[1][lane] = Noise::new(seed, gradients[1], masters[1]);
        }
    }
}

#[inline(always)]
fn pairs(values: &[[f32; LANES]; 4], lane: usize) -> [Pair<f32>; 2] {
    [Pair(values[0][lane], values[1][lane]), Pair(values[2][lane], values[3][lane])]
}

/// Replaces what cannot be stored. The new largest magnitude.
#[cold]
fn tame<M: Moment>(values: &mut [[f32; LANES]; 4]) -> u32 {
    let values = values.as_flattened_mut();
    values.iter_mut().for_each(|value| *value = M::tamed(*value));
    values.iter().map(|value| magnitude(*value)).fold(0, u32::max)
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
    for block in bytes.chunks_mut(block_bytes::<M>()) {
        let (codes, scale) = split_scale::<M>(block);
        let scale = M::rescale(scale, magnitude(value));
        let mut tile = M::Stored::zeroed();
        for lane in 0..LANES {
            M::store::<0>(&mut tile, scale, lane, Pair(value, value), Noise::NEAREST);
            M::store::<1>(&mut tile, scale, lane, Pair(value, value), Noise::NEAREST);
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
            let pair = Pair(O::place::<0>(lane), O::place::<1>(lane));
            P::store::<0>(&mut high, &mut low, lane, pair.map(value), Noise::NEAREST);
            let pair = Pair(O::place::<2>(lane), O::place::<3>(lane));
            P::store::<1>(&mut high, &mut low, lane, pair.map(value), Noise::NEAREST);
        }
        write_short(weights, at, &high);
        write_short(rests, at, &low);
    }
}

#[inline(always)]
fn tile_of<S: Pod>(bytes: &mut [u8], at: usize) -> &mut S {
    from_bytes_mut(&mut bytes[at * size_of::<S>()..][..size_of::<S>()])
}

/// Bytes of a block with its scale.
const fn block_bytes<M: Moment>() -> usize {
    size_of::<M::Stored>() + M::SCALE_BYTES
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
