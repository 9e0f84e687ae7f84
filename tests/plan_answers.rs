//! What `terrace plan` answers to unusual questions: batches and machines of any size, described in whole or in part.
#![allow(missing_docs)]

mod support;

use serde_json::Value;
use std::time::{Duration, Instant};
use support::{Bench, Cmd, cmd};

/// A plan that finds no profile of this machine.
fn plan(bench: &Bench) -> Cmd {
    let plan = cmd(&["plan", "--threads", "2", "--device", "cpu"]).path("--model", &bench.path("model"));
    plan.environment("XDG_CACHE_HOME", bench.path("cache").to_str().unwrap())
}

/// What `finetune` refuses, in the same words.
#[test]
fn batches_that_cannot_be_are_refused_as_by_the_run() {
    let bench = Bench::tiny();
    for (flags, parts) in [
        (
            &["--seq-len", "4294967296"][..],
            &["--seq-len 4294967296 is longer than", "max_position_embeddings"][..],
        ),
        (&["--seq-len", "100000"], &["--seq-len 100000 is longer than", "max_position_embeddings"]),
        (
            &["--seq-len", "24", "--batch-size", "100000000"],
            &["more tokens than a micro-batch can have", "--grad-accum"],
        ),
        (&["--batch-size", "4294967296"], &["--batch-size 4294967296 is beyond reason"]),
        (&["--grad-accum", "4294967296"], &["--grad-accum 4294967296 is beyond reason"]),
    ] {
        plan(&bench).args(flags).fails(2, parts);
        let run = bench.finetune("out").args(&["--device", "cpu"]);
        // The bench's own lengths would be given twice.
        if flags[0] == "--grad-accum" {
            run.args(flags).fails(2, parts);
        }
    }
    plan(&bench)
        .args(&["--generate", "--seq-len", "24", "--max-new-tokens", "4", "--batch-size", "100000000"])
        .fails(2, &["more tokens than a micro-batch can have", "lower --batch-size"]);
    // A row of the table that has too many is refused alone, and takes no memory.
    let document = plan(&bench)
        .args(&[
            "--seq-len",
            "32",
            "--batch-size",
            "20000000",
            "--host-memory",
            "1000TiB",
            "--offload",
            "host",
            "--json",
        ])
        .ok()
        .json();
    let refused = document["choices"].as_array().unwrap().iter().filter(|row| row.get("refused").is_some());
    assert!(refused.clone().count() > 0, "{document}");
    for row in refused {
        assert!(
            row["refused"].as_str().unwrap().contains("more tokens than a micro-batch can have"),
            "{row}"
        );
    }
}

/// Micro-batches that do the same are planned once, however many they are.
#[test]
fn a_million_micro_batches_are_planned_in_no_time() {
    let bench = Bench::tiny();
    let began = Instant::now();
    let run = |count: &str, more: &[&str]| {
        let flags = ["--seq-len", "24", "--grad-accum", count, "--host-memory", "1000TiB", "--json"];
        plan(&bench).args(&flags).args(more).ok().json()["plan"].clone()
    };
    let of = |plan: &Value, name: &str| plan[name].as_u64().unwrap();
    for clip in ["0", "1"] {
        let [some, many] = ["1000", "1000000"].map(|count| run(count, &["--clip", clip]));
        assert_eq!(1000 * of(&some, "tokens"), of(&many, "tokens"));
        assert!(1000 * of(&some, "operations") <= of(&many, "operations"), "no block computes again: {many}");
        let ratio = of(&many, "host_bytes") as f64 / of(&some, "host_bytes") as f64;
        assert!((100.0..1000.0).contains(&ratio), "{ratio}");
    }
    run("10000", &["--gpu-memory", "1000TiB", "--device", "auto"]);
    run("5000", &["--accumulation", "horizontal"]);
    let too_many = ["--seq-len", "24", "--accumulation", "horizontal", "--grad-accum", "1000000"];
    plan(&bench).args(&too_many).fails(2, &["--grad-accum 1000000", "lower --grad-accum to 32768"]);
    let too_many = ["--params", "40b", "--grad-accum", "4000000000"];
    cmd(&["plan"]).args(&too_many).fails(2, &["operations than can be counted", "lower --grad-accum"]);
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
}
