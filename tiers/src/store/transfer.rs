//! Chunks on their way between the store and memory: reads in two halves, waiting and verifying, and writes whose checksum is
//! taken before. The halves that are work need nothing of the store, so that a caller can do them on any thread.

use crate::pool::Lease;
use crate::volume::Volume;
use crate::{TierError, checksum};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::Ticket;

/// A read in flight, verified when it is waited for.
#[derive(Debug)]
#[must_use = "the bytes are only trusted after `wait`"]
pub struct PendingRead {
    ticket: Ticket,
    checks: Vec<Check>,
    paths: Arc<[PathBuf]>,
    label: String,
}

/// Bytes that a read brought, not yet compared with what was written.
#[derive(Debug)]
#[must_use = "the bytes are only trusted after `verify`"]
pub struct Arrived {
    lease: Lease,
    checks: Vec<Check>,
    paths: Arc<[PathBuf]>,
    label: String,
}

/// A chunk with its checksum, which is fixed from here on: what [`write_sealed`](crate::DiskStore::write_sealed) takes.
#[derive(Debug)]
#[must_use = "a sealed chunk is not written yet"]
pub struct Sealed {
    pub(super) lease: Lease,
    pub(super) sum: u64,
}

/// One chunk in the buffer of a read: where it is there, what it must be, and where it came from.
#[derive(Debug)]
pub(crate) struct Check {
    pub(crate) start: usize,
    pub(crate) len: usize,
    pub(crate) sum: u64,
    pub(crate) chunk: usize,
    /// The file that it begins in.
    pub(crate) file: usize,
    pub(crate) offset: u64,
}

impl PendingRead {
    pub(crate) fn new(ticket: Ticket, checks: Vec<Check>, volume: &Volume, label: String) -> Self {
        Self { ticket, checks, paths: Arc::clone(&volume.paths), label }
    }

    /// Whether the transfer is done, so that [`wait`](Self::wait) would not block.
    pub fn is_done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Waits for the bytes and verifies the checksum of every chunk.
    ///
    /// # Errors
    /// The transfer failed, or the bytes are not those that were written.
    pub fn wait(self) -> Result<Lease, TierError> {
        self.arrive()?.verify()
    }

    /// Waits for the bytes alone: the first half of [`wait`](Self::wait), which is all waiting.
    ///
    /// # Errors
    /// The transfer failed.
    pub fn arrive(self) -> Result<Arrived, TierError> {
        let Self { ticket, checks, paths, label } = self;
        Ok(Arrived { lease: Lease::from_io(ticket.wait()?), checks, paths, label })
    }
}

impl Sealed {
    /// Sums a chunk, on the calling thread.
    pub fn new(lease: Lease) -> Self {
        let sum = checksum(&lease);
        Self { lease, sum }
    }

    /// What was sealed.
    pub fn bytes(&self) -> &[u8] {
        &self.lease
    }
}

impl Arrived {
    /// Verifies the checksum of every chunk, on the calling thread: the second half of [`PendingRead::wait`], which is all
    /// work.
    ///
    /// # Errors
    /// The bytes are not those that were written.
    pub fn verify(self) -> Result<Lease, TierError> {
        let lease = self.lease;
        for Check { start, len, sum, chunk, file, offset } in self.checks {
            let found = checksum(&lease[start..start + len]);
            if found != sum {
                let label = self.label;
                let detail = format!(
                    "{label}, chunk {chunk} at offset {offset}, {len} bytes: checksum {found:016x} instead of {sum:016x}; the \
                     drive returned other bytes than were written"
                );
                return Err(TierError::Damaged { path: self.paths[file].clone(), detail });
            }
        }
        Ok(lease)
    }
}
