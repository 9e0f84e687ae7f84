//! Cuts a request's segments into pieces that one operation each can move.
//!
//! A piece is one contiguous range of one file, and its [`Route`] says how it moves:
//!
//! ```text
//! file     |  block  |  block  |  block  |  block  |      alignment units
//! segment       [====|=========|=========|===]
//! pieces         edge  direct ............  edge
//! ```
//!
//! Whole alignment units go *direct*, without a copy, or through a *bounce* buffer when only the memory address is
//! unsuitable. What is left at either end, always less than one unit, is an *edge* and goes through the page
//! cache. **Why the page cache and not a read-modify-write of our own:** an edge shares its unit with bytes that
//! belong to somebody else, and the file may end inside it. The kernel already merges adjacent small writes
//! under the inode's lock, keeps the exact file length and writes a dirty page back before direct I/O touches it;
//! doing that here would take a lock per file, a rule for the file's tail, and still race with other processes.
//! Because a unit is never smaller than a page, an edge never shares a page with a direct transfer that is in
//! flight (the two would overlap, which the engine contract excludes).

use super::Segment;

/// Alignment that direct I/O on a file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of offsets and lengths, in bytes: a power of two; 1 when the file is not opened for direct I/O.
    pub offset: usize,
    /// Of memory addresses, in bytes: a power of two.
    pub memory: usize,
}

impl Alignment {
    /// Of files that go through the page cache.
    pub const NONE: Self = Self { offset: 1, memory: 1 };
}

/// How a piece moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Straight between the file and the request's buffer.
    Direct,
    /// Direct I/O through an engine buffer.
    Bounce,
    /// Less than one alignment unit, through the page cache.
    Edge,
    /// No bytes: an `fdatasync` of the file.
    Sync,
}

/// One operation's share of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index of the segment.
    pub segment: usize,
    /// Offset in the file.
    pub offset: u64,
    /// First byte in the request's buffer.
    pub start: usize,
    /// Bytes.
    pub len: usize,
    /// How it moves.
    pub route: Route,
}

/// Walks the pieces of a request in order, all of them or those on one device.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cursor {
    /// Only segments on this device.
    device: Option<u64>,
    segment: usize,
    moved: usize,
}

impl Cursor {
    /// Walks the pieces on one device.
    pub fn on(device: u64) -> Self {
        Self { device: Some(device), ..Self::default() }
    }

    /// The device that it keeps to.
    pub fn device(&self) -> Option<u64> {
        self.device
    }

    /// The one piece of an `fdatasync`.
    pub fn next_sync(&mut self) -> Option<Piece> {
        if self.segment > 0 {
            return None;
        }
        self.segment = 1;
        Some(Piece { segment: 0, offset: 0, start: 0, len: 0, route: Route::Sync })
    }

    /// The next piece. `alignments[i]` belongs to `segments[i]`, segments that are not `included` are passed over;
    /// `base` is the address of the buffer.
    pub fn next(
        &mut self,
        segments: &[Segment],
        alignments: &[Alignment],
        included: impl Fn(usize) -> bool,
        base: usize,
        block_bytes: usize,
    ) -> Option<Piece> {
        while segments.get(self.segment)?.len == self.moved || !included(self.segment) {
            self.segment += 1;
            self.moved = 0;
        }
        let segment = &segments[self.segment];
        let align = alignments[self.segment];
        let left = segment.len - self.moved;
        let offset = segment.offset + self.moved as u64;
        let start = segment.start + self.moved;
        // The remainder is less than a usize alignment, so the cast is exact.
        let past_unit = (offset % align.offset as u64) as usize;
        let (len, route) = if past_unit != 0 || left < align.offset {
            (left.min(align.offset - past_unit), Route::Edge)
        } else {
            let block = (block_bytes - block_bytes % align.offset).max(align.offset);
            let route =
                if (base + start).is_multiple_of(align.memory) { Route::Direct } else { Route::Bounce };
            ((left - left % align.offset).min(block), route)
        };
        self.moved += len;
        Some(Piece { segment: self.segment, offset, start, len, route })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileId;
    use proptest::prelude::*;

    fn pieces(segments: &[Segment], align: Alignment, base: usize, block: usize) -> Vec<Piece> {
        let alignments = vec![align; segments.len()];
        let mut cursor = Cursor::default();
        std::iter::from_fn(|| cursor.next(segments, &alignments, |_| true, base, block)).collect()
    }

    fn segment(offset: u64, start: usize, len: usize) -> Segment {
        Segment { file: FileId(0), offset, start, len }
    }

    const DISK: Alignment = Alignment { offset: 4096, memory: 512 };

    #[test]
    fn aligned_ranges_are_cut_into_blocks() {
        let got = pieces(&[segment(4096, 0, 10 * 4096)], DISK, 0, 4 * 4096);
        assert_eq!(got.iter().map(|p| p.len / 4096).collect::<Vec<_>>(), [4, 4, 2]);
        assert!(got.iter().all(|p| p.route == Route::Direct));
    }

    #[test]
    fn ends_are_edges_and_the_middle_follows_the_address() {
        let routes = |start| -> Vec<(usize, Route)> {
            pieces(&[segment(4095, start, 8194)], DISK, 0, 1 << 20).iter().map(|p| (p.len, p.route)).collect()
        };
        assert_eq!(routes(511), [(1, Route::Edge), (8192, Route::Direct), (1, Route::Edge)]);
        assert_eq!(routes(0), [(1, Route::Edge), (8192, Route::Bounce), (1, Route::Edge)]);
    }

    #[test]
    fn empty_segments_have_no_pieces() {
        let got = pieces(&[segment(0, 0, 0), segment(0, 0, 5), segment(9, 5, 0)], Alignment::NONE, 0, 100);
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].segment, got[0].len), (1, 5));
    }

    proptest! {
        #[test]
        fn pieces_tile_the_segments(
            ranges in proptest::collection::vec((0u64..100_000, 0usize..50_000), 1..5),
            base in 0usize..4096,
            align_log2 in 0u32..13,
            block in 1usize..30_000,
        ) {
            let align = Alignment { offset: 1 << align_log2, memory: 1 << (align_log2 / 2) };
            let mut start = 0;
            let segments: Vec<Segment> = ranges
                .iter()
                .map(|&(offset, len)| { start += len; segment(offset, start - len, len) })
                .collect();
            let mut moved = vec![0usize; segments.len()];
            for piece in pieces(&segments, align, base, block) {
                let whole = &segments[piece.segment];
                prop_assert!(piece.len > 0);
                prop_assert_eq!(piece.offset, whole.offset + moved[piece.segment] as u64);
                prop_assert_eq!(piece.start, whole.start + moved[piece.segment]);
                moved[piece.segment] += piece.len;
                match piece.route {
                    Route::Edge => prop_assert!(piece.len < align.offset),
                    Route::Direct | Route::Bounce => {
                        prop_assert_eq!(piece.offset % align.offset as u64, 0);
                        prop_assert_eq!(piece.len % align.offset, 0);
                        prop_assert!(piece.len <= block.max(align.offset));
                        let aligned = (base + piece.start).is_multiple_of(align.memory);
                        prop_assert_eq!(aligned, piece.route == Route::Direct);
                    }
                    Route::Sync => prop_assert!(false),
                }
            }
            let lens: Vec<usize> = segments.iter().map(|s| s.len).collect();
            prop_assert_eq!(moved, lens);
        }
    }
}
