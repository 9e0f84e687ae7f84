//! Large products and attention as shares of what the processor's multipliers can do, measured in the same run.
//!
//! ```text
//! cargo bench -p terrace-kernels --bench roofline            a table
//! cargo bench -p terrace-kernels --bench roofline -- json    a line of JSON for each row, for scripts/beside_torch.py
//! ```
//!
//! `THREADS` is the number of threads (default: 2), `SECONDS` the time for each row (default: 1), `ROWS` a part of the names of those
//! that are wanted, with the type behind: `ROWS='NT bf16'`. `ISA=avx2` takes that instruction set and its peak instead of the best.

use half::bf16;
use std::time::Instant;
use terrace_device::host::HostDevice;
use terrace_device::{Arena, Device};
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::{AttentionSpec, DType, KernelSet, KeyValues, MatmulSpec, Tensor};

const PRODUCTS: [[usize; 3]; 2] = [[4096, 4096, 4096], [512, 2048, 2048]];
/// Positions and head size; as many heads as make 1024 columns.
const ATTENTIONS: [(usize, usize); 2] = [(2048, 64), (2048, 128)];
const COLUMNS: usize = 1024;

fn main() {
    // As one of the workspace's benchmarks under `--test`, it runs each row once, small.
    let once = std::env::args().any(|argument| argument == "--test");
    let json = std::env::args().any(|argument| argument == "json");
    let setting = |name: &str| std::env::var(name).ok();
    let threads = setting("THREADS").and_then(|text| text.parse().ok()).unwrap_or(2);
    let seconds = setting("SECONDS").and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let seconds = if once { 0.0 } else { seconds };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let rows = setting("ROWS").unwrap_or_default();
    let isa = setting("ISA").map(|name| {
        let found = Isa::available().into_iter().find(|isa| isa.name() == name);
        found.unwrap_or_else(|| panic!("this processor has no ISA={name}"))
    });
    let set = cpu::with_config(CpuConfig { isa, ..CpuConfig::new(threads) });
    let isa = isa.unwrap_or_else(Isa::best).name();
    Bench { set, isa, pool, seconds, json, rows }.run(if once { 16 } else { 1 });
}

struct Bench {
    set: KernelSet,
    isa: &'static str,
    pool: rayon::ThreadPool,
    seconds: f64,
    json: bool,
    rows: String,
}

impl Bench {
    /// Every row, with sizes divided by `part`.
    fn run(&self, part: usize) {
        for dtype in [DType::F32, DType::BF16] {
            for dims in PRODUCTS {
                let [m, n, l] = dims.map(|size| size / part);
                for (name, spec) in
                    [("NT", MatmulSpec::NT), ("NN", MatmulSpec::NN), ("TN", MatmulSpec::TN_ACCUMULATE)]
                {
                    self.product(&format!("{m}x{n}x{l} {name}"), [m, n, l], dtype, spec);
                }
            }
            for (positions, head) in ATTENTIONS {
                self.attention(positions / part, head, dtype);
            }
        }
    }

    fn product(&self, name: &str, [m, n, l]: [usize; 3], dtype: DType, spec: MatmulSpec) {
        let arena = arena(4 * (m * l + n * l + m * n) + (1 << 16));
        let a = tensor(&arena, dtype, &if spec.trans_a { [l, m] } else { [m, l] });
        let b = tensor(&arena, dtype, &if spec.trans_b { [n, l] } else { [l, n] });
        let mut out = tensor(&arena, if spec.accumulate { DType::F32 } else { dtype }, &[m, n]);
        self.row(name, dtype, 2.0 * (m * n * l) as f64, || {
            self.set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).expect("a product");
        });
    }

    fn attention(&self, positions: usize, head: usize, dtype: DType) {
        let heads = COLUMNS / head;
        let arena = arena(9 * 4 * positions * COLUMNS + (1 << 20));
        let spec =
            AttentionSpec { scale: (head as f32).sqrt().recip(), window: None, cap: None, chunk: None };
        let new = || tensor(&arena, dtype, &[1, positions, heads, head]);
        let (q, k, v, dout) = (new(), new(), new(), new());
        let (mut out, mut dq, mut dk, mut dv) = (new(), new(), new(), new());
        let starts = zeros(&arena, DType::I32, &[1]);
        let mut lse = zeros(&arena, DType::F32, &[1, heads, positions]);
        let mut run = |backward: bool| {
            let (q, k, v, attention) = (q.view(), k.view(), v.view(), &self.set.attention);
            attention
                .forward(q, KeyValues::rows(k, v), starts.view(), out.view_mut(), lse.view_mut(), spec)
                .expect("forward");
            if backward {
                let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
                attention
                    .backward(q, k, v, out.view(), lse.view(), dout.view(), dq, dk, dv, spec)
                    .expect("backward");
            }
        };
        let name = format!("attention {positions}x{head}");
        // Of the causal half: two products forward, five backward.
        let pairs = (COLUMNS * positions * (positions + 1) / 2) as f64;
        self.row(&format!("{name} forward"), dtype, 4.0 * pairs, || run(false));
        self.row(&format!("{name} both"), dtype, 14.0 * pairs, || run(true));
    }

    /// Medians of as many passes as there is time for, three at least after a first. The multipliers are measured before each
    /// pass, because a shared machine's speed drifts.
    fn row(&self, name: &str, dtype: DType, operations: f64, mut work: impl FnMut()) {
        if !format!("{name} {dtype}").contains(&self.rows) {
            return;
        }
        work();
        let (began, mut rates, mut shares) = (Instant::now(), Vec::new(), Vec::new());
        while rates.len() < 3 || began.elapsed().as_secs_f64() < self.seconds {
            let peak = self.peak(dtype);
            let pass = Instant::now();
            work();
            let rate = operations / pass.elapsed().as_secs_f64();
            rates.push(rate);
            shares.push(peak.map_or(f64::NAN, |peak| rate / peak));
        }
        let (rate, share) = (median(rates) / 1e9, median(shares));
        if self.json {
            println!(r#"{{"row":"{name}","dtype":"{dtype}","gflops":{rate:.2},"share_of_peak":{share:.4}}}"#);
        } else {
            println!("{name:<28} {dtype:<5} {rate:>9.1} GFLOP/s  {share:.3} of peak");
        }
    }

    /// Operations per second of independent multiplications and additions in registers, if the processor has the instructions.
    fn peak(&self, dtype: DType) -> Option<f64> {
        // Where bf16 is multiplied as it is, twice what f32 makes; elsewhere it is widened.
        let multiply = match (self.isa, dtype) {
            ("avx2", _) => peak::avx2,
            ("avx512bf16", DType::BF16) => peak::avx512_bf16,
            _ => peak::avx512,
        };
        let began = Instant::now();
        let operations = self.pool.broadcast(|_| multiply()).into_iter().sum::<Option<u64>>()?;
        Some(operations as f64 / began.elapsed().as_secs_f64())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn arena(bytes: usize) -> Arena {
    HostDevice::unified().arena(bytes).expect("address space")
}

fn zeros(arena: &Arena, dtype: DType, dims: &[usize]) -> Tensor {
    let mut tensor = Tensor::new(arena, dtype, dims).expect("the arena is large enough");
    tensor.view_mut().into_bytes().into_host().fill(0);
    tensor
}

/// Small numbers of either sign: a processor draws less power for zeros, and runs faster.
fn tensor(arena: &Arena, dtype: DType, dims: &[usize]) -> Tensor {
    let mut tensor = zeros(arena, dtype, dims);
    let bytes = tensor.view_mut().into_bytes().into_host();
    let value = |at: usize| (at.wrapping_mul(2_654_435_761) % 1000) as f32 / 1000.0 - 0.5;
    match dtype {
        DType::F32 => {
            let floats: &mut [f32] = bytemuck::cast_slice_mut(bytes);
            floats.iter_mut().enumerate().for_each(|(at, out)| *out = value(at));
        }
        _ => {
            let floats: &mut [bf16] = bytemuck::cast_slice_mut(bytes);
            floats.iter_mut().enumerate().for_each(|(at, out)| *out = bf16::from_f32(value(at)));
        }
    }
    tensor
}

/// Chains of multiplications that wait for nothing but the multipliers; they give the number of operations, or nothing where the
/// processor has no such instructions.
mod peak {
    const ROUNDS: u64 = 1 << 21;

    /// What runs the chains, if the processor has the features.
    macro_rules! peak {
        ($name:ident, $($feature:tt),+) => {
            pub fn $name() -> Option<u64> {
                #[cfg(target_arch = "x86_64")]
                if $(is_x86_feature_detected!($feature))&&+ {
                    // SAFETY: just detected.
                    return Some(unsafe { x86::$name() });
                }
                None
            }
        };
    }
    peak!(avx2, "avx2", "fma");
    peak!(avx512, "avx512f");
    peak!(avx512_bf16, "avx512bf16");

    #[cfg(target_arch = "x86_64")]
    mod x86 {
        use super::ROUNDS;
        use std::arch::x86_64::*;
        use std::hint::black_box;

        /// As many as hide the latency of two multipliers, and as fit in registers.
        const CHAINS: usize = 12;

        macro_rules! chains {
            ($name:ident, $features:literal, $zero:ident, $factors:expr, $multiply:expr, $operations:literal) => {
                #[target_feature(enable = $features)]
                pub fn $name() -> u64 {
                    let mut sums = [$zero(); CHAINS];
                    let factors = $factors;
                    for _ in 0..ROUNDS {
                        for sum in &mut sums {
                            *sum = $multiply(*sum, factors);
                        }
                    }
                    black_box(sums);
                    ROUNDS * CHAINS as u64 * $operations
                }
            };
        }

        chains!(
            avx2,
            "avx2,fma",
            _mm256_setzero_ps,
            black_box(_mm256_set1_ps(0.5)),
            |sum, factor| _mm256_fmadd_ps(sum, factor, factor),
            16
        );
        chains!(
            avx512,
            "avx512f",
            _mm512_setzero_ps,
            black_box(_mm512_set1_ps(0.5)),
            |sum, factor| _mm512_fmadd_ps(sum, factor, factor),
            32
        );
        chains!(
            avx512_bf16,
            "avx512f,avx512bf16",
            _mm512_setzero_ps,
            // SAFETY: 64 bytes of either type.
            black_box(unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi16(0x3e80)) }),
            |sum, pairs| _mm512_dpbf16_ps(sum, pairs, pairs),
            64
        );
    }
}
