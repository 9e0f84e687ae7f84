//! The number of threads never changes a bit: results are compared by their bytes. Nor does, on a card, the order in which
//! threads run (a new one at every launch if TERRACE_SHIM_ORDER is set), nor where operands lie.

use crate::delta::{self, Places};
use crate::experts::{Routed, biases, gatings, route};
use crate::sinks;
use crate::support::{Host, Random, isas_and_pairs};
use std::hash::{DefaultHasher, Hasher};
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, ExpertGroups, GateFunction, Gating, GroupScore, KernelSet, KeyValues,
    MatmulSpec, Residual, RopeDirection, RopeLayout, RopePairs,
};

fn same_for_every_thread_count(what: &str, run: impl Fn(&KernelSet) -> Vec<Host>) {
    let Some(mut cuda) = crate::cuda::backends() else {
        return same_on(isas_and_pairs(), what, run);
    };
    // cuBLASLt, the last variant, may add in an order of its own.
    cuda.truncate(2);
    let hashes: Vec<_> =
        [&cuda, &cuda].into_iter().flatten().map(|(name, set)| (name, hash(&run(set)))).collect();
    assert!(hashes.windows(2).all(|pair| pair[0].1 == pair[1].1), "{what}: {hashes:?}");
}

fn same_on(isas: Vec<Isa>, what: &str, run: impl Fn(&KernelSet) -> Vec<Host>) {
    for isa in isas {
        let with =
            |threads| hash(&run(&cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(threads) })));
        let one = with(1);
        for threads in [2, 3, 8] {
            assert_eq!(one, with(threads), "{what}: {} threads, {}", threads, isa.name());
        }
    }
}

fn hash(tensors: &[Host]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for tensor in tensors {
        hasher.write(tensor.bytes());
    }
    hasher.finish()
}

#[test]
fn matmul() {
    for (m, n, l) in [(200, 500, 600), (1000, 64, 300), (3, 1000, 700)] {
        for spec in [MatmulSpec::NT, MatmulSpec::NN, MatmulSpec::TN_ACCUMULATE] {
            for dtype in [DType::F32, DType::BF16] {
                let a = Host::random(dtype, &if spec.trans_a { [l, m] } else { [m, l] }, 1.0, 1);
                let b = Host::random(dtype, &if spec.trans_b { [n, l] } else { [l, n] }, 1.0, 2);
                let what = format!("matmul {m} {n} {l} {spec:?} {dtype}");
                same_on(isas_and_pairs(), &what, |set| {
                    let mut out = Host::zeros(if spec.accumulate { DType::F32 } else { dtype }, &[m, n]);
                    set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
                    vec![out]
                });
            }
        }
    }
}

#[test]
fn products_with_epilogues() {
    for (m, n, l) in [(200, 500, 600), (3, 1000, 700)] {
        for dtype in [DType::F32, DType::BF16] {
            let (a, b) = (Host::random(dtype, &[m, l], 1.0, 1), Host::random(dtype, &[n, l], 1.0, 2));
            let (bias, old) = (Host::random(dtype, &[n], 1.0, 3), Host::random(dtype, &[m, n], 1.0, 4));
            let run = |set: &KernelSet| {
                let residuals = [Residual::InPlace, Residual::Of(old.view())];
                let results = residuals.map(|residual| {
                    let (mut out, bias) = (old.clone(), Some(bias.view()));
                    let epilogue = Epilogue { bias, residual };
                    set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).unwrap();
                    out
                });
                results.to_vec()
            };
            same_on(isas_and_pairs(), &format!("epilogues {m} {n} {l} {dtype}"), run);
        }
    }
}

/// Four pairs of sequences and heads: on the CPU one or two threads go backward in one pass, three or eight in two.
#[test]
fn attention() {
    attention_of(DType::BF16, 2, Some(150), None);
    attention_of(DType::F32, 2, None, None);
    attention_of(DType::BF16, 6, None, None);
    attention_of(DType::F16, 6, Some(150), None);
    attention_of(DType::BF16, 6, Some(150), Some(0.5));
}

fn attention_of(dtype: DType, kv_heads: usize, window: Option<usize>, cap: Option<f32>) {
    let (q_dims, k_dims) = ([2, 210, 6, 32], [2, 210, kv_heads, 32]);
    let [q, dout] = [1, 4].map(|seed| Host::random(dtype, &q_dims, 1.0, seed));
    let [k, v] = [2, 3].map(|seed| Host::random(dtype, &k_dims, 1.0, seed));
    let starts = Host::zeros(DType::I32, &[2]);
    let spec = AttentionSpec { scale: 0.2, window, cap, chunk: None };
    same_for_every_thread_count("attention", |set| {
        let mut out = Host::zeros(dtype, &q_dims);
        let mut lse = Host::zeros(DType::F32, &[2, 6, 210]);
        let (mut dq, mut dk, mut dv) =
            (out.clone(), Host::zeros(dtype, &k_dims), Host::zeros(dtype, &k_dims));
        let attention = &set.attention;
        attention
            .forward(
                q.view(),
                KeyValues::rows(k.view(), v.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
            .unwrap();
        attention
            .backward(
                q.view(),
                k.view(),
                v.view(),
                out.view(),
                lse.view(),
                dout.view(),
                dq.view_mut(),
                dk.view_mut(),
                dv.view_mut(),
                spec,
            )
            .unwrap();
        vec![out, lse, dq, dk, dv]
    });
}

/// Queries that begin within longer keys: many, and so few that keys are used as they lie; in one run and in pages.
#[test]
fn attention_from_a_start() {
    for (dtype, queries, window) in [
        (DType::BF16, 1, None),
        (DType::BF16, 70, Some(100)),
        (DType::F16, 3, Some(40)),
        (DType::F16, 70, None),
        (DType::F32, 70, None),
    ] {
        let (q_dims, k_dims) = ([3, queries, 6, 24], [3, 256, 2, 24]);
        let q = Host::random(dtype, &q_dims, 1.0, 1);
        let [k, v] = [2, 3].map(|seed| Host::random(dtype, &k_dims, 1.0, seed));
        let starts = Host::of(DType::I32, &[3], [0.0, 185.0, 63.0]);
        let table = (0..12).map(|page| if page == 3 { -1.0 } else { f64::from(11 - page) });
        let pages = Host::of(DType::I32, &[3, 4], table);
        let spec = AttentionSpec { scale: 0.2, window, cap: None, chunk: None };
        let run = |set: &KernelSet| {
            let in_pages = |of: &Host| Host::of(dtype, &[12, 64, 2, 24], of.values());
            let (mut page_k, mut page_v) = (in_pages(&k), in_pages(&v));
            let mut results = Vec::new();
            let keys = KeyValues::rows(k.view(), v.view());
            let paged = [page_k.clone(), page_v.clone()];
            let paged = KeyValues { k: paged[0].view(), v: paged[1].view(), pages: Some(pages.view()) };
            for keys in [keys, paged] {
                let (mut out, mut lse) =
                    (Host::zeros(dtype, &q_dims), Host::zeros(DType::F32, &[3, 6, queries]));
                let (into, into_lse) = (out.view_mut(), lse.view_mut());
                set.attention.forward(q.view(), keys, starts.view(), into, into_lse, spec).unwrap();
                results.extend([out, lse]);
            }
            let new = Host::random(DType::F32, &[3, queries, 2, 24], 1.0, 4);
            let (to_k, to_v) = (page_k.view_mut(), page_v.view_mut());
            let values = Some((new.view(), to_v));
            set.attention.append(new.view(), values, starts.view(), pages.view(), to_k).unwrap();
            results.extend([page_k, page_v]);
            results
        };
        let what = format!("{queries} queries of {dtype}, {window:?}");
        same_on(isas_and_pairs(), &what, run);
        same_for_every_thread_count(&what, run);
    }
}

/// Many rows, whose sums are cut into parts, and few.
#[test]
fn sinks() {
    for (dtype, [b, s, h, k]) in
        [(DType::F32, [2, 700, 10, 40]), (DType::BF16, [1, 1200, 3, 64]), (DType::F16, [3, 5, 200, 8])]
    {
        let of_heads = Host::random(dtype, &[h], 2.0, 1);
        let [out, dout] = [2, 3].map(|seed| Host::random(dtype, &[b, s, h, k], 1.0, seed));
        let lse = Host::random(DType::F32, &[b, h, s], 3.0, 4);
        let old = Host::random(DType::F32, &[h], 1.0, 5);
        same_for_every_thread_count(&format!("sinks of {dtype}"), |set| {
            let [out, lse] = sinks::add(set, &of_heads, &out, &lse);
            let dsinks = sinks::backward(set, [&of_heads, &out, &lse, &dout], &old);
            vec![out, lse, dsinks]
        });
    }
}

/// Few pairs, whose states are cut into parts for many threads, and more than a wave; sums over rows in parts.
#[test]
fn delta_rule() {
    for (dtype, size) in [
        (DType::F32, delta::size([1, 30, 1, 2, 20, 100])),
        (DType::BF16, delta::size([3, 9, 2, 26, 16, 8])),
        (DType::F16, delta::size([2, 300, 1, 2, 5, 3])),
    ] {
        let (spec, channels) = (size.spec, size.spec.channels());
        let [qkv, decay, beta, dout] = delta::operands(size, dtype);
        let (weight, old) =
            (Host::random(dtype, &[channels, 4], 1.0, 5), Host::zeros(DType::F32, &[channels, 4]));
        let heads = [spec.value_heads];
        let [a_log, dt_bias, old_heads] = [6, 7, 8].map(|seed| Host::random(DType::F32, &heads, 1.0, seed));
        let each: Vec<_> = (0..size.b).map(|b| (b, b, size.s - b)).collect();
        let places = Places::new(size.s, &each);
        let old_states = [size.b, spec.value_heads, spec.key_size, spec.value_size];
        let old_states = Host::random(DType::F32, &old_states, 1.0, 9);
        let old_inputs = Host::random(dtype, &[size.b, 3, channels], 1.0, 10);
        same_for_every_thread_count(&format!("{size:?} of {dtype}"), |set| {
            let (mut states, mut inputs) = (old_states.clone(), old_inputs.clone());
            let (operands, of_gates) = ([&qkv, &decay, &beta], [&decay, &beta, &a_log, &dt_bias]);
            let mut results = vec![
                delta::convolve(set, [&qkv, &weight], dtype, Some((&places, &mut inputs))),
                delta::scan(set, operands, spec, dtype, None),
                delta::scan(set, operands, spec, dtype, Some((&places, &mut states))),
                states,
                inputs,
            ];
            results.extend(delta::convolve_backward(set, [&qkv, &weight, &qkv], dtype, &old));
            results.extend(delta::gates(set, of_gates));
            results.extend(delta::gates_backward(set, of_gates, [&decay, &beta], dtype, &old_heads));
            results.extend(delta::scan_backward(set, operands, spec, &dout, dtype));
            results
        });
    }
}

#[test]
fn columns() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (few, many) =
            (Host::random(dtype, &[700, 300], 1.0, 1), Host::random(dtype, &[2100, 410], 1.0, 2));
        same_for_every_thread_count(&format!("columns of {dtype}"), |set| {
            let (mut copied, mut folded, mut cleared) = (many.clone(), few.clone(), few.clone());
            set.columns.copy(few.view(), 7, copied.view_mut(), 64, 290).unwrap();
            set.columns.fold(many.view(), 64, folded.view_mut(), 7, 290).unwrap();
            set.columns.clear(cleared.view_mut(), 8, 280).unwrap();
            vec![copied, folded, cleared]
        });
    }
}

/// Choices, and rows to their experts and back.
#[test]
fn experts() {
    let pairs = ExpertGroups { count: 12, kept: 5, by: GroupScore::TwoLargest };
    for (dtype, gating, groups) in [
        (DType::F32, 1, None),
        (DType::BF16, 0, None),
        (DType::F16, 5, Some(pairs)),
        (DType::F32, 3, Some(pairs)),
    ] {
        let (tokens, experts, choices, width) = (700, 60, 3, 300);
        let logits = Host::random(dtype, &[tokens, experts], 1.0, 1);
        let x = Host::random(dtype, &[tokens, width], 1.0, 2);
        let dweights = Host::random(DType::F32, &[tokens, choices], 1.0, 3);
        let bias = biases(experts);
        let gating = Gating { groups, ..gatings(&bias)[gating] };
        same_for_every_thread_count(&format!("experts of {dtype}"), |set| {
            let Routed { weights, chosen, rows, starts } = route(&*set.experts, &logits, choices, gating);
            let mut dlogits = Host::zeros(dtype, &[tokens, experts]);
            let (to_logits, of_choices) = (dlogits.view_mut(), chosen.view());
            set.experts
                .route_backward(logits.view(), gating, weights.view(), of_choices, dweights.view(), to_logits)
                .unwrap();
            let routed = || Host::zeros(dtype, &[tokens * choices, width]);
            let (mut spread, mut weighed, mut d, mut out) = (routed(), routed(), routed(), x.clone());
            let mut of_weights = dweights.clone();
            set.experts.spread(x.view(), rows.view(), spread.view_mut()).unwrap();
            set.experts.weigh(spread.view(), rows.view(), weights.view(), weighed.view_mut()).unwrap();
            set.experts.collect(weighed.view(), rows.view(), Residual::InPlace, out.view_mut()).unwrap();
            set.experts.spread(out.view(), rows.view(), d.view_mut()).unwrap();
            let (into, to_weights) = (d.view_mut(), of_weights.view_mut());
            set.experts.weigh_backward(into, spread.view(), rows.view(), weights.view(), to_weights).unwrap();
            vec![weights, chosen, rows, starts, dlogits, spread, weighed, out, d, of_weights]
        });
    }
}

/// What the engine does to whole tensors, in every dtype.
#[test]
fn elements() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (rows, width) = (300, 301);
        let [x, y] = [1, 2].map(|seed| Host::random(dtype, &[rows, width], 1.0, seed));
        let bias = Host::random(dtype, &[width], 1.0, 3);
        let heads = Host::random(dtype, &[rows, 7, 42], 1.0, 4);
        let mut random = Random::new(5);
        let labels = Host::of(DType::I32, &[rows], (0..rows).map(|_| random.below(width + 20) as f64 - 20.0));
        let inv_freq = Host::random(DType::F32, &[20], 0.5, 6);
        same_for_every_thread_count(&format!("elements of {dtype}"), |set| {
            let (elementwise, activation) = (&set.elementwise, &set.activation);
            let (mut sum, mut acc, mut biased, mut affine) = (x.clone(), x.clone(), x.clone(), x.clone());
            let (mut scaled, mut capped, mut product) = (x.clone(), x.clone(), x.clone());
            elementwise.multiply(x.view(), y.view(), product.view_mut()).unwrap();
            let (mut wide, mut narrow) =
                (Host::zeros(DType::F32, &[rows, width]), Host::zeros(DType::F16, &[rows, width]));
            let mut cleared = x.clone();
            elementwise.add(x.view(), y.view(), sum.view_mut()).unwrap();
            elementwise.add_assign(acc.view_mut(), y.view()).unwrap();
            elementwise.add_bias(biased.view_mut(), bias.view()).unwrap();
            elementwise.affine(affine.view_mut(), 0.3, 0.2).unwrap();
            elementwise.scale(scaled.view_mut(), inv_freq.view().reshape(&[20, 1]).rows(3, 4)).unwrap();
            elementwise.cap(capped.view_mut(), 0.8).unwrap();
            elementwise.cast(x.view(), wide.view_mut()).unwrap();
            elementwise.cast(x.view(), narrow.view_mut()).unwrap();
            elementwise.zero(cleared.view_mut()).unwrap();
            let mut results = vec![sum, acc, biased, affine, scaled, capped, product, wide, narrow, cleared];
            for f in GateFunction::ALL {
                let (mut out, mut dgate, mut dup) = (x.clone(), x.clone(), x.clone());
                activation.gated(f, x.view(), y.view(), out.view_mut()).unwrap();
                let (to_gate, to_up) = (dgate.view_mut(), dup.view_mut());
                activation.gated_backward(f, x.view(), y.view(), y.view(), to_gate, to_up).unwrap();
                results.extend([out, dgate, dup]);
            }
            let mut loss = Host::zeros(DType::F64, &[1]);
            set.cross_entropy.loss(x.view(), labels.view(), loss.view_mut()).unwrap();
            let mut turned = heads.clone();
            let (view, direction) = (turned.view_mut(), RopeDirection::Backward);
            let layout = RopeLayout { first: 1, pairs: RopePairs::Neighbours };
            set.rope.rotate(view, labels.view(), inv_freq.view(), layout, 1.0, direction).unwrap();
            results.extend([loss, turned]);
            results
        });
    }
}

#[test]
fn rows_and_elements() {
    let (rows, width) = (700, 300);
    let [x, y] = [1, 2].map(|seed| Host::random(DType::BF16, &[rows, width], 1.0, seed));
    let weight = Host::random(DType::BF16, &[width], 1.0, 3);
    let mut random = Random::new(4);
    let ids = Host::of(DType::I32, &[rows], (0..rows).map(|_| random.below(width) as f64));
    let inv_freq = Host::random(DType::F32, &[width / 4], 0.5, 5);
    same_for_every_thread_count("rows and elements", |set| {
        let zeros = |dtype| Host::zeros(dtype, &[rows, width]);
        let (mut out, mut dx, mut gathered, mut rotated) =
            (zeros(DType::BF16), zeros(DType::F32), zeros(DType::BF16), x.clone());
        let (mut dgate, mut dup) = (zeros(DType::BF16), zeros(DType::BF16));
        let mut rstd = Host::zeros(DType::F32, &[rows]);
        let (mut dweight, mut sums) = (Host::zeros(DType::F32, &[width]), Host::zeros(DType::F32, &[width]));
        let (mut dtable, mut loss) =
            (Host::zeros(DType::F32, &[width, width]), Host::zeros(DType::F64, &[1]));
        set.rms_norm.forward(x.view(), weight.view(), 1e-5, out.view_mut(), rstd.view_mut()).unwrap();
        set.rms_norm
            .backward(y.view(), x.view(), weight.view(), rstd.view(), dx.view_mut(), true, dweight.view_mut())
            .unwrap();
        let mut centered = y.clone();
        set.rms_norm.center(x.view(), centered.view_mut(), true).unwrap();
        set.embedding.gather(ids.view(), x.view(), gathered.view_mut()).unwrap();
        set.embedding.scatter_add(ids.view(), y.view(), dtable.view_mut()).unwrap();
        let heads = rotated.view_mut().reshape(&[rows, 2, width / 2]);
        set.rope
            .rotate(heads, ids.view(), inv_freq.view(), RopeLayout::HALVES, 1.0, RopeDirection::Forward)
            .unwrap();
        set.activation
            .gated_backward(
                GateFunction::Silu,
                x.view(),
                y.view(),
                x.view(),
                dgate.view_mut(),
                dup.view_mut(),
            )
            .unwrap();
        set.reduce.sum_rows(x.view(), sums.view_mut()).unwrap();
        let mut logits = y.clone();
        set.cross_entropy
            .loss_and_gradient(logits.view_mut(), ids.view(), 0.1, Some(2.0), loss.view_mut())
            .unwrap();
        vec![out, rstd, dx, dweight, centered, gathered, dtable, rotated, dgate, dup, sums, logits, loss]
    });
}
