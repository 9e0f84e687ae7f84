//! What is said before a run: `calibrate` and `plan`, and that they agree with the runs they speak of.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use support::{Bench, Cmd, cmd};

/// A machine with round figures.
const MACHINE: [&str; 12] = [
    "--gpu-memory",
    "80GiB",
    "--host-memory",
    "512GiB",
    "--link",
    "25GB",
    "--tflops",
    "400",
    "--disk-read",
    "7GB",
    "--disk-write",
    "5GB",
];

fn plan(bench: &Bench) -> Cmd {
    cmd(&["plan", "--threads", "2", "--device", "cpu"]).path("--model", &bench.path("model")).args(&[
        "--seq-len",
        "24",
        "--batch-size",
        "2",
    ])
}

/// A run that finds no profile but those that a test makes.
fn alone(command: Cmd, bench: &Bench) -> Cmd {
    command.environment("XDG_CACHE_HOME", bench.path("cache").to_str().unwrap())
}

/// The lines of a memory plan.
fn terms(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| line.contains(" planned") || line.contains(" × ") && line.starts_with("  "))
        .collect()
}

#[test]
fn the_plan_is_that_of_the_run() {
    let bench = Bench::tiny();
    let flags = ["--state", "bf16", "--grad-accum", "2", "--host-memory", "64MiB"];
    let document = alone(plan(&bench), &bench).args(&flags).args(&["--json"]).ok().json();
    let planned = alone(plan(&bench), &bench).args(&flags).ok();
    let disk = bench.path("disk");
    let train =
        bench.finetune("out").args(&flags).args(&["--steps", "4", "--device", "cpu"]).path("--disk", &disk);
    let ended = alone(train, &bench).ok();
    assert!(terms(&planned.stdout).len() > 8, "{}", planned.stdout);
    assert_eq!(terms(&planned.stdout), terms(&ended.stderr));
    // A step in the middle does what was said, and writes a manifest besides.
    let step = &bench.metrics("out")[2];
    for name in ["disk_read_bytes", "disk_write_bytes"] {
        let (said, done) = (document["plan"][name].as_u64().unwrap(), step[name].as_u64().unwrap());
        // Weights that are used again may still be in memory.
        let more = if name == "disk_read_bytes" { 512 << 10 } else { 64 << 10 };
        assert!(done >= said && done <= said + more, "{name}: {said} planned, {done} done");
    }
    assert!(step["floor_seconds"].as_f64().unwrap() > 0.0, "{step}");
    let fraction = step["floor_seconds"].as_f64().unwrap() / step["step_seconds"].as_f64().unwrap();
    assert!((step["floor_fraction"].as_f64().unwrap() / fraction - 1.0).abs() < 1e-6, "{step}");
    assert!(step["bound_by"].is_string(), "{step}");
    assert!(
        ended.stderr.contains("of floor (bound by") && ended.stderr.contains("median step"),
        "{}",
        ended.stderr
    );
}

#[test]
fn models_that_could_not_run_here() {
    for (params, layers) in [("40b", 50..90), ("175b", 80..130)] {
        let run = cmd(&["plan", "--params", params, "--state", "compact", "--batch-size", "4", "--json"])
            .args(&MACHINE);
        let cached = run.ok().json()["plan"]["disk_read_bytes"].as_f64().unwrap();
        let document = run.args(&["--disk-cache", "none"]).ok().json();
        let model = &document["model"];
        assert!(layers.contains(&model["layers"].as_u64().unwrap()), "{model}");
        let plan = &document["plan"];
        let parameters = model["parameters"].as_u64().unwrap() as f64;
        // Two generations of 5.1 bytes; weights read twice, but those of the head, and state once.
        let disk = plan["disk_bytes"].as_f64().unwrap() / parameters;
        let (read, write) =
            (plan["disk_read_bytes"].as_f64().unwrap(), plan["disk_write_bytes"].as_f64().unwrap());
        assert!((10.0..10.5).contains(&disk), "{disk}");
        assert!(
            (8.7..9.2).contains(&(read / parameters)) && (5.0..5.2).contains(&(write / parameters)),
            "{plan}"
        );
        assert!(cached < read, "{cached} with copies");
        let seconds = plan["seconds"]["disk"].as_f64().unwrap();
        assert!((seconds / (read / 7e9 + write / 5e9) - 1.0).abs() < 0.01, "{plan}");
        let fastest =
            document["choices"].as_array().unwrap().iter().filter(|row| row["fastest"] == true).count();
        assert_eq!(fastest, 1);
    }
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let tight = ["--host-memory", "1GiB", "--gpu-memory", "1GiB"];
    cmd(&["plan", "--params", "40b"])
        .args(&tight)
        .fails(2, &["is too small: this run needs at least", "Raise it to"]);
    let space = ["--disk-space", "400GiB"];
    cmd(&["plan", "--params", "40b"]).args(&MACHINE).args(&space).fails(
        2,
        &["--disk-space of 400 GiB is too small", "choose a smaller --state", "these fit", "compact"],
    );
    cmd(&["plan", "--params", "7"]).fails(2, &["--params", "config.json"]);
    cmd(&["plan"]).fails(2, &["--model", "--params"]);
    cmd(&["plan", "--params", "many"]).fails(2, &["40b"]);
    let bench = Bench::tiny();
    let alone = bench.path("config.json");
    fs::copy(bench.path("model").join("config.json"), &alone).unwrap();
    cmd(&["plan"]).path("--model", &alone).ok();
    fs::write(&alone, "[]").unwrap();
    cmd(&["plan"]).path("--model", &alone).fails(2, &["config.json"]);
}

fn calibrated(bench: &Bench) -> Value {
    let disk = bench.path("measured");
    fs::create_dir_all(&disk).unwrap();
    let run =
        cmd(&["calibrate", "--quick", "--threads", "2", "--device", "cpu", "--json"]).path("--disk", &disk);
    let ended = alone(run, bench).ok();
    assert!(
        ended.stderr.contains("host memory, 2 threads") && ended.stderr.contains("none in use"),
        "{}",
        ended.stderr
    );
    assert!(support::files(&disk).is_empty(), "nothing is left on the disk");
    ended.json()
}

fn default_profile(bench: &Bench) -> std::path::PathBuf {
    bench.path("cache/terrace/profile.json")
}

fn change(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut document: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    change(&mut document);
    fs::write(path, document.to_string()).unwrap();
}

#[test]
fn a_calibration_is_found_by_the_machine_it_is_of() {
    let bench = Bench::tiny();
    let document = calibrated(&bench);
    assert_eq!(document["calibration"]["machine"]["threads"], 2);
    assert_eq!(document["calibration"]["gemm"].as_array().unwrap().len(), 10);
    assert_eq!(document["calibration"]["optimizer"].as_array().unwrap().len(), 5);
    assert_eq!(document["calibration"]["card"], Value::Null);
    let profile = default_profile(&bench);
    let stored: Value = serde_json::from_str(&fs::read_to_string(&profile).unwrap()).unwrap();
    assert_eq!(stored, document);

    // Found: the floor is made of its figures, whatever they are.
    change(&profile, |d| {
        d["calibration"]["memory"] = json!({ "read_bytes_per_second": 1.0, "copy_bytes_per_second": 1.0, "update_bytes_per_second": 1.0, });
    });
    let train = |out: &str| alone(bench.finetune(out).args(&["--steps", "2", "--device", "cpu"]), &bench);
    let disk = bench.path("measured/state");
    let ended = train("found").path("--disk", &disk).ok();
    assert_eq!(bench.metrics("found")[0]["bound_by"], "memory", "{}", ended.stderr);
    assert!(bench.metrics("found")[0]["floor_seconds"].as_f64().unwrap() > 1e5);

    // Of another machine: said, and not used. Named: used, and said.
    change(&profile, |d| d["calibration"]["machine"]["cpu"] = "Abacus 9".into());
    let ended = train("other").ok();
    assert!(ended.stderr.contains("not used") && ended.stderr.contains("Abacus 9"), "{}", ended.stderr);
    assert!(bench.metrics("other")[0]["floor_seconds"].as_f64().unwrap() < 1e3);
    let ended = train("named").path("--profile", &profile).ok();
    assert!(ended.stderr.contains("Abacus 9") && ended.stderr.contains("all the same"), "{}", ended.stderr);
    assert_eq!(bench.metrics("named")[0]["bound_by"], "memory");
}

#[test]
fn profiles_that_cannot_be_used() {
    let bench = Bench::tiny();
    let profile = bench.path("profile.json");
    let refused = |text: &str, parts: &[&str]| {
        fs::write(&profile, text).unwrap();
        let run = bench.finetune("out").args(&["--steps", "1"]).path("--profile", &profile);
        run.fails(2, &[&["--profile", "profile.json", "terrace calibrate"], parts].concat());
        cmd(&["plan", "--params", "1b"]).path("--profile", &profile).fails(2, parts);
    };
    refused("{", &["not JSON"]);
    refused("{\"version\": 8}", &["format version 8, this build reads 1"]);
    refused("{\"version\": 1, \"calibration\": {\"version\": 2}}", &["\"calibration\"", "version 2"]);
    refused("{\"version\": 1, \"calibration\": {\"version\": 1}}", &["\"calibration\"", "machine"]);
    refused("{\"version\": 1}", &["section"]);

    // At the default place it is no reason to stop.
    fs::create_dir_all(bench.path("cache/terrace")).unwrap();
    fs::write(default_profile(&bench), "{").unwrap();
    let ended = alone(bench.finetune("out").args(&["--steps", "1"]), &bench).ok();
    assert!(ended.stderr.contains("not used") && ended.stderr.contains("not JSON"), "{}", ended.stderr);

    let calibrate = || cmd(&["calibrate", "--quick"]);
    calibrate().path("--disk", &bench.path("nowhere")).fails(2, &["--disk", "nowhere", "no such folder"]);
    fs::write(&profile, "{}").unwrap();
    calibrate().path("--output", &profile).fails(2, &["--output", "profile.json", "cannot take a profile"]);
    assert_eq!(fs::read_to_string(&profile).unwrap(), "{}");
}
