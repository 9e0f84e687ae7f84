//! Streams and events of a CUDA device.

use super::context::Context;
use super::driver::{check, failure};
use crate::{Bytes, BytesMut, DeviceError, Event, Space, Stream, StreamKind};
use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// A queue of the driver's that waits for no other, the default stream included.
#[derive(Debug)]
pub struct CudaStream {
    raw: CUstream,
    kind: StreamKind,
    context: Arc<Context>,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for CudaStream {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    pub(super) fn new(context: Arc<Context>, kind: StreamKind) -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is writable.
        context.call("making a stream", || unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self { raw, kind, context })
    }

    /// The driver's handle, valid while the stream lives. Calls of the driver with it need the context to be current
    /// ([`CudaDevice::enter`](super::CudaDevice::enter)).
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// What the stream is for.
    pub fn kind(&self) -> StreamKind {
        self.kind
    }

    /// Enqueues setting every byte of `dst` to `value`.
    ///
    /// # Safety
    /// As for the destination of [`Stream::copy`].
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `dst` is not memory of this stream's device.
    #[expect(clippy::needless_pass_by_value, reason = "an exclusive borrow is handed over, as to `copy`")]
    pub unsafe fn fill(&self, dst: BytesMut<'_>, value: u8) -> Result<(), DeviceError> {
        assert_eq!(dst.space(), self.space(), "a stream fills memory of its device");
        if dst.is_empty() {
            return Ok(());
        }
        let address = dst.address().as_ptr() as u64;
        // SAFETY: the caller keeps the range valid and to itself until an event recorded later has fired.
        self.call("filling memory", || unsafe { sys::cuMemsetD8Async(address, value, dst.len(), self.raw) })
    }

    /// Marks this point of the stream for measuring time; for benchmarks, since timing makes events dearer.
    ///
    /// # Errors
    /// The driver refused.
    pub fn record_timed(&self) -> Result<TimedEvent, DeviceError> {
        let raw = self.context.make_event(sys::CUevent_flags::CU_EVENT_DEFAULT as u32)?;
        let event = TimedEvent { raw, context: Arc::clone(&self.context) };
        // SAFETY: event and stream are alive and of one context.
        self.call("recording an event", || unsafe { sys::cuEventRecord(raw, self.raw) })?;
        Ok(event)
    }

    pub(super) fn call(&self, doing: &str, call: impl FnOnce() -> CUresult) -> Result<(), DeviceError> {
        self.context.call(doing, call)
    }

    pub(super) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    fn space(&self) -> Space {
        Space::Device(self.context.ordinal())
    }
}

impl Stream for CudaStream {
    unsafe fn copy(&self, src: Bytes<'_>, dst: BytesMut<'_>) -> Result<(), DeviceError> {
        assert_eq!(src.len(), dst.len(), "a copy moves as many bytes as there is room for");
        let (device, bytes) = (self.space(), src.len());
        let (from, to) = (src.address().as_ptr(), dst.address().as_ptr());
        if bytes == 0 {
            return Ok(());
        }
        // The caller keeps both ranges valid, the source unchanged and the destination untouched until
        // an event recorded later has fired; the spaces say which call moves them.
        match (src.space(), dst.space()) {
            // SAFETY: the caller's promise, and the spaces, see above.
            (Space::Host, to_space) if to_space == device => self.call("uploading", || unsafe {
                sys::cuMemcpyHtoDAsync_v2(to as u64, from.cast(), bytes, self.raw)
            }),
            // SAFETY: as above.
            (from_space, Space::Host) if from_space == device => self.call("downloading", || unsafe {
                sys::cuMemcpyDtoHAsync_v2(to.cast(), from as u64, bytes, self.raw)
            }),
            // SAFETY: as above.
            (a, b) if a == device && b == device => self.call("copying on the device", || unsafe {
                sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, self.raw)
            }),
            (a, b) => panic!("a stream of {device:?} copies to, from or within it, not from {a:?} to {b:?}"),
        }
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let event = CudaEvent { raw: self.context.take_event()?, context: Arc::clone(&self.context) };
        // SAFETY: event and stream are alive and of one context.
        self.call("recording an event", || unsafe { sys::cuEventRecord(event.raw, self.raw) })?;
        Ok(Arc::new(event))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let any: &dyn Any = event;
        match any.downcast_ref::<CudaEvent>() {
            // SAFETY: both handles are alive; an event of another device is allowed. The driver takes the event's present
            // point, so that the event may be recorded anew or given back at once.
            Some(event) => self
                .call("waiting for an event", || unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) }),
            // Of another backend, which this driver cannot wait for.
            None => event.synchronize(),
        }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        // Through an event, whose waiters sleep; the driver's own call spins by default.
        self.record()?.synchronize()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once. What is enqueued still runs; whoever enqueued it keeps the memory until
        // its event has fired.
        self.context.release(|| unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

/// A point in a stream; its event goes back to the device's pool.
#[derive(Debug)]
struct CudaEvent {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl Event for CudaEvent {
    /// True also when an operation failed, so that nobody polls forever; `synchronize` then says so.
    fn is_done(&self) -> bool {
        let Ok(_current) = self.context.enter() else { return true };
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.raw) != CUresult::CUDA_ERROR_NOT_READY }
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        // SAFETY: the event is alive.
        self.context.call("waiting for the device", || unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.context.give_event(self.raw);
    }
}

/// A point in a stream that knows when it was reached.
#[derive(Debug)]
pub struct TimedEvent {
    raw: CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for TimedEvent {}
// SAFETY: as above.
unsafe impl Sync for TimedEvent {}

impl TimedEvent {
    /// Waits for both points and says how much later than `start` this one was reached, to about half a microsecond.
    ///
    /// # Errors
    /// An earlier asynchronous operation failed, or the events are of different devices.
    pub fn since(&self, start: &Self) -> Result<Duration, DeviceError> {
        let _current = self.context.enter()?;
        for event in [start, self] {
            // SAFETY: the event is alive.
            check(unsafe { sys::cuEventSynchronize(event.raw) }, "waiting for the device")?;
        }
        let mut milliseconds = 0f32;
        match elapsed(&mut milliseconds, start.raw, self.raw) {
            CUresult::CUDA_SUCCESS => Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)),
            other => Err(failure(other, "measuring time")),
        }
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        // SAFETY: made for this value, destroyed once.
        self.context.release(|| unsafe { sys::cuEventDestroy_v2(self.raw) });
    }
}

/// `cuEventElapsedTime`, which every driver has; the bindings only know the `_v2` of drivers from 12.8 on.
fn elapsed(milliseconds: &mut f32, start: CUevent, end: CUevent) -> CUresult {
    type Call = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
    // SAFETY: the driver is loaded (it made the events), and this is the function's documented signature.
    let call = unsafe { sys::culib().get::<Call>(c"cuEventElapsedTime".to_bytes_with_nul()) };
    // SAFETY: both events are alive and were reached; the result is writable.
    call.map_or(CUresult::CUDA_ERROR_NOT_SUPPORTED, |call| unsafe { call(milliseconds, start, end) })
}
