//! Weights in the memory of a device that has its own.
//!
//! Where they stream, a few slots as long as the largest group take turns. Where they stay (`Placement::None`), every
//! group has a place, which is filled again after every update.

use crate::network::Network;
use crate::{Backend, Placement, Result};
use std::collections::VecDeque;
use std::sync::Arc;
use terrace_device::{Region, Upload};
use terrace_tiers::SharedBytes;

/// Memory of the device for weights.
#[derive(Debug, Default)]
pub(crate) enum DeviceWeights {
    /// Kernels read host memory.
    #[default]
    Unified,
    /// Any group takes any slot.
    Slots(VecDeque<Region>),
    /// A place for each group.
    Resident(Vec<Place>),
}

/// A group's place.
#[derive(Debug)]
pub(crate) enum Place {
    /// It holds old weights, or none.
    Stale(Region),
    /// The weights are on their way.
    Coming(Upload<SharedBytes>),
    /// They are there.
    Here(Arc<Region>),
    /// Between two of the others.
    Moving,
}

/// How much of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceRoom {
    None,
    Slots(usize),
    Resident,
}

impl DeviceRoom {
    pub(crate) fn of(backend: &Backend, placement: Placement, slots: usize) -> Self {
        match placement {
            _ if backend.device.unified() => Self::None,
            Placement::None => Self::Resident,
            Placement::Host | Placement::Disk => Self::Slots(slots),
        }
    }

    /// Number of pieces and bytes of each, in the sum.
    pub(crate) fn bytes(self, network: &Network) -> (u64, u64) {
        match self {
            Self::None => (0, 0),
            Self::Slots(slots) => (slots as u64, region_bytes(network, network.group_elements_max()) as u64),
            Self::Resident => (1, place_bytes(network).sum::<usize>() as u64),
        }
    }
}

impl DeviceWeights {
    pub(crate) fn new(backend: &Backend, network: &Network, room: DeviceRoom) -> Result<Self> {
        let (pieces, bytes) = room.bytes(network);
        if room == DeviceRoom::None {
            return Ok(Self::Unified);
        }
        let arena = backend.device.arena((pieces * bytes) as usize)?;
        if room == DeviceRoom::Resident {
            let places = network.groups.iter().map(|group| {
                let region = arena.alloc(group.elements * network.element_bytes)?;
                Ok(Place::Stale(region))
            });
            return Ok(Self::Resident(places.collect::<Result<_>>()?));
        }
        let slots = (0..pieces).map(|_| Ok(arena.alloc(bytes as usize)?));
        Ok(Self::Slots(slots.collect::<Result<_>>()?))
    }

    /// After an update: what is on the device is old.
    pub(crate) fn outdate(&mut self) {
        let Self::Resident(places) = self else { return };
        for place in places {
            *place = match std::mem::replace(place, Place::Moving) {
                Place::Here(region) => Place::Stale(
                    Arc::into_inner(region).expect("a group's weights are not used between steps"),
                ),
                other => other,
            };
        }
    }
}

fn place_bytes(network: &Network) -> impl Iterator<Item = usize> {
    network.groups.iter().map(|group| region_bytes(network, group.elements))
}

/// What an arena takes for so many elements.
fn region_bytes(network: &Network, elements: usize) -> usize {
    (elements * network.element_bytes).next_multiple_of(256).max(256)
}
