//! The counting backend: it works on no memory at all, and its counts are the formulas'.

use terrace_device::Arena;
use terrace_kernels::dry::{self, Totals};
use terrace_kernels::{AttentionSpec, DType, KeyValues, MatmulSpec, Tensor};

fn tensor(dtype: DType, dims: &[usize]) -> Tensor {
    Tensor::new(&Arena::virtual_memory(), dtype, dims).unwrap()
}

#[test]
fn a_product_is_two_flops_per_term() {
    let (set, counter) = dry::kernel_set();
    let (a, b) = (tensor(DType::BF16, &[10, 30]), tensor(DType::BF16, &[20, 30]));
    let mut out = tensor(DType::F32, &[10, 20]);
    set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT).unwrap();
    let bytes = 2 * (10 * 30 + 20 * 30) + 4 * 10 * 20;
    assert_eq!(counter.totals(), Totals { matmul_flops: 2 * 10 * 20 * 30, bytes, ..Totals::default() });
    counter.reset();
    assert_eq!(counter.totals(), Totals::default());
}

#[test]
fn attention_counts_visible_pairs() {
    let (set, counter) = dry::kernel_set();
    let (q, k) = (tensor(DType::BF16, &[2, 5, 4, 8]), tensor(DType::BF16, &[2, 5, 2, 8]));
    let (mut out, mut lse) = (tensor(DType::BF16, &[2, 5, 4, 8]), tensor(DType::F32, &[2, 4, 5]));
    let starts = tensor(DType::I32, &[2]);
    for (window, pairs) in [(None, 15), (Some(2), 9)] {
        counter.reset();
        let spec = AttentionSpec { scale: 1.0, window };
        set.attention
            .forward(
                q.view(),
                KeyValues::rows(k.view(), k.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
            .unwrap();
        assert_eq!(counter.totals().attention_flops, 2 * 4 * pairs * 4 * 8);
    }
}

#[test]
#[should_panic(expected = "multiple of")]
fn shapes_are_checked() {
    let (set, _) = dry::kernel_set();
    let (q, k) = (tensor(DType::F32, &[1, 5, 3, 8]), tensor(DType::F32, &[1, 5, 2, 8]));
    let (mut out, mut lse) = (tensor(DType::F32, &[1, 5, 3, 8]), tensor(DType::F32, &[1, 3, 5]));
    let starts = tensor(DType::I32, &[1]);
    let spec = AttentionSpec { scale: 1.0, window: None };
    let _ = set.attention.forward(
        q.view(),
        KeyValues::rows(k.view(), k.view()),
        starts.view(),
        out.view_mut(),
        lse.view_mut(),
        spec,
    );
}
