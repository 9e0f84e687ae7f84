//! An update that runs before its gradient's norm is known: kept where the norm changes nothing, done again where it does, the
//! same bits either way.

#[path = "engine_support/mod.rs"]
mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use support::{LR, Setup, narrow, weights_hash};
use terrace_aio::engine::{EngineChoice, EngineConfig as IoConfig, OpKind, open_default};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{FileId, IoEngine, IoErrorKind, Request, Ticket, pass_files_on};
use terrace_kernels::DType;
use terrace_models::ModelConfig;
use terrace_optimizer::{LossScaleConfig, StateFormat};
use terrace_zero::{Accumulation, Durability, Placement, StepReport, WindowOverrides};

const STEPS: u64 = 10;
/// About half of the gradients of such training have a norm below it.
const CLIP: f64 = 1.8;

fn base(tied: bool) -> Setup {
    Setup { clip: Some(CLIP), ..Setup::new(tied) }
}

fn on_disk(base: &Setup, dir: &Path, name: &str) -> Setup {
    Setup { placement: Placement::Disk, disks: vec![dir.join(name)], ..base.clone() }
}

/// What must not depend on when an update runs.
fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, bool)> {
    reports.iter().map(|r| (r.loss.to_bits(), r.grad_norm.to_bits(), r.skipped)).collect()
}

/// What is speculated in steps of one process: after two steps that their norms did not change, with success if that is so again.
fn expected(setup: &Setup, reports: &[StepReport]) -> Vec<Option<bool>> {
    let mut before = 0;
    let of_step = |report: &StepReport| {
        let is_same = !report.skipped && setup.clip.is_none_or(|clip| report.grad_norm < clip);
        let found = (before >= 2).then_some(is_same);
        before = if is_same { before + 1 } else { 0 };
        found
    };
    reports.iter().map(of_step).collect()
}

fn variants(base: &Setup, dir: &Path) -> Vec<(&'static str, Setup)> {
    let disk = |name| on_disk(base, dir, name);
    let windows = |overrides: WindowOverrides| WindowOverrides { chunk_elements: Some(1 << 14), ..overrides };
    let with = |name, overrides| (name, Setup { overrides: windows(overrides), ..disk(name) });
    let none = WindowOverrides::default();
    // Of all weights, and of all state of less than a quarter of the parameters.
    let copies = WindowOverrides { copied_weights: Some(5), copied_groups: Some(1), ..none };
    vec![
        ("as planned", disk("as planned")),
        ("small windows", Setup { overrides: narrow(), ..disk("small windows") }),
        ("two threads", Setup { threads: 2, overrides: windows(none), ..disk("two threads") }),
        ("discrete", Setup { discrete: true, overrides: windows(none), ..disk("discrete") }),
        ("discrete, small", Setup { discrete: true, overrides: narrow(), ..disk("discrete, small") }),
        with("gradients on disk", WindowOverrides { gradients_on_disk: Some(true), ..none }),
        (
            "gradients on disk, discrete",
            Setup {
                discrete: true,
                overrides: windows(WindowOverrides {
                    gradients_on_disk: Some(true),
                    update_slots: Some(6),
                    ..none
                }),
                ..disk("gradients on disk, discrete")
            },
        ),
        with("nothing kept", WindowOverrides { kept_blocks: Some(0), ..none }),
        ("horizontal", Setup { accumulation: Accumulation::Horizontal, ..disk("horizontal") }),
        with(
            "copies of some weights",
            WindowOverrides { copied_weights: Some(3), copied_groups: Some(0), ..none },
        ),
        with("copies", copies),
        (
            "copies, discrete",
            Setup {
                discrete: true,
                overrides: WindowOverrides { update_slots: Some(1), ..windows(copies) },
                ..disk("copies, discrete")
            },
        ),
        ("io_uring", Setup { choice: EngineChoice::Auto, ..disk("io_uring") }),
    ]
}

#[test]
fn it_changes_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let scale = LossScaleConfig {
        initial_scale_power: 18,
        hysteresis: 1,
        loss_scale_window: 2,
        ..LossScaleConfig::default()
    };
    let f16 = Setup {
        dtype: DType::F16,
        state: StateFormat::Fp32,
        clip: None,
        loss_scale: Some(scale),
        ..base(true)
    };
    let trainings = [
        ("tied", base(true)),
        ("untied", base(false)),
        ("compact", Setup { state: StateFormat::Compact, ..base(true) }),
        ("f16", f16.clone()),
        ("f16, clipped", Setup { clip: Some(CLIP), ..f16 }),
    ];
    for (training, base) in trainings {
        let mut plain = base.create();
        let reports = base.train_to(&mut plain, STEPS);
        assert!(reports.iter().all(|report| report.speculated.is_none()));
        let (numbers_of_plain, hash) = (numbers(&reports), weights_hash(&mut plain));
        let expected = expected(&base, &reports);
        for wanted in [Some(true), Some(false), None] {
            assert!(expected[1..].contains(&wanted), "{training}: some steps are {wanted:?}: {expected:?}");
        }
        for (name, setup) in variants(&base, &dir.path().join(training)) {
            let mut engine = setup.create();
            let reports = setup.train_to(&mut engine, STEPS);
            assert_eq!(numbers(&reports), numbers_of_plain, "{training}, {name}");
            assert_eq!(weights_hash(&mut engine), hash, "{training}, {name}");
            let speculated: Vec<_> = reports.iter().map(|report| report.speculated).collect();
            assert_eq!(speculated, expected, "{training}, {name}");
        }
    }
}

/// A disk that is late with some requests.
#[derive(Debug)]
struct Late {
    upstream: Arc<dyn IoEngine>,
    delays: Delays,
}

/// What a disk is late with, and how late.
#[derive(Debug)]
enum Delays {
    /// Some of the writes, by their number: longer than a step takes.
    Writes(AtomicU64),
    /// All of the state, and not gradients.
    State,
}

impl Late {
    /// How long a request is held back on a thread of its own; `None` if it is not.
    fn delay(&self, request: &Request) -> Option<Duration> {
        match &self.delays {
            Delays::Writes(_) if request.kind != OpKind::Write => None,
            Delays::Writes(writes) => {
                let number = writes.fetch_add(1, Ordering::Relaxed);
                let is_held = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0;
                Some(Duration::from_millis(if is_held { 40 } else { 0 }))
            }
            Delays::State => {
                let path = self.upstream.path(request.segments[0].file).expect("an open file");
                path.ends_with("state.bin").then(|| Duration::from_millis(8))
            }
        }
    }
}

impl IoEngine for Late {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let Some(delay) = self.delay(&request) else { return self.upstream.submit(request) };
        let (ticket, completer) = Ticket::new();
        let upstream = Arc::clone(&self.upstream);
        std::thread::spawn(move || {
            if !delay.is_zero() {
                std::thread::sleep(delay);
            }
            completer.complete(upstream.submit(request).wait());
        });
        ticket
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.upstream.sync(file)
    }
}

/// No write of an update in vain lands on what is written when it is done again.
#[test]
fn late_writes_of_an_update_in_vain_are_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(true);
    let hash = base.run(STEPS).1;
    let mut in_vain = 0;
    for first in 0..4 {
        let upstream =
            open_default(&IoConfig { choice: EngineChoice::Threads, ..IoConfig::default() }).unwrap();
        let late: Arc<dyn IoEngine> =
            Arc::new(Late { upstream, delays: Delays::Writes(AtomicU64::new(first)) });
        let overrides = WindowOverrides { chunk_elements: Some(1 << 14), ..WindowOverrides::default() };
        let setup = Setup { io: Some(late), overrides, ..on_disk(&base, dir.path(), &first.to_string()) };
        let mut engine = setup.create();
        let reports = setup.train_to(&mut engine, STEPS);
        in_vain += reports.iter().filter(|report| report.speculated == Some(false)).count();
        assert_eq!(weights_hash(&mut engine), hash);
        drop(engine);
        assert_eq!(weights_hash(&mut setup.resume().unwrap()), hash);
    }
    assert!(in_vain > 0, "the updates of the first steps are in vain");
}

/// An update that is far behind backward gets the memory for its gradients, though the last of them are still on their way down when backward
/// ends. What ends in backward ends the update, too.
#[test]
fn an_update_that_is_behind_comes_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut base = Setup { clip: Some(1e6), ..base(false) };
    // Chunks enough to be far behind.
    base.model = ModelConfig {
        layers: 8,
        windows: vec![None; 8],
        chunks: vec![None; 8],
        feed_forward: 256,
        ..base.model
    };
    let (losses, hash) = base.run(STEPS);
    let overrides = WindowOverrides {
        chunk_elements: Some(1 << 14),
        gradients_on_disk: Some(true),
        update_slots: Some(6),
        ..WindowOverrides::default()
    };
    for threads in [1, 2] {
        let io = open_default(&IoConfig { choice: EngineChoice::Threads, ..IoConfig::default() }).unwrap();
        let name = threads.to_string();
        let setup = Setup {
            threads,
            discrete: true,
            io: Some(Arc::new(Late { upstream: io, delays: Delays::State })),
            overrides,
            ..on_disk(&base, dir.path(), &name)
        };
        let mut engine = setup.create();
        let reports = setup.train_to(&mut engine, STEPS);
        assert!(reports.iter().any(|report| report.speculated.is_some()));
        assert_eq!(reports.iter().map(|report| report.loss).collect::<Vec<_>>(), losses);
        assert_eq!(weights_hash(&mut engine), hash);
    }
}

/// Where a step could not be done again, or copies are written beside backward, or nothing runs beside anything.
#[test]
fn some_updates_wait() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(true);
    let hash = base.run(STEPS).1;
    let waits = WindowOverrides { overlap: Some(false), ..WindowOverrides::default() };
    let disk = |name| on_disk(&base, dir.path(), name);
    for (name, setup) in [
        ("saves", Setup { durability: Durability::Checkpoint, ..disk("saves") }),
        ("once", Setup { durability: Durability::None, ..disk("once") }),
        ("no overlap", Setup { overrides: waits, ..disk("no overlap") }),
        ("copies", Setup { cache_bytes: u64::MAX, ..disk("copies") }),
        ("no norm", Setup { clip: None, ..disk("no norm") }),
        ("host", Setup { placement: Placement::Host, ..base.clone() }),
    ] {
        let mut engine = setup.create();
        let reports = setup.train_to(&mut engine, STEPS);
        assert!(reports.iter().all(|report| report.speculated.is_none()), "{name}");
        assert!(weights_hash(&mut engine) == hash || setup.clip.is_none(), "{name}");
    }
}

/// Every step is committed: a process that goes on after any of them gives the same bits.
#[test]
fn it_goes_on_after_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(true);
    let (losses, hash) = base.run(STEPS);
    for life in [1, 3, 5] {
        let setup = Setup { overrides: narrow(), ..on_disk(&base, dir.path(), &life.to_string()) };
        let mut engine = setup.create();
        let mut found = Vec::new();
        let mut kept = 0;
        while engine.step() < STEPS {
            let until = STEPS.min(engine.step() + life);
            let reports = setup.train_to(&mut engine, until);
            assert_eq!(reports[0].speculated, None, "nothing is known of the step before");
            kept += reports.iter().filter(|report| report.speculated == Some(true)).count();
            found.extend(reports.iter().map(|report| report.loss));
            drop(engine);
            engine = setup.resume().unwrap();
            assert_eq!(engine.step(), until);
        }
        assert_eq!(found, losses);
        assert_eq!(weights_hash(&mut engine), hash);
        assert!(kept > 0 || life == 1, "{kept}");
    }
}

/// Whatever fails, beside backward or later: the last committed step is there and goes on with the same bits. A write that fails in
/// an update that is given up changes nothing.
#[test]
fn a_failure_goes_back_to_the_last_commit() {
    let dir = tempfile::tempdir().unwrap();
    let base = base(true);
    let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
    let mut failed = [0; 3];
    for (kind, action) in [Action::Read, Action::Write, Action::Sync].into_iter().enumerate() {
        for nth in (0..).step_by(if action == Action::Sync { 3 } else { 41 }) {
            let io =
                open_default(&IoConfig { choice: EngineChoice::Threads, ..IoConfig::default() }).unwrap();
            let faults = Arc::new(FaultLayer::new(io, FaultConfig::default()));
            let name = format!("{action:?}-{nth}");
            let setup = Setup {
                io: Some(Arc::clone(&faults) as Arc<dyn IoEngine>),
                overrides: narrow(),
                ..on_disk(&base, dir.path(), &name)
            };
            let mut engine = setup.create();
            faults.fail_nth(action, nth, IoErrorKind::Device);
            let mut run = || -> terrace_zero::Result<()> {
                while engine.step() < STEPS {
                    engine.train_step(&setup.batches(engine.step()), LR)?;
                }
                engine.flush()
            };
            let Err(error) = run() else {
                if faults.injected() == 0 {
                    break;
                }
                // It was a write in vain.
                assert_eq!(action, Action::Write, "{name}");
                assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{name}");
                continue;
            };
            let text = error.to_string();
            assert!(text.contains("Input/output error"), "{name}: {text}");
            failed[kind] += 1;
            let step = engine.step();
            drop(engine);
            let mut engine = setup.resume().unwrap();
            assert!(step <= engine.step(), "{name}: step {step} was committed");
            assert_eq!(weights_hash(&mut engine), expected[engine.step() as usize], "{name}");
            setup.train_to(&mut engine, STEPS);
            assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{name}");
        }
    }
    assert!(failed.iter().all(|&count| count > 3), "{failed:?}");
}
