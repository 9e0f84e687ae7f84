//! Memory in which what a block keeps for backward and its parked gradient take turns.
//!
//! A block's kept tensors live from its forward to its backward, its gradient from there to its update. Where all gradients wait for
//! the norm, the update of a block's weights comes before its next forward needs them, so the two are never there at once: one
//! arena a block, of the larger size, holds either. All kept tensors of a block are dropped before the first chunk of its gradient is
//! parked, and the other way around; whoever came too early would find the arena exhausted.
//!
//! Only on a device whose memory is the host's, for blocks that keep, and for parameters that no other block uses: a shared group's
//! gradient is there before its first user's backward. Nor for blocks whose gradients leave in parts, beside what they kept.

use crate::Result;
use crate::gradient_parts::parts_of;
use crate::kept::Keeping;
use crate::network::Network;
use crate::rounds::Rounds;
use std::ops::{Deref, DerefMut};
use terrace_device::{Arena, Device, Region};
use terrace_tiers::{Lease, StoreSpec};

/// The arenas, by block, which is also the group of its own parameters.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    arenas: Vec<Option<Arena>>,
}

impl Turns {
    /// Arenas of so many bytes; none where that is 0.
    pub(crate) fn new(device: &dyn Device, bytes: &[usize]) -> Result<Self> {
        let arena = |&bytes: &usize| (bytes > 0).then(|| device.arena(bytes)).transpose();
        Ok(Self { arenas: bytes.iter().map(arena).collect::<std::result::Result<_, _>>()? })
    }

    /// For a planning run, of the blocks that take part.
    pub(crate) fn planned(network: &Network, keeping: Keeping, rounds: &Rounds) -> Self {
        let takes_part = |block: usize| keeping.has(block) && Self::can(network, block, rounds);
        let arena = |block| takes_part(block).then(Arena::virtual_memory);
        Self { arenas: (0..network.groups.len()).map(arena).collect() }
    }

    /// Whether a block that keeps has such memory: no other one uses its parameters, and no part of its gradient is parked while it still
    /// needs what it kept.
    pub(crate) fn can(network: &Network, block: usize, rounds: &Rounds) -> bool {
        !network.is_shared(block) && parts_of(network, block, rounds).is_empty()
    }

    pub(crate) fn of(&self, block: usize) -> Option<&Arena> {
        self.arenas.get(block)?.as_ref()
    }

    /// The most bytes that each was asked for so far; 0 where there is none.
    pub(crate) fn peaks(&self) -> Vec<usize> {
        self.arenas.iter().map(|arena| arena.as_ref().map_or(0, Arena::peak)).collect()
    }
}

/// Bytes of an arena for a group's gradient: its chunks one after the other. All but the last are of the same length.
pub(crate) fn gradient_bytes(spec: &StoreSpec, group: usize, element_bytes: usize) -> usize {
    let bytes = |chunk| Arena::region_bytes(spec.chunk_len(group, chunk) * element_bytes);
    match spec.chunks(group) {
        0 => 0,
        chunks => (chunks - 1) * bytes(0) + bytes(chunks - 1),
    }
}

/// A chunk of a gradient in host memory.
#[derive(Debug)]
pub(crate) enum ChunkMemory {
    Slot(Lease),
    /// Of an arena in turns.
    Turn(Region),
}

impl From<Lease> for ChunkMemory {
    fn from(lease: Lease) -> Self {
        Self::Slot(lease)
    }
}

impl Deref for ChunkMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Slot(lease) => lease,
            Self::Turn(region) => region.bytes().host(),
        }
    }
}

impl DerefMut for ChunkMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Slot(lease) => lease,
            Self::Turn(region) => region.bytes_mut().into_host(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_tiers::GroupSpec;

    /// A plan of billions of elements makes no region of each of their chunks.
    #[test]
    fn a_gradient_is_its_chunks_one_after_the_other() {
        for (elements, chunk_elements) in
            [(0, 64), (1, 64), (64, 64), (65, 64), (1000, 64), (1000, 1), (4097, 100)]
        {
            let groups = vec![GroupSpec { name: String::new(), elements }];
            let identity = String::new();
            let spec = StoreSpec { groups, kinds: Vec::new(), chunk_elements, generations: 1, identity };
            for element_bytes in [2, 4] {
                let arena = Arena::virtual_memory();
                let chunk = |chunk| arena.alloc(spec.chunk_len(0, chunk) * element_bytes).unwrap();
                let chunks: Vec<Region> = (0..spec.chunks(0)).map(chunk).collect();
                let what = format!("{} chunks of {elements} elements", chunks.len());
                assert_eq!(gradient_bytes(&spec, 0, element_bytes), arena.peak(), "{what}");
            }
        }
    }
}
