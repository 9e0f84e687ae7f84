//! What would make a run with frozen weights fit that does not: for each flag of `terrace generate` and `terrace eval` the smallest
//! change, found by trying it. Only who is refused looks for it.

use super::args::{KvTier, WeightFormat};
use super::knobs::{KV_TIERS, WEIGHT_FORMATS, any_of, first_after, largest_below};
use super::pinned::name;
use super::session;
use terrace_models::{Model, ModelConfig, TokenBatch};
use terrace_tiers::Tier;
use terrace_zero::{Backend, BatchLimits, Engine, EngineConfig, Placement, PlanningRuns};

/// A flag with a number, what it is now, and what a batch is with another.
pub(super) type Number<'a> = (&'static str, usize, &'a dyn Fn(usize) -> BatchLimits);

/// What does not fit.
#[derive(Clone, Copy)]
pub(super) struct FrozenKnobs<'a> {
    /// Where it computes.
    pub backend: &'a Backend,
    /// What it runs.
    pub model: &'a ModelConfig,
    /// How its linear layers are kept.
    pub weights: WeightFormat,
    /// Where keys and values are, if there are any.
    pub kv: Option<KvTier>,
    /// What may be lowered.
    pub numbers: &'a [Number<'a>],
}

impl FrozenKnobs<'_> {
    /// Each of them makes a run of `config` fit, in one of the places that it may take.
    pub(super) fn alternatives(&self, config: &EngineConfig, places: &[Placement]) -> Vec<String> {
        let wanted = Wanted { weights: self.weights, config: config.clone() };
        let anywhere = |wanted: &Wanted| places.iter().any(|place| self.fits(wanted, *place));
        let with = |change: &dyn Fn(&mut Wanted)| {
            let mut changed = wanted.clone();
            change(&mut changed);
            anywhere(&changed)
        };
        let has_disk = !config.disks.is_empty() || places.contains(&Placement::Disk);
        let on_disk = if has_disk { "" } else { " with a --disk PATH" };
        let mut found = Vec::new();
        let other = [(Placement::Host, "use --offload host"), (Placement::Disk, "use --offload disk")];
        let mut other = other.into_iter().filter(|(place, _)| !places.contains(place));
        if let Some((place, words)) = other.find(|(place, _)| self.fits(&wanted, *place)) {
            found.push(format!("{words}{}", if place == Placement::Disk { on_disk } else { "" }));
        }
        let weights =
            first_after(WEIGHT_FORMATS, self.weights, |weights| with(&|wanted| wanted.weights = weights));
        found.extend(weights.map(|format| format!("use --weights {}", name(format))));
        if let Some(now) = self.kv {
            let fits = |tier| with(&|wanted| wanted.config.kv_tier = session::kv_tier(tier));
            let tier = first_after(KV_TIERS, now, fits);
            found.extend(tier.map(|tier| {
                format!("use --kv {}{}", name(tier), if tier == KvTier::Disk { on_disk } else { "" })
            }));
        }
        let numbers = self.numbers.iter().filter_map(|(flag, now, limits)| {
            let fitting = largest_below(*now, |value| with(&|wanted| wanted.config.limits = limits(value)))?;
            Some(format!("{flag} to {fitting}"))
        });
        any_of(found, &numbers.collect::<Vec<_>>())
    }

    fn fits(&self, wanted: &Wanted, placement: Placement) -> bool {
        let mut config = EngineConfig { placement, ..wanted.config.clone() };
        if config.disks.is_empty() && (placement == Placement::Disk || config.kv_tier == Tier::Disk) {
            config.disks.push("terrace-weights".into());
        }
        let sample = TokenBatch::new(self.model).shape(config.limits.sequences, config.limits.length);
        let blocks = Model::stored_as(self.model.clone(), session::quant_format(wanted.weights)).blocks;
        Engine::outlook(config, self.backend, blocks, &sample, &PlanningRuns::default()).is_ok()
    }
}

/// What is tried.
#[derive(Clone)]
struct Wanted {
    weights: WeightFormat,
    config: EngineConfig,
}
