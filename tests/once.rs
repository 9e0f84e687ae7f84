//! `--durability none`: training state that is kept once, in half the space. A run that ends well, or is asked to end, leaves a step
//! to resume from; one that is killed leaves none, and everybody says so.
#![allow(missing_docs)]

mod support;

use std::fs;
use std::path::PathBuf;
use support::{Bench, Cmd, cmd};

const ONCE: [&str; 4] = ["--durability", "none", "--scheduler", "constant"];

fn run(bench: &Bench, output: &str, steps: u64) -> Cmd {
    bench.finetune(output).args(&["--steps", &steps.to_string()]).args(&ONCE)
}

fn state(bench: &Bench, output: &str) -> PathBuf {
    bench.path(output).join(".terrace")
}

fn inspect(bench: &Bench, output: &str, words: &[&str]) -> Cmd {
    cmd(&["inspect"]).path("--disk", &state(bench, output)).args(words)
}

fn export(bench: &Bench, output: &str, to: &str) -> Cmd {
    let export = cmd(&["export"]).path("--model", &bench.path("model")).path("--output", &bench.path(to));
    export.path("--disk", &state(bench, output))
}

#[test]
fn a_run_in_half_the_space_ends_the_same_and_goes_on() {
    let bench = Bench::tiny();
    let twice = |output: &str, steps: &str| {
        bench.finetune(output).args(&["--steps", steps, "--scheduler", "constant", "--disk-cache", "none"])
    };
    twice("whole", "6").ok();
    let ended = run(&bench, "out", 4).args(&["--disk-cache", "none"]).ok();
    assert!(ended.stderr.contains("note: --durability none keeps the state once"), "{}", ended.stderr);
    let size = |output: &str| fs::metadata(state(&bench, output).join("state.bin")).unwrap().len();
    assert!(size("out") < size("whole") * 6 / 10, "{} and {}", size("out"), size("whole"));

    let ended = inspect(&bench, "out", &["--verify"]).ok();
    for part in [
        "step         4 (commit",
        "step before  none",
        ": kept once, overwritten in place",
        "verified     step 4",
    ] {
        assert!(ended.stdout.contains(part), "{part:?} is in: {}", ended.stdout);
    }
    let document = inspect(&bench, "out", &["--verify", "--json"]).ok().json();
    assert!(
        document["changing_since_step"].is_null()
            && document["whole"] == true
            && document["generations"] == 1
    );
    export(&bench, "out", "exported").ok();
    assert!(bench.weights("exported") == bench.weights("out"));
    export(&bench, "out", "previous").args(&["--previous"]).fails(2, &["keeps no previous step"]);

    // What is kept once is not gone on with as what is kept twice, nor the other way round.
    twice("out", "6").args(&["--resume"]).fails(2, &["kept once", "Resume with --durability none"]);
    run(&bench, "whole", 6).args(&["--resume"]).fails(2, &["kept twice", "--durability step or checkpoint"]);
    run(&bench, "out", 6).args(&["--resume"]).ok();
    assert!(bench.weights("out") == bench.weights("whole"));
    assert_eq!(bench.steps("out"), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn an_interrupted_run_goes_on() {
    let bench = Bench::tiny();
    let steps = 40;
    run(&bench, "whole", steps).ok();
    for offload in ["disk", "host"] {
        let run = || run(&bench, offload, steps).args(&["--offload", offload]);
        let running = run().spawn();
        assert!(running.wait_until(|| bench.steps_so_far(offload) >= 3));
        running.signal(libc::SIGINT);
        assert_eq!(running.wait().code(), Some(130));
        run().args(&["--resume"]).ok();
        assert!(bench.weights(offload) == bench.weights("whole"), "--offload {offload}");
        assert_eq!(bench.steps(offload), (1..=steps).collect::<Vec<_>>());
    }
}

#[test]
fn a_killed_run_is_refused_by_everybody() {
    let bench = Bench::tiny();
    // Copies would be written by a save alone.
    let run = |steps| run(&bench, "out", steps).args(&["--save-every", "2", "--disk-cache", "none"]);
    let running = run(4000).spawn();
    assert!(running.wait_until(|| bench.path("out").join("checkpoint-2/model.safetensors").exists()));
    // A save is whole until the next step's update writes.
    let mut killed = running;
    for _ in 0..20 {
        killed.signal(libc::SIGKILL);
        killed.wait();
        let document = inspect(&bench, "out", &["--json"]).run();
        if document.code() == Some(1) {
            break;
        }
        let before = bench.steps_so_far("out");
        killed = run(4000).args(&["--resume"]).spawn();
        assert!(killed.wait_until(|| bench.steps_so_far("out") > before));
    }
    let files =
        || ["state.bin", "manifest.bin"].map(|file| fs::read(state(&bench, "out").join(file)).unwrap());
    let before = files();
    let dir = state(&bench, "out");
    let dir = dir.to_str().unwrap();
    let advice =
        ["was being overwritten", "last whole at step", "OUTPUT/checkpoint-N", "step or checkpoint", dir];
    run(4000).args(&["--resume"]).fails(1, &advice);
    run(4000).fails(1, &advice);
    export(&bench, "out", "exported").fails(1, &advice);
    assert!(!bench.path("exported").exists());
    for words in [&[][..], &["--verify"], &["--verify", "--restore-previous"]] {
        let said =
            ["no step of the state is whole", "--durability none", "neither resumed nor exported", dir];
        let ended = inspect(&bench, "out", words).run();
        assert_eq!(ended.code(), Some(1));
        said.iter().for_each(|part| assert!(ended.stderr.contains(part), "{part:?} is in: {}", ended.stderr));
        assert!(
            ended.stdout.contains("none is whole: the state is being overwritten since step"),
            "{}",
            ended.stdout
        );
    }
    let document = inspect(&bench, "out", &["--json"]).run().json();
    assert!(document["step"].is_null() && document["previous_step"].is_null() && document["whole"] == false);
    let since = document["changing_since_step"].as_u64().unwrap();
    assert!(document["slots"].as_array().unwrap().iter().any(|slot| slot["state"] == "changing"));
    assert!(before == files(), "those who were refused touched nothing");

    // What it left is a model to start from.
    let folder = bench.path("out").join(format!("checkpoint-{since}"));
    assert!(folder.join("model.safetensors").exists(), "{}", folder.display());
    let again = cmd(&["finetune"]).path("--model", &folder).path("--data", &bench.path("data.jsonl"));
    again
        .path("--output", &bench.path("again"))
        .args(&["--steps", "2", "--seq-len", "16", "--batch-size", "2"])
        .ok();
    fs::remove_dir_all(state(&bench, "out")).unwrap();
    run(4).ok();
}

#[test]
fn a_plan_counts_the_state_once_and_says_where_that_would_do() {
    let plan = |more: &[&str]| {
        let machine = ["--gpu-memory", "24GB", "--host-memory", "64GB", "--tflops", "100", "--link", "25GB"];
        cmd(&["plan", "--params", "40b", "--disk", "nowhere"]).args(&machine).args(more)
    };
    let bytes =
        |more: &[&str]| plan(more).args(&["--json"]).ok().json()["plan"]["disk_bytes"].as_u64().unwrap();
    let (twice, once) = (bytes(&[]), bytes(&["--durability", "none"]));
    // Twelve bytes for each of 40 billion parameters; the rest is gradients.
    assert!((475..485).contains(&((twice - once) / 1_000_000_000)), "{once} and {twice}");
    let ended = plan(&["--durability", "none"]).ok();
    for part in ["state split on disk, kept once", "training state, kept once"] {
        assert!(ended.stdout.contains(part), "{part:?} is in: {}", ended.stdout);
    }
    let tight = ["--disk-space", "700GB", "--state", "split"];
    plan(&tight).fails(
        2,
        &[
            "--disk-space of",
            "use --state compact, or keep the state once",
            "--durability none needs",
            "these fit",
        ],
    );
    plan(&tight).args(&["--durability", "none"]).ok();
    let ended = plan(&["--disk-space", "300GB", "--state", "split"]).fails(2, &["--disk-space of"]);
    assert!(!ended.stderr.contains("--durability"), "half of it does not fit either: {}", ended.stderr);

    // A plan that is saved is a run's.
    let bench = Bench::tiny();
    let file = bench.path("plan.json");
    let saved = run(&bench, "out", 2).args(&["--device", "cpu"]).path("--save-plan", &file);
    saved.ok();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("\"durability\": \"none\""), "{text}");
    let planned = |output: &str| {
        bench
            .finetune(output)
            .args(&["--steps", "2", "--device", "cpu", "--scheduler", "constant"])
            .path("--plan", &file)
    };
    planned("planned").ok();
    assert!(bench.weights("planned") == bench.weights("out"));
    assert_eq!(inspect(&bench, "planned", &["--json"]).ok().json()["generations"], 1);
    planned("other").args(&["--durability", "step"]).fails(2, &["run.durability is none"]);
}
