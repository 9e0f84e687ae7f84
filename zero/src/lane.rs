//! The way between host leases and kernels.
//!
//! On a unified device kernels read and write host memory where it is; otherwise signals cross by copy. Callers see
//! the same [`Loaded`] and [`Target`] either way.

use crate::copies::{Cargo, Copies, Link};
use crate::{Backend, HostTensor, OutputSpec, Result};
use std::ops::{DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use terrace_device::{
    Arena, Bytes, BytesMut, Download, Event, Region, StableBytes, Stream, StreamKind, Upload, UploadSource,
};
use terrace_kernels::{DType, Tensor, View, ViewMut};
use terrace_tiers::Lease;

/// Streams and memory of the device.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) unified: bool,
    /// Signals stay on the device from one block to the next.
    pub(crate) signals_stay: bool,
    pub(crate) compute: Arc<dyn Stream>,
    /// Weights, into memory that events guard.
    pub(crate) up: Arc<dyn Stream>,
    /// All else that goes up, see [`Lane::upload`].
    side: Arc<dyn Stream>,
    /// Keys and values, and what blocks keep, into memory that nothing else uses.
    keys: Arc<dyn Stream>,
    down: Arc<dyn Stream>,
    pub(crate) arena: Arena,
    /// Hears of copies, if somebody wants to see them.
    copies: Option<Copies>,
    /// Bytes of the copies that were started, up and down, since they were last asked for.
    moved: [AtomicU64; 2],
}

/// A signal between two blocks.
#[derive(Debug)]
pub(crate) enum Signal {
    /// In host memory.
    Host(Lease),
    /// On the device, and on its way to host memory.
    Both(Download<Lease>),
    /// On the device.
    Device(Region),
}

/// A signal that kernels can read.
#[derive(Debug)]
pub(crate) struct Loaded {
    memory: LoadedMemory,
    spec: OutputSpec,
}

#[derive(Debug)]
enum LoadedMemory {
    Signal(Signal),
    Uploaded(Region, UploadSource<Lease>),
}

/// A signal that kernels can write.
#[derive(Debug)]
pub(crate) struct Target {
    lease: Lease,
    region: Option<Region>,
    spec: OutputSpec,
}

impl Lane {
    pub(crate) fn new(
        backend: &Backend,
        arena_bytes: usize,
        signals_stay: bool,
        copies: Option<Copies>,
    ) -> Result<Self> {
        let device = &backend.device;
        Ok(Self {
            unified: device.unified(),
            signals_stay,
            compute: device.stream(StreamKind::Compute)?,
            up: device.stream(StreamKind::Upload)?,
            side: device.stream(StreamKind::Upload)?,
            keys: device.stream(StreamKind::Upload)?,
            down: device.stream(StreamKind::Download)?,
            arena: device.arena(arena_bytes)?,
            copies,
            moved: Default::default(),
        })
    }

    /// What is copied next belongs to `block`.
    pub(crate) fn at(&self, block: usize) {
        self.copies.iter().for_each(|copies| copies.at(block));
    }

    /// Waits until a timeline has every copy that is done.
    pub(crate) fn settle(&self) {
        self.copies.iter().for_each(Copies::settle);
    }

    /// Takes note of a copy of `bytes` that was just started.
    pub(crate) fn started(&self, link: Link, cargo: Cargo, bytes: usize, event: &Arc<dyn Event>) {
        self.moved[usize::from(link == Link::Down)].fetch_add(bytes as u64, Relaxed);
        self.copies.iter().for_each(|copies| copies.started(link, cargo, event));
    }

    /// Takes note of kernels that were just enqueued, the first at `began`.
    pub(crate) fn computed(&self, began: Instant, name: impl FnOnce() -> String) -> Result {
        if let Some(copies) = &self.copies {
            copies.computed(name(), began, self.compute.record()?);
        }
        Ok(())
    }

    /// Bytes that were sent up and down since the last call; none to a device without memory of its own.
    pub(crate) fn take_moved(&self) -> [u64; 2] {
        let moved = self.moved.each_ref().map(|bytes| bytes.swap(0, Relaxed));
        if self.unified { [0, 0] } else { moved }
    }

    /// Starts a copy into memory of the arena.
    ///
    /// Hazard (upload over memory in use): the arena's memory may have been given back while kernels that were enqueued
    /// before still read it. Compute waits for compute anyway; an upload must be told to.
    pub(crate) fn upload<S: StableBytes>(
        &self,
        cargo: Cargo,
        src: S,
        region: Region,
    ) -> Result<(Region, UploadSource<S>)> {
        self.upload_at(cargo, src, region, 0)
    }

    /// As [`upload`](Self::upload), to the bytes from `at` on.
    pub(crate) fn upload_at<S: StableBytes>(
        &self,
        cargo: Cargo,
        src: S,
        region: Region,
        at: usize,
    ) -> Result<(Region, UploadSource<S>)> {
        self.side.wait(&*self.compute.record()?)?;
        let bytes = src.len();
        let upload = Upload::start_at(&*self.side, src, region, at)?;
        self.started(Link::Side, cargo, bytes, upload.event());
        Ok(upload.ready_on(&*self.compute)?)
    }

    /// Starts a copy out of memory that compute writes.
    pub(crate) fn download<D: StableBytes + DerefMut>(
        &self,
        cargo: Cargo,
        region: Region,
        dst: D,
    ) -> Result<Download<D>> {
        self.download_at(cargo, region, 0, dst)
    }

    /// As [`download`](Self::download), of the bytes from `at` on.
    pub(crate) fn download_at<D: StableBytes + DerefMut>(
        &self,
        cargo: Cargo,
        region: Region,
        at: usize,
        dst: D,
    ) -> Result<Download<D>> {
        let bytes = dst.len();
        let download = Download::start_at(&*self.down, &*self.compute, region, at, dst)?;
        self.started(Link::Down, cargo, bytes, download.event());
        Ok(download)
    }

    /// Orders copies of keys and values, and of what blocks keep, after kernels that were enqueued before, which may have used their memory
    /// when it was not theirs.
    pub(crate) fn begin_keys(&self) -> Result {
        Ok(self.keys.wait(&*self.compute.record()?)?)
    }

    /// Starts copying parts of a block's keys and values to a window that no kernel uses, beside what kernels do elsewhere.
    pub(crate) fn send_keys(
        &self,
        block: usize,
        src: Lease,
        window: Region,
        parts: &[Range<usize>],
    ) -> Result<Upload<Lease>> {
        let upload = Upload::start_parts(&*self.keys, src, window, parts)?;
        self.started(Link::Keys, Cargo::Keys(block), parts.iter().map(Range::len).sum(), upload.event());
        Ok(upload)
    }

    /// Starts copying parts of a window that kernels write to their place in host memory.
    pub(crate) fn take_keys(
        &self,
        block: usize,
        window: Region,
        dst: Lease,
        parts: &[Range<usize>],
    ) -> Result<Download<Lease>> {
        let download = Download::start_parts(&*self.down, &*self.compute, window, dst, parts)?;
        self.started(Link::Down, Cargo::Keys(block), parts.iter().map(Range::len).sum(), download.event());
        Ok(download)
    }

    /// Starts copying memory that compute writes to its pieces in host memory.
    pub(crate) fn download_pieces(
        &self,
        cargo: Cargo,
        region: Region,
        pieces: Vec<Lease>,
    ) -> Result<Download<Vec<Lease>>> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        let download = Download::start_pieces(&*self.down, &*self.compute, region, pieces)?;
        self.started(Link::Down, cargo, bytes, download.event());
        Ok(download)
    }

    /// Starts copying it back, into memory that no kernel uses that was enqueued since [`begin_keys`](Self::begin_keys), beside what kernels
    /// do elsewhere.
    pub(crate) fn send_kept(
        &self,
        block: usize,
        pieces: Vec<Lease>,
        region: Region,
    ) -> Result<Upload<Vec<Lease>>> {
        let bytes = pieces.iter().map(|piece| piece.len()).sum();
        let upload = Upload::start_pieces(&*self.keys, pieces, region)?;
        self.started(Link::Keys, Cargo::Kept(block), bytes, upload.event());
        Ok(upload)
    }

    /// Makes a signal readable by kernels.
    pub(crate) fn load(&self, signal: Signal, spec: OutputSpec) -> Result<Loaded> {
        let memory = match signal {
            Signal::Host(lease) if !self.unified => {
                let region = self.arena.alloc(lease.len())?;
                let (region, source) = self.upload(Cargo::Signal, lease, region)?;
                LoadedMemory::Uploaded(region, source)
            }
            signal => LoadedMemory::Signal(signal),
        };
        Ok(Loaded { memory, spec })
    }

    /// Prepares a signal that kernels write.
    pub(crate) fn target(&self, lease: Lease, spec: OutputSpec) -> Result<Target> {
        let region = if self.unified { None } else { Some(self.arena.alloc(lease.len())?) };
        Ok(Target { lease, region, spec })
    }

    /// Hands a written signal to its next and only use.
    pub(crate) fn pass(&self, target: Target) -> Result<Signal> {
        match target.region {
            Some(region) if self.signals_stay => Ok(Signal::Device(region)),
            region => self.bring_down(target.lease, region),
        }
    }

    /// Hands a written signal to a use much later, until which it is in host memory.
    pub(crate) fn pass_down(&self, target: Target) -> Result<Signal> {
        self.bring_down(target.lease, target.region)
    }

    /// Hands a written signal to its next use, and host memory a copy for a later one.
    pub(crate) fn pass_and_keep(&self, target: Target) -> Result<Signal> {
        match target.region {
            Some(region) if self.signals_stay => {
                Ok(Signal::Both(self.download(Cargo::Signal, region, target.lease)?))
            }
            region => self.bring_down(target.lease, region),
        }
    }

    fn bring_down(&self, lease: Lease, region: Option<Region>) -> Result<Signal> {
        Ok(Signal::Host(match region {
            None => lease,
            Some(region) => self.download(Cargo::Signal, region, lease)?.wait()?.1,
        }))
    }

    /// Copies small host tensors to the device, and waits for all of them at once.
    pub(crate) fn tensors<'t>(&self, hosts: impl IntoIterator<Item = &'t HostTensor>) -> Result<Vec<Tensor>> {
        let started = hosts.into_iter().map(|host| {
            let region = self.arena.alloc(host.bytes.len())?;
            let (region, source) = self.upload(Cargo::Small, host.bytes.clone(), region)?;
            Ok((Tensor::from_region(region, host.dtype, &host.dims), source))
        });
        let started = started.collect::<Result<Vec<_>>>()?;
        let arrived = started.into_iter().map(|(tensor, source)| source.release().map(|_| tensor));
        Ok(arrived.collect::<std::result::Result<_, _>>()?)
    }

    /// Copies a small host tensor to the device.
    pub(crate) fn tensor(&self, host: &HostTensor) -> Result<Tensor> {
        Ok(self.tensors([host])?.remove(0))
    }

    /// Copies a small device tensor to the host.
    pub(crate) fn read(&self, tensor: Tensor) -> Result<Vec<u8>> {
        let bytes = vec![0; tensor.shape().elements() * tensor.dtype().size()];
        Ok(self.download(Cargo::Small, tensor.into_region(), bytes)?.wait()?.1)
    }
}

impl Signal {
    /// The copy in host memory.
    ///
    /// # Panics
    /// If there is none and will be none.
    pub(crate) fn into_host(self) -> Result<Lease> {
        match self {
            Self::Host(lease) => Ok(lease),
            Self::Both(download) => Ok(download.wait()?.1),
            Self::Device(_) => unreachable!("a signal that was passed on without a copy is used once"),
        }
    }
}

impl Loaded {
    pub(crate) fn view(&self) -> View<'_> {
        let bytes = match &self.memory {
            LoadedMemory::Signal(Signal::Host(lease)) => Bytes::from_host(lease),
            LoadedMemory::Signal(Signal::Both(download)) => download.source().bytes(),
            LoadedMemory::Signal(Signal::Device(region)) | LoadedMemory::Uploaded(region, _) => {
                region.bytes()
            }
        };
        View::new(bytes, self.spec.dtype, &self.spec.dims)
    }

    /// The copy in host memory, when kernels have been given all that reads the one on the device.
    pub(crate) fn into_host(self) -> Result<Lease> {
        match self.memory {
            LoadedMemory::Signal(signal) => signal.into_host(),
            LoadedMemory::Uploaded(_, source) => Ok(source.release()?),
        }
    }
}

impl Target {
    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        let bytes = match &mut self.region {
            Some(region) => region.bytes_mut(),
            None => BytesMut::from_host(&mut self.lease),
        };
        ViewMut::new(bytes, self.spec.dtype, &self.spec.dims)
    }
}

/// A flat view of host bytes.
pub(crate) fn flat(bytes: &[u8], dtype: DType) -> View<'_> {
    View::new(Bytes::from_host(bytes), dtype, &[bytes.len() / dtype.size()])
}

/// A flat mutable view of host bytes.
pub(crate) fn flat_mut(bytes: &mut [u8], dtype: DType) -> ViewMut<'_> {
    let len = bytes.len() / dtype.size();
    ViewMut::new(BytesMut::from_host(bytes), dtype, &[len])
}
