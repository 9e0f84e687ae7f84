//! Tolerance: with a and b of deviation 1 the sum of |a·b| is about 0.64·L and f32 errors add like a random walk, so
//! `√L · √L · 2⁻²⁴ · 4` covers the largest of a few thousand elements. (The proven bound grows with L·Σ|a·b|.) Products of bf16 by
//! pairs round as often, and are held to the same.

use crate::support::{Host, MIXES, Random, assert_close, backends_and_pairs, isas_and_pairs};
use proptest::prelude::*;
use terrace_kernels::cpu::{self, CpuConfig, Isa};
use terrace_kernels::{DType, KernelSet, MatmulSpec, Packing, View, reference};

const DTYPES: [DType; 3] = [DType::BF16, DType::F32, DType::F16];

/// Of values up to 5: twice what the worst of some ten million results was off.
pub fn tolerance(l: usize) -> f64 {
    l as f64 * 2f64.powi(-21) + 1e-7
}

fn operands(m: usize, n: usize, l: usize, dtype: DType, spec: MatmulSpec) -> (Host, Host) {
    let a_dims = if spec.trans_a { [l, m] } else { [m, l] };
    let b_dims = if spec.trans_b { [n, l] } else { [l, n] };
    (Host::random(dtype, &a_dims, 1.0, 1), Host::random(dtype, &b_dims, 1.0, 2))
}

fn compare(sets: &[(String, KernelSet)], size: (usize, usize, usize), mix: (DType, DType), spec: MatmulSpec) {
    let (m, n, l) = size;
    let (a, b) = operands(m, n, l, mix.0, spec);
    let old = Host::random(DType::F32, &[m, n], 1.0, 3);
    let mut expected = old.clone();
    reference::kernel_set().matmul.matmul(a.view(), b.view(), expected.view_mut(), spec).unwrap();
    for (name, set) in sets {
        let mut out = old.cast(mix.1);
        set.matmul.matmul(a.view(), b.view(), out.view_mut(), spec).unwrap();
        assert_close(&format!("{name}: {size:?} {mix:?} {spec:?}"), &expected, &out, tolerance(l));
    }
}

fn specs() -> impl Iterator<Item = MatmulSpec> {
    (0..8).map(|bits| MatmulSpec {
        trans_a: bits & 1 != 0,
        trans_b: bits & 2 != 0,
        accumulate: bits & 4 != 0,
    })
}

#[test]
fn every_layout_and_dtype() {
    let sets = backends_and_pairs();
    for spec in specs() {
        for mix in MIXES {
            if spec.accumulate && mix.1 != DType::F32 {
                continue;
            }
            for size in [(1, 1, 1), (5, 7, 3), (13, 49, 300), (97, 101, 17)] {
                compare(&sets, size, mix, spec);
            }
        }
    }
}

/// Every remainder of a micro tile, and block boundaries of the inner size.
#[test]
fn every_odd_size() {
    let sets = backends_and_pairs();
    for m in 1..=17 {
        compare(&sets, (m, 3 * m, 33), (DType::BF16, DType::F32), MatmulSpec::NT);
        compare(&sets, (m, m + 40, 9), (DType::BF16, DType::F32), MatmulSpec::TN_ACCUMULATE);
    }
    for l in [1, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 1023, 1025, 2081] {
        compare(&sets, (9, 20, l), (DType::BF16, DType::BF16), MatmulSpec::NT);
        compare(&sets, (3, 50, l), (DType::BF16, DType::BF16), MatmulSpec::NT);
        compare(&sets, (20, 9, l), (DType::F32, DType::F32), MatmulSpec::NN);
    }
}

/// Few rows: what the other rows of a are changes nothing.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    // cuBLASLt chooses among its kernels by the number of rows.
    for (name, set) in backends_and_pairs().into_iter().filter(|(name, _)| !name.contains("cuBLASLt")) {
        for (dtype, l) in [
            (DType::F32, 300),
            (DType::BF16, 777),
            (DType::BF16, 512),
            (DType::BF16, 2100),
            (DType::F16, 40),
            (DType::F32, 7),
        ] {
            // A card has other paths for more rows.
            let (n, rows, mut ones) = (75, if name.starts_with("cpu") { 16 } else { 8 }, Vec::new());
            let (a, b) = operands(rows, n, l, dtype, MatmulSpec::NT);
            for m in 1..=rows {
                let mut all = Host::zeros(DType::F32, &[m, n]);
                set.matmul.matmul(a.view().rows(0, m), b.view(), all.view_mut(), MatmulSpec::NT).unwrap();
                let mut one = Host::zeros(DType::F32, &[1, n]);
                set.matmul.matmul(a.view().rows(m - 1, m), b.view(), one.view_mut(), MatmulSpec::NT).unwrap();
                ones.extend_from_slice(one.bytes());
                assert!(all.bytes() == ones, "{name}: {dtype} {m} rows of {l}");
            }
        }
    }
}

/// No part of a sum is left out: ones add up to the inner size, also where it is no multiple of what a kernel takes at once or is split among
/// several.
#[test]
fn ones_add_up_to_the_inner_size() {
    for (name, set) in backends_and_pairs() {
        for (dtype, l) in DTYPES.into_iter().flat_map(|dtype| [65, 1000, 4097, 8200].map(|l| (dtype, l))) {
            for (m, n) in [(16, 16), (9, 40)] {
                let ones = |dims: &[usize]| Host::of(dtype, dims, vec![1.0; dims.iter().product()]);
                let (a, b) = (ones(&[l, m]), ones(&[l, n]));
                let mut out = Host::zeros(DType::F32, &[m, n]);
                set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::TN_ACCUMULATE).unwrap();
                assert!(out.values().iter().all(|sum| *sum == l as f64), "{name}: {dtype} {m} x {n} x {l}");
            }
        }
    }
}

/// Several tiles in both directions.
#[test]
fn larger_than_a_tile() {
    let sets = backends_and_pairs();
    compare(&sets, (200, 500, 40), (DType::BF16, DType::BF16), MatmulSpec::NT);
    compare(&sets, (410, 130, 70), (DType::BF16, DType::F32), MatmulSpec::TN_ACCUMULATE);
    compare(&sets, (50, 1000, 15), (DType::BF16, DType::BF16), MatmulSpec::NN);
}

/// What stays packed gives the bits of what is packed anew, whatever there is room for, in either order and with any left side.
#[test]
fn what_stays_packed_changes_no_bit() {
    let set = |isa: Isa| {
        (isa.name().to_owned(), cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(2) }))
    };
    let sets: Vec<(String, KernelSet)> = isas_and_pairs().into_iter().map(set).collect();
    assert!(sets.iter().all(|(_, set)| set.matmul.packed_bytes([64, 64], DType::BF16) > 0));
    for ((name, set), dtype) in sets.iter().flat_map(|set| DTYPES.map(|dtype| (set, dtype))) {
        for (rows, cols) in [(7, 3), (100, 513), (535, 70)] {
            let b = Host::random(dtype, &[rows, cols], 1.0, 2);
            let whole = set.matmul.packed_bytes([rows, cols], dtype);
            for room in [2 * whole, whole / 2, 0] {
                let packing = Packing::new(room).unwrap();
                let place = packing.place();
                // A second round finds it packed. Few rows are multiplied without packing.
                for (m, left) in [17, 60, 2, 17].into_iter().flat_map(|m| DTYPES.map(|left| (m, left))) {
                    for trans_b in [true, false] {
                        let spec = MatmulSpec { trans_b, ..MatmulSpec::NN };
                        let (n, l) = if trans_b { (rows, cols) } else { (cols, rows) };
                        let a = Host::random(left, &[m, l], 1.0, m as u64);
                        let product = |b: View<'_>| {
                            let mut out = Host::zeros(DType::F32, &[m, n]);
                            set.matmul.matmul(a.view(), b, out.view_mut(), spec).unwrap();
                            out
                        };
                        let (plain, kept) = (product(b.view()), product(b.view().kept_packed(&place)));
                        let case = format!("{name}: {m} x {n} x {l}, {left} and {dtype}, room {room}");
                        assert!(plain.bytes() == kept.bytes(), "{case}");
                        // A part is another tensor.
                        if trans_b && rows > 50 {
                            let part = |b: View<'_>| {
                                let mut out = Host::zeros(DType::F32, &[m, 40]);
                                let b = b.rows(10, 50);
                                set.matmul.matmul(a.view(), b, out.view_mut(), spec).unwrap();
                                out
                            };
                            let (plain, kept) = (part(b.view()), part(b.view().kept_packed(&place)));
                            assert!(plain.bytes() == kept.bytes(), "a part, {case}");
                        }
                    }
                }
            }
        }
    }
}

/// Nothing else would show that it is not packed anew: a place that is tagged to another tensor still has the first.
#[test]
fn what_stays_packed_is_what_is_multiplied() {
    for (name, set) in backends_and_pairs() {
        for (dtype, spec) in
            DTYPES.into_iter().flat_map(|dtype| [(dtype, MatmulSpec::NT), (dtype, MatmulSpec::NN)])
        {
            let (a, b) = operands(30, 70, 70, dtype, spec);
            let room = set.matmul.packed_bytes([70, 70], dtype);
            let packing = Packing::new(room).unwrap();
            let place = packing.place();
            let product = |b: View<'_>| {
                let mut out = Host::zeros(DType::F32, &[30, 70]);
                set.matmul.matmul(a.view(), b, out.view_mut(), spec).unwrap();
                out
            };
            let first = product(b.view().kept_packed(&place));
            let other = Host::zeros(dtype, &[70, 70]);
            let second = product(other.view().kept_packed(&place));
            assert_eq!(first.bytes() == second.bytes(), room > 0, "{name}: {dtype} {spec:?}");
        }
    }
}

/// An empty sum is zero; an empty result is nothing.
#[test]
fn empty_sizes() {
    for (name, set) in backends_and_pairs() {
        for dtype in [DType::F32, DType::BF16] {
            let (a, b) = (Host::zeros(dtype, &[3, 0]), Host::zeros(dtype, &[0, 4]));
            let mut out = Host::random(dtype, &[3, 4], 1.0, 1);
            set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NN).unwrap();
            assert!(out.values().iter().all(|x| *x == 0.0), "{name}");
            let (a, b) = (Host::zeros(dtype, &[0, 5]), Host::zeros(dtype, &[5, 4]));
            set.matmul
                .matmul(a.view(), b.view(), Host::zeros(dtype, &[0, 4]).view_mut(), MatmulSpec::NN)
                .unwrap();
        }
    }
}

/// Operands of different dtypes in one product, and leading dimensions that are flattened.
#[test]
fn mixed_operands() {
    let a = Host::random(DType::F32, &[2, 5, 24], 1.0, 1);
    let b = Host::random(DType::BF16, &[10, 24], 1.0, 2);
    let mut expected = Host::zeros(DType::F32, &[2, 5, 10]);
    reference::kernel_set().matmul.matmul(a.view(), b.view(), expected.view_mut(), MatmulSpec::NT).unwrap();
    for (name, set) in backends_and_pairs() {
        let mut out = Host::zeros(DType::F32, &[10, 10]);
        set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT).unwrap();
        assert_close(&name, &expected, &out, tolerance(24));
    }
}

/// What products by pairs do otherwise, by definition, and so the proof that they are what was tested: denormal operands are
/// zeros.
#[test]
fn pairs_take_denormals_for_zeros() {
    let (a, b) = (
        Host::of(DType::BF16, &[17, 3], [2f64.powi(-130); 51]),
        Host::of(DType::BF16, &[5, 3], [2f64.powi(100); 15]),
    );
    for isa in isas_and_pairs() {
        let set = cpu::with_config(CpuConfig { isa: Some(isa), ..CpuConfig::new(1) });
        let mut out = Host::random(DType::F32, &[17, 5], 1.0, 1);
        set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT).unwrap();
        let pairs = isa.name().contains("pairs") || isa.name() == "avx512bf16";
        let expected = if pairs { 0.0 } else { 3.0 * 2f64.powi(-30) };
        assert!(out.values().iter().all(|x| *x == expected), "{}", isa.name());
    }
}

#[test]
#[should_panic(expected = "inner sizes")]
fn wrong_shapes_are_refused() {
    let (a, b) = (Host::zeros(DType::F32, &[3, 4]), Host::zeros(DType::F32, &[5, 6]));
    let mut out = Host::zeros(DType::F32, &[3, 5]);
    let set = terrace_kernels::cpu::kernel_set(1);
    let _ = set.matmul.matmul(a.view(), b.view(), out.view_mut(), MatmulSpec::NT);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(m in 1usize..70, n in 1usize..130, l in 1usize..600, bits in 0usize..8, seed in 0u64..4) {
        let spec = MatmulSpec { trans_a: bits & 1 != 0, trans_b: bits & 2 != 0, accumulate: bits & 4 != 0 };
        let mix = if spec.accumulate { MIXES[seed as usize % 2] } else { MIXES[Random::new(seed).below(4)] };
        compare(&backends_and_pairs(), (m, n, l), mix, spec);
    }
}
