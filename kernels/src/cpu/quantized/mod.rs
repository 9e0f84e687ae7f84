//! Products with quantized matrices.
//!
//! Sums are f32; activations are not quantized. The order of additions depends on the inner size alone.
//!
//! **Few rows.** A decoding step is bound by reading the weights, which a core must unpack as fast as memory gives them. Codes
//! are multiplied as they are, and only the sums of a group by its scale: int4 needs a mask, a conversion and a
//! multiply-add for every four bytes, nothing more. Its mask leaves codes `16ᵍ·(q + 8)`; the powers of two go to the
//! activations, once for all rows of b, and so does `−8·Σa`, with which the sum of a group begins:
//!
//! `out[m, n] = Σ_groups s·(−8·Σ_g a + Σ_g (q + 8)·a)`, sixteen lanes added pairwise at the end.
//!
//! Rows of b are read one after the other, in the order of memory. Two rows at a time would halve what is loaded of a, which
//! exceeds the first-level cache from about 5000 columns on, and the same columns of many rows would keep it there; but the
//! first was scheduled badly by the compiler, and the second reads memory in pieces too short for prefetching. Both were slower
//! or no faster.
//!
//! Beside the error of any f32 sum this has that of codes up to 15 instead of 8 in magnitude. Dequantizing in registers would
//! have the bits of the dense product, at five operations instead of three; it was two thirds as fast.
//!
//! **Many rows.** Weights are dequantized, exactly, into panels on their way to [`gemm`](super::gemm): the result has the bits of
//! the product with the dequantized f32 matrix.

mod blocks;

use super::floats::{Floats, FloatsMut};
use super::gemm::Panels;
use super::threads::{SHARED_BYTES, Threads};
use super::vector::sum_lanes;
use super::{Cpu, Isa, matmul};
use crate::check::{self, ProductDims};
use crate::quantized::BLOCK;
use crate::{MatmulSpec, QuantFormat, QuantizedMatmul, QuantizedView, Result, View, ViewMut};
use blocks::{Codes, Int4, Int8, dots, prepare, prepared_len, unpack};
use std::ops::Range;

/// Most rows of a that are multiplied without packing.
const ROWS: usize = 8;
/// Columns of the result per task.
const COLS: usize = 32;

impl QuantizedMatmul for Cpu {
    fn matmul_nt(&self, a: View<'_>, b: QuantizedView<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::quantized_matmul(a, b, &out);
        if dims.m == 0 || dims.n == 0 {
            return Ok(());
        }
        let (a, b, out) = (Floats::new(a), Rows::new(b), FloatsMut::new(out));
        let a_bytes = dims.m * prepared_len(dims.l.next_multiple_of(BLOCK)) * size_of::<f32>();
        if dims.m <= ROWS && dims.l > 0 && a_bytes <= SHARED_BYTES {
            match b.format {
                QuantFormat::Int8 => few::<Int8>(&self.threads, a, b, out, dims),
                QuantFormat::Int4 => few::<Int4>(&self.threads, a, b, out, dims),
            }
        } else {
            self.product(a, matmul::Right::Quantized(b), out, dims, MatmulSpec::NT);
        }
        Ok(())
    }
}

/// The rows of a quantized matrix.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    format: QuantFormat,
    row_bytes: usize,
}

impl<'a> Rows<'a> {
    fn new(view: QuantizedView<'a>) -> Self {
        let row_bytes = view.format().row_bytes(view.shape().last());
        Self { bytes: view.bytes().host(), format: view.format(), row_bytes }
    }

    /// Packs rows `first.0..+first.1`, weights `block.0..+block.1` of each, into panels of `width` as
    /// [`Panels::pack`](super::gemm::Panels::pack) does; `wide` holds the weights of a panel.
    pub fn pack(
        self,
        isa: Isa,
        width: usize,
        (first, count): (usize, usize),
        (start, depth): (usize, usize),
        wide: &mut [f32],
        packed: &mut [f32],
    ) {
        for panel in (0..count).step_by(width) {
            let outer = width.min(count - panel);
            let wide = &mut wide[..outer * depth];
            for (j, row) in wide.chunks_exact_mut(depth.max(1)).enumerate() {
                self.dequantize(isa, first + panel + j, start, row);
            }
            let data = Floats::F32(wide);
            Panels { data, outer, depth, outer_stride: depth, depth_stride: 1 }.pack(
                isa,
                width,
                &mut packed[panel * depth..],
            );
        }
    }

    /// The blocks of row `n`.
    fn row(self, n: usize) -> &'a [u8] {
        &self.bytes[n * self.row_bytes..][..self.row_bytes]
    }

    /// Weights `start..start + out.len()` of row `n`; `start` is a multiple of [`BLOCK`].
    pub fn dequantize(self, isa: Isa, n: usize, start: usize, out: &mut [f32]) {
        assert!(start.is_multiple_of(BLOCK), "a run of weights begins with a block");
        let blocks = start / BLOCK..(start + out.len()).div_ceil(BLOCK);
        let bytes = self.format.block_bytes();
        let blocks = &self.row(n)[blocks.start * bytes..blocks.end * bytes];
        match self.format {
            QuantFormat::Int8 => unpack::<Int8>(isa, blocks, out),
            QuantFormat::Int4 => unpack::<Int4>(isa, blocks, out),
        }
    }
}

/// `out[M, N] = a[M, L]·b[N, L]ᵀ` for few rows.
fn few<C: Codes>(threads: &Threads, a: Floats<'_>, b: Rows<'_>, out: FloatsMut<'_>, dims: ProductDims) {
    let isa = threads.isa();
    let mut shared = threads.shared();
    let width = dims.l.next_multiple_of(BLOCK);
    let a_ml = &mut shared.floats()[..dims.m * prepared_len(width)];
    for (m, row) in a_ml.chunks_exact_mut(prepared_len(width)).enumerate() {
        let (elements, padding) = row[..width].split_at_mut(dims.l);
        a.slice(m * dims.l, dims.l).widen(isa, elements);
        padding.fill(0.0);
        prepare::<C>(row, width);
    }
    let a_ml = &*a_ml;
    threads.run_ranges(dims.n, COLS, |cols, _| {
        let mut sums_mn = [[0.0; COLS]; ROWS];
        let mut m = 0;
        while m < dims.m {
            let (a_ml, sums) = (&a_ml[m * prepared_len(width)..], &mut sums_mn[m..]);
            m += if C::PAIRS && m + 1 < dims.m {
                columns::<C, 2>(isa, a_ml, width, b, cols.clone(), sums)
            } else {
                columns::<C, 1>(isa, a_ml, width, b, cols.clone(), sums)
            };
        }
        for (m, sums) in sums_mn[..dims.m].iter().enumerate() {
            // SAFETY: these columns belong to this task.
            unsafe { out.write(isa, m * dims.n + cols.start, &sums[..cols.len()]) };
        }
    });
}

/// `sums[m][j] = Σ_l a[m, l]·b[cols.start + j, l]` for the first `M` prepared rows. Returns `M`.
fn columns<C: Codes, const M: usize>(
    isa: Isa,
    a_ml: &[f32],
    width: usize,
    b: Rows<'_>,
    cols: Range<usize>,
    sums: &mut [[f32; COLS]],
) -> usize {
    for (j, n) in cols.enumerate() {
        for (sums, lanes) in sums.iter_mut().zip(dots::<C, M>(isa, a_ml, width, b.row(n))) {
            sums[j] = sum_lanes(lanes);
        }
    }
    M
}
