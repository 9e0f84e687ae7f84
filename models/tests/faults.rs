//! Disk failures and interruptions of a training run: every failure is an error that names the file, nothing hangs, and
//! resuming from what is on disk gives the weights of the uninterrupted run, bit by bit.

#[path = "engine_support/mod.rs"]
mod support;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use support::{Setup, small_llama, weights_hash};
use terrace_aio::engine::{EngineConfig as IoConfig, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{IoEngine, IoErrorKind};
use terrace_kernels::DType;
use terrace_optimizer::StateFormat;
use terrace_tiers::TierError;
use terrace_zero::{Engine, EngineError, MicroBatch, Placement, StepRates, WindowOverrides};

const STEPS: u64 = 3;
/// Far more than a run takes, far less than a patient person would wait.
const HANG: Duration = Duration::from_secs(60);

fn tiny_windows() -> WindowOverrides {
    WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(2),
        gradients_on_disk: Some(true),
        activations_on_disk: Some(true),
        device_groups: Some(1),
        ..WindowOverrides::default()
    }
}

/// What the uninterrupted run ends with, with clipping and without.
fn expected(clip: bool) -> u64 {
    static HASHES: [OnceLock<u64>; 2] = [OnceLock::new(), OnceLock::new()];
    *HASHES[usize::from(clip)].get_or_init(|| {
        let base = Setup::new(true);
        Setup { clip: base.clip.filter(|_| clip), ..base }.run(STEPS).1
    })
}

fn healthy() -> Arc<dyn IoEngine> {
    Arc::new(ThreadsEngine::new(&IoConfig::default()).expect("threads start"))
}

/// Runs `work` on a thread, so that neither a hang nor a panic goes unnoticed.
fn guarded<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || sender.send(work()));
    match receiver.recv_timeout(HANG) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("the thread ended without a value"),
        },
    }
}

/// Trains until a step fails. Gives the steps that are known to be committed and the failure.
fn train(setup: &Setup) -> (Option<u64>, Option<EngineError>) {
    let mut engine = match setup.try_create() {
        Ok(engine) => engine,
        Err(error) => return (None, Some(error)),
    };
    while engine.step() < STEPS {
        if let Err(error) = engine.train_step(&setup.batches(engine.step()), 3e-3) {
            return (Some(engine.step()), Some(error));
        }
    }
    match engine.flush() {
        Ok(()) => (Some(STEPS), None),
        Err(error) => (Some(engine.step()), Some(error)),
    }
}

/// The weights of the run after it was continued with a healthy disk.
fn continued(setup: &Setup) -> u64 {
    let mut engine = setup.resume().unwrap_or_else(|e| panic!("resuming: {e}"));
    setup.continue_to(&mut engine, STEPS);
    weights_hash(&mut engine)
}

/// Fails the `nth` request and checks all of the above. Whether there was such a request.
fn fail_one(base: &Setup, dir: &Path, action: Action, nth: u64, kind: IoErrorKind) -> bool {
    let what = format!("{action:?} {nth} fails with {kind:?}");
    let name = format!("{action:?}-{nth}-{kind:?}");
    let disks = (0..base.disks.len()).map(|i| dir.join(format!("{name}-{i}"))).collect();
    let faults = Arc::new(FaultLayer::new(healthy(), FaultConfig::default()));
    faults.fail_nth(action, nth, kind);
    let setup = Setup { disks, io: Some(Arc::clone(&faults) as _), ..base.clone() };
    let (known, error) = guarded(&what, {
        let setup = setup.clone();
        move || train(&setup)
    });
    if faults.injected() == 0 {
        assert!(error.is_none(), "{what}: {error:?}");
        return false;
    }
    let text = error.unwrap_or_else(|| panic!("{what}: nobody noticed")).to_string();
    let (verb, why) = match (action, kind) {
        (Action::Read, _) => ("reading", "Input/output error"),
        (Action::Write, IoErrorKind::NoSpace) => ("writing", "No space left"),
        (Action::Write, _) => ("writing", "Input/output error"),
        (Action::Sync, _) => ("syncing", "Input/output error"),
    };
    assert!(text.contains(verb) && text.contains(why) && text.contains(".bin"), "{what}: {text}");
    assert!(text.contains(&name), "{what}: it names the directory: {text}");
    assert!(text.contains("(offset ") || action == Action::Sync, "{what}: it names the place: {text}");

    let setup = Setup { io: Some(healthy()), ..setup };
    let io = setup.io.clone().expect("just set");
    let hash = match Engine::stored(&io, &setup.disks) {
        Ok(stored) => {
            let at_least = known.unwrap_or(0);
            // Only a commit whose last sync failed may have reached the disk all the same.
            let at_most = at_least + u64::from(action == Action::Sync && known.is_some());
            assert!((at_least..=at_most).contains(&stored.step), "{what}: {known:?}, found {}", stored.step);
            continued(&setup)
        }
        Err(EngineError::Tier(TierError::NoState { .. })) if known.is_none() => setup.run(STEPS).1,
        Err(error) => panic!("{what}: {error}"),
    };
    assert_eq!(hash, expected(base.clip.is_some()), "{what}");
    true
}

/// Fails every `stride`-th request of a run, one run each, beginning with `first`.
fn fail_across(base: &Setup, first: u64, stride: usize) {
    let dir = tempfile::tempdir().unwrap();
    for (action, kind) in [
        (Action::Read, IoErrorKind::Device),
        (Action::Write, IoErrorKind::Device),
        (Action::Write, IoErrorKind::NoSpace),
    ] {
        let failed = (first..)
            .step_by(stride)
            .take_while(|&nth| fail_one(base, dir.path(), action, nth, kind))
            .count();
        println!("{action:?} with {kind:?}: {failed} runs");
        assert!(failed > 2, "{action:?}: the run has many requests");
    }
    (0..).take_while(|&nth| fail_one(base, dir.path(), Action::Sync, nth, IoErrorKind::Device)).count();
}

#[test]
fn failing_requests_with_clipping() {
    fail_across(&Setup::on_disk(true, vec!["one".into()]), 0, 5);
}

#[test]
fn failing_requests_during_backward() {
    let overrides = WindowOverrides { weight_slots: Some(1), ..WindowOverrides::default() };
    fail_across(
        &Setup { clip: None, overrides, ..Setup::on_disk(true, vec!["one".into(), "two".into()]) },
        1,
        5,
    );
}

#[test]
fn failing_requests_with_everything_on_disk() {
    let (kept_blocks, kept_on_disk, kept_slots) = (Some(1), Some(2), Some(3));
    let overrides = WindowOverrides { kept_blocks, kept_on_disk, kept_slots, ..tiny_windows() };
    fail_across(&Setup { overrides, ..Setup::on_disk(true, vec!["one".into()]) }, 2, 17);
}

#[test]
fn failing_requests_with_copies_in_memory() {
    let base = Setup { cache_bytes: 500_000, ..Setup::on_disk(true, vec!["one".into()]) };
    fail_across(&Setup { overrides: tiny_windows(), ..base }, 1, 11);
}

#[test]
fn failing_requests_on_a_discrete_device() {
    let base = Setup::on_disk(true, vec!["one".into()]);
    fail_across(&Setup { overrides: tiny_windows(), discrete: true, clip: None, ..base }, 3, 29);
}

/// An update that fails leaves gradients parked; backward needs their memory, and there is no more than that of one group.
#[test]
fn failing_requests_with_as_little_memory_as_can_be() {
    let overrides = WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(1),
        gradients_on_disk: Some(false),
        ..WindowOverrides::default()
    };
    let base = Setup { clip: None, overrides, ..Setup::on_disk(true, vec!["one".into()]) };
    fail_across(&base.tight(), 1, 3);
}

/// Ends an engine as a panic does, which leaves its deferred update undone.
fn lose(engine: Engine) {
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let _engine = engine;
        std::panic::resume_unwind(Box::new("lost"));
    }));
    assert!(panic.is_err());
}

#[test]
fn resuming_after_every_step_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for clip in [true, false] {
        for stop in 0..=STEPS {
            let base = Setup::on_disk(true, vec![dir.path().join(format!("{clip}-{stop}"))]);
            let setup = Setup { clip: base.clip.filter(|_| clip), ..base };
            let mut engine = setup.create();
            setup.continue_to(&mut engine, stop);
            // A clipped step that is lost is done again.
            if stop % 2 == 0 {
                drop(engine);
            } else {
                lose(engine);
            }
            assert_eq!(continued(&setup), expected(clip), "stopped after step {stop}");
        }
    }
}

/// An update that was left for the next step: what has seen it, and what has not.
#[test]
fn a_deferred_update_is_done_before_anything_can_tell() {
    let dir = tempfile::tempdir().unwrap();
    let setup = |name: &str| Setup::on_disk(true, vec![dir.path().join(name)]);
    let resident = Setup::new(true);
    let mut expected = resident.create();
    resident.continue_to(&mut expected, 1);
    let (hash, sample) = (weights_hash(&mut expected), resident.batches(1));

    let lost = setup("lost");
    let mut engine = lost.create();
    lost.continue_to(&mut engine, 1);
    assert_eq!((engine.step(), engine.updates()), (1, 1));
    lose(engine);
    assert_eq!(lost.resume().unwrap().step(), 0, "nothing made up for the next step");

    for (name, look) in [
        ("drop", (|_, _| ()) as fn(&mut Engine, &[MicroBatch])),
        ("flush", |engine, _| engine.flush().unwrap()),
        ("save", |engine, _| engine.save().unwrap()),
        ("weights", |engine, _| assert!(engine.weights().is_ok())),
        ("evaluate", |engine, batches| assert!(engine.evaluate(&batches[0]).is_ok())),
    ] {
        let setup = setup(name);
        let mut engine = setup.create();
        setup.continue_to(&mut engine, 1);
        look(&mut engine, &sample);
        drop(engine);
        let mut engine = setup.resume().unwrap();
        assert_eq!((engine.step(), weights_hash(&mut engine)), (1, hash), "{name}");
    }
    let evaluated = setup("evaluated");
    let mut engine = evaluated.create();
    evaluated.continue_to(&mut engine, 1);
    let loss = |engine: &mut Engine| engine.evaluate(&sample[0]).unwrap();
    assert_eq!(loss(&mut engine), loss(&mut expected), "it sees the new weights");

    // Betas that move belong to the step that they were given for.
    let betas = Setup { identity: "betas".into(), ..setup("betas") };
    let (mut engine, mut other) = (betas.create(), resident.create());
    for step in 0..STEPS {
        let rates = StepRates { lr: 1e-3, betas: Some((0.8 + 0.05 * step as f64, 0.9)) };
        engine.train_step(&betas.batches(step), rates).unwrap();
        other.train_step(&resident.batches(step), rates).unwrap();
    }
    assert_eq!(weights_hash(&mut engine), weights_hash(&mut other));

    // A step that is refused does not take the one before with it.
    let wrong = StepRates { lr: 1e-3, betas: Some((2.0, 0.9)) };
    let before = weights_hash(&mut engine);
    engine.train_step(&betas.batches(0), 1e-3).unwrap();
    engine.train_step(&betas.batches(0), wrong).expect_err("refused");
    engine.flush().unwrap();
    assert_ne!(weights_hash(&mut engine), before);
}

#[test]
fn resuming_saved_resident_state_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for stop in 0..=STEPS {
        let disks = vec![dir.path().join(stop.to_string())];
        let setup = Setup { placement: Placement::Host, disks, ..Setup::new(true) };
        let mut engine = setup.create();
        for step in 0..=stop {
            setup.continue_to(&mut engine, step);
            engine.save().unwrap_or_else(|e| panic!("{e}"));
        }
        // What was not saved is lost.
        engine.train_step(&setup.batches(stop), 3e-3).unwrap();
        drop(engine);
        let mut engine = setup.resume().unwrap();
        assert_eq!(engine.step(), stop);
        setup.continue_to(&mut engine, STEPS);
        engine.save().unwrap();
        assert_eq!(weights_hash(&mut engine), expected(true), "stopped after step {stop}");
        drop(engine);
        // Saved state can go on from disk as well.
        let on_disk = Setup { placement: Placement::Disk, ..setup };
        assert_eq!(continued(&on_disk), expected(true));
    }
}

#[test]
fn a_failed_save_can_be_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    for action in [Action::Write, Action::Sync] {
        for nth in (0..).step_by(3) {
            let faults = Arc::new(FaultLayer::new(healthy(), FaultConfig::default()));
            let disks = vec![dir.path().join(format!("{action:?}-{nth}"))];
            let io = Some(Arc::clone(&faults) as Arc<dyn IoEngine>);
            let setup = Setup { placement: Placement::Host, disks, io, ..Setup::new(true) };
            let failed = guarded(&format!("{action:?} {nth}"), {
                let (setup, faults) = (setup.clone(), Arc::clone(&faults));
                move || {
                    let mut engine = setup.create();
                    faults.fail_nth(action, nth, IoErrorKind::Device);
                    let mut failed = 0;
                    for step in 0..STEPS {
                        setup.continue_to(&mut engine, step);
                        if engine.save().is_err() {
                            failed += 1;
                            engine.save().unwrap_or_else(|e| panic!("{action:?} {nth}: {e}"));
                        }
                    }
                    failed
                }
            });
            let setup = Setup { io: Some(healthy()), ..setup };
            let mut engine = setup.resume().unwrap_or_else(|e| panic!("{action:?} {nth}: {e}"));
            assert_eq!(engine.step(), STEPS - 1, "{action:?} {nth}");
            setup.continue_to(&mut engine, STEPS);
            assert_eq!(weights_hash(&mut engine), expected(true), "{action:?} {nth}");
            if failed == 0 {
                assert!(nth > 3, "there were requests to fail");
                break;
            }
        }
    }
}

#[test]
fn state_of_another_run_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup::on_disk(true, vec![dir.path().join("state")]);
    drop(setup.create());
    let other_model = Setup { model: small_llama(false), ..setup.clone() };
    let other_run = Setup { identity: "{\"test\":2,\"data\":\"b.jsonl\"}".into(), ..setup.clone() };
    let other_state = Setup { state: StateFormat::Fp32, ..setup.clone() };
    let other_dtype = Setup { dtype: DType::F32, state: StateFormat::Fp32, ..setup.clone() };
    for (other, parts) in [
        (other_model, ["another model", "head", "elements"]),
        (other_run, ["another run", "test was 1 and is now 2", "data was nothing and is now \"b.jsonl\""]),
        (
            other_state,
            ["another format", "low half of the master weights (2 bytes", "+ master weights (4 bytes each)"],
        ),
        (other_dtype, ["another format", "weights (2 bytes each)", "weights (4 bytes each)"]),
    ] {
        let text = other.resume().map(drop).expect_err("refused").to_string();
        println!("{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is in: {text}");
        }
    }
    let text = setup.try_create().map(drop).expect_err("refused").to_string();
    assert!(text.contains("Engine::resume"), "{text}");
    assert_eq!(continued(&setup), expected(true), "none of them touched the state");
}

#[test]
fn a_run_that_diverges_leaves_the_state_alone() {
    let dir = tempfile::tempdir().unwrap();
    for (name, placement, clip) in [
        ("resident", Placement::Host, true),
        ("clipped", Placement::Disk, true),
        ("immediate", Placement::Disk, false),
    ] {
        let base = Setup { placement, disks: vec![dir.path().join(name)], ..Setup::new(true) };
        let setup = Setup { clip: base.clip.filter(|_| clip), ..base };
        let mut engine = setup.create();
        engine.train_step(&setup.batches(0), 1e30).unwrap();
        engine.save().unwrap();
        let before = weights_hash(&mut engine);
        let error = engine.train_step(&setup.batches(1), 3e-3).expect_err("such weights give no finite loss");
        assert!(matches!(error, EngineError::Diverged(_)), "{name}: {error}");
        let text = error.to_string();
        assert!(
            text.contains("step 2 is not finite") && text.contains("still that of step 1"),
            "{name}: {text}"
        );
        assert_eq!((engine.step(), weights_hash(&mut engine)), (1, before), "{name}");
        drop(engine);
        let mut engine = setup.resume().unwrap();
        assert_eq!((engine.step(), weights_hash(&mut engine)), (1, before), "{name}");
    }
}

#[test]
fn a_learning_rate_that_is_not_finite_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, placement) in [("resident", Placement::Host), ("disk", Placement::Disk)] {
        let setup = Setup { placement, disks: vec![dir.path().join(name)], ..Setup::new(true) };
        let mut engine = setup.create();
        let before = weights_hash(&mut engine);
        for lr in [f64::NAN, f64::INFINITY] {
            engine.train_step(&setup.batches(0), lr).expect_err("refused");
            assert_eq!((engine.step(), weights_hash(&mut engine)), (0, before), "{name}, {lr}");
        }
        setup.continue_to(&mut engine, STEPS);
        assert_eq!(weights_hash(&mut engine), expected(true), "{name}: refusing did no harm");
    }
}

/// One byte of the newest step is not what was written. Nothing of the step before is overwritten before that is found.
#[test]
fn damage_is_found_before_the_step_before_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    let overrides = WindowOverrides { chunk_elements: Some(1 << 14), ..WindowOverrides::default() };
    for cache_bytes in [0, 100_000] {
        let setup = Setup { overrides, cache_bytes, ..Setup::on_disk(true, vec![disk.clone()]) };
        drop(setup.run(STEPS));
        let path = disk.join("state.bin");
        let whole = std::fs::read(&path).unwrap();
        let (mut refused, flips) = (0, 24);
        for flip in 0..flips {
            let at = 4096 + (whole.len() - 8192) / flips * flip;
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            // Others are in what nothing refers to any more.
            if let Err(error) = setup.resume() {
                assert!(error.to_string().contains("state.bin"), "{error}");
                assert!(std::fs::read(&path).unwrap() == damaged, "byte {at}");
                refused += 1;
            }
        }
        assert!(refused > flips / 4, "{refused} of {flips} bytes are of the newest step");
        std::fs::remove_dir_all(&disk).unwrap();
    }
}
