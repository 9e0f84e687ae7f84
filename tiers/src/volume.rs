//! A byte address space striped over one file in each of several directories.
//!
//! ```text
//! address     0 ......... S ......... 2S ........ 3S ........ 4S ........
//! stripe      0           1           2           3           4          (S = STRIPE_BYTES)
//! two paths   dir0 #0     dir1 #0     dir0 #1     dir1 #1     dir0 #2
//! 3 : 1       dir0 #0     dir0 #1     dir1 #0     dir0 #2     dir0 #3    cycle 0 0 1 0
//!
//! file        | header page (4 KiB) | stripe #0 | stripe #1 | … as many as the path has | the header page once more |
//!
//! header, version 3
//!  0 | magic 8 | version 4 | index 4 | count 4 | cycle entries 4 | volume id 8 | bytes 8 |
//! 40 | checksum of this page without these 8 | cycle 1·n: the path of each entry | zeros |
//! ```
//! Which path a stripe lies on is said by the cycle ([`crate::stripe`]), which follows the speed of the paths when a volume is
//! made and is a property of its files from then on. Version 2 had no second copy of the header. Version 1 neither, and zeros
//! instead of a cycle and a checksum of the first 40 bytes; its paths take turns, which is the cycle 0 1 … count−1.
//!
//! Data are found by the header alone, so it is there twice ([`crate::copies`]): either copy may be damaged. Without the first one,
//! the second is the last page of the file.
//!
//! The header ties the files of a volume together: a directory that belongs to another run, or directories given in
//! another order, are recognised before anything is read.

use crate::copies::{self, DamagedCopy, Mend};
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
const VERSION: u32 = 3;
/// The id of volumes that do not outlive their process.
pub(crate) const SCRATCH_ID: u64 = 0;
/// The first version whose header is there twice.
const TWICE_SINCE: u32 = 3;
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
    /// Copies of headers that are damaged.
    mends: Vec<Mend>,
}

/// What a file says about the volume that it is part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    version: u32,
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) id: u64,
    bytes: u64,
    cycle: Cycle,
}

/// What has the name of a file of a volume.
#[derive(Debug)]
pub(crate) enum Found {
    /// No file.
    Nothing,
    /// What a creation leaves that was cut off: zeros, or a header that is not whole.
    Unfinished,
    Part(Part),
    /// What this program did not make.
    Foreign,
}

/// What a page is that should be a header.
#[derive(Debug, PartialEq, Eq)]
enum Header {
    /// Nothing of the kind.
    None,
    /// One whose checksum is wrong.
    Damaged,
    /// One of a version that this program does not know.
    Unknown(u32),
    Part(Part),
}

impl Volume {
    /// Bytes of each directory's file for a new volume of `bytes`.
    pub(crate) fn file_bytes(bytes: u64, striping: &Striping) -> Vec<u64> {
        let cycle = striping.cycle();
        (0..cycle.paths()).map(|path| file_bytes(VERSION, bytes, cycle, path)).collect()
    }

    /// Bytes of each directory's file.
    pub(crate) fn lengths(&self) -> Vec<u64> {
        let cycle = self.striping.cycle();
        (0..cycle.paths()).map(|path| file_bytes(self.version, self.bytes, cycle, path)).collect()
    }

    pub(crate) fn create(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        name: &str,
        bytes: u64,
        id: u64,
    ) -> Result<Self, TierError> {
        let paths: Arc<[PathBuf]> = striping.dirs().iter().map(|d| d.join(name)).collect();
        let mut volume = Self {
            engine: Arc::clone(engine),
            files: Vec::new(),
            paths,
            striping: striping.clone(),
            bytes,
            version: VERSION,
            mends: Vec::new(),
        };
        volume.create_files(id).inspect_err(|_| {
            // Those that there are. What cannot be removed is left to the next creation.
            let _ = volume.remove();
        })?;
        Ok(volume)
    }

    fn create_files(&mut self, id: u64) -> Result<(), TierError> {
        let (engine, bytes) = (&self.engine, self.bytes);
        for (index, path) in self.paths.iter().enumerate() {
            if engine.exists(path) {
                engine.remove(path)?;
            }
            let (index, count, cycle) =
                (index as u32, self.paths.len() as u32, self.striping.cycle().clone());
            let part = Part { version: VERSION, index, count, id, bytes, cycle };
            let file = OpenFile::open(engine, path, OpenMode::CreateNew { len: part.file_bytes() })?;
            let file_id = file.id;
            self.files.push(file);
            for at in [0, part.copy_at()] {
                engine.submit(Request::write(file_id, at, part.encode())).wait()?;
            }
            engine.sync(file_id).wait()?;
        }
        Ok(())
    }

    /// Makes a volume that does not outlive the process, and its directories if need be. A file that an earlier one left behind is
    /// replaced; its space counts as free. What else has its name is refused.
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
            }
            let olds: Vec<PathBuf> = striping.dirs().iter().map(|dir| dir.join(name)).collect();
            for old in &olds {
                match Self::find(engine, old)? {
                    Found::Part(part) if part.id != SCRATCH_ID => return Err(not_ours(old)),
                    Found::Foreign => return Err(not_ours(old)),
                    Found::Part(_) | Found::Unfinished | Found::Nothing => {}
                }
            }
            for old in olds.iter().filter(|old| engine.exists(old)) {
                engine.remove(old)?;
            }
            require_space(striping.dirs(), &Self::file_bytes(bytes, striping))?;
        }
        Self::create(engine, striping, name, bytes, SCRATCH_ID)
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
        let (mut version, mut mends) = (VERSION, Vec::new());
        for (index, path) in paths.iter().enumerate() {
            let foreign = |detail| TierError::Foreign { path: path.clone(), detail };
            let file = OpenFile::open(engine, path, mode).map_err(|error| match error {
                error if is_missing(&error) => foreign(
                    "is not there, and holds a part of the training state: mount its drive, or restore it from a copy".to_owned(),
                ),
                other => other.into(),
            })?;
            let (header, mend) = find_header(engine, &file, path)?;
            let place = (index as u32, paths.len() as u32, id, bytes);
            let part = match header {
                Header::Part(part) if (part.index, part.count, part.id, part.bytes) == place => part,
                Header::Unknown(version) => {
                    return Err(foreign(format!(
                        "has format version {version}, or a damaged header; this program reads versions 1 to {VERSION}"
                    )));
                }
                Header::Damaged => {
                    let detail = format!(
                        "its header, the first {HEADER_BYTES} bytes, has a wrong checksum, and the last {HEADER_BYTES} are no copy of it"
                    );
                    return Err(TierError::NoLayout { path: path.clone(), detail });
                }
                Header::Part(_) | Header::None => {
                    return Err(foreign(format!(
                        "does not belong to path {} of {} of this run; give the EngineConfig::disks of the run in their original order",
                        index + 1,
                        paths.len()
                    )));
                }
            };
            let damaged = |detail| Err(TierError::NoLayout { path: path.clone(), detail });
            let (len, needed) = (engine.len(file.id)?, part.file_bytes());
            version = part.version;
            let cycle = cycle.get_or_insert_with(|| part.cycle.clone());
            if *cycle != part.cycle {
                return damaged(format!("it shares stripes in another way than {}", paths[0].display()));
            }
            if len < needed {
                return damaged(format!("the file has {len} bytes and needs {needed}: it was truncated"));
            }
            mends.extend(mend);
            files.push(file);
        }
        let striping = Striping::with_cycle(dirs, cycle.expect("a volume has at least one path"));
        Ok(Self { engine: Arc::clone(engine), files, paths, striping, bytes, version, mends })
    }

    /// Copies of headers that were damaged when the volume was opened.
    pub(crate) fn damaged_copies(&self) -> impl Iterator<Item = &DamagedCopy> {
        self.mends.iter().map(|mend| &mend.copy)
    }

    /// Writes them anew.
    pub(crate) fn mend(&self) -> Result<(), TierError> {
        self.mends.iter().try_for_each(|mend| mend.write(&self.engine))
    }

    /// What the file at `path` is. Both headers must be readable.
    pub(crate) fn find(engine: &Arc<dyn IoEngine>, path: &Path) -> Result<Found, TierError> {
        let file = match OpenFile::open(engine, path, OpenMode::Read) {
            Ok(file) => file,
            Err(error) if is_missing(&error) => return Ok(Found::Nothing),
            Err(error) => return Err(error.into()),
        };
        let blank_or_foreign = || match file.is_blank() {
            Ok(true) => Ok(Found::Unfinished),
            Ok(false) => Ok(Found::Foreign),
            Err(error) => Err(error.into()),
        };
        if engine.len(file.id)? < HEADER_BYTES {
            return blank_or_foreign();
        }
        let (header, mend) = find_header(engine, &file, path)?;
        if let Some(error) = mend.and_then(|mend| mend.copy.unreadable) {
            return Err(error.into());
        }
        match header {
            Header::Part(part) => Ok(Found::Part(part)),
            Header::Damaged => Ok(Found::Unfinished),
            Header::None => blank_or_foreign(),
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
        Request::new(kind, buf, segments)
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
        Ok(wait_all(self.begin_sync())?)
    }

    /// Begins to.
    pub(crate) fn begin_sync(&self) -> Vec<Ticket> {
        self.files.iter().map(|file| self.engine.sync(file.id)).collect()
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

/// Says of a file that is in the way that nobody but its owner can know what it is.
pub(crate) fn not_ours(path: &Path) -> TierError {
    let detail = "has a name that is needed here, and was not left by an earlier run; move it away, or choose another directory";
    TierError::StateExists { path: path.to_owned(), detail: detail.into() }
}

/// Waits for every ticket, so that nothing is in flight afterwards, and gives the first error.
pub(crate) fn wait_all(tickets: impl IntoIterator<Item = Ticket>) -> Result<(), IoError> {
    let mut first = Ok(());
    for ticket in tickets {
        let result = ticket.wait();
        if first.is_ok() {
            first = result.map(drop);
        }
    }
    first
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

fn file_bytes(version: u32, bytes: u64, cycle: &Cycle, path: usize) -> u64 {
    let headers = if version < TWICE_SINCE { 1 } else { 2 };
    headers * HEADER_BYTES + cycle.stripes_on(path, bytes.div_ceil(STRIPE_BYTES)) * STRIPE_BYTES
}

/// The header of the file at `path`, from a copy that is whole, and the other one if it is damaged. If neither is whole, the header
/// is what the first page is.
fn find_header(
    engine: &Arc<dyn IoEngine>,
    file: &OpenFile,
    path: &Path,
) -> Result<(Header, Option<Mend>), TierError> {
    let read = |at| copies::read(engine, file.id, at, HEADER_BYTES as usize);
    let mend = |at, found, part: &Part| Mend::new("header", (file.id, path), at, found, part.encode());
    let (first, len) = (read(0)?, engine.len(file.id)?);
    let header = first.as_ref().map_or(Header::Damaged, |page| Header::decode(page));
    if let Header::Part(part) = header {
        // Of a file that was truncated this is not what matters.
        if part.version < TWICE_SINCE || len < part.file_bytes() {
            return Ok((Header::Part(part), None));
        }
        let second = read(part.copy_at())?;
        let is_whole = second.as_ref().is_ok_and(|page| Header::decode(page).is(&part));
        let mend = (!is_whole).then(|| mend(part.copy_at(), second, &part));
        return Ok((Header::Part(part), mend));
    }
    let last = len.checked_sub(HEADER_BYTES).filter(|at| *at > 0 && at.is_multiple_of(HEADER_BYTES));
    let second = last.map(read).transpose()?;
    if let (Some(last), Some(Ok(page))) = (last, &second)
        && let Header::Part(part) = Header::decode(page)
        && part.version >= TWICE_SINCE
        && part.copy_at() == last
    {
        let mend = mend(0, first, &part);
        return Ok((Header::Part(part), Some(mend)));
    }
    first?;
    match (header, second) {
        // What cannot be read may be the header.
        (Header::None | Header::Damaged, Some(Err(error))) => Err(error.into()),
        (header, _) => Ok((header, None)),
    }
}

impl Part {
    fn file_bytes(&self) -> u64 {
        file_bytes(self.version, self.bytes, &self.cycle, self.index as usize)
    }

    /// Where the second copy of the header is.
    fn copy_at(&self) -> u64 {
        self.file_bytes() - HEADER_BYTES
    }

    fn encode(&self) -> IoBuf {
        let table = self.cycle.table();
        let mut page = IoBuf::zeroed(HEADER_BYTES as usize);
        page[0..8].copy_from_slice(&MAGIC);
        for (at, half) in [(8, self.version), (12, self.index), (16, self.count), (20, table.len() as u32)] {
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
            _ if page[0..8] != MAGIC => return Self::None,
            1 => is_sound(checksum(&page[..40])).then(|| Cycle::equal(count as usize)),
            2..=VERSION => {
                let mut blank = page.to_vec();
                blank[40..48].fill(0);
                let end = CYCLE_AT + (half(20) as usize).min(PATHS_MAX);
                let is_sound = is_sound(checksum(&blank));
                is_sound.then(|| Cycle::from_table(&page[CYCLE_AT..end], count as usize)).flatten()
            }
            other => return Self::Unknown(other),
        };
        let part = |cycle| Part { version, index: half(12), count, id: word(24), bytes: word(32), cycle };
        cycle.map(part).filter(|part| part.index < part.count).map_or(Self::Damaged, Self::Part)
    }

    fn is(&self, part: &Part) -> bool {
        matches!(self, Self::Part(other) if other == part)
    }
}

fn version_of(page: &[u8]) -> u32 {
    u32::from_le_bytes(page[8..12].try_into().expect("four bytes"))
}

/// Bytes that an unprivileged process may still write on the file system of `dir`; `None` where that is not counted, as in ramfs.
///
/// # Errors
/// The directory cannot be examined.
pub fn free_space(dir: &Path) -> Result<Option<u64>, TierError> {
    let failed = |source| TierError::File { doing: "examining", path: dir.to_owned(), source };
    let name = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes())
        .map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
    // SAFETY: an all-zero statvfs is a valid value of that plain C struct.
    let mut stats: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is a C string and `stats` is valid for writing.
    if unsafe { libc::statvfs(name.as_ptr(), &raw mut stats) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok((stats.f_blocks > 0).then_some(stats.f_bavail * stats.f_frsize))
}

/// The directory, made absolute, or the closest one above it that exists.
pub fn existing_dir(dir: &Path) -> PathBuf {
    let whole = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    whole.ancestors().find(|path| path.is_dir()).unwrap_or(dir).to_owned()
}

/// Says so when the free space of any directory is too small for its share; `bytes` has a share for each.
pub(crate) fn require_space(dirs: &[PathBuf], bytes: &[u64]) -> Result<(), TierError> {
    for dir in dirs {
        // Directories on one file system share its free space.
        let sharing = dirs.iter().zip(bytes).filter(|(other, _)| same_file_system(other, dir));
        let needed = sharing.map(|(_, bytes)| bytes).sum();
        // Where it is not counted, reserving it finds that there is none.
        let Some(free) = free_space(dir)? else { continue };
        if needed > free {
            return Err(TierError::DiskTooSmall {
                what: "the training state",
                smaller: "add another directory to EngineConfig::disks, or choose a smaller StateFormat",
                dir: dir.clone(),
                needed,
                free,
                fits_once: false,
            });
        }
    }
    Ok(())
}

/// Whether two directories that exist share free space.
pub fn same_file_system(a: &Path, b: &Path) -> bool {
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
