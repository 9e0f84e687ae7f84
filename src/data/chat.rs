//! Chat templates: Jinja as Hugging Face's tokenizers run it, and which part of the text the assistant said.
//!
//! The environment is theirs: `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `{% generation %}` blocks, and what
//! [Python](super::python) has part in, with [its filters](super::filters).
//!
//! **What the assistant said.** If the template has `{% generation %}` blocks, they say it. Otherwise turn `i` is what
//! rendering messages `..=i` adds to rendering `..i` with the generation prompt, which is exactly what the model has to produce
//! at that point. This holds only while each rendering is a prefix of the next, but for an end token that closes the whole. A
//! template that rewrites earlier turns (dropping their reasoning, say) breaks it; then the last turn alone is learnt, of which it
//! holds in any case. Where not even that does, the row is refused, because any guess would train on text the model never sees.
//!
//! **Parts.** Templates of models that read pictures may read a message's content as parts alone, and nothing of a text: they get it as one
//! part. Those that read both get texts.
//!
//! **Dates.** `strftime_now` gives 26 Jul 2024, the date that templates fall back to, whatever the day: tokens must not depend
//! on when the data was read, or a run could not be resumed tomorrow.

use super::messages::has_no_weight;
use super::{filters, python};
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::Range;

/// Noncharacters that mark a `{% generation %}` block in the rendered text; no text contains them.
const GENERATION: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];
const TEMPLATE: &str = "chat_template";
/// What a template is asked to render, to see whether it reads texts.
const PROBE: &str = "probe\u{FDD2}";
/// A key of the same as a part, which nobody asks for by name.
const UNREAD: &str = "unread-key-of-a-probe";

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    /// What else the template may call by name.
    tokens: BTreeMap<String, String>,
    marks_generation: bool,
    /// It reads what is said as parts, and nothing of a text.
    wants_parts: bool,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges that the assistant said, in order.
    pub assistant: Vec<Range<usize>>,
    /// The template writes earlier turns otherwise once messages follow, and only the last is among the ranges.
    pub only_last: bool,
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the special tokens' texts, empty if the model has none.
    ///
    /// # Errors
    /// The template does not compile; the message says where.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, String> {
        // Jinja knows one end of a line.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, marks_generation) = rewrite_generation(&source);
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::print);
        environment.add_filter("tojson", python::to_json);
        environment.add_filter("string", python::string);
        filters::add(&mut environment);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("number", python::is_number);
        environment.add_test("iterable", python::is_iterable);
        environment
            .add_filter("__generation", |text: String| format!("{}{text}{}", GENERATION[0], GENERATION[1]));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| python::strftime(&format));
        environment.add_template_owned(TEMPLATE, source).map_err(|e| describe(&e))?;
        let tokens = BTreeMap::new();
        let (bos, eos) = (bos.into(), eos.into());
        let template = Self { environment, bos, eos, tokens, marks_generation, wants_parts: false };
        let wants_parts = !template.says(&json!(PROBE))
            && template.says(&json!([{"type": "text", "text": PROBE, UNREAD: UNREAD}]));
        Ok(Self { wants_parts, ..template })
    }

    /// Whether the probe is in what it renders of a user who says `content`: its text, not a part as Python or JSON would write it.
    fn says(&self, content: &serde_json::Value) -> bool {
        let message = json!({"role": "user", "content": content});
        let rendered = self.run(&[message], None, true);
        rendered.is_ok_and(|rendered| rendered.contains(PROBE) && !rendered.contains(UNREAD))
    }

    /// The same with the texts of other special tokens, such as `pad_token`, by name.
    pub fn with_special_tokens(mut self, tokens: impl IntoIterator<Item = (String, String)>) -> Self {
        self.tokens.extend(tokens);
        self
    }

    /// Renders messages for generation: the text ends where the assistant is to speak.
    ///
    /// # Errors
    /// The template refuses the messages.
    pub fn prompt(&self, messages: &[serde_json::Value]) -> Result<String, String> {
        self.prompt_with_tools(messages, None)
    }

    /// The same with tools.
    ///
    /// # Errors
    /// As [`prompt`](Self::prompt).
    pub fn prompt_with_tools(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
    ) -> Result<String, String> {
        Ok(self.run(messages, tools, true)?.replace(GENERATION, ""))
    }

    /// Renders a whole conversation and finds what the assistant said, turns of weight 0 left out.
    ///
    /// # Errors
    /// The template refuses the messages, the assistant says nothing, or what it says cannot be told from the rest.
    pub fn conversation(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
    ) -> Result<Rendered, String> {
        let said: Vec<usize> =
            (0..messages.len()).filter(|&at| messages[at]["role"] == "assistant").collect();
        if said.is_empty() {
            return Err("no message of the role \"assistant\": nothing to learn".into());
        }
        let full = self.run(messages, tools, false)?;
        let is_learnt = |at: &usize| !has_no_weight(&messages[*at]);
        if self.marks_generation {
            let mut rendered = split_marks(&full)?;
            if !said.iter().all(is_learnt) {
                if rendered.assistant.len() != said.len() {
                    return Err(format!(
                        "the chat template marks {} parts as generated for {} messages of the assistant, so which of them has \
                         \"weight\": 0 cannot be told; take the weights out, or give turns rows of their own",
                        rendered.assistant.len(),
                        said.len()
                    ));
                }
                let ranges = said.iter().zip(rendered.assistant);
                rendered.assistant = ranges.filter(|(at, _)| is_learnt(at)).map(|(_, range)| range).collect();
            }
            return Ok(rendered);
        }
        let learnt: Vec<usize> = said.into_iter().filter(is_learnt).collect();
        let mut assistant = Vec::with_capacity(learnt.len());
        for &at in &learnt {
            let before = self.before(messages, at, tools)?;
            let is_last = at + 1 == messages.len();
            let after = if is_last { full.clone() } else { self.run(&messages[..=at], tools, false)? };
            match self.turn(&full, &before, &after) {
                Some(range) => assistant.push(range),
                None => break,
            }
        }
        match learnt.last() {
            Some(&last) if assistant.len() < learnt.len() => {
                self.last_turn(messages, last, tools, learnt.len() > 1)
            }
            _ => Ok(Rendered { text: full, assistant, only_last: false }),
        }
    }

    /// The last turn that is to be learnt, with what comes before it as the model sees it at that point. What follows has no part in
    /// its loss and is left out, because the template may write the turn otherwise once something follows.
    fn last_turn(
        &self,
        messages: &[serde_json::Value],
        at: usize,
        tools: Option<&serde_json::Value>,
        only_last: bool,
    ) -> Result<Rendered, String> {
        let text = self.run(&messages[..=at], tools, false)?;
        let before = self.before(messages, at, tools)?;
        if text.starts_with(&before) {
            let assistant = std::iter::once(before.len()..text.len()).collect();
            return Ok(Rendered { text, assistant, only_last });
        }
        let border =
            text.chars().zip(before.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
        let [written, prompted] = [&text, &before].map(|text| start_of(&text[border..]));
        let advice = "so the assistant's part cannot be told apart; give the row as {\"prompt\", \"completion\"} of rendered text, or \
                      use a template with {% generation %} blocks";
        Err(if text.starts_with(&self.run(&messages[..at], tools, false)?) {
            format!(
                "the generation prompt is not what the chat template writes before the answer (message {at}): it goes on with \
                 {prompted:?} where the conversation has {written:?}, {advice}"
            )
        } else {
            format!(
                "the chat template changes what was said before message {at} when that follows: it writes {written:?} where it had \
                 {prompted:?}, {advice}"
            )
        })
    }

    /// What the model sees before it says message `at`.
    fn before(
        &self,
        messages: &[serde_json::Value],
        at: usize,
        tools: Option<&serde_json::Value>,
    ) -> Result<String, String> {
        if at == 0 { Ok(String::new()) } else { self.run(&messages[..at], tools, true) }
    }

    /// Where in `full` the turn is that leads from `before` to `after`. A template may close every conversation with the end token.
    fn turn(&self, full: &str, before: &str, after: &str) -> Option<Range<usize>> {
        let closed =
            |after| full.ends_with(&self.eos).then(|| str::strip_suffix(after, self.eos.as_str()))?;
        let after = if full.starts_with(after) { after } else { closed(after)? };
        (after.starts_with(before) && full.starts_with(after)).then_some(before.len()..after.len())
    }

    /// Messages as the template reads them.
    fn messages(&self, messages: &[serde_json::Value]) -> Value {
        if !self.wants_parts {
            return Value::from_serialize(messages);
        }
        let in_parts = |message: &serde_json::Value| {
            let mut message = message.clone();
            if let Some(text) = message["content"].as_str() {
                message["content"] = json!([{"type": "text", "text": text}]);
            }
            message
        };
        Value::from_serialize(messages.iter().map(in_parts).collect::<Vec<_>>())
    }

    fn run(
        &self,
        messages: &[serde_json::Value],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let template = self.environment.get_template(TEMPLATE).map_err(|e| describe(&e))?;
        let values = context! {
            messages => self.messages(messages),
            tools => tools.map(Value::from_serialize),
            documents => (),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos,
            eos_token => self.eos,
            ..Value::from_serialize(&self.tokens)
        };
        template.render(values).map_err(|e| describe(&e))
    }
}

/// The first characters of a text, for a message.
fn start_of(text: &str) -> &str {
    text.char_indices().nth(24).map_or(text, |(end, _)| &text[..end])
}

fn describe(error: &Error) -> String {
    let line = error.line().map(|line| format!(", line {line}")).unwrap_or_default();
    format!("chat template{line}: {}", error.detail().map_or_else(|| error.kind().to_string(), str::to_owned))
}

/// `{% generation %}` becomes a filter block, which keeps every rule about white space around block tags.
fn rewrite_generation(source: &str) -> (String, bool) {
    let (mut text, mut rest, mut found) = (String::new(), source, false);
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}").map(|at| open + at) else { break };
        let tag = &rest[open + 2..close];
        let word = match tag.trim_matches(['-', '+', ' ', '\t', '\r', '\n']) {
            "generation" => Some(("generation", "filter __generation")),
            "endgeneration" => Some(("endgeneration", "endfilter")),
            _ => None,
        };
        text.push_str(&rest[..open + 2]);
        match word {
            Some((old, new)) => text.push_str(&tag.replace(old, new)),
            None => text.push_str(tag),
        }
        found |= word.is_some();
        rest = &rest[close..];
    }
    text.push_str(rest);
    (text, found)
}

fn split_marks(marked: &str) -> Result<Rendered, String> {
    let mut rendered =
        Rendered { text: String::with_capacity(marked.len()), assistant: Vec::new(), only_last: false };
    let mut start = None;
    for c in marked.chars() {
        match c {
            _ if c == GENERATION[0] => start = Some(rendered.text.len()),
            _ if c == GENERATION[1] => {
                rendered.assistant.extend(start.take().map(|s| s..rendered.text.len()));
            }
            c => rendered.text.push(c),
        }
    }
    if rendered.assistant.iter().all(Range::is_empty) {
        return Err("the chat template marks nothing as generated by the assistant".into());
    }
    Ok(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

    fn talk() -> Vec<serde_json::Value> {
        vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": "Hello"}),
            json!({"role": "user", "content": "Bye"}),
            json!({"role": "assistant", "content": "So long"}),
        ]
    }

    fn said(rendered: &Rendered) -> Vec<&str> {
        rendered.assistant.iter().map(|range| &rendered.text[range.clone()]).collect()
    }

    #[test]
    fn prefixes_tell_what_the_assistant_said() {
        let template = ChatTemplate::new(CHATML, "", "").unwrap();
        let rendered = template.conversation(&talk(), None).unwrap();
        assert_eq!(said(&rendered), ["Hello<|im_end|>\n", "So long<|im_end|>\n"]);
        assert!(rendered.text.starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi"));
        assert!(template.prompt(&talk()[..2]).unwrap().ends_with("<|im_end|>\n<|im_start|>assistant\n"));
    }

    #[test]
    fn generation_blocks_tell_what_the_assistant_said() {
        let template = "{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
A: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

    {%- else %}
U: {{ message.content | trim }}
    {%- endif %}
{%- endfor %}";
        let template = ChatTemplate::new(template, "<s>", "</s>").unwrap();
        let rendered = template.conversation(&talk(), None).unwrap();
        assert_eq!(rendered.text, "<s>U: Be brief.U: HiA: Hello</s>U: ByeA: So long</s>");
        assert_eq!(said(&rendered), ["Hello</s>", "So long</s>"]);
    }

    #[test]
    fn what_real_templates_use() {
        let source = r#"
{%- set ns = namespace(seen=0) %}
{%- if messages[0]['role'] == 'system' %}{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{%- macro show(m) %}{{ m.content.strip().split(' ')[-1].upper() }}{%- endmacro %}
{%- for m in rest %}
  {%- if loop.index0 > 1 %}{% break %}{% endif %}
  {%- set ns.seen = ns.seen + 1 %}
  {{- show(m) ~ ns.seen }}
{%- endfor %}
{{- ' ' ~ strftime_now('%d %b %Y') }}
{{- ' ' ~ ({'a': [1, "<é>"], 'b': none} | tojson) }}
{%- if messages[-1].content is string and 'long' in messages[-1].content and not messages[-1].content.startswith('x') %} ok{% endif %}"#;
        let template = ChatTemplate::new(source, "", "").unwrap();
        let text = template.prompt(&talk()).unwrap();
        assert_eq!(text, "HI1HELLO2 26 Jul 2024 {\"a\": [1, \"<é>\"], \"b\": null} ok");
    }

    #[test]
    fn refusals_say_why() {
        let template = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", "", "").unwrap();
        assert!(template.prompt(&talk()).unwrap_err().contains("roles must alternate"));
        assert!(ChatTemplate::new("{% if %}", "", "").unwrap_err().contains("line 1"));
        let chatml = ChatTemplate::new(CHATML, "", "").unwrap();
        assert!(chatml.conversation(&talk()[..2], None).unwrap_err().contains("nothing to learn"));
        let forgets = "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}";
        let forgets = ChatTemplate::new(forgets, "", "").unwrap();
        let only = forgets.conversation(&talk(), None).unwrap();
        assert!(said(&only) == ["So long"] && only.only_last);
        assert_eq!(said(&forgets.conversation(&talk()[1..3], None).unwrap()), ["Hello"]);
    }
}
