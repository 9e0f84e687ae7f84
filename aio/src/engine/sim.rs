//! A disk in memory that misbehaves on purpose, from a seed.
//!
//! The simulation has its own file namespace and no thread: waiting for a ticket, polling it, dropping it or
//! submitting another request performs operations, one at a time, in a random order. Driven from one thread, the
//! seed determines everything. It models
//! - operations that complete in any order, after logical delays, and move fewer bytes than asked for;
//! - a write-back cache: a write that completed but was not made durable by [`sync`](IoEngine::sync) may be
//!   lost, survive, or survive in part, sector by sector, when the power fails ([`SimEngine::crash`]);
//! - a power cut after the n-th operation ([`SimEngine::power_cut_after`]), a full disk, and bad sectors.
//!
//! What is durable without a sync: names. As in the real engines, creating (with its length) and removing a file
//! are durable when the call returns.
//!
//! ```
//! use terrace_aio::engine::{IoEngine, OpenMode, Request, SimConfig, SimEngine};
//! use terrace_aio::IoBuf;
//!
//! let disk = SimEngine::new(SimConfig { seed: 7, ..SimConfig::default() });
//! let file = disk.open("/a".as_ref(), OpenMode::CreateNew { len: 4096 })?;
//! let mut page = IoBuf::zeroed(4096);
//! page.fill(1);
//! disk.submit(Request::write(file, 0, page)).wait()?;
//! disk.sync(file).wait()?;
//! let after = disk.crash(42);
//! assert_eq!(after.contents("/a".as_ref()).unwrap(), [1; 4096]);
//! # Ok::<(), terrace_aio::IoError>(())
//! ```

mod disk;
mod world;

use super::{FileFacts, FileId, IoEngine, OpKind, OpenMode, Request};
use crate::ticket::Drive;
use crate::{IoBuf, IoError, Ticket};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use world::{Finished, World};

/// How a simulated disk behaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimConfig {
    /// Determines every random choice.
    pub seed: u64,
    /// Requests are split into operations of at most this many bytes.
    pub block_bytes: usize,
    /// Operations that wait at once, and so may overtake each other, of urgent requests before those of others; also requests in flight
    /// before `submit` blocks, of any kind.
    pub queue_depth: usize,
    /// Bytes one operation may transfer.
    pub transfer_bytes_max: usize,
    /// One operation in this many moves fewer bytes than asked for; 0 for none.
    pub short_one_in: u32,
    /// One operation in this many is interrupted (EINTR) and has to be repeated; 0 for none.
    pub interrupt_one_in: u32,
    /// Largest logical delay of an operation, in ticks; with 0 operations happen in the order of submission.
    pub delay_ticks_max: u64,
    /// Bytes that all files together may have.
    pub capacity_bytes: u64,
    /// Sectors of the drive: direct operations that are not whole ones fail with EINVAL, and ranges are cut so that
    /// there are none, as the real engines do. 1 for a drive that takes anything.
    pub sector_bytes: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            block_bytes: 64 << 10,
            queue_depth: 32,
            transfer_bytes_max: usize::MAX,
            short_one_in: 8,
            interrupt_one_in: 16,
            delay_ticks_max: 16,
            capacity_bytes: u64::MAX,
            sector_bytes: 1,
        }
    }
}

/// A simulated disk with its file system. See the module documentation.
#[derive(Debug)]
pub struct SimEngine {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    world: Mutex<World>,
}

impl SimEngine {
    /// An empty disk.
    pub fn new(config: SimConfig) -> Self {
        Self::from_world(World::new(config, disk::Disk::default()))
    }

    fn from_world(world: World) -> Self {
        Self { shared: Arc::new(Shared { world: Mutex::new(world) }) }
    }

    /// Cuts the power now and gives the disk as it comes up again: everything synced, and of the rest what `seed`
    /// chooses. Requests in flight here fail with `Closed`, and so does everything after. No file is open on the
    /// new disk, and no fault is set on it but its bad sectors.
    pub fn crash(&self, seed: u64) -> SimEngine {
        let (image, finished) = {
            let mut world = self.shared.lock();
            let finished = world.cut();
            (world.after_crash(seed), finished)
        };
        deliver(finished);
        Self::from_world(image)
    }

    /// Cuts the power once `operations` more operations have happened (0: now). The operation that is the last one
    /// happens, but nobody learns of it. Transfers, syncs, creations and removals count.
    pub fn power_cut_after(&self, operations: u64) {
        let finished = self.shared.lock().cut_after(operations);
        deliver(finished);
    }

    /// Whether the power is gone.
    pub fn is_cut(&self) -> bool {
        self.shared.lock().is_cut()
    }

    /// Operations that happened so far: a test that cuts the power at each of them takes its bound from here.
    pub fn operations(&self) -> u64 {
        self.shared.lock().operations()
    }

    /// Makes reads and writes that touch `range` of a file fail with EIO.
    pub fn break_range(&self, path: &Path, range: Range<u64>) {
        self.shared.lock().disk.break_range(path, range);
    }

    /// Changes the capacity. Less than what is used is allowed: nothing more fits then.
    pub fn resize(&self, capacity_bytes: u64) {
        self.shared.lock().config.capacity_bytes = capacity_bytes;
    }

    /// A file's bytes as reads see them now; `None` if there is no such file.
    pub fn contents(&self, path: &Path) -> Option<Vec<u8>> {
        self.shared.lock().disk.file(path).map(|file| file.current().to_vec())
    }

    /// Overwrites bytes behind everyone's back, durably: a flipped bit in a resting file.
    ///
    /// # Panics
    /// If the file does not have the range.
    pub fn corrupt(&self, path: &Path, offset: u64, bytes: &[u8]) {
        self.shared.lock().disk.corrupt(path, offset, bytes);
    }

    /// The paths of all files, sorted.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.shared.lock().disk.paths()
    }

    /// Performs the operation that is due first; `false` if none waits. A thread that calls it now and then makes this a disk
    /// that works while nobody waits for it, as programs expect whose threads wait for more than tickets.
    pub fn step(&self) -> bool {
        self.shared.advance()
    }

    /// Performs every operation that waits.
    pub fn run_until_idle(&self) {
        while self.step() {}
    }

    fn start(&self, admit: impl FnOnce(&mut World, crate::Completer) -> Vec<Finished>) -> Ticket {
        let (ticket, completer) = Ticket::driven(Arc::clone(&self.shared) as Arc<dyn Drive>);
        while self.shared.lock().is_full() && self.shared.advance() {}
        let (finished, steps) = {
            let mut world = self.shared.lock();
            (admit(&mut world, completer), world.steps_after_submit())
        };
        deliver(finished);
        for _ in 0..steps {
            self.shared.advance();
        }
        ticket
    }
}

impl IoEngine for SimEngine {
    fn name(&self) -> &str {
        "sim"
    }

    fn open(&self, path: &Path, mode: OpenMode) -> Result<FileId, IoError> {
        let (result, finished) = self.shared.lock().open(path, mode);
        deliver(finished);
        result
    }

    fn close(&self, file: FileId) -> Result<(), IoError> {
        while self.shared.lock().is_busy(file) && self.shared.advance() {}
        self.shared.lock().close(file)
    }

    fn path(&self, file: FileId) -> Option<PathBuf> {
        self.shared.lock().path(file)
    }

    fn len(&self, file: FileId) -> Result<u64, IoError> {
        self.shared.lock().len(file)
    }

    fn exists(&self, path: &Path) -> bool {
        self.shared.lock().disk.file(path).is_some()
    }

    fn remove(&self, path: &Path) -> Result<(), IoError> {
        let (result, finished) = self.shared.lock().remove(path);
        deliver(finished);
        result
    }

    fn file_facts(&self, file: FileId) -> Result<FileFacts, IoError> {
        self.len(file)?;
        let offset_align = self.shared.lock().config.sector_bytes.max(1);
        Ok(FileFacts { is_direct: offset_align > 1, offset_align, memory_align: 1, refusal: None })
    }

    /// As far as anyone can read it, a hole is zeros, as durable as any other write.
    fn punch_hole(&self, file: FileId, offset: u64, len: u64) -> Result<(), IoError> {
        let end = offset.saturating_add(len).min(self.len(file)?);
        let zeros = IoBuf::zeroed(usize::try_from(end.saturating_sub(offset)).unwrap_or(usize::MAX));
        self.submit(Request::write(file, offset, zeros)).wait().map(drop)
    }

    fn submit(&self, request: Request) -> Ticket {
        self.start(|world, completer| world.transfer(request, completer))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.start(|world, completer| world.sync(file, completer))
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.run_until_idle();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drive for Shared {
    fn advance(&self) -> bool {
        let (worked, finished) = self.lock().advance();
        deliver(finished);
        worked
    }
}

/// Resolves tickets, with the world unlocked: buffers going home may call back.
fn deliver(finished: Vec<Finished>) {
    for Finished { completer, result, parked } in finished {
        drop(parked);
        completer.complete(result);
    }
}
