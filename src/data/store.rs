//! The token file: samples as they are trained on, read by number.
//!
//! ```text
//! tokens.bin   sample 0: id label id label …   sample 1: …        u32 id, i32 label, little-endian, no padding
//! index        ends: [tokens up to and with sample 0, … 1, …]     in memory, 8 bytes a sample
//! ```
//! The file belongs to one process and is made anew by the next; what outlives it is the fingerprint, which a resumed run compares. It has a
//! name only until it is open, so that its space is free again once the process ends, however that ends.

use super::{DataError, Result};
use std::fs::File;
use std::hash::Hasher;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use twox_hash::XxHash3_64;

const TOKEN_BYTES: u64 = 8;

/// One sequence to train on. The labels stand at the position of their token: shifting is the model's business.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Labels, one per id; [`IGNORED`](super::IGNORED) carries no loss.
    pub labels: Vec<i32>,
}

/// Writes samples, in order.
pub(super) struct TokenWriter {
    path: PathBuf,
    file: BufWriter<File>,
    ends: Vec<u64>,
    hash: XxHash3_64,
}

/// Reads samples, by number.
#[derive(Debug)]
pub(super) struct TokenStore {
    path: PathBuf,
    file: File,
    ends: Vec<u64>,
    fingerprint: u64,
}

impl TokenWriter {
    pub(super) fn create(path: &Path) -> Result<Self> {
        // A new file takes over the name. Another run that reads the one before it, and that this process is about to be
        // refused for, keeps what it has open. Where a file that is open cannot be removed, the next takes over its name.
        let fresh = path.with_extension(std::process::id().to_string());
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&fresh);
        let file = file.map_err(DataError::file("creating", &fresh))?;
        std::fs::rename(&fresh, path).map_err(DataError::file("creating", path))?;
        let _ = std::fs::remove_file(path);
        Ok(Self {
            path: path.into(),
            file: BufWriter::with_capacity(1 << 18, file),
            ends: Vec::new(),
            hash: XxHash3_64::new(),
        })
    }

    /// Samples so far.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn push(&mut self, ids: &[u32], labels: &[i32]) -> Result<()> {
        assert_eq!(ids.len(), labels.len(), "one label per id");
        assert!(!ids.is_empty(), "a sample has tokens");
        self.hash.write(&(ids.len() as u64).to_le_bytes());
        for (id, label) in ids.iter().zip(labels) {
            let token = u64::from(*id) | (u64::from(*label as u32) << 32);
            self.hash.write(&token.to_le_bytes());
            self.file.write_all(&token.to_le_bytes()).map_err(DataError::file("writing", &self.path))?;
        }
        self.ends.push(self.ends.last().unwrap_or(&0) + ids.len() as u64);
        Ok(())
    }

    pub(super) fn finish(self) -> Result<TokenStore> {
        let Self { path, file, ends, hash } = self;
        let file = file.into_inner().map_err(|e| DataError::file("writing", &path)(e.into_error()))?;
        Ok(TokenStore { path, file, ends, fingerprint: hash.finish() })
    }
}

impl TokenStore {
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    pub(super) fn sample(&self, index: usize) -> Result<Sample> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        let tokens = (self.ends[index] - start) as usize;
        let mut bytes = vec![0; tokens * TOKEN_BYTES as usize];
        self.file
            .read_exact_at(&mut bytes, start * TOKEN_BYTES)
            .map_err(DataError::file("reading", &self.path))?;
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let mut sample = Sample { ids: Vec::with_capacity(tokens), labels: Vec::with_capacity(tokens) };
        for (at, word) in words.enumerate() {
            if at % 2 == 0 {
                sample.ids.push(word);
            } else {
                sample.labels.push(word as i32);
            }
        }
        Ok(sample)
    }
}
