//! Leftovers and advertising in source and text, and flags of the command where there is none.

use std::path::Path;

use super::Finding;
use super::source::{Tree, find_word, line_of};

/// Notes to oneself: what is left to do belongs in an issue, what is wrong belongs fixed.
const LEFTOVERS: [&str; 5] = ["TODO", "FIXME", "XXX", "HACK", "WIP"];

/// Words that say nothing that can be checked. Compared without case.
const ADVERTISING: [&str; 7] =
    ["blazing", "blazingly", "cutting-edge", "seamless", "seamlessly", "revolutionary", "world-class"];

/// Beginnings of lines that a merge left behind.
const CONFLICTS: [&str; 2] = ["<<<<<<< ", ">>>>>>> "];

/// Beginnings of paths that exist on one machine only.
const PLACES: [&str; 3] = ["/root/", "/Users/", "/workspace/"];

/// Libraries that have no flags: their messages name what whoever embeds them can set.
const LIBRARIES: [&str; 7] = ["aio", "device", "kernels", "tiers", "optimizer", "zero", "models"];

/// What the libraries' folders hold beside them.
const COMMANDS: [&str; 2] = ["aio/src/bin", "aio/src/bench"];

/// Every banned word.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.files().filter(|(path, _)| !is_exempt(path)) {
        let mut add = |at: usize, message: String| {
            findings.push(Finding { path: path.to_path_buf(), line: line_of(&file.text, at), message });
        };
        for word in LEFTOVERS {
            find_word(&file.text, word).for_each(|at| add(at, format!("`{word}`: do it or remove it")));
        }
        let lower = file.text.to_ascii_lowercase();
        for word in ADVERTISING {
            find_word(&lower, word).for_each(|at| add(at, format!("`{word}`: say what was measured")));
        }
        for place in PLACES {
            let mut found = file.text.match_indices(place).map(|(at, _)| at);
            let begins = |at: &usize| {
                !file.text[..*at].ends_with(|c: char| c.is_alphanumeric() || "._-}*".contains(c))
            };
            if let Some(at) = found.find(begins) {
                add(at, format!("`{place}…` is a path on one machine: use a relative or a made-up one"));
            }
        }
        if is_library(path) {
            flags(&file.text).for_each(|(at, flag)| {
                add(
                    at,
                    format!(
                        "`{flag}`: a library has no flags; name the field, and the flag in src/cli/flags.rs"
                    ),
                );
            });
        }
        let mut start = 0;
        for line in file.text.split_inclusive('\n') {
            if CONFLICTS.iter().any(|marker| line.starts_with(marker)) {
                add(start, "a merge conflict was left behind".to_owned());
            }
            start += line.len();
        }
    }
    findings
}

/// Whether a file is source of a library that is no command.
fn is_library(path: &Path) -> bool {
    let is_rust = path.extension().is_some_and(|extension| extension == "rs");
    is_rust
        && LIBRARIES.iter().any(|library| path.starts_with(Path::new(library).join("src")))
        && !COMMANDS.iter().any(|command| path.starts_with(command))
}

/// Flags in lines of code, and where they are, but for whole lines that say how to call a command.
fn flags(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.split_inclusive('\n').scan(0, |end, line| {
        *end += line.len();
        Some((*end - line.len(), line))
    });
    let of_library =
        |(_, line): &(usize, &str)| !line.trim_start().starts_with("//") && !line.contains("`terrace ");
    lines.filter(of_library).flat_map(|(start, line)| {
        let begins = line.match_indices("--").filter(|(at, _)| line[..*at].ends_with([' ', '(', '`']));
        begins.filter_map(move |(at, _)| {
            let flag = line[at..].split(|c: char| c != '-' && !c.is_ascii_lowercase()).next()?;
            (flag.len() > 3).then_some((start + at, flag))
        })
    })
}

/// This file has to name what it bans.
fn is_exempt(path: &Path) -> bool {
    path == Path::new("xtask/src/tidy/words.rs")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        check(&Tree::of([("a.md", text)])).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn banned_words_are_found() {
        assert_eq!(lines("fine\n// TODO: later\n"), [2]);
        assert_eq!(lines("A Blazingly fast engine.\n"), [1]);
        assert_eq!(lines("a\n<<<<<<< HEAD\nb\n"), [2]);
        assert_eq!(lines("see `/root/notes`"), [1]);
    }

    #[test]
    fn flags_in_messages_of_libraries_are_found() {
        let found = |path, text| check(&Tree::of([(path, text)])).len();
        let message = "fn f() -> &'static str {\n    \"lower it (--batch-size)\"\n}\n";
        assert_eq!([found("zero/src/a.rs", message), found("src/a.rs", message)], [1, 0]);
        assert_eq!(found("aio/src/bin/aio-bench/a.rs", message), 0);
        let fine = "// use --this\n\"--std=c++17\"; \"a -- b\"; x--y; \"see `terrace inspect --verify`\"\n";
        assert_eq!(found("zero/src/a.rs", fine), 0);
    }

    #[test]
    fn words_within_words_are_fine() {
        assert!(lines("mktemp /tmp/x.XXXXXX; hackathon; wiped; target/workspace/x; <<EOF").is_empty());
    }
}
