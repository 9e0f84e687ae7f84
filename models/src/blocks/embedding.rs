//! Token ids to hidden states.

use super::EMBEDDING_NAME;
use super::layers::scaled;
use crate::ModelConfig;
use crate::batch::{Expected, IDS};
use half::{bf16, f16};
use terrace_kernels::{DType, Tensor, View, ViewMut};
use terrace_zero::{
    BatchUse, Block, Context, Gradients, MicroBatch, Mode, OutputSpec, ParamSpec, Result, Weights,
};

/// The first block: looks ids up in a table `[V, D]`.
#[derive(Debug)]
pub struct EmbeddingBlock {
    params: Vec<ParamSpec>,
    expected: Expected,
    hidden: usize,
    /// The row that gets no gradient.
    pad_id: Option<usize>,
    /// Multiplies rows that were looked up.
    factor: f32,
    /// It is rounded to the type of activations first.
    factor_is_rounded: bool,
}

impl EmbeddingBlock {
    /// The embedding of a model.
    pub fn new(config: &ModelConfig) -> Self {
        let params = vec![ParamSpec::new(EMBEDDING_NAME, &[config.vocab, config.hidden])];
        Self {
            params,
            expected: Expected::of(config),
            hidden: config.hidden,
            pad_id: config.pad_id,
            factor: config.multipliers.embedding,
            factor_is_rounded: config.multipliers.embedding_is_rounded,
        }
    }

    fn factor(&self, dtype: DType) -> f32 {
        match dtype {
            DType::BF16 if self.factor_is_rounded => bf16::from_f32(self.factor).to_f32(),
            DType::F16 if self.factor_is_rounded => f16::from_f32(self.factor).to_f32(),
            _ => self.factor,
        }
    }
}

impl Block for EmbeddingBlock {
    fn name(&self) -> &str {
        "embed_tokens"
    }

    fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    fn output(&self, sequences: usize, length: usize, dtype: DType, _mode: Mode) -> OutputSpec {
        OutputSpec { dtype, dims: vec![sequences * length, self.hidden] }
    }

    /// Of all inputs, for all blocks of the model, so that they are looked through once.
    fn check(&self, batch: &MicroBatch, of: BatchUse<'_>) -> Result {
        self.expected.check(batch, of)
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        _x: Option<View<'_>>,
        mut y: ViewMut<'_>,
    ) -> Result {
        cx.kernels.embedding.gather(cx.input(IDS), weights.get(0), y.reborrow())?;
        if self.factor != 1.0 {
            cx.kernels.elementwise.affine(y, self.factor(cx.dtype), 0.0)?;
        }
        Ok(())
    }

    fn backward(
        &self,
        cx: &mut Context<'_>,
        _weights: &Weights<'_>,
        _x: Option<View<'_>>,
        dy: Option<View<'_>>,
        _dx: Option<ViewMut<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        let dy = dy.expect("only the last block has no dy, and the embedding is the first");
        let factor = self.factor(cx.dtype);
        let of_rows = (factor != 1.0).then(|| scaled(cx, dy, factor)).transpose()?;
        let dy = of_rows.as_ref().map_or(dy, Tensor::view);
        let (kernels, ids) = (cx.kernels, cx.input(IDS));
        let mut table_VD = gradients.get(0)?;
        let Some(pad) = self.pad_id else { return Ok(kernels.embedding.scatter_add(ids, dy, table_VD)?) };
        // What it has of a head that shares the table stays.
        let mut before_1D = cx.tensor_of(DType::F32, &[1, self.hidden])?;
        kernels.elementwise.cast(table_VD.view().rows(pad, pad + 1), before_1D.view_mut())?;
        kernels.embedding.scatter_add(ids, dy, table_VD.reborrow())?;
        Ok(kernels.elementwise.cast(before_1D.view(), table_VD.rows(pad, pad + 1))?)
    }
}
