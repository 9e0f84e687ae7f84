//! Which kernels the CUDA backend takes, and that it launches those for tensor cores rightly. What they compute is the matter
//! of the test `tensor_cores`, with tight bounds.
//!
//! Tolerance: products are as exact as others. Attention rounds probabilities, at most 1, and their gradients to the operands'
//! dtype: by 2⁻⁸ of each term in bf16, of values of order 1 and gradients of order 10 over up to 130 rows, with random signs.

use crate::cuda::on_device;
use crate::quantized::{FORMATS, Quantized};
use crate::support::{Host, assert_close};
use terrace_kernels::cuda::CudaConfig;
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, KernelSet, KeyValues, MatmulSpec, Residual, reference,
};

/// With and without tensor cores, on operands at even and at odd places.
struct Sets {
    reference: KernelSet,
    tensor_cores: [KernelSet; 2],
    plain: [KernelSet; 2],
}

/// `None` without a driver.
fn sets() -> Option<Sets> {
    let pair = |plain_kernels| {
        let config = CudaConfig { plain_kernels, own_products: true };
        Some([on_device(0, config)?, on_device(1, config)?])
    };
    Some(Sets { reference: reference::kernel_set(), tensor_cores: pair(false)?, plain: pair(true)? })
}

/// `fits`: the kernels for tensor cores take it when it is at an even place.
fn compare(sets: &Sets, what: &str, fits: bool, tolerance: f64, run: impl Fn(&KernelSet, bool) -> Vec<Host>) {
    let expected = run(&sets.reference, true);
    let found = run(&sets.tensor_cores[0], false);
    for (i, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_close(&format!("{what}: result {i}"), expected, found, tolerance);
    }
    let bytes = |results: &[Host]| results.iter().flat_map(Host::bytes).copied().collect::<Vec<u8>>();
    let plain = bytes(&run(&sets.plain[0], false));
    assert_eq!(bytes(&found) != plain, fits, "{what}: other bits than the plain kernels");
    assert!(
        bytes(&run(&sets.tensor_cores[1], false)) == plain,
        "{what}: odd places are for the plain kernels"
    );
}

/// Those for tensor cores scale the sum of a group of weights, the others every weight.
#[test]
fn quantized_products() {
    let Some(sets) = sets() else { return };
    for (format, m) in FORMATS.into_iter().flat_map(|format| [3, 16, 50, 90].map(|m| (format, m))) {
        for (dtype, l) in [(DType::BF16, 520), (DType::F16, 520), (DType::BF16, 516), (DType::F32, 520)] {
            let (a, b) = (Host::random(dtype, &[m, l], 1.0, 1), Quantized::random(format, 70, l, 2));
            let fits = dtype != DType::F32 && l % 8 == 0;
            let what = format!("{format} {m} {dtype} {l}");
            compare(&sets, &what, fits, l as f64 * 2f64.powi(-22) + 1e-7, |set, _| {
                let mut out = Host::zeros(DType::F32, &[m, 70]);
                set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
                vec![out]
            });
        }
    }
}

/// Which kernel computed a product cannot be told by its bits: the emulated instruction adds in the plain kernel's order.
#[test]
fn products() {
    let Some(sets) = sets() else { return };
    let accumulate = |spec| MatmulSpec { accumulate: true, ..spec };
    let both = MatmulSpec { trans_a: true, trans_b: true, accumulate: false };
    for (spec, (m, n, l)) in [
        (MatmulSpec::NT, (131, 257, 304)),
        (MatmulSpec::NT, (131, 257, 303)),
        (MatmulSpec::NN, (131, 64, 304)),
        (MatmulSpec::NN, (131, 65, 304)),
        (MatmulSpec::TN_ACCUMULATE, (136, 64, 303)),
        (MatmulSpec::TN_ACCUMULATE, (135, 64, 303)),
        (accumulate(MatmulSpec::NT), (3, 40, 304)),
        (both, (16, 16, 304)),
    ] {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let a_dims = if spec.trans_a { [l, m] } else { [m, l] };
            let b_dims = if spec.trans_b { [n, l] } else { [l, n] };
            let (a, b) = (Host::random(dtype, &a_dims, 1.0, 1), Host::random(dtype, &b_dims, 1.0, 2));
            let old = Host::random(DType::F32, &[m, n], 1.0, 3);
            let what = format!("{spec:?} {:?} {dtype}", (m, n, l));
            let expected = {
                let mut out = old.clone();
                sets.reference.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
                out
            };
            for set in sets.tensor_cores.iter().chain(&sets.plain) {
                let mut out = old.clone();
                set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
                assert_close(&what, &expected, &out, l as f64 * 2f64.powi(-22) + 1e-7);
            }
        }
    }
}

#[test]
fn products_with_epilogues() {
    let Some(sets) = sets() else { return };
    for (dtype, (m, n, l)) in [(DType::BF16, (131, 257, 304)), (DType::F16, (40, 130, 64))] {
        let (a, b) = (Host::random(dtype, &[m, l], 1.0, 1), Host::random(dtype, &[n, l], 1.0, 2));
        let bias = Host::random(dtype, &[n], 1.0, 3);
        let old = Host::random(DType::F32, &[m, n], 1.0, 4).cast(dtype);
        let residuals = [Residual::None, Residual::InPlace, Residual::Of(old.view())];
        for (bias, residual) in
            residuals.into_iter().flat_map(|residual| [None, Some(bias.view())].map(|bias| (bias, residual)))
        {
            let run = |set: &KernelSet, mut out: Host| {
                let epilogue = Epilogue { bias, residual };
                set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).unwrap();
                out
            };
            let expected = run(&sets.reference, old.cast(DType::F32));
            for set in sets.tensor_cores.iter().chain(&sets.plain) {
                let what = format!("{dtype} {:?} {}", (m, n, l), bias.is_some());
                let tolerance = l as f64 * 2f64.powi(-22) + 1e-5;
                assert_close(&what, &expected, &run(set, old.clone()), tolerance);
            }
        }
    }
}

#[test]
fn attention() {
    let Some(sets) = sets() else { return };
    for (dtype, head_size, cap, fits) in [
        (DType::BF16, 64, None, true),
        (DType::BF16, 128, None, true),
        (DType::F16, 64, None, true),
        (DType::F16, 128, None, true),
        (DType::BF16, 96, None, false),
        (DType::F32, 64, None, false),
        (DType::BF16, 128, Some(0.5), true),
        (DType::F16, 128, Some(2.0), true),
        (DType::BF16, 64, Some(0.5), false),
        (DType::BF16, 256, Some(0.5), false),
    ] {
        for (queries, heads, window) in [(130, (1, 1), None), (37, (8, 2), Some(20))] {
            let dims = [2, queries, heads.0, head_size];
            let k_dims = [2, queries, heads.1, head_size];
            let spec = AttentionSpec { scale: 1.0 / (head_size as f32).sqrt(), window, cap, chunk: None };
            let [q, dout] = [1, 2].map(|seed| Host::random(dtype, &dims, 1.0, seed));
            let [k, v] = [3, 4].map(|seed| Host::random(dtype, &k_dims, 1.0, seed));
            let starts = Host::zeros(DType::I32, &[2]);
            let run = |set: &KernelSet, exact: bool| {
                let dtype = if exact { DType::F32 } else { dtype };
                let (mut out, mut dq) = (Host::zeros(dtype, &dims), Host::zeros(dtype, &dims));
                let (mut dk, mut dv) = (Host::zeros(dtype, &k_dims), Host::zeros(dtype, &k_dims));
                let mut lse = Host::zeros(DType::F32, &[2, heads.0, queries]);
                let (of_q, of_k, of_v) = (q.view(), k.view(), v.view());
                let attention = &set.attention;
                attention
                    .forward(
                        of_q,
                        KeyValues::rows(of_k, of_v),
                        starts.view(),
                        out.view_mut(),
                        lse.view_mut(),
                        spec,
                    )
                    .unwrap();
                let (of_out, of_lse, of_dout) = (out.view(), lse.view(), dout.view());
                let (to_q, to_k, to_v) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
                attention
                    .backward(of_q, of_k, of_v, of_out, of_lse, of_dout, to_q, to_k, to_v, spec)
                    .unwrap();
                vec![out, dq, dk, dv]
            };
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 5e-2 };
            compare(&sets, &format!("{dtype} {dims:?} {window:?} {cap:?}"), fits, tolerance, run);
        }
    }
}

/// Pages that are not there are zeros to these kernels, too.
#[test]
fn missing_pages() {
    let Some(sets) = sets() else { return };
    for (dtype, head_size, window, cap) in [
        (DType::BF16, 64, None, None),
        (DType::F16, 128, None, None),
        (DType::BF16, 128, Some(90), None),
        (DType::BF16, 128, Some(90), Some(0.5)),
    ] {
        let dims = [1, 120, 2, head_size];
        let pages = Host::of(DType::I32, &[1, 4], [-1.0, 2.0, -1.0, 1.0]);
        let starts = Host::of(DType::I32, &[1], [130.0]);
        let q = Host::random(dtype, &dims, 1.0, 1);
        let [k, v] = [2, 3].map(|seed| {
            let mut all = Host::random(dtype, &[3, 64, 1, head_size], 1.0, seed);
            (0..64 * head_size).for_each(|i| all.set(i, f64::NAN));
            all
        });
        let run = |set: &KernelSet, exact: bool| {
            let mut out = Host::zeros(if exact { DType::F32 } else { dtype }, &dims);
            let mut lse = Host::zeros(DType::F32, &[1, 2, 120]);
            let keys = KeyValues { k: k.view(), v: v.view(), pages: Some(pages.view()) };
            let spec = AttentionSpec { scale: 1.0 / (head_size as f32).sqrt(), window, cap, chunk: None };
            let (to, to_lse) = (out.view_mut(), lse.view_mut());
            set.attention.forward(q.view(), keys, starts.view(), to, to_lse, spec).unwrap();
            vec![out]
        };
        compare(&sets, &format!("{dtype} {dims:?} {window:?} {cap:?}"), true, 5e-2, run);
    }
}
