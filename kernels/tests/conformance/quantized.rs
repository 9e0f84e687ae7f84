//! Products with quantized weights against the reference (f64 sums over the dequantized weights), and for many rows against the
//! product with the dequantized f32 matrix, whose bits they must have.
//!
//! Tolerance: as for [`matmul`](crate::matmul), since the weights are of deviation one too. For few rows the CPU takes activations of
//! sixteen bits as integers below 2¹⁵ times a power of two of their block, so that each that is no such multiple may be off by
//! half that power: times the magnitudes of the weights that meet it, that is what each result may be off besides.

use crate::cuda::on_device;
use crate::support::{Host, assert_within, backends};
use proptest::prelude::*;
use terrace_device::Bytes;
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::cuda::CudaConfig;
use terrace_kernels::{
    DType, Epilogue, KernelSet, MatmulSpec, QuantFormat, QuantizedView, Residual, dry, reference,
};

pub const FORMATS: [QuantFormat; 3] = [QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Mxfp4];

/// Rows of sixteen bits that the CPU multiplies as integers; of f32 it is half as many.
const FEW: usize = 16;

/// Activations that share a power of two.
const BLOCK: usize = 128;

/// Of each element of `a·bᵀ`.
pub fn tolerances(a: &Host, b: &Quantized) -> Vec<f64> {
    let [n, l] = b.dims;
    let (m, of_sum) = (a.dims()[0], l as f64 * 2f64.powi(-22) + 1e-7);
    if l == 0 || m > FEW || a.dtype() == DType::F32 {
        return vec![of_sum; m * n];
    }
    let (narrowing, weights) =
        (a.values().chunks(l).map(narrowing).collect::<Vec<_>>(), b.dequantized().values());
    let of = |narrowing: &[f64], weights: &[f64]| {
        of_sum + narrowing.iter().zip(weights).map(|(lost, w)| lost * w.abs()).sum::<f64>()
    };
    narrowing.iter().flat_map(|row| weights.chunks(l).map(|weights| of(row, weights))).collect()
}

/// What each of a row's activations may lose as an integer below 2¹⁵ times a power of two.
fn narrowing(row: &[f64]) -> Vec<f64> {
    let of_block = |block: &[f64]| {
        let largest = block.iter().fold(f64::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
        let quantum = 2f64.powi(largest.log2().floor() as i32 - 14);
        block.iter().map(|x| if x % quantum == 0.0 { 0.0 } else { quantum / 2.0 }).collect::<Vec<_>>()
    };
    row.chunks(BLOCK).flat_map(of_block).collect()
}

/// A matrix of deviation one and its codes.
pub struct Quantized {
    format: QuantFormat,
    dims: [usize; 2],
    bytes: Vec<u8>,
}

impl Quantized {
    pub fn random(format: QuantFormat, n: usize, l: usize, seed: u64) -> Self {
        let weights: Vec<f32> =
            Host::random(DType::F32, &[n, l], 1.0, seed).values().iter().map(|w| *w as f32).collect();
        let mut bytes = vec![0; format.bytes(&[n, l])];
        for (row, out) in weights.chunks(l.max(1)).zip(bytes.chunks_mut(format.row_bytes(l).max(1))) {
            format.quantize(row, out).unwrap();
        }
        Self { format, dims: [n, l], bytes }
    }

    pub fn view(&self) -> QuantizedView<'_> {
        QuantizedView::new(Bytes::from_host(&self.bytes), self.format, &self.dims)
    }

    pub fn dequantized(&self) -> Host {
        let [n, l] = self.dims;
        let mut values = vec![0.0; n * l];
        for (out, row) in values.chunks_mut(l).zip(self.bytes.chunks(self.format.row_bytes(l))) {
            self.format.dequantize(row, out);
        }
        Host::of(DType::F32, &self.dims, values.into_iter().map(f64::from))
    }
}

/// Those of all operations, and on the mock driver kernels for tensor cores.
fn sets() -> Vec<(String, KernelSet)> {
    let config = CudaConfig { own_products: true, plain_kernels: false };
    let tensor_cores = on_device(0, config).map(|set| ("cuda, tensor cores".to_owned(), set));
    backends().into_iter().chain(tensor_cores).collect()
}

fn compare(sets: &[(String, KernelSet)], size: (usize, usize, usize), a_dtype: DType, out_dtype: DType) {
    let (m, n, l) = size;
    let a = Host::random(a_dtype, &[m, l], 1.0, 1);
    for format in FORMATS {
        let b = Quantized::random(format, n, l, 2);
        let mut expected = Host::zeros(DType::F32, &[m, n]);
        let reference = reference::kernel_set().quantized_matmul;
        reference.matmul_nt(a.view(), b.view(), expected.view_mut(), Epilogue::NONE).unwrap();
        let tolerances = tolerances(&a, &b);
        for (name, set) in sets {
            let mut out = Host::random(out_dtype, &[m, n], 1.0, 3);
            set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
            let what = format!("{name}: {format} {size:?} {a_dtype} {out_dtype}");
            assert_within(&what, &expected, &out, &tolerances);
        }
    }
}

/// The reference is the dense reference on the dequantized weights.
#[test]
fn the_reference_is_the_dense_one() {
    let a = Host::random(DType::F32, &[3, 150], 1.0, 1);
    for format in FORMATS {
        let b = Quantized::random(format, 7, 150, 2);
        let set = reference::kernel_set();
        let (mut dense, mut quantized) = (Host::zeros(DType::F32, &[3, 7]), Host::zeros(DType::F32, &[3, 7]));
        set.matmul.matmul(a.view(), b.dequantized().view(), dense.view_mut(), MatmulSpec::NT).unwrap();
        set.quantized_matmul.matmul_nt(a.view(), b.view(), quantized.view_mut(), Epilogue::NONE).unwrap();
        assert_eq!(dense.bytes(), quantized.bytes(), "{format}");
    }
}

#[test]
fn every_odd_size() {
    let sets = sets();
    for m in [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17] {
        compare(&sets, (m, 3 * m + 2, 133), DType::BF16, DType::F32);
    }
    for l in [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257, 640] {
        compare(&sets, (1, 37, l), DType::BF16, DType::BF16);
        compare(&sets, (3, 5, l), DType::F32, DType::F32);
        compare(&sets, (2, 5, l), DType::F16, DType::F32);
        compare(&sets, (19, 50, l), DType::F16, DType::F16);
    }
}

/// Every code of four bits at every place of a block, among them the one that quantizing to mxfp4 never writes: products with rows
/// that have a single one are the weights themselves, of few rows and of many.
#[test]
fn every_code_at_every_place() {
    let single: Vec<f64> = (0..BLOCK * BLOCK).map(|i| f64::from(u8::from(i / BLOCK == i % BLOCK))).collect();
    let a = Host::of(DType::BF16, &[BLOCK, BLOCK], single);
    for format in [QuantFormat::Int4, QuantFormat::Mxfp4] {
        let block = |row: u8| {
            let scales = [0.5f32, 0.125, 4.0, 1.0].map(|s| ((s.to_bits() >> 16) as u16).to_le_bytes());
            let codes = (0..64u8).map(move |i| ((i + i / 16 + row) % 16) | (((i / 4 * 3 + row) % 16) << 4));
            scales.into_iter().flatten().chain(codes).collect::<Vec<u8>>()
        };
        let b = Quantized { format, dims: [16, BLOCK], bytes: (0..16).flat_map(block).collect() };
        let weights = b.dequantized().values();
        let expected: Vec<f64> = (0..BLOCK * 16).map(|i| weights[i % 16 * BLOCK + i / 16]).collect();
        for (name, set) in sets() {
            for m in [1, 8, 16, BLOCK] {
                let mut found = Vec::new();
                for first in (0..BLOCK).step_by(m) {
                    let mut out = Host::zeros(DType::F32, &[m, 16]);
                    set.quantized_matmul
                        .matmul_nt(a.view().rows(first, first + m), b.view(), out.view_mut(), Epilogue::NONE)
                        .unwrap();
                    found.extend(out.values());
                }
                assert_eq!(found, expected, "{name}: {format}, {m} rows");
            }
        }
    }
}

/// A sum in which the rounding of a few activations adds up.
#[test]
fn few_that_are_rounded_the_same_way() {
    compare(&sets(), (14, 59, 34), DType::BF16, DType::F32);
}

/// Several tiles in both directions, and rows of several stretches.
#[test]
fn larger_than_a_tile() {
    compare(&sets(), (200, 500, 300), DType::BF16, DType::BF16);
    compare(&sets(), (3, 20, 2500), DType::BF16, DType::F32);
    // Of whole vectors, and so long that every warp comes back to the registers that it began with.
    for m in [3, 12, 20] {
        compare(&sets(), (m, 20, 2504), DType::BF16, DType::F32);
    }
}

/// Rows that begin at multiples of sixteen bytes, which kernels for tensor cores take: all, a part and none of a tile is there, of a
/// block of weights, and of what a warp has of them.
#[test]
fn rows_of_whole_vectors() {
    let sets = sets();
    for (m, n) in
        [(1, 1), (5, 16), (8, 17), (9, 23), (16, 8), (17, 40), (33, 9), (64, 66), (65, 63), (130, 129)]
    {
        for (l, a_dtype, out_dtype) in [
            (8, DType::BF16, DType::F32),
            (136, DType::F16, DType::F32),
            (408, DType::BF16, DType::BF16),
            (1304, DType::F16, DType::F16),
        ] {
            compare(&sets, (m, n, l), a_dtype, out_dtype);
        }
    }
}

#[test]
fn what_is_added() {
    let (n, l) = (43, 264);
    for m in [1, 12, 64, 70] {
        let a = Host::random(DType::BF16, &[m, l], 1.0, 1);
        for (format, dtype) in FORMATS.into_iter().flat_map(|f| [(f, DType::BF16), (f, DType::F32)]) {
            let b = Quantized::random(format, n, l, 2);
            let (bias, residual) = (Host::random(dtype, &[n], 1.0, 4), Host::random(dtype, &[m, n], 1.0, 5));
            let added = Epilogue { bias: Some(bias.view()), residual: Residual::Of(residual.view()) };
            let of = |set: &KernelSet, dtype| {
                let mut out = Host::zeros(dtype, &[m, n]);
                set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), added).unwrap();
                out
            };
            let expected = of(&reference::kernel_set(), DType::F32);
            for (name, set) in sets() {
                let what = format!("{name}: {format} {m} {dtype}");
                assert_within(&what, &expected, &of(&set, dtype), &tolerances(&a, &b));
            }
        }
    }
}

/// What the last rows are changes no bit of the others, as many as there are of a kind of kernel.
#[test]
fn a_row_depends_on_no_other() {
    let (n, l) = (37, 264);
    for (name, set) in sets() {
        for (format, m) in FORMATS.into_iter().flat_map(|format| [2, 8, 15, 40, 100].map(|m| (format, m))) {
            let b = Quantized::random(format, n, l, 2);
            let of = |a: &Host| {
                let mut out = Host::zeros(DType::F32, &[m, n]);
                set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
                out.values()[..(m - 1) * n].to_vec()
            };
            let a = Host::random(DType::BF16, &[m, l], 1.0, 1);
            let mut values = a.values();
            values[(m - 1) * l..].fill(f64::NAN);
            let other = Host::of(DType::BF16, &[m, l], values);
            assert_eq!(of(&a), of(&other), "{name}: {format} {m}");
        }
    }
}

#[test]
fn empty_sizes() {
    for (name, set) in sets() {
        for format in FORMATS {
            let (a, b) = (Host::zeros(DType::F32, &[3, 0]), Quantized::random(format, 4, 0, 1));
            let mut out = Host::random(DType::F32, &[3, 4], 1.0, 1);
            set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
            assert!(out.values().iter().all(|x| *x == 0.0), "{name}");
            let (a, b) = (Host::zeros(DType::F32, &[0, 5]), Quantized::random(format, 4, 5, 1));
            let mut none = Host::zeros(DType::F32, &[0, 4]);
            set.quantized_matmul.matmul_nt(a.view(), b.view(), none.view_mut(), Epilogue::NONE).unwrap();
        }
    }
}

/// Many rows: weights are exact in f32 and added in the order of the dense product, so not a bit differs.
#[test]
fn the_bits_of_the_dense_product() {
    for isa in Isa::available() {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) });
        for (m, n, l) in [(FEW + 1, 40, 144), (20, 33, 128), (100, 90, 530)] {
            let a = Host::random(DType::BF16, &[m, l], 1.0, 1);
            for format in FORMATS {
                let b = Quantized::random(format, n, l, 2);
                let (mut dense, mut quantized) =
                    (Host::zeros(DType::F32, &[m, n]), Host::zeros(DType::F32, &[m, n]));
                set.matmul
                    .matmul(a.view(), b.dequantized().view(), dense.view_mut(), MatmulSpec::NT)
                    .unwrap();
                set.quantized_matmul
                    .matmul_nt(a.view(), b.view(), quantized.view_mut(), Epilogue::NONE)
                    .unwrap();
                assert_eq!(dense.bytes(), quantized.bytes(), "{}: {format} {m} {n} {l}", isa.name());
            }
        }
    }
}

/// Few rows, activations over many powers of two and some that stand out: every sum is within what the rounding of activations
/// to 2⁻¹⁵ (of f32 2⁻³⁰) of the largest of their 128 and an f32 sum allow.
#[test]
fn activations_that_stand_out_cost_others_no_more_than_their_block() {
    let (l, n) = (700, 40);
    let mut wide = Host::random(DType::F32, &[2, l], 1.0, 1).values();
    for (i, x) in wide.iter_mut().enumerate() {
        *x *= f64::from(2f32.powi([0, -9, -20, 5][i / 3 % 4])) * if i % 97 == 0 { 300.0 } else { 1.0 };
    }
    for (isa, format, (dtype, lost)) in Isa::available().into_iter().flat_map(|isa| {
        let dtypes = [(DType::F32, -30), (DType::BF16, -15)];
        FORMATS.into_iter().flat_map(move |format| dtypes.map(|dtype| (isa, format, dtype)))
    }) {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) });
        let (a, b) = (Host::of(dtype, &[2, l], wide.iter().copied()), Quantized::random(format, n, l, 2));
        let mut out = Host::zeros(DType::F32, &[2, n]);
        set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
        let (a, b, out) = (a.values(), b.dequantized().values(), out.values());
        for (m, a) in a.chunks(l).enumerate() {
            for (j, b) in b.chunks(l).enumerate() {
                let (mut exact, mut allowed) = (0.0, 0.0);
                for (a, b) in a.chunks(128).zip(b.chunks(128)) {
                    let largest = a.iter().fold(0.0f64, |largest, a| largest.max(a.abs()));
                    for (a, b) in a.iter().zip(b) {
                        exact += a * b;
                        allowed += (largest * 2f64.powi(lost) + 16.0 * a.abs() * 2f64.powi(-24)) * b.abs();
                    }
                }
                let error = (out[m * n + j] - exact).abs();
                let name = isa.name();
                assert!(error <= allowed, "{name} {format} {dtype} [{m}, {j}]: {error:e} > {allowed:e}");
            }
        }
    }
}

/// What is no number in a row is none in its results, and nowhere else; the smallest and the largest numbers are as good as others.
#[test]
fn extreme_activations() {
    for isa in Isa::available() {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(1) });
        for format in FORMATS {
            let b = Quantized::random(format, 3, 200, 2);
            let mut values = vec![1.0; 3 * 200];
            values[7] = f64::INFINITY;
            values[2 * 200 + 150] = f64::NAN;
            let a = Host::of(DType::F32, &[3, 200], values.iter().copied());
            let mut out = Host::zeros(DType::F32, &[3, 3]);
            set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
            let finite: Vec<bool> = out.values().iter().map(|x| x.is_finite()).collect();
            let rows = [[false; 3], [true; 3], [false; 3]];
            assert_eq!(finite, rows.concat(), "{} {format}", isa.name());
            let results = [1.0, f64::from(f32::MIN_POSITIVE), 2f64.powi(-118), 2f64.powi(119)].map(|x| {
                let a = Host::of(DType::F32, &[1, 200], std::iter::repeat_n(x, 200));
                let mut out = Host::zeros(DType::F32, &[1, 3]);
                set.quantized_matmul.matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE).unwrap();
                out.values().iter().map(|y| y / x).collect::<Vec<_>>()
            });
            assert_eq!(results[0], results[2], "{} {format}", isa.name());
            assert_eq!(results[0], results[3], "{} {format}", isa.name());
            // Sums below the normal numbers are rounded.
            let close = results[0].iter().zip(&results[1]).all(|(a, b)| (a - b).abs() < 1e-3);
            assert!(close, "{} {format}: {:?}", isa.name(), results);
        }
    }
}

/// Few rows: what the other rows of a are changes nothing.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    for (isa, (dtype, few)) in
        Isa::available().into_iter().flat_map(|isa| [(isa, (DType::F32, FEW / 2)), (isa, (DType::BF16, FEW))])
    {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) });
        let a = Host::random(dtype, &[few, 900], 1.0, 1);
        for format in FORMATS {
            let b = Quantized::random(format, 45, 900, 2);
            let mut ones = Vec::new();
            for m in 1..=few {
                let mut all = Host::zeros(DType::F32, &[m, 45]);
                set.quantized_matmul
                    .matmul_nt(a.view().rows(0, m), b.view(), all.view_mut(), Epilogue::NONE)
                    .unwrap();
                let mut one = Host::zeros(DType::F32, &[1, 45]);
                set.quantized_matmul
                    .matmul_nt(a.view().rows(m - 1, m), b.view(), one.view_mut(), Epilogue::NONE)
                    .unwrap();
                ones.extend_from_slice(one.bytes());
                assert!(all.bytes() == ones, "{}: {format} {dtype}, {m} rows", isa.name());
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    for isa in Isa::available() {
        for (m, n, l) in [(1, 1000, 700), (5, 300, 260), (40, 500, 300)] {
            let a = Host::random(DType::BF16, &[m, l], 1.0, 1);
            for format in FORMATS {
                let b = Quantized::random(format, n, l, 2);
                let run = |threads| {
                    let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(threads) });
                    let mut out = Host::zeros(DType::F32, &[m, n]);
                    set.quantized_matmul
                        .matmul_nt(a.view(), b.view(), out.view_mut(), Epilogue::NONE)
                        .unwrap();
                    out
                };
                let one = run(1);
                for threads in [2, 3, 8] {
                    assert_eq!(one.bytes(), run(threads).bytes(), "{} {format} {threads}", isa.name());
                }
            }
        }
    }
}

#[test]
fn the_dry_backend_counts_the_bytes_of_the_codes() {
    let (set, counter) = dry::kernel_set();
    let arena = terrace_device::Arena::virtual_memory();
    let a = terrace_kernels::Tensor::new(&arena, DType::BF16, &[2, 130]).unwrap();
    let mut out = terrace_kernels::Tensor::new(&arena, DType::F32, &[2, 7]).unwrap();
    for (format, bytes) in FORMATS.into_iter().zip([7 * 2 * 136, 7 * 2 * 72, 7 * 2 * 72]) {
        counter.reset();
        let b = QuantizedView::new(Bytes::virtual_range(bytes), format, &[7, 130]);
        set.quantized_matmul.matmul_nt(a.view(), b, out.view_mut(), Epilogue::NONE).unwrap();
        let totals = counter.totals();
        assert_eq!(totals.matmul_flops, 2 * 2 * 7 * 130);
        assert_eq!(totals.bytes as usize, bytes + 2 * 2 * 130 + 4 * 2 * 7, "{format}");
    }
}

#[test]
#[should_panic(expected = "inner sizes")]
fn wrong_shapes_are_refused() {
    let b = Quantized::random(QuantFormat::Int8, 5, 6, 1);
    let mut out = Host::zeros(DType::F32, &[3, 5]);
    let set = cpu::kernel_set(1);
    let _ = set.quantized_matmul.matmul_nt(
        Host::zeros(DType::F32, &[3, 4]).view(),
        b.view(),
        out.view_mut(),
        Epilogue::NONE,
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(m in 1usize..30, n in 1usize..130, l in 1usize..600) {
        compare(&sets(), (m, n, l), DType::BF16, DType::F32);
    }
}
