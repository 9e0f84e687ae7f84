//! What a ticket synchronizes with: the standard library's, or loom's where its interleavings are explored.
//!
//! `tests/loom_ticket.rs` is the only user of the second; nothing else of this crate works then. The name of the switch is
//! not `loom`, for under that other crates switch as well.

#[cfg(terrace_loom)]
pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
#[cfg(not(terrace_loom))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
