//! The card that tests of the engine run on if the variable `TERRACE_TEST_DEVICE` names one, as `cuda:0`.

use std::sync::{Arc, OnceLock};
use terrace_aio::IoEngine;
use terrace_device::cuda::CudaDevice;
use terrace_kernels::update::UpdateKernels;
use terrace_kernels::{KernelSet, cuda};
use terrace_zero::Backend;

const VARIABLE: &str = "TERRACE_TEST_DEVICE";

static CARD: OnceLock<Option<Card>> = OnceLock::new();

#[derive(Clone)]
struct Card {
    device: Arc<CudaDevice>,
    kernels: KernelSet,
    updates: UpdateKernels,
}

/// Whether the variable names one.
pub fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The card as a backend.
///
/// # Panics
/// If it cannot be used.
pub fn backend(io: &Arc<dyn IoEngine>) -> Option<Backend> {
    let Card { device, kernels, updates } = CARD.get_or_init(open).clone()?;
    let kernel_scratch_bytes = (cuda::SCRATCH_BYTES + cuda::UPDATE_SCRATCH_BYTES) as u64;
    Some(Backend { device, kernels, updates: Some(updates), kernel_scratch_bytes, io: Arc::clone(io) })
}

fn open() -> Option<Card> {
    let name = std::env::var(VARIABLE).ok()?;
    let ordinal = name.strip_prefix("cuda:").and_then(|number| number.parse().ok());
    let device = CudaDevice::open(ordinal.expect("a device like cuda:0")).unwrap_or_else(|e| panic!("{e}"));
    let kernels = cuda::kernel_set(&device, device.compute_stream()).unwrap_or_else(|e| panic!("{e}"));
    let updates = cuda::update_kernels(&device, device.compute_stream()).unwrap_or_else(|e| panic!("{e}"));
    Some(Card { device, kernels, updates })
}
