//! Tolerance: an exponential within 2.4e-7 and four roundings of products up to 6·6·6, so 1e-4 absolute at the extreme
//! and in practice 2e-5.

use crate::support::{Host, MIXES, assert_close, backends};
use terrace_kernels::{DType, KernelSet, reference};

#[test]
fn swiglu() {
    for elements in [1, 15, 16, 17, 1023, 1025, 40_001] {
        for (dtype, out_dtype) in MIXES {
            let gate = Host::random(dtype, &[1, elements], 2.0, 1);
            let up = Host::random(dtype, &[1, elements], 1.0, 2);
            let dout = Host::random(dtype, &[1, elements], 1.0, 3);
            let run = |set: &KernelSet, dtype| {
                let mut out = Host::zeros(dtype, &[1, elements]);
                let (mut dgate, mut dup) = (out.clone(), out.clone());
                set.activation.swiglu(gate.view(), up.view(), out.view_mut()).unwrap();
                set.activation
                    .swiglu_backward(gate.view(), up.view(), dout.view(), dgate.view_mut(), dup.view_mut())
                    .unwrap();
                [out, dgate, dup]
            };
            let expected = run(&reference::kernel_set(), DType::F32);
            for (name, set) in backends() {
                let found = run(&set, out_dtype);
                for (what, (expected, found)) in
                    ["out", "dgate", "dup"].iter().zip(expected.iter().zip(&found))
                {
                    assert_close(
                        &format!("{name}: {what} of {elements} {dtype} {out_dtype}"),
                        expected,
                        found,
                        2e-5,
                    );
                }
            }
        }
    }
}

/// Far from zero silu is 0 or the identity, never NaN.
#[test]
fn extreme_gates() {
    let gate = Host::of(DType::F32, &[6], [-3e38, -1e3, -90.0, 90.0, 1e3, 3e38]);
    let up = Host::of(DType::F32, &[6], [1.0; 6]);
    for (name, set) in backends() {
        let mut out = Host::zeros(DType::F32, &[6]);
        set.activation.swiglu(gate.view(), up.view(), out.view_mut()).unwrap();
        let (out, gate) = (out.values(), gate.values());
        assert!(out[..3].iter().all(|out| out.abs() < 1e-30), "{name}: {out:?}");
        assert_eq!(out[3..], gate[3..], "{name}");
    }
}
