//! Attention sinks.

use super::{Cuda, THREADS};
use crate::{Result, Sinks, View, ViewMut, check};

/// Positions and heads of a block that adds sinks, as in `sinks.cu`.
const POSITIONS: usize = 32;
const HEADS: usize = 8;
const _: () = assert!(POSITIONS * HEADS == THREADS as usize, "each thread has the lse of a row");

/// Threads of a block that adds the gradients of a head.
const SUM_THREADS: u32 = 1024;

impl Sinks for Cuda {
    fn add(&self, sinks: View<'_>, out: ViewMut<'_>, lse: ViewMut<'_>) -> Result {
        let dims = check::sinks_add(sinks, &out, &lse);
        if dims.rows() == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(sinks).write(&out).only(lse.view());
        arguments = arguments.long(dims.batch).long(dims.queries).long(dims.heads).size(dims.head_size);
        let tiles = dims.batch * dims.queries.div_ceil(POSITIONS) * dims.heads.div_ceil(HEADS);
        self.launch("sinks", "sinks_add", [self.blocks(tiles), 1, 1], THREADS, 0, &mut arguments)
    }

    fn backward(
        &self,
        sinks: View<'_>,
        out: View<'_>,
        lse: View<'_>,
        dout: View<'_>,
        dsinks: ViewMut<'_>,
    ) -> Result {
        let dims = check::sinks_backward(sinks, out, lse, dout, &dsinks);
        if dims.rows() == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(sinks).read(out).only(lse).read(dout).only(dsinks.view());
        arguments = arguments.long(dims.batch).long(dims.queries).long(dims.heads).size(dims.head_size);
        let grid = [self.blocks(dims.heads), 1, 1];
        self.launch("sinks backward", "sinks_backward", grid, SUM_THREADS, 0, &mut arguments)
    }
}
