//! Whether the files fit, with a reserve left on every file system they share.

use crate::failure::Failure;
use crate::units;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use terrace_aio::bench::space::space_of;

/// What is left free at least, if nothing else was asked for.
const RESERVE_BYTES_MIN: u64 = 1 << 30;
/// The same as a share of the file system: one in this many bytes.
const RESERVE_ONE_IN: u64 = 20;

/// Refuses when a file of `bytes` in each of `dirs` would leave less than the reserve.
pub fn check(dirs: &[PathBuf], bytes: u64, reserve: Option<u64>) -> Result<(), Failure> {
    let mut by_device: BTreeMap<u64, Vec<&PathBuf>> = BTreeMap::new();
    for dir in dirs {
        let metadata = std::fs::metadata(dir).map_err(|e| Failure::io("examining", dir, &e))?;
        by_device.entry(metadata.dev()).or_default().push(dir);
    }
    for sharing in by_device.values() {
        let (total, free) = space_of(sharing[0]).map_err(|e| Failure::io("examining", sharing[0], &e))?;
        if total == 0 {
            // A file system that does not count its space.
            continue;
        }
        let reserve = reserve.unwrap_or_else(|| (total / RESERVE_ONE_IN).max(RESERVE_BYTES_MIN));
        let needed = bytes.saturating_mul(sharing.len() as u64);
        if needed.saturating_add(reserve) > free {
            return Err(Failure::failed(refusal(sharing, needed, free, reserve)));
        }
    }
    Ok(())
}

fn refusal(dirs: &[&PathBuf], needed: u64, free: u64, reserve: u64) -> String {
    let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    format!(
        "{} has too little space: {} needed, {} free, {} of it reserved: lower --file-size, free some space, or \
         leave less with --reserve",
        names.join(" and "),
        units::about(needed),
        units::about(free),
        units::about(reserve)
    )
}
