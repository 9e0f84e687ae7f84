//! The CUDA backend: one `.cu` file per operation, compiled for the very card when the kernel set is made.
//!
//! The files say what each kernel computes, in which order and at what cost; `common.cuh` is put in front of all of them,
//! `mma.cuh` in front of those for tensor cores, which take bf16 and f16 operands of the commonest shapes.
//! This side checks operands as every backend does, chooses grids, and launches on one stream: operands are device
//! memory, nothing is waited for but the numbers of `Experts::starts`. Products go to cuBLASLt where it is found
//! ([`CudaConfig`]), else to the kernels of `matmul_mma.cu` and `matmul.cu`.
//!
//! Every result depends on operands and shapes alone, on one card and one version of the libraries. Working memory is
//! taken when the set is made and never grows: [`SCRATCH_BYTES`].
//!
//! The kernels were compiled for every generation from Ampere to Blackwell (`cargo xtask cuda-check`) and pass the
//! conformance suites emulated on a CPU (`kernels/shim`) and on an H200 (`benches/record`), where `quantized_mma.cu`, `rms_norm.cu` and
//! `gated.cu` in their present form, `columns.cu`, `rope.cu`'s layouts, `experts.cu`, `sinks.cu`, `delta.cu`, `delta_scan.cu`,
//! `cross_entropy.cu` in its present form, and of `elementwise.cu` `elementwise_affine`, `elementwise_multiply`, `elementwise_scale` and
//! `elementwise_cap`, and those of attention with a cap (`_capped`), have not run. No other card has run any.

mod attention;
mod columns;
mod cublaslt;
mod delta;
mod experts;
mod launch;
mod matmul;
mod operand;
mod pointwise;
mod rows;
mod sinks;
mod sources;
mod update;

pub use update::{UPDATE_SCRATCH_BYTES, update_kernels};

use crate::{DType, KernelError, KernelSet, Result, View};
use launch::{Arguments, OnCard};
use sources::{SOURCES, UPDATE_SOURCES};
use std::path::Path;
use std::sync::{Arc, Mutex};
use terrace_device::cuda::{Compiler, CudaDevice, CudaStream};
use terrace_device::{Bytes, Device, DeviceError, Region};

/// Device memory that a kernel set keeps besides its operands.
pub const SCRATCH_BYTES: usize = PARTIALS_AT + attention::PARTIAL_BYTES;

/// Where the partial results of attention begin in it.
const PARTIALS_AT: usize = cublaslt::WORKSPACE_BYTES + rows::LOSS_BYTES;

/// How the CUDA backend runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaConfig {
    /// Do not use cuBLASLt even where it is found.
    pub own_products: bool,
    /// Do not use the kernels for tensor cores (cuBLASLt is another matter): attention then rounds nothing but its results,
    /// where they round probabilities to the operands' dtype, too.
    pub plain_kernels: bool,
}

/// A kernel set that runs on `stream`, with cuBLASLt if it is found.
///
/// # Errors
/// As [`with_config`].
pub fn kernel_set(device: &Arc<CudaDevice>, stream: &Arc<CudaStream>) -> Result<KernelSet, DeviceError> {
    with_config(device, stream, CudaConfig::default())
}

/// A kernel set as configured.
///
/// # Errors
/// There is no compiler, a kernel does not compile or load, or the device has not [`SCRATCH_BYTES`] left.
pub fn with_config(
    device: &Arc<CudaDevice>,
    stream: &Arc<CudaStream>,
    config: CudaConfig,
) -> Result<KernelSet, DeviceError> {
    let card = OnCard::new(device, stream, &SOURCES)?;
    let scratch = device.arena(SCRATCH_BYTES)?.alloc(SCRATCH_BYTES)?;
    let products = if config.own_products { None } else { cublaslt::Products::new(device, stream)? };
    let cuda = Arc::new(Cuda {
        card,
        products,
        tensor_cores: !config.plain_kernels,
        scratch,
        losses: Mutex::default(),
        partials: Mutex::default(),
    });
    Ok(KernelSet {
        matmul: cuda.clone(),
        quantized_matmul: cuda.clone(),
        rms_norm: cuda.clone(),
        rope: cuda.clone(),
        columns: cuda.clone(),
        attention: cuda.clone(),
        sinks: cuda.clone(),
        activation: cuda.clone(),
        embedding: cuda.clone(),
        cross_entropy: cuda.clone(),
        elementwise: cuda.clone(),
        reduce: cuda.clone(),
        experts: cuda.clone(),
        delta_rule: cuda,
    })
}

/// Writes all kernels to `folder` as PTX, for machines without a compiler: [`Compiler::default_prebuilt`] is where they look. Needs
/// NVRTC, but no card. Gives the number of files.
///
/// # Errors
/// There is no compiler, a kernel does not compile, or a file cannot be written.
pub fn write_ptx(folder: &Path) -> Result<usize, DeviceError> {
    let sources = SOURCES.iter().chain(&UPDATE_SOURCES);
    sources.clone().try_for_each(|source| Compiler::write_prebuilt(&source.compiled(), folder))?;
    Ok(sources.count())
}

#[derive(Debug)]
struct Cuda {
    card: OnCard,
    products: Option<cublaslt::Products>,
    /// Whether to use the kernels for them where they fit.
    tensor_cores: bool,
    /// cuBLASLt's workspace, the losses of rows, then partial results of attention. One stream uses it, so that uses of it have an
    /// order.
    scratch: Region,
    /// Held from the launch that writes losses to the one that adds them.
    losses: Mutex<()>,
    /// The same for partial results of attention and the launch that merges them.
    partials: Mutex<()>,
}

impl Cuda {
    /// Launches a kernel of `threads` threads a block.
    fn launch(
        &self,
        op: &'static str,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        arguments: &mut Arguments,
    ) -> Result {
        // SAFETY: whoever builds the arguments does so by the kernel's parameters, from views whose memory the caller of
        // the operation keeps valid and ordered by the stream.
        let launched = unsafe { self.card.launch(kernel, grid, threads, shared_bytes, arguments) };
        launched.map_err(|error| failed(op, &error))
    }

    /// Whether kernels for tensor cores may take `operands` and write `results`: one dtype of 16 bits, and addresses from
    /// which 16 bytes can be moved at once. Like every case of cuBLASLt, this follows from the layout of a group's weights,
    /// not from where the group lies.
    fn fits_tensor_cores(&self, operands: &[View<'_>], results: &[View<'_>]) -> bool {
        let dtype = operands[0].dtype();
        self.tensor_cores
            && matches!(dtype, DType::BF16 | DType::F16)
            && operands.iter().all(|operand| operand.dtype() == dtype)
            && aligned(operands)
            && aligned(results)
    }

    /// A launch over elements or vectors of them, which strides over what the grid does not cover.
    fn launch_flat(
        &self,
        op: &'static str,
        kernel: &'static str,
        threads_wanted: usize,
        arguments: &mut Arguments,
    ) -> Result {
        let blocks = threads_wanted.div_ceil(THREADS as usize);
        self.launch(op, kernel, [self.blocks(blocks), 1, 1], THREADS, 0, arguments)
    }

    fn blocks(&self, wanted: usize) -> u32 {
        blocks(&self.card, wanted)
    }

    /// Empty arguments for operands that this set's kernels reach.
    fn arguments(&self) -> Arguments {
        Arguments::new(self.card.space())
    }

    fn losses(&self) -> Bytes<'_> {
        self.scratch.bytes().slice(cublaslt::WORKSPACE_BYTES, PARTIALS_AT)
    }

    fn partials(&self) -> Bytes<'_> {
        self.scratch.bytes().slice(PARTIALS_AT, SCRATCH_BYTES)
    }
}

/// Threads of a block where nothing else decides.
const THREADS: u32 = 256;

/// Elements that a thread moves at once.
const VECTOR: usize = 8;

/// As many blocks as there is work for, up to a few for every multiprocessor; kernels stride over the rest.
fn blocks(card: &OnCard, wanted: usize) -> u32 {
    let most = card.multiprocessors().max(1) * 16;
    u32::try_from(wanted).map_or(most, |wanted| wanted.clamp(1, most))
}

/// Threads of a block that works on a row: eight elements each, in whole warps.
fn row_threads(width: usize) -> u32 {
    let wanted = width.div_ceil(VECTOR).next_power_of_two().clamp(32, 1024);
    u32::try_from(wanted).expect("at most 1024")
}

/// Whether 16 bytes can be moved at once from where operands begin.
fn aligned(operands: &[View<'_>]) -> bool {
    let begins = |view: &View<'_>| view.bytes().address().as_ptr() as usize;
    operands.iter().all(|view| begins(view).is_multiple_of(16))
}

fn failed(op: &'static str, error: &DeviceError) -> KernelError {
    KernelError { op, detail: error.to_string() }
}

fn too_large(op: &'static str, what: &str, value: usize) -> KernelError {
    KernelError {
        op,
        detail: format!("{value} {what} are more than a launch can count; use smaller batches"),
    }
}
