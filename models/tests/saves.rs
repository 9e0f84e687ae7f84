//! Saves of state in memory, and of state on disk that they alone commit, go on beside the steps that follow them, and are of the step that they were asked for.

#[path = "engine_support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use support::{LR, Setup, hash_of, weights_hash};
use terrace_aio::engine::{EngineConfig as IoConfig, OpKind, ThreadsEngine};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
use terrace_aio::{FileId, IoEngine, IoErrorKind, Request, Ticket, pass_files_on};
use terrace_optimizer::StateFormat;
use terrace_zero::{Durability, EngineError, Placement, WindowOverrides};

const STEPS: u64 = 6;

fn threads() -> Arc<dyn IoEngine> {
    Arc::new(ThreadsEngine::new(&IoConfig::default()).expect("threads start"))
}

/// A disk whose writes, or syncs, wait while its door is shut.
#[derive(Debug)]
struct Doored {
    upstream: Arc<dyn IoEngine>,
    door: Arc<Door>,
    waiting: Waiting,
}

#[derive(Debug, PartialEq, Eq)]
enum Waiting {
    Writes,
    Syncs,
}

#[derive(Debug, Default)]
struct Door {
    is_shut: Mutex<bool>,
    moved: Condvar,
}

impl Door {
    fn shut(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap() = is_shut;
        self.moved.notify_all();
    }

    fn pass(&self) {
        drop(self.moved.wait_while(self.is_shut.lock().unwrap(), |is_shut| *is_shut).unwrap());
    }
}

impl IoEngine for Doored {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        if request.kind != OpKind::Write || self.waiting != Waiting::Writes {
            return self.upstream.submit(request);
        }
        let (ticket, completer) = Ticket::new();
        let (upstream, door) = (Arc::clone(&self.upstream), Arc::clone(&self.door));
        std::thread::spawn(move || {
            door.pass();
            completer.complete(upstream.submit(request).wait());
        });
        ticket
    }

    fn sync(&self, file: FileId) -> Ticket {
        if self.waiting != Waiting::Syncs {
            return self.upstream.sync(file);
        }
        let (ticket, completer) = Ticket::new();
        let (upstream, door) = (Arc::clone(&self.upstream), Arc::clone(&self.door));
        std::thread::spawn(move || {
            door.pass();
            completer.complete(upstream.sync(file).wait());
        });
        ticket
    }
}

/// State in host memory, or that of the last `on_device` groups in the memory of a device of its own.
fn in_memory(base: &Setup, disk: PathBuf, on_device: Option<usize>) -> Setup {
    let overrides =
        WindowOverrides { chunk_elements: Some(1 << 14), state_groups: on_device, ..base.overrides };
    Setup {
        placement: Placement::Host,
        disks: vec![disk],
        discrete: on_device.is_some(),
        overrides,
        ..base.clone()
    }
}

/// Every way to have state in memory, by name.
fn variants(base: &Setup, dir: &Path) -> Vec<(String, Setup)> {
    let mut found = Vec::new();
    for durability in [Durability::Step, Durability::None] {
        for on_device in [None, Some(0), Some(2), Some(64)] {
            let name = format!("{}-{durability:?}-{on_device:?}", base.state);
            let setup = in_memory(base, dir.join(&name), on_device);
            found.push((name, Setup { durability, ..setup }));
        }
    }
    found
}

/// State on disk that saves alone commit, of which less or more has copies in memory.
fn committed_by_saves(base: &Setup, dir: &Path) -> Vec<(String, Setup)> {
    let durabilities = [Durability::Checkpoint, Durability::None].into_iter();
    let copies = durabilities.flat_map(|durability| [0, 100_000, u64::MAX].map(|bytes| (durability, bytes)));
    let setups = copies.map(|(durability, cache_bytes)| {
        let name = format!("{}-on-disk-{durability:?}-{cache_bytes}", base.state);
        let setup = in_memory(base, dir.join(&name), None);
        (name, Setup { placement: Placement::Disk, durability, cache_bytes, ..setup })
    });
    setups.collect()
}

#[test]
fn steps_go_on_beside_a_save() {
    let dir = tempfile::tempdir().unwrap();
    for (clip, state) in [(Some(0.5), StateFormat::Split), (None, StateFormat::Compact)] {
        let base = Setup { clip, state, ..Setup::new(true) };
        let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
        let on_disk = committed_by_saves(&base, dir.path());
        for (name, setup) in variants(&base, dir.path()).into_iter().chain(on_disk) {
            let door = Arc::new(Door::default());
            let doored = Doored { upstream: threads(), door: Arc::clone(&door), waiting: Waiting::Writes };
            let setup = Setup { io: Some(Arc::new(doored)), ..setup };
            let mut engine = setup.create();
            engine.save().unwrap();
            // What is on the device is copied before a save goes on beside anything, and there are few slots for that.
            let on_host = matches!(setup.overrides.state_groups, None | Some(0));
            setup.continue_to(&mut engine, 2);
            // An update that is still to be done goes with the save of its step, where state is on disk.
            if setup.placement != Placement::Disk {
                engine.flush().unwrap();
            }
            door.shut(on_host);
            let mut first = engine.export_beside(hash_of).unwrap();
            assert!(!on_host || !first.is_finished(), "{name}: it was not written yet");
            let opens = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                door.shut(false);
            });
            setup.continue_to(&mut engine, 4);
            opens.join().unwrap();
            // The second waits for the first, whose weights may still be read.
            let second = engine.export_beside(hash_of).unwrap();
            setup.continue_to(&mut engine, 5);
            assert_eq!(first.wait().expect("it was committed").unwrap(), expected[2], "{name}");
            assert_eq!(second.wait().expect("it was committed").unwrap(), expected[4], "{name}");
            engine.finish_save().unwrap();
            assert_eq!(weights_hash(&mut engine), expected[5], "{name}");
            // Step 5, which is flushed now, overwrote what is kept once.
            let is_on_disk = setup.placement == Placement::Disk && engine.step_work().disk_write_bytes > 0;
            let is_whole = setup.durability != Durability::None || !is_on_disk;
            assert_eq!(engine.durable_step(), is_whole.then_some(4), "{name}");
            drop(engine);
            if !is_whole {
                let refusal = setup.resume().expect_err("it is not whole").to_string();
                assert!(refusal.contains("step 4"), "{refusal}");
                continue;
            }
            let mut engine = setup.resume().unwrap();
            assert_eq!((engine.step(), weights_hash(&mut engine)), (4, expected[4]), "{name}");
            setup.continue_to(&mut engine, STEPS);
            assert_eq!(weights_hash(&mut engine), expected[STEPS as usize], "{name}");
        }
    }
}

/// It fails alone: the steps go on, who waits for the export hears that there is none, and saving may be tried again.
#[test]
fn a_save_that_fails_beside_steps_stops_none() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup::new(true);
    let expected: Vec<u64> = (0..=STEPS).map(|steps| base.run(steps).1).collect();
    for (name, setup) in variants(&base, dir.path()) {
        for action in [Action::Write, Action::Sync] {
            // The first save of all makes the place for it.
            for (nth, is_first) in (0..).step_by(5).flat_map(|nth| [(nth, true), (nth, false)]) {
                let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
                let disks = vec![dir.path().join(format!("{name}-{action:?}-{nth}-{is_first}"))];
                let setup = Setup { io: Some(Arc::clone(&faults) as _), disks, ..setup.clone() };
                let mut engine = setup.create();
                setup.continue_to(&mut engine, 1);
                if !is_first {
                    engine.save().unwrap();
                }
                setup.continue_to(&mut engine, 2);
                faults.fail_nth(action, nth, IoErrorKind::Device);
                let begun = engine.export_beside(hash_of);
                setup.continue_to(&mut engine, 4);
                // What is copied from the device fails at once.
                let failed = match begun {
                    Err(_) => true,
                    Ok(export) => match export.wait() {
                        None => {
                            let error = engine.finish_save().expect_err("there is a reason");
                            assert!(matches!(error, EngineError::Tier(_)), "{name}: {error}");
                            true
                        }
                        Some(hash) => {
                            assert_eq!(hash.unwrap(), expected[2], "{name}");
                            engine.finish_save().unwrap();
                            false
                        }
                    },
                };
                assert_eq!(weights_hash(&mut engine), expected[4], "{name} {action:?} {nth}");
                if setup.durability == Durability::Step || !failed {
                    let durable = if failed { (!is_first).then_some(1) } else { Some(2) };
                    assert_eq!(engine.durable_step(), durable, "{name} {action:?} {nth}");
                }
                let mut again = engine.save();
                if again.is_err() && !failed {
                    // This one met what was to fail.
                    again = engine.save();
                }
                // Whether the mark of what is kept once is there can be unknown.
                if setup.durability == Durability::Step || again.is_ok() {
                    again.unwrap_or_else(|e| panic!("{name} {action:?} {nth}: {e}"));
                    drop(engine);
                    let mut engine = setup.resume().unwrap();
                    assert_eq!((engine.step(), weights_hash(&mut engine)), (4, expected[4]), "{name}");
                }
                if !failed && !is_first {
                    assert!(nth > 0 || action == Action::Sync, "{name}: there were requests to fail");
                    break;
                }
            }
        }
    }
}

/// Beside a save of state on disk that failed nothing older is taken for the weights, and whoever needs them hears why there are none.
#[test]
fn a_commit_that_fails_beside_steps_gives_no_older_weights() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup { clip: None, ..Setup::new(true) };
    let batch = &base.batches(0)[0];
    let mut plain = base.create();
    base.continue_to(&mut plain, 2);
    let (loss, hash) = (plain.evaluate(batch).unwrap().loss_sum, weights_hash(&mut plain));
    let is_told = |error: &EngineError| error.to_string().contains("Input/output error");
    for (name, setup) in committed_by_saves(&base, dir.path()) {
        let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
        let setup = Setup { io: Some(Arc::clone(&faults) as _), ..setup };
        let mut engine = setup.create();
        setup.continue_to(&mut engine, 2);
        engine.flush().unwrap();
        faults.fail_nth(Action::Sync, 0, IoErrorKind::Device);
        let export = engine.export_beside(hash_of).unwrap();
        assert!(export.wait().is_none(), "{name}: its sync failed");
        match engine.evaluate(batch) {
            Ok(evaluation) => assert_eq!(evaluation.loss_sum.to_bits(), loss.to_bits(), "{name}"),
            Err(error) => assert!(is_told(&error), "{name}: {error}"),
        }
        match engine.weights().and_then(|mut weights| hash_of(&mut weights)) {
            Ok(found) => assert_eq!(found, hash, "{name}"),
            Err(error) => assert!(is_told(&error), "{name}: {error}"),
        }
        let error = engine.train_step(&setup.batches(2), LR).expect_err("its save failed");
        assert!(is_told(&error), "{name}: {error}");
        if matches!(error, EngineError::Lost { .. }) {
            assert_eq!(setup.durability, Durability::None, "{name}: {error}");
            continue;
        }
        assert_eq!(engine.step(), 0, "{name}");
        setup.continue_to(&mut engine, 2);
        assert_eq!(weights_hash(&mut engine), hash, "{name}");
    }
}

/// A step is given up with the update that it left to the next one, whose gradients are gone.
#[test]
fn a_commit_that_fails_beside_a_step_takes_its_update_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup { clip: Some(0.5), ..Setup::new(true) };
    let expected = base.run(4).1;
    for (name, setup) in committed_by_saves(&base, dir.path()) {
        if setup.durability == Durability::None {
            continue;
        }
        let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
        let door = Arc::new(Door::default());
        let (upstream, waiting) = (Arc::clone(&faults) as _, Waiting::Syncs);
        let doored = Doored { upstream, door: Arc::clone(&door), waiting };
        let setup = Setup { io: Some(Arc::new(doored)), ..setup };
        let mut engine = setup.create();
        setup.continue_to(&mut engine, 2);
        engine.save().unwrap();
        setup.continue_to(&mut engine, 3);
        engine.flush().unwrap();
        faults.fail_nth(Action::Sync, 0, IoErrorKind::Device);
        door.shut(true);
        let export = engine.export_beside(hash_of).unwrap();
        engine.train_step(&setup.batches(3), LR).unwrap();
        door.shut(false);
        engine.finish_save().expect_err("its sync failed");
        assert!(export.wait().is_none(), "{name}");
        assert_eq!(engine.step(), 2, "{name}");
        setup.continue_to(&mut engine, 4);
        assert_eq!(weights_hash(&mut engine), expected, "{name}");
    }
}

/// Two exports at once stay within the one buffer that the plan has for them.
#[test]
fn the_second_export_reads_when_the_first_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup { disks: vec![dir.path().to_owned()], placement: Placement::Disk, ..Setup::new(true) };
    let mut engine = base.create();
    base.continue_to(&mut engine, 1);
    engine.flush().unwrap();
    let expected = weights_hash(&mut engine);
    let (reads, is_reading) = channel();
    let (go_on, may_go_on) = channel();
    let first = engine.export_beside(move |weights| {
        let mut byte_pair = [0; 2];
        let param = weights.params()[0].clone();
        weights.read(&param, 0, &mut byte_pair)?;
        reads.send(()).unwrap();
        may_go_on.recv().unwrap();
        hash_of(weights)
    });
    let first = first.unwrap();
    is_reading.recv().unwrap();
    let mut second = engine.export_beside(hash_of).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!second.is_finished(), "it has a buffer of its own");
    go_on.send(()).unwrap();
    assert_eq!(first.wait().expect("it was committed").unwrap(), expected);
    assert_eq!(second.wait().expect("it was committed").unwrap(), expected);
}

/// A save at the beginning that fails is not taken for one.
#[test]
fn the_first_save_can_fail() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup::new(true);
    for nth in 0..8 {
        let faults = Arc::new(FaultLayer::new(threads(), FaultConfig::default()));
        let setup = in_memory(&base, dir.path().join(nth.to_string()), None);
        let setup = Setup { io: Some(Arc::clone(&faults) as _), ..setup };
        let mut engine = setup.create();
        assert_eq!(engine.durable_step(), None);
        faults.fail_nth(Action::Write, nth, IoErrorKind::Device);
        engine.save().expect_err("a write fails");
        assert_eq!(engine.durable_step(), None, "{nth}");
        engine.save().unwrap();
        assert_eq!(engine.durable_step(), Some(0));
        drop(engine);
        assert_eq!(setup.resume().unwrap().step(), 0);
    }
}

/// Nothing is saved twice, and an engine that goes away lets a save come to its end.
#[test]
fn a_save_under_way_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let base = Setup::new(true);
    let setup = in_memory(&base, dir.path().join("state"), None);
    let mut engine = setup.create();
    setup.continue_to(&mut engine, 3);
    let export = engine.export_beside(hash_of).unwrap();
    engine.save().unwrap();
    assert_eq!(engine.durable_step(), Some(3));
    export.wait().expect("it was committed").unwrap();
    setup.continue_to(&mut engine, 4);
    let export = engine.export_beside(hash_of).unwrap();
    drop(engine);
    export.wait().expect("it was committed").unwrap();
    assert_eq!(setup.resume().unwrap().step(), 4);
    let nowhere = Setup { disks: Vec::new(), ..setup };
    let error = nowhere.create().export_beside(hash_of).expect_err("there is no place").to_string();
    assert!(error.contains("EngineConfig::disks"), "{error}");
}
