//! States through positions, backward.
//!
//! With S before a position, S′ = g·S what is kept of it, `held = S′ᵀk̂`, `δ = beta·(v − held)`, `S⁺ = S′ + k̂·δᵀ` and `out = S⁺ᵀq̂`, and D the gradient of S⁺ without what `out` adds:
//!
//! `D⁺ = D + q̂·doutᵀ`, `dδ = D⁺ᵀk̂`, `dv = beta·dδ`, `dheld = −dv`, `dbeta = dδ·(v − held)`, `dq̂ = S⁺·dout`, `dk̂ = D⁺·δ + S′·dheld`, `D′ = D⁺ + k̂·dheldᵀ`,
//! `ddecay = Σ S′·D′`, and the gradient of S is g·D′.
//!
//! Sums over columns are of S and of D alone: `dq̂ = g·(S·dout) + k̂·(dout·δ)`, `dk̂ = D·δ + q̂·(dout·δ) + g·(S·dheld)`, `ddecay = g·(Σ S·D + q̂·(S·dout) + k̂·(S·dheld))`.
//!
//! Pairs (b, h) go in waves, as [`Waves`] says, of which a task takes [`COLUMNS`] columns of a state of one. It computes the states at the
//! beginnings of stretches; then, from the last stretch to the first, those of all positions of the stretch, and goes back through
//! them. Then other tasks, position by position, add what columns and heads of a key head have left, in their order, and make gradients of queries and keys
//! out of those of normalized ones.
//!
//! Tolerance against f64: 4e-6·√S of the largest gradient of its kind, before the rounding; of queries and keys of a norm below 1 that divided by it.

use super::scan::{Heads, Operands, POSITIONS, reciprocal_norm};
use super::states::{self, BackSums, COLUMNS, Position};
use crate::check::ScanDims;
use crate::cpu::Isa;
use crate::cpu::floats::{Floats, FloatsMut};
use crate::cpu::isa::fma;
use crate::cpu::threads::{Carver, SharedMut, Threads};
use crate::cpu::vector;
use crate::ops::Waves;
use std::ops::Range;

/// Positions of a task that adds what columns and heads have left.
const EACH: usize = 4;

/// Results.
pub struct Gradients<'a> {
    pub qkv: FloatsMut<'a>,
    pub decay: SharedMut<'a, f32>,
    pub beta: SharedMut<'a, f32>,
}

pub fn backward(
    threads: &Threads,
    operands: &Operands<'_>,
    dout: Floats<'_>,
    results: &Gradients<'_>,
    scratch: &mut [f32],
) {
    let dims = operands.dims;
    if dims.tokens() == 0 {
        return;
    }
    let waves = Waves::new(dims.sequences, dims.length, dims.heads);
    let isa = threads.isa();
    let call = Call { dims, waves, operands, dout, results, scratch: SharedMut::new(scratch) };
    for first in (0..dims.pairs()).step_by(waves.pairs) {
        let pairs = waves.pairs.min(dims.pairs() - first);
        let part = |task: usize| Part::new(&call, first, task / waves.parts, task % waves.parts);
        // SAFETY: these columns of the pair belong to the task.
        threads.run(pairs * waves.parts, |task, scratch| unsafe { part(task).begin(isa, scratch) });
        for stretch in (0..waves.stretches).rev() {
            // SAFETY: as above.
            threads
                .run(pairs * waves.parts, |task, scratch| unsafe { part(task).back(isa, stretch, scratch) });
            let (key_heads, positions) = (pairs / dims.heads.group(), call.stretch(stretch));
            let of_head = positions.len().div_ceil(EACH);
            threads.run(key_heads * of_head, |task, scratch| {
                let at = positions.start + task % of_head * EACH;
                let positions = at..positions.end.min(at + EACH);
                // SAFETY: these positions of the key head belong to this task.
                unsafe { call.finish(isa, first, task / of_head, positions, scratch) };
            });
        }
    }
}

struct Call<'a> {
    dims: ScanDims,
    waves: Waves,
    operands: &'a Operands<'a>,
    dout: Floats<'a>,
    results: &'a Gradients<'a>,
    scratch: SharedMut<'a, f32>,
}

impl Call<'_> {
    /// Positions of a stretch.
    fn stretch(&self, stretch: usize) -> Range<usize> {
        let start = stretch * self.waves.positions;
        start..self.dims.length.min(start + self.waves.positions)
    }

    /// Where the scratch has the sums of a part of a pair of the wave at a position.
    fn sums_at(&self, place: usize, part: usize, position: usize) -> usize {
        let Waves { positions, .. } = self.waves;
        place * self.waves.of_pair()
            + self.waves.of_states()
            + (part * positions + position % positions) * self.waves.of_sums()
    }

    /// Adds the sums of all parts and of the value heads of a key head, which is `index` of its wave, and writes what comes of them.
    ///
    /// # Safety
    /// No other task has these positions of the key head.
    unsafe fn finish(
        &self,
        isa: Isa,
        first: usize,
        index: usize,
        positions: Range<usize>,
        scratch: &mut [f32],
    ) {
        let (dims, keys) = (&self.dims, self.waves.key_size);
        let group = dims.heads.group();
        let (b, _, g) = dims.pair(first + index * group);
        let mut carver = Carver::new(scratch);
        let [total, x] = [2 * keys, keys].map(|floats| carver.take(floats));
        for position in positions {
            let row = b * dims.length + position;
            total.fill(0.0);
            for place in index * group..(index + 1) * group {
                let (mut decay, mut beta) = (0.0, 0.0);
                for part in 0..self.waves.parts {
                    let at = self.sums_at(place, part, position);
                    // SAFETY: the caller's promise; who wrote them is through.
                    let sums = unsafe { self.scratch.slice(at, self.waves.of_sums()) };
                    vector::add_assign(isa, total, &sums[..2 * keys]);
                    decay += sums[2 * keys];
                    beta += sums[2 * keys + 1];
                }
                let at = dims.gate(row, dims.pair(first + place).1);
                // SAFETY: the caller's promise.
                unsafe { self.results.decay.set(at, decay) };
                // SAFETY: as above.
                unsafe { self.results.beta.set(at, beta) };
            }
            let scale = (dims.heads.key_size as f64).sqrt().recip() as f32;
            let ats = [(dims.q(row, g), scale), (dims.k(row, g), 1.0)];
            for ((at, factor), dunit) in ats.into_iter().zip(total.chunks_exact_mut(keys)) {
                let size = dims.heads.key_size;
                let (x, dunit) = (&mut x[..size], &mut dunit[..size]);
                self.operands.qkv.slice(at, size).widen(isa, x);
                let reciprocal = reciprocal_norm(isa, x);
                vector::scale(isa, x, reciprocal);
                let inner = vector::dot(isa, x, dunit);
                vector::add_weighted_rows(isa, dunit, &[-inner], x);
                vector::scale(isa, dunit, factor * reciprocal);
                // SAFETY: the caller's promise.
                unsafe { self.results.qkv.write(isa, at, dunit) };
            }
        }
    }
}

/// Some columns of the state of a pair, which has a place in its wave.
struct Part<'a> {
    call: &'a Call<'a>,
    place: usize,
    /// Its sequence, value head and key head.
    pair: (usize, usize, usize),
    index: usize,
    columns: Range<usize>,
}

/// Positions on their way.
struct Room<'s> {
    heads: Heads<'s>,
    /// `[POSITIONS, COLUMNS]`.
    v: &'s mut [f32],
    /// As `v`.
    dout: &'s mut [f32],
}

impl<'a> Part<'a> {
    fn new(call: &'a Call<'a>, first: usize, place: usize, index: usize) -> Self {
        let start = index * COLUMNS;
        let columns = start..call.waves.value_size.min(start + COLUMNS);
        Self { call, place, pair: call.dims.pair(first + place), index, columns }
    }

    /// State `index` of the pair, of these columns: the gradient, then those at the beginnings of stretches but the first, then those of
    /// the positions of a stretch. Those of a part lie side by side, since whole states are powers of two apart.
    ///
    /// # Safety
    /// No other slice of it is alive.
    #[expect(clippy::mut_from_ref, reason = "the caller's promise")]
    unsafe fn state(&self, index: usize) -> &mut [f32] {
        let waves = &self.call.waves;
        let (states, width) = (waves.stretches + waves.positions, self.columns.len());
        let of_part = self.place * waves.of_pair() + self.columns.start * states * waves.key_size;
        // SAFETY: the caller's promise.
        unsafe { self.call.scratch.slice(of_part + index * width * waves.key_size, width * waves.key_size) }
    }

    /// Clears the gradient, and computes the states at the beginnings of stretches.
    ///
    /// # Safety
    /// No other task has these columns of the pair.
    unsafe fn begin(&self, isa: Isa, scratch: &mut [f32]) {
        let mut room = self.room(&mut Carver::new(scratch));
        // SAFETY: the caller's promise.
        unsafe { self.state(0) }.fill(0.0);
        for stretch in 1..self.call.waves.stretches {
            // SAFETY: as above.
            let state = unsafe { self.state(stretch) };
            if stretch == 1 {
                state.fill(0.0);
            } else {
                // SAFETY: as above; the states are different ones.
                state.copy_from_slice(unsafe { self.state(stretch - 1) });
            }
            for positions in pieces(self.call.stretch(stretch - 1)) {
                self.load(isa, positions.clone(), &mut room, false);
                for i in 0..positions.len() {
                    states::advance(isa, None, state, room.position(i, self.columns.len()));
                }
            }
        }
    }

    /// From the end of a stretch to its beginning.
    ///
    /// # Safety
    /// No other task has these columns of the pair.
    unsafe fn back(&self, isa: Isa, stretch: usize, scratch: &mut [f32]) {
        let (call, width) = (self.call, self.columns.len());
        let mut carver = Carver::new(scratch);
        let mut room = self.room(&mut carver);
        let [of_out, of_held, of_delta] = [(); 3].map(|()| carver.take(call.waves.key_size));
        let dv = carver.take(width);
        let mut sums = BackSums { of_out, of_held, of_delta, dv, beta: 0.0, out_delta: 0.0, decay: 0.0 };
        let positions = call.stretch(stretch);
        let before = |position: usize| call.waves.stretches + position - positions.start;
        // SAFETY: the caller's promise.
        let start = unsafe { self.state(before(positions.start)) };
        if stretch == 0 {
            start.fill(0.0);
        } else {
            // SAFETY: as above.
            start.copy_from_slice(unsafe { self.state(stretch) });
        }
        for piece in pieces(positions.start..positions.end - 1) {
            self.load(isa, piece.clone(), &mut room, false);
            for position in piece.clone() {
                // SAFETY: as above; the states are different ones.
                let (old, new) = unsafe { (self.state(before(position)), self.state(before(position + 1))) };
                states::advance(isa, Some(old), new, room.position(position - piece.start, width));
            }
        }
        // SAFETY: as above.
        let dstate = unsafe { self.state(0) };
        for piece in pieces(positions.clone()).rev() {
            self.load(isa, piece.clone(), &mut room, true);
            for position in piece.clone().rev() {
                // SAFETY: as above.
                let old = unsafe { self.state(before(position)) };
                let i = position - piece.start;
                let (at, dout) = (room.position(i, width), &room.dout[i * COLUMNS..][..width]);
                sums.clear();
                states::back(isa, old, dstate, at, dout, &mut sums);
                // SAFETY: as above.
                unsafe { self.leave(isa, position, at, &mut sums) };
            }
        }
    }

    /// Writes the gradients of these columns of a value, and what they add to the others.
    ///
    /// # Safety
    /// No other task has these columns of the pair.
    unsafe fn leave(&self, isa: Isa, position: usize, at: Position<'_>, sums: &mut BackSums<'_>) {
        let (b, h, _) = self.pair;
        let (dims, keys) = (&self.call.dims, self.call.waves.key_size);
        let first = self.call.sums_at(self.place, self.index, position);
        // SAFETY: the caller's promise.
        let left = unsafe { self.call.scratch.slice(first, self.call.waves.of_sums()) };
        let (dq, rest) = left.split_at_mut(keys);
        let (dk, gates) = rest.split_at_mut(keys);
        let decay = sums.decay + vector::dot(isa, at.q, sums.of_out) + vector::dot(isa, at.k, sums.of_held);
        gates.copy_from_slice(&[at.factor * decay, sums.beta]);
        combine(isa, sums.of_out, at.factor, at.k, sums.out_delta, dq);
        combine(isa, sums.of_held, at.factor, at.q, sums.out_delta, dk);
        vector::add_assign(isa, dk, sums.of_delta);
        let at = dims.v(b * dims.length + position, h) + self.columns.start;
        // SAFETY: as above.
        unsafe { self.call.results.qkv.write(isa, at, sums.dv) };
    }

    fn room<'s>(&self, carver: &mut Carver<'s>) -> Room<'s> {
        let heads = Heads::carve(self.call.waves.key_size, carver);
        let [v, dout] = [(); 2].map(|()| carver.take(POSITIONS * COLUMNS));
        Room { heads, v, dout }
    }

    /// Reads positions, and of gradients of what came out if they are `wanted`.
    fn load(&self, isa: Isa, positions: Range<usize>, room: &mut Room<'_>, wanted: bool) {
        let (call, (b, h, g)) = (self.call, self.pair);
        let (dims, width) = (&call.dims, self.columns.len());
        let rows = b * dims.length + positions.start..b * dims.length + positions.end;
        room.heads.load(isa, call.operands, rows.clone(), (h, g));
        for (i, row) in rows.enumerate() {
            let of_position = i * COLUMNS..i * COLUMNS + width;
            let v = call.operands.qkv.slice(dims.v(row, h) + self.columns.start, width);
            v.widen(isa, &mut room.v[of_position.clone()]);
            if wanted {
                let dout = call.dout.slice(dims.out(row, h) + self.columns.start, width);
                dout.widen(isa, &mut room.dout[of_position]);
            }
        }
    }
}

impl Room<'_> {
    fn position(&self, i: usize, width: usize) -> Position<'_> {
        let of_keys = i * self.heads.keys..(i + 1) * self.heads.keys;
        Position {
            q: &self.heads.q[of_keys.clone()],
            k: &self.heads.k[of_keys],
            v: &self.v[i * COLUMNS..][..width],
            factor: self.heads.factor[i],
            beta: self.heads.beta[i],
        }
    }
}

impl BackSums<'_> {
    fn clear(&mut self) {
        for sums in [&mut *self.of_out, &mut *self.of_held, &mut *self.of_delta] {
            sums.fill(0.0);
        }
        (self.beta, self.out_delta, self.decay) = (0.0, 0.0, 0.0);
    }
}

/// Ranges of up to [`POSITIONS`].
fn pieces(positions: Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let count = positions.len().div_ceil(POSITIONS);
    (0..count).map(move |piece| {
        let start = positions.start + piece * POSITIONS;
        start..positions.end.min(start + POSITIONS)
    })
}

multiversion! {
    /// `out = a·factor + b·other`.
    fn combine(a: &[f32], factor: f32, b: &[f32], other: f32, out: &mut [f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = fma::<FMA>(*a, factor, b * other);
        }
    }
}
