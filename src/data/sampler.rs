//! Which samples a step takes, as a pure function of the step.
//!
//! The sample stream is the concatenation of all epochs; step `k` with `n` samples takes positions `k·n .. (k+1)·n`. A step at
//! the end of an epoch therefore completes itself from the beginning of the next: no step is short and no sample is dropped.
//! Nothing but the step number has to be saved to resume.
//!
//! Shuffling is a keyed bijection of `0..len` per epoch, not a shuffled list: a Feistel network over the smallest even number of
//! bits that holds `len`, walked until it lands below `len` (Black and Rogaway, "Ciphers with arbitrary finite domains"). It costs
//! no memory and gives any position without the ones before it. A Fisher–Yates list would take eight bytes per sample again and
//! O(len) at every resume.

const ROUNDS: u64 = 6;

/// The order of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    seed: u64,
    samples: u64,
    per_step: u64,
    shuffle: bool,
}

impl Sampler {
    /// An order over `samples` samples, `per_step` of them a step; `shuffle` is per epoch.
    ///
    /// # Panics
    /// If either number is zero.
    pub fn new(samples: usize, per_step: usize, seed: u64, shuffle: bool) -> Self {
        assert!(samples > 0 && per_step > 0, "there is data, and a step takes some of it");
        Self { seed, samples: samples as u64, per_step: per_step as u64, shuffle }
    }

    /// The samples of the step with index `step`, counted from zero.
    pub fn batch_indices(&self, step: u64) -> Vec<usize> {
        let first = step * self.per_step;
        (first..first + self.per_step).map(|position| self.at(position)).collect()
    }

    /// Epoch and position in it where the step with index `step` begins.
    pub fn position(&self, step: u64) -> (u64, u64) {
        let first = step * self.per_step;
        (first / self.samples, first % self.samples)
    }

    fn at(&self, position: u64) -> usize {
        let (epoch, index) = (position / self.samples, position % self.samples);
        let sample = if self.shuffle { permute(index, self.samples, mix(self.seed, epoch)) } else { index };
        sample as usize
    }
}

/// The image of `index` under the bijection of `0..len` that `key` selects.
fn permute(index: u64, len: u64, key: u64) -> u64 {
    let half = (64 - (len - 1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key.wrapping_add(round), right) & mask));
        }
        value = (left << half) | right;
        // The domain is below 4·len, so this takes fewer than four turns on average.
        if value < len {
            return value;
        }
    }
}

/// SplitMix64's finaliser over two words.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_add(0xD1B5_4A32_D192_ED03);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn epoch(sampler: &Sampler, samples: usize) -> Vec<usize> {
        (0..samples as u64).map(|p| sampler.at(p)).collect()
    }

    proptest! {
        #[test]
        fn every_epoch_is_a_permutation(samples in 1usize..3000, seed: u64, which in 0u64..5) {
            let sampler = Sampler::new(samples, 1, seed, true);
            let first = which * samples as u64;
            let mut seen: Vec<usize> = (first..first + samples as u64).map(|p| sampler.at(p)).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..samples));
        }

        #[test]
        fn steps_cut_one_stream(samples in 1usize..50, per_step in 1usize..70, seed: u64) {
            let sampler = Sampler::new(samples, per_step, seed, true);
            let steps: Vec<usize> = (0..10).flat_map(|s| sampler.batch_indices(s)).collect();
            let stream: Vec<usize> = (0..10 * per_step as u64).map(|p| sampler.at(p)).collect();
            prop_assert_eq!(steps, stream);
        }
    }

    #[test]
    fn file_order_wraps_into_the_next_epoch() {
        let sampler = Sampler::new(5, 3, 9, false);
        let steps: Vec<_> = (0..4).map(|s| sampler.batch_indices(s)).collect();
        assert_eq!(steps, [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]);
        assert_eq!(sampler.position(3), (1, 4));
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let orders: Vec<_> = (0..3).map(|seed| epoch(&Sampler::new(100, 1, seed, true), 300)).collect();
        assert_ne!(orders[0][..100], orders[0][100..200]);
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[1], orders[2]);
    }

    #[test]
    fn the_order_is_frozen() {
        // A changed order would break resuming: these numbers are part of the format.
        assert_eq!(Sampler::new(10, 10, 0, true).batch_indices(0), FROZEN);
    }
    const FROZEN: [usize; 10] = [6, 1, 0, 9, 5, 7, 8, 3, 2, 4];

    #[test]
    fn neighbours_do_not_stay_together() {
        let order = epoch(&Sampler::new(10_000, 1, 1, true), 10_000);
        let kept = order.windows(2).filter(|w| w[1] == w[0] + 1).count();
        assert!(kept < 10, "{kept} of 10000 neighbours kept their place");
    }
}
