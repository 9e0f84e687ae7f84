//! Loops over the elements of states, on [`Lanes`].
//!
//! Forward a part of a state lies as `[K, COLUMNS]`, small enough for the first-level cache, and goes through some positions there. What a
//! position's key finds is summed while the position before writes the state, so that each of them is one pass, and not one that reads and
//! one that writes. All sums are over k, ascending, in the lane of their column: neither pieces of a sequence nor parts of a state change
//! a bit.
//!
//! Backward a state lies as `[V, K]`, K rounded up with zeros: of the sums that a position asks for three are over columns and one over k.
//! Columns are taken [`ROWS`] at a time.

use crate::cpu::Isa;
use crate::cpu::isa::Level;
use crate::cpu::lanes::{self, Lanes};
use crate::cpu::vector::{LANES, sum_lanes};
use crate::ops::Waves;

/// Columns of a part of a state.
pub const COLUMNS: usize = Waves::COLUMNS;

/// Columns that go backward together.
const ROWS: usize = 4;

/// Defines a function that takes an [`Isa`] first, over an `unsafe` one that is generic over lanes and a number of them.
macro_rules! over_lanes {
    ($(#[$meta:meta])* unsafe fn $name:ident = $generic:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        unsafe fn $name(isa: Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $generic::<lanes::Avx2, 1>($($arg),*) }
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512($($arg: $ty),*) {
                // SAFETY: the caller's promise.
                unsafe { $generic::<lanes::Avx512, 2>($($arg),*) }
            }

            match isa.level() {
                // SAFETY: the caller's promise; no instructions are needed.
                Level::Generic => unsafe { $generic::<lanes::Generic, 1>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the caller's promise; an `Isa` exists only when the processor has its instructions.
                Level::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Level::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}

/// Some positions as a part of a state meets them.
#[derive(Clone, Copy)]
pub struct Positions<'a> {
    /// `[positions, K]`, normalized.
    pub q: &'a [f32],
    /// `[positions, K]`, normalized.
    pub k: &'a [f32],
    /// `[positions]`: what is kept of the state.
    pub factor: &'a [f32],
    /// `[positions]`.
    pub beta: &'a [f32],
}

/// Takes a part of a state, `[K, COLUMNS]`, through positions. `v` and `out` have the columns of a position `stride` elements after those of
/// the one before.
pub fn forward(
    isa: Isa,
    state: &mut [f32],
    positions: Positions<'_>,
    v: &[f32],
    out: &mut [f32],
    stride: usize,
) {
    let count = positions.factor.len();
    if count == 0 {
        return;
    }
    let keys = state.len() / COLUMNS;
    assert!(state.len() == keys * COLUMNS && positions.beta.len() == count);
    assert!(positions.q.len() == count * keys && positions.k.len() == count * keys);
    assert!(v.len().min(out.len()) >= (count - 1) * stride + COLUMNS);
    // SAFETY: all are as long as they have to be (asserted).
    unsafe { forward_on(isa, state, positions, v.as_ptr(), out.as_mut_ptr(), stride) };
}

over_lanes! {
    /// # Safety
    /// See [`forward_of`].
    unsafe fn forward_on = forward_of(state: &mut [f32], positions: Positions<'_>, v: *const f32, out: *mut f32, stride: usize)
}

/// # Safety
/// The processor has the instruction set; operands are as long as [`forward`] asserts.
#[inline(always)]
unsafe fn forward_of<L: Lanes, const N: usize>(
    state: &mut [f32],
    positions: Positions<'_>,
    v: *const f32,
    out: *mut f32,
    stride: usize,
) {
    const { assert!(L::WIDTH == LANES && COLUMNS.is_multiple_of(N * LANES)) };
    let Positions { q, k, factor, beta } = positions;
    let keys = state.len() / COLUMNS;
    let state = state.as_mut_ptr();
    for col in (0..COLUMNS).step_by(N * LANES) {
        // SAFETY: the caller's promise.
        unsafe {
            let lane = |i: usize| col + i * LANES;
            let mut held = [L::zero(); N];
            for row in 0..keys {
                let key = L::splat(*k.get_unchecked(row));
                for (i, held) in held.iter_mut().enumerate() {
                    *held = key.fma(L::load(state.add(row * COLUMNS + lane(i))), *held);
                }
            }
            for position in 0..factor.len() {
                let kept = L::splat(*factor.get_unchecked(position));
                let minus = L::splat(-*factor.get_unchecked(position));
                let beta = L::splat(*beta.get_unchecked(position));
                let mut delta = [L::zero(); N];
                for i in 0..N {
                    delta[i] = minus.fma(held[i], L::load(v.add(position * stride + lane(i)))).mul(beta);
                }
                let mut sums = [L::zero(); N];
                held = [L::zero(); N];
                let (of_q, of_k) = (q.as_ptr().add(position * keys), k.as_ptr().add(position * keys));
                // The key of the position after, if there is one.
                let next = if position + 1 < factor.len() { of_k.add(keys) } else { of_k };
                for row in 0..keys {
                    let (query, key, next) =
                        (L::splat(*of_q.add(row)), L::splat(*of_k.add(row)), L::splat(*next.add(row)));
                    for i in 0..N {
                        let at = state.add(row * COLUMNS + lane(i));
                        let now = key.fma(delta[i], L::load(at).mul(kept));
                        now.store(at);
                        sums[i] = query.fma(now, sums[i]);
                        held[i] = next.fma(now, held[i]);
                    }
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    sums.store(out.add(position * stride + lane(i)));
                }
            }
        }
    }
}

/// A position as columns of a state meet it, K rounded up with zeros.
#[derive(Clone, Copy)]
pub struct Position<'a> {
    /// `[K]`, normalized.
    pub q: &'a [f32],
    /// `[K]`, normalized.
    pub k: &'a [f32],
    /// Of the columns.
    pub v: &'a [f32],
    pub factor: f32,
    pub beta: f32,
}

/// Writes to `after` what a position makes of columns of a state, `[columns, K]`: of those that `after` holds, or of others.
pub fn advance(isa: Isa, before: Option<&[f32]>, after: &mut [f32], position: Position<'_>) {
    let keys = position.k.len();
    assert!(keys.is_multiple_of(LANES) && after.len() == position.v.len() * keys);
    assert!(before.is_none_or(|before| before.len() == after.len()));
    let before = before.map_or(after.as_ptr(), <[f32]>::as_ptr);
    // SAFETY: columns are as long as they have to be (asserted).
    unsafe { advance_on(isa, before, after.as_mut_ptr(), position) };
}

over_lanes! {
    /// # Safety
    /// See [`advance_of`].
    unsafe fn advance_on = advance_of(before: *const f32, after: *mut f32, position: Position<'_>)
}

/// # Safety
/// The processor has the instruction set; both states are as many columns as `v` has elements, the same or apart.
#[inline(always)]
unsafe fn advance_of<L: Lanes, const N: usize>(before: *const f32, after: *mut f32, position: Position<'_>) {
    let (columns, keys) = (position.v.len(), position.k.len());
    let whole = columns - columns % ROWS;
    for column in (0..whole).step_by(ROWS) {
        // SAFETY: the caller's promise.
        unsafe {
            advance_rows::<L, ROWS>(before.add(column * keys), after.add(column * keys), position, column);
        }
    }
    for column in whole..columns {
        // SAFETY: as above.
        unsafe {
            advance_rows::<L, 1>(before.add(column * keys), after.add(column * keys), position, column);
        }
    }
}

/// # Safety
/// As for [`advance_of`], of R columns.
#[inline(always)]
unsafe fn advance_rows<L: Lanes, const R: usize>(
    before: *const f32,
    after: *mut f32,
    Position { k, v, factor, beta, .. }: Position<'_>,
    column: usize,
) {
    let keys = k.len();
    // SAFETY: the caller's promise.
    unsafe {
        let mut held = [L::zero(); R];
        for at in (0..keys).step_by(LANES) {
            let key = L::load(k.as_ptr().add(at));
            for (r, held) in held.iter_mut().enumerate() {
                *held = key.fma(L::load(before.add(r * keys + at)), *held);
            }
        }
        let held = sums_of(held);
        let mut delta = [L::zero(); R];
        for (r, delta) in delta.iter_mut().enumerate() {
            *delta = L::splat(beta * (*v.get_unchecked(column + r) - factor * held[r]));
        }
        let kept = L::splat(factor);
        for at in (0..keys).step_by(LANES) {
            let key = L::load(k.as_ptr().add(at));
            for (r, delta) in delta.iter().enumerate() {
                let now = key.fma(*delta, L::load(before.add(r * keys + at)).mul(kept));
                now.store(after.add(r * keys + at));
            }
        }
    }
}

/// What columns of a state add to the gradients of a position, and room for it: three sums over columns, `[K]` each.
pub struct BackSums<'a> {
    /// `before·dout`.
    pub of_out: &'a mut [f32],
    /// `before·dheld`, where held is what the key finds.
    pub of_held: &'a mut [f32],
    /// `dafter·δ`, without what this position adds to it.
    pub of_delta: &'a mut [f32],
    /// Of each column that of its value.
    pub dv: &'a mut [f32],
    /// `Σ dδ·(v − held)`, the gradient of beta.
    pub beta: f32,
    /// `Σ dout·δ`.
    pub out_delta: f32,
    /// `Σ before·dafter` without what this position adds to it.
    pub decay: f32,
}

/// Takes columns of the gradient of a state, `[columns, K]`, from the state after a position to the one before it; `before` is that one. `sums` are
/// added to.
pub fn back(
    isa: Isa,
    before: &[f32],
    dstate: &mut [f32],
    position: Position<'_>,
    dout: &[f32],
    sums: &mut BackSums<'_>,
) {
    let (columns, keys) = (position.v.len(), position.k.len());
    assert!(keys.is_multiple_of(LANES) && position.q.len() == keys);
    assert!(before.len() == columns * keys && dstate.len() == columns * keys);
    assert!(dout.len() == columns && sums.dv.len() == columns);
    assert!([&sums.of_out, &sums.of_held, &sums.of_delta].iter().all(|sums| sums.len() == keys));
    // SAFETY: all are as long as they have to be (asserted).
    unsafe { back_on(isa, before, dstate, position, dout, sums) };
}

over_lanes! {
    /// # Safety
    /// See [`back_of`].
    unsafe fn back_on = back_of(
        before: &[f32],
        dstate: &mut [f32],
        position: Position<'_>,
        dout: &[f32],
        sums: &mut BackSums<'_>,
    )
}

/// # Safety
/// The processor has the instruction set; operands are as long as [`back`] asserts.
#[inline(always)]
unsafe fn back_of<L: Lanes, const N: usize>(
    before: &[f32],
    dstate: &mut [f32],
    position: Position<'_>,
    dout: &[f32],
    sums: &mut BackSums<'_>,
) {
    let (columns, keys) = (position.v.len(), position.k.len());
    // SAFETY: the caller's promise.
    unsafe {
        let (mut query_key, mut of_states) = (L::zero(), L::zero());
        for at in (0..keys).step_by(LANES) {
            query_key =
                L::load(position.q.as_ptr().add(at)).fma(L::load(position.k.as_ptr().add(at)), query_key);
        }
        let query_key = sum(query_key);
        let whole = columns - columns % ROWS;
        for column in (0..whole).step_by(ROWS) {
            let states = (before.as_ptr().add(column * keys), dstate.as_mut_ptr().add(column * keys));
            let added = back_rows::<L, ROWS>(states, position, query_key, dout, column, sums);
            of_states = L::splat(1.0).fma(added, of_states);
        }
        for column in whole..columns {
            let states = (before.as_ptr().add(column * keys), dstate.as_mut_ptr().add(column * keys));
            let added = back_rows::<L, 1>(states, position, query_key, dout, column, sums);
            of_states = L::splat(1.0).fma(added, of_states);
        }
        sums.decay += sum(of_states);
    }
}

/// Gives `Σ before·dafter` of these columns, lane by lane.
///
/// # Safety
/// As for [`back_of`], of R columns from `column` on.
#[inline(always)]
unsafe fn back_rows<L: Lanes, const R: usize>(
    (before, dstate): (*const f32, *mut f32),
    Position { q, k, v, factor, beta }: Position<'_>,
    query_key: f32,
    dout: &[f32],
    column: usize,
    sums: &mut BackSums<'_>,
) -> L {
    let keys = k.len();
    // SAFETY: the caller's promise.
    unsafe {
        let (mut held, mut ddelta) = ([L::zero(); R], [L::zero(); R]);
        for at in (0..keys).step_by(LANES) {
            let key = L::load(k.as_ptr().add(at));
            for r in 0..R {
                held[r] = key.fma(L::load(before.add(r * keys + at)), held[r]);
                ddelta[r] = key.fma(L::load(dstate.add(r * keys + at)), ddelta[r]);
            }
        }
        let (held, ddelta) = (sums_of(held), sums_of(ddelta));
        // Of each column: dout, dheld, δ, and the first two times the factor.
        let mut of_columns = [[L::zero(); 5]; R];
        for (r, of_column) in of_columns.iter_mut().enumerate() {
            let dout = *dout.get_unchecked(column + r);
            let error = *v.get_unchecked(column + r) - factor * held[r];
            let ddelta = ddelta[r] + query_key * dout;
            let (delta, dv) = (beta * error, beta * ddelta);
            *sums.dv.get_unchecked_mut(column + r) = dv;
            sums.beta += ddelta * error;
            sums.out_delta += dout * delta;
            for (lanes, x) in of_column.iter_mut().zip([dout, -dv, delta, factor * dout, -factor * dv]) {
                *lanes = L::splat(x);
            }
        }
        let (kept, mut of_states) = (L::splat(factor), L::zero());
        let [of_out, of_held, of_delta] =
            [&mut *sums.of_out, &mut *sums.of_held, &mut *sums.of_delta].map(<[f32]>::as_mut_ptr);
        for at in (0..keys).step_by(LANES) {
            let (query, key) = (L::load(q.as_ptr().add(at)), L::load(k.as_ptr().add(at)));
            let mut totals = [L::load(of_out.add(at)), L::load(of_held.add(at)), L::load(of_delta.add(at))];
            for (r, [dout, dheld, delta, kept_dout, kept_dheld]) in of_columns.into_iter().enumerate() {
                let (state, to) = (L::load(before.add(r * keys + at)), dstate.add(r * keys + at));
                let gradient = L::load(to);
                totals[0] = dout.fma(state, totals[0]);
                totals[1] = dheld.fma(state, totals[1]);
                totals[2] = delta.fma(gradient, totals[2]);
                of_states = state.fma(gradient, of_states);
                key.fma(kept_dheld, query.fma(kept_dout, gradient.mul(kept))).store(to);
            }
            for (total, sums) in totals.into_iter().zip([of_out, of_held, of_delta]) {
                total.store(sums.add(at));
            }
        }
        of_states
    }
}

/// The sum of the lanes of each.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
unsafe fn sums_of<L: Lanes, const R: usize>(lanes: [L; R]) -> [f32; R] {
    let mut sums = [0.0; R];
    // SAFETY: the caller's promise.
    unsafe {
        if let (Some(four), Some(of_four)) = (lanes.first_chunk(), sums.first_chunk_mut()) {
            *of_four = L::sums(*four);
        } else {
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum = self::sum(lanes);
            }
        }
    }
    sums
}

/// The sum of lanes.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
unsafe fn sum<L: Lanes>(lanes: L) -> f32 {
    let mut apart = [0.0; LANES];
    // SAFETY: there is room for all of them.
    unsafe { lanes.store(apart.as_mut_ptr()) };
    sum_lanes(apart)
}
