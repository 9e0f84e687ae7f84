//! The binary from outside: exit codes, streams, `report`.
#![allow(missing_docs)]

use std::process::{Command, Output};

fn terrace(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_terrace")).args(words).output().unwrap()
}

#[test]
fn bad_usage_is_exit_code_2_on_stderr() {
    for words in [&[][..], &["finetune"], &["plan"], &["report", "--nonsense"], &["generate", "--model", "m"]]
    {
        let output = terrace(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty());
    }
}

#[test]
fn help_lists_what_exists() {
    let output = terrace(&["--help"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for command in ["finetune", "generate", "eval", "inspect", "export", "demo", "report"] {
        assert!(text.contains(command), "{text}");
    }
    assert!(text.contains("larger than memory"), "{text}");
    let text = String::from_utf8(terrace(&["finetune", "--help"]).stdout).unwrap();
    assert!(text.contains("--max-shard-size") && !text.contains("--discrete"), "{text}");
}

#[test]
fn report_in_both_forms() {
    let text = terrace(&["report"]);
    assert_eq!(text.status.code(), Some(0));
    assert!(String::from_utf8(text.stdout).unwrap().contains("cpu features"));
    let json = terrace(&["report", "--json"]);
    let value: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(value["version"], env!("CARGO_PKG_VERSION"));
}

/// `terrace … | head -1` ends when the reader has seen enough.
#[test]
fn a_reader_that_went_away_is_no_error() {
    for words in [&["report"][..], &["report", "--json"], &["plan", "--params", "1b", "--device", "cpu"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_terrace")).args(words).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.contains("panicked") && !stderr.contains("error"), "{stderr}");
    }
}
