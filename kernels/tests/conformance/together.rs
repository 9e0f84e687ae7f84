//! Several products at once have the bits of the same products one by one.

use crate::support::{Host, backends_and_pairs};
use terrace_kernels::cpu::Isa;
use terrace_kernels::{DType, Epilogue, KernelSet, MatmulSpec, Packing, Product, Residual, one_by_one};

const DTYPES: [DType; 3] = [DType::BF16, DType::F32, DType::F16];

/// Two layers of the same input: rows, inputs, and outputs of either.
const SIZES: [(usize, usize, [usize; 2]); 5] =
    // A tile; several tiles and blocks of the inner size; few rows, which have a product of their own; no row; no output.
    [(20, 30, [40, 7]), (530, 600, [1000, 270]), (3, 64, [100, 33]), (0, 5, [6, 7]), (9, 20, [0, 40])];

/// Everything that two layers do, forward and backward.
fn pass(
    set: &KernelSet,
    dtype: DType,
    (m, l, n): (usize, usize, [usize; 2]),
    at_once: bool,
    room: usize,
) -> Vec<Host> {
    let run = |products: &mut [Product<'_>]| {
        if at_once { set.matmul.together(products) } else { one_by_one(&*set.matmul, products) }.unwrap();
    };
    let packing = Packing::new(room).unwrap();
    let places = [packing.place(), packing.place()];
    let random = |dims: &[usize], seed| Host::random(dtype, dims, 1.0, seed);
    let (x, weights) = (random(&[m, l], 1), n.map(|n| random(&[n, l], n as u64)));
    let [first, second] = [0, 1].map(|layer: usize| weights[layer].view().kept_packed(&places[layer]));
    let (bias, residual) = (random(&[n[0]], 3), Host::random(DType::F32, &[m, n[1]], 1.0, 4));
    let mut outs = n.map(|n| Host::zeros(dtype, &[m, n]));
    let douts = n.map(|n| random(&[m, n], 5 + n as u64));
    let (mut dx, mut dw) =
        (Host::random(DType::F32, &[m, l], 1.0, 6), n.map(|n| Host::random(DType::F32, &[n, l], 1.0, 7)));

    let [out, other] = &mut outs;
    let (terms, others) = ([(x.view(), first)], [(x.view(), second)]);
    let biased = Epilogue { bias: Some(bias.view()), residual: Residual::None };
    let added = Epilogue { bias: None, residual: Residual::Of(residual.view()) };
    run(&mut [
        Product { terms: &terms, out: out.view_mut(), spec: MatmulSpec::NT, epilogue: biased },
        Product { terms: &others, out: other.view_mut(), spec: MatmulSpec::NT, epilogue: added },
    ]);

    let terms = [(douts[0].view(), first), (douts[1].view(), second)];
    let sums = [0, 1].map(|layer: usize| [(douts[layer].view(), x.view())]);
    let [dw0, dw1] = &mut dw;
    let (epilogue, fresh) = (Epilogue::NONE, MatmulSpec { accumulate: false, ..MatmulSpec::TN_ACCUMULATE });
    run(&mut [
        Product { terms: &terms, out: dx.view_mut(), spec: MatmulSpec::NN, epilogue },
        Product { terms: &sums[0], out: dw0.view_mut(), spec: MatmulSpec::TN_ACCUMULATE, epilogue },
        Product { terms: &sums[1], out: dw1.view_mut(), spec: fresh, epilogue },
    ]);
    // The same without the operands in common, and of another type.
    let wide = x.cast(DType::F32);
    let (terms, others) = ([(wide.view(), first)], [(x.view(), first)]);
    let mut mixed = [DType::F32, dtype].map(|dtype| Host::zeros(dtype, &[m, n[0]]));
    let [from_wide, from_narrow] = &mut mixed;
    run(&mut [
        Product { terms: &terms, out: from_wide.view_mut(), spec: MatmulSpec::NT, epilogue },
        Product { terms: &others, out: from_narrow.view_mut(), spec: MatmulSpec::NT, epilogue },
    ]);
    // Few rows beside many, as experts have them.
    let mut parted = Host::zeros(dtype, &[m, n[0]]);
    let (many, few) = parted.view_mut().split_rows(m.saturating_sub(2));
    let rows = [(0, m.saturating_sub(2)), (m.saturating_sub(2), m)];
    let [of_many, of_few] = rows.map(|(start, end)| [(x.view().rows(start, end), first)]);
    run(&mut [
        Product { terms: &of_many, out: many, spec: MatmulSpec::NT, epilogue },
        Product { terms: &of_few, out: few, spec: MatmulSpec::NT, epilogue },
    ]);
    outs.into_iter().chain(dw).chain(mixed).chain([dx, parted]).collect()
}

#[test]
fn several_at_once_have_the_bits_of_one_by_one() {
    let has_vectors = Isa::available().len() > 1;
    for (name, set) in backends_and_pairs() {
        for (dtype, size) in DTYPES.iter().flat_map(|dtype| SIZES.map(|size| (*dtype, size))) {
            // Large products take their time on what is emulated, and without vectors: the same tiles are made with them.
            let is_slow = name.contains("cuda") || has_vectors && name.contains(Isa::GENERIC.name());
            // Pairs are of bf16.
            let is_done = name.contains("+pairs") && dtype != DType::BF16;
            if size.0 > 100 && (is_slow || is_done) {
                continue;
            }
            let expected = pass(&set, dtype, size, false, 0);
            assert!(size.0 == 0 || expected.iter().any(|out| out.values().iter().any(|x| *x != 0.0)));
            for room in [0, 8 << 20] {
                let found = pass(&set, dtype, size, true, room);
                for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
                    assert!(
                        expected.bytes() == found.bytes(),
                        "{name}: {dtype} {size:?}, result {index}, room {room}"
                    );
                }
            }
        }
    }
}

/// A product of the suite above that is wrong would be as wrong one by one: a sum of terms is compared with what it means.
#[test]
fn terms_are_summed() {
    for (name, set) in backends_and_pairs() {
        let of = |dims: &[usize], values: &[f64]| Host::of(DType::F32, dims, values.iter().copied());
        let (a, b) = (of(&[2, 1], &[1.0, 2.0]), of(&[1, 2], &[3.0, 4.0]));
        let (c, d) = (of(&[2, 2], &[1.0, 0.0, 0.0, 1.0]), of(&[2, 2], &[10.0, 20.0, 30.0, 40.0]));
        for (accumulate, old) in [(false, 0.0), (true, 100.0)] {
            let mut out = of(&[2, 2], &[100.0; 4]);
            let terms = [(a.view(), b.view()), (c.view(), d.view())];
            let spec = MatmulSpec { accumulate, ..MatmulSpec::NN };
            let sum = Product { terms: &terms, out: out.view_mut(), spec, epilogue: Epilogue::NONE };
            set.matmul.together(&mut [sum]).unwrap();
            assert_eq!(out.values(), [13.0, 24.0, 36.0, 48.0].map(|x| x + old), "{name}");
        }
    }
}

#[test]
#[should_panic(expected = "several terms are summed in f32")]
fn several_terms_need_f32() {
    let a = Host::zeros(DType::BF16, &[2, 2]);
    let (terms, mut out) = ([(a.view(), a.view()); 2], a.clone());
    let sum = Product { terms: &terms, out: out.view_mut(), spec: MatmulSpec::NN, epilogue: Epilogue::NONE };
    let _ = terrace_kernels::cpu::kernel_set(1).matmul.together(&mut [sum]);
}

#[test]
#[should_panic(expected = "an epilogue belongs to one product")]
fn an_epilogue_needs_the_layout_of_a_layer() {
    let a = Host::zeros(DType::F32, &[2, 2]);
    let (terms, mut out) = ([(a.view(), a.view())], a.clone());
    let epilogue = Epilogue { bias: None, residual: Residual::Of(a.view()) };
    let sum = Product { terms: &terms, out: out.view_mut(), spec: MatmulSpec::NN, epilogue };
    let _ = terrace_kernels::cpu::kernel_set(1).matmul.together(&mut [sum]);
}
