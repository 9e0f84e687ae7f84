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
    let last = bytes.len() - 2;
    // The first is finite in bf16, and beyond fp16.
    for (name, weight, dtypes) in [
        ("1e5", half::bf16::from_f32(1e5), &["fp16"][..]),
        ("inf", half::bf16::INFINITY, &["bf16", "fp16"]),
        ("nan", half::bf16::NAN, &["bf16", "fp16", "fp32"]),
    ] {
        bytes[last..].copy_from_slice(&weight.to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        for (dtype, offload) in dtypes.iter().flat_map(|dtype| ["disk", "host"].map(|place| (dtype, place))) {
            let output = format!("{name}-{dtype}-{offload}");
            let run = bench.finetune(&output).args(&["--steps", "2", "--dtype", dtype, "--offload", offload]);
            let parts = [
                "loss of step 1 is not finite",
                "state is still that of step 0",
                "broken weights in the model's",
            ];
            run.fails(1, &parts);
            assert!(bench.metrics(&output).is_empty());
        }
    }
}
