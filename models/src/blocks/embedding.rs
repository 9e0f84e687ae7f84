//! Token ids to hidden states.

use super::EMBEDDING_NAME;
use crate::ModelConfig;
use crate::batch::IDS;
use terrace_kernels::{DType, View, ViewMut};
use terrace_zero::{Block, Context, Gradients, Mode, OutputSpec, ParamSpec, Result, Weights};

/// The first block: looks ids up in a table `[V, D]`.
#[derive(Debug)]
pub struct EmbeddingBlock {
    params: Vec<ParamSpec>,
    hidden: usize,
}

impl EmbeddingBlock {
    /// The embedding of a model.
    pub fn new(config: &ModelConfig) -> Self {
        let params = vec![ParamSpec::new(EMBEDDING_NAME, &[config.vocab, config.hidden])];
        Self { params, hidden: config.hidden }
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

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        _x: Option<View<'_>>,
        y: ViewMut<'_>,
    ) -> Result {
        Ok(cx.kernels.embedding.gather(cx.input(IDS), weights.get(0), y)?)
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
        Ok(cx.kernels.embedding.scatter_add(cx.input(IDS), dy, gradients.get(0)?)?)
    }
}
