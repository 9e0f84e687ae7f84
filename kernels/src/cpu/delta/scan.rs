//! States through positions, forward.
//!
//! A task takes some parts of the state of a pair (b, h), of [`COLUMNS`] columns each, and all positions, [`POSITIONS`] at a time: their
//! queries and keys are normalized once for these parts. Carried states are repacked at both ends; with one position what counts is
//! that they come from memory and go back. How many parts a task has depends on how many pairs there are for the threads, and changes
//! no bit.
//!
//! Tolerance against f64: 2e-6 of the largest of states and values, before the rounding, with factors that forget within some hundreds of
//! positions; that of carried states is the same.

use super::states::{self, COLUMNS, Positions};
use crate::DeltaSpec;
use crate::check::{CarriedSequence, ScanDims};
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, FloatsMut};
use crate::cpu::threads::{Carver, SharedMut, Threads};
use crate::cpu::vector;
use crate::ops::SQUARES_EPS;
use std::ops::Range;

/// Positions at a time.
pub const POSITIONS: usize = 32;

/// Parts of a task, at most: what it works in fits the scratch, whatever the size of a value.
const PARTS_MAX: usize = 32;

/// Tasks for each thread, if pairs are cut into parts.
const TASKS: usize = 4;

/// What a scan reads, forward and backward.
pub struct Operands<'a> {
    pub dims: ScanDims,
    pub qkv: Floats<'a>,
    /// `[T, H]`.
    pub decay: &'a [f32],
    /// `[T, H]`.
    pub beta: &'a [f32],
}

/// Queries, keys and gates of some positions, as a value head has them.
pub struct Heads<'a> {
    /// `[positions, keys]`, normalized, zeros beyond K.
    pub q: &'a mut [f32],
    /// As `q`.
    pub k: &'a mut [f32],
    /// `[positions]`.
    pub factor: &'a mut [f32],
    /// `[positions]`.
    pub beta: &'a mut [f32],
    pub keys: usize,
}

impl<'a> Heads<'a> {
    /// Room for [`POSITIONS`].
    pub fn carve(keys: usize, carver: &mut Carver<'a>) -> Self {
        let [q, k] = [(); 2].map(|()| carver.take(POSITIONS * keys));
        let [factor, beta] = [(); 2].map(|()| carver.take(POSITIONS));
        Self { q, k, factor, beta, keys }
    }

    /// Of these rows.
    pub fn load(&mut self, isa: Isa, operands: &Operands<'_>, rows: Range<usize>, (h, g): (usize, usize)) {
        let (dims, count) = (&operands.dims, rows.len());
        let scale = (dims.heads.key_size as f64).sqrt().recip() as f32;
        for (i, row) in rows.enumerate() {
            let at = i * self.keys..(i + 1) * self.keys;
            normalize(isa, operands.qkv, dims.q(row, g), dims.heads.key_size, scale, &mut self.q[at.clone()]);
            normalize(isa, operands.qkv, dims.k(row, g), dims.heads.key_size, 1.0, &mut self.k[at]);
            self.factor[i] = operands.decay[dims.gate(row, h)];
            self.beta[i] = operands.beta[dims.gate(row, h)];
        }
        vector::exp_sum(isa, &mut self.factor[..count], 1.0, 0.0);
    }
}

/// `x·factor/√(Σx² + eps)` of `size` elements from `at`, and zeros.
fn normalize(isa: Isa, x: Floats<'_>, at: usize, size: usize, factor: f32, out: &mut [f32]) {
    let (out, beyond) = out.split_at_mut(size);
    x.slice(at, size).widen(isa, out);
    let reciprocal = reciprocal_norm(isa, out);
    vector::scale(isa, out, factor * reciprocal);
    beyond.fill(0.0);
}

/// `1/√(Σx² + eps)`.
pub fn reciprocal_norm(isa: Isa, x: &[f32]) -> f32 {
    (vector::dot(isa, x, x) + SQUARES_EPS as f32).sqrt().recip()
}

/// States, as `[N, H, K, V]`, with what is carried of each sequence.
type Carried<'a> = Option<(SharedMut<'a, f32>, &'a [CarriedSequence])>;

pub fn forward(threads: &Threads, operands: &Operands<'_>, carried: Carried<'_>, out: FloatsMut<'_>) {
    let dims = &operands.dims;
    let parts = dims.heads.value_size.div_ceil(COLUMNS);
    let wanted = (TASKS * threads.count()).div_ceil(dims.pairs().max(1));
    let each = parts.div_ceil(wanted).clamp(1, PARTS_MAX);
    let of_pair = parts.div_ceil(each);
    threads.run(dims.pairs() * of_pair, |task, scratch| {
        let first = task % of_pair * each * COLUMNS;
        let columns = first..dims.heads.value_size.min(first + each * COLUMNS);
        Columns { operands, carried, out, pair: task / of_pair, columns }.run(threads.isa(), scratch);
    });
}

/// Some columns of the state of a pair.
struct Columns<'a> {
    operands: &'a Operands<'a>,
    carried: Carried<'a>,
    out: FloatsMut<'a>,
    pair: usize,
    columns: Range<usize>,
}

impl Columns<'_> {
    fn run(&self, isa: Isa, scratch: &mut [f32]) {
        let dims = &self.operands.dims;
        let (b, h, g) = dims.pair(self.pair);
        let (keys, width) = (dims.heads.key_size, self.columns.len());
        let stride = width.next_multiple_of(COLUMNS);
        let mut carver = Carver::new(scratch);
        let state = carver.take(keys * stride);
        let mut heads = Heads::carve(keys, &mut carver);
        let [v, out] = [(); 2].map(|()| carver.take(POSITIONS * stride));
        let mut valid = dims.length;
        state.fill(0.0);
        if let Some((states, sequences)) = self.carried {
            valid = sequences[b].valid;
            if !sequences[b].is_new {
                self.repack(states, dims.state(sequences[b].slot, h), state, false);
            }
        }
        v.fill(0.0);
        let mut first = 0;
        while first < valid {
            let count = POSITIONS.min(valid - first);
            let rows = b * dims.length + first..b * dims.length + first + count;
            heads.load(isa, self.operands, rows.clone(), (h, g));
            for (row, v) in rows.clone().zip(v.chunks_exact_mut(stride)) {
                self.operands
                    .qkv
                    .slice(dims.v(row, h) + self.columns.start, width)
                    .widen(isa, &mut v[..width]);
            }
            let positions = Positions {
                q: &heads.q[..count * keys],
                k: &heads.k[..count * keys],
                factor: &heads.factor[..count],
                beta: &heads.beta[..count],
            };
            for (part, state) in state.chunks_exact_mut(keys * COLUMNS).enumerate() {
                let at = part * COLUMNS;
                states::forward(isa, state, positions, &v[at..], &mut out[at..], stride);
            }
            for (row, out) in rows.zip(out.chunks_exact(stride)) {
                // SAFETY: these columns of the position belong to this task.
                unsafe { self.out.write(isa, dims.out(row, h) + self.columns.start, &out[..width]) };
            }
            first += count;
        }
        out[..width].fill(0.0);
        for row in b * dims.length + valid..(b + 1) * dims.length {
            // SAFETY: as above.
            unsafe { self.out.write(isa, dims.out(row, h) + self.columns.start, &out[..width]) };
        }
        if let Some((states, sequences)) = self.carried {
            self.repack(states, dims.state(sequences[b].slot, h), state, true);
        }
    }

    /// Copies these columns of the state that begins at `at` from or to parts of it.
    fn repack(&self, states: SharedMut<'_, f32>, at: usize, parts: &mut [f32], back: bool) {
        let DeltaSpec { key_size: keys, value_size: values, .. } = self.operands.dims.heads;
        for (part, packed) in parts.chunks_exact_mut(keys * COLUMNS).enumerate() {
            let first = self.columns.start + part * COLUMNS;
            let width = COLUMNS.min(self.columns.end - first);
            for (row, packed) in packed.chunks_exact_mut(COLUMNS).enumerate() {
                // SAFETY: these columns of the slot's state belong to this task.
                let state = unsafe { states.slice(at + row * values + first, width) };
                if back {
                    state.copy_from_slice(&packed[..width]);
                } else {
                    packed[..width].copy_from_slice(state);
                }
            }
        }
    }
}
