//! Sequential reads and writes, the engines side by side. `AIO_BENCH_DIR` chooses the disk; the default is the build
//! directory's.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig, ThreadsEngine, UringEngine};
use terrace_aio::{FileId, IoBuf, IoEngine, OpKind, OpenMode, Request, Ticket};

/// One request: 32 operations of 1 MiB, the default depth.
const REQUEST_BYTES: usize = 32 << 20;

fn engines() -> Vec<Arc<dyn IoEngine>> {
    let config = EngineConfig::default();
    let mut engines: Vec<Arc<dyn IoEngine>> = Vec::new();
    match UringEngine::new(&config) {
        Ok(engine) => engines.push(Arc::new(engine)),
        Err(error) => eprintln!("without io_uring: {error}"),
    }
    engines.push(Arc::new(ThreadsEngine::new(&config).expect("a bench may start threads")));
    engines
}

fn sequential(c: &mut Criterion) {
    let dir = std::env::var_os("AIO_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let temp = tempfile::tempdir_in(dir).expect("the directory to measure in can be written");
    for (name, kind) in [("write", OpKind::Write), ("read", OpKind::Read)] {
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(REQUEST_BYTES as u64)).sample_size(10);
        for engine in engines() {
            let path = temp.path().join(format!("{name}-{}", engine.name()));
            let mode = OpenMode::CreateNew { len: REQUEST_BYTES as u64 };
            let file = engine.open(&path, mode).expect("there is room for one request");
            let mut buf = Some(IoBuf::zeroed(REQUEST_BYTES));
            group.bench_function(engine.name(), |bencher| {
                bencher.iter(|| {
                    let ticket = submit(&*engine, kind, file, buf.take().expect("put back below"));
                    buf = Some(black_box(ticket.wait().expect("the disk works")));
                });
            });
            engine.close(file).expect("the file is open");
            engine.remove(&path).expect("the file is ours");
        }
        group.finish();
    }
}

fn submit(engine: &dyn IoEngine, kind: OpKind, file: FileId, buf: IoBuf) -> Ticket {
    engine.submit(match kind {
        OpKind::Read => Request::read(file, 0, buf),
        OpKind::Write => Request::write(file, 0, buf),
    })
}

criterion_group!(benches, sequential);
criterion_main!(benches);
