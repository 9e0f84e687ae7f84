//! The settings real engines share, and the choice among them.

#[cfg(feature = "tokio_uring")]
use super::TokioUringEngine;
use super::{IoEngine, ThreadsEngine, UringEngine};
use crate::IoError;
use std::sync::Arc;

/// The most bytes Linux moves in one read or write (`MAX_RW_COUNT`).
pub const TRANSFER_BYTES_MAX: usize = 0x7fff_f000;

/// Bytes of one operation at most, whatever the configuration asks for.
pub const BLOCK_BYTES_MAX: usize = 1 << 30;

/// Operations in flight at most, whatever the configuration asks for.
pub const QUEUE_DEPTH_MAX: usize = 4096;

/// Requests of an urgency accepted and not finished at most, whatever the configuration asks for.
pub const REQUESTS_MAX: usize = 1 << 16;

/// Rings at most, whatever the configuration asks for.
pub const RINGS_MAX: usize = 64;

/// Which engine [`open_default`] opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// io_uring where the system allows it, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// A pool of threads that call `pread` and `pwrite`.
    Threads,
    /// io_uring through the tokio-uring crate or an error.
    #[cfg(feature = "tokio_uring")]
    TokioUring,
}

/// Settings of the engines that do real I/O.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Which engine to open.
    pub choice: EngineChoice,
    /// Requests are split into operations of at most this many bytes.
    pub block_bytes: usize,
    /// Operations in flight at once on each device, per ring (io_uring).
    pub queue_depth: usize,
    /// Requests of an [`Urgency`](crate::Urgency) that are accepted and not finished at once; [`submit`](super::IoEngine::submit) waits
    /// beyond that.
    pub requests_max: usize,
    /// Rings, each with a thread of its own (io_uring). One is enough for large blocks.
    pub rings: usize,
    /// Threads of the `threads` engine.
    pub threads: usize,
    /// Whether memory and files are registered with the kernel where it allows that (io_uring).
    pub register: bool,
    /// A kernel thread polls for submissions (`IORING_SETUP_SQPOLL`): no system calls, at the price of a busy core.
    pub sq_poll: bool,
    /// Completions are polled for (`IORING_SETUP_IOPOLL`), on drives with poll queues; used only after a real read has
    /// shown that it works.
    pub io_poll: bool,
    /// Whether files are opened for direct I/O where the file system can. Without it everything goes through the page
    /// cache.
    pub direct: bool,
    /// Bytes one system call may transfer. Tests lower it to force resubmission.
    pub transfer_bytes_max: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            choice: EngineChoice::Auto,
            block_bytes: 1 << 20,
            queue_depth: 32,
            requests_max: 1024,
            rings: 1,
            threads: 4,
            register: true,
            sq_poll: false,
            io_poll: false,
            direct: true,
            transfer_bytes_max: TRANSFER_BYTES_MAX,
        }
    }
}

impl EngineConfig {
    /// The same settings with every value inside its bounds.
    pub(crate) fn clamped(&self) -> Self {
        Self {
            choice: self.choice,
            direct: self.direct,
            block_bytes: self.block_bytes.clamp(1, BLOCK_BYTES_MAX),
            queue_depth: self.queue_depth.clamp(1, QUEUE_DEPTH_MAX),
            requests_max: self.requests_max.clamp(1, REQUESTS_MAX),
            rings: self.rings.clamp(1, RINGS_MAX),
            threads: self.threads.clamp(1, 256),
            register: self.register,
            sq_poll: self.sq_poll,
            io_poll: self.io_poll,
            transfer_bytes_max: self.transfer_bytes_max.clamp(1, TRANSFER_BYTES_MAX),
        }
    }
}

/// Opens the engine that `config` asks for; `Auto` falls back to threads, with a warning, where io_uring is forbidden.
///
/// # Errors
/// io_uring was asked for and is not available, or the engine's threads cannot be started.
pub fn open_default(config: &EngineConfig) -> Result<Arc<dyn IoEngine>, IoError> {
    match config.choice {
        EngineChoice::Uring => Ok(Arc::new(UringEngine::new(config)?)),
        EngineChoice::Threads => Ok(Arc::new(ThreadsEngine::new(config)?)),
        #[cfg(feature = "tokio_uring")]
        EngineChoice::TokioUring => Ok(Arc::new(TokioUringEngine::new(config)?)),
        EngineChoice::Auto => match UringEngine::new(config) {
            Ok(engine) => Ok(Arc::new(engine)),
            Err(error) => {
                let reason = error.detail;
                static WARNED: std::sync::Once = std::sync::Once::new();
                WARNED.call_once(|| {
                    tracing::warn!(%reason, "io_uring is not available: reading and writing with threads instead");
                });
                Ok(Arc::new(ThreadsEngine::new(config)?.in_place_of("io_uring", &reason)))
            }
        },
    }
}
