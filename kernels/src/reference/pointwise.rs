//! Operations that work element by element.

use super::{Reference, values};
use crate::check;
use crate::{Activation, Elementwise, GateFunction, Result, View, ViewMut};

impl Activation for Reference {
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise(
            "gated",
            &[check::read("gate", gate), check::read("up", up), check::write("out", &out)],
        );
        let (gate, up) = (values::read(gate), values::read(up));
        let result: Vec<f64> =
            gate.iter().zip(&up).map(|(gate, up)| function(f, *gate).0 * linear(f, *up).0).collect();
        values::write(out, &result);
        Ok(())
    }

    fn gated_backward(
        &self,
        f: GateFunction,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        check::elementwise(
            "gated backward",
            &[
                check::read("gate", gate),
                check::read("up", up),
                check::read("dout", dout),
                check::write("dgate", &dgate),
                check::write("dup", &dup),
            ],
        );
        let (gate, up, dout) = (values::read(gate), values::read(up), values::read(dout));
        let mut of_gate = Vec::with_capacity(gate.len());
        let mut of_up = Vec::with_capacity(gate.len());
        for ((gate, up), dout) in gate.iter().zip(&up).zip(&dout) {
            let ((value, slope), (factor, factor_slope)) = (function(f, *gate), linear(f, *up));
            of_gate.push(dout * factor * slope);
            of_up.push(dout * value * factor_slope);
        }
        values::write(dgate, &of_gate);
        values::write(dup, &of_up);
        Ok(())
    }
}

impl Elementwise for Reference {
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise("add", &[check::read("a", a), check::read("b", b), check::write("out", &out)]);
        let (a, b) = (values::read(a), values::read(b));
        values::write(out, &a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>());
        Ok(())
    }

    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result {
        check::elementwise("add_assign", &[check::write("acc", &acc), check::read("x", x)]);
        let (old, x) = (values::read(acc.view()), values::read(x));
        values::write(acc, &old.iter().zip(&x).map(|(old, x)| old + x).collect::<Vec<_>>());
        Ok(())
    }

    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result {
        let dims = check::add_bias(&x, bias);
        let (mut x_rn, bias_n) = (values::read(x.view()), values::read(bias));
        for row in x_rn.chunks_mut(dims.width.max(1)) {
            for (x, bias) in row.iter_mut().zip(&bias_n) {
                *x += bias;
            }
        }
        values::write(x, &x_rn);
        Ok(())
    }

    fn affine(&self, x: ViewMut<'_>, factor: f32, offset: f32) -> Result {
        check::elementwise("affine", &[check::write("x", &x)]);
        let (factor, offset) = (f64::from(factor), f64::from(offset));
        let mapped: Vec<_> = values::read(x.view()).iter().map(|x| x * factor + offset).collect();
        values::write(x, &mapped);
        Ok(())
    }

    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("a", a), check::read("b", b), check::write("out", &out)];
        check::elementwise("multiply", &operands);
        let (a, b) = (values::read(a), values::read(b));
        values::write(out, &a.iter().zip(&b).map(|(a, b)| a * b).collect::<Vec<_>>());
        Ok(())
    }

    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result {
        check::scale(&x, factor);
        let factor = values::read(factor)[0];
        let scaled: Vec<_> = values::read(x.view()).iter().map(|x| factor * x).collect();
        values::write(x, &scaled);
        Ok(())
    }

    fn cap(&self, x: ViewMut<'_>, cap: f32) -> Result {
        check::elementwise("cap", &[check::write("x", &x)]);
        let cap = f64::from(cap);
        let capped: Vec<_> = values::read(x.view()).iter().map(|x| cap * (x / cap).tanh()).collect();
        values::write(x, &capped);
        Ok(())
    }

    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise("cast", &[check::read("x", x), check::write("out", &out)]);
        values::write(out, &values::read(x));
        Ok(())
    }

    fn zero(&self, out: ViewMut<'_>) -> Result {
        out.into_bytes().into_host().fill(0);
        Ok(())
    }
}

/// What up becomes as a factor, and its derivative.
fn linear(f: GateFunction, up: f64) -> (f64, f64) {
    const LIMIT: f64 = GateFunction::SWISH_LIMIT;
    match f {
        GateFunction::Silu | GateFunction::Gelu | GateFunction::GeluTanh | GateFunction::Sigmoid => (up, 1.0),
        // `clamp` keeps NaNs.
        GateFunction::ClampedSwish => {
            (up.clamp(-LIMIT, LIMIT) + 1.0, if up.abs() > LIMIT { 0.0 } else { 1.0 })
        }
    }
}

/// `x·share(x)`, and its derivative `share + x·share′`, or share and derivative themselves; x is held first where the function says so.
pub(crate) fn function(f: GateFunction, x: f64) -> (f64, f64) {
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, PI};
    if f == GateFunction::ClampedSwish && x > GateFunction::SWISH_LIMIT {
        return (function(f, GateFunction::SWISH_LIMIT).0, 0.0);
    }
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let (share, derivative) = match f {
        GateFunction::Sigmoid => {
            let share = sigmoid(x);
            return (share, share * (1.0 - share));
        }
        GateFunction::Silu => {
            let share = sigmoid(x);
            (share, share * (1.0 - share))
        }
        GateFunction::Gelu => {
            (0.5 * libm::erfc(-x * FRAC_1_SQRT_2), (-0.5 * x * x).exp() / (2.0 * PI).sqrt())
        }
        GateFunction::GeluTanh => {
            // ½(1 + tanh u) = σ(2u).
            let share = sigmoid(2.0 * FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3)));
            let slope = 2.0 * FRAC_2_PI.sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            (share, share * (1.0 - share) * slope)
        }
        GateFunction::ClampedSwish => {
            let share = sigmoid(GateFunction::SWISH_SLOPE * x);
            (share, share * (1.0 - share) * GateFunction::SWISH_SLOPE)
        }
    };
    (x * share, share + x * derivative)
}
