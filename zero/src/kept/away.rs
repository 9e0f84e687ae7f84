//! What blocks keep, elsewhere than in the arena from forward to backward: on disk or, of a device with memory of its own, on the host.
//!
//! Where forward and backward of a block lie so far apart that the arena does not hold what all blocks leave, another tier does, and backward
//! need not compute it again: activations are swapped rather than recomputed where that takes less time (Ratel,
//! <https://arxiv.org/abs/2403.06504>, SSDTrain, <https://arxiv.org/abs/2408.10013>). A tensor is cut into *pieces* of up to
//! [`slot_bytes`], each of which has a lease of a pool on its way, and on the host until backward.
//!
//! *Where kernels work in host memory*, forward copies the pieces, which are written while the next block computes; the tensor's own memory
//! is free at once. Backward takes tensors of the same shapes from the arena and copies them back from leases that were read ahead, as
//! many as there are, in the order in which it comes to them.
//!
//! *On a device with its own memory* a pair of block and micro-batch comes down while the next one computes, and its memory is free when that
//! was enqueued. Before the kernels of a pair's backward are enqueued the next pair has its memory, and when they are, it begins to come up
//! beside them.
//!
//! Micro-batches are counted within their round, since what one round leaves is back before the next one leaves anything.

use crate::Result;
use crate::copies::Cargo;
use crate::kept::{Keeping, Shapes};
use crate::lane::Lane;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_aio::{FileId, IoEngine, Urgency};
use terrace_device::{Arena, Device, Download, Region, Upload, UploadSource};
use terrace_kernels::Tensor;
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

/// Lengths of the pieces of a tensor of so many bytes.
fn cut(bytes: usize, slot_bytes: usize) -> impl Iterator<Item = usize> {
    (0..bytes).step_by(slot_bytes).map(move |at| slot_bytes.min(bytes - at))
}

/// Leases for what blocks keep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeptSlots {
    /// On their way to disk and back.
    pub(crate) in_flight: usize,
    /// In host memory until backward.
    pub(crate) on_host: usize,
    /// Bytes of each.
    pub(crate) bytes: usize,
}

#[derive(Debug)]
pub(crate) struct KeptAway {
    keeping: Keeping,
    slots: KeptSlots,
    disk: Option<Disk>,
    on_host: Option<Pool>,
    /// Of each block that sends to disk: itself, the first of its chunks, and how many a micro-batch has.
    places: Vec<(usize, usize, usize)>,
    /// What forward left on a device with its own memory, on its way down.
    leaving: Option<Leaving>,
    /// What forward left, in its order.
    left: Vec<Pair>,
    /// What backward has not come to, in its order.
    returning: VecDeque<Pair>,
    /// The pieces of it on disk that were not asked for yet, and those that were.
    waiting: VecDeque<Piece>,
    reading: VecDeque<PendingRead>,
    /// Memory of a device for the first of them, with what comes up into it when that was started, and what came up last.
    room: Vec<Region>,
    rising: Vec<Upload<Vec<Lease>>>,
    sources: Vec<UploadSource<Vec<Lease>>>,
    /// How long compute has waited for the disk.
    pub(super) waited: Duration,
}

/// A place on disk, and leases for what is on its way there or back.
#[derive(Debug)]
struct Disk {
    scratch: Scratch,
    pool: Pool,
}

/// What a block left for a micro-batch.
#[derive(Debug)]
struct Pair {
    block: usize,
    m: usize,
    tensors: Shapes,
    pieces: Pieces,
}

/// Where a pair's bytes are, tensor by tensor.
#[derive(Debug)]
enum Pieces {
    Host(Vec<Vec<Lease>>),
    Disk(Vec<Piece>),
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    chunk: ScratchChunk,
    bytes: usize,
}

#[derive(Debug)]
struct Leaving {
    pair: Pair,
    downloads: Vec<Download<Vec<Lease>>>,
}

impl KeptAway {
    /// Chunks on disk of the blocks that `keeping` sends there, whose tensors' bytes are `tensors` by block.
    fn places<'t>(
        keeping: Keeping,
        tensors: impl Iterator<Item = &'t [usize]>,
        slot_bytes: usize,
        together: usize,
    ) -> (Vec<(usize, usize, usize)>, usize) {
        let (mut places, mut count) = (Vec::new(), 0);
        for (block, tensors) in tensors.enumerate().filter(|&(block, _)| keeping.sends_to_disk(block)) {
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

    /// With directories where something goes to disk.
    pub(crate) fn new<'t>(
        keeping: Keeping,
        tensors: impl Iterator<Item = &'t [usize]>,
        slots: KeptSlots,
        together: usize,
        device: &dyn Device,
        disks: Option<(&Arc<dyn IoEngine>, &Striping)>,
    ) -> Result<Self> {
        let bytes = slots.bytes;
        let (places, count) = Self::places(keeping, tensors, bytes, together);
        let pool = |name, slots| Ok::<_, TierError>(Pool::new(name, slots, bytes)?.pinned_for(device));
        let on_host = Some(slots.on_host).filter(|&slots| slots > 0);
        let disk = |(engine, striping): (&Arc<dyn IoEngine>, &Striping)| {
            let smaller = "leave WindowOverrides::kept_blocks to the plan, lower BatchLimits::sequences, or add another directory to EngineConfig::disks";
            let scratch = Scratch::create(engine, striping, "kept-activations.bin", count, bytes)
                .map_err(|error| error.too_small_for("what blocks keep for backward", smaller))?;
            let pool = pool("kept activations in flight", slots.in_flight)?.registered_with(engine);
            Ok::<_, TierError>(Disk { scratch, pool })
        };
        Ok(Self {
            keeping,
            slots,
            disk: disks.map(disk).transpose()?,
            on_host: on_host.map(|slots| pool("kept activations", slots)).transpose()?,
            places,
            leaving: None,
            left: Vec::new(),
            returning: VecDeque::new(),
            waiting: VecDeque::new(),
            reading: VecDeque::new(),
            room: Vec::new(),
            rising: Vec::new(),
            sources: Vec::new(),
            waited: Duration::ZERO,
        })
    }

    /// Takes what the forward of `block` left for micro-batch `m`, the one at `at` of its round. Waits for the disk where it is behind
    /// with what was left before.
    pub(crate) fn send(
        &mut self,
        (block, m, at): (usize, usize, usize),
        tensors: Vec<Tensor>,
        lane: &Lane,
        pool: &rayon::ThreadPool,
    ) -> Result {
        let mut pair = Pair { block, m, tensors: Shapes::of(&tensors), pieces: Pieces::Host(Vec::new()) };
        if self.keeping.sends_to_disk(block) {
            pair.pieces = Pieces::Disk(self.pieces(&pair, at));
        }
        if lane.unified {
            self.write_out(&pair, &tensors, pool)?;
            self.left.push(pair);
            return Ok(());
        }
        // The last copies of the round before are done.
        self.release()?;
        self.land()?;
        let began = Instant::now();
        let leases = match (&self.disk, &self.on_host) {
            (Some(disk), _) if self.keeping.sends_to_disk(block) => &disk.pool,
            (_, Some(pool)) => pool,
            _ => unreachable!("a block sends to where there are leases for it"),
        };
        let lease = |bytes| cut(bytes, self.slots.bytes).map(|length| leases.acquire(length)).collect();
        let leased: Vec<Vec<Lease>> = pair.tensors.bytes().map(lease).collect();
        self.waited += began.elapsed();
        let each = tensors.into_iter().map(Tensor::into_region).zip(leased);
        let downloads = each.map(|(region, leases)| lane.download_pieces(Cargo::Kept(block), region, leases));
        let downloads = downloads.collect::<Result<_>>()?;
        self.leaving = Some(Leaving { pair, downloads });
        Ok(())
    }

    /// Chunks on disk for a pair that is at `at` of its round.
    fn pieces(&self, pair: &Pair, at: usize) -> Vec<Piece> {
        let place = self.places.iter().find(|place| place.0 == pair.block);
        let &(block, first, each) = place.expect("a block that sends to disk");
        let lengths = pair.tensors.bytes().flat_map(|bytes| cut(bytes, self.slots.bytes));
        let chunks = (first + at * each..).map(ScratchChunk).zip(lengths);
        let pieces: Vec<Piece> = chunks.map(|(chunk, bytes)| Piece { chunk, bytes }).collect();
        assert!(pieces.len() <= each, "block {block} leaves no more than was planned for it");
        pieces
    }

    /// Writes tensors in host memory to disk.
    fn write_out(&mut self, pair: &Pair, tensors: &[Tensor], pool: &rayon::ThreadPool) -> Result {
        let Pieces::Disk(pieces) = &pair.pieces else {
            unreachable!("where the arena is on the host, it keeps")
        };
        let slot = self.slots.bytes;
        let bytes = tensors.iter().flat_map(|tensor| tensor.view().bytes().host().chunks(slot));
        let pieces: Vec<(&Piece, &[u8])> = pieces.iter().zip(bytes).collect();
        let Disk { scratch, pool: leases } = self.disk.as_ref().expect("something goes to disk");
        for together in pieces.chunks(self.slots.in_flight) {
            let began = Instant::now();
            let leased =
                together.iter().map(|&(piece, from)| (piece.chunk, from, leases.acquire(piece.bytes)));
            let leased: Vec<(ScratchChunk, &[u8], Lease)> = leased.collect();
            self.waited += began.elapsed();
            let write = |(chunk, bytes, mut lease): (ScratchChunk, &[u8], Lease)| {
                lease.copy_from_slice(bytes);
                // Compute waits for the leases of one pair after the other.
                scratch.write_as(Urgency::Soon, chunk, lease)
            };
            pool.install(|| leased.into_par_iter().try_for_each(write))?;
        }
        Ok(())
    }

    /// Waits for what is on its way down. Its memory on the device is free then.
    fn land(&mut self) -> Result {
        let Some(Leaving { mut pair, downloads }) = self.leaving.take() else { return Ok(()) };
        let landed = downloads.into_iter().map(|download| Ok(download.wait()?.1));
        let landed = landed.collect::<Result<Vec<Vec<Lease>>>>()?;
        match (&mut pair.pieces, &self.disk) {
            (Pieces::Disk(pieces), Some(Disk { scratch, .. })) => {
                let each = pieces.iter().zip(landed.into_iter().flatten());
                let write =
                    |(piece, lease): (&Piece, Lease)| scratch.write_as(Urgency::Soon, piece.chunk, lease);
                { each }.try_for_each(write)?;
            }
            (pieces, _) => *pieces = Pieces::Host(landed),
        }
        self.left.push(pair);
        Ok(())
    }

    /// Forward is over: backward goes through blocks downwards, and upwards through the micro-batches of each.
    pub(crate) fn turn_round(&mut self) -> Result {
        self.land()?;
        self.left.sort_by_key(|pair| (std::cmp::Reverse(pair.block), pair.m));
        self.returning.extend(self.left.drain(..));
        for pair in &self.returning {
            if let Pieces::Disk(pieces) = &pair.pieces {
                self.waiting.extend(pieces);
            }
        }
        Ok(())
    }

    /// Reads what comes next into the leases that there are.
    fn read_ahead(&mut self) -> Result {
        let began = Instant::now();
        let result = self.request();
        // For what is still being written.
        self.waited += began.elapsed();
        result
    }

    fn request(&mut self) -> Result {
        let Some(disk) = &self.disk else { return Ok(()) };
        while let Some(&piece) = self.waiting.front() {
            let Some(lease) = disk.pool.try_acquire(piece.bytes) else { break };
            self.waiting.pop_front();
            self.reading.push_back(disk.scratch.read_as(Urgency::Soon, piece.chunk, lease)?);
        }
        Ok(())
    }

    /// Has at least one piece that is being read.
    fn read_one(&mut self) -> Result {
        self.request()?;
        if let (true, Some(disk)) = (self.reading.is_empty(), &self.disk) {
            let piece = self.waiting.pop_front().expect("a piece for every place");
            let lease = disk.pool.acquire(piece.bytes);
            self.reading.push_back(disk.scratch.read_as(Urgency::Soon, piece.chunk, lease)?);
        }
        Ok(())
    }

    /// Gives backward what the forward of `block` left for micro-batch `m`; `None` if it left nothing.
    pub(crate) fn take(
        &mut self,
        (block, m): (usize, usize),
        lane: &Lane,
        pool: &rayon::ThreadPool,
    ) -> Result<Option<Vec<Tensor>>> {
        let is_next = self.returning.front().is_some_and(|pair| (pair.block, pair.m) == (block, m));
        let Some(pair) = is_next.then(|| self.returning.pop_front()).flatten() else {
            self.read_ahead()?;
            return Ok(None);
        };
        let tensors =
            if lane.unified { self.read_in(&pair, &lane.arena, pool)? } else { self.bring_up(pair, lane)? };
        // While this pair is in backward.
        self.read_ahead()?;
        Ok(Some(tensors))
    }

    /// Reads tensors into host memory.
    fn read_in(&mut self, pair: &Pair, arena: &Arena, pool: &rayon::ThreadPool) -> Result<Vec<Tensor>> {
        let mut tensors = pair.tensors.take(arena)?;
        let slot = self.slots.bytes;
        let bytes = tensors.iter_mut().map(|tensor| tensor.view_mut().into_bytes().into_host());
        let mut places: VecDeque<&mut [u8]> = bytes.flat_map(|bytes| bytes.chunks_mut(slot)).collect();
        while !places.is_empty() {
            let began = Instant::now();
            self.read_one()?;
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
        Ok(tensors)
    }

    /// Tensors on the device, and memory for those of the next pair.
    fn bring_up(&mut self, mut pair: Pair, lane: &Lane) -> Result<Vec<Tensor>> {
        if self.rising.is_empty() {
            if self.room.is_empty() {
                self.room = self.room_for(&pair, lane)?;
            }
            self.rise(&mut pair, lane)?;
        }
        let mut regions = Vec::with_capacity(self.rising.len());
        for upload in self.rising.drain(..) {
            let (region, source) = upload.ready_on(&*lane.compute)?;
            self.sources.push(source);
            regions.push(region);
        }
        // Before kernels are enqueued that what comes up is not to wait for.
        if let Some(next) = self.returning.front() {
            self.room = self.room_for(next, lane)?;
        }
        Ok(pair.tensors.over(regions))
    }

    /// Starts copying what backward comes to next into the memory that was taken for it.
    pub(crate) fn bring_next(&mut self, lane: &Lane) -> Result {
        if self.room.is_empty() {
            return Ok(());
        }
        let mut next = self.returning.pop_front().expect("memory was taken for it");
        let result = self.rise(&mut next, lane);
        self.returning.push_front(next);
        result
    }

    fn rise(&mut self, pair: &mut Pair, lane: &Lane) -> Result {
        // Their kernels were enqueued, so that these copies are done or nearly so.
        self.release()?;
        let lengths: Vec<usize> = pair.tensors.bytes().collect();
        let mut on_host = match &mut pair.pieces {
            Pieces::Host(leases) => std::mem::take(leases).into_iter(),
            Pieces::Disk(_) => Vec::new().into_iter(),
        };
        for (region, length) in std::mem::take(&mut self.room).into_iter().zip(lengths) {
            let leases = match on_host.next() {
                Some(leases) => leases,
                None => self.read_pieces(length.div_ceil(self.slots.bytes))?,
            };
            self.rising.push(lane.send_kept(pair.block, leases, region)?);
        }
        Ok(())
    }

    /// Gives leases back whose bytes are on the device.
    fn release(&mut self) -> Result {
        Ok(self.sources.drain(..).try_for_each(|source| source.release().map(drop))?)
    }

    fn room_for(&self, pair: &Pair, lane: &Lane) -> Result<Vec<Region>> {
        let room = pair.tensors.take(&lane.arena)?;
        lane.begin_keys()?;
        Ok(room.into_iter().map(Tensor::into_region).collect())
    }

    /// The next pieces from disk.
    fn read_pieces(&mut self, count: usize) -> Result<Vec<Lease>> {
        let began = Instant::now();
        let read = |_| {
            self.read_one()?;
            Ok(self.reading.pop_front().expect("one is being read").wait()?)
        };
        let leases = (0..count).map(read).collect();
        self.waited += began.elapsed();
        leases
    }

    /// The block that left what is at `offset` of a file.
    pub(crate) fn block_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let ScratchChunk(chunk) = self.disk.as_ref()?.scratch.chunk_at(file, offset)?;
        self.places.iter().rev().find(|place| place.1 <= chunk).map(|place| place.0)
    }

    /// Forgets everything of a step that failed.
    pub(crate) fn clear(&mut self) {
        self.leaving = None;
        self.left.clear();
        self.returning.clear();
        self.waiting.clear();
        self.reading.clear();
        (self.room, self.rising, self.sources) = (Vec::new(), Vec::new(), Vec::new());
        self.waited = Duration::ZERO;
        if let Some(disk) = &self.disk {
            disk.scratch.forget_writes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept::KeepCounts;

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
            let keeping = Keeping::last(&keepers, KeepCounts { here: count, on_host: 0, on_disk });
            KeptAway::places(keeping, tensors.iter().map(|bytes| &bytes[..]), 4096, together)
        };
        assert_eq!(places(0, 3, 2), (vec![(1, 0, 3), (2, 6, 1), (3, 8, 1)], 10));
        assert_eq!(places(1, 1, 3), (vec![(2, 0, 1)], 3));
        assert_eq!(places(3, 3, 1), (vec![], 0));
    }
}
