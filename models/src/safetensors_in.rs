//! Initial weights from a Hugging Face model folder, in small ranges.
//!
//! Files are read with positional reads into one bounded buffer; nothing is mapped and no tensor is ever whole in memory.
//! Headers are parsed and checked against the length of their files when the source is opened.

use crate::composite::Naming;
use crate::fp8;
use crate::fused::{FileTensor, Layout, Order, STRIPS_MAX, file_tensors};
use crate::mxfp4;
use crate::safetensors_files::{read_header, weight_files};
use crate::safetensors_out::{WRITER, WRITER_KEY};
use crate::{EMBEDDING_NAME, Fp8, Model, ModelError, Result};
use half::{bf16, f16};
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use terrace_zero::{ParamSpec, WeightSource};

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

/// Most bytes of a column of a woven tensor that are read at a time.
const PIECE_BYTES: usize = 1 << 12;

/// A folder of safetensors, single or sharded.
#[derive(Debug)]
pub struct SafetensorsSource {
    folder: PathBuf,
    shards: Vec<Shard>,
    tensors: HashMap<String, Stored>,
    /// How files name what is in `tensors`, once that is known to be a part of what they hold.
    naming: Option<Naming>,
    /// What else they hold then, in order, and constants.
    others: BTreeMap<String, Stored>,
    buffer: Vec<u8>,
    /// What of a woven tensor `buffer` holds, row after row.
    band: Option<Band>,
    /// The woven matrices that were read last, as a whole, so that pieces of them come from the system's cache.
    warm: Option<(usize, u64)>,
    is_export: bool,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

/// A layer in a woven tensor.
struct Piece {
    shard: usize,
    dtype: Dtype,
    /// Of its first element.
    offset: u64,
    layers: usize,
    /// Elements from one of a column to the next.
    step: usize,
}

/// Rows of a [`Piece`].
#[derive(Debug)]
struct Band {
    shard: usize,
    offset: u64,
    rows: Range<usize>,
}

impl Band {
    fn is_of(&self, piece: &Piece) -> bool {
        (self.shard, self.offset) == (piece.shard, piece.offset)
    }
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
struct Stored {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Of its first byte, from the start of the file.
    offset: u64,
    form: Form,
    /// Of what is [`fp8`].
    scales: Option<Scales>,
}

/// The scales of a matrix of codes.
#[derive(Debug, Clone, Copy)]
struct Scales {
    /// Rows and columns that have one.
    block: [usize; 2],
    /// Of the matrix.
    columns: usize,
    /// Elements of the matrix before those of the tensor.
    before: usize,
    shard: usize,
    dtype: Dtype,
    offset: u64,
}

/// Where elements begin that follow one another.
#[derive(Debug, Clone, Copy)]
struct Place {
    shard: usize,
    dtype: Dtype,
    offset: u64,
    scales: Option<Scales>,
}

/// How the elements of a tensor lie.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// Row after row.
    Rows,
    /// Column after column, `layers · rows` elements apart, those of a column `step` apart: with elements of other layers between them, or between
    /// columns.
    Woven {
        layers: usize,
        step: usize,
        /// Where the first column of the first of these layers begins.
        first: u64,
    },
    /// Some elements at a time, with others between them: by the strip that they are of. A turn of all has so many.
    Turns { strips: [Strip; STRIPS_MAX], turn: usize },
    /// Rows of [`mxfp4`] blocks with rows of other layers between them; the scales lie elsewhere.
    Mxfp4 { layers: usize, scales_shard: usize, scales: u64 },
}

/// Elements of a tensor that take turns with others. One without elements is none.
#[derive(Debug, Clone, Copy, Default)]
struct Strip {
    /// The first, in the tensor.
    first: usize,
    /// How many of a turn.
    elements: usize,
    /// Where they begin in a turn.
    offset: usize,
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
            naming: None,
            others: BTreeMap::new(),
            buffer: Vec::new(),
            band: None,
            warm: None,
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
        if let Some(fp8) = model.config.fp8 {
            let params = model.blocks.iter().flat_map(|block| block.params());
            for tensor in file_tensors(params, &Layout::of(&model.config)) {
                self.take_scales(&ParamSpec::new(&tensor.name, &tensor.dims), fp8)?;
                tensor.parts.iter().try_for_each(|part| self.take_scales(part, fp8))?;
            }
        }
        self.take_apart(model)?;
        let mut params = model.blocks.iter().flat_map(|block| block.params());
        if let Some(embedding) = params.find(|param| param.name == EMBEDDING_NAME && model.config.tied) {
            self.settle_head(embedding)?;
        }
        model.blocks.iter().try_for_each(|block| self.validate(block.params()))?;
        self.validate(&model.config.constants())
    }

    /// Names of tensors that the model has no parameter for, in order. A head that is the embedding is none of them, nor are frequencies of
    /// positions, which older savers wrote and which are computed.
    pub fn unused(&self, model: &Model) -> Vec<String> {
        let params = || model.blocks.iter().flat_map(|block| block.params());
        let fused = file_tensors(params(), &Layout::of(&model.config));
        let packed: Vec<String> =
            fused.iter().filter(|t| t.is_woven()).flat_map(|t| mxfp4::names(&t.name)).collect();
        let constants = model.config.constants();
        let names = params()
            .chain(&constants)
            .map(|param| &*param.name)
            .chain(fused.iter().map(|tensor| &*tensor.name));
        let weights = params().map(|param| &param.name).chain(fused.iter().map(|tensor| &tensor.name));
        let of_fp8 = weights.filter(|_| model.config.fp8.is_some());
        let scales: Vec<String> = of_fp8.flat_map(|name| fp8::beside(name)).collect();
        let names = names.chain(packed.iter().chain(&scales).map(String::as_str));
        let names = names.flat_map(|name| [Some(name), name.strip_prefix(BASE_PREFIX)]);
        let used: HashSet<&str> = names.flatten().collect();
        let is_used = |name: &&str| {
            used.contains(name) || (model.config.tied && *name == HEAD_NAME) || name.ends_with(FREQUENCIES)
        };
        let unused = self.tensors.keys().map(String::as_str).filter(|name| !is_used(name));
        let mut unused: Vec<String> = unused.map(|name| self.in_files(name)).collect();
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
    /// Says how the files name them, unless there are none.
    pub(crate) fn take_part(&mut self) -> Option<Naming> {
        if self.naming.is_some() {
            return self.naming;
        }
        let naming = Naming::of(self.tensors.keys().map(String::as_str))?;
        self.naming = Some(naming);
        for (name, stored) in std::mem::take(&mut self.tensors) {
            match naming.parameter(&name) {
                Some(parameter) => drop(self.tensors.insert(parameter, stored)),
                None => drop(self.others.insert(name, stored)),
            }
        }
        Some(naming)
    }

    /// Sets tensors aside that are no parameters.
    pub(crate) fn set_aside(&mut self, constants: &[ParamSpec]) -> Result {
        for constant in constants {
            let stored = self.find(constant)?.clone();
            self.others.insert(self.in_files(&constant.name), stored);
        }
        Ok(())
    }

    /// The tensors that are no parameters: names, element types, shapes and sizes in bytes.
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
        for fused in file_tensors(params, &Layout::of(&model.config)).iter().filter(|t| t.is_fused()) {
            let has_parts = fused.parts.iter().all(|part| self.find(part).is_ok());
            if has_parts {
                continue;
            }
            if let Order::Woven { layers, in_turns } = fused.order {
                self.take_experts_apart(fused, layers, in_turns)?;
                continue;
            }
            let stored = self.find(&ParamSpec::new(&fused.name, &fused.dims))?.clone();
            let mut offset = stored.offset;
            for (index, part) in fused.parts.iter().enumerate() {
                if let Order::Turns(_) = fused.order {
                    let entry =
                        Stored { shape: part.dims.clone(), form: turns(fused, index), ..stored.clone() };
                    self.tensors.insert(part.name.clone(), entry);
                    continue;
                }
                let size = stored.dtype.bitsize() / 8;
                let before = (offset - stored.offset) as usize / size;
                let scales = stored.scales.map(|scales| Scales { before, ..scales });
                let entry = Stored { shape: part.dims.clone(), offset, scales, ..stored.clone() };
                self.tensors.insert(part.name.clone(), entry);
                offset += (part.elements() * size) as u64;
            }
        }
        Ok(())
    }

    /// Enters the layers of experts, of which a tensor holds `layers` of each, [in turns](Order::Woven) or not.
    fn take_experts_apart(&mut self, fused: &FileTensor, layers: usize, in_turns: bool) -> Result {
        let whole = ParamSpec::new(&fused.name, &fused.dims);
        let [blocks, scales] = mxfp4::names(&fused.name);
        if in_turns && !self.has(&fused.name) && fused.dims.len() == 3 && self.has(&blocks) {
            let [experts, inputs, outputs] = [0, 1, 2].map(|axis| fused.dims[axis]);
            let groups = mxfp4::groups(inputs).ok_or_else(|| self.not_in_blocks(&blocks, inputs))?;
            let blocks = self.raw(&blocks, &[experts, outputs, groups, mxfp4::BLOCK_BYTES])?;
            let scales = self.raw(&scales, &[experts, outputs, groups])?;
            for (at, part) in fused.parts.iter().enumerate() {
                // Rows of the tensor, which has those of all experts one after the other.
                let row = (at / layers * outputs + at % layers) * groups;
                let form =
                    Form::Mxfp4 { layers, scales_shard: scales.shard, scales: scales.offset + row as u64 };
                let offset = blocks.offset + (row * mxfp4::BLOCK_BYTES) as u64;
                let entry = Stored { shape: part.dims.clone(), offset, form, ..blocks.clone() };
                self.tensors.insert(part.name.clone(), entry);
            }
            return Ok(());
        }
        let stored = self.find(&whole)?.clone();
        let size = (stored.dtype.bitsize() / 8) as u64;
        for (at, part) in fused.parts.iter().enumerate() {
            let of_expert = (layers * part.elements()) as u64 * size;
            let first = stored.offset + (at / layers) as u64 * of_expert;
            let (before, step) = if in_turns { (1, layers) } else { (part.dims[0], 1) };
            let offset = first + (at % layers * before) as u64 * size;
            let form = Form::Woven { layers, step, first };
            let entry = Stored { shape: part.dims.clone(), offset, form, ..stored.clone() };
            self.tensors.insert(part.name.clone(), entry);
        }
        Ok(())
    }

    /// Enters the scales of a weight, if it is FP8.
    fn take_scales(&mut self, param: &ParamSpec, fp8: Fp8) -> Result {
        let Ok(stored) = self.there(param) else { return Ok(()) };
        let (Dtype::F8_E4M3, &[rows, columns]) = (stored.dtype, &*param.dims) else { return Ok(()) };
        let name = fp8::scales_of(&param.name);
        let block = fp8.block.unwrap_or([rows, columns]);
        let dims = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        // One scale may have no dimensions of its own.
        let alone = [ParamSpec::new(&name, &[]), ParamSpec::new(&name, &[1])];
        let alone = alone.iter().filter(|_| fp8.block.is_none()).find(|alone| self.find(alone).is_ok());
        let Stored { shard, dtype, offset, .. } =
            *self.find(alone.unwrap_or(&ParamSpec::new(&name, &dims)))?;
        let scales = Some(Scales { block, columns, before: 0, shard, dtype, offset });
        let entry = Stored { scales, ..self.there(param)?.clone() };
        self.tensors.insert(param.name.clone(), entry);
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
            || name.strip_prefix(BASE_PREFIX).is_some_and(|name| self.tensors.contains_key(name))
    }

    fn not_in_blocks(&self, name: &str, inputs: usize) -> ModelError {
        ModelError::Corrupt {
            path: self.folder.clone(),
            detail: format!("`{name}` would be blocks of {} of {inputs} numbers", mxfp4::BLOCK),
        }
    }

    /// A tensor of bytes.
    fn raw(&self, name: &str, dims: &[usize]) -> Result<Stored> {
        let param = ParamSpec::new(name, dims);
        let stored = self.there(&param)?;
        if stored.dtype != Dtype::U8 {
            return Err(self.wrong_dtype(&param, stored));
        }
        Ok(stored.clone())
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

    /// Elements of a parameter from `start` on.
    pub(crate) fn read_into(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        let Stored { shard, dtype, offset, form, scales, .. } = *self.find(param)?;
        let place = Place { shard, dtype, offset, scales };
        assert!(start + out.len() <= param.elements(), "the range lies within `{}`", param.name);
        match form {
            Form::Rows => self.read_rows(place, start, out),
            Form::Turns { strips, turn } => {
                let (mut at, mut left) = (start, out);
                while !left.is_empty() {
                    let is_there = |strip: &&Strip| strip.elements > 0 && strip.first <= at;
                    let strip = strips.iter().rfind(is_there).expect("strips begin with the first element");
                    let (index, within) =
                        ((at - strip.first) / strip.elements, (at - strip.first) % strip.elements);
                    let (now, later) = left.split_at_mut((strip.elements - within).min(left.len()));
                    self.read_rows(place, index * turn + strip.offset + within, now)?;
                    at += now.len();
                    left = later;
                }
                Ok(())
            }
            Form::Woven { layers, step, first } => {
                if param.dims.len() > 1 {
                    self.warm(shard, first, layers * param.elements() * (dtype.bitsize() / 8))?;
                }
                let piece = Piece { shard, dtype, offset, layers, step };
                self.read_woven(&piece, &param.dims, start, out)
            }
            Form::Mxfp4 { layers, scales_shard, scales } => {
                let rows = [(shard, offset), (scales_shard, scales)];
                self.read_mxfp4(rows, layers, &param.dims, start, out)
            }
        }
    }

    /// Elements that follow one another, from `start` on behind `offset`.
    fn read_rows(&mut self, place: Place, start: usize, out: &mut [f32]) -> Result {
        let Place { shard, dtype, offset, scales } = place;
        if let Some(scales) = scales {
            return self.read_fp8((shard, offset), scales, start, out);
        }
        let size = dtype.bitsize() / 8;
        self.band = None;
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

    /// Reads so much of a file once, from its start to its end.
    fn warm(&mut self, shard: usize, offset: u64, bytes: usize) -> Result {
        if self.warm.replace((shard, offset)) == Some((shard, offset)) {
            return Ok(());
        }
        self.band = None;
        self.buffer.resize(BUFFER_BYTES, 0);
        for start in (0..bytes).step_by(BUFFER_BYTES) {
            let buffer = &mut self.buffer[..BUFFER_BYTES.min(bytes - start)];
            let Shard { path, file } = &self.shards[shard];
            file.read_exact_at(buffer, offset + start as u64).map_err(ModelError::file("reading", path))?;
        }
        Ok(())
    }

    /// Elements of a `[R, C]` tensor from `start` on, of which files have columns. Rows behind those that are asked for wait in a band: what
    /// is read next follows.
    fn read_woven(&mut self, piece: &Piece, dims: &[usize], start: usize, out: &mut [f32]) -> Result {
        let columns = dims.get(1).copied().unwrap_or(1);
        let row_bytes = columns * piece.dtype.bitsize() / 8;
        let (mut at, end) = (start, start + out.len());
        while at < end {
            let row = at / columns;
            let is_there = |band: &Band| band.is_of(piece) && band.rows.contains(&row);
            let rows = match self.band.take().filter(is_there) {
                Some(Band { rows, .. }) => rows,
                None => self.read_band(piece, dims, row)?,
            };
            let (first, last) =
                (at - rows.start * columns, end.min(rows.end * columns) - rows.start * columns);
            let size = row_bytes / columns;
            widen(
                piece.dtype,
                &self.buffer[first * size..last * size],
                &mut out[at - start..][..last - first],
            );
            at += last - first;
            self.band = Some(Band { shard: piece.shard, offset: piece.offset, rows });
        }
        Ok(())
    }

    /// Fills the buffer with rows from `first` on, and says which they are.
    fn read_band(&mut self, piece: &Piece, dims: &[usize], first: usize) -> Result<Range<usize>> {
        let Piece { shard, dtype, offset, layers, step } = *piece;
        let (rows, columns, size) = (dims[0], dims.get(1).copied().unwrap_or(1), dtype.bitsize() / 8);
        let count = (BUFFER_BYTES / (columns * size)).clamp(1, rows - first);
        self.buffer.resize(BUFFER_BYTES.max(columns * size), 0);
        let Shard { path, file } = &self.shards[shard];
        let mut read = [0; PIECE_BYTES];
        let at_once = (PIECE_BYTES / size - 1) / step + 1;
        for row in (0..count).step_by(at_once) {
            // Without what other layers have behind the last.
            let some = at_once.min(count - row);
            let read = &mut read[..((some - 1) * step + 1) * size];
            for column in 0..columns {
                let at = (column * rows * layers + (first + row) * step) * size;
                file.read_exact_at(read, offset + at as u64).map_err(ModelError::file("reading", path))?;
                for (row, element) in (row..row + some).zip(read.chunks(size).step_by(step)) {
                    self.buffer[(row * columns + column) * size..][..size].copy_from_slice(element);
                }
            }
        }
        Ok(first..first + count)
    }

    /// Elements of a `[R, C]` tensor from `start` on, whose blocks and scales begin where `first` says.
    fn read_mxfp4(
        &mut self,
        first: [(usize, u64); 2],
        layers: usize,
        dims: &[usize],
        start: usize,
        out: &mut [f32],
    ) -> Result {
        let (columns, end) = (dims[1], start + out.len());
        let groups = columns / mxfp4::BLOCK;
        let mut row_bytes = [vec![0; groups * mxfp4::BLOCK_BYTES], vec![0; groups]];
        let mut values = vec![0.0; columns];
        for row in start / columns..end.div_ceil(columns) {
            for ((shard, offset), bytes) in first.into_iter().zip(&mut row_bytes) {
                let Shard { path, file } = &self.shards[shard];
                let at = offset + (row * layers * bytes.len()) as u64;
                file.read_exact_at(bytes, at).map_err(ModelError::file("reading", path))?;
            }
            let [blocks, scales] = &row_bytes;
            mxfp4::decode(blocks, scales, &mut values);
            let whole = row * columns..(row + 1) * columns;
            let wanted = whole.start.max(start)..whole.end.min(end);
            let from = &values[wanted.start - whole.start..wanted.end - whole.start];
            out[wanted.start - start..wanted.end - start].copy_from_slice(from);
        }
        Ok(())
    }

    /// Elements from `start` on of a tensor whose codes begin at an offset of a shard.
    fn read_fp8(&mut self, codes: (usize, u64), of: Scales, start: usize, out: &mut [f32]) -> Result {
        let Scales { block, columns, before, dtype, .. } = of;
        let (per_row, size) = (columns.div_ceil(block[1]), dtype.bitsize() / 8);
        let (mut scale_bytes, mut scales) = (vec![0; per_row * size], vec![0.0; per_row]);
        self.band = None;
        self.buffer.resize(BUFFER_BYTES, 0);
        let (mut at, mut left, mut of_rows) = (start, out, None);
        while !left.is_empty() {
            let (row, column) = ((before + at) / columns, (before + at) % columns);
            let (now, later) = left.split_at_mut((columns - column).min(left.len()).min(BUFFER_BYTES));
            if of_rows.replace(row / block[0]) != Some(row / block[0]) {
                let Shard { path, file } = &self.shards[of.shard];
                let offset = of.offset + (row / block[0] * scale_bytes.len()) as u64;
                file.read_exact_at(&mut scale_bytes, offset).map_err(ModelError::file("reading", path))?;
                widen(dtype, &scale_bytes, &mut scales);
            }
            let Shard { path, file } = &self.shards[codes.0];
            let bytes = &mut self.buffer[..now.len()];
            file.read_exact_at(bytes, codes.1 + at as u64).map_err(ModelError::file("reading", path))?;
            fp8::decode(bytes, column, &scales, block[1], now);
            at += now.len();
            left = later;
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
            let (dtype, shape) = (info.dtype, info.shape.clone());
            self.tensors.insert(name, Stored { shard, dtype, shape, offset, form: Form::Rows, scales: None });
        }
        self.shards.push(Shard { path, file });
        Ok(())
    }

    fn find(&self, param: &ParamSpec) -> Result<&Stored> {
        let stored = self.there(param)?;
        let is_packed = matches!(stored.form, Form::Mxfp4 { .. }) || stored.scales.is_some();
        if !is_packed && !matches!(stored.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(self.wrong_dtype(param, stored));
        }
        Ok(stored)
    }

    fn wrong_dtype(&self, param: &ParamSpec, stored: &Stored) -> ModelError {
        let path = self.shards[stored.shard].path.clone();
        ModelError::WrongDtype { path, tensor: self.in_files(&param.name), found: stored.dtype.to_string() }
    }

    /// What the files call a parameter.
    fn in_files(&self, name: &str) -> String {
        self.naming.map_or_else(|| name.to_owned(), |naming| naming.in_files(name))
    }

    /// A tensor of that name and shape.
    fn there(&self, param: &ParamSpec) -> Result<&Stored> {
        let stored = self
            .tensors
            .get(&param.name)
            .or_else(|| self.tensors.get(param.name.strip_prefix(BASE_PREFIX)?))
            .ok_or_else(|| ModelError::MissingTensor {
                folder: self.folder.clone(),
                tensor: self.in_files(&param.name),
                expected: param.dims.clone(),
            })?;
        let path = || self.shards[stored.shard].path.clone();
        if stored.shape != param.dims {
            return Err(ModelError::WrongShape {
                path: path(),
                tensor: self.in_files(&param.name),
                expected: param.dims.clone(),
                found: stored.shape.clone(),
            });
        }
        Ok(stored)
    }
}

/// How a part lies in a tensor whose parts take turns.
fn turns(fused: &FileTensor, part: usize) -> Form {
    let Order::Turns(all) = &fused.order else { return Form::Rows };
    let of_row = fused.elements() / fused.dims[0];
    let (mut strips, mut count, mut turn) = ([Strip::default(); STRIPS_MAX], 0, 0);
    for strip in all {
        let elements = strip.rows * of_row;
        if strip.part == part {
            strips[count] = Strip { first: strip.first * of_row, elements, offset: turn };
            count += 1;
        }
        turn += elements;
    }
    Form::Turns { strips, turn }
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
