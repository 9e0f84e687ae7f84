//! Element-wise operations: one rounding per result, tasks of [`CHUNK`] elements.

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut};
use super::threads::{SharedMut, Threads};
use super::vector;
use crate::check;
use crate::{Elementwise, Result, View, ViewMut};

/// Calls `work(at, len, buffers)` for every block of `elements`; blocks are divided among the threads. Buffers have any contents.
pub fn blocks<const N: usize>(
    threads: &Threads,
    elements: usize,
    work: impl Fn(usize, usize, &mut [[f32; BLOCK]; N]) + Sync,
) {
    threads.run_ranges(elements, CHUNK, |chunk, scratch| {
        let buffers = buffers(scratch);
        for at in chunk.clone().step_by(BLOCK) {
            work(at, BLOCK.min(chunk.end - at), buffers);
        }
    });
}

/// The first blocks of a scratch, with any contents.
pub fn buffers<const N: usize>(scratch: &mut [f32]) -> &mut [[f32; BLOCK]; N] {
    scratch.as_chunks_mut().0.first_chunk_mut().expect("the scratch holds some blocks")
}

impl Elementwise for Cpu {
    fn add(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let elements =
            check::elementwise("add", &[check::read("a", a), check::read("b", b), check::write("out", &out)]);
        let (a, b, out, isa) = (Floats::new(a), Floats::new(b), FloatsMut::new(out), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [of_a, of_b, sum]| {
            let (a, b) = (a.read(isa, at, len, of_a), b.read(isa, at, len, of_b));
            vector::add(isa, a, b, &mut sum[..len]);
            // SAFETY: blocks are disjoint.
            unsafe { out.write(isa, at, &sum[..len]) };
        });
        Ok(())
    }

    fn add_assign(&self, acc: ViewMut<'_>, x: View<'_>) -> Result {
        let elements = check::elementwise("add_assign", &[check::write("acc", &acc), check::read("x", x)]);
        let (x, acc, isa) = (Floats::new(x), FloatsMut::new(acc), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [of_x, sum]| {
            // SAFETY: blocks are disjoint.
            unsafe { acc.read(isa, at, &mut sum[..len]) };
            vector::add_assign(isa, &mut sum[..len], x.read(isa, at, len, of_x));
            // SAFETY: as above.
            unsafe { acc.write(isa, at, &sum[..len]) };
        });
        Ok(())
    }

    fn add_bias(&self, x: ViewMut<'_>, bias: View<'_>) -> Result {
        let dims = check::add_bias(&x, bias);
        if dims.width == 0 {
            return Ok(());
        }
        let (bias, x, isa) = (Floats::new(bias), FloatsMut::new(x), self.threads.isa());
        let task_rows = (CHUNK / dims.width).max(1);
        self.threads.run_ranges(dims.rows, task_rows, |rows, _| {
            let (mut of_bias, mut sum) = ([0.0; BLOCK], [0.0; BLOCK]);
            for col in (0..dims.width).step_by(BLOCK) {
                let len = BLOCK.min(dims.width - col);
                let bias = bias.read(isa, col, len, &mut of_bias);
                for r in rows.clone() {
                    let at = r * dims.width + col;
                    // SAFETY: these rows belong to this task.
                    unsafe { x.read(isa, at, &mut sum[..len]) };
                    vector::add_assign(isa, &mut sum[..len], bias);
                    // SAFETY: as above.
                    unsafe { x.write(isa, at, &sum[..len]) };
                }
            }
        });
        Ok(())
    }

    fn affine(&self, x: ViewMut<'_>, factor: f32, offset: f32) -> Result {
        let elements = check::elementwise("affine", &[check::write("x", &x)]);
        let (x, isa) = (FloatsMut::new(x), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [buffer]| {
            let buffer = &mut buffer[..len];
            // SAFETY: blocks are disjoint.
            unsafe { x.read(isa, at, buffer) };
            vector::affine(isa, buffer, factor, offset);
            // SAFETY: as above.
            unsafe { x.write(isa, at, buffer) };
        });
        Ok(())
    }

    fn multiply(&self, a: View<'_>, b: View<'_>, out: ViewMut<'_>) -> Result {
        let operands = [check::read("a", a), check::read("b", b), check::write("out", &out)];
        let elements = check::elementwise("multiply", &operands);
        let (a, b, out, isa) = (Floats::new(a), Floats::new(b), FloatsMut::new(out), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [of_a, of_b, product]| {
            let (a, b) = (a.read(isa, at, len, of_a), b.read(isa, at, len, of_b));
            vector::multiply(isa, a, b, &mut product[..len]);
            // SAFETY: blocks are disjoint.
            unsafe { out.write(isa, at, &product[..len]) };
        });
        Ok(())
    }

    fn scale(&self, x: ViewMut<'_>, factor: View<'_>) -> Result {
        let elements = check::scale(&x, factor);
        let (x, isa) = (FloatsMut::new(x), self.threads.isa());
        let mut of_factor = [0.0];
        let factor = Floats::new(factor).read(isa, 0, 1, &mut of_factor)[0];
        blocks(&self.threads, elements, |at, len, [buffer]| {
            let buffer = &mut buffer[..len];
            // SAFETY: blocks are disjoint.
            unsafe { x.read(isa, at, buffer) };
            vector::scale(isa, buffer, factor);
            // SAFETY: as above.
            unsafe { x.write(isa, at, buffer) };
        });
        Ok(())
    }

    fn cap(&self, x: ViewMut<'_>, cap: f32) -> Result {
        let elements = check::elementwise("cap", &[check::write("x", &x)]);
        let (x, isa) = (FloatsMut::new(x), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [buffer]| {
            let buffer = &mut buffer[..len];
            // SAFETY: blocks are disjoint.
            unsafe { x.read(isa, at, buffer) };
            vector::cap(isa, buffer, cap);
            // SAFETY: as above.
            unsafe { x.write(isa, at, buffer) };
        });
        Ok(())
    }

    fn cast(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let elements = check::elementwise("cast", &[check::read("x", x), check::write("out", &out)]);
        if x.dtype() == out.dtype() {
            self.copy(x.bytes().host(), out.into_bytes().into_host());
            return Ok(());
        }
        let (x, out, isa) = (Floats::new(x), FloatsMut::new(out), self.threads.isa());
        blocks(&self.threads, elements, |at, len, [buffer]| {
            // SAFETY: blocks are disjoint.
            unsafe { out.write(isa, at, x.read(isa, at, len, buffer)) };
        });
        Ok(())
    }

    fn zero(&self, out: ViewMut<'_>) -> Result {
        let out = out.into_bytes().into_host();
        let len = out.len();
        let out = SharedMut::new(out);
        self.threads.run_ranges(len, BYTES, |range, _| {
            // SAFETY: tasks' ranges are disjoint.
            unsafe { out.slice(range.start, range.len()) }.fill(0);
        });
        Ok(())
    }
}

/// Bytes per task when nothing is computed.
const BYTES: usize = 256 << 10;

impl Cpu {
    fn copy(&self, from: &[u8], to: &mut [u8]) {
        let to = SharedMut::new(to);
        self.threads.run_ranges(from.len(), BYTES, |range, _| {
            // SAFETY: tasks' ranges are disjoint.
            unsafe { to.slice(range.start, range.len()) }.copy_from_slice(&from[range]);
        });
    }
}
