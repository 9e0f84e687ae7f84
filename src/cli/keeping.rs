//! How many blocks keep their activations for backward, and how many of them in host memory or on disk, where that is left to the plan.
//!
//! What blocks keep saves operations. The memory it takes could hold copies of state on disk, or weights and state on a card, which
//! saves transfers. The planner gives it to the blocks first; where a step is then expected to wait for a disk or a link, fewer that
//! keep may be faster. Where memory does not hold what all of them keep, the others compute it again, or have it in the host's memory (of a
//! card) or on disk in between, which costs transfers of the link and the disk: whichever is expected to take less time.

use crate::floor::Capabilities;
use crate::predict::step_seconds;
use terrace_models::{ModelConfig, build};
use terrace_tiers::Tier;
use terrace_zero::{
    Backend, Engine, EngineConfig, EngineError, MicroBatch, Outlook, Placement, PlanningRuns,
};

/// Halves of the blocks for which there is room: more tries take longer than they save.
const FEWER: [usize; 2] = [1, 0];

/// The part of a step that has to be saved by what is expected, which is not exact.
const GAIN_MIN: f64 = 0.03;

/// How many blocks keep, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// In memory; `None` for as many as there is room for.
    in_memory: Option<usize>,
    /// In the host's memory, of a card, and on disk.
    on_host: usize,
    on_disk: usize,
}

impl Keep {
    /// `config` with these.
    pub fn of(self, config: &EngineConfig) -> EngineConfig {
        let Self { in_memory: keep_at_most, on_host: keep_on_host, on_disk: keep_on_disk } = self;
        EngineConfig { keep_at_most, keep_on_host, keep_on_disk, ..config.clone() }
    }
}

/// The outlook of `config`, and most blocks that may keep in it: those with which a step is expected to be the shortest. Without figures of
/// what takes how long as many keep as there is memory for, and none elsewhere unless `config` says so. No plan that is tried beside that
/// takes more than `disk_space`.
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
    disk_space: Option<u64>,
) -> Result<(Keep, Outlook), EngineError> {
    let outlook = |keep: Keep| Engine::outlook(keep.of(config), backend, build(model), sample, runs);
    let given = Keep { in_memory: None, on_host: config.keep_on_host, on_disk: config.keep_on_disk };
    let most = outlook(given)?;
    let rate = can.training.or(can.operations);
    let (Some(expected), Some(rate)) = (step_seconds(&most.work, can), rate) else {
        return Ok((given, most));
    };
    if config.overrides.kept_blocks.is_some() {
        return Ok((given, most));
    }
    let mut best = Found { seconds: expected, keep: given, outlook: most };
    // The best of some choices, if it is better by enough. With fewer it may not fit: what a block keeps may live in the memory that its
    // gradient has anyway.
    let consider = |best: &mut Found, choices: &[Keep]| {
        let mut to_beat = best.seconds * (1.0 - GAIN_MIN);
        for &keep in choices {
            let Ok(outlook) = outlook(keep) else { continue };
            let fits = disk_space.is_none_or(|space| outlook.memory.total(Tier::Disk) <= space);
            if let Some(seconds) = step_seconds(&outlook.work, can)
                && fits
                && seconds < to_beat
            {
                to_beat = seconds;
                *best = Found { seconds, keep, outlook };
            }
        }
    };
    let fewer = |found: &Found| {
        let kept = found.outlook.windows.kept_blocks.unwrap_or(0);
        // None has fewer operations.
        let may = kept > 0 && found.waits(rate);
        let of = |halves| Keep { in_memory: Some(kept * halves / 2), ..found.keep };
        if may { FEWER.map(of).to_vec() } else { Vec::new() }
    };
    let recomputing = best.outlook.keepers - best.outlook.windows.kept_blocks.unwrap_or(0);
    let is_open = (given.on_host, given.on_disk) == (0, 0) && recomputing > 0;
    let choices = fewer(&best);
    consider(&mut best, &choices);
    let here = best.keep;
    if is_open && !best.outlook.work.unified && config.placement != Placement::None {
        let on_host = |on_host| Keep { on_host, ..given };
        consider(&mut best, &[usize::MAX, recomputing / 2].map(on_host));
    }
    if is_open && config.placement == Placement::Disk {
        let below = if best.keep == here { given } else { best.keep };
        let on_disk = |on_disk| Keep { on_disk, ..below };
        consider(&mut best, &[usize::MAX, recomputing / 2].map(on_disk));
    }
    if best.keep != here {
        let choices = fewer(&best);
        consider(&mut best, &choices);
    }
    Ok((best.keep, best.outlook))
}

/// A plan that was tried.
struct Found {
    seconds: f64,
    keep: Keep,
    outlook: Outlook,
}

impl Found {
    /// Whether more than the least gain is expected between a step and its operations at `rate`.
    fn waits(&self, rate: f64) -> bool {
        self.seconds * (1.0 - GAIN_MIN) > self.outlook.work.operations as f64 / rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Rates;
    use crate::cpu_backend;
    use std::sync::Arc;
    use terrace_aio::engine::EngineConfig as IoConfig;
    use terrace_device::host::HostDevice;
    use terrace_kernels::DType;
    use terrace_models::TokenBatch;
    use terrace_tiers::TierError;
    use terrace_zero::{BatchLimits, Placement, TrainingConfig};

    fn six_layers() -> ModelConfig {
        ModelConfig::parse(
            r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
                "num_hidden_layers": 6, "num_attention_heads": 4}"#,
        )
        .unwrap()
    }

    /// So many operations, and bytes of a disk, a second.
    fn with_disk(operations: f64, bytes: f64) -> Capabilities {
        let rates = Rates {
            read_bytes_per_second: bytes,
            write_bytes_per_second: bytes,
            mixed_bytes_per_second: bytes,
        };
        let (operations, training) = (Some(operations), Some(operations));
        Capabilities { operations, training, disks: vec![(1.0, rates)], ..Capabilities::default() }
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
        let (most, found) = cheapest(&config, &backend, &model, &sample, &can, &runs, None).unwrap();
        assert!(
            most.in_memory.is_none() && found.windows.kept_blocks.is_some_and(|kept| kept > 0),
            "{most:?}"
        );
    }

    /// Activations go to a disk that takes less time for them than computing them again, and to no other.
    #[test]
    fn a_quick_disk_takes_what_memory_does_not_hold() {
        let (model, backend) = (six_layers(), cpu_backend(1, &IoConfig::default()).unwrap());
        let sample = TokenBatch::new(&model).blank(4, 256);
        // With clipping what a block keeps may live in the memory of its gradient.
        let training = Some(TrainingConfig { clip: None, ..TrainingConfig::default() });
        let (placement, disks) = (Placement::Disk, vec!["nowhere".into()]);
        let on_disk = EngineConfig { placement, disks, training, ..trained(4, 256) };
        let runs = PlanningRuns::default();
        let of = |config: &EngineConfig, disk: f64| {
            let can = with_disk(1e11, disk);
            let (_, found) = cheapest(config, &backend, &model, &sample, &can, &runs, None).unwrap();
            let kept = |blocks: Option<usize>| blocks.unwrap();
            let seconds = step_seconds(&found.work, &can).unwrap();
            ((kept(found.windows.kept_blocks), kept(found.windows.kept_on_disk)), seconds)
        };
        let overrides = terrace_zero::WindowOverrides { kept_blocks: Some(0), ..on_disk.overrides };
        let byte = EngineConfig { host_budget: 1, keep_on_disk: usize::MAX, overrides, ..on_disk.clone() };
        let smallest = match Engine::outlook(byte, &backend, build(&model), &sample, &runs) {
            Err(EngineError::Tier(TierError::Plan(refusal))) => refusal.minimum,
            _ => panic!("a byte is not enough"),
        };
        // Enough for buffers, and not for what many blocks keep.
        let tight = EngineConfig { host_budget: smallest + (64 << 10), ..on_disk.clone() };
        let ((here, there), with) = of(&tight, 1e10);
        assert!(here + there == 6 && there >= 4, "{here} in memory, {there} on disk");
        let ((here, there), without) = of(&tight, 1e7);
        assert!(here <= 2 && there == 0, "{here} in memory, {there} on disk");
        let overrides = terrace_zero::WindowOverrides { kept_on_disk: Some(0), ..tight.overrides };
        let (_, recomputing) = of(&EngineConfig { overrides, ..tight.clone() }, 1e10);
        assert!(with < 0.9 * recomputing, "{with} s, {recomputing} s");
        // Told to, all keep, although it takes longer.
        let ((here, there), with) = of(&EngineConfig { keep_on_disk: usize::MAX, ..tight.clone() }, 1e7);
        assert!(here + there == 6 && with > without, "{with} s, {without} s");
        // No more than there is space for.
        let cheapest_in = |space| {
            let can = with_disk(1e11, 1e10);
            let (_, found) = cheapest(&tight, &backend, &model, &sample, &can, &runs, space).unwrap();
            (found.windows.kept_on_disk.unwrap(), found.memory.total(Tier::Disk))
        };
        let (blocks, needed) = cheapest_in(None);
        assert_eq!(cheapest_in(Some(needed)), (blocks, needed));
        let (fewer, taken) = cheapest_in(Some(needed - 1));
        assert!(fewer < blocks && taken < needed, "{fewer} of {blocks}, {taken} of {needed} bytes");
        assert_eq!(cheapest_in(Some(0)).0, 0, "what the plan takes anyway is refused by others");
        // With room, memory is first.
        assert_eq!(of(&on_disk, 1e10).0, (6, 0));
    }

    /// Of a card they cross a link that takes less time for them.
    #[test]
    fn a_quick_link_takes_what_a_card_does_not_hold() {
        let (model, mut backend) = (six_layers(), cpu_backend(1, &IoConfig::default()).unwrap());
        backend.device = Arc::new(HostDevice::discrete());
        let sample = TokenBatch::new(&model).blank(4, 256);
        let config = EngineConfig { placement: Placement::Host, ..trained(4, 256) };
        let runs = PlanningRuns::default();
        let of = |config: &EngineConfig, link: f64| {
            let can = Capabilities {
                operations: Some(1e11),
                training: Some(1e11),
                upload: Some(link),
                download: Some(link),
                ..Capabilities::default()
            };
            let (_, found) = cheapest(config, &backend, &model, &sample, &can, &runs, None).unwrap();
            let windows = found.windows;
            let kept = [windows.kept_blocks, windows.kept_on_host, windows.kept_on_disk].map(Option::unwrap);
            (kept, step_seconds(&found.work, &can).unwrap(), found)
        };
        let overrides = terrace_zero::WindowOverrides {
            kept_blocks: Some(0),
            device_groups: Some(0),
            state_groups: Some(0),
            ..config.overrides
        };
        let sent = EngineConfig { keep_on_host: 6, overrides, ..config.clone() };
        let (kept, with, outlook) = of(&sent, 1e11);
        assert_eq!(kept, [0, 6, 0]);
        let without = of(&EngineConfig { keep_on_host: 0, ..sent.clone() }, 1e11).1;
        assert!(with < 0.9 * without, "{with} s, {without} s");
        let device_budget = outlook.memory.total(Tier::Device);
        let overrides = terrace_zero::WindowOverrides { kept_blocks: None, ..overrides };
        let tight = EngineConfig { device_budget, overrides, ..config.clone() };
        let ([here, on_host, on_disk], ..) = of(&tight, 1e11);
        assert!(here + on_host == 6 && on_host >= 3 && on_disk == 0, "{here}, {on_host}");
        let ([here, on_host, _], ..) = of(&tight, 1e7);
        assert!(here <= 3 && on_host == 0, "{here}, {on_host}");
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
            let can = with_disk(1e12, disk);
            let (most, found) = cheapest(config, &backend, &model, &sample, &can, &runs, None).unwrap();
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
        assert!(most.in_memory.is_some_and(|most| most >= fewer), "{most:?}, {fewer} keep");
        // As many as there is room for take longer, but for a disk that nobody waits for.
        let (_, everything, all) = of(&EngineConfig { cache_bytes: 0, ..config.clone() }, 1e7);
        let kept = all.windows.kept_blocks.unwrap();
        assert!(
            kept > fewer && found.copied_bytes > 0 && seconds < everything,
            "{seconds} s, {everything} s with {kept}"
        );
        assert_eq!(of(&config, 1e15).0.in_memory, None);
        // What is fixed stays so.
        let (most, _, found) = of(&fixed(Some(2)), 1e7);
        assert_eq!((most.in_memory, found.windows.kept_blocks), (None, Some(2)));
    }
}
