//! What can go wrong with a transfer, said so that a user can act on it.

use std::io;
use std::path::{Path, PathBuf};

/// What kind of failure an [`IoError`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// No space left on the device, or a quota was reached.
    NoSpace,
    /// The file ended before the requested range did.
    UnexpectedEof,
    /// The path does not exist.
    NotFound,
    /// The path may not be opened or written: permissions or a read-only file system.
    Denied,
    /// The device failed, or what it holds is not what was written there: EIO, and what else block layer and file systems call that.
    Device,
    /// The engine was shut down before the request finished.
    Closed,
    /// The owner of the ticket asked for an early end.
    Cancelled,
    /// The request itself is wrong (out of the buffer, unknown file).
    Invalid,
    /// Anything else the operating system reported.
    Other,
}

/// A failed disk operation: what was being done, where, and what the operating system said.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{doing} {}{}: {detail}{}", .path.display(), range_text(*.offset, *.len), advice(*.kind))]
pub struct IoError {
    /// The class of the failure.
    pub kind: IoErrorKind,
    /// The verb: "reading", "writing", "opening", "syncing".
    pub doing: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Offset of the failed range in the file, in bytes.
    pub offset: u64,
    /// Length of the failed range, in bytes; 0 when the operation has no range.
    pub len: u64,
    /// What the operating system, or the engine, said.
    pub detail: String,
}

impl IoError {
    /// An error from an operating-system error.
    pub fn from_os(doing: &'static str, path: &Path, offset: u64, len: u64, source: &io::Error) -> Self {
        Self { kind: classify(source), doing, path: path.to_owned(), offset, len, detail: told(source) }
    }

    /// An error that the engine found itself.
    pub fn new(
        kind: IoErrorKind,
        doing: &'static str,
        path: &Path,
        offset: u64,
        len: u64,
        detail: String,
    ) -> Self {
        Self { kind, doing, path: path.to_owned(), offset, len, detail }
    }
}

/// What the operating system said, and what it means where that is not in its words.
fn told(source: &io::Error) -> String {
    let meaning = match source.raw_os_error() {
        Some(libc::EFBIG) => {
            ": larger than the limit of the process (ulimit -f) or the file system lets a file be"
        }
        // What io_uring hands to threads of the kernel ends like this where there can be no more of them.
        Some(libc::ECANCELED) => {
            ": the system refused a thread for it (ulimit -u, pids.max of a container); the threads engine starts all it needs at first"
        }
        _ => "",
    };
    format!("{source}{meaning}")
}

fn classify(source: &io::Error) -> IoErrorKind {
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => IoErrorKind::NoSpace,
        Some(libc::ENOENT | libc::ENOTDIR) => IoErrorKind::NotFound,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => IoErrorKind::Denied,
        Some(libc::EIO | libc::ENODEV | libc::ENXIO | libc::EREMOTEIO) => IoErrorKind::Device,
        // Direct I/O passes on what the block layer says (`blk_errors` in block/blk-core.c): a sector that cannot be read, protection
        // information that does not match, a transport that failed, a request that took too long.
        Some(libc::ENODATA | libc::EILSEQ | libc::ENOLINK | libc::ETIMEDOUT) => IoErrorKind::Device,
        // File systems: a wrong checksum, damaged metadata.
        Some(libc::EBADMSG | libc::EUCLEAN) => IoErrorKind::Device,
        Some(libc::EINVAL | libc::EBADF) => IoErrorKind::Invalid,
        _ => IoErrorKind::Other,
    }
}

/// What to do about it, if the kind says that.
fn advice(kind: IoErrorKind) -> &'static str {
    match kind {
        IoErrorKind::NoSpace => "; free space on that file system or choose another directory",
        IoErrorKind::UnexpectedEof => {
            "; the file is shorter than expected: it was truncated or belongs to another run"
        }
        IoErrorKind::NotFound => "; check the path",
        IoErrorKind::Denied => {
            "; check the owner, the permissions and whether the file system is mounted read-only"
        }
        IoErrorKind::Device => {
            "; the drive reported a failure: look at the kernel log and the drive's health"
        }
        IoErrorKind::Closed => "; the engine was shut down, or has stopped, which IoEngine::facts tells",
        IoErrorKind::Cancelled => "; submit it again if it is still wanted",
        IoErrorKind::Invalid | IoErrorKind::Other => "",
    }
}

fn range_text(offset: u64, len: u64) -> String {
    if len == 0 { String::new() } else { format!(" (offset {offset}, {len} bytes)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drives_and_damaged_file_systems_report_is_of_the_device() {
        let kind = |errno| classify(&io::Error::from_raw_os_error(errno));
        // As the block layer names what drives report, and as file systems name metadata or data with a wrong checksum.
        let block = [
            libc::EIO,
            libc::ENODATA,
            libc::EILSEQ,
            libc::EREMOTEIO,
            libc::ENOLINK,
            libc::ETIMEDOUT,
            libc::ENODEV,
        ];
        for errno in block.into_iter().chain([libc::EBADMSG, libc::EUCLEAN]) {
            assert_eq!(kind(errno), IoErrorKind::Device, "{}", io::Error::from_raw_os_error(errno));
        }
        assert_eq!(kind(libc::EINVAL), IoErrorKind::Invalid);
        assert_eq!(kind(libc::ENOMEM), IoErrorKind::Other);
    }

    #[test]
    fn limits_are_named_where_the_system_does_not() {
        for (errno, limit) in [(libc::EFBIG, "ulimit -f"), (libc::ECANCELED, "ulimit -u")] {
            let source = io::Error::from_raw_os_error(errno);
            let text = IoError::from_os("syncing", Path::new("/x"), 0, 0, &source).to_string();
            assert!(text.contains(limit) && text.contains(&source.to_string()), "{text}");
        }
    }
}
