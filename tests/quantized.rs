//! `--weights int8|int4`: the same tokens wherever the weights are, fewer bytes, nearly the same numbers.
#![allow(missing_docs)]

mod support;

use serde_json::Value;
use support::{Bench, Cmd, Shape, cmd};

/// Some five million parameters, nearly all of them in linear layers.
const WIDE: Shape = Shape { vocab: 96, hidden: 256, intermediate: 768, layers: 6, ..Shape::TINY };

fn continued(bench: &Bench, weights: &str) -> Cmd {
    continued_on(bench, weights, "2")
}

fn continued_on(bench: &Bench, weights: &str, threads: &str) -> Cmd {
    cmd(&["generate", "--json", "--threads", threads]).path("--model", &bench.path("model")).args(&[
        "--prompt-ids",
        "5,9,80",
        "--max-new-tokens",
        "24",
        "--ignore-eos",
        "--weights",
        weights,
    ])
}

fn ids(run: &Cmd) -> Value {
    run.ok().json()[0]["ids"].clone()
}

#[test]
fn tokens_do_not_depend_on_the_placement() {
    let bench = Bench::with(&WIDE);
    for weights in ["int8", "int4"] {
        let run = || continued(&bench, weights);
        let expected = ids(&run());
        assert_eq!(expected.as_array().unwrap().len(), 24);
        let disk = bench.path("disk");
        for (name, other) in [
            ("none", run().args(&["--offload", "none"])),
            ("host", run().args(&["--offload", "host"])),
            ("disk", run().args(&["--offload", "disk"]).path("--disk", &disk)),
            ("disk, one slot", run().args(&["--offload", "disk", "--window", "1"]).path("--disk", &disk)),
            ("host, discrete", run().args(&["--offload", "host", "--discrete"])),
            ("disk, discrete", run().args(&["--offload", "disk", "--discrete"]).path("--disk", &disk)),
            ("one thread", continued_on(&bench, weights, "1")),
            ("three threads", continued_on(&bench, weights, "3")),
        ] {
            assert_eq!(ids(&other), expected, "{weights}: {name}");
        }
        assert!(support::files(&disk).is_empty(), "copies of weights are removed");
    }
    assert_ne!(
        ids(&continued(&bench, "int4")),
        ids(&continued(&bench, "bf16")),
        "the canary: the flag has effect"
    );
}

/// The smallest budget that works, as the refusal of a tiny one says, and that it is the truth.
#[test]
fn budgets_count_the_codes() {
    let bench = Bench::with(&WIDE);
    for offload in ["none", "disk"] {
        let mut minima = Vec::new();
        for weights in ["bf16", "int8", "int4"] {
            let run = |budget: &str| {
                continued(&bench, weights)
                    .args(&["--offload", offload, "--host-memory", budget])
                    .path("--disk", &bench.path("disk"))
            };
            let refused = run("10KiB").fails(2, &["--host-memory of 10.0 KiB is too small", "Raise it to"]);
            let minimum =
                refused.stderr.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap();
            let bytes: terrace::config::ByteSize = minimum.parse().unwrap();
            run(&(bytes.0 - bytes.0 / 50).to_string()).fails(2, &["is too small", minimum]);
            run(&minimum.replace(' ', "")).ok();
            minima.push(bytes.0);
        }
        let parameters = WIDE.parameters();
        if offload == "none" {
            // Within 2 %: padding, norms and the embedding, and refusals that round to three digits.
            let saved = |index: usize| (minima[0] - minima[index]) as f64 / parameters as f64;
            assert!((0.88..0.96).contains(&saved(1)), "int8 saves {} bytes a parameter", saved(1));
            assert!((1.36..1.46).contains(&saved(2)), "int4 saves {} bytes a parameter", saved(2));
        }
        assert!(minima[0] > minima[1] && minima[1] > minima[2], "{offload}: {minima:?}");
    }
}

#[test]
fn evaluation_moves_little() {
    let bench = Bench::tiny();
    let nll = |words: &[&str]| {
        let run = cmd(&["eval", "--json", "--threads", "2", "--seq-len", "24"])
            .path("--model", &bench.path("model"))
            .path("--data", &bench.path("data.jsonl"))
            .args(words);
        run.ok().json()["nll"].as_f64().unwrap()
    };
    let plain = nll(&[]);
    for (weights, bound) in [("int8", 5e-3), ("int4", 1e-1)] {
        let found = nll(&["--weights", weights]);
        let change = (found - plain).abs() / plain;
        assert!(change > 0.0 && change <= bound, "{weights}: {found} instead of {plain}");
        let disk = bench.path("disk");
        let streamed = ["--weights", weights, "--offload", "disk", "--disk", disk.to_str().unwrap()];
        assert_eq!(nll(&streamed), found, "{weights}: streamed from disk");
    }
}

#[test]
fn weights_that_cannot_be_quantized() {
    let bench = Bench::tiny();
    let path = bench.path("model").join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let at = 8 + header + tensors[name]["data_offsets"][0].as_u64().unwrap() as usize + 2 * 50;
    bytes[at..at + 2].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    continued(&bench, "int8").fails(1, &[name, "element 50 is inf", "int8", "--weights bf16"]);
}

/// What is named fits, and one more does not; nothing is named that would not do.
#[test]
fn a_refused_generation_says_what_would_do() {
    let bench = Bench::with(&WIDE);
    let prompts = bench.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt_ids\": [1, 2, 3]}\n".repeat(8)).unwrap();
    let run = |words: &[&str]| {
        bench.generate("model").path("--prompts", &prompts).args(&["--ignore-eos"]).args(words)
    };
    let refusal = |words: &[&str]| run(words).fails(2, &["is too small", "Raise it to"]).stderr;
    let advice = |text: &str| text.lines().find(|line| line.contains("Raise it to")).unwrap().to_owned();
    let needs = |text: &str| -> u64 {
        let words = text.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap();
        words.parse::<terrace::config::ByteSize>().unwrap().0
    };
    let nothing = advice(&refusal(&["--host-memory", "1KiB", "--max-new-tokens", "60"]));
    assert!(!nothing.contains(", or "), "nothing fits in a KiB: {nothing}");

    let all = needs(&refusal(&["--host-memory", "1KiB", "--max-new-tokens", "60"]));
    let budget = (all - all / 50).to_string();
    let tight = ["--host-memory", &budget, "--max-new-tokens", "60"];
    let said = advice(&refusal(&tight));
    for part in ["use --offload disk with a --disk PATH", "use --weights int8"] {
        assert!(said.contains(part), "{said}");
    }
    run(&tight).args(&["--weights", "int8"]).ok();
    run(&tight).args(&["--offload", "disk"]).path("--disk", &bench.path("disk")).ok();
    let lowered = |flag: &str| -> usize {
        let value = said.split(&format!("{flag} to ")).nth(1).unwrap_or_else(|| panic!("{flag}: {said}"));
        value.split([',', ' ']).next().unwrap().parse().unwrap()
    };
    let batch = lowered("--batch-size");
    run(&tight).args(&["--batch-size", &batch.to_string()]).ok();
    refusal(&[&tight[..], &["--batch-size", &(batch + 1).to_string()]].concat());
}
