//! `terrace inspect`: what it shows, that every damage is found and named, and that the step it goes back to continues with the
//! bits of a run that nothing happened to.
#![allow(missing_docs)]

mod support;

use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use support::{Bench, Cmd, Ended, Shape, SmallDisk, cmd, files};

const STRIPE_BYTES: u64 = 1 << 20;
const HEADER_BYTES: u64 = 4096;
/// What the damaged run had done, and what it goes on to.
const DONE: u64 = 4;
const STEPS: u64 = 6;

/// Both generations of its state lie on both of two disks.
const SHAPE: Shape = Shape { vocab: 512, hidden: 96, intermediate: 256, ..Shape::TINY };

/// A run of `DONE` steps over two disks, and the weights of one of `STEPS` that nothing happened to.
struct Run {
    bench: Bench,
    memory: String,
    pristine: [PathBuf; 2],
}

/// A chunk, and where it lies.
#[derive(Debug, Clone, PartialEq)]
struct Chunk {
    group: String,
    kind: String,
    index: u64,
    count: u64,
    disk: usize,
    offset: u64,
    bytes: u64,
}

impl Run {
    fn new() -> Self {
        let bench = Bench::with(&SHAPE);
        // The smallest budget has the smallest chunks: several a group.
        let refused = finetune(&bench, "out", "1MiB", &[bench.path("a"), bench.path("b")], DONE).run();
        assert_eq!(refused.code(), Some(2), "{}", refused.stderr);
        let least = refused.stderr.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap();
        let memory = least.replace(' ', "");
        let pristine = ["pristine-a", "pristine-b"].map(|name| bench.path(name));
        finetune(&bench, "out", &memory, &pristine, DONE).ok();
        finetune(&bench, "whole", &memory, &[bench.path("c"), bench.path("d")], STEPS).ok();
        Self { bench, memory, pristine }
    }

    /// A fresh copy of the state after `DONE` steps.
    fn state(&self) -> [PathBuf; 2] {
        let dirs = ["a", "b"].map(|name| self.bench.path(name));
        for (from, to) in self.pristine.iter().zip(&dirs) {
            let _ = fs::remove_dir_all(to);
            fs::create_dir(to).unwrap();
            for (path, _) in files(from) {
                fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
            }
        }
        dirs
    }

    /// Resumes and compares with the run that nothing happened to; gives the step it went on from.
    fn resumes_the_same(&self, dirs: &[PathBuf]) -> u64 {
        let ended = finetune(&self.bench, "out", &self.memory, dirs, STEPS).args(&["--resume"]).ok();
        assert!(self.bench.weights("out") == self.bench.weights("whole"), "the weights differ");
        let losses =
            |output| self.bench.metrics(output).iter().map(|m| m["loss"].clone()).collect::<Vec<_>>();
        assert_eq!(losses("out"), losses("whole"));
        let step = ended.stderr.split("resumed at step ").nth(1).unwrap().split(' ').next().unwrap();
        step.parse().unwrap()
    }
}

fn finetune(bench: &Bench, output: &str, memory: &str, dirs: &[PathBuf], steps: u64) -> Cmd {
    let run = bench.finetune(output).args(&["--scheduler", "constant", "--host-memory", memory]);
    with(run, dirs).args(&["--steps", &steps.to_string()])
}

fn with(command: Cmd, dirs: &[PathBuf]) -> Cmd {
    dirs.iter().fold(command, |command, dir| command.path("--disk", dir))
}

fn inspect(dirs: &[PathBuf], words: &[&str]) -> Cmd {
    with(cmd(&["inspect"]), dirs).args(words)
}

/// Runs and expects that damage was found: exit code 1, the document on stdout and all of `parts` on stderr.
#[track_caller]
fn damaged(dirs: &[PathBuf], words: &[&str], parts: &[&str]) -> Value {
    let ended = inspect(dirs, &[&["--verify", "--json"], words].concat()).run();
    assert_eq!(ended.code(), Some(1), "{}\n{}", ended.stdout, ended.stderr);
    for part in parts {
        assert!(ended.stderr.contains(part), "{part:?} is in:\n{}", ended.stderr);
    }
    let document = ended.json();
    assert_eq!(document["whole"], false);
    document
}

fn text(ended: &Ended, parts: &[&str]) {
    for part in parts {
        assert!(ended.stdout.contains(part), "{part:?} is in:\n{}", ended.stdout);
    }
}

/// The chunks of a generation as the document describes the layout: groups, in them kinds, from multiples of 4 KiB.
fn chunks(document: &Value, generation: u64) -> Vec<Chunk> {
    let number = |value: &Value| value.as_u64().unwrap();
    let (mut address, mut chunks) = (generation * number(&document["generation_bytes"]), Vec::new());
    for group in document["groups"].as_array().unwrap() {
        let count = number(&group["chunks"]);
        for kind in document["kinds"].as_array().unwrap() {
            let (block, each) = (number(&kind["block_elements"]), number(&kind["block_bytes"]));
            let bytes = |elements: u64| elements.div_ceil(block) * each;
            let (all, whole) = (number(&group["elements"]), number(&document["chunk_elements"]));
            for index in 0..count {
                let start = address + bytes(index * whole);
                let stripe = start / STRIPE_BYTES;
                chunks.push(Chunk {
                    group: group["name"].as_str().unwrap().into(),
                    kind: kind["kind"].as_str().unwrap().into(),
                    index,
                    count,
                    disk: (stripe % 2) as usize,
                    offset: HEADER_BYTES + stripe / 2 * STRIPE_BYTES + start % STRIPE_BYTES,
                    bytes: bytes((all - index * whole).min(whole)),
                });
            }
            address += bytes(all).next_multiple_of(4096);
        }
    }
    chunks
}

/// Of every kind, on each disk, a first, a last and another chunk of a group, as far as there are such.
fn samples(all: &[Chunk]) -> Vec<Chunk> {
    let place = |chunk: &Chunk| match chunk.index {
        0 => 0,
        last if last + 1 == chunk.count => 2,
        _ => 1,
    };
    let mut seen = std::collections::HashSet::new();
    all.iter().filter(|chunk| seen.insert((chunk.kind.clone(), chunk.disk, place(chunk)))).cloned().collect()
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
}

fn bytes(dirs: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    let all = dirs.iter().flat_map(|dir| files(dir));
    all.map(|(path, _)| (path.clone(), fs::read(path).unwrap())).collect()
}

/// The one damage of a document, and whether it is one of the last step.
#[track_caller]
fn the_damage(document: &Value) -> (&Value, bool) {
    let of = |name: &str| document[name]["damages"].as_array().cloned().unwrap_or_default().len();
    assert_eq!(of("verified") + of("verified_previous"), 1, "{document:#}");
    let is_last = of("verified") == 1;
    let name = if is_last { "verified" } else { "verified_previous" };
    (&document[name]["damages"][0], is_last)
}

#[track_caller]
fn is_of(damage: &Value, chunk: &Chunk, file: &Path) {
    let of = (damage["group"].as_str(), damage["kind"].as_str(), damage["chunk"].as_u64());
    assert_eq!(of, (Some(&*chunk.group), Some(&*chunk.kind), Some(chunk.index)));
    let parts = damage["parts"].as_array().unwrap();
    assert_eq!(parts[0]["path"], file.to_str().unwrap());
    assert_eq!(parts[0]["offset"], chunk.offset);
    let sum: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, chunk.bytes);
}

#[test]
fn every_damage_of_a_chunk_is_named_and_the_step_before_goes_on_the_same() {
    let run = Run::new();
    let dirs = run.state();
    let before = bytes(&dirs);
    let ended = inspect(&dirs, &["--verify", "--json"]).ok();
    assert_eq!(bytes(&dirs), before, "looking changes nothing");
    let document = ended.json();
    assert_eq!((&document["step"], &document["previous_step"]), (&DONE.into(), &(DONE - 1).into()));
    assert_eq!(document["whole"], true);
    let live = document["slots"].as_array().unwrap().iter().find(|slot| slot["step"] == DONE).unwrap();
    let live = live["generation"].as_u64().unwrap();

    let samples_of = |generation| samples(&chunks(&document, generation));
    let chosen = samples_of(live);
    println!("{chosen:#?}");
    for kind in ["weight", "master-low", "moment1", "moment2"] {
        for disk in 0..2 {
            let of = chosen.iter().filter(|chunk| (&*chunk.kind, chunk.disk) == (kind, disk)).count();
            assert!(of >= 2, "{kind} on disk {disk}: {of}");
        }
    }
    for chunk in &chosen {
        let dirs = run.state();
        let file = dirs[chunk.disk].join("state.bin");
        flip(&file, chunk.offset + chunk.bytes.min(900) / 2);
        let before = bytes(&dirs);
        let found = damaged(
            &dirs,
            &[],
            &["step 4 is damaged: 1 chunk is", "Step 3 before it is whole", "--restore-previous"],
        );
        assert_eq!(bytes(&dirs), before, "nothing was asked to change");
        let (damage, is_last) = the_damage(&found);
        assert!(is_last);
        is_of(damage, chunk, &file);
        let ended = inspect(&dirs, &["--verify", "--restore-previous"]).ok();
        assert!(ended.stderr.contains("that of step 3 again"), "{}", ended.stderr);
        let changed: Vec<_> =
            bytes(&dirs).into_iter().filter(|file| !before.contains(file)).map(|f| f.0).collect();
        assert_eq!(changed, [dirs[0].join("manifest.bin")], "only the manifest is written");
        inspect(&dirs, &["--verify"]).ok();
        assert_eq!(run.resumes_the_same(&dirs), DONE - 1, "{chunk:?}");
    }
    for chunk in samples_of(1 - live) {
        let dirs = run.state();
        let file = dirs[chunk.disk].join("state.bin");
        flip(&file, chunk.offset + chunk.bytes / 2 % 900);
        let before = bytes(&dirs);
        let words = ["--restore-previous"];
        let found = damaged(&dirs, &words, &["step 4 is whole", "step 3 before it is not", "--resume works"]);
        let (damage, is_last) = the_damage(&found);
        assert!(!is_last);
        is_of(damage, &chunk, &file);
        assert_eq!(bytes(&dirs), before, "there is no reason to go back");
    }
    assert_eq!(run.resumes_the_same(&run.state()), DONE);
}

#[test]
fn a_damaged_manifest_is_named() {
    let run = Run::new();
    let dirs = run.state();
    let manifest = dirs[0].join("manifest.bin");
    let document = inspect(&dirs, &["--json"]).ok().json();
    let slots = document["slots"].as_array().unwrap();
    let place = |step: u64| {
        let slot = slots.iter().find(|slot| slot["step"] == step).unwrap();
        assert_eq!(slot["path"], manifest.to_str().unwrap());
        slot["offset"].as_u64().unwrap()
    };
    let (newer, older) = (place(DONE), place(DONE - 1));
    let at = |offset: u64| format!("bytes at offset {offset}");
    let is_damaged = |document: &Value, offset: u64| {
        let slots = document["slots"].as_array().unwrap();
        let slot = slots.iter().find(|slot| slot["offset"] == offset).unwrap();
        slot["state"] == "damaged"
    };
    let len = slots[0]["bytes"].as_u64().unwrap() as usize;
    // In the magic number, the step, the table of checksums; and all of it, as a sector that was lost reads.
    for within in [Some(0), Some(16), Some(60), None] {
        let spoil = |at: u64| match within {
            Some(within) => flip(&manifest, at + within),
            None => {
                let file = fs::File::options().write(true).open(&manifest).unwrap();
                file.write_all_at(&vec![0; len], at).unwrap();
            }
        };
        let dirs = run.state();
        spoil(newer);
        let said = ["manifest.bin is not whole", &at(newer), "that of step 3, which is whole"];
        let found = damaged(&dirs, &[], &said);
        assert!(is_damaged(&found, newer) && !is_damaged(&found, older));
        assert_eq!(found["step"], DONE - 1);
        let plain = inspect(&dirs, &[]).run();
        assert_eq!(plain.code(), Some(1), "without --verify too");
        text(&plain, &["DAMAGED", &at(newer)]);
        if within.is_none() {
            let note = format!("note: one of the two commits in {}", dirs[0].display());
            let resumed = finetune(&run.bench, "out", &run.memory, &dirs, DONE).args(&["--resume"]).ok();
            assert!(resumed.stderr.contains(&note), "{}", resumed.stderr);
            continue;
        }
        assert_eq!(run.resumes_the_same(&dirs), DONE - 1);

        let dirs = run.state();
        spoil(older);
        let found = damaged(
            &dirs,
            &["--restore-previous"],
            &["manifest.bin is not whole", &at(older), "step 4, which is whole"],
        );
        assert!(is_damaged(&found, older) && !is_damaged(&found, newer));
        assert_eq!(run.resumes_the_same(&dirs), DONE);

        let dirs = run.state();
        spoil(older);
        spoil(newer);
        let before = bytes(&dirs);
        let found = damaged(
            &dirs,
            &["--restore-previous"],
            &["neither slot of", "manifest.bin is whole", "from a copy"],
        );
        assert!(is_damaged(&found, older) && is_damaged(&found, newer) && found["step"].is_null());
        let said = ["neither of the two slots of its manifest is whole", "none can be read", "from a copy"];
        let exported = cmd(&["export"]).path("--model", &run.bench.path("model"));
        let exported = dirs.iter().fold(exported, |exported, dir| exported.path("--disk", dir));
        exported.path("--output", &run.bench.path("export")).fails(1, &said);
        finetune(&run.bench, "out", &run.memory, &dirs, DONE).args(&["--resume"]).fails(1, &said);
        assert_eq!(bytes(&dirs), before);
    }
}

/// Header and layout of the manifest, and headers of both files: one copy may be damaged, both may not.
#[test]
fn a_damaged_copy_is_named_and_written_anew() {
    let run = Run::new();
    let dirs = run.state();
    let manifest = dirs[0].join("manifest.bin");
    let [a, b] = [0, 1].map(|disk| dirs[disk].join("state.bin"));
    let pages = |path: &Path| fs::metadata(path).unwrap().len() / 4096;
    let mut head = [0; 8];
    fs::File::open(&manifest).unwrap().read_exact_at(&mut head, 24).unwrap();
    let layout = u64::from_le_bytes(head).next_multiple_of(4096);
    let last = |path: &Path| pages(path) * 4096 - 4096;
    for (path, within, places, len, what, error) in [
        (&manifest, 30, [0, last(&manifest)], 4096, "header", "neither copy of the manifest's header"),
        (&manifest, 40, [4096, last(&manifest) - layout], layout, "layout", "layout has a wrong checksum"),
        (&a, 25, [0, last(&a)], 4096, "header", "a/state.bin is damaged: its header"),
        (&b, 25, [0, last(&b)], 4096, "header", "b/state.bin is damaged: its header"),
    ] {
        for offset in places {
            let dirs = run.state();
            let whole = bytes(&dirs);
            flip(path, offset + within);
            let before = bytes(&dirs);
            let place =
                format!("two copies of the {what}, {len} bytes at offset {offset} of {}", path.display());
            let said = [&*place, "is damaged; the other is used", "that of step 4, which is whole"];
            let found = damaged(&dirs, &["--restore-previous"], &said);
            let copies = found["damaged_copies"].as_array().unwrap();
            let facts = |copy: &Value| (copy["what"].clone(), copy["path"].clone(), copy["offset"].clone());
            let expected = (what.into(), path.to_str().unwrap().into(), offset.into());
            assert_eq!(copies.iter().map(facts).collect::<Vec<_>>(), [expected]);
            let plain = inspect(&dirs, &[]).run();
            assert_eq!(plain.code(), Some(1), "without --verify too");
            text(&plain, &["DAMAGED      one of ", &place]);
            assert!(bytes(&dirs) == before, "looking changes nothing");
            if offset > 0 && what == "header" {
                continue;
            }
            let note = format!("note: one of {place}, is damaged; it was written anew from the other\n");
            let command = finetune(&run.bench, "out", &run.memory, &dirs, DONE).args(&["--resume"]);
            let resumed = command.ok();
            assert!(resumed.stderr.contains(&note), "{note} is in: {}", resumed.stderr);
            assert!(!command.ok().stderr.contains("two copies"), "it is said once");
            assert!(inspect(&dirs, &["--verify", "--json"]).ok().json()["whole"] == true);
            let is_state = |file: &&(PathBuf, Vec<u8>)| file.0.extension().is_some_and(|name| name == "bin");
            let now = bytes(&dirs);
            assert!(whole.iter().filter(is_state).eq(now.iter().filter(is_state)), "it is as it was");
        }
        let dirs = run.state();
        places.iter().for_each(|place| flip(path, place + within));
        inspect(&dirs, &["--verify"]).fails(1, &["is damaged", error]);
    }
    inspect(&run.state(), &["--verify"]).ok();
}

/// Where the newest commit is damaged, the one before is used, and whoever uses it says so.
#[test]
fn going_on_from_the_commit_before_is_said() {
    let run = Run::new();
    let dirs = run.state();
    let manifest = dirs[0].join("manifest.bin");
    let document = inspect(&dirs, &["--json"]).ok().json();
    let slots = document["slots"].as_array().unwrap();
    let place =
        |step: u64| slots.iter().find(|slot| slot["step"] == step).unwrap()["offset"].as_u64().unwrap();
    let (newer, older) = (place(DONE), place(DONE - 1));
    let dir = dirs[0].display().to_string();
    let not_whole = "is not whole (damaged, unreadable, or ended by a power cut)";
    let newest = format!(
        "note: the newest commit in {dir}, step 4 by its header, {not_whole}; going on from step 3, the one before\n"
    );
    let either = format!(
        "note: one of the two commits in {dir} {not_whole}, the newest or the one before; going on from step 3, the other\n"
    );
    let export = || {
        let command = cmd(&["export"]).path("--model", &run.bench.path("model"));
        with(command.path("--output", &run.bench.path("export")), &dirs)
    };
    let resume = || finetune(&run.bench, "out", &run.memory, &dirs, STEPS).args(&["--resume"]);
    for (flipped, note, step) in [
        // In the table of checksums, and in the magic number, without which nothing is known of it.
        (Some(newer + 60), Some(&newest), 3),
        (Some(newer), Some(&either), 3),
        // What is older is not used.
        (Some(older + 60), None, 4),
        (None, None, 4),
    ] {
        run.state();
        if let Some(place) = flipped {
            flip(&manifest, place);
        }
        for ended in [export().ok(), resume().ok()] {
            let notes =
                ended.stderr.lines().filter(|line| line.starts_with("note: ") && line.contains(" commit"));
            assert_eq!(notes.map(|line| format!("{line}\n")).collect::<String>(), note.map_or("", |n| n));
            let (exported, resumed) =
                (format!("the model of step {step} "), format!("resumed at step {step} "));
            assert!(ended.stderr.contains(&exported) || ended.stderr.contains(&resumed), "{}", ended.stderr);
        }
        let _ = fs::remove_dir_all(run.bench.path("export"));
    }
}

#[test]
fn there_is_no_way_back_to_what_is_damaged_too() {
    let run = Run::new();
    let dirs = run.state();
    let document = inspect(&dirs, &["--json"]).ok().json();
    for generation in 0..2 {
        let chunk = &chunks(&document, generation)[3];
        flip(&dirs[chunk.disk].join("state.bin"), chunk.offset + 7);
    }
    let before = bytes(&dirs);
    let said = ["step 4 is damaged", "so is step 3 before it", "nothing to go back to", "from a copy"];
    let found = damaged(&dirs, &["--restore-previous"], &said);
    assert!(found["restored_step"].is_null());
    assert_eq!(bytes(&dirs), before);
    let resumed = finetune(&run.bench, "out", &run.memory, &dirs, STEPS).args(&["--resume"]).run();
    assert_eq!(resumed.code(), Some(1));
    assert!(
        resumed.stderr.contains("is damaged") && resumed.stderr.contains("terrace inspect"),
        "{}",
        resumed.stderr
    );
}

#[test]
fn a_report_for_people_and_what_is_refused() {
    let bench = Bench::tiny();
    let state = [bench.path("out").join(".terrace")];
    let run = |steps: &str| bench.finetune("out").args(&["--steps", steps]);
    let parts = ["holds no training state: there is no such directory; give each --disk of the run"];
    inspect(&state, &[]).fails(1, &parts);
    let running = run("4000").spawn();
    assert!(running.wait_until(|| bench.steps_so_far("out") >= 2));
    for words in [&["--verify"][..], &[], &["--verify", "--restore-previous"]] {
        inspect(&state, words)
            .fails(1, &[".terrace is in use: a training runs there", "terrace.lock", "Ctrl-C"]);
    }
    running.signal(libc::SIGINT);
    assert_eq!(running.wait().code(), Some(130));
    let ended = inspect(&state, &["--verify"]).ok();
    let step = *bench.steps("out").last().unwrap();
    text(
        &ended,
        &[
            "format       manifest.bin version 3, state.bin version 3\n",
            &format!("step         {step} (commit {}", step + 1),
            &format!("step before  {} (commit {step}", step - 1),
            ".terrace (",
            "state        split: weights, low half of the master weights, first moments, second moments",
            "generations  2 of ",
            "--learning-rate: 0.001",
            "--dtype: bf16",
            "optimizer: adamw, beta1 0.9, beta2 0.999, eps 1e-8, weight_decay 0\n",
            "--scheduler: linear, num_warmup_steps 0, min_lr_rate 0\n",
            &format!("verified     step {step}: "),
            &format!("verified     step {}: ", step - 1),
            "all as they were written",
        ],
    );
    let ended = inspect(&state, &["--verify", "--restore-previous"]).ok();
    assert!(ended.stderr.contains("no reason to go back, and nothing was changed"), "{}", ended.stderr);

    inspect(&[bench.path("out")], &[]).fails(1, &["there is no manifest", "--disk", "out/.terrace"]);
    inspect(&[state[0].clone(), state[0].clone()], &[]).fails(2, &["is given twice"]);
    inspect(&state, &["--restore-previous"]).fails(2, &["--verify"]);
    cmd(&["inspect"]).fails(2, &["<PATH>"]);
    let by_place = cmd(&["inspect"]).args(&[state[0].to_str().unwrap()]).ok();
    assert_eq!(by_place.stdout, inspect(&state, &[]).ok().stdout, "the flag may be left out");
    let document = inspect(&state, &["--json"]).ok().json();
    assert_eq!(document["whole"], Value::Null, "nothing was verified");
    assert_eq!(document["identity"]["optimizer"], "adamw, beta1 0.9, beta2 0.999, eps 1e-8, weight_decay 0");
    assert!(!bench.path("out").join("terrace.lock").exists());
    let file = bench.path("data.jsonl");
    inspect(&[file], &[]).fails(1, &["data.jsonl", "no such directory"]);
}

/// State in memory is saved now and then: the step before is that of the save before.
#[test]
fn a_save_goes_back_to_the_save_before() {
    let bench = Bench::tiny();
    let run = |output: &str| {
        let offload = ["--steps", "6", "--save-every", "2", "--offload", "host"];
        bench.finetune(output).args(&offload)
    };
    run("whole").ok();
    run("out").ok();
    let state = [bench.path("out").join(".terrace")];
    let document = inspect(&state, &["--json"]).ok().json();
    assert_eq!((&document["step"], &document["previous_step"]), (&6.into(), &4.into()));
    let live = document["slots"].as_array().unwrap().iter().find(|slot| slot["step"] == 6).unwrap();
    // One directory: addresses are offsets.
    let place = live["generation"].as_u64().unwrap() * document["generation_bytes"].as_u64().unwrap();
    flip(&state[0].join("state.bin"), HEADER_BYTES + place + 1234);
    damaged(&state, &[], &["step 6 is damaged", "Step 4 before it is whole"]);
    let ended = inspect(&state, &["--verify", "--restore-previous", "--json"]).ok();
    assert_eq!(ended.json()["restored_step"], 4);
    let resumed = run("out").args(&["--resume"]).ok();
    assert!(resumed.stderr.contains("resumed at step 4 "), "{}", resumed.stderr);
    assert!(bench.weights("out") == bench.weights("whole"));
    assert_eq!(bench.steps("out"), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_read_only_file_system_can_be_looked_at() {
    let Some(disk) = SmallDisk::mount(64 << 20) else { return };
    let bench = Bench::tiny();
    let state = [disk.path().join("state")];
    with(bench.finetune("out"), &state).args(&["--steps", "2"]).ok();
    disk.make_read_only();
    inspect(&state, &["--verify"]).ok();
    let export =
        cmd(&["export"]).path("--model", &bench.path("model")).path("--output", &bench.path("export"));
    with(export, &state).ok();
    assert!(bench.weights("export") == bench.weights("out"));
    inspect(&state, &["--verify", "--restore-previous"]).fails(1, &["terrace.lock", "Read-only file system"]);
}
