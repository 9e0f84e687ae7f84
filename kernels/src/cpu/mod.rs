//! The CPU backend: blocked, vectorized, threaded.
//!
//! A fixed number of threads, of which the caller of an operation is one, belongs to a kernel set. Work is
//! divided over outputs, and every sum over rows or over an inner size is cut at places that depend on shapes alone, so
//! the bits of a result do not depend on the number of threads. They may differ between instruction sets (fused or
//! separate multiply and add, other lane counts), which the type [`Isa`] names.
//!
//! Loops over slices are plain Rust compiled once per instruction set (`multiversion!` in `isa`) and vectorized by
//! the compiler; only the innermost product and its packing (`gemm`) are written with intrinsics.
//!
//! Working memory is reserved when the set is made and never grows: [`scratch_bytes`] counts it.

#[macro_use]
mod isa;

mod attention;
mod attention_backward;
mod columns;
mod delta;
mod elementwise;
mod embedding;
mod epilogue;
mod experts;
mod floats;
mod gated;
mod gemm;
mod lanes;
mod loss;
mod matmul;
mod norm;
mod quantized;
mod reduce;
mod rope;
mod shorts;
mod sinks;
mod team;
mod thin;
mod threads;
mod vector;

pub use attention::HEAD_MAX;
pub use isa::Isa;

use crate::KernelSet;
use std::io;
use std::sync::Arc;
use threads::Threads;

/// How the CPU backend runs.
#[derive(Debug, Clone, Copy)]
pub struct CpuConfig {
    /// Threads that compute.
    pub threads: usize,
    /// Instruction set; `None`: the best this machine has.
    pub isa: Option<Isa>,
    /// Keep each thread, but for the callers', [on a core of its own](terrace_device::affinity::stay_on_core).
    pub pinned: bool,
}

impl CpuConfig {
    /// So many threads, wherever the system puts them, with the best instructions of this machine.
    pub fn new(threads: usize) -> Self {
        Self { threads, isa: None, pinned: false }
    }
}

/// A kernel set that computes on `threads` threads with the best instructions of this machine.
///
/// # Panics
/// If `threads` is zero or the system refuses to start them.
pub fn kernel_set(threads: usize) -> KernelSet {
    with_config(CpuConfig::new(threads))
}

/// A kernel set as configured.
///
/// # Panics
/// If the number of threads is zero or the system refuses to start them.
pub fn with_config(config: CpuConfig) -> KernelSet {
    try_with_config(config).unwrap_or_else(|error| panic!("{} threads that compute: {error}", config.threads))
}

/// As [`with_config`], where the system may refuse.
///
/// # Errors
/// The system refuses a thread or the memory that it works in.
///
/// # Panics
/// If the number of threads is zero.
pub fn try_with_config(config: CpuConfig) -> io::Result<KernelSet> {
    let cpu = Arc::new(Cpu { threads: Threads::new(config)? });
    Ok(KernelSet {
        matmul: cpu.clone(),
        quantized_matmul: cpu.clone(),
        rms_norm: cpu.clone(),
        rope: cpu.clone(),
        columns: cpu.clone(),
        attention: cpu.clone(),
        sinks: cpu.clone(),
        activation: cpu.clone(),
        embedding: cpu.clone(),
        cross_entropy: cpu.clone(),
        elementwise: cpu.clone(),
        reduce: cpu.clone(),
        experts: cpu.clone(),
        delta_rule: cpu,
    })
}

/// Bytes of memory that a set of `threads` threads may touch besides its operands: working memory and stacks.
/// A constant per thread plus a constant; no call needs more, whatever its shapes.
pub const fn scratch_bytes(threads: usize) -> usize {
    threads * (threads::SCRATCH_BYTES + threads::STACK_BYTES) + threads::SHARED_BYTES
}

#[derive(Debug)]
struct Cpu {
    threads: Threads,
}
