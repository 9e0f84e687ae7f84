//! What `--trace` shows of generation and evaluation; `commands.rs` has that of training.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use support::{Bench, Cmd, cmd, no_bar_covers_another};
use terrace::config::ByteSize;

/// Numbers of bars by lane and name. Rows of a lane count as one.
struct Counts(BTreeMap<(String, String), usize>);

impl Counts {
    fn of(bars: &[Value]) -> Self {
        let mut counts = BTreeMap::new();
        for bar in bars {
            let lane = bar["tid"].as_str().unwrap().trim_end_matches(|c: char| c.is_ascii_digit()).trim_end();
            let name = bar["name"].as_str().unwrap();
            *counts.entry((lane.to_owned(), name.to_owned())).or_default() += 1;
        }
        Self(counts)
    }

    fn count(&self, lane: &str, name: &str) -> usize {
        self.0.get(&(lane.to_owned(), name.to_owned())).copied().unwrap_or(0)
    }

    /// Whether every request has a name.
    fn all_named(&self, lane: &str) -> bool {
        self.0.keys().all(|(of, name)| of != lane || !name.ends_with(" bytes"))
    }
}

/// With as little host memory as it can do with: weights stream from disk, and so do keys and values.
fn streaming(bench: &Bench, run: &Cmd) -> Cmd {
    let run = run.clone().args(&["--device", "cpu", "--offload", "disk", "--disk-cache", "none"]);
    let run = run.path("--disk", &bench.path("disk"));
    let refused = run.clone().args(&["--host-memory", "1KiB"]).run().stderr;
    let least = refused.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap();
    // What is said is rounded.
    let least = least.parse::<ByteSize>().unwrap().0 + (8 << 10);
    run.args(&["--host-memory", &least.to_string()])
}

fn generating(bench: &Bench, tokens: &str) -> Cmd {
    let run = bench.generate("model").args(&["--max-new-tokens", tokens, "--ignore-eos", "--kv", "disk"]);
    streaming(bench, &run.path("--prompts", &bench.path("prompts.jsonl")))
}

fn write_prompts(bench: &Bench, prompts: usize) {
    let row = |at: usize| json!({ "prompt_ids": [3, 4, at % 90] }).to_string() + "\n";
    fs::write(bench.path("prompts.jsonl"), (0..prompts).map(row).collect::<String>()).unwrap();
}

fn is_empty(bench: &Bench) -> bool {
    fs::read_dir(bench.path("disk")).unwrap().next().is_none()
}

#[test]
fn generation_shows_weights_keys_and_kernels() {
    let bench = Bench::tiny();
    write_prompts(&bench, 2);
    let run = generating(&bench, "4");
    let traced = run.clone().path("--trace", &bench.path("trace.json")).ok().json();
    for (row, other) in run.ok().json().as_array().unwrap().iter().enumerate() {
        assert_eq!(traced[row]["ids"], other["ids"], "looking changes nothing");
    }
    assert!(is_empty(&bench), "something is left on the disk");
    let bars = bench.bars("trace.json");
    no_bar_covers_another(&bars);
    assert!(bars.iter().filter(|bar| bar["cat"] == "disk").all(|bar| bar["args"]["ok"] == true));
    let counts = Counts::of(&bars);
    for block in ["embed_tokens", "layers.0", "layers.1", "head"] {
        for pass in ["prompt", "token 4", "token 5", "token 6"] {
            assert_eq!(counts.count("compute", &format!("forward {block}, {pass}")), 1, "{block}, {pass}");
        }
        assert_eq!(counts.count("compute waits", &format!("weights of {block}")), 4, "{block}");
    }
    for layer in ["layers.0", "layers.1"] {
        // When they are made; and for every pass, of which the next may have been begun.
        assert!(counts.count("disk write", &format!("write {layer} weights")) > 0, "{layer}");
        let reads = counts.count("disk read", &format!("read {layer} weights"));
        assert!((4..=5).contains(&reads), "{layer}: {reads}");
        // A page a prompt. Prompts find none, and the last that are written are not waited for.
        let keys = format!("{layer} keys and values");
        assert_eq!(counts.count("disk read", &format!("read {keys}")), 2 * 3, "{layer}");
        let writes = counts.count("disk write", &format!("write {keys}"));
        assert!((2 * 3..=2 * 4).contains(&writes), "{layer}: {writes}");
        // Brought and taken back.
        assert_eq!(counts.count("compute waits", &format!("keys and values of {layer}")), 2 * 4);
    }
    assert!(["disk read", "disk write", "disk sync"].iter().all(|lane| counts.all_named(lane)));

    let page = bench.path("trace.html");
    run.path("--trace", &page).ok();
    let page = fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</script>"));
    assert!(page.contains("forward layers.1, token 4") && page.contains("read layers.0 keys and values"));
}

/// The CPU as a device with memory of its own: its kernels and what crosses to it.
#[test]
fn generation_shows_a_device() {
    let bench = Bench::tiny();
    let run =
        bench.generate("model").args(&["--prompt-ids", "3,4,5", "--max-new-tokens", "3", "--ignore-eos"]);
    let run = run.args(&["--device", "cpu", "--discrete", "--offload", "host"]);
    run.path("--trace", &bench.path("trace.json")).ok();
    let bars = bench.bars("trace.json");
    no_bar_covers_another(&bars);
    let counts = Counts::of(&bars);
    for name in ["forward layers.1, prompt", "forward layers.1, token 4", "forward head, token 5"] {
        assert_eq!((counts.count("device", name), counts.count("compute", name)), (1, 1), "{name}");
    }
    assert_eq!(counts.count("compute waits", "logits"), 3);
    assert!(counts.count("uploads", "weights of layers.1") > 0);
    assert_eq!(counts.count("downloads", "inputs and loss"), 3);
}

#[test]
fn evaluation_shows_weights_and_kernels() {
    let bench = Bench::tiny();
    let run = cmd(&["eval", "--json", "--threads", "2", "--seq-len", "24", "--batch-size", "8"]);
    let run = run.path("--model", &bench.path("model")).path("--data", &bench.path("data.jsonl"));
    let run = streaming(&bench, &run);
    let traced = run.clone().path("--trace", &bench.path("trace.json")).ok().json();
    assert_eq!(traced, run.ok().json(), "looking changes nothing");
    assert!(is_empty(&bench), "something is left on the disk");
    let bars = bench.bars("trace.json");
    no_bar_covers_another(&bars);
    let counts = Counts::of(&bars);
    // Forty rows.
    for block in ["embed_tokens", "layers.0", "layers.1", "head"] {
        assert_eq!(counts.count("compute", &format!("forward {block}")), 5, "{block}");
        assert_eq!(counts.count("compute waits", &format!("weights of {block}")), 5, "{block}");
    }
    for layer in ["layers.0", "layers.1"] {
        let reads = counts.count("disk read", &format!("read {layer} weights"));
        assert!((5..=6).contains(&reads), "{layer}: {reads}");
    }
    assert!(counts.all_named("disk read") && counts.all_named("disk write"));
}

/// What there is to see of a pass that failed is why one looks.
#[test]
fn generation_that_fails_has_a_timeline() {
    let bench = Bench::tiny();
    write_prompts(&bench, 1);
    let run = generating(&bench, "4").path("--trace", &bench.path("trace.json"));
    let path = bench.path("model/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 2..].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    run.fails(1, &["is not a number"]);
    assert!(is_empty(&bench), "something is left on the disk");
    let counts = Counts::of(&bench.bars("trace.json"));
    assert_eq!(counts.count("compute", "forward head, prompt"), 1);
    assert_eq!(counts.count("compute", "forward head, token 4"), 0);
}

#[test]
fn generation_that_is_interrupted_has_a_timeline() {
    let bench = Bench::tiny();
    write_prompts(&bench, 5000);
    let run =
        generating(&bench, "60").args(&["--batch-size", "1"]).path("--trace", &bench.path("trace.json"));
    let running = run.spawn();
    let is_there = |entry: fs::DirEntry| entry.path().join("keys-and-values.bin").exists();
    let disk = bench.path("disk");
    let began = || fs::read_dir(&disk).is_ok_and(|dirs| dirs.filter_map(Result::ok).any(is_there));
    assert!(running.wait_until(began));
    running.signal(libc::SIGINT);
    let ended = running.wait();
    assert_eq!(ended.code(), Some(130), "{}", ended.stderr);
    assert!(ended.stderr.ends_with("error: interrupted\n"), "{}", ended.stderr);
    assert!(ended.stdout.is_empty(), "{}", ended.stdout);
    assert!(is_empty(&bench), "something is left on the disk");
    let counts = Counts::of(&bench.bars("trace.json"));
    assert!(counts.count("disk write", "write layers.1 weights") > 0);
}
