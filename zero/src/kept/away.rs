//! What blocks keep, on disk from forward to backward.
//!
//! Where forward and backward of a block lie so far apart that memory does not hold what all blocks leave, the disk does, and backward
//! need not compute it again: activations are swapped rather than recomputed where the disk takes less time for that (Ratel,
//! <https://arxiv.org/abs/2403.06504>, SSDTrain, <https://arxiv.org/abs/2408.10013>). A tensor is cut into *pieces* of up to
//! [`slot_bytes`]. Forward copies them into leases of a pool, which are written while the next block computes; the tensor's own memory
//! is free at once. Backward takes tensors of the same shapes from the arena and copies them back from leases that were read ahead, as
//! many as there are, in the order in which it comes to them.
//!
//! Only on a device whose memory is the host's. Micro-batches are counted within their round, since what one round leaves is back before
//! the next one leaves anything.

use crate::Result;
use crate::kept::Keeping;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_aio::{FileId, IoEngine, Urgency};
use terrace_device::Arena;
use terrace_kernels::{DType, Shape, Tensor};
use terrace_tiers::{Lease, PendingRead, Pool, Scratch, ScratchChunk, Striping, TierError};

/// What a piece of a pair of block and micro-batch may be of what the pair leaves in all: with fewer and larger ones the last of each tensor,
/// which seldom fills its slot, wastes more.
const PIECES: usize = 64;
const SLOT_BYTES_MIN: usize = 16 << 10;
const SLOT_BYTES_MAX: usize = 4 << 20;

/// Bytes of the longest piece, where a block leaves up to so many for a micro-batch.
pub(crate) fn slot_bytes(pair_bytes: usize) -> usize {
    (pair_bytes / PIECES).next_multiple_of(SLOT_BYTES_MIN).clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX)
}

/// Pieces of tensors of so many bytes.
pub(crate) fn chunks(tensors: &[usize], slot_bytes: usize) -> usize {
    tensors.iter().map(|bytes| bytes.div_ceil(slot_bytes)).sum()
}

#[derive(Debug)]
pub(crate) struct KeptAway {
    scratch: Scratch,
    pool: Pool,
    slots: usize,
    /// Of each block that sends: itself, the first of its chunks, and how many a micro-batch has.
    places: Vec<(usize, usize, usize)>,
    /// What forward left, in its order.
    left: Vec<Pair>,
    /// What backward has not come to, in its order.
    returning: VecDeque<Pair>,
    /// The pieces of it that were not asked for yet, and those that were.
    waiting: VecDeque<Piece>,
    reading: VecDeque<PendingRead>,
    /// How long compute has waited for the disk.
    pub(super) waited: Duration,
}

/// What a block left for a micro-batch.
#[derive(Debug)]
struct Pair {
    block: usize,
    m: usize,
    tensors: Vec<(DType, Shape)>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    chunk: ScratchChunk,
    bytes: usize,
}

impl KeptAway {
    /// Chunks on disk of the blocks that `keeping` sends, whose tensors' bytes are `tensors` by block.
    fn places<'t>(
        keeping: Keeping,
        tensors: impl Iterator<Item = &'t [usize]>,
        slot_bytes: usize,
        together: usize,
    ) -> (Vec<(usize, usize, usize)>, usize) {
        let (mut places, mut count) = (Vec::new(), 0);
        for (block, tensors) in tensors.enumerate().filter(|&(block, _)| keeping.sends(block)) {
            let each = chunks(tensors, slot_bytes);
            places.push((block, count, each));
            count += each * together;
        }
        (places, count)
    }

    /// Bytes of its file in each directory.
    pub(crate) fn bytes_per_dir<'t>(
        keeping: Keeping,
        tensors: impl Iterator<Item = &'t [usize]>,
        slot_bytes: usize,
        together: usize,
        striping: &Striping,
    ) -> Vec<u64> {
        let (_, count) = Self::places(keeping, tensors, slot_bytes, together);
        Scratch::bytes_per_dir(striping, count, slot_bytes)
    }

    /// With `slots` leases.
    pub(crate) fn new<'t>(
        keeping: Keeping,
        tensors: impl Iterator<Item = &'t [usize]>,
        (slots, slot_bytes): (usize, usize),
        together: usize,
        (engine, striping): (&Arc<dyn IoEngine>, &Striping),
    ) -> Result<Self> {
        let (places, count) = Self::places(keeping, tensors, slot_bytes, together);
        Ok(Self {
            scratch: Scratch::create(engine, striping, "kept-activations.bin", count, slot_bytes)?,
            pool: Pool::new("kept activations", slots, slot_bytes)?.registered_with(engine),
            slots,
            places,
            left: Vec::new(),
            returning: VecDeque::new(),
            waiting: VecDeque::new(),
            reading: VecDeque::new(),
            waited: Duration::ZERO,
        })
    }

    /// Takes what the forward of `block` left for micro-batch `m`, the one at `at` of its round. Waits for the disk where it is behind
    /// with what was left before.
    pub(crate) fn send(
        &mut self,
        (block, m, at): (usize, usize, usize),
        tensors: &[Tensor],
        pool: &rayon::ThreadPool,
    ) -> Result {
        let &(_, first, each) =
            self.places.iter().find(|place| place.0 == block).expect("a block that sends");
        let bytes =
            tensors.iter().flat_map(|tensor| tensor.view().bytes().host().chunks(self.pool.slot_bytes()));
        let pieces: Vec<(ScratchChunk, &[u8])> = (first + at * each..).map(ScratchChunk).zip(bytes).collect();
        assert!(pieces.len() <= each, "block {block} leaves no more than was planned for it");
        for together in pieces.chunks(self.slots) {
            let began = Instant::now();
            let leased =
                together.iter().map(|&(chunk, bytes)| (chunk, bytes, self.pool.acquire(bytes.len())));
            let leased: Vec<(ScratchChunk, &[u8], Lease)> = leased.collect();
            self.waited += began.elapsed();
            let write = |(chunk, bytes, mut lease): (ScratchChunk, &[u8], Lease)| {
                lease.copy_from_slice(bytes);
                // Compute waits for the leases of one pair after the other.
                self.scratch.write_as(Urgency::Soon, chunk, lease)
            };
            pool.install(|| leased.into_par_iter().try_for_each(write))?;
        }
        let pieces = pieces.iter().map(|&(chunk, bytes)| Piece { chunk, bytes: bytes.len() }).collect();
        let tensors = tensors.iter().map(|tensor| (tensor.dtype(), tensor.shape())).collect();
        self.left.push(Pair { block, m, tensors, pieces });
        Ok(())
    }

    /// Forward is over: backward goes through blocks downwards, and upwards through the micro-batches of each.
    pub(crate) fn turn_round(&mut self) {
        self.left.sort_by_key(|pair| (std::cmp::Reverse(pair.block), pair.m));
        self.returning.extend(self.left.drain(..));
        self.waiting.extend(self.returning.iter().flat_map(|pair| &pair.pieces));
    }

    /// Reads what comes next into the leases that there are.
    pub(crate) fn read_ahead(&mut self) -> Result {
        while let Some(&piece) = self.waiting.front() {
            let Some(lease) = self.pool.try_acquire(piece.bytes) else { break };
            self.read(piece, lease)?;
        }
        Ok(())
    }

    fn read(&mut self, piece: Piece, lease: Lease) -> Result {
        self.waiting.pop_front();
        self.reading.push_back(self.scratch.read_as(Urgency::Soon, piece.chunk, lease)?);
        Ok(())
    }

    /// Gives backward what the forward of `block` left for micro-batch `m`; `None` if it left nothing.
    pub(crate) fn take(
        &mut self,
        (block, m): (usize, usize),
        arena: &Arena,
        pool: &rayon::ThreadPool,
    ) -> Result<Option<Vec<Tensor>>> {
        let is_next = self.returning.front().is_some_and(|pair| (pair.block, pair.m) == (block, m));
        let Some(pair) = is_next.then(|| self.returning.pop_front()).flatten() else { return Ok(None) };
        let tensors = pair.tensors.iter().map(|&(dtype, shape)| Tensor::new(arena, dtype, shape.dims()));
        let mut tensors = tensors.collect::<std::result::Result<Vec<_>, _>>()?;
        let slot_bytes = self.pool.slot_bytes();
        let bytes = tensors.iter_mut().map(|tensor| tensor.view_mut().into_bytes().into_host());
        let mut places: VecDeque<&mut [u8]> = bytes.flat_map(|bytes| bytes.chunks_mut(slot_bytes)).collect();
        while !places.is_empty() {
            self.read_ahead()?;
            let began = Instant::now();
            if self.reading.is_empty() {
                let &piece = self.waiting.front().expect("a piece for every place");
                let lease = self.pool.acquire(piece.bytes);
                self.read(piece, lease)?;
            }
            let count = self.reading.len().min(places.len());
            let arrived = self.reading.drain(..count).map(PendingRead::arrive);
            let arrived = arrived.collect::<std::result::Result<Vec<_>, _>>()?;
            self.waited += began.elapsed();
            let arrived: Vec<_> = places.drain(..count).zip(arrived).collect();
            pool.install(|| {
                arrived.into_par_iter().try_for_each(|(place, arrived)| {
                    place.copy_from_slice(&arrived.verify()?);
                    Ok::<(), TierError>(())
                })
            })?;
        }
        // While this pair is in backward.
        self.read_ahead()?;
        Ok(Some(tensors))
    }

    /// The block that left what is at `offset` of a file.
    pub(crate) fn block_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let ScratchChunk(chunk) = self.scratch.chunk_at(file, offset)?;
        self.places.iter().rev().find(|place| place.1 <= chunk).map(|place| place.0)
    }

    /// Forgets everything of a step that failed.
    pub(crate) fn clear(&mut self) {
        self.left.clear();
        self.returning.clear();
        self.waiting.clear();
        self.reading.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_few_and_waste_little() {
        for (pair, slot) in [(0, 16 << 10), (1 << 20, 16 << 10), (82 << 20, 1312 << 10), (9 << 30, 4 << 20)] {
            assert_eq!(slot_bytes(pair), slot, "{pair}");
        }
        // Each tensor begins a piece of its own.
        assert_eq!(chunks(&[], 4096), 0);
        assert_eq!(chunks(&[1, 4096, 4097, 0], 4096), 1 + 1 + 2);
        // A layer of 4096 tokens: a piece of each tensor at most is not full.
        let tensors = [8 << 20, 8 << 20, 8 << 20, 8 << 20, 256 << 10, 8 << 20, 21 << 20, 21 << 20];
        let (bytes, slot) = (tensors.iter().sum::<usize>(), slot_bytes(tensors.iter().sum()));
        let taken = chunks(&tensors, slot) * slot;
        assert!((bytes..bytes + tensors.len() * slot).contains(&taken), "{taken} of {bytes}");
    }

    #[test]
    fn every_pair_has_chunks_of_its_own() {
        let tensors: Vec<Vec<usize>> = vec![vec![], vec![5000, 10], vec![4096], vec![1]];
        let keepers = [(1, 5010), (2, 4096), (3, 1)];
        let places = |count, on_disk, together| {
            let keeping = Keeping::last(&keepers, count, on_disk);
            KeptAway::places(keeping, tensors.iter().map(|bytes| &bytes[..]), 4096, together)
        };
        assert_eq!(places(0, 3, 2), (vec![(1, 0, 3), (2, 6, 1), (3, 8, 1)], 10));
        assert_eq!(places(1, 1, 3), (vec![(2, 0, 1)], 3));
        assert_eq!(places(3, 3, 1), (vec![], 0));
    }
}
