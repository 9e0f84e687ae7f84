//! A reader for the JSON that people write by hand: Hjson, as DeepSpeed accepts it, and plain JSON, its subset.
//!
//! Beyond JSON: a file without the outermost braces, `//`, `#` and `/* */` comments, trailing commas, newlines in place of commas, unquoted keys, single-quoted
//! strings, and unquoted strings that run to the end of the line. A key that appears twice in one object is an error: one of
//! the two would be lost silently. Every value knows its line and column, so that a wrong type can be reported where it is.
//!
//! Ours, because serde's JSON5 and Hjson readers lose positions and keep the last of two equal keys.

use std::fmt;

/// Deepest nesting of objects and arrays; a bound on recursion.
const DEPTH_MAX: usize = 64;

/// A place in the text, both counted from one. Columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// A value and where it begins.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Where it begins.
    pub at: Position,
    /// What it is.
    pub kind: Kind,
}

/// What a [`Value`] is.
#[derive(Debug, Clone, PartialEq)]
pub enum Kind {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number, as written.
    Number(String),
    /// A string.
    String(String),
    /// An array.
    Array(Vec<Value>),
    /// An object, in the order written.
    Object(Vec<Member>),
}

/// One `key: value` of an object.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// The key.
    pub key: String,
    /// Where the key begins.
    pub at: Position,
    /// The value.
    pub value: Value,
}

/// Text that cannot be read, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {message}")]
pub struct SyntaxError {
    /// Where.
    pub at: Position,
    /// Why.
    pub message: String,
}

/// Reads one value and nothing after it.
///
/// # Errors
/// The text is not Hjson, or an object has a key twice.
pub fn parse(text: &str) -> Result<Value, SyntaxError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut parser = Parser { rest: text, at: Position { line: 1, column: 1 }, depth: 0 };
    parser.skip_blank()?;
    let value = if parser.begins_with_key() {
        let at = parser.at;
        Value { at, kind: parser.members(None)? }
    } else {
        parser.value()?
    };
    parser.skip_blank()?;
    match parser.peek() {
        None => Ok(value),
        Some(c) => Err(parser.error(format!("expected the end of the file, found '{c}'"))),
    }
}

impl Value {
    /// What the value is, for messages: `a string`, `an object`.
    pub fn kind_name(&self) -> &'static str {
        match self.kind {
            Kind::Null => "null",
            Kind::Bool(_) => "a boolean",
            Kind::Number(_) => "a number",
            Kind::String(_) => "a string",
            Kind::Array(_) => "an array",
            Kind::Object(_) => "an object",
        }
    }
}

struct Parser<'a> {
    rest: &'a str,
    at: Position,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.rest = &self.rest[c.len_utf8()..];
        if c == '\n' {
            self.at = Position { line: self.at.line + 1, column: 1 };
        } else {
            self.at.column += 1;
        }
        Some(c)
    }

    fn error(&self, message: impl Into<String>) -> SyntaxError {
        SyntaxError { at: self.at, message: message.into() }
    }

    /// Skips white space and comments.
    fn skip_blank(&mut self) -> Result<(), SyntaxError> {
        loop {
            match self.peek() {
                Some(c) if c.is_whitespace() => {
                    self.next();
                }
                Some('#') => self.skip_line(),
                Some('/') if self.rest.starts_with("//") => self.skip_line(),
                Some('/') if self.rest.starts_with("/*") => {
                    let start = self.at;
                    while !self.rest.starts_with("*/") {
                        if self.next().is_none() {
                            return Err(SyntaxError {
                                at: start,
                                message: "this comment is never closed".into(),
                            });
                        }
                    }
                    self.next();
                    self.next();
                }
                _ => return Ok(()),
            }
        }
    }

    fn skip_line(&mut self) {
        while self.peek().is_some_and(|c| c != '\n') {
            self.next();
        }
    }

    fn value(&mut self) -> Result<Value, SyntaxError> {
        let at = self.at;
        let kind = match self.peek() {
            None => return Err(self.error("expected a value, found the end of the file")),
            Some('{') => self.nested(Self::object)?,
            Some('[') => self.nested(Self::array)?,
            Some('"' | '\'') => Kind::String(self.quoted()?),
            Some(c @ ('}' | ']' | ',' | ':')) => {
                return Err(self.error(format!("expected a value, found '{c}'")));
            }
            Some(_) => self.bare(),
        };
        Ok(Value { at, kind })
    }

    fn nested(&mut self, read: fn(&mut Self) -> Result<Kind, SyntaxError>) -> Result<Kind, SyntaxError> {
        if self.depth == DEPTH_MAX {
            return Err(self.error(format!("objects and arrays are nested more than {DEPTH_MAX} deep")));
        }
        self.depth += 1;
        let kind = read(self)?;
        self.depth -= 1;
        Ok(kind)
    }

    /// Whether what follows is a key and a colon: the file is an object without its braces.
    fn begins_with_key(&self) -> bool {
        let mut ahead = Parser { rest: self.rest, at: self.at, depth: 0 };
        let is_key = !matches!(self.peek(), None | Some('{' | '[')) && ahead.key().is_ok();
        is_key && ahead.skip_blank().is_ok() && ahead.peek() == Some(':')
    }

    fn object(&mut self) -> Result<Kind, SyntaxError> {
        let start = self.at;
        self.next();
        self.members(Some(start))
    }

    /// The members of an object up to its brace, or, of one that began with none, to the end of the file.
    fn members(&mut self, start: Option<Position>) -> Result<Kind, SyntaxError> {
        let mut members: Vec<Member> = Vec::new();
        loop {
            self.skip_blank()?;
            match (self.peek(), start) {
                (None, Some(at)) => {
                    return Err(SyntaxError { at, message: "this object is never closed".into() });
                }
                (None, None) => return Ok(Kind::Object(members)),
                (Some('}'), Some(_)) => {
                    self.next();
                    return Ok(Kind::Object(members));
                }
                (Some(_), _) => {}
            }
            let at = self.at;
            let key = self.key()?;
            if let Some(first) = members.iter().find(|m| m.key == key) {
                let message = format!("duplicate key \"{key}\" (first at line {})", first.at.line);
                return Err(SyntaxError { at, message });
            }
            self.skip_blank()?;
            if self.peek() != Some(':') {
                return Err(self.error(format!("expected ':' after the key \"{key}\"")));
            }
            self.next();
            self.skip_blank()?;
            let value = self.value()?;
            members.push(Member { key, at, value });
            self.separator('}')?;
        }
    }

    fn array(&mut self) -> Result<Kind, SyntaxError> {
        let start = self.at;
        self.next();
        let mut items = Vec::new();
        loop {
            self.skip_blank()?;
            match self.peek() {
                None => return Err(SyntaxError { at: start, message: "this array is never closed".into() }),
                Some(']') => {
                    self.next();
                    return Ok(Kind::Array(items));
                }
                Some(_) => items.push(self.value()?),
            }
            self.separator(']')?;
        }
    }

    /// A comma, a new line, or nothing before the closing bracket.
    fn separator(&mut self, close: char) -> Result<(), SyntaxError> {
        let line = self.at.line;
        self.skip_blank()?;
        match self.peek() {
            Some(',') => {
                self.next();
                Ok(())
            }
            Some(c) if c == close => Ok(()),
            Some(_) if self.at.line > line => Ok(()),
            None => Ok(()),
            Some(c) => Err(self.error(format!("expected ',' or '{close}', found '{c}'"))),
        }
    }

    fn key(&mut self) -> Result<String, SyntaxError> {
        if matches!(self.peek(), Some('"' | '\'')) {
            return self.quoted();
        }
        let mut key = String::new();
        while let Some(c) = self.peek() {
            if c.is_whitespace() || "{}[],:\"'#/".contains(c) {
                break;
            }
            key.push(c);
            self.next();
        }
        if key.is_empty() {
            let found = self.peek().map_or("the end of the file".into(), |c| format!("'{c}'"));
            return Err(self.error(format!("expected a key, found {found}")));
        }
        Ok(key)
    }

    fn quoted(&mut self) -> Result<String, SyntaxError> {
        let start = self.at;
        let unclosed = || SyntaxError { at: start, message: "this string is never closed".into() };
        let quote = self.next();
        let mut text = String::new();
        loop {
            match self.next().ok_or_else(unclosed)? {
                c if Some(c) == quote => return Ok(text),
                '\n' => return Err(unclosed()),
                '\\' => text.push(self.escape()?),
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, SyntaxError> {
        let at = self.at;
        Ok(match self.next() {
            Some(c @ ('"' | '\'' | '\\' | '/')) => c,
            Some('n') => '\n',
            Some('t') => '\t',
            Some('r') => '\r',
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('u') => {
                let bad = || SyntaxError { at, message: "invalid \\u escape".into() };
                let high = self.hex4().ok_or_else(bad)?;
                let code = if (0xD800..0xDC00).contains(&high) {
                    let low = (self.next() == Some('\\') && self.next() == Some('u')).then(|| self.hex4());
                    let low = low.flatten().filter(|l| (0xDC00..0xE000).contains(l)).ok_or_else(bad)?;
                    0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)
                } else {
                    high
                };
                char::from_u32(code).ok_or_else(bad)?
            }
            _ => return Err(SyntaxError { at, message: "invalid escape in a string".into() }),
        })
    }

    fn hex4(&mut self) -> Option<u32> {
        (0..4).try_fold(0, |code, _| Some(code * 16 + self.next()?.to_digit(16)?))
    }

    /// A number, a keyword, or an unquoted string. The first two end at a comma, a bracket, a comment or the end of the line;
    /// whatever does not read as one of them is a string up to the end of the line. What Python writes for numbers that are not finite
    /// ends as numbers do, and is one of those words.
    fn bare(&mut self) -> Kind {
        let line = self.rest.lines().next().unwrap_or("");
        let end = line.find([',', '}', ']', '#']).unwrap_or(line.len());
        let end = ["//", "/*"].iter().filter_map(|c| line.find(c)).fold(end, usize::min);
        let word = line[..end].trim_end();
        let (kind, text) = match word {
            "null" => (Kind::Null, word),
            "true" => (Kind::Bool(true), word),
            "false" => (Kind::Bool(false), word),
            _ if is_number(word) => (Kind::Number(word.into()), word),
            "NaN" | "Infinity" | "-Infinity" => (Kind::String(word.into()), word),
            _ => (Kind::String(line.trim_end().into()), line),
        };
        for _ in text.chars() {
            self.next();
        }
        kind
    }
}

/// JSON's grammar of numbers.
fn is_number(word: &str) -> bool {
    let digits = |s: &str| s.bytes().take_while(u8::is_ascii_digit).count();
    let word = word.strip_prefix('-').unwrap_or(word);
    let whole = digits(word);
    if whole == 0 || (whole > 1 && word.starts_with('0')) {
        return false;
    }
    let mut rest = &word[whole..];
    if let Some(fraction) = rest.strip_prefix('.') {
        let n = digits(fraction);
        if n == 0 {
            return false;
        }
        rest = &fraction[n..];
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        let n = digits(exponent);
        if n == 0 {
            return false;
        }
        rest = &exponent[n..];
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(value: &Value) -> String {
        match &value.kind {
            Kind::Null => "null".into(),
            Kind::Bool(b) => b.to_string(),
            Kind::Number(n) => n.clone(),
            Kind::String(s) => format!("{s:?}"),
            Kind::Array(items) => format!("[{}]", items.iter().map(show).collect::<Vec<_>>().join(",")),
            Kind::Object(members) => {
                let members: Vec<_> =
                    members.iter().map(|m| format!("{}:{}", m.key, show(&m.value))).collect();
                format!("{{{}}}", members.join(","))
            }
        }
    }

    #[test]
    fn json_and_what_people_add_to_it() {
        for (text, expected) in [
            (r#"{"a": 1, "b": [true, null, -2.5e-3]}"#, "{a:1,b:[true,null,-2.5e-3]}"),
            ("{\"a\": 1,}", "{a:1}"),
            ("[1, 2, ]", "[1,2]"),
            ("// top\n{ # one\n a: 1 // two\n /* three\n */ b: 2 }", "{a:1,b:2}"),
            ("{a: 1\n b: 5e8\n}", "{a:1,b:5e8}"),
            ("{path: /local nvme\n}", "{path:\"/local nvme\"}"),
            ("{type: AdamW\nlr: 1e-5}", "{type:\"AdamW\",lr:1e-5}"),
            ("{url: \"http://x/#y\"}", "{url:\"http://x/#y\"}"),
            ("{'a': 'it\\'s'}", "{a:\"it's\"}"),
            (r#""\u0041\n\ud83d\ude00""#, "\"A\\n😀\""),
            ("{a: 01\n}", "{a:\"01\"}"),
            ("{\"a\": NaN, \"b\": -Infinity}", "{a:\"NaN\",b:\"-Infinity\"}"),
            ("{a: NaNs, b}\n}", "{a:\"NaNs, b}\"}"),
            ("\u{feff}{}", "{}"),
            ("{a: true}", "{a:true}"),
            ("# no braces\na: 1\n'b' /* two */ : {c: [2]},\n\"d\": text\n", "{a:1,b:{c:[2]},d:\"text\"}"),
        ] {
            assert_eq!(show(&parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))), expected);
        }
    }

    #[test]
    fn errors_say_where() {
        for (text, expected) in [
            ("", "1:1: expected a value"),
            ("{", "1:1: this object is never closed"),
            ("{\n  \"a\": [1,\n", "2:8: this array is never closed"),
            ("{\n \"a\": 1,\n \"a\": 2}", "3:2: duplicate key \"a\" (first at line 2)"),
            ("{\"a\" 1}", "1:6: expected ':'"),
            ("{\"a\": }", "1:7: expected a value, found '}'"),
            ("{\"a\": 1 \"b\": 2}", "1:1: this object is never closed"),
            ("{\"a\": \"x\" \"b\": 2}", "1:11: expected ',' or '}', found '\"'"),
            ("{} {}", "1:4: expected the end of the file"),
            ("/* x", "1:1: this comment is never closed"),
            ("{\"a\": \"x\n\"}", "1:7: this string is never closed"),
            ("\"\\q\"", "1:3: invalid escape"),
            ("\"\\ud800x\"", "1:3: invalid \\u escape"),
            ("{,}", "1:2: expected a key, found ','"),
            ("a: 1\na: 2\n", "2:1: duplicate key \"a\" (first at line 1)"),
            ("a: 1\n}", "2:1: expected a key, found '}'"),
        ] {
            match parse(text) {
                Err(e) => assert!(e.to_string().starts_with(expected), "{text}: {e}"),
                // An unquoted string runs to the end of its line and swallows the rest, as in Hjson.
                Ok(_) => panic!("{text} was read"),
            }
        }
        assert!(parse(&"[".repeat(100)).unwrap_err().message.contains("nested"));
    }
}
