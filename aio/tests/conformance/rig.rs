//! What the cases run on: an engine, directories in its world, and memory that tells when it comes back.

use crate::cases::{CASES, Case};
use crate::pool::Pool;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;
use terrace_aio::layer::FaultLayer;
use terrace_aio::{FileId, IoBuf, IoEngine, OpenMode, Registration, Request, Segment};

/// Buffers that [`Rig::zeroed`] lends before it allocates, and their size: several blocks of every configuration.
const LENT: (usize, usize) = (16, 256 << 10);

/// An engine under test.
pub struct Rig {
    // The fields are dropped in this order: the engine finishes its requests, then the registrations end, and only
    // then may the registered memory go.
    pub engine: Arc<dyn IoEngine>,
    /// The layer that fails requests on purpose, if the engine has one on top.
    pub faults: Option<Arc<FaultLayer>>,
    registrations: Mutex<Vec<Registration>>,
    pools: Mutex<Vec<Arc<Pool>>>,
    /// Where buffers come from; without it each has an allocation of its own.
    lender: Option<Arc<Pool>>,
    dirs: Vec<PathBuf>,
    _temps: Vec<TempDir>,
}

impl Rig {
    /// For engines whose files are the machine's: files are spread over a fresh directory in each of `places`.
    pub fn on_disk(engine: Arc<dyn IoEngine>, places: &[PathBuf]) -> Self {
        let temps: Vec<TempDir> = places.iter().map(|place| tempfile::tempdir_in(place).unwrap()).collect();
        let dirs = temps.iter().map(|temp| temp.path().to_owned()).collect();
        Self::new(engine, dirs, temps)
    }

    /// For engines with a namespace of their own.
    pub fn in_memory(engine: Arc<dyn IoEngine>) -> Self {
        Self::new(engine, vec![PathBuf::from("/sim")], Vec::new())
    }

    fn new(engine: Arc<dyn IoEngine>, dirs: Vec<PathBuf>, temps: Vec<TempDir>) -> Self {
        let (registrations, pools) = (Mutex::default(), Mutex::default());
        Self { engine, faults: None, registrations, pools, lender: None, dirs, _temps: temps }
    }

    /// The same rig, whose buffers come from memory that is registered with the engine, as far as they fit.
    pub fn with_registered_memory(mut self) -> Self {
        let (count, len) = LENT;
        let pool = self.remember(Pool::new(count, len));
        self.register(&pool);
        self.lender = Some(pool);
        self
    }

    /// The path of a file; which directory it is in depends on the first letter alone.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dirs[name.as_bytes()[0] as usize % self.dirs.len()].join(name)
    }

    pub fn create(&self, name: &str, len: u64) -> FileId {
        self.engine.open(&self.path(name), OpenMode::CreateNew { len }).unwrap()
    }

    pub fn write(&self, file: FileId, offset: u64, bytes: &[u8]) {
        self.engine.submit(Request::write(file, offset, self.buf_of(bytes))).wait().unwrap();
    }

    pub fn read(&self, file: FileId, offset: u64, len: usize) -> Vec<u8> {
        // Not zeros, so that bytes the engine never delivered do not look like a hole in the file.
        let mut buf = self.zeroed(len);
        buf.fill(0xee);
        let buf = self.engine.submit(Request::read(file, offset, buf)).wait().unwrap();
        assert_eq!(buf.len(), len);
        buf.to_vec()
    }

    /// A buffer of zeros.
    pub fn zeroed(&self, len: usize) -> IoBuf {
        let lent = self.lender.as_ref().filter(|_| len > 0).and_then(|pool| pool.take(len));
        lent.map_or_else(
            || IoBuf::zeroed(len),
            |mut buf| {
                buf.fill(0);
                buf
            },
        )
    }

    pub fn buf_of(&self, bytes: &[u8]) -> IoBuf {
        let mut buf = self.zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }

    /// A pool of `count` buffers of `len` bytes, registered if this rig's memory is.
    pub fn pool(&self, count: usize, len: usize) -> Arc<Pool> {
        let pool = self.remember(Pool::new(count, len));
        if self.lender.is_some() {
            self.register(&pool);
        }
        pool
    }

    fn remember(&self, pool: Arc<Pool>) -> Arc<Pool> {
        self.pools.lock().unwrap().push(Arc::clone(&pool));
        pool
    }

    /// Registers the memory of a pool that `pools` holds.
    fn register(&self, pool: &Pool) {
        let (start, len) = pool.memory();
        // SAFETY: `pools` keeps the memory until after `registrations` is dropped.
        let registration = unsafe { self.engine.register(start, len) };
        if registration.is_some() {
            assert!(self.engine.facts().registered_bytes > 0, "registered, but not in the engine's facts");
        }
        self.registrations.lock().unwrap().push(registration);
    }
}

/// Runs every case, each on a rig of its own; names those that failed.
pub fn failures(fixture: impl Fn() -> Rig) -> Vec<&'static str> {
    failures_of(CASES, fixture)
}

/// As [`failures`], for some of the cases.
pub fn failures_of(cases: &[(&'static str, Case)], fixture: impl Fn() -> Rig) -> Vec<&'static str> {
    let fails = |case: Case| catch_unwind(AssertUnwindSafe(|| case(fixture()))).is_err();
    cases.iter().filter(|(_, case)| fails(*case)).map(|(name, _)| *name).collect()
}

/// Fails, naming the cases, unless every case passes.
pub fn assert_conforms(fixture: impl Fn() -> Rig) {
    let failed = failures(fixture);
    assert!(failed.is_empty(), "failed cases: {failed:?}");
}

/// A directory on the drive the project is built on.
pub fn host_place() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).to_owned()
}

pub fn segment(file: FileId, offset: u64, start: usize, len: usize) -> Segment {
    Segment { file, offset, start, len }
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
