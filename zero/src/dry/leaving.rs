//! Gradients that leave in parts, in a planning run.

use super::{DryRun, Parking, telling_chunks};
use crate::Result;
use crate::block::{GradientSlot, Parts};
use crate::gradient_parts::Accumulator;
use std::ops::Range;
use terrace_device::Arena;
use terrace_kernels::DType;

/// As [`Leaving`](crate::gradient_parts::Leaving).
#[derive(Debug)]
pub(super) struct LeavingParts<'r> {
    pub(super) run: &'r DryRun<'r>,
    pub(super) arena: &'r Arena,
    pub(super) block: usize,
    pub(super) parts: std::vec::IntoIter<Range<usize>>,
    pub(super) parking: Parking,
    /// Elements that have left.
    pub(super) filled: usize,
}

impl LeavingParts<'_> {
    /// Takes room for what the next elements open: chunks, or all of the group.
    fn fill(&mut self, elements: usize) -> Result {
        let Self { run, arena, block, .. } = *self;
        let before = self.filled;
        self.filled += elements;
        let all = run.network.groups[block].elements;
        if run.unified {
            return Ok(());
        }
        self.parking.known.insert(block);
        if run.come_whole {
            if before == 0 {
                let bytes = run.state.groups[block].elements * run.dtype.size();
                self.parking.coming.push_back((block, arena.alloc(bytes)?));
            }
            return Ok(());
        }
        // Those that are open have their room.
        let opened = (before.next_multiple_of(run.chunk_elements)).min(all);
        let open = self.filled.next_multiple_of(run.chunk_elements).min(all);
        telling_chunks(open - opened, run.chunk_elements)
            .try_for_each(|len| self.parking.park(arena, block, len * run.dtype.size()))
    }

    /// Takes room for the elements behind the parts.
    pub(super) fn end(mut self) -> Result<Parking> {
        self.fill(self.run.network.groups[self.block].elements - self.filled)?;
        if self.run.come_whole && !self.run.unified {
            self.parking.drain();
        }
        Ok(self.parking)
    }
}

impl Parts for LeavingParts<'_> {
    fn begin(&mut self) -> Result<Accumulator> {
        let params = self.parts.next().expect("a block completes each of its parts once");
        Accumulator::take(self.run.network, self.arena, self.block, params)
    }

    fn slots<'s>(&self, part: &'s mut Accumulator) -> (usize, Vec<GradientSlot<'s>>) {
        part.slots(self.run.network, self.block)
    }

    fn complete(&mut self, part: Accumulator) -> Result {
        self.fill(part.region.len() / DType::F32.size())
    }
}
