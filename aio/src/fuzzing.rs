//! What the fuzz targets run on arbitrary bytes. Not part of the interface.
//!
//! `fuzz/` feeds these functions from a fuzzer; the crate's own tests feed them from proptest, so that they run on a
//! stable compiler too.

use crate::engine::{Alignment, Cursor, Route, check_segments};
use crate::{FileId, OpKind, Segment};

/// Cuts an arbitrary request into pieces: they cover every segment exactly once, in order and in bounds, and what moves
/// directly is aligned.
///
/// # Panics
/// If they do not.
pub fn request_split(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let kind = if bytes.next() & 1 == 0 { OpKind::Read } else { OpKind::Write };
    let alignment = |bytes: &mut Bytes<'_>| Alignment {
        offset: 1 << (bytes.next() % 17),
        memory: 1 << (bytes.next() % 13),
    };
    let base = bytes.number() as usize % (1 << 40);
    let block_bytes = bytes.number() as usize % (1 << 30) + 1;
    let buf_len = bytes.number() as usize % (1 << 24);
    let (mut segments, mut alignments) = (Vec::new(), Vec::new());
    while segments.len() < 16 && !bytes.0.is_empty() {
        let (offset, start, len) = (bytes.number(), bytes.number() as usize, bytes.number() as usize);
        segments.push(Segment { file: FileId(0), offset, start, len });
        alignments.push(alignment(&mut bytes));
    }
    let checked = check_segments("splitting", kind, buf_len, &segments, |_| Ok(()));
    if checked.map(|units: Vec<()>| units.len()).is_err() {
        return;
    }
    let total: usize = segments.iter().map(|s| s.len).sum();
    assert!(kind == OpKind::Write || total <= buf_len, "a read that fits does not overlap");
    check_pieces(&segments, &alignments, base, block_bytes);
}

fn check_pieces(segments: &[Segment], alignments: &[Alignment], base: usize, block_bytes: usize) {
    let mut moved = vec![0usize; segments.len()];
    let mut cursor = Cursor::default();
    let mut last = 0;
    while let Some(piece) = cursor.next(segments, alignments, |_| true, base, block_bytes) {
        let (whole, align) = (&segments[piece.segment], alignments[piece.segment]);
        let done = &mut moved[piece.segment];
        assert!(piece.segment >= last, "in order");
        assert!(piece.len > 0 && piece.len <= whole.len - *done, "in bounds");
        assert_eq!(piece.offset, whole.offset + *done as u64, "where the last one ended");
        assert_eq!(piece.start, whole.start + *done, "where the last one ended in memory");
        (last, *done) = (piece.segment, *done + piece.len);
        let unit = align.offset as u64;
        let is_aligned = piece.offset.is_multiple_of(unit) && (piece.len as u64).is_multiple_of(unit);
        match piece.route {
            Route::Edge => {
                let first = piece.offset / unit;
                assert_eq!(first, (piece.offset + piece.len as u64 - 1) / unit, "an edge is inside one unit");
                assert!(!is_aligned, "a whole unit goes directly");
            }
            Route::Direct | Route::Bounce => {
                assert!(is_aligned && piece.len <= block_bytes.max(align.offset));
                let address_fits = (base + piece.start).is_multiple_of(align.memory);
                assert_eq!(address_fits, piece.route == Route::Direct);
            }
            Route::Sync => panic!("a transfer has no sync"),
        }
        // Small blocks over large segments: the first pieces tell as much as all of them.
        if block_bytes.max(align.offset) < 64 && *done > 1 << 16 {
            return;
        }
    }
    assert!(moved.iter().zip(segments).all(|(moved, segment)| *moved == segment.len), "every byte, once");
}

/// Takes values from the front; zeros when there is nothing left.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// A number of as many bytes as its first byte says, so that small ones are as likely as large ones.
    fn number(&mut self) -> u64 {
        let count = self.next() % 9;
        (0..count).fold(0, |number, _| number << 8 | u64::from(self.next()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn request_split(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            super::request_split(&bytes);
        }

        /// Numbers that are likely to pass the checks: small ones, each with the byte that says how long it is.
        #[test]
        fn request_split_of_plausible_requests(
            kind: u8,
            numbers in proptest::collection::vec((0u8..4, any::<[u8; 3]>(), any::<[u8; 2]>()), 6..60),
        ) {
            let mut bytes = vec![kind];
            for (i, (count, number, alignment)) in numbers.into_iter().enumerate() {
                bytes.push(count);
                bytes.extend(&number[..count as usize]);
                if i >= 3 && i % 3 == 2 {
                    bytes.extend(alignment);
                }
            }
            super::request_split(&bytes);
        }
    }
}
