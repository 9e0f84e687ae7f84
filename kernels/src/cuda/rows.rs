//! Operations that work row by row: normalization, rotation, look-up, loss, sums.

use super::{Cuda, THREADS, row_threads};
use crate::{
    CrossEntropy, Embedding, Reduce, Result, RmsNorm, Rope, RopeDirection, RopeLayout, RopePairs, View,
    ViewMut, check,
};
use std::sync::PoisonError;

/// Memory for the losses of rows, until they are added in order. More rows are taken in stretches.
pub(super) const LOSS_BYTES: usize = 1 << 20;

/// Columns, and threads, of a block that adds rows.
const SUM_COLUMNS: usize = 32;
const SUM_THREADS: u32 = 1024;

impl RmsNorm for Cuda {
    fn forward(
        &self,
        x: View<'_>,
        weight: View<'_>,
        eps: f32,
        out: ViewMut<'_>,
        rstd: ViewMut<'_>,
    ) -> Result {
        let dims = check::norm_forward(x, weight, &out, &rstd);
        if dims.rows == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(x).read(weight).float(eps).write(&out).only(rstd.view());
        arguments = arguments.long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch("rms_norm", "rms_norm_forward", grid, row_threads(dims.width), 0, &mut arguments)
    }

    fn backward(
        &self,
        dout: View<'_>,
        x: View<'_>,
        weight: View<'_>,
        rstd: View<'_>,
        dx: ViewMut<'_>,
        accumulate_dx: bool,
        dweight: ViewMut<'_>,
    ) -> Result {
        const OP: &str = "rms_norm backward";
        let dims = check::norm_backward(dout, x, weight, rstd, &dx, &dweight);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut sums = self.arguments().read(dout).read(x).only(rstd).only(dweight.view());
        sums = sums.long(dims.rows).long(dims.width);
        let columns = [self.blocks(dims.width.div_ceil(SUM_COLUMNS)), 1, 1];
        self.launch(OP, "rms_norm_dweight", columns, SUM_THREADS, 0, &mut sums)?;
        let mut arguments = self.arguments().read(dout).read(x).read(weight).only(rstd).write(&dx);
        arguments = arguments.flag(accumulate_dx).long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch(OP, "rms_norm_dx", grid, row_threads(dims.width), 0, &mut arguments)
    }

    fn center(&self, x: View<'_>, out: ViewMut<'_>, accumulate: bool) -> Result {
        let dims = check::center(x, &out);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(x).write(&out).flag(accumulate);
        arguments = arguments.long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch("center", "center_rows", grid, row_threads(dims.width), 0, &mut arguments)
    }
}

impl Rope for Cuda {
    fn rotate(
        &self,
        x: ViewMut<'_>,
        positions: View<'_>,
        inv_freq: View<'_>,
        layout: RopeLayout,
        scale: f32,
        direction: RopeDirection,
    ) -> Result {
        let dims = check::rope(&x, positions, inv_freq, layout);
        if dims.tokens * dims.heads * dims.half == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().write(&x).only(positions).only(inv_freq).float(scale);
        arguments = arguments.flag(direction == RopeDirection::Backward).long(dims.tokens);
        arguments = arguments.size(dims.heads).size(dims.head_size).size(dims.half);
        arguments = arguments.size(layout.first).flag(layout.pairs == RopePairs::Neighbours);
        self.launch("rope", "rope_rotate", [self.blocks(dims.tokens), 1, 1], THREADS, 0, &mut arguments)
    }
}

impl Embedding for Cuda {
    fn gather(&self, ids: View<'_>, table: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::gather(ids, table, &out);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().only(ids).read(table).write(&out);
        arguments = arguments.long(dims.rows).long(dims.width);
        let threads = row_threads(dims.width).min(THREADS);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch("gather", "embedding_gather", grid, threads, 0, &mut arguments)
    }

    fn scatter_add(&self, ids: View<'_>, dout: View<'_>, dtable: ViewMut<'_>) -> Result {
        let dims = check::scatter_add(ids, dout, &dtable);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().only(ids).read(dout).only(dtable.view());
        arguments = arguments.long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.rows), 1, 1];
        self.launch("scatter_add", "embedding_scatter_add", grid, THREADS, 0, &mut arguments)
    }
}

impl Cuda {
    fn cross_entropy(
        &self,
        op: &'static str,
        logits: View<'_>,
        labels: View<'_>,
        gradient: Option<(f32, Option<f32>)>,
        loss: &ViewMut<'_>,
    ) -> Result {
        let dims = check::cross_entropy(logits, labels, loss);
        let (losses, labels) = (self.losses(), labels.reshape(&[dims.rows, 1]));
        let (scale, cap) = gradient.unwrap_or((0.0, None));
        let inverse_cap = cap.map_or(0.0, f32::recip);
        let _others_wait = self.losses.lock().unwrap_or_else(PoisonError::into_inner);
        for start in (0..dims.rows).step_by(LOSS_BYTES / 8) {
            let end = dims.rows.min(start + LOSS_BYTES / 8);
            let mut each = self.arguments().read(logits.rows(start, end)).only(labels.rows(start, end));
            each = each.flag(gradient.is_some()).float(scale).float(inverse_cap).bytes(losses);
            each = each.long(end - start).long(dims.width);
            let grid = [self.blocks(end - start), 1, 1];
            self.launch(op, "cross_entropy_rows", grid, row_threads(dims.width), 0, &mut each)?;
            let mut sum = self.arguments().bytes(losses).long(end - start).only(loss.view());
            self.launch(op, "cross_entropy_add", [1, 1, 1], THREADS, 0, &mut sum)?;
        }
        Ok(())
    }
}

impl CrossEntropy for Cuda {
    fn loss(&self, logits: View<'_>, labels: View<'_>, loss: ViewMut<'_>) -> Result {
        self.cross_entropy("cross_entropy", logits, labels, None, &loss)
    }

    fn loss_and_gradient(
        &self,
        logits: ViewMut<'_>,
        labels: View<'_>,
        scale: f32,
        cap: Option<f32>,
        loss: ViewMut<'_>,
    ) -> Result {
        self.cross_entropy("cross_entropy gradient", logits.view(), labels, Some((scale, cap)), &loss)
    }
}

impl Reduce for Cuda {
    fn sum_rows(&self, x: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::sum_rows(x, &out);
        if dims.rows * dims.width == 0 {
            return Ok(());
        }
        let mut arguments = self.arguments().read(x).only(out.view()).long(dims.rows).long(dims.width);
        let grid = [self.blocks(dims.width.div_ceil(SUM_COLUMNS)), 1, 1];
        self.launch("sum_rows", "reduce_sum_rows", grid, SUM_THREADS, 0, &mut arguments)
    }
}
