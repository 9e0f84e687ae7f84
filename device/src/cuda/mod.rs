//! NVIDIA's cards, through the driver that is found at run time.
//!
//! The backend is part of every build and needs no CUDA to build. [`probe`] says what is there; [`CudaDevice::open`] gives
//! a [`Device`](crate::Device). Kernels are compiled from source for the very card when they are first needed
//! ([`Compiler`]), kept in a folder, and loaded as a [`Module`] whose [`Function`]s are launched on a [`CudaStream`].
//!
//! Everything here calls cudarc's `sys` level: its safe level tracks every allocation with events of its own, while this
//! backend has one arena and orders work by streams alone.
//!
//! Hazards and what closes them:
//! - *a library is missing:* cudarc panics at the first call, so each library is opened, and its functions looked up, before
//!   any is called (`library.rs`, `driver.rs`);
//! - *an object outlives its context:* every object holds the context, which is released last (`context.rs`);
//! - *an event is used again too early:* the pool takes an event back when its last user drops it; enqueued waits keep
//!   the point they were given (`context.rs`);
//! - *pages are unmapped while pinned:* [`Device::pin`](crate::Device::pin) is unsafe, its value must go first, and what a lost
//!   device may still read stays mapped ([`HostMemory`](crate::host::HostMemory));
//! - *a failed kernel is noticed late:* the error ends the context, every later call says so
//!   ([`DeviceError::Lost`](crate::DeviceError::Lost)).
//!
//! The tests run on a driver that plays a card in host memory, `device/mock/`: `cargo xtask cuda-mock`.

mod cache;
mod compiler;
mod context;
mod device;
mod driver;
mod library;
mod memory;
mod module;
mod nvrtc;
mod probe;
mod stream;

pub use compiler::{Compiler, Image, Origin, Source};
pub use context::ContextGuard;
pub use device::{CAPABILITY_MIN, Capability, CudaDevice, Properties};
pub use library::{Library, Search};
pub use memory::{PinnedMemory, PinnedUse};
pub use module::{Function, Module};
pub use probe::{CardReport, LibraryReport, Link, Probe, probe};
pub use stream::{CudaStream, TimedEvent};
