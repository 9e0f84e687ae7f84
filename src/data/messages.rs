//! A conversation as rows hold it, made what chat templates are written for.
//!
//! As transformers does: keys of a message without a value are taken out, because many templates only ask whether a key is there;
//! and reasoning has several names, of which templates read the first. Content in parts, which some templates write as nothing or as JSON,
//! becomes the text that it is.

use super::encode::kind;
use super::{ChatTemplate, TextTokenizer, row};
use serde_json::{Map, Value};

/// Names of an assistant's reasoning. Templates read the first, some the second.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

type Result<T> = std::result::Result<T, String>;

/// Whether a message's turn is not to be learnt, as OpenAI's format has it.
pub(super) fn has_no_weight(message: &Value) -> bool {
    message["weight"].as_f64() == Some(0.0)
}

/// The messages of a row.
pub(crate) fn messages(value: &Value) -> Result<Vec<Value>> {
    let Value::Array(messages) = value else {
        return Err(format!("\"messages\": expected an array, found {}", kind(value)));
    };
    if messages.is_empty() {
        return Err("\"messages\" is empty".into());
    }
    messages.iter().enumerate().map(|(at, value)| message(at, value)).collect()
}

fn message(at: usize, value: &Value) -> Result<Value> {
    let wrong =
        || format!("\"messages\"[{at}]: expected {{\"role\": …, \"content\": …}} with a string as role");
    let mut message = value.as_object().ok_or_else(wrong)?.clone();
    message.retain(|_, value| !value.is_null());
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong());
    }
    // Tool calls come without content.
    let content = message.get("content").unwrap_or(&Value::Null);
    if let Value::Array(parts) = content {
        let text = text_of(at, parts)?;
        message.insert("content".into(), text.into());
    } else if !(content.is_string() || message.contains_key("tool_calls")) {
        return Err(format!("\"messages\"[{at}].content: expected a string, found {}", kind(content)));
    }
    if let Some(weight) = message.get("weight")
        && !matches!(weight.as_f64(), Some(0.0 | 1.0))
    {
        return Err(format!(
            "\"messages\"[{at}].weight: expected 0, which leaves the turn out of the loss, or 1, found {weight}"
        ));
    }
    Ok(Value::Object(with_reasoning(message)))
}

/// Parts of text as one, which templates for either write alike.
fn text_of(at: usize, parts: &[Value]) -> Result<String> {
    let text = |(part, value): (usize, &Value)| {
        let refused = |found: &str| {
            format!(
                "\"messages\"[{at}].content[{part}]: expected a part {{\"type\": \"text\", \"text\": …}} with a string as text, found \
                 {found}; models read text alone here"
            )
        };
        match (value["type"].as_str(), &value["text"]) {
            (Some("text"), Value::String(text)) => Ok(text.clone()),
            (Some("text"), other) => Err(refused(&format!("{} as text", kind(other)))),
            (Some(other), _) => Err(refused(&format!("one of the type {other:?}"))),
            (None, _) if value.is_object() => Err(refused("an object without a type")),
            (None, _) => Err(refused(kind(value))),
        }
    };
    parts.iter().enumerate().map(text).collect()
}

fn with_reasoning(message: Map<String, Value>) -> Map<String, Value> {
    let Some(reasoning) = REASONING.iter().find_map(|key| message.get(*key)).cloned() else { return message };
    let mut named = Map::new();
    if !message.contains_key("thinking") {
        named.insert("thinking".into(), reasoning.clone());
    }
    named.extend(message);
    named.insert("reasoning_content".into(), reasoning);
    named
}

/// The tools of a row: an array of objects, or one as text.
pub(super) fn tools(value: &Value) -> Result<Option<Value>> {
    let tools = match value {
        // Tables have a text where there are no tools, too.
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => {
            let tools = serde_json::from_str(text).map_err(|e| {
                format!("\"tools\": a string must be a JSON array of tools, and this is not JSON: {e}")
            })?;
            if let Some((_, reason)) = row::beyond_64_bits(text, true) {
                return Err(format!("\"tools\": {reason}"));
            }
            tools
        }
        other => other.clone(),
    };
    match &tools {
        Value::Null => return Ok(None),
        Value::Array(items) => {
            if let Some((at, item)) = items.iter().enumerate().find(|(_, item)| !item.is_object()) {
                return Err(format!("\"tools\"[{at}]: expected an object, found {}", kind(item)));
            }
        }
        other => {
            return Err(format!(
                "\"tools\": expected an array of objects, or one as a string, found {}",
                kind(other)
            ));
        }
    }
    Ok(Some(tools))
}

/// The template for messages, or for messages with tools.
pub(super) fn template(tokenizer: &TextTokenizer, has_tools: bool) -> Result<&ChatTemplate> {
    let chat = if has_tools { tokenizer.chat_with_tools() } else { tokenizer.chat() };
    chat.map_err(ToString::to_string)?.ok_or_else(|| {
        "\"messages\" need a chat template, and the model folder has neither chat_template.jinja nor a \
         \"chat_template\" in tokenizer_config.json"
            .into()
    })
}

/// The ids of a row `{"messages", "tools"?}` up to where the assistant is to go on.
pub(crate) fn prompt_ids(tokenizer: &TextTokenizer, row: &Map<String, Value>) -> Result<Vec<u32>> {
    let messages = messages(&row["messages"])?;
    let tools = row.get("tools").filter(|tools| !tools.is_null()).map_or(Ok(None), tools)?;
    let text = template(tokenizer, tools.is_some())?.prompt_with_tools(&messages, tools.as_ref())?;
    let spans = tokenizer.encode(&text, false).map_err(|e| e.to_string())?;
    Ok(spans.iter().map(|span| span.id).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn one(message: &Value) -> Result<Value> {
        messages(&json!([message])).map(|mut all| all.remove(0))
    }

    #[test]
    fn keys_without_a_value_are_taken_out() {
        let calls = json!([{"function": {"name": "f", "arguments": {"a": null}}}]);
        let message =
            json!({"role": "assistant", "content": null, "tool_calls": calls, "name": null, "weight": null});
        let found = one(&message).unwrap();
        assert_eq!(found, json!({"role": "assistant", "tool_calls": calls}), "only the message's own keys");
        let error = one(&json!({"role": "user", "content": null, "tool_calls": null})).unwrap_err();
        assert_eq!(error, "\"messages\"[0].content: expected a string, found nothing");
        assert!(one(&json!("Hi")).unwrap_err().contains("\"messages\"[0]: expected"));
    }

    #[test]
    fn parts_of_text_are_one_text() {
        let parts = |parts: Value| one(&json!({"role": "user", "content": parts}));
        let text = |text: &str| json!({"type": "text", "text": text, "image_url": null});
        let found = parts(json!([text("Look: "), text("a fox.")])).unwrap();
        assert_eq!(found, json!({"role": "user", "content": "Look: a fox."}));
        assert_eq!(parts(json!([])).unwrap()["content"], "");
        let image = json!({"type": "image_url", "image_url": {"url": "data:,"}});
        for (wrong, found) in [
            (image, "one of the type \"image_url\"; models read text alone"),
            (json!({"type": "text", "text": 1}), "a number as text"),
            (json!({"text": "a"}), "an object without a type"),
            (json!("a"), "a string"),
        ] {
            let error = parts(json!([text("a"), wrong])).unwrap_err();
            assert!(error.starts_with("\"messages\"[0].content[1]: expected a part {\"type\": "), "{error}");
            assert!(error.contains(&format!("found {found}")), "{error}");
        }
    }

    #[test]
    fn reasoning_has_one_name() {
        for (keys, expected) in [
            (json!({"thinking": "t"}), json!({"thinking": "t", "reasoning_content": "t"})),
            (json!({"reasoning": "r"}), json!({"thinking": "r", "reasoning": "r", "reasoning_content": "r"})),
            (json!({"reasoning_content": "c"}), json!({"thinking": "c", "reasoning_content": "c"})),
            (
                json!({"reasoning": "r", "thinking": "t", "reasoning_content": null}),
                json!({"reasoning": "r", "thinking": "t", "reasoning_content": "t"}),
            ),
            (json!({"reasoning": null}), json!({})),
        ] {
            let with = |keys: &Value| {
                let mut message = json!({"role": "assistant", "content": "x"});
                message.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
                message
            };
            assert_eq!(one(&with(&keys)).unwrap(), with(&expected), "{keys}");
        }
    }

    #[test]
    fn tools_are_objects_also_as_text() {
        let expected = Some(json!([{"name": "f"}]));
        assert_eq!(tools(&json!([{"name": "f"}])).unwrap(), expected);
        assert_eq!(tools(&json!("[{\"name\": \"f\"}]")).unwrap(), expected);
        assert_eq!(tools(&json!("null")).unwrap(), None);
        for (value, reason) in [
            (json!("f"), "\"tools\": a string must be a JSON array of tools, and this is not JSON"),
            (json!("[{\"n\": 18446744073709551616}]"), "\"tools\": the whole number 18446744073709551616 is"),
            (json!("[\"f\"]"), "\"tools\"[0]: expected an object, found a string"),
            (json!([{"name": "f"}, 1]), "\"tools\"[1]: expected an object, found a number"),
            (
                json!({"name": "f"}),
                "\"tools\": expected an array of objects, or one as a string, found an object",
            ),
        ] {
            let error = tools(&value).unwrap_err();
            assert!(error.contains(reason), "{value}: {error}");
        }
    }

    #[test]
    fn a_weight_is_zero_or_one() {
        let weighted = |weight: Value| one(&json!({"role": "assistant", "content": "x", "weight": weight}));
        assert!(has_no_weight(&weighted(json!(0)).unwrap()) && has_no_weight(&weighted(json!(0.0)).unwrap()));
        assert!(
            !has_no_weight(&weighted(json!(1)).unwrap()) && !has_no_weight(&weighted(Value::Null).unwrap())
        );
        for wrong in [json!(0.5), json!("0"), json!(false), json!(-1)] {
            let error = weighted(wrong).unwrap_err();
            assert!(error.contains("\"messages\"[0].weight: expected 0, which"), "{error}");
        }
    }
}
