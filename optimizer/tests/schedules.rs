//! Learning rates, and the betas of `OneCycle`, are those of transformers and DeepSpeed.
//!
//! The fixture comes from `fixtures/make_schedules.py`.

mod common;

use std::collections::BTreeSet;

use common::fixtures::{array, fixture, number};
use serde_json::Value;
use terrace_optimizer::{MomentumCycle, OneCycle, OptimizerError, Schedule, ScheduleKind, Warmup};

#[test]
fn rates_and_betas_are_theirs() {
    let mut names = BTreeSet::new();
    for case in array(&fixture("schedules.json")) {
        let schedule = schedule_of(case);
        assert_eq!(schedule.kind.to_string(), case["name"].as_str().unwrap());
        assert_eq!(schedule.validate(), Ok(()), "{schedule:?}");
        names.insert(schedule.kind.to_string());
        for (at, done) in array(&case["done"]).iter().enumerate() {
            let done = done.as_u64().unwrap();
            let close = |ours: f64, key: &str| {
                let theirs = number(&case[key][at]);
                assert!(
                    (ours - theirs).abs() <= 1e-12 * theirs.abs(),
                    "{schedule:?} after {done} steps: {key} is {ours}, not {theirs}"
                );
            };
            close(schedule.lr(done), "lr");
            if let Some((beta1, beta2)) = schedule.betas(done) {
                close(beta1, "beta1");
                close(beta2, "beta2");
            }
        }
    }
    assert_eq!(names.len(), 11, "every kind is in the fixture: {names:?}");
}

#[test]
fn only_one_cycle_with_momentum_moves_betas() {
    let cycle = OneCycle::new(0.1, 0.2);
    let betas = |kind| Schedule { kind, ..Schedule::constant(0.5) }.betas(1);
    assert!(betas(ScheduleKind::OneCycle(cycle)).is_some());
    assert_eq!(betas(ScheduleKind::OneCycle(OneCycle { momentum: None, ..cycle })), None);
    assert_eq!(betas(ScheduleKind::Cosine), None);
}

#[test]
fn parameters_out_of_range_are_refused_by_name() {
    let cycle = OneCycle::new(0.1, 0.2);
    let momentum = MomentumCycle::default();
    let (warmup, staircase, step_rate) = (Warmup::Log, false, 1.0);
    let kinds = [
        (ScheduleKind::CosineWithRestarts { cycles: 0 }, "num_cycles"),
        (ScheduleKind::Polynomial { power: 0.0, end_lr: 0.0 }, "power"),
        (ScheduleKind::Polynomial { power: 1.0, end_lr: 0.5 }, "lr_end"),
        (ScheduleKind::InverseSqrt { timescale: Some(0) }, "timescale"),
        (ScheduleKind::WarmupLr { warmup, min_lr: -1.0 }, "warmup_min_lr"),
        (ScheduleKind::WarmupCosineLr { warmup, warmup_min_ratio: f64::NAN }, "warmup_min_ratio"),
        (ScheduleKind::OneCycle(OneCycle { cycle_max_lr: -1.0, ..cycle }), "cycle_max_lr"),
        (ScheduleKind::OneCycle(OneCycle { cycle_first_step_size: 0, ..cycle }), "cycle_first_step_size"),
        (
            ScheduleKind::OneCycle(OneCycle {
                momentum: Some(MomentumCycle { cycle_max_mom: 1.0, ..momentum }),
                ..cycle
            }),
            "cycle_max_mom",
        ),
        (ScheduleKind::LrRangeTest { step_size: 0, step_rate, staircase }, "lr_range_test_step_size"),
        (ScheduleKind::LrRangeTest { step_size: 1, step_rate: -1.0, staircase }, "lr_range_test_step_rate"),
    ];
    let base = Schedule::constant(0.5);
    let schedules = kinds.map(|(kind, name)| (Schedule { kind, ..base }, name));
    let common = [
        (Schedule { base_lr: -1.0, ..base }, "learning rate"),
        (Schedule { min_ratio: 1.5, ..base }, "min_ratio"),
    ];
    for (schedule, name) in schedules.into_iter().chain(common) {
        let error = schedule.validate().unwrap_err();
        assert!(matches!(error, OptimizerError::Hyperparameter { name: n, .. } if n == name), "{error}");
    }
}

#[test]
fn a_warm_up_that_does_not_end_before_the_run_does() {
    let warmup = Warmup::default();
    for (kind, has_end) in [
        (ScheduleKind::Linear, true),
        (ScheduleKind::Cosine, true),
        (ScheduleKind::CosineWithRestarts { cycles: 1 }, true),
        (ScheduleKind::Polynomial { power: 1.0, end_lr: 0.0 }, true),
        (ScheduleKind::WarmupDecayLr { warmup, min_lr: 0.0 }, true),
        (ScheduleKind::WarmupCosineLr { warmup, warmup_min_ratio: 0.0 }, true),
        (ScheduleKind::Constant, false),
        (ScheduleKind::InverseSqrt { timescale: None }, false),
        (ScheduleKind::WarmupLr { warmup, min_lr: 0.0 }, false),
    ] {
        let schedule = |warmup_steps, total_steps| {
            Schedule { kind, warmup_steps, total_steps, ..Schedule::constant(0.5) }.checked()
        };
        assert!(schedule(5, 5).is_ok(), "{kind}");
        let refused = OptimizerError::Warmup { warmup: 6, total: 5 };
        assert_eq!(schedule(6, 5).err(), has_end.then_some(refused), "{kind}");
    }
}

fn schedule_of(case: &Value) -> Schedule {
    let warmup = if case["warmup"] == "linear" { Warmup::Linear } else { Warmup::Log };
    let field = |name: &str| number(&case[name]);
    let (kind, min_ratio) = match case["name"].as_str().unwrap() {
        "constant" => (ScheduleKind::Constant, 0.0),
        "linear" => (ScheduleKind::Linear, 0.0),
        "cosine" => (ScheduleKind::Cosine, case["min_ratio"].as_f64().unwrap_or(0.0)),
        "cosine_with_restarts" => (ScheduleKind::CosineWithRestarts { cycles: field("cycles") as u32 }, 0.0),
        "polynomial" => (ScheduleKind::Polynomial { power: field("power"), end_lr: field("end_lr") }, 0.0),
        "inverse_sqrt" => (ScheduleKind::InverseSqrt { timescale: case["timescale"].as_u64() }, 0.0),
        "WarmupLR" => (ScheduleKind::WarmupLr { warmup, min_lr: 0.01 }, 0.0),
        "WarmupDecayLR" => (ScheduleKind::WarmupDecayLr { warmup, min_lr: 0.01 }, 0.0),
        "WarmupCosineLR" => (ScheduleKind::WarmupCosineLr { warmup, warmup_min_ratio: 0.05 }, 0.1),
        "OneCycle" => (ScheduleKind::OneCycle(cycle_of(&case["cycle"])), 0.0),
        "LRRangeTest" => {
            let (step_size, step_rate) = (field("step_size") as u64, field("step_rate"));
            let staircase = case["staircase"].as_bool().unwrap();
            (ScheduleKind::LrRangeTest { step_size, step_rate, staircase }, 0.0)
        }
        name => panic!("unknown schedule {name} in the fixture"),
    };
    let [warmup_steps, total_steps] =
        ["warmup_steps", "total_steps"].map(|key| case[key].as_u64().unwrap_or(0));
    Schedule { kind, warmup_steps, total_steps, base_lr: 0.5, min_ratio }
}

fn cycle_of(cycle: &Value) -> OneCycle {
    let field = |name: &str, default: f64| cycle[name].as_f64().unwrap_or(default);
    let momentum = MomentumCycle {
        cycle_min_mom: field("cycle_min_mom", 0.8),
        cycle_max_mom: field("cycle_max_mom", 0.9),
        decay_mom_rate: field("decay_mom_rate", 0.0),
    };
    OneCycle {
        decay_lr_rate: field("decay_lr_rate", 0.0),
        cycle_first_step_size: field("cycle_first_step_size", 2000.0) as u64,
        cycle_second_step_size: cycle["cycle_second_step_size"].as_u64(),
        cycle_first_stair_count: field("cycle_first_stair_count", 0.0) as u64,
        cycle_second_stair_count: cycle["cycle_second_stair_count"].as_u64(),
        decay_step_size: field("decay_step_size", 0.0) as u64,
        momentum: (cycle["cycle_momentum"] != false).then_some(momentum),
        ..OneCycle::new(field("cycle_min_lr", 0.0), field("cycle_max_lr", 0.0))
    }
}
