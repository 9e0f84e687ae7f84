//! Parameters updated per second, per state format, gradient type, instruction set and number of threads, and
//! beside each the loop that bounds it: `bandwidth` reads the gradient and reads and writes the state through as
//! many streams, and computes next to nothing. Then the other algorithms, and the sum of squares for the global norm.
//!
//! ```text
//! cargo bench -p terrace-optimizer                 all of it
//! cargo bench -p terrace-optimizer -- '2 threads'   some of it
//! TERRACE_BENCH_PARAMS=100000000 cargo bench -p terrace-optimizer -- table    only the table
//! TERRACE_BENCH_ROWS=' bf16 2' cargo bench -p terrace-optimizer -- table       some rows of it
//! ```
//!
//! Ends with a table: parameters per second, bytes per parameter and per second, and the share of the bandwidth loop,
//! from runs of the two in turn.

use std::hint::black_box;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group};
use half::{bf16, f16};
use memmap2::MmapMut;
use rayon::prelude::*;
use terrace_optimizer::{
    AdamW, Algorithm, Gradient, Isa, Optimizer, StateFormat, StateLayout, StepArgs, SumOfSquares,
    THREAD_CHUNK, WeightType, adamw_on, optimizer_on, update_threaded,
};

/// Far beyond the caches, as a chunk from disk is.
const PARAMS_DEFAULT: usize = 20_000_000;
/// Those of a run that only shows that everything runs.
const PARAMS_TEST: usize = 1 << 16;

const LAYOUTS: [(StateFormat, WeightType); 5] = [
    (StateFormat::Fp32, WeightType::F32),
    (StateFormat::Fp32, WeightType::Bf16),
    (StateFormat::Split, WeightType::Bf16),
    (StateFormat::Bf16, WeightType::Bf16),
    (StateFormat::Compact, WeightType::Bf16),
];

fn main() {
    updates();
    let mut filters = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    if filters.next().is_none_or(|filter| filter == "table") {
        shares_of_bandwidth(&std::env::var("TERRACE_BENCH_ROWS").unwrap_or_default());
    }
}

fn update(c: &mut Criterion) {
    let gradients = Gradients::new(params());
    for (format, weight) in LAYOUTS {
        let layout = StateLayout::new(format, weight).expect("a supported pair");
        for (gradient_type, gradient) in gradients.all() {
            let mut group = c.benchmark_group(format!("{format}-{weight}/{gradient_type} gradient"));
            group.throughput(Throughput::Elements(gradient.len() as u64)).sample_size(10);
            for isa in Isa::available() {
                let mut case = Case::new(isa, layout, gradient);
                for threads in [1, 2] {
                    let pool = pool(threads);
                    group.bench_function(
                        BenchmarkId::new(isa.to_string(), format!("{threads} threads")),
                        |b| {
                            b.iter(|| case.update(&pool));
                        },
                    );
                }
            }
            for threads in [1, 2] {
                let pool = pool(threads);
                let mut case = Case::new(Isa::best(), layout, gradient);
                group.bench_function(BenchmarkId::new("bandwidth", format!("{threads} threads")), |b| {
                    b.iter(|| case.stream(&pool));
                });
            }
        }
    }
}

/// The other algorithms.
fn algorithms(c: &mut Criterion) {
    let gradients = Gradients::new(params());
    let gradient = Gradient::Bf16(bytemuck::cast_slice(&gradients.bf16));
    let pool = pool(2);
    for name in ["adam", "adagrad", "lion", "sgd"] {
        let algorithm: Algorithm = name.parse().expect("an algorithm");
        let mut group = c.benchmark_group(format!("{name}/bf16 gradient"));
        group.throughput(Throughput::Elements(gradient.len() as u64)).sample_size(10);
        for (format, weight) in LAYOUTS {
            let layout = StateLayout::with_moments(format, weight, algorithm.moments()).expect("a pair");
            for isa in Isa::available() {
                let optimizer = optimizer_on(isa, algorithm, layout).expect("valid");
                let mut case = Case::of(optimizer, gradient);
                let name = BenchmarkId::new(format!("{format}-{weight}/{isa}"), "2 threads");
                group.bench_function(name, |b| b.iter(|| case.update(&pool)));
            }
        }
    }
}

/// The sum of squares for the global norm.
fn norm(c: &mut Criterion) {
    let gradients = Gradients::new(params());
    for (gradient_type, gradient) in gradients.all() {
        let mut group = c.benchmark_group(format!("norm/{gradient_type} gradient"));
        group.throughput(Throughput::Elements(gradient.len() as u64)).sample_size(10);
        for isa in Isa::available() {
            group.bench_function(BenchmarkId::new(isa.to_string(), "1 threads"), |b| {
                b.iter(|| {
                    let mut sum = SumOfSquares::new();
                    sum.add_on(isa, black_box(gradient));
                    sum.total()
                });
            });
        }
    }
}

/// The update on the best instruction set against its bandwidth loop, by the medians of interleaved runs. `filter` is a part
/// of the names of the rows to measure.
fn shares_of_bandwidth(filter: &str) {
    const RUNS: usize = 7;
    println!(
        "\n{:<14} {:>4} {:>7} {:>10} {:>8} {:>8} {:>10} {:>6}",
        "state", "grad", "threads", "params/s", "B/param", "GB/s", "loop GB/s", "share"
    );
    let gradients = Gradients::new(params());
    for (format, weight) in LAYOUTS {
        let layout = StateLayout::new(format, weight).expect("a supported pair");
        for (gradient_type, gradient) in gradients.all() {
            let mut case = Case::new(Isa::best(), layout, gradient);
            for threads in [1, 2] {
                if !format!("{format}-{weight} {gradient_type} {threads} threads").contains(filter) {
                    continue;
                }
                let pool = pool(threads);
                let (mut updates, mut streams) = ([0.0; RUNS], [0.0; RUNS]);
                for run in 0..RUNS {
                    updates[run] = seconds(|| case.update(&pool));
                    streams[run] = seconds(|| case.stream(&pool));
                }
                let (update, stream) = (median(updates), median(streams));
                let (bytes, params) = (case.traffic_bytes() as f64, gradient.len() as f64);
                println!(
                    "{:<14} {gradient_type:>4} {threads:>7} {:>8.3} G {:>8.2} {:>8.2} {:>10.2} {:>6.2}",
                    format!("{format}-{weight}"),
                    params / update / 1e9,
                    bytes / params,
                    bytes / update / 1e9,
                    bytes / stream / 1e9,
                    stream / update
                );
            }
        }
    }
}

fn median<const N: usize>(mut values: [f64; N]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[N / 2]
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn params() -> usize {
    // As one of the workspace's benchmarks under `--test`, everything runs small.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let default = if is_test { PARAMS_TEST } else { PARAMS_DEFAULT };
    let text = std::env::var("TERRACE_BENCH_PARAMS");
    text.map_or(default, |text| text.parse().expect("TERRACE_BENCH_PARAMS is a number"))
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads can be started")
}

/// Memory of zeros on huge pages where the system has them, as the engine's own.
fn huge(bytes: usize) -> MmapMut {
    let memory = MmapMut::map_anon(bytes.max(1)).expect("memory");
    #[cfg(target_os = "linux")]
    // Small pages do, too.
    let _ = memory.advise(memmap2::Advice::HugePage);
    memory
}

/// One made gradient in every type.
struct Gradients {
    bf16: MmapMut,
    f16: MmapMut,
    f32: MmapMut,
}

impl Gradients {
    fn new(params: usize) -> Self {
        let mut bits = 1u32;
        let mut next = || {
            bits = bits.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            ((bits >> 8) as f32 / (1 << 23) as f32 - 1.0) * 1e-2
        };
        let mut made = Self { bf16: huge(2 * params), f16: huge(2 * params), f32: huge(4 * params) };
        let (narrow, half, wide) = (
            bytemuck::cast_slice_mut::<_, bf16>(&mut made.bf16),
            bytemuck::cast_slice_mut::<_, f16>(&mut made.f16),
            bytemuck::cast_slice_mut::<_, f32>(&mut made.f32),
        );
        for ((narrow, half), wide) in narrow.iter_mut().zip(half).zip(wide) {
            *wide = next();
            (*narrow, *half) = (bf16::from_f32(*wide), f16::from_f32(*wide));
        }
        made
    }

    fn all(&self) -> [(&'static str, Gradient<'_>); 3] {
        [
            ("bf16", Gradient::Bf16(bytemuck::cast_slice(&self.bf16))),
            ("f16", Gradient::F16(bytemuck::cast_slice(&self.f16))),
            ("f32", Gradient::F32(bytemuck::cast_slice(&self.f32))),
        ]
    }
}

/// A state to update.
struct Case<'a> {
    optimizer: Box<dyn Optimizer>,
    gradient: Gradient<'a>,
    args: StepArgs,
    state: Vec<MmapMut>,
}

impl<'a> Case<'a> {
    fn new(isa: Isa, layout: StateLayout, gradient: Gradient<'a>) -> Self {
        Self::of(adamw_on(isa, AdamW::default(), layout), gradient)
    }

    fn of(optimizer: Box<dyn Optimizer>, gradient: Gradient<'a>) -> Self {
        let layout = *optimizer.layout();
        let state = layout.kinds().iter().map(|kind| huge(kind.bytes_for(gradient.len()))).collect();
        let mut case = Self { optimizer, gradient, args: AdamW::default().step(10, 1e-4), state };
        let initial = vec![0.5; gradient.len()];
        let (optimizer, mut slices) = (&case.optimizer, slices(&mut case.state, layout, gradient.len()));
        optimizer.initialize(&initial, &mut slices).expect("the state fits");
        case
    }

    fn update(&mut self, pool: &rayon::ThreadPool) {
        let layout = *self.optimizer.layout();
        let mut slices = slices(&mut self.state, layout, self.gradient.len());
        self.args.step += 1;
        update_threaded(self.optimizer.as_ref(), pool, black_box(&self.args), self.gradient, &mut slices)
            .expect("the state fits");
    }

    /// Reads the gradient, reads and writes the state: the same streams in the same pieces.
    fn stream(&mut self, pool: &rayon::ThreadPool) {
        let gradient = self.gradient;
        let pieces = gradient.len().div_ceil(THREAD_CHUNK);
        let mut kinds: Vec<_> = self
            .state
            .iter_mut()
            .map(|memory| {
                let words = memory.len() / 8 * 8;
                let words: &mut [u64] = bytemuck::cast_slice_mut(&mut memory[..words]);
                let len = words.len().div_ceil(pieces);
                words.chunks_mut(len)
            })
            .collect();
        let pieces: Vec<(Gradient<'_>, Vec<&mut [u64]>)> = gradient
            .chunks(THREAD_CHUNK)
            .map(|gradient| (gradient, kinds.iter_mut().filter_map(Iterator::next).collect()))
            .collect();
        pool.install(|| {
            pieces
                .into_par_iter()
                .for_each(|(gradient, mut state)| stream_piece(bytes_of(gradient), &mut state));
        });
    }

    /// The bytes that an update reads and writes.
    fn traffic_bytes(&self) -> usize {
        let params = self.gradient.len();
        let written = self.optimizer.layout().bytes_for(params);
        // The master is what is read of an fp32 state with bf16 weights, not the weight rounded from it.
        let derived = match (self.optimizer.layout().format(), self.optimizer.layout().weight()) {
            (StateFormat::Fp32, WeightType::Bf16) => 2 * params,
            _ => 0,
        };
        bytes_of(self.gradient).len() + 2 * written - derived
    }
}

/// Goes through the streams together, 512 bytes of the longest at a time, adding one word of the gradient to the state.
fn stream_piece(gradient: &[u8], state: &mut [&mut [u64]]) {
    let longest = state.iter().map(|words| words.len()).max().unwrap_or(0);
    let turns = longest.div_ceil(64).max(1);
    let mut kinds: Vec<_> = state
        .iter_mut()
        .map(|words| {
            let len = words.len().div_ceil(turns);
            words.chunks_mut(len)
        })
        .collect();
    for gradient in gradient.chunks(gradient.len().div_ceil(turns)) {
        let sum = gradient.iter().fold(0u8, |sum, byte| sum ^ byte);
        for words in kinds.iter_mut().filter_map(Iterator::next) {
            words.iter_mut().for_each(|word| *word = word.wrapping_add(u64::from(sum)));
        }
    }
}

fn bytes_of(gradient: Gradient<'_>) -> &[u8] {
    match gradient {
        Gradient::Bf16(values) => bytemuck::cast_slice(values),
        Gradient::F16(values) => bytemuck::cast_slice(values),
        Gradient::F32(values) => bytemuck::cast_slice(values),
    }
}

fn slices(state: &mut [MmapMut], layout: StateLayout, params: usize) -> Vec<&mut [u8]> {
    state.iter_mut().zip(layout.kinds()).map(|(memory, kind)| &mut memory[..kind.bytes_for(params)]).collect()
}

criterion_group!(updates, update, algorithms, norm);
