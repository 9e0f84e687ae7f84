//! The measurements on the host: memory, matrix products, updates, checksums.
//!
//! Each is the best of as many passes as fit into its time: a floor is made of what the machine can do, not of what it did while
//! something else was running.

use super::machine::last_cache_bytes;
use super::profile::{Gemm, MemoryRates, OptimizerRate, Rates, TrainingRate};
use half::{bf16, f16};
use rayon::prelude::*;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use terrace_aio::IoBuf;
use terrace_aio::bench::rates::{self, Disks, Effort as DiskEffort};
use terrace_aio::engine::EngineConfig as IoConfig;
use terrace_aio::profile::DiskProfile;
use terrace_device::{Arena, Bytes, Device, DeviceError, Region, Stream};
use terrace_kernels::{
    DType, Epilogue, KernelSet, MatmulSpec, QuantFormat, QuantizedView, Tensor, View, ViewMut,
};
use terrace_models::{ModelConfig, Row, TokenBatch, build};
use terrace_optimizer::{
    AdamW, Gradient, OptimizerError, StateFormat, StateLayout, StepArgs, WeightType, optimizer,
    update_threaded,
};
use terrace_tiers::checksum;
use terrace_zero::{
    Backend, BatchLimits, Engine, EngineConfig, MicroBatch, ParamSpec, TrainingConfig, WeightSource,
};

/// State formats with the weights they go with.
pub const LAYOUTS: [(StateFormat, WeightType); 6] = [
    (StateFormat::Fp32, WeightType::F32),
    (StateFormat::Fp32, WeightType::F16),
    (StateFormat::Fp32, WeightType::Bf16),
    (StateFormat::Split, WeightType::Bf16),
    (StateFormat::Bf16, WeightType::Bf16),
    (StateFormat::Compact, WeightType::Bf16),
];

/// How long and on how much.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Of each figure.
    pub seconds: f64,
    /// Bytes of memory that a measurement takes, several times what caches hold.
    pub memory_bytes: usize,
    /// Positions, hidden and feed-forward size of the layer whose products are measured.
    pub layer: Layer,
    /// Of a disk's file.
    pub file_bytes: u64,
    /// Of each figure of a disk.
    pub disk_seconds: f64,
    /// Whether what a disk keeps up is measured, its syncs counted.
    pub sustained: bool,
}

/// The measures of a decoder layer.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Positions that go through it at once.
    pub tokens: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Feed-forward size.
    pub intermediate: usize,
}

impl Layer {
    /// The most that a processor is asked to train.
    const TRAINED_MAX: Self = Self { tokens: 512, hidden: 1024, intermediate: 2816 };

    /// Itself, or a smaller one.
    #[must_use]
    pub fn trained(self) -> Self {
        if self.hidden > Self::TRAINED_MAX.hidden { Self::TRAINED_MAX } else { self }
    }
}

/// How often products are measured with and without disks beside them, and for how long at most. On a virtual machine rounds of 0.15 s
/// differ by a third, those of 0.3 s and more by a tenth.
const ROUNDS_BESIDE: usize = 5;
const SECONDS_BESIDE_MAX: f64 = 0.4;
/// How much longer training is measured than other figures: a median needs several steps.
const TRAINING_TIMES: f64 = 2.0;
/// The part of their time that updates on all threads, the same on one, and checksums take: their passes are of milliseconds.
const PASSES_SHORT: f64 = 0.25;

impl Effort {
    /// About 35 seconds in all with one disk.
    pub const FULL: Self = Self {
        seconds: 0.6,
        memory_bytes: 256 << 20,
        layer: Layer { tokens: 512, hidden: 2048, intermediate: 5632 },
        file_bytes: 1 << 30,
        disk_seconds: 1.2,
        sustained: false,
    };
    /// About ten seconds.
    pub const QUICK: Self = Self {
        seconds: 0.12,
        memory_bytes: 64 << 20,
        layer: Layer { tokens: 256, hidden: 1024, intermediate: 2816 },
        file_bytes: 128 << 20,
        disk_seconds: 0.3,
        sustained: false,
    };
    /// What a run measures at its start: less than a second.
    pub const START: Self = Self {
        seconds: 0.05,
        memory_bytes: 24 << 20,
        layer: Layer { tokens: 256, hidden: 512, intermediate: 1408 },
        file_bytes: 32 << 20,
        disk_seconds: 0.05,
        sustained: false,
    };
}

impl Effort {
    /// The same with memory that caches do not hold: each of the two halves that [`memory`] goes through is twice the last of them, and
    /// what [`update`] changes three times.
    /// No less than it has, and no more than [`FULL`](Self::FULL) or eight times that; where the cache is not known, what it has.
    #[must_use]
    pub fn beyond_caches(self) -> Self {
        self.beyond(last_cache_bytes().unwrap_or(0))
    }

    /// The same with what disks keep up over a minute, in files that caches of drives and hosts hold little of.
    #[must_use]
    pub fn sustained(self) -> Self {
        Self { file_bytes: 16 << 30, disk_seconds: 60.0, sustained: true, ..self }
    }

    fn of_disks(self) -> DiskEffort {
        DiskEffort {
            file_bytes: self.file_bytes,
            memory_bytes: self.memory_bytes as u64,
            seconds: self.disk_seconds,
            sustained: self.sustained,
        }
    }

    fn beyond(self, cache_bytes: usize) -> Self {
        let most = self.memory_bytes.saturating_mul(8).max(Self::FULL.memory_bytes);
        Self { memory_bytes: cache_bytes.saturating_mul(4).clamp(self.memory_bytes, most), ..self }
    }
}

/// Something that could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// Threads.
    #[error("cannot start the threads that measure: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// A disk.
    #[error("measuring disks: {0}")]
    Disk(#[from] rates::RatesError),
    /// A device.
    #[error("measuring the device: {0}")]
    Device(#[from] DeviceError),
    /// A product.
    #[error("measuring matrix products: {0}")]
    Kernel(#[from] terrace_kernels::KernelError),
    /// An update.
    #[error("measuring updates: {0}")]
    Optimizer(#[from] OptimizerError),
    /// Host memory.
    #[error("measuring the device: {0}")]
    Memory(#[from] terrace_tiers::TierError),
    /// A training step.
    #[error("measuring a training step: {0}")]
    Training(#[from] terrace_zero::EngineError),
}

/// The shortest pass of `work` in `seconds`, at least one; a first one warms up.
pub(super) fn best<E>(seconds: f64, mut work: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    work()?;
    let (began, mut least) = (Instant::now(), Duration::MAX);
    while least == Duration::MAX || began.elapsed().as_secs_f64() < seconds {
        let pass = Instant::now();
        work()?;
        least = least.min(pass.elapsed());
    }
    Ok(least.as_secs_f64().max(1e-9))
}

/// So long a device of its own works between two waits of the host, which take some 10 to 50 µs each.
const QUEUED_SECONDS: f64 = 5e-3;
/// Passes between two waits at most.
const QUEUED_MAX: u32 = 4096;

/// As [`best`], of work that is handed to `compute`: where that has memory of its own, so many passes at once that waiting for them does not
/// count.
pub(super) fn best_queued(
    device: &dyn Device,
    compute: &dyn Stream,
    seconds: f64,
    mut work: impl FnMut() -> Result<(), MeasureError>,
) -> Result<f64, MeasureError> {
    let mut passes = |count: u32| -> Result<(), MeasureError> {
        (0..count).try_for_each(|_| work())?;
        Ok(compute.synchronize()?)
    };
    let mut count = 1;
    if !device.unified() {
        // Libraries load their kernels at the first use, which takes longer than many passes.
        passes(1)?;
        while count < QUEUED_MAX {
            let began = Instant::now();
            passes(count)?;
            if began.elapsed().as_secs_f64() >= QUEUED_SECONDS {
                break;
            }
            count *= 2;
        }
    }
    Ok(best(seconds, || passes(count))? / f64::from(count))
}

/// A rate as a profile holds it: whole units, at least one.
pub(super) fn rate(amount: f64, seconds: f64) -> f64 {
    (amount / seconds).round().max(1.0)
}

/// Threads for what is measured here.
///
/// # Errors
/// The system refuses them.
pub fn pool(threads: usize) -> Result<rayon::ThreadPool, MeasureError> {
    Ok(rayon::ThreadPoolBuilder::new().num_threads(threads).build()?)
}

/// Reading, copying and changing memory in place, on all threads of `pool`.
pub fn memory(pool: &rayon::ThreadPool, effort: Effort) -> MemoryRates {
    let words = (effort.memory_bytes / 16).max(1 << 16);
    let (mut a, mut b) = (vec![1.0_f64; words], vec![2.0_f64; words]);
    let part = words.div_ceil(pool.current_num_threads()).max(1);
    let bytes = (words * 8) as f64;
    let time = |work: &mut dyn FnMut()| {
        let timed: Result<f64, std::convert::Infallible> = best(effort.seconds / 3.0, || {
            work();
            Ok(())
        });
        timed.unwrap_or_else(|never| match never {})
    };
    let read = time(&mut || {
        let sum = |part: &[f64]| {
            // Several sums at once: one alone waits for its own additions.
            let mut sums = [0.0; 16];
            for run in part.chunks_exact(16) {
                sums.iter_mut().zip(run).for_each(|(sum, value)| *sum += value);
            }
            sums.iter().sum::<f64>()
        };
        black_box(pool.install(|| a.par_chunks(part).map(sum).sum::<f64>()));
    });
    let copy = time(&mut || {
        pool.install(|| {
            b.par_chunks_mut(part).zip(a.par_chunks(part)).for_each(|(b, a)| b.copy_from_slice(a));
        });
    });
    let update = time(&mut || {
        pool.install(|| {
            a.par_chunks_mut(part).for_each(|part| part.iter_mut().for_each(|x| *x = *x * 0.999 + 0.001));
        });
    });
    MemoryRates {
        read_bytes_per_second: rate(bytes, read),
        copy_bytes_per_second: rate(2.0 * bytes, copy),
        update_bytes_per_second: rate(2.0 * bytes, update),
    }
}

/// Parameters per second of AdamW on one format of state, with all threads and with one.
///
/// # Errors
/// The optimizer refuses the format, or there is no thread to be had.
pub fn update(
    pool: &rayon::ThreadPool,
    format: StateFormat,
    weights: WeightType,
    effort: Effort,
) -> Result<OptimizerRate, MeasureError> {
    let layout = StateLayout::new(format, weights)?;
    let optimizer = optimizer(AdamW::default().into(), layout)?;
    let elements = (effort.memory_bytes / 16).next_multiple_of(1 << 16);
    let gradient = vec![bf16::from_f32(1e-3); elements];
    let mut state: Vec<IoBuf> =
        layout.kinds().iter().map(|kind| IoBuf::zeroed(kind.bytes_for(elements))).collect();
    let args = StepArgs { step: 1, lr: 1e-5, grad_scale: 1.0, weight_decay: 0.0 };
    let mut seconds = |pool: &rayon::ThreadPool| {
        best(effort.seconds * PASSES_SHORT, || {
            let mut slices: Vec<&mut [u8]> = state.iter_mut().map(|buffer| &mut **buffer).collect();
            update_threaded(&*optimizer, pool, &args, Gradient::Bf16(&gradient), &mut slices)
        })
    };
    Ok(OptimizerRate {
        state: format.to_string(),
        weights: weights.to_string(),
        parameters_per_second: rate(elements as f64, seconds(pool)?),
        parameters_per_core_second: Some(rate(elements as f64, seconds(&self::pool(1)?)?)),
    })
}

/// Bytes per second through the checksum of state, on all threads of `pool`.
pub fn checksums(pool: &rayon::ThreadPool, effort: Effort) -> f64 {
    let bytes = vec![7_u8; effort.memory_bytes.max(1 << 20)];
    let timed: Result<f64, std::convert::Infallible> = best(effort.seconds * PASSES_SHORT, || {
        pool.install(|| {
            bytes.par_chunks(1 << 20).for_each(|chunk| {
                black_box(checksum(chunk));
            });
        });
        Ok(())
    });
    rate(bytes.len() as f64, timed.unwrap_or_else(|never| match never {}))
}

/// Files on disks, for an engine with these settings.
///
/// # Errors
/// A directory cannot be used or a transfer failed.
pub fn open_disks(config: &IoConfig, dirs: &[PathBuf], effort: Effort) -> Result<Disks, MeasureError> {
    Ok(Disks::open(config, dirs, effort.of_disks())?)
}

/// Disks each alone, and all at once.
///
/// # Errors
/// A transfer failed.
pub fn disks(disks: &Disks) -> Result<(DiskProfile, Rates, Vec<String>), MeasureError> {
    let found = disks.rates()?;
    let together = Rates {
        read_bytes_per_second: found.together.read,
        write_bytes_per_second: found.together.write,
        mixed_bytes_per_second: found.together.mixed,
    };
    Ok((found.profile, together, found.notes))
}

/// Bytes that disks carry for every second of a core that products of matrices lose to that, on the `threads` of a backend on the CPU; `None`
/// where they lose nothing that could be measured.
///
/// # Errors
/// There is no memory, or a transfer failed.
pub fn disks_beside_products(
    backend: &Backend,
    disks: &Disks,
    threads: usize,
    effort: Effort,
) -> Result<Option<f64>, MeasureError> {
    let (device, kernels) = (&*backend.device, &backend.kernels);
    let arena = device.arena(gemm_arena_bytes(effort.layer))?;
    let Layer { tokens, hidden, .. } = effort.layer;
    let a = noise(device, &arena, kernels, DType::BF16, &[tokens, hidden])?;
    let b = noise(device, &arena, kernels, DType::BF16, &[hidden, hidden])?;
    let mut out = Tensor::new(&arena, DType::BF16, &[tokens, hidden])?;
    let mut result = Ok(());
    let seconds = effort.disk_seconds.min(SECONDS_BESIDE_MAX);
    let rounds = disks.beside(seconds, ROUNDS_BESIDE, || {
        if result.is_ok() {
            result = kernels.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT);
        }
    })?;
    result?;
    let cores = |round: &rates::Beside| (1.0 - round.alone / round.beside) * threads as f64;
    let mut found: Vec<f64> =
        rounds.iter().map(|round| cores(round).max(0.0) / round.bytes_per_second).collect();
    found.sort_by(f64::total_cmp);
    let median = found[found.len() / 2];
    Ok((median > 0.0).then(|| rate(1.0, median)))
}

/// The products of a decoder layer: what for, rows, columns, inner size, and how operands lie.
fn products(layer: Layer) -> [(&'static str, [usize; 3], MatmulSpec); 5] {
    let Layer { tokens, hidden, intermediate } = layer;
    [
        ("attention projection, forward", [tokens, hidden, hidden], MatmulSpec::NT),
        ("gate and up, forward", [tokens, intermediate, hidden], MatmulSpec::NT),
        ("down, forward", [tokens, hidden, intermediate], MatmulSpec::NT),
        ("gate and up, gradient of the input", [tokens, hidden, intermediate], MatmulSpec::NN),
        ("gate and up, gradient of the weight", [intermediate, hidden, tokens], MatmulSpec::TN_ACCUMULATE),
    ]
}

/// Bytes of an arena in which [`gemm`] works.
pub fn gemm_arena_bytes(layer: Layer) -> usize {
    let Layer { tokens, hidden, intermediate } = layer;
    let (weight, signal) = (intermediate * hidden, tokens * intermediate.max(hidden));
    (weight * 8 + signal * 12 + (1 << 20)).next_multiple_of(4096)
}

/// Matrix products of `layer` on the kernels of a device, with operands of `dtype`. `only` is the number of shapes to try.
///
/// # Errors
/// The device has too little memory or a kernel failed.
#[expect(clippy::too_many_arguments, reason = "a device, its queue and memory, and what to do with them")]
pub fn gemm(
    device: &dyn Device,
    compute: &dyn Stream,
    arena: &Arena,
    kernels: &KernelSet,
    dtype: DType,
    layer: Layer,
    seconds: f64,
    only: usize,
) -> Result<Vec<Gemm>, MeasureError> {
    let mut found = Vec::new();
    for (of, shape, spec) in products(layer).into_iter().take(only) {
        let [rows, columns, inner] = shape;
        let mut operands = Vec::new();
        for dims in [
            if spec.trans_a { [inner, rows] } else { [rows, inner] },
            if spec.trans_b { [columns, inner] } else { [inner, columns] },
        ] {
            operands.push(noise(device, arena, kernels, dtype, &dims)?);
        }
        let out_dtype = if spec.accumulate { DType::F32 } else { dtype };
        let mut out = Tensor::new(arena, out_dtype, &[rows, columns])?;
        kernels.elementwise.zero(out.view_mut())?;
        let timed = best_queued(device, compute, seconds, || {
            Ok(kernels.matmul.matmul(operands[0].view(), operands[1].view(), out.view_mut(), spec)?)
        })?;
        found.push(product(dtype.to_string(), of, shape, timed));
    }
    Ok(found)
}

/// A product of rows, columns and inner size `shape` that took so many seconds.
fn product(dtype: String, of: &str, shape: [usize; 3], seconds: f64) -> Gemm {
    let operations = 2.0 * shape.into_iter().map(|size| size as f64).product::<f64>();
    Gemm { dtype, of: of.into(), shape, operations_per_second: rate(operations, seconds) }
}

/// Positions of a decoding step: few rows have a product of their own.
const DECODED: usize = 16;

/// Products of activations in bf16 with weights of `layer` in `format`, of a prompt and of a decoding step.
///
/// # Errors
/// The device has too little memory or a kernel failed.
pub fn quantized(
    device: &dyn Device,
    compute: &dyn Stream,
    arena: &Arena,
    kernels: &KernelSet,
    format: QuantFormat,
    layer: Layer,
    seconds: f64,
) -> Result<Vec<Gemm>, MeasureError> {
    let Layer { tokens, hidden, intermediate } = layer;
    // All rows are alike: their values change no time, and quantizing takes some.
    let mut row = vec![0; format.row_bytes(hidden)];
    format.quantize(&numbers(hidden), &mut row).expect("the numbers are finite");
    let codes = row.repeat(intermediate);
    let region = if device.unified() {
        None
    } else {
        Some(on_device(device, arena.alloc(codes.len())?, codes.clone())?)
    };
    let bytes = region.as_ref().map_or(Bytes::from_host(&codes), Region::bytes);
    let weights = QuantizedView::new(bytes, format, &[intermediate, hidden]);
    let mut found = Vec::new();
    for (of, rows) in [("gate and up, of a prompt", tokens), ("gate and up, of a decoding step", DECODED)] {
        let signal = noise(device, arena, kernels, DType::BF16, &[rows, hidden])?;
        let mut out = Tensor::new(arena, DType::BF16, &[rows, intermediate])?;
        let timed = best_queued(device, compute, seconds, || {
            Ok(kernels.quantized_matmul.matmul_nt(signal.view(), weights, out.view_mut(), Epilogue::NONE)?)
        })?;
        found.push(product(format.to_string(), of, [rows, intermediate, hidden], timed));
    }
    Ok(found)
}

/// Operations per second of forward and backward of a model of one such layer, everything in memory, all blocks keeping what backward
/// needs. Of the median step, not of the shortest: it is for what a step is expected to take, and the floor has the best products.
///
/// # Errors
/// There is too little memory, or a kernel failed.
pub fn training(
    backend: &Backend,
    dtype: DType,
    layer: Layer,
    threads: usize,
    seconds: f64,
) -> Result<TrainingRate, MeasureError> {
    let (mut engine, batch) = of_one_layer(backend, dtype, layer, threads)?;
    // Not the update, which has a figure of its own.
    let mut spent = Vec::new();
    best(seconds * TRAINING_TIMES, || -> Result<(), MeasureError> {
        spent.push(engine.train_step(std::slice::from_ref(&batch), 1e-5)?.compute_seconds);
        Ok(())
    })?;
    Ok(training_rate(&engine, dtype, spent, 0.0))
}

/// [`training`] on a device with memory of its own, all state there, which moves so many bytes per second in its memory. A step is over when
/// the gradient's norm is known, and its update runs before the next one's kernels: it is taken off by its bytes.
///
/// # Errors
/// As [`training`].
pub fn training_on_card(
    backend: &Backend,
    dtype: DType,
    layer: Layer,
    memory_bytes_per_second: f64,
    seconds: f64,
) -> Result<TrainingRate, MeasureError> {
    let (mut engine, batch) = of_one_layer(backend, dtype, layer, 1)?;
    let update = engine.step_work().device_memory_bytes as f64 / memory_bytes_per_second;
    let mut spent = Vec::new();
    best(seconds, || -> Result<(), MeasureError> {
        let began = Instant::now();
        engine.train_step(std::slice::from_ref(&batch), 1e-5)?;
        spent.push(began.elapsed().as_secs_f64());
        Ok(())
    })?;
    Ok(training_rate(&engine, dtype, spent, update))
}

/// That of the median step but for the first, which warmed up, and for so many seconds of each that were spent on something else.
fn training_rate(engine: &Engine, dtype: DType, mut spent: Vec<f64>, other: f64) -> TrainingRate {
    let timed = &mut spent[1..];
    timed.sort_by(f64::total_cmp);
    let median = timed[timed.len() / 2];
    // Whatever the bytes say, most of a step is products.
    let seconds = (median - other).max(median / 2.0).max(1e-9);
    TrainingRate {
        dtype: dtype.to_string(),
        operations_per_second: rate(engine.flops_per_step() as f64, seconds),
    }
}

/// An engine that trains a model of one such layer with everything in memory, and a batch for it.
fn of_one_layer(
    backend: &Backend,
    dtype: DType,
    layer: Layer,
    threads: usize,
) -> Result<(Engine, MicroBatch), MeasureError> {
    let Layer { tokens, hidden, intermediate } = layer;
    let heads = (hidden / 64).max(1);
    let text = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": 1, "num_attention_heads": heads,
        "max_position_embeddings": tokens,
    });
    let model = ModelConfig::parse(&text.to_string()).expect("a model of one layer is a model");
    let limits =
        BatchLimits { sequences: 1, length: tokens, micro_batches: 1, cache_length: 0, cache_pages: 0 };
    let state = if dtype == DType::BF16 { StateFormat::Split } else { StateFormat::Fp32 };
    let training = TrainingConfig { state, clip: None, ..TrainingConfig::default() };
    let config = EngineConfig { training: Some(training), threads, ..EngineConfig::new(dtype, limits) };
    let builder = TokenBatch::new(&model);
    let ids: Vec<u32> = (0..tokens as u32).map(|at| at * 37 % 512).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let batch = builder.train(&[Row { ids: &ids, labels: &labels }], 1, tokens).expect("a row fits");
    let (sample, blocks) = (builder.blank(1, tokens), build(&model));
    let engine = Engine::create(config, backend.clone(), blocks, &sample, &mut AnyWeights)?;
    Ok((engine, batch))
}

/// Weights that cost less to make than ones that are drawn as a new model's.
struct AnyWeights;

impl WeightSource for AnyWeights {
    fn read(&mut self, param: &ParamSpec, _: usize, out: &mut [f32]) -> terrace_zero::Result {
        if param.name.ends_with("norm.weight") {
            out.fill(1.0);
        } else {
            let values = numbers(out.len());
            out.iter_mut().zip(values).for_each(|(out, value)| *out = value / 32.0);
        }
        Ok(())
    }
}

/// A matrix of small numbers of either sign: a processor draws less power for zeros, and runs faster.
fn noise(
    device: &dyn Device,
    arena: &Arena,
    kernels: &KernelSet,
    dtype: DType,
    dims: &[usize],
) -> Result<Tensor, MeasureError> {
    let mut tensor = Tensor::new(arena, dtype, dims)?;
    let elements: usize = dims.iter().product();
    let values = numbers(elements);
    if device.unified() {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let from = View::new(Bytes::from_host(&bytes), DType::F32, &[elements]);
        kernels.elementwise.cast(from, flat(&mut tensor, elements))?;
        return Ok(tensor);
    }
    let bytes: Vec<u8> = match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    };
    Ok(Tensor::from_region(on_device(device, tensor.into_region(), bytes)?, dtype, dims))
}

/// Small numbers of either sign.
fn numbers(count: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// `bytes` in memory of a device that has its own.
fn on_device(device: &dyn Device, region: Region, bytes: Vec<u8>) -> Result<Region, MeasureError> {
    let up = device.stream(terrace_device::StreamKind::Upload)?;
    let compute = device.stream(terrace_device::StreamKind::Compute)?;
    // Memory of the arena that an earlier product used.
    compute.synchronize()?;
    let (region, source) = terrace_device::Upload::start(&*up, bytes, region)?.ready_on(&*compute)?;
    source.release()?;
    Ok(region)
}

fn flat(tensor: &mut Tensor, elements: usize) -> ViewMut<'_> {
    tensor.view_mut().reshape(&[elements])
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_device::StreamKind;
    use terrace_device::host::HostDevice;
    use terrace_kernels::cpu;

    const TINY: Effort = Effort {
        seconds: 0.001,
        memory_bytes: 1 << 20,
        layer: Layer { tokens: 8, hidden: 16, intermediate: 24 },
        ..Effort::START
    };

    #[test]
    fn everything_gives_a_rate() {
        let pool = pool(2).unwrap();
        let memory = memory(&pool, TINY);
        assert!(memory.read_bytes_per_second > 1.0 && memory.update_bytes_per_second > 1.0);
        for (format, weights) in LAYOUTS {
            let found = update(&pool, format, weights, TINY).unwrap();
            assert!(found.parameters_per_second > 1.0, "{found:?}");
            assert!(found.parameters_per_core_second.is_some_and(|rate| rate > 1.0), "{found:?}");
        }
        assert!(checksums(&pool, TINY) > 1.0);
    }

    #[test]
    fn a_device_of_its_own_is_waited_for_once_for_many_passes() {
        let passes = |device: &HostDevice| {
            let mut passes = 0_u32;
            let stream = device.stream(StreamKind::Compute).unwrap();
            let pass = || {
                passes += 1;
                Ok(())
            };
            assert!(best_queued(device, &*stream, 0.0, pass).unwrap() > 0.0);
            passes
        };
        // One warms up.
        assert_eq!(passes(&HostDevice::unified()), 2);
        assert!(passes(&HostDevice::discrete()) > 16, "they take no time");
    }

    #[test]
    fn disks_beside_products_cost_something_or_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let effort = Effort { file_bytes: 4 << 20, disk_seconds: 0.04, ..TINY };
        let backend = crate::cpu_backend(1, &IoConfig::default()).unwrap();
        let opened = |dir| open_disks(&IoConfig::default(), &[dir], effort);
        let disks = opened(dir.path().to_owned()).unwrap();
        let found = disks_beside_products(&backend, &disks, 1, effort).unwrap();
        assert!(found.is_none_or(|rate| rate >= 1.0), "{found:?}");
        let gone = opened(dir.path().join("gone"));
        assert!(gone.is_err_and(|why| why.to_string().contains("gone")));
    }

    #[test]
    fn memory_is_measured_beyond_the_caches() {
        let bytes = |cache: usize| Effort::START.beyond(cache).memory_bytes;
        let (start, full) = (Effort::START.memory_bytes, Effort::FULL.memory_bytes);
        assert_eq!([bytes(0), bytes(1 << 20), bytes(32 << 20)], [start, start, 128 << 20]);
        assert_eq!([bytes(1 << 30), bytes(usize::MAX)], [full, full]);
        assert_eq!(Effort::FULL.beyond(300 << 20).memory_bytes, 1200 << 20);
        assert_eq!(Effort { memory_bytes: 1 << 30, ..Effort::START }.beyond(0).memory_bytes, 1 << 30);
    }

    #[test]
    fn a_layer_is_trained() {
        let backend = crate::cpu_backend(1, &IoConfig::default()).unwrap();
        let layer = TINY.layer;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let found = training(&backend, dtype, layer, 1, 0.001).unwrap();
            assert!(found.operations_per_second > 1.0, "{found:?}");
        }
        let mut card = crate::cpu_backend(1, &IoConfig::default()).unwrap();
        card.device = std::sync::Arc::new(HostDevice::discrete());
        card.updates = Some(crate::engine::host_updates(1).unwrap());
        for (dtype, memory) in [(DType::BF16, 1e12), (DType::F32, 1.0)] {
            let found = training_on_card(&card, dtype, layer, memory, 0.001).unwrap();
            assert!(found.operations_per_second > 1.0, "{found:?}");
        }
        let large = Layer { tokens: 64, hidden: 4096, intermediate: 11008 };
        assert_eq!((large.trained().hidden, layer.trained().hidden), (1024, 16));
    }

    #[test]
    fn products_of_all_types_fit_their_arena() {
        for device in [HostDevice::unified(), HostDevice::discrete()] {
            let arena = device.arena(gemm_arena_bytes(TINY.layer)).unwrap();
            let compute = device.stream(StreamKind::Compute).unwrap();
            let kernels = cpu::kernel_set(1);
            for format in [QuantFormat::Int8, QuantFormat::Int4] {
                let found =
                    quantized(&device, &*compute, &arena, &kernels, format, TINY.layer, 0.001).unwrap();
                assert_eq!([found[0].shape[0], found[1].shape[0]], [TINY.layer.tokens, DECODED]);
                assert!(found.iter().all(|gemm| gemm.operations_per_second > 1.0), "{found:?}");
            }
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let found = gemm(&device, &*compute, &arena, &kernels, dtype, TINY.layer, 0.001, 5).unwrap();
                assert_eq!(found.len(), 5);
                assert!(found.iter().all(|gemm| gemm.operations_per_second > 1.0), "{found:?}");
            }
        }
    }
}
