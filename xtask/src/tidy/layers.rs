//! Dependencies point one way (invariant I7), and the crates above the hardware forbid unsafe code.
//!
//! Dev-dependencies are free: tests may reach anywhere.

use std::path::Path;

use super::Finding;
use super::source::Tree;

/// Our crates that each of our crates may use. Crates below `adapters/` and `fuzz/` sit on top and may use any.
const ALLOWED: [(&str, &[&str]); 9] = [
    ("aio", &[]),
    ("device", &[]),
    ("kernels", &["device"]),
    ("tiers", &["aio", "device"]),
    ("optimizer", &["kernels"]),
    ("zero", &["tiers", "kernels", "optimizer", "device", "aio"]),
    ("models", &["zero", "kernels"]),
    ("", &["aio", "device", "kernels", "tiers", "optimizer", "zero", "models"]),
    ("xtask", &[]),
];

/// Crate roots that must forbid unsafe code.
const SAFE: [&str; 4] = ["optimizer/src/lib.rs", "zero/src/lib.rs", "models/src/lib.rs", "src/lib.rs"];

/// Dependencies that point the wrong way, packages without a place, and crate roots that allow unsafe code.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.files().filter(|(path, _)| path.ends_with("Cargo.toml")) {
        let package = path.parent().expect("Cargo.toml lies in a folder");
        if package.starts_with("adapters") || package.starts_with("fuzz") {
            continue;
        }
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| package == Path::new(name)) else {
            let message =
                "this package has no place in the order of dependencies: add it to xtask/src/tidy/layers.rs";
            findings.push(Finding { path: path.to_path_buf(), line: 0, message: message.to_owned() });
            continue;
        };
        for (line, name) in dependencies(&file.text).filter(|(_, name)| !allowed.contains(name)) {
            let message =
                format!("terrace-{name} may not be used here: dependencies point one way (invariant I7)");
            findings.push(Finding { path: path.to_path_buf(), line, message });
        }
    }
    for path in SAFE {
        if tree.get(path).is_some_and(|file| !file.code.contains("#![forbid(unsafe_code)]")) {
            let message = "`#![forbid(unsafe_code)]` is missing".to_owned();
            findings.push(Finding { path: path.into(), line: 1, message });
        }
    }
    findings
}

/// Our crates among the normal and build dependencies of a manifest, without their prefix, with their line.
fn dependencies(manifest: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_dependencies = false;
    let lines = manifest.lines().enumerate().map(move |(index, line)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.starts_with('[') {
            let table = line.trim_matches(['[', ']']);
            let is_dependencies = |part: &str| part == "dependencies" || part == "build-dependencies";
            in_dependencies = !table.starts_with("workspace") && table.split('.').any(is_dependencies);
        }
        (index + 1, if in_dependencies { line } else { "" })
    });
    lines.flat_map(|(number, line)| {
        let is_name = |c: char| c == '-' || c == '_' || c.is_alphanumeric();
        let words = line.split(move |c| !is_name(c));
        words.filter_map(move |word| Some((number, word.strip_prefix("terrace-")?)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, manifest: &str) -> Vec<usize> {
        check(&Tree::of([(path, manifest)])).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn wrong_directions_are_found() {
        let manifest = "[dependencies]\nterrace-device.workspace = true\nterrace-aio = { path = \"../aio\" }\n\
                        x = { package = \"terrace-zero\" }\nserde = \"1\" # terrace-zero\n";
        assert_eq!(lines("kernels/Cargo.toml", manifest), [3, 4]);
        assert_eq!(lines("zero/Cargo.toml", manifest), [4]);
        assert!(lines("Cargo.toml", manifest).is_empty());
        assert_eq!(
            lines("aio/Cargo.toml", "[target.'cfg(unix)'.dependencies.terrace-tiers]\npath = \"x\""),
            [1]
        );
        assert_eq!(lines("aio/Cargo.toml", "[build-dependencies]\nterrace-tiers = \"1\""), [2]);
    }

    #[test]
    fn tests_and_the_workspace_table_may_name_any() {
        assert!(lines("aio/Cargo.toml", "[dev-dependencies]\nterrace-zero.workspace = true").is_empty());
        let workspace =
            "[workspace.dependencies]\nterrace-zero = { path = \"zero\" }\n[dependencies]\nhalf = \"2\"";
        assert!(lines("aio/Cargo.toml", workspace).is_empty());
    }

    #[test]
    fn a_new_package_needs_a_place() {
        assert_eq!(lines("extra/Cargo.toml", ""), [0]);
        assert!(lines("adapters/candle/Cargo.toml", "[dependencies]\nterrace-zero = \"1\"").is_empty());
    }

    #[test]
    fn safe_crates_say_so() {
        let findings = |text| check(&Tree::of([("zero/src/lib.rs", text)])).len();
        assert_eq!(findings("#![forbid(unsafe_code)]\n"), 0);
        assert_eq!(findings("// #![forbid(unsafe_code)]\n"), 1);
    }
}
