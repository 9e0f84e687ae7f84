//! JSON as Python's `json` and editors write it: with `NaN` and `Infinity`, which JSON does not have, and after a byte order mark.

use serde_json::Value;

/// What transformers writes in place of a number that JSON does not have: `{"__float__": "NaN"}`.
pub(crate) const FLOAT_TAG: &str = "__float__";

/// Reads such a text. A number that is not finite becomes the object that transformers writes for it, so that it harms only who asks for
/// a number there.
///
/// # Errors
/// It is no JSON otherwise.
pub fn parse_json(text: &str) -> serde_json::Result<Value> {
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(text);
    serde_json::from_str(text).or_else(|error| match tagged(text) {
        Some(tagged) => serde_json::from_str(&tagged),
        None => Err(error),
    })
}

/// The text with its numbers that are not finite as objects; `None` if it has none.
fn tagged(text: &str) -> Option<String> {
    let (mut out, mut rest, mut in_text) = (String::new(), text, false);
    let mut found = false;
    while let Some(c) = rest.chars().next() {
        let number = ["NaN", "Infinity", "-Infinity"].into_iter().find(|name| rest.starts_with(name));
        let length = match number.filter(|_| !in_text) {
            Some(name) => {
                out.push_str(&format!("{{\"{FLOAT_TAG}\": \"{name}\"}}"));
                found = true;
                name.len()
            }
            None => {
                in_text ^= c == '"';
                // What a backslash escapes ends no text.
                let escaped = if c == '\\' { rest[1..].chars().next() } else { None };
                let length = c.len_utf8() + escaped.map_or(0, char::len_utf8);
                out.push_str(&rest[..length]);
                length
            }
        };
        rest = &rest[length..];
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_python_writes_is_read() {
        let text =
            "\u{FEFF}{\"a\": [NaN, -Infinity,Infinity], \"b \\\" NaN\": \"Infinity \\\\\", \"é\": 1e3}";
        let float = |name: &str| json!({"__float__": name});
        let expected = json!({"a": [float("NaN"), float("-Infinity"), float("Infinity")], "b \" NaN": "Infinity \\", "é": 1e3});
        assert_eq!(parse_json(text).unwrap(), expected);
        assert_eq!(parse_json("{\"a\": \"NaN\"}").unwrap(), json!({"a": "NaN"}));
        for wrong in ["{\"a\": NaNa}", "{\"a\": nan}", "{\"a\": \"NaN}", "{\"a\": \\", "", "{\"a\": NaN"] {
            assert!(parse_json(wrong).is_err(), "{wrong}");
        }
    }
}
