//! The files a real engine has open: how they are opened, what direct I/O on them needs, and when they may close.
//!
//! Each file has two descriptors of the same inode: one for direct I/O and one that goes through the page cache,
//! for the edges (see [`split`](super::split)). Where the file system refuses `O_DIRECT` both are the cached one
//! and the alignment is 1, so that nothing above needs to know.

use super::{FileFacts, FileId, OpenMode, job::nameless, split::Alignment};
use crate::{IoError, IoErrorKind, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

/// Smallest offset alignment used for direct I/O, in bytes: what 4Kn drives need. It is a page at least ([`offset_unit`]).
const UNIT_MIN: usize = 4096;

/// Memory alignment assumed where the kernel does not tell, in bytes.
const MEMORY_ALIGN_ASSUMED: usize = 4096;

/// The open files of one engine.
#[derive(Debug)]
pub(crate) struct FileTable {
    direct: bool,
    slots: RwLock<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    /// By id. Ids are never used twice, so a stale id is an error and not another file.
    files: Vec<Option<Arc<OpenFile>>>,
}

impl Slots {
    fn get(&self, id: FileId) -> Option<&Arc<OpenFile>> {
        self.files.get(id.0 as usize)?.as_ref()
    }
}

/// One open file. Requests share it; the last one to let go closes it.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub id: FileId,
    /// As it was opened.
    pub path: PathBuf,
    /// What direct transfers must be multiples of.
    pub alignment: Alignment,
    /// Whether writing is allowed.
    pub writable: bool,
    direct: Option<File>,
    cached: File,
    /// Why direct I/O was refused.
    refusal: Option<String>,
    /// The device that holds the file: files of one device share its queue.
    pub device: u64,
    // Last, so that it tells of the end only after the descriptors above are closed.
    end: EndSignal,
}

/// Keeps a file open, and its `close` waiting, while a request uses it.
pub(crate) type FileUse = Arc<OpenFile>;

/// Becomes true, for whoever holds the other end, when it is dropped.
#[derive(Debug, Default)]
struct EndSignal(Arc<(Mutex<bool>, Condvar)>);

impl FileTable {
    /// No files yet; `direct` is whether to try direct I/O at all.
    pub fn new(direct: bool) -> Self {
        Self { direct, slots: RwLock::default() }
    }

    /// See [`IoEngine::open`](super::IoEngine::open).
    pub fn open(&self, path: &Path, mode: OpenMode) -> Result<FileId, IoError> {
        let mut file = OpenFile::open(path, mode, self.direct)?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let too_many = |_| {
            let detail = "more files were opened than ids can tell apart".to_owned();
            IoError::new(IoErrorKind::Other, "opening", path, 0, 0, detail)
        };
        file.id = FileId(u32::try_from(slots.files.len()).map_err(too_many)?);
        let id = file.id;
        slots.files.push(Some(Arc::new(file)));
        Ok(id)
    }

    /// Closes a file once the requests that use it are done.
    pub fn close(&self, id: FileId) -> Result<(), IoError> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let file = slots.files.get_mut(id.0 as usize).and_then(Option::take);
        drop(slots);
        let file = file.ok_or_else(|| unknown("closing", id))?;
        let end = Arc::clone(&file.end.0);
        drop(file);
        let (is_over, changed) = &*end;
        let mut is_over = is_over.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_over {
            is_over = changed.wait(is_over).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// Looks a file up; it stays open while the caller holds it.
    pub fn acquire(&self, doing: &'static str, id: FileId) -> Result<FileUse, IoError> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(id).cloned().ok_or_else(|| unknown(doing, id))
    }

    /// See [`IoEngine::path`](super::IoEngine::path).
    pub fn path(&self, id: FileId) -> Option<PathBuf> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.get(id).map(|file| file.path.clone())
    }

    /// The file's length in bytes.
    pub fn len(&self, id: FileId) -> Result<u64, IoError> {
        let file = self.acquire("examining", id)?;
        file.len_bytes().map_err(|e| IoError::from_os("examining", &file.path, 0, 0, &e))
    }

    /// See [`IoEngine::file_facts`](super::IoEngine::file_facts).
    pub fn facts(&self, id: FileId) -> Result<FileFacts, IoError> {
        let file = self.acquire("examining", id)?;
        Ok(FileFacts {
            is_direct: file.direct.is_some(),
            offset_align: file.alignment.offset,
            memory_align: file.alignment.memory,
            refusal: file.refusal.clone(),
        })
    }

    /// See [`IoEngine::punch_hole`](super::IoEngine::punch_hole).
    pub fn punch_hole(&self, id: FileId, offset: u64, len: u64) -> Result<(), IoError> {
        let doing = "releasing space of";
        let file = self.acquire(doing, id)?;
        let failed = |error: io::Error| IoError::from_os(doing, &file.path, offset, len, &error);
        if !file.writable {
            return Err(failed(io::Error::from_raw_os_error(libc::EBADF)));
        }
        // Where holes cannot be made the space is kept.
        fallocate::punch_hole(&file.cached, offset, len).map(drop).map_err(failed)
    }

    /// Makes a file look as if it were on another device.
    #[cfg(test)]
    pub fn pretend_device(&self, id: FileId, device: u64) {
        let mut slots = self.slots.write().unwrap();
        let file = slots.files[id.0 as usize].as_mut().unwrap();
        Arc::get_mut(file).unwrap().device = device;
    }

    /// Removes a file that is not open here. The removal is durable when it returns.
    pub fn remove(&self, path: &Path) -> Result<(), IoError> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        if slots.files.iter().flatten().any(|file| file.path == path) {
            return Err(still_open(path));
        }
        std::fs::remove_file(path)
            .and_then(|()| sync_parent(path))
            .map_err(|e| IoError::from_os("removing", path, 0, 0, &e))
    }
}

/// The methods of [`IoEngine`](super::IoEngine) about files, for engines with a `files: FileTable`.
///
/// Closing is up to the engine: it may hold on to files of its own.
macro_rules! serve_files {
    () => {
        fn open(
            &self,
            path: &std::path::Path,
            mode: crate::OpenMode,
        ) -> Result<crate::FileId, crate::IoError> {
            self.files.open(path, mode)
        }

        fn path(&self, file: crate::FileId) -> Option<std::path::PathBuf> {
            self.files.path(file)
        }

        fn len(&self, file: crate::FileId) -> Result<u64, crate::IoError> {
            self.files.len(file)
        }

        fn exists(&self, path: &std::path::Path) -> bool {
            path.exists()
        }

        fn remove(&self, path: &std::path::Path) -> Result<(), crate::IoError> {
            self.files.remove(path)
        }

        fn file_facts(&self, file: crate::FileId) -> Result<crate::FileFacts, crate::IoError> {
            self.files.facts(file)
        }

        fn punch_hole(&self, file: crate::FileId, offset: u64, len: u64) -> Result<(), crate::IoError> {
            self.files.punch_hole(file, offset, len)
        }
    };
}
pub(crate) use serve_files;

/// The error for an id that is not, or no longer, open.
pub(crate) fn unknown(doing: &'static str, id: FileId) -> IoError {
    let detail = "it is not open in this engine".to_owned();
    IoError::new(IoErrorKind::Invalid, doing, &nameless(id), 0, 0, detail)
}

/// The error for removing an open file.
pub(crate) fn still_open(path: &Path) -> IoError {
    let detail = "the file is still open in this engine: close it first".to_owned();
    IoError::new(IoErrorKind::Invalid, "removing", path, 0, 0, detail)
}

impl OpenFile {
    fn open(path: &Path, mode: OpenMode, direct: bool) -> Result<Self, IoError> {
        let doing = if matches!(mode, OpenMode::CreateNew { .. }) { "creating" } else { "opening" };
        let failed = |e: io::Error| IoError::from_os(doing, path, 0, 0, &e);
        let writable = mode != OpenMode::Read;
        // The cached descriptor comes first: refusing O_DIRECT, Linux fails only after having created the file.
        let mut options = OpenOptions::new();
        options.read(true).write(writable);
        let cached = match mode {
            OpenMode::CreateNew { .. } => options.clone().create_new(true).open(path),
            // Opening a pipe would wait for who writes to it.
            OpenMode::Read | OpenMode::ReadWrite if is_other(path) => return Err(not_a_file(doing, path)),
            OpenMode::Read | OpenMode::ReadWrite => options.open(path),
        }
        .map_err(failed)?;
        if let OpenMode::CreateNew { len } = mode
            && let Err(e) = preallocate(&cached, len).and_then(|()| sync_parent(path))
        {
            // The space is free at once, even where a child of this process that has yet to run its program holds a copy
            // of the descriptor. The error that matters is the one at hand; what fails now cannot be helped here.
            let _ = cached.set_len(0);
            let _ = std::fs::remove_file(path);
            return Err(IoError::from_os("creating", path, 0, len, &e));
        }
        let metadata = cached.metadata().map_err(failed)?;
        let device = metadata.dev();
        if !metadata.is_file() {
            return Err(not_a_file(doing, path));
        }
        let opened = direct.then(|| open_direct(path, &options, &cached));
        let (direct, alignment, refusal) = match opened {
            Some(Ok((file, alignment))) => (Some(file), alignment, None),
            Some(Err(e)) => {
                warn_buffered_once(path, &e);
                (None, Alignment::NONE, Some(e.to_string()))
            }
            None => (None, Alignment::NONE, None),
        };
        if direct.is_some() {
            advise_random(&cached);
        }
        let path = path.to_owned();
        let end = EndSignal::default();
        // The table gives the file its number.
        Ok(Self { id: FileId(u32::MAX), path, alignment, writable, direct, cached, refusal, device, end })
    }

    /// The length in bytes.
    pub fn len_bytes(&self) -> io::Result<u64> {
        self.cached.metadata().map(|m| m.len())
    }

    /// The descriptor for direct I/O (the cached one where direct I/O is refused).
    pub fn direct_fd(&self) -> RawFd {
        self.direct.as_ref().unwrap_or(&self.cached).as_raw_fd()
    }

    /// The descriptor that goes through the page cache.
    pub fn cached_fd(&self) -> RawFd {
        self.cached.as_raw_fd()
    }
}

impl Drop for EndSignal {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }
}

/// Whether something is there that is no regular file.
fn is_other(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| !found.is_file())
}

fn not_a_file(doing: &'static str, path: &Path) -> IoError {
    IoError::new(IoErrorKind::Invalid, doing, path, 0, 0, "not a regular file".to_owned())
}

/// Opens the second descriptor and finds out what it needs.
fn open_direct(path: &Path, options: &OpenOptions, cached: &File) -> io::Result<(File, Alignment)> {
    let alignment = direct_alignment(cached)?;
    let file = options.clone().custom_flags(libc::O_DIRECT).open(path)?;
    let (a, b) = (file.metadata()?, cached.metadata()?);
    if (a.dev(), a.ino()) != (b.dev(), b.ino()) {
        return Err(io::Error::other("the path was replaced while it was being opened"));
    }
    Ok((file, alignment))
}

/// What `statx` says about direct I/O on a file; assumed values where the kernel does not say.
fn direct_alignment(file: &File) -> io::Result<Alignment> {
    let page = page_bytes();
    let assumed = Alignment { offset: offset_unit(UNIT_MIN, page), memory: MEMORY_ALIGN_ASSUMED };
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is a NUL-terminated string and `stat` is a writable statx structure.
    let status = unsafe {
        let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
        libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, stat.as_mut_ptr())
    };
    // SAFETY: the structure is plain integers, zeroed above and perhaps filled in by the kernel.
    let stat = unsafe { stat.assume_init() };
    if status != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(assumed);
    }
    let (offset, memory) = (stat.stx_dio_offset_align as usize, stat.stx_dio_mem_align as usize);
    if offset == 0 || memory == 0 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    if !offset.is_power_of_two() || !memory.is_power_of_two() {
        return Ok(assumed);
    }
    Ok(Alignment { offset: offset_unit(offset, page), memory })
}

/// What offsets of direct transfers are multiples of, where the file asks for `asked`: whole pages, so that an edge in the page cache
/// never shares one with a direct transfer. Some kernels for ARM and POWER have pages of 16 or 64 KiB.
fn offset_unit(asked: usize, page: usize) -> usize {
    asked.max(UNIT_MIN).max(page)
}

/// Bytes of a page of the page cache, at least.
fn page_bytes() -> usize {
    // SAFETY: a call that only reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(UNIT_MIN)
}

/// Reserves `len` bytes that read as zeros.
fn preallocate(file: &File, len: u64) -> io::Result<()> {
    // Without fallocate only written zeros are really reserved: a sparse file would fail later, mid-run.
    if fallocate::reserve(file, len)? { Ok(()) } else { write_zeros(file, len) }
}

fn write_zeros(mut file: &File, len: u64) -> io::Result<()> {
    io::copy(&mut io::Read::take(io::repeat(0), len), &mut file)?;
    file.sync_all()
}

/// As [`sync_dir`], of the directory that a file is in.
fn sync_parent(path: &Path) -> io::Result<()> {
    sync_dir(parent_of(path))
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes a directory's change durable: a crash must not lose a file whose contents were synced, nor bring a removed
/// one back. Some file systems cannot sync a directory, and one that may be written but not read cannot be opened; there a
/// name is as durable as it can be.
///
/// # Errors
/// The directory cannot be opened, or the drive failed.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    const CANNOT: [i32; 4] = [libc::EINVAL, libc::ENOTSUP, libc::ENOSYS, libc::EACCES];
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        Err(e) if e.raw_os_error().is_some_and(|code| CANNOT.contains(&code)) => Ok(()),
        result => result,
    }
}

/// Creates a directory and those above it, such that a power cut does not take them away with what was synced inside.
///
/// # Errors
/// One cannot be created or synced, or is something else.
pub fn create_dir_durably(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    if dir.exists() {
        let detail = format!("{} is not a directory", dir.display());
        return Err(io::Error::new(io::ErrorKind::NotADirectory, detail));
    }
    create_dir_durably(parent_of(dir))?;
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        result => result,
    }?;
    sync_parent(dir)
}

/// Turns read-ahead off on the cached descriptor: edges must not pull their neighbours into the page cache.
fn advise_random(file: &File) {
    // SAFETY: a system call on an open descriptor that touches no memory of ours. It is advice: failure is harmless.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

fn warn_buffered_once(path: &Path, error: &io::Error) {
    static WARNED: std::sync::Once = std::sync::Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            path = %path.display(), %error,
            "the file system refuses direct I/O: going through the page cache, which costs memory and a copy"
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_whole_pages_of_every_kernel() {
        assert_eq!([512, 4096, 16384].map(|asked| offset_unit(asked, 4096)), [4096, 4096, 16384]);
        assert_eq!([512, 4096, 131_072].map(|asked| offset_unit(asked, 65536)), [65536, 65536, 131_072]);
        assert!(page_bytes() >= 4096);
    }

    /// A pipe that nobody writes to, which waits for whoever opens it, and a folder.
    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("mkfifo is there").success());
        for (path, mode) in
            [(&*pipe, OpenMode::Read), (&*pipe, OpenMode::ReadWrite), (dir.path(), OpenMode::Read)]
        {
            let error = OpenFile::open(path, mode, true).map(|_| ()).expect_err("it is no file");
            assert_eq!(error.kind, IoErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains("not a regular file"), "{error}");
        }
    }
}
