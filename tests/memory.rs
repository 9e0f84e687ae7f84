//! Memory: what a run is allowed is what it takes. Each case is a process of its own, measured from outside.
#![allow(missing_docs)]

mod support;

use serde_json::json;
use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use support::{Bench, Cmd, Ended, Shape, cmd, write_rows};

/// What a process has resident beside its plan: the binary's own pages (some 6 MiB of them are touched), stacks, rings, rows
/// on their way through the tokens file, allocator slack. [`a_tiny_run_takes_little`] measures 10 MiB, most of the rest is
/// for other allocators and kernels.
const UNPLANNED_BYTES: u64 = 24 << 20;
const MIB: u64 = 1 << 20;

/// One case at a time: what this process has resident when it starts another counts as that one's.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// 14.8 million parameters in many small layers: 178 MB of training state, 30 MB of bf16 weights in five files.
const LARGE: Shape = Shape {
    vocab: 96,
    hidden: 256,
    intermediate: 704,
    layers: 20,
    positions: 64,
    seed: 3,
    shard_bytes: 7_000_000,
};

#[test]
fn a_tiny_run_takes_little() {
    let _alone = alone();
    let bench = Bench::tiny();
    let ended = bench.finetune("out").args(&["--steps", "2", "--host-memory", "16MiB"]).ok();
    println!("a tiny run: {:.1} MiB", ended.peak_bytes as f64 / MIB as f64);
    // Far more than the tiny model needs is planned, so what is seen here is nearly all unplanned.
    assert!(ended.peak_bytes <= UNPLANNED_BYTES, "{} bytes without a model", ended.peak_bytes);
}

/// Shapes are enough to say that a batch does not fit.
#[test]
fn a_batch_that_is_far_too_large_is_refused_within_little() {
    let _alone = alone();
    let bench = Bench::tiny();
    let run = |batch: &str| {
        let run = bench.finetune("out").without("--batch-size").args(&["--batch-size", batch]);
        run.args(&["--steps", "2", "--host-memory", "16MiB"])
    };
    let few = |ended: &Ended| {
        println!("{:.1} MiB", ended.peak_bytes as f64 / MIB as f64);
        assert!(ended.peak_bytes <= 8 * UNPLANNED_BYTES, "{} bytes", ended.peak_bytes);
    };
    few(&run("2000000").fails(2, &["--host-memory of 16.0 MiB is too small", "lower --batch-size"]));
    run("2").ok();
    few(&run("2000000").args(&["--resume"]).fails(2, &["--host-memory of 16.0 MiB is too small"]));
}

/// What is planned beyond what there is would be given, and the process killed when it is used. Here the kernel's word for it is another's.
#[test]
fn more_than_there_is_is_said_before() {
    let _alone = alone();
    let bench = Bench::tiny();
    let told = bench.path("meminfo");
    fs::write(&told, "MemTotal: 20000 kB\nMemAvailable: 100 kB\n").unwrap();
    let says = |command: Cmd, warning: Option<&str>| {
        let command = command.args(&["--host-memory", "64MiB"]);
        let script = "mount --bind \"$0\" /proc/meminfo || exit 99; exec \"$@\"";
        let mut whole = Command::new("unshare");
        whole.args(["-m", "sh", "-c", script]).arg(&told).arg(env!("CARGO_BIN_EXE_terrace"));
        let Ok(ended) = whole.args(command.words()).output() else { return };
        let stderr = String::from_utf8(ended.stderr).unwrap();
        if ended.status.code() == Some(99) || stderr.starts_with("unshare: ") {
            println!("skipped: this process may not mount files");
            return;
        }
        assert!(ended.status.success(), "{stderr}");
        let said: Vec<&str> =
            stderr.lines().filter(|line| line.contains(" of host memory are planned")).collect();
        match warning {
            None => assert!(said.is_empty(), "{stderr}"),
            Some(warning) => {
                let [line] = said[..] else { panic!("it is said once in: {stderr}") };
                let is_whole =
                    line.starts_with(warning) && line.ends_with("may be killed: lower --host-memory");
                assert!(is_whole && line.contains(" 100 KiB are available of the "), "{line}");
            }
        }
    };
    let run = || bench.finetune("out").args(&["--steps", "2"]);
    says(run(), Some("warning: "));
    says(run().args(&["--resume"]), Some("warning: "));
    says(bench.generate("model").args(&["--prompt-ids", "1,2", "--max-new-tokens", "2"]), Some("warning: "));
    let plan =
        || cmd(&["plan", "--offload", "host", "--seq-len", "24"]).path("--model", &bench.path("model"));
    says(plan().args(&["--device", "cpu"]), Some("warning: for a run on this machine: "));
    says(plan().args(&["--gpu-memory", "1GiB"]), None);
}

/// A text without line breaks is read and tokenised in pieces, too.
#[test]
fn a_text_of_one_line_takes_little() {
    let _alone = alone();
    let bench = Bench::tiny();
    let words = ["the", "cat", "sat", "on", "a", "mat", "?"];
    let vocab: serde_json::Map<_, _> = (0..).zip(words).map(|(id, word)| (word.into(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    });
    fs::write(bench.path("model/tokenizer.json"), tokenizer.to_string()).unwrap();
    let mut file = fs::File::create(bench.path("line.txt")).unwrap();
    let part = "the cat sat on a mat ".repeat(50_000);
    (0..16).for_each(|_| file.write_all(part.as_bytes()).unwrap());
    let run = bench.finetune("out").without("--data").path("--data", &bench.path("line.txt"));
    let ended = run.args(&["--steps", "1", "--host-memory", "16MiB"]).ok();
    println!("{:.1} MiB", ended.peak_bytes as f64 / MIB as f64);
    assert!(ended.stderr.contains("4.80M tokens"), "{}", ended.stderr);
    assert!(ended.peak_bytes <= 500 * MIB, "{} bytes", ended.peak_bytes);
}

#[test]
fn training_state_eight_times_the_budget() {
    let _alone = alone();
    let bench = large();
    let budget = 20 * MIB;
    assert!(LARGE.parameters() * 12 >= 8 * budget);
    assert!(LARGE.parameters() * 2 > budget, "the checkpoint alone exceeds the budget");
    let command = finetune(&bench, "out", budget).args(&["--max-shard-size", "7MB"]);
    let ended = command.ok();
    within(&ended, budget);
    assert_eq!(bench.steps("out"), [1, 2, 3]);
    assert!(bench.path("out").join("model-00005-of-00005.safetensors").exists());

    // A resumed run that only exports.
    let resumed = command.args(&["--resume"]).ok();
    within(&resumed, budget);

    // Too little for the chunks of the state: only what a resumed run may change is offered, and what it is told to raise the budget to does.
    let with = |budget: &str| {
        let run = finetune(&bench, "out", MIB).args(&["--max-shard-size", "7MB", "--resume"]);
        run.without("--host-memory").args(&["--host-memory", budget])
    };
    let refused = with("1MiB").fails(2, &["needs at least", "Raise it to"]).stderr;
    let of_another_run = ["--state", "--seq-len", "--batch-size", "--grad-accum"];
    assert!(!of_another_run.iter().any(|flag| refused.contains(flag)), "{refused}");
    let mut words = refused.split("Raise it to ").nth(1).unwrap().split_whitespace();
    let least = [words.next(), words.next()].map(Option::unwrap).concat();
    with(least.trim_end_matches([',', '.'])).ok();

    // The numbers are those of a run with everything in memory.
    finetune(&bench, "resident", 1 << 30).args(&["--offload", "none", "--max-shard-size", "7MB"]).ok();
    let shards = |output: &str| {
        (1..=5)
            .map(|n| bench.path(output).join(format!("model-0000{n}-of-00005.safetensors")))
            .collect::<Vec<_>>()
    };
    for (a, b) in shards("out").iter().zip(shards("resident")) {
        assert!(hash(a) == hash(&b), "{} differs", b.display());
    }
}

/// What blocks keep from forward to backward is planned like all else, and changes no number.
///
/// The processor is told to be so slow that keeping pays, whatever the disk of this machine.
#[test]
fn kept_activations_within_the_budget() {
    let _alone = alone();
    let bench = large();
    let machine = json!({ "cpu": "slow", "threads": 2, "card": null, "date": "", "terrace": "" });
    let training = json!([{ "dtype": "bf16", "operations_per_second": 1e8 }]);
    let calibration = json!({ "version": 1, "machine": machine, "quick": false, "training": training });
    let profile = bench.path("profile.json");
    fs::write(&profile, json!({ "version": 1, "calibration": calibration }).to_string()).unwrap();
    let train = |output: &str, budget: u64, how: &str| {
        finetune(&bench, output, budget).path("--profile", &profile).args(&[
            "--activations",
            how,
            "--max-shard-size",
            "1GB",
            "--batch-size",
            "8",
            "--grad-accum",
            "2",
        ])
    };
    let kept = |ended: &Ended| {
        let words = " of 20 blocks keep their activations for backward";
        let line = ended.stderr.lines().find(|line| line.contains(words)).expect("it is said").to_owned();
        line.split(' ').next().and_then(|n| n.parse::<u64>().ok()).expect("a number")
    };
    let weights = |output: &str| hash(&bench.path(output).join("model.safetensors"));
    let (small, medium, ample) = (32 * MIB, 48 * MIB, 96 * MIB);

    let recomputed = train("recomputed", ample, "recompute").ok();
    assert_eq!(kept(&recomputed), 0);
    let expected = weights("recomputed");
    for (name, budget, how) in [("medium", medium, "auto"), ("ample", ample, "keep")] {
        let ended = train(name, budget, how).ok();
        within(&ended, budget);
        println!("{how} within {} MiB: {} blocks", budget / MIB, kept(&ended));
        match how {
            "keep" => assert_eq!(kept(&ended), 20),
            _ => assert!((1..20).contains(&kept(&ended)), "{} blocks", kept(&ended)),
        }
        assert!(weights(name) == expected, "{how} within {budget} bytes gives other weights");
    }
    let words = ["--host-memory of 32.0 MiB is too small", "20 of 20 blocks keep", "--activations auto"];
    train("small", small, "keep").fails(2, &words);
}

#[test]
fn weights_larger_than_the_budget_stream_through_generation() {
    let _alone = alone();
    let bench = large();
    let budget = 12 * MIB;
    assert!(LARGE.parameters() * 2 > 2 * budget);
    let generate = |words: &[&str]| {
        bench
            .generate("model")
            .args(&["--prompt-ids", "5,17,80,2", "--max-new-tokens", "8", "--ignore-eos"])
            .args(words)
    };
    let disk = bench.path("disk");
    let resident = generate(&[]).ok();
    let small = ["--host-memory", &budget.to_string()];
    let streamed = generate(&small).args(&["--offload", "disk"]).path("--disk", &disk).ok();
    within(&streamed, budget);
    let ids = |ended: &Ended| ended.json()[0]["ids"].clone();
    assert_eq!(ids(&streamed).as_array().unwrap().len(), 8);
    assert_eq!(ids(&streamed), ids(&resident));
    // Without a word about tiers, weights that do not fit stream as well.
    assert_eq!(ids(&generate(&small).path("--disk", &disk).ok()), ids(&resident));
    assert!(fs::read_dir(&disk).unwrap().next().is_none(), "copies of the weights are left on the disk");
    generate(&small).fails(2, &["--host-memory of 12.0 MiB is too small", "--offload disk"]);
}

/// Of a cache on disk three blocks' are in memory, of twenty.
#[test]
fn a_cache_larger_than_the_budget_is_on_disk() {
    let _alone = alone();
    let bench = large();
    let budget = 22 * MIB;
    let prompts: String = (0..64).map(|row| format!("{{\"prompt_ids\": [5, {row}, 80, 2]}}\n")).collect();
    fs::write(bench.path("prompts.jsonl"), prompts).unwrap();
    let disk = bench.path("disk");
    let generate = |budget: u64| {
        let run = cmd(&["generate", "--json"]).path("--model", &bench.path("model"));
        let run = run.path("--prompts", &bench.path("prompts.jsonl")).path("--disk", &disk);
        let run =
            run.args(&["--max-new-tokens", "60", "--ignore-eos", "--threads", "2", "--offload", "disk"]);
        run.args(&["--disk-cache", "none", "--host-memory", &budget.to_string()])
    };
    let resident = generate(1 << 30).ok();
    assert!(resident.peak_bytes > budget + UNPLANNED_BYTES, "{} bytes", resident.peak_bytes);
    let ended = generate(budget).args(&["--kv", "disk"]).ok();
    within(&ended, budget);
    let ids = |ended: &Ended| -> Vec<_> {
        ended.json().as_array().unwrap().iter().map(|row| row["ids"].clone()).collect()
    };
    assert_eq!((ids(&ended).len(), ids(&ended)), (64, ids(&resident)));
    assert!(fs::read_dir(&disk).unwrap().next().is_none(), "something is left on the disk");
    generate(budget).fails(2, &["--host-memory of 22.0 MiB is too small", "use --kv disk"]);
}

/// A large vocabulary makes large logits, and a token is picked from all of them.
#[test]
fn logits_are_in_the_budget() {
    let _alone = alone();
    let bench = Bench::empty();
    let shape = Shape { vocab: 131_072, hidden: 16, intermediate: 32, layers: 2, ..LARGE };
    shape.write(&bench.path("model"));
    let prompts: String = (0..64).map(|row| format!("{{\"prompt_ids\": [5, {row}]}}\n")).collect();
    fs::write(bench.path("prompts.jsonl"), prompts).unwrap();
    let generate = |budget: u64| {
        let run = cmd(&["generate", "--json"]).path("--model", &bench.path("model"));
        let run = run.path("--prompts", &bench.path("prompts.jsonl"));
        let run =
            run.args(&["--max-new-tokens", "3", "--ignore-eos", "--threads", "2", "--temperature", "1"]);
        run.args(&["--host-memory", &budget.to_string()])
    };
    let logits = 64 * u64::from(u32::try_from(shape.vocab).unwrap()) * 4;
    generate(2 * logits).fails(2, &["is too small", "logits", "Raise it to"]);
    let budget = 5 * logits;
    let ended = generate(budget).ok();
    within(&ended, budget);
    println!("{} MiB of logits at once: {} MiB", logits / MIB, ended.peak_bytes / MIB);
}

/// Loading quantizes piece by piece: at no time is the model there in bf16.
#[test]
fn quantized_weights_are_all_that_is_in_memory() {
    let _alone = alone();
    let bench = large();
    let budget = 21 * MIB;
    assert!(LARGE.parameters() * 2 > budget + 6 * MIB, "in bf16 the model would not fit");
    let ended = bench
        .generate("model")
        .args(&["--prompt-ids", "5,17,80,2", "--max-new-tokens", "8", "--ignore-eos", "--offload", "host"])
        .args(&["--weights", "int4", "--host-memory", &budget.to_string()])
        .ok();
    within(&ended, budget);
    let in_bf16 = LARGE.parameters() * 2;
    assert!(ended.peak_bytes < in_bf16, "{} bytes resident, the bf16 model has {in_bf16}", ended.peak_bytes);
}

#[test]
fn evaluation_within_the_budget() {
    let _alone = alone();
    let bench = large();
    let budget = 12 * MIB;
    let eval = |words: &[&str]| {
        cmd(&["eval", "--json", "--threads", "2", "--seq-len", "16"])
            .path("--model", &bench.path("model"))
            .path("--data", &bench.path("data.jsonl"))
            .args(words)
    };
    let resident = eval(&[]).ok();
    let streamed =
        eval(&["--host-memory", "12MiB", "--offload", "disk"]).path("--disk", &bench.path("disk")).ok();
    within(&streamed, budget);
    assert_eq!(resident.json(), streamed.json());
}

/// Piece by piece: see [`alone`].
fn hash(path: &Path) -> u64 {
    let mut file = fs::File::open(path).unwrap();
    let (mut hasher, mut piece) = (DefaultHasher::new(), [0; 1 << 16]);
    loop {
        let read = file.read(&mut piece).unwrap();
        if read == 0 {
            return hasher.finish();
        }
        hasher.write(&piece[..read]);
    }
}

fn large() -> Bench {
    let bench = Bench::empty();
    LARGE.write(&bench.path("model"));
    assert!(bench.path("model").join("model-00005-of-00005.safetensors").exists());
    write_rows(&bench.path("data.jsonl"), 6, 16, LARGE.vocab, 5);
    bench
}

fn finetune(bench: &Bench, output: &str, budget: u64) -> Cmd {
    cmd(&["finetune", "--threads", "2", "--seq-len", "16", "--steps", "3"])
        .path("--model", &bench.path("model"))
        .path("--data", &bench.path("data.jsonl"))
        .path("--output", &bench.path(output))
        .args(&["--host-memory", &budget.to_string()])
}

fn within(ended: &Ended, budget: u64) {
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    println!("peak {:.1} MiB of {:.1} + {:.1}", mib(ended.peak_bytes), mib(budget), mib(UNPLANNED_BYTES));
    assert!(
        ended.peak_bytes <= budget + UNPLANNED_BYTES,
        "{:.1} MiB resident with a budget of {:.1} MiB\n{}",
        mib(ended.peak_bytes),
        mib(budget),
        ended.stderr
    );
}
