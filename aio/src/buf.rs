//! Owned, aligned, stable-address bytes.
//!
//! A buffer either owns its allocation or is a slot of somebody's pool ([`BufHome`]). In both cases moving the
//! `IoBuf` value does not move the bytes, which is what lets the kernel keep their address while a request is in
//! flight. Dropping a pooled buffer hands the slot back to its home.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment of every [`IoBuf`], in bytes: enough for direct I/O on 512-byte and 4Kn drives.
pub const BUF_ALIGN: usize = 4096;

/// The pool that a buffer's memory returns to when the buffer is dropped.
pub trait BufHome: Send + Sync {
    /// Takes slot `slot` back. Called exactly once for every [`IoBuf::from_home`] call.
    fn give_back(&self, slot: usize);
}

/// Owned bytes with a stable, [`BUF_ALIGN`]-aligned address.
pub struct IoBuf {
    ptr: NonNull<u8>,
    len: usize,
    capacity: usize,
    owner: Owner,
}

enum Owner {
    Allocation(Layout),
    Home { home: Arc<dyn BufHome>, slot: usize },
    Nothing,
}

// SAFETY: an IoBuf is the only handle to its bytes; nothing in it is tied to a thread.
unsafe impl Send for IoBuf {}
// SAFETY: `&IoBuf` only gives `&[u8]`.
unsafe impl Sync for IoBuf {}

impl IoBuf {
    /// A zeroed buffer of `len` bytes with an allocation of its own. As with any allocation, the process ends if there is no memory for it.
    ///
    /// # Panics
    /// If `len`, in whole pages, exceeds `isize::MAX`.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self::empty();
        }
        let capacity = len.checked_next_multiple_of(BUF_ALIGN);
        let layout = capacity.and_then(|capacity| Layout::from_size_align(capacity, BUF_ALIGN).ok());
        let layout = layout.unwrap_or_else(|| panic!("a buffer of {len} bytes is smaller than isize::MAX"));
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(raw) else { handle_alloc_error(layout) };
        Self { ptr, len, capacity: layout.size(), owner: Owner::Allocation(layout) }
    }

    /// A buffer of no bytes.
    pub fn empty() -> Self {
        Self { ptr: NonNull::dangling(), len: 0, capacity: 0, owner: Owner::Nothing }
    }

    /// A buffer over pool memory: `home.give_back(slot)` runs when it is dropped.
    ///
    /// # Safety
    /// `ptr` is [`BUF_ALIGN`]-aligned and valid for reads and writes of `capacity` initialized bytes until
    /// `give_back(slot)` has been called, and nothing else touches those bytes before that.
    pub unsafe fn from_home(ptr: NonNull<u8>, capacity: usize, home: Arc<dyn BufHome>, slot: usize) -> Self {
        assert_eq!(ptr.as_ptr() as usize % BUF_ALIGN, 0, "pool memory is aligned for direct I/O");
        Self { ptr, len: capacity, capacity, owner: Owner::Home { home, slot } }
    }

    /// Bytes in the buffer's memory; `len` can be set up to this.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length. The bytes that come into view are whatever the memory held before.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "length {len} exceeds the capacity {}", self.capacity);
        self.len = len;
    }

    /// The address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The address of the first byte, for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Deref for IoBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len <= capacity` initialized bytes and `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for IoBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for IoBuf {
    fn drop(&mut self) {
        match &self.owner {
            // SAFETY: the pointer came from `alloc_zeroed` with this layout.
            Owner::Allocation(layout) => unsafe { dealloc(self.ptr.as_ptr(), *layout) },
            Owner::Home { home, slot } => home.give_back(*slot),
            Owner::Nothing => {}
        }
    }
}

impl fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBuf").field("ptr", &self.ptr).field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Home(Mutex<Vec<usize>>);

    impl BufHome for Home {
        fn give_back(&self, slot: usize) {
            self.0.lock().unwrap().push(slot);
        }
    }

    /// Sizes that wrap made buffers of nothing that said they were longer than memory.
    #[test]
    #[should_panic(expected = "is smaller than isize::MAX")]
    fn a_buffer_of_more_than_there_is() {
        let _ = IoBuf::zeroed(usize::MAX);
    }

    #[test]
    fn a_buffer_is_aligned_zeroed_and_stays_where_it_is() {
        for len in [1, 4095, 4096, 4097] {
            let mut buf = IoBuf::zeroed(len);
            assert!(buf.iter().all(|&byte| byte == 0) && buf.len() == len);
            assert!(buf.as_ptr().addr().is_multiple_of(BUF_ALIGN));
            buf[len - 1] = 7;
            let address = buf.as_ptr();
            let mut moved = Box::new(buf);
            assert_eq!((moved.as_ptr(), moved[len - 1]), (address, 7));
            moved.set_len(moved.capacity());
            moved.fill(1);
            moved.set_len(0);
            assert!(moved.is_empty());
        }
        assert_eq!(IoBuf::zeroed(0).capacity(), 0);
    }

    #[test]
    #[should_panic(expected = "exceeds the capacity")]
    fn a_buffer_does_not_outgrow_its_memory() {
        IoBuf::zeroed(10).set_len(BUF_ALIGN + 1);
    }

    #[test]
    fn a_slot_goes_home_once_with_its_bytes() {
        let mut memory = IoBuf::zeroed(2 * BUF_ALIGN);
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        let home = Arc::new(Home::default());
        let slot = |index: usize| {
            // SAFETY: each slot is a page of `memory`, which is not touched until both are home.
            unsafe {
                let page = start.add(index * BUF_ALIGN);
                IoBuf::from_home(page, BUF_ALIGN, Arc::clone(&home) as Arc<dyn BufHome>, index)
            }
        };
        let (mut first, mut second) = (slot(0), slot(1));
        second.fill(2);
        first.fill(1);
        let other_thread = std::thread::spawn(move || drop(second));
        other_thread.join().unwrap();
        assert_eq!(*home.0.lock().unwrap(), [1]);
        drop(first);
        assert_eq!(*home.0.lock().unwrap(), [1, 0]);
        assert!(memory[..BUF_ALIGN].iter().all(|&byte| byte == 1));
        assert!(memory[BUF_ALIGN..].iter().all(|&byte| byte == 2));
    }
}
