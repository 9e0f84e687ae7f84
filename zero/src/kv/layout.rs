//! Where the keys and values of a block are in memory.

use crate::network::Network;
use crate::{BatchLimits, Block, CACHE_PAGE, KvSlot};
use std::ops::Range;
use terrace_device::BytesMut;
use terrace_kernels::{DType, View, ViewMut};
use terrace_tiers::REGION_BLOCK;

/// The keys of a block and then its values, if it has any, `[N, P, G, K]` each, in one buffer. Both begin at whole blocks of disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvLayout {
    dims: [usize; 4],
    has_values: bool,
    dtype: DType,
}

impl KvLayout {
    /// Of every block of a network; `None` of those without a cache.
    pub(crate) fn all(network: &Network, dtype: DType, limits: BatchLimits) -> Vec<Option<Self>> {
        network.blocks.iter().map(|block| Self::of(&**block, dtype, limits)).collect()
    }

    fn of(block: &dyn Block, dtype: DType, limits: BatchLimits) -> Option<Self> {
        let kv = block.kv()?;
        let dims = [limits.pages(), CACHE_PAGE, kv.heads, kv.head_size];
        Some(Self { dims, has_values: kv.has_values, dtype })
    }

    /// Tensors of [`dims`](Self::dims): keys, and values if there are any.
    pub(crate) fn count(&self) -> usize {
        1 + usize::from(self.has_values)
    }

    /// Of keys or of values alone.
    pub(crate) fn dims(&self) -> &[usize; 4] {
        &self.dims
    }

    /// Of the keys, or the values, of one position.
    fn position_bytes(&self) -> usize {
        let [_, _, heads, head_size] = self.dims;
        heads * head_size * self.dtype.size()
    }

    /// Where the values begin.
    fn half(&self) -> usize {
        let [pages, positions, ..] = self.dims;
        (pages * positions * self.position_bytes()).next_multiple_of(REGION_BLOCK)
    }

    /// Bytes of the buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * self.half()
    }

    /// Bytes of the keys and the values of so many positions.
    pub(crate) fn bytes_of(&self, positions: usize) -> usize {
        self.count() * positions * self.position_bytes()
    }

    /// The bytes of positions, which are counted through all pages.
    pub(crate) fn parts(&self, positions: &[Range<usize>]) -> Vec<Range<usize>> {
        let each = self.position_bytes();
        let part = |from: usize| positions.iter().map(move |p| from + p.start * each..from + p.end * each);
        (0..self.count()).flat_map(|half| part(half * self.half())).collect()
    }

    /// What kernels see of a buffer.
    pub(crate) fn slot<'a>(&self, buffer: BytesMut<'a>, pages: View<'a>) -> KvSlot<'a> {
        let [count, positions, ..] = self.dims;
        let (keys, values) = buffer.split_at(self.half());
        let view = |half: BytesMut<'a>| {
            let half = half.slice(0, count * positions * self.position_bytes());
            ViewMut::new(half, self.dtype, &self.dims)
        };
        KvSlot { keys: view(keys), values: self.has_values.then(|| view(values)), pages }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_keys_and_values() {
        let layout = KvLayout { dims: [3, 64, 2, 5], has_values: true, dtype: DType::BF16 };
        assert_eq!((layout.half(), layout.bytes(), layout.bytes_of(7)), (4096, 8192, 280));
        let parts = layout.parts(&[0..1, 64..66]);
        assert_eq!(parts, [0..20, 1280..1320, 4096..4116, 5376..5416]);
        assert_eq!(layout.parts(&[]), Vec::<Range<usize>>::new());
        let keys = KvLayout { has_values: false, ..layout };
        assert_eq!((keys.bytes(), keys.bytes_of(7)), (4096, 140));
        assert_eq!(keys.parts(&[0..1, 64..66]), [0..20, 1280..1320]);
    }
}
