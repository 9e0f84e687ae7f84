//! What chooses experts: a linear layer over what the experts read. That of Gemma 4 reads `norm(y)` with a norm of its own, its logits are
//! multiplied by `D^-½`, and the weights of what is chosen by a number of each expert.

use super::layers::{Linear, Norm, Normed, Params};
use crate::{Mixture, ModelConfig};
use terrace_kernels::{DType, MatmulSpec, Tensor, View, ViewMut};
use terrace_zero::{Context, Gradients, Result, Weights};

/// Parameters of a router.
#[derive(Debug)]
pub(crate) struct Router {
    linear: Linear,
    apart: Option<Apart>,
}

/// What one has that does not read what experts do.
#[derive(Debug)]
struct Apart {
    norm: Norm,
    /// Multiplies logits.
    factor: f32,
    /// A number for each expert.
    scales: usize,
    experts: usize,
}

/// The gradient of what such a router reads, f32, and its norm's `rstd`.
pub(crate) struct OfNorm {
    dnormed_RD: Tensor,
    rstd: Tensor,
}

impl Router {
    /// Takes its parameters from the layer's list.
    pub(crate) fn new(config: &ModelConfig, mixture: &Mixture, params: &mut Params) -> Self {
        let names = config.family.expert_names();
        let (hidden, experts) = (config.hidden, mixture.experts);
        let linear = params.plain_linear(names.router, experts, hidden, mixture.biased);
        let apart = mixture.is_beside_dense.then(|| Apart {
            norm: params.bare_norm("router.scale", hidden, config.norm_eps),
            factor: (hidden as f32).sqrt().recip(),
            scales: params.numbers("router.per_expert_scale", &[experts]),
            experts,
        });
        Self { linear, apart }
    }

    /// Writes logits, of experts that read `h_RD` of `y_RD`.
    pub(crate) fn logits(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
        h_RD: View<'_>,
        mut logits_RE: ViewMut<'_>,
    ) -> Result {
        let Some(Apart { norm, factor, .. }) = &self.apart else {
            return self.linear.forward_into(cx, weights, h_RD, logits_RE);
        };
        let normed = norm.forward(cx, weights, y_RD)?;
        self.linear.forward_into(cx, weights, normed.out.view(), logits_RE.reborrow())?;
        Ok(cx.kernels.elementwise.affine(logits_RE, *factor, 0.0)?)
    }

    /// What choices weigh in the end, if that is not `weights_RX`.
    pub(crate) fn scaled(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        weights_RX: View<'_>,
        chosen_RX: View<'_>,
    ) -> Result<Option<Tensor>> {
        let Some(apart) = &self.apart else { return Ok(None) };
        let scales_RX = apart.of_choices(cx, weights, chosen_RX)?;
        let mut out_RX = cx.tensor_of(DType::F32, weights_RX.shape().dims())?;
        cx.kernels.elementwise.multiply(weights_RX, scales_RX.view(), out_RX.view_mut())?;
        Ok(Some(out_RX))
    }

    /// Makes of the gradient of what choices weigh in the end that of `weights_RX`.
    pub(crate) fn scaled_backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        weights_RX: View<'_>,
        chosen_RX: View<'_>,
        dweights_RX: Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<Tensor> {
        let Some(apart) = &self.apart else { return Ok(dweights_RX) };
        let (elementwise, dims) = (&cx.kernels.elementwise, weights_RX.shape());
        let mut out_RX = cx.tensor_of(DType::F32, dims.dims())?;
        elementwise.multiply(dweights_RX.view(), weights_RX, out_RX.view_mut())?;
        let (ids, choices) = (chosen_RX.reshape(&[dims.elements()]), [dims.elements(), 1]);
        let dscales_E = gradients.get(apart.scales)?.reshape(&[apart.experts, 1]);
        cx.kernels.embedding.scatter_add(ids, out_RX.view().reshape(&choices), dscales_E)?;
        let scales_RX = apart.of_choices(cx, weights, chosen_RX)?;
        elementwise.multiply(dweights_RX.view(), scales_RX.view(), out_RX.view_mut())?;
        Ok(out_RX)
    }

    /// From the gradient of logits to that of what is read: added to `dh_RD`, or of a norm of its own.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
        h_RD: View<'_>,
        mut dlogits_RE: Tensor,
        dh_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Option<OfNorm>> {
        let normed = self.apart.as_ref().map(|apart| apart.norm.forward(cx, weights, y_RD)).transpose()?;
        if let Some(Apart { factor, .. }) = &self.apart {
            cx.kernels.elementwise.affine(dlogits_RE.view_mut(), *factor, 0.0)?;
        }
        let (Linear { weight, bias }, dlogits) = (self.linear, dlogits_RE.view());
        gradients.add_product(weight, dlogits, normed.as_ref().map_or(h_RD, |normed| normed.out.view()))?;
        if let Some(bias) = bias {
            cx.kernels.reduce.sum_rows(dlogits, gradients.get(bias)?)?;
        }
        let (matmul, weight) = (&cx.kernels.matmul, weights.get(weight));
        let Some(Normed { out, rstd }) = normed else {
            let spec = MatmulSpec { accumulate: true, ..MatmulSpec::NN };
            matmul.matmul(dlogits, weight, dh_RD, spec)?;
            return Ok(None);
        };
        drop(out);
        let mut dnormed_RD = cx.tensor_of(DType::F32, y_RD.shape().dims())?;
        matmul.matmul(dlogits, weight, dnormed_RD.view_mut(), MatmulSpec::NN)?;
        Ok(Some(OfNorm { dnormed_RD, rstd }))
    }

    /// Adds to `dx_RD` what comes through a norm of its own.
    pub(crate) fn norm_backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        y_RD: View<'_>,
        of_norm: Option<OfNorm>,
        dx_RD: ViewMut<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let Some((Apart { norm, .. }, OfNorm { dnormed_RD, rstd })) = self.apart.as_ref().zip(of_norm) else {
            return Ok(());
        };
        norm.backward(cx, weights, dnormed_RD.view(), y_RD, rstd.view(), dx_RD, true, gradients)
    }
}

impl Apart {
    /// The numbers of chosen experts.
    fn of_choices(&self, cx: &Context<'_>, weights: &Weights<'_>, chosen_RX: View<'_>) -> Result<Tensor> {
        let dims = chosen_RX.shape();
        let mut out_RX = cx.tensor_of(DType::F32, dims.dims())?;
        let table_E = weights.get(self.scales).reshape(&[self.experts, 1]);
        let out = out_RX.view_mut().reshape(&[dims.elements(), 1]);
        cx.kernels.embedding.gather(chosen_RX.reshape(&[dims.elements()]), table_E, out)?;
        Ok(out_RX)
    }
}
