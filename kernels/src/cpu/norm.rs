//! Root-mean-square normalization (Zhang and Sennrich, arXiv 1910.07467).
//!
//! Rows go through small buffers block by block, so that neither their length nor their number matters. Sums over a row
//! are f32 within a block of [`BLOCK`] and f64 over blocks; everything else is f32, rounded once at the end (Hugging Face
//! rounds `x·rstd` to bf16 before it multiplies by the weight, which costs an extra half unit).
//!
//! Squares of f32 leave its range long before the elements do. A row whose squares overflow or are lost among the smallest
//! numbers is taken again in f64, forward and backward, so that rows of any finite size give what the formula says; only where
//! rstd itself is beyond f32 (no eps, and all elements denormal) they do not.
//!
//! Tolerance against f64: 4 units in the last place of f32 times the magnitude of the terms, before the rounding.

use super::Cpu;
use super::elementwise::buffers;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut, floats, floats_mut};
use super::reduce;
use super::threads::SharedMut;
use super::{Isa, vector};
use crate::check::{self, RowDims};
use crate::{Result, RmsNorm, View, ViewMut};
use std::ops::RangeInclusive;

impl RmsNorm for Cpu {
    fn forward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        rstd: ViewMut<'_>,
    ) -> Result {
        let dims = check::norm_forward(x, weight, &out, &rstd);
        let (x, weight, out) = (Floats::new(x), Floats::new(weight), FloatsMut::new(out));
        let (rstd_r, isa) = (SharedMut::new(floats_mut(rstd)), self.threads.isa());
        let task_rows = rows_per_task(dims);
        self.threads.run_ranges(dims.rows, task_rows, |rows, scratch| {
            let [of_x, of_weight, result] = buffers(scratch);
            let first = rows.start;
            // SAFETY: these rows belong to this task.
            let rstd_r = unsafe { rstd_r.slice(first, rows.len()) };
            for (i, rstd) in rstd_r.iter_mut().enumerate() {
                let row = x.slice((first + i) * dims.width, dims.width);
                *rstd = reciprocal_rms(isa, row, eps, of_x);
            }
            for col in (0..dims.width).step_by(BLOCK) {
                let len = BLOCK.min(dims.width - col);
                let weight = weight.read(isa, col, len, of_weight);
                for (i, rstd) in rstd_r.iter().enumerate() {
                    let at = (first + i) * dims.width + col;
                    vector::scale_by(isa, x.read(isa, at, len, of_x), *rstd, weight, &mut result[..len]);
                    // SAFETY: as above.
                    unsafe { out.write(isa, at, &result[..len]) };
                }
            }
        });
        Ok(())
    }

    /// With `g = dout·weight` and `x̂ = x·rstd`: `dx (+)= rstd·(g − x̂·mean(g·x̂))`, `dweight += Σ_r dout·x̂`; the sum over
    /// rows as [`reduce`] describes.
    fn backward(
        &self,
        dout: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: ViewMut<'_>,
        accumulate_dx: bool,
        dweight: ViewMut<'_>,
    ) -> Result {
        let dims = check::norm_backward(dout, x, weight, rstd, &dx, &dweight);
        let (dout, x, weight) = (Floats::new(dout), Floats::new(x), Floats::new(weight));
        let (rstd_r, dx, isa) = (floats(rstd), FloatsMut::new(dx), self.threads.isa());
        let row = RowGradient { dout, x, weight, dx, accumulate: accumulate_dx, width: dims.width };
        let task_rows = rows_per_task(dims);
        self.threads.run_ranges(dims.rows, task_rows, |rows, scratch| {
            let buffers = buffers(scratch);
            for r in rows {
                // SAFETY: row r belongs to this task.
                unsafe { row.run(isa, r, rstd_r[r], buffers) };
            }
        });
        reduce::sum(&self.threads, dims, floats_mut(dweight), |block, sums| {
            let (mut of_dout, mut of_x) = ([0.0; reduce::COLS], [0.0; reduce::COLS]);
            for r in block.rows() {
                let at = r * dims.width + block.first_col;
                let dout = dout.read(isa, at, block.cols, &mut of_dout);
                let x = x.read(isa, at, block.cols, &mut of_x);
                // The factor goes to what makes it a number of order one.
                let (a, b) = if RSTD_USUAL.contains(&rstd_r[r]) { (dout, x) } else { (x, dout) };
                vector::multiply_add(isa, sums, a, b, rstd_r[r]);
            }
        });
        Ok(())
    }

    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result {
        let dims = check::center(x, &out);
        let (x, out, isa) = (Floats::new(x), FloatsMut::new(out), self.threads.isa());
        self.threads.run_ranges(dims.rows, rows_per_task(dims), |rows, scratch| {
            let [of_x, _, _, result] = buffers(scratch);
            for r in rows {
                let blocks = (0..dims.width).step_by(BLOCK).map(|col| {
                    let len = BLOCK.min(dims.width - col);
                    (r * dims.width + col, len)
                });
                let sum: f64 = blocks
                    .clone()
                    .map(|(at, len)| f64::from(vector::sum(isa, x.read(isa, at, len, of_x))))
                    .sum();
                let mean = (sum / dims.width as f64) as f32;
                for (at, len) in blocks {
                    let result = &mut result[..len];
                    result.fill(0.0);
                    if accumulate {
                        // SAFETY: row r belongs to this task.
                        unsafe { out.read(isa, at, result) };
                    }
                    vector::add_shifted(isa, result, x.read(isa, at, len, of_x), mean);
                    // SAFETY: as above.
                    unsafe { out.write(isa, at, result) };
                }
            }
        });
        Ok(())
    }
}

/// 2⁻¹⁰⁰: below it, squares that f32 rounds to multiples of 2⁻¹⁴⁹ may count.
const MEAN_MIN: f64 = 7.888_609_052_210_118e-31;
/// 2⁻⁴⁰ to 2⁴⁰: products with elements of such a row, and with rstd², are in the range of f32.
const RSTD_USUAL: RangeInclusive<f32> = 9.094_947e-13..=1.099_511_6e12;

fn rows_per_task(dims: RowDims) -> usize {
    (CHUNK / dims.width.max(1)).max(1)
}

fn reciprocal_rms(isa: Isa, row: Floats<'_>, eps: f32, buffer: &mut [f32; BLOCK]) -> f32 {
    let mut sum = 0.0f64;
    for col in (0..row.len()).step_by(BLOCK) {
        let x = row.read(isa, col, BLOCK.min(row.len() - col), buffer);
        sum += f64::from(vector::dot(isa, x, x));
    }
    let mut mean = sum / row.len() as f64 + f64::from(eps);
    if !(MEAN_MIN..=f64::MAX).contains(&mean) {
        sum = 0.0;
        for col in (0..row.len()).step_by(BLOCK) {
            let x = row.read(isa, col, BLOCK.min(row.len() - col), buffer);
            sum += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        }
        mean = sum / row.len() as f64 + f64::from(eps);
    }
    (1.0 / mean.sqrt()) as f32
}

/// The gradient of x, row by row.
struct RowGradient<'a> {
    dout: Floats<'a>,
    x: Floats<'a>,
    weight: Floats<'a>,
    dx: FloatsMut<'a>,
    accumulate: bool,
    width: usize,
}

impl RowGradient<'_> {
    /// # Safety
    /// No other task touches row `r` of dx.
    unsafe fn run(&self, isa: Isa, r: usize, rstd: f32, buffers: &mut [[f32; BLOCK]; 4]) {
        let [of_dout, of_x, of_weight, result] = buffers;
        let blocks = || (0..self.width).step_by(BLOCK).map(|col| (col, BLOCK.min(self.width - col)));
        let mut sum = 0.0f64;
        for (col, len) in blocks() {
            let at = r * self.width + col;
            let dout = self.dout.read(isa, at, len, of_dout);
            let x = self.x.read(isa, at, len, of_x);
            sum += f64::from(vector::dot3(isa, dout, x, self.weight.read(isa, col, len, of_weight)));
        }
        if !RSTD_USUAL.contains(&rstd) || !sum.is_finite() {
            // SAFETY: the caller's promise.
            return unsafe { self.run_wide(isa, r, rstd, buffers) };
        }
        let correction = (f64::from(rstd).powi(2) * sum / self.width as f64) as f32;
        for (col, len) in blocks() {
            let at = r * self.width + col;
            result[..len].fill(0.0);
            if self.accumulate {
                // SAFETY: the caller's promise.
                unsafe { self.dx.read(isa, at, &mut result[..len]) };
            }
            vector::norm_gradient(
                isa,
                self.dout.read(isa, at, len, of_dout),
                self.x.read(isa, at, len, of_x),
                self.weight.read(isa, col, len, of_weight),
                rstd,
                correction,
                &mut result[..len],
            );
            // SAFETY: the caller's promise.
            unsafe { self.dx.write(isa, at, &result[..len]) };
        }
    }

    /// The same in f64.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_wide(&self, isa: Isa, r: usize, rstd: f32, buffers: &mut [[f32; BLOCK]; 4]) {
        let [of_dout, of_x, of_weight, result] = buffers;
        let blocks = || (0..self.width).step_by(BLOCK).map(|col| (col, BLOCK.min(self.width - col)));
        let rstd = f64::from(rstd);
        let mut sum = 0.0f64;
        for (col, len) in blocks() {
            let at = r * self.width + col;
            let (dout, x) = (self.dout.read(isa, at, len, of_dout), self.x.read(isa, at, len, of_x));
            let weight = self.weight.read(isa, col, len, of_weight);
            let terms = dout.iter().zip(x).zip(weight);
            sum += terms
                .map(|((dout, x), weight)| f64::from(*dout) * f64::from(*weight) * (f64::from(*x) * rstd))
                .sum::<f64>();
        }
        let mean = sum / self.width as f64;
        for (col, len) in blocks() {
            let at = r * self.width + col;
            result[..len].fill(0.0);
            if self.accumulate {
                // SAFETY: the caller's promise.
                unsafe { self.dx.read(isa, at, &mut result[..len]) };
            }
            let (dout, x) = (self.dout.read(isa, at, len, of_dout), self.x.read(isa, at, len, of_x));
            let weight = self.weight.read(isa, col, len, of_weight);
            for (((dx, dout), x), weight) in result.iter_mut().zip(dout).zip(x).zip(weight) {
                let centred = f64::from(*dout) * f64::from(*weight) - f64::from(*x) * rstd * mean;
                *dx = (f64::from(*dx) + rstd * centred) as f32;
            }
            // SAFETY: the caller's promise.
            unsafe { self.dx.write(isa, at, &result[..len]) };
        }
    }
}
