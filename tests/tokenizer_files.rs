//! What a model folder's files say of its tokenizer, beside `tokenizer.json`.

use serde_json::{Value, json};
use terrace::data::TextTokenizer;

/// A tokenizer with a token for every byte and `<|plain|>` and `<s>` after them, and these settings and files.
fn load(settings: &Value, files: &[(&str, &str)]) -> Result<TextTokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let mut vocab: serde_json::Map<_, _> =
        (0..=255u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    vocab.insert("<|plain|>".into(), 256.into());
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "added_tokens": [token_with("<s>", 257)], "decoder": {"type": "ByteFallback"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    TextTokenizer::load(folder.path()).map_err(|e| e.to_string())
}

fn token(content: &str) -> Value {
    json!({"content": content, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true})
}

fn token_with(content: &str, id: u32) -> Value {
    let mut token = token(content);
    token["id"] = id.into();
    token
}

#[test]
fn tokens_that_only_the_settings_have_are_added() {
    let listed = json!({
        "259": token("<|im_end|>"), "257": token("<s>"), "258": token("<|im_start|>"), "256": token("<|plain|>"),
    });
    let settings = json!({"added_tokens_decoder": listed, "eos_token": "<|im_end|>"});
    let tokenizer = load(&settings, &[]).unwrap();
    let ids = tokenizer.prompt_ids("a<|im_start|><s>b<|plain|><|im_end|>").unwrap();
    assert_eq!(ids, [97, 258, 257, 98, 256, 259]);
    assert_eq!((tokenizer.eos(), tokenizer.vocab_size()), (Some(259), 260));
    assert_eq!(tokenizer.decode(&[97, 259]).unwrap(), "a", "special tokens are not text");
}

#[test]
fn tokens_with_ids_of_another_file_are_refused() {
    for (id, content, reason) in [
        (
            "260",
            "<|im_end|>",
            "has \"<|im_end|>\" with id 260, which tokenizer.json lacks, and added there it has 258",
        ),
        ("255", "<|im_end|>", "with id 255"),
        ("x", "<|im_end|>", "\"added_tokens_decoder\": expected an id and a token"),
    ] {
        let error = load(&json!({"added_tokens_decoder": {id: token(content)}}), &[]).unwrap_err();
        assert!(error.contains("tokenizer_config.json: ") && error.contains(reason), "{error}");
    }
}
