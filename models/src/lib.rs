//! Hugging Face model families as explicit forward and backward blocks, and their files.
//!
//! [`ModelConfig`] reads a model folder's `config.json`, [`build`] turns it into the [`Block`](terrace_zero::Block)s that the
//! engine runs, [`TokenBatch`] makes their inputs, [`SafetensorsSource`] streams their initial weights and
//! [`export_folder`] writes the trained ones back. Nothing here moves a byte between memory tiers: blocks see views.
//!
//! ```
//! use terrace_models::{ModelConfig, build, param_count};
//!
//! let config = ModelConfig::parse(
//!     r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
//!         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}"#,
//! )?;
//! let blocks = build(&config);
//! assert_eq!(blocks.len(), 4, "embedding, two layers, head");
//! assert_eq!(blocks[1].params()[0].name, "model.layers.0.input_layernorm.weight");
//! assert_eq!(param_count(&config), 78_144);
//! # Ok::<(), terrace_models::ModelError>(())
//! ```
#![forbid(unsafe_code)]
#![allow(non_snake_case, reason = "tensor names carry their shape as a suffix")]

pub mod batch;
mod blocks;
mod composite;
mod config;
mod defaults;
mod entries;
mod error;
mod family;
mod fp8;
mod fused;
mod heads;
mod json;
mod latent;
mod mixture;
mod mxfp4;
mod random;
mod rope;
mod safetensors_files;
mod safetensors_in;
mod safetensors_out;
mod windows;

pub use batch::{Row, TokenBatch};
pub use blocks::{
    DecoderBlock, EMBEDDING_NAME, EmbeddingBlock, HeadBlock, Model, TILE_ROWS, build, build_quantized,
    param_count,
};
pub use config::{DeltaNet, Fp8, ModelConfig, Multipliers, Norms, QkNorm};
pub use error::{ModelError, Result};
pub use family::Family;
pub use heads::KvHeads;
pub use json::parse_json;
pub use latent::LatentAttention;
pub use mixture::{Mixture, SharedExpert};
pub use random::RandomSource;
pub use rope::{QueryFactor, Rope, RopeScaling};
pub use safetensors_in::SafetensorsSource;
pub use safetensors_out::{export_folder, holds_weights, remove_partials, remove_weights};
