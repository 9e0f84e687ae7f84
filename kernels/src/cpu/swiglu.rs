//! SwiGLU (Shazeer, arXiv 2002.05202), element by element in f32, one rounding per result.
//!
//! Tolerance: a few units in the last place of f32, from the exponential (see [`vector`]), before the rounding.

use super::Cpu;
use super::elementwise::blocks;
use super::floats::{Floats, FloatsMut};
use super::vector;
use crate::check;
use crate::{Activation, Result, View, ViewMut};

impl Activation for Cpu {
    fn swiglu(&self, gate: View<'_>, up: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("gate", gate), check::read("up", up), check::write("out", &out)];
        let elements = check::elementwise("swiglu", &operands);
        let (gate, up, out) = (Floats::new(gate), Floats::new(up), FloatsMut::new(out));
        let isa = self.threads.isa();
        blocks(&self.threads, elements, |at, len, [of_gate, of_up, result]| {
            let gate = gate.read(isa, at, len, of_gate);
            vector::swiglu(isa, gate, up.read(isa, at, len, of_up), &mut result[..len]);
            // SAFETY: blocks are disjoint.
            unsafe { out.write(isa, at, &result[..len]) };
        });
        Ok(())
    }

    fn swiglu_backward(
        &self,
        gate: View<'_>,
        up: View<'_>,
        dout: View<'_>,
        dgate: ViewMut<'_>,
        dup: ViewMut<'_>,
    ) -> Result {
        let reads = [check::read("gate", gate), check::read("up", up), check::read("dout", dout)];
        let writes = [check::write("dgate", &dgate), check::write("dup", &dup)];
        let elements = check::elementwise("swiglu backward", &[&reads[..], &writes[..]].concat());
        let (gate, up, dout) = (Floats::new(gate), Floats::new(up), Floats::new(dout));
        let (dgate, dup, isa) = (FloatsMut::new(dgate), FloatsMut::new(dup), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [of_gate, of_up, of_dout, to_gate, to_up]| {
            vector::swiglu_backward(
                isa,
                gate.read(isa, at, len, of_gate),
                up.read(isa, at, len, of_up),
                dout.read(isa, at, len, of_dout),
                &mut to_gate[..len],
                &mut to_up[..len],
            );
            // SAFETY: blocks are disjoint.
            unsafe { dgate.write(isa, at, &to_gate[..len]) };
            // SAFETY: as above.
            unsafe { dup.write(isa, at, &to_up[..len]) };
        });
        Ok(())
    }
}
