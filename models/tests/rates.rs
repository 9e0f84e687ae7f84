//! Learning rates and betas that a schedule moves: every step is that of an optimizer configured so.

#[path = "engine_support/mod.rs"]
mod support;

use support::{LR, Setup, weights_hash};
use terrace_optimizer::{AdamW, OneCycle, Schedule, ScheduleKind};
use terrace_zero::{Engine, Placement, StepRates};

/// Trains up to `rates.len()` steps and hashes the weights.
fn hash(setup: &Setup, engine: &mut Engine, rates: &[StepRates]) -> u64 {
    while let Some(&rates) = rates.get(engine.step() as usize) {
        engine.train_step(&setup.batches(engine.step()), rates).unwrap();
    }
    weights_hash(engine)
}

fn trained(setup: &Setup, rates: &[StepRates]) -> u64 {
    hash(setup, &mut setup.create(), rates)
}

#[test]
fn betas_of_a_step_are_those_of_the_configuration() {
    let given = Setup::new(true);
    let configured = AdamW { beta1: 0.7, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let configured = Setup { optimizer: configured.into(), ..given.clone() };
    let usual = vec![StepRates::from(LR); 3];
    let moved = vec![StepRates { lr: LR, betas: Some((0.7, 0.99)) }; 3];
    assert_eq!(trained(&given, &moved), trained(&configured, &usual));
    assert_ne!(trained(&given, &moved), trained(&given, &usual));
    // Algorithms without betas have nothing to move.
    let sgd = Setup { optimizer: "sgd".parse().unwrap(), ..given };
    assert_eq!(trained(&sgd, &moved), trained(&sgd, &usual));
}

#[test]
fn a_step_without_betas_has_the_configured_ones() {
    let setup = Setup::new(true);
    let usual = StepRates::from(LR);
    let same = StepRates { lr: LR, betas: Some((0.9, 0.95)) };
    let other = StepRates { lr: LR, betas: Some((0.5, 0.9)) };
    assert_eq!(trained(&setup, &[other, usual, usual]), trained(&setup, &[other, same, same]));
    assert_ne!(trained(&setup, &[other, usual, usual]), trained(&setup, &[usual, usual, usual]));
}

#[test]
fn a_cycle_is_the_same_wherever_the_state_lives_and_across_a_resume() {
    let cycle = OneCycle { cycle_first_step_size: 2, decay_step_size: 1, ..OneCycle::new(1e-4, 5e-3) };
    let schedule = Schedule { kind: ScheduleKind::OneCycle(cycle), ..Schedule::constant(0.0) };
    let rates: Vec<_> =
        (0..6).map(|done| StepRates { lr: schedule.lr(done), betas: schedule.betas(done) }).collect();
    assert_ne!(rates[1].betas, rates[2].betas);
    let dir = tempfile::tempdir().unwrap();
    let lion = Setup { optimizer: "lion".parse().unwrap(), ..Setup::new(false) };
    for (number, setup) in
        [Setup::new(true), lion, Setup { clip: None, ..Setup::new(true) }].iter().enumerate()
    {
        let expected = trained(setup, &rates);
        let disks = vec![dir.path().join(number.to_string())];
        let on_disk = Setup { placement: Placement::Disk, disks, threads: 2, ..setup.clone() };
        hash(&on_disk, &mut on_disk.create(), &rates[..3]);
        let resumed = hash(&on_disk, &mut on_disk.resume().unwrap(), &rates);
        assert_eq!(resumed, expected);
    }
}

#[test]
fn betas_out_of_range_are_refused_before_anything_moves() {
    let setup = Setup::new(true);
    let mut engine = setup.create();
    let before = weights_hash(&mut engine);
    let rates = StepRates { lr: LR, betas: Some((1.0, 0.99)) };
    let error = engine.train_step(&setup.batches(0), rates).unwrap_err().to_string();
    assert!(error.contains("beta1 is 1"), "{error}");
    assert_eq!((engine.step(), weights_hash(&mut engine)), (0, before));
}
