//! The feed-forward half of a decoder layer with its norm and residual: `y += down(f(gate(h))·up(h))`, `h = norm(y)`.

use super::TILE_ROWS;
use super::layers::{Linear, Norm, Normed, Params, backward_together, forward_together, tiles};
use crate::ModelConfig;
use terrace_kernels::{DType, GateFunction, Residual, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// What gate and up give for all rows, kept for backward: `[T, F]` each.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) gate_TF: Tensor,
    pub(crate) up_TF: Tensor,
}

/// Parameters of the feed-forward half.
#[derive(Debug)]
pub(crate) struct Mlp {
    norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
    f: GateFunction,
    hidden: usize,
    feed_forward: usize,
}

impl Mlp {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, params: &mut Params) -> Self {
        let (hidden, feed_forward, bias) = (config.hidden, config.feed_forward, config.mlp_bias);
        Self {
            norm: params.norm("post_attention_layernorm", hidden, config.norm_eps),
            gate: params.linear("mlp.gate_proj", feed_forward, hidden, bias),
            up: params.linear("mlp.up_proj", feed_forward, hidden, bias),
            down: params.linear("mlp.down_proj", hidden, feed_forward, bias),
            f: config.gate_function,
            hidden,
            feed_forward,
        }
    }

    /// Adds the feed-forward of `y_TD` to it.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, mut y_TD: ViewMut<'_>) -> Result {
        for (start, end) in tiles(y_TD.shape().rows(), TILE_ROWS) {
            let y_RD = y_TD.reborrow().rows(start, end);
            let normed = self.norm.forward(cx, weights, y_RD.view())?;
            drop(normed.rstd);
            let (gate_RF, up_RF) = self.widen(cx, weights, normed.out.view())?;
            drop(normed.out);
            let act_RF = self.activate(cx, gate_RF.view(), up_RF.view())?;
            drop((gate_RF, up_RF));
            self.down.branch(cx, weights, act_RF.view(), Residual::InPlace, y_RD)?;
        }
        Ok(())
    }

    /// As [`forward`](Self::forward), with the same bits, but `y1_TD` stays and `y = y1 + feed-forward(y1)`; gives what
    /// [`backward`](Self::backward) would recompute.
    pub(crate) fn forward_keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        mut y_TD: ViewMut<'_>,
    ) -> Result<Inner> {
        let dims_TF = [y1_TD.shape().rows(), self.feed_forward];
        let mut gate_TF = cx.lasting_tensor(&dims_TF)?;
        let mut up_TF = cx.lasting_tensor(&dims_TF)?;
        for (start, end) in tiles(y1_TD.shape().rows(), TILE_ROWS) {
            let y1_RD = y1_TD.rows(start, end);
            let normed = self.norm.forward(cx, weights, y1_RD)?;
            drop(normed.rstd);
            let gate = (self.gate, gate_TF.view_mut().rows(start, end));
            let up = (self.up, up_TF.view_mut().rows(start, end));
            forward_together(cx, weights, normed.out.view(), &mut [gate, up])?;
            drop(normed.out);
            let (gate_RF, up_RF) = (gate_TF.view().rows(start, end), up_TF.view().rows(start, end));
            let act_RF = self.activate(cx, gate_RF, up_RF)?;
            let y_RD = y_TD.reborrow().rows(start, end);
            self.down.branch(cx, weights, act_RF.view(), Residual::Of(y1_RD), y_RD)?;
        }
        Ok(Inner { gate_TF, up_TF })
    }

    /// `dx = dy + ∂(feed-forward)/∂y1 · dy`, where `y1_TD` is what [`forward`](Self::forward) was given. Without what
    /// [`forward_keeping`](Self::forward_keeping) gave it is recomputed, tile by tile.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        inner: Option<&Inner>,
        dy_TD: View<'_>,
        mut dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        for (start, end) in tiles(y1_TD.shape().rows(), TILE_ROWS) {
            let dx_RD = dx_TD.reborrow().rows(start, end);
            let (y1_RD, dy_RD) = (y1_TD.rows(start, end), dy_TD.rows(start, end));
            let inner = inner.map(|Inner { gate_TF, up_TF }| {
                (gate_TF.view().rows(start, end), up_TF.view().rows(start, end))
            });
            self.backward_tile(cx, weights, y1_RD, inner, dy_RD, dx_RD, gradients)?;
        }
        Ok(())
    }

    /// Holds at most five `[R, F]` tensors: gate, up (unless `inner` has them), dact, dgate, dup.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn backward_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        inner: Option<(View<'_>, View<'_>)>,
        dy_RD: View<'_>,
        mut dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let Normed { out: h_RD, rstd } = self.norm.forward(cx, weights, y1_RD)?;
        let recomputed = match inner {
            Some(_) => None,
            None => Some(self.widen(cx, weights, h_RD.view())?),
        };
        let fresh = recomputed.as_ref().map(|(gate, up): &(Tensor, Tensor)| (gate.view(), up.view()));
        let (gate_RF, up_RF) = inner.or(fresh).expect("what is not kept is recomputed");
        let act_RF = self.activate(cx, gate_RF, up_RF)?;
        let dims_RF = [dy_RD.shape().rows(), self.feed_forward];
        let mut dact_RF = cx.tensor(&dims_RF)?;
        let down = [(self.down, dy_RD)];
        backward_together(cx, weights, &down, act_RF.view(), dact_RF.view_mut(), gradients)?;
        drop(act_RF);

        let mut dgate_RF = cx.tensor(&dims_RF)?;
        let mut dup_RF = cx.tensor(&dims_RF)?;
        cx.kernels.activation.gated_backward(
            self.f,
            gate_RF,
            up_RF,
            dact_RF.view(),
            dgate_RF.view_mut(),
            dup_RF.view_mut(),
        )?;
        drop((recomputed, dact_RF));

        let mut dh_RD = cx.tensor_of(DType::F32, &[dy_RD.shape().rows(), self.hidden])?;
        let layers = [(self.gate, dgate_RF.view()), (self.up, dup_RF.view())];
        backward_together(cx, weights, &layers, h_RD.view(), dh_RD.view_mut(), gradients)?;
        drop((h_RD, dgate_RF, dup_RF));

        cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
        self.norm.backward(cx, weights, dh_RD.view(), y1_RD, rstd.view(), dx_RD, true, gradients)
    }

    /// Gate and up of `h_RD`.
    fn widen(&self, cx: &Context<'_>, weights: &Weights<'_>, h_RD: View<'_>) -> Result<(Tensor, Tensor)> {
        let dims_RF = [h_RD.shape().rows(), self.feed_forward];
        let (mut gate_RF, mut up_RF) = (cx.tensor(&dims_RF)?, cx.tensor(&dims_RF)?);
        let layers = &mut [(self.gate, gate_RF.view_mut()), (self.up, up_RF.view_mut())];
        forward_together(cx, weights, h_RD, layers)?;
        Ok((gate_RF, up_RF))
    }

    fn activate(&self, cx: &Context<'_>, gate_RF: View<'_>, up_RF: View<'_>) -> Result<Tensor> {
        let mut act_RF = cx.tensor(gate_RF.shape().dims())?;
        cx.kernels.activation.gated(self.f, gate_RF, up_RF, act_RF.view_mut())?;
        Ok(act_RF)
    }
}
