//! The CPU as a card whose copies run when a seed says so.
//!
//! It plays a card as the discrete mode of [`HostDevice`](crate::host::HostDevice) does: a copy is deferred, its destination
//! poisoned, every region poisoned when it is taken. There a copy always runs as late as it may. Here the seed chooses, for every
//! copy, any point between its submission and the last legal one:
//! - *early*, so that bytes are missed that are written after the copy was submitted, and events are done before anybody waits;
//! - *late*, so that a source that is recycled too early is copied with its new contents, and a wait that is missing reads poison.
//!   A stream of copies that waits for an event does so when its next copy runs, not when it is told to.
//!
//! Kernels compute on the calling thread, so that streams of [`StreamKind::Compute`] wait at once, and their events are done.
//! What a card's kernels do later than the CPU's is left to the driver in `device/mock/`.
//!
//! For canaries it can break its contract: [`SimDeviceConfig::lost_wait_one_in`].
//!
//! ```
//! use terrace_device::sim::{SimDevice, SimDeviceConfig};
//! use terrace_device::{Device, StreamKind, Upload};
//!
//! let device = SimDevice::new(SimDeviceConfig { seed: 7, ..SimDeviceConfig::default() });
//! let (up, compute) = (device.stream(StreamKind::Upload)?, device.stream(StreamKind::Compute)?);
//! let upload = Upload::start(&*up, vec![1; 64], device.arena(4096)?.alloc(64)?)?;
//! let (region, _source) = upload.ready_on(&*compute)?;
//! assert_eq!(region.bytes().host(), [1; 64]);
//! # Ok::<(), terrace_device::DeviceError>(())
//! ```

use crate::host::{HostMemory, POISON};
use crate::{Arena, Bytes, BytesMut, Device, DeviceError, Event, Pinned, Space, Stream, StreamKind};
use std::any::Any;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How a simulated card behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimDeviceConfig {
    /// Determines every choice, for a given order of calls.
    pub seed: u64,
    /// At one call in this many a copy runs that need not run yet; 0 for never: every copy is as late as may be.
    pub early_one_in: u32,
    /// One wait of a stream in this many is forgotten, which no real device does; 0 for none.
    pub lost_wait_one_in: u32,
}

impl Default for SimDeviceConfig {
    fn default() -> Self {
        Self { seed: 0, early_one_in: 2, lost_wait_one_in: 0 }
    }
}

/// A simulated card. See the module documentation.
#[derive(Debug, Clone)]
pub struct SimDevice {
    card: Arc<Card>,
}

#[derive(Debug)]
struct Card {
    config: SimDeviceConfig,
    state: Mutex<State>,
    arenas: Mutex<Vec<Arena>>,
    pinned_bytes: Arc<AtomicU64>,
}

/// Everything that is enqueued; under one lock, since queues wait for each other.
#[derive(Debug)]
struct State {
    random: u64,
    queues: Vec<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Pieces of work enqueued and done, ever.
    enqueued: u64,
    done: u64,
}

#[derive(Debug)]
enum Work {
    Copy { src: NonNull<u8>, dst: NonNull<u8>, len: usize },
    Wait { queue: usize, at: u64 },
}

// SAFETY: the caller of `Stream::copy` keeps both ranges valid until the event fires, on whatever thread.
unsafe impl Send for Work {}

#[derive(Debug)]
struct SimStream {
    card: Arc<Card>,
    queue: usize,
    kind: StreamKind,
}

#[derive(Debug)]
struct SimEvent {
    card: Arc<Card>,
    queue: usize,
    /// Fires when this many pieces of work are done.
    at: u64,
}

impl SimDevice {
    /// A card.
    pub fn new(config: SimDeviceConfig) -> Self {
        let state = State { random: config.seed, queues: Vec::new() };
        let (state, arenas) = (Mutex::new(state), Mutex::default());
        Self { card: Arc::new(Card { config, state, arenas, pinned_bytes: Arc::default() }) }
    }

    /// Bytes of all arenas that were made, and the sum of their [peaks](Arena::peak).
    pub fn arena_bytes(&self) -> (u64, u64) {
        let arenas = self.card.arenas.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |bytes: fn(&Arena) -> usize| arenas.iter().map(|arena| bytes(arena) as u64).sum();
        (sum(Arena::capacity), sum(Arena::peak))
    }

    /// Bytes of host memory that are pinned now.
    pub fn pinned_bytes(&self) -> u64 {
        self.card.pinned_bytes.load(Ordering::Relaxed)
    }
}

impl Device for SimDevice {
    fn name(&self) -> &str {
        "cpu (simulated card)"
    }

    fn unified(&self) -> bool {
        false
    }

    fn arena(&self, bytes: usize) -> Result<Arena, DeviceError> {
        let memory = HostMemory::new(bytes)?;
        let base = memory.base();
        // SAFETY: the memory is page-aligned, zeroed, `bytes` long and handed to the arena to keep.
        let arena = unsafe { Arena::from_raw(base, bytes, Space::Host, Some(POISON), Box::new(memory)) };
        self.card.arenas.lock().unwrap_or_else(PoisonError::into_inner).push(arena.clone());
        Ok(arena)
    }

    fn stream(&self, kind: StreamKind) -> Result<Arc<dyn Stream>, DeviceError> {
        let mut state = self.card.lock();
        state.queues.push(Queue::default());
        let queue = state.queues.len() - 1;
        Ok(Arc::new(SimStream { card: Arc::clone(&self.card), queue, kind }))
    }

    unsafe fn pin(&self, _start: NonNull<u8>, len: usize) -> Result<Pinned, DeviceError> {
        let pinned = Arc::clone(&self.card.pinned_bytes);
        pinned.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Pinned::new(move || {
            pinned.fetch_sub(len as u64, Ordering::Relaxed);
            true
        }))
    }
}

impl Stream for SimStream {
    unsafe fn copy(&self, src: Bytes<'_>, dst: BytesMut<'_>) -> Result<(), DeviceError> {
        assert_eq!(src.len(), dst.len(), "a copy moves as many bytes as there is room for");
        let (src, len) = (src.address(), src.len());
        let dst = dst.into_host();
        dst.fill(POISON);
        let dst = NonNull::from(dst).cast();
        self.card.lock().enqueue(self.queue, Work::Copy { src, dst, len });
        self.card.perhaps_work();
        Ok(())
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        self.card.perhaps_work();
        let at = self.card.lock().queues[self.queue].enqueued;
        Ok(Arc::new(SimEvent { card: Arc::clone(&self.card), queue: self.queue, at }))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event: &dyn Any = event;
        let event: &SimEvent = event.downcast_ref().expect("the event is of this device");
        let mut state = self.card.lock();
        if state.one_in(self.card.config.lost_wait_one_in) {
            return Ok(());
        }
        match self.kind {
            // Kernels run on the calling thread, from here on.
            StreamKind::Compute => state.run_to(event.queue, event.at),
            _ => state.enqueue(self.queue, Work::Wait { queue: event.queue, at: event.at }),
        }
        drop(state);
        self.card.perhaps_work();
        Ok(())
    }
}

impl Event for SimEvent {
    fn is_done(&self) -> bool {
        self.card.perhaps_work();
        self.card.lock().queues[self.queue].done >= self.at
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.card.lock().run_to(self.queue, self.at);
        self.card.perhaps_work();
        Ok(())
    }
}

impl Card {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does some of the work that nobody waits for, if the seed says so.
    fn perhaps_work(&self) {
        let mut state = self.lock();
        while state.one_in(self.config.early_one_in) {
            let queue = state.random() as usize % state.queues.len();
            let next = state.queues[queue].done + 1;
            if next > state.queues[queue].enqueued {
                return;
            }
            state.run_to(queue, next);
        }
    }
}

impl State {
    fn enqueue(&mut self, queue: usize, work: Work) {
        self.queues[queue].work.push_back(work);
        self.queues[queue].enqueued += 1;
    }

    /// Does the work of a queue until so many pieces are done. An event is older than whoever waits for it, so this ends.
    fn run_to(&mut self, queue: usize, at: u64) {
        while self.queues[queue].done < at {
            let work = self.queues[queue].work.pop_front();
            match work.expect("as many pieces are queued as were enqueued and not done") {
                Work::Copy { src, dst, len } => {
                    // SAFETY: the contract of `Stream::copy`: both ranges are valid and untouched until the copy's event fires.
                    unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.as_ptr(), len) };
                }
                Work::Wait { queue, at } => self.run_to(queue, at),
            }
            self.queues[queue].done += 1;
        }
    }

    /// SplitMix64 (Steele, Lea and Flood 2014).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn one_in(&mut self, n: u32) -> bool {
        n > 0 && self.random().is_multiple_of(u64::from(n))
    }
}
