//! What a model folder's files say of its tokenizer, beside `tokenizer.json`.

use serde_json::{Value, json};
use std::path::Path;
use terrace::data::TextTokenizer;
use terrace::generate::read_prompts;

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

const SHOWS_BOS: &str = "{{ bos_token }}|{{ eos_token }}|{% for m in messages %}{{ m.content }}{% endfor %}";

#[test]
fn a_token_that_is_null_is_none_to_the_template() {
    let config = ("config.json", r#"{"bos_token_id": 257, "eos_token_id": 97}"#);
    for (settings, expected) in [
        (json!({"chat_template": SHOWS_BOS}), "<s>|<0x61>|x"),
        (json!({"chat_template": SHOWS_BOS, "bos_token": null}), "|<0x61>|x"),
        (json!({"chat_template": SHOWS_BOS, "bos_token": null, "eos_token": null}), "||x"),
    ] {
        let tokenizer = load(&settings, &[config]).unwrap();
        assert_eq!(tokenizer.chat().unwrap().unwrap().prompt(&[json!({"content": "x"})]).unwrap(), expected);
        assert_eq!(tokenizer.eos(), Some(97), "texts end with what the model ends with");
    }
}

#[test]
fn conversations_with_tools_have_a_template_of_their_own() {
    let of = |tokenizer: &TextTokenizer| {
        [tokenizer.chat().unwrap(), tokenizer.chat_with_tools().unwrap()]
            .map(|template| template.map(|t| t.prompt(&[]).unwrap()))
    };
    let both = [Some("D".to_owned()), Some("T".to_owned())];
    let list = json!({"chat_template": [
        {"name": "default", "template": "D"}, {"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"},
    ]});
    assert_eq!(of(&load(&list, &[]).unwrap()), both);
    let object = json!({"chat_template": {"default": "D", "tool_use": "T"}});
    assert_eq!(of(&load(&object, &[]).unwrap()), both);
    assert_eq!(of(&load(&json!({"chat_template": "D"}), &[]).unwrap()), [Some("D".into()), Some("D".into())]);
    let tools_only = json!({"chat_template": {"tool_use": "T"}});
    assert_eq!(of(&load(&tools_only, &[]).unwrap()), [None, Some("T".into())]);
    let wrong = load(&json!({"chat_template": {"default": "D", "tool_use": "{% if %}"}}), &[]).unwrap();
    assert!(
        wrong
            .chat_with_tools()
            .unwrap_err()
            .to_string()
            .contains("tokenizer_config.json: chat template, line 1")
    );
    // The file counts, whatever the settings say.
    assert_eq!(
        of(&load(&list, &[("chat_template.jinja", "F")]).unwrap()),
        [Some("F".into()), Some("F".into())]
    );
}

/// Whoever renders nothing needs no template.
#[test]
fn a_template_that_does_not_compile_is_refused_where_it_is_needed() {
    let tokenizer = load(&json!({"chat_template": "{% if %}"}), &[]).unwrap();
    assert_eq!(tokenizer.prompt_ids("a").unwrap(), [97]);
    for error in [tokenizer.chat().unwrap_err(), tokenizer.chat_with_tools().unwrap_err()] {
        assert!(error.to_string().contains("tokenizer_config.json: chat template, line 1"), "{error}");
    }
}

/// `<|plain|>` is a token of the vocabulary and not among the added ones.
#[test]
fn tokens_that_are_special_by_name_alone() {
    let by_map = |map: Value| vec![("special_tokens_map.json", map.to_string())];
    let plain = json!(["<|plain|>"]);
    for (settings, files) in [
        (json!({"eos_token": "<|plain|>"}), vec![]),
        (json!({"unk_token": {"content": "<|plain|>", "__type": "AddedToken"}}), vec![]),
        (json!({"image_token": "<|plain|>"}), vec![]),
        (json!({"additional_special_tokens": plain}), vec![]),
        (json!({"extra_special_tokens": plain}), vec![]),
        (json!({"extra_special_tokens": [token("<|plain|>")]}), vec![]),
        (json!({"extra_special_tokens": {"image_token": "<|plain|>"}}), vec![]),
        (json!({}), by_map(json!({"additional_special_tokens": plain}))),
        (json!({}), by_map(json!({"pad_token": token("<|plain|>")}))),
    ] {
        let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let tokenizer = load(&settings, &files).unwrap();
        assert_eq!(tokenizer.prompt_ids("a<|plain|>b").unwrap(), [97, 256, 98], "{settings}");
        assert_eq!(tokenizer.decode(&[97, 256]).unwrap(), "a", "{settings}");
    }
    let older = r#"{"<|plain|>": 256, "<new>": 258}"#;
    let tokenizer = load(&json!({"eos_token": "<new>"}), &[("added_tokens.json", older)]).unwrap();
    assert_eq!(tokenizer.prompt_ids("a<|plain|><new>b").unwrap(), [97, 256, 258, 98]);
    assert_eq!(tokenizer.decode(&[97, 256, 258]).unwrap(), "a<|plain|>", "only one of them is special");
    let refused = load(&json!({}), &[("added_tokens.json", r#"{"<new>": 300}"#)]).unwrap_err();
    assert!(refused.contains("added_tokens.json: the file has \"<new>\" with id 300"), "{refused}");
    // Newer settings list all there are, and a name without an id gets none.
    let newer =
        json!({"added_tokens_decoder": {"257": token("<s>")}, "eos_token": "<none>", "pad_token": ""});
    let tokenizer = load(&newer, &[("added_tokens.json", r#"{"<new>": 300}"#)]).unwrap();
    assert_eq!((tokenizer.prompt_ids("<none>").unwrap().len(), tokenizer.vocab_size()), (6, 258));
}

#[test]
fn templates_know_all_special_tokens() {
    let shows =
        "{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ sep_token is defined }}|{{ eos_token }}";
    let settings = json!({
        "chat_template": shows, "pad_token": "<pad>", "unk_token": token("<unk>"), "eos_token": null,
        "extra_special_tokens": {"image_token": "<s>"}, "clean_up_tokenization_spaces": false,
    });
    let map = r#"{"eos_token": "</s>", "cls_token": "<cls>"}"#;
    let tokenizer = load(&settings, &[("special_tokens_map.json", map)]).unwrap();
    let text = tokenizer.chat().unwrap().unwrap().prompt(&[]).unwrap();
    assert_eq!(text, "<pad>|<unk>|<s>|False|");
}

/// What is trained on as a conversation is continued as one.
#[test]
fn prompts_may_be_messages() {
    let chat = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{% if tools %}t{% endif %}\
                {% if add_generation_prompt %}a{% endif %}";
    let settings = json!({"chat_template": {"default": chat, "tool_use": format!("T{chat}")}});
    let tokenizer = load(&settings, &[]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.jsonl");
    let texts = |tokenizer: &TextTokenizer, rows: &str| -> Result<Vec<String>, String> {
        std::fs::write(&path, rows).unwrap();
        let prompts = read_prompts(&path).map_err(|e| e.to_string())?;
        let ids = prompts.iter().map(|prompt| prompt.ids(Some(tokenizer), Path::new("m"), 258));
        let ids = ids.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
        Ok(ids.iter().map(|ids| tokenizer.decode(ids).unwrap()).collect())
    };
    let hello = json!([{"role": "user", "content": "hi"}]);
    let rows = [
        json!({"messages": hello, "prompt": null}),
        json!({"messages": hello, "tools": [{"type": "function"}]}),
        json!({"prompt": "plain"}),
    ];
    let rows: String = rows.iter().map(|row| format!("{row}\n")).collect();
    assert_eq!(texts(&tokenizer, &rows).unwrap(), ["uhi;a", "Tuhi;ta", "plain"]);
    let refused = texts(&tokenizer, "{\"messages\": [{\"content\": \"x\"}]}\n").unwrap_err();
    assert!(refused.contains("with a string as role"), "{refused}");
    let none = load(&json!({}), &[]).unwrap();
    assert!(texts(&none, &rows).unwrap_err().contains("need a chat template"));
}
