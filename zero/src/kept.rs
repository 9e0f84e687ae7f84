//! What blocks leave from forward to backward, so that backward need not compute it again.
//!
//! A kept tensor is not copied and not moved: it is the one that forward computed, and its region of the arena simply lives
//! until the backward of the same block and micro-batch has used it. On a device with its own memory it stays there; in host memory
//! it takes turns with the block's gradient where it can (`turns.rs`).
//! Which blocks keep is the planner's choice ([`Keeping`]); the planning run allocates the same tensors in the same order.

use std::collections::HashMap;
use terrace_kernels::Tensor;

/// Tensors on their way from a block's forward to its backward: a field of [`Context`](crate::Context).
#[derive(Debug, Default)]
pub enum Kept {
    /// Forward leaves nothing, backward recomputes what it needs.
    #[default]
    Nothing,
    /// Forward may leave tensors.
    Wanted,
    /// What forward left.
    Left(Vec<Tensor>),
}

/// The blocks that leave what their backward would recompute: of those that can, the last ones, which backward uses first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Keeping {
    /// Index of the first block that is asked.
    pub(crate) from: usize,
    /// Number of blocks that leave something.
    pub(crate) count: usize,
    /// Number of blocks that could.
    pub(crate) of: usize,
    /// Bytes that all of them leave for one micro-batch.
    pub(crate) bytes: usize,
}

impl Keeping {
    /// The last `count` of `keepers`, which are blocks in order and the bytes that each leaves.
    pub(crate) fn last(keepers: &[(usize, usize)], count: usize) -> Self {
        let of = keepers.len();
        let kept = &keepers[of - count.min(of)..];
        Self {
            from: kept.first().map_or(usize::MAX, |&(block, _)| block),
            count: kept.len(),
            of,
            bytes: kept.iter().map(|&(_, bytes)| bytes).sum(),
        }
    }

    /// Whether `block` is asked.
    pub(crate) fn has(&self, block: usize) -> bool {
        block >= self.from
    }

    /// How the forward of `block` in training begins.
    pub(crate) fn asks(&self, block: usize) -> Kept {
        if self.has(block) { Kept::Wanted } else { Kept::Nothing }
    }
}

/// What the blocks of one step left and backward has not taken yet. It is dropped with the step, whether that failed or not.
#[derive(Debug, Default)]
pub(crate) struct KeptTensors {
    /// By block and micro-batch: tensors hold what is true of one pair only.
    left: HashMap<(usize, usize), Vec<Tensor>>,
}

impl KeptTensors {
    /// Holds what the forward of `block` left for micro-batch `m`.
    pub(crate) fn hold(&mut self, block: usize, m: usize, kept: Kept) {
        if let Kept::Left(tensors) = kept {
            let earlier = self.left.insert((block, m), tensors);
            assert!(earlier.is_none(), "block {block} leaves tensors for micro-batch {m} once a step");
        }
    }

    /// Gives backward what forward left.
    pub(crate) fn take(&mut self, block: usize, m: usize) -> Kept {
        self.left.remove(&(block, m)).map_or(Kept::Nothing, Kept::Left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_device::Arena;
    use terrace_kernels::DType;

    #[test]
    fn the_last_blocks_keep() {
        let keepers = [(1, 10), (2, 20), (4, 40)];
        assert_eq!(Keeping::last(&keepers, 0), Keeping { from: usize::MAX, count: 0, of: 3, bytes: 0 });
        assert_eq!(Keeping::last(&keepers, 2), Keeping { from: 2, count: 2, of: 3, bytes: 60 });
        assert_eq!(Keeping::last(&keepers, usize::MAX), Keeping { from: 1, count: 3, of: 3, bytes: 70 });
        assert!(matches!(Keeping::last(&keepers, 2).asks(1), Kept::Nothing));
        assert!(matches!(Keeping::last(&keepers, 2).asks(2), Kept::Wanted));
    }

    #[test]
    fn each_block_and_micro_batch_gets_its_own() {
        let arena = Arena::virtual_memory();
        let tensor = |elements| Tensor::new(&arena, DType::F32, &[elements]).unwrap();
        let mut kept = KeptTensors::default();
        for (block, m, elements) in [(1, 0, 3), (1, 1, 5), (2, 0, 7)] {
            kept.hold(block, m, Kept::Left(vec![tensor(elements)]));
        }
        kept.hold(3, 0, Kept::Wanted);
        let mut elements = |block, m| match kept.take(block, m) {
            Kept::Left(tensors) => tensors[0].shape().elements(),
            _ => 0,
        };
        assert_eq!(elements(1, 1), 5);
        assert_eq!(elements(1, 1), 0, "taken once");
        assert_eq!((elements(2, 0), elements(1, 0), elements(3, 0)), (7, 3, 0));
        assert_eq!(arena.used(), 0);
    }
}
