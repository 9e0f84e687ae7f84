//! Tolerance: a few f32 roundings of terms of order |x|·rstd·|weight| ≤ 30, so 1e-5; sums over R rows 1e-5·√R.

use crate::support::{Host, MIXES, assert_close, backends};
use terrace_kernels::{DType, reference};

const SIZES: [(usize, usize); 7] = [(1, 1), (3, 5), (2, 64), (300, 128), (7, 1023), (5, 1025), (513, 96)];

#[test]
fn forward() {
    for (rows, width) in SIZES {
        for (dtype, out_dtype) in MIXES {
            let x = Host::random(dtype, &[rows, width], 3.0, 1);
            let weight = Host::random(dtype, &[width], 1.0, 2);
            let (mut expected, mut expected_rstd) =
                (Host::zeros(DType::F32, &[rows, width]), Host::zeros(DType::F32, &[rows]));
            reference::kernel_set()
                .rms_norm
                .forward(x.view(), weight.view(), 1e-6, expected.view_mut(), expected_rstd.view_mut())
                .unwrap();
            for (name, set) in backends() {
                let (mut out, mut rstd) =
                    (Host::zeros(out_dtype, &[rows, width]), Host::zeros(DType::F32, &[rows]));
                set.rms_norm.forward(x.view(), weight.view(), 1e-6, out.view_mut(), rstd.view_mut()).unwrap();
                let what = format!("{name}: [{rows}, {width}] {dtype} {out_dtype}");
                assert_close(&what, &expected, &out, 1e-5);
                assert_close(&what, &expected_rstd, &rstd, 1e-6 * expected_rstd.values()[0]);
            }
        }
    }
}

#[test]
fn backward() {
    for (rows, width) in SIZES {
        for ((dtype, out_dtype), accumulate) in MIXES.into_iter().zip([false, true, true, false]) {
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
                assert_close(
                    &format!("dweight, {what}"),
                    &expected_weight,
                    &dweight,
                    1e-5 * (rows as f64).sqrt(),
                );
            }
        }
    }
}
