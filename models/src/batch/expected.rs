//! Batches that somebody else has filled: what kernels would panic at, or compute with as if it were right, is refused before.

use super::{IDS, LABELS, LAST, POSITIONS, STARTS, TokenBatch, factor_inputs};
use crate::ModelConfig;
use terrace_zero::{BatchUse, EngineError, HostTensor, MicroBatch, Result};

/// What the blocks of a model expect of a batch.
#[derive(Debug)]
pub(crate) struct Expected {
    batches: TokenBatch,
    /// The input with the number of each token, of models that have that.
    rows: Option<usize>,
}

impl Expected {
    pub(crate) fn of(config: &ModelConfig) -> Self {
        Self { batches: TokenBatch::new(config), rows: factor_inputs(config).map(|[_, rows]| rows) }
    }

    /// Refuses what is no batch of this model for this use.
    ///
    /// # Errors
    /// The input, the position and what is there.
    pub(crate) fn check(&self, batch: &MicroBatch, of: BatchUse<'_>) -> Result {
        self.check_shapes(batch)?;
        match of {
            BatchUse::Sample => return Ok(()),
            BatchUse::Loss => self.check_loss(batch)?,
            BatchUse::Generate { cached, added } => check_rows(batch, cached, added)?,
        }
        let ids = integers(batch, IDS).enumerate();
        self.within("id", batch, ids)?;
        let Some(rows) = self.rows else { return Ok(()) };
        match integers(batch, rows).zip(0..).find(|(found, row)| found != row) {
            Some((found, row)) => refuse(format!("input {rows} numbers token {row} as {found}")),
            None => Ok(()),
        }
    }

    fn check_shapes(&self, batch: &MicroBatch) -> Result {
        let MicroBatch { sequences, length, inputs, .. } = batch;
        let expected = self.batches.shape(*sequences, *length).inputs;
        if inputs.len() != expected.len() {
            return refuse(format!("the model reads {} inputs, not {}", expected.len(), inputs.len()));
        }
        let other = |(found, wanted): &(&HostTensor, &HostTensor)| {
            (found.dtype, &found.dims) != (wanted.dtype, &wanted.dims)
        };
        match inputs.iter().zip(&expected).enumerate().find(|(_, pair)| other(pair)) {
            None => Ok(()),
            Some((index, (found, wanted))) => refuse(format!(
                "input {index} of a batch of {sequences} × {length} positions is {}, dimensions {:?}, not {}, {:?}",
                wanted.dtype, wanted.dims, found.dtype, found.dims
            )),
        }
    }

    fn check_loss(&self, batch: &MicroBatch) -> Result {
        let labels = || integers(batch, LABELS).enumerate().filter(|(_, label)| *label >= 0);
        self.within("label", batch, labels())?;
        let carrying = labels().count() as u64;
        if carrying != batch.loss_terms {
            return refuse(format!(
                "{carrying} labels carry loss, and loss_terms of the batch is {}",
                batch.loss_terms
            ));
        }
        match integers(batch, STARTS).enumerate().find(|(_, start)| *start != 0) {
            Some((row, start)) => {
                refuse(format!("row {row} starts at position {start}; without a cache, rows start at 0"))
            }
            None => Ok(()),
        }
    }

    /// Refuses what is outside the vocabulary.
    fn within(
        &self,
        kind: &str,
        batch: &MicroBatch,
        mut of_tokens: impl Iterator<Item = (usize, i32)>,
    ) -> Result {
        let inside = |id: i32| usize::try_from(id).is_ok_and(|id| id < self.batches.vocab);
        match of_tokens.find(|(_, id)| !inside(*id)) {
            None => Ok(()),
            Some((token, id)) => refuse(format!(
                "{kind} {id} at position {} of row {} is outside the vocabulary of {} tokens",
                token % batch.length,
                token / batch.length,
                self.batches.vocab
            )),
        }
    }
}

/// Refuses rows that do not go on where the cache ends, and end where what they add does.
fn check_rows(batch: &MicroBatch, cached: &[usize], added: &[usize]) -> Result {
    let length = batch.length;
    for (row, (start, cached)) in integers(batch, STARTS).zip(cached).enumerate() {
        if i64::from(start) != *cached as i64 {
            return refuse(format!(
                "row {row} starts at position {start}, and the cache has {cached} of its sequence"
            ));
        }
    }
    for (token, position) in integers(batch, POSITIONS).enumerate() {
        let (row, at) = (token / length, token % length);
        if i64::from(position) != (cached[row] + at) as i64 {
            return refuse(format!(
                "token {at} of row {row} is said to be at position {position}, and is at {}",
                cached[row] + at
            ));
        }
    }
    for (row, (last, added)) in integers(batch, LAST).zip(added).enumerate() {
        let end = (row * length + added - 1) as i64;
        if i64::from(last) != end {
            return refuse(format!(
                "row {row} adds {added} positions, the last of which is token {end} of the batch, not {last}"
            ));
        }
    }
    Ok(())
}

/// The numbers of an input whose shape was compared.
fn integers(batch: &MicroBatch, input: usize) -> impl Iterator<Item = i32> {
    batch.inputs[input].bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn refuse(detail: String) -> Result {
    Err(EngineError::Batch(detail))
}
