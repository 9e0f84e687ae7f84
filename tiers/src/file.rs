//! A file that is open as long as somebody has it.

use std::path::Path;
use std::sync::Arc;
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, OpenMode, Request};

/// Bytes that are looked at at once.
const LOOK_BYTES: u64 = 1 << 20;

/// An open file of an engine, closed when dropped: a half-made store leaves nothing open, and its files can be replaced.
#[derive(Debug)]
pub(crate) struct OpenFile {
    engine: Arc<dyn IoEngine>,
    pub(crate) id: FileId,
}

impl OpenFile {
    pub(crate) fn open(engine: &Arc<dyn IoEngine>, path: &Path, mode: OpenMode) -> Result<Self, IoError> {
        Ok(Self { engine: Arc::clone(engine), id: engine.open(path, mode)? })
    }

    /// Whether it holds nothing but zeros, as a file does that only got its space.
    pub(crate) fn is_blank(&self) -> Result<bool, IoError> {
        let (mut at, len) = (0, self.engine.len(self.id)?);
        let mut bytes = IoBuf::zeroed(len.min(LOOK_BYTES) as usize);
        while at < len {
            bytes.set_len((len - at).min(LOOK_BYTES) as usize);
            bytes = self.engine.submit(Request::read(self.id, at, bytes)).wait()?;
            if bytes.iter().fold(0, |all, byte| all | byte) != 0 {
                return Ok(false);
            }
            at += bytes.len() as u64;
        }
        Ok(true)
    }

    /// Closes now, after the requests in flight; dropping it later does no more.
    pub(crate) fn close(&self) -> Result<(), IoError> {
        self.engine.close(self.id)
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // Already closed, or the engine is gone: nothing left to do either way.
        let _ = self.engine.close(self.id);
    }
}
