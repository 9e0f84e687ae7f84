//! What is registered with one ring: files and memory.
//!
//! A registered file spares a reference count per operation, registered memory the lookup of its pages (256 per
//! MiB). Both are optional: where the kernel, or the memlock limit of a user, refuses, operations go unregistered
//! and the reason is kept.

use super::super::FileId;
use super::super::files::OpenFile;
use io_uring::IoUring;
use std::collections::HashMap;
use std::io;
use std::ops::Range;

/// Files registered at once; more are used unregistered.
const FILES_MAX: u32 = 1024;

/// Memory chunks registered at once; more are used unregistered.
const CHUNKS_MAX: u16 = 1024;

/// Bytes of one registered chunk at most: the kernel's bound.
pub(super) const CHUNK_BYTES_MAX: usize = 1 << 30;

/// The registrations of one ring.
#[derive(Debug, Default)]
pub(super) struct Registry {
    files: Option<Files>,
    memory: Option<Memory>,
    /// What was refused, and why.
    pub refusals: Vec<String>,
}

#[derive(Debug)]
struct Files {
    slots: HashMap<FileId, u32>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Memory {
    /// Sorted by address.
    chunks: Vec<Chunk>,
    free: Vec<u16>,
}

#[derive(Debug, Clone)]
struct Chunk {
    addresses: Range<usize>,
    index: u16,
}

impl Registry {
    /// Empty tables in the kernel, as far as it has such a thing (Linux 5.19).
    pub fn new(ring: &IoUring) -> Self {
        let mut registry = Self::default();
        match ring.submitter().register_files_sparse(FILES_MAX) {
            Ok(()) => {
                registry.files = Some(Files { slots: HashMap::new(), free: (0..FILES_MAX).rev().collect() });
            }
            Err(error) => registry.refusals.push(format!("registered files: {error}")),
        }
        match ring.submitter().register_buffers_sparse(u32::from(CHUNKS_MAX)) {
            Ok(()) => {
                registry.memory = Some(Memory { chunks: Vec::new(), free: (0..CHUNKS_MAX).rev().collect() });
            }
            Err(error) => registry.refusals.push(format!("registered memory: {error}")),
        }
        registry
    }

    /// What is in use, by name.
    pub fn features(&self) -> impl Iterator<Item = &'static str> {
        let files = self.files.is_some().then_some("registered files");
        files.into_iter().chain(self.memory.is_some().then_some("registered memory"))
    }

    /// The registered index of a file's direct descriptor; registers it at its first use.
    pub fn file_index(&mut self, ring: &IoUring, file: &OpenFile) -> Option<u32> {
        let files = self.files.as_mut()?;
        if let Some(&index) = files.slots.get(&file.id) {
            return Some(index);
        }
        let index = files.free.pop()?;
        match ring.submitter().register_files_update(index, &[file.direct_fd()]) {
            Ok(_) => {
                files.slots.insert(file.id, index);
                Some(index)
            }
            Err(error) => {
                files.free.push(index);
                self.refusals.push(format!("registering {}: {error}", file.path.display()));
                // One refusal is enough: the table stays as it is, without new entries.
                files.free.clear();
                None
            }
        }
    }

    /// Lets go of a file that is being closed.
    pub fn forget_file(&mut self, ring: &IoUring, id: FileId) {
        let Some(files) = &mut self.files else { return };
        let Some(index) = files.slots.remove(&id) else { return };
        // Should the kernel refuse, the slot is not used again; the file stays open with the ring.
        if ring.submitter().register_files_update(index, &[-1]).is_ok() {
            files.free.push(index);
        }
    }

    /// Registers a chunk of memory; `false` when it is refused, which is remembered.
    ///
    /// # Safety
    /// The memory stays mapped, with these pages, until [`unregister`](Self::unregister) or the ring's end.
    pub unsafe fn register(&mut self, ring: &IoUring, addresses: Range<usize>) -> bool {
        let Some(memory) = &mut self.memory else { return false };
        let Some(index) = memory.free.pop() else {
            self.refusals.push(format!("registered memory: more than {CHUNKS_MAX} chunks"));
            return false;
        };
        let vector = libc::iovec { iov_base: addresses.start as *mut libc::c_void, iov_len: addresses.len() };
        // SAFETY: the caller keeps the memory as it is.
        let result = unsafe { ring.submitter().register_buffers_update(u32::from(index), &[vector], None) };
        match result {
            Ok(()) => {
                let at = memory.chunks.partition_point(|chunk| chunk.addresses.start < addresses.start);
                memory.chunks.insert(at, Chunk { addresses, index });
                true
            }
            Err(error) => {
                memory.free.push(index);
                self.refusals.push(refusal(addresses.len(), &error));
                false
            }
        }
    }

    /// Ends the registration of a chunk.
    pub fn unregister(&mut self, ring: &IoUring, start: usize) {
        let Some(memory) = &mut self.memory else { return };
        let Some(at) = memory.chunks.iter().position(|chunk| chunk.addresses.start == start) else { return };
        let chunk = memory.chunks.remove(at);
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty entry names no memory.
        let result =
            unsafe { ring.submitter().register_buffers_update(u32::from(chunk.index), &[nothing], None) };
        // Should the kernel refuse, it keeps the pages until the ring's end; the slot is not used again.
        if result.is_ok() {
            memory.free.push(chunk.index);
        }
    }

    /// The registered chunk that holds all of a range.
    pub fn chunk_of(&self, address: usize, len: usize) -> Option<u16> {
        let chunks = &self.memory.as_ref()?.chunks;
        let after = chunks.partition_point(|chunk| chunk.addresses.start <= address);
        let chunk = chunks.get(after.checked_sub(1)?)?;
        (address + len <= chunk.addresses.end).then_some(chunk.index)
    }

    /// Bytes registered.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.iter().flat_map(|memory| &memory.chunks).map(|c| c.addresses.len() as u64).sum()
    }
}

fn refusal(bytes: usize, error: &io::Error) -> String {
    let hint = match error.raw_os_error() {
        Some(libc::ENOMEM) => "; raise the memlock limit (ulimit -l) to have it",
        _ => "",
    };
    format!("registering {bytes} bytes of memory: {error}{hint}")
}
