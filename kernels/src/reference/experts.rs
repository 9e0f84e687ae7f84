//! Mixture of experts, token by token.

use super::rows::log_sum_exp;
use super::{Reference, values};
use crate::check;
use crate::{ExpertGroups, Experts, Gating, GroupScore, Residual, Result, Scores, View, ViewMut};

impl Experts for Reference {
    /// Experts are sorted by logit, or score and bias, and choices by expert; both sorts keep the order of what is equal.
    fn route(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: ViewMut<'_>,
        chosen: ViewMut<'_>,
        rows: ViewMut<'_>,
        starts: ViewMut<'_>,
    ) -> Result {
        let dims = check::route(logits, gating, &weights, &chosen, &rows, &starts);
        let (mut weights_tx, mut chosen_tx) = (Vec::new(), Vec::new());
        let (bias_e, scale) = (gating.bias.map(values::read), f64::from(gating.scale));
        for logits_e in values::read(logits).chunks(dims.experts) {
            let p_e = scores(logits_e, gating.scores);
            let biased = |bias_e: &Vec<f64>| p_e.iter().zip(bias_e).map(|(p, bias)| p + bias).collect();
            let compared: Option<Vec<f64>> = bias_e.as_ref().map(biased);
            let mut largest = descending(compared.as_deref().unwrap_or(logits_e));
            if let Some(groups) = gating.groups {
                let compared_e = match groups.by {
                    GroupScore::Largest => compared.as_deref().unwrap_or(logits_e),
                    GroupScore::TwoLargest => compared.as_deref().unwrap_or(&p_e),
                };
                let kept = kept_groups(compared_e, groups);
                largest.retain(|e| kept.contains(&(e / (dims.experts / groups.count))));
            }
            largest.truncate(dims.choices);
            let sum = if gating.normalize { largest.iter().map(|&e| p_e[e]).sum() } else { 1.0 };
            weights_tx.extend(largest.iter().map(|&e| p_e[e] / sum * scale));
            chosen_tx.extend(largest.iter().map(|&e| e as i32));
        }
        let mut order: Vec<usize> = (0..dims.routed()).collect();
        order.sort_by_key(|&choice| chosen_tx[choice]);
        let rows_tx = values::ints_mut(rows);
        for (row, &choice) in order.iter().enumerate() {
            rows_tx[choice] = row as i32;
        }
        for (e, start) in values::ints_mut(starts).iter_mut().enumerate() {
            *start = chosen_tx.iter().filter(|&&chosen| chosen < e as i32).count() as i32;
        }
        values::write(weights, &weights_tx);
        values::ints_mut(chosen).copy_from_slice(&chosen_tx);
        Ok(())
    }

    /// With g of all experts in memory.
    fn route_backward(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: View<'_>,
        chosen: View<'_>,
        dweights: View<'_>,
        dlogits: ViewMut<'_>,
    ) -> Result {
        let dims = check::route_backward(logits, weights, chosen, dweights, &dlogits);
        let (logits_te, weights_tx, dweights_tx) =
            (values::read(logits), values::read(weights), values::read(dweights));
        let (chosen_tx, scale) = (values::ints(chosen), f64::from(gating.scale));
        let mut dlogits_te = Vec::with_capacity(logits_te.len());
        for (t, logits_e) in logits_te.chunks(dims.experts).enumerate() {
            let of_token = t * dims.choices..(t + 1) * dims.choices;
            let (p_e, chosen_x) = (scores(logits_e, gating.scores), &chosen_tx[of_token.clone()]);
            let (weights_x, dweights_x) = (&weights_tx[of_token.clone()], &dweights_tx[of_token]);
            let (mut mean, mut sum) = (0.0, 1.0);
            if gating.normalize {
                mean = weights_x.iter().zip(dweights_x).map(|(w, dw)| w * dw).sum();
                sum = chosen_x.iter().map(|&e| p_e[e as usize]).sum();
            }
            let mut g_e = vec![0.0; dims.experts];
            for (&e, dw) in chosen_x.iter().zip(dweights_x) {
                g_e[e as usize] = (scale * dw - mean) / sum;
            }
            let inner: f64 = p_e.iter().zip(&g_e).map(|(p, g)| p * g).sum();
            dlogits_te.extend(p_e.iter().zip(&g_e).map(|(p, g)| match gating.scores {
                Scores::Softmax => p * (g - inner),
                Scores::Sigmoid => p * (1.0 - p) * g,
            }));
        }
        values::write(dlogits, &dlogits_te);
        Ok(())
    }

    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>> {
        check::expert_starts(starts);
        check::first_rows(values::ints(starts), routed)
    }

    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::spread(x, rows, &out);
        let x_td = values::read(x);
        let mut out_rd = vec![0.0; dims.routed() * dims.width];
        for (choice, &row) in values::ints(rows).iter().enumerate() {
            let token = &x_td[choice / dims.choices * dims.width..][..dims.width];
            out_rd[row as usize * dims.width..][..dims.width].copy_from_slice(token);
        }
        values::write(out, &out_rd);
        Ok(())
    }

    /// The residual last.
    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::collect(x, rows, &residual, &out);
        let x_rd = values::read(x);
        let mut out_td = vec![0.0; dims.tokens * dims.width];
        for (choice, &row) in values::ints(rows).iter().enumerate() {
            let sums = &mut out_td[choice / dims.choices * dims.width..][..dims.width];
            let row = &x_rd[row as usize * dims.width..][..dims.width];
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        if let Some(residual) = residual.view(&out) {
            out_td.iter_mut().zip(values::read(residual)).for_each(|(sum, residual)| *sum += residual);
        }
        values::write(out, &out_td);
        Ok(())
    }

    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::weigh(x, rows, weights, &out);
        let (mut rows_rf, weights_tx) = (values::read(x), values::read(weights));
        for (&row, weight) in values::ints(rows).iter().zip(weights_tx) {
            rows_rf[row as usize * dims.width..][..dims.width].iter_mut().for_each(|x| *x *= weight);
        }
        values::write(out, &rows_rf);
        Ok(())
    }

    fn weigh_backward(
        &self,
        d: ViewMut<'_>,
        x: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        dweights: ViewMut<'_>,
    ) -> Result {
        let dims = check::weigh_backward(&d, x, rows, weights, &dweights);
        let (mut d_rf, x_rf, weights_tx) = (values::read(d.view()), values::read(x), values::read(weights));
        let mut dweights_tx = Vec::with_capacity(weights_tx.len());
        for (&row, weight) in values::ints(rows).iter().zip(weights_tx) {
            let of_row = row as usize * dims.width..(row as usize + 1) * dims.width;
            let d_f = &mut d_rf[of_row.clone()];
            dweights_tx.push(d_f.iter().zip(&x_rf[of_row]).map(|(d, x)| *d * x).sum());
            d_f.iter_mut().for_each(|d| *d *= weight);
        }
        values::write(d, &d_rf);
        values::write(dweights, &dweights_tx);
        Ok(())
    }
}

fn scores(row: &[f64], kind: Scores) -> Vec<f64> {
    let lse = log_sum_exp(row);
    let score = |x: &f64| match kind {
        Scores::Softmax => (x - lse).exp(),
        Scores::Sigmoid => 1.0 / (1.0 + (-x).exp()),
    };
    row.iter().map(score).collect()
}

/// The groups that a token chooses from.
fn kept_groups(compared_e: &[f64], ExpertGroups { count, kept, by }: ExpertGroups) -> Vec<usize> {
    let score = |group_e: &[f64]| {
        let order = descending(group_e);
        match by {
            GroupScore::Largest => group_e[order[0]],
            GroupScore::TwoLargest => group_e[order[0]] + group_e[order[1]],
        }
    };
    let scores_g: Vec<f64> = compared_e.chunks(compared_e.len() / count).map(score).collect();
    descending(&scores_g)[..kept].to_vec()
}

/// Indices by descending value, NaNs last, of equal ones the lower first.
fn descending(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (values[a], values[b]);
        b.partial_cmp(&a).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
    });
    order
}
