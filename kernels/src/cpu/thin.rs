//! Products with few rows: a decoding step, bound by reading the weights.
//!
//! Weights are read once, in place, without packing. `out[m, n] = Σ_l a[m, l]·b[n, l]` in 16 f32 accumulators (lane i
//! takes l = i, i + 16, …) added pairwise at the end; the order does not depend on M, N or the number of threads.

use super::floats::{Floats, FloatsMut};
use super::isa::fma;
use super::threads::{SHARED_BYTES, Threads};
use super::vector::{LANES, sum_lanes};
use crate::MatmulSpec;
use crate::check::ProductDims;
use half::bf16;

/// Most rows: above it, packing pays.
const ROWS: usize = 8;
/// Columns of the result per task.
const COLS: usize = 32;

/// Whether this path computes the product: few rows, both inner dimensions contiguous, `a` widened fits the shared scratch.
pub fn applies(dims: ProductDims, spec: MatmulSpec) -> bool {
    let a_bytes = dims.m * dims.l * size_of::<f32>();
    dims.m <= ROWS && !spec.trans_a && spec.trans_b && dims.l > 0 && a_bytes <= SHARED_BYTES
}

/// `out[M, N] (+)= a[M, L]·b[N, L]ᵀ`.
pub fn matmul(
    threads: &Threads,
    a: Floats<'_>,
    b: Floats<'_>,
    out: FloatsMut<'_>,
    dims: ProductDims,
    accumulate: bool,
) {
    let isa = threads.isa();
    let mut shared = threads.shared();
    let a_ml = a.read(isa, 0, dims.m * dims.l, shared.floats());
    threads.run(dims.n.div_ceil(COLS), |task, scratch| {
        let first = task * COLS;
        let cols = COLS.min(dims.n - first);
        let mut sums_mn = [0.0; ROWS * COLS];
        for j in 0..cols {
            let row = b.slice((first + j) * dims.l, dims.l);
            let mut column = [0.0; ROWS];
            match row {
                Floats::F32(row) => dots_f32(isa, a_ml, row, &mut column[..dims.m]),
                Floats::BF16(row) => dots_bf16(isa, a_ml, row, &mut column[..dims.m]),
                Floats::F16(_) => {
                    row.widen(isa, &mut scratch[..dims.l]);
                    dots_f32(isa, a_ml, &scratch[..dims.l], &mut column[..dims.m]);
                }
            }
            for (m, sum) in column[..dims.m].iter().enumerate() {
                sums_mn[m * COLS + j] = *sum;
            }
        }
        for m in 0..dims.m {
            let sums = &mut sums_mn[m * COLS..][..cols];
            if accumulate {
                let mut old = [0.0; COLS];
                // SAFETY: these columns belong to this task.
                unsafe { out.read(isa, m * dims.n + first, &mut old[..cols]) };
                super::vector::add_assign(isa, sums, &old);
            }
            // SAFETY: as above.
            unsafe { out.write(isa, m * dims.n + first, sums) };
        }
    });
}

multiversion! {
    /// `sums[m] = Σ_l a[m, l]·row[l]`.
    fn dots_f32(a_ml: &[f32], row: &[f32], sums: &mut [f32]) {
        dots::<_, FMA>(a_ml, row, sums, |x| x);
    }
}

multiversion! {
    /// As `dots_f32`.
    fn dots_bf16(a_ml: &[f32], row: &[bf16], sums: &mut [f32]) {
        dots::<_, FMA>(a_ml, row, sums, |x| f32::from_bits(u32::from(x.to_bits()) << 16));
    }
}

/// Four, two or one rows of a share each pass over the weights.
#[inline(always)]
fn dots<T: Copy, const FMA: bool>(
    a_ml: &[f32],
    row: &[T],
    sums: &mut [f32],
    widen: impl Fn(T) -> f32 + Copy,
) {
    let l = row.len();
    let mut m = 0;
    while m < sums.len() {
        let left = sums.len() - m;
        let a = &a_ml[m * l..];
        m += if left >= 4 {
            sums[m..m + 4].copy_from_slice(&dots_of::<T, FMA, 4>(a, row, widen));
            4
        } else if left >= 2 {
            sums[m..m + 2].copy_from_slice(&dots_of::<T, FMA, 2>(a, row, widen));
            2
        } else {
            sums[m..=m].copy_from_slice(&dots_of::<T, FMA, 1>(a, row, widen));
            1
        };
    }
}

#[inline(always)]
fn dots_of<T: Copy, const FMA: bool, const R: usize>(
    a_ml: &[f32],
    row: &[T],
    widen: impl Fn(T) -> f32,
) -> [f32; R] {
    let l = row.len();
    let a_rows: [&[f32]; R] = std::array::from_fn(|r| &a_ml[r * l..][..l]);
    let mut lanes = [[0.0f32; LANES]; R];
    let whole = l / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let weights: &[T; LANES] = row[start..].first_chunk().expect("whole chunks lie within the row");
        let weights = weights.map(&widen);
        for (lanes, a) in lanes.iter_mut().zip(a_rows) {
            let a: &[f32; LANES] = a[start..].first_chunk().expect("rows of a are as long");
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(a[i], weights[i], lanes[i]);
            }
        }
    }
    for at in whole..l {
        let weight = widen(row[at]);
        for (lanes, a) in lanes.iter_mut().zip(a_rows) {
            lanes[at - whole] = fma::<FMA>(a[at], weight, lanes[at - whole]);
        }
    }
    lanes.map(sum_lanes)
}
