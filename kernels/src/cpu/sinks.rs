//! Attention sinks (Xiao et al., arXiv 2309.17453).
//!
//! A task of `add` takes some positions of a sequence with all their heads: lse head by head, of which it has a run each, and then out
//! as it lies. With `d = lse − sink` and `e = exp(−|d|)`, which is at most 1, what is left of a row is `1/(1 + e)` or `e/(1 + e)` of it,
//! and `lse = max(lse, sink) + ln(1 + e)`: nothing overflows, and infinities are those of the formula.
//!
//! The gradient is a sum over rows as [`reduce`] describes, of which a row's terms are products of out and dout, added in f32 within
//! a block of [`BLOCK`] and in f64 over blocks.
//!
//! Tolerance against f64: 4e-7 of the result, before its rounding; of lse 2e-7 and its rounding. Gradients, sums of R·K products of
//! order 1: 2e-6·√(R·K).

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut, floats, floats_mut};
use super::reduce::{self, COLS};
use super::threads::{Carver, SharedMut};
use super::{Isa, vector};
use crate::check::{self, RowDims};
use crate::{Result, Sinks, View, ViewMut};

/// Positions whose lse lie in one line of the caches.
const LINE: usize = 16;

impl Sinks for Cpu {
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result {
        let dims = check::sinks_add(sinks, &out, &lse);
        if dims.rows() == 0 {
            return Ok(());
        }
        let (sinks, out, lse) = (Floats::new(sinks), FloatsMut::new(out), SharedMut::new(floats_mut(lse)));
        let isa = self.threads.isa();
        // Tasks that would write the same lines are one.
        let each = (CHUNK / (dims.heads * dims.head_size).max(1)).max(LINE).min(dims.queries);
        let of_sequence = dims.queries.div_ceil(each);
        self.threads.run(dims.batch * of_sequence, |task, scratch| {
            let (b, first) = (task / of_sequence, task % of_sequence * each);
            let positions = each.min(dims.queries - first);
            let mut carver = Carver::new(scratch);
            let [old_hs, left_hs] = [(); 2].map(|()| carver.take(dims.heads * positions));
            let row = carver.take(BLOCK);
            for h in 0..dims.heads {
                // SAFETY: these positions of the sequence belong to this task.
                let lse_s = unsafe { lse.slice(dims.lse(b, h) + first, positions) };
                old_hs[h * positions..][..positions].copy_from_slice(lse_s);
                join(isa, one(sinks, isa, h), lse_s, &mut left_hs[h * positions..][..positions]);
            }
            for (s, h) in (0..positions).flat_map(|s| (0..dims.heads).map(move |h| (s, h))) {
                let (at, in_tile) = (dims.out(b, first + s, h), h * positions + s);
                for (col, len) in blocks(dims.head_size) {
                    let row = &mut row[..len];
                    if old_hs[in_tile] == f32::NEG_INFINITY {
                        row.fill(0.0);
                    } else {
                        // SAFETY: as above.
                        unsafe { out.read(isa, at + col, row) };
                        vector::scale(isa, row, left_hs[in_tile]);
                    }
                    // SAFETY: as above.
                    unsafe { out.write(isa, at + col, row) };
                }
            }
        });
        Ok(())
    }

    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result {
        let dims = check::sinks_backward(sinks, out, lse, dout, &dsinks);
        let (sinks, out, lse_bhs, dout) =
            (Floats::new(sinks), Floats::new(out), floats(lse), Floats::new(dout));
        let (isa, rows) =
            (self.threads.isa(), RowDims { rows: dims.batch * dims.queries, width: dims.heads });
        reduce::sum(&self.threads, rows, floats_mut(dsinks), |block, sums| {
            let (mut of_out, mut of_dout) = ([0.0; BLOCK], [0.0; BLOCK]);
            let mut shares_hs = [[0.0; LINE]; COLS];
            let mut row = block.first_row;
            while row < block.rows().end {
                // As many positions of one sequence as a line of lse has.
                let (b, first) = (row / dims.queries, row % dims.queries);
                let positions = LINE.min(block.rows().end - row).min(dims.queries - first);
                for (h, shares_s) in shares_hs[..block.cols].iter_mut().enumerate() {
                    let h = block.first_col + h;
                    let lse_s = &lse_bhs[dims.lse(b, h) + first..][..positions];
                    sink_shares(isa, one(sinks, isa, h), lse_s, &mut shares_s[..positions]);
                }
                for s in 0..positions {
                    for (h, (sum, shares_s)) in sums.iter_mut().zip(&shares_hs).enumerate() {
                        let at = dims.out(b, first + s, block.first_col + h);
                        let delta: f64 = blocks(dims.head_size)
                            .map(|(col, len)| {
                                let out = out.read(isa, at + col, len, &mut of_out);
                                f64::from(vector::dot(isa, out, dout.read(isa, at + col, len, &mut of_dout)))
                            })
                            .sum();
                        *sum -= shares_s[s] * delta as f32;
                    }
                }
                row += positions;
            }
        });
        Ok(())
    }
}

/// An element as f32.
fn one(floats: Floats<'_>, isa: Isa, at: usize) -> f32 {
    floats.read(isa, at, 1, &mut [0.0])[0]
}

/// The first column and the length of every block of a row.
fn blocks(width: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..width).step_by(BLOCK).map(move |col| (col, BLOCK.min(width - col)))
}

multiversion! {
    /// Adds a sink to the lse of some rows of its head; `left` is what that leaves of each row's weights.
    fn join(sink: f32, lse: &mut [f32], left: &mut [f32]) {
        for (lse, left) in lse.iter_mut().zip(left) {
            // Equal infinities have no difference.
            let difference = if *lse == sink { 0.0 } else { *lse - sink };
            let e = vector::exp::<FMA>(-difference.abs());
            *left = if difference < 0.0 { e } else { 1.0 } / (1.0 + e);
            *lse = if *lse > sink { *lse } else { sink } + vector::ln_1p::<FMA>(e);
        }
    }
}

multiversion! {
    /// What the sink has of the weights of some rows of its head, from their lse with it.
    fn sink_shares(sink: f32, lse: &[f32], shares: &mut [f32]) {
        if sink == f32::NEG_INFINITY {
            return shares.fill(0.0);
        }
        for (share, lse) in shares.iter_mut().zip(lse) {
            *share = vector::exp::<FMA>(sink - lse);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both results over the whole range of differences, as close as stated, and where they end.
    #[test]
    fn joined_with_a_sink() {
        let lse: Vec<f32> = (0..100_000).map(|i| -100.0 + i as f32 * 2e-3).collect();
        for isa in Isa::available() {
            let (mut joined, mut left) = (lse.clone(), lse.clone());
            join(isa, 0.0, &mut joined, &mut left);
            for ((lse, joined), left) in lse.iter().zip(&joined).zip(&left) {
                let exact = f64::from(*lse).exp().ln_1p();
                let error = (f64::from(*joined) - exact).abs();
                let allowed = exact * 2f64.powi(-24) + 2e-7;
                assert!(error <= allowed, "{}: ln(1 + exp({lse})) = {joined}, {exact}", isa.name());
                let exact = 1.0 / (1.0 + f64::from(-*lse).exp());
                let error = (f64::from(*left) - exact).abs();
                assert!(error <= 4e-7 * exact + 1e-37, "{}: σ({lse}) = {left}, {exact}", isa.name());
            }
        }
    }
}
