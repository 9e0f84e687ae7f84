//! Training in f16: the loss scale keeps small gradients, an overflow skips its step and changes nothing but the scale, and all
//! of it is the same wherever the state lives and across a resume.

#[path = "engine_support/mod.rs"]
mod support;

use std::sync::Arc;
use support::{LR, Setup, weights_hash};
use terrace_aio::IoErrorKind;
use terrace_aio::engine::{EngineChoice, EngineConfig as IoConfig, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_kernels::DType;
use terrace_optimizer::{LossScaleConfig, StateFormat};
use terrace_zero::{Durability, Placement, StepReport, WindowOverrides};

const STEPS: u64 = 12;

fn f16(scale: LossScaleConfig) -> Setup {
    Setup { dtype: DType::F16, state: StateFormat::Fp32, loss_scale: Some(scale), ..Setup::new(true) }
}

/// From far above what f16 holds, without patience, so that the first steps overflow; then up again soon.
fn overflowing() -> LossScaleConfig {
    LossScaleConfig {
        initial_scale_power: 26,
        hysteresis: 1,
        loss_scale_window: 2,
        ..LossScaleConfig::default()
    }
}

/// What must not depend on where the state lives.
fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, Option<f64>, bool)> {
    reports.iter().map(|r| (r.loss.to_bits(), r.grad_norm.to_bits(), r.loss_scale, r.skipped)).collect()
}

#[test]
fn an_overflow_changes_nothing_but_the_scale() {
    let dir = tempfile::tempdir().unwrap();
    for placement in [Placement::None, Placement::Disk] {
        for clip in [None, Some(0.5)] {
            let disks = vec![dir.path().join(format!("{placement}-{clip:?}"))];
            let setup = Setup { placement, disks, clip, ..f16(overflowing()) };
            let mut engine = setup.create();
            let before = weights_hash(&mut engine);
            let mut scale = 2f64.powi(26);
            loop {
                let step = engine.step();
                let report = engine.train_step(&setup.batches(step), LR).unwrap();
                assert_eq!((report.step, report.loss_scale), (step + 1, Some(scale)));
                assert_eq!(report.skipped, !report.grad_norm.is_finite());
                let is_same = weights_hash(&mut engine) == before;
                assert_eq!(is_same, report.skipped, "step {step}");
                if !report.skipped {
                    assert!(report.loss.is_finite() && report.grad_norm < 100.0, "{report:?}");
                    break;
                }
                assert_eq!((engine.step(), engine.updates()), (step + 1, 0));
                scale /= 2.0;
            }
            assert!(engine.step() > 3 && engine.updates() == 1, "{} steps", engine.step());
        }
    }
}

#[test]
fn skipped_steps_are_not_counted_by_the_optimizer() {
    // The same batch from the same weights: once after overflows, once at a scale that is low from the start.
    let late = f16(overflowing());
    let mut engine = late.create();
    let scale = loop {
        let report = engine.train_step(&late.batches(0), LR).unwrap();
        if !report.skipped {
            break report.loss_scale.unwrap();
        }
    };
    assert!(engine.step() > 2 && engine.updates() == 1);
    let fixed = f16(LossScaleConfig { loss_scale: scale, ..LossScaleConfig::default() });
    let mut other = fixed.create();
    assert!(!other.train_step(&fixed.batches(0), LR).unwrap().skipped);
    assert_eq!(weights_hash(&mut engine), weights_hash(&mut other));
}

#[test]
fn the_scale_grows_back_and_the_loss_falls() {
    let setup = f16(overflowing());
    let mut engine = setup.create();
    let mut reports = Vec::new();
    for _ in 0..30 {
        reports.push(engine.train_step(&setup.batches(0), LR).unwrap());
    }
    let scales: Vec<f64> = reports.iter().filter_map(|r| r.loss_scale).collect();
    assert!(scales.windows(2).any(|pair| pair[1] == 2.0 * pair[0]), "{scales:?}");
    assert!(scales.windows(2).all(|pair| [0.5, 1.0, 2.0].contains(&(pair[1] / pair[0]))), "{scales:?}");
    let first = reports.iter().find(|r| !r.skipped).unwrap();
    assert!(reports[29].loss < 0.7 * first.loss, "{} to {}", first.loss, reports[29].loss);
}

#[test]
fn the_norm_is_that_without_a_scale() {
    let norm = |setup: Setup| setup.create().train_step(&setup.batches(0), LR).unwrap().grad_norm;
    let scaled = |loss_scale: f64| norm(f16(LossScaleConfig { loss_scale, ..LossScaleConfig::default() }));
    let exact = norm(Setup { dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
    for scale in [64.0, 1000.0, 4096.0] {
        assert!((scaled(scale) / exact - 1.0).abs() < 0.01, "{} at {scale}, {exact} in f32", scaled(scale));
    }
}

#[test]
fn placement_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(2),
        gradients_on_disk: Some(true),
        activations_on_disk: Some(true),
        ..WindowOverrides::default()
    };
    for (number, clip) in [Some(0.5), None].into_iter().enumerate() {
        let base = Setup { clip, ..f16(overflowing()) };
        let run = |setup: &Setup| {
            let mut engine = setup.create();
            (numbers(&setup.train_to(&mut engine, STEPS)), weights_hash(&mut engine))
        };
        let expected = run(&base);
        let skipped = expected.0.iter().filter(|step| step.3).count();
        assert!(skipped > 2 && skipped < STEPS as usize - 2, "{skipped} of {STEPS} steps are skipped");
        let disk = |name: &str| Setup {
            placement: Placement::Disk,
            disks: vec![dir.path().join(format!("{name}-{number}"))],
            choice: EngineChoice::Threads,
            ..base.clone()
        };
        for (name, setup) in [
            ("host", Setup { placement: Placement::Host, threads: 2, ..base.clone() }),
            ("discrete", Setup { placement: Placement::Host, discrete: true, ..base.clone() }),
            ("disk", disk("disk")),
            ("tiny", Setup { overrides: tiny, ..disk("tiny") }),
            ("tiny, discrete", Setup { overrides: tiny, discrete: true, threads: 2, ..disk("discrete") }),
        ] {
            // A card has a memory of its own in any case.
            if !support::card::is_named() || !["host", "tiny"].contains(&name) {
                assert_eq!(run(&setup), expected, "{name}");
            }
        }
    }
}

#[test]
fn the_scale_survives_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    for placement in [Placement::Disk, Placement::Host] {
        let whole = f16(overflowing());
        let mut engine = whole.create();
        let expected = numbers(&whole.train_to(&mut engine, STEPS));
        let expected = (expected, weights_hash(&mut engine));
        let disks = vec![dir.path().join(placement.to_string())];
        let setup = Setup { placement, disks, ..whole };
        let mut all = Vec::new();
        let mut engine = setup.create();
        for stop in 1..=STEPS {
            all.extend(setup.train_to(&mut engine, stop));
            engine.save().unwrap();
            drop(engine);
            engine = setup.resume().unwrap();
            assert_eq!(engine.updates(), all.iter().filter(|r| !r.skipped).count() as u64);
        }
        assert_eq!((numbers(&all), weights_hash(&mut engine)), expected, "{placement}");
    }
}

/// A step that fails goes back to the last commit, and its scale does.
#[test]
fn a_failure_goes_back_to_the_scale_of_the_commit() {
    let dir = tempfile::tempdir().unwrap();
    // With `step`, the first write of a step that is skipped is its commit, so reads fail there.
    let cases = [(Durability::Step, Action::Read), (Durability::Checkpoint, Action::Write)];
    for ((durability, action), discrete) in
        cases.into_iter().flat_map(|case| [false, true].map(|discrete| (case, discrete)))
    {
        // What a device has of the state is not written before a save.
        let overrides = WindowOverrides { state_groups: Some(0), ..WindowOverrides::default() };
        let base = Setup { discrete, overrides, ..f16(overflowing()) };
        let mut engine = base.create();
        base.train_to(&mut engine, STEPS);
        let expected = (engine.updates(), weights_hash(&mut engine));
        let disk = Arc::new(ThreadsEngine::new(&IoConfig::default()).unwrap());
        let faults = Arc::new(FaultLayer::new(disk, FaultConfig::default()));
        let setup = Setup {
            placement: Placement::Disk,
            disks: vec![dir.path().join(format!("{durability:?}, {discrete}"))],
            durability,
            io: Some(Arc::clone(&faults) as _),
            ..base
        };
        let mut engine = setup.create();
        engine.save().unwrap();
        let (mut failures, mut went_back, mut tried) = (0, 0, 0);
        while engine.step() < STEPS {
            let step = engine.step();
            // The first try of some steps.
            if step > tried && step.is_multiple_of(2) {
                tried = step;
                faults.fail_nth(action, 1, IoErrorKind::Device);
            }
            if let Err(error) = engine.train_step(&setup.batches(step), LR) {
                failures += 1;
                went_back += u64::from(engine.step() < step);
                assert!(failures < STEPS, "{durability:?}: {error}");
            }
        }
        assert!(failures > 1, "{durability:?}, {discrete}");
        assert!(durability == Durability::Step || went_back > 0);
        assert_eq!((engine.updates(), weights_hash(&mut engine)), expected, "{durability:?}, {discrete}");
    }
}

#[test]
fn the_note_of_a_step_is_not_mixed_with_the_scale() {
    let dir = tempfile::tempdir().unwrap();
    let setup =
        Setup { placement: Placement::Disk, disks: vec![dir.path().join("disk")], ..f16(overflowing()) };
    let mut engine = setup.create();
    engine.train_step_noting(&setup.batches(0), LR, |report| format!("{}", report.skipped).into()).unwrap();
    assert_eq!(engine.noted(), b"true");
    drop(engine);
    assert_eq!(setup.resume().unwrap().noted(), b"true");
}

#[test]
fn an_overflow_at_the_minimum_is_said() {
    let config = LossScaleConfig { min_loss_scale: 2f64.powi(25), ..overflowing() };
    let setup = f16(config);
    let mut engine = setup.create();
    assert!(engine.train_step(&setup.batches(0), LR).unwrap().skipped);
    let before = weights_hash(&mut engine);
    let error = engine.train_step(&setup.batches(1), LR).unwrap_err().to_string();
    for part in ["step 2: a gradient overflowed", "at its minimum, 33554432", "still that of step 1"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((engine.step(), weights_hash(&mut engine)), (1, before));
}

#[test]
fn state_that_was_trained_without_a_scale_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disks = vec![dir.path().join("disk")];
    let plain = Setup { state: StateFormat::Fp32, ..Setup::on_disk(true, disks) };
    let mut engine = plain.create();
    plain.train_to(&mut engine, 1);
    engine.flush().unwrap();
    drop(engine);
    let setup = Setup { dtype: DType::F16, loss_scale: Some(overflowing()), ..plain };
    let error = setup.resume().unwrap_err().to_string();
    assert!(error.contains("has no loss scale"), "{error}");
}

#[test]
fn without_a_scale_an_overflow_is_an_error() {
    let setup = Setup { loss_scale: None, ..f16(LossScaleConfig::default()) };
    let mut engine = setup.create();
    assert!(!engine.train_step(&setup.batches(0), 1e5).unwrap().skipped);
    let error = engine.train_step(&setup.batches(1), LR).unwrap_err().to_string();
    assert!(error.contains("of step 2 is not finite"), "{error}");
}
