//! Source files that no crate includes.
//!
//! A file is alive when it is a crate root (by Cargo's conventions or a `path` of Cargo.toml), or a living file
//! declares it with `mod name;`, with `#[path]`, or includes it by a literal name.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::Finding;
use super::source::{File, Tree, find_word, is_word};

/// Every Rust file that is not alive.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut alive: BTreeSet<PathBuf> = BTreeSet::new();
    let mut queue: Vec<(PathBuf, bool)> = tree
        .rust()
        .filter(|(path, _)| is_root(tree, path))
        .map(|(path, _)| (path.to_path_buf(), true))
        .collect();
    while let Some((path, is_root)) = queue.pop() {
        if let (Some(file), true) = (tree.get(&path), alive.insert(path.clone())) {
            let owns_folder = is_root || path.ends_with("mod.rs");
            queue.extend(declared(&path, file, owns_folder).into_iter().map(|path| (path, false)));
        }
    }
    let dead = tree.rust().filter(|(path, _)| !alive.contains(*path));
    let message = "no crate includes this file: declare it with `mod`, or delete it";
    dead.map(|(path, _)| Finding { path: path.to_path_buf(), line: 0, message: message.to_owned() }).collect()
}

/// Whether Cargo compiles this file as the root of a crate.
fn is_root(tree: &Tree, path: &Path) -> bool {
    let package = tree.package(path);
    let inside = path.strip_prefix(package).expect("a package holds its files");
    let parts: Vec<&str> = inside.iter().filter_map(|part| part.to_str()).collect();
    let by_convention = match parts.as_slice() {
        ["build.rs"] | ["src", "lib.rs" | "main.rs"] => true,
        ["tests" | "benches" | "examples", rest @ ..] | ["src", "bin", rest @ ..] => {
            matches!(rest, [_] | [_, "main.rs"])
        }
        _ => false,
    };
    let manifest = tree.get(package.join("Cargo.toml")).map_or("", |file| &file.text);
    let named = format!("\"{}\"", inside.display());
    by_convention
        || manifest.lines().any(|line| line.trim_start().starts_with("path") && line.contains(&named))
}

/// The files that `file` may mean by its declarations; some do not exist.
fn declared(path: &Path, file: &File, owns_folder: bool) -> Vec<PathBuf> {
    let folder = path.parent().expect("a file lies in a folder");
    let modules = if owns_folder { folder.to_path_buf() } else { path.with_extension("") };
    let mut paths = Vec::new();
    for at in find_word(&file.code, "mod") {
        let rest = file.code[at + 3..].trim_start();
        let name: String = rest.chars().take_while(|c| is_word(*c)).collect();
        if !name.is_empty() && rest[name.len()..].trim_start().starts_with(';') {
            let inner = enclosing_modules(&file.code[..at]).iter().fold(modules.clone(), |p, m| p.join(m));
            paths.push(inner.join(format!("{name}.rs")));
            paths.push(inner.join(&name).join("mod.rs"));
        }
    }
    for opening in ["#[path = \"", "include!(\""] {
        for (at, _) in file.text.match_indices(opening) {
            let name = file.text[at + opening.len()..].split('"').next().unwrap_or_default();
            paths.push(normal(&folder.join(name)));
        }
    }
    paths
}

/// The names of the inline modules that are open at the end of `code`, outermost first.
fn enclosing_modules(code: &str) -> Vec<&str> {
    let mut open = Vec::new();
    let mut since = 0;
    for (at, c) in code.char_indices().filter(|(_, c)| matches!(c, '{' | '}' | ';')) {
        match c {
            '{' => {
                let mut words = code[since..at].split_whitespace().rev();
                let (name, keyword) = (words.next(), words.next());
                open.push(name.filter(|_| keyword == Some("mod")));
            }
            '}' => drop(open.pop()),
            _ => {}
        }
        since = at + 1;
    }
    open.into_iter().flatten().collect()
}

/// `path` without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(files: &[(&str, &str)]) -> Vec<String> {
        let tree = Tree::of(files.iter().copied());
        check(&tree).into_iter().map(|f| f.path.display().to_string()).collect()
    }

    #[test]
    fn declared_files_are_alive() {
        let files = [
            ("Cargo.toml", ""),
            ("a/Cargo.toml", ""),
            (
                "a/src/lib.rs",
                "mod x;\npub(crate) mod y;\nmod inline { mod z; }\n#[path = \"odd.rs\"] mod even;",
            ),
            ("a/src/x.rs", "mod deep; include!(\"../made.rs\");"),
            ("a/src/x/deep.rs", ""),
            ("a/src/y/mod.rs", "mod beside;"),
            ("a/src/y/beside.rs", ""),
            ("a/src/inline/z.rs", ""),
            ("a/src/odd.rs", ""),
            ("a/made.rs", ""),
            ("a/tests/t.rs", "mod common;"),
            ("a/tests/common/mod.rs", ""),
            ("a/examples/big/main.rs", "mod part;"),
            ("a/examples/big/part.rs", ""),
            ("a/src/bin/tool.rs", ""),
            ("src/main.rs", "mod cli;"),
            ("src/cli/mod.rs", ""),
            ("fuzz/Cargo.toml", "[[bin]]\npath = \"targets/one.rs\""),
            ("fuzz/targets/one.rs", ""),
        ];
        assert!(dead(&files).is_empty(), "{:?}", dead(&files));
    }

    #[test]
    fn undeclared_files_are_dead() {
        let files = [
            ("a/Cargo.toml", ""),
            ("a/src/lib.rs", "// mod x;\nmod y { }"),
            ("a/src/x.rs", ""),
            ("a/src/y.rs", "mod z;"),
            ("a/src/y/z.rs", ""),
            ("a/tests/common/helper.rs", ""),
        ];
        assert_eq!(dead(&files), ["a/src/x.rs", "a/src/y/z.rs", "a/src/y.rs", "a/tests/common/helper.rs"]);
    }
}
