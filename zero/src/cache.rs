//! State on disk that is in host memory, too.
//!
//! What the budget has left beside the windows holds copies of whole groups: their weights first, which a step reads up to three times
//! (forward, unless a deferred update hands them over, backward, update) for each byte of memory, then all of their state, which it reads once. Reads are served from the
//! copy. Updates go to the copy and are written to disk as ever, so that a step is as durable with copies as without; only the
//! bytes read become fewer. An update that is deferred to the next forward (`overlap.rs`) writes them after it. Where steps become
//! durable with a save alone, copies are written by the save alone. Which groups have copies changes no result.
//!
//! Hazard (a copy that is ahead of the disk): a step that fails may have updated some copies. All of them, and the state of groups
//! that are on the device alone, are then out of date until they are read again from the last commit.

use crate::Result;
use crate::network::Network;
use crate::plan::page;
use crate::state::StateKinds;
use crate::update::UpdateSlots;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use terrace_device::Device;
use terrace_tiers::{BlobKey, DiskStore, Generation, HostBlob, Lease, PendingRead, SharedBytes};

/// What of a group is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copied {
    Nothing,
    Weights,
    All,
}

/// What of every group is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Caching(Vec<Copied>);

impl Caching {
    /// The weights of so many groups, the smallest ones, and all state of so many of those. Only the first `groups` come into question,
    /// which have their state on disk.
    pub(crate) fn of(network: &Network, groups: usize, weights: usize, all: usize) -> Self {
        let mut copied = vec![Copied::Nothing; network.groups.len()];
        for (place, group) in Self::order(network, groups).into_iter().enumerate().take(weights) {
            copied[group] = if place < all { Copied::All } else { Copied::Weights };
        }
        Self(copied)
    }

    /// Groups by size, since a byte of memory saves the same wherever it is and small groups waste the least.
    fn order(network: &Network, groups: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..groups).filter(|&group| network.groups[group].elements > 0).collect();
        order.sort_by_key(|&group| network.groups[group].elements);
        order
    }

    /// Copies as much more of the first `groups` as `room` bytes have room for. False if that is nothing.
    pub(crate) fn extend(
        &mut self,
        network: &Network,
        groups: usize,
        kinds: &StateKinds,
        mut room: u64,
    ) -> bool {
        let before = self.counts();
        for (from, to) in [(Copied::Nothing, Copied::Weights), (Copied::Weights, Copied::All)] {
            for group in Self::order(network, groups) {
                if self.0[group] != from {
                    continue;
                }
                let elements = network.groups[group].elements;
                let bytes = Self::bytes(to, kinds, elements) - Self::bytes(from, kinds, elements);
                if bytes > room {
                    // All weights come before the rest of any group's state.
                    return self.counts() != before;
                }
                room -= bytes;
                self.0[group] = to;
            }
        }
        self.counts() != before
    }

    fn bytes(copied: Copied, kinds: &StateKinds, elements: usize) -> u64 {
        let bytes = |kind: usize| page(kinds.blobs[kind].bytes(elements as u64) as usize);
        match copied {
            Copied::Nothing => 0,
            Copied::Weights => bytes(kinds.weight),
            Copied::All => (0..kinds.blobs.len()).map(bytes).sum(),
        }
    }

    /// Whether a kind of a group is copied.
    pub(crate) fn has(&self, group: usize, kind: usize, kinds: &StateKinds) -> bool {
        match self.0[group] {
            Copied::Nothing => false,
            Copied::Weights => kind == kinds.weight,
            Copied::All => true,
        }
    }

    /// Whether all state of a group is copied.
    pub(crate) fn has_all(&self, group: usize) -> bool {
        self.0[group] == Copied::All
    }

    /// Elements of each group of which a kind is copied.
    pub(crate) fn elements<'n>(
        &'n self,
        network: &'n Network,
        kind: usize,
        kinds: &'n StateKinds,
    ) -> impl Iterator<Item = u64> + 'n {
        let groups = network.groups.iter().enumerate();
        let copied = groups.filter(move |(group, _)| self.has(*group, kind, kinds));
        copied.map(|(_, group)| group.elements as u64)
    }

    /// Bytes of all copies of a kind.
    pub(crate) fn bytes_of(&self, network: &Network, kind: usize, kinds: &StateKinds) -> u64 {
        self.elements(network, kind, kinds)
            .map(|elements| page(kinds.blobs[kind].bytes(elements) as usize))
            .sum()
    }

    /// Number of groups of which the weights are copied, and of those of which everything is.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let count = |wanted: &[Copied]| self.0.iter().filter(|copied| wanted.contains(copied)).count();
        (count(&[Copied::Weights, Copied::All]), count(&[Copied::All]))
    }
}

/// The copies.
#[derive(Debug)]
pub(crate) struct StateCache {
    groups: Vec<Mutex<GroupCopies>>,
}

/// The copies of a group, by kind.
pub(crate) type GroupCopies = Vec<Option<Arc<HostBlob>>>;

impl StateCache {
    /// Memory for copies that are still to be read; `device` will read the weights.
    pub(crate) fn new(
        caching: &Caching,
        network: &Network,
        kinds: &StateKinds,
        device: &dyn Device,
    ) -> Result<Self> {
        let groups = network.groups.iter().enumerate().map(|(group, params)| {
            let blobs = kinds.blobs.iter().enumerate().map(|(kind, blob)| {
                if !caching.has(group, kind, kinds) {
                    return Ok(None);
                }
                let mut copy = HostBlob::new(blob.bytes(params.elements as u64) as usize)?;
                if kind == kinds.weight {
                    copy.pin_for(device);
                }
                Ok(Some(Arc::new(copy)))
            });
            Ok(Mutex::new(blobs.collect::<Result<_>>()?))
        });
        Ok(Self { groups: groups.collect::<Result<_>>()? })
    }

    /// The weights of a group, if they are copied.
    pub(crate) fn weights(&self, group: usize, kinds: &StateKinds) -> Option<SharedBytes> {
        let copy = self.lock(group)[kinds.weight].as_ref().map(Arc::clone);
        copy.map(SharedBytes::Blob)
    }

    pub(crate) fn lock(&self, group: usize) -> MutexGuard<'_, GroupCopies> {
        self.groups[group].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts writing every copy.
    pub(crate) fn write(&self, store: &DiskStore, kinds: &StateKinds, slots: &UpdateSlots) -> Result {
        for group in 0..self.groups.len() {
            // Whoever needs the weights meanwhile does not wait for the writes.
            let copies = self.lock(group).clone();
            write_copies(store, kinds, slots, group, &copies)?;
        }
        Ok(())
    }

    /// The copies of every group, shared.
    pub(crate) fn shared(&self) -> Vec<GroupCopies> {
        (0..self.groups.len()).map(|group| self.lock(group).clone()).collect()
    }

    /// Reads the copies of some groups from the last commit.
    pub(crate) fn read(
        &self,
        store: &DiskStore,
        kinds: &StateKinds,
        slots: &UpdateSlots,
        groups: impl Iterator<Item = usize>,
    ) -> Result {
        for group in groups {
            let mut copies = self.lock(group);
            let which = copied(&copies);
            read_state(store, kinds, slots, group, &which, |kind, range, lease| {
                exclusive(copies[kind].as_mut().expect("it is copied"))[range].copy_from_slice(&lease);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// The kinds that are copied.
fn copied(copies: &GroupCopies) -> Vec<usize> {
    (0..copies.len()).filter(|&kind| copies[kind].is_some()).collect()
}

/// Starts writing what is copied of a group.
pub(crate) fn write_copies(
    store: &DiskStore,
    kinds: &StateKinds,
    slots: &UpdateSlots,
    group: usize,
    copies: &GroupCopies,
) -> Result {
    write_state(store, kinds, slots, group, &copied(copies), |kind, range, mut lease| {
        lease.copy_from_slice(&copies[kind].as_ref().expect("it is copied")[range]);
        Ok(lease)
    })
}

/// Starts writing some kinds of a group to the next generation of `store`. `fill` fills the slot of a chunk with those bytes of a
/// kind.
pub(crate) fn write_state(
    store: &DiskStore,
    kinds: &StateKinds,
    slots: &UpdateSlots,
    group: usize,
    which: &[usize],
    fill: impl Fn(usize, Range<usize>, Lease) -> Result<Lease>,
) -> Result {
    let spec = store.spec();
    for chunk in 0..spec.chunks(group) {
        for &kind in which {
            let range = kinds.range(kind, spec, group, chunk);
            let lease = slots.acquire_one(kind, range.len());
            let key = BlobKey { group, kind: kinds.blobs[kind].kind };
            store.write(key, chunk, fill(kind, range, lease)?)?;
        }
    }
    Ok(())
}

/// Reads some kinds of a group from the last commit of `store`, those of a chunk at once. `put` takes the bytes of a chunk to where
/// those of a kind are.
pub(crate) fn read_state(
    store: &DiskStore,
    kinds: &StateKinds,
    slots: &UpdateSlots,
    group: usize,
    which: &[usize],
    mut put: impl FnMut(usize, Range<usize>, Lease) -> Result,
) -> Result {
    let spec = store.spec();
    let range = |kind, chunk| kinds.range(kind, spec, group, chunk);
    let mut finish = |(chunk, reads): (usize, Vec<PendingRead>)| -> Result {
        for (&kind, read) in which.iter().zip(reads) {
            put(kind, range(kind, chunk), read.wait()?)?;
        }
        Ok(())
    };
    let mut reading = VecDeque::new();
    for chunk in 0..spec.chunks(group) {
        let lens = || which.iter().map(|&kind| (kind, range(kind, chunk).len()));
        let leases = loop {
            if let Some(leases) = slots.try_acquire(lens()) {
                break leases;
            }
            // Nobody is waited for with slots in hand that they may wait for.
            match reading.pop_front() {
                Some(oldest) => finish(oldest)?,
                None => break lens().map(|(kind, len)| slots.acquire_one(kind, len)).collect(),
            }
        };
        let mut reads = Vec::with_capacity(which.len());
        for (&kind, lease) in which.iter().zip(leases) {
            let key = BlobKey { group, kind: kinds.blobs[kind].kind };
            reads.push(store.read(key, chunk..chunk + 1, Generation::Live, lease)?);
        }
        reading.push_back((chunk, reads));
    }
    reading.into_iter().try_for_each(finish)
}

/// The bytes of a blob that nobody else holds.
pub(crate) fn exclusive(blob: &mut Arc<HostBlob>) -> &mut [u8] {
    Arc::get_mut(blob).expect("no upload or block holds state while it is changed")
}
