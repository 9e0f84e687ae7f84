//! How bytes move: one trait, several engines.
//!
//! Every engine promises the same: a request either transfers **every** byte of every segment, resubmitting after
//! short transfers, or fails with an [`IoError`] that names the range. Requests may complete in any order; two
//! requests that overlap and are in flight together have no defined order, so callers keep a fence. Of those that wait for a device the
//! urgent ones go first ([`Urgency`]).
//! Offsets, lengths and addresses that are not multiples of the file's alignment are handled exactly, at the price
//! of a copy: the ends of a range go through the page cache, unsuitable memory through an engine buffer.
//!
//! [`open_default`] chooses between [`UringEngine`] and [`ThreadsEngine`]; [`SimEngine`] is a disk in memory for tests.
//! The feature `tokio_uring` adds an engine over the crate of that name, for comparison.

mod config;
mod files;
mod job;
mod lanes;
mod progress;
mod sim;
mod slice;
mod split;
mod threads;
#[cfg(feature = "tokio_uring")]
mod tokio_uring;
mod uring;

pub use config::{
    BLOCK_BYTES_MAX, EngineChoice, EngineConfig, QUEUE_DEPTH_MAX, REQUESTS_MAX, RINGS_MAX,
    TRANSFER_BYTES_MAX, open_default,
};
pub use files::{create_dir_durably, sync_dir};
pub use sim::{SimConfig, SimEngine};
pub use threads::ThreadsEngine;
#[cfg(feature = "tokio_uring")]
pub use tokio_uring::TokioUringEngine;
pub use uring::UringEngine;

pub(crate) use job::check_segments;
pub(crate) use split::{Alignment, Cursor, Route};

use crate::{IoBuf, IoError, Ticket, Urgency};
use smallvec::SmallVec;
use std::fmt::{self, Debug};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A file opened in one engine. Ids of different engines must not be mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u32);

/// Direction of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// File to buffer.
    Read,
    /// Buffer to file.
    Write,
}

/// One contiguous range of a file and the range of the request's buffer that it maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The file.
    pub file: FileId,
    /// Byte offset in the file.
    pub offset: u64,
    /// First byte in the buffer.
    pub start: usize,
    /// Bytes to move.
    pub len: usize,
}

/// A read or a write of one buffer from or to one or more file ranges.
#[derive(Debug)]
pub struct Request {
    /// Direction.
    pub kind: OpKind,
    /// The memory; in flight it belongs to the engine.
    pub buf: IoBuf,
    /// The ranges. Buffer ranges of a read must not overlap.
    pub segments: SmallVec<[Segment; 4]>,
    /// Whether it goes ahead of others.
    pub urgency: Urgency,
}

impl Request {
    /// Reads `buf.len()` bytes at `offset`.
    pub fn read(file: FileId, offset: u64, buf: IoBuf) -> Self {
        Self::whole(OpKind::Read, file, offset, buf)
    }

    /// Writes `buf.len()` bytes at `offset`.
    pub fn write(file: FileId, offset: u64, buf: IoBuf) -> Self {
        Self::whole(OpKind::Write, file, offset, buf)
    }

    fn whole(kind: OpKind, file: FileId, offset: u64, buf: IoBuf) -> Self {
        let segments = SmallVec::from_slice(&[Segment { file, offset, start: 0, len: buf.len() }]);
        Self::new(kind, buf, segments)
    }

    /// Moves some ranges. Nobody waits for it soon.
    pub fn new(kind: OpKind, buf: IoBuf, segments: SmallVec<[Segment; 4]>) -> Self {
        Self { kind, buf, segments, urgency: Urgency::default() }
    }

    /// The same request with another urgency.
    #[must_use]
    pub fn with_urgency(self, urgency: Urgency) -> Self {
        Self { urgency, ..self }
    }

    /// Sum of the segments' lengths in bytes.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.len as u64).sum()
    }
}

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// An existing file, reading only.
    Read,
    /// An existing file, reading and writing.
    ReadWrite,
    /// A file that must not exist yet, preallocated to `len` bytes of zeros; fails with `NoSpace` when they do not fit.
    CreateNew {
        /// Bytes to preallocate.
        len: u64,
    },
}

/// How one open file is read and written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFacts {
    /// Whether transfers bypass the page cache.
    pub is_direct: bool,
    /// What offsets and lengths of direct transfers are multiples of, in bytes; 1 without direct I/O.
    pub offset_align: usize,
    /// What memory addresses of direct transfers are multiples of, in bytes; 1 without direct I/O.
    pub memory_align: usize,
    /// Why the file system refused direct I/O, if it did.
    pub refusal: Option<String>,
}

/// What an engine found it can do here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineFacts {
    /// What is in use, as the kernel names it: "defer_taskrun", "registered files", …
    pub features: Vec<&'static str>,
    /// Bytes of memory that are registered with the kernel at the moment.
    pub registered_bytes: u64,
    /// What was asked for and is not available, each with the reason.
    pub fallbacks: Vec<String>,
}

/// Waits for a thread of an engine to end; not where the last handle of the engine is dropped on that very thread, which ends by itself.
pub(crate) fn join(thread: std::thread::JoinHandle<()>) {
    if thread.thread().id() != std::thread::current().id() {
        // One that panicked has resolved its tickets as closed on the way out.
        let _ = thread.join();
    }
}

/// Keeps memory registered with an engine; dropping it ends that. See [`IoEngine::register`].
#[derive(Default)]
#[must_use = "dropping a registration ends it"]
pub struct Registration(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Registration {
    /// A registration that `end` takes back.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }

    /// No registration: the engine uses the memory as it uses any other.
    pub fn none() -> Self {
        Self(None)
    }

    /// Whether anything is registered.
    pub fn is_some(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registration").field(&self.is_some()).finish()
    }
}

/// Submits reads and writes and promises whole transfers. See the module documentation for the contract.
pub trait IoEngine: Send + Sync + Debug {
    /// The engine's name as users see it: "uring", "threads", "sim", …
    fn name(&self) -> &str;

    /// Opens a file, direct (`O_DIRECT`) where the file system can.
    ///
    /// # Errors
    /// What the operating system said, as an [`IoError`].
    fn open(&self, path: &Path, mode: OpenMode) -> Result<FileId, IoError>;

    /// Closes a file. Requests in flight on it finish first.
    ///
    /// # Errors
    /// The file is unknown.
    fn close(&self, file: FileId) -> Result<(), IoError>;

    /// The path a file was opened with.
    fn path(&self, file: FileId) -> Option<PathBuf>;

    /// The file's length in bytes.
    ///
    /// # Errors
    /// The file is unknown or cannot be examined.
    fn len(&self, file: FileId) -> Result<u64, IoError>;

    /// Whether a file exists at `path` in this engine's world.
    fn exists(&self, path: &Path) -> bool;

    /// Removes a file that is not open.
    ///
    /// # Errors
    /// What the operating system said.
    fn remove(&self, path: &Path) -> Result<(), IoError>;

    /// Starts a request. Blocks when the engine's queue is full of requests of its urgency (backpressure), never for the transfer itself.
    fn submit(&self, request: Request) -> Ticket;

    /// Starts requests, those of an urgency in order, taking them out of `requests` and appending their tickets: as many
    /// [`submit`](Self::submit) calls, but the engine is woken once for all of them.
    fn submit_all(&self, requests: &mut Vec<Request>, tickets: &mut Vec<Ticket>) {
        tickets.extend(requests.drain(..).map(|request| self.submit(request)));
    }

    /// Starts an `fdatasync`: when it resolves, every write of this file that had completed before the call is
    /// durable. Resolves to an empty buffer.
    fn sync(&self, file: FileId) -> Ticket;

    /// How the file is read and written here.
    ///
    /// # Errors
    /// The file is unknown.
    fn file_facts(&self, file: FileId) -> Result<FileFacts, IoError>;

    /// Gives the space of a range back to the file system; the range then reads as zeros. The file keeps its length.
    /// Does nothing where the file system cannot.
    ///
    /// # Errors
    /// The file is unknown or read-only, or what the operating system said.
    fn punch_hole(&self, file: FileId, offset: u64, len: u64) -> Result<(), IoError>;

    /// Tells the engine about memory that many requests will use, so that the kernel can keep its pages at hand
    /// instead of looking them up for every transfer. An engine without such a thing, or that is refused (the memlock
    /// limit of a user), gives [`Registration::none`] and uses the memory like any other.
    ///
    /// # Safety
    /// The `len` bytes at `start` stay mapped, at this address and with these pages, until the registration is dropped.
    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Registration {
        let _ = (start, len);
        Registration::none()
    }

    /// What the engine found it can do here.
    fn facts(&self) -> EngineFacts {
        EngineFacts::default()
    }
}
