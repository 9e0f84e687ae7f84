//! Compute kernels: one small trait per operation, one [`KernelSet`] per backend.
//!
//! Operations take [`View`]s and [`ViewMut`]s of tensors in device memory and write their results to tensors;
//! nothing is returned to the host but where experts' rows begin ([`Experts::starts`]), so that a backend may run all else
//! asynchronously on its compute stream.
//! Backends: [`mod@reference`] (plain loops, f64 accumulation, the yardstick of every test), [`cpu`] (blocked and
//! threaded) and [`dry`] (does nothing but count FLOPs and bytes; planning runs on it). Operations on training state are
//! apart: [`update`].
//!
//! ```
//! use terrace_device::{Device, host::HostDevice};
//! use terrace_kernels::{DType, MatmulSpec, Tensor, cpu};
//!
//! let arena = HostDevice::unified().arena(1 << 20)?;
//! let x = Tensor::new(&arena, DType::BF16, &[4, 64])?;
//! let weight = Tensor::new(&arena, DType::BF16, &[32, 64])?;
//! let mut y = Tensor::new(&arena, DType::BF16, &[4, 32])?;
//! let kernels = cpu::kernel_set(2);
//! kernels.matmul.matmul(x.view(), weight.view(), y.view_mut(), MatmulSpec::NT)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod check;
pub mod cpu;
pub mod cuda;
pub mod dry;
mod ops;
mod packing;
pub mod quantized;
pub mod reference;
mod tensor;
pub mod update;

pub use ops::{
    Activation, Attention, AttentionSpec, Carried, Columns, CrossEntropy, DeltaRule, DeltaSpec, Elementwise,
    Embedding, Epilogue, ExpertGroups, Experts, GateFunction, Gating, GroupScore, KernelError, KernelSet,
    KeyValues, Matmul, MatmulSpec, Product, QuantizedMatmul, Reduce, Residual, Result, RmsNorm, Rope,
    RopeDirection, RopeLayout, RopePairs, Scores, Sinks, delta_scratch, one_by_one,
};
pub use packing::{Packed, Packing};
pub use quantized::{QuantFormat, QuantizedView};
pub use tensor::{DType, Shape, Tensor, View, ViewMut};
pub use terrace_device::{Bytes, BytesMut, memory_node};
