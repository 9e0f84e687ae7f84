//! AdamW and Adam of state in device memory.
//!
//! A device's kernel gets a step's scalars ([`AdamStep`]) from here, and leaves the bytes that
//! [`Optimizer::update`](crate::Optimizer::update) would: state may go from one to the other at any step. What is a kernel
//! elsewhere is the loops of this crate on the host ([`host_kernels`]), for devices whose memory the CPU reaches, and for
//! tests.
//!
//! # Rejected
//!
//! A place in `KernelSet` next to a layer's operations: the CPU's set would need loops that are here, and dependencies
//! point the other way.

use std::sync::Arc;

use rayon::ThreadPool;
use terrace_kernels::update::{self, Adam, AdamFormat, AdamState, AdamStep, UpdateKernels};
use terrace_kernels::{BytesMut, DType, View, ViewMut};

use crate::algorithm::{Algorithm, Scalars};
use crate::error::{OptimizerError, Result};
use crate::isa::Isa;
use crate::layout::{StateFormat, StateLayout, WeightType};
use crate::norm::SumOfSquares;
use crate::store;
use crate::update::{Gradient, StepArgs, in_pieces};

/// An [`Optimizer`](crate::Optimizer) over state in device memory.
#[derive(Clone)]
pub struct DeviceOptimizer {
    adam: Arc<dyn Adam>,
    algorithm: Algorithm,
    layout: StateLayout,
}

impl DeviceOptimizer {
    /// `algorithm` by the kernels of a backend, over state stored as `layout`.
    ///
    /// # Errors
    /// There is no kernel for this algorithm, hyperparameters are out of range, or the layout has not both moments.
    pub fn new(kernels: &UpdateKernels, algorithm: Algorithm, layout: StateLayout) -> Result<Self> {
        algorithm.on_device(&algorithm.step(1, 0.0))?;
        let (needed, found) = (algorithm.moments(), layout.moments());
        if needed != found {
            return Err(OptimizerError::WrongMoments { algorithm: algorithm.to_string(), needed, found });
        }
        Ok(Self { adam: Arc::clone(&kernels.adam), algorithm, layout })
    }

    /// What the slices of [`update`](Self::update) are.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// Updates one chunk in place, on the stream that the kernels were made for: nothing is waited for.
    ///
    /// The gradient is f32, bf16 or f16; `state` has a slice for each of [`StateLayout::kinds`], as
    /// [`Optimizer::update`](crate::Optimizer::update) takes them.
    ///
    /// # Errors
    /// Slices that do not match the layout, and hyperparameters out of range: nothing was launched then. Or the backend failed.
    pub fn update(&self, args: &StepArgs, gradient: View<'_>, state: Vec<BytesMut<'_>>) -> Result<()> {
        let step = self.algorithm.on_device(args)?;
        let params = gradient.shape().elements();
        let places = state.iter().map(|bytes| (bytes.len(), bytes.address().as_ptr().addr()));
        self.layout.check_places(params, places)?;
        let dtype = match self.layout.weight() {
            WeightType::F32 => DType::F32,
            WeightType::Bf16 => DType::BF16,
            WeightType::F16 => DType::F16,
        };
        let format = match self.layout.format() {
            StateFormat::Fp32 => AdamFormat::Fp32,
            StateFormat::Split => AdamFormat::Split,
            StateFormat::Bf16 => AdamFormat::Bf16,
            StateFormat::Compact => AdamFormat::Compact,
        };
        let mut kinds = state.into_iter();
        let mut next = || kinds.next().expect("as many as the layout has");
        let weight = ViewMut::new(next(), dtype, &[params]);
        let rest = (dtype != DType::F32).then(&mut next);
        self.adam.update(&step, gradient, AdamState { format, weight, rest, m: next(), v: next() })?;
        Ok(())
    }
}

/// The operations on training state for memory that the CPU reaches, on the threads of `pool`: done when they return.
pub fn host_kernels(pool: Arc<ThreadPool>) -> UpdateKernels {
    let host = Arc::new(Host { pool });
    UpdateKernels { adam: host.clone(), sum_of_squares: host }
}

struct Host {
    pool: Arc<ThreadPool>,
}

impl Adam for Host {
    fn update(&self, step: &AdamStep, gradient: View<'_>, state: AdamState<'_>) -> terrace_kernels::Result {
        state.check(gradient);
        let layout = layout_of(&state);
        let AdamState { weight, rest, m, v, .. } = state;
        let mut state = vec![weight.into_bytes().into_host()];
        state.extend(rest.into_iter().chain([m, v]).map(BytesMut::into_host));
        let one = |_, gradient: Gradient<'_>, state: &mut [&mut [u8]]| {
            let isa = Isa::best();
            if step.decoupled {
                store::update(isa, &layout, Scalars::<true>::from_step(*step), step.seed, gradient, state);
            } else {
                store::update(isa, &layout, Scalars::<false>::from_step(*step), step.seed, gradient, state);
            }
            Ok(())
        };
        in_pieces(&layout, &self.pool, vec![(host_gradient(gradient), state)], one)
    }
}

impl update::SumOfSquares for Host {
    fn add(&self, gradient: View<'_>, total: ViewMut<'_>) -> terrace_kernels::Result {
        assert_eq!(total.dtype(), DType::F64, "sum_of_squares: the total is f64");
        let total: &mut [f64] = bytemuck::cast_slice_mut(total.into_bytes().into_host());
        let mut sum = SumOfSquares::from_total(total[0]);
        sum.add_threaded(&self.pool, &[host_gradient(gradient)]);
        total[0] = sum.total();
        Ok(())
    }
}

/// The layout of state that was checked.
fn layout_of(state: &AdamState<'_>) -> StateLayout {
    let weight = match state.weight.dtype() {
        DType::F32 => WeightType::F32,
        DType::F16 => WeightType::F16,
        _ => WeightType::Bf16,
    };
    let format = match state.format {
        AdamFormat::Fp32 => StateFormat::Fp32,
        AdamFormat::Split => StateFormat::Split,
        AdamFormat::Bf16 => StateFormat::Bf16,
        AdamFormat::Compact => StateFormat::Compact,
    };
    StateLayout::new(format, weight).expect("the state was checked")
}

/// A gradient in memory that the CPU reaches.
fn host_gradient(gradient: View<'_>) -> Gradient<'_> {
    let bytes = gradient.bytes().host();
    match gradient.dtype() {
        DType::F32 => Gradient::F32(bytemuck::cast_slice(bytes)),
        DType::BF16 => Gradient::Bf16(bytemuck::cast_slice(bytes)),
        DType::F16 => Gradient::F16(bytemuck::cast_slice(bytes)),
        other => panic!("gradients are f32, bf16 or f16, not {other}"),
    }
}
