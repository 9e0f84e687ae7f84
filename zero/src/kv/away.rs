//! Keys and values of which some blocks' are in host memory or on disk between the uses of a pass.
//!
//! The first blocks' stay where kernels are, as many as there is room for. Every other block has a buffer of its own in host memory,
//! or a region of a scratch volume, laid out as the window that kernels work on. A pass goes through the blocks in order and, for
//! each, brings the positions that its sequences have, lets the kernels read them and append, and takes what was added back. With a
//! device that has its own memory:
//!
//! | block | on the device | in host memory | on disk |
//! |---|---|---|---|
//! | stays | its keys and values | | |
//! | on host | two windows: b+1 is sent beside compute of b | its buffer | |
//! | on disk | the same | buffers of b, b+1 and b+2, and one that is written | its region |
//!
//! A unified device computes in the buffer that the disk was read into: b, b+1, and one that is written. Positions that a pass does
//! not need are not moved, and every position is written once (and with it, on disk, the rest of its 4 KiB).

use super::plan::KvPlan;
use crate::lane::Lane;
use crate::{Backend, EngineConfig, EngineError, KvSlot, Result};
use std::collections::VecDeque;
use std::ops::Range;
use terrace_aio::FileId;
use terrace_device::{BytesMut, Download, Region, Upload, UploadSource};
use terrace_kernels::View;
use terrace_tiers::{Lease, PendingBlocks, Pool, Regions, Tier};

/// The caches of all blocks.
#[derive(Debug)]
pub(crate) struct Away {
    plan: KvPlan,
    /// Of the blocks that stay on the device.
    staying: Vec<Option<Region>>,
    /// Of the blocks in host memory, unless they are in use.
    buffers: Vec<Option<Lease>>,
    disk: Option<OnDisk>,
    /// Windows that are not in use.
    windows: Vec<Region>,
    /// A pass has what it took. One that fails does not give it back.
    is_taken: bool,
}

#[derive(Debug)]
struct OnDisk {
    regions: Regions,
    /// Buffers that regions are read into.
    pool: Pool,
    /// The region of every block that has one.
    places: Vec<usize>,
    /// Regions in the order of their last writes.
    writing: VecDeque<usize>,
}

impl Away {
    pub(crate) fn new(plan: KvPlan, config: &EngineConfig, backend: &Backend, lane: &Lane) -> Result<Self> {
        let (bytes, device) = (plan.buffer_bytes(), &*backend.device);
        let mut buffers: Vec<Option<Lease>> = plan.layouts.iter().map(|_| None).collect();
        if plan.count(Tier::Host) > 0 {
            let pool = Pool::new("key/value cache", plan.count(Tier::Host), bytes)?.pinned_for(device);
            plan.blocks(Tier::Host).for_each(|block| buffers[block] = Some(pool.acquire(bytes)));
        }
        let disk = match plan.count(Tier::Disk) {
            0 => None,
            count => {
                let (io, striping) = (&backend.io, config.striping()?);
                let regions = Regions::create(io, &striping, "keys-and-values.bin", count, bytes)?;
                let name = "key/value cache in flight";
                let pool = Pool::new(name, plan.buffers(), bytes)?.pinned_for(device).registered_with(io);
                let before = |block| plan.blocks(Tier::Disk).take_while(|&other| other < block).count();
                let places = (0..plan.layouts.len()).map(before).collect();
                Some(OnDisk { regions, pool, places, writing: VecDeque::new() })
            }
        };
        let (staying, windows) = plan.take(&lane.arena)?;
        Ok(Self { plan, staying, buffers, disk, windows, is_taken: false })
    }

    /// The block whose keys and values are at `offset` of a file.
    pub(crate) fn block_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let region = self.disk.as_ref()?.regions.region_at(file, offset)?;
        self.plan.blocks(Tier::Disk).nth(region)
    }

    /// Begins a pass over sequences that have the positions `used` and get the positions `added`, counted through all pages.
    ///
    /// # Errors
    /// A transfer failed, or one before this failed, after which there is no going on.
    pub(crate) fn pass<'a>(
        &'a mut self,
        lane: &'a Lane,
        used: Vec<Range<usize>>,
        added: Vec<Range<usize>>,
    ) -> Result<AwayPass<'a>> {
        if std::mem::replace(&mut self.is_taken, true) {
            let why =
                "a pass that failed had keys and values in use: drop this key/value cache and make another";
            return Err(EngineError::Config(why.into()));
        }
        if !self.plan.unified {
            lane.begin_keys()?;
        }
        let (host, disk) = (self.plan.blocks(Tier::Host), self.plan.blocks(Tier::Disk));
        let mut pass = AwayPass {
            unread: disk.collect(),
            // Those in host memory come before those on disk.
            unsent: host.chain(self.plan.blocks(Tier::Disk)).collect(),
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
        let in_memory = |&block: &usize| pass.away.plan.tiers[block] == Tier::Host;
        if !pass.away.plan.unified && pass.unsent.front().is_some_and(in_memory) {
            pass.send()?;
        }
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
        if !self.comes(block) {
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
        if let Some(region) = &mut self.away.staying[block] {
            return Some(layout.slot(region.bytes_mut().slice(0, layout.bytes()), pages));
        }
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
        let Some(layout) = self.away.plan.layouts[block].filter(|_| self.comes(block)) else {
            return Ok(());
        };
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
        self.settle(last)?;
        self.away.is_taken = false;
        Ok(())
    }

    /// The block whose keys and values are on their way back.
    pub(crate) fn going(&self) -> Option<usize> {
        self.going.as_ref().map(|(block, _)| *block)
    }

    /// Whether the keys and values of a block are elsewhere between passes.
    pub(crate) fn comes(&self, block: usize) -> bool {
        self.away.plan.layouts[block].is_some() && self.away.plan.tiers[block] != Tier::Device
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
        if self.away.plan.tiers[block] == Tier::Host {
            return Ok(self.away.buffers[block].take().expect("a buffer that is not in use is at home"));
        }
        if self.reading.is_empty() {
            // All buffers were taken, and one comes back as soon as it is written.
            self.read_next(true)?;
        }
        // The disk is not to run out of work while this waits.
        self.read_ahead()?;
        let (read, pending) = self.reading.pop_front().expect("just started");
        assert_eq!(read, block, "blocks are read in order");
        let disk = self.away.disk.as_ref().expect("something was read");
        Ok(disk.regions.arrive(pending)?)
    }

    /// Starts reading as many blocks as there are buffers for.
    fn read_ahead(&mut self) -> Result {
        while self.read_next(false)? {}
        Ok(())
    }

    /// Starts reading the next block, if there is one and a buffer, which may be waited for.
    fn read_next(&mut self, wait: bool) -> Result<bool> {
        let Some((disk, &block)) = self.away.disk.as_mut().zip(self.unread.front()) else { return Ok(false) };
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
        match &mut self.disk {
            Some(disk) if self.plan.tiers[block] == Tier::Disk => {
                disk.write(block, lease, &layout.parts(added))?;
            }
            _ => self.buffers[block] = Some(lease),
        }
        Ok(())
    }
}
