//! Host memory that a device was told about.

use std::fmt;

/// Keeps host memory pinned for a device; dropping it ends that. See [`Device::pin`](crate::Device::pin).
#[derive(Default)]
#[must_use = "dropping it ends the pinning"]
pub struct Pinned(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Pinned {
    /// Pinned until `end` is called, when this is dropped.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
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
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(end) = self.0.take() {
            end();
        }
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.is_some()).finish()
    }
}
