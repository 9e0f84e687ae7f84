//! Tokens that other files of a model folder name beside the `added_tokens` of `tokenizer.json`, as transformers has them.
//!
//! | where | what it adds |
//! |---|---|
//! | `added_tokens_decoder` of `tokenizer_config.json` | tokens that `tokenizer.json` does not have |
//! | `added_tokens.json`, if that is not there | the same, in older folders |
//! | `bos_token`, `eos_token`, any other `…_token`, `extra_special_tokens` | tokens of the vocabulary become special |
//!
//! The last are read from `tokenizer_config.json`, and from `special_tokens_map.json` where there is no `added_tokens_decoder`. A name that is
//! in no vocabulary stays without an id: transformers would give it one that the model has not been trained with, or does not have.

use super::tokenizer::read_json;
use super::{DataError, Result};
use serde_json::{Map, Value, json};
use std::path::Path;
use tokenizers::{AddedToken, Tokenizer};

/// Special tokens by what they are for, `bos_token` say, as a text or an object that holds it.
#[derive(Debug)]
pub(super) struct Named {
    settings: Value,
    map: Value,
}

impl Named {
    /// Reads what the files of a folder name, `settings` being its `tokenizer_config.json`, and adds it to the tokenizer.
    ///
    /// # Errors
    /// A file cannot be read, or has a token with an id that it does not have here.
    pub(super) fn add(tokenizer: &mut Tokenizer, model: &Path, settings: Value) -> Result<Self> {
        let add_listed = |tokenizer: &mut Tokenizer, name: &str, key: &str, listed: &Value| {
            let added = add_tokens(tokenizer, key, listed);
            added.map_err(|reason| DataError::tokenizer(&model.join(name), reason))
        };
        let listed = &settings["added_tokens_decoder"];
        add_listed(tokenizer, "tokenizer_config.json", "\"added_tokens_decoder\"", listed)?;
        let is_older = listed.is_null();
        let named = Self { map: read_json(&model.join("special_tokens_map.json"))?, settings };
        let special = named.special(is_older);
        if is_older {
            let name = "added_tokens.json";
            let older = older(&read_json(&model.join(name))?, &special);
            add_listed(tokenizer, name, "the file", &older)?;
        }
        let known = tokenizer.get_added_tokens_decoder();
        let mark = |token: AddedToken| {
            let known = tokenizer.token_to_id(&token.content).map(|id| known.get(&id))?;
            let marked = known.map_or(token, |known| AddedToken { special: true, ..known.clone() });
            (known != Some(&marked)).then_some(marked)
        };
        let marked: Vec<AddedToken> = special.into_iter().filter_map(mark).collect();
        // One call for all: each makes the automaton anew.
        tokenizer.add_tokens(marked).map_err(|e| DataError::tokenizer(&model.join("tokenizer.json"), e))?;
        Ok(named)
    }

    /// The text of the token that is for `key`.
    pub(super) fn text(&self, key: &str) -> Option<String> {
        special_text(&self.settings[key]).or_else(|| special_text(&self.map[key]))
    }

    /// Whether the settings say that there is none.
    pub(super) fn is_none(&self, key: &str) -> bool {
        self.settings.get(key).is_some_and(Value::is_null)
    }

    /// What every token is for, and its text.
    pub(super) fn texts(&self) -> Vec<(String, String)> {
        let keys = objects(&[&self.settings, &self.map]).map(|(key, _)| key);
        let extra = objects(&[&self.settings["extra_special_tokens"], &self.map["extra_special_tokens"]]);
        let texts = keys.filter(|key| key.ends_with("_token")).filter_map(|key| Some((key, self.text(key)?)));
        let extra = extra.filter_map(|(key, token)| Some((key, special_text(token)?)));
        texts.chain(extra).map(|(key, text)| (key.clone(), text)).collect()
    }

    /// All that are named, those of the older file if it `is_older`.
    fn special(&self, is_older: bool) -> Vec<AddedToken> {
        let files = [Some(&self.settings), is_older.then_some(&self.map)];
        let mut found = Vec::new();
        for file in files.into_iter().flatten() {
            let named = objects(&[file]).filter(|(key, _)| key.ends_with("_token")).map(|(_, token)| token);
            let lists = ["extra_special_tokens", "additional_special_tokens"].map(|key| &file[key]);
            let listed = lists.iter().filter_map(|list| list.as_array()).flatten();
            let by_name = objects(&lists).map(|(_, token)| token);
            found.extend(named.chain(listed).chain(by_name).filter_map(special_token));
        }
        found
    }
}

/// The entries of those values that are objects.
fn objects<'a>(values: &[&'a Value]) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
    let maps: Vec<&Map<String, Value>> = values.iter().filter_map(|value| value.as_object()).collect();
    maps.into_iter().flatten()
}

/// A special token is written as its text or as an object that holds it.
fn special_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

fn special_token(value: &Value) -> Option<AddedToken> {
    let text = special_text(value).filter(|text| !text.is_empty())?;
    Some(with_flags(AddedToken::from(text, true), value))
}

/// A token with the flags that an object sets.
fn with_flags(token: AddedToken, value: &Value) -> AddedToken {
    let flag = |name: &str| value[name].as_bool();
    let normalized = flag("normalized").unwrap_or(token.normalized);
    token
        .single_word(flag("single_word").unwrap_or(false))
        .lstrip(flag("lstrip").unwrap_or(false))
        .rstrip(flag("rstrip").unwrap_or(false))
        .normalized(normalized)
}

/// `added_tokens.json`, an object from tokens to ids, in the manner of `added_tokens_decoder`.
fn older(file: &Value, special: &[AddedToken]) -> Value {
    let entries = objects(&[file]).map(|(content, id)| {
        let is_special = special.iter().any(|token| token.content == *content);
        (id.to_string(), json!({"content": content, "special": is_special, "normalized": !is_special}))
    });
    entries.collect::<Map<String, Value>>().into()
}

/// Adds the tokens of `listed`, an object from ids to tokens, that `tokenizer.json` does not have. Errors call it `name`.
fn add_tokens(tokenizer: &mut Tokenizer, name: &str, listed: &Value) -> Result<(), String> {
    let known = tokenizer.get_added_tokens_decoder();
    let is_known = |content: &str| known.values().any(|token| token.content == content);
    let mut missing = Vec::new();
    for (id, token) in objects(&[listed]) {
        let (Ok(id), Some(content)) = (id.parse::<u32>(), token["content"].as_str()) else {
            return Err(format!(
                "{name}: expected an id and a token {{\"content\": …}}, found \"{id}\": {token}; correct it or download the file again"
            ));
        };
        if !is_known(content) {
            let special = token["special"].as_bool().unwrap_or(false);
            missing.push((id, with_flags(AddedToken::from(content, special), token)));
        }
    }
    missing.sort_by_key(|(id, _)| *id);
    tokenizer.add_tokens(missing.iter().map(|(_, token)| token.clone())).map_err(|e| e.to_string())?;
    for (id, token) in &missing {
        let content = &token.content;
        match tokenizer.token_to_id(content) {
            Some(found) if found == *id => {}
            found => {
                let found = found.map_or("none".into(), |found| found.to_string());
                return Err(format!(
                    "{name} has {content:?} with id {id}, which tokenizer.json lacks, and added there it has {found}: \
                     the two files do not belong together; download both again"
                ));
            }
        }
    }
    Ok(())
}
