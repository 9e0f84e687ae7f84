//! Direct disk I/O on owned buffers.
//!
//! This crate moves bytes between files and memory and knows nothing else: no dtype, no tensor, no tier.
//! An [`IoBuf`] is owned by the operation while it is in flight, so safe code can neither free nor change
//! memory that the kernel is writing to. A [`Ticket`] is the claim on one request: wait for it, await it as a
//! `Future`, or drop it, in which case the buffer is parked until the completion arrives.
//!
//! *Where bytes go* is a [`Request`] of [`Segment`]s; *how they move* is an [`IoEngine`].

mod buf;
pub mod engine;
mod error;
pub mod layer;
mod random;
mod ticket;

pub use buf::{BUF_ALIGN, BufHome, IoBuf};
pub use engine::{FileId, IoEngine, OpKind, OpenMode, Request, Segment};
pub use error::{IoError, IoErrorKind};
pub use ticket::{Completer, Drive, Ticket};
