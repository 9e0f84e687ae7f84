//! Products of bf16 by pairs: packing and the innermost product around `vdpbf16ps` (AVX512-BF16).
//!
//! The instruction multiplies two bf16 with two others and adds both products to an f32: twice the multiplications of an f32
//! one, from half the bytes. A word of a panel is therefore a [`Pair`] of neighbours in k: `[outer / width][k / 2][width]`
//! pairs, the last pair of an odd depth and the last panel filled up with zeros. The micro tile is the one of AVX-512, 8 × 48.
//!
//! **Order and rounding.** Intel's manual (SDM volume 2, VDPBF16PS) defines the instruction as two fused multiply-adds one after
//! the other, each rounded to nearest even: `t = x₁·y₁ + sum`, then `x₀·y₀ + t`, where x₀ is the element of the lower k. So terms of a
//! block are added one by one as in [`micro`](super::micro), the two of a pair in reverse. A processor that rounded less often
//! would keep the tolerance, though not the bits.
//!
//! **Small numbers.** Whatever the control register says, operands below 2⁻¹²⁶ (denormal as f32 and as bf16) count as zero,
//! and so do sums below it. What that costs is `2⁻¹²⁶·|b|` a term: nothing unless an operand is denormal and the other huge.
//!
//! **Far memory.** Rows lie in pages of their own, so the processor does not fetch the next ones ahead by itself; packing asks for
//! them, and the innermost product for the part of the result that it will add to. On Zen 5 that is worth 4 to 10 % of a large
//! product.
//!
//! **AMX** would be a third [`Pairs`] and one more micro tile here: its tiles are of pairs in the order of these panels. Rust has no
//! stable way to it: the intrinsics and the target features `amx-tile` and `amx-bf16` are unstable (`x86_amx_intrinsics`, rustc
//! 1.95), and a build without a nightly compiler or C is a promise of this project.
//!
//! [`emulated`] follows the definition operation by operation, so that everything around the instruction is tested on machines
//! without it.

use super::micro::{Micro, Run};
#[cfg(target_arch = "x86_64")]
use super::pack::Rows;
use super::pack::{Panels, panels_len};
use crate::cpu::Isa;
use crate::cpu::floats::Floats;
use crate::cpu::isa::{Level, Pairs};
use half::bf16;

/// A micro tile, and the columns of a vector.
const MR: usize = 8;
const NR: usize = 48;
const LANES: usize = 16;
/// Rows of a transposed block; a width is a multiple of it, so that a store never leaves its panel.
const GROUP: usize = 8;
/// Elements along k of a transposed block.
const RUN: usize = 16;

/// Two neighbours in k, the lower one in the lower half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Pair(u32);

// SAFETY: a `u32` and nothing else.
unsafe impl bytemuck::Zeroable for Pair {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Pair {}

impl Pair {
    const ZERO: Self = Self(0);

    /// Pairs along a block of `depth`.
    pub const fn count(depth: usize) -> usize {
        depth.div_ceil(2)
    }

    #[inline(always)]
    pub fn new(low: bf16, high: bf16) -> Self {
        Self(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
    }

    /// The two as f32, the lower one first.
    #[inline(always)]
    fn widen(self) -> [f32; 2] {
        [f32::from_bits(self.0 << 16), f32::from_bits(self.0 & 0xFFFF_0000)]
    }
}

impl Panels<'_> {
    /// Packs bf16 into panels of `width` pairs.
    ///
    /// # Panics
    /// If the data is not bf16, `packed` is shorter than [`panels_len`] of the pairs, or the block reaches past the data.
    pub fn pack_pairs(self, isa: Isa, width: usize, packed: &mut [Pair]) {
        let Floats::BF16(data) = self.data else { unreachable!("pairs are of bf16") };
        if self.outer == 0 || self.depth == 0 {
            return;
        }
        let last = (self.outer - 1) * self.outer_stride + (self.depth - 1) * self.depth_stride;
        assert!(last < data.len(), "element {last} of a block lies within {}", data.len());
        let pairs = Pair::count(self.depth);
        assert!(packed.len() >= panels_len(self.outer, width, pairs), "a packed block fits its buffer");
        if self.outer_stride == 1 {
            match width {
                8 => self.interleave::<8>(isa, data, packed),
                48 => self.interleave::<48>(isa, data, packed),
                _ => unreachable!("panels are as wide as a micro tile"),
            }
        } else {
            assert_eq!(self.depth_stride, 1, "one dimension of an operand is contiguous");
            #[cfg(target_arch = "x86_64")]
            if isa.level() == Level::Avx512 {
                let rows = Rows { data, rows: self.outer, stride: self.outer_stride, len: self.depth };
                let transpose = match width {
                    8 => x86::transpose_to_8,
                    48 => x86::transpose_to_48,
                    _ => unreachable!("panels are as wide as a micro tile"),
                };
                // SAFETY: an `Isa` exists only when the processor has its instructions; rows and panels are in bounds (asserted).
                unsafe { transpose(rows, packed.as_mut_ptr()) };
                return;
            }
            assert!(width.is_multiple_of(GROUP), "panels are whole groups of rows");
            for first in (0..self.outer.next_multiple_of(width)).step_by(GROUP) {
                let block = Transpose {
                    rows: self.outer.saturating_sub(first).min(GROUP),
                    row_stride: self.outer_stride,
                    depth: self.depth,
                    width,
                };
                let source = if block.rows == 0 { &[] } else { &data[first * self.outer_stride..] };
                let panel = first / width * width;
                block.run(isa, source, &mut packed[panel * pairs + first - panel..]);
            }
        }
    }

    /// The outer dimension is contiguous: two rows of it give a run of `W` pairs to every panel.
    fn interleave<const W: usize>(self, isa: Isa, data: &[bf16], packed: &mut [Pair]) {
        let pairs = Pair::count(self.depth);
        #[cfg(target_arch = "x86_64")]
        let first = match isa.level() {
            Level::Avx512 => {
                let rows = Rows { data, rows: self.depth, stride: self.depth_stride, len: self.outer };
                assert!((self.depth - 1) * self.depth_stride + self.outer <= data.len());
                assert!(self.outer.next_multiple_of(W) * pairs <= packed.len());
                // SAFETY: an `Isa` exists only when the processor has its instructions; the rows and the panels are in bounds
                // (asserted).
                unsafe { x86::interleave_whole::<W>(rows, packed.as_mut_ptr(), W * pairs) }
            }
            Level::Generic | Level::Avx2 => 0,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let first = 0;
        for pair in first..pairs {
            let row = |k: usize| &data[k * self.depth_stride..][..self.outer];
            let high = (2 * pair + 1 < self.depth).then(|| row(2 * pair + 1));
            interleave_rows::<W>(isa, row(2 * pair), high, &mut packed[pair * W..], W * pairs);
        }
    }
}

/// Puts two rows into the panels that `panel_len` separates, with zeros after their end and for a missing row.
#[inline(always)]
fn interleave_panels<const W: usize>(
    low: &[bf16],
    high: Option<&[bf16]>,
    out: &mut [Pair],
    panel_len: usize,
) {
    let (runs, tail) = low.as_chunks::<W>();
    let (high_runs, high_tail) = high.map_or((&[][..], &[][..]), |high| high.as_chunks::<W>());
    for (panel, low) in runs.iter().enumerate() {
        let high = high_runs.get(panel).unwrap_or(&[bf16::ZERO; W]);
        let out: &mut [Pair; W] =
            out[panel * panel_len..].first_chunk_mut().expect("a packed block fits its buffer");
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            *out = Pair::new(*low, *high);
        }
    }
    if !tail.is_empty() {
        let out = &mut out[runs.len() * panel_len..][..W];
        out.fill(Pair::ZERO);
        for (j, (out, low)) in out.iter_mut().zip(tail).enumerate() {
            *out = Pair::new(*low, high_tail.get(j).copied().unwrap_or(bf16::ZERO));
        }
    }
}

/// [`interleave_panels`] compiled for `isa`; written out because `multiversion!` takes no type parameters.
fn interleave_rows<const W: usize>(
    isa: Isa,
    low: &[bf16],
    high: Option<&[bf16]>,
    out: &mut [Pair],
    panel_len: usize,
) {
    match isa.level() {
        Level::Generic => interleave_panels::<W>(low, high, out, panel_len),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` exists only when the processor has its instructions.
        Level::Avx2 | Level::Avx512 => unsafe { x86::interleave_avx2::<W>(low, high, out, panel_len) },
    }
}

/// Up to eight rows of one panel, transposed; k is contiguous.
#[derive(Clone, Copy)]
struct Transpose {
    rows: usize,
    row_stride: usize,
    depth: usize,
    width: usize,
}

impl Transpose {
    fn run(self, isa: Isa, source: &[bf16], out: &mut [Pair]) {
        let whole = match isa.level() {
            Level::Generic => 0,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => unreachable!("whole panels are transposed there"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                let whole = self.depth / RUN * RUN;
                if self.rows > 0 && whole > 0 {
                    assert!((self.rows - 1) * self.row_stride + whole <= source.len());
                }
                if whole > 0 {
                    assert!((whole / 2 - 1) * self.width + GROUP <= out.len());
                }
                // SAFETY: the processor has AVX2; loads and stores are in bounds (asserted).
                unsafe { x86::transpose(self, whole, source.as_ptr(), out.as_mut_ptr()) };
                whole
            }
        };
        for k in (whole..self.depth).step_by(2) {
            for (lane, out) in out[k / 2 * self.width..][..GROUP].iter_mut().enumerate() {
                let at = |k: usize| {
                    let inside = lane < self.rows && k < self.depth;
                    if inside { source[lane * self.row_stride + k] } else { bf16::ZERO }
                };
                *out = Pair::new(at(k), at(k + 1));
            }
        }
    }
}

impl Micro<Pair> {
    /// The one for `isa`, if it multiplies pairs.
    pub fn of_pairs(isa: Isa) -> Option<Self> {
        match isa.pairs()? {
            Pairs::Emulated => Some(Self::emulated()),
            #[cfg(target_arch = "x86_64")]
            Pairs::Avx512Bf16 => {
                let runs: &[Run<Pair>] = &[x86::avx512bf16::<1>, x86::avx512bf16::<2>, x86::avx512bf16::<3>];
                Some(Self { mr: MR, nr: NR, lanes: LANES, runs })
            }
        }
    }

    fn emulated() -> Self {
        let runs: &[Run<Pair>] = &[emulated::<16>, emulated::<32>, emulated::<48>];
        Self { mr: MR, nr: NR, lanes: LANES, runs }
    }
}

/// # Safety
/// See [`Micro::run`].
unsafe fn emulated<const WIDTH: usize>(
    pairs: usize,
    a: *const Pair,
    b: *const Pair,
    c: *mut f32,
    stride: usize,
    add: bool,
) {
    let mut sums = [[0.0f32; WIDTH]; MR];
    for k in 0..pairs {
        // SAFETY: within the panels.
        let (a, b) =
            unsafe { (&*a.add(k * MR).cast::<[Pair; MR]>(), &*b.add(k * NR).cast::<[Pair; WIDTH]>()) };
        for (sums, a) in sums.iter_mut().zip(a) {
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum = add_products(*sum, *a, *b);
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: row i of the tile.
        let row = unsafe { &mut *c.add(i * stride).cast::<[f32; WIDTH]>() };
        for (out, sum) in row.iter_mut().zip(sums) {
            *out = if add { *out + sum } else { *sum };
        }
    }
}

/// One lane of `vdpbf16ps`.
pub fn add_products(sum: f32, a: Pair, b: Pair) -> f32 {
    let flush = |x: f32| if x.is_subnormal() { 0.0f32.copysign(x) } else { x };
    let ([a_low, a_high], [b_low, b_high]) = (a.widen().map(flush), b.widen().map(flush));
    let sum = flush(a_high.mul_add(b_high, flush(sum)));
    flush(a_low.mul_add(b_low, sum))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::pack::{prefetch, transpose8};
    use super::{LANES, MR, NR, Pair, RUN, Rows, Transpose};
    use half::bf16;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2")]
    pub fn interleave_avx2<const W: usize>(
        low: &[bf16],
        high: Option<&[bf16]>,
        out: &mut [Pair],
        panel_len: usize,
    ) {
        super::interleave_panels::<W>(low, high, out, panel_len);
    }

    /// Puts pairs of rows into panels `panel_len` apart, a whole cache line at a time, which for panels of eight is two pairs.
    /// Gives the number of pairs that are done: up to three rows may be left.
    ///
    /// # Safety
    /// The rows are readable and `out` is writable for all pairs of their panels, the last one filled up.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn interleave_whole<const W: usize>(
        rows: Rows<'_, bf16>,
        out: *mut Pair,
        panel_len: usize,
    ) -> usize {
        let together = if W == 8 { 2 } else { 1 };
        let pairs = rows.rows / (2 * together) * together;
        for pair in (0..pairs).step_by(together) {
            // SAFETY: `2·together` rows and their pairs, by the caller's promise.
            unsafe {
                let (row, out) = (rows.data.as_ptr().add(2 * pair * rows.stride), out.add(pair * W));
                match W {
                    8 => two_pairs_of_eight(rows, row, out, panel_len),
                    _ => pair_of_48(rows, row, out, panel_len),
                }
            }
        }
        pairs
    }

    /// The mask of the first `count` elements of a register, of all 32 if there are more.
    fn first_of(count: usize) -> u32 {
        1u32.checked_shl(count as u32).map_or(!0, |bit| bit - 1)
    }

    /// The elements of two registers side by side: those from the lower halves, and those from the upper ones.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn zip(low: __m512i, high: __m512i) -> [__m512i; 2] {
        // Within 128 bits first; then the quarters that belong together.
        let (first, second) = (_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high));
        let lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        let upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        [_mm512_permutex2var_epi64(first, lower, second), _mm512_permutex2var_epi64(first, upper, second)]
    }

    /// # Safety
    /// See [`interleave_whole`]: of two rows.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn pair_of_48(rows: Rows<'_, bf16>, row: *const bf16, out: *mut Pair, panel_len: usize) {
        for (panel, column) in (0..rows.len).step_by(48).enumerate() {
            let left = rows.len - column;
            // SAFETY: masked to what the rows have; a whole panel is writable.
            unsafe {
                let load = |k: usize, first: usize, mask: u32| {
                    let at = row.wrapping_add(k * rows.stride + column + first);
                    prefetch(at.wrapping_add(2 * rows.stride));
                    _mm512_maskz_loadu_epi16(mask, at.cast())
                };
                let (whole, half) = (first_of(left), first_of(left.saturating_sub(32)) & 0xFFFF);
                let [first, second] = zip(load(0, 0, whole), load(1, 0, whole));
                let [third, _] = zip(load(0, 32, half), load(1, 32, half));
                let out = out.add(panel * panel_len);
                _mm512_storeu_si512(out.cast(), first);
                _mm512_storeu_si512(out.add(16).cast(), second);
                _mm512_storeu_si512(out.add(32).cast(), third);
            }
        }
    }

    /// # Safety
    /// See [`interleave_whole`]: of four rows.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn two_pairs_of_eight(rows: Rows<'_, bf16>, row: *const bf16, out: *mut Pair, panel_len: usize) {
        for column in (0..rows.len).step_by(32) {
            let left = rows.len - column;
            let mask = first_of(left);
            // SAFETY: masked to what the rows have; the panels that have an element are writable.
            unsafe {
                let load = |k: usize| {
                    prefetch(row.wrapping_add((k + 4) * rows.stride + column));
                    _mm512_maskz_loadu_epi16(mask, row.wrapping_add(k * rows.stride + column).cast())
                };
                let (first, second) = (zip(load(0), load(1)), zip(load(2), load(3)));
                let lines = [
                    _mm512_shuffle_i64x2::<0x44>(first[0], second[0]),
                    _mm512_shuffle_i64x2::<0xEE>(first[0], second[0]),
                    _mm512_shuffle_i64x2::<0x44>(first[1], second[1]),
                    _mm512_shuffle_i64x2::<0xEE>(first[1], second[1]),
                ];
                for (panel, line) in lines.into_iter().enumerate().take(left.div_ceil(8)) {
                    let out = out.add((column / 8 + panel) * panel_len);
                    _mm512_storeu_si512(out.cast(), line);
                }
            }
        }
    }

    /// Transposes `block` for the first `whole` k, a multiple of [`RUN`]: a pair moves as one 32-bit lane.
    ///
    /// # Safety
    /// `whole` elements of every row are readable, `out` is writable up to the last store.
    #[target_feature(enable = "avx2")]
    pub unsafe fn transpose(block: Transpose, whole: usize, source: *const bf16, out: *mut Pair) {
        let zeros = [bf16::ZERO; RUN];
        for k in (0..whole).step_by(RUN) {
            // SAFETY: in bounds by the caller's promise; missing rows read the zeros.
            let rows: [__m256; 8] = std::array::from_fn(|i| unsafe {
                let at = if i < block.rows { source.add(i * block.row_stride + k) } else { zeros.as_ptr() };
                _mm256_castsi256_ps(_mm256_loadu_si256(at.cast()))
            });
            for (i, column) in transpose8(rows).into_iter().enumerate() {
                // SAFETY: in bounds by the caller's promise.
                unsafe { _mm256_storeu_ps(out.add((k / 2 + i) * block.width).cast(), column) };
            }
        }
    }

    /// What [`transpose_to_8`] and [`transpose_to_48`] take of a row at a time: sixteen pairs.
    const DEPTH: usize = 32;

    /// Pairs `k / 2` and on of `R` rows; of those that there are not, zeros.
    ///
    /// # Safety
    /// The rows are readable.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    unsafe fn load_rows<const R: usize>(rows: Rows<'_, bf16>, first: usize, k: usize) -> [__m512i; R] {
        let (source, mask) = (rows.data.as_ptr(), first_of(rows.len - k));
        let mut registers = [_mm512_setzero_si512(); R];
        for (i, register) in registers.iter_mut().enumerate().take(rows.rows.saturating_sub(first)) {
            // SAFETY: masked to what the row has.
            *register =
                unsafe { _mm512_maskz_loadu_epi16(mask, source.add((first + i) * rows.stride + k).cast()) };
            prefetch(source.wrapping_add((first + R + i) * rows.stride + k));
        }
        registers
    }

    /// Of four rows: pairs `c`, `4 + c`, `8 + c` and `12 + c`, in the 128 bits of register c.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn transpose_quads(r: &[__m512i; 4]) -> [__m512i; 4] {
        let (low01, high01) = (_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
        let (low23, high23) = (_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
        [
            _mm512_unpacklo_epi64(low01, low23),
            _mm512_unpackhi_epi64(low01, low23),
            _mm512_unpacklo_epi64(high01, high23),
            _mm512_unpackhi_epi64(high01, high23),
        ]
    }

    /// Packs rows whose k is contiguous into panels of 48, zeros after the last row and pair.
    ///
    /// # Safety
    /// The rows are readable; `out` is writable for whole panels.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn transpose_to_48(rows: Rows<'_, bf16>, out: *mut Pair) {
        const WIDTH: usize = 48;
        let pairs = Pair::count(rows.len);
        for first in (0..rows.rows.next_multiple_of(WIDTH)).step_by(16) {
            let panel = first / WIDTH * WIDTH;
            for k in (0..rows.len).step_by(DEPTH) {
                // SAFETY: the caller's promise; stores are of pairs that there are.
                unsafe {
                    let out = out.add(panel * pairs + first - panel + k / 2 * WIDTH);
                    let r = load_rows::<16>(rows, first, k);
                    let quads: [[__m512i; 4]; 4] = [
                        transpose_quads(&[r[0], r[1], r[2], r[3]]),
                        transpose_quads(&[r[4], r[5], r[6], r[7]]),
                        transpose_quads(&[r[8], r[9], r[10], r[11]]),
                        transpose_quads(&[r[12], r[13], r[14], r[15]]),
                    ];
                    let mut columns = [_mm512_setzero_si512(); 16];
                    for c in 0..4 {
                        let even01 = _mm512_shuffle_i32x4::<0x88>(quads[0][c], quads[1][c]);
                        let even23 = _mm512_shuffle_i32x4::<0x88>(quads[2][c], quads[3][c]);
                        let odd01 = _mm512_shuffle_i32x4::<0xDD>(quads[0][c], quads[1][c]);
                        let odd23 = _mm512_shuffle_i32x4::<0xDD>(quads[2][c], quads[3][c]);
                        columns[c] = _mm512_shuffle_i32x4::<0x88>(even01, even23);
                        columns[c + 4] = _mm512_shuffle_i32x4::<0x88>(odd01, odd23);
                        columns[c + 8] = _mm512_shuffle_i32x4::<0xDD>(even01, even23);
                        columns[c + 12] = _mm512_shuffle_i32x4::<0xDD>(odd01, odd23);
                    }
                    for (i, column) in columns.into_iter().enumerate().take(pairs - k / 2) {
                        _mm512_storeu_si512(out.add(i * WIDTH).cast(), column);
                    }
                }
            }
        }
    }

    /// As [`transpose_to_48`], into panels of 8: two pairs of them are a cache line.
    ///
    /// # Safety
    /// As there.
    #[target_feature(enable = "avx512f,avx512bw")]
    pub unsafe fn transpose_to_8(rows: Rows<'_, bf16>, out: *mut Pair) {
        const WIDTH: usize = 8;
        let pairs = Pair::count(rows.len);
        for first in (0..rows.rows).step_by(WIDTH) {
            for k in (0..rows.len).step_by(DEPTH) {
                // SAFETY: the caller's promise; stores are of pairs that there are.
                unsafe {
                    let out = out.add(first * pairs + k / 2 * WIDTH);
                    let r = load_rows::<8>(rows, first, k);
                    let (low, high) = (
                        transpose_quads(&[r[0], r[1], r[2], r[3]]),
                        transpose_quads(&[r[4], r[5], r[6], r[7]]),
                    );
                    let mut lines = [_mm512_setzero_si512(); 8];
                    for c in [0, 2] {
                        let half = |c: usize| {
                            (
                                _mm512_shuffle_i32x4::<0x44>(low[c], high[c]),
                                _mm512_shuffle_i32x4::<0xEE>(low[c], high[c]),
                            )
                        };
                        let (even, odd) = (half(c), half(c + 1));
                        lines[c / 2] = _mm512_shuffle_i32x4::<0x88>(even.0, odd.0);
                        lines[c / 2 + 2] = _mm512_shuffle_i32x4::<0xDD>(even.0, odd.0);
                        lines[c / 2 + 4] = _mm512_shuffle_i32x4::<0x88>(even.1, odd.1);
                        lines[c / 2 + 6] = _mm512_shuffle_i32x4::<0xDD>(even.1, odd.1);
                    }
                    let left = pairs - k / 2;
                    for (i, line) in lines.into_iter().enumerate().take(left.div_ceil(2)) {
                        let mask = if 2 * i + 1 < left { !0 } else { 0xFF };
                        _mm512_mask_storeu_epi32(out.add(2 * i * WIDTH).cast(), mask, line);
                    }
                }
            }
        }
    }

    /// # Safety
    /// See [`Micro::run`](super::Micro::run); the processor has the features.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn avx512bf16<const VECTORS: usize>(
        pairs: usize,
        mut a: *const Pair,
        mut b: *const Pair,
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        // SAFETY: every pointer stays within the panels and the tile, by the caller's promise; registers of pairs and of words
        // are the same 64 bytes.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; MR];
            for i in 0..MR {
                for v in 0..VECTORS {
                    prefetch(c.wrapping_add(i * stride + v * LANES));
                }
            }
            for _ in 0..pairs {
                let row: [__m512bh; VECTORS] =
                    std::array::from_fn(|v| std::mem::transmute(_mm512_loadu_si512(b.add(v * LANES).cast())));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let factor: __m512bh = std::mem::transmute(_mm512_set1_epi32((*a.add(i)).0 as i32));
                    for (sum, row) in sums.iter_mut().zip(row) {
                        *sum = _mm512_dpbf16_ps(*sum, row, factor);
                    }
                }
                a = a.add(MR);
                b = b.add(NR);
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let at = c.add(i * stride + v * LANES);
                    _mm512_storeu_ps(at, if add { _mm512_add_ps(_mm512_loadu_ps(at), sum) } else { sum });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::gemm::{Target, packed_len, product};

    /// Every instruction set, its pairs emulated; and those that have the instruction.
    fn isas() -> Vec<Isa> {
        let available = Isa::available();
        let emulated = available.iter().map(|isa| isa.with_emulated_pairs());
        emulated.chain(available.iter().copied().filter(|isa| isa.pairs().is_some())).collect()
    }

    fn bits(seed: u32) -> impl FnMut() -> u16 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as u16
        }
    }

    /// Where every element of a block ends up, for both ways to lie in memory.
    #[test]
    fn packed_pairs_are_where_they_belong() {
        for isa in isas() {
            for width in [8, 48] {
                for outer in [1, 7, 8, 9, 47, 48, 49, 100] {
                    for depth in [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 79] {
                        for contiguous in [false, true] {
                            check_packing(isa, width, (outer, depth), contiguous);
                        }
                    }
                }
            }
        }
    }

    fn check_packing(isa: Isa, width: usize, (outer, depth): (usize, usize), contiguous: bool) {
        // Rows are longer than the block, so that strides and sizes differ.
        let (outer_stride, depth_stride) = if contiguous { (depth + 3, 1) } else { (1, outer + 5) };
        let mut next = bits(7);
        let len = (outer - 1) * outer_stride + (depth - 1) * depth_stride + 1;
        let data: Vec<bf16> = (0..len).map(|_| bf16::from_bits(next())).collect();
        let pairs = Pair::count(depth);
        let mut packed = vec![Pair(0xDEAD_BEEF); packed_len(outer, width, pairs)];
        Panels { data: Floats::BF16(&data), outer, depth, outer_stride, depth_stride }.pack_pairs(
            isa,
            width,
            &mut packed,
        );
        for o in 0..outer.next_multiple_of(width) {
            for pair in 0..pairs {
                let at = |k: usize| {
                    let inside = o < outer && k < depth;
                    if inside { data[o * outer_stride + k * depth_stride] } else { bf16::ZERO }
                };
                let found = packed[o / width * width * pairs + pair * width + o % width];
                let expected = Pair::new(at(2 * pair), at(2 * pair + 1));
                assert_eq!(found, expected, "{} {width} {outer}x{depth} {contiguous} {o} {pair}", isa.name());
            }
        }
    }

    /// Small integers, so that every order of adding gives the same sum.
    #[test]
    fn pairs_give_the_product() {
        let value = |i: usize, k: usize| ((i * 7 + k * 5) % 11) as f32;
        for isa in isas() {
            let micro = Micro::of_pairs(isa).unwrap();
            for (rows, cols, depth) in
                [(1, 1, 1), (8, 48, 2), (8, 16, 5), (16, 80, 6), (7, 49, 9), (13, 100, 24), (16, 96, 17)]
            {
                let pack = |outer: usize, width: usize| {
                    let data: Vec<bf16> =
                        (0..outer * depth).map(|i| bf16::from_f32(value(i / depth, i % depth))).collect();
                    let mut packed = vec![Pair::ZERO; packed_len(outer, width, Pair::count(depth))];
                    let data = Floats::BF16(&data);
                    Panels { data, outer, depth, outer_stride: depth, depth_stride: 1 }.pack_pairs(
                        isa,
                        width,
                        &mut packed,
                    );
                    packed
                };
                let (a, b) = (pack(rows, micro.mr), pack(cols, micro.nr));
                let mut out = vec![1.0f32; rows * cols];
                let target = Target { pointer: out.as_mut_ptr(), stride: cols, add: true };
                // SAFETY: `out` holds rows of `cols` floats.
                unsafe { product(micro, (rows, cols, Pair::count(depth)), &a, &b, target) };
                for (at, found) in out.iter().enumerate() {
                    let sum: f32 = (0..depth).map(|k| value(at / cols, k) * value(at % cols, k)).sum();
                    assert_eq!(*found, 1.0 + sum, "{} {rows}x{cols}x{depth} at {at}", isa.name());
                }
            }
        }
    }

    /// The definition's order, its single rounding per product, and its zeros.
    #[test]
    fn one_lane() {
        let pair = |low: f32, high: f32| Pair::new(bf16::from_f32(low), bf16::from_f32(high));
        let one = pair(1.0, 1.0);
        // The product of the higher k comes first: added to 1 it is lost, and the lower one brings nothing back.
        let small = 2f32.powi(-24);
        assert_eq!(add_products(1.0, pair(0.0, small), one), 1.0);
        assert_eq!(add_products(small, pair(small, 1.0), one), 1.0);
        assert_eq!(add_products(small, pair(1.0, small), one), 1.0 + 2.0 * small);
        // A product is not rounded before it is added.
        let (x, y) = (1.0 + 2f32.powi(-7), 2f32.powi(-100));
        assert_eq!(add_products(-1.0, pair(0.0, x), pair(0.0, x)), 2f32.powi(-6) + 2f32.powi(-14));
        assert_eq!(add_products(0.0, pair(0.0, y), pair(0.0, y)), 0.0);
        assert_eq!(add_products(0.0, pair(f32::MIN_POSITIVE / 2.0, 0.0), pair(2f32.powi(100), 0.0)), 0.0);
        assert_eq!(add_products(f32::MIN_POSITIVE / 4.0, pair(0.0, 0.0), one), 0.0);
        assert_eq!(add_products(0.0, pair(f32::INFINITY, 0.0), one), f32::INFINITY);
        assert!(add_products(0.0, pair(f32::NAN, 0.0), one).is_nan());
    }

    /// What a processor does with any bits at all. Nothing depends on it but equal bits on different processors.
    #[test]
    #[ignore = "a question to the processor, not to this code"]
    #[cfg(target_arch = "x86_64")]
    fn the_instruction_is_as_defined() {
        let Some(isa) = Isa::available().into_iter().find(|isa| isa.pairs().is_some()) else {
            panic!("this processor has no AVX512-BF16");
        };
        let (native, emulated) = (Micro::of_pairs(isa).unwrap(), Micro::emulated());
        let mut next = bits(3);
        for round in 0..300 {
            let pairs = 1 + round % 9;
            // Rounds of any bits, and rounds of exponents near each other, where sums round.
            let mut pair = || {
                let mut half = || if round % 2 == 0 { next() } else { next() & 0x83FF | 0x3C00 };
                Pair(u32::from(half()) | u32::from(half()) << 16)
            };
            let a: Vec<Pair> = (0..8 * pairs).map(|_| pair()).collect();
            let b: Vec<Pair> = (0..48 * pairs).map(|_| pair()).collect();
            let run = |micro: Micro<Pair>| {
                let mut c = vec![0.5f32; 8 * 48];
                // SAFETY: whole panels and a whole tile.
                unsafe { micro.run(NR, pairs, a.as_ptr(), b.as_ptr(), (c.as_mut_ptr(), NR), round % 3 == 0) };
                c
            };
            for (i, (native, emulated)) in run(native).into_iter().zip(run(emulated)).enumerate() {
                let same = native.to_bits() == emulated.to_bits() || native.is_nan() && emulated.is_nan();
                assert!(same, "round {round}, element {i}: {native:e} instead of {emulated:e}");
            }
        }
    }
}
