//! A pass over the blocks, of training or of inference: what every block gets, and who hears of it.

use crate::fetch::{Fetcher, Ready};
use crate::lane::Lane;
use crate::network::Network;
use crate::timeline::Resource;
use crate::{Backend, Context, EngineConfig, Kept, Mode, OutputSpec, Result, Weight, Weights};
use std::time::{Duration, Instant};
use terrace_kernels::{Packed, Tensor};

/// The engine's parts that a pass over the blocks uses.
pub(crate) struct Pass<'a> {
    pub(crate) network: &'a Network,
    pub(crate) backend: &'a Backend,
    pub(crate) lane: &'a Lane,
    pub(crate) config: &'a EngineConfig,
    pub(crate) mode: Mode,
    pub(crate) sequences: usize,
    pub(crate) length: usize,
    pub(crate) loss_scale: f32,
    /// Follows the names of what blocks compute, on a timeline.
    pub(crate) suffix: String,
}

impl Pass<'_> {
    /// Waits for the groups of a block.
    pub(crate) fn fetch(&self, fetcher: &mut Fetcher<'_>, block: usize) -> Result<Vec<Ready>> {
        let began = Instant::now();
        self.lane.at(block);
        let ready = self.network.groups_of(block).iter().map(|_| fetcher.next()).collect();
        self.note(Resource::Wait, began, "weights of", block);
        ready
    }

    /// Tells the timeline of work on a block that began at `began`.
    pub(crate) fn note(&self, resource: Resource, began: Instant, what: &str, block: usize) {
        if let Some(timeline) = &self.config.timeline {
            timeline.note(resource, began, format!("{what} {}", self.network.blocks[block].name()));
        }
    }

    /// Tells it of a wait, if of the time since `began` most was waited and not worked.
    pub(crate) fn note_wait(&self, began: Instant, waited: Duration, what: &str, block: usize) {
        if 2 * waited > began.elapsed() {
            self.note(Resource::Wait, began, what, block);
        }
    }

    /// Tells the timeline of a block's kernels, enqueued since `began`.
    pub(crate) fn computed(&self, began: Instant, what: &str, block: usize) -> Result {
        let name = || format!("{what} {}{}", self.network.blocks[block].name(), self.suffix);
        if let Some(timeline) = &self.config.timeline {
            timeline.note(Resource::Compute, began, name());
        }
        self.lane.computed(began, name)
    }

    pub(crate) fn release(&self, fetcher: &mut Fetcher<'_>, ready: Vec<Ready>) -> Result {
        ready.into_iter().try_for_each(|r| fetcher.release(r))
    }

    /// Views of a block's parameters inside its groups; the first of them stay packed in `places`.
    pub(crate) fn weights<'r>(
        &self,
        block: usize,
        ready: &'r [Ready],
        places: &'r [Packed<'r>],
    ) -> Weights<'r> {
        let views = self.network.params_of(block).enumerate().map(|(index, (group, param))| {
            let memory =
                ready.iter().find(|r| r.group() == group).expect("every group of the block was fetched");
            match (self.network.weight(group, param, memory.bytes()), places.get(index)) {
                (Weight::Plain(view), Some(place)) => Weight::Plain(view.kept_packed(place)),
                (weight, _) => weight,
            }
        });
        Weights::mixed(views.collect())
    }

    pub(crate) fn signal(&self, block: usize) -> OutputSpec {
        self.network.output(block, self.sequences, self.length, self.config.dtype, self.mode)
    }

    pub(crate) fn context<'b>(&'b self, inputs: &'b [Tensor], loss: &'b mut Tensor) -> Context<'b> {
        Context {
            kernels: &self.backend.kernels,
            arena: &self.lane.arena,
            lasting: &self.lane.arena,
            dtype: self.config.dtype,
            mode: self.mode,
            sequences: self.sequences,
            length: self.length,
            inputs,
            loss: loss.view_mut(),
            loss_scale: self.loss_scale,
            kv: None,
            carried: None,
            kept: Kept::Nothing,
        }
    }
}
