//! The last commit as it is, for a reader that takes its time.

use super::{Committed, DiskStore};
use crate::pool::Lease;
use crate::{BlobKey, Generation, PendingRead, StoreSpec, TierError};
use std::ops::Range;
use std::sync::Arc;

/// Keeps the last commit from being overwritten until it is dropped: the next generation may be written meanwhile, but its commit
/// waits. Where there is but one generation, its first write waits.
#[derive(Debug)]
pub struct Held {
    store: Arc<DiskStore>,
    committed: Committed,
}

impl DiskStore {
    /// Holds the last commit. Not to be called while another thread commits.
    ///
    /// # Errors
    /// There is no commit, one failed, so that it is not known which is the last, or the only generation is being overwritten.
    pub fn hold(self: &Arc<Self>) -> Result<Held, TierError> {
        let mut versions = self.lock();
        self.require_certain(&versions)?;
        if versions.is_changing {
            drop(versions);
            return Err(self.changing());
        }
        self.require_commit(&versions)?;
        versions.held += 1;
        Ok(Held { store: Arc::clone(self), committed: versions.committed.clone() })
    }
}

impl Held {
    /// What the commit said.
    pub fn committed(&self) -> &Committed {
        &self.committed
    }

    /// The layout.
    pub fn spec(&self) -> &StoreSpec {
        self.store.spec()
    }

    /// As [`DiskStore::read`] of what is held.
    ///
    /// # Errors
    /// As [`DiskStore::read`].
    ///
    /// # Panics
    /// If the lease has another length.
    pub fn read(&self, key: BlobKey, chunks: Range<usize>, lease: Lease) -> Result<PendingRead, TierError> {
        self.store.read(key, chunks, Generation::Live, lease)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.store.lock().held -= 1;
        self.store.released.notify_all();
    }
}
