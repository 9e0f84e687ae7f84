//! Latencies in a fixed number of logarithmic buckets, so that recording never allocates and a run of any length costs
//! the same memory.
//!
//! A value below 2⁸ ns has a bucket of its own; above, every octave is cut into 2⁷ buckets, so a quantile is at most
//! 1/128 (0.8 %) above the true value and never below it. Values beyond 2⁴¹ ns (37 minutes) count as that.

const SUB_BITS: u32 = 7;
const EXACT: u64 = 1 << (SUB_BITS + 1);
const VALUE_BITS: u32 = 41;
const BUCKETS: usize = bucket_of((1 << VALUE_BITS) - 1) + 1;

/// Counts of latencies in nanoseconds.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// No values.
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into_boxed_slice(), count: 0, sum: 0, max: 0 }
    }

    /// Counts one value.
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket_of(ns.min((1 << VALUE_BITS) - 1))] += 1;
        self.count += 1;
        self.sum += u128::from(ns);
        self.max = self.max.max(ns);
    }

    /// Forgets every value.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        (self.count, self.sum, self.max) = (0, 0, 0);
    }

    /// Adds another's values.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many values there are.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The largest value, exactly.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The mean, exactly; 0 without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The smallest recorded value that at least this share of the values does not exceed, rounded up to the end of its
    /// bucket; 0 without values.
    pub fn quantile(&self, share: f64) -> u64 {
        let rank = ((self.count as f64 * share).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return end_of(bucket).min(self.max);
            }
        }
        self.max
    }

    /// Counts per half octave as (first value in ns, count), from the first to the last that has any: for a chart.
    pub fn bars(&self) -> Vec<(u64, u64)> {
        let mut bars: Vec<(u64, u64)> = Vec::new();
        for (bucket, &count) in self.counts.iter().enumerate() {
            let half = half_octave(end_of(bucket));
            match bars.last_mut() {
                Some((start, total)) if *start == half => *total += count,
                _ => bars.push((half, count)),
            }
        }
        let used = |bar: &(u64, u64)| bar.1 > 0;
        let (first, last) = (bars.iter().position(used), bars.iter().rposition(used));
        first.zip(last).map_or_else(Vec::new, |(first, last)| bars[first..=last].to_vec())
    }
}

/// The largest 2ⁿ or 1.5·2ⁿ that is at most `value`.
fn half_octave(value: u64) -> u64 {
    if value < 2 {
        return value;
    }
    let octave = 1 << value.ilog2();
    if value >= octave + octave / 2 { octave + octave / 2 } else { octave }
}

const fn bucket_of(value: u64) -> usize {
    if value < EXACT {
        return value as usize;
    }
    let shift = value.ilog2() - SUB_BITS;
    ((shift as u64) << SUB_BITS) as usize + (value >> shift) as usize
}

/// The last value of a bucket.
fn end_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let shift = (bucket >> SUB_BITS) - 1;
    let mantissa = bucket - (shift << SUB_BITS);
    ((mantissa + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_each_other_without_gap() {
        for bucket in 0..BUCKETS - 1 {
            assert_eq!(bucket_of(end_of(bucket)), bucket);
            assert_eq!(bucket_of(end_of(bucket) + 1), bucket + 1);
        }
    }

    #[test]
    fn an_empty_one_has_no_figures() {
        let empty = Histogram::new();
        assert_eq!((empty.quantile(0.99), empty.max(), empty.mean()), (0, 0, 0.0));
        assert!(empty.bars().is_empty());
    }

    proptest! {
        #[test]
        fn quantiles_are_within_their_bound(
            mut values in proptest::collection::vec(0u64..1 << 36, 1..400), share in 0.0f64..=1.0,
        ) {
            let mut histogram = Histogram::new();
            values.iter().for_each(|&value| histogram.record(value));
            values.sort_unstable();
            let rank = ((values.len() as f64 * share).ceil() as usize).clamp(1, values.len());
            let exact = values[rank - 1];
            let found = histogram.quantile(share);
            prop_assert!(found >= exact && found <= exact + exact / 128, "{found} for {exact}");
            prop_assert_eq!(histogram.max(), *values.last().unwrap());
            let mean = values.iter().sum::<u64>() as f64 / values.len() as f64;
            prop_assert!((histogram.mean() - mean).abs() <= mean * 1e-12);
            prop_assert_eq!(histogram.bars().iter().map(|bar| bar.1).sum::<u64>(), values.len() as u64);
        }

        #[test]
        fn merging_is_recording_both(a in proptest::collection::vec(0u64..1 << 45, 0..50),
                                     b in proptest::collection::vec(0u64..1 << 45, 0..50)) {
            let of = |values: &[u64]| {
                let mut histogram = Histogram::new();
                values.iter().for_each(|&value| histogram.record(value));
                histogram
            };
            let mut merged = of(&a);
            merged.merge(&of(&b));
            let all = of(&[a, b].concat());
            prop_assert_eq!(merged.counts, all.counts);
            prop_assert_eq!((merged.count, merged.sum, merged.max), (all.count, all.sum, all.max));
        }
    }
}
