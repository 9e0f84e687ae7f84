//! One decoder layer: attention and feed-forward, each behind a norm and around a residual.

use super::attention::Attention;
use super::layers::Params;
use super::mlp::Mlp;
use crate::ModelConfig;
use terrace_kernels::{DType, QuantFormat, View, ViewMut};
use terrace_zero::{Block, Context, Gradients, KvSpec, Mode, OutputSpec, ParamSpec, Result, Weights};

/// A decoder layer.
///
/// Memory beside operands, in elements of the activation dtype (norms and statistics left out), with R the smaller of T
/// and [`TILE_ROWS`](super::TILE_ROWS): forward the larger of T·(2H+2G)·K in attention and R·3F in the feed-forward; backward the
/// larger of T·((2H+2G)·K + D) + R·(D+5F) in the feed-forward and T·(4H+4G)·K in attention. Head norms add T·(H+G)·K while
/// in attention.
#[derive(Debug)]
pub struct DecoderBlock {
    name: String,
    params: Vec<ParamSpec>,
    attention: Attention,
    mlp: Mlp,
    hidden: usize,
}

impl DecoderBlock {
    /// Layer `layer` of a model.
    pub fn new(config: &ModelConfig, layer: usize) -> Self {
        Self::stored_as(config, layer, None)
    }

    /// The same with the weights of its linear layers in `format`.
    pub(crate) fn stored_as(config: &ModelConfig, layer: usize, format: Option<QuantFormat>) -> Self {
        let mut params = Params::new(&format!("model.layers.{layer}."), format);
        let attention = Attention::new(config, layer, &mut params);
        let mlp = Mlp::new(config, &mut params);
        let name = format!("layers.{layer}");
        Self { name, params: params.specs, attention, mlp, hidden: config.hidden }
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
        let mut projected = self.attention.project(cx, weights, x)?;
        let attended = self.attention.attend(cx, weights, &mut projected)?;
        drop(projected);
        self.attention.residual(cx, weights, &attended, x, y.reborrow())?;
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
        let mut projected = self.attention.project(cx, weights, x)?;
        let attended = self.attention.attend(cx, weights, &mut projected)?;
        let mut y1_TD = cx.tensor(x.shape().dims())?;
        self.attention.residual(cx, weights, &attended, x, y1_TD.view_mut())?;
        self.mlp.backward(cx, weights, y1_TD.view(), dy, dx.reborrow(), gradients)?;
        drop(y1_TD);
        self.attention.backward(cx, weights, x, projected, attended, dx, gradients)
    }
}
