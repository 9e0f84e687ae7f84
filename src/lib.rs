//! Train and run language models that are larger than the memory of the machine.
//!
//! The [`Engine`] keeps parameters, gradients, optimizer state and activations in host memory or on disk, as a plan says, and
//! moves them to where they are computed with and back. A network is a list of [`Block`]s: those of [`models`], or your own.
//! This crate is the facade over the crates that do the work, and the library behind the `terrace` command.
//!
//! # Example
//!
//! A small model with all its training state on disk:
//!
//! ```
//! use terrace::models::{ModelConfig, RandomSource, Row, TokenBatch, build};
//! use terrace::{BatchLimits, DType, Engine, EngineConfig, IoConfig, TrainingConfig, cpu_backend};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = ModelConfig::parse(
//!     r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
//!         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}"#,
//! )?;
//! let batches = TokenBatch::new(&model);
//! let disk = tempfile::tempdir()?;
//!
//! // One micro-batch a step, of two sequences of eight tokens. The plan must fit 16 MiB, or `create` refuses.
//! let limits = BatchLimits { sequences: 2, length: 8, micro_batches: 1, cache_length: 0, cache_pages: 0 };
//! let config = EngineConfig {
//!     training: Some(TrainingConfig::default()),
//!     host_budget: 16 << 20,
//!     ..EngineConfig::new(DType::BF16, limits)
//! };
//! let mut engine = Engine::builder(config)
//!     .backend(cpu_backend(1, &IoConfig::default())?)
//!     .disks([disk.path()])
//!     .create(build(&model), &batches.blank(2, 8), &mut RandomSource::new(0))?;
//!
//! // Labels are the ids themselves; the model shifts them.
//! let (ids, labels) = ([5, 6, 7, 8, 5, 6, 7, 8], [5, 6, 7, 8, 5, 6, 7, 8]);
//! let row = Row { ids: &ids, labels: &labels };
//! let batch = batches.train(&[row, row], 2, 8)?;
//! let first = engine.train_step(&[batch.clone()], 1e-2)?;
//! let second = engine.train_step(&[batch], 1e-2)?;
//! assert_eq!(second.step, 2);
//! assert!(second.loss < first.loss);
//! # Ok(())
//! # }
//! ```
//!
//! After every step the state on disk is that of the step: [`EngineBuilder::resume`] continues from it with the same bits.
//! `examples/` shows networks of one's own and fine-tuning a model folder; `ARCHITECTURE.md` is the map of the code.
#![forbid(unsafe_code)]

/// A line on standard error, for all modules below. The standard library's panics where nobody can read it; a run goes on when its
/// terminal is gone or the log's disk is full.
macro_rules! eprintln {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        // There is no place to say that this failed.
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

/// The snippets of the page are compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/embedding.md")]
struct Embedding;

pub mod calibrate;
pub mod cli;
pub mod config;
pub mod data;
pub mod demo;
mod engine;
pub mod error;
pub mod floor;
pub mod generate;
pub mod interrupt;
pub mod metrics;
pub mod predict;
pub mod progress;
mod shape;
pub mod tensorboard;
pub mod warnings;

pub use engine::{THREADS_MAX, cpu_backend, cpu_backend_of, cuda_backend};
pub use terrace_aio as aio;
pub use terrace_aio::IoEngine;
pub use terrace_aio::engine::EngineConfig as IoConfig;
pub use terrace_device as device;
pub use terrace_device::Device;
pub use terrace_kernels as kernels;
pub use terrace_kernels::{
    DType, Epilogue, GateFunction, KernelSet, MatmulSpec, QuantFormat, QuantizedView, Residual, Tensor, View,
    ViewMut,
};
pub use terrace_models as models;
pub use terrace_optimizer as optimizer;
pub use terrace_optimizer::{AdamW, StateFormat};
pub use terrace_tiers as tiers;
pub use terrace_tiers::{MemoryPlan, Recovery, Tier};
pub use terrace_zero::{
    Accumulation, Backend, BatchLimits, BatchUse, Block, BlockPass, CACHE_PAGE, Context, Durability, Engine,
    EngineBuilder, EngineConfig, EngineError, Evaluation, Exporting, Gradients, GroupUpdate, HostTensor,
    KvCache, KvSlot, KvSpec, MicroBatch, Mode, Outlook, OutputSpec, ParamSpec, Placement, PlanningRuns,
    Result, Schedule, StepRates, StepReport, StepWork, StoredState, StoredWeights, Timeline, TrainingConfig,
    UpdateTime, Weight, WeightReader, WeightSource, WeightUse, Weights, WindowOverrides,
};
