//! The gated delta rule: convolutions, gates and scans, with states that are carried and without, and their gradients.

use crate::case::Case;
use crate::products::pairs;
use crate::{MIXES, Rig};
use terrace_kernels::{Carried, DType, DeltaSpec, Tensor, delta_scratch};

/// Sequences, positions, key heads, value heads, elements of a key and of a value; and taps.
type Shape = ([usize; 6], usize);

/// Heads as models have them, for each kernel of a card; several waves; odd sizes.
const SHAPES: [Shape; 5] = [
    ([1, 200, 4, 8, 128, 128], 4),
    ([3, 65, 1, 3, 80, 40], 3),
    ([2, 20, 2, 2, 256, 64], 1),
    ([3, 33, 2, 32, 64, 33], 4),
    ([1, 1, 2, 4, 16, 7], 7),
];
const SHAPES_TINY: [Shape; 2] = [([2, 5, 1, 2, 16, 33], 4), ([1, 3, 2, 2, 5, 3], 3)];

pub fn run(rig: &Rig) {
    for (shape, mix) in pairs(&rig.sizes(&SHAPES, &SHAPES_TINY), &MIXES) {
        let ([b, s, key_heads, value_heads, key_size, value_size], taps) = shape;
        let spec = DeltaSpec { key_heads, value_heads, key_size, value_size };
        let what = format!(
            "B{b} S{s} G{key_heads} H{value_heads} K{key_size} V{value_size} W{taps} {} to {}",
            mix.0, mix.1
        );
        for carried in [false, true] {
            // One tap needs no state.
            if taps > 1 || !carried {
                convolve(rig, ([b, s], spec, taps), mix, carried, &what);
            }
            scan(rig, ([b, s], spec), mix, carried, &what);
        }
        convolve_backward(rig, ([b, s], spec, taps), mix, &what);
        gates(rig, [b * s, value_heads], mix, &what);
        gates_backward(rig, [b * s, value_heads], mix, &what);
        scan_backward(rig, ([b, s], spec), mix, &what);
    }
}

/// A slot for each sequence, the last first, of which every other one is new; the second has some padding.
struct Places {
    slots: Tensor,
    starts: Tensor,
    last: Tensor,
}

impl Places {
    fn new(case: &mut Case<'_>, [b, s]: [usize; 2]) -> Self {
        let of = |value: fn(usize, [usize; 2]) -> usize| {
            (0..b).map(|i| value(i, [b, s]) as i32).collect::<Vec<_>>()
        };
        Self {
            slots: case.integers("slots", &[b], &of(|i, [b, _]| b - i)),
            starts: case.integers("starts", &[b], &of(|i, _| 5 * (i % 2))),
            last: case.integers(
                "last",
                &[b],
                &of(|i, [_, s]| i * s + if i == 1 { s.div_ceil(2) } else { s } - 1),
            ),
        }
    }

    fn with<'a>(&'a self, state: &'a mut Tensor) -> Carried<'a> {
        let [slots, starts, last] = [&self.slots, &self.starts, &self.last].map(Tensor::view);
        Carried { state: state.view_mut(), slots, starts, last }
    }
}

fn named(what: &str, carried: bool) -> String {
    format!("{what}{}", if carried { ", carried" } else { "" })
}

fn convolve(
    rig: &Rig,
    ([b, s], spec, taps): ([usize; 2], DeltaSpec, usize),
    (dtype, of_out): (DType, DType),
    carried: bool,
    what: &str,
) {
    let (mut case, channels) = (rig.case("convolve", named(what, carried)), spec.channels());
    let x = case.operand("x", dtype, &[b, s, channels], 1.0);
    let weight = case.operand("weight", dtype, &[channels, taps], 0.7);
    let mut out = case.result(of_out, &[b, s, channels]);
    let rule = &rig.kernels().delta_rule;
    if carried {
        let places = Places::new(&mut case, [b, s]);
        let mut state = case.operand("state", dtype, &[b + 1, taps - 1, channels], 1.0);
        let held = Some(places.with(&mut state));
        rule.convolve(x.view(), weight.view(), held, out.view_mut()).expect("convolve runs");
        return case.finish(&[("out", &out), ("state", &state)]);
    }
    rule.convolve(x.view(), weight.view(), None, out.view_mut()).expect("convolve runs");
    case.finish(&[("out", &out)]);
}

fn convolve_backward(
    rig: &Rig,
    ([b, s], spec, taps): ([usize; 2], DeltaSpec, usize),
    (dtype, of_out): (DType, DType),
    what: &str,
) {
    let (mut case, channels) = (rig.case("convolve_backward", what.to_owned()), spec.channels());
    let x = case.operand("x", dtype, &[b, s, channels], 1.0);
    let weight = case.operand("weight", dtype, &[channels, taps], 0.7);
    let dout = case.operand("dout", dtype, &[b, s, channels], 1.0);
    let mut dweight = case.operand("dweight", DType::F32, &[channels, taps], 1.0);
    let mut dx = case.result(of_out, &[b, s, channels]);
    let (to_x, to_weight) = (dx.view_mut(), dweight.view_mut());
    rig.kernels()
        .delta_rule
        .convolve_backward(x.view(), weight.view(), dout.view(), to_x, to_weight)
        .expect("convolve backward runs");
    case.finish(&[("dx", &dx), ("dweight", &dweight)]);
}

/// a, b, a_log and dt_bias.
fn gate_operands(case: &mut Case<'_>, [tokens, heads]: [usize; 2], dtype: DType) -> [Tensor; 4] {
    let a = case.operand("a", dtype, &[tokens, heads], 5.0);
    let b = case.operand("b", dtype, &[tokens, heads], 3.0);
    let a_log = case.operand("a_log", DType::F32, &[heads], 1.0);
    [a, b, a_log, case.operand("dt_bias", dtype, &[heads], 1.0)]
}

fn gates(rig: &Rig, [tokens, heads]: [usize; 2], (dtype, _): (DType, DType), what: &str) {
    let mut case = rig.case("gates", what.to_owned());
    let operands = gate_operands(&mut case, [tokens, heads], dtype);
    let [a, b, a_log, dt_bias] = operands.each_ref().map(Tensor::view);
    let [mut decay, mut beta] = [(); 2].map(|()| case.result(DType::F32, &[tokens, heads]));
    let (to_decay, to_beta) = (decay.view_mut(), beta.view_mut());
    rig.kernels().delta_rule.gates(a, b, a_log, dt_bias, to_decay, to_beta).expect("gates runs");
    case.finish(&[("decay", &decay), ("beta", &beta)]);
}

fn gates_backward(rig: &Rig, [tokens, heads]: [usize; 2], (dtype, of_out): (DType, DType), what: &str) {
    let mut case = rig.case("gates_backward", what.to_owned());
    let operands = gate_operands(&mut case, [tokens, heads], dtype);
    let [a, b, a_log, dt_bias] = operands.each_ref().map(Tensor::view);
    let [ddecay, dbeta] =
        ["ddecay", "dbeta"].map(|name| case.operand(name, DType::F32, &[tokens, heads], 1.0));
    let [mut da_log, mut ddt_bias] =
        ["da_log", "ddt_bias"].map(|name| case.operand(name, DType::F32, &[heads], 1.0));
    let [mut da, mut db] = [(); 2].map(|()| case.result(of_out, &[tokens, heads]));
    let (to_a, to_b, to_rate, to_bias) =
        (da.view_mut(), db.view_mut(), da_log.view_mut(), ddt_bias.view_mut());
    let (ddecay, dbeta) = (ddecay.view(), dbeta.view());
    rig.kernels()
        .delta_rule
        .gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, to_a, to_b, to_rate, to_bias)
        .expect("gates backward runs");
    case.finish(&[("da", &da), ("db", &db), ("da_log", &da_log), ("ddt_bias", &ddt_bias)]);
}

/// qkv, decay and beta.
fn scan_operands(case: &mut Case<'_>, [b, s]: [usize; 2], spec: DeltaSpec, dtype: DType) -> [Tensor; 3] {
    let dims = [b, s, spec.value_heads];
    let random = case.random_integers(1 << 20, 2 * b * s * spec.value_heads);
    let (decay, beta) = random.split_at(b * s * spec.value_heads);
    let decay: Vec<f32> = decay.iter().map(|x| -0.5 * *x as f32 / (1 << 20) as f32).collect();
    let beta: Vec<f32> = beta.iter().map(|x| *x as f32 / (1 << 20) as f32).collect();
    let qkv = case.operand("qkv", dtype, &[b, s, spec.channels()], 1.0);
    let decay = case.operand_of("decay", DType::F32, &dims, &decay);
    [qkv, decay, case.operand_of("beta", DType::F32, &dims, &beta)]
}

fn heads<'r>(case: Case<'r>, spec: DeltaSpec) -> Case<'r> {
    case.with("key_heads", spec.key_heads).with("key_size", spec.key_size)
}

fn scan(
    rig: &Rig,
    ([b, s], spec): ([usize; 2], DeltaSpec),
    (dtype, of_out): (DType, DType),
    carried: bool,
    what: &str,
) {
    let mut case = heads(rig.case("scan", named(what, carried)), spec);
    let operands = scan_operands(&mut case, [b, s], spec, dtype);
    let [qkv, decay, beta] = operands.each_ref().map(Tensor::view);
    let mut out = case.result(of_out, &[b, s, spec.value_heads, spec.value_size]);
    let rule = &rig.kernels().delta_rule;
    if carried {
        let places = Places::new(&mut case, [b, s]);
        let dims = [b + 1, spec.value_heads, spec.key_size, spec.value_size];
        let mut state = case.operand("state", DType::F32, &dims, 0.5);
        let held = Some(places.with(&mut state));
        rule.scan(qkv, decay, beta, spec, held, out.view_mut()).expect("scan runs");
        return case.finish(&[("out", &out), ("state", &state)]);
    }
    rule.scan(qkv, decay, beta, spec, None, out.view_mut()).expect("scan runs");
    case.finish(&[("out", &out)]);
}

fn scan_backward(
    rig: &Rig,
    ([b, s], spec): ([usize; 2], DeltaSpec),
    (dtype, of_out): (DType, DType),
    what: &str,
) {
    let mut case = heads(rig.case("scan_backward", what.to_owned()), spec);
    let operands = scan_operands(&mut case, [b, s], spec, dtype);
    let [qkv, decay, beta] = operands.each_ref().map(Tensor::view);
    let dout = case.operand("dout", dtype, &[b, s, spec.value_heads, spec.value_size], 1.0);
    let mut dqkv = case.result(of_out, &[b, s, spec.channels()]);
    let [mut ddecay, mut dbeta] = [(); 2].map(|()| case.result(DType::F32, &[b, s, spec.value_heads]));
    let mut scratch = case.result(DType::F32, &[delta_scratch(b, s, spec)]);
    let (of_qkv, of_decay, of_beta) = (dqkv.view_mut(), ddecay.view_mut(), dbeta.view_mut());
    rig.kernels()
        .delta_rule
        .scan_backward(qkv, decay, beta, spec, dout.view(), of_qkv, of_decay, of_beta, scratch.view_mut())
        .expect("scan backward runs");
    case.finish(&[("dqkv", &dqkv), ("ddecay", &ddecay), ("dbeta", &dbeta)]);
}
