//! `terrace report`: what this machine offers. Nothing is changed; GPU libraries that are found are loaded and asked.

use crate::calibrate::machine::cpu_name;
use crate::cli::flags::in_flags;
use crate::config::ByteSize;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use terrace_aio::memory::HostMemory;
use terrace_aio::signals::has_bit;
use terrace_device::cuda::{self, CAPABILITY_MIN, CardReport, LibraryReport};

/// What `terrace report` prints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Version of Terrace.
    pub version: &'static str,
    /// What it was built for: architecture, system, C library.
    pub target: String,
    /// Whether it was built with optimizations.
    pub optimized: bool,
    /// Release of the kernel.
    pub kernel: Option<String>,
    /// The processor's name.
    pub cpu: Option<String>,
    /// Threads that may run at once.
    pub cores: usize,
    /// Instruction sets that kernels use, and whether they are there.
    pub cpu_features: BTreeMap<&'static str, bool>,
    /// Memory of the machine.
    pub memory: Option<ByteSize>,
    /// Memory that can be had without swapping.
    pub memory_available: Option<ByteSize>,
    /// Limit of the container, if it is lower.
    pub memory_limit: Option<ByteSize>,
    /// Bytes that may be locked, `null` if there is no limit.
    pub memlock_limit: Memlock,
    /// Whether io_uring works, or why not.
    pub io_uring: IoUring,
    /// Version of the NVIDIA kernel driver, if it is loaded.
    pub nvidia_driver: Option<String>,
    /// The newest CUDA that the driver's library supports.
    pub cuda_driver: Option<String>,
    /// GPU libraries and where they are.
    pub gpu_libraries: BTreeMap<&'static str, GpuLibrary>,
    /// Cards, also those that are too old to be used.
    pub gpus: Vec<Gpu>,
    /// Why no card can be used, if there is none.
    pub gpu_problem: Option<String>,
}

/// A library that is loaded at run time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuLibrary {
    /// The file, if it was found.
    pub path: Option<PathBuf>,
    /// What it says its version is.
    pub version: Option<String>,
    /// Where it was looked for.
    pub looked_in: Vec<String>,
}

/// A card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// What `--device` calls it.
    pub device: String,
    /// Its name.
    pub name: String,
    /// Its generation, as `9.0`.
    pub compute_capability: String,
    /// Whether it is new enough.
    pub usable: bool,
    /// Its memory.
    pub memory: ByteSize,
    /// Its address on the bus.
    pub bus_id: String,
    /// The memory node of the host that it is attached to.
    pub numa_node: Option<u32>,
    /// Its link at its best, as `16 × 32.0 GT/s PCIe`.
    pub link: Option<String>,
}

/// How much memory may be locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memlock {
    /// The system does not say.
    Unknown,
    /// Any amount.
    Unlimited,
    /// This many bytes.
    Bytes(u64),
}

/// Whether io_uring works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct IoUring {
    /// It does.
    pub available: bool,
    /// Why not.
    pub reason: Option<String>,
}

impl Report {
    /// Looks around. `io_uring` tries to set up a ring and says why it cannot.
    pub fn collect(io_uring: impl FnOnce() -> Result<(), String>) -> Self {
        let memory = HostMemory::now();
        let io_uring = io_uring();
        let cuda = cuda::probe();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            target: target(),
            optimized: !cfg!(debug_assertions),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().into()),
            cpu: read("/proc/cpuinfo").and_then(|text| cpu_name(&text)),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_features: cpu_features(),
            memory: memory.total.map(ByteSize),
            memory_available: memory.available.map(ByteSize),
            memory_limit: memory.limit.map(ByteSize),
            memlock_limit: match read("/proc/self/status") {
                // Capabilities of a user namespace do not count.
                Some(status)
                    if may_lock_all(&status) && is_initial(read("/proc/self/uid_map").as_deref()) =>
                {
                    Memlock::Unlimited
                }
                _ => read("/proc/self/limits").map_or(Memlock::Unknown, |text| memlock(&text)),
            },
            io_uring: IoUring { available: io_uring.is_ok(), reason: io_uring.err() },
            nvidia_driver: read("/proc/driver/nvidia/version").and_then(|text| driver_version(&text)),
            cuda_driver: cuda.driver_version.map(|(major, minor)| format!("{major}.{minor}")),
            gpu_libraries: cuda.libraries.into_iter().map(|found| (found.name, library(found))).collect(),
            gpus: cuda.devices.iter().map(gpu).collect(),
            gpu_problem: cuda.problem.as_deref().map(in_flags),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = || "unknown".to_owned();
        let size = |size: Option<ByteSize>| size.map_or_else(unknown, |size| size.to_string());
        let mut line = |name: &str, value: &str| writeln!(f, "{name:<16} {value}");
        let build = if self.optimized { "" } else { ", without optimizations" };
        line("terrace", &format!("{} ({}{build})", self.version, self.target))?;
        line("kernel", self.kernel.as_deref().unwrap_or("unknown"))?;
        line("cpu", &format!("{}, {} threads", self.cpu.as_deref().unwrap_or("unknown"), self.cores))?;
        let with = |there: bool| {
            let names = self.cpu_features.iter().filter(|f| *f.1 == there).map(|f| *f.0);
            names.collect::<Vec<_>>().join(" ")
        };
        line("cpu features", &with(true))?;
        if !with(false).is_empty() {
            line("  absent", &with(false))?;
        }
        line("memory", &format!("{}, {} available", size(self.memory), size(self.memory_available)))?;
        if self.memory_limit.is_some() {
            line("memory limit", &format!("{} (this container)", size(self.memory_limit)))?;
        }
        line(
            "locked memory",
            &match self.memlock_limit {
                Memlock::Unknown => unknown(),
                Memlock::Unlimited => "no limit".into(),
                Memlock::Bytes(bytes) => {
                    format!("at most {} (ulimit -l); registered disk buffers need more", ByteSize(bytes))
                }
            },
        )?;
        line(
            "io_uring",
            &match &self.io_uring.reason {
                None => "works".into(),
                Some(reason) => format!("not available: {reason}; disks are read by threads"),
            },
        )?;
        line("nvidia driver", self.nvidia_driver.as_deref().unwrap_or("not loaded"))?;
        for (name, library) in &self.gpu_libraries {
            let text = match (&library.path, &library.version) {
                (Some(path), Some(version)) => format!("{} ({version})", path.display()),
                (Some(path), None) => path.display().to_string(),
                (None, _) => format!("not found in {}", library.looked_in.join(", ")),
            };
            line(&format!("  {name}"), &text)?;
        }
        for gpu in &self.gpus {
            let (link, node) = (gpu.link.as_deref().unwrap_or("link unknown"), gpu.numa_node);
            let node = node.map_or(String::new(), |node| format!(", memory node {node}"));
            let usable = if gpu.usable { "" } else { ", too old to be used" };
            let Gpu { name, compute_capability, memory, bus_id, .. } = gpu;
            let text = format!(
                "{name}, compute capability {compute_capability}, {memory}, {bus_id}, {link}{node}{usable}"
            );
            line(&gpu.device, &text)?;
        }
        if let Some(problem) = &self.gpu_problem {
            line("no gpu", problem)?;
        }
        Ok(())
    }
}

fn library(found: LibraryReport) -> GpuLibrary {
    GpuLibrary { path: found.search.found, version: found.version, looked_in: found.search.looked_in }
}

fn gpu(card: &CardReport) -> Gpu {
    let properties = &card.properties;
    Gpu {
        device: format!("cuda:{}", properties.ordinal),
        name: properties.name.clone(),
        compute_capability: properties.capability.to_string(),
        usable: properties.capability >= CAPABILITY_MIN,
        memory: ByteSize(properties.memory_bytes),
        bus_id: properties.bus_id.clone(),
        numa_node: card.numa_node,
        link: card.link_max.as_ref().map(|link| format!("{} × {}", link.width, link.speed)),
    }
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn target() -> String {
    let environment = if cfg!(target_env = "musl") {
        "-musl"
    } else if cfg!(target_env = "gnu") {
        "-gnu"
    } else {
        ""
    };
    format!("{}-{}{environment}", std::env::consts::ARCH, std::env::consts::OS)
}

fn cpu_features() -> BTreeMap<&'static str, bool> {
    #[cfg(target_arch = "x86_64")]
    let found = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512fp16", is_x86_feature_detected!("avx512fp16")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let found: [(&'static str, bool); 0] = [];
    found.into()
}

/// Whether the limit does not hold for this process: with CAP_IPC_LOCK, number 14, as root has it.
fn may_lock_all(status: &str) -> bool {
    has_bit(status, "CapEff:", 14)
}

/// Whether the map of users is that of the system itself.
fn is_initial(uid_map: Option<&str>) -> bool {
    uid_map.is_some_and(|map| map.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// The soft limit.
fn memlock(limits: &str) -> Memlock {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    match line.and_then(|line| line.split_whitespace().next()) {
        Some("unlimited") => Memlock::Unlimited,
        Some(bytes) => bytes.parse().map_or(Memlock::Unknown, Memlock::Bytes),
        None => Memlock::Unknown,
    }
}

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2  …`
fn driver_version(text: &str) -> Option<String> {
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_prints_is_read() {
        assert_eq!(cpu_name("processor : 0\nmodel name\t: Some CPU @ 2\n"), Some("Some CPU @ 2".into()));
        let limits = "Limit   Soft   Hard  Units\nMax locked memory         8388608   unlimited   bytes\n";
        assert_eq!(memlock(limits), Memlock::Bytes(8 << 20));
        assert_eq!(memlock("Max locked memory  unlimited unlimited bytes"), Memlock::Unlimited);
        assert_eq!(memlock(""), Memlock::Unknown);
        assert!(may_lock_all("CapPrm:\t0000000000000000\nCapEff:\t000001ffffffffff\n"));
        assert!(is_initial(Some("         0          0 4294967295\n")));
        assert!(!is_initial(Some("         0      65534          1\n")) && !is_initial(None));
        assert!(!may_lock_all("CapEff:\t0000000000000000\n") && !may_lock_all(""));
        let driver =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version: 13.2.0";
        assert_eq!(driver_version(driver), Some("570.86.15".into()));
    }

    #[test]
    fn a_report_in_both_forms() {
        let report = Report::collect(|| Err("no such system call".into()));
        let text = report.to_string();
        for part in
            ["terrace ", "kernel", "io_uring         not available: no such system call", "libcuda.so.1"]
        {
            assert!(text.contains(part), "{text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["io_uring"]["available"], false);
        assert!(json["cores"].as_u64().unwrap() >= 1);
    }
}
