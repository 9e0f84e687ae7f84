//! Columns of matrices. Copies move the bytes of a row at once; sums go through small buffers block by block.
//!
//! Tolerance of sums against f64: n·2⁻²⁴ of the sum of magnitudes, before the rounding; of one row none.

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut};
use super::threads::SharedMut;
use super::vector;
use crate::check;
use crate::{Columns, Result, View, ViewMut};

/// Bytes per task when nothing is computed.
const BYTES: usize = 64 << 10;

impl Columns for Cpu {
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_copy(x, from, &out, to, width);
        let [x_row, out_row, from, to, len] =
            [dims.x_width, dims.out_width, from, to, width].map(|elements| elements * x.dtype().size());
        if len == 0 {
            return Ok(());
        }
        let (x, out) = (x.bytes().host(), SharedMut::new(out.into_bytes().into_host()));
        self.threads.run_ranges(dims.rows, (BYTES / len).max(1), |rows, _| {
            for r in rows {
                // SAFETY: row r belongs to this task.
                let out = unsafe { out.slice(r * out_row + to, len) };
                out.copy_from_slice(&x[r / dims.group * x_row + from..][..len]);
            }
        });
        Ok(())
    }

    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_fold(x, from, &out, to, width);
        let (x, out, isa) = (Floats::new(x), FloatsMut::new(out), self.threads.isa());
        let each = (CHUNK / (width * dims.group).max(1)).max(1);
        self.threads.run_ranges(dims.groups(), each, |rows, _| {
            let (mut sum, mut buffer) = ([0.0; BLOCK], [0.0; BLOCK]);
            for r in rows {
                for col in (0..width).step_by(BLOCK) {
                    let len = BLOCK.min(width - col);
                    let at = |i: usize| (r * dims.group + i) * dims.x_width + from + col;
                    x.slice(at(0), len).widen(isa, &mut sum[..len]);
                    for i in 1..dims.group {
                        vector::add_assign(isa, &mut sum[..len], x.read(isa, at(i), len, &mut buffer));
                    }
                    // SAFETY: row r belongs to this task.
                    unsafe { out.write(isa, r * dims.out_width + to + col, &sum[..len]) };
                }
            }
        });
        Ok(())
    }

    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result {
        let [rows, all] = check::columns_clear(&out, at, width);
        let [row, at, len] = [all, at, width].map(|elements| elements * out.dtype().size());
        if len == 0 {
            return Ok(());
        }
        let out = SharedMut::new(out.into_bytes().into_host());
        self.threads.run_ranges(rows, (BYTES / len).max(1), |rows, _| {
            for r in rows {
                // SAFETY: row r belongs to this task.
                unsafe { out.slice(r * row + at, len) }.fill(0);
            }
        });
        Ok(())
    }
}
