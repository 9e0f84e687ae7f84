//! The reference itself: every backward pass against central differences of its forward pass.
//!
//! A scalar `Σ out·c` with fixed random c has the gradient that the backward pass gives for `dout = c`. Operands and
//! results are f32, whose rounding (6e-8 relative of sums up to ~10) divided by the step of 2e-2 leaves about 3e-5;
//! the truncation error of order step² times a third derivative of order 1 leaves about 1e-4 to 1e-3. Allowed: 2e-3.

use crate::delta;
use crate::experts::{Routed, gatings, route};
use crate::sinks;
use crate::support::Host;
use terrace_kernels::{
    AttentionSpec, DType, GateFunction, KernelSet, KeyValues, MatmulSpec, Residual, RopeDirection,
    RopeLayout, RopePairs, reference,
};

const STEP: f64 = 2e-2;
const TOLERANCE: f64 = 2e-3;

fn f32s(dims: &[usize], seed: u64) -> Host {
    Host::random(DType::F32, dims, 1.0, seed)
}

fn dot(a: &Host, b: &Host) -> f64 {
    a.values().iter().zip(b.values()).map(|(a, b)| a * b).sum()
}

/// Compares `gradient` with differences of `scalar` in every element of `x`.
fn check(what: &str, x: &Host, gradient: &Host, scalar: impl Fn(&Host) -> f64) {
    for (i, (value, analytic)) in x.values().into_iter().zip(gradient.values()).enumerate() {
        let at = |value| {
            let mut moved = x.clone();
            moved.set(i, value);
            scalar(&moved)
        };
        let numeric = (at(value + STEP) - at(value - STEP)) / (2.0 * STEP);
        let allowed = TOLERANCE * (1.0 + numeric.abs());
        assert!((numeric - analytic).abs() <= allowed, "{what}[{i}]: {analytic}, differences give {numeric}");
    }
}

#[test]
fn matmul() {
    let set = reference::kernel_set();
    let (x, w, c) = (f32s(&[3, 5], 1), f32s(&[4, 5], 2), f32s(&[3, 4], 3));
    let product = |a: &Host, b: &Host, dims: &[usize], spec| {
        let mut out = Host::zeros(DType::F32, dims);
        set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
        out
    };
    let dx = product(&c, &w, &[3, 5], MatmulSpec::NN);
    let dw = product(&c, &x, &[4, 5], MatmulSpec::TN_ACCUMULATE);
    check("dx", &x, &dx, |x| dot(&product(x, &w, &[3, 4], MatmulSpec::NT), &c));
    check("dw", &w, &dw, |w| dot(&product(&x, w, &[3, 4], MatmulSpec::NT), &c));
}

#[test]
fn rms_norm() {
    let set = reference::kernel_set();
    let (x, weight, c) = (f32s(&[3, 6], 1), f32s(&[6], 2), f32s(&[3, 6], 3));
    let forward = |x: &Host, weight: &Host| {
        let (mut out, mut rstd) = (Host::zeros(DType::F32, &[3, 6]), Host::zeros(DType::F32, &[3]));
        set.rms_norm.forward(x.view(), weight.view(), 0.1, out.view_mut(), rstd.view_mut()).unwrap();
        (out, rstd)
    };
    let (mut dx, mut dweight) = (Host::zeros(DType::F32, &[3, 6]), Host::zeros(DType::F32, &[6]));
    let rstd = forward(&x, &weight).1;
    set.rms_norm
        .backward(c.view(), x.view(), weight.view(), rstd.view(), dx.view_mut(), false, dweight.view_mut())
        .unwrap();
    check("dx", &x, &dx, |x| dot(&forward(x, &weight).0, &c));
    check("dweight", &weight, &dweight, |weight| dot(&forward(&x, weight).0, &c));
}

#[test]
fn rope() {
    let set = reference::kernel_set();
    let (x, c) = (f32s(&[3, 2, 5], 1), f32s(&[3, 2, 5], 2));
    let positions = Host::of(DType::I32, &[3], [0.0, 1.0, 7.0]);
    let inv_freq = Host::of(DType::F32, &[2], [1.0, 0.1]);
    for layout in [RopeLayout::HALVES, RopeLayout { first: 1, pairs: RopePairs::Neighbours }] {
        let turned = |x: &Host, direction| {
            let mut x = x.clone();
            set.rope.rotate(x.view_mut(), positions.view(), inv_freq.view(), layout, 1.3, direction).unwrap();
            x
        };
        let dx = turned(&c, RopeDirection::Backward);
        check("dx", &x, &dx, |x| dot(&turned(x, RopeDirection::Forward), &c));
    }
}

#[test]
fn gated() {
    let set = reference::kernel_set();
    let (gate, up, c) = (f32s(&[2, 7], 1), f32s(&[2, 7], 2), f32s(&[2, 7], 3));
    for f in GateFunction::ALL {
        let forward = |gate: &Host, up: &Host| {
            let mut out = Host::zeros(DType::F32, &[2, 7]);
            set.activation.gated(f, gate.view(), up.view(), out.view_mut()).unwrap();
            out
        };
        let (mut dgate, mut dup) = (Host::zeros(DType::F32, &[2, 7]), Host::zeros(DType::F32, &[2, 7]));
        set.activation
            .gated_backward(f, gate.view(), up.view(), c.view(), dgate.view_mut(), dup.view_mut())
            .unwrap();
        check(&format!("dgate, {f:?}"), &gate, &dgate, |gate| dot(&forward(gate, &up), &c));
        check(&format!("dup, {f:?}"), &up, &dup, |up| dot(&forward(&gate, up), &c));
    }
}

/// On both sides of the limits, further from them than a step.
#[test]
fn clamped_swish() {
    let set = reference::kernel_set();
    let gate = Host::of(DType::F32, &[3, 6], [-8.0, -1.5, 0.5, 2.0, 6.5, 7.5].repeat(3));
    let up = Host::of(DType::F32, &[3, 6], [[-7.5, 6.9, 0.3], [-0.5, 7.1, -6.9]].concat().repeat(3));
    let c = f32s(&[3, 6], 3);
    let forward = |gate: &Host, up: &Host| {
        let mut out = Host::zeros(DType::F32, &[3, 6]);
        set.activation.gated(GateFunction::ClampedSwish, gate.view(), up.view(), out.view_mut()).unwrap();
        out
    };
    let (mut dgate, mut dup) = (Host::zeros(DType::F32, &[3, 6]), Host::zeros(DType::F32, &[3, 6]));
    let (of_gate, of_up) = (dgate.view_mut(), dup.view_mut());
    set.activation
        .gated_backward(GateFunction::ClampedSwish, gate.view(), up.view(), c.view(), of_gate, of_up)
        .unwrap();
    check("dgate", &gate, &dgate, |gate| dot(&forward(gate, &up), &c));
    check("dup", &up, &dup, |up| dot(&forward(&gate, up), &c));
}

#[test]
fn embedding() {
    let set = reference::kernel_set();
    let (table, c) = (f32s(&[4, 3], 1), f32s(&[6, 3], 2));
    let ids = Host::of(DType::I32, &[6], [0.0, 3.0, 3.0, 1.0, 0.0, 3.0]);
    let mut dtable = Host::zeros(DType::F32, &[4, 3]);
    set.embedding.scatter_add(ids.view(), c.view(), dtable.view_mut()).unwrap();
    check("dtable", &table, &dtable, |table| {
        let mut out = Host::zeros(DType::F32, &[6, 3]);
        set.embedding.gather(ids.view(), table.view(), out.view_mut()).unwrap();
        dot(&out, &c)
    });
}

#[test]
fn cross_entropy() {
    let set = reference::kernel_set();
    let logits = f32s(&[4, 5], 1);
    let labels = Host::of(DType::I32, &[4], [0.0, 4.0, -100.0, 2.0]);
    for cap in [None, Some(1.3)] {
        let capped = |logits: &Host| {
            let mut logits = logits.clone();
            cap.into_iter().for_each(|cap| set.elementwise.cap(logits.view_mut(), cap).unwrap());
            logits
        };
        let (mut gradient, mut loss) = (capped(&logits), Host::zeros(DType::F64, &[1]));
        let (to, of_loss) = (gradient.view_mut(), loss.view_mut());
        set.cross_entropy.loss_and_gradient(to, labels.view(), 0.7, cap, of_loss).unwrap();
        check("dlogits", &logits, &gradient, |logits| {
            let mut loss = Host::zeros(DType::F64, &[1]);
            set.cross_entropy.loss(capped(logits).view(), labels.view(), loss.view_mut()).unwrap();
            0.7 * loss.values()[0]
        });
    }
}

#[test]
fn bias() {
    let set = reference::kernel_set();
    let (x, bias, c) = (f32s(&[3, 4], 1), f32s(&[4], 2), f32s(&[3, 4], 3));
    let mut dbias = Host::zeros(DType::F32, &[4]);
    set.reduce.sum_rows(c.view(), dbias.view_mut()).unwrap();
    check("dbias", &bias, &dbias, |bias| {
        let mut x = x.clone();
        set.elementwise.add_bias(x.view_mut(), bias.view()).unwrap();
        dot(&x, &c)
    });
}

/// Logits further apart than a step moves them: what is chosen has no gradient.
#[test]
fn routing() {
    let set = reference::kernel_set();
    let logits = Host::of(DType::F32, &[3, 5], (0..15).map(|i| 0.3 * f64::from(i * 7 % 15) - 2.0));
    let c = f32s(&[3, 2], 1);
    let bias = Host::of(DType::F32, &[5], [0.3, -0.2, 0.0, 0.1, -0.4]);
    for gating in gatings(&bias) {
        let Routed { weights, chosen, .. } = route(&*set.experts, &logits, 2, gating);
        let mut dlogits = Host::zeros(DType::F32, &[3, 5]);
        let (of_choices, to_logits) = (chosen.view(), dlogits.view_mut());
        set.experts
            .route_backward(logits.view(), gating, weights.view(), of_choices, c.view(), to_logits)
            .unwrap();
        check(&format!("dlogits, {gating:?}"), &logits, &dlogits, |logits| {
            dot(&route(&*set.experts, logits, 2, gating).weights, &c)
        });
    }
}

/// The gradient of spreading is collecting, and that of collecting spreading.
#[test]
fn routed_rows() {
    let experts = &reference::kernel_set().experts;
    let (x, y, weights) = (f32s(&[3, 4], 1), f32s(&[6, 4], 2), f32s(&[3, 2], 3));
    let (c, of_tokens) = (f32s(&[6, 4], 4), f32s(&[3, 4], 5));
    let rows = Host::of(DType::I32, &[3, 2], [4.0, 0.0, 1.0, 5.0, 3.0, 2.0]);
    let spread = |x: &Host| {
        let mut out = Host::zeros(DType::F32, &[6, 4]);
        experts.spread(x.view(), rows.view(), out.view_mut()).unwrap();
        out
    };
    let collect = |y: &Host| {
        let mut out = Host::zeros(DType::F32, &[3, 4]);
        experts.collect(y.view(), rows.view(), Residual::None, out.view_mut()).unwrap();
        out
    };
    let weigh = |y: &Host, weights: &Host| {
        let mut out = Host::zeros(DType::F32, &[6, 4]);
        experts.weigh(y.view(), rows.view(), weights.view(), out.view_mut()).unwrap();
        out
    };
    let (mut d, mut dweights) = (c.clone(), Host::zeros(DType::F32, &[3, 2]));
    let (into, to_weights) = (d.view_mut(), dweights.view_mut());
    experts.weigh_backward(into, y.view(), rows.view(), weights.view(), to_weights).unwrap();
    check("spread", &x, &collect(&c), |x| dot(&spread(x), &c));
    check("collect", &y, &spread(&of_tokens), |y| dot(&collect(y), &of_tokens));
    check("weigh", &y, &d, |y| dot(&weigh(y, &weights), &c));
    check("dweights", &weights, &dweights, |weights| dot(&weigh(&y, weights), &c));
}

fn attention_out(set: &KernelSet, q: &Host, k: &Host, v: &Host, spec: AttentionSpec) -> [Host; 2] {
    let mut out = Host::zeros(DType::F32, q.view().shape().dims());
    let mut lse = Host::zeros(DType::F32, &[1, 4, 5]);
    let starts = Host::zeros(DType::I32, &[1]);
    set.attention
        .forward(
            q.view(),
            KeyValues::rows(k.view(), v.view()),
            starts.view(),
            out.view_mut(),
            lse.view_mut(),
            spec,
        )
        .unwrap();
    [out, lse]
}

/// With and without what may hide or bend scores.
fn specs() -> impl Iterator<Item = AttentionSpec> {
    let sights = [
        (None, None, None),
        (Some(2), None, None),
        (None, Some(0.7), None),
        (Some(2), Some(0.7), None),
        (None, None, Some(3)),
        (None, Some(0.7), Some(3)),
    ];
    sights.into_iter().map(|(window, cap, chunk)| AttentionSpec { scale: 0.6, window, cap, chunk })
}

#[test]
fn attention() {
    let set = reference::kernel_set();
    for spec in specs() {
        let (q_dims, k_dims) = ([1, 5, 4, 3], [1, 5, 2, 3]);
        let (q, k, v, c) = (f32s(&q_dims, 1), f32s(&k_dims, 2), f32s(&k_dims, 3), f32s(&q_dims, 4));
        let [out, lse] = attention_out(&set, &q, &k, &v, spec);
        let mut dq = Host::zeros(DType::F32, &q_dims);
        let (mut dk, mut dv) = (Host::zeros(DType::F32, &k_dims), Host::zeros(DType::F32, &k_dims));
        set.attention
            .backward(
                q.view(),
                k.view(),
                v.view(),
                out.view(),
                lse.view(),
                c.view(),
                dq.view_mut(),
                dk.view_mut(),
                dv.view_mut(),
                spec,
            )
            .unwrap();
        let value = |q: &Host, k: &Host, v: &Host| dot(&attention_out(&set, q, k, v, spec)[0], &c);
        check("dq", &q, &dq, |q| value(q, &k, &v));
        check("dk", &k, &dk, |k| value(&q, k, &v));
        check("dv", &v, &dv, |v| value(&q, &k, v));
    }
}

/// Of attention and its sinks as a whole, sinks included.
#[test]
fn attention_with_sinks() {
    let set = reference::kernel_set();
    for spec in specs() {
        let (q_dims, k_dims) = ([1, 5, 4, 3], [1, 5, 2, 3]);
        let (q, k, v, c) = (f32s(&q_dims, 1), f32s(&k_dims, 2), f32s(&k_dims, 3), f32s(&q_dims, 4));
        let of_heads = Host::of(DType::F32, &[4], [-1.0, 0.0, 0.7, 2.5]);
        let value = |q: &Host, k: &Host, v: &Host, of_heads: &Host| {
            let [out, lse] = attention_out(&set, q, k, v, spec);
            dot(&sinks::add(&set, of_heads, &out, &lse)[0], &c)
        };
        let [_, _, dq, dk, dv, dsinks] =
            sinks::attention(&set, [&q, &k, &v, &of_heads, &c], spec, DType::F32);
        check("dq", &q, &dq, |q| value(q, &k, &v, &of_heads));
        check("dk", &k, &dk, |k| value(&q, k, &v, &of_heads));
        check("dv", &v, &dv, |v| value(&q, &k, v, &of_heads));
        check("dsinks", &of_heads, &dsinks, |of_heads| value(&q, &k, &v, of_heads));
    }
}

#[test]
fn convolution() {
    let set = reference::kernel_set();
    let (x, weight, c) = (f32s(&[2, 5, 3], 1), f32s(&[3, 3], 2), f32s(&[2, 5, 3], 3));
    let zeros = Host::zeros(DType::F32, &[3, 3]);
    let [dx, dweight] = delta::convolve_backward(&set, [&x, &weight, &c], DType::F32, &zeros);
    let value = |x: &Host, weight: &Host| dot(&delta::convolve(&set, [x, weight], DType::F32, None), &c);
    check("dx", &x, &dx, |x| value(x, &weight));
    check("dweight", &weight, &dweight, |weight| value(&x, weight));
}

#[test]
fn gates_of_states() {
    let set = reference::kernel_set();
    let [a, b, c_decay, c_beta] = [1, 2, 3, 4].map(|seed| f32s(&[3, 2], seed));
    let (a_log, dt_bias) = (f32s(&[2], 5), f32s(&[2], 6));
    let zeros = Host::zeros(DType::F32, &[2]);
    let operands = [&a, &b, &a_log, &dt_bias];
    let [da, db, da_log, ddt_bias] =
        delta::gates_backward(&set, operands, [&c_decay, &c_beta], DType::F32, &zeros);
    let value = |operands: [&Host; 4]| {
        let [decay, beta] = delta::gates(&set, operands);
        dot(&decay, &c_decay) + dot(&beta, &c_beta)
    };
    check("da", &a, &da, |a| value([a, &b, &a_log, &dt_bias]));
    check("db", &b, &db, |b| value([&a, b, &a_log, &dt_bias]));
    check("da_log", &a_log, &da_log, |a_log| value([&a, &b, a_log, &dt_bias]));
    check("ddt_bias", &dt_bias, &ddt_bias, |dt_bias| value([&a, &b, &a_log, dt_bias]));
}

/// Queries and keys far from zero, where a step turns them little.
#[test]
fn scan() {
    let set = reference::kernel_set();
    let size = delta::size([2, 6, 2, 4, 3, 2]);
    let [mut qkv, _, beta, c] = delta::operands(size, DType::F32);
    for (i, value) in qkv.values().into_iter().enumerate() {
        qkv.set(i, value + value.signum());
    }
    let decay = f32s(&[2, 6, 4], 5).values().into_iter().map(|x| -0.5 * x.abs());
    let decay = Host::of(DType::F32, &[2, 6, 4], decay);
    let [dqkv, ddecay, dbeta] = delta::scan_backward(&set, [&qkv, &decay, &beta], size.spec, &c, DType::F32);
    let value = |operands: [&Host; 3]| dot(&delta::scan(&set, operands, size.spec, DType::F32, None), &c);
    check("dqkv", &qkv, &dqkv, |qkv| value([qkv, &decay, &beta]));
    check("ddecay", &decay, &ddecay, |decay| value([&qkv, decay, &beta]));
    check("dbeta", &beta, &dbeta, |beta| value([&qkv, &decay, beta]));
}
