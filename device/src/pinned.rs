//! Host memory that a device was told about.

use std::fmt;

/// Keeps host memory pinned for a device; dropping it ends that. See [`Device::pin`](crate::Device::pin).
#[derive(Default)]
#[must_use = "dropping it ends the pinning"]
pub struct Pinned(Option<Box<dyn FnOnce() -> bool + Send + Sync>>);

impl Pinned {
    /// Pinned until `end` is called, when this is dropped. It says whether the device has let go of the memory.
    pub fn new(end: impl FnOnce() -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(end)))
    }

    /// Nothing is pinned, and nothing needs to be.
    pub fn none() -> Self {
        Self(None)
    }

    /// Whether anything is pinned.
    pub fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Ends the pinning; false if the device may go on reading and writing the memory, which one that is lost may.
    pub fn end(&mut self) -> bool {
        self.0.take().is_none_or(|end| end())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.is_some()).finish()
    }
}
