//! What scripts rely on: the documents that commands print, the files they write, and that placement changes no number.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use support::{Bench, Cmd, Ended, Shape, cmd, no_bar_covers_another, write_rows};
use terrace_models::ModelConfig;

/// The CPU as a device with memory of its own: what crosses to it and back is on the timeline, by block.
#[test]
fn a_timeline_shows_the_link() {
    let bench = Bench::tiny();
    let (trace, plan) = (bench.path("trace.json"), bench.path("plan.json"));
    let run = |output: &str| bench.finetune(output).args(&["--steps", "3", "--discrete"]);
    run("roomy").path("--trace", &trace).path("--save-plan", &plan).ok();
    let roomy = bench.bars("trace.json");
    let mut planned: Value = serde_json::from_str(&fs::read_to_string(&plan).unwrap()).unwrap();
    assert_eq!(planned["windows"]["device_groups"], 4, "all of them");
    planned["windows"]["device_groups"] = 0.into();
    fs::write(&plan, planned.to_string()).unwrap();
    run("out").path("--trace", &trace).path("--plan", &plan).ok();
    let events = bench.bars("trace.json");
    let copies_of = |events: &[Value], lane: &str, name: &str| {
        let tid = |e: &Value| {
            e["tid"].as_str().unwrap() == lane || e["tid"].as_str().unwrap().starts_with(&format!("{lane} "))
        };
        events.iter().filter(|e| tid(e) && e["cat"] == "link" && e["name"] == name).count()
    };
    let copies = |lane: &str, name: &str| copies_of(&events, lane, name);
    // Three steps, forward and backward; the tied embedding is used by the head, too.
    let weights = ["embed_tokens", "layers.0", "layers.1", "head"]
        .map(|block| copies("uploads", &format!("weights of {block}")));
    assert_eq!(weights, [3 * 3, 3 * 2, 3 * 2, 3]);
    // Those that stay are sent once a step.
    for block in ["embed_tokens", "layers.0", "layers.1", "head"] {
        assert_eq!(copies_of(&roomy, "uploads", &format!("weights of {block}")), 3, "{block}");
    }
    let gradients = ["embed_tokens", "layers.0", "head"]
        .map(|block| copies("downloads", &format!("gradient of {block}")));
    assert_eq!(gradients, [3 * 2, 3, 3]);
    assert_eq!(copies("uploads", "gradient of embed_tokens"), 3, "the head's part goes up again");
    assert!(copies("downloads", "signal of layers.0") >= 3, "checkpoints come down");
    assert!(copies("uploads", "inputs and loss") > 0 && copies("downloads", "inputs and loss") >= 3);
    let lanes = |lane: &str| {
        let mut bars: Vec<(f64, f64)> = events
            .iter()
            .filter(|e| e["tid"] == lane)
            .map(|e| (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
            .collect();
        bars.sort_by(|a, b| a.0.total_cmp(&b.0));
        bars
    };
    let computed = |what: &str| events.iter().filter(|e| e["tid"] == "device" && e["name"] == what).count();
    assert_eq!(["forward layers.0", "backward layers.0", "backward head"].map(computed), [3; 3]);
    for lane in ["uploads", "downloads", "device"] {
        let bars = lanes(lane);
        assert!(bars.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0 + 0.01), "{lane}: {bars:?}");
    }
}

/// While nothing is clipped, updates do not wait for the norm; the model is the same.
#[test]
fn steps_that_are_not_clipped_are_updated_beside_backward() {
    let bench = Bench::tiny();
    let run = |output: &str, clip: f64, flags: &[&str]| {
        bench.finetune(output).args(&["--steps", "8", "--clip", &clip.to_string()]).args(flags).ok();
        bench.metrics(output)
    };
    let norm = |line: &Value| line["grad_norm"].as_f64().unwrap();
    let mut norms: Vec<f64> = run("probe", 1e6, &["--offload", "none"]).iter().map(norm).collect();
    norms.sort_by(f64::total_cmp);
    for (name, clip) in [("some", (norms[6] + norms[7]) / 2.0), ("none", 1e6)] {
        let lines = run(name, clip, &["--disk-cache", "none"]);
        let mut before = 0;
        for line in &lines {
            let is_same = norm(line) < clip;
            let expected = (before >= 2).then_some(is_same);
            before = if is_same { before + 1 } else { 0 };
            assert_eq!(line.get("speculated").map(|value| value.as_bool().unwrap()), expected, "{line}");
        }
        assert!(lines.iter().any(|line| line["speculated"] == true), "{clip}");
        let waiting = run("waiting", clip, &["--disk-cache", "none", "--no-overlap"]);
        assert!(waiting.iter().all(|line| line.get("speculated").is_none()));
        assert_eq!(bench.weights(name), bench.weights("waiting"));
        fs::remove_dir_all(bench.path("waiting")).unwrap();
    }
}

#[test]
fn a_finetune_document_and_its_metrics() {
    let bench = Bench::tiny();
    let trace = bench.path("trace.json");
    let run = bench
        .finetune("out")
        .args(&["--disk-cache", "none"])
        .args(&["--steps", "4", "--save-every", "2", "--json"])
        .path("--trace", &trace);
    let document = run.ok().json();
    let keys: Vec<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys.join(" "),
        "output steps parameters loss tokens_per_second seconds host_peak_bytes state"
    );
    assert_eq!(document["steps"], 4);
    assert_eq!(document["parameters"], Shape::TINY.parameters());
    assert_eq!(document["output"], bench.path("out").to_str().unwrap());
    let state = document["state"][0].as_str().unwrap();
    assert!(Path::new(state).join("manifest.bin").exists());

    let metrics = bench.metrics("out");
    assert_eq!(bench.steps("out"), [1, 2, 3, 4]);
    assert_eq!(metrics[3]["loss"], document["loss"]);
    speaks_of_the_mean(&document, &metrics);
    let contract = "step loss grad_norm lr tokens step_seconds tokens_per_second floor_seconds floor_fraction bound_by \
        disk_read_bytes disk_write_bytes disk_written_bytes upload_bytes download_bytes host_peak_bytes device_peak_bytes stall_seconds";
    let mut read = 0;
    for line in &metrics {
        let keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys.join(" "), contract);
        assert!(line["loss"].as_f64().unwrap() > 0.0 && line["grad_norm"].as_f64().unwrap() > 0.0, "{line}");
        assert_eq!(line["tokens"], 48);
        assert!(
            line["step_seconds"].as_f64().unwrap() > 0.0 && line["tokens_per_second"].as_f64().unwrap() > 0.0
        );
        // Every step's update moves the whole state, during the step that follows.
        if line["step"] != 1 {
            assert!(line["disk_write_bytes"].as_u64().unwrap() >= 12 * Shape::TINY.parameters(), "{line}");
            read += line["disk_read_bytes"].as_u64().unwrap();
        }
        assert!(line["host_peak_bytes"].as_u64().unwrap() > 1 << 20, "{line}");
        for part in ["weights", "activations", "gradient_buffers", "optimizer_state", "commit"] {
            assert!(line["stall_seconds"][part].as_f64().unwrap() >= 0.0, "{line}");
        }
    }

    // Some of an update's state is read ahead, in the step before.
    assert!(read >= 3 * 12 * Shape::TINY.parameters(), "{read}");

    // Without --disk-cache none there is room for copies of all state.
    bench.finetune("copies").args(&["--steps", "3"]).ok();
    for line in &bench.metrics("copies") {
        assert_eq!(line["disk_read_bytes"], 0, "{line}");
    }
    let events = bench.bars("trace.json");
    for lane in ["disk read", "disk write", "disk sync"] {
        assert!(events.iter().any(|e| e["tid"] == lane), "no {lane} among {} events", events.len());
    }
    assert!(events.iter().all(|e| e["dur"].as_f64().unwrap() >= 0.0));
    assert!(events.iter().filter(|e| e["cat"] == "disk").all(|e| e["args"]["ok"] == true));
    no_bar_covers_another(&events);
    let count = |lane: &str, what: &str| {
        let named = |e: &&Value| e["tid"] == lane && e["name"].as_str().unwrap().starts_with(what);
        events.iter().filter(named).count()
    };
    // Two layers between embedding and head, whose forward is part of its backward; four steps.
    assert_eq!((count("compute", "forward "), count("compute", "backward ")), (4 * 3, 4 * 4));
    assert_eq!(count("commit", "step "), 4);
    assert!(count("optimizer", "layers.") >= 4 * 2 && count("compute waits", "weights of ") > 0);

    assert_eq!(count("uploads", "") + count("downloads", ""), 0, "the CPU has no link");

    // What the disk carries: an update reads all kinds of every group but the weights that the rest of a split master has, and
    // writes all of them; once at the start and once a step.
    let disk = |words: &str| {
        events
            .iter()
            .filter(|e| e["cat"] == "disk" && e["name"] == words)
            .map(|e| e["args"]["bytes"].as_u64().unwrap())
            .sum::<u64>()
    };
    let moments = disk("write layers.1 first moments");
    assert!(moments > 0 && moments % 5 == 0 && disk("write layers.1 second moments") == moments);
    assert_eq!(disk("read layers.1 first moments"), moments / 5 * 4);
    assert_eq!(disk("write layers.1 weights"), moments / 2, "two bytes instead of four");
    assert!(disk("read layers.1 weights") >= 4 * disk("write layers.1 weights") / 5);
    assert!(events.iter().any(|e| e["tid"] == "disk sync" && e["name"] == "sync state.bin"));
    let unnamed = |e: &&Value| e["cat"] == "disk" && e["name"].as_str().unwrap().ends_with(" bytes");
    assert_eq!(events.iter().filter(unnamed).count(), 0);

    let ids = |model: &str| {
        bench.generate(model).args(&["--prompt-ids", "3,4", "--max-new-tokens", "4"]).ok().json()[0]["ids"]
            .clone()
    };
    let saved = ["out/checkpoint-2", "out/checkpoint-4"];
    assert!(saved.iter().all(|model| !ids(model).as_array().unwrap().is_empty()));
    assert!(
        bench.weights(saved[1]) == bench.weights("out") && bench.weights(saved[0]) != bench.weights("out")
    );
}

/// A run in two processes writes what one process does, and says so.
#[test]
fn what_was_written_to_disk_is_counted_over_all_processes() {
    let bench = Bench::tiny();
    let run = |output: &str, steps: &str| {
        bench.finetune(output).args(&["--disk-cache", "none", "--scheduler", "constant", "--steps", steps])
    };
    let written =
        |output: &str| bench.metrics(output).last().unwrap()["disk_written_bytes"].as_f64().unwrap();
    let ended = run("whole", "6").ok();
    assert!(ended.stderr.contains("written to disk so far: "), "{}", ended.stderr);
    // The state when it is made, and with every step.
    assert!(written("whole") >= 7.0 * 12.0 * Shape::TINY.parameters() as f64, "{}", written("whole"));
    run("parts", "4").ok();
    let half = written("parts");
    assert!(half < 0.8 * written("whole"), "{half}");
    run("parts", "6").args(&["--resume"]).ok();
    assert!(
        (written("parts") / written("whole") - 1.0).abs() < 0.05,
        "{} {}",
        written("parts"),
        written("whole")
    );
    run("none", "1").args(&["--endurance", "0"]).fails(2, &["--endurance 0"]);
    let metrics = bench.path("whole").join("metrics.jsonl");
    let trace = bench.finetune("whole").path("--trace", &metrics);
    trace.fails(2, &["--trace", "is where the run writes its metrics"]);
    assert_eq!(bench.steps("whole").len(), 6, "they are still there");
    let refused = bench.finetune("none").args(&["--resume"]).path("--trace", &bench.path("t.json"));
    refused.fails(1, &["holds no training state"]);
    assert!(!bench.path("t.json").exists(), "a run that is refused leaves nothing");
}

/// The speed of all steps, and of what was waited for between them.
fn speaks_of_the_mean(document: &Value, metrics: &[Value]) {
    let sum = |key: &str| metrics.iter().map(|line| line[key].as_f64().unwrap()).sum::<f64>();
    let (mean, whole) =
        (document["tokens_per_second"].as_f64().unwrap(), document["seconds"].as_f64().unwrap());
    let (tokens, seconds) = (sum("tokens"), sum("step_seconds"));
    assert!(
        (tokens / whole..=tokens / seconds * (1.0 + 1e-9)).contains(&mean),
        "{mean} tokens/s in {seconds} s of {whole} s"
    );
}

fn write_profile(path: &std::path::Path, disks: &[(&std::path::Path, f64)]) {
    let paths: Vec<_> = disks
        .iter()
        .map(|(path, rate)| {
            serde_json::json!({
                "path": path, "read_bytes_per_second": rate, "write_bytes_per_second": rate,
                "mixed_bytes_per_second": rate,
            })
        })
        .collect();
    let disk = serde_json::json!({
        "engine": "threads", "block_bytes": 1 << 18, "queue_depth": 8, "rings": 1, "register": true, "threads": 2,
        "paths": paths,
    });
    std::fs::write(path, serde_json::json!({ "version": 1, "disk": disk }).to_string()).unwrap();
}

/// The state is shared as measured when it is made, and stays so; what the profile lacks or has wrong is said.
#[test]
fn a_profile_shares_the_state_among_the_disks() {
    let bench = Bench::tiny();
    let disks = [bench.path("fast"), bench.path("slow")];
    let profile = bench.path("profile.json");
    let train = |output: &str| bench.finetune(output).args(&["--steps", "2"]);
    let on_disks = || train("out").path("--disk", &disks[0]).path("--disk", &disks[1]);
    let measured = || on_disks().path("--profile", &profile);
    measured().fails(2, &["--profile", "profile.json", "No such file", "aio-bench tune"]);
    std::fs::write(&profile, "{}").unwrap();
    measured().fails(2, &["profile.json", "version", "aio-bench tune"]);

    write_profile(&profile, &[(&disks[0], 1e9)]);
    let ended = train("half").path("--disk", &bench.path("fast/half")).path("--disk", &disks[1]);
    let ended = ended.path("--profile", &profile).ok();
    assert!(ended.stderr.contains("no measurement of") && ended.stderr.contains("slow"), "{}", ended.stderr);
    disks.iter().for_each(|dir| std::fs::remove_dir_all(dir).unwrap());

    write_profile(&profile, &[(&disks[0], 3e9), (&disks[1], 1e9)]);
    measured().ok();
    // The cycle of 3 : 1 in the header, in both files.
    let cycles = || {
        disks.each_ref().map(|dir| {
            let file = std::fs::read(dir.join("state.bin")).unwrap();
            file[48..48 + usize::from(file[20])].to_vec()
        })
    };
    assert_eq!(cycles(), [[0, 0, 1, 0]; 2]);
    write_profile(&profile, &[(&disks[0], 1e9), (&disks[1], 1e9)]);
    measured().args(&["--resume"]).ok();
    assert_eq!(cycles(), [[0, 0, 1, 0]; 2], "the parts were changed on resuming");
}

#[test]
fn placement_changes_no_byte() {
    let bench = Bench::tiny();
    let train = |output: &str| bench.finetune(output).args(&["--steps", "5", "--grad-accum", "2"]);
    train("reference").args(&["--offload", "none"]).ok();
    let same = |output: &str, run: Cmd| {
        run.ok();
        assert!(bench.weights(output) == bench.weights("reference"), "{output}: the weights differ");
        let losses = |o: &str| bench.metrics(o).iter().map(|m| m["loss"].clone()).collect::<Vec<_>>();
        assert_eq!(losses(output), losses("reference"), "{output}");
    };
    same("host", train("host").args(&["--offload", "host"]));
    let disks = |output: &str, count: usize| {
        (0..count).fold(train(output), |run, n| run.path("--disk", &bench.path(&format!("{output}-{n}"))))
    };
    same("disk-1", disks("disk-1", 1));
    same("disk-3", disks("disk-3", 3));
    let profile = bench.path("profile.json");
    write_profile(&profile, &[(&bench.path("measured-0"), 3e9), (&bench.path("measured-1"), 1e9)]);
    same("measured", disks("measured", 2).path("--profile", &profile));
    same("threads", disks("threads", 2).args(&["--engine", "threads"]));
    let report = cmd(&["report", "--json"]).ok().json();
    if report["io_uring"]["available"] == true {
        same("uring", disks("uring", 2).args(&["--engine", "uring"]));
    } else {
        println!("skipped: io_uring, {}", report["io_uring"]["reason"]);
        disks("uring", 1).args(&["--engine", "uring"]).fails(1, &["io_uring"]);
    }
    same("tight", disks("tight", 1).args(&["--host-memory", &least_memory(&disks("tight", 1))]));
    let one_thread = |words: &[&str]| {
        cmd(&[
            "finetune",
            "--threads",
            "1",
            "--seq-len",
            "24",
            "--batch-size",
            "2",
            "--learning-rate",
            "1e-3",
        ])
        .path("--model", &bench.path("model"))
        .path("--data", &bench.path("data.jsonl"))
        .args(&["--steps", "5", "--grad-accum", "2"])
        .args(words)
    };
    same("one-thread", one_thread(&[]).path("--output", &bench.path("one-thread")));
    same(
        "one-thread-none",
        one_thread(&["--offload", "none"]).path("--output", &bench.path("one-thread-none")),
    );
}

#[test]
fn a_deepspeed_configuration_is_the_same_as_flags() {
    let bench = Bench::tiny();
    let nvme = bench.path("nvme");
    let config = format!(
        "{{
          # what the Trainer would be given
          train_batch_size: 4            // two micro-batches of two
          train_micro_batch_size_per_gpu: 2
          gradient_clipping: 0.5
          bf16: {{ enabled: true }}
          optimizer: {{
            type: AdamW
            params: {{ lr: 2e-3, betas: [0.9, 0.95], eps: 1e-7, weight_decay: 0.1 }}
          }}
          scheduler: {{ type: \"WarmupDecayLR\", params: {{ warmup_num_steps: 2, warmup_max_lr: 2e-3, total_num_steps: \"auto\", warmup_type: \"linear\" }} }}
          zero_optimization: {{
            stage: 3
            /* both on disk */
            offload_optimizer: {{ device: \"nvme\", nvme_path: \"{0}\" }},
            offload_param: {{ device: \"nvme\", nvme_path: \"{0}\" }}
          }}
        }}",
        nvme.display()
    );
    fs::write(bench.path("ds.json"), config).unwrap();
    let base = |output: &str| {
        cmd(&["finetune", "--threads", "2", "--seq-len", "24", "--steps", "5"])
            .path("--model", &bench.path("model"))
            .path("--data", &bench.path("data.jsonl"))
            .path("--output", &bench.path(output))
    };
    base("file").path("--config", &bench.path("ds.json")).ok();
    assert!(nvme.join("state.bin").exists(), "the state is where the file says");
    let metrics = bench.metrics("file");
    assert!(metrics.iter().all(|m| m["tokens"] == 4 * 24));
    let rates: Vec<f64> = metrics.iter().map(|m| m["lr"].as_f64().unwrap()).collect();
    // DeepSpeed steps its scheduler after the optimizer: the first two rates are those of step 0.
    assert_eq!(rates[..4], [0.0, 0.0, 1e-3, 2e-3]);
    assert!(rates[4] > 0.0 && rates[4] < 2e-3, "{rates:?}");
    // A constant rate can be said with flags as well.
    let flat = fs::read_to_string(bench.path("ds.json")).unwrap().replace("WarmupDecayLR", "WarmupLR");
    fs::write(
        bench.path("flat.json"),
        flat.replace("total_num_steps: \"auto\", ", "").replace("/nvme\"", "/flat\""),
    )
    .unwrap();
    base("flat").path("--config", &bench.path("flat.json")).args(&["--scheduler", "constant"]).ok();
    base("flags")
        .args(&["--batch-size", "2", "--grad-accum", "2", "--clip", "0.5", "--learning-rate", "2e-3"])
        .args(&["--betas", "0.9,0.95", "--eps", "1e-7", "--weight-decay", "0.1", "--scheduler", "constant"])
        .ok();
    assert!(bench.weights("flat") == bench.weights("flags"));
    assert!(bench.weights("flat") != bench.weights("file"));
}

#[test]
fn generation_documents_and_batches() {
    let bench = Bench::tiny();
    let rows = [&[5u32, 9, 80][..], &[17], &[3, 3, 61, 40, 2, 90, 11], &[44, 45]];
    let text: String = rows.iter().map(|ids| json!({"prompt_ids": ids}).to_string() + "\n").collect();
    fs::write(bench.path("prompts.jsonl"), text).unwrap();
    let words = ["--max-new-tokens", "12", "--ignore-eos"];
    let batch = |size: &[&str]| {
        bench
            .generate("model")
            .args(&words)
            .path("--prompts", &bench.path("prompts.jsonl"))
            .args(size)
            .ok()
            .json()
    };
    let (all, pairs) = (batch(&[]), batch(&["--batch-size", "2"]));
    assert_eq!(all.as_array().unwrap().len(), rows.len());
    let piped = bench.generate("model").args(&words).args(&["--prompts", "-"]);
    let piped = piped.input(&bench.path("prompts.jsonl")).ok().json();
    let continued =
        |all: &Value| all.as_array().unwrap().iter().map(|one| one["ids"].clone()).collect::<Vec<_>>();
    assert_eq!(continued(&piped), continued(&all));
    for (index, ids) in rows.iter().enumerate() {
        let list = ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let single = bench.generate("model").args(&words).args(&["--prompt-ids", &list]).ok().json();
        let keys: Vec<&str> = single[0].as_object().unwrap().keys().map(String::as_str).collect();
        for key in ["prompt_ids", "ids", "seconds"] {
            assert!(keys.contains(&key), "{keys:?}");
        }
        assert_eq!(single[0]["prompt_ids"], json!(ids));
        assert_eq!(single[0]["ids"].as_array().unwrap().len(), 12);
        assert!(single[0]["text"].is_null() && single[0]["seconds"].as_f64().unwrap() > 0.0);
        for (name, other) in [("all", &all), ("pairs", &pairs)] {
            assert_eq!(other[index]["ids"], single[0]["ids"], "prompt {index} in a batch of {name}");
            assert_eq!(other[index]["prompt_ids"], json!(ids));
        }
    }
    // Prompts that end early make room for the next.
    let ids = |of: &Value| -> Vec<u64> {
        of["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let stops = [ids(&all[0])[2], ids(&all[2])[5]];
    let config = json!({"eos_token_id": stops}).to_string();
    fs::write(bench.path("model/generation_config.json"), config).unwrap();
    for size in ["1", "2", "3", "4"] {
        let run = bench.generate("model").args(&["--max-new-tokens", "12", "--batch-size", size]);
        let stopped = run.path("--prompts", &bench.path("prompts.jsonl")).ok().json();
        for (index, whole) in all.as_array().unwrap().iter().enumerate() {
            let whole = ids(whole);
            let end = whole.iter().position(|id| stops.contains(id)).map_or(12, |last| last + 1);
            assert_eq!(ids(&stopped[index]), whole[..end], "prompt {index} in batches of {size}");
        }
    }
    let sample = |seed: &str| {
        let words = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", seed];
        bench
            .generate("model")
            .args(&["--prompt-ids", "5"])
            .args(&words)
            .args(&["--max-new-tokens", "20"])
            .ok()
            .json()[0]["ids"]
            .clone()
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
    // With a penalty beyond all logits nothing comes twice. What the folder asks for and no flag says is named.
    fs::write(bench.path("model/generation_config.json"), r#"{"repetition_penalty": 1.1, "num_beams": 4}"#)
        .unwrap();
    let run = |penalty: &str| {
        let run = bench.generate("model").args(&["--prompt-ids", "5,6", "--max-new-tokens", "20"]);
        run.args(&["--repetition-penalty", penalty]).ok()
    };
    let plain = run("1");
    assert!(plain.stderr.contains("repetition_penalty 1.1, num_beams 4 are not applied"), "{}", plain.stderr);
    let penalized = run("1e6");
    assert!(penalized.stderr.contains("generation_config.json num_beams 4 are"), "{}", penalized.stderr);
    let mut all = ids(&penalized.json()[0]);
    all.extend([5, 6]);
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]), "{all:?}");
}

#[test]
fn evaluation_is_the_loss_of_training() {
    let bench = Bench::tiny();
    let rows = bench.path("four.jsonl");
    write_rows(&rows, 4, 20, Shape::TINY.vocab, 8);
    for (dtype, batch, accum) in [("bf16", "4", "1"), ("fp32", "2", "2")] {
        let output = format!("out-{dtype}");
        cmd(&[
            "finetune",
            "--threads",
            "2",
            "--steps",
            "1",
            "--seq-len",
            "24",
            "--learning-rate",
            "0",
            "--no-shuffle",
        ])
        .path("--model", &bench.path("model"))
        .path("--data", &rows)
        .path("--output", &bench.path(&output))
        .args(&["--dtype", dtype, "--batch-size", batch, "--grad-accum", accum])
        .ok();
        let eval = |model: &Path| {
            let run = cmd(&["eval", "--json", "--threads", "2", "--seq-len", "24", "--dtype", dtype])
                .path("--model", model)
                .path("--data", &rows)
                .args(&["--batch-size", batch]);
            run.ok().json()
        };
        let document = eval(&bench.path("model"));
        let keys: Vec<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["nll", "perplexity", "tokens"]);
        assert_eq!(document["tokens"], 4 * 19);
        let nll = document["nll"].as_f64().unwrap();
        let loss = bench.metrics(&output)[0]["loss"].as_f64().unwrap();
        // Micro-batches add to one sum where evaluation adds sums: the order of f64 additions differs.
        let slack = if accum == "1" { 0.0 } else { 1e-12 };
        assert!((nll - loss).abs() <= slack, "{dtype}: {nll} {loss}");
        assert_eq!(document["perplexity"].as_f64().unwrap(), nll.exp());
        assert_eq!(eval(&bench.path(&output)), document, "a learning rate of 0 changes nothing");
    }
}

#[test]
fn a_report() {
    let report = cmd(&["report", "--json"]).ok().json();
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["cores"].as_u64().unwrap() >= 1 && report["io_uring"]["available"].is_boolean());
    assert!(report["cpu_features"].is_object() && report["gpu_libraries"].is_object());
    assert!(cmd(&["report"]).ok().stdout.contains("io_uring"));
}

#[test]
fn text_with_a_tokenizer() {
    let bench = Bench::empty();
    let files = terrace::demo::prepare(&bench.path(""), 1).unwrap();
    let shape = Shape { vocab: files.vocab_size, seed: 2, ..Shape::TINY };
    let fresh = bench.path("fresh");
    shape.write(&fresh);
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fresh.join(name), files.model.join(name)).unwrap();
    }
    ModelConfig::from_folder(&files.model).unwrap();
    let stories = fs::read_to_string(&files.train).unwrap();
    let few: Vec<&str> = stories.lines().take(20).collect();
    let rows = bench.path("rows.jsonl");
    let words = |row: &str| serde_json::from_str::<Value>(row).unwrap()["text"].as_str().unwrap().to_owned();
    let mut text = few.join("\n");
    text += &format!("\n{}\n", json!({"prompt": words(few[0]), "completion": words(few[1])}));
    fs::write(&rows, &text).unwrap();
    let plain = bench.path("plain.txt");
    fs::write(&plain, few.iter().map(|row| words(row) + "\n").collect::<String>()).unwrap();
    for (output, data, more) in [("a", &rows, &[][..]), ("b", &rows, &["--pack"]), ("c", &plain, &[])] {
        cmd(&["finetune", "--threads", "2", "--steps", "3", "--seq-len", "48", "--batch-size", "2"])
            .path("--model", &files.model)
            .path("--data", data)
            .path("--output", &bench.path(output))
            .args(more)
            .ok();
        assert_eq!(bench.steps(output), [1, 2, 3]);
        let run = bench.generate(output).args(&["--prompt", "Once upon a time", "--max-new-tokens", "10"]);
        assert_text(&run.ok());
    }
    fs::write(bench.path("prompts.txt"), "Once upon\n\nThe cat\n").unwrap();
    let ended = bench
        .generate("a")
        .path("--prompts", &bench.path("prompts.txt"))
        .args(&["--max-new-tokens", "3"])
        .ok();
    assert_eq!(ended.json().as_array().unwrap().len(), 2);
    assert_text(&ended);
    let piped = bench.generate("a").args(&["--prompts", "-", "--max-new-tokens", "3"]);
    let piped = piped.input(&bench.path("prompts.txt")).ok();
    assert_eq!(piped.json().as_array().unwrap().len(), 2);
    assert_text(&piped);
}

fn assert_text(ended: &Ended) {
    for continuation in ended.json().as_array().unwrap() {
        assert!(continuation["text"].is_string(), "{continuation}");
        assert!(!continuation["prompt_ids"].as_array().unwrap().is_empty());
        assert!(!continuation["ids"].as_array().unwrap().is_empty());
    }
}

/// The smallest budget that a run takes.
fn least_memory(run: &support::Cmd) -> String {
    let refused = run.clone().args(&["--host-memory", "1KiB"]).fails(2, &["needs at least "]).stderr;
    refused.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap().to_owned()
}

/// What crosses to a device with memory of its own and back is what the plan says, but for inputs and losses, and no more of its
/// memory is used.
#[test]
fn metrics_say_what_crosses_to_a_device() {
    let bench = Bench::tiny();
    let spilled = ["--offload", "disk", "--disk-cache", "none", "--grad-accum", "24"];
    let run = bench.finetune("spilled").args(&["--steps", "3", "--device", "cpu", "--discrete"]);
    let memory = least_memory(&run.args(&spilled));
    let spilled = [&spilled[..], &["--host-memory", &memory]].concat();
    let cases: [(&str, &[&str]); 5] = [
        ("host", &["--offload", "host", "--optimizer-ratio", "1"]),
        ("half", &["--offload", "host", "--optimizer-ratio", "0.5"]),
        ("device", &["--offload", "none"]),
        ("rounds", &["--offload", "host", "--grad-accum", "3"]),
        ("spilled", &spilled),
    ];
    for (output, args) in cases {
        let run = bench.finetune(output).args(&["--steps", "3", "--device", "cpu", "--discrete"]);
        let json = bench.path("plan.json");
        run.args(args).path("--save-plan", &json).ok();
        let plan: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(plan["windows"]["activations_on_disk"], output == "spilled");
        for line in &bench.metrics(output)[1..] {
            for name in ["upload_bytes", "download_bytes"] {
                let (found, planned) = (line[name].as_u64().unwrap(), plan["step"][name].as_u64().unwrap());
                // Of every micro-batch.
                let inputs = if output == "spilled" { 24 << 10 } else { 3 << 10 };
                assert!(found - planned < inputs, "{output}: {name} {found}, planned {planned}");
            }
            let peak = line["device_peak_bytes"].as_u64().unwrap();
            let terms = plan["memory"].as_array().unwrap().iter().filter(|term| term["tier"] == "device");
            let planned: u64 = terms
                .map(|term| term["count"].as_u64().unwrap() * term["unit_bytes"].as_u64().unwrap())
                .sum();
            assert!(peak > planned / 2 && peak <= planned, "{output}: {peak} of {planned}");
        }
    }
}

/// A device with memory of its own holds and updates all of the state, a part, or none: the weights are the same, also after
/// going on elsewhere.
#[test]
fn state_is_shared_between_host_and_device() {
    let bench = Bench::tiny();
    let run = |output: &str, args: &[&str]| {
        bench.finetune(output).args(&["--steps", "4", "--device", "cpu"]).args(args)
    };
    run("cpu", &["--offload", "none"]).ok();
    run("pinned", &["--offload", "disk", "--pin-threads"]).ok();
    assert!(bench.weights("pinned") == bench.weights("cpu"));
    let host = ["--discrete", "--offload", "host", "--optimizer-ratio"];
    for (output, ratio) in [("all", "0"), ("some", "0.5"), ("nothing", "1")] {
        let run = run(output, &host).args(&[ratio]).path("--save-plan", &bench.path("plan.json"));
        run.ok();
        let plan: Value =
            serde_json::from_str(&fs::read_to_string(bench.path("plan.json")).unwrap()).unwrap();
        let groups = plan["windows"]["state_groups"].as_u64().unwrap();
        assert!(
            matches!((ratio, groups), ("0", 4) | ("0.5", 1..=3) | ("1", 0)),
            "{groups} groups at {ratio}"
        );
        assert!(bench.weights(output) == bench.weights("cpu"), "ratio {ratio}");
    }
    // What a run left is gone on with wherever.
    let half = |args: &[&str]| bench.finetune("half").args(&["--device", "cpu"]).args(args);
    let constant = ["--scheduler", "constant", "--offload"];
    half(&["--steps", "2", "--save-every", "2", "--discrete"]).args(&constant).args(&["none"]).ok();
    let on = half(&["--steps", "4", "--discrete", "--resume"]).args(&constant);
    on.args(&["host", "--optimizer-ratio", "0.5"]).ok();
    run("whole", &constant).args(&["none"]).ok();
    assert!(bench.weights("half") == bench.weights("whole"));
    // Beside a disk, too, to which saves alone write what is on the device.
    for durability in ["checkpoint", "none"] {
        let disk = ["--durability", durability, "--discrete", "--offload", "disk", "--scheduler", "constant"];
        let on_disk =
            |args: &[&str]| bench.finetune(durability).args(&["--device", "cpu"]).args(&disk).args(args);
        on_disk(&["--steps", "3", "--save-every", "2", "--optimizer-ratio", "0.4"]).ok();
        on_disk(&["--steps", "4", "--optimizer-ratio", "0.7", "--resume"]).ok();
        assert!(bench.weights(durability) == bench.weights("whole"), "{durability}");
    }
    let refused = |args: &[&str], part: &str| drop(run("refused", args).fails(2, &[part]));
    refused(&["--offload", "disk", "--optimizer-ratio", "0.5"], "--durability checkpoint");
    refused(&["--offload", "host", "--optimizer-ratio", "1.5"], "from 0 to 1");
    refused(
        &["--discrete", "--offload", "host", "--optimizer-ratio", "0.5", "--optimizer", "lion"],
        "cannot be updated on this device",
    );
}
