//! Weights on their way to compute, in the exact order of the schedule.
//!
//! Two bounded windows run ahead of compute. *Disk to host:* a fetch thread walks the schedule, takes a slot of the
//! group's size class, and keeps several reads in flight; the number of slots bounds it. *Host to device* (devices
//! with memory of their own): up to [`UPLOAD_WINDOW`] uploads are started before their group is needed. On a unified
//! device the second window vanishes: kernels read the slot that the disk engine filled.
//!
//! A group moves through [`Residency`]; the transitions are asserted.

use crate::copies::{Cargo, Link};
use crate::device_weights::{DeviceWeights, Place};
use crate::lane::Lane;
use crate::network::Network;
use crate::overlap::Gate;
use crate::state::{StateHome, StateKinds};
use crate::{Backend, EngineError, Result};
use crossbeam::channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
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
            let pool = Pool::new_registered("weights", class.slots, class.slot_bytes, &backend.io)?;
            pools.push(pool.pinned_for(&*backend.device));
            for &group in &class.groups {
                class_of_group[group] = index;
            }
        }
        Ok(Self { pools, class_of_group })
    }

    fn pool(&self, group: usize) -> &Pool {
        &self.pools[self.class_of_group[group]]
    }
}

/// The update's own error says more, and comes first.
fn never_updated() -> EngineError {
    EngineError::Config("the weights of this step were never updated".into())
}

type Staged = Result<(usize, SharedBytes)>;

/// Gives a block its weights, in the order in which the schedule asks for them.
#[derive(Debug)]
pub(crate) struct Fetcher<'a> {
    lane: &'a Lane,
    source: Source<'a>,
    /// Uploads started ahead of their use (devices with their own memory).
    uploads: VecDeque<(usize, Upload<SharedBytes>)>,
    upcoming: VecDeque<usize>,
    regions: VecDeque<(Region, Option<Arc<dyn Event>>)>,
    /// Places of groups whose weights stay on the device, instead of `regions`.
    places: Option<Vec<Place>>,
    /// What fills places, until the end of the schedule.
    filling: Vec<UploadSource<SharedBytes>>,
    residency: Vec<Residency>,
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
}

#[derive(Debug)]
enum Source<'a> {
    Resident(&'a StateHome, &'a StateKinds),
    Thread(Receiver<Staged>),
}

/// A group's weights, ready for kernels until dropped or given back through [`Fetcher::release`].
#[derive(Debug)]
pub(crate) struct Ready {
    group: usize,
    memory: ReadyMemory,
}

#[derive(Debug)]
enum ReadyMemory {
    Host(SharedBytes),
    Device { region: Region, source: Option<UploadSource<SharedBytes>> },
    Resident(Arc<Region>),
}

impl Ready {
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    pub(crate) fn bytes(&self) -> Bytes<'_> {
        match &self.memory {
            ReadyMemory::Host(bytes) => Bytes::from_host(bytes),
            ReadyMemory::Device { region, .. } => region.bytes(),
            ReadyMemory::Resident(region) => region.bytes(),
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
        let Order { items, gate } = order;
        let groups = items.iter().max().map_or(0, |g| g + 1);
        let upcoming = items.iter().copied().collect();
        let source = match (home.disk(), slots) {
            (Some(_), Some(slots)) => {
                // Never more than `items.len()` messages. Unbounded, because dropping the receiver of a crossbeam `bounded` channel
                // keeps the messages, and a fetch thread that waits for the slots in them would wait for ever.
                let (sender, receiver) = unbounded();
                std::thread::Builder::new()
                    .name("terrace-fetch".into())
                    .spawn_scoped(scope, move || {
                        FetchThread::new(home, kinds, slots, gate, &sender).run(&items);
                    })
                    .map_or_else(
                        |error| {
                            let (sender, receiver) = bounded(1);
                            let message = format!("cannot start the fetch thread: {error}");
                            let _ = sender.send(Err(EngineError::Config(message)));
                            receiver
                        },
                        |_| receiver,
                    )
            }
            _ => return Self::build(lane, Source::Resident(home, kinds), upcoming, gate, room, groups),
        };
        Self::build(lane, Source::Thread(source), upcoming, None, room, groups)
    }

    fn build(
        lane: &'a Lane,
        source: Source<'a>,
        upcoming: VecDeque<usize>,
        gate: Option<&'a Gate>,
        room: DeviceWeights,
        groups: usize,
    ) -> Result<Self> {
        // Hazard (upload over weights in use): by the schedule of before.
        let passed = if lane.unified { None } else { Some(lane.compute.record()?) };
        let (regions, places) = match room {
            DeviceWeights::Unified => (VecDeque::new(), None),
            DeviceWeights::Slots(slots) => {
                (slots.into_iter().map(|region| (region, passed.clone())).collect(), None)
            }
            DeviceWeights::Resident(places) => {
                if let Some(passed) = &passed {
                    lane.up.wait(&**passed)?;
                }
                (VecDeque::new(), Some(places))
            }
        };
        let residency = vec![Residency::Home; groups];
        let (uploads, stalled, filling) = (VecDeque::new(), Duration::ZERO, Vec::new());
        let mut fetcher =
            Self { lane, source, uploads, upcoming, regions, places, filling, residency, gate, stalled };
        fetcher.fill_places()?;
        Ok(fetcher)
    }

    /// Waits for the next group of the schedule.
    pub(crate) fn next(&mut self) -> Result<Ready> {
        let began = Instant::now();
        let ready = if self.lane.unified {
            let (group, bytes) = self.staged(true)?.expect("waited for");
            self.set(group, &[Residency::Staged, Residency::Ready]);
            Ready { group, memory: ReadyMemory::Host(bytes) }
        } else if self.places.is_some() {
            self.next_resident()?
        } else {
            self.start_uploads()?;
            let (group, upload) = self.uploads.pop_front().expect("at least one upload was started");
            let (region, source) = upload.ready_on(&*self.lane.compute)?;
            self.set(group, &[Residency::Ready]);
            // The host slot is free for the next read as soon as its bytes have crossed.
            let source = if source.is_done() { source.release().map(|_| None)? } else { Some(source) };
            Ready { group, memory: ReadyMemory::Device { region, source } }
        };
        self.stalled += began.elapsed();
        Ok(ready)
    }

    /// Gives a group's memory back after its use.
    pub(crate) fn release(&mut self, ready: Ready) -> Result {
        let group = ready.group;
        self.set(group, &[Residency::Releasing]);
        if let ReadyMemory::Device { region, source } = ready.memory {
            if let Some(source) = source {
                drop(source.release()?);
            }
            // Hazard (upload over weights in use): the region is refilled only after compute has passed this point.
            let event = self.lane.compute.record()?;
            self.regions.push_back((region, Some(event)));
        }
        self.set(group, &[Residency::Home]);
        Ok(())
    }

    /// Gives back the device's room for weights after the last use.
    pub(crate) fn finish(self) -> DeviceWeights {
        match self.places {
            Some(places) => DeviceWeights::Resident(places),
            None if self.lane.unified => DeviceWeights::Unified,
            None => DeviceWeights::Slots(self.regions.into_iter().map(|(region, _)| region).collect()),
        }
    }

    /// Starts the uploads of all groups that are stale on the device, in the order of their use, up to the first that is still
    /// to be updated.
    fn fill_places(&mut self) -> Result {
        let (Some(places), Source::Resident(home, kinds)) = (&mut self.places, &self.source) else {
            return Ok(());
        };
        for &group in &self.upcoming {
            if let Place::Stale(_) = places[group] {
                if !self.gate.is_none_or(|gate| gate.is_open(group)) {
                    break;
                }
                let Place::Stale(region) = std::mem::replace(&mut places[group], Place::Moving) else {
                    unreachable!("just looked at")
                };
                let weights =
                    home.resident_weights(group, kinds).expect("resident state has every group's weights");
                let upload = Upload::start(&*self.lane.up, weights, region)?;
                self.lane.started(Link::Up, Cargo::Weights(group), upload.event());
                places[group] = Place::Coming(upload);
            }
        }
        Ok(())
    }

    fn next_resident(&mut self) -> Result<Ready> {
        let &group = self.upcoming.front().expect("the schedule asks for no more groups than it listed");
        self.pass_gate(group)?;
        self.fill_places()?;
        self.upcoming.pop_front();
        self.set(group, &[Residency::Staged, Residency::Ready]);
        let places = self.places.as_mut().expect("weights that stay have places");
        let region = match std::mem::replace(&mut places[group], Place::Moving) {
            Place::Coming(upload) => {
                let (region, source) = upload.ready_on(&*self.lane.compute)?;
                self.filling.push(source);
                Arc::new(region)
            }
            Place::Here(region) => region,
            Place::Stale(_) | Place::Moving => {
                unreachable!("the first group of the schedule was just filled")
            }
        };
        places[group] = Place::Here(Arc::clone(&region));
        Ok(Ready { group, memory: ReadyMemory::Resident(region) })
    }

    /// The next group in host memory; `None` if it is not there yet and `wait` is false.
    fn staged(&mut self, wait: bool) -> Result<Option<(usize, SharedBytes)>> {
        let &group = self.upcoming.front().expect("the schedule asks for no more groups than it listed");
        let bytes = match &self.source {
            Source::Resident(home, kinds) => {
                if !wait && !self.gate.is_none_or(|gate| gate.is_open(group)) {
                    return Ok(None);
                }
                self.pass_gate(group)?;
                home.resident_weights(group, kinds).expect("resident state has every group's weights")
            }
            Source::Thread(receiver) => {
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
                assert_eq!(staged.0, group, "groups arrive in the order of the schedule");
                staged.1
            }
        };
        self.upcoming.pop_front();
        Ok(Some((group, bytes)))
    }

    /// Waits until a group of resident state is updated, if an update is under way.
    fn pass_gate(&self, group: usize) -> Result {
        if self.gate.is_none_or(|gate| gate.wait(group)) { Ok(()) } else { Err(never_updated()) }
    }

    /// Fills the upload window; waits for the first upload only, since host slots may be held by groups in use.
    fn start_uploads(&mut self) -> Result {
        while self.uploads.len() < UPLOAD_WINDOW && !self.upcoming.is_empty() && !self.regions.is_empty() {
            let Some((group, bytes)) = self.staged(self.uploads.is_empty())? else { return Ok(()) };
            let (region, free) = self.regions.pop_front().expect("checked above");
            if let Some(event) = free {
                self.lane.up.wait(&*event)?;
            }
            let upload = Upload::start(&*self.lane.up, bytes, region)?;
            self.lane.started(Link::Up, Cargo::Weights(group), upload.event());
            self.set(group, &[Residency::Staged, Residency::Uploading]);
            self.uploads.push_back((group, upload));
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
    in_flight: VecDeque<(usize, InFlight)>,
    /// Groups whose last lease may still be alive: used again soon, they need no second read.
    recent: HashMap<usize, Weak<Lease>>,
}

enum InFlight {
    Read(PendingRead),
    Here(SharedBytes),
}

impl<'a> FetchThread<'a> {
    fn new(
        home: &'a StateHome,
        kinds: &'a StateKinds,
        slots: &'a SlotClasses,
        gate: Option<&'a Gate>,
        sender: &'a Sender<Staged>,
    ) -> Self {
        let store = home.disk().expect("weights are read from a store");
        let (in_flight, recent) = (VecDeque::new(), HashMap::new());
        Self { home, store, kinds, slots, gate, sender, in_flight, recent }
    }

    fn run(mut self, items: &[usize]) {
        for &group in items {
            if !self.request(group) {
                return;
            }
        }
        while !self.in_flight.is_empty() {
            if !self.deliver() {
                return;
            }
        }
    }

    /// Starts the read of one group; false when compute has gone away.
    fn request(&mut self, group: usize) -> bool {
        // An earlier read of the same group that is still in flight is delivered first, so that it can be shared.
        while self.in_flight.iter().any(|(g, _)| *g == group) {
            if !self.deliver() {
                return false;
            }
        }
        if let Some(lease) = self.recent.get(&group).and_then(Weak::upgrade) {
            self.in_flight.push_back((group, InFlight::Here(SharedBytes::Lease(lease))));
            return true;
        }
        if !self.pass_gate(group) {
            return false;
        }
        if let Some(weights) = self.home.resident_weights(group, self.kinds) {
            self.in_flight.push_back((group, InFlight::Here(weights)));
            return true;
        }
        let elements = self.store.spec().groups[group].elements;
        let pool = self.slots.pool(group);
        let len = self.kinds.blobs[self.kinds.weight].bytes(elements) as usize;
        let lease = loop {
            if let Some(lease) = pool.try_acquire(len) {
                break lease;
            }
            // What is in flight holds slots that compute can only free once it has them.
            if self.in_flight.is_empty() {
                break pool.acquire(len);
            }
            if !self.deliver() {
                return false;
            }
        };
        let key = BlobKey { group, kind: BlobKind::Weight };
        let chunks = 0..self.store.spec().chunks(group);
        match self.store.read(key, chunks, Generation::Newest, lease) {
            Ok(read) => self.in_flight.push_back((group, InFlight::Read(read))),
            Err(error) => {
                let _ = self.sender.send(Err(error.into()));
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

    /// Hands the oldest group over; false when compute has gone away or the read failed.
    fn deliver(&mut self) -> bool {
        let (group, item) = self.in_flight.pop_front().expect("something is in flight");
        let bytes = match item {
            InFlight::Here(bytes) => bytes,
            InFlight::Read(read) => match read.wait() {
                Ok(lease) => SharedBytes::Lease(Arc::new(lease)),
                Err(error) => {
                    let _ = self.sender.send(Err(error.into()));
                    return false;
                }
            },
        };
        if let SharedBytes::Lease(lease) = &bytes {
            self.recent.insert(group, Arc::downgrade(lease));
        }
        self.sender.send(Ok((group, bytes))).is_ok()
    }
}
