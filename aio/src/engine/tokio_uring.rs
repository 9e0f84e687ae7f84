//! The tokio-uring crate as an engine, for comparison with [`UringEngine`](super::UringEngine).
//!
//! One thread runs its runtime. A request becomes a task for every piece, no more than the queue's depth at once:
//!
//! ```text
//! callers --submit--> channels (bounded) -> line --permit--> task: read_at / write_at until the piece is whole
//!         --notify-----------^                                  '--> tickets resolve
//! ```
//! There is a channel for each urgency, and in the line the urgent go first.
//!
//! **Why not the default:** the crate had its last release in May 2024 and pins an older io-uring. Its `File` must own
//! its descriptor, so every piece duplicates one and closes it again; completions are found through epoll, one more
//! system call; and every operation allocates. It knows neither `DEFER_TASKRUN` nor files registered in advance.
//!
//! **Rejected:** the channel of tokio. Its blocking `send` panics inside a runtime, and `submit` may be called there.
//!
//! Dropping the engine finishes everything that was submitted.

use super::config::EngineConfig;
use super::files::{FileTable, serve_files};
use super::job::{Job, JobPool};
use super::lanes::PieceLine;
use super::progress::{Failure, Progress, Step};
use super::split::{Cursor, Piece, Route};
use super::{FileId, IoEngine, OpKind, Request, UringEngine, uring};
use crate::{IoBuf, IoError, Ticket, Urgency};
use std::fs::File as StdFile;
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender, TryRecvError};
use std::thread::JoinHandle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_uring::fs::File;

/// Reads and writes with the tokio-uring crate.
#[derive(Debug)]
pub struct TokioUringEngine {
    files: FileTable,
    block_bytes: usize,
    /// By urgency; `None` only while the engine is being dropped.
    inboxes: Option<[SyncSender<Arc<Job>>; 2]>,
    jobs: Arc<JobPool>,
    wake: Arc<Notify>,
    runner: Option<JoinHandle<()>>,
}

impl TokioUringEngine {
    /// Starts the thread and its runtime.
    ///
    /// # Errors
    /// io_uring is not available, or the thread cannot be started.
    pub fn new(config: &EngineConfig) -> Result<Self, IoError> {
        // Where the ring cannot be made, the crate leaks the runtime it has made before it.
        UringEngine::probe()?;
        let config = config.clamped();
        let (files, block_bytes) = (FileTable::new(config.direct), config.block_bytes);
        // Half of the accepted requests wait in the channels, half in the line.
        let [soon, whenever] = Urgency::ALL.map(|_| mpsc::sync_channel(half(config.requests_max)));
        let (inboxes, requests) = ([soon.0, whenever.0], [soon.1, whenever.1]);
        let (ready, is_ready) = mpsc::channel();
        let wake = Arc::new(Notify::new());
        let jobs = Arc::<JobPool>::default();
        let (runner_wake, runner_jobs) = (Arc::clone(&wake), Arc::clone(&jobs));
        // The runtime belongs to its thread.
        let runner = std::thread::Builder::new()
            .name("aio-tokio-uring".to_owned())
            .spawn(move || match start_runtime(config.queue_depth) {
                Ok(runtime) => {
                    // The receiver is waiting just below.
                    let _ = ready.send(Ok(()));
                    runtime.block_on(run(&config, &requests, &runner_wake, &runner_jobs));
                }
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(|e| IoError::from_os("starting a thread for", Path::new("disk I/O"), 0, 0, &e))?;
        match is_ready.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(uring::unavailable(&error)),
            Err(_) => return Err(uring::unavailable(&io::Error::other("the runtime died at its start"))),
        }
        Ok(Self { files, block_bytes, inboxes: Some(inboxes), jobs, wake, runner: Some(runner) })
    }

    fn enqueue(&self, job: Arc<Job>) {
        let Some(inboxes) = &self.inboxes else { return };
        let inbox = &inboxes[job.urgency() as usize];
        // If the thread is gone the job comes back in the error and is dropped, which resolves the ticket as Closed.
        if inbox.send(job).is_ok() {
            self.wake.notify_one();
        }
    }
}

impl IoEngine for TokioUringEngine {
    fn name(&self) -> &str {
        "tokio_uring"
    }

    serve_files!();

    fn close(&self, file: FileId) -> Result<(), IoError> {
        self.files.close(file)
    }

    fn submit(&self, request: Request) -> Ticket {
        self.jobs.transfer(request, &self.files, self.block_bytes, |job| self.enqueue(job))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.jobs.sync(file, &self.files, |job| self.enqueue(job))
    }
}

impl Drop for TokioUringEngine {
    fn drop(&mut self) {
        // Closed channels tell the thread to finish; the wake makes it look.
        self.inboxes = None;
        self.wake.notify_one();
        if let Some(runner) = self.runner.take() {
            super::join(runner);
        }
    }
}

fn start_runtime(queue_depth: usize) -> io::Result<tokio_uring::Runtime> {
    let entries = u32::try_from(queue_depth).map_err(io::Error::other)?;
    tokio_uring::Runtime::new(tokio_uring::builder().entries(entries))
}

/// Half of the requests that are accepted.
fn half(requests_max: usize) -> usize {
    (requests_max / 2).max(1)
}

/// Takes requests from the channels until they are closed, and waits for what is in flight.
async fn run(config: &EngineConfig, inboxes: &[Receiver<Arc<Job>>; 2], wake: &Notify, jobs: &Arc<JobPool>) {
    let depth = u32::try_from(config.queue_depth).expect("the depth is bounded by QUEUE_DEPTH_MAX");
    let free = Arc::new(Semaphore::new(config.queue_depth));
    let (mut line, line_max) = (PieceLine::with_capacity(config.queue_depth), half(config.requests_max));
    loop {
        let are_closed = admit(inboxes, &mut line, line_max);
        if line.is_empty() {
            if are_closed {
                break;
            }
            // Callers send first and notify after, and a notification without a waiter is kept: none is missed.
            wake.notified().await;
            continue;
        }
        let permit = Arc::clone(&free).acquire_owned().await.expect("the semaphore is never closed");
        // What has come meanwhile may go first.
        admit(inboxes, &mut line, line_max);
        let Some((job, piece)) = line.take() else { continue };
        start(job, piece, jobs, permit, config.transfer_bytes_max);
    }
    // Every task has its permit until the end.
    let _all = free.acquire_many(depth).await;
}

/// Lets what is in the channels wait in the line, up to a number of requests of each urgency. Whether the channels are closed, and
/// empty.
fn admit(inboxes: &[Receiver<Arc<Job>>; 2], line: &mut PieceLine, line_max: usize) -> bool {
    let mut closed = 0;
    for (urgency, inbox) in Urgency::ALL.into_iter().zip(inboxes) {
        while line.len(urgency) < line_max {
            match inbox.try_recv() {
                Ok(job) => line.push(job, Cursor::default()),
                Err(error) => {
                    closed += usize::from(error == TryRecvError::Disconnected);
                    break;
                }
            }
        }
    }
    closed == inboxes.len()
}

/// Starts a task for a piece.
fn start(
    job: Arc<Job>,
    piece: Piece,
    jobs: &Arc<JobPool>,
    permit: OwnedSemaphorePermit,
    transfer_bytes_max: usize,
) {
    let jobs = Arc::clone(jobs);
    if job.is_over() {
        jobs.finish_piece(job, Ok(()));
        return;
    }
    tokio_uring::spawn(async move {
        let result = match job.kind() {
            Some(kind) => move_piece(&job, kind, &piece, transfer_bytes_max).await,
            None => sync_file(&job, &piece).await,
        };
        // Lets go of the job, so that its files may close, and then the engine.
        jobs.finish_piece(job, result);
        drop(permit);
    });
}

/// Moves one piece to its end.
async fn move_piece(
    job: &Arc<Job>,
    kind: OpKind,
    piece: &Piece,
    transfer_bytes_max: usize,
) -> Result<(), IoError> {
    let failed = |known: usize, errno| job.error(piece, known, Failure::Errno(errno));
    let file = own_file(job, piece).map_err(|e| failed(0, errno(&e)))?;
    let mut memory = Memory::new(job, kind, piece);
    let mut progress = Progress::new(kind, piece.len, job.unit(piece), transfer_bytes_max);
    loop {
        memory.range = progress.next();
        let offset = piece.offset + memory.range.start as u64;
        let (result, returned) = match kind {
            OpKind::Read => file.read_at(memory, offset).await,
            OpKind::Write => file.write_at(memory, offset).submit().await,
        };
        memory = returned;
        match progress.complete(result.map_err(|e| errno(&e))) {
            Step::Done => break,
            Step::Continue => {}
            Step::Fail(failure) => return Err(job.error(piece, progress.known_bytes(), failure)),
        }
    }
    if let (Some(bounce), OpKind::Read) = (&memory.bounce, kind) {
        // SAFETY: the piece's bytes are the job's until it is finished; the kernel is done with both.
        unsafe { std::ptr::copy_nonoverlapping(bounce.as_ptr(), job.address(piece), piece.len) };
    }
    Ok(())
}

async fn sync_file(job: &Job, piece: &Piece) -> Result<(), IoError> {
    let synced = match own_file(job, piece) {
        Ok(file) => loop {
            match file.sync_data().await {
                Err(e) if matches!(errno(&e), libc::EINTR | libc::EAGAIN) => {}
                result => break result,
            }
        },
        Err(error) => Err(error),
    };
    synced.map_err(|e| job.error(piece, 0, Failure::Errno(errno(&e))))
}

/// A descriptor of the piece's file that the crate may own, and close.
fn own_file(job: &Job, piece: &Piece) -> io::Result<File> {
    let file = job.file(piece);
    let fd = match piece.route {
        Route::Direct | Route::Bounce => file.direct_fd(),
        Route::Edge | Route::Sync => file.cached_fd(),
    };
    // SAFETY: the job keeps its files open.
    let owned: OwnedFd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
    Ok(File::from_std(StdFile::from(owned)))
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// The memory of a piece, lent to one operation after the other.
///
/// An operation owns it, and with it a share of the job (or the bounce buffer), until its completion has arrived:
/// should the task be dropped before, the crate keeps the operation's data until then. So the memory outlives the
/// kernel's use of it whatever happens to the task.
struct Memory {
    /// Only held: it owns the memory that `start` points to unless there is a bounce buffer.
    _job: Arc<Job>,
    bounce: Option<IoBuf>,
    /// Where the piece's bytes are.
    start: *mut u8,
    /// What of the piece moves next.
    range: Range<usize>,
}

impl Memory {
    fn new(job: &Arc<Job>, kind: OpKind, piece: &Piece) -> Self {
        let address = job.address(piece);
        let mut bounce = (piece.route == Route::Bounce).then(|| IoBuf::zeroed(piece.len));
        if let (Some(buf), OpKind::Write) = (&mut bounce, kind) {
            // SAFETY: the piece's bytes are the job's until it is finished, and the bounce buffer is ours.
            unsafe { std::ptr::copy_nonoverlapping(address, buf.as_mut_ptr(), piece.len) };
        }
        let start = bounce.as_mut().map_or(address, IoBuf::as_mut_ptr);
        Self { _job: Arc::clone(job), bounce, start, range: 0..0 }
    }
}

// SAFETY: the address does not depend on where this value is, and stays valid as long as the value exists: the bounce
// buffer is part of it, and the job keeps its buffer until the piece is finished or the job is dropped, which this share
// of it delays. All bytes are initialized, and no other operation has the piece.
unsafe impl tokio_uring::buf::IoBuf for Memory {
    fn stable_ptr(&self) -> *const u8 {
        // SAFETY: the range lies inside the piece.
        unsafe { self.start.add(self.range.start) }
    }

    fn bytes_init(&self) -> usize {
        self.range.len()
    }

    fn bytes_total(&self) -> usize {
        self.range.len()
    }
}

// SAFETY: as above; the memory is writable, for it is a request's or an engine's buffer.
unsafe impl tokio_uring::buf::IoBufMut for Memory {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        // SAFETY: the range lies inside the piece.
        unsafe { self.start.add(self.range.start) }
    }

    unsafe fn set_init(&mut self, _: usize) {
        // All of it is initialized already.
    }
}
