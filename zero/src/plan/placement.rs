//! What goes where: every kind of every group, and the tier that it waits in between uses.
//!
//! Said with the plan's windows and by the functions that the engine asks when it takes memory, so that a table of it is what a run
//! does. [`MemoryPlan`](terrace_tiers::MemoryPlan) says what tiers take in all, slots and scratch included; here is what those bytes
//! are of.

use crate::activations::Activations;
use crate::carry;
use crate::kv::{KvLayout, KvPlan};
use crate::network::Network;
use crate::plan::EnginePlan;
use crate::rounds::Rounds;
use crate::state::StateKinds;
use crate::{Engine, EngineConfig, Mode, Placement};
use std::fmt;
use terrace_tiers::{BlobKind, Tier};

/// Where one group of parameters is, and what the block that owns it leaves behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlacement {
    /// Of the group and its block.
    pub name: String,
    /// All that there is of it: state first, in the order of the update.
    pub parts: Vec<Placed>,
}

/// One kind of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// What it is.
    pub content: Content,
    /// Bytes of it, once, with the group's padding; of several [`Ranks`](crate::Ranks) those of one. Of what is computed again: those
    /// that it would take.
    pub bytes: u64,
    /// Where it is.
    pub place: Place,
}

/// What of a group can be somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Weights and optimizer state.
    State(BlobKind),
    /// Between backward and update. While a block's backward adds to it, it is in the device's arena, in f32.
    Gradient,
    /// In f32, between micro-batches that go through the model one after the other.
    GradientSum,
    /// What the block reads, which backward needs again: of the micro-batches that go together.
    Input,
    /// What the block computes on the way to its output, of the same micro-batches.
    Activations,
    /// Keys and values of all sequences.
    Keys,
    /// What a recurrent block carries of all sequences.
    Carried,
}

/// Where something waits between uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: backward computes it again.
    Recomputed,
    /// In a tier.
    In {
        /// The tier that has it.
        home: Tier,
        /// Host memory has a copy, which is read instead.
        host_copy: bool,
        /// The device has a copy, made once after every update.
        device_copy: bool,
        /// A save writes it to disk, and nothing else does.
        saved: bool,
        /// In memory that the group's gradient has at other times.
        in_turns: bool,
    },
}

impl Content {
    /// In words a user understands, those of the memory plan.
    pub fn words(self) -> &'static str {
        match self {
            Self::State(kind) => kind.words(),
            Self::Gradient => "gradients",
            Self::GradientSum => "sums of gradients between micro-batches",
            Self::Input => "inputs of blocks",
            Self::Activations => "activations of blocks",
            Self::Keys => "key/value cache",
            Self::Carried => "recurrent state",
        }
    }
}

impl Place {
    fn tier(home: Tier) -> Self {
        Self::In { home, host_copy: false, device_copy: false, saved: false, in_turns: false }
    }
}

/// `disk + host copy`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::In { home, host_copy, device_copy, saved, in_turns } = *self else {
            return f.pad("recomputed");
        };
        let mut words = String::from(match home {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        });
        let more = [
            (host_copy, " + host copy"),
            (device_copy, " + device copy"),
            (saved, " + disk at saves"),
            (in_turns, ", in turns"),
        ];
        more.iter().filter(|(there, _)| *there).for_each(|(_, more)| words += more);
        f.pad(&words)
    }
}

impl Engine {
    /// What goes where, by group.
    pub fn placement(&self) -> Vec<GroupPlacement> {
        let unified = self.backend.device.unified();
        Placer::new(&self.config, &self.network, &self.kinds, &self.plan, unified).all()
    }
}

/// Says where things are.
pub(crate) struct Placer<'a> {
    config: &'a EngineConfig,
    network: &'a Network,
    kinds: &'a StateKinds,
    plan: &'a EnginePlan,
    rounds: Rounds,
    layouts: Vec<Option<KvLayout>>,
    kv: Option<KvPlan>,
    unified: bool,
}

impl<'a> Placer<'a> {
    pub(crate) fn new(
        config: &'a EngineConfig,
        network: &'a Network,
        kinds: &'a StateKinds,
        plan: &'a EnginePlan,
        unified: bool,
    ) -> Self {
        let rounds = Rounds::new(config.accumulation, config.limits, network);
        let kv = KvPlan::new(config, network, unified, plan.windows.kv_room);
        let layouts = KvLayout::all(network, config.dtype, config.limits);
        Self { config, network, kinds, plan, rounds, layouts, kv, unified }
    }

    /// Of every group.
    pub(crate) fn all(&self) -> Vec<GroupPlacement> {
        (0..self.network.groups.len()).map(|group| self.of(group)).collect()
    }

    fn of(&self, group: usize) -> GroupPlacement {
        // Those of a rank, if there are several.
        let elements = self.plan.spec.groups[group].elements;
        let mut parts: Vec<Placed> = (0..self.kinds.blobs.len())
            .map(|kind| Placed {
                content: Content::State(self.kinds.blobs[kind].kind),
                bytes: self.kinds.blobs[kind].bytes(elements),
                place: self.state(group, kind),
            })
            .collect();
        if self.config.training.is_some() {
            let bytes = elements * self.config.dtype.size() as u64;
            parts.push(Placed { content: Content::Gradient, bytes, place: self.gradient(group) });
            if self.rounds.are_several() {
                let place = Place::tier(self.parked());
                parts.push(Placed { content: Content::GradientSum, bytes: elements * 4, place });
            }
            parts.extend(self.input(group));
            parts.extend(self.activations(group));
        }
        parts.extend(self.keys(group));
        parts.extend(self.carried(group));
        parts.retain(|part| part.bytes > 0);
        GroupPlacement { name: self.network.groups[group].name.clone(), parts }
    }

    fn state(&self, group: usize, kind: usize) -> Place {
        let (room, on_disk) = (self.plan.windows.device_room, self.config.placement == Placement::Disk);
        if room.has_state(self.network, group) {
            return Place::In {
                home: Tier::Device,
                host_copy: false,
                device_copy: false,
                saved: on_disk,
                in_turns: false,
            };
        }
        Place::In {
            home: if on_disk { Tier::Disk } else { Tier::Host },
            host_copy: on_disk && self.plan.windows.caching.has(group, kind, self.kinds),
            device_copy: kind == self.kinds.weight && room.stays(self.network, group),
            saved: false,
            in_turns: false,
        }
    }

    fn gradient(&self, group: usize) -> Place {
        let here = self.plan.windows.device_room.has_state(self.network, group);
        Place::tier(if here { Tier::Device } else { self.parked() })
    }

    /// Where gradients are that come to the host.
    fn parked(&self) -> Tier {
        if self.plan.windows.gradients_on_disk { Tier::Disk } else { Tier::Host }
    }

    /// What comes out of the block before.
    fn input(&self, block: usize) -> Option<Placed> {
        let (below, limits, windows) = (block.checked_sub(1)?, self.config.limits, &self.plan.windows);
        let signal =
            self.network.output(below, limits.sequences, limits.length, self.config.dtype, Mode::Train);
        let spills = windows.activations_on_disk && Activations::can_spill(below, self.network.last());
        let stays = windows.signals_stay && block == self.network.last();
        let home = if spills { Tier::Disk } else { Tier::Host };
        let place = Place::In { home, host_copy: false, device_copy: stays, saved: false, in_turns: false };
        let bytes = (signal.bytes() * self.rounds.together) as u64;
        Some(Placed { content: Content::Input, bytes, place })
    }

    /// None of a block that leaves nothing for backward.
    fn activations(&self, block: usize) -> Option<Placed> {
        let kept = self.plan.blocks.get(block)?.kept_bytes?;
        let windows = &self.plan.windows;
        let place = if windows.keeping.has(block) {
            let in_turns = windows.turn_bytes.get(block).is_some_and(|&bytes| bytes > 0);
            Place::In { home: self.arena(), host_copy: false, device_copy: false, saved: false, in_turns }
        } else if windows.keeping.sends_to_host(block) {
            Place::tier(Tier::Host)
        } else if windows.keeping.sends_to_disk(block) {
            Place::tier(Tier::Disk)
        } else {
            Place::Recomputed
        };
        let bytes = (kept * self.rounds.together) as u64;
        Some(Placed { content: Content::Activations, bytes, place })
    }

    fn keys(&self, block: usize) -> Option<Placed> {
        let limits = self.config.limits;
        let layout = self.layouts[block].filter(|_| limits.cache_length > 0)?;
        let tier = self.kv.as_ref().map_or(Tier::Device, |kv| kv.tier(block));
        let home = if tier == Tier::Device { self.arena() } else { tier };
        Some(Placed { content: Content::Keys, bytes: layout.bytes() as u64, place: Place::tier(home) })
    }

    fn carried(&self, block: usize) -> Option<Placed> {
        let EngineConfig { limits, dtype, .. } = self.config;
        let spec = self.network.blocks.get(block)?.carries().filter(|_| limits.cache_length > 0)?;
        let bytes = carry::bytes(&spec, *dtype, limits.sequences);
        Some(Placed { content: Content::Carried, bytes, place: Place::tier(self.arena()) })
    }

    fn arena(&self) -> Tier {
        if self.unified { Tier::Host } else { Tier::Device }
    }
}
