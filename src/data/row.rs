//! A line of a `.jsonl` file as the object that it must be.

use super::encode::kind;
use super::{DataError, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// Every line of the file at `path` is an object; this is line `line`, from one.
///
/// # Errors
/// It is none; the message names file, line and, where JSON breaks off, the column.
pub fn object(path: &Path, line: usize, text: &str) -> Result<Map<String, Value>> {
    let refused = |column, reason| DataError::Row { path: path.into(), line, column, reason };
    // The parser must see no second line, which it would count from.
    let text = text.trim_end_matches(['\n', '\r']);
    match serde_json::from_str(text) {
        Ok(Value::Object(row)) => Ok(row),
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

#[cfg(test)]
mod tests {
    use super::*;

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
