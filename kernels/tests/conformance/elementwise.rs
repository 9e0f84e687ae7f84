//! Element-wise results are the correctly rounded f32 ones, so only the rounding to the dtype is allowed (twice for sums:
//! once in f32). Column sums of R rows of order 1: 1e-6·R.

use crate::support::{Host, MIXES, assert_close, backends};
use half::bf16;
use proptest::prelude::*;
use terrace_kernels::{DType, KernelSet, reference};

#[test]
fn sums_and_casts() {
    for elements in [1, 9, 1024, 33_333] {
        MIXES.into_iter().for_each(|mix| check_sums_and_casts(elements, mix));
    }
}

fn check_sums_and_casts(elements: usize, (dtype, out_dtype): (DType, DType)) {
    let (a, b) = (Host::random(dtype, &[elements], 1.0, 1), Host::random(dtype, &[elements], 1.0, 2));
    let old = Host::random(out_dtype, &[elements], 1.0, 3);
    let run = |set: &KernelSet, dtype| {
        let (mut sum, mut acc, mut cast) =
            (Host::zeros(dtype, &[elements]), old.cast(dtype), old.cast(dtype));
        let (mut affine, mut scaled, mut capped) = (old.cast(dtype), old.cast(dtype), old.cast(dtype));
        set.elementwise.add(a.view(), b.view(), sum.view_mut()).unwrap();
        set.elementwise.add_assign(acc.view_mut(), a.view()).unwrap();
        set.elementwise.cast(b.view(), cast.view_mut()).unwrap();
        set.elementwise.affine(affine.view_mut(), -2.3, 0.7).unwrap();
        let factor = a.view().reshape(&[elements, 1]).rows(0, 1);
        set.elementwise.scale(scaled.view_mut(), factor).unwrap();
        set.elementwise.cap(capped.view_mut(), 0.6).unwrap();
        let mut product = Host::zeros(dtype, &[elements]);
        set.elementwise.multiply(a.view(), b.view(), product.view_mut()).unwrap();
        [sum, acc, cast, affine, scaled, capped, product]
    };
    let expected = run(&reference::kernel_set(), DType::F32);
    for (name, set) in backends() {
        for (expected, found) in expected.iter().zip(&run(&set, out_dtype)) {
            assert_close(&format!("{name}: {elements} {dtype} {out_dtype}"), expected, found, 1e-6);
        }
    }
}

/// Small numbers keep their digits, large ones reach the cap, and NaN stays NaN.
#[test]
fn caps_of_any_size() {
    let sizes = (0..2000).map(|i| 10f64.powf(f64::from(i) / 100.0 - 12.0));
    let values: Vec<f64> = sizes.flat_map(|size| [size, -size]).chain([0.0]).collect();
    let x = Host::of(DType::F32, &[values.len()], values.iter().copied());
    for (name, set) in backends() {
        let mut capped = x.clone();
        set.elementwise.cap(capped.view_mut(), 30.0).unwrap();
        for (x, found) in x.values().iter().zip(capped.values()) {
            let expected = 30.0 * (x / 30.0).tanh();
            let off = (found - expected).abs();
            assert!(
                off <= 5e-7 * expected.abs() && found.abs() <= 30.0,
                "{name}: {found} of {x}, not {expected}"
            );
        }
        let mut nan = Host::of(DType::F32, &[1], [f64::NAN]);
        set.elementwise.cap(nan.view_mut(), 30.0).unwrap();
        assert!(nan.values()[0].is_nan(), "{name}");
    }
}

/// Ties go to even, NaNs stay NaNs, overflow gives infinity; bit for bit.
#[test]
fn casts_round_to_nearest_even() {
    let bits = (0..=u16::MAX).step_by(97).flat_map(|high| {
        [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF].map(|low| f32::from_bits(u32::from(high) << 16 | low))
    });
    let values: Vec<f32> = bits.chain([f32::NAN, f32::INFINITY, f32::MAX, -0.0]).collect();
    let mut x = Host::zeros(DType::F32, &[values.len()]);
    bytemuck::cast_slice_mut(x.view_mut().into_bytes().into_host()).copy_from_slice(&values);
    for (name, set) in backends() {
        let mut out = Host::zeros(DType::BF16, &[values.len()]);
        set.elementwise.cast(x.view(), out.view_mut()).unwrap();
        for (value, found) in values.iter().zip(bytemuck::cast_slice::<_, bf16>(out.bytes())) {
            assert_eq!(bf16::from_f32(*value).to_bits(), found.to_bits(), "{name}: {value}");
        }
        let mut half = Host::zeros(DType::F16, &[values.len()]);
        let mut expected = half.clone();
        set.elementwise.cast(x.view(), half.view_mut()).unwrap();
        reference::kernel_set().elementwise.cast(x.view(), expected.view_mut()).unwrap();
        for (found, expected) in half.values().iter().zip(expected.values()) {
            assert!(*found == expected || found.is_nan() && expected.is_nan(), "{name}: {found} {expected}");
        }
    }
}

#[test]
fn equal_dtypes_are_copied_and_zero_is_zero() {
    for (name, set) in backends() {
        let x = Host::random(DType::BF16, &[300_000], 1.0, 1);
        let mut out = Host::zeros(DType::BF16, &[300_000]);
        set.elementwise.cast(x.view(), out.view_mut()).unwrap();
        assert_eq!(x.bytes(), out.bytes(), "{name}");
        set.elementwise.zero(out.view_mut()).unwrap();
        assert!(out.bytes().iter().all(|byte| *byte == 0), "{name}");
    }
}

#[test]
fn bias_and_its_gradient() {
    for (rows, width) in [(1, 1), (7, 129), (300, 40), (2100, 130), (9000, 3), (3, 20_000)] {
        MIXES.into_iter().for_each(|mix| check_bias(rows, width, mix));
    }
}

fn check_bias(rows: usize, width: usize, (dtype, out_dtype): (DType, DType)) {
    let x = Host::random(out_dtype, &[rows, width], 1.0, 1);
    let (bias, old) = (Host::random(dtype, &[width], 1.0, 2), Host::random(DType::F32, &[width], 1.0, 3));
    let run = |set: &KernelSet, mut x: Host| {
        let mut sums = old.clone();
        set.reduce.sum_rows(x.view(), sums.view_mut()).unwrap();
        set.elementwise.add_bias(x.view_mut(), bias.view()).unwrap();
        (x, sums)
    };
    let (expected, expected_sums) = run(&reference::kernel_set(), x.cast(DType::F32));
    for (name, set) in backends() {
        let (x, sums) = run(&set, x.clone());
        let what = format!("{name}: [{rows}, {width}] {dtype} {out_dtype}");
        assert_close(&what, &expected, &x, 1e-6);
        assert_close(&what, &expected_sums, &sums, 1e-6 * rows as f64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        elements in 1usize..40_000, rows in 1usize..700, width in 1usize..300, mix in 0..MIXES.len(),
    ) {
        check_sums_and_casts(elements, MIXES[mix]);
        check_bias(rows, width, MIXES[mix]);
    }
}
