//! Tolerance: an exponential within 2.4e-7 and four roundings of products up to 6·6·6, so 1e-4 absolute at the extreme
//! and in practice 2e-5.

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
    let gate = Host::random(dtype, &[1, elements], 2.0, 1);
    let [up, dout] = [2, 3].map(|seed| Host::random(dtype, &[1, elements], 1.0, seed));
    let operands = [gate, up, dout];
    let expected = gated(&reference::kernel_set(), f, &operands, DType::F32);
    for (name, set) in backends() {
        let found = gated(&set, f, &operands, out_dtype);
        for (what, (expected, found)) in ["out", "dgate", "dup"].iter().zip(expected.iter().zip(&found)) {
            let what = format!("{name}: {what} of {f:?}, {elements} {dtype} {out_dtype}");
            assert_close(&what, expected, found, 2e-5);
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
    ] {
        let [out, dgate, _] = gated(&reference::kernel_set(), f, &operands, DType::F32);
        assert_close(&format!("{f:?}"), &Host::of(DType::F64, &[1, 5], values), &out, 1e-7);
        assert_close(&format!("{f:?}'"), &Host::of(DType::F64, &[1, 5], slopes), &dgate, 1e-7);
    }
}

/// Far from zero a function is 0 or the identity, never NaN, and so is its slope.
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
            assert_eq!(out[4..], gate.values()[4..], "{name} {f:?}");
            assert_eq!(dgate[4..], ones.values()[4..], "{name} {f:?}");
            assert_eq!(out, dup, "{name} {f:?}");
        }
    }
}

/// A diverged run is reported as such.
#[test]
fn nan_propagates() {
    let gate = Host::of(DType::F32, &[1, 3], [1.0, f64::NAN, -1.0]);
    let ones = Host::of(DType::F32, &[1, 3], [1.0; 3]);
    for f in GateFunction::ALL {
        for (name, set) in backends() {
            for found in gated(&set, f, &[gate.clone(), ones.clone(), ones.clone()], DType::F32) {
                let nans: Vec<bool> = found.values().iter().map(|x| x.is_nan()).collect();
                assert_eq!(nans, [false, true, false], "{name} {f:?}");
            }
        }
    }
}
