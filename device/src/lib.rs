//! Where compute runs: devices, streams, events, device memory and host memory that devices can reach.
//!
//! A [`Device`] gives one arena of its memory and streams that order work on it. On the CPU ([`host`]) device
//! memory *is* host memory; in *discrete* mode the CPU pretends to be a card: copies are deferred and their
//! destination is poisoned until the event fires, so that a missing wait shows without a card. [`cuda`] drives NVIDIA's
//! cards with whatever driver it finds at run time.

pub mod affinity;
mod arena;
mod bytes;
pub mod cuda;
mod device;
mod error;
pub mod host;
pub mod memory_node;
mod pinned;
pub mod sim;
mod transfer;

pub use arena::{Arena, Keep, Region, Request};
pub use bytes::{Bytes, BytesMut, Space};
pub use device::{Device, Event, Stream, StreamKind};
pub use error::DeviceError;
pub use pinned::Pinned;
pub use transfer::{Download, StableBytes, Upload, UploadSource};
