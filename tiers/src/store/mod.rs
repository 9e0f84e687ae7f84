//! Blobs on disk in two generations, committed atomically, or in one.
//!
//! During a step the *live* generation is only read and the *next* one only written. [`DiskStore::commit`] waits for
//! every write, makes the data durable, then flips the live generation by writing a manifest slot. Until that slot is
//! durable the old generation is intact; afterwards the new one is. There is no instant at which neither is.
//!
//! A store with *one* generation takes half the space: its next generation lies where the live one is. Before the first chunk
//! after a commit is overwritten a *mark* is made durable, which says that no step is whole; the next commit takes its place.
//! Between the two there is no way back: opening such a store is refused ([`TierError::Changing`]), and so is reading what was
//! given up ([`DiskStore::abandon`]).
//!
//! Opening a store says what was damaged and had a substitute ([`Recovery`]): a copy of what says how the store is laid out, which is
//! written anew, or a commit, which gives way to the one before.
//!
//! Hazards, and what closes them:
//! - *read after write* (a chunk of the next generation is read while it is being written): [`DiskStore::read`] waits for
//!   the blob's fence, the set of tickets of its writes.
//! - *commit beside reads* (a read has taken a ticket out of its blob's fence, so that the commit does not see it): commits
//!   wait until no read holds one, and learn whether its write failed.
//! - *write after commit* (the new step overwrites the generation that the manifest in flight refers to): `commit` returns
//!   only when the slot is durable. Nobody writes during a commit: whoever writes a step commits it.
//! - *write after a commit that was cut off* (its process ended between the write of the slot and the sync, and the next one goes
//!   on from the slot it sees, over the generation that the durable slot refers to): opening makes the slot it found durable.
//! - *write after a failed commit* (a slot whose sync failed may be durable all the same, and refers to the generation that a
//!   retry would overwrite): from then on the store refuses writes, until it is opened again.
//! - *write over a commit that is held* ([`DiskStore::hold`]: a reader of its own pace needs the last commit as it is): the next
//!   commit, after which its generation is written to, waits until nobody holds it.
//! - *older chunks beside a commit that failed* (who reads the newest chunks gets those of the commit before, and takes them for the
//!   newest): a generation whose commit failed is forgotten by [`DiskStore::abandon`] alone, and cannot be read until then.
//! - *a loss that is told once* (to the sync ahead of a commit, while the commit's own says that all is well): such a sync that failed
//!   fails the commit.
//! - *write before the mark* (with one generation, a power cut could take the mark and leave the write): nothing is written
//!   after a commit until the mark is durable.

mod ahead;
mod extents;
#[doc(hidden)]
pub mod fuzzing;
mod held;
mod lock;
mod manifest;
mod recovery;
mod transfer;
mod verify;
mod view;
mod writes;

use crate::pool::Lease;
use crate::volume::{self, SCRATCH_ID, Volume, World, existing_dir, not_ours, require_space};
use crate::{BlobKey, Generation, StoreSpec, Striping, TRAINING_SCRATCH, TierError};
pub use ahead::SyncAhead;
use ahead::{Ahead, Experience};
use extents::Extents;
pub use held::Held;
use lock::DirLock;
pub use manifest::TRAINER_BYTES_MAX;
use manifest::{Manifest, Slot};
pub use recovery::Recovery;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use terrace_aio::{FileId, IoEngine, IoError, OpenMode, Ticket, Urgency};
pub(crate) use transfer::Check;
pub use transfer::{Arrived, PendingRead, Sealed};
pub use verify::{Damage, DamageCause, FilePart, Verification};
pub use view::{Access, Commit, CommitFacts, SlotFacts, SlotState, StoreView};

const DATA_FILE: &str = "state.bin";

/// A store of blobs over one or more directories.
#[derive(Debug)]
pub struct DiskStore {
    extents: Extents,
    manifest: Manifest,
    versions: Mutex<Versions>,
    /// Says that [`Versions::claimed`] or [`Versions::held`] went down.
    released: Condvar,
    recoveries: Vec<Recovery>,
    sync_ahead: SyncAhead,
    experience: Experience,
    _locks: Vec<DirLock>,
}

/// The generation that is live, and the one that is being written.
#[derive(Debug)]
struct Versions {
    committed: Committed,
    sequence: u64,
    live: u64,
    live_table: Vec<u64>,
    next: Next,
    /// Of what the tickets are that somebody took out of fences and waits for.
    claimed: Vec<(BlobKey, usize)>,
    /// Readers that need the last commit as it is.
    held: usize,
    /// Hazard (write after a failed commit).
    is_uncertain: bool,
    /// With one generation: the mark was made, and the live chunks may be overwritten.
    is_changing: bool,
    /// What overwrote them was given up: only writing all of them anew helps.
    is_lost: bool,
}

/// What the last commit said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Optimizer steps done.
    pub step: u64,
    /// The trainer's own words.
    pub trainer: Vec<u8>,
}

/// The generation that is being written.
#[derive(Debug)]
struct Next {
    table: Vec<u64>,
    written: Vec<bool>,
    /// Writes in flight of each blob, with their chunks.
    fences: HashMap<BlobKey, VecDeque<(usize, Ticket)>>,
    /// The first write that failed.
    failed: Option<IoError>,
    ahead: Ahead,
}

impl DiskStore {
    /// Bytes that a store needs in each directory.
    pub fn bytes_per_dir(spec: &StoreSpec, striping: &Striping) -> Vec<u64> {
        Volume::file_bytes(spec.volume_bytes(), striping)
    }

    /// Says so where there is no room for a store in directories that need not be there yet. Nothing is made. What a creation that never
    /// committed left there counts as free, as its removal is the first thing that [`create`](Self::create) does.
    ///
    /// # Errors
    /// There is too little room, or a directory cannot be examined.
    pub fn require_room(spec: &StoreSpec, striping: &Striping) -> Result<(), TierError> {
        let dirs: Vec<PathBuf> = striping.dirs().iter().map(|dir| existing_dir(dir)).collect();
        let left_over = striping.dirs().iter().map(|dir| allocated_bytes(dir));
        let bytes = Self::bytes_per_dir(spec, striping);
        let more: Vec<u64> =
            bytes.into_iter().zip(left_over).map(|(all, there)| all.saturating_sub(there)).collect();
        require_space(&dirs, &more)
    }

    /// Makes a store. Nothing is live until the first [`commit`](Self::commit): a store that is dropped before removes its files, and those
    /// that a process left which was killed before are replaced by the next creation.
    ///
    /// # Errors
    /// The layout is none, or a directory holds state of this or another run, is in use, too small, or cannot be written.
    pub fn create(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        spec: StoreSpec,
    ) -> Result<Self, TierError> {
        spec.check()?;
        let dirs = striping.dirs();
        let world = World::of(&**engine);
        let locks = lock_all(world, dirs)?;
        refuse_existing(engine, dirs)?;
        remove_leftovers(engine, dirs)?;
        remove_scratch(engine, dirs)?;
        if world == World::Real {
            require_room(&spec, striping)?;
        }
        let id = RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()));
        let volume = Volume::create(engine, striping, DATA_FILE, spec.volume_bytes(), id)?;
        let manifest = Manifest::create(engine, striping.first(), &spec, id).inspect_err(|_| {
            // What cannot be removed is left to the next creation.
            let _ = volume.remove();
        })?;
        let table = vec![0; spec.table_len()];
        // With two generations the first commit makes generation 0 live.
        let live = spec.generations - 1;
        let committed = Committed { step: 0, trainer: Vec::new() };
        Ok(Self {
            versions: Mutex::new(Versions::new(committed, 0, live, table)),
            released: Condvar::new(),
            extents: Extents::new(spec, volume),
            manifest,
            recoveries: Vec::new(),
            sync_ahead: SyncAhead::default(),
            experience: Experience::default(),
            _locks: locks,
        })
    }

    /// Opens a store at its last committed step, and makes sure that this step is durable. The directories share the state as
    /// they did when it was made.
    ///
    /// # Errors
    /// There is none or no directory was given, it is in use, it is damaged, it was being overwritten, or it cannot be written.
    pub fn open(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<Self, TierError> {
        // None is made for its lock.
        let missing = dirs.iter().find(|dir| !dir.is_dir());
        if let Some(missing) = missing.filter(|_| World::of(&**engine) == World::Real) {
            return Err(TierError::NoState {
                path: missing.clone(),
                detail: "there is no such directory".into(),
            });
        }
        let locks = lock_all(World::of(&**engine), dirs)?;
        let (manifest, spec) = Manifest::open(engine, &dirs[0], OpenMode::ReadWrite)
            .map_err(|e| hint_at_order(engine, dirs, e))?;
        let Some((slot, passed_over)) = manifest.newest(&spec)? else {
            let detail = "its creation never finished; start again with Engine::create".into();
            return Err(TierError::NoState { path: manifest.path.clone(), detail });
        };
        if slot.is_mark {
            return Err(TierError::Changing { dir: dirs[0].clone(), step: slot.step });
        }
        remove_scratch(engine, dirs)?;
        let volume =
            Volume::open(engine, dirs, DATA_FILE, spec.volume_bytes(), manifest.id, OpenMode::ReadWrite)?;
        // Hazard (write after a commit that was cut off). A sync alone would do, had none failed before. The bytes are those that
        // are there, so that a power cut in the middle changes nothing.
        manifest.write(&slot)?;
        manifest.mend()?;
        volume.mend()?;
        Ok(Self {
            recoveries: Recovery::all(&dirs[0], &manifest, &volume, Some((&slot, passed_over)), true),
            versions: Mutex::new(Versions::of(slot)),
            released: Condvar::new(),
            extents: Extents::new(spec, volume),
            manifest,
            sync_ahead: SyncAhead::default(),
            experience: Experience::default(),
            _locks: locks,
        })
    }

    /// Has what is written become durable along the way, so that commits have less of it to do at once: for a store with a commit
    /// in every step. It changes what a commit costs and nothing else.
    #[must_use]
    pub fn sync_ahead(mut self, sync_ahead: SyncAhead) -> Self {
        self.sync_ahead = sync_ahead;
        self
    }

    /// A step took so long, and waited for reads in it: what [`SyncAhead::Auto`] goes by.
    pub fn note_step(&self, waited: Duration, took: Duration) {
        self.experience.note_step(waited, took);
    }

    /// The layout.
    pub fn spec(&self) -> &StoreSpec {
        &self.extents.spec
    }

    /// The blob, and the chunk of it, at `offset` of a file; `None` if it is no chunk of this store.
    pub fn chunk_at(&self, file: FileId, offset: u64) -> Option<(BlobKey, usize)> {
        self.extents.find(file, offset)
    }

    /// The directories, and how the state was shared among them when it was made.
    pub fn striping(&self) -> &Striping {
        self.extents.volume.striping()
    }

    /// What was damaged when the store was opened, and what is used in its place.
    pub fn recoveries(&self) -> &[Recovery] {
        &self.recoveries
    }

    /// What the last commit said.
    pub fn committed(&self) -> Committed {
        self.lock().committed.clone()
    }

    /// Whether there is a commit at all.
    pub fn is_committed(&self) -> bool {
        self.lock().sequence > 0
    }

    /// Whether a commit failed in a way that leaves open which is the last: this store takes no more writes, and opening it anew
    /// finds out.
    pub fn is_uncertain(&self) -> bool {
        self.lock().is_uncertain
    }

    /// Whether the last commit is no longer there, since its only generation is being overwritten.
    pub fn is_changing(&self) -> bool {
        self.lock().is_changing
    }

    /// Says so if chunks of the last commit were overwritten and what overwrote them was given up.
    ///
    /// # Errors
    /// They were; or whether what overwrote them was committed is not known.
    pub fn require_whole(&self) -> Result<(), TierError> {
        let versions = self.lock();
        if !versions.is_lost {
            return Ok(());
        }
        // Opening it again finds out; it is not to be thrown away before.
        self.require_certain(&versions)?;
        drop(versions);
        Err(self.changing())
    }

    fn changing(&self) -> TierError {
        TierError::Changing { dir: self.striping().first().to_owned(), step: self.committed().step }
    }

    /// Starts reading chunks `chunks` of a blob into `lease`, which is exactly as long as they are. One reader at a time
    /// reads the chunks of a blob that are being written.
    ///
    /// # Errors
    /// A write of the generation that is being written failed, and this read is of that; or the chunks were overwritten by what was
    /// given up; or nothing was committed yet.
    ///
    /// # Panics
    /// If the group has no such chunks, the store no such kind, the lease has another length or a chunk of the next generation was not
    /// written yet; for [`Generation::Newest`], if some of the chunks were written and some not.
    pub fn read(
        &self,
        key: BlobKey,
        chunks: Range<usize>,
        generation: Generation,
        lease: Lease,
    ) -> Result<PendingRead, TierError> {
        self.read_as(Urgency::Whenever, key, chunks, generation, lease)
    }

    /// As [`read`](Self::read), with an urgency. It is not that of what the read depends on: a read of a chunk that is being written
    /// waits for the write, however urgent it is itself ([`write_sealed_as`](Self::write_sealed_as)).
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// As [`read`](Self::read).
    pub fn read_as(
        &self,
        urgency: Urgency,
        key: BlobKey,
        chunks: Range<usize>,
        generation: Generation,
        lease: Lease,
    ) -> Result<PendingRead, TierError> {
        let parts = std::slice::from_ref(&chunks);
        self.read_parts_as(urgency, key, (chunks.clone(), parts), generation, lease)
    }

    /// As [`read_as`](Self::read_as), of some chunks of a span, each to its place in `lease`, which is exactly as long as the span; what lies between
    /// them stays as it is. `parts` follow one another, and are apart.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    ///
    /// # Panics
    /// As [`read`](Self::read), and if there is no part or `parts` are not of the span in their order.
    pub fn read_parts_as(
        &self,
        urgency: Urgency,
        key: BlobKey,
        (span, parts): (Range<usize>, &[Range<usize>]),
        generation: Generation,
        lease: Lease,
    ) -> Result<PendingRead, TierError> {
        let chunks = || parts.iter().flat_map(Range::clone);
        let versions = match generation {
            Generation::Live | Generation::Settled => self.lock(),
            Generation::Next | Generation::Newest => self.fenced(key)?,
        };
        let is_written = |chunk| versions.next.written[self.extents.entry(key, chunk)];
        let generation = match generation {
            Generation::Newest | Generation::Settled if chunks().any(is_written) => Generation::Next,
            Generation::Newest | Generation::Settled => Generation::Live,
            named => named,
        };
        if generation == Generation::Live && versions.is_lost {
            drop(versions);
            return Err(self.changing());
        }
        // Another than this read may have waited for the write that failed: what is there is not what was to be written.
        if generation == Generation::Next
            && let Some(error) = &versions.next.failed
        {
            return Err(error.clone().into());
        }
        if generation == Generation::Live {
            self.require_commit(&versions)?;
        }
        let generation_index = self.generation_index(&versions, generation);
        let sum = |chunk| {
            let entry = self.extents.entry(key, chunk);
            if generation == Generation::Live {
                return versions.live_table[entry];
            }
            assert!(is_written(chunk), "chunk {chunk} of {key:?} is written before it is read");
            versions.next.table[entry]
        };
        let sums: Vec<(usize, u64)> = chunks().map(|chunk| (chunk, sum(chunk))).collect();
        drop(versions);
        Ok(self.extents.read(key, span, generation_index, &sums, (lease, urgency)))
    }

    /// Waits for all writes so far, so that [`Generation::Settled`] may read what they wrote.
    ///
    /// # Errors
    /// One of them failed.
    pub fn settle(&self) -> Result<(), TierError> {
        let versions = self.finish_writes(self.lock());
        versions.next.failed.clone().map_or(Ok(()), |error| Err(error.into()))
    }

    /// Makes the next generation the live one, durably. Reads may go on meanwhile; who [holds](Self::hold) the live one is waited for.
    ///
    /// # Errors
    /// A write or a sync failed; the last committed step is then still intact, with one generation only if no chunk was written
    /// since, and reads of what was to be committed say so until it is [given up](Self::abandon). If it was the manifest's, the new
    /// step may be the one that is found on opening, and this store takes no more writes. Before anything is done: the trainer's words are
    /// more than [`TRAINER_BYTES_MAX`], or a chunk of the next generation was not written yet.
    pub fn commit(&self, step: u64, trainer: &[u8]) -> Result<(), TierError> {
        manifest::require_short(trainer)?;
        let result = self.complete(step, trainer).and_then(|(slot, was_ahead)| {
            let began = Instant::now();
            self.extents.volume.sync()?;
            self.experience.note_sync(was_ahead, began.elapsed());
            Ok(slot)
        });
        match result {
            Ok(slot) => self.publish(slot),
            Err(error) => {
                // Hazard (older chunks beside a commit that failed).
                if let TierError::Io(cause) = &error {
                    self.lock().next.fail(cause.clone());
                }
                Err(error)
            }
        }
    }

    /// Waits for every write and gives the slot that refers to them, and whether something was synced ahead.
    fn complete(&self, step: u64, trainer: &[u8]) -> Result<(Slot, bool), TierError> {
        let versions = self.lock();
        self.require_certain(&versions)?;
        let mut versions = self.finish_writes(versions);
        if let Err(error) = versions.next.ahead.wait() {
            versions.next.fail(error);
        }
        if let Some(error) = &versions.next.failed {
            return Err(error.clone().into());
        }
        self.require_written(&versions)?;
        let slot = Slot {
            is_mark: false,
            sequence: versions.sequence + 1,
            step,
            live: self.generation_index(&versions, Generation::Next),
            table: versions.next.table.clone(),
            trainer: trainer.to_vec(),
        };
        Ok((slot, versions.next.ahead.any))
    }

    /// Commits the live generation once more under another number: a step that changed nothing. What was written for the next
    /// generation is forgotten.
    ///
    /// # Errors
    /// As [`commit`](Self::commit). Before anything is done: nothing was ever committed, or what was is being overwritten.
    pub fn commit_unchanged(&self, step: u64, trainer: &[u8]) -> Result<(), TierError> {
        manifest::require_short(trainer)?;
        self.require_commit(&self.lock())?;
        if self.is_changing() {
            return Err(self.changing());
        }
        self.abandon();
        let versions = self.lock();
        self.require_certain(&versions)?;
        let (sequence, live, table) = (versions.sequence + 1, versions.live, versions.live_table.clone());
        drop(versions);
        self.publish(Slot { is_mark: false, sequence, step, live, table, trainer: trainer.to_vec() })
    }

    fn publish(&self, slot: Slot) -> Result<(), TierError> {
        let nobody = self.released.wait_while(self.lock(), |v| v.held > 0);
        nobody.unwrap_or_else(PoisonError::into_inner).is_uncertain = true;
        self.manifest.write(&slot)?;
        // Readers of the generation that was the next one find it as the live one, at once.
        *self.lock() = Versions::of(slot);
        Ok(())
    }

    /// Waits for all writes in flight and forgets them; the live generation stays what it was. If it is the only one and was
    /// written to, it is lost: nothing of it is read any more, and only a commit of all chunks makes the store whole.
    pub fn abandon(&self) {
        // The generation is given up, so whether its writes worked does not matter.
        let _ = self.finish_writes(self.lock()).next.ahead.wait();
        self.forget_next();
    }

    fn forget_next(&self) {
        let mut versions = self.lock();
        versions.next = Next::new(versions.live_table.len());
        versions.is_lost = versions.is_changing;
    }

    /// Waits for every write of the next generation, those included that readers wait for (hazard: commit beside reads).
    fn finish_writes<'v>(&self, mut versions: MutexGuard<'v, Versions>) -> MutexGuard<'v, Versions> {
        // Under the lock: a reader finds its blob's fence whole, or done.
        let fences = std::mem::take(&mut versions.next.fences);
        for (_, ticket) in fences.into_values().flatten() {
            if let Err(error) = ticket.wait() {
                versions.next.fail(error);
            }
        }
        self.released.wait_while(versions, |v| !v.claimed.is_empty()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes the store's files. Used for stores of frozen weights that do not outlive the process.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(self) -> Result<(), TierError> {
        self.abandon();
        // Without its manifest the rest is a leftover that any creation may replace.
        self.manifest.remove()?;
        Ok(self.extents.volume.remove()?)
    }

    fn require_commit(&self, versions: &Versions) -> Result<(), TierError> {
        if versions.sequence > 0 {
            return Ok(());
        }
        Err(TierError::NoState {
            path: self.manifest.path.clone(),
            detail: "nothing was committed yet".into(),
        })
    }

    /// Says which chunk of the next generation a commit would lack.
    fn require_written(&self, versions: &Versions) -> Result<(), TierError> {
        let spec = self.spec();
        let missing = versions.next.written.iter().filter(|written| !**written).count();
        if missing == 0 {
            return Ok(());
        }
        let keys = (0..spec.groups.len())
            .flat_map(|group| spec.kinds.iter().map(move |blob| BlobKey { group, kind: blob.kind }));
        let mut chunks = keys.flat_map(|key| (0..spec.chunks(key.group)).map(move |chunk| (key, chunk)));
        let first = chunks.find(|(key, chunk)| !versions.next.written[self.extents.entry(*key, *chunk)]);
        let (key, chunk) = first.expect("the table has the chunks of all blobs");
        Err(TierError::Invalid {
            what: "a commit",
            detail: format!(
                "needs every chunk of every group written since the last one, and {missing} of {} were not: chunk {chunk} of the {} of \
                 group {} is the first",
                versions.next.written.len(),
                key.kind.words(),
                spec.groups[key.group].name
            ),
        })
    }

    fn require_certain(&self, versions: &Versions) -> Result<(), TierError> {
        if versions.is_uncertain {
            return Err(TierError::Uncertain { path: self.manifest.path.clone() });
        }
        Ok(())
    }

    fn generation_index(&self, versions: &Versions, generation: Generation) -> u64 {
        match generation {
            Generation::Live => versions.live,
            _ => (versions.live + 1) % self.extents.spec.generations,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Versions> {
        self.versions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State that never was is of no use to anybody, and may fill the disk.
impl Drop for DiskStore {
    fn drop(&mut self) {
        let never_was = {
            let versions = self.lock();
            versions.sequence == 0 && !versions.is_uncertain
        };
        if never_was && !std::thread::panicking() {
            self.abandon();
            // What cannot be removed, or was already, is left to the next creation.
            let _ = self.manifest.remove();
            let _ = self.extents.volume.remove();
        }
    }
}

impl Versions {
    fn new(committed: Committed, sequence: u64, live: u64, live_table: Vec<u64>) -> Self {
        let next = Next::new(live_table.len());
        let (is_uncertain, is_changing, is_lost) = (false, false, false);
        let (claimed, held) = (Vec::new(), 0);
        Self {
            committed,
            sequence,
            live,
            live_table,
            next,
            claimed,
            held,
            is_uncertain,
            is_changing,
            is_lost,
        }
    }

    fn of(slot: Slot) -> Self {
        let committed = Committed { step: slot.step, trainer: slot.trainer };
        Self::new(committed, slot.sequence, slot.live, slot.table)
    }
}

impl Next {
    fn new(entries: usize) -> Self {
        let (table, written) = (vec![0; entries], vec![false; entries]);
        Self { table, written, fences: HashMap::new(), failed: None, ahead: Ahead::default() }
    }

    /// Notes that a write failed, so that no commit follows.
    fn fail(&mut self, error: IoError) -> TierError {
        self.failed.get_or_insert_with(|| error.clone());
        error.into()
    }
}

/// Says so when the directories have no room for a store, and whether they would have for one generation of it.
fn require_room(spec: &StoreSpec, striping: &Striping) -> Result<(), TierError> {
    let room = |spec: &StoreSpec| require_space(striping.dirs(), &DiskStore::bytes_per_dir(spec, striping));
    room(spec).map_err(|error| match error {
        TierError::DiskTooSmall { what, smaller, dir, needed, free, .. } => {
            let once = StoreSpec { generations: 1, ..spec.clone() };
            let fits_once = spec.generations > 1 && room(&once).is_ok();
            TierError::DiskTooSmall { what, smaller, dir, needed, free, fits_once }
        }
        other => other,
    })
}

/// A store has at least one directory.
fn require_dirs(dirs: &[PathBuf]) -> Result<(), TierError> {
    if !dirs.is_empty() {
        return Ok(());
    }
    Err(TierError::Striping { detail: "there are none; give at least one directory".into() })
}

fn lock_all(world: World, dirs: &[PathBuf]) -> Result<Vec<DirLock>, TierError> {
    require_dirs(dirs)?;
    match world {
        World::Real => (0..dirs.len())
            .map(|at| DirLock::acquire(&dirs[at]).map_err(|error| named_twice(&dirs[..=at], error)))
            .collect(),
        World::Simulated => Ok(Vec::new()),
    }
}

/// A directory that is given twice is locked by its first name.
fn named_twice(dirs: &[PathBuf], error: TierError) -> TierError {
    let (TierError::Locked { .. }, [earlier @ .., last]) = (&error, dirs) else { return error };
    let place = |dir: &PathBuf| dir.canonicalize().ok();
    match earlier.iter().find(|dir| place(dir).is_some() && place(dir) == place(last)) {
        Some(first) => TierError::Striping {
            detail: format!("{} is the same directory as {}; give it once", last.display(), first.display()),
        },
        None => error,
    }
}

/// The newest slot of a directory's manifest, if there is any.
fn newest_slot(engine: &Arc<dyn IoEngine>, dir: &Path) -> Result<Option<Slot>, TierError> {
    match Manifest::open(engine, dir, OpenMode::Read) {
        Ok((manifest, spec)) => {
            // Nothing is made where the drive fails.
            if let Some(error) = manifest.damaged_copies().find_map(|copy| copy.unreadable.clone()) {
                return Err(error.into());
            }
            Ok(manifest.newest(&spec)?.map(|(slot, _)| slot))
        }
        Err(TierError::NoState { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Says so when a directory holds state that a creation there would destroy: committed state, also of a run that lists its
/// directories in another order, or a further part of a run whose first directory is elsewhere. And what is not state at all: only what a
/// creation left that never committed is to be removed.
fn refuse_existing(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<(), TierError> {
    let refused = |path: &Path, detail| Err(TierError::StateExists { path: path.to_owned(), detail });
    for dir in dirs {
        if let Some(Slot { step, is_mark, .. }) = newest_slot(engine, dir)? {
            if is_mark {
                return Err(TierError::Changing { dir: dir.clone(), step });
            }
            let detail = format!(
                "already holds training state, committed at step {step}; Engine::resume continues it, or remove the directory \
                 to start over"
            );
            return refused(dir, detail);
        }
    }
    // The first file of a volume is made first and removed last: other parts of a creation that never committed have its id.
    let mut first = None;
    for (number, dir) in dirs.iter().enumerate() {
        let path = dir.join(DATA_FILE);
        match Volume::find(engine, &path)? {
            volume::Found::Nothing | volume::Found::Unfinished => {}
            volume::Found::Foreign => return Err(not_ours(&path)),
            volume::Found::Part(part) if part.index == 0 => {
                if number == 0 {
                    first = Some(part.id);
                }
            }
            volume::Found::Part(part) if Some(part.id) == first => {}
            volume::Found::Part(part) => {
                let (index, count) = (part.index + 1, part.count);
                let detail = format!(
                    "is path {index} of {count} of another run's training state; choose another directory, or remove the file if \
                     that run is over"
                );
                return refused(&path, detail);
            }
        }
    }
    Ok(())
}

/// Turns "there is no manifest" into advice when another of the directories has one.
fn hint_at_order(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf], error: TierError) -> TierError {
    let elsewhere = dirs[1..].iter().find(|dir| engine.exists(&dir.join(manifest::FILE_NAME)));
    match (error, elsewhere) {
        (TierError::NoState { path, .. }, Some(dir)) => {
            let detail = format!(
                "the manifest is in {}; give the EngineConfig::disks of the run in their original order",
                dir.display()
            );
            TierError::NoState { path, detail }
        }
        (error, _) => error,
    }
}

/// Removes what a creation that never committed left behind, so that its space counts as free. The first directory comes
/// last, as in [`Volume::remove`].
fn remove_leftovers(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<(), TierError> {
    for dir in dirs.iter().rev() {
        for name in [manifest::FILE_NAME, DATA_FILE] {
            let path = dir.join(name);
            if engine.exists(&path) {
                engine.remove(&path)?;
            }
        }
    }
    Ok(())
}

/// Removes what a process that ended without notice left of its scratch: who has the lock finds nobody else's. What has the name and is
/// no scratch is the user's.
fn remove_scratch(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<(), TierError> {
    for path in dirs.iter().flat_map(|dir| TRAINING_SCRATCH.map(|name| dir.join(name))) {
        let is_ours = match Volume::find(engine, &path) {
            Ok(volume::Found::Part(part)) => part.id == SCRATCH_ID,
            Ok(volume::Found::Unfinished) => true,
            Ok(volume::Found::Nothing | volume::Found::Foreign) | Err(_) => false,
        };
        if is_ours {
            engine.remove(&path)?;
        }
    }
    Ok(())
}

/// Bytes on the disk of the files of a store in a directory, if there are any.
pub fn allocated_bytes(dir: &Path) -> u64 {
    let names = [manifest::FILE_NAME, DATA_FILE].into_iter().chain(TRAINING_SCRATCH);
    let found = names.filter_map(|name| dir.join(name).metadata().ok());
    found.map(|file| file.blocks() * 512).sum()
}
