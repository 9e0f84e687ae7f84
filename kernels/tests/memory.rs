//! A kernel set never takes more memory than [`cpu::scratch_bytes`] says, whatever the shapes.
//!
//! An allocator that counts is the whole program's, which is why this test is a program of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use terrace_device::Arena;
use terrace_device::Device;
use terrace_device::host::HostDevice;
use terrace_kernels::{
    AttentionSpec, Carried, DType, DeltaSpec, Epilogue, ExpertGroups, GateFunction, Gating, GroupScore,
    KernelSet, KeyValues, MatmulSpec, QuantFormat, QuantizedView, Residual, RopeDirection, RopeLayout,
    RopePairs, Tensor, cpu, delta_scratch,
};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system allocator, with counters beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn working_memory_is_bounded() {
    let arena = HostDevice::unified().arena(256 << 20).unwrap();
    let isas = [cpu::Isa::best(), cpu::Isa::best().with_emulated_pairs()];
    for (threads, isa) in [1, 2, 5].into_iter().flat_map(|threads| isas.map(|isa| (threads, isa))) {
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        let set = cpu::with_config(cpu::CpuConfig { isa: Some(isa), ..cpu::CpuConfig::new(threads) });
        products(&set, &arena);
        quantized(&set, &arena);
        attention(&set, &arena);
        sinks(&set, &arena);
        rows(&set, &arena);
        experts(&set, &arena);
        columns(&set, &arena);
        delta_rule(&set, &arena);
        let taken = PEAK.load(Relaxed) - before;
        let planned = cpu::scratch_bytes(threads);
        assert!(
            taken <= planned,
            "{} with {threads} threads took {taken} bytes of {planned} planned",
            isa.name()
        );
    }
}

/// All zeros: valid ids and positions too.
fn tensor(arena: &Arena, dtype: DType, dims: &[usize]) -> Tensor {
    let mut tensor = Tensor::new(arena, dtype, dims).unwrap();
    tensor.view_mut().into_bytes().into_host().fill(0);
    tensor
}

fn products(set: &KernelSet, arena: &Arena) {
    for (m, n, l) in [(600, 1000, 700), (8, 300, 32_000), (20, 40, 50_000), (7, 40, 100_000)] {
        let (a, b) = (tensor(arena, DType::BF16, &[m, l]), tensor(arena, DType::BF16, &[n, l]));
        let mut out = tensor(arena, DType::BF16, &[m, n]);
        set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT).unwrap();
        let (bias, mut sums) = (tensor(arena, DType::BF16, &[n]), tensor(arena, DType::F32, &[m, n]));
        let epilogue = Epilogue { bias: Some(bias.view()), residual: Residual::Of(out.view()) };
        set.matmul.matmul_nt(a.view(), b.view(), sums.view_mut(), epilogue).unwrap();
    }
}

fn quantized(set: &KernelSet, arena: &Arena) {
    for format in [QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Mxfp4] {
        for (m, n, l) in
            [(600, 1000, 700), (8, 300, 20_000), (20, 40, 50_000), (7, 40, 100_000), (1, 9, 200_000)]
        {
            let a = tensor(arena, DType::BF16, &[m, l]);
            let mut out = tensor(arena, DType::BF16, &[m, n]);
            let mut codes = arena.alloc(format.bytes(&[n, l])).unwrap();
            codes.bytes_mut().into_host().fill(0);
            let b = QuantizedView::new(codes.bytes(), format, &[n, l]);
            set.quantized_matmul.matmul_nt(a.view(), b, out.view_mut(), Epilogue::NONE).unwrap();
        }
    }
}

fn attention(set: &KernelSet, arena: &Arena) {
    let spec = AttentionSpec { scale: 0.1, window: None, cap: None, chunk: None };
    for (batch, queries, heads, kv_heads, head_size) in
        [(1, 200, 4, 2, 512), (2, 300, 8, 1, 64), (1, 1, 8, 1, 512)]
    {
        let of_q = || tensor(arena, DType::BF16, &[batch, queries, heads, head_size]);
        let of_k = || tensor(arena, DType::BF16, &[batch, queries, kv_heads, head_size]);
        let (q, k, v, dout) = (of_q(), of_k(), of_k(), of_q());
        let (mut out, mut dq, mut dk, mut dv) = (of_q(), of_q(), of_k(), of_k());
        let (starts, mut lse) =
            (tensor(arena, DType::I32, &[batch]), tensor(arena, DType::F32, &[batch, heads, queries]));
        set.attention
            .forward(
                q.view(),
                KeyValues::rows(k.view(), v.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
            .unwrap();
        set.attention
            .backward(
                q.view(),
                k.view(),
                v.view(),
                out.view(),
                lse.view(),
                dout.view(),
                dq.view_mut(),
                dk.view_mut(),
                dv.view_mut(),
                spec,
            )
            .unwrap();
    }
}

/// Rows whose sums are cut into parts, heads and elements of more than a block.
fn sinks(set: &KernelSet, arena: &Arena) {
    for dims in [[2, 3000, 64, 8], [1, 40, 3, 2000], [3, 7, 300, 16], [1, 5000, 1, 1]] {
        let [b, s, h, _] = dims;
        let (of_heads, mut dsinks) = (tensor(arena, DType::BF16, &[h]), tensor(arena, DType::F32, &[h]));
        let (mut out, dout) = (tensor(arena, DType::BF16, &dims), tensor(arena, DType::BF16, &dims));
        let mut lse = tensor(arena, DType::F32, &[b, h, s]);
        set.sinks.add(of_heads.view(), out.view_mut(), lse.view_mut()).unwrap();
        set.sinks.backward(of_heads.view(), out.view(), lse.view(), dout.view(), dsinks.view_mut()).unwrap();
    }
}

fn rows(set: &KernelSet, arena: &Arena) {
    for (rows, width) in [(5000, 512), (300, 20_000)] {
        let of_x = || tensor(arena, DType::BF16, &[rows, width]);
        let (mut x, mut out, mut dx) = (of_x(), of_x(), of_x());
        let weight = tensor(arena, DType::BF16, &[width]);
        let (mut rstd, mut dweight) =
            (tensor(arena, DType::F32, &[rows]), tensor(arena, DType::F32, &[width]));
        let (ids, mut loss) = (tensor(arena, DType::I32, &[rows]), tensor(arena, DType::F64, &[1]));
        let inv_freq = tensor(arena, DType::F32, &[width / 8 - 1]);
        set.rms_norm.forward(x.view(), weight.view(), 1e-6, out.view_mut(), rstd.view_mut()).unwrap();
        set.rms_norm
            .backward(
                out.view(),
                x.view(),
                weight.view(),
                rstd.view(),
                dx.view_mut(),
                false,
                dweight.view_mut(),
            )
            .unwrap();
        set.reduce.sum_rows(x.view(), dweight.view_mut()).unwrap();
        for f in GateFunction::ALL {
            set.activation.gated(f, x.view(), out.view(), dx.view_mut()).unwrap();
        }
        set.cross_entropy
            .loss_and_gradient(out.view_mut(), ids.view(), 1.0, Some(9.0), loss.view_mut())
            .unwrap();
        for layout in [RopeLayout::HALVES, RopeLayout { first: 1, pairs: RopePairs::Neighbours }] {
            let heads = x.view_mut().reshape(&[rows, 4, width / 4]);
            let (ids, direction) = (ids.view(), RopeDirection::Forward);
            set.rope.rotate(heads, ids, inv_freq.view(), layout, 1.0, direction).unwrap();
        }
    }
}

/// More columns than a buffer has.
fn columns(set: &KernelSet, arena: &Arena) {
    let (mut few, mut many) =
        (tensor(arena, DType::BF16, &[70, 3000]), tensor(arena, DType::BF16, &[700, 2500]));
    set.columns.copy(few.view(), 200, many.view_mut(), 50, 2400).unwrap();
    set.columns.fold(many.view(), 50, few.view_mut(), 200, 2400).unwrap();
    set.columns.clear(many.view_mut(), 50, 2400).unwrap();
}

/// Experts that fit in a buffer, and more; as many groups as there may be.
fn experts(set: &KernelSet, arena: &Arena) {
    for (tokens, count, choices, width, groups) in
        [(3000, 128, 8, 700, 8), (20, 5000, 300, 40, 500), (9, 1024, 8, 5, ExpertGroups::COUNT_MAX)]
    {
        let groups = ExpertGroups { count: groups, kept: groups / 2, by: GroupScore::TwoLargest };
        let gating = Gating { groups: Some(groups), ..Gating::softmax(true) };
        let of_choices = |dtype| tensor(arena, dtype, &[tokens, choices]);
        let (logits, mut dlogits) =
            (tensor(arena, DType::BF16, &[tokens, count]), tensor(arena, DType::BF16, &[tokens, count]));
        let (mut weights, mut dweights) = (of_choices(DType::F32), of_choices(DType::F32));
        let (mut chosen, mut rows) = (of_choices(DType::I32), of_choices(DType::I32));
        let mut starts = tensor(arena, DType::I32, &[count + 1]);
        let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
        set.experts.route(logits.view(), gating, to_weights, to_chosen, to_rows, starts.view_mut()).unwrap();
        set.experts.starts(starts.view(), tokens * choices).unwrap();
        let mut x = tensor(arena, DType::BF16, &[tokens, width]);
        let routed = || tensor(arena, DType::BF16, &[tokens * choices, width]);
        let (mut spread, mut d) = (routed(), routed());
        set.experts.spread(x.view(), rows.view(), spread.view_mut()).unwrap();
        set.experts.weigh(spread.view(), rows.view(), weights.view(), d.view_mut()).unwrap();
        set.experts.collect(spread.view(), rows.view(), Residual::InPlace, x.view_mut()).unwrap();
        let (into, to_weights) = (d.view_mut(), dweights.view_mut());
        set.experts.weigh_backward(into, spread.view(), rows.view(), weights.view(), to_weights).unwrap();
        let (of_choices, to_logits) = (chosen.view(), dlogits.view_mut());
        set.experts
            .route_backward(logits.view(), gating, weights.view(), of_choices, dweights.view(), to_logits)
            .unwrap();
    }
}

/// Keys as long as they may be, values of more columns than a task takes, sequences of many stretches; as many taps as there may be.
fn delta_rule(set: &KernelSet, arena: &Arena) {
    for (b, s, [key_heads, value_heads, key_size, value_size]) in
        [(1, 70, [1, 2, 256, 1100]), (2, 700, [2, 6, 16, 8]), (5, 1, [4, 4, 128, 128])]
    {
        let spec = DeltaSpec { key_heads, value_heads, key_size, value_size };
        let of_channels = || tensor(arena, DType::BF16, &[b, s, spec.channels()]);
        let of_gates = || tensor(arena, DType::F32, &[b * s, value_heads]);
        let of_values = || tensor(arena, DType::BF16, &[b, s, value_heads, value_size]);
        let (qkv, mut other, dout, mut out) = (of_channels(), of_channels(), of_values(), of_values());
        let (weight, mut dweight) = (
            tensor(arena, DType::BF16, &[spec.channels(), DeltaSpec::TAPS_MAX]),
            tensor(arena, DType::F32, &[spec.channels(), DeltaSpec::TAPS_MAX]),
        );
        let mut inputs = tensor(arena, DType::BF16, &[b, DeltaSpec::TAPS_MAX - 1, spec.channels()]);
        let mut states = tensor(arena, DType::F32, &[b, value_heads, key_size, value_size]);
        let (mut slots, mut last) = (tensor(arena, DType::I32, &[b]), tensor(arena, DType::I32, &[b]));
        let starts = tensor(arena, DType::I32, &[b]);
        for i in 0..b {
            let of = |integers: &mut Tensor, value: usize| {
                let bytes = integers.view_mut().into_bytes().into_host();
                bytes[4 * i..4 * (i + 1)].copy_from_slice(&(value as i32).to_ne_bytes());
            };
            of(&mut slots, i);
            of(&mut last, i * s + s - 1);
        }
        let (slots, starts, last) = (slots.view(), starts.view(), last.view());
        let rule = &set.delta_rule;
        let carried = Carried { state: inputs.view_mut(), slots, starts, last };
        rule.convolve(qkv.view(), weight.view(), Some(carried), other.view_mut()).unwrap();
        let (to_x, to_weight) = (other.view_mut(), dweight.view_mut());
        rule.convolve_backward(qkv.view(), weight.view(), qkv.view(), to_x, to_weight).unwrap();
        let [mut decay, mut beta, a, mut da] = [(); 4].map(|()| of_gates());
        let [a_log, mut da_log, mut dt_bias] = [(); 3].map(|()| tensor(arena, DType::F32, &[value_heads]));
        let (a, a_log) = (a.view(), a_log.view());
        rule.gates(a, a, a_log, a_log, decay.view_mut(), beta.view_mut()).unwrap();
        let mut db = of_gates();
        let (to_a, to_b, to_rate, to_bias) =
            (da.view_mut(), db.view_mut(), da_log.view_mut(), dt_bias.view_mut());
        rule.gates_backward(a, a, a_log, a_log, a, a, to_a, to_b, to_rate, to_bias).unwrap();
        let carried = Carried { state: states.view_mut(), slots, starts, last };
        rule.scan(qkv.view(), decay.view(), beta.view(), spec, Some(carried), out.view_mut()).unwrap();
        let mut scratch = tensor(arena, DType::F32, &[delta_scratch(b, s, spec)]);
        let (of_qkv, of_decay, of_beta) = (other.view_mut(), da.view_mut(), db.view_mut());
        let (decay, beta) = (decay.view(), beta.view());
        rule.scan_backward(
            qkv.view(),
            decay,
            beta,
            spec,
            dout.view(),
            of_qkv,
            of_decay,
            of_beta,
            scratch.view_mut(),
        )
        .unwrap();
    }
}
