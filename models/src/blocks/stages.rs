//! The backward of experts in stages, so that the gradients of a stage are complete before those of the next begin.
//!
//! Experts of a layer may have more numbers than a card has room for in f32. So a backward goes over all rows for some of the experts, then for
//! the next: what rows are given, and what they choose, is computed again each time, which is little beside products with experts; what they have
//! of gradients is summed from stage to stage.

use super::mixture::MixtureMlp;
use super::routing::{Routed, Tile};
use std::ops::Range;
use terrace_kernels::{DType, Residual, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// Of all rows.
struct Sums {
    /// f32, of what experts read.
    dh_TD: Tensor,
    /// f32, of what choices weigh.
    dweights_TX: Tensor,
}

impl MixtureMlp {
    /// See [`Block::gradient_parts`](terrace_zero::Block::gradient_parts).
    pub(crate) fn gradient_parts(&self) -> Vec<Range<usize>> {
        if self.stages.len() < 2 {
            return Vec::new();
        }
        let parts = self.parts();
        self.stages.iter().map(|stage| parts[stage.start].start..parts[stage.end - 1].end).collect()
    }

    /// As [`backward`](Self::backward). Holds `[T, D]` and `[T, X]` in f32 beside what that does.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(super) fn backward_in_stages(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        kept: Option<&Routed>,
        dy_TD: View<'_>,
        mut dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let rows = y1_TD.shape().rows();
        let zeros = |columns: usize| -> Result<Tensor> {
            let mut zeros = cx.tensor_of(DType::F32, &[rows, columns])?;
            cx.kernels.elementwise.zero(zeros.view_mut())?;
            Ok(zeros)
        };
        let mut sums = Sums { dh_TD: zeros(self.hidden)?, dweights_TX: zeros(self.chosen)? };
        for stage in &self.stages {
            gradients.part(|gradients| {
                Tile::all(rows).try_for_each(|tile| {
                    self.add_stage(cx, weights, y1_TD, kept, dy_TD, (stage, tile), &mut sums, gradients)
                })
            })?;
        }
        for tile in Tile::all(rows) {
            let (y1_RD, dy_RD) = (tile.of_view(y1_TD), tile.of_view(dy_TD));
            let mut dx_RD = dx_TD.reborrow().rows(tile.start, tile.end);
            cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
            self.add_of_sums(cx, weights, y1_RD, kept, dy_RD, (tile, &sums), dx_RD, gradients)?;
        }
        Ok(())
    }

    /// Adds what experts of a stage have of the gradients of a tile.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn add_stage(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        kept: Option<&Routed>,
        dy_TD: View<'_>,
        (stage, tile): (&Range<usize>, Tile),
        sums: &mut Sums,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let (y1_RD, dy_RD) = (tile.of_view(y1_TD), tile.of_view(dy_TD));
        let h_RD = self.normed_of(cx, weights, y1_RD)?.out;
        let again = match kept {
            Some(_) => None,
            None => Some(self.choose(cx, weights, y1_RD, h_RD.view())?),
        };
        let (routing, of) = match (kept, &again) {
            (Some(kept), _) => (&kept.routing, tile),
            (None, Some(again)) => (again, Tile::alone(tile.rows())),
            (None, None) => unreachable!("what is not kept is computed again"),
        };
        let routes = self.routes(cx, weights, routing, of)?.of_stage(stage);
        let made = match kept {
            Some(_) => None,
            None => {
                let dims_PF = [tile.rows() * self.chosen, self.feed_forward];
                let mut wide = [cx.tensor(&dims_PF)?, cx.tensor(&dims_PF)?];
                for wide in &mut wide {
                    cx.kernels.elementwise.zero(wide.view_mut())?;
                }
                let h_PD = self.spread(cx, h_RD.view(), &routes)?;
                self.widen_spread(cx, weights, h_PD.view(), &routes, wide.each_mut().map(Tensor::view_mut))?;
                Some(wide)
            }
        };
        let (start, end) = (tile.start * self.chosen, tile.end * self.chosen);
        let of_kept = kept.map(|kept| [&kept.gate, &kept.up].map(|wide| wide.view().rows(start, end)));
        let of_made = made.as_ref().map(|wide| wide.each_ref().map(Tensor::view));
        let wide = of_kept.or(of_made).expect("what is not kept is computed again");
        let (dh_PD, dweights_RX) =
            self.backward_routed(cx, weights, h_RD.view(), &routes, wide, dy_RD, gradients)?;
        let Sums { dh_TD, dweights_TX } = sums;
        let (dh_RD, experts) = (dh_TD.view_mut().rows(tile.start, tile.end), &cx.kernels.experts);
        experts.collect(dh_PD.view(), routes.rows_RX, Residual::InPlace, dh_RD)?;
        let sum_RX = dweights_TX.view_mut().rows(tile.start, tile.end);
        Ok(cx.kernels.elementwise.add_assign(sum_RX, dweights_RX.view())?)
    }

    /// Adds to `dx_RD` what comes through the router, what is beside the experts, and the norm before all of them.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn add_of_sums(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        kept: Option<&Routed>,
        dy_RD: View<'_>,
        (tile, sums): (Tile, &Sums),
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let normed = self.normed_of(cx, weights, y1_RD)?;
        let h_RD = normed.out.view();
        let of_shared = kept.and_then(|kept| kept.shared.as_ref());
        let of_shared = of_shared.map(|wide| wide.each_ref().map(|wide| tile.of(wide)));
        let shared = self.shared.as_ref();
        let shared = shared.map(|it| it.backward(cx, weights, h_RD, of_shared, dy_RD, gradients));
        let mut dh_RD = match shared.transpose()? {
            Some(dh_RD) => dh_RD,
            None => {
                let mut dh_RD = cx.tensor_of(DType::F32, h_RD.shape().dims())?;
                cx.kernels.elementwise.zero(dh_RD.view_mut())?;
                dh_RD
            }
        };
        cx.kernels.elementwise.add_assign(dh_RD.view_mut(), tile.of(&sums.dh_TD))?;
        let again = match kept {
            Some(_) => None,
            None => Some(self.choose(cx, weights, y1_RD, h_RD)?),
        };
        let (routing, of) = match (kept, &again) {
            (Some(kept), _) => (&kept.routing, tile),
            (None, Some(again)) => (again, Tile::alone(tile.rows())),
            (None, None) => unreachable!("what is not kept is computed again"),
        };
        let routes = self.routes(cx, weights, routing, of)?;
        let mut dweights_RX = cx.tensor_of(DType::F32, &[tile.rows(), self.chosen])?;
        cx.kernels.elementwise.cast(tile.of(&sums.dweights_TX), dweights_RX.view_mut())?;
        let inputs = [y1_RD, h_RD];
        let of_norm =
            self.backward_router(cx, weights, inputs, &routes, dweights_RX, dh_RD.view_mut(), gradients)?;
        self.backward_of_norms(cx, weights, y1_RD, &normed.rstd, (dh_RD, of_norm), dx_RD, gradients)
    }
}
