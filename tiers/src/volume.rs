//! A byte address space striped over one file in each of several directories.
//!
//! ```text
//! address     0 ......... S ......... 2S ........ 3S ........ 4S ........
//! stripe      0           1           2           3           4          (S = STRIPE_BYTES)
//! two paths   dir0 #0     dir1 #0     dir0 #1     dir1 #1     dir0 #2
//! 3 : 1       dir0 #0     dir0 #1     dir1 #0     dir0 #2     dir0 #3    cycle 0 0 1 0
//!
//! file        | header page (4 KiB) | stripe #0 | stripe #1 | … as many as the path has
//!
//! header, version 2
//!  0 | magic 8 | version 4 | index 4 | count 4 | cycle entries 4 | volume id 8 | bytes 8 |
//! 40 | checksum of this page without these 8 | cycle 1·n: the path of each entry | zeros |
//! ```
//! Which path a stripe lies on is said by the cycle ([`crate::stripe`]), which follows the speed of the paths when a volume is
//! made and is a property of its files from then on. Version 1 had zeros instead of a cycle and a checksum of the first 40
//! bytes; its paths take turns, which is the cycle 0 1 … count−1.
//!
//! The header ties the files of a volume together: a directory that belongs to another run, or directories given in
//! another order, are recognised before anything is read.

use crate::file::OpenFile;
use crate::stripe::{CYCLE_MAX, Cycle, PATHS_MAX};
use crate::{Striping, TierError, checksum};
use smallvec::SmallVec;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::{
    FileId, IoBuf, IoEngine, IoError, IoErrorKind, OpKind, OpenMode, Request, Segment, Ticket,
};

/// Bytes of one stripe.
pub const STRIPE_BYTES: u64 = 1 << 20;

const HEADER_BYTES: u64 = 4096;
const MAGIC: [u8; 8] = *b"TRCVOLUM";
const VERSION: u32 = 2;
const CYCLE_AT: usize = 48;

const _: () = assert!(CYCLE_AT + PATHS_MAX <= HEADER_BYTES as usize && CYCLE_MAX <= PATHS_MAX);

#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) engine: Arc<dyn IoEngine>,
    files: Vec<OpenFile>,
    pub(crate) paths: Arc<[PathBuf]>,
    striping: Striping,
    bytes: u64,
    /// Of the format of the files.
    pub(crate) version: u32,
}

/// What a file says about the volume that it is part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) id: u64,
    bytes: u64,
    cycle: Cycle,
}

/// What the first page of a file is.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    /// Not a whole header.
    None,
    /// One of a version that this program does not know.
    Unknown(u32),
    Part(Part),
}

impl Volume {
    /// Bytes of each directory's file for a volume of `bytes`.
    pub(crate) fn file_bytes(bytes: u64, striping: &Striping) -> Vec<u64> {
        let cycle = striping.cycle();
        (0..cycle.paths()).map(|path| file_bytes(bytes, cycle, path)).collect()
    }

    pub(crate) fn create(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        name: &str,
        bytes: u64,
        id: u64,
    ) -> Result<Self, TierError> {
        let paths: Arc<[PathBuf]> = striping.dirs().iter().map(|d| d.join(name)).collect();
        let mut files = Vec::new();
        for (index, path) in paths.iter().enumerate() {
            if engine.exists(path) {
                engine.remove(path)?;
            }
            let cycle = striping.cycle();
            let len = file_bytes(bytes, cycle, index);
            let file = OpenFile::open(engine, path, OpenMode::CreateNew { len })?;
            let part =
                Part { index: index as u32, count: paths.len() as u32, id, bytes, cycle: cycle.clone() };
            engine.submit(Request::write(file.id, 0, part.encode())).wait()?;
            engine.sync(file.id).wait()?;
            files.push(file);
        }
        Ok(Self {
            engine: Arc::clone(engine),
            files,
            paths,
            striping: striping.clone(),
            bytes,
            version: VERSION,
        })
    }

    /// Makes a volume that does not outlive the process, and its directories if need be. A file that an earlier one left behind is
    /// replaced; its space counts as free.
    pub(crate) fn create_scratch(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        name: &str,
        bytes: u64,
    ) -> Result<Self, TierError> {
        if World::of(&**engine) == World::Real {
            for dir in striping.dirs() {
                std::fs::create_dir_all(dir).map_err(|source| TierError::File {
                    doing: "creating",
                    path: dir.clone(),
                    source,
                })?;
                let old = dir.join(name);
                if engine.exists(&old) {
                    engine.remove(&old)?;
                }
            }
            require_space(striping.dirs(), &Self::file_bytes(bytes, striping))?;
        }
        Self::create(engine, striping, name, bytes, 0)
    }

    /// Opens a volume with the striping that it was made with.
    pub(crate) fn open(
        engine: &Arc<dyn IoEngine>,
        dirs: &[PathBuf],
        name: &str,
        bytes: u64,
        id: u64,
        mode: OpenMode,
    ) -> Result<Self, TierError> {
        let paths: Arc<[PathBuf]> = dirs.iter().map(|d| d.join(name)).collect();
        let mut files = Vec::new();
        let mut cycle: Option<Cycle> = None;
        let mut version = VERSION;
        for (index, path) in paths.iter().enumerate() {
            let file = OpenFile::open(engine, path, mode)?;
            let header_page = IoBuf::zeroed(HEADER_BYTES as usize);
            let page = engine.submit(Request::read(file.id, 0, header_page)).wait()?;
            let foreign = |detail| TierError::Foreign { path: path.clone(), detail };
            let place = (index as u32, paths.len() as u32, id, bytes);
            let part = match Header::decode(&page) {
                Header::Part(part) if (part.index, part.count, part.id, part.bytes) == place => part,
                Header::Unknown(version) => {
                    return Err(foreign(format!(
                        "has format version {version}, or a damaged header; this program reads versions 1 to {VERSION}"
                    )));
                }
                Header::None if page[0..8] == MAGIC => {
                    let detail = format!("its header, the first {HEADER_BYTES} bytes, has a wrong checksum");
                    return Err(TierError::NoLayout { path: path.clone(), detail });
                }
                Header::Part(_) | Header::None => {
                    return Err(foreign(format!(
                        "does not belong to path {} of {} of this run; give the --disk paths of the run in their original order",
                        index + 1,
                        paths.len()
                    )));
                }
            };
            let damaged = |detail| Err(TierError::Damaged { path: path.clone(), detail });
            version = version_of(&page);
            let cycle = cycle.get_or_insert_with(|| part.cycle.clone());
            if *cycle != part.cycle {
                return damaged(format!("it shares stripes in another way than {}", paths[0].display()));
            }
            let (len, needed) = (engine.len(file.id)?, file_bytes(bytes, cycle, index));
            if len < needed {
                return damaged(format!("the file has {len} bytes and needs {needed}: it was truncated"));
            }
            files.push(file);
        }
        let striping = Striping::with_cycle(dirs, cycle.expect("a volume has at least one path"));
        Ok(Self { engine: Arc::clone(engine), files, paths, striping, bytes, version })
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
        match Header::decode(&page) {
            Header::Part(part) => Ok(Some(part)),
            Header::None => Ok(None),
            Header::Unknown(version) => {
                let detail = format!(
                    "is part of training state of format version {version}, which this program does not know; choose another \
                     directory"
                );
                Err(TierError::StateExists { path: path.to_owned(), detail })
            }
        }
    }

    /// The ranges of files that `len` bytes at `address` lie in: the index of the path, offset and length.
    pub(crate) fn ranges(&self, address: u64, len: u64) -> Vec<(usize, u64, u64)> {
        let end = address + len;
        let mut ranges: Vec<(usize, u64, u64)> = Vec::new();
        let mut at = address;
        while at < end {
            let (index, offset) = self.locate(at);
            let len = (STRIPE_BYTES - at % STRIPE_BYTES).min(end - at);
            match ranges.last_mut() {
                Some((last, start, sum)) if *last == index && *start + *sum == offset => *sum += len,
                _ => ranges.push((index, offset, len)),
            }
            at += len;
        }
        ranges
    }

    /// How the volume was striped when it was made.
    pub(crate) fn striping(&self) -> &Striping {
        &self.striping
    }

    /// A request for `buf.len()` bytes at `address`.
    pub(crate) fn request(&self, kind: OpKind, address: u64, buf: IoBuf) -> Request {
        let whole = 0..buf.len();
        self.request_parts(kind, address, buf, &[whole])
    }

    /// A request for `parts` of `buf`, which are apart from each other; its first byte belongs at `address`.
    pub(crate) fn request_parts(
        &self,
        kind: OpKind,
        address: u64,
        buf: IoBuf,
        parts: &[Range<usize>],
    ) -> Request {
        let end = address + buf.len() as u64;
        assert!(end <= self.bytes, "{address}..{end} lies within the volume of {} bytes", self.bytes);
        let mut segments: SmallVec<[Segment; 4]> = SmallVec::new();
        for part in parts {
            let mut start = part.start;
            while start < part.end {
                let at = address + start as u64;
                let (index, offset) = self.locate(at);
                let file = self.files[index].id;
                let len = ((STRIPE_BYTES - at % STRIPE_BYTES) as usize).min(part.end - start);
                let follows = |last: &Segment| (last.file, last.offset + last.len as u64) == (file, offset);
                match segments.last_mut().filter(|last| last.start + last.len == start && follows(last)) {
                    Some(last) => last.len += len,
                    None => segments.push(Segment { file, offset, start, len }),
                }
                start += len;
            }
        }
        Request { kind, buf, segments }
    }

    /// Gives the space of a range back to the file systems. Nothing may be in flight there.
    pub(crate) fn punch(&self, address: u64, len: u64) -> Result<(), TierError> {
        let end = address + len;
        assert!(end <= self.bytes, "{address}..{end} lies within the volume of {} bytes", self.bytes);
        let mut at = address;
        while at < end {
            let (index, offset) = self.locate(at);
            let len = (STRIPE_BYTES - at % STRIPE_BYTES).min(end - at);
            self.engine.punch_hole(self.files[index].id, offset, len)?;
            at += len;
        }
        Ok(())
    }

    /// Makes every completed write durable.
    pub(crate) fn sync(&self) -> Result<(), TierError> {
        let tickets: Vec<_> = self.files.iter().map(|f| self.engine.sync(f.id)).collect();
        wait_all(tickets)
    }

    /// The file, as an index into `paths`, and the offset of `address`.
    pub(crate) fn locate(&self, address: u64) -> (usize, u64) {
        let (path, place) = self.striping.cycle().locate(address / STRIPE_BYTES);
        (path, HEADER_BYTES + place * STRIPE_BYTES + address % STRIPE_BYTES)
    }

    /// The address of what is at `offset` of a file; `None` if it is none of this volume's, or before its first stripe.
    pub(crate) fn address(&self, file: FileId, offset: u64) -> Option<u64> {
        let path = self.files.iter().position(|own| own.id == file)?;
        let at = offset.checked_sub(HEADER_BYTES)?;
        let stripe = self.striping.cycle().stripe(path, at / STRIPE_BYTES);
        Some(stripe * STRIPE_BYTES + at % STRIPE_BYTES).filter(|&address| address < self.bytes)
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

fn file_bytes(bytes: u64, cycle: &Cycle, path: usize) -> u64 {
    HEADER_BYTES + cycle.stripes_on(path, bytes.div_ceil(STRIPE_BYTES)) * STRIPE_BYTES
}

impl Part {
    fn encode(&self) -> IoBuf {
        let table = self.cycle.table();
        let mut page = IoBuf::zeroed(HEADER_BYTES as usize);
        page[0..8].copy_from_slice(&MAGIC);
        for (at, half) in [(8, VERSION), (12, self.index), (16, self.count), (20, table.len() as u32)] {
            page[at..at + 4].copy_from_slice(&half.to_le_bytes());
        }
        page[24..32].copy_from_slice(&self.id.to_le_bytes());
        page[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        page[CYCLE_AT..CYCLE_AT + table.len()].copy_from_slice(table);
        let sum = checksum(&page);
        page[40..48].copy_from_slice(&sum.to_le_bytes());
        page
    }
}

impl Header {
    fn decode(page: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        let (version, count) = (version_of(page), half(16));
        let is_sound = |sum: u64| word(40) == sum && (1..=PATHS_MAX as u32).contains(&count);
        let cycle = match version {
            _ if page[0..8] != MAGIC => None,
            1 => is_sound(checksum(&page[..40])).then(|| Cycle::equal(count as usize)),
            VERSION => {
                let mut blank = page.to_vec();
                blank[40..48].fill(0);
                let end = CYCLE_AT + (half(20) as usize).min(PATHS_MAX);
                let is_sound = is_sound(checksum(&blank));
                is_sound.then(|| Cycle::from_table(&page[CYCLE_AT..end], count as usize)).flatten()
            }
            other => return Self::Unknown(other),
        };
        let part = |cycle| Part { index: half(12), count, id: word(24), bytes: word(32), cycle };
        cycle.map_or(Self::None, |cycle| Self::Part(part(cycle)))
    }
}

fn version_of(page: &[u8]) -> u32 {
    u32::from_le_bytes(page[8..12].try_into().expect("four bytes"))
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

/// Says so when the free space of any directory is too small for its share; `bytes` has a share for each.
pub(crate) fn require_space(dirs: &[PathBuf], bytes: &[u64]) -> Result<(), TierError> {
    for dir in dirs {
        // Directories on one file system share its free space.
        let sharing = dirs.iter().zip(bytes).filter(|(other, _)| same_file_system(other, dir));
        let (needed, free) = (sharing.map(|(_, bytes)| bytes).sum(), free_space(dir)?);
        if needed > free {
            return Err(TierError::DiskTooSmall {
                what: "the training state",
                smaller: "choose a smaller --state",
                dir: dir.clone(),
                needed,
                free,
                fits_once: false,
            });
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
