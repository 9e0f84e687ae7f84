//! Weights out of training state on disk, without an engine: no data, no optimizer, no memory for a step.
//!
//! The blocks say which parameters a group has and where, the store says how the group is cut into chunks. Reading is in the
//! order of the parameters, so the chunks that follow are read ahead.

use crate::checkpoint::group_difference;
use crate::export::{Params, pieces};
use crate::network::{Network, ParamGroup};
use crate::{Block, EngineError, ParamSpec, Result, WeightReader};
use std::collections::VecDeque;
use terrace_kernels::DType;
use terrace_tiers::{BlobKey, BlobKind, BlobSpec, Commit, GroupSpec, Lease, PendingRead, Pool, StoreView};

/// Chunks in flight ahead of the one that is used.
const READS_AHEAD: usize = 3;

/// The weights of one commit of a store.
#[derive(Debug)]
pub struct StoredWeights {
    view: StoreView,
    commit: Commit,
    step: u64,
    dtype: DType,
    params: Params,
    pool: Pool,
    current: Option<(Place, Lease)>,
    ahead: VecDeque<(Place, PendingRead)>,
}

/// A chunk of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    group: usize,
    chunk: usize,
}

impl StoredWeights {
    /// The weights of `commit`, which were trained as `blocks` in `dtype`.
    ///
    /// # Errors
    /// There is no such commit, or the store is being overwritten, or of another model or dtype, and which is said.
    pub fn open(view: StoreView, commit: Commit, blocks: Vec<Box<dyn Block>>, dtype: DType) -> Result<Self> {
        view.require_whole()?;
        let Some(facts) = view.commit(commit) else {
            return Err(match commit {
                Commit::Last => view.no_commit().into(),
                Commit::Previous => EngineError::Config("the training state keeps no previous step".into()),
            });
        };
        let network = Network::new(blocks, dtype)?;
        let spec = view.spec();
        let weights = spec.kinds.iter().find(|kind| kind.kind == BlobKind::Weight);
        if weights != Some(&BlobSpec::plain(BlobKind::Weight, network.element_bytes as u64)) {
            let found = weights.map_or(0, |kind| kind.block_bytes);
            return Err(EngineError::Config(format!(
                "the training state has weights of {found} bytes, and those of {dtype} have {}",
                network.element_bytes
            )));
        }
        let group = |g: &ParamGroup| GroupSpec { name: g.name.clone(), elements: g.elements as u64 };
        let given: Vec<GroupSpec> = network.groups.iter().map(group).collect();
        if given != spec.groups {
            return Err(EngineError::Config(format!(
                "the training state belongs to another model: {}. Give the model that it was trained from",
                group_difference(&spec.groups, &given)
            )));
        }
        let chunk_elements = spec.chunk_elements.min(network.group_elements_max() as u64) as usize;
        let groups = network.groups.iter().enumerate();
        let params = groups.flat_map(|(index, group)| group.params.iter().map(move |placed| (index, placed)));
        let params = Params::of(params);
        let pool = Pool::new("weights for export", READS_AHEAD + 2, chunk_elements * dtype.size())?;
        Ok(Self {
            view,
            commit,
            step: facts.step,
            dtype,
            params,
            pool,
            current: None,
            ahead: VecDeque::new(),
        })
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Number of parameters, shared ones counted once.
    pub fn parameters(&self) -> u64 {
        self.params.specs.iter().map(|spec| spec.elements() as u64).sum()
    }

    /// Brings a chunk in, and sends for those that follow, if it followed itself.
    fn fetch(&mut self, place: Place) -> Result<&[u8]> {
        if self.current.as_ref().is_none_or(|(current, _)| *current != place) {
            let before = self.current.take().map(|(before, _)| before);
            let follows = before.is_none_or(|before| self.after(before) == Some(place));
            // What was read ahead and is not wanted holds only padding, or the reader jumped.
            while self.ahead.front().is_some_and(|(next, _)| *next != place) {
                self.ahead.pop_front();
            }
            if self.ahead.is_empty() {
                self.send_for(place);
            }
            let (_, read) = self.ahead.pop_front().expect("the chunk is on its way");
            self.current = Some((place, read.wait()?));
            let mut last = self.ahead.back().map_or(place, |(last, _)| *last);
            while follows
                && self.ahead.len() < READS_AHEAD
                && let Some(next) = self.after(last)
            {
                self.send_for(next);
                last = next;
            }
        }
        Ok(&self.current.as_ref().expect("filled above").1)
    }

    fn send_for(&mut self, place: Place) {
        let key = BlobKey { group: place.group, kind: BlobKind::Weight };
        let lease = self.pool.acquire(self.view.spec().chunk_bytes(key, place.chunk));
        let read = self.view.read(self.commit, key, place.chunk..place.chunk + 1, lease);
        self.ahead.push_back((place, read));
    }

    /// The chunk that follows in the order of the groups.
    fn after(&self, place: Place) -> Option<Place> {
        let spec = self.view.spec();
        if place.chunk + 1 < spec.chunks(place.group) {
            return Some(Place { chunk: place.chunk + 1, ..place });
        }
        let group = (place.group + 1..spec.groups.len()).find(|&group| spec.chunks(group) > 0)?;
        Some(Place { group, chunk: 0 })
    }
}

impl WeightReader for StoredWeights {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.params.specs.clone()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> Result {
        let (group, offset) = self.params.find(&param.name)?;
        let size = self.dtype.size();
        let chunk_bytes = self.view.spec().chunk_elements as usize * size;
        for piece in pieces((offset + start) * size, out.len(), chunk_bytes) {
            let bytes = self.fetch(Place { group, chunk: piece.chunk })?;
            out[piece.out].copy_from_slice(&bytes[piece.inside]);
        }
        Ok(())
    }
}
