//! Rows as other trainers and data sets write them: masks, padding, keys without a value.

use std::path::PathBuf;
use terrace::data::{DataConfig, Dataset, IGNORED, Sample};

fn build(text: &str) -> Result<Vec<Sample>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.jsonl");
    std::fs::write(&path, text).unwrap();
    let tokenizer_path = PathBuf::from("m/tokenizer.json");
    let config = DataConfig { seq_len: 64, pack: false, vocab_size: 100, tokenizer_path };
    let data = Dataset::build(&path, None, &config, folder.path()).map_err(|e| e.to_string())?;
    Ok((0..data.len()).map(|at| data.sample(at).unwrap()).collect())
}

#[test]
fn padding_is_cut_off() {
    for row in [
        r#"{"input_ids": [5, 6, 7, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0]}"#,
        r#"{"input_ids": [0, 0, 5, 6, 7], "attention_mask": [0, 0, 1, 1, 1]}"#,
        r#"{"input_ids": [0, 5, 6, 7, 0], "attention_mask": [false, true, true, true, false]}"#,
        r#"{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}"#,
        r#"{"input_ids": [5, 6, 7], "attention_mask": null, "labels": null, "completion_mask": null}"#,
        r#"{"input_ids": [5, 6, 7, 0], "labels": [5, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}"#,
    ] {
        assert_eq!(build(row).expect(row), [Sample { ids: vec![5, 6, 7], labels: vec![5, 6, 7] }], "{row}");
    }
}

#[test]
fn masks_take_the_loss() {
    for (keys, labels) in [
        (r#""completion_mask": [0, 0, 1]"#, [IGNORED, IGNORED, 7]),
        (r#""assistant_masks": [0, 1, 0]"#, [IGNORED, 6, IGNORED]),
        (r#""assistant_mask": [0, 1, 1]"#, [IGNORED, 6, 7]),
        (r#""completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]"#, [IGNORED, 6, IGNORED]),
        (r#""labels": [5, 8, -100], "completion_mask": [0, 1, 1]"#, [IGNORED, 8, IGNORED]),
    ] {
        let row = format!("{{\"input_ids\": [5, 6, 7], {keys}}}");
        assert_eq!(
            build(&row).expect(keys),
            [Sample { ids: vec![5, 6, 7], labels: labels.into() }],
            "{keys}"
        );
    }
    // Whoever writes a mask may mask a whole row.
    let rows = "{\"input_ids\": [5, 6], \"completion_mask\": [0, 0]}\n{\"input_ids\": [5, 6]}";
    assert_eq!(build(rows).unwrap()[0].labels, [IGNORED; 2]);
}

#[test]
fn masks_that_make_no_sense_are_refused() {
    for (keys, reason) in [
        (r#""attention_mask": [1, 0, 1]"#, "\"attention_mask\"[1] is 0 between tokens"),
        (r#""attention_mask": [0, 0, 0]"#, "\"attention_mask\" is 0 everywhere"),
        (r#""attention_mask": [1, 1]"#, "2 values of \"attention_mask\" for 3 input_ids"),
        (r#""attention_mask": [1, 2, 1]"#, "\"attention_mask\"[1]: expected 0 or 1, found 2"),
        (r#""completion_mask": [0, 1]"#, "2 values of \"completion_mask\" for 3 input_ids"),
        (r#""assistant_masks": [0, 1, 0.5]"#, "\"assistant_masks\"[2]: expected 0 or 1, found 0.5"),
        (r#""assistant_masks": "011""#, "\"assistant_masks\": expected an array of integers, found a string"),
    ] {
        let error = build(&format!("\n{{\"input_ids\": [5, 6, 7], {keys}}}")).expect_err(keys);
        assert!(error.contains("d.jsonl:2: ") && error.contains(reason), "{keys}: {error}");
    }
}

#[test]
fn keys_without_a_value_are_absent() {
    let row = r#"{"messages": null, "text": null, "prompt": null, "input_ids": [5, 6]}"#;
    assert_eq!(build(row).unwrap()[0].ids, [5, 6]);
    let row = r#"{"input_ids": null, "messages": null, "prompt": null, "completion": null, "text": "x"}"#;
    let error = build(row).unwrap_err();
    assert!(error.contains("this row is text, and the model folder has no tokenizer"), "{error}");
    assert!(build(r#"{"input_ids": null}"#).unwrap_err().contains("expected a key \"text\""));
}

#[test]
fn a_row_has_a_longest_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("d.json");
    std::fs::write(&path, "{\"input_ids\": [5, 6]}\n").unwrap();
    // Of zeros that take no room.
    std::fs::File::options().append(true).open(&path).unwrap().set_len(257 << 20).unwrap();
    let tokenizer_path = PathBuf::from("m/tokenizer.json");
    let config = DataConfig { seq_len: 64, pack: false, vocab_size: 100, tokenizer_path };
    let error = Dataset::build(&path, None, &config, folder.path()).unwrap_err().to_string();
    assert!(error.contains("d.json:2: a row of more than 256 MiB"), "{error}");
}
