//! A process that may have little: it says what it lacks and what to do.
#![allow(missing_docs)]

mod support;

use std::fs;
use support::Bench;

/// The kernel ends who writes beyond the limit, unless it listens.
#[test]
fn a_file_that_would_be_too_large_is_named() {
    let bench = Bench::tiny();
    let run = bench.finetune("out").args(&["--steps", "2"]).limit(libc::RLIMIT_FSIZE, 100 << 10);
    run.fails(1, &["state.bin", "File too large", "ulimit -f"]);
}

#[test]
fn threads_that_cannot_start_are_an_error() {
    let bench = Bench::tiny();
    bench.finetune("out").alone().fails(2, &["2 threads that compute", "ulimit -u"]);
    bench.generate("model").args(&["--prompt-ids", "1,2"]).alone().fails(2, &["2 threads that compute"]);
    assert!(!bench.path("out").join(".terrace/state.bin").exists());
}

#[test]
fn weights_that_are_no_numbers_are_what_to_look_for() {
    let bench = Bench::tiny();
    let path = bench.path("model").join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 64..].fill(0xFF);
    fs::write(&path, bytes).unwrap();
    let advice = "broken weights in the model's folder";
    bench.finetune("out").args(&["--steps", "2"]).fails(1, &["of step 1 is not finite", advice]);
}
