//! Operations that work row by row: normalization, rotation, look-up, loss, sums.

use super::{Reference, values};
use crate::check;
use crate::{
    CrossEntropy, Embedding, Reduce, Result, RmsNorm, Rope, RopeDirection, RopeLayout, RopePairs, View,
    ViewMut,
};

impl RmsNorm for Reference {
    /// `rstd = 1/√(Σx²/D + eps)`, columns ascending; `out = x·rstd·weight` with the unrounded rstd.
    fn forward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        rstd: ViewMut<'_>,
    ) -> Result {
        let dims = check::norm_forward(x, weight, &out, &rstd);
        let (x_rd, weight_d) = (values::read(x), values::read(weight));
        let (mut out_rd, mut rstd_r) = (Vec::with_capacity(x_rd.len()), Vec::with_capacity(dims.rows));
        for row in x_rd.chunks(dims.width.max(1)) {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / dims.width as f64;
            let rstd = 1.0 / (mean + f64::from(eps)).sqrt();
            rstd_r.push(rstd);
            out_rd.extend(row.iter().zip(&weight_d).map(|(x, weight)| x * rstd * weight));
        }
        values::write(out, &out_rd);
        values::write(rstd, &rstd_r);
        Ok(())
    }

    /// With `g = dout·weight` and `x̂ = x·rstd`: `dx = rstd·(g − x̂·mean(g·x̂))`, `dweight += Σ_r dout·x̂`, rows ascending.
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
        let (dout_rd, x_rd, weight_d) = (values::read(dout), values::read(x), values::read(weight));
        let rstd_r = values::read(rstd);
        let mut dx_rd = if accumulate_dx { values::read(dx.view()) } else { vec![0.0; x_rd.len()] };
        let mut dweight_d = values::read(dweight.view());
        for (r, rstd) in rstd_r.iter().enumerate() {
            let at = |d: usize| r * dims.width + d;
            let scaled = |d: usize| x_rd[at(d)] * rstd;
            let mean = (0..dims.width).map(|d| dout_rd[at(d)] * weight_d[d] * scaled(d)).sum::<f64>()
                / dims.width as f64;
            for d in 0..dims.width {
                dx_rd[at(d)] += rstd * (dout_rd[at(d)] * weight_d[d] - scaled(d) * mean);
                dweight_d[d] += dout_rd[at(d)] * scaled(d);
            }
        }
        values::write(dx, &dx_rd);
        values::write(dweight, &dweight_d);
        Ok(())
    }

    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result {
        let dims = check::center(x, &out);
        let x_rd = values::read(x);
        let mut out_rd = if accumulate { values::read(out.view()) } else { vec![0.0; x_rd.len()] };
        let width = dims.width.max(1);
        for (row, out) in x_rd.chunks(width).zip(out_rd.chunks_mut(width)) {
            let mean = row.iter().sum::<f64>() / dims.width as f64;
            out.iter_mut().zip(row).for_each(|(out, x)| *out += x - mean);
        }
        values::write(out, &out_rd);
        Ok(())
    }
}

impl Rope for Reference {
    /// The angle is the f32 product of position and frequency, as in Hugging Face; the rest is f64.
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        scale: f32,
        direction: RopeDirection,
    ) -> Result {
        let dims = check::rope(&x, positions, inv_freq, layout);
        let mut x_thk = values::read(x.view());
        let (positions_t, inv_freq_i) = (values::ints(positions), values::floats(inv_freq));
        for (t, &position) in positions_t.iter().enumerate() {
            for (i, &inv_freq) in inv_freq_i.iter().enumerate() {
                let (sin, cos) = f64::from(position as f32 * inv_freq).sin_cos();
                let (sin, cos) = (sin * f64::from(scale), cos * f64::from(scale));
                let sin = if direction == RopeDirection::Forward { sin } else { -sin };
                for h in 0..dims.heads {
                    let head = (t * dims.heads + h) * dims.head_size + layout.first;
                    let [low, high] = match layout.pairs {
                        RopePairs::Halves => [i, i + dims.half],
                        RopePairs::Neighbours => [2 * i, 2 * i + 1],
                    }
                    .map(|element| head + element);
                    let (x, y) = (x_thk[low], x_thk[high]);
                    x_thk[low] = x * cos - y * sin;
                    x_thk[high] = y * cos + x * sin;
                }
            }
        }
        values::write(x, &x_thk);
        Ok(())
    }
}

impl Embedding for Reference {
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::gather(ids, table, &out);
        let table_vd = values::read(table);
        let rows = values::ints(ids).iter().map(|&id| &table_vd[id as usize * dims.width..][..dims.width]);
        values::write(out, &rows.flatten().copied().collect::<Vec<_>>());
        Ok(())
    }

    /// Rows that share an id are summed in f64 and rounded once.
    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result {
        let dims = check::scatter_add(ids, dout, &dtable);
        let (dout_td, mut dtable_vd) = (values::read(dout), values::read(dtable.view()));
        for (t, &id) in values::ints(ids).iter().enumerate() {
            for d in 0..dims.width {
                dtable_vd[id as usize * dims.width + d] += dout_td[t * dims.width + d];
            }
        }
        values::write(dtable, &dtable_vd);
        Ok(())
    }
}

impl CrossEntropy for Reference {
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result {
        let dims = check::cross_entropy(logits, labels, &loss);
        let logits_rv = values::read(logits);
        let mut total = values::read(loss.view())[0];
        for (row, &label) in logits_rv.chunks(dims.width).zip(values::ints(labels)) {
            if label >= 0 {
                total += log_sum_exp(row) - row[label as usize];
            }
        }
        values::write(loss, &[total]);
        Ok(())
    }

    fn loss_and_gradient(
        &self,
        mut logits: ViewMut<'_>,
        labels: View<'_>,
        scale: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result {
        let dims = check::cross_entropy(logits.view(), labels, &loss);
        CrossEntropy::loss(self, logits.view(), labels, loss)?;
        let mut logits_rv = values::read(logits.view());
        for (row, &label) in logits_rv.chunks_mut(dims.width).zip(values::ints(labels)) {
            if label < 0 {
                row.fill(0.0);
                continue;
            }
            let lse = log_sum_exp(row);
            for (v, logit) in row.iter_mut().enumerate() {
                let hot = if v == label as usize { 1.0 } else { 0.0 };
                let slope = cap.map_or(1.0, |cap| 1.0 - (*logit / f64::from(cap)).powi(2));
                *logit = f64::from(scale) * ((*logit - lse).exp() - hot) * slope;
            }
        }
        values::write(logits.reborrow(), &logits_rv);
        Ok(())
    }
}

impl Reduce for Reference {
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::sum_rows(x, &out);
        let (x_rn, mut out_n) = (values::read(x), values::read(out.view()));
        for row in x_rn.chunks(dims.width.max(1)) {
            for (out, x) in out_n.iter_mut().zip(row) {
                *out += x;
            }
        }
        values::write(out, &out_n);
        Ok(())
    }
}

/// `ln Σ exp(x)`, shifted by the maximum.
pub(super) fn log_sum_exp(row: &[f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}
