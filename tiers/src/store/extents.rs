//! Where the chunks of a store are in its files, and how they are read.

use super::transfer::{Check, PendingRead};
use crate::key::AddressMap;
use crate::pool::Lease;
use crate::volume::Volume;
use crate::{BlobKey, BlobKind, StoreSpec};
use std::ops::Range;
use terrace_aio::{FileId, OpKind, Urgency};

/// The layout of a store over its files.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) spec: StoreSpec,
    pub(super) volume: Volume,
    map: AddressMap,
}

impl Extents {
    pub(super) fn new(spec: StoreSpec, volume: Volume) -> Self {
        Self { map: AddressMap::new(&spec), spec, volume }
    }

    /// Starts reading the chunks of a blob of generation `generation` that `sums` has what they must be of, in rising order, each to its place in
    /// `lease`, which is exactly as long as chunks `span`.
    pub(super) fn read(
        &self,
        key: BlobKey,
        span: Range<usize>,
        generation: u64,
        sums: &[(usize, u64)],
        (lease, urgency): (Lease, Urgency),
    ) -> PendingRead {
        let mut checks = Vec::with_capacity(sums.len());
        let mut parts: Vec<Range<usize>> = Vec::new();
        let (mut start, mut wanted) = (0, sums.iter().peekable());
        for chunk in span.clone() {
            let len = self.spec.chunk_bytes(key, chunk);
            if let Some(&(_, sum)) = wanted.next_if(|wanted| wanted.0 == chunk) {
                let (file, offset) = self.volume.locate(self.address(key, chunk, generation));
                checks.push(Check { start, len, sum, chunk, file, offset });
                match parts.last_mut().filter(|part| part.end == start) {
                    Some(part) => part.end += len,
                    None => parts.push(start..start + len),
                }
            }
            start += len;
        }
        assert_eq!(wanted.next(), None, "what is read of {key:?} is of chunks {span:?}, in their order");
        assert_eq!(lease.len(), start, "the lease is as long as chunks {span:?} of {key:?}");
        let address = self.address(key, span.start, generation);
        let label = format!("{} of group {}", key.kind.words(), self.spec.groups[key.group].name);
        let request = self.volume.request_parts(OpKind::Read, address, lease.into_io(), &parts);
        let request = request.with_urgency(urgency);
        let ticket = self.volume.engine.submit(request);
        PendingRead::new(ticket, checks, &self.volume, label)
    }

    pub(super) fn address(&self, key: BlobKey, chunk: usize, generation: u64) -> u64 {
        self.spec.require_chunk(key.group, chunk);
        let kind = self.kind_index(key.kind);
        let offset = self.spec.kinds[kind].bytes(chunk as u64 * self.spec.chunk_elements);
        self.map.address(key.group, kind, generation) + offset
    }

    /// The blob and the chunk of it that are at `offset` of a file.
    pub(super) fn find(&self, file: FileId, offset: u64) -> Option<(BlobKey, usize)> {
        let (group, kind, byte) = self.map.find(self.volume.address(file, offset)?)?;
        let spec = &self.spec.kinds[kind];
        let chunk = byte / spec.bytes(self.spec.chunk_elements);
        Some((BlobKey { group, kind: spec.kind }, chunk as usize))
    }

    /// The place of a chunk in the table of checksums.
    pub(super) fn entry(&self, key: BlobKey, chunk: usize) -> usize {
        self.spec.require_chunk(key.group, chunk);
        self.map.table_entry(key.group, self.kind_index(key.kind), chunk)
    }

    fn kind_index(&self, kind: BlobKind) -> usize {
        let index = self.spec.kinds.iter().position(|k| k.kind == kind);
        index.unwrap_or_else(|| panic!("the store keeps {kind:?}"))
    }
}
