//! Weights that come when a forward knows that it uses them: those of the experts that tokens go through.
//!
//! A block of whose [parts](crate::Block::parts) a pass is expected to use little is fetched without the chunks that hold nothing else. Its forward then
//! comes in two halves: the first says which parts it uses, these are read to their places in the group's slot, and the second computes with them. Compute
//! waits for that read, which nothing can start sooner; it moves a few experts where a pass with all of them ahead moves all.
//!
//! Only frozen weights on disk. On a device with memory of its own a group's slot on the host is kept until the second half, for what is read then
//! goes up from there; what stays on the device comes there as a whole. A group of which all is there (a copy, or what a pass
//! before read ahead for another kind of pass) is used as it is, and bits are the same either way.

use crate::network::Network;
use std::ops::Range;
use terrace_tiers::StoreSpec;

/// How much of a block's parts a pass must be expected to use for all to be fetched ahead of it, beside what is computed before.
const USED_MAX: f64 = 0.5;

/// Fewest and most elements of a chunk where there are parts.
const CHUNK_ELEMENTS: [usize; 2] = [1 << 16, 1 << 19];
/// Chunks of a part at least, of which the first and the last may come for it alone: an eighth more bytes than the part, on average.
const CHUNKS_OF_PART: usize = 8;

/// Whether a pass over so many rows is to wait for the parts of a block that it uses.
pub(crate) fn uses_few(network: &Network, block: usize, rows: usize) -> bool {
    network.blocks[block].parts_used(rows) < USED_MAX
}

/// Elements of a chunk of weights that may come in parts; `None` if no block has any.
pub(crate) fn chunk_elements(network: &Network) -> Option<usize> {
    let parts = (0..network.blocks.len()).flat_map(|block| network.parts(block));
    let least = parts.map(|part| part.len()).min()?;
    let [fewest, most] = CHUNK_ELEMENTS;
    Some((1 << (least / CHUNKS_OF_PART).max(1).ilog2()).clamp(fewest, most))
}

/// Which chunks of a group's weights come when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OnDemand {
    /// All of them.
    chunks: usize,
    /// Those with nothing but parameters on demand; the others are fetched ahead.
    later: Range<usize>,
    /// Those of them that each part is in, which it may share with its neighbours.
    parts: Vec<Range<usize>>,
}

impl OnDemand {
    /// Of the group of `block`'s own parameters; `None` if nothing of it can be left out.
    pub(crate) fn of(network: &Network, spec: &StoreSpec, block: usize) -> Option<Self> {
        Self::new(&network.parts(block), network.groups[block].elements, spec.chunk_elements as usize)
    }

    /// Of parts that span elements one after the other, of so many in all.
    fn new(spans: &[Range<usize>], elements: usize, chunk_elements: usize) -> Option<Self> {
        assert!(
            spans.windows(2).all(|two| two[0].end == two[1].start),
            "parts follow one another: {spans:?}"
        );
        let (first, last) = (spans.first()?.start, spans.last()?.end);
        let chunks = elements.div_ceil(chunk_elements);
        let end = if last == elements { chunks } else { last / chunk_elements };
        let later = first.div_ceil(chunk_elements)..end;
        let of_part = |span: &Range<usize>| {
            let start = (span.start / chunk_elements).max(later.start);
            start..span.end.div_ceil(chunk_elements).min(later.end).max(start)
        };
        let parts = spans.iter().map(of_part).collect();
        (!later.is_empty()).then_some(Self { chunks, later, parts })
    }

    /// Runs of chunks that are fetched ahead.
    pub(crate) fn ahead(&self) -> Vec<Range<usize>> {
        let runs = [0..self.later.start, self.later.end..self.chunks];
        runs.into_iter().filter(|run| !run.is_empty()).collect()
    }

    /// Runs of the other chunks that some parts, in rising order, are in.
    pub(crate) fn wanted(&self, parts: &[usize]) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for run in parts.iter().map(|&part| &self.parts[part]).filter(|run| !run.is_empty()) {
            match runs.last_mut().filter(|last| last.end >= run.start) {
                Some(last) => last.end = run.end,
                None => runs.push(run.clone()),
            }
        }
        runs
    }

    /// All of the other chunks.
    pub(crate) fn later(&self) -> Range<usize> {
        self.later.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every chunk comes ahead or on demand, and what is wanted covers the elements of its parts.
    #[test]
    fn chunks_cover_what_is_wanted() {
        let spans = |sizes: &[usize], first: usize| {
            let ends = sizes.iter().scan(first, |end, size| {
                *end += size;
                Some(*end)
            });
            ends.zip(sizes).map(|(end, size)| end - size..end).collect::<Vec<_>>()
        };
        for chunk_elements in [64, 100, 256, 5000] {
            for (first, sizes, rest) in [
                (128, &[64; 8][..], 0),
                (70, &[100, 30, 500], 0),
                (64, &[640, 64], 128),
                (10, &[5, 5], 3),
                (192, &[1000], 1),
            ] {
                let spans = spans(sizes, first);
                let elements = spans.last().unwrap().end + rest;
                let what = format!("{chunk_elements} {first} {sizes:?} {rest}");
                let chunk = |element: usize| element / chunk_elements;
                let Some(found) = OnDemand::new(&spans, elements, chunk_elements) else {
                    // No chunk is of nothing else.
                    let last = spans.last().unwrap().end;
                    let is_alone = |chunk: usize| {
                        let end = ((chunk + 1) * chunk_elements).min(elements);
                        chunk * chunk_elements >= first && end <= last
                    };
                    assert!((0..elements.div_ceil(chunk_elements)).all(|c| !is_alone(c)), "{what}");
                    continue;
                };
                let ahead: Vec<usize> = found.ahead().into_iter().flatten().collect();
                let mut all: Vec<usize> = ahead.iter().copied().chain(found.later()).collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..elements.div_ceil(chunk_elements)), "{what}");
                for fixed in (0..first).chain(spans.last().unwrap().end..elements) {
                    assert!(ahead.contains(&chunk(fixed)), "{what}: {fixed}");
                }
                for picked in 1u32..1 << spans.len() {
                    let parts: Vec<usize> = (0..spans.len()).filter(|part| picked >> part & 1 == 1).collect();
                    let runs = found.wanted(&parts);
                    assert!(runs.windows(2).all(|two| two[0].end < two[1].start), "{what}: {runs:?}");
                    let there: Vec<usize> =
                        ahead.iter().copied().chain(runs.iter().cloned().flatten()).collect();
                    for element in parts.iter().flat_map(|&part| spans[part].clone()) {
                        assert!(there.contains(&chunk(element)), "{what}: {parts:?} need {element}");
                    }
                    // Nothing that no part is in.
                    let is_touched = |c: usize| {
                        parts.iter().any(|&part| {
                            spans[part].start < (c + 1) * chunk_elements
                                && spans[part].end > c * chunk_elements
                        })
                    };
                    assert!(runs.into_iter().flatten().all(is_touched), "{what}: {parts:?}");
                }
            }
        }
        assert_eq!(OnDemand::new(&[], 100, 10), None);
    }
}
