//! A file that is open as long as somebody has it.

use std::path::Path;
use std::sync::Arc;
use terrace_aio::{FileId, IoEngine, IoError, OpenMode};

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
