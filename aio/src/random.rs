//! A small seeded generator for simulated disks and injected faults: the same seed, the same run, on every machine.

/// SplitMix64 (Steele, Lea and Flood 2014): one addition and a mix per number, no bad seeds.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0..bound`; 0 when `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// True once in `n` on average; never when `n` is 0.
    pub fn one_in(&mut self, n: u32) -> bool {
        // Throws the die in any case: switching one chance off must not change what the others hit.
        self.below(u64::from(n.max(1))) == 0 && n > 0
    }
}
