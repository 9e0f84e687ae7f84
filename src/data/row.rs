//! A line of a `.jsonl` file as the object that it must be, and keys of it that are not what was meant.

use super::encode::kind;
use super::pretokenized::LOSS_MASKS;
use super::{DataError, Result};
use serde_json::{Map, Value};
use std::path::Path;
use strsim::levenshtein as typos;

/// Whether the name says that every line is an object.
pub fn is_file_of_rows(path: &Path) -> bool {
    let rows = ["jsonl", "ndjson", "json"];
    path.extension().is_some_and(|extension| rows.iter().any(|name| extension.eq_ignore_ascii_case(name)))
}

/// Every line of the file at `path` is an object; this is line `line`, from one.
///
/// # Errors
/// It is none; the message names file, line and, where JSON breaks off, the column.
pub fn object(path: &Path, line: usize, text: &str) -> Result<Map<String, Value>> {
    let refused = |column, reason| DataError::Row { path: path.into(), line, column, reason };
    // The parser must see no second line, which it would count from.
    let text = text.trim_end_matches(['\n', '\r']);
    match serde_json::from_str(text) {
        Ok(Value::Object(row)) => {
            let is_chat = row.contains_key("messages") && !row.contains_key("input_ids");
            match is_chat.then(|| beyond_64_bits(text, false)).flatten() {
                Some((at, reason)) => Err(refused(Some(text[..at].chars().count() + 1), reason)),
                None => Ok(row),
            }
        }
        Ok(other) => {
            let found = kind(&other);
            Err(refused(None, format!("expected a whole JSON object {{…}} in every line, found {found}")))
        }
        Err(error) => {
            // The parser counts bytes, and says where it is in words of its own.
            let column = text.char_indices().filter(|(at, _)| at + 1 < error.column()).count() + 1;
            let words = error.to_string();
            let what = match words.split(" at line ").next() {
                _ if error.is_eof() => "the line ends too early",
                Some("expected ident" | "expected value") | None => "no JSON value begins like this",
                Some(what) => what,
            };
            let reason = format!("invalid JSON: {what}; every line must be a whole JSON object {{…}}");
            Err(refused(Some(column), reason))
        }
    }
}

/// Keys of a row whose values chat templates write.
const WRITTEN: [&str; 2] = ["\"messages\"", "\"tools\""];

/// Where the first whole number is that the parser makes a float, for want of bits, and what is to be said of it. `text` is valid JSON: a row,
/// in which what chat templates write counts, or, if it `is_written`, something of which they write everything.
pub(super) fn beyond_64_bits(text: &str, mut is_written: bool) -> Option<(usize, String)> {
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(found) =
        text[at..].find(|c: char| matches!(c, '"' | '[' | ']' | '{' | '}' | '-' | '0'..='9'))
    {
        at += found;
        let length = match text.as_bytes()[at] {
            b'"' => {
                let token = &text[at..at + string_bytes(&text[at..])];
                let is_key = depth == 1 && text[at + token.len()..].trim_start().starts_with(':');
                is_written = if is_key { WRITTEN.contains(&token) } else { is_written };
                token.len()
            }
            b'[' | b'{' => {
                depth += 1;
                1
            }
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                1
            }
            _ => {
                let is_part = |c: char| matches!(c, '+' | '-' | '.' | '0'..='9' | 'e' | 'E');
                let number = &text[at..at + text[at..].find(|c| !is_part(c)).unwrap_or(text.len() - at)];
                if is_written && !has_64_bits(number) {
                    let reason = format!(
                        "the whole number {number} is beyond 64 bits, and a chat template would write it as a float; make it a string"
                    );
                    return Some((at, reason));
                }
                number.len()
            }
        };
        at += length;
    }
    None
}

/// Bytes of the string in JSON that `text` begins with, quotes included.
fn string_bytes(text: &str) -> usize {
    let mut is_escaped = true;
    let end = text.bytes().position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |end| end + 1)
}

/// Of floats it is not asked.
fn has_64_bits(number: &str) -> bool {
    number.contains(['.', 'e', 'E']) || number.parse::<u64>().is_ok() || number.parse::<i64>().is_ok()
}

/// Kinds of row by the key that makes them, the first of which counts, and what else would change what a row of that kind says.
const KINDS: [(&str, &[&str]); 5] = [
    ("input_ids", &["labels", "attention_mask", LOSS_MASKS[0], LOSS_MASKS[1], LOSS_MASKS[2]]),
    ("messages", &["input_ids"]),
    ("prompt", &["input_ids", "messages"]),
    ("completion", &["input_ids", "messages"]),
    ("text", &["input_ids", "messages", "prompt", "completion"]),
];

/// Changes of a letter by which a key may differ from the one that was meant.
const TYPOS: usize = 2;

/// A key that is ignored and is almost one that `row` lacks and that would change what it says, and that one. Other keys are common:
/// data sets carry what they know of a row.
pub fn near_miss(row: &Map<String, Value>) -> Option<(&str, &'static str)> {
    let (_, meaning) = KINDS.iter().find(|(kind, _)| row.contains_key(*kind))?;
    let is_known = |key: &str| KINDS.iter().any(|(kind, more)| *kind == key || more.contains(&key));
    let lacking = || meaning.iter().filter(|meant| !row.contains_key(**meant));
    let mut others = row.keys().filter(|key| !is_known(key));
    others.find_map(|key| {
        let lower = key.to_lowercase();
        let is_near = |meant: &str| {
            // As other trainers call them: `label_ids`.
            meant == "labels" && lower.starts_with("label") || typos(&lower, meant) <= TYPOS
        };
        lacking().find(|meant| is_near(meant)).map(|meant| (key.as_str(), *meant))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_almost_right() {
        let found = |text: &str| {
            let row: Map<String, Value> = serde_json::from_str(text).unwrap();
            near_miss(&row).map(|(key, meant)| (key.to_owned(), meant))
        };
        for (row, key, meant) in [
            (r#"{"input_ids": 1, "id": 1, "label": 1}"#, "label", "labels"),
            (r#"{"input_ids": 1, "lables": 1}"#, "lables", "labels"),
            (r#"{"input_ids": 1, "labels_ids": 1}"#, "labels_ids", "labels"),
            (r#"{"input_ids": 1, "attention_masks": 1}"#, "attention_masks", "attention_mask"),
            (r#"{"input_ids": 1, "assistant_masks": 1, "assistant_mask": 1}"#, "", ""),
            (r#"{"text": 1, "Input_id": 1}"#, "Input_id", "input_ids"),
            (r#"{"text": 1, "promt": 1, "completion": 1}"#, "", ""),
            (r#"{"prompt": 1, "completion": 1, "message": 1}"#, "message", "messages"),
            (r#"{"text": 1, "completions": 1}"#, "completions", "completion"),
            (r#"{"input_ids": 1, "labels": 1, "label": 1}"#, "", ""),
            (r#"{"text": 1, "label": 1, "source": 1, "meta": 1, "prompt_id": 1}"#, "", ""),
            (r#"{"txet": 1}"#, "", ""),
        ] {
            let expected = (!key.is_empty()).then(|| (key.to_owned(), meant));
            assert_eq!(found(row), expected, "{row}");
        }
        assert_eq!([typos("a", "a"), typos("kitten", "sitting"), typos("", "ab")], [0, 3, 2]);
    }

    #[test]
    fn whole_numbers_keep_their_digits() {
        let refused = |text: &str| object(Path::new("a.jsonl"), 7, text).unwrap_err().to_string();
        let long = "123456789012345678901";
        for (row, column, number) in [
            (format!(r#"{{"messages": [{{"a": {long}}}]}}"#), 21, long),
            (format!(r#"{{"n": {long}, "tools": [[-{long}], 1], "messages": 1}}"#), 41, &*format!("-{long}")),
            (format!(r#"{{"é": "\"messages\": \\", "messages": {long}}}"#), 39, long),
        ] {
            let error = refused(&row);
            let place = format!("a.jsonl:7:{column}: the whole number {number} is beyond 64 bits");
            assert!(error.starts_with(&place), "{error} instead of {place}");
        }
        for row in [
            format!(
                r#"{{"messages": [{{"a": "{long}", "{long}": {long}.0}}], "n": [{{"messages": {long}}}]}}"#
            ),
            format!(r#"{{"messages": [{}, {}, {long}e2, -1E-5]}}"#, u64::MAX, i64::MIN),
            format!(r#"{{"input_ids": [1], "messages": {long}}}"#),
            format!(r#"{{"text": "a", "tools": {long}}}"#),
        ] {
            object(Path::new("a.jsonl"), 1, &row).unwrap();
        }
    }

    #[test]
    fn a_place_is_said_once() {
        let refused = |text: &str| object(Path::new("a.jsonl"), 7, text).unwrap_err().to_string();
        let advice = "every line must be a whole JSON object {…}";
        for (text, said) in [
            ("nope\n", "a.jsonl:7:2: invalid JSON: no JSON value begins like this; "),
            ("{\"a\": 1,}\r\n", "a.jsonl:7:9: invalid JSON: trailing comma; "),
            ("{\"\u{e4}\u{f6}\": ?}\n", "a.jsonl:7:8: invalid JSON: no JSON value begins like this; "),
            ("{\"a\": [1,\n", "a.jsonl:7:9: invalid JSON: the line ends too early; "),
        ] {
            assert_eq!(refused(text), format!("{said}{advice}"));
        }
        let array = refused("[1]\n");
        assert_eq!(array, "a.jsonl:7: expected a whole JSON object {…} in every line, found an array");
        assert_eq!(object(Path::new("a.jsonl"), 1, "{\"a\": 1}\n").unwrap()["a"], 1);
    }
}
