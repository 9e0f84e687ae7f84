//! The measurements on a card: its link in each direction and both at once, its memory, its matrix products.

use super::measure::{
    Layer, MeasureError, best_queued, gemm, gemm_arena_bytes, quantized, rate, training_on_card,
};
use super::profile::{Card, Gemm};
use std::time::Instant;
use terrace_device::{Arena, Device, Download, Region, Stream, StreamKind, Upload};
use terrace_kernels::{DType, KernelSet, QuantFormat, Tensor};
use terrace_tiers::{Lease, Pool};
use terrace_zero::Backend;

/// How much.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Of each figure.
    pub seconds: f64,
    /// Of each copy.
    pub copy_bytes: usize,
    /// Whose products are measured, if a smaller layer's show that they do not take long.
    pub layer: Layer,
    /// Shapes of product for each type of operand.
    pub shapes: usize,
}

impl Effort {
    /// For a calibration.
    pub const FULL: Self = Self {
        seconds: 0.6,
        copy_bytes: 256 << 20,
        layer: Layer { tokens: 4096, hidden: 4096, intermediate: 14_336 },
        shapes: usize::MAX,
    };
    /// For a quick one.
    pub const QUICK: Self = Self {
        seconds: 0.1,
        copy_bytes: 64 << 20,
        layer: Layer { tokens: 2048, hidden: 2048, intermediate: 5632 },
        shapes: usize::MAX,
    };
    /// For the start of a run: one shape.
    pub const START: Self = Self { seconds: 0.04, copy_bytes: 16 << 20, shapes: 1, ..Self::QUICK };
}

/// The layer whose training is measured.
const TRAINED: Layer = Layer { tokens: 4096, hidden: 2048, intermediate: 5632 };
/// Operations per second of its products below which it is not: an emulated card would need minutes.
const TRAINED_MIN: f64 = 1e12;

/// The layer that is tried first.
const FIRST: Layer = Layer { tokens: 128, hidden: 256, intermediate: 704 };
/// One product of the layer that is measured may take this long.
const PRODUCT_SECONDS_MAX: f64 = 1.0;

/// Copies in flight in each direction.
const WINDOW: usize = 2;

/// Measures `device`, which is not unified, with its kernels on operands of these types, and on weights in these formats.
///
/// # Errors
/// The card has too little memory, or the driver failed.
pub fn measure(
    device: &dyn Device,
    kernels: &KernelSet,
    memory_bytes: u64,
    dtypes: &[DType],
    formats: &[QuantFormat],
    effort: Effort,
) -> Result<Card, MeasureError> {
    let Effort { seconds, copy_bytes, layer, shapes } = effort;
    let gemm_bytes = gemm_arena_bytes(layer).max(gemm_arena_bytes(FIRST));
    let arena_bytes = gemm_bytes.max(2 * WINDOW * copy_bytes + (1 << 20));
    let arena = device.arena(arena_bytes)?;
    let compute = device.stream(StreamKind::Compute)?;
    let link = Link::new(device, &arena, copy_bytes)?;
    let upload = link.rate(seconds, true, false)?;
    let download = link.rate(seconds, false, true)?;
    let both = link.rate(seconds, true, true)?;
    drop(link);
    // As much as there is room for: a card's cache holds 50 to 130 MB.
    let device_memory = device_memory(device, &arena, &*compute, kernels, arena_bytes / 8, seconds)?;
    let mut products = Vec::new();
    let operations = 2.0 * layer.tokens as f64 * layer.hidden as f64 * layer.intermediate as f64;
    let is_slow = |gemm: &Gemm| operations / gemm.operations_per_second > PRODUCT_SECONDS_MAX;
    let seconds = seconds / 3.0;
    for dtype in dtypes {
        let first = gemm(device, &*compute, &arena, kernels, *dtype, FIRST, 0.0, 1)?;
        let layer = if first.iter().any(is_slow) { FIRST } else { layer };
        products.extend(gemm(device, &*compute, &arena, kernels, *dtype, layer, seconds, shapes)?);
    }
    for format in formats {
        let first = quantized(device, &*compute, &arena, kernels, *format, FIRST, 0.0)?;
        let layer = if first.iter().all(is_slow) { FIRST } else { layer };
        products.extend(quantized(device, &*compute, &arena, kernels, *format, layer, seconds)?);
    }
    Ok(Card {
        name: device.name().to_owned(),
        memory_bytes,
        upload_bytes_per_second: upload,
        download_bytes_per_second: download,
        both_bytes_per_second: both,
        device_memory_bytes_per_second: device_memory,
        gemm: products,
        training: Vec::new(),
    })
}

/// Adds what training a layer takes on the card of `backend`, which `card` has the other figures of: for those types of operands whose products
/// are fast enough. Says of which it could not be measured, and why: a card that has not the memory goes without.
pub fn measure_training(card: &mut Card, backend: &Backend, seconds: f64) -> Vec<String> {
    let mut notes = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let of_type = card.gemm.iter().filter(|gemm| gemm.dtype == dtype.to_string());
        let products = of_type.map(|gemm| gemm.operations_per_second).fold(0.0, f64::max);
        if products < TRAINED_MIN {
            continue;
        }
        let memory = card.device_memory_bytes_per_second;
        match training_on_card(backend, dtype, TRAINED, memory, seconds) {
            Ok(found) => card.training.push(found),
            Err(why) => notes.push(format!("training in {dtype} is not measured: {why}")),
        }
    }
    notes
}

struct Link<'a> {
    arena: &'a Arena,
    pool: Pool,
    bytes: usize,
    streams: [std::sync::Arc<dyn Stream>; 3],
}

impl<'a> Link<'a> {
    fn new(device: &dyn Device, arena: &'a Arena, bytes: usize) -> Result<Self, MeasureError> {
        let pool = Pool::new("link", 2 * WINDOW, bytes)?.pinned_for(device);
        let kinds = [StreamKind::Upload, StreamKind::Download, StreamKind::Compute];
        let [up, down, compute] = kinds.map(|kind| device.stream(kind));
        Ok(Self { arena, pool, bytes, streams: [up?, down?, compute?] })
    }

    fn lease(&self) -> Lease {
        self.pool.acquire(self.bytes)
    }

    fn region(&self) -> Result<Region, MeasureError> {
        Ok(self.arena.alloc(self.bytes)?)
    }

    /// Bytes per second of the directions that are asked for, in the sum.
    fn rate(&self, seconds: f64, up: bool, down: bool) -> Result<f64, MeasureError> {
        // Pages are touched before the clock starts.
        let mut leases: Vec<Lease> = (0..2 * WINDOW).map(|_| self.lease()).collect();
        leases.iter_mut().for_each(|lease| lease.fill(1));
        drop(leases);
        let began = Instant::now();
        let mut moved = 0_usize;
        while moved == 0 || began.elapsed().as_secs_f64() < seconds {
            let (mut uploads, mut downloads) = (Vec::new(), Vec::new());
            for _ in 0..WINDOW {
                if up {
                    uploads.push(Upload::start(&*self.streams[0], self.lease(), self.region()?)?);
                }
                if down {
                    let (from, to) = (self.region()?, self.lease());
                    downloads.push(Download::start(&*self.streams[1], &*self.streams[2], from, to)?);
                }
            }
            moved += (uploads.len() + downloads.len()) * self.bytes;
            for upload in uploads {
                upload.ready_on(&*self.streams[2])?.1.release()?;
            }
            downloads.into_iter().try_for_each(|download| download.wait().map(drop))?;
        }
        Ok(rate(moved as f64, began.elapsed().as_secs_f64()))
    }
}

/// Bytes read and written per second by the simplest of kernels, on so many elements of six bytes.
fn device_memory(
    device: &dyn Device,
    arena: &Arena,
    compute: &dyn Stream,
    kernels: &KernelSet,
    elements: usize,
    seconds: f64,
) -> Result<f64, MeasureError> {
    let mut from = Tensor::new(arena, DType::F32, &[elements])?;
    let mut to = Tensor::new(arena, DType::BF16, &[elements])?;
    kernels.elementwise.zero(from.view_mut())?;
    let timed = best_queued(device, compute, seconds, || {
        Ok(kernels.elementwise.cast(from.view(), to.view_mut())?)
    })?;
    Ok(rate((elements * 6) as f64, timed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_device::host::HostDevice;
    use terrace_kernels::cpu;

    #[test]
    fn the_cpu_plays_a_card() {
        let layer = Layer { tokens: 8, hidden: 16, intermediate: 24 };
        let effort = Effort { seconds: 0.001, copy_bytes: 1 << 16, layer, shapes: usize::MAX };
        let types = [DType::BF16, DType::F16, DType::F32];
        let formats = [QuantFormat::Int8, QuantFormat::Int4];
        let (device, kernels) = (HostDevice::discrete(), cpu::kernel_set(1));
        let card = measure(&device, &kernels, 1 << 30, &types, &formats, effort).unwrap();
        assert!(card.upload_bytes_per_second > 1.0 && card.both_bytes_per_second > 1.0, "{card:?}");
        assert_eq!(card.gemm.len(), 19);
    }
}
