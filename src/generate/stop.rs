//! When a text ends.

use crate::data::DataError;
use serde_json::Value;
use std::path::Path;

/// The ids that end a text: `eos_token_id`, a number or a list, of `generation_config.json`, or of `config.json` if the former
/// is absent or silent. Empty if neither says.
///
/// # Errors
/// A file is there but cannot be read, or the key is neither a number nor a list of numbers.
pub fn stop_ids(model: &Path) -> Result<Vec<u32>, DataError> {
    for name in ["generation_config.json", "config.json"] {
        let path = model.join(name);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(source) => return Err(DataError::File { doing: "reading", path, source }),
        };
        let wrong = |reason: String| DataError::Tokenizer { path: path.clone(), reason };
        let config: Value = serde_json::from_str(&text).map_err(|e| DataError::not_json(&path, &e))?;
        // A composite model keeps the language model's settings one level down.
        let found = [&config["eos_token_id"], &config["text_config"]["eos_token_id"]];
        let Some(ids) = found.into_iter().find(|ids| !ids.is_null()) else { continue };
        let one = |id: &Value| {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            number.ok_or_else(|| wrong(format!("eos_token_id: expected a token id, found {id}")))
        };
        return match ids {
            Value::Array(ids) => ids.iter().map(one).collect(),
            id => one(id).map(|id| vec![id]),
        };
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_a_list_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(stop_ids(folder.path()).unwrap(), [0u32; 0]);
        write("config.json", r#"{"eos_token_id": 7}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [7]);
        write("generation_config.json", r#"{"bos_token_id": 1}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [7]);
        write("generation_config.json", r#"{"eos_token_id": [3, 4]}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [3, 4]);
        write("generation_config.json", r#"{"eos_token_id": "x"}"#);
        assert!(stop_ids(folder.path()).unwrap_err().to_string().contains("generation_config.json"));
    }
}
