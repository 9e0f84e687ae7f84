//! Which path a stripe lies on, in proportion to the speed of the paths.
//!
//! A *cycle* is a short table of paths that repeats for ever. Stripe `s` of a volume is entry `s mod L` of the cycle, and
//! the stripes of one path follow one another in its file:
//!
//! ```text
//! weights 1 : 1     cycle 0 1                weights 3 : 2     cycle 0 1 0 1 0
//! stripe  0   1   2   3   …                  stripe  0   1   2   3   4   5   6   …
//! path    0   1   0   1                      path    0   1   0   1   0   0   1
//! place   #0  #0  #1  #1                     place   #0  #0  #1  #1  #2  #3  #2
//! ```
//! Rates become whole shares of a cycle by the method of largest remainders; the shares are laid out by smooth weighted
//! round robin, so that a path's entries are as far apart as they can be and a run of stripes keeps all paths busy. The
//! cycle is the *shortest* one in which no path has more than 2% beyond its proportion, so paths of nearly the same speed
//! share equally; if there is none, it is the best of at most 64 entries.
//!
//! A path has at least one entry. One that is more than 64 times slower than the others together holds them up; it
//! is better left out.

use crate::TierError;
use smallvec::SmallVec;
use std::path::{Path, PathBuf};

/// Entries of a cycle, if there are not more paths than that.
pub(crate) const CYCLE_MAX: usize = 64;

/// Paths of a volume at most: a cycle's entry is a byte.
pub(crate) const PATHS_MAX: usize = 256;

/// How far the busiest path of a cycle may be beyond its proportion.
const EXCESS_MAX: f64 = 1.02;

/// Directories in their order, and how much of a volume each of them takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Striping {
    dirs: Vec<PathBuf>,
    cycle: Cycle,
}

/// Stripe → path and place in that path's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cycle {
    /// The path of every entry.
    table: Vec<u8>,
    /// How many earlier entries of the table have the same path.
    ranks: Vec<u64>,
    /// Entries of each path.
    shares: Vec<u64>,
}

impl Striping {
    /// Every directory takes the same.
    ///
    /// # Panics
    /// If there are no directories, or more than 256.
    pub fn equal(dirs: &[PathBuf]) -> Self {
        Self { dirs: dirs.to_vec(), cycle: Cycle::equal(dirs.len()) }
    }

    /// Every directory takes stripes in proportion to its weight, for example bytes per second.
    ///
    /// # Errors
    /// There is not one positive, finite weight for each directory, or there are too many directories.
    pub fn weighted(dirs: &[PathBuf], weights: &[f64]) -> Result<Self, TierError> {
        let refused = |detail: String| Err(TierError::Striping { detail });
        if dirs.len() != weights.len() {
            return refused(format!("there are {} paths and {} weights", dirs.len(), weights.len()));
        }
        if dirs.is_empty() || dirs.len() > PATHS_MAX {
            return refused(format!("a volume has 1 to {PATHS_MAX} paths, not {}", dirs.len()));
        }
        if let Some((dir, weight)) = dirs.iter().zip(weights).find(|(_, w)| !(w.is_finite() && **w > 0.0)) {
            return refused(format!(
                "the weight of {} is {weight}; weights are positive, finite numbers",
                dir.display()
            ));
        }
        Ok(Self { dirs: dirs.to_vec(), cycle: Cycle::weighted(weights) })
    }

    pub(crate) fn with_cycle(dirs: &[PathBuf], cycle: Cycle) -> Self {
        assert_eq!(dirs.len(), cycle.paths(), "a cycle is made for its paths");
        Self { dirs: dirs.to_vec(), cycle }
    }

    /// The directories.
    pub fn dirs(&self) -> &[PathBuf] {
        &self.dirs
    }

    /// How many stripes of a cycle each directory takes.
    pub fn shares(&self) -> &[u64] {
        &self.cycle.shares
    }

    pub(crate) fn cycle(&self) -> &Cycle {
        &self.cycle
    }

    pub(crate) fn first(&self) -> &Path {
        &self.dirs[0]
    }
}

impl Cycle {
    pub(crate) fn equal(paths: usize) -> Self {
        assert!((1..=PATHS_MAX).contains(&paths), "a volume has 1 to {PATHS_MAX} paths, not {paths}");
        Self::of_table((0..paths).map(|path| path as u8).collect(), paths)
    }

    fn weighted(weights: &[f64]) -> Self {
        // Scaled first: a sum of large rates stays finite.
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let scaled: Vec<f64> = weights.iter().map(|w| (w / largest).max(f64::MIN_POSITIVE)).collect();
        let total: f64 = scaled.iter().sum();
        let parts: Vec<f64> = scaled.iter().map(|w| w / total).collect();
        let mut best: Option<(f64, Vec<u64>)> = None;
        for entries in parts.len()..=CYCLE_MAX.max(parts.len()) {
            let shares = apportion(&parts, entries);
            let excess = shares.iter().zip(&parts).map(|(&s, part)| s as f64 / entries as f64 / part);
            let excess = excess.fold(0.0, f64::max);
            if best.as_ref().is_none_or(|(least, _)| excess < *least) {
                best = Some((excess, shares));
            }
            if excess <= EXCESS_MAX {
                break;
            }
        }
        let (_, shares) = best.expect("there is a cycle of as many entries as paths");
        Self::of_table(interleave(&shares), parts.len())
    }

    /// A cycle as a file's header has it; `None` if it is none for `paths` paths.
    pub(crate) fn from_table(table: &[u8], paths: usize) -> Option<Self> {
        let is_path = |entry: &u8| usize::from(*entry) < paths;
        if table.len() > CYCLE_MAX.max(paths) || !table.iter().all(is_path) {
            return None;
        }
        Some(Self::of_table(table.to_vec(), paths)).filter(|cycle| cycle.shares.iter().all(|&s| s > 0))
    }

    fn of_table(table: Vec<u8>, paths: usize) -> Self {
        let mut shares = vec![0; paths];
        let mut ranks = Vec::with_capacity(table.len());
        for &path in &table {
            ranks.push(shares[usize::from(path)]);
            shares[usize::from(path)] += 1;
        }
        Self { table, ranks, shares }
    }

    pub(crate) fn table(&self) -> &[u8] {
        &self.table
    }

    pub(crate) fn paths(&self) -> usize {
        self.shares.len()
    }

    /// The path of a stripe, and its place among the stripes of that path.
    pub(crate) fn locate(&self, stripe: u64) -> (usize, u64) {
        let entries = self.table.len() as u64;
        let (round, entry) = (stripe / entries, (stripe % entries) as usize);
        let path = usize::from(self.table[entry]);
        (path, round * self.shares[path] + self.ranks[entry])
    }

    /// The stripe at a place among the stripes of a path.
    pub(crate) fn stripe(&self, path: usize, place: u64) -> u64 {
        let (round, rank) = (place / self.shares[path], place % self.shares[path]);
        let mut entries = self.table.iter().zip(&self.ranks);
        let entry = entries.position(|(&entry, &of)| usize::from(entry) == path && of == rank);
        round * self.table.len() as u64 + entry.expect("a path has an entry of every rank") as u64
    }

    /// How many of the first `stripes` stripes lie on `path`.
    pub(crate) fn stripes_on(&self, path: usize, stripes: u64) -> u64 {
        let entries = self.table.len() as u64;
        let rest = &self.table[..(stripes % entries) as usize];
        let in_rest = rest.iter().filter(|&&entry| usize::from(entry) == path).count() as u64;
        stripes / entries * self.shares[path] + in_rest
    }
}

/// Whole shares of `entries`, at least one each, by the method of largest remainders. Earlier paths win ties.
fn apportion(parts: &[f64], entries: usize) -> Vec<u64> {
    let quotas: Vec<f64> = parts.iter().map(|part| part * entries as f64).collect();
    let mut shares: Vec<u64> = quotas.iter().map(|quota| (*quota as u64).max(1)).collect();
    loop {
        let total: u64 = shares.iter().sum();
        let owed = |path: usize| quotas[path] - shares[path] as f64;
        let order = |a: &usize, b: &usize| owed(*a).total_cmp(&owed(*b));
        let paths = 0..parts.len();
        match total.cmp(&(entries as u64)) {
            std::cmp::Ordering::Equal => return shares,
            std::cmp::Ordering::Less => {
                let path = paths.rev().max_by(order).expect("there is a path");
                shares[path] += 1;
            }
            std::cmp::Ordering::Greater => {
                let path = paths.filter(|&p| shares[p] > 1).min_by(order);
                shares[path.expect("as many entries as paths leave room for one each")] -= 1;
            }
        }
    }
}

/// Smooth weighted round robin: every path gains its share at every entry, and the one that has gained most pays the total.
fn interleave(shares: &[u64]) -> Vec<u8> {
    let total: u64 = shares.iter().sum();
    let mut gained: SmallVec<[i64; 8]> = shares.iter().map(|_| 0).collect();
    let mut table = Vec::with_capacity(total as usize);
    for _ in 0..total {
        gained.iter_mut().zip(shares).for_each(|(gain, &share)| *gain += share as i64);
        let path = (0..shares.len()).rev().max_by_key(|&path| gained[path]).expect("there is a path");
        gained[path] -= total as i64;
        table.push(path as u8);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cycle(weights: &[f64]) -> Cycle {
        let dirs: Vec<PathBuf> = weights.iter().map(|w| PathBuf::from(format!("/{w}"))).collect();
        Striping::weighted(&dirs, weights).unwrap().cycle
    }

    #[test]
    fn cycles_are_short_and_alternate() {
        for (weights, table) in [
            (&[7e9][..], &[0][..]),
            (&[1.0, 1.0], &[0, 1]),
            (&[3e9, 3.05e9], &[0, 1]),
            (&[2.0, 1.0], &[0, 1, 0]),
            (&[3.0, 2.0], &[0, 1, 0, 1, 0]),
            (&[7.0, 3.5, 3.5], &[0, 1, 2, 0]),
            (&[f64::MAX, f64::MAX], &[0, 1]),
        ] {
            assert_eq!(cycle(weights).table(), table, "{weights:?}");
        }
        assert_eq!(cycle(&[1e-300, 1e300]).shares, [1, 63]);
    }

    #[test]
    fn equal_weights_are_plain_round_robin() {
        for paths in [1, 2, 3, 7, 64, 65, 256] {
            let even = Cycle::equal(paths);
            assert_eq!(cycle(&vec![2.5e9; paths]), even);
            for stripe in [0, 1, paths as u64 - 1, paths as u64, 1000, u64::MAX >> 20] {
                let expected = ((stripe % paths as u64) as usize, stripe / paths as u64);
                assert_eq!(even.locate(stripe), expected, "stripe {stripe} of {paths} paths");
            }
        }
    }

    #[test]
    fn weights_that_cannot_work_are_refused() {
        let dirs = ["/a", "/b"].map(PathBuf::from);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let text = Striping::weighted(&dirs, &[1.0, bad]).unwrap_err().to_string();
            assert!(text.contains("/b") && text.contains("positive, finite"), "{text}");
        }
        let text = Striping::weighted(&dirs, &[1.0]).unwrap_err().to_string();
        assert!(text.contains("2 paths and 1 weights"), "{text}");
        assert!(Striping::weighted(&[], &[]).is_err());
        assert!(Striping::weighted(&vec![PathBuf::from("/a"); 257], &[1.0; 257]).is_err());
    }

    #[test]
    fn a_table_of_another_layout_is_no_cycle() {
        let good = cycle(&[3.0, 2.0]);
        assert_eq!(Cycle::from_table(good.table(), 2), Some(good));
        for (table, paths) in [(&[][..], 1), (&[0, 2], 2), (&[0, 0], 2), (&[0; 65], 1)] {
            assert_eq!(Cycle::from_table(table, paths), None, "{table:?} of {paths}");
        }
    }

    proptest! {
        /// Stripe ↔ (path, place) is a bijection: the first N stripes fill the first places of every path without a gap.
        #[test]
        fn places_are_a_bijection(
            weights in prop::collection::vec(1e-3..1e3, 1..9),
            stripes in 1u64..500,
        ) {
            let cycle = cycle(&weights);
            let mut next = vec![0; weights.len()];
            for stripe in 0..stripes {
                let (path, place) = cycle.locate(stripe);
                assert_eq!(cycle.stripe(path, place), stripe);
                prop_assert_eq!(place, next[path], "stripe {}", stripe);
                next[path] += 1;
            }
            for (path, &count) in next.iter().enumerate() {
                prop_assert_eq!(cycle.stripes_on(path, stripes), count);
            }
        }

        /// No path is more than a cycle's entry away from its proportion, whatever the length of the volume; paths too slow
        /// for one entry in 64 have that entry.
        #[test]
        fn shares_follow_the_weights(
            weights in prop::collection::vec(1.0..8.0, 1..5),
            stripes in 1u64..100_000,
        ) {
            let cycle = cycle(&weights);
            let total: f64 = weights.iter().sum();
            prop_assert!(cycle.table.len() <= CYCLE_MAX);
            for (path, weight) in weights.iter().enumerate() {
                let (wanted, entries) = (weight / total, cycle.table.len() as f64);
                // Short cycles are only taken when no path has 2% more than its part; the others' excess is what one can lack.
                let slack = (1.0 / CYCLE_MAX as f64).max((EXCESS_MAX - 1.0) * wanted.max(1.0 - wanted));
                let share = cycle.shares[path] as f64 / entries;
                prop_assert!((share - wanted).abs() <= slack + 1e-9, "{share} instead of {wanted}");
                let found = cycle.stripes_on(path, stripes) as f64;
                let apart = (found - stripes as f64 * share).abs();
                prop_assert!(apart <= weights.len() as f64, "{found} of {stripes}, share {share}");
            }
        }
    }
}
