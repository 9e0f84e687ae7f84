//! Products with quantized matrices.
//!
//! The order of additions depends on the inner size alone.
//!
//! **Few rows.** A decoding step is bound by reading the weights, which a core must unpack as fast as memory gives them, and with
//! several rows by multiplying. Both are fastest in integers of sixteen bits, of which one instruction multiplies sixteen or 32
//! pairs and adds neighbours. So each block of 128 activations becomes integers below 2¹⁵ times a power of two, *block floating
//! point*: what is lost of an activation is at most 2⁻¹⁵ of the largest in its block, nothing at all for bf16 within 2⁷ of it,
//! where the rounding of bf16 to eight bits costs up to 2⁻⁹. A row of f32 becomes two: what the first loses is the second, which loses
//! 2⁻³⁰. Sums of a group are exact, then f32:
//!
//! `out[m, n] = Σ_blocks 2ᵉ·(Σ_groups s·(Σ_l q·a'))`, eight or sixteen lanes added pairwise at the end.
//!
//! int4 codes are masked where they lie, which leaves `16ᵏ·(q + 8)`, and `8·16ᵏ` is subtracted; the power of sixteen is in the
//! scale. mxfp4 codes are looked up by bytes, which leaves two signed bytes in each integer: the lower one is put into the upper half,
//! `2⁸·q`, the upper one is shifted down.
//!
//! For one row of a, rows of b are read one after the other, in the order of memory, by each thread those of its own part. For
//! several, some blocks of [`COLS`] rows of b take turns while the same blocks of four rows of a stay in the first-level cache, and
//! again for the next four. Sums wait in memory in between, so that the bits of a row do not depend on its batch. (All rows of a at
//! once, of fewer blocks, was a sixth slower with sixteen: sums were loaded and stored four times as often.)
//!
//! Before, codes were widened to f32 and multiplied as such, four instructions for eight codes where now it is nine for 32; with
//! activations of eight bits it would be five, at up to 2⁻⁸ of the largest.
//!
//! **Many rows.** Weights are dequantized, exactly, into panels on their way to [`gemm`](super::gemm): the result has the bits of
//! the product with the dequantized f32 matrix.

mod blocks;
mod dots;

use super::epilogue::Output;
use super::floats::Floats;
use super::gemm::Panels;
use super::threads::{SHARED_BYTES, Threads};
use super::vector::sum_lanes;
use super::{Cpu, Isa, matmul};
use crate::check::{self, ProductDims};
use crate::quantized::BLOCK;
use crate::{Epilogue, MatmulSpec, QuantFormat, QuantizedMatmul, QuantizedView, Result, View, ViewMut};
use blocks::{Int4, Int8, Mxfp4, unpack};
use dots::{Activations, COLS, LANES, Products, ROWS, dots};

/// Columns of the result per task: two turns of rows of weights.
const TASK: usize = 2 * COLS;

impl QuantizedMatmul for Cpu {
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result {
        let dims = check::quantized_matmul(a, b, &out, &epilogue);
        if dims.m == 0 || dims.n == 0 {
            return Ok(());
        }
        let (a, b, output) = (Floats::new(a), Rows::new(b), Output::new(out, dims.n, epilogue));
        let rows = dims.m * parts(a);
        let a_bytes = Activations::floats(rows, dims.l.div_ceil(BLOCK)) * size_of::<f32>();
        if rows <= ROWS && dims.l > 0 && a_bytes <= SHARED_BYTES {
            match b.format {
                QuantFormat::Int8 => few::<Int8>(&self.threads, a, b, output, dims),
                QuantFormat::Int4 => few::<Int4>(&self.threads, a, b, output, dims),
                QuantFormat::Mxfp4 => few::<Mxfp4>(&self.threads, a, b, output, dims),
            }
        } else {
            self.product(a, matmul::Right::Quantized(b), output, dims, MatmulSpec::NT);
        }
        Ok(())
    }
}

/// Rows of integers for a row of activations.
fn parts(a: Floats<'_>) -> usize {
    if matches!(a, Floats::F32(_)) { 2 } else { 1 }
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
            QuantFormat::Mxfp4 => unpack::<Mxfp4>(isa, blocks, out),
        }
    }
}

/// `output[M, N] = a[M, L]·b[N, L]ᵀ` for few rows.
fn few<C: Products>(threads: &Threads, a: Floats<'_>, b: Rows<'_>, output: Output<'_>, dims: ProductDims) {
    let isa = threads.isa();
    let mut shared = threads.shared();
    let (blocks, parts) = (dims.l.div_ceil(BLOCK), parts(a));
    let mut narrow = Activations::new(dims.m * parts, blocks, shared.floats());
    for row in 0..dims.m {
        for block in 0..blocks {
            let mut values = [0.0; BLOCK];
            let count = BLOCK.min(dims.l - block * BLOCK);
            a.slice(row * dims.l + block * BLOCK, count).widen(isa, &mut values[..count]);
            for part in 0..parts {
                narrow.set::<C>(isa, row * parts + part, block, &mut values);
            }
        }
    }
    let narrow = &narrow;
    threads.run_in_parts(dims.n.div_ceil(TASK), |task, _| {
        let cols = task * TASK..dims.n.min((task + 1) * TASK);
        let mut sums_mn = [[0.0; TASK]; ROWS];
        let mut lanes = [[[0.0; LANES]; ROWS]; COLS];
        for first in cols.clone().step_by(COLS) {
            let count = COLS.min(cols.end - first);
            dots::<C>(isa, narrow, b.rows(first, count), &mut lanes);
            for (j, lanes) in lanes[..count].iter().enumerate() {
                for (sums, lanes) in sums_mn[..dims.m].iter_mut().zip(lanes.chunks_exact(parts)) {
                    sums[first - cols.start + j] = lanes.iter().map(|lanes| sum_lanes(*lanes)).sum();
                }
            }
        }
        for (m, sums) in sums_mn[..dims.m].iter_mut().enumerate() {
            // SAFETY: these columns belong to this task.
            unsafe { output.write(isa, (m, cols.start), &mut sums[..cols.len()]) };
        }
    });
}
