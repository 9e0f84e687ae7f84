//! A byte address space striped over one file in each of several directories.
//!
//! ```text
//! address   0 ......... S ......... 2S ........ 3S ........
//! stripe    0           1           2           3            (S = STRIPE_BYTES)
//! two paths dir0 #0     dir1 #0     dir0 #1     dir1 #1
//!
//! file      | header page (4 KiB) | stripe #0 | stripe #1 | …
//! header    | magic 8 | version 4 | index 4 | count 4 | 0 4 | volume id 8 | bytes 8 | checksum 8 | zeros |
//! ```
//! The header ties the files of a volume together: a directory that belongs to another run, or directories given in
//! another order, are recognised before anything is read.

use crate::file::OpenFile;
use crate::{TierError, checksum};
use smallvec::SmallVec;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::{IoBuf, IoEngine, IoError, IoErrorKind, OpKind, OpenMode, Request, Segment, Ticket};

/// Bytes of one stripe.
pub const STRIPE_BYTES: u64 = 1 << 20;

const HEADER_BYTES: u64 = 4096;
const MAGIC: [u8; 8] = *b"TRCVOLUM";
const VERSION: u32 = 1;

#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) engine: Arc<dyn IoEngine>,
    files: Vec<OpenFile>,
    pub(crate) paths: Arc<[PathBuf]>,
    bytes: u64,
}

/// What a file says about the volume that it is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) id: u64,
}

impl Volume {
    /// Bytes of each directory's file for a volume of `bytes`.
    pub(crate) fn file_bytes(bytes: u64, dirs: usize) -> u64 {
        HEADER_BYTES + bytes.div_ceil(STRIPE_BYTES).div_ceil(dirs as u64) * STRIPE_BYTES
    }

    pub(crate) fn create(
        engine: &Arc<dyn IoEngine>,
        dirs: &[PathBuf],
        name: &str,
        bytes: u64,
        id: u64,
    ) -> Result<Self, TierError> {
        let paths: Arc<[PathBuf]> = dirs.iter().map(|d| d.join(name)).collect();
        let len = Self::file_bytes(bytes, dirs.len());
        let mut files = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            if engine.exists(path) {
                engine.remove(path)?;
            }
            let file = OpenFile::open(engine, path, OpenMode::CreateNew { len })?;
            let header = header(index as u32, dirs.len() as u32, id, bytes);
            engine.submit(Request::write(file.id, 0, header)).wait()?;
            engine.sync(file.id).wait()?;
            files.push(file);
        }
        Ok(Self { engine: Arc::clone(engine), files, paths, bytes })
    }

    pub(crate) fn open(
        engine: &Arc<dyn IoEngine>,
        dirs: &[PathBuf],
        name: &str,
        bytes: u64,
        id: u64,
    ) -> Result<Self, TierError> {
        let paths: Arc<[PathBuf]> = dirs.iter().map(|d| d.join(name)).collect();
        let mut files = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            let file = OpenFile::open(engine, path, OpenMode::ReadWrite)?;
            let header_page = IoBuf::zeroed(HEADER_BYTES as usize);
            let found = engine.submit(Request::read(file.id, 0, header_page)).wait()?;
            if found[..] != header(index as u32, dirs.len() as u32, id, bytes)[..] {
                let detail = format!(
                    "does not belong to path {} of {} of this run; give the --disk paths of the run in their original order",
                    index + 1,
                    dirs.len()
                );
                return Err(TierError::Foreign { path: path.clone(), detail });
            }
            let len = engine.len(file.id)?;
            let needed = Self::file_bytes(bytes, dirs.len());
            if len < needed {
                let detail = format!("the file has {len} bytes and needs {needed}: it was truncated");
                return Err(TierError::Damaged { path: path.clone(), detail });
            }
            files.push(file);
        }
        Ok(Self { engine: Arc::clone(engine), files, paths, bytes })
    }

    /// What the file at `path` is part of; `None` if there is no such file or it never got its header.
    pub(crate) fn part(engine: &Arc<dyn IoEngine>, path: &Path) -> Result<Option<Part>, TierError> {
        let file = match OpenFile::open(engine, path, OpenMode::Read) {
            Ok(file) => file,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if engine.len(file.id)? < HEADER_BYTES {
            return Ok(None);
        }
        let header_page = IoBuf::zeroed(HEADER_BYTES as usize);
        let page = engine.submit(Request::read(file.id, 0, header_page)).wait()?;
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        if page[0..8] != MAGIC || word(40) != checksum(&page[..40]) {
            return Ok(None);
        }
        Ok(Some(Part { index: half(12), count: half(16), id: word(24) }))
    }

    /// A request for `buf.len()` bytes at `address`.
    pub(crate) fn request(&self, kind: OpKind, address: u64, buf: IoBuf) -> Request {
        let end = address + buf.len() as u64;
        assert!(end <= self.bytes, "{address}..{end} lies within the volume of {} bytes", self.bytes);
        let mut segments: SmallVec<[Segment; 4]> = SmallVec::new();
        let (mut at, mut start) = (address, 0);
        while at < end {
            let (index, offset) = self.locate(at);
            let file = self.files[index].id;
            let len = (STRIPE_BYTES - at % STRIPE_BYTES).min(end - at) as usize;
            match segments.last_mut() {
                Some(last) if last.file == file && last.offset + last.len as u64 == offset => last.len += len,
                _ => segments.push(Segment { file, offset, start, len }),
            }
            at += len as u64;
            start += len;
        }
        Request { kind, buf, segments }
    }

    /// Makes every completed write durable.
    pub(crate) fn sync(&self) -> Result<(), TierError> {
        let tickets: Vec<_> = self.files.iter().map(|f| self.engine.sync(f.id)).collect();
        wait_all(tickets)
    }

    /// The file, as an index into `paths`, and the offset of `address`.
    pub(crate) fn locate(&self, address: u64) -> (usize, u64) {
        let stripe = address / STRIPE_BYTES;
        let count = self.files.len() as u64;
        let offset = HEADER_BYTES + stripe / count * STRIPE_BYTES + address % STRIPE_BYTES;
        ((stripe % count) as usize, offset)
    }

    /// Closes and deletes the files, the first one last: as long as others are left it tells whose they are.
    pub(crate) fn remove(&self) -> Result<(), IoError> {
        for (file, path) in self.files.iter().zip(&*self.paths).rev() {
            file.close()?;
            self.engine.remove(path)?;
        }
        Ok(())
    }
}

/// Waits for every ticket, so that nothing is in flight afterwards, and gives the first error.
pub(crate) fn wait_all(tickets: impl IntoIterator<Item = Ticket>) -> Result<(), TierError> {
    let mut first = Ok(());
    for ticket in tickets {
        let result = ticket.wait();
        if first.is_ok() {
            first = result.map(drop);
        }
    }
    Ok(first?)
}

/// Whether to treat paths as real directories: create and lock them and look at their free space. A simulated
/// engine has no directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum World {
    /// The operating system's file systems.
    Real,
    /// The file namespace of a simulated engine.
    Simulated,
}

impl World {
    pub(crate) fn of(engine: &dyn IoEngine) -> Self {
        if engine.name().contains("sim") { Self::Simulated } else { Self::Real }
    }
}

fn header(index: u32, count: u32, id: u64, bytes: u64) -> IoBuf {
    let mut page = IoBuf::zeroed(HEADER_BYTES as usize);
    page[0..8].copy_from_slice(&MAGIC);
    page[8..12].copy_from_slice(&VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&index.to_le_bytes());
    page[16..20].copy_from_slice(&count.to_le_bytes());
    page[24..32].copy_from_slice(&id.to_le_bytes());
    page[32..40].copy_from_slice(&bytes.to_le_bytes());
    let sum = checksum(&page[..40]);
    page[40..48].copy_from_slice(&sum.to_le_bytes());
    page
}

/// Bytes that an unprivileged process may still write on the file system of `dir`.
///
/// # Errors
/// The directory cannot be examined.
pub fn free_space(dir: &Path) -> Result<u64, TierError> {
    let failed = |source| TierError::File { doing: "examining", path: dir.to_owned(), source };
    let name = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes())
        .map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
    // SAFETY: an all-zero statvfs is a valid value of that plain C struct.
    let mut stats: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is a C string and `stats` is valid for writing.
    if unsafe { libc::statvfs(name.as_ptr(), &raw mut stats) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok(stats.f_bavail * stats.f_frsize)
}

/// Says so when the free space of any directory is too small for its share.
pub(crate) fn require_space(dirs: &[PathBuf], bytes_each: u64) -> Result<(), TierError> {
    for dir in dirs {
        // Directories on one file system share its free space.
        let sharing = dirs.iter().filter(|d| same_file_system(d, dir)).count() as u64;
        let (needed, free) = (bytes_each * sharing, free_space(dir)?);
        if needed > free {
            return Err(TierError::DiskTooSmall { dir: dir.clone(), needed, free });
        }
    }
    Ok(())
}

fn same_file_system(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => a.dev() == b.dev(),
        _ => false,
    }
}

/// Whether opening failed only because the file is not there.
pub(crate) fn is_missing(error: &IoError) -> bool {
    error.kind == IoErrorKind::NotFound
}
