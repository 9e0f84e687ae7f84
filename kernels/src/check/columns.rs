//! Checks of operations on columns.

use super::float;
use crate::{View, ViewMut};

/// Sizes of a move of columns.
#[derive(Debug, Clone, Copy)]
pub struct ColumnDims {
    /// Rows of the matrix that has more of them.
    pub rows: usize,
    /// Rows of it for each row of the other (n).
    pub group: usize,
    /// Columns of x.
    pub x_width: usize,
    /// Columns of out.
    pub out_width: usize,
    /// Columns that move.
    pub width: usize,
}

impl ColumnDims {
    /// Rows of the matrix that has fewer of them.
    pub fn groups(&self) -> usize {
        self.rows / self.group
    }
}

pub fn columns_copy(x: View<'_>, from: usize, out: &ViewMut<'_>, to: usize, width: usize) -> ColumnDims {
    let (rows, groups) = (out.shape().rows(), x.shape().rows());
    moved("columns", [rows, groups], (x, from), (out, to), width)
}

pub fn columns_fold(x: View<'_>, from: usize, out: &ViewMut<'_>, to: usize, width: usize) -> ColumnDims {
    let (rows, groups) = (x.shape().rows(), out.shape().rows());
    moved("columns fold", [rows, groups], (x, from), (out, to), width)
}

/// Rows, and elements of each.
pub fn columns_clear(out: &ViewMut<'_>, at: usize, width: usize) -> [usize; 2] {
    let shape = out.shape();
    float("columns clear", "out", out.dtype());
    within("columns clear", "out", at, width, shape.last());
    [shape.rows(), shape.last()]
}

fn moved(
    op: &str,
    [rows, groups]: [usize; 2],
    (x, from): (View<'_>, usize),
    (out, to): (&ViewMut<'_>, usize),
    width: usize,
) -> ColumnDims {
    float(op, "x", x.dtype());
    assert_eq!(x.dtype(), out.dtype(), "{op}: x and out have one dtype");
    let (x_shape, out_shape) = (x.shape(), out.shape());
    within(op, "x", from, width, x_shape.last());
    within(op, "out", to, width, out_shape.last());
    let group = if rows == 0 && groups == 0 { 1 } else { rows.checked_div(groups).unwrap_or(0) };
    assert!(
        group > 0 && group * groups == rows,
        "{op}: {rows} rows are a multiple of {groups}, of x {x_shape:?} and out {out_shape:?}"
    );
    ColumnDims { rows, group, x_width: x_shape.last(), out_width: out_shape.last(), width }
}

fn within(op: &str, operand: &str, at: usize, width: usize, all: usize) {
    assert!(
        at <= all && width <= all - at,
        "{op}: {width} columns from {at} are within the {all} of {operand}"
    );
}
