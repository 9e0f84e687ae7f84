//! Parameters updated per second, per state format and gradient type, on one thread and on all.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use terrace_optimizer::{
    AdamW, Gradient, Optimizer, StateFormat, StateLayout, WeightType, adamw, update_threaded,
};

/// Far beyond the caches, as a chunk from disk is.
const PARAMS: usize = 1 << 24;

fn update(c: &mut Criterion) {
    let mut group = c.benchmark_group("adamw");
    group.throughput(Throughput::Elements(PARAMS as u64)).sample_size(10);
    let pool = rayon::ThreadPoolBuilder::new().build().expect("threads can be started");
    let narrow = vec![bf16::from_f32(1e-3); PARAMS];
    let wide = vec![1e-3f32; PARAMS];
    let cases = [
        (StateFormat::Fp32, WeightType::F32, Gradient::F32(&wide)),
        (StateFormat::Fp32, WeightType::Bf16, Gradient::Bf16(&narrow)),
        (StateFormat::Split, WeightType::Bf16, Gradient::Bf16(&narrow)),
    ];
    for (format, weight, gradient) in cases {
        let layout = StateLayout::new(format, weight).expect("a supported pair");
        let optimizer = adamw(AdamW::default(), layout);
        let mut state = State::new(optimizer.as_ref(), PARAMS);
        let args = AdamW::default().step(10, 1e-4);
        let name = format!("{format}-{weight}");
        group.bench_function(BenchmarkId::new(&name, "1 thread"), |b| {
            b.iter(|| optimizer.update(black_box(&args), gradient, &mut state.slices()).expect("fits"));
        });
        let threads = format!("{} threads", pool.current_num_threads());
        group.bench_function(BenchmarkId::new(&name, threads), |b| {
            b.iter(|| {
                let slices = &mut state.slices();
                update_threaded(optimizer.as_ref(), &pool, black_box(&args), gradient, slices).expect("fits");
            });
        });
    }
    group.finish();
}

/// Owned state of one chunk, in 8-byte words for alignment.
struct State(Vec<Vec<u64>>);

impl State {
    fn new(optimizer: &dyn Optimizer, params: usize) -> Self {
        let kinds = optimizer.layout().kinds();
        let mut state = Self(kinds.iter().map(|kind| vec![0; kind.bytes_for(params).div_ceil(8)]).collect());
        optimizer.initialize(&vec![0.5; params], &mut state.slices()).expect("fits");
        state
    }

    fn slices(&mut self) -> Vec<&mut [u8]> {
        self.0.iter_mut().map(|words| bytemuck::cast_slice_mut(words)).collect()
    }
}

criterion_group!(benches, update);
criterion_main!(benches);
