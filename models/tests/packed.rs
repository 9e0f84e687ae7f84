//! Weights that stay packed between micro-batches change no bit of training, and are in the plan.

#[path = "engine_support/mod.rs"]
mod support;

use support::{Setup, weights_hash};
use terrace_kernels::DType;
use terrace_models::{TokenBatch, build};
use terrace_optimizer::StateFormat;
use terrace_tiers::Tier;
use terrace_zero::{Accumulation, BatchLimits, Engine, EngineConfig, PlanningRuns, WindowOverrides};

const STEPS: u64 = 3;

fn packing(base: &Setup, packed_bytes: Option<usize>) -> Setup {
    Setup { overrides: WindowOverrides { packed_bytes, ..base.overrides }, ..base.clone() }
}

#[test]
fn packed_weights_change_no_bit() {
    for (dtype, state) in [(DType::BF16, StateFormat::Split), (DType::F32, StateFormat::Fp32)] {
        for accumulation in [Accumulation::Vertical, Accumulation::Horizontal] {
            let base = Setup { dtype, state, accumulation, micro_batches: 5, ..Setup::new(true) };
            let expected = packing(&base, Some(0)).run(STEPS);
            for bytes in [Some(8 << 10), Some(64 << 10), Some(4 << 20), None] {
                assert_eq!(packing(&base, bytes).run(STEPS), expected, "{dtype} {accumulation:?} {bytes:?}");
            }
        }
    }
}

/// As much as a block can use, no more than a part of what is left, and nothing where nothing is used again.
#[test]
fn the_plan_has_room_for_them() {
    let base = Setup { micro_batches: 4, ..Setup::new(false) }.on_cpu();
    let memory = |setup: &Setup| {
        let engine = setup.create();
        (engine.memory_plan().total(Tier::Host), engine.windows().packed_bytes.unwrap())
    };
    let (without, nothing) = memory(&packing(&base, Some(0)));
    let (with, useful) = memory(&base);
    assert_eq!((nothing, with - without), (0, useful as u64));
    assert!(useful > 0 && useful.is_multiple_of(4096), "{useful} bytes");
    let tight = Setup { host_budget: without + 8 * useful as u64, ..base.clone() };
    let (_, part) = memory(&tight);
    assert!((1..=useful / 2).contains(&part), "{part} of {useful} bytes");
    // Parts of 512 rows are worth as much as micro-batches.
    let of_tokens = |length: usize| {
        let limits = BatchLimits { sequences: 1, length, micro_batches: 1, ..base.config().limits };
        let (config, sample) =
            (EngineConfig { limits, ..base.config() }, TokenBatch::new(&base.model).blank(1, length));
        let blocks = build(&base.model);
        let planned = Engine::outlook(config, &base.backend(), blocks, &sample, &PlanningRuns::default());
        planned.unwrap().windows.packed_bytes
    };
    assert_eq!(of_tokens(1024), Some(0));
    assert_eq!(of_tokens(1025), Some(useful));
    for other in
        [Setup { micro_batches: 2, ..base.clone() }, Setup { discrete: true, ..base.clone() }.on_cpu()]
    {
        assert_eq!(memory(&other).1, 0);
    }
    // The same plan again, from what it chose.
    let again = packing(&base, Some(useful));
    assert_eq!(memory(&again), (with, useful));
    let mut engine = base.create();
    assert_eq!(weights_hash(&mut engine), weights_hash(&mut again.create()));
}
