//! Planning runs: the same sequence of device allocations as a real step, over virtual memory and dry kernels.
//!
//! What comes out is exact, holes of the arena included, because regions are placed first-fit in the same order. Only of chunks that
//! take each other's places again and again a few are enough.

use crate::gradients::DOWNLOAD_WINDOW;
use crate::kept::{Keeping, KeptTensors};
use crate::kv::{KvLayout, KvPlan};
use crate::network::Network;
use crate::rounds::Rounds;
use crate::turns::Turns;
use crate::{BatchLimits, Context, Gradients, Kept, KvSlot, MicroBatch, Mode, OutputSpec, Result, Weights};
use std::collections::{HashSet, VecDeque};
use std::iter::{once, repeat_n};
use std::ops::Range;
use terrace_device::{Arena, Bytes, BytesMut, Region};
use terrace_kernels::{DType, Tensor, View, ViewMut, dry};

/// What a step needs and does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DryCost {
    pub(crate) arena_bytes: usize,
    /// What blocks leave in memory of their own, by block; empty if none has any.
    pub(crate) left_bytes: Vec<usize>,
    pub(crate) flops: u64,
}

/// What a block does in training for one micro-batch: its floating-point operations, and what it can keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockCost {
    /// Before backward; none of the last block.
    pub(crate) forward: u64,
    /// In backward, if forward left nothing.
    pub(crate) backward: u64,
    /// In backward, with what forward leaves if it is asked.
    pub(crate) backward_of_kept: u64,
    /// Bytes of the arena that forward leaves if it is asked; `None` if it leaves nothing.
    pub(crate) kept_bytes: Option<usize>,
}

pub(crate) struct DryRun<'a> {
    pub(crate) network: &'a Network,
    pub(crate) dtype: DType,
    pub(crate) unified: bool,
    /// Signals stay on the device from one block to the next (devices with their own memory only).
    pub(crate) staying: Staying,
    pub(crate) sample: &'a MicroBatch,
    pub(crate) rounds: Rounds,
    /// Elements of a chunk of gradient on its way down (devices with their own memory only).
    pub(crate) chunk_elements: usize,
    /// The update follows backward, which lands every block's gradients for it.
    pub(crate) update_follows: bool,
    pub(crate) limits: BatchLimits,
    /// Where the key/value cache is, if it is not all in the arena.
    pub(crate) kv: Option<KvPlan>,
    pub(crate) keeping: Keeping,
    /// Blocks leave what they keep in memory that their gradients have in turns with them.
    pub(crate) in_turns: bool,
    /// So many of the last groups have their state on the device, where their gradients stay.
    pub(crate) state_groups: usize,
}

/// What lives from one block to the next.
struct State {
    inputs: Vec<Vec<Tensor>>,
    loss: Tensor,
    /// What stays on the device of every micro-batch.
    staying: Vec<Option<Region>>,
    kept: KeptTensors,
    parking: Parking,
    /// The same, of f32, between rounds.
    sums: Parking,
}

/// Gradients on a device with memory of its own.
#[derive(Default)]
struct Parking {
    /// Groups of which something is parked.
    known: HashSet<usize>,
    /// Chunks on their way down.
    coming: VecDeque<Region>,
}

impl Parking {
    /// Takes room for a chunk, if need be that of the oldest on its way.
    fn park(&mut self, arena: &Arena, bytes: usize) -> Result {
        if self.coming.len() == DOWNLOAD_WINDOW {
            self.coming.pop_front();
        }
        self.coming.push_back(arena.alloc(bytes)?);
        Ok(())
    }
}

/// Which signals stay on a device with its own memory from one block to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Staying {
    None,
    All,
    /// Checkpoints that go to disk do not.
    UnlessSpilled,
}

impl Staying {
    pub(crate) fn of(signals_stay: bool, activations_on_disk: bool) -> Self {
        match (signals_stay, activations_on_disk) {
            (false, _) => Self::None,
            (true, false) => Self::All,
            (true, true) => Self::UnlessSpilled,
        }
    }
}

impl DryRun<'_> {
    /// Runs `mode` once and measures it.
    pub(crate) fn measure(&self, mode: Mode) -> Result<DryCost> {
        let arena = Arena::virtual_memory();
        let (kernels, counter) = dry::kernel_set();
        let generates = mode == Mode::Generate;
        let away = self.kv.as_ref().filter(|_| generates);
        let mut caches = if generates && away.is_none() { self.caches(&arena)? } else { Vec::new() };
        let _away = away.map(|away| away.take(&arena)).transpose()?;
        let rounds: Vec<Range<usize>> =
            if mode == Mode::Train { self.rounds.all().collect() } else { once(0..1).collect() };
        let mut inputs = Vec::new();
        for _ in rounds.iter().flat_map(Range::clone) {
            let tensors = self.sample.inputs.iter().map(|t| Tensor::new(&arena, t.dtype, &t.dims));
            inputs.push(tensors.collect::<std::result::Result<Vec<_>, _>>()?);
        }
        let mut state = State {
            loss: Tensor::new(&arena, DType::F64, &[1])?,
            staying: inputs.iter().map(|_| None).collect(),
            inputs,
            kept: KeptTensors::default(),
            parking: Parking::default(),
            sums: Parking::default(),
        };
        let pages = generates.then(|| self.page_table(&arena)).transpose()?;
        let trains_in_turns = self.in_turns && mode == Mode::Train;
        let turns =
            if trains_in_turns { Turns::planned(self.network, self.keeping) } else { Turns::default() };
        let last = self.network.last();
        let forward_until = if mode == Mode::Train { last } else { last + 1 };
        for round in rounds {
            for block in 0..forward_until {
                for m in round.clone() {
                    let State { inputs, loss, staying, kept, .. } = &mut state;
                    let mut cx = self.context(&kernels, &arena, mode, &inputs[m], loss);
                    if let Some(((keys, values), pages)) =
                        caches.get_mut(block).and_then(Option::as_mut).zip(pages.as_ref())
                    {
                        let (keys, values) = (keys.view_mut(), values.view_mut());
                        cx.kv = Some(KvSlot { keys, values, pages: pages.view() });
                    }
                    if let Some((layout, pages)) =
                        away.and_then(|away| away.layout(block)).zip(pages.as_ref())
                    {
                        let buffer = BytesMut::virtual_range(layout.bytes());
                        cx.kv = Some(layout.slot(buffer, pages.view()));
                    }
                    if mode == Mode::Train {
                        cx.kept = self.keeping.asks(block);
                        cx.lasting = turns.of(block).unwrap_or(&arena);
                    }
                    self.forward(block, mode, &arena, &mut cx, &mut staying[m])?;
                    kept.hold(block, m, cx.kept);
                }
            }
            let waits = |block: usize| self.rounds.waits(block) && !self.rounds.is_last(&round);
            if mode == Mode::Train {
                let backward = (0..=last).rev().filter(|&block| !waits(block));
                backward
                    .into_iter()
                    .try_for_each(|block| self.backward(block, &kernels, &arena, &round, &mut state))?;
            }
        }
        Ok(DryCost { arena_bytes: arena.peak(), left_bytes: turns.peaks(), flops: operations(&counter) })
    }

    /// What every block does, each on its own.
    pub(crate) fn blocks(&self) -> Result<Vec<BlockCost>> {
        let arena = Arena::virtual_memory();
        let (kernels, counter) = dry::kernel_set();
        let inputs = self.sample.inputs.iter().map(|t| Tensor::new(&arena, t.dtype, &t.dims));
        let inputs = inputs.collect::<std::result::Result<Vec<_>, _>>()?;
        let mut loss = Tensor::new(&arena, DType::F64, &[1])?;
        let mut blocks = Vec::new();
        for block in 0..=self.network.last() {
            let (used, before) = (arena.used(), operations(&counter));
            let mut cx = self.context(&kernels, &arena, Mode::Train, &inputs, &mut loss);
            cx.kept = Kept::Wanted;
            if block < self.network.last() {
                self.forward(block, Mode::Train, &arena, &mut cx, &mut None)?;
            }
            let kept = cx.kept;
            let kept_bytes = matches!(kept, Kept::Left(_)).then(|| arena.used() - used);
            let after_forward = operations(&counter);
            let mut backward = |kept| -> Result<u64> {
                let before = operations(&counter);
                let mut cx = self.context(&kernels, &arena, Mode::Train, &inputs, &mut loss);
                cx.kept = kept;
                self.block_backward(block, &mut cx)?;
                Ok(operations(&counter) - before)
            };
            let backward_of_kept = if let Kept::Left(_) = kept { Some(backward(kept)?) } else { None };
            let recomputing = backward(Kept::Nothing)?;
            blocks.push(BlockCost {
                forward: after_forward - before,
                backward: recomputing,
                backward_of_kept: backward_of_kept.unwrap_or(recomputing),
                kept_bytes,
            });
        }
        Ok(blocks)
    }

    fn forward(
        &self,
        block: usize,
        mode: Mode,
        arena: &Arena,
        cx: &mut Context<'_>,
        staying: &mut Option<Region>,
    ) -> Result {
        let last = block == self.network.last();
        let x = block.checked_sub(1).map(|b| self.signal(b, mode));
        let y = self.signal(block, mode);
        let _x = self.crossing(arena, x.as_ref(), staying)?;
        // Logits always live in the arena; other outputs only where signals cross by copy.
        let y_region =
            if last { Some(arena.alloc(y.bytes())?) } else { self.crossing(arena, Some(&y), &mut None)? };
        let weights = self.weights(block);
        let y = ViewMut::new(BytesMut::virtual_range(y.bytes()), y.dtype, &y.dims);
        self.network.blocks[block].forward(cx, &weights, x.as_ref().map(virtual_view), y)?;
        // What is spilled leaves at once; the last boundary is not.
        let spilled =
            self.staying == Staying::UnlessSpilled && mode == Mode::Train && block + 1 < self.network.last();
        *staying = y_region.filter(|_| self.staying != Staying::None && !last && !spilled);
        Ok(())
    }

    fn backward(
        &self,
        block: usize,
        kernels: &terrace_kernels::KernelSet,
        arena: &Arena,
        round: &Range<usize>,
        state: &mut State,
    ) -> Result {
        let State { inputs, loss, staying, kept, parking, sums } = state;
        let network = self.network;
        let (gradient, f32) = (self.dtype.size(), DType::F32.size());
        let groups = network.groups_of(block);
        let accumulators: std::result::Result<Vec<Region>, _> =
            groups.iter().map(|&g| arena.alloc(network.groups[g].elements * 4)).collect();
        let _accumulators = accumulators?;
        for &group in &groups {
            if self.rounds.are_several() && !self.rounds.waits(block) {
                self.begin_gradient(arena, group, sums, f32)?;
            } else if !self.has_state(group) {
                self.begin_gradient(arena, group, parking, gradient)?;
            }
        }
        for m in self.rounds.backward_of(block, round) {
            let (inputs, staying) = (&inputs[m], &mut staying[m]);
            let x = block.checked_sub(1).map(|b| self.signal(b, Mode::Train));
            let dy = (block < network.last()).then(|| self.signal(block, Mode::Train));
            // What stayed is the input of the last block, and what comes into every other from above.
            let (mut of_x, mut of_dy) =
                if dy.is_none() { (staying.take(), None) } else { (None, staying.take()) };
            let _x = self.crossing(arena, x.as_ref(), &mut of_x)?;
            let _dy = self.crossing(arena, dy.as_ref(), &mut of_dy)?;
            let dx_region = self.crossing(arena, x.as_ref(), &mut None)?;
            let mut cx = self.context(kernels, arena, Mode::Train, inputs, loss);
            cx.kept = kept.take(block, m);
            self.block_backward(block, &mut cx)?;
            *staying =
                dx_region.filter(|_| self.staying != Staying::None && !(block == 1 && self.rounds.waits(0)));
        }
        if !self.rounds.is_last(round) {
            return groups.iter().try_for_each(|&group| self.park_gradient(arena, group, sums, f32));
        }
        let mut come_down = groups.iter().filter(|&&group| !self.has_state(group));
        come_down.try_for_each(|&group| self.park_gradient(arena, group, parking, gradient))?;
        if self.update_follows && groups.contains(&block) && !self.has_state(block) {
            parking.coming.clear();
        }
        Ok(())
    }

    /// The backward of a block alone.
    fn block_backward(&self, block: usize, cx: &mut Context<'_>) -> Result {
        let kernels = cx.kernels;
        let x = block.checked_sub(1).map(|b| self.signal(b, Mode::Train));
        let dy = (block < self.network.last()).then(|| self.signal(block, Mode::Train));
        let slots = param_dims(self.network, block).into_iter().map(|dims| {
            let bytes = dims.iter().product::<usize>() * 4;
            (BytesMut::virtual_range(bytes), dims)
        });
        let mut gradients = Gradients::new(kernels, slots.collect());
        let dx = x.as_ref().map(|x| ViewMut::new(BytesMut::virtual_range(x.bytes()), x.dtype, &x.dims));
        let (x, dy) = (x.as_ref().map(virtual_view), dy.as_ref().map(virtual_view));
        self.network.blocks[block].backward(cx, &self.weights(block), x, dy, dx, &mut gradients)
    }

    /// As `GradientPark::begin`: what an earlier use parked goes up again, chunk by chunk.
    fn begin_gradient(&self, arena: &Arena, group: usize, parking: &mut Parking, size: usize) -> Result {
        if self.unified || !parking.known.contains(&group) {
            return Ok(());
        }
        parking.coming.clear();
        for bytes in self.gradient_chunks(group, size) {
            let _chunk = arena.alloc(bytes)?;
        }
        Ok(())
    }

    /// As `GradientPark::park`: the last chunks are on their way down while the next block computes.
    fn park_gradient(&self, arena: &Arena, group: usize, parking: &mut Parking, size: usize) -> Result {
        if self.unified {
            return Ok(());
        }
        parking.known.insert(group);
        self.gradient_chunks(group, size).try_for_each(|bytes| parking.park(arena, bytes))
    }

    /// Whether the state of a group is on the device.
    fn has_state(&self, group: usize) -> bool {
        group + self.state_groups >= self.network.groups.len()
    }

    /// Bytes of the chunks of a group's gradient, of `size` bytes an element, but for some that change nothing.
    fn gradient_chunks(&self, group: usize, size: usize) -> impl Iterator<Item = usize> {
        telling_chunks(self.network.groups[group].elements, self.chunk_elements).map(move |len| len * size)
    }

    /// The region of a signal on a device with its own memory: the one in which it stayed, or a new one.
    fn crossing(
        &self,
        arena: &Arena,
        spec: Option<&OutputSpec>,
        staying: &mut Option<Region>,
    ) -> Result<Option<Region>> {
        match spec {
            Some(_) if staying.is_some() => Ok(staying.take()),
            Some(spec) if !self.unified => Ok(Some(arena.alloc(spec.bytes())?)),
            _ => Ok(None),
        }
    }

    fn signal(&self, block: usize, mode: Mode) -> OutputSpec {
        self.network.output(block, self.sample.sequences, self.sample.length, self.dtype, mode)
    }

    fn weights(&self, block: usize) -> Weights<'static> {
        let groups = &self.network.groups;
        let views = self.network.params_of(block).map(|(group, param)| {
            let bytes = groups[group].elements * self.network.element_bytes;
            self.network.weight(group, param, Bytes::virtual_range(bytes))
        });
        Weights::mixed(views.collect())
    }

    fn context<'b>(
        &self,
        kernels: &'b terrace_kernels::KernelSet,
        arena: &'b Arena,
        mode: Mode,
        inputs: &'b [Tensor],
        loss: &'b mut Tensor,
    ) -> Context<'b> {
        Context {
            kernels,
            arena,
            lasting: arena,
            dtype: self.dtype,
            mode,
            sequences: self.sample.sequences,
            length: self.sample.length,
            inputs,
            loss: loss.view_mut(),
            loss_scale: 1.0,
            kv: None,
            kept: Kept::Nothing,
        }
    }

    fn caches(&self, arena: &Arena) -> Result<Vec<Option<(Tensor, Tensor)>>> {
        allocate_caches(self.network, arena, self.dtype, self.limits)
    }

    fn page_table(&self, arena: &Arena) -> Result<Tensor> {
        let dims = [self.sample.sequences, self.limits.pages_per_sequence()];
        Ok(Tensor::new(arena, DType::I32, &dims)?)
    }
}

/// Elements of the chunks of a gradient, without whole windows of those that a planning run learns nothing from.
///
/// When a window of full chunks is parked, each next one takes the lowest place that the others leave it. In the way of the lowest
/// place of all is at most one of them, which moves there itself when its turn comes, and stays. So every turn of the window settles
/// one more, and after as many turns as it has chunks all that follow take the places of those before them.
fn telling_chunks(elements: usize, chunk: usize) -> impl Iterator<Item = usize> {
    const SETTLED: usize = DOWNLOAD_WINDOW * (1 + DOWNLOAD_WINDOW);
    let (full, rest) = (elements / chunk, elements % chunk);
    let turns = full.saturating_sub(SETTLED) / DOWNLOAD_WINDOW;
    repeat_n(chunk, full - turns * DOWNLOAD_WINDOW).chain((rest > 0).then_some(rest))
}

fn operations(counter: &dry::Counter) -> u64 {
    let totals = counter.totals();
    totals.matmul_flops + totals.attention_flops + totals.other_flops
}

/// The pages of keys and of values of every block that wants a cache: `[N, P, G, K]` each.
pub(crate) fn allocate_caches(
    network: &Network,
    arena: &Arena,
    dtype: DType,
    limits: BatchLimits,
) -> Result<Vec<Option<(Tensor, Tensor)>>> {
    let tensors = |layout: Option<KvLayout>| {
        layout.map_or(Ok(None), |layout| {
            let dims = layout.dims();
            Ok(Some((Tensor::new(arena, dtype, dims)?, Tensor::new(arena, dtype, dims)?)))
        })
    };
    KvLayout::all(network, dtype, limits).into_iter().map(tensors).collect()
}

/// Dimensions of a block's parameters, own ones first, then borrowed.
pub(crate) fn param_dims(network: &Network, block: usize) -> Vec<Vec<usize>> {
    let own = network.groups[block].params.iter().map(|p| p.spec.dims.clone());
    let borrowed =
        network.borrows[block].iter().map(|b| network.groups[b.group].params[b.param].spec.dims.clone());
    own.chain(borrowed).collect()
}

fn virtual_view(spec: &OutputSpec) -> View<'static> {
    View::new(Bytes::virtual_range(spec.bytes()), spec.dtype, &spec.dims)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever there are holes, and whatever is on its way before.
    #[test]
    fn chunks_that_are_left_out_change_no_place() {
        const BLOCK: usize = 256;
        let places = |holes: usize, before: &[usize], chunks: &[usize]| {
            let arena = Arena::virtual_memory();
            let mut blocks: Vec<_> = (0..10).map(|_| Some(arena.alloc(BLOCK).unwrap())).collect();
            (0..blocks.len()).filter(|at| holes >> at & 1 == 1).for_each(|at| blocks[at] = None);
            let mut parking = Parking::default();
            before.iter().chain(chunks).for_each(|len| parking.park(&arena, len * BLOCK).unwrap());
            format!("{:?}", parking.coming)
        };
        for (holes, chunk) in (0..1 << 10).flat_map(|holes| [(holes, 1), (holes, 2), (holes, 3)]) {
            for elements in [chunk * 9, chunk * 20, chunk * 21 + chunk / 2] {
                for before in [&[][..], &[1], &[3, 1], &[1, 4], &[2, 2]] {
                    let all = (0..elements).step_by(chunk).map(|start| chunk.min(elements - start));
                    let all = places(holes, before, &all.collect::<Vec<_>>());
                    let telling = places(holes, before, &telling_chunks(elements, chunk).collect::<Vec<_>>());
                    assert_eq!(
                        all, telling,
                        "holes {holes:b}, {elements} in chunks of {chunk} after {before:?}"
                    );
                }
            }
        }
        assert_eq!(telling_chunks(1_000_001, 10).count(), 7);
    }
}
