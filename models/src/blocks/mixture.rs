//! The feed-forward half of a decoder layer with experts, of which each token goes through a few:
//! `y += Σ_j w_j·down_j(f(gate_j(h))·up_j(h))` over those that a router chose, `h = norm(y)`; in some models [another](super::shared) beside them.
//!
//! E experts, X chosen by each token, P = R·X routed rows of a tile ([`Experts`](terrace_kernels::Experts)): a row for each token and choice,
//! those of an expert together. The weight multiplies what `down` is given, and not what it gives: its gradient is then the product of two rows of F
//! numbers that backward has anyway. In Llama 4 it multiplies h instead, `Σ_j down_j(f(gate_j(w_j·h))·up_j(w_j·h))`. Where `down` has a bias it multiplies what `down` gives, and the bias adds its share to that gradient.

use super::TILE_ROWS;
use super::layers::{Linear, Norm, Normed, Params, activate, forward_each};
use super::router::{OfNorm, Router};
use super::routing::{Experts, Routed, Routes, Routing, Tile};
use super::shared::Shared;
use crate::batch::constants_input;
use crate::fused::Packing;
use crate::{Mixture, ModelConfig};
use std::array;
use std::ops::Range;
use terrace_kernels::{
    DType, Epilogue, ExpertGroups, GateFunction, Gating, MatmulSpec, Product, Residual, Scores, Tensor, View,
    ViewMut,
};
use terrace_zero::{Context, Gradients, Result, Weights};

/// Parameters of the feed-forward half.
#[derive(Debug)]
pub(crate) struct MixtureMlp {
    pub(super) before: Norm,
    router: Router,
    pub(super) shared: Option<Shared>,
    experts: Vec<Expert>,
    /// Those whose gradients are complete one after the other; all at once, if there is one.
    pub(super) stages: Vec<Range<usize>>,
    f: GateFunction,
    pub(super) hidden: usize,
    feed_forward: usize,
    pub(super) chosen: usize,
    scores: Scores,
    groups: Option<ExpertGroups>,
    /// The input with what is added to scores, and the row of this layer in it.
    score_biases: Option<(usize, usize)>,
    normalize: bool,
    scale: f32,
    biased: bool,
    /// Weights multiply what experts are given.
    weighs_inputs: bool,
    woven: bool,
}

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Expert {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// One of an expert's layers.
type LayerOf = fn(&Expert) -> Linear;

impl MixtureMlp {
    /// Takes its parameters from the layer's list, unless `experts` have theirs already.
    pub(crate) fn new(
        config: &ModelConfig,
        layer: usize,
        mixture: &Mixture,
        experts: Option<Vec<Expert>>,
        params: &mut Params,
    ) -> Self {
        let (hidden, feed_forward) = (config.hidden, mixture.feed_forward);
        let before = params.norm(config.family.expert_names().norm, hidden, config.norm_eps);
        let biased = mixture.biased;
        let router = Router::new(config, mixture, params);
        let shared = mixture.shared.map(|expert| Shared::new(config, expert, params));
        Self {
            before,
            router,
            shared,
            experts: experts.unwrap_or_else(|| Self::experts(config, mixture, params)),
            stages: mixture.stages(hidden),
            f: config.gate_function,
            hidden,
            feed_forward,
            chosen: mixture.chosen,
            scores: mixture.scores,
            groups: mixture.groups,
            score_biases: mixture.has_score_biases.then(|| {
                let row = (0..layer).filter(|&before| config.mixture_of(before).is_some()).count();
                (constants_input(config), row)
            }),
            normalize: mixture.normalize,
            scale: mixture.scale,
            biased,
            weighs_inputs: mixture.weighs_inputs,
            woven: matches!(config.family.packing(), Packing::Experts | Packing::ExpertsTurned),
        }
    }

    /// The experts of a layer, which take their parameters from its list.
    pub(crate) fn experts(config: &ModelConfig, mixture: &Mixture, params: &mut Params) -> Vec<Expert> {
        let (hidden, feed_forward) = (config.hidden, mixture.feed_forward);
        let names = config.family.expert_names();
        let expert = |index| {
            let mut linear = |name, outputs, inputs| {
                let name = format!("{}.{index}.{name}", names.experts);
                params.of_expert(&name, outputs, inputs, mixture.biased)
            };
            Expert {
                gate: linear(names.gate, feed_forward, hidden),
                up: linear(names.up, feed_forward, hidden),
                down: linear(names.down, hidden, feed_forward),
            }
        };
        (0..mixture.experts).map(expert).collect()
    }

    /// Adds the feed-forward of `y_TD` to it.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, mut y_TD: ViewMut<'_>) -> Result {
        for Tile { start, end, .. } in Tile::all(y_TD.shape().rows()) {
            let y_RD = y_TD.reborrow().rows(start, end);
            let (h_RD, routing) = self.begin(cx, weights, y_RD.view())?;
            let starts = self.starts(cx, &routing)?;
            self.finish(cx, weights, h_RD, &routing, starts, Residual::InPlace, y_RD)?;
        }
        Ok(())
    }

    /// The experts, as ranges of parameters.
    pub(crate) fn parts(&self) -> Vec<Range<usize>> {
        let last = |Linear { weight, bias }: Linear| bias.unwrap_or(weight);
        self.experts.iter().map(|expert| expert.gate.weight..last(expert.down) + 1).collect()
    }

    /// See [`Block::export_elements`](terrace_zero::Block::export_elements): gate and up of an expert.
    pub(crate) fn export_elements(&self) -> usize {
        if self.woven { 2 * self.feed_forward * self.hidden } else { 0 }
    }

    /// How much of them so many rows use, if they choose as if by chance. What is more than a tile uses all.
    pub(crate) fn parts_used(&self, rows: usize) -> f64 {
        let chosen = self.chosen as f64 / self.experts.len() as f64;
        if rows > TILE_ROWS { 1.0 } else { 1.0 - (1.0 - chosen).powf(rows as f64) }
    }

    /// Rows of a tile, normalized, and what they choose.
    pub(crate) fn begin(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
    ) -> Result<(Tensor, Routing)> {
        let h_RD = self.normed(cx, weights, y_RD)?;
        let routing = self.choose(cx, weights, y_RD, h_RD.view())?;
        Ok((h_RD, routing))
    }

    /// Where the routed rows of each expert begin, of the rows of a tile by itself. A card is waited for.
    pub(crate) fn starts(&self, cx: &Context<'_>, routing: &Routing) -> Result<Vec<usize>> {
        self.starts_of(cx, routing, Tile::alone(routing.rows.shape().rows()))
    }

    pub(super) fn starts_of(&self, cx: &Context<'_>, routing: &Routing, tile: Tile) -> Result<Vec<usize>> {
        let starts = routing.starts.view().rows(tile.index, tile.index + 1);
        let starts = starts.reshape(&[self.experts.len() + 1]);
        Ok(cx.kernels.experts.starts(starts, tile.rows() * self.chosen)?)
    }

    /// Writes what the experts make of the rows of a tile, added to the residual.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn finish(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: Tensor,
        routing: &Routing,
        starts: Vec<usize>,
        mut residual: Residual<'_>,
        mut y_RD: ViewMut<'_>,
    ) -> Result {
        let rows = y_RD.shape().rows();
        if let Some(shared) = &self.shared {
            shared.forward(cx, weights, h_RD.view(), residual, y_RD.reborrow())?;
            residual = Residual::InPlace;
        }
        let routes = self.routes_from(cx, weights, routing, Tile::alone(rows), starts)?;
        let dims_PF = [rows * self.chosen, self.feed_forward];
        let (mut gate_PF, mut up_PF) = (cx.tensor(&dims_PF)?, cx.tensor(&dims_PF)?);
        self.widen(cx, weights, h_RD, &routes, [gate_PF.view_mut(), up_PF.view_mut()])?;
        let act_PF = activate(cx, self.f, gate_PF.view(), up_PF.view())?;
        drop((gate_PF, up_PF));
        self.narrow(cx, weights, act_PF, &routes, residual, y_RD)
    }

    /// As [`forward`](Self::forward), with the same bits, but `y1_TD` stays and `y = y1 + feed-forward(y1)`, or the feed-forward alone unless it
    /// `adds`; gives what [`backward`](Self::backward) would recompute.
    pub(crate) fn forward_keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        adds: bool,
        mut y_TD: ViewMut<'_>,
    ) -> Result<Routed> {
        let rows = y1_TD.shape().rows();
        let lasting = |dtype, dims: &[usize]| cx.lasting_tensor_of(dtype, dims);
        let mut routing = self.routing(rows, Tile::all(rows).count(), &lasting)?;
        let dims = [rows * self.chosen, self.feed_forward];
        let (mut gate, mut up) = (cx.lasting_tensor(&dims)?, cx.lasting_tensor(&dims)?);
        let wide_of = |shared: &Shared| -> Result<[Tensor; 2]> {
            Ok([cx.lasting_tensor(&shared.dims(rows))?, cx.lasting_tensor(&shared.dims(rows))?])
        };
        let mut of_shared = self.shared.as_ref().map(wide_of).transpose()?;
        for tile in Tile::all(rows) {
            let y1_RD = y1_TD.rows(tile.start, tile.end);
            let h_RD = self.normed(cx, weights, y1_RD)?;
            let mut y_RD = y_TD.reborrow().rows(tile.start, tile.end);
            let mut residual = if adds { Residual::Of(y1_RD) } else { Residual::None };
            if let (Some(shared), Some(wide)) = (&self.shared, &mut of_shared) {
                let wide = wide.each_mut().map(|wide| wide.view_mut().rows(tile.start, tile.end));
                let h_RD = h_RD.view();
                shared.forward_keeping(cx, weights, h_RD, wide, residual, y_RD.reborrow())?;
                residual = Residual::InPlace;
            }
            self.route(cx, weights, [y1_RD, h_RD.view()], &mut routing, tile)?;
            let routes = self.routes(cx, weights, &routing, tile)?;
            let (start, end) = (tile.start * self.chosen, tile.end * self.chosen);
            let wide = [gate.view_mut().rows(start, end), up.view_mut().rows(start, end)];
            self.widen(cx, weights, h_RD, &routes, wide)?;
            let act_PF = activate(cx, self.f, gate.view().rows(start, end), up.view().rows(start, end))?;
            self.narrow(cx, weights, act_PF, &routes, residual, y_RD)?;
        }
        Ok(Routed { routing, gate, up, shared: of_shared })
    }

    /// `dx = dy + ∂(feed-forward)/∂y1 · dy`, where `y1_TD` is what [`forward`](Self::forward) was given. Without what
    /// [`forward_keeping`](Self::forward_keeping) gave it is recomputed, tile by tile.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        kept: Option<&Routed>,
        dy_TD: View<'_>,
        mut dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        if self.stages.len() > 1 {
            return self.backward_in_stages(cx, weights, y1_TD, kept, dy_TD, dx_TD, gradients);
        }
        for tile in Tile::all(y1_TD.shape().rows()) {
            let mut dx_RD = dx_TD.reborrow().rows(tile.start, tile.end);
            let (y1_RD, dy_RD) = (y1_TD.rows(tile.start, tile.end), dy_TD.rows(tile.start, tile.end));
            let normed = self.before.forward(cx, weights, y1_RD)?;
            let h_RD = normed.out.view();
            let of_shared = kept.and_then(|kept| kept.shared.as_ref());
            let of_shared =
                of_shared.map(|wide| wide.each_ref().map(|wide| wide.view().rows(tile.start, tile.end)));
            let shared = self.shared.as_ref();
            let dh_RD = shared.map(|it| it.backward(cx, weights, h_RD, of_shared, dy_RD, gradients));
            let dh_RD = dh_RD.transpose()?;
            let experts = self.made_of(cx, weights, y1_RD, normed, kept, tile)?;
            cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
            self.add_gradient(cx, weights, y1_RD, experts, dy_RD, dh_RD, dx_RD, gradients)?;
        }
        Ok(())
    }

    /// What [`output_of_tile`](Self::output_of_tile) and [`backward_of_tile`](Self::backward_of_tile) need, from what is kept or computed again.
    pub(crate) fn of_tile<'k>(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        kept: Option<&'k Routed>,
        tile: Tile,
    ) -> Result<Experts<'k>> {
        let normed = self.before.forward(cx, weights, y1_RD)?;
        self.made_of(cx, weights, y1_RD, normed, kept, tile)
    }

    fn made_of<'k>(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        normed: Normed,
        kept: Option<&'k Routed>,
        tile: Tile,
    ) -> Result<Experts<'k>> {
        let again = match kept {
            Some(_) => None,
            None => Some(self.again(cx, weights, y1_RD, normed.out.view())?),
        };
        Ok(Experts { normed, kept: kept.map(|kept| (kept, tile)), again })
    }

    /// Writes what the experts give for the rows of a tile.
    pub(crate) fn output_of_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        experts: &Experts<'_>,
        out_RD: ViewMut<'_>,
    ) -> Result {
        let (routing, [gate_PF, up_PF], tile) = experts.parts(self.chosen);
        let routes = self.routes(cx, weights, routing, tile)?;
        let act_PF = activate(cx, self.f, gate_PF, up_PF)?;
        self.narrow(cx, weights, act_PF, &routes, Residual::None, out_RD)
    }

    /// Adds to `dx_RD` the gradient of `y1_RD`, from that of what the experts give.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward_of_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        experts: Experts<'_>,
        dout_RD: View<'_>,
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        self.add_gradient(cx, weights, y1_RD, experts, dout_RD, None, dx_RD, gradients)
    }

    /// The same, with what `h` has of a gradient from elsewhere.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn add_gradient(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        experts: Experts<'_>,
        dout_RD: View<'_>,
        so_far_RD: Option<Tensor>,
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let (routing, wide, tile) = experts.parts(self.chosen);
        let routes = self.routes(cx, weights, routing, tile)?;
        let inputs = [y1_RD, experts.normed.out.view()];
        let (dh_RD, of_norm) =
            self.backward_tile(cx, weights, inputs, &routes, wide, dout_RD, so_far_RD, gradients)?;
        drop(routes);
        let Experts { normed: Normed { out, rstd }, again, .. } = experts;
        drop((out, again));
        self.backward_of_norms(cx, weights, y1_RD, &rstd, (dh_RD.view(), of_norm), dx_RD, gradients)
    }

    /// The gradient of `h_RD`, f32, added to what it has from elsewhere. Holds, beside gate and up, at most three `[P, F]` tensors and a `[P, D]` one at a time, or
    /// two and two; or two and three, where weights multiply what experts are given.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn backward_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        [y1_RD, h_RD]: [View<'_>; 2],
        routes: &Routes<'_>,
        [gate_PF, up_PF]: [View<'_>; 2],
        dy_RD: View<'_>,
        so_far_RD: Option<Tensor>,
        gradients: &mut Gradients<'_>,
    ) -> Result<(Tensor, Option<OfNorm>)> {
        let (dh_PD, dweights_RX) =
            self.backward_routed(cx, weights, h_RD, routes, [gate_PF, up_PF], dy_RD, gradients)?;
        let residual = if so_far_RD.is_some() { Residual::InPlace } else { Residual::None };
        let fresh = || cx.tensor_of(DType::F32, h_RD.shape().dims());
        let mut dh_RD = so_far_RD.map_or_else(fresh, Ok)?;
        cx.kernels.experts.collect(dh_PD.view(), routes.rows_RX, residual, dh_RD.view_mut())?;
        drop(dh_PD);
        let inputs = [y1_RD, h_RD];
        let of_norm =
            self.backward_router(cx, weights, inputs, routes, dweights_RX, dh_RD.view_mut(), gradients)?;
        Ok((dh_RD, of_norm))
    }

    /// From the gradient of what the experts of `routes` give, that of what each routed row is given, f32 `[P, D]`, and of what it weighs; of
    /// rows of other experts both are zeros. Of their gate and up no number may be infinite or none.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(super) fn backward_routed(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        routes: &Routes<'_>,
        [gate_PF, up_PF]: [View<'_>; 2],
        dy_RD: View<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let experts = &cx.kernels.experts;
        let (routed, dims_PF) = (gate_PF.shape().rows(), gate_PF.shape());
        let (rows_RX, weights_RX) = (routes.rows_RX, routes.final_RX());
        let act_PF = activate(cx, self.f, gate_PF, up_PF)?;
        let mut dact_PF = cx.tensor(dims_PF.dims())?;
        self.zero_others(cx, &mut dact_PF)?;
        let weighed_PF = self.weighed_if(!self.weighs_inputs, cx, routes, act_PF.view())?;
        let dy_PD = self.spread(cx, dy_RD, routes)?;
        let down: [(LayerOf, View<'_>); 1] = [(|expert| expert.down, dy_PD.view())];
        let x_PF = weighed_PF.as_ref().unwrap_or(&act_PF).view();
        self.backward_experts(weights, routes, &down, x_PF, dact_PF.view_mut(), gradients)?;
        drop(weighed_PF);
        let mut dweights_RX = cx.tensor_of(DType::F32, weights_RX.shape().dims())?;
        if !self.weighs_inputs {
            let (act, dweights) = (act_PF.view(), dweights_RX.view_mut());
            experts.weigh_backward(dact_PF.view_mut(), act, rows_RX, weights_RX, dweights)?;
        }
        drop(act_PF);
        self.backward_down_biases(cx, weights, routes, dy_PD, dweights_RX.view_mut(), gradients)?;

        let (mut dgate_PF, mut dup_PF) = (cx.tensor(dims_PF.dims())?, cx.tensor(dims_PF.dims())?);
        let (dact, dgate, dup) = (dact_PF.view(), dgate_PF.view_mut(), dup_PF.view_mut());
        cx.kernels.activation.gated_backward(self.f, gate_PF, up_PF, dact, dgate, dup)?;
        drop(dact_PF);
        let h_PD = self.spread(cx, h_RD, routes)?;
        let mut dh_PD = cx.tensor_of(DType::F32, &[routed, self.hidden])?;
        self.zero_others(cx, &mut dh_PD)?;
        let wide: [(LayerOf, View<'_>); 2] =
            [(|expert| expert.gate, dgate_PF.view()), (|expert| expert.up, dup_PF.view())];
        let weighed_PD = self.weighed_if(self.weighs_inputs, cx, routes, h_PD.view())?;
        let x_PD = weighed_PD.as_ref().unwrap_or(&h_PD).view();
        self.backward_experts(weights, routes, &wide, x_PD, dh_PD.view_mut(), gradients)?;
        drop(weighed_PD);
        self.backward_biases(cx, routes, &wide, gradients)?;
        if self.weighs_inputs {
            let (h, dweights) = (h_PD.view(), dweights_RX.view_mut());
            experts.weigh_backward(dh_PD.view_mut(), h, rows_RX, weights_RX, dweights)?;
        }
        Ok((dh_PD, dweights_RX))
    }

    /// Adds to `dh_RD` what comes through the router, unless that reads something else.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(super) fn backward_router(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        [y1_RD, h_RD]: [View<'_>; 2],
        routes: &Routes<'_>,
        dweights_RX: Tensor,
        dh_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Option<OfNorm>> {
        let Routes { logits_RE, weights_RX, chosen_RX, .. } = *routes;
        let dweights_RX =
            self.router.scaled_backward(cx, weights, weights_RX, chosen_RX, dweights_RX, gradients)?;
        let mut dlogits_RE = cx.tensor_of(DType::F32, logits_RE.shape().dims())?;
        cx.kernels.experts.route_backward(
            logits_RE,
            self.gating(cx),
            weights_RX,
            chosen_RX,
            dweights_RX.view(),
            dlogits_RE.view_mut(),
        )?;
        self.router.backward(cx, weights, y1_RD, h_RD, dlogits_RE, dh_RD, gradients)
    }

    /// How experts are chosen.
    fn gating<'c>(&self, cx: &'c Context<'_>) -> Gating<'c> {
        let of_layer =
            |(input, row): (usize, usize)| cx.input(input).rows(row, row + 1).reshape(&[self.experts.len()]);
        Gating {
            scores: self.scores,
            bias: self.score_biases.map(of_layer),
            groups: self.groups,
            normalize: self.normalize,
            scale: self.scale,
        }
    }

    /// Adds the gradient of what experts read to that of `y_RD`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(super) fn backward_of_norms(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
        rstd: &Tensor,
        (dh_RD, of_norm): (View<'_>, Option<OfNorm>),
        mut dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let to = dx_RD.reborrow();
        self.before.backward(cx, weights, dh_RD, y_RD, rstd.view(), to, true, gradients)?;
        self.router.norm_backward(cx, weights, y_RD, of_norm, dx_RD, gradients)
    }

    pub(super) fn normed(&self, cx: &Context<'_>, weights: &Weights<'_>, y_RD: View<'_>) -> Result<Tensor> {
        Ok(self.before.forward(cx, weights, y_RD)?.out)
    }

    /// Memory for the choices of so many rows, in tiles.
    pub(super) fn routing(
        &self,
        rows: usize,
        tiles: usize,
        tensor: &dyn Fn(DType, &[usize]) -> Result<Tensor>,
    ) -> Result<Routing> {
        let dims_TX = [rows, self.chosen];
        Ok(Routing {
            logits: tensor(DType::F32, &[rows, self.experts.len()])?,
            weights: tensor(DType::F32, &dims_TX)?,
            chosen: tensor(DType::I32, &dims_TX)?,
            rows: tensor(DType::I32, &dims_TX)?,
            starts: tensor(DType::I32, &[tiles, self.experts.len() + 1])?,
        })
    }

    /// What the rows of a tile choose, by itself.
    fn choose(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
        h_RD: View<'_>,
    ) -> Result<Routing> {
        let rows = h_RD.shape().rows();
        let mut routing = self.routing(rows, 1, &|dtype, dims| cx.tensor_of(dtype, dims))?;
        self.route(cx, weights, [y_RD, h_RD], &mut routing, Tile::alone(rows))?;
        Ok(routing)
    }

    /// What the rows of a tile choose. Logits are not rounded to the type of activations.
    pub(super) fn route(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        [y_RD, h_RD]: [View<'_>; 2],
        routing: &mut Routing,
        Tile { index, start, end }: Tile,
    ) -> Result {
        let Routing { logits, weights: shares, chosen, rows, starts } = routing;
        let logits_RE = logits.view_mut().rows(start, end);
        self.router.logits(cx, weights, y_RD, h_RD, logits_RE)?;
        Ok(cx.kernels.experts.route(
            logits.view().rows(start, end),
            self.gating(cx),
            shares.view_mut().rows(start, end),
            chosen.view_mut().rows(start, end),
            rows.view_mut().rows(start, end),
            starts.view_mut().rows(index, index + 1).reshape(&[self.experts.len() + 1]),
        )?)
    }

    fn routes<'r>(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        routing: &'r Routing,
        tile: Tile,
    ) -> Result<Routes<'r>> {
        self.routes_from(cx, weights, routing, tile, self.starts_of(cx, routing, tile)?)
    }

    pub(super) fn routes_from<'r>(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        routing: &'r Routing,
        tile: Tile,
        starts: Vec<usize>,
    ) -> Result<Routes<'r>> {
        let routes = Routes::of(routing, tile, starts);
        let scaled_RX = self.router.scaled(cx, weights, routes.weights_RX, routes.chosen_RX)?;
        Ok(Routes { scaled_RX, ..routes })
    }

    /// What [`forward_keeping`](Self::forward_keeping) leaves of a tile's experts, computed again: choices, gate and up.
    fn again(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        h_RD: View<'_>,
    ) -> Result<(Routing, [Tensor; 2])> {
        let rows = h_RD.shape().rows();
        let routing = self.choose(cx, weights, y1_RD, h_RD)?;
        let routes = self.routes(cx, weights, &routing, Tile::alone(rows))?;
        let wide = self.wide(cx, weights, h_RD, &routes)?;
        drop(routes);
        Ok((routing, wide))
    }

    /// Gate and up of the experts of `routes`; zeros of rows of other experts.
    pub(super) fn wide(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        routes: &Routes<'_>,
    ) -> Result<[Tensor; 2]> {
        let dims_PF = [h_RD.shape().rows() * self.chosen, self.feed_forward];
        let mut wide = [cx.tensor(&dims_PF)?, cx.tensor(&dims_PF)?];
        wide.iter_mut().try_for_each(|wide| self.zero_others(cx, wide))?;
        let h_PD = self.inputs(cx, h_RD, routes)?;
        self.widen_spread(cx, weights, h_PD.view(), routes, wide.each_mut().map(Tensor::view_mut))?;
        Ok(wide)
    }

    /// Fills with zeros what experts of one stage of several leave of routed rows; that of all is theirs.
    fn zero_others(&self, cx: &Context<'_>, routed: &mut Tensor) -> Result {
        match self.stages.len() {
            1 => Ok(()),
            _ => Ok(cx.kernels.elementwise.zero(routed.view_mut())?),
        }
    }

    /// A row for each routed one.
    fn spread(&self, cx: &Context<'_>, x_RD: View<'_>, routes: &Routes<'_>) -> Result<Tensor> {
        let mut x_PD = cx.tensor(&[x_RD.shape().rows() * self.chosen, self.hidden])?;
        cx.kernels.experts.spread(x_RD, routes.rows_RX, x_PD.view_mut())?;
        Ok(x_PD)
    }

    /// What experts are given: the same, or times its weight.
    fn inputs(&self, cx: &Context<'_>, h_RD: View<'_>, routes: &Routes<'_>) -> Result<Tensor> {
        let h_PD = self.spread(cx, h_RD, routes)?;
        if self.weighs_inputs { self.weighed(cx, routes, h_PD.view()) } else { Ok(h_PD) }
    }

    /// Gate and up of `h_RD`.
    fn widen(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: Tensor,
        routes: &Routes<'_>,
        wide: [ViewMut<'_>; 2],
    ) -> Result {
        let h_PD = self.inputs(cx, h_RD.view(), routes)?;
        drop(h_RD);
        self.widen_spread(cx, weights, h_PD.view(), routes, wide)
    }

    fn widen_spread(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_PD: View<'_>,
        routes: &Routes<'_>,
        [gate_PF, up_PF]: [ViewMut<'_>; 2],
    ) -> Result {
        let mut layers = self.shares(|expert| expert.gate, routes, h_PD, gate_PF);
        layers.extend(self.shares(|expert| expert.up, routes, h_PD, up_PF));
        forward_each(cx, weights, layers)
    }

    /// `y = residual + Σ down(w·act)` over the routed rows of each token.
    fn narrow(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        act_PF: Tensor,
        routes: &Routes<'_>,
        residual: Residual<'_>,
        y_RD: ViewMut<'_>,
    ) -> Result {
        let dims_PD = [act_PF.shape().rows(), self.hidden];
        let down = |x_PF: Tensor| -> Result<Tensor> {
            let mut out_PD = cx.tensor(&dims_PD)?;
            let layers = self.shares(|expert| expert.down, routes, x_PF.view(), out_PD.view_mut());
            forward_each(cx, weights, layers)?;
            Ok(out_PD)
        };
        let out_PD = if self.weighs_inputs {
            down(act_PF)?
        } else if self.biased {
            self.weighed(cx, routes, down(act_PF)?.view())?
        } else {
            let weighed_PF = self.weighed(cx, routes, act_PF.view())?;
            drop(act_PF);
            down(weighed_PF)?
        };
        Ok(cx.kernels.experts.collect(out_PD.view(), routes.rows_RX, residual, y_RD)?)
    }

    /// Routed rows times their weights.
    fn weighed(&self, cx: &Context<'_>, routes: &Routes<'_>, x: View<'_>) -> Result<Tensor> {
        let mut out = cx.tensor(x.shape().dims())?;
        cx.kernels.experts.weigh(x, routes.rows_RX, routes.final_RX(), out.view_mut())?;
        Ok(out)
    }

    /// The same, if so.
    fn weighed_if(
        &self,
        is_so: bool,
        cx: &Context<'_>,
        routes: &Routes<'_>,
        x: View<'_>,
    ) -> Result<Option<Tensor>> {
        is_so.then(|| self.weighed(cx, routes, x)).transpose()
    }

    /// A layer of each busy expert with its rows of x and out.
    fn shares<'v>(
        &self,
        layer: LayerOf,
        routes: &Routes<'_>,
        x: View<'v>,
        out: ViewMut<'v>,
    ) -> Vec<(Linear, View<'v>, ViewMut<'v>)> {
        let (mut left, mut at) = (Some(out), 0);
        let share = |(expert, from, to): (usize, usize, usize)| {
            let rest = left.take().expect("what the experts before have left");
            let (mine, others) = rest.split_rows(from - at).1.split_rows(to - from);
            (left, at) = (Some(others), to);
            (layer(&self.experts[expert]), x.rows(from, to), mine)
        };
        routes.busy().map(share).collect()
    }

    /// From the gradients `dout` of the outputs of layers that read the same `x`, of the expert of each routed row: `dx = Σ dout · W`, and of
    /// each layer `dW += doutᵀ · x`. Several need an f32 `dx`.
    fn backward_experts<const N: usize>(
        &self,
        weights: &Weights<'_>,
        routes: &Routes<'_>,
        layers: &[(LayerOf, View<'_>); N],
        x: View<'_>,
        dx: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let mut products = Vec::new();
        let mut terms: Vec<[_; N]> = Vec::new();
        for (expert, from, to) in routes.busy() {
            let of = |index: usize| {
                let (layer, dout) = layers[index];
                (layer(&self.experts[expert]).weight, dout.rows(from, to))
            };
            products.extend((0..N).map(of).map(|(weight, dout)| (weight, dout, x.rows(from, to))));
            terms.push(array::from_fn(|index| {
                let (weight, dout) = of(index);
                (dout, weights.get(weight))
            }));
        }
        let shares = self.shares(layers[0].0, routes, x, dx);
        let inputs = terms.iter().zip(shares).map(|(terms, (_, _, out))| Product {
            terms,
            out,
            spec: MatmulSpec::NN,
            epilogue: Epilogue::NONE,
        });
        gradients.add_products(&products, inputs.collect())
    }

    /// Of the same layers' biases, if they have any: `db += Σ_p dout[p]`.
    fn backward_biases(
        &self,
        cx: &Context<'_>,
        routes: &Routes<'_>,
        layers: &[(LayerOf, View<'_>)],
        gradients: &mut Gradients<'_>,
    ) -> Result {
        for (expert, from, to) in routes.busy() {
            for (layer, dout) in layers {
                let Some(bias) = layer(&self.experts[expert]).bias else { continue };
                cx.kernels.reduce.sum_rows(dout.rows(from, to), gradients.get(bias)?)?;
            }
        }
        Ok(())
    }

    /// What the biases of `down` have of the gradient of the weights, and theirs: `dw[p] += dy[p]·b` and `db += Σ_p w[p]·dy[p]`.
    fn backward_down_biases(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        routes: &Routes<'_>,
        mut dy_PD: Tensor,
        dweights_RX: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        if !self.biased {
            return Ok(());
        }
        let (rows_RX, weights_RX) = (routes.rows_RX, routes.final_RX());
        let (elementwise, layer): (_, LayerOf) = (&cx.kernels.elementwise, |expert| expert.down);
        let mut bias_PD = cx.tensor(dy_PD.shape().dims())?;
        elementwise.zero(bias_PD.view_mut())?;
        for (expert, from, to) in routes.busy() {
            let bias = layer(&self.experts[expert]).bias.expect("all layers of experts have biases, or none");
            elementwise.add_bias(bias_PD.view_mut().rows(from, to), weights.get(bias))?;
        }
        let mut share_RX = cx.tensor_of(DType::F32, weights_RX.shape().dims())?;
        let (dy, bias, share) = (dy_PD.view_mut(), bias_PD.view(), share_RX.view_mut());
        cx.kernels.experts.weigh_backward(dy, bias, rows_RX, weights_RX, share)?;
        drop(bias_PD);
        elementwise.add_assign(dweights_RX, share_RX.view())?;
        self.backward_biases(cx, routes, &[(layer, dy_PD.view())], gradients)
    }
}
