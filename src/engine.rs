//! Backends that this build has, ready for [`Engine::builder`](crate::Engine::builder).

use crate::{Backend, EngineError, Result};
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_device::cuda::CudaDevice;
use terrace_device::host::HostDevice;
use terrace_kernels::cpu::{self, CpuConfig};
use terrace_kernels::cuda;
use terrace_kernels::update::UpdateKernels;
use terrace_optimizer::host_kernels;

/// Threads that compute at most: more than the processors of any machine this is for. Every one has a workspace, and far more would take
/// minutes to start.
pub const THREADS_MAX: usize = 1024;

/// Device memory that the kernels of a card keep.
pub(crate) const CUDA_SCRATCH_BYTES: u64 = (cuda::SCRATCH_BYTES + cuda::UPDATE_SCRATCH_BYTES) as u64;

/// The CPU as the device, its kernels on `threads` threads with the best instructions of this machine, and the disk engine that
/// `io` asks for.
///
/// # Errors
/// `threads` is zero or more than [`THREADS_MAX`], the system refuses to start them, or the disk engine cannot be started.
pub fn cpu_backend(threads: usize, io: &IoConfig) -> Result<Backend> {
    cpu_backend_of(CpuConfig::new(threads), io)
}

/// [`cpu_backend`] as configured.
///
/// # Errors
/// There are no threads or more than [`THREADS_MAX`], the system refuses to start them, or the disk engine cannot be started.
pub fn cpu_backend_of(config: CpuConfig, io: &IoConfig) -> Result<Backend> {
    let threads = config.threads;
    if !(1..=THREADS_MAX).contains(&threads) {
        let detail =
            format!("from 1 to {THREADS_MAX} threads compute, not {threads}: give other CpuConfig::threads");
        return Err(EngineError::Config(detail));
    }
    Ok(Backend {
        device: Arc::new(HostDevice::unified()),
        kernels: cpu::try_with_config(config).map_err(|error| {
            EngineError::Config(format!(
                "cannot start the {threads} threads that compute: {error}; give fewer CpuConfig::threads, or raise the limits of threads (ulimit -u, \
                 pids.max of a container) and of memory (ulimit -v)"
            ))
        })?,
        updates: None,
        kernel_scratch_bytes: cpu::scratch_bytes(threads) as u64,
        io: open_default(io)?,
    })
}

/// An NVIDIA card as the device, its kernels, compiled for it when they are not in the cache yet, and the disk engine that
/// `io` asks for.
///
/// # Errors
/// A kernel cannot be compiled or loaded, the card has no memory left for working memory, or the disk engine cannot be started.
pub fn cuda_backend(device: &Arc<CudaDevice>, io: &IoConfig) -> Result<Backend> {
    Ok(Backend {
        device: Arc::clone(device) as _,
        kernels: cuda::kernel_set(device, device.compute_stream())?,
        updates: Some(cuda::update_kernels(device, device.compute_stream())?),
        kernel_scratch_bytes: CUDA_SCRATCH_BYTES,
        io: open_default(io)?,
    })
}

/// The host's operations on training state, for a device that only plays one with memory of its own.
pub(crate) fn host_updates(threads: usize) -> Result<UpdateKernels> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|e| EngineError::Config(format!("cannot start {threads} threads: {e}")))?;
    Ok(host_kernels(Arc::new(pool)))
}
