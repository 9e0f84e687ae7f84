//! The backend that computes nothing: it checks shapes and counts work.
//!
//! Planning runs a step over virtual memory with this set to learn FLOPs and bytes. It never touches a byte, so
//! views may be in any address space.

use crate::check;
use crate::ops::Waves;
use crate::{
    Activation, Attention, AttentionSpec, Carried, Columns, CrossEntropy, DType, DeltaRule, DeltaSpec,
    Elementwise, Embedding, Epilogue, Experts, GateFunction, Gating, KernelSet, KeyValues, Matmul,
    MatmulSpec, QuantizedMatmul, QuantizedView, Reduce, Residual, Result, RmsNorm, Rope, RopeDirection,
    RopeLayout, Sinks, View, ViewMut,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A kernel set that counts, and its counter.
pub fn kernel_set() -> (KernelSet, Arc<Counter>) {
    let counter = Arc::new(Counter::default());
    let dry = Arc::new(Dry { counter: Arc::clone(&counter) });
    let set = KernelSet {
        matmul: dry.clone(),
        quantized_matmul: dry.clone(),
        rms_norm: dry.clone(),
        rope: dry.clone(),
        columns: dry.clone(),
        attention: dry.clone(),
        sinks: dry.clone(),
        activation: dry.clone(),
        embedding: dry.clone(),
        cross_entropy: dry.clone(),
        elementwise: dry.clone(),
        reduce: dry.clone(),
        experts: dry.clone(),
        delta_rule: dry,
    };
    (set, counter)
}

/// Work done so far by a dry kernel set.
#[derive(Debug, Default)]
pub struct Counter {
    matmul_flops: AtomicU64,
    attention_flops: AtomicU64,
    other_flops: AtomicU64,
    bytes: AtomicU64,
}

/// What a [`Counter`] has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// `2·M·N·L` per product.
    pub matmul_flops: u64,
    /// `4·K` per query head and visible key forward, `10·K` backward (recomputing the scores included).
    pub attention_flops: u64,
    /// Everything else; an estimate of a few per element.
    pub other_flops: u64,
    /// Bytes of all operands read and written, each counted once per operation.
    pub bytes: u64,
}

impl Counter {
    /// The counts so far.
    pub fn totals(&self) -> Totals {
        Totals {
            matmul_flops: self.matmul_flops.load(Relaxed),
            attention_flops: self.attention_flops.load(Relaxed),
            other_flops: self.other_flops.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
        }
    }

    /// Starts again from zero.
    pub fn reset(&self) {
        for count in [&self.matmul_flops, &self.attention_flops, &self.other_flops, &self.bytes] {
            count.store(0, Relaxed);
        }
    }

    fn bytes(&self, read: &[View<'_>], written: &[&ViewMut<'_>]) {
        let read: usize = read.iter().map(|view| view.bytes().len()).sum();
        let written: usize = written.iter().map(|view| view.view().bytes().len()).sum();
        add(&self.bytes, (read + written) as u64);
    }

    /// Columns of both matrices, and no others.
    fn columns(&self, dims: &check::ColumnDims, dtype: DType) {
        let elements = (dims.rows + dims.groups()) * dims.width;
        add(&self.bytes, (elements * dtype.size()) as u64);
    }

    /// All of a product with an epilogue but the bytes of b.
    fn product_nt(&self, a: View<'_>, out: &ViewMut<'_>, dims: &check::ProductDims, epilogue: Epilogue<'_>) {
        self.product(dims.m, dims.n, dims.l);
        self.bytes(&[a], &[out]);
        for added in epilogue.bias.into_iter().chain(epilogue.residual.view(out)) {
            self.other(dims.m * dims.n);
            self.bytes(&[added], &[]);
        }
    }

    fn product(&self, m: usize, n: usize, l: usize) {
        add(&self.matmul_flops, times(&[2, m as u64, n as u64, l as u64]));
    }

    fn other(&self, flops: usize) {
        add(&self.other_flops, flops as u64);
    }

    /// `of_pair`: operations of each visible pair for every element of a head, and those of a cap.
    fn attention(&self, dims: &check::AttentionDims, of_pair: [usize; 2], spec: AttentionSpec) {
        let pairs = visible_pairs(dims.queries, dims.capacity, spec);
        let pairs = times(&[dims.batch as u64, dims.heads as u64, pairs]);
        let [of_element, of_cap] = of_pair.map(|flops| flops as u64);
        add(&self.attention_flops, times(&[pairs, of_element, dims.head_size as u64]));
        if spec.cap.is_some() {
            add(&self.other_flops, times(&[pairs, of_cap]));
        }
    }
}

/// Counts on to the largest number, where it stays: nothing is so large that it looks small.
fn add(count: &AtomicU64, more: u64) {
    let _ = count.fetch_update(Relaxed, Relaxed, |count| Some(count.saturating_add(more)));
}

/// The product, or the largest number.
fn times(factors: &[u64]) -> u64 {
    factors.iter().copied().fold(1, u64::saturating_mul)
}

/// Pairs of a query and a key it sees when the queries are the last ones of `capacity` positions: exact for training
/// (`capacity == queries`), an upper bound when the positions are only known at run time.
fn visible_pairs(queries: usize, capacity: usize, spec: AttentionSpec) -> u64 {
    match spec.chunk {
        // Whole chunks, and one that is begun.
        Some(chunk) if queries == capacity => {
            let (positions, chunk) = (queries as u64, chunk.min(queries.max(1)) as u64);
            let (whole, rest) = (positions / chunk, positions % chunk);
            whole * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2
        }
        // Nowhere more than a window as long as a chunk.
        chunk => {
            let most = spec.window.or(chunk).unwrap_or(usize::MAX);
            (0..queries).map(|i| (capacity - queries + i + 1).min(most) as u64).sum()
        }
    }
}

#[derive(Debug)]
struct Dry {
    counter: Arc<Counter>,
}

impl Matmul for Dry {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let dims = check::matmul(a, b, &out, spec);
        self.counter.product(dims.m, dims.n, dims.l);
        self.counter.bytes(&[a, b], &[&out]);
        if spec.accumulate {
            self.counter.bytes(&[out.view()], &[]);
        }
        Ok(())
    }

    fn matmul_nt(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, epilogue: Epilogue<'_>) -> Result {
        let dims = check::matmul_nt(a, b, &out, &epilogue);
        self.counter.bytes(&[b], &[]);
        self.counter.product_nt(a, &out, &dims, epilogue);
        Ok(())
    }
}

impl QuantizedMatmul for Dry {
    fn matmul_nt(
        &self,
        a: View<'_>,
        b: QuantizedView<'_>,
        out: ViewMut<'_>,
        epilogue: Epilogue<'_>,
    ) -> Result {
        let dims = check::quantized_matmul(a, b, &out, &epilogue);
        add(&self.counter.bytes, b.bytes().len() as u64);
        self.counter.product_nt(a, &out, &dims, epilogue);
        Ok(())
    }
}

impl RmsNorm for Dry {
    fn forward(&self, x: View<'_>, weight: View<'_>, _: f32, out: ViewMut<'_>, rstd: ViewMut<'_>) -> Result {
        let dims = check::norm_forward(x, weight, &out, &rstd);
        self.counter.other(4 * dims.rows * dims.width);
        self.counter.bytes(&[x, weight], &[&out, &rstd]);
        Ok(())
    }

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
        self.counter.other(11 * dims.rows * dims.width);
        self.counter.bytes(&[dout, x, weight, rstd, dweight.view()], &[&dx, &dweight]);
        if accumulate_dx {
            self.counter.bytes(&[dx.view()], &[]);
        }
        Ok(())
    }

    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result {
        let dims = check::center(x, &out);
        self.counter.other(2 * dims.rows * dims.width);
        self.counter.bytes(&[x], &[&out]);
        if accumulate {
            self.counter.bytes(&[out.view()], &[]);
        }
        Ok(())
    }
}

impl Rope for Dry {
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        _scale: f32,
        _direction: RopeDirection,
    ) -> Result {
        let dims = check::rope(&x, positions, inv_freq, layout);
        self.counter.other(3 * dims.tokens * dims.heads * 2 * dims.half);
        self.counter.bytes(&[x.view(), positions, inv_freq], &[&x]);
        Ok(())
    }
}

impl Columns for Dry {
    fn copy(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_copy(x, from, &out, to, width);
        self.counter.columns(&dims, x.dtype());
        Ok(())
    }

    /// A sum for each term after the first.
    fn fold(&self, x: View<'_>, from: usize, out: ViewMut<'_>, to: usize, width: usize) -> Result {
        let dims = check::columns_fold(x, from, &out, to, width);
        self.counter.other((dims.rows - dims.groups()) * width);
        self.counter.columns(&dims, x.dtype());
        Ok(())
    }

    fn clear(&self, out: ViewMut<'_>, at: usize, width: usize) -> Result {
        let [rows, _] = check::columns_clear(&out, at, width);
        add(&self.counter.bytes, (rows * width * out.dtype().size()) as u64);
        Ok(())
    }
}

impl Attention for Dry {
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
        self.counter.attention(&dims, [4, 3], spec);
        self.counter.bytes(&[q, keys.k, keys.v, starts], &[&out, &lse]);
        Ok(())
    }

    fn append(
        &self,
        k: View<'_>,
        values: Option<(View<'_>, ViewMut<'_>)>,
        starts: View<'_>,
        pages: View<'_>,
        to_k: ViewMut<'_>,
    ) -> Result {
        check::append(k, &values, starts, pages, &to_k);
        // As many bytes are written as read, where the dtypes agree.
        self.counter.bytes(&[k, starts, k], &[]);
        if let Some((v, _)) = values {
            self.counter.bytes(&[v, v], &[]);
        }
        Ok(())
    }

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
        self.counter.attention(&dims, [10, 6], spec);
        self.counter.bytes(&[q, k, v, out, lse, dout], &[&dq, &dk, &dv]);
        Ok(())
    }
}

impl Sinks for Dry {
    /// A product for each element, and of each row a difference, an exponential, a share of three and an lse of two.
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result {
        let dims = check::sinks_add(sinks, &out, &lse);
        self.counter.other(dims.rows() * (dims.head_size + 7));
        self.counter.bytes(&[sinks, out.view(), lse.view()], &[&out, &lse]);
        Ok(())
    }

    /// A product and a sum for each element, and of each row a difference, an exponential, a product and a sum.
    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result {
        let dims = check::sinks_backward(sinks, out, lse, dout, &dsinks);
        self.counter.other(dims.rows() * (2 * dims.head_size + 4));
        self.counter.bytes(&[sinks, out, lse, dout, dsinks.view()], &[&dsinks]);
        Ok(())
    }
}

/// Operations of an element of a gated activation, forward and backward; an exponential or an error function is one.
fn gate_flops(f: GateFunction) -> [usize; 2] {
    match f {
        GateFunction::Silu => [5, 11],
        GateFunction::Gelu => [6, 14],
        GateFunction::GeluTanh => [9, 18],
        GateFunction::ClampedSwish => [10, 19],
        GateFunction::Sigmoid => [4, 8],
    }
}

impl Activation for Dry {
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("gate", gate), check::read("up", up), check::write("out", &out)];
        self.counter.other(gate_flops(f)[0] * check::elementwise("gated", &operands));
        self.counter.bytes(&[gate, up], &[&out]);
        Ok(())
    }

    fn gated_backward(
        &self,
        f: GateFunction,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        let reads = [check::read("gate", gate), check::read("up", up), check::read("dout", dout)];
        let writes = [check::write("dgate", &dgate), check::write("dup", &dup)];
        let elements = check::elementwise("gated backward", &[&reads[..], &writes[..]].concat());
        self.counter.other(gate_flops(f)[1] * elements);
        self.counter.bytes(&[gate, up, dout], &[&dgate, &dup]);
        Ok(())
    }
}

impl Embedding for Dry {
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result {
        check::gather(ids, table, &out);
        // Only the rows looked up are read: as many elements as are written.
        let read = out.shape().elements() * table.dtype().size();
        add(&self.counter.bytes, read as u64);
        self.counter.bytes(&[ids], &[&out]);
        Ok(())
    }

    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result {
        check::scatter_add(ids, dout, &dtable);
        let touched = dout.shape().elements();
        self.counter.other(touched);
        add(&self.counter.bytes, 2 * (touched * dtable.dtype().size()) as u64);
        self.counter.bytes(&[ids, dout], &[]);
        Ok(())
    }
}

impl CrossEntropy for Dry {
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result {
        let dims = check::cross_entropy(logits, labels, &loss);
        self.counter.other(4 * dims.rows * dims.width);
        self.counter.bytes(&[logits, labels], &[&loss]);
        Ok(())
    }

    fn loss_and_gradient(
        &self,
        logits: ViewMut<'_>,
        labels: View<'_>,
        _: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result {
        let dims = check::cross_entropy(logits.view(), labels, &loss);
        let of_element = if cap.is_some() { 11 } else { 7 };
        self.counter.other(of_element * dims.rows * dims.width);
        self.counter.bytes(&[logits.view(), labels], &[&logits, &loss]);
        Ok(())
    }
}

impl Elementwise for Dry {
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("a", a), check::read("b", b), check::write("out", &out)];
        self.counter.other(check::elementwise("add", &operands));
        self.counter.bytes(&[a, b], &[&out]);
        Ok(())
    }

    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result {
        self.counter
            .other(check::elementwise("add_assign", &[check::write("acc", &acc), check::read("x", x)]));
        self.counter.bytes(&[acc.view(), x], &[&acc]);
        Ok(())
    }

    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result {
        let dims = check::add_bias(&x, bias);
        self.counter.other(dims.rows * dims.width);
        self.counter.bytes(&[x.view(), bias], &[&x]);
        Ok(())
    }

    fn affine(&self, x: ViewMut<'_>, _: f32, _: f32) -> Result {
        self.counter.other(2 * check::elementwise("affine", &[check::write("x", &x)]));
        self.counter.bytes(&[x.view()], &[&x]);
        Ok(())
    }

    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("a", a), check::read("b", b), check::write("out", &out)];
        self.counter.other(check::elementwise("multiply", &operands));
        self.counter.bytes(&[a, b], &[&out]);
        Ok(())
    }

    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result {
        self.counter.other(check::scale(&x, factor));
        self.counter.bytes(&[x.view(), factor], &[&x]);
        Ok(())
    }

    fn cap(&self, x: ViewMut<'_>, _: f32) -> Result {
        self.counter.other(3 * check::elementwise("cap", &[check::write("x", &x)]));
        self.counter.bytes(&[x.view()], &[&x]);
        Ok(())
    }

    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise("cast", &[check::read("x", x), check::write("out", &out)]);
        self.counter.bytes(&[x], &[&out]);
        Ok(())
    }

    fn zero(&self, out: ViewMut<'_>) -> Result {
        self.counter.bytes(&[], &[&out]);
        Ok(())
    }
}

impl Reduce for Dry {
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::sum_rows(x, &out);
        self.counter.other(dims.rows * dims.width);
        self.counter.bytes(&[x, out.view()], &[&out]);
        Ok(())
    }
}

impl Experts for Dry {
    /// An exponential, its sum and the comparison of each logit, and with groups another.
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
        let of_choices = if gating.normalize { 3 } else { 1 };
        let of_experts = 4 + usize::from(gating.groups.is_some());
        self.counter.other(of_experts * dims.tokens * dims.experts + of_choices * dims.routed());
        self.counter.bytes(&[logits], &[&weights, &chosen, &rows, &starts]);
        self.counter.bytes(gating.bias.as_slice(), &[]);
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
        let of_choices = if gating.normalize { 7 } else { 2 };
        self.counter.other(6 * dims.tokens * dims.experts + of_choices * dims.routed());
        self.counter.bytes(&[logits, weights, chosen, dweights], &[&dlogits]);
        Ok(())
    }

    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>> {
        let experts = check::expert_starts(starts);
        self.counter.bytes(&[starts], &[]);
        // All go to the first: products with hundreds of experts have as many operations together as one with all rows, and a plan
        // asks for them again and again.
        Ok((0..=experts).map(|expert| if expert == 0 { 0 } else { routed }).collect())
    }

    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result {
        check::spread(x, rows, &out);
        self.counter.bytes(&[x, rows], &[&out]);
        Ok(())
    }

    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::collect(x, rows, &residual, &out);
        let added = residual.view(&out);
        let terms = dims.choices - usize::from(added.is_none());
        self.counter.other(terms * dims.tokens * dims.width);
        self.counter.bytes(&[x, rows], &[&out]);
        self.counter.bytes(added.as_slice(), &[]);
        Ok(())
    }

    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::weigh(x, rows, weights, &out);
        self.counter.other(dims.routed() * dims.width);
        self.counter.bytes(&[x, rows, weights], &[&out]);
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
        self.counter.other(3 * dims.routed() * dims.width);
        self.counter.bytes(&[d.view(), x, rows, weights], &[&d, &dweights]);
        Ok(())
    }
}

/// An exponential is one operation.
impl DeltaRule for Dry {
    /// A product and a sum for each tap, and a SiLU of 5.
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve(x, weight, carried.as_ref(), &out);
        self.counter.other(dims.tokens() * dims.channels * (2 * dims.taps + 5));
        self.counter.bytes(&[x, weight], &[&out]);
        self.carried(carried, dims.sequences);
        Ok(())
    }

    /// The sum again and the slope, and of each tap a product and a sum for the input and for the weight.
    fn convolve_backward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        dout: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve_backward(x, weight, dout, &dx, &dweight);
        self.counter.other(dims.tokens() * dims.channels * (6 * dims.taps + 9));
        self.counter.bytes(&[x, weight, dout, dweight.view()], &[&dx, &dweight]);
        Ok(())
    }

    fn gates(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        decay: ViewMut<'_>,
        beta: ViewMut<'_>,
    ) -> Result {
        let dims = check::gates(a, b, a_log, dt_bias, &decay, &beta);
        self.counter.other(10 * dims.rows * dims.width);
        self.counter.bytes(&[a, b, a_log, dt_bias], &[&decay, &beta]);
        Ok(())
    }

    fn gates_backward(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        ddecay: View<'_>,
        dbeta: View<'_>,
        da: ViewMut<'_>,
        db: ViewMut<'_>,
        da_log: ViewMut<'_>,
        ddt_bias: ViewMut<'_>,
    ) -> Result {
        let dims = check::gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, &da, &db, &da_log, &ddt_bias);
        self.counter.other(20 * dims.rows * dims.width);
        self.counter.bytes(&[a, b, a_log, dt_bias, ddecay, dbeta], &[&da, &db]);
        self.counter.bytes(&[da_log.view(), ddt_bias.view()], &[&da_log, &ddt_bias]);
        Ok(())
    }

    /// Of each element of a state a product by the factor, and a product and a sum for what it holds, for the correction, and for what
    /// comes out; of each of a query or a key 4.
    fn scan(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let dims = check::scan(qkv, decay, beta, spec, carried.as_ref(), &out);
        self.scanned(&dims, 7);
        self.counter.bytes(&[qkv, decay, beta], &[&out]);
        self.carried(carried, dims.sequences);
        Ok(())
    }

    /// States are computed twice, of 5 operations an element, and go back in 15. Bytes are also those of the states in the scratch: one of
    /// each stretch and of each position is written and read.
    fn scan_backward(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        dout: View<'_>,
        dqkv: ViewMut<'_>,
        ddecay: ViewMut<'_>,
        dbeta: ViewMut<'_>,
        scratch: ViewMut<'_>,
    ) -> Result {
        let dims = check::scan_backward(qkv, decay, beta, spec, dout, &dqkv, &ddecay, &dbeta, &scratch);
        self.scanned(&dims, 25);
        self.counter.bytes(&[qkv, decay, beta, dout], &[&dqkv, &ddecay, &dbeta]);
        let waves = Waves::new(dims.sequences, dims.length, spec);
        let states =
            [dims.pairs(), waves.stretches + dims.length, waves.of_state()].map(|count| count as u64);
        add(&self.counter.bytes, times(&[8, times(&states)]));
        Ok(())
    }
}

impl Dry {
    /// States of sequences are read and written.
    fn carried(&self, carried: Option<Carried<'_>>, sequences: usize) {
        let Some(Carried { state, slots, starts, last }) = carried else { return };
        let of_slot = state.view().bytes().len() / state.shape().dims()[0].max(1);
        add(&self.counter.bytes, times(&[2, sequences as u64, of_slot as u64]));
        self.counter.bytes(&[slots, starts, last], &[]);
    }

    fn scanned(&self, dims: &check::ScanDims, of_element: u64) {
        let heads = &dims.heads;
        let of_states =
            times(&[of_element, heads.value_heads as u64, heads.key_size as u64, heads.value_size as u64]);
        let of_keys = times(&[8, heads.key_heads as u64, heads.key_size as u64]);
        add(&self.counter.other_flops, times(&[dims.tokens() as u64, of_states.saturating_add(of_keys)]));
    }
}
