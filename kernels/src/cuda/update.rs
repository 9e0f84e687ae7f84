//! Operations on training state. They need no more than their own two sources, and may have a stream of their own.

use super::launch::{Arguments, OnCard};
use super::sources::UPDATE_SOURCES;
use super::{THREADS, blocks, failed};
use crate::update::{Adam, AdamFormat, AdamState, AdamStep, NORM_BLOCK, SumOfSquares, UpdateKernels};
use crate::{DType, Result, View, ViewMut, check};
use std::sync::{Arc, Mutex, PoisonError};
use terrace_device::cuda::{CudaDevice, CudaStream};
use terrace_device::{Device, DeviceError, Region};

/// Device memory that [`update_kernels`] keep: sums of blocks of a gradient until they are added in order. Longer gradients
/// are taken in stretches.
pub const UPDATE_SCRATCH_BYTES: usize = 1 << 20;

/// Parameters that a thread has at once.
const FOUR: usize = 4;

/// Threads for the norm of a block.
const LANES: usize = 8;

/// The operations on training state, on `stream`.
///
/// # Errors
/// There is no compiler, a kernel does not compile or load, or the device has not [`UPDATE_SCRATCH_BYTES`] left.
pub fn update_kernels(
    device: &Arc<CudaDevice>,
    stream: &Arc<CudaStream>,
) -> Result<UpdateKernels, DeviceError> {
    let card = OnCard::new(device, stream, &UPDATE_SOURCES)?;
    let scratch = device.arena(UPDATE_SCRATCH_BYTES)?.alloc(UPDATE_SCRATCH_BYTES)?;
    let cuda = Arc::new(Update { card, scratch, sums: Mutex::default() });
    Ok(UpdateKernels { adam: cuda.clone(), sum_of_squares: cuda })
}

#[derive(Debug)]
struct Update {
    card: OnCard,
    /// Sums of blocks. One stream uses it, so that uses of it have an order.
    scratch: Region,
    /// Held from the launch that writes sums to the one that adds them.
    sums: Mutex<()>,
}

impl Update {
    fn launch(
        &self,
        op: &'static str,
        kernel: &'static str,
        threads_wanted: usize,
        arguments: &mut Arguments,
    ) -> Result {
        let grid = [blocks(&self.card, threads_wanted.div_ceil(THREADS as usize)), 1, 1];
        // SAFETY: the arguments are the kernel's parameters, from views whose memory the caller of the operation keeps
        // valid and ordered by the stream.
        let launched = unsafe { self.card.launch(kernel, grid, THREADS, 0, arguments) };
        launched.map_err(|error| failed(op, &error))
    }

    fn arguments(&self) -> Arguments {
        Arguments::new(self.card.space())
    }
}

impl Adam for Update {
    fn update(&self, step: &AdamStep, gradient: View<'_>, state: AdamState<'_>) -> Result {
        let params = state.check(gradient);
        if params == 0 {
            return Ok(());
        }
        let AdamState { format, weight, rest, m, v } = state;
        let kernel = match format {
            AdamFormat::Fp32 => "adam_fp32",
            AdamFormat::Split => "adam_split",
            AdamFormat::Bf16 => "adam_bf16",
            AdamFormat::Compact => "adam_compact",
        };
        let arguments = self.arguments().read(gradient);
        let arguments =
            if format == AdamFormat::Fp32 { arguments.write(&weight) } else { arguments.only(weight.view()) };
        let rest = rest.as_ref().map_or(weight.view().bytes(), |rest| rest.as_bytes());
        let arguments = arguments.bytes(rest).bytes(m.as_bytes()).bytes(v.as_bytes()).long(params);
        self.launch("adam", kernel, params.div_ceil(FOUR), &mut with_step(arguments, step))
    }
}

/// The scalars in the order of `STEP_PARAMETERS` in `adam.cu`.
fn with_step(arguments: Arguments, step: &AdamStep) -> Arguments {
    let arguments = arguments.float(step.grad_scale).float(step.decay);
    let arguments = arguments.flag(step.decoupled).flag(step.lerp_from_gradient);
    let floats =
        [step.lerp, step.beta2, step.beta2_rest, step.bias2_sqrt_inverse, step.eps, step.step_size_negative];
    floats.into_iter().fold(arguments, Arguments::float).int(step.seed.cast_signed())
}

impl SumOfSquares for Update {
    fn add(&self, gradient: View<'_>, total: ViewMut<'_>) -> Result {
        const OP: &str = "sum_of_squares";
        let values = check::sum_of_squares(gradient, &total);
        let gradient = gradient.reshape(&[values, 1]);
        let stretch = UPDATE_SCRATCH_BYTES / DType::F64.size() * NORM_BLOCK;
        let _others_wait = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        for start in (0..values).step_by(stretch) {
            let end = values.min(start + stretch);
            let blocks = (end - start).div_ceil(NORM_BLOCK);
            let squares = self.arguments().read(gradient.rows(start, end)).bytes(self.scratch.bytes());
            let mut squares = squares.long(end - start).long(NORM_BLOCK);
            self.launch(OP, "sum_of_squares_blocks", blocks * LANES, &mut squares)?;
            let mut sum = self.arguments().bytes(self.scratch.bytes()).long(blocks).only(total.view());
            self.launch(OP, "sum_of_squares_add", 1, &mut sum)?;
        }
        Ok(())
    }
}
