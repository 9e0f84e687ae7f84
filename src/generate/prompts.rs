//! What to continue.

use crate::data::{DataError, TextTokenizer, messages, row};
use serde_json::{Map, Value};
use std::path::Path;

const BYTE_ORDER_MARK: char = '\u{feff}';

/// A prompt as given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, which needs a tokenizer.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// A row of messages, which the chat template makes text of, up to where the assistant goes on.
    Messages(Map<String, Value>),
}

impl Prompt {
    /// The prompt's tokens. `model` is named where its tokenizer is missing or wrong.
    ///
    /// # Errors
    /// Text without a tokenizer, no tokens at all, or an id outside the model's vocabulary.
    pub fn ids(
        &self,
        tokenizer: Option<&TextTokenizer>,
        model: &Path,
        vocab_size: usize,
    ) -> Result<Vec<u32>, DataError> {
        let path = TextTokenizer::file_of(model);
        let wrong = |reason: String| DataError::Tokenizer { path: path.clone(), reason };
        let ids = match (self, tokenizer) {
            (Self::Ids(ids), _) => ids.clone(),
            (Self::Text(text), Some(tokenizer)) => tokenizer.prompt_ids(text)?,
            (Self::Messages(row), Some(tokenizer)) => {
                messages::prompt_ids(tokenizer, row).map_err(DataError::Prompt)?
            }
            (Self::Text(_) | Self::Messages(_), None) => {
                return Err(wrong(format!(
                    "this file does not exist, and a text prompt needs it{}; or use --prompt-ids",
                    TextTokenizer::advice(&path)
                )));
            }
        };
        if ids.is_empty() {
            return Err(DataError::Prompt(
                "there are no tokens; there must be at least one to continue".into(),
            ));
        }
        let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) else { return Ok(ids) };
        let outside = format!("is outside the model's vocabulary of {vocab_size}");
        Err(match self {
            Self::Ids(_) => {
                DataError::Prompt(format!("token id {id} {outside}: ids are from 0 to {}", vocab_size - 1))
            }
            Self::Text(_) | Self::Messages(_) => {
                wrong(format!("it makes token {id} of the prompt, which {outside}: take the model's own"))
            }
        })
    }
}

/// Reads prompts: the rows `{"prompt": "…"}`, `{"prompt_ids": […]}` or `{"messages": […]}` of a `.jsonl`, `.ndjson` or `.json`, as of training data, and of any other
/// file the lines that are not blank. `-` is the standard input, of rows if its first line that is not blank begins with `{`.
///
/// # Errors
/// The file cannot be read, a row is malformed, or there is none.
pub fn read_prompts(path: &Path) -> Result<Vec<Prompt>, DataError> {
    if path == Path::new("-") {
        let path = Path::new("standard input");
        let text =
            std::io::read_to_string(std::io::stdin().lock()).map_err(DataError::file("reading", path))?;
        let first = text.trim_start_matches(BYTE_ORDER_MARK).lines().find(|line| !line.trim().is_empty());
        let is_row = first.is_some_and(|line| line.trim_start().starts_with('{'));
        return prompts_of(path, &text, is_row);
    }
    DataError::check_file(path)?;
    let text = std::fs::read_to_string(path).map_err(DataError::file("reading", path))?;
    prompts_of(path, &text, row::is_file_of_rows(path))
}

/// Prompts of `text`, which `path` is named for.
fn prompts_of(path: &Path, text: &str, are_rows: bool) -> Result<Vec<Prompt>, DataError> {
    let mut prompts = Vec::new();
    for (at, line) in text.trim_start_matches(BYTE_ORDER_MARK).lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        if are_rows {
            let row = row::object(path, at + 1, line)?;
            let prompt = prompt_of(&row);
            prompts.push(prompt.map_err(|reason| DataError::Row {
                path: path.into(),
                line: at + 1,
                column: None,
                reason,
            })?);
        } else {
            prompts.push(Prompt::Text(line.into()));
        }
    }
    if prompts.is_empty() { Err(DataError::Empty { path: path.into() }) } else { Ok(prompts) }
}

fn prompt_of(row: &Map<String, Value>) -> Result<Prompt, String> {
    if let Some(given) = row.get("messages").filter(|messages| !messages.is_null()) {
        messages::messages(given)?;
        return Ok(Prompt::Messages(row.clone()));
    }
    if let Some(text) = row.get("prompt").and_then(Value::as_str) {
        return Ok(Prompt::Text(text.into()));
    }
    let wrong =
        || "expected {\"prompt\": \"…\"}, {\"messages\": […]} or {\"prompt_ids\": [token ids]}".to_owned();
    let ids = row.get("prompt_ids").and_then(Value::as_array).ok_or_else(wrong)?;
    let ids: Option<Vec<u32>> = ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect();
    Ok(Prompt::Ids(ids.ok_or_else(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Vec<Prompt>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        read_prompts(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn lines_and_rows() {
        assert_eq!(
            read("a.txt", "One \n\nTwo").unwrap(),
            [Prompt::Text("One ".into()), Prompt::Text("Two".into())]
        );
        let rows = read("a.jsonl", "{\"prompt\": \"x\"}\n{\"prompt_ids\": [1, 2]}\n").unwrap();
        assert_eq!(rows, [Prompt::Text("x".into()), Prompt::Ids(vec![1, 2])]);
        assert!(
            read("a.jsonl", "{\"prompt\": \"x\"}\n{\"prompt_ids\": [-1]}\n")
                .unwrap_err()
                .contains("a.jsonl:2: expected")
        );
        let image = r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#;
        let error = read("a.jsonl", &format!("{{\"prompt\": \"x\"}}\n{image}\n")).unwrap_err();
        assert!(error.contains("a.jsonl:2: \"messages\"[0].content[0]: expected a part"), "{error}");
        for name in ["a.ndjson", "a.json", "a.JSONL"] {
            assert_eq!(read(name, "{\"prompt\": \"x\"}\n").unwrap(), [Prompt::Text("x".into())], "{name}");
        }
        for name in ["a.text", "a", "a.md"] {
            assert_eq!(read(name, "{\"x\"}\n").unwrap(), [Prompt::Text("{\"x\"}".into())], "{name}");
        }
        assert!(read("a.txt", "\n \n").unwrap_err().contains("no data"));
    }

    #[test]
    fn tokens_are_checked() {
        let ids =
            |ids: &[u32]| Prompt::Ids(ids.to_vec()).ids(None, Path::new("m"), 10).map_err(|e| e.to_string());
        assert_eq!(ids(&[9]).unwrap(), [9]);
        assert!(
            ids(&[10])
                .unwrap_err()
                .starts_with("token id 10 is outside the model's vocabulary of 10: ids are from 0 to 9")
        );
        assert!(ids(&[]).unwrap_err().contains("at least one"));
        let text = Prompt::Text("x".into()).ids(None, Path::new("m"), 10).unwrap_err().to_string();
        assert!(text.starts_with("m/tokenizer.json") && text.contains("--prompt-ids"), "{text}");
    }
}
