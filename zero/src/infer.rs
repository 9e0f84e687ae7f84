//! Forward only: evaluation and generation.

use crate::carry::Carried;
use crate::device_weights::DeviceWeights;
use crate::dry::allocate_caches;
use crate::engine::{Engine, Signals};
use crate::fetch::{Fetcher, Order, Ready};
use crate::kv::{KvPass, KvPlan, Layers};
use crate::lane::Signal;
use crate::network::Network;
use crate::on_demand::{OnDemand, uses_few};
use crate::pass::Pass;
use crate::state::StateHome;
use crate::timeline::Resource;
use crate::train::zero_loss;
use crate::{BatchUse, Context, EngineConfig, EngineError, KvCache, MicroBatch, Mode, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use terrace_kernels::{Tensor, View, ViewMut};
use terrace_tiers::Lease;

/// The sum of loss terms over a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Σ of the terms.
    pub loss_sum: f64,
    /// Number of terms.
    pub loss_terms: u64,
}

impl Engine {
    /// The loss of a batch under the current weights; changes nothing.
    ///
    /// # Errors
    /// A shape that was not planned, numbers that blocks [cannot compute with](crate::Block::check), or a failing tier.
    pub fn evaluate(&mut self, batch: &MicroBatch) -> Result<Evaluation> {
        self.require_planned(batch, BatchUse::Loss)?;
        let (loss, _) = self.forward_only(batch, Mode::Evaluate, None)?;
        let bytes = self.read(loss, "the loss")?;
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
        if Arc::strong_count(&self.cache_alive) > 1 {
            return Err(EngineError::Config(
                "one key/value cache was planned, and it is in use: drop it first".into(),
            ));
        }
        let layers =
            match KvPlan::new(&self.config, &self.network, self.lane.unified, self.plan.windows.kv_room) {
                Some(plan) => Layers::away(plan, &self.config, &self.backend, &self.lane)?,
                None => Layers::Resident(allocate_caches(
                    &self.network,
                    &self.lane.arena,
                    self.config.dtype,
                    limits,
                )?),
            };
        let arena = &self.lane.arena;
        let carried = Carried::allocate(&self.network, arena, self.config.dtype, limits.sequences)?;
        Ok(KvCache::new(layers, carried, sequences, limits, Arc::clone(&self.cache_alive)))
    }

    /// Runs a batch over the cache and gives the logits `[B, V]` of each row's last valid position. Row b of the batch goes on from
    /// what the cache has of `sequences[b]`, each of which comes once; `added[b]` positions of it are valid and stay in the cache.
    ///
    /// # Errors
    /// `sequences` or `added` do not match the batch or the cache, which is another engine's, or full; a shape was not planned, numbers are
    /// such that blocks [cannot compute with](crate::Block::check) them, or a tier failed. The cache then knows of no position more than before; if keys and values are not all on the device, or blocks are recurrent,
    /// and a tier failed, it is of no more use.
    pub fn logits(
        &mut self,
        batch: &MicroBatch,
        cache: &mut KvCache,
        sequences: &[usize],
        added: &[usize],
    ) -> Result<Vec<f32>> {
        cache.check(batch, sequences, added, &self.cache_alive)?;
        let cached: Vec<usize> = sequences.iter().map(|&sequence| cache.lengths()[sequence]).collect();
        self.require_planned(batch, BatchUse::Generate { cached: &cached, added })?;
        let longest = cached.iter().max().unwrap_or(&0) + batch.length;
        if longest > cache.capacity() {
            return Err(EngineError::Config(format!(
                "{longest} positions do not fit the key/value cache of {}",
                cache.capacity()
            )));
        }
        cache.grow(sequences, added)?;
        let (_, logits) = self.forward_only(batch, Mode::Generate, Some((cache, sequences, added)))?;
        let logits = logits.expect("the last block writes logits in generation");
        cache.added(sequences, added);
        Ok(self
            .read(logits, "logits")?
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
            .collect())
    }

    /// Takes a result from the device, which may still be at work on it.
    fn read(&self, result: Tensor, name: &str) -> Result<Vec<u8>> {
        let began = Instant::now();
        let bytes = self.lane.read(result)?;
        if let Some(timeline) = self.config.timeline.as_ref().filter(|_| !self.lane.unified) {
            timeline.note(Resource::Wait, began, name.to_owned());
        }
        Ok(bytes)
    }

    fn require_planned(&self, batch: &MicroBatch, of: BatchUse<'_>) -> Result {
        let limits = self.config.limits;
        if batch.sequences == 0 || batch.length == 0 {
            return Err(EngineError::Batch("the batch has no positions".into()));
        }
        if batch.sequences > limits.sequences || batch.length > limits.length {
            return Err(EngineError::Config(format!(
                "batches of up to {} × {} positions were planned, not {} × {}",
                limits.sequences, limits.length, batch.sequences, batch.length
            )));
        }
        batch.check_inputs(&self.inputs)?;
        self.network.check(batch, of)
    }

    fn forward_only(
        &mut self,
        batch: &MicroBatch,
        mode: Mode,
        cache: Option<(&mut KvCache, &[usize], &[usize])>,
    ) -> Result<(Tensor, Option<Tensor>)> {
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
        let suffix = match (&cache, &config.timeline) {
            (Some((cache, sequences, _)), Some(_)) => cache.words(sequences, batch.length),
            _ => String::new(),
        };
        let (zero, table) = (zero_loss(), cache.as_ref().map(|(cache, sequences, _)| cache.table(sequences)));
        let numbers = cache.as_ref().and_then(|(cache, sequences, _)| cache.slots(sequences));
        let small = [&zero].into_iter().chain(&table).chain(&numbers).chain(&batch.inputs);
        let mut small = lane.tensors(small)?.into_iter();
        let mut loss = small.next().expect("it was the first");
        let pages = small.by_ref().take(usize::from(table.is_some())).next();
        let of_sequences = small.by_ref().take(usize::from(numbers.is_some())).next();
        let inputs: Vec<Tensor> = small.collect();
        let passed = cache.map(|(cache, sequences, added)| cache.pass(lane, sequences, added)).transpose()?;
        let (mut keys, mut carried) = passed.unzip();
        let (sequences, length) = (batch.sequences, batch.length);
        let pass = Pass { network, backend, lane, config, mode, sequences, length, loss_scale: 1.0, suffix };
        let items: Vec<usize> = (0..=network.last()).flat_map(|b| network.groups_of(b)).collect();
        let state = device_state.as_ref();
        let room = plan.windows.device_room;
        let room = device_weights.take(backend, network, room, state)?;
        let slots = weight_slots.as_ref();
        // Nothing changes frozen weights between two passes.
        let ahead = Some(&*ahead).filter(|_| config.training.is_none());
        let demand = &Demand::new(config, network, home, &room, sequences * length);
        let (room, logits) = std::thread::scope(|scope| -> Result<_> {
            let order = Order { items, gate: None, ahead, on_demand: &demand.now };
            let mut fetcher = Fetcher::start(scope, lane, home, kinds, slots, order, room)?;
            let mut signal: Option<Signal> = None;
            let mut logits = None;
            for block in 0..=network.last() {
                let last = block == network.last();
                let ready = pass.fetch(&mut fetcher, block)?;
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
                moved(&pass, block, &mut keys, |keys| keys.enter(block))?;
                let began = Instant::now();
                let mut cx = pass.context(&inputs, &mut loss);
                if let Some((keys, pages)) = keys.as_mut().zip(pages.as_ref()) {
                    cx.kv = keys.slot(block, pages.view());
                }
                let carries = carried.as_mut().and_then(|carried| carried[block].as_mut());
                cx.carried =
                    carries.zip(of_sequences.as_ref()).map(|(carried, slots)| carried.slot(slots.view()));
                let y: ViewMut<'_> = match (&mut target, &mut output) {
                    (Some(target), _) => target.view_mut(),
                    (None, Some(output)) => output.view_mut(),
                    (None, None) => unreachable!("one of the two was made"),
                };
                let ready = demand.forward(&pass, &mut fetcher, (block, ready), &mut cx, (x_view, y))?;
                drop((cx, x));
                pass.computed(began, "forward", block)?;
                moved(&pass, block, &mut keys, |keys| keys.leave(block))?;
                signal = target.map(|t| lane.pass(t)).transpose()?;
                logits = output;
                pass.release(&mut fetcher, ready)?;
            }
            Ok((fetcher.finish(), logits))
        })?;
        *device_weights = room;
        device_weights.let_go(state);
        let (going, began) = (keys.as_ref().and_then(KvPass::going), Instant::now());
        keys.map_or(Ok(()), KvPass::finish)?;
        going.iter().for_each(|&block| pass.note(Resource::Wait, began, "keys and values of", block));
        Ok((loss, logits))
    }
}

/// What comes on demand in a pass.
struct Demand {
    /// Of each group, what one that is not whole lacks.
    layouts: Vec<Option<OnDemand>>,
    /// Of each group, what this pass leaves out until it is asked for.
    now: Vec<Option<OnDemand>>,
}

impl Demand {
    /// Of a pass over so many rows into the `room` there is on the device; nothing if the weights are not frozen and on disk.
    fn new(
        config: &EngineConfig,
        network: &Network,
        home: &StateHome,
        room: &DeviceWeights,
        rows: usize,
    ) -> Self {
        let Some(store) = home.disk().filter(|_| config.training.is_none()) else {
            return Self { layouts: Vec::new(), now: Vec::new() };
        };
        let stays = |group: usize| matches!(room.places.get(group), Some(Some(_)));
        let of = |group| if stays(group) { None } else { OnDemand::of(network, store.spec(), group) };
        let layouts: Vec<Option<OnDemand>> = (0..=network.last()).map(of).collect();
        let left_out = |(group, layout): (usize, &Option<OnDemand>)| {
            layout.clone().filter(|_| uses_few(network, group, rows))
        };
        let now = layouts.iter().enumerate().map(left_out).collect();
        Self { layouts, now }
    }

    /// A block's forward. Of one whose parts on demand are not there in halves, with a read of what it turns out to use between them, or, if
    /// the pass uses all, after reading the rest.
    fn forward(
        &self,
        pass: &Pass<'_>,
        fetcher: &mut Fetcher<'_>,
        (block, ready): (usize, Vec<Ready>),
        cx: &mut Context<'_>,
        (x, mut y): (Option<View<'_>>, ViewMut<'_>),
    ) -> Result<Vec<Ready>> {
        let body = &pass.network.blocks[block];
        if ready.iter().all(Ready::is_whole) {
            body.forward(cx, &pass.weights(block, &ready, &[]), x, y)?;
            return Ok(ready);
        }
        let layout = self.layouts[block].as_ref().expect("what is not whole has parts on demand");
        let mut complete = |ready: Vec<Ready>, runs: &[Range<usize>]| -> Result<Vec<Ready>> {
            let began = Instant::now();
            let whole =
                |ready: Ready| if ready.is_whole() { Ok(ready) } else { fetcher.complete(ready, runs) };
            let ready = ready.into_iter().map(whole).collect();
            pass.note(Resource::Wait, began, "weights on demand of", block);
            ready
        };
        if self.now[block].is_none() {
            let ready = complete(ready, &[layout.later()])?;
            body.forward(cx, &pass.weights(block, &ready, &[]), x, y)?;
            return Ok(ready);
        }
        let begun = body.begin(cx, &pass.weights(block, &ready, &[]), x, y.reborrow())?;
        let ready = complete(ready, &layout.wanted(&begun.wanted))?;
        body.finish(cx, &pass.weights(block, &ready, &[]), begun, y)?;
        Ok(ready)
    }
}

/// Brings or takes back the keys and values of a block, which may have to wait for the disk, the link or those of the block before.
fn moved<'k>(
    pass: &Pass<'_>,
    block: usize,
    keys: &mut Option<KvPass<'k>>,
    step: impl FnOnce(&mut KvPass<'k>) -> Result,
) -> Result {
    let Some(keys) = keys.as_mut().filter(|keys| keys.comes(block)) else { return Ok(()) };
    let began = Instant::now();
    step(keys)?;
    pass.note(Resource::Wait, began, "keys and values of", block);
    Ok(())
}

impl Signals {
    fn slot(&self, bytes: usize) -> Lease {
        match self {
            Self::Training(activations) => activations.slot(bytes),
            Self::ForwardOnly(pool) => pool.acquire(bytes),
        }
    }
}
