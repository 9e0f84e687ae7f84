//! An engine put together piece by piece.
//!
//! This crate knows no device, no kernels and no disk engine of its own (invariant I7), so the builder has no default for any of
//! the three: the facade's `cpu_backend`, a test or an embedder brings them.

use crate::{Backend, Block, Engine, EngineConfig, EngineError, MicroBatch, Placement, Result, WeightSource};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_device::Device;
use terrace_kernels::KernelSet;
use terrace_kernels::update::UpdateKernels;
use terrace_tiers::MemoryPlan;

/// What an engine is made of, until [`create`](Self::create) or [`resume`](Self::resume) makes it. Later calls replace what
/// earlier ones gave.
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until `create` or `resume`"]
pub struct EngineBuilder {
    config: EngineConfig,
    device: Option<Arc<dyn Device>>,
    kernels: Option<(KernelSet, u64)>,
    updates: Option<UpdateKernels>,
    io: Option<Arc<dyn IoEngine>>,
}

impl Engine {
    /// Starts building an engine. It needs a device, kernels and a disk engine, one by one or as a
    /// [`backend`](EngineBuilder::backend).
    pub fn builder(config: EngineConfig) -> EngineBuilder {
        EngineBuilder { config, device: None, kernels: None, updates: None, io: None }
    }
}

impl EngineBuilder {
    /// Device, kernels and disk engine at once.
    pub fn backend(mut self, backend: Backend) -> Self {
        let Backend { device, kernels, updates, kernel_scratch_bytes, io } = backend;
        self.updates = updates;
        self.device = Some(device);
        self.kernels = Some((kernels, kernel_scratch_bytes));
        self.io = Some(io);
        self
    }

    /// Where to compute.
    pub fn device(mut self, device: Arc<dyn Device>) -> Self {
        self.device = Some(device);
        self
    }

    /// The operations of the device, and the bytes of host memory that they keep for themselves, a term of the plan.
    pub fn kernels(mut self, kernels: KernelSet, scratch_bytes: u64) -> Self {
        self.kernels = Some((kernels, scratch_bytes));
        self
    }

    /// Operations on training state in the memory of a device that has its own, see [`Backend::updates`].
    pub fn updates(mut self, kernels: UpdateKernels) -> Self {
        self.updates = Some(kernels);
        self
    }

    /// How bytes reach the disk.
    pub fn io(mut self, io: Arc<dyn IoEngine>) -> Self {
        self.io = Some(io);
        self
    }

    /// Keeps the state on disk, striped over these directories in this order, in equal parts.
    pub fn disks(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.config.disks = paths.into_iter().map(Into::into).collect();
        self.config.disk_weights = None;
        self.config.placement = Placement::Disk;
        self
    }

    /// Shares the state among the directories in proportion to these numbers, one each, for example their bytes per second.
    pub fn disk_weights(mut self, weights: impl IntoIterator<Item = f64>) -> Self {
        self.config.disk_weights = Some(weights.into_iter().collect());
        self
    }

    /// Plans without allocating, as [`Engine::plan_only`].
    ///
    /// # Errors
    /// A part is missing or the plan does not fit.
    pub fn plan(self, blocks: Vec<Box<dyn Block>>, sample: &MicroBatch) -> Result<MemoryPlan> {
        let (config, backend) = self.parts()?;
        Engine::plan_only(config, &backend, blocks, sample)
    }

    /// Plans, allocates and loads initial weights, as [`Engine::create`].
    ///
    /// # Errors
    /// A part is missing, and everything that [`Engine::create`] refuses.
    pub fn create(
        self,
        blocks: Vec<Box<dyn Block>>,
        sample: &MicroBatch,
        source: &mut dyn WeightSource,
    ) -> Result<Engine> {
        let (config, backend) = self.parts()?;
        Engine::create(config, backend, blocks, sample, source)
    }

    /// Plans, allocates and continues from the committed state, as [`Engine::resume`].
    ///
    /// # Errors
    /// A part is missing, and everything that [`Engine::resume`] refuses.
    pub fn resume(self, blocks: Vec<Box<dyn Block>>, sample: &MicroBatch) -> Result<Engine> {
        let (config, backend) = self.parts()?;
        Engine::resume(config, backend, blocks, sample)
    }

    fn parts(self) -> Result<(EngineConfig, Backend)> {
        let missing = |part: &str, call: &str| {
            EngineError::Config(format!(
                "the engine has no {part}: call `{call}` or `backend` on the builder"
            ))
        };
        let device = self.device.ok_or_else(|| missing("device", "device"))?;
        let (kernels, kernel_scratch_bytes) = self.kernels.ok_or_else(|| missing("kernels", "kernels"))?;
        let io = self.io.ok_or_else(|| missing("disk engine", "io"))?;
        Ok((self.config, Backend { device, kernels, updates: self.updates, kernel_scratch_bytes, io }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BatchLimits;
    use terrace_kernels::DType;

    #[test]
    fn a_missing_part_is_named() {
        let limits =
            BatchLimits { sequences: 1, length: 1, micro_batches: 1, cache_length: 0, cache_pages: 0 };
        let sample = MicroBatch { sequences: 1, length: 1, inputs: Vec::new(), loss_terms: 0 };
        let builder = Engine::builder(EngineConfig::new(DType::F32, limits));
        let error = builder.plan(Vec::new(), &sample).unwrap_err().to_string();
        assert!(error.contains("no device") && error.contains("`device`"), "{error}");
    }

    #[test]
    fn naming_disks_puts_the_state_there() {
        let limits =
            BatchLimits { sequences: 1, length: 1, micro_batches: 1, cache_length: 0, cache_pages: 0 };
        let builder = Engine::builder(EngineConfig::new(DType::F32, limits));
        assert_eq!(builder.config.placement, Placement::None);
        let builder = builder.disks(["a", "b"]);
        assert_eq!(builder.config.placement, Placement::Disk);
        assert_eq!(builder.config.disks.len(), 2);
    }
}
