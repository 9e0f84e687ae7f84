//! Tolerance: an exponential within 2.4e-7 and four roundings of products up to 6·6·6, so 1e-4 absolute at the extreme
//! and in practice 2e-5. The clamped swish goes up to 7·8·6 and on both sides of its limits: 1e-4.

use crate::support::{Host, MIXES, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, GateFunction, KernelSet, reference};

/// out, dgate and dup.
pub fn gated(set: &KernelSet, f: GateFunction, [gate, up, dout]: &[Host; 3], dtype: DType) -> [Host; 3] {
    let mut out = Host::zeros(dtype, &[1, gate.len()]);
    let (mut dgate, mut dup) = (out.clone(), out.clone());
    set.activation.gated(f, gate.view(), up.view(), out.view_mut()).unwrap();
    set.activation
        .gated_backward(f, gate.view(), up.view(), dout.view(), dgate.view_mut(), dup.view_mut())
        .unwrap();
    [out, dgate, dup]
}

#[test]
fn every_function() {
    for elements in [1, 15, 16, 17, 1023, 1025, 40_001] {
        for (f, mix) in GateFunction::ALL.into_iter().flat_map(|f| MIXES.map(|mix| (f, mix))) {
            check(f, elements, mix);
        }
    }
}

fn check(f: GateFunction, elements: usize, (dtype, out_dtype): (DType, DType)) {
    let (of_gate, of_up, tolerance) =
        if f == GateFunction::ClampedSwish { (5.0, 5.0, 1e-4) } else { (2.0, 1.0, 2e-5) };
    let operand = |scale, seed| Host::random(dtype, &[1, elements], scale, seed);
    let operands = [operand(of_gate, 1), operand(of_up, 2), operand(1.0, 3)];
    let expected = gated(&reference::kernel_set(), f, &operands, DType::F32);
    for (name, set) in backends() {
        let found = gated(&set, f, &operands, out_dtype);
        for (what, (expected, found)) in ["out", "dgate", "dup"].iter().zip(expected.iter().zip(&found)) {
            let what = format!("{name}: {what} of {f:?}, {elements} {dtype} {out_dtype}");
            assert_close(&what, expected, found, tolerance);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_size(f in 0..GateFunction::ALL.len(), elements in 1usize..40_000, mix in 0..MIXES.len()) {
        check(GateFunction::ALL[f], elements, MIXES[mix]);
    }
}

/// Values of torch 2.11, `torch.nn.functional` in float64: the reference computes what is meant.
#[test]
fn values_of_torch() {
    let gate = Host::of(DType::F32, &[1, 5], [-3.0, -0.75, 0.25, 1.5, 6.0]);
    let ones = Host::of(DType::F32, &[1, 5], [1.0; 5]);
    let operands = [gate, ones.clone(), ones];
    for (f, values, slopes) in [
        (
            GateFunction::Silu,
            [-0.1422776195, -0.2406159756, 0.1405441252, 1.2263617143, 5.9851642611],
            [-0.0881041060, 0.1574000555, 0.6237100216, 1.0412941543, 1.0123264326],
        ),
        (
            GateFunction::Gelu,
            [-0.0040496941, -0.1699705143, 0.1496765814, 1.3997891981, 5.9999999941],
            [-0.0119456472, 0.0007742783, 0.6953733549, 1.1274691922, 1.0000000355],
        ),
        (
            GateFunction::GeluTanh,
            [-0.0036373921, -0.1700394448, 0.1496753507, 1.3995715770, 5.9999999999],
            [-0.0115841666, 0.0010617439, 0.6953540952, 1.1277107932, 1.0000000008],
        ),
        (
            GateFunction::Sigmoid,
            [0.0474258732, 0.3208213008, 0.5621765009, 0.8175744762, 0.9975273768],
            [0.0451766597, 0.2178949938, 0.2461340827, 0.1491464521, 0.0024665093],
        ),
        (
            // Twice x·σ(1.702·x), since up is 1.
            GateFunction::ClampedSwish,
            [-0.0361426194, -0.3272198849, 0.3023992998, 2.7833243969, 11.9995592929],
            [-0.0490966478, 0.0008569331, 1.4130008819, 2.1976961292, 2.0006766048],
        ),
    ] {
        let [out, dgate, _] = gated(&reference::kernel_set(), f, &operands, DType::F32);
        assert_close(&format!("{f:?}"), &Host::of(DType::F64, &[1, 5], values), &out, 1e-7);
        assert_close(&format!("{f:?}'"), &Host::of(DType::F64, &[1, 5], slopes), &dgate, 1e-7);
    }
}

/// Values of torch 2.11 in float64 at the limits, at which `clamp` has a gradient, and on both sides of them, on every backend.
#[test]
fn clamped_swish_at_its_limits() {
    let dims = [1, 10];
    let gate = Host::of(DType::F32, &dims, [-9.0, 6.5, 7.0, 7.5, 20.0, 1.0, 1.0, 1.0, -2.0, 7.5]);
    let up = Host::of(DType::F32, &dims, [-8.0, 0.5, 7.0, 1.0, 7.0, -7.0, 9.0, -7.5, -9.0, 8.0]);
    let ones = Host::of(DType::F32, &dims, [1.0; 10]);
    let out = [
        0.0000120191,
        9.7498471034,
        55.9996250264,
        13.9999062566,
        55.9996250264,
        -5.0747745956,
        6.7663661275,
        -5.0747745956,
        0.3860482611,
        55.9996250264,
    ];
    let dgate = [
        0.0000191210,
        1.5002367034,
        8.0005846331,
        0.0,
        0.0,
        -6.4066776393,
        8.5422368525,
        -6.4066776393,
        0.4428921259,
        0.0,
    ];
    let dup = [0.0, 6.4998980689, 6.9999531283, 6.9999531283, 6.9999531283, 0.8457957659, 0.0, 0.0, 0.0, 0.0];
    let expected = [out, dgate, dup].map(|values| Host::of(DType::F64, &dims, values));
    let mut all = backends();
    all.push(("reference".to_owned(), reference::kernel_set()));
    for (name, set) in all {
        let found =
            gated(&set, GateFunction::ClampedSwish, &[gate.clone(), up.clone(), ones.clone()], DType::F32);
        for (what, (expected, found)) in ["out", "dgate", "dup"].iter().zip(expected.iter().zip(&found)) {
            assert_close(&format!("{name}: {what}"), expected, found, 4e-6);
        }
        // Beyond a limit a gradient is none at all.
        let zeros = |values: &Host| values.values().iter().map(|x| *x == 0.0).collect::<Vec<_>>();
        assert_eq!(found.each_ref().map(zeros), expected.each_ref().map(zeros), "{name}");
    }
}

/// The neighbours of the limits, in the dtypes that have any: the nearest that is beyond has no gradient, the limit has one.
#[test]
fn clamped_swish_beside_its_limits() {
    for (dtype, beyond) in [(DType::F32, 7.000_000_5), (DType::BF16, 7.031_25), (DType::F16, 7.003_906_25)] {
        let of = |values: [f64; 4]| Host::of(dtype, &[1, 4], values);
        let limits = of([7.0, beyond, -7.0, -beyond]);
        assert_eq!(limits.values(), [7.0, f64::from(beyond as f32), -7.0, -f64::from(beyond as f32)]);
        for (name, set) in backends() {
            let run = |gate: Host, up: Host| {
                let found = gated(&set, GateFunction::ClampedSwish, &[gate, up, of([1.0; 4])], DType::F32);
                found.map(|found| found.values())
            };
            let [out, dgate, _] = run(limits.clone(), of([1.0; 4]));
            assert_eq!(out[0], out[1], "{name}: a gate beyond the limit is the limit");
            assert!(dgate[0] > 1.9 && dgate[1] == 0.0, "{name}: {dgate:?}");
            assert!(
                out[3] != out[2] && dgate[3] < 0.0,
                "{name}: a gate has no limit below: {out:?} {dgate:?}"
            );
            let [out, _, dup] = run(of([1.0; 4]), limits.clone());
            assert_eq!([out[0], out[2]], [out[1], out[3]], "{name}: {out:?}");
            assert!(dup[0] > 0.8 && dup[2] > 0.8, "{name}: {dup:?}");
            assert_eq!([dup[1], dup[3]], [0.0; 2], "{name}");
        }
    }
}

/// Far from zero a function is 0 or the identity, never NaN, and so is its slope; one that is clamped stays what it is at the limit, and a
/// share by itself is 1.
#[test]
fn extreme_gates() {
    let gate = Host::of(DType::F32, &[1, 8], [-3e38, -1e19, -1e3, -90.0, 90.0, 1e3, 1e19, 3e38]);
    let ones = Host::of(DType::F32, &[1, 8], [1.0; 8]);
    let operands = [gate.clone(), ones.clone(), ones.clone()];
    for f in GateFunction::ALL {
        for (name, set) in backends() {
            let [out, dgate, dup] = gated(&set, f, &operands, DType::F32).map(|found| found.values());
            assert!(
                out[..4].iter().chain(&dgate[..4]).all(|x| x.abs() < 1e-30),
                "{name} {f:?}: {out:?} {dgate:?}"
            );
            if f == GateFunction::ClampedSwish {
                assert!(out[4..].iter().all(|x| (x - 14.0).abs() < 1e-3), "{name} {f:?}: {out:?}");
                assert_eq!(dgate[4..], [0.0; 4], "{name} {f:?}");
                assert_eq!(dup, out.iter().map(|x| x / 2.0).collect::<Vec<_>>(), "{name} {f:?}");
                continue;
            }
            if f == GateFunction::Sigmoid {
                assert_eq!((&out[4..], &dgate[4..]), (&[1.0; 4][..], &[0.0; 4][..]), "{name} {f:?}");
                assert_eq!(out, dup, "{name} {f:?}");
                continue;
            }
            assert_eq!(out[4..], gate.values()[4..], "{name} {f:?}");
            assert_eq!(dgate[4..], ones.values()[4..], "{name} {f:?}");
            assert_eq!(out, dup, "{name} {f:?}");
        }
    }
}

/// A diverged run is reported as such.
#[test]
fn nan_propagates() {
    let gate = Host::of(DType::F32, &[1, 35], (0..35).map(|i| if i % 5 == 3 { f64::NAN } else { 1.0 }));
    let ones = Host::of(DType::F32, &[1, 35], [1.0; 35]);
    for f in GateFunction::ALL {
        for (name, set) in backends() {
            for found in gated(&set, f, &[gate.clone(), ones.clone(), ones.clone()], DType::F32) {
                let is_nan = |(i, x): (usize, f64)| x.is_nan() == (i % 5 == 3);
                assert!(found.values().into_iter().enumerate().all(is_nan), "{name} {f:?}");
            }
        }
    }
}

/// Also that of up, which limits must not hide; and as many elements as whole vectors have, and a few more.
#[test]
fn nan_of_up_propagates() {
    let up = Host::of(DType::F32, &[1, 35], (0..35).map(|i| if i % 5 == 3 { f64::NAN } else { 1.0 }));
    let ones = Host::of(DType::F32, &[1, 35], [1.0; 35]);
    for f in GateFunction::ALL {
        for (name, set) in backends() {
            let [out, dgate, _] = gated(&set, f, &[ones.clone(), up.clone(), ones.clone()], DType::F32);
            for found in [out, dgate] {
                let is_nan = |(i, x): (usize, f64)| x.is_nan() == (i % 5 == 3);
                assert!(found.values().into_iter().enumerate().all(is_nan), "{name} {f:?}");
            }
        }
    }
}
