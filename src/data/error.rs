//! What can be wrong with data.

use crate::error::advice;
use std::path::{Path, PathBuf};

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A row is malformed.
    #[error("{}:{line}{}: {reason}", path.display(), column.map_or_else(String::new, |column| format!(":{column}")))]
    Row {
        /// The data file.
        path: PathBuf,
        /// The line, from one.
        line: usize,
        /// The character in it, from one, if it is one that is wrong.
        column: Option<usize>,
        /// What is wrong with it.
        reason: String,
    },
    /// There is not a single row.
    #[error("{}: no data: there are no rows", path.display())]
    Empty {
        /// The data file.
        path: PathBuf,
    },
    /// A directory stands where a file of rows is wanted.
    #[error("{}: this is a directory; give one file, .jsonl or .txt", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// The file's name does not say what it holds.
    #[error("{}: cannot tell the format; the name must end in .jsonl, .ndjson or .json for rows, in .txt or .text for text", path.display())]
    Format {
        /// The data file.
        path: PathBuf,
    },
    /// A tokenizer or chat template cannot be used.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The file that is missing or wrong.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A prompt has no tokens, or one that the model does not know.
    #[error("{0}")]
    Prompt(String),
    /// A file could not be read or written.
    #[error("{doing} {}: {source}; {}", path.display(), advice(source))]
    File {
        /// The verb: "reading", "writing".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}

impl DataError {
    pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { doing, path, source }
    }

    /// Says that there is no such file, or that it is a directory, before anything else is said about its name.
    pub(crate) fn check_file(path: &Path) -> Result<(), Self> {
        let metadata = std::fs::metadata(path).map_err(Self::file("opening", path))?;
        if metadata.is_dir() { Err(Self::Directory { path: path.into() }) } else { Ok(()) }
    }

    /// A file of the model's folder that should be JSON.
    pub(crate) fn not_json(path: &Path, error: &serde_json::Error) -> Self {
        Self::tokenizer(path, format!("the file is not JSON: {error}; correct it or download it again"))
    }

    pub(crate) fn tokenizer(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Tokenizer { path: path.to_path_buf(), reason: format!("{reason}") }
    }
}
