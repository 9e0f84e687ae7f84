//! The counting backend: it works on no memory at all, and its counts are the formulas'.

use terrace_device::Arena;
use terrace_kernels::dry::{self, Totals};
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, GateFunction, Gating, KeyValues, MatmulSpec, QuantFormat, QuantizedView,
    Residual, Tensor,
};

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

/// What is added is read, too, and is an operation for every element.
#[test]
fn an_epilogue_is_read_once() {
    let (set, counter) = dry::kernel_set();
    let (a, b) = (tensor(DType::BF16, &[10, 30]), tensor(DType::BF16, &[20, 30]));
    let (mut out, bias) = (tensor(DType::BF16, &[10, 20]), tensor(DType::BF16, &[20]));
    let other = tensor(DType::F32, &[10, 20]);
    let arena = Arena::virtual_memory();
    let codes = arena.alloc(QuantFormat::Int8.bytes(&[20, 30])).unwrap();
    let bias = Some(bias.view());
    for (epilogue, flops, bytes) in [
        (Epilogue::NONE, 0, 0),
        (Epilogue { bias, residual: Residual::InPlace }, 2 * 10 * 20, 2 * 20 + 2 * 10 * 20),
        (Epilogue { bias: None, residual: Residual::Of(other.view()) }, 10 * 20, 4 * 10 * 20),
    ] {
        let bytes = bytes + 2 * (10 * 30 + 10 * 20);
        let expected = Totals { matmul_flops: 2 * 10 * 20 * 30, other_flops: flops, ..Totals::default() };
        counter.reset();
        set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).unwrap();
        assert_eq!(counter.totals(), Totals { bytes: bytes + 2 * 20 * 30, ..expected });
        counter.reset();
        let b = QuantizedView::new(codes.bytes(), QuantFormat::Int8, &[20, 30]);
        set.quantized_matmul.matmul_nt(a.view(), b, out.view_mut(), epilogue).unwrap();
        assert_eq!(counter.totals(), Totals { bytes: bytes + codes.len() as u64, ..expected });
    }
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

/// Two sequences of 5 positions and 4 heads of 8 elements: 40 rows.
#[test]
fn sinks_are_a_pass_over_out() {
    let (set, counter) = dry::kernel_set();
    let (sinks, mut dsinks) = (tensor(DType::BF16, &[4]), tensor(DType::F32, &[4]));
    let (mut out, mut lse) = (tensor(DType::BF16, &[2, 5, 4, 8]), tensor(DType::F32, &[2, 4, 5]));
    let dout = tensor(DType::BF16, &[2, 5, 4, 8]);
    set.sinks.add(sinks.view(), out.view_mut(), lse.view_mut()).unwrap();
    let bytes = 2 * 4 + 2 * (2 * 40 * 8 + 4 * 40);
    assert_eq!(counter.totals(), Totals { other_flops: 40 * (8 + 7), bytes, ..Totals::default() });
    counter.reset();
    set.sinks.backward(sinks.view(), out.view(), lse.view(), dout.view(), dsinks.view_mut()).unwrap();
    let bytes = 2 * 4 + 2 * 2 * 40 * 8 + 4 * 40 + 2 * 4 * 4;
    assert_eq!(counter.totals(), Totals { other_flops: 40 * (2 * 8 + 4), bytes, ..Totals::default() });
}

/// A sink for each query head, and lse with heads before positions.
#[test]
fn sinks_are_those_of_the_heads() {
    let refused = |heads: usize, lse_dims: [usize; 3], dtype| {
        let run = || {
            let (set, _) = dry::kernel_set();
            let (sinks, mut lse) = (tensor(DType::F32, &[heads]), tensor(dtype, &lse_dims));
            let mut out = tensor(DType::F32, &[2, 5, 4, 8]);
            set.sinks.add(sinks.view(), out.view_mut(), lse.view_mut()).unwrap();
        };
        std::panic::catch_unwind(run).err().map(|message| *message.downcast::<String>().unwrap())
    };
    assert_eq!(refused(4, [2, 4, 5], DType::F32), None);
    assert!(refused(2, [2, 4, 5], DType::F32).unwrap().contains("sinks has 4 elements, not 2"));
    assert!(refused(4, [2, 5, 4], DType::F32).unwrap().contains("is [B, H, S], not [2, 5, 4]"));
    assert!(refused(4, [2, 4, 5], DType::BF16).unwrap().contains("lse is f32, not bf16"));
}

/// The functions differ in what an element costs.
#[test]
fn gates_are_read_once() {
    let (set, counter) = dry::kernel_set();
    let [gate, up] = [(); 2].map(|()| tensor(DType::BF16, &[10, 20]));
    let (mut out, mut dup) = (tensor(DType::BF16, &[10, 20]), tensor(DType::BF16, &[10, 20]));
    for (f, flops, flops_backward) in [
        (GateFunction::Silu, 5, 11),
        (GateFunction::Gelu, 6, 14),
        (GateFunction::GeluTanh, 9, 18),
        (GateFunction::ClampedSwish, 10, 19),
        (GateFunction::Sigmoid, 4, 8),
    ] {
        counter.reset();
        set.activation.gated(f, gate.view(), up.view(), out.view_mut()).unwrap();
        let expected = Totals { other_flops: flops * 200, bytes: 3 * 400, ..Totals::default() };
        assert_eq!(counter.totals(), expected);
        counter.reset();
        let (dgate, dup) = (out.view_mut(), dup.view_mut());
        set.activation.gated_backward(f, gate.view(), up.view(), up.view(), dgate, dup).unwrap();
        let expected = Totals { other_flops: flops_backward * 200, bytes: 5 * 400, ..Totals::default() };
        assert_eq!(counter.totals(), expected);
    }
}

/// 10 tokens that choose 3 of 4 experts. Nobody knows which; planning takes it that experts have as many rows each.
#[test]
fn experts_have_equal_shares() {
    let (set, counter) = dry::kernel_set();
    let (logits, mut dlogits) = (tensor(DType::BF16, &[10, 4]), tensor(DType::BF16, &[10, 4]));
    let (mut weights, mut dweights) = (tensor(DType::F32, &[10, 3]), tensor(DType::F32, &[10, 3]));
    let (mut chosen, mut rows) = (tensor(DType::I32, &[10, 3]), tensor(DType::I32, &[10, 3]));
    let mut starts = tensor(DType::I32, &[5]);
    let mut x = tensor(DType::BF16, &[10, 8]);
    let (mut routed, other) = (tensor(DType::BF16, &[30, 8]), tensor(DType::BF16, &[30, 8]));
    let counted = |flops, bytes| {
        assert_eq!(counter.totals(), Totals { other_flops: flops, bytes, ..Totals::default() });
        counter.reset();
    };
    for (normalize, of_choices, of_choices_backward) in [(false, 1, 2), (true, 3, 7)] {
        let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
        set.experts
            .route(
                logits.view(),
                Gating::softmax(normalize),
                to_weights,
                to_chosen,
                to_rows,
                starts.view_mut(),
            )
            .unwrap();
        counted(4 * 40 + of_choices * 30, 2 * 40 + 4 * 3 * 30 + 4 * 5);
        let (of_weights, to_logits) = (dweights.view(), dlogits.view_mut());
        set.experts
            .route_backward(
                logits.view(),
                Gating::softmax(normalize),
                weights.view(),
                chosen.view(),
                of_weights,
                to_logits,
            )
            .unwrap();
        counted(6 * 40 + of_choices_backward * 30, 2 * 2 * 40 + 4 * 3 * 30);
    }
    assert_eq!(set.experts.starts(starts.view(), 30).unwrap(), [0, 7, 15, 22, 30]);
    counted(0, 4 * 5);
    set.experts.spread(x.view(), rows.view(), routed.view_mut()).unwrap();
    counted(0, 2 * (80 + 240) + 4 * 30);
    for (residual, terms, more) in [(Residual::None, 2, 0), (Residual::InPlace, 3, 2 * 80)] {
        set.experts.collect(routed.view(), rows.view(), residual, x.view_mut()).unwrap();
        counted(terms * 80, 2 * (80 + 240) + 4 * 30 + more);
    }
    set.experts.weigh(other.view(), rows.view(), weights.view(), routed.view_mut()).unwrap();
    counted(240, 2 * 2 * 240 + 2 * 4 * 30);
    let (d, of_weights) = (routed.view_mut(), dweights.view_mut());
    set.experts.weigh_backward(d, other.view(), rows.view(), weights.view(), of_weights).unwrap();
    counted(3 * 240, 3 * 2 * 240 + 3 * 4 * 30);
}

/// All of an operation's operands have one number of tokens, and a token has no more choices than there are experts.
#[test]
fn experts_and_choices_are_checked() {
    let refused = |tokens: usize, choices: usize| {
        let run = || {
            let (set, _) = dry::kernel_set();
            let (logits, mut starts) = (tensor(DType::F32, &[10, 4]), tensor(DType::I32, &[5]));
            let mut weights = tensor(DType::F32, &[tokens, choices]);
            let [mut chosen, mut rows] = [(); 2].map(|()| tensor(DType::I32, &[tokens, choices]));
            let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
            set.experts
                .route(
                    logits.view(),
                    Gating::softmax(true),
                    to_weights,
                    to_chosen,
                    to_rows,
                    starts.view_mut(),
                )
                .unwrap();
        };
        std::panic::catch_unwind(run).err().map(|message| *message.downcast::<String>().unwrap())
    };
    assert_eq!(refused(10, 4), None);
    assert!(refused(10, 5).unwrap().contains("a token chooses 1 to 4 experts, not 5"));
    assert!(refused(9, 4).unwrap().contains("weights is [10, 4], not [9, 4]"));
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
