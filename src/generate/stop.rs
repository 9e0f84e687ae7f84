//! What a model folder says of generation: when a text ends, and what is not taken from it.

use crate::data::{DataError, read_json};
use serde_json::Value;
use std::path::Path;
use terrace_models::ModelConfig;

/// The ids that end a text: `eos_token_id`, a number or a list, negative ones left out, of `generation_config.json`, or of `config.json` if the former
/// is absent or silent. Where the latter is, too, that of the family, if it has one.
///
/// # Errors
/// A file is there but cannot be read, or the key is neither a number nor a list of numbers.
pub fn stop_ids(model: &Path) -> Result<Vec<u32>, DataError> {
    for name in [GENERATION, "config.json"] {
        let path = model.join(name);
        let config = read_json(&path)?;
        let wrong = |reason: String| DataError::Tokenizer { path: path.clone(), reason };
        // A composite model keeps the language model's settings one level down.
        let found = [&config["eos_token_id"], &config["text_config"]["eos_token_id"]];
        let Some(ids) = found.into_iter().find(|ids| !ids.is_null()) else { continue };
        let one = |id: &Value| {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            number.ok_or_else(|| wrong(format!("eos_token_id: expected a token id, found {id}")))
        };
        let listed = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
        let is_token = |id: &&Value| id.as_i64().is_none_or(|id| id >= 0);
        return listed.iter().filter(is_token).map(one).collect();
    }
    // What else is wrong with the file is for the model to say.
    Ok(ModelConfig::from_folder(model).map_or(Vec::new(), |config| config.eos_ids))
}

const GENERATION: &str = "generation_config.json";

/// Settings of `generation_config.json` that change what is generated, and the values with which they do not.
const SETTINGS: [(&str, &[f64]); 26] = [
    ("do_sample", &[0.0]),
    ("temperature", &[1.0]),
    ("top_p", &[1.0]),
    // What transformers has without being told.
    ("top_k", &[0.0, 50.0]),
    ("repetition_penalty", &[1.0]),
    ("min_p", &[0.0]),
    ("typical_p", &[1.0]),
    ("epsilon_cutoff", &[0.0]),
    ("eta_cutoff", &[0.0]),
    ("no_repeat_ngram_size", &[0.0]),
    ("encoder_no_repeat_ngram_size", &[0.0]),
    ("min_length", &[0.0]),
    ("min_new_tokens", &[0.0]),
    ("num_beams", &[1.0]),
    ("guidance_scale", &[1.0]),
    ("suppress_tokens", &[]),
    ("begin_suppress_tokens", &[]),
    ("bad_words_ids", &[]),
    ("forced_bos_token_id", &[]),
    ("forced_eos_token_id", &[]),
    ("stop_strings", &[]),
    ("exponential_decay_length_penalty", &[]),
    ("penalty_alpha", &[0.0]),
    ("watermarking_config", &[]),
    ("dola_layers", &[]),
    ("force_words_ids", &[]),
];

/// Settings of `generation_config.json`, with their values, that would change what is generated: nothing is taken from them.
///
/// # Errors
/// The file is there but cannot be read.
pub fn not_applied(model: &Path) -> Result<Vec<(&'static str, String)>, DataError> {
    let config = read_json(&model.join(GENERATION))?;
    let number = |value: &Value| value.as_f64().or_else(|| value.as_bool().map(|is| f64::from(u8::from(is))));
    let changes = |value: &Value, neutral: &[f64]| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        value => number(value).is_none_or(|number| !neutral.contains(&number)),
    };
    let samples = config["do_sample"].as_bool() != Some(false);
    let is_asked =
        |key: &str| samples || !["temperature", "top_p", "top_k", "min_p", "typical_p"].contains(&key);
    let settings = SETTINGS.iter().filter(|(key, neutral)| is_asked(key) && changes(&config[*key], neutral));
    Ok(settings.map(|(key, _)| (*key, config[*key].to_string())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_a_list_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(stop_ids(folder.path()).unwrap(), [0u32; 0]);
        let sizes = r#""num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 9"#;
        let of = |eos: &str| format!(r#"{{"architectures": ["LlamaForCausalLM"], {sizes}{eos}}}"#);
        write("config.json", &of(""));
        assert_eq!(stop_ids(folder.path()).unwrap(), [2], "what the family has");
        write("config.json", &of(r#", "eos_token_id": null"#));
        assert_eq!(stop_ids(folder.path()).unwrap(), [0u32; 0]);
        write("config.json", r#"{"eos_token_id": 7}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [7]);
        write("generation_config.json", r#"{"bos_token_id": 1}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [7]);
        write("generation_config.json", r#"{"eos_token_id": [3, 4]}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [3, 4]);
        write("generation_config.json", r#"{"eos_token_id": [-1, 4]}"#);
        assert_eq!(stop_ids(folder.path()).unwrap(), [4]);
        write("generation_config.json", "\u{FEFF}{\"eos_token_id\": -1, \"time_limit\": Infinity}");
        assert_eq!(stop_ids(folder.path()).unwrap(), [0u32; 0], "whatever config.json says");
        write("generation_config.json", r#"{"eos_token_id": "x"}"#);
        assert!(stop_ids(folder.path()).unwrap_err().to_string().contains("generation_config.json"));
    }

    #[test]
    fn settings_that_are_not_taken_are_known() {
        let folder = tempfile::tempdir().unwrap();
        let of = |text: &str| {
            std::fs::write(folder.path().join(GENERATION), text).unwrap();
            not_applied(folder.path()).unwrap()
        };
        assert_eq!(not_applied(folder.path()).unwrap(), []);
        let neutral = r#"{"do_sample": false, "temperature": 0.6, "top_k": 20, "repetition_penalty": null, "eos_token_id": 3, "bad_words_ids": []}"#;
        assert_eq!(of(neutral), []);
        let [(key, _)] = of(r#"{"stop_strings": ["END"]}"#)[..] else { panic!("another number of settings") };
        assert_eq!(key, "stop_strings");
        let found = of(
            r#"{"do_sample": true, "repetition_penalty": 1.05, "no_repeat_ngram_size": 2, "suppress_tokens": [7]}"#,
        );
        let words: Vec<String> = found.iter().map(|(key, value)| format!("{key} {value}")).collect();
        assert_eq!(
            words,
            ["do_sample true", "repetition_penalty 1.05", "no_repeat_ngram_size 2", "suppress_tokens [7]"]
        );
    }
}
