//! One process per directory.

use crate::TierError;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

/// The file that whoever uses a directory of state has locked.
pub const LOCK_FILE: &str = "terrace.lock";

/// An advisory lock on a directory, released when dropped or when the process ends.
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
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(TierError::Locked { dir: dir.to_owned(), lock: path }),
            Err(TryLockError::Error(source)) => Err(TierError::File { doing: "locking", path, source }),
        }
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
        match file.try_lock_shared() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Err(TierError::Locked { dir: dir.to_owned(), lock: path }),
            Err(TryLockError::Error(source)) => Err(TierError::File { doing: "locking", path, source }),
        }
    }
}
