//! The blocks of a decoder-only transformer: embedding, decoder layers, head.
//!
//! Legend: B sequences, S positions, T = B·S tokens, D hidden, H query heads, G key/value heads, K head size, F feed-forward,
//! V vocabulary, E experts, X of them chosen by a token, R rows of a tile, P = R·X routed rows, C capacity of the key/value cache.
//!
//! Hidden states travel between blocks as `[T, D]` in the activation dtype. Everything that works on rows alone (norms,
//! projections, feed-forward, loss) runs over tiles of [`TILE_ROWS`] rows, so that its intermediates stay bounded
//! however long the sequences are; tile limits depend on the batch shape only, hence results do not depend on placement.

mod attention;
mod beside;
mod decoder;
mod delta;
mod embedding;
mod head;
mod latent;
mod layers;
mod mixer;
mod mixture;
mod mlp;
mod parallel;
mod router;
mod routing;
mod shared;
mod stages;

use beside::BesideBlock;
pub use decoder::DecoderBlock;
pub use embedding::EmbeddingBlock;
pub use head::HeadBlock;

use crate::{ModelConfig, Result};
use std::collections::HashMap;
use std::path::Path;
use terrace_kernels::QuantFormat;
use terrace_zero::Block;

/// Rows of a tile. At 2048 a weight gradient does 512 operations per byte of accumulator traffic, beyond the balance
/// point of any current device, so that larger tiles would cost memory and gain nothing.
pub const TILE_ROWS: usize = 2048;

/// Name of the embedding table, which tied models use as output projection too.
pub const EMBEDDING_NAME: &str = "model.embed_tokens.weight";

/// A configuration and the blocks it describes.
#[derive(Debug)]
pub struct Model {
    /// What the blocks were built from.
    pub config: ModelConfig,
    /// Embedding, decoder layers, head, in the order they run.
    pub blocks: Vec<Box<dyn Block>>,
}

impl Model {
    /// The blocks of a configuration.
    pub fn new(config: ModelConfig) -> Self {
        Self::stored_as(config, None)
    }

    /// The blocks of a configuration, with weights quantized as in [`build_quantized`] if there is a format.
    pub fn stored_as(config: ModelConfig, format: Option<QuantFormat>) -> Self {
        let blocks = blocks_of(&config, format);
        Self { config, blocks }
    }

    /// The blocks of a model folder's `config.json`.
    ///
    /// # Errors
    /// The file cannot be read or describes something unsupported.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Ok(Self::new(ModelConfig::from_folder(folder)?))
    }
}

/// The blocks of a configuration in the order they run.
///
/// # Panics
/// If the configuration fails [`ModelConfig::check`].
pub fn build(config: &ModelConfig) -> Vec<Box<dyn Block>> {
    blocks_of(config, None)
}

/// As [`build`], with the weights of all linear layers in `format`, for generation and evaluation.
///
/// Norms and biases stay in the engine's dtype: they are small. So does the embedding table, in which ids are looked up, also
/// where a tied head projects with it; a head of its own is quantized.
///
/// # Panics
/// As [`build`].
pub fn build_quantized(config: &ModelConfig, format: QuantFormat) -> Vec<Box<dyn Block>> {
    blocks_of(config, Some(format))
}

fn blocks_of(config: &ModelConfig, format: Option<QuantFormat>) -> Vec<Box<dyn Block>> {
    if let Err(error) = config.check() {
        panic!("the configuration was checked when it was parsed: {error}");
    }
    let mut blocks: Vec<Box<dyn Block>> = vec![Box::new(EmbeddingBlock::new(config))];
    for layer in 0..config.layers {
        blocks.push(layer_of(config, layer, format));
    }
    blocks.push(Box::new(HeadBlock::stored_as(config, format)));
    blocks
}

fn layer_of(config: &ModelConfig, layer: usize, format: Option<QuantFormat>) -> Box<dyn Block> {
    match config.is_beside {
        true => Box::new(BesideBlock::stored_as(config, layer, format)),
        false => Box::new(DecoderBlock::stored_as(config, layer, format)),
    }
}

/// Number of parameters of a configuration; a tied table counts once.
pub fn param_count(config: &ModelConfig) -> u64 {
    let count = |block: &dyn Block| block.params().iter().map(|p| p.elements() as u64).sum::<u64>();
    // Layers are alike that are alike in these.
    let kind = |layer: usize| {
        let [has_experts, has_delta] = [config.mixture_of(layer).is_some(), config.delta_of(layer).is_some()];
        (has_experts, has_delta, config.heads_of(layer), config.projects_values(layer))
    };
    let mut of_kinds: HashMap<_, u64> = HashMap::new();
    let of_layer =
        |layer| *of_kinds.entry(kind(layer)).or_insert_with(|| count(&*layer_of(config, layer, None)));
    let layers: u64 = (0..config.layers).map(of_layer).sum();
    count(&EmbeddingBlock::new(config)) + layers + count(&HeadBlock::new(config))
}
