//! io_uring: rings, each owned by one thread and fed over bounded channels, one for each urgency.
//!
//! ```text
//! callers --submit--> channels (bounded) -> driver thread --SQE--> kernel
//!         --eventfd, if it sleeps-----wake---^    ^----------CQE-----'
//!                                                 '--> tickets resolve
//! ```
//!
//! **Why a thread:** a ring with a single issuer needs no lock and lets the kernel defer its completion work to the
//! moment the driver asks for it (`DEFER_TASKRUN`), and a request that is larger than the queue goes on without its
//! owner, who is computing. The driver sleeps in `io_uring_enter`; a read of an eventfd that is always in the ring
//! wakes it for new requests, and is only written to while the driver sleeps with room for more. Rejected: a ring
//! per caller thread (callers of this engine are few and mostly waiting).
//!
//! **Urgency:** whatever is in the channels goes to the queues of its devices when a completion makes room there, and the urgent go first.
//! With several rings that is so in each; they take turns with requests of any kind, and share a device as its drive sees fit.
//!
//! **Bounds:** `queue_depth` operations in flight per device and ring, `requests_max` requests of an urgency accepted per ring; files
//! and memory registered up to the tables' sizes in [`registry`].
//!
//! Dropping the engine finishes everything that was submitted, then closes the rings.

mod driver;
mod port;
mod registry;
mod ring;

use super::config::EngineConfig;
use super::files::{FileTable, serve_files};
use super::job::{Job, JobPool};
use super::{EngineFacts, FileId, IoEngine, Registration, Request};
use crate::{IoError, IoErrorKind, Ticket, Urgency};
use driver::Driver;
use registry::CHUNK_BYTES_MAX;
use ring::Wish;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{self, Sender, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Reads and writes with io_uring.
#[derive(Debug)]
pub struct UringEngine {
    files: FileTable,
    block_bytes: usize,
    jobs: Arc<JobPool>,
    rings: Rings,
    /// The ring that gets the next request.
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Rings(Vec<Ring>);

/// The callers' end of one ring.
#[derive(Debug)]
struct Ring {
    /// By urgency; `None` only while the ring is being closed.
    inboxes: Option<[SyncSender<Arc<Job>>; 2]>,
    link: Arc<Link>,
    driver: Option<JoinHandle<()>>,
}

/// What a ring's callers and its driver share besides the channel.
#[derive(Debug)]
struct Link {
    /// An eventfd.
    wake: OwnedFd,
    /// The driver sleeps, or is about to, and could start more work if there were any.
    wants_wake: AtomicBool,
    /// Orders besides requests. Whoever gives one and then sends a request finds it carried out before.
    /// `None` once the driver has ended.
    orders: Mutex<Option<Vec<Order>>>,
    has_orders: AtomicBool,
    facts: Mutex<EngineFacts>,
}

#[derive(Debug)]
enum Order {
    /// Registers memory. The giver keeps the promise of [`IoEngine::register`].
    Register { addresses: Range<usize>, reply: Sender<bool> },
    /// Ends the registration of the chunk at this address. Nobody waits: the driver itself may be the giver, when the
    /// last buffer of a pool comes home to it.
    Unregister { start: usize },
    /// Lets go of a closed file.
    ForgetFile { id: FileId, reply: Sender<bool> },
}

impl UringEngine {
    /// Whether io_uring works here: sets a small ring up and takes it down again.
    ///
    /// # Errors
    /// Why it does not: forbidden (a container's seccomp filter, `kernel.io_uring_disabled`), not in this kernel,
    /// or no memory may be locked for it.
    pub fn probe() -> Result<(), IoError> {
        let wish = Wish { entries: 2, completions: 4, ..Wish::default() };
        ring::set_up(wish).map(drop).map_err(|e| unavailable(&e))
    }

    /// Sets the rings up and starts their threads.
    ///
    /// # Errors
    /// As for [`probe`](Self::probe), or a thread cannot be started.
    pub fn new(config: &EngineConfig) -> Result<Self, IoError> {
        let config = config.clamped();
        let jobs = Arc::<JobPool>::default();
        let rings =
            (0..config.rings).map(|index| Ring::start(index, &config, &jobs)).collect::<Result<_, _>>()?;
        Ok(Self {
            files: FileTable::new(config.direct),
            block_bytes: config.block_bytes,
            jobs,
            rings: Rings(rings),
            turn: AtomicUsize::new(0),
        })
    }

    fn enqueue(&self, job: Arc<Job>) {
        let ring = self.next_ring();
        ring.send(job);
        ring.link.wake_if_wanted();
    }

    fn next_ring(&self) -> &Ring {
        let rings = &self.rings.0;
        let turn = if rings.len() == 1 { 0 } else { self.turn.fetch_add(1, Ordering::Relaxed) % rings.len() };
        &rings[turn]
    }
}

impl Ring {
    fn start(index: usize, config: &EngineConfig, jobs: &Arc<JobPool>) -> Result<Self, IoError> {
        let link = Arc::new(Link {
            wake: eventfd().map_err(|e| unavailable(&e))?,
            wants_wake: AtomicBool::new(false),
            orders: Mutex::new(Some(Vec::new())),
            has_orders: AtomicBool::new(false),
            facts: Mutex::default(),
        });
        // Half of the accepted requests wait in the channels, half with the driver.
        let [soon, whenever] = Urgency::ALL.map(|_| mpsc::sync_channel((config.requests_max / 2).max(1)));
        let (inboxes, requests) = ([soon.0, whenever.0], [soon.1, whenever.1]);
        let (ready, is_ready) = mpsc::channel();
        let (driver_link, driver_jobs, driver_config) = (Arc::clone(&link), Arc::clone(jobs), config.clone());
        // The ring is made on its own thread, for that is the single issuer.
        let driver = std::thread::Builder::new()
            .name(format!("aio-uring-{index}"))
            .spawn(move || match Driver::new(&driver_config, driver_link, driver_jobs, requests) {
                Ok(driver) => {
                    // The receiver is waiting just below.
                    let _ = ready.send(Ok(()));
                    driver.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(|e| IoError::from_os("starting a thread for", Path::new("disk I/O"), 0, 0, &e))?;
        match is_ready.recv() {
            Ok(Ok(())) => Ok(Self { inboxes: Some(inboxes), link, driver: Some(driver) }),
            Ok(Err(error)) => Err(unavailable(&error)),
            Err(_) => Err(unavailable(&io::Error::other("the ring's thread died at its start"))),
        }
    }

    /// Puts a job into its channel; the driver is woken only to make room. If the driver is gone the job is dropped,
    /// which resolves the ticket as Closed.
    fn send(&self, job: Arc<Job>) {
        let Some(inboxes) = &self.inboxes else { return };
        let inbox = &inboxes[job.urgency() as usize];
        if let Err(TrySendError::Full(job)) = inbox.try_send(job) {
            self.link.wake_if_wanted();
            let _ = inbox.send(job);
        }
    }
}

impl Link {
    /// Gives an order and wakes the driver. An order to a driver that has ended is dropped, and with it the reply.
    fn order(&self, order: Order) {
        let mut orders = self.orders();
        let Some(waiting) = &mut *orders else { return };
        waiting.push(order);
        drop(orders);
        self.has_orders.store(true, Ordering::SeqCst);
        self.wake_if_wanted();
    }

    /// The other half of the handshake is in [`Driver::run`]: it announces the wish and then looks for work once
    /// more. With a fence on both sides, one of the two sees the other.
    fn wake_if_wanted(&self) {
        fence(Ordering::SeqCst);
        if self.wants_wake.load(Ordering::Relaxed) && self.wants_wake.swap(false, Ordering::SeqCst) {
            wake(&self.wake);
        }
    }

    fn orders(&self) -> MutexGuard<'_, Option<Vec<Order>>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn facts(&self) -> MutexGuard<'_, EngineFacts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rings {
    /// Registers a chunk with every ring, or with none.
    fn register(&self, addresses: &Range<usize>) -> bool {
        for (index, ring) in self.0.iter().enumerate() {
            let (reply, answer) = mpsc::channel();
            ring.link.order(Order::Register { addresses: addresses.clone(), reply });
            if answer.recv() != Ok(true) {
                let taken_back = |ring: &Ring| ring.link.order(Order::Unregister { start: addresses.start });
                self.0[..index].iter().for_each(taken_back);
                return false;
            }
        }
        true
    }
}

impl IoEngine for UringEngine {
    fn name(&self) -> &str {
        "uring"
    }

    serve_files!();

    fn close(&self, file: FileId) -> Result<(), IoError> {
        self.files.close(file)?;
        let answers = self.rings.0.iter().map(|ring| {
            let (reply, answer) = mpsc::channel();
            ring.link.order(Order::ForgetFile { id: file, reply });
            answer
        });
        // A driver that is gone holds no files.
        for answer in answers.collect::<Vec<_>>() {
            let _ = answer.recv();
        }
        Ok(())
    }

    fn submit(&self, request: Request) -> Ticket {
        self.jobs.transfer(request, &self.files, self.block_bytes, |job| self.enqueue(job))
    }

    fn submit_all(&self, requests: &mut Vec<Request>, tickets: &mut Vec<Ticket>) {
        for request in requests.drain(..) {
            let send = |job| self.next_ring().send(job);
            tickets.push(self.jobs.transfer(request, &self.files, self.block_bytes, send));
        }
        self.rings.0.iter().for_each(|ring| ring.link.wake_if_wanted());
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.jobs.sync(file, &self.files, |job| self.enqueue(job))
    }

    /// Registers in chunks of at most 1 GiB; a buffer that lies across two chunks is used unregistered.
    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Registration {
        let (start, end) = (start.as_ptr() as usize, start.as_ptr() as usize + len);
        let chunks = (start..end).step_by(CHUNK_BYTES_MAX).map(|at| at..end.min(at + CHUNK_BYTES_MAX));
        let taken: Vec<usize> =
            chunks.take_while(|chunk| self.rings.register(chunk)).map(|chunk| chunk.start).collect();
        if taken.is_empty() {
            return Registration::none();
        }
        // The registration does not keep the engine alive: a closed ring has no registrations.
        let links: Vec<_> = self.rings.0.iter().map(|ring| Arc::clone(&ring.link)).collect();
        Registration::new(move || {
            for link in links {
                taken.iter().for_each(|&start| link.order(Order::Unregister { start }));
            }
        })
    }

    fn facts(&self) -> EngineFacts {
        self.rings.0[0].link.facts().clone()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Closed channels tell the driver to finish; the wake makes it look.
        self.inboxes = None;
        wake(&self.link.wake);
        if let Some(driver) = self.driver.take() {
            super::join(driver);
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
