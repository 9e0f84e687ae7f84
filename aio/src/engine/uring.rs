//! io_uring: one ring, owned by one thread, fed over a bounded channel.
//!
//! ```text
//! callers --submit--> channel (bounded) --> driver thread --SQE--> kernel
//!         --eventfd----------wake------------^    ^----------CQE-----'
//!                                                 '--> tickets resolve
//! ```
//!
//! **Why a thread:** a ring with a single issuer needs no lock and lets the kernel defer its completion work to the
//! moment the driver asks for it (`DEFER_TASKRUN`). The driver sleeps in `io_uring_enter`; a read of an eventfd
//! that is always in the ring wakes it for new requests. Rejected: a ring per caller thread (callers of this engine
//! are few and mostly waiting) and registered buffers (1–2 % of a core saved, at the price of the memlock limit).
//!
//! Dropping the engine finishes everything that was submitted, then closes the ring.

mod driver;

use super::config::EngineConfig;
use super::files::{FileTable, serve_files};
use super::job::Job;
use super::split::Cursor;
use super::{FileId, IoEngine, Request};
use crate::{IoError, IoErrorKind, Ticket};
use driver::Driver;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;

/// Reads and writes with io_uring.
#[derive(Debug)]
pub struct UringEngine {
    files: FileTable,
    block_bytes: usize,
    /// `None` only while the engine is being dropped.
    inbox: Option<SyncSender<(Job, Cursor)>>,
    wake: Arc<OwnedFd>,
    driver: Option<JoinHandle<()>>,
}

impl UringEngine {
    /// Whether io_uring works here: sets a small ring up and takes it down again.
    ///
    /// # Errors
    /// Why it does not: forbidden (a container's seccomp filter, `kernel.io_uring_disabled`), not in this kernel,
    /// or no memory may be locked for it.
    pub fn probe() -> Result<(), IoError> {
        driver::set_up_ring(2).map(drop).map_err(|e| unavailable(&e))
    }

    /// Sets the ring up and starts its thread.
    ///
    /// # Errors
    /// As for [`probe`](Self::probe), or the thread cannot be started.
    pub fn new(config: &EngineConfig) -> Result<Self, IoError> {
        let config = config.clamped();
        let wake = Arc::new(eventfd().map_err(|e| unavailable(&e))?);
        let (files, block_bytes) = (FileTable::new(config.direct), config.block_bytes);
        let (inbox, requests) = mpsc::sync_channel(config.queue_depth);
        let (ready, is_ready) = mpsc::channel();
        let driver_wake = Arc::clone(&wake);
        // The ring is made on its own thread, for that is the single issuer.
        let driver = std::thread::Builder::new()
            .name("aio-uring".to_owned())
            .spawn(move || match Driver::new(&config, driver_wake, requests) {
                Ok(driver) => {
                    // The receiver is waiting just below.
                    let _ = ready.send(Ok(()));
                    driver.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(|e| IoError::from_os("starting a thread for", Path::new("disk I/O"), 0, 0, &e))?;
        match is_ready.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(unavailable(&error)),
            Err(_) => return Err(unavailable(&io::Error::other("the ring's thread died at its start"))),
        }
        Ok(Self { files, block_bytes, inbox: Some(inbox), wake, driver: Some(driver) })
    }

    fn enqueue(&self, started: Option<(Job, Cursor)>) {
        let (Some(work), Some(inbox)) = (started, &self.inbox) else { return };
        // If the driver is gone the job comes back in the error and is dropped, which resolves the ticket as Closed.
        if inbox.send(work).is_ok() {
            wake(&self.wake);
        }
    }
}

impl IoEngine for UringEngine {
    fn name(&self) -> &str {
        "uring"
    }

    serve_files!();

    fn submit(&self, request: Request) -> Ticket {
        let (ticket, completer) = Ticket::new();
        self.enqueue(Job::transfer(request, completer, &self.files, self.block_bytes));
        ticket
    }

    fn sync(&self, file: FileId) -> Ticket {
        let (ticket, completer) = Ticket::new();
        self.enqueue(Job::sync(file, completer, &self.files));
        ticket
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        // A closed channel tells the driver to finish; the wake makes it look.
        self.inbox = None;
        wake(&self.wake);
        if let Some(driver) = self.driver.take() {
            // A driver that panicked has resolved its tickets as Closed on the way out.
            let _ = driver.join();
        }
    }
}

fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to the eventfd.
fn wake(fd: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    loop {
        // SAFETY: `one` is eight readable bytes.
        let written = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if written >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// The error for an io_uring that cannot be set up.
pub(super) fn unavailable(error: &io::Error) -> IoError {
    let why = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "it is forbidden here (a seccomp filter or kernel.io_uring_disabled)"
        }
        Some(libc::ENOSYS) => "this kernel does not have it",
        Some(libc::ENOMEM) => "the memlock limit (ulimit -l) is too low for it",
        _ => "it cannot be set up here",
    };
    let detail = format!("{error}: {why}; the threads engine works everywhere");
    IoError::new(IoErrorKind::Other, "setting up", Path::new("io_uring"), 0, 0, detail)
}
