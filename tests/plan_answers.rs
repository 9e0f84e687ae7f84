//! What `terrace plan` answers to unusual questions: batches and machines of any size, described in whole or in part, and plans that few
//! machines lead to.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use support::{Bench, Cmd, cmd};

/// A plan that finds no profile of this machine.
fn plan(bench: &Bench) -> Cmd {
    let plan = cmd(&["plan", "--threads", "2", "--device", "cpu"]).path("--model", &bench.path("model"));
    plan.environment("XDG_CACHE_HOME", bench.path("cache").to_str().unwrap())
}

/// What `finetune` refuses, in the same words.
#[test]
fn batches_that_cannot_be_are_refused_as_by_the_run() {
    let bench = Bench::tiny();
    for (flags, parts) in [
        (
            &["--seq-len", "4294967296"][..],
            &["--seq-len 4294967296 is longer than", "max_position_embeddings"][..],
        ),
        (&["--seq-len", "100000"], &["--seq-len 100000 is longer than", "max_position_embeddings"]),
        (
            &["--seq-len", "24", "--batch-size", "100000000"],
            &["more tokens than a micro-batch can have", "--grad-accum"],
        ),
        (&["--batch-size", "4294967296"], &["--batch-size 4294967296 is too large"]),
        (&["--grad-accum", "4294967296"], &["--grad-accum 4294967296 is too large"]),
    ] {
        plan(&bench).args(flags).fails(2, parts);
        let run = bench.finetune("out").args(&["--device", "cpu"]);
        // The bench's own lengths would be given twice.
        if flags[0] == "--grad-accum" {
            run.args(flags).fails(2, parts);
        }
    }
    plan(&bench)
        .args(&["--generate", "--seq-len", "24", "--max-new-tokens", "4", "--batch-size", "100000000"])
        .fails(2, &["more tokens than a micro-batch can have", "lower --batch-size"]);
    // A row of the table that has too many is refused alone, and takes no memory.
    let document = plan(&bench)
        .args(&[
            "--seq-len",
            "32",
            "--batch-size",
            "20000000",
            "--host-memory",
            "1000TiB",
            "--offload",
            "host",
            "--dtype",
            "fp32",
            "--activations",
            "recompute",
            "--json",
        ])
        .ok()
        .json();
    let refused = document["choices"].as_array().unwrap().iter().filter(|row| row.get("refused").is_some());
    assert!(refused.clone().count() > 0, "{document}");
    for row in refused {
        assert!(
            row["refused"].as_str().unwrap().contains("more tokens than a micro-batch can have"),
            "{row}"
        );
    }
}

/// Micro-batches that do the same are planned once, however many they are.
#[test]
fn a_million_micro_batches_are_planned_in_no_time() {
    let bench = Bench::tiny();
    let began = Instant::now();
    let run = |count: &str, more: &[&str]| {
        let flags = ["--seq-len", "24", "--grad-accum", count, "--host-memory", "1000TiB", "--json"];
        plan(&bench).args(&flags).args(more).ok().json()["plan"].clone()
    };
    let of = |plan: &Value, name: &str| plan[name].as_u64().unwrap();
    for clip in ["0", "1"] {
        let [some, many] = ["1000", "1000000"].map(|count| run(count, &["--clip", clip]));
        assert_eq!(1000 * of(&some, "tokens"), of(&many, "tokens"));
        assert!(1000 * of(&some, "operations") <= of(&many, "operations"), "no block computes again: {many}");
        let ratio = of(&many, "host_bytes") as f64 / of(&some, "host_bytes") as f64;
        assert!((100.0..1000.0).contains(&ratio), "{ratio}");
    }
    run("5000", &["--accumulation", "horizontal"]);
    let too_many = ["--seq-len", "24", "--accumulation", "horizontal", "--grad-accum", "1000000"];
    plan(&bench).args(&too_many).fails(2, &["--grad-accum 1000000", "lower --grad-accum to 32768"]);
    let too_many = ["--params", "40b", "--grad-accum", "4000000000"];
    cmd(&["plan"]).args(&too_many).fails(2, &["operations than can be counted", "lower --grad-accum"]);
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
}

/// A time is that of every resource that a step uses, or none; flags that are missing are named.
#[test]
fn a_machine_that_is_known_in_part_has_no_time() {
    let card = ["--gpu-memory", "24GiB", "--host-memory", "64GiB"];
    let run = |more: &[&str]| cmd(&["plan", "--params", "8b"]).args(&card).args(more);
    let all =
        ["--tflops", "100", "--link", "25GB", "--dram", "80GB", "--disk-read", "3GB", "--disk-write", "2GB"];
    let of = |more: &[&str]| run(more).args(&["--json"]).ok().json()["plan"].clone();
    assert!(of(&all)["step_seconds"].as_f64().unwrap() > 10.0 && of(&all)["unknown"] == Value::Array(vec![]));
    for (left_out, flag, resource) in [
        (0..2, "--tflops", "compute"),
        (2..4, "--link", "the link"),
        (4..6, "--dram", "host memory"),
        (6..10, "--disk-read and --disk-write", "the disk"),
    ] {
        let flags = [&all[..left_out.start], &all[left_out.end..]].concat();
        let plan = of(&flags);
        for key in ["step_seconds", "expected_seconds", "tokens_per_second", "bound_by"] {
            assert_eq!(plan[key], Value::Null, "{key} without {flag}: {plan}");
        }
        assert_eq!(plan["unknown"][0]["flags"], flag);
        let text = run(&flags).ok().stdout;
        let words = format!("no step time: nothing is known of the speed of {resource}; give {flag}\n");
        assert!(text.contains(&words), "{words} is in {text}");
        // Rows of the table that use no disk have a time.
        assert_eq!(text.contains("fastest"), resource == "the disk", "{text}");
    }
    let text = run(&[]).ok().stdout;
    assert!(text.contains("give --tflops, --link, --dram, --disk-read and --disk-write\n"), "{text}");
    assert!(!text.contains("terrace calibrate"), "a card that is not here cannot be measured: {text}");
}

/// The row that is marked is the fastest of the table, whatever comes close to it.
#[test]
fn the_fastest_is_marked() {
    let machine = ["--dram", "80GB", "--gpu-bandwidth", "1TB", "--disk-read", "1GB", "--disk-write", "5GB"];
    let card = ["--gpu-memory", "24GiB", "--host-memory", "64GiB", "--link", "25GB"];
    // Close to the fastest come a `split` beside it, and smaller batches.
    let close = ["--durability", "checkpoint", "--grad-accum", "4"];
    for (tflops, batch, more) in [("20", "4", &close[..]), ("100", "1", &[]), ("100", "8", &["--generate"])] {
        let run = cmd(&["plan", "--params", "1b", "--tflops", tflops, "--batch-size", batch]);
        let run = run.args(&machine).args(&card).args(more);
        let text = run.ok().stdout;
        let number = |shown: &str| match shown.strip_suffix('k') {
            Some(thousands) => thousands.parse::<f64>().unwrap() * 1e3,
            None => shown.parse().unwrap(),
        };
        let rows = text.lines().skip_while(|line| !line.ends_with("tok/s")).skip(1);
        let rows: Vec<&str> = rows.filter(|row| !row.ends_with("does not fit")).collect();
        let speed = |row: &str| number(row.split("  ←").next().unwrap().split_whitespace().last().unwrap());
        let most = rows.iter().map(|row| speed(row)).fold(0.0, f64::max);
        let marked: Vec<&&str> = rows.iter().filter(|row| row.ends_with("← fastest")).collect();
        assert_eq!(marked.len(), 1, "{more:?}: {text}");
        assert_eq!(speed(marked[0]), most, "{more:?}: {text}");
    }
}

/// Of a disk that was not measured nothing is known, and that is said.
#[test]
fn a_disk_that_was_not_measured_is_said() {
    let bench = Bench::tiny();
    let (known, other) = (bench.path("known"), bench.path("other"));
    [&known, &other].into_iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
    let flags = ["--seq-len", "24"];
    let xdg = bench.path("cache");
    let calibrate =
        cmd(&["calibrate", "--quick", "--threads", "2", "--device", "cpu"]).path("--disk", &known);
    // What is damaged at the default place is replaced, and nothing that is no file.
    let calibrate = calibrate.environment("XDG_CACHE_HOME", xdg.to_str().unwrap());
    let profile = xdg.join("terrace/profile.json");
    std::fs::create_dir_all(&profile).unwrap();
    calibrate.fails(1, &["profile.json: this is a directory", "move it away, or give --output FILE"]);
    std::fs::remove_dir(&profile).unwrap();
    std::fs::write(&profile, "{").unwrap();
    let ended = calibrate.ok();
    assert!(ended.stderr.contains("not JSON") && ended.stderr.contains("is replaced\n"), "{}", ended.stderr);
    let text = plan(&bench).args(&flags).path("--disk", &known).ok().stdout;
    assert!(text.contains("a step takes at least") && text.contains("  disk"), "{text}");
    for named in [false, true] {
        let run = plan(&bench).args(&flags).path("--disk", &other);
        let run = if named { run.path("--profile", &profile) } else { run };
        let text = run.ok().stdout;
        let words = format!("no step time: nothing is known of the speed of --disk {}", other.display());
        assert!(text.contains(&words) && !text.contains("bound by"), "{text}");
        assert_eq!(text.contains(&format!("terrace calibrate --disk {}", other.display())), !named, "{text}");
        assert!(text.contains("give --disk-read and --disk-write"), "{text}");
    }
    // Rates of a disk take nothing from what is known of the rest.
    let rates = ["--disk-read", "1GB", "--disk-write", "1GB"];
    let text = plan(&bench).args(&flags).args(&rates).ok().stdout;
    assert!(text.contains("a step takes at least") && text.contains("  memory"), "{text}");
    // A calibration without a disk is to be done again with one.
    let mut document: Value = serde_json::from_str(&std::fs::read_to_string(&profile).unwrap()).unwrap();
    document.as_object_mut().unwrap().remove("disk").unwrap();
    std::fs::write(&profile, document.to_string()).unwrap();
    let text = plan(&bench).args(&flags).ok().stdout;
    let words =
        "the speed of the disk; run `terrace calibrate --disk PATH`, or give --disk-read and --disk-write";
    assert!(text.contains(words), "{text}");
    // What is not there would be made.
    let ended = plan(&bench).args(&flags).path("--disk", &known.join("state/run")).ok();
    let words = format!("there is no such folder; the disk of {} is meant", known.display());
    assert!(ended.stderr.contains(&words), "{}", ended.stderr);
    let file = bench.path("file");
    std::fs::write(&file, "").unwrap();
    plan(&bench).args(&flags).path("--disk", &file).fails(1, &["--disk", "is not a directory"]);
}

/// Products of one type, or with weights of one format, say nothing of those of another.
#[test]
fn types_that_were_not_measured_have_no_time() {
    let bench = Bench::tiny();
    let profile = bench.path("profile.json");
    let machine = json!({ "cpu": "Abacus 9", "threads": 2, "card": null, "date": "", "terrace": "" });
    let gemm = |dtype: &str, rate: f64| json!({ "dtype": dtype, "of": "", "shape": [1, 1, 1], "operations_per_second": rate });
    let memory = json!({ "read_bytes_per_second": 1e15, "copy_bytes_per_second": 1e15, "update_bytes_per_second": 1e15 });
    let calibration = json!({
        "version": 1, "machine": machine, "quick": false, "memory": memory, "gemm": [gemm("bf16", 2e9), gemm("int8", 1e9)],
    });
    std::fs::write(&profile, json!({ "version": 1, "calibration": calibration }).to_string()).unwrap();
    let plan = |flags: &[&str]| {
        let run = plan(&bench)
            .path("--profile", &profile)
            .args(&["--seq-len", "24", "--offload", "none"])
            .args(flags);
        (run.ok().stdout, run.args(&["--json"]).ok().json()["plan"].clone())
    };
    let (text, bf16) = plan(&[]);
    assert!(text.contains("bound by compute") && bf16["step_seconds"].is_f64(), "{text}");
    let (text, fp16) = plan(&["--dtype", "fp16"]);
    assert!(
        text.contains("no step time: nothing is known of the speed of compute in fp16; give --tflops"),
        "{text}"
    );
    assert!(fp16["step_seconds"].is_null() && fp16["unknown"][0]["resource"] == "compute", "{fp16}");
    let token = |weights| plan(&["--generate", "--max-new-tokens", "8", "--weights", weights]);
    let [bf16, int8] =
        ["bf16", "int8"].map(|weights| token(weights).1["seconds"]["compute"].as_f64().unwrap());
    assert!((int8 / bf16 - 2.0).abs() < 1e-6, "{bf16} and {int8} seconds");
    let (text, int4) = token("int4");
    assert!(text.contains("no time: nothing is known of the speed of products with int4 weights"), "{text}");
    assert!(int4["token_seconds"].is_null(), "{int4}");
}

/// Fewer moments are less state, and recomputing less memory: as the run says it.
#[test]
fn optimizers_and_activations_are_planned_as_they_run() {
    let bench = Bench::tiny();
    let terms = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| line.contains(" planned") || line.contains(" × ") && line.starts_with("  "));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut seen = Vec::new();
    for flags in [
        ["--optimizer", "lion", "--activations", "recompute"],
        ["--optimizer", "sgd", "--activations", "keep"],
        ["--optimizer", "adamw", "--activations", "recompute"],
        // The norm of scaled gradients is waited for, clipped or not.
        ["--dtype", "fp16", "--clip", "0"],
        ["--dtype", "bf16", "--clip", "0"],
    ] {
        let memory = ["--host-memory", "64MiB"];
        let planned =
            plan(&bench).args(&["--seq-len", "24", "--batch-size", "2"]).args(&flags).args(&memory).ok();
        let run =
            bench.finetune(flags[1]).args(&flags).args(&memory).args(&["--steps", "1", "--device", "cpu"]);
        let ended = run.environment("XDG_CACHE_HOME", bench.path("cache").to_str().unwrap()).ok();
        assert!(terms(&planned.stdout).len() > 8, "{}", planned.stdout);
        assert_eq!(terms(&planned.stdout), terms(&ended.stderr));
        seen.push(terms(&planned.stdout));
    }
    assert!(seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2] && seen[3] != seen[4]);
}

/// Drives that are not alike take parts of the state by their speed, in a plan as in the run.
#[test]
fn uneven_drives_are_planned_as_they_run() {
    let bench = Bench::tiny();
    let dirs = ["fast", "slow"].map(|name| bench.path(name));
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let profile = bench.path("profile.json");
    let paths = dirs.iter().zip([7e9, 1e9]).map(|(path, rate)| json!({
        "path": path, "read_bytes_per_second": rate, "write_bytes_per_second": rate, "mixed_bytes_per_second": rate,
    }));
    let disk = json!({
        "engine": "threads", "block_bytes": 1 << 20, "queue_depth": 8, "rings": 1, "register": false, "threads": 2, "paths": paths.collect::<Vec<_>>(),
    });
    std::fs::write(&profile, json!({ "version": 1, "disk": disk }).to_string()).unwrap();
    let seconds = |file: &str| {
        let text = std::fs::read_to_string(bench.path(file)).unwrap();
        let plan: serde_json::Value = serde_json::from_str(&text).unwrap();
        plan["step"]["seconds"]["disk"].as_f64().unwrap_or_else(|| panic!("{plan}"))
    };
    let common = |run: Cmd| {
        let run = run.path("--profile", &profile).path("--disk", &dirs[0]).path("--disk", &dirs[1]);
        run.args(&["--offload", "disk", "--host-memory", "64MiB"])
    };
    let planned = plan(&bench).args(&["--seq-len", "24", "--batch-size", "2"]);
    common(planned).path("--save", &bench.path("planned.json")).ok();
    let run = |more: &[&str], file: &str| {
        let run = common(bench.finetune("out")).args(&["--device", "cpu", "--save-every", "1"]).args(more);
        run.path("--save-plan", &bench.path(file)).ok();
        seconds(file)
    };
    let planned = seconds("planned.json");
    let ran = run(&["--steps", "1"], "ran.json");
    assert!((planned / ran - 1.0).abs() < 0.02, "{planned} planned, {ran} in the run");
    // State stays as it was shared out: with other rates, those of the slow drive count for its old part.
    let text = std::fs::read_to_string(&profile).unwrap();
    std::fs::write(&profile, text.replace("7000000000.0", "1000000000.0")).unwrap();
    let resumed = run(&["--steps", "1", "--resume"], "resumed.json");
    assert!(resumed / ran > 5.0, "{resumed} resumed, {ran} before");
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let ratio = ["--params", "8b", "--optimizer-ratio", "0.5", "--gpu-memory", "80GiB"];
    cmd(&["plan"]).args(&ratio).fails(2, &["--optimizer-ratio", "--durability checkpoint or none"]);
    cmd(&["plan"]).args(&ratio).args(&["--durability", "checkpoint", "--host-memory", "64GiB"]).ok();
    let card = ["--params", "8b", "--gpu-memory", "24GiB", "--device", "cpu"];
    cmd(&["plan"]).args(&card).fails(2, &["--gpu-memory", "--device cpu", "leave one of them out"]);
    let generate = ["--params", "8b", "--generate", "--optimizer", "lion"];
    cmd(&["plan"]).args(&generate).fails(2, &["cannot be used with"]);
}

/// A prompt is no longer than the new tokens leave room for, unless asked.
#[test]
fn prompts_leave_room_for_new_tokens() {
    let small = Bench::tiny();
    let plan = cmd(&["plan", "--generate", "--max-new-tokens", "40", "--device", "cpu"]);
    let text = plan.path("--model", &small.path("model")).ok().stdout;
    assert!(
        text.contains("prompts of 24 tokens, 40 new tokens") || text.contains("prompt of 24 tokens, 40 new"),
        "{text}"
    );
}

/// Generation trains nothing.
#[test]
fn generation_is_not_said_to_train() {
    let flags = ["--params", "8b", "--generate", "--offload", "disk", "--host-memory", "4GiB"];
    let text = cmd(&["plan", "--device", "cpu"]).args(&flags).ok().stdout;
    for words in ["training", "update slots", "gradients", "kept by"] {
        assert!(!text.contains(words), "{words:?} is in {text}");
    }
    assert!(text.contains("weight slots"), "{text}");
}

/// What is named makes the plan fit, and one more does not; what does not help is not named.
#[test]
fn what_would_fit_is_named_and_does() {
    let bench = Bench::tiny();
    let settings = ["--seq-len", "64", "--batch-size", "8", "--grad-accum", "64", "--state", "fp32"];
    let tight = ["--activations", "recompute", "--offload", "host"];
    let run = |changed: &[&str], memory: &str| {
        let mut flags = settings.to_vec();
        for change in changed.chunks(2) {
            let at = flags.iter().position(|flag| *flag == change[0]).unwrap();
            flags[at + 1] = change[1];
        }
        plan(&bench).args(&flags).args(&tight).args(&["--host-memory", memory])
    };
    // Somewhat less than the least.
    let less = |refused: &str, by: f64| {
        let least = refused.split("needs at least ").nth(1).unwrap().split(" MiB").next().unwrap();
        format!("{:.2}MiB", least.parse::<f64>().unwrap() - by)
    };
    let memory = less(&run(&[], "4MiB").fails(2, &["is too small"]).stderr, 2.0);
    let refused = run(&[], &memory).fails(2, &["is too small", "Raise it to"]).stderr;
    let advice = refused.lines().find(|line| line.starts_with("Raise it to")).unwrap().to_owned();
    let of = |flag: &str| {
        let words: Vec<&str> = advice.split([' ', ',']).collect();
        let at =
            words.iter().position(|word| *word == flag).map(|at| words[at + 2].parse::<usize>().unwrap());
        at.unwrap_or_else(|| panic!("{flag} is in {advice}"))
    };
    for flag in ["--grad-accum", "--batch-size", "--seq-len"] {
        let most = of(flag);
        run(&[flag, &most.to_string()], &memory).ok();
        run(&[flag, &(most + 1).to_string()], &memory).fails(2, &["is too small"]);
    }
    // The run says the same.
    let train = |memory: &str| {
        let flags = ["--grad-accum", "64", "--state", "fp32", "--device", "cpu", "--host-memory", memory];
        bench.finetune("out").args(&flags).args(&tight).fails(2, &["Raise it to"]).stderr
    };
    let refused = train(&less(&train("4MiB"), 0.5));
    assert!(refused.contains("lower --grad-accum to "), "{refused}");
    // Nothing but memory helps where there is none.
    let nothing = run(&[], "0").fails(2, &["Raise it to"]).stderr;
    for flag in ["--seq-len", "--batch-size", "--grad-accum", "--state "] {
        assert!(!nothing.contains(flag), "{flag} is in {nothing}");
    }
    let both = ["--params", "8b", "--gpu-memory", "1MiB", "--host-memory", "1MiB"];
    cmd(&["plan"])
        .args(&both)
        .fails(2, &["--host-memory of 1.00 MiB", "Raise it to", " and --device-memory to "]);
    let space = ["--seq-len", "24", "--disk-space", "10KiB", "--offload", "disk"];
    let none =
        plan(&bench).args(&space).fails(2, &["--disk-space of 10.0 KiB", "of the table fits either"]).stderr;
    assert!(!none.contains("--state"), "{none}");
    let space = ["--seq-len", "24", "--disk-space", "10KiB"];
    plan(&bench).args(&space).fails(2, &["use --offload", "these fit:\nstate    offload"]);
}

/// The rows of the table: the groups that they are of, the place, and what is there.
fn rows(text: &str) -> Vec<(String, String, String)> {
    let table = text.split("what goes where").nth(1).unwrap_or_else(|| panic!("no table in {text}"));
    let mut lines = table.lines().skip(1);
    let header = lines.next().unwrap();
    // Columns begin where their names do, but for sizes, which end there.
    let at = |name: &str| header.find(&format!(" {name} ")).unwrap() + 1;
    let (place, what) = (at("in"), at("bytes") + "bytes  ".len());
    let mut groups = String::new();
    let row = |line: &str| {
        let letters: Vec<char> = line.chars().collect();
        let part = |from: usize, to: usize| letters[from..to].iter().collect::<String>().trim().to_owned();
        let name = part(0, place);
        if !name.is_empty() {
            groups = name;
        }
        // A place and a size are two spaces apart at least.
        let place = part(place, what).split("  ").next().unwrap().to_owned();
        (groups.clone(), place, part(what, letters.len()))
    };
    lines.take_while(|line| line.contains(" B  ") || line.contains("iB  ")).map(row).collect()
}

/// What a plan says of weights, optimizer, gradients and activations, of hundreds of layers in a few lines.
#[test]
fn the_plan_says_what_goes_where() {
    let row = |rows: &[(String, String, String)], groups: &str, place: &str| -> String {
        let of = |row: &&(String, String, String)| row.0 == groups && row.1 == place;
        rows.iter().find(of).unwrap_or_else(|| panic!("{groups}: {place} is in {rows:#?}")).2.clone()
    };
    let run = |more: &[&str]| {
        let flags = ["--params", "40b", "--seq-len", "512", "--device", "cpu"];
        cmd(&["plan"]).args(&flags).args(more).ok().stdout
    };
    let flags = ["--host-memory", "256GiB", "--activations", "recompute", "--disk-cache"];
    let all = rows(&run(&[&flags[..], &["none"]].concat()));
    assert!(all.len() < 16, "{all:#?}");
    let layers = all.iter().find(|row| row.0.contains("layers.0 – ")).unwrap().0.clone();
    let state = row(&all, &layers, "disk");
    for part in ["weights", "low half of the master weights", "first moments", "second moments"] {
        assert!(state.contains(part), "{part} is in {state}");
    }
    assert!(row(&all, &layers, "host").contains("gradients"), "{all:#?}");
    assert_eq!(row(&all, &layers, "recomputed"), "activations of blocks");
    // What is copied is said of the groups that it is of.
    let some = rows(&run(&[&flags[..], &["20GiB"]].concat()));
    assert!(some.iter().any(|row| row.1 == "disk + host copy" && row.2 == "weights"), "{some:#?}");
    assert!(some.iter().filter(|row| row.0.contains("layers.")).any(|row| row.1 == "disk"));
    // A card of its own keeps the last groups, and a host the rest.
    let card = [
        "--params",
        "8b",
        "--seq-len",
        "512",
        "--gpu-memory",
        "40GiB",
        "--host-memory",
        "200GiB",
        "--offload",
        "host",
    ];
    let text = cmd(&["plan"]).args(&card).ok().stdout;
    let card_rows = rows(&text);
    assert!(
        card_rows.iter().any(|row| row.1.starts_with("device") && row.2.contains("activations")),
        "{text}"
    );
    assert!(card_rows.iter().any(|row| row.1 == "host + device copy" && row.2 == "weights"), "{text}");
    // As a document, with the bytes.
    let document = cmd(&["plan"]).args(&card).args(&["--json"]).ok().json();
    let runs = document["placement"].as_array().unwrap();
    let groups: u64 = runs.iter().map(|run| run["groups"].as_u64().unwrap()).sum();
    assert_eq!(groups, document["model"]["layers"].as_u64().unwrap() + 2, "embedding, layers and head");
    let weights: u64 = runs
        .iter()
        .flat_map(|run| run["parts"].as_array().unwrap())
        .filter(|part| part["what"] == "weights")
        .map(|part| part["bytes"].as_u64().unwrap())
        .sum();
    let parameters = document["model"]["parameters"].as_u64().unwrap();
    assert!(
        (2 * parameters..2 * parameters + parameters / 50).contains(&weights),
        "{weights} of {parameters}"
    );
}

#[test]
fn the_plan_of_generation_says_where_keys_are() {
    let flags =
        ["--params", "8b", "--generate", "--host-memory", "6GiB", "--seq-len", "64", "--device", "cpu"];
    let text = cmd(&["plan"]).args(&flags).ok().stdout;
    let found = rows(&text);
    assert!(found.iter().any(|row| row.1 == "disk" && row.2 == "weights"), "{text}");
    assert!(found.iter().any(|row| row.1 == "host" && row.2.contains("key/value cache")), "{text}");
    assert!(found.iter().all(|row| row.1 != "recomputed"), "nothing is recomputed: {text}");
}

/// Of generation, too: what is named makes the plan fit, and one more does not.
#[test]
fn what_would_fit_is_named_for_generation() {
    let settings =
        ["--batch-size", "64", "--seq-len", "1024", "--max-new-tokens", "128", "--host-memory", "6GiB"];
    let run = |flag: &str, value: &str| {
        let mut flags = settings.to_vec();
        match flags.iter().position(|given| *given == flag) {
            Some(at) => flags[at + 1] = value,
            None => flags.extend([flag, value]),
        }
        cmd(&["plan", "--params", "8b", "--generate", "--device", "cpu", "--offload", "disk"]).args(&flags)
    };
    let refused = run("--threads", "2").fails(2, &["--host-memory of 6.00 GiB is too small"]).stderr;
    let advice = refused.lines().find(|line| line.starts_with("Raise it to")).unwrap();
    let words: Vec<&str> = advice.split([' ', ',']).collect();
    for flag in ["--batch-size", "--seq-len"] {
        let at = words.iter().position(|word| *word == flag).unwrap_or_else(|| panic!("{flag} in {advice}"));
        let most: usize = words[at + 2].parse().unwrap();
        run(flag, &most.to_string()).ok();
        run(flag, &(most + 1).to_string()).fails(2, &["is too small"]);
    }
    // The prompts alone are too much, wherever weights are.
    for flag in ["--max-new-tokens", "--weights", "--offload"] {
        assert!(!advice.contains(flag), "{flag} in {advice}");
    }
    assert!(advice.contains("use --kv disk"), "{advice}");
    run("--kv", "disk").ok();
    let small =
        ["--params", "8b", "--generate", "--device", "cpu", "--offload", "disk", "--host-memory", "6GiB"];
    let space =
        |more: &[&str]| cmd(&["plan", "--disk-space", "10GiB", "--seq-len", "64"]).args(&small).args(more);
    space(&[]).fails(2, &["--disk-space of 10.0 GiB is too small", "or use --weights int8"]);
    space(&["--weights", "int8"]).ok();
}

/// Memory and space on disks, where there is too little of both: who raises one does not hear of the other next.
#[test]
fn what_is_too_small_together_is_named_together() {
    for kind in [["--batch-size", "2"].as_slice(), &["--generate", "--offload", "disk"]] {
        let run = |memory: &str, space: &str| {
            let sizes = ["--host-memory", memory, "--disk-space", space];
            cmd(&["plan", "--params", "8b", "--device", "cpu"]).args(kind).args(&sizes)
        };
        let refused = run("10MiB", "4GiB").fails(2, &["--host-memory of 10.0 MiB is too small"]).stderr;
        let advice = refused.lines().find_map(|line| line.strip_prefix("Raise it to ")).unwrap();
        let (memory, space) = advice.split_once(" and --disk-space to ").unwrap();
        let space = space.split(',').next().unwrap();
        let [memory, space] = [memory, space].map(|size| size.replace(' ', ""));
        run(&memory, "4GiB").fails(2, &["--disk-space of 4.00 GiB is too small"]);
        run(&memory, &space).ok();
        // Where only memory is too small nothing is said of disks.
        let refused = run("10MiB", &space).fails(2, &["Raise it to"]).stderr;
        assert!(!refused.contains("--disk-space"), "{refused}");
    }
}

#[test]
fn rates_that_move_nothing_are_refused() {
    let disks = |read, write| vec!["--disk-read", read, "--disk-write", write];
    for (more, flag) in [
        (vec!["--link", "0"], "--link"),
        (vec!["--dram", "0"], "--dram"),
        (vec!["--gpu-bandwidth", "0"], "--gpu-bandwidth"),
        (vec!["--generate", "--link", "0GB"], "--link"),
        (disks("0", "0"), "--disk-read"),
        (disks("1GB", "0"), "--disk-write"),
        (vec!["--ranks", "2", "--peer-bandwidth", "0", "--link", "1GB"], "--peer-bandwidth"),
    ] {
        let refusal = format!("{flag} of 0 moves nothing: give the bytes of a second");
        cmd(&["plan", "--params", "1b"]).args(&more).fails(2, &[&refusal]);
    }
    // A link has a card at its end.
    cmd(&["plan", "--params", "1b", "--link", "25GB"]).fails(2, &["with --gpu-memory"]);
    // As slow as can be said is a speed.
    let slow = [
        "--disk-read",
        "1",
        "--disk-write",
        "1",
        "--link",
        "1",
        "--gpu-memory",
        "80GiB",
        "--tflops",
        "1e-300",
    ];
    cmd(&["plan", "--params", "1b"]).args(&slow).ok();
}

/// As a plan in a file says; without figures of this machine none does that by itself.
#[test]
fn activations_on_disk_change_no_byte_of_the_model() {
    let bench = Bench::tiny();
    let file = bench.path("plan.json");
    plan(&bench).args(&["--seq-len", "24", "--batch-size", "2"]).path("--save", &file).ok();
    let run = |out: &str| {
        let run = bench.finetune(out).args(&["--device", "cpu", "--steps", "3"]);
        run.environment("XDG_CACHE_HOME", bench.path("cache").to_str().unwrap())
    };
    run("memory").path("--plan", &file).ok();
    let mut document: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    for (key, value) in [("kept_blocks", 0), ("kept_on_disk", 2), ("kept_slots", 4)] {
        document["windows"][key] = json!(value);
    }
    fs::write(&file, document.to_string()).unwrap();
    let told = run("disk").path("--plan", &file).args(&["--activations", "disk"]).ok().stderr;
    for words in ["0 of 2 blocks keep their activations for backward, 2 on disk", "waiting for activations"] {
        assert!(told.contains(words), "{told}");
    }
    assert!(bench.weights("memory") == bench.weights("disk"));
    assert!(!bench.path("disk/.terrace/state/kept-activations.bin").exists());
    // What memory has room for stays there.
    let told = run("out").args(&["--activations", "disk", "--offload", "disk"]).ok().stderr;
    assert!(told.contains("2 of 2 blocks keep their activations for backward\n"), "{told}");
}

#[test]
fn activations_are_on_disk_where_they_can_be() {
    let bench = Bench::tiny();
    let refused = ["--activations disk", "add --offload disk", "auto"];
    bench.finetune("out").args(&["--activations", "disk", "--offload", "host"]).fails(2, &refused);
    plan(&bench).args(&["--activations", "disk", "--offload", "none"]).fails(2, &refused);
    plan(&bench).args(&["--activations", "host"]).fails(2, &["--activations host is for a card", "auto"]);
    let card = |how: &str, offload: &str| {
        let card = cmd(&["plan", "--gpu-memory", "24GiB", "--activations", how, "--offload", offload]);
        card.path("--model", &bench.path("model"))
    };
    card("host", "none").fails(2, &["--activations host", "add --offload host or disk", "auto"]);
    for (how, offload) in [("host", "host"), ("host", "disk"), ("disk", "disk")] {
        card(how, offload).ok();
    }
}

/// What eight cards of one node need of its memory, its disks and its processor is what they need together.
#[test]
fn ranks_of_a_node_share_its_budget() {
    let flags = ["--params", "8b", "--offload", "host", "--json", "--gpu-memory", "80GiB", "--link", "25GB"];
    let run = |ranks: &str, host: &str, ratio: &str| {
        let memory = ["--host-memory", host, "--optimizer-ratio", ratio];
        cmd(&["plan", "--ranks", ranks]).args(&memory).args(&flags)
    };
    let [one, eight] = ["1", "8"].map(|ranks| run(ranks, "512GiB", "1").ok().json()["plan"].clone());
    let state = 12.0 * 8.03e9;
    let [one, eight] = [&one, &eight].map(|plan| plan["host_bytes"].as_f64().unwrap() - state);
    assert!(eight > 0.0 && eight < 8.0 * one + 0.01 * state, "{one} and {eight} beside the state");
    run("8", "80GiB", "1").fails(2, &["--host-memory of 80.0 GiB is too small", "resident state"]);
}

/// Where the memory of a node has no room for all state, shards of it are on the cards. They cross no link, and are gathered as before.
#[test]
fn state_on_the_device_of_several_ranks_is_shards() {
    let run = |host: &str, more: &[&str]| {
        let flags = ["--params", "8b", "--ranks", "8", "--offload", "host", "--json", "--link", "25GB"];
        let memory = ["--gpu-memory", "26GiB", "--host-memory", host];
        cmd(&["plan"]).args(&flags).args(&memory).args(more).ok().json()
    };
    let on_host = run("512GiB", &["--optimizer-ratio", "1"]);
    let [tight, on_device] = [run("80GiB", &[]), run("512GiB", &["--optimizer-ratio", "0"])];
    let of = |document: &Value, name: &str| document["plan"][name].as_f64().unwrap();
    let term = |document: &Value, purpose: &str| {
        let terms = document["memory"].as_array().unwrap().iter();
        let named = terms.filter(|term| term["purpose"].as_str().unwrap().starts_with(purpose));
        named.map(|term| term["bytes"].as_f64().unwrap()).sum::<f64>()
    };
    let state = 12.0 * 8.03e9;
    // The parts of all cards and of the host are the whole.
    for document in [&on_host, &tight, &on_device] {
        let whole = term(document, "resident state") + 8.0 * term(document, "state on the device");
        assert!((whole / state - 1.0).abs() < 0.01, "{whole} of {state}");
        let exchanged = of(document, "peer_bytes") / 7.0 * 8.0;
        let once = term(document, "weights that stay on the device");
        let parameters = document["model"]["parameters"].as_f64().unwrap();
        assert!((exchanged / (8.0 * parameters - once) - 1.0).abs() < 0.01, "{exchanged}, {once} once");
    }
    assert_eq!(term(&on_host, "state on the device"), 0.0);
    assert!(of(&tight, "host_bytes") <= 80.0 * 1024f64.powi(3) && term(&tight, "resident state") > 0.0);
    assert_eq!(term(&on_device, "resident state"), 0.0);
    for name in ["upload_bytes", "download_bytes"] {
        assert!(of(&on_device, name) < of(&tight, name) && of(&tight, name) < of(&on_host, name), "{name}");
    }
}
