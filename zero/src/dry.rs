//! Planning runs: the same sequence of device allocations as a real step, over virtual memory and dry kernels.
//!
//! What comes out is exact, holes of the arena included, because regions are placed first-fit in the same order. Only of chunks that
//! take each other's places again and again a few are enough, and of micro-batches and rounds that find the arena as the one before
//! them found it, one: they would do what that did. Of others a block asks what it asked for the first ([`Script`]).

mod leaving;
mod script;

use crate::activations::Activations;
use crate::block::{GradientSlot, Parts};
use crate::carry::Carried;
use crate::gradient_parts::{Accumulator, params_behind, parts_of};
use crate::gradients::DOWNLOAD_WINDOW;
use crate::kept::{Keeping, KeptTensors, Shapes};
use crate::kv::{KvLayout, KvPlan, KvTensors};
use crate::network::Network;
use crate::rounds::Rounds;
use crate::turns::Turns;
use crate::{
    BatchLimits, Context, EngineError, Gradients, Kept, KvSlot, MicroBatch, Mode, OutputSpec, Result, Weights,
};
use leaving::LeavingParts;
use script::Script;
use std::collections::{HashMap, HashSet, VecDeque};
use std::iter::repeat_n;
use std::ops::Range;
use terrace_device::{Arena, Bytes, BytesMut, Region};
use terrace_kernels::{DType, KernelSet, Tensor, View, ViewMut, dry};

/// Rows of the largest micro-batch whose requests are noted.
const PLAYED_ROWS_MAX: usize = 1 << 17;

/// What a step needs and does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DryCost {
    pub(crate) arena_bytes: usize,
    /// What blocks leave in memory of their own, by block; empty if none has any.
    pub(crate) left_bytes: Vec<usize>,
    pub(crate) flops: u64,
}

/// What a block does in training for one micro-batch: its floating-point operations, and what it can keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BlockCost {
    /// Before backward; none of the last block.
    pub(crate) forward: u64,
    /// In backward, if forward left nothing.
    pub(crate) backward: u64,
    /// In backward, with what forward leaves if it is asked.
    pub(crate) backward_of_kept: u64,
    /// Bytes of the arena that forward leaves if it is asked; `None` if it leaves nothing.
    pub(crate) kept_bytes: Option<usize>,
    /// Bytes of every tensor of that.
    pub(crate) kept_tensors: Vec<usize>,
}

#[derive(Debug)]
pub(crate) struct DryRun<'a> {
    pub(crate) network: &'a Network,
    /// As a rank has it: of which gradients come down.
    pub(crate) state: &'a Network,
    pub(crate) dtype: DType,
    pub(crate) unified: bool,
    /// Signals stay on the device from one block to the next (devices with their own memory only).
    pub(crate) staying: Staying,
    pub(crate) sample: &'a MicroBatch,
    pub(crate) rounds: Rounds,
    /// Elements of a chunk of gradient on its way down (devices with their own memory only).
    pub(crate) chunk_elements: usize,
    /// Gradients come down whole.
    pub(crate) come_whole: bool,
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
    /// Those of the first micro-batch, which all are alike.
    inputs: Vec<Tensor>,
    loss: Tensor,
    /// What stays on the device of micro-batches.
    staying: HashMap<usize, Region>,
    kept: KeptTensors,
    /// By block, what it left in turns of micro-batches that were not run again.
    kept_of_others: HashMap<usize, Region>,
    /// By block, the tensors that each micro-batch has elsewhere from forward to backward.
    sent: HashMap<usize, Shapes>,
    /// On a device with its own memory: those of the last pair that was sent, on their way, and of the next one that comes back.
    leaving: Vec<Tensor>,
    coming: Option<Vec<Tensor>>,
    parking: Parking,
    /// The same, of f32, between rounds.
    sums: Parking,
    /// Operations of what was not run again.
    repeated: u64,
    /// By block, what its forward and its backward ask of the arena.
    forwards: HashMap<usize, Script>,
    backwards: HashMap<usize, Script>,
}

/// What a run is made with.
struct Tools<'a> {
    arena: &'a Arena,
    kernels: &'a KernelSet,
    counter: &'a dry::Counter,
    turns: &'a Turns,
}

/// Gradients on a device with memory of its own.
#[derive(Debug, Default)]
struct Parking {
    /// Groups of which something is parked.
    known: HashSet<usize>,
    /// Chunks, or all of a group's, on their way down, and which group's.
    coming: VecDeque<(usize, Region)>,
}

impl Parking {
    /// Takes room for a chunk, if need be that of the oldest on its way.
    fn park(&mut self, arena: &Arena, group: usize, bytes: usize) -> Result {
        if self.coming.len() == DOWNLOAD_WINDOW {
            self.coming.pop_front();
        }
        self.coming.push_back((group, arena.alloc(bytes)?));
        Ok(())
    }

    /// Takes room for all of a group, then gives back what others had.
    fn park_whole(&mut self, arena: &Arena, group: usize, bytes: usize) -> Result {
        if bytes > 0 {
            self.coming.push_back((group, arena.alloc(bytes)?));
        }
        self.drain();
        Ok(())
    }

    /// Gives back what others than the last have.
    fn drain(&mut self) {
        self.coming.drain(..self.coming.len().saturating_sub(1));
    }

    /// What later chunks depend on, beside the holes of the arena.
    fn layout(&self) -> (usize, Vec<(usize, usize)>) {
        let coming = self.coming.iter().map(|(_, region)| (region.start(), region.len()));
        (self.known.len(), coming.collect())
    }
}

impl State {
    /// Counts `times` more of the operations since `before`.
    fn repeat(&mut self, counter: &dry::Counter, before: u64, times: usize) -> Result {
        let each = self.operations(counter)? - before;
        let repeated = each.checked_mul(times as u64).and_then(|more| more.checked_add(self.repeated));
        self.repeated = repeated.ok_or_else(too_many_operations)?;
        Ok(())
    }

    fn operations(&self, counter: &dry::Counter) -> Result<u64> {
        operations(counter)?.checked_add(self.repeated).ok_or_else(too_many_operations)
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
        let mut carried = if generates { self.carried(&arena)? } else { Vec::new() };
        let trains = mode == Mode::Train;
        let micro_batches = if trains { self.rounds.micro_batches() } else { 1 };
        let (inputs, _others) = self.inputs(&arena, micro_batches)?;
        let mut state = State {
            inputs,
            loss: Tensor::new(&arena, DType::F64, &[1])?,
            staying: HashMap::new(),
            kept: KeptTensors::default(),
            kept_of_others: HashMap::new(),
            sent: HashMap::new(),
            leaving: Vec::new(),
            coming: None,
            parking: Parking::default(),
            sums: Parking::default(),
            repeated: 0,
            forwards: HashMap::new(),
            backwards: HashMap::new(),
        };
        let pages = generates.then(|| self.page_table(&arena)).transpose()?;
        let slots = carried.iter().flatten().next().map(|_| self.slots(&arena)).transpose()?;
        let turns = if self.in_turns && trains {
            Turns::planned(self.network, self.keeping, &self.rounds)
        } else {
            Turns::default()
        };
        let tools = Tools { arena: &arena, kernels: &kernels, counter: &counter, turns: &turns };
        if trains {
            self.rounds(&tools, &mut state)?;
        } else {
            for block in 0..=self.network.last() {
                let mut cx = self.context(&kernels, &arena, mode, &state.inputs, &mut state.loss);
                if let Some(((keys, values), pages)) =
                    caches.get_mut(block).and_then(Option::as_mut).zip(pages.as_ref())
                {
                    let (keys, values) = (keys.view_mut(), values.as_mut().map(Tensor::view_mut));
                    cx.kv = Some(KvSlot { keys, values, pages: pages.view() });
                }
                if let Some((layout, pages)) = away.and_then(|away| away.layout(block)).zip(pages.as_ref()) {
                    let buffer = BytesMut::virtual_range(layout.bytes());
                    cx.kv = Some(layout.slot(buffer, pages.view()));
                }
                let carries = carried.get_mut(block).and_then(Option::as_mut).zip(slots.as_ref());
                cx.carried = carries.map(|(carried, slots)| carried.slot(slots.view()));
                let mut staying = state.staying.remove(&0);
                self.forward(block, mode, &mut cx, &mut staying, |work, cx| work(cx))?;
                state.staying.extend(staying.map(|region| (0, region)));
            }
        }
        let flops = state.operations(&counter)?;
        Ok(DryCost { arena_bytes: arena.peak(), left_bytes: turns.peaks(), flops })
    }

    /// The inputs of a micro-batch, and memory behind them for those of all others.
    fn inputs(&self, arena: &Arena, micro_batches: usize) -> Result<(Vec<Tensor>, Option<Region>)> {
        let before = arena.used();
        let tensors = self.sample.inputs.iter().map(|t| Tensor::new(arena, t.dtype, &t.dims));
        let inputs = tensors.collect::<std::result::Result<Vec<_>, _>>()?;
        let others = (arena.used() - before)
            .checked_mul(micro_batches.saturating_sub(1))
            .ok_or_else(too_many_operations)?;
        let others = (others > 0).then(|| arena.alloc(others)).transpose()?;
        Ok((inputs, others))
    }

    /// All rounds of a training step. Between the first, before which nothing is parked, and the last, all are alike once one left the
    /// arena as it found it.
    fn rounds(&self, tools: &Tools<'_>, state: &mut State) -> Result {
        let (all, together) = (self.rounds.micro_batches(), self.rounds.together);
        let (mut start, mut before) = (0, None);
        while start < all {
            let (round, operations) = (start..start + together, state.operations(tools.counter)?);
            self.round(tools, &round, state)?;
            start = round.end;
            let layout = (tools.arena.holes(), state.parking.layout(), state.sums.layout());
            let alike = state.staying.is_empty() && before.as_ref() == Some(&layout);
            before = Some(layout);
            let times = ((all - start) / together).saturating_sub(1);
            if alike && times > 0 {
                state.repeat(tools.counter, operations, times)?;
                start += times * together;
            }
        }
        Ok(())
    }

    fn round(&self, tools: &Tools<'_>, round: &Range<usize>, state: &mut State) -> Result {
        let last = self.network.last();
        (0..last).try_for_each(|block| self.forward_of_all(tools, block, round, state))?;
        // What was on its way is away when backward begins.
        state.leaving.clear();
        state.sums.coming.clear();
        let waits = |block: usize| self.rounds.waits(block) && !self.rounds.is_last(round);
        let mut backward = (0..=last).rev().filter(|&block| !waits(block));
        backward.try_for_each(|block| self.backward(block, tools, round, state))
    }

    /// The forward of a block in training, for the micro-batches of `round`.
    fn forward_of_all(
        &self,
        tools: &Tools<'_>,
        block: usize,
        round: &Range<usize>,
        state: &mut State,
    ) -> Result {
        let &Tools { arena, kernels, counter, turns } = tools;
        let turn = turns.of(block);
        for m in round.clone() {
            let before = (arena.holes(), turn.map(Arena::holes), state.operations(counter)?);
            let mut cx = self.context(kernels, arena, Mode::Train, &state.inputs, &mut state.loss);
            cx.kept = self.keeping.ask(block);
            cx.lasting = turn.unwrap_or(arena);
            let mut staying = state.staying.remove(&m);
            let (scripts, repeated) = (&mut state.forwards, &mut state.repeated);
            self.forward(block, Mode::Train, &mut cx, &mut staying, |work, cx| match turn {
                None if self.are_played() => Script::perform(scripts, block, (counter, repeated), cx, work),
                _ => work(cx),
            })?;
            match cx.kept {
                Kept::Left(tensors) if self.keeping.sends(block) => {
                    state.sent.insert(block, Shapes::of(&tensors));
                    // In host memory they are copied at once.
                    state.leaving = if self.unified { Vec::new() } else { tensors };
                }
                kept => state.kept.hold(block, m, kept),
            }
            state.staying.extend(staying.map(|region| (m, region)));
            let rest = round.end - m - 1;
            let moves = !self.unified && self.keeping.sends(block);
            if moves || rest == 0 || !state.staying.is_empty() || arena.holes() != before.0 {
                continue;
            }
            // What is left in turns lies one after the other.
            let each = match (before.1.as_deref(), turn.map(Arena::holes).as_deref()) {
                (Some([before]), Some([after])) => after.0 - before.0,
                (None, None) => 0,
                _ => continue,
            };
            if let Some(turn) = turn.filter(|_| each > 0) {
                let bytes = each.checked_mul(rest).ok_or_else(too_many_operations)?;
                state.kept_of_others.insert(block, turn.alloc(bytes)?);
            }
            state.repeat(counter, before.2, rest)?;
            break;
        }
        Ok(())
    }

    /// What every block does, each on its own.
    pub(crate) fn blocks(&self) -> Result<Vec<BlockCost>> {
        let arena = Arena::virtual_memory();
        let inputs = self.sample.inputs.iter().map(|t| Tensor::new(&arena, t.dtype, &t.dims));
        let inputs = inputs.collect::<std::result::Result<Vec<_>, _>>()?;
        let mut loss = Tensor::new(&arena, DType::F64, &[1])?;
        let mut blocks = Vec::new();
        for block in 0..=self.network.last() {
            let (kernels, counter) = dry::kernel_set();
            let used = arena.used();
            let mut cx = self.context(&kernels, &arena, Mode::Train, &inputs, &mut loss);
            cx.kept = Kept::Wanted;
            if block < self.network.last() {
                self.forward(block, Mode::Train, &mut cx, &mut None, |work, cx| work(cx))?;
            }
            let kept = cx.kept;
            let (mut kept_bytes, mut kept_tensors) = (None, Vec::new());
            if let Kept::Left(tensors) = &kept {
                kept_tensors = Shapes::of(tensors).bytes().collect::<Vec<usize>>();
                // Of nothing there is nothing to keep.
                kept_bytes =
                    Some(arena.used() - used).filter(|_| kept_tensors.iter().any(|&bytes| bytes > 0));
            }
            let forward = operations(&counter)?;
            let mut backward = |kept| -> Result<u64> {
                let before = operations(&counter)?;
                let mut cx = self.context(&kernels, &arena, Mode::Train, &inputs, &mut loss);
                cx.kept = kept;
                self.block_backward(block, &mut cx, None)?;
                Ok(operations(&counter)? - before)
            };
            let backward_of_kept = if let Kept::Left(_) = kept { Some(backward(kept)?) } else { None };
            let recomputing = backward(Kept::Nothing)?;
            blocks.push(BlockCost {
                forward,
                backward: recomputing,
                backward_of_kept: backward_of_kept.unwrap_or(recomputing),
                kept_bytes,
                kept_tensors,
            });
        }
        Ok(blocks)
    }

    /// The forward of a block; `perform` is given its own part of it.
    fn forward(
        &self,
        block: usize,
        mode: Mode,
        cx: &mut Context<'_>,
        staying: &mut Option<Region>,
        perform: impl FnOnce(&dyn Fn(&mut Context<'_>) -> Result, &mut Context<'_>) -> Result,
    ) -> Result {
        let arena = cx.arena;
        let last = block == self.network.last();
        let x = block.checked_sub(1).map(|b| self.signal(b, mode));
        let y = self.signal(block, mode);
        let _x = self.crossing(arena, x.as_ref(), staying)?;
        // Logits always live in the arena; other outputs only where signals cross by copy.
        let y_region =
            if last { Some(arena.alloc(y.bytes())?) } else { self.crossing(arena, Some(&y), &mut None)? };
        let work = |cx: &mut Context<'_>| {
            let out = ViewMut::new(BytesMut::virtual_range(y.bytes()), y.dtype, &y.dims);
            self.network.blocks[block].forward(cx, &self.weights(block), x.as_ref().map(virtual_view), out)
        };
        perform(&work, cx)?;
        // What is spilled leaves at once; the last boundary is not.
        let spilled = self.staying == Staying::UnlessSpilled
            && mode == Mode::Train
            && Activations::can_spill(block, self.network.last());
        *staying = y_region.filter(|_| self.staying != Staying::None && !last && !spilled);
        Ok(())
    }

    fn backward(&self, block: usize, tools: &Tools<'_>, round: &Range<usize>, state: &mut State) -> Result {
        let arena = tools.arena;
        let network = self.network;
        let (gradient, f32) = (self.dtype.size(), DType::F32.size());
        let groups = network.groups_of(block);
        let parts = if self.has_state(block) { Vec::new() } else { parts_of(network, block, &self.rounds) };
        let accumulator = |&group: &usize| {
            let params = params_behind(network, block, &parts, group);
            Accumulator::take(network, arena, group, params)
        };
        let _accumulators = groups.iter().map(accumulator).collect::<Result<Vec<_>>>()?;
        for &group in &groups {
            if self.rounds.are_several() && !self.rounds.waits(block) {
                self.begin_gradient(arena, group, &mut state.sums, f32)?;
            } else if !self.has_state(group) {
                self.begin_gradient(arena, group, &mut state.parking, gradient)?;
            }
        }
        let mut leaving = (!parts.is_empty()).then(|| LeavingParts {
            run: self,
            arena,
            block,
            parts: parts.into_iter(),
            parking: std::mem::take(&mut state.parking),
            filled: 0,
        });
        let micro_batches = self.rounds.backward_of(block, round);
        self.backward_of_all(block, tools, micro_batches, leaving.as_mut(), state)?;
        let State { parking, sums, .. } = state;
        if !self.rounds.is_last(round) {
            return groups.iter().try_for_each(|&group| self.park_gradient(arena, group, sums, f32));
        }
        for &group in groups.iter().filter(|&&group| !self.has_state(group)) {
            match leaving.take_if(|_| group == block) {
                Some(leaving) => *parking = leaving.end()?,
                None => self.park_gradient(arena, group, parking, gradient)?,
            }
        }
        if self.update_follows && groups.contains(&block) && !self.has_state(block) {
            parking.coming.clear();
        }
        Ok(())
    }

    /// The backward of a block, for `micro_batches`.
    fn backward_of_all(
        &self,
        block: usize,
        tools: &Tools<'_>,
        micro_batches: Range<usize>,
        mut leaving: Option<&mut LeavingParts<'_>>,
        state: &mut State,
    ) -> Result {
        let (network, arena) = (self.network, tools.arena);
        for m in micro_batches.clone() {
            let before = (arena.holes(), state.operations(tools.counter)?);
            let x = block.checked_sub(1).map(|b| self.signal(b, Mode::Train));
            let dy = (block < network.last()).then(|| self.signal(block, Mode::Train));
            // What stayed is the input of the last block, and what comes into every other from above.
            let stayed = state.staying.remove(&m);
            let (mut of_x, mut of_dy) = if dy.is_none() { (stayed, None) } else { (None, stayed) };
            let x_region = self.crossing(arena, x.as_ref(), &mut of_x)?;
            let dy_region = self.crossing(arena, dy.as_ref(), &mut of_dy)?;
            let dx_region = self.crossing(arena, x.as_ref(), &mut None)?;
            let kept = match self.come_back(arena, (block, m), &micro_batches, state)? {
                Some(tensors) => Kept::Left(tensors),
                None => state.kept.take(block, m),
            };
            let mut cx = self.context(tools.kernels, arena, Mode::Train, &state.inputs, &mut state.loss);
            cx.kept = kept;
            if self.are_played() {
                let (scripts, count) = (&mut state.backwards, (tools.counter, &mut state.repeated));
                Script::perform(scripts, block, count, &mut cx, |cx| self.block_backward(block, cx, None))?;
            } else {
                let parts = leaving.as_mut().map(|leaving| &mut **leaving as &mut dyn Parts);
                self.block_backward(block, &mut cx, parts)?;
            }
            let stays = self.staying != Staying::None && !(block == 1 && self.rounds.waits(0));
            state.staying.extend(dx_region.filter(|_| stays).map(|region| (m, region)));
            drop((x_region, dy_region));
            let rest = micro_batches.end - m - 1;
            let moves = !self.unified && self.keeping.sends(block);
            if !moves && rest > 0 && state.staying.is_empty() && arena.holes() == before.0 {
                state.repeat(tools.counter, before.1, rest)?;
                break;
            }
            assert!(
                rest == 0 || !state.kept_of_others.contains_key(&block),
                "what is kept in turns lies outside the arena, which backward leaves as it found it"
            );
        }
        state.kept_of_others.remove(&block);
        Ok(())
    }

    /// As `KeptAway::take`: the tensors of a pair that was sent, and memory for those of the next.
    fn come_back(
        &self,
        arena: &Arena,
        (block, m): (usize, usize),
        micro_batches: &Range<usize>,
        state: &mut State,
    ) -> Result<Option<Vec<Tensor>>> {
        let Some(shapes) = state.sent.get(&block) else { return Ok(None) };
        let tensors = state.coming.take().map_or_else(|| shapes.take(arena), Ok)?;
        if !self.unified {
            let is_last = m + 1 == micro_batches.end;
            let next = if is_last {
                (0..block).rev().find(|next| state.sent.contains_key(next))
            } else {
                Some(block)
            };
            state.coming = next.map(|next| state.sent[&next].take(arena)).transpose()?;
        }
        Ok(Some(tensors))
    }

    /// Whether what blocks ask is noted and played: for several micro-batches, of which each asks for little. Blocks go through a
    /// batch in parts and ask for each of them.
    fn are_played(&self) -> bool {
        let rows = self.sample.sequences.saturating_mul(self.sample.length);
        self.rounds.micro_batches() > 1 && rows <= PLAYED_ROWS_MAX
    }

    /// The backward of a block alone.
    fn block_backward(&self, block: usize, cx: &mut Context<'_>, parts: Option<&mut dyn Parts>) -> Result {
        let kernels = cx.kernels;
        let x = block.checked_sub(1).map(|b| self.signal(b, Mode::Train));
        let dy = (block < self.network.last()).then(|| self.signal(block, Mode::Train));
        let behind_parts =
            if parts.is_some() { self.network.blocks[block].gradient_parts() } else { Vec::new() };
        let first = params_behind(self.network, block, &behind_parts, block).start;
        let slots = param_dims(self.network, block).into_iter().skip(first).map(|dims| {
            let bytes = BytesMut::virtual_range(dims.iter().product::<usize>() * DType::F32.size());
            GradientSlot { bytes, dims, has_sum: None }
        });
        // For no longer than the kernels are borrowed.
        let parts = parts.map(|parts| &mut *parts as &mut dyn Parts);
        let mut gradients = Gradients::of(kernels, first, slots.collect(), parts);
        let dx = x.as_ref().map(|x| ViewMut::new(BytesMut::virtual_range(x.bytes()), x.dtype, &x.dims));
        let (x, dy) = (x.as_ref().map(virtual_view), dy.as_ref().map(virtual_view));
        self.network.blocks[block].backward(cx, &self.weights(block), x, dy, dx, &mut gradients)
    }

    /// As `GradientPark::begin`: what an earlier use parked goes up again, chunk by chunk.
    fn begin_gradient(&self, arena: &Arena, group: usize, parking: &mut Parking, size: usize) -> Result {
        if self.unified || !parking.known.contains(&group) {
            return Ok(());
        }
        while parking.coming.len() >= DOWNLOAD_WINDOW || parking.coming.iter().any(|coming| coming.0 == group)
        {
            parking.coming.pop_front();
        }
        for bytes in self.gradient_chunks(group, size) {
            let _chunk = arena.alloc(bytes)?;
        }
        Ok(())
    }

    /// As `GradientPark::park`: all of it, or the last chunks, are on their way down while the next block computes.
    fn park_gradient(&self, arena: &Arena, group: usize, parking: &mut Parking, size: usize) -> Result {
        if self.unified {
            return Ok(());
        }
        parking.known.insert(group);
        if self.come_whole {
            return parking.park_whole(arena, group, self.state.groups[group].elements * size);
        }
        self.gradient_chunks(group, size).try_for_each(|bytes| parking.park(arena, group, bytes))
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
        kernels: &'b KernelSet,
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
            carried: None,
            kept: Kept::Nothing,
        }
    }

    fn caches(&self, arena: &Arena) -> Result<Vec<Option<KvTensors>>> {
        allocate_caches(self.network, arena, self.dtype, self.limits)
    }

    fn carried(&self, arena: &Arena) -> Result<Vec<Option<Carried>>> {
        Carried::allocate(self.network, arena, self.dtype, self.limits.sequences)
    }

    fn slots(&self, arena: &Arena) -> Result<Tensor> {
        Ok(Tensor::new(arena, DType::I32, &[self.sample.sequences])?)
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

/// What was counted so far; a counter stays at the largest number of a kind.
fn operations(counter: &dry::Counter) -> Result<u64> {
    let totals = counter.totals();
    let sum = totals.matmul_flops.checked_add(totals.attention_flops);
    let sum = sum.and_then(|sum| sum.checked_add(totals.other_flops)).filter(|&sum| sum < u64::MAX);
    sum.ok_or_else(too_many_operations)
}

fn too_many_operations() -> EngineError {
    EngineError::Config(
        "a step has more operations than can be counted (2⁶⁴): lower BatchLimits::micro_batches, BatchLimits::sequences or BatchLimits::length"
            .into(),
    )
}

/// The pages of keys, and of values if it has any, of every block that wants a cache: `[N, P, G, K]` each.
pub(crate) fn allocate_caches(
    network: &Network,
    arena: &Arena,
    dtype: DType,
    limits: BatchLimits,
) -> Result<Vec<Option<KvTensors>>> {
    let tensors = |layout: Option<KvLayout>| {
        layout.map_or(Ok(None), |layout| {
            let new = || Tensor::new(arena, dtype, layout.dims());
            let keys = new()?;
            Ok(Some((keys, (layout.count() > 1).then(new).transpose()?)))
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
            before.iter().chain(chunks).for_each(|len| parking.park(&arena, 0, len * BLOCK).unwrap());
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
