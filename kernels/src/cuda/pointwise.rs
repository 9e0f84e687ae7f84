//! Operations that work element by element.

use super::{Cuda, VECTOR, operand};
use crate::{Activation, Elementwise, GateFunction, Result, View, ViewMut, check};

impl Activation for Cuda {
    fn gated(&self, f: GateFunction, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("gate", gate), check::read("up", up), check::write("out", &out)];
        let n = check::elementwise("gated", &operands);
        if n == 0 {
            return Ok(());
        }
        let arguments = self.arguments().int(operand::gate_code(f));
        let mut arguments = arguments.read(gate).read(up).write(&out).long(n);
        self.launch_flat("gated", "gated_forward", n.div_ceil(VECTOR), &mut arguments)
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
        let operands = [
            check::read("gate", gate),
            check::read("up", up),
            check::read("dout", dout),
            check::write("dgate", &dgate),
            check::write("dup", &dup),
        ];
        let n = check::elementwise("gated backward", &operands);
        if n == 0 {
            return Ok(());
        }
        let arguments = self.arguments().int(operand::gate_code(f)).read(gate).read(up).read(dout);
        let mut arguments = arguments.write(&dgate).write(&dup).long(n);
        self.launch_flat("gated backward", "gated_backward", n.div_ceil(VECTOR), &mut arguments)
    }
}

impl Cuda {
    /// `out = a + b`, where a may be out.
    fn sum(&self, op: &'static str, a: View<'_>, b: View<'_>, out: View<'_>) -> Result {
        let n = out.shape().elements();
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(a).read(b).read(out).long(n);
        self.launch_flat(op, "elementwise_add", n.div_ceil(VECTOR), &mut arguments)
    }
}

impl Elementwise for Cuda {
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        check::elementwise("add", &[check::read("a", a), check::read("b", b), check::write("out", &out)]);
        self.sum("add", a, b, out.view())
    }

    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result {
        check::elementwise("add_assign", &[check::write("acc", &acc), check::read("x", x)]);
        self.sum("add_assign", acc.view(), x, acc.view())
    }

    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result {
        let dims = check::add_bias(&x, bias);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().write(&x).read(bias).long(dims.rows).long(dims.width);
        let threads = super::row_threads(dims.width).min(super::THREADS);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch("add_bias", "elementwise_add_bias", grid, threads, 0, &mut arguments)
    }

    fn affine(&self, x: ViewMut<'_>, factor: f32, offset: f32) -> Result {
        let n = check::elementwise("affine", &[check::write("x", &x)]);
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().write(&x).float(factor).float(offset).long(n);
        self.launch_flat("affine", "elementwise_affine", n.div_ceil(VECTOR), &mut arguments)
    }

    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("a", a), check::read("b", b), check::write("out", &out)];
        let n = check::elementwise("multiply", &operands);
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(a).read(b).write(&out).long(n);
        self.launch_flat("multiply", "elementwise_multiply", n, &mut arguments)
    }

    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result {
        let n = check::scale(&x, factor);
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().write(&x).read(factor).long(n);
        self.launch_flat("scale", "elementwise_scale", n.div_ceil(VECTOR), &mut arguments)
    }

    fn cap(&self, x: ViewMut<'_>, cap: f32) -> Result {
        let n = check::elementwise("cap", &[check::write("x", &x)]);
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().write(&x).float(cap).long(n);
        self.launch_flat("cap", "elementwise_cap", n.div_ceil(VECTOR), &mut arguments)
    }

    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let n = check::elementwise("cast", &[check::read("x", x), check::write("out", &out)]);
        if n == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(x).write(&out).long(n);
        self.launch_flat("cast", "elementwise_cast", n.div_ceil(VECTOR), &mut arguments)
    }

    fn zero(&self, out: ViewMut<'_>) -> Result {
        let bytes = out.into_bytes();
        if bytes.is_empty() {
            return Ok(());
        }
        let mut arguments = self.arguments().bytes(bytes.as_bytes()).long(bytes.len());
        self.launch_flat("zero", "elementwise_zero", bytes.len().div_ceil(16), &mut arguments)
    }
}
