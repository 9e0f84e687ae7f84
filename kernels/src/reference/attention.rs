//! Attention as the textbook writes it, with every row of probabilities in memory.

use super::rows::log_sum_exp;
use super::{Reference, values};
use crate::check::{self, AttentionDims, Paging};
use crate::{Attention, AttentionSpec, KeyValues, Result, View, ViewMut};

impl Attention for Reference {
    /// `out = Σ_j p_j·v_j`, `p = softmax(s)`, `s_j = scale·q·k_j` or what a cap makes of it, over the visible keys j, ascending.
    fn forward(
        &self,
        q: View<'_>,
        keys: KeyValues<'_>,
        starts: View<'_>,
        out: ViewMut<'_>,
        lse: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        let dims = check::attention_forward(q, keys, starts, &out, &lse);
        let starts_b = values::ints(starts);
        check::starts(&dims, starts_b);
        let (q, k, v) = (values::read(q), values::read(keys.k), values::read(keys.v));
        let places: Option<Vec<Option<usize>>> =
            dims.paging.zip(keys.pages).map(|(paging, pages)| places(&paging, pages));
        let mut out_bshk = vec![0.0; q.len()];
        let mut lse_bhs = vec![0.0; dims.batch * dims.heads * dims.queries];
        for row in rows(&dims) {
            let keys = row.keys(starts_b[row.b] as usize, spec);
            let query = &q[row.query(&dims)..][..dims.head_size];
            let key = |j: usize| {
                let at = row.b * dims.capacity + j;
                Some(row.key_in(&dims, places.as_ref().map_or(Some(at), |places| places[at])?))
            };
            let score = |j| key(j).map_or(0.0, |at| score(dot(query, &k[at..]), spec).0);
            let scores: Vec<f64> = keys.clone().map(score).collect();
            let lse = log_sum_exp(&scores);
            lse_bhs[row.lse(&dims)] = lse;
            for (score, at) in scores.iter().zip(keys.map(key)) {
                let Some(at) = at else { continue };
                axpy(&mut out_bshk[row.query(&dims)..][..dims.head_size], (score - lse).exp(), &v[at..]);
            }
        }
        values::write(out, &out_bshk);
        values::write(lse, &lse_bhs);
        Ok(())
    }

    /// Row by row.
    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result {
        let dims = check::append(k, &values, starts, pages, &to_k);
        let (paging, width, starts) = (dims.paging, dims.width, values::ints(starts));
        let pages = values::ints(pages);
        check::pages(&paging, pages);
        for (new, to) in std::iter::once((k, to_k)).chain(values) {
            let (new, mut all) = (values::read(new), values::read(to.view()));
            for (row, new) in new.chunks_exact(width).enumerate() {
                let (b, position) =
                    (row / dims.length, starts[row / dims.length] as usize + row % dims.length);
                let page = position / paging.positions;
                if page < paging.per_sequence && pages[b * paging.per_sequence + page] >= 0 {
                    let page = pages[b * paging.per_sequence + page] as usize;
                    let at = page * paging.positions + position % paging.positions;
                    all[at * width..][..width].copy_from_slice(new);
                }
            }
            values::write(to, &all);
        }
        Ok(())
    }

    /// Recomputes everything from q, k, v and `lse`, in which sinks may be; `out` is only checked for shape.
    ///
    /// `p_j = exp(s_j − lse)`, `dp_j = dout·v_j`, `ds_j = p_j·(dp_j − Σ p·dp)·scale`, `dq = Σ ds_j·k_j`, `dk_j = Σ ds_j·q`, `dv_j = Σ p_j·dout`;
    /// with a cap ds_j is multiplied by `1 − (s_j/cap)²`.
    fn backward(
        &self,
        q: View<'_>,
        k: View<'_>,
        v: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dq: ViewMut<'_>,
        dk: ViewMut<'_>,
        dv: ViewMut<'_>,
        spec: AttentionSpec,
    ) -> Result {
        let dims = check::attention_backward(q, k, v, out, lse, dout, &dq, &dk, &dv);
        let (q, k, v, dout) = (values::read(q), values::read(k), values::read(v), values::read(dout));
        let lse_bhs = values::read(lse);
        let (mut of_q, mut of_k, mut of_v) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        for row in rows(&dims) {
            let (at, width) = (row.query(&dims), dims.head_size);
            let keys = row.keys(0, spec);
            let scores: Vec<(f64, f64)> =
                keys.clone().map(|j| score(dot(&q[at..at + width], &k[row.key(&dims, j)..]), spec)).collect();
            let lse = lse_bhs[row.lse(&dims)];
            let p: Vec<f64> = scores.iter().map(|(score, _)| (score - lse).exp()).collect();
            let dp: Vec<f64> =
                keys.clone().map(|j| dot(&dout[at..at + width], &v[row.key(&dims, j)..])).collect();
            let delta = dot(&p, &dp);
            for (((p, dp), (_, slope)), j) in p.iter().zip(&dp).zip(&scores).zip(keys) {
                let (ds, key) = (p * (dp - delta) * slope, row.key(&dims, j));
                axpy(&mut of_q[at..at + width], ds, &k[key..]);
                axpy(&mut of_k[key..key + width], ds, &q[at..]);
                axpy(&mut of_v[key..key + width], *p, &dout[at..]);
            }
        }
        values::write(dq, &of_q);
        values::write(dk, &of_k);
        values::write(dv, &of_v);
        Ok(())
    }
}

/// The score of a product of a query and a key, and its derivative.
fn score(product: f64, spec: AttentionSpec) -> (f64, f64) {
    let (scale, scaled) = (f64::from(spec.scale), f64::from(spec.scale) * product);
    let Some(cap) = spec.cap.map(f64::from) else { return (scaled, scale) };
    let of_cap = (scaled / cap).tanh();
    (cap * of_cap, scale * (1.0 - of_cap * of_cap))
}

/// For every position of every sequence its row among those of all pages, if there is one.
fn places(paging: &Paging, pages: View<'_>) -> Vec<Option<usize>> {
    let pages = values::ints(pages);
    check::pages(paging, pages);
    let of_page = |&page: &i32| {
        let page = usize::try_from(page).ok();
        (0..paging.positions).map(move |at| Some(page? * paging.positions + at))
    };
    pages.iter().flat_map(of_page).collect()
}

/// One query of one head.
struct Row {
    b: usize,
    i: usize,
    h: usize,
}

fn rows(dims: &AttentionDims) -> impl Iterator<Item = Row> + use<> {
    let (queries, heads) = (dims.queries, dims.heads);
    (0..dims.batch * queries * heads).map(move |at| Row {
        b: at / (queries * heads),
        i: at / heads % queries,
        h: at % heads,
    })
}

impl Row {
    fn keys(&self, start: usize, spec: AttentionSpec) -> std::ops::Range<usize> {
        let position = start + self.i;
        spec.first_key(position)..position + 1
    }

    fn query(&self, dims: &AttentionDims) -> usize {
        ((self.b * dims.queries + self.i) * dims.heads + self.h) * dims.head_size
    }

    fn key(&self, dims: &AttentionDims, j: usize) -> usize {
        self.key_in(dims, self.b * dims.capacity + j)
    }

    /// The key in a row of all keys.
    fn key_in(&self, dims: &AttentionDims, row: usize) -> usize {
        (row * dims.kv_heads + self.h / dims.group()) * dims.head_size
    }

    fn lse(&self, dims: &AttentionDims) -> usize {
        (self.b * dims.heads + self.h) * dims.queries + self.i
    }
}

/// Over as many elements as `a` has.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `acc += factor·x` over as many elements as `acc` has.
fn axpy(acc: &mut [f64], factor: f64, x: &[f64]) {
    for (acc, x) in acc.iter_mut().zip(x) {
        *acc += factor * x;
    }
}
