//! Packing: a block of an operand, widened to f32 and laid out as the innermost product reads it.
//!
//! `outer` is the dimension that stays in the result (rows of a, columns of b). A panel holds `width` of them for every
//! k: `[outer / width][k][width]`, the last panel filled up with zeros.

use crate::cpu::Isa;
use crate::cpu::floats::Floats;
use crate::cpu::isa::Level;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub(super) use x86::transpose8;

/// Floats that a store may write past the end of a packed block (see [`Transpose`]).
const SLACK: usize = 8;

/// Rows that are copied to a panel at a time: enough to fill lines whatever its width.
const ROWS_TOGETHER: usize = 8;

/// Words that a buffer needs for a packed block.
pub const fn packed_len(outer: usize, width: usize, depth: usize) -> usize {
    outer.next_multiple_of(width) * depth + SLACK
}

/// Words that packing writes, of a width of which no store leaves its panel.
pub const fn panels_len(outer: usize, width: usize, depth: usize) -> usize {
    outer.next_multiple_of(width) * depth + if width < SLACK { SLACK } else { 0 }
}

/// A block to pack: element `(o, k)` lies at `o·outer_stride + k·depth_stride` of `data`; one of the strides is 1.
#[derive(Clone, Copy)]
pub struct Panels<'a> {
    pub data: Floats<'a>,
    pub outer: usize,
    pub depth: usize,
    pub outer_stride: usize,
    pub depth_stride: usize,
}

impl Panels<'_> {
    /// The same elements with the roles of the dimensions exchanged.
    pub fn turned(self) -> Self {
        Self {
            outer: self.depth,
            depth: self.outer,
            outer_stride: self.depth_stride,
            depth_stride: self.outer_stride,
            ..self
        }
    }

    /// Packs into panels of `width`.
    ///
    /// # Panics
    /// If `packed` is shorter than [`panels_len`] or the block reaches past the data.
    pub fn pack(self, isa: Isa, width: usize, packed: &mut [f32]) {
        if self.outer == 0 || self.depth == 0 {
            return;
        }
        let last = (self.outer - 1) * self.outer_stride + (self.depth - 1) * self.depth_stride;
        assert!(last < self.data.len(), "element {last} of a block lies within {}", self.data.len());
        assert!(packed.len() >= panels_len(self.outer, width, self.depth), "a packed block fits its buffer");
        match self.data {
            Floats::F32(data) => self.pack_typed(isa, data, width, packed),
            Floats::BF16(data) => self.pack_typed(isa, data, width, packed),
            Floats::F16(data) => self.pack_typed(isa, data, width, packed),
        }
    }

    fn pack_typed<T: Element>(self, isa: Isa, data: &[T], width: usize, packed: &mut [f32]) {
        if self.outer_stride == 1 {
            match width {
                4 => self.copy::<T, 4>(isa, data, packed),
                6 => self.copy::<T, 6>(isa, data, packed),
                8 => self.copy::<T, 8>(isa, data, packed),
                16 => self.copy::<T, 16>(isa, data, packed),
                48 => self.copy::<T, 48>(isa, data, packed),
                _ => unreachable!("panels are as wide as a micro tile"),
            }
        } else {
            assert_eq!(self.depth_stride, 1, "one dimension of an operand is contiguous");
            self.transpose(isa, data, width, packed);
        }
    }

    /// The outer dimension is contiguous: each k gives a run of `W` elements to every panel. A few k at a time are copied to
    /// one panel after the other: whole cache lines at a time are written, since lines of all panels tend to fall into few sets
    /// of the first-level cache.
    fn copy<T: Element, const W: usize>(self, isa: Isa, data: &[T], packed: &mut [f32]) {
        let panel_len = W * self.depth;
        for k in (0..self.depth).step_by(ROWS_TOGETHER) {
            let rows = ROWS_TOGETHER.min(self.depth - k);
            let source = Rows {
                data: &data[k * self.depth_stride..],
                rows,
                stride: self.depth_stride,
                len: self.outer,
            };
            copy_rows::<T, W>(isa, source, &mut packed[k * W..], panel_len);
        }
    }

    /// k is contiguous: each panel is a transpose.
    fn transpose<T: Element>(self, isa: Isa, data: &[T], width: usize, packed: &mut [f32]) {
        for first in (0..self.outer).step_by(width) {
            let rows = width.min(self.outer - first);
            let source = &data[first * self.outer_stride..];
            let panel = &mut packed[first * self.depth..];
            for group in (0..width).step_by(8) {
                let block = Transpose {
                    rows: rows.saturating_sub(group).min(8),
                    row_stride: self.outer_stride,
                    depth: self.depth,
                    width,
                };
                let source = if block.rows == 0 { &[] } else { &source[group * self.outer_stride..] };
                block.run(isa, source, &mut panel[group..]);
            }
        }
    }
}

/// Up to eight rows of one panel, transposed.
///
/// Eight floats are stored per k whatever the width. If a panel is narrower than that, a store spills into the next k or
/// the next panel, both of which are written later, or into the [`SLACK`] at the end.
#[derive(Clone, Copy)]
struct Transpose {
    rows: usize,
    row_stride: usize,
    depth: usize,
    width: usize,
}

impl Transpose {
    fn run<T: Element>(self, isa: Isa, source: &[T], out: &mut [f32]) {
        let whole = match isa.level() {
            Level::Generic => 0,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::Avx512 => {
                let whole = self.depth / 8 * 8;
                if self.rows > 0 && whole > 0 {
                    assert!((self.rows - 1) * self.row_stride + whole <= source.len());
                    assert!((whole - 1) * self.width + 8 <= out.len());
                }
                // SAFETY: the processor has AVX2 and F16C; loads and stores are in bounds (asserted).
                unsafe { x86::transpose(self, whole, source.as_ptr(), out.as_mut_ptr()) };
                whole
            }
        };
        for k in whole..self.depth {
            for lane in 0..self.width.min(8) {
                out[k * self.width + lane] =
                    if lane < self.rows { source[lane * self.row_stride + k].widen() } else { 0.0 };
            }
        }
    }
}

/// An element that packing widens.
pub trait Element: Copy {
    /// Zero.
    const ZERO: Self;

    /// As f32, exactly.
    fn widen(self) -> f32;

    /// Eight elements as f32.
    ///
    /// # Safety
    /// Eight elements are readable; the processor has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load8(at: *const Self) -> std::arch::x86_64::__m256;
}

/// Some rows of `len` elements.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, T> {
    pub(super) data: &'a [T],
    pub(super) rows: usize,
    pub(super) stride: usize,
    pub(super) len: usize,
}

/// Copies rows into the panels that `panel_len` separates, with zeros after their ends.
#[inline(always)]
fn copy_panels<T: Element, const W: usize>(source: Rows<'_, T>, out: &mut [f32], panel_len: usize) {
    let Rows { data, rows, stride, len } = source;
    for first in (0..len).step_by(W) {
        let out = &mut out[first / W * panel_len..][..rows * W];
        for (row, out) in out.as_chunks_mut::<W>().0.iter_mut().enumerate() {
            let at = row * stride + first;
            prefetch(data.as_ptr().wrapping_add(at + ROWS_TOGETHER * stride));
            if let Some(run) = data[at..row * stride + len].first_chunk::<W>() {
                for (out, x) in out.iter_mut().zip(run) {
                    *out = x.widen();
                }
            } else {
                out.fill(0.0);
                for (out, x) in out.iter_mut().zip(&data[at..row * stride + len]) {
                    *out = x.widen();
                }
            }
        }
    }
}

/// Asks for the line of an address, which need not be one of the program's. What lies in another page, as the next rows do, is
/// what the processor does not fetch ahead by itself.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has the instruction, which reads nothing that the program could see.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// [`copy_panels`] compiled for `isa`; written out because `multiversion!` takes no type parameters.
fn copy_rows<T: Element, const W: usize>(isa: Isa, source: Rows<'_, T>, out: &mut [f32], panel_len: usize) {
    match isa.level() {
        Level::Generic => copy_panels::<T, W>(source, out, panel_len),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` exists only when the processor has its instructions.
        Level::Avx2 | Level::Avx512 => unsafe { x86::copy_rows::<T, W>(source, out, panel_len) },
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Element, Rows, Transpose, prefetch};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn copy_rows<T: Element, const W: usize>(source: Rows<'_, T>, out: &mut [f32], panel_len: usize) {
        super::copy_panels::<T, W>(source, out, panel_len);
    }

    /// Transposes `block` for the first `whole` k, a multiple of eight.
    ///
    /// # Safety
    /// `whole` elements of every row are readable, `out` is writable up to the last store.
    #[target_feature(enable = "avx2,f16c")]
    pub unsafe fn transpose<T: Element>(block: Transpose, whole: usize, source: *const T, out: *mut f32) {
        let zeros = [T::ZERO; 8];
        for k in (0..whole).step_by(8) {
            // SAFETY: in bounds by the caller's promise; missing rows read the zeros.
            let rows: [__m256; 8] = std::array::from_fn(|i| unsafe {
                let at = if i < block.rows { source.add(i * block.row_stride + k) } else { zeros.as_ptr() };
                prefetch(source.wrapping_add((i + block.width.min(8)) * block.row_stride + k));
                T::load8(at)
            });
            for (i, column) in transpose8(rows).into_iter().enumerate() {
                // SAFETY: in bounds by the caller's promise.
                unsafe { _mm256_storeu_ps(out.add((k + i) * block.width), column) };
            }
        }
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    pub fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
        let pairs: [__m256; 8] = std::array::from_fn(|i| {
            let (a, b) = (r[i / 2 * 2], r[i / 2 * 2 + 1]);
            if i % 2 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
        });
        let quads: [__m256; 8] = std::array::from_fn(|i| {
            let (half, kind, high) = (i / 4 * 4, i % 4 / 2, i % 2 == 1);
            let (a, b) = (pairs[half + kind], pairs[half + kind + 2]);
            if high { _mm256_shuffle_ps::<0xEE>(a, b) } else { _mm256_shuffle_ps::<0x44>(a, b) }
        });
        std::array::from_fn(|i| {
            let (a, b) = (quads[i % 4], quads[i % 4 + 4]);
            if i < 4 { _mm256_permute2f128_ps::<0x20>(a, b) } else { _mm256_permute2f128_ps::<0x31>(a, b) }
        })
    }
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load8(at: *const Self) -> std::arch::x86_64::__m256 {
        // SAFETY: the caller's promise.
        unsafe { std::arch::x86_64::_mm256_loadu_ps(at) }
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load8(at: *const Self) -> std::arch::x86_64::__m256 {
        use std::arch::x86_64::*;
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load8(at: *const Self) -> std::arch::x86_64::__m256 {
        use std::arch::x86_64::*;
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}
