//! The key/value cache: pages that sequences share, on the device or away from it.

mod away;
mod layout;
mod plan;

pub(crate) use layout::KvLayout;
pub(crate) use plan::{KvPlan, KvRoom};

use crate::carry::{Carried, slots};
use crate::lane::Lane;
use crate::{BatchLimits, CACHE_PAGE, EngineError, HostTensor, KvSlot, MicroBatch, Result};
use away::{Away, AwayPass};
use std::iter::repeat;
use std::ops::Range;
use std::sync::Arc;
use terrace_aio::FileId;
use terrace_kernels::{Tensor, View};
use terrace_tiers::joined;

/// Keys and values of all positions so far, per block, in pages that the sequences share.
#[derive(Debug)]
pub struct KvCache {
    layers: Layers,
    /// What recurrent blocks carry, per block.
    carried: Vec<Option<Carried>>,
    /// A pass changes what blocks carry. One that fails leaves it unknown.
    is_changing: bool,
    lengths: Vec<usize>,
    /// Of each sequence, those of its first positions first.
    pages: Vec<Vec<i32>>,
    /// Pages that no sequence has.
    free: Vec<i32>,
    limits: BatchLimits,
    /// Held while the cache's memory is in use.
    _alive: Arc<()>,
}

/// Pages of the keys of a block, and of its values if it keeps any.
pub(crate) type KvTensors = (Tensor, Option<Tensor>);

/// Where keys and values are between passes.
#[derive(Debug)]
pub(crate) enum Layers {
    /// In the arena: keys and values of every block that has any.
    Resident(Vec<Option<KvTensors>>),
    Away(Box<Away>),
}

/// The layers in a pass through the blocks.
#[derive(Debug)]
pub(crate) enum KvPass<'a> {
    Resident(&'a mut [Option<KvTensors>]),
    Away(Box<AwayPass<'a>>),
}

impl Layers {
    /// Memory for the caches that `plan` has elsewhere.
    pub(crate) fn away(
        plan: KvPlan,
        config: &crate::EngineConfig,
        backend: &crate::Backend,
        lane: &Lane,
    ) -> Result<Self> {
        Ok(Self::Away(Box::new(Away::new(plan, config, backend, lane)?)))
    }
}

impl KvCache {
    pub(crate) fn new(
        layers: Layers,
        carried: Vec<Option<Carried>>,
        sequences: usize,
        limits: BatchLimits,
        alive: Arc<()>,
    ) -> Self {
        let free = (0..limits.pages() as i32).rev().collect();
        let (lengths, pages) = (vec![0; sequences], vec![Vec::new(); sequences]);
        Self { layers, carried, is_changing: false, lengths, pages, free, limits, _alive: alive }
    }

    /// Positions in the cache, per sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Positions there is room for, per sequence.
    pub fn capacity(&self) -> usize {
        self.limits.cache_length
    }

    /// Pages of [`CACHE_PAGE`] positions that no sequence has yet.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Forgets a sequence: its pages are free for others.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn clear(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
        self.free.extend(self.pages[sequence].drain(..).rev());
    }

    /// Refuses a pass that would write keys and values of one sequence over those of another, or count positions that it does not write.
    /// `alive` is that of the engine which computes.
    pub(crate) fn check(
        &self,
        batch: &MicroBatch,
        sequences: &[usize],
        added: &[usize],
        alive: &Arc<()>,
    ) -> Result {
        let refuse = |detail: String| Err(EngineError::Batch(detail));
        if !Arc::ptr_eq(alive, &self._alive) {
            return refuse("the key/value cache is another engine's: make one with Engine::new_cache".into());
        }
        if (sequences.len(), added.len()) != (batch.sequences, batch.sequences) {
            return refuse(format!(
                "a batch of {} rows needs one sequence and one number of added positions a row, not {} and {}",
                batch.sequences,
                sequences.len(),
                added.len()
            ));
        }
        let mut is_taken = vec![false; self.lengths.len()];
        for (row, (&sequence, &added)) in sequences.iter().zip(added).enumerate() {
            match is_taken.get_mut(sequence) {
                None => {
                    let there = self.lengths.len();
                    return refuse(format!("row {row} continues sequence {sequence} of a cache of {there}"));
                }
                Some(true) => return refuse(format!("sequence {sequence} comes twice, again in row {row}")),
                Some(taken) => *taken = true,
            }
            if added == 0 {
                return refuse(format!("row {row} adds no position: leave it out of the batch"));
            }
            if added > batch.length {
                return refuse(format!("row {row} of {} positions cannot add {added}", batch.length));
            }
        }
        Ok(())
    }

    /// The block whose keys and values are at `offset` of a file.
    pub(crate) fn block_at(&self, file: FileId, offset: u64) -> Option<usize> {
        match &self.layers {
            Layers::Resident(_) => None,
            Layers::Away(away) => away.block_at(file, offset),
        }
    }

    /// Says on a timeline what a pass of `length` positions more of some sequences is for.
    pub(crate) fn words(&self, sequences: &[usize], length: usize) -> String {
        match sequences.iter().map(|&sequence| self.lengths[sequence]).max() {
            None | Some(0) => ", prompt".to_owned(),
            Some(longest) => format!(", token {}", longest + length),
        }
    }

    /// Takes note of positions that a pass added.
    pub(crate) fn added(&mut self, sequences: &[usize], added: &[usize]) {
        self.is_changing = false;
        for (&sequence, added) in sequences.iter().zip(added) {
            self.lengths[sequence] += added;
        }
    }

    /// Gives sequences the pages that `added` more positions of each need.
    pub(crate) fn grow(&mut self, sequences: &[usize], added: &[usize]) -> Result {
        let more = |(&sequence, added): (&usize, &usize)| {
            let needed = (self.lengths[sequence] + added).div_ceil(CACHE_PAGE);
            (sequence, needed.saturating_sub(self.pages[sequence].len()))
        };
        let more: Vec<(usize, usize)> = sequences.iter().zip(added).map(more).collect();
        let taken: usize = more.iter().map(|(_, pages)| pages).sum();
        let Some(left) = self.free.len().checked_sub(taken) else {
            return Err(EngineError::Config(format!(
                "no page is left in the key/value cache of {} × {CACHE_PAGE} positions",
                self.limits.pages()
            )));
        };
        let mut taken = self.free.drain(left..).rev();
        for (sequence, pages) in more {
            self.pages[sequence].extend(taken.by_ref().take(pages));
        }
        Ok(())
    }

    /// i32 `[B, M]`: the pages of sequences, −1 where there is none.
    pub(crate) fn table(&self, sequences: &[usize]) -> HostTensor {
        let width = self.limits.pages_per_sequence();
        let row = |&sequence: &usize| self.pages[sequence].iter().copied().chain(repeat(-1)).take(width);
        let pages: Vec<i32> = sequences.iter().flat_map(row).collect();
        HostTensor::from_i32(&[sequences.len(), width], &pages)
    }

    /// i32 `[B]`: where blocks carry what they carry of sequences; `None` if no block does.
    pub(crate) fn slots(&self, sequences: &[usize]) -> Option<HostTensor> {
        self.carried.iter().any(Option::is_some).then(|| slots(sequences))
    }

    /// Begins a pass of a batch that adds so many positions to sequences; with it what blocks carry.
    pub(crate) fn pass<'a>(
        &'a mut self,
        lane: &'a Lane,
        sequences: &[usize],
        added: &[usize],
    ) -> Result<(KvPass<'a>, &'a mut [Option<Carried>])> {
        let Self { layers, carried, is_changing, lengths, pages, .. } = self;
        if carried.iter().any(Option::is_some) && std::mem::replace(is_changing, true) {
            let why = "a pass that failed has changed what recurrent layers carry: drop this key/value cache and make another";
            return Err(EngineError::Config(why.into()));
        }
        let pass = match layers {
            Layers::Resident(layers) => KvPass::Resident(layers),
            Layers::Away(away) => {
                let row = |(&sequence, &added): (&usize, &usize)| {
                    let length = lengths[sequence];
                    (&pages[sequence][..], length, length + added)
                };
                let rows: Vec<_> = sequences.iter().zip(added).map(row).collect();
                let used = joined(rows.iter().flat_map(|&(pages, length, _)| places(pages, 0..length)));
                let added = joined(rows.iter().flat_map(|&(pages, length, end)| places(pages, length..end)));
                KvPass::Away(Box::new(away.pass(lane, used, added)?))
            }
        };
        Ok((pass, carried))
    }
}

/// Where positions of a sequence with `pages` are, counted through all pages.
fn places(pages: &[i32], positions: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let Range { start, end } = positions;
    (start / CACHE_PAGE..end.div_ceil(CACHE_PAGE)).map(move |page| {
        let first = page * CACHE_PAGE;
        let (from, to) = (start.max(first) - first, end.min(first + CACHE_PAGE) - first);
        let place = pages[page] as usize * CACHE_PAGE;
        place + from..place + to
    })
}

impl KvPass<'_> {
    /// Whether the keys and values of `block` are elsewhere between passes.
    pub(crate) fn comes(&self, block: usize) -> bool {
        match self {
            Self::Resident(_) => false,
            Self::Away(pass) => pass.comes(block),
        }
    }

    /// The block whose keys and values [`finish`](Self::finish) waits for.
    pub(crate) fn going(&self) -> Option<usize> {
        match self {
            Self::Resident(_) => None,
            Self::Away(pass) => pass.going(),
        }
    }

    /// Makes the keys and values of `block` ready for kernels.
    pub(crate) fn enter(&mut self, block: usize) -> Result {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Away(pass) => pass.enter(block),
        }
    }

    /// What kernels of a block that was entered see; `None` if it has no cache.
    pub(crate) fn slot<'b>(&'b mut self, block: usize, pages: View<'b>) -> Option<KvSlot<'b>> {
        match self {
            Self::Resident(layers) => layers[block].as_mut().map(|(keys, values)| KvSlot {
                keys: keys.view_mut(),
                values: values.as_mut().map(Tensor::view_mut),
                pages,
            }),
            Self::Away(pass) => pass.slot(block, pages),
        }
    }

    /// To be called when the kernels of `block` are enqueued.
    pub(crate) fn leave(&mut self, block: usize) -> Result {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Away(pass) => pass.leave(block),
        }
    }

    pub(crate) fn finish(self) -> Result {
        match self {
            Self::Resident(_) => Ok(()),
            Self::Away(pass) => pass.finish(),
        }
    }
}
