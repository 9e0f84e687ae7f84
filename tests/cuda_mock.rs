//! The commands on a card, which the mock driver of `device/mock/` plays: `cargo xtask cuda-mock` runs these.
#![allow(dead_code, reason = "support is shared by all tests")]

mod support;

use serde_json::Value;
use std::fs;
use std::path::Path;
use support::{Bench, Cmd, Shape, cmd};

const PLACES: [&str; 3] = ["none", "host", "disk"];

fn bench() -> Bench {
    Bench::tiny()
}

fn train(bench: &Bench, output: &str, device: &str) -> Cmd {
    let words = ["--steps", "3", "--grad-accum", "2", "--clip", "1.0", "--device", device];
    bench.finetune(output).args(&words)
}

fn losses(bench: &Bench, output: &str) -> Vec<f64> {
    bench.metrics(output).iter().map(|step| step["loss"].as_f64().expect("a loss")).collect()
}

/// One set of weights whatever is where and however long operations take, and the CPU's losses.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn training_is_the_same_in_every_place() {
    let bench = bench();
    train(&bench, "cpu", "cpu").args(&["--offload", "none"]).ok();
    let mut weights = Vec::new();
    for (seed, place) in PLACES.into_iter().enumerate() {
        let run = train(&bench, place, "cuda:0").args(&["--offload", place]);
        run.environment("TERRACE_MOCK_SEED", &seed.to_string())
            .environment("TERRACE_MOCK_DELAY_US", "200")
            .ok();
        weights.push(bench.weights(place));
        for (found, expected) in losses(&bench, place).iter().zip(losses(&bench, "cpu")) {
            assert!((found - expected).abs() < 1e-3 * expected, "{place}: {found}, the CPU has {expected}");
        }
    }
    // The card holds and updates a part of the state.
    let shared = train(&bench, "shared", "cuda:0").args(&["--offload", "host", "--optimizer-ratio", "0.5"]);
    shared.environment("TERRACE_MOCK_DELAY_US", "200").ok();
    weights.push(bench.weights("shared"));
    assert!(weights.windows(2).all(|pair| pair[0] == pair[1]), "placement changes no bit");
}

/// The tests above would fail if a stream did not wait where it must.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_wait_that_is_forgotten_shows() {
    let bench = bench();
    let run = |output: &str, seed: u64, forgotten: &str| {
        train(&bench, output, "cuda:0")
            .args(&["--offload", "host", "--window", "1"])
            .environment("TERRACE_MOCK_SEED", &seed.to_string())
            .environment("TERRACE_MOCK_DELAY_US", "500")
            .environment("TERRACE_MOCK_FORGET_WAITS", forgotten)
            .run()
    };
    assert_eq!(run("right", 0, "0").code(), Some(0));
    let shows = |seed: u64| {
        let output = format!("wrong-{seed}");
        run(&output, seed, "1").code() != Some(0) || bench.weights(&output) != bench.weights("right")
    };
    assert!((0..10).any(shows));
}

/// Whatever a run needs of a card it takes before the first step.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn steps_allocate_nothing_on_the_card() {
    let bench = bench();
    for place in PLACES {
        let calls = |steps: &str| {
            let (output, counts) =
                (format!("{place}-{steps}"), bench.path(&format!("{place}-{steps}.counts")));
            let run =
                bench.finetune(&output).args(&["--steps", steps, "--device", "cuda:0", "--offload", place]);
            run.environment("TERRACE_MOCK_COUNTS", counts.to_str().unwrap()).ok();
            let text = fs::read_to_string(counts).unwrap();
            let all = text.lines().map(|line| line.split_once(' ').unwrap());
            let of = |name: &str| {
                let count = all.clone().find(|(call, _)| *call == name).map_or("0", |(_, count)| count);
                count.parse::<u64>().unwrap()
            };
            assert!(of("cuLaunchKernel") > 0, "{text}");
            ["cuMemAlloc_v2", "cuMemHostAlloc", "cuMemHostRegister_v2", "cuEventCreate"].map(of)
        };
        let few = calls("2");
        assert!(few[0] > 0);
        assert_eq!(few, calls("9"), "{place}");
    }
}

/// Weights come while the card computes with others.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_trace_shows_copies_beside_compute() {
    let bench = bench();
    let trace = bench.path("trace.json");
    let run = train(&bench, "out", "cuda:0").args(&["--offload", "host", "--window", "2"]);
    run.environment("TERRACE_MOCK_DELAY_US", "500").path("--trace", &trace).ok();
    let events = bench.bars("trace.json");
    let bars = |lane: &str| -> Vec<(f64, f64)> {
        let of = |e: &Value| e["tid"].as_str().unwrap().starts_with(lane);
        let bar =
            |e: &Value| (e["ts"].as_f64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap());
        events.iter().filter(|e| of(e)).map(bar).collect()
    };
    for lane in ["uploads", "downloads"] {
        let copies = bars(lane);
        let beside = bars("device").iter().any(|a| copies.iter().any(|b| a.0 < b.1 && b.0 < a.1));
        assert!(beside, "{lane}: {copies:?}");
    }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_model_is_judged_alike_on_a_card() {
    let bench = bench();
    let loss = |device: &str| {
        let run = cmd(&["eval", "--json", "--seq-len", "16", "--device", device]);
        let run = run.path("--model", &bench.path("model")).path("--data", &bench.path("data.jsonl"));
        run.ok().json()["nll"].as_f64().unwrap()
    };
    let (card, cpu) = (loss("cuda:0"), loss("cpu"));
    assert!((card - cpu).abs() < 1e-3 * cpu, "{card} and {cpu}");
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn generating_is_the_same_in_every_place() {
    let bench = bench();
    let mut all: Vec<Value> = Vec::new();
    for (device, place, keys) in [
        ("cpu", "none", "device"),
        ("cuda:0", "none", "device"),
        ("cuda:0", "host", "device"),
        ("cuda:0", "disk", "device"),
        ("cuda:0", "none", "host"),
        ("cuda:0", "none", "disk"),
        ("cuda:0", "disk", "disk"),
    ] {
        let run = bench.generate("model").args(&["--prompt-ids", "1,2,3", "--max-new-tokens", "5"]);
        let run = run.args(&["--device", device, "--offload", place, "--kv", keys]);
        let on_disk = place == "disk" || keys == "disk";
        let run = if on_disk { run.path("--disk", &bench.path("disk")) } else { run };
        let json = run.ok().json();
        all.push(json[0]["ids"].clone());
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{all:?}");
}

/// A cuBLASLt that does not start, as on a driver that is older than it, leaves the card usable.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_library_that_does_not_start_is_done_without() {
    let bench = bench();
    let run = train(&bench, "out", "cuda:0").environment("TERRACE_SHIM_CUBLASLT_CREATE", "1");
    let ended = run.ok();
    for part in ["warning: ", "libcublasLt.so", "does not start (CUBLAS_STATUS_NOT_INITIALIZED)"] {
        assert!(ended.stderr.contains(part), "{part}: {}", ended.stderr);
    }
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn what_a_card_lacks_is_said() {
    let bench = bench();
    let run = || train(&bench, "out", "cuda:0").args(&["--offload", "host"]);
    let old = run().environment("TERRACE_MOCK_SM", "75");
    old.fails(2, &["--device cuda:0: ", "compute capability is 7.5", "8.0 or newer"]);
    train(&bench, "out", "cuda:3")
        .fails(2, &["--device cuda:3: there is no CUDA device 3: the driver shows 1"]);
    let small = run().args(&["--device-memory", "1MiB"]);
    small.fails(2, &["--device-memory", "needs at least", "weights in turn on the device"]);
    let full = run().environment("TERRACE_MOCK_MEMORY", "16MiB");
    full.fails(1, &["--device cuda:0: ", "cannot allocate", "device memory"]);
    // What the driver takes to load kernels is not there for a plan.
    let taken = run().environment("TERRACE_MOCK_MODULE_MEMORY", "40MiB");
    taken.fails(2, &["--device-memory", "needs at least", "weights in turn on the device"]);
    let unpinned = train(&bench, "unpinned", "cuda:0").args(&["--offload", "host"]);
    let ended = unpinned.environment("TERRACE_MOCK_FAIL", "cuMemHostRegister_v2:1:2").ok();
    assert!(ended.stderr.contains("warning: the driver could not pin"), "{}", ended.stderr);
    let broken = run().environment("TERRACE_MOCK_FAIL", "cuLaunchKernel:40:700");
    broken.fails(1, &["the device was lost", "start the command again", "the last committed step is safe"]);
}

/// Wherever a card fails, the process ends and says so: no thread waits for memory that copies on the card hold for ever.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_run_on_a_card_that_fails_ends() {
    // More groups than there are slots, so that reads wait for slots.
    let bench = Bench::with(&Shape { vocab: 512, hidden: 128, intermediate: 256, layers: 10, ..Shape::TINY });
    let profile = bench.path("profile.json");
    cmd(&["calibrate", "--quick", "--device", "cuda:0"]).path("--output", &profile).ok();
    let generate = bench.generate("model").path("--disk", &bench.path("disk")).args(&[
        "--prompt-ids",
        "1,2,3",
        "--max-new-tokens",
        "2",
        "--device",
        "cuda:0",
        "--offload",
        "disk",
        "--disk-cache",
        "0",
        "--host-memory",
        "4MiB",
        "--device-memory",
        "43.5MiB",
    ]);
    let train = |output: &str| {
        let run = bench.finetune(output).path("--profile", &profile);
        run.args(&["--steps", "2", "--device", "cuda:0", "--offload", "disk", "--window", "1"])
    };
    generate.ok();
    train("whole").ok();
    for launch in [20, 60, 100, 115, 125, 140] {
        let fails = format!("cuLaunchKernel:{launch}:700");
        for run in [generate.clone(), train(&fails)] {
            let ended = run.environment("TERRACE_MOCK_FAIL", &fails).ends_within(20);
            assert_eq!(ended.code(), Some(1), "{fails}: {}", ended.stderr);
            assert!(ended.stderr.contains("the device was lost"), "{fails}: {}", ended.stderr);
        }
    }
    for record in [15, 35, 55, 75] {
        let fails = format!("cuEventRecord:{record}:1");
        for run in [generate.clone(), train(&fails)] {
            run.environment("TERRACE_MOCK_FAIL", &fails).ends_within(20);
        }
    }
}

/// A driver alone cannot compile kernels: the message says where the compiler was looked for and how to install it.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_driver_without_a_compiler_is_said() {
    let bench = bench();
    let (alone, nowhere) = (bench.path("driver"), bench.path("nowhere"));
    fs::create_dir(&alone).unwrap();
    let path = std::env::var("LD_LIBRARY_PATH").unwrap();
    let mock = path.split(':').map(Path::new).find(|folder| folder.join("libcuda.so.1").exists()).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(mock.join(name), alone.join(name)).unwrap();
    }
    let run = |output: &str, device: &str| {
        let mut run = train(&bench, output, device).environment("LD_LIBRARY_PATH", alone.to_str().unwrap());
        for place in ["HOME", "VIRTUAL_ENV", "CUDA_HOME", "CUDA_PATH", "XDG_CACHE_HOME"] {
            run = run.environment(place, nowhere.to_str().unwrap());
        }
        run
    };
    let looked_in = alone.to_str().unwrap();
    if run("installed", "cuda:0").run().code() == Some(0) {
        println!(
            "skipped: NVRTC is installed on this machine, where it is found whatever the environment says"
        );
        return;
    }
    run("none", "cuda:0")
        .fails(1, &["--device cuda:0: ", "cannot compile the kernel source", looked_in, "pip install"]);
    // With kernels that were compiled elsewhere it computes.
    let ptx = bench.path("ptx");
    cmd(&["report"]).path("--ptx", &ptx).ok();
    run("prebuilt", "cuda:0").environment("TERRACE_PTX", ptx.to_str().unwrap()).ok();
    let wrong = fs::read_dir(&ptx).unwrap().next().unwrap().unwrap().path();
    fs::write(&wrong, "damaged").unwrap();
    let damaged = run("damaged", "cuda:0").environment("TERRACE_PTX", ptx.to_str().unwrap());
    damaged.fails(1, &["cannot compile the kernel source", "PTX of this version's kernels in"]);
    let ended = run("auto", "auto").ok();
    assert!(ended.stderr.contains("warning: computing on the CPU"), "{}", ended.stderr);
}

/// Without a card that can be used, `auto` is the CPU, with a warning if there is a card.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn auto_goes_on_without_a_card() {
    let bench = bench();
    let none = train(&bench, "none", "auto").environment("TERRACE_MOCK_DEVICES", "0").ok();
    assert!(!none.stderr.contains("warning: computing on the CPU"), "{}", none.stderr);
    let named = train(&bench, "named", "cuda:0").environment("TERRACE_MOCK_DEVICES", "0");
    named.fails(2, &["--device cuda:0: there is no CUDA device 0: the driver shows 0"]);
    let old = train(&bench, "old", "auto").environment("TERRACE_MOCK_SM", "70").ok();
    assert!(old.stderr.contains("warning: computing on the CPU"), "{}", old.stderr);
    assert_eq!(bench.weights("none"), bench.weights("old"));
    let failing = |output: &str, device: &str| {
        train(&bench, output, device).environment("TERRACE_MOCK_FAIL", "cuInit:1:803")
    };
    let auto = failing("failing", "auto").ok();
    assert!(auto.stderr.contains("warning: computing on the CPU"), "{}", auto.stderr);
    assert!(auto.stderr.contains("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"), "{}", auto.stderr);
    failing("named", "cuda:0").fails(2, &["--device cuda:0: the CUDA driver cannot be used: ", "(803)"]);
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn the_report_lists_the_card() {
    let report = cmd(&["report", "--json"]).environment("TERRACE_MOCK_DEVICES", "2").ok().json();
    assert_eq!(report["gpus"].as_array().map(Vec::len), Some(2), "{report}");
    assert_eq!(report["gpus"][1]["device"], "cuda:1");
    assert!(report["gpu_problem"].is_null());
}

/// The link and the memory of a card are measured, and a run on it has a floor with them in it.
#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_card_is_measured() {
    let bench = bench();
    let output = bench.path("profile.json");
    let run = cmd(&["calibrate", "--quick", "--device", "cuda:0", "--json"]).path("--output", &output);
    let document = run.ok().json();
    let card = &document["calibration"]["card"];
    for rate in ["upload", "download", "both", "device_memory"] {
        assert!(card[format!("{rate}_bytes_per_second")].as_f64().unwrap() > 1.0, "{card}");
    }
    assert_eq!(card["gemm"].as_array().unwrap().len(), 19);
    let ended = train(&bench, "floor", "cuda:0").path("--profile", &output).ok();
    for word in ["compute ", "upload ", "download ", "link ", " expected"] {
        assert!(ended.stderr.contains(word), "{word:?}: {}", ended.stderr);
    }
}
