//! What the system says of host memory: the machine's, the limits of this process's control groups, and what it has taken.

use std::path::Path;

/// Host memory as this process may use it, in bytes; `None` for what the system does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// What the machine has.
    pub total: Option<u64>,
    /// What this process may still take without swapping: of the machine's, and within the limits of its control groups, where what is
    /// charged for files that can be dropped counts as free.
    pub available: Option<u64>,
    /// The smallest limit of a control group, if that is less than the machine has.
    pub limit: Option<u64>,
}

impl HostMemory {
    /// Asks the kernel.
    pub fn now() -> Self {
        Self::told_by(&|path| std::fs::read_to_string(path).ok())
    }

    /// From the kernel's texts: `read` gives that of a file.
    fn told_by(read: &dyn Fn(&str) -> Option<String>) -> Self {
        let machine = read("/proc/meminfo").unwrap_or_default();
        let groups = read("/proc/self/cgroup").unwrap_or_default();
        let groups: Vec<Group> = groups.lines().flat_map(|line| Group::all_of(read, line)).collect();
        let total = kilobytes(&machine, "MemTotal");
        let limit = groups.iter().map(|group| group.limit).min();
        let left = groups.iter().map(|group| group.limit.saturating_sub(group.used));
        Self {
            total,
            available: kilobytes(&machine, "MemAvailable")
                .map(|free| left.chain([free]).min().unwrap_or(free)),
            limit: limit.filter(|limit| total.is_none_or(|total| *limit < total)),
        }
    }
}

/// A control group that has a limit.
struct Group {
    limit: u64,
    /// What it has taken, less files that can be dropped.
    used: u64,
}

impl Group {
    /// Those of a line of `/proc/self/cgroup`, `number:controllers:path`, from the process's own up.
    fn all_of<'r>(
        read: &'r dyn Fn(&str) -> Option<String>,
        line: &'r str,
    ) -> impl Iterator<Item = Self> + 'r {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        // Version 2 has no number and names no controllers.
        let second = controllers.is_empty();
        let memory = second || controllers.split(',').any(|name| name == "memory");
        // In a container the path may be the host's, and what is mounted the container's own group.
        let paths = memory.then(|| Path::new(path.trim_start_matches('/')).ancestors());
        paths.into_iter().flatten().filter_map(move |path| Self::at(read, second, path))
    }

    fn at(read: &dyn Fn(&str) -> Option<String>, second: bool, path: &Path) -> Option<Self> {
        let (root, limit, used, files) = if second {
            ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ")
        } else {
            let root = "/sys/fs/cgroup/memory";
            (root, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        };
        let text = |name: &str| read(Path::new(root).join(path).join(name).to_str()?);
        let number = |text: &str| text.trim().parse::<u64>().ok();
        // Without a limit the file says "max", or, in version 1, a number near 2⁶³.
        let (limit, used) = (number(&text(limit)?)?, number(&text(used)?)?);
        let stat = text("memory.stat").unwrap_or_default();
        let droppable = stat.lines().find_map(|line| number(line.strip_prefix(files)?)).unwrap_or(0);
        Some(Self { limit, used: used.saturating_sub(droppable) })
    }
}

/// The largest resident size of this process so far, in bytes; 0 where the system does not say.
pub fn peak_resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kilobytes(&text, "VmHWM").unwrap_or(0)
}

/// A size that a text of the kernel's has under a name, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_kernel_tells_sizes_in_kilobytes() {
        assert_eq!(kilobytes("MemTotal: 10 kB\nMemAvailable:    4 kB\n", "MemAvailable"), Some(4096));
        assert_eq!(kilobytes("MemTotal: 10 kB\n", "MemFree"), None);
        assert!(peak_resident_bytes() > 0);
        let now = HostMemory::now();
        assert!(now.available.is_some() && now.available <= now.total, "{now:?}");
    }

    /// In a container the machine's memory is not what a process may take.
    #[test]
    fn limits_of_control_groups_count() {
        let machine =
            ("/proc/meminfo", format!("MemTotal: {} kB\nMemAvailable: {} kB\n", 500 << 20, 400 << 20));
        let told = |files: &[(&str, String)]| {
            let files: Vec<_> = files.iter().chain([&machine]).collect();
            let told = HostMemory::told_by(&|path| {
                files.iter().find(|file| file.0 == path).map(|file| file.1.clone())
            });
            assert_eq!(told.total, Some(500 * GIB));
            (told.available.unwrap(), told.limit)
        };
        assert_eq!(told(&[]), (400 * GIB, None));
        let own = |path: &str| ("/proc/self/cgroup", format!("0::{path}\n"));
        let container = |limit: &str| {
            let (max, current) = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
            let stat = format!("anon 5\nactive_file 1\ninactive_file {GIB}\n");
            let used = ((2 * GIB).to_string(), ("/sys/fs/cgroup/memory.stat", stat));
            vec![own("/a/b"), (max, limit.into()), (current, used.0), used.1]
        };
        let of_eight = told(&container(&format!("{}\n", 8 * GIB)));
        assert_eq!(of_eight, (7 * GIB, Some(8 * GIB)), "one of two is files");
        assert_eq!(told(&container("max\n")), (400 * GIB, None));
        assert_eq!(told(&container("1000\n")), (0, Some(1000)), "used up");
        let slice = [
            own("/system.slice/run.service"),
            ("/sys/fs/cgroup/system.slice/memory.max", format!("{}", 3 * GIB)),
            ("/sys/fs/cgroup/system.slice/memory.current", format!("{GIB}")),
        ];
        assert_eq!(told(&slice), (2 * GIB, Some(3 * GIB)), "of a group above");
        let first = |limit: u64| {
            [
                ("/proc/self/cgroup", "5:cpu:/\n4:memory:/x\n".into()),
                ("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit.to_string()),
                ("/sys/fs/cgroup/memory/memory.usage_in_bytes", (5 * GIB).to_string()),
                (
                    "/sys/fs/cgroup/memory/memory.stat",
                    format!("inactive_file 1\ntotal_inactive_file {GIB}\n"),
                ),
            ]
        };
        assert_eq!(told(&first(6 * GIB)), (2 * GIB, Some(6 * GIB)));
        assert_eq!(told(&first(i64::MAX as u64 & !4095)), (400 * GIB, None), "without a limit");
    }
}
