//! What can go wrong in the engine.

use crate::checkpoint::differences;

/// A failure of the engine, with what it was doing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A configuration that cannot work; the message says which knob to turn.
    #[error("{0}")]
    Config(String),
    /// State that another run made.
    #[error(
        "the state on disk was made by another run: {}. Resume with the original settings, or choose another directory",
        differences(stored, given)
    )]
    AnotherRun {
        /// The identity of the run that made it.
        stored: String,
        /// The identity of the run that would resume it.
        given: String,
    },
    /// Micro-batches that a step cannot be made of; nothing was changed.
    #[error("{0}")]
    Batch(String),
    /// A model that the blocks do not fit: a missing or misshapen tensor, an unsupported option.
    #[error("{0}")]
    Model(String),
    /// The loss or the gradient is not finite.
    #[error("{0}")]
    Diverged(String),
    /// A kernel failed.
    #[error(transparent)]
    Kernel(#[from] terrace_kernels::KernelError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] terrace_device::DeviceError),
    /// The disk failed.
    #[error(transparent)]
    Io(#[from] terrace_aio::IoError),
    /// A tier failed: a plan that does not fit, damaged or missing state.
    #[error(transparent)]
    Tier(#[from] terrace_tiers::TierError),
    /// A step or a save failed while it overwrote state that is [kept once](crate::Durability::None): there is no step to go back to.
    #[error("{cause}; {lost}")]
    Lost {
        /// What failed.
        cause: Box<EngineError>,
        /// Which state, and what to do.
        lost: terrace_tiers::TierError,
    },
    /// The optimizer refused.
    #[error(transparent)]
    Optimizer(#[from] terrace_optimizer::OptimizerError),
    /// A file outside the engine's own state could not be read or written.
    #[error("{doing} {}: {source}{}", path.display(), file_advice(source))]
    File {
        /// The verb: "reading", "writing".
        doing: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The run was interrupted by the user after the last step was committed.
    #[error("interrupted")]
    Interrupted,
}

/// Result of an engine operation.
pub type Result<T = (), E = EngineError> = std::result::Result<T, E>;

/// What to do about a file that could not be written, to follow the message; empty unless the system has said enough.
#[doc(hidden)]
pub fn file_advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free space there or choose another folder",
        ErrorKind::PermissionDenied => "; check the owner and the permissions",
        ErrorKind::ReadOnlyFilesystem => "; the file system is mounted read-only: choose another folder",
        _ => "",
    }
}
