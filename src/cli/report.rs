//! `terrace report`: what this machine offers. Nothing is loaded or changed; GPU libraries are looked for by name.

use crate::config::ByteSize;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

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
    /// GPU libraries and where they are.
    pub gpu_libraries: BTreeMap<&'static str, Option<PathBuf>>,
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

/// GPU libraries by the name that is loaded at run time.
const GPU_LIBRARIES: [&str; 5] =
    ["libcuda.so.1", "libcublasLt.so", "libnvrtc.so", "libnccl.so", "libcufile.so"];
const LIBRARY_FOLDERS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/opt/cuda/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
    "/usr/local/lib",
];

impl Report {
    /// Looks around. `io_uring` tries to set up a ring and says why it cannot.
    pub fn collect(io_uring: impl FnOnce() -> Result<(), String>) -> Self {
        let meminfo = read("/proc/meminfo").unwrap_or_default();
        let memory = meminfo_bytes(&meminfo, "MemTotal");
        let limit = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok()).map(ByteSize);
        let io_uring = io_uring();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            target: target(),
            optimized: !cfg!(debug_assertions),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().into()),
            cpu: read("/proc/cpuinfo").and_then(|text| cpu_name(&text)),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_features: cpu_features(),
            memory,
            memory_available: meminfo_bytes(&meminfo, "MemAvailable"),
            memory_limit: limit.filter(|limit| memory.is_none_or(|memory| *limit < memory)),
            memlock_limit: read("/proc/self/limits").map_or(Memlock::Unknown, |text| memlock(&text)),
            io_uring: IoUring { available: io_uring.is_ok(), reason: io_uring.err() },
            nvidia_driver: read("/proc/driver/nvidia/version").and_then(|text| driver_version(&text)),
            gpu_libraries: GPU_LIBRARIES.map(|name| (name, find_library(name, &library_folders()))).into(),
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
        for (name, path) in &self.gpu_libraries {
            line(
                &format!("  {name}"),
                &path.as_ref().map_or("not found".into(), |path| path.display().to_string()),
            )?;
        }
        Ok(())
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

fn cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().into())
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<ByteSize> {
    let line = meminfo.lines().find(|line| line.split(':').next() == Some(key))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(ByteSize(kib << 10))
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

fn library_folders() -> Vec<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given = std::env::split_paths(&path).filter(|path| !path.as_os_str().is_empty());
    given.chain(LIBRARY_FOLDERS.iter().map(PathBuf::from)).collect()
}

/// The first file whose name is `name` or `name` with a version behind it.
fn find_library(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    folders.iter().find_map(|folder| {
        let plain = folder.join(name);
        if plain.exists() {
            return Some(plain);
        }
        versions(folder, name).into_iter().next()
    })
}

fn versions(folder: &Path, name: &str) -> Vec<PathBuf> {
    let prefix = format!("{name}.");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let mut found: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_prints_is_read() {
        assert_eq!(meminfo_bytes("MemTotal:  2048 kB\nMemFree: 1 kB\n", "MemTotal"), Some(ByteSize(2 << 20)));
        assert_eq!(cpu_name("processor : 0\nmodel name\t: Some CPU @ 2\n"), Some("Some CPU @ 2".into()));
        let limits = "Limit   Soft   Hard  Units\nMax locked memory         8388608   unlimited   bytes\n";
        assert_eq!(memlock(limits), Memlock::Bytes(8 << 20));
        assert_eq!(memlock("Max locked memory  unlimited unlimited bytes"), Memlock::Unlimited);
        assert_eq!(memlock(""), Memlock::Unknown);
        let driver =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\nGCC version: 13.2.0";
        assert_eq!(driver_version(driver), Some("570.86.15".into()));
    }

    #[test]
    fn libraries_are_found_by_name_or_version() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [folder.path().to_path_buf()];
        assert_eq!(find_library("libnccl.so", &folders), None);
        std::fs::write(folder.path().join("libnccl.so.2"), "").unwrap();
        std::fs::write(folder.path().join("libncclx.so"), "").unwrap();
        assert_eq!(find_library("libnccl.so", &folders), Some(folder.path().join("libnccl.so.2")));
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
