//! What the cases run on: an engine, a directory in its world, and a pool that tells when buffers come back.

use crate::cases::{CASES, Case};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use terrace_aio::{BufHome, FileId, IoBuf, IoEngine, OpenMode, Request, Segment};

/// An engine under test.
pub struct Rig {
    pub engine: Arc<dyn IoEngine>,
    dir: PathBuf,
    _temp: Option<TempDir>,
}

impl Rig {
    /// For engines whose files are the machine's.
    pub fn on_disk(engine: Arc<dyn IoEngine>) -> Self {
        let temp = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { engine, dir: temp.path().to_owned(), _temp: Some(temp) }
    }

    /// For engines with a namespace of their own.
    pub fn in_memory(engine: Arc<dyn IoEngine>) -> Self {
        Self { engine, dir: PathBuf::from("/sim"), _temp: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn create(&self, name: &str, len: u64) -> FileId {
        self.engine.open(&self.path(name), OpenMode::CreateNew { len }).unwrap()
    }

    pub fn write(&self, file: FileId, offset: u64, bytes: &[u8]) {
        self.engine.submit(Request::write(file, offset, buf_of(bytes))).wait().unwrap();
    }

    pub fn read(&self, file: FileId, offset: u64, len: usize) -> Vec<u8> {
        // Not zeros, so that bytes the engine never delivered do not look like a hole in the file.
        let mut buf = IoBuf::zeroed(len);
        buf.fill(0xee);
        let buf = self.engine.submit(Request::read(file, offset, buf)).wait().unwrap();
        assert_eq!(buf.len(), len);
        buf.to_vec()
    }
}

/// Runs every case, each on a rig of its own; names those that failed.
pub fn failures(fixture: impl Fn() -> Rig) -> Vec<&'static str> {
    let fails = |case: Case| catch_unwind(AssertUnwindSafe(|| case(fixture()))).is_err();
    CASES.iter().filter(|(_, case)| fails(*case)).map(|(name, _)| *name).collect()
}

/// Fails, naming the cases, unless every case passes.
pub fn assert_conforms(fixture: impl Fn() -> Rig) {
    let failed = failures(fixture);
    assert!(failed.is_empty(), "failed cases: {failed:?}");
}

pub fn segment(file: FileId, offset: u64, start: usize, len: usize) -> Segment {
    Segment { file, offset, start, len }
}

pub fn buf_of(bytes: &[u8]) -> IoBuf {
    let mut buf = IoBuf::zeroed(bytes.len());
    buf.copy_from_slice(bytes);
    buf
}

/// Bytes that tell which position and which use they belong to.
pub fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

/// A pool that poisons a slot when it comes back: an engine that still uses the memory then gives itself away.
pub struct Pool {
    slots: Vec<Mutex<SlotMemory>>,
    returned: Mutex<Vec<usize>>,
    came_back: Condvar,
}

struct SlotMemory {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the pointer belongs to leaked memory that is only touched by the buffer or, after it, by `give_back`.
unsafe impl Send for SlotMemory {}

impl Pool {
    /// `count` slots of `len` bytes; the memory is leaked, for it must outlive every engine under test.
    pub fn new(count: usize, len: usize) -> Arc<Self> {
        let slot = |_| {
            let buf = Box::leak(Box::new(IoBuf::zeroed(len)));
            Mutex::new(SlotMemory { ptr: NonNull::new(buf.as_mut_ptr()).unwrap(), len })
        };
        let slots = (0..count).map(slot).collect();
        Arc::new(Self { slots, returned: Mutex::default(), came_back: Condvar::new() })
    }

    /// The buffer of a slot. Take each one once.
    pub fn buf(self: &Arc<Self>, slot: usize) -> IoBuf {
        let (ptr, len) = {
            let memory = self.slots[slot].lock().unwrap();
            (memory.ptr, memory.len)
        };
        // SAFETY: the memory is aligned, initialized and leaked; each slot is taken once, and `give_back` touches it after.
        unsafe { IoBuf::from_home(ptr, len, Arc::clone(self) as Arc<dyn BufHome>, slot) }
    }

    /// Waits until every slot came back; fails if one came back twice or not within ten seconds.
    pub fn wait_all(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut returned = self.returned.lock().unwrap();
        while returned.len() < self.slots.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "only {} of {} buffers came back", returned.len(), self.slots.len());
            returned = self.came_back.wait_timeout(returned, left).unwrap().0;
        }
        returned.sort_unstable();
        assert!(returned.iter().copied().eq(0..self.slots.len()), "a buffer came back twice");
    }
}

impl BufHome for Pool {
    fn give_back(&self, slot: usize) {
        let memory = self.slots[slot].lock().unwrap();
        // SAFETY: the buffer is gone, so the slot's memory is ours again.
        unsafe { std::ptr::write_bytes(memory.ptr.as_ptr(), 0xdd, memory.len) };
        drop(memory);
        self.returned.lock().unwrap().push(slot);
        self.came_back.notify_all();
    }
}
