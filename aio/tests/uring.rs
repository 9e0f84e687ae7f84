//! What only the io_uring engine does: registration, polling, several rings. (Skipped where io_uring is forbidden.)

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;
use terrace_aio::engine::{EngineConfig, UringEngine};
use terrace_aio::{BufHome, FileId, IoBuf, IoEngine, IoErrorKind, OpenMode, Request, Ticket};

const MIB: usize = 1 << 20;

/// Memory at an address of its own, whose pages can be exchanged.
struct Region {
    start: NonNull<u8>,
    bytes: usize,
    home: Arc<Home>,
}

#[derive(Default)]
struct Home(AtomicUsize);

impl BufHome for Home {
    fn give_back(&self, _slot: usize) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Region {
    fn new(bytes: usize) -> Self {
        let start = Self::map(std::ptr::null_mut(), bytes, 0);
        Self { start, bytes, home: Arc::default() }
    }

    fn map(at: *mut libc::c_void, bytes: usize, flags: i32) -> NonNull<u8> {
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping, or one over a region of this test that nothing is using.
        let start = unsafe { libc::mmap(at, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        NonNull::new(start.cast()).unwrap()
    }

    /// New pages at the same address.
    fn exchange_pages(&self) {
        Self::map(self.start.as_ptr().cast(), self.bytes, libc::MAP_FIXED);
    }

    fn buf(&self, offset: usize, len: usize) -> IoBuf {
        // SAFETY: inside the region, which outlives every buffer of these tests; each part is used once at a time.
        unsafe {
            let mut buf = IoBuf::from_home(self.start.add(offset), len, Arc::clone(&self.home) as _, 0);
            buf.set_len(len);
            buf
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region was mapped by `new` and its buffers are gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn engine(config: &EngineConfig) -> Option<UringEngine> {
    match UringEngine::probe() {
        Ok(()) => Some(UringEngine::new(config).unwrap()),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn config() -> EngineConfig {
    EngineConfig { block_bytes: 64 << 10, queue_depth: 8, ..EngineConfig::default() }
}

/// A file of `len` bytes on a real file system, with a byte pattern.
fn file(engine: &UringEngine, len: usize) -> (TempDir, FileId, Vec<u8>) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = engine.open(&dir.path().join("a"), OpenMode::CreateNew { len: len as u64 }).unwrap();
    let bytes: Vec<u8> = (0..len).map(|i| (i / 7 % 251) as u8).collect();
    let mut buf = IoBuf::zeroed(len);
    buf.copy_from_slice(&bytes);
    engine.submit(Request::write(file, 0, buf)).wait().unwrap();
    (dir, file, bytes)
}

#[test]
fn registered_memory_is_used_and_let_go() {
    let Some(engine) = engine(&config()) else { return };
    let (_dir, file, bytes) = file(&engine, 2 * MIB);
    let region = Region::new(4 * MIB);
    // SAFETY: the region's pages stay until the registration is dropped below.
    let registration = unsafe { engine.register(region.start, region.bytes) };
    if !registration.is_some() {
        println!("not registered: {:?}", engine.facts().fallbacks);
        return;
    }
    assert_eq!(engine.facts().registered_bytes, region.bytes as u64);
    assert!(engine.facts().features.contains(&"registered memory"));
    let got = engine.submit(Request::read(file, 0, region.buf(MIB, 2 * MIB))).wait().unwrap();
    assert!(*got == bytes[..]);
    engine.submit(Request::write(file, 0, got)).wait().unwrap();

    drop(registration);
    // Orders are carried out before later requests: this one must not land in the pages that were registered.
    region.exchange_pages();
    let got = engine.submit(Request::read(file, 0, region.buf(MIB, 2 * MIB))).wait().unwrap();
    assert!(*got == bytes[..]);
    assert_eq!(engine.facts().registered_bytes, 0);
}

#[test]
fn memory_across_two_registrations_is_used_unregistered() {
    let Some(engine) = engine(&config()) else { return };
    let (_dir, file, bytes) = file(&engine, MIB);
    let region = Region::new(2 * MIB);
    // One block of the request below lies in both halves.
    let half = MIB + 4096;
    // SAFETY: the region outlives the registrations.
    let (first, second) = unsafe {
        (engine.register(region.start, half), engine.register(region.start.add(half), region.bytes - half))
    };
    let got = engine.submit(Request::read(file, 0, region.buf(MIB / 2, MIB))).wait().unwrap();
    assert!(*got == bytes[..]);
    drop((first, second));
}

#[test]
fn a_registration_may_outlive_its_engine() {
    let Some(engine) = engine(&config()) else { return };
    let region = Region::new(MIB);
    // SAFETY: the region outlives the registration.
    let registration = unsafe { engine.register(region.start, region.bytes) };
    drop(engine);
    drop(registration);
}

#[test]
fn unregistered_engines_say_so() {
    let Some(engine) = engine(&EngineConfig { register: false, ..config() }) else { return };
    let region = Region::new(MIB);
    // SAFETY: nothing is registered, and the region outlives the attempt.
    assert!(!unsafe { engine.register(region.start, region.bytes) }.is_some());
    assert!(!engine.facts().features.contains(&"registered memory"));
}

/// Every way to set a ring up moves the same bytes.
#[test]
fn every_kind_of_ring_is_exact() {
    let kinds = [
        EngineConfig { rings: 3, ..config() },
        EngineConfig { sq_poll: true, ..config() },
        EngineConfig { io_poll: true, ..config() },
        EngineConfig { io_poll: true, sq_poll: true, register: false, ..config() },
    ];
    for config in kinds {
        let Some(engine) = engine(&config) else { return };
        let (_dir, file, bytes) = file(&engine, 4 * MIB);
        for round in 0..3 {
            let read = |part: usize| {
                let len = MIB + 13 * round;
                let offset = part * 900_000;
                (offset, len, engine.submit(Request::read(file, offset as u64, IoBuf::zeroed(len))))
            };
            for (offset, len, ticket) in (0..3).map(read).collect::<Vec<_>>() {
                assert!(*ticket.wait().unwrap() == bytes[offset..offset + len], "{config:?}");
            }
        }
        if config.io_poll {
            println!("polled completions: {:?}", engine.facts());
        }
        engine.sync(file).wait().unwrap();
        engine.close(file).unwrap();
    }
}

#[test]
fn a_cancelled_request_that_waits_is_left_out() {
    let Some(engine) = engine(&EngineConfig { queue_depth: 1, block_bytes: 4096, ..config() }) else {
        return;
    };
    let (_dir, file, _) = file(&engine, 8 * MIB);
    let region = Region::new(MIB);
    let first = engine.submit(Request::read(file, 0, IoBuf::zeroed(8 * MIB)));
    let second = engine.submit(Request::read(file, 0, region.buf(0, MIB)));
    second.cancel();
    assert_eq!(second.wait().unwrap_err().kind, IoErrorKind::Cancelled);
    assert_eq!(region.home.0.load(Ordering::SeqCst), 1, "the buffer came home");
    first.wait().unwrap();
}

#[test]
fn cancelling_what_is_done_changes_nothing() {
    let ticket = Ticket::ready(Ok(IoBuf::zeroed(3)));
    ticket.cancel();
    assert_eq!(ticket.wait().unwrap().len(), 3);
}
