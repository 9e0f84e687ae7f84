//! The feed-forward half of a decoder layer with its norm and residual: `y += down(silu(gate(h))·up(h))`, `h = norm(y)`.

use super::TILE_ROWS;
use super::layers::{Linear, Norm, Normed, Params, tiles};
use crate::ModelConfig;
use terrace_kernels::{DType, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// Parameters of the feed-forward half.
#[derive(Debug)]
pub(crate) struct Mlp {
    norm: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
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
            hidden,
            feed_forward,
        }
    }

    /// Adds the feed-forward of `y_TD` to it.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, mut y_TD: ViewMut<'_>) -> Result {
        for (start, end) in tiles(y_TD.shape().rows(), TILE_ROWS) {
            let mut y_RD = y_TD.reborrow().rows(start, end);
            let down_RD = {
                let normed = self.norm.forward(cx, weights, y_RD.view())?;
                drop(normed.rstd);
                let gate_RF = self.gate.forward(cx, weights, normed.out.view())?;
                let up_RF = self.up.forward(cx, weights, normed.out.view())?;
                drop(normed.out);
                let act_RF = self.activate(cx, &gate_RF, &up_RF)?;
                drop((gate_RF, up_RF));
                self.down.forward(cx, weights, act_RF.view())?
            };
            cx.kernels.elementwise.add_assign(y_RD.reborrow(), down_RD.view())?;
        }
        Ok(())
    }

    /// `dx = dy + ∂(feed-forward)/∂y1 · dy`, where `y1_TD` is what [`forward`](Self::forward) was given.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        dy_TD: View<'_>,
        mut dx_TD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        for (start, end) in tiles(y1_TD.shape().rows(), TILE_ROWS) {
            let dx_RD = dx_TD.reborrow().rows(start, end);
            let (y1_RD, dy_RD) = (y1_TD.rows(start, end), dy_TD.rows(start, end));
            self.backward_tile(cx, weights, y1_RD, dy_RD, dx_RD, gradients)?;
        }
        Ok(())
    }

    /// Holds at most five `[R, F]` tensors: gate, up, dact, dgate, dup.
    fn backward_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        dy_RD: View<'_>,
        mut dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let Normed { out: h_RD, rstd } = self.norm.forward(cx, weights, y1_RD)?;
        let gate_RF = self.gate.forward(cx, weights, h_RD.view())?;
        let up_RF = self.up.forward(cx, weights, h_RD.view())?;
        let act_RF = self.activate(cx, &gate_RF, &up_RF)?;
        self.down.weight_gradient(cx, dy_RD, act_RF.view(), gradients)?;
        drop(act_RF);

        let dims_RF = [dy_RD.shape().rows(), self.feed_forward];
        let mut dact_RF = cx.tensor(&dims_RF)?;
        self.down.input_gradient(cx, weights, dy_RD, dact_RF.view_mut(), false)?;
        let mut dgate_RF = cx.tensor(&dims_RF)?;
        let mut dup_RF = cx.tensor(&dims_RF)?;
        cx.kernels.activation.swiglu_backward(
            gate_RF.view(),
            up_RF.view(),
            dact_RF.view(),
            dgate_RF.view_mut(),
            dup_RF.view_mut(),
        )?;
        drop((gate_RF, up_RF, dact_RF));

        self.gate.weight_gradient(cx, dgate_RF.view(), h_RD.view(), gradients)?;
        self.up.weight_gradient(cx, dup_RF.view(), h_RD.view(), gradients)?;
        drop(h_RD);
        let mut dh_RD = cx.tensor_of(DType::F32, &[dy_RD.shape().rows(), self.hidden])?;
        self.gate.input_gradient(cx, weights, dgate_RF.view(), dh_RD.view_mut(), false)?;
        drop(dgate_RF);
        self.up.input_gradient(cx, weights, dup_RF.view(), dh_RD.view_mut(), true)?;
        drop(dup_RF);

        cx.kernels.elementwise.cast(dy_RD, dx_RD.reborrow())?;
        self.norm.backward(cx, weights, dh_RD.view(), y1_RD, rstd.view(), dx_RD, true, gradients)
    }

    fn activate(&self, cx: &Context<'_>, gate_RF: &Tensor, up_RF: &Tensor) -> Result<Tensor> {
        let mut act_RF = cx.tensor(gate_RF.shape().dims())?;
        cx.kernels.activation.swiglu(gate_RF.view(), up_RF.view(), act_RF.view_mut())?;
        Ok(act_RF)
    }
}
