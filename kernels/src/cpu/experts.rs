//! Mixture of experts (Shazeer et al., arXiv 1701.06538).
//!
//! A task of `route` takes some tokens: their softmax as [`loss`](super::loss) takes it, and the largest logits, or sums of score and bias, in one
//! pass, which inserts each among those it keeps; with groups after a pass that finds those of the largest scores. Routed rows are numbered by a counting sort, which is serial: it goes over T·X integers where
//! the products after it go over as many rows. All else moves rows through small buffers block by block.
//!
//! Tolerance against f64: weights 1e-6; gradients of logits 1e-6·X of the largest gradient of a weight; sums of X rows of order 1
//! 1e-6·X; gradients of weights, sums of F products of order 1, 1e-5·√F; the rest is rounded once.

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut, floats, floats_mut, ints, ints_mut};
use super::loss::Statistics;
use super::threads::{Carver, SharedMut};
use super::{Isa, vector};
use crate::check::{self, ChoiceDims};
use crate::{ExpertGroups, Experts, Gating, GroupScore, Residual, Result, Scores, View, ViewMut};

impl Experts for Cpu {
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
        let chosen_tx = ints_mut(chosen);
        self.choose(dims, Floats::new(logits), gating, floats_mut(weights), chosen_tx);
        number(chosen_tx, ints_mut(rows), ints_mut(starts));
        Ok(())
    }

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
        let (isa, dlogits) = (self.threads.isa(), FloatsMut::new(dlogits));
        let gradient = RouteGradient {
            dims,
            logits: Floats::new(logits),
            gating,
            weights_tx: floats(weights),
            chosen_tx: ints(chosen),
            dweights_tx: floats(dweights),
            dlogits,
        };
        self.threads.run_ranges(dims.tokens, rows_per_task(dims.experts), |tokens, scratch| {
            let mut carver = Carver::new(scratch);
            let buffers = [BLOCK, dims.choices, dims.choices].map(|floats| carver.take(floats));
            let [block, p_x, g_x] = buffers;
            for t in tokens {
                // SAFETY: row t belongs to this task.
                unsafe { gradient.run(isa, t, block, p_x, g_x) };
            }
        });
        Ok(())
    }

    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>> {
        check::expert_starts(starts);
        check::first_rows(ints(starts), routed)
    }

    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::spread(x, rows, &out);
        let (x, rows_tx, out, isa) = (Floats::new(x), ints(rows), FloatsMut::new(out), self.threads.isa());
        self.assert_named_once(rows_tx);
        self.threads.run_ranges(dims.tokens, rows_per_task(dims.width), |tokens, _| {
            let mut buffer = [0.0; BLOCK];
            for t in tokens {
                for (col, len) in blocks(dims.width) {
                    let values = x.read(isa, t * dims.width + col, len, &mut buffer);
                    for &row in &rows_tx[t * dims.choices..][..dims.choices] {
                        // SAFETY: each routed row is named once, and this one by a token of this task.
                        unsafe { out.write(isa, row as usize * dims.width + col, values) };
                    }
                }
            }
        });
        Ok(())
    }

    /// The residual last.
    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::collect(x, rows, &residual, &out);
        let (x, rows_tx, out, isa) = (Floats::new(x), ints(rows), FloatsMut::new(out), self.threads.isa());
        self.threads.run_ranges(dims.tokens, rows_per_task(dims.width * dims.choices), |tokens, _| {
            let (mut buffer, mut sum) = ([0.0; BLOCK], [0.0; BLOCK]);
            for t in tokens {
                for (col, len) in blocks(dims.width) {
                    let (at, sum) = (t * dims.width + col, &mut sum[..len]);
                    sum.fill(0.0);
                    for &row in &rows_tx[t * dims.choices..][..dims.choices] {
                        let row = x.read(isa, row as usize * dims.width + col, len, &mut buffer);
                        vector::add_assign(isa, sum, row);
                    }
                    match residual {
                        Residual::None => {}
                        Residual::InPlace => {
                            // SAFETY: row t belongs to this task.
                            unsafe { out.read(isa, at, &mut buffer[..len]) };
                            vector::add_assign(isa, sum, &buffer[..len]);
                        }
                        Residual::Of(view) => {
                            vector::add_assign(isa, sum, Floats::new(view).read(isa, at, len, &mut buffer));
                        }
                    }
                    // SAFETY: as above.
                    unsafe { out.write(isa, at, sum) };
                }
            }
        });
        Ok(())
    }

    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::weigh(x, rows, weights, &out);
        let (x, rows_tx, weights_tx) = (Floats::new(x), ints(rows), floats(weights));
        let (out, isa) = (FloatsMut::new(out), self.threads.isa());
        self.assert_named_once(rows_tx);
        self.threads.run_ranges(dims.routed(), rows_per_task(dims.width), |choices, _| {
            let mut buffer = [0.0; BLOCK];
            for choice in choices {
                for (col, len) in blocks(dims.width) {
                    let (at, block) = (rows_tx[choice] as usize * dims.width + col, &mut buffer[..len]);
                    x.slice(at, len).widen(isa, block);
                    vector::scale(isa, block, weights_tx[choice]);
                    // SAFETY: each routed row is named once, and this one by a choice of this task.
                    unsafe { out.write(isa, at, block) };
                }
            }
        });
        Ok(())
    }

    /// A row's products are added in f32 within a block of [`BLOCK`] and in f64 over blocks.
    fn weigh_backward(
        &self,
        d: ViewMut<'_>,
        x: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        dweights: ViewMut<'_>,
    ) -> Result {
        let dims = check::weigh_backward(&d, x, rows, weights, &dweights);
        let (x, rows_tx, weights_tx) = (Floats::new(x), ints(rows), floats(weights));
        let (d, dweights_tx) = (FloatsMut::new(d), SharedMut::new(floats_mut(dweights)));
        let isa = self.threads.isa();
        self.assert_named_once(rows_tx);
        self.threads.run_ranges(dims.routed(), rows_per_task(dims.width), |choices, _| {
            let (mut of_x, mut of_d) = ([0.0; BLOCK], [0.0; BLOCK]);
            for choice in choices {
                let mut sum = 0.0f64;
                for (col, len) in blocks(dims.width) {
                    let (at, d_f) = (rows_tx[choice] as usize * dims.width + col, &mut of_d[..len]);
                    // SAFETY: each routed row is named once, and this one by a choice of this task.
                    unsafe { d.read(isa, at, d_f) };
                    sum += f64::from(vector::dot(isa, d_f, x.read(isa, at, len, &mut of_x)));
                    vector::scale(isa, d_f, weights_tx[choice]);
                    // SAFETY: as above.
                    unsafe { d.write(isa, at, d_f) };
                }
                // SAFETY: the choice belongs to this task.
                unsafe { dweights_tx.set(choice, sum as f32) };
            }
        });
        Ok(())
    }
}

fn rows_per_task(width: usize) -> usize {
    (CHUNK / width.max(1)).max(1)
}

/// The first column and the length of every block of a row.
fn blocks(width: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..width).step_by(BLOCK).map(move |col| (col, BLOCK.min(width - col)))
}

impl Cpu {
    /// The experts of every token and their weights.
    fn choose(
        &self,
        dims: ChoiceDims,
        logits: Floats<'_>,
        gating: Gating<'_>,
        weights_tx: &mut [f32],
        chosen_tx: &mut [i32],
    ) {
        let (isa, bias_e) = (self.threads.isa(), gating.bias.map(floats));
        let (weights_tx, chosen_tx) = (SharedMut::new(weights_tx), SharedMut::new(chosen_tx));
        self.threads.run_ranges(dims.tokens, rows_per_task(dims.experts), |tokens, scratch| {
            let mut carver = Carver::new(scratch);
            let count = gating.groups.map_or(0, |groups| groups.count);
            let (scores_g, kept_g) = (carver.take(count), carver.take_of(count));
            for t in tokens {
                let (row, first) = (logits.slice(t * dims.experts, dims.experts), t * dims.choices);
                // SAFETY: the choices of token t belong to this task.
                let weights_x = unsafe { weights_tx.slice(first, dims.choices) };
                // SAFETY: as above.
                let chosen_x = unsafe { chosen_tx.slice(first, dims.choices) };
                let scores = RowScores::of(isa, row, gating.scores);
                let compared = bias_e.map_or(Compared::Logits, |bias_e| Compared::Biased(scores, bias_e));
                let kept = gating.groups.map(|groups| {
                    let compared = match (groups.by, compared) {
                        (GroupScore::TwoLargest, Compared::Logits) => Compared::Scores(scores),
                        _ => compared,
                    };
                    keep(isa, row, compared, groups, scores_g, kept_g);
                    (&*kept_g, dims.experts / groups.count)
                });
                largest(isa, row, compared, kept, weights_x, chosen_x);
                if bias_e.is_some() {
                    logits_of(isa, row, chosen_x, weights_x);
                }
                scores.apply(isa, weights_x);
                if gating.normalize {
                    let sum: f32 = weights_x.iter().sum();
                    weights_x.iter_mut().for_each(|weight| *weight /= sum);
                }
                vector::scale(isa, weights_x, gating.scale);
            }
        });
    }

    /// # Panics
    /// `rows` does not name each of as many rows once: tasks would write the same memory.
    fn assert_named_once(&self, rows: &[i32]) {
        let mut shared = self.threads.shared();
        let words: &mut [u32] = bytemuck::cast_slice_mut(shared.floats());
        let at_once = 32 * words.len();
        for first in (0..rows.len()).step_by(at_once) {
            let wanted = at_once.min(rows.len() - first);
            let words = &mut words[..wanted.div_ceil(32)];
            words.fill(0);
            // Of a negative number comes one beyond every row.
            for at in rows.iter().map(|row| (*row as usize).wrapping_sub(first)).filter(|at| *at < wanted) {
                words[at / 32] |= 1 << (at % 32);
            }
            let found: usize = words.iter().map(|word| word.count_ones() as usize).sum();
            assert_eq!(found, wanted, "each of {} routed rows is named once", rows.len());
        }
    }
}

/// The largest of what experts of a row are compared by, and these experts, largest first, of equal ones the lower; NaNs last. `kept`
/// marks the groups they are in, of so many experts, if not all of them are.
fn largest(
    isa: Isa,
    row: Floats<'_>,
    compared: Compared<'_>,
    kept: Option<(&[u8], usize)>,
    largest_x: &mut [f32],
    chosen_x: &mut [i32],
) {
    let (mut buffer, mut count) = ([0.0; BLOCK], 0);
    for (first, len) in blocks(row.len()) {
        let block = &mut buffer[..len];
        compared.read(isa, row, first, block);
        let Some((kept_g, size)) = kept else {
            count = insert(block, first, count, largest_x, chosen_x);
            continue;
        };
        for g in first / size..(first + len).div_ceil(size) {
            if kept_g[g] != 0 {
                let start = first.max(g * size);
                let of_group = &block[start - first..len.min((g + 1) * size - first)];
                count = insert(of_group, start, count, largest_x, chosen_x);
            }
        }
    }
}

/// Inserts values of the experts from `first` on among the largest so far, of which there are `count`; how many there are then.
#[inline(always)]
fn insert(
    values: &[f32],
    first: usize,
    mut count: usize,
    largest_x: &mut [f32],
    chosen_x: &mut [i32],
) -> usize {
    let most = largest_x.len();
    let mut least = if count == most { largest_x[count - 1] } else { f32::NAN };
    for (e, &value) in values.iter().enumerate() {
        if count == most && !is_larger(value, least) {
            continue;
        }
        let at = largest_x[..count].partition_point(|&kept| !is_larger(value, kept));
        count = most.min(count + 1);
        largest_x[at..count].rotate_right(1);
        chosen_x[at..count].rotate_right(1);
        (largest_x[at], chosen_x[at]) = (value, (first + e) as i32);
        least = largest_x[count - 1];
    }
    count
}

/// Marks the groups of a row that are kept, by their scores.
fn keep(
    isa: Isa,
    row: Floats<'_>,
    compared: Compared<'_>,
    groups: ExpertGroups,
    scores_g: &mut [f32],
    kept_g: &mut [u8],
) {
    let (mut buffer, size) = ([0.0; BLOCK], row.len() / groups.count);
    let (mut most, mut second) = (f32::NAN, f32::NAN);
    for (first, len) in blocks(row.len()) {
        let block = &mut buffer[..len];
        compared.read(isa, row, first, block);
        for (e, &value) in block.iter().enumerate() {
            if is_larger(value, most) {
                (most, second) = (value, most);
            } else if is_larger(value, second) {
                second = value;
            }
            if (first + e + 1).is_multiple_of(size) {
                scores_g[(first + e) / size] = match groups.by {
                    GroupScore::Largest => most,
                    GroupScore::TwoLargest => most + second,
                };
                (most, second) = (f32::NAN, f32::NAN);
            }
        }
    }
    for (g, kept) in kept_g.iter_mut().enumerate() {
        let precedes = |&h: &usize| match h < g {
            true => !is_larger(scores_g[g], scores_g[h]),
            false => is_larger(scores_g[h], scores_g[g]),
        };
        *kept = u8::from((0..groups.count).filter(precedes).count() < groups.kept);
    }
}

/// Whether one of two values to be compared is; a NaN is less than everything else.
fn is_larger(value: f32, than: f32) -> bool {
    value > than || (than.is_nan() && !value.is_nan())
}

/// The logits of chosen experts.
fn logits_of(isa: Isa, row: Floats<'_>, chosen_x: &[i32], logits_x: &mut [f32]) {
    for (logit, &expert) in logits_x.iter_mut().zip(chosen_x) {
        row.slice(expert as usize, 1).widen(isa, std::slice::from_mut(logit));
    }
}

/// What experts of a row are compared by.
#[derive(Clone, Copy)]
enum Compared<'a> {
    Logits,
    Scores(RowScores),
    /// Scores, and what is added to them.
    Biased(RowScores, &'a [f32]),
}

impl Compared<'_> {
    /// That of the experts from `first` on.
    fn read(self, isa: Isa, row: Floats<'_>, first: usize, out: &mut [f32]) {
        row.slice(first, out.len()).widen(isa, out);
        match self {
            Self::Logits => {}
            Self::Scores(scores) => scores.apply(isa, out),
            Self::Biased(scores, bias_e) => {
                scores.apply(isa, out);
                vector::add_assign(isa, out, &bias_e[first..first + out.len()]);
            }
        }
    }
}

/// What makes scores of the logits of a row.
#[derive(Clone, Copy)]
enum RowScores {
    /// `exp(x − max)·factor`.
    Softmax {
        max: f32,
        factor: f32,
    },
    Sigmoid,
}

impl RowScores {
    fn of(isa: Isa, row: Floats<'_>, scores: Scores) -> Self {
        match scores {
            Scores::Softmax => {
                let of_row = |at, len, out: &mut [f32]| row.slice(at, len).widen(isa, out);
                let Statistics { max, sum } = Statistics::of(isa, row.len(), of_row);
                Self::Softmax { max, factor: (1.0 / sum) as f32 }
            }
            Scores::Sigmoid => Self::Sigmoid,
        }
    }

    /// Makes scores of logits.
    fn apply(self, isa: Isa, x: &mut [f32]) {
        match self {
            Self::Softmax { max, factor } => vector::softmax_gradient(isa, x, max, factor),
            Self::Sigmoid => vector::sigmoids(isa, x),
        }
    }
}

/// Numbers choices by their expert, those of one expert in their order, and says where each expert's begin: a counting sort.
fn number(chosen_tx: &[i32], rows_tx: &mut [i32], starts: &mut [i32]) {
    starts.fill(0);
    for &expert in chosen_tx {
        starts[expert as usize + 1] += 1;
    }
    for expert in 1..starts.len() {
        starts[expert] += starts[expert - 1];
    }
    // While rows are given away, a start is the next row of its expert, and in the end the first of the expert after it.
    for (row, &expert) in rows_tx.iter_mut().zip(chosen_tx) {
        *row = starts[expert as usize];
        starts[expert as usize] += 1;
    }
    starts.copy_within(..starts.len() - 1, 1);
    starts[0] = 0;
}

/// The gradient of logits, token by token.
struct RouteGradient<'a> {
    dims: ChoiceDims,
    logits: Floats<'a>,
    gating: Gating<'a>,
    weights_tx: &'a [f32],
    chosen_tx: &'a [i32],
    dweights_tx: &'a [f32],
    dlogits: FloatsMut<'a>,
}

impl RouteGradient<'_> {
    /// # Safety
    /// No other task touches row `t` of dlogits.
    unsafe fn run(&self, isa: Isa, t: usize, block: &mut [f32], p_x: &mut [f32], g_x: &mut [f32]) {
        let (experts, choices) = (self.dims.experts, t * self.dims.choices..(t + 1) * self.dims.choices);
        let (row, chosen_x) = (self.logits.slice(t * experts, experts), &self.chosen_tx[choices.clone()]);
        let scores = RowScores::of(isa, row, self.gating.scores);
        logits_of(isa, row, chosen_x, p_x);
        scores.apply(isa, p_x);
        let dweights_x = &self.dweights_tx[choices.clone()];
        g_x.copy_from_slice(dweights_x);
        vector::scale(isa, g_x, self.gating.scale);
        if self.gating.normalize {
            let (sum, mean) = (p_x.iter().sum::<f32>(), dot(dweights_x, &self.weights_tx[choices]));
            g_x.iter_mut().for_each(|g| *g = (*g - mean) / sum);
        }
        let inner = dot(p_x, g_x);
        for (first, len) in blocks(experts) {
            let block = &mut block[..len];
            match scores {
                RowScores::Softmax { max, factor } => {
                    row.slice(first, len).widen(isa, block);
                    vector::softmax_gradient(isa, block, max, -factor * inner);
                }
                RowScores::Sigmoid => block.fill(0.0),
            }
            for ((p, g), &expert) in p_x.iter().zip(&*g_x).zip(chosen_x) {
                if let Some(dlogit) = (expert as usize).checked_sub(first).and_then(|at| block.get_mut(at)) {
                    *dlogit = match scores {
                        RowScores::Softmax { .. } => p * (g - inner),
                        RowScores::Sigmoid => p * (1.0 - p) * g,
                    };
                }
            }
            // SAFETY: the caller's promise.
            unsafe { self.dlogits.write(isa, t * experts + first, block) };
        }
    }
}

/// `Σ a·b` of a few elements, in order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
