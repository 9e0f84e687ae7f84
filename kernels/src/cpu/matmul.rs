//! Matrix products.
//!
//! The result is cut into tiles; a task packs the operands of its tile block by block of [`DEPTH`] and accumulates in
//! f32, in place when the result is f32 and in scratch otherwise. Packing twice what a shared panel would pack once
//! costs about `1/rows + 1/cols` of a tile's work and needs no barrier between threads.
//!
//! Tolerance against f64: `|error| ≤ L·ε·Σ|a·b|` with ε = 2⁻²⁴ in the worst case, about `√L·ε` of that in practice; plus
//! half a unit of the result's dtype.

use super::Cpu;
use super::floats::{Floats, FloatsMut};
use super::gemm::{self, Panels, Target, packed_len};
use super::quantized::Rows;
use super::thin;
use super::threads::{Carver, SCRATCH_BYTES};
use crate::check::{self, ProductDims};
use crate::{Matmul, MatmulSpec, Result, View, ViewMut};

/// Inner elements per block: a micro panel of b (16 columns) is 16 KiB and stays in the first-level cache.
const DEPTH: usize = 256;
/// Largest tile: its packed a (192 KiB) stays in a second-level cache.
const TILE_ROWS: usize = 192;
const TILE_COLS: usize = 480;
/// Smallest tile worth handing out.
const TILE_ROWS_MIN: usize = 48;
const TILE_COLS_MIN: usize = 96;
/// Columns of the widest panel of b.
const PANEL_COLS_MAX: usize = 48;

const _: () = assert!(
    4 * (packed_len(TILE_ROWS, 8, DEPTH)
        + packed_len(TILE_COLS, 48, DEPTH)
        + PANEL_COLS_MAX * DEPTH
        + TILE_ROWS * TILE_COLS
        + 64)
        <= SCRATCH_BYTES,
    "a tile fits the scratch"
);

impl Matmul for Cpu {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let dims = check::matmul(a, b, &out, spec);
        if dims.m == 0 || dims.n == 0 {
            return Ok(());
        }
        let (a, b, out) = (Floats::new(a), Floats::new(b), FloatsMut::new(out));
        if thin::applies(dims, spec) {
            thin::matmul(&self.threads, a, b, out, dims, spec.accumulate);
            return Ok(());
        }
        self.product(a, Right::Floats(b), out, dims, spec);
        Ok(())
    }
}

/// The right side of a product.
#[derive(Clone, Copy)]
pub enum Right<'a> {
    Floats(Floats<'a>),
    /// Its rows are columns of the product.
    Quantized(Rows<'a>),
}

/// A rectangle of the result.
#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    col: usize,
    rows: usize,
    cols: usize,
}

impl Cpu {
    /// `out (+)= op(a)·op(b)`, tile by tile.
    pub(super) fn product(
        &self,
        a: Floats<'_>,
        b: Right<'_>,
        out: FloatsMut<'_>,
        dims: ProductDims,
        spec: MatmulSpec,
    ) {
        let (mr, nr) = (self.threads.micro().mr, self.threads.micro().nr);
        let (tile_rows, tile_cols) = tile_size(dims, self.threads.count(), mr, nr);
        let across = dims.n.div_ceil(tile_cols);
        self.threads.run(dims.m.div_ceil(tile_rows) * across, |task, scratch| {
            let (row, col) = (task / across * tile_rows, task % across * tile_cols);
            let tile =
                Tile { row, col, rows: tile_rows.min(dims.m - row), cols: tile_cols.min(dims.n - col) };
            self.tile(a, b, out, dims, spec, tile, scratch);
        });
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of the operation")]
    fn tile(
        &self,
        a: Floats<'_>,
        b: Right<'_>,
        out: FloatsMut<'_>,
        dims: ProductDims,
        spec: MatmulSpec,
        tile: Tile,
        scratch: &mut [f32],
    ) {
        let (isa, micro) = (self.threads.isa(), self.threads.micro());
        let mut carver = Carver::new(scratch);
        let a_packed = carver.take(packed_len(tile.rows, micro.mr, DEPTH));
        let b_packed = carver.take(packed_len(tile.cols, micro.nr, DEPTH));
        let wide = carver.take(if matches!(b, Right::Quantized(_)) { micro.nr * DEPTH } else { 0 });
        let (pointer, stride, sums) = if let FloatsMut::F32(out) = out {
            (out.pointer(tile.row * dims.n + tile.col), dims.n, None)
        } else {
            let sums = carver.take(tile.rows * tile.cols);
            (sums.as_mut_ptr(), tile.cols, Some(sums))
        };
        // An empty inner size still writes zeros.
        for start in (0..dims.l.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(dims.l - start);
            operand(a, (tile.row, tile.rows), (start, depth), dims.m, dims.l, !spec.trans_a)
                .pack(isa, micro.mr, a_packed);
            let (cols, block) = ((tile.col, tile.cols), (start, depth));
            match b {
                Right::Floats(b) => {
                    operand(b, cols, block, dims.n, dims.l, spec.trans_b).pack(isa, micro.nr, b_packed);
                }
                Right::Quantized(b) => b.pack(isa, micro.nr, cols, block, wide, b_packed),
            }
            let target = Target { pointer, stride, add: spec.accumulate || start > 0 };
            // SAFETY: the tile lies in the result or in this thread's scratch, and tiles do not overlap.
            unsafe { gemm::product(micro, (tile.rows, tile.cols, depth), a_packed, b_packed, target) };
        }
        if let Some(sums) = sums {
            for (i, row) in sums.chunks_exact(tile.cols).enumerate() {
                // SAFETY: elements of this tile.
                unsafe { out.write(isa, (tile.row + i) * dims.n + tile.col, row) };
            }
        }
    }
}

/// Rows `first.0..+first.1` of the outer dimension and `block.0..+block.1` of the inner one; `inner_contiguous` tells
/// which of the two is stored last.
fn operand(
    data: Floats<'_>,
    (first, outer): (usize, usize),
    (start, depth): (usize, usize),
    outer_size: usize,
    inner_size: usize,
    inner_contiguous: bool,
) -> Panels<'_> {
    let (outer_stride, depth_stride) = if inner_contiguous { (inner_size, 1) } else { (1, outer_size) };
    let at = if depth == 0 { 0 } else { first * outer_stride + start * depth_stride };
    Panels { data: data.slice(at, data.len() - at), outer, depth, outer_stride, depth_stride }
}

/// Tiles of nearly equal size, whole micro tiles, enough of them to keep every thread busy. The bits of the result do
/// not depend on the choice (see [`gemm`]), which is why the number of threads may take part in it.
fn tile_size(dims: ProductDims, threads: usize, mr: usize, nr: usize) -> (usize, usize) {
    let even = |size: usize, most: usize, unit: usize| {
        size.div_ceil(size.div_ceil(most)).next_multiple_of(unit).min(most)
    };
    let (mut rows_most, mut cols_most) = (TILE_ROWS, TILE_COLS);
    loop {
        let (rows, cols) = (even(dims.m, rows_most, mr), even(dims.n, cols_most, nr));
        let tiles = dims.m.div_ceil(rows) * dims.n.div_ceil(cols);
        if tiles >= 4 * threads || threads == 1 || cols_most == TILE_COLS_MIN && rows_most == TILE_ROWS_MIN {
            return (rows, cols);
        }
        if cols_most > TILE_COLS_MIN && cols_most >= rows_most {
            cols_most = (cols_most / 2).next_multiple_of(48).max(TILE_COLS_MIN);
        } else {
            rows_most = (rows_most / 2).next_multiple_of(24).max(TILE_ROWS_MIN);
        }
    }
}
