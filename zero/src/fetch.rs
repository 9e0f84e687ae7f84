//! Weights on their way to compute, in the exact order of the schedule.
//!
//! Two bounded windows run ahead of compute. *Disk to host:* a fetch thread walks the schedule, takes a slot of the
//! group's size class, and keeps several reads in flight; the number of slots bounds it. *Host to device* (devices
//! with memory of their own): up to [`UPLOAD_WINDOW`] uploads are started before their group is needed. On a unified
//! device the second window vanishes: kernels read the slot that the disk engine filled. A group that stays on the device
//! (`device_weights.rs`) is fetched into its place once, and used from there until the next update.
//!
//! Passes of frozen weights follow each other in the same order, so the first reads of the next one are started before this one
//! ends ([`Ahead`]).
//!
//! Of a group with parts on demand (`on_demand.rs`) only the other chunks are read ahead, and compute has the rest read when it knows what it uses
//! ([`Fetcher::complete`]).
//!
//! Reads are urgent: the disk does them ahead of the reads and writes of an update, of which there may be seconds in its slots.
//!
//! While an update is under way that has not reached a group, there is nothing to read: the thread offers the group's slot to the
//! update ([`Gate::offer`]), which leaves the new weights there.
//!
//! When compute goes away, the thread no longer waits for slots: those of copies of which nobody can tell whether they are done never
//! come back ([`Leaving`]).
//!
//! A group moves through [`Residency`]; the transitions are asserted.

mod complete;

use crate::copies::{Cargo, Link};
use crate::device_weights::{DeviceWeights, Place};
use crate::lane::Lane;
use crate::network::Network;
use crate::on_demand::OnDemand;
use crate::overlap::{Gate, Offer};
use crate::state::{StateHome, StateKinds};
use crate::{Backend, EngineError, Result};
use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use terrace_aio::Urgency;
use terrace_device::{Bytes, Event, Region, Upload, UploadSource};
use terrace_tiers::{BlobKey, BlobKind, DiskStore, Generation, Lease, PendingRead, Pool, SharedBytes};

/// Uploads that may be in flight or waiting for their use.
pub(crate) const UPLOAD_WINDOW: usize = 2;

/// Where a group's weights are on their way to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// Only at home: on disk or in resident host memory.
    Home,
    /// A read into a host slot is in flight.
    Reading,
    /// In a host slot.
    Staged,
    /// A copy to the device is in flight.
    Uploading,
    /// Ready for kernels.
    Ready,
    /// Its last use is over; its memory is being given back.
    Releasing,
}

impl Residency {
    /// Moves to `next`.
    ///
    /// # Panics
    /// If that is not a legal transition: the schedule is broken.
    pub fn advance(&mut self, next: Self) {
        use Residency::{Home, Reading, Ready, Releasing, Staged, Uploading};
        let legal = matches!(
            (*self, next),
            (Home, Reading | Staged)
                | (Reading, Staged)
                | (Staged, Uploading | Ready)
                | (Uploading, Ready)
                | (Ready, Releasing)
                | (Releasing, Home)
        );
        assert!(legal, "a group goes from {self:?} to {next:?}");
        *self = next;
    }
}

/// Host slots of similar size, one pool per class of group sizes.
#[derive(Debug)]
pub(crate) struct SlotClasses {
    pools: Vec<Pool>,
    class_of_group: Vec<usize>,
}

/// One class of the plan: which groups share slots, and of what size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SlotClass {
    pub(crate) slot_bytes: usize,
    pub(crate) slots: usize,
    pub(crate) groups: Vec<usize>,
}

/// Groups whose sizes differ by less than a quarter share slots, so that one large embedding does not make every slot large.
/// Only those that are `read` from disk need any.
pub(crate) fn plan_classes(
    network: &Network,
    weight_bytes: usize,
    window: usize,
    read: impl Fn(usize) -> bool,
) -> Vec<SlotClass> {
    let mut order: Vec<usize> =
        (0..network.groups.len()).filter(|&g| network.groups[g].elements > 0 && read(g)).collect();
    order.sort_by_key(|&g| std::cmp::Reverse(network.groups[g].elements));
    let mut classes: Vec<SlotClass> = Vec::new();
    for group in order {
        let bytes = network.groups[group].elements * weight_bytes;
        match classes.last_mut() {
            Some(class) if bytes * 4 > class.slot_bytes * 3 => class.groups.push(group),
            _ => classes.push(SlotClass { slot_bytes: bytes, slots: 0, groups: vec![group] }),
        }
    }
    for class in &mut classes {
        // A block that uses several groups of one class at once needs a slot for each.
        let together = (0..network.blocks.len())
            .map(|b| network.groups_of(b).iter().filter(|g| class.groups.contains(g)).count())
            .max()
            .unwrap_or(1);
        class.slots = window.max(together).min(class.groups.len());
    }
    classes
}

impl SlotClasses {
    pub(crate) fn new(classes: &[SlotClass], groups: usize, backend: &Backend) -> Result<Self> {
        let mut class_of_group = vec![usize::MAX; groups];
        let mut pools = Vec::new();
        for (index, class) in classes.iter().enumerate() {
            let pool = Pool::new("weights", class.slots, class.slot_bytes)?;
            pools.push(pool.pinned_for(&*backend.device).registered_with(&backend.io));
            for &group in &class.groups {
                class_of_group[group] = index;
            }
        }
        Ok(Self { pools, class_of_group })
    }

    fn pool(&self, group: usize) -> &Pool {
        &self.pools[self.class_of_group[group]]
    }

    /// The longest start of `groups` whose members have a slot each.
    fn first_together<'g>(&self, groups: &'g [usize]) -> &'g [usize] {
        let mut taken = vec![0; self.pools.len()];
        let fits = |group: &&usize| {
            let class = self.class_of_group[**group];
            // What is always in memory needs none, but no read ahead either.
            taken.get_mut(class).is_some_and(|taken| {
                *taken += 1;
                *taken <= self.pools[class].slots()
            })
        };
        &groups[..groups.iter().take_while(fits).count()]
    }
}

/// Reads for the next pass of frozen weights, in its order.
#[derive(Debug, Default)]
pub(crate) struct Ahead(Mutex<VecDeque<(usize, InFlight)>>);

impl Ahead {
    /// Those with which a pass over `staging` begins; others are given up.
    fn take(&self, staging: &[usize]) -> VecDeque<(usize, InFlight)> {
        let reads = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let fits =
            reads.len() <= staging.len() && reads.iter().zip(staging).all(|(read, group)| read.0 == *group);
        if fits { reads } else { VecDeque::new() }
    }

    fn put(&self, reads: VecDeque<(usize, InFlight)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reads;
    }
}

/// The groups to bring to host memory for a schedule: those that are on the device, or that an earlier use brings there to stay,
/// need no fetch.
fn to_stage(items: &[usize], places: &[Option<Place>]) -> Vec<usize> {
    let mut stays: Vec<bool> = places.iter().map(|place| matches!(place, Some(Place::Here(_)))).collect();
    let comes = |&group: &usize| match places.get(group) {
        Some(Some(_)) => !std::mem::replace(&mut stays[group], true),
        _ => true,
    };
    items.iter().copied().filter(comes).collect()
}

/// The update's own error says more, and comes first.
fn never_updated() -> EngineError {
    EngineError::Config("the weights of this step were never updated".into())
}

fn leased(lease: Lease) -> SharedBytes {
    SharedBytes::Lease(Arc::new(lease))
}

type Staged = Result<Delivered>;

/// A group's weights in host memory.
#[derive(Debug)]
struct Delivered {
    group: usize,
    bytes: SharedBytes,
    /// Parts on demand are there, too.
    is_whole: bool,
}

/// A group on its way to the device.
#[derive(Debug)]
struct Uploading {
    group: usize,
    upload: Upload<SharedBytes>,
    is_whole: bool,
}

/// Gives a block its weights, in the order in which the schedule asks for them.
#[derive(Debug)]
pub(crate) struct Fetcher<'a> {
    lane: &'a Lane,
    source: Source<'a>,
    /// Uploads started ahead of their use (devices with their own memory).
    uploads: VecDeque<Uploading>,
    /// Groups in the order of their use.
    upcoming: VecDeque<usize>,
    /// Those of them that are still to come to host memory, once each if they stay on the device.
    staging: VecDeque<usize>,
    regions: VecDeque<(Region, Option<Arc<dyn Event>>)>,
    places: Vec<Option<Place>>,
    residency: Vec<Residency>,
    /// See [`Order::on_demand`].
    on_demand: &'a [Option<OnDemand>],
    /// Holds back what an update of resident state has not reached.
    gate: Option<&'a Gate>,
    /// Time compute waited for weights.
    pub(crate) stalled: Duration,
}

/// The groups that a pass uses.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    /// In the order of use.
    pub(crate) items: Vec<usize>,
    /// Holds back what an update has not reached.
    pub(crate) gate: Option<&'a Gate>,
    /// The same pass comes again, and its first reads may be started.
    pub(crate) ahead: Option<&'a Ahead>,
    /// What is left out of each group until it is asked for. Without an entry nothing is.
    pub(crate) on_demand: &'a [Option<OnDemand>],
}

#[derive(Debug)]
enum Source<'a> {
    Resident(&'a StateHome, &'a StateKinds),
    Thread { staged: Receiver<Staged>, store: &'a DiskStore, _leaving: Leaving<'a> },
}

/// Tells the fetch thread, when it is dropped, that compute has gone away.
#[derive(Debug)]
struct Leaving<'a> {
    slots: &'a SlotClasses,
    gone: Arc<AtomicBool>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Release);
        self.slots.pools.iter().for_each(Pool::wake);
    }
}

/// A group's weights, ready for kernels until dropped or given back through [`Fetcher::release`].
#[derive(Debug)]
pub(crate) struct Ready {
    group: usize,
    memory: ReadyMemory,
    is_whole: bool,
}

#[derive(Debug)]
enum ReadyMemory {
    Host(SharedBytes),
    Slot { region: Region, source: Option<UploadSource<SharedBytes>> },
    Place { region: Arc<Region>, source: Option<UploadSource<SharedBytes>> },
}

impl Ready {
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Whether all of it is there; else parts on demand are not.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole
    }

    pub(crate) fn bytes(&self) -> Bytes<'_> {
        match &self.memory {
            ReadyMemory::Host(bytes) => Bytes::from_host(bytes),
            ReadyMemory::Slot { region, .. } => region.bytes(),
            ReadyMemory::Place { region, .. } => region.bytes(),
        }
    }
}

impl<'a> Fetcher<'a> {
    /// Starts fetching groups in order of use into the `room` there is on the device.
    pub(crate) fn start<'scope>(
        scope: &'scope std::thread::Scope<'scope, 'a>,
        lane: &'a Lane,
        home: &'a StateHome,
        kinds: &'a StateKinds,
        slots: Option<&'a SlotClasses>,
        order: Order<'a>,
        room: DeviceWeights,
    ) -> Result<Self>
    where
        'a: 'scope,
    {
        let Order { items, gate, ahead, on_demand } = order;
        let staging = to_stage(&items, &room.places);
        let again: Vec<usize> = match (ahead, slots) {
            (Some(_), Some(slots)) => {
                let stays = |group: &usize| matches!(room.places.get(*group), Some(Some(_)));
                let again: Vec<usize> = items.iter().copied().filter(|group| !stays(group)).collect();
                slots.first_together(&again).to_vec()
            }
            _ => Vec::new(),
        };
        let (upcoming, coming) = (VecDeque::from(items), VecDeque::from(staging.clone()));
        let source = match (home.disk(), slots) {
            (Some(store), Some(slots)) => {
                // Never more messages than groups in `staging`. Unbounded, because dropping the receiver of a crossbeam `bounded` channel
                // keeps the messages, and a fetch thread that waits for the slots in them would wait for ever.
                let (sender, receiver) = unbounded();
                let leaving = Leaving { slots, gone: Arc::default() };
                let gone = Arc::clone(&leaving.gone);
                let staged = std::thread::Builder::new()
                    .name("terrace-fetch".into())
                    .spawn_scoped(scope, move || {
                        let thread = FetchThread::new(home, kinds, slots, gate, &sender, &gone);
                        FetchThread { on_demand, ..thread }.run(&staging, ahead, &again);
                    })
                    .map_or_else(
                        |error| {
                            let (sender, receiver) = bounded(1);
                            let message = format!("cannot start the fetch thread: {error}");
                            let _ = sender.send(Err(EngineError::Config(message)));
                            receiver
                        },
                        |_| receiver,
                    );
                Source::Thread { staged, store, _leaving: leaving }
            }
            _ => return Self::build(lane, Source::Resident(home, kinds), [upcoming, coming], gate, room),
        };
        Ok(Self { on_demand, ..Self::build(lane, source, [upcoming, coming], None, room)? })
    }

    fn build(
        lane: &'a Lane,
        source: Source<'a>,
        [upcoming, staging]: [VecDeque<usize>; 2],
        gate: Option<&'a Gate>,
        room: DeviceWeights,
    ) -> Result<Self> {
        if !lane.unified {
            // Hazard (upload over weights in use): by the schedule of before.
            lane.up.wait(&*lane.compute.record()?)?;
        }
        let regions = room.slots.into_iter().map(|region| (region, None)).collect();
        let residency = vec![Residency::Home; upcoming.iter().max().map_or(0, |group| group + 1)];
        Ok(Self {
            lane,
            source,
            uploads: VecDeque::new(),
            upcoming,
            staging,
            regions,
            places: room.places,
            residency,
            on_demand: &[],
            gate,
            stalled: Duration::ZERO,
        })
    }

    /// Waits for the next group of the schedule.
    pub(crate) fn next(&mut self) -> Result<Ready> {
        let began = Instant::now();
        let group = self.upcoming.pop_front().expect("the schedule asks for no more groups than it listed");
        let (memory, is_whole) = if self.lane.unified {
            let Delivered { bytes, is_whole, .. } = self.staged(group, true)?.expect("waited for");
            self.staging.pop_front();
            self.set(group, &[Residency::Staged, Residency::Ready]);
            (ReadyMemory::Host(bytes), is_whole)
        } else {
            self.next_on_device(group)?
        };
        self.stalled += began.elapsed();
        Ok(Ready { group, memory, is_whole })
    }

    /// A group on the device, and whether all of it is there.
    fn next_on_device(&mut self, group: usize) -> Result<(ReadyMemory, bool)> {
        if let Some(Some(Place::Here(region))) = self.places.get(group) {
            let region = Arc::clone(region);
            self.start_uploads(false)?;
            self.set(group, &[Residency::Staged, Residency::Ready]);
            return Ok((ReadyMemory::Place { region, source: None }, true));
        }
        self.start_uploads(self.uploads.is_empty())?;
        let Uploading { group: uploaded, upload, is_whole } =
            self.uploads.pop_front().expect("at least one upload was started");
        assert_eq!(uploaded, group, "groups are uploaded in the order of the schedule");
        let (region, source) = upload.ready_on(&*self.lane.compute)?;
        self.set(group, &[Residency::Ready]);
        // The host slot is free for the next read as soon as its bytes have crossed, unless more are to come.
        let source =
            if is_whole && source.is_done() { source.release().map(|_| None)? } else { Some(source) };
        let Some(Some(place)) = self.places.get_mut(group) else {
            return Ok((ReadyMemory::Slot { region, source }, is_whole));
        };
        assert!(is_whole, "what stays on the device is read as a whole");
        let region = Arc::new(region);
        *place = Place::Here(Arc::clone(&region));
        Ok((ReadyMemory::Place { region, source }, true))
    }

    /// Gives a group's memory back after its use.
    pub(crate) fn release(&mut self, ready: Ready) -> Result {
        let group = ready.group;
        self.set(group, &[Residency::Releasing]);
        let (region, source) = match ready.memory {
            ReadyMemory::Host(_) => (None, None),
            ReadyMemory::Slot { region, source } => (Some(region), source),
            ReadyMemory::Place { source, .. } => (None, source),
        };
        if let Some(source) = source {
            drop(source.release()?);
        }
        if let Some(region) = region {
            // Hazard (upload over weights in use): the region is refilled only after compute has passed this point.
            let event = self.lane.compute.record()?;
            self.regions.push_back((region, Some(event)));
        }
        self.set(group, &[Residency::Home]);
        Ok(())
    }

    /// Gives back the device's room for weights after the last use.
    pub(crate) fn finish(self) -> DeviceWeights {
        let slots = self.regions.into_iter().map(|(region, _)| region).collect();
        DeviceWeights { slots, places: self.places }
    }

    /// The next group to be staged, in host memory; `None` if it is not there yet and `wait` is false.
    fn staged(&self, group: usize, wait: bool) -> Result<Option<Delivered>> {
        Ok(Some(match &self.source {
            Source::Resident(home, kinds) => {
                if !wait && !self.gate.is_none_or(|gate| gate.is_open(group)) {
                    return Ok(None);
                }
                self.pass_gate(group)?;
                let weights = home.resident_weights(group, kinds);
                let bytes = weights.expect("resident state has every group's weights");
                Delivered { group, bytes, is_whole: true }
            }
            Source::Thread { staged: receiver, .. } => {
                let received = match receiver.try_recv() {
                    Err(TryRecvError::Empty) if wait => {
                        receiver.recv().map_err(|_| TryRecvError::Disconnected)
                    }
                    other => other,
                };
                let staged = match received {
                    Ok(staged) => staged?,
                    Err(TryRecvError::Empty) => return Ok(None),
                    Err(TryRecvError::Disconnected) => {
                        return Err(EngineError::Config("the fetch thread ended early".into()));
                    }
                };
                assert_eq!(staged.group, group, "groups arrive in the order of the schedule");
                staged
            }
        }))
    }

    /// Waits until a group of resident state is updated, if an update is under way.
    fn pass_gate(&self, group: usize) -> Result {
        if self.gate.is_none_or(|gate| gate.wait(group)) { Ok(()) } else { Err(never_updated()) }
    }

    /// Fills the upload window; waits at most for the first upload, since host slots may be held by groups in use.
    fn start_uploads(&mut self, mut wait: bool) -> Result {
        while self.uploads.len() < UPLOAD_WINDOW
            && let Some(&group) = self.staging.front()
        {
            let stays = matches!(self.places.get(group), Some(Some(_)));
            if !stays && self.regions.is_empty() {
                return Ok(());
            }
            let Some(Delivered { bytes, is_whole, .. }) = self.staged(group, wait)? else { return Ok(()) };
            wait = false;
            let region = match &mut self.places[group] {
                Some(place) => match std::mem::replace(place, Place::Coming) {
                    Place::Stale(region) => region,
                    found => unreachable!("a place is filled once: {found:?}"),
                },
                None => {
                    let (region, free) = self.regions.pop_front().expect("checked above");
                    if let Some(event) = free {
                        self.lane.up.wait(&*event)?;
                    }
                    region
                }
            };
            let upload = if is_whole {
                let len = bytes.len();
                let upload = Upload::start(&*self.lane.up, bytes, region)?;
                self.lane.started(Link::Up, Cargo::Weights(group), len, upload.event());
                upload
            } else {
                self.upload_ahead(group, bytes, region)?
            };
            self.staging.pop_front();
            self.set(group, &[Residency::Staged, Residency::Uploading]);
            self.uploads.push_back(Uploading { group, upload, is_whole });
        }
        Ok(())
    }

    /// Advances a group; a second copy of a group that is already on its way is not tracked separately.
    fn set(&mut self, group: usize, steps: &[Residency]) {
        let state = &mut self.residency[group];
        for &next in steps {
            let second_copy = match next {
                Residency::Staged => *state != Residency::Home,
                Residency::Releasing => *state != Residency::Ready,
                Residency::Home => *state != Residency::Releasing,
                // Of two copies in a row the first may have come and gone.
                Residency::Ready => matches!(*state, Residency::Home | Residency::Ready),
                _ => *state != Residency::Staged,
            };
            if !second_copy {
                state.advance(next);
            }
        }
    }
}

/// Reads ahead on its own thread.
struct FetchThread<'a> {
    home: &'a StateHome,
    store: &'a DiskStore,
    kinds: &'a StateKinds,
    slots: &'a SlotClasses,
    gate: Option<&'a Gate>,
    sender: &'a Sender<Staged>,
    /// Compute has gone away.
    gone: &'a AtomicBool,
    /// See [`Order::on_demand`].
    on_demand: &'a [Option<OnDemand>],
    in_flight: VecDeque<(usize, InFlight)>,
    /// Groups whose last lease may still be alive: used again soon, they need no second read.
    recent: HashMap<usize, Weak<Lease>>,
}

#[derive(Debug)]
pub(crate) enum InFlight {
    Read {
        read: PendingRead,
        is_whole: bool,
    },
    Here(SharedBytes),
    /// In the hands of the update.
    Offered,
}

impl<'a> FetchThread<'a> {
    fn new(
        home: &'a StateHome,
        kinds: &'a StateKinds,
        slots: &'a SlotClasses,
        gate: Option<&'a Gate>,
        sender: &'a Sender<Staged>,
        gone: &'a AtomicBool,
    ) -> Self {
        let store = home.disk().expect("weights are read from a store");
        let (in_flight, recent) = (VecDeque::new(), HashMap::new());
        Self { home, store, kinds, slots, gate, sender, gone, on_demand: &[], in_flight, recent }
    }

    /// Brings `items`, the first of which may have been read [`Ahead`], and then starts to read those that come `again`.
    fn run(mut self, items: &[usize], ahead: Option<&Ahead>, again: &[usize]) {
        self.in_flight = ahead.map(|ahead| ahead.take(items)).unwrap_or_default();
        for &group in &items[self.in_flight.len()..] {
            if !self.request(group) {
                return;
            }
        }
        while !self.in_flight.is_empty() {
            if !self.deliver() {
                return;
            }
        }
        let Some(ahead) = ahead else { return };
        for &group in again {
            if self.share(group) {
                continue;
            }
            // Every one has a slot of its own, which compute gives back before the pass ends well.
            let (pool, len) = (self.slots.pool(group), self.weight_bytes(group));
            let Some(lease) = pool.acquire_unless(len, self.gone) else { return };
            // The next pass tries again, and says what is wrong.
            let Ok(read) = self.read_ahead(group, lease) else { break };
            self.in_flight.push_back((group, read));
        }
        ahead.put(self.in_flight);
    }

    fn weight_bytes(&self, group: usize) -> usize {
        self.kinds.blobs[self.kinds.weight].bytes(self.store.spec().groups[group].elements) as usize
    }

    fn read(&self, group: usize, lease: Lease) -> Result<PendingRead> {
        let key = BlobKey { group, kind: BlobKind::Weight };
        let chunks = 0..self.store.spec().chunks(group);
        Ok(self.store.read_as(Urgency::Soon, key, chunks, Generation::Newest, lease)?)
    }

    /// Starts the read of a group but for what is on demand.
    fn read_ahead(&self, group: usize, lease: Lease) -> Result<InFlight> {
        let Some(on_demand) = self.on_demand.get(group).and_then(Option::as_ref) else {
            return Ok(InFlight::Read { read: self.read(group, lease)?, is_whole: true });
        };
        let key = BlobKey { group, kind: BlobKind::Weight };
        let span = (0..self.store.spec().chunks(group), &on_demand.ahead()[..]);
        let read = self.store.read_parts_as(Urgency::Soon, key, span, Generation::Newest, lease)?;
        Ok(InFlight::Read { read, is_whole: false })
    }

    /// Brings a group that is still in memory once more; false if it has to be read.
    fn share(&mut self, group: usize) -> bool {
        let Some(lease) = self.recent.get(&group).and_then(Weak::upgrade) else { return false };
        self.in_flight.push_back((group, InFlight::Here(SharedBytes::Lease(lease))));
        true
    }

    /// Starts the read of one group; false when compute has gone away.
    fn request(&mut self, group: usize) -> bool {
        // An earlier read of the same group that is still in flight is delivered first, so that it can be shared.
        while self.in_flight.iter().any(|(g, _)| *g == group) {
            if !self.deliver() {
                return false;
            }
        }
        if self.share(group) {
            return true;
        }
        if self.home.has_copied_weights(group, self.kinds) {
            if !self.pass_gate(group) {
                return false;
            }
            let weights = self.home.resident_weights(group, self.kinds).expect("there are some");
            self.in_flight.push_back((group, InFlight::Here(weights)));
            return true;
        }
        let (pool, len) = (self.slots.pool(group), self.weight_bytes(group));
        let lease = loop {
            if let Some(lease) = pool.try_acquire(len) {
                break lease;
            }
            // What is in flight holds slots that compute can only free once it has them.
            if self.in_flight.is_empty() {
                match pool.acquire_unless(len, self.gone) {
                    Some(lease) => break lease,
                    None => return false,
                }
            }
            if !self.deliver() {
                return false;
            }
        };
        if let Some(gate) = self.gate.filter(|gate| !gate.is_open(group)) {
            gate.offer(group, lease);
            self.in_flight.push_back((group, InFlight::Offered));
            return true;
        }
        // Open is also that of an update which failed before it came to the group.
        if !self.pass_gate(group) {
            return false;
        }
        match self.read_ahead(group, lease) {
            Ok(read) => self.in_flight.push_back((group, read)),
            Err(error) => {
                let _ = self.sender.send(Err(error));
                return false;
            }
        }
        true
    }

    /// Waits until a group is updated, if an update is under way; false when compute has gone away or the update failed.
    fn pass_gate(&mut self, group: usize) -> bool {
        let Some(gate) = self.gate else { return true };
        // Compute can use what has been read meanwhile.
        while !gate.is_open(group) && !self.in_flight.is_empty() {
            if !self.deliver() {
                return false;
            }
        }
        let updated = gate.wait(group);
        if !updated {
            let _ = self.sender.send(Err(never_updated()));
        }
        updated
    }

    /// The weights of a group of which the slot was offered, when it is updated.
    fn updated(&self, group: usize) -> Result<Lease> {
        let gate = self.gate.expect("a slot is offered at a gate");
        if !gate.wait(group) {
            return Err(never_updated());
        }
        let Offer { lease, chunks } = gate.take_back(group);
        if chunks == self.store.spec().chunks(group) {
            return Ok(lease);
        }
        // The update began with the group before.
        Ok(self.read(group, lease)?.wait()?)
    }

    /// Hands the oldest group over; false when compute has gone away or the read failed.
    fn deliver(&mut self) -> bool {
        let (group, item) = self.in_flight.pop_front().expect("something is in flight");
        let (arrived, is_whole) = match item {
            InFlight::Here(bytes) => (Ok(bytes), true),
            InFlight::Read { read, is_whole } => {
                (read.wait().map(leased).map_err(EngineError::from), is_whole)
            }
            InFlight::Offered => (self.updated(group).map(leased), true),
        };
        let bytes = match arrived {
            Ok(bytes) => bytes,
            Err(error) => {
                let _ = self.sender.send(Err(error));
                return false;
            }
        };
        // What is not whole has one user, who completes it.
        if let SharedBytes::Lease(lease) = &bytes
            && is_whole
        {
            self.recent.insert(group, Arc::downgrade(lease));
        }
        self.sender.send(Ok(Delivered { group, bytes, is_whole })).is_ok()
    }
}
