//! Backends that this build has, ready for [`Engine::builder`](crate::Engine::builder).

use crate::{Backend, EngineError, Result};
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_device::host::HostDevice;
use terrace_kernels::cpu;

/// The CPU as the device, its kernels on `threads` threads with the best instructions of this machine, and the disk engine that
/// `io` asks for.
///
/// # Errors
/// `threads` is zero, or the disk engine cannot be started.
///
/// # Panics
/// If the system refuses to start the threads.
pub fn cpu_backend(threads: usize, io: &IoConfig) -> Result<Backend> {
    if threads == 0 {
        return Err(EngineError::Config("at least one thread computes: give --threads 1 or more".into()));
    }
    Ok(Backend {
        device: Arc::new(HostDevice::unified()),
        kernels: cpu::kernel_set(threads),
        kernel_scratch_bytes: cpu::scratch_bytes(threads) as u64,
        io: open_default(io)?,
    })
}
