//! Memory of the device, and host memory that it reaches directly.
//!
//! A copy between the device and ordinary host memory goes through a buffer of the driver's and holds the caller up;
//! *pinned* (page-locked) memory is read and written by the device itself, at the link's speed and beside everything
//! else. Memory is pinned in two ways: pages that exist ([`register`]: the engine's pools, whose pages the disk engine has
//! registered as well), or a new allocation ([`PinnedMemory`]), which may be *write-combined*: faster to upload, and so
//! slow for the CPU to read that only upload buffers are.

use super::context::Context;
use crate::{DeviceError, Pinned, StableBytes};
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// What the driver aligns allocations to, and what the arena relies on.
const DEVICE_ALIGN: u64 = 256;

/// One allocation of device memory.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    address: CUdeviceptr,
    context: Arc<Context>,
}

impl DeviceMemory {
    pub(super) fn new(context: Arc<Context>, bytes: usize) -> Result<Self, DeviceError> {
        let mut address = 0;
        let current = context.enter()?;
        // SAFETY: `address` is writable; the context is current.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(1)) };
        drop(current);
        if result != CUresult::CUDA_SUCCESS {
            return Err(context.allocation_failure(result, bytes, "device"));
        }
        assert_eq!(address % DEVICE_ALIGN, 0, "the driver aligns allocations to 256 bytes");
        Ok(Self { address, context })
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        let address = std::num::NonZero::new(self.address as usize);
        NonNull::without_provenance(address.expect("an allocation is never at address zero"))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once. The driver waits for work that uses it.
        self.context.release(|| unsafe { sys::cuMemFree_v2(self.address) });
    }
}

/// Pins existing host pages until the returned value is dropped.
///
/// # Safety
/// As [`Device::pin`](crate::Device::pin).
pub(super) unsafe fn register(
    context: Arc<Context>,
    start: NonNull<u8>,
    len: usize,
) -> Result<Pinned, DeviceError> {
    if len == 0 {
        return Ok(Pinned::none());
    }
    let current = context.enter()?;
    // Portable: pinned for every context of the process, other devices' included.
    // SAFETY: the caller keeps the range mapped; registering changes none of its bytes.
    let result =
        unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE) };
    drop(current);
    if result != CUresult::CUDA_SUCCESS {
        return Err(context.allocation_failure(result, len, "pinned host"));
    }
    let start = start.as_ptr() as usize;
    Ok(Pinned::new(move || {
        // SAFETY: the range was registered above and is unregistered once.
        context.release(|| unsafe { sys::cuMemHostUnregister(start as *mut _) })
    }))
}

/// What pinned host memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PinnedUse {
    /// Write-combined: the CPU writes it from front to back, and hardly reads it.
    Upload,
    /// Cacheable: the CPU reads it.
    Download,
}

/// Zeroed host memory, allocated by the driver and pinned.
#[derive(Debug)]
pub struct PinnedMemory {
    base: NonNull<u8>,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: the allocation has one owner and is not tied to a thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: `&PinnedMemory` only gives `&[u8]`.
unsafe impl Sync for PinnedMemory {}
// SAFETY: the allocation stays where it is when the value is moved, and never changes its length.
unsafe impl StableBytes for PinnedMemory {}

impl PinnedMemory {
    pub(super) fn new(context: Arc<Context>, bytes: usize, used_for: PinnedUse) -> Result<Self, DeviceError> {
        let flags = match used_for {
            PinnedUse::Upload => sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_WRITECOMBINED,
            PinnedUse::Download => sys::CU_MEMHOSTALLOC_PORTABLE,
        };
        let mut base = std::ptr::null_mut();
        let current = context.enter()?;
        // SAFETY: `base` is writable; the context is current.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut base, bytes.max(1), flags) };
        drop(current);
        if result != CUresult::CUDA_SUCCESS {
            return Err(context.allocation_failure(result, bytes, "pinned host"));
        }
        let base: NonNull<u8> = NonNull::new(base.cast()).expect("an allocation is never at address zero");
        // SAFETY: just allocated, `bytes` long and nobody else's.
        unsafe { base.write_bytes(0, bytes) };
        Ok(Self { base, bytes, context })
    }
}

impl Deref for PinnedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length, zeroed, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once, and no borrow of it is left.
        self.context.release(|| unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) });
    }
}
