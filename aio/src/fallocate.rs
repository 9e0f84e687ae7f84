//! Space of files, reserved and given back. Not part of the interface: `aio-bench` makes its files with it too.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Reserves a file's first `len` bytes, which read as zeros where nothing was written. Gives false where the file system
/// cannot reserve; the file is as it was then.
///
/// # Errors
/// There is no room, or the file cannot be written.
pub fn reserve(file: &File, len: u64) -> io::Result<bool> {
    fallocate(file, 0, 0, len, &[libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL])
}

/// Gives the space of a range back; it reads as zeros afterwards. Gives false where the file system cannot do that; the
/// range is as it was then.
///
/// # Errors
/// The file cannot be written.
pub fn punch_hole(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    fallocate(file, mode, offset, len, &[libc::EOPNOTSUPP, libc::ENOSYS])
}

/// The system call, begun anew after a signal; false for an error that says it is not to be had here.
fn fallocate(file: &File, mode: libc::c_int, offset: u64, len: u64, unsupported: &[i32]) -> io::Result<bool> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(too_large)?;
    let len = libc::off_t::try_from(len).map_err(too_large)?;
    // The kernel refuses an empty range.
    if len == 0 {
        return Ok(true);
    }
    loop {
        // SAFETY: a system call on an open descriptor that touches no memory of ours.
        if unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            Some(errno) if unsupported.contains(&errno) => return Ok(false),
            _ => return Err(error),
        }
    }
}
