//! The threads of a kernel set and their working memory.

use super::gemm::{Micro, Pair};
use super::team::Team;
use super::{CpuConfig, Isa};
use crossbeam::utils::CachePadded;
use std::fmt;
use std::io::{self, ErrorKind};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use terrace_device::affinity;
use terrace_device::host::HostMemory;

/// Working memory of one thread: packed panels and tiles of products and attention.
pub const SCRATCH_BYTES: usize = 3 << 20;
/// Working memory of one operation as a whole: widened activations of thin products, partial column sums.
pub const SHARED_BYTES: usize = 1 << 20;
/// Stack of one thread.
pub const STACK_BYTES: usize = 512 << 10;

/// A team, its instruction set and its memory.
pub struct Threads {
    team: Team,
    count: usize,
    isa: Isa,
    micro: Micro,
    pair_micro: Option<Micro<Pair>>,
    scratch: Vec<Mutex<Scratch>>,
    shared: Mutex<Scratch>,
}

impl Threads {
    /// # Errors
    /// Threads or memory are refused.
    ///
    /// # Panics
    /// If the number of threads is zero.
    pub fn new(config: CpuConfig) -> io::Result<Self> {
        assert!(config.threads > 0, "at least one thread computes");
        let isa = config.isa.unwrap_or_else(Isa::best);
        let team = Team::new(config.threads, STACK_BYTES, affinity::on_start(config.pinned))?;
        let scratch = (0..config.threads).map(|_| Scratch::new(SCRATCH_BYTES).map(Mutex::new));
        Ok(Self {
            team,
            count: config.threads,
            isa,
            micro: Micro::of(isa),
            pair_micro: Micro::of_pairs(isa),
            scratch: scratch.collect::<io::Result<_>>()?,
            shared: Mutex::new(Scratch::new(SHARED_BYTES)?),
        })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn micro(&self) -> Micro {
        self.micro
    }

    /// The innermost product of bf16, if the instruction set has one.
    pub fn pair_micro(&self) -> Option<Micro<Pair>> {
        self.pair_micro
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `work(task, scratch)` for every task, handing tasks out in order to whichever thread is free, the calling one
    /// among them.
    ///
    /// `work` must not call `run` again: it holds its thread's scratch.
    pub fn run(&self, tasks: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        self.hand_out(tasks, 1, work);
    }

    /// As [`run`](Self::run), but every thread goes through consecutive tasks as long as it can: for tasks that read memory one after
    /// the other, which is fetched ahead of them. Threads that are through help the others.
    pub fn run_in_parts(&self, tasks: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        self.hand_out(tasks, self.count.min(tasks), work);
    }

    /// Runs tasks in as many parts, each of which is handed out in its order; a thread begins with the part of its index.
    fn hand_out(&self, tasks: usize, parts: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        if tasks == 0 {
            return;
        }
        let start = |part: usize| part * tasks / parts;
        let next: Vec<_> = (0..parts).map(|part| CachePadded::new(AtomicUsize::new(start(part)))).collect();
        self.team.run(tasks, |thread| {
            let mut scratch = lock(&self.scratch[thread]);
            for part in (0..parts).map(|turn| (thread + turn) % parts) {
                loop {
                    let task = next[part].fetch_add(1, Relaxed);
                    if task >= start(part + 1) {
                        break;
                    }
                    work(task, scratch.floats());
                }
            }
        });
    }

    /// Runs `work(items, scratch)` for consecutive ranges of `each` items (the last may be shorter).
    pub fn run_ranges(&self, items: usize, each: usize, work: impl Fn(Range<usize>, &mut [f32]) + Sync) {
        self.run(items.div_ceil(each), |task, scratch| {
            work(task * each..items.min((task + 1) * each), scratch);
        });
    }

    /// The shared working memory, until the guard is dropped.
    pub fn shared(&self) -> SharedScratch<'_> {
        SharedScratch(lock(&self.shared))
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").field("count", &self.count).field("isa", &self.isa).finish_non_exhaustive()
    }
}

/// Exclusive use of the shared working memory.
pub struct SharedScratch<'a>(MutexGuard<'a, Scratch>);

impl SharedScratch<'_> {
    pub fn floats(&mut self) -> &mut [f32] {
        self.0.floats()
    }
}

/// Page-aligned floats; pages that no call has needed cost nothing.
#[derive(Debug)]
struct Scratch {
    memory: HostMemory,
}

impl Scratch {
    fn new(bytes: usize) -> io::Result<Self> {
        let memory = HostMemory::new(bytes).map_err(|error| io::Error::new(ErrorKind::OutOfMemory, error))?;
        Ok(Self { memory })
    }

    fn floats(&mut self) -> &mut [f32] {
        let len = self.memory.bytes() / size_of::<f32>();
        // SAFETY: zeroed at first, page-aligned, that long, and borrowed exclusively through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr().cast(), len) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Scratch has no invariant that a panic could have broken.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cuts a scratch into buffers of its caller's sizes, each aligned to a cache line.
pub struct Carver<'a> {
    rest: &'a mut [f32],
}

impl<'a> Carver<'a> {
    pub fn new(scratch: &'a mut [f32]) -> Self {
        Self { rest: scratch }
    }

    /// The next `floats` of the scratch, with old contents.
    pub fn take(&mut self, floats: usize) -> &'a mut [f32] {
        let rest = std::mem::take(&mut self.rest);
        let need = floats.next_multiple_of(16);
        assert!(need <= rest.len(), "working memory of {} floats has room for {need}", rest.len());
        let (taken, rest) = rest.split_at_mut(need);
        self.rest = rest;
        &mut taken[..floats]
    }

    /// What is left.
    pub fn rest(self) -> &'a mut [f32] {
        self.rest
    }

    /// As many elements of a type no larger than a float.
    pub fn take_of<T: bytemuck::Pod>(&mut self, elements: usize) -> &'a mut [T] {
        const { assert!(size_of::<T>() <= size_of::<f32>(), "room for an element in a float's") };
        let floats = self.take((elements * size_of::<T>()).div_ceil(size_of::<f32>()));
        &mut bytemuck::cast_slice_mut(floats)[..elements]
    }
}

/// A slice that several tasks write, each its own elements.
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: it only gives access through `slice`, whose callers keep ranges disjoint.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// `len` elements from `at`.
    ///
    /// # Safety
    /// No other live slice, of this task or another, overlaps the range.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at <= self.len && len <= self.len - at, "{len} elements from {at} are within {}", self.len);
        // SAFETY: in bounds, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(at), len) }
    }

    /// Overwrites element `at`.
    ///
    /// # Safety
    /// As for [`slice`](Self::slice).
    pub unsafe fn set(&self, at: usize, value: T)
    where
        T: Copy,
    {
        // SAFETY: the caller's promise.
        unsafe { self.slice(at, 1) }.fill(value);
    }

    /// The address of element `at`, for strided writes to elements of this task alone.
    pub fn pointer(&self, at: usize) -> *mut T {
        assert!(at <= self.len, "element {at} is within {}", self.len);
        // SAFETY: in bounds or one past.
        unsafe { self.ptr.add(at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn pinned_threads_have_a_core_each() {
        let cores = |pinned| {
            let threads = Threads::new(CpuConfig { pinned, ..CpuConfig::new(3) }).unwrap();
            let cores = Mutex::new(Vec::new());
            threads.team.run(3, |thread| {
                let status = std::fs::read_to_string("/proc/thread-self/status").expect("Linux says");
                let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
                cores.lock().unwrap().push((thread, line.expect("it is there").trim().to_owned()));
            });
            let mut cores = cores.into_inner().unwrap();
            cores.sort();
            cores.into_iter().map(|(_, cores)| cores).collect::<Vec<_>>()
        };
        let one = |core: &String| core.parse::<usize>().is_ok();
        let (free, pinned) = (cores(false), cores(true));
        assert!(pinned[1..].iter().all(one), "{pinned:?}");
        assert_eq!(free[0], pinned[0], "the caller's thread is its own");
        assert!(one(&free[1]) || pinned[1] != pinned[2], "{free:?}, {pinned:?}");
    }
}
