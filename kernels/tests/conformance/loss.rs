//! Tolerance: a row's loss within 1e-6 of its value plus 1e-6; gradients within 1e-6·scale.

use crate::support::{Host, Random, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, KernelSet, reference};

const SIZES: [(usize, usize); 5] = [(1, 1), (3, 5), (4, 1024), (37, 2050), (1030, 3)];

fn labels(rows: usize, classes: usize) -> Host {
    let mut random = Random::new(9);
    let label =
        |r: usize, random: &mut Random| if r % 3 == 2 { -100.0 } else { random.below(classes) as f64 };
    Host::of(DType::I32, &[rows], (0..rows).map(|r| label(r, &mut random)))
}

#[test]
fn loss_and_gradient() {
    for (rows, classes) in SIZES {
        FLOATS.into_iter().for_each(|dtype| check(rows, classes, dtype));
    }
}

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn check(rows: usize, classes: usize, dtype: DType) {
    let (logits, labels) = (Host::random(dtype, &[rows, classes], 4.0, 1), labels(rows, classes));
    check_capped(&logits, &labels, None);
    let (cap, mut capped) = (4.5, logits);
    reference::kernel_set().elementwise.cap(capped.view_mut(), cap).unwrap();
    check_capped(&capped, &labels, Some(cap));
}

fn check_capped(logits: &Host, labels: &Host, cap: Option<f32>) {
    let (view, rows) = (logits.view(), labels.view().shape().elements());
    let (classes, dtype) = (view.shape().elements() / rows, view.dtype());
    let scale = 0.37;
    let run = |set: &KernelSet, mut logits: Host| {
        let (mut only, mut both) = (Host::of(DType::F64, &[1], [5.0]), Host::of(DType::F64, &[1], [5.0]));
        set.cross_entropy.loss(logits.view(), labels.view(), only.view_mut()).unwrap();
        set.cross_entropy
            .loss_and_gradient(logits.view_mut(), labels.view(), scale, cap, both.view_mut())
            .unwrap();
        assert_eq!(only.bytes(), both.bytes(), "the loss with and without gradient");
        (both.values()[0], logits)
    };
    let (expected_loss, expected) = run(&reference::kernel_set(), logits.cast(DType::F32));
    for (name, set) in backends() {
        let (loss, gradient) = run(&set, logits.clone());
        let what = format!("{name}: [{rows}, {classes}] {dtype}, cap {cap:?}");
        let allowed = 1e-6 * expected_loss + 1e-6 * rows as f64;
        assert!((loss - expected_loss).abs() <= allowed, "{what}: {loss} instead of {expected_loss}");
        assert_close(&what, &expected, &gradient, 1e-6 * f64::from(scale));
        let ignored =
            gradient.values().chunks(classes).skip(2).step_by(3).all(|row| row.iter().all(|x| *x == 0.0));
        assert!(ignored, "{what}: ignored rows have no gradient");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(rows in 1usize..40, classes in 1usize..3000, dtype in 0..FLOATS.len()) {
        check(rows, classes, FLOATS[dtype]);
    }
}

/// Logits of any size do not overflow.
#[test]
fn large_logits() {
    let logits = Host::of(DType::F32, &[1, 3], [3e4, 3e4, -3e4]);
    let labels = Host::of(DType::I32, &[1], [1.0]);
    for (name, set) in backends() {
        let mut loss = Host::zeros(DType::F64, &[1]);
        set.cross_entropy.loss(logits.view(), labels.view(), loss.view_mut()).unwrap();
        assert!((loss.values()[0] - std::f64::consts::LN_2).abs() < 1e-6, "{name}");
    }
}

/// A diverged run is reported as such.
#[test]
fn nan_propagates() {
    let logits = Host::of(DType::F32, &[1, 20], (0..20).map(|i| if i == 3 { f64::NAN } else { 1.0 }));
    let labels = Host::of(DType::I32, &[1], [1.0]);
    for (name, set) in backends() {
        let mut loss = Host::zeros(DType::F64, &[1]);
        set.cross_entropy.loss(logits.view(), labels.view(), loss.view_mut()).unwrap();
        assert!(loss.values()[0].is_nan(), "{name}");
    }
}
