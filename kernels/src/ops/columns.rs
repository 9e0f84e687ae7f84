//! Columns of matrices.

use super::Result;
use crate::{View, ViewMut};

/// Columns that move between matrices of different widths: parts of heads that projections give apart or together.
///
/// x and out are `[R, A]`, leading dimensions flattened to rows, of one dtype, f32, bf16 or f16. One of them has n times the rows of the
/// other, n ≥ 1, so that row r of the fewer belongs to rows n·r to n·r + n − 1 of the more. Elements of other columns are not touched.
pub trait Columns: Send + Sync {
    /// `out[r, to..to+width] = x[r / n, from..from+width]`, where out has n times the rows of x, bit by bit.
    ///
    /// # Errors
    /// The backend failed.
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result;

    /// `out[r, to..to+width] = Σ_i x[n·r + i, from..from+width]`, where x has n times the rows of out, i ascending from 0 to n − 1, in f32,
    /// rounded once: the transpose of [`copy`](Self::copy).
    ///
    /// # Errors
    /// The backend failed.
    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result;

    /// `out[r, at..at+width] = 0`.
    ///
    /// # Errors
    /// The backend failed.
    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result;
}
