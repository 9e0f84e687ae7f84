//! Whether the files fit, with a reserve left on every file system they share.

use crate::failure::Failure;
use crate::units;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is left free at least, if nothing else was asked for.
const RESERVE_BYTES_MIN: u64 = 1 << 30;
/// The same as a share of the file system: one in this many bytes.
const RESERVE_ONE_IN: u64 = 20;

/// From the kernel's `magic.h`; libc lacks it.
const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;

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

/// Bytes of a directory's file system, and those an ordinary user may still write.
fn space_of(dir: &Path) -> io::Result<(u64, u64)> {
    let path = CString::new(dir.as_os_str().as_bytes())?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with NUL and the structure is writable.
    if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above filled it in; it is plain numbers.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize))
}

/// Whether the directory's file system lives in memory.
pub fn is_in_memory(dir: &Path) -> bool {
    let Ok(path) = CString::new(dir.as_os_str().as_bytes()) else { return false };
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the path ends with NUL and the structure is writable.
    let status = unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) };
    // SAFETY: plain numbers, zeroed above and perhaps filled in.
    let kind = unsafe { stat.assume_init() }.f_type;
    status == 0 && (kind == libc::TMPFS_MAGIC || kind == RAMFS_MAGIC)
}
