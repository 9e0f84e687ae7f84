//! A pool of threads that call `pread` and `pwrite`: the engine where io_uring is forbidden.
//!
//! Requests wait in bounded queues, one per device. A thread takes the next *piece*, an urgent one if there is, for the least busy device, moves it
//! to the end with the shared progress machine and comes back, so one large request is moved by all threads at once and
//! a slow device does not occupy them all while another has work.
//! Dropping the engine finishes what was submitted.

use super::config::EngineConfig;
use super::files::{FileTable, serve_files};
use super::job::{Job, JobPool};
use super::lanes::{Lanes, Taken};
use super::progress::{Failure, Progress, Step};
use super::slice::ask_for_short_slices;
use super::split::{Piece, Route};
use super::{EngineFacts, FileId, IoEngine, OpKind, Request};
use crate::{IoBuf, IoError, Ticket, Urgency};
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Reads and writes with a pool of threads.
#[derive(Debug)]
pub struct ThreadsEngine {
    files: FileTable,
    block_bytes: usize,
    queue: Arc<Queue>,
    workers: Vec<JoinHandle<()>>,
    fallbacks: Vec<String>,
}

#[derive(Debug)]
struct Queue {
    state: Mutex<QueueState>,
    /// There is work, or the end.
    work: Condvar,
    /// There is room, by urgency.
    room: [Condvar; 2],
    requests_max: usize,
    jobs: JobPool,
}

#[derive(Debug)]
struct QueueState {
    lanes: Lanes,
    /// Requests accepted and not finished, by urgency.
    requests: [usize; 2],
    /// Threads that sleep until there is work.
    idle: usize,
    closed: bool,
}

impl ThreadsEngine {
    /// Starts the pool.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new(config: &EngineConfig) -> Result<Self, IoError> {
        let config = config.clamped();
        let queue = Arc::new(Queue {
            state: Mutex::new(QueueState {
                lanes: Lanes::new(config.threads),
                requests: [0; 2],
                idle: 0,
                closed: false,
            }),
            work: Condvar::new(),
            room: Urgency::ALL.map(|_| Condvar::new()),
            requests_max: config.requests_max,
            jobs: JobPool::default(),
        });
        let files = FileTable::new(config.direct);
        let (block_bytes, workers, fallbacks) = (config.block_bytes, Vec::new(), Vec::new());
        let mut engine = Self { files, block_bytes, queue, workers, fallbacks };
        for index in 0..config.threads {
            let queue = Arc::clone(&engine.queue);
            let worker = std::thread::Builder::new()
                .name(format!("aio-{index}"))
                .spawn(move || queue.run(config.transfer_bytes_max))
                .map_err(|e| IoError::from_os("starting a thread for", Path::new("disk I/O"), 0, 0, &e))?;
            engine.workers.push(worker);
        }
        Ok(engine)
    }

    /// The same in the place of an engine that is not available, and why: among its [facts](IoEngine::facts).
    pub(super) fn in_place_of(mut self, engine: &str, reason: &str) -> Self {
        self.fallbacks.push(format!("{engine}: {reason}"));
        self
    }

    fn enqueue(&self, job: Arc<Job>) {
        let urgency = job.urgency() as usize;
        let mut state = self.queue.lock();
        while state.requests[urgency] >= self.queue.requests_max {
            state = self.queue.room[urgency].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.requests[urgency] += 1;
        state.lanes.admit(job);
        let is_someone_idle = state.idle > 0;
        drop(state);
        if is_someone_idle {
            self.queue.work.notify_all();
        }
    }
}

impl IoEngine for ThreadsEngine {
    fn name(&self) -> &str {
        "threads"
    }

    fn facts(&self) -> EngineFacts {
        EngineFacts { fallbacks: self.fallbacks.clone(), ..EngineFacts::default() }
    }

    serve_files!();

    fn close(&self, file: FileId) -> Result<(), IoError> {
        self.files.close(file)
    }

    fn submit(&self, request: Request) -> Ticket {
        self.queue.jobs.transfer(request, &self.files, self.block_bytes, |job| self.enqueue(job))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.queue.jobs.sync(file, &self.files, |job| self.enqueue(job))
    }
}

impl Drop for ThreadsEngine {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.work.notify_all();
        for worker in self.workers.drain(..) {
            super::join(worker);
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, transfer_bytes_max: usize) {
        ask_for_short_slices();
        let mut bounce = IoBuf::empty();
        while let Some(Taken { lane, job, piece }) = self.next() {
            let result = if job.is_over() {
                Ok(())
            } else {
                move_piece(&job, &piece, transfer_bytes_max, &mut bounce)
            };
            let urgency = job.urgency() as usize;
            let is_last = self.jobs.finish_piece(job, result);
            let mut state = self.lock();
            state.lanes.done(lane);
            if is_last {
                state.requests[urgency] -= 1;
                drop(state);
                self.room[urgency].notify_one();
            }
        }
    }

    /// The next piece; `None` once the engine is closed and everything is taken.
    fn next(&self) -> Option<Taken> {
        let mut state = self.lock();
        loop {
            if let Some(taken) = state.lanes.take() {
                return Some(taken);
            }
            if state.closed && state.lanes.is_empty() {
                return None;
            }
            state.idle += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// Moves one piece to its end.
fn move_piece(job: &Job, piece: &Piece, transfer_max: usize, bounce: &mut IoBuf) -> Result<(), IoError> {
    let Some(kind) = job.kind() else { return sync_file(job, piece) };
    let address = job.address(piece);
    let memory = match piece.route {
        Route::Bounce => {
            if bounce.capacity() < piece.len {
                *bounce = IoBuf::zeroed(piece.len);
            }
            if kind == OpKind::Write {
                // SAFETY: the piece's bytes are the job's until it is finished, and the bounce buffer is ours.
                unsafe { std::ptr::copy_nonoverlapping(address, bounce.as_mut_ptr(), piece.len) };
            }
            bounce.as_mut_ptr()
        }
        _ => address,
    };
    let file = job.file(piece);
    let fd = if piece.route == Route::Edge { file.cached_fd() } else { file.direct_fd() };
    let mut progress = Progress::new(kind, piece.len, job.unit(piece), transfer_max);
    loop {
        let range = progress.next();
        // The check of the segments made sure that the end of the range is an off_t.
        let offset = (piece.offset + range.start as u64) as libc::off_t;
        // SAFETY: `memory` is valid for `piece.len` bytes, which hold the range, and nothing else touches them.
        let count = unsafe {
            let start = memory.add(range.start).cast::<libc::c_void>();
            match kind {
                OpKind::Read => libc::pread(fd, start, range.len(), offset),
                OpKind::Write => libc::pwrite(fd, start, range.len(), offset),
            }
        };
        match progress.complete(usize::try_from(count).map_err(|_| last_errno())) {
            Step::Done => break,
            Step::Continue => {}
            Step::Fail(failure) => return Err(job.error(piece, progress.known_bytes(), failure)),
        }
    }
    if piece.route == Route::Bounce && kind == OpKind::Read {
        // SAFETY: as for the copy above.
        unsafe { std::ptr::copy_nonoverlapping(memory, address, piece.len) };
    }
    Ok(())
}

fn sync_file(job: &Job, piece: &Piece) -> Result<(), IoError> {
    // SAFETY: a system call on an open descriptor that touches no memory of ours.
    while unsafe { libc::fdatasync(job.file(piece).cached_fd()) } != 0 {
        let errno = last_errno();
        if errno != libc::EINTR {
            return Err(job.error(piece, 0, Failure::Errno(errno)));
        }
    }
    Ok(())
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
