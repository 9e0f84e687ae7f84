//! One request inside a real engine: checked, resolved to open files, and shared by the operations that move it.
//!
//! A job owns the request's buffer until its last operation has finished, whatever happens to the ticket and to
//! the other operations; only then is the ticket resolved. That is the rule that keeps kernel writes away from
//! memory somebody else owns. Finished jobs are used again, so that a request in steady state allocates nothing.

use super::files::{FileTable, FileUse};
use super::progress::Failure;
use super::split::{Alignment, Cursor, Piece, Route};
use super::{FileId, OpKind, Request, Segment};
use crate::{Completer, IoBuf, IoError, IoErrorKind, Ticket, Urgency};
use smallvec::SmallVec;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request in flight.
#[derive(Debug)]
pub(crate) struct Job {
    /// `None` for an `fdatasync`.
    kind: Option<OpKind>,
    base: BasePtr,
    segments: SmallVec<[Segment; 4]>,
    files: SmallVec<[FileUse; 4]>,
    alignments: SmallVec<[Alignment; 4]>,
    block_bytes: usize,
    urgency: Urgency,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Taken when the last piece finishes.
    owned: Option<(IoBuf, Completer)>,
    error: Option<IoError>,
    pieces_left: usize,
}

/// The address of the job's buffer, which the job owns until its last piece is finished.
#[derive(Debug, Clone, Copy)]
struct BasePtr(*mut u8);

// SAFETY: the pointer is only an address; whoever dereferences it does so under the rules of `Job::address`.
unsafe impl Send for BasePtr {}
// SAFETY: as above.
unsafe impl Sync for BasePtr {}

/// Finished jobs, for the next requests.
#[derive(Debug, Default)]
pub(crate) struct JobPool(Mutex<Vec<Arc<Job>>>);

/// Finished jobs kept at most.
const SPARE_MAX: usize = 1024;

/// What is left of a finished request: its ticket is to get the buffer, or the error.
#[derive(Debug)]
#[must_use = "the ticket waits for it"]
struct Outcome {
    buf: IoBuf,
    completer: Completer,
    error: Option<IoError>,
}

impl JobPool {
    /// A job that nobody else has.
    fn take(&self) -> Arc<Job> {
        let spare = self.lock().pop();
        spare.unwrap_or_else(|| Arc::new(Job::idle()))
    }

    /// Counts a piece as finished. The last one hands the buffer, or the first error, to the ticket; before that the
    /// job's files are let go, so that whoever waits for the ticket can close them. Returns whether it was the last.
    pub fn finish_piece(&self, mut job: Arc<Job>, result: Result<(), IoError>) -> bool {
        // A thread lets go of its reference under the lock under which it counts its piece, so the last one has the job to
        // itself.
        let mut spare = self.lock();
        let Some(Outcome { buf, completer, error }) = job.finish_piece(result) else {
            drop(job);
            return false;
        };
        if let Some(unshared) = Arc::get_mut(&mut job) {
            unshared.clear();
            if spare.len() < SPARE_MAX {
                spare.push(job);
            }
        } else {
            // Whoever still walks the pieces of a cancelled request.
            drop(job);
        }
        drop(spare);
        let result = match error {
            None => Ok(buf),
            Some(error) => {
                // The buffer goes home before the error is seen, so that a retry finds it there.
                drop(buf);
                Err(error)
            }
        };
        completer.complete(result);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a request against the table and gives its job to `enqueue`. Where there is nothing to move, or the request
    /// is refused, there is no job: the ticket is resolved already.
    pub fn transfer(
        &self,
        request: Request,
        table: &FileTable,
        block_bytes: usize,
        enqueue: impl FnOnce(Arc<Job>),
    ) -> Ticket {
        let (ticket, completer) = Ticket::new();
        let Request { kind, mut buf, segments, urgency } = request;
        let doing = doing(Some(kind));
        let files = check_segments(doing, kind, buf.len(), &segments, |id| table.acquire(doing, id))
            .and_then(|files: SmallVec<[FileUse; 4]>| {
                check_writable(kind, &segments, &files).map(|()| files)
            });
        match files {
            Ok(files) => {
                let mut job = self.take();
                let fresh = Arc::get_mut(&mut job).expect("nobody else has an idle job");
                fresh.kind = Some(kind);
                fresh.base = BasePtr(buf.as_mut_ptr());
                fresh.block_bytes = block_bytes;
                fresh.urgency = urgency;
                self.start(job, segments, files, (buf, completer), enqueue);
            }
            Err(error) => completer.complete(Err(error)),
        }
        ticket
    }

    /// As [`transfer`](Self::transfer), with a job that makes a file durable.
    pub fn sync(&self, file: FileId, table: &FileTable, enqueue: impl FnOnce(Arc<Job>)) -> Ticket {
        let (ticket, completer) = Ticket::new();
        match table.acquire("syncing", file) {
            Ok(file_use) => {
                let segments = SmallVec::from_slice(&[Segment { file, offset: 0, start: 0, len: 0 }]);
                let files = SmallVec::from_iter([file_use]);
                self.start(self.take(), segments, files, (IoBuf::empty(), completer), enqueue);
            }
            Err(error) => completer.complete(Err(error)),
        }
        ticket
    }

    fn start(
        &self,
        mut job: Arc<Job>,
        segments: SmallVec<[Segment; 4]>,
        files: SmallVec<[FileUse; 4]>,
        owned: (IoBuf, Completer),
        enqueue: impl FnOnce(Arc<Job>),
    ) {
        let fresh = Arc::get_mut(&mut job).expect("nobody else has an idle job");
        fresh.alignments.extend(files.iter().map(|file| file.alignment));
        fresh.segments = segments;
        fresh.files = files;
        let mut counter = Cursor::default();
        let pieces = std::iter::from_fn(|| fresh.next_piece(&mut counter)).count();
        let state = fresh.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.owned = Some(owned);
        state.pieces_left = pieces.max(1);
        if pieces == 0 {
            self.finish_piece(job, Ok(()));
        } else {
            enqueue(job);
        }
    }
}

impl Job {
    fn idle() -> Self {
        Self {
            kind: None,
            base: BasePtr(std::ptr::null_mut()),
            segments: SmallVec::new(),
            files: SmallVec::new(),
            alignments: SmallVec::new(),
            block_bytes: 0,
            urgency: Urgency::default(),
            state: Mutex::new(State { owned: None, error: None, pieces_left: 0 }),
        }
    }

    fn clear(&mut self) {
        self.kind = None;
        self.urgency = Urgency::default();
        self.base = BasePtr(std::ptr::null_mut());
        self.segments.clear();
        self.files.clear();
        self.alignments.clear();
    }

    /// The devices that the request touches, each once.
    pub fn devices(&self) -> SmallVec<[u64; 4]> {
        let mut devices: SmallVec<[u64; 4]> = self.files.iter().map(|file| file.device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Direction; `None` for an `fdatasync`.
    pub fn kind(&self) -> Option<OpKind> {
        self.kind
    }

    /// Whether it goes ahead of others.
    pub fn urgency(&self) -> Urgency {
        self.urgency
    }

    /// The next piece to move.
    pub fn next_piece(&self, cursor: &mut Cursor) -> Option<Piece> {
        if self.kind.is_none() {
            return cursor.next_sync();
        }
        let device = cursor.device();
        let included = |segment: usize| device.is_none_or(|device| self.files[segment].device == device);
        cursor.next(&self.segments, &self.alignments, included, self.base.0 as usize, self.block_bytes)
    }

    /// The file of a piece.
    pub fn file(&self, piece: &Piece) -> &FileUse {
        &self.files[piece.segment]
    }

    /// What a piece's transfers must be multiples of.
    pub fn unit(&self, piece: &Piece) -> usize {
        match piece.route {
            Route::Direct | Route::Bounce => self.alignments[piece.segment].offset,
            Route::Edge | Route::Sync => 1,
        }
    }

    /// The address of a piece's first byte. It is valid for `piece.len` bytes until the piece is finished; nothing but
    /// the operation that moves the piece may touch those bytes until then.
    pub fn address(&self, piece: &Piece) -> *mut u8 {
        // SAFETY: `check_segments` made sure that every segment lies inside the buffer.
        unsafe { self.base.0.add(piece.start) }
    }

    fn finish_piece(&self, result: Result<(), IoError>) -> Option<Outcome> {
        let mut state = self.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.pieces_left -= 1;
        if state.pieces_left > 0 {
            return None;
        }
        let error = state.error.take();
        let (buf, completer) = state.owned.take()?;
        Some(Outcome { buf, completer, error })
    }

    /// Whether moving the rest is pointless: a piece has failed, or the owner has cancelled the request.
    pub fn is_over(&self) -> bool {
        let mut state = self.lock();
        if state.error.is_some() {
            return true;
        }
        if !state.owned.as_ref().is_some_and(|(_, completer)| completer.is_cancelled()) {
            return false;
        }
        let segment = &self.segments[0];
        let detail = "the request was cancelled before all of it was started".to_owned();
        let (path, bytes) = (&self.files[0].path, segment.len as u64);
        let (kind, doing) = (IoErrorKind::Cancelled, doing(self.kind));
        state.error = Some(IoError::new(kind, doing, path, segment.offset, bytes, detail));
        true
    }

    /// Forgets the buffer and the ticket, for when the kernel may still be writing: a leak, and a `Closed` error.
    pub fn leak(&self) {
        if let Some((buf, completer)) = self.lock().owned.take() {
            std::mem::forget(buf);
            drop(completer);
        }
    }

    /// The error for a piece that failed after `known` bytes. It names the whole segment, as the caller knows it.
    pub fn error(&self, piece: &Piece, known: usize, failure: Failure) -> IoError {
        let segment = &self.segments[piece.segment];
        let file = &self.files[piece.segment];
        // Pieces run at once, and one beyond the end may be the first to notice: ask for the real end.
        let at = match failure {
            Failure::Eof => file.len_bytes().unwrap_or(piece.offset + known as u64),
            _ => piece.offset + known as u64,
        };
        transfer_error(self.kind, &file.path, segment, at, failure)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error for a transfer that failed at file offset `at`.
pub(crate) fn transfer_error(
    kind: Option<OpKind>,
    path: &Path,
    segment: &Segment,
    at: u64,
    failure: Failure,
) -> IoError {
    let (doing, offset, len) = (doing(kind), segment.offset, segment.len as u64);
    let (error_kind, detail) = match failure {
        Failure::Errno(errno) => {
            return IoError::from_os(doing, path, offset, len, &io::Error::from_raw_os_error(errno));
        }
        Failure::Eof => (IoErrorKind::UnexpectedEof, format!("the file ends at byte {at}")),
        Failure::Stuck => (IoErrorKind::Device, format!("no byte was accepted at {at}, without an error")),
        Failure::Overrun => (IoErrorKind::Device, format!("more bytes were reported than asked for at {at}")),
    };
    IoError::new(error_kind, doing, path, offset, len, detail)
}

/// The verb for an operation.
pub(crate) fn doing(kind: Option<OpKind>) -> &'static str {
    match kind {
        Some(OpKind::Read) => "reading",
        Some(OpKind::Write) => "writing",
        None => "syncing",
    }
}

/// What an error calls a file of which the path is not known.
pub(crate) fn nameless(file: FileId) -> PathBuf {
    PathBuf::from(format!("file id {}", file.0))
}

/// Checks the ranges of a request and looks up its files.
pub(crate) fn check_segments<F, C: FromIterator<F>>(
    doing: &'static str,
    kind: OpKind,
    buf_len: usize,
    segments: &[Segment],
    mut acquire: impl FnMut(FileId) -> Result<F, IoError>,
) -> Result<C, IoError> {
    let invalid = |s: &Segment, detail: String| {
        IoError::new(IoErrorKind::Invalid, doing, &nameless(s.file), s.offset, s.len as u64, detail)
    };
    for s in segments {
        if s.start.checked_add(s.len).is_none_or(|end| end > buf_len) {
            let detail = format!("bytes {}+{} are not inside the buffer of {buf_len} bytes", s.start, s.len);
            return Err(invalid(s, detail));
        }
        if s.offset.checked_add(s.len as u64).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(invalid(s, "the range ends beyond the largest file offset".to_owned()));
        }
    }
    if kind == OpKind::Read && segments.len() > 1 {
        let mut sorted: SmallVec<[&Segment; 8]> = segments.iter().filter(|s| s.len > 0).collect();
        sorted.sort_unstable_by_key(|s| s.start);
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].start + pair[0].len > pair[1].start) {
            return Err(invalid(pair[1], "two segments of a read overlap in the buffer".to_owned()));
        }
    }
    segments.iter().map(|s| acquire(s.file)).collect()
}

fn check_writable(kind: OpKind, segments: &[Segment], files: &[FileUse]) -> Result<(), IoError> {
    if kind == OpKind::Read {
        return Ok(());
    }
    match segments.iter().zip(files).find(|(_, file)| !file.writable) {
        None => Ok(()),
        Some((segment, file)) => Err(read_only(&file.path, segment)),
    }
}

/// The error for writing to a file that was opened with [`OpenMode::Read`](super::OpenMode::Read).
pub(crate) fn read_only(path: &Path, segment: &Segment) -> IoError {
    let detail = "the file was opened for reading only".to_owned();
    IoError::new(IoErrorKind::Denied, "writing", path, segment.offset, segment.len as u64, detail)
}
