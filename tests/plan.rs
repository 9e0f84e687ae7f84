//! What is said before a run: `calibrate` and `plan`, and that they agree with the runs they speak of.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use support::{Bench, Cmd, cmd};

/// A machine with round figures.
const MACHINE: [&str; 16] = [
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
    "--dram",
    "400GB",
    "--gpu-bandwidth",
    "2TB",
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
        // Two generations of 5.1 bytes; state read once, and weights once more for backward, but those of the head and those that
        // stay on the card.
        let stay = document["memory"].as_array().unwrap().iter();
        let stay = stay
            .filter(|term| term["purpose"].as_str().unwrap().starts_with("weights that stay on the device"));
        let stay = stay.map(|term| term["bytes"].as_f64().unwrap()).sum::<f64>() / parameters;
        let disk = plan["disk_bytes"].as_f64().unwrap() / parameters;
        let (read, write) =
            (plan["disk_read_bytes"].as_f64().unwrap(), plan["disk_write_bytes"].as_f64().unwrap());
        assert!((10.0..10.5).contains(&disk), "{disk}");
        assert!(
            (6.7..7.2).contains(&(read / parameters + stay)) && (5.0..5.2).contains(&(write / parameters)),
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

/// Eight cards on two nodes: each node has half of the state, the network carries the other half's share of every group.
#[test]
fn several_ranks_share_a_step() {
    let flags = ["--offload", "disk", "--disk-cache", "none", "--batch-size", "2", "--json"];
    let run = |more: &[&str]| cmd(&["plan", "--params", "40b"]).args(&flags).args(&MACHINE).args(more);
    let rates = ["--network-bandwidth", "10GB", "--peer-bandwidth", "100GB"];
    let alone = run(&[]).ok().json();
    assert_eq!(run(&["--ranks", "1", "--nodes", "1"]).ok().json(), alone);
    let shared = run(&["--ranks", "8", "--nodes", "2"]).args(&rates).ok().json();
    assert_eq!((&shared["ranks"], &shared["nodes"]), (&json!(8), &json!(2)));
    let of = |document: &Value, name: &str| document["plan"][name].as_f64().unwrap();
    let ratio = |name: &str| of(&shared, name) / of(&alone, name);
    assert_eq!(ratio("tokens"), 8.0);
    assert_eq!(ratio("operations"), 1.0, "those of a card");
    for document in [&alone, &shared] {
        // Weights of whole groups stay on a card as long as one more has room; a shard's buffers leave more of it.
        let stays = document["memory"].as_array().unwrap().iter();
        let stays = stays.map(|term| term["purpose"].as_str().unwrap());
        let stays = stays.filter(|purpose| purpose.starts_with("weights that stay on the device"));
        assert_eq!(stays.count(), 1);
        let left = 80.0 * (1u64 << 30) as f64 - of(document, "device_bytes");
        assert!((0.0..1.5e9).contains(&left), "a block's weights take 1.33 GB, {left} bytes are left");
    }
    for name in ["disk_bytes", "disk_read_bytes", "disk_write_bytes"] {
        assert!((ratio(name) - 0.5).abs() < 0.01, "{name}: {} of a node", ratio(name));
    }
    assert!((ratio("steps_until_1200_tb") - 2.0).abs() < 0.01);

    // Weights of two bytes go up, and are gathered, twice a step, but once where they stay; gradients are scattered in four bytes.
    let term = |document: &Value, purpose: &str| {
        let terms = document["memory"].as_array().unwrap().iter();
        let named = terms.filter(|term| term["purpose"].as_str().unwrap().starts_with(purpose));
        named.map(|term| term["bytes"].as_f64().unwrap()).sum::<f64>()
    };
    let parameters = shared["model"]["parameters"].as_f64().unwrap();
    let uploaded = |document: &Value| 4.0 * parameters - term(document, "weights that stay on the device");
    let gathered = uploaded(&shared);
    let exchanged = gathered + 4.0 * parameters;
    for (name, resource, part, rate) in
        [("network_bytes", "network", 1.0 / 2.0, 10e9), ("peer_bytes", "peers", 3.0 / 4.0, 100e9)]
    {
        let bytes = of(&shared, name);
        assert!((bytes / (part * exchanged) - 1.0).abs() < 0.005, "{name}: {bytes} of {exchanged}");
        let seconds = shared["plan"]["seconds"][resource].as_f64().unwrap();
        assert!((seconds * rate / bytes - 1.0).abs() < 1e-6, "{resource}: {seconds} s");
        assert!(alone["plan"].get(name).is_none() && alone["plan"]["seconds"].get(resource).is_none());
    }
    // A card uploads an eighth of the weights and brings down an eighth of the gradients; what is of its batch stays.
    let downloaded = 2.0 * parameters;
    for (name, [of_one, of_eight]) in
        [("upload_bytes", [uploaded(&alone), gathered]), ("download_bytes", [downloaded, downloaded])]
    {
        let [one, eight] = [of(&alone, name) - of_one, of(&shared, name) - of_eight / 8.0];
        assert!((one - eight).abs() < 0.01 * of_eight, "{name}: {one} and {eight} beside weights");
    }
    // Every row of the table is of as many.
    let rows = shared["choices"].as_array().unwrap().iter();
    let rows: Vec<&Value> = rows.filter(|row| row.get("refused").is_none()).collect();
    assert!(rows.iter().all(|row| row["network_bytes"].as_f64().unwrap() > 0.0), "{shared}");
    assert!(rows.iter().any(|row| row["disk_bytes"] == shared["plan"]["disk_bytes"]
        && row["seconds"] == shared["plan"]["seconds"]));
    let [least, expected] = ["step_seconds", "expected_seconds"].map(|name| of(&shared, name));
    let network = shared["plan"]["seconds"]["network"].as_f64().unwrap();
    assert!(least >= network && expected >= least, "{least} and {expected} s, {network} of network");

    let text = cmd(&["plan", "--params", "8b"]).args(&MACHINE).args(&["--ranks", "8", "--nodes", "2"]);
    let text = text.args(&rates[..2]).ok().stdout;
    for part in [
        "8192 tokens a step (8 ranks × 1 × 1 × 1024)",
        "8 ranks, 4 on each of 2 nodes",
        "no time for that without --peer-bandwidth",
        "1,200 TB are written by a node",
        "tokens a step that hide the network",
    ] {
        assert!(text.contains(part), "{part:?} is in {text}");
    }
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    for (more, parts) in [
        (&["--ranks", "0"][..], &["--ranks", "at least 1"][..]),
        (&["--ranks", "8", "--nodes", "3"], &["--ranks 8", "--nodes 3", "for example 9"]),
        (&["--nodes", "2"], &["--ranks 1", "--nodes 2", "for example 2"]),
        (
            &["--ranks", &usize::MAX.to_string(), "--nodes", "2"],
            &["--ranks 18446744073709551615", "more than"],
        ),
        (&["--network-bandwidth", "10GB"], &["--ranks"]),
        (&["--ranks", "8", "--network-bandwidth", "0"], &["--network-bandwidth of 0"]),
        (&["--ranks", "8", "--generate"], &["--generate", "cannot be used with", "--ranks"]),
    ] {
        cmd(&["plan", "--params", "8b"]).args(&MACHINE).args(more).fails(2, parts);
    }
    let bench = Bench::tiny();
    let ranks = ["--ranks", "2"];
    alone(plan(&bench), &bench).args(&ranks).fails(2, &["--ranks 2 are cards", "--gpu-memory"]);
    // A plan of several says what they would need, and is none of a run.
    let run = cmd(&["plan", "--gpu-memory", "1GiB", "--seq-len", "24"]).path("--model", &bench.path("model"));
    alone(run, &bench).args(&ranks).path("--save", &bench.path("plan.json")).ok();
    let document = read(&bench.path("plan.json"));
    assert_eq!((&document["run"]["ranks"], document["run"].get("nodes")), (&json!(2), None));
    run_of(&bench, "plan.json", "out").fails(2, &["run.ranks is 2", "runs one rank", "terrace plan --save"]);
    assert!(saved(&bench, "one.json", &[])["run"].get("ranks").is_none());
}

#[test]
fn generation_is_planned() {
    let flags = ["--generate", "--batch-size", "16", "--seq-len", "512", "--max-new-tokens", "64"];
    let machine = ["--disk-cache", "none", "--offload", "disk", "--device-memory", "40GiB"];
    let run = |weights: &str| {
        let run = cmd(&["plan", "--params", "70b", "--json", "--weights", weights]).args(&flags);
        run.args(&MACHINE).args(&machine).ok().json()
    };
    let [bf16, int8] = ["bf16", "int8"].map(run);
    let of = |document: &Value, name: &str| document["plan"][name].as_f64().unwrap();
    for (document, bytes) in [(&bf16, 2.0), (&int8, 1.08)] {
        let parameters = document["model"]["parameters"].as_f64().unwrap();
        let [read, weights] =
            ["disk_read_bytes", "device_memory_bytes"].map(|name| of(document, name) / parameters);
        // Keys and values of the prompts and half of the new tokens are read there, and those of one token are written.
        let position = document["kv_position_bytes"].as_f64().unwrap();
        let layers = document["model"]["layers"].as_f64().unwrap();
        assert_eq!(position, layers * 2.0 * 8.0 * 128.0 * 2.0);
        let weights = weights - 16.0 * (512.0 + 32.0 + 1.0) * position / parameters;
        assert!((weights / bytes - 1.0).abs() < 0.03, "{weights} bytes a parameter");
        let stay = document["memory"].as_array().unwrap().iter();
        let stay = stay
            .filter(|term| term["purpose"].as_str().unwrap().starts_with("weights that stay on the device"));
        let stay = stay.map(|term| term["bytes"].as_f64().unwrap()).sum::<f64>() / parameters;
        assert!(stay > 0.2 && (read + stay - weights).abs() < 0.01, "{read} and {stay} of {weights}");
        assert_eq!(of(document, "upload_bytes"), of(document, "disk_read_bytes"));
        let seconds = of(document, "disk_read_bytes") / 7e9;
        assert!((of(document, "token_seconds") / seconds - 1.0).abs() < 1e-6, "{document}");
        assert!((of(document, "tokens_per_second") * seconds / 16.0 - 1.0).abs() < 1e-6, "{document}");
        assert_eq!(document["plan"]["bound_by"], "disk");
    }
    // What leaves the device makes room for weights that stay there, and need no link.
    for tier in ["host", "disk"] {
        let run = cmd(&["plan", "--params", "70b", "--json", "--weights", "bf16", "--kv", tier]).args(&flags);
        let document = run.args(&MACHINE).args(&machine).ok().json();
        assert_eq!(document["kv"], tier);
        let position = |part: &str| document[&format!("kv_{part}position_bytes")].as_f64().unwrap();
        let (all, away, on_disk) = (position(""), position("away_"), position("disk_"));
        assert_eq!(all, bf16["kv_position_bytes"].as_f64().unwrap());
        // Beside one more group of weights there is room for some blocks' keys and values.
        assert!(0.0 < away && away < all, "{away} of {all}");
        assert_eq!(on_disk, if tier == "disk" { away } else { 0.0 });
        let more = |name: &str| of(&document, name) - of(&bf16, name);
        let (there, new) = (16.0 * 544.0, 16.0);
        let fewer_weights = more("disk_read_bytes") - there * on_disk;
        assert!(fewer_weights < -1e9, "{fewer_weights}");
        assert_eq!(more("upload_bytes"), fewer_weights + there * away);
        assert_eq!([more("download_bytes"), more("disk_write_bytes")], [new * away, new * on_disk]);
    }
    assert!(of(&int8, "token_seconds") < 0.5 * of(&bf16, "token_seconds"), "all that fits stays");
    let text = cmd(&["plan", "--params", "70b"]).args(&flags).args(&MACHINE).args(&machine).ok().stdout;
    for part in ["16 prompts of 512 tokens, 64 new tokens each", "bound by disk", "int4", "← fastest"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for (more, part) in [
        (["--state", "split"], "cannot be used with"),
        (["--max-new-tokens", "9999999"], "positions together, and the model has"),
        (["--max-new-tokens", &usize::MAX.to_string()], "positions together, and the model has"),
    ] {
        cmd(&["plan", "--params", "8b", "--generate"]).args(&more).fails(2, &[part]);
    }
    // What a prompt takes at least does not depend on what comes after it; a token's attention does.
    let times = |new: &str| {
        let run =
            cmd(&["plan", "--params", "8b", "--json", "--generate", "--seq-len", "512", "--offload", "none"]);
        let document = run.args(&["--max-new-tokens", new]).args(&MACHINE).ok().json();
        ["prompt_seconds", "operations"].map(|name| document["plan"][name].as_f64().unwrap())
    };
    let ([short, few], [long, many]) = (times("16"), times("4096"));
    assert_eq!(short, long);
    assert!(many > 1.02 * few, "{few} and {many} operations");
}

/// Generation within too little memory is refused by its plan as it would be by itself.
#[test]
fn the_plan_of_generation_is_that_of_the_run() {
    let bench = Bench::tiny();
    let flags = ["--host-memory", "1MiB", "--max-new-tokens", "5", "--offload", "disk", "--device", "cpu"];
    let plan = cmd(&["plan", "--generate", "--threads", "2", "--seq-len", "3"]);
    let plan = plan.path("--model", &bench.path("model")).args(&flags);
    let run = bench.generate("model").args(&["--prompt-ids", "1,2,3"]).args(&flags);
    let [planned, ended] = [plan, run.path("--disk", &bench.path("disk"))]
        .map(|command| alone(command, &bench).fails(2, &["--host-memory of 1.00 MiB is too small"]).stderr);
    let refusal = |text: &str| text.lines().filter(|line| line.contains(" × ")).map(str::to_owned).collect();
    let [planned, ended]: [Vec<String>; 2] = [&planned, &ended].map(|text| refusal(text));
    assert!(planned.len() > 4, "{planned:?}");
    assert_eq!(planned, ended);
}

/// An update that waits for the norm leaves the disk idle in backward, one that does not goes on through both.
#[test]
fn clipping_takes_its_time() {
    let [clipped, unclipped] = ["1", "0"].map(|norm| {
        let flags =
            ["--batch-size", "4", "--grad-accum", "8", "--disk-cache", "none", "--clip", norm, "--json"];
        let run = cmd(&["plan", "--params", "40b", "--state", "compact"]).args(&flags).args(&MACHINE);
        let plan = run.ok().json()["plan"].clone();
        let [least, expected] = ["step_seconds", "expected_seconds"].map(|name| plan[name].as_f64().unwrap());
        assert!(expected >= least, "{plan}");
        expected
    });
    assert!(unclipped < clipped, "{unclipped} and {clipped} seconds");
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let tight = ["--host-memory", "1GiB", "--gpu-memory", "1GiB"];
    cmd(&["plan", "--params", "40b"])
        .args(&tight)
        .fails(2, &["is too small: this run needs at least", "Raise it to"]);
    let space = ["--disk-space", "400GiB"];
    cmd(&["plan", "--params", "40b"])
        .args(&MACHINE)
        .args(&space)
        .fails(2, &["--disk-space of 400 GiB is too small", "use --state", "these fit", "compact"]);
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
    assert_eq!(document["calibration"]["gemm"].as_array().unwrap().len(), 19);
    assert_eq!(document["calibration"]["optimizer"].as_array().unwrap().len(), 6);
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
    let section = |threads: u64, rate: f64| {
        let machine = json!({ "cpu": "", "threads": threads, "card": null, "date": "", "terrace": "" });
        let gemm = json!([{ "dtype": "bf16", "of": "", "shape": [1, 1, 1], "operations_per_second": rate }]);
        let calibration = json!({ "version": 1, "machine": machine, "quick": false, "gemm": gemm });
        json!({ "version": 1, "calibration": calibration }).to_string()
    };
    refused(&section(0, 1.0), &["profile.json", "0 in \"machine.threads\" is no number of threads"]);
    refused(&section(2, -1.0), &["profile.json", "-1 in \"gemm.operations_per_second\" is no rate"]);

    // At the default place it is no reason to stop.
    fs::create_dir_all(bench.path("cache/terrace")).unwrap();
    fs::write(default_profile(&bench), "{").unwrap();
    let ended = alone(bench.finetune("out").args(&["--steps", "1"]), &bench).ok();
    assert!(ended.stderr.contains("not used") && ended.stderr.contains("not JSON"), "{}", ended.stderr);

    let calibrate = || cmd(&["calibrate", "--quick"]);
    calibrate().path("--disk", &bench.path("nowhere")).fails(2, &["--disk", "nowhere", "no such folder"]);
    calibrate().args(&["--sustained", "--disk", "."]).fails(2, &["--quick", "--sustained"]);
    cmd(&["calibrate", "--sustained"]).fails(2, &["--disk"]);
    let deep = bench.path("none/of/them/profile.json");
    calibrate()
        .path("--output", &deep)
        .fails(2, &["--output", "none/of/them; make it, or name another file"]);
    assert!(!bench.path("none").exists(), "a folder was made");
    fs::write(&profile, "{}").unwrap();
    calibrate().path("--output", &profile).fails(2, &["--output", "profile.json", "cannot take a profile"]);
    assert_eq!(fs::read_to_string(&profile).unwrap(), "{}");
}

/// A saved plan of the tiny model.
fn saved(bench: &Bench, name: &str, flags: &[&str]) -> Value {
    let path = bench.path(name);
    let said = alone(plan(bench), bench).args(flags).path("--save", &path).ok();
    assert!(said.stderr.contains("the plan is in") && said.stderr.contains(name), "{}", said.stderr);
    read(&path)
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A run of a plan, with state in a folder of its own.
fn run_of(bench: &Bench, plan: &str, out: &str) -> Cmd {
    let run = bench.finetune(out).args(&["--device", "cpu"]).path("--plan", &bench.path(plan));
    alone(run, bench)
}

#[test]
fn a_plan_is_run_as_it_was_saved() {
    let bench = Bench::tiny();
    let flags = ["--state", "bf16", "--grad-accum", "3", "--host-memory", "10MiB"];
    let plan_file = saved(&bench, "plan.json", &flags);
    assert_eq!(plan_file["version"], 1);
    assert_eq!(plan_file["model"]["layers"], 2);
    assert_eq!(plan_file["budget"], json!({ "host_bytes": 10 << 20, "device_bytes": null }));
    let said = alone(plan(&bench), &bench).args(&flags);
    let document = said.clone().args(&["--json"]).ok().json();
    for key in ["operations", "disk_read_bytes", "step_seconds", "bound_by"] {
        assert_eq!(plan_file["step"][key], document["plan"][key], "{key}");
    }
    assert_eq!(plan_file["memory"], document["memory"]);
    assert_eq!(plan_file["placement"], document["placement"]);
    assert!(plan_file["placement"].as_array().is_some_and(|lines| !lines.is_empty()), "{plan_file}");
    // More memory than was planned with changes nothing.
    let run = |out: &str| {
        run_of(&bench, "plan.json", out)
            .args(&["--steps", "3", "--host-memory", "1GiB"])
            .path("--save-plan", &bench.path(&format!("{out}.json")))
            .ok()
    };
    let (first, second) = (run("first"), run("second"));
    assert_eq!(terms(&first.stderr), terms(&said.ok().stdout));
    assert_eq!(terms(&second.stderr), terms(&first.stderr));
    for out in ["first", "second"] {
        let again = read(&bench.path(&format!("{out}.json")));
        for section in ["version", "model", "run", "windows", "bytes", "memory", "placement"] {
            assert_eq!(again[section], plan_file[section], "{section}");
        }
        let named = first.stderr.contains("weight slots") && first.stderr.contains("update slots");
        assert!(named, "the run says its windows: {}", first.stderr);
    }
    let losses = |out: &str| bench.metrics(out).iter().map(|m| m["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("first"), losses("second"));
    assert_eq!(bench.weights("first"), bench.weights("second"));
    // Without the file the planner takes other windows, and the same numbers come out.
    let free = bench.finetune("free").args(&["--device", "cpu", "--steps", "3", "--grad-accum", "3"]);
    let free = free.args(&["--state", "bf16"]).path("--save-plan", &bench.path("free.json"));
    alone(free, &bench).ok();
    assert_ne!(read(&bench.path("free.json"))["windows"], plan_file["windows"]);
    assert_eq!(bench.weights("free"), bench.weights("first"));
    // What a run saved is a plan, too.
    let run = run_of(&bench, "free.json", "again").args(&["--steps", "3"]);
    run.path("--save-plan", &bench.path("again.json")).ok();
    assert_eq!(read(&bench.path("again.json"))["windows"], read(&bench.path("free.json"))["windows"]);
}

#[test]
fn a_plan_without_its_table_of_places_is_run() {
    let bench = Bench::tiny();
    let whole = saved(&bench, "plan.json", &[]);
    let mut older = whole.clone();
    assert!(older.as_object_mut().unwrap().remove("placement").is_some());
    fs::write(bench.path("older.json"), older.to_string()).unwrap();
    let run = run_of(&bench, "older.json", "out").args(&["--steps", "1"]);
    run.path("--save-plan", &bench.path("done.json")).ok();
    let done = read(&bench.path("done.json"));
    assert_eq!((&done["windows"], &done["placement"]), (&older["windows"], &whole["placement"]));
}

#[test]
fn every_window_of_a_plan_is_that_of_its_run() {
    let bench = Bench::tiny();
    let document = saved(&bench, "plan.json", &[]);
    let changes = [
        ("weight_slots", json!(1)),
        ("chunk_elements", json!(3 << 14)),
        ("update_slots", json!(5)),
        ("gradient_groups", json!(1)),
        ("gradients_on_disk", json!(true)),
        ("activations_on_disk", json!(true)),
        ("copied_weights", json!(3)),
        ("copied_groups", json!(1)),
        ("packed_bytes", json!(8192)),
        ("kept_blocks", json!(1)),
        ("kept_on_disk", json!(1)),
        ("kept_slots", json!(3)),
        ("overlap", json!(false)),
    ];
    let windows = document["windows"].as_object().unwrap();
    let untested: Vec<&String> =
        windows.keys().filter(|key| changes.iter().all(|(changed, _)| changed != key)).collect();
    // The CPU has no memory of its own for signals, weights and state to stay in, or to have activations from; the last is what the model has.
    assert_eq!(
        untested,
        [
            "signals_stay",
            "uploads_ahead",
            "gradients_whole",
            "device_groups",
            "state_groups",
            "kept_on_host",
            "kept_blocks_max"
        ]
    );
    for (key, value) in changes {
        assert_ne!(document["windows"][key], value, "{key}: the plan chose another");
        let mut changed = document.clone();
        changed["windows"][key] = value;
        if key == "copied_weights" {
            // All state of a group has its weights among it.
            changed["windows"]["copied_groups"] = json!(3);
        }
        if key.starts_with("kept_") && key != "kept_blocks" {
            // Of two blocks one keeps in memory, and there are buffers for the other.
            let other = if key == "kept_slots" { ("kept_on_disk", 1) } else { ("kept_slots", 2) };
            changed["windows"]["kept_blocks"] = json!(1);
            changed["windows"][other.0] = json!(other.1);
        }
        fs::write(bench.path("changed.json"), changed.to_string()).unwrap();
        let run = run_of(&bench, "changed.json", key).args(&["--steps", "1"]);
        run.path("--save-plan", &bench.path("done.json")).ok();
        assert_eq!(read(&bench.path("done.json"))["windows"], changed["windows"], "{key}");
    }
}

/// Refusals of a plan, by what they say. Each changes the file, or gives flags.
#[test]
fn plans_that_a_run_contradicts_are_refused() {
    let bench = Bench::tiny();
    let document = saved(&bench, "plan.json", &["--grad-accum", "2", "--dtype", "bf16"]);
    let config = bench.path("ds.json");
    let refused = |section: &str, key: &str, value: Value, flags: &[&str], parts: &[&str]| {
        let mut changed = document.clone();
        if !section.is_empty() {
            changed[section][key] = value;
        }
        fs::write(bench.path("bad.json"), changed.to_string()).unwrap();
        let run = run_of(&bench, "bad.json", "out").args(&["--steps", "1"]).args(flags);
        let ended = run.fails(2, &[&["--plan", "bad.json"], parts].concat());
        let advice = ["terrace plan --save", "correct"];
        assert!(advice.iter().any(|advice| ended.stderr.contains(advice)), "{}", ended.stderr);
    };
    for (flags, parts) in [
        (&["--grad-accum", "3"][..], ["run.grad_accum is 2", "--grad-accum is 3"]),
        (&["--dtype", "fp32"], ["run.dtype is bf16", "--dtype is fp32"]),
        (&["--state", "compact"], ["run.state is split", "--state is compact"]),
        (&["--offload", "host"], ["run.offload is disk", "--offload is host"]),
        (&["--window", "3"], ["windows.weight_slots is 4", "--window is 3"]),
        (&["--durability", "checkpoint"], ["run.durability is step", "--durability is checkpoint"]),
        (&["--disk-cache", "none"], ["windows.copied_weights is 4", "--disk-cache: the number is 0"]),
        (&["--disk-cache", "1KiB"], ["windows.copied_weights", "but --disk-cache is 1.00 KiB"]),
        (&["--no-overlap"], ["windows.overlap is true", "--no-overlap: overlap is false"]),
        (&["--activations", "recompute"], ["windows.kept_blocks is 2", "--activations: the number is 0"]),
    ] {
        refused("", "", Value::Null, flags, &[parts[0], parts[1], "leave that out"]);
    }
    for (key, value, parts) in [
        ("batch_size", json!(4), ["run.batch_size is 4", "--batch-size is 2"]),
        ("seq_len", json!(16), ["run.seq_len is 16", "--seq-len is 24"]),
        ("device_memory", json!("own"), ["run.device_memory is own", "this run is host"]),
        ("grad_accum", json!(0), ["run.grad_accum is 0", "at least 1"]),
    ] {
        refused("run", key, value, &[], &parts);
    }
    refused("windows", "kept_blocks", json!(1), &["--activations", "keep"], &["kept_blocks is 1", "is 2"]);
    for (text, parts) in [
        (
            r#"{"gradient_accumulation_steps": 3}"#,
            ["run.grad_accum is 2", "gradient_accumulation_steps is 3"],
        ),
        (r#"{"fp16": {"enabled": true}}"#, ["run.dtype is bf16", "number type is fp16"]),
        (
            r#"{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}"#,
            ["run.offload is disk", "offload sections is host"],
        ),
    ] {
        fs::write(&config, text).unwrap();
        refused("", "", Value::Null, &["--config", config.to_str().unwrap()], &parts);
    }
    for (key, value) in [("layers", 3), ("hidden", 64), ("vocab", 97), ("kv_heads", 4), ("parameters", 7)] {
        let named = format!("model.{key} is {value}, but that of --model is ");
        refused("model", key, json!(value), &[], &[&named]);
    }
    let small = ["--host-memory", "256KiB"];
    refused("", "", Value::Null, &small, &["bytes.host is ", "256 KiB", "--host-memory", "raise"]);
    refused("bytes", "host", json!(1), &small, &["--host-memory of 256 KiB is too small", "needs at least"]);
    refused("windows", "chunk_elements", json!(1000), &[], &["chunks of 1000 elements", "16384"]);
    refused("windows", "gradient_groups", json!(0), &[], &["gradient_groups is 0", "at least 1"]);
    refused("windows", "kept_blocks", json!(9), &[], &["windows.kept_blocks is 9", "can only be 2"]);
    refused("windows", "signals_stay", json!(true), &[], &["windows.signals_stay is true", "only be false"]);
    // Nothing was made on the way.
    assert!(!bench.path("out/.terrace").exists());
    // Agreeing with the plan is no contradiction, and a note says where the bytes differ.
    let run = run_of(&bench, "plan.json", "out").args(&["--steps", "1", "--grad-accum", "2", "--clip", "0"]);
    let run = run.args(&["--scheduler", "constant"]);
    let ended = run.args(&["--state", "split", "--activations", "keep"]).ok();
    assert!(ended.stderr.contains("note: with the optimizer, the clipping"), "{}", ended.stderr);
    // State that is there keeps its chunks.
    let mut changed = document.clone();
    changed["windows"]["chunk_elements"] = json!(1 << 14);
    fs::write(bench.path("bad.json"), changed.to_string()).unwrap();
    let run = run_of(&bench, "bad.json", "out").args(&["--steps", "2", "--clip", "0", "--resume"]);
    let run = run.args(&["--scheduler", "constant"]);
    run.fails(2, &["bad.json", "windows.chunk_elements is 16384, but in this run it can only be "]);
}

#[test]
fn files_that_are_no_plans() {
    let bench = Bench::tiny();
    let document = saved(&bench, "plan.json", &["--offload", "host"]);
    let refused = |text: &str, parts: &[&str]| {
        fs::write(bench.path("bad.json"), text).unwrap();
        run_of(&bench, "bad.json", "out").fails(2, &[&["--plan", "bad.json"], parts].concat());
    };
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut changed = document.clone();
        change(&mut changed);
        changed.to_string()
    };
    let wrote = "terrace plan --save";
    refused("{", &["not a plan", wrote]);
    refused("{}", &["there is no version", wrote]);
    refused(&changed(&|d| d["version"] = json!(2)), &["version is 2, and this build reads 1", wrote]);
    refused(&changed(&|d| d["colour"] = json!("blue")), &["unknown field `colour`", wrote]);
    refused(&changed(&|d| d["windows"]["depth"] = json!(2)), &["unknown field `depth`", wrote]);
    refused(&changed(&|d| d["run"]["state"] = json!("int3")), &["unknown variant `int3`", wrote]);
    refused(
        &changed(&|d| drop(d["windows"].as_object_mut().unwrap().remove("overlap"))),
        &["missing field `overlap`", wrote],
    );
    refused(
        &changed(&|d| d["windows"]["gradients_on_disk"] = json!(true)),
        &["windows.gradients_on_disk is true", "run.offload is host"],
    );
    refused(
        &changed(&|d| d["windows"]["kept_on_disk"] = json!(2)),
        &["windows.kept_on_disk is 2", "run.offload is host"],
    );
    run_of(&bench, "nowhere.json", "out").fails(2, &["--plan", "nowhere.json", "check the path"]);
    let nowhere = bench.path("no/such/folder.json");
    alone(plan(&bench), &bench).path("--save", &nowhere).fails(1, &["--save", "folder.json"]);
    run_of(&bench, "plan.json", "out")
        .path("--save-plan", &nowhere)
        .fails(1, &["--save-plan", "folder.json"]);
}

/// Weights cross twice for every micro-batch instead of twice a step: with eight, and bf16, 32 bytes a parameter instead of 4.
#[test]
fn horizontal_accumulation_reads_weights_for_every_micro_batch() {
    let bench = Bench::with(&support::Shape { layers: 16, ..support::Shape::TINY });
    // State that is updated is master and moments, so that all reads of weights are for compute. An update that trails into the
    // next step would count there.
    let flags = [
        "--no-overlap",
        "--grad-accum",
        "8",
        "--state",
        "fp32",
        "--activations",
        "recompute",
        "--clip",
        "0",
        "--disk-cache",
        "none",
    ];
    let measured = ["vertical", "horizontal"].map(|how| {
        let path = bench.path(&format!("{how}.json"));
        let run = bench.finetune(how).args(&flags).args(&[
            "--steps",
            "3",
            "--device",
            "cpu",
            "--accumulation",
            how,
        ]);
        alone(run.path("--save-plan", &path), &bench).ok();
        let plan = read(&path);
        assert_eq!(plan["run"]["accumulation"], how);
        let said = plan["step"]["disk_read_bytes"].as_u64().unwrap();
        let done = bench.metrics(how)[1]["disk_read_bytes"].as_u64().unwrap();
        // Neighbours in the schedule may share memory, depending on timing.
        assert!(done >= said && done <= said + said / 10, "{how}: {said} planned, {done} done");
        let parameters = plan["model"]["parameters"].as_u64().unwrap() as f64;
        let state = plan["bytes"]["disk"].as_u64().unwrap() as f64 * 12.0 / 28.0;
        println!("{how}: at least {:.2} bytes a parameter", (said as f64 - state) / parameters);
        (done as f64 - state) / parameters
    });
    let [vertical, horizontal] = measured;
    println!("bytes of weights a parameter and step: {vertical:.2} and {horizontal:.2}");
    // Four and 32, less what neighbours share.
    assert!((3.0..4.2).contains(&vertical), "{vertical}");
    assert!((24.0..33.0).contains(&horizontal), "{horizontal}");
    let losses = |out: &str| bench.metrics(out).iter().map(|m| m["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("vertical"), losses("horizontal"));
    assert_eq!(bench.weights("vertical"), bench.weights("horizontal"));
    // The plan of one is not that of the other, and both are those that `terrace plan` makes.
    let run = bench.finetune("other").args(&["--accumulation", "vertical", "--device", "cpu"]);
    let run = alone(run, &bench).path("--plan", &bench.path("horizontal.json"));
    run.fails(2, &["run.accumulation is horizontal", "--accumulation is vertical", "leave that out"]);
    let said = alone(plan(&bench), &bench).args(&["--grad-accum", "8", "--accumulation", "horizontal"]).ok();
    for part in ["one micro-batch after the other", "sums of gradients between micro-batches"] {
        assert!(said.stdout.contains(part), "{part:?} is in {}", said.stdout);
    }
}
