//! What would make a plan of training fit that does not: for each knob the smallest change, found by trying it. Those of generation are
//! in `plan_generate`.
//!
//! A refusal says what the smallest plan needs of a budget. Whether another batch, length, format or place would do instead only
//! plans can tell. Each knob is turned alone, those that are numbers by halves, and only what helps is named.

use super::args::{KvTier, WeightFormat};
use terrace_kernels::DType;
use terrace_models::{ModelConfig, TokenBatch, build};
use terrace_optimizer::StateFormat;
use terrace_tiers::{PlanRefusal, Tier, TierError};
use terrace_zero::{Accumulation, Backend, Engine, EngineConfig, EngineError, Placement, PlanningRuns};

/// State formats, from the largest to the smallest.
const FORMATS: [StateFormat; 4] =
    [StateFormat::Fp32, StateFormat::Split, StateFormat::Bf16, StateFormat::Compact];

/// Formats of weights, and tiers of keys and values, from what takes most of fast memory to what takes least.
pub const WEIGHT_FORMATS: [WeightFormat; 3] = [WeightFormat::Bf16, WeightFormat::Int8, WeightFormat::Int4];
pub const KV_TIERS: [KvTier; 3] = [KvTier::Device, KvTier::Host, KvTier::Disk];

/// What does not fit.
pub struct Knobs<'a> {
    /// The run.
    pub config: &'a EngineConfig,
    /// Where it computes.
    pub backend: &'a Backend,
    /// What it trains.
    pub model: &'a ModelConfig,
    /// What planning runs found so far.
    pub runs: &'a PlanningRuns,
    /// Bytes of all disks, if they are bounded.
    pub disk_space: Option<u64>,
    /// The run continues another, whose batches and format of state are its own too.
    pub resumes: bool,
}

impl Knobs<'_> {
    /// [`advise`] with the knobs of training.
    pub fn advise(&self, error: EngineError) -> EngineError {
        advise(error, || self.alternatives())
    }

    /// Each of them makes the plan fit.
    fn alternatives(&self) -> Vec<String> {
        let config = self.config;
        let mut found = Vec::new();
        let mut offer = |words: &str, change: &dyn Fn(&mut EngineConfig)| {
            if self.fits(change) {
                found.push(words.to_owned());
            }
        };
        if config.overrides.kept_blocks.is_some_and(|blocks| blocks > 0) {
            let words = "let fewer blocks keep their activations (--activations auto)";
            offer(words, &|config| config.overrides.kept_blocks = None);
        }
        if config.keep_on_host > 0 || config.keep_on_disk > 0 {
            offer("leave activations to the plan (--activations auto)", &|config| {
                (config.keep_on_host, config.keep_on_disk) = (0, 0);
            });
        }
        if config.accumulation == Accumulation::Horizontal && config.limits.micro_batches > 1 {
            let words = "accumulate vertically (--accumulation vertical)";
            offer(words, &|config| config.accumulation = Accumulation::Vertical);
        }
        for (placement, words) in
            [(Placement::Host, "use --offload host"), (Placement::Disk, "use --offload disk")]
        {
            let may_help = match (config.placement, placement) {
                (Placement::Disk, Placement::Host) => self.disk_space.is_some(),
                (now, _) => now != placement,
            };
            if may_help {
                // Activations on disk are where state is.
                let alone = placement == Placement::Host && config.keep_on_disk > 0;
                let words = if alone { format!("{words} with --activations auto") } else { words.to_owned() };
                offer(&words, &|config| {
                    config.placement = placement;
                    if alone {
                        (config.keep_on_host, config.keep_on_disk) = (0, 0);
                    }
                    if config.disks.is_empty() {
                        config.disks.push("terrace-state".into());
                    }
                });
            }
        }
        if self.resumes {
            return found;
        }
        found.extend(self.smaller_state());
        let numbers: Vec<String> = NUMBERS.iter().filter_map(|number| self.lower(number)).collect();
        any_of(found, &numbers)
    }

    /// The largest format of state that fits, of those that are smaller.
    fn smaller_state(&self) -> Option<String> {
        let now = self.config.training.as_ref()?.state;
        if self.config.dtype != DType::BF16 {
            return None;
        }
        let fits = |state: StateFormat| {
            self.fits(&|config| {
                if let Some(training) = &mut config.training {
                    training.state = state;
                }
            })
        };
        first_after(FORMATS, now, fits).map(|state| format!("use --state {state}"))
    }

    /// The largest value of a number, below the one that does not fit, that does.
    fn lower(&self, (flag, number): &(&str, Number)) -> Option<String> {
        let fits = |value: usize| self.fits(&|config: &mut EngineConfig| *number(config) = value);
        let fitting = largest_below(*number(&mut self.config.clone()), fits)?;
        Some(format!("{flag} to {fitting}"))
    }

    /// Whether the run would fit with a change.
    fn fits(&self, change: &dyn Fn(&mut EngineConfig)) -> bool {
        let mut config = self.config.clone();
        change(&mut config);
        let sample = TokenBatch::new(self.model).shape(config.limits.sequences, config.limits.length);
        let outlook = Engine::outlook(config, self.backend, build(self.model), &sample, self.runs);
        let space = self.disk_space.unwrap_or(u64::MAX);
        outlook.is_ok_and(|outlook| outlook.memory.total(Tier::Disk) <= space)
    }
}

/// `error` with what would do instead of more memory or space on disks, if that is what is too small.
pub fn advise(error: EngineError, alternatives: impl FnOnce() -> Vec<String>) -> EngineError {
    match error {
        EngineError::Tier(TierError::Plan(refusal)) => {
            TierError::Plan(PlanRefusal { alternatives: alternatives().join(", or "), ..refusal }).into()
        }
        EngineError::Config(words) if is_about_disk_space(&words) => {
            let more: String = alternatives().iter().map(|words| format!(", or {words}")).collect();
            EngineError::Config(words + &more)
        }
        other => other,
    }
}

/// Whether a refusal is one of `--disk-space`, which no engine knows.
pub fn is_about_disk_space(words: &str) -> bool {
    words.starts_with("--disk-space")
}

/// The largest value below `too_much` that fits, if 1 does: found by halves.
pub fn largest_below(mut too_much: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if too_much <= 1 || !fits(1) {
        return None;
    }
    let mut fitting = 1;
    while too_much - fitting > 1 {
        let tried = fitting + (too_much - fitting) / 2;
        if fits(tried) {
            fitting = tried;
        } else {
            too_much = tried;
        }
    }
    Some(fitting)
}

/// The first of `values` after `now` that fits.
pub fn first_after<T: Copy + PartialEq, const N: usize>(
    values: [T; N],
    now: T,
    fits: impl Fn(T) -> bool,
) -> Option<T> {
    values.into_iter().skip_while(|value| *value != now).skip(1).find(|value| fits(*value))
}

/// Words for changes of which each does: those that are values of flags, and the numbers to lower.
pub fn any_of(mut changes: Vec<String>, numbers: &[String]) -> Vec<String> {
    if !numbers.is_empty() {
        changes.push(format!("lower {}", numbers.join(", or ")));
    }
    changes
}

type Number = fn(&mut EngineConfig) -> &mut usize;

const NUMBERS: [(&str, Number); 3] = [
    ("--grad-accum", |config| &mut config.limits.micro_batches),
    ("--batch-size", |config| &mut config.limits.sequences),
    ("--seq-len", |config| &mut config.limits.length),
];
