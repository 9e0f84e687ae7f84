//! Training data: from rows of text to batches of tokens.
//!
//! A data file is read once, line by line, tokenised and written to a token file in the work directory; afterwards batches are
//! read from there by position. Memory use is that of tokenising a few megabytes of rows or text at a time, or a row that is larger (256 MiB
//! at most), plus eight bytes per sample, whatever the size of the data.
//!
//! ```text
//! file ─▶ rows ─▶ Encoder (TextTokenizer, ChatTemplate) ─▶ TokenWriter ─▶ tokens.bin ─▶ Dataset::sample
//!                                                                        Sampler: step ─▶ sample numbers
//! ```

mod batch;
mod chat;
mod dataset;
mod encode;
mod error;
mod filters;
pub(crate) mod messages;
mod pretokenized;
mod python;
pub(crate) mod row;
mod sampler;
mod special;
mod store;
mod tokenizer;

pub use batch::Batch;
pub use chat::{ChatTemplate, Rendered};
pub use dataset::{DataConfig, Dataset, Summary};
pub use error::DataError;
pub use sampler::Sampler;
pub(crate) use sampler::mix;
pub use store::Sample;
pub(crate) use tokenizer::read_json;
pub use tokenizer::{TextTokenizer, TokenSpan};

/// The label of a position that carries no loss, as in Hugging Face's trainers.
pub const IGNORED: i32 = -100;

/// Result of an operation on data.
pub type Result<T = (), E = DataError> = std::result::Result<T, E>;
