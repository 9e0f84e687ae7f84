//! The last block: final norm, output projection and cross-entropy.

use super::EMBEDDING_NAME;
use super::layers::{Norm, Normed, Params, product, tiles};
use crate::ModelConfig;
use crate::batch::{LABELS, LAST};
use terrace_kernels::{DType, Epilogue, MatmulSpec, Product, QuantFormat, Tensor, View, ViewMut};
use terrace_zero::{Block, Context, Gradients, Mode, OutputSpec, ParamSpec, Result, Weights};

/// Upper limit of a tile of f32 logits, unless that would be less than [`ROWS_MIN`] rows.
const LOGITS_BYTES_MAX: usize = 32 << 20;

/// Fewest rows of a tile of logits: every tile passes once over the table's gradient accumulator, 8 bytes per element,
/// for 4·R operations, so that fewer rows would be bound by memory on a GPU.
const ROWS_MIN: usize = 128;

/// Index of the projection table among the weights, owned or borrowed.
const TABLE: usize = 1;

/// Final norm, projection to logits and loss.
///
/// Logits `[T, V]` never exist whole: norm, projection, loss and all their gradients run over tiles of at most
/// 32 MiB of f32 logits (but at least 128 rows). Only [`Mode::Generate`] writes logits, one f32 row `[V]` per sequence.
#[derive(Debug)]
pub struct HeadBlock {
    params: Vec<ParamSpec>,
    borrowed: Vec<String>,
    norm: Norm,
    hidden: usize,
    vocab: usize,
    /// Multiplies logits.
    factor: f32,
    /// See [`ModelConfig::logit_cap`].
    cap: Option<f32>,
}

impl HeadBlock {
    /// The head of a model; a tied one borrows the embedding table.
    pub fn new(config: &ModelConfig) -> Self {
        Self::stored_as(config, None)
    }

    /// The same with a projection of its own in `format`. A borrowed table stays as it is, since ids are looked up in it.
    pub(crate) fn stored_as(config: &ModelConfig, format: Option<QuantFormat>) -> Self {
        let mut params = Params::new("", config, format);
        let norm = params.norm("model.norm", config.hidden, config.norm_eps);
        let mut borrowed = Vec::new();
        if config.tied {
            borrowed.push(EMBEDDING_NAME.to_owned());
        } else {
            params.linear("lm_head", config.vocab, config.hidden, false);
        }
        Self {
            params: params.specs,
            borrowed,
            norm,
            hidden: config.hidden,
            vocab: config.vocab,
            factor: config.multipliers.logits,
            cap: config.logit_cap,
        }
    }

    /// Rows of a tile of logits.
    pub fn tile_rows(&self) -> usize {
        (LOGITS_BYTES_MAX / (self.vocab * DType::F32.size())).max(ROWS_MIN)
    }

    fn logits(&self, cx: &Context<'_>, weights: &Weights<'_>, h_RD: View<'_>) -> Result<Tensor> {
        let mut logits_RV = cx.tensor_of(DType::F32, &[h_RD.shape().rows(), self.vocab])?;
        product(cx, h_RD, weights.weight(TABLE), logits_RV.view_mut(), Epilogue::NONE)?;
        self.finish(cx, logits_RV.view_mut())?;
        Ok(logits_RV)
    }

    /// Makes logits of what the product gives.
    fn finish(&self, cx: &Context<'_>, mut logits_RV: ViewMut<'_>) -> Result {
        self.multiply(cx, logits_RV.reborrow())?;
        match self.cap {
            Some(cap) => Ok(cx.kernels.elementwise.cap(logits_RV, cap)?),
            None => Ok(()),
        }
    }

    /// Multiplies what the product gives, or takes the gradient of that to the product's.
    fn multiply(&self, cx: &Context<'_>, logits_RV: ViewMut<'_>) -> Result {
        if self.factor != 1.0 {
            cx.kernels.elementwise.affine(logits_RV, self.factor, 0.0)?;
        }
        Ok(())
    }

    fn evaluate(&self, cx: &mut Context<'_>, weights: &Weights<'_>, x_TD: View<'_>) -> Result {
        let (kernels, inputs) = (cx.kernels, cx.inputs);
        for (start, end) in tiles(x_TD.shape().rows(), self.tile_rows()) {
            let Normed { out: h_RD, rstd } = self.norm.forward(cx, weights, x_TD.rows(start, end))?;
            drop(rstd);
            let logits_RV = self.logits(cx, weights, h_RD.view())?;
            let labels_R = rows_of(inputs[LABELS].view(), start, end);
            kernels.cross_entropy.loss(logits_RV.view(), labels_R, cx.loss.reborrow())?;
        }
        Ok(())
    }

    fn generate(
        &self,
        cx: &Context<'_>,
        weights: &Weights<'_>,
        x_TD: View<'_>,
        mut y_BV: ViewMut<'_>,
    ) -> Result {
        let mut last_BD = cx.tensor(&[cx.sequences, self.hidden])?;
        cx.kernels.embedding.gather(cx.input(LAST), x_TD, last_BD.view_mut())?;
        let normed = self.norm.forward(cx, weights, last_BD.view())?;
        drop(last_BD);
        product(cx, normed.out.view(), weights.weight(TABLE), y_BV.reborrow(), Epilogue::NONE)?;
        self.finish(cx, y_BV)
    }

    /// Replaces logits by their gradient, in the activation dtype so that the products that follow run at its speed.
    fn logits_gradient(
        &self,
        cx: &mut Context<'_>,
        mut logits_RV: Tensor,
        start: usize,
        end: usize,
    ) -> Result<Tensor> {
        let (kernels, scale, inputs) = (cx.kernels, cx.loss_scale, cx.inputs);
        let labels_R = rows_of(inputs[LABELS].view(), start, end);
        let loss = cx.loss.reborrow();
        kernels.cross_entropy.loss_and_gradient(logits_RV.view_mut(), labels_R, scale, self.cap, loss)?;
        self.multiply(cx, logits_RV.view_mut())?;
        if cx.dtype == DType::F32 {
            return Ok(logits_RV);
        }
        let mut dlogits_RV = cx.tensor(logits_RV.shape().dims())?;
        kernels.elementwise.cast(logits_RV.view(), dlogits_RV.view_mut())?;
        Ok(dlogits_RV)
    }
}

impl Block for HeadBlock {
    fn name(&self) -> &str {
        "head"
    }

    fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    fn passes(&self, rows: usize) -> usize {
        rows.div_ceil(self.tile_rows())
    }

    fn borrowed(&self) -> &[String] {
        &self.borrowed
    }

    fn output(&self, sequences: usize, _length: usize, _dtype: DType, mode: Mode) -> OutputSpec {
        let dims = match mode {
            Mode::Train | Mode::Evaluate => vec![0],
            Mode::Generate => vec![sequences, self.vocab],
        };
        OutputSpec { dtype: DType::F32, dims }
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        y: ViewMut<'_>,
    ) -> Result {
        let x = x.expect("the head is never the first block");
        match cx.mode {
            Mode::Train | Mode::Evaluate => self.evaluate(cx, weights, x),
            Mode::Generate => self.generate(cx, weights, x, y),
        }
    }

    fn backward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        _dy: Option<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let x_TD = x.expect("the head is never the first block");
        let mut dx_TD = dx.expect("the head is never the first block");
        for (start, end) in tiles(x_TD.shape().rows(), self.tile_rows()) {
            let x_RD = x_TD.rows(start, end);
            let Normed { out: h_RD, rstd } = self.norm.forward(cx, weights, x_RD)?;
            let logits_RV = self.logits(cx, weights, h_RD.view())?;
            let dlogits_RV = self.logits_gradient(cx, logits_RV, start, end)?;
            let mut dh_RD = cx.tensor_of(DType::F32, &[end - start, self.hidden])?;
            let terms = [(dlogits_RV.view(), weights.get(TABLE))];
            let out = dh_RD.view_mut();
            let input = Product { terms: &terms, out, spec: MatmulSpec::NN, epilogue: Epilogue::NONE };
            gradients.add_products(&[(TABLE, dlogits_RV.view(), h_RD.view())], vec![input])?;
            drop(h_RD);
            drop(dlogits_RV);
            let dx_RD = dx_TD.reborrow().rows(start, end);
            self.norm.backward(cx, weights, dh_RD.view(), x_RD, rstd.view(), dx_RD, false, gradients)?;
        }
        Ok(())
    }
}

/// Elements `start..end` of a vector.
fn rows_of(vector: View<'_>, start: usize, end: usize) -> View<'_> {
    let elements = vector.shape().elements();
    vector.reshape(&[elements, 1]).rows(start, end).reshape(&[end - start])
}
