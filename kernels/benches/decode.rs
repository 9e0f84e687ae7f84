//! Decoding: how near products of one or a few rows come to the rate at which the same threads only read the weights.
//!
//! Every round takes each measurement once, in turn, so that whatever else the machine does meets all of them; the medians
//! over the rounds are compared. `THREADS` (default 2), `ROUNDS` (default 15) and the inner size `L` (default 4096) are read from
//! the environment; with `BEST` set, the shortest times are compared instead of the medians. `W` weights (default 2²⁷: 72
//! MiB of int4, 136 of int8, 256 of bf16) are larger than a last-level cache. With `M` set, only so many rows are multiplied.

use std::time::Instant;
use terrace_device::Device;
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, Epilogue, KernelSet, MatmulSpec, QuantFormat, QuantizedView, Tensor, cpu};

fn setting(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Reads the bytes on as many threads as the products run on, each its own part.
fn read(bytes: &[u8], threads: usize) -> u64 {
    let words: &[u64] = bytemuck::cast_slice(bytes);
    std::thread::scope(|scope| {
        let parts: Vec<_> = words
            .chunks(words.len().div_ceil(threads))
            .map(|part| {
                scope.spawn(move || {
                    let mut sums = [0u64; 32];
                    for words in part.as_chunks::<32>().0 {
                        for (sum, word) in sums.iter_mut().zip(words) {
                            *sum ^= word;
                        }
                    }
                    sums.iter().fold(0, |all, sum| all ^ sum)
                })
            })
            .collect();
        parts.into_iter().map(|part| part.join().expect("a reader does not panic")).sum()
    })
}

/// The weights of one format, and the products with them.
struct Case<'a> {
    name: &'static str,
    format: Option<QuantFormat>,
    weights: &'a [u8],
    set: &'a KernelSet,
    threads: usize,
    dims: [usize; 2],
}

impl Case<'_> {
    fn product(&self, x: &Tensor, out: &mut Tensor) {
        let bytes = terrace_device::Bytes::from_host(self.weights);
        let result = match self.format {
            Some(format) => {
                let b = QuantizedView::new(bytes, format, &self.dims);
                self.set.quantized_matmul.matmul_nt(x.view(), b, out.view_mut(), Epilogue::NONE)
            }
            None => {
                let b = terrace_kernels::View::new(bytes, DType::BF16, &self.dims);
                self.set.matmul.matmul(x.view(), b, out.view_mut(), MatmulSpec::NT)
            }
        };
        result.expect("the product runs");
    }

    fn report(&self, rounds: usize, inputs: &mut [(usize, Tensor, Tensor)]) {
        let gigabytes = self.weights.len() as f64 / 1e9;
        let mut seconds = vec![Vec::new(); inputs.len() + 1];
        for _ in 0..rounds {
            let began = Instant::now();
            std::hint::black_box(read(self.weights, self.threads));
            seconds[0].push(began.elapsed().as_secs_f64());
            for ((_, x, out), seconds) in inputs.iter_mut().zip(&mut seconds[1..]) {
                let began = Instant::now();
                self.product(x, out);
                seconds.push(began.elapsed().as_secs_f64());
            }
        }
        let best = std::env::var_os("BEST").is_some();
        let rates: Vec<f64> = seconds
            .iter_mut()
            .map(|seconds| {
                seconds.sort_by(f64::total_cmp);
                gigabytes / seconds[if best { 0 } else { seconds.len() / 2 }]
            })
            .collect();
        print!("{:5} read {:5.1} GB/s", self.name, rates[0]);
        for ((m, _, _), rate) in inputs.iter().zip(&rates[1..]) {
            print!(" | m={m}: {rate:5.1} GB/s = {:.2}", rate / rates[0]);
        }
        println!();
    }
}

fn main() {
    // As one of the workspace's benchmarks under `--test`, it runs once, small.
    let is_test = std::env::args().any(|argument| argument == "--test");
    let (rounds, weights) = if is_test { (1, 1 << 20) } else { (15, 1 << 27) };
    let (threads, rounds, l) = (setting("THREADS", 2), setting("ROUNDS", rounds), setting("L", 4096));
    let n = setting("W", weights) / l;
    let arena = HostDevice::unified().arena(1 << 30).expect("a gigabyte of address space");
    let set = cpu::kernel_set(threads);
    let mut inputs: Vec<_> = [1, 2, 4, 8, 16]
        .into_iter()
        .filter(|m| setting("M", *m) == *m)
        .map(|m| {
            let mut x = Tensor::new(&arena, DType::BF16, &[m, l]).expect("the arena is large enough");
            let values: &mut [half::bf16] = bytemuck::cast_slice_mut(x.view_mut().into_bytes().into_host());
            values.fill(half::bf16::ONE);
            (m, x, Tensor::new(&arena, DType::BF16, &[m, n]).expect("the arena is large enough"))
        })
        .collect();
    for (name, format) in [
        ("bf16", None),
        ("int8", Some(QuantFormat::Int8)),
        ("int4", Some(QuantFormat::Int4)),
        ("mxfp4", Some(QuantFormat::Mxfp4)),
    ] {
        let bytes = format.map_or(2 * n * l, |format| format.bytes(&[n, l]));
        let mut memory = arena.alloc(bytes).expect("the arena is large enough");
        // Any bits are codes. They differ, because some hosts keep memory that repeats itself only once; as scales and bf16 they are
        // small numbers.
        let mut state = 1u64;
        for words in memory.bytes_mut().into_host().as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *words = (state & 0x3F7F_3F7F_3F7F_3F7F).to_le_bytes();
        }
        let weights = memory.bytes().host();
        Case { name, format, weights, set: &set, threads, dims: [n, l] }.report(rounds, &mut inputs);
    }
}
