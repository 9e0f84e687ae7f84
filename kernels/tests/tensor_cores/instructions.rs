//! The shim's instructions against the tables of the PTX ISA manual ("Matrix Fragments for mma.m16n8k16 with floating
//! point type", "ldmatrix", "cp.async"), which are written down here a second time, register by register.

use crate::shim::{Argument, Launch, Library, ORDERS};
use crate::tensor::{Random, Tensor, code};
use terrace_kernels::DType;

const WARP: Launch = Launch { grid: [1, 1, 1], threads: 32, shared_bytes: 0 };

/// Row and column of element `i` of a lane's a: "row = groupID for 0 ≤ i < 2 or 4 ≤ i < 6, else groupID + 8; col =
/// threadID_in_group·2 + (i & 1), + 8 for i ≥ 4".
fn place_a(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = if matches!(i, 0..2 | 4..6) { group } else { group + 8 };
    let col = thread * 2 + (i & 1);
    (row, if i < 4 { col } else { col + 8 })
}

/// "row = threadID_in_group·2 + (i & 1), + 8 for i ≥ 2; col = groupID".
fn place_b(lane: usize, i: usize) -> (usize, usize) {
    let row = (lane % 4) * 2 + (i & 1);
    (if i < 2 { row } else { row + 8 }, lane >> 2)
}

/// "row = groupID for i < 2, else groupID + 8; col = threadID_in_group·2 + (i & 1)".
fn place_sum(lane: usize, i: usize) -> (usize, usize) {
    (if i < 2 { lane >> 2 } else { (lane >> 2) + 8 }, (lane % 4) * 2 + (i & 1))
}

#[test]
fn mma_is_a_product() {
    let Some(library) = Library::open() else { return };
    for dtype in [DType::BF16, DType::F16] {
        for (seed, order) in (1..).zip(ORDERS) {
            let mut random = Random::new(seed);
            let (a, b) = (
                Tensor::random(dtype, &[16, 16], 1.0, &mut random).values(),
                Tensor::random(dtype, &[16, 8], 1.0, &mut random).values(),
            );
            let c = Tensor::random(DType::F32, &[16, 8], 1.0, &mut random).values();
            let of_lanes = |count, place: &dyn Fn(usize, usize) -> usize| -> Vec<usize> {
                (0..32)
                    .flat_map(|lane| (0..count).map(move |i| (lane, i)))
                    .map(|(l, i)| place(l, i))
                    .collect()
            };
            let at_a = of_lanes(8, &|lane, i| place_a(lane, i).0 * 16 + place_a(lane, i).1);
            let at_b = of_lanes(4, &|lane, i| place_b(lane, i).0 * 8 + place_b(lane, i).1);
            let at_sum = of_lanes(4, &|lane, i| place_sum(lane, i).0 * 8 + place_sum(lane, i).1);
            // Every element has exactly one place.
            for (places, elements) in [(&at_a, 256), (&at_b, 128), (&at_sum, 128)] {
                let mut sorted = places.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..elements).collect::<Vec<usize>>());
            }
            let a_lanes = Tensor::of(dtype, &[256], at_a.iter().map(|at| a[*at]));
            let b_lanes = Tensor::of(dtype, &[128], at_b.iter().map(|at| b[*at]));
            let mut sums = Tensor::of(DType::F32, &[128], at_sum.iter().map(|at| c[*at]));
            let arguments = [a_lanes.read(), b_lanes.read(), sums.write(), Argument::Int(code(dtype))];
            library.run("selftest_mma", WARP, order, &arguments);
            let plain = |at: usize| -> f64 {
                c[at] + (0..16).map(|k| a[at / 8 * 16 + k] * b[k * 8 + at % 8]).sum::<f64>()
            };
            let expected: Vec<f64> = at_sum.iter().map(|at| plain(*at)).collect();
            sums.assert_close("mma", &expected, |_| 1e-5);
        }
    }
}

/// "Each thread gets a fragment of a row: thread 4·r + t has elements 2t and 2t + 1 of row r", of a column with `.trans`.
#[test]
fn ldmatrix_gives_rows_or_columns() {
    let Some(library) = Library::open() else { return };
    let matrices: Vec<u16> = (0..256).map(|i| 7 * i + 3).collect();
    for (trans, order) in [(false, ORDERS[0]), (true, ORDERS[0]), (false, ORDERS[1]), (true, ORDERS[2])] {
        let mut registers = vec![0u32; 128];
        let arguments = [
            Argument::Address(matrices.as_ptr() as u64),
            Argument::Address(registers.as_mut_ptr() as u64),
            Argument::Int(i32::from(trans)),
        ];
        library.run("selftest_ldmatrix", WARP, order, &arguments);
        for lane in 0..32 {
            for matrix in 0..4 {
                let element = |col: usize| {
                    let (row, col) = if trans { (col, lane / 4) } else { (lane / 4, col) };
                    u32::from(matrices[matrix * 64 + row * 8 + col])
                };
                let (low, high) = (element(lane % 4 * 2), element(lane % 4 * 2 + 1));
                assert_eq!(registers[4 * lane + matrix], high << 16 | low, "lane {lane} trans {trans}");
            }
        }
    }
}

/// A destination is poison from the copy's issue to the wait that covers it; zeros where nothing is to be copied.
#[test]
fn copies_arrive_at_the_wait() {
    let Some(library) = Library::open() else { return };
    let from = Tensor::of(DType::BF16, &[512], (0..512).map(|i| f64::from(i % 200)));
    let mut seen = Tensor::new(DType::BF16, &[768]);
    let valid = 20;
    let arguments = [from.read(), seen.write(), Argument::Int(valid)];
    library.run("selftest_copies", WARP, None, &arguments);
    let (from, seen) = (from.values(), seen.values());
    assert!(seen[..256].iter().all(|x| x.is_nan()), "before the wait");
    for i in 0..512 {
        let expected = if i % 256 < 8 * valid as usize { from[i] } else { 0.0 };
        assert_eq!(seen[256 + i], expected, "element {i}");
    }
}

/// Eight rows of one chunk lie in all 32 banks of 4 bytes, and no two chunks in one place.
#[test]
fn tiles_have_no_bank_conflicts() {
    let Some(library) = Library::open() else { return };
    for width in [32, 64, 128] {
        let mut places = vec![0i32; width];
        let launch = Launch { threads: width as u32, ..WARP };
        let arguments = [Argument::Address(places.as_mut_ptr() as u64), Argument::Int(width as i32)];
        library.run("selftest_swizzled", launch, None, &arguments);
        for chunk in 0..width / 8 {
            let mut banks: Vec<i32> = (0..8).map(|row| places[row * width / 8 + chunk] / 8 % 8).collect();
            banks.sort_unstable();
            assert_eq!(banks, [0, 1, 2, 3, 4, 5, 6, 7], "chunk {chunk} of {width}");
        }
        places.sort_unstable();
        let chunks: Vec<i32> = (0..width as i32).map(|i| 8 * i).collect();
        assert_eq!(places, chunks, "rows of {width}");
    }
}
