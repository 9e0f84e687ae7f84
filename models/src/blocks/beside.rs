//! A decoder layer whose halves read the same norm of the same input: `y = x + attend(norm(x)) + feed-forward(norm(x))`.

use super::attention::Attention;
use super::layers::Params;
use super::mixer::Mixer;
use super::mlp::{Inner, Mlp};
use crate::ModelConfig;
use terrace_kernels::{DType, QuantFormat, View, ViewMut};
use terrace_zero::{Block, Context, Gradients, KvSpec, Mode, OutputSpec, ParamSpec, Result, Weights};

/// Such a layer.
///
/// Memory beside operands is that of a [`DecoderBlock`](super::DecoderBlock) without what lies between the halves.
#[derive(Debug)]
pub(crate) struct BesideBlock {
    name: String,
    params: Vec<ParamSpec>,
    mixer: Mixer,
    /// Its norm is that of attention.
    mlp: Mlp,
    hidden: usize,
}

impl BesideBlock {
    /// Layer `layer` of a model, with the weights of its linear layers in `format`.
    pub(crate) fn stored_as(config: &ModelConfig, layer: usize, format: Option<QuantFormat>) -> Self {
        let mut params = Params::new(&format!("model.layers.{layer}."), config, format);
        let attention = Attention::new(config, layer, &mut params);
        let mlp = Mlp::behind(config, attention.norm(), &mut params);
        let mixer = Mixer::Attention(attention);
        Self { name: format!("layers.{layer}"), params: params.specs, mixer, mlp, hidden: config.hidden }
    }
}

impl Block for BesideBlock {
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

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        mut y: ViewMut<'_>,
    ) -> Result {
        let x = x.expect("a decoder layer is never the first block");
        if !cx.keeps() {
            self.mixer.forward(cx, weights, x, y.reborrow())?;
            return self.mlp.add(cx, weights, Some(x), y);
        }
        let mixed = self.mixer.mix(cx, weights, x)?;
        self.mixer.residual(cx, weights, &mixed, x, y.reborrow())?;
        let inner = self.mlp.add_keeping(cx, weights, x, y)?;
        cx.keep(mixed.into_tensors().into_iter().chain(inner.into_tensors()).collect());
        Ok(())
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
        let (mixed, inner) = match cx.take_kept() {
            Some(kept) => {
                let mut kept = kept.into_iter();
                let mixed = self.mixer.mixed(&mut kept);
                (mixed, Some(Inner::from_tensors(kept.collect())))
            }
            None => (self.mixer.mix(cx, weights, x)?, None),
        };
        cx.kernels.elementwise.cast(dy, dx.reborrow())?;
        self.mixer.backward(cx, weights, x, mixed, None, dx.reborrow(), gradients)?;
        self.mlp.add_gradient(cx, weights, x, inner.as_ref(), dy, dx, gradients)
    }
}
