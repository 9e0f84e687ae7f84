//! A device's primary context: what every object of the driver lives in.
//!
//! The primary context is the one that other libraries of the process (cuBLAS, libtorch) use, too, so memory and streams
//! can be shared with them. Driver calls act on the context that is *current* on the calling thread; every entry of this
//! backend makes its own current first.

use super::driver::{check, failure};
use crate::DeviceError;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUresult};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The context, and what its objects share. It is released after the last of them.
#[derive(Debug)]
pub(super) struct Context {
    raw: CUcontext,
    device: CUdevice,
    ordinal: u32,
    /// Events that nobody uses. Making one allocates in the driver, so they are used again.
    free_events: Mutex<Vec<CUevent>>,
    events_made: AtomicUsize,
}

// SAFETY: the driver's handles may be used from any thread; the list is behind a mutex.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Makes a device's context current on this thread while it lives.
///
/// If another context was current it is current again afterwards; if there was none, this one stays, which spares later
/// calls the change.
#[derive(Debug)]
#[must_use = "the context is current while the guard lives"]
pub struct ContextGuard<'a> {
    /// What to go back to; null for nothing.
    previous: CUcontext,
    /// Of this thread, hence neither `Send` nor `Sync`.
    context: PhantomData<(&'a (), *const ())>,
}

impl Context {
    /// Retains the primary context of `device`.
    pub(super) fn retain(device: CUdevice, ordinal: u32) -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver was started and gave `device`; `raw` is writable.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) };
        check(result, "opening the device")?;
        let (free_events, events_made) = (Mutex::default(), AtomicUsize::new(0));
        Ok(Self { raw, device, ordinal, free_events, events_made })
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(super) fn events_made(&self) -> usize {
        self.events_made.load(Ordering::Relaxed)
    }

    pub(super) fn enter(&self) -> Result<ContextGuard<'_>, DeviceError> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver was started; `current` is writable.
        check(unsafe { sys::cuCtxGetCurrent(&raw mut current) }, "asking for the current context")?;
        if current == self.raw {
            return Ok(ContextGuard { previous: std::ptr::null_mut(), context: PhantomData });
        }
        // SAFETY: the context is retained until `self` is dropped.
        check(unsafe { sys::cuCtxSetCurrent(self.raw) }, "making the device current")?;
        Ok(ContextGuard { previous: current, context: PhantomData })
    }

    /// Runs a driver call in this context.
    pub(super) fn call(&self, doing: &str, call: impl FnOnce() -> CUresult) -> Result<(), DeviceError> {
        let _current = self.enter()?;
        check(call(), doing)
    }

    /// Runs a driver call that gives back what is held; there is nobody to tell if it fails, which after a lost device
    /// every call does. Whether it did not.
    pub(super) fn release(&self, call: impl FnOnce() -> CUresult) -> bool {
        self.enter().is_ok_and(|_current| call() == CUresult::CUDA_SUCCESS)
    }

    /// Bytes that are free and bytes there are.
    pub(super) fn memory(&self) -> Result<(usize, usize), DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are writable.
        self.call("asking for free memory", || unsafe {
            sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }

    /// The error of an allocation of `bytes` that gave `result`.
    pub(super) fn allocation_failure(
        &self,
        result: CUresult,
        bytes: usize,
        what: &'static str,
    ) -> DeviceError {
        if result != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return failure(result, "allocating memory");
        }
        let detail = match self.memory() {
            Ok((free, total)) if what == "device" => {
                format!("{free} of its {total} bytes are free (this and other processes hold the rest)")
            }
            _ => super::driver::describe(result),
        };
        DeviceError::OutOfMemory { what, bytes, detail }
    }

    /// An event that nobody uses, without timing.
    pub(super) fn take_event(&self) -> Result<CUevent, DeviceError> {
        if let Some(event) = self.lock_events().pop() {
            return Ok(event);
        }
        // Waiting threads sleep instead of spinning: the cores have the optimizer to run.
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
            | sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        self.make_event(flags)
    }

    pub(super) fn make_event(&self, flags: u32) -> Result<CUevent, DeviceError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable.
        self.call("making an event", || unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        self.events_made.fetch_add(1, Ordering::Relaxed);
        Ok(event)
    }

    /// Gives an event of [`take_event`](Self::take_event) back. It may still be pending: waits that were enqueued keep
    /// the point they were given, and recording it again moves it.
    pub(super) fn give_event(&self, event: CUevent) {
        self.lock_events().push(event);
    }

    fn lock_events(&self) -> std::sync::MutexGuard<'_, Vec<CUevent>> {
        self.free_events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let events = std::mem::take(&mut *self.lock_events());
        // SAFETY: nobody uses the events: they are in the list, and every user held this context.
        self.release(|| unsafe {
            events
                .into_iter()
                .map(|event| sys::cuEventDestroy_v2(event))
                .last()
                .unwrap_or(CUresult::CUDA_SUCCESS)
        });
        // SAFETY: retained once, in `retain`; nothing made in the context is left.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if !self.previous.is_null() {
            // SAFETY: it was current when the guard was made; whoever made it current keeps it.
            let _ = unsafe { sys::cuCtxSetCurrent(self.previous) };
        }
    }
}
