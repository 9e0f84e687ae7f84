//! Softmax cross-entropy.
//!
//! A task takes one row: its maximum, then `Σ exp(x − max)` in f32 within a block of [`BLOCK`] and f64 over blocks, then
//! the gradient in place. Rows' losses are collected in batches of [`ROWS`] and added to the total in row order, in f64.
//!
//! Tolerance against f64: relative 1e-6 of a row's loss plus 1e-6; gradients 1e-6·scale, before the rounding.

use super::Cpu;
use super::floats::{BLOCK, Floats, FloatsMut, ints};
use super::threads::SharedMut;
use super::{Isa, vector};
use crate::check::{self, RowDims};
use crate::{CrossEntropy, Result, View, ViewMut};

/// Rows whose losses wait to be added.
const ROWS: usize = 1024;

impl CrossEntropy for Cpu {
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result {
        let dims = check::cross_entropy(logits, labels, &loss);
        let (logits, labels_r, isa) = (Floats::new(logits), ints(labels), self.threads.isa());
        self.add_rows(dims, loss, |r| {
            let label = usize::try_from(labels_r[r]).ok()?;
            let row = |at, len, out: &mut [f32]| logits.slice(r * dims.width + at, len).widen(isa, out);
            Some(Statistics::of(isa, dims.width, row).loss(label, dims.width, row))
        });
        Ok(())
    }

    fn loss_and_gradient(
        &self,
        logits: ViewMut<'_>,
        labels: View<'_>,
        scale: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result {
        let dims = check::cross_entropy(logits.view(), labels, &loss);
        let (logits, labels_r, isa) = (FloatsMut::new(logits), ints(labels), self.threads.isa());
        self.add_rows(dims, loss, |r| {
            let first = r * dims.width;
            let (mut buffer, mut capped) = ([0.0; BLOCK], [0.0; BLOCK]);
            let Ok(label) = usize::try_from(labels_r[r]) else {
                for at in (0..dims.width).step_by(BLOCK) {
                    // SAFETY: row r belongs to this task.
                    unsafe { logits.write(isa, first + at, &buffer[..BLOCK.min(dims.width - at)]) };
                }
                return None;
            };
            let row = |at, len, out: &mut [f32]| {
                // SAFETY: row r belongs to this task.
                unsafe { logits.read(isa, first + at, &mut out[..len]) };
            };
            let statistics = Statistics::of(isa, dims.width, row);
            let loss = statistics.loss(label, dims.width, row);
            let factor = (f64::from(scale) / statistics.sum) as f32;
            for at in (0..dims.width).step_by(BLOCK) {
                let block = &mut buffer[..BLOCK.min(dims.width - at)];
                row(at, block.len(), block);
                if cap.is_some() {
                    capped[..block.len()].copy_from_slice(block);
                }
                vector::softmax_gradient(isa, block, statistics.max, factor);
                if (at..at + block.len()).contains(&label) {
                    block[label - at] -= scale;
                }
                if let Some(cap) = cap {
                    vector::cap_gradient(isa, block, &capped[..block.len()], cap);
                }
                // SAFETY: as above.
                unsafe { logits.write(isa, first + at, block) };
            }
            Some(loss)
        });
        Ok(())
    }
}

impl Cpu {
    /// Adds what `row` gives for every row to the loss, in order.
    fn add_rows(&self, dims: RowDims, loss: ViewMut<'_>, row: impl Fn(usize) -> Option<f64> + Sync) {
        let loss: &mut [f64] = bytemuck::cast_slice_mut(loss.into_bytes().into_host());
        for first in (0..dims.rows).step_by(ROWS) {
            let rows = ROWS.min(dims.rows - first);
            let mut losses = [0.0f64; ROWS];
            {
                let losses = SharedMut::new(&mut losses);
                self.threads.run(rows, |i, _| {
                    if let Some(value) = row(first + i) {
                        // SAFETY: element i belongs to this task.
                        unsafe { losses.set(i, value) };
                    }
                });
            }
            for value in &losses[..rows] {
                loss[0] += value;
            }
        }
    }
}

/// What a softmax needs to know of a row.
#[derive(Clone, Copy)]
pub struct Statistics {
    pub max: f32,
    /// `Σ exp(x − max)`.
    pub sum: f64,
}

impl Statistics {
    /// `row(at, len, out)` reads elements of the row.
    pub fn of(isa: Isa, width: usize, row: impl Fn(usize, usize, &mut [f32])) -> Self {
        let mut buffer = [0.0; BLOCK];
        let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f64);
        for at in (0..width).step_by(BLOCK) {
            let block = &mut buffer[..BLOCK.min(width - at)];
            row(at, block.len(), block);
            max = max.max(vector::max(isa, block));
        }
        for at in (0..width).step_by(BLOCK) {
            let block = &mut buffer[..BLOCK.min(width - at)];
            row(at, block.len(), block);
            sum += f64::from(vector::sum_exp(isa, block, max));
        }
        Self { max, sum }
    }

    fn loss(self, label: usize, width: usize, row: impl Fn(usize, usize, &mut [f32])) -> f64 {
        assert!(label < width, "label {label} is one of {width} classes");
        let mut logit = [0.0];
        row(label, 1, &mut logit);
        f64::from(self.max) + self.sum.ln() - f64::from(logit[0])
    }
}
