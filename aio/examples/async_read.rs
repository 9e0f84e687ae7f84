//! The disk engine alone, under async code: tickets are futures, and any executor will do.
//!
//! `cargo run -p terrace-aio --example async_read [DIRECTORY]`

use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig, open_default};
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, OpenMode, Request};

const BLOCK: usize = 1 << 20;
const BLOCKS: u64 = 16;

fn main() -> Result<(), IoError> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let path = directory.join(format!("async-read-{}.bin", std::process::id()));
    let engine = open_default(&EngineConfig::default())?;
    let file = engine.open(&path, OpenMode::CreateNew { len: BLOCKS * BLOCK as u64 })?;
    let result = pollster::block_on(write_then_read(&engine, file));
    engine.close(file)?;
    engine.remove(&path)?;
    println!("read {BLOCKS} blocks with {}; their first bytes are {:?}", engine.name(), result?);
    Ok(())
}

/// Writes every block, then reads all of them at once.
async fn write_then_read(engine: &Arc<dyn IoEngine>, file: FileId) -> Result<Vec<u8>, IoError> {
    for block in 0..BLOCKS {
        let mut buf = IoBuf::zeroed(BLOCK);
        buf.fill(block as u8);
        engine.submit(Request::write(file, block * BLOCK as u64, buf)).await?;
    }
    engine.sync(file).await?;
    // Submitting starts the transfer: all reads are in flight before the first one is awaited.
    let read = |block| engine.submit(Request::read(file, block * BLOCK as u64, IoBuf::zeroed(BLOCK)));
    let tickets: Vec<_> = (0..BLOCKS).map(read).collect();
    let mut firsts = Vec::new();
    for ticket in tickets {
        firsts.push(ticket.await?[0]);
    }
    Ok(firsts)
}
