//! Mixture of experts.

use super::launch::Arguments;
use super::{Cuda, THREADS, failed, row_threads};
use crate::{ExpertGroups, Experts, Gating, GroupScore, Residual, Result, Scores, View, ViewMut, check};

/// Tokens of a block: each has a warp.
const TOKENS: usize = THREADS as usize / 32;

/// Shared memory of a group of a token: its score, and whether it is kept.
const GROUP_BYTES: usize = 8;
const _: () = assert!(TOKENS * ExpertGroups::COUNT_MAX * GROUP_BYTES <= 48 << 10, "what any block may have");

impl Experts for Cuda {
    fn route(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: ViewMut<'_>,
        chosen: ViewMut<'_>,
        rows: ViewMut<'_>,
        starts: ViewMut<'_>,
    ) -> Result {
        const OP: &str = "route";
        let dims = check::route(logits, gating, &weights, &chosen, &rows, &starts);
        let (chosen, rows, starts) = (chosen.view(), rows.view(), starts.view());
        let mut choose = gated(self.arguments().read(logits), gating).only_if(gating.bias);
        choose = choose.only(weights.view()).only(chosen);
        choose = choose.long(dims.tokens).size(dims.experts).size(dims.choices);
        let (groups, kept) = gating.groups.map_or((0, 0), |groups| (groups.count, groups.kept));
        let by_two = gating.groups.is_some_and(|groups| groups.by == GroupScore::TwoLargest);
        choose = choose.size(groups).size(kept).flag(by_two);
        let grid = [self.blocks(dims.tokens.div_ceil(TOKENS)), 1, 1];
        let shared = (TOKENS * groups * GROUP_BYTES) as u32;
        self.launch(OP, "experts_choose", grid, THREADS, shared, &mut choose)?;
        let of_experts = [self.blocks(dims.experts), 1, 1];
        let mut count = self.arguments().only(chosen).only(starts).long(dims.routed()).size(dims.experts);
        self.launch(OP, "experts_count", of_experts, THREADS, 0, &mut count)?;
        let mut sum = self.arguments().only(starts).size(dims.experts);
        self.launch(OP, "experts_starts", [1, 1, 1], THREADS, 0, &mut sum)?;
        let mut number = self.arguments().only(chosen).only(starts).only(rows);
        number = number.long(dims.routed()).size(dims.experts);
        self.launch(OP, "experts_rows", of_experts, THREADS, 0, &mut number)
    }

    fn route_backward(
        &self,
        logits: View<'_>,
        gating: Gating<'_>,
        weights: View<'_>,
        chosen: View<'_>,
        dweights: View<'_>,
        dlogits: ViewMut<'_>,
    ) -> Result {
        let dims = check::route_backward(logits, weights, chosen, dweights, &dlogits);
        let mut arguments = gated(self.arguments().read(logits), gating).only(weights).only(chosen);
        arguments = arguments.only(dweights).write(&dlogits);
        arguments = arguments.long(dims.tokens).size(dims.experts).size(dims.choices);
        let grid = [self.blocks(dims.tokens.div_ceil(TOKENS)), 1, 1];
        self.launch("route backward", "experts_route_backward", grid, THREADS, 0, &mut arguments)
    }

    fn starts(&self, starts: View<'_>, routed: usize) -> Result<Vec<usize>> {
        let mut numbers = vec![0; check::expert_starts(starts) + 1];
        let copied = self.card.read_back(starts.bytes(), bytemuck::cast_slice_mut(&mut numbers));
        copied.map_err(|error| failed("starts", &error))?;
        check::first_rows(&numbers, routed)
    }

    fn spread(&self, x: View<'_>, rows: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::spread(x, rows, &out);
        let mut arguments = self.arguments().read(x).only(rows).write(&out);
        arguments = arguments.long(dims.tokens).size(dims.choices).long(dims.width);
        let grid = [self.blocks(dims.tokens), 1, 1];
        self.launch("spread", "experts_spread", grid, threads(dims.width), 0, &mut arguments)
    }

    fn collect(&self, x: View<'_>, rows: View<'_>, residual: Residual<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::collect(x, rows, &residual, &out);
        let mut arguments = self.arguments().read(x).only(rows).optional(residual.view(&out)).write(&out);
        arguments = arguments.long(dims.tokens).size(dims.choices).long(dims.width);
        let grid = [self.blocks(dims.tokens), 1, 1];
        self.launch("collect", "experts_collect", grid, threads(dims.width), 0, &mut arguments)
    }

    fn weigh(&self, x: View<'_>, rows: View<'_>, weights: View<'_>, out: ViewMut<'_>) -> Result {
        let dims = check::weigh(x, rows, weights, &out);
        let mut arguments = self.arguments().read(x).only(rows).only(weights).write(&out);
        arguments = arguments.long(dims.routed()).long(dims.width);
        let grid = [self.blocks(dims.routed()), 1, 1];
        self.launch("weigh", "experts_weigh", grid, threads(dims.width), 0, &mut arguments)
    }

    fn weigh_backward(
        &self,
        d: ViewMut<'_>,
        x: View<'_>,
        rows: View<'_>,
        weights: View<'_>,
        dweights: ViewMut<'_>,
    ) -> Result {
        let dims = check::weigh_backward(&d, x, rows, weights, &dweights);
        let mut arguments = self.arguments().write(&d).read(x).only(rows).only(weights);
        arguments = arguments.only(dweights.view()).long(dims.routed()).long(dims.width);
        let grid = [self.blocks(dims.routed()), 1, 1];
        self.launch("weigh backward", "experts_weigh_backward", grid, threads(dims.width), 0, &mut arguments)
    }
}

/// How scores are made, and weights of them.
fn gated(arguments: Arguments, gating: Gating<'_>) -> Arguments {
    arguments.flag(gating.scores == Scores::Sigmoid).flag(gating.normalize).float(gating.scale)
}

/// Threads of a block that moves a row.
fn threads(width: usize) -> u32 {
    row_threads(width).min(THREADS)
}
