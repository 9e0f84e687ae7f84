//! Products with quantized matrices.
//!
//! Weights are dequantized exactly, in registers or on their way into a packed panel, so that the result has the bits of
//! the product with the dequantized f32 matrix (for an inner size that is a multiple of 16; a last incomplete run is
//! added first there and last here). The order of additions is that of [`thin`](super::thin) for few rows and of
//! [`gemm`](super::gemm) for many, and does not depend on the number of threads.
//!
//! **Few rows.** A decoding step is bound by reading the weights, which a core must unpack as fast as memory gives them; int4
//! has four bits for each mask, conversion, scaling and multiply-add. Several rows of b at once keep enough sums independent.

mod blocks;

use super::floats::{Floats, FloatsMut};
use super::gemm::Panels;
use super::threads::{SHARED_BYTES, Threads};
use super::{Cpu, Isa, matmul};
use crate::check::{self, ProductDims};
use crate::quantized::BLOCK;
use crate::{MatmulSpec, QuantFormat, QuantizedMatmul, QuantizedView, Result, View, ViewMut};
use blocks::{Codes, Int4, Int8, Strided, dots, unpack};
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
        let a_bytes = dims.m * dims.l.next_multiple_of(BLOCK) * size_of::<f32>();
        if dims.m <= ROWS && dims.l > 0 && a_bytes <= SHARED_BYTES {
            few(&self.threads, a, b, out, dims);
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
fn few(threads: &Threads, a: Floats<'_>, b: Rows<'_>, out: FloatsMut<'_>, dims: ProductDims) {
    let isa = threads.isa();
    let mut shared = threads.shared();
    let width = dims.l.next_multiple_of(BLOCK);
    let a_ml = &mut shared.floats()[..dims.m * width];
    for (m, row) in a_ml.chunks_exact_mut(width).enumerate() {
        let (row, padding) = row.split_at_mut(dims.l);
        a.slice(m * dims.l, dims.l).widen(isa, row);
        padding.fill(0.0);
    }
    let a_ml = &*a_ml;
    threads.run_ranges(dims.n, COLS, |cols, _| {
        let mut sums_mn = [[0.0; COLS]; ROWS];
        match b.format {
            QuantFormat::Int8 => columns::<Int8>(isa, a_ml, dims.m, b, cols.clone(), &mut sums_mn),
            QuantFormat::Int4 => columns::<Int4>(isa, a_ml, dims.m, b, cols.clone(), &mut sums_mn),
        }
        for (m, sums) in sums_mn[..dims.m].iter().enumerate() {
            // SAFETY: these columns belong to this task.
            unsafe { out.write(isa, m * dims.n + cols.start, &sums[..cols.len()]) };
        }
    });
}

/// `sums[m][j] = Σ_l a[m, l]·b[cols.start + j, l]`.
fn columns<C: Codes>(
    isa: Isa,
    a_ml: &[f32],
    m: usize,
    b: Rows<'_>,
    cols: Range<usize>,
    sums: &mut [[f32; COLS]; ROWS],
) {
    let width = a_ml.len() / m;
    let mut first = 0;
    while first < m {
        let a_ml = &a_ml[first * width..];
        let sums = &mut sums[first..];
        first += match m - first {
            1 => block_of::<C, 4, 1>(isa, a_ml, width, b, cols.clone(), sums),
            2..4 => block_of::<C, 2, 2>(isa, a_ml, width, b, cols.clone(), sums),
            _ => block_of::<C, 1, 4>(isa, a_ml, width, b, cols.clone(), sums),
        };
    }
}

/// The first `M` rows of a with all columns, `R` at a time. Returns `M`.
fn block_of<C: Codes, const R: usize, const M: usize>(
    isa: Isa,
    a_ml: &[f32],
    width: usize,
    b: Rows<'_>,
    cols: Range<usize>,
    sums: &mut [[f32; COLS]],
) -> usize {
    let mut done = 0;
    while done < cols.len() {
        let rows = Strided { blocks: &b.bytes[(cols.start + done) * b.row_bytes..], row_bytes: b.row_bytes };
        if cols.len() - done >= R {
            for (r, found) in dots::<C, R, M>(isa, a_ml, width, rows).iter().enumerate() {
                (0..M).for_each(|m| sums[m][done + r] = found[m]);
            }
            done += R;
        } else {
            let [found] = dots::<C, 1, M>(isa, a_ml, width, rows);
            (0..M).for_each(|m| sums[m][done] = found[m]);
            done += 1;
        }
    }
    M
}
