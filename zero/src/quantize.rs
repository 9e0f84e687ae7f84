//! Initial weights of a network with quantized parameters.
//!
//! A group is one run of bytes (see [`network`](crate::network)) that is written front to back: parameters are read in pieces of
//! whole rows, or of whole blocks of a long row, encoded on the engine's threads and appended to the chunk that is being
//! filled. No more than a piece in f32, its codes and a chunk are in memory, which the plan's loading buffer covers.

use crate::engine::Engine;
use crate::network::Placed;
use crate::{EngineError, ParamSpec, Result, WeightSource, checkpoint};
use rayon::prelude::*;
use terrace_kernels::QuantFormat;
use terrace_kernels::quantized::{BLOCK, NotFinite};
use terrace_tiers::Lease;

/// The part of a chunk's bytes that a piece has in weights: with four bytes for each and their codes it stays below the four
/// bytes per element that the plan has for loading.
const PIECE_PART: usize = 8;

/// Fills the engine's state, chunk by chunk.
pub(crate) fn load(engine: &mut Engine, source: &mut dyn WeightSource) -> Result {
    let piece = (engine.plan.windows.slot_elements / PIECE_PART).next_multiple_of(BLOCK);
    let mut weights = vec![0f32; piece];
    let mut codes = Vec::new();
    for group in 0..engine.network.groups.len() {
        let params = engine.network.groups[group].params.clone();
        let mut filling = Filling { group, at: 0, lease: None };
        for Placed { spec, offset } in params {
            filling.pad(engine, offset)?;
            for (start, len) in pieces(&spec, piece) {
                let weights = &mut weights[..len];
                source.read(&spec, start, weights)?;
                encode(engine, &spec, start, weights, &mut codes)?;
                filling.write(engine, &codes)?;
            }
        }
        let end = engine.network.groups[group].elements;
        filling.pad(engine, end)?;
    }
    Ok(())
}

/// First element and length of pieces of at most `piece` elements, padding of rows included.
fn pieces(spec: &ParamSpec, piece: usize) -> Vec<(usize, usize)> {
    let elements = spec.elements();
    let cols = spec.dims.last().copied().unwrap_or(1).max(1);
    let padded = if spec.quantized.is_some() { cols.next_multiple_of(BLOCK) } else { 1 };
    let in_runs = |start: usize, end: usize, run: usize| {
        (start..end).step_by(run).map(move |at| (at, run.min(end - at)))
    };
    match spec.quantized {
        None => in_runs(0, elements, piece).collect(),
        Some(_) if padded <= piece => in_runs(0, elements, piece / padded * cols).collect(),
        Some(_) => (0..elements).step_by(cols).flat_map(|row| in_runs(row, row + cols, piece)).collect(),
    }
}

/// Replaces `codes` by what is stored for a piece.
fn encode(engine: &Engine, spec: &ParamSpec, start: usize, weights: &[f32], codes: &mut Vec<u8>) -> Result {
    let Some(format) = spec.quantized else {
        let dtype = engine.config.dtype;
        codes.resize(weights.len() * dtype.size(), 0);
        checkpoint::narrow(weights, dtype, codes);
        return Ok(());
    };
    let cols = spec.dims.last().copied().unwrap_or(1).min(weights.len());
    let row_bytes = format.row_bytes(cols);
    codes.resize(weights.len().div_ceil(cols) * row_bytes, 0);
    let rows = weights.par_chunks(cols).zip(codes.par_chunks_mut(row_bytes)).enumerate();
    let quantized = engine.pool.install(|| {
        rows.try_for_each(|(row, (weights, codes))| {
            format.quantize(weights, codes).map_err(|error| (row * cols, error))
        })
    });
    quantized.map_err(|(before, error)| refuse(spec, format, start + before, error))
}

fn refuse(spec: &ParamSpec, format: QuantFormat, start: usize, error: NotFinite) -> EngineError {
    EngineError::Model(format!(
        "{}: element {} is {}, which cannot be stored in {format}: repair the checkpoint, or do not quantize (models::build)",
        spec.name,
        start + error.index,
        error.value
    ))
}

/// A group of which the first `at` bytes are written.
struct Filling {
    group: usize,
    at: usize,
    /// Of the chunk that byte `at` lies in, if any of it is written.
    lease: Option<Lease>,
}

impl Filling {
    /// Zeros up to byte `end`.
    fn pad(&mut self, engine: &mut Engine, end: usize) -> Result {
        const ZEROS: [u8; 4096] = [0; 4096];
        while self.at < end {
            self.write(engine, &ZEROS[..ZEROS.len().min(end - self.at)])?;
        }
        Ok(())
    }

    fn write(&mut self, engine: &mut Engine, mut bytes: &[u8]) -> Result {
        let chunk_bytes = engine.plan.spec.chunk_elements as usize;
        while !bytes.is_empty() {
            let (chunk, from) = (self.at / chunk_bytes, self.at % chunk_bytes);
            let mut lease = self.lease.take().unwrap_or_else(|| {
                engine
                    .update_slots
                    .acquire_one(engine.kinds.weight, engine.plan.spec.chunk_len(self.group, chunk))
            });
            let len = bytes.len().min(lease.len() - from);
            lease[from..from + len].copy_from_slice(&bytes[..len]);
            self.at += len;
            bytes = &bytes[len..];
            if from + len == lease.len() {
                checkpoint::place(engine, self.group, chunk, vec![lease])?;
            } else {
                self.lease = Some(lease);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_parameter_in_whole_blocks() {
        let format = Some(QuantFormat::Int4);
        for (dims, format) in [
            (vec![7, 300], format),
            (vec![100, 5], format),
            (vec![3, 2000], format),
            (vec![2, 1024], format),
            (vec![5000], None),
        ] {
            let spec = ParamSpec::new("w", &dims).stored_as(format);
            let mut next = 0;
            for (start, len) in pieces(&spec, 1024) {
                assert_eq!(start, next, "{dims:?}: pieces follow one another");
                next += len;
                let cols = *dims.last().unwrap();
                let stored = if format.is_none() {
                    len
                } else if len >= cols {
                    assert!(start % cols == 0 && len % cols == 0, "{dims:?}: whole rows");
                    len / cols * cols.next_multiple_of(BLOCK)
                } else {
                    assert_eq!(start % cols % BLOCK, 0, "{dims:?}: whole blocks");
                    len
                };
                assert!(stored <= 1024, "{dims:?}: {stored}");
            }
            assert_eq!(next, spec.elements());
        }
    }
}
