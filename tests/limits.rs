//! A process that may have little: it says what it lacks and what to do.
#![allow(missing_docs)]

mod support;

use support::Bench;

/// The kernel ends who writes beyond the limit, unless it listens.
#[test]
fn a_file_that_would_be_too_large_is_named() {
    let bench = Bench::tiny();
    let run = bench.finetune("out").args(&["--steps", "2"]).limit(libc::RLIMIT_FSIZE, 100 << 10);
    run.fails(1, &["state.bin", "File too large", "ulimit -f"]);
}
