//! The gated delta rule, position by position, with all states of a pair in memory.

use super::{Reference, values};
use crate::check::{self, CarriedSequence, ConvolutionDims, ScanDims};
use crate::ops::SQUARES_EPS;
use crate::{Carried, DeltaRule, DeltaSpec, Result, View, ViewMut};

impl DeltaRule for Reference {
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve(x, weight, carried.as_ref(), &out);
        let (x_bsc, weight_cw) = (values::read(x), values::read(weight));
        let kept = (dims.taps - 1) * dims.channels;
        let mut before_bwc = vec![0.0; dims.sequences * kept];
        let Some(Carried { state, slots, starts, last }) = carried else {
            let sums = convolved(&dims, &x_bsc, &before_bwc, &weight_cw);
            values::write(out, &sums.into_iter().map(silu).collect::<Vec<_>>());
            return Ok(());
        };
        let mut state_nwc = values::read(state.view());
        let places = [slots, starts, last].map(values::ints);
        let sequences = check::carried_sequences(places, state.shape().dims()[0], dims.length);
        for (b, sequence) in sequences.iter().enumerate().filter(|(_, sequence)| !sequence.is_new) {
            before_bwc[b * kept..][..kept].copy_from_slice(&state_nwc[sequence.slot * kept..][..kept]);
        }
        let sums = convolved(&dims, &x_bsc, &before_bwc, &weight_cw);
        values::write(out, &sums.into_iter().map(silu).collect::<Vec<_>>());
        for (b, sequence) in sequences.iter().enumerate() {
            let rows = x_bsc[b * dims.length * dims.channels..][..sequence.valid * dims.channels].iter();
            let all: Vec<f64> = before_bwc[b * kept..][..kept].iter().chain(rows).copied().collect();
            state_nwc[sequence.slot * kept..][..kept].copy_from_slice(&all[all.len() - kept..]);
        }
        values::write(state, &state_nwc);
        Ok(())
    }

    fn convolve_backward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        dout: View<'_>,
        dx: ViewMut<'_>,
        dweight: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve_backward(x, weight, dout, &dx, &dweight);
        let (x_bsc, weight_cw) = (values::read(x), values::read(weight));
        let zeros = vec![0.0; dims.sequences * (dims.taps - 1) * dims.channels];
        let sums = convolved(&dims, &x_bsc, &zeros, &weight_cw);
        let dsums: Vec<f64> =
            sums.into_iter().zip(values::read(dout)).map(|(sum, dout)| dout * silu_slope(sum)).collect();
        let (mut dx_bsc, mut dweight_cw) = (vec![0.0; x_bsc.len()], values::read(dweight.view()));
        for (i, dsum) in dsums.iter().enumerate() {
            let (s, c) = (i / dims.channels % dims.length, i % dims.channels);
            for w in 0..dims.taps {
                // How far before this position the tap is.
                let before = dims.taps - 1 - w;
                if before <= s {
                    dx_bsc[i - before * dims.channels] += weight_cw[c * dims.taps + w] * dsum;
                    dweight_cw[c * dims.taps + w] += x_bsc[i - before * dims.channels] * dsum;
                }
            }
        }
        values::write(dx, &dx_bsc);
        values::write(dweight, &dweight_cw);
        Ok(())
    }

    fn gates(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        decay: ViewMut<'_>,
        beta: ViewMut<'_>,
    ) -> Result {
        let dims = check::gates(a, b, a_log, dt_bias, &decay, &beta);
        let (a_log_h, dt_bias_h) = (values::read(a_log), values::read(dt_bias));
        let decay_th: Vec<f64> = (values::read(a).iter().enumerate())
            .map(|(i, a)| (i % dims.width, a))
            .map(|(h, a)| -a_log_h[h].exp() * softplus(a + dt_bias_h[h]))
            .collect();
        values::write(decay, &decay_th);
        values::write(beta, &values::read(b).into_iter().map(sigmoid).collect::<Vec<_>>());
        Ok(())
    }

    fn gates_backward(
        &self,
        a: View<'_>,
        b: View<'_>,
        a_log: View<'_>,
        dt_bias: View<'_>,
        ddecay: View<'_>,
        dbeta: View<'_>,
        da: ViewMut<'_>,
        db: ViewMut<'_>,
        da_log: ViewMut<'_>,
        ddt_bias: ViewMut<'_>,
    ) -> Result {
        let dims = check::gates_backward(a, b, a_log, dt_bias, ddecay, dbeta, &da, &db, &da_log, &ddt_bias);
        let (a_log_h, dt_bias_h) = (values::read(a_log), values::read(dt_bias));
        let (mut da_log_h, mut ddt_bias_h) = (values::read(da_log.view()), values::read(ddt_bias.view()));
        let mut da_th = Vec::new();
        for (i, (a, ddecay)) in values::read(a).iter().zip(values::read(ddecay)).enumerate() {
            let h = i % dims.width;
            let (x, rate) = (a + dt_bias_h[h], -a_log_h[h].exp());
            let dx = ddecay * rate * if x > SOFTPLUS_MAX { 1.0 } else { sigmoid(x) };
            da_log_h[h] += ddecay * rate * softplus(x);
            ddt_bias_h[h] += dx;
            da_th.push(dx);
        }
        let db_th: Vec<f64> = (values::read(b).into_iter().zip(values::read(dbeta)))
            .map(|(b, dbeta)| dbeta * sigmoid(b) * (1.0 - sigmoid(b)))
            .collect();
        values::write(da, &da_th);
        values::write(db, &db_th);
        values::write(da_log, &da_log_h);
        values::write(ddt_bias, &ddt_bias_h);
        Ok(())
    }

    fn scan(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let dims = check::scan(qkv, decay, beta, spec, carried.as_ref(), &out);
        let scan =
            Scan { dims, qkv: values::read(qkv), decay: values::read(decay), beta: values::read(beta) };
        let mut out_tv = vec![0.0; dims.tokens() * spec.value_heads * spec.value_size];
        let whole = CarriedSequence { slot: 0, is_new: true, valid: dims.length };
        let (mut sequences, mut states) = (vec![whole; dims.sequences], Vec::new());
        if let Some(Carried { state, slots, starts, last }) = &carried {
            let places = [*slots, *starts, *last].map(values::ints);
            sequences = check::carried_sequences(places, state.shape().dims()[0], dims.length);
            states = values::read(state.view());
        }
        for pair in 0..dims.pairs() {
            let (b, h, _) = dims.pair(pair);
            let CarriedSequence { slot, is_new, valid } = sequences[b];
            let mut state = vec![0.0; spec.key_size * spec.value_size];
            let held = dims.state(slot, h)..dims.state(slot, h) + state.len();
            if !is_new {
                state.copy_from_slice(&states[held.clone()]);
            }
            for row in b * dims.length..b * dims.length + valid {
                let position = scan.position(row, h);
                position.step(&mut state);
                let out = &mut out_tv[dims.out(row, h)..][..spec.value_size];
                out.copy_from_slice(&columns(&state, &position.q));
            }
            if carried.is_some() {
                states[held].copy_from_slice(&state);
            }
        }
        values::write(out, &out_tv);
        if let Some(carried) = carried {
            values::write(carried.state, &states);
        }
        Ok(())
    }

    fn scan_backward(
        &self,
        qkv: View<'_>,
        decay: View<'_>,
        beta: View<'_>,
        spec: DeltaSpec,
        dout: View<'_>,
        dqkv: ViewMut<'_>,
        ddecay: ViewMut<'_>,
        dbeta: ViewMut<'_>,
        scratch: ViewMut<'_>,
    ) -> Result {
        let dims = check::scan_backward(qkv, decay, beta, spec, dout, &dqkv, &ddecay, &dbeta, &scratch);
        let scan =
            Scan { dims, qkv: values::read(qkv), decay: values::read(decay), beta: values::read(beta) };
        let dout = values::read(dout);
        let mut dqkv_tc = vec![0.0; scan.qkv.len()];
        let (mut ddecay_th, mut dbeta_th) = (vec![0.0; scan.decay.len()], vec![0.0; scan.beta.len()]);
        for pair in 0..dims.pairs() {
            let (b, h, g) = dims.pair(pair);
            let rows = b * dims.length..(b + 1) * dims.length;
            let mut before = vec![vec![0.0; spec.key_size * spec.value_size]];
            for row in rows.clone() {
                let mut state = before[row - rows.start].clone();
                scan.position(row, h).step(&mut state);
                before.push(state);
            }
            let mut dstate = vec![0.0; spec.key_size * spec.value_size];
            for row in rows.clone().rev() {
                let of_out = &dout[dims.out(row, h)..][..spec.value_size];
                let position = scan.position(row, h);
                let states = &before[row - rows.start..][..2];
                let found = position.back(&states[0], &states[1], of_out, &mut dstate);
                let at = dims.gate(row, h);
                (ddecay_th[at], dbeta_th[at]) = (found.decay, found.beta);
                dqkv_tc[dims.v(row, h)..][..spec.value_size].copy_from_slice(&found.v);
                let factors = [1.0 / (spec.key_size as f64).sqrt(), 1.0];
                let ats = [dims.q(row, g), dims.k(row, g)];
                for ((at, factor), dunit) in ats.into_iter().zip(factors).zip([found.q, found.k]) {
                    let dx = normalize_back(&scan.qkv[at..][..spec.key_size], factor, &dunit);
                    dqkv_tc[at..][..spec.key_size].iter_mut().zip(dx).for_each(|(sum, dx)| *sum += dx);
                }
            }
        }
        values::write(dqkv, &dqkv_tc);
        values::write(ddecay, &ddecay_th);
        values::write(dbeta, &dbeta_th);
        Ok(())
    }
}

/// Where softplus is the identity, as in torch.
const SOFTPLUS_MAX: f64 = 20.0;

fn softplus(x: f64) -> f64 {
    if x > SOFTPLUS_MAX { x } else { x.exp().ln_1p() }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn silu_slope(x: f64) -> f64 {
    sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
}

/// Sums of all positions, with what is before each sequence.
fn convolved(dims: &ConvolutionDims, x_bsc: &[f64], before_bwc: &[f64], weight_cw: &[f64]) -> Vec<f64> {
    let kept = (dims.taps - 1) * dims.channels;
    let of_sequence = dims.length * dims.channels;
    let sum = |i: usize| -> f64 {
        let (b, at, c) = (i / of_sequence, i % of_sequence, i % dims.channels);
        let input = |w: usize| {
            // Counted from the first of what is before.
            let place = at + w * dims.channels;
            if place < kept { before_bwc[b * kept + place] } else { x_bsc[b * of_sequence + place - kept] }
        };
        (0..dims.taps).map(|w| weight_cw[c * dims.taps + w] * input(w)).sum()
    };
    (0..x_bsc.len()).map(sum).collect()
}

/// `x·factor/√(Σx² + eps)`.
fn normalize(x: &[f64], factor: f64) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    x.iter().map(|x| x * factor / (squares + SQUARES_EPS).sqrt()).collect()
}

/// The gradient of x from that of what [`normalize`] makes of it.
fn normalize_back(x: &[f64], factor: f64, dunit: &[f64]) -> Vec<f64> {
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let reciprocal = 1.0 / (squares + SQUARES_EPS).sqrt();
    let inner = dot(x, dunit) * reciprocal * reciprocal;
    x.iter().zip(dunit).map(|(x, dunit)| factor * reciprocal * (dunit - x * inner)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `stateᵀ·x`.
fn columns(state: &[f64], x: &[f64]) -> Vec<f64> {
    let width = state.len() / x.len();
    let mut sums = vec![0.0; width];
    for (row, x) in state.chunks(width).zip(x) {
        sums.iter_mut().zip(row).for_each(|(sum, state)| *sum += state * x);
    }
    sums
}

/// `state·x`.
fn rows(state: &[f64], x: &[f64]) -> Vec<f64> {
    state.chunks(x.len()).map(|row| dot(row, x)).collect()
}

/// `state += a·bᵀ`.
fn add_outer(state: &mut [f64], a: &[f64], b: &[f64]) {
    for (row, a) in state.chunks_mut(b.len()).zip(a) {
        row.iter_mut().zip(b).for_each(|(state, b)| *state += a * b);
    }
}

struct Scan {
    dims: ScanDims,
    qkv: Vec<f64>,
    decay: Vec<f64>,
    beta: Vec<f64>,
}

/// What a value head reads of a position; query and key normalized.
struct Position<'a> {
    q: Vec<f64>,
    k: Vec<f64>,
    v: &'a [f64],
    factor: f64,
    beta: f64,
}

/// Gradients of a position, those of query and key as normalized.
struct PositionGradients {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    decay: f64,
    beta: f64,
}

impl Scan {
    fn position(&self, row: usize, h: usize) -> Position<'_> {
        let (dims, spec) = (&self.dims, &self.dims.heads);
        let g = h / spec.group();
        let scale = 1.0 / (spec.key_size as f64).sqrt();
        Position {
            q: normalize(&self.qkv[dims.q(row, g)..][..spec.key_size], scale),
            k: normalize(&self.qkv[dims.k(row, g)..][..spec.key_size], 1.0),
            v: &self.qkv[dims.v(row, h)..][..spec.value_size],
            factor: self.decay[dims.gate(row, h)].exp(),
            beta: self.beta[dims.gate(row, h)],
        }
    }
}

impl Position<'_> {
    /// `v − Sᵀk̂` of the decayed state.
    fn error(&self, decayed: &[f64]) -> Vec<f64> {
        self.v.iter().zip(columns(decayed, &self.k)).map(|(v, held)| v - held).collect()
    }

    fn step(&self, state: &mut [f64]) {
        state.iter_mut().for_each(|state| *state *= self.factor);
        let delta: Vec<f64> = self.error(state).iter().map(|error| self.beta * error).collect();
        add_outer(state, &self.k, &delta);
    }

    /// From the gradient of the state after this position to that of the one before.
    fn back(&self, before: &[f64], after: &[f64], dout: &[f64], dstate: &mut [f64]) -> PositionGradients {
        let decayed: Vec<f64> = before.iter().map(|state| state * self.factor).collect();
        let error = self.error(&decayed);
        let delta: Vec<f64> = error.iter().map(|error| self.beta * error).collect();
        let q = rows(after, dout);
        add_outer(dstate, &self.q, dout);
        let ddelta = columns(dstate, &self.k);
        let v: Vec<f64> = ddelta.iter().map(|ddelta| self.beta * ddelta).collect();
        let dheld: Vec<f64> = v.iter().map(|dv| -dv).collect();
        let of_held = rows(&decayed, &dheld);
        let k = rows(dstate, &delta).iter().zip(of_held).map(|(a, b)| a + b).collect();
        add_outer(dstate, &self.k, &dheld);
        let decay = dot(&decayed, dstate);
        dstate.iter_mut().for_each(|dstate| *dstate *= self.factor);
        PositionGradients { q, k, v, decay, beta: dot(&ddelta, &error) }
    }
}
