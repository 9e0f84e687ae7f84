//! From flags to backends and budgets, shared by the commands that run the engine.

use super::args::{self, DeviceName, DiskEngine, Dtype, Offload, PlacementArgs, WeightFormat};
use crate::engine::{CUDA_SCRATCH_BYTES, host_updates};
use crate::error::CliError;
use crate::{cpu_backend_of, cuda_backend};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_aio::engine::{EngineChoice, EngineConfig as IoConfig};
use terrace_aio::layer::{StatsLayer, TraceLayer};
use terrace_aio::memory::HostMemory;
use terrace_aio::profile::DiskProfile;
use terrace_device::DeviceError;
use terrace_device::cuda::CudaDevice;
use terrace_device::host::HostDevice;
use terrace_kernels::cpu::CpuConfig;
use terrace_kernels::{DType, QuantFormat};
use terrace_tiers::{
    ByteSize, MemoryPlan, Tier, allocated_bytes, existing_dir, free_space, same_file_system,
};
use terrace_zero::{
    Accumulation, Backend, Block, Engine, EngineConfig, EngineError, MicroBatch, Placement, PlanningRuns,
    Timeline,
};

/// Disk operations that `--trace` remembers at most, and as many spans of the engine; later ones replace the earliest. With their names they
/// take some 200 MB each at the end of a run.
const TRACE_EVENTS: usize = 1 << 19;
/// The part of free memory that default budgets leave alone: an eighth, and at least this much.
const RESERVE_BYTES_MIN: u64 = 512 << 20;

/// The backends of a run and the layers that watch its disk.
pub struct Session {
    /// What the engine runs on.
    pub backend: Backend,
    /// Counts disk operations.
    pub stats: Arc<StatsLayer>,
    /// Remembers disk operations, if asked to.
    pub trace: Option<Arc<TraceLayer>>,
    /// Remembers what the engine does, if asked to.
    pub timeline: Option<Arc<Timeline>>,
    /// Threads that compute.
    pub threads: usize,
    /// The settings of the disk engine.
    pub io_config: IoConfig,
    /// Bytes of the card's memory that a plan may use: those that are free, and those that the backend holds for what every plan has.
    /// `None` on the CPU.
    device_free: Option<u64>,
}

impl Session {
    /// Opens the backends.
    ///
    /// # Errors
    /// A GPU was asked for, or the disk engine cannot start.
    pub fn open(
        placement: &PlacementArgs,
        aio: &IoConfig,
        threads: Option<NonZeroUsize>,
        trace: bool,
    ) -> Result<Self, CliError> {
        let threads = compute_threads(threads);
        let choice = match placement.engine {
            DiskEngine::Auto => aio.choice,
            DiskEngine::Uring => EngineChoice::Uring,
            DiskEngine::Threads => EngineChoice::Threads,
        };
        let io_config = IoConfig { choice, ..aio.clone() };
        let cpu = CpuConfig { pinned: placement.pin_threads, ..CpuConfig::new(threads) };
        let (mut backend, device_free) = open_backend(placement.device, cpu, &io_config)?;
        let stats = Arc::new(StatsLayer::new(Arc::clone(&backend.io)));
        let mut io: Arc<dyn IoEngine> = Arc::clone(&stats) as _;
        let timeline = trace.then(|| Arc::new(Timeline::new(TRACE_EVENTS)));
        let trace = trace.then(|| Arc::new(TraceLayer::new(Arc::clone(&io), TRACE_EVENTS)));
        if let Some(trace) = &trace {
            io = Arc::clone(trace) as _;
        }
        backend.io = io;
        if placement.discrete {
            backend.device = Arc::new(HostDevice::discrete());
            backend.updates = Some(host_updates(threads)?);
        }
        Ok(Self { backend, stats, trace, timeline, threads, io_config, device_free })
    }

    /// Whether kernels run on a card.
    pub fn on_card(&self) -> bool {
        self.device_free.is_some()
    }

    /// Says if copies of the engine that was just made will be slow.
    pub fn warn_of_slow_copies(&self) {
        let bytes = self.backend.device.unpinned_bytes();
        if bytes > 0 {
            eprintln!(
                "warning: the driver could not pin {} of host memory, so copies from and to it are slower; lower --host-memory, or \
                 raise the limit of locked memory (ulimit -l)",
                ByteSize(bytes)
            );
        }
    }

    /// Warns if the plan of an engine that is about to be made takes more host memory than this process may.
    pub fn warn_of_host_memory(
        &self,
        config: &EngineConfig,
        blocks: impl FnOnce() -> Vec<Box<dyn Block>>,
        sample: &MicroBatch,
    ) {
        let memory = HostMemory::now();
        // No plan takes more than its budget.
        if memory.available.is_none_or(|available| config.host_budget <= available) {
            return;
        }
        let runs = PlanningRuns::default();
        // What does not fit is refused when the engine is made.
        let Ok(outlook) = Engine::outlook(config.clone(), &self.backend, blocks(), sample, &runs) else {
            return;
        };
        if let Some(warning) = more_than_there_is(outlook.memory.total(Tier::Host), memory) {
            eprintln!("warning: {warning}");
        }
    }

    /// Name and free memory of the card, if there is one.
    pub fn card(&self) -> Option<(String, u64)> {
        self.device_free.map(|free| (self.backend.device.name().to_owned(), free))
    }

    /// Bytes of device memory the plan may use: the flag, or what is free less a reserve.
    pub fn device_budget(&self, placement: &PlacementArgs) -> u64 {
        let free = || self.device_free.map(|free| free.saturating_sub((free / 20).max(RESERVE_BYTES_MIN)));
        placement.device_memory.map_or_else(|| free().unwrap_or(u64::MAX), |size| size.0)
    }
}

/// The backend that `--device` names, and the free bytes of the card if it is one.
fn open_backend(
    device: DeviceName,
    cpu: CpuConfig,
    io: &IoConfig,
) -> Result<(Backend, Option<u64>), CliError> {
    let on_card = |ordinal: u32| -> Result<(Backend, Option<u64>), EngineError> {
        let card = CudaDevice::open(ordinal)?;
        let backend = cuda_backend(&card, io)?;
        card.take_warnings().iter().for_each(|warning| eprintln!("warning: {warning}"));
        // What loaded kernels and cuBLASLt took is in no plan; what the backend works in is.
        let (free, _) = card.memory()?;
        Ok((backend, Some(free as u64 + CUDA_SCRATCH_BYTES)))
    };
    let refused = |error: EngineError| {
        let message = format!("--device {device}: {error}");
        match error {
            EngineError::Device(
                DeviceError::NoDriver { .. }
                | DeviceError::UnusableDriver { .. }
                | DeviceError::NoSuchDevice { .. }
                | DeviceError::Unsupported { .. },
            ) => CliError::Usage(message),
            _ => CliError::Failed(message),
        }
    };
    match device {
        DeviceName::Cuda(ordinal) => return on_card(ordinal).map_err(refused),
        DeviceName::Auto => match on_card(0) {
            Ok(backend) => return Ok(backend),
            Err(EngineError::Device(DeviceError::NoDriver { .. } | DeviceError::NoSuchDevice { .. })) => {}
            Err(EngineError::Device(error)) => {
                eprintln!(
                    "warning: computing on the CPU, because the card cannot be used: {}",
                    CliError::failed(error)
                );
            }
            Err(error) => return Err(error.into()),
        },
        DeviceName::Cpu => {}
    }
    Ok((cpu_backend_of(cpu, io)?, None))
}

/// The measurements of disks in the profile that `--profile` names, else in the one of this machine.
///
/// # Errors
/// There is no such file, or it is no profile.
pub fn disk_profile(
    placement: &PlacementArgs,
    threads: Option<NonZeroUsize>,
) -> Result<Option<DiskProfile>, CliError> {
    let found = super::floor::profile(placement.profile.as_ref(), compute_threads(threads), &placement.disk)?;
    Ok(found.and_then(|profile| profile.disk))
}

/// Threads that compute: those asked for, else one per core.
pub fn compute_threads(threads: Option<NonZeroUsize>) -> usize {
    threads.or_else(|| std::thread::available_parallelism().ok()).map_or(1, NonZeroUsize::get)
}

/// The path of a directory, which may not exist yet, as a profile has it: as it was named, else without links.
pub fn whole(dir: &Path, disk: Option<&DiskProfile>) -> PathBuf {
    let named = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    if disk.is_some_and(|disk| disk.path_of(&named).is_some()) {
        return named;
    }
    let existing = existing_dir(&named);
    match (existing.canonicalize(), named.strip_prefix(&existing)) {
        (Ok(real), Ok(rest)) if !rest.as_os_str().is_empty() => real.join(rest),
        (Ok(real), _) => real,
        (Err(_), _) => named,
    }
}

/// Settings of the disk engine: those of the profile, else the defaults.
pub fn io_config(profile: Option<&DiskProfile>) -> IoConfig {
    profile.map_or_else(IoConfig::default, DiskProfile::engine_config)
}

/// How much each of several directories takes, by their measured rates. `None` for equal parts: without a profile, with one
/// directory, or, with a warning, if some directory was not measured.
pub fn disk_weights(profile: Option<&DiskProfile>, dirs: &[PathBuf]) -> Option<Vec<f64>> {
    let profile = profile.filter(|_| dirs.len() > 1)?;
    let whole: Vec<PathBuf> = dirs.iter().map(|dir| whole(dir, Some(profile))).collect();
    let weights = profile.weights(&whole);
    if weights.is_none() {
        let missing = whole.iter().filter(|dir| profile.rate_of(dir).is_none());
        let missing: Vec<_> = missing.map(|dir| dir.display().to_string()).collect();
        eprintln!(
            "warning: the profile has no measurement of {}; every disk takes the same part (measure all of them with `aio-bench \
             tune`)",
            missing.join(", ")
        );
    }
    weights
}

/// Bytes of host memory the plan may use: the flag, or what is free less a reserve.
pub fn host_budget(placement: &PlacementArgs) -> u64 {
    placement.host_memory.map_or_else(
        || {
            let free = HostMemory::now().available.unwrap_or(4 << 30);
            free.saturating_sub((free / 8).max(RESERVE_BYTES_MIN))
        },
        |size| size.0,
    )
}

/// Warns if a plan takes more host memory than there is on this machine.
pub fn warn_of_plan(plan: &MemoryPlan) {
    if let Some(warning) = more_than_there_is(plan.total(Tier::Host), HostMemory::now()) {
        eprintln!("warning: for a run on this machine: {warning}");
    }
}

/// What to say of a plan that takes more host memory than this process may. The system gives it all the same, and ends the process without a
/// word when it is used.
pub fn more_than_there_is(planned: u64, memory: HostMemory) -> Option<String> {
    let available = memory.available.filter(|available| planned > *available)?;
    let of = match (memory.limit, memory.total) {
        (Some(limit), _) => format!(" of the {} that are this container's limit", ByteSize(limit)),
        (None, Some(total)) => format!(" of the {} that this machine has", ByteSize(total)),
        (None, None) => String::new(),
    };
    Some(format!(
        "{} of host memory are planned and {} are available{of}; without enough swap the run may be killed: lower --host-memory",
        ByteSize(planned),
        ByteSize(available)
    ))
}

/// The engine's element type.
pub fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::Bf16 => DType::BF16,
        Dtype::Fp16 => DType::F16,
        Dtype::Fp32 => DType::F32,
    }
}

/// How the weights of linear layers are stored; `None` for the engine's element type.
pub fn quant_format(weights: WeightFormat) -> Option<QuantFormat> {
    match weights {
        WeightFormat::Bf16 => None,
        WeightFormat::Int8 => Some(QuantFormat::Int8),
        WeightFormat::Int4 => Some(QuantFormat::Int4),
        WeightFormat::Mxfp4 => Some(QuantFormat::Mxfp4),
    }
}

/// The engine's placement.
pub fn placement(offload: Offload) -> Placement {
    match offload {
        Offload::None => Placement::None,
        Offload::Host => Placement::Host,
        Offload::Disk => Placement::Disk,
    }
}

/// Where the engine keeps the key/value cache.
pub fn kv_tier(tier: args::KvTier) -> Tier {
    match tier {
        args::KvTier::Device => Tier::Device,
        args::KvTier::Host => Tier::Host,
        args::KvTier::Disk => Tier::Disk,
    }
}

/// The engine's order of micro-batches.
pub fn accumulation(accumulation: args::Accumulation) -> Accumulation {
    match accumulation {
        args::Accumulation::Vertical => Accumulation::Vertical,
        args::Accumulation::Horizontal => Accumulation::Horizontal,
    }
}

/// The number of blocks that keep in memory, where it is not left to the plan.
pub fn kept_blocks(activations: args::Activations) -> Option<usize> {
    match activations {
        args::Activations::Auto | args::Activations::Host | args::Activations::Disk => None,
        args::Activations::Keep => Some(usize::MAX),
        args::Activations::Recompute => Some(0),
    }
}

/// Most blocks that keep in the host's memory and on disk, before it is known what pays.
pub fn keep_elsewhere(activations: args::Activations) -> (usize, usize) {
    match activations {
        args::Activations::Disk => (usize::MAX, usize::MAX),
        args::Activations::Host => (usize::MAX, 0),
        args::Activations::Auto | args::Activations::Keep | args::Activations::Recompute => (0, 0),
    }
}

/// Refuses activations in a tier where they cannot be.
///
/// # Errors
/// They cannot.
pub fn check_activations(
    activations: args::Activations,
    offload: Offload,
    unified: bool,
) -> Result<(), CliError> {
    let instead = "or choose --activations auto, keep or recompute";
    let refused = |what: &str| Err(CliError::Usage(format!("--activations {what}, {instead}")));
    match activations {
        args::Activations::Disk if offload != Offload::Disk => {
            refused("disk needs the state on disk, too: add --offload disk")
        }
        args::Activations::Host if unified => {
            refused("host is for a card, whose memory is not the host's: give it one")
        }
        args::Activations::Host if offload == Offload::None => {
            refused("host needs more than the card: add --offload host or disk")
        }
        _ => Ok(()),
    }
}

/// Bytes that the directories of state have room for, by the parts that they take, state that is there already included; `None` where that
/// cannot be seen.
pub fn disk_room(config: &EngineConfig) -> Option<u64> {
    let dirs: Vec<PathBuf> = config.disks.iter().map(|dir| existing_dir(dir)).collect();
    let weights = config.disk_weights.clone().unwrap_or_else(|| vec![1.0; dirs.len()]);
    let whole: f64 = weights.iter().sum();
    let mut room = f64::INFINITY;
    for dir in &dirs {
        let sharing = dirs.iter().zip(&weights).filter(|(other, _)| same_file_system(other, dir));
        let part = sharing.map(|(_, weight)| weight).sum::<f64>() / whole;
        // What is not counted may be any number.
        let free = free_space(dir).ok()?.map_or(f64::INFINITY, |free| free as f64);
        room = room.min(free / part);
    }
    let there: u64 = config.disks.iter().map(|dir| allocated_bytes(dir)).sum();
    room.is_finite().then_some(room as u64 + there)
}

/// The plan in words, for the start of a run.
pub fn describe_plan(plan: &MemoryPlan) -> String {
    let mut text = String::new();
    for (tier, name) in [(Tier::Device, "device"), (Tier::Host, "host memory"), (Tier::Disk, "disk")] {
        let total = plan.total(tier);
        if total > 0 {
            text += &format!("{name}: {} planned\n{}", ByteSize(total), plan.breakdown(tier));
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_planned_beyond_what_there_is_is_said() {
        const GIB: u64 = 1 << 30;
        let of = |limit| HostMemory { total: Some(8 * GIB), available: Some(2 * GIB), limit };
        assert_eq!(more_than_there_is(2 * GIB, of(None)), None);
        assert_eq!(more_than_there_is(9 * GIB, HostMemory::default()), None, "nothing is known");
        let said = |limit| more_than_there_is(3 * GIB, of(limit)).unwrap();
        let machine = "3.00 GiB of host memory are planned and 2.00 GiB are available of the 8.00 GiB that this machine has; ";
        assert!(said(None).starts_with(machine), "{}", said(None));
        assert!(said(Some(4 * GIB)).contains(" of the 4.00 GiB that are this container's limit; "));
    }
}
