//! Sinks of attention, row by row.

use super::rows::log_sum_exp;
use super::{Reference, values};
use crate::check;
use crate::{Result, Sinks, View, ViewMut};

impl Sinks for Reference {
    /// `out·σ(old lse − sink)`, which has its digits also where lse are so large that lse and sink together are no more than one.
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result {
        let dims = check::sinks_add(sinks, &out, &lse);
        let sinks_h = values::read(sinks);
        let (mut out_bshk, mut lse_bhs) = (values::read(out.view()), values::read(lse.view()));
        for b in 0..dims.batch {
            for (h, &sink) in sinks_h.iter().enumerate() {
                for s in 0..dims.queries {
                    let lse = &mut lse_bhs[dims.lse(b, h) + s];
                    let row = &mut out_bshk[dims.out(b, s, h)..][..dims.head_size];
                    if *lse == f64::NEG_INFINITY {
                        *lse = sink;
                        row.fill(0.0);
                        continue;
                    }
                    row.iter_mut().for_each(|x| *x /= 1.0 + (sink - *lse).exp());
                    *lse = log_sum_exp(&[*lse, sink]);
                }
            }
        }
        values::write(out, &out_bshk);
        values::write(lse, &lse_bhs);
        Ok(())
    }

    /// Sequences ascending, and positions of each.
    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result {
        let dims = check::sinks_backward(sinks, out, lse, dout, &dsinks);
        let (out_bshk, dout_bshk, lse_bhs) = (values::read(out), values::read(dout), values::read(lse));
        let mut dsinks_h = values::read(dsinks.view());
        for ((h, sink), dsink) in values::read(sinks).iter().enumerate().zip(&mut dsinks_h) {
            // No key at all.
            if *sink == f64::NEG_INFINITY {
                continue;
            }
            for (b, s) in (0..dims.batch).flat_map(|b| (0..dims.queries).map(move |s| (b, s))) {
                let of_row = dims.out(b, s, h)..dims.out(b, s, h) + dims.head_size;
                let delta: f64 = out_bshk[of_row.clone()]
                    .iter()
                    .zip(&dout_bshk[of_row])
                    .map(|(out, dout)| out * dout)
                    .sum();
                *dsink -= (sink - lse_bhs[dims.lse(b, h) + s]).exp() * delta;
            }
        }
        values::write(dsinks, &dsinks_h);
        Ok(())
    }
}
