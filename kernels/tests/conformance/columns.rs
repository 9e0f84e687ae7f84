//! Columns that move keep every bit, and others are not touched. Tolerance of sums of n terms of order 1: n·4e-7, and of one none.

use crate::support::{Host, Random, assert_close, backends};
use proptest::prelude::*;
use terrace_kernels::{DType, KernelSet, reference};

const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// A move: rows of the narrower side, rows of the other for each, widths of x and out, first columns there, and how many move.
#[derive(Debug, Clone, Copy)]
struct Move {
    rows: usize,
    group: usize,
    widths: [usize; 2],
    at: [usize; 2],
    width: usize,
}

const fn of(rows: usize, group: usize, widths: [usize; 2], at: [usize; 2], width: usize) -> Move {
    Move { rows, group, widths, at, width }
}

/// Everything aligned, as models have it, with shared rows and without; odd places and widths; whole rows, one column and none, and
/// no rows; more columns than a buffer of the CPU has, and than a block of a card moves at a time.
const MOVES: [Move; 13] = [
    of(5, 1, [576, 512], [0, 0], 512),
    of(70, 1, [64, 192], [0, 128], 64),
    of(33, 16, [576, 192], [512, 128], 64),
    of(2, 128, [64, 64], [0, 0], 64),
    of(9, 3, [15, 9], [7, 2], 5),
    of(300, 2, [7, 40], [6, 39], 1),
    of(4, 1, [24, 24], [8, 8], 12),
    of(4, 2, [24, 17], [8, 8], 8),
    of(3, 2, [2100, 2200], [33, 100], 2050),
    of(3, 1, [40_960, 40_960], [0, 0], 40_960),
    of(3, 2, [5, 6], [5, 6], 0),
    of(0, 1, [5, 6], [1, 1], 3),
    of(1, 1, [1, 1], [0, 0], 1),
];

impl Move {
    /// x and out, of random bits: NaNs too.
    fn bits(&self, dtype: DType, shared: usize) -> [Host; 2] {
        let rows = if shared == 0 {
            [self.rows, self.rows * self.group]
        } else {
            [self.rows * self.group, self.rows]
        };
        [0, 1].map(|side| random_bits(dtype, &[rows[side], self.widths[side]], 1 + side as u64))
    }
}

fn random_bits(dtype: DType, dims: &[usize], seed: u64) -> Host {
    let mut random = Random::new(seed);
    let mut host = Host::zeros(dtype, dims);
    host.fill_bytes(|| random.next() as u8);
    host
}

/// Columns as the documentation has them, byte by byte.
fn moved(x: &Host, out: &Host, what: &Move, source: impl Fn(usize) -> usize) -> Vec<u8> {
    let (element, mut bytes) = (x.dtype().size(), out.bytes().to_vec());
    for r in 0..out.dims()[0] {
        for byte in 0..what.width * element {
            let from = (source(r) * what.widths[0] + what.at[0]) * element + byte;
            bytes[(r * what.widths[1] + what.at[1]) * element + byte] = x.bytes()[from];
        }
    }
    bytes
}

fn check_copy(what: Move, dtype: DType) {
    let [x, out] = what.bits(dtype, 0);
    let expected = moved(&x, &out, &what, |r| r / what.group);
    for (name, set) in all() {
        let mut found = out.clone();
        set.columns.copy(x.view(), what.at[0], found.view_mut(), what.at[1], what.width).unwrap();
        assert!(found.bytes() == expected, "{name}: {what:?} {dtype}");
    }
}

fn check_clear(what: Move, dtype: DType) {
    let [x, out] = what.bits(dtype, 0);
    let zeros = Host::zeros(dtype, x.dims());
    let expected = moved(&zeros, &out, &what, |r| r / what.group);
    for (name, set) in all() {
        let mut found = out.clone();
        set.columns.clear(found.view_mut(), what.at[1], what.width).unwrap();
        assert!(found.bytes() == expected, "{name}: clear {what:?} {dtype}");
    }
}

fn check_fold(what: Move, dtype: DType) {
    let Move { rows, group, widths, at, width } = what;
    let x = Host::random(dtype, &[rows * group, widths[0]], 1.0, 1);
    let out = Host::random(dtype, &[rows, widths[1]], 1.0, 2);
    let run = |set: &KernelSet| {
        let mut found = out.clone();
        set.columns.fold(x.view(), at[0], found.view_mut(), at[1], width).unwrap();
        found
    };
    let x_values = x.values();
    let term = |r: usize, c: usize, i: usize| x_values[(r * group + i) * widths[0] + at[0] + c - at[1]];
    let is_sum = |c: usize| (at[1]..at[1] + width).contains(&c);
    let expected = out.values().into_iter().enumerate().map(|(i, old)| {
        let (r, c) = (i / widths[1], i % widths[1]);
        if is_sum(c) { (0..group).map(|i| term(r, c, i)).sum() } else { old }
    });
    let expected = Host::of(DType::F32, &[rows, widths[1]], expected);
    let tolerance = if group == 1 { 0.0 } else { 4e-7 * group as f64 };
    for (name, set) in all() {
        let found = run(&set);
        let name = format!("{name}: fold {what:?} {dtype}");
        assert_close(&name, &expected, &found, tolerance);
        for (i, (before, after)) in out.values().into_iter().zip(found.values()).enumerate() {
            assert!(is_sum(i % widths[1]) || before == after, "{name}: element {i}");
        }
    }
}

/// The reference as well: what is expected is not its work.
fn all() -> Vec<(String, KernelSet)> {
    let mut all = backends();
    all.push(("reference".to_owned(), reference::kernel_set()));
    all
}

#[test]
fn copies_keep_bits() {
    for (what, dtype) in MOVES.into_iter().flat_map(|what| FLOATS.map(|dtype| (what, dtype))) {
        check_copy(what, dtype);
    }
}

#[test]
fn others_stay_when_some_are_cleared() {
    for (what, dtype) in MOVES.into_iter().flat_map(|what| FLOATS.map(|dtype| (what, dtype))) {
        check_clear(what, dtype);
    }
}

#[test]
fn rows_are_summed() {
    for (what, dtype) in MOVES.into_iter().flat_map(|what| FLOATS.map(|dtype| (what, dtype))) {
        check_fold(what, dtype);
    }
}

/// `⟨copy(x), y⟩ = ⟨x, fold(y)⟩`, of integers, whose sums are exact.
#[test]
fn a_fold_is_the_transpose_of_a_copy() {
    let (rows, group, width) = (4, 3, 5);
    let integers = |dims: [usize; 2], seed| {
        let mut random = Random::new(seed);
        Host::of(DType::F32, &dims, (0..dims[0] * dims[1]).map(|_| random.below(9) as f64 - 4.0))
    };
    let (x, y) = (integers([rows, 7], 1), integers([rows * group, 8], 2));
    let dot = |a: &Host, b: &Host| a.values().iter().zip(b.values()).map(|(a, b)| a * b).sum::<f64>();
    for (name, set) in all() {
        let (mut copied, mut folded) = (Host::zeros(DType::F32, y.dims()), Host::zeros(DType::F32, x.dims()));
        set.columns.copy(x.view(), 2, copied.view_mut(), 3, width).unwrap();
        set.columns.fold(y.view(), 3, folded.view_mut(), 2, width).unwrap();
        assert_eq!(dot(&copied, &y), dot(&x, &folded), "{name}");
        assert!(dot(&copied, &y) != 0.0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_shape(
        rows in 0usize..40, group in 1usize..9, width in 0usize..90, at in [0usize..20, 0usize..20], rest in [0usize..20, 0usize..20],
        eights in 0usize..2, dtype in 0..FLOATS.len(),
    ) {
        let scale = if eights == 1 { 8 } else { 1 };
        let [at, rest] = [at, rest].map(|all| all.map(|columns| columns * scale));
        // A row of no columns counts as none.
        let widths = [0, 1].map(|side| (at[side] + width * scale + rest[side]).max(1));
        let what = Move { rows, group: if rows == 0 { 1 } else { group }, widths, at, width: width * scale };
        check_copy(what, FLOATS[dtype]);
        check_clear(what, FLOATS[dtype]);
        check_fold(what, FLOATS[dtype]);
    }
}
