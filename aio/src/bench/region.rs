//! The memory that blocks are read into and written from: one mapping, made once, registered with the engine once.

use crate::{BufHome, IoBuf, IoEngine, Registration};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One anonymous mapping, in huge pages where the system has them. Unmapped when the last buffer is gone.
#[derive(Debug)]
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// Its bytes belong to buffers.
    is_cut: AtomicBool,
}

// SAFETY: the region only owns an address range; the buffers cut from it are the only access to its bytes.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Keeps a region registered. Ends the registration before it lets go of the memory.
#[derive(Debug)]
pub struct Registered {
    // Fields are dropped in order.
    registration: Registration,
    _region: Arc<Region>,
}

impl Region {
    /// Maps `bytes` bytes of zeros.
    pub fn new(bytes: usize) -> io::Result<Arc<Self>> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was mapped above. It is advice: failure is harmless.
        unsafe { libc::madvise(start, bytes, libc::MADV_HUGEPAGE) };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Arc::new(Self { start, bytes, is_cut: AtomicBool::new(false) }))
    }

    /// Cuts the region into buffers of `block_bytes` each, which are the only access to its bytes.
    ///
    /// # Panics
    /// If it was cut before.
    pub fn cut(self: Arc<Self>, block_bytes: usize) -> Vec<IoBuf> {
        assert!(
            !self.is_cut.swap(true, Ordering::Relaxed),
            "a region is cut once: other buffers would overlap"
        );
        let count = self.bytes / block_bytes;
        let buffer = |slot: usize| {
            let home: Arc<dyn BufHome> = self.clone();
            // SAFETY: the block lies inside the mapping, which lives as long as `home`; blocks do not overlap, and no
            // others were cut; the start is page-aligned because blocks are whole pages.
            unsafe { IoBuf::from_home(self.start.add(slot * block_bytes), block_bytes, home, slot) }
        };
        (0..count).map(buffer).collect()
    }

    /// Registers the region with an engine, if the engine does such a thing.
    pub fn register(self: &Arc<Self>, engine: &dyn IoEngine) -> Registered {
        // SAFETY: the mapping stays until the last reference is gone, and `Registered` holds one until after its
        // registration has ended.
        let registration = unsafe { engine.register(self.start, self.bytes) };
        Registered { registration, _region: Arc::clone(self) }
    }
}

impl Registered {
    /// Whether the engine really registered it.
    pub fn is_real(&self) -> bool {
        self.registration.is_some()
    }
}

impl BufHome for Region {
    /// Blocks are not handed out a second time.
    fn give_back(&self, _slot: usize) {}
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and no buffer is left, for each holds a reference.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a region is cut once")]
    fn a_region_is_not_cut_twice() {
        let region = Region::new(8192).unwrap();
        let _buffers = Arc::clone(&region).cut(4096);
        region.cut(4096);
    }
}
