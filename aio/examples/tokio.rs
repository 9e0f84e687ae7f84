//! Tickets under tokio: each is a future, awaited together, in a race, with a limit, or not at all.
//!
//! `cargo run -p terrace-aio --example tokio [DIRECTORY]`

use std::path::PathBuf;
use std::time::Duration;
use terrace_aio::engine::{EngineConfig, open_default};
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, OpenMode, Request};

const BLOCK: usize = 1 << 20;
const BLOCKS: u64 = 4;

// One thread is enough: the engine moves the bytes, tokio only waits for them.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), IoError> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = directory.join(format!("tokio-{}.bin", std::process::id()));
    let engine = open_default(&EngineConfig::default())?;
    let file = engine.open(&path, OpenMode::CreateNew { len: BLOCKS * BLOCK as u64 })?;
    let result = tour(&*engine, file).await;
    engine.close(file)?;
    engine.remove(&path)?;
    result
}

async fn tour(engine: &dyn IoEngine, file: FileId) -> Result<(), IoError> {
    // A request is on its way from `submit` on; awaiting it only collects the result.
    let write = |block: u64| {
        let mut buf = IoBuf::zeroed(BLOCK);
        buf.fill(block as u8 + 1);
        engine.submit(Request::write(file, block * BLOCK as u64, buf))
    };
    let read = |block: u64| engine.submit(Request::read(file, block * BLOCK as u64, IoBuf::zeroed(BLOCK)));

    // Together: the first error ends it, and the buffers come back with the results.
    let buffers = tokio::try_join!(write(0), write(1), write(2), write(3))?;
    println!("{}: wrote {} bytes at once", engine.name(), buffers.0.len() * 4);

    // In a race: both reads are made, and the one that loses here is collected after.
    let (mut left, mut right) = (read(0), read(3));
    let first = tokio::select! {
        result = &mut left => (result?[0], right.await?[0]),
        result = &mut right => (left.await?[0], result?[0]),
    };
    assert_eq!(first, (1, 4));

    // With a limit: the request goes on when the time is up, and the ticket can be waited for again.
    let mut slow = read(1);
    let buf = match tokio::time::timeout(Duration::from_millis(1), &mut slow).await {
        Ok(result) => result?,
        Err(_) => slow.await?,
    };
    assert!(buf.iter().all(|&byte| byte == 2));

    // Not at all: a dropped ticket cancels nothing. The engine keeps the buffer until the kernel is done with it, and
    // the sync covers writes that have completed, so whoever needs this one durable waits for it.
    drop(write(0));
    engine.sync(file).await?;
    println!("raced, timed and dropped tickets; every byte was where it should be");
    Ok(())
}
