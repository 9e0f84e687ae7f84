//! Columns of matrices.

use super::{Cuda, THREADS, VECTOR, aligned, operand};
use crate::{Columns, Result, View, ViewMut, check};

impl Columns for Cuda {
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_copy(x, from, &out, to, width);
        if dims.rows * width == 0 {
            return Ok(());
        }
        let element = x.dtype().size();
        let sizes = [dims.x_width, from, dims.out_width, to, width].map(|elements| elements * element);
        let unit = unit(element, &[x, out.view()], &sizes);
        let [x_width, from, out_width, to, width] = sizes.map(|bytes| bytes / unit);
        let (grid, lanes) = self.over_rows(dims.rows, width);
        let mut arguments = self.arguments().only(x).only(out.view()).size(unit);
        arguments = arguments.long(dims.rows).long(dims.group).long(x_width).long(from);
        arguments = arguments.long(out_width).long(to).long(width).size(lanes);
        self.launch("columns", "columns_copy", grid, THREADS, 0, &mut arguments)
    }

    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_fold(x, from, &out, to, width);
        if dims.rows * width == 0 {
            return Ok(());
        }
        let (grid, lanes) = self.over_rows(dims.groups(), width.div_ceil(VECTOR));
        let mut arguments = self.arguments().only(x).only(out.view()).int(operand::code(x.dtype()));
        arguments = arguments.long(dims.groups()).long(dims.group).long(dims.x_width).long(from);
        arguments = arguments.long(dims.out_width).long(to).long(width).size(lanes);
        self.launch("columns fold", "columns_fold", grid, THREADS, 0, &mut arguments)
    }

    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result {
        let [rows, all] = check::columns_clear(&out, at, width);
        if rows * width == 0 {
            return Ok(());
        }
        let element = out.dtype().size();
        let sizes = [all, at, width].map(|elements| elements * element);
        let unit = unit(element, &[out.view()], &sizes);
        let [all, at, width] = sizes.map(|bytes| bytes / unit);
        let (grid, lanes) = self.over_rows(rows, width);
        let mut arguments = self.arguments().only(out.view()).size(unit).long(rows);
        arguments = arguments.long(all).long(at).long(width).size(lanes);
        self.launch("columns clear", "columns_clear", grid, THREADS, 0, &mut arguments)
    }
}

impl Cuda {
    /// A grid over rows of as many units, and the threads of a row.
    fn over_rows(&self, rows: usize, units: usize) -> ([u32; 3], usize) {
        let lanes = units.next_power_of_two().min(THREADS as usize);
        ([self.blocks(rows.div_ceil(THREADS as usize / lanes)), 1, 1], lanes)
    }
}

/// The bytes that a thread moves at once: of an element, unless all sizes, in bytes, and operands allow 16.
fn unit(element: usize, operands: &[View<'_>], sizes: &[usize]) -> usize {
    let fits = aligned(operands) && sizes.iter().all(|bytes| bytes.is_multiple_of(16));
    if fits { 16 } else { element }
}
