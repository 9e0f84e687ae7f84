//! Host memory: a budget that cannot work is refused with the numbers, the smallest that works does work, and the process
//! stays within it. Terms that a device or a file sees are compared to the byte in `taken.rs`. One test in a process of its own, since it looks at the resident set of the whole process.

#[path = "engine_support/mod.rs"]
mod support;

use support::{Setup, weights_hash};
use terrace_models::ModelConfig;
use terrace_optimizer::StateFormat;
use terrace_tiers::{PlanRefusal, Tier, TierError};
use terrace_zero::{Accumulation, Durability, EngineError, Placement, WindowOverrides};

/// What the process may need beside the plan: stacks, code, the engine's queues, the allocator's slack.
const UNPLANNED_BYTES: u64 = 16 << 20;
/// What a plan and the resident set may differ by once all of that is there: kernel scratch and slots that were not needed at once.
/// Every plan of [`takes_what_is_planned`] is five times as large or more.
const SLACK_BYTES: u64 = 7 << 20;

#[test]
fn the_smallest_budget_works_and_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    for (name, base) in [
        ("resident", Setup::new(true)),
        ("disk", Setup::on_disk(true, vec![dir.path().join("disk")])),
        (
            "disk without clipping",
            Setup { clip: None, ..Setup::on_disk(false, vec![dir.path().join("no-clip")]) },
        ),
        ("resident, horizontal", horizontal(Setup::new(true))),
        ("disk, horizontal", horizontal(Setup::on_disk(true, vec![dir.path().join("horizontal")]))),
        (
            "disk without clipping, horizontal",
            Setup { clip: None, ..horizontal(Setup::on_disk(false, vec![dir.path().join("rounds")])) },
        ),
    ] {
        smallest_budget(name, &base);
    }
    stays_within(&dir.path().join("large"), 0);
    stays_within(&dir.path().join("copies"), 8 << 20);
    takes_what_is_planned(dir.path());
}

/// Micro-batches one after the other, for which sums of gradients are parked.
fn horizontal(setup: Setup) -> Setup {
    Setup { accumulation: Accumulation::Horizontal, micro_batches: 4, ..setup }
}

fn smallest_budget(name: &str, base: &Setup) {
    let refusal = refused(&Setup { host_budget: 1000, ..base.clone() });
    println!("{name}: {refusal}");
    let text = refusal.to_string();
    for part in [
        "EngineConfig::host_budget of 1000 B is too small",
        "needs at least",
        "Raise it to",
        "BatchLimits::length",
        "BatchLimits::sequences",
    ] {
        assert!(text.contains(part), "{name}: {part:?} is in {text}");
    }
    assert_eq!(text.contains("Placement::Disk"), base.placement != Placement::Disk, "{name}: {text}");
    assert!(base.disks.iter().all(|disk| !disk.exists()), "{name}: nothing is made before the plan fits");

    let minimum = refusal.minimum;
    assert_eq!(refused(&Setup { host_budget: minimum - 1, ..base.clone() }).minimum, minimum, "{name}");
    let tight = Setup { host_budget: minimum, ..base.clone() };
    let mut engine = tight.create();
    assert_eq!(engine.memory_plan().total(Tier::Host), minimum, "{name}");
    tight.continue_to(&mut engine, 2);
    let roomy = Setup { placement: Placement::None, disks: Vec::new(), ..base.clone() };
    assert_eq!(weights_hash(&mut engine), roomy.run(2).1, "{name}: the budget changes no number");
}

fn refused(setup: &Setup) -> PlanRefusal {
    match setup.try_create() {
        Err(EngineError::Tier(TierError::Plan(refusal))) => refusal,
        Err(other) => panic!("another error: {other}"),
        Ok(engine) => panic!("{} bytes are enough: {engine:?}", setup.host_budget),
    }
}

/// A model whose state is several times the budget trains within the budget, which is so many bytes more than it must be.
fn stays_within(disk: &std::path::Path, copies: u64) {
    let base = Setup { model: large(), ..Setup::on_disk(true, vec![disk.to_owned()]) };
    let minimum = refused(&Setup { host_budget: 1000, ..base.clone() }).minimum + copies;
    let setup = Setup { host_budget: minimum, cache_bytes: copies, ..base };

    let before = resident_peak_bytes();
    let mut engine = setup.create();
    let planned = engine.memory_plan().total(Tier::Host);
    assert!(planned <= minimum && planned > minimum - copies / 2 - 1, "{planned} of {minimum}");
    setup.continue_to(&mut engine, 2);
    let grown = resident_peak_bytes().saturating_sub(before);
    let state = engine.parameters() * 12;
    println!("state {state}, plan {minimum}, grown {grown} bytes");
    assert!(grown <= minimum + UNPLANNED_BYTES, "{grown} bytes became resident; {minimum} were planned");
    assert!(state > 2 * (minimum + UNPLANNED_BYTES), "the model is large enough to show it: {state}");
}

/// A model of nine million parameters.
fn large() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":512,"hidden_size":384,
        "intermediate_size":1024,"num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu",
        "tie_word_embeddings":true}"#,
    )
    .expect("a valid configuration")
}

/// What is resident is what is planned, no more and not much less, wherever state, weights, gradients and activations are. A
/// card here is this process's memory.
fn takes_what_is_planned(dir: &std::path::Path) {
    let chunks = WindowOverrides { chunk_elements: Some(1 << 16), ..WindowOverrides::default() };
    let host = |state| Setup {
        placement: Placement::Host,
        state,
        overrides: chunks,
        model: large(),
        ..Setup::new(true)
    };
    let disk = |name: &str| Setup {
        placement: Placement::Disk,
        disks: vec![dir.join(name)],
        ..host(StateFormat::Split)
    };
    let card = |groups, setup: Setup| {
        let (device_groups, state_groups) = (Some(groups), Some(groups));
        let overrides = WindowOverrides { device_groups, state_groups, ..setup.overrides };
        Setup { discrete: true, overrides, ..setup }
    };
    let away = WindowOverrides { gradients_on_disk: Some(true), activations_on_disk: Some(true), ..chunks };
    let kept = |here, there| WindowOverrides { kept_blocks: Some(here), kept_on_disk: Some(there), ..chunks };
    let kept_on_host = WindowOverrides { kept_blocks: Some(0), kept_on_host: Some(9), ..chunks };
    for (name, setup) in [
        ("host, fp32", host(StateFormat::Fp32)),
        ("host, split", host(StateFormat::Split)),
        ("host, bf16", host(StateFormat::Bf16)),
        ("host, compact", host(StateFormat::Compact)),
        ("host, horizontal", horizontal(host(StateFormat::Split))),
        ("card, state in host memory", card(0, host(StateFormat::Split))),
        ("card, state on it", card(9, host(StateFormat::Split))),
        ("card, state on it and on disk", card(9, disk("card"))),
        (
            "card, activations on the host",
            card(0, Setup { overrides: kept_on_host, ..host(StateFormat::Split) }),
        ),
        ("card, activations on disk", card(0, Setup { overrides: kept(0, 9), ..disk("card-kept") })),
        ("disk, checkpoint", Setup { durability: Durability::Checkpoint, ..disk("checkpoint") }),
        ("disk, none", Setup { durability: Durability::None, ..disk("none") }),
        ("disk, gradients and activations on it", Setup { overrides: away, ..disk("away") }),
        ("disk, activations kept on it", Setup { overrides: kept(0, 9), ..disk("kept") }),
        ("disk, some kept on it", Setup { overrides: kept(3, 2), ..disk("some-kept") }),
        ("the same, horizontal", horizontal(Setup { overrides: away, ..disk("away-horizontal") })),
    ] {
        forget_resident_peak();
        let before = resident_peak_bytes();
        let mut engine = setup.create();
        setup.continue_to(&mut engine, 3);
        let grown = resident_peak_bytes().saturating_sub(before);
        let plan = engine.memory_plan();
        let planned = plan.total(Tier::Host) + plan.total(Tier::Device);
        println!("{name}: {grown} bytes grown, {planned} planned");
        assert!(
            grown.abs_diff(planned) <= SLACK_BYTES,
            "{name}: {grown} bytes, {planned} planned: {plan:#?}"
        );
    }
}

/// From now on the peak is counted from what is resident now.
fn forget_resident_peak() {
    std::fs::write("/proc/self/clear_refs", "5").expect("a process may forget its own peak");
}

/// The most bytes that the process had in memory.
fn resident_peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this is Linux");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("the kernel counts it");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    kib << 10
}
