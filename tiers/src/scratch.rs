//! Disk space for bytes that do not outlive the process: parked gradients, spilled and kept activations.
//!
//! A scratch volume is a separate file that is made anew at every start. Its checksums live in memory.

use crate::pool::Lease;
use crate::store::Check;
use crate::volume::Volume;
use crate::{Striping, TierError, checksum};
use std::sync::{Arc, Mutex, PoisonError};
use terrace_aio::{FileId, IoEngine, OpKind, Ticket, Urgency};

/// The volumes that are in the directories of a [`DiskStore`](crate::DiskStore) while a process trains. Who opens a store to change it removes
/// what one that ended without notice left of them.
pub const TRAINING_SCRATCH: [&str; 4] =
    ["activations.bin", "kept-activations.bin", "gradients.bin", "gradient-sums.bin"];

/// A scratch volume with fixed chunks.
#[derive(Debug)]
pub struct Scratch {
    volume: Volume,
    chunks: Mutex<Vec<ChunkState>>,
    chunk_stride: u64,
}

/// A fixed place in a scratch volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchChunk(pub usize);

/// Hazard (read before written): a chunk's bytes may only be read after its last write is done.
#[derive(Debug)]
enum ChunkState {
    Empty,
    Writing { ticket: Ticket, sum: u64, len: usize },
    Written { sum: u64, len: usize },
}

/// More than any file system holds; rounded up to pages it does not wrap.
const SCRATCH_BYTES_MAX: u64 = 1 << 50;

impl Scratch {
    /// Bytes that a volume of `count` chunks of up to `chunk_bytes` needs in each directory.
    pub fn bytes_per_dir(striping: &Striping, count: usize, chunk_bytes: usize) -> Vec<u64> {
        Volume::file_bytes(stride(chunk_bytes) * count as u64, striping)
    }

    /// Makes a volume `name` of `count` chunks of up to `chunk_bytes`.
    ///
    /// The directories belong to the caller: no lock is taken here.
    ///
    /// # Errors
    /// The directories have too little room or cannot be written, or no file holds as much.
    pub fn create(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        name: &str,
        count: usize,
        chunk_bytes: usize,
    ) -> Result<Self, TierError> {
        if (chunk_bytes as u64).max(1).checked_mul(count as u64).is_none_or(|bytes| bytes > SCRATCH_BYTES_MAX)
        {
            let detail = format!("of {count} chunks of {chunk_bytes} bytes is larger than any file");
            return Err(TierError::Invalid { what: "a scratch volume", detail });
        }
        let (chunk_stride, bytes) = (stride(chunk_bytes), stride(chunk_bytes) * count as u64);
        let volume = Volume::create_scratch(engine, striping, name, bytes)?;
        let chunks = (0..count).map(|_| ChunkState::Empty).collect();
        Ok(Self { volume, chunks: Mutex::new(chunks), chunk_stride })
    }

    /// Starts writing a chunk. The lease goes back to its pool when the write is done.
    ///
    /// # Errors
    /// The chunk's previous write failed.
    pub fn write(&self, chunk: ScratchChunk, lease: Lease) -> Result<(), TierError> {
        self.write_as(Urgency::Whenever, chunk, lease)
    }

    /// As [`write`](Self::write), with an urgency.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_as(&self, urgency: Urgency, chunk: ScratchChunk, lease: Lease) -> Result<(), TierError> {
        let (sum, len) = (checksum(&lease), lease.len());
        self.settle(chunk)?;
        let request = self.volume.request(OpKind::Write, self.address(chunk), lease.into_io());
        let request = request.with_urgency(urgency);
        let ticket = self.volume.engine.submit(request).without_buffer();
        self.lock()[chunk.0] = ChunkState::Writing { ticket, sum, len };
        Ok(())
    }

    /// Starts reading a chunk into `lease`, which takes the length that was written. Waits for the chunk's write first.
    ///
    /// # Errors
    /// The chunk's write failed.
    ///
    /// # Panics
    /// If the chunk was never written or has another length.
    pub fn read(&self, chunk: ScratchChunk, lease: Lease) -> Result<crate::PendingRead, TierError> {
        self.read_as(Urgency::Whenever, chunk, lease)
    }

    /// As [`read`](Self::read), with an urgency.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// As [`read`](Self::read).
    pub fn read_as(
        &self,
        urgency: Urgency,
        chunk: ScratchChunk,
        lease: Lease,
    ) -> Result<crate::PendingRead, TierError> {
        self.settle(chunk)?;
        let ChunkState::Written { sum, len } = self.lock()[chunk.0] else {
            panic!("scratch chunk {} is written before it is read", chunk.0)
        };
        assert_eq!(lease.len(), len, "scratch chunk {} is read with the length it was written with", chunk.0);
        let address = self.address(chunk);
        let (file, offset) = self.volume.locate(address);
        let check = Check { start: 0, len, sum, chunk: chunk.0, file, offset };
        let request = self.volume.request(OpKind::Read, address, lease.into_io()).with_urgency(urgency);
        let ticket = self.volume.engine.submit(request);
        Ok(crate::PendingRead::new(ticket, vec![check], &self.volume, "scratch".into()))
    }

    /// The chunk at `offset` of a file; `None` if it is none of this volume's.
    pub fn chunk_at(&self, file: FileId, offset: u64) -> Option<ScratchChunk> {
        let address = self.volume.address(file, offset)?;
        Some(ScratchChunk((address / self.chunk_stride) as usize))
    }

    /// Waits for every write.
    ///
    /// # Errors
    /// The first write that failed.
    pub fn wait_writes(&self) -> Result<(), TierError> {
        let count = self.lock().len();
        (0..count).try_for_each(|index| self.settle(ScratchChunk(index)))
    }

    /// Waits for every write of a step that is given up, whether it failed or not: the chunks are written anew.
    pub fn forget_writes(&self) {
        let count = self.lock().len();
        (0..count).for_each(|index| {
            let _ = self.settle(ScratchChunk(index));
        });
    }

    /// Gives the space of a chunk that will not be used again back to the file system, after its write is done. A chunk that
    /// is reused every step is not given back: its space was reserved when the volume was made, and must stay so.
    ///
    /// # Errors
    /// The chunk's write failed, or the file system refused.
    pub fn give_up(&self, chunk: ScratchChunk) -> Result<(), TierError> {
        self.settle(chunk)?;
        self.lock()[chunk.0] = ChunkState::Empty;
        self.volume.punch(self.address(chunk), self.chunk_stride)
    }

    fn settle(&self, chunk: ScratchChunk) -> Result<(), TierError> {
        let mut chunks = self.lock();
        if let ChunkState::Writing { .. } = chunks[chunk.0] {
            let ChunkState::Writing { ticket, sum, len } =
                std::mem::replace(&mut chunks[chunk.0], ChunkState::Empty)
            else {
                unreachable!("just matched")
            };
            drop(chunks);
            ticket.wait()?;
            self.lock()[chunk.0] = ChunkState::Written { sum, len };
        }
        Ok(())
    }

    fn address(&self, chunk: ScratchChunk) -> u64 {
        chunk.0 as u64 * self.chunk_stride
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<ChunkState>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Chunks begin at whole pages.
fn stride(chunk_bytes: usize) -> u64 {
    (chunk_bytes as u64).next_multiple_of(4096)
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Scratch files hold nothing worth keeping; one that cannot be removed is overwritten by the next run.
        let _ = self.wait_writes();
        let _ = self.volume.remove();
    }
}
