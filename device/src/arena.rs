//! One allocation of device memory, cut into regions.
//!
//! The whole arena is allocated once, when the plan is sealed. Regions are taken first-fit and give their range
//! back when dropped; the order of takes and drops is the same in every step, so placement is deterministic and a
//! planning run over a [virtual](Arena::virtual_memory) arena finds the exact peak, holes included.

use crate::{Bytes, BytesMut, DeviceError, Space};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Alignment of every region, in bytes (what CUDA's allocator gives, and four cache lines).
const REGION_ALIGN: usize = 256;

/// A sealed range of device memory that hands out [`Region`]s.
#[derive(Debug, Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

/// A range of an [`Arena`], returned when dropped.
#[derive(Debug)]
pub struct Region {
    inner: Arc<Inner>,
    start: usize,
    len: usize,
}

/// Whatever keeps an arena's memory alive.
pub trait Keep: Send + Sync + std::fmt::Debug {}
impl<T: Send + Sync + std::fmt::Debug> Keep for T {}

#[derive(Debug)]
struct Inner {
    base: NonNull<u8>,
    capacity: usize,
    space: Space,
    /// Filled into every new region by the discrete test device, so that nobody relies on old contents.
    poison: Option<u8>,
    /// Keeps the memory; dropped last.
    _memory: Option<Box<dyn Keep>>,
    holes: Mutex<Holes>,
}

#[derive(Debug)]
struct Holes {
    /// Free ranges `(start, end)`, sorted, never adjacent.
    free: Vec<(usize, usize)>,
    used: usize,
    /// Highest end of any region so far: the capacity that would have been enough.
    peak: usize,
    /// What was asked since somebody wanted to know.
    requests: Option<Vec<Request>>,
}

/// What an arena is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// A region, and where it came to begin.
    Take {
        /// Bytes of it.
        bytes: usize,
        /// Where it begins.
        start: usize,
    },
    /// Back with the region that begins there.
    Give {
        /// Where it began.
        start: usize,
    },
}

// SAFETY: the base pointer is only turned into borrows of disjoint regions.
unsafe impl Send for Inner {}
// SAFETY: as above; the free list is behind a mutex.
unsafe impl Sync for Inner {}

impl Arena {
    /// An arena over memory that `memory` keeps alive.
    ///
    /// # Safety
    /// `base` is 256-byte aligned, valid in `space` for `capacity` bytes (initialized, if host) while `memory` lives,
    /// and used by nobody else.
    pub unsafe fn from_raw(
        base: NonNull<u8>,
        capacity: usize,
        space: Space,
        poison: Option<u8>,
        memory: Box<dyn Keep>,
    ) -> Self {
        Self::build(base, capacity, space, poison, Some(memory))
    }

    /// An arena without memory and without limit: a planning run reads off its [`peak`](Self::peak).
    pub fn virtual_memory() -> Self {
        Self::build(NonNull::<u128>::dangling().cast(), usize::MAX / 2, Space::Virtual, None, None)
    }

    fn build(
        base: NonNull<u8>,
        capacity: usize,
        space: Space,
        poison: Option<u8>,
        memory: Option<Box<dyn Keep>>,
    ) -> Self {
        let holes = Holes { free: vec![(0, capacity)], used: 0, peak: 0, requests: None };
        Self {
            inner: Arc::new(Inner {
                base,
                capacity,
                space,
                poison,
                _memory: memory,
                holes: Mutex::new(holes),
            }),
        }
    }

    /// Takes `bytes` from the arena; the contents are unspecified.
    ///
    /// # Errors
    /// [`DeviceError::ArenaExhausted`] when no hole is large enough.
    pub fn alloc(&self, bytes: usize) -> Result<Region, DeviceError> {
        let need = Self::region_bytes(bytes);
        let mut holes = self.inner.lock();
        let Some(index) = holes.free.iter().position(|(start, end)| end - start >= need) else {
            let largest_hole = holes.free.iter().map(|(start, end)| end - start).max().unwrap_or(0);
            let (used, capacity) = (holes.used, self.inner.capacity);
            return Err(DeviceError::ArenaExhausted { bytes: need, used, capacity, largest_hole });
        };
        let start = holes.free[index].0;
        holes.free[index].0 += need;
        if holes.free[index].0 == holes.free[index].1 {
            holes.free.remove(index);
        }
        holes.used += need;
        holes.peak = holes.peak.max(start + need);
        holes.note(Request::Take { bytes, start });
        drop(holes);
        let mut region = Region { inner: Arc::clone(&self.inner), start, len: bytes };
        if let Some(value) = self.inner.poison {
            region.bytes_mut().into_host().fill(value);
        }
        Ok(region)
    }

    /// Bytes of an arena that a region of `bytes` takes: more than any arena has, where whole units of it cannot be counted.
    pub fn region_bytes(bytes: usize) -> usize {
        bytes.checked_next_multiple_of(REGION_ALIGN).unwrap_or(usize::MAX).max(REGION_ALIGN)
    }

    /// Bytes of the arena.
    pub fn capacity(&self) -> usize {
        self.inner.capacity
    }

    /// The free ranges, `(start, end)` each, in order: while they are the same, the same requests get the same places.
    pub fn holes(&self) -> Vec<(usize, usize)> {
        self.inner.lock().free.clone()
    }

    /// What `work` asks of the arena, in order, beside its result.
    pub fn requests_of<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Request>) {
        self.inner.lock().requests = Some(Vec::new());
        let done = work();
        (done, self.inner.lock().requests.take().unwrap_or_default())
    }

    /// Bytes in use now, rounded up per region.
    pub fn used(&self) -> usize {
        self.inner.lock().used
    }

    /// The smallest capacity that would have served every request so far.
    pub fn peak(&self) -> usize {
        self.inner.lock().peak
    }
}

impl Region {
    /// Borrows the region.
    pub fn bytes(&self) -> Bytes<'_> {
        // SAFETY: the range belongs to this region until it is dropped; `&self` keeps writers away.
        unsafe { Bytes::from_raw(self.address(), self.len, self.inner.space) }
    }

    /// Borrows the region mutably.
    pub fn bytes_mut(&mut self) -> BytesMut<'_> {
        // SAFETY: as in `bytes`, and `&mut self` makes it exclusive.
        unsafe { BytesMut::from_raw(self.address(), self.len, self.inner.space) }
    }

    /// Where it begins in its arena.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes were asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn address(&self) -> NonNull<u8> {
        if self.inner.space == Space::Virtual {
            return self.inner.base;
        }
        // SAFETY: `start` lies within the arena.
        unsafe { self.inner.base.add(self.start) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let end = self.start + Arena::region_bytes(self.len);
        let mut holes = self.inner.lock();
        holes.note(Request::Give { start: self.start });
        holes.used -= end - self.start;
        let at = holes.free.partition_point(|(start, _)| *start < self.start);
        holes.free.insert(at, (self.start, end));
        if at + 1 < holes.free.len() && holes.free[at].1 == holes.free[at + 1].0 {
            holes.free[at].1 = holes.free[at + 1].1;
            holes.free.remove(at + 1);
        }
        if at > 0 && holes.free[at - 1].1 == holes.free[at].0 {
            holes.free[at - 1].1 = holes.free[at].1;
            holes.free.remove(at);
        }
    }
}

impl Holes {
    fn note(&mut self, request: Request) {
        if let Some(requests) = &mut self.requests {
            requests.push(request);
        }
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, Holes> {
        self.holes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_merge_back_into_one_hole() {
        let arena = Arena::virtual_memory();
        let a = arena.alloc(1000).unwrap();
        let b = arena.alloc(1).unwrap();
        let c = arena.alloc(5000).unwrap();
        assert_eq!(arena.peak(), 1024 + 256 + 5120);
        drop(b);
        drop(a);
        let d = arena.alloc(1280).unwrap();
        assert_eq!(d.start, 0, "the merged hole is used first");
        drop(c);
        drop(d);
        assert_eq!(arena.used(), 0);
        assert_eq!(arena.inner.lock().free.len(), 1);
    }

    #[test]
    fn requests_are_noted_while_work_goes_on() {
        let arena = Arena::virtual_memory();
        let before = arena.alloc(10).unwrap();
        let (region, requests) = arena.requests_of(|| {
            let region = arena.alloc(300).unwrap();
            drop(arena.alloc(1).unwrap());
            drop(before);
            region
        });
        assert_eq!(
            requests,
            [
                Request::Take { bytes: 300, start: 256 },
                Request::Take { bytes: 1, start: 768 },
                Request::Give { start: 768 },
                Request::Give { start: 0 },
            ]
        );
        drop(region);
        assert!(arena.requests_of(|| ()).1.is_empty());
    }
}
