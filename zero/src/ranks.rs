//! Several ranks, in plans only: how data parallelism with sharded state (ZeRO-3) divides a step.
//!
//! Every rank has a device and batches of its own, and an equal part, its *shard*, of every group's weights, masters and moments,
//! padded as groups are. A rank uploads its shard and gathers the rest of the group from the other devices; a gradient is summed over
//! the ranks in f32 while it is scattered, so that each downloads, and updates, its shard alone. Slots of the device hold whole groups,
//! those of the host shards. Shards of the last groups' state may be on the device, too: their weights are gathered as all are, but
//! none of their bytes cross the link. Ranks of a node share its memory, its disks and its network, which are therefore counted by the node;
//! the device, its memory and its link by the rank.
//!
//! Both collectives are taken for rings in two levels, the best that nodes of equal size can do: between nodes, each rank with those
//! at its place in the others, and then within the node. With `N` ranks on `M` nodes a group of `G` bytes crosses, in each direction,
//!
//! | | bytes |
//! |---|---|
//! | the network of a node | `(M − 1) / M · G` |
//! | the links of a device to others of its node | `(N/M − 1) / (N/M) · G` |
//!
//! An engine is one rank: [`Engine::outlook`](crate::Engine::outlook) alone plans more, for which [`PlanningRuns::of`](
//! crate::PlanningRuns::of) takes their number.

use crate::schedule::WeightUse;
use crate::work::StepWork;
use crate::{EngineError, Result};
use std::num::NonZeroUsize;
use terrace_tiers::{MemoryPlan, Tier};

/// How many ranks there are, and on how many nodes. The default is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    count: usize,
    nodes: usize,
}

/// So many that their bytes can be counted.
const RANKS_MAX: usize = 1 << 20;

/// Bytes that ranks exchange in a step, in each direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Into a node, and as many out of it.
    pub network_bytes: u64,
    /// To a device from others of its node, and as many from it.
    pub peer_bytes: u64,
}

impl Default for Ranks {
    fn default() -> Self {
        Self { count: 1, nodes: 1 }
    }
}

impl Ranks {
    /// `count` ranks on `nodes` nodes.
    ///
    /// # Errors
    /// Nodes would have different numbers of them, or there are more than 2²⁰.
    pub fn new(count: NonZeroUsize, nodes: NonZeroUsize) -> Result<Self> {
        if count.get() > RANKS_MAX {
            return Err(EngineError::Config(format!(
                "Ranks::count {count} is more than the {RANKS_MAX} that are planned"
            )));
        }
        if !count.get().is_multiple_of(nodes.get()) {
            return Err(EngineError::Config(format!(
                "Ranks::count {count} cannot be shared equally by Ranks::nodes {nodes}: choose a multiple of the nodes, for example {}",
                count.get().next_multiple_of(nodes.get())
            )));
        }
        Ok(Self { count: count.get(), nodes: nodes.get() })
    }

    /// Ranks in all.
    pub fn count(self) -> usize {
        self.count
    }

    /// Nodes.
    pub fn nodes(self) -> usize {
        self.nodes
    }

    /// Ranks on each node.
    pub fn per_node(self) -> usize {
        self.count / self.nodes
    }

    /// Whether there is more than one.
    pub fn are_several(self) -> bool {
        self.count > 1
    }

    /// Refuses what is planned for one rank alone: frozen weights, and a device that computes in the memory of its host, which has no
    /// place for what it gathers.
    pub(crate) fn check(self, training: bool, unified: bool) -> Result {
        let what = match (training, unified) {
            _ if !self.are_several() => return Ok(()),
            (false, _) => "several ranks are planned for training only",
            (_, true) => {
                "several ranks are planned for devices with memory of their own only: describe a card"
            }
            _ => return Ok(()),
        };
        Err(EngineError::Config(what.into()))
    }

    /// What crosses when groups of which a rank holds so many bytes are gathered, or scattered.
    pub(crate) fn traffic(self, shard_bytes: u64) -> Traffic {
        let (nodes, per_node) = (self.nodes as u64, self.per_node() as u64);
        Traffic {
            network_bytes: (nodes - 1) * per_node * shard_bytes,
            peer_bytes: (per_node - 1) * nodes * shard_bytes,
        }
    }

    /// The memory of a node and one of its devices, from that of a rank.
    pub(crate) fn memory_of_node(self, rank: MemoryPlan) -> MemoryPlan {
        if self.per_node() == 1 {
            return rank;
        }
        let mut node = MemoryPlan::default();
        for term in rank.entries() {
            let times = if term.tier == Tier::Device { 1 } else { self.per_node() as u64 };
            node.add(term.tier, term.purpose.clone(), term.count * times, term.unit_bytes);
        }
        node
    }

    /// The share of one rank of what a node has.
    pub(crate) fn share(self, bytes: u64) -> u64 {
        bytes / self.per_node() as u64
    }

    /// The step of a node and one of its devices, from that of a rank.
    pub(crate) fn work_of_node(self, rank: StepWork) -> StepWork {
        let (mut node, per_node) = (rank, self.per_node() as u64);
        node.tokens *= self.count as u64;
        let scale = |amounts: &mut [&mut u64]| amounts.iter_mut().for_each(|amount| **amount *= per_node);
        scale(&mut [
            &mut node.parameters,
            &mut node.disk_read_bytes,
            &mut node.disk_write_bytes,
            &mut node.memory_bytes,
        ]);
        for pass in &mut node.schedule.passes {
            let of_disk =
                |weights: &mut WeightUse| scale(&mut [&mut weights.read_bytes, &mut weights.handed_bytes]);
            pass.weights.iter_mut().for_each(of_disk);
            scale(&mut [
                &mut pass.spill_read_bytes,
                &mut pass.spill_write_bytes,
                &mut pass.gradient_read_bytes,
                &mut pass.gradient_write_bytes,
            ]);
        }
        for group in &mut node.schedule.groups {
            scale(&mut [
                &mut group.parameters,
                &mut group.read_bytes,
                &mut group.write_bytes,
                &mut group.late_write_bytes,
            ]);
        }
        node
    }
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            network_bytes: self.network_bytes + other.network_bytes,
            peer_bytes: self.peer_bytes + other.peer_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(count: usize, nodes: usize) -> Ranks {
        Ranks::new(NonZeroUsize::new(count).unwrap(), NonZeroUsize::new(nodes).unwrap()).unwrap()
    }

    #[test]
    fn a_ring_in_two_levels_by_hand() {
        // A group of 800 bytes, of which each of eight ranks holds 100.
        for (nodes, network_bytes, peer_bytes) in [(1, 0, 700), (2, 400, 600), (4, 600, 400), (8, 700, 0)] {
            let traffic = ranks(8, nodes).traffic(100);
            assert_eq!(traffic, Traffic { network_bytes, peer_bytes }, "{nodes} nodes");
            // Each rank of a node has received all but its own part, from the one or from the other.
            let of_a_rank = network_bytes * nodes as u64 / 8 + peer_bytes;
            assert_eq!(of_a_rank, 700, "{nodes} nodes");
        }
        assert_eq!(Ranks::default().traffic(100), Traffic::default());
    }

    #[test]
    fn nodes_are_equal() {
        let message = Ranks::new(NonZeroUsize::new(8).unwrap(), NonZeroUsize::new(3).unwrap()).unwrap_err();
        assert!(message.to_string().contains("Ranks::count 8") && message.to_string().contains("example 9"));
        assert_eq!(ranks(512, 32).per_node(), 16);
    }

    #[test]
    fn a_device_is_of_one_rank_and_the_rest_of_the_node() {
        let mut rank = MemoryPlan::default();
        for tier in [Tier::Device, Tier::Host, Tier::Disk] {
            rank.add(tier, "state", 3, 100);
        }
        let node = ranks(8, 2).memory_of_node(rank);
        let totals = [Tier::Device, Tier::Host, Tier::Disk].map(|tier| node.total(tier));
        assert_eq!(totals, [300, 1200, 1200]);
        let work =
            StepWork { operations: 7, tokens: 5, upload_bytes: 3, disk_read_bytes: 2, ..StepWork::default() };
        let StepWork { operations, tokens, upload_bytes, disk_read_bytes, .. } =
            ranks(8, 2).work_of_node(work);
        assert_eq!((operations, tokens, upload_bytes, disk_read_bytes), (7, 40, 3, 8));
    }
}
