//! One decoder layer: attention, or what is in its place, and feed-forward, each behind a norm and around a residual.

use super::layers::Params;
use super::mixer::{Mixed, Mixer};
use super::mixture::MixtureMlp;
use super::mlp::{Inner, Mlp};
use super::parallel::{Both, ParallelMlp};
use super::routing::{Routed, Routing, chosen_experts};
use crate::ModelConfig;
use crate::batch::constants_input;
use std::ops::Range;
use terrace_kernels::{DType, QuantFormat, Residual, Tensor, View, ViewMut};
use terrace_zero::{
    Begun, Block, CarrySpec, Context, Gradients, KvSpec, Mode, OutputSpec, ParamSpec, Result, Weights,
};

/// A decoder layer.
///
/// Memory beside operands, in elements of the activation dtype (norms and statistics left out), with R the smaller of T
/// and [`TILE_ROWS`](super::TILE_ROWS): forward the larger of T·(2H+2G)·K in attention and R·3F in the feed-forward; backward the
/// larger of T·((2H+2G)·K + D) + R·(D+5F) in the feed-forward and T·(4H+4G)·K in attention. Head norms add T·(H+G)·K while
/// in attention, those of values T·G·K. A layer that keeps leaves T·((2H+2G)·K + D + 2F) elements and the log-sum-exp of attention from
/// forward to backward, which then computes no product of the forward again. Norms that follow add T·2D to that, and T·2D at most
/// elsewhere; a gate behind attention T·2H·K; a number that multiplies what the layer gives T·D in the backward of the feed-forward. Layers with the gated delta rule take what `delta.rs` says.
#[derive(Debug)]
pub struct DecoderBlock {
    name: String,
    params: Vec<ParamSpec>,
    mixer: Mixer,
    feed_forward: FeedForward,
    hidden: usize,
    /// The input with what multiplies all that a layer gives, and the row of this one in it.
    scale: Option<(usize, usize)>,
}

/// The second half.
#[derive(Debug)]
enum FeedForward {
    /// One for all tokens.
    Dense(Mlp),
    /// Some of many for each.
    Mixture(MixtureMlp),
    /// Both.
    Parallel(Box<ParallelMlp>),
}

impl FeedForward {
    /// Experts, of layers that have any.
    fn experts(&self) -> Option<&MixtureMlp> {
        match self {
            Self::Dense(_) => None,
            Self::Mixture(mlp) => Some(mlp),
            Self::Parallel(mlp) => Some(&mlp.experts),
        }
    }
}

/// What backward needs of the forward.
#[derive(Debug)]
struct Intermediates {
    mixed: Mixed,
    /// What a norm after attention is given.
    branch_TD: Option<Tensor>,
    /// Between the halves.
    y1_TD: Tensor,
    /// What the feed-forward left; recomputed tile by tile, if there is nothing.
    inner: Vec<Tensor>,
}

impl DecoderBlock {
    /// Layer `layer` of a model.
    pub fn new(config: &ModelConfig, layer: usize) -> Self {
        Self::stored_as(config, layer, None)
    }

    /// The same with the weights of its linear layers in `format`.
    pub(crate) fn stored_as(config: &ModelConfig, layer: usize, format: Option<QuantFormat>) -> Self {
        let mut params = Params::new(&format!("model.layers.{layer}."), config, format);
        let mixture = config.mixture_of(layer);
        // Gradients that leave before the others are those of the first parameters.
        let staged = mixture.filter(|mixture| mixture.stages(config.hidden).len() > 1);
        let experts = staged.map(|mixture| MixtureMlp::experts(config, mixture, &mut params));
        let mixer = Mixer::new(config, layer, &mut params);
        let feed_forward = match mixture {
            None => FeedForward::Dense(Mlp::new(config, &mut params)),
            Some(mixture) if mixture.is_beside_dense => {
                FeedForward::Parallel(Box::new(ParallelMlp::new(config, layer, mixture, &mut params)))
            }
            Some(mixture) => {
                FeedForward::Mixture(MixtureMlp::new(config, layer, mixture, experts, &mut params))
            }
        };
        let name = format!("layers.{layer}");
        let scale = config.has_layer_scales.then(|| (constants_input(config), layer));
        Self { name, params: params.specs, mixer, feed_forward, hidden: config.hidden, scale }
    }

    /// Multiplies what the layer gives, or its gradient.
    fn multiply(&self, cx: &Context<'_>, y_TD: ViewMut<'_>) -> Result {
        match self.scale {
            Some((input, row)) => {
                Ok(cx.kernels.elementwise.scale(y_TD, cx.input(input).rows(row, row + 1))?)
            }
            None => Ok(()),
        }
    }

    /// The gradient of what is multiplied, if it is not `dy_TD`.
    fn multiplied(&self, cx: &Context<'_>, dy_TD: View<'_>) -> Result<Option<Tensor>> {
        if self.scale.is_none() {
            return Ok(None);
        }
        let mut out_TD = cx.tensor(dy_TD.shape().dims())?;
        cx.kernels.elementwise.cast(dy_TD, out_TD.view_mut())?;
        self.multiply(cx, out_TD.view_mut())?;
        Ok(Some(out_TD))
    }

    /// The forward up to the feed-forward.
    fn first_half(&self, cx: &mut Context<'_>, weights: &Weights<'_>, x: View<'_>) -> Result<Intermediates> {
        let mixed = self.mixer.mix(cx, weights, x)?;
        let mut y1_TD = cx.lasting_tensor(x.shape().dims())?;
        let branch_TD = self.mixer.residual(cx, weights, &mixed, x, y1_TD.view_mut())?;
        Ok(Intermediates { mixed, branch_TD, y1_TD, inner: Vec::new() })
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
        self.mixer.kv()
    }

    fn carries(&self) -> Option<CarrySpec> {
        self.mixer.carries()
    }

    fn parts(&self) -> Vec<Range<usize>> {
        self.feed_forward.experts().map(MixtureMlp::parts).unwrap_or_default()
    }

    fn gradient_parts(&self) -> Vec<Range<usize>> {
        self.feed_forward.experts().map(MixtureMlp::gradient_parts).unwrap_or_default()
    }

    fn export_elements(&self) -> usize {
        self.feed_forward.experts().map_or(0, MixtureMlp::export_elements)
    }

    fn parts_used(&self, rows: usize) -> f64 {
        self.feed_forward.experts().map_or(1.0, |experts| experts.parts_used(rows))
    }

    fn begin(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        mut y: ViewMut<'_>,
    ) -> Result<Begun> {
        let x = x.expect("a decoder layer is never the first block");
        self.mixer.forward(cx, weights, x, y.reborrow())?;
        let experts = self.feed_forward.experts().expect("only experts are on demand");
        let (h_TD, routing) = experts.begin(cx, weights, y.view())?;
        let starts = experts.starts(cx, &routing)?;
        let tensors = routing.into_tensors().into_iter().chain([h_TD]);
        Ok(Begun { wanted: chosen_experts(&starts), tensors: tensors.collect(), numbers: starts })
    }

    fn finish(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        begun: Begun,
        mut y: ViewMut<'_>,
    ) -> Result {
        let tensors = begun.tensors.try_into();
        let [logits, weights_TX, chosen, rows, starts, h_TD] = tensors.expect("what the first half left");
        let routing = Routing::from_tensors([logits, weights_TX, chosen, rows, starts]);
        let (starts, to) = (begun.numbers, y.reborrow());
        match &self.feed_forward {
            FeedForward::Dense(_) => unreachable!("only experts are on demand"),
            FeedForward::Mixture(mlp) => {
                mlp.finish(cx, weights, h_TD, &routing, starts, Residual::InPlace, to)?;
            }
            FeedForward::Parallel(mlp) => mlp.finish(cx, weights, h_TD, &routing, starts, to)?,
        }
        self.multiply(cx, y)
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
            let (y1_TD, to) = (half.y1_TD.view(), y.reborrow());
            half.inner = match &self.feed_forward {
                FeedForward::Dense(mlp) => mlp.forward_keeping(cx, weights, y1_TD, to)?.into_tensors(),
                FeedForward::Mixture(mlp) => {
                    mlp.forward_keeping(cx, weights, y1_TD, true, to)?.into_tensors()
                }
                FeedForward::Parallel(mlp) => mlp.forward_keeping(cx, weights, y1_TD, to)?.into_tensors(),
            };
            cx.keep(half.into_tensors());
            return self.multiply(cx, y);
        }
        self.mixer.forward(cx, weights, x, y.reborrow())?;
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(cx, weights, y.reborrow())?,
            FeedForward::Mixture(mlp) => mlp.forward(cx, weights, y.reborrow())?,
            FeedForward::Parallel(mlp) => mlp.forward(cx, weights, y.reborrow())?,
        }
        self.multiply(cx, y)
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
        let Intermediates { mixed, branch_TD, y1_TD, inner } = match cx.take_kept() {
            Some(kept) => Intermediates::from_tensors(kept, &self.mixer),
            None => self.first_half(cx, weights, x)?,
        };
        let (y1, to) = (y1_TD.view(), dx.reborrow());
        let dsum_TD = self.multiplied(cx, dy)?;
        let dy = dsum_TD.as_ref().map_or(dy, Tensor::view);
        let is_kept = !inner.is_empty();
        match &self.feed_forward {
            FeedForward::Dense(mlp) => {
                let inner = is_kept.then(|| Inner::from_tensors(inner));
                mlp.backward(cx, weights, y1, inner.as_ref(), dy, to, gradients)?;
            }
            FeedForward::Mixture(mlp) => {
                let routed = is_kept.then(|| Routed::from_tensors(inner));
                mlp.backward(cx, weights, y1, routed.as_ref(), dy, to, gradients)?;
            }
            FeedForward::Parallel(mlp) => {
                let both = is_kept.then(|| Both::from_tensors(inner));
                mlp.backward(cx, weights, y1, both.as_ref(), dy, to, gradients)?;
            }
        }
        drop((y1_TD, dsum_TD));
        self.mixer.backward(cx, weights, x, mixed, branch_TD, dx, gradients)
    }
}

impl Intermediates {
    /// In the order of [`from_tensors`](Self::from_tensors).
    fn into_tensors(self) -> Vec<Tensor> {
        let Self { mixed, branch_TD, y1_TD, inner } = self;
        mixed.into_tensors().into_iter().chain([y1_TD]).chain(branch_TD).chain(inner).collect()
    }

    fn from_tensors(kept: Vec<Tensor>, mixer: &Mixer) -> Self {
        let mut kept = kept.into_iter();
        let mixed = mixer.mixed(&mut kept);
        let mut next = || kept.next().expect("a layer gets what its own forward kept");
        let y1_TD = next();
        let branch_TD = mixer.needs_branch().then(next);
        Self { mixed, branch_TD, y1_TD, inner: kept.collect() }
    }
}
