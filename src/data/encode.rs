//! From one row of a `.jsonl` file to ids and labels.
//!
//! | row | tokens | loss |
//! |---|---|---|
//! | `{"input_ids", "labels"?}` and [masks](super::pretokenized) | as given | `labels`, by default every token |
//! | `{"messages"}` | the chat template's text | what the assistant said, but for turns of [weight](messages) 0 |
//! | `{"prompt", "completion"}` | both as one text, end token | completion and end token |
//! | `{"text"}` | the text, end token | every token |
//!
//! The first of these that a row has counts, one that is `null` as if it were not there; other keys are ignored, the first that
//! is almost one that would count with a warning. Prompt and completion are tokenised as one text, so that
//! the ids are those of the text; a token that straddles the border belongs to the completion.

use super::batch::loss_terms_of;
use super::row::near_miss;
use super::tokenizer::{TextTokenizer, TokenSpan};
use super::{IGNORED, Sample, messages, pretokenized};
use serde_json::{Map, Value};
use std::ops::Range;
use std::path::Path;

/// Turns rows into ids and labels.
pub(super) struct Encoder<'a> {
    pub(super) tokenizer: Option<&'a TextTokenizer>,
    /// Where a tokenizer would be, for messages.
    pub(super) tokenizer_path: &'a Path,
    pub(super) vocab_size: usize,
}

/// A row as tokens.
pub(super) struct Encoded {
    pub(super) sample: Sample,
    /// Plain text, which is packed with its neighbours.
    pub(super) plain: bool,
    /// A key that is ignored, and the one that was perhaps meant.
    pub(super) near_miss: Option<(String, &'static str)>,
    /// Of several turns of the assistant only the last is learnt, because the chat template writes the others otherwise.
    pub(super) only_last: bool,
}

/// What of a document a text is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// Its beginning, and more follows.
    Beginning,
    /// What follows a line break, or begins with the space before a word, and goes on.
    Later,
    /// The same, but the document's end.
    End,
}

type Result<T> = std::result::Result<T, String>;

impl Encoder<'_> {
    /// Encodes one row.
    pub(super) fn row(&self, mut row: Map<String, Value>) -> Result<Encoded> {
        // Files made of tables have every key in every row.
        row.retain(|_, value| !value.is_null());
        let row = &row;
        let plain =
            !["input_ids", "messages", "prompt", "completion"].iter().any(|key| row.contains_key(*key));
        // Whether the row itself says what is learnt, which may be nothing.
        let (mut masked, mut only_last) = (false, false);
        let sample = if row.contains_key("input_ids") {
            masked = pretokenized::says_what_is_learnt(row);
            pretokenized::sample(row)?
        } else if row.contains_key("messages") {
            let sample;
            (sample, masked, only_last) = self.messages(row)?;
            sample
        } else if plain {
            if !row.contains_key("text") {
                return Err(
                    "expected a key \"text\", \"prompt\" and \"completion\", \"messages\" or \"input_ids\""
                        .into(),
                );
            }
            self.document(string(row, "text")?)?
        } else {
            self.completion(string(row, "prompt")?, string(row, "completion")?)?
        };
        self.check(&sample)?;
        masked &= sample.ids.len() > 1;
        if !plain && !masked && loss_terms_of(&sample.labels) == 0 {
            return Err("nothing to learn: no token after the first carries loss".into());
        }
        let near_miss = near_miss(row).map(|(key, meant)| (key.to_owned(), meant));
        Ok(Encoded { sample, plain, near_miss, only_last })
    }

    /// Plain text, or a piece of it, which [`end_of_document`](Self::end_of_document) closes.
    pub(super) fn text(&self, text: &str, part: Part) -> Result<Sample> {
        let tokenizer = self.tokenizer()?;
        let ids = |text: &str, special| -> Result<Vec<u32>> {
            let spans = tokenizer.encode(text, special).map_err(|e| e.to_string())?;
            Ok(spans.iter().map(|span| span.id).collect())
        };
        let ids = match part {
            Part::Whole => ids(text, true)?,
            Part::Beginning => tokenizer.ids_that_go_on(text).map_err(|e| e.to_string())?,
            Part::Later => self.after_line_break(text, |text| ids(text, false))?,
            Part::End => {
                let mut ids = self.after_line_break(text, |text| ids(text, false))?;
                ids.extend(tokenizer.closing_ids().map_err(|e| e.to_string())?);
                ids
            }
        };
        let sample = Sample::all(ids);
        self.check_range(&sample)?;
        Ok(sample)
    }

    /// Tokenizers in SentencePiece's manner put a space before a text. Before a piece it is put before the line break, whose tokens are
    /// taken off.
    fn after_line_break(&self, text: &str, ids: impl Fn(&str) -> Result<Vec<u32>>) -> Result<Vec<u32>> {
        let whole = ids(&format!("\n{text}"))?;
        match whole.strip_prefix(ids("\n")?.as_slice()) {
            Some(ids) => Ok(ids.to_vec()),
            None => ids(text),
        }
    }

    /// The end token, if the model has one and the document does not end with it already.
    pub(super) fn end_of_document(&self, last: Option<u32>) -> Option<u32> {
        self.tokenizer.and_then(TextTokenizer::eos).filter(|&eos| last != Some(eos))
    }

    fn document(&self, text: &str) -> Result<Sample> {
        if text.is_empty() {
            return Err("\"text\" is empty".into());
        }
        let mut sample = self.text(text, Part::Whole)?;
        sample.close(self.end_of_document(sample.ids.last().copied()));
        Ok(sample)
    }

    fn completion(&self, prompt: &str, completion: &str) -> Result<Sample> {
        if completion.is_empty() {
            return Err("\"completion\" is empty".into());
        }
        let text = format!("{prompt}{completion}");
        let spans = self.tokenizer()?.encode(&text, true).map_err(|e| e.to_string())?;
        let mut sample = Sample::masked(&spans, std::slice::from_ref(&(prompt.len()..text.len())));
        match self.end_of_document(sample.ids.last().copied()) {
            None => {
                // The tokenizer closed the text itself, with a token that stands for no byte of the completion.
                if let (Some(label), Some(&id)) = (sample.labels.last_mut(), sample.ids.last())
                    && self.tokenizer.and_then(TextTokenizer::eos) == Some(id)
                {
                    *label = id as i32;
                }
            }
            eos => sample.close(eos),
        }
        Ok(sample)
    }

    /// The sample, whether a turn has no weight, and whether only the last is learnt.
    fn messages(&self, row: &Map<String, Value>) -> Result<(Sample, bool, bool)> {
        let messages = messages::messages(&row["messages"])?;
        let tools = row.get("tools").map_or(Ok(None), messages::tools)?;
        let tokenizer = self.tokenizer()?;
        let chat = messages::template(tokenizer, tools.is_some())?;
        let rendered = chat.conversation(&messages, tools.as_ref())?;
        let spans = tokenizer.encode(&rendered.text, false).map_err(|e| e.to_string())?;
        let masked = messages.iter().any(messages::has_no_weight);
        Ok((Sample::masked(&spans, &rendered.assistant), masked, rendered.only_last))
    }

    fn tokenizer(&self) -> Result<&TextTokenizer> {
        self.tokenizer.ok_or_else(|| {
            format!(
                "this row is text, and the model folder has no tokenizer ({} does not exist){}",
                self.tokenizer_path.display(),
                TextTokenizer::advice(self.tokenizer_path)
            )
        })
    }

    fn check(&self, sample: &Sample) -> Result<()> {
        if sample.ids.is_empty() {
            return Err("the row has no tokens".into());
        }
        self.check_range(sample)
    }

    fn check_range(&self, sample: &Sample) -> Result<()> {
        let beyond = |id: &u32| *id as usize >= self.vocab_size;
        if let Some(id) = sample.ids.iter().find(|id| beyond(id)) {
            return Err(format!("token id {id} is outside the model's vocabulary of {}", self.vocab_size));
        }
        let wrong = |label: &&i32| **label != IGNORED && u32::try_from(**label).map_or(true, |l| beyond(&l));
        if let Some(label) = sample.labels.iter().find(wrong) {
            let vocab = self.vocab_size;
            return Err(format!(
                "label {label} is neither {IGNORED} nor within the model's vocabulary of {vocab}"
            ));
        }
        Ok(())
    }
}

impl Sample {
    /// Every token carries loss.
    pub(super) fn all(ids: Vec<u32>) -> Self {
        let labels = ids.iter().map(|&id| id as i32).collect();
        Self { ids, labels }
    }

    /// Tokens that touch one of `ranges`, which are in order, carry loss.
    fn masked(spans: &[TokenSpan], ranges: &[Range<usize>]) -> Self {
        let ids = spans.iter().map(|span| span.id).collect();
        let touches = |span: &TokenSpan| {
            let at = ranges.partition_point(|range| range.end <= span.start);
            span.start < span.end && ranges.get(at).is_some_and(|range| range.start < span.end)
        };
        let labels = spans.iter().map(|span| if touches(span) { span.id as i32 } else { IGNORED }).collect();
        Self { ids, labels }
    }

    fn close(&mut self, eos: Option<u32>) {
        self.ids.extend(eos);
        self.labels.extend(eos.map(|id| id as i32));
    }
}

fn string<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a str> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("\"{key}\": expected a string, found {}", kind(other))),
        None => Err(format!("missing key \"{key}\"")),
    }
}

/// What a value is, in words.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
