//! The feed-forward beside the experts of a layer, which every token goes through: `y += s·down(f(gate(h))·up(h))`, where s is 1, or
//! `σ(w·h)` of each token.
//!
//! Such a share is what a router gives that has one expert to choose, and is made and weighed by the same kernels; like an expert's weight
//! it multiplies what `down` is given.

use super::layers::{Linear, Params, activate, backward_together, forward_together};
use crate::{ModelConfig, SharedExpert};
use terrace_kernels::{DType, GateFunction, Gating, MatmulSpec, Residual, Scores, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// How a share is made of its logit.
const SIGMOID: Gating<'static> = Gating { scores: Scores::Sigmoid, ..Gating::softmax(false) };

/// Parameters of the feed-forward.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The row of weights that makes the logit of each token's share.
    share: Option<Linear>,
    gate: Linear,
    up: Linear,
    down: Linear,
    f: GateFunction,
    feed_forward: usize,
}

/// The shares of rows, as [`route`](terrace_kernels::Experts::route) writes them.
struct Shares {
    /// f32 `[R, 1]`.
    logits: Tensor,
    /// f32 `[R, 1]`.
    weights: Tensor,
    /// i32 `[R, 1]`, zeros.
    chosen: Tensor,
    /// i32 `[R, 1]`, each its own row.
    rows: Tensor,
}

impl Shared {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, expert: SharedExpert, params: &mut Params) -> Self {
        let (hidden, SharedExpert { feed_forward, is_gated }) = (config.hidden, expert);
        let module = config.family.expert_names().shared;
        Self {
            share: is_gated.then(|| params.plain_linear(&format!("{module}_gate"), 1, hidden, false)),
            gate: params.linear(&format!("{module}.gate_proj"), feed_forward, hidden, false),
            up: params.linear(&format!("{module}.up_proj"), feed_forward, hidden, false),
            down: params.linear(&format!("{module}.down_proj"), hidden, feed_forward, false),
            f: config.gate_function,
            feed_forward,
        }
    }

    /// What gate and up are for so many rows.
    pub(crate) fn dims(&self, rows: usize) -> [usize; 2] {
        [rows, self.feed_forward]
    }

    /// `y = residual + s·down(…)`.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        residual: Residual<'_>,
        y_RD: ViewMut<'_>,
    ) -> Result {
        let dims_RF = self.dims(h_RD.shape().rows());
        let (mut gate_RF, mut up_RF) = (cx.tensor(&dims_RF)?, cx.tensor(&dims_RF)?);
        let act_RF = self.widen(cx, weights, h_RD, [gate_RF.view_mut(), up_RF.view_mut()])?;
        drop((gate_RF, up_RF));
        self.narrow(cx, weights, h_RD, act_RF, residual, y_RD)
    }

    /// The same, with what gate and up give left in `wide`.
    pub(crate) fn forward_keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        wide: [ViewMut<'_>; 2],
        residual: Residual<'_>,
        y_RD: ViewMut<'_>,
    ) -> Result {
        let act_RF = self.widen(cx, weights, h_RD, wide)?;
        self.narrow(cx, weights, h_RD, act_RF, residual, y_RD)
    }

    /// The gradient of `h_RD`, f32. Without what [`forward_keeping`](Self::forward_keeping) left it is recomputed. Holds, beside gate and up, at most
    /// three `[R, F]` tensors.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        kept: Option<[View<'_>; 2]>,
        dy_RD: View<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Tensor> {
        let dims_RF = self.dims(h_RD.shape().rows());
        let again = || -> Result<[Tensor; 2]> {
            let [mut gate_RF, mut up_RF] = [cx.tensor(&dims_RF)?, cx.tensor(&dims_RF)?];
            let layers = &mut [(self.gate, gate_RF.view_mut()), (self.up, up_RF.view_mut())];
            forward_together(cx, weights, h_RD, layers)?;
            Ok([gate_RF, up_RF])
        };
        let recomputed = if kept.is_some() { None } else { Some(again()?) };
        let fresh = recomputed.as_ref().map(|wide| wide.each_ref().map(Tensor::view));
        let [gate_RF, up_RF] = kept.or(fresh).expect("what is not kept is recomputed");
        let act_RF = activate(cx, self.f, gate_RF, up_RF)?;
        let shares = self.shares(cx, weights, h_RD)?;
        let mut dact_RF = cx.tensor(&dims_RF)?;
        let weighed_RF = shares.as_ref().map(|shares| shares.weigh(cx, act_RF.view())).transpose()?;
        let x_RF = weighed_RF.as_ref().map_or(act_RF.view(), Tensor::view);
        backward_together(cx, weights, &[(self.down, dy_RD)], x_RF, dact_RF.view_mut(), gradients)?;
        drop(weighed_RF);
        let dlogits =
            shares.map(|shares| shares.backward(cx, dact_RF.view_mut(), act_RF.view())).transpose()?;
        drop(act_RF);

        let (mut dgate_RF, mut dup_RF) = (cx.tensor(&dims_RF)?, cx.tensor(&dims_RF)?);
        let (dact, dgate, dup) = (dact_RF.view(), dgate_RF.view_mut(), dup_RF.view_mut());
        cx.kernels.activation.gated_backward(self.f, gate_RF, up_RF, dact, dgate, dup)?;
        drop((recomputed, dact_RF));
        let mut dh_RD = cx.tensor_of(DType::F32, h_RD.shape().dims())?;
        let layers = [(self.gate, dgate_RF.view()), (self.up, dup_RF.view())];
        backward_together(cx, weights, &layers, h_RD, dh_RD.view_mut(), gradients)?;
        if let Some((share, dlogits)) = self.share.zip(dlogits) {
            gradients.add_product(share.weight, dlogits.view(), h_RD)?;
            let spec = MatmulSpec { accumulate: true, ..MatmulSpec::NN };
            cx.kernels.matmul.matmul(dlogits.view(), weights.get(share.weight), dh_RD.view_mut(), spec)?;
        }
        Ok(dh_RD)
    }

    fn widen(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        [mut gate_RF, mut up_RF]: [ViewMut<'_>; 2],
    ) -> Result<Tensor> {
        let layers = &mut [(self.gate, gate_RF.reborrow()), (self.up, up_RF.reborrow())];
        forward_together(cx, weights, h_RD, layers)?;
        activate(cx, self.f, gate_RF.view(), up_RF.view())
    }

    fn narrow(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        h_RD: View<'_>,
        act_RF: Tensor,
        residual: Residual<'_>,
        y_RD: ViewMut<'_>,
    ) -> Result {
        let x_RF = match self.shares(cx, weights, h_RD)? {
            Some(shares) => shares.weigh(cx, act_RF.view())?,
            None => act_RF,
        };
        self.down.branch(cx, weights, x_RF.view(), residual, y_RD)
    }

    /// `None` where all of it is added.
    fn shares(&self, cx: &Context<'_>, weights: &Weights<'_>, h_RD: View<'_>) -> Result<Option<Shares>> {
        let Some(share) = self.share else { return Ok(None) };
        let column = |dtype| cx.tensor_of(dtype, &[h_RD.shape().rows(), 1]);
        let mut shares = Shares {
            logits: column(DType::F32)?,
            weights: column(DType::F32)?,
            chosen: column(DType::I32)?,
            rows: column(DType::I32)?,
        };
        share.forward_into(cx, weights, h_RD, shares.logits.view_mut())?;
        let mut starts = cx.tensor_of(DType::I32, &[2])?;
        let Shares { logits, weights, chosen, rows } = &mut shares;
        let (to_weights, to_chosen, to_rows) = (weights.view_mut(), chosen.view_mut(), rows.view_mut());
        let experts = &cx.kernels.experts;
        experts.route(logits.view(), SIGMOID, to_weights, to_chosen, to_rows, starts.view_mut())?;
        Ok(Some(shares))
    }
}

impl Shares {
    /// Rows times their shares.
    fn weigh(&self, cx: &Context<'_>, x_RF: View<'_>) -> Result<Tensor> {
        let mut out_RF = cx.tensor(x_RF.shape().dims())?;
        cx.kernels.experts.weigh(x_RF, self.rows.view(), self.weights.view(), out_RF.view_mut())?;
        Ok(out_RF)
    }

    /// Makes of the gradient of what was weighed that of `x_RF`, and gives that of the logits.
    fn backward(self, cx: &Context<'_>, d_RF: ViewMut<'_>, x_RF: View<'_>) -> Result<Tensor> {
        let Self { logits, weights, chosen, rows } = self;
        let (experts, weights) = (&cx.kernels.experts, weights.view());
        let column = || cx.tensor_of(DType::F32, logits.shape().dims());
        let (mut dweights, mut dlogits) = (column()?, column()?);
        experts.weigh_backward(d_RF, x_RF, rows.view(), weights, dweights.view_mut())?;
        let (logits, chosen) = (logits.view(), chosen.view());
        experts.route_backward(logits, SIGMOID, weights, chosen, dweights.view(), dlogits.view_mut())?;
        Ok(dlogits)
    }
}
