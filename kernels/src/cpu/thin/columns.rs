//! Several rows of a with several rows of weights.
//!
//! From two rows of a on, not memory but the core decides: what is loaded of a, which is wider than the weights and soon exceeds
//! the first-level cache, and unpacking. So the inner size is cut into [pieces](piece), which [`GROUP`] rows of weights
//! take in turn while that much of a stays in the first-level cache (its rows side by side: whole rows lie powers of two apart,
//! and would crowd into the same sets). And three rows of weights meet up to four of a in registers, so that a weight is
//! widened once for four and an element of a loaded once for three. Sums wait in memory between pieces, lane by lane, so that
//! their order is that of [`thin`](super): it depends neither on M nor on these sizes.
//!
//! Pieces are too short for the processor to fetch ahead by itself, so the weights of the next group are asked for while a group
//! takes turns, into the second-level cache and in the order of memory. Asking for a row some rows ahead in the same group instead
//! took up to 1.6 times the cycles, most with quantized weights.
//!
//! Widening competes with multiplying for the processor's ports. On AVX2 a run of bf16 is loaded whole and its even elements
//! are shifted up, its odd ones masked, one instruction for eight; extending them in their order takes two, and multiplied at six
//! tenths of the peak. So the lanes of a run lie in that [`Order`], also those of a.
//!
//! On AVX2 the lanes are taken eight by eight: 3 × 4 sums of sixteen would need more than its sixteen registers.

use super::{COLS, LANES, ROWS};
use crate::cpu::Isa;
use crate::cpu::floats::Floats;
use crate::cpu::isa::Level;
use crate::cpu::lanes::{self, Lanes};
use crate::cpu::vector::sum_lanes;
use half::{bf16, f16};

/// Elements of the inner size that stay in the first-level cache, 16 KiB of a at most.
fn piece(m: usize) -> usize {
    if m <= ROWS / 2 { 512 } else { 256 }
}

/// Rows of weights that meet in registers: with four of a twelve sums, more than the eight that keep two multipliers busy.
const TILE: usize = 3;
/// Rows of weights that take turns.
const GROUP: usize = 4 * TILE;

/// Sums of a group, lane by lane: of its row j with row m of a.
type Sums = [[[f32; LANES]; ROWS]; GROUP];

/// Widens `m` rows of a for weights `b`, piece by piece: of each piece all rows, side by side, and the runs of a row in the order in
/// which those of the weights are widened.
pub fn prepare<'s>(
    isa: Isa,
    a: Floats<'_>,
    b: Floats<'_>,
    (m, l): (usize, usize),
    pieces: &'s mut [f32],
) -> &'s [f32] {
    let pieces = &mut pieces[..m * l];
    let order = if matches!(b, Floats::BF16(_)) { bf16::order(isa) } else { Order::Straight };
    for (index, piece) in pieces.chunks_mut(m * self::piece(m)).enumerate() {
        let width = piece.len() / m;
        for (row, piece) in piece.chunks_exact_mut(width).enumerate() {
            a.slice(row * l + index * self::piece(m), width).widen(isa, piece);
            piece.as_chunks_mut::<LANES>().0.iter_mut().for_each(|run| *run = order.arranged(*run));
        }
    }
    pieces
}

/// How the lanes of a run lie in registers and in [`Sums`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Straight,
    /// The even ones before the odd ones.
    Apart,
}

impl Order {
    /// Where lane `i` lies.
    fn place(self, i: usize) -> usize {
        match self {
            Self::Straight => i,
            Self::Apart => i / 2 + i % 2 * (LANES / 2),
        }
    }

    fn arranged(self, run: [f32; LANES]) -> [f32; LANES] {
        let mut arranged = run;
        for (i, x) in run.into_iter().enumerate() {
            arranged[self.place(i)] = x;
        }
        arranged
    }

    /// Adds lanes as [`sum_lanes`] does.
    fn sum(self, run: [f32; LANES]) -> f32 {
        if self == Self::Straight {
            return sum_lanes(run);
        }
        // Even lanes meet even ones until one of each is left.
        let mut halves = run;
        for width in [4, 2, 1] {
            for half in halves.as_chunks_mut::<{ LANES / 2 }>().0 {
                for i in 0..width {
                    half[i] += half[i + width];
                }
            }
        }
        halves[0] + halves[LANES / 2]
    }
}

/// `sums[m][j] = Σ_l a[m, l]·b[j, l]` for all rows of b, as many as `sums` has columns or fewer; a as [`prepare`] left it.
pub fn all(isa: Isa, a: &[f32], b: Floats<'_>, l: usize, sums: &mut [[f32; COLS]]) {
    match b {
        Floats::F32(b) => all_typed(isa, a, b, l, sums),
        Floats::BF16(b) => all_typed(isa, a, b, l, sums),
        Floats::F16(b) => all_typed(isa, a, b, l, sums),
    }
}

fn all_typed<T: Weight>(isa: Isa, a: &[f32], b: &[T], l: usize, sums: &mut [[f32; COLS]]) {
    let (m, order) = (sums.len(), T::order(isa));
    assert!(l > 0 && a.len() == m * l, "{m} rows of {l}");
    // The last piece, of rows as long as what is left for it, and within a row the last incomplete run.
    let last = (l - 1) / piece(m) * piece(m);
    let whole = l / LANES * LANES;
    let a_tail =
        |m_index: usize| &a[m * last + m_index * (l - last)..][..l - last][(whole - last).min(l - last)..];
    let mut lanes = [[[0.0; LANES]; ROWS]; GROUP];
    for (index, group) in b.chunks(GROUP * l).enumerate() {
        // The incomplete run comes first.
        for (row, lanes) in group.chunks_exact(l).zip(&mut lanes) {
            for (index, lanes) in lanes[..m].iter_mut().enumerate() {
                lanes.fill(0.0);
                for (i, (a, weight)) in a_tail(index).iter().zip(&row[whole..]).enumerate() {
                    lanes[order.place(i)] = a * weight.widen();
                }
            }
        }
        add_whole_runs(isa, a, group, l, m, &mut lanes);
        for (j, lanes) in lanes[..group.len() / l].iter().enumerate() {
            for (sums, lanes) in sums.iter_mut().zip(lanes) {
                sums[index * GROUP + j] = order.sum(*lanes);
            }
        }
    }
}

/// Adds what comes after the last incomplete run.
fn add_whole_runs<T: Weight>(isa: Isa, a: &[f32], group: &[T], l: usize, m: usize, lanes: &mut Sums) {
    let rows = group.len() / l;
    assert!(rows > 0 && rows <= GROUP && m > 0 && m <= ROWS && a.len() >= m * l, "{rows} by {m} rows");
    let (a, weights) = (a.as_ptr(), group.as_ptr());
    match isa.level() {
        // SAFETY: rows of a and weights have `l` elements (asserted); no instructions are needed.
        Level::Generic => unsafe { group_of::<lanes::Generic, T>(a, weights, l, (m, rows), lanes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above; an `Isa` exists only when the processor has its instructions.
        Level::Avx2 => unsafe { x86::group_avx2(a, weights, l, (m, rows), lanes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Level::Avx512 => unsafe { x86::group_avx512(a, weights, l, (m, rows), lanes) },
    }
}

/// # Safety
/// `a` has `m` rows and `weights` `rows` of them, of `l` elements; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn group_of<V: Lanes, T: Weight>(
    a: *const f32,
    weights: *const T,
    l: usize,
    (m, rows): (usize, usize),
    lanes: &mut Sums,
) {
    let (whole, piece) = (l / LANES * LANES, piece(m));
    let mut first = 0;
    while first < whole {
        let stride = piece.min(l - first);
        let runs = stride / LANES;
        let mut j = 0;
        while j < rows {
            // Where rows run out, the last one takes more places; what those add up to nobody reads.
            let mut tile = [weights; TILE];
            for (offset, row) in tile.iter_mut().enumerate() {
                // SAFETY: a row of weights.
                *row = unsafe { weights.add((j + offset).min(rows - 1) * l + first) };
            }
            // The next group's rows, in the order of memory, while this one's take turns.
            let next = weights.wrapping_add(rows * l + first * rows + j * stride).cast::<u8>();
            let mut byte = 0;
            while byte < TILE * stride * size_of::<T>() {
                V::prefetch_far(next.wrapping_add(byte));
                byte += 64;
            }
            let mut r = 0;
            while r < m {
                // SAFETY: a row of a; there are rows of sums for a whole tile from j.
                let (a, sums) = unsafe {
                    (a.add(m * first + r * stride), lanes.as_mut_ptr().add(j).cast::<f32>().add(r * LANES))
                };
                // SAFETY: as many rows are left of a and in `lanes`, and `runs` runs in each.
                unsafe {
                    match m - r {
                        1 => products::<V, T, 1>(tile, a, stride, runs, sums),
                        2 => products::<V, T, 2>(tile, a, stride, runs, sums),
                        3 => products::<V, T, 3>(tile, a, stride, runs, sums),
                        _ => products::<V, T, 4>(tile, a, stride, runs, sums),
                    }
                }
                r += 4;
            }
            j += TILE;
        }
        first += piece;
    }
}

/// A tile of weights with `R` rows of a, `stride` apart.
///
/// # Safety
/// Each has `runs` runs; `sums` is the first of them in [`Sums`]; the processor has the instruction set of `V`.
#[inline(always)]
unsafe fn products<V: Lanes, T: Weight, const R: usize>(
    weights: [*const T; TILE],
    a: *const f32,
    stride: usize,
    runs: usize,
    sums: *mut f32,
) {
    // No closures here: they would not be compiled for the instruction set.
    for part in (0..LANES).step_by(V::WIDTH) {
        // SAFETY: within the rows and the sums, by the caller's promise.
        unsafe {
            let mut registers = [[V::zero(); R]; TILE];
            for (j, registers) in registers.iter_mut().enumerate() {
                for (r, register) in registers.iter_mut().enumerate() {
                    *register = V::load(sums.add((j * ROWS + r) * LANES + part));
                }
            }
            for run in 0..runs {
                let at = run * LANES + part;
                let mut wide = [V::zero(); TILE];
                for (wide, weights) in wide.iter_mut().zip(weights) {
                    *wide = T::load::<V>(weights.add(run * LANES), part);
                }
                for r in 0..R {
                    let x = V::load(a.add(r * stride + at));
                    for (wide, registers) in wide.iter().zip(&mut registers) {
                        registers[r] = wide.fma(x, registers[r]);
                    }
                }
            }
            for (j, registers) in registers.into_iter().enumerate() {
                for (r, register) in registers.into_iter().enumerate() {
                    register.store(sums.add((j * ROWS + r) * LANES + part));
                }
            }
        }
    }
}

/// What weights may be.
trait Weight: Copy {
    /// As f32, exactly.
    fn widen(self) -> f32;

    /// The order in which [`load`](Self::load) takes the lanes of a run on this instruction set.
    fn order(_isa: Isa) -> Order {
        Order::Straight
    }

    /// As many as there are lanes, from `part` of a run, as f32.
    ///
    /// # Safety
    /// The run is readable; the processor has the instruction set of `V`.
    unsafe fn load<V: Lanes>(run: *const Self, part: usize) -> V;
}

impl Weight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(run: *const f32, part: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(run.add(part)) }
    }
}

impl Weight for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(run: *const bf16, part: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16_apart(run, part) }
    }

    fn order(isa: Isa) -> Order {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Order::Apart,
            _ => Order::Straight,
        }
    }
}

impl Weight for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[inline(always)]
    unsafe fn load<V: Lanes>(run: *const f16, part: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(run.add(part)) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Sums, Weight, group_of};
    use crate::cpu::lanes::{Avx2Half, Avx512};

    macro_rules! compiled_for {
        ($features:literal, $lanes:ty, $group:ident) => {
            /// # Safety
            /// See [`group_of`].
            #[target_feature(enable = $features)]
            pub unsafe fn $group<T: Weight>(
                a: *const f32,
                weights: *const T,
                l: usize,
                counts: (usize, usize),
                lanes: &mut Sums,
            ) {
                // SAFETY: the caller's promise.
                unsafe { group_of::<$lanes, T>(a, weights, l, counts, lanes) }
            }
        };
    }

    compiled_for!("avx2,fma,f16c", Avx2Half, group_avx2);
    compiled_for!("avx512f,avx512bw,avx512vl,avx2,fma,f16c", Avx512, group_avx512);
}
