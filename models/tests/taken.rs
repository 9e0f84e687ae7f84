//! What is taken is what was planned: memory of a card, memory that it copies from and files on disk, term by term and to the byte,
//! over placements, durabilities, orders of accumulation, formats of state and where gradients and activations are. What else is in
//! host memory is compared with the resident set in `memory.rs`.

#[path = "engine_support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::{Setup, small_llama};
use terrace_device::sim::{SimDevice, SimDeviceConfig};
use terrace_models::{Model, ModelConfig};
use terrace_optimizer::StateFormat;
use terrace_tiers::{MemoryPlan, Tier};
use terrace_zero::{Accumulation, Durability, Engine, Placement, WindowOverrides};

const FORMATS: [StateFormat; 4] =
    [StateFormat::Fp32, StateFormat::Split, StateFormat::Bf16, StateFormat::Compact];
const STEPS: u64 = 3;
const PAGE: u64 = 4096;

/// Terms of host memory that copies to and from a card use: the card is told about them.
const PINNED: [&str; 9] = [
    "weights in flight and in use",
    "gradients",
    "sums of gradients between micro-batches",
    "activations and their gradients",
    "activations in flight",
    "resident state: weights",
    "copies of state on disk: weights",
    "kept activations",
    "kept activations in flight",
];

#[derive(Debug, Clone, Copy)]
struct Case {
    placement: Placement,
    state: StateFormat,
    durability: Durability,
    accumulation: Accumulation,
    gradients_on_disk: bool,
    activations_on_disk: bool,
    /// Blocks that keep where they compute, in the host's memory, and on disk; `None` for as many as fit.
    kept: Option<(usize, usize, usize)>,
    /// Groups whose weights, and whose state, stay on the card.
    on_card: (usize, usize),
    clipped: bool,
    copied: usize,
    /// Of twelve experts so many have gradients at once; others leave before their block's backward ends.
    experts_at_once: Option<usize>,
    uploads_ahead: Option<usize>,
}

impl Case {
    fn new(placement: Placement) -> Self {
        Self {
            placement,
            state: StateFormat::Split,
            durability: Durability::Step,
            accumulation: Accumulation::Vertical,
            gradients_on_disk: false,
            activations_on_disk: false,
            kept: None,
            on_card: (0, 0),
            clipped: true,
            copied: 0,
            experts_at_once: None,
            uploads_ahead: None,
        }
    }

    fn model(self) -> ModelConfig {
        let Some(experts_at_once) = self.experts_at_once else { return small_llama(false) };
        let mut model = ModelConfig::parse(
            r#"{"architectures":["Qwen3MoeForCausalLM"],"vocab_size":97,"hidden_size":64,"intermediate_size":160,
            "num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
            "num_experts":12,"num_experts_per_tok":2,"moe_intermediate_size":48,"initializer_range":0.2}"#,
        )
        .unwrap();
        model.mixture.as_mut().expect("there are experts").experts_at_once = Some(experts_at_once);
        model
    }

    fn setup(self, dir: &Path) -> Setup {
        let (disk, Self { on_card, copied, .. }) = (self.placement == Placement::Disk, self);
        let overrides = WindowOverrides {
            chunk_elements: Some(1 << 14),
            gradients_on_disk: Some(self.gradients_on_disk),
            activations_on_disk: Some(self.activations_on_disk),
            kept_blocks: self.kept.map(|(here, ..)| here),
            kept_on_host: self.kept.map(|(_, on_host, _)| on_host),
            kept_on_disk: self.kept.map(|(.., on_disk)| on_disk),
            uploads_ahead: self.uploads_ahead,
            device_groups: Some(on_card.0.max(on_card.1)),
            state_groups: Some(on_card.1),
            copied_weights: Some(copied),
            copied_groups: Some(copied / 2),
            ..WindowOverrides::default()
        };
        let disks = if disk { ["a", "b"].map(|name| dir.join(name)).to_vec() } else { Vec::new() };
        Setup {
            placement: self.placement,
            disks,
            state: self.state,
            durability: self.durability,
            accumulation: self.accumulation,
            clip: self.clipped.then_some(0.5),
            micro_batches: if self.experts_at_once.is_some() { 1 } else { 3 },
            model: self.model(),
            cache_bytes: if copied > 0 { u64::MAX } else { 0 },
            overrides,
            ..Setup::new(false)
        }
    }
}

/// Every placement with every format, and what else there is to choose, one after the other and some of it together.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for placement in [Placement::None, Placement::Host, Placement::Disk] {
        let base = Case::new(placement);
        cases.extend(FORMATS.map(|state| Case { state, ..base }));
        cases.push(Case { accumulation: Accumulation::Horizontal, ..base });
        cases.push(Case { clipped: false, ..base });
        cases.extend([(2, 0), (9, 2), (9, 9)].map(|on_card| Case { on_card, ..base }));
    }
    let disk = Case::new(Placement::Disk);
    for durability in [Durability::Checkpoint, Durability::None] {
        cases.push(Case { durability, ..disk });
        cases.push(Case { durability, on_card: (3, 3), state: StateFormat::Compact, ..disk });
    }
    for accumulation in [Accumulation::Vertical, Accumulation::Horizontal] {
        cases.push(Case { accumulation, gradients_on_disk: true, ..disk });
        cases.push(Case { accumulation, activations_on_disk: true, ..disk });
        cases.push(Case { accumulation, gradients_on_disk: true, activations_on_disk: true, ..disk });
    }
    for kept in [(0, 0, 3), (1, 0, 2), (1, 1, 1), (0, 3, 0), (0, 1, 1), (0, 0, 0)] {
        cases.push(Case { kept: Some(kept), ..disk });
        let accumulation = Accumulation::Horizontal;
        cases.push(Case { kept: Some(kept), accumulation, gradients_on_disk: true, ..disk });
    }
    cases.push(Case { kept: Some((1, 2, 0)), ..Case::new(Placement::Host) });
    cases.push(Case { copied: 4, ..disk });
    for placement in [Placement::None, Placement::Host, Placement::Disk] {
        for (experts_at_once, clipped, on_card) in [(5, true, (0, 0)), (1, false, (0, 0)), (4, true, (9, 2))]
        {
            let experts_at_once = Some(experts_at_once);
            cases.push(Case { experts_at_once, clipped, on_card, ..Case::new(placement) });
        }
    }
    cases.extend([0, 1].map(|ahead| Case { uploads_ahead: Some(ahead), ..disk }));
    let experts_at_once = Some(3);
    cases.push(Case { experts_at_once, gradients_on_disk: true, ..disk });
    cases.push(Case { experts_at_once, kept: Some((1, 1, 1)), ..disk });
    cases.push(Case { copied: 2, clipped: false, durability: Durability::Checkpoint, ..disk });
    cases
}

/// Bytes of the terms that are `wanted`, in whole pages as they are taken.
fn terms(plan: &MemoryPlan, tier: Tier, wanted: impl Fn(&str) -> bool) -> u64 {
    let entries = plan.entries().iter().filter(|e| e.tier == tier && wanted(&e.purpose));
    entries.map(|e| e.count * e.unit_bytes).sum()
}

/// Bytes of all files that hold chunks.
fn on_disk(dirs: &[PathBuf]) -> u64 {
    let files = dirs.iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten());
    let files = files.map(|entry| entry.unwrap()).filter(|entry| {
        let name = entry.file_name();
        name != "manifest.bin" && name != "terrace.lock"
    });
    files.map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn a_card_its_copies_and_the_disks_hold_what_is_planned() {
    for case in cases() {
        let dir = tempfile::tempdir().unwrap();
        let card = SimDevice::new(SimDeviceConfig::default());
        let setup = Setup { device: Some(Arc::new(card.clone())), ..case.setup(dir.path()) };
        let blocks = Model::new(setup.model.clone()).blocks;
        let planned = Engine::plan_only(setup.config(), &setup.backend(), blocks, &setup.sample());
        let planned = planned.unwrap_or_else(|e| panic!("{case:?}: {e}"));
        let mut engine = setup.create();
        let plan = engine.memory_plan().clone();
        assert_eq!(plan, planned, "{case:?}");
        let reports = setup.train_to(&mut engine, STEPS);

        // Kernels have their scratch from somewhere else.
        let (arenas, peak) = card.arena_bytes();
        let on_card = terms(&plan, Tier::Device, |what| what != "kernel scratch");
        assert_eq!((arenas, peak), (on_card, on_card), "{case:?}: {plan:#?}");
        assert_eq!(reports.last().unwrap().device_peak_bytes, plan.total(Tier::Device), "{case:?}");

        let pinned = terms(&plan, Tier::Host, |what| {
            PINNED
                .iter()
                .any(|name| what == *name || (what.starts_with(name) && what[name.len()..].starts_with(",")))
        });
        // A pool without slots, where no gradient comes from the card, has a page.
        let gradients = terms(&plan, Tier::Host, |what| what == "gradients");
        let empty = if gradients == 0 { PAGE } else { 0 };
        assert_eq!(card.pinned_bytes(), pinned + empty, "{case:?}: {plan:#?}");
        assert_eq!(on_disk(&setup.disks), plan.total(Tier::Disk), "{case:?}: {plan:#?}");
        drop(engine);
        assert_eq!(card.pinned_bytes(), 0, "{case:?}");
    }
}

/// Of experts in stages the accumulators of one stage are there at a time, of all of them if micro-batches add to them.
#[test]
fn stages_of_experts_take_less() {
    let dir = tempfile::tempdir().unwrap();
    let of = |experts_at_once, micro_batches, discrete| {
        let case = Case { experts_at_once: Some(experts_at_once), ..Case::new(Placement::Disk) };
        let setup = Setup { micro_batches, discrete, ..case.setup(dir.path()) };
        let blocks = Model::new(setup.model.clone()).blocks;
        let plan = Engine::plan_only(setup.config(), &setup.backend(), blocks, &setup.sample()).unwrap();
        let tier = if discrete { Tier::Device } else { Tier::Host };
        terms(&plan, tier, |what| what == "block workspaces and gradient accumulators")
    };
    let experts = 12 * 3 * 64 * 48 * 4;
    for discrete in [false, true] {
        let [all, few, accumulating] = [(12, 1), (3, 1), (3, 2)].map(|(at_once, m)| of(at_once, m, discrete));
        assert!(
            few + experts / 2 < all,
            "{few} and {all} bytes, of which {experts} are gradients of experts"
        );
        assert!(accumulating >= all, "{accumulating} and {all} bytes");
    }
}

/// Without a card the arena is host memory.
#[test]
fn disks_hold_what_is_planned_without_a_card() {
    for case in cases().into_iter().filter(|case| case.on_card == (0, 0)) {
        let dir = tempfile::tempdir().unwrap();
        let setup = case.setup(dir.path());
        let mut engine = setup.create();
        setup.continue_to(&mut engine, STEPS);
        let plan = engine.memory_plan();
        assert_eq!(plan.total(Tier::Device), 0, "{case:?}");
        assert_eq!(on_disk(&setup.disks), plan.total(Tier::Disk), "{case:?}: {plan:#?}");
    }
}
