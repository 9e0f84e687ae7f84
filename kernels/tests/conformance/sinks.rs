//! Tolerance: what is left of a row is within 4e-7 of itself, times values up to 6, so 3e-6; lse 1e-6 besides its rounding, of numbers up
//! to 20. Gradients are sums of R·K products of order 1 with shares that are within 2e-6 of themselves: 4e-6·√(R·K).

use crate::support::{Host, MIXES, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{AttentionSpec, DType, KernelSet, KeyValues, reference};

/// B, S, H and K: of more positions than a tile, more heads than a block of columns, more elements than a buffer.
const SIZES: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [2, 3, 5, 7],
    [1, 70, 64, 64],
    [3, 33, 9, 80],
    [2, 1, 8, 128],
    [1, 40, 3, 1100],
    [1, 600, 10, 16],
    [2, 5, 130, 8],
    [5, 300, 2, 3],
];

/// What [`Sinks::add`](terrace_kernels::Sinks::add) makes of out and lse.
pub fn add(set: &KernelSet, sinks: &Host, out: &Host, lse: &Host) -> [Host; 2] {
    let (mut out, mut lse) = (out.clone(), lse.clone());
    set.sinks.add(sinks.view(), out.view_mut(), lse.view_mut()).unwrap();
    [out, lse]
}

/// The gradient of sinks, added to `old`.
pub fn backward(set: &KernelSet, [sinks, out, lse, dout]: [&Host; 4], old: &Host) -> Host {
    let mut dsinks = old.clone();
    set.sinks.backward(sinks.view(), out.view(), lse.view(), dout.view(), dsinks.view_mut()).unwrap();
    dsinks
}

fn check_add([b, s, h, k]: [usize; 4], (dtype, out_dtype): (DType, DType)) {
    let sinks = Host::random(dtype, &[h], 3.0, 1);
    let out = Host::random(out_dtype, &[b, s, h, k], 1.0, 2);
    let lse = Host::random(DType::F32, &[b, h, s], 4.0, 3);
    let [expected, expected_lse] = add(&reference::kernel_set(), &sinks, &out.cast(DType::F32), &lse);
    for (name, set) in backends() {
        let [out, lse] = add(&set, &sinks, &out, &lse);
        let what = format!("{name}: [{b}, {s}, {h}, {k}] {dtype} {out_dtype}");
        assert_close(&format!("out, {what}"), &expected, &out, 3e-6);
        assert_close(&format!("lse, {what}"), &expected_lse, &lse, 1e-6);
    }
}

fn check_backward([b, s, h, k]: [usize; 4], (dtype, out_dtype): (DType, DType)) {
    let sinks = Host::random(dtype, &[h], 2.0, 1);
    let out = Host::random(out_dtype, &[b, s, h, k], 1.0, 2);
    let dout = Host::random(dtype, &[b, s, h, k], 1.0, 3);
    // Not less than the sink, as those that have it.
    let above = Host::random(DType::F32, &[b, h, s], 1.5, 4).values().into_iter().map(f64::abs);
    let lse = sinks.values().repeat(b).into_iter().flat_map(|sink| std::iter::repeat_n(sink, s));
    let lse = Host::of(DType::F32, &[b, h, s], lse.zip(above).map(|(sink, above)| sink + above));
    let old = Host::random(DType::F32, &[h], 1.0, 5);
    let operands = [&sinks, &out, &lse, &dout];
    let expected = backward(&reference::kernel_set(), operands, &old);
    for (name, set) in backends() {
        let what = format!("{name}: dsinks, [{b}, {s}, {h}, {k}] {dtype} {out_dtype}");
        let tolerance = 4e-6 * ((b * s * k) as f64).sqrt();
        assert_close(&what, &expected, &backward(&set, operands, &old), tolerance);
    }
}

#[test]
fn sizes() {
    for size in SIZES {
        for mix in MIXES.into_iter().chain([(DType::F32, DType::BF16)]) {
            check_add(size, mix);
            check_backward(size, mix);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_size(b in 1usize..4, s in 1usize..90, h in 1usize..12, k in 1usize..70, mix in 0..MIXES.len()) {
        check_add([b, s, h, k], MIXES[mix]);
        check_backward([b, s, h, k], MIXES[mix]);
    }
}

/// Rows that saw nothing, also where there is no sink, whatever was in out; sinks that are far above or below, and none; what is no
/// number stays so, and in its row.
#[test]
fn extremes() {
    let (infinity, nan) = (f64::INFINITY, f64::NAN);
    // Sink, lse, out, and what they become.
    let cases = [
        (0.5, -infinity, nan, 0.5, 0.0),
        (-infinity, -infinity, infinity, -infinity, 0.0),
        (-infinity, 2.0, 3.0, 2.0, 3.0),
        (3e38, -3e38, 3.0, f64::from(3e38f32), 0.0),
        (-3e38, 3e38, 3.0, f64::from(3e38f32), 3.0),
        (1e4, 2.0, 3.0, 1e4, 0.0),
        (-1e4, 2.0, 3.0, 2.0, 3.0),
        (2.0, 2.0, 3.0, 2.0 + 2f64.ln(), 1.5),
        (0.5, nan, 3.0, nan, nan),
        (nan, 0.5, 3.0, nan, nan),
        (0.5, 0.5, nan, 0.5 + 2f64.ln(), nan),
    ];
    let heads = cases.len();
    // Every third position is one of the head's case, the others are of a sink that is as likely as all keys.
    let (positions, size) = (40, 10);
    let is_case = |s: usize| s.is_multiple_of(3);
    let sinks = Host::of(DType::F32, &[heads], cases.map(|case| case.0));
    let lse = cases.iter().flat_map(|case| (0..positions).map(|s| if is_case(s) { case.1 } else { case.0 }));
    let lse = Host::of(DType::F32, &[1, heads, positions], lse);
    for dtype in [DType::F32, DType::BF16] {
        let dims = [1, positions, heads, size];
        let places = || (0..positions).flat_map(|s| cases.iter().map(move |case| (s, case)));
        let out = places().flat_map(|(s, case)| vec![if is_case(s) { case.2 } else { 4.0 }; size]);
        let out = Host::of(dtype, &dims, out);
        let mut all = backends();
        all.push(("reference".to_owned(), reference::kernel_set()));
        for (name, set) in all {
            let [out, lse] = add(&set, &sinks, &out, &lse);
            let (rows, lse) = (out.values(), lse.values());
            for (i, (s, case)) in places().enumerate() {
                let (h, row) = (i % heads, &rows[i * size..][..size]);
                let (lse_found, what) =
                    (lse[h * positions + s], format!("{name}, {dtype}: {case:?}, position {s}"));
                let (expected_lse, expected) = match case {
                    case if is_case(s) => (case.3, case.4),
                    // No sink, and nothing seen.
                    case if case.0 == -infinity => (-infinity, 0.0),
                    case => (case.0 + 2f64.ln(), if case.0.is_nan() { nan } else { 2.0 }),
                };
                let same = |found: f64, expected: f64| {
                    found == expected
                        || (found.is_nan() && expected.is_nan())
                        || (found - expected).abs() <= 2e-7 * expected.abs()
                };
                assert!(same(lse_found, expected_lse), "{what}: lse {lse_found} instead of {expected_lse}");
                assert!(row.iter().all(|x| same(*x, expected)), "{what}: {row:?} instead of {expected}");
            }
            // Finite where the operands are, and none of heads without a sink.
            let ones = Host::of(dtype, &dims, vec![1.0; out.len()]);
            let zeros = Host::zeros(DType::F32, &[heads]);
            let lse = Host::of(DType::F32, &[1, heads, positions], lse);
            let dsinks = backward(&set, [&sinks, &out, &lse, &ones], &zeros).values();
            for (h, (dsink, case)) in dsinks.iter().zip(&cases).enumerate() {
                let is_number = !(0..positions).any(|s| rows[(s * heads + h) * size].is_nan());
                assert_eq!(dsink.is_finite(), is_number, "{name}, {dtype}: {case:?}: {dsink}");
                assert!(case.0 != -infinity || *dsink == 0.0, "{name}, {dtype}: {case:?}: {dsink}");
            }
        }
    }
}

/// out, lse, dq, dk, dv and dsinks of attention with sinks, from the beginning of each sequence.
pub fn attention(
    set: &KernelSet,
    [q, k, v, sinks, dout]: [&Host; 5],
    spec: AttentionSpec,
    dtype: DType,
) -> [Host; 6] {
    let &[b, s, h, _] = q.dims() else { unreachable!("q is [B, S, H, K]") };
    let (mut out, mut lse) = (Host::zeros(dtype, q.dims()), Host::zeros(DType::F32, &[b, h, s]));
    let (keys, starts) = (KeyValues::rows(k.view(), v.view()), Host::zeros(DType::I32, &[b]));
    set.attention.forward(q.view(), keys, starts.view(), out.view_mut(), lse.view_mut(), spec).unwrap();
    set.sinks.add(sinks.view(), out.view_mut(), lse.view_mut()).unwrap();
    let dsinks = backward(set, [sinks, &out, &lse, dout], &Host::zeros(DType::F32, &[h]));
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|of| Host::zeros(dtype, of.dims()));
    let (to_q, to_k, to_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
    let (of_out, of_lse) = (out.view(), lse.view());
    set.attention
        .backward(q.view(), k.view(), v.view(), of_out, of_lse, dout.view(), to_q, to_k, to_v, spec)
        .unwrap();
    [out, lse, dq, dk, dv, dsinks]
}

/// All gradients through attention, of every backend beside the reference's. Tolerances are those of attention's own suite.
#[test]
fn attention_with_sinks() {
    for (queries, heads, kv_heads, head_size, window, cap) in [
        (7, 2, 2, 8, None, None),
        (70, 6, 2, 24, Some(20), None),
        (130, 4, 1, 64, None, None),
        (70, 6, 2, 24, Some(20), Some(0.8)),
    ] {
        for (dtype, out_dtype) in MIXES {
            let operand =
                |heads, scale, seed| Host::random(dtype, &[2, queries, heads, head_size], scale, seed);
            let (q, k, v) = (operand(heads, 1.5, 1), operand(kv_heads, 1.5, 2), operand(kv_heads, 1.0, 3));
            let (sinks, dout) = (Host::random(dtype, &[heads], 2.0, 4), operand(heads, 1.0, 5));
            let spec = AttentionSpec { scale: 1.0 / (head_size as f32).sqrt(), window, cap, chunk: None };
            let operands = [&q, &k, &v, &sinks, &dout];
            let expected = attention(&reference::kernel_set(), operands, spec, DType::F32);
            let group = ((heads / kv_heads) as f64).sqrt();
            let is_narrow = out_dtype != DType::F32;
            let [of_out, of_gradients] = if is_narrow { [2e-2, 5e-2 * group] } else { [1e-5, 1e-4] };
            // The results of rows are off by a rounding each.
            let of_sinks = 1e-4
                + if is_narrow { 2f64.powi(-8) * ((2 * queries * head_size) as f64).sqrt() } else { 0.0 };
            for (name, set) in backends() {
                let found = attention(&set, operands, spec, out_dtype);
                let tolerances = [of_out, 1e-5, of_gradients, of_gradients, of_gradients, of_sinks];
                let names = ["out", "lse", "dq", "dk", "dv", "dsinks"];
                for (i, tolerance) in tolerances.into_iter().enumerate() {
                    let what = format!("{name}: {} of {queries} {heads} {kv_heads} {head_size}", names[i]);
                    assert_close(&format!("{what} {dtype} {out_dtype}"), &expected[i], &found[i], tolerance);
                }
            }
        }
    }
}

/// What a sink is: each head's first key, of value zero, has one more element, where all queries have 1, and the sink is its score.
/// Attention over it, which knows of no sinks, gives the same results and gradients.
#[test]
fn a_sink_is_a_key_without_a_value() {
    let (queries, heads, size, scale) = (37, 3, 12, 0.3);
    let spec = AttentionSpec { scale, window: None, cap: None, chunk: None };
    let dims = [1, queries, heads, size];
    let [q, k, v, dout] = [1, 2, 3, 4].map(|seed| Host::random(DType::F32, &dims, 1.0, seed));
    let sinks = Host::of(DType::F32, &[heads], [-1.5, 0.25, 2.0]);
    // The same with the key in front, whose query's own result nobody asks for.
    let in_front = |of: &Host, first: [f64; 3], last: f64| {
        let (values, row) = (of.values(), heads * size);
        let wide =
            (0..=queries).flat_map(|s| (0..heads).flat_map(move |h| (0..=size).map(move |c| (s, h, c))));
        let wide = wide.map(|(s, h, c)| match (s, c == size) {
            (0, true) => first[h],
            (0, false) => 0.0,
            (_, true) => last,
            (_, false) => values[(s - 1) * row + h * size + c],
        });
        Host::of(DType::F32, &[1, queries + 1, heads, size + 1], wide.collect::<Vec<_>>())
    };
    let without = |of: &Host| {
        let values = of.values();
        let rows = values.chunks(size + 1).skip(heads).flat_map(|row| row[..size].to_vec());
        Host::of(DType::F32, &dims, rows.collect::<Vec<_>>())
    };
    let scores: Vec<f64> = sinks.values().iter().map(|sink| sink / f64::from(scale)).collect();
    let wide_q = in_front(&q, [1.0; 3], 1.0);
    let wide_k = in_front(&k, scores.try_into().unwrap(), 0.0);
    let [wide_v, wide_dout] = [&v, &dout].map(|of| in_front(of, [0.0; 3], 0.0));
    let none = Host::of(DType::F32, &[heads], [f64::NEG_INFINITY; 3]);
    let set = reference::kernel_set();
    let wide_operands = [&wide_q, &wide_k, &wide_v, &none, &wide_dout];
    let [out, lse, dq, dk, dv, _] = attention(&set, wide_operands, spec, DType::F32);
    let lse = lse.values().into_iter().enumerate().filter(|(i, _)| i % (queries + 1) > 0).map(|(_, lse)| lse);
    let lse = Host::of(DType::F32, &[1, heads, queries], lse.collect::<Vec<_>>());
    // The score is the element times the scale.
    let dsinks = (0..heads).map(|h| dk.values()[h * (size + 1) + size] / f64::from(scale));
    let dsinks = Host::of(DType::F32, &[heads], dsinks.collect::<Vec<_>>());
    let expected = [without(&out), lse, without(&dq), without(&dk), without(&dv), dsinks];
    let mut all = backends();
    all.push(("reference".to_owned(), set));
    for (name, set) in all {
        let found = attention(&set, [&q, &k, &v, &sinks, &dout], spec, DType::F32);
        for (i, what) in ["out", "lse", "dq", "dk", "dv", "dsinks"].into_iter().enumerate() {
            assert_close(&format!("{name}: {what}"), &expected[i], &found[i], 2e-5);
        }
    }
}
