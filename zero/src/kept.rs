//! What blocks leave from forward to backward, so that backward need not compute it again.
//!
//! A kept tensor is not copied and not moved: it is the one that forward computed, and its region of the arena simply lives
//! until the backward of the same block and micro-batch has used it. In host memory it takes turns with the block's gradient where it can
//! (`turns.rs`). What there is no memory for may be elsewhere in between (`kept/away.rs`): in the host's memory, where the device has its own, or
//! on disk.
//! Which blocks keep is the planner's choice ([`Keeping`]); the planning run allocates the same tensors in the same order.

mod away;

pub(crate) use away::{KeptAway, KeptSlots, chunks, slot_bytes};

use crate::Result;
use crate::lane::Lane;
use crate::pass::Pass;
use std::collections::HashMap;
use std::time::Instant;
use terrace_device::{Arena, Region};
use terrace_kernels::{DType, Shape, Tensor};

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

/// How many blocks leave what their backward would recompute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KeepCounts {
    /// In the arena.
    pub(crate) here: usize,
    /// In host memory, of a device with its own.
    pub(crate) on_host: usize,
    /// On disk.
    pub(crate) on_disk: usize,
}

/// The blocks that leave what their backward would recompute. Of those that can, the last ones, which backward uses first, leave it in
/// the arena, others before them in the host's memory and, before those, on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keeping {
    /// Index of the first block that is asked, which has it on disk if any has.
    asked_from: usize,
    /// Index of the first of those that have it in host memory, or of a later one.
    host_from: usize,
    /// Index of the first of those whose tensors stay in the arena.
    from: usize,
    /// Numbers of blocks.
    pub(crate) counts: KeepCounts,
    /// Number of blocks that could leave something.
    pub(crate) of: usize,
    /// Bytes that stay in the arena for one micro-batch.
    pub(crate) bytes: usize,
}

impl Default for Keeping {
    fn default() -> Self {
        Self::last(&[], KeepCounts::default())
    }
}

impl Keeping {
    /// The last of `keepers`, which are blocks in order and the bytes that each leaves: as many of each kind as `most` says, if there are.
    pub(crate) fn last(keepers: &[(usize, usize)], most: KeepCounts) -> Self {
        let last = |all: &[(usize, usize)], count: usize| all.len() - count.min(all.len());
        let (others, here) = keepers.split_at(last(keepers, most.here));
        let (others, on_host) = others.split_at(last(others, most.on_host));
        let on_disk = &others[last(others, most.on_disk)..];
        let first = |of: &[(usize, usize)], otherwise| of.first().map_or(otherwise, |&(block, _)| block);
        let from = first(here, usize::MAX);
        let host_from = first(on_host, from);
        Self {
            asked_from: first(on_disk, host_from),
            host_from,
            from,
            counts: KeepCounts { here: here.len(), on_host: on_host.len(), on_disk: on_disk.len() },
            of: keepers.len(),
            bytes: here.iter().map(|&(_, bytes)| bytes).sum(),
        }
    }

    /// Whether what `block` leaves stays in the arena.
    pub(crate) fn has(&self, block: usize) -> bool {
        block >= self.from
    }

    /// Whether what `block` leaves is elsewhere until backward.
    pub(crate) fn sends(&self, block: usize) -> bool {
        (self.asked_from..self.from).contains(&block)
    }

    /// Whether it is in host memory until then.
    pub(crate) fn sends_to_host(&self, block: usize) -> bool {
        (self.host_from..self.from).contains(&block)
    }

    /// Whether it is on disk until then.
    pub(crate) fn sends_to_disk(&self, block: usize) -> bool {
        (self.asked_from..self.host_from).contains(&block)
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

/// What tensors are without their memory.
#[derive(Debug, Clone)]
pub(crate) struct Shapes(Vec<(DType, Shape)>);

impl Shapes {
    pub(crate) fn of(tensors: &[Tensor]) -> Self {
        Self(tensors.iter().map(|tensor| (tensor.dtype(), tensor.shape())).collect())
    }

    /// Bytes of each.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = usize> {
        self.0.iter().map(|(dtype, shape)| shape.elements() * dtype.size())
    }

    /// Memory for tensors of these shapes.
    pub(crate) fn take(&self, arena: &Arena) -> Result<Vec<Tensor>> {
        let tensors = self.0.iter().map(|&(dtype, shape)| Tensor::new(arena, dtype, shape.dims()));
        Ok(tensors.collect::<std::result::Result<_, _>>()?)
    }

    /// The tensors in memory that is given.
    pub(crate) fn over(self, regions: Vec<Region>) -> Vec<Tensor> {
        let each = regions.into_iter().zip(self.0);
        each.map(|(region, (dtype, shape))| Tensor::from_region(region, dtype, shape.dims())).collect()
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
    pub(crate) fn hold(&mut self, (block, m, at): (usize, usize, usize), kept: Kept, lane: &Lane) -> Result {
        match (&mut self.away, kept) {
            (Some(away), Kept::Left(tensors)) if self.keeping.sends(block) => {
                away.send((block, m, at), tensors, lane, self.pool)
            }
            (_, kept) => {
                self.here.hold(block, m, kept);
                Ok(())
            }
        }
    }

    /// Backward follows.
    pub(crate) fn turn_round(&mut self) -> Result {
        self.away.iter_mut().try_for_each(|away| away.turn_round())
    }

    /// Gives backward what forward left.
    pub(crate) fn take(&mut self, block: usize, m: usize, pass: &Pass<'_>) -> Result<Kept> {
        let Some(away) = &mut self.away else { return Ok(self.here.take(block, m)) };
        let (began, before) = (Instant::now(), away.waited);
        let Some(tensors) = away.take((block, m), pass.lane, self.pool)? else {
            return Ok(self.here.take(block, m));
        };
        // The rest is copying.
        pass.note_wait(began, away.waited - before, "activations of", block);
        Ok(Kept::Left(tensors))
    }

    /// Starts what backward comes to next on its way up, beside the kernels that were just enqueued.
    pub(crate) fn bring_next(&mut self, lane: &Lane) -> Result {
        match &mut self.away {
            Some(away) if !lane.unified => away.bring_next(lane),
            _ => Ok(()),
        }
    }

    /// Seconds that compute waited for the disk since the last call.
    pub(crate) fn take_waited(&mut self) -> f64 {
        self.away.as_mut().map_or(0.0, |away| std::mem::take(&mut away.waited).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_keep() {
        let keepers = [(1, 10), (2, 20), (4, 40)];
        let last = |here, on_host, on_disk| Keeping::last(&keepers, KeepCounts { here, on_host, on_disk });
        let numbers = |of: Keeping| (of.counts.here, of.counts.on_host, of.counts.on_disk, of.bytes);
        // `-` recomputes, `d` sends to disk, `h` to the host's memory, `m` keeps in the arena.
        let blocks = |keeping: Keeping| {
            let of = |block| {
                let sends = (keeping.sends_to_host(block), keeping.sends_to_disk(block));
                assert_eq!(keeping.sends(block), sends.0 || sends.1);
                match (keeping.asks(block), sends, keeping.has(block)) {
                    (false, (false, false), false) => '-',
                    (true, (false, true), false) => 'd',
                    (true, (true, false), false) => 'h',
                    (true, (false, false), true) => 'm',
                    _ => unreachable!("a block is at one place, and is asked for what is anywhere"),
                }
            };
            (0..5).map(of).collect::<String>()
        };
        for (keeping, expected, found) in [
            (last(0, 0, 0), (0, 0, 0, 0), "-----"),
            (last(2, 0, 0), (2, 0, 0, 60), "--mmm"),
            (last(usize::MAX, 1, usize::MAX), (3, 0, 0, 70), "-mmmm"),
            (last(1, 0, 1), (1, 0, 1, 40), "--ddm"),
            (last(1, 0, 5), (1, 0, 2, 40), "-dddm"),
            (last(1, 1, 5), (1, 1, 1, 40), "-dhhm"),
            (last(0, 1, 1), (0, 1, 1, 0), "--ddh"),
            (last(0, 9, 1), (0, 3, 0, 0), "-hhhh"),
            (last(0, 0, 2), (0, 0, 2, 0), "--ddd"),
        ] {
            assert_eq!((numbers(keeping), &*blocks(keeping)), (expected, found));
            assert!(matches!(keeping.ask(0), Kept::Nothing) && keeping.of == 3);
        }
        assert!(matches!(last(1, 0, 1).ask(2), Kept::Wanted));
        assert_eq!(Keeping::default(), Keeping::last(&[], KeepCounts { here: 1, on_host: 1, on_disk: 1 }));
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
