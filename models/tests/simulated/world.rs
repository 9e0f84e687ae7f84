//! The disk as an engine meets it: a simulated one that works by itself, at a pace of its own, and layers that lie about it.

use crate::dice::Dice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use terrace_aio::engine::{OpKind, SimEngine};
use terrace_aio::{FileId, IoBuf, IoEngine, Request, Ticket, pass_files_on};

/// How a disk and the threads that use it take turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mood {
    /// The disk does what it can at once.
    Eager,
    /// Everybody gives way to others now and then.
    Yielding,
    /// Everybody sleeps now and then, for some microseconds.
    Sleepy,
    /// The disk works in short bursts, and else only for those who wait.
    Lazy,
    /// Not at all as it happens: disk and products take the time of a virtual clock that their [`Pace`] says.
    Timed(Pace),
}

/// Who is how fast, in virtual time. The work of a step has some million bytes and some ten million operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
    /// Reads and writes wait for each other.
    pub is_shared: bool,
    /// Seconds that an operation of a product takes.
    pub operation: f64,
}

impl Pace {
    pub fn of(dice: &mut Dice) -> Self {
        Self {
            read_bytes_per_second: dice.pick(&[1e5, 1e6, 1e6, 1e7, 1e8]),
            write_bytes_per_second: dice.pick(&[1e5, 1e6, 1e6, 1e7, 1e8]),
            is_shared: dice.one_in(2),
            operation: dice.pick(&[0.0, 1e-8, 1e-7, 1e-7, 1e-6]),
        }
    }
}

impl Mood {
    fn pause(self, dice: &mut Dice) {
        match self {
            Self::Eager => {}
            Self::Yielding if dice.one_in(2) => std::thread::yield_now(),
            Self::Sleepy if dice.one_in(12) => std::thread::sleep(Duration::from_micros(dice.below(80))),
            Self::Lazy if dice.one_in(6) => std::thread::sleep(Duration::from_micros(100)),
            Self::Yielding | Self::Sleepy | Self::Lazy | Self::Timed(_) => {}
        }
    }
}

/// A simulated disk with a thread that works on it. Without one, a thread that waits for a slot, which only a write's end gives
/// back, would wait for ever: nobody waits for the write.
#[derive(Debug)]
pub struct World {
    disk: Arc<SimEngine>,
    mood: Mood,
    dice: Mutex<Dice>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Bell {
    is_over: AtomicBool,
    rung: Mutex<bool>,
    ring: Condvar,
}

impl World {
    pub fn new(disk: &Arc<SimEngine>, mood: Mood, seed: u64) -> Self {
        let bell = Arc::new(Bell::default());
        let thread = std::thread::spawn({
            let (disk, bell, mut dice) = (Arc::clone(disk), Arc::clone(&bell), Dice::new(!seed));
            move || {
                while !bell.is_over.load(Ordering::Relaxed) {
                    if disk.step() {
                        mood.pause(&mut dice);
                    } else {
                        bell.wait();
                    }
                }
            }
        });
        let dice = Mutex::new(Dice::new(seed));
        Self { disk: Arc::clone(disk), mood, dice, bell, thread: Some(thread) }
    }

    fn pause(&self) {
        // The choice is made under the lock, the pause after it: threads do not queue for their pauses.
        let mut mine = Dice::new(self.dice.lock().unwrap_or_else(PoisonError::into_inner).next());
        self.mood.pause(&mut mine);
    }

    fn start(&self, submit: impl FnOnce() -> Ticket) -> Ticket {
        self.pause();
        let ticket = submit();
        self.bell.ring();
        self.pause();
        ticket
    }
}

impl IoEngine for World {
    pass_files_on!(disk);

    fn submit(&self, request: Request) -> Ticket {
        self.start(|| self.disk.submit(request))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.start(|| self.disk.sync(file))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.bell.is_over.store(true, Ordering::Relaxed);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ring.notify_one();
    }

    fn wait(&self) {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rung = self.ring.wait_while(rung, |rung| !*rung).unwrap_or_else(PoisonError::into_inner);
        *rung = false;
    }
}

/// What a disk engine may say that is not so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// A write is done, while it is still in flight.
    WriteInFlight,
    /// A write is done, and never happens.
    WriteLost,
    /// A read is done, and its bytes are not there.
    ReadInFlight,
    /// Training state is durable.
    SyncLost,
}

/// Says so about one request in [`Liar::ONE_IN`].
#[derive(Debug)]
pub struct Liar {
    lie: Lie,
    upstream: Arc<dyn IoEngine>,
    state: Mutex<LiarState>,
}

#[derive(Debug)]
struct LiarState {
    dice: Dice,
    /// Writes that were said to be done, and how many requests begin before they do.
    held: Vec<(u64, Request)>,
    /// Those that have begun. Dropping a ticket waits for it.
    begun: Vec<Ticket>,
}

impl Liar {
    const ONE_IN: u64 = 32;
    const HELD_MAX: u64 = 32;

    pub fn new(upstream: Arc<dyn IoEngine>, lie: Lie, seed: u64) -> Self {
        let state = LiarState { dice: Dice::new(seed), held: Vec::new(), begun: Vec::new() };
        Self { lie, upstream, state: Mutex::new(state) }
    }

    /// What to tell about a request without its being done, if anything.
    fn tells(&self, request: &Request) -> bool {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        state.held.iter_mut().for_each(|(left, _)| *left = left.saturating_sub(1));
        while let Some(due) = state.held.iter().position(|(left, _)| *left == 0) {
            state.begun.push(self.upstream.submit(state.held.swap_remove(due).1));
        }
        let is_meant = match self.lie {
            Lie::WriteInFlight | Lie::WriteLost => request.kind == OpKind::Write,
            Lie::ReadInFlight => request.kind == OpKind::Read,
            Lie::SyncLost => false,
        };
        if !is_meant || !state.dice.one_in(Self::ONE_IN) {
            return false;
        }
        if self.lie == Lie::WriteInFlight {
            let mut buf = IoBuf::zeroed(request.buf.len());
            buf.copy_from_slice(&request.buf);
            let late = Request::new(request.kind, buf, request.segments.clone());
            let left = 1 + state.dice.below(Self::HELD_MAX);
            state.held.push((left, late));
        }
        true
    }
}

impl IoEngine for Liar {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        if self.tells(&request) {
            return Ticket::ready(Ok(request.buf));
        }
        self.upstream.submit(request)
    }

    fn sync(&self, file: FileId) -> Ticket {
        let is_state = self.upstream.path(file).is_some_and(|path| path.ends_with("state.bin"));
        if self.lie == Lie::SyncLost && is_state {
            return Ticket::ready(Ok(IoBuf::empty()));
        }
        self.upstream.sync(file)
    }
}
