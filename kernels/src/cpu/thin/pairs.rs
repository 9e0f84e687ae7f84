//! Rows of bf16 with rows of bf16 weights, by pairs, where the processor multiplies those as they are (`gemm/pairs.rs` says how).
//!
//! Nothing is widened or packed: a register of weights, 32 of them, meets a register of every row of a. Lane i of sixteen sums takes the
//! pairs i, i + 16, …, and the lanes are added pairwise at the end, so that the order depends neither on M nor on N or the number of
//! threads. What is left of a row after whole registers is filled up with zeros.
//!
//! Weights are read once, up to [`FEW`] rows of a in their order, row after row. Of more rows the core decides, and the rest is as in
//! [`columns`](super::columns): the inner size is cut into [pieces](piece), and while that much of a stays in the first-level cache
//! [`GROUP`] rows of weights take turns, [`TILE`] of them at a time with up to [`TOGETHER`] rows of a in registers. Registers of a lie in the order in which
//! they are loaded: rows of their own, powers of two apart, held up the products of sixteen rows to 32 of 34 GB/s, all sixteen side by
//! side to 28.
//!
//! Weights are asked for one by one between products: in bursts, a tile's worth at a time, they hold up what they are to hide
//! behind (of sixteen rows 21 instead of 24 GB/s). The next group's come to the second-level cache; with more than one turn of a tile, the
//! next tile's from there to the first, too, or their first loads wait (24 instead of 32 GB/s).
//!
//! Of the rate at which the same two threads only read (Zen 5, in turn with products by f32): two rows 1.0 (0.76), four
//! 0.89 (0.73), eight 0.75 (0.63), sixteen 0.67 (0.42).

use super::{AHEAD, COLS, LANES, ROWS};
use crate::cpu::gemm::{Pair, add_products};
use crate::cpu::isa::Pairs;
use crate::cpu::vector::sum_lanes;
use half::bf16;

/// Elements in a register.
const RUN: usize = 2 * LANES;
/// Rows of a that do not keep a core from reading.
const FEW: usize = 4;
/// Most rows of a in registers.
const TOGETHER: usize = 8;
/// Rows of weights that meet more than [`FEW`] rows of a in registers.
const TILE: usize = 3;
/// Rows of weights that take turns.
const GROUP: usize = 4 * TILE;

/// Sums of a group, lane by lane: of its row j with row m of a.
type Sums = [[[f32; LANES]; ROWS]; GROUP];

/// Elements of the inner size that are multiplied before those after them; `l` if that is all of them.
fn piece(m: usize, l: usize) -> usize {
    if m <= FEW { l } else { 1024 }
}

/// Elements that [`prepare`] makes of `m` rows of `l`.
pub const fn prepared_len(m: usize, l: usize) -> usize {
    m * l.next_multiple_of(RUN)
}

/// Rows of a in one turn, the last of which may have fewer.
fn together(m: usize) -> usize {
    m.div_ceil(m.div_ceil(TOGETHER))
}

/// Copies `m` rows of a, turn by turn and register by register: the first of every row, then the second of every row, the last
/// filled up.
pub fn prepare<'s>(a: &[bf16], (m, l): (usize, usize), registers: &'s mut [bf16]) -> &'s [bf16] {
    let registers = &mut registers[..prepared_len(m, l)];
    let turns = registers.chunks_mut(prepared_len(together(m), l)).zip(a.chunks(together(m) * l));
    for (registers, a) in turns {
        let rows = a.len() / l;
        for (index, registers) in registers.chunks_exact_mut(rows * RUN).enumerate() {
            let there = RUN.min(l - index * RUN);
            for (row, register) in registers.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
                register[..there].copy_from_slice(&a[row * l + index * RUN..][..there]);
                register[there..].fill(bf16::ZERO);
            }
        }
    }
    registers
}

/// `sums[m][j] = Σ_l a[m, l]·b[j, l]` for all rows of b, as many as `sums` has columns or fewer; a as [`prepare`] left it.
pub fn all(pairs: Pairs, a: &[bf16], b: &[bf16], l: usize, sums: &mut [[f32; COLS]]) {
    let m = sums.len();
    assert!(l > 0 && a.len() == prepared_len(m, l) && (1..=ROWS).contains(&m), "{m} rows of {l}");
    assert!(b.len().is_multiple_of(l), "whole rows of weights");
    for (index, group) in b.chunks(GROUP * l).enumerate() {
        let mut lanes = [[[0.0; LANES]; ROWS]; GROUP];
        let rows = group.len() / l;
        match pairs {
            Pairs::Emulated => {
                for (row, lanes) in group.chunks_exact(l).zip(&mut lanes) {
                    for (r, lanes) in lanes[..m].iter_mut().enumerate() {
                        add(a, (m, r), row, lanes);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the processor has the instruction; `rows` rows of weights and m of a are there (asserted).
            Pairs::Avx512Bf16 => unsafe { x86::group(a.as_ptr(), group.as_ptr(), l, (m, rows), &mut lanes) },
        }
        for (j, lanes) in lanes[..rows].iter().enumerate() {
            for (sums, lanes) in sums.iter_mut().zip(lanes) {
                sums[index * GROUP + j] = sum_lanes(*lanes);
            }
        }
    }
}

/// Adds the products of a row of weights with row `r` of `m`, emulated.
fn add(a: &[bf16], (m, r): (usize, usize), row: &[bf16], lanes: &mut [f32; LANES]) {
    for (index, run) in row.chunks(RUN).enumerate() {
        let turn = r / together(m) * together(m);
        let a = &a[prepared_len(turn, row.len())..];
        let a = &a[(index * together(m).min(m - turn) + r - turn) * RUN..][..RUN];
        for (i, sum) in lanes.iter_mut().enumerate() {
            let weight = |i: usize| run.get(i).copied().unwrap_or(bf16::ZERO);
            let pair = Pair::new(weight(2 * i), weight(2 * i + 1));
            *sum = add_products(*sum, Pair::new(a[2 * i], a[2 * i + 1]), pair);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{AHEAD, GROUP, LANES, ROWS, RUN, Sums, TILE, TOGETHER, piece, prepared_len, together};
    use half::bf16;
    use std::arch::x86_64::*;

    /// Of `count` elements from `at` on, at most a register, the rest zeros.
    ///
    /// # Safety
    /// They are readable.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn load(at: *const bf16, count: usize) -> __m512bh {
        let mask = 1u32.checked_shl(count as u32).map_or(!0, |bit| bit - 1);
        // SAFETY: masked to what there is.
        unsafe { bits(_mm512_maskz_loadu_epi16(mask, at.cast())) }
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    #[inline]
    fn bits(x: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes of any value.
        unsafe { std::mem::transmute(x) }
    }

    /// Where weights are, and how many elements of each row are meant.
    #[derive(Clone, Copy)]
    struct Rows {
        first: *const bf16,
        count: usize,
        l: usize,
        here: usize,
    }

    impl Rows {
        /// Pointers to rows from `j` on. Where rows run out, the last one takes more places; what those add up to nobody reads.
        fn tile<const T: usize>(self, j: usize) -> [*const bf16; T] {
            let mut tile = [self.first; T];
            for (offset, row) in tile.iter_mut().enumerate() {
                *row = self.first.wrapping_add((j + offset).min(self.count - 1) * self.l);
            }
            tile
        }
    }

    /// # Safety
    /// `weights` has `rows` rows of `l` elements, at most [`GROUP`], and `a` has `m`, as [`prepare`](super::prepare) leaves them.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub unsafe fn group(
        a: *const bf16,
        weights: *const bf16,
        l: usize,
        (m, rows): (usize, usize),
        lanes: &mut Sums,
    ) {
        debug_assert!(rows > 0 && rows <= GROUP && m <= ROWS);
        let rows = Rows { first: weights, count: rows, l, here: l };
        // SAFETY: the caller's promise; the sums have places for rows that are not there, too.
        unsafe {
            match m {
                1 => in_order::<1, 1>(a, rows, lanes),
                2 => in_order::<1, 2>(a, rows, lanes),
                3 => in_order::<1, 3>(a, rows, lanes),
                4 => in_order::<1, 4>(a, rows, lanes),
                5..=TOGETHER => in_turns::<false>(a, rows, m, lanes),
                _ => in_turns::<true>(a, rows, m, lanes),
            }
        }
    }

    /// Row after row, `T` at a time.
    ///
    /// # Safety
    /// As of [`group`], for `R` rows of a.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn in_order<const T: usize, const R: usize>(a: *const bf16, rows: Rows, lanes: &mut Sums) {
        for j in (0..rows.count).step_by(T) {
            // SAFETY: the caller's promise.
            unsafe {
                let sums = lanes.as_mut_ptr().add(j).cast::<f32>();
                let ahead = Ahead { near: AHEAD / size_of::<bf16>(), far: rows.first };
                products::<T, R, true, false>(rows.tile(j), (a, R), rows.here, ahead, sums);
            }
        }
    }

    /// Piece after piece, of which all rows take turns.
    ///
    /// # Safety
    /// As of [`group`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline]
    unsafe fn in_turns<const NEAR: bool>(a: *const bf16, rows: Rows, m: usize, lanes: &mut Sums) {
        let Rows { first: weights, count, l, .. } = rows;
        let together = together(m);
        for first in (0..l).step_by(piece(m, l)) {
            let here = piece(m, l).min(l - first);
            let rows = Rows { first: weights.wrapping_add(first), here, ..rows };
            for j in (0..count).step_by(TILE) {
                // The next group's rows, in the order of memory, while this one's take turns.
                let far = weights.wrapping_add(count * l + first * count + j * here);
                // The next tile, or the first of the next piece.
                let near = if j + TILE < count { TILE * l } else { here.wrapping_sub(j * l) };
                let ahead = Ahead { near, far };
                for r in (0..m).step_by(together) {
                    // SAFETY: as many rows are left of a and in `lanes`, which has room for a whole tile from j.
                    unsafe {
                        let sums = lanes.as_mut_ptr().add(j).cast::<f32>().add(r * LANES);
                        let rows_of_a = together.min(m - r);
                        let a = (a.add(prepared_len(r, l) + first * rows_of_a), rows_of_a);
                        match rows_of_a {
                            4 => products::<TILE, 4, NEAR, true>(rows.tile(j), a, here, ahead, sums),
                            5 => products::<TILE, 5, NEAR, true>(rows.tile(j), a, here, ahead, sums),
                            6 => products::<TILE, 6, NEAR, true>(rows.tile(j), a, here, ahead, sums),
                            7 => products::<TILE, 7, NEAR, true>(rows.tile(j), a, here, ahead, sums),
                            _ => products::<TILE, 8, NEAR, true>(rows.tile(j), a, here, ahead, sums),
                        }
                    }
                }
            }
        }
    }

    /// Weights to ask for, a register of each row with each register that is multiplied.
    #[derive(Clone, Copy)]
    struct Ahead {
        /// So many elements after those that are multiplied, into the first-level cache.
        near: usize,
        /// From here on, one register after the other, into the second-level cache.
        far: *const bf16,
    }

    /// Adds the products of `T` rows of weights with the first `R` of rows of a, of which there are registers of so many side by side.
    ///
    /// # Safety
    /// Weights have `here` elements, a has as many, filled up to whole registers; `sums` is the first of them in [`Sums`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    #[inline(never)]
    unsafe fn products<const T: usize, const R: usize, const NEAR: bool, const FAR: bool>(
        weights: [*const bf16; T],
        (a, side_by_side): (*const bf16, usize),
        here: usize,
        ahead: Ahead,
        sums: *mut f32,
    ) {
        let mut registers = [[_mm512_setzero_ps(); R]; T];
        for (j, registers) in registers.iter_mut().enumerate() {
            for (r, register) in registers.iter_mut().enumerate() {
                // SAFETY: within the sums.
                *register = unsafe { _mm512_loadu_ps(sums.add((j * ROWS + r) * LANES)) };
            }
        }
        let whole = here / RUN * RUN;
        let mut far = ahead.far;
        let mut a = a;
        for at in (0..whole).step_by(RUN) {
            for (j, weights) in weights.iter().enumerate() {
                if NEAR {
                    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(ahead.near.wrapping_add(at)).cast());
                }
                if FAR {
                    _mm_prefetch::<_MM_HINT_T1>(far.wrapping_add(j * RUN).cast());
                }
            }
            let mut wide = [bits(_mm512_setzero_si512()); T];
            for (wide, weights) in wide.iter_mut().zip(weights) {
                // SAFETY: a whole register of weights.
                *wide = bits(unsafe { _mm512_loadu_si512(weights.add(at).cast()) });
            }
            far = far.wrapping_add(T * RUN);
            for r in 0..R {
                // SAFETY: a whole register of a.
                let x = bits(unsafe { _mm512_loadu_si512(a.add(r * RUN).cast()) });
                for (wide, registers) in wide.iter().zip(&mut registers) {
                    registers[r] = _mm512_dpbf16_ps(registers[r], x, *wide);
                }
            }
            a = a.wrapping_add(side_by_side * RUN);
        }
        if whole < here {
            for r in 0..R {
                // SAFETY: a whole register of a, and what is left of the weights.
                let x = bits(unsafe { _mm512_loadu_si512(a.add(r * RUN).cast()) });
                for (weights, registers) in weights.iter().zip(&mut registers) {
                    // SAFETY: as above.
                    let wide = unsafe { load(weights.add(whole), here - whole) };
                    registers[r] = _mm512_dpbf16_ps(registers[r], x, wide);
                }
            }
        }
        for (j, registers) in registers.into_iter().enumerate() {
            for (r, register) in registers.into_iter().enumerate() {
                // SAFETY: within the sums.
                unsafe { _mm512_storeu_ps(sums.add((j * ROWS + r) * LANES), register) };
            }
        }
    }
}
