//! The thread that owns the ring.
//!
//! Invariants:
//! - Every operation lives in a slot from its first submission to its last completion, and a slot has at most one
//!   SQE in the kernel; the submission queue has room for all slots and the wake read, so a push cannot fail.
//! - A job's buffer, and a slot's bounce buffer, outlive the operation: the slot holds the job. On the way out the
//!   driver waits for every operation before anything is freed; if it cannot, it leaks them.
//! - The wake read is always in the kernel while the driver may sleep, and it sleeps only with an operation in the
//!   kernel or after it saw the channel empty; callers send first and add to the eventfd after. So no request is missed.

use super::super::config::EngineConfig;
use super::super::job::Job;
use super::super::progress::{Failure, Progress, Step, from_kernel};
use super::super::split::{Cursor, Piece, Route};
use crate::{IoBuf, OpKind};
use io_uring::{IoUring, Probe, opcode, squeue, types};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

/// `user_data` of the eventfd's read; slots count from zero.
const WAKE: u64 = u64::MAX;

/// Owns the ring. Not `Send` in spirit: it is made and used on one thread.
pub(super) struct Driver {
    // The ring is declared first, so that it closes before any buffer below is freed.
    ring: IoUring,
    wake: Arc<OwnedFd>,
    /// Where the kernel puts the eventfd's count.
    wake_count: Box<u64>,
    wake_is_armed: bool,
    inbox: Receiver<(Job, Cursor)>,
    inbox_is_closed: bool,
    /// Requests with pieces that were not issued yet, oldest first.
    queue: VecDeque<(Arc<Job>, Cursor)>,
    slots: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Slots whose next transfer is to be submitted.
    pending: Vec<usize>,
    in_kernel: usize,
    bounces: Vec<IoBuf>,
    transfer_bytes_max: usize,
}

/// One piece on its way.
struct Op {
    job: Arc<Job>,
    piece: Piece,
    /// `None` for an `fdatasync`.
    progress: Option<Progress>,
    bounce: Option<IoBuf>,
}

/// A ring of `entries` submissions whose kernel has the operations that are needed.
pub(super) fn set_up_ring(entries: u32) -> io::Result<IoUring> {
    let deferred =
        IoUring::builder().setup_clamp().setup_single_issuer().setup_defer_taskrun().build(entries);
    let ring = match deferred {
        // Kernels before 6.1 do not know these flags.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().setup_clamp().build(entries)?
        }
        result => result?,
    };
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        Ok(ring)
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

impl Driver {
    pub fn new(
        config: &EngineConfig,
        wake: Arc<OwnedFd>,
        inbox: Receiver<(Job, Cursor)>,
    ) -> io::Result<Self> {
        let depth = config.queue_depth;
        let entries = u32::try_from(depth + 1).map_err(io::Error::other)?;
        let ring = set_up_ring(entries)?;
        assert!(ring.params().sq_entries() >= entries, "the depth is bounded far below the kernel's clamp");
        Ok(Self {
            ring,
            wake,
            wake_count: Box::new(0),
            wake_is_armed: false,
            inbox,
            inbox_is_closed: false,
            queue: VecDeque::new(),
            slots: std::iter::repeat_with(|| None).take(depth).collect(),
            free: (0..depth).rev().collect(),
            pending: Vec::with_capacity(depth),
            in_kernel: 0,
            bounces: Vec::new(),
            transfer_bytes_max: config.transfer_bytes_max,
        })
    }

    /// Moves requests until the channel is closed and everything is done.
    pub fn run(mut self) {
        loop {
            self.fill_slots();
            self.push_pending();
            if self.inbox_is_closed && self.free.len() == self.slots.len() {
                // The wake read may still be armed, with its wake spent earlier: `drop` ends it.
                return;
            }
            if !self.inbox_is_closed {
                self.arm_wake();
            }
            if let Err(error) = self.enter() {
                tracing::error!(%error, "io_uring_enter failed: the engine stops and its requests fail");
                return;
            }
            self.reap();
        }
    }

    /// Issues pieces until every slot is taken or the channel was seen empty. Only then may the driver sleep: the
    /// first kind of state ends with a completion, the second with a wake. (Pieces of a request that has already failed
    /// take no slot, so one round of admitting and issuing can leave slots free and the channel full.)
    fn fill_slots(&mut self) {
        loop {
            let is_empty = self.admit();
            self.issue();
            if is_empty || self.free.is_empty() {
                return;
            }
        }
    }

    /// Takes requests from the channel, no more than can be issued soon: the rest wait in the channel and then in
    /// `submit`. Returns whether the channel has nothing more.
    fn admit(&mut self) -> bool {
        while !self.inbox_is_closed && self.queue.len() < self.slots.len() {
            match self.inbox.try_recv() {
                Ok((job, cursor)) => self.queue.push_back((Arc::new(job), cursor)),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => self.inbox_is_closed = true,
            }
        }
        self.inbox_is_closed
    }

    /// Fills free slots with pieces of the oldest requests.
    fn issue(&mut self) {
        while let Some((job, cursor)) = self.queue.front_mut() {
            if self.free.is_empty() {
                return;
            }
            let Some(piece) = job.next_piece(cursor) else {
                self.queue.pop_front();
                continue;
            };
            let job = Arc::clone(job);
            // Pop eagerly: a finished request must not keep its files open from here.
            if job.next_piece(&mut cursor.clone()).is_none() {
                self.queue.pop_front();
            }
            if job.is_failed() {
                job.finish_piece(Ok(()));
                continue;
            }
            let op = self.start(job, piece);
            let slot = self.free.pop().expect("a free slot was seen above");
            self.slots[slot] = Some(op);
            self.pending.push(slot);
        }
    }

    fn start(&mut self, job: Arc<Job>, piece: Piece) -> Op {
        let progress =
            job.kind().map(|kind| Progress::new(kind, piece.len, job.unit(&piece), self.transfer_bytes_max));
        let bounce = (piece.route == Route::Bounce).then(|| {
            let found = self.bounces.iter().position(|buf| buf.capacity() >= piece.len);
            let mut buf =
                found.map_or_else(|| IoBuf::zeroed(piece.len), |index| self.bounces.swap_remove(index));
            if job.kind() == Some(OpKind::Write) {
                // SAFETY: the piece's bytes are the job's until it is finished, and the bounce buffer is ours.
                unsafe { std::ptr::copy_nonoverlapping(job.address(&piece), buf.as_mut_ptr(), piece.len) };
            }
            buf
        });
        Op { job, piece, progress, bounce }
    }

    fn push_pending(&mut self) {
        while let Some(slot) = self.pending.pop() {
            let op = self.slots[slot].as_mut().expect("a pending slot holds its operation");
            let entry = op.entry().user_data(slot as u64);
            self.push(&entry);
        }
    }

    fn arm_wake(&mut self) {
        if !self.wake_is_armed {
            let target = std::ptr::from_mut(&mut *self.wake_count).cast::<u8>();
            let entry = opcode::Read::new(types::Fd(self.wake.as_raw_fd()), target, 8).build();
            self.push(&entry.user_data(WAKE));
            self.wake_is_armed = true;
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the slot (or `wake_count`) keeps descriptor and memory alive until the completion.
        unsafe { self.ring.submission().push(entry) }
            .expect("the queue has an entry for every slot and for the wake");
        self.in_kernel += 1;
    }

    /// Submits and sleeps until a completion is there.
    fn enter(&self) -> io::Result<()> {
        match self.ring.submit_and_wait(1) {
            Ok(_) => Ok(()),
            // Interrupted, or the completion queue wants to be emptied first: the loop does both.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn reap(&mut self) {
        while let Some((tag, res)) = self.next_completion() {
            self.in_kernel -= 1;
            if tag == WAKE {
                self.wake_is_armed = false;
                continue;
            }
            // The tag was made from a slot number.
            let slot = tag as usize;
            let op = self.slots[slot].as_mut().expect("a completion belongs to an operation");
            let result = match op.complete(res) {
                None => {
                    self.pending.push(slot);
                    continue;
                }
                Some(result) => result,
            };
            let op = self.slots[slot].take().expect("seen above");
            self.free.push(slot);
            self.bounces.extend(op.bounce);
            op.job.finish_piece(result);
        }
    }

    fn next_completion(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }
}

impl Op {
    fn entry(&mut self) -> squeue::Entry {
        let file = self.job.file(&self.piece);
        let cached = types::Fd(file.cached_fd());
        let Some(progress) = &self.progress else {
            return opcode::Fsync::new(cached).flags(types::FsyncFlags::DATASYNC).build();
        };
        let fd = if self.piece.route == Route::Edge { cached } else { types::Fd(file.direct_fd()) };
        let range = progress.next();
        let memory = self.bounce.as_mut().map_or_else(|| self.job.address(&self.piece), IoBuf::as_mut_ptr);
        // SAFETY: the range lies inside the piece, and the memory holds the piece.
        let start = unsafe { memory.add(range.start) };
        let offset = self.piece.offset + range.start as u64;
        let len = u32::try_from(range.len()).expect("a transfer is at most 0x7ffff000 bytes");
        match self.job.kind() {
            Some(OpKind::Write) => opcode::Write::new(fd, start, len).offset(offset).build(),
            Some(OpKind::Read) | None => opcode::Read::new(fd, start, len).offset(offset).build(),
        }
    }

    /// Takes a completion; `None` when the operation has to go on.
    fn complete(&mut self, res: i32) -> Option<Result<(), crate::IoError>> {
        let Some(progress) = &mut self.progress else {
            return match from_kernel(res) {
                Ok(_) => Some(Ok(())),
                Err(libc::EINTR | libc::EAGAIN) => None,
                Err(errno) => Some(Err(self.job.error(&self.piece, 0, Failure::Errno(errno)))),
            };
        };
        match progress.complete(from_kernel(res)) {
            Step::Continue => None,
            Step::Fail(failure) => Some(Err(self.job.error(&self.piece, progress.known_bytes(), failure))),
            Step::Done => {
                if let (Some(bounce), Some(OpKind::Read)) = (&self.bounce, self.job.kind()) {
                    // SAFETY: the piece's bytes are the job's until it is finished; the kernel is done with both.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            bounce.as_ptr(),
                            self.job.address(&self.piece),
                            self.piece.len,
                        );
                    }
                }
                Some(Ok(()))
            }
        }
    }
}

impl Drop for Driver {
    /// After a panic or a failed `enter`, operations may still be in the kernel: waits for them, or leaks what they
    /// touch. Closing the ring does not wait for them by itself.
    fn drop(&mut self) {
        if self.wake_is_armed {
            super::wake(&self.wake);
        }
        let mut failures = 0;
        while self.in_kernel > 0 && failures < 100 {
            let entered = self.ring.submit_and_wait(1);
            while self.next_completion().is_some() {
                self.in_kernel -= 1;
                failures = 0;
            }
            failures += u32::from(entered.is_err());
        }
        if self.in_kernel > 0 {
            for op in self.slots.iter_mut().filter_map(Option::take) {
                op.job.leak();
                std::mem::forget(op.bounce);
            }
            std::mem::forget(std::mem::take(&mut self.wake_count));
        }
    }
}
