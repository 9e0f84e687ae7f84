//! Full disks and failing drives, real and simulated: the error names what failed, and nothing else is harmed.

#[path = "support/loop_disk.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod loop_disk;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_aio::engine::{EngineConfig, SimConfig, SimEngine, ThreadsEngine, UringEngine, open_default};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer, StatsLayer, TraceLayer};
use terrace_aio::{FileId, IoBuf, IoEngine, IoErrorKind, OpenMode, Request};

fn filled(len: usize, byte: u8) -> IoBuf {
    let mut buf = IoBuf::zeroed(len);
    buf.fill(byte);
    buf
}

fn real_engines() -> Vec<Arc<dyn IoEngine>> {
    let config = EngineConfig { block_bytes: 64 << 10, ..EngineConfig::default() };
    let mut engines: Vec<Arc<dyn IoEngine>> = vec![Arc::new(ThreadsEngine::new(&config).unwrap())];
    match UringEngine::new(&config) {
        Ok(engine) => engines.push(Arc::new(engine)),
        Err(error) => println!("skipped: {error}"),
    }
    engines
}

/// Its thread does not wait for itself.
#[test]
fn an_engine_may_end_where_a_completion_is_delivered() {
    let dir = tempfile::tempdir().unwrap();
    for (index, engine) in real_engines().into_iter().enumerate() {
        let path = dir.path().join(index.to_string());
        let file = engine.open(&path, OpenMode::CreateNew { len: 32 << 20 }).unwrap();
        let ticket = engine.submit(Request::read(file, 0, IoBuf::zeroed(32 << 20)));
        let ticket = ticket.observed(move |_| drop(engine));
        assert_eq!(ticket.wait().unwrap().len(), 32 << 20);
    }
}

/// What an engine that was chosen for another says of that.
#[test]
fn what_is_not_there_is_among_the_facts() {
    let auto = open_default(&EngineConfig::default()).unwrap();
    let fell_back = auto.facts().fallbacks.iter().any(|why| why.starts_with("io_uring: "));
    assert_eq!(auto.name() == "threads", fell_back, "{:?}", auto.facts());
}

/// What must hold on a disk of about 1 MiB mounted at `dir`.
fn check_full_disk(engine: &dyn IoEngine, dir: &Path) {
    let too_large = dir.join("too-large");
    let error = engine.open(&too_large, OpenMode::CreateNew { len: 8 << 20 }).unwrap_err();
    assert_eq!((error.kind, &error.path, error.len), (IoErrorKind::NoSpace, &too_large, 8 << 20), "{error}");
    assert!(!engine.exists(&too_large), "a file that did not fit stays behind");

    let path = dir.join("growing");
    let file = engine.open(&path, OpenMode::CreateNew { len: 0 }).unwrap();
    engine.submit(Request::write(file, 0, filled(256 << 10, 1))).wait().unwrap();
    let error = engine.submit(Request::write(file, 256 << 10, filled(4 << 20, 2))).wait().unwrap_err();
    assert_eq!(error.kind, IoErrorKind::NoSpace, "{error}");
    assert_eq!((error.offset, error.len, &error.path), (256 << 10, 4 << 20, &path), "{error}");
    assert!(error.to_string().contains("free space"), "the message says what to do: {error}");

    let read = engine.submit(Request::read(file, 0, IoBuf::zeroed(256 << 10))).wait().unwrap();
    assert!(read.iter().all(|&byte| byte == 1), "a full disk damaged what was there");
    engine.close(file).unwrap();
    engine.remove(&path).unwrap();
    // The kernel may let go of the removed file a moment after its last request: its space comes back then.
    let deadline = Instant::now() + Duration::from_secs(5);
    let file = loop {
        match engine.open(&path, OpenMode::CreateNew { len: 512 << 10 }) {
            Ok(file) => break file,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    engine.close(file).unwrap();
    engine.remove(&path).unwrap();
}

#[test]
fn a_full_simulated_disk() {
    for seed in 0..20 {
        println!("seed {seed}");
        let engine = SimEngine::new(SimConfig { seed, capacity_bytes: 1 << 20, ..SimConfig::default() });
        check_full_disk(&engine, Path::new("/sim"));
    }
}

#[test]
fn a_full_real_file_system() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if let Err(error) = loop_disk::mount_tmpfs(dir.path(), 1 << 20) {
        println!("skipped: no small file system can be mounted here: {error}");
        return;
    }
    for engine in real_engines() {
        println!("{}", engine.name());
        check_full_disk(&*engine, dir.path());
    }
    loop_disk::unmount(dir.path()).unwrap();
}

#[test]
fn bad_sectors_fail_what_touches_them() {
    for seed in 0..20 {
        let engine = SimEngine::new(SimConfig { seed, block_bytes: 4096, ..SimConfig::default() });
        let file = engine.open("/a".as_ref(), OpenMode::CreateNew { len: 100_000 }).unwrap();
        engine.break_range("/a".as_ref(), 50_000..50_001);
        engine.submit(Request::read(file, 0, IoBuf::zeroed(50_000))).wait().unwrap();
        engine.submit(Request::write(file, 50_001, filled(49_999, 1))).wait().unwrap();
        for request in
            [Request::read(file, 0, IoBuf::zeroed(100_000)), Request::write(file, 49_999, filled(2, 1))]
        {
            let (offset, len) = (request.segments[0].offset, request.segments[0].len as u64);
            let error = engine.submit(request).wait().unwrap_err();
            assert_eq!(
                (error.kind, error.offset, error.len),
                (IoErrorKind::Device, offset, len),
                "seed {seed}: {error}"
            );
        }
    }
}

#[test]
fn injected_errors_over_real_engines() {
    for engine in real_engines() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let faulty = FaultLayer::new(engine, FaultConfig::default());
        let path = dir.path().join("a");
        let file: FileId = faulty.open(&path, OpenMode::CreateNew { len: 8192 }).unwrap();
        for (nth, kind) in [(0, IoErrorKind::Device), (2, IoErrorKind::NoSpace)] {
            faulty.fail_nth(Action::Write, nth, kind);
            faulty.fail_nth(Action::Read, nth, kind);
            for round in 0..4 {
                let write = faulty.submit(Request::write(file, 4096, filled(4096, round))).wait();
                let read = faulty.submit(Request::read(file, 4096, IoBuf::zeroed(4096))).wait();
                if u64::from(round) == nth {
                    let errors = [write.unwrap_err(), read.unwrap_err()];
                    assert!(errors.iter().all(|e| e.kind == kind && e.path == path && e.offset == 4096));
                } else {
                    write.unwrap();
                    assert!(read.unwrap().iter().all(|&byte| byte == round));
                }
            }
        }
        assert_eq!(faulty.injected(), 4);
    }
}

#[test]
fn stats_and_trace_see_successes_and_failures() {
    for engine in real_engines() {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let faulty = Arc::new(FaultLayer::new(engine, FaultConfig::default()));
        let trace = Arc::new(TraceLayer::new(Arc::clone(&faulty) as Arc<dyn IoEngine>, 6));
        let stats = StatsLayer::new(Arc::clone(&trace) as Arc<dyn IoEngine>);
        let file = stats.open(&dir.path().join("a"), OpenMode::CreateNew { len: 100_000 }).unwrap();
        let before = stats.snapshot();
        faulty.fail_nth(Action::Write, 1, IoErrorKind::Device);
        for i in 0..3 {
            let result = stats.submit(Request::write(file, i * 30_000, filled(30_000, 7))).wait();
            assert_eq!(result.is_err(), i == 1);
        }
        for i in 0..5 {
            drop(stats.submit(Request::read(file, i, IoBuf::zeroed(10))).wait().unwrap());
        }
        stats.sync(file).wait().unwrap();
        let now = stats.snapshot().since(&before);
        assert_eq!((now.write.ops, now.write.bytes, now.write.errors), (2, 60_000, 1));
        assert_eq!((now.read.ops, now.read.bytes, now.read.errors), (5, 50, 0));
        assert_eq!((now.sync.ops, now.sync.bytes, now.in_flight), (1, 0, 0));
        assert_eq!(now.read.latencies.iter().sum::<u64>(), 5);
        assert!(now.write.latency_us(0.99).is_some() && now.read.busy > std::time::Duration::ZERO);

        let events = trace.events();
        assert_eq!((events.len(), trace.forgotten()), (6, 3), "the ring forgets the oldest");
        assert_eq!(events.iter().map(|e| e.request).collect::<Vec<_>>(), [3, 4, 5, 6, 7, 8]);
        assert!(events.iter().all(|e| e.ok && e.start <= e.end && e.file == file));
        assert_eq!((events[4].action, events[4].offset, events[4].len), (Action::Read, 4, 10));
        assert_eq!(events[5].action, Action::Sync);
    }
}
