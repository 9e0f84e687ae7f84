//! Leftovers and advertising in source and text.

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
    fn words_within_words_are_fine() {
        assert!(lines("mktemp /tmp/x.XXXXXX; hackathon; wiped; target/workspace/x; <<EOF").is_empty());
    }
}
