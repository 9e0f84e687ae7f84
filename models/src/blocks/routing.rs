//! What tokens choose of experts: as it is kept, tile by tile, and as products read it.

use super::TILE_ROWS;
use super::layers::{Normed, tiles};
use std::array;
use std::ops::Range;
use terrace_kernels::{Tensor, View};

/// What the router gives for all rows, kept for backward.
#[derive(Debug)]
pub(crate) struct Routing {
    /// f32 `[T, E]`.
    pub(super) logits: Tensor,
    /// f32 `[T, X]`.
    pub(super) weights: Tensor,
    /// i32 `[T, X]`.
    pub(super) chosen: Tensor,
    /// i32 `[T, X]`, of the routed rows of their tile.
    pub(super) rows: Tensor,
    /// i32 `[tiles, E + 1]`.
    pub(super) starts: Tensor,
}

/// What forward leaves for backward.
#[derive(Debug)]
pub(crate) struct Routed {
    pub(super) routing: Routing,
    /// `[T·X, F]`.
    pub(super) gate: Tensor,
    /// `[T·X, F]`.
    pub(super) up: Tensor,
    /// Gate and up of what is beside the experts.
    pub(super) shared: Option<[Tensor; 2]>,
}

/// A tile of rows.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(super) index: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// What backward needs of the forward of a tile: what experts read, and what they made of it, kept or computed again.
pub(crate) struct Experts<'k> {
    pub(super) normed: Normed,
    pub(super) kept: Option<(&'k Routed, Tile)>,
    pub(super) again: Option<(Routing, [Tensor; 2])>,
}

impl Tile {
    /// Those of so many rows.
    pub(crate) fn all(rows: usize) -> impl Iterator<Item = Self> {
        tiles(rows, TILE_ROWS).enumerate().map(|(index, (start, end))| Self { index, start, end })
    }

    /// The only one of so many rows.
    pub(super) fn alone(rows: usize) -> Self {
        Self { index: 0, start: 0, end: rows }
    }

    pub(super) fn rows(self) -> usize {
        self.end - self.start
    }

    /// Its rows of all.
    pub(crate) fn of(self, all: &Tensor) -> View<'_> {
        all.view().rows(self.start, self.end)
    }
}

impl Experts<'_> {
    /// What they chose, gate and up, and which tile of them it is.
    pub(super) fn parts(&self, chosen: usize) -> (&Routing, [View<'_>; 2], Tile) {
        match (&self.kept, &self.again) {
            (Some((kept, tile)), _) => (&kept.routing, kept.wide_of(*tile, chosen), *tile),
            (None, Some((routing, [gate, up]))) => {
                (routing, [gate.view(), up.view()], Tile::alone(routing.rows.shape().rows()))
            }
            (None, None) => unreachable!("what is not kept is recomputed"),
        }
    }
}

/// The rows of a tile of [`Routing`], and which routed rows are those of each expert.
pub(super) struct Routes<'a> {
    pub(super) logits_RE: View<'a>,
    pub(super) weights_RX: View<'a>,
    pub(super) chosen_RX: View<'a>,
    pub(super) rows_RX: View<'a>,
    /// What choices weigh in the end, if that is not what they weigh among themselves.
    pub(super) scaled_RX: Option<Tensor>,
    /// `[E + 1]`.
    pub(super) starts: Vec<usize>,
}

impl<'a> Routes<'a> {
    pub(super) fn of(routing: &'a Routing, Tile { start, end, .. }: Tile, starts: Vec<usize>) -> Self {
        Self {
            logits_RE: routing.logits.view().rows(start, end),
            weights_RX: routing.weights.view().rows(start, end),
            chosen_RX: routing.chosen.view().rows(start, end),
            rows_RX: routing.rows.view().rows(start, end),
            scaled_RX: None,
            starts,
        }
    }

    /// What choices weigh.
    pub(super) fn final_RX(&self) -> View<'_> {
        self.scaled_RX.as_ref().map_or(self.weights_RX, Tensor::view)
    }

    /// The same with experts of a stage alone, whatever the others have.
    pub(super) fn of_stage(mut self, stage: &Range<usize>) -> Self {
        let (first, last) = (self.starts[stage.start], self.starts[stage.end]);
        self.starts.iter_mut().for_each(|start| *start = (*start).clamp(first, last));
        self
    }

    pub(super) fn busy(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        busy(&self.starts)
    }
}

/// The experts that have routed rows, and the first and the last but one of them.
fn busy(starts: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> {
    let spans = starts.iter().zip(&starts[1..]).enumerate();
    spans.map(|(expert, (&from, &to))| (expert, from, to)).filter(|(_, from, to)| from < to)
}

/// The experts that any row of a tile chose.
pub(crate) fn chosen_experts(starts: &[usize]) -> Vec<usize> {
    busy(starts).map(|(expert, ..)| expert).collect()
}

impl Routing {
    /// In the order of [`from_tensors`](Self::from_tensors).
    pub(crate) fn into_tensors(self) -> [Tensor; 5] {
        let Self { logits, weights, chosen, rows, starts } = self;
        [logits, weights, chosen, rows, starts]
    }

    pub(crate) fn from_tensors([logits, weights, chosen, rows, starts]: [Tensor; 5]) -> Self {
        Self { logits, weights, chosen, rows, starts }
    }
}

impl Routed {
    /// Gate and up of a tile.
    pub(super) fn wide_of(&self, tile: Tile, chosen: usize) -> [View<'_>; 2] {
        let (start, end) = (tile.start * chosen, tile.end * chosen);
        [&self.gate, &self.up].map(|wide| wide.view().rows(start, end))
    }

    /// In the order of [`from_tensors`](Self::from_tensors).
    pub(crate) fn into_tensors(self) -> Vec<Tensor> {
        let Self { routing, gate, up, shared } = self;
        routing.into_tensors().into_iter().chain([gate, up]).chain(shared.into_iter().flatten()).collect()
    }

    /// # Panics
    /// If they are not what a feed-forward with experts left.
    pub(crate) fn from_tensors(kept: Vec<Tensor>) -> Self {
        let mut kept = kept.into_iter();
        let mut next = || kept.next().expect("a layer gets what its own forward kept");
        let routing = Routing::from_tensors(array::from_fn(|_| next()));
        let (gate, up) = (next(), next());
        let shared: Vec<Tensor> = kept.collect();
        Self { routing, gate, up, shared: shared.try_into().ok() }
    }
}
