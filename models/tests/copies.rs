//! Copies of state on disk in host memory: they save reads and nothing else, whatever happens to a step.

#[path = "engine_support/mod.rs"]
mod support;

use std::sync::Arc;
use support::{Setup, narrow, weights_hash};
use terrace_aio::IoErrorKind;
use terrace_aio::engine::{EngineConfig as IoConfig, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer, StatsLayer, ThrottleConfig, ThrottleLayer};
use terrace_tiers::Tier;
use terrace_zero::{Engine, Placement};

const STEPS: u64 = 4;

fn threads() -> Arc<ThreadsEngine> {
    Arc::new(ThreadsEngine::new(&IoConfig::default()).expect("threads start"))
}

fn train(setup: &Setup, engine: &mut Engine) -> terrace_zero::Result<()> {
    while engine.step() < STEPS {
        engine.train_step(&setup.batches(engine.step()), support::LR)?;
    }
    engine.flush()
}

#[test]
fn what_is_copied_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut reads = Vec::new();
    for cache_bytes in [0, 50_000, 200_000, 300_000, 700_000, u64::MAX] {
        for clip in [Some(0.5), None] {
            let stats = Arc::new(StatsLayer::new(threads()));
            let disks = vec![dir.path().join(format!("{cache_bytes}-{clip:?}"))];
            let io = Some(Arc::clone(&stats) as _);
            let setup = Setup { cache_bytes, clip, io, overrides: narrow(), ..Setup::on_disk(false, disks) };
            let mut engine = setup.create();
            let plan = engine.plan_summary();
            setup.continue_to(&mut engine, 1);
            engine.flush().unwrap();
            let before = stats.snapshot();
            setup.continue_to(&mut engine, 2);
            engine.flush().unwrap();
            let moved = stats.snapshot().since(&before);
            let work = engine.step_work();
            let (read, written) = (moved.read.bytes, moved.write.bytes);
            println!("{cache_bytes}: read {read}, written {written}; {plan}");
            // An update that is not deferred to a forward, but flushed, hands no weights over.
            let handed_over = if clip.is_some() { work.parameters * setup.dtype.size() as u64 } else { 0 };
            let most = work.disk_read_bytes + handed_over;
            // Extents are whole pages.
            assert!(read >= work.disk_read_bytes, "{cache_bytes}: {read} of {}", work.disk_read_bytes);
            assert!(read <= most * 11 / 10, "{cache_bytes}: {read} of {most}");
            if cache_bytes == 0 {
                assert!(read >= most, "{read} of {most}");
            }
            assert!(written >= work.disk_write_bytes, "copies save no write");
            assert_eq!(plan.contains("copies"), cache_bytes > 0, "{plan}");
            reads.push(read);
        }
    }
    assert!(reads.windows(3).all(|r| r[0] > r[2]), "more copies, fewer reads: {reads:?}");
    assert_eq!(reads[reads.len() - 2..], [0, 0], "all of the state is in memory");
}

/// The disk is so slow that fetch always waits for the update: what that has written is not read again before backward.
#[test]
fn new_weights_are_handed_over() {
    const MEASURED: u64 = 3;
    let dir = tempfile::tempdir().unwrap();
    let slow = ThrottleConfig {
        read_bytes_per_second: 2e7,
        write_bytes_per_second: 2e7,
        ..ThrottleConfig::default()
    };
    let stats = Arc::new(StatsLayer::new(Arc::new(ThrottleLayer::new(threads(), slow))));
    let io = Some(Arc::clone(&stats) as _);
    let setup = Setup { io, overrides: narrow(), ..Setup::on_disk(false, vec![dir.path().join("disk")]) };
    let mut engine = setup.create();
    setup.continue_to(&mut engine, 2);
    let before = stats.snapshot();
    setup.continue_to(&mut engine, 2 + MEASURED);
    let read = stats.snapshot().since(&before).read.bytes / MEASURED;
    let work = engine.step_work();
    let weights = work.parameters * setup.dtype.size() as u64;
    // What is read ahead for the next step may still be on its way.
    let apart = read.abs_diff(work.disk_read_bytes);
    assert!(apart < weights / 2, "{read} of {}, {weights} of weights", work.disk_read_bytes);
    engine.flush().unwrap();
    assert_eq!(weights_hash(&mut engine), Setup::new(false).run(2 + MEASURED).1);
}

#[test]
fn copies_take_what_the_budget_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup { overrides: narrow(), ..Setup::on_disk(true, vec![dir.path().join("disk")]) };
    let without = base.create().memory_plan().total(Tier::Host);
    std::fs::remove_dir_all(dir.path().join("disk")).unwrap();
    let mut totals = Vec::new();
    for more in [0, 10_000, 100_000, 1_000_000, 10_000_000] {
        let setup = Setup { cache_bytes: u64::MAX, host_budget: without + more, ..base.clone() };
        let engine = setup.create();
        let total = engine.memory_plan().total(Tier::Host);
        assert!(total <= without + more, "{more}: {}", engine.memory_plan().breakdown(Tier::Host));
        totals.push(total);
        drop(engine);
        std::fs::remove_dir_all(dir.path().join("disk")).unwrap();
    }
    assert!(totals.is_sorted() && totals[0] == without && totals[4] > totals[2], "{totals:?}");
    assert!(totals[4] < without + 2_000_000, "there is no more state than that: {totals:?}");
}

#[test]
fn a_step_that_fails_leaves_the_copies_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup { overrides: narrow(), ..Setup::new(true) };
    let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
    let mut failed = 0;
    for clip in [base.clip, None] {
        for nth in (0..).step_by(7) {
            let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
            let disks = vec![dir.path().join(format!("{clip:?}-{nth}"))];
            let io = Some(Arc::clone(&faults) as _);
            let base = Setup { clip, ..base.clone() };
            let setup = Setup { cache_bytes: 500_000, io, placement: Placement::Disk, disks, ..base.clone() };
            let mut engine = setup.create();
            faults.fail_nth(Action::Write, nth, IoErrorKind::Device);
            if train(&setup, &mut engine).is_ok() {
                assert_eq!(faults.injected(), 0);
                break;
            }
            // The same engine goes on from what is committed: its copies were read again.
            let step = engine.step();
            let known = if clip.is_some() { expected[step as usize] } else { base.run(step).1 };
            assert_eq!(weights_hash(&mut engine), known, "write {nth} failed after step {step}");
            if let Err(error) = train(&setup, &mut engine) {
                // Nobody knows which step is live after half a commit.
                assert!(error.to_string().contains("Engine::resume"), "write {nth}: {error}");
                drop(engine);
                engine = setup.resume().unwrap();
            }
            setup.continue_to(&mut engine, STEPS);
            assert_eq!(weights_hash(&mut engine), base.run(STEPS).1, "write {nth}");
            drop(engine);
            assert_eq!(weights_hash(&mut setup.resume().unwrap()), base.run(STEPS).1, "write {nth}: on disk");
            failed += 1;
        }
    }
    assert!(failed > 10, "{failed} runs failed");
}
