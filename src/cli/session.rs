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
use terrace_aio::profile::DiskProfile;
use terrace_device::DeviceError;
use terrace_device::cuda::CudaDevice;
use terrace_device::host::HostDevice;
use terrace_kernels::cpu::CpuConfig;
use terrace_kernels::{DType, QuantFormat};
use terrace_tiers::{MemoryPlan, Tier, existing_dir};
use terrace_zero::{Accumulation, Backend, EngineError, Placement, Timeline};

/// Disk operations that `--trace` remembers at most; later ones replace the earliest.
const TRACE_EVENTS: usize = 1 << 20;
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
                terrace_tiers::ByteSize(bytes)
            );
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
                eprintln!("warning: computing on the CPU, because the card cannot be used: {error}");
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
            let free = free_memory(&|path| std::fs::read_to_string(path).ok()).unwrap_or(4 << 30);
            free.saturating_sub((free / 8).max(RESERVE_BYTES_MIN))
        },
        |size| size.0,
    )
}

/// Bytes of memory that this process may still take: what the machine has available, and what the limits of its control groups leave. `read`
/// gives the text of a file of the kernel's.
fn free_memory(read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
    let available = kilobytes(&read("/proc/meminfo")?, "MemAvailable")?;
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let left = groups.lines().flat_map(|line| {
        // `number:controllers:path`; version 2 has no number and names no controllers.
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let second = controllers.is_empty();
        let memory = second || controllers.split(',').any(|name| name == "memory");
        // In a container the path may be the host's, and what is mounted the container's own group.
        let groups = memory.then(|| Path::new(path.trim_start_matches('/')).ancestors());
        groups.into_iter().flatten().filter_map(move |group| left_in_group(read, second, group))
    });
    left.chain([available]).min()
}

/// What the limit of a control group leaves, if it has one. What is charged for files that can be dropped counts as free.
fn left_in_group(read: &dyn Fn(&str) -> Option<String>, second: bool, group: &Path) -> Option<u64> {
    let (root, limit, used, files) = if second {
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ")
    } else {
        let root = "/sys/fs/cgroup/memory";
        (root, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    };
    let text = |name: &str| read(Path::new(root).join(group).join(name).to_str()?);
    let number = |text: &str| text.trim().parse::<u64>().ok();
    // Without a limit the file says "max", or, in version 1, a number near 2⁶³.
    let (limit, used) = (number(&text(limit)?)?, number(&text(used)?)?);
    let stat = text("memory.stat").unwrap_or_default();
    let droppable = stat.lines().find_map(|line| number(line.strip_prefix(files)?)).unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

/// The largest resident size of this process so far, in bytes.
pub fn peak_resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kilobytes(&text, "VmHWM").unwrap_or(0)
}

/// A size that a text of the kernel's has under a name, in bytes.
pub(super) fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
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

/// The number of blocks that keep, where it is not left to the plan.
pub fn kept_blocks(activations: args::Activations) -> Option<usize> {
    match activations {
        args::Activations::Auto => None,
        args::Activations::Keep => Some(usize::MAX),
        args::Activations::Recompute => Some(0),
    }
}

/// The plan in words, for the start of a run.
pub fn describe_plan(plan: &MemoryPlan) -> String {
    let mut text = String::new();
    for (tier, name) in [(Tier::Device, "device"), (Tier::Host, "host memory"), (Tier::Disk, "disk")] {
        let total = plan.total(tier);
        if total > 0 {
            text += &format!("{name}: {} planned\n{}", terrace_tiers::ByteSize(total), plan.breakdown(tier));
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_sizes_in_kilobytes() {
        assert_eq!(kilobytes("MemTotal: 10 kB\nMemAvailable:    4 kB\n", "MemAvailable"), Some(4096));
        assert_eq!(kilobytes("MemTotal: 10 kB\n", "MemFree"), None);
        assert!(peak_resident_bytes() > 0);
    }

    /// In a container the machine's memory is not what a process may take.
    #[test]
    fn limits_of_control_groups_count() {
        const GIB: u64 = 1 << 30;
        let machine = ("/proc/meminfo", format!("MemAvailable: {} kB\n", 400 << 20));
        let free = |files: &[(&str, String)]| {
            let files: Vec<_> = files.iter().chain([&machine]).collect();
            free_memory(&|path| files.iter().find(|file| file.0 == path).map(|file| file.1.clone()))
        };
        assert_eq!(free(&[]), Some(400 * GIB));
        let own = |path: &str| ("/proc/self/cgroup", format!("0::{path}\n"));
        let container = |limit: &str| {
            let (max, current) = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
            let stat = format!("anon 5\nactive_file 1\ninactive_file {GIB}\n");
            let used = ((2 * GIB).to_string(), ("/sys/fs/cgroup/memory.stat", stat));
            vec![own("/a/b"), (max, limit.into()), (current, used.0), used.1]
        };
        assert_eq!(free(&container(&format!("{}\n", 8 * GIB))), Some(7 * GIB), "one of two is files");
        assert_eq!(free(&container("max\n")), Some(400 * GIB));
        assert_eq!(free(&container("1000\n")), Some(0), "used up");
        let slice = [
            own("/system.slice/run.service"),
            ("/sys/fs/cgroup/system.slice/memory.max", format!("{}", 3 * GIB)),
            ("/sys/fs/cgroup/system.slice/memory.current", format!("{GIB}")),
        ];
        assert_eq!(free(&slice), Some(2 * GIB), "of a group above");
        let first = [
            ("/proc/self/cgroup", "5:cpu:/\n4:memory:/x\n".into()),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", format!("{}", 6 * GIB)),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", format!("{}", 5 * GIB)),
            ("/sys/fs/cgroup/memory/memory.stat", format!("inactive_file 1\ntotal_inactive_file {GIB}\n")),
        ];
        assert_eq!(free(&first), Some(2 * GIB));
    }
}
