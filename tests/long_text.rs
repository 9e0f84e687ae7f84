//! Texts of more than a piece: tokens are those of the whole text, and white space that no tokenizer can cut is refused.

use serde_json::json;
use std::path::{Path, PathBuf};
use terrace::data::{DataConfig, Dataset, TextTokenizer};

/// Letters and line breaks, cut by `pre_tokenizer`, after `normalizer`; the space is `▁`.
fn tokenizer(
    folder: &Path,
    normalizer: &serde_json::Value,
    pre_tokenizer: &serde_json::Value,
) -> TextTokenizer {
    let letters = ('a'..='z').chain(['.', '\n', ' ', '\u{2581}', '\u{120}', '\u{10a}']);
    let vocab: serde_json::Map<_, _> = (0..).zip(letters).map(|(id, c)| (c.to_string(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    TextTokenizer::load(folder).unwrap()
}

fn build(tokenizer: &TextTokenizer, name: &str, text: &str) -> Result<Vec<u32>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let config =
        DataConfig { seq_len: 4096, pack: false, vocab_size: 64, tokenizer_path: PathBuf::from("t") };
    let data = Dataset::build(&path, Some(tokenizer), &config, folder.path()).map_err(|e| e.to_string())?;
    Ok((0..data.len()).flat_map(|at| data.sample(at).unwrap().ids).collect())
}

#[test]
fn pieces_have_no_space_of_their_own() {
    let lines = "the cat sat on the mat.\n".repeat(50_000);
    let line = "the cat sat on the mat. ".repeat(100_000);
    assert!(lines.len() > 1 << 20 && line.len() > 1 << 21, "more than a piece");
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let prepend =
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace]});
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    for (normalizer, pre_tokenizer) in [
        (prepend, json!(null)),
        (json!(null), metaspace("first")),
        (json!(null), metaspace("always")),
        (json!(null), metaspace("never")),
        (
            json!(null),
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer(folder.path(), &normalizer, &pre_tokenizer);
        for text in [&lines, &line] {
            let whole = tokenizer.prompt_ids(text).unwrap();
            let ids = build(&tokenizer, "d.txt", text).unwrap();
            assert_eq!(ids.len(), whole.len(), "{normalizer} {pre_tokenizer}");
            assert!(ids == whole, "{normalizer} {pre_tokenizer}");
        }
    }
}

#[test]
fn tokens_that_close_a_text_stand_at_its_end_alone() {
    let folder = tempfile::tempdir().unwrap();
    tokenizer(folder.path(), &json!(null), &json!(null));
    let path = folder.path().join("tokenizer.json");
    let mut file: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = |id: u32, content: &str| json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    file["added_tokens"] = json!([added(32, "<s>"), added(33, "</s>")]);
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special("<s>"), {"Sequence": {"id": "A", "type_id": 0}}, special("</s>")],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [32], "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [33], "tokens": ["</s>"]},
        },
    });
    std::fs::write(&path, file.to_string()).unwrap();
    // Those of the text's own stay, also where a piece ends.
    let (lines, own) = ("the cat sat.\n".repeat(100_000), "a</s> ".repeat(400_000));
    for text in ["a cat.".into(), lines, own] {
        // The end token follows what closes a text, if it is another.
        for (eos, added) in [("</s>", vec![]), ("<s>", vec![32])] {
            let config = json!({ "eos_token": eos }).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            let tokenizer = TextTokenizer::load(folder.path()).unwrap();
            let whole = tokenizer.encode(&text, true).unwrap();
            let mut whole: Vec<u32> = whole.iter().map(|span| span.id).collect();
            assert_eq!((whole.first(), whole.last()), (Some(&32), Some(&33)));
            whole.extend(added);
            assert!(build(&tokenizer, "d.txt", &text).unwrap() == whole, "{} bytes, {eos}", text.len());
        }
    }
}

#[test]
fn endless_white_space_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(folder.path(), &json!(null), &json!(null));
    let long = |length: usize| format!("a\nb{}c\n", " ".repeat(length));
    let reason = "500000 or more characters of white space in a row";
    assert!(build(&tokenizer, "d.txt", &long(499_999)).is_ok());
    let error = build(&tokenizer, "d.txt", &long(500_000)).unwrap_err();
    assert!(error.contains(&format!("d.txt:2: {reason}")), "{error}");
    for row in [json!({"text": long(500_000)}), json!({"prompt": "a", "completion": long(600_000)})] {
        let error = build(&tokenizer, "d.jsonl", &format!("{{\"text\": \"a\"}}\n{row}\n")).unwrap_err();
        assert!(error.contains(&format!("d.jsonl:2: {reason}")), "{error}");
    }
    assert!(tokenizer.prompt_ids(&long(500_000)).unwrap_err().to_string().starts_with(reason));
    // Words between are enough.
    assert!(tokenizer.prompt_ids(&long(300_000).repeat(2)).is_ok());
}
