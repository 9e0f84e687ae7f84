//! Tolerance: a few f32 roundings of terms of order |x|·rstd·|weight| ≤ 30, so 1e-5; sums over R rows 1e-5·√R.

use crate::support::{Host, MIXES, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, reference};

/// The last are wider than what threads of a card hold in registers, whole vectors of it and not.
const SIZES: [(usize, usize); 10] =
    [(1, 1), (3, 5), (2, 64), (300, 128), (7, 1023), (5, 1025), (513, 96), (2, 8200), (2, 8197), (1, 16_400)];

#[test]
fn forward() {
    for (rows, width) in SIZES {
        MIXES.into_iter().for_each(|mix| check_forward(rows, width, mix));
    }
}

fn check_forward(rows: usize, width: usize, (dtype, out_dtype): (DType, DType)) {
    let x = Host::random(dtype, &[rows, width], 3.0, 1);
    let weight = Host::random(dtype, &[width], 1.0, 2);
    let (mut expected, mut expected_rstd) =
        (Host::zeros(DType::F32, &[rows, width]), Host::zeros(DType::F32, &[rows]));
    reference::kernel_set()
        .rms_norm
        .forward(x.view(), weight.view(), 1e-6, expected.view_mut(), expected_rstd.view_mut())
        .unwrap();
    for (name, set) in backends() {
        let (mut out, mut rstd) = (Host::zeros(out_dtype, &[rows, width]), Host::zeros(DType::F32, &[rows]));
        set.rms_norm.forward(x.view(), weight.view(), 1e-6, out.view_mut(), rstd.view_mut()).unwrap();
        let what = format!("{name}: [{rows}, {width}] {dtype} {out_dtype}");
        assert_close(&what, &expected, &out, 1e-5);
        let largest = expected_rstd.values().into_iter().fold(0.0, f64::max);
        assert_close(&what, &expected_rstd, &rstd, 1e-6 * largest);
    }
}

#[test]
fn backward() {
    for (rows, width) in SIZES {
        for (mix, accumulate) in MIXES.into_iter().zip([false, true, true, false]) {
            check_backward(rows, width, mix, accumulate);
        }
    }
}

fn check_backward(rows: usize, width: usize, (dtype, out_dtype): (DType, DType), accumulate: bool) {
    let x = Host::random(dtype, &[rows, width], 2.0, 1);
    let weight = Host::random(dtype, &[width], 1.0, 2);
    let dout = Host::random(dtype, &[rows, width], 1.0, 3);
    let rstd = Host::of(
        DType::F32,
        &[rows],
        x.values()
            .chunks(width)
            .map(|row| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-6).sqrt()),
    );
    let old = Host::random(out_dtype, &[rows, width], 1.0, 4);
    let old_weight = Host::random(DType::F32, &[width], 1.0, 5);
    let run = |set: &terrace_kernels::KernelSet, mut dx: Host| {
        let mut dweight = old_weight.clone();
        set.rms_norm
            .backward(
                dout.view(),
                x.view(),
                weight.view(),
                rstd.view(),
                dx.view_mut(),
                accumulate,
                dweight.view_mut(),
            )
            .unwrap();
        (dx, dweight)
    };
    let (expected, expected_weight) = run(&reference::kernel_set(), old.cast(DType::F32));
    for (name, set) in backends() {
        let (dx, dweight) = run(&set, old.clone());
        let what = format!("{name}: [{rows}, {width}] {dtype} {out_dtype}");
        let scale = rstd.values().into_iter().fold(1.0, f64::max);
        assert_close(&format!("dx, {what}"), &expected, &dx, 1e-5 * scale);
        assert_close(&format!("dweight, {what}"), &expected_weight, &dweight, 1e-5 * (rows as f64).sqrt());
    }
}

#[test]
fn center() {
    for (rows, width) in SIZES {
        for (mix, accumulate) in MIXES.into_iter().zip([false, true, true, false]) {
            check_center(rows, width, mix, accumulate);
        }
    }
}

/// Tolerance: a few f32 roundings of elements around a mean of 4.
fn check_center(rows: usize, width: usize, (dtype, out_dtype): (DType, DType), accumulate: bool) {
    let around = Host::random(dtype, &[rows, width], 1.0, 1);
    let x = Host::of(dtype, &[rows, width], around.values().into_iter().map(|x| x + 4.0));
    let old = Host::random(out_dtype, &[rows, width], 1.0, 2);
    let mut expected = old.cast(DType::F32);
    let reference = reference::kernel_set();
    reference.rms_norm.center(x.view(), expected.view_mut(), accumulate).unwrap();
    for (row, old) in expected.values().chunks(width).zip(old.values().chunks(width)) {
        let sum = row.iter().sum::<f64>() - if accumulate { old.iter().sum::<f64>() } else { 0.0 };
        assert!(sum.abs() <= 1e-6 * width as f64, "the reference: a row sums to {sum}");
    }
    for (name, set) in backends() {
        let mut out = old.clone();
        set.rms_norm.center(x.view(), out.view_mut(), accumulate).unwrap();
        let what = format!("{name}: [{rows}, {width}] {dtype} {out_dtype} {accumulate}");
        assert_close(&what, &expected, &out, 1e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        rows in 1usize..40, width in 1usize..2500, mix in 0..MIXES.len(), accumulate in any::<bool>(),
    ) {
        check_forward(rows, width, MIXES[mix]);
        check_backward(rows, width, MIXES[mix], accumulate);
        check_center(rows, width, MIXES[mix], accumulate);
    }
}

/// Rows of any size, not only those whose squares are numbers of f32, come out as others: x̂ does not depend on it.
#[test]
fn rows_of_any_size() {
    for (size, eps) in
        [(1e19, 1e-6), (1e30, 1e-6), (3e37, 1e-6), (1e-18, 0.0), (1e-25, 0.0), (1e-36, 0.0), (1e-25, 1e-30)]
    {
        for (rows, width) in [(3, 64), (2, 1500)] {
            let dims = [rows, width];
            let x = Host::random(DType::F32, &dims, size, 1);
            let weight = Host::random(DType::F32, &[width], 1.0, 2);
            let dout = Host::random(DType::F32, &dims, 1.0, 3);
            let run = |set: &terrace_kernels::KernelSet| {
                let (mut out, mut rstd) = (Host::zeros(DType::F32, &dims), Host::zeros(DType::F32, &[rows]));
                set.rms_norm.forward(x.view(), weight.view(), eps, out.view_mut(), rstd.view_mut()).unwrap();
                let (mut dx, mut dweight) =
                    (Host::zeros(DType::F32, &dims), Host::zeros(DType::F32, &[width]));
                let (to_x, to_weight) = (dx.view_mut(), dweight.view_mut());
                set.rms_norm
                    .backward(dout.view(), x.view(), weight.view(), rstd.view(), to_x, false, to_weight)
                    .unwrap();
                [out, rstd, dx, dweight]
            };
            let expected = run(&reference::kernel_set());
            let scale = expected[1].values().into_iter().fold(0.0, f64::max);
            assert!(scale > 0.0 && scale.is_finite());
            for (name, set) in backends() {
                // The smallest f32 are 2⁻¹⁴⁹ apart: rstd of large rows, and dx, which is as small, have fewer digits.
                let tiny = 2f64.powi(-149);
                let tolerances = [1e-5, 1e-6 * scale + tiny, 2e-5 * scale + tiny, 2e-5];
                let found = run(&set);
                for (i, tolerance) in tolerances.into_iter().enumerate() {
                    let what =
                        format!("{name}: result {i} of [{rows}, {width}] of size {size:e}, eps {eps:e}");
                    assert_close(&what, &expected[i], &found[i], tolerance);
                }
            }
        }
    }
}

/// What is not finite stays so: a diverged run is reported as such.
#[test]
fn infinite_rows() {
    for wrong in [f64::INFINITY, f64::NAN] {
        let x = Host::of(DType::F32, &[1, 20], (0..20).map(|i| if i == 3 { wrong } else { 1.0 }));
        let weight = Host::of(DType::F32, &[20], [1.0; 20]);
        for (name, set) in backends() {
            let (mut out, mut rstd) = (Host::zeros(DType::F32, &[1, 20]), Host::zeros(DType::F32, &[1]));
            set.rms_norm.forward(x.view(), weight.view(), 1e-6, out.view_mut(), rstd.view_mut()).unwrap();
            assert!(out.values()[3].is_nan(), "{name}: {:?}", out.values());
        }
    }
}
