//! In the steady state an engine allocates nothing: not for a request and not for an operation.
//!
//! One test, for the counter sees every thread of the process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use terrace_aio::engine::{EngineConfig, ThreadsEngine, UringEngine};
use terrace_aio::{BUF_ALIGN, BufHome, FileId, IoBuf, IoEngine, OpKind, OpenMode, Request, Segment, Ticket};

/// Passes on to the system's allocator, and counts.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(memory, layout, new_size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Requests in flight at once.
const WINDOW: usize = 16;

const BLOCK: usize = 64 << 10;
const REQUEST: usize = 3 * BLOCK;
const FILE: u64 = 2 * (WINDOW * REQUEST) as u64;

/// Slots that are lent without allocating.
struct Slots {
    start: NonNull<u8>,
    _memory: IoBuf,
    is_lent: [AtomicBool; WINDOW],
}

// SAFETY: a slot's memory is only touched through the one buffer that has it.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    fn new() -> Arc<Self> {
        let mut memory = IoBuf::zeroed(WINDOW * REQUEST);
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        Arc::new(Self { start, _memory: memory, is_lent: Default::default() })
    }

    fn take(self: &Arc<Self>, slot: usize) -> IoBuf {
        const { assert!(REQUEST.is_multiple_of(BUF_ALIGN)) };
        assert!(!self.is_lent[slot].swap(true, Ordering::SeqCst), "slot {slot} is in use");
        // SAFETY: the memory is as alive as its home, aligned and initialized, and the flag makes the buffer its only user.
        unsafe {
            let start = self.start.add(slot * REQUEST);
            IoBuf::from_home(start, REQUEST, Arc::clone(self) as Arc<dyn BufHome>, slot)
        }
    }
}

impl BufHome for Slots {
    fn give_back(&self, slot: usize) {
        self.is_lent[slot].store(false, Ordering::SeqCst);
    }
}

/// The shapes of requests: one operation, several, and several segments in two files.
#[derive(Debug, Clone, Copy)]
enum Shape {
    OneBlock,
    ThreeBlocks,
    ThreeSegments,
}

fn request(shape: Shape, kind: OpKind, files: [FileId; 2], slot: usize, mut buf: IoBuf) -> Request {
    let offset = (slot * REQUEST) as u64;
    let whole = |buf| match kind {
        OpKind::Read => Request::read(files[0], offset, buf),
        OpKind::Write => Request::write(files[0], offset, buf),
    };
    match shape {
        Shape::OneBlock => {
            buf.set_len(BLOCK);
            whole(buf)
        }
        Shape::ThreeBlocks => whole(buf),
        Shape::ThreeSegments => {
            let segment = |i: usize| Segment {
                file: files[i % 2],
                offset: offset + (i * BLOCK) as u64,
                start: i * BLOCK,
                len: BLOCK,
            };
            let segments = [segment(0), segment(1), segment(2)].into_iter().collect();
            Request::new(kind, buf, segments)
        }
    }
}

/// Moves `rounds` windows of requests.
fn work(engine: &dyn IoEngine, files: [FileId; 2], slots: &Arc<Slots>, shape: Shape, rounds: usize) {
    let mut tickets: [Option<Ticket>; WINDOW] = Default::default();
    for round in 0..rounds {
        let kind = if round.is_multiple_of(2) { OpKind::Write } else { OpKind::Read };
        for (slot, place) in tickets.iter_mut().enumerate() {
            // The oldest is waited for just before its slot is used again, so the window stays full.
            drop(place.take().map(|ticket| ticket.wait().unwrap()));
            *place = Some(engine.submit(request(shape, kind, files, slot, slots.take(slot))));
        }
    }
    tickets.into_iter().flatten().for_each(|ticket| drop(ticket.wait().unwrap()));
}

#[test]
fn nothing_is_allocated_in_the_steady_state() {
    let config = EngineConfig { block_bytes: BLOCK, queue_depth: 8, threads: 2, ..EngineConfig::default() };
    let mut engines: Vec<Box<dyn IoEngine>> = vec![Box::new(ThreadsEngine::new(&config).unwrap())];
    match UringEngine::new(&config) {
        Ok(engine) => engines.push(Box::new(engine)),
        Err(error) => println!("skipped: {error}"),
    }
    let mut allocated = Vec::new();
    for engine in engines {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let files = ["a", "b"]
            .map(|name| engine.open(&dir.path().join(name), OpenMode::CreateNew { len: FILE }).unwrap());
        let slots = Slots::new();
        for shape in [Shape::OneBlock, Shape::ThreeBlocks, Shape::ThreeSegments] {
            const ROUNDS: usize = 20;
            work(&*engine, files, &slots, shape, ROUNDS);
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            work(&*engine, files, &slots, shape, ROUNDS);
            let count = ALLOCATIONS.load(Ordering::SeqCst) - before;
            println!("{}, {shape:?}: {count} allocations in {} requests", engine.name(), ROUNDS * WINDOW);
            if count > 0 {
                allocated.push(format!("{} / {shape:?}: {count}", engine.name()));
            }
        }
    }
    assert!(allocated.is_empty(), "allocations after the warm-up: {allocated:?}");
}
