//! Keys and values that are in host memory or on disk between the uses of a pass.
//!
//! Every block has a buffer of its own, or a region of a scratch volume, laid out as in memory. A pass goes through the blocks in
//! order and, for each, brings the positions that its sequences have, lets the kernels read them and append, and takes what was
//! added back. Of a device with its own memory:
//!
//! | | window | host memory | disk |
//! |---|---|---|---|
//! | on host | upload of b+1 beside compute of b | all buffers | |
//! | on disk | the same | buffers of b, b+1 and b+2, and one that is written | a region a block |
//!
//! A unified device computes in the buffer that the disk was read into: b, b+1, and one that is written. Positions that a pass does
//! not need are not moved, and every position is written once (and with it, on disk, the rest of its 4 KiB).

use super::layout::KvLayout;
use crate::lane::Lane;
use crate::network::Network;
use crate::{Backend, EngineConfig, KvSlot, Result};
use std::collections::VecDeque;
use std::ops::Range;
use terrace_device::{BytesMut, Download, Region, Upload, UploadSource};
use terrace_kernels::View;
use terrace_tiers::{Lease, MemoryPlan, PendingBlocks, Pool, Regions, Tier};

/// Windows of a device with its own memory: one in use, and one that is filled or emptied.
pub(crate) const WINDOWS: usize = 2;

/// What is planned for caches that are not on the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwayPlan {
    pub(crate) tier: Tier,
    layouts: Vec<Option<KvLayout>>,
    unified: bool,
}

impl AwayPlan {
    /// `None` where caches are on the device, or there are none.
    pub(crate) fn new(config: &EngineConfig, network: &Network, unified: bool) -> Option<Self> {
        let tier = config.kv_place(unified);
        if tier == Tier::Device || config.limits.cache_length == 0 {
            return None;
        }
        let layouts = KvLayout::all(network, config.dtype, config.limits);
        layouts.iter().any(Option::is_some).then_some(Self { tier, layouts, unified })
    }

    pub(crate) fn layout(&self, block: usize) -> Option<KvLayout> {
        self.layouts[block]
    }

    /// Blocks with a cache.
    fn count(&self) -> usize {
        self.layouts.iter().flatten().count()
    }

    /// Of the largest block.
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.layouts.iter().flatten().map(KvLayout::bytes).max().unwrap_or(0)
    }

    /// Windows in the device's memory.
    pub(crate) fn windows(&self) -> usize {
        if self.unified { 0 } else { WINDOWS.min(self.count()) }
    }

    /// Buffers in host memory.
    fn buffers(&self) -> usize {
        match (self.tier, self.unified) {
            (Tier::Disk, true) => 3,
            (Tier::Disk, false) => 4,
            _ => self.count(),
        }
    }

    /// Adds what is not in the arena.
    pub(crate) fn add_to(&self, memory: &mut MemoryPlan, config: &EngineConfig) -> Result {
        let (buffers, bytes) = (self.buffers() as u64, self.buffer_bytes() as u64);
        if self.tier == Tier::Host {
            memory.add(Tier::Host, "key/value cache", buffers, bytes);
            return Ok(());
        }
        memory.add(Tier::Host, "key/value cache in flight and in use", buffers, bytes);
        let table = Regions::table_bytes(self.count(), self.buffer_bytes());
        memory.add(Tier::Host, "checksums of the key/value cache", 1, table);
        let striping = config.striping()?;
        let stored = Regions::bytes_per_dir(&striping, self.count(), self.buffer_bytes());
        crate::plan::add_disk(memory, "key/value cache", &striping, &stored);
        Ok(())
    }
}

/// The caches of all blocks.
#[derive(Debug)]
pub(crate) struct Away {
    plan: AwayPlan,
    home: Home,
    /// Windows that are not in use.
    windows: Vec<Region>,
}

#[derive(Debug)]
enum Home {
    /// Of every block, unless it is in use.
    Host(Vec<Option<Lease>>),
    Disk(Box<OnDisk>),
}

#[derive(Debug)]
struct OnDisk {
    regions: Regions,
    /// Buffers that regions are read into.
    pool: Pool,
    /// The region of every block.
    places: Vec<usize>,
    /// Regions in the order of their last writes.
    writing: VecDeque<usize>,
}

impl Away {
    pub(crate) fn new(plan: AwayPlan, config: &EngineConfig, backend: &Backend, lane: &Lane) -> Result<Self> {
        let (bytes, device) = (plan.buffer_bytes(), &*backend.device);
        let home = if plan.tier == Tier::Host {
            let pool = Pool::new("key/value cache", plan.buffers(), bytes)?.pinned_for(device);
            let buffer = |layout: &Option<KvLayout>| layout.map(|_| pool.acquire(bytes));
            Home::Host(plan.layouts.iter().map(buffer).collect())
        } else {
            let (io, striping) = (&backend.io, config.striping()?);
            let regions = Regions::create(io, &striping, "keys-and-values.bin", plan.count(), bytes)?;
            let name = "key/value cache in flight";
            let pool = Pool::new_registered(name, plan.buffers(), bytes, io)?.pinned_for(device);
            let before = |block| plan.layouts[..block].iter().flatten().count();
            let places = (0..plan.layouts.len()).map(before).collect();
            Home::Disk(Box::new(OnDisk { regions, pool, places, writing: VecDeque::new() }))
        };
        let windows = (0..plan.windows()).map(|_| lane.arena.alloc(bytes));
        let windows = windows.collect::<std::result::Result<_, _>>()?;
        Ok(Self { plan, home, windows })
    }

    /// Begins a pass over sequences that have the positions `used` and get the positions `added`, counted through all pages.
    pub(crate) fn pass<'a>(
        &'a mut self,
        lane: &'a Lane,
        used: Vec<Range<usize>>,
        added: Vec<Range<usize>>,
    ) -> Result<AwayPass<'a>> {
        if !self.plan.unified {
            lane.begin_keys()?;
        }
        let blocks = (0..self.plan.layouts.len()).filter(|&block| self.plan.layouts[block].is_some());
        let blocks: VecDeque<usize> = blocks.collect();
        let mut pass = AwayPass {
            unread: blocks.clone(),
            unsent: blocks,
            away: self,
            lane,
            used,
            added,
            reading: VecDeque::new(),
            coming: None,
            here: None,
            going: None,
        };
        pass.read_ahead()?;
        Ok(pass)
    }
}

/// A pass through the blocks: [`enter`](Self::enter), kernels on the [`slot`](Self::slot), [`leave`](Self::leave).
#[derive(Debug)]
pub(crate) struct AwayPass<'a> {
    away: &'a mut Away,
    lane: &'a Lane,
    used: Vec<Range<usize>>,
    added: Vec<Range<usize>>,
    /// Blocks that no read was started for.
    unread: VecDeque<usize>,
    /// Blocks that are yet to come to where kernels are.
    unsent: VecDeque<usize>,
    reading: VecDeque<(usize, PendingBlocks)>,
    coming: Option<(usize, Upload<Lease>)>,
    here: Option<(usize, Here)>,
    going: Option<(usize, Download<Lease>)>,
}

/// What kernels work on.
#[derive(Debug)]
enum Here {
    Host(Lease),
    Device(Region, UploadSource<Lease>),
}

impl AwayPass<'_> {
    /// Orders compute after what brings the keys and values of `block`.
    pub(crate) fn enter(&mut self, block: usize) -> Result {
        if self.away.plan.layouts[block].is_none() {
            return Ok(());
        }
        if self.away.plan.unified {
            let first = self.unsent.pop_front();
            assert_eq!(first, Some(block), "blocks are entered in order");
            let lease = self.fetched(block)?;
            self.here = Some((block, Here::Host(lease)));
            return self.read_ahead();
        }
        if self.coming.is_none() {
            self.send()?;
        }
        let (coming, upload) = self.coming.take().expect("just sent");
        assert_eq!(coming, block, "blocks are entered in order");
        let (window, source) = upload.ready_on(&*self.lane.compute)?;
        self.here = Some((block, Here::Device(window, source)));
        Ok(())
    }

    /// The keys and values of a block that was entered.
    pub(crate) fn slot<'b>(&'b mut self, block: usize, pages: View<'b>) -> Option<KvSlot<'b>> {
        let layout = self.away.plan.layouts[block]?;
        let (_, here) = self.here.as_mut().filter(|(entered, _)| *entered == block)?;
        let memory = match here {
            Here::Host(lease) => BytesMut::from_host(lease),
            Here::Device(window, _) => window.bytes_mut(),
        };
        let bytes = layout.bytes();
        Some(layout.slot(memory.slice(0, bytes), pages))
    }

    /// Takes back what kernels that were enqueued append to `block`, and sends the next.
    pub(crate) fn leave(&mut self, block: usize) -> Result {
        let Some(layout) = self.away.plan.layouts[block] else { return Ok(()) };
        let (entered, here) = self.here.take().expect("a block is entered before it is left");
        assert_eq!(entered, block, "the block that was entered is left");
        match here {
            Here::Host(lease) => self.away.store(block, lease, &self.added),
            Here::Device(window, source) => {
                let lease = source.release()?;
                let download = self.lane.take_keys(block, window, lease, &layout.parts(&self.added))?;
                // The block before has been computed by now, or is about to be.
                let before = self.going.replace((block, download));
                self.settle(before)?;
                if self.unsent.is_empty() { Ok(()) } else { self.send() }
            }
        }
    }

    /// Takes back what is still under way; writes to disk go on.
    pub(crate) fn finish(mut self) -> Result {
        let last = self.going.take();
        self.settle(last)
    }

    /// Starts the upload of the next block.
    fn send(&mut self) -> Result {
        let block = self.unsent.pop_front().expect("a block is left to be sent");
        let lease = self.fetched(block)?;
        self.read_ahead()?;
        let window = self.away.windows.pop().expect("one window is in use and one is free");
        let layout = self.away.plan.layouts[block].expect("only blocks with a cache are sent");
        let upload = self.lane.send_keys(block, lease, window, &layout.parts(&self.used))?;
        self.coming = Some((block, upload));
        Ok(())
    }

    fn settle(&mut self, gone: Option<(usize, Download<Lease>)>) -> Result {
        let Some((block, download)) = gone else { return Ok(()) };
        let (window, lease) = download.wait()?;
        self.away.windows.push(window);
        self.away.store(block, lease, &self.added)
    }

    /// The buffer of `block` with the positions that are used.
    fn fetched(&mut self, block: usize) -> Result<Lease> {
        if let Home::Host(buffers) = &mut self.away.home {
            return Ok(buffers[block].take().expect("a buffer that is not in use is at home"));
        }
        if self.reading.is_empty() {
            // All buffers were taken, and one comes back as soon as it is written.
            self.read_next(true)?;
        }
        let (read, pending) = self.reading.pop_front().expect("just started");
        assert_eq!(read, block, "blocks are read in order");
        let Home::Disk(disk) = &self.away.home else { unreachable!("host memory returned above") };
        Ok(disk.regions.arrive(pending)?)
    }

    /// Starts reading as many blocks as there are buffers for.
    fn read_ahead(&mut self) -> Result {
        while self.read_next(false)? {}
        Ok(())
    }

    /// Starts reading the next block, if there is one and a buffer, which may be waited for.
    fn read_next(&mut self, wait: bool) -> Result<bool> {
        let Home::Disk(disk) = &mut self.away.home else { return Ok(false) };
        let Some(&block) = self.unread.front() else { return Ok(false) };
        let Some(lease) = disk.buffer(wait)? else { return Ok(false) };
        let layout = self.away.plan.layouts[block].expect("only blocks with a cache are read");
        let (used, added) = (layout.parts(&self.used), layout.parts(&self.added));
        let pending = disk.regions.read(disk.places[block], lease, &used, &added)?;
        self.unread.pop_front();
        self.reading.push_back((block, pending));
        Ok(true)
    }
}

impl OnDisk {
    /// A buffer if there is one, which may be waited for.
    fn buffer(&mut self, wait: bool) -> Result<Option<Lease>> {
        let bytes = self.regions.region_bytes();
        loop {
            if let Some(lease) = self.pool.try_acquire(bytes) {
                return Ok(Some(lease));
            }
            if !wait {
                return Ok(None);
            }
            // A simulated disk works only while somebody waits for it.
            match self.writing.pop_front() {
                Some(oldest) => self.regions.wait_write(oldest)?,
                None => return Ok(Some(self.pool.acquire(bytes))),
            }
        }
    }

    fn write(&mut self, block: usize, lease: Lease, parts: &[Range<usize>]) -> Result {
        let place = self.places[block];
        self.regions.write(place, lease, parts)?;
        self.writing.retain(|&other| other != place);
        self.writing.push_back(place);
        Ok(())
    }
}

impl Away {
    /// Puts the buffer of a block away, in which the positions `added` are new.
    fn store(&mut self, block: usize, lease: Lease, added: &[Range<usize>]) -> Result {
        let layout = self.plan.layouts[block].expect("only blocks with a cache have a buffer");
        match &mut self.home {
            Home::Host(buffers) => buffers[block] = Some(lease),
            Home::Disk(disk) => disk.write(block, lease, &layout.parts(added))?,
        }
        Ok(())
    }
}
