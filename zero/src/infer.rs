//! Forward only: evaluation and generation.

use crate::dry::allocate_caches;
use crate::engine::{Engine, Signals};
use crate::fetch::{Fetcher, Order};
use crate::lane::Signal;
use crate::train::{Pass, zero_loss};
use crate::{BatchLimits, CACHE_PAGE, EngineError, HostTensor, KvSlot, MicroBatch, Mode, Result};
use std::iter::repeat;
use terrace_kernels::{Tensor, ViewMut};
use terrace_tiers::Lease;

/// The sum of loss terms over a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Σ of the terms.
    pub loss_sum: f64,
    /// Number of terms.
    pub loss_terms: u64,
}

/// Keys and values of all positions so far, per block, in pages that the sequences share.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<(Tensor, Tensor)>>,
    lengths: Vec<usize>,
    /// Of each sequence, those of its first positions first.
    pages: Vec<Vec<i32>>,
    /// Pages that no sequence has.
    free: Vec<i32>,
    limits: BatchLimits,
}

impl KvCache {
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
    pub fn clear(&mut self, sequence: usize) {
        self.lengths[sequence] = 0;
        self.free.extend(self.pages[sequence].drain(..).rev());
    }

    /// Gives sequences the pages that `added` more positions of each need.
    fn grow(&mut self, sequences: &[usize], added: &[usize]) -> Result {
        for (&sequence, added) in sequences.iter().zip(added) {
            let needed = (self.lengths[sequence] + added).div_ceil(CACHE_PAGE);
            while self.pages[sequence].len() < needed {
                let Some(page) = self.free.pop() else {
                    return Err(EngineError::Config(format!(
                        "no page is left in the key/value cache of {} × {CACHE_PAGE} positions",
                        self.limits.pages()
                    )));
                };
                self.pages[sequence].push(page);
            }
        }
        Ok(())
    }

    /// i32 `[B, M]`: the pages of sequences, −1 where there is none.
    fn table(&self, sequences: &[usize]) -> HostTensor {
        let width = self.limits.pages_per_sequence();
        let row = |&sequence: &usize| self.pages[sequence].iter().copied().chain(repeat(-1)).take(width);
        let pages: Vec<i32> = sequences.iter().flat_map(row).collect();
        HostTensor::from_i32(&[sequences.len(), width], &pages)
    }
}

impl Engine {
    /// The loss of a batch under the current weights; changes nothing.
    ///
    /// # Errors
    /// A shape that was not planned or a failing tier.
    pub fn evaluate(&mut self, batch: &MicroBatch) -> Result<Evaluation> {
        let (loss, _) = self.forward_only(batch, Mode::Evaluate, None)?;
        let bytes = self.lane.read(loss)?;
        let loss_sum = f64::from_le_bytes(bytes.try_into().expect("the loss is one f64"));
        Ok(Evaluation { loss_sum, loss_terms: batch.loss_terms })
    }

    /// An empty cache for `sequences` sequences, as long as the plan has room for.
    ///
    /// # Errors
    /// The engine was not planned for generation, or another cache is alive.
    pub fn new_cache(&self, sequences: usize) -> Result<KvCache> {
        let limits = self.config.limits;
        if limits.cache_length == 0 || sequences > limits.sequences {
            return Err(EngineError::Config(format!("a cache for {sequences} sequences was not planned")));
        }
        let layers = allocate_caches(&self.network, &self.lane.arena, self.config.dtype, limits)?;
        let free = (0..limits.pages() as i32).rev().collect();
        Ok(KvCache { layers, lengths: vec![0; sequences], pages: vec![Vec::new(); sequences], free, limits })
    }

    /// Runs a batch over the cache and gives the logits `[B, V]` of each row's last valid position. Row b of the batch goes on from
    /// what the cache has of `sequences[b]`, each of which comes once; `added[b]` positions of it are valid and stay in the cache.
    ///
    /// # Errors
    /// The cache is full, a shape was not planned, or a tier failed. The cache then knows of no position more than before.
    ///
    /// # Panics
    /// If `sequences` or `added` do not match the batch, or there is no such sequence.
    pub fn logits(
        &mut self,
        batch: &MicroBatch,
        cache: &mut KvCache,
        sequences: &[usize],
        added: &[usize],
    ) -> Result<Vec<f32>> {
        assert_eq!((sequences.len(), added.len()), (batch.sequences, batch.sequences), "one entry a row");
        let longest =
            sequences.iter().map(|&sequence| cache.lengths[sequence]).max().unwrap_or(0) + batch.length;
        if longest > cache.capacity() {
            return Err(EngineError::Config(format!(
                "{longest} positions do not fit the key/value cache of {}",
                cache.capacity()
            )));
        }
        cache.grow(sequences, added)?;
        let (_, logits) = self.forward_only(batch, Mode::Generate, Some((cache, sequences)))?;
        let logits = logits.expect("the last block writes logits in generation");
        for (&sequence, added) in sequences.iter().zip(added) {
            cache.lengths[sequence] += added;
        }
        Ok(self
            .lane
            .read(logits)?
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
            .collect())
    }

    fn forward_only(
        &mut self,
        batch: &MicroBatch,
        mode: Mode,
        mut cache: Option<(&mut KvCache, &[usize])>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let limits = self.config.limits;
        if batch.sequences > limits.sequences || batch.length > limits.length {
            return Err(EngineError::Config(format!(
                "batches of up to {} × {} positions were planned, not {} × {}",
                limits.sequences, limits.length, batch.sequences, batch.length
            )));
        }
        self.flush()?;
        let Self {
            config,
            backend,
            network,
            kinds,
            plan,
            lane,
            home,
            weight_slots,
            device_weights,
            device_state,
            ahead,
            signals,
            ..
        } = self;
        let (network, lane, home, kinds) = (&*network, &*lane, &*home, &*kinds);
        let inputs = batch.inputs.iter().map(|t| lane.tensor(t)).collect::<Result<Vec<Tensor>>>()?;
        let mut loss = lane.tensor(&zero_loss())?;
        let pages =
            cache.as_ref().map(|(cache, sequences)| lane.tensor(&cache.table(sequences))).transpose()?;
        let (sequences, length) = (batch.sequences, batch.length);
        let pass = Pass { network, backend, lane, config, mode, sequences, length, loss_scale: 1.0 };
        let items: Vec<usize> = (0..=network.last()).flat_map(|b| network.groups_of(b)).collect();
        let state = device_state.as_ref();
        let room = plan.windows.device_room;
        let room = device_weights.take(backend, network, room, state)?;
        let slots = weight_slots.as_ref();
        // Nothing changes frozen weights between two passes.
        let ahead = Some(&*ahead).filter(|_| config.training.is_none());
        let (room, logits) = std::thread::scope(|scope| -> Result<_> {
            let order = Order { items, gate: None, ahead };
            let mut fetcher = Fetcher::start(scope, lane, home, kinds, slots, order, room)?;
            let mut signal: Option<Signal> = None;
            let mut logits = None;
            for block in 0..=network.last() {
                let last = block == network.last();
                let ready = pass.fetch(&mut fetcher, block)?;
                let weights = pass.weights(block, &ready);
                let x = match signal.take() {
                    Some(signal) => Some(lane.load(signal, pass.signal(block - 1))?),
                    None => None,
                };
                let x_view = x.as_ref().map(crate::lane::Loaded::view);
                let spec = pass.signal(block);
                let mut output =
                    if last { Some(Tensor::new(&lane.arena, spec.dtype, &spec.dims)?) } else { None };
                let mut target =
                    if last { None } else { Some(lane.target(signals.slot(spec.bytes()), spec)?) };
                let mut cx = pass.context(&inputs, &mut loss);
                if let Some(((cache, _), pages)) = cache.as_mut().zip(pages.as_ref()) {
                    cx.kv = cache.layers[block].as_mut().map(|(keys, values)| KvSlot {
                        keys: keys.view_mut(),
                        values: values.view_mut(),
                        pages: pages.view(),
                    });
                }
                let y: ViewMut<'_> = match (&mut target, &mut output) {
                    (Some(target), _) => target.view_mut(),
                    (None, Some(output)) => output.view_mut(),
                    (None, None) => unreachable!("one of the two was made"),
                };
                network.blocks[block].forward(&mut cx, &weights, x_view, y)?;
                drop((weights, x));
                signal = target.map(|t| lane.pass(t)).transpose()?;
                logits = output;
                pass.release(&mut fetcher, ready)?;
            }
            Ok((fetcher.finish(), logits))
        })?;
        *device_weights = room;
        device_weights.let_go(state);
        Ok((loss, logits))
    }
}

impl Signals {
    fn slot(&self, bytes: usize) -> Lease {
        match self {
            Self::Training(activations) => activations.slot(bytes),
            Self::ForwardOnly(pool) => pool.acquire(bytes),
        }
    }
}
