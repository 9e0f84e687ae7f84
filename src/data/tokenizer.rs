//! A model's tokenizer, special tokens and chat template, as its folder holds them.

use super::special::Named;
use super::{ChatTemplate, DataError, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use terrace_models::parse_json;
use tokenizers::Tokenizer;
use tokenizers::processors::PostProcessorWrapper;
use tokenizers::processors::sequence::Sequence;

/// Characters of white space in a row from which on a text is refused. The expressions that texts are cut by go back over each of
/// them, and after a million steps the cutting ends without a word: what follows would be one piece.
const WHITE_SPACE: usize = 500_000;
const WHITE_SPACE_REFUSED: &str =
    "500000 or more characters of white space in a row, which tokenizers do not cut rightly; shorten them";

/// A token and the bytes of the text it stands for. Tokens that the tokenizer adds of itself stand for nothing: `start == end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenSpan {
    /// The token's id.
    pub id: u32,
    /// First byte.
    pub start: usize,
    /// Byte after the last.
    pub end: usize,
}

/// The tokenizer of a model folder.
#[derive(Debug)]
pub struct TextTokenizer {
    path: PathBuf,
    inner: Tokenizer,
    eos: Option<u32>,
    /// What is wrong with a template is said when it is needed: other prompts and rows do without.
    chat: Option<Result<ChatTemplate>>,
    /// For conversations with tools, where that is another.
    tool_use: Option<Result<ChatTemplate>>,
}

impl TextTokenizer {
    /// The file that a model folder's tokenizer is read from.
    pub fn file_of(model: &Path) -> PathBuf {
        model.join("tokenizer.json")
    }

    /// How to make the file at `path` of what its folder has instead, starting with a semicolon; empty if there is nothing.
    pub(crate) fn advice(path: &Path) -> String {
        let is_there = |name: &&str| path.with_file_name(name).exists();
        let merges = is_there(&"merges.txt");
        let others = ["tokenizer.model", "tokenizer.model.v3", "tekken.json", "vocab.json"];
        match others.iter().find(|name| is_there(name) && (merges || **name != "vocab.json")) {
            None => String::new(),
            Some(other) => format!(
                "; make it of {other} with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            ),
        }
    }

    /// Reads a model folder's tokenizer; `None` if it has none.
    ///
    /// # Errors
    /// A file is there but cannot be used.
    pub fn find(model: &Path) -> Result<Option<Self>> {
        if Self::file_of(model).exists() { Self::load(model).map(Some) } else { Ok(None) }
    }

    /// Reads a model folder's tokenizer: `tokenizer.json`, special tokens and chat template from `tokenizer_config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja` and `config.json` as far as they exist.
    ///
    /// # Errors
    /// `tokenizer.json` is missing, or a file is there but cannot be used.
    pub fn load(model: &Path) -> Result<Self> {
        let path = Self::file_of(model);
        if !path.exists() {
            let advice = Self::advice(&path);
            return Err(DataError::tokenizer(
                &path,
                format!(
                    "this file does not exist, and text needs a tokenizer{advice}; a model without one takes pre-tokenized rows \
                     {{\"input_ids\": […]}} and --prompt-ids"
                ),
            ));
        }
        let mut inner = Tokenizer::from_file(&path).map_err(|e| {
            DataError::tokenizer(&path, format!("not a usable tokenizer: {e}; download it again"))
        })?;
        // Some files carry the truncation and padding of whoever saved them; lengths are decided here.
        inner.with_truncation(None).map_err(|e| DataError::tokenizer(&path, e))?;
        inner.with_padding(None);
        if let Some(processor) = inner.get_post_processor().cloned() {
            inner.with_post_processor(Some(whole_offsets(processor)));
        }
        let settings = read_json(&model.join("tokenizer_config.json"))?;
        let sources = chat_sources(model, &settings)?;
        let named = Named::add(&mut inner, model, settings)?;
        let config = read_json(&model.join("config.json"))?;
        let special = |key: &str| {
            let text = named.text(key);
            let id = text.as_ref().and_then(|text| inner.token_to_id(text));
            let id = id.or_else(|| first_id(&config[&format!("{key}_id")]));
            // A token that the settings say is none is none to the template, whatever ends a text.
            let text = text.or_else(|| inner.id_to_token(id?)).filter(|_| !named.is_none(key));
            (text.unwrap_or_default(), id)
        };
        let ((bos, _), (eos, eos_id)) = (special("bos_token"), special("eos_token"));
        let compile = |(path, source): (PathBuf, String)| {
            let template = ChatTemplate::new(&source, &bos, &eos);
            let template = template.map(|template| template.with_special_tokens(named.texts()));
            template.map_err(|reason| DataError::tokenizer(&path, reason))
        };
        let (chat, tool_use) = (sources.default.map(compile), sources.tool_use.map(compile));
        Ok(Self { path, inner, eos: eos_id, chat, tool_use })
    }

    /// The tokens of a text and where they stand in it. `special` adds the tokens that the model expects around a whole text.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<TokenSpan>> {
        refuse_white_space(text)?;
        let encoding = self.inner.encode(text, special).map_err(|e| DataError::tokenizer(&self.path, e))?;
        let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(spans.map(|(&id, &(start, end))| TokenSpan { id, start, end }).collect())
    }

    /// The ids of a text that goes on behind it: with the special tokens that the model expects before a whole text, without those that
    /// close one.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub(super) fn ids_that_go_on(&self, text: &str) -> Result<Vec<u32>> {
        refuse_white_space(text)?;
        Ok(self.ids_and_closing(text)?.0)
    }

    /// The tokens that close a text, whichever it is.
    ///
    /// # Errors
    /// The tokenizer refuses any text.
    pub(super) fn closing_ids(&self) -> Result<Vec<u32>> {
        Ok(self.ids_and_closing("a")?.1)
    }

    fn ids_and_closing(&self, text: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        let encoding = self.inner.encode_fast(text, true).map_err(|e| DataError::tokenizer(&self.path, e))?;
        // Of tokens of the text none is marked, special or not.
        let marks = encoding.get_special_tokens_mask();
        let end = marks.iter().rposition(|&mark| mark == 0).map_or(0, |last| last + 1);
        let (ids, closing) = encoding.get_ids().split_at(end);
        Ok((ids.to_vec(), closing.to_vec()))
    }

    /// The ids of a prompt, with the special tokens that the model expects around a whole text.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn prompt_ids(&self, text: &str) -> Result<Vec<u32>> {
        refuse_white_space(text)?;
        let encode = |special| {
            let encoding = self.inner.encode_fast(text, special);
            encoding.map_err(|e| DataError::tokenizer(&self.path, e))
        };
        let mut ids = encode(true)?.get_ids().to_vec();
        // A tokenizer that closes every text would end the prompt before it is continued. What the prompt itself ends with stays.
        let ends = |ids: &[u32]| ids.iter().rev().take_while(|id| Some(**id) == self.eos).count();
        if ids.len() > 1 && ends(&ids) > 0 && ends(&ids) > ends(encode(false)?.get_ids()) {
            ids.pop();
        }
        Ok(ids)
    }

    /// The text of ids that follow `before`, special tokens left out. Many decoders drop the space that a text begins with, which between
    /// two tokens is there.
    ///
    /// # Errors
    /// The tokenizer refuses the ids.
    pub fn decode_after(&self, before: &[u32], ids: &[u32]) -> Result<String> {
        let whole = self.decode(&[before, ids].concat())?;
        // Where `before` ends within a character, the two have no border.
        match whole.strip_prefix(&self.decode(before)?) {
            Some(text) => Ok(text.to_owned()),
            None => self.decode(ids),
        }
    }

    /// The text of ids, special tokens left out.
    ///
    /// # Errors
    /// The tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, true).map_err(|e| DataError::tokenizer(&self.path, e))
    }

    /// The token that ends a text, if the model has one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The chat template, if the model has one.
    ///
    /// # Errors
    /// It does not compile.
    pub fn chat(&self) -> Result<Option<&ChatTemplate>, &DataError> {
        self.chat.as_ref().map(Result::as_ref).transpose()
    }

    /// The chat template for a conversation with tools, if the model has one: its own for them, or the one for all.
    ///
    /// # Errors
    /// It does not compile.
    pub fn chat_with_tools(&self) -> Result<Option<&ChatTemplate>, &DataError> {
        match &self.tool_use {
            Some(template) => template.as_ref().map(Some),
            None => self.chat(),
        }
    }

    /// Number of tokens, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

fn refuse_white_space(text: &str) -> Result<()> {
    white_space_from(text).map_or(Ok(()), |_| Err(DataError::Prompt(WHITE_SPACE_REFUSED.into())))
}

/// Where in a text white space begins that no tokenizer is trusted with.
pub(super) fn white_space_from(text: &str) -> Option<usize> {
    if text.len() < WHITE_SPACE {
        return None;
    }
    let (mut start, mut length) = (0, 0);
    for (at, c) in text.char_indices() {
        if !c.is_whitespace() {
            length = 0;
            continue;
        }
        if length == 0 {
            start = at;
        }
        length += 1;
        if length == WHITE_SPACE {
            return Some(start);
        }
    }
    None
}

/// The processor without trimming of offsets, which makes white space stand for nothing: it would carry no loss.
fn whole_offsets(processor: PostProcessorWrapper) -> PostProcessorWrapper {
    match processor {
        PostProcessorWrapper::ByteLevel(bytes) => bytes.trim_offsets(false).into(),
        PostProcessorWrapper::Roberta(roberta) => roberta.trim_offsets(false).into(),
        PostProcessorWrapper::Sequence(all) => {
            Sequence::new(all.into_iter().map(whole_offsets).collect()).into()
        }
        other => other,
    }
}

/// A JSON file; `null` if there is none.
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let Some(text) = read_text(path)? else { return Ok(Value::Null) };
    parse_json(&text).map_err(|e| DataError::not_json(path, &e))
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(DataError::file("reading", path)(e)),
    }
}

fn first_id(value: &Value) -> Option<u32> {
    let value = value.as_array().and_then(|ids| ids.first()).unwrap_or(value);
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Chat templates, each with the file that has it.
struct ChatSources {
    default: Option<(PathBuf, String)>,
    tool_use: Option<(PathBuf, String)>,
}

/// The chat templates: `chat_template.jinja` and `additional_chat_templates/tool_use.jinja` beside it, or the key of
/// `tokenizer_config.json`, which is a text, or several by name, or that of `chat_template.json`.
fn chat_sources(model: &Path, settings: &Value) -> Result<ChatSources> {
    let path = model.join("chat_template.jinja");
    if let Some(source) = read_text(&path)? {
        let with_tools = model.join("additional_chat_templates/tool_use.jinja");
        let tool_use = read_text(&with_tools)?.map(|source| (with_tools, source));
        return Ok(ChatSources { default: Some((path, source)), tool_use });
    }
    let templates = &settings["chat_template"];
    let named = |name: &str| {
        let listed = templates.as_array().into_iter().flatten().find(|template| template["name"] == name);
        let template = listed.map_or(&templates[name], |template| &template["template"]);
        template.as_str().map(str::to_owned)
    };
    let of = |source| (model.join("tokenizer_config.json"), source);
    let default = templates.as_str().map(str::to_owned).or_else(|| named("default")).map(of);
    let tool_use = named("tool_use").map(of);
    if default.is_some() {
        return Ok(ChatSources { default, tool_use });
    }
    // What comes with older models that read pictures.
    let path = model.join("chat_template.json");
    let of_processor = read_json(&path)?["chat_template"].as_str().map(str::to_owned);
    Ok(ChatSources { default: of_processor.map(|source| (path, source)), tool_use })
}
