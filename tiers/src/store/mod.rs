//! Blobs on disk in two generations, committed atomically.
//!
//! During a step the *live* generation is only read and the *next* one only written. [`DiskStore::commit`] waits for
//! every write, makes the data durable, then flips the live generation by writing a manifest slot. Until that slot is
//! durable the old generation is intact; afterwards the new one is. There is no instant at which neither is.
//!
//! Hazards, and what closes them:
//! - *read after write* (a chunk of the next generation is read while it is being written): [`DiskStore::read`] waits for
//!   the blob's fence, the set of tickets of its writes.
//! - *write after commit* (the new step overwrites the generation that the manifest in flight refers to): `commit` returns
//!   only when the slot is durable, and takes `&mut self`.

mod lock;
mod manifest;

use crate::key::AddressMap;
use crate::pool::Lease;
use crate::volume::{Volume, World, require_space};
use crate::{BlobKey, BlobKind, Generation, StoreSpec, TierError, checksum};
use lock::DirLock;
use manifest::{Manifest, Slot};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use terrace_aio::{IoEngine, OpKind, Ticket};

const DATA_FILE: &str = "state.bin";

/// A store of blobs over one or more directories.
#[derive(Debug)]
pub struct DiskStore {
    spec: StoreSpec,
    map: AddressMap,
    volume: Volume,
    manifest: Manifest,
    committed: Committed,
    sequence: u64,
    live: u64,
    live_table: Vec<u64>,
    next: Mutex<Next>,
    _locks: Vec<DirLock>,
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
    fences: HashMap<BlobKey, VecDeque<Ticket>>,
}

/// A read in flight, verified when it is waited for.
#[derive(Debug)]
#[must_use = "the bytes are only trusted after `wait`"]
pub struct PendingRead {
    ticket: Ticket,
    /// `(start, len, checksum)` of every chunk in the buffer.
    checks: Vec<(usize, usize, u64)>,
    path: PathBuf,
    label: String,
}

impl DiskStore {
    /// Bytes that a store needs in each of `dirs` directories.
    pub fn bytes_per_dir(spec: &StoreSpec, dirs: usize) -> u64 {
        Volume::file_bytes(spec.volume_bytes(), dirs)
    }

    /// Makes a store. Nothing is live until the first [`commit`](Self::commit); a creation that never got there leaves files
    /// that the next creation replaces.
    ///
    /// # Errors
    /// A directory holds committed state, is in use, too small, or cannot be written.
    pub fn create(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf], spec: StoreSpec) -> Result<Self, TierError> {
        let world = World::of(&**engine);
        let locks = lock_all(world, dirs)?;
        if let Some(step) = committed_step(engine, &dirs[0])? {
            let detail = format!(
                "it already holds training state, committed at step {step}; pass --resume to continue it, or remove the \
                 directory to start over"
            );
            return Err(TierError::File {
                doing: "creating state in",
                path: dirs[0].clone(),
                source: std::io::Error::new(std::io::ErrorKind::AlreadyExists, detail),
            });
        }
        remove_leftovers(engine, dirs)?;
        if world == World::Real {
            require_space(dirs, Self::bytes_per_dir(&spec, dirs.len()))?;
        }
        let id = RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()));
        let volume = Volume::create(engine, dirs, DATA_FILE, spec.volume_bytes(), id)?;
        let manifest = Manifest::create(engine, &dirs[0], &spec, id)?;
        let table = vec![0; spec.table_len()];
        // With two generations the first commit makes generation 0 live.
        let live = spec.generations - 1;
        let committed = Committed { step: 0, trainer: Vec::new() };
        Ok(Self {
            map: AddressMap::new(&spec),
            next: Mutex::new(Next::new(table.len())),
            spec,
            volume,
            manifest,
            committed,
            sequence: 0,
            live,
            live_table: table,
            _locks: locks,
        })
    }

    /// Opens a store at its last committed step.
    ///
    /// # Errors
    /// There is none, it is in use, or it is damaged.
    pub fn open(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<Self, TierError> {
        if World::of(&**engine) == World::Real && !dirs[0].is_dir() {
            return Err(TierError::NoState {
                path: dirs[0].clone(),
                detail: "there is no such directory".into(),
            });
        }
        let locks = lock_all(World::of(&**engine), dirs)?;
        let (manifest, spec) = Manifest::open(engine, &dirs[0])?;
        let Some(slot) = manifest.newest(spec.table_len())? else {
            let detail = "its creation never finished; start again without --resume".into();
            return Err(TierError::NoState { path: manifest.path.clone(), detail });
        };
        let volume = Volume::open(engine, dirs, DATA_FILE, spec.volume_bytes(), manifest.id)?;
        Ok(Self {
            map: AddressMap::new(&spec),
            next: Mutex::new(Next::new(slot.table.len())),
            spec,
            volume,
            manifest,
            committed: Committed { step: slot.step, trainer: slot.trainer },
            sequence: slot.sequence,
            live: slot.live,
            live_table: slot.table,
            _locks: locks,
        })
    }

    /// The layout.
    pub fn spec(&self) -> &StoreSpec {
        &self.spec
    }

    /// What the last commit said.
    pub fn committed(&self) -> &Committed {
        &self.committed
    }

    /// Starts reading chunks `chunks` of a blob into `lease`, which is exactly as long as they are.
    ///
    /// # Errors
    /// A write of the blob that this read depends on failed.
    ///
    /// # Panics
    /// If the lease has another length or a chunk of the next generation was not written yet.
    pub fn read(
        &self,
        key: BlobKey,
        chunks: Range<usize>,
        generation: Generation,
        lease: Lease,
    ) -> Result<PendingRead, TierError> {
        let kind = self.kind_index(key.kind);
        let element_bytes = self.spec.kinds[kind].element_bytes as usize;
        let mut checks = Vec::with_capacity(chunks.len());
        let mut start = 0;
        let table = match generation {
            Generation::Live => None,
            Generation::Next => Some(self.fenced(key)?),
        };
        for chunk in chunks.clone() {
            let len = self.spec.chunk_len(key.group, chunk) * element_bytes;
            let entry = self.map.table_entry(key.group, kind, chunk);
            let sum = table.as_ref().map_or(self.live_table[entry], |next| {
                assert!(next.written[entry], "chunk {chunk} of {key:?} is written before it is read");
                next.table[entry]
            });
            checks.push((start, len, sum));
            start += len;
        }
        drop(table);
        assert_eq!(lease.len(), start, "the lease is as long as chunks {chunks:?} of {key:?}");
        let address = self.address(key.group, kind, chunks.start, self.generation_index(generation));
        let (path, offset) = self.volume.describe(address);
        let label =
            format!("{:?} of group {} at offset {offset}", key.kind, self.spec.groups[key.group].name);
        let path = path.to_owned();
        let ticket = self.volume.engine.submit(self.volume.request(OpKind::Read, address, lease.into_io()));
        Ok(PendingRead::new(ticket, checks, path, label))
    }

    /// Starts writing one chunk of the next generation. The lease goes back to its pool when the write is done.
    ///
    /// # Errors
    /// An earlier write of the same blob failed.
    ///
    /// # Panics
    /// If the lease is not exactly as long as the chunk.
    pub fn write(&self, key: BlobKey, chunk: usize, lease: Lease) -> Result<(), TierError> {
        let kind = self.kind_index(key.kind);
        let len = self.spec.chunk_len(key.group, chunk) * self.spec.kinds[kind].element_bytes as usize;
        assert_eq!(lease.len(), len, "the lease is as long as chunk {chunk} of {key:?}");
        let sum = checksum(&lease);
        let address = self.address(key.group, kind, chunk, self.generation_index(Generation::Next));
        let request = self.volume.request(OpKind::Write, address, lease.into_io());
        let ticket = self.volume.engine.submit(request).without_buffer();
        let entry = self.map.table_entry(key.group, kind, chunk);
        let mut next = self.lock_next();
        next.table[entry] = sum;
        next.written[entry] = true;
        let fence = next.fences.entry(key).or_default();
        let mut done = None;
        if fence.front().is_some_and(Ticket::is_done) {
            done = fence.pop_front();
        }
        fence.push_back(ticket);
        drop(next);
        if let Some(done) = done {
            done.wait()?;
        }
        Ok(())
    }

    /// Makes the next generation the live one, durably.
    ///
    /// # Errors
    /// A write failed; the last committed step is then still intact.
    ///
    /// # Panics
    /// If a chunk of the next generation was never written.
    pub fn commit(&mut self, step: u64, trainer: &[u8]) -> Result<(), TierError> {
        let mut next = std::mem::replace(
            &mut *self.next.lock().unwrap_or_else(PoisonError::into_inner),
            Next::new(self.live_table.len()),
        );
        for ticket in std::mem::take(&mut next.fences).into_values().flatten() {
            ticket.wait()?;
        }
        let missing = next.written.iter().filter(|w| !**w).count();
        assert_eq!(missing, 0, "every chunk of the next generation is written before a commit");
        self.volume.sync()?;
        let live = self.generation_index(Generation::Next);
        let slot =
            Slot { sequence: self.sequence + 1, step, live, table: next.table, trainer: trainer.to_vec() };
        self.manifest.write(&slot)?;
        self.sequence = slot.sequence;
        self.live = live;
        self.live_table = slot.table;
        self.committed = Committed { step, trainer: slot.trainer };
        Ok(())
    }

    /// Waits for all writes in flight and forgets them; the live generation stays what it was.
    pub fn abandon(&self) {
        let next = std::mem::replace(&mut *self.lock_next(), Next::new(self.live_table.len()));
        for ticket in next.fences.into_values().flatten() {
            // The generation is given up, so whether this write worked does not matter.
            let _ = ticket.wait();
        }
    }

    /// Deletes the store's files. Used for stores of frozen weights that do not outlive the process.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(self) -> Result<(), TierError> {
        self.abandon();
        self.volume.remove()?;
        let (engine, path) = (Arc::clone(&self.volume.engine), self.manifest.path.clone());
        drop(self);
        engine.remove(&path)?;
        Ok(())
    }

    fn fenced(&self, key: BlobKey) -> Result<std::sync::MutexGuard<'_, Next>, TierError> {
        loop {
            let mut next = self.lock_next();
            let Some(ticket) = next.fences.get_mut(&key).and_then(VecDeque::pop_front) else {
                return Ok(next);
            };
            drop(next);
            ticket.wait()?;
        }
    }

    fn address(&self, group: usize, kind: usize, chunk: usize, generation: u64) -> u64 {
        let offset = chunk as u64 * self.spec.chunk_elements * self.spec.kinds[kind].element_bytes;
        self.map.address(group, kind, generation) + offset
    }

    fn generation_index(&self, generation: Generation) -> u64 {
        match generation {
            Generation::Live => self.live,
            Generation::Next => (self.live + 1) % self.spec.generations,
        }
    }

    fn kind_index(&self, kind: BlobKind) -> usize {
        let index = self.spec.kinds.iter().position(|k| k.kind == kind);
        index.unwrap_or_else(|| panic!("the store keeps {kind:?}"))
    }

    fn lock_next(&self) -> std::sync::MutexGuard<'_, Next> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Next {
    fn new(entries: usize) -> Self {
        Self { table: vec![0; entries], written: vec![false; entries], fences: HashMap::new() }
    }
}

impl PendingRead {
    pub(crate) fn new(
        ticket: Ticket,
        checks: Vec<(usize, usize, u64)>,
        path: PathBuf,
        label: String,
    ) -> Self {
        Self { ticket, checks, path, label }
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
        let lease = Lease::from_io(self.ticket.wait()?);
        for (index, (start, len, expected)) in self.checks.into_iter().enumerate() {
            let found = checksum(&lease[start..start + len]);
            if found != expected {
                let label = self.label;
                let detail = format!(
                    "{label}, part {index}: checksum {found:016x} instead of {expected:016x}; the drive returned other bytes \
                     than were written"
                );
                return Err(TierError::Damaged { path: self.path, detail });
            }
        }
        Ok(lease)
    }
}

fn lock_all(world: World, dirs: &[PathBuf]) -> Result<Vec<DirLock>, TierError> {
    assert!(!dirs.is_empty(), "a store has at least one directory");
    match world {
        World::Real => dirs.iter().map(|dir| DirLock::acquire(dir)).collect(),
        World::Simulated => Ok(Vec::new()),
    }
}

/// The step that a directory's manifest has committed, if any.
fn committed_step(engine: &Arc<dyn IoEngine>, dir: &Path) -> Result<Option<u64>, TierError> {
    match Manifest::open(engine, dir) {
        Ok((manifest, spec)) => Ok(manifest.newest(spec.table_len())?.map(|slot| slot.step)),
        Err(TierError::NoState { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes what a creation that never committed left behind, so that its space counts as free.
fn remove_leftovers(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf]) -> Result<(), TierError> {
    for dir in dirs {
        for name in [DATA_FILE, manifest::FILE_NAME] {
            let path = dir.join(name);
            if engine.exists(&path) {
                engine.remove(&path)?;
            }
        }
    }
    Ok(())
}
