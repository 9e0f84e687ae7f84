//! Direct disk I/O on owned buffers.
//!
//! This crate moves bytes between files and memory and knows nothing else: no dtype, no tensor, no tier.
//! An [`IoBuf`] is owned by the operation while it is in flight, so safe code can neither free nor change
//! memory that the kernel is writing to. A [`Ticket`] is the claim on one request: wait for it, await it as a
//! `Future`, or drop it, in which case the buffer is parked until the completion arrives.
//!
//! *Where bytes go* is a [`Request`] of [`Segment`]s; *how they move* is an [`IoEngine`].
//!
//! ```
//! use terrace_aio::engine::{EngineConfig, open_default};
//! use terrace_aio::{IoBuf, OpenMode, Request};
//!
//! let engine = open_default(&EngineConfig::default())?;
//! let path = std::env::temp_dir().join(format!("terrace-aio-{}", std::process::id()));
//! let file = engine.open(&path, OpenMode::CreateNew { len: 1 << 20 })?;
//! let mut buf = IoBuf::zeroed(1 << 20);
//! buf.fill(7);
//! let buf = engine.submit(Request::write(file, 0, buf)).wait()?;
//! let read = engine.submit(Request::read(file, 0, buf)); // in flight; compute meanwhile
//! assert!(read.wait()?.iter().all(|&byte| byte == 7));
//! engine.close(file)?;
//! engine.remove(&path)?;
//! # Ok::<(), terrace_aio::IoError>(())
//! ```

#[doc(hidden)]
pub mod bench;
mod buf;
mod completions;
pub mod engine;
mod error;
#[doc(hidden)]
pub mod fallocate;
#[doc(hidden)]
pub mod fuzzing;
pub mod layer;
pub mod memory;
pub mod profile;
mod random;
#[cfg(feature = "signals")]
#[doc(hidden)]
pub mod signals;
mod sync;
mod ticket;
mod urgency;
mod virtual_clock;

pub use buf::{BUF_ALIGN, BufHome, IoBuf};
pub use completions::CompletionQueue;
pub use engine::{
    EngineFacts, FileFacts, FileId, IoEngine, OpKind, OpenMode, Registration, Request, Segment,
    create_dir_durably, sync_dir,
};
pub use error::{IoError, IoErrorKind};
pub use ticket::{Completer, Drive, Ticket};
pub use urgency::{URGENT_IN_A_ROW_MAX, Urgency};
pub use virtual_clock::VirtualClock;
