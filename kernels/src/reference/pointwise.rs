//! Operations that work element by element.

use super::{Reference, values};
use crate::check;
use crate::{Activation, Elementwise, Result, View, ViewMut};

impl Activation for Reference {
    /// `silu(x) = x / (1 + exp(−x))`.
    fn swiglu(&self, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise(
            "swiglu",
            &[check::read("gate", gate), check::read("up", up), check::write("out", &out)],
        );
        let (gate, up) = (values::read(gate), values::read(up));
        let result: Vec<f64> = gate.iter().zip(&up).map(|(gate, up)| gate * sigmoid(*gate) * up).collect();
        values::write(out, &result);
        Ok(())
    }

    /// With `σ = sigmoid(gate)`: `dgate = dout·up·σ·(1 + gate·(1 − σ))`, `dup = dout·gate·σ`.
    fn swiglu_backward(
        &self,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        check::elementwise(
            "swiglu backward",
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
            let sigma = sigmoid(*gate);
            of_gate.push(dout * up * sigma * (1.0 + gate * (1.0 - sigma)));
            of_up.push(dout * gate * sigma);
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

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
