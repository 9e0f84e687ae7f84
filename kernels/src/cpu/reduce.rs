//! Sums over rows: the gradients of biases and of normalization weights.
//!
//! Rows are cut into parts by shape alone; each part is summed in row order, and the parts are added in order. The number
//! of parts is bounded by the shared scratch that holds their sums.

use super::Cpu;
use super::floats::{Floats, floats_mut};
use super::threads::{SHARED_BYTES, SharedMut, Threads};
use super::vector;
use crate::check::{self, RowDims};
use crate::{Reduce, Result, View, ViewMut};
use std::ops::Range;

/// Columns per task.
pub const COLS: usize = 128;
/// Rows per part, unless that gives too many parts.
const PART_ROWS: usize = 256;
const PARTS_MAX: usize = 32;

/// A block of rows and columns to be summed.
#[derive(Clone, Copy)]
pub struct Block {
    pub first_row: usize,
    pub rows: usize,
    pub first_col: usize,
    pub cols: usize,
}

impl Block {
    pub fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.rows
    }
}

/// `out[d] += Σ_r term(r, d)`: `add(block, sums)` adds the terms of a block to its zeroed `sums`, rows in order.
pub fn sum(threads: &Threads, dims: RowDims, out: &mut [f32], add: impl Fn(Block, &mut [f32]) + Sync) {
    if dims.rows == 0 || dims.width == 0 {
        return;
    }
    let fit = SHARED_BYTES / size_of::<f32>() / dims.width;
    let parts = dims.rows.div_ceil(PART_ROWS).min(PARTS_MAX).min(fit).max(1);
    let part_rows = dims.rows.div_ceil(parts);
    let parts = dims.rows.div_ceil(part_rows);
    let chunks = dims.width.div_ceil(COLS);
    let block = |part: usize, chunk: usize| Block {
        first_row: part * part_rows,
        rows: part_rows.min(dims.rows - part * part_rows),
        first_col: chunk * COLS,
        cols: COLS.min(dims.width - chunk * COLS),
    };
    let isa = threads.isa();
    if parts == 1 {
        let out = SharedMut::new(out);
        threads.run(chunks, |chunk, _| {
            let block = block(0, chunk);
            let mut sums = [0.0; COLS];
            add(block, &mut sums[..block.cols]);
            // SAFETY: these columns belong to this task.
            vector::add_assign(isa, unsafe { out.slice(block.first_col, block.cols) }, &sums[..block.cols]);
        });
        return;
    }
    let mut shared = threads.shared();
    let partial = &mut shared.floats()[..parts * dims.width];
    partial.fill(0.0);
    {
        let partial = SharedMut::new(partial);
        threads.run(parts * chunks, |task, _| {
            let (part, block) = (task / chunks, block(task / chunks, task % chunks));
            // SAFETY: this part's sums of these columns belong to this task.
            add(block, unsafe { partial.slice(part * dims.width + block.first_col, block.cols) });
        });
    }
    for sums in partial.chunks_exact(dims.width) {
        vector::add_assign(isa, out, sums);
    }
}

impl Reduce for Cpu {
    /// Tolerance against f64: `R·2⁻²⁴·Σ|x|`, far less in practice since parts are short.
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::sum_rows(x, &out);
        let (x, isa) = (Floats::new(x), self.threads.isa());
        sum(&self.threads, dims, floats_mut(out), |block, sums| {
            let mut buffer = [0.0; COLS];
            for r in block.rows() {
                let row = x.read(isa, r * dims.width + block.first_col, block.cols, &mut buffer);
                vector::add_assign(isa, sums, row);
            }
        });
        Ok(())
    }
}
