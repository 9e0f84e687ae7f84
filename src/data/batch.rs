//! Samples side by side.

use super::{IGNORED, Sample};

/// A micro-batch of sequences of equal length, row-major `[B, S]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of sequences, B.
    pub sequences: usize,
    /// Positions per sequence, S.
    pub length: usize,
    /// Token ids.
    pub ids: Vec<i32>,
    /// Labels at the position of their token; [`IGNORED`] carries no loss.
    pub labels: Vec<i32>,
    /// Labels that a next-token loss counts: unmasked and not in the first position.
    pub loss_terms: u64,
    /// Tokens without padding.
    pub tokens: u64,
}

impl Batch {
    /// Puts samples side by side, padded on the right to `length` with `pad` and without loss.
    ///
    /// # Panics
    /// If a sample is longer than `length`.
    pub fn collate(samples: &[Sample], length: usize, pad: u32) -> Self {
        let cells = samples.len() * length;
        let (mut ids, mut labels) = (Vec::with_capacity(cells), Vec::with_capacity(cells));
        let (mut loss_terms, mut tokens) = (0, 0);
        for sample in samples {
            assert!(sample.ids.len() <= length, "samples are truncated when the data set is built");
            ids.extend(sample.ids.iter().map(|&id| id as i32));
            labels.extend(&sample.labels);
            ids.resize(ids.len() + length - sample.ids.len(), pad as i32);
            labels.resize(ids.len(), IGNORED);
            loss_terms += loss_terms_of(&sample.labels);
            tokens += sample.ids.len() as u64;
        }
        Self { sequences: samples.len(), length, ids, labels, loss_terms, tokens }
    }

    /// The target of every position, `labels` moved one to the left within each sequence: position `t` predicts token `t + 1`,
    /// the last position predicts nothing.
    pub fn targets(&self) -> Vec<i32> {
        let mut targets = Vec::with_capacity(self.labels.len());
        for row in self.labels.chunks_exact(self.length) {
            targets.extend(&row[1..]);
            targets.push(IGNORED);
        }
        targets
    }
}

/// Labels that a next-token loss counts.
pub(super) fn loss_terms_of(labels: &[i32]) -> u64 {
    labels.iter().skip(1).filter(|&&label| label != IGNORED).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_carries_no_loss() {
        let samples = [
            Sample { ids: vec![5, 6, 7], labels: vec![5, 6, 7] },
            Sample { ids: vec![8, 9], labels: vec![IGNORED, 9] },
        ];
        let batch = Batch::collate(&samples, 4, 1);
        assert_eq!(batch.ids, [5, 6, 7, 1, 8, 9, 1, 1]);
        assert_eq!(batch.labels, [5, 6, 7, -100, -100, 9, -100, -100]);
        assert_eq!(batch.targets(), [6, 7, -100, -100, 9, -100, -100, -100]);
        assert_eq!((batch.loss_terms, batch.tokens), (3, 5));
        assert_eq!(batch.targets().iter().filter(|&&t| t != IGNORED).count() as u64, batch.loss_terms);
    }
}
