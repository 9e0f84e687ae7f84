//! The update: read chunk i+1 | step chunk i | write chunk i−1.
//!
//! State on disk passes through a fixed number of slots per kind. A slot is taken when a chunk's read starts and comes back
//! when its write is done, so the slots alone bound reads, compute and writes in flight. New state goes to the next
//! generation; the live one is never touched, unless there is no other. Kinds of which there is a copy in memory are not read: the copy is updated, and
//! what is written comes from it, at once or when all chunks are updated. Resident state is updated where it is. What is on the
//! device (`device_state.rs`) is none of this: no chunk of it comes here.
//!
//! Nobody waits soon for what is read and written here, so that on the disk all that compute reads goes ahead of it, but for one thing:
//! when forward follows the update, weights that fetch found no room for in time are read from disk, after their write. So
//! writes of new weights are urgent then. In their turn, behind all that the slots hold, they cost a step up to a quarter of its time where
//! half of the state is in slots (`tests/virtual_time.rs`).

use crate::cache::{Caching, GroupCopies, exclusive};
use crate::gradients::{Arriving, GradientPark, Landed};
use crate::overlap::Gate;
use crate::runs::Runs;
use crate::state::{Resident, StateHome, StateKinds, Stored};
use crate::timeline::{Resource, Timeline};
use crate::turns::ChunkMemory;
use crate::{EngineError, Result};
use crossbeam::channel::Receiver;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use terrace_aio::{IoEngine, Urgency};
use terrace_optimizer::{Gradient, Optimizer, OptimizerError, Part, StepArgs, update_parts};
use terrace_tiers::{BlobKey, Generation, Lease, Pool, Sealed, StoreSpec};

/// Slots for optimizer state on its way from disk through the update and back, one pool per kind.
#[derive(Debug)]
pub(crate) struct UpdateSlots {
    pools: Vec<Pool>,
    /// The first chunks of the next update, if they are known.
    ahead: Mutex<VecDeque<Begun>>,
}

impl UpdateSlots {
    /// `disk` is the engine that reads and writes the slots in every step, if one does.
    pub(crate) fn new(
        kinds: &StateKinds,
        slots: usize,
        elements: usize,
        disk: Option<&Arc<dyn IoEngine>>,
    ) -> Result<Self> {
        const NAME: &str = "optimizer state";
        let pools = kinds.blobs.iter().map(|blob| {
            let bytes = blob.bytes(elements as u64) as usize;
            match disk {
                Some(io) => Pool::new_registered(NAME, slots, bytes, io),
                None => Pool::new(NAME, slots, bytes),
            }
        });
        Ok(Self { pools: pools.collect::<std::result::Result<_, _>>()?, ahead: Mutex::default() })
    }

    /// One slot of every kind, waiting for them if need be.
    pub(crate) fn acquire(&self, kinds: &StateKinds, elements: usize) -> Vec<Lease> {
        let bytes = kinds.blobs.iter().map(|b| b.bytes(elements as u64) as usize);
        bytes.enumerate().map(|(kind, bytes)| self.acquire_one(kind, bytes)).collect()
    }

    /// One slot of one kind, if need be one of those that were read ahead.
    pub(crate) fn acquire_one(&self, kind: usize, bytes: usize) -> Lease {
        let pool = &self.pools[kind];
        pool.try_acquire(bytes).unwrap_or_else(|| {
            self.forget_ahead();
            pool.acquire(bytes)
        })
    }

    /// Slots of some kinds, if all are free.
    pub(crate) fn try_acquire(&self, lens: impl Iterator<Item = (usize, usize)>) -> Option<Vec<Lease>> {
        lens.map(|(kind, bytes)| self.pools[kind].try_acquire(bytes)).collect()
    }

    /// Chunks that are updated at once at most: the rest of the slots is for the disk meanwhile. One where they are done sooner than
    /// a thread wakes up.
    fn together(&self) -> usize {
        let bytes: usize = self.pools.iter().map(Pool::slot_bytes).sum();
        let slots = self.pools.iter().map(Pool::slots).min().unwrap_or(0);
        if bytes < SHARED_BYTES_MIN { 1 } else { (slots / 3).max(1) }
    }

    fn has_free(&self) -> bool {
        self.pools.iter().all(|pool| pool.out() < pool.slots())
    }

    /// Starts to read the state of the first chunks of the next update, one that waits for the norm, as far as there are slots. No
    /// update is under way; what it wrote is committed, or nothing is before a save.
    pub(crate) fn read_ahead(
        &self,
        stored: &Stored,
        kinds: &StateKinds,
        spec: &StoreSpec,
        park: &GradientPark,
    ) {
        // The update tries again, and says what is wrong.
        if stored.settle().is_err() {
            return;
        }
        let slots = self.pools.iter().map(Pool::slots).min().unwrap_or(0);
        for at in Items::all(spec, park).take(slots) {
            let Ok(begun) = self.begin(stored, kinds, spec, at, true) else { return };
            self.ahead().push_back(begun);
        }
    }

    /// Gives up what was read ahead: whoever reads it then reads what is on disk then.
    pub(crate) fn forget_ahead(&self) {
        // Reads in flight are waited for without the lock.
        drop(std::mem::take(&mut *self.ahead()));
    }

    fn has_ahead(&self) -> bool {
        !self.ahead().is_empty()
    }

    fn ahead(&self) -> MutexGuard<'_, VecDeque<Begun>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of a chunk if it was read ahead, as the next of a list. What else was is given up if it was not.
    fn take_ahead(&self, at: ChunkAt, leaves_copies: bool) -> Option<Begun> {
        let found = self.ahead().pop_front();
        let found = found.filter(|begun| begun.at == at && begun.leaves_copies == leaves_copies);
        if found.is_none() {
            self.forget_ahead();
        }
        found
    }

    /// Starts to read the state of a chunk.
    fn begin(
        &self,
        stored: &Stored,
        kinds: &StateKinds,
        spec: &StoreSpec,
        at: ChunkAt,
        leaves_copies: bool,
    ) -> Result<Begun> {
        let (group, chunk) = at;
        let elements = spec.chunk_len(group, chunk);
        let generation = if stored.saves { Generation::Settled } else { Generation::Live };
        let mut state = Vec::with_capacity(kinds.blobs.len());
        let copied: Vec<bool> = stored.cache.lock(group).iter().map(Option::is_some).collect();
        for (index, (blob, copied)) in kinds.blobs.iter().zip(copied).enumerate() {
            if copied && (leaves_copies || stored.saves) {
                state.push(None);
                continue;
            }
            let lease = self.acquire_one(index, blob.bytes(elements as u64) as usize);
            state.push(Some(if kinds.read_by_update[index] && !copied {
                let key = BlobKey { group, kind: blob.kind };
                Arriving::Reading(stored.store.read(key, chunk..chunk + 1, generation, lease)?)
            } else {
                Arriving::Here(lease)
            }));
        }
        Ok(Begun { at, leaves_copies, state })
    }
}

/// Bytes of a chunk below which one thread updates it sooner than another wakes up.
const SHARED_BYTES_MIN: usize = 128 << 10;

/// What an update works on.
pub(crate) struct Updater<'a> {
    pub(crate) optimizer: &'a dyn Optimizer,
    pub(crate) args: StepArgs,
    pub(crate) runs: &'a Runs,
    pub(crate) kinds: &'a StateKinds,
    pub(crate) slots: &'a UpdateSlots,
    pub(crate) spec: &'a StoreSpec,
    pub(crate) pool: &'a rayon::ThreadPool,
    pub(crate) timeline: Option<&'a Timeline>,
    /// Copies are not written with their chunk, but by whoever runs the update.
    pub(crate) leaves_copies: bool,
    /// Which groups have copies, where the chunks may have to be updated once more: their gradients stay parked.
    pub(crate) speculates: Option<&'a Caching>,
    /// Where fetch may wait for new weights.
    pub(crate) gate: Option<&'a Gate>,
}

/// A chunk of a group: `(group, chunk)`.
pub(crate) type ChunkAt = (usize, usize);

/// The chunks of an update, in their order.
pub(crate) enum Items {
    /// Those of a list.
    Known(VecDeque<ChunkAt>),
    /// As they come.
    Coming(Receiver<ChunkAt>),
}

impl Items {
    /// The chunks of a group.
    pub(crate) fn of_group(spec: &StoreSpec, group: usize) -> impl Iterator<Item = ChunkAt> + use<> {
        (0..spec.chunks(group)).map(move |chunk| (group, chunk))
    }

    /// The chunks of all groups whose gradients `park` has in host memory or on disk.
    pub(crate) fn all(spec: &StoreSpec, park: &GradientPark) -> impl Iterator<Item = ChunkAt> {
        (0..park.groups_of_host()).flat_map(|group| Self::of_group(spec, group))
    }

    /// The group of the chunk that is next, as far as it is known.
    fn next_group(&self) -> Option<usize> {
        match self {
            Self::Known(queue) => queue.front().map(|at| at.0),
            Self::Coming(_) => None,
        }
    }

    /// The next chunk; waits for it only if `wait` says so. `None` if there is none, or none yet.
    fn next(&mut self, wait: bool) -> Option<ChunkAt> {
        match self {
            Self::Known(queue) => queue.pop_front(),
            Self::Coming(chunks) if wait => chunks.recv().ok(),
            Self::Coming(chunks) => chunks.try_recv().ok(),
        }
    }
}

/// The state of a chunk on its way into memory.
#[derive(Debug)]
struct Begun {
    at: ChunkAt,
    /// As the update must do, too.
    leaves_copies: bool,
    /// Of every kind; what the update only writes is here from the start. `None` for what is neither read nor written.
    state: Vec<Option<Arriving<Lease>>>,
}

/// A chunk whose state is on its way into memory.
struct Chunk {
    at: ChunkAt,
    /// As [`Begun::state`].
    state: Vec<Option<Arriving<Lease>>>,
    gradient: Arriving<ChunkMemory>,
}

/// A chunk all of which is in memory.
struct LandedChunk {
    at: ChunkAt,
    /// As [`Begun::state`], and the gradient's after that if it came from disk.
    state: Vec<Option<Landed<Lease>>>,
    gradient: Option<ChunkMemory>,
}

/// A chunk that is updated.
struct Updated {
    at: ChunkAt,
    /// What is written, by kind.
    sealed: Vec<(usize, Sealed)>,
    gradient: ChunkMemory,
}

/// What is left of a copy of which pieces are taken, one behind the other.
struct Rest<'a> {
    bytes: &'a mut [u8],
    /// Where it begins in the copy.
    start: usize,
}

impl Chunk {
    /// Whether [`Updater::land`] would not wait.
    fn is_here(&self) -> bool {
        self.state.iter().flatten().all(Arriving::is_here) && self.gradient.is_here()
    }
}

impl<'a> Rest<'a> {
    fn take(&mut self, range: Range<usize>) -> &'a mut [u8] {
        let (_, tail) = std::mem::take(&mut self.bytes).split_at_mut(range.start - self.start);
        let (piece, tail) = tail.split_at_mut(range.len());
        (self.bytes, self.start) = (tail, range.end);
        piece
    }
}

impl Updater<'_> {
    /// Updates chunks, those of a group in their order and its last one included, with the parked gradients. The
    /// gate opens for every group whose weights can be used. Returns the time spent waiting for the disk.
    pub(crate) fn run(
        &self,
        home: &StateHome,
        park: &GradientPark,
        chunks: impl Iterator<Item = ChunkAt>,
    ) -> Result<Duration> {
        match home {
            StateHome::Resident(resident) => {
                let mut stalled = Duration::ZERO;
                let mut chunks = chunks.peekable();
                while let Some((group, first)) = chunks.next() {
                    let mut end = first + 1;
                    while end - first < park.reads_max() && chunks.next_if_eq(&(group, end)).is_some() {
                        end += 1;
                    }
                    stalled += self.update_resident(resident, park, group, first..end)?;
                    if let Some(gate) = self.gate.filter(|_| end == self.spec.chunks(group)) {
                        gate.open_up_to(group + 1);
                    }
                }
                Ok(stalled)
            }
            StateHome::Disk(stored) => self.stream(stored, park, &mut Items::Known(chunks.collect())),
        }
    }

    /// As [`run`](Self::run) for state on disk, from a shared store. The gate opens for every group before the one whose chunk is next:
    /// all chunks of those were handed to the store. Who gives the chunks opens it for what follows the last.
    pub(crate) fn stream(&self, stored: &Stored, park: &GradientPark, items: &mut Items) -> Result<Duration> {
        stored.settle()?;
        let together = self.slots.together().min(self.pool.current_num_threads());
        let mut ahead: VecDeque<Chunk> = VecDeque::new();
        let mut stalled = Duration::ZERO;
        loop {
            // Read as far ahead as slots allow; wait for a slot only when nothing else is left to do.
            while ahead.len() < park.reads_max()
                && (ahead.is_empty() || self.slots.has_free() || self.slots.has_ahead())
                && let Some(at) = items.next(ahead.is_empty())
            {
                let began = Instant::now();
                ahead.push_back(self.begin(stored, park, at)?);
                stalled += began.elapsed();
            }
            let Some(next) = ahead.pop_front() else { return Ok(stalled) };
            let began = Instant::now();
            let mut here = vec![self.land(next)?];
            stalled += began.elapsed();
            let group = here[0].at.0;
            while here.len() < together
                && ahead.front().is_some_and(|next| next.at.0 == group && next.is_here())
                && let Some(next) = ahead.pop_front()
            {
                here.push(self.land(next)?);
            }
            self.finish(stored, park, here)?;
            if let (Some(gate), Some(group)) =
                (self.gate, ahead.front().map(|chunk| chunk.at.0).or_else(|| items.next_group()))
            {
                gate.open_up_to(group);
            }
        }
    }

    fn begin(&self, stored: &Stored, park: &GradientPark, at: ChunkAt) -> Result<Chunk> {
        let begun = match self.slots.take_ahead(at, self.leaves_copies) {
            Some(begun) => begun,
            None => self.slots.begin(stored, self.kinds, self.spec, at, self.leaves_copies)?,
        };
        Ok(Chunk { at, state: begun.state, gradient: parked(park, at.0, at.1)? })
    }

    /// Waits for the state of a chunk and its gradient.
    fn land(&self, chunk: Chunk) -> Result<LandedChunk> {
        let began = Instant::now();
        let mut state = Vec::with_capacity(chunk.state.len() + 1);
        for arriving in chunk.state {
            state.push(arriving.map(Arriving::land).transpose()?);
        }
        // One from disk is verified with the state.
        let gradient = match chunk.gradient.land()? {
            Landed::Here(memory) => Some(memory),
            Landed::Unverified(arrived) => {
                state.push(Some(Landed::Unverified(arrived)));
                None
            }
        };
        self.note(Resource::UpdateWait, began, chunk.at.0, chunk.at.1..chunk.at.1 + 1);
        Ok(LandedChunk { at: chunk.at, state, gradient })
    }

    /// Updates chunks of one group, in their order, and hands them to the store. Each is on one thread from its first checksum to its last,
    /// in whose caches it stays: with several threads on each, one after the other, a chunk took three times as long, and woke them
    /// three times.
    fn finish(&self, stored: &Stored, park: &GradientPark, chunks: Vec<LandedChunk>) -> Result {
        let group = chunks[0].at.0;
        let mut copies = stored.cache.lock(group);
        let mut left = Vec::with_capacity(copies.len());
        left.extend(
            copies.iter_mut().map(|copy| copy.as_mut().map(|copy| Rest { bytes: exclusive(copy), start: 0 })),
        );
        let work = chunks.into_iter().map(|chunk| {
            let range = |kind| self.kinds.range(kind, self.spec, group, chunk.at.1);
            let of_copies = left.iter_mut().enumerate();
            let of_copies =
                of_copies.map(|(kind, rest)| rest.as_mut().map(|rest| rest.take(range(kind)))).collect();
            (chunk, of_copies)
        });
        let work: Vec<(LandedChunk, Vec<Option<&mut [u8]>>)> = work.collect();
        let mut updated: Vec<Option<Result<Updated>>> = work.iter().map(|_| None).collect();
        self.pool.in_place_scope(|scope| {
            let mut jobs = work.into_iter().zip(&mut updated);
            let own = jobs.next();
            for ((chunk, copies), updated) in jobs {
                scope.spawn(|_| *updated = Some(self.update(park, chunk, copies)));
            }
            if let Some(((chunk, copies), updated)) = own {
                *updated = Some(self.update(park, chunk, copies));
            }
        });
        for updated in updated.into_iter().flatten() {
            self.hand_out(stored, park, &copies, updated?)?;
        }
        Ok(())
    }

    /// Verifies, updates and seals a chunk. `copies` has the chunk's bytes of every kind of which there is a copy.
    fn update(
        &self,
        park: &GradientPark,
        chunk: LandedChunk,
        mut copies: Vec<Option<&mut [u8]>>,
    ) -> Result<Updated> {
        let began = Instant::now();
        let (group, at) = chunk.at;
        let verified = chunk.state.into_iter().map(|landed| landed.map(Landed::verify).transpose());
        let mut leases = verified.collect::<Result<Vec<Option<Lease>>>>()?;
        let from_disk = || leases.pop().flatten().expect("the gradient came last").into();
        let gradient: ChunkMemory = chunk.gradient.unwrap_or_else(from_disk);
        let slices = leases.iter_mut().zip(&mut copies).map(|(lease, copy)| match copy {
            Some(copy) => &mut **copy,
            None => &mut **lease.as_mut().expect("what has no copy was read or will be written"),
        });
        self.apply(group, at, park.as_gradient(&gradient), slices, |args, gradient, mut state| {
            self.optimizer.update(&args, gradient, &mut state)
        })?;
        let written = leases.into_iter().zip(&copies).enumerate();
        let sealed = written.filter_map(|(kind, (lease, copy))| {
            let mut lease = lease?;
            if let Some(copy) = copy {
                lease.copy_from_slice(copy);
            }
            Some((kind, Sealed::new(lease)))
        });
        let sealed = sealed.collect();
        self.note(Resource::Update, began, chunk.at.0, chunk.at.1..chunk.at.1 + 1);
        Ok(Updated { at: chunk.at, sealed, gradient })
    }

    /// Hands what was updated to those who need it: new state to the store, weights to who waits for them.
    fn hand_out(
        &self,
        stored: &Stored,
        park: &GradientPark,
        copies: &GroupCopies,
        updated: Updated,
    ) -> Result {
        let Updated { at, sealed, gradient } = updated;
        let (group, chunk) = at;
        if self.speculates.is_some() {
            park.put_back(at, gradient);
        } else {
            drop(gradient);
        }
        let weight = self.kinds.weight;
        // Who waits for weights of which there is a copy is given that.
        let read_by = self.gate.filter(|_| copies[weight].is_none());
        for (kind, sealed) in sealed {
            let mut urgency = Urgency::Whenever;
            if let Some(gate) = read_by.filter(|_| kind == weight) {
                gate.leave(group, self.kinds.range(kind, self.spec, group, chunk).start, sealed.bytes());
                urgency = Urgency::Soon;
            }
            let key = BlobKey { group, kind: self.kinds.blobs[kind].kind };
            stored.store.write_sealed_as(urgency, key, chunk, sealed)?;
        }
        Ok(())
    }

    /// Notes what ends now, of these chunks of a group; all of them are the group.
    fn note(&self, resource: Resource, began: Instant, group: usize, chunks: Range<usize>) {
        let Some(timeline) = self.timeline else { return };
        let name = &self.spec.groups[group].name;
        let (first, last) = (chunks.start, chunks.end.saturating_sub(1));
        let words = if first < last && chunks.len() == self.spec.chunks(group) {
            name.clone()
        } else if first < last {
            format!("{name} #{first} to #{last}")
        } else {
            format!("{name} #{first}")
        };
        timeline.note(resource, began, words);
    }

    /// Updates chunks of a group in host memory, all at once. Returns the time spent waiting for saves and the disk.
    fn update_resident(
        &self,
        resident: &Resident,
        park: &GradientPark,
        group: usize,
        chunks: Range<usize>,
    ) -> Result<Duration> {
        let waiting = Instant::now();
        let mut blobs = resident.change(group);
        let gradients: Vec<_> =
            chunks.clone().map(|chunk| parked(park, group, chunk)).collect::<Result<_>>()?;
        let gradients: Vec<ChunkMemory> = gradients.into_iter().map(Arriving::wait).collect::<Result<_>>()?;
        let began = Instant::now();
        let bytes = blobs.iter_mut().map(|blob| Rest { bytes: exclusive(blob), start: 0 });
        let mut left: Vec<Rest<'_>> = bytes.collect();
        let mut parts = Vec::new();
        for (chunk, gradient) in chunks.clone().zip(&gradients) {
            let of_kind = left.iter_mut().enumerate();
            let slices =
                of_kind.map(|(kind, rest)| rest.take(self.kinds.range(kind, self.spec, group, chunk)));
            self.apply(group, chunk, park.as_gradient(gradient), slices, |args, gradient, state| {
                parts.push(Part { args, gradient, state });
                Ok(())
            })?;
        }
        update_parts(self.optimizer, self.pool, parts)?;
        self.note(Resource::Update, began, group, chunks);
        Ok(began - waiting)
    }

    /// Steps the runs of a chunk one after the other by `update`. `state` is the chunk's bytes of every kind.
    fn apply<'s>(
        &self,
        group: usize,
        chunk: usize,
        gradient: Gradient<'s>,
        state: impl Iterator<Item = &'s mut [u8]>,
        mut update: impl FnMut(
            StepArgs,
            Gradient<'s>,
            Vec<&'s mut [u8]>,
        ) -> std::result::Result<(), OptimizerError>,
    ) -> Result {
        let kinds = &self.kinds.blobs;
        let mut state_left: Vec<&'s mut [u8]> = state.collect();
        let mut gradient_left = gradient;
        let start = chunk * self.spec.chunk_elements as usize;
        for (elements, rates) in self.runs.within(group, start..start + gradient.len()) {
            let mut state = Vec::with_capacity(kinds.len());
            for (left, kind) in state_left.iter_mut().zip(kinds) {
                let (piece, rest) = std::mem::take(left).split_at_mut(kind.bytes(elements as u64) as usize);
                state.push(piece);
                *left = rest;
            }
            let gradient;
            (gradient, gradient_left) = gradient_left.split_at(elements);
            if !rates.frozen {
                update(rates.args(&self.args), gradient, state)?;
            }
        }
        Ok(())
    }
}

fn parked(park: &GradientPark, group: usize, chunk: usize) -> Result<Arriving<ChunkMemory>> {
    park.take(Urgency::Whenever, group, chunk)?.ok_or_else(|| {
        EngineError::Config(format!("group {group} has no gradient; every block must be used in a step"))
    })
}
