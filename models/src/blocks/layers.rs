//! Linear layers and norms as indices into a block's parameters, with their gradients.

use super::TILE_ROWS;
use crate::{Family, ModelConfig, Norms};
use terrace_kernels::{
    DType, Epilogue, GateFunction, MatmulSpec, Product, QuantFormat, Residual, Tensor, View, ViewMut,
};
use terrace_zero::{Context, Gradients, ParamSpec, Result, Weight, Weights};

/// Collects a block's parameters in order.
#[derive(Debug, Default)]
pub(crate) struct Params {
    pub(crate) specs: Vec<ParamSpec>,
    prefix: String,
    /// How the weights of linear layers are stored.
    format: Option<QuantFormat>,
    /// The same of experts.
    expert_format: Option<QuantFormat>,
    /// See [`ModelConfig::norm_plus_one`].
    norm_plus_one: bool,
    /// See [`ModelConfig::norm_centers`].
    norm_centers: bool,
}

impl Params {
    /// Every name will start with `prefix`; weights of linear layers are stored in `format`, if any. Of gpt-oss MXFP4 holds the experts and nothing
    /// else, which is how it is published.
    pub(crate) fn new(prefix: &str, config: &ModelConfig, format: Option<QuantFormat>) -> Self {
        let of_experts_alone = config.family == Family::GptOss && format == Some(QuantFormat::Mxfp4);
        Self {
            specs: Vec::new(),
            prefix: prefix.to_owned(),
            format: format.filter(|_| !of_experts_alone),
            expert_format: format,
            norm_plus_one: config.norm_plus_one,
            norm_centers: config.norm_centers,
        }
    }

    /// A linear layer stored `[outputs, inputs]`.
    pub(crate) fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Linear {
        let layer = self.plain_linear(name, outputs, inputs, bias);
        self.specs[layer.weight].quantized = self.format;
        layer
    }

    /// One of an expert.
    pub(crate) fn of_expert(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Linear {
        let layer = self.plain_linear(name, outputs, inputs, bias);
        self.specs[layer.weight].quantized = self.expert_format;
        layer
    }

    /// One that is never quantized.
    pub(crate) fn plain_linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Linear {
        let weight = self.push(&format!("{name}.weight"), &[outputs, inputs]);
        let bias = bias.then(|| self.push(&format!("{name}.bias"), &[outputs]));
        Linear { weight, bias }
    }

    /// Numbers that are neither a layer's nor a norm's.
    pub(crate) fn numbers(&mut self, name: &str, dims: &[usize]) -> usize {
        self.push(name, dims)
    }

    /// A norm over rows of `width`, as the model has them.
    pub(crate) fn norm(&mut self, name: &str, width: usize, eps: f32) -> Norm {
        let (plus_one, centers) = (self.norm_plus_one, self.norm_centers);
        Norm { plus_one, centers, ..self.plain_norm(name, width, eps) }
    }

    /// A root-mean-square norm whose scale is its weight, whatever those of the others are.
    pub(crate) fn plain_norm(&mut self, name: &str, width: usize, eps: f32) -> Norm {
        self.bare_norm(&format!("{name}.weight"), width, eps)
    }

    /// The same, with a weight that has no name but this.
    pub(crate) fn bare_norm(&mut self, name: &str, width: usize, eps: f32) -> Norm {
        Norm { weight: Some(self.push(name, &[width])), ..Self::norm_without_weight(eps) }
    }

    /// One that multiplies by nothing.
    pub(crate) fn norm_without_weight(eps: f32) -> Norm {
        Norm { weight: None, eps, plus_one: false, centers: false }
    }

    fn push(&mut self, name: &str, dims: &[usize]) -> usize {
        self.specs.push(ParamSpec::new(format!("{}{name}", self.prefix), dims));
        self.specs.len() - 1
    }
}

/// `out = x · Wᵀ (+ bias)`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Linear {
    pub(super) weight: usize,
    pub(super) bias: Option<usize>,
}

impl Linear {
    /// Overwrites `out`.
    pub(crate) fn forward_into(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x: View<'_>,
        out: ViewMut<'_>,
    ) -> Result {
        self.branch(cx, weights, x, Residual::None, out)
    }

    /// `out = residual + x · Wᵀ (+ bias)`, rounded once; where the residual lies changes no bit.
    pub(crate) fn branch(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x: View<'_>,
        residual: Residual<'_>,
        out: ViewMut<'_>,
    ) -> Result {
        let bias = self.bias.map(|bias| weights.get(bias));
        product(cx, x, weights.weight(self.weight), out, Epilogue { bias, residual })
    }
}

/// The outputs of layers that read the same `x`, at once: each `out = x · Wᵀ (+ bias)`.
pub(crate) fn forward_together(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    x: View<'_>,
    layers: &mut [(Linear, ViewMut<'_>)],
) -> Result {
    let layers = layers.iter_mut().map(|(layer, out)| (*layer, x, out.reborrow()));
    forward_each(cx, weights, layers.collect())
}

/// The same of layers that each read an `x` of their own.
pub(crate) fn forward_each(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    layers: Vec<(Linear, View<'_>, ViewMut<'_>)>,
) -> Result {
    let plain = |(layer, x): (Linear, _)| match weights.weight(layer.weight) {
        Weight::Plain(weight) => Some([(x, weight)]),
        Weight::Quantized(_) => None,
    };
    let read = layers.iter().map(|(layer, x, _)| (*layer, *x));
    let Some(terms) = read.map(plain).collect::<Option<Vec<_>>>() else {
        return layers.into_iter().try_for_each(|(layer, x, out)| layer.forward_into(cx, weights, x, out));
    };
    let products = layers.into_iter().zip(&terms).map(|((layer, _, out), terms)| {
        let bias = layer.bias.map(|bias| weights.get(bias));
        let epilogue = Epilogue { bias, residual: Residual::None };
        Product { terms, out, spec: MatmulSpec::NT, epilogue }
    });
    Ok(cx.kernels.matmul.together(&mut products.collect::<Vec<_>>())?)
}

/// From the gradients `dout` of the outputs of layers that read the same `x`: `dx = Σ dout · W`, and of each layer `dW += doutᵀ · x` and
/// `dbias += Σ_r dout[r]`. Several need an f32 `dx`.
pub(crate) fn backward_together(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    layers: &[(Linear, View<'_>)],
    x: View<'_>,
    dx: ViewMut<'_>,
    gradients: &mut Gradients<'_>,
) -> Result {
    let products: Vec<_> = layers.iter().map(|&(layer, dout)| (layer.weight, dout, x)).collect();
    let terms: Vec<_> = layers.iter().map(|&(layer, dout)| (dout, weights.get(layer.weight))).collect();
    let input = Product { terms: &terms, out: dx, spec: MatmulSpec::NN, epilogue: Epilogue::NONE };
    gradients.add_products(&products, vec![input])?;
    for (layer, dout) in layers {
        if let Some(bias) = layer.bias {
            cx.kernels.reduce.sum_rows(*dout, gradients.get(bias)?)?;
        }
    }
    Ok(())
}

/// `out = x · Wᵀ` and an epilogue.
pub(crate) fn product(
    cx: &Context<'_>,
    x: View<'_>,
    weight: Weight<'_>,
    out: ViewMut<'_>,
    epilogue: Epilogue<'_>,
) -> Result {
    match weight {
        Weight::Plain(weight) => cx.kernels.matmul.matmul_nt(x, weight, out, epilogue)?,
        Weight::Quantized(weight) => cx.kernels.quantized_matmul.matmul_nt(x, weight, out, epilogue)?,
    }
    Ok(())
}

/// Root-mean-square norm with a learned scale, or none, of rows themselves or of what is left of them without their mean.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norm {
    weight: Option<usize>,
    eps: f32,
    /// The scale is one more than the weight.
    plus_one: bool,
    /// The mean of a row is taken from it first.
    centers: bool,
}

/// A norm's output and what its backward needs.
#[derive(Debug)]
pub(crate) struct Normed {
    /// Like the input.
    pub(crate) out: Tensor,
    /// f32 `[R]`.
    pub(crate) rstd: Tensor,
}

impl Norm {
    /// Normalizes rows of `x`, which is `[R, width]` under any leading dimensions.
    pub(crate) fn forward(&self, cx: &Context<'_>, weights: &Weights<'_>, x: View<'_>) -> Result<Normed> {
        let shape = x.shape();
        let mut out = cx.tensor(shape.dims())?;
        let mut rstd = cx.tensor_of(DType::F32, &[shape.rows()])?;
        let weight = self.weight.map(|weight| weights.get(weight));
        let own = self.own_scale(cx, weight, x)?;
        let scale = scale_of(&own, weight);
        let centered = self.centered(cx, x)?;
        let x = centered.as_ref().map_or(x, Tensor::view);
        cx.kernels.rms_norm.forward(x, scale, self.eps, out.view_mut(), rstd.view_mut())?;
        Ok(Normed { out, rstd })
    }

    /// What is normalized, in f32, if it is not x: as many elements, and in backward twice as many.
    fn centered(&self, cx: &Context<'_>, x: View<'_>) -> Result<Option<Tensor>> {
        if !self.centers {
            return Ok(None);
        }
        let mut centered = cx.tensor_of(DType::F32, x.shape().dims())?;
        cx.kernels.rms_norm.center(x, centered.view_mut(), false)?;
        Ok(Some(centered))
    }

    /// The scale in f32, if it is not the weight.
    fn own_scale(&self, cx: &Context<'_>, weight: Option<View<'_>>, x: View<'_>) -> Result<Option<Tensor>> {
        let elementwise = &cx.kernels.elementwise;
        let mut scale = match weight {
            Some(_) if !self.plus_one => return Ok(None),
            _ => cx.tensor_of(DType::F32, &[x.shape().last()])?,
        };
        match weight {
            Some(weight) => elementwise.cast(weight, scale.view_mut())?,
            None => elementwise.zero(scale.view_mut())?,
        }
        elementwise.affine(scale.view_mut(), 1.0, 1.0)?;
        Ok(Some(scale))
    }

    /// `dx (+)= …` and the scale's gradient.
    #[expect(clippy::too_many_arguments, reason = "the operands of the formula")]
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        dout: View<'_>,
        x: View<'_>,
        rstd: View<'_>,
        dx: ViewMut<'_>,
        accumulate_dx: bool,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let weight = self.weight.map(|weight| weights.get(weight));
        let own = self.own_scale(cx, weight, x)?;
        let scale = scale_of(&own, weight);
        let kernel = &cx.kernels.rms_norm;
        if let Some((centered, weight)) = self.centered(cx, x)?.zip(self.weight) {
            let dweight = gradients.get(weight)?;
            let mut dcentered = cx.tensor_of(DType::F32, x.shape().dims())?;
            let (x, to) = (centered.view(), dcentered.view_mut());
            kernel.backward(dout, x, scale, rstd, to, false, dweight)?;
            return Ok(kernel.center(dcentered.view(), dx, accumulate_dx)?);
        }
        if let Some(weight) = self.weight {
            let dweight = gradients.get(weight)?;
            return Ok(kernel.backward(dout, x, scale, rstd, dx, accumulate_dx, dweight)?);
        }
        // The gradient of a scale that nobody learns.
        let mut dscale = cx.tensor_of(DType::F32, &[x.shape().last()])?;
        cx.kernels.elementwise.zero(dscale.view_mut())?;
        Ok(kernel.backward(dout, x, scale, rstd, dx, accumulate_dx, dscale.view_mut())?)
    }

    /// The gradient of `x_TD`, from that of its norm.
    pub(crate) fn backward_of(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        dout_TD: View<'_>,
        x_TD: View<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Tensor> {
        let mut dx_TD = cx.tensor(x_TD.shape().dims())?;
        for (start, end) in tiles(x_TD.shape().rows(), TILE_ROWS) {
            let (dout_RD, x_RD) = (dout_TD.rows(start, end), x_TD.rows(start, end));
            let Normed { out, rstd } = self.forward(cx, weights, x_RD)?;
            drop(out);
            let dx_RD = dx_TD.view_mut().rows(start, end);
            self.backward(cx, weights, dout_RD, x_RD, rstd.view(), dx_RD, false, gradients)?;
        }
        Ok(dx_TD)
    }
}

/// A norm's scale: one of its own, or the weight itself.
fn scale_of<'a>(own: &'a Option<Tensor>, weight: Option<View<'a>>) -> View<'a> {
    own.as_ref().map(Tensor::view).or(weight).expect("a norm without weight has a scale of its own")
}

/// What becomes of the result of attention or feed-forward before it is added to the residual.
#[derive(Debug, Clone, Copy)]
pub(crate) enum After {
    /// Nothing.
    Nothing,
    /// It is normalized.
    Norm(Norm),
    /// It is multiplied by a number.
    Scale(f32),
}

impl After {
    /// What precedes attention or feed-forward and what follows; norms have these names.
    pub(crate) fn around(
        config: &ModelConfig,
        params: &mut Params,
        [before, after]: [&str; 2],
    ) -> (Option<Norm>, Self) {
        let mut norm = |name| params.norm(name, config.hidden, config.norm_eps);
        let before = (config.norms != Norms::After).then(|| norm(before));
        let follows = match config.multipliers.residual {
            _ if config.norms != Norms::Before => Self::Norm(norm(after)),
            1.0 => Self::Nothing,
            factor => Self::Scale(factor),
        };
        (before, follows)
    }

    /// What is added, if it is not `branch_RD`, which may be another afterwards.
    fn apply(
        self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        branch_RD: ViewMut<'_>,
    ) -> Result<Option<Tensor>> {
        match self {
            Self::Nothing => {}
            Self::Norm(norm) => return Ok(Some(norm.forward(cx, weights, branch_RD.view())?.out)),
            Self::Scale(factor) => cx.kernels.elementwise.affine(branch_RD, factor, 0.0)?,
        }
        Ok(None)
    }

    /// Whether backward needs the result as it was.
    pub(crate) fn needs_branch(self) -> bool {
        matches!(self, Self::Norm(_))
    }

    /// The gradient of a result from `dy_TD`, that of what it was added to, unless it is the same. `branch_TD` is the result as it was, where
    /// that is [needed](Self::needs_branch).
    pub(crate) fn backward(
        self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        dy_TD: View<'_>,
        branch_TD: Option<View<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Option<Tensor>> {
        match self {
            Self::Nothing => Ok(None),
            Self::Norm(norm) => {
                let branch = branch_TD.expect("what a norm was given is there");
                norm.backward_of(cx, weights, dy_TD, branch, gradients).map(Some)
            }
            Self::Scale(factor) => scaled(cx, dy_TD, factor).map(Some),
        }
    }
}

/// `factor·x`.
pub(crate) fn scaled(cx: &Context<'_>, x: View<'_>, factor: f32) -> Result<Tensor> {
    let mut out = cx.tensor(x.shape().dims())?;
    cx.kernels.elementwise.cast(x, out.view_mut())?;
    cx.kernels.elementwise.affine(out.view_mut(), factor, 0.0)?;
    Ok(out)
}

/// `y = x + after(layer(input))`; gives `layer(input)` if it `stays` and backward [needs](After::needs_branch) it.
pub(crate) fn add_branch(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    (layer, after): (Linear, After),
    input_TN: View<'_>,
    x_TD: View<'_>,
    mut y_TD: ViewMut<'_>,
    stays: bool,
) -> Result<Option<Tensor>> {
    if let After::Nothing = after {
        layer.branch(cx, weights, input_TN, Residual::Of(x_TD), y_TD)?;
        return Ok(None);
    }
    let stays = stays && after.needs_branch();
    let mut all = stays.then(|| cx.lasting_tensor(x_TD.shape().dims())).transpose()?;
    for (start, end) in tiles(x_TD.shape().rows(), TILE_ROWS) {
        let (input_RN, x_RD) = (input_TN.rows(start, end), x_TD.rows(start, end));
        let to = all.as_mut().map(|all| all.view_mut().rows(start, end));
        let y_RD = y_TD.reborrow().rows(start, end);
        add_branch_rows(cx, weights, (layer, after), input_RN, Some(x_RD), y_RD, to)?;
    }
    Ok(all)
}

/// The same of some rows, of which `layer(input)` is left in `to`, if there is that; added to `y_RD` itself without `x_RD`.
pub(crate) fn add_branch_rows(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    (layer, after): (Linear, After),
    input_RN: View<'_>,
    x_RD: Option<View<'_>>,
    y_RD: ViewMut<'_>,
    to: Option<ViewMut<'_>>,
) -> Result {
    if let After::Nothing = after {
        let residual = x_RD.map_or(Residual::InPlace, Residual::Of);
        return layer.branch(cx, weights, input_RN, residual, y_RD);
    }
    let mut own = match to {
        Some(_) => None,
        None => Some(cx.tensor(y_RD.shape().dims())?),
    };
    let mut branch_RD =
        to.or_else(|| own.as_mut().map(Tensor::view_mut)).expect("a place for what does not stay");
    layer.forward_into(cx, weights, input_RN, branch_RD.reborrow())?;
    let other = after.apply(cx, weights, branch_RD.reborrow())?;
    let added = other.as_ref().map_or(branch_RD.view(), Tensor::view);
    match x_RD {
        Some(x_RD) => cx.kernels.elementwise.add(x_RD, added, y_RD)?,
        None => cx.kernels.elementwise.add_assign(y_RD, added)?,
    }
    Ok(())
}

/// From the gradients of layers that read `norm(x)`, or x itself without a norm, to that of `x_TD`, which is added to `dx`.
pub(crate) fn input_backward(
    cx: &Context<'_>,
    weights: &Weights<'_>,
    before: Option<Norm>,
    layers: &[(Linear, View<'_>)],
    x_TD: View<'_>,
    mut dx_TD: ViewMut<'_>,
    gradients: &mut Gradients<'_>,
) -> Result {
    for (start, end) in tiles(x_TD.shape().rows(), TILE_ROWS) {
        let x_RD = x_TD.rows(start, end);
        let normed = before.map(|norm| norm.forward(cx, weights, x_RD)).transpose()?;
        let h_RD = normed.as_ref().map_or(x_RD, |normed| normed.out.view());
        let mut dh_RD = cx.tensor_of(DType::F32, x_RD.shape().dims())?;
        let layers: Vec<_> = layers.iter().map(|(layer, dout)| (*layer, dout.rows(start, end))).collect();
        backward_together(cx, weights, &layers, h_RD, dh_RD.view_mut(), gradients)?;
        let dx_RD = dx_TD.reborrow().rows(start, end);
        let Some((norm, Normed { out, rstd })) = before.zip(normed) else {
            cx.kernels.elementwise.add_assign(dx_RD, dh_RD.view())?;
            continue;
        };
        drop(out);
        norm.backward(cx, weights, dh_RD.view(), x_RD, rstd.view(), dx_RD, true, gradients)?;
    }
    Ok(())
}

/// `f(gate)·up`.
pub(crate) fn activate(cx: &Context<'_>, f: GateFunction, gate: View<'_>, up: View<'_>) -> Result<Tensor> {
    let mut out = cx.tensor(gate.shape().dims())?;
    cx.kernels.activation.gated(f, gate, up, out.view_mut())?;
    Ok(out)
}

/// Consecutive row ranges of at most `size` rows that cover `rows`.
pub(crate) fn tiles(rows: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(size).map(move |start| (start, rows.min(start + size)))
}
