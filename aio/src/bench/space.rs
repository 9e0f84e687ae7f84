//! What a directory's file system is: how much fits, and whether it is one in memory.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// From the kernel's `magic.h`; libc lacks it.
const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;

/// Bytes of a directory's file system, and those an ordinary user may still write.
pub fn space_of(dir: &Path) -> io::Result<(u64, u64)> {
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
