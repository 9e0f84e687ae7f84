//! Files of measurements that a kill left behind.

use std::path::Path;

/// Removes files in `dir`, named `PREFIX`, a process's number, `-` and anything, of processes that are no more: one that was killed while its
/// file got its space could not. What has the number of this process is one's too: in a container every process may have the same. So
/// nobody else in this process may be making such a file.
pub fn remove(dir: &Path, prefix: &str) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process =
            name.to_str().and_then(|name| name.strip_prefix(prefix)?.split_once('-')?.0.parse().ok());
        let is_gone = |id: u32| id == std::process::id() || !Path::new("/proc").join(id.to_string()).exists();
        if process.is_some_and(is_gone) {
            // What cannot be removed is no reason not to measure.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
