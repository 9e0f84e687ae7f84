//! What the engine's files hold where, for those who saw requests and want to know what they carried: a request knows nothing but a
//! file and an offset, so that nobody pays for names that nobody reads.

use crate::engine::Signals;
use crate::gradients::GradientPark;
use crate::{Engine, KvCache};
use terrace_aio::FileId;

impl Engine {
    /// What is at `offset` of one of the engine's open files, as `layers.3 first moments`; `None` if that is none of its state, its
    /// gradients and its activations.
    pub fn contents_at(&self, file: FileId, offset: u64) -> Option<String> {
        let group = |group: usize| &self.network.groups[group].name;
        if let Some((key, _)) = self.home.disk().and_then(|store| store.chunk_at(file, offset)) {
            return Some(format!("{} {}", group(key.group), key.kind.words()));
        }
        let parked = |park: &Option<GradientPark>| park.as_ref().and_then(|park| park.group_at(file, offset));
        if let Some(index) = parked(&self.park) {
            return Some(format!("{} gradients", group(index)));
        }
        if let Some(index) = parked(&self.sums) {
            return Some(format!("{} sums of gradients", group(index)));
        }
        if let Some(block) = self.kept_away.as_ref().and_then(|away| away.block_at(file, offset)) {
            return Some(format!("{} activations", group(block)));
        }
        match &self.signals {
            // A boundary's signal is what the block after it reads.
            Signals::Training(activations) => {
                let block = activations.boundary_at(file, offset)? + 1;
                Some(format!("{} input", group(block)))
            }
            Signals::ForwardOnly(_) => None,
        }
    }

    /// What is at `offset` of one of the files of a cache of this engine's, as `layers.3 keys and values`; `None` if that is none of
    /// them. [`contents_at`](Self::contents_at) does not know: a cache is its owner's, and its files go with it.
    pub fn cache_contents_at(&self, cache: &KvCache, file: FileId, offset: u64) -> Option<String> {
        let block = cache.block_at(file, offset)?;
        Some(format!("{} keys and values", self.network.groups[block].name))
    }
}
