//! How bytes move: one trait, several engines.
//!
//! Every engine promises the same: a request either transfers **every** byte of every segment, resubmitting after
//! short transfers, or fails with an [`IoError`] that names the range. Requests may complete in any order; two
//! requests that overlap and are in flight together have no defined order, so callers keep a fence.
//! Offsets, lengths and addresses that are not multiples of the file's alignment are handled exactly, at the price
//! of a copy: the ends of a range go through the page cache, unsuitable memory through an engine buffer.
//!
//! [`open_default`] chooses between [`UringEngine`] and [`ThreadsEngine`]; [`SimEngine`] is a disk in memory for tests.

mod config;
mod files;
mod job;
mod progress;
mod sim;
mod split;
mod threads;
mod uring;

pub use config::{EngineChoice, EngineConfig, QUEUE_DEPTH_MAX, TRANSFER_BYTES_MAX, open_default};
pub use sim::{SimConfig, SimEngine};
pub use threads::ThreadsEngine;
pub use uring::UringEngine;

use crate::{IoBuf, IoError, Ticket};
use smallvec::SmallVec;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

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
        let len = buf.len();
        Self { kind, buf, segments: SmallVec::from_slice(&[Segment { file, offset, start: 0, len }]) }
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

    /// Starts a request. Blocks when the engine's queue is full (backpressure), never for the transfer itself.
    fn submit(&self, request: Request) -> Ticket;

    /// Starts an `fdatasync`: when it resolves, every write of this file that had completed before the call is
    /// durable. Resolves to an empty buffer.
    fn sync(&self, file: FileId) -> Ticket;
}
