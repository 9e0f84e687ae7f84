//! Blobs that live in host memory for the whole run.

use crate::{Lease, TierError};
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use terrace_device::host::HostMemory;
use terrace_device::{Device, StableBytes};

/// A resident blob: page-aligned, zeroed at first, of fixed size.
#[derive(Debug)]
pub struct HostBlob {
    memory: HostMemory,
    len: usize,
}

/// Host bytes that several holders read: a staged lease or a resident blob.
#[derive(Debug, Clone)]
pub enum SharedBytes {
    /// A slot of a pool; it goes back when the last holder drops it.
    Lease(Arc<Lease>),
    /// A blob that stays for the whole run.
    Blob(Arc<HostBlob>),
}

// SAFETY: the bytes belong to the Arc'd value and stay where they are; they are only written through
// `Arc::get_mut`, which fails while anybody holds a clone.
unsafe impl StableBytes for SharedBytes {}

impl HostBlob {
    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// The operating system has no memory left.
    pub fn new(len: usize) -> Result<Self, TierError> {
        Ok(Self { memory: HostMemory::new(len)?, len })
    }

    /// Makes the pages of a range resident, as [`HostMemory::populate`].
    ///
    /// # Panics
    /// If the range reaches past the blob.
    pub fn populate(&self, range: Range<usize>) {
        self.memory.populate(range);
    }

    /// Pins the memory for the copies of `device`, if it needs and gets that.
    pub fn pin_for(&mut self, device: &dyn Device) {
        self.memory.pin_for(device);
    }
}

impl Deref for HostBlob {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is valid and initialized for `len` bytes; `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr(), self.len) }
    }
}

impl DerefMut for HostBlob {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes it exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr(), self.len) }
    }
}

impl Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Lease(lease) => lease,
            Self::Blob(blob) => blob,
        }
    }
}
