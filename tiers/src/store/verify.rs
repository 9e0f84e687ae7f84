//! Every chunk of a commit, read and compared with its checksum.

use super::view::{Commit, StoreView};
use crate::pool::Pool;
use crate::{BlobKey, BlobKind, TierError, checksum};
use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use terrace_aio::{IoError, OpKind, Ticket};

/// Bytes in memory at once, if two chunks are not more than that.
const WINDOW_BYTES: usize = 64 << 20;
/// Chunks in flight at once.
const READS_MAX: usize = 32;

/// What verifying a commit found.
#[derive(Debug)]
pub struct Verification {
    /// Chunks read.
    pub chunks: usize,
    /// Bytes read.
    pub bytes: u64,
    /// Chunks that are not what was written, in the order of their addresses.
    pub damages: Vec<Damage>,
}

/// A chunk that is not what was written.
#[derive(Debug)]
pub struct Damage {
    /// Whose state it is.
    pub group: String,
    /// What it holds.
    pub kind: BlobKind,
    /// Its place in the blob, from zero.
    pub chunk: usize,
    /// Where it lies.
    pub parts: Vec<FilePart>,
    /// What is wrong.
    pub cause: DamageCause,
}

/// A range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePart {
    /// The file.
    pub path: PathBuf,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What is wrong with a chunk.
#[derive(Debug)]
pub enum DamageCause {
    /// The drive gave other bytes than were written.
    Checksum {
        /// Of what it gave.
        found: u64,
        /// Of what was written.
        expected: u64,
    },
    /// The drive gave an error.
    Unreadable(IoError),
}

/// A chunk on its way.
struct Reading {
    key: BlobKey,
    chunk: usize,
    expected: u64,
    ticket: Ticket,
}

impl StoreView {
    /// Reads every chunk of a commit and compares its checksum, with several reads in flight and at most 64 MiB (or two chunks)
    /// in memory. `progress` hears how many bytes of how many are done. `None` if there is no such commit.
    ///
    /// # Errors
    /// There is no memory for the buffers. What cannot be read is a damage, not an error.
    pub fn verify(
        &mut self,
        commit: Commit,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Option<Verification>, TierError> {
        let Some(slot) = self.slot(commit) else { return Ok(None) };
        let (spec, volume) = (&self.extents.spec, &self.extents.volume);
        let slot_bytes = self.chunks().map(|(key, chunk)| spec.chunk_bytes(key, chunk)).max().unwrap_or(0);
        let total = self.chunks().map(|(key, chunk)| spec.chunk_bytes(key, chunk) as u64).sum();
        let reads = (WINDOW_BYTES / slot_bytes.max(1)).clamp(2, READS_MAX);
        let pool = Pool::new("verification", reads, slot_bytes)?;
        let mut found = Verification { chunks: 0, bytes: 0, damages: Vec::new() };
        let mut in_flight: VecDeque<Reading> = VecDeque::with_capacity(reads);
        for (key, chunk) in self.chunks() {
            if in_flight.len() == reads {
                in_flight
                    .pop_front()
                    .into_iter()
                    .for_each(|reading| self.finish(reading, slot.live, &mut found));
                progress(found.bytes, total);
            }
            let lease = pool.acquire(spec.chunk_bytes(key, chunk));
            let address = self.extents.address(key, chunk, slot.live);
            let ticket = volume.engine.submit(volume.request(OpKind::Read, address, lease.into_io()));
            let expected = slot.table[self.extents.entry(key, chunk)];
            in_flight.push_back(Reading { key, chunk, expected, ticket });
        }
        for reading in in_flight {
            self.finish(reading, slot.live, &mut found);
            progress(found.bytes, total);
        }
        assert_eq!(found.chunks, slot.table.len(), "every chunk that has a checksum is compared with it");
        self.damaged[commit as usize] = Some(found.damages.len());
        Ok(Some(found))
    }

    /// All chunks in the order of their addresses.
    fn chunks(&self) -> impl Iterator<Item = (BlobKey, usize)> {
        let spec = &self.extents.spec;
        (0..spec.groups.len()).flat_map(move |group| {
            let blobs = spec.kinds.iter().map(move |kind| BlobKey { group, kind: kind.kind });
            blobs.flat_map(move |key| (0..spec.chunks(group)).map(move |chunk| (key, chunk)))
        })
    }

    fn finish(&self, reading: Reading, generation: u64, found: &mut Verification) {
        let Reading { key, chunk, expected, ticket } = reading;
        let len = self.extents.spec.chunk_bytes(key, chunk);
        found.chunks += 1;
        found.bytes += len as u64;
        let cause = match ticket.wait() {
            Err(error) => DamageCause::Unreadable(error),
            Ok(bytes) => match checksum(&bytes) {
                sum if sum == expected => return,
                sum => DamageCause::Checksum { found: sum, expected },
            },
        };
        let address = self.extents.address(key, chunk, generation);
        let volume = &self.extents.volume;
        let parts = volume.ranges(address, len as u64).into_iter();
        let parts =
            parts.map(|(file, offset, len)| FilePart { path: volume.paths[file].clone(), offset, len });
        found.damages.push(Damage {
            group: self.extents.spec.groups[key.group].name.clone(),
            kind: key.kind,
            chunk,
            parts: parts.collect(),
            cause,
        });
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of group {}, chunk {}", self.kind.words(), self.group, self.chunk)?;
        for part in &self.parts {
            write!(f, ", {} bytes at offset {} of {}", part.len, part.offset, part.path.display())?;
        }
        match &self.cause {
            DamageCause::Checksum { found, expected } => {
                write!(f, ": checksum {found:016x} instead of {expected:016x}")
            }
            DamageCause::Unreadable(error) => write!(f, ": {error}"),
        }
    }
}
