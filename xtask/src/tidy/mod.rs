//! `cargo xtask tidy`: what the compiler and clippy do not check.
//!
//! - [`lengths`]: files of at most 800 lines, functions of at most 100, with a ratchet that may only shrink;
//! - [`calls`]: macros and functions that do not belong where they are;
//! - [`modules`]: every source file is part of some crate;
//! - [`layers`]: dependencies point one way, and the crates that forbid unsafe code say so;
//! - [`words`]: leftovers and advertising in source and text, and flags in messages of libraries.
//!
//! It reads the source line by line with comments and strings blanked out ([`source`]), which is as much of the
//! language as these rules need. It runs as a test of this crate, too.

pub mod calls;
pub mod layers;
pub mod lengths;
pub mod modules;
pub mod source;
pub mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use source::Tree;

/// Where the ratchet lies, from the project root.
pub const RATCHET: &str = "xtask/tidy-ratchet.txt";

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// The file, from the project root.
    pub path: PathBuf,
    /// Counted from 1; 0 for the whole file.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path.display(), self.message),
            line => write!(f, "{}:{line}: {}", self.path.display(), self.message),
        }
    }
}

/// Checks the project at `root`.
///
/// # Errors
/// Every finding, one a line, or why a file could not be read.
pub fn run(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let findings = check(&tree);
    if findings.is_empty() {
        eprintln!("tidy: {} Rust files are in order", tree.rust().count());
        return Ok(());
    }
    let mut lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    lines.push(format!("tidy: {} findings", findings.len()));
    Err(lines.join("\n"))
}

/// Lowers the ratchet to what is left of it; nothing is ever added or raised.
///
/// # Errors
/// When a file cannot be read or the ratchet not written.
pub fn shrink(root: &Path) -> Result<(), String> {
    let tree = Tree::read(root)?;
    let ratchet = lengths::Ratchet::of(&tree);
    let text = ratchet.shrunk(&lengths::functions(&tree)).to_string();
    std::fs::write(root.join(RATCHET), text).map_err(|e| format!("cannot write {RATCHET}: {e}"))
}

/// Every finding, in the order of the files.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = lengths::check(tree);
    findings.extend(calls::check(tree));
    findings.extend(modules::check(tree));
    findings.extend(layers::check(tree));
    findings.extend(words::check(tree));
    findings.sort();
    findings
}
