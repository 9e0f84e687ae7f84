//! A data file, tokenised: samples by number.

use super::batch::loss_terms_of;
use super::encode::{Encoded, Encoder, Part};
use super::store::{TokenStore, TokenWriter};
use super::tokenizer::white_space_from;
use super::{DataError, Result, Sample, TextTokenizer, row};
use rayon::prelude::*;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use terrace_zero::create_dir_durably;

/// Plain text is tokenised in pieces of about this size.
const PIECE_BYTES: usize = 1 << 20;
/// A line that is longer is read in parts.
const LINE_BYTES: u64 = 1 << 18;
/// Rows are read and encoded this many bytes at a time.
const ROWS_BYTES: usize = 4 << 20;
/// The longest row.
const ROW_BYTES_MAX: usize = 256 << 20;

/// How rows become samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataConfig {
    /// Longest sample, in tokens.
    pub seq_len: usize,
    /// Pack rows of every kind into full sequences, not only plain text.
    pub pack: bool,
    /// Number of token ids that the model knows.
    pub vocab_size: usize,
    /// Where the model's tokenizer is or would be, for messages: [`TextTokenizer::file_of`].
    pub tokenizer_path: PathBuf,
}

/// What a data set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Summary {
    /// Rows of the file; a `.txt` is one.
    pub rows: u64,
    /// Tokens in all samples.
    pub tokens: u64,
    /// Tokens that carry loss.
    pub loss_tokens: u64,
    /// Rows that were longer than a sample may be.
    pub truncated: u64,
    /// Rows that carry no loss, by their labels or because of truncation. They stay samples, so that the order of rows is
    /// that of the file.
    pub without_loss: u64,
}

/// A tokenised data file.
#[derive(Debug)]
pub struct Dataset {
    store: TokenStore,
    summary: Summary,
    fingerprint: u64,
    warning: Option<String>,
    /// Samples that carry no loss, in order.
    idle: Vec<usize>,
}

impl Dataset {
    /// Tokenises `path` into `work_dir/tokens.bin`. Plain text is packed into full sequences with the end token between
    /// documents; the last sequence may be shorter. Any other row is one sample, cut at `seq_len`, unless `pack` is on.
    ///
    /// # Errors
    /// A row is malformed (the message names file and line), there are no rows, the tokenizer is needed but absent, or a file
    /// cannot be read or written.
    ///
    /// # Panics
    /// If `seq_len` is zero.
    pub fn build(
        path: &Path,
        tokenizer: Option<&TextTokenizer>,
        config: &DataConfig,
        work_dir: &Path,
    ) -> Result<Self> {
        assert!(config.seq_len > 0, "a sample has at least one token");
        DataError::check_file(path)?;
        let is_text = |extension: &OsStr| {
            extension.eq_ignore_ascii_case("txt") || extension.eq_ignore_ascii_case("text")
        };
        let lines = path.extension().is_some_and(is_text);
        if !lines && !row::is_file_of_rows(path) {
            return Err(DataError::Format { path: path.into() });
        }
        let file = File::open(path).map_err(DataError::file("opening", path))?;
        // Training state may come to lie in it.
        create_dir_durably(work_dir).map_err(DataError::file("creating", work_dir))?;
        let mut builder = Builder {
            encoder: Encoder {
                tokenizer,
                tokenizer_path: &config.tokenizer_path,
                vocab_size: config.vocab_size,
            },
            writer: TokenWriter::create(&work_dir.join("tokens.bin"))?,
            packed: Sample::default(),
            summary: Summary::default(),
            config,
            path,
            near_miss: None,
            only_last: (0, 0),
            idle: Vec::new(),
        };
        let mut reader = BufReader::with_capacity(1 << 18, file);
        if lines {
            builder.plain_file(&mut reader)?;
        } else {
            builder.rows(&mut reader)?;
        }
        builder.finish()
    }

    /// Number of samples, at least one.
    #[expect(clippy::len_without_is_empty, reason = "an empty data set is refused")]
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// Sample `index`.
    ///
    /// # Errors
    /// The token file cannot be read.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn sample(&self, index: usize) -> Result<Sample> {
        self.store.sample(index)
    }

    /// Samples by number, in the order given.
    ///
    /// # Errors
    /// The token file cannot be read.
    pub fn samples(&self, indices: &[usize]) -> Result<Vec<Sample>> {
        indices.iter().map(|&index| self.sample(index)).collect()
    }

    /// What the data set holds.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Whether any of these samples carries loss.
    pub fn carries_loss(&self, indices: &[usize]) -> bool {
        indices.iter().any(|index| self.idle.binary_search(index).is_err())
    }

    /// Whether all samples carry loss.
    pub fn all_carry_loss(&self) -> bool {
        self.idle.is_empty()
    }

    /// What the user should know of rows that were taken all the same: the first whose key is almost one that would count, and how
    /// many of whose turns only the last is learnt.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// A hash of all ids and labels and of how they are cut into samples. A run may be resumed on data of the same fingerprint.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

struct Builder<'a> {
    encoder: Encoder<'a>,
    writer: TokenWriter,
    /// Tokens that do not fill a sequence yet.
    packed: Sample,
    summary: Summary,
    config: &'a DataConfig,
    path: &'a Path,
    /// The first row with a key that is almost one that would count.
    near_miss: Option<String>,
    /// Rows of whose turns only the last is learnt, and the line of the first.
    only_last: (u64, usize),
    idle: Vec<usize>,
}

impl Builder<'_> {
    /// Rows are encoded in parallel, a few megabytes of them at a time, and written in order.
    fn rows(&mut self, reader: &mut impl BufRead) -> Result {
        // Where the system refuses threads, this one does it alone.
        let pool = rayon::ThreadPoolBuilder::new().build().ok();
        let (mut number, mut ended) = (0, false);
        while !ended {
            let mut lines = Vec::new();
            let mut bytes = 0;
            while bytes < ROWS_BYTES {
                let mut line = Vec::new();
                let mut row = reader.by_ref().take(ROW_BYTES_MAX as u64 + 1);
                if row.read_until(b'\n', &mut line).map_err(DataError::file("reading", self.path))? == 0 {
                    ended = true;
                    break;
                }
                number += 1;
                if line.len() > ROW_BYTES_MAX {
                    let reason = "a row of more than 256 MiB; give each text or conversation a line of its own, or plain text as .txt";
                    return Err(self.row_error(number, reason.into()));
                }
                bytes += line.len();
                lines.push((number, line));
            }
            let encode = |(number, line): &(usize, Vec<u8>)| self.encode(*number, line);
            let encoded: Vec<Result<Option<Encoded>>> = match &pool {
                Some(pool) => pool.install(|| lines.par_iter().map(encode).collect()),
                None => lines.iter().map(encode).collect(),
            };
            for (row, (number, _)) in encoded.into_iter().zip(&lines) {
                if let Some(row) = row? {
                    self.summary.rows += 1;
                    self.note(&row, *number);
                    self.row(row)?;
                }
            }
        }
        Ok(())
    }

    /// Keeps what the user should know of a row.
    fn note(&mut self, row: &Encoded, number: usize) {
        if let (Some((key, meant)), None) = (&row.near_miss, &self.near_miss) {
            self.near_miss = Some(format!(
                "{}:{number}: the key \"{key}\" is ignored; if \"{meant}\" is meant, rename it",
                self.path.display()
            ));
        }
        if row.only_last {
            let (count, first) = self.only_last;
            self.only_last = (count + 1, if count == 0 { number } else { first });
        }
    }

    fn warning(&mut self) -> Option<String> {
        let only_last = match self.only_last {
            (0, _) => None,
            (count, first) => Some(format!(
                "{}: of {count} {} (the first in line {first}) only the assistant's last turn is learnt, because the chat template \
                 writes earlier ones otherwise once messages follow; to learn those too, give each a row that ends with it",
                self.path.display(),
                if count == 1 { "row" } else { "rows" },
            )),
        };
        match (self.near_miss.take(), only_last) {
            (Some(one), Some(other)) => Some(format!("{one}; {other}")),
            (one, other) => one.or(other),
        }
    }

    /// One line; `None` if it is blank.
    fn encode(&self, number: usize, line: &[u8]) -> Result<Option<Encoded>> {
        let text =
            std::str::from_utf8(line).map_err(|_| self.row_error(number, "the line is not UTF-8".into()))?;
        let text = if number == 1 { text.trim_start_matches('\u{feff}') } else { text };
        if text.trim().is_empty() {
            return Ok(None);
        }
        let row = row::object(self.path, number, text)?;
        self.encoder.row(row).map(Some).map_err(|reason| self.row_error(number, reason))
    }

    fn row(&mut self, row: Encoded) -> Result {
        let Encoded { mut sample, plain, .. } = row;
        if plain || self.config.pack {
            return self.pack(&sample);
        }
        if sample.ids.len() > self.config.seq_len {
            self.summary.truncated += 1;
            sample.ids.truncate(self.config.seq_len);
            sample.labels.truncate(self.config.seq_len);
        }
        self.summary.without_loss += u64::from(loss_terms_of(&sample.labels) == 0);
        self.write(&sample.ids, &sample.labels)
    }

    /// One document, read in pieces. A piece ends after a line break between two characters that are no white space, where
    /// tokenizers split anyway, so that the tokens are those of the whole text; failing that, at any line break, or [in a line](end_of).
    fn plain_file(&mut self, reader: &mut impl BufRead) -> Result {
        let (mut piece, mut line, mut last) = (Vec::new(), Vec::new(), None);
        let mut first_line = 1;
        loop {
            line.clear();
            // Of a long line it is a part.
            let mut part = reader.by_ref().take(LINE_BYTES);
            let read = part.read_until(b'\n', &mut line).map_err(DataError::file("reading", self.path))?;
            let clean = line.first().is_some_and(|b| !b.is_ascii_whitespace())
                && matches!(piece.as_slice(), [.., before, b'\n'] if !before.is_ascii_whitespace());
            let full = piece.len() >= 2 * PIECE_BYTES || (piece.len() >= PIECE_BYTES && clean);
            if (read == 0 || full) && !piece.is_empty() {
                let rest = if read == 0 { Vec::new() } else { piece.split_off(end_of(&piece)) };
                last = self.piece(&piece, first_line, last, read == 0)?.or(last);
                first_line += piece.iter().filter(|&&b| b == b'\n').count();
                piece = rest;
            }
            if read == 0 {
                break;
            }
            piece.extend_from_slice(&line);
        }
        if let Some(last) = last {
            self.summary.rows = 1;
            if let Some(eos) = self.encoder.end_of_document(Some(last)) {
                self.pack(&Sample { ids: vec![eos], labels: vec![eos as i32] })?;
            }
        }
        Ok(())
    }

    /// Packs one piece of a document, perhaps the one that `ends` it, and gives its last token. `last` is the document's last token so far.
    fn piece(
        &mut self,
        piece: &[u8],
        first_line: usize,
        last: Option<u32>,
        ends: bool,
    ) -> Result<Option<u32>> {
        let text = std::str::from_utf8(piece).map_err(|e| {
            let line = first_line + piece[..e.valid_up_to()].iter().filter(|&&b| b == b'\n').count();
            self.row_error(line, "the line is not UTF-8".into())
        })?;
        let text = if last.is_none() { text.trim_start_matches('\u{feff}') } else { text };
        let part = match (last, ends) {
            (None, true) => Part::Whole,
            (None, false) => Part::Beginning,
            (Some(_), false) => Part::Later,
            (Some(_), true) => Part::End,
        };
        let encoded = self.encoder.text(text, part);
        let sample = encoded.map_err(|reason| {
            let wrong = white_space_from(text).map_or("", |at| &text[..at]);
            self.row_error(first_line + wrong.matches('\n').count(), reason)
        })?;
        self.pack(&sample)?;
        Ok(sample.ids.last().copied())
    }

    fn pack(&mut self, sample: &Sample) -> Result {
        let length = self.config.seq_len;
        let mut at = 0;
        while at < sample.ids.len() {
            let take = (length - self.packed.ids.len()).min(sample.ids.len() - at);
            self.packed.ids.extend(&sample.ids[at..at + take]);
            self.packed.labels.extend(&sample.labels[at..at + take]);
            at += take;
            if self.packed.ids.len() == length {
                let full = std::mem::take(&mut self.packed);
                self.write(&full.ids, &full.labels)?;
            }
        }
        Ok(())
    }

    fn write(&mut self, ids: &[u32], labels: &[i32]) -> Result {
        self.summary.tokens += ids.len() as u64;
        let terms = loss_terms_of(labels);
        self.summary.loss_tokens += terms;
        if terms == 0 {
            self.idle.push(self.writer.len());
        }
        self.writer.push(ids, labels)
    }

    fn finish(mut self) -> Result<Dataset> {
        let rest = std::mem::take(&mut self.packed);
        // A single left-over token predicts nothing, unless it is all there is.
        if rest.ids.len() > 1 || (rest.ids.len() == 1 && self.summary.tokens == 0) {
            self.write(&rest.ids, &rest.labels)?;
        }
        let warning = self.warning();
        let (path, summary, idle) = (self.path.to_path_buf(), self.summary, self.idle);
        let store = self.writer.finish()?;
        if store.len() == 0 {
            return Err(DataError::Empty { path });
        }
        if summary.loss_tokens == 0 {
            let reason =
                format!("no token of any row carries loss (rows are cut at {} tokens)", self.config.seq_len);
            return Err(DataError::Row { path, line: 1, column: None, reason });
        }
        let fingerprint = store.fingerprint();
        Ok(Dataset { store, summary, fingerprint, warning, idle })
    }

    fn row_error(&self, line: usize, reason: String) -> DataError {
        DataError::Row { path: self.path.to_path_buf(), line, column: None, reason }
    }
}

/// Where a piece ends: after its last line break, if nothing follows that, or in its second half before a space between two words, where
/// tokenizers split, too; failing that behind any word, failing that between any two characters.
fn end_of(piece: &[u8]) -> usize {
    if piece.ends_with(b"\n") {
        return piece.len();
    }
    let half = piece.len() / 2;
    let is_between = |bytes: &[u8]| matches!(bytes, [before, b' ', after] if !before.is_ascii_whitespace() && !after.is_ascii_whitespace());
    if let Some(at) = piece[half..].windows(3).rposition(is_between) {
        return half + at + 1;
    }
    // The last character may be cut; what else is no UTF-8 is said of the piece that begins with it.
    let text = piece.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    let mut ends = text.char_indices().rev().take_while(|(at, _)| *at > half);
    let behind_word =
        ends.find(|(at, next)| !next.is_alphanumeric() && text[..*at].ends_with(char::is_alphanumeric));
    match behind_word {
        Some((at, _)) => at,
        None if text.is_empty() => piece.len(),
        None => text.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_a_line_ends_between_words() {
        for (piece, end) in [
            ("a word\n", "a word\n"),
            ("a word, and an", "a word, and"),
            ("a b cd  ef\tgh", "a b cd  ef"),
            ("ab\u{fc}cd. \u{fc}f", "ab\u{fc}cd."),
            (
                "\u{4eca}\u{5929}\u{3002}\u{660e}\u{65e5}\u{3002}\u{660e}",
                "\u{4eca}\u{5929}\u{3002}\u{660e}\u{65e5}",
            ),
            ("a bcdefghij", "a bcdefghij"),
        ] {
            assert_eq!(&piece[..end_of(piece.as_bytes())], end, "{piece}");
        }
        // Half a character stays for the next piece.
        assert_eq!(end_of(&"ab\u{fc}".as_bytes()[..3]), 2);
        assert_eq!(end_of(b"\xffabc"), 4);
    }
}
