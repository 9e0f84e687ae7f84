//! Products with what is added to them, dense and quantized, against the reference, and what holds between the ways to add.
//!
//! Tolerance: that of the product, and for each number added one rounding in f32 of a sum of order √L.

use crate::support::{Host, Random, assert_within, backends, backends_and_pairs, isas_and_pairs, unit};
use crate::{matmul, quantized};
use proptest::prelude::*;
use terrace_kernels::cpu::{self, CpuConfig};
use terrace_kernels::{DType, Epilogue, KernelSet, MatmulSpec, QuantFormat, Residual, reference};

/// What there is to add, and where a residual lies.
#[derive(Debug, Clone, Copy)]
struct Case {
    bias: Option<DType>,
    residual: Place,
}

#[derive(Debug, Clone, Copy)]
enum Place {
    Nowhere,
    Result,
    Elsewhere(DType),
}

/// The dtypes of the operands, of the result and of what is added.
const MIXES: [(DType, DType, DType); 7] = [
    (DType::F32, DType::F32, DType::F32),
    (DType::BF16, DType::BF16, DType::BF16),
    (DType::F16, DType::F16, DType::F16),
    (DType::BF16, DType::F32, DType::F32),
    (DType::BF16, DType::BF16, DType::F32),
    (DType::BF16, DType::F32, DType::BF16),
    (DType::F32, DType::BF16, DType::F16),
];

fn cases(added: DType) -> [Case; 6] {
    let (bias, elsewhere) = (Some(added), Place::Elsewhere(added));
    [
        Case { bias, residual: Place::Nowhere },
        Case { bias: None, residual: Place::Result },
        Case { bias: None, residual: elsewhere },
        Case { bias, residual: Place::Result },
        Case { bias, residual: elsewhere },
        Case { bias: None, residual: Place::Nowhere },
    ]
}

/// The operands of a product and what may be added to it.
struct Operands {
    a: Host,
    b: Host,
    codes: [quantized::Quantized; 3],
    bias: Host,
    old: Host,
    size: (usize, usize, usize),
}

/// Which product.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Dense,
    Quantized(usize),
}

impl Operands {
    fn random((m, n, l): (usize, usize, usize), dtype: DType) -> Self {
        Self {
            a: Host::random(dtype, &[m, l], 1.0, 1),
            b: Host::random(dtype, &[n, l], 1.0, 2),
            codes: quantized::FORMATS.map(|format| quantized::Quantized::random(format, n, l, 2)),
            bias: Host::random(DType::F32, &[n], 1.0, 3),
            old: Host::random(DType::F32, &[m, n], 1.0, 4),
            size: (m, n, l),
        }
    }

    /// The product by `set` of `kind`, with what `case` says, in `out`.
    fn run(&self, set: &KernelSet, kind: Kind, case: Case, out: DType) -> Host {
        let bias = case.bias.map(|dtype| self.bias.cast(dtype));
        let elsewhere = match case.residual {
            Place::Elsewhere(dtype) => Some(self.old.cast(dtype)),
            Place::Nowhere | Place::Result => None,
        };
        let residual = match (&elsewhere, case.residual) {
            (Some(residual), _) => Residual::Of(residual.view()),
            (None, Place::Result) => Residual::InPlace,
            (None, _) => Residual::None,
        };
        let epilogue = Epilogue { bias: bias.as_ref().map(Host::view), residual };
        let mut out = self.old.cast(out);
        self.product(set, kind, &mut out, epilogue);
        out
    }

    fn product(&self, set: &KernelSet, kind: Kind, out: &mut Host, epilogue: Epilogue<'_>) {
        let (a, out) = (self.a.view(), out.view_mut());
        match kind {
            Kind::Dense => set.matmul.matmul_nt(a, self.b.view(), out, epilogue).unwrap(),
            Kind::Quantized(format) => {
                set.quantized_matmul.matmul_nt(a, self.codes[format].view(), out, epilogue).unwrap();
            }
        }
    }

    /// The reference's f32 result for what `set` is given: a residual in place has the result's dtype.
    fn expected(&self, kind: Kind, case: Case, out: DType) -> Host {
        let residual = match case.residual {
            Place::Result => Place::Elsewhere(out),
            other => other,
        };
        self.run(&reference::kernel_set(), kind, Case { residual, ..case }, DType::F32)
    }

    /// What cuBLASLt may be off by, besides, since it rounds results of 16 bits before it adds some residuals and biases.
    fn rounded_before(&self, case: Case, out: DType) -> Vec<f64> {
        let nothing = Case { bias: None, residual: Place::Nowhere };
        let product = self.expected(Kind::Dense, nothing, out).values();
        let Case { bias, residual } = case;
        let added = f64::from(u8::from(bias.is_some()) + u8::from(!matches!(residual, Place::Nowhere)));
        let unit = if out == DType::F32 { 0.0 } else { 1.01 * unit(out) };
        let (bias, old) = (self.bias.values(), self.old.values());
        let largest = |i: usize| product[i].abs() + bias[i % bias.len()].abs() + old[i].abs();
        (0..product.len()).map(|i| added * unit * largest(i)).collect()
    }

    fn tolerances(&self, kind: Kind) -> Vec<f64> {
        let (m, n, l) = self.size;
        let of_products = match kind {
            Kind::Dense => vec![matmul::tolerance(l); m * n],
            Kind::Quantized(format) => quantized::tolerances(&self.a, &self.codes[format]),
        };
        let of_epilogue = 2f64.powi(-20) * (l as f64).sqrt() + 2f64.powi(-21);
        of_products.iter().map(|of_product| of_product + of_epilogue).collect()
    }
}

const KINDS: [Kind; 4] = [Kind::Dense, Kind::Quantized(0), Kind::Quantized(1), Kind::Quantized(2)];

fn compare(
    sets: &[(String, KernelSet)],
    size: (usize, usize, usize),
    mix: (DType, DType, DType),
    kinds: &[Kind],
) {
    let operands = Operands::random(size, mix.0);
    for (kind, case) in kinds.iter().flat_map(|kind| cases(mix.2).map(|case| (*kind, case))) {
        let expected = operands.expected(kind, case, mix.1);
        let tolerances = operands.tolerances(kind);
        for (name, set) in sets {
            let out = operands.run(set, kind, case, mix.1);
            let what = format!("{name}: {kind:?} {size:?} {mix:?} {case:?}");
            let mut tolerances = tolerances.clone();
            if name.contains("cuBLASLt") && matches!(kind, Kind::Dense) {
                let more = operands.rounded_before(case, mix.1);
                tolerances.iter_mut().zip(more).for_each(|(tolerance, more)| *tolerance += more);
            }
            assert_within(&what, &expected, &out, &tolerances);
        }
    }
}

#[test]
fn every_dtype_and_path() {
    let sets = backends_and_pairs();
    for mix in MIXES {
        for size in [(1, 1, 1), (1, 50, 40), (5, 7, 3), (12, 49, 33), (21, 101, 300)] {
            compare(&sets, size, mix, &KINDS);
        }
    }
}

#[test]
fn every_odd_size() {
    let sets = backends_and_pairs();
    for m in 1..=18 {
        compare(&sets, (m, 3 * m + 1, 33), (DType::BF16, DType::BF16, DType::BF16), &KINDS);
    }
    for l in [0, 7, 16, 255, 257, 513] {
        compare(&sets, (9, 20, l), (DType::F32, DType::F32, DType::F32), &[Kind::Dense]);
        compare(&sets, (19, 20, l), (DType::F32, DType::F32, DType::F32), &KINDS);
    }
}

/// Several tiles in both directions, and rows of several runs.
#[test]
fn larger_than_a_tile() {
    let sets = backends_and_pairs();
    compare(&sets, (200, 500, 40), (DType::BF16, DType::BF16, DType::BF16), &KINDS);
    compare(&sets, (50, 1000, 15), (DType::F32, DType::F32, DType::F32), &[Kind::Dense]);
}

#[test]
fn empty_sizes() {
    for (m, n) in [(0, 5), (3, 0)] {
        compare(&backends_and_pairs(), (m, n, 4), (DType::BF16, DType::BF16, DType::BF16), &KINDS);
    }
}

/// Where the residual lies changes no bit, and without an epilogue there are those of the product alone.
#[test]
fn where_a_residual_lies_changes_nothing() {
    for (name, set) in backends_and_pairs() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // Of whole vectors, too, since cuBLASLt has kernels of their own for them.
            let sizes = [(1, 70, 130), (3, 70, 130), (40, 70, 130), (7, 64, 2048), (256, 64, 384)];
            for (size, kind) in sizes.into_iter().flat_map(|size| KINDS.map(|kind| (size, kind))) {
                let operands = Operands::random(size, dtype);
                for bias in [None, Some(dtype)] {
                    let [place, other] = [Place::Result, Place::Elsewhere(dtype)]
                        .map(|residual| operands.run(&set, kind, Case { bias, residual }, dtype));
                    assert!(place.bytes() == other.bytes(), "{name}: {kind:?} {dtype} {size:?} {bias:?}");
                }
                if let Kind::Dense = kind {
                    let (mut one, mut other) = (operands.old.cast(dtype), operands.old.cast(dtype));
                    let (a, b) = (operands.a.view(), operands.b.view());
                    set.matmul.matmul(a, b, one.view_mut(), MatmulSpec::NT).unwrap();
                    set.matmul.matmul_nt(a, b, other.view_mut(), Epilogue::NONE).unwrap();
                    assert!(one.bytes() == other.bytes(), "{name}: {dtype} {size:?}");
                }
            }
        }
    }
}

/// A sum between two bf16, and a residual that decides: rounded twice it would be lost.
#[test]
fn results_are_rounded_once() {
    // cuBLASLt may round before it adds.
    for (name, set) in backends_and_pairs().into_iter().filter(|(name, _)| !name.contains("cuBLASLt")) {
        for (m, dtype) in [1, 4, 20].into_iter().flat_map(|m| [(m, DType::BF16), (m, DType::F16)]) {
            let last = if dtype == DType::BF16 { 7 } else { 10 };
            let half = 2f64.powi(-last - 1);
            let a = Host::of(dtype, &[m, 2], [1.0, half].into_iter().cycle().take(2 * m));
            let b = Host::of(dtype, &[9, 2], [1.0; 18]);
            let little = Host::of(dtype, &[m, 9], std::iter::repeat_n(half / 4.0, 9 * m));
            let bias = Host::of(dtype, &[9], [half / 4.0; 9]);
            for (bias, residual) in [
                (Some(bias.view()), Residual::None),
                (None, Residual::Of(little.view())),
                (Some(bias.view()), Residual::Of(little.view())),
            ] {
                let mut out = Host::zeros(dtype, &[m, 9]);
                let epilogue = Epilogue { bias, residual };
                set.matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue).unwrap();
                let up = 1.0 + 2f64.powi(-last);
                assert!(out.values().iter().all(|x| *x == up), "{name}: {dtype} {m}");
            }
        }
    }
}

/// On the CPU an f32 result is that of the passes which an epilogue stands for, bit by bit, on every path.
#[test]
fn passes_of_their_own_give_the_same_f32() {
    for isa in isas_and_pairs() {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) });
        for (size, dtype) in
            [((1, 75, 300), DType::BF16), ((6, 75, 300), DType::F32), ((90, 130, 600), DType::BF16)]
        {
            let operands = Operands::random(size, dtype);
            let case = Case { bias: Some(DType::F32), residual: Place::Elsewhere(DType::F32) };
            for kind in KINDS {
                let fused = operands.run(&set, kind, case, DType::F32);
                let mut passes = operands.old.clone();
                operands.product(&set, kind, &mut passes, Epilogue::NONE);
                set.elementwise.add_bias(passes.view_mut(), operands.bias.view()).unwrap();
                set.elementwise.add_assign(passes.view_mut(), operands.old.view()).unwrap();
                assert!(fused.bytes() == passes.bytes(), "{}: {kind:?} {size:?}", isa.name());
            }
        }
    }
}

/// Few rows: what the other rows are changes nothing.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    let dtype = DType::BF16;
    for (name, set) in backends() {
        // cuBLASLt may add in another order for another number of rows.
        let kinds = if name.contains("cuBLASLt") { &KINDS[1..] } else { &KINDS[..] };
        let operands = Operands::random((8, 75, 300), dtype);
        let (bias, old) = (operands.bias.cast(dtype), operands.old.cast(dtype));
        for kind in kinds {
            let of_rows = |start: usize, end: usize| {
                let mut out = Host::zeros(dtype, &[end - start, 75]);
                let residual = Residual::Of(old.view().rows(start, end));
                let epilogue = Epilogue { bias: Some(bias.view()), residual };
                let (a, out_view) = (operands.a.view().rows(start, end), out.view_mut());
                match kind {
                    Kind::Dense => set.matmul.matmul_nt(a, operands.b.view(), out_view, epilogue),
                    Kind::Quantized(format) => {
                        let codes = operands.codes[*format].view();
                        set.quantized_matmul.matmul_nt(a, codes, out_view, epilogue)
                    }
                }
                .unwrap();
                out.bytes().to_vec()
            };
            let ones: Vec<u8> = (0..8).flat_map(|row| of_rows(row, row + 1)).collect();
            assert!(of_rows(0, 8) == ones, "{name}: {kind:?}");
        }
    }
}

/// Many rows: a product with codes has the bits of the one with the dequantized matrix, epilogue included.
#[test]
fn the_bits_of_the_dense_product() {
    for isa in isas_and_pairs() {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) });
        for (index, _) in quantized::FORMATS.iter().enumerate() {
            let mut operands = Operands::random((37, 90, 530), DType::F32);
            operands.b = operands.codes[index].dequantized();
            for (case, out) in cases(DType::BF16)
                .into_iter()
                .flat_map(|case| [DType::F32, DType::BF16].map(|out| (case, out)))
            {
                let [dense, codes] =
                    [Kind::Dense, Kind::Quantized(index)].map(|kind| operands.run(&set, kind, case, out));
                assert!(dense.bytes() == codes.bytes(), "{}: {index} {case:?} {out}", isa.name());
            }
        }
    }
}

#[test]
#[should_panic(expected = "bias has 5 elements")]
fn a_bias_of_another_length_is_refused() {
    let (a, b) = (Host::zeros(DType::F32, &[3, 4]), Host::zeros(DType::F32, &[5, 4]));
    let (mut out, bias) = (Host::zeros(DType::F32, &[3, 5]), Host::zeros(DType::F32, &[3]));
    let epilogue = Epilogue { bias: Some(bias.view()), ..Epilogue::NONE };
    let _ = cpu::kernel_set(1).matmul.matmul_nt(a.view(), b.view(), out.view_mut(), epilogue);
}

#[test]
#[should_panic(expected = "residual has 15 elements")]
fn a_residual_of_another_size_is_refused() {
    let codes = quantized::Quantized::random(QuantFormat::Int8, 5, 4, 1);
    let (a, residual) = (Host::zeros(DType::F32, &[3, 4]), Host::zeros(DType::F32, &[3, 4]));
    let mut out = Host::zeros(DType::F32, &[3, 5]);
    let epilogue = Epilogue { residual: Residual::Of(residual.view()), ..Epilogue::NONE };
    let set = cpu::kernel_set(1);
    let _ = set.quantized_matmul.matmul_nt(a.view(), codes.view(), out.view_mut(), epilogue);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(m in 1usize..70, n in 1usize..130, l in 1usize..400, seed in 0u64..64) {
        let mix = MIXES[Random::new(seed).below(MIXES.len())];
        compare(&backends_and_pairs(), (m, n, l), mix, &KINDS);
    }
}
