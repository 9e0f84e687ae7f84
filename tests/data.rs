//! Data files as users write them: what becomes of every kind of row, and what is refused.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use terrace::data::{DataConfig, Dataset, IGNORED, Sample, TextTokenizer};
use terrace::demo;

/// One demo folder for all tests: its tokenizer takes a second to train.
static DEMO: LazyLock<(tempfile::TempDir, demo::DemoFiles)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let files = demo::prepare(folder.path(), 0).unwrap();
    let path = files.model.join("tokenizer_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let chat = r#"{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"#;
    let mut settings: serde_json::Value = serde_json::from_str(&text).unwrap();
    settings["chat_template"] = chat.into();
    std::fs::write(&path, settings.to_string()).unwrap();
    (folder, files)
});

fn tokenizer() -> TextTokenizer {
    TextTokenizer::load(&DEMO.1.model).unwrap()
}

struct Build {
    seq_len: usize,
    pack: bool,
    vocab_size: usize,
    tokenizer: bool,
}

impl Default for Build {
    fn default() -> Self {
        Self { seq_len: 64, pack: false, vocab_size: 2048, tokenizer: true }
    }
}

impl Build {
    fn run(&self, name: &str, text: impl AsRef<[u8]>) -> Result<Dataset, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        self.open(&path, folder.path())
    }

    fn open(&self, path: &Path, work_dir: &Path) -> Result<Dataset, String> {
        let tokenizer = self.tokenizer.then(tokenizer);
        let config = DataConfig {
            seq_len: self.seq_len,
            pack: self.pack,
            vocab_size: self.vocab_size,
            tokenizer_path: PathBuf::from("m/tokenizer.json"),
        };
        Dataset::build(path, tokenizer.as_ref(), &config, work_dir).map_err(|e| e.to_string())
    }
}

fn samples(data: &Dataset) -> Vec<Sample> {
    (0..data.len()).map(|i| data.sample(i).unwrap()).collect()
}

/// The text of the tokens that carry loss.
fn learned(sample: &Sample) -> String {
    let ids: Vec<u32> = sample.labels.iter().filter(|&&l| l != IGNORED).map(|&l| l as u32).collect();
    tokenizer().decode(&ids).unwrap()
}

#[test]
fn every_kind_of_row() {
    let text = r#"{"prompt": "Once upon a time,", "completion": " there was a fox."}

{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "A fox."}, {"role": "user", "content": "And"}, {"role": "assistant", "content": "A bear."}]}
{"input_ids": [5, 6, 7], "extra": true}
{"input_ids": [5, 6, 7], "labels": [-100, 6, -100]}"#;
    let data = Build::default().run("d.jsonl", text).unwrap();
    let rows = samples(&data);
    assert_eq!(rows.len(), 4);
    let eos = tokenizer().eos().unwrap();
    assert_eq!(tokenizer().decode(&rows[0].ids).unwrap(), "Once upon a time, there was a fox.");
    assert_eq!(learned(&rows[0]), " there was a fox.");
    assert_eq!((rows[0].ids.last(), rows[0].labels.last()), (Some(&eos), Some(&(eos as i32))));
    assert_eq!(
        tokenizer().decode(&rows[1].ids).unwrap(),
        "[user] Hello[assistant] A fox.[user] And[assistant] A bear."
    );
    assert_eq!(learned(&rows[1]).replace(' ', ""), "Afox.Abear.");
    assert_eq!(
        rows[1].labels.iter().filter(|&&l| l == eos as i32).count(),
        2,
        "the assistant learns to end its turns"
    );
    assert_eq!(rows[2], Sample { ids: vec![5, 6, 7], labels: vec![5, 6, 7] });
    assert_eq!(rows[3], Sample { ids: vec![5, 6, 7], labels: vec![IGNORED, 6, IGNORED] });
    assert_eq!(data.summary().rows, 4);
}

#[test]
fn plain_text_is_packed_with_the_end_token_between() {
    let (one, two) = ("The fox was happy. The bear was sad.", "A mouse and an owl lived in a forest.");
    let eos = tokenizer().eos().unwrap();
    let mut stream = Vec::new();
    for text in [one, two] {
        stream.extend(tokenizer().prompt_ids(text).unwrap());
        stream.push(eos);
    }
    let text = format!("{{\"text\": \"{one}\"}}\n{{\"text\": \"{two}\"}}\n");
    let rows = samples(&Build { seq_len: 4, ..Build::default() }.run("d.jsonl", text).unwrap());
    assert_eq!(
        rows.iter().flat_map(|s| s.ids.clone()).collect::<Vec<_>>()[..stream.len() / 4 * 4],
        stream[..stream.len() / 4 * 4]
    );
    assert!(rows[..rows.len() - 1].iter().all(|s| s.ids.len() == 4), "only the last may be short");
    assert!(rows.iter().all(|s| s.labels.iter().zip(&s.ids).all(|(&l, &i)| l == i as i32)));
}

#[test]
fn a_text_file_is_one_document_however_long() {
    let mut stories = String::new();
    for number in 0..4000 {
        stories += &demo::story(1, number);
        stories += if number % 3 == 0 { "\n\n" } else { "\n" };
    }
    assert!(stories.len() > 3 << 19, "more than one piece");
    let data = Build { seq_len: 512, ..Build::default() }.run("d.txt", &stories).unwrap();
    let ids: Vec<u32> = samples(&data).into_iter().flat_map(|s| s.ids).collect();
    let mut whole = tokenizer().prompt_ids(&stories).unwrap();
    whole.extend(tokenizer().eos());
    assert_eq!(ids.len(), whole.len());
    assert!(ids == whole, "the tokens are those of the whole text");
    assert_eq!(data.summary().rows, 1);
}

#[test]
fn tokens_are_gone_with_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.jsonl");
    std::fs::write(&path, "{\"input_ids\": [1, 2, 3]}\n").unwrap();
    // As an earlier version left it.
    let work_dir = folder.path().join("work");
    std::fs::create_dir(&work_dir).unwrap();
    std::fs::write(work_dir.join("tokens.bin"), "old").unwrap();
    let data = Build { tokenizer: false, ..Build::default() }.open(&path, &work_dir).unwrap();
    assert_eq!(std::fs::read_dir(&work_dir).unwrap().count(), 0);
    assert_eq!(samples(&data)[0].ids, [1, 2, 3]);
}

#[test]
fn rows_are_cut_or_packed() {
    let text = "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n{\"input_ids\": [7, 8, 9]}\n";
    let cut = Build { seq_len: 4, tokenizer: false, ..Build::default() }.run("d.jsonl", text).unwrap();
    assert_eq!(
        samples(&cut).iter().map(|s| s.ids.clone()).collect::<Vec<_>>(),
        [vec![1, 2, 3, 4], vec![7, 8, 9]]
    );
    assert_eq!(cut.summary().truncated, 1);
    let packed =
        Build { seq_len: 4, pack: true, tokenizer: false, ..Build::default() }.run("d.jsonl", text).unwrap();
    assert_eq!(
        samples(&packed).iter().map(|s| s.ids.clone()).collect::<Vec<_>>(),
        [vec![1, 2, 3, 4], vec![5, 6, 7, 8]]
    );
    assert_ne!(cut.fingerprint(), packed.fingerprint());
    let again = Build { seq_len: 4, tokenizer: false, ..Build::default() }.run("d.jsonl", text).unwrap();
    assert_eq!(cut.fingerprint(), again.fingerprint());
}

#[test]
fn malformed_rows_name_file_line_and_reason() {
    let good = r#"{"input_ids": [1, 2]}"#;
    for (row, reason) in [
        ("{\"input_ids\": [1, 2]", "invalid JSON"),
        ("[1, 2]", "expected a whole JSON object"),
        ("{}", "expected a key \"text\""),
        (r#"{"txt": "x"}"#, "expected a key \"text\""),
        (r#"{"text": 5}"#, "\"text\": expected a string, found a number"),
        (r#"{"text": ""}"#, "\"text\" is empty"),
        (r#"{"prompt": "x"}"#, "missing key \"completion\""),
        (r#"{"completion": "x"}"#, "missing key \"prompt\""),
        (r#"{"prompt": "x", "completion": ""}"#, "\"completion\" is empty"),
        (r#"{"prompt": ["x"], "completion": "y"}"#, "\"prompt\": expected a string, found an array"),
        (r#"{"messages": "x"}"#, "\"messages\": expected an array"),
        (r#"{"messages": []}"#, "\"messages\" is empty"),
        (r#"{"messages": [{"role": "user"}]}"#, "\"messages\"[0].content: expected a string"),
        (r#"{"messages": [{"content": "x"}]}"#, "\"messages\"[0]: expected"),
        (r#"{"messages": [{"role": "user", "content": "x"}]}"#, "nothing to learn"),
        (r#"{"input_ids": []}"#, "\"input_ids\" is empty"),
        (r#"{"input_ids": [1]}"#, "nothing to learn"),
        (r#"{"input_ids": "1 2"}"#, "expected an array of integers"),
        (r#"{"input_ids": [1, 2.5]}"#, "\"input_ids\"[1]: expected a token id, found 2.5"),
        (r#"{"input_ids": [1, -2]}"#, "\"input_ids\"[1]"),
        (r#"{"input_ids": [1, 2048]}"#, "token id 2048 is outside the model's vocabulary of 2048"),
        (r#"{"input_ids": [1, 2], "labels": [1]}"#, "1 labels for 2 input_ids"),
        (r#"{"input_ids": [1, 2], "labels": [1, 4000]}"#, "label 4000"),
        (r#"{"input_ids": [1, 2], "labels": [1, -1]}"#, "label -1 is neither -100"),
    ] {
        let error = Build::default().run("d.jsonl", format!("{good}\n\n{row}\n{good}\n")).expect_err(row);
        assert!(error.contains("d.jsonl:3:") && error.contains(reason), "{row}: {error}");
    }
    let error = Build::default().run("d.jsonl", b"{\"input_ids\": [1, 2]}\n\xff\n").unwrap_err();
    assert!(error.contains("d.jsonl:2: the line is not UTF-8"), "{error}");
    let error = Build::default().run("d.txt", b"one\ntwo\n\xff\n").unwrap_err();
    assert!(error.contains("d.txt:3: the line is not UTF-8"), "{error}");
}

#[test]
fn a_key_that_is_almost_right_is_a_warning() {
    let rows = |keys: &[&str]| {
        let rows = keys.iter().map(|key| format!("{{\"input_ids\": [1, 2], \"{key}\": [-100, 2]}}\n"));
        Build::default().run("d.jsonl", rows.collect::<String>()).unwrap()
    };
    let data = rows(&["labels", "source", "label", "lables"]);
    let warning = data.warning().unwrap();
    assert!(
        warning.ends_with("d.jsonl:3: the key \"label\" is ignored; if \"labels\" is meant, rename it"),
        "{warning}"
    );
    assert_eq!(rows(&["labels", "source"]).warning(), None);
}

#[test]
fn no_data_is_an_error() {
    for (name, text) in [("d.jsonl", ""), ("d.jsonl", "\n \n"), ("d.txt", "")] {
        let error = Build::default().run(name, text).unwrap_err();
        assert!(error.contains("no data"), "{error}");
    }
    assert!(
        Build::default().run("d.csv", "a,b").unwrap_err().contains("must end in .jsonl, .ndjson or .json")
    );
    let masked = r#"{"input_ids": [1, 2], "labels": [-100, -100]}"#;
    assert!(Build::default().run("d.jsonl", masked).unwrap_err().contains("carries loss"));
    let missing = Build::default().open(Path::new("/nowhere/d.jsonl"), Path::new("/tmp")).unwrap_err();
    assert!(missing.contains("/nowhere/d.jsonl"), "{missing}");
}

#[test]
fn a_model_without_a_tokenizer_takes_tokens_only() {
    let without = Build { tokenizer: false, ..Build::default() };
    assert_eq!(without.run("d.jsonl", "{\"input_ids\": [1, 2]}").unwrap().len(), 1);
    for (name, text) in [("d.jsonl", "{\"text\": \"x\"}"), ("d.txt", "x")] {
        let error = without.run(name, text).unwrap_err();
        assert!(error.contains(":1: ") && error.contains("m/tokenizer.json does not exist"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert!(TextTokenizer::find(folder.path()).unwrap().is_none());
    let error = TextTokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
}

#[test]
fn the_demo_makes_the_same_files_every_time() {
    let again = tempfile::tempdir().unwrap();
    let files = demo::prepare(again.path(), 0).unwrap();
    assert_eq!(files.vocab_size % 64, 0);
    assert!(files.vocab_size <= 2048);
    for name in ["tokenizer.json", "config.json"] {
        let read = |model: &Path| std::fs::read(model.join(name)).unwrap();
        assert!(read(&files.model) == read(&DEMO.1.model), "{name} differs");
    }
    let rows = std::fs::read_to_string(&files.train).unwrap();
    let held_out = std::fs::read_to_string(&files.held_out).unwrap();
    let seen: std::collections::HashSet<&str> = rows.lines().collect();
    assert!(held_out.lines().all(|row| !seen.contains(row)));
    let data = Build { seq_len: demo::SEQ_LEN, vocab_size: files.vocab_size, ..Build::default() };
    let data = data.open(&files.held_out, again.path()).unwrap();
    assert!(data.summary().tokens > 15_000, "{:?}", data.summary());
    let text = demo::story(0, 3);
    assert_eq!(tokenizer().decode(&tokenizer().prompt_ids(&text).unwrap()).unwrap(), text);
}

/// A tokenizer of whole words, in SentencePiece's manner, that closes a text with `</s>` if it is to.
fn word_tokenizer(closes: bool) -> (tempfile::TempDir, TextTokenizer) {
    let folder = tempfile::tempdir().unwrap();
    let close = closes.then(|| serde_json::json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } }));
    let single: Vec<_> =
        [serde_json::json!({ "Sequence": { "id": "A", "type_id": 0 } })].into_iter().chain(close).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{
            "id": 0, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": { "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "\u{2581}" },
            { "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" },
        ] },
        "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "\u{2581}[a-zA-Z]+" }, "behavior": "Isolated", "invert": false },
        "post_processor": {
            "type": "TemplateProcessing", "single": single, "pair": [
                { "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } },
            ],
            "special_tokens": { "</s>": { "id": "</s>", "ids": [0], "tokens": ["</s>"] } },
        },
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
            { "type": "Fuse" },
            { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
        ] },
        "model": { "type": "WordLevel", "unk_token": "</s>", "vocab": {
            "</s>": 0, "\u{2581}Hello": 1, "\u{2581}world": 2, "ing": 3,
        } },
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    let tokenizer = TextTokenizer::load(folder.path()).unwrap();
    (folder, tokenizer)
}

/// Trimmed offsets would say that white space stands for no text, and it would carry no loss.
#[test]
fn white_space_of_a_completion_is_learned() {
    let files = &DEMO.1;
    let text = std::fs::read_to_string(files.model.join("tokenizer.json")).unwrap();
    let bytes = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let roberta = serde_json::json!({
        "type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": true, "add_prefix_space": false,
    });
    let all = serde_json::json!({"type": "Sequence", "processors": [bytes, roberta]});
    for processor in [bytes, all] {
        let folder = tempfile::tempdir().unwrap();
        let mut tokenizer: serde_json::Value = serde_json::from_str(&text).unwrap();
        tokenizer["post_processor"] = processor;
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let tokenizer = TextTokenizer::load(folder.path()).unwrap();
        let text = "a   b\n\n  c  ";
        let spans = tokenizer.encode(text, false).unwrap();
        assert!(spans.iter().any(|span| text[span.start..span.end].trim().is_empty()), "{spans:?}");
        assert!(spans.iter().all(|span| span.start < span.end), "{spans:?}");
    }
}

/// The space before a word that goes on with a text is part of what goes on.
#[test]
fn what_follows_a_prompt_keeps_its_space() {
    let (_folder, tokenizer) = word_tokenizer(false);
    assert_eq!(tokenizer.decode(&[1, 2]).unwrap(), "Hello world");
    assert_eq!(tokenizer.decode(&[2]).unwrap(), "world", "as a text of its own");
    assert_eq!(tokenizer.decode_after(&[1], &[2]).unwrap(), " world");
    assert_eq!(tokenizer.decode_after(&[1], &[3]).unwrap(), "ing");
    assert_eq!(tokenizer.decode_after(&[], &[1]).unwrap(), "Hello");
    assert_eq!(tokenizer.decode_after(&[1], &[]).unwrap(), "");
    // Half of a character before, and the other half.
    let bytes = self::tokenizer();
    let ids: Vec<u32> = bytes.encode("é", false).unwrap().iter().map(|span| span.id).collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(bytes.decode_after(&ids[..1], &ids[1..]).unwrap(), bytes.decode(&ids[1..]).unwrap());
}

/// A closing token that the tokenizer adds is taken off a prompt, and one that the user wrote stays.
#[test]
fn the_end_of_a_prompt_is_the_users() {
    for closes in [false, true] {
        let (_folder, tokenizer) = word_tokenizer(closes);
        assert_eq!(tokenizer.prompt_ids("Hello").unwrap(), [1]);
        assert_eq!(tokenizer.prompt_ids("Hello</s>").unwrap(), [1, 0], "{closes}");
    }
}
