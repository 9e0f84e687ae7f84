//! A clock for simulations, whose time passes only while every thread of the process waits.
//!
//! The threads of a program run as they are, and as fast as they can; what is said to take time (a disk, [`TimedLayer`]; a
//! device that computes, [`VirtualClock::sleep`]) takes it of this clock. While any thread can run time stands still. When all of them
//! wait, for a lock, a channel or a ticket, it leaps to the next event, and that wakes somebody. So a run takes the time that its
//! resources and the order of its work make it take, the same on a busy machine as on an idle one, and hours of it pass in seconds.
//!
//! Whether threads wait is what the kernel says of them in `/proc/self/task`: all sleep, and none has run between two looks at all of
//! them. Neither locks nor channels nor threads know of the clock. Threads that sleep for some real time, or for a real device, count as
//! waiting: what is simulated must do neither. Several clocks in a process take no notice of each other but wait for all its threads.
//!
//! Where all wait and nothing is to come, nothing ever will: a deadlock, which the clock reports by ending the process.
//!
//! ```
//! use std::time::Duration;
//! use terrace_aio::VirtualClock;
//!
//! let clock = VirtualClock::new()?;
//! std::thread::scope(|scope| {
//!     scope.spawn(|| clock.sleep(Duration::from_secs(7200)));
//!     clock.sleep(Duration::from_secs(3600));
//! });
//! assert_eq!(clock.now(), Duration::from_secs(7200));
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! [`TimedLayer`]: crate::layer::TimedLayer

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where the kernel says what the threads of a process do.
const THREADS: &str = "/proc/self/task";
/// More than it says of one, whose longest lines have a bit for each processor and memory node there may be.
const STATUS_BYTES: usize = 16 << 10;
/// Clocks do not wait for each other.
const NAME: &str = "virtual-clock";
/// For what is awake to fall asleep.
const NAP: Duration = Duration::from_micros(20);
/// Real time without an event and without a thread that runs: far more than a busy machine takes to schedule one.
const PATIENCE: Duration = Duration::from_secs(20);

type Action = Box<dyn FnOnce() + Send>;

/// A clock with its thread. When it is dropped, everything that is to come happens at once.
#[derive(Debug)]
pub struct VirtualClock {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the events of a clock may hold of it, so that none of them is the last to let go of the clock on its own thread.
pub(crate) struct Shared {
    agenda: Mutex<Agenda>,
    is_over: AtomicBool,
}

#[derive(Default)]
struct Agenda {
    now: Duration,
    /// Events so far: those of the same time happen in this order.
    count: u64,
    events: BTreeMap<(Duration, u64), Action>,
}

impl VirtualClock {
    /// A clock at zero.
    ///
    /// # Errors
    /// This system does not say in `/proc` what threads do, or has none left.
    pub fn new() -> io::Result<Self> {
        Self::with(PATIENCE, |threads| {
            eprintln!("deadlock: all threads wait, and no event is to come: {}", threads.join(", "));
            std::process::abort();
        })
    }

    /// `on_deadlock` is given the names of the threads that wait, once for every `patience`.
    fn with(patience: Duration, on_deadlock: impl Fn(&[String]) + Send + 'static) -> io::Result<Self> {
        let mut threads = Threads::default();
        threads.look()?;
        let shared = Arc::new(Shared { agenda: Mutex::default(), is_over: AtomicBool::new(false) });
        let thread = std::thread::Builder::new().name(NAME.into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(threads, patience, on_deadlock)
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The time since the clock was made.
    pub fn now(&self) -> Duration {
        self.shared.now()
    }

    /// For events that make further ones.
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Does something at a time, on the clock's thread: it must not wait for anything that needs time. What has passed is now.
    pub fn at(&self, time: Duration, action: impl FnOnce() + Send + 'static) {
        self.shared.at(time, action);
    }

    /// Lets the calling thread wait for so long.
    pub fn sleep(&self, duration: Duration) {
        let (wake, is_awake) = mpsc::sync_channel(1);
        self.at(self.now() + duration, move || wake.send(()).unwrap_or_default());
        let _ = is_awake.recv();
    }
}

impl Drop for VirtualClock {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Agenda> {
        self.agenda.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Duration {
        self.lock().now
    }

    pub(crate) fn at(&self, time: Duration, action: impl FnOnce() + Send + 'static) {
        let mut agenda = self.lock();
        let event = (time.max(agenda.now), agenda.count);
        agenda.count += 1;
        agenda.events.insert(event, Box::new(action));
    }

    /// Takes the next event, whose time it then is.
    fn next(&self) -> Option<Action> {
        let mut agenda = self.lock();
        let ((time, _), action) = agenda.events.pop_first()?;
        agenda.now = time;
        Some(action)
    }

    fn run(&self, mut threads: Threads, patience: Duration, on_deadlock: impl Fn(&[String])) {
        let mut last = Instant::now();
        while !self.is_over.load(Ordering::Acquire) {
            let Some(names) = threads.all_asleep() else {
                last = Instant::now();
                std::thread::sleep(NAP);
                continue;
            };
            if let Some(action) = self.next() {
                action();
                last = Instant::now();
            } else if last.elapsed() > patience {
                on_deadlock(&names);
                last = Instant::now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        while let Some(action) = self.next() {
            action();
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let agenda = self.lock();
        f.debug_struct("Shared").field("now", &agenda.now).field("events", &agenda.events.len()).finish()
    }
}

/// Where the kernel says what each thread does. Files stay open: a run looks thousands of times, and opening one takes as long as reading it.
#[derive(Default)]
struct Threads {
    files: HashMap<OsString, File>,
    text: Vec<u8>,
}

impl Threads {
    /// The names of the threads, if all of them sleep.
    ///
    /// Threads are looked at one after the other, and one that was seen asleep may be woken by the next before that falls asleep itself. Then
    /// it has run, which the second look tells from how often it was taken off a processor.
    fn all_asleep(&mut self) -> Option<Vec<String>> {
        let first = self.look().ok().flatten()?;
        let second = self.look().ok().flatten()?;
        (first == second).then(|| first.into_iter().map(|thread| thread.name).collect())
    }

    /// All threads but clocks; `None` as soon as one is seen that does not sleep.
    fn look(&mut self) -> io::Result<Option<Vec<Sleeper>>> {
        let mut sleepers = Vec::new();
        for entry in fs::read_dir(THREADS)? {
            let id = entry?.file_name();
            if self.read(&id).is_err() {
                // One that has just ended was awake, and its number may come to be another's.
                self.files.remove(&id);
                return Ok(None);
            }
            let text = String::from_utf8_lossy(&self.text);
            let field = |name| text.lines().find_map(|line: &str| line.strip_prefix(name)).map(str::trim);
            let number = |name| field(name).and_then(|count| count.parse().ok());
            let missing = || io::Error::other(format!("{THREADS} does not say how often threads waited"));
            let name = field("Name:").unwrap_or_default();
            if name == NAME {
                continue;
            }
            let switches = [number("voluntary_ctxt_switches:"), number("nonvoluntary_ctxt_switches:")];
            let [Some(waited), Some(gave_way)] = switches else { return Err(missing()) };
            if !field("State:").is_some_and(|state| state.starts_with('S')) {
                return Ok(None);
            }
            sleepers.push(Sleeper { id, name: name.to_owned(), switches: [waited, gave_way] });
        }
        sleepers.sort();
        Ok(Some(sleepers))
    }

    /// Reads what the kernel says of one thread.
    fn read(&mut self, id: &OsStr) -> io::Result<()> {
        if !self.files.contains_key(id) {
            let file = File::open(Path::new(THREADS).join(id).join("status"))?;
            self.files.insert(id.to_owned(), file);
        }
        self.text.resize(STATUS_BYTES, 0);
        let length = self.files[id].read_at(&mut self.text, 0)?;
        self.text.truncate(length);
        Ok(())
    }
}

/// A thread that sleeps.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Sleeper {
    id: OsString,
    name: String,
    /// Times that it began to wait, and that it had to give way.
    switches: [u64; 2],
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Condvar;

    #[test]
    fn events_happen_in_the_order_of_their_times() {
        let clock = VirtualClock::new().unwrap();
        let order = Arc::new(Mutex::new(Vec::new()));
        // The clock looks at the threads meanwhile, and finds this one awake.
        for hour in [3, 1, 2, 1] {
            let order = Arc::clone(&order);
            clock.at(Duration::from_secs(3600 * hour), move || order.lock().unwrap().push(hour));
        }
        clock.sleep(Duration::from_secs(4 * 3600));
        assert_eq!(*order.lock().unwrap(), [1, 1, 2, 3]);
        clock.at(Duration::ZERO, || {});
        clock.sleep(Duration::from_secs(1));
        assert_eq!(clock.now(), Duration::from_secs(4 * 3600 + 1), "time does not go back");
    }

    #[test]
    fn time_stands_still_while_a_thread_runs() {
        let clock = VirtualClock::new().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 1..=100 {
                    clock.sleep(Duration::from_millis(10));
                    assert_eq!(clock.now(), Duration::from_millis(10 * turn));
                    let began = Instant::now();
                    while began.elapsed() < Duration::from_micros(300) {}
                    assert_eq!(clock.now(), Duration::from_millis(10 * turn), "it has not waited");
                }
            });
            // An event far away, whose time must not come earlier.
            scope.spawn(|| clock.sleep(Duration::from_millis(1005)));
        });
        assert_eq!(clock.now(), Duration::from_millis(1005));
    }

    /// Threads that pass a token on take no time, however many there are.
    #[test]
    fn a_thread_that_was_just_woken_is_awake() {
        let clock = VirtualClock::new().unwrap();
        let (token, moved) = (Mutex::new(0), Condvar::new());
        std::thread::scope(|scope| {
            scope.spawn(|| clock.sleep(Duration::from_secs(1)));
            for place in 0..4 {
                let (clock, token, moved) = (&clock, &token, &moved);
                scope.spawn(move || {
                    for _ in 0..2000 {
                        let held = token.lock().unwrap();
                        let mut held = moved.wait_while(held, |token| *token % 4 != place).unwrap();
                        assert_eq!(clock.now(), Duration::ZERO, "somebody is about to go on");
                        *held += 1;
                        moved.notify_all();
                    }
                    clock.sleep(Duration::from_millis(2));
                });
            }
        });
        assert_eq!(clock.now(), Duration::from_secs(1));
    }

    #[test]
    fn a_deadlock_is_reported() {
        let (report, reported) = mpsc::channel();
        let report = Mutex::new(report);
        let clock = VirtualClock::with(Duration::from_millis(50), move |threads| {
            let _ = report.lock().unwrap().send(threads.to_vec());
        });
        let _clock = clock.unwrap();
        let (never, waits) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("forlorn".into()).spawn(move || waits.recv()).unwrap();
        let names = reported.recv().unwrap();
        assert!(names.iter().any(|name| name == "forlorn"), "{names:?}");
        drop(never);
        thread.join().unwrap().unwrap_err();
    }

    #[test]
    fn what_is_to_come_happens_when_a_clock_is_dropped() {
        let clock = VirtualClock::new().unwrap();
        let (done, is_done) = mpsc::channel();
        // Awake all the time.
        clock.at(Duration::from_secs(1), move || done.send(()).unwrap());
        drop(clock);
        assert_eq!(is_done.try_recv(), Ok(()));
    }
}
