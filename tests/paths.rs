//! Paths that are no text: every command takes them, and its document shows what it can of them.
#![allow(missing_docs)]

mod support;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use support::{Bench, cmd};

#[test]
fn documents_of_paths_that_are_not_utf_8() {
    let bench = Bench::tiny();
    let place = |name: &[u8]| -> PathBuf { bench.path("").join(OsStr::from_bytes(name)) };
    let (out, state, again) = (place(b"o\xff"), place(b"s\xff"), place(b"a\xff"));
    let run = bench.finetune("").without("--output").path("--output", &out).path("--disk", &state);
    let document = run.args(&["--steps", "2", "--json"]).ok().json();
    assert!(document["output"].as_str().unwrap().ends_with("o\u{fffd}"));
    assert!(document["state"][0].as_str().unwrap().ends_with("s\u{fffd}"));
    let document = cmd(&["inspect", "--verify", "--json"]).path("--disk", &state).ok().json();
    assert!(document["paths"][0]["path"].as_str().unwrap().ends_with("s\u{fffd}"));
    assert!(document["slots"][0]["path"].as_str().unwrap().ends_with("s\u{fffd}/manifest.bin"));
    let model = bench.path("model");
    let export = cmd(&["export", "--json"]).path("--disk", &state).path("--model", &model);
    let document = export.path("--output", &again).ok().json();
    assert!(document["output"].as_str().unwrap().ends_with("a\u{fffd}"));
    // A profile is read again, and could not name it.
    let calibrate = cmd(&["calibrate", "--quick"]).path("--disk", &state);
    calibrate.path("--output", &bench.path("profile.json")).fails(2, &["not UTF-8", "another folder"]);
}
