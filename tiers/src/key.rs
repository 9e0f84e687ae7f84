//! Names of blobs and their place in the address space of a store.
//!
//! A *blob* is one kind of state of one parameter group: its weights, its first moments, … A blob is cut into *chunks*
//! of the same number of elements for every kind, the unit of update, transfer and checksum.

use crate::TierError;
use serde::{Deserialize, Serialize};

/// Alignment of every extent in a store, in bytes: direct I/O on any drive.
pub(crate) const EXTENT_ALIGN: u64 = 4096;

/// What a blob holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlobKind {
    /// Weights in the dtype that compute uses.
    Weight,
    /// Single-precision master weights.
    Master,
    /// The part of the master weights that the weights do not hold.
    MasterLow,
    /// The same in eight bits, rounded.
    MasterLow8,
    /// First moments.
    Moment1,
    /// Second moments.
    Moment2,
    /// Gradients between backward and update.
    Grad,
    /// Checkpointed activations.
    Activation,
    /// Key/value cache.
    Kv,
}

impl BlobKind {
    /// What it holds, in words a user understands.
    pub fn words(self) -> &'static str {
        match self {
            Self::Weight => "weights",
            Self::Master => "master weights",
            Self::MasterLow => "low half of the master weights",
            Self::MasterLow8 => "low 8 bits of the master weights",
            Self::Moment1 => "first moments",
            Self::Moment2 => "second moments",
            Self::Grad => "gradients",
            Self::Activation => "activations",
            Self::Kv => "key/value cache",
        }
    }
}

/// One blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlobKey {
    /// Index of the parameter group.
    pub group: usize,
    /// Kind.
    pub kind: BlobKind,
}

/// A kind of blob in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobSpec {
    /// Kind.
    pub kind: BlobKind,
    /// Elements that are stored together: 1 for plain arrays, more where they share a scale.
    pub block_elements: u64,
    /// Bytes of one such block. A blob's last block is whole even if its elements are fewer.
    pub block_bytes: u64,
}

impl BlobSpec {
    /// A plain array.
    pub fn plain(kind: BlobKind, element_bytes: u64) -> Self {
        Self { kind, block_elements: 1, block_bytes: element_bytes }
    }

    /// Bytes of `elements` elements from the start of a block.
    pub fn bytes(&self, elements: u64) -> u64 {
        elements.div_ceil(self.block_elements) * self.block_bytes
    }
}

/// A parameter group in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Name for messages.
    pub name: String,
    /// Elements, padded so that every kind fills whole pages.
    pub elements: u64,
}

/// Which of the two copies of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// The last committed one. Where it is the only one, it may not be read any more where the next one was written.
    Live,
    /// The one that the next commit makes live; it lies where the live one does, if there is only one.
    Next,
    /// For reading: the next one where it was written since the last commit, else the live one. A commit in between makes no
    /// difference.
    Newest,
    /// As [`Newest`](Self::Newest), for what was written before [`DiskStore::settle`](crate::DiskStore::settle) or not since the
    /// last commit: does not wait for writes of the same blob that came after.
    Settled,
}

/// Everything that fixes the layout of a store. It is written once, at creation, and compared when it is opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSpec {
    /// Groups in order.
    pub groups: Vec<GroupSpec>,
    /// Kinds in order.
    pub kinds: Vec<BlobSpec>,
    /// Elements per chunk, a multiple of every kind's block; the last chunk of a group may be shorter.
    pub chunk_elements: u64,
    /// Copies of every blob: 2 for state that survives its changes, 1 for frozen weights and for state that is overwritten in place.
    pub generations: u64,
    /// What the creator wants to compare on opening, opaque here.
    pub identity: String,
}

impl StoreSpec {
    /// Chunks of group `group`.
    pub fn chunks(&self, group: usize) -> usize {
        self.groups[group].elements.div_ceil(self.chunk_elements) as usize
    }

    /// The next chunk's place is another blob's.
    pub(crate) fn require_chunk(&self, group: usize, chunk: usize) {
        let name = &self.groups[group].name;
        let chunks = self.chunks(group);
        assert!(chunk < chunks, "chunk {chunk} is one of the {chunks} of group {name}");
    }

    /// Says what no store can be laid out by: sizes of nothing, two blobs of one kind, chunks that cut blocks, more bytes than files have.
    ///
    /// # Errors
    /// The first of them.
    pub fn check(&self) -> Result<(), TierError> {
        let invalid = |detail: String| Err(TierError::Invalid { what: "the layout of a store", detail });
        if !(1..=2).contains(&self.generations) {
            return invalid(format!("has {} generations; there may be 1 or 2", self.generations));
        }
        if self.chunk_elements == 0 {
            return invalid("has chunks of no elements (chunk_elements)".into());
        }
        for (index, BlobSpec { kind, block_elements, block_bytes }) in self.kinds.iter().enumerate() {
            let words = kind.words();
            if *block_elements == 0 || *block_bytes == 0 {
                return invalid(format!("has {words} in blocks of nothing"));
            }
            if !self.chunk_elements.is_multiple_of(*block_elements) {
                let detail =
                    format!("cuts blocks of {block_elements} {words} into chunks of {}", self.chunk_elements);
                return invalid(detail);
            }
            if self.kinds[..index].iter().any(|other| other.kind == *kind) {
                return invalid(format!("has {words} twice"));
            }
        }
        // What files count with, a page more for each blob, and a sum for each chunk.
        let bytes = self.groups.iter().try_fold(0_u64, |sum, group| {
            let of_kinds = self.kinds.iter().try_fold(0_u64, |sum, kind| {
                let bytes = group.elements.div_ceil(kind.block_elements).checked_mul(kind.block_bytes)?;
                sum.checked_add(bytes.checked_add(EXTENT_ALIGN)?)
            })?;
            sum.checked_add(of_kinds)?
                .checked_add(group.elements.div_ceil(self.chunk_elements).checked_mul(8)?)
        });
        match bytes.and_then(|bytes| bytes.checked_mul(self.generations)) {
            Some(bytes) if bytes <= i64::MAX as u64 => Ok(()),
            _ => invalid("has more bytes than files can".into()),
        }
    }

    /// Elements of chunk `chunk` of group `group`.
    ///
    /// # Panics
    /// If the group has no such chunk.
    pub fn chunk_len(&self, group: usize, chunk: usize) -> usize {
        self.require_chunk(group, chunk);
        let start = chunk as u64 * self.chunk_elements;
        (self.groups[group].elements - start).min(self.chunk_elements) as usize
    }

    /// Bytes of one chunk of a blob.
    ///
    /// # Panics
    /// If the store has no such kind.
    pub fn chunk_bytes(&self, key: BlobKey, chunk: usize) -> usize {
        let spec = self.kinds.iter().find(|spec| spec.kind == key.kind);
        let spec = spec.unwrap_or_else(|| panic!("the store keeps {:?}", key.kind));
        spec.bytes(self.chunk_len(key.group, chunk) as u64) as usize
    }

    /// Bytes of the state area: every generation of every blob.
    pub fn volume_bytes(&self) -> u64 {
        self.generation_bytes() * self.generations
    }

    /// Chunks of all blobs of one generation: the length of the checksum table.
    pub(crate) fn table_len(&self) -> usize {
        (0..self.groups.len()).map(|g| self.chunks(g)).sum::<usize>() * self.kinds.len()
    }

    fn generation_bytes(&self) -> u64 {
        self.groups.iter().map(|g| self.group_bytes(g.elements)).sum()
    }

    fn group_bytes(&self, elements: u64) -> u64 {
        self.kinds.iter().map(|k| k.bytes(elements).next_multiple_of(EXTENT_ALIGN)).sum()
    }
}

/// Where every blob of a store begins, computed once from its [`StoreSpec`].
#[derive(Debug)]
pub(crate) struct AddressMap {
    /// `[group][kind]` → address in generation 0.
    blobs: Vec<Vec<u64>>,
    /// `[group][kind]` → first entry in the checksum table.
    table: Vec<Vec<usize>>,
    generation_bytes: u64,
}

impl AddressMap {
    pub(crate) fn new(spec: &StoreSpec) -> Self {
        let (mut address, mut entry) = (0, 0);
        let (mut blobs, mut table) = (Vec::new(), Vec::new());
        for (index, group) in spec.groups.iter().enumerate() {
            let (mut row, mut entries) = (Vec::new(), Vec::new());
            for kind in &spec.kinds {
                row.push(address);
                entries.push(entry);
                address += kind.bytes(group.elements).next_multiple_of(EXTENT_ALIGN);
                entry += spec.chunks(index);
            }
            blobs.push(row);
            table.push(entries);
        }
        Self { blobs, table, generation_bytes: address }
    }

    pub(crate) fn address(&self, group: usize, kind: usize, generation: u64) -> u64 {
        self.blobs[group][kind] + generation * self.generation_bytes
    }

    /// The group, the kind and the byte of its blob that an address of any generation lies in.
    pub(crate) fn find(&self, address: u64) -> Option<(usize, usize, u64)> {
        let address = address.checked_rem(self.generation_bytes)?;
        // Blobs of nothing begin where the next one does, which is the last that begins there.
        let group = self.blobs.partition_point(|kinds| kinds[0] <= address).checked_sub(1)?;
        let kind = self.blobs[group].partition_point(|&start| start <= address) - 1;
        Some((group, kind, address - self.blobs[group][kind]))
    }

    pub(crate) fn table_entry(&self, group: usize, kind: usize, chunk: usize) -> usize {
        self.table[group][kind] + chunk
    }
}
