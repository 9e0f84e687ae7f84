//! The backward of experts in stages, so that the gradients of a stage are complete before those of the next begin.
//!
//! Experts of a layer may have more numbers than a card has room for in f32. So a backward goes over all rows for some of the experts, then for
//! the next. What rows choose is known from the beginning, what they are given is computed again each time, which is little beside products with
//! experts, and what they have of gradients is summed from stage to stage.

use super::mixture::MixtureMlp;
use super::routing::{Routed, Routing, Tile};
use std::ops::Range;
use terrace_kernels::{DType, Residual, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// What is known of the forward of all rows.
struct Forward<'k> {
    routing: &'k Routing,
    /// Of each tile, where the routed rows of each expert begin.
    starts: Vec<Vec<usize>>,
    kept: Option<&'k Routed>,
}

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

    /// As [`backward`](Self::backward). Holds what all rows choose, unless that is kept, and `[T, D]` and `[T, X]` in f32 beside what that does.
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
        let chosen = if kept.is_some() { None } else { Some(self.choose_all(cx, weights, y1_TD)?) };
        let routing =
            kept.map(|kept| &kept.routing).or(chosen.as_ref()).expect("what is not kept is chosen again");
        let starts: Result<_> = Tile::all(rows).map(|tile| self.starts_of(cx, routing, tile)).collect();
        let forward = Forward { routing, starts: starts?, kept };
        let zeros = |columns: usize| -> Result<Tensor> {
            let mut zeros = cx.tensor_of(DType::F32, &[rows, columns])?;
            cx.kernels.elementwise.zero(zeros.view_mut())?;
            Ok(zeros)
        };
        let mut sums = Sums { dh_TD: zeros(self.hidden)?, dweights_TX: zeros(self.chosen)? };
        for stage in &self.stages {
            gradients.part(|gradients| {
                Tile::all(rows).try_for_each(|tile| {
                    let [y1_RD, dy_RD] = [y1_TD, dy_TD].map(|all| all.rows(tile.start, tile.end));
                    self.add_stage(cx, weights, y1_RD, &forward, dy_RD, (stage, tile), &mut sums, gradients)
                })
            })?;
        }
        for tile in Tile::all(rows) {
            let [y1_RD, dy_RD] = [y1_TD, dy_TD].map(|all| all.rows(tile.start, tile.end));
            let mut dx_RD = dx_TD.reborrow().rows(tile.start, tile.end);
            cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
            self.add_of_sums(cx, weights, y1_RD, &forward, dy_RD, (tile, &mut sums), dx_RD, gradients)?;
        }
        Ok(())
    }

    /// What all rows choose.
    fn choose_all(&self, cx: &Context<'_>, weights: &Weights<'_>, y1_TD: View<'_>) -> Result<Routing> {
        let rows = y1_TD.shape().rows();
        let tensor = |dtype, dims: &[usize]| cx.tensor_of(dtype, dims);
        let mut routing = self.routing(rows, Tile::all(rows).count(), &tensor)?;
        for tile in Tile::all(rows) {
            let y1_RD = y1_TD.rows(tile.start, tile.end);
            let h_RD = self.normed(cx, weights, y1_RD)?;
            self.route(cx, weights, [y1_RD, h_RD.view()], &mut routing, tile)?;
        }
        Ok(routing)
    }

    /// Adds what experts of a stage have of the gradients of a tile.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn add_stage(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        forward: &Forward<'_>,
        dy_RD: View<'_>,
        (stage, tile): (&Range<usize>, Tile),
        sums: &mut Sums,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let h_RD = self.normed(cx, weights, y1_RD)?;
        let starts = forward.starts[tile.index].clone();
        let routes = self.routes_from(cx, weights, forward.routing, tile, starts)?.of_stage(stage);
        let made = match forward.kept {
            Some(_) => None,
            None => Some(self.wide(cx, weights, h_RD.view(), &routes)?),
        };
        let wide = match (forward.kept, &made) {
            (Some(kept), _) => kept.wide_of(tile, self.chosen),
            (None, Some(made)) => made.each_ref().map(Tensor::view),
            (None, None) => unreachable!("what is not kept is computed again"),
        };
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
        forward: &Forward<'_>,
        dy_RD: View<'_>,
        (tile, sums): (Tile, &mut Sums),
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let elementwise = &cx.kernels.elementwise;
        let normed = self.before.forward(cx, weights, y1_RD)?;
        let h_RD = normed.out.view();
        let mut dh_RD = sums.dh_TD.view_mut().rows(tile.start, tile.end);
        if let Some(shared) = &self.shared {
            let of_shared = forward.kept.and_then(|kept| kept.shared.as_ref());
            let of_shared = of_shared.map(|wide| wide.each_ref().map(|wide| tile.of(wide)));
            let more_RD = shared.backward(cx, weights, h_RD, of_shared, dy_RD, gradients)?;
            elementwise.add_assign(dh_RD.reborrow(), more_RD.view())?;
        }
        let starts = forward.starts[tile.index].clone();
        let routes = self.routes_from(cx, weights, forward.routing, tile, starts)?;
        let mut dweights_RX = cx.tensor_of(DType::F32, &[tile.rows(), self.chosen])?;
        elementwise.cast(tile.of(&sums.dweights_TX), dweights_RX.view_mut())?;
        let inputs = [y1_RD, h_RD];
        let of_norm =
            self.backward_router(cx, weights, inputs, &routes, dweights_RX, dh_RD.reborrow(), gradients)?;
        let dh_RD = (dh_RD.view(), of_norm);
        self.backward_of_norms(cx, weights, y1_RD, &normed.rstd, dh_RD, dx_RD, gradients)
    }
}
