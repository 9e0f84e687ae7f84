//! Weights in the memory of a device that has its own.
//!
//! A few slots as long as the largest group that streams take turns; they are filled before each use. The last groups may have
//! places of their own, which are filled once after every update: a step then reads their weights and sends them up once instead
//! of twice, and generation not at all. Those of groups whose state is on the device (`device_state.rs`) are there anyway. Which
//! groups stay changes no result.

use crate::device_state::{DeviceState, region_bytes, sums_bytes};
use crate::network::Network;
use crate::state::StateKinds;
use crate::{Backend, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use terrace_device::Region;
use terrace_kernels::DType;

/// Memory of the device for weights; none where kernels read host memory.
#[derive(Debug, Default)]
pub(crate) struct DeviceWeights {
    /// Any group takes any slot.
    pub(crate) slots: VecDeque<Region>,
    /// By group, those that stay. Groups whose state is on the device have theirs during a schedule alone.
    pub(crate) places: Vec<Option<Place>>,
}

/// A group's place.
#[derive(Debug)]
pub(crate) enum Place {
    /// It holds old weights, or none.
    Stale(Region),
    /// The weights are on their way.
    Coming,
    /// They are there.
    Here(Arc<Region>),
}

/// How much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceRoom {
    slots: usize,
    /// How many groups, counted from the last, stay.
    pub(crate) staying: usize,
    /// How many, counted alike, have all their state on the device.
    pub(crate) state: usize,
    /// State is shards, so that weights of a group need a place of their own even where its state is on the device.
    shards: bool,
}

impl DeviceRoom {
    /// Room for `staying` groups, those with their `state` here included, and slots for the others.
    pub(crate) fn of(
        backend: &Backend,
        network: &Network,
        slots: usize,
        staying: usize,
        state: usize,
    ) -> Self {
        if backend.device.unified() {
            return Self { slots: 0, staying: 0, state: 0, shards: false };
        }
        let groups = network.groups.len();
        let state = state.min(groups);
        let staying = staying.clamp(state, groups);
        Self { slots: slots.min(groups - staying), staying, state, shards: false }
    }

    /// The same of one of several ranks, whose state is shards: whole groups are gathered into slots and places.
    pub(crate) fn of_shards(network: &Network, slots: usize, staying: usize, state: usize) -> Self {
        let groups = network.groups.len();
        let staying = staying.min(groups);
        Self { slots: slots.min(groups - staying), staying, state: state.min(groups), shards: true }
    }

    /// Number of slots and bytes of each.
    pub(crate) fn slots(self, network: &Network) -> (u64, u64) {
        let streaming = network.groups.len() - self.staying;
        let bytes =
            network.groups[..streaming].iter().map(|group| weight_bytes(network, group.elements)).max();
        (self.slots as u64, bytes.unwrap_or(0))
    }

    /// How many groups have places: those that stay, but for those that are in the state.
    pub(crate) fn with_places(self) -> usize {
        if self.shards { self.staying } else { self.staying - self.state }
    }

    /// Bytes of all places.
    pub(crate) fn places(self, network: &Network) -> u64 {
        let first = network.groups.len() - self.staying;
        let staying = &network.groups[first..first + self.with_places()];
        staying.iter().map(|group| weight_bytes(network, group.elements)).sum()
    }

    /// Bytes of slots and places.
    pub(crate) fn weights(self, network: &Network) -> u64 {
        let (slots, bytes) = self.slots(network);
        slots * bytes + self.places(network)
    }

    /// Bytes of one kind of state on the device.
    pub(crate) fn kind_bytes(self, network: &Network, kind: &terrace_tiers::BlobSpec) -> u64 {
        let here = &network.groups[self.first_with_state(network)..];
        here.iter().map(|group| region_bytes(kind.bytes(group.elements as u64))).sum()
    }

    /// Bytes of all state on the device.
    pub(crate) fn state_bytes(self, network: &Network, kinds: &StateKinds) -> u64 {
        kinds.blobs.iter().map(|kind| self.kind_bytes(network, kind)).sum()
    }

    /// Bytes of gradients that stay there between backward and update, and of their sums.
    pub(crate) fn gradient_bytes(self, network: &Network, dtype: DType) -> u64 {
        if self.state == 0 {
            return 0;
        }
        let here = &network.groups[self.first_with_state(network)..];
        let bytes = here.iter().map(|group| region_bytes((group.elements * dtype.size()) as u64));
        bytes.sum::<u64>() + sums_bytes(self.state)
    }

    /// Whether a group's weights stay.
    pub(crate) fn stays(self, network: &Network, group: usize) -> bool {
        group + self.staying >= network.groups.len()
    }

    /// Whether all state of a group is on the device.
    pub(crate) fn has_state(self, network: &Network, group: usize) -> bool {
        group >= self.first_with_state(network)
    }

    /// The first group whose state is on the device; their number if there is none.
    pub(crate) fn first_with_state(self, network: &Network) -> usize {
        network.groups.len() - self.state
    }
}

impl DeviceWeights {
    pub(crate) fn new(backend: &Backend, network: &Network, room: DeviceRoom) -> Result<Self> {
        let total = room.weights(network);
        if total == 0 {
            return Ok(Self::default());
        }
        let arena = backend.device.arena(total as usize)?;
        let (slots, bytes) = room.slots(network);
        let slots = (0..slots).map(|_| Ok(arena.alloc(bytes as usize)?)).collect::<Result<_>>()?;
        let place = |(index, group): (usize, &crate::network::ParamGroup)| {
            let place = || Ok(Place::Stale(arena.alloc(weight_bytes(network, group.elements) as usize)?));
            let wanted = room.stays(network, index) && !room.has_state(network, index);
            wanted.then(place).transpose()
        };
        let places = network.groups.iter().enumerate().map(place).collect::<Result<_>>()?;
        Ok(Self { slots, places })
    }

    /// What there is, for a schedule; made again if one that failed has lost it. With the weights of `state` on the device.
    pub(crate) fn take(
        &mut self,
        backend: &Backend,
        network: &Network,
        room: DeviceRoom,
        state: Option<&DeviceState>,
    ) -> Result<Self> {
        let mut taken = std::mem::take(self);
        if taken.slots.is_empty() && taken.places.is_empty() {
            taken = Self::new(backend, network, room)?;
        }
        if let Some(state) = state {
            taken.places.resize_with(network.groups.len(), || None);
            for (group, weights) in state.weights() {
                taken.places[group] = Some(Place::Here(weights?));
            }
        }
        Ok(taken)
    }

    /// After a schedule: weights of `state` on the device are its own again.
    pub(crate) fn let_go(&mut self, state: Option<&DeviceState>) {
        let Some(state) = state else { return };
        for (group, place) in self.places.iter_mut().enumerate() {
            if state.has(group) {
                *place = None;
            }
        }
    }

    /// After an update: what is on the device is old.
    pub(crate) fn outdate(&mut self) {
        for place in self.places.iter_mut().flatten() {
            *place = match std::mem::replace(place, Place::Coming) {
                Place::Here(region) => Place::Stale(
                    Arc::into_inner(region).expect("a group's weights are not used between steps"),
                ),
                other => other,
            };
        }
    }
}

/// What an arena takes for the weights of so many elements.
fn weight_bytes(network: &Network, elements: usize) -> u64 {
    region_bytes((elements * network.element_bytes) as u64)
}
