//! The way between host leases and kernels.
//!
//! On a unified device kernels read and write host memory where it is; otherwise signals cross by copy. Callers see
//! the same [`Loaded`] and [`Target`] either way.

use crate::{Backend, HostTensor, OutputSpec, Result};
use std::sync::Arc;
use terrace_device::{Arena, Bytes, BytesMut, Download, Region, Stream, StreamKind, Upload};
use terrace_kernels::{DType, Tensor, View, ViewMut};
use terrace_tiers::Lease;

/// Streams and memory of the device.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) unified: bool,
    pub(crate) compute: Arc<dyn Stream>,
    pub(crate) up: Arc<dyn Stream>,
    pub(crate) down: Arc<dyn Stream>,
    pub(crate) arena: Arena,
}

/// A signal that kernels can read.
#[derive(Debug)]
pub(crate) struct Loaded {
    lease: Lease,
    region: Option<Region>,
    spec: OutputSpec,
}

/// A signal that kernels can write.
#[derive(Debug)]
pub(crate) struct Target {
    lease: Lease,
    region: Option<Region>,
    spec: OutputSpec,
}

impl Lane {
    pub(crate) fn new(backend: &Backend, arena_bytes: usize) -> Result<Self> {
        let device = &backend.device;
        Ok(Self {
            unified: device.unified(),
            compute: device.stream(StreamKind::Compute)?,
            up: device.stream(StreamKind::Upload)?,
            down: device.stream(StreamKind::Download)?,
            arena: device.arena(arena_bytes)?,
        })
    }

    /// Makes a signal readable by kernels.
    pub(crate) fn load(&self, lease: Lease, spec: OutputSpec) -> Result<Loaded> {
        if self.unified {
            return Ok(Loaded { lease, region: None, spec });
        }
        let region = self.arena.alloc(lease.len())?;
        let (region, source) = Upload::start(&*self.up, lease, region)?.ready_on(&*self.compute)?;
        Ok(Loaded { lease: source.release()?, region: Some(region), spec })
    }

    /// Prepares a signal that kernels write.
    pub(crate) fn target(&self, lease: Lease, spec: OutputSpec) -> Result<Target> {
        let region = if self.unified { None } else { Some(self.arena.alloc(lease.len())?) };
        Ok(Target { lease, region, spec })
    }

    /// Brings a written signal back to its lease.
    pub(crate) fn store(&self, target: Target) -> Result<Lease> {
        match target.region {
            None => Ok(target.lease),
            Some(region) => Ok(Download::start(&*self.down, &*self.compute, region, target.lease)?.wait()?.1),
        }
    }

    /// Copies a small host tensor to the device.
    pub(crate) fn tensor(&self, host: &HostTensor) -> Result<Tensor> {
        let region = self.arena.alloc(host.bytes.len())?;
        let upload = Upload::start(&*self.up, host.bytes.clone(), region)?;
        let (region, source) = upload.ready_on(&*self.compute)?;
        source.release()?;
        Ok(Tensor::from_region(region, host.dtype, &host.dims))
    }

    /// Copies a small device tensor to the host.
    pub(crate) fn read(&self, tensor: Tensor) -> Result<Vec<u8>> {
        let bytes = vec![0; tensor.shape().elements() * tensor.dtype().size()];
        Ok(Download::start(&*self.down, &*self.compute, tensor.into_region(), bytes)?.wait()?.1)
    }
}

impl Loaded {
    pub(crate) fn view(&self) -> View<'_> {
        let bytes = self.region.as_ref().map_or_else(|| Bytes::from_host(&self.lease), Region::bytes);
        View::new(bytes, self.spec.dtype, &self.spec.dims)
    }

    pub(crate) fn into_lease(self) -> Lease {
        self.lease
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
