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
//! For one row of a, rows of b are read one after the other, in the order of memory: it is memory that decides. For several, it
//! is what is loaded of a and unpacked of b. Then a few blocks of [`COLS`] rows of b take turns while the same blocks of a stay in the
//! first-level cache, and what is unpacked serves four rows of a; on AVX2 eight lanes at a time, to have registers for four
//! sums. Sums wait in memory in between, so that the bits of a row do not depend on its batch.
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
use super::vector::{LANES, sum_lanes};
use super::{Cpu, Isa, matmul};
use crate::check::{self, ProductDims};
use crate::quantized::BLOCK;
use crate::{MatmulSpec, QuantFormat, QuantizedMatmul, QuantizedView, Result, View, ViewMut};
use blocks::{COLS, Codes, Int4, Int8, PREPARED, ROWS, dots, unpack};

/// Columns of the result per task: two turns of rows of weights.
const TASK: usize = 2 * COLS;

impl QuantizedMatmul for Cpu {
    fn matmul_nt(&self, a: View<'_>, b: QuantizedView<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::quantized_matmul(a, b, &out);
        if dims.m == 0 || dims.n == 0 {
            return Ok(());
        }
        let (a, b, out) = (Floats::new(a), Rows::new(b), FloatsMut::new(out));
        let a_bytes = dims.m * dims.l.div_ceil(BLOCK) * PREPARED * size_of::<f32>();
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

    /// The blocks of `count` rows from row `n`.
    fn rows(self, n: usize, count: usize) -> &'a [u8] {
        &self.bytes[n * self.row_bytes..][..count * self.row_bytes]
    }

    /// Weights `start..start + out.len()` of row `n`; `start` is a multiple of [`BLOCK`].
    pub fn dequantize(self, isa: Isa, n: usize, start: usize, out: &mut [f32]) {
        assert!(start.is_multiple_of(BLOCK), "a run of weights begins with a block");
        let blocks = start / BLOCK..(start + out.len()).div_ceil(BLOCK);
        let bytes = self.format.block_bytes();
        let blocks = &self.rows(n, 1)[blocks.start * bytes..blocks.end * bytes];
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
    let a_packed = &mut shared.floats()[..dims.m * dims.l.div_ceil(BLOCK) * PREPARED];
    let prepare = |index: usize, elements: &mut [f32], offsets: &mut [f32]| {
        let (row, first) = (index % dims.m, index / dims.m * BLOCK);
        let count = BLOCK.min(dims.l - first);
        a.slice(row * dims.l + first, count).widen(isa, &mut elements[..count]);
        elements[count..].fill(0.0);
        blocks::prepare::<C>(elements, offsets);
    };
    if dims.m == 1 {
        let (elements, offsets) = a_packed.split_at_mut(dims.l.next_multiple_of(BLOCK));
        let pairs = elements.chunks_exact_mut(BLOCK).zip(offsets.chunks_exact_mut(PREPARED - BLOCK));
        pairs.enumerate().for_each(|(index, (elements, offsets))| prepare(index, elements, offsets));
    } else {
        for (index, block) in a_packed.chunks_exact_mut(PREPARED).enumerate() {
            let (elements, offsets) = block.split_at_mut(BLOCK);
            prepare(index, elements, offsets);
        }
    }
    let a_packed = &*a_packed;
    threads.run_ranges(dims.n, TASK, |cols, _| {
        let mut sums_mn = [[0.0; TASK]; ROWS];
        let mut lanes = [[[0.0; LANES]; ROWS]; COLS];
        for first in cols.clone().step_by(COLS) {
            let count = COLS.min(cols.end - first);
            dots::<C>(isa, a_packed, dims.m, b.rows(first, count), &mut lanes);
            for (j, lanes) in lanes[..count].iter().enumerate() {
                for (sums, lanes) in sums_mn[..dims.m].iter_mut().zip(lanes) {
                    sums[first - cols.start + j] = sum_lanes(*lanes);
                }
            }
        }
        for (m, sums) in sums_mn[..dims.m].iter().enumerate() {
            // SAFETY: these columns belong to this task.
            unsafe { out.write(isa, m * dims.n + cols.start, &sums[..cols.len()]) };
        }
    });
}
