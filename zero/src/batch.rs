//! One micro-batch as the host prepares it.

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
    pub fn from_i32(dims: &[usize], values: &[i32]) -> Self {
        assert_eq!(dims.iter().product::<usize>(), values.len(), "dimensions match the number of values");
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { dtype: DType::I32, dims: dims.to_vec(), bytes }
    }

    /// A tensor of single-precision numbers.
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
