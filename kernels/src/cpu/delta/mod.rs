//! The gated delta rule (Yang et al., arXiv 2412.06464), and the layer around it.
//!
//! `convolution` goes through the channels, gates are below, `scan` takes states through positions forward and `backward` back, over
//! `states`, the loops over elements of states.
//!
//! Tolerance against f64: decay 1e-6 of itself, beta 4e-7; gradients of gates of order 1 become gradients of a within 4e-7 of the rate, of b
//! within 2e-7; those of a_log and dt_bias are sums over T of such numbers, and 4e-7·√T of a decay or of the rate off. The other files
//! state their own.

mod backward;
mod convolution;
mod scan;
mod states;

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut, floats, floats_mut, ints};
use super::reduce;
use super::threads::{Carver, SharedMut};
use super::vector::{self, exp, ln_1p, sigmoid};
use crate::check;
use crate::{Carried, DeltaRule, DeltaSpec, Result, View, ViewMut};

impl DeltaRule for Cpu {
    fn convolve(
        &self,
        x: View<'_>,
        weight: View<'_>,
        carried: Option<Carried<'_>>,
        out: ViewMut<'_>,
    ) -> Result {
        let dims = check::convolve(x, weight, carried.as_ref(), &out);
        let carried = carried.map(|Carried { state, slots, starts, last }| {
            let slot_count = state.shape().dims()[0];
            let places = [slots, starts, last].map(ints);
            (FloatsMut::new(state), check::carried_sequences(places, slot_count, dims.length))
        });
        let carried = carried.as_ref().map(|(state, sequences)| (*state, &sequences[..]));
        let (x, weight, out) = (Floats::new(x), Floats::new(weight), FloatsMut::new(out));
        convolution::forward(&self.threads, &dims, [x, weight], carried, out);
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
        let operands = [x, weight, dout].map(Floats::new);
        convolution::backward(&self.threads, &dims, operands, FloatsMut::new(dx), floats_mut(dweight));
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
        let [a, b, a_log, dt_bias] = [a, b, a_log, dt_bias].map(Floats::new);
        let (decay_th, beta_th) = (SharedMut::new(floats_mut(decay)), SharedMut::new(floats_mut(beta)));
        let isa = self.threads.isa();
        self.threads.run_ranges(dims.rows, (CHUNK / dims.width.max(1)).max(1), |rows, scratch| {
            let mut carver = Carver::new(scratch);
            let [rate_h, bias_h, of_row] = [(); 3].map(|()| carver.take(BLOCK));
            for col in (0..dims.width).step_by(BLOCK) {
                let len = BLOCK.min(dims.width - col);
                a_log.slice(col, len).widen(isa, &mut rate_h[..len]);
                vector::exp_sum(isa, &mut rate_h[..len], 1.0, 0.0);
                let bias_h = dt_bias.read(isa, col, len, bias_h);
                for at in rows.clone().map(|row| row * dims.width + col) {
                    // SAFETY: these rows belong to this task.
                    let decay_h = unsafe { decay_th.slice(at, len) };
                    log_factors(isa, a.read(isa, at, len, of_row), bias_h, &rate_h[..len], decay_h);
                    // SAFETY: as above.
                    sigmoids(isa, b.read(isa, at, len, of_row), unsafe { beta_th.slice(at, len) });
                }
            }
        });
        Ok(())
    }

    /// The sums over rows as [`reduce`] describes, each element of da and db on the way.
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
        let [a, b, a_log, dt_bias] = [a, b, a_log, dt_bias].map(Floats::new);
        let (ddecay_th, dbeta_th, isa) = (floats(ddecay), floats(dbeta), self.threads.isa());
        let (da, db) = (FloatsMut::new(da), FloatsMut::new(db));
        let of_heads = |block: reduce::Block| {
            let [mut rate_h, mut bias_h] = [[0.0; reduce::COLS]; 2];
            a_log.slice(block.first_col, block.cols).widen(isa, &mut rate_h[..block.cols]);
            vector::exp_sum(isa, &mut rate_h[..block.cols], 1.0, 0.0);
            dt_bias.slice(block.first_col, block.cols).widen(isa, &mut bias_h[..block.cols]);
            (rate_h, bias_h)
        };
        reduce::sum(&self.threads, dims, floats_mut(ddt_bias), |block, sums| {
            let (rate_h, bias_h) = of_heads(block);
            let [mut of_row, mut dx_h] = [[0.0; reduce::COLS]; 2];
            let cols = block.cols;
            for at in block.rows().map(|row| row * dims.width + block.first_col) {
                let (dx_h, ddecay_h) = (&mut dx_h[..cols], &ddecay_th[at..][..cols]);
                let a_h = a.read(isa, at, cols, &mut of_row);
                log_factor_gradients(isa, a_h, &bias_h[..cols], &rate_h[..cols], ddecay_h, dx_h);
                vector::add_assign(isa, sums, dx_h);
                // SAFETY: the rows and columns of a block are nobody else's.
                unsafe { da.write(isa, at, dx_h) };
                sigmoid_gradients(isa, b.read(isa, at, cols, &mut of_row), &dbeta_th[at..][..cols], dx_h);
                // SAFETY: as above.
                unsafe { db.write(isa, at, dx_h) };
            }
        });
        reduce::sum(&self.threads, dims, floats_mut(da_log), |block, sums| {
            let (rate_h, bias_h) = of_heads(block);
            let [mut of_row, mut decay_h] = [[0.0; reduce::COLS]; 2];
            let cols = block.cols;
            for at in block.rows().map(|row| row * dims.width + block.first_col) {
                let a_h = a.read(isa, at, cols, &mut of_row);
                log_factors(isa, a_h, &bias_h[..cols], &rate_h[..cols], &mut decay_h[..cols]);
                vector::multiply_add(isa, sums, &decay_h[..cols], &ddecay_th[at..][..cols], 1.0);
            }
        });
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
        let carried = carried.map(|Carried { state, slots, starts, last }| {
            let slot_count = state.shape().dims()[0];
            let places = [slots, starts, last].map(ints);
            let sequences = check::carried_sequences(places, slot_count, dims.length);
            (SharedMut::new(floats_mut(state)), sequences)
        });
        let carried = carried.as_ref().map(|(states, sequences)| (*states, &sequences[..]));
        let operands =
            scan::Operands { dims, qkv: Floats::new(qkv), decay: floats(decay), beta: floats(beta) };
        scan::forward(&self.threads, &operands, carried, FloatsMut::new(out));
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
        let operands =
            scan::Operands { dims, qkv: Floats::new(qkv), decay: floats(decay), beta: floats(beta) };
        let results = backward::Gradients {
            qkv: FloatsMut::new(dqkv),
            decay: SharedMut::new(floats_mut(ddecay)),
            beta: SharedMut::new(floats_mut(dbeta)),
        };
        backward::backward(&self.threads, &operands, Floats::new(dout), &results, floats_mut(scratch));
        Ok(())
    }
}

/// `ln(1 + eˣ)`, which beyond 20 is x in f32.
#[inline(always)]
fn softplus<const FMA: bool>(x: f32) -> f32 {
    // A NaN is in the exponential.
    let positive = if x > 0.0 { x } else { 0.0 };
    positive + ln_1p::<FMA>(exp::<FMA>(-x.abs()))
}

multiversion! {
    /// `out = −rate·softplus(a + bias)`.
    fn log_factors(a: &[f32], bias: &[f32], rate: &[f32], out: &mut [f32]) {
        for (((out, a), bias), rate) in out.iter_mut().zip(a).zip(bias).zip(rate) {
            *out = -rate * softplus::<FMA>(a + bias);
        }
    }
}

multiversion! {
    /// `out = −rate·σ(a + bias)·dout`.
    fn log_factor_gradients(a: &[f32], bias: &[f32], rate: &[f32], dout: &[f32], out: &mut [f32]) {
        for ((((out, a), bias), rate), dout) in out.iter_mut().zip(a).zip(bias).zip(rate).zip(dout) {
            *out = -rate * sigmoid::<FMA>(a + bias) * dout;
        }
    }
}

multiversion! {
    /// `out = σ(b)`.
    fn sigmoids(b: &[f32], out: &mut [f32]) {
        for (out, b) in out.iter_mut().zip(b) {
            *out = sigmoid::<FMA>(*b);
        }
    }
}

multiversion! {
    /// `out = σ(b)·(1 − σ(b))·dout`.
    fn sigmoid_gradients(b: &[f32], dout: &[f32], out: &mut [f32]) {
        for ((out, b), dout) in out.iter_mut().zip(b).zip(dout) {
            // The slope is that of −b, too, and the share of what is left would lose its digits near 1.
            let below = sigmoid::<FMA>(-b.abs());
            *out = below * (1.0 - below) * dout;
        }
    }
}
