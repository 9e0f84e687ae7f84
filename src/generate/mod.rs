//! Around generation: what to continue, how to pick a token, when to stop, and what to report.

mod prompts;
mod sampling;
mod stop;

pub use prompts::{Prompt, read_prompts};
pub use sampling::{SamplingConfig, SamplingError, TokenSampler, penalize};
pub use stop::{not_applied, stop_ids};

use serde::Serialize;

/// One continued prompt, as `--json` prints it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Continuation {
    /// The prompt's tokens.
    pub prompt_ids: Vec<u32>,
    /// The new tokens; a token that stopped the text is the last one.
    pub ids: Vec<u32>,
    /// The new tokens as text; `null` for a model without a tokenizer.
    pub text: Option<String>,
    /// Wall time from when the prompt was read into the batch to its last token.
    pub seconds: f64,
}
