//! Memory that poisons itself when it comes back: an engine that still uses it then gives itself away.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use terrace_aio::{BUF_ALIGN, BufHome, IoBuf};

/// Slots of one size in one allocation.
pub struct Pool {
    start: NonNull<u8>,
    layout: Layout,
    slot_bytes: usize,
    slots: Mutex<Slots>,
    came_back: Condvar,
}

struct Slots {
    is_home: Vec<bool>,
    came_back_twice: bool,
}

// SAFETY: a slot's memory is touched by its buffer or, while it is home, under the lock.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// `count` slots of `len` bytes.
    pub fn new(count: usize, len: usize) -> Arc<Self> {
        let stride = len.next_multiple_of(BUF_ALIGN);
        let layout = Layout::from_size_align(count * stride, BUF_ALIGN).unwrap();
        assert!(layout.size() > 0);
        // SAFETY: the size is not zero.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
        let slots = Mutex::new(Slots { is_home: vec![true; count], came_back_twice: false });
        Arc::new(Self { start, layout, slot_bytes: len, slots, came_back: Condvar::new() })
    }

    /// All of its memory.
    pub fn memory(&self) -> (NonNull<u8>, usize) {
        (self.start, self.layout.size())
    }

    /// The buffer of a slot, which must be home.
    pub fn buf(self: &Arc<Self>, slot: usize) -> IoBuf {
        assert!(
            std::mem::replace(&mut self.slots.lock().unwrap().is_home[slot], false),
            "slot {slot} is out"
        );
        // SAFETY: the slot is aligned, initialized, ours until it comes back, and the home keeps its memory.
        unsafe {
            IoBuf::from_home(self.address(slot), self.slot_bytes, Arc::clone(self) as Arc<dyn BufHome>, slot)
        }
    }

    /// Any slot's buffer, cut to `len` bytes; `None` if none is home or they are too small.
    pub fn take(self: &Arc<Self>, len: usize) -> Option<IoBuf> {
        if len > self.slot_bytes {
            return None;
        }
        let slot = {
            let mut slots = self.slots.lock().unwrap();
            let slot = slots.is_home.iter().position(|home| *home)?;
            slots.is_home[slot] = false;
            slot
        };
        // SAFETY: as in `buf`.
        let mut buf = unsafe {
            IoBuf::from_home(self.address(slot), self.slot_bytes, Arc::clone(self) as Arc<dyn BufHome>, slot)
        };
        buf.set_len(len);
        Some(buf)
    }

    /// Waits until every slot is home; fails if one came back twice or not within ten seconds.
    pub fn wait_all(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut slots = self.slots.lock().unwrap();
        while slots.is_home.contains(&false) {
            let left = deadline.saturating_duration_since(Instant::now());
            let missing = slots.is_home.iter().filter(|home| !**home).count();
            assert!(!left.is_zero(), "{missing} of {} buffers did not come back", slots.is_home.len());
            slots = self.came_back.wait_timeout(slots, left).unwrap().0;
        }
        assert!(!slots.came_back_twice, "a buffer came back twice");
    }

    fn address(&self, slot: usize) -> NonNull<u8> {
        let stride = self.slot_bytes.next_multiple_of(BUF_ALIGN);
        // SAFETY: the slot lies inside the allocation.
        unsafe { self.start.add(slot * stride) }
    }
}

impl BufHome for Pool {
    fn give_back(&self, slot: usize) {
        let mut slots = self.slots.lock().unwrap();
        // SAFETY: the buffer is gone, so the slot's memory is ours again, and it is not lent before the lock is free.
        unsafe { self.address(slot).write_bytes(0xdd, self.slot_bytes) };
        slots.came_back_twice |= std::mem::replace(&mut slots.is_home[slot], true);
        drop(slots);
        self.came_back.notify_all();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; every buffer held the pool alive, so none is out.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
