//! What the first half of a decoder layer mixes positions by.

use super::attention::{Attended, Attention, Projected};
use super::delta::{Channels, Delta};
use super::latent::{Expanded, Latent};
use super::layers::Params;
use crate::ModelConfig;
use terrace_kernels::{Tensor, View, ViewMut};
use terrace_zero::{CarrySpec, Context, Gradients, KvSpec, Result, Weights};

/// The first half of a decoder layer.
#[derive(Debug)]
pub(crate) enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// The same, of keys and values that are made of a latent.
    Latent(Latent),
    /// The gated delta rule.
    Delta(Delta),
}

/// What it has computed, all that its backward needs but what a norm that follows is given.
#[derive(Debug)]
pub(crate) enum Mixed {
    Attention(Projected, Attended),
    Latent(Expanded),
    Delta(Channels, Tensor),
}

impl Mixer {
    /// That of a layer, which takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, layer: usize, params: &mut Params) -> Self {
        match (config.delta_of(layer), &config.latent) {
            (Some(delta), _) => Self::Delta(Delta::new(config, delta, params)),
            (None, Some(latent)) => Self::Latent(Latent::new(config, latent, layer, params)),
            (None, None) => Self::Attention(Attention::new(config, layer, params)),
        }
    }

    pub(crate) fn kv(&self) -> Option<KvSpec> {
        match self {
            Self::Attention(attention) => Some(attention.kv()),
            Self::Latent(latent) => Some(latent.kv()),
            Self::Delta(_) => None,
        }
    }

    pub(crate) fn carries(&self) -> Option<CarrySpec> {
        match self {
            Self::Attention(_) | Self::Latent(_) => None,
            Self::Delta(delta) => Some(delta.carries()),
        }
    }

    /// `y = x + …`, of which nothing else stays.
    pub(crate) fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: View<'_>,
        y: ViewMut<'_>,
    ) -> Result {
        match self {
            Self::Attention(attention) => {
                let mut projected = attention.project(cx, weights, x)?;
                let attended = attention.attend(cx, weights, &mut projected)?;
                let gate = projected.into_gate();
                let gate = gate.as_ref().map(Tensor::view);
                attention.residual(cx, weights, &attended, gate, x, y, false)?;
            }
            Self::Latent(latent) => latent.forward(cx, weights, x, y)?,
            Self::Delta(delta) => {
                let channels = delta.project(cx, weights, x)?;
                let scanned = delta.scan(cx, weights, &channels)?;
                let [qkv, z, b, a] = channels.into_tensors();
                drop((qkv, b, a));
                delta.residual(cx, weights, z.view(), scanned.view(), x, y, false)?;
            }
        }
        Ok(())
    }

    /// What [`residual`](Self::residual) adds.
    pub(crate) fn mix(&self, cx: &mut Context<'_>, weights: &Weights<'_>, x: View<'_>) -> Result<Mixed> {
        Ok(match self {
            Self::Attention(attention) => {
                let mut projected = attention.project(cx, weights, x)?;
                let attended = attention.attend(cx, weights, &mut projected)?;
                Mixed::Attention(projected, attended)
            }
            Self::Latent(latent) => Mixed::Latent(latent.expand(cx, weights, x)?),
            Self::Delta(delta) => {
                let channels = delta.project(cx, weights, x)?;
                let scanned = delta.scan(cx, weights, &channels)?;
                Mixed::Delta(channels, scanned)
            }
        })
    }

    /// `y = x + …`, as [`forward`](Self::forward) has it, and what a norm that follows is given, if [it is needed](Self::needs_branch).
    pub(crate) fn residual(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        mixed: &Mixed,
        x: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<Option<Tensor>> {
        match (self, mixed) {
            (Self::Attention(attention), Mixed::Attention(projected, attended)) => {
                attention.residual(cx, weights, attended, projected.gate(), x, y, true)
            }
            (Self::Latent(latent), Mixed::Latent(expanded)) => latent.residual(cx, weights, expanded, x, y),
            (Self::Delta(delta), Mixed::Delta(channels, scanned)) => {
                delta.residual(cx, weights, channels.z(), scanned.view(), x, y, true)
            }
            _ => unreachable!("a layer gets what its own forward kept"),
        }
    }

    pub(crate) fn needs_branch(&self) -> bool {
        match self {
            Self::Attention(attention) => attention.needs_branch(),
            Self::Latent(latent) => latent.needs_branch(),
            Self::Delta(delta) => delta.needs_branch(),
        }
    }

    /// On entry `dx` is the gradient of `y`; on return that of `x`.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x: View<'_>,
        mixed: Mixed,
        branch: Option<Tensor>,
        dx: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        match (self, mixed) {
            (Self::Attention(attention), Mixed::Attention(projected, attended)) => {
                attention.backward(cx, weights, x, projected, attended, branch, dx, gradients)
            }
            (Self::Latent(latent), Mixed::Latent(expanded)) => {
                latent.backward(cx, weights, x, expanded, branch, dx, gradients)
            }
            (Self::Delta(delta), Mixed::Delta(channels, scanned)) => {
                delta.backward(cx, weights, x, channels, scanned, branch, dx, gradients)
            }
            _ => unreachable!("a layer gets what its own forward kept"),
        }
    }

    /// The first of `kept`, which [`Mixed::into_tensors`] gave.
    pub(crate) fn mixed(&self, kept: &mut impl Iterator<Item = Tensor>) -> Mixed {
        let mut next = || kept.next().expect("a layer gets what its own forward kept");
        match self {
            Self::Attention(attention) => {
                let [q, k, out_BSHK, lse_BHS] = std::array::from_fn(|_| next());
                let v = attention.projects_values().then(&mut next);
                let gate = attention.is_gated().then(next);
                Mixed::Attention(Projected { q, k, v, gate }, Attended { out_BSHK, lse_BHS })
            }
            Self::Latent(latent) => Mixed::Latent(latent.expanded(&mut next)),
            Self::Delta(_) => {
                let channels = Channels::from_tensors(std::array::from_fn(|_| next()));
                Mixed::Delta(channels, next())
            }
        }
    }
}

impl Mixed {
    /// For [`Mixer::mixed`].
    pub(crate) fn into_tensors(self) -> Vec<Tensor> {
        match self {
            Self::Attention(Projected { q, k, v, gate }, Attended { out_BSHK, lse_BHS }) => {
                [q, k, out_BSHK, lse_BHS].into_iter().chain(v).chain(gate).collect()
            }
            Self::Latent(expanded) => expanded.into_tensors().collect(),
            Self::Delta(channels, scanned) => channels.into_tensors().into_iter().chain([scanned]).collect(),
        }
    }
}
