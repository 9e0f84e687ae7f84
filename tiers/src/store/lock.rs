//! One process per directory.

use crate::TierError;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The file that whoever uses a directory of state has locked.
const LOCK_FILE: &str = "terrace.lock";

/// An advisory lock on a directory, released when dropped or when the process ends. Where the file system has no locks, nobody is kept
/// out, with a warning.
#[derive(Debug)]
pub(super) struct DirLock {
    _file: File,
}

impl DirLock {
    /// Creates the directory if needed and locks it.
    pub(super) fn acquire(dir: &Path) -> Result<Self, TierError> {
        terrace_aio::create_dir_durably(dir).map_err(|source| TierError::File {
            doing: "creating",
            path: dir.to_owned(),
            source,
        })?;
        let path = dir.join(LOCK_FILE);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|source| TierError::File { doing: "opening", path: path.clone(), source })?;
        let locked = file.try_lock();
        Self::of(file, locked, dir, path)
    }
}

impl DirLock {
    /// Locks an existing directory against those who change it, but not against others who look. Nothing is created: where the
    /// lock file is missing, as in a copy of the state, there is nobody to keep out and no lock.
    pub(super) fn share(dir: &Path) -> Result<Option<Self>, TierError> {
        let path = dir.join(LOCK_FILE);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(TierError::File { doing: "opening", path, source }),
        };
        let locked = file.try_lock_shared();
        Self::of(file, locked, dir, path).map(Some)
    }

    /// What came of locking the file `lock` of `dir`.
    fn of(
        file: File,
        locked: Result<(), TryLockError>,
        dir: &Path,
        lock: PathBuf,
    ) -> Result<Self, TierError> {
        match locked {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(TierError::Locked { dir: dir.to_owned(), lock }),
            Err(TryLockError::Error(error)) if has_no_locks(&error) => {
                tracing::warn!(
                    dir = %dir.display(), %error,
                    "the file system has no locks: see to it that no other process uses this directory"
                );
                Ok(Self { _file: file })
            }
            Err(TryLockError::Error(source)) => Err(TierError::File { doing: "locking", path: lock, source }),
        }
    }
}

/// Whether locking failed because the file system, or the server that it is on, does no such thing.
fn has_no_locks(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOLCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_without_locks_is_used_without() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LOCK_FILE);
        let of = |locked| DirLock::of(File::create(&path).unwrap(), locked, dir.path(), path.clone());
        let failed = |errno| of(Err(TryLockError::Error(io::Error::from_raw_os_error(errno))));
        for errno in [libc::ENOSYS, libc::EOPNOTSUPP, libc::ENOTSUP, libc::ENOLCK] {
            assert!(failed(errno).is_ok(), "{}", io::Error::from_raw_os_error(errno));
        }
        for errno in [libc::EIO, libc::EBADF, libc::EINTR] {
            assert!(matches!(failed(errno), Err(TierError::File { doing: "locking", .. })));
        }
        assert!(matches!(of(Err(TryLockError::WouldBlock)), Err(TierError::Locked { .. })));
        assert!(of(Ok(())).is_ok());
    }
}
