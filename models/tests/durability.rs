//! State on disk that is committed by saves: between them a run may end at any time and goes back to the last one. Where it is kept
//! once, there is nothing to go back to, and that is said.

#[path = "engine_support/mod.rs"]
mod support;

use std::sync::Arc;
use support::{LR, Setup, weights_hash};
use terrace_aio::IoErrorKind;
use terrace_aio::engine::{EngineConfig as IoConfig, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer, StatsLayer, ThrottleConfig, ThrottleLayer};
use terrace_kernels::DType;
use terrace_optimizer::{LossScaleConfig, StateFormat};
use terrace_tiers::TierError;
use terrace_zero::{Accumulation, Durability, Engine, EngineError, WindowOverrides};

const STEPS: u64 = 6;

/// What backward has no time for goes on in the next forward, from gradients that have room until then.
#[test]
fn an_update_trails_behind_a_slow_disk() {
    let steps = 3;
    let dir = tempfile::tempdir().unwrap();
    for (tied, accumulation) in
        [(false, Accumulation::Vertical), (true, Accumulation::Vertical), (true, Accumulation::Horizontal)]
    {
        let base = Setup { clip: None, accumulation, ..Setup::new(tied) };
        let expected = base.run(steps);
        for (groups, cache_bytes) in [(1, 0), (64, 0), (64, 300_000)] {
            let slow = ThrottleConfig { write_bytes_per_second: 6e6, ..ThrottleConfig::default() };
            let overrides = WindowOverrides {
                gradient_groups: Some(groups),
                chunk_elements: Some(1 << 14),
                ..base.overrides
            };
            let setup = Setup {
                io: Some(Arc::new(ThrottleLayer::new(threads(), slow))),
                placement: terrace_zero::Placement::Disk,
                disks: vec![dir.path().join(format!("{tied}-{accumulation:?}-{groups}-{cache_bytes}"))],
                overrides,
                cache_bytes,
                ..base.clone()
            };
            let mut engine = setup.create();
            let mut trails = Vec::new();
            let mut losses = Vec::new();
            let mut waited_for_room = 0.0;
            for step in 1..=steps {
                for report in setup.train_to(&mut engine, step) {
                    losses.push(report.loss);
                    waited_for_room += report.gradients_stall_seconds;
                }
                trails.push(engine.step() - engine.durable_step().unwrap());
            }
            assert!(groups < 64 || trails.contains(&1), "{groups} groups: {trails:?}");
            // Backward stops where there is memory for the gradients of one group, and goes on where there is for all.
            assert_eq!(waited_for_room > 0.0, groups == 1, "{groups} groups: {waited_for_room} s");
            assert_eq!((losses, weights_hash(&mut engine)), expected, "{groups} groups");
            engine.save().unwrap();
            assert_eq!(engine.durable_step(), Some(steps));
        }
    }
}

fn threads() -> Arc<ThreadsEngine> {
    Arc::new(ThreadsEngine::new(&IoConfig::default()).expect("threads start"))
}

/// How much of the state on disk is somewhere else, too.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Spread {
    /// In so many bytes of host memory.
    Copies(u64),
    /// That of the last groups in a device's own memory, and copies.
    Device(usize, u64),
}

impl Spread {
    /// Whether a step leaves nothing to write.
    fn is_everything(self) -> bool {
        matches!(self, Self::Copies(u64::MAX) | Self::Device(_, u64::MAX) | Self::Device(64, _))
    }
}

fn saved(base: &Setup, disk: std::path::PathBuf, spread: Spread) -> Setup {
    let (cache_bytes, device) = match spread {
        Spread::Copies(bytes) => (bytes, None),
        Spread::Device(groups, bytes) => (bytes, Some(groups)),
    };
    let overrides = WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(2),
        state_groups: device,
        ..base.overrides
    };
    Setup {
        placement: terrace_zero::Placement::Disk,
        disks: vec![disk],
        durability: Durability::Checkpoint,
        cache_bytes,
        overrides,
        discrete: device.is_some(),
        ..base.clone()
    }
}

/// All ways to spread state over disk and memory.
const SPREADS: [Spread; 8] = [
    Spread::Copies(0),
    Spread::Copies(100_000),
    Spread::Copies(500_000),
    Spread::Copies(u64::MAX),
    Spread::Device(1, 0),
    Spread::Device(3, 100_000),
    Spread::Device(2, u64::MAX),
    Spread::Device(64, 0),
];

#[test]
fn a_run_goes_on_from_its_last_save() {
    let dir = tempfile::tempdir().unwrap();
    for (clip, state) in
        [(Some(0.5), StateFormat::Split), (None, StateFormat::Compact), (None, StateFormat::Fp32)]
    {
        let base = Setup { clip, state, ..Setup::new(true) };
        let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
        for spread in SPREADS {
            for save in 0..STEPS {
                let setup =
                    saved(&base, dir.path().join(format!("{clip:?}-{state}-{spread:?}-{save}")), spread);
                let mut engine = setup.create();
                setup.continue_to(&mut engine, save);
                engine.save().unwrap();
                // Once more changes nothing.
                engine.save().unwrap();
                setup.continue_to(&mut engine, STEPS - 1);
                assert_eq!(
                    weights_hash(&mut engine),
                    expected[STEPS as usize - 1],
                    "what is not saved can be looked at"
                );
                drop(engine);
                let mut engine = setup.resume().unwrap();
                assert_eq!((engine.step(), weights_hash(&mut engine)), (save, expected[save as usize]));
                setup.continue_to(&mut engine, STEPS);
                assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{spread:?}");
                engine.save().unwrap();
                drop(engine);
                // What was saved so can be continued with a commit every step, and the other way round.
                let other = Setup { durability: Durability::Step, cache_bytes: 0, ..setup };
                let mut engine = other.resume().unwrap();
                assert_eq!((engine.step(), weights_hash(&mut engine)), (STEPS, expected[STEPS as usize]));
            }
        }
    }
}

#[test]
fn copies_are_written_by_a_save_alone() {
    let dir = tempfile::tempdir().unwrap();
    for spread in SPREADS {
        let stats = Arc::new(StatsLayer::new(threads()));
        let base = Setup { io: Some(Arc::clone(&stats) as _), ..Setup::new(false) };
        let setup = saved(&base, dir.path().join(format!("{spread:?}")), spread);
        let mut engine = setup.create();
        setup.continue_to(&mut engine, 1);
        // Writes of a step that is not committed may still be under way.
        let flushed = |engine: &mut Engine| {
            engine.flush().unwrap();
            while stats.snapshot().in_flight > 0 {
                std::thread::yield_now();
            }
            stats.snapshot()
        };
        let before = flushed(&mut engine);
        setup.continue_to(&mut engine, 2);
        let step = flushed(&mut engine).since(&before);
        let planned = engine.step_work().disk_write_bytes;
        println!("{spread:?}: {} written, {planned} planned", step.write.bytes);
        assert!(step.write.bytes >= planned && step.write.bytes <= planned * 11 / 10);
        assert_eq!(step.sync.ops, 0, "a step is not made durable");
        assert_eq!(spread.is_everything(), planned == 0);
        let before = stats.snapshot();
        engine.save().unwrap();
        let save = stats.snapshot().since(&before);
        assert!(save.write.bytes + step.write.bytes >= 12 * engine.parameters(), "a save writes the rest");
        assert!(save.sync.ops > 0);
    }
}

/// Whatever fails, and when: the engine is at its last save again, and so is the disk.
#[test]
fn a_failure_goes_back_to_the_last_save() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup::new(true);
    let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
    let train = |setup: &Setup, engine: &mut Engine| -> terrace_zero::Result<()> {
        while engine.step() < STEPS {
            engine.train_step(&setup.batches(engine.step()), LR)?;
            if engine.step() == 2 {
                engine.save()?;
            }
        }
        engine.save()
    };
    let mut failed = 0;
    for (action, spread) in
        [Action::Read, Action::Write, Action::Sync].into_iter().flat_map(|a| SPREADS.map(|s| (a, s)))
    {
        for nth in (0..).step_by(13) {
            let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
            let base = Setup { io: Some(Arc::clone(&faults) as _), ..base.clone() };
            let setup = saved(&base, dir.path().join(format!("{action:?}-{spread:?}-{nth}")), spread);
            let mut engine = setup.create();
            faults.fail_nth(action, nth, IoErrorKind::Device);
            if train(&setup, &mut engine).is_ok() {
                break;
            }
            failed += 1;
            let step = engine.step();
            assert!([0, 2].contains(&step), "{action:?} {nth}: {step}");
            assert_eq!(weights_hash(&mut engine), expected[step as usize], "{action:?} {nth}");
            drop(engine);
            let mut engine = setup.resume().unwrap();
            // Half a commit may have been a whole one.
            assert!(
                engine.step() == step || action == Action::Sync,
                "{action:?} {nth}: {} {step}",
                engine.step()
            );
            train(&setup, &mut engine).unwrap();
            assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{action:?} {nth}");
        }
    }
    assert!(failed > 20, "{failed} runs failed");
}

#[test]
fn a_run_that_diverges_says_where_it_goes_back_to() {
    let dir = tempfile::tempdir().unwrap();
    for clip in [Some(0.5), None] {
        for (index, spread) in SPREADS.into_iter().enumerate() {
            let base = Setup { clip, ..Setup::new(true) };
            let setup = saved(&base, dir.path().join(format!("{clip:?}-{index}")), spread);
            let mut engine = setup.create();
            setup.continue_to(&mut engine, 1);
            engine.save().unwrap();
            let saved = weights_hash(&mut engine);
            setup.continue_to(&mut engine, 2);
            engine.train_step(&setup.batches(2), 1e30).unwrap();
            let error =
                engine.train_step(&setup.batches(3), LR).expect_err("such weights give no finite loss");
            assert!(matches!(error, EngineError::Diverged(_)));
            let text = error.to_string();
            assert!(text.contains("step 4 is not finite"), "{text}");
            if clip.is_none() && text.contains("gradient norm") {
                // Found when groups were updated, unless none of them is on disk.
                assert!(text.contains("still that of step 1"), "{text}");
                assert_eq!((engine.step(), weights_hash(&mut engine)), (1, saved));
                continue;
            }
            // Nothing of the step was written: no step since the save is lost.
            assert!(text.contains("still that of step 3"), "{text}");
            assert_eq!(engine.step(), 3);
            let before = weights_hash(&mut engine);
            engine.save().unwrap();
            drop(engine);
            let mut engine = setup.resume().unwrap();
            assert_eq!((engine.step(), weights_hash(&mut engine)), (3, before), "{spread:?}");
        }
    }
}

/// Steps that a loss scale skips change no state, but they count.
#[test]
fn skipped_steps_are_saved() {
    let dir = tempfile::tempdir().unwrap();
    let scale = LossScaleConfig { initial_scale_power: 28, hysteresis: 1, ..LossScaleConfig::default() };
    let base =
        Setup { dtype: DType::F16, state: StateFormat::Fp32, loss_scale: Some(scale), ..Setup::new(true) };
    for spread in SPREADS {
        let setup = saved(&base, dir.path().join(format!("{spread:?}")), spread);
        let mut engine = setup.create();
        let before = weights_hash(&mut engine);
        for step in 0..2 {
            assert!(engine.train_step(&setup.batches(step), LR).unwrap().skipped);
        }
        engine.save().unwrap();
        drop(engine);
        let mut engine = setup.resume().unwrap();
        assert_eq!((engine.step(), engine.updates(), weights_hash(&mut engine)), (2, 0, before));
    }
}

fn kept_once(base: &Setup, disk: std::path::PathBuf, spread: Spread) -> Setup {
    Setup { durability: Durability::None, ..saved(base, disk, spread) }
}

/// The step that the state was last whole at, of a directory that is refused.
fn refused(setup: &Setup) -> u64 {
    let text = match setup.resume() {
        Err(error @ EngineError::Tier(TierError::Changing { .. })) => error.to_string(),
        other => panic!("it is refused: {other:?}"),
    };
    for part in
        [setup.disks[0].to_str().unwrap(), "with Engine::create", "OUTPUT/checkpoint-N", "Step or Checkpoint"]
    {
        assert!(text.contains(part), "{part:?} is in: {text}");
    }
    let Err(EngineError::Tier(TierError::Changing { step, .. })) = setup.try_create() else {
        panic!("nothing is made over it")
    };
    step
}

/// A save makes it whole, the next step does not; and it takes half the space.
#[test]
fn state_that_is_kept_once_goes_on_from_a_save_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    for (clip, state) in [(Some(0.5), StateFormat::Split), (None, StateFormat::Compact)] {
        let base = Setup { clip, state, ..Setup::new(true) };
        let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
        for spread in SPREADS {
            let disk = |name: &str| dir.path().join(format!("{clip:?}-{spread:?}-{name}"));
            let setup = kept_once(&base, disk("once"), spread);
            let mut engine = setup.create();
            assert_eq!(engine.durable_step(), Some(0));
            for save in [2, 3] {
                setup.continue_to(&mut engine, save);
                engine.save().unwrap();
                // Once more changes nothing.
                engine.save().unwrap();
                assert_eq!(engine.durable_step(), Some(save));
                drop(engine);
                engine = setup.resume().unwrap();
                assert_eq!((engine.step(), weights_hash(&mut engine)), (save, expected[save as usize]));
            }
            setup.continue_to(&mut engine, STEPS);
            assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{spread:?}");
            // With all of it in memory nothing is written before a save.
            let is_whole = engine.step_work().disk_write_bytes == 0;
            assert!(is_whole || !spread.is_everything(), "{spread:?}");
            assert_eq!(engine.durable_step(), is_whole.then_some(3), "{spread:?}");
            drop(engine);
            if !is_whole {
                assert_eq!(refused(&setup), 3);
                continue;
            }
            let mut engine = setup.resume().unwrap();
            assert_eq!((engine.step(), weights_hash(&mut engine)), (3, expected[3]));
        }
    }
    let bytes = |setup: &Setup| setup.create().memory_plan().total(terrace_tiers::Tier::Disk);
    let base = Setup::new(false);
    let once = bytes(&kept_once(&base, dir.path().join("half"), Spread::Copies(0)));
    let twice = bytes(&saved(&base, dir.path().join("whole"), Spread::Copies(0)));
    let file = |name: &str| std::fs::metadata(dir.path().join(name).join("state.bin")).unwrap().len();
    assert!(once * 2 <= twice + (2 << 20) && file("half") < file("whole"), "{once} and {twice} bytes");
}

/// One directory, kept once and twice: neither goes on as the other.
#[test]
fn state_is_kept_as_it_was_begun() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup::new(true);
    let once = kept_once(&base, dir.path().join("once"), Spread::Copies(0));
    let twice = saved(&base, dir.path().join("twice"), Spread::Copies(0));
    once.create();
    twice.create();
    for (setup, durability, parts) in [
        (&once, Durability::Step, ["kept once", "Durability::None"]),
        (&once, Durability::Checkpoint, ["kept once", "Durability::None"]),
        (&twice, Durability::None, ["kept twice", "Durability::Step or Checkpoint"]),
    ] {
        let text = Setup { durability, ..setup.clone() }.resume().expect_err("another number").to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
    // Where it is saved from memory, too.
    let host = Setup { placement: terrace_zero::Placement::Host, ..once.clone() };
    let mut engine = host.resume().unwrap();
    host.continue_to(&mut engine, 2);
    assert_eq!(engine.durable_step(), Some(0), "only a save writes");
    engine.save().unwrap();
    drop(engine);
    let mut engine = once.resume().unwrap();
    assert_eq!((engine.step(), weights_hash(&mut engine)), (2, base.run(2).1));
}

/// Whatever fails, and when: it is said that the state is lost, nothing more can be done with the engine, and the directory is
/// refused; or the state is that of the last save, which is said as ever.
#[test]
fn a_failure_loses_state_that_is_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    let base = |clip: Option<f64>| Setup { clip, ..Setup::new(true) };
    let expected = [Some(0.5), None]
        .map(|clip| -> Vec<u64> { (0..=STEPS).map(|steps| base(clip).run(steps).1).collect() });
    let train = |setup: &Setup, engine: &mut Engine| -> terrace_zero::Result<()> {
        while engine.step() < STEPS {
            engine.train_step(&setup.batches(engine.step()), LR)?;
            if engine.step() == 2 {
                engine.save()?;
            }
        }
        engine.save()
    };
    let (mut lost, mut kept) = (0, 0);
    for (clip, action, spread) in [Action::Read, Action::Write, Action::Sync]
        .into_iter()
        .flat_map(|a| [0, 1, 2, 5].map(|s| (Some(0.5).filter(|_| s % 2 == 0), a, SPREADS[s])))
    {
        let (base, expected) = (base(clip), &expected[usize::from(clip.is_none())]);
        for nth in (0..).step_by(if action == Action::Sync { 1 } else { 13 }) {
            let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
            let base = Setup { io: Some(Arc::clone(&faults) as _), ..base.clone() };
            let what = format!("{action:?}-{spread:?}-{nth}");
            let setup = kept_once(&base, dir.path().join(&what), spread);
            let mut engine = setup.create();
            faults.fail_nth(action, nth, IoErrorKind::Device);
            let Err(error) = train(&setup, &mut engine) else { break };
            let text = error.to_string();
            assert!(text.contains("Input/output error") && text.contains(".bin"), "{what}: {text}");
            if let EngineError::Lost { lost: why, .. } = error {
                lost += 1;
                // A commit that failed may count: who opens the state again finds out.
                let advice = match why {
                    TierError::Uncertain { .. } => "open the state again (Engine::resume)",
                    _ => "Durability::Step or Checkpoint",
                };
                assert!(text.contains(advice) && text.contains(&what), "{text}");
                assert_eq!(engine.durable_step(), None);
                for error in [
                    engine.train_step(&setup.batches(0), LR).map(drop).expect_err("no step"),
                    engine.save().expect_err("no save"),
                    engine.evaluate(&setup.batches(0)[0]).map(drop).expect_err("no evaluation"),
                    engine.weights().map(drop).expect_err("no weights"),
                ] {
                    assert!(error.to_string().contains(advice), "{what}: {error}");
                }
                drop(engine);
                // The last sync of a commit may have been done all the same.
                match setup.resume() {
                    Ok(mut engine) => {
                        assert_eq!(action, Action::Sync, "{what}");
                        assert_eq!(weights_hash(&mut engine), expected[engine.step() as usize], "{what}");
                    }
                    Err(_) => assert!([0, 2].contains(&refused(&setup)), "{what}"),
                }
                continue;
            }
            kept += 1;
            let step = engine.step();
            assert!([0, 2].contains(&step), "{what}: {step}");
            drop(engine);
            match setup.resume() {
                Ok(mut engine) => {
                    assert_eq!((engine.step(), weights_hash(&mut engine)), (step, expected[step as usize]));
                    train(&setup, &mut engine).unwrap();
                    assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{what}");
                }
                // A mark that could not be made may be there all the same.
                Err(_) => assert!(refused(&setup) == step && action != Action::Read, "{what}"),
            }
        }
    }
    println!("{lost} runs lost their state, {kept} went back to a save");
    assert!(lost > 20 && kept > 5, "{lost} and {kept}");
}

/// What is not finite is found before anything is written, if the update waits for the norm: the step before is still there and can
/// be saved.
#[test]
fn a_run_that_diverges_can_still_be_saved_where_it_is_kept_once() {
    let dir = tempfile::tempdir().unwrap();
    for clip in [Some(0.5), None] {
        let base = Setup { clip, ..Setup::new(true) };
        for (index, spread) in SPREADS.into_iter().enumerate() {
            let setup = kept_once(&base, dir.path().join(format!("{clip:?}-{index}")), spread);
            let mut engine = setup.create();
            setup.continue_to(&mut engine, 1);
            engine.train_step(&setup.batches(1), 1e30).unwrap();
            let error =
                engine.train_step(&setup.batches(2), LR).expect_err("such weights give no finite loss");
            let text = error.to_string();
            if clip.is_none() && text.contains("gradient norm") {
                // That is found when groups were updated, unless none of them is on disk.
                let is_lost = matches!(error, EngineError::Lost { .. });
                assert!(is_lost != spread.is_everything() && !text.contains("still that of"), "{text}");
                continue;
            }
            assert!(matches!(error, EngineError::Diverged(_)), "{text}");
            assert!(text.contains("step 3 is not finite") && text.contains("still that of step 2"), "{text}");
            let before = weights_hash(&mut engine);
            engine.save().unwrap();
            drop(engine);
            let mut engine = setup.resume().unwrap();
            assert_eq!((engine.step(), weights_hash(&mut engine)), (2, before), "{spread:?}");
        }
    }
}
