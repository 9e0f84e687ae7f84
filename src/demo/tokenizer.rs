//! A byte-level BPE tokenizer trained on the stories, in the files that Hugging Face's libraries read.

use crate::data::DataError;
use serde_json::json;
use std::path::Path;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, TokenizerBuilder};

/// The token that ends a story.
const END: &str = "<|endoftext|>";
/// Its id: special tokens come first.
pub(super) const END_ID: u32 = 0;
/// Largest number of tokens; a small corpus may give fewer.
const VOCAB_MAX: usize = 2048;

/// Trains on `texts`, writes `tokenizer.json` and `tokenizer_config.json` into `model` and gives the number of tokens.
pub(super) fn train(model: &Path, texts: impl Iterator<Item = String> + Send) -> Result<usize, DataError> {
    let path = model.join("tokenizer.json");
    let wrong = |e: tokenizers::Error| DataError::tokenizer(&path, e);
    let byte_level = ByteLevel::new(false, true, true);
    // Every text begins with the token that ended the one before, so that a prompt begins the way a story does.
    let begin = TemplateProcessing::builder()
        .try_single(format!("{END} $A"))
        .map_err(|e| wrong(e.into()))?
        .special_tokens(vec![(END, END_ID)])
        .build()
        .map_err(|e| wrong(e.into()))?;
    let mut tokenizer = TokenizerBuilder::new()
        .with_model(BPE::default())
        .with_normalizer(Some(NFC))
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(begin))
        .with_decoder(Some(byte_level))
        .build()
        .map_err(wrong)?;
    let mut trainer = BpeTrainerBuilder::new()
        .vocab_size(VOCAB_MAX)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    tokenizer.train(&mut trainer, texts).map_err(wrong)?;
    tokenizer.save(&path, true).map_err(wrong)?;
    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": false
    });
    super::write_json(&model.join("tokenizer_config.json"), &settings)?;
    Ok(tokenizer.get_vocab_size(true))
}
