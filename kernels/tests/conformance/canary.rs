//! The suites can fail: a backend with one defect is found by the comparison they all use.

use crate::experts;
use crate::support::{Host, mismatch};
use terrace_kernels::{
    DType, Epilogue, Experts, Gating, Matmul, MatmulSpec, Residual, Result, View, ViewMut, cpu, reference,
};

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

/// The same defect in what tokens choose: the last expert is nobody's.
impl Experts for Broken {
    fn route(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: ViewMut<'_>,
        chosen: ViewMut<'_>,
        rows: ViewMut<'_>,
        starts: ViewMut<'_>,
    ) -> Result {
        let (width, values) = (logits.shape().last(), bytemuck::cast_slice::<_, f32>(logits.bytes().host()));
        let without = |(i, x): (usize, &f32)| if i % width == width - 1 { -9.0 } else { f64::from(*x) };
        let logits =
            Host::of(DType::F32, &[values.len() / width, width], values.iter().enumerate().map(without));
        cpu::kernel_set(1).experts.route(logits.view(), gating, weights, chosen, rows, starts)
    }

    fn route_backward(
        &self,
        _: View<'_>,
        _: Gating<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        unreachable!("the choice above is what is compared")
    }

    fn starts(&self, _: View<'_>, _: usize) -> Result<Vec<usize>> {
        unreachable!("as above")
    }

    fn spread(&self, _: View<'_>, _: View<'_>, _: ViewMut<'_>) -> Result {
        unreachable!("as above")
    }

    fn collect(&self, _: View<'_>, _: View<'_>, _: Residual<'_>, _: ViewMut<'_>) -> Result {
        unreachable!("as above")
    }

    fn weigh(&self, _: View<'_>, _: View<'_>, _: View<'_>, _: ViewMut<'_>) -> Result {
        unreachable!("as above")
    }

    fn weigh_backward(
        &self,
        _: ViewMut<'_>,
        _: View<'_>,
        _: View<'_>,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result {
        unreachable!("as above")
    }
}

/// What is compared of a choice, one by one: weights that are off, and then experts, too.
#[test]
fn a_broken_choice_is_found() {
    let found_of = |last: f64| {
        let logits = Host::of(DType::F32, &[1, 4], [0.5, 3.0, 2.0, last]);
        let expected = experts::route(&*reference::kernel_set().experts, &logits, 2, Gating::softmax(false));
        let right = experts::route(&*cpu::kernel_set(1).experts, &logits, 2, Gating::softmax(false));
        assert_eq!(experts::disagreement(&expected, &right), None);
        experts::disagreement(&expected, &experts::route(&Broken, &logits, 2, Gating::softmax(false)))
            .unwrap()
    };
    assert!(found_of(1.0).starts_with("weight 0"), "{}", found_of(1.0));
    assert!(found_of(4.0).starts_with("chosen"), "{}", found_of(4.0));
}
