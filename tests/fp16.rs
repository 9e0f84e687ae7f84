//! Training in fp16 from the command line: the loss scale of the configuration file, skipped steps, and what comes out.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use support::{Bench, Cmd, cmd};

/// A run whose first steps overflow, because the scale begins far above what fp16 holds.
fn overflowing(bench: &Bench, output: &str, more: &str) -> Cmd {
    let file = bench.path(&format!("{output}.json"));
    let fp16 = format!("{{fp16: {{enabled: true, initial_scale_power: 28, hysteresis: 1, {more}}}}}");
    std::fs::write(&file, fp16).unwrap();
    bench.finetune(output).path("--config", &file)
}

#[test]
fn overflowing_steps_are_skipped_and_counted() {
    let bench = Bench::tiny();
    let ended = overflowing(&bench, "out", "loss_scale_window: 4").args(&["--steps", "24"]).ok();
    assert!(!ended.stderr.contains("skipped, because"), "{}", ended.stderr);
    let vain = overflowing(&bench, "vain", "loss_scale_window: 4").args(&["--steps", "2"]).ok();
    assert!(
        vain.stderr.contains("warning: all 2 steps were skipped, because gradients overflowed"),
        "{}",
        vain.stderr
    );
    let lines = bench.metrics("out");
    assert_eq!(bench.steps("out"), (1..=24).collect::<Vec<_>>());
    let is_skipped = |line: &Value| line["skipped"].as_bool().unwrap();
    let mut scale = 2f64.powi(28);
    let mut updates = 0;
    for (line, next) in lines.iter().zip(lines.iter().skip(1).map(Some).chain([None])) {
        assert_eq!(line["loss_scale"], json!(scale), "{line}");
        assert_eq!(line["grad_norm"].is_null(), is_skipped(line), "{line}");
        // The rate of a linear schedule over 24 updates, of which skipped steps are none.
        let lr = 1e-3 * f64::from(24 - updates) / 24.0;
        assert!((line["lr"].as_f64().unwrap() / lr - 1.0).abs() < 1e-12, "{line} instead of {lr}");
        updates += i32::from(!is_skipped(line));
        scale = next.map_or(scale, |next| next["loss_scale"].as_f64().unwrap());
        if let (true, Some(next)) = (is_skipped(line), next) {
            assert_eq!(next["loss_scale"].as_f64().unwrap() * 2.0, line["loss_scale"].as_f64().unwrap());
        }
    }
    let skipped = lines.iter().filter(|line| is_skipped(line)).count();
    assert!(is_skipped(&lines[0]) && (3..20).contains(&skipped), "{skipped} skipped");
    assert!(lines.iter().filter(|line| !is_skipped(line)).all(|line| line["loss"].is_f64()));

    let config = std::fs::read_to_string(bench.path("out").join("config.json")).unwrap();
    assert!(config.contains("\"float16\""), "{config}");
    let weights = String::from_utf8_lossy(&bench.weights("out")).into_owned();
    assert!(weights.contains("\"dtype\":\"F16\"") && !weights.contains("BF16"));
    let ids = ["--prompt-ids", "1,2,3", "--max-new-tokens", "4", "--ignore-eos", "--dtype", "fp16"];
    let generated: Value = serde_json::from_str(&bench.generate("out").args(&ids).ok().stdout).unwrap();
    assert_eq!(generated[0]["ids"].as_array().unwrap().len(), 4);
    let eval = cmd(&["eval", "--json", "--dtype", "fp16", "--seq-len", "24"])
        .path("--model", &bench.path("out"))
        .path("--data", &bench.path("data.jsonl"));
    let nll: Value = serde_json::from_str(&eval.ok().stdout).unwrap();
    let last = lines[23]["loss"].as_f64().unwrap();
    assert!((nll["nll"].as_f64().unwrap() - last).abs() < 1.0, "{nll} after {last}");
}

#[test]
fn a_scale_that_cannot_go_down_ends_the_run() {
    let bench = Bench::tiny();
    let run = || overflowing(&bench, "out", "min_loss_scale: 134217728").args(&["--steps", "4"]);
    let ended = run().fails(1, &["step 2: a gradient overflowed", "at its minimum, 134217728", "use bf16"]);
    assert!(
        ended.stderr.contains("warning: the only step was skipped, because gradients overflowed"),
        "{}",
        ended.stderr
    );
    assert_eq!(bench.steps("out"), [1]);
    let other = overflowing(&bench, "out", "loss_scale_window: 9").args(&["--steps", "4", "--resume"]);
    other.fails(
        2,
        &["fp16 was loss_scale 0, initial_scale_power 28", "loss_scale_window 9", "original settings"],
    );
    run().args(&["--resume"]).fails(1, &["resumed at step 1", "step 2: a gradient overflowed"]);
}

#[test]
fn a_scale_that_never_fits_ends_the_run() {
    let bench = Bench::tiny();
    let run = || overflowing(&bench, "out", "loss_scale: 1e30").args(&["--steps", "300"]);
    let parts =
        ["step 100: a gradient overflowed", "100 steps in a row", "fp16.loss_scale", "state is still that"];
    run().fails(1, &parts);
    assert_eq!(bench.steps("out"), (1..=99).collect::<Vec<_>>());
    run().args(&["--resume"]).fails(1, &["resumed at step 99", "step 199: a gradient overflowed"]);
}

#[test]
fn only_fp16_has_a_loss_scale() {
    let bench = Bench::tiny();
    bench.finetune("bf16").args(&["--steps", "1"]).ok();
    assert!(bench.metrics("bf16")[0].get("loss_scale").is_none());
    bench.finetune("fp16").args(&["--steps", "1", "--dtype", "fp16"]).ok();
    let line = &bench.metrics("fp16")[0];
    assert_eq!((&line["loss_scale"], &line["skipped"]), (&json!(65536.0), &json!(false)));
    let both = bench.finetune("out").args(&["--dtype", "fp16", "--state", "split"]);
    both.fails(2, &["--state split is for --dtype bf16"]);
}
