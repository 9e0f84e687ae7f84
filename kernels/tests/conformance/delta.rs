//! Tolerance, besides one rounding. Convolution, of up to W products of order 1: 2e-6·√W, gradients of x 4e-6·√W, of weights 2e-6·√T.
//! Gates: 1e-6 of decays, 4e-7 of betas; gradients of order 1 times rates up to 8 2e-6, and 20e-6·√T and 2e-6·√T of their sums; without
//! rates 2e-7. Scan: 1e-6 of results and 2e-6 of carried states, which are of order 1; gradients, up to some 10, 4e-6·√S.

use crate::support::{Host, MIXES, Random, assert_close, assert_within, backends};
use proptest::prelude::*;
use std::panic::AssertUnwindSafe;
use terrace_kernels::{Carried, DType, DeltaSpec, KernelSet, cpu, delta_scratch, reference};

/// What results hold before they are written.
const UNWRITTEN: f64 = -7.0;

fn unwritten(dtype: DType, dims: &[usize]) -> Host {
    Host::of(dtype, dims, vec![UNWRITTEN; dims.iter().product()])
}

/// What is carried, but for the state.
#[derive(Clone)]
pub struct Places {
    pub slots: Host,
    pub starts: Host,
    pub last: Host,
}

impl Places {
    /// Of sequences of `length` positions: the slot, the first position, and how many are no padding, of each.
    pub fn new(length: usize, of_sequences: &[(usize, usize, usize)]) -> Self {
        let of = |value: &dyn Fn(usize, (usize, usize, usize)) -> usize| {
            let values = of_sequences.iter().enumerate().map(|(b, each)| value(b, *each) as f64);
            Host::of(DType::I32, &[of_sequences.len()], values)
        };
        Self {
            slots: of(&|_, each| each.0),
            starts: of(&|_, each| each.1),
            last: of(&|b, each| b * length + each.2 - 1),
        }
    }

    fn with<'a>(&'a self, state: &'a mut Host) -> Carried<'a> {
        let [slots, starts, last] = [&self.slots, &self.starts, &self.last].map(Host::view);
        Carried { state: state.view_mut(), slots, starts, last }
    }
}

/// What [`convolve`](terrace_kernels::DeltaRule::convolve) makes of x, and of states.
pub fn convolve(
    set: &KernelSet,
    [x, weight]: [&Host; 2],
    dtype: DType,
    carried: Option<(&Places, &mut Host)>,
) -> Host {
    let mut out = unwritten(dtype, x.dims());
    let carried = carried.map(|(places, state)| places.with(state));
    set.delta_rule.convolve(x.view(), weight.view(), carried, out.view_mut()).unwrap();
    out
}

/// dx, and dweight added to what it holds.
pub fn convolve_backward(
    set: &KernelSet,
    [x, weight, dout]: [&Host; 3],
    dtype: DType,
    old: &Host,
) -> [Host; 2] {
    let (mut dx, mut dweight) = (unwritten(dtype, x.dims()), old.clone());
    let (to_x, to_weight) = (dx.view_mut(), dweight.view_mut());
    set.delta_rule.convolve_backward(x.view(), weight.view(), dout.view(), to_x, to_weight).unwrap();
    [dx, dweight]
}

/// decay and beta, from a, b, a_log and dt_bias.
pub fn gates(set: &KernelSet, operands: [&Host; 4]) -> [Host; 2] {
    let [mut decay, mut beta] = [(); 2].map(|()| unwritten(DType::F32, operands[0].dims()));
    let [a, b, a_log, dt_bias] = operands.map(Host::view);
    set.delta_rule.gates(a, b, a_log, dt_bias, decay.view_mut(), beta.view_mut()).unwrap();
    [decay, beta]
}

/// da, db, da_log and ddt_bias, from those of [`gates`] and the gradients of what they make; the last two are added to `old`.
pub fn gates_backward(
    set: &KernelSet,
    operands: [&Host; 4],
    [ddecay, dbeta]: [&Host; 2],
    dtype: DType,
    old: &Host,
) -> [Host; 4] {
    let [mut da, mut db] = [(); 2].map(|()| unwritten(dtype, operands[0].dims()));
    let (mut da_log, mut ddt_bias) = (old.clone(), old.clone());
    let [a, b, a_log, dt_bias] = operands.map(Host::view);
    let (of_a, of_b, of_rate, of_bias) =
        (da.view_mut(), db.view_mut(), da_log.view_mut(), ddt_bias.view_mut());
    let (ddecay, dbeta) = (ddecay.view(), dbeta.view());
    set.delta_rule.gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, of_a, of_b, of_rate, of_bias).unwrap();
    [da, db, da_log, ddt_bias]
}

/// What comes out, from qkv, decay and beta.
pub fn scan(
    set: &KernelSet,
    [qkv, decay, beta]: [&Host; 3],
    spec: DeltaSpec,
    dtype: DType,
    carried: Option<(&Places, &mut Host)>,
) -> Host {
    let mut out = unwritten(dtype, &[qkv.dims()[0], qkv.dims()[1], spec.value_heads, spec.value_size]);
    let carried = carried.map(|(places, state)| places.with(state));
    set.delta_rule.scan(qkv.view(), decay.view(), beta.view(), spec, carried, out.view_mut()).unwrap();
    out
}

/// dqkv, ddecay and dbeta.
pub fn scan_backward(
    set: &KernelSet,
    [qkv, decay, beta]: [&Host; 3],
    spec: DeltaSpec,
    dout: &Host,
    dtype: DType,
) -> [Host; 3] {
    let mut dqkv = unwritten(dtype, qkv.dims());
    let [mut ddecay, mut dbeta] = [(); 2].map(|()| unwritten(DType::F32, decay.dims()));
    let elements = delta_scratch(qkv.dims()[0], qkv.dims()[1], spec);
    let mut scratch = Host::of(DType::F32, &[elements], vec![f64::NAN; elements]);
    let (of_qkv, of_decay, of_beta) = (dqkv.view_mut(), ddecay.view_mut(), dbeta.view_mut());
    let (qkv, decay, beta, dout) = (qkv.view(), decay.view(), beta.view(), dout.view());
    set.delta_rule
        .scan_backward(qkv, decay, beta, spec, dout, of_qkv, of_decay, of_beta, scratch.view_mut())
        .unwrap();
    [dqkv, ddecay, dbeta]
}

/// The first element of other bits, if any.
fn other_bits(expected: &Host, found: &Host) -> Option<String> {
    assert_eq!(expected.len(), found.len());
    let mut pairs = expected.values().into_iter().zip(found.values()).enumerate();
    let (i, (expected, found)) = pairs.find(|(_, (a, b))| a.to_bits() != b.to_bits())?;
    Some(format!("element {i}: {found} instead of {expected}"))
}

fn same_bits(what: &str, expected: &Host, found: &Host) {
    assert_eq!(other_bits(expected, found), None, "{what}");
}

/// Sequences `from..to` of a tensor whose first dimension they are, positions `start..end` of its second.
fn cut(of: &Host, sequences: std::ops::Range<usize>, positions: std::ops::Range<usize>) -> Host {
    let (length, width) = (of.dims()[1], of.dims()[2..].iter().product::<usize>());
    let values = of.values();
    let rows = sequences.clone().flat_map(|b| positions.clone().map(move |s| b * length + s));
    let cut: Vec<f64> = rows.flat_map(|row| values[row * width..][..width].to_vec()).collect();
    let dims = [&[sequences.len(), positions.len()], &of.dims()[2..]].concat();
    Host::of(of.dtype(), &dims, cut)
}

/// B, S, C and W: one tap, as many as there may be, more of them than positions; more channels than a task, rows than a part.
const CONVOLUTIONS: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [2, 3, 5, 4],
    [1, 70, 300, 4],
    [3, 33, 40, 1],
    [2, 40, 7, 32],
    [3, 1, 260, 4],
    [1, 600, 3, 2],
    [2, 140, 17, 5],
    [1, 64, 128, 3],
];

fn check_convolution([b, s, c, w]: [usize; 4], (dtype, out_dtype): (DType, DType)) {
    let x = Host::random(dtype, &[b, s, c], 1.0, 1);
    let weight = Host::random(out_dtype, &[c, w], 1.0, 2);
    let dout = Host::random(dtype, &[b, s, c], 1.0, 3);
    let old = Host::random(DType::F32, &[c, w], 1.0, 4);
    let set = reference::kernel_set();
    let expected = convolve(&set, [&x, &weight], DType::F32, None);
    let [expected_dx, expected_dweight] = convolve_backward(&set, [&x, &weight, &dout], DType::F32, &old);
    let (of_taps, of_tokens) = ((w as f64).sqrt(), ((b * s) as f64).sqrt());
    for (name, set) in backends() {
        let what = |of: &str| format!("{name}: {of} of [{b}, {s}, {c}], {w} taps, {dtype} {out_dtype}");
        let out = convolve(&set, [&x, &weight], out_dtype, None);
        assert_close(&what("out"), &expected, &out, 2e-6 * of_taps);
        let [dx, dweight] = convolve_backward(&set, [&x, &weight, &dout], out_dtype, &old);
        assert_close(&what("dx"), &expected_dx, &dx, 4e-6 * of_taps);
        assert_close(&what("dweight"), &expected_dweight, &dweight, 2e-6 * of_tokens);
    }
}

#[test]
fn convolutions() {
    for size in CONVOLUTIONS {
        MIXES.into_iter().for_each(|mix| check_convolution(size, mix));
    }
}

/// In front of the SiLU: far from zero the slope is 0 or 1, and nothing overflows.
#[test]
fn convolutions_of_large_numbers() {
    let x = Host::of(DType::F32, &[1, 6, 1], [1e30, -1e30, 90.0, -90.0, 0.0, 30.0]);
    let (weight, ones) = (Host::of(DType::F32, &[1, 1], [1.0]), Host::of(DType::F32, &[1, 6, 1], [1.0; 6]));
    for (name, set) in backends() {
        let out = convolve(&set, [&x, &weight], DType::F32, None).values();
        let large = f64::from(1e30f32);
        assert_eq!([out[0], out[2], out[4], out[5]], [large, 90.0, 0.0, 30.0], "{name}");
        assert!(out[1] == 0.0 && out[3].abs() < 1e-30, "{name}: {out:?}");
        let [dx, _] =
            convolve_backward(&set, [&x, &weight, &ones], DType::F32, &Host::zeros(DType::F32, &[1, 1]));
        let dx = dx.values();
        assert_eq!([dx[0], dx[1], dx[2], dx[4]], [1.0, 0.0, 1.0, 0.5], "{name}: {dx:?}");
    }
}

fn check_gates([t, h]: [usize; 2], (dtype, out_dtype): (DType, DType)) {
    let mut a = Host::random(dtype, &[t, h], 5.0, 1);
    // Where softplus is the identity, and where it is nothing.
    for (i, x) in [25.0, -60.0, 19.9, 20.1, 0.0].into_iter().enumerate().take(t * h) {
        a.set(i, x);
    }
    let (b, a_log) = (Host::random(dtype, &[t, h], 4.0, 2), Host::random(out_dtype, &[h], 0.7, 3));
    let dt_bias = Host::random(DType::F32, &[h], 1.0, 4);
    let [ddecay, dbeta] = [5, 6].map(|seed| Host::random(DType::F32, &[t, h], 1.0, seed));
    let (old, operands) = (Host::random(DType::F32, &[h], 1.0, 7), [&a, &b, &a_log, &dt_bias]);
    let set = reference::kernel_set();
    let [expected_decay, expected_beta] = gates(&set, operands);
    let expected = gates_backward(&set, operands, [&ddecay, &dbeta], DType::F32, &old);
    let of_tokens = (t as f64).sqrt();
    for (name, set) in backends() {
        let what = |of: &str| format!("{name}: {of} of [{t}, {h}], {dtype} {out_dtype}");
        let [decay, beta] = gates(&set, operands);
        let relative =
            |of: &Host, part: f64| of.values().iter().map(|x| part * x.abs() + 1e-30).collect::<Vec<_>>();
        assert_within(&what("decay"), &expected_decay, &decay, &relative(&expected_decay, 1e-6));
        assert_within(&what("beta"), &expected_beta, &beta, &relative(&expected_beta, 4e-7));
        let found = gates_backward(&set, operands, [&ddecay, &dbeta], out_dtype, &old);
        for (i, (of, tolerance)) in
            [("da", 2e-6), ("db", 2e-7), ("da_log", 2e-5 * of_tokens), ("ddt_bias", 2e-6 * of_tokens)]
                .into_iter()
                .enumerate()
        {
            assert_close(&what(of), &expected[i], &found[i], tolerance);
        }
    }
}

#[test]
fn gates_of_states() {
    for size in [[1, 1], [5, 3], [33, 32], [600, 5], [7, 200], [2, 1100]] {
        MIXES.into_iter().for_each(|mix| check_gates(size, mix));
    }
}

/// B, S, and heads.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub b: usize,
    pub s: usize,
    pub spec: DeltaSpec,
}

/// B, S, G, H, K and V.
pub const fn size([b, s, key_heads, value_heads, key_size, value_size]: [usize; 6]) -> Size {
    Size { b, s, spec: DeltaSpec { key_heads, value_heads, key_size, value_size } }
}

/// One position, stretches that do not fill a sequence, odd heads, more columns than a part, as long a key as there may be, more pairs than a wave.
const SCANS: [Size; 11] = [
    size([1, 1, 1, 1, 1, 1]),
    size([2, 1, 2, 4, 16, 16]),
    size([1, 7, 1, 3, 5, 7]),
    size([2, 40, 2, 4, 17, 33]),
    size([1, 70, 1, 2, 128, 128]),
    size([1, 10, 2, 2, 256, 40]),
    size([3, 5, 1, 1, 3, 70]),
    size([14, 3, 1, 3, 4, 5]),
    size([1, 2, 2, 70, 8, 3]),
    size([1, 150, 1, 1, 31, 2]),
    size([2, 16, 3, 6, 64, 32]),
];

/// qkv, decay, beta and dout. Some decays are none, some leave nothing. Queries and keys are not near zero, where their gradients are large.
pub fn operands(Size { b, s, spec }: Size, dtype: DType) -> [Host; 4] {
    let gates = [b, s, spec.value_heads];
    let mut random = Random::new(9);
    let decay =
        Host::random(DType::F32, &gates, 0.4, 2).values().into_iter().map(|x| match random.below(12) {
            0 => 0.0,
            1 => -100.0,
            _ => -x.abs(),
        });
    let decay = Host::of(DType::F32, &gates, decay);
    let beta =
        Host::random(DType::F32, &gates, 1.5, 3).values().into_iter().map(|x| 1.0 / (1.0 + (-x).exp()));
    let beta = Host::of(DType::F32, &gates, beta);
    let qkv = Host::random(dtype, &[b, s, spec.channels()], 1.0, 1).values().into_iter();
    let qkv = Host::of(dtype, &[b, s, spec.channels()], qkv.map(|x| x + 0.5 * x.signum()));
    [qkv, decay, beta, Host::random(dtype, &[b, s, spec.value_heads, spec.value_size], 1.0, 4)]
}

fn check_scan(size: Size, (dtype, out_dtype): (DType, DType)) {
    let [qkv, decay, beta, dout] = operands(size, dtype);
    let (operands, spec) = ([&qkv, &decay, &beta], size.spec);
    let set = reference::kernel_set();
    let expected = scan(&set, operands, spec, DType::F32, None);
    let expected_back = scan_backward(&set, operands, spec, &dout, DType::F32);
    for (name, set) in backends() {
        let what = |of: &str| format!("{name}: {of} of {size:?}, {dtype} {out_dtype}");
        assert_close(&what("out"), &expected, &scan(&set, operands, spec, out_dtype, None), 1e-6);
        let found = scan_backward(&set, operands, spec, &dout, out_dtype);
        for (i, of) in ["dqkv", "ddecay", "dbeta"].into_iter().enumerate() {
            assert_close(&what(of), &expected_back[i], &found[i], 4e-6 * (size.s as f64).sqrt());
        }
    }
}

#[test]
fn scans() {
    for size in SCANS {
        MIXES.into_iter().for_each(|mix| check_scan(size, mix));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_size(
        b in 1usize..4, s in 1usize..40, g in 1usize..4, group in 1usize..4, k in 2usize..40, v in 1usize..50, taps in 1usize..7,
        mix in 0..MIXES.len(),
    ) {
        check_convolution([b, s, 3 * k + v, taps], MIXES[mix]);
        check_gates([b * s, g * group], MIXES[mix]);
        check_scan(size([b, s, g, g * group, k, v]), MIXES[mix]);
    }
}

/// Pairs of more than a wave have the bits that those of each sequence have alone, forward and backward.
#[test]
fn sequences_know_nothing_of_each_other() {
    for size in [size([20, 6, 1, 2, 8, 9]), size([3, 5, 2, 26, 4, 3])] {
        let all = operands(size, DType::F32);
        for (name, set) in backends() {
            let run = |[qkv, decay, beta, dout]: [&Host; 4]| {
                let operands = [qkv, decay, beta];
                let [dqkv, ddecay, dbeta] = scan_backward(&set, operands, size.spec, dout, DType::F32);
                [scan(&set, operands, size.spec, DType::F32, None), dqkv, ddecay, dbeta]
            };
            let together = run(all.each_ref());
            for b in 0..size.b {
                let alone = |of: &Host| cut(of, b..b + 1, 0..size.s);
                let found = run(all.each_ref().map(alone).each_ref());
                for (together, found) in together.iter().zip(&found) {
                    same_bits(&format!("{name}: sequence {b} of {size:?}"), &alone(together), found);
                }
            }
        }
    }
}

const NAN: f64 = f64::NAN;

/// Sequences fed in pieces have the bits of those fed in one go, in whichever slots; slots of nobody keep what they hold, and where a sequence
/// begins a state is zeros, whatever it is.
#[test]
fn states_are_carried() {
    let (b, s, slots) = (3, 23, [4, 0, 2]);
    let spec = DeltaSpec { key_heads: 2, value_heads: 4, key_size: 9, value_size: 37 };
    let [qkv, decay, beta, _] = operands(Size { b, s, spec }, DType::BF16);
    let weight = Host::random(DType::F32, &[spec.channels(), 4], 1.0, 5);
    for (name, set) in backends().into_iter().chain([("reference".to_owned(), reference::kernel_set())]) {
        let run = |pieces: &[usize], slots: [usize; 3]| {
            let mut states = nothing(DType::F32, &[5, spec.value_heads, spec.key_size, spec.value_size]);
            let mut inputs = nothing(DType::BF16, &[5, 3, spec.channels()]);
            let (mut start, mut found) = (0, Vec::new());
            for length in pieces {
                let piece = |of: &Host| cut(of, 0..b, start..start + length);
                let places = Places::new(*length, &slots.map(|slot| (slot, start, *length)));
                let [qkv, decay, beta] = [piece(&qkv), piece(&decay), piece(&beta)];
                let operands = [&qkv, &decay, &beta];
                let out = scan(&set, operands, spec, DType::F32, Some((&places, &mut states)));
                let convolved = convolve(&set, [&qkv, &weight], DType::F32, Some((&places, &mut inputs)));
                found.push([out, convolved]);
                start += length;
            }
            (found, states, inputs)
        };
        // The reference's states are in f64 but between pieces.
        let is_exact = name != "reference";
        let same = |what: &str, expected: &Host, found: &Host| {
            if is_exact {
                same_bits(what, expected, found);
            } else {
                assert_close(what, expected, found, 1e-7);
            }
        };
        let (whole, states, inputs) = run(&[s], slots);
        for slot in [1, 3] {
            let untouched = |of: &Host| slot_of(of, slot).values().iter().all(|x| x.is_nan());
            assert!(untouched(&states) && untouched(&inputs), "{name}: slot {slot}");
        }
        let nothing_carried = [
            scan(&set, [&qkv, &decay, &beta], spec, DType::F32, None),
            convolve(&set, [&qkv, &weight], DType::F32, None),
        ];
        for (carried, nothing_carried) in whole[0].iter().zip(&nothing_carried) {
            same_bits(&format!("{name}: nothing is carried"), nothing_carried, carried);
        }
        for (pieces, other_slots) in
            [(&[7, 1, 1, 14][..], slots), (&[1, 22], [0, 1, 2]), (&[2, 21], [3, 2, 1])]
        {
            let (found, other_states, other_inputs) = run(pieces, other_slots);
            let what = format!("{name}: pieces {pieces:?} in {other_slots:?}");
            let mut start = 0;
            for (length, found) in pieces.iter().zip(&found) {
                for (whole, found) in whole[0].iter().zip(found) {
                    same(&what, &cut(whole, 0..b, start..start + length), found);
                }
                start += length;
            }
            for (slot, other) in slots.into_iter().zip(other_slots) {
                same(&what, &slot_of(&states, slot), &slot_of(&other_states, other));
                same(&what, &slot_of(&inputs, slot), &slot_of(&other_inputs, other));
            }
        }
    }
}

fn nothing(dtype: DType, dims: &[usize]) -> Host {
    Host::of(dtype, dims, vec![NAN; dims.iter().product()])
}

/// What follows the last token, which is no number here, reaches neither states nor what came out before it, and zeros come out of a scan.
#[test]
fn padding_changes_no_state() {
    let (b, s) = (3, 11);
    let spec = DeltaSpec { key_heads: 1, value_heads: 2, key_size: 6, value_size: 40 };
    let [qkv, decay, beta, _] = operands(Size { b, s, spec }, DType::F32);
    let weight = Host::random(DType::F32, &[spec.channels(), 4], 1.0, 5);
    // The second has fewer tokens than a state of the convolution has rows, the last no padding. The second is new, the others go on.
    let tokens = [6, 2, s];
    let starts = [5, 0, 9];
    let padded = |of: &Host| {
        let (width, mut padded) = (of.len() / (b * s), of.clone());
        for (b, tokens) in tokens.into_iter().enumerate() {
            ((b * s + tokens) * width..(b + 1) * s * width).for_each(|i| padded.set(i, NAN));
        }
        padded
    };
    let [of_qkv, of_decay, of_beta] = [&qkv, &decay, &beta].map(padded);
    for (name, set) in backends().into_iter().chain([("reference".to_owned(), reference::kernel_set())]) {
        let old = Host::random(DType::F32, &[b, spec.value_heads, spec.key_size, spec.value_size], 1.0, 6);
        let old_inputs = Host::random(DType::F32, &[b, 3, spec.channels()], 1.0, 7);
        let (mut states, mut inputs) = (old.clone(), old_inputs.clone());
        let places = Places::new(
            s,
            &[(2, starts[0], tokens[0]), (0, starts[1], tokens[1]), (1, starts[2], tokens[2])],
        );
        let out = scan(&set, [&of_qkv, &of_decay, &of_beta], spec, DType::F32, Some((&places, &mut states)));
        let convolved = convolve(&set, [&of_qkv, &weight], DType::F32, Some((&places, &mut inputs)));
        for (i, tokens) in tokens.into_iter().enumerate() {
            let what = format!("{name}: sequence {i}");
            let slot = [2, 0, 1][i];
            let (mut alone, mut inputs_alone) = (old.clone(), old_inputs.clone());
            let place = Places::new(tokens, &[(slot, starts[i], tokens)]);
            let [qkv, decay, beta] = [&qkv, &decay, &beta].map(|of| cut(of, i..i + 1, 0..tokens));
            let expected = scan(&set, [&qkv, &decay, &beta], spec, DType::F32, Some((&place, &mut alone)));
            same_bits(&what, &expected, &cut(&out, i..i + 1, 0..tokens));
            assert!(cut(&out, i..i + 1, tokens..s).values().iter().all(|x| *x == 0.0), "{what}");
            let expected = convolve(&set, [&qkv, &weight], DType::F32, Some((&place, &mut inputs_alone)));
            same_bits(&what, &expected, &cut(&convolved, i..i + 1, 0..tokens));
            same_bits(&what, &slot_of(&alone, slot), &slot_of(&states, slot));
            same_bits(&what, &slot_of(&inputs_alone, slot), &slot_of(&inputs, slot));
        }
    }
}

fn slot_of(states: &Host, slot: usize) -> Host {
    let width = states.len() / states.dims()[0];
    Host::of(states.dtype(), &[width], states.values()[slot * width..][..width].to_vec())
}

/// The states and results of those that go on are the reference's.
#[test]
fn carried_states_are_the_reference_s() {
    for (i, size) in [size([2, 1, 2, 4, 128, 64]), size([3, 1, 1, 2, 5, 33]), size([2, 40, 1, 3, 33, 20])]
        .into_iter()
        .enumerate()
    {
        let (spec, dtype) = (size.spec, [DType::BF16, DType::F16, DType::F32][i]);
        let [qkv, decay, beta, _] = operands(size, dtype);
        let weight = Host::random(dtype, &[spec.channels(), 4], 1.0, 5);
        let old = Host::random(DType::F32, &[4, spec.value_heads, spec.key_size, spec.value_size], 0.5, 6);
        let old_inputs = Host::random(dtype, &[4, 3, spec.channels()], 1.0, 7);
        let each: Vec<_> = (0..size.b).map(|b| (3 - b, 8 + b, size.s - b.min(size.s - 1))).collect();
        let places = Places::new(size.s, &each);
        let run = |set: &KernelSet, dtype| {
            let (mut states, mut inputs) = (old.clone(), old_inputs.clone());
            let out = scan(set, [&qkv, &decay, &beta], spec, dtype, Some((&places, &mut states)));
            let convolved = convolve(set, [&qkv, &weight], dtype, Some((&places, &mut inputs)));
            (out, convolved, states, inputs)
        };
        let expected = run(&reference::kernel_set(), DType::F32);
        for (name, set) in backends() {
            let (out, convolved, states, inputs) = run(&set, dtype);
            let what = |of: &str| format!("{name}: {of} of {size:?}, {dtype}");
            assert_close(&what("out"), &expected.0, &out, 2e-6);
            assert_close(&what("convolved"), &expected.1, &convolved, 4e-6);
            assert_close(&what("states"), &expected.2, &states, 2e-6);
            same_bits(&what("inputs"), &expected.3, &inputs);
        }
    }
}

/// A state of zero is never divided by a factor that left nothing, and what was forgotten does not come back.
#[test]
fn factors_that_leave_nothing() {
    let size = size([1, 20, 1, 1, 8, 8]);
    let [qkv, _, beta, dout] = operands(size, DType::F32);
    let decay =
        Host::of(DType::F32, &[1, 20, 1], (0..20).map(|s| if s % 5 == 4 { f64::NEG_INFINITY } else { -0.1 }));
    for (name, set) in backends().into_iter().chain([("reference".to_owned(), reference::kernel_set())]) {
        let out = scan(&set, [&qkv, &decay, &beta], size.spec, DType::F32, None);
        let found = scan_backward(&set, [&qkv, &decay, &beta], size.spec, &dout, DType::F32);
        for tensor in found.iter().chain([&out]) {
            assert!(tensor.values().iter().all(|x| x.is_finite()), "{name}");
        }
        // What is between two of them by itself.
        let part = |of: &Host| cut(of, 0..1, 4..9);
        let operands = [&part(&qkv), &part(&decay), &part(&beta)];
        same_bits(&name, &part(&out), &scan(&set, operands, size.spec, DType::F32, None));
        let expected = scan_backward(&set, operands, size.spec, &part(&dout), DType::F32);
        assert_close(&name, &expected[0], &part(&found[0]), 1e-6);
        assert_close(&name, &expected[2], &part(&found[2]), 1e-6);
    }
}

/// Queries and keys of zero, and of less than what is added to their squares, have directions of less than 1 and large gradients.
#[test]
fn queries_and_keys_near_zero() {
    let size = size([1, 6, 1, 2, 20, 8]);
    let [mut qkv, decay, beta, dout] = operands(size, DType::F32);
    let (width, of_heads) = (size.spec.channels(), 2 * size.spec.key_size);
    for (position, factor) in [(1, 0.0), (2, 1e-5), (4, 1e-3)] {
        let at = position * width..position * width + of_heads;
        let values = qkv.values()[at.clone()].to_vec();
        at.zip(values).for_each(|(i, value)| qkv.set(i, factor * value));
    }
    let operands = [&qkv, &decay, &beta];
    let set = reference::kernel_set();
    let expected = scan(&set, operands, size.spec, DType::F32, None);
    let [expected_qkv, ..] = scan_backward(&set, operands, size.spec, &dout, DType::F32);
    let norms = [(0, 1.0), (1, 1e-3), (2, 1e-3), (3, 1.0), (4, 3e-3), (5, 1.0)];
    let tolerances: Vec<f64> = norms.iter().flat_map(|(_, norm)| vec![5e-6 / norm; width]).collect();
    for (name, set) in backends() {
        assert_close(&name, &expected, &scan(&set, operands, size.spec, DType::F32, None), 1e-6);
        let [dqkv, ..] = scan_backward(&set, operands, size.spec, &dout, DType::F32);
        assert_within(&name, &expected_qkv, &dqkv, &tolerances);
    }
}

/// Two tasks would write one state, or one that is none.
#[test]
fn places_that_are_none() {
    let spec = DeltaSpec { key_heads: 1, value_heads: 1, key_size: 2, value_size: 3 };
    let [qkv, decay, beta, _] = operands(Size { b: 2, s: 4, spec }, DType::F32);
    let message = |slots: [f64; 2], last: [f64; 2]| {
        let of = |values: [f64; 2]| Host::of(DType::I32, &[2], values);
        let places = Places { slots: of(slots), starts: of([0.0; 2]), last: of(last) };
        let mut states = Host::zeros(DType::F32, &[3, 1, 2, 3]);
        let mut inputs = Host::zeros(DType::F32, &[3, 1, spec.channels()]);
        let weight = Host::zeros(DType::F32, &[spec.channels(), 2]);
        let set = cpu::kernel_set(1);
        let mut messages = [
            std::panic::catch_unwind(AssertUnwindSafe(|| {
                scan(&set, [&qkv, &decay, &beta], spec, DType::F32, Some((&places, &mut states)));
            })),
            std::panic::catch_unwind(AssertUnwindSafe(|| {
                convolve(&set, [&qkv, &weight], DType::F32, Some((&places, &mut inputs)));
            })),
        ]
        .map(|found| found.err().map(|message| *message.downcast::<String>().unwrap()));
        assert_eq!(messages[0], messages[1]);
        messages[0].take()
    };
    assert_eq!(message([2.0, 0.0], [3.0, 4.0]), None);
    assert!(message([1.0, 1.0], [3.0, 7.0]).unwrap().contains("are all different"));
    for slot in [3.0, -1.0] {
        assert!(message([1.0, slot], [3.0, 7.0]).unwrap().contains("is one of 3"));
    }
    for last in [3.0, 8.0, -1.0] {
        assert!(message([1.0, 0.0], [3.0, last]).unwrap().contains("is one of sequence 1, 4..8"));
    }
}
