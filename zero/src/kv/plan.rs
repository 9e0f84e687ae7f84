//! What is planned for keys and values of which some may be away from the device.

use super::layout::KvLayout;
use crate::network::Network;
use crate::{EngineConfig, Result};
use terrace_device::{Arena, Region};
use terrace_tiers::{MemoryPlan, Regions, Tier};

/// Windows of a device with its own memory: one in use, and one that is filled or emptied.
const WINDOWS: usize = 2;

/// How many blocks' keys and values are not at home in the lowest tier that they may be in: of blocks with any, the first so many
/// stay on the device, and so many after them in host memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct KvRoom {
    pub(crate) device: usize,
    pub(crate) host: usize,
}

/// What is planned for caches that are not all on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KvPlan {
    pub(super) layouts: Vec<Option<KvLayout>>,
    /// Where the keys and values of every block are between passes; that of a block without any says nothing.
    pub(super) tiers: Vec<Tier>,
    pub(super) unified: bool,
}

impl KvPlan {
    /// `None` where caches are on the device, or there are none.
    pub(crate) fn new(config: &EngineConfig, network: &Network, unified: bool, room: KvRoom) -> Option<Self> {
        let lowest = config.kv_place(unified);
        if lowest == Tier::Device || config.limits.cache_length == 0 {
            return None;
        }
        let layouts = KvLayout::all(network, config.dtype, config.limits);
        let before = |block: usize| layouts[..block].iter().flatten().count();
        let tier = |block| match before(block) {
            index if index < room.device => Tier::Device,
            index if index < room.device + room.host => Tier::Host,
            _ => lowest,
        };
        let tiers = (0..layouts.len()).map(tier).collect();
        layouts.iter().any(Option::is_some).then_some(Self { layouts, tiers, unified })
    }

    pub(crate) fn layout(&self, block: usize) -> Option<KvLayout> {
        self.layouts[block]
    }

    /// Where the keys and values of a block are between passes.
    pub(crate) fn tier(&self, block: usize) -> Tier {
        self.tiers[block]
    }

    /// The blocks whose keys and values are on `tier` between passes.
    pub(super) fn blocks(&self, tier: Tier) -> impl Iterator<Item = usize> {
        (0..self.layouts.len())
            .filter(move |&block| self.layouts[block].is_some() && self.tiers[block] == tier)
    }

    /// The number of those blocks.
    pub(crate) fn count(&self, tier: Tier) -> usize {
        self.blocks(tier).count()
    }

    /// Bytes of the keys and values of one position that are on `tier`.
    pub(crate) fn position_bytes(&self, tier: Tier) -> u64 {
        self.blocks(tier)
            .filter_map(|block| self.layouts[block])
            .map(|layout| layout.bytes_of(1) as u64)
            .sum()
    }

    /// Of the largest block.
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.layouts.iter().flatten().map(KvLayout::bytes).max().unwrap_or(0)
    }

    /// Takes memory of the arena: of the blocks that stay, and windows.
    pub(crate) fn take(&self, arena: &Arena) -> Result<(Vec<Option<Region>>, Vec<Region>)> {
        let stay = |block: usize| {
            let layout = self.layouts[block].filter(|_| self.tiers[block] == Tier::Device);
            layout.map(|layout| arena.alloc(layout.bytes())).transpose()
        };
        let staying = (0..self.layouts.len()).map(stay).collect::<std::result::Result<_, _>>()?;
        let away = self.count(Tier::Host) + self.count(Tier::Disk);
        let windows = if self.unified { 0 } else { WINDOWS.min(away) };
        let windows = (0..windows).map(|_| arena.alloc(self.buffer_bytes()));
        Ok((staying, windows.collect::<std::result::Result<_, _>>()?))
    }

    /// Buffers in host memory of the blocks on disk.
    pub(super) fn buffers(&self) -> usize {
        match (self.count(Tier::Disk), self.unified) {
            (0, _) => 0,
            (_, true) => 3,
            (_, false) => 4,
        }
    }

    /// Adds what is not in the arena.
    pub(crate) fn add_to(&self, memory: &mut MemoryPlan, config: &EngineConfig) -> Result {
        let (bytes, on_disk) = (self.buffer_bytes(), self.count(Tier::Disk));
        memory.add(Tier::Host, "key/value cache", self.count(Tier::Host) as u64, bytes as u64);
        if on_disk > 0 {
            memory.add(
                Tier::Host,
                "key/value cache in flight and in use",
                self.buffers() as u64,
                bytes as u64,
            );
            memory.add(
                Tier::Host,
                "checksums of the key/value cache",
                1,
                Regions::table_bytes(on_disk, bytes),
            );
            let striping = config.striping()?;
            let stored = Regions::bytes_per_dir(&striping, on_disk, bytes);
            crate::plan::add_disk(memory, "key/value cache", &striping, &stored);
        }
        Ok(())
    }
}
