//! Borrowed ranges of memory that may or may not be reachable by the CPU.

use std::marker::PhantomData;
use std::ptr::NonNull;

/// Which address space a range is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// The CPU can read and write it.
    Host,
    /// Memory of the device with this index; only its kernels and copies reach it.
    Device(u32),
    /// No memory at all: planning runs operations on such ranges to count what they need.
    Virtual,
}

/// A shared borrow of bytes in some address space.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a> {
    ptr: NonNull<u8>,
    len: usize,
    space: Space,
    borrow: PhantomData<&'a [u8]>,
}

/// An exclusive borrow of bytes in some address space.
#[derive(Debug)]
pub struct BytesMut<'a> {
    ptr: NonNull<u8>,
    len: usize,
    space: Space,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Bytes` is a `&[u8]` in another address space.
unsafe impl Send for Bytes<'_> {}
// SAFETY: as above.
unsafe impl Sync for Bytes<'_> {}
// SAFETY: a `BytesMut` is a `&mut [u8]` in another address space.
unsafe impl Send for BytesMut<'_> {}
// SAFETY: `&BytesMut` only gives `Bytes`.
unsafe impl Sync for BytesMut<'_> {}

impl<'a> Bytes<'a> {
    /// Host memory.
    pub fn from_host(slice: &'a [u8]) -> Self {
        Self { ptr: NonNull::from(slice).cast(), len: slice.len(), space: Space::Host, borrow: PhantomData }
    }

    /// A range that no memory backs, for planning runs.
    pub fn virtual_range(len: usize) -> Self {
        Self { ptr: NonNull::<u128>::dangling().cast(), len, space: Space::Virtual, borrow: PhantomData }
    }

    /// A range of any space.
    ///
    /// # Safety
    /// `ptr` is valid in `space` for `len` bytes and not written during `'a`.
    pub unsafe fn from_raw(ptr: NonNull<u8>, len: usize, space: Space) -> Self {
        Self { ptr, len, space, borrow: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address space.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Address, meaningful in its space.
    pub fn address(&self) -> NonNull<u8> {
        self.ptr
    }

    /// The bytes, for the CPU.
    ///
    /// # Panics
    /// If the CPU cannot reach them.
    pub fn host(&self) -> &'a [u8] {
        assert_eq!(self.space, Space::Host, "only host memory is read by the CPU");
        // SAFETY: host space, valid for `len` bytes and borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// Bytes `start..end`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn slice(&self, start: usize, end: usize) -> Self {
        assert!(start <= end && end <= self.len, "range {start}..{end} within {} bytes", self.len);
        // SAFETY: `start <= len`, so the address stays within or one past the range; virtual ranges are never read.
        let ptr = unsafe { offset(self.ptr, start, self.space) };
        Self { ptr, len: end - start, ..*self }
    }
}

impl<'a> BytesMut<'a> {
    /// Host memory.
    pub fn from_host(slice: &'a mut [u8]) -> Self {
        let len = slice.len();
        Self { ptr: NonNull::from(slice).cast(), len, space: Space::Host, borrow: PhantomData }
    }

    /// A range that no memory backs, for planning runs.
    pub fn virtual_range(len: usize) -> Self {
        Self { ptr: NonNull::<u128>::dangling().cast(), len, space: Space::Virtual, borrow: PhantomData }
    }

    /// A range of any space.
    ///
    /// # Safety
    /// `ptr` is valid in `space` for `len` bytes and touched by nobody else during `'a`.
    pub unsafe fn from_raw(ptr: NonNull<u8>, len: usize, space: Space) -> Self {
        Self { ptr, len, space, borrow: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address space.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Address, meaningful in its space.
    pub fn address(&self) -> NonNull<u8> {
        self.ptr
    }

    /// A shared borrow of the same bytes.
    pub fn as_bytes(&self) -> Bytes<'_> {
        Bytes { ptr: self.ptr, len: self.len, space: self.space, borrow: PhantomData }
    }

    /// A shorter exclusive borrow.
    pub fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut { ptr: self.ptr, len: self.len, space: self.space, borrow: PhantomData }
    }

    /// The bytes, for the CPU.
    ///
    /// # Panics
    /// If the CPU cannot reach them.
    pub fn into_host(self) -> &'a mut [u8] {
        assert_eq!(self.space, Space::Host, "only host memory is written by the CPU");
        // SAFETY: host space, valid for `len` bytes and exclusively borrowed for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// The first `middle` bytes and the rest.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn split_at(self, middle: usize) -> (Self, Self) {
        assert!(middle <= self.len, "split at {middle} of {} bytes", self.len);
        // SAFETY: as in `Bytes::slice`; the two halves are disjoint.
        let rest = unsafe { offset(self.ptr, middle, self.space) };
        let second = Self { ptr: rest, len: self.len - middle, space: self.space, borrow: PhantomData };
        (Self { len: middle, ..self }, second)
    }

    /// Bytes `start..end`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn slice(self, start: usize, end: usize) -> Self {
        assert!(start <= end && end <= self.len, "range {start}..{end} within {} bytes", self.len);
        // SAFETY: as in `Bytes::slice`.
        let ptr = unsafe { offset(self.ptr, start, self.space) };
        Self { ptr, len: end - start, ..self }
    }
}

/// # Safety
/// `by` is within the range that `ptr` starts, unless the space is virtual.
unsafe fn offset(ptr: NonNull<u8>, by: usize, space: Space) -> NonNull<u8> {
    if space == Space::Virtual {
        return ptr;
    }
    // SAFETY: the caller keeps `by` within the range.
    unsafe { ptr.add(by) }
}
