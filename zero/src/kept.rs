//! What blocks leave from forward to backward, so that backward need not compute it again.
//!
//! A kept tensor is not copied and not moved: it is the one that forward computed, and its region of the arena simply lives
//! until the backward of the same block and micro-batch has used it. On a device with its own memory it stays there; in host memory
//! it takes turns with the block's gradient where it can (`turns.rs`). What there is no memory for may be on disk in between
//! (`kept/away.rs`), where the device's memory is the host's.
//! Which blocks keep is the planner's choice ([`Keeping`]); the planning run allocates the same tensors in the same order.

mod away;

pub(crate) use away::{KeptAway, chunks, slot_bytes};

use crate::Result;
use crate::pass::Pass;
use crate::timeline::Resource;
use std::collections::HashMap;
use std::time::Instant;
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

/// The blocks that leave what their backward would recompute. Of those that can, the last ones, which backward uses first, leave it in
/// memory, others before them on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keeping {
    /// Index of the first block that is asked.
    asked_from: usize,
    /// Index of the first of those whose tensors stay in memory.
    from: usize,
    /// Number of blocks whose tensors stay in memory.
    pub(crate) count: usize,
    /// Number of blocks whose tensors are on disk in between.
    pub(crate) on_disk: usize,
    /// Number of blocks that could leave something.
    pub(crate) of: usize,
    /// Bytes that stay in memory for one micro-batch.
    pub(crate) bytes: usize,
}

impl Default for Keeping {
    fn default() -> Self {
        Self::last(&[], 0, 0)
    }
}

impl Keeping {
    /// The last `count` of `keepers`, which are blocks in order and the bytes that each leaves, and up to `on_disk` before them.
    pub(crate) fn last(keepers: &[(usize, usize)], count: usize, on_disk: usize) -> Self {
        let of = keepers.len();
        let (others, kept) = keepers.split_at(of - count.min(of));
        let away = &others[others.len() - on_disk.min(others.len())..];
        let from = kept.first().map_or(usize::MAX, |&(block, _)| block);
        Self {
            asked_from: away.first().map_or(from, |&(block, _)| block),
            from,
            count: kept.len(),
            on_disk: away.len(),
            of,
            bytes: kept.iter().map(|&(_, bytes)| bytes).sum(),
        }
    }

    /// Whether what `block` leaves stays in memory.
    pub(crate) fn has(&self, block: usize) -> bool {
        block >= self.from
    }

    /// Whether what `block` leaves is on disk until backward.
    pub(crate) fn sends(&self, block: usize) -> bool {
        (self.asked_from..self.from).contains(&block)
    }

    /// Whether `block` is asked.
    pub(crate) fn asks(&self, block: usize) -> bool {
        block >= self.asked_from
    }

    /// How the forward of `block` in training begins.
    pub(crate) fn ask(&self, block: usize) -> Kept {
        if self.asks(block) { Kept::Wanted } else { Kept::Nothing }
    }
}

/// What the blocks of one step left in memory and backward has not taken yet. It is dropped with the step, whether that failed or not.
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

/// The way of what blocks leave in one step, wherever it is in between.
pub(crate) struct KeptInStep<'a> {
    keeping: Keeping,
    here: KeptTensors,
    away: Option<&'a mut KeptAway>,
    pool: &'a rayon::ThreadPool,
}

impl<'a> KeptInStep<'a> {
    pub(crate) fn new(keeping: Keeping, away: Option<&'a mut KeptAway>, pool: &'a rayon::ThreadPool) -> Self {
        Self { keeping, here: KeptTensors::default(), away, pool }
    }

    /// How the forward of `block` begins.
    pub(crate) fn ask(&self, block: usize) -> Kept {
        self.keeping.ask(block)
    }

    /// Holds what the forward of `block` left for micro-batch `m`, the one at `at` of its round.
    pub(crate) fn hold(&mut self, (block, m, at): (usize, usize, usize), kept: Kept) -> Result {
        match (&mut self.away, kept) {
            (Some(away), Kept::Left(tensors)) if self.keeping.sends(block) => {
                away.send((block, m, at), &tensors, self.pool)
            }
            (_, kept) => {
                self.here.hold(block, m, kept);
                Ok(())
            }
        }
    }

    /// Backward follows.
    pub(crate) fn turn_round(&mut self) {
        self.away.iter_mut().for_each(|away| away.turn_round());
    }

    /// Gives backward what forward left.
    pub(crate) fn take(&mut self, block: usize, m: usize, pass: &Pass<'_>) -> Result<Kept> {
        let Some(away) = &mut self.away else { return Ok(self.here.take(block, m)) };
        away.read_ahead()?;
        let began = Instant::now();
        let Some(tensors) = away.take((block, m), &pass.lane.arena, self.pool)? else {
            return Ok(self.here.take(block, m));
        };
        pass.note(Resource::Wait, began, "activations of", block);
        Ok(Kept::Left(tensors))
    }

    /// Seconds that compute waited for the disk since the last call.
    pub(crate) fn take_waited(&mut self) -> f64 {
        self.away.as_mut().map_or(0.0, |away| std::mem::take(&mut away.waited).as_secs_f64())
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
        let numbers = |keeping: Keeping| (keeping.count, keeping.on_disk, keeping.of, keeping.bytes);
        // `-` recomputes, `d` sends to disk, `m` keeps in memory.
        let blocks = |keeping: Keeping| {
            let of = |block| match (keeping.asks(block), keeping.sends(block), keeping.has(block)) {
                (false, false, false) => '-',
                (true, true, false) => 'd',
                (true, false, true) => 'm',
                _ => unreachable!("a block is at one place, and is asked for what is anywhere"),
            };
            (0..5).map(of).collect::<String>()
        };
        for (count, on_disk, expected, found) in [
            (0, 0, (0, 0, 3, 0), "-----"),
            (2, 0, (2, 0, 3, 60), "--mmm"),
            (usize::MAX, usize::MAX, (3, 0, 3, 70), "-mmmm"),
            (1, 1, (1, 1, 3, 40), "--ddm"),
            (1, 5, (1, 2, 3, 40), "-dddm"),
            (0, 2, (0, 2, 3, 0), "--ddd"),
        ] {
            let keeping = Keeping::last(&keepers, count, on_disk);
            assert_eq!((numbers(keeping), &*blocks(keeping)), (expected, found), "{count}, {on_disk}");
            assert!(matches!(keeping.ask(0), Kept::Nothing));
        }
        assert!(matches!(Keeping::last(&keepers, 1, 1).ask(2), Kept::Wanted));
        assert_eq!(Keeping::default(), Keeping::last(&[], 1, 1));
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
