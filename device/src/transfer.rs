//! Copies between host and device as values that own both ends.
//!
//! **Hazard (early reuse):** the source of a copy must not be recycled, nor its destination read, before the copy's
//! event fires. An [`Upload`] or [`Download`] holds both; the only ways to get them back go through the event.
//!
//! Where nobody can tell when a copy is done, both ends are leaked, but for the source of an upload to a device that is lost: whoever
//! waits for the memory gets it. What the device still reads of it is used by nobody, and pinned memory stays mapped.

use crate::{Bytes, BytesMut, DeviceError, Event, Region, Stream};
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// Host memory whose bytes stay where they are when the value is moved.
///
/// # Safety
/// `deref` and `deref_mut` give the same address and length for the life of the value, wherever it is moved.
pub unsafe trait StableBytes: Deref<Target = [u8]> + Send + 'static {}

// SAFETY: a Vec's heap buffer does not move with the Vec, and it is not resized while a transfer owns it.
unsafe impl StableBytes for Vec<u8> {}

/// A host-to-device copy in flight.
#[derive(Debug)]
#[must_use = "the copy's memory is held until the event is waited for"]
pub struct Upload<S> {
    event: Arc<dyn Event>,
    ends: Option<(S, Region)>,
}

/// A device-to-host copy in flight.
#[derive(Debug)]
#[must_use = "the copy's memory is held until the event is waited for"]
pub struct Download<D> {
    event: Arc<dyn Event>,
    ends: Option<(Region, D)>,
}

impl<S: StableBytes> Upload<S> {
    /// Enqueues the copy of all of `src` to the start of `dst`.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `dst` is smaller than `src`.
    pub fn start(stream: &dyn Stream, src: S, dst: Region) -> Result<Self, DeviceError> {
        Self::start_at(stream, src, dst, 0)
    }

    /// As [`start`](Self::start), to the bytes of `dst` from `at` on.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `dst` ends before `src` does.
    pub fn start_at(stream: &dyn Stream, src: S, mut dst: Region, at: usize) -> Result<Self, DeviceError> {
        let len = src.len();
        // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
        unsafe { stream.copy(Bytes::from_host(&src), dst.bytes_mut().slice(at, at + len))? };
        let (event, ends) = record(stream, (src, dst), leak_upload)?;
        Ok(Self { event, ends: Some(ends) })
    }

    /// As [`start`](Self::start), of the bytes in `parts`, which lie at the same places of both ends.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If a part ends after either end does.
    pub fn start_parts(
        stream: &dyn Stream,
        src: S,
        mut dst: Region,
        parts: &[Range<usize>],
    ) -> Result<Self, DeviceError> {
        for &Range { start, end } in parts {
            let (from, to) = (Bytes::from_host(&src).slice(start, end), dst.bytes_mut().slice(start, end));
            // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
            if let Err(error) = unsafe { stream.copy(from, to) } {
                return Err(abandon(stream, (src, dst), error, leak_upload));
            }
        }
        let (event, ends) = record(stream, (src, dst), leak_upload)?;
        Ok(Self { event, ends: Some(ends) })
    }
}

impl<S: StableBytes> Upload<Vec<S>> {
    /// Enqueues the copies of `pieces` to `dst`, one after the other from its start on.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `dst` ends before the last piece does.
    pub fn start_pieces(stream: &dyn Stream, pieces: Vec<S>, mut dst: Region) -> Result<Self, DeviceError> {
        let mut at = 0;
        for index in 0..pieces.len() {
            let (start, end) = (at, at + pieces[index].len());
            let (from, to) = (Bytes::from_host(&pieces[index]), dst.bytes_mut().slice(start, end));
            // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
            if let Err(error) = unsafe { stream.copy(from, to) } {
                return Err(abandon(stream, (pieces, dst), error, leak_upload));
            }
            at = end;
        }
        let (event, ends) = record(stream, (pieces, dst), leak_upload)?;
        Ok(Self { event, ends: Some(ends) })
    }
}

impl<S> Upload<S> {
    /// What fires when the copy is done.
    pub fn event(&self) -> &Arc<dyn Event> {
        &self.event
    }

    /// Orders `compute` after the copy and gives the device memory; the source stays held in [`UploadSource`].
    ///
    /// # Errors
    /// The driver refused.
    pub fn ready_on(mut self, compute: &dyn Stream) -> Result<(Region, UploadSource<S>), DeviceError> {
        compute.wait(&*self.event)?;
        let (src, dst) = self.ends.take().expect("ends are taken once");
        Ok((dst, UploadSource { event: Arc::clone(&self.event), src: Some(src) }))
    }
}

/// The source of an upload whose destination is already handed out.
#[derive(Debug)]
pub struct UploadSource<S> {
    event: Arc<dyn Event>,
    src: Option<S>,
}

impl<S> UploadSource<S> {
    /// Whether the copy is done, so that [`release`](Self::release) would not block.
    pub fn is_done(&self) -> bool {
        self.event.is_done()
    }

    /// Waits for the copy and gives the source back.
    ///
    /// # Errors
    /// The copy failed.
    pub fn release(mut self) -> Result<S, DeviceError> {
        self.event.synchronize()?;
        Ok(self.src.take().expect("the source is taken once"))
    }
}

impl<D: StableBytes + DerefMut> Download<D> {
    /// Enqueues the copy of the first `dst.len()` bytes of `src` on `stream`, after what `producer` has enqueued so far.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `src` is smaller than `dst`.
    pub fn start(
        stream: &dyn Stream,
        producer: &dyn Stream,
        src: Region,
        dst: D,
    ) -> Result<Self, DeviceError> {
        Self::start_at(stream, producer, src, 0, dst)
    }

    /// As [`start`](Self::start), of the bytes of `src` from `at` on.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `src` ends before `dst` does.
    pub fn start_at(
        stream: &dyn Stream,
        producer: &dyn Stream,
        src: Region,
        at: usize,
        mut dst: D,
    ) -> Result<Self, DeviceError> {
        stream.wait(&*producer.record()?)?;
        let len = dst.len();
        // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
        unsafe { stream.copy(src.bytes().slice(at, at + len), BytesMut::from_host(&mut dst))? };
        let (event, ends) = record(stream, (src, dst), leak_download)?;
        Ok(Self { event, ends: Some(ends) })
    }

    /// As [`start`](Self::start), of the bytes in `parts`, which lie at the same places of both ends.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If a part ends after either end does.
    pub fn start_parts(
        stream: &dyn Stream,
        producer: &dyn Stream,
        src: Region,
        mut dst: D,
        parts: &[Range<usize>],
    ) -> Result<Self, DeviceError> {
        stream.wait(&*producer.record()?)?;
        for &Range { start, end } in parts {
            let (from, to) = (src.bytes().slice(start, end), BytesMut::from_host(&mut dst).slice(start, end));
            // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
            if let Err(error) = unsafe { stream.copy(from, to) } {
                return Err(abandon(stream, (src, dst), error, leak_download));
            }
        }
        let (event, ends) = record(stream, (src, dst), leak_download)?;
        Ok(Self { event, ends: Some(ends) })
    }
}

impl<D: StableBytes + DerefMut> Download<Vec<D>> {
    /// Enqueues the copies of the bytes of `src` from its start on to `pieces`, one after the other, after what `producer` has enqueued
    /// so far.
    ///
    /// # Errors
    /// The driver refused.
    ///
    /// # Panics
    /// If `src` ends before the last piece does.
    pub fn start_pieces(
        stream: &dyn Stream,
        producer: &dyn Stream,
        src: Region,
        mut pieces: Vec<D>,
    ) -> Result<Self, DeviceError> {
        stream.wait(&*producer.record()?)?;
        let mut at = 0;
        for index in 0..pieces.len() {
            let (start, end) = (at, at + pieces[index].len());
            let (from, to) = (src.bytes().slice(start, end), BytesMut::from_host(&mut pieces[index]));
            // SAFETY: both ends are owned by the returned value (or leaked by its drop) until the event has fired.
            if let Err(error) = unsafe { stream.copy(from, to) } {
                return Err(abandon(stream, (src, pieces), error, leak_download));
            }
            at = end;
        }
        let (event, ends) = record(stream, (src, pieces), leak_download)?;
        Ok(Self { event, ends: Some(ends) })
    }
}

impl<D> Download<D> {
    /// What fires when the copy is done.
    pub fn event(&self) -> &Arc<dyn Event> {
        &self.event
    }

    /// The device memory that comes down; kernels may go on reading it.
    pub fn source(&self) -> &Region {
        &self.ends.as_ref().expect("ends are taken once, by `wait`").0
    }

    /// Whether the copy is done, so that [`wait`](Self::wait) would not block.
    pub fn is_done(&self) -> bool {
        self.event.is_done()
    }

    /// Waits for the copy and gives both ends back.
    ///
    /// # Errors
    /// The copy failed.
    pub fn wait(mut self) -> Result<(Region, D), DeviceError> {
        self.event.synchronize()?;
        Ok(self.ends.take().expect("ends are taken once"))
    }
}

/// Leaks what a copy that failed, and of which nobody can tell whether it is done, may still touch.
type Leak<T> = fn(T, &DeviceError);

fn leak_upload<S>((src, dst): (S, Region), error: &DeviceError) {
    std::mem::forget(dst);
    leak_source(src, error);
}

fn leak_source<S>(src: S, error: &DeviceError) {
    if !matches!(error, DeviceError::Lost { .. }) {
        std::mem::forget(src);
    }
}

fn leak_download<D>(ends: (Region, D), _: &DeviceError) {
    std::mem::forget(ends);
}

/// Records the event of a copy between `ends`. Without one the copy is waited for at once.
fn record<T>(stream: &dyn Stream, ends: T, leak: Leak<T>) -> Result<(Arc<dyn Event>, T), DeviceError> {
    match stream.record() {
        Ok(event) => Ok((event, ends)),
        Err(error) => Err(abandon(stream, ends, error, leak)),
    }
}

/// Gives `error`, of a copy between `ends` that was refused after others were enqueued, or has no event. What is enqueued is waited
/// for; what cannot be waited for is leaked.
fn abandon<T>(stream: &dyn Stream, ends: T, error: DeviceError, leak: Leak<T>) -> DeviceError {
    if let Err(error) = stream.synchronize() {
        leak(ends, &error);
    }
    error
}

/// Waits for the event before the memory is freed; if even that fails, the memory is leaked rather than reused.
fn settle<T>(event: &dyn Event, held: &mut Option<T>, leak: Leak<T>) {
    if let Some(held) = held.take()
        && let Err(error) = event.synchronize()
    {
        leak(held, &error);
    }
}

impl<S> Drop for Upload<S> {
    fn drop(&mut self) {
        settle(&*self.event, &mut self.ends, leak_upload);
    }
}

impl<S> Drop for UploadSource<S> {
    fn drop(&mut self) {
        settle(&*self.event, &mut self.src, leak_source);
    }
}

impl<D> Drop for Download<D> {
    fn drop(&mut self) {
        settle(&*self.event, &mut self.ends, leak_download);
    }
}
