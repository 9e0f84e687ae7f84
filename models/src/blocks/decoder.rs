//! One decoder layer: attention and feed-forward, each behind a norm and around a residual.

use super::attention::{Attended, Attention, Projected};
use super::layers::Params;
use super::mlp::{Inner, Mlp};
use crate::ModelConfig;
use terrace_kernels::{DType, QuantFormat, Tensor, View, ViewMut};
use terrace_zero::{Block, Context, Gradients, KvSpec, Mode, OutputSpec, ParamSpec, Result, Weights};

/// A decoder layer.
///
/// Memory beside operands, in elements of the activation dtype (norms and statistics left out), with R the smaller of T
/// and [`TILE_ROWS`](super::TILE_ROWS): forward the larger of T·(2H+2G)·K in attention and R·3F in the feed-forward; backward the
/// larger of T·((2H+2G)·K + D) + R·(D+5F) in the feed-forward and T·(4H+4G)·K in attention. Head norms add T·(H+G)·K while
/// in attention. A layer that keeps leaves T·((2H+2G)·K + D + 2F) elements and the log-sum-exp of attention from forward to
/// backward, which then computes no product of the forward again. Norms that follow add T·2D to that, and T·2D at most elsewhere.
#[derive(Debug)]
pub struct DecoderBlock {
    name: String,
    params: Vec<ParamSpec>,
    attention: Attention,
    mlp: Mlp,
    hidden: usize,
}

/// What backward needs of the forward.
#[derive(Debug)]
struct Intermediates {
    projected: Projected,
    attended: Attended,
    /// What a norm after attention is given.
    branch_TD: Option<Tensor>,
    /// Between the halves.
    y1_TD: Tensor,
    /// Recomputed tile by tile, if it was not kept.
    inner: Option<Inner>,
}

impl DecoderBlock {
    /// Layer `layer` of a model.
    pub fn new(config: &ModelConfig, layer: usize) -> Self {
        Self::stored_as(config, layer, None)
    }

    /// The same with the weights of its linear layers in `format`.
    pub(crate) fn stored_as(config: &ModelConfig, layer: usize, format: Option<QuantFormat>) -> Self {
        let mut params = Params::new(&format!("model.layers.{layer}."), config, format);
        let attention = Attention::new(config, layer, &mut params);
        let mlp = Mlp::new(config, &mut params);
        let name = format!("layers.{layer}");
        Self { name, params: params.specs, attention, mlp, hidden: config.hidden }
    }

    /// The forward up to the feed-forward.
    fn first_half(&self, cx: &mut Context<'_>, weights: &Weights<'_>, x: View<'_>) -> Result<Intermediates> {
        let mut projected = self.attention.project(cx, weights, x)?;
        let attended = self.attention.attend(cx, weights, &mut projected)?;
        let mut y1_TD = cx.lasting_tensor(x.shape().dims())?;
        let branch_TD = self.attention.residual(cx, weights, &attended, x, y1_TD.view_mut(), true)?;
        Ok(Intermediates { projected, attended, branch_TD, y1_TD, inner: None })
    }
}

impl Block for DecoderBlock {
    fn name(&self) -> &str {
        &self.name
    }

    fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    fn output(&self, sequences: usize, length: usize, dtype: DType, _mode: Mode) -> OutputSpec {
        OutputSpec { dtype, dims: vec![sequences * length, self.hidden] }
    }

    fn kv(&self) -> Option<KvSpec> {
        Some(self.attention.kv())
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        mut y: ViewMut<'_>,
    ) -> Result {
        let x = x.expect("a decoder layer is never the first block");
        if cx.keeps() {
            let mut half = self.first_half(cx, weights, x)?;
            half.inner = Some(self.mlp.forward_keeping(cx, weights, half.y1_TD.view(), y)?);
            cx.keep(half.into_tensors());
            return Ok(());
        }
        let mut projected = self.attention.project(cx, weights, x)?;
        let attended = self.attention.attend(cx, weights, &mut projected)?;
        drop(projected);
        self.attention.residual(cx, weights, &attended, x, y.reborrow(), false)?;
        drop(attended);
        self.mlp.forward(cx, weights, y)
    }

    fn backward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        dy: Option<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let x = x.expect("a decoder layer is never the first block");
        let dy = dy.expect("a decoder layer is never the last block");
        let mut dx = dx.expect("a decoder layer is never the first block");
        let Intermediates { projected, attended, branch_TD, y1_TD, inner } = match cx.take_kept() {
            Some(kept) => Intermediates::from_tensors(kept),
            None => self.first_half(cx, weights, x)?,
        };
        self.mlp.backward(cx, weights, y1_TD.view(), inner.as_ref(), dy, dx.reborrow(), gradients)?;
        drop((y1_TD, inner));
        self.attention.backward(cx, weights, x, projected, attended, branch_TD, dx, gradients)
    }
}

impl Intermediates {
    /// In the order of [`from_tensors`](Self::from_tensors).
    fn into_tensors(self) -> Vec<Tensor> {
        let Self { projected: Projected { q, k, v }, attended, branch_TD, y1_TD, inner } = self;
        let Attended { out_BSHK, lse_BHS } = attended;
        let mut tensors = vec![q, k, v, out_BSHK, lse_BHS, y1_TD];
        if let Some(Inner { gate_TF, up_TF, branch_TD }) = inner {
            tensors.extend([gate_TF, up_TF]);
            tensors.extend(branch_TD);
        }
        tensors.extend(branch_TD);
        tensors
    }

    fn from_tensors(kept: Vec<Tensor>) -> Self {
        let mut kept = kept.into_iter();
        let [q, k, v, out_BSHK, lse_BHS, y1_TD, gate_TF, up_TF] =
            std::array::from_fn(|_| kept.next().expect("a layer gets what its own forward kept"));
        let (of_mlp, of_attention) = (kept.next(), kept.next());
        Self {
            projected: Projected { q, k, v },
            attended: Attended { out_BSHK, lse_BHS },
            branch_TD: of_attention,
            y1_TD,
            inner: Some(Inner { gate_TF, up_TF, branch_TD: of_mlp }),
        }
    }
}
