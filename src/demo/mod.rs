//! The material of `terrace demo`: stories, a tokenizer trained on them, and the config of a small Llama. Everything is made
//! here from a seed; nothing is downloaded.

mod story;
mod tokenizer;

pub use story::{Stories, story};

use crate::data::DataError;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Stories to train on.
const TRAIN_STORIES: usize = 4000;
/// Stories to evaluate on; none of them is in the training data.
const HELD_OUT_STORIES: usize = 200;
/// Stories that the tokenizer is trained on.
const TOKENIZER_STORIES: usize = 2000;
/// Sequence length that the demo trains with.
pub const SEQ_LEN: usize = 128;

/// What the demo works with. All files exist except the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemoFiles {
    /// Model folder: config, tokenizer and generation config, no weights yet.
    pub model: PathBuf,
    /// Training data, `.jsonl` rows `{"text"}`.
    pub train: PathBuf,
    /// Held-out data of the same kind.
    pub held_out: PathBuf,
    /// The beginning of a story, to be continued.
    pub prompt: String,
    /// Number of token ids of the model, a multiple of 64.
    pub vocab_size: usize,
}

/// Writes corpus, tokenizer and configuration into `folder`. The same seed writes the same bytes.
///
/// # Errors
/// A file cannot be written.
pub fn prepare(folder: &Path, seed: u64) -> Result<DemoFiles, DataError> {
    let (model, data) = (folder.join("model"), folder.join("data"));
    for folder in [&model, &data] {
        std::fs::create_dir_all(folder).map_err(DataError::file("creating", folder))?;
    }
    let (train, held_out) = (data.join("stories.jsonl"), data.join("held_out.jsonl"));
    write_stories(&train, Stories::new(seed).take(TRAIN_STORIES))?;
    let unseen = Stories::new(seed).skip(TRAIN_STORIES).take(HELD_OUT_STORIES);
    write_stories(&held_out, unseen)?;
    let tokens = tokenizer::train(&model, Stories::new(seed).take(TOKENIZER_STORIES))?;
    let vocab_size = tokens.next_multiple_of(64);
    write_json(&model.join("config.json"), &llama(vocab_size))?;
    let generation = json!({ "bos_token_id": tokenizer::END_ID, "eos_token_id": tokenizer::END_ID });
    write_json(&model.join("generation_config.json"), &generation)?;
    Ok(DemoFiles { model, train, held_out, prompt: "Once upon a time, there was a".into(), vocab_size })
}

/// A Llama of about 12 million parameters: large enough to learn the stories in a few hundred steps, small enough for two cores.
fn llama(vocab_size: usize) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": null,
        "attention_bias": false,
        "mlp_bias": false,
        "attention_dropout": 0.0,
        "tie_word_embeddings": true,
        "bos_token_id": tokenizer::END_ID,
        "eos_token_id": tokenizer::END_ID,
        "torch_dtype": "bfloat16"
    })
}

fn write_stories(path: &Path, stories: impl Iterator<Item = String>) -> Result<(), DataError> {
    let file = File::create(path).map_err(DataError::file("creating", path))?;
    let mut writer = BufWriter::new(file);
    for text in stories {
        writeln!(writer, "{}", json!({ "text": text })).map_err(DataError::file("writing", path))?;
    }
    writer.flush().map_err(DataError::file("writing", path))
}

fn write_json(path: &Path, value: &Value) -> Result<(), DataError> {
    std::fs::write(path, format!("{value:#}\n")).map_err(DataError::file("writing", path))
}
