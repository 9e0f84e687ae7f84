//! How many blocks keep their activations for backward, where that is left to the plan.
//!
//! What blocks keep saves operations. The memory it takes could hold copies of state on disk, or weights and state on a card, which
//! saves transfers. The planner gives it to the blocks first; where a step is then expected to wait for a disk or a link, fewer that
//! keep may be faster.

use crate::floor::Capabilities;
use crate::predict::step_seconds;
use terrace_models::{ModelConfig, build};
use terrace_zero::{Backend, Engine, EngineConfig, EngineError, MicroBatch, Outlook, PlanningRuns};

/// Halves of the blocks for which there is room: more tries take longer than they save.
const FEWER: [usize; 2] = [1, 0];

/// The part of a step that has to be saved by what is expected, which is not exact.
const GAIN_MIN: f64 = 0.03;

/// The outlook of `config`, and most blocks that may keep in it: those with which a step is expected to be the shortest, `None` for as
/// many as there is room for. Without figures of what takes how long that is all that is known.
///
/// # Errors
/// The plan does not fit.
pub fn cheapest(
    config: &EngineConfig,
    backend: &Backend,
    model: &ModelConfig,
    sample: &MicroBatch,
    can: &Capabilities,
    runs: &PlanningRuns,
) -> Result<(Option<usize>, Outlook), EngineError> {
    let outlook = |keep_at_most: Option<usize>| {
        let config = EngineConfig { keep_at_most, ..config.clone() };
        Engine::outlook(config, backend, build(model), sample, runs)
    };
    let most = outlook(None)?;
    let kept = most.windows.kept_blocks.unwrap_or(0);
    let rate = can.training.or(can.operations);
    let (Some(expected), Some(rate)) = (step_seconds(&most.work, can), rate) else { return Ok((None, most)) };
    // None has fewer operations.
    let least = most.work.operations as f64 / rate;
    if config.overrides.kept_blocks.is_some() || kept == 0 || expected * (1.0 - GAIN_MIN) <= least {
        return Ok((None, most));
    }
    let mut best = (expected * (1.0 - GAIN_MIN), None, most);
    for halves in FEWER {
        let fewer = kept * halves / 2;
        // With fewer it may not fit: what a block keeps may live in the memory that its gradient has anyway.
        let Ok(found) = outlook(Some(fewer)) else { continue };
        if let Some(seconds) = step_seconds(&found.work, can)
            && seconds < best.0
        {
            best = (seconds, Some(fewer), found);
        }
    }
    Ok((best.1, best.2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Rates;
    use crate::cpu_backend;
    use terrace_aio::engine::EngineConfig as IoConfig;
    use terrace_kernels::DType;
    use terrace_models::TokenBatch;
    use terrace_tiers::{Tier, TierError};
    use terrace_zero::{BatchLimits, Placement, TrainingConfig};

    fn six_layers() -> ModelConfig {
        ModelConfig::parse(
            r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
                "num_hidden_layers": 6, "num_attention_heads": 4}"#,
        )
        .unwrap()
    }

    fn trained(sequences: usize, length: usize) -> EngineConfig {
        let limits = BatchLimits { sequences, length, micro_batches: 1, cache_length: 0, cache_pages: 0 };
        let training = Some(TrainingConfig::default());
        EngineConfig { training, threads: 1, ..EngineConfig::new(DType::BF16, limits) }
    }

    /// Fewer that keep may take more memory than all: a plan that fits is not refused for them.
    #[test]
    fn what_fits_is_not_refused_for_what_does_not() {
        let (model, backend) = (six_layers(), cpu_backend(1, &IoConfig::default()).unwrap());
        let sample = TokenBatch::new(&model).blank(1, 8);
        let config = EngineConfig { placement: Placement::Host, ..trained(1, 8) };
        let runs = PlanningRuns::default();
        let plan = |keep_at_most, host_budget| {
            let config = EngineConfig { keep_at_most, host_budget, ..config.clone() };
            Engine::outlook(config, &backend, build(&model), &sample, &runs)
        };
        let refusal = |keep_at_most| match plan(keep_at_most, 1) {
            Err(EngineError::Tier(TierError::Plan(refusal))) => refusal.minimum,
            _ => panic!("a byte is not enough"),
        };
        let [all, none] = [None, Some(0)].map(refusal);
        assert!(all < none, "{all} and {none} bytes");
        // An update that takes long makes fewer worth a try.
        let can = Capabilities {
            operations: Some(1e12),
            training: Some(1e12),
            updates: Some(1.0),
            ..Capabilities::default()
        };
        let config = EngineConfig { host_budget: all, ..config.clone() };
        let (most, found) = cheapest(&config, &backend, &model, &sample, &can, &runs).unwrap();
        assert!(most.is_none() && found.windows.kept_blocks.is_some_and(|kept| kept > 0), "{most:?}");
    }

    /// Copies of state save a slow disk more than kept activations save the processor, and the other way round.
    #[test]
    fn memory_goes_to_what_saves_most() {
        let (model, backend) = (six_layers(), cpu_backend(1, &IoConfig::default()).unwrap());
        let sample = TokenBatch::new(&model).blank(2, 128);
        let config = EngineConfig {
            placement: Placement::Disk,
            disks: vec!["nowhere".into()],
            cache_bytes: u64::MAX,
            ..trained(2, 128)
        };
        let runs = PlanningRuns::default();
        let of = |config: &EngineConfig, disk: f64| {
            let rates = Rates {
                read_bytes_per_second: disk,
                write_bytes_per_second: disk,
                mixed_bytes_per_second: disk,
            };
            let can = Capabilities {
                operations: Some(1e12),
                training: Some(1e12),
                disks: vec![(1.0, rates)],
                ..Capabilities::default()
            };
            let (most, found) = cheapest(config, &backend, &model, &sample, &can, &runs).unwrap();
            (most, step_seconds(&found.work, &can).unwrap(), found)
        };
        let roomy = of(&config, 1e9).2.memory.total(Tier::Host);
        let fixed = |kept_blocks| {
            let overrides = terrace_zero::WindowOverrides { kept_blocks, ..config.overrides };
            EngineConfig { host_budget: roomy * 3 / 5, overrides, ..config.clone() }
        };
        let config = fixed(None);
        let (most, seconds, found) = of(&config, 1e7);
        let fewer = found.windows.kept_blocks.unwrap();
        assert!(most.is_some_and(|most| most >= fewer), "{most:?}, {fewer} keep");
        // As many as there is room for take longer, but for a disk that nobody waits for.
        let (_, everything, all) = of(&EngineConfig { cache_bytes: 0, ..config.clone() }, 1e7);
        let kept = all.windows.kept_blocks.unwrap();
        assert!(
            kept > fewer && found.copied_bytes > 0 && seconds < everything,
            "{seconds} s, {everything} s with {kept}"
        );
        assert_eq!(of(&config, 1e15).0, None);
        // What is fixed stays so.
        let (most, _, found) = of(&fixed(Some(2)), 1e7);
        assert_eq!((most, found.windows.kept_blocks), (None, Some(2)));
    }
}
