//! One ring with its registrations and the count of what is in the kernel.

use super::super::FileId;
use super::super::files::OpenFile;
use super::registry::Registry;
use super::ring::{self, Wish};
use io_uring::{IoUring, squeue};
use std::io;
use std::ops::Range;

pub(super) struct Port {
    ring: IoUring,
    features: Vec<&'static str>,
    registry: Registry,
    in_kernel: usize,
}

impl Port {
    pub fn open(wish: Wish, register: bool) -> io::Result<Self> {
        let (ring, features) = ring::set_up(wish)?;
        let registry = if register { Registry::new(&ring) } else { Registry::default() };
        Ok(Self { ring, features, registry, in_kernel: 0 })
    }

    /// Operations submitted, or about to be, whose completion was not seen yet.
    pub fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// What is in use, by name.
    pub fn features(&self) -> Vec<&'static str> {
        self.features.iter().copied().chain(self.registry.features()).collect()
    }

    /// # Errors
    /// The queue is full and cannot be entered: the entry is not in it.
    ///
    /// # Safety
    /// What the entry points to stays valid until its completion was seen.
    pub unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: the caller's promise.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.in_kernel += 1;
                return Ok(());
            }
            // Full: several devices share this queue. What it holds goes to the kernel.
            self.submit()?;
        }
    }

    pub fn submit(&mut self) -> io::Result<()> {
        tolerate(self.ring.submit().map(drop))
    }

    pub fn submit_and_wait(&mut self, want: usize) -> io::Result<()> {
        tolerate(self.ring.submit_and_wait(want).map(drop))
    }

    /// Whether [`submit_and_gather`](Self::submit_and_gather) may be called.
    pub fn can_gather(&self) -> bool {
        self.ring.params().is_feature_min_timeout()
    }

    pub fn submit_and_gather(&mut self, want: usize, min_wait_us: u32) -> io::Result<()> {
        let want = u32::try_from(want).map_err(io::Error::other)?;
        tolerate(ring::submit_and_gather(&mut self.ring, want, min_wait_us))
    }

    /// The next completion's tag and result.
    pub fn next_completion(&mut self) -> Option<(u64, i32)> {
        let entry = self.ring.completion().next()?;
        self.in_kernel -= 1;
        Some((entry.user_data(), entry.result()))
    }

    pub fn file_index(&mut self, file: &OpenFile) -> Option<u32> {
        self.registry.file_index(&self.ring, file)
    }

    pub fn forget_file(&mut self, id: FileId) {
        self.registry.forget_file(&self.ring, id);
    }

    pub fn chunk_of(&self, address: usize, len: usize) -> Option<u16> {
        self.registry.chunk_of(address, len)
    }

    /// # Safety
    /// As for [`Registry::register`].
    pub unsafe fn register(&mut self, addresses: &Range<usize>) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.registry.register(&self.ring, addresses.clone()) }
    }

    pub fn unregister(&mut self, start: usize) {
        self.registry.unregister(&self.ring, start);
    }

    pub fn registered_bytes(&self) -> u64 {
        self.registry.memory_bytes()
    }

    /// Keeps what was asked for and is not available, for [`take_news`](Self::take_news).
    pub fn note(&mut self, refusal: String) {
        self.registry.refusals.push(refusal);
    }

    pub fn has_news(&self) -> bool {
        !self.registry.refusals.is_empty()
    }

    pub fn take_news(&mut self) -> Vec<String> {
        std::mem::take(&mut self.registry.refusals)
    }

    /// Waits until nothing is in the kernel; `false` if that cannot be had.
    pub fn drain(&mut self) -> bool {
        let mut failures = 0;
        while self.in_kernel > 0 && failures < 100 {
            let entered = self.ring.submit_and_wait(1);
            while self.next_completion().is_some() {
                failures = 0;
            }
            failures += u32::from(entered.is_err());
        }
        self.in_kernel == 0
    }
}

/// Interrupted, the completion queue wants to be emptied first, or a gathering wait is over: the caller's loop goes on.
fn tolerate(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e)
            if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME)) =>
        {
            Ok(())
        }
        result => result,
    }
}
