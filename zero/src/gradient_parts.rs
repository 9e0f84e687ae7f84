//! Where gradients are summed, and how they leave from there.
//!
//! A group has one accumulator in f32 for a backward over all micro-batches, and is parked when it is complete. Where a step has one
//! micro-batch, that of a block with [parts](crate::Block::gradient_parts) is shorter: each part has an accumulator of its own, which is
//! taken when the block comes to it and given back when it is complete, after its elements went into chunks. A chunk that two parts share
//! stays open until it is full, and chunks are parked in their order, so that the numbers are those of one accumulator for all.

use crate::block::{GradientSlot, Parts};
use crate::gradients::GradientPark;
use crate::lane::{Lane, flat_mut};
use crate::network::Network;
use crate::rounds::Rounds;
use crate::turns::ChunkMemory;
use crate::{Backend, Gradients, Result};
use std::ops::Range;
use terrace_device::{Arena, Region};
use terrace_kernels::{DType, KernelSet, View, ViewMut};

/// An accumulator in f32 of parameters of a group that follow one another.
#[derive(Debug)]
pub(crate) struct Accumulator {
    pub(crate) region: Region,
    params: Range<usize>,
    /// Of the group, with what lies between parameters and behind them.
    elements: Range<usize>,
    /// Of every parameter whether there is a sum of its gradient, or nothing that means anything.
    has_sum: Vec<bool>,
}

impl Accumulator {
    /// `is_sum` if it holds what an earlier use of the group parked.
    pub(crate) fn new(
        network: &Network,
        group: usize,
        params: Range<usize>,
        region: Region,
        is_sum: bool,
    ) -> Self {
        let elements = network.elements_of(group, &params);
        Self { region, has_sum: vec![is_sum; params.len()], params, elements }
    }

    /// Takes memory for the gradients of `params`, which are nothing yet.
    pub(crate) fn take(network: &Network, arena: &Arena, group: usize, params: Range<usize>) -> Result<Self> {
        let region = arena.alloc(Self::bytes(network, group, &params))?;
        Ok(Self::new(network, group, params, region, false))
    }

    /// Bytes for the gradients of `params`.
    pub(crate) fn bytes(network: &Network, group: usize, params: &Range<usize>) -> usize {
        network.elements_of(group, params).len() * DType::F32.size()
    }

    /// Fills with zeros what no block has added to, and what lies between parameters.
    pub(crate) fn complete(&mut self, backend: &Backend, network: &Network, group: usize) -> Result {
        let end = self.elements.end;
        let params = network.groups[group].params[self.params.clone()].iter().zip(&self.has_sum);
        let sums = params.filter(|(_, has_sum)| **has_sum).map(|(param, _)| {
            let end = param.offset + param.spec.elements();
            (param.offset, end)
        });
        let (mut at, mut gaps) = (self.elements.start, Vec::new());
        for (start, next) in sums.chain([(end, end)]) {
            if at < start {
                gaps.push(at..start);
            }
            at = next;
        }
        gaps.into_iter().try_for_each(|gap| self.clear(backend, &gap))
    }

    /// Fills those of the group's `elements` that are here with zeros.
    pub(crate) fn clear(&mut self, backend: &Backend, elements: &Range<usize>) -> Result {
        let (start, end) = (elements.start.max(self.elements.start), elements.end.min(self.elements.end));
        if start >= end {
            return Ok(());
        }
        let first = self.elements.start;
        let bytes = self.region.bytes_mut().slice((start - first) * 4, (end - first) * 4);
        Ok(backend.kernels.elementwise.zero(ViewMut::new(bytes, DType::F32, &[end - start]))?)
    }

    /// The first of its parameters, and the slots of all in their order.
    pub(crate) fn slots(&mut self, network: &Network, group: usize) -> (usize, Vec<GradientSlot<'_>>) {
        let Self { region, params, elements, has_sum } = self;
        let (mut rest, mut at) = (region.bytes_mut(), elements.start * 4);
        let mut slots = Vec::with_capacity(params.len());
        for (param, has_sum) in params.clone().zip(has_sum) {
            let placed = &network.groups[group].params[param];
            let (start, len) = (placed.offset * 4, placed.spec.elements() * 4);
            let (bytes, tail) = rest.split_at(start - at).1.split_at(len);
            slots.push(GradientSlot { bytes, dims: placed.spec.dims.clone(), has_sum: Some(has_sum) });
            (rest, at) = (tail, start + len);
        }
        (params.start, slots)
    }
}

/// A block's gradient accumulators: pieces of its groups' accumulators, in the order of its parameters from `first` on; those before it
/// are in `parts`.
pub(crate) fn gradients_of<'r>(
    kernels: &'r KernelSet,
    network: &Network,
    block: usize,
    groups: &[usize],
    accumulators: &'r mut [Accumulator],
    parts: Option<&'r mut dyn Parts>,
) -> Gradients<'r> {
    let mut slots: Vec<Vec<Option<GradientSlot<'r>>>> = Vec::with_capacity(groups.len());
    let mut first_of = Vec::with_capacity(groups.len());
    for (&group, accumulator) in groups.iter().zip(accumulators) {
        let (first, of_group) = accumulator.slots(network, group);
        first_of.push(first);
        slots.push(of_group.into_iter().map(Some).collect());
    }
    let first = groups.iter().position(|&group| group == block).map_or(0, |at| first_of[at]);
    let wanted = network.params_of(block).skip(first).map(|(group, param)| {
        let at =
            groups.iter().position(|&other| other == group).expect("a parameter lies in one of the groups");
        slots[at][param - first_of[at]].take().expect("a block uses a parameter once")
    });
    Gradients::of(kernels, first, wanted.collect(), parts)
}

/// Parts of a block's parameters whose gradients leave one after the other in a step of `rounds`; none where all of them are summed
/// first.
pub(crate) fn parts_of(network: &Network, block: usize, rounds: &Rounds) -> Vec<Range<usize>> {
    // What several blocks or micro-batches add to is complete behind the last of them.
    if rounds.micro_batches() > 1 || network.is_shared(block) {
        return Vec::new();
    }
    let parts = network.blocks[block].gradient_parts();
    let follow = parts.iter().scan(0, |end, part| Some(part.start == std::mem::replace(end, part.end)));
    assert!(follow.into_iter().all(|follows| follows), "the parts of a block follow one another: {parts:?}");
    parts
}

/// The parameters of a group that have an accumulator from the beginning to the end of a block's backward: those behind its `parts`.
pub(crate) fn params_behind(
    network: &Network,
    block: usize,
    parts: &[Range<usize>],
    group: usize,
) -> Range<usize> {
    let first = parts.last().filter(|_| group == block).map_or(0, |part| part.end);
    first..network.groups[group].params.len()
}

/// Elements of a group's gradient on their way into its chunks, in their order.
#[derive(Debug)]
pub(crate) struct Filling {
    pub(crate) group: usize,
    /// The next element.
    pub(crate) at: usize,
    /// The first chunk that is not full.
    pub(crate) chunk: usize,
    pub(crate) open: Option<Open>,
}

impl Filling {
    pub(crate) fn of(group: usize) -> Self {
        Self { group, at: 0, chunk: 0, open: None }
    }
}

/// A chunk, or all of a group, that is not full.
#[derive(Debug)]
pub(crate) enum Open {
    /// In host memory.
    Here(ChunkMemory),
    /// On a device with memory of its own.
    There(Region),
}

impl Open {
    /// Rounds `source` into its elements from `at` on.
    pub(crate) fn cast(&mut self, backend: &Backend, source: View<'_>, dtype: DType, at: usize) -> Result {
        let len = source.shape().elements();
        let (start, end) = (at * dtype.size(), (at + len) * dtype.size());
        let to = match self {
            Self::Here(memory) => flat_mut(&mut memory[start..end], dtype),
            Self::There(region) => ViewMut::new(region.bytes_mut().slice(start, end), dtype, &[len]),
        };
        Ok(backend.kernels.elementwise.cast(source, to)?)
    }
}

/// Where gradients go.
pub(crate) struct Destination<'a> {
    pub(crate) backend: &'a Backend,
    pub(crate) lane: &'a Lane,
    /// Nothing is added to them any more.
    pub(crate) last_use: bool,
    pub(crate) pool: &'a rayon::ThreadPool,
}

/// The parts of a block on their way to the park.
pub(crate) struct Leaving<'a> {
    pub(crate) park: &'a GradientPark,
    pub(crate) network: &'a Network,
    pub(crate) to: Destination<'a>,
    pub(crate) filling: Filling,
    /// What is left of them.
    pub(crate) parts: std::vec::IntoIter<Range<usize>>,
    /// Elements of the group that are not trained.
    pub(crate) frozen: Vec<Range<usize>>,
}

impl std::fmt::Debug for Leaving<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaving")
            .field("filling", &self.filling)
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

impl Leaving<'_> {
    /// Takes what the block has summed of the parameters behind its parts.
    pub(crate) fn end(mut self, rest: &Accumulator) -> Result {
        assert!(self.parts.next().is_none(), "a block completes all of its parts");
        self.park.fill(&mut self.filling, &rest.region, &self.to)
    }
}

impl Parts for Leaving<'_> {
    fn begin(&mut self) -> Result<Accumulator> {
        let params = self.parts.next().expect("a block completes each of its parts once");
        Accumulator::take(self.network, &self.to.lane.arena, self.filling.group, params)
    }

    fn slots<'s>(&self, part: &'s mut Accumulator) -> (usize, Vec<GradientSlot<'s>>) {
        part.slots(self.network, self.filling.group)
    }

    fn complete(&mut self, mut part: Accumulator) -> Result {
        part.complete(self.to.backend, self.network, self.filling.group)?;
        self.frozen.iter().try_for_each(|frozen| part.clear(self.to.backend, frozen))?;
        self.park.fill(&mut self.filling, &part.region, &self.to)
    }
}
