//! The CPU as a device.
//!
//! In the default, *unified* mode device memory is host memory and nothing is copied. In *discrete* mode the CPU plays
//! a card with memory of its own: a copy is deferred and its destination filled with [`POISON`] until the copy's event is
//! waited for, and every region is poisoned when it is taken. A missing wait therefore reads NaNs, and a source that
//! is recycled too early is copied with its new contents.

use crate::{Arena, Bytes, BytesMut, Device, DeviceError, Event, Pinned, Space, Stream, StreamKind};
use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// The byte that marks memory nobody may read yet; as f32 or bf16 it is a NaN.
pub const POISON: u8 = 0xFF;

/// Mappings of this size ask for huge pages.
const HUGE_BYTES_MIN: usize = 4 << 20;

/// The smallest page of x86-64.
const PAGE_BYTES: usize = 4096;

/// The CPU.
#[derive(Debug, Clone)]
pub struct HostDevice {
    discrete: bool,
}

impl HostDevice {
    /// Device memory is host memory.
    pub fn unified() -> Self {
        Self { discrete: false }
    }

    /// The CPU pretends to be a card with its own memory; for tests.
    pub fn discrete() -> Self {
        Self { discrete: true }
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        if self.discrete { "cpu (discrete test mode)" } else { "cpu" }
    }

    fn unified(&self) -> bool {
        !self.discrete
    }

    fn arena(&self, bytes: usize) -> Result<Arena, DeviceError> {
        let memory = HostMemory::new(bytes)?;
        let poison = self.discrete.then_some(POISON);
        let base = memory.base;
        // SAFETY: the memory is page-aligned, zeroed, `bytes` long and handed to the arena to keep.
        Ok(unsafe { Arena::from_raw(base, bytes, Space::Host, poison, Box::new(memory)) })
    }

    fn stream(&self, _kind: StreamKind) -> Result<Arc<dyn Stream>, DeviceError> {
        Ok(Arc::new(HostStream { discrete: self.discrete, queue: Arc::default() }))
    }
}

/// Zeroed, page-aligned memory of the process.
///
/// It is mapped, not allocated: an aligned zeroed allocation would write every page at once, while a mapping's pages
/// become resident only when they are first touched. From 4 MiB on it asks for huge pages, which need fewer entries in page
/// tables and in the lists of a direct transfer; up to 2 MiB around a touched byte may then be resident, never more than the
/// mapping.
#[derive(Debug)]
pub struct HostMemory {
    pinned: Vec<Pinned>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping has one owner and is not tied to a thread.
unsafe impl Send for HostMemory {}
// SAFETY: `&HostMemory` gives no access to the bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Maps `bytes` (at least one page).
    ///
    /// # Errors
    /// The operating system has no memory left.
    pub fn new(bytes: usize) -> Result<Self, DeviceError> {
        // What cannot be counted in pages cannot be had either.
        let mapped =
            bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(usize::MAX - (PAGE_BYTES - 1));
        // SAFETY: a new private anonymous mapping touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let detail = std::io::Error::last_os_error().to_string();
            return Err(DeviceError::OutOfMemory { what: "host", bytes, detail });
        }
        let base: NonNull<u8> = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        if mapped >= HUGE_BYTES_MIN {
            // Advice: where it is not taken the memory is the same in small pages.
            // SAFETY: the range is the mapping just made, and the advice changes no byte of it.
            unsafe { libc::madvise(base.as_ptr().cast(), mapped, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { pinned: Vec::new(), base, bytes: mapped })
    }

    /// Makes the pages of a range resident that are not yet: what touching them would do, one by one and by whoever comes first. Several
    /// threads may do parts of it at once. Nothing happens where the system cannot (before Linux 5.14).
    ///
    /// # Panics
    /// If the range reaches past the mapping.
    pub fn populate(&self, range: Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} lies within {} bytes",
            self.bytes
        );
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        // SAFETY: whole pages of the mapping, of which no byte changes.
        unsafe {
            let first = self.base.as_ptr().add(start);
            libc::madvise(first.cast(), range.end - start, libc::MADV_POPULATE_WRITE);
        }
    }

    /// Pins the memory for the copies of `device`, if it needs and gets that.
    pub fn pin_for(&mut self, device: &dyn Device) {
        self.pin_in_parts(device, self.bytes);
    }

    /// As [`pin_for`](Self::pin_for), `part` bytes at once, of which a copy must not touch two. A part that the device is refused stays as it
    /// is.
    ///
    /// # Panics
    /// If a part is no bytes.
    pub fn pin_in_parts(&mut self, device: &dyn Device, part: usize) {
        self.pinned.clear();
        for start in (0..self.bytes).step_by(part) {
            // SAFETY: within the mapping, which ends when it is dropped, after the pinning has ended.
            let pinned = unsafe { device.pin(self.base.add(start), part.min(self.bytes - start)) };
            self.pinned.extend(pinned);
        }
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Hazard (unmapped while pinned): what a lost device may still read stays mapped.
        let left = self.pinned.iter_mut().map(Pinned::end).filter(|ended| !ended).count();
        if left == 0 {
            // SAFETY: mapped in `new` with this length, and no borrow of it is left.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        }
    }
}

#[derive(Debug)]
struct HostStream {
    discrete: bool,
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
}

#[derive(Debug, Default)]
struct QueueState {
    deferred: VecDeque<Deferred>,
    /// Copies enqueued and copies run, ever.
    enqueued: u64,
    run: u64,
}

#[derive(Debug)]
struct Deferred {
    src: NonNull<u8>,
    dst: NonNull<u8>,
    len: usize,
}

// SAFETY: the caller of `Stream::copy` keeps both ranges valid until the event fires, on whatever thread.
unsafe impl Send for Deferred {}

#[derive(Debug)]
struct HostEvent {
    queue: Arc<Queue>,
    /// Fires when this many copies have run.
    at: u64,
}

impl Stream for HostStream {
    unsafe fn copy(&self, src: Bytes<'_>, dst: BytesMut<'_>) -> Result<(), DeviceError> {
        assert_eq!(src.len(), dst.len(), "a copy moves as many bytes as there is room for");
        let (source, len) = (src.address(), src.len());
        let dst = dst.into_host();
        if self.discrete {
            dst.fill(POISON);
            let mut state = self.queue.lock();
            state.deferred.push_back(Deferred { src: source, dst: NonNull::from(dst).cast(), len });
            state.enqueued += 1;
        } else {
            dst.copy_from_slice(src.host());
        }
        Ok(())
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let at = self.queue.lock().enqueued;
        Ok(Arc::new(HostEvent { queue: Arc::clone(&self.queue), at }))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        event.synchronize()
    }
}

impl Event for HostEvent {
    fn is_done(&self) -> bool {
        self.queue.lock().run >= self.at
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let mut state = self.queue.lock();
        while state.run < self.at {
            let copy =
                state.deferred.pop_front().expect("as many copies are queued as were enqueued and not run");
            // SAFETY: the contract of `Stream::copy`: both ranges are valid and untouched until this event fires.
            unsafe { std::ptr::copy_nonoverlapping(copy.src.as_ptr(), copy.dst.as_ptr(), copy.len) };
            state.run += 1;
        }
        Ok(())
    }
}

impl Queue {
    fn lock(&self) -> std::sync::MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which pages of a mapping are resident.
    fn resident(memory: &HostMemory) -> Vec<bool> {
        let mut pages = vec![0u8; memory.bytes() / PAGE_BYTES];
        // SAFETY: the range is a mapping, and there is a byte for each of its pages.
        let result =
            unsafe { libc::mincore(memory.base().as_ptr().cast(), memory.bytes(), pages.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        pages.into_iter().map(|page| page & 1 == 1).collect()
    }

    #[test]
    fn populated_pages_are_resident_and_keep_their_bytes() {
        let memory = HostMemory::new(16 * PAGE_BYTES).unwrap();
        // A touched byte of a huge page makes many small ones resident.
        // SAFETY: the range is the mapping, and the advice changes no byte of it.
        unsafe { libc::madvise(memory.base().as_ptr().cast(), memory.bytes(), libc::MADV_NOHUGEPAGE) };
        // SAFETY: within the mapping, of which there is no reference.
        unsafe { memory.base().add(5 * PAGE_BYTES).write(7) };
        let touched: Vec<bool> = (0..16).map(|page| page == 5).collect();
        assert_eq!(resident(&memory), touched, "what nobody has touched is not resident");
        memory.populate(2 * PAGE_BYTES + 1..6 * PAGE_BYTES + 1);
        let other = HostMemory::new(PAGE_BYTES).unwrap();
        // SAFETY: the range is the mapping, and no byte of it changes.
        let answer =
            unsafe { libc::madvise(other.base().as_ptr().cast(), PAGE_BYTES, libc::MADV_POPULATE_WRITE) };
        let populated: Vec<bool> = (0..16).map(|page| (2..7).contains(&page)).collect();
        // A system before Linux 5.14 does nothing.
        assert_eq!(resident(&memory), if answer == 0 { populated } else { touched });
        // SAFETY: as above.
        assert_eq!(unsafe { memory.base().add(5 * PAGE_BYTES).read() }, 7);
        memory.populate(0..0);
    }

    #[test]
    #[should_panic(expected = "lies within")]
    fn nothing_outside_of_a_mapping_is_populated() {
        HostMemory::new(PAGE_BYTES).unwrap().populate(0..PAGE_BYTES + 1);
    }
}
