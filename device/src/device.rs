//! The seam that a backend fills: a device, its streams and its events.

use crate::{Arena, Bytes, BytesMut, DeviceError, Pinned};
use std::any::Any;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;

/// What a stream is for; a backend may map several kinds to one queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamKind {
    /// Kernels.
    Compute,
    /// Host to device copies.
    Upload,
    /// Device to host copies.
    Download,
}

/// A device: memory and streams.
pub trait Device: Send + Sync + Debug {
    /// The device's name for reports.
    fn name(&self) -> &str;

    /// Whether device memory *is* host memory, so that uploads and downloads need no copy.
    fn unified(&self) -> bool;

    /// Allocates an arena; called when the plan is sealed, for memory that kernels use.
    ///
    /// # Errors
    /// Not enough memory.
    fn arena(&self, bytes: usize) -> Result<Arena, DeviceError>;

    /// A new stream.
    ///
    /// # Errors
    /// The driver refused.
    fn stream(&self, kind: StreamKind) -> Result<Arc<dyn Stream>, DeviceError>;

    /// Tells the device about host memory that copies will use, so that it reads and writes it directly. Copies work
    /// without, but slower and not beside everything else. Here nothing is done; the same pages may be registered with a
    /// disk engine as well.
    ///
    /// # Safety
    /// The range stays mapped until the returned value is dropped, and afterwards where [`Pinned::end`] says that the device has not let
    /// go of it.
    ///
    /// # Errors
    /// The system can pin no more memory, or part of the range is pinned already.
    unsafe fn pin(&self, start: NonNull<u8>, len: usize) -> Result<Pinned, DeviceError> {
        let _ = (start, len);
        Ok(Pinned::none())
    }

    /// Bytes that it was asked to [`pin`](Self::pin) and could not.
    fn unpinned_bytes(&self) -> u64 {
        0
    }
}

/// A queue of work that runs in order.
pub trait Stream: Send + Sync + Debug {
    /// Enqueues a copy of `src` to `dst`, between the host and the device in either direction.
    ///
    /// # Safety
    /// Until an event recorded after this call has fired, `src` stays valid and unchanged, and `dst` stays valid and is
    /// neither read nor written by anything that does not wait for that event. [`Upload`](crate::Upload) and
    /// [`Download`](crate::Download) keep both promises for safe code.
    ///
    /// # Errors
    /// The driver refused the copy.
    unsafe fn copy(&self, src: Bytes<'_>, dst: BytesMut<'_>) -> Result<(), DeviceError>;

    /// An event that fires when everything enqueued so far is done.
    ///
    /// # Errors
    /// The driver refused.
    fn record(&self) -> Result<Arc<dyn Event>, DeviceError>;

    /// Makes work enqueued later on this stream wait for `event`.
    ///
    /// # Errors
    /// The driver refused.
    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError>;

    /// Blocks the calling thread until everything enqueued so far is done.
    ///
    /// # Errors
    /// An earlier asynchronous operation failed.
    fn synchronize(&self) -> Result<(), DeviceError> {
        self.record()?.synchronize()
    }
}

/// A point in a stream. A stream recognizes events of its own kind by their type, hence `Any`.
pub trait Event: Any + Send + Sync + Debug {
    /// Whether the point was reached. Never blocks.
    fn is_done(&self) -> bool;

    /// Blocks the calling thread until the point is reached.
    ///
    /// # Errors
    /// An earlier asynchronous operation failed.
    fn synchronize(&self) -> Result<(), DeviceError>;
}
