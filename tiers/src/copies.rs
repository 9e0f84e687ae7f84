//! What a store cannot be read without is in its files twice: the header and the layout of the manifest, and the header of every
//! file of a volume.
//!
//! The copies lie at the two ends of a file, in blocks of their own, so that neither a block nor its neighbours hold both. Both
//! are durable before anything is committed, and none is written again while it is whole. Whichever copy is whole is used. The
//! other is written anew from it by whoever opens the store to change it; cut off, that leaves the copy as damaged as it was.
//!
//! A copy that the drive cannot read counts as damaged; any other failure of a request is the caller's.

use crate::{FilePart, TierError};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, IoErrorKind, Request};

/// One of two copies that is not as it was written; the other is.
#[derive(Debug, Clone)]
pub struct DamagedCopy {
    /// What it is a copy of, in words: "header", "layout".
    pub what: &'static str,
    /// Where it lies.
    pub part: FilePart,
    /// What the drive said, if it did not give other bytes than were written.
    pub unreadable: Option<IoError>,
}

/// A damaged copy and the bytes that belong there.
#[derive(Debug)]
pub(crate) struct Mend {
    pub(crate) copy: DamagedCopy,
    file: FileId,
    bytes: IoBuf,
}

/// A copy as the drive gave it, or the error that it gave.
pub(crate) type Read = Result<IoBuf, IoError>;

/// Reads a copy.
///
/// # Errors
/// The request failed, and not because the drive cannot read this place.
pub(crate) fn read(
    engine: &Arc<dyn IoEngine>,
    file: FileId,
    offset: u64,
    len: usize,
) -> Result<Read, TierError> {
    match engine.submit(Request::read(file, offset, IoBuf::zeroed(len))).wait() {
        Err(error) if error.kind != IoErrorKind::Device => Err(error.into()),
        read => Ok(read),
    }
}

impl Mend {
    /// `read` is what was found at `offset` of the file at `path`, where `bytes` belong.
    pub(crate) fn new(
        what: &'static str,
        (file, path): (FileId, &Path),
        offset: u64,
        read: Read,
        bytes: IoBuf,
    ) -> Self {
        let part = FilePart { path: path.to_owned(), offset, len: bytes.len() as u64 };
        Self { copy: DamagedCopy { what, part, unreadable: read.err() }, file, bytes }
    }

    /// Writes the copy anew, durably.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn write(&self, engine: &Arc<dyn IoEngine>) -> Result<(), TierError> {
        let mut bytes = IoBuf::zeroed(self.bytes.len());
        bytes.copy_from_slice(&self.bytes);
        engine.submit(Request::write(self.file, self.copy.part.offset, bytes)).wait()?;
        engine.sync(self.file).wait()?;
        Ok(())
    }
}

impl fmt::Display for DamagedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FilePart { path, offset, len } = &self.part;
        write!(
            f,
            "one of two copies of the {}, {len} bytes at offset {offset} of {}",
            self.what,
            path.display()
        )?;
        match &self.unreadable {
            Some(error) => write!(f, ", cannot be read ({error})"),
            None => write!(f, ", is damaged"),
        }
    }
}
