//! Throughput of products and attention on this machine, in FLOP/s.
//!
//! `gemm-f32` (the part of the crate `gemm` that is for f32; one thread) is the yardstick: it is what the engine would use if it had no kernels of its own.
//! Set `THREADS` to choose the number of threads of the set (default: one).

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use terrace_device::host::HostDevice;
use terrace_device::{Arena, Device};
use terrace_kernels::{AttentionSpec, DType, KernelSet, KeyValues, MatmulSpec, Tensor, cpu};

/// Tokens of a training micro-batch.
const M: usize = 1024;
const SHAPES: [(usize, usize); 3] = [(768, 768), (2048, 768), (2048, 2048)];

fn set() -> KernelSet {
    let threads = std::env::var("THREADS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    cpu::kernel_set(threads)
}

/// A tensor of ones: the speed of a product does not depend on its values.
fn tensor(arena: &Arena, dtype: DType, dims: &[usize]) -> Tensor {
    let mut tensor = Tensor::new(arena, dtype, dims).expect("the arena is large enough");
    let bytes = tensor.view_mut().into_bytes().into_host();
    match dtype {
        DType::F32 => bytemuck::cast_slice_mut(bytes).fill(1.0f32),
        DType::BF16 => bytemuck::cast_slice_mut(bytes).fill(half::bf16::ONE),
        _ => bytes.fill(0),
    }
    tensor
}

fn arena() -> Arena {
    HostDevice::unified().arena(1 << 30).expect("a gigabyte of address space")
}

fn products(c: &mut Criterion) {
    let (set, arena) = (set(), arena());
    for (n, l) in SHAPES {
        let mut group = c.benchmark_group(format!("matmul/{M}x{n}x{l}"));
        group.sample_size(10).throughput(Throughput::Elements(2 * (M * n * l) as u64));
        let layouts = [("NT", MatmulSpec::NT), ("NN", MatmulSpec::NN), ("TN", MatmulSpec::TN_ACCUMULATE)];
        for (dtype, (name, spec)) in
            [DType::F32, DType::BF16].into_iter().flat_map(|d| layouts.map(|l| (d, l)))
        {
            let a = tensor(&arena, dtype, &if spec.trans_a { [l, M] } else { [M, l] });
            let b = tensor(&arena, dtype, &if spec.trans_b { [n, l] } else { [l, n] });
            let mut out = tensor(&arena, if spec.accumulate { DType::F32 } else { dtype }, &[M, n]);
            group.bench_function(BenchmarkId::new(name, dtype), |bench| {
                bench.iter(|| set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec));
            });
        }
        let (a, b, mut out) = (vec![1.0f32; M * l], vec![1.0f32; l * n], vec![0.0f32; M * n]);
        group.bench_function(BenchmarkId::new("gemm-f32 NT", "f32"), |bench| {
            bench.iter(|| yardstick((M, n, l), &a, &b, &mut out));
        });
        group.finish();
    }
}

/// `out[M, N] = a[M, L]·b[N, L]ᵀ` by `gemm-f32`, which counts by columns: there it is the product of b and aᵀ.
fn yardstick((m, n, l): (usize, usize, usize), a: &[f32], b: &[f32], out: &mut [f32]) {
    assert!(a.len() == m * l && b.len() == n * l && out.len() == m * n);
    // SAFETY: the strides describe dense row-major matrices of the lengths asserted above.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            n,
            m,
            l,
            out.as_mut_ptr(),
            n as isize,
            1,
            false,
            b.as_ptr(),
            1,
            l as isize,
            a.as_ptr(),
            l as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm_common::Parallelism::None,
        );
    }
}

/// Decoding: a few tokens against bf16 weights; bytes of weights per second.
fn decode(c: &mut Criterion) {
    let (set, arena) = (set(), arena());
    let (n, l) = (4096, 4096);
    let mut group = c.benchmark_group(format!("decode/{n}x{l}"));
    group.sample_size(10).throughput(Throughput::Bytes((2 * n * l) as u64));
    let weight = tensor(&arena, DType::BF16, &[n, l]);
    for m in [1, 4, 8, 9, 16] {
        let (x, mut out) = (tensor(&arena, DType::BF16, &[m, l]), tensor(&arena, DType::BF16, &[m, n]));
        group.bench_function(BenchmarkId::from_parameter(m), |bench| {
            bench.iter(|| set.matmul.matmul(x.view(), weight.view(), out.view_mut(), MatmulSpec::NT));
        });
    }
    group.finish();
}

fn attention(c: &mut Criterion) {
    let (set, arena) = (set(), arena());
    let (s, heads, kv_heads, head_size) = (1024, 16, 4, 128);
    let spec = AttentionSpec { scale: 0.088, window: None, cap: None, chunk: None };
    let of_q = || tensor(&arena, DType::BF16, &[1, s, heads, head_size]);
    let of_k = || tensor(&arena, DType::BF16, &[1, s, kv_heads, head_size]);
    let (q, k, v, dout) = (of_q(), of_k(), of_k(), of_q());
    let (mut out, mut dq, mut dk, mut dv) = (of_q(), of_q(), of_k(), of_k());
    let (starts, mut lse) = (tensor(&arena, DType::I32, &[1]), tensor(&arena, DType::F32, &[1, heads, s]));
    let pairs = (heads * s * (s + 1) / 2) as u64;
    let mut group = c.benchmark_group(format!("attention/{s}x{heads}x{kv_heads}x{head_size}"));
    group.sample_size(10).throughput(Throughput::Elements(4 * pairs * head_size as u64));
    group.bench_function("forward", |bench| {
        bench.iter(|| {
            set.attention.forward(
                q.view(),
                KeyValues::rows(k.view(), v.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
        });
    });
    group.throughput(Throughput::Elements(10 * pairs * head_size as u64));
    group.bench_function("backward", |bench| {
        bench.iter(|| {
            set.attention.backward(
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
        });
    });
    group.finish();
}

/// Decoding: one query per sequence against a long context; bytes of keys and values per second.
fn attention_decode(c: &mut Criterion) {
    let (set, arena) = (set(), arena());
    let (capacity, heads, kv_heads, head_size) = (8192, 32, 8, 128);
    let spec = AttentionSpec { scale: 0.088, window: None, cap: None, chunk: None };
    let q = tensor(&arena, DType::BF16, &[1, 1, heads, head_size]);
    let k = tensor(&arena, DType::BF16, &[1, capacity, kv_heads, head_size]);
    let (mut out, mut lse) =
        (tensor(&arena, DType::BF16, &[1, 1, heads, head_size]), tensor(&arena, DType::F32, &[1, heads, 1]));
    let mut starts = tensor(&arena, DType::I32, &[1]);
    bytemuck::cast_slice_mut::<_, i32>(starts.view_mut().into_bytes().into_host())[0] = capacity as i32 - 1;
    let mut group = c.benchmark_group("attention_decode");
    group.sample_size(10).throughput(Throughput::Bytes((4 * capacity * kv_heads * head_size) as u64));
    group.bench_function(BenchmarkId::from_parameter(capacity), |bench| {
        bench.iter(|| {
            set.attention.forward(
                q.view(),
                KeyValues::rows(k.view(), k.view()),
                starts.view(),
                out.view_mut(),
                lse.view_mut(),
                spec,
            )
        });
    });
    group.finish();
}

criterion_group!(benches, products, decode, attention, attention_decode);
criterion_main!(benches);
