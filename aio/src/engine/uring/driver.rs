//! The thread that owns a ring.
//!
//! Invariants:
//! - Every operation lives in a slot from its first submission to its last completion, and a slot has at most one
//!   SQE in the kernel.
//! - A job's buffer, and a slot's bounce buffer, outlive the operation: the slot holds the job. On the way out the
//!   driver waits for every operation before anything is freed; if it cannot, it leaks them.
//! - While the driver sleeps it either has every device's queue full, so that a completion must come first, or the
//!   wake read is in the kernel and it looked for work after announcing that it wants to be woken. So no request
//!   is missed.
//!
//! **Gathering.** With the queues of busy devices full, nothing can be started before something has ended, so the driver does not wake
//! for every completion but waits for an eighth of what is in flight, for no longer than about the time that should
//! take (Linux 6.12). The queue then never runs below seven eighths, a completion is seen late by about an eighth
//! of the time it took anyway, and there are that many fewer wakes.

use super::super::config::{EngineConfig, QUEUE_DEPTH_MAX};
use super::super::job::{Job, JobPool};
use super::super::lanes::{Lanes, Taken};
use super::super::progress::{Failure, Progress, Step, from_kernel};
use super::super::slice::ask_for_short_slices;
use super::super::split::{Piece, Route};
use super::port::Port;
use super::ring::Wish;
use super::{Link, Order};
use crate::completions::Batch;
use crate::{IoBuf, OpKind, Urgency};
use io_uring::{opcode, squeue, types};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

/// `user_data` of the eventfd's read; slots count from zero.
const WAKE: u64 = u64::MAX;

/// Entries that go to the kernel at once, so that the drive works on the first while the next are prepared.
const SUBMIT_BATCH: usize = 4;

/// Gathering waits for this share of what is in flight.
const GATHER_SHARE: usize = 8;

/// Bounds of one gathering wait, in microseconds.
const GATHER_US: (f64, f64) = (20.0, 2000.0);

/// Owns the ring. Not `Send` in spirit: it is made and used on one thread.
pub(super) struct Driver {
    // The rings are declared first, so that they close before any buffer below is freed.
    main: Port,
    /// For direct transfers on devices that have shown that they can be polled.
    polled: Option<Port>,
    link: Arc<Link>,
    /// Where the kernel puts the eventfd's count.
    wake_count: Box<u64>,
    wake_is_armed: bool,
    /// By urgency.
    inboxes: [Receiver<Arc<Job>>; 2],
    /// Both, which are closed together.
    inboxes_are_closed: bool,
    jobs: Arc<JobPool>,
    lanes: Lanes,
    /// Whether each lane's device can be polled, as far as is known.
    polling: Vec<Polling>,
    /// Requests admitted and not finished, by urgency.
    requests: [usize; 2],
    requests_max: usize,
    slots: Vec<Option<Op>>,
    free: Vec<usize>,
    /// Slots whose next transfer is to be submitted.
    pending: Vec<usize>,
    bounces: Vec<IoBuf>,
    transfer_bytes_max: usize,
    pace: Pace,
}

/// One piece on its way.
struct Op {
    lane: usize,
    job: Arc<Job>,
    piece: Piece,
    /// `None` for an `fdatasync`.
    progress: Option<Progress>,
    bounce: Option<IoBuf>,
    /// Submitted to the polled ring.
    is_polled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Polling {
    Unknown,
    /// A read is under way that will tell.
    Tried,
    Works,
    Fails,
}

/// How often completions come, on average: they come in bursts, so a window is many of them long.
struct Pace {
    window_began: Instant,
    in_window: usize,
    /// Microseconds between completions in the last whole window.
    interval_us: f64,
}

/// Completions in a window.
const PACE_WINDOW: usize = 64;

impl Driver {
    pub fn new(
        config: &EngineConfig,
        link: Arc<Link>,
        jobs: Arc<JobPool>,
        inboxes: [Receiver<Arc<Job>>; 2],
    ) -> io::Result<Self> {
        let depth = config.queue_depth;
        let entries = u32::try_from(depth + 1).map_err(io::Error::other)?;
        let wish =
            Wish { entries, completions: entries.max(64) * 4, sq_poll: config.sq_poll, io_poll: false };
        let main = Port::open(wish, config.register)?;
        let mut driver = Self {
            main,
            polled: None,
            link,
            wake_count: Box::new(0),
            wake_is_armed: false,
            inboxes,
            inboxes_are_closed: false,
            jobs,
            lanes: Lanes::new(depth),
            polling: Vec::new(),
            requests: [0; 2],
            requests_max: (config.requests_max - config.requests_max / 2).max(1),
            slots: Vec::with_capacity(depth),
            free: Vec::with_capacity(depth),
            pending: Vec::with_capacity(depth),
            bounces: Vec::new(),
            transfer_bytes_max: config.transfer_bytes_max,
            pace: Pace { window_began: Instant::now(), in_window: 0, interval_us: 0.0 },
        };
        if config.io_poll {
            match Port::open(Wish { io_poll: true, ..wish }, config.register) {
                Ok(port) => driver.polled = Some(port),
                Err(error) => driver.main.note(format!("polled completions: {error}")),
            }
        }
        driver.publish_facts();
        Ok(driver)
    }

    /// Moves requests until the channels are closed and everything is done.
    pub fn run(mut self) {
        ask_for_short_slices();
        let reports = Batch::begin();
        loop {
            self.carry_out_orders();
            self.fill_slots();
            let submitted = self.submit_pending();
            reports.wake();
            if let Err(error) = submitted {
                return self.give_up(&error);
            }
            if self.inboxes_are_closed && self.requests == [0; 2] {
                // The wake read may still be armed, with its wake spent earlier: `drop` ends it.
                return;
            }
            if !self.lanes.is_full() && !self.inboxes_are_closed {
                if let Err(error) = self.arm_wake() {
                    return self.give_up(&error);
                }
                self.link.wants_wake.store(true, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                if self.link.has_orders.load(Ordering::Relaxed) || self.admit_more() {
                    self.link.wants_wake.store(false, Ordering::Relaxed);
                    continue;
                }
            }
            let entered = self.enter();
            self.link.wants_wake.store(false, Ordering::Relaxed);
            if let Err(error) = entered {
                return self.give_up(&error);
            }
            self.reap();
        }
    }

    /// Says why requests will fail from now on: those under way when the driver is dropped, later ones for want of it.
    fn give_up(&self, error: &io::Error) {
        tracing::error!(%error, "io_uring_enter failed: the engine stops and its requests fail");
        self.link.facts().fallbacks.push(format!("the engine has stopped: io_uring_enter: {error}"));
    }

    fn carry_out_orders(&mut self) {
        if !self.link.has_orders.swap(false, Ordering::SeqCst) {
            return;
        }
        let orders = self.link.orders().as_mut().map(std::mem::take);
        for order in orders.into_iter().flatten() {
            let ports = std::iter::once(&mut self.main).chain(&mut self.polled);
            match order {
                Order::Register { addresses, reply } => {
                    // SAFETY: the giver of the order keeps the memory as it is until it is unregistered.
                    let taken = unsafe { self.main.register(&addresses) };
                    if let Some(polled) = self.polled.as_mut().filter(|_| taken) {
                        // SAFETY: as above. Refused here, transfers by polling go unregistered.
                        unsafe { polled.register(&addresses) };
                    }
                    self.publish_facts();
                    let _ = reply.send(taken);
                }
                Order::Unregister { start } => {
                    ports.for_each(|port| port.unregister(start));
                    self.publish_facts();
                }
                Order::ForgetFile { id, reply } => {
                    ports.for_each(|port| port.forget_file(id));
                    let _ = reply.send(true);
                }
            }
        }
    }

    /// Takes requests from the channels and starts pieces until every device is busy or the channels are empty. (Pieces of
    /// a request that is over take no slot, so one round can leave room and a channel full.)
    fn fill_slots(&mut self) {
        loop {
            let more = self.admit_more();
            self.start_pieces();
            if !more || self.lanes.is_full() {
                return;
            }
        }
    }

    /// Takes requests from the channels, no more than may be accepted: the rest wait in the channels and then in
    /// `submit`. Returns whether there were any.
    fn admit_more(&mut self) -> bool {
        let before = self.requests;
        let mut closed = 0;
        for urgency in Urgency::ALL {
            while self.requests[urgency as usize] < self.requests_max {
                match self.inboxes[urgency as usize].try_recv() {
                    Ok(job) => {
                        // What was ordered before the request was sent is carried out before it starts.
                        self.carry_out_orders();
                        self.requests[urgency as usize] += 1;
                        self.lanes.admit(job);
                    }
                    Err(error) => {
                        closed += usize::from(error == TryRecvError::Disconnected);
                        break;
                    }
                }
            }
        }
        self.inboxes_are_closed = closed == self.inboxes.len();
        self.requests != before
    }

    /// Gives pieces a slot while a device has room.
    fn start_pieces(&mut self) {
        while self.lanes.in_flight() < QUEUE_DEPTH_MAX {
            let Some(taken) = self.lanes.take() else { return };
            if taken.job.is_over() {
                self.finish(taken.lane, taken.job, Ok(()));
                continue;
            }
            let op = self.op(taken);
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots.push(None);
                self.slots.len() - 1
            });
            self.slots[slot] = Some(op);
            self.pending.push(slot);
        }
    }

    fn finish(&mut self, lane: usize, job: Arc<Job>, result: Result<(), crate::IoError>) {
        self.lanes.done(lane);
        let urgency = job.urgency() as usize;
        if self.jobs.finish_piece(job, result) {
            self.requests[urgency] -= 1;
        }
    }

    fn op(&mut self, taken: Taken) -> Op {
        let Taken { lane, job, piece } = taken;
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
        let is_polled = self.polled.is_some() && self.may_poll(lane, &job, &piece);
        Op { lane, job, piece, progress, bounce, is_polled }
    }

    /// Whether a piece goes to the polled ring. The first read of each device does, and shows whether the others may.
    fn may_poll(&mut self, lane: usize, job: &Job, piece: &Piece) -> bool {
        if piece.route != Route::Direct && piece.route != Route::Bounce {
            return false;
        }
        if self.polling.len() <= lane {
            self.polling.resize(lane + 1, Polling::Unknown);
        }
        let polling = &mut self.polling[lane];
        if *polling == Polling::Unknown && job.kind() == Some(OpKind::Read) {
            *polling = Polling::Tried;
            return true;
        }
        *polling == Polling::Works
    }

    fn submit_pending(&mut self) -> io::Result<()> {
        let mut pending = std::mem::take(&mut self.pending);
        for (index, slot) in pending.drain(..).enumerate() {
            if index > 0 && index % SUBMIT_BATCH == 0 {
                // Should it fail, so does the `enter` that follows, which tells.
                let _ = self.main.submit();
            }
            let op = self.slots[slot].as_mut().expect("a pending slot holds its operation");
            let port = if op.is_polled { self.polled.as_mut() } else { None }.unwrap_or(&mut self.main);
            let entry = op.entry(port).user_data(slot as u64);
            // SAFETY: the slot keeps descriptor and memory alive until the completion.
            unsafe { port.push(&entry) }?;
        }
        self.pending = pending;
        Ok(())
    }

    fn arm_wake(&mut self) -> io::Result<()> {
        if !self.wake_is_armed {
            let target = std::ptr::from_mut(&mut *self.wake_count).cast::<u8>();
            let entry = opcode::Read::new(types::Fd(self.link.wake.as_raw_fd()), target, 8).build();
            // SAFETY: the link keeps the eventfd open, and `wake_count` outlives the read: `drop` waits or leaks it.
            unsafe { self.main.push(&entry.user_data(WAKE)) }?;
            self.wake_is_armed = true;
        }
        Ok(())
    }

    /// Submits and sleeps until a completion is there.
    fn enter(&mut self) -> io::Result<()> {
        if let Some(polled) = self.polled.as_mut().filter(|port| port.in_kernel() > 0) {
            // Polling is what makes progress there, so this must not sleep for anything else.
            self.main.submit()?;
            return polled.submit_and_wait(1);
        }
        let want = self.main.in_kernel() / GATHER_SHARE;
        if want < 2 || !self.lanes.busy_are_full() || !self.main.can_gather() {
            return self.main.submit_and_wait(1);
        }
        self.main.submit_and_gather(want, self.pace.gather_us(want))
    }

    fn reap(&mut self) {
        let mut count = 0;
        while let Some((tag, result)) = self.main.next_completion() {
            if tag == WAKE {
                self.wake_is_armed = false;
                continue;
            }
            count += 1;
            // The tag was made from a slot number.
            self.complete(tag as usize, result);
        }
        while let Some((tag, result)) = self.polled.as_mut().and_then(Port::next_completion) {
            self.complete_polled(tag as usize, result);
        }
        self.pace.note(count);
        if self.main.has_news() {
            self.publish_facts();
        }
    }

    fn complete_polled(&mut self, slot: usize, result: i32) {
        let op = self.slots[slot].as_mut().expect("a completion belongs to an operation");
        let polling = &mut self.polling[op.lane];
        if *polling == Polling::Tried {
            *polling = if result >= 0 { Polling::Works } else { Polling::Fails };
            if result >= 0 {
                self.publish_facts();
            } else {
                let path = op.job.file(&op.piece).path.display();
                let error = io::Error::from_raw_os_error(-result);
                self.main.note(format!("polled completions on {path}: {error}"));
                op.is_polled = false;
                self.pending.push(slot);
                return;
            }
        }
        self.complete(slot, result);
    }

    fn complete(&mut self, slot: usize, result: i32) {
        let op = self.slots[slot].as_mut().expect("a completion belongs to an operation");
        let Some(result) = op.complete(result) else {
            self.pending.push(slot);
            return;
        };
        let op = self.slots[slot].take().expect("seen above");
        self.free.push(slot);
        self.bounces.extend(op.bounce);
        self.finish(op.lane, op.job, result);
    }

    fn publish_facts(&mut self) {
        let mut facts = self.link.facts();
        facts.features = self.main.features();
        if self.polling.contains(&Polling::Works) {
            facts.features.push("iopoll");
        }
        facts.registered_bytes = self.main.registered_bytes();
        for refusal in self.main.take_news() {
            if facts.fallbacks.contains(&refusal) {
                continue;
            }
            static WARNED: std::sync::Once = std::sync::Once::new();
            WARNED.call_once(|| tracing::warn!(%refusal, "io_uring goes on without what it was refused"));
            facts.fallbacks.push(refusal);
        }
        // What was refused whenever it was asked for is not in use.
        let memory = "registered memory";
        if facts.registered_bytes == 0 && facts.fallbacks.iter().any(|why| why.starts_with(memory)) {
            facts.features.retain(|feature| *feature != memory);
        }
    }
}

impl Op {
    fn entry(&mut self, port: &mut Port) -> squeue::Entry {
        let file = self.job.file(&self.piece);
        let Some(progress) = &self.progress else {
            let cached = types::Fd(file.cached_fd());
            return opcode::Fsync::new(cached).flags(types::FsyncFlags::DATASYNC).build();
        };
        let is_edge = self.piece.route == Route::Edge;
        let file_index = if is_edge { None } else { port.file_index(file) };
        let fd = match file_index {
            Some(index) => types::Fd(index.cast_signed()),
            None if is_edge => types::Fd(file.cached_fd()),
            None => types::Fd(file.direct_fd()),
        };
        let range = progress.next();
        let memory = self.bounce.as_mut().map_or_else(|| self.job.address(&self.piece), IoBuf::as_mut_ptr);
        // SAFETY: the range lies inside the piece, and the memory holds the piece.
        let start = unsafe { memory.add(range.start) };
        let offset = self.piece.offset + range.start as u64;
        let len = u32::try_from(range.len()).expect("a transfer is at most 0x7ffff000 bytes");
        // A bounce buffer may lie where memory was whose registration is still to be ended: the kernel has the old pages.
        let chunk = if self.bounce.is_some() { None } else { port.chunk_of(start as usize, range.len()) };
        let entry = match (self.job.kind(), chunk) {
            (Some(OpKind::Write), None) => opcode::Write::new(fd, start, len).offset(offset).build(),
            (Some(OpKind::Write), Some(chunk)) => {
                opcode::WriteFixed::new(fd, start, len, chunk).offset(offset).build()
            }
            (_, None) => opcode::Read::new(fd, start, len).offset(offset).build(),
            (_, Some(chunk)) => opcode::ReadFixed::new(fd, start, len, chunk).offset(offset).build(),
        };
        if file_index.is_some() { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
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

impl Pace {
    /// `count` more completions have come.
    fn note(&mut self, count: usize) {
        self.in_window += count;
        if self.in_window >= PACE_WINDOW {
            let now = Instant::now();
            self.interval_us =
                now.duration_since(self.window_began).as_secs_f64() * 1e6 / self.in_window as f64;
            (self.window_began, self.in_window) = (now, 0);
        }
    }

    /// How long to wait for `want` completions: about as long as they should take.
    fn gather_us(&self, want: usize) -> u32 {
        // Clamped to a small positive number.
        (self.interval_us * want as f64).clamp(GATHER_US.0, GATHER_US.1) as u32
    }
}

impl Drop for Driver {
    /// After a panic or a failed `enter`, operations may still be in the kernel: waits for them, or leaks what they
    /// touch. Closing the ring does not wait for them by itself.
    fn drop(&mut self) {
        // Callers that wait for an answer must not wait for ever, now or later.
        drop(self.link.orders().take());
        if self.wake_is_armed {
            super::wake(&self.link.wake);
        }
        let main_is_clear = self.main.drain();
        let polled_is_clear = self.polled.as_mut().is_none_or(Port::drain);
        if !main_is_clear || !polled_is_clear {
            for op in self.slots.iter_mut().filter_map(Option::take) {
                op.job.leak();
                std::mem::forget(op.bounce);
            }
            std::mem::forget(std::mem::take(&mut self.wake_count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::OpenMode;
    use super::super::super::files::FileTable;
    use super::*;
    use crate::Request;

    #[test]
    fn a_bounce_buffer_is_not_taken_for_registered_memory() {
        // Where io_uring is forbidden, or memory cannot be registered, there is nothing to try.
        let wish = Wish { entries: 4, completions: 8, ..Wish::default() };
        let Ok(mut port) = Port::open(wish, true) else { return };
        let dir = tempfile::tempdir().unwrap();
        let table = FileTable::new(false);
        let file = table.open(&dir.path().join("file"), OpenMode::CreateNew { len: 4096 }).unwrap();
        let (jobs, mut made) = (JobPool::default(), None);
        let request = Request::write(file, 0, IoBuf::zeroed(4096));
        let ticket = jobs.transfer(request, &table, 4096, |job| made = Some(job));
        let job = made.expect("there are bytes to move");
        // As if the memory that was registered at this address were gone, and its registration still to be ended.
        let bounce = IoBuf::zeroed(4096);
        let start = bounce.as_ptr() as usize;
        // SAFETY: the buffer outlives the port, which is dropped below.
        if unsafe { port.register(&(start..start + 4096)) } {
            let piece = Piece { segment: 0, offset: 0, start: 0, len: 4096, route: Route::Bounce };
            let progress = Some(Progress::new(OpKind::Write, 4096, 4096, 4096));
            let bounce = Some(bounce);
            let mut op = Op { lane: 0, job: Arc::clone(&job), piece, progress, bounce, is_polled: false };
            assert_eq!(op.entry(&mut port).get_opcode(), u32::from(opcode::Write::CODE));
            drop(port);
        }
        assert!(jobs.finish_piece(job, Ok(())));
        ticket.wait().unwrap();
    }
}
