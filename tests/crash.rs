//! Whatever ends a run, at whatever instant: the last committed step is intact, resuming continues it, and the result is
//! that of a run that nothing ended.
#![allow(missing_docs)]

mod support;

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;
use support::{Bench, Cmd, Ended, Random, Shape, cmd, seed};

const STEPS: u64 = 60;
/// Kills while the state is being made, before there may be anything to resume.
const LOADING_KILLS: usize = 6;
/// Kills while steps run, at least; some thirty are usual.
const TRAINING_KILLS: usize = 12;
/// Kills while the trained model is being written.
const EXPORT_KILLS: usize = 4;

#[test]
fn killed_at_any_instant_a_run_ends_the_same() {
    let bench = Bench::tiny();
    let mut random = Random::new(seed());
    // The tests that follow leave the budget's rest to copies of the state, this one streams all of it.
    let run = |output: &str| steps(&bench, output, STEPS).args(&["--disk-cache", "none"]);
    run("whole").ok();
    let export = ["model.safetensors", "config.json", "metrics.jsonl"].map(|f| bench.path("whole").join(f));
    assert!(export.iter().all(|path| path.exists()));
    // What a process needs beside its steps; the least of a few tries, since others may be using the machine.
    let start = (0..4).map(|_| run("whole").args(&["--resume"]).ok().seconds).fold(f64::INFINITY, f64::min);
    println!("start {start:.3} s");

    let mut kills = 0;
    for attempt in 0..LOADING_KILLS {
        let output = format!("loading-{attempt}");
        // Every other one without a profile, so that it may be measuring.
        let ended = if attempt % 2 == 0 {
            kill_after(&run(&output), random.unit() * start)
        } else {
            kill_after(&run(&output).without("--profile"), random.unit())
        };
        kills += usize::from(ended.signal() == Some(libc::SIGKILL));
        finish_from_anything(&bench, &output);
        assert!(bench.weights(&output) == bench.weights("whole"), "killed while loading, attempt {attempt}");
        assert_eq!(bench.steps(&output), (1..=STEPS).collect::<Vec<_>>());
    }

    let training_kills = kill_while_training(&bench, &mut random, "killed", &run("killed"), start, STEPS);
    println!("{kills} kills while loading, {training_kills} while training");
    assert!(training_kills >= TRAINING_KILLS, "only {training_kills} kills hit; change the delays");

    for _ in 0..EXPORT_KILLS {
        // All steps are committed, so this run loads, exports and ends.
        kill_after(&run("killed").args(&["--resume"]), start * (0.5 + 0.6 * random.unit()));
    }
    run("killed").args(&["--resume"]).ok();
    assert!(bench.weights("killed") == bench.weights("whole"), "the weights differ");
    assert_same_losses(&bench, "killed", "whole", STEPS);
    let leftovers = std::fs::read_dir(bench.path("killed")).unwrap().map(|e| e.unwrap().file_name());
    let mut names: Vec<_> = leftovers.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, [".terrace", "config.json", "metrics.jsonl", "model.safetensors"]);
}

/// Every way to store state that the test above does not have, and what a step takes from its number alone.
#[test]
fn killed_with_other_state_or_another_optimizer_a_run_ends_the_same() {
    // Enough that a run whose steps are short is killed often before it ends.
    const STEPS: u64 = 32;
    let bench = Bench::tiny();
    let mut random = Random::new(seed());
    let cycle = "OneCycle,cycle_min_lr=1e-4,cycle_max_lr=1e-3,cycle_first_step_size=5,decay_step_size=2,decay_lr_rate=1";
    let groups = ["--weight-decay", "0.1", "--no-decay", "*norm*", "--param-group", "*.0.mlp.*,frozen"];
    // The scale comes down from far above what f16 holds, and goes up again until it overflows: many steps are skipped.
    let file = bench.path("fp16.json");
    std::fs::write(
        &file,
        "{fp16: {enabled: true, initial_scale_power: 30, hysteresis: 1, loss_scale_window: 1}}",
    )
    .unwrap();
    let fp16 = ["--config", file.to_str().unwrap()];
    for (name, words) in [
        ("fp32", &["--state", "fp32"][..]),
        ("bf16", &["--state", "bf16"]),
        ("compact", &["--state", "compact"]),
        ("f32-weights", &["--dtype", "fp32"]),
        ("lion", &["--optimizer", "lion", "--scheduler", cycle]),
        ("groups", &groups),
        ("saved", &["--durability", "checkpoint", "--save-every", "3", "--save-total-limit", "1"]),
        ("fp16", &fp16),
    ] {
        let whole = format!("{name}-whole");
        let run = |output: &str| {
            let run = steps(&bench, output, STEPS).args(words);
            // A cycle has rates of its own.
            if words.contains(&cycle) { run.without("--learning-rate") } else { run }
        };
        run(&whole).ok();
        let start = run(&whole).args(&["--resume"]).ok().seconds;
        let kills = kill_while_training(&bench, &mut random, name, &run(name), start, STEPS);
        println!("{name}: {kills} kills");
        assert!(kills >= 3, "only {kills} kills hit; change the delays");
        run(name).args(&["--resume"]).ok();
        assert!(bench.weights(name) == bench.weights(&whole), "{name}: the weights differ");
        assert_same_losses(&bench, name, &whole, STEPS);
    }
}

#[test]
fn killed_while_exporting_a_checkpoint_it_is_whole_or_absent() {
    let bench = Bench::tiny();
    let mut random = Random::new(seed());
    let run = |output: &str| steps(&bench, output, 3).args(&["--save-every", "3"]);
    run("whole").ok();
    for attempt in 0..5 {
        let output = format!("killed-{attempt}");
        let running = run(&output).spawn();
        let folder = bench.path(&output).join("checkpoint-3");
        running.wait_until(|| folder.exists());
        std::thread::sleep(Duration::from_micros(random.below(6000)));
        running.signal(libc::SIGKILL);
        running.wait();
        let weights = folder.join("model.safetensors");
        if weights.exists() {
            assert!(std::fs::read(weights).unwrap() == bench.weights("whole"), "half an export has its name");
        }
        run(&output).args(&["--resume"]).ok();
        assert!(bench.weights(&output) == bench.weights("whole"));
        let saved = std::fs::read(folder.join("model.safetensors")).expect("who goes on writes it");
        assert!(saved == bench.weights("whole"), "what was cut off is made up for");
    }
}

#[test]
fn interrupted_on_disk_a_run_ends_the_same() {
    interrupted(&["--offload", "disk"]);
}

#[test]
fn interrupted_in_host_memory_a_run_ends_the_same() {
    interrupted(&["--offload", "host"]);
}

#[test]
fn interrupted_without_offload_a_run_ends_the_same() {
    interrupted(&["--offload", "none"]);
}

#[test]
fn state_in_memory_is_as_durable_as_its_last_save() {
    let bench = Bench::tiny();
    let run = |output: &str| steps(&bench, output, STEPS).args(&["--offload", "none", "--save-every", "5"]);
    run("whole").ok();
    let running = run("killed").spawn();
    // The save goes on beside the steps after it; its folder is written when it is durable.
    let saved = bench.path("killed").join("checkpoint-10").join("model.safetensors");
    assert!(running.wait_until(|| saved.is_file() && bench.steps_so_far("killed") >= 12));
    running.signal(libc::SIGKILL);
    running.wait();
    let resumed = run("killed").args(&["--resume"]).ok();
    let step = resumed.stderr.split("resumed at step ").nth(1).unwrap().split(' ').next().unwrap();
    let step: u64 = step.parse().unwrap();
    assert!(step >= 10 && step.is_multiple_of(5), "{step}");
    assert!(bench.weights("killed") == bench.weights("whole"));
    assert_eq!(bench.steps("killed"), (1..=STEPS).collect::<Vec<_>>());
}

#[test]
fn state_is_not_overwritten() {
    let bench = Bench::tiny();
    for (offload, signal) in [("disk", None), ("host", Some(libc::SIGINT)), ("none", Some(libc::SIGTERM))] {
        let run = || steps(&bench, offload, 200).args(&["--offload", offload]);
        let running = run().spawn();
        running.wait_until(|| bench.steps_so_far(offload) >= 2);
        running.signal(signal.unwrap_or(libc::SIGKILL));
        let ended = running.wait();
        assert_eq!(ended.code(), signal.map(|_| 130));
        let state = || {
            let dir = bench.path(offload).join(".terrace");
            ["state.bin", "manifest.bin"].map(|name| std::fs::read(dir.join(name)).unwrap())
        };
        let (before, metrics) = (state(), bench.metrics(offload));
        run().fails(1, &["already holds training state", "at step ", "--resume", "remove the directory"]);
        assert!(before == state(), "--offload {offload}: the refused run touched the state");
        assert_eq!(metrics, bench.metrics(offload));
    }
}

/// A copy of a model's weights, half of it or all, is as large as the model.
#[test]
fn a_copy_of_weights_that_is_interrupted_is_removed() {
    let shape = Shape { hidden: 256, intermediate: 1024, layers: 24, ..Shape::TINY };
    let bench = Bench::with(&shape);
    let disk = bench.path("disk");
    let is_copying = || std::fs::read_dir(&disk).is_ok_and(|mut dirs| dirs.next().is_some());
    let eval = cmd(&["eval", "--json", "--threads", "2", "--seq-len", "24"]);
    let eval = eval.path("--model", &bench.path("model")).path("--data", &bench.path("data.jsonl"));
    let generate =
        bench.generate("model").args(&["--prompt-ids", "1,2", "--max-new-tokens", "60", "--ignore-eos"]);
    for (run, signal) in [(generate, libc::SIGINT), (eval, libc::SIGTERM)] {
        let run = run.args(&["--offload", "disk", "--disk-cache", "none"]).path("--disk", &disk);
        let running = run.spawn();
        assert!(running.wait_until(is_copying));
        running.signal(signal);
        let ended = running.wait();
        assert_eq!(ended.code(), Some(130), "{}", ended.stderr);
        assert!(ended.stderr.ends_with("error: interrupted\n"), "{}", ended.stderr);
        assert!(ended.stdout.is_empty(), "{}", ended.stdout);
        assert!(!is_copying(), "something is left on the disk");
    }
}

/// With a profile, which is measured once: without one every run would spend most of its time on that.
fn steps(bench: &Bench, output: &str, steps: u64) -> Cmd {
    static PROFILE: OnceLock<Vec<u8>> = OnceLock::new();
    let measured = PROFILE.get_or_init(|| {
        let folder = Bench::empty();
        let profile = folder.path("profile.json");
        // The disk of every bench.
        let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let calibrate = cmd(&["calibrate", "--quick", "--threads", "2"]).path("--disk", disk);
        calibrate.path("--output", &profile).ok();
        std::fs::read(profile).unwrap()
    });
    let profile = bench.path("profile.json");
    if !profile.exists() {
        std::fs::write(&profile, measured).unwrap();
    }
    bench.finetune(output).path("--profile", &profile).args(&["--steps", &steps.to_string()])
}

/// Kills `command`, and what resumes it, at random instants until all steps are done. Gives the number of kills.
fn kill_while_training(
    bench: &Bench,
    random: &mut Random,
    output: &str,
    fresh: &Cmd,
    start: f64,
    steps: u64,
) -> usize {
    let mut command = fresh.clone();
    let (mut kills, mut done) = (0, 0);
    for attempt in 0.. {
        // What a run has got to decides when it dies, so that a busy machine changes little.
        let running = command.spawn();
        let more = random.below(4) as usize;
        if more > 0 {
            running.wait_until(|| bench.steps_so_far(output) >= done + more);
        }
        // While it loads, or at any moment of a step: the whole of a start is as long as many short steps.
        let step = bench.last_step_seconds(output).filter(|_| more > 0);
        let most = step.map_or(0.6 * start, |seconds| 1.2 * seconds);
        std::thread::sleep(Duration::from_secs_f64(most * random.unit()));
        running.signal(libc::SIGKILL);
        let ended = running.wait();
        let before = std::mem::replace(&mut done, bench.steps_so_far(output));
        println!("attempt {attempt}: {more} more after {before}, {done} steps, {:?}", ended.signal());
        match ended.signal() {
            Some(signal) => assert_eq!(signal, libc::SIGKILL),
            None if ended.code() == Some(0) => break,
            // Killed before the first commit, the time before.
            None => {
                assert_no_state(&ended);
                command = fresh.clone();
                continue;
            }
        }
        kills += 1;
        assert!(kills < 300, "the run makes no progress");
        command = fresh.clone().args(&["--resume"]);
        if done as u64 >= steps {
            break;
        }
    }
    kills
}

fn assert_same_losses(bench: &Bench, output: &str, whole: &str, steps: u64) {
    let losses = |output: &str| bench.metrics(output).iter().map(|m| m["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(bench.steps(output), (1..=steps).collect::<Vec<_>>(), "one line a step");
    assert_eq!(losses(output), losses(whole));
}

fn kill_after(command: &Cmd, seconds: f64) -> Ended {
    let running = command.spawn();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    running.signal(libc::SIGKILL);
    running.wait()
}

/// Resumes, or starts again where there is nothing to resume.
fn finish_from_anything(bench: &Bench, output: &str) {
    let resumed = steps(bench, output, STEPS).args(&["--resume"]).run();
    if resumed.code() != Some(0) {
        assert_no_state(&resumed);
        steps(bench, output, STEPS).ok();
    }
}

fn assert_no_state(ended: &Ended) {
    assert_eq!(ended.code(), Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("holds no training state"), "{}", ended.stderr);
}

/// Steps that no run comes to are not all gone through before the first.
#[test]
fn a_run_of_a_billion_steps_begins() {
    let bench = Bench::tiny();
    let row = |at: usize| {
        format!("{{\"input_ids\": [1, 2, 3], \"labels\": [1, {0}, {0}]}}\n", if at == 3 { -100 } else { 2 })
    };
    std::fs::write(bench.path("masked.jsonl"), (0..40).map(row).collect::<String>()).unwrap();
    let run = bench.finetune("out").without("--data").path("--data", &bench.path("masked.jsonl"));
    let running =
        run.args(&["--steps", "1000000000", "--scheduler", "constant", "--offload", "none"]).spawn();
    let began = running.wait_until(|| bench.steps_so_far("out") >= 1);
    running.signal(libc::SIGINT);
    assert!(began, "{}", running.wait().stderr);
}

fn interrupted(placement: &[&str]) {
    let bench = Bench::tiny();
    let run = |output: &str| steps(&bench, output, 60).args(placement);
    run("whole").ok();
    let running = run("stopped").spawn();
    assert!(running.wait_until(|| bench.steps_so_far("stopped") >= 3));
    running.signal(libc::SIGINT);
    let ended = running.wait();
    assert_eq!(ended.code(), Some(130), "{}", ended.stderr);
    for part in [
        "stopping after this step",
        "median step ",
        "waiting for weights",
        "error: interrupted; the last finished step is saved, --resume",
    ] {
        assert!(ended.stderr.contains(part), "{}", ended.stderr);
    }
    let done = bench.steps("stopped").len();
    assert!((3..60).contains(&done), "{done}");
    assert!(!bench.path("stopped").join("model.safetensors").exists());
    let resumed = run("stopped").args(&["--resume"]).ok();
    assert!(resumed.stderr.contains(&format!("resumed at step {done} ")), "{}", resumed.stderr);
    assert!(bench.weights("stopped") == bench.weights("whole"), "{placement:?}: the weights differ");
    assert_eq!(bench.steps("stopped"), (1..=60).collect::<Vec<_>>());
}
