//! One micro-batch as the host prepares it.

use crate::{BatchLimits, EngineError, Result};
use terrace_kernels::DType;

/// A small tensor in host memory, copied to the device before the micro-batch runs.
#[derive(Debug, Clone)]
pub struct HostTensor {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub dims: Vec<usize>,
    /// Little-endian elements, row-major.
    pub bytes: Vec<u8>,
}

impl HostTensor {
    /// A tensor of 32-bit integers.
    ///
    /// # Panics
    /// If the dimensions do not multiply to the number of values.
    pub fn from_i32(dims: &[usize], values: &[i32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "dimensions match the number of values");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: DType::I32, dims: dims.to_vec(), bytes }
    }

    /// A tensor of single-precision numbers.
    ///
    /// # Panics
    /// If the dimensions do not multiply to the number of values.
    pub fn from_f32(dims: &[usize], values: &[f32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "dimensions match the number of values");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: DType::F32, dims: dims.to_vec(), bytes }
    }
}

/// One micro-batch: what the blocks read through [`Context::input`](crate::Context::input).
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Number of sequences, B.
    pub sequences: usize,
    /// Positions per sequence, S.
    pub length: usize,
    /// The inputs, in an order that the blocks and whoever builds the batch agree on.
    pub inputs: Vec<HostTensor>,
    /// Number of loss terms in this micro-batch (unmasked targets). The loss of a step is the sum of all terms divided by
    /// the sum of this number over the step's micro-batches.
    pub loss_terms: u64,
}

/// Element type and dimensions of each input.
pub(crate) type InputShapes = Vec<(DType, Vec<usize>)>;

impl MicroBatch {
    pub(crate) fn input_shapes(&self) -> InputShapes {
        self.inputs.iter().map(|input| (input.dtype, input.dims.clone())).collect()
    }

    /// Refuses what blocks that were planned for batches like another would read past, or not find. `planned` are the inputs of that.
    pub(crate) fn check_inputs(&self, planned: &InputShapes) -> Result {
        let refuse = |detail: String| Err(EngineError::Batch(detail));
        if self.inputs.len() != planned.len() {
            return refuse(format!(
                "batches of {} inputs were planned, not {}",
                planned.len(),
                self.inputs.len()
            ));
        }
        for (index, (input, (dtype, _))) in self.inputs.iter().zip(planned).enumerate() {
            let HostTensor { dtype: found, dims, bytes } = input;
            if found != dtype {
                return refuse(format!("input {index} was planned in {dtype}, not {found}"));
            }
            let elements = dims.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
            if elements.and_then(|elements| elements.checked_mul(dtype.size())) != Some(bytes.len()) {
                return refuse(format!("input {index} of {dims:?} in {dtype} has {} bytes", bytes.len()));
            }
        }
        Ok(())
    }

    /// The same, and that every shape is the planned one, as in training.
    pub(crate) fn check_as_planned(&self, limits: &BatchLimits, planned: &InputShapes) -> Result {
        if (self.sequences, self.length) != (limits.sequences, limits.length) {
            return Err(EngineError::Batch(format!(
                "micro-batches of {} × {} positions were planned, not {} × {}",
                limits.sequences, limits.length, self.sequences, self.length
            )));
        }
        self.check_inputs(planned)?;
        let other = self.inputs.iter().zip(planned).position(|(input, (_, dims))| input.dims != *dims);
        other.map_or(Ok(()), |index| {
            let (found, dims) = (&self.inputs[index].dims, &planned[index].1);
            Err(EngineError::Batch(format!("input {index} was planned as {dims:?}, not {found:?}")))
        })
    }
}
