//! Sealed pools of equal host buffers.
//!
//! A pool allocates all its slots at once and never grows. Taking a slot blocks while all are out, which is the
//! engine's backpressure; a [`Lease`] gives its slot back when it is dropped, also from inside a finished or failed
//! disk request.
//!
//! A pool whose buffers go to disk may be registered with the disk engine ([`Pool::new_registered`]), which spares the
//! kernel looking up the pages of every transfer. Registered memory is resident as a whole from then on.

use crate::TierError;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use terrace_aio::{BUF_ALIGN, BufHome, IoBuf, IoEngine, Registration};
use terrace_device::host::HostMemory;
use terrace_device::{Device, StableBytes};

/// Bytes of one registration at most: the kernel's limit for a buffer.
const REGISTRATION_BYTES_MAX: usize = 1 << 30;
/// Bytes that are pinned at once: drivers of CUDA from r580 on refuse 512 GiB and more
/// (<https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1234>).
const PINNED_BYTES_MAX: usize = 64 << 30;

/// A fixed number of equal buffers.
#[derive(Debug, Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: &'static str,
    /// Hazard (unmapped while registered): fields are dropped in the order of their declaration, so these end before the
    /// memory does.
    registrations: Vec<Registration>,
    memory: HostMemory,
    slot_bytes: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug)]
struct State {
    free: Vec<usize>,
    out_peak: usize,
    slots: usize,
}

/// Exclusive use of one slot; given back on drop.
#[derive(Debug)]
pub struct Lease {
    buf: IoBuf,
}

// SAFETY: an IoBuf's bytes do not move with the value, and a Lease never changes the buffer's length once made.
unsafe impl StableBytes for Lease {}

impl Pool {
    /// Allocates `slots` buffers of `slot_bytes` (rounded up to whole 4 KiB pages).
    ///
    /// # Errors
    /// The operating system has no memory left.
    pub fn new(name: &'static str, slots: usize, slot_bytes: usize) -> Result<Self, TierError> {
        // Of more than can be counted there is not enough.
        let slot_bytes = slot_bytes.checked_next_multiple_of(BUF_ALIGN).unwrap_or(usize::MAX).max(BUF_ALIGN);
        let memory = HostMemory::new(slots.saturating_mul(slot_bytes))?;
        // Lowest slots are handed out first, so that untouched ones never become resident.
        let state = State { free: (0..slots).rev().collect(), out_peak: 0, slots };
        let (state, returned, registrations) = (Mutex::new(state), Condvar::new(), Vec::new());
        Ok(Self { shared: Arc::new(Shared { name, registrations, memory, slot_bytes, state, returned }) })
    }

    /// A pool that is [registered with](Self::registered_with) `engine`.
    ///
    /// # Errors
    /// The operating system has no memory left.
    pub fn new_registered(
        name: &'static str,
        slots: usize,
        slot_bytes: usize,
        engine: &Arc<dyn IoEngine>,
    ) -> Result<Self, TierError> {
        Ok(Self::new(name, slots, slot_bytes)?.registered_with(engine))
    }

    /// Pins the pool's memory for the copies of `device`, in parts that no slot straddles. Where the device is refused that, or needs none,
    /// the pool works all the same. The memory comes from the node that the device is near to if nobody has touched it, which
    /// [`registered_with`](Self::registered_with) does.
    ///
    /// # Panics
    /// If a buffer is out.
    #[must_use]
    pub fn pinned_for(mut self, device: &dyn Device) -> Self {
        let shared = self.alone();
        let together = (PINNED_BYTES_MAX / shared.slot_bytes).max(1);
        shared.memory.pin_in_parts(device, together * shared.slot_bytes);
        self
    }

    /// Tells `engine` about the memory, in parts that no slot straddles. Where the engine is refused the registration (or has none) the
    /// pool works all the same.
    ///
    /// # Panics
    /// If a buffer is out.
    #[must_use]
    pub fn registered_with(mut self, engine: &Arc<dyn IoEngine>) -> Self {
        let slots = self.slots();
        let shared = self.alone();
        let registrations = parts(slots, shared.slot_bytes).map(|(start, len)| {
            // SAFETY: the part lies within the pool's memory.
            let start = unsafe { shared.memory.base().add(start) };
            // SAFETY: the mapping is private and anonymous, never remapped or advised away, and is unmapped when the pool's
            // `Shared` drops it, which is after it dropped the registrations: they are declared first. Every buffer that is
            // out holds the `Shared`, so requests in flight keep both.
            unsafe { engine.register(start, len) }
        });
        shared.registrations = registrations.collect();
        self
    }

    /// What nobody else has yet.
    fn alone(&mut self) -> &mut Shared {
        Arc::get_mut(&mut self.shared).expect("a pool is pinned and registered before it is used")
    }

    /// Whether the engine took the whole pool.
    pub fn is_registered(&self) -> bool {
        let registrations = &self.shared.registrations;
        !registrations.is_empty() && registrations.iter().all(Registration::is_some)
    }

    /// Takes a slot, waiting until one is free. The lease is `len` bytes long.
    ///
    /// # Panics
    /// If `len` exceeds the slot size or the pool has no slots at all.
    pub fn acquire(&self, len: usize) -> Lease {
        self.acquire_unless(len, &AtomicBool::new(false)).expect("nobody gives it up")
    }

    /// As [`acquire`](Self::acquire), but gives up when no slot is free and `given_up` is set. Whoever sets it while another
    /// thread may be waiting calls [`wake`](Self::wake) then.
    ///
    /// # Panics
    /// As [`acquire`](Self::acquire).
    pub fn acquire_unless(&self, len: usize, given_up: &AtomicBool) -> Option<Lease> {
        self.require_fit(len);
        let mut state = self.shared.lock();
        assert!(state.slots > 0, "pool {} has slots", self.shared.name);
        loop {
            if let Some(slot) = state.free.pop() {
                return Some(self.lease(state, slot, len));
            }
            if given_up.load(Ordering::Acquire) {
                return None;
            }
            state = self.shared.returned.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has those who wait for a slot look whether they are to give up.
    pub fn wake(&self) {
        // Not between a look at the flag and the wait that follows it, which would miss this.
        let _state = self.shared.lock();
        self.shared.returned.notify_all();
    }

    /// Takes a slot if one is free.
    ///
    /// # Panics
    /// If `len` exceeds the slot size.
    pub fn try_acquire(&self, len: usize) -> Option<Lease> {
        self.require_fit(len);
        let mut state = self.shared.lock();
        let slot = state.free.pop()?;
        Some(self.lease(state, slot, len))
    }

    /// Before a slot is taken, which would be lost.
    fn require_fit(&self, len: usize) {
        let Shared { name, slot_bytes, .. } = &*self.shared;
        assert!(len <= *slot_bytes, "{len} bytes fit a slot of pool {name} ({slot_bytes} bytes)");
    }

    fn lease(&self, mut state: std::sync::MutexGuard<'_, State>, slot: usize, len: usize) -> Lease {
        let slot_bytes = self.shared.slot_bytes;
        state.out_peak = state.out_peak.max(state.slots - state.free.len());
        drop(state);
        // SAFETY: the slot lies within the pool's memory.
        let ptr = unsafe { self.shared.memory.base().add(slot * slot_bytes) };
        let home: Arc<dyn BufHome> = Arc::clone(&self.shared) as _;
        // SAFETY: the slot is page-aligned, initialized (the memory was allocated zeroed), kept alive by `home`, and off
        // the free list until `give_back`.
        let mut buf = unsafe { IoBuf::from_home(ptr, slot_bytes, home, slot) };
        buf.set_len(len);
        Lease { buf }
    }

    /// Bytes of one slot.
    pub fn slot_bytes(&self) -> usize {
        self.shared.slot_bytes
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.shared.lock().slots
    }

    /// The most slots that were ever out at once.
    pub fn out_peak(&self) -> usize {
        self.shared.lock().out_peak
    }

    /// Slots that are out now.
    pub fn out(&self) -> usize {
        let state = self.shared.lock();
        state.slots - state.free.len()
    }
}

/// Start and length of the parts to register; none if a slot is larger than a part may be.
fn parts(slots: usize, slot_bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let together = REGISTRATION_BYTES_MAX / slot_bytes;
    let slots = if together == 0 { 0 } else { slots };
    (0..slots)
        .step_by(together.max(1))
        .map(move |first| (first * slot_bytes, together.min(slots - first) * slot_bytes))
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BufHome for Shared {
    fn give_back(&self, slot: usize) {
        let mut state = self.lock();
        assert!(!state.free.contains(&slot), "slot {slot} of pool {} is given back once", self.name);
        state.free.push(slot);
        drop(state);
        self.returned.notify_one();
    }
}

impl Lease {
    /// A lease over a buffer that belongs to no pool; for sizes that occur once and are in the plan by themselves.
    pub fn standalone(len: usize) -> Self {
        Self { buf: IoBuf::zeroed(len) }
    }

    /// The buffer, to be handed to a disk request.
    pub fn into_io(self) -> IoBuf {
        self.buf
    }

    /// The lease whose buffer a disk request gave back.
    pub fn from_io(buf: IoBuf) -> Self {
        Self { buf }
    }
}

impl Deref for Lease {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buf
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_pool_waits_for_a_lease_to_come_back() {
        let pool = Pool::new("test", 2, 5000).unwrap();
        assert_eq!(pool.slot_bytes(), 8192);
        let (a, b) = (pool.acquire(5000), pool.acquire(1));
        assert!(pool.try_acquire(1).is_none());
        assert_eq!((a.len(), b.len(), pool.out()), (5000, 1, 2));
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.acquire(10).len()
        });
        drop(a);
        assert_eq!(waiter.join().unwrap(), 10);
        drop(b);
        assert_eq!((pool.out(), pool.out_peak()), (0, 2));
    }

    #[test]
    fn a_wait_for_a_lease_that_never_comes_back_is_given_up() {
        let pool = Pool::new("test", 1, 1).unwrap();
        let given_up = Arc::new(AtomicBool::new(false));
        std::mem::forget(pool.acquire(1));
        let waiter = std::thread::spawn({
            let (pool, given_up) = (pool.clone(), Arc::clone(&given_up));
            move || pool.acquire_unless(1, &given_up).is_none()
        });
        given_up.store(true, Ordering::Release);
        pool.wake();
        assert!(waiter.join().unwrap());
        let other = Pool::new("test", 1, 1).unwrap();
        assert!(other.acquire_unless(1, &given_up).is_some(), "a free slot is taken all the same");
    }
}
