//! The engine: the only place that decides *when* bytes move and blocks run.
//!
//! A network is a list of [`Block`]s. The engine groups their parameters, plans memory, keeps the state where the plan
//! says and drives every training, evaluation and generation step. A block never sees a tier: it gets borrowed
//! views of its weights, its input and its output.
#![forbid(unsafe_code)]

mod activations;
mod backend;
mod batch;
mod block;
mod builder;
mod cache;
mod carry;
mod checkpoint;
mod chosen;
mod config;
mod contents;
mod copies;
mod device_state;
mod device_weights;
mod dry;
mod engine;
mod error;
mod export;
mod failure;
mod fetch;
mod gradient_parts;
mod gradients;
mod infer;
mod kept;
mod kv;
mod lane;
mod network;
mod on_demand;
mod overlap;
mod pass;
mod plan;
mod quantize;
mod ranks;
mod rounds;
mod runs;
mod saving;
mod scale;
mod schedule;
mod source;
mod speculation;
mod state;
mod step;
mod stored;
mod timeline;
mod train;
mod turns;
mod update;
mod work;

use activations::Activations;
pub use backend::Backend;
pub use batch::{HostTensor, MicroBatch};
pub use block::{
    BatchUse, Begun, Block, CarrySlot, CarrySpec, Context, Gradients, KvSlot, KvSpec, Mode, OutputSpec,
    ParamSpec, Weight, Weights,
};
pub use builder::EngineBuilder;
#[doc(hidden)]
pub use checkpoint::identity_differences;
pub use config::{
    Accumulation, BatchLimits, CACHE_PAGE, DEVICE_BUDGET, Durability, EngineConfig, HOST_BUDGET, Placement,
    TrainingConfig, WindowOverrides,
};
pub use engine::{Engine, Outlook, StoredState};
#[doc(hidden)]
pub use error::file_advice;
pub use error::{EngineError, Result};
pub use export::Exporting;
pub use fetch::Residency;
pub use infer::Evaluation;
pub use kept::Kept;
pub use kv::KvCache;
pub use plan::{Content, GroupPlacement, Place, Placed, PlanningRuns};
pub use ranks::{Ranks, Traffic};
pub use schedule::{BlockPass, GroupUpdate, Schedule, UpdateTime, WeightUse};
pub use source::{EXPORT_BUFFER_BYTES, WeightReader, WeightSource};
pub use step::{StepRates, StepReport};
pub use stored::StoredWeights;
/// Durable directories and names in them, for what a [`WeightReader`] is written to.
pub use terrace_aio::{create_dir_durably, sync_dir};
pub use timeline::{Resource, Span, Timeline};
pub use work::StepWork;
