//! What can go wrong on a device.

/// A device that refused or failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The operating system or the driver has no memory left.
    #[error("cannot allocate {bytes} bytes of {what} memory: {detail}; lower the budget or free memory")]
    OutOfMemory {
        /// Which memory.
        what: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// What the allocator said.
        detail: String,
    },
    /// A sealed arena cannot serve a request: the plan was too small, which is a defect of the planner.
    #[error(
        "the arena of {capacity} bytes cannot serve {bytes} more ({used} in use, largest hole {largest_hole}); \
         this is a planning defect, please report it"
    )]
    ArenaExhausted {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes of the arena.
        capacity: usize,
        /// Largest free range.
        largest_hole: usize,
    },
    /// The driver reported an error.
    #[error("device error while {doing}: {detail}")]
    Driver {
        /// What was being done.
        doing: &'static str,
        /// What the driver said.
        detail: String,
    },
}
