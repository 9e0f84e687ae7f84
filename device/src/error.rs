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
    /// There is no driver.
    #[error("no CUDA driver: {detail}; install NVIDIA's driver, or compute on the CPU with `HostDevice`")]
    NoDriver {
        /// Where it was looked for.
        detail: String,
    },
    /// There is a driver, but it does not start, or lacks what the backend calls.
    #[error("the CUDA driver cannot be used: {detail}; or compute on the CPU with `HostDevice`")]
    UnusableDriver {
        /// Which file, and what is wrong with it.
        detail: String,
    },
    /// The driver knows no device of this number.
    #[error(
        "there is no CUDA device {ordinal}: the driver shows {count} (CUDA_VISIBLE_DEVICES limits them); \
         `terrace report` lists them"
    )]
    NoSuchDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are, numbered from 0.
        count: u32,
    },
    /// The device lacks what the kernels need.
    #[error("{device} cannot be used: {detail}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it lacks.
        detail: String,
    },
    /// The driver reported an error.
    #[error("device error while {doing}: {detail}")]
    Driver {
        /// What was being done.
        doing: String,
        /// What the driver said.
        detail: String,
    },
    /// An operation on the device failed in a way that ends its context: everything on it is lost, every later call fails.
    #[error(
        "the device was lost while {doing}: {detail}. Nothing more can run on it in this process: start the command \
         again; the last committed step is safe"
    )]
    Lost {
        /// What was being done; the cause is often an earlier operation.
        doing: String,
        /// What the driver said.
        detail: String,
    },
    /// There is nothing to compile kernels with.
    #[error(
        "cannot compile the kernel source {source_name}: {detail}; install it with `pip install {package}` or \
         the CUDA toolkit, and put its folder on LD_LIBRARY_PATH if it is in none of these places; or take PTX along from a \
         machine that has it (`terrace report --ptx DIR`; TERRACE_PTX=DIR here)"
    )]
    NoCompiler {
        /// Name of the source.
        source_name: String,
        /// Where the compiler was looked for, or what is wrong with it.
        detail: String,
        /// The wheel with the newest compiler that works with the driver.
        package: &'static str,
    },
    /// A kernel source does not compile, or its image does not load.
    #[error("the kernel source {source_name} was refused ({detail}):\n{log}")]
    Compile {
        /// Name of the source.
        source_name: String,
        /// What the compiler's call returned.
        detail: String,
        /// What the compiler wrote.
        log: String,
    },
}
