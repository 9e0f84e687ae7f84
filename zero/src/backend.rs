//! The backends an engine runs on, bundled.

use std::fmt;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_device::Device;
use terrace_kernels::KernelSet;
use terrace_kernels::update::UpdateKernels;

/// A device, its kernels and a disk engine.
#[derive(Clone)]
pub struct Backend {
    /// Where compute runs.
    pub device: Arc<dyn Device>,
    /// Its operations.
    pub kernels: KernelSet,
    /// Its operations on training state, on the device's compute stream or done when they return. Without them, and where device
    /// memory is host memory, the host updates all state.
    pub updates: Option<UpdateKernels>,
    /// Bytes of host memory that the operations keep for themselves; a term of the plan.
    pub kernel_scratch_bytes: u64,
    /// How bytes reach the disk.
    pub io: Arc<dyn IoEngine>,
}

impl fmt::Debug for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backend").field("device", &self.device).field("io", &self.io).finish_non_exhaustive()
    }
}
