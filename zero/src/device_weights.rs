//! Weights in the memory of a device that has its own.
//!
//! A few slots as long as the largest group that streams take turns; they are filled before each use. The last groups may have
//! places of their own, which are filled once after every update: a step then reads their weights and sends them up once instead
//! of twice, and generation not at all. Which groups stay changes no result.

use crate::network::Network;
use crate::{Backend, Placement, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use terrace_device::Region;

/// Memory of the device for weights; none where kernels read host memory.
#[derive(Debug, Default)]
pub(crate) struct DeviceWeights {
    /// Any group takes any slot.
    pub(crate) slots: VecDeque<Region>,
    /// By group, those that stay.
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
}

impl DeviceRoom {
    /// Room for `staying` groups, all of them if nothing else holds the weights, and slots for the others.
    pub(crate) fn of(
        backend: &Backend,
        network: &Network,
        placement: Placement,
        slots: usize,
        staying: usize,
    ) -> Self {
        if backend.device.unified() {
            return Self { slots: 0, staying: 0 };
        }
        let groups = network.groups.len();
        let staying = if placement == Placement::None { groups } else { staying.min(groups) };
        Self { slots: slots.min(groups - staying), staying }
    }

    /// Number of slots and bytes of each.
    pub(crate) fn slots(self, network: &Network) -> (u64, u64) {
        let streaming = network.groups.len() - self.staying;
        let bytes =
            network.groups[..streaming].iter().map(|group| region_bytes(network, group.elements)).max();
        (self.slots as u64, bytes.unwrap_or(0) as u64)
    }

    /// Bytes of all places.
    pub(crate) fn places(self, network: &Network) -> u64 {
        let staying = &network.groups[network.groups.len() - self.staying..];
        staying.iter().map(|group| region_bytes(network, group.elements) as u64).sum()
    }

    /// Bytes in all.
    pub(crate) fn bytes(self, network: &Network) -> u64 {
        let (slots, bytes) = self.slots(network);
        slots * bytes + self.places(network)
    }

    /// Whether a group has a place.
    pub(crate) fn stays(self, network: &Network, group: usize) -> bool {
        group + self.staying >= network.groups.len()
    }
}

impl DeviceWeights {
    pub(crate) fn new(backend: &Backend, network: &Network, room: DeviceRoom) -> Result<Self> {
        let total = room.bytes(network);
        if total == 0 {
            return Ok(Self::default());
        }
        let arena = backend.device.arena(total as usize)?;
        let (slots, bytes) = room.slots(network);
        let slots = (0..slots).map(|_| Ok(arena.alloc(bytes as usize)?)).collect::<Result<_>>()?;
        let place = |(index, group): (usize, &crate::network::ParamGroup)| {
            let place = || Ok(Place::Stale(arena.alloc(region_bytes(network, group.elements))?));
            room.stays(network, index).then(place).transpose()
        };
        let places = network.groups.iter().enumerate().map(place).collect::<Result<_>>()?;
        Ok(Self { slots, places })
    }

    /// What there is, for a schedule; made again if one that failed has lost it.
    pub(crate) fn take(&mut self, backend: &Backend, network: &Network, room: DeviceRoom) -> Result<Self> {
        let Self { slots, places } = std::mem::take(self);
        if slots.is_empty() && places.is_empty() {
            return Self::new(backend, network, room);
        }
        Ok(Self { slots, places })
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

/// What an arena takes for so many elements.
fn region_bytes(network: &Network, elements: usize) -> usize {
    (elements * network.element_bytes).next_multiple_of(256).max(256)
}
