//! The counting backend: it works on no memory at all, and its counts are the formulas'.

use terrace_device::Arena;
use terrace_kernels::dry::{self, Totals};
use terrace_kernels::{
    AttentionSpec, Carried, DType, DeltaSpec, Epilogue, ExpertGroups, GateFunction, Gating, GroupScore,
    KeyValues, MatmulSpec, QuantFormat, QuantizedView, Residual, RopeDirection, RopeLayout, RopePairs,
    Tensor, delta_scratch,
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
    let q = tensor(DType::BF16, &[2, 5, 4, 8]);
    let (mut out, mut lse) = (tensor(DType::BF16, &[2, 5, 4, 8]), tensor(DType::F32, &[2, 4, 5]));
    let starts = tensor(DType::I32, &[2]);
    for (capacity, window, chunk, cap, pairs) in [
        (5, None, None, None, 15),
        (5, Some(2), None, None, 9),
        (5, Some(2), None, Some(1.0), 9),
        (5, None, Some(3), None, 9),
        (5, None, Some(1), None, 5),
        (5, None, Some(8), None, 15),
        // Where they stand is not known.
        (8, None, Some(4), None, 20),
        (8, None, None, None, 30),
    ] {
        let k = tensor(DType::BF16, &[2, capacity, 2, 8]);
        counter.reset();
        let spec = AttentionSpec { scale: 1.0, window, cap, chunk };
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
        assert_eq!(counter.totals().other_flops, if cap.is_some() { 2 * 4 * pairs * 3 } else { 0 });
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

/// The message of a panic, if there is one.
fn refused(run: impl FnOnce() + std::panic::UnwindSafe) -> Option<String> {
    std::panic::catch_unwind(run).err().map(|message| *message.downcast::<String>().unwrap())
}

/// Of 6 rows of 10 columns to 18 of 12: no other columns than those that move.
#[test]
fn columns_are_read_and_written() {
    let (set, counter) = dry::kernel_set();
    let (mut few, mut many) = (tensor(DType::BF16, &[2, 3, 10]), tensor(DType::BF16, &[18, 12]));
    let counted = |flops, bytes| {
        assert_eq!(counter.totals(), Totals { other_flops: flops, bytes, ..Totals::default() });
        counter.reset();
    };
    set.columns.copy(few.view(), 3, many.view_mut(), 5, 7).unwrap();
    counted(0, 2 * (6 + 18) * 7);
    set.columns.fold(many.view(), 5, few.view_mut(), 3, 7).unwrap();
    counted(12 * 7, 2 * (6 + 18) * 7);
    set.columns.clear(many.view_mut(), 11, 1).unwrap();
    counted(0, 2 * 18);
}

/// Columns are within their rows, rows a multiple of rows, and dtypes one.
#[test]
fn columns_are_checked() {
    let of = |fold: bool, x: (DType, [usize; 2]), out: [usize; 2], [from, to, width]: [usize; 3]| {
        refused(move || {
            let (set, _) = dry::kernel_set();
            let (x, mut out) = (tensor(x.0, &x.1), tensor(DType::BF16, &out));
            let columns = &set.columns;
            match fold {
                true => columns.fold(x.view(), from, out.view_mut(), to, width).unwrap(),
                false => columns.copy(x.view(), from, out.view_mut(), to, width).unwrap(),
            }
        })
    };
    let bf16 = |dims| (DType::BF16, dims);
    assert_eq!(of(false, bf16([3, 8]), [6, 9], [1, 2, 7]), None);
    assert_eq!(of(true, bf16([6, 8]), [3, 9], [1, 2, 7]), None);
    assert_eq!(of(false, bf16([0, 8]), [0, 9], [0, 0, 8]), None);
    let beyond = "columns: 7 columns from 2 are within the 8 of x";
    assert!(of(false, bf16([3, 8]), [6, 9], [2, 2, 7]).unwrap().contains(beyond));
    let beyond = "columns: 7 columns from 3 are within the 9 of out";
    assert!(of(false, bf16([3, 8]), [6, 9], [1, 3, 7]).unwrap().contains(beyond));
    let wraps = of(false, bf16([3, 8]), [6, 9], [1, 3, usize::MAX]).unwrap();
    assert!(wraps.contains("are within the 8 of x"), "{wraps}");
    for (fold, x, out) in
        [(false, [3, 8], [7, 9]), (false, [3, 8], [0, 9]), (false, [0, 8], [3, 9]), (true, [3, 8], [6, 9])]
    {
        assert!(of(fold, bf16(x), out, [0, 0, 8]).unwrap().contains("a multiple of"), "{fold} {x:?} {out:?}");
    }
    let mixed = of(false, (DType::F32, [3, 8]), [3, 9], [0, 0, 8]).unwrap();
    assert!(mixed.contains("x and out have one dtype"), "{mixed}");
    let ends = refused(|| {
        let (set, _) = dry::kernel_set();
        set.columns.clear(tensor(DType::F32, &[2, 8]).view_mut(), 4, 5).unwrap();
    });
    assert!(ends.unwrap().contains("5 columns from 4 are within the 8 of out"));
}

/// What is rotated is within a head.
#[test]
fn layouts_are_checked() {
    let rotate = |first, half| {
        refused(move || {
            let (set, _) = dry::kernel_set();
            let (mut x, positions) = (tensor(DType::F32, &[3, 2, 10]), tensor(DType::I32, &[3]));
            let inv_freq = tensor(DType::F32, &[half]);
            let (x, layout) = (x.view_mut(), RopeLayout { first, pairs: RopePairs::Neighbours });
            let direction = RopeDirection::Forward;
            set.rope.rotate(x, positions.view(), inv_freq.view(), layout, 1.0, direction).unwrap();
        })
    };
    assert_eq!(rotate(4, 3), None);
    for (first, half) in [(5, 3), (11, 0), (usize::MAX, 1), (0, 6)] {
        assert!(rotate(first, half).unwrap().contains("are in a head of 10"), "{first} {half}");
    }
}

/// Groups are equal, and those that are kept have enough experts.
#[test]
fn groups_are_checked() {
    let route = |experts: usize, choices: usize, count, kept, by| {
        refused(move || {
            let (set, _) = dry::kernel_set();
            let (logits, mut starts) =
                (tensor(DType::F32, &[5, experts]), tensor(DType::I32, &[experts + 1]));
            let mut weights = tensor(DType::F32, &[5, choices]);
            let [mut chosen, mut rows] = [(); 2].map(|()| tensor(DType::I32, &[5, choices]));
            let gating = Gating { groups: Some(ExpertGroups { count, kept, by }), ..Gating::softmax(true) };
            let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
            set.experts
                .route(logits.view(), gating, to_weights, to_chosen, to_rows, starts.view_mut())
                .unwrap();
        })
    };
    use GroupScore::{Largest, TwoLargest};
    assert_eq!(route(12, 6, 4, 2, TwoLargest), None);
    assert_eq!(route(12, 12, 12, 12, Largest), None);
    assert!(route(12, 7, 4, 2, TwoLargest).unwrap().contains("7 choices are among 2 groups of 3 experts"));
    assert!(route(12, 2, 5, 2, Largest).unwrap().contains("12 experts are in equal groups"));
    assert!(route(12, 2, 0, 0, Largest).unwrap().contains("12 experts are in equal groups"));
    assert!(route(1026, 2, 513, 2, Largest).unwrap().contains("at most 512, not in 513"));
    assert!(route(12, 2, 4, 0, Largest).unwrap().contains("1 to 4 groups are kept, not 0"));
    assert!(route(12, 2, 4, 5, Largest).unwrap().contains("1 to 4 groups are kept, not 5"));
    assert!(route(12, 2, 12, 5, TwoLargest).unwrap().contains("a group has two experts"));
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
    let pairs = ExpertGroups { count: 2, kept: 2, by: GroupScore::TwoLargest };
    for (normalize, groups, of_experts, of_choices, of_choices_backward) in
        [(false, None, 4, 1, 2), (true, None, 4, 3, 7), (true, Some(pairs), 5, 3, 7)]
    {
        let gating = Gating { groups, ..Gating::softmax(normalize) };
        let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
        set.experts.route(logits.view(), gating, to_weights, to_chosen, to_rows, starts.view_mut()).unwrap();
        counted(of_experts * 40 + of_choices * 30, 2 * 40 + 4 * 3 * 30 + 4 * 5);
        let (of_weights, to_logits) = (dweights.view(), dlogits.view_mut());
        set.experts
            .route_backward(logits.view(), gating, weights.view(), chosen.view(), of_weights, to_logits)
            .unwrap();
        counted(6 * 40 + of_choices_backward * 30, 2 * 2 * 40 + 4 * 3 * 30);
    }
    assert_eq!(set.experts.starts(starts.view(), 30).unwrap(), [0, 30, 30, 30, 30]);
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
    let spec = AttentionSpec { scale: 1.0, window: None, cap: None, chunk: None };
    let _ = set.attention.forward(
        q.view(),
        KeyValues::rows(k.view(), k.view()),
        starts.view(),
        out.view_mut(),
        lse.view_mut(),
        spec,
    );
}

const DELTA: DeltaSpec = DeltaSpec { key_heads: 2, value_heads: 4, key_size: 8, value_size: 6 };

/// Two sequences of 9 positions of 56 channels: 18 rows.
#[test]
fn states_are_read_and_written() {
    let (set, counter) = dry::kernel_set();
    let counted = |flops, bytes| {
        assert_eq!(counter.totals(), Totals { other_flops: flops, bytes, ..Totals::default() });
        counter.reset();
    };
    let (qkv, mut other) = (tensor(DType::BF16, &[2, 9, 56]), tensor(DType::BF16, &[2, 9, 56]));
    let (weight, mut dweight) = (tensor(DType::BF16, &[56, 4]), tensor(DType::F32, &[56, 4]));
    let [slots, starts, last] = [(); 3].map(|()| tensor(DType::I32, &[2]));
    let (mut inputs, mut states) = (tensor(DType::BF16, &[5, 3, 56]), tensor(DType::F32, &[5, 4, 8, 6]));
    let carried = |state: &mut Tensor, run: &dyn Fn(Carried<'_>)| {
        let (slots, starts, last) = (slots.view(), starts.view(), last.view());
        run(Carried { state: state.view_mut(), slots, starts, last });
    };
    let rule = &set.delta_rule;
    rule.convolve(qkv.view(), weight.view(), None, other.view_mut()).unwrap();
    let (flops, bytes) = (18 * 56 * (2 * 4 + 5), 2 * 56 * 4 + 2 * 2 * 18 * 56);
    counted(flops, bytes);
    let out = std::cell::RefCell::new(tensor(DType::BF16, &[2, 9, 56]));
    carried(&mut inputs, &|carried| {
        rule.convolve(qkv.view(), weight.view(), Some(carried), out.borrow_mut().view_mut()).unwrap();
    });
    counted(flops, bytes + 2 * 2 * (2 * 3 * 56) + 3 * 4 * 2);
    let (to_x, to_weight) = (other.view_mut(), dweight.view_mut());
    rule.convolve_backward(qkv.view(), weight.view(), qkv.view(), to_x, to_weight).unwrap();
    counted(18 * 56 * (6 * 4 + 9), 2 * 56 * 4 + 3 * 2 * 18 * 56 + 2 * 4 * 56 * 4);
    let [decay, beta] = [(); 2].map(|()| tensor(DType::F32, &[18, 4]));
    let [mut ddecay, mut dbeta] = [(); 2].map(|()| tensor(DType::F32, &[18, 4]));
    let out = std::cell::RefCell::new(tensor(DType::F32, &[2, 9, 4, 6]));
    let (decay, beta) = (decay.view(), beta.view());
    rule.scan(qkv.view(), decay, beta, DELTA, None, out.borrow_mut().view_mut()).unwrap();
    let flops = |of_element: u64| 18 * (of_element * 4 * 8 * 6 + 8 * 2 * 8);
    let bytes = 2 * 18 * 56 + 2 * 4 * 18 * 4 + 4 * 18 * 4 * 6;
    counted(flops(7), bytes);
    carried(&mut states, &|carried| {
        rule.scan(qkv.view(), decay, beta, DELTA, Some(carried), out.borrow_mut().view_mut()).unwrap();
    });
    counted(flops(7), bytes + 2 * 2 * (4 * 4 * 8 * 6) + 3 * 4 * 2);
    let mut scratch = tensor(DType::F32, &[delta_scratch(2, 9, DELTA)]);
    let (of_qkv, of_decay, of_beta) = (other.view_mut(), ddecay.view_mut(), dbeta.view_mut());
    let out = out.into_inner();
    rule.scan_backward(
        qkv.view(),
        decay,
        beta,
        DELTA,
        out.view(),
        of_qkv,
        of_decay,
        of_beta,
        scratch.view_mut(),
    )
    .unwrap();
    // Three stretches of three positions; keys are rounded up to 16.
    counted(flops(25), bytes + 2 * 18 * 56 + 2 * 4 * 18 * 4 + 8 * (8 * (3 + 9) * 16 * 6));
    let [a, b, mut da, mut db] = [(); 4].map(|()| tensor(DType::BF16, &[18, 4]));
    let [a_log, dt_bias, mut da_log, mut ddt_bias] = [(); 4].map(|()| tensor(DType::F32, &[4]));
    let (a, b, a_log, dt_bias) = (a.view(), b.view(), a_log.view(), dt_bias.view());
    rule.gates(a, b, a_log, dt_bias, ddecay.view_mut(), dbeta.view_mut()).unwrap();
    counted(10 * 72, 2 * 2 * 72 + 2 * 4 * 72 + 2 * 4 * 4);
    let (to_a, to_b, to_rate, to_bias) =
        (da.view_mut(), db.view_mut(), da_log.view_mut(), ddt_bias.view_mut());
    rule.gates_backward(a, b, a_log, dt_bias, decay, beta, to_a, to_b, to_rate, to_bias).unwrap();
    counted(20 * 72, 4 * 2 * 72 + 2 * 4 * 72 + 6 * 4 * 4);
}

/// Channels are those of the heads, states those of their operation, and the scratch as large as it has to be.
#[test]
fn states_and_channels_are_checked() {
    let refused = |spec: DeltaSpec, channels: usize, state: (DType, &[usize]), elements: usize| {
        let run = || {
            let (set, _) = dry::kernel_set();
            let (qkv, mut out) = (tensor(DType::F32, &[2, 9, channels]), tensor(DType::F32, &[2, 9, 4, 6]));
            let [decay, beta, mut ddecay, mut dbeta] = [(); 4].map(|()| tensor(DType::F32, &[18, 4]));
            let [slots, starts, last] = [(); 3].map(|()| tensor(DType::I32, &[2]));
            let mut state = tensor(state.0, state.1);
            let (slots, starts, last) = (slots.view(), starts.view(), last.view());
            let carried = Carried { state: state.view_mut(), slots, starts, last };
            let (decay, beta) = (decay.view(), beta.view());
            set.delta_rule.scan(qkv.view(), decay, beta, spec, Some(carried), out.view_mut()).unwrap();
            let (mut dqkv, mut scratch) =
                (tensor(DType::F32, &[2, 9, channels]), tensor(DType::F32, &[elements]));
            let (of_qkv, of_decay, of_beta) = (dqkv.view_mut(), ddecay.view_mut(), dbeta.view_mut());
            let scratch = scratch.view_mut();
            set.delta_rule
                .scan_backward(qkv.view(), decay, beta, spec, out.view(), of_qkv, of_decay, of_beta, scratch)
                .unwrap();
        };
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        caught.err().map(|message| *message.downcast::<String>().unwrap())
    };
    let (elements, state) = (delta_scratch(2, 9, DELTA), (DType::F32, &[5, 4, 8, 6][..]));
    assert_eq!(refused(DELTA, 56, state, elements), None);
    let message = |spec, channels, state, elements| refused(spec, channels, state, elements).unwrap();
    assert!(message(DELTA, 57, state, elements).contains("has the channels of"));
    assert!(message(DELTA, 56, (DType::BF16, state.1), elements).contains("state is f32, not bf16"));
    assert!(
        message(DELTA, 56, (DType::F32, &[5, 4, 6, 8]), elements).contains("a state is [N] of [4, 8, 6]")
    );
    assert!(message(DELTA, 56, state, elements - 1).contains("scratch has"));
    let three = DeltaSpec { key_heads: 3, ..DELTA };
    assert!(message(three, 56, state, elements).contains("4 value heads are a multiple of 3 key heads"));
    let large = DeltaSpec { key_size: 257, ..DELTA };
    assert!(
        message(large, large.channels(), state, elements).contains("a key has 1 to 256 elements, not 257")
    );
}
