//! The project's files, and Rust source with everything but code blanked out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Text files that the rules look at.
const EXTENSIONS: [&str; 9] = ["rs", "toml", "md", "txt", "sh", "yml", "py", "cu", "h"];

/// Every text file of the project, by its path from the root.
#[derive(Default)]
pub struct Tree {
    files: BTreeMap<PathBuf, File>,
}

/// One text file.
pub struct File {
    /// As it is on disk.
    pub text: String,
    /// For Rust: [`code`] of the text; empty for other files.
    pub code: String,
}

impl Tree {
    /// Reads every text file below `root`, except in hidden folders and those that hold build results.
    ///
    /// # Errors
    /// Names the file or folder that could not be read.
    pub fn read(root: &Path) -> Result<Self, String> {
        let mut tree = Self::default();
        tree.read_folder(root, Path::new(""))?;
        Ok(tree)
    }

    /// A tree of made files, for tests.
    pub fn of<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut tree = Self::default();
        files.into_iter().for_each(|(path, text)| tree.insert(PathBuf::from(path), text.to_owned()));
        tree
    }

    /// Every file.
    pub fn files(&self) -> impl Iterator<Item = (&Path, &File)> {
        self.files.iter().map(|(path, file)| (path.as_path(), file))
    }

    /// Every Rust file.
    pub fn rust(&self) -> impl Iterator<Item = (&Path, &File)> {
        self.files().filter(|(path, _)| path.extension().is_some_and(|e| e == "rs"))
    }

    /// One file.
    pub fn get(&self, path: impl AsRef<Path>) -> Option<&File> {
        self.files.get(path.as_ref())
    }

    /// The folder of the nearest Cargo.toml at or above a file: its package.
    pub fn package<'a>(&self, path: &'a Path) -> &'a Path {
        let mut folders = path.ancestors().skip(1);
        folders.find(|folder| self.get(folder.join("Cargo.toml")).is_some()).unwrap_or(Path::new(""))
    }

    fn insert(&mut self, path: PathBuf, text: String) {
        let code = if path.extension().is_some_and(|e| e == "rs") { code(&text) } else { String::new() };
        self.files.insert(path, File { text, code });
    }

    fn read_folder(&mut self, root: &Path, folder: &Path) -> Result<(), String> {
        let fail = |e: std::io::Error| format!("cannot read {}: {e}", root.join(folder).display());
        for entry in fs::read_dir(root.join(folder)).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name();
            let path = folder.join(&name);
            let kind = entry.file_type().map_err(fail)?;
            if name.as_encoded_bytes().starts_with(b".") || name.as_encoded_bytes().starts_with(b"target") {
                continue;
            }
            if kind.is_dir() {
                self.read_folder(root, &path)?;
            } else if kind.is_file() && path.extension().is_some_and(|e| EXTENSIONS.iter().any(|x| e == *x)) {
                let text = fs::read_to_string(root.join(&path))
                    .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
                self.insert(path, text);
            }
        }
        Ok(())
    }
}

/// `text` with comments and the contents of string and character literals replaced by spaces. Lines and columns (in
/// bytes) stay where they are.
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    while code.len() < bytes.len() {
        let at = code.len();
        let length = match bytes[at] {
            b'/' if bytes[at..].starts_with(b"//") => line_comment(&bytes[at..]),
            b'/' if bytes[at..].starts_with(b"/*") => block_comment(&bytes[at..]),
            b'"' => quoted(&bytes[at..]),
            b'\'' => character(&text[at..]),
            b'r' if !preceded_by_word(bytes, at) => raw_string(&bytes[at..]),
            b'b' | b'c' if !preceded_by_word(bytes, at) && bytes.get(at + 1) == Some(&b'r') => {
                raw_string(&bytes[at + 1..]).map(|length| length + 1)
            }
            _ => None,
        };
        match length {
            Some(length) => {
                let literal = &bytes[at..at + length];
                code.extend(literal.iter().map(|b| if *b == b'\n' { b'\n' } else { b' ' }));
            }
            None => code.push(bytes[at]),
        }
    }
    String::from_utf8(code).expect("whole characters were copied or blanked byte by byte")
}

/// Whether `c` can be part of an identifier.
pub fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// The byte offsets at which `word` stands in `code`, not as part of a longer word.
pub fn find_word<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = code[..*at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        let starts = !word.starts_with(is_word) || !before.is_some_and(is_word);
        let ends = !word.ends_with(is_word) || !after.is_some_and(is_word);
        starts && ends
    })
}

/// The line of a byte offset, counted from 1.
pub fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at].iter().filter(|b| **b == b'\n').count()
}

fn preceded_by_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && is_word(char::from(bytes[at - 1]))
}

fn line_comment(bytes: &[u8]) -> Option<usize> {
    Some(bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len()))
}

fn block_comment(bytes: &[u8]) -> Option<usize> {
    let (mut depth, mut at) = (0, 0);
    while at < bytes.len() {
        if bytes[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if bytes[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return Some(at);
            }
        } else {
            at += 1;
        }
    }
    Some(bytes.len())
}

/// A literal from one `"` to the next that is not escaped.
fn quoted(bytes: &[u8]) -> Option<usize> {
    let mut at = 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    Some((at + 1).min(bytes.len()))
}

/// A character literal; a lifetime is none.
fn character(text: &str) -> Option<usize> {
    let mut rest = text.char_indices().skip(1);
    let (_, first) = rest.next()?;
    if first == '\\' {
        rest.next()?;
        return rest.find(|(_, c)| *c == '\'').map(|(at, _)| at + 1);
    }
    rest.next().filter(|(_, c)| *c == '\'').map(|(at, _)| at + 1)
}

/// `r"…"` or `r#"…"#` with any number of hashes; `r#identifier` is none.
fn raw_string(bytes: &[u8]) -> Option<usize> {
    let hashes = bytes[1..].iter().take_while(|b| **b == b'#').count();
    let start = 1 + hashes;
    if bytes.get(start) != Some(&b'"') {
        return None;
    }
    let end = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    let length = bytes[start + 1..].windows(end.len()).position(|window| window == end);
    Some(length.map_or(bytes.len(), |length| start + 1 + length + end.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str) -> String {
        let code = code(text);
        assert_eq!(code.len(), text.len());
        assert_eq!(code.lines().count(), text.lines().count());
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_are_blanked() {
        assert_eq!(kept("a // b {\nc /* d /* e */ f */ g"), "a c g");
        assert_eq!(kept("a / b"), "a / b");
    }

    #[test]
    fn literals_are_blanked() {
        assert_eq!(kept(r#"f("a \" { b", 'x', '\'', '\u{7f}', b"}") + 1"#), "f( , , , , b ) + 1");
        assert_eq!(kept(r##"f(r#"a " }"#, r"\", br"}") z"##), "f( , , ) z");
        assert_eq!(kept("let s = \"ä{\n}\"; done"), "let s = ; done");
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_not_literals() {
        assert_eq!(kept("fn f<'a>(x: &'a str, r#fn: u8) {}"), "fn f<'a>(x: &'a str, r#fn: u8) {}");
        assert_eq!(kept("'outer: loop { break 'outer; }"), "'outer: loop { break 'outer; }");
    }

    #[test]
    fn words_are_whole() {
        assert_eq!(find_word("fn fnord(fn)", "fn").collect::<Vec<_>>(), [0, 9]);
        assert_eq!(find_word("my_dbg!() dbg!()", "dbg!(").collect::<Vec<_>>(), [10]);
    }
}
