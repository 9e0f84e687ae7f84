//! Templates give the text that they give with transformers, whose renderings are in `fixtures/jinja.json`.

use serde_json::{Value, json};
use terrace::data::ChatTemplate;

#[test]
fn text_is_that_of_transformers() {
    let fixture: Value = serde_json::from_str(include_str!("fixtures/jinja.json")).unwrap();
    let messages = fixture["messages"].as_array().unwrap();
    let mut differing = Vec::new();
    for case in fixture["cases"].as_array().unwrap() {
        let (source, expected) = (case["source"].as_str().unwrap(), case["text"].as_str().unwrap());
        let found = ChatTemplate::new(source, "", "").and_then(|template| template.prompt(messages));
        if found.as_deref() != Ok(expected) {
            differing.push(format!("{source}\n  expected {expected:?}\n  found    {found:?}"));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

/// The day is always the same, so that no fixture can say what is right.
#[test]
fn dates_have_every_form() {
    let form = |format: &str| {
        let source = format!("{{{{ strftime_now('{format}') }}}}");
        ChatTemplate::new(&source, "", "").unwrap().prompt(&[json!({})]).unwrap()
    };
    assert_eq!(form("%d %b %Y, %A %B"), "26 Jul 2024, Friday July");
    assert_eq!(form("%-d.%-m. %-H:%M %-I %p %-j %y"), "26.7. 0:00 12 AM 208 24");
    assert_eq!(form("%F %T %D %R %w 100%% %Q %"), "2024-07-26 00:00:00 07/26/24 00:00 5 100% %Q %");
}

#[test]
fn what_python_refuses_is_refused() {
    for source in [
        "{{ nothing | tojson }}",
        "{{ messages | tojson(indents=2) }}",
        "{{ messages | tojson(separators=',') }}",
        "{{ 'abc'.index('x') }}",
        "{{ 'abc'.removeprefix() }}",
        "{{ 'abc'.unheard_of() }}",
        "{{ 1 | indent }}",
        "{{ 'a' | indent(2, width=2) }}",
        "{{ 'a' | round }}",
        "{{ nothing | round }}",
        "{{ 1.5 | round(1.5) }}",
        "{{ 1.5 | round(method='up') }}",
        // What Python prints of a method is of no use.
        "{{ messages[0] | attr('items') }}",
    ] {
        let template = ChatTemplate::new(source, "", "").unwrap();
        assert!(template.prompt(&[json!({"a": 1})]).is_err(), "{source}");
    }
}
