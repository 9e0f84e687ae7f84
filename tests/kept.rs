//! What a run leaves behind when something beside the training fails: nothing that was trained is lost, and nothing of another run is
//! taken for this one's.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::process::{Command, Stdio};
use support::{Bench, Cmd, Shape, SmallDisk, cmd};

/// A folder where a file is to be written stands for whatever may be in the way.
fn obstruct(bench: &Bench, path: &str) {
    fs::create_dir_all(bench.path(path)).unwrap();
}

fn saving(bench: &Bench, output: &str, rate: &str, steps: &str) -> Cmd {
    let run = bench.finetune(output).without("--learning-rate").args(&["--scheduler", "constant"]);
    run.args(&["--learning-rate", rate, "--steps", steps, "--save-every", "2"])
}

#[test]
fn weights_of_an_earlier_run_are_not_taken_for_those_of_a_save() {
    let bench = Bench::tiny();
    saving(&bench, "earlier", "1e-3", "2").ok();
    saving(&bench, "undisturbed", "2e-3", "4").ok();
    saving(&bench, "out", "2e-3", "1").ok();
    let saved = bench.path("out/checkpoint-2/model.safetensors");
    // The save of step 2 ends before it replaces anything.
    obstruct(&bench, "out/checkpoint-2/.model.safetensors.partial");
    fs::copy(bench.path("earlier/checkpoint-2/model.safetensors"), &saved).unwrap();
    let resumed = || saving(&bench, "out", "2e-3", "4").args(&["--resume"]);
    resumed().fails(1, &["out/checkpoint-2/.model.safetensors.partial"]);
    assert!(!saved.exists(), "a process that goes on would take it for its own");
    fs::remove_dir(bench.path("out/checkpoint-2/.model.safetensors.partial")).unwrap();
    resumed().ok();
    for folder in ["", "/checkpoint-4"] {
        let [found, expected] = ["out", "undisturbed"].map(|run| bench.weights(&format!("{run}{folder}")));
        assert!(found == expected, "{folder}");
    }
}

#[test]
fn saves_of_an_earlier_run_are_set_aside() {
    let bench = Bench::tiny();
    saving(&bench, "out", "1e-3", "4").ok();
    let earlier = bench.weights("out/checkpoint-2");
    fs::remove_dir_all(bench.path("out/.terrace")).unwrap();
    let again = saving(&bench, "out", "2e-3", "4").args(&["--save-total-limit", "1"]).ok().stderr;
    assert!(
        again.contains("of an earlier run is in") && again.contains("checkpoint-2.1 now, and 1 more"),
        "{again}"
    );
    assert!(bench.weights("out/checkpoint-2.1") == earlier && bench.path("out/checkpoint-4.1").exists());
    assert!(!bench.path("out/checkpoint-2").exists() && bench.path("out/checkpoint-4").exists());
}

/// The state is made, and the process ends before its first step: who goes on from there must not take what is there for its own.
/// Of a run that is refused when its state is made everything has its name again, and there is no state.
#[test]
fn a_run_that_does_not_begin_sets_nothing_aside() {
    let Some(small) = SmallDisk::mount(64 << 10) else { return };
    let bench = Bench::tiny();
    saving(&bench, "out", "1e-3", "4").path("--disk", &bench.path("disk")).ok();
    let before = support::files(&bench.path("out"));
    let again = saving(&bench, "out", "1e-3", "4").path("--disk", small.path());
    let refused = again.fails(1, &["the training state needs", "are free"]);
    assert!(!refused.stderr.contains("of an earlier run"), "{}", refused.stderr);
    assert_eq!(support::files(&bench.path("out")), before);
    assert!(support::files(small.path()).iter().all(|(path, _)| path.ends_with("terrace.lock")));
}

#[test]
fn what_an_earlier_run_left_is_not_resumed() {
    let bench = Bench::tiny();
    saving(&bench, "out", "1e-3", "4").ok();
    let metrics = fs::read(bench.path("out/metrics.jsonl")).unwrap();
    let earlier = bench.weights("out/checkpoint-2");
    fs::remove_dir_all(bench.path("out/.terrace")).unwrap();
    let again = || saving(&bench, "out", "2e-3", "4").args(&["--save-total-limit", "1"]);
    again().args(&["--save-plan", "/dev/full"]).fails(1, &["--save-plan /dev/full: "]);
    again().args(&["--resume"]).ok();
    assert!(fs::read(bench.path("out/metrics.jsonl.1")).unwrap() == metrics);
    assert!(bench.weights("out/checkpoint-2.1") == earlier && bench.path("out/checkpoint-4.1").exists());
    assert!(!bench.path("out/checkpoint-2").exists() && bench.path("out/checkpoint-4").exists());
}

#[test]
fn folders_that_only_look_like_saves_stay() {
    let bench = Bench::tiny();
    saving(&bench, "out", "1e-3", "4").ok();
    for theirs in ["checkpoint-002", "checkpoint-+1"].map(|name| bench.path("out").join(name)) {
        fs::create_dir(&theirs).unwrap();
        fs::copy(bench.path("model/model.safetensors"), theirs.join("model.safetensors")).unwrap();
    }
    let more = saving(&bench, "out", "1e-3", "5").args(&["--resume", "--save-total-limit", "1"]);
    let removed = more.ok().stderr;
    assert!(
        removed.lines().any(|line| line.starts_with("removed ") && line.ends_with("checkpoint-2")),
        "{removed}"
    );
    let left = |name: &str| bench.path("out").join(name).join("model.safetensors").exists();
    let names = ["checkpoint-2", "checkpoint-4", "checkpoint-002", "checkpoint-+1"];
    assert_eq!(names.map(left), [false, true, true, true]);
}

/// A process that ends between a commit and the line of its step.
#[test]
fn the_line_of_the_last_step_comes_back_wherever_the_state_is() {
    let bench = Bench::tiny();
    let run = |output: &str, steps: &str, offload: &str| {
        let run = bench.finetune(output).args(&["--scheduler", "constant", "--steps", steps]);
        run.args(&["--offload", offload, "--save-every", "5"])
    };
    for (before, after) in
        [("disk", "disk"), ("disk", "host"), ("disk", "none"), ("host", "disk"), ("none", "host")]
    {
        let output = format!("{before}-{after}");
        run(&output, "5", before).ok();
        let path = bench.path(&output).join("metrics.jsonl");
        let lines = fs::read_to_string(&path).unwrap();
        let end = lines.trim_end().rfind('\n').unwrap() + 1;
        fs::write(&path, &lines[..end]).unwrap();
        run(&output, "8", after).args(&["--resume"]).ok();
        assert_eq!(bench.steps(&output), (1..=8).collect::<Vec<_>>(), "{output}");
        let [found, expected] = [&bench.metrics(&output)[4], &serde_json::from_str(&lines[end..]).unwrap()]
            .map(|line| line["loss"].clone());
        assert_eq!(found, expected, "{output}");
    }
}

#[test]
fn events_that_cannot_be_written_end_no_run() {
    let bench = Bench::tiny();
    bench.finetune("whole").args(&["--steps", "200"]).ok();
    let Some(small) = SmallDisk::mount(8 << 10) else { return };
    let run = || bench.finetune("out").args(&["--steps", "200", "--offload", "host"]);
    let events = small.path().join("events");
    let told = run().path("--tensorboard", &events).ok().stderr;
    for part in ["warning: writing ", "tfevents", "No space left", "it ends before step "] {
        assert!(told.contains(part), "{part:?} is in: {told}");
    }
    assert!(bench.weights("out") == bench.weights("whole"));
}

#[test]
fn a_loss_that_is_not_finite_leaves_the_step_before() {
    let bench = Bench::tiny();
    let run = || {
        let run = bench.finetune("out").without("--learning-rate").args(&["--steps", "9", "--clip", "0"]);
        run.args(&["--offload", "host", "--scheduler", "constant"])
    };
    let failed =
        run().args(&["--learning-rate", "1e20"]).fails(1, &["is not finite", "is saved all the same"]);
    let still = failed.stderr.split("the state is still that of step ").nth(1).unwrap();
    let step: u64 = still.split('.').next().unwrap().parse().unwrap();
    let words = format!("step {step} is saved");
    assert!(failed.stderr.contains(&words), "{words:?} is in: {}", failed.stderr);
}

/// A step without a label ends a run: it is found before the first, wherever it is.
#[test]
fn a_step_with_nothing_to_learn_from_is_refused_before_training() {
    let bench = Bench::tiny();
    let row = |label: i32| format!("{{\"input_ids\": [1, 2, 3], \"labels\": [1, {label}, {label}]}}\n");
    let rows: String = (0..40).map(|at| row(if at == 33 { -100 } else { 2 })).collect();
    fs::write(bench.path("masked.jsonl"), rows).unwrap();
    let run = |batch: &str, steps: &str| {
        let run = bench.finetune("out").without("--data").without("--batch-size");
        let run = run.path("--data", &bench.path("masked.jsonl")).args(&["--batch-size", batch]);
        run.args(&["--steps", steps, "--offload", "host"])
    };
    run("1", "40").fails(1, &["masked.jsonl: step ", "nothing to learn from", "Remove such rows (1 of 40)"]);
    assert!(!bench.path("out/metrics.jsonl").exists());
    run("2", "20").ok();
}

#[test]
fn room_for_saves_is_looked_for_before_training() {
    let bench = Bench::tiny();
    let Some(small) = SmallDisk::mount(600 << 10) else { return };
    let run = || {
        let run = bench.finetune("unused").without("--output").path("--output", &small.path().join("out"));
        run.args(&["--steps", "4", "--offload", "host"])
    };
    let parts = ["a save of the training state needs", "choose an --output on another disk"];
    let refused = run().args(&["--save-every", "2"]).fails(1, &parts);
    assert!(!refused.stderr.contains("--disk"), "{}", refused.stderr);
    // Who asks for none is told what cannot be done, and gets the model.
    let ended = run().ok();
    assert!(ended.stderr.contains("warning: a save of the training state needs"), "{}", ended.stderr);
    assert!(small.path().join("out/model.safetensors").exists());
}

#[test]
fn two_runs_do_not_write_into_one_folder() {
    let bench = Bench::tiny();
    let run = |steps: &str| bench.finetune("out").args(&["--steps", steps, "--offload", "host"]);
    let first = run("400").spawn();
    assert!(first.wait_until(|| bench.steps_so_far("out") >= 2));
    run("3").fails(1, &["--output ", "another run writes there"]);
    assert!(first.is_running(), "make the first run longer");
    assert_eq!(first.wait().code(), Some(0));
    assert_eq!(bench.steps("out"), (1..=400).collect::<Vec<_>>());
}

#[test]
fn a_model_that_saves_would_replace_is_refused() {
    let bench = Bench::tiny();
    bench.finetune("out").args(&["--steps", "4", "--save-every", "2"]).ok();
    let again = bench.finetune("out").without("--model").args(&["--steps", "4"]);
    let again = again.path("--model", &bench.path("out/checkpoint-2"));
    again
        .clone()
        .args(&["--save-every", "4"])
        .fails(2, &["--model ", "out/checkpoint-2", "--output", "give another --output"]);
    // A run that begins gives it another name, whether it saves or not.
    let refused =
        |run: &Cmd| run.clone().fails(2, &["--model ", "this run may rename", "give another --output"]);
    refused(&again);
    fs::remove_dir_all(bench.path("out/.terrace")).unwrap();
    refused(&again);
    assert!(bench.path("out/checkpoint-2/model.safetensors").exists());
    // So it would do with those of somebody else.
    let folders = bench.path("trainer/checkpoint-500");
    fs::create_dir_all(&folders).unwrap();
    fs::copy(bench.path("model/model.safetensors"), folders.join("model.safetensors")).unwrap();
    let theirs = bench.finetune("trainer").args(&["--steps", "1"]);
    theirs.fails(2, &["--output ", "checkpoint-500, which no run of finetune wrote there", "may rename"]);
    // One that is nobody's output is not replaced either.
    Shape { seed: 3, ..Shape::TINY }.write(&bench.path("precious"));
    let before = bench.weights("precious");
    bench.finetune("precious").args(&["--steps", "1"]).fails(2, &["--output ", "holds a model"]);
    // What cannot be replaced is found before training, not after it.
    fs::create_dir_all(bench.path("folders/model.safetensors")).unwrap();
    let folders = bench.finetune("folders").args(&["--steps", "1"]);
    folders.fails(2, &["--output ", "model.safetensors there is a folder", "move it away"]);
    assert!(bench.weights("precious") == before);
}

/// Copies of weights are a model's size, and so may a cache be; a process that was killed cannot remove its own.
#[test]
fn what_a_killed_generation_left_is_removed() {
    let bench = Bench::tiny();
    for flags in [["--offload", "disk"], ["--kv", "disk"]] {
        let disk = bench.path(flags[0]);
        let run = |tokens: &str| {
            let run = bench.generate("model").args(&["--prompt-ids", "1", "--max-new-tokens", tokens]);
            run.args(&flags).path("--disk", &disk)
        };
        let is_locked = |entry: &fs::DirEntry| entry.path().join("frozen.lock").exists();
        let left_over = || fs::read_dir(&disk).map_or(0, |found| found.flatten().filter(is_locked).count());
        let running = run("40").spawn();
        running.wait_until(|| left_over() == 1);
        running.signal(libc::SIGKILL);
        running.wait();
        assert_eq!(left_over(), 1, "killed too late");
        // What is in use stays, and what has no such lock may be anything: training state, for one.
        let used = disk.join("terrace-weights-1");
        fs::create_dir(&used).unwrap();
        let training =
            bench.finetune("out").args(&["--steps", "1", "--save-every", "1", "--offload", "disk"]);
        training.path("--disk", &disk.join("terrace-weights-2")).ok();
        fs::remove_dir_all(bench.path("out")).unwrap();
        assert!(disk.join("terrace-weights-2/state.bin").exists());
        let lock = fs::File::create(used.join("frozen.lock")).unwrap();
        lock.try_lock().unwrap();
        run("2").ok();
        let mut left: Vec<_> = fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["terrace-weights-1", "terrace-weights-2"], "{flags:?}");
        assert!(disk.join("terrace-weights-2/state.bin").exists());
        drop(lock);
        run("2").ok();
        assert!(!used.exists());
    }
}

/// What was generated is told, whatever happens after it.
#[test]
fn continuations_survive_a_prompt_that_fails() {
    let bench = Bench::tiny();
    let (path, config) = (bench.path("model/model.safetensors"), bench.path("model/config.json"));
    let bytes = fs::read(&path).unwrap();
    let (header, data) = bytes[8..].split_at(u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let table = header["model.embed_tokens.weight"].clone();
    let [start, end] = [0, 1].map(|index| table["data_offsets"][index].as_u64().unwrap() as usize);
    let row = (end - start) / table["shape"][0].as_u64().unwrap() as usize;
    // A table of its own for the head; in the other, token 7 is not a number in any type.
    let mut head = table.clone();
    head["data_offsets"] = serde_json::json!([data.len(), data.len() + end - start]);
    header["lm_head.weight"] = head;
    let mut changed = [data, &data[start..end]].concat();
    changed[start + 7 * row..start + 8 * row].fill(0xFF);
    let header = header.to_string().into_bytes();
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), &header[..], &changed].concat()).unwrap();
    let text = fs::read_to_string(&config).unwrap();
    let mut settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    settings["tie_word_embeddings"] = false.into();
    fs::write(&config, settings.to_string()).unwrap();
    fs::write(bench.path("p.jsonl"), "{\"prompt_ids\": [1]}\n{\"prompt_ids\": [7]}\n{\"prompt_ids\": [2]}\n")
        .unwrap();
    let run = cmd(&["generate", "--json", "--batch-size", "1", "--max-new-tokens", "1"]);
    let run = run.path("--model", &bench.path("model")).path("--prompts", &bench.path("p.jsonl"));
    let ended = run.run();
    assert_eq!(ended.code(), Some(1), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("is not a number") && ended.stderr.contains("1 of 3 prompts"),
        "{}",
        ended.stderr
    );
    let told = ended.json();
    assert_eq!(told.as_array().unwrap().len(), 1, "{told}");
    assert_eq!(told[0]["prompt_ids"], serde_json::json!([1]));
    // Where there is nothing to tell, nothing is printed.
    fs::write(bench.path("p.jsonl"), "{\"prompt_ids\": [7]}\n").unwrap();
    run.fails(1, &["is not a number"]);
}

#[test]
fn a_run_outlives_who_reads_what_it_says() {
    let bench = Bench::tiny();
    bench.finetune("whole").args(&["--steps", "4"]).ok();
    for offload in ["host", "disk"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let run = bench.finetune(offload).args(&["--steps", "4", "--save-every", "2", "--offload", offload]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.args(run.words()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer);
        assert!(command.status().unwrap().success(), "--offload {offload}");
        assert!(bench.weights(offload) == bench.weights("whole"));
    }
}
