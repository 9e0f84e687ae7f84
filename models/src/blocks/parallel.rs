//! The feed-forward half of Gemma 4 with experts: `y += norm(norm(dense(norm(y))) + norm(experts(norm(y))))`, each of the five norms
//! another. Experts are those of [`MixtureMlp`], and what is dense is computed as what other models have [beside](super::shared) them.

use super::layers::{Norm, Normed, Params};
use super::mixture::MixtureMlp;
use super::routing::{Experts, Routed, Routing, Tile};
use super::shared::Shared;
use crate::{Mixture, ModelConfig, SharedExpert};
use terrace_kernels::{Residual, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// Parameters of the feed-forward half.
#[derive(Debug)]
pub(crate) struct ParallelMlp {
    before: Norm,
    dense: Shared,
    after_dense: Norm,
    pub(crate) experts: MixtureMlp,
    after_experts: Norm,
    after: Norm,
}

/// What forward leaves for backward.
#[derive(Debug)]
pub(crate) struct Both {
    /// What is dense, gate and up: `[T, F]` each.
    wide: [Tensor; 2],
    /// What it gives, and what the experts give: `[T, D]` each.
    given: [Tensor; 2],
    routed: Routed,
}

impl ParallelMlp {
    /// Takes its parameters from the layer's list, those of experts last.
    pub(crate) fn new(config: &ModelConfig, layer: usize, mixture: &Mixture, params: &mut Params) -> Self {
        let dense = SharedExpert { feed_forward: config.feed_forward, is_gated: false };
        let norm = |params: &mut Params, name| params.norm(name, config.hidden, config.norm_eps);
        Self {
            before: norm(params, "pre_feedforward_layernorm"),
            dense: Shared::new(config, dense, params),
            after_dense: norm(params, "post_feedforward_layernorm_1"),
            after_experts: norm(params, "post_feedforward_layernorm_2"),
            after: norm(params, "post_feedforward_layernorm"),
            experts: MixtureMlp::new(config, layer, mixture, None, params),
        }
    }

    /// Adds the feed-forward of `y_TD` to it.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, mut y_TD: ViewMut<'_>) -> Result {
        for tile in Tile::all(y_TD.shape().rows()) {
            let y_RD = y_TD.reborrow().rows(tile.start, tile.end);
            let (h_RD, routing) = self.experts.begin(cx, weights, y_RD.view())?;
            let starts = self.experts.starts(cx, &routing)?;
            self.finish(cx, weights, h_RD, &routing, starts, y_RD)?;
        }
        Ok(())
    }

    /// Adds to the rows of a tile what is dense and the experts make of them, after [`MixtureMlp::begin`].
    pub(crate) fn finish(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: Tensor,
        routing: &Routing,
        starts: Vec<usize>,
        y_RD: ViewMut<'_>,
    ) -> Result {
        let mut of_experts_RD = cx.tensor(y_RD.shape().dims())?;
        self.experts.finish(cx, weights, h_RD, routing, starts, Residual::None, of_experts_RD.view_mut())?;
        let Normed { out: h_RD, rstd } = self.before.forward(cx, weights, y_RD.view())?;
        drop(rstd);
        let mut of_dense_RD = cx.tensor(y_RD.shape().dims())?;
        self.dense.forward(cx, weights, h_RD.view(), Residual::None, of_dense_RD.view_mut())?;
        drop(h_RD);
        let sum_RD = self.sum(cx, weights, [of_dense_RD.view(), of_experts_RD.view()])?;
        let added_RD = self.after.forward(cx, weights, sum_RD.view())?.out;
        Ok(cx.kernels.elementwise.add_assign(y_RD, added_RD.view())?)
    }

    /// As [`forward`](Self::forward), with the same bits, but `y1_TD` stays and `y = y1 + feed-forward(y1)`; gives what
    /// [`backward`](Self::backward) would recompute.
    pub(crate) fn forward_keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        mut y_TD: ViewMut<'_>,
    ) -> Result<Both> {
        let dims_TD = y1_TD.shape();
        let mut of_experts_TD = cx.lasting_tensor(dims_TD.dims())?;
        let to = of_experts_TD.view_mut();
        let routed = self.experts.forward_keeping(cx, weights, y1_TD, false, to)?;
        let dims_TF = self.dense.dims(dims_TD.rows());
        let mut wide = [cx.lasting_tensor(&dims_TF)?, cx.lasting_tensor(&dims_TF)?];
        let mut of_dense_TD = cx.lasting_tensor(dims_TD.dims())?;
        for Tile { start, end, .. } in Tile::all(dims_TD.rows()) {
            let y1_RD = y1_TD.rows(start, end);
            let Normed { out: h_RD, rstd } = self.before.forward(cx, weights, y1_RD)?;
            drop(rstd);
            let wide_RF = wide.each_mut().map(|wide| wide.view_mut().rows(start, end));
            let to_RD = of_dense_TD.view_mut().rows(start, end);
            self.dense.forward_keeping(cx, weights, h_RD.view(), wide_RF, Residual::None, to_RD)?;
            drop(h_RD);
            let given = [&of_dense_TD, &of_experts_TD].map(|given| given.view().rows(start, end));
            let sum_RD = self.sum(cx, weights, given)?;
            let added_RD = self.after.forward(cx, weights, sum_RD.view())?.out;
            cx.kernels.elementwise.add(y1_RD, added_RD.view(), y_TD.reborrow().rows(start, end))?;
        }
        Ok(Both { wide, given: [of_dense_TD, of_experts_TD], routed })
    }

    /// `dx = dy + ∂(feed-forward)/∂y1 · dy`, where `y1_TD` is what [`forward`](Self::forward) was given. Without what
    /// [`forward_keeping`](Self::forward_keeping) gave it is recomputed, tile by tile.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        kept: Option<&Both>,
        dy_TD: View<'_>,
        mut dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        for tile in Tile::all(y1_TD.shape().rows()) {
            let mut dx_RD = dx_TD.reborrow().rows(tile.start, tile.end);
            let (y1_RD, dy_RD) = (y1_TD.rows(tile.start, tile.end), dy_TD.rows(tile.start, tile.end));
            cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
            let normed = self.before.forward(cx, weights, y1_RD)?;
            let experts = self.experts.of_tile(cx, weights, y1_RD, kept.map(|kept| &kept.routed), tile)?;
            let fresh = match kept {
                Some(_) => None,
                None => Some(self.given(cx, weights, normed.out.view(), &experts)?),
            };
            let [of_dense_RD, of_experts_RD] = match (&fresh, kept) {
                (Some(fresh), _) => fresh.each_ref().map(Tensor::view),
                (None, Some(kept)) => kept.given.each_ref().map(|all| tile.of(all)),
                (None, None) => unreachable!("what is not kept is recomputed"),
            };
            let sum_RD = self.sum(cx, weights, [of_dense_RD, of_experts_RD])?;
            let dsum_RD = self.after.backward_of(cx, weights, dy_RD, sum_RD.view(), gradients)?;
            drop(sum_RD);
            let dsum = dsum_RD.view();
            let ddense_RD = self.after_dense.backward_of(cx, weights, dsum, of_dense_RD, gradients)?;
            let dexperts_RD = self.after_experts.backward_of(cx, weights, dsum, of_experts_RD, gradients)?;
            drop((dsum_RD, fresh));

            let wide = kept.map(|kept| kept.wide.each_ref().map(|all| tile.of(all)));
            let (h_RD, ddense) = (normed.out.view(), ddense_RD.view());
            let dh_RD = self.dense.backward(cx, weights, h_RD, wide, ddense, gradients)?;
            drop(ddense_RD);
            let Normed { out, rstd } = normed;
            drop(out);
            let (dh, to) = (dh_RD.view(), dx_RD.reborrow());
            self.before.backward(cx, weights, dh, y1_RD, rstd.view(), to, true, gradients)?;
            drop((dh_RD, rstd));
            self.experts.backward_of_tile(
                cx,
                weights,
                y1_RD,
                experts,
                dexperts_RD.view(),
                dx_RD,
                gradients,
            )?;
        }
        Ok(())
    }

    /// What is dense and the experts give for the rows of a tile.
    fn given(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        experts: &Experts<'_>,
    ) -> Result<[Tensor; 2]> {
        let mut of_dense_RD = cx.tensor(h_RD.shape().dims())?;
        self.dense.forward(cx, weights, h_RD, Residual::None, of_dense_RD.view_mut())?;
        let mut of_experts_RD = cx.tensor(h_RD.shape().dims())?;
        self.experts.output_of_tile(cx, weights, experts, of_experts_RD.view_mut())?;
        Ok([of_dense_RD, of_experts_RD])
    }

    /// `norm(dense) + norm(experts)`.
    fn sum(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        [of_dense_RD, of_experts_RD]: [View<'_>; 2],
    ) -> Result<Tensor> {
        let mut sum_RD = self.after_dense.forward(cx, weights, of_dense_RD)?.out;
        let other_RD = self.after_experts.forward(cx, weights, of_experts_RD)?.out;
        cx.kernels.elementwise.add_assign(sum_RD.view_mut(), other_RD.view())?;
        Ok(sum_RD)
    }
}

impl Both {
    /// In the order of [`from_tensors`](Self::from_tensors).
    pub(crate) fn into_tensors(self) -> Vec<Tensor> {
        let Self { wide, given, routed } = self;
        wide.into_iter().chain(given).chain(routed.into_tensors()).collect()
    }

    /// # Panics
    /// If they are not what such a feed-forward left.
    pub(crate) fn from_tensors(kept: Vec<Tensor>) -> Self {
        let mut kept = kept.into_iter();
        let mut two =
            || std::array::from_fn(|_| kept.next().expect("a layer gets what its own forward kept"));
        let (wide, given) = (two(), two());
        Self { wide, given, routed: Routed::from_tensors(kept.collect()) }
    }
}
