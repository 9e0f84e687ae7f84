//! The feed-forward half of a decoder layer with its norm and residual: `y += down(f(gate(h))·up(h))`, `h = norm(y)`, or, of models whose
//! norms follow, `y += norm(down(f(gate(y))·up(y)))`; of some what is added is multiplied by a number.

use super::TILE_ROWS;
use super::layers::{
    After, Linear, Norm, Normed, Params, activate, add_branch_rows, backward_together, forward_together,
    tiles,
};
use crate::ModelConfig;
use terrace_kernels::{DType, GateFunction, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// What gate and up give for all rows, kept for backward: `[T, F]` each.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) gate_TF: Tensor,
    pub(crate) up_TF: Tensor,
    /// `[T, D]`: what a norm that follows is given.
    pub(crate) branch_TD: Option<Tensor>,
}

/// Rows of [`Inner`].
#[derive(Clone, Copy)]
struct InnerRows<'a> {
    gate_RF: View<'a>,
    up_RF: View<'a>,
    branch_RD: Option<View<'a>>,
}

/// Parameters of the feed-forward half.
#[derive(Debug)]
pub(crate) struct Mlp {
    /// Of the input.
    before: Option<Norm>,
    after: After,
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
        let (before, after) = After::around(config, params, config.family.norms_of_feed_forward());
        Self::between(config, before, after, params)
    }

    /// One that reads through a norm of something else, and gives what it gives.
    pub(crate) fn behind(config: &ModelConfig, norm: Option<Norm>, params: &mut Params) -> Self {
        Self::between(config, norm, After::Nothing, params)
    }

    fn between(config: &ModelConfig, before: Option<Norm>, after: After, params: &mut Params) -> Self {
        let (hidden, feed_forward, bias) = (config.hidden, config.feed_forward, config.mlp_bias);
        let module = config.family.feed_forward();
        let mut linear =
            |name, outputs, inputs| params.linear(&format!("{module}.{name}"), outputs, inputs, bias);
        Self {
            before,
            after,
            gate: linear("gate_proj", feed_forward, hidden),
            up: linear("up_proj", feed_forward, hidden),
            down: linear("down_proj", hidden, feed_forward),
            f: config.gate_function,
            hidden,
            feed_forward,
        }
    }

    /// Adds the feed-forward of `y_TD` to it.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, y_TD: ViewMut<'_>) -> Result {
        self.add(cx, weights, None, y_TD)
    }

    /// Adds the feed-forward of `x_TD`, or of `y_TD` itself, to that.
    pub(crate) fn add(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: Option<View<'_>>,
        mut y_TD: ViewMut<'_>,
    ) -> Result {
        for (start, end) in tiles(y_TD.shape().rows(), TILE_ROWS) {
            let y_RD = y_TD.reborrow().rows(start, end);
            let x_RD = x_TD.map_or(y_RD.view(), |x_TD| x_TD.rows(start, end));
            let normed = self.normed_input(cx, weights, x_RD)?;
            let h_RD = normed.as_ref().map_or(x_RD, Tensor::view);
            let (gate_RF, up_RF) = self.widen(cx, weights, h_RD)?;
            drop(normed);
            let act_RF = activate(cx, self.f, gate_RF.view(), up_RF.view())?;
            drop((gate_RF, up_RF));
            let down = (self.down, self.after);
            add_branch_rows(cx, weights, down, act_RF.view(), None, y_RD, None)?;
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
        y_TD: ViewMut<'_>,
    ) -> Result<Inner> {
        self.keeping(cx, weights, y1_TD, Some(y1_TD), y_TD)
    }

    /// As [`add`](Self::add) of `x_TD`, with the same bits; gives what [`add_gradient`](Self::add_gradient) would recompute.
    pub(crate) fn add_keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        y_TD: ViewMut<'_>,
    ) -> Result<Inner> {
        self.keeping(cx, weights, x_TD, None, y_TD)
    }

    /// What is added to is `y_TD` itself without a residual.
    fn keeping(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_TD: View<'_>,
        residual_TD: Option<View<'_>>,
        mut y_TD: ViewMut<'_>,
    ) -> Result<Inner> {
        let dims_TF = [y1_TD.shape().rows(), self.feed_forward];
        let mut gate_TF = cx.lasting_tensor(&dims_TF)?;
        let mut up_TF = cx.lasting_tensor(&dims_TF)?;
        let dims_TD = y1_TD.shape();
        let stays = self.after.needs_branch();
        let mut branch_TD = stays.then(|| cx.lasting_tensor(dims_TD.dims())).transpose()?;
        for (start, end) in tiles(y1_TD.shape().rows(), TILE_ROWS) {
            let y1_RD = y1_TD.rows(start, end);
            let normed = self.normed_input(cx, weights, y1_RD)?;
            let gate = (self.gate, gate_TF.view_mut().rows(start, end));
            let up = (self.up, up_TF.view_mut().rows(start, end));
            let h_RD = normed.as_ref().map_or(y1_RD, Tensor::view);
            forward_together(cx, weights, h_RD, &mut [gate, up])?;
            drop(normed);
            let (gate_RF, up_RF) = (gate_TF.view().rows(start, end), up_TF.view().rows(start, end));
            let act_RF = activate(cx, self.f, gate_RF, up_RF)?;
            let y_RD = y_TD.reborrow().rows(start, end);
            let down = (self.down, self.after);
            let to = branch_TD.as_mut().map(|branch| branch.view_mut().rows(start, end));
            let residual_RD = residual_TD.map(|residual| residual.rows(start, end));
            add_branch_rows(cx, weights, down, act_RF.view(), residual_RD, y_RD, to)?;
        }
        Ok(Inner { gate_TF, up_TF, branch_TD })
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
        cx.kernels.elementwise.cast(dy_TD, dx_TD.reborrow())?;
        self.add_gradient(cx, weights, y1_TD, inner, dy_TD, dx_TD, gradients)
    }

    /// The same without dy: `dx += ∂(feed-forward)/∂y1 · dy`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn add_gradient(
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
            let inner = inner.map(|Inner { gate_TF, up_TF, branch_TD }| InnerRows {
                gate_RF: gate_TF.view().rows(start, end),
                up_RF: up_TF.view().rows(start, end),
                branch_RD: branch_TD.as_ref().map(|branch| branch.view().rows(start, end)),
            });
            self.backward_tile(cx, weights, y1_RD, inner, dy_RD, dx_RD, gradients)?;
        }
        Ok(())
    }

    /// Holds at most five `[R, F]` tensors: gate, up (unless `inner` has them), dact, dgate, dup; and two `[R, D]` ones beside the first three
    /// where the norm follows.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn backward_tile(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y1_RD: View<'_>,
        inner: Option<InnerRows<'_>>,
        dy_RD: View<'_>,
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let before = self.before.map(|norm| norm.forward(cx, weights, y1_RD)).transpose()?;
        let h_RD = before.as_ref().map_or(y1_RD, |normed| normed.out.view());
        let recomputed = match inner {
            Some(_) => None,
            None => Some(self.widen(cx, weights, h_RD)?),
        };
        let fresh = recomputed.as_ref().map(|(gate, up): &(Tensor, Tensor)| InnerRows {
            gate_RF: gate.view(),
            up_RF: up.view(),
            branch_RD: None,
        });
        let InnerRows { gate_RF, up_RF, branch_RD } =
            inner.or(fresh).expect("what is not kept is recomputed");
        let act_RF = activate(cx, self.f, gate_RF, up_RF)?;
        let dbranch_RD = self.branch_gradient(cx, weights, act_RF.view(), branch_RD, dy_RD, gradients)?;
        let dims_RF = [dy_RD.shape().rows(), self.feed_forward];
        let mut dact_RF = cx.tensor(&dims_RF)?;
        let down = [(self.down, dbranch_RD.as_ref().map_or(dy_RD, Tensor::view))];
        backward_together(cx, weights, &down, act_RF.view(), dact_RF.view_mut(), gradients)?;
        drop((act_RF, dbranch_RD));

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
        backward_together(cx, weights, &layers, h_RD, dh_RD.view_mut(), gradients)?;
        drop((dgate_RF, dup_RF));
        let Some((norm, Normed { out, rstd })) = self.before.zip(before) else {
            return Ok(cx.kernels.elementwise.add_assign(dx_RD, dh_RD.view())?);
        };
        drop(out);
        norm.backward(cx, weights, dh_RD.view(), y1_RD, rstd.view(), dx_RD, true, gradients)
    }

    /// What gate and up read of rows, if that is not the rows themselves.
    fn normed_input(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
    ) -> Result<Option<Tensor>> {
        let normed = self.before.map(|norm| norm.forward(cx, weights, y_RD)).transpose()?;
        Ok(normed.map(|Normed { out, .. }| out))
    }

    /// The gradient of what something that follows is given, which is computed again if that is needed and was not kept.
    fn branch_gradient(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        act_RF: View<'_>,
        kept_RD: Option<View<'_>>,
        dy_RD: View<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Option<Tensor>> {
        let again = kept_RD.is_none() && self.after.needs_branch();
        let mut fresh = again.then(|| cx.tensor(dy_RD.shape().dims())).transpose()?;
        if let Some(fresh) = &mut fresh {
            self.down.forward_into(cx, weights, act_RF, fresh.view_mut())?;
        }
        let branch_RD = kept_RD.or(fresh.as_ref().map(Tensor::view));
        self.after.backward(cx, weights, dy_RD, branch_RD, gradients)
    }

    /// Gate and up of `h_RD`.
    fn widen(&self, cx: &Context<'_>, weights: &Weights<'_>, h_RD: View<'_>) -> Result<(Tensor, Tensor)> {
        let dims_RF = [h_RD.shape().rows(), self.feed_forward];
        let (mut gate_RF, mut up_RF) = (cx.tensor(&dims_RF)?, cx.tensor(&dims_RF)?);
        let layers = &mut [(self.gate, gate_RF.view_mut()), (self.up, up_RF.view_mut())];
        forward_together(cx, weights, h_RD, layers)?;
        Ok((gate_RF, up_RF))
    }
}

impl Inner {
    /// In the order of [`from_tensors`](Self::from_tensors).
    pub(crate) fn into_tensors(self) -> Vec<Tensor> {
        let Self { gate_TF, up_TF, branch_TD } = self;
        [gate_TF, up_TF].into_iter().chain(branch_TD).collect()
    }

    /// # Panics
    /// If they are not what a feed-forward left.
    pub(crate) fn from_tensors(kept: Vec<Tensor>) -> Self {
        let mut kept = kept.into_iter();
        let mut next = || kept.next().expect("a layer gets what its own forward kept");
        let (gate_TF, up_TF) = (next(), next());
        Self { gate_TF, up_TF, branch_TD: kept.next() }
    }
}
