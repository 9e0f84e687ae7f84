//! Files and functions that are too long.
//!
//! A long file is fine when its first comment says why (with the words "long because"). A long function is tolerated
//! only while the ratchet lists it, and then at the listed length: new ones are refused and old ones may only shrink.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::source::{Tree, find_word, is_word, line_of};
use super::{Finding, RATCHET};

/// Lines a file may have without a reason.
pub const FILE_LINES_MAX: usize = 800;

/// Lines a function may have, from `fn` to its closing brace.
pub const FUNCTION_LINES_MAX: usize = 100;

/// Long files without a reason, long functions outside the ratchet, and slack in the ratchet.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.rust() {
        let lines = file.text.lines().count();
        if lines > FILE_LINES_MAX && !first_comment(&file.text).contains("long because") {
            let message = format!(
                "{lines} lines, more than {FILE_LINES_MAX}: split it, or say in its first comment that it is long because …"
            );
            findings.push(Finding { path: path.to_path_buf(), line: 0, message });
        }
    }
    findings.extend(Ratchet::of(tree).check(&functions(tree)));
    findings
}

/// A function with a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// `path::name`, which is how the ratchet calls it.
    pub key: String,
    /// Of `fn`, counted from 1.
    pub line: usize,
    /// From `fn` to the closing brace.
    pub lines: usize,
}

/// Every function longer than [`FUNCTION_LINES_MAX`].
pub fn functions(tree: &Tree) -> Vec<Function> {
    let all = tree.rust().flat_map(|(path, file)| functions_of(path, &file.code));
    all.filter(|function| function.lines > FUNCTION_LINES_MAX).collect()
}

fn functions_of(path: &Path, code: &str) -> Vec<Function> {
    let mut functions = Vec::new();
    for at in find_word(code, "fn") {
        let name: String = code[at + 2..].trim_start().chars().take_while(|c| is_word(*c)).collect();
        if let (false, Some(length)) = (name.is_empty(), length_to_closing_brace(&code[at..])) {
            let lines = line_of(&code[at..], length);
            functions.push(Function {
                key: format!("{}::{name}", path.display()),
                line: line_of(code, at),
                lines,
            });
        }
    }
    functions
}

/// Bytes from `fn` to the brace that closes its body; None for a declaration without one.
fn length_to_closing_brace(code: &str) -> Option<usize> {
    // Depth of (), [] and {} together: a `;` at depth 0 ends a declaration, but not inside `[u8; 4]`.
    let mut depth = 0;
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' => depth -= 1,
            '}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at);
                }
            }
            ';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// The comment lines at the top of a file.
fn first_comment(text: &str) -> String {
    text.lines().take_while(|line| line.starts_with("//")).collect::<Vec<_>>().join(" ")
}

/// Tolerated lengths by function.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ratchet {
    tolerated: BTreeMap<String, usize>,
}

impl Ratchet {
    /// The ratchet of a project, empty when it has none.
    pub fn of(tree: &Tree) -> Self {
        tree.get(RATCHET).map(|file| Self::parse(&file.text)).unwrap_or_default()
    }

    /// `lines path::name` a line; `#` begins a comment line.
    fn parse(text: &str) -> Self {
        let entry = |line: &str| {
            let (lines, key) = line.split_once(' ')?;
            Some((key.trim().to_owned(), lines.parse().ok()?))
        };
        Self { tolerated: text.lines().filter_map(entry).collect() }
    }

    fn check(&self, functions: &[Function]) -> Vec<Finding> {
        let mut findings = Vec::new();
        let longest = longest(functions);
        for (key, function) in &longest {
            let lines = function.lines;
            let advice = match self.tolerated.get(*key) {
                None => format!("more than {FUNCTION_LINES_MAX}: split it"),
                Some(tolerated) if lines > *tolerated => {
                    format!("more than the {tolerated} that {RATCHET} tolerates: it may only shrink")
                }
                Some(_) => continue,
            };
            let (path, name) = key.rsplit_once("::").expect("a key is path::name");
            let message = format!("function `{name}` has {lines} lines, {advice}");
            findings.push(Finding { path: path.into(), line: function.line, message });
        }
        for (key, tolerated) in &self.tolerated {
            let lines = longest.get(key.as_str()).map_or(0, |function| function.lines);
            if lines < *tolerated {
                let message =
                    format!("`{key}` no longer needs {tolerated} lines: run `cargo xtask tidy --shrink`");
                findings.push(Finding { path: RATCHET.into(), line: 0, message });
            }
        }
        findings
    }

    /// This ratchet without what is no longer needed.
    pub fn shrunk(&self, functions: &[Function]) -> Self {
        let longest = longest(functions);
        let keep = |(key, tolerated): (&String, &usize)| {
            longest.get(key.as_str()).map(|function| (key.clone(), function.lines.min(*tolerated)))
        };
        Self { tolerated: self.tolerated.iter().filter_map(keep).collect() }
    }
}

impl fmt::Display for Ratchet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Functions longer than {FUNCTION_LINES_MAX} lines that are tolerated for now, with their length."
        )?;
        writeln!(f, "# This list may only shrink; `cargo xtask tidy --shrink` lowers it to what is left.")?;
        self.tolerated.iter().try_for_each(|(key, lines)| writeln!(f, "{lines} {key}"))
    }
}

/// Functions of one name in one file share an entry, which the longest decides.
fn longest(functions: &[Function]) -> BTreeMap<&str, &Function> {
    let mut longest: BTreeMap<&str, &Function> = BTreeMap::new();
    for function in functions {
        let entry = longest.entry(&function.key).or_insert(function);
        if function.lines > entry.lines {
            *entry = function;
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of `lines` lines.
    fn function(name: &str, lines: usize) -> String {
        format!("fn {name}() {{\n{}}}\n", "    let _ = \"}\"; // }\n".repeat(lines - 2))
    }

    fn messages(tree: &Tree) -> Vec<String> {
        check(tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn functions_are_measured() {
        let code = super::super::source::code(
            "trait T { fn a(&self, x: [u8; 4]); }\nstruct S { f: fn(u8) -> u8 }\nfn b<'a>(\n    x: &'a str,\n) {\n    fn c() {}\n}\n",
        );
        let found: Vec<_> =
            functions_of(Path::new("x.rs"), &code).into_iter().map(|f| (f.key, f.line, f.lines)).collect();
        assert_eq!(found, [("x.rs::b".to_owned(), 3, 5), ("x.rs::c".to_owned(), 6, 1)]);
    }

    #[test]
    fn a_long_function_is_refused_and_the_ratchet_tolerates_it_once() {
        let source = function("ok", 100) + &function("long", 101);
        assert_eq!(
            messages(&Tree::of([("a.rs", source.as_str())])),
            ["a.rs:101: function `long` has 101 lines, more than 100: split it"]
        );
        let with = |ratchet| messages(&Tree::of([("a.rs", source.as_str()), (RATCHET, ratchet)]));
        assert!(with("101 a.rs::long\n").is_empty());
        assert!(with("100 a.rs::long\n")[0].contains("may only shrink"));
        assert!(with("102 a.rs::long\n")[0].contains("--shrink"));
        assert!(with("101 a.rs::long\n200 a.rs::gone\n")[0].contains("`a.rs::gone`"));
    }

    #[test]
    fn shrinking_never_adds() {
        let source = function("long", 150) + &function("new", 150);
        let tree = Tree::of([("a.rs", source.as_str()), (RATCHET, "# x\n160 a.rs::long\n170 b.rs::gone\n")]);
        let shrunk = Ratchet::of(&tree).shrunk(&functions(&tree));
        assert_eq!(shrunk, Ratchet::parse("150 a.rs::long"));
        assert_eq!(Ratchet::parse(&shrunk.to_string()), shrunk);
    }

    #[test]
    fn a_long_file_needs_a_reason() {
        let long = "\n".repeat(801);
        assert!(messages(&Tree::of([("a.rs", long.as_str())]))[0].contains("801 lines"));
        let reason = format!("//! Tables.\n//! This file is long because it is one table.\n{long}");
        assert!(messages(&Tree::of([("a.rs", reason.as_str())])).is_empty());
    }
}
