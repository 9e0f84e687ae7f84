//! The suites can fail: a backend with one defect is found by the comparison they all use.

use crate::support::{Host, mismatch};
use terrace_kernels::{DType, Epilogue, Matmul, MatmulSpec, Result, View, ViewMut, cpu, reference};

/// Drops the last term of every sum.
struct Broken;

impl Matmul for Broken {
    fn matmul(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>, spec: MatmulSpec) -> Result {
        let mut shortened = Host::of(a.dtype(), a.shape().dims(), {
            let mut values = Vec::new();
            for row in bytemuck::cast_slice::<_, f32>(a.bytes().host()).chunks(a.shape().last()) {
                values.extend(row.iter().map(|x| f64::from(*x)));
                *values.last_mut().unwrap() = 0.0;
            }
            values
        });
        cpu::kernel_set(1).matmul.matmul(shortened.view_mut().view(), b, out, spec)
    }

    fn matmul_nt(&self, _: View<'_>, _: View<'_>, _: ViewMut<'_>, _: Epilogue<'_>) -> Result {
        unreachable!("the product above is what is compared")
    }
}

#[test]
fn a_broken_kernel_is_found() {
    let a = Host::random(DType::F32, &[20, 300], 1.0, 1);
    let b = Host::random(DType::F32, &[30, 300], 1.0, 2);
    let run = |matmul: &dyn Matmul| {
        let mut out = Host::zeros(DType::F32, &[20, 30]);
        matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT).unwrap();
        out
    };
    let expected = run(&*reference::kernel_set().matmul);
    assert_eq!(mismatch(&expected, &run(&*cpu::kernel_set(1).matmul), 1e-3), None);
    assert!(mismatch(&expected, &run(&Broken), 1e-3).is_some());
}
