//! The files that are measured: made, recognised, filled, and taken away again.
//!
//! ```text
//! aio-bench-0.dat   | data: pages that follow from seed, file and page number | label page |
//!                   0                                              data_bytes   + 4096
//! ```
//!
//! The label says who made the file, so that nothing else is ever overwritten, and whether all of it is as it should be. A file that is not to be kept is unlinked
//! as soon as it is open; engines open it through `/proc/self/fd`, so a kill leaves nothing behind. What a kill before that left, while
//! the file got its space, is removed by the next run there. Before anything is measured every block is really written: preallocated blocks that were not are read without touching the drive, and
//! written more slowly than blocks in use.

use crate::failure::Failure;
use crate::space;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use terrace_aio::bench::left_over;
use terrace_aio::bench::pattern::{Key, PAGE_BYTES};
use terrace_aio::fallocate;

const MAGIC: &str = "a file of aio-bench; safe to delete when it does not run\n";
const LABEL_BYTES: u64 = PAGE_BYTES as u64;
const LABEL_VERSION: u32 = 1;

/// What the names of files that are not to be kept begin with, before the number of the process.
const PREFIX: &str = ".aio-bench-";

/// What files to make.
#[derive(Debug, Clone)]
pub struct FilePlan {
    pub dirs: Vec<PathBuf>,
    /// Data bytes of each file, whole pages.
    pub data_bytes: u64,
    pub keep: bool,
    pub reuse: bool,
    /// Bytes to leave free; the default when `None`.
    pub reserve: Option<u64>,
    pub seed: u64,
    /// Files of this size for each directory that the space must suffice for.
    pub copies: u64,
}

/// One directory's file, open and locked.
#[derive(Debug)]
pub struct DataFile {
    pub dir: PathBuf,
    pub path: PathBuf,
    pub key: Key,
    pub data_bytes: u64,
    /// Whether every page is known to hold what its key says.
    pub is_stamped: bool,
    /// The same of what the file holds beyond `data_bytes`: another run made it longer than this one needs it.
    is_rest_stamped: bool,
    is_kept: bool,
    file: File,
}

#[derive(Debug, Serialize, Deserialize)]
struct Label {
    version: u32,
    data_bytes: u64,
    seed: u64,
    file: u64,
    stamped: bool,
}

impl FilePlan {
    /// Checks directories and space, and opens or makes the files. New ones are not stamped yet.
    pub fn open(&self) -> Result<Vec<DataFile>, Failure> {
        self.dirs.iter().try_for_each(|dir| check_dir(dir))?;
        self.dirs.iter().for_each(|dir| left_over::remove(dir, PREFIX));
        let missing: Vec<PathBuf> = (self.dirs.iter().enumerate())
            .filter(|(index, dir)| !self.reuse || !self.kept_path(dir, *index).exists())
            .map(|(_, dir)| dir.clone())
            .collect();
        space::check(&missing, (self.data_bytes + LABEL_BYTES) * self.copies, self.reserve)?;
        self.dirs.iter().enumerate().map(|(index, dir)| self.open_one(index, dir)).collect()
    }

    /// The name of the file that stays in `dir`: its number among those there, whatever other directories are given.
    fn kept_path(&self, dir: &Path, index: usize) -> PathBuf {
        let is_same = |other: &&PathBuf| {
            *other == dir || matches!((other.canonicalize(), dir.canonicalize()), (Ok(a), Ok(b)) if a == b)
        };
        kept_path(dir, self.dirs[..index].iter().filter(is_same).count())
    }

    fn open_one(&self, index: usize, dir: &Path) -> Result<DataFile, Failure> {
        let is_kept = self.keep || self.reuse;
        let path = if is_kept {
            self.kept_path(dir, index)
        } else {
            dir.join(format!("{PREFIX}{}-{index}.dat", std::process::id()))
        };
        if is_kept && path.exists() {
            return self.reopen(dir, path);
        }
        let file = create(&path, self.data_bytes + LABEL_BYTES)?;
        if !is_kept {
            match std::fs::remove_file(&path) {
                // Somebody in another container took it for a leftover.
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                removed => removed.map_err(|e| Failure::io("unlinking", &path, &e))?,
            }
        }
        let key = Key { seed: self.seed, file: index as u64 };
        let data_bytes = self.data_bytes;
        let data = DataFile {
            dir: dir.to_owned(),
            path,
            key,
            data_bytes,
            is_stamped: false,
            is_rest_stamped: true,
            is_kept,
            file,
        };
        data.lock()?;
        data.write_label()?;
        Ok(data)
    }

    fn reopen(&self, dir: &Path, path: PathBuf) -> Result<DataFile, Failure> {
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|e| Failure::io("opening", &path, &e))?;
        let shown = path.display();
        let Some(label) = read_label(&file) else {
            let text = format!("{shown} was not made by aio-bench: move it away or choose another --dir");
            return Err(Failure::failed(text));
        };
        if !self.reuse {
            let text = format!("{shown} exists from an earlier run: use it with --reuse, or remove it");
            return Err(Failure::failed(text));
        }
        if label.data_bytes < self.data_bytes {
            let (has, wants) = (label.data_bytes, self.data_bytes);
            let text = format!(
                "{shown} holds {has} bytes and --file-size asks for {wants}: remove it or ask for less"
            );
            return Err(Failure::failed(text));
        }
        let data = DataFile {
            dir: dir.to_owned(),
            path,
            key: Key { seed: label.seed, file: label.file },
            data_bytes: self.data_bytes,
            is_stamped: label.stamped,
            is_rest_stamped: label.stamped || label.data_bytes == self.data_bytes,
            is_kept: true,
            file,
        };
        data.lock()?;
        Ok(data)
    }
}

impl DataFile {
    /// The path through which engines open this file, whether or not it still has a name.
    pub fn open_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor()))
    }

    /// The number of the open descriptor, through which other processes of this user reach the file.
    pub fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Whether the file stays.
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Notes whether every page holds what its key says. Noted on disk before the first write that changes it.
    pub fn set_stamped(&mut self, stamped: bool) -> Result<(), Failure> {
        if self.is_stamped == stamped {
            return Ok(());
        }
        self.is_stamped = stamped;
        if self.is_kept { self.write_label() } else { Ok(()) }
    }

    fn lock(&self) -> Result<(), Failure> {
        match self.file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                let text = format!("{} is in use by another aio-bench: wait for it", self.path.display());
                Err(Failure::failed(text))
            }
            // A file system without locks.
            Err(TryLockError::Error(_)) => Ok(()),
        }
    }

    fn write_label(&self) -> Result<(), Failure> {
        let failed = |e: io::Error| Failure::io("labelling", &self.path, &e);
        let end = self.file.metadata().map_err(failed)?.len();
        let label = Label {
            version: LABEL_VERSION,
            data_bytes: end - LABEL_BYTES,
            seed: self.key.seed,
            file: self.key.file,
            stamped: self.is_stamped && self.is_rest_stamped,
        };
        let mut page = MAGIC.as_bytes().to_vec();
        serde_json::to_writer(&mut page, &label).map_err(|e| failed(e.into()))?;
        page.push(b'\n');
        page.resize(PAGE_BYTES, 0);
        self.file.write_all_at(&page, end - LABEL_BYTES).and_then(|()| self.file.sync_data()).map_err(failed)
    }
}

/// The name of the file that stays in `dir`.
pub fn kept_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("aio-bench-{index}.dat"))
}

fn check_dir(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    match std::fs::metadata(dir) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(Failure::usage(format!(
            "{shown} is not a directory: --dir takes a directory on the disk to measure"
        ))),
        Err(e) if e.kind() == ErrorKind::NotFound => Err(Failure::usage(format!(
            "{shown} does not exist: create it, or give --dir a directory that does"
        ))),
        Err(e) => Err(Failure::usage(format!("{shown} cannot be used: {e}: check its permissions"))),
    }
}

fn create(path: &Path, len: u64) -> Result<File, Failure> {
    let made = OpenOptions::new().read(true).write(true).create_new(true).open(path);
    let file = made.map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => {
            Failure::failed(format!("{} exists and was not made by this run: move it away", path.display()))
        }
        _ => Failure::io("creating", path, &e),
    })?;
    if let Err(e) = reserve(&file, len) {
        // The error that matters is the one at hand.
        let _ = std::fs::remove_file(path);
        return Err(Failure::io("reserving space for", path, &e));
    }
    Ok(file)
}

/// Gives the file its length, with space behind it where the file system can promise that.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    if fallocate::reserve(file, len)? { Ok(()) } else { file.set_len(len) }
}

fn read_label(file: &File) -> Option<Label> {
    let end = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    let start = end.checked_sub(LABEL_BYTES)?;
    let mut page = vec![0; PAGE_BYTES];
    file.read_exact_at(&mut page, start).ok()?;
    let text = page.strip_prefix(MAGIC.as_bytes())?;
    let line = text.split(|byte| *byte == b'\n').next()?;
    let label: Label = serde_json::from_slice(line).ok()?;
    (label.version == LABEL_VERSION && label.data_bytes == start).then_some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_runs_that_were_killed_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let left = |process: u32, index: u32| dir.path().join(format!("{PREFIX}{process}-{index}.dat"));
        // No process has the first number; the second was that of one in another container, and is this one's now; the third lives.
        let gone = [left(u32::MAX, 0), left(std::process::id(), 0)];
        let kept = [left(std::os::unix::process::parent_id(), 0), kept_path(dir.path(), 7)];
        gone.iter().chain(&kept).for_each(|path| std::fs::write(path, "x").unwrap());
        let dirs = vec![dir.path().to_owned()];
        let (keep, reuse, reserve) = (false, false, Some(0));
        FilePlan { dirs, data_bytes: 4096, keep, reuse, reserve, seed: 1, copies: 1 }.open().unwrap();
        assert!(gone.iter().all(|path| !path.exists()));
        assert!(kept.iter().all(|path| path.exists()));
    }
}
