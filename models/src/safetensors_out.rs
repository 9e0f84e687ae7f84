//! A trained model as a Hugging Face folder.
//!
//! ```text
//!  out/  model.safetensors                       when everything fits one shard, else
//!        model-00001-of-0000N.safetensors …
//!        model.safetensors.index.json
//!        config.json                             with the dtype of the weights
//!        tokenizer.json, generation_config.json, …   copied from the source folder
//!        additional_chat_templates/*.jinja           likewise
//!        *.py                                        likewise, where an `auto_map` names code of the folder
//! ```
//!
//! Every file is written under a temporary name, synced and renamed, so that a final name never holds half a file. When all
//! are there, index and weights of an earlier export are removed, the files get their names, and the index comes last: a crash between leaves a
//! folder that is refused, never a mixture of two models that loads.

use crate::composite::{Naming, TEXT};
use crate::fused::{FileTensor, Layout, Order, file_tensors};
use crate::json::parse_json;
use crate::{ModelConfig, ModelError, Result, SafetensorsSource};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use terrace_kernels::DType;
use terrace_zero::{EXPORT_BUFFER_BYTES, ParamSpec, WeightReader, create_dir_durably, sync_dir};

/// What is copied from the source folder: everything a loader needs beside weights and config.json.
const COPIED: [&str; 15] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
];
/// What is copied, too, and no loader looks for.
const LICENCES: [&str; 3] = ["LICENSE", "LICENSE.txt", "NOTICE"];

/// How files end that are copied, too, where a configuration names code of its own folder.
const CODE: &str = ".py";

/// The folder whose chat templates are copied, too.
const TEMPLATES: &str = "additional_chat_templates";

/// The one file of a model that needs no index.
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// What a weight file says of itself under [`WRITER_KEY`] in its metadata.
pub(crate) const WRITER: &str = "terrace";
pub(crate) const WRITER_KEY: &str = "writer";

/// How a configuration says the element type of its weights.
const DTYPE_KEYS: [&str; 2] = ["dtype", "torch_dtype"];

/// Rows of a woven tensor that are written side by side.
const ROWS_AT_ONCE: usize = 32;

/// How the temporary name of a file ends.
const PARTIAL: &str = ".partial";

/// Writes the current weights and everything around them to `out_dir`. Folders that are not there are made, and not left empty where that
/// fails.
///
/// A shard holds at most `shard_bytes` of tensors, but at least one tensor. `config_json` is the text of the model's
/// `config.json`; its `dtype` (or `torch_dtype`) is set to that of the weights. Where the model is the language model of a folder that holds
/// more, the rest is copied from `source_dir`.
///
/// # Errors
/// A file cannot be written, the state cannot be read, `config_json` is not a JSON object, or `source_dir` lacks the rest of the model.
pub fn export_folder(
    reader: &mut dyn WeightReader,
    source_dir: Option<&Path>,
    out_dir: &Path,
    shard_bytes: u64,
    config_json: &str,
) -> terrace_zero::Result {
    let _made = NewFolders::make(out_dir)?;
    let dtype = reader.dtype();
    let (tag, torch_name) = names(dtype)?;
    // Blocks of others may have a configuration that is no model's here: their parameters are tensors of files.
    let known = ModelConfig::parse(config_json).ok();
    let layout = known.as_ref().map_or(Layout::APART, Layout::of);
    let config = with_dtype(config_json, torch_name, known.is_some())?;
    let rest = known.as_ref().map(|config| Rest::of(source_dir, config)).transpose()?.flatten();
    let mut tensors: Vec<OutTensor> = file_tensors(&reader.params(), &layout)
        .into_iter()
        .map(|tensor| OutTensor::of_weights(tensor, rest.as_ref(), dtype, tag))
        .collect();
    tensors.extend(rest.iter().flat_map(Rest::tensors));
    let shards = plan(tensors, shard_bytes);

    let mut staged = Vec::new();
    for shard in &shards {
        staged.push(write_shard(reader, rest.as_ref(), shard, dtype, out_dir)?);
    }
    let index = (shards.len() > 1)
        .then(|| Staged::write(out_dir, INDEX, index_json(&shards).as_bytes()))
        .transpose()?;
    let mut around = vec![Staged::write(out_dir, "config.json", config.as_bytes())?];
    let mut beside: Vec<(String, PathBuf)> = Vec::new();
    for name in COPIED.iter().chain(&LICENCES) {
        let source = source_dir.map(|dir| dir.join(name)).filter(|source| source.is_file());
        beside.extend(source.map(|source| ((*name).to_owned(), source)));
    }
    if let Some(source) = source_dir.filter(|source| names_code(&config) || tokenizer_names_code(source)) {
        beside.extend(files_of(source, CODE)?);
    }
    // An export over its own source keeps the files that are there.
    for (name, source) in beside.iter().filter(|(name, source)| *source != out_dir.join(name)) {
        around.push(Staged::copy(out_dir, name, source)?);
    }

    let templates = out_dir.join(TEMPLATES);
    let named = source_dir.map_or(Ok(Vec::new()), |dir| files_of(&dir.join(TEMPLATES), ".jinja"))?;
    let _made_templates = (!named.is_empty()).then(|| NewFolders::make(&templates)).transpose()?;
    let mut staged_templates = Vec::new();
    for (name, source) in named.iter().filter(|(name, source)| *source != templates.join(name)) {
        staged_templates.push(Staged::copy(&templates, name, source)?);
    }

    let is_of_another = source_dir.is_some() && holds_another_model(out_dir, &config);
    remove_earlier(out_dir, |name| name == INDEX)?;
    remove_earlier(out_dir, is_weight_file)?;
    if is_of_another {
        // Loaders would take for this model's what came with that one.
        let is_new = |of: &[(String, PathBuf)], name: &str| of.iter().any(|(new, _)| new == name);
        remove_earlier(out_dir, |name| COPIED.contains(&name) && !is_new(&beside, name))?;
        if templates.is_dir() {
            remove_earlier(&templates, |name| name.ends_with(".jinja") && !is_new(&named, name))?;
        }
    }
    if !staged_templates.is_empty() {
        staged_templates.into_iter().try_for_each(Staged::publish)?;
        sync_folder(&templates)?;
    }
    around.into_iter().chain(staged).try_for_each(Staged::publish)?;
    if let Some(index) = index {
        index.publish()?;
    }
    // Nothing is staged any more: what is left under a temporary name is of a process that ended.
    remove_earlier(out_dir, is_partial)?;
    Ok(())
}

/// Whether an earlier export to a folder is of another model than that with this configuration; what its owner put beside the same model
/// is not to be lost.
fn holds_another_model(folder: &Path, config: &str) -> bool {
    let without_dtype = |text: &str| {
        let mut value = parse_json(text).ok()?;
        let entries = value.as_object_mut()?;
        DTYPE_KEYS.iter().for_each(|key| drop(entries.shift_remove(*key)));
        if let Some(part) = entries.get_mut(TEXT).and_then(Value::as_object_mut) {
            DTYPE_KEYS.iter().for_each(|key| drop(part.shift_remove(*key)));
        }
        Some(value)
    };
    let earlier = std::fs::read_to_string(folder.join("config.json"));
    earlier.is_ok_and(|earlier| without_dtype(&earlier) != without_dtype(config))
}

fn tokenizer_names_code(folder: &Path) -> bool {
    std::fs::read_to_string(folder.join("tokenizer_config.json")).is_ok_and(|config| names_code(&config))
}

/// Whether a configuration names code that lies beside it, and not in another repository.
fn names_code(config: &str) -> bool {
    fn is_beside(name: &Value) -> bool {
        match name {
            Value::String(name) => !name.contains("--"),
            Value::Array(names) => names.iter().any(is_beside),
            _ => false,
        }
    }
    let named = |config: Value| config.get("auto_map")?.as_object().map(|map| map.values().any(is_beside));
    parse_json(config).ok().and_then(named).unwrap_or(false)
}

/// Whether the weights in a folder are all there: what names them comes last in an export.
pub fn holds_weights(folder: &Path) -> bool {
    [SINGLE, INDEX].iter().any(|name| folder.join(name).is_file())
}

/// Removes the weights, whole or not, that an earlier export left in a folder, and makes that durable: what a loader finds there
/// afterwards is of the next export. Nothing, where there is no folder.
///
/// # Errors
/// The folder cannot be read, or a file in it not removed.
pub fn remove_weights(folder: &Path) -> Result {
    if !folder.exists() {
        return Ok(());
    }
    remove_earlier(folder, |name| name == INDEX)?;
    remove_earlier(folder, |name| is_weight_file(name) || is_partial(name))
}

/// Removes what processes that ended in exports to a folder left under temporary names. Not for a folder that one exports to.
///
/// # Errors
/// The folder cannot be read, or a file in it not removed.
pub fn remove_partials(folder: &Path) -> Result {
    remove_earlier(folder, is_partial)
}

/// Folders that were made for an export. Those that are empty in the end are removed: it failed.
#[derive(Debug)]
struct NewFolders<'a>(Vec<&'a Path>);

impl<'a> NewFolders<'a> {
    fn make(folder: &'a Path) -> Result<Self> {
        let new = folder.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        let made = Self(new.collect());
        create_dir_durably(folder).map_err(ModelError::file("creating", folder))?;
        Ok(made)
    }
}

impl Drop for NewFolders<'_> {
    fn drop(&mut self) {
        // The first that holds something ends it; the error that matters is the one at hand.
        let _ = self.0.iter().try_for_each(std::fs::remove_dir);
    }
}

/// What a folder holds beside the parameters of the language model.
#[derive(Debug)]
struct Rest {
    source: SafetensorsSource,
    /// What the folder calls them, if the language model is a part of what it holds.
    naming: Option<Naming>,
}

impl Rest {
    /// That of the folder a model came from, of models that have any.
    fn of(source_dir: Option<&Path>, config: &ModelConfig) -> Result<Option<Self>> {
        let constants = config.constants();
        if !config.is_part && constants.is_empty() {
            return Ok(None);
        }
        let what = if config.is_part {
            "export of a language model that is a part of a folder"
        } else {
            "export of a model with tensors that are not trained"
        };
        let dir = source_dir.ok_or_else(|| ModelError::Unsupported {
            what: what.into(),
            found: "without that folder".into(),
            supported: "the folder it came from, for the other tensors".into(),
        })?;
        let mut source = SafetensorsSource::open(dir)?;
        let mut naming = None;
        if config.is_part {
            naming = source.take_part();
            if naming.is_none() {
                return Err(ModelError::NoWeights {
                    folder: dir.to_owned(),
                    expected: "those of the language model and of the rest".into(),
                    hint: "",
                });
            }
        }
        source.set_aside(&constants)?;
        Ok(Some(Self { source, naming }))
    }

    fn tensors(&self) -> impl Iterator<Item = OutTensor> {
        self.source.others().map(|(name, dtype, dims, bytes)| OutTensor {
            name: name.to_owned(),
            dims: dims.to_vec(),
            tag: dtype.to_string(),
            bytes,
            content: Content::Rest,
        })
    }
}

/// A tensor of an export.
#[derive(Debug)]
struct OutTensor {
    name: String,
    dims: Vec<usize>,
    /// Its element type, as safetensors call it.
    tag: String,
    bytes: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// Weights, as a [`FileTensor`] holds them.
    Parts { parts: Vec<ParamSpec>, order: Order },
    /// The tensor of that name of the [`Rest`].
    Rest,
}

impl OutTensor {
    fn of_weights(tensor: FileTensor, rest: Option<&Rest>, dtype: DType, tag: &str) -> Self {
        let bytes = (tensor.elements() * dtype.size()) as u64;
        let FileTensor { name, dims, parts, order } = tensor;
        let naming = rest.and_then(|rest| rest.naming);
        let name = naming.map_or_else(|| name.clone(), |naming| naming.in_files(&name));
        Self { name, dims, tag: tag.to_owned(), bytes, content: Content::Parts { parts, order } }
    }
}

/// Some tensors that share a file.
#[derive(Debug)]
struct Shard {
    file: String,
    tensors: Vec<OutTensor>,
}

/// Fills shards in order.
fn plan(tensors: Vec<OutTensor>, shard_bytes: u64) -> Vec<Shard> {
    let mut groups: Vec<Vec<OutTensor>> = vec![Vec::new()];
    let mut used = 0;
    for tensor in tensors {
        let bytes = tensor.bytes;
        let open = groups.last_mut().expect("starts with one group");
        if !open.is_empty() && used + bytes > shard_bytes {
            groups.push(vec![tensor]);
            used = bytes;
        } else {
            open.push(tensor);
            used += bytes;
        }
    }
    let count = groups.len();
    let file = |index: usize| match count {
        1 => SINGLE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    groups.into_iter().enumerate().map(|(index, tensors)| Shard { file: file(index), tensors }).collect()
}

fn write_shard(
    reader: &mut dyn WeightReader,
    rest: Option<&Rest>,
    shard: &Shard,
    dtype: DType,
    out_dir: &Path,
) -> terrace_zero::Result<Staged> {
    let mut draft = Draft::create(out_dir, &shard.file)?;
    draft.append(&header(shard))?;
    let mut buffer = vec![0; EXPORT_BUFFER_BYTES];
    for tensor in &shard.tensors {
        match (&tensor.content, rest) {
            (Content::Parts { parts, order: Order::Woven { layers, in_turns } }, _) => {
                for parts in parts.chunks(*layers) {
                    write_woven(reader, (parts, *in_turns), dtype, &mut buffer, &mut draft)?;
                }
            }
            (Content::Parts { parts, order: Order::Following }, _) => {
                for param in parts {
                    write_weights(reader, param, 0..param.elements(), dtype, &mut buffer, &mut draft)?;
                }
            }
            (Content::Parts { parts, order: Order::Turns(strips) }, _) => {
                let rows: usize = strips.iter().map(|strip| strip.rows).sum();
                for turn in 0..tensor.dims[0] / rows {
                    for strip in strips {
                        let (param, first) = (&parts[strip.part], strip.first + turn * strip.rows);
                        let range = elements_of(param, first..first + strip.rows);
                        write_weights(reader, param, range, dtype, &mut buffer, &mut draft)?;
                    }
                }
            }
            (Content::Rest, rest) => {
                let Rest { source, .. } = rest.expect("only a rest has such tensors");
                for start in (0..tensor.bytes).step_by(EXPORT_BUFFER_BYTES) {
                    let count = (tensor.bytes - start).min(EXPORT_BUFFER_BYTES as u64) as usize;
                    source.read_other(&tensor.name, start, &mut buffer[..count])?;
                    draft.append(&buffer[..count])?;
                }
            }
        }
    }
    Ok(draft.complete()?)
}

/// Those of some rows.
fn elements_of(param: &ParamSpec, rows: Range<usize>) -> Range<usize> {
    let of_row = param.elements() / param.dims[0];
    rows.start * of_row..rows.end * of_row
}

fn write_weights(
    reader: &mut dyn WeightReader,
    param: &ParamSpec,
    Range { mut start, end: last }: Range<usize>,
    dtype: DType,
    buffer: &mut [u8],
    draft: &mut Draft,
) -> terrace_zero::Result {
    while start < last {
        let end = last.min(start + buffer.len() / dtype.size());
        let bytes = &mut buffer[..(end - start) * dtype.size()];
        reader.read(param, start, bytes)?;
        draft.append(bytes)?;
        start = end;
    }
    Ok(())
}

/// Layers `[R, C]` of one expert as `[C, layers · R]`, [in turns](Order::Woven) or not. All of them are held at once, for which a plan has
/// [memory](terrace_zero::Block::export_elements), and written through the buffer.
fn write_woven(
    reader: &mut dyn WeightReader,
    (layers, in_turns): (&[ParamSpec], bool),
    dtype: DType,
    buffer: &mut [u8],
    draft: &mut Draft,
) -> terrace_zero::Result {
    let (size, count, dims) = (dtype.size(), layers.len(), &layers[0].dims);
    let (rows, columns) = (dims[0], dims.get(1).copied().unwrap_or(1));
    let mut all = vec![0; count * rows * columns * size];
    for (layer, bytes) in layers.iter().zip(all.chunks_mut(rows * columns * size)) {
        for (start, bytes) in
            (0..).step_by(EXPORT_BUFFER_BYTES / size).zip(bytes.chunks_mut(EXPORT_BUFFER_BYTES))
        {
            reader.read(layer, start, bytes)?;
        }
    }
    // Elements of a file's row, for as many rows at a time as there is room for, so that a line of memory is read once for all of them.
    let wide = count * rows;
    let pieces = (buffer.len() / size / ROWS_AT_ONCE).max(1);
    for first in (0..columns).step_by(ROWS_AT_ONCE) {
        let some = ROWS_AT_ONCE.min(columns - first);
        for start in (0..wide).step_by(pieces) {
            let length = pieces.min(wide - start);
            let piece = &mut buffer[..some * length * size];
            for at in 0..length {
                let output = start + at;
                let (layer, row) =
                    if in_turns { (output % count, output / count) } else { (output / rows, output % rows) };
                let from = ((layer * rows + row) * columns + first) * size;
                for (column, element) in all[from..from + some * size].chunks(size).enumerate() {
                    piece[(column * length + at) * size..][..size].copy_from_slice(element);
                }
            }
            for (column, piece) in (first..).zip(piece.chunks(length * size)) {
                draft.write_at(((column * wide + start) * size) as u64, piece)?;
            }
        }
    }
    draft.skip(all.len() as u64);
    Ok(())
}

/// Length, JSON, and spaces up to a multiple of 8 so that the data is aligned.
fn header(shard: &Shard) -> Vec<u8> {
    let mut tensors = Map::new();
    // transformers refuses files that do not say which framework's layout they have.
    tensors.insert("__metadata__".into(), json!({"format": "pt", WRITER_KEY: WRITER}));
    let mut start = 0;
    for tensor in &shard.tensors {
        let end = start + tensor.bytes;
        let entry = json!({"dtype": tensor.tag, "shape": tensor.dims, "data_offsets": [start, end]});
        tensors.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(tensors).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

fn index_json(shards: &[Shard]) -> String {
    let all = || shards.iter().flat_map(|shard| shard.tensors.iter().map(move |tensor| (shard, tensor)));
    let total: u64 = all().map(|(_, tensor)| tensor.bytes).sum();
    let map: Map<String, Value> =
        all().map(|(shard, tensor)| (tensor.name.clone(), shard.file.clone().into())).collect();
    format!("{:#}\n", json!({"metadata": {"total_size": total}, "weight_map": map}))
}

/// The configuration with the dtype of the weights, under the spelling it uses already; that of a language model in it, too. Of a model that
/// `is_known` it says no more that weights are quantized: they were, and are read.
fn with_dtype(config_json: &str, dtype: &str, is_known: bool) -> Result<String> {
    let refused =
        |detail: String| ModelError::config_file(Path::new("config.json"))(ModelError::NoObject { detail });
    let mut value = parse_json(config_json).map_err(|e| refused(format!("is not JSON: {e}")))?;
    let config = value.as_object_mut().ok_or_else(|| refused("is not a JSON object".into()))?;
    if is_known {
        config.shift_remove("quantization_config");
    }
    let keys: Vec<&str> = DTYPE_KEYS.into_iter().filter(|key| config.contains_key(*key)).collect();
    for key in if keys.is_empty() { vec!["torch_dtype"] } else { keys } {
        config.insert(key.into(), dtype.into());
    }
    if let Some(part) = config.get_mut(TEXT).and_then(Value::as_object_mut) {
        for said in DTYPE_KEYS {
            if let Some(said) = part.get_mut(said).filter(|said| said.is_string()) {
                *said = dtype.into();
            }
        }
    }
    Ok(format!("{value:#}\n"))
}

/// How safetensors and torch call an element type.
fn names(dtype: DType) -> Result<(&'static str, &'static str)> {
    match dtype {
        DType::F32 => Ok(("F32", "float32")),
        DType::BF16 => Ok(("BF16", "bfloat16")),
        DType::F16 => Ok(("F16", "float16")),
        DType::F64 | DType::I32 => Err(ModelError::Unsupported {
            what: "export dtype".into(),
            found: dtype.to_string(),
            supported: "f32, bf16, f16".into(),
        }),
    }
}

/// A complete file under a temporary name; removed again unless it is published.
#[derive(Debug)]
struct Staged {
    temporary: PathBuf,
    path: PathBuf,
    published: bool,
}

/// One that is being written. It is open, which a complete one is not: a process may have fewer files open than a model has shards.
#[derive(Debug)]
struct Draft {
    file: File,
    /// Bytes that are written or skipped.
    end: u64,
    staged: Staged,
}

impl Draft {
    fn create(folder: &Path, name: &str) -> Result<Self> {
        let temporary = folder.join(format!(".{name}{PARTIAL}"));
        let file = File::create(&temporary).map_err(ModelError::file("creating", &temporary))?;
        Ok(Self { file, end: 0, staged: Staged { temporary, path: folder.join(name), published: false } })
    }

    fn append(&mut self, bytes: &[u8]) -> Result {
        self.write_at(0, bytes)?;
        self.skip(bytes.len() as u64);
        Ok(())
    }

    /// Writes behind what is written or skipped, `offset` further.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result {
        let written = self.file.write_all_at(bytes, self.end + offset);
        written.map_err(ModelError::file("writing", &self.staged.temporary))
    }

    /// What follows is written so much further.
    fn skip(&mut self, bytes: u64) {
        self.end += bytes;
    }

    /// Makes it durable, and closes it.
    fn complete(self) -> Result<Staged> {
        self.file.sync_all().map_err(ModelError::file("syncing", &self.staged.temporary))?;
        Ok(self.staged)
    }
}

impl Staged {
    fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<Self> {
        let mut draft = Draft::create(folder, name)?;
        draft.append(bytes)?;
        draft.complete()
    }

    fn copy(folder: &Path, name: &str, source: &Path) -> Result<Self> {
        let mut draft = Draft::create(folder, name)?;
        let mut from = File::open(source).map_err(ModelError::file("opening", source))?;
        std::io::copy(&mut from, &mut draft.file).map_err(ModelError::file("copying", source))?;
        draft.complete()
    }

    fn publish(mut self) -> Result {
        std::fs::rename(&self.temporary, &self.path).map_err(ModelError::file("renaming to", &self.path))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.published {
            // Already on the way out with an error; a leftover partial file harms nobody.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Whether an export could have written a weight file of this name.
fn is_weight_file(name: &str) -> bool {
    let Some(stem) = name.strip_prefix("model").and_then(|rest| rest.strip_suffix(".safetensors")) else {
        return false;
    };
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    stem.is_empty()
        || stem
            .strip_prefix('-')
            .and_then(|rest| rest.split_once("-of-"))
            .is_some_and(|(index, count)| digits(index) && digits(count))
}

/// Whether it is what a process that ended in an export leaves under a temporary name.
fn is_partial(name: &str) -> bool {
    let whole = name.strip_prefix('.').and_then(|name| name.strip_suffix(PARTIAL));
    let mut others = [INDEX, "config.json"].iter().chain(&COPIED).chain(&LICENCES);
    whole.is_some_and(|name| {
        others.any(|other| *other == name) || name.ends_with(CODE) || is_weight_file(name)
    })
}

/// The files of a folder whose names end so, with their names, in order; none where there is no folder.
fn files_of(folder: &Path, ending: &str) -> Result<Vec<(String, PathBuf)>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(ModelError::file("reading", folder))? {
        let path = entry.map_err(ModelError::file("reading", folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).filter(|name| name.ends_with(ending));
        if let Some(name) = name.map(str::to_owned).filter(|_| path.is_file()) {
            files.push((name, path));
        }
    }
    files.sort();
    Ok(files)
}

/// Removes files of an earlier export and makes that durable.
fn remove_earlier(folder: &Path, doomed: impl Fn(&str) -> bool) -> Result {
    let entries = std::fs::read_dir(folder).map_err(ModelError::file("reading", folder))?;
    for entry in entries {
        let entry = entry.map_err(ModelError::file("reading", folder))?;
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if !is_dir && entry.file_name().to_str().is_some_and(&doomed) {
            std::fs::remove_file(entry.path()).map_err(ModelError::file("removing", &entry.path()))?;
        }
    }
    sync_folder(folder)
}

fn sync_folder(folder: &Path) -> Result {
    sync_dir(folder).map_err(ModelError::file("syncing", folder))
}
