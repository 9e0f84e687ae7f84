//! What can be wrong with a model's files or with the tokens given to it.

use std::path::PathBuf;
use terrace_zero::{EngineError, file_advice};

/// A model folder or a batch that cannot be used; the message says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// An architecture or option outside what the blocks compute.
    #[error("{what} {found} is not supported; supported: {supported}")]
    Unsupported {
        /// The option, for example `hidden_act`.
        what: String,
        /// What the configuration asks for.
        found: String,
        /// What would work.
        supported: String,
    },
    /// A missing, mistyped or inconsistent entry of config.json.
    #[error("`{key}` {detail}")]
    Config {
        /// The entry.
        key: String,
        /// What is wrong with it.
        detail: String,
    },
    /// Text that is no JSON object.
    #[error("the file {detail}; correct it or download it again")]
    NoObject {
        /// What it is instead.
        detail: String,
    },
    /// A configuration that is refused, and where it stands.
    #[error("{}: {reason}", path.display())]
    ConfigFile {
        /// The file; `config.json` where only its text was given.
        path: PathBuf,
        /// Why.
        reason: Box<ModelError>,
    },
    /// A folder without weights that can be read.
    #[error("{} has no {expected}{hint}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What was looked for.
        expected: String,
        /// What to do instead, starting with a separator, or empty.
        hint: &'static str,
    },
    /// A parameter that no weight file has.
    #[error("{} has no tensor `{tensor}` (expected shape {expected:?}); does config.json belong to these weights?", folder.display())]
    MissingTensor {
        /// Where it was looked for.
        folder: PathBuf,
        /// The parameter.
        tensor: String,
        /// Its dimensions.
        expected: Vec<usize>,
    },
    /// A tensor whose dimensions differ from what the configuration implies.
    #[error(
        "tensor `{tensor}` in {} has shape {found:?} where config.json implies {expected:?}",
        path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The parameter.
        tensor: String,
        /// Dimensions that the configuration implies.
        expected: Vec<usize>,
        /// Dimensions in the file.
        found: Vec<usize>,
    },
    /// A head of its own beside a configuration that has it tied.
    #[error(
        "`lm_head.weight` in {} differs from the embedding, which config.json says is the head: set tie_word_embeddings to false to use it, or \
         remove it from the file",
        path.display()
    )]
    HeadNotTied {
        /// The file.
        path: PathBuf,
    },
    /// A tensor of an element type that is not read.
    #[error(
        "tensor `{tensor}` in {} is stored as {found}; supported: F32, BF16, F16 \
         (convert quantized checkpoints to bf16 first)",
        path.display()
    )]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The parameter.
        tensor: String,
        /// Its element type.
        found: String,
    },
    /// A safetensors file whose header makes no sense.
    #[error("{} is not a usable safetensors file: {detail}; download it again", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A safetensors file that ends before its header says.
    #[error(
        "{} is truncated: its header describes {expected} bytes, the file has {found}; download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the header describes, itself included.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// Tokens that do not fit the model or the batch.
    #[error("batch: {0}")]
    Batch(String),
    /// The operating system refused.
    #[error("{doing} {}: {source}{}", path.display(), file_advice(source))]
    File {
        /// The verb: "reading", "writing".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}

/// Result of an operation on a model's files.
pub type Result<T = (), E = ModelError> = std::result::Result<T, E>;

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::File { doing, path, source } => Self::File { doing, path, source },
            other => Self::Model(other.to_string()),
        }
    }
}

impl ModelError {
    /// Names the file that a refused configuration stands in.
    pub(crate) fn config_file(path: &std::path::Path) -> impl FnOnce(Self) -> Self {
        let path = path.to_owned();
        move |reason| Self::ConfigFile { path, reason: Box::new(reason) }
    }

    /// Wraps an operating system error, for `map_err`.
    pub(crate) fn file(doing: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { doing, path, source }
    }
}
