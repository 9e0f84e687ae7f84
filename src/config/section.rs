//! Typed reading of one object of a configuration file, with DeepSpeed's rules for what counts as a number or a boolean.
//!
//! A [`Section`] remembers which keys were asked for; what remains at the end is unknown, and the caller says whether that is
//! an error or a warning. `"auto"` and `null` mean "the default" for every key and read as `None`.

use super::hjson::{Kind, Member, Position, Value};
use std::cell::RefCell;

/// Why a configuration is refused: what is wrong, with the key, and where it stands in the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct SectionError {
    /// Where.
    pub at: Position,
    /// The key and what is wrong with it.
    pub message: String,
}

/// One object of a configuration file.
#[derive(Debug)]
pub struct Section<'a> {
    path: String,
    members: &'a [Member],
    asked: RefCell<Vec<&'static str>>,
}

type Result<T> = std::result::Result<T, SectionError>;

impl<'a> Section<'a> {
    /// The top level of a file.
    ///
    /// # Errors
    /// It is not an object.
    pub fn root(value: &'a Value) -> Result<Self> {
        match &value.kind {
            Kind::Object(members) => Ok(Self::new(String::new(), members)),
            _ => Err(SectionError {
                at: value.at,
                message: format!("the file holds {}, expected an object {{…}}", value.kind_name()),
            }),
        }
    }

    fn new(path: String, members: &'a [Member]) -> Self {
        Self { path, members, asked: RefCell::default() }
    }

    /// The full name of a key, for messages: `zero_optimization.stage`.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.into() } else { format!("{}.{key}", self.path) }
    }

    /// An error about `key`, at its place in the file.
    pub fn error(&self, key: &str, message: &str) -> SectionError {
        let at = self.members.iter().find(|m| m.key == key).or(self.members.first());
        let at = at.map_or(Position { line: 1, column: 1 }, |m| m.at);
        SectionError { at, message: format!("{}: {message}", self.name(key)) }
    }

    fn find(&self, key: &'static str) -> Option<&'a Value> {
        self.asked.borrow_mut().push(key);
        let value = &self.members.iter().find(|m| m.key == key)?.value;
        match &value.kind {
            Kind::Null => None,
            Kind::String(s) if s == "auto" => None,
            _ => Some(value),
        }
    }

    fn wrong<T>(&self, key: &str, value: &Value, expected: &str) -> Result<T> {
        let found = match &value.kind {
            Kind::Number(n) => n.clone(),
            Kind::String(s) => format!("the string \"{s}\""),
            Kind::Bool(b) => b.to_string(),
            _ => value.kind_name().into(),
        };
        let message = format!("{}: expected {expected}, found {found}", self.name(key));
        Err(SectionError { at: value.at, message })
    }

    /// Whether the key stands in the file with a value of its own.
    pub fn has(&self, key: &'static str) -> bool {
        self.find(key).is_some()
    }

    /// Whether the key stands in the file as `"auto"` or `null`, for the run to fill in.
    pub fn leaves_open(&self, key: &str) -> bool {
        let is_open =
            |kind: &Kind| matches!(kind, Kind::Null) || matches!(kind, Kind::String(s) if s == "auto");
        self.members.iter().any(|member| member.key == key && is_open(&member.value.kind))
    }

    /// A subsection. Absent, `null` and `"auto"` are `None`.
    ///
    /// # Errors
    /// The value is not an object.
    pub fn section(&self, key: &'static str) -> Result<Option<Section<'a>>> {
        match self.find(key) {
            None => Ok(None),
            Some(Value { kind: Kind::Object(members), .. }) => {
                Ok(Some(Section::new(self.name(key), members)))
            }
            Some(value) => self.wrong(key, value, "an object {…} or null"),
        }
    }

    /// A whole number: `500000000`, `5e8` or `"500000000"`, but not `0.5`, `-1`, `"5e8"` or anything of 2⁵³ and above that is
    /// written as a fraction.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn integer(&self, key: &'static str) -> Result<Option<u64>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let number = match &value.kind {
            Kind::Number(text) => text.parse().ok().or_else(|| whole(text.parse().ok()?)),
            Kind::String(text) => text.parse().ok(),
            _ => None,
        };
        number.map_or_else(|| self.wrong(key, value, "a whole number, zero or more"), |n| Ok(Some(n)))
    }

    /// A whole number of at least one.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn positive(&self, key: &'static str) -> Result<Option<u64>> {
        match self.integer(key)? {
            Some(0) => Err(self.error(key, "must be at least 1, found 0")),
            number => Ok(number),
        }
    }

    /// A whole number of at least one and at most `max`.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn at_most(&self, key: &'static str, max: u64) -> Result<Option<u64>> {
        match self.positive(key)? {
            Some(number) if number > max => {
                Err(self.error(key, &format!("must be at most {max}, found {number}")))
            }
            number => Ok(number),
        }
    }

    /// A finite number, or a string that holds one.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn float(&self, key: &'static str) -> Result<Option<f64>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        match parse_float(value) {
            Some(number) => Ok(Some(number)),
            None => self.wrong(key, value, "a finite number"),
        }
    }

    /// A finite number of zero or more.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn not_negative(&self, key: &'static str) -> Result<Option<f64>> {
        match self.float(key)? {
            Some(n) if n < 0.0 => Err(self.error(key, &format!("must not be negative, found {n}"))),
            number => Ok(number),
        }
    }

    /// Two numbers in an array.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn pair(&self, key: &'static str) -> Result<Option<(f64, f64)>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let expected = "an array of two numbers";
        let Kind::Array(items) = &value.kind else { return self.wrong(key, value, expected) };
        let [first, second] = items.as_slice() else {
            let message = format!("{}: expected {expected}, found {} in it", self.name(key), items.len());
            return Err(SectionError { at: value.at, message });
        };
        match (parse_float(first), parse_float(second)) {
            (Some(first), Some(second)) => Ok(Some((first, second))),
            (None, _) => self.wrong(key, first, expected),
            (_, None) => self.wrong(key, second, expected),
        }
    }

    /// A boolean: `true`, `1`, or a word such as `"true"`, `"yes"`, `"on"` and their opposites.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn boolean(&self, key: &'static str) -> Result<Option<bool>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let word = match &value.kind {
            Kind::Bool(b) => return Ok(Some(*b)),
            Kind::Number(text) | Kind::String(text) => text.to_ascii_lowercase(),
            _ => String::new(),
        };
        match word.as_str() {
            "1" | "1.0" | "true" | "t" | "yes" | "y" | "on" => Ok(Some(true)),
            "0" | "0.0" | "false" | "f" | "no" | "n" | "off" => Ok(Some(false)),
            _ => self.wrong(key, value, "true or false"),
        }
    }

    /// Whether an `enabled` of the section, or of a section in it at any depth, is not plainly false.
    pub fn is_enabled_within(&self) -> bool {
        self.members.iter().any(|member| match &member.value.kind {
            Kind::Object(members) => Section::new(self.name(&member.key), members).is_enabled_within(),
            _ if member.key == "enabled" => !matches!(self.boolean("enabled"), Ok(None | Some(false))),
            _ => false,
        })
    }

    /// A string.
    ///
    /// # Errors
    /// The value is nothing of the kind.
    pub fn string(&self, key: &'static str) -> Result<Option<&'a str>> {
        match self.find(key) {
            None => Ok(None),
            Some(Value { kind: Kind::String(text), .. }) => Ok(Some(text)),
            Some(value) => self.wrong(key, value, "a string"),
        }
    }

    /// The full names of those of `keys` that stand in the file: accepted, but without effect here.
    pub fn unused(&self, keys: &[&'static str]) -> Vec<String> {
        self.asked.borrow_mut().extend(keys);
        let present = keys.iter().filter(|k| self.members.iter().any(|m| m.key == **k));
        present.map(|k| self.name(k)).collect()
    }

    /// The full names of the keys that nothing asked for.
    pub fn unknown(&self) -> Vec<String> {
        let asked = self.asked.borrow();
        let left = self.members.iter().filter(|m| !asked.contains(&m.key.as_str()));
        left.map(|m| self.name(&m.key)).collect()
    }

    /// Refuses the section if it has a key that nothing asked for.
    ///
    /// # Errors
    /// It has one.
    pub fn refuse_unknown(&self) -> Result<()> {
        let asked = self.asked.borrow();
        match self.members.iter().find(|m| !asked.contains(&m.key.as_str())) {
            None => Ok(()),
            Some(m) => Err(self.error(&m.key, "unknown key")),
        }
    }
}

fn whole(number: f64) -> Option<u64> {
    const EXACT_MAX: f64 = (1u64 << 53) as f64;
    (number.fract() == 0.0 && (0.0..EXACT_MAX).contains(&number)).then_some(number as u64)
}

fn parse_float(value: &Value) -> Option<f64> {
    match &value.kind {
        Kind::Number(text) | Kind::String(text) => text.trim().parse().ok().filter(|n: &f64| n.is_finite()),
        _ => None,
    }
}
