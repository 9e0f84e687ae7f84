//! The convolution in front of the rule: every channel by itself, over a few positions, and a SiLU.
//!
//! A task takes some channels of some positions of a sequence, with what is before them, as rows of f32; loops go over channels side by side.
//! Backward computes the sums again, also those of the few positions after its own whose taps reach back to them.
//!
//! The gradient of a weight is a sum over T: products of up to [`ROWS`] positions are added, then these sums in their order within
//! parts of T that depend on shapes alone, and then the parts.
//!
//! Tolerance against f64, of terms of order 1: 2e-6·√W, before the rounding, gradients of inputs 4e-6·√W; those of weights, sums over T,
//! 2e-6·√T.

use crate::DeltaSpec;
use crate::check::{CarriedSequence, ConvolutionDims};
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, FloatsMut};
use crate::cpu::isa::fma;
use crate::cpu::threads::{Carver, SHARED_BYTES, SharedMut, Threads};
use crate::cpu::vector::{self, LANES, sigmoid};
use std::ops::Range;

/// Channels of a task.
const COLS: usize = 256;
/// Positions at a time.
const ROWS: usize = 32;
const _: () = assert!(
    ROWS >= DeltaSpec::TAPS_MAX - 1,
    "what is before a sequence is seen from its first positions alone"
);

/// Rows of a part of T, unless that gives too many parts.
const PART_ROWS: usize = 256;
const PARTS_MAX: usize = 32;

/// x, the weights, the states and what is carried of each sequence, the result.
pub fn forward(
    threads: &Threads,
    dims: &ConvolutionDims,
    [x, weight]: [Floats<'_>; 2],
    carried: Option<(FloatsMut<'_>, &[CarriedSequence])>,
    out: FloatsMut<'_>,
) {
    let isa = threads.isa();
    let (stretches, chunks) = (dims.length.div_ceil(ROWS), dims.channels.div_ceil(COLS));
    let kept = dims.taps - 1;
    threads.run(dims.sequences * stretches * chunks, |task, scratch| {
        let (b, first, cols) =
            (task / chunks / stretches, task / chunks % stretches * ROWS, block(dims, task % chunks));
        let rows = ROWS.min(dims.length - first);
        let mut carver = Carver::new(scratch);
        let weights_wc = carver.take(dims.taps * cols.len());
        let window = carver.take((kept + rows) * cols.len());
        let [sums, result] = [(); 2].map(|()| carver.take(cols.len()));
        let plain = carver.take(dims.taps * cols.len());
        transposed(isa, dims, weight, &cols, plain, weights_wc);
        let input =
            |position: usize| x.slice((b * dims.length + position) * dims.channels + cols.start, cols.len());
        for (i, row) in window.chunks_exact_mut(cols.len()).enumerate() {
            match (first + i).checked_sub(kept) {
                Some(position) => input(position).widen(isa, row),
                None => match carried {
                    Some((state, sequences)) if !sequences[b].is_new => {
                        let at = (sequences[b].slot * kept + i) * dims.channels + cols.start;
                        // SAFETY: these channels of the slot belong to the task of the sequence's first positions, which this is.
                        unsafe { state.read(isa, at, row) };
                    }
                    _ => row.fill(0.0),
                },
            }
        }
        for s in 0..rows {
            weighted(isa, weights_wc, &window[s * cols.len()..][..dims.taps * cols.len()], sums);
            silus(isa, sums, result);
            // SAFETY: these channels of the position belong to this task.
            unsafe { out.write(isa, (b * dims.length + first + s) * dims.channels + cols.start, result) };
        }
        if let Some((state, sequences)) = carried.filter(|_| first == 0) {
            let CarriedSequence { slot, valid, .. } = sequences[b];
            for i in 0..kept {
                let row = match (valid + i).checked_sub(kept) {
                    Some(position) => input(position).read(isa, 0, cols.len(), result),
                    // The window still has what was there before.
                    None => &window[(valid + i) * cols.len()..][..cols.len()],
                };
                // SAFETY: as above; it was read before, by this task.
                unsafe { state.write(isa, (slot * kept + i) * dims.channels + cols.start, row) };
            }
        }
    });
}

/// x, the weights and the gradient of what came out; the gradients of x, and of weights, which is added to.
pub fn backward(
    threads: &Threads,
    dims: &ConvolutionDims,
    operands: [Floats<'_>; 3],
    dx: FloatsMut<'_>,
    dweight_cw: &mut [f32],
) {
    let tokens = dims.tokens();
    if tokens == 0 || dims.channels == 0 {
        return;
    }
    let isa = threads.isa();
    let fit = SHARED_BYTES / size_of::<f32>() / dweight_cw.len();
    let parts = tokens.div_ceil(PART_ROWS).min(PARTS_MAX).min(fit).max(1);
    let part_rows = tokens.div_ceil(parts);
    let (parts, chunks) = (tokens.div_ceil(part_rows), dims.channels.div_ceil(COLS));
    let gradient = Gradient { dims, operands, dx };
    let run = |sums: SharedMut<'_, f32>| {
        threads.run(parts * chunks, |task, scratch| {
            let (part, cols) = (task / chunks, block(dims, task % chunks));
            let rows = part * part_rows..tokens.min((part + 1) * part_rows);
            // SAFETY: these channels' weights of the part belong to this task.
            let sums = unsafe {
                sums.slice(part * dims.channels * dims.taps + cols.start * dims.taps, cols.len() * dims.taps)
            };
            gradient.run(isa, rows, &cols, scratch, sums);
        });
    };
    if parts == 1 {
        return run(SharedMut::new(dweight_cw));
    }
    let mut shared = threads.shared();
    let partial = &mut shared.floats()[..parts * dweight_cw.len()];
    partial.fill(0.0);
    run(SharedMut::new(partial));
    for sums in partial.chunks_exact(dweight_cw.len()) {
        vector::add_assign(isa, dweight_cw, sums);
    }
}

/// What tasks of the backward pass read and write.
struct Gradient<'a> {
    dims: &'a ConvolutionDims,
    operands: [Floats<'a>; 3],
    dx: FloatsMut<'a>,
}

impl Gradient<'_> {
    /// Of some rows of all sequences; adds to the weights' sums.
    fn run(
        &self,
        isa: Isa,
        rows: Range<usize>,
        cols: &Range<usize>,
        scratch: &mut [f32],
        sums_cw: &mut [f32],
    ) {
        let (dims, [x, weight, dout], width) = (self.dims, self.operands, cols.len());
        let kept = dims.taps - 1;
        let mut carver = Carver::new(scratch);
        let [weights_wc, reversed_wc, sums_wc] = [(); 3].map(|()| carver.take(dims.taps * width));
        let window = carver.take((2 * kept + ROWS) * width);
        let dsums = carver.take((kept + ROWS) * width);
        let [sums, result] = [(); 2].map(|()| carver.take(width));
        transposed(isa, dims, weight, cols, reversed_wc, weights_wc);
        for (reversed, weights) in
            reversed_wc.chunks_exact_mut(width).zip(weights_wc.chunks_exact(width).rev())
        {
            reversed.copy_from_slice(weights);
        }
        sums_wc.fill(0.0);
        let mut row = rows.start;
        while row < rows.end {
            let (start, first) = (row - row % dims.length, row % dims.length);
            let positions = ROWS.min(rows.end - row).min(dims.length - first);
            // With those whose taps reach back to them.
            let reached = (positions + kept).min(dims.length - first);
            let at = |position: usize| (start + position) * dims.channels + cols.start;
            for (i, row) in window[..(kept + reached) * width].chunks_exact_mut(width).enumerate() {
                match (first + i).checked_sub(kept) {
                    Some(position) => x.slice(at(position), width).widen(isa, row),
                    None => row.fill(0.0),
                }
            }
            for (i, dsum) in dsums.chunks_exact_mut(width).enumerate() {
                if i < reached {
                    weighted(isa, weights_wc, &window[i * width..][..dims.taps * width], sums);
                    silu_gradients(isa, sums, dout.read(isa, at(first + i), width, result), dsum);
                } else {
                    dsum.fill(0.0);
                }
            }
            for i in 0..positions {
                weighted(isa, reversed_wc, &dsums[i * width..][..dims.taps * width], result);
                // SAFETY: these channels of the position belong to this task.
                unsafe { self.dx.write(isa, at(first + i), result) };
            }
            for (w, sums) in sums_wc.chunks_exact_mut(width).enumerate() {
                let inputs = &window[w * width..][..positions * width];
                add_products(isa, &dsums[..positions * width], inputs, sums);
            }
            row += positions;
        }
        for (c, sums) in sums_cw.chunks_exact_mut(dims.taps).enumerate() {
            for (w, sum) in sums.iter_mut().enumerate() {
                *sum += sums_wc[w * width + c];
            }
        }
    }
}

/// The channels of a chunk.
fn block(dims: &ConvolutionDims, chunk: usize) -> Range<usize> {
    chunk * COLS..dims.channels.min((chunk + 1) * COLS)
}

/// The weights of some channels, channels side by side.
fn transposed(
    isa: Isa,
    dims: &ConvolutionDims,
    weight: Floats<'_>,
    cols: &Range<usize>,
    plain: &mut [f32],
    weights_wc: &mut [f32],
) {
    let weights_cw = weight.read(isa, cols.start * dims.taps, cols.len() * dims.taps, plain);
    for (w, weights_c) in weights_wc.chunks_exact_mut(cols.len()).enumerate() {
        for (c, weight) in weights_c.iter_mut().enumerate() {
            *weight = weights_cw[c * dims.taps + w];
        }
    }
}

multiversion! {
    /// `out[c] = Σ_w weights[w, c]·rows[w, c]`, w ascending.
    fn weighted(weights: &[f32], rows: &[f32], out: &mut [f32]) {
        let width = out.len();
        assert!(rows.len() == weights.len() && weights.len().is_multiple_of(width));
        let (chunks, tail) = out.as_chunks_mut::<LANES>();
        let first = chunks.len() * LANES;
        for (chunk, out) in chunks.iter_mut().enumerate() {
            let mut sums = [0.0; LANES];
            for (weights, row) in weights.chunks_exact(width).zip(rows.chunks_exact(width)) {
                let (weights, row) = (&weights[chunk * LANES..][..LANES], &row[chunk * LANES..][..LANES]);
                for i in 0..LANES {
                    sums[i] = fma::<FMA>(weights[i], row[i], sums[i]);
                }
            }
            *out = sums;
        }
        for (i, out) in tail.iter_mut().enumerate() {
            let terms = weights.chunks_exact(width).zip(rows.chunks_exact(width));
            *out = terms.fold(0.0, |sum, (weights, row)| fma::<FMA>(weights[first + i], row[first + i], sum));
        }
    }
}

multiversion! {
    /// `sums[c] += Σ_s a[s, c]·b[s, c]`, s ascending.
    fn add_products(a: &[f32], b: &[f32], sums: &mut [f32]) {
        let width = sums.len();
        assert!(a.len() == b.len() && a.len().is_multiple_of(width));
        let (chunks, tail) = sums.as_chunks_mut::<LANES>();
        let first = chunks.len() * LANES;
        for (chunk, total) in chunks.iter_mut().enumerate() {
            let mut sums = [0.0; LANES];
            for (a, b) in a.chunks_exact(width).zip(b.chunks_exact(width)) {
                let (a, b) = (&a[chunk * LANES..][..LANES], &b[chunk * LANES..][..LANES]);
                for i in 0..LANES {
                    sums[i] = fma::<FMA>(a[i], b[i], sums[i]);
                }
            }
            for i in 0..LANES {
                total[i] += sums[i];
            }
        }
        for (i, total) in tail.iter_mut().enumerate() {
            let terms = a.chunks_exact(width).zip(b.chunks_exact(width));
            *total += terms.fold(0.0, |sum, (a, b)| fma::<FMA>(a[first + i], b[first + i], sum));
        }
    }
}

multiversion! {
    /// `out = x·σ(x)`.
    fn silus(x: &[f32], out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * sigmoid::<FMA>(*x);
        }
    }
}

multiversion! {
    /// `out = dout·σ(x)·(1 + x·(1 − σ(x)))`.
    fn silu_gradients(x: &[f32], dout: &[f32], out: &mut [f32]) {
        for ((out, x), dout) in out.iter_mut().zip(x).zip(dout) {
            let share = sigmoid::<FMA>(*x);
            *out = dout * share * fma::<FMA>(*x, 1.0 - share, 1.0);
        }
    }
}
