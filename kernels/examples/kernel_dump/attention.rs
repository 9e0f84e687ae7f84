//! Attention of training, forward and backward, and of decoding over keys in rows and in pages; sinks.

use crate::products::pairs;
use crate::{Case, MIXES, Rig};
use terrace_kernels::{AttentionSpec, DType, KeyValues, Tensor};

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
}

/// Batch, queries, heads, key heads, head size, window.
const fn sizes(
    batch: usize,
    queries: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    window: Option<usize>,
) -> Sizes {
    Sizes { batch, queries, heads, kv_heads, head_size, window }
}

/// Head sizes with kernels for tensor cores, and others; lengths that are whole tiles, and others.
const TRAINING: [Sizes; 6] = [
    sizes(2, 200, 8, 2, 128, None),
    sizes(1, 512, 4, 1, 128, None),
    sizes(1, 333, 4, 4, 64, Some(100)),
    sizes(1, 256, 2, 1, 128, Some(64)),
    sizes(2, 65, 6, 2, 80, None),
    sizes(1, 129, 2, 1, 256, Some(33)),
];
const TRAINING_TINY: [Sizes; 3] =
    [sizes(1, 20, 2, 1, 64, None), sizes(1, 9, 2, 1, 128, None), sizes(2, 9, 4, 2, 16, Some(4))];

const DECODING: [Sizes; 4] = [
    sizes(3, 1, 8, 2, 128, None),
    sizes(3, 5, 8, 8, 64, None),
    sizes(3, 1, 8, 2, 64, Some(200)),
    sizes(3, 40, 4, 2, 80, None),
];
const DECODING_TINY: [Sizes; 2] = [sizes(3, 1, 4, 2, 16, None), sizes(3, 3, 2, 1, 64, Some(5))];

/// Positions of a page.
const PAGE: usize = KeyValues::PAGE_MIN;

impl Sizes {
    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            scale: (self.head_size as f32).sqrt().recip(),
            window: self.window,
            cap: None,
            chunk: None,
        }
    }

    fn of_q(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads, self.head_size]
    }

    fn of_k(&self, capacity: usize) -> [usize; 4] {
        [self.batch, capacity, self.kv_heads, self.head_size]
    }

    fn case<'r>(&self, rig: &'r Rig, op: &'static str, variant: &'static str, what: &str) -> Case<'r> {
        let Self { batch, queries, heads, kv_heads, head_size, window } = self;
        let window = window.map_or(String::new(), |window| format!(" W{window}"));
        let name = format!("B{batch} S{queries} H{heads} G{kv_heads} K{head_size}{window} {what}");
        let case = rig.case_of(op, variant, name).with("scale", f64::from(self.spec().scale));
        case.with("window", self.window.unwrap_or(0))
    }

    fn results(&self, case: &Case<'_>, dtype: DType) -> (Tensor, Tensor) {
        let lse = case.result(DType::F32, &[self.batch, self.heads, self.queries]);
        (case.result(dtype, &self.of_q()), lse)
    }
}

pub fn run(rig: &Rig) {
    for (sizes, mix) in pairs(&rig.sizes(&TRAINING, &TRAINING_TINY), &MIXES) {
        training(rig, sizes, mix);
        sinks(rig, sizes, mix);
    }
    let capacity = if rig.tiny { 2 * PAGE } else { 9 * PAGE };
    for (sizes, mix) in pairs(&rig.sizes(&DECODING, &DECODING_TINY), &MIXES) {
        for in_pages in [false, true] {
            decoding(rig, sizes, mix, capacity, in_pages);
        }
    }
    for (from, to) in [(DType::BF16, DType::BF16), (DType::F32, DType::F32), (DType::F32, DType::BF16)] {
        append(rig, from, to);
    }
}

fn training(rig: &Rig, sizes: Sizes, (dtype, of_out): (DType, DType)) {
    let what = format!("{dtype} to {of_out}");
    for (variant, set) in rig.sets_of_attention() {
        let operands = |case: &mut Case<'_>| {
            let q = case.operand("q", dtype, &sizes.of_q(), 1.5);
            let k = case.operand("k", dtype, &sizes.of_k(sizes.queries), 1.5);
            (q, k, case.operand("v", dtype, &sizes.of_k(sizes.queries), 1.0))
        };
        let forward = |case: &mut Case<'_>, (q, k, v): (&Tensor, &Tensor, &Tensor)| {
            let starts = case.integers("starts", &[sizes.batch], &vec![0; sizes.batch]);
            let (mut out, mut lse) = sizes.results(case, of_out);
            let keys = KeyValues::rows(k.view(), v.view());
            let (into, into_lse) = (out.view_mut(), lse.view_mut());
            set.attention
                .forward(q.view(), keys, starts.view(), into, into_lse, sizes.spec())
                .expect("attention runs");
            (out, lse)
        };
        let mut case = sizes.case(rig, "attention", variant, &what);
        let (q, k, v) = operands(&mut case);
        let (out, lse) = forward(&mut case, (&q, &k, &v));
        case.finish(&[("out", &out), ("lse", &lse)]);

        let mut case = sizes.case(rig, "attention_backward", variant, &what);
        let (q, k, v) = operands(&mut case);
        let dout = case.operand("dout", dtype, &sizes.of_q(), 1.0);
        let (out, lse) = forward(&mut case, (&q, &k, &v));
        let mut dq = case.result(of_out, &sizes.of_q());
        let [mut dk, mut dv] = [(); 2].map(|()| case.result(of_out, &sizes.of_k(sizes.queries)));
        let (of_q, of_k, of_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
        let (q, k, v, dout) = (q.view(), k.view(), v.view(), dout.view());
        set.attention
            .backward(q, k, v, out.view(), lse.view(), dout, of_q, of_k, of_v, sizes.spec())
            .expect("attention runs");
        case.finish(&[("dq", &dq), ("dk", &dk), ("dv", &dv)]);
    }
}

fn decoding(rig: &Rig, sizes: Sizes, (dtype, of_out): (DType, DType), capacity: usize, in_pages: bool) {
    let what = format!("C{capacity} {dtype} to {of_out} in {}", if in_pages { "pages" } else { "rows" });
    // At the beginning, just beyond a page, and as far as it goes.
    let starts = [0, PAGE + 1, capacity - sizes.queries].map(|start| start as i32);
    for (variant, set) in rig.sets_of_attention() {
        let mut case = sizes.case(rig, "attention", variant, &what);
        let starts = case.integers("starts", &[sizes.batch], &starts);
        let q = case.operand("q", dtype, &sizes.of_q(), 1.5);
        let (of_k, table) = if in_pages {
            let (count, table) = shuffled_pages(&mut case, sizes, capacity);
            ([count, PAGE, sizes.kv_heads, sizes.head_size], Some(table))
        } else {
            (sizes.of_k(capacity), None)
        };
        let (k, v) = (case.operand("k", dtype, &of_k, 1.5), case.operand("v", dtype, &of_k, 1.0));
        let (mut out, mut lse) = sizes.results(&case, of_out);
        let keys = KeyValues { k: k.view(), v: v.view(), pages: table.as_ref().map(Tensor::view) };
        let (into, into_lse) = (out.view_mut(), lse.view_mut());
        set.attention
            .forward(q.view(), keys, starts.view(), into, into_lse, sizes.spec())
            .expect("attention runs");
        case.finish(&[("out", &out), ("lse", &lse)]);
    }
}

/// Pages of all sequences in no order, with one that nobody has; the first sequence's rest has none.
fn shuffled_pages(case: &mut Case<'_>, sizes: Sizes, capacity: usize) -> (usize, Tensor) {
    let per_sequence = capacity / PAGE;
    let count = sizes.batch * per_sequence + 1;
    let mut order: Vec<i32> = (0..count as i32).collect();
    let picks = case.random_integers(count, count);
    picks.iter().enumerate().for_each(|(i, pick)| order.swap(i, *pick as usize));
    order.truncate(sizes.batch * per_sequence);
    order[sizes.queries.div_ceil(PAGE)..per_sequence].fill(-1);
    (count, case.integers("pages", &[sizes.batch, per_sequence], &order))
}

/// Of out and lse that are any. Backward is given what the sinks made of them.
fn sinks(rig: &Rig, sizes: Sizes, (dtype, of_out): (DType, DType)) {
    let (sinks, of_heads) = (&rig.kernels().sinks, [sizes.heads]);
    let Sizes { batch, queries, heads, head_size, .. } = sizes;
    for backward in [false, true] {
        let op = if backward { "sinks_backward" } else { "sinks" };
        let mut case = rig.case(op, format!("B{batch} S{queries} H{heads} K{head_size} {dtype} to {of_out}"));
        let sink = case.operand("sinks", dtype, &of_heads, 2.0);
        let mut out = case.operand("out", of_out, &sizes.of_q(), 1.0);
        let mut lse = case.operand("lse", DType::F32, &[batch, heads, queries], 3.0);
        sinks.add(sink.view(), out.view_mut(), lse.view_mut()).expect("sinks are added");
        if !backward {
            case.finish(&[("out", &out), ("lse", &lse)]);
            continue;
        }
        let dout = case.operand("dout", dtype, &sizes.of_q(), 1.0);
        let mut dsinks = case.operand("dsinks", DType::F32, &of_heads, 1.0);
        let (out, lse) = (out.view(), lse.view());
        sinks.backward(sink.view(), out, lse, dout.view(), dsinks.view_mut()).expect("sinks have a gradient");
        case.finish(&[("dsinks", &dsinks)]);
    }
}

fn append(rig: &Rig, from: DType, to: DType) {
    let [batch, length, heads, size] = if rig.tiny { [2, 3, 2, 16] } else { [3, 70, 4, 72] };
    let mut case = rig.case("append", format!("B{batch} S{length} G{heads} K{size} {from} to {to}"));
    let starts: Vec<i32> = (0..batch as i32).map(|b| 62 - 20 * b).collect();
    let starts = case.integers("starts", &[batch], &starts);
    // Three pages each, the second of the last sequence missing.
    let mut table: Vec<i32> = (0..3 * batch as i32).rev().collect();
    table[3 * batch - 2] = -1;
    let pages = case.integers("pages", &[batch, 3], &table);
    let [k, v] = ["k", "v"].map(|name| case.operand(name, from, &[batch, length, heads, size], 1.0));
    let of_cache = [3 * batch, PAGE, heads, size];
    let [mut to_k, mut to_v] = ["to_k", "to_v"].map(|name| case.operand(name, to, &of_cache, 1.0));
    let attention = &rig.kernels().attention;
    let (into_k, into_v) = (to_k.view_mut(), to_v.view_mut());
    let values = Some((v.view(), into_v));
    attention.append(k.view(), values, starts.view(), pages.view(), into_k).expect("append runs");
    case.finish(&[("to_k", &to_k), ("to_v", &to_v)]);
}
