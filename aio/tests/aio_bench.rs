//! The tool `aio-bench`, driven as its users drive it. Nothing here depends on how fast anything is.

use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use terrace_aio::profile::DiskProfile;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aio-bench")).args(arguments).output().unwrap()
}

/// A short run in `dir` on a small file, with `arguments` besides.
fn short(dir: &Path, arguments: &[&str]) -> Output {
    let dir = dir.to_str().unwrap();
    let common = ["--dir", dir, "--file-size", "4MiB", "--seconds", "0.05", "--reserve", "0"];
    bench(&[arguments, &common].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The message of a run that must fail with `code`: one line, no panic.
fn refusal(output: &Output, code: i32) -> String {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    assert_eq!(message.trim().lines().count(), 1, "{message}");
    message
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_direction_is_measured_and_nothing_is_left() {
    let dir = TempDir::new().unwrap();
    let document =
        json(&short(dir.path(), &["--json", "--block-size", "64K", "--queue-depth", "4", "--no-probe"]));
    let results = document["results"].as_array().unwrap();
    let directions: Vec<&str> = results.iter().map(|r| r["direction"].as_str().unwrap()).collect();
    assert_eq!(directions, ["read", "write", "mixed"]);
    for result in results {
        let (bytes, seconds) = (result["bytes"].as_f64().unwrap(), result["seconds"].as_f64().unwrap());
        let rate = result["gigabytes_per_second"].as_f64().unwrap();
        assert!((rate - bytes / 1e9 / seconds).abs() <= rate * 1e-9);
        assert!((result["iops"].as_f64().unwrap() - bytes / 65536.0 / seconds).abs() < 1e-3);
        assert!(result["latency_us_p50"].as_f64() <= result["latency_us_max"].as_f64());
        assert!(!result["evidence"].as_str().unwrap().is_empty());
    }
    assert_eq!(results[2]["mix"], "1:1");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_mix_holds_in_bytes() {
    let dir = TempDir::new().unwrap();
    let arguments = ["--json", "--mixed", "--mix", "10:12", "--random", "--block-size", "4K", "--loops", "2"];
    let common = ["--dir", dir.path().to_str().unwrap(), "--file-size", "4MiB", "--reserve", "0"];
    let document = json(&bench(&[&arguments[..], &common].concat()));
    let result = &document["results"][0];
    let blocks = 2 * (4 << 20) / 4096;
    assert_eq!(result["operations"], blocks);
    assert_eq!(result["read"]["bytes"], blocks * 10 / 22 * 4096);
    assert_eq!(result["write"]["bytes"], (blocks - blocks * 10 / 22) * 4096);
}

#[test]
fn every_engine_and_setting_validates() {
    let dir = TempDir::new().unwrap();
    let settings: [&[&str]; 4] = [
        &["--engine", "threads", "--threads", "2"],
        &["--buffered"],
        &["--rings", "2", "--unregistered"],
        &[],
    ];
    for setting in settings {
        let document = json(&short(dir.path(), &[&["--json", "--validate", "--random"], setting].concat()));
        assert_eq!(document["mismatches_count"], 0, "{setting:?}");
        assert_eq!(document["validated"], true);
        if setting == ["--buffered"] {
            assert_eq!(document["direct"], false);
        }
    }
}

#[test]
fn several_directories_are_reported_one_by_one() {
    let (a, b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let document = json(&short(a.path(), &["--json", "--read", "--dir", b.path().to_str().unwrap()]));
    let dirs = document["results"][0]["dirs"].as_array().unwrap();
    assert_eq!(dirs.len(), 2);
    let sum: f64 = dirs.iter().map(|dir| dir["gigabytes_per_second"].as_f64().unwrap()).sum();
    let total = document["results"][0]["gigabytes_per_second"].as_f64().unwrap();
    assert!((sum - total).abs() <= total * 1e-9);
}

#[test]
fn the_files_of_a_report_agree() {
    let dir = TempDir::new().unwrap();
    let (csv, html) = (dir.path().join("r.csv"), dir.path().join("r.html"));
    let files = ["--csv", csv.to_str().unwrap(), "--html", html.to_str().unwrap()];
    let document = json(&short(dir.path(), &[&["--json", "--sustained"], &files[..]].concat()));
    let rows: Vec<String> = fs::read_to_string(&csv).unwrap().lines().map(str::to_owned).collect();
    let columns = rows[0].split(',').count();
    assert!(rows.iter().all(|row| row.split(',').count() == columns), "{rows:#?}");
    let column = |name: &str| rows[0].split(',').position(|column| column == name).unwrap();
    let totals = || rows.iter().filter(|row| row.starts_with("total,"));
    assert_eq!(totals().count(), 3);
    assert!(
        rows.iter().any(|row| row.starts_with("window,")) && rows.iter().any(|row| row.starts_with("dir,"))
    );
    let page = fs::read_to_string(&html).unwrap();
    for (row, result) in totals().zip(document["results"].as_array().unwrap()) {
        let cell = row.split(',').nth(column("bytes")).unwrap();
        assert_eq!(cell, result["bytes"].to_string());
        let rate = result["gigabytes_per_second"].as_f64().unwrap();
        assert!(page.contains(&format!("{rate:.3}")), "{rate}");
    }
    check_page(&page);
}

/// Self-contained, and every element that is opened is closed.
fn check_page(page: &str) {
    assert!(!page.contains("http") && !page.contains("<script") && page.contains("<svg"));
    assert!(page.contains("prefers-color-scheme: dark"));
    let mut open: Vec<&str> = Vec::new();
    for tag in page.split('<').skip(1).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') && !["meta", "!DOCTYPE"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn a_corrupted_block_is_found() {
    let dir = TempDir::new().unwrap();
    assert!(short(dir.path(), &["--write", "--keep"]).status.success());
    assert_eq!(names(dir.path()), ["aio-bench-0.dat"]);
    let reuse = ["--reuse", "--validate", "--read"];
    assert!(short(dir.path(), &reuse).status.success(), "what unchecked writes left was restored");
    let path = dir.path().join("aio-bench-0.dat");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 1_234_567).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 1_234_567).unwrap();
    file.sync_all().unwrap();
    let output = short(dir.path(), &reuse);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("aio-bench-0.dat") && message.contains("offset 1234567"), "{message}");
    assert_eq!(names(dir.path()), ["aio-bench-0.dat"]);
}

#[test]
fn files_of_others_are_never_touched() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("aio-bench-0.dat");
    for content in [&b"mine"[..], &vec![7; 8 << 20]] {
        fs::write(&path, content).unwrap();
        for flag in ["--keep", "--reuse"] {
            let message = refusal(&short(dir.path(), &[flag]), 1);
            assert!(
                message.contains("aio-bench-0.dat") && message.contains("not made by aio-bench"),
                "{message}"
            );
        }
        assert!(short(dir.path(), &["--read"]).status.success(), "files that are not kept have other names");
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

#[test]
fn kept_files_are_reused_only_on_demand_and_when_large_enough() {
    let dir = TempDir::new().unwrap();
    assert!(short(dir.path(), &["--read", "--keep"]).status.success());
    assert!(refusal(&short(dir.path(), &["--read", "--keep"]), 1).contains("--reuse"));
    let path = dir.path().to_str().unwrap();
    let larger =
        bench(&["--dir", path, "--file-size", "8MiB", "--seconds", "0.05", "--reserve", "0", "--reuse"]);
    assert!(refusal(&larger, 1).contains("--file-size"));
}

#[test]
fn files_that_were_kept_together_are_reused_apart() {
    let (first, second) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let also = |dir: &TempDir| dir.path().to_str().unwrap().to_owned();
    assert!(short(first.path(), &["--read", "--keep", "--dir", &also(&second)]).status.success());
    let kept = || [&first, &second].map(|dir| names(dir.path()));
    let one_each = [["aio-bench-0.dat"], ["aio-bench-0.dat"]];
    assert_eq!(kept(), one_each);
    assert!(short(second.path(), &["--read", "--reuse", "--validate"]).status.success());
    assert!(
        short(second.path(), &["--read", "--reuse", "--validate", "--dir", &also(&first)]).status.success()
    );
    assert_eq!(kept(), one_each, "none was made anew");
}

#[test]
fn a_file_of_which_a_part_was_used_says_no_more_than_what_is_known_of_it() {
    let dir = TempDir::new().unwrap();
    let sized = |size: &str, arguments: &[&str]| {
        let path = dir.path().to_str().unwrap();
        let common =
            ["--dir", path, "--file-size", size, "--seconds", "0.05", "--reserve", "0", "--no-probe"];
        bench(&[arguments, &common].concat())
    };
    assert!(sized("8MiB", &["--read", "--keep"]).status.success());
    // As a run leaves it that was killed while it wrote.
    let file = OpenOptions::new().read(true).write(true).open(dir.path().join("aio-bench-0.dat")).unwrap();
    let mut label = vec![0; 4096];
    file.read_exact_at(&mut label, 8 << 20).unwrap();
    let text = text(&label).replace("\"stamped\":true", "\"stamped\":false");
    assert!(text.contains("\"stamped\":false"), "{text}");
    file.write_all_at(&text.as_bytes()[..4096], 8 << 20).unwrap();
    file.write_all_at(&vec![7; 4 << 20], 4 << 20).unwrap();
    file.sync_all().unwrap();
    let read = ["--read", "--reuse", "--validate"];
    assert!(sized("4MiB", &read).status.success());
    let whole = sized("8MiB", &read);
    assert!(whole.status.success(), "{}", self::text(&whole.stderr));
    // What lies beyond the part that is used stays known.
    assert!(sized("4MiB", &["--write", "--reuse"]).status.success());
    file.read_exact_at(&mut label, 8 << 20).unwrap();
    assert!(self::text(&label).contains("\"stamped\":true"));
}

#[test]
fn a_grid_of_which_nothing_fits_the_file_is_refused() {
    let dir = TempDir::new().unwrap();
    let (path, output) = (dir.path().to_str().unwrap(), dir.path().join("tuned.json"));
    let grid = ["--dir", path, "--file-size", "4MiB", "--block-sizes", "1MiB,2MiB", "--queue-depths", "8,16"];
    let tune = ["tune", "--output", output.to_str().unwrap()];
    for command in [&["sweep"][..], &tune] {
        let message =
            refusal(&bench(&[command, &grid, &["--reserve", "0", "--seconds", "0.02"]].concat()), 2);
        for word in ["4 blocks of 1 MiB", "depth, 8", "--file-size", "--queue-depths", "--block-sizes"] {
            assert!(message.contains(word), "{word} is in {message}");
        }
    }
    assert!(names(dir.path()).is_empty());
}

#[test]
fn it_refuses_to_fill_the_disk_or_the_memory() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let message = refusal(&bench(&["--dir", path, "--file-size", "4000TiB"]), 1);
    for word in ["4000.0 TiB needed", "free", "reserved", path] {
        assert!(message.contains(word), "{message}");
    }
    let blocks = ["--file-size", "4000TiB", "--block-size", "1GiB", "--queue-depth", "1024"];
    let message = refusal(&bench(&[&["--dir", path][..], &blocks].concat()), 1);
    assert!(message.contains("1.0 TiB of memory") && message.contains("--queue-depth"), "{message}");
    let message = refusal(&bench(&[&["compare", "--dir", path][..], &blocks].concat()), 1);
    assert!(message.contains("1.0 TiB of memory") && message.contains("--queue-depth"), "{message}");
    let grid = ["--file-size", "4000TiB", "--block-sizes", "1GiB,4KiB", "--queue-depths", "1,1024"];
    let output = dir.path().join("tuned.json");
    for command in [&["sweep"][..], &["tune", "--output", output.to_str().unwrap()]] {
        let message = refusal(&bench(&[command, &["--dir", path], &grid].concat()), 1);
        assert!(message.contains("1.0 TiB of memory") && message.contains("--queue-depths"), "{message}");
    }
    let reserve = bench(&["--dir", path, "--file-size", "4MiB", "--reserve", "4000TiB"]);
    assert!(refusal(&reserve, 1).contains("4000.0 TiB of it reserved"));
    assert!(names(dir.path()).is_empty());
}

#[test]
fn bad_directories_are_named() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(refusal(&short(&file, &[]), 2).contains("not a directory"));
    assert!(refusal(&short(&dir.path().join("none"), &[]), 2).contains("does not exist"));
    assert!(refusal(&short(dir.path(), &["--block-size", "8MiB"]), 2).contains("--file-size"));
}

#[test]
fn values_that_cannot_be_name_their_flag_and_what_can() {
    for (flag, value, allowed) in [
        ("--seconds", "-1", "above 0 and at most 86400"),
        ("--seconds", "0", "above 0 and at most 86400"),
        ("--warm-up", "-1", "from 0 to 86400"),
        ("--block-size", "1000", "a multiple of 4096 bytes, from 4096 to 1GiB"),
        ("--block-size", "2GiB", "from 4096 to 1GiB"),
    ] {
        let output = bench(&["--dir", "any", flag, value]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(flag) && message.contains(allowed), "{message}");
    }
    let output = bench(&["sweep", "--dir", "any", "--block-sizes", "1MiB,0"]);
    assert!(text(&output.stderr).contains("--block-sizes"), "{}", text(&output.stderr));
}

#[test]
fn an_interrupt_prints_what_there_is() {
    let dir = TempDir::new().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_aio-bench"))
        .args([
            "--file-size",
            "4MiB",
            "--reserve",
            "0",
            "--seconds",
            "600",
            "--warm-up",
            "0",
            "--json",
            "--dir",
        ])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    // SAFETY: a system call on the process just started, which is not waited for yet.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGINT) };
    let asked = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if asked.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["interrupted"], true);
    assert!(document["results"][0]["bytes"].as_u64().unwrap() > 0);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_sweep_reports_its_points() {
    let dir = TempDir::new().unwrap();
    let html = dir.path().join("sweep.html");
    let path = dir.path().to_str().unwrap();
    let arguments =
        ["sweep", "--dir", path, "--file-size", "4MiB", "--reserve", "0", "--seconds", "0.02", "--json"];
    let grid =
        ["--block-sizes", "64K,1M", "--queue-depths", "1,2", "--html", html.to_str().unwrap(), "--mixed"];
    let document = json(&bench(&[&arguments[..], &grid].concat()));
    let points = document["points"].as_array().unwrap();
    assert!(points.len() >= 4, "{points:?}");
    let rate = |point: &Value| point["gigabytes_per_second"].as_f64().unwrap();
    let best = points.iter().map(rate).fold(0.0, f64::max);
    // Of points within 3 % of the fastest, the one that takes the least processor time wins.
    assert!(rate(&document["best"]["mixed"]) >= 0.97 * best * (1.0 - 1e-9));
    check_page(&fs::read_to_string(html).unwrap());
}

#[test]
fn every_engine_and_number_of_rings_is_tried_without_registration() {
    let dir = TempDir::new().unwrap();
    let sweep = |grid: &[&str]| {
        let common =
            ["sweep", "--read", "--json", "--block-sizes", "64K", "--queue-depths", "1", "--rings", "1,2"];
        let document = json(&short(dir.path(), &[&common[..], grid].concat()));
        let points = document["points"].as_array().unwrap().clone();
        let of = |point: &Value| {
            let engine = point["engine"].as_str().unwrap().to_owned();
            (engine, point["rings"].as_u64().unwrap(), point["registered"] == true)
        };
        points.iter().map(of).collect::<Vec<_>>()
    };
    let tried = sweep(&["--registered", "no", "--engines", "auto,threads"]);
    assert_eq!(tried.iter().map(|point| point.1).collect::<Vec<_>>(), [1, 2, 1], "{tried:?}");
    assert_eq!(tried[2].0, "threads");
    let tried = sweep(&["--registered", "both", "--engines", "threads,auto"]);
    for rings in [1, 2] {
        let is = |registered| tried.contains(&("uring".to_owned(), rings, registered));
        assert!(!is(true) || is(false), "{rings} of {tried:?}");
    }
    let tried = sweep(&["--registered", "both", "--engines", "threads"]);
    assert_eq!(tried.len(), 1, "threads register nothing: {tried:?}");
}

fn tune(dir: &Path, output: &Path) -> Output {
    let arguments =
        ["tune", "--file-size", "4MiB", "--reserve", "0", "--seconds", "0.03", "--registered", "yes"];
    let grid = ["--block-sizes", "256K", "--queue-depths", "2", "--rings", "1", "--engines", "threads"];
    let places = ["--dir", dir.to_str().unwrap(), "--output", output.to_str().unwrap()];
    bench(&[&arguments[..], &grid, &places].concat())
}

#[test]
fn a_tuned_profile_can_be_loaded() {
    let dir = TempDir::new().unwrap();
    let output = dir.path().join("tuned");
    let done = tune(dir.path(), &output);
    assert!(done.status.success(), "{}", text(&done.stderr));
    let profile = DiskProfile::from_json(&fs::read_to_string(output.join("profile.json")).unwrap()).unwrap();
    assert_eq!(
        (profile.engine.as_str(), profile.block_bytes, profile.queue_depth),
        ("threads", 256 << 10, 2)
    );
    assert_eq!(profile.paths[0].path, dir.path().canonicalize().unwrap());
    let aio: Value = serde_json::from_str(&fs::read_to_string(output.join("aio.json")).unwrap()).unwrap();
    let section = aio["aio"].as_object().unwrap();
    let keys: Vec<&str> = section.keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        ["block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events"]
    );
    assert!(section.values().all(|value| value.is_u64() || value.is_boolean()));
    assert!(tune(dir.path(), &output).status.success(), "its own files are replaced");
    // A name that leaves no room for the half that is written first.
    let lost = tune(dir.path(), &dir.path().join(format!("{}.json", "p".repeat(250))));
    assert!(!lost.status.success() && text(&lost.stderr).contains("writing"), "{}", text(&lost.stderr));
    let said = |done: &Output| text(&done.stdout).lines().filter(|line| !line.starts_with("wrote")).count();
    assert_eq!(said(&lost), said(&done), "{}", text(&lost.stdout));
}

#[test]
fn tuning_keeps_other_sections_and_refuses_other_files() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("both.json");
    assert!(tune(dir.path(), &file).status.success());
    let mut document: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    document["device"] = 1.into();
    document["calibration"] = serde_json::json!({ "quick": true, "sustained": true, "disks_together": { "read_bytes_per_second": 1e9 } });
    let before = document.to_string();
    fs::write(&file, &before).unwrap();
    let mut reader = fs::File::open(&file).unwrap();
    assert!(tune(dir.path(), &file).status.success());
    assert_eq!(std::io::read_to_string(&mut reader).unwrap(), before, "no reader sees a half");
    assert_eq!(names(dir.path()), ["both.json"]);
    let document: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(document["device"], 1);
    let kept = serde_json::json!({ "quick": true });
    assert_eq!(document["calibration"], kept, "the directories are others, and what they do together");
    assert!(document["aio"].is_object() && document["disk"].is_object());
    // What `terrace calibrate` wrote without a disk has no section of ours yet.
    fs::write(&file, r#"{"version": 1, "calibration": {"quick": true}}"#).unwrap();
    assert!(tune(dir.path(), &file).status.success());
    let document: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert!(document["calibration"] == kept && document["disk"].is_object());
    for content in ["{}", "precious"] {
        fs::write(&file, content).unwrap();
        assert!(refusal(&tune(dir.path(), &file), 1).contains("both.json"));
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
    }
}

#[cfg(feature = "tokio_uring")]
#[test]
fn an_engine_that_a_profile_cannot_name_is_refused_before_anything_is_measured() {
    let dir = TempDir::new().unwrap();
    let output = dir.path().join("tuned.json");
    let places = ["--dir", dir.path().to_str().unwrap(), "--output", output.to_str().unwrap()];
    let message = refusal(&bench(&[&["tune", "--engines", "auto,tokio-uring"][..], &places].concat()), 2);
    assert!(message.contains("tokio-uring") && message.contains("--engines"), "{message}");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    for (words, parts) in [
        (&["--engine", "threads", "--rings", "2"][..], ["--rings", "engine threads"]),
        (&["--engine", "threads", "--sq-poll"], ["--sq-poll", "engine threads"]),
        (&["--engine", "threads", "--io-poll"], ["--io-poll", "engine threads"]),
        (&["--engine", "uring", "--threads", "2"], ["--threads", "engine uring"]),
        (&["--read", "--mix", "3:2"], ["--mix", "add --mixed"]),
        (&["compare", "--threads", "2"], ["--threads", "engine uring"]),
        (&["compare", "--write", "--mix", "3:2"], ["--mix", "add --mixed"]),
        (&["sweep", "--read", "--mix", "3:2"], ["--mix", "add --mixed"]),
    ] {
        let message = refusal(&bench(&[words, &["--dir", path]].concat()), 2);
        assert!(parts.iter().all(|part| message.contains(part)), "{words:?}: {message}");
    }
    // Which engine there is shows when it is opened.
    let idle = ["--rings", "2", "--threads", "2", "--read", "--json", "--no-probe"];
    let document = json(&short(dir.path(), &idle));
    let is_noted = |flag: &str| {
        let words = format!("{flag} did nothing");
        document["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains(&words))
    };
    let has_threads = document["engine"] == "threads";
    assert_eq!((is_noted("--rings"), is_noted("--threads")), (has_threads, !has_threads), "{document}");
    assert!(names(dir.path()).is_empty());
}

#[test]
fn options_of_ds_io_mean_the_same_or_are_explained() {
    let dir = TempDir::new().unwrap();
    let common = ["--folder", dir.path().to_str().unwrap(), "--io_size", "4M", "--reserve", "0", "--read"];
    let same = ["--block_size", "64K", "--queue_depth", "4", "--io_parallel", "2", "--loops", "3", "--json"];
    let document = json(&bench(&[&common[..], &same].concat()));
    assert_eq!(document["file_bytes"], 4 << 20);
    assert_eq!((&document["rings"], &document["queue_depth"]), (&2.into(), &8.into()));
    assert_eq!(document["results"][0]["bytes"], 3 * (4 << 20));
    // N times a depth that is allowed may be none.
    let deep = ["--queue_depth", "1024", "--io_parallel", "5"];
    let message = refusal(&bench(&[&common[..], &deep].concat()), 2);
    assert!(message.contains("--io_parallel") && message.contains("at most 4096"), "{message}");
    let threads = ["--engine", "threads", "--loops", "1", "--json", "--io_parallel", "2"];
    assert_eq!(json(&bench(&[&common[..], &threads].concat()))["queue_depth"], 64);
    for flag in ["--single_submit", "--sequential_requests", "--gpu", "--use_gds", "--handle"] {
        let message = refusal(&bench(&[&common[..], &[flag]].concat()), 2);
        assert!(message.contains(flag) && message.contains("ds_io"), "{message}");
    }
}

#[test]
fn comparing_without_fio_explains_itself() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let program = env!("CARGO_BIN_EXE_aio-bench");
    let output = Command::new(program).args(["compare", "--dir", path]).env("PATH", "").output().unwrap();
    let message = refusal(&output, 1);
    assert!(message.contains("fio is not in PATH") && message.contains("install"), "{message}");
}

#[test]
fn comparing_with_fio_pairs_the_figures() {
    let is_there = Command::new("fio").arg("--version").stdout(Stdio::null()).status().is_ok();
    let has_ring = terrace_aio::engine::UringEngine::probe().is_ok();
    if !is_there || !has_ring {
        eprintln!("skipped: needs fio and io_uring");
        return;
    }
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let arguments = ["compare", "--dir", path, "--file-size", "4MiB", "--reserve", "0", "--seconds", "0.1"];
    let document =
        json(&bench(&[&arguments[..], &["--pairs", "2", "--mixed", "--unregistered", "--json"]].concat()));
    let mixed = &document["directions"][0];
    assert_eq!(mixed["pairs"].as_array().unwrap().len(), 2);
    let of = |who: &str| mixed["median"][who]["gigabytes_per_second"].as_f64().unwrap();
    let ratio = mixed["ratio"]["gigabytes_per_second"].as_f64().unwrap();
    assert!((ratio - of("aio_bench") / of("fio")).abs() < 1e-9);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn output_that_cannot_be_written_is_said() {
    let dir = TempDir::new().unwrap();
    let message = refusal(&short(dir.path(), &["--read", "--csv", "/nonexistent-folder/x.csv"]), 2);
    assert!(message.contains("x.csv"), "{message}");
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_aio-bench"));
    command
        .args(["--read", "--file-size", "4MiB", "--seconds", "0.05", "--reserve", "0", "--dir"])
        .arg(dir.path());
    assert!(refusal(&command.stdout(full).output().unwrap(), 1).contains("standard output"));
}
