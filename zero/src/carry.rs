//! What recurrent blocks carry from one pass of a generation to the next: a state of fixed size for each sequence, however long that is.
//!
//! It stays where kernels are. A pass changes it in place, so that of a pass that fails it is unknown what is left.

use crate::network::Network;
use crate::{CarrySlot, CarrySpec, HostTensor, Result};
use terrace_device::Arena;
use terrace_kernels::{DType, Tensor, View};

/// What one block carries of all sequences.
#[derive(Debug)]
pub(crate) struct Carried {
    recent: Tensor,
    state: Tensor,
}

impl Carried {
    /// Memory for what the blocks of a network carry of so many sequences; `None` of those that carry nothing. What it holds means nothing until a
    /// sequence's first pass.
    pub(crate) fn allocate(
        network: &Network,
        arena: &Arena,
        dtype: DType,
        sequences: usize,
    ) -> Result<Vec<Option<Self>>> {
        let of = |spec: CarrySpec| -> Result<Self> {
            let tensor = |dtype, dims: &[usize]| {
                let dims: Vec<usize> = std::iter::once(sequences).chain(dims.iter().copied()).collect();
                Tensor::new(arena, dtype, &dims)
            };
            Ok(Self { recent: tensor(dtype, &spec.recent)?, state: tensor(DType::F32, &spec.state)? })
        };
        network.blocks.iter().map(|block| block.carries().map(of).transpose()).collect()
    }

    /// What the kernels of its block see.
    pub(crate) fn slot<'a>(&'a mut self, slots: View<'a>) -> CarrySlot<'a> {
        CarrySlot { recent: self.recent.view_mut(), state: self.state.view_mut(), slots }
    }
}

/// i32 `[B]`: the slots of sequences.
pub(crate) fn slots(sequences: &[usize]) -> HostTensor {
    let numbers: Vec<i32> = sequences.iter().map(|&sequence| sequence as i32).collect();
    HostTensor::from_i32(&[numbers.len()], &numbers)
}

/// Bytes that a block carries of so many sequences.
pub(crate) fn bytes(spec: &CarrySpec, dtype: DType, sequences: usize) -> u64 {
    let elements = |dims: &[usize]| dims.iter().product::<usize>();
    (sequences * (elements(&spec.recent) * dtype.size() + elements(&spec.state) * DType::F32.size())) as u64
}
