//! Typed look-ups in a JSON object, with errors that name the entry.

use crate::json::FLOAT_TAG;
use crate::{ModelError, Result};
use serde_json::{Map, Value};

/// A JSON object and the path to it for messages.
#[derive(Debug, Clone)]
pub(crate) struct Entries<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(value: &'a Value) -> Result<Self> {
        let map = value
            .as_object()
            .ok_or_else(|| ModelError::NoObject { detail: "is not a JSON object {…}".into() })?;
        Ok(Self { map, prefix: String::new() })
    }

    /// The same, named as the object under `key` of something else; of nothing, if that is empty.
    pub(crate) fn under(self, key: &str) -> Self {
        let prefix = if key.is_empty() { String::new() } else { format!("{key}.") };
        Self { prefix, ..self }
    }

    /// The object under `key`; `None` when absent or null.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { map, prefix: format!("{}{key}.", self.prefix) })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// Whether there is nothing in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The first key whose value is an object.
    pub(crate) fn first_object(&self) -> Option<&'a str> {
        self.map
            .iter()
            .find(|(_, value)| value.is_object() && value.get(FLOAT_TAG).is_none())
            .map(|(key, _)| key.as_str())
    }

    /// All of its keys.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    /// Whether the entry is there, null or not.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// Whether the entry is there and not null.
    pub(crate) fn has_value(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// A required positive integer.
    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "is missing".into()))
    }

    /// A positive integer with a default.
    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    /// A positive integer; `None` when absent or null.
    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                // Bounds every size so that no product of two overflows.
                Some(n) if n > 0 && n <= u32::MAX as usize => Ok(Some(n)),
                _ => Err(self.wrong(key, "a positive integer below 2^32", value)),
            },
        }
    }

    /// A non-negative integer with a default.
    pub(crate) fn size_or_zero(&self, key: &str, default: usize) -> Result<usize> {
        match self.value(key) {
            None => Ok(default),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(n),
                None => Err(self.wrong(key, "an integer of at least 0", value)),
            },
        }
    }

    /// A finite number; `None` when absent or null.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|n| n.is_finite()) {
                Some(n) => Ok(Some(n)),
                None => Err(self.wrong(key, "a number", value)),
            },
        }
    }

    /// A finite number with a default.
    pub(crate) fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.number(key)?.unwrap_or(default))
    }

    /// A required finite number above zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64> {
        match self.number(key)? {
            None => Err(self.error(key, "is missing".into())),
            Some(n) if n > 0.0 => Ok(n),
            Some(n) => Err(self.error(key, format!("is {n}; it must be positive"))),
        }
    }

    /// The same with a default.
    pub(crate) fn positive_or(&self, key: &str, default: f64) -> Result<f64> {
        if self.has_value(key) { self.positive(key) } else { Ok(default) }
    }

    /// A boolean with a default.
    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.wrong(key, "true or false", other)),
        }
    }

    /// A boolean; `None` when absent or null.
    pub(crate) fn optional_flag(&self, key: &str) -> Result<Option<bool>> {
        if self.has_value(key) { self.flag(key, false).map(Some) } else { Ok(None) }
    }

    /// A string; `None` when absent or null.
    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(key, "a string", other)),
        }
    }

    /// The string `inner` of object `key`, if both are there.
    pub(crate) fn string_at(&self, key: &str, inner: &str) -> Option<&'a str> {
        self.value(key)?.get(inner)?.as_str()
    }

    /// Whether the entry is a number.
    pub(crate) fn is_number(&self, key: &str) -> bool {
        self.value(key).is_some_and(|value| value.as_f64().is_some())
    }

    /// Whether the entry is an array.
    pub(crate) fn is_array(&self, key: &str) -> bool {
        self.value(key).is_some_and(Value::is_array)
    }

    /// An array of strings; `None` when absent or null.
    pub(crate) fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.array(key, "an array of strings", Value::as_str)
    }

    /// An array of numbers; `None` when absent or null.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.array(key, "an array of numbers", Value::as_f64)
    }

    fn array<T>(
        &self,
        key: &str,
        expected: &str,
        of: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_array().and_then(|all| all.iter().map(of).collect()) {
            Some(items) => Ok(Some(items)),
            None => Err(self.wrong(key, expected, value)),
        }
    }

    /// The first of an array of strings; `None` when absent, null or empty.
    pub(crate) fn first_string(&self, key: &str) -> Result<Option<&'a str>> {
        Ok(self.strings(key)?.and_then(|all| all.first().copied()))
    }

    /// One token id, an array of them, or none. Negative ones stand for no token.
    pub(crate) fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let listed = match self.value(key) {
            None => &[],
            Some(Value::Array(all)) => all.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        let is_token = |value: &&Value| value.as_i64().is_none_or(|n| n >= 0);
        let ids = listed.iter().filter(is_token).map(id).collect::<Option<Vec<u32>>>();
        match (ids, self.value(key)) {
            (Some(ids), _) => Ok(ids),
            (None, found) => {
                Err(self.wrong(key, "a token id or an array of them", found.unwrap_or(&Value::Null)))
            }
        }
    }

    /// An error about the entry.
    pub(crate) fn error(&self, key: &str, detail: String) -> ModelError {
        ModelError::Config { key: format!("{}{key}", self.prefix), detail }
    }

    /// The entry unless it is null.
    fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> ModelError {
        self.error(key, format!("must be {expected}, found {found}"))
    }
}
