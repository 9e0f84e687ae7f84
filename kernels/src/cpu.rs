//! The CPU backend.

use crate::{KernelSet, reference};

/// A kernel set that computes on `threads` threads.
pub fn kernel_set(threads: usize) -> KernelSet {
    assert!(threads > 0, "at least one thread computes");
    reference::kernel_set()
}

/// Bytes of working memory that a set of `threads` threads holds.
pub fn scratch_bytes(threads: usize) -> usize {
    threads * (2 << 20)
}
