//! Rows of tokens to the inputs that the blocks read.
//!
//! Legend: B sequences, S positions, T = B·S, P rotated pairs of elements of a head.
//!
//! Every batch has the same inputs in the same order, padded on the right to one length:
//!
//! ```text
//!  0 IDS        i32 [T]     token ids, 0 in padding
//!  1 LABELS     i32 [T]     the token that follows each position, -100 where it carries no loss
//!  2 POSITIONS  i32 [T]     position of each token in its sequence
//!  3 STARTS     i32 [B]     position of each sequence's first token in this batch (0 in training)
//!  4 LAST       i32 [B]     row in 0..T of each sequence's last valid token
//!  5 INV_FREQ   f32 [P]     angle per position of the rotary embedding
//!  6 WINDOW_INV_FREQ  f32 [P]  that of layers with a window, of models where it is another
//!  then CONSTANTS  f32 [N, C]  numbers of the model's files that are not trained, of models that have such: C of each of N layers
//!  then FACTORS    f32 [T, 1]  what multiplies each token's queries, of models that have such, and behind it
//!       ROWS       i32 [T, 1]  the number of each token
//! ```

mod expected;

pub(crate) use expected::Expected;

use crate::{ModelConfig, ModelError, QueryFactor, Result, SafetensorsSource};
use std::path::Path;
use terrace_kernels::DType;
use terrace_zero::{HostTensor, MicroBatch, ParamSpec, WeightSource};

/// Input with the token ids.
pub const IDS: usize = 0;
/// Input with the labels, already shifted: `LABELS[t]` is what follows `IDS[t]`.
pub const LABELS: usize = 1;
/// Input with the positions.
pub const POSITIONS: usize = 2;
/// Input with each sequence's first position.
pub const STARTS: usize = 3;
/// Input with the row of each sequence's last valid token.
pub const LAST: usize = 4;
/// Input with the rotary frequencies.
pub const INV_FREQ: usize = 5;
/// Input with the rotary frequencies of layers with a window, of models that have [others](ModelConfig::window_rope) there.
pub const WINDOW_INV_FREQ: usize = 6;

/// Input with the [constants](ModelConfig::constants) of a model that has any: behind all frequencies.
pub(crate) fn constants_input(config: &ModelConfig) -> usize {
    if config.window_rope.is_some() { WINDOW_INV_FREQ + 1 } else { INV_FREQ + 1 }
}

/// Inputs with what [multiplies queries](ModelConfig::query_factor) and with their numbers, of a model that has that: behind all others.
pub(crate) fn factor_inputs(config: &ModelConfig) -> Option<[usize; 2]> {
    config.query_factor?;
    let first = constants_input(config) + usize::from(!config.constants().is_empty());
    Some([first, first + 1])
}

/// The label that carries no loss. Any negative label is treated like it.
pub const IGNORED: i32 = -100;

/// A training row: ids and, per id, whether and as what it is to be predicted. Labels are *not* shifted: `labels[t]` belongs
/// to `ids[t]`, as in Hugging Face data.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// One label per id.
    pub labels: &'a [i32],
}

/// Builds micro-batches for one model.
#[derive(Debug, Clone)]
pub struct TokenBatch {
    vocab: usize,
    inv_freq: Vec<f32>,
    /// Of layers with a window, if they have others.
    window_inv_freq: Option<Vec<f32>>,
    /// Where longer sequences have frequencies of their own: how long, and those.
    beyond: Option<(usize, Vec<f32>)>,
    /// How long sequences become; `None` where each batch tells.
    reach: Option<usize>,
    /// Of models whose files have them.
    constants: Option<Constants>,
    query_factor: Option<QueryFactor>,
}

/// Numbers of the files that are not trained, `[N, C]`.
#[derive(Debug, Clone)]
struct Constants {
    dims: [usize; 2],
    /// Zeros until they are read.
    numbers: Vec<f32>,
    are_read: bool,
}

impl TokenBatch {
    /// A builder for models of this configuration. Of one with [constants](ModelConfig::constants), for [shapes](Self::shape) and
    /// [padding](Self::blank) alone.
    pub fn new(config: &ModelConfig) -> Self {
        let rope = &config.rope;
        let beyond = rope.short_positions().map(|short| (short, rope.inverse_frequencies(short + 1)));
        let window_inv_freq = config.window_rope.as_ref().map(|rope| rope.inverse_frequencies(0));
        let inv_freq = rope.inverse_frequencies(0);
        let constants = config.constants();
        let constants = constants.first().map(|first| {
            let dims = [constants.len(), first.elements()];
            Constants { dims, numbers: vec![0.0; dims.iter().product()], are_read: false }
        });
        let query_factor = config.query_factor;
        Self { vocab: config.vocab, inv_freq, window_inv_freq, beyond, reach: None, constants, query_factor }
    }

    /// A builder for the model in a folder, with what is constant in its files.
    ///
    /// # Errors
    /// That is not there, or cannot be read.
    pub fn for_model(folder: &Path, config: &ModelConfig) -> Result<Self> {
        if config.constants().is_empty() {
            return Ok(Self::new(config));
        }
        let mut source = SafetensorsSource::open(folder)?;
        if config.is_part {
            source.take_part();
        }
        Self::with_constants(config, |constant, numbers| source.read_into(constant, 0, numbers))
    }

    /// A builder for a model whose weights and constants come from `source`.
    ///
    /// # Errors
    /// Those of the source.
    pub fn for_source(config: &ModelConfig, source: &mut dyn WeightSource) -> terrace_zero::Result<Self> {
        Self::with_constants(config, |constant, numbers| source.read(constant, 0, numbers))
    }

    fn with_constants<E>(
        config: &ModelConfig,
        mut read: impl FnMut(&ParamSpec, &mut [f32]) -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        let mut batch = Self::new(config);
        if let Some(Constants { dims, numbers, are_read }) = &mut batch.constants {
            let rows = numbers.chunks_mut(dims[1]);
            config.constants().iter().zip(rows).try_for_each(|(constant, row)| read(constant, row))?;
            *are_read = true;
        }
        Ok(batch)
    }

    /// The same for sequences that grow to `positions`. Keys in a cache were rotated when they were short: of a rotary embedding that has other
    /// frequencies for long sequences, all steps of a generation must use the same.
    pub fn reaching(self, positions: usize) -> Self {
        Self { reach: Some(positions), ..self }
    }

    /// What is the same for all tokens of a batch whose longest sequence has `positions`.
    fn shared(&self, positions: usize) -> Vec<HostTensor> {
        let of_all = match &self.beyond {
            Some((short, long)) if self.reach.unwrap_or(positions) > *short => long,
            _ => &self.inv_freq,
        };
        let frequencies = std::iter::once(of_all).chain(&self.window_inv_freq);
        let frequencies = frequencies.map(|each| HostTensor::from_f32(&[each.len()], each));
        let constants = self.constants.iter().map(|all| HostTensor::from_f32(&all.dims, &all.numbers));
        frequencies.chain(constants).collect()
    }

    /// The batch whose longest sequence has `positions`.
    fn finish(&self, columns: Columns, positions: usize) -> MicroBatch {
        let tokens = columns.ids.len();
        let of_tokens = self.query_factor.map(|factor| {
            let factors: Vec<f32> = columns.positions.iter().map(|at| factor.at(*at as usize)).collect();
            let rows: Vec<i32> = (0..tokens as i32).collect();
            [HostTensor::from_f32(&[tokens, 1], &factors), HostTensor::from_i32(&[tokens, 1], &rows)]
        });
        let shared = self.shared(positions).into_iter();
        columns.finish(shared.chain(of_tokens.into_iter().flatten()).collect())
    }

    /// Refuses to compute with zeros in the place of what is in the model's files.
    fn have_constants(&self) -> Result {
        if self.constants.as_ref().is_none_or(|constants| constants.are_read) {
            return Ok(());
        }
        refuse(
            "the model computes with numbers of its files that are not trained: make batches by TokenBatch::for_model"
                .into(),
        )
    }

    /// A batch of `sequences` rows of `length` positions. Shorter rows are padded, missing rows are all padding; padding
    /// carries no loss.
    ///
    /// # Errors
    /// More or longer rows than that, 2^31 positions or more, labels that do not match ids, or an id outside the vocabulary.
    pub fn train(&self, rows: &[Row<'_>], sequences: usize, length: usize) -> Result<MicroBatch> {
        if rows.len() > sequences {
            return refuse(format!("{} rows for a batch of {sequences}", rows.len()));
        }
        require_countable(sequences, length)?;
        let mut columns = Columns::new(sequences, length);
        for (index, row) in rows.iter().enumerate() {
            if row.labels.len() != row.ids.len() {
                return refuse(format!("row {index} has {} ids, {} labels", row.ids.len(), row.labels.len()));
            }
            self.fill(&mut columns, index, row.ids, 0)?;
            // The token at t predicts the one at t + 1; the last of a row predicts nothing.
            for (t, &label) in row.labels.iter().enumerate().skip(1).filter(|(_, label)| **label >= 0) {
                self.check(index, t, "label", i64::from(label))?;
                columns.labels[index * length + t - 1] = label;
            }
        }
        let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
        self.have_constants()?;
        Ok(self.finish(columns, longest))
    }

    /// A batch for generation: `rows[b]` continues sequence b, of which `starts[b]` positions are in the cache. Rows are padded
    /// to `length`; each has at least one id.
    ///
    /// # Errors
    /// A row that is empty or longer than `length`, as many starts as rows missing, or an id outside the vocabulary.
    pub fn generate(&self, rows: &[&[u32]], starts: &[usize], length: usize) -> Result<MicroBatch> {
        if rows.len() != starts.len() {
            return refuse(format!("{} rows, {} starts", rows.len(), starts.len()));
        }
        require_countable(rows.len(), length)?;
        let mut columns = Columns::new(rows.len(), length);
        for (index, (ids, &start)) in rows.iter().zip(starts).enumerate() {
            if ids.is_empty() {
                return refuse(format!(
                    "prompt {index} has no tokens; give at least one, such as the BOS token"
                ));
            }
            self.fill(&mut columns, index, ids, start)?;
        }
        let longest = rows.iter().zip(starts).map(|(ids, start)| start + ids.len()).max().unwrap_or(0);
        self.have_constants()?;
        Ok(self.finish(columns, longest))
    }

    /// The first batch of a generation: whole prompts, padded on the right to `length`.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn prefill(&self, prompts: &[&[u32]], length: usize) -> Result<MicroBatch> {
        self.generate(prompts, &vec![0; prompts.len()], length)
    }

    /// One more token per sequence; `lengths[b]` tokens of sequence b are in the cache.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn decode(&self, ids: &[u32], lengths: &[usize]) -> Result<MicroBatch> {
        let rows: Vec<&[u32]> = ids.iter().map(std::slice::from_ref).collect();
        self.generate(&rows, lengths, 1)
    }

    /// A batch of padding, which can be computed with.
    ///
    /// # Panics
    /// If there are 2^31 positions or more.
    pub fn blank(&self, sequences: usize, length: usize) -> MicroBatch {
        self.finish(Columns::new(sequences, length), 0)
    }

    /// The shapes alone, which is all that a plan and an engine ask for: zeros that no memory is touched for, however many.
    pub fn shape(&self, sequences: usize, length: usize) -> MicroBatch {
        let tokens = sequences * length;
        let zeros = |dtype: DType, dims: &[usize]| HostTensor {
            dtype,
            dims: dims.to_vec(),
            bytes: vec![0; dims.iter().product::<usize>() * dtype.size()],
        };
        let of_tokens = (0..3).map(|_| zeros(DType::I32, &[tokens]));
        let of_sequences = (0..2).map(|_| zeros(DType::I32, &[sequences]));
        let factors = self.query_factor.map(|_| [DType::F32, DType::I32].map(|of| zeros(of, &[tokens, 1])));
        let last = self.shared(0).into_iter().chain(factors.into_iter().flatten());
        let inputs = of_tokens.chain(of_sequences).chain(last).collect();
        MicroBatch { sequences, length, inputs, loss_terms: 0 }
    }

    /// Writes ids, positions, start and last row of sequence `index`.
    fn fill(&self, columns: &mut Columns, index: usize, ids: &[u32], start: usize) -> Result {
        let length = columns.length;
        if ids.len() > length {
            return refuse(format!("row {index} has {} tokens for a length of {length}", ids.len()));
        }
        if start.checked_add(length).is_none_or(|end| i32::try_from(end).is_err()) {
            return refuse(format!(
                "row {index} starts at position {start}, beyond what positions can count"
            ));
        }
        for (t, &id) in ids.iter().enumerate() {
            self.check(index, t, "id", i64::from(id))?;
            columns.ids[index * length + t] = id as i32;
        }
        for t in 0..length {
            columns.positions[index * length + t] = (start + t) as i32;
        }
        columns.starts[index] = start as i32;
        columns.last[index] = (index * length + ids.len().saturating_sub(1)) as i32;
        Ok(())
    }

    fn check(&self, row: usize, t: usize, kind: &str, id: i64) -> Result {
        if id < self.vocab as i64 {
            return Ok(());
        }
        refuse(format!(
            "{kind} {id} at position {t} of row {row} is outside the vocabulary of {} tokens; \
             was the data made with another tokenizer?",
            self.vocab
        ))
    }
}

/// The inputs while they are filled; starts out as all padding.
#[derive(Debug)]
struct Columns {
    sequences: usize,
    length: usize,
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    starts: Vec<i32>,
    last: Vec<i32>,
}

impl Columns {
    fn new(sequences: usize, length: usize) -> Self {
        require_countable(sequences, length).unwrap_or_else(|refusal| panic!("{refusal}"));
        let tokens = sequences * length;
        Self {
            sequences,
            length,
            ids: vec![0; tokens],
            labels: vec![IGNORED; tokens],
            positions: (0..tokens).map(|t| (t % length) as i32).collect(),
            starts: vec![0; sequences],
            last: (0..sequences).map(|b| (b * length) as i32).collect(),
        }
    }

    fn finish(self, constants: Vec<HostTensor>) -> MicroBatch {
        let (sequences, length, tokens) = (self.sequences, self.length, self.ids.len());
        let loss_terms = self.labels.iter().filter(|label| **label >= 0).count() as u64;
        let mut inputs = vec![
            HostTensor::from_i32(&[tokens], &self.ids),
            HostTensor::from_i32(&[tokens], &self.labels),
            HostTensor::from_i32(&[tokens], &self.positions),
            HostTensor::from_i32(&[sequences], &self.starts),
            HostTensor::from_i32(&[sequences], &self.last),
        ];
        inputs.extend(constants);
        MicroBatch { sequences, length, inputs, loss_terms }
    }
}

/// Refuses more positions than rows are counted with.
fn require_countable(sequences: usize, length: usize) -> Result {
    if sequences.checked_mul(length).is_some_and(|tokens| i32::try_from(tokens).is_ok()) {
        return Ok(());
    }
    refuse(format!("a micro-batch of {sequences} × {length} positions is too large: it has below 2^31"))
}

fn refuse<T>(detail: String) -> Result<T> {
    Err(ModelError::Batch(detail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_that_of_a_batch() {
        let text = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 4}"#;
        let config = ModelConfig::parse(text).unwrap();
        let batches = TokenBatch::new(&config);
        let query_factor =
            Some(QueryFactor { beta: 0.5, original_positions: 2, first: 0, unrotated_alone: false });
        let with_factors = TokenBatch::new(&ModelConfig { query_factor, ..config });
        let of = |batch: MicroBatch| {
            let tensors = batch.inputs.into_iter().map(|t| (t.dtype, t.dims, t.bytes.len()));
            (batch.sequences, batch.length, tensors.collect::<Vec<_>>())
        };
        assert_eq!(of(batches.shape(3, 5)), of(batches.blank(3, 5)));
        assert_eq!(of(with_factors.shape(3, 5)), of(with_factors.blank(3, 5)));
        assert_eq!(with_factors.shape(3, 5).inputs.len(), batches.shape(3, 5).inputs.len() + 2);
        // As many tokens as there can be take no time and no memory.
        assert_eq!(batches.shape(1, i32::MAX as usize).length, i32::MAX as usize);
    }
}
