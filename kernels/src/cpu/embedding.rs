//! Table look-up and its gradient.

use super::Cpu;
use super::floats::{BLOCK, CHUNK, Floats, FloatsMut, floats_mut, ints};
use super::reduce::COLS;
use super::threads::SharedMut;
use super::vector;
use crate::check;
use crate::{Embedding, Result, View, ViewMut};

impl Embedding for Cpu {
    /// Exact when the dtypes agree or widen, else one rounding.
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::gather(ids, table, &out);
        if dims.width == 0 {
            return Ok(());
        }
        let rows = table.shape().elements() / dims.width;
        let (ids_t, table, out) = (ints(ids), Floats::new(table), FloatsMut::new(out));
        check::ids("gather", rows, ids_t);
        let isa = self.threads.isa();
        let task_rows = (CHUNK / dims.width).max(1);
        self.threads.run_ranges(dims.rows, task_rows, |tokens, _| {
            let mut buffer = [0.0; BLOCK];
            for t in tokens {
                let row = table.slice(ids_t[t] as usize * dims.width, dims.width);
                for col in (0..dims.width).step_by(BLOCK) {
                    let values = row.read(isa, col, BLOCK.min(dims.width - col), &mut buffer);
                    // SAFETY: row t belongs to this task.
                    unsafe { out.write(isa, t * dims.width + col, values) };
                }
            }
        });
        Ok(())
    }

    /// A task owns a range of columns and walks over all tokens, so that rows with one id are added in token order.
    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result {
        let dims = check::scatter_add(ids, dout, &dtable);
        let (ids_t, dout, isa) = (ints(ids), Floats::new(dout), self.threads.isa());
        check::ids("scatter_add", dtable.shape().rows(), ids_t);
        let dtable = SharedMut::new(floats_mut(dtable));
        self.threads.run(dims.width.div_ceil(COLS), |task, _| {
            let (col, mut buffer) = (task * COLS, [0.0; COLS]);
            let len = COLS.min(dims.width - col);
            for (t, &id) in ids_t.iter().enumerate() {
                let gradient = dout.read(isa, t * dims.width + col, len, &mut buffer);
                // SAFETY: these columns belong to this task, and the slice ends with the statement.
                let row = unsafe { dtable.slice(id as usize * dims.width + col, len) };
                vector::add_assign(isa, row, gradient);
            }
        });
        Ok(())
    }
}
