//! Gradients between backward and update.
//!
//! A block's gradient is accumulated in f32 on the device over all micro-batches, then comes down once, in chunks,
//! in the dtype of the weights. Chunks are parked in host leases or on a scratch volume until the update takes them.
//! A group that several blocks use (tied embeddings) comes down after each of its uses; the later use starts from what
//! the earlier one parked. Between the rounds of a step (`rounds.rs`) a second park of f32 holds what is summed so far.
//!
//! Gradients of groups whose state is on the device (`device_state.rs`) stay there.
//!
//! From a device with memory of its own a group's gradient comes down whole while the next block computes, and lands when that
//! block's is on its way: backward hands the device all its work before it waits for anything. That takes device memory for
//! the gradients of two groups. Where a plan has no room for it, or the update follows backward, up to [`DOWNLOAD_WINDOW`] chunks are on their way at a time, and
//! the device waits for the rest. They land in the order in which they were started, and are summed and parked then, so that nothing depends
//! on when that is. An update that runs beside backward may wait for their memory: they land before it is waited for.

use crate::copies::Cargo;
use crate::device_state::DeviceGradients;
use crate::gradient_parts::{Destination, Filling, Open};
use crate::lane::{Lane, flat};
use crate::turns::{ChunkMemory, Turns};
use crate::update::ChunkAt;
use crate::{Backend, Result};
use bytemuck::cast_slice;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use terrace_aio::{FileId, IoEngine, Urgency};
use terrace_device::{Device, Download, Region};
use terrace_kernels::{DType, View, ViewMut};
use terrace_optimizer::{Gradient, SumOfSquares};
use terrace_tiers::{Arrived, Lease, PendingRead, Pool, Scratch, ScratchChunk, StoreSpec, Striping};

/// Chunks in memory when gradients are parked on disk: one being filled, two being written or read.
pub(crate) const STAGING_SLOTS: usize = 4;

/// Chunks on their way down from a device with memory of its own, where gradients do not come whole.
pub(crate) const DOWNLOAD_WINDOW: usize = 2;
/// Reads of an update at once when gradients are on disk.
const READS_MAX: usize = STAGING_SLOTS - 1;
const _: () = assert!(
    DOWNLOAD_WINDOW - 1 + READS_MAX <= STAGING_SLOTS,
    "an update gets all slots that it waits for, whatever is on its way down when backward waits for one"
);

#[derive(Debug)]
pub(crate) struct GradientPark {
    dtype: DType,
    spec: StoreSpec,
    pool: Pool,
    scratch: Option<Scratch>,
    /// First scratch chunk of every group.
    first: Vec<usize>,
    books: Mutex<Books>,
    /// On a device with memory of its own: gradients of a group come down whole.
    come_whole: bool,
    pub(crate) on_device: Option<DeviceGradients>,
    /// Memory of the gradients of some blocks, which have it in turns with what they keep; the pool has none for these.
    pub(crate) turns: Turns,
}

/// What is parked, so that one thread can park and another take.
#[derive(Debug)]
struct Books {
    /// `[group][chunk]`
    parked: Vec<Vec<Option<Parked>>>,
    sums: Vec<SumOfSquares>,
    /// Oldest first.
    coming: VecDeque<Coming>,
    /// How long backward has waited for room in this step, until updates or the disk had taken what was parked before.
    waited: Duration,
}

/// Chunks on their way down from the device.
#[derive(Debug)]
struct Coming {
    group: usize,
    first: usize,
    last_use: bool,
    /// To a lease for each.
    download: Download<Vec<Lease>>,
}

#[derive(Debug)]
enum Parked {
    Host(ChunkMemory),
    Disk(ScratchChunk),
}

/// A chunk on its way to the update: of state, or of a gradient.
#[derive(Debug)]
pub(crate) enum Arriving<M> {
    Here(M),
    Reading(PendingRead),
}

/// A chunk that is in memory, but may not be what was written.
#[derive(Debug)]
pub(crate) enum Landed<M> {
    Here(M),
    Unverified(Arrived),
}

impl<M: From<Lease>> Arriving<M> {
    pub(crate) fn wait(self) -> Result<M> {
        self.land()?.verify()
    }

    /// Whether [`land`](Self::land) would not wait.
    pub(crate) fn is_here(&self) -> bool {
        match self {
            Self::Here(_) => true,
            Self::Reading(read) => read.is_done(),
        }
    }

    /// Waits for the transfer, and does nothing else.
    pub(crate) fn land(self) -> Result<Landed<M>> {
        Ok(match self {
            Self::Here(memory) => Landed::Here(memory),
            Self::Reading(read) => Landed::Unverified(read.arrive()?),
        })
    }
}

impl<M: From<Lease>> Landed<M> {
    pub(crate) fn verify(self) -> Result<M> {
        match self {
            Self::Here(memory) => Ok(memory),
            Self::Unverified(arrived) => Ok(arrived.verify()?.into()),
        }
    }
}

impl GradientPark {
    /// `name` is that of the memory, and of the file if there is one.
    pub(crate) fn new(
        name: &'static str,
        dtype: DType,
        spec: &StoreSpec,
        host_chunks: usize,
        device: &dyn Device,
        disk: Option<(&Arc<dyn IoEngine>, &Striping)>,
        come_whole: bool,
    ) -> Result<Self> {
        assert!(!come_whole || disk.is_none(), "a group's chunks have a lease each");
        let groups = spec.groups.len();
        let longest = (0..groups).map(|g| spec.chunk_len(g, 0)).max().unwrap_or(0);
        let chunk_bytes = longest * dtype.size();
        let mut first = Vec::new();
        let mut total = 0;
        for group in 0..groups {
            first.push(total);
            total += spec.chunks(group);
        }
        let (scratch, pool) = match disk {
            Some((engine, striping)) => (
                Some(Scratch::create(engine, striping, &format!("{name}.bin"), total, chunk_bytes)?),
                Pool::new(name, STAGING_SLOTS, chunk_bytes)?.pinned_for(device).registered_with(engine),
            ),
            None => (None, Pool::new(name, host_chunks, chunk_bytes)?.pinned_for(device)),
        };
        Ok(Self {
            dtype,
            spec: spec.clone(),
            pool,
            scratch,
            first,
            books: Mutex::new(Books {
                parked: (0..groups).map(|g| (0..spec.chunks(g)).map(|_| None).collect()).collect(),
                sums: vec![SumOfSquares::new(); groups],
                coming: VecDeque::new(),
                waited: Duration::ZERO,
            }),
            come_whole,
            on_device: None,
            turns: Turns::default(),
        })
    }

    /// How many groups, from the first on, have gradients that come to host memory or disk; those of the others stay on the device.
    pub(crate) fn groups_of_host(&self) -> usize {
        self.on_device.as_ref().map_or(self.spec.groups.len(), DeviceGradients::first)
    }

    fn stays(&self, group: usize) -> Option<&DeviceGradients> {
        self.on_device.as_ref().filter(|gradients| gradients.has(group))
    }

    /// Fills a group's accumulator with what an earlier use of the group in this step parked; false if there was none.
    pub(crate) fn begin(
        &self,
        backend: &Backend,
        lane: &Lane,
        group: usize,
        acc: &mut Region,
        pool: &rayon::ThreadPool,
    ) -> Result<bool> {
        if let Some(gradients) = self.stays(group)
            && gradients.begin(backend, group, acc)?
        {
            return Ok(true);
        }
        if self.spec.chunks(group) == 0 || !self.books().knows(group) {
            return Ok(false);
        }
        let ops = &backend.kernels.elementwise;
        // The memory of a read is that of chunks on their way, too: as many are left of them as `park` leaves when it waits for some, or it
        // could wait for an update that waits for the same.
        while self.books().must_land(group) {
            self.land(pool)?;
        }
        for chunk in 0..self.spec.chunks(group) {
            let Some(arriving) = self.take(Urgency::Soon, group, chunk)? else { continue };
            let memory = arriving.wait()?;
            let (start, len) = self.range(group, chunk);
            let out = ViewMut::new(acc.bytes_mut().slice(start * 4, (start + len) * 4), DType::F32, &[len]);
            match memory {
                ChunkMemory::Slot(lease) if !lane.unified => {
                    let region = lane.arena.alloc(lease.len())?;
                    let (region, source) = lane.upload(Cargo::Gradient(group), lease, region)?;
                    ops.cast(View::new(region.bytes(), self.dtype, &[len]), out)?;
                    source.release()?;
                }
                here => ops.cast(flat(&here, self.dtype), out)?,
            }
        }
        Ok(true)
    }

    /// Brings a group's accumulated gradient down and parks it; its norm counts when this was the group's last use. The
    /// last of it, or all, may still be [on their way](Self::land_all).
    pub(crate) fn park(
        &self,
        backend: &Backend,
        lane: &Lane,
        group: usize,
        acc: &Region,
        last_use: bool,
        pool: &rayon::ThreadPool,
    ) -> Result {
        if let Some(gradients) = self.stays(group) {
            return gradients.park(backend, group, acc, last_use);
        }
        let to = Destination { backend, lane, last_use, pool };
        self.fill(&mut Filling::of(group), acc, &to)
    }

    /// Parks elements of an accumulated gradient that follow those which `filling` has so far: chunks that they make full, or all of
    /// a group that comes whole.
    pub(crate) fn fill(&self, filling: &mut Filling, acc: &Region, to: &Destination<'_>) -> Result {
        let end = filling.at + acc.len() / DType::F32.size();
        let begin = filling.at;
        while filling.at < end {
            let (chunks, start, len) = self.unit(filling.group, filling.chunk);
            let mut open = match filling.open.take() {
                Some(open) => open,
                None => self.open(filling.group, len, to)?,
            };
            let (from, until) = (filling.at, end.min(start + len));
            let source = acc.bytes().slice((from - begin) * 4, (until - begin) * 4);
            let source = View::new(source, DType::F32, &[until - from]);
            open.cast(to.backend, source, self.dtype, from - start)?;
            filling.at = until;
            if until < start + len {
                filling.open = Some(open);
                return Ok(());
            }
            match open {
                Open::Here(memory) => {
                    self.keep(filling.group, chunks.start, to.last_use, vec![memory], to.pool)?;
                }
                Open::There(region) => self.send(filling.group, chunks.clone(), region, to)?,
            }
            filling.chunk = chunks.end;
        }
        Ok(())
    }

    /// The chunks from number `chunk` on that are parked together: their numbers, first element and length.
    fn unit(&self, group: usize, chunk: usize) -> (Range<usize>, usize, usize) {
        let chunks = chunk..if self.come_whole { self.spec.chunks(group) } else { chunk + 1 };
        let (last, last_len) = self.range(group, chunks.end - 1);
        let start = self.range(group, chunk).0;
        (chunks, start, last + last_len - start)
    }

    /// Memory in which so many elements are made ready.
    fn open(&self, group: usize, len: usize, to: &Destination<'_>) -> Result<Open> {
        let bytes = len * self.dtype.size();
        if !to.lane.unified {
            if !self.come_whole && self.books().coming.len() == DOWNLOAD_WINDOW {
                self.land(to.pool)?;
            }
            return Ok(Open::There(to.lane.arena.alloc(bytes)?));
        }
        Ok(Open::Here(match self.turns.of(group) {
            Some(arena) => ChunkMemory::Turn(arena.alloc(bytes)?),
            None => self.room(bytes).into(),
        }))
    }

    /// Starts to bring chunks down.
    fn send(&self, group: usize, chunks: Range<usize>, region: Region, to: &Destination<'_>) -> Result {
        // Waits only for what the update, or a write, gives back by itself: a group's chunks have a slot each. Landing one
        // before its turn instead would give device memory back in another order than a planning run does.
        let lens = chunks.clone().map(|chunk| self.range(group, chunk).1);
        let leases = lens.map(|len| self.room(len * self.dtype.size())).collect();
        let download = to.lane.download_pieces(Cargo::Gradient(group), region, leases)?;
        let (first, last_use) = (chunks.start, to.last_use);
        self.books().coming.push_back(Coming { group, first, last_use, download });
        while self.come_whole && self.books().coming.len() > 1 {
            self.land(to.pool)?;
        }
        Ok(())
    }

    /// Memory for a chunk.
    fn room(&self, bytes: usize) -> Lease {
        self.pool.try_acquire(bytes).unwrap_or_else(|| {
            let began = Instant::now();
            let lease = self.pool.acquire(bytes);
            self.books().waited += began.elapsed();
            lease
        })
    }

    /// How long backward has waited for room in this step.
    pub(crate) fn waited(&self) -> Duration {
        self.books().waited
    }

    /// Seconds of that, which count from now on again.
    pub(crate) fn take_waited(&self) -> f64 {
        std::mem::take(&mut self.books().waited).as_secs_f64()
    }

    /// Waits until everything that was parked has come down.
    pub(crate) fn land_all(&self, pool: &rayon::ThreadPool) -> Result {
        while self.land(pool)? {}
        Ok(())
    }

    /// Gives up what is on its way down when it is dropped.
    pub(crate) fn ending(&self) -> Ending<'_> {
        Ending(self)
    }

    /// Waits for the oldest download; false if there is none.
    fn land(&self, pool: &rayon::ThreadPool) -> Result<bool> {
        let Some(Coming { group, first, last_use, download }) = self.books().coming.pop_front() else {
            return Ok(false);
        };
        let leases = download.wait()?.1;
        let chunks = leases.into_iter().map(ChunkMemory::from).collect();
        self.keep(group, first, last_use, chunks, pool)?;
        Ok(true)
    }

    /// Sums and parks chunks that are in host memory, from number `first` on; those of a group in their order.
    fn keep(
        &self,
        group: usize,
        first: usize,
        last_use: bool,
        chunks: Vec<ChunkMemory>,
        pool: &rayon::ThreadPool,
    ) -> Result {
        let mut sum = if first == 0 { SumOfSquares::new() } else { self.books().sums[group] };
        if last_use {
            let gradients: Vec<_> = chunks.iter().map(|chunk| as_gradient(chunk, self.dtype)).collect();
            sum.add_threaded(pool, &gradients);
        }
        let park = |(chunk, memory)| {
            Ok(match (&self.scratch, memory) {
                (Some(scratch), ChunkMemory::Slot(lease)) => {
                    let place = self.place(group, chunk);
                    scratch.write(place, lease)?;
                    Parked::Disk(place)
                }
                (_, memory) => Parked::Host(memory),
            })
        };
        let parked: Vec<Parked> = (first..).zip(chunks).map(park).collect::<Result<_>>()?;
        let mut books = self.books();
        books.sums[group] = sum;
        for (place, parked) in books.parked[group][first..].iter_mut().zip(parked) {
            *place = Some(parked);
        }
        Ok(())
    }

    /// Takes a parked chunk; `None` if there is none.
    pub(crate) fn take(
        &self,
        urgency: Urgency,
        group: usize,
        chunk: usize,
    ) -> Result<Option<Arriving<ChunkMemory>>> {
        let (_, len) = self.range(group, chunk);
        let parked = self.books().parked[group][chunk].take();
        Ok(match parked {
            None => None,
            Some(Parked::Host(memory)) => Some(Arriving::Here(memory)),
            Some(Parked::Disk(place)) => {
                let scratch = self.scratch.as_ref().expect("parked on a scratch volume");
                let lease = self.pool.acquire(len * self.dtype.size());
                Some(Arriving::Reading(scratch.read_as(urgency, place, lease)?))
            }
        })
    }

    /// The sum of squares over all groups, added in their order.
    pub(crate) fn norm_squared(&self, lane: &Lane) -> Result<SumOfSquares> {
        let here = self.on_device.as_ref().map(|gradients| gradients.sums(lane)).transpose()?;
        let here = here.unwrap_or_default();
        let mut total = SumOfSquares::new();
        let books = self.books();
        let on_host = books.sums.len() - here.len();
        books.sums[..on_host].iter().chain(&here).for_each(|sum| total.merge(sum));
        Ok(total)
    }

    /// A chunk's bytes as the optimizer takes them.
    pub(crate) fn as_gradient<'b>(&self, bytes: &'b [u8]) -> Gradient<'b> {
        as_gradient(bytes, self.dtype)
    }

    /// Waits for what is being written: a drive that fails is heard of, whether or not anybody needs what it was to write.
    pub(crate) fn settle(&self) -> Result {
        self.scratch.as_ref().map_or(Ok(()), |scratch| Ok(scratch.wait_writes()?))
    }

    /// Forgets everything of a step that failed.
    pub(crate) fn clear(&self) {
        let mut books = self.books();
        books.parked.iter_mut().flatten().for_each(|p| *p = None);
        books.coming.clear();
        books.waited = Duration::ZERO;
        self.on_device.iter().for_each(DeviceGradients::clear);
    }

    /// Parks what was [taken](Self::take) again, unchanged; what is on disk is still there.
    pub(crate) fn put_back(&self, (group, chunk): ChunkAt, memory: ChunkMemory) {
        let parked = match (&self.scratch, memory) {
            (Some(_), ChunkMemory::Slot(_)) => Parked::Disk(self.place(group, chunk)),
            (_, memory) => Parked::Host(memory),
        };
        self.books().parked[group][chunk] = Some(parked);
    }

    /// Whether the chunk is parked.
    pub(crate) fn has(&self, (group, chunk): ChunkAt) -> bool {
        self.books().parked[group][chunk].is_some()
    }

    /// Forgets a parked chunk.
    pub(crate) fn forget(&self, (group, chunk): ChunkAt) {
        self.books().parked[group][chunk] = None;
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chunks a reader may have in flight at once without starving itself.
    pub(crate) fn reads_max(&self) -> usize {
        if self.scratch.is_some() { READS_MAX } else { usize::MAX }
    }

    fn place(&self, group: usize, chunk: usize) -> ScratchChunk {
        ScratchChunk(self.first[group] + chunk)
    }

    /// The group whose gradient is at `offset` of a file.
    pub(crate) fn group_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let ScratchChunk(place) = self.scratch.as_ref()?.chunk_at(file, offset)?;
        // Groups without chunks begin where the next one does.
        self.first.partition_point(|&first| first <= place).checked_sub(1)
    }

    /// Element range of a chunk: start and length.
    fn range(&self, group: usize, chunk: usize) -> (usize, usize) {
        (chunk * self.spec.chunk_elements as usize, self.spec.chunk_len(group, chunk))
    }
}

/// The end of a backward pass that parks gradients.
pub(crate) struct Ending<'a>(&'a GradientPark);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let coming = std::mem::take(&mut self.0.books().coming);
        // Waits for the device, and not with the books in hand.
        drop(coming);
    }
}

impl Books {
    /// Whether anything of a group is parked or on its way.
    fn knows(&self, group: usize) -> bool {
        self.parked[group].iter().any(Option::is_some) || self.brings(group)
    }

    /// Whether something has to land before what is parked of a group can be taken for its next use.
    fn must_land(&self, group: usize) -> bool {
        self.coming.len() >= DOWNLOAD_WINDOW || self.brings(group)
    }

    /// Whether anything of a group is on its way.
    fn brings(&self, group: usize) -> bool {
        self.coming.iter().any(|coming| coming.group == group)
    }
}

fn as_gradient(bytes: &[u8], dtype: DType) -> Gradient<'_> {
    match dtype {
        DType::F32 => Gradient::F32(cast_slice(bytes)),
        DType::F16 => Gradient::F16(cast_slice(bytes)),
        _ => Gradient::Bf16(cast_slice(bytes)),
    }
}
