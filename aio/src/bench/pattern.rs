//! What stands in the files: every page's bytes follow from the run's seed, the file's number and the page's number, so
//! a read can be checked whatever the block size was, and a page that landed in the wrong place is noticed.

/// Bytes whose content is determined together.
pub const PAGE_BYTES: usize = 4096;

/// Whose content: the seed and the number of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    pub seed: u64,
    pub file: u64,
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Key {
    /// Fills whole pages, the first of which is page `first` of the file.
    pub fn fill(self, bytes: &mut [u8], first: u64) {
        for (page, chunk) in (first..).zip(bytes.chunks_exact_mut(PAGE_BYTES)) {
            let start = self.start_of(page);
            for (index, word) in (0u64..).zip(chunk.chunks_exact_mut(8)) {
                word.copy_from_slice(&word_at(start, index).to_le_bytes());
            }
        }
    }

    /// The offset in `bytes` of the first byte that is not as [`fill`](Self::fill) leaves it.
    pub fn mismatch(self, bytes: &[u8], first: u64) -> Option<usize> {
        let mut pages = (first..).zip(bytes.chunks_exact(PAGE_BYTES)).enumerate();
        pages.find_map(|(index, (page, chunk))| {
            let start = self.start_of(page);
            let differs = |(word, bytes): (u64, &[u8])| *bytes != word_at(start, word).to_le_bytes();
            let words = || (0u64..).zip(chunk.chunks_exact(8));
            // One pass without a branch per word; the place is looked for only when there is one.
            if !words().fold(false, |any, pair| any | differs(pair)) {
                return None;
            }
            let (word, bytes) = words().find(|&pair| differs(pair))?;
            let wanted = word_at(start, word).to_le_bytes();
            let byte = bytes.iter().zip(wanted).position(|(have, want)| *have != want)?;
            Some(index * PAGE_BYTES + word as usize * 8 + byte)
        })
    }

    fn start_of(self, page: u64) -> u64 {
        scramble(scramble(scramble(self.seed ^ STEP) ^ self.file) ^ page)
    }
}

/// Cheap enough to vectorize and without repetitions that a drive or file system could compress away.
fn word_at(start: u64, index: u64) -> u64 {
    let word = start.wrapping_add(index.wrapping_mul(STEP));
    word ^ (word >> 29)
}

/// The finalizer of splitmix64.
fn scramble(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found_where_it_is() {
        let key = Key { seed: 7, file: 1 };
        let mut bytes = vec![0; 4 * PAGE_BYTES];
        key.fill(&mut bytes, 10);
        assert_eq!(key.mismatch(&bytes, 10), None);
        assert_eq!(key.mismatch(&bytes[PAGE_BYTES..], 11), None, "pages do not depend on the block");
        bytes[2 * PAGE_BYTES + 77] ^= 1;
        assert_eq!(key.mismatch(&bytes, 10), Some(2 * PAGE_BYTES + 77));
    }

    #[test]
    fn seed_file_and_page_all_count() {
        let mut bytes = vec![0; PAGE_BYTES];
        Key { seed: 1, file: 2 }.fill(&mut bytes, 3);
        for (seed, file, page) in [(0, 2, 3), (1, 0, 3), (1, 2, 4)] {
            assert!(Key { seed, file }.mismatch(&bytes, page).is_some());
        }
    }
}
