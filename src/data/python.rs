//! What chat templates expect of Python: how values are printed, `json.dumps`, methods of strings, `strftime`.
//!
//! Templates are run by jinja2 elsewhere, where `{{ value }}` is `str(value)`. What minijinja prints otherwise (`true`, floats in
//! exponents, containers) would give a model other text than it was trained on. What `~` and `join` put together is minijinja's: only
//! strings and whole numbers are the same there.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};
use std::fmt::Write as _;

/// Writes `{{ value }}`.
pub(super) fn print(out: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&str_of(value)),
    };
    written.map_err(Error::from)
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> Value {
    if value.as_str().is_some() { value.clone() } else { str_of(value).into() }
}

/// The filter `title`, which begins a word where jinja2 does: after white space, a hyphen or an opening bracket. The method of that name begins
/// one after whatever is no letter.
pub(super) fn title(value: &Value) -> String {
    let is_between =
        |c: char| c.is_whitespace() || matches!(c, '-' | '(' | '{' | '[' | '<' | '\u{1C}'..='\u{1F}');
    let mut text = String::new();
    for piece in str_of(value).split_inclusive(is_between) {
        let first = piece.chars().next().map_or(0, char::len_utf8);
        text += &piece[..first].to_uppercase();
        text += &piece[first..].to_lowercase();
    }
    text
}

/// The filter `escape`, with the references that markupsafe writes.
pub(super) fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let mut text = String::new();
    for c in str_of(value).chars() {
        match c {
            '&' => text.push_str("&amp;"),
            '<' => text.push_str("&lt;"),
            '>' => text.push_str("&gt;"),
            '\'' => text.push_str("&#39;"),
            '"' => text.push_str("&#34;"),
            c => text.push(c),
        }
    }
    Value::from_safe_string(text)
}

/// The test `sequence`: whatever has a length and items by number or key.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

/// The test `number`, of which booleans are some.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// The test `iterable`, which `none` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Python's `str(value)`.
fn str_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.into(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut text = String::new();
            repr(&mut text, value);
            text
        }
    }
}

/// Python's `repr(value)`.
fn repr(out: &mut String, value: &Value) {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(out, value, ["inf", "nan"]),
        ValueKind::String => quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (at, item) in items().enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(out, &item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in items().enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(out, &key);
                out.push_str(": ");
                repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// A number as Python writes it: exponents have a sign and two digits. `special` are the words for what is not finite.
fn number(out: &mut String, value: &Value, special: [&str; 2]) {
    let float = if value.is_integer() { None } else { f64::try_from(value.clone()).ok() };
    let _ = match float {
        None => write!(out, "{value}"),
        Some(x) if x.is_nan() => write!(out, "{}", special[1]),
        Some(x) if x.is_infinite() => write!(out, "{}{}", if x < 0.0 { "-" } else { "" }, special[0]),
        Some(x) => {
            let digits = format!("{x:?}");
            match digits.split_once('e') {
                None => write!(out, "{digits}"),
                Some((digits, exponent)) => {
                    let (sign, exponent) =
                        exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
                    write!(out, "{digits}e{sign}{exponent:0>2}")
                }
            }
        }
    };
}

/// A string in quotes, in single ones if it has none itself.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let _ = match c {
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            '\\' => write!(out, "\\\\"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            c if u32::from(c) < 0x100 => write!(out, "\\x{:02x}", u32::from(c)),
            c if u32::from(c) < 0x1_0000 => write!(out, "\\u{:04x}", u32::from(c)),
            c => write!(out, "\\U{:08x}", u32::from(c)),
        };
    }
    out.push(quote);
}

/// Neither a control character, nor white space but for the space, nor invisible, nor private.
fn is_printable(c: char) -> bool {
    let hidden = matches!(c, '\u{AD}' | '\u{200B}'..='\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2060}'..='\u{206F}'
        | '\u{E000}'..='\u{F8FF}' | '\u{FEFF}' | '\u{FFF0}'..='\u{FFFB}');
    c == ' ' || !(c.is_control() || c.is_whitespace() || hidden)
}

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
#[expect(clippy::needless_pass_by_value, reason = "the template engine hands keywords over by value")]
pub(super) fn to_json(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let option = |name: &str, given: Option<Value>| -> Result<Option<Value>, Error> {
        let found = options.get::<Option<Value>>(name)?.or(given);
        Ok(found.filter(|value| !value.is_none()))
    };
    let is_on = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ascii = is_on(option("ensure_ascii", ensure_ascii)?);
    let sorted = is_on(option("sort_keys", None)?);
    let indent = match option("indent", indent)? {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(indent)?.max(0)).unwrap_or(0)),
        }),
    };
    let between = match option("separators", None)? {
        None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
        Some(pair) => {
            let pair: Vec<String> = pair.try_iter()?.map(|text| str_of(&text)).collect();
            pair.try_into().map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings")
            })?
        }
    };
    options.assert_all_used()?;
    let mut json = Json { text: String::new(), ascii, sorted, indent, between };
    json.value(value, 1)?;
    Ok(json.text.into())
}

struct Json {
    text: String,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    /// Between items, and between a key and its value.
    between: [String; 2],
}

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(&mut self.text, value, ["Infinity", "NaN"]),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.container(['[', ']'], &items, depth, |json, item| json.value(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.container(['{', '}'], &keys, depth, |json, key| {
                    json.string(&key_of(key));
                    let colon = json.between[1].clone();
                    json.text.push_str(&colon);
                    json.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("tojson: a value of the kind {kind} has no JSON");
                return Err(Error::new(ErrorKind::BadSerialization, reason));
            }
        }
        Ok(())
    }

    fn container(
        &mut self,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(brackets[0]);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                let comma = self.between[0].clone();
                self.text.push_str(&comma);
            }
            self.line(depth);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth - 1);
        }
        self.text.push(brackets[1]);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for c in text.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ascii && !matches!(c, ' '..='~')) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

/// A key of an object that is no string.
fn key_of(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => key.is_true().to_string(),
        _ => str_of(key),
    }
}

/// Methods of Python's types, those that `minijinja_contrib` has and more of strings.
pub(super) fn method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    Ok(match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if text.contains(separator) { separator } else { "" };
            [before, found, after].into_iter().map(Value::from).collect()
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if text.contains(separator) { separator } else { "" };
            [before, found, after].into_iter().map(Value::from).collect()
        }
        "rsplit" => rsplit(text, args)?,
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(args)?;
            let found = if method == "index" { text.find(part) } else { text.rfind(part) };
            let at = found.ok_or_else(|| {
                Error::new(ErrorKind::InvalidOperation, format!("{method}: no {part:?} in the text"))
            })?;
            text[..at].chars().count().into()
        }
        // Of the text in characters, where the contributed ones count bytes.
        "find" | "rfind" => {
            let (part,): (&str,) = from_args(args)?;
            let found = if method == "find" { text.find(part) } else { text.rfind(part) };
            found.map_or(-1, |at| text[..at].chars().count() as i64).into()
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            let zeros = width.saturating_sub(text.chars().count());
            format!("{sign}{}{digits}", "0".repeat(zeros)).into()
        }
        "ljust" | "rjust" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(" ").repeat(width.saturating_sub(text.chars().count()));
            if method == "ljust" { format!("{text}{fill}") } else { format!("{fill}{text}") }.into()
        }
        _ => return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    })
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = Vec::new();
    if let Some(separator) = separator {
        parts.extend(text.rsplitn(most + 1, separator));
    } else {
        let mut rest = text.trim_end();
        while !rest.is_empty() {
            // What is left after the last split keeps its white space.
            let border = rest.rfind(char::is_whitespace).filter(|_| parts.len() < most);
            let start = border.map_or(0, |at| at + rest[at..].chars().next().map_or(0, char::len_utf8));
            parts.push(&rest[start..]);
            rest = rest[..start].trim_end();
        }
    }
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `strftime` of Friday, 26 July 2024, midnight.
pub(super) fn strftime(format: &str) -> String {
    let mut text = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        text.push_str(&rest[..at]);
        let code = &rest[at..];
        // `%-d`, `%-m`: without zeros in front.
        let bare = code.starts_with("%-");
        let letter = code[1 + usize::from(bare)..].chars().next();
        let part = letter.and_then(date_part);
        let length = 1 + usize::from(bare) + letter.map_or(0, char::len_utf8);
        match part {
            Some(part) if bare && part.len() > 1 => text.push_str(part.trim_start_matches('0').trim_start()),
            Some(part) => text.push_str(part),
            None => text.push_str(&code[..length]),
        }
        // `%-H` of midnight is one zero.
        if bare && part.is_some_and(|part| part.bytes().all(|b| b == b'0')) {
            text.push('0');
        }
        rest = &code[length..];
    }
    text + rest
}

fn date_part(letter: char) -> Option<&'static str> {
    Some(match letter {
        'Y' => "2024",
        'C' => "20",
        'y' => "24",
        'm' => "07",
        'd' | 'e' => "26",
        'B' => "July",
        'b' | 'h' => "Jul",
        'A' => "Friday",
        'a' => "Fri",
        'w' | 'u' => "5",
        'j' => "208",
        'H' | 'M' | 'S' => "00",
        'I' => "12",
        'p' => "AM",
        'F' => "2024-07-26",
        'D' | 'x' => "07/26/24",
        'T' | 'X' => "00:00:00",
        'R' => "00:00",
        'c' => "Fri Jul 26 00:00:00 2024",
        'f' => "000000",
        'Z' | 'z' => "",
        'n' => "\n",
        't' => "\t",
        '%' => "%",
        _ => return None,
    })
}
