//! How fast the CUDA backend is on a card, by the card's own events: copies, products, attention, operations on rows and
//! elements, quantized weights, updates of training state.
//!
//! Prints one JSON object a line: part, name, variant, the median and the spread of the samples, and the rate. A sample is as
//! many calls in a row as make events exact; the calls that find out how many are the warm-up. Operands are random,
//! since a card's clock depends on how many bits flip. Bytes per second count every operand once, read or written.
//! `scripts/gpu/torch_bench.py` measures torch under the same names; `cargo xtask gpu-pack` puts both side by side.
//!
//! `--only PART,…` chooses parts, `--sizes tiny` is for drivers that only play a card, `--samples N` and `--device N` are what
//! they say. Without a card `cargo bench` measures nothing; run by itself, the program fails.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use terrace_device::cuda::{CudaDevice, CudaStream, Library, PinnedMemory, PinnedUse};
use terrace_device::host::HostMemory;
use terrace_device::{
    Arena, Bytes, BytesMut, Device, DeviceError, Download, Region, Stream, StreamKind, Upload,
};
use terrace_kernels::cuda::{CudaConfig, update_kernels, with_config};
use terrace_kernels::update::{AdamFormat, AdamState, AdamStep};
use terrace_kernels::{
    AttentionSpec, DType, Epilogue, GateFunction, KernelSet, KeyValues, MatmulSpec, QuantFormat,
    QuantizedView, Result, RopeDirection, RopeLayout, Tensor, View,
};

type Part = (&'static str, fn(&Rig));

/// Parts in the order in which they run.
const PARTS: [Part; 6] = [
    ("copies", copies),
    ("matmul", products),
    ("attention", attention),
    ("rows", rows),
    ("quantized", quantized),
    ("adamw", adamw),
];

struct Settings {
    only: Vec<String>,
    tiny: bool,
    samples: usize,
    device: u32,
    /// Cargo runs it: for `--test` as well as for measuring.
    by_cargo: bool,
}

impl Settings {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut settings = Self { only: Vec::new(), tiny: false, samples: 15, device: 0, by_cargo: false };
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("`{word}` needs a value"));
            let number = |text: String| text.parse::<u32>().map_err(|_| format!("`{text}` is no number"));
            match word.as_str() {
                "--only" => settings.only.extend(value()?.split(',').map(str::to_owned)),
                "--sizes" => settings.tiny = value()? == "tiny",
                "--samples" => settings.samples = number(value()?)?.max(1) as usize,
                "--device" => settings.device = number(value()?)?,
                "--test" => (settings.by_cargo, settings.tiny) = (true, true),
                "--bench" => settings.by_cargo = true,
                // Criterion's arguments reach every benchmark.
                _ if settings.by_cargo => {}
                _ => return Err(format!("unknown argument `{word}`")),
            }
        }
        match settings.only.iter().find(|name| PARTS.iter().all(|(part, _)| part != name)) {
            Some(name) => Err(format!("there is no part `{name}`")),
            None => Ok(settings),
        }
    }
}

fn main() -> ExitCode {
    let settings = match Settings::parse(std::env::args().skip(1)) {
        Ok(settings) => settings,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    let by_cargo = settings.by_cargo;
    match Rig::new(settings) {
        Ok(rig) => {
            let chosen =
                |part: &str| rig.settings.only.is_empty() || rig.settings.only.iter().any(|o| o == part);
            PARTS.iter().filter(|(part, _)| chosen(part)).for_each(|(_, run)| run(&rig));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cuda: nothing measured: {error}");
            if by_cargo { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
    }
}

/// The card, its kernels, and memory for operands.
struct Rig {
    settings: Settings,
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    arena: Arena,
    /// Variants of products; the first is the default set.
    sets: Vec<(&'static str, KernelSet)>,
    /// Random bf16.
    pattern: Vec<u8>,
}

/// The median of some samples and their extremes, in seconds a call.
struct Timing {
    median: f64,
    least: f64,
    most: f64,
    samples: usize,
}

impl Rig {
    fn new(settings: Settings) -> Result<Self, DeviceError> {
        let device = CudaDevice::open(settings.device)?;
        let stream = Arc::clone(device.compute_stream());
        let arena = device.arena(if settings.tiny { 32 << 20 } else { 4 << 30 })?;
        let set = |own_products| {
            with_config(&device, &stream, CudaConfig { own_products, ..CudaConfig::default() })
        };
        let mut sets = vec![("own", set(true)?)];
        if Library::CublasLt.is_found() {
            sets.insert(0, ("cublaslt", set(false)?));
        } else {
            eprintln!("cuda: cuBLASLt was not found: only own products");
        }
        // Not a divisor of any operand, so that rows differ.
        let pattern = pattern(if settings.tiny { 9973 } else { 4_194_301 });
        Ok(Self { settings, device, stream, arena, sets, pattern })
    }

    fn kernels(&self) -> &KernelSet {
        &self.sets[0].1
    }

    /// One size or the other.
    fn size<T>(&self, full: T, tiny: T) -> T {
        if self.settings.tiny { tiny } else { full }
    }

    fn empty(&self, dtype: DType, dims: &[usize]) -> Tensor {
        Tensor::new(&self.arena, dtype, dims).expect("the arena has room for every part")
    }

    /// A tensor of random bf16, or, in another dtype, of zeros.
    fn tensor(&self, dtype: DType, dims: &[usize]) -> Tensor {
        let mut tensor = self.empty(dtype, dims);
        if dtype == DType::BF16 {
            self.fill(tensor.view_mut().into_bytes());
        } else {
            // SAFETY: the tensor outlives the wait below.
            unsafe { self.stream.fill(tensor.view_mut().into_bytes(), 0) }.expect("the card fills memory");
            self.stream.synchronize().expect("the card fills memory");
        }
        tensor
    }

    fn random(&self, dims: &[usize]) -> Tensor {
        self.tensor(DType::BF16, dims)
    }

    fn fill(&self, mut bytes: BytesMut<'_>) {
        let len = bytes.len();
        for start in (0..len).step_by(self.pattern.len()) {
            let end = len.min(start + self.pattern.len());
            // SAFETY: source and destination outlive the wait below.
            let copied = unsafe {
                let piece = bytes.reborrow().slice(start, end);
                self.stream.copy(Bytes::from_host(&self.pattern[..end - start]), piece)
            };
            copied.expect("the card takes copies");
        }
        self.stream.synchronize().expect("the card takes copies");
    }

    fn integers(&self, values: &[i32]) -> Tensor {
        let mut tensor = self.empty(DType::I32, &[values.len()]);
        let source = Bytes::from_host(bytemuck::cast_slice(values));
        // SAFETY: source and destination outlive the wait.
        unsafe { self.stream.copy(source, tensor.view_mut().into_bytes()) }.expect("the card takes copies");
        self.stream.synchronize().expect("the card takes copies");
        tensor
    }

    /// Times calls that put their work on `stream`.
    fn time_on(&self, stream: &CudaStream, mut call: impl FnMut()) -> Timing {
        let mut sample = |calls: usize| {
            let start = stream.record_timed().expect("the stream takes events");
            (0..calls).for_each(|_| call());
            let end = stream.record_timed().expect("the stream takes events");
            end.since(&start).expect("the work succeeds").as_secs_f64()
        };
        let (enough, budget) = self.size((5e-3, 1.0), (0.0, 0.0));
        // The first call also looks up kernels.
        sample(1);
        let (mut calls, mut taken) = (1, sample(1));
        while taken < enough && calls < CALLS_MAX {
            calls *= 2;
            taken = sample(calls);
        }
        let affordable = (budget / taken.max(1e-9)) as usize;
        let count = self.settings.samples.min(affordable.max(3));
        let mut samples: Vec<f64> = (0..count).map(|_| sample(calls) / calls as f64).collect();
        samples.sort_by(f64::total_cmp);
        Timing { median: samples[count / 2], least: samples[0], most: samples[count - 1], samples: count }
    }

    /// Times calls of kernels.
    fn time(&self, mut call: impl FnMut() -> Result) -> Timing {
        self.time_on(&self.stream, || call().expect("the kernel runs"))
    }
}

/// About normal numbers of deviation one.
fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let sum: u64 = (0..4).map(|i| state >> (16 * i) & 0xFFFF).sum();
        half::bf16::from_f32((sum as f32 / 65_536.0 - 2.0) * 1.732)
    };
    let values: Vec<half::bf16> = (0..len).map(|_| next()).collect();
    bytemuck::cast_slice(&values).to_vec()
}

/// Calls of the shortest operations in a sample.
const CALLS_MAX: usize = 1024;

/// What a rate counts.
#[derive(Clone, Copy)]
enum Work {
    Operations(usize),
    Bytes(usize),
}

fn report(part: &str, name: &str, variant: &str, work: Work, timing: &Timing) {
    let (amount, scale, unit) = match work {
        Work::Operations(count) => (count as f64, 1e12, "TFLOP/s"),
        Work::Bytes(count) => (count as f64, 1e9, "GB/s"),
    };
    let Timing { median, least, most, samples } = timing;
    println!(
        "{{\"source\":\"terrace\",\"part\":\"{part}\",\"name\":\"{name}\",\"variant\":\"{variant}\",\
         \"value\":{:.4},\"unit\":\"{unit}\",\"milliseconds\":{:.6},\"least\":{:.6},\"most\":{:.6},\"samples\":{samples}}}",
        amount / median.max(1e-12) / scale,
        1e3 * median,
        1e3 * least,
        1e3 * most,
    );
}

/// Copies between host and device: bare ones from every kind of memory, and the engine's transfers, which hold both ends
/// and record an event each.
fn copies(rig: &Rig) {
    let bytes: usize = rig.size(256 << 20, 1 << 20);
    let stream = |kind| rig.device.cuda_stream(kind).expect("the card has streams");
    let (up, down) = (stream(StreamKind::Upload), stream(StreamKind::Download));
    let mut regions = [0, 1].map(|_| rig.arena.alloc(bytes).expect("the arena has room for every part"));
    let pinned = |used_for| rig.device.pinned_memory(bytes, used_for).expect("memory can be pinned");
    let (mut cached, mut other) = (pinned(PinnedUse::Download), pinned(PinnedUse::Download));
    let combined = pinned(PinnedUse::Upload);
    let pages = HostMemory::new(bytes).expect("there is memory");
    // SAFETY: the mapping outlives the guard, which is dropped first.
    let guard = unsafe { rig.device.pin(pages.base(), bytes) }.expect("memory can be pinned");
    // SAFETY: the mapping is as long and nobody writes to it.
    let registered = unsafe { std::slice::from_raw_parts(pages.base().as_ptr(), bytes) };
    let upload = |source: &[u8], region: &mut Region| {
        // SAFETY: both ends outlive the wait for the sample's last event.
        unsafe { up.copy(Bytes::from_host(source), region.bytes_mut()) }.expect("the card takes copies");
    };
    let download = |region: &Region, target: &mut [u8]| {
        // SAFETY: as above.
        unsafe { down.copy(region.bytes(), BytesMut::from_host(target)) }.expect("the card takes copies");
    };
    let sources: [(&str, &[u8]); 3] =
        [("plain", &cached), ("write-combined", &combined), ("registered", registered)];
    for (variant, source) in sources {
        let timing = rig.time_on(&up, || upload(source, &mut regions[0]));
        report("copies", "host to device", variant, Work::Bytes(bytes), &timing);
    }
    let timing = rig.time_on(&down, || download(&regions[1], &mut other));
    report("copies", "device to host", "plain", Work::Bytes(bytes), &timing);
    let [first, second] = &mut regions;
    let timing = rig.time_on(&up, || {
        down.wait(&*up.record().expect("events")).expect("streams wait");
        upload(&cached, first);
        download(second, &mut other);
        up.wait(&*down.record().expect("events")).expect("streams wait");
    });
    report("copies", "both at once", "plain", Work::Bytes(2 * bytes), &timing);
    let timing = rig.time_on(&rig.stream, || {
        // SAFETY: both regions outlive the wait for the sample's last event.
        unsafe { rig.stream.copy(first.bytes(), second.bytes_mut()) }.expect("the card takes copies");
    });
    report("copies", "within the device", "plain", Work::Bytes(2 * bytes), &timing);
    cached.fill(0);
    drop(guard);
    drop(regions);
    transfers(rig, bytes, &up, &down);
}

/// Pieces of a transfer, and how many are in flight.
const PIECES: usize = 16;
const IN_FLIGHT: usize = 4;

/// The engine's way to copy: every transfer owns both ends, and takes those of the oldest one once that is done.
fn transfers(rig: &Rig, bytes: usize, up: &Arc<CudaStream>, down: &Arc<CudaStream>) {
    let piece = bytes / PIECES;
    let ends = |used_for| {
        let memory = rig.device.pinned_memory(piece, used_for).expect("memory can be pinned");
        (memory, rig.arena.alloc(piece).expect("the arena has room for every part"))
    };
    let start_upload =
        |(memory, region)| Upload::start(&**up, memory, region).expect("the card takes copies");
    let start_download = |(memory, region)| {
        Download::start(&**down, &*rig.stream, region, memory).expect("the card takes copies")
    };
    let mut uploads: VecDeque<Upload<PinnedMemory>> =
        (0..IN_FLIGHT).map(|_| start_upload(ends(PinnedUse::Upload))).collect();
    let mut downloads: VecDeque<Download<PinnedMemory>> =
        (0..IN_FLIGHT).map(|_| start_download(ends(PinnedUse::Download))).collect();
    let mut upload = || {
        let oldest = uploads.pop_front().expect("some are in flight");
        let (region, source) = oldest.ready_on(&*rig.stream).expect("streams wait");
        uploads.push_back(start_upload((source.release().expect("the copy succeeds"), region)));
    };
    let mut download = || {
        let oldest = downloads.pop_front().expect("some are in flight");
        let (region, memory) = oldest.wait().expect("the copy succeeds");
        downloads.push_back(start_download((memory, region)));
    };
    let timing = rig.time_on(up, || (0..PIECES).for_each(|_| upload()));
    report("copies", "host to device", "transfers", Work::Bytes(bytes), &timing);
    let timing = rig.time_on(down, || (0..PIECES).for_each(|_| download()));
    report("copies", "device to host", "transfers", Work::Bytes(bytes), &timing);
    let timing = rig.time_on(up, || {
        down.wait(&*up.record().expect("events")).expect("streams wait");
        for _ in 0..PIECES {
            upload();
            download();
        }
        up.wait(&*down.record().expect("events")).expect("streams wait");
    });
    report("copies", "both at once", "transfers", Work::Bytes(2 * bytes), &timing);
}

/// Square, wide, and that of a feed-forward layer of 8B parameters: M, N, L.
fn products(rig: &Rig) {
    let shapes = rig.size(
        [(4096, 4096, 4096), (8192, 8192, 4096), (8192, 14_336, 4096)],
        [(64, 64, 64), (128, 96, 64), (96, 160, 64)],
    );
    let layouts = [("NT", MatmulSpec::NT), ("NN", MatmulSpec::NN), ("TN", MatmulSpec::TN_ACCUMULATE)];
    for ((m, n, l), (layout, spec)) in shapes.into_iter().flat_map(|s| layouts.map(|layout| (s, layout))) {
        let a = rig.random(&if spec.trans_a { [l, m] } else { [m, l] });
        let b = rig.random(&if spec.trans_b { [n, l] } else { [l, n] });
        let mut out = rig.tensor(if spec.accumulate { DType::F32 } else { DType::BF16 }, &[m, n]);
        for (variant, set) in &rig.sets {
            let timing = rig.time(|| set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec));
            report(
                "matmul",
                &format!("{layout} {m}x{n}x{l}"),
                variant,
                Work::Operations(2 * m * n * l),
                &timing,
            );
        }
    }
}

/// Causal, with four query heads a key head; counted are the scores that are not masked.
fn attention(rig: &Rig) {
    let (s, heads, kv_heads) = rig.size((4096, 32, 8), (96, 4, 1));
    let starts = rig.integers(&[0]);
    for head_size in [128, 64] {
        let spec =
            AttentionSpec { scale: (head_size as f32).sqrt().recip(), window: None, cap: None, chunk: None };
        let (of_q, of_k) =
            (|| rig.random(&[1, s, heads, head_size]), || rig.random(&[1, s, kv_heads, head_size]));
        let (q, k, v, dout) = (of_q(), of_k(), of_k(), of_q());
        let (mut out, mut dq, mut dk, mut dv) = (of_q(), of_q(), of_k(), of_k());
        let mut lse = rig.tensor(DType::F32, &[1, heads, s]);
        let (attention, shape) =
            (&rig.kernels().attention, format!("S{s} H{heads} G{kv_heads} K{head_size}"));
        let operations = 4 * heads * (s * (s + 1) / 2) * head_size;
        let timing = rig.time(|| {
            let (out, lse) = (out.view_mut(), lse.view_mut());
            attention.forward(q.view(), KeyValues::rows(k.view(), v.view()), starts.view(), out, lse, spec)
        });
        report("attention", &format!("forward {shape}"), "own", Work::Operations(operations), &timing);
        let timing = rig.time(|| {
            let (q, k, v, out, lse) = (q.view(), k.view(), v.view(), out.view(), lse.view());
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            attention.backward(q, k, v, out, lse, dout.view(), dq, dk, dv, spec)
        });
        // Five products where the forward has two.
        report(
            "attention",
            &format!("backward {shape}"),
            "own",
            Work::Operations(operations * 5 / 2),
            &timing,
        );
    }
}

/// Operations that memory bounds.
fn rows(rig: &Rig) {
    let (tokens, hidden, wide) = rig.size((8192, 4096, 14_336), (64, 128, 256));
    norm(rig, tokens, hidden);
    gate(rig, tokens, wide);
    let set = rig.kernels();
    let element = 2 * tokens * hidden;
    let (a, b) = (rig.random(&[tokens, hidden]), rig.random(&[tokens, hidden]));
    let mut out = rig.random(&[tokens, hidden]);
    let shape = format!("{tokens}x{hidden}");
    let timing = rig.time(|| set.elementwise.add(a.view(), b.view(), out.view_mut()));
    report("rows", &format!("add {shape}"), "own", Work::Bytes(3 * element), &timing);
    let mut single = rig.tensor(DType::F32, &[tokens, hidden]);
    let timing = rig.time(|| set.elementwise.cast(single.view(), out.view_mut()));
    report("rows", &format!("cast f32 to bf16 {shape}"), "own", Work::Bytes(3 * element), &timing);
    let timing = rig.time(|| set.elementwise.add_assign(single.view_mut(), a.view()));
    report("rows", &format!("add bf16 to f32 {shape}"), "own", Work::Bytes(5 * element), &timing);
    let mut sums = rig.tensor(DType::F32, &[hidden]);
    let timing = rig.time(|| set.reduce.sum_rows(a.view(), sums.view_mut()));
    report("rows", &format!("sum_rows {shape}"), "own", Work::Bytes(element), &timing);
    drop((single, b));
    let head_size = 128.min(hidden);
    let positions = rig.integers(&(0..tokens as i32).collect::<Vec<_>>());
    let frequencies = rig.tensor(DType::F32, &[head_size / 2]);
    let mut heads = rig.random(&[tokens, hidden / head_size, head_size]);
    let timing = rig.time(|| {
        let (x, positions) = (heads.view_mut(), positions.view());
        set.rope.rotate(x, positions, frequencies.view(), RopeLayout::HALVES, 1.0, RopeDirection::Forward)
    });
    report("rows", &format!("rope {shape}"), "own", Work::Bytes(2 * element), &timing);
    losses(rig);
}

fn norm(rig: &Rig, tokens: usize, hidden: usize) {
    let norm = &rig.kernels().rms_norm;
    let of_x = || rig.random(&[tokens, hidden]);
    let (x, dout, mut out, weight) = (of_x(), of_x(), of_x(), rig.random(&[hidden]));
    let mut rstd = rig.tensor(DType::F32, &[tokens]);
    let (bytes, shape) = (2 * tokens * hidden, format!("{tokens}x{hidden}"));
    let timing = rig.time(|| norm.forward(x.view(), weight.view(), 1e-5, out.view_mut(), rstd.view_mut()));
    report("rows", &format!("rms_norm {shape}"), "own", Work::Bytes(2 * bytes), &timing);
    let mut dweight = rig.tensor(DType::F32, &[hidden]);
    let timing = rig.time(|| {
        let (dx, dweight) = (out.view_mut(), dweight.view_mut());
        norm.backward(dout.view(), x.view(), weight.view(), rstd.view(), dx, false, dweight)
    });
    report("rows", &format!("rms_norm backward {shape}"), "own", Work::Bytes(3 * bytes), &timing);
}

fn gate(rig: &Rig, tokens: usize, wide: usize) {
    let activation = &rig.kernels().activation;
    let of_x = || rig.random(&[tokens, wide]);
    let (gate, up, mut out, mut dgate) = (of_x(), of_x(), of_x(), of_x());
    let (bytes, shape) = (2 * tokens * wide, format!("{tokens}x{wide}"));
    let timing = rig.time(|| activation.gated(GateFunction::Silu, gate.view(), up.view(), out.view_mut()));
    report("rows", &format!("swiglu {shape}"), "own", Work::Bytes(3 * bytes), &timing);
    let dout = of_x();
    let timing = rig.time(|| {
        let (dgate, dup) = (dgate.view_mut(), out.view_mut());
        activation.gated_backward(GateFunction::Silu, gate.view(), up.view(), dout.view(), dgate, dup)
    });
    report("rows", &format!("swiglu backward {shape}"), "own", Work::Bytes(5 * bytes), &timing);
}

fn losses(rig: &Rig) {
    let (tokens, vocabulary) = rig.size((4096, 128_256), (16, 512));
    let labels = rig.integers(&(0..tokens as i32).collect::<Vec<_>>());
    let (mut logits, mut loss) = (rig.random(&[tokens, vocabulary]), rig.tensor(DType::F64, &[1]));
    let (bytes, shape) = (2 * tokens * vocabulary, format!("{tokens}x{vocabulary}"));
    let cross_entropy = &rig.kernels().cross_entropy;
    let timing = rig.time(|| cross_entropy.loss(logits.view(), labels.view(), loss.view_mut()));
    report("rows", &format!("cross_entropy {shape}"), "own", Work::Bytes(bytes), &timing);
    let timing = rig.time(|| {
        let (logits, loss) = (logits.view_mut(), loss.view_mut());
        cross_entropy.loss_and_gradient(logits, labels.view(), 1.0, None, loss)
    });
    report("rows", &format!("cross_entropy and gradient {shape}"), "own", Work::Bytes(2 * bytes), &timing);
}

/// Products of a few rows with one weight matrix after another, so that none is in a cache: bytes of weights a second.
fn quantized(rig: &Rig) {
    let (n, l) = rig.size((14_336, 4096), (64, 256));
    let formats = [
        ("bf16", None),
        ("int8", Some(QuantFormat::Int8)),
        ("int4", Some(QuantFormat::Int4)),
        ("mxfp4", Some(QuantFormat::Mxfp4)),
    ];
    let cache = rig.size(rig.device.properties().cache_bytes as usize, 0);
    for (name, format) in formats {
        let bytes = format.map_or(2 * n * l, |format| format.bytes(&[n, l]));
        let copies = (3 * cache).div_ceil(bytes).max(2);
        // Any bits are codes, and random bf16 are scales.
        let mut memory = rig.arena.alloc(copies * bytes).expect("the arena has room for every part");
        rig.fill(memory.bytes_mut());
        for m in [1, 8, 16] {
            let (x, mut out) = (rig.random(&[m, l]), rig.random(&[m, n]));
            let variants = if format.is_none() { &rig.sets[..] } else { &rig.sets[..1] };
            for (variant, set) in variants {
                let mut turn = 0;
                let timing = rig.time(|| {
                    turn = (turn + 1) % copies;
                    let weights = memory.bytes().slice(turn * bytes, (turn + 1) * bytes);
                    match format {
                        Some(format) => {
                            let weights = QuantizedView::new(weights, format, &[n, l]);
                            set.quantized_matmul.matmul_nt(x.view(), weights, out.view_mut(), Epilogue::NONE)
                        }
                        None => {
                            let weights = View::new(weights, DType::BF16, &[n, l]);
                            set.matmul.matmul(x.view(), weights, out.view_mut(), MatmulSpec::NT)
                        }
                    }
                });
                let variant = if format.is_none() { *variant } else { "own" };
                report("quantized", &format!("{name} m{m} {n}x{l}"), variant, Work::Bytes(bytes), &timing);
            }
        }
    }
}

/// Updates of state in every format, and the norm of a gradient: bytes read and bytes written.
fn adamw(rig: &Rig) {
    let count = rig.size(1 << 27, 1 << 16);
    let kernels = update_kernels(&rig.device, &rig.stream).expect("kernels that compile");
    // The second step of AdamW with torch's defaults.
    let step = AdamStep {
        grad_scale: 1.0,
        decay: 1.0 - 1e-5 * 1e-2,
        decoupled: true,
        lerp_from_gradient: false,
        lerp: 0.1,
        beta2: 0.999,
        beta2_rest: 1e-3,
        bias2_sqrt_inverse: 22.366_27,
        eps: 1e-8,
        step_size_negative: -1e-5 / 0.19,
        seed: 0x5bf0_3635,
    };
    let formats = [
        ("fp32", AdamFormat::Fp32, DType::F32),
        ("split", AdamFormat::Split, DType::BF16),
        ("bf16 moments", AdamFormat::Bf16, DType::BF16),
        ("compact", AdamFormat::Compact, DType::BF16),
    ];
    for (name, format, dtype) in formats {
        let (rest_bytes, moment_bytes) = format.bytes(count);
        let filled = |bytes: usize| {
            let mut region = rig.arena.alloc(bytes).expect("the arena has room for every part");
            rig.fill(region.bytes_mut());
            region
        };
        let zeros = || rig.tensor(DType::F32, &[moment_bytes.div_ceil(4)]).into_region();
        let gradient = Tensor::from_region(filled(count * dtype.size()), dtype, &[count]);
        let mut weight = Tensor::from_region(filled(count * dtype.size()), dtype, &[count]);
        let mut rest = (dtype != DType::F32).then(|| filled(rest_bytes));
        let (mut m, mut v) = (zeros(), zeros());
        let timing = rig.time(|| {
            let (weight, rest) = (weight.view_mut(), rest.as_mut().map(Region::bytes_mut));
            let (m, v) = (m.bytes_mut().slice(0, moment_bytes), v.bytes_mut().slice(0, moment_bytes));
            kernels.adam.update(&step, gradient.view(), AdamState { format, weight, rest, m, v })
        });
        let rest_bytes = if rest.is_some() { rest_bytes } else { 0 };
        let moved = 3 * count * dtype.size() + 2 * (rest_bytes + 2 * moment_bytes);
        report("adamw", &format!("{name} {count}"), "own", Work::Bytes(moved), &timing);
    }
    let (gradient, mut total) = (rig.random(&[count]), rig.tensor(DType::F64, &[1]));
    let timing = rig.time(|| kernels.sum_of_squares.add(gradient.view(), total.view_mut()));
    report("adamw", &format!("norm {count}"), "own", Work::Bytes(2 * count), &timing);
}
