//! What the assistant said, in the manner of templates that real models have.

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use terrace::data::{ChatTemplate, DataConfig, Dataset, IGNORED, Rendered, TextTokenizer};

/// Qwen 3: reasoning of turns before the last question is dropped, and the last answer always has some.
const QWEN3: &str = "
{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '</tools>\n' }}{%- endif %}
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == 'user' %}{%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{%- endif %}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}";

/// R1's distillates: reasoning is never written, and the generation prompt opens it.
const R1: &str = "{{bos_token}}{%- for m in messages %}{%- if m.role == 'user' %}{{'<|User|>' + m.content}}{%- endif %}{%- if m.role == 'assistant' %}{{'<|Assistant|>' + m.content.split('</think>')[-1] + eos_token}}{%- endif %}{%- endfor -%}{% if add_generation_prompt %}{{'<|Assistant|><think>\n'}}{% endif %}";

/// Phi 3: the end token closes the whole conversation.
const PHI3: &str = "{% for m in messages %}{{'<|' + m.role + '|>\n' + m.content + '<|end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";

const MARKED: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A{{ m.content }}{% endgeneration %}{% else %}U{{ m.content }}{% endif %}{% endfor %}";

fn user(content: &str) -> Value {
    json!({"role": "user", "content": content})
}

fn assistant(content: &str) -> Value {
    json!({"role": "assistant", "content": content})
}

fn conversation(source: &str, messages: &[Value]) -> Result<Rendered, String> {
    ChatTemplate::new(source, "<s>", "<|endoftext|>").unwrap().conversation(messages, None)
}

fn said(rendered: &Rendered) -> Vec<&str> {
    rendered.assistant.iter().map(|range| &rendered.text[range.clone()]).collect()
}

#[test]
fn a_template_that_drops_reasoning_teaches_the_last_turn() {
    let empty = "<think>\n\n</think>\n\n";
    let one = conversation(QWEN3, &[user("Hi"), assistant("Yo")]).unwrap();
    assert!(said(&one) == [format!("{empty}Yo<|im_end|>\n")] && !one.only_last);
    let two = conversation(QWEN3, &[user("Hi"), assistant("Yo"), user("More"), assistant("Ok")]).unwrap();
    assert!(said(&two) == [format!("{empty}Ok<|im_end|>\n")] && two.only_last);
    let context = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n";
    assert_eq!(&two.text[..two.assistant[0].start], format!("{context}<|im_start|>assistant\n"));
    // What follows the last turn changes nothing that the model sees when it says it.
    let trailing = conversation(QWEN3, &[user("Hi"), assistant("Yo"), user("bye")]).unwrap();
    assert_eq!(trailing, one);
    let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]});
    let tool = json!({"role": "tool", "content": "42"});
    let talk = [user("Hi"), call.clone(), tool.clone(), assistant("It is 42")];
    let rendered = conversation(QWEN3, &talk).unwrap();
    assert!(said(&rendered) == [format!("{empty}It is 42<|im_end|>\n")] && rendered.only_last);
    // With reasoning, which is kept since the last question, all of them are there.
    let mut call = call;
    call["reasoning_content"] = "hm".into();
    let rendered = conversation(QWEN3, &[user("Hi"), call, tool, assistant("It is 42")]).unwrap();
    assert_eq!(said(&rendered).len(), 2);
    assert!(said(&rendered)[0].starts_with("<think>\nhm\n</think>") && !rendered.only_last);
}

#[test]
fn a_generation_prompt_that_is_never_written_is_refused() {
    for talk in [&[user("Hi"), assistant("Yo")][..], &[user("Hi"), assistant("a"), user("M"), assistant("b")]]
    {
        let error = conversation(R1, talk).unwrap_err();
        let at = talk.len() - 1;
        assert!(
            error.starts_with("the generation prompt is not what the chat template writes before the answer"),
            "{error}"
        );
        assert!(error.contains(&format!("(message {at})")) && error.contains("\"<think>\\n\""), "{error}");
        assert!(
            error.contains("{\"prompt\", \"completion\"}") && !error.contains("row of its own"),
            "{error}"
        );
    }
    // One that shows the last two messages only.
    let window = "{% for m in messages[-2:] %}[{{ m.content }}]{% endfor %}";
    let error = conversation(window, &[user("Hi"), user("there"), assistant("Yo")]).unwrap_err();
    assert!(error.contains("changes what was said before message 2"), "{error}");
}

#[test]
fn an_end_token_may_close_the_whole() {
    let rendered = conversation(PHI3, &[user("Hi"), assistant("Yo"), user("More"), assistant("Ok")]).unwrap();
    assert_eq!(said(&rendered), ["Yo<|end|>\n", "Ok<|end|>\n<|endoftext|>"]);
    assert!(!rendered.only_last);
    let rendered = conversation(PHI3, &[user("Hi"), assistant("Yo"), user("bye")]).unwrap();
    assert_eq!(said(&rendered), ["Yo<|end|>\n"]);
    assert!(rendered.text.ends_with("bye<|end|>\n<|endoftext|>"), "what follows is context");
}

#[test]
fn turns_without_weight_are_not_learnt() {
    let mut talk = [user("a"), assistant("b"), user("c"), assistant("d")];
    talk[1]["weight"] = 0.into();
    talk[3]["weight"] = 1.into();
    assert_eq!(said(&conversation(PHI3, &talk).unwrap()), ["d<|end|>\n<|endoftext|>"]);
    assert_eq!(said(&conversation(MARKED, &talk).unwrap()), ["Ad"]);
    let rendered = conversation(QWEN3, &talk).unwrap();
    assert!(said(&rendered).len() == 1 && !rendered.only_last, "the other turn was not to be learnt");
    talk[3]["weight"] = 0.into();
    assert!(said(&conversation(PHI3, &talk).unwrap()).is_empty());
    let twice =
        MARKED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}.{% endgeneration %}");
    let error = conversation(&twice, &talk).unwrap_err();
    assert!(error.contains("marks 4 parts as generated for 2 messages"), "{error}");
}

/// A model folder whose tokenizer has a token for every byte, and this chat template.
fn model(folder: &Path, template: &str) -> TextTokenizer {
    let vocab: serde_json::Map<_, _> =
        (0..=255u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "ByteFallback"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    TextTokenizer::load(folder).unwrap()
}

/// Text of every row and of what is learnt of it, and the warning.
type Built = (Vec<(String, String)>, Option<String>);

fn build(template: &str, rows: &[Value]) -> Result<Built, String> {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = model(folder.path(), template);
    let path = folder.path().join("d.jsonl");
    std::fs::write(&path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let config =
        DataConfig { seq_len: 4096, pack: false, vocab_size: 256, tokenizer_path: PathBuf::from("t") };
    let data = Dataset::build(&path, Some(&tokenizer), &config, folder.path()).map_err(|e| e.to_string())?;
    let text = |ids: Vec<u32>| String::from_utf8(ids.iter().map(|&id| id as u8).collect()).unwrap();
    let rows = (0..data.len()).map(|at| data.sample(at).unwrap()).map(|sample| {
        let learnt = sample.labels.iter().filter(|&&label| label != IGNORED).map(|&label| label as u32);
        (text(sample.ids.clone()), text(learnt.collect()))
    });
    Ok((rows.collect(), data.warning().map(str::to_owned)))
}

#[test]
fn rows_of_which_the_last_turn_is_learnt_are_counted() {
    let one = json!({"messages": [user("Hi"), assistant("Yo")]});
    let two = json!({"messages": [user("Hi"), assistant("Yo"), user("M"), assistant("Ok")], "message": 1});
    let (rows, warning) = build(QWEN3, &[one.clone(), two.clone(), two]).unwrap();
    assert!(rows[1].1.ends_with("Ok<|im_end|>\n") && !rows[1].1.contains("Yo"), "{rows:?}");
    let warning = warning.unwrap();
    assert!(warning.contains("of 2 rows (the first in line 2) only the assistant's last turn"), "{warning}");
    assert_eq!(build(QWEN3, &[one]).unwrap().1, None);
}

#[test]
fn messages_are_read_as_transformers_reads_them() {
    let has_calls = "{% for m in messages %}{{ m.role[0] }}{% if 'tool_calls' in m %}+{% endif %}{{ m.content }}{% if m.role == 'assistant' %}.{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    let nulls = |role: &str, content: &str| json!({"role": role, "content": content, "tool_calls": null, "name": null});
    let (rows, _) =
        build(has_calls, &[json!({"messages": [nulls("user", "x"), nulls("assistant", "y")]})]).unwrap();
    assert_eq!(rows, [("uxay.".into(), "y.".into())]);
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]});
    let (rows, _) = build(has_calls, &[json!({"messages": [user("x"), call]})]).unwrap();
    assert_eq!(rows, [("uxa+.".into(), "+.".into())], "no text \"None\"");

    for key in ["reasoning", "thinking", "reasoning_content"] {
        let mut answer = assistant("y");
        answer[key] = "hm".into();
        let (rows, _) = build(QWEN3, &[json!({"messages": [user("x"), answer]})]).unwrap();
        assert_eq!(rows[0].1, "<think>\nhm\n</think>\n\ny<|im_end|>\n", "{key}");
    }

    let tools = json!([{"type": "function"}]);
    let row = |tools: Value| json!({"messages": [user("x"), assistant("y")], "tools": tools});
    let (rows, _) =
        build(QWEN3, &[row(tools.clone()), row(tools.to_string().into()), row(Value::Null)]).unwrap();
    assert!(rows[0].0.starts_with("<tools>{\"type\": \"function\"}</tools>\n"), "{rows:?}");
    assert_eq!(rows[0], rows[1]);
    assert!(rows[2].0.starts_with("<|im_start|>user"), "{rows:?}");
    for tools in [json!("f"), json!(["f"]), json!({"f": 1})] {
        let error = build(QWEN3, &[row(tools)]).unwrap_err();
        assert!(error.contains("d.jsonl:1: \"tools\""), "{error}");
    }

    let parts = |part: Value| json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}, assistant("y")]});
    let (rows, _) = build(has_calls, &[parts(json!({"type": "text", "text": " z"}))]).unwrap();
    assert_eq!(rows, [("ux zay.".into(), "y.".into())]);
    let error = build(has_calls, &[parts(json!({"type": "image_url", "image_url": {"url": "data:,"}}))]);
    let error = error.unwrap_err();
    assert!(
        error.contains("d.jsonl:1: \"messages\"[0].content[1]: ") && error.contains("\"image_url\""),
        "{error}"
    );

    let mut silent = assistant("y");
    silent["weight"] = 0.into();
    let talk = json!({"messages": [user("x"), silent, user("x"), assistant("z")]});
    let (rows, _) = build(MARKED, &[talk]).unwrap();
    assert_eq!(rows, [("UxAyUxAz".into(), "Az".into())]);
}

/// In the manner of LLaVA 1.5: what is said is read part by part, and a text has none.
const LLAVA: &str = "{% for m in messages %}{{ m['role'] | upper + ': ' }}{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}";

#[test]
fn a_template_that_reads_parts_gets_them() {
    let talk = [user("Hi"), assistant("Yo"), user("More"), assistant("Ok")];
    let rendered = conversation(LLAVA, &talk).unwrap();
    assert_eq!(rendered.text, "USER: Hi ASSISTANT: Yo USER: More ASSISTANT: Ok ");
    assert_eq!(said(&rendered), ["Yo ", "Ok "]);
    let template = ChatTemplate::new(LLAVA, "", "").unwrap();
    assert_eq!(template.prompt(&talk[..1]).unwrap(), "USER: Hi ASSISTANT: ");
    // One that shows a part of the text, whatever it is, reads texts; so does one that writes parts as they are.
    for (source, text) in [
        ("{% for m in messages %}{{ m.content[:1] }}{% endfor %}", "H"),
        ("{{ messages[0].content[0] }}", "H"),
        (
            "{% for part in messages[0].content %}{% if part is mapping %}{{ part | tojson }}{% endif %}{% endfor %}",
            "",
        ),
    ] {
        let template = ChatTemplate::new(source, "", "").unwrap();
        assert_eq!(template.prompt(&talk[..1]).unwrap(), text, "{source}");
    }
    // One that reads both gets what it always got.
    let both = "{% for m in messages %}{% if m.content is string %}text {{ m.content }}{% else %}parts {{ m.content[0].text }}{% endif %}{% endfor %}";
    assert_eq!(ChatTemplate::new(both, "", "").unwrap().prompt(&talk[..1]).unwrap(), "text Hi");
}

#[test]
fn a_template_may_come_with_the_processor() {
    let folder = tempfile::tempdir().unwrap();
    drop(model(folder.path(), LLAVA));
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let of_processor = folder.path().join("chat_template.json");
    std::fs::write(&of_processor, json!({"chat_template": LLAVA}).to_string()).unwrap();
    let tokenizer = TextTokenizer::load(folder.path()).unwrap();
    let template = tokenizer.chat().unwrap().unwrap();
    assert_eq!(template.prompt(&[user("Hi")]).unwrap(), "USER: Hi ASSISTANT: ");
    std::fs::write(&of_processor, "{").unwrap();
    let message = TextTokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(message.contains("chat_template.json") && message.contains("not JSON"), "{message}");
}
