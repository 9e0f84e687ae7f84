//! `terrace export`: the folder that finetune writes, from the state alone.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::{Bench, Cmd, Shape, cmd, files};

fn export(bench: &Bench, dirs: &[PathBuf], output: &str) -> Cmd {
    let command =
        cmd(&["export"]).path("--model", &bench.path("model")).path("--output", &bench.path(output));
    dirs.iter().fold(command, |command, dir| command.path("--disk", dir))
}

/// The files of an exported folder, by name.
fn folder(path: &Path) -> Vec<(String, Vec<u8>)> {
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let all = files(path).into_iter().filter(|(file, _)| file.parent() == Some(path));
    let all = all.map(|(path, _)| (name(&path), fs::read(path).unwrap()));
    all.filter(|(name, _)| name != "metrics.jsonl").collect()
}

#[track_caller]
fn same(found: &Path, expected: &Path) {
    let (found, expected) = (folder(found), folder(expected));
    let names = |files: &[(String, Vec<u8>)]| files.iter().map(|file| file.0.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    assert!(found.len() >= 2 && found == expected, "the bytes differ");
}

/// Every way to store state, on one or two disks or saved from memory, in one file or in shards.
#[test]
fn an_export_has_the_bytes_of_the_run_that_wrote_the_state() {
    let bench = Bench::with(&Shape { vocab: 512, hidden: 96, intermediate: 256, ..Shape::TINY });
    fs::write(bench.path("model").join("generation_config.json"), "{\"eos_token_id\": 3}").unwrap();
    let disks = |name: &str| [bench.path(&format!("{name}-1")), bench.path(&format!("{name}-2"))];
    for (name, words) in [
        ("split", &["--state", "split"][..]),
        ("fp32-state", &["--state", "fp32"]),
        ("bf16", &["--state", "bf16"]),
        ("compact", &["--state", "compact", "--max-shard-size", "100KB"]),
        ("fp16", &["--dtype", "fp16"]),
        ("fp32", &["--dtype", "fp32", "--max-shard-size", "300KB"]),
        ("sgd", &["--optimizer", "sgd"]),
    ] {
        let dirs = disks(name);
        let run = bench.finetune(name).args(&["--steps", "3", "--save-every", "1"]).args(words);
        run.path("--disk", &dirs[0]).path("--disk", &dirs[1]).ok();
        let shards = words.iter().position(|word| *word == "--max-shard-size");
        let shards = shards.map_or(&[][..], |at| &words[at..at + 2]);
        let out = format!("{name}-export");
        let document = export(&bench, &dirs, &out).args(shards).args(&["--json"]).ok().json();
        same(&bench.path(&out), &bench.path(name));
        let keys: Vec<&str> = document.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys.join(" "), "output step dtype parameters bytes seconds state");
        assert_eq!((document["step"].as_u64(), document["dtype"].as_str().is_some()), (Some(3), true));
        // Again into the same folder, and the step before.
        export(&bench, &dirs, &out).args(shards).args(&["--previous"]).ok();
        same(&bench.path(&out), &bench.path(&format!("{name}/checkpoint-2")));
    }
    for offload in ["none", "host"] {
        let run = bench.finetune(offload).args(&["--steps", "5", "--save-every", "2", "--offload", offload]);
        run.ok();
        let out = format!("{offload}-export");
        let state = [bench.path(offload).join(".terrace")];
        export(&bench, &state, &out).ok();
        same(&bench.path(&out), &bench.path(&format!("{offload}/checkpoint-4")));
        export(&bench, &state, &out).args(&["--previous"]).ok();
        same(&bench.path(&out), &bench.path(&format!("{offload}/checkpoint-2")));
    }
    // An engine of another kind, and what it gives is a model.
    export(&bench, &disks("split"), "threads").args(&["--engine", "threads"]).ok();
    same(&bench.path("threads"), &bench.path("split"));
    bench.generate("threads").args(&["--prompt-ids", "1,2", "--max-new-tokens", "3"]).ok();
}

#[test]
fn the_state_and_a_config_are_enough() {
    let bench = Bench::tiny();
    bench.finetune("out").args(&["--steps", "2"]).ok();
    fs::remove_file(bench.path("model").join("model.safetensors")).unwrap();
    fs::remove_file(bench.path("data.jsonl")).unwrap();
    export(&bench, &[bench.path("out/.terrace")], "export").ok();
    same(&bench.path("export"), &bench.path("out"));
    // Over the folder of the run itself, beside its state.
    let before = folder(&bench.path("out"));
    export(&bench, &[bench.path("out/.terrace")], "out").ok();
    assert!(folder(&bench.path("out")) == before && bench.steps("out") == [1, 2]);
    bench.path("out/.terrace/manifest.bin").metadata().unwrap();
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let bench = Bench::tiny();
    let state = [bench.path("out/.terrace")];
    let refused = |code: i32, parts: &[&str]| {
        export(&bench, &state, "export").fails(code, parts);
        assert!(!bench.path("export").exists(), "something was written");
    };
    refused(1, &["holds no training state", "no such directory"]);
    let running = bench.finetune("out").args(&["--steps", "4000"]).spawn();
    assert!(running.wait_until(|| bench.steps_so_far("out") >= 1));
    refused(1, &["is in use: a training runs there"]);
    running.signal(libc::SIGINT);
    running.wait();
    export(&bench, &state, "good").ok();

    let config = bench.path("model").join("config.json");
    let good = fs::read_to_string(&config).unwrap();
    let set = |key: &str, value: Value| {
        let mut config_json: Value = serde_json::from_str(&good).unwrap();
        config_json[key] = value;
        fs::write(&config, config_json.to_string()).unwrap();
    };
    set("num_hidden_layers", json!(3));
    refused(
        2,
        &[
            "belongs to another model: of 4 groups, the one at place 4 was head of",
            "now of 5 groups it is layers.2",
        ],
    );
    set("intermediate_size", json!(128));
    refused(2, &["the one at place 2 was layers.0 of", "elements"]);
    set("rope_theta", json!(500.0));
    refused(2, &["belongs to another model: its config.json had checksum", "model/config.json has checksum"]);
    set("architectures", json!(["MambaForCausalLM"]));
    refused(1, &["MambaForCausalLM", "not supported"]);
    fs::write(&config, &good).unwrap();

    let model = bench.path("model");
    export(&bench, &state, "model").fails(2, &["is the folder of --model"]);
    export(&bench, &state, "out/.terrace").fails(2, &["is a directory of training state", "another folder"]);
    // An export is replaced by the next, whatever wrote the one before; a copy of the model is somebody's.
    export(&bench, &state, "good").ok();
    fs::create_dir(bench.path("copy")).unwrap();
    fs::copy(bench.path("model/config.json"), bench.path("copy/config.json")).unwrap();
    let theirs = bench.path("copy/model.safetensors");
    fs::write(&theirs, "weights of another trainer").unwrap();
    export(&bench, &state, "copy")
        .fails(2, &["copy holds a model that neither finetune nor export wrote", "another folder"]);
    assert_eq!(fs::read(&theirs).unwrap(), b"weights of another trainer");
    fs::write(bench.path("file"), "").unwrap();
    export(&bench, &state, "file").fails(1, &["--output", "is not a directory"]);
    export(&bench, &[bench.path("out")], "export").fails(1, &["there is no manifest", "out/.terrace"]);
    cmd(&["export"]).path("--model", &model).fails(2, &["<PATH>", "--output"]);
    let nowhere = cmd(&["export"]).path("--model", &bench.path("nowhere")).path("--disk", &state[0]);
    nowhere.path("--output", &bench.path("export")).fails(1, &["--model", "no such folder"]);
}

#[test]
fn a_damaged_weight_is_named_and_not_exported() {
    let bench = Bench::tiny();
    bench.finetune("out").args(&["--steps", "2", "--save-every", "1"]).ok();
    let state = bench.path("out/.terrace");
    let document = cmd(&["inspect", "--json"]).path("--disk", &state).ok().json();
    let live = document["slots"].as_array().unwrap().iter().find(|slot| slot["step"] == 2).unwrap();
    let generation = live["generation"].as_u64().unwrap();
    let size = document["generation_bytes"].as_u64().unwrap();
    // The first blob of a generation is the embedding's weights.
    let flip = |generation: u64| {
        let file = OpenOptions::new().read(true).write(true).open(state.join("state.bin")).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 4096 + generation * size + 99).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 4096 + generation * size + 99).unwrap();
    };
    flip(generation);
    let states = [state.clone()];
    export(&bench, &states, "export").fails(1, &["is damaged", "weights of group embed", "terrace inspect"]);
    assert!(files(&bench.path("export")).is_empty(), "half an export");
    export(&bench, &states, "export").args(&["--previous"]).ok();
    same(&bench.path("export"), &bench.path("out/checkpoint-1"));
    flip(generation);
    flip(1 - generation);
    let previous = export(&bench, &states, "previous").args(&["--previous"]);
    previous.fails(1, &["step 1 is no longer whole", "weights of group embed", "this exports step 2"]);
    export(&bench, &states, "export").ok();
    same(&bench.path("export"), &bench.path("out"));
}
