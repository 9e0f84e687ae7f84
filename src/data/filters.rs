//! Filters of jinja2 for which minijinja has others of the same names, with other text.
//!
//! `attr` finds keys of mappings there, and here none, as jinja2 does; `indent` takes a line's end from the text; `round` rounds halves away
//! from zero.

use super::python;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

/// Puts them in place of minijinja's.
pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_filter("attr", attr);
    environment.add_filter("e", python::escape);
    environment.add_filter("escape", python::escape);
    environment.add_filter("indent", indent);
    environment.add_filter("round", round);
    environment.add_filter("title", python::title);
}

/// What has attributes and looks like a mapping.
const WITH_ATTRIBUTES: [&str; 2] = ["::Namespace", "::Loop"];

/// Attributes that Python's mappings do have.
const METHODS: [&str; 11] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// An attribute, which keys of mappings are not.
fn attr(value: &Value, name: &str) -> Result<Value, Error> {
    let is_object = value.as_object().is_some_and(|object| {
        let kind = object.type_name();
        WITH_ATTRIBUTES.iter().any(|name| kind.ends_with(name))
    });
    if value.kind() != ValueKind::Map || is_object {
        return value.get_item(&name.into());
    }
    if METHODS.contains(&name) {
        return Err(refused(format!("attr: {name} is a method of mappings; call it, as in value.{name}()")));
    }
    Ok(Value::UNDEFINED)
}

/// Indents lines by a number of spaces or a text: not the first, unless `first` is set, nor empty ones, unless `blank` is set.
#[expect(clippy::needless_pass_by_value, reason = "the template engine hands keywords over by value")]
fn indent(
    value: &Value,
    width: Option<Value>,
    first: Option<Value>,
    blank: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let option = |name: &str, given: Option<Value>| given.map_or_else(|| options.get(name), |v| Ok(Some(v)));
    let width: Option<Value> = option("width", width)?;
    let is_on = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (first, blank) = (is_on(option("first", first)?), is_on(option("blank", blank)?));
    options.assert_all_used()?;
    let Some(text) = value.as_str() else {
        return Err(refused(format!("indent: expected a string, found {}", value.kind())));
    };
    let indent = match width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(width)?.max(0)).unwrap_or(0)),
        },
    };
    let mut out = String::new();
    for (at, line) in lines(&format!("{text}\n")).into_iter().enumerate() {
        let is_indented = if at == 0 { first } else { blank || !line.is_empty() };
        out.push_str(if at == 0 { "" } else { "\n" });
        out.push_str(if is_indented { &indent } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

/// Python's `splitlines`.
fn lines(text: &str) -> Vec<&str> {
    let is_end = |c| matches!(c, '\n'..='\r' | '\u{1C}'..='\u{1E}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        lines.push(&rest[..at]);
        let end = &rest[at..];
        let skipped = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        rest = &end[skipped..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Rounds to digits after the point, or before it where `precision` is negative, halves to even digits; up or down with a `method`. Whole
/// numbers stay whole without one.
#[expect(clippy::needless_pass_by_value, reason = "the template engine hands keywords over by value")]
fn round(
    value: &Value,
    precision: Option<Value>,
    method: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let option = |name: &str, given: Option<Value>| given.map_or_else(|| options.get(name), |v| Ok(Some(v)));
    let precision: Option<Value> = option("precision", precision)?;
    let method: Option<Value> = option("method", method)?;
    options.assert_all_used()?;
    let digits = match precision {
        None => 0,
        Some(digits) if digits.is_integer() => i32::try_from(digits)?,
        Some(other) => return Err(refused(format!("round: expected whole digits, found {other}"))),
    };
    let is_whole = value.is_integer() || value.kind() == ValueKind::Bool;
    if !is_whole && value.kind() != ValueKind::Number {
        return Err(refused(format!("round: expected a number, found {}", value.kind())));
    }
    match method.as_ref().map_or(Some("common"), Value::as_str) {
        Some("common") if is_whole => round_whole(i128::try_from(value.clone())?, digits),
        Some("common") => Ok(round_float(f64::try_from(value.clone())?, digits).into()),
        Some(method @ ("ceil" | "floor")) => {
            let ten = 10f64.powf(digits.into());
            let scaled = f64::try_from(value.clone())? * ten;
            if !scaled.is_finite() {
                return Err(refused(format!("round: {value} has too many digits, or none")));
            }
            let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
            // A whole number has no negative zero.
            Ok(((whole + 0.0) / ten).into())
        }
        _ => Err(refused("round: the method must be common, ceil or floor".into())),
    }
}

fn round_whole(value: i128, digits: i32) -> Result<Value, Error> {
    let Some(ten) = 10i128.checked_pow(digits.min(0).unsigned_abs()) else { return Ok(0.into()) };
    let (quotient, rest) = (value.div_euclid(ten), value.rem_euclid(ten));
    let is_up = match (2 * rest).cmp(&ten) {
        std::cmp::Ordering::Less => false,
        std::cmp::Ordering::Equal => quotient % 2 != 0,
        std::cmp::Ordering::Greater => true,
    };
    let rounded = (quotient + i128::from(is_up)).checked_mul(ten);
    rounded.map(Value::from).ok_or_else(|| refused(format!("round: {value} is too large")))
}

fn round_float(value: f64, digits: i32) -> f64 {
    match usize::try_from(digits) {
        _ if !value.is_finite() => value,
        Ok(0) => value.round_ties_even(),
        // The formatter rounds the decimal digits of the number, halves to even ones.
        Ok(digits) => format!("{value:.digits$}", digits = digits.min(DIGITS_MAX)).parse().unwrap_or(value),
        Err(_) => {
            let ten = 10f64.powi(digits.saturating_neg());
            if ten.is_finite() { (value / ten).round_ties_even() * ten } else { value * 0.0 }
        }
    }
}

/// No float has more behind its point.
const DIGITS_MAX: usize = 1074;

fn refused(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
