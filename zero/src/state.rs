//! Where the training state lives between uses, and the layout that all places share.

use crate::cache::{GroupCopies, StateCache};
use crate::device_weights::DeviceRoom;
use crate::export::AfterCommit;
use crate::network::Network;
use crate::overlap::Gate;
use crate::saving::Saving;
use crate::{EngineConfig, EngineError, Placement, Result, StepReport};
use rayon::prelude::*;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use terrace_device::Device;
use terrace_optimizer::{Optimizer, StateKind, StateLayout, WeightType, optimizer};
use terrace_tiers::{
    BlobKind, BlobSpec, DiskStore, GroupSpec, HostBlob, SharedBytes, StoreSpec, Tier, TierError,
};

/// Bytes that a thread makes resident at a time.
const POPULATED_BYTES: usize = 16 << 20;

/// The kinds of state, in the order in which the optimizer takes them.
#[derive(Debug, Clone)]
pub(crate) struct StateKinds {
    pub(crate) blobs: Vec<BlobSpec>,
    /// Index of the weights among them.
    pub(crate) weight: usize,
    /// Whether an update reads the old value of each kind (weights that have a full master are only written).
    pub(crate) read_by_update: Vec<bool>,
}

/// The state between uses.
#[derive(Debug)]
pub(crate) enum StateHome {
    /// In host memory, but for groups whose state is on the device.
    Resident(Resident),
    /// In a store; only windows of it are in memory, and copies of a part. That of a group whose state is on the device comes there
    /// with a save alone.
    Disk(Box<Stored>),
}

/// State in host memory.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    /// The blobs of every kind of each group; none of a group whose state is on the device.
    groups: Vec<Mutex<Vec<Arc<HostBlob>>>>,
    /// How far the last save has come.
    saved: Mutex<Option<Arc<Gate>>>,
}

/// State on disk.
pub(crate) struct Stored {
    pub(crate) store: Arc<DiskStore>,
    pub(crate) cache: StateCache,
    after_commit: Mutex<Vec<AfterCommit>>,
    /// A save that is being written and committed, where saves alone commit.
    saving: Mutex<Option<Saving>>,
    /// The copies, and what is on the device, are not what is committed.
    pub(crate) outdated: bool,
    /// Saves alone commit: copies are not written before, and what is not copied may be overwritten.
    pub(crate) saves: bool,
}

impl Resident {
    pub(crate) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// A group's state, to be read.
    pub(crate) fn lock(&self, group: usize) -> MutexGuard<'_, Vec<Arc<HostBlob>>> {
        self.groups[group].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blobs of every group, shared.
    pub(crate) fn shared(&self) -> Vec<GroupCopies> {
        (0..self.groups()).map(|group| self.lock(group).iter().cloned().map(Some).collect()).collect()
    }

    /// A group's state, to be changed: waits until a save under way has copied it.
    pub(crate) fn change(&self, group: usize) -> MutexGuard<'_, Vec<Arc<HostBlob>>> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(gate) = saved {
            // A save that failed shares nothing any more, either.
            gate.wait(group);
        }
        self.lock(group)
    }

    /// A save began; `gate` says how far it is.
    pub(crate) fn saved_by(&self, gate: Arc<Gate>) {
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(gate);
    }
}

impl Stored {
    pub(crate) fn new(store: DiskStore, cache: StateCache, saves: bool) -> Self {
        Self {
            store: Arc::new(store),
            cache,
            after_commit: Mutex::default(),
            saving: Mutex::default(),
            outdated: true,
            saves,
        }
    }

    /// What begins with the next commit.
    pub(crate) fn after_commit(&self) -> MutexGuard<'_, Vec<AfterCommit>> {
        self.after_commit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Commits what was written.
    pub(crate) fn commit(&self, step: u64, words: &[u8]) -> Result {
        self.store.commit(step, words)?;
        self.begin_what_waited();
        Ok(())
    }

    /// Commits the last commit once more, as that of another step.
    pub(crate) fn commit_unchanged(&self, step: u64, words: &[u8]) -> Result {
        self.store.commit_unchanged(step, words)?;
        self.begin_what_waited();
        Ok(())
    }

    fn begin_what_waited(&self) {
        let waiting = std::mem::take(&mut *self.after_commit());
        waiting.into_iter().for_each(|begin| begin(&self.store));
    }

    /// Waits for a save under way, which shares copies and commits what is there, and for writes that an update may read again before
    /// they are committed.
    pub(crate) fn settle(&self) -> Result {
        self.end_save()?;
        if self.saves { Ok(self.store.settle()?) } else { Ok(()) }
    }

    /// A save began.
    pub(crate) fn saved_by(&self, saving: Saving) {
        *self.saving() = Some(saving);
    }

    /// Waits for a save under way. Who comes second waits, too.
    pub(crate) fn end_save(&self) -> Result {
        let mut saving = self.saving();
        saving.take().map_or(Ok(()), Saving::finish)
    }

    fn saving(&self) -> MutexGuard<'_, Option<Saving>> {
        self.saving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateKinds {
    pub(crate) fn new(
        config: &EngineConfig,
        network: &Network,
    ) -> Result<(Self, Option<Box<dyn Optimizer>>)> {
        let Some(weight) = WeightType::of(config.dtype) else {
            return Err(EngineError::Config(format!(
                "weights of dtype {} cannot be used: bf16, fp16 or fp32",
                config.dtype
            )));
        };
        let Some(training) = &config.training else {
            let blobs = vec![BlobSpec::plain(BlobKind::Weight, network.element_bytes as u64)];
            return Ok((Self { blobs, weight: 0, read_by_update: vec![false] }, None));
        };
        if let Some((name, format)) = network.quantized().and_then(|spec| Some((&spec.name, spec.quantized?)))
        {
            return Err(EngineError::Config(format!(
                "{name} is stored in {format}, and quantized weights cannot be trained: train in bf16 or fp32"
            )));
        }
        let describe = |e: terrace_optimizer::OptimizerError| EngineError::Config(e.to_string());
        let algorithm = training.optimizer;
        let layout =
            StateLayout::with_moments(training.state, weight, algorithm.moments()).map_err(describe)?;
        let update = optimizer(algorithm, layout).map_err(describe)?;
        let kinds = layout.kinds();
        let has_master = kinds.iter().any(|k| k.kind == StateKind::Master);
        let blobs = kinds
            .iter()
            .map(|k| BlobSpec {
                kind: blob_kind(k.kind),
                block_elements: k.params as u64,
                block_bytes: k.bytes as u64,
            })
            .collect();
        let read_by_update = kinds.iter().map(|k| k.kind != StateKind::Weight || !has_master).collect();
        let weight = kinds.iter().position(|k| k.kind == StateKind::Weight);
        let weight = weight.expect("every state layout has a weight");
        Ok((Self { blobs, weight, read_by_update }, Some(update)))
    }

    /// The indices of all kinds.
    pub(crate) fn all(&self) -> Vec<usize> {
        (0..self.blobs.len()).collect()
    }

    /// Where the bytes of a chunk of a kind are among those of its group.
    pub(crate) fn range(&self, kind: usize, spec: &StoreSpec, group: usize, chunk: usize) -> Range<usize> {
        let blob = &self.blobs[kind];
        let start = blob.bytes(chunk as u64 * spec.chunk_elements) as usize;
        start..start + blob.bytes(spec.chunk_len(group, chunk) as u64) as usize
    }

    /// Bytes of a run of elements over all kinds.
    pub(crate) fn bytes(&self, elements: u64) -> u64 {
        self.blobs.iter().map(|b| b.bytes(elements)).sum()
    }
}

/// Parts of a blob that one thread makes resident at a time.
fn parts(blob: &Arc<HostBlob>) -> impl Iterator<Item = (&HostBlob, Range<usize>)> {
    let len = blob.len();
    (0..len).step_by(POPULATED_BYTES).map(move |start| (&**blob, start..len.min(start + POPULATED_BYTES)))
}

impl StateHome {
    /// Allocates resident state, but for what `room` has on the device; `device` will read the weights.
    pub(crate) fn resident(
        network: &Network,
        kinds: &StateKinds,
        device: &dyn Device,
        room: DeviceRoom,
    ) -> Result<Self> {
        let groups = network.groups.iter().enumerate().map(|(index, group)| {
            if room.has_state(network, index) {
                return Ok(Mutex::default());
            }
            let blobs = kinds.blobs.iter().enumerate().map(|(index, kind)| {
                let mut blob = HostBlob::new(kind.bytes(group.elements as u64) as usize)?;
                if index == kinds.weight {
                    blob.pin_for(device);
                }
                Ok(Arc::new(blob))
            });
            blobs.collect::<std::result::Result<Vec<_>, TierError>>().map(Mutex::new)
        });
        let groups = groups.collect::<std::result::Result<Vec<_>, _>>()?;
        Ok(Self::Resident(Resident { groups, saved: Mutex::default() }))
    }

    /// The weights of a group, if they are in host memory.
    pub(crate) fn resident_weights(&self, group: usize, kinds: &StateKinds) -> Option<SharedBytes> {
        match self {
            Self::Resident(resident) => {
                resident.lock(group).get(kinds.weight).map(|blob| SharedBytes::Blob(Arc::clone(blob)))
            }
            Self::Disk(stored) => stored.cache.weights(group, kinds),
        }
    }

    /// Whether there are [`resident_weights`](Self::resident_weights) of a group of state on disk, without getting hold of them.
    pub(crate) fn has_copied_weights(&self, group: usize, kinds: &StateKinds) -> bool {
        self.stored().is_some_and(|stored| stored.cache.lock(group)[kinds.weight].is_some())
    }

    /// Makes all of its memory resident with the threads of `pool`, which one of them that writes it first would take longer for.
    pub(crate) fn populate(&self, pool: &rayon::ThreadPool) {
        let blobs: Vec<Arc<HostBlob>> = match self {
            Self::Resident(resident) => {
                (0..resident.groups.len()).flat_map(|group| resident.lock(group).clone()).collect()
            }
            Self::Disk(stored) => stored.cache.shared().into_iter().flatten().flatten().collect(),
        };
        let parts: Vec<_> = blobs.iter().flat_map(parts).collect();
        pool.install(|| parts.into_par_iter().for_each(|(blob, part)| blob.populate(part)));
    }

    pub(crate) fn stored(&self) -> Option<&Stored> {
        match self {
            Self::Resident(_) => None,
            Self::Disk(stored) => Some(stored),
        }
    }

    /// A step is done.
    pub(crate) fn note_step(&self, report: &StepReport) {
        if let Some(store) = self.disk() {
            let [waited, took] = [report.weights_stall_seconds, report.seconds].map(Duration::from_secs_f64);
            store.note_step(waited, took);
        }
    }

    pub(crate) fn disk(&self) -> Option<&DiskStore> {
        self.stored().map(|stored| &*stored.store)
    }
}

impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stored")
            .field("store", &self.store)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

/// The layout of the state on disk.
pub(crate) fn store_spec(
    config: &EngineConfig,
    network: &Network,
    kinds: &StateKinds,
    chunk_elements: usize,
) -> StoreSpec {
    let group =
        |g: &crate::network::ParamGroup| GroupSpec { name: g.name.clone(), elements: g.elements as u64 };
    StoreSpec {
        groups: network.groups.iter().map(group).collect(),
        kinds: kinds.blobs.clone(),
        chunk_elements: chunk_elements as u64,
        generations: if config.training.is_none() || config.keeps_once() { 1 } else { 2 },
        identity: config.identity.clone(),
    }
}

/// Whether the state needs directories at all.
pub(crate) fn needs_disk(config: &EngineConfig) -> Result {
    if config.placement == Placement::Disk && config.disks.is_empty() {
        let message = "state on disk needs a directory: set EngineConfig::disks";
        return Err(EngineError::Config(message.into()));
    }
    if config.kv_tier == Tier::Disk && config.disks.is_empty() && config.limits.cache_length > 0 {
        let message = "a key/value cache on disk needs a directory: set EngineConfig::disks";
        return Err(EngineError::Config(message.into()));
    }
    Ok(())
}

fn blob_kind(kind: StateKind) -> BlobKind {
    match kind {
        StateKind::Weight => BlobKind::Weight,
        StateKind::Master => BlobKind::Master,
        StateKind::MasterLow => BlobKind::MasterLow,
        StateKind::MasterLow8 => BlobKind::MasterLow8,
        StateKind::Moment1 => BlobKind::Moment1,
        StateKind::Moment2 => BlobKind::Moment2,
    }
}
