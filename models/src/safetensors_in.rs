//! Initial weights from a Hugging Face model folder, in small ranges.
//!
//! Files are read with positional reads into one bounded buffer; nothing is mapped and no tensor is ever whole in memory.
//! Headers are parsed and checked against the length of their files when the source is opened.

use crate::composite::Naming;
use crate::fused::file_tensors;
use crate::safetensors_out::{WRITER, WRITER_KEY};
use crate::{EMBEDDING_NAME, Model, ModelError, Result};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use terrace_zero::{ParamSpec, WeightSource};

/// Largest header that is read; safetensors itself allows no more.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// What causal models prepend to the names of their base model; checkpoints of base models lack it.
const BASE_PREFIX: &str = "model.";

/// The head's projection, of a model that has one of its own.
const HEAD_NAME: &str = "lm_head.weight";

/// How the names of what positions are turned by end.
const FREQUENCIES: &str = ".rotary_emb.inv_freq";

/// Elements that are compared at a time.
const COMPARED: usize = 1 << 16;

/// A folder of safetensors, single or sharded.
#[derive(Debug)]
pub struct SafetensorsSource {
    folder: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Stored>,
    /// Those of other parts than the language model, in order, once that is known to be one.
    others: BTreeMap<String, Stored>,
    buffer: Vec<u8>,
    is_export: bool,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
struct Stored {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Of its first byte, from the start of the file.
    offset: u64,
}

impl SafetensorsSource {
    /// Opens a model folder: `model.safetensors`, else the shards of `model.safetensors.index.json`, else the folder's only
    /// `*.safetensors` file. A path to one file works too.
    ///
    /// # Errors
    /// No such files, a missing shard, a corrupt header, or a file shorter than its header says.
    pub fn open(folder: &Path) -> Result<Self> {
        let mut source = Self {
            folder: folder.to_owned(),
            shards: Vec::new(),
            tensors: HashMap::new(),
            others: BTreeMap::new(),
            buffer: Vec::new(),
            is_export: true,
        };
        for path in weight_files(folder)? {
            source.add(path)?;
        }
        Ok(source)
    }

    /// [Opens](Self::open) the folder of `model` and [checks](Self::validate_model) that its weights are there.
    ///
    /// # Errors
    /// As these.
    pub fn for_model(folder: &Path, model: &Model) -> Result<Self> {
        let mut source = Self::open(folder)?;
        source.validate_model(model)?;
        Ok(source)
    }

    /// Whether [`export_folder`](crate::export_folder) wrote all of the files.
    pub fn is_export(&self) -> bool {
        self.is_export
    }

    /// Checks the parameters of a model as [`validate`](Self::validate) does. Where the embedding is its head, a head in the files stands for
    /// the embedding if that is missing, and is compared with it if not. Where files hold several parameters as one tensor, or more than a
    /// language model, its parameters can be read from then on.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), or a head that would be lost.
    pub fn validate_model(&mut self, model: &Model) -> Result {
        if model.config.is_part {
            self.take_part();
        }
        self.take_apart(model)?;
        let mut params = model.blocks.iter().flat_map(|block| block.params());
        if let Some(embedding) = params.find(|param| param.name == EMBEDDING_NAME && model.config.tied) {
            self.settle_head(embedding)?;
        }
        model.blocks.iter().try_for_each(|block| self.validate(block.params()))
    }

    /// Names of tensors that the model has no parameter for, in order. A head that is the embedding is none of them, nor are frequencies of
    /// positions, which older savers wrote and which are computed.
    pub fn unused(&self, model: &Model) -> Vec<&str> {
        let params = || model.blocks.iter().flat_map(|block| block.params());
        let fused = file_tensors(params(), model.config.family.is_fused());
        let names = params().map(|param| &*param.name).chain(fused.iter().map(|tensor| &*tensor.name));
        let names = names.flat_map(|name| [Some(name), name.strip_prefix(BASE_PREFIX)]);
        let used: HashSet<&str> = names.flatten().collect();
        let is_used = |name: &&str| {
            used.contains(name) || (model.config.tied && *name == HEAD_NAME) || name.ends_with(FREQUENCIES)
        };
        let mut unused: Vec<&str> =
            self.tensors.keys().map(String::as_str).filter(|name| !is_used(name)).collect();
        unused.sort_unstable();
        unused
    }

    /// Checks that every parameter is there with the right shape and a readable element type; called before anything is
    /// written anywhere. Tensors that no parameter asks for are ignored.
    ///
    /// # Errors
    /// The first parameter that cannot be read.
    pub fn validate(&self, params: &[ParamSpec]) -> Result {
        params.iter().try_for_each(|param| self.find(param).map(|_| ()))
    }

    /// Names the tensors of a language model that is a part of what the files hold as if it were alone, and sets those of the rest aside.
    /// Says how the files name them, unless there are none; does nothing the second time.
    pub(crate) fn take_part(&mut self) -> Option<Naming> {
        let naming = Naming::of(self.tensors.keys().map(String::as_str))?;
        for (name, stored) in std::mem::take(&mut self.tensors) {
            match naming.parameter(&name) {
                Some(parameter) => drop(self.tensors.insert(parameter, stored)),
                None => drop(self.others.insert(name, stored)),
            }
        }
        Some(naming)
    }

    /// The tensors of the other parts: names, element types, shapes and sizes in bytes.
    pub(crate) fn others(&self) -> impl Iterator<Item = (&str, Dtype, &[usize], u64)> {
        self.others.iter().map(|(name, stored)| {
            let bits = stored.shape.iter().product::<usize>() * stored.dtype.bitsize();
            (&**name, stored.dtype, &*stored.shape, (bits / 8) as u64)
        })
    }

    /// Bytes of one of them, from `start` on.
    ///
    /// # Panics
    /// If there is none of that name.
    pub(crate) fn read_other(&self, name: &str, start: u64, out: &mut [u8]) -> Result {
        let stored = &self.others[name];
        let Shard { path, file } = &self.shards[stored.shard];
        file.read_exact_at(out, stored.offset + start).map_err(ModelError::file("reading", path))
    }

    /// Enters the parts of fused tensors. A folder that has the parts themselves needs nothing.
    fn take_apart(&mut self, model: &Model) -> Result {
        let params = model.blocks.iter().flat_map(|block| block.params());
        for fused in file_tensors(params, model.config.family.is_fused()).iter().filter(|t| t.is_fused()) {
            let has_parts = fused.parts.iter().all(|part| self.find(part).is_ok());
            if has_parts {
                continue;
            }
            let stored = self.find(&ParamSpec::new(&fused.name, &fused.dims))?.clone();
            let mut offset = stored.offset;
            for part in &fused.parts {
                let entry = Stored { shape: part.dims.clone(), offset, ..stored.clone() };
                self.tensors.insert(part.name.clone(), entry);
                offset += (part.elements() * stored.dtype.bitsize() / 8) as u64;
            }
        }
        Ok(())
    }

    /// What a head in the files is to a model that uses its `embedding` for it.
    fn settle_head(&mut self, embedding: &ParamSpec) -> Result {
        let Some(head) = self.tensors.get(HEAD_NAME).cloned() else { return Ok(()) };
        let there = self.find(embedding);
        if matches!(there, Err(ModelError::MissingTensor { .. })) {
            // Of two names for one tensor, savers that know of none keep the first.
            self.tensors.insert(EMBEDDING_NAME.to_owned(), head);
            return Ok(());
        }
        there?;
        let spec = ParamSpec::new(HEAD_NAME, &embedding.dims);
        if head.shape != embedding.dims || self.find(&spec).is_err() || !self.is_same(embedding, &spec)? {
            return Err(ModelError::HeadNotTied { path: self.shards[head.shard].path.clone() });
        }
        Ok(())
    }

    /// Whether two tensors of one shape hold the same values.
    fn is_same(&mut self, a: &ParamSpec, b: &ParamSpec) -> Result<bool> {
        let mut values = [vec![0.0; COMPARED], vec![0.0; COMPARED]];
        for start in (0..a.elements()).step_by(COMPARED) {
            let count = COMPARED.min(a.elements() - start);
            for (param, values) in [a, b].into_iter().zip(&mut values) {
                self.read_into(param, start, &mut values[..count])?;
            }
            if !values[0][..count].iter().zip(&values[1]).all(|(a, b)| a.to_bits() == b.to_bits()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn read_into(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        let Stored { shard, dtype, offset, .. } = *self.find(param)?;
        assert!(start + out.len() <= param.elements(), "the range lies within `{}`", param.name);
        let size = dtype.bitsize() / 8;
        self.buffer.resize(BUFFER_BYTES, 0);
        let mut at = offset + (start * size) as u64;
        for values in out.chunks_mut(BUFFER_BYTES / size) {
            let bytes = &mut self.buffer[..values.len() * size];
            let Shard { path, file } = &self.shards[shard];
            file.read_exact_at(bytes, at).map_err(ModelError::file("reading", path))?;
            widen(dtype, bytes, values);
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf) -> Result {
        let file = File::open(&path).map_err(ModelError::file("opening", &path))?;
        let (data_start, metadata) = read_header(&file, &path)?;
        let writer = metadata.metadata().as_ref().and_then(|words| words.get(WRITER_KEY));
        self.is_export &= writer.is_some_and(|writer| writer == WRITER);
        let shard = self.shards.len();
        for (name, info) in metadata.tensors() {
            let offset = data_start + info.data_offsets.0 as u64;
            self.tensors.insert(name, Stored { shard, dtype: info.dtype, shape: info.shape.clone(), offset });
        }
        self.shards.push(Shard { path, file });
        Ok(())
    }

    fn find(&self, param: &ParamSpec) -> Result<&Stored> {
        let stored = self
            .tensors
            .get(&param.name)
            .or_else(|| self.tensors.get(param.name.strip_prefix(BASE_PREFIX)?))
            .ok_or_else(|| ModelError::MissingTensor {
                folder: self.folder.clone(),
                tensor: param.name.clone(),
                expected: param.dims.clone(),
            })?;
        let path = || self.shards[stored.shard].path.clone();
        if stored.shape != param.dims {
            return Err(ModelError::WrongShape {
                path: path(),
                tensor: param.name.clone(),
                expected: param.dims.clone(),
                found: stored.shape.clone(),
            });
        }
        if !matches!(stored.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            let found = stored.dtype.to_string();
            return Err(ModelError::WrongDtype { path: path(), tensor: param.name.clone(), found });
        }
        Ok(stored)
    }
}

impl WeightSource for SafetensorsSource {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> terrace_zero::Result {
        Ok(self.read_into(param, start, out)?)
    }
}

fn widen(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            for (bytes, out) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        Dtype::BF16 => {
            for (bytes, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *out = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        Dtype::F16 => {
            for (bytes, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        other => unreachable!("`find` lets no {other} through"),
    }
}

/// Position of the first data byte, and the header. Parsing checks that tensors follow one another without a gap and
/// occupy what their shapes and types need; here they are checked against the length of the file.
fn read_header(file: &File, path: &Path) -> Result<(u64, Metadata)> {
    let corrupt = |detail: String| ModelError::Corrupt { path: path.to_owned(), detail };
    let found = file.metadata().map_err(ModelError::file("reading", path))?.len();
    if found < 8 {
        return Err(corrupt(format!("it has only {found} bytes")));
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(ModelError::file("reading", path))?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(corrupt(format!("its header claims {header_bytes} bytes")));
    }
    let truncated = |expected| Err(ModelError::Truncated { path: path.to_owned(), expected, found });
    let data_start = 8 + header_bytes;
    if data_start > found {
        return truncated(data_start);
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, 8).map_err(ModelError::file("reading", path))?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| corrupt(format!("its header: {e}")))?;
    let expected = data_start.saturating_add(metadata.data_len() as u64);
    match found.cmp(&expected) {
        Ordering::Less => truncated(expected),
        Ordering::Equal => Ok((data_start, metadata)),
        Ordering::Greater => {
            let surplus = found - expected;
            Err(corrupt(format!("it has {surplus} bytes more than the {expected} its header describes")))
        }
    }
}

/// The files that hold a folder's weights.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    if folder.is_file() {
        return Ok(vec![folder.to_owned()]);
    }
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if index.is_file() {
        return shards_of(folder, &index);
    }
    let entries = std::fs::read_dir(folder).map_err(ModelError::file("reading", folder))?;
    let names: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let with_extension = |extension: &str| -> Vec<PathBuf> {
        names.iter().filter(|path| path.extension().is_some_and(|e| e == extension)).cloned().collect()
    };
    let found = with_extension("safetensors");
    match found.len() {
        1 => Ok(found),
        0 => Err(ModelError::NoWeights {
            folder: folder.to_owned(),
            expected: "model.safetensors or model.safetensors.index.json".into(),
            hint: if with_extension("bin").is_empty() {
                ""
            } else {
                "; pickled .bin weights are not read: convert them to safetensors"
            },
        }),
        _ => Err(ModelError::NoWeights {
            folder: folder.to_owned(),
            expected: "model.safetensors.index.json".into(),
            hint: " to say how its several .safetensors files belong together",
        }),
    }
}

/// The files that an index names, each once.
fn shards_of(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let corrupt = |detail: String| ModelError::Corrupt { path: index.to_owned(), detail };
    let text = std::fs::read_to_string(index).map_err(ModelError::file("reading", index))?;
    let value: Value = serde_json::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
    let map = value
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| corrupt("it has no weight_map".into()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        let name =
            file.as_str().ok_or_else(|| corrupt(format!("weight_map of `{tensor}` is not a string")))?;
        if Path::new(name).file_name().is_none_or(|plain| plain != name) {
            return Err(corrupt(format!(
                "weight_map of `{tensor}` names {name:?}, which is not a plain file name"
            )));
        }
        names.insert(name);
    }
    if names.is_empty() {
        return Err(corrupt("its weight_map is empty".into()));
    }
    names
        .into_iter()
        .map(|name| {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
            Err(ModelError::NoWeights {
                folder: folder.to_owned(),
                expected: name.to_owned(),
                hint: ", which model.safetensors.index.json names; the download is incomplete",
            })
        })
        .collect()
}
