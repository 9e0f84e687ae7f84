//! Weights that stay packed between the micro-batches of a step, on a device whose kernels pack them in host memory.

use super::{Choice, EnginePlan, Planner, page};
use crate::Result;
use crate::network::Network;
use crate::pass::Pass;
use terrace_kernels::{Packed, Packing};
use terrace_tiers::Tier;

/// Of what is left beside all else, copies of state on disk included, one in so many bytes at most keeps weights packed. Where the disk
/// binds they gain nothing, and the head of a large vocabulary could take much.
const PACKED_PART: u64 = 16;

/// Rows that are multiplied with a weight in one go: products of more pack it several times.
const ROWS_AT_ONCE: usize = 512;

/// Uses of a block's weights, by so many rows, from which they stay packed. To pack them apart takes as long as multiplying 35 to 50
/// rows, and saves what 20 to 28 take with every use (Zen 4, in [`cpu`](terrace_kernels::cpu)'s products of bf16).
const USES_MIN: usize = 3;

/// Whether weights of `block` that so many micro-batches of so many tokens pass through are worth keeping packed.
fn stays_packed(network: &Network, block: usize, micro_batches: usize, tokens: usize) -> bool {
    let passes = network.blocks[block].passes(tokens).max(1);
    micro_batches * passes * tokens.div_ceil(passes).div_ceil(ROWS_AT_ONCE) >= USES_MIN
}

/// Places where the weights of a block stay packed while so many micro-batches pass through; none where that is worth nothing.
pub(crate) fn places<'p>(
    packing: &'p mut Option<&mut Packing>,
    pass: &Pass<'_>,
    block: usize,
    micro_batches: usize,
) -> Vec<Packed<'p>> {
    let Some(packing) = packing else { return Vec::new() };
    if !stays_packed(pass.network, block, micro_batches, pass.sequences * pass.length) {
        return Vec::new();
    }
    packing.restart();
    let packing = &**packing;
    pass.network.params_of(block).map(|_| packing.place()).collect()
}

impl Planner<'_> {
    /// Gives a block's weights room to stay packed, if several micro-batches or parts of one use them. `plan` is that of `choice`.
    pub(super) fn pack_what_fits(&self, choice: Choice, plan: EnginePlan) -> Result<(Choice, EnginePlan)> {
        let is_fixed = self.config.overrides.packed_bytes.is_some();
        if is_fixed
            || !self.backend.device.unified()
            || self.config.training.is_none()
            || self.ranks().count() > 1
        {
            return Ok((choice, plan));
        }
        let tokens = self.sample.sequences * self.sample.length;
        let blocks = (0..self.network.blocks.len())
            .filter(|&block| stays_packed(self.network, block, self.rounds().together, tokens));
        let bytes_of = |block| {
            let params = self.network.params_of(block);
            let bytes = params.map(|(group, param)| {
                let spec = &self.network.groups[group].params[param].spec;
                match spec.dims[..] {
                    [rows, cols] => self.backend.kernels.matmul.packed_bytes([rows, cols], self.config.dtype),
                    _ => 0,
                }
            });
            bytes.sum::<usize>()
        };
        let useful = page(blocks.map(bytes_of).max().unwrap_or(0));
        let packed_bytes = useful.min(self.room(Tier::Host, &plan) / PACKED_PART / 4096 * 4096) as usize;
        if packed_bytes == 0 {
            return Ok((choice, plan));
        }
        let choice = Choice { packed_bytes, ..choice };
        let plan = self.evaluate(choice, &plan.windows.caching)?;
        Ok((choice, plan))
    }
}
