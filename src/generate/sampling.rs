//! From logits to the next token.
//!
//! `p = softmax(logits / T)` over the survivors of top-k, then of top-p, in that order, as Hugging Face's generation does.
//! Survivors are found and drawn in the order (probability descending, id ascending), so that ties go to the lowest id, as in
//! `torch.argmax`, and a result never depends on the sort. Sums are in f64. Before all that [`penalize`] may lower the tokens that were there
//! before (Keskar et al., "CTRL", arXiv 1909.05858, section 4.1).
//!
//! Every row of a batch has its own generator, seeded from the seed and the row's number in the *input*, and takes one number
//! per token: which numbers a row draws does not depend on the batch it runs in. Its logits may, in their last bits: products of few
//! rows in 16 bits or of codes round otherwise than those of many.

use crate::data::mix;
use std::cmp::Ordering;
use std::collections::HashSet;

/// How tokens are picked.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SamplingConfig {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Only the `k` most likely tokens.
    pub top_k: Option<usize>,
    /// Only the smallest set of most likely tokens whose probability reaches `p`.
    pub top_p: Option<f64>,
    /// Seed of the generators.
    pub seed: u64,
}

/// Logits that no token can be picked from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// A logit is not a number.
    #[error(
        "the model's output for token {0} is not a number; try EngineConfig::dtype F32, and check the weights"
    )]
    NotANumber(usize),
    /// There is no logit above minus infinity.
    #[error("the model gives every token a probability of zero")]
    Nothing,
}

/// Divides the logits of the `seen` tokens by `penalty`, or multiplies them where they are negative, as transformers'
/// `RepetitionPenaltyLogitsProcessor`. Tokens without a logit count for nothing.
pub fn penalize(logits: &mut [f32], seen: &HashSet<u32>, penalty: f64) {
    let penalty = penalty as f32;
    for &id in seen {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// Picks the tokens of one row.
#[derive(Debug, Clone)]
pub struct TokenSampler {
    config: SamplingConfig,
    state: u64,
}

impl TokenSampler {
    /// A sampler for the row with number `row` of the input.
    pub fn new(config: SamplingConfig, row: u64) -> Self {
        Self { config, state: mix(config.seed, row) }
    }

    /// The next token. `candidates` is memory for ids and logits of all tokens, which samplers may share.
    ///
    /// # Errors
    /// The logits are empty, all minus infinity, or not numbers.
    pub fn pick(&mut self, logits: &[f32], candidates: &mut Vec<(u32, f32)>) -> Result<u32, SamplingError> {
        if let Some(at) = logits.iter().position(|logit| logit.is_nan()) {
            return Err(SamplingError::NotANumber(at));
        }
        let best = argmax(logits).ok_or(SamplingError::Nothing)?;
        if self.config.temperature == 0.0 || self.config.top_k == Some(1) || logits[best] == f32::INFINITY {
            return Ok(best as u32);
        }
        let largest = f64::from(logits[best]);
        let temperature = self.config.temperature;
        let weight = |logit: f32| ((f64::from(logit) - largest) / temperature).exp();
        candidates.clear();
        candidates.extend((0..).zip(logits.iter().copied()));
        keep_top(candidates, self.config.top_k, self.config.top_p, weight);
        let total: f64 = candidates.iter().map(|&(_, logit)| weight(logit)).sum();
        let target = self.uniform() * total;
        let mut sum = 0.0;
        for &(id, logit) in candidates.iter() {
            sum += weight(logit);
            if target < sum {
                return Ok(id);
            }
        }
        // Rounding left the target at the very end.
        Ok(candidates.iter().rev().find(|c| weight(c.1) > 0.0).map_or(best as u32, |c| c.0))
    }

    /// SplitMix64, 53 bits in `0..1`.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(1);
        (mix(self.state, 0x5EED) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The largest logit above minus infinity, the first of equals.
fn argmax(logits: &[f32]) -> Option<usize> {
    let mut best = None;
    let mut largest = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > largest {
            (best, largest) = (Some(id), logit);
        }
    }
    best
}

fn keep_top(
    candidates: &mut Vec<(u32, f32)>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    weight: impl Fn(f32) -> f64,
) {
    let order = |a: &(u32, f32), b: &(u32, f32)| -> Ordering { b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)) };
    if let Some(k) = top_k
        && k < candidates.len()
    {
        candidates.select_nth_unstable_by(k, order);
        candidates.truncate(k);
    }
    if top_k.is_some() || top_p.is_some() {
        candidates.sort_unstable_by(order);
    }
    let Some(p) = top_p.filter(|&p| p < 1.0) else { return };
    let total: f64 = candidates.iter().map(|&(_, logit)| weight(logit)).sum();
    let mut sum = 0.0;
    let kept = candidates.iter().position(|&(_, logit)| {
        sum += weight(logit);
        sum >= p * total
    });
    candidates.truncate(kept.map_or(candidates.len(), |last| last + 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(config: SamplingConfig, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        let mut sampler = TokenSampler::new(config, 0);
        for _ in 0..20_000 {
            counts[sampler.pick(logits, &mut Vec::new()).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn config(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> SamplingConfig {
        SamplingConfig { temperature, top_k, top_p, seed: 3 }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals() {
        let mut greedy = TokenSampler::new(config(0.0, None, None), 0);
        assert_eq!(greedy.pick(&[0.0, 2.0, 2.0, -1.0], &mut Vec::new()), Ok(1));
        assert_eq!(greedy.pick(&[f32::NEG_INFINITY, -3.0], &mut Vec::new()), Ok(1));
        assert_eq!(greedy.pick(&[0.0, f32::NAN], &mut Vec::new()), Err(SamplingError::NotANumber(1)));
        assert_eq!(greedy.pick(&[f32::NEG_INFINITY], &mut Vec::new()), Err(SamplingError::Nothing));
        assert_eq!(greedy.pick(&[], &mut Vec::new()), Err(SamplingError::Nothing));
        let mut infinite = TokenSampler::new(config(1.0, None, None), 0);
        assert_eq!(infinite.pick(&[0.0, f32::INFINITY], &mut Vec::new()), Ok(1));
    }

    #[test]
    fn frequencies_are_the_probabilities() {
        let logits = [0.1f32.ln(), 0.2f32.ln(), 0.3f32.ln(), 0.4f32.ln()];
        for (config, expected) in [
            (config(1.0, None, None), [0.1, 0.2, 0.3, 0.4]),
            (config(0.5, None, None), [1.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0, 16.0 / 30.0]),
            (config(1.0, Some(2), None), [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]),
            (config(1.0, None, Some(0.6)), [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]),
            (config(1.0, None, Some(0.39)), [0.0, 0.0, 0.0, 1.0]),
            (config(1.0, Some(3), Some(0.7)), [0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0]),
            (config(1.0, Some(99), Some(1.0)), [0.1, 0.2, 0.3, 0.4]),
        ] {
            for (found, expected) in frequencies(config, &logits).into_iter().zip(expected) {
                assert!((found - expected).abs() < 0.02, "{config:?}: {found} instead of {expected}");
                assert!(expected > 0.0 || found == 0.0, "{config:?} let a removed token through");
            }
        }
    }

    #[test]
    fn ties_at_the_edge_go_to_the_lowest_id() {
        let frequencies = frequencies(config(1.0, Some(2), None), &[1.0, 1.0, 1.0, 1.0]);
        assert!(frequencies[0] > 0.4 && frequencies[1] > 0.4 && frequencies[2] == 0.0);
    }

    #[test]
    fn what_was_there_before_is_less_likely() {
        let mut logits = [2.0, -2.0, 1.0, -1.0, 0.0];
        penalize(&mut logits, &[0, 1, 4, 9].into(), 4.0);
        assert_eq!(logits, [0.5, -8.0, 1.0, -1.0, 0.0]);
    }

    #[test]
    fn rows_and_seeds_have_their_own_numbers() {
        let draw = |seed, row| {
            let mut sampler =
                TokenSampler::new(SamplingConfig { temperature: 1.0, seed, ..Default::default() }, row);
            (0..20).map(|_| sampler.pick(&[0.0; 50], &mut Vec::new()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
        assert_ne!(draw(1, 0), draw(2, 0));
        assert_ne!(draw(0, 1), draw(1, 0));
    }
}
