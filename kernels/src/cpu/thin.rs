//! Products with few rows: a decoding step, bound by reading the weights.
//!
//! Weights are read once, in place, without packing ([`columns`] for several rows). `out[m, n] = Σ_l a[m, l]·b[n, l]` in 16 f32 accumulators (lane i
//! takes l = i, i + 16, …, a last incomplete run first) added pairwise at the end; the order does not depend on M, N or the
//! number of threads. Two operands of bf16 are multiplied in [`pairs`] where the processor has instructions for those, in an order of
//! their own, which does not depend on these either.

mod columns;
mod pairs;

use super::Isa;
use super::epilogue::Output;
use super::floats::Floats;
use super::gemm::prefetch;
use super::isa::fma;
use super::threads::{SHARED_BYTES, Threads};
use super::vector::{LANES, sum_lanes};
use crate::MatmulSpec;
use crate::check::ProductDims;
use half::bf16;

/// Most rows: above them, packing pays.
const ROWS: usize = 16;
/// Columns of the result per task.
const COLS: usize = 48;
/// How far ahead, in bytes, the weights of one row of a are asked for: beyond what the processor fetches by itself, and little
/// enough to leave a in the first-level cache. At the end of a row that is the next one. (With 1024 instead 53 of 64 GB/s.)
pub const AHEAD: usize = 4096;

/// Whether this path computes the product: few rows, both inner dimensions contiguous, `a` widened fits the shared scratch.
pub fn applies(dims: ProductDims, spec: MatmulSpec) -> bool {
    let a_bytes = dims.m * dims.l.next_multiple_of(2 * LANES) * size_of::<f32>();
    let few = (1..=ROWS).contains(&dims.m);
    few && !spec.trans_a && spec.trans_b && dims.l > 0 && a_bytes <= SHARED_BYTES
}

/// `output[M, N] = a[M, L]·b[N, L]ᵀ`.
pub fn matmul(threads: &Threads, a: Floats<'_>, b: Floats<'_>, output: Output<'_>, dims: ProductDims) {
    let isa = threads.isa();
    let mut shared = threads.shared();
    if let (Some(pairs), Floats::BF16(a), Floats::BF16(b)) = (isa.pairs(), a, b) {
        let words = bytemuck::cast_slice_mut(shared.floats());
        let a = pairs::prepare(a, (dims.m, dims.l), words);
        in_parts(threads, output, dims, |first, cols, _, sums_mn| {
            pairs::all(pairs, a, &b[first * dims.l..][..cols * dims.l], dims.l, sums_mn);
        });
        return;
    }
    let a_ml = if dims.m == 1 {
        a.read(isa, 0, dims.l, shared.floats())
    } else {
        columns::prepare(isa, a, b, (dims.m, dims.l), shared.floats())
    };
    in_parts(threads, output, dims, |first, cols, scratch, sums_mn| {
        if dims.m == 1 {
            for (j, sum) in sums_mn[0][..cols].iter_mut().enumerate() {
                let row = b.slice((first + j) * dims.l, dims.l);
                dots_with(isa, a_ml, row, scratch, std::slice::from_mut(sum));
            }
        } else {
            columns::all(isa, a_ml, b.slice(first * dims.l, cols * dims.l), dims.l, sums_mn);
        }
    });
}

/// Writes what `sum` finds for some columns from a first one on, with scratch of its thread, and rows of sums.
fn in_parts(
    threads: &Threads,
    output: Output<'_>,
    dims: ProductDims,
    sum: impl Fn(usize, usize, &mut [f32], &mut [[f32; COLS]]) + Sync,
) {
    threads.run_in_parts(dims.n.div_ceil(COLS), |task, scratch| {
        let first = task * COLS;
        let cols = COLS.min(dims.n - first);
        let mut sums_mn = [[0.0; COLS]; ROWS];
        let sums_mn = &mut sums_mn[..dims.m];
        sum(first, cols, scratch, sums_mn);
        for (m, sums) in sums_mn.iter_mut().enumerate() {
            // SAFETY: these columns belong to this task.
            unsafe { output.write(threads.isa(), (m, first), &mut sums[..cols]) };
        }
    });
}

/// `sums[m] = Σ_l a[m, l]·row[l]`; `scratch` holds a row.
pub fn dots_with(isa: Isa, a_ml: &[f32], row: Floats<'_>, scratch: &mut [f32], sums: &mut [f32]) {
    match row {
        Floats::F32(row) => dots_f32(isa, a_ml, row, sums),
        Floats::BF16(row) => dots_bf16(isa, a_ml, row, sums),
        Floats::F16(_) => {
            let wide = &mut scratch[..row.len()];
            row.widen(isa, wide);
            dots_f32(isa, a_ml, wide, sums);
        }
    }
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
        let a = |r: usize| &a_ml[(m + r) * l..][..l];
        m += if left >= 4 {
            let [s0, s1, s2, s3] = four_dots::<T, FMA>([a(0), a(1), a(2), a(3)], row, widen);
            sums[m..m + 4].copy_from_slice(&[s0, s1, s2, s3]);
            4
        } else if left >= 2 {
            sums[m..m + 2].copy_from_slice(&two_dots::<T, FMA>([a(0), a(1)], row, widen));
            2
        } else {
            [sums[m]] = one_dot::<T, FMA>([a(0)], row, widen);
            1
        };
    }
}

/// Defines a function that multiplies one row of weights with several rows of a. The accumulators are separate variables
/// because the compiler leaves an array of arrays in memory.
macro_rules! dots_of {
    ($name:ident, $count:literal, $($sum:ident $a:ident),+) => {
        #[inline(always)]
        fn $name<T: Copy, const FMA: bool>(
            rows: [&[f32]; $count],
            weights: &[T],
            widen: impl Fn(T) -> f32 + Copy,
        ) -> [f32; $count] {
            let [$($a),+] = rows;
            $(let mut $sum = [0.0f32; LANES];)+
            let (chunks, tail) = weights.as_chunks::<LANES>();
            $(let (mut $a, last) = $a.as_chunks::<LANES>(); for (i, w) in tail.iter().enumerate() {
                $sum[i] = last[i] * widen(*w);
            })+
            for chunk in chunks {
                prefetch(chunk.as_ptr().wrapping_byte_add(AHEAD));
                let wide = chunk.map(widen);
                $(
                    let (first, rest) = $a.split_first().expect("rows of a are as long as those of b");
                    $a = rest;
                    for i in 0..LANES {
                        $sum[i] = fma::<FMA>(first[i], wide[i], $sum[i]);
                    }
                )+
            }
            [$(sum_lanes($sum)),+]
        }
    };
}

dots_of!(four_dots, 4, sum0 a0, sum1 a1, sum2 a2, sum3 a3);
dots_of!(two_dots, 2, sum0 a0, sum1 a1);
dots_of!(one_dot, 1, sum0 a0);
