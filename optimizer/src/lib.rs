//! Optimizer updates on borrowed slices.
//!
//! This crate turns a gradient and the bytes of a chunk's training state into the bytes of the next step. It never
//! sees a disk, a tier or a device: the engine reads a chunk, calls [`Optimizer::update`] on it and writes it back.
//! It is useful alone for the same reason. State that lies in device memory is updated by a kernel that it is handed.
//!
//! - [`AdamW`] with the semantics of `torch.optim.AdamW`, over the formats of [`StateFormat`];
//! - [`Algorithm`] and [`optimizer`]: AdamW and, with the same guarantees, [`Adam`], [`Adagrad`], [`Lion`] and [`Sgd`];
//! - [`update_threaded`] and, for many runs at once, [`update_parts`], the same bits on many threads, and [`Isa`], the same bits on every instruction set;
//! - [`DeviceOptimizer`], the same bits by a kernel on state in device memory, and [`host_kernels`], the host in its place;
//! - [`SumOfSquares`] and [`clip_coefficient`]: the global gradient norm, with bits that do not depend on the cut;
//! - [`LossScaler`]: the static or dynamic loss scale of fp16 training, step for step as in DeepSpeed;
//! - [`Schedule`]: learning rates as transformers and DeepSpeed define them;
//! - [`ParamGroups`]: learning rates and weight decay by parameter name.
//!
//! # Example
//!
//! ```
//! use terrace_optimizer::{AdamW, Gradient, StateFormat, StateLayout, WeightType, adamw};
//!
//! let layout = StateLayout::new(StateFormat::Fp32, WeightType::F32)?;
//! let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
//! let optimizer = adamw(config, layout);
//!
//! // One slice of bytes for the weight and one for each moment; `f32` storage gives the alignment.
//! let (mut weight, mut m, mut v) = ([0.0f32; 3], [0.0f32; 3], [0.0f32; 3]);
//! {
//!     let mut state = [&mut weight, &mut m, &mut v].map(|kind| bytemuck::cast_slice_mut(kind));
//!     optimizer.initialize(&[1.0, 2.0, 3.0], &mut state)?;
//!     let gradient = [0.5f32, -0.5, 0.0];
//!     optimizer.update(&config.step(1, 0.1), Gradient::F32(&gradient), &mut state)?;
//! }
//! // The first step of Adam moves every parameter by the learning rate, against the gradient's sign.
//! assert!((weight[0] - 0.9).abs() < 1e-6 && (weight[1] - 2.1).abs() < 1e-6);
//! assert_eq!(weight[2], 3.0);
//! # Ok::<(), terrace_optimizer::OptimizerError>(())
//! ```

#![forbid(unsafe_code)]

mod algorithm;
mod device;
mod error;
mod groups;
mod isa;
mod layout;
mod loss_scale;
mod nodes;
mod norm;
mod ranges;
mod schedule;
pub mod split;
mod store;
mod update;

pub use algorithm::{Adagrad, Adam, AdamW, Algorithm, Lion, Sgd, adamw, adamw_on, optimizer, optimizer_on};
pub use device::{DeviceOptimizer, host_kernels};
pub use error::{OptimizerError, Result};
pub use groups::{GroupLr, GroupRule, ParamGroups, ResolvedGroup};
pub use isa::Isa;
pub use layout::{COMPACT_BLOCK, KindLayout, Moments, StateFormat, StateKind, StateLayout, WeightType};
pub use loss_scale::{LossScaleConfig, LossScaler, LossScalerState};
pub use norm::{NORM_BLOCK, SumOfSquares, clip_coefficient};
pub use schedule::{MomentumCycle, OneCycle, Schedule, ScheduleKind, Warmup};
pub use update::{Gradient, Optimizer, Part, StepArgs, THREAD_CHUNK, update_parts, update_threaded};
