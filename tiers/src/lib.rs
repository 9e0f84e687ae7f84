//! Which bytes are where.
//!
//! A [`MemoryPlan`] lists every byte of every tier before anything is allocated. A [`Pool`] is a sealed set of host
//! buffers that hands out [`Lease`]s. A [`DiskStore`] keeps blobs in preallocated, striped extents with two
//! generations, per-chunk checksums and a two-slot manifest, so that the last committed step survives any crash; or in one
//! generation, which takes half the space and survives none between two commits.

mod checksum;
mod copies;
mod error;
mod file;
mod host;
mod key;
mod plan;
mod pool;
mod regions;
mod scratch;
mod store;
mod stripe;
mod volume;

pub use checksum::checksum;
pub use copies::DamagedCopy;
pub use error::{PlanRefusal, TierError};
pub use host::{HostBlob, SharedBytes};
pub use key::{BlobKey, BlobKind, BlobSpec, Generation, GroupSpec, StoreSpec};
pub use plan::{ByteSize, MemoryPlan, PlanEntry, Tier};
pub use pool::{Lease, Pool};
pub use regions::{PendingBlocks, REGION_BLOCK, Regions, joined};
pub use scratch::{Scratch, ScratchChunk, TRAINING_SCRATCH};
#[doc(hidden)]
pub use store::fuzzing;
pub use store::{
    Access, Arrived, Commit, CommitFacts, Committed, Damage, DamageCause, DiskStore, FilePart, Held,
    PendingRead, Recovery, Sealed, SlotFacts, SlotState, StoreView, SyncAhead, TRAINER_BYTES_MAX,
    Verification, allocated_bytes,
};
pub use stripe::Striping;
pub use volume::{STRIPE_BYTES, existing_dir, free_space, same_file_system};
