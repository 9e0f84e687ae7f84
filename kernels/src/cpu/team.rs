//! Threads that share an operation with its caller.
//!
//! A decoding step calls some hundred small operations one after the other, tens of microseconds each. Waking a thread that sleeps takes
//! as long again, and so does waking the caller in the end. So the caller is one of the threads, and the others wait for the next
//! operation awake for a short time before they sleep.

use crossbeam::utils::CachePadded;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread waits awake: longer than what lies between two operations of a step.
const AWAKE: Duration = Duration::from_micros(60);
/// Looks before a thread that waits first lets others run.
const LOOKS: usize = 64;

/// In [`Job::left`]: the caller sleeps until the last thread is done.
const SLEEPS: usize = 1 << (usize::BITS - 1);

/// Threads beside the one that calls.
pub struct Team {
    workers: Vec<Worker>,
    /// Held during an operation: others who call wait for their turn.
    turn: Mutex<()>,
}

/// A thread and where it finds its next job.
struct Worker {
    place: Arc<Place>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Place {
    job: CachePadded<AtomicPtr<Job>>,
    /// The thread sleeps, or is about to look a last time before it does.
    sleeps: AtomicBool,
    ends: AtomicBool,
}

/// An operation; it lives on the stack of its caller, who waits until nobody is left.
struct Job {
    /// The lifetime is erased: the caller outlasts every call.
    work: *const (dyn Fn(usize) + Sync),
    /// Threads that have not finished, and [`SLEEPS`].
    left: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Team {
    /// A team of `threads` with the caller; the others begin with `start(index)`, from one.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(
        threads: usize,
        stack_bytes: usize,
        start: impl Fn(usize) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let start = Arc::new(start);
        let mut team = Self { workers: Vec::new(), turn: Mutex::new(()) };
        for index in 1..threads {
            let (place, start) = (Arc::new(Place::default()), Arc::clone(&start));
            let builder =
                thread::Builder::new().name(format!("terrace-kernel-{index}")).stack_size(stack_bytes);
            let thread = builder.spawn({
                let place = Arc::clone(&place);
                move || {
                    start(index);
                    place.serve(index);
                }
            })?;
            team.workers.push(Worker { place, thread: Some(thread) });
        }
        Ok(team)
    }

    /// Calls `work(index)` on this thread, with index zero, and on as many others as make `threads` in all, as far as there are so many.
    ///
    /// # Panics
    /// With what `work` panics with, after all are done.
    pub fn run(&self, threads: usize, work: impl Fn(usize) + Sync) {
        // What is guarded is only the turn, which a panic does not break.
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let workers = &self.workers[..self.workers.len().min(threads.saturating_sub(1))];
        let erased: *const (dyn Fn(usize) + Sync + '_) = &raw const work;
        let job = Job {
            // SAFETY: only the lifetime changes; nobody calls it after `wait` below, which is before `work` ends.
            work: unsafe {
                std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(
                    erased,
                )
            },
            left: AtomicUsize::new(workers.len()),
            caller: thread::current(),
            panic: Mutex::new(None),
        };
        for worker in workers {
            worker.hand(&job);
        }
        let own = catch_unwind(AssertUnwindSafe(|| work(0)));
        job.wait();
        let others = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        drop(turn);
        if let Some(panic) = own.err().or(others) {
            resume_unwind(panic);
        }
    }
}

impl Worker {
    fn hand(&self, job: &Job) {
        self.place.job.store(ptr::from_ref(job).cast_mut(), SeqCst);
        self.wake();
    }

    /// After a change that the thread is to see. Both sides write their own first and then read the other's, in one order for all.
    fn wake(&self) {
        if self.place.sleeps.load(SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            worker.place.ends.store(true, SeqCst);
            worker.wake();
            if let Some(thread) = worker.thread.take() {
                // It catches what its jobs panic with.
                let _ = thread.join();
            }
        }
    }
}

impl Place {
    /// What a thread of the team does until the team ends.
    fn serve(&self, index: usize) {
        let came = || !self.job.load(Relaxed).is_null() || self.ends.load(Relaxed);
        loop {
            if !awake_until(came) {
                self.sleeps.store(true, SeqCst);
                while self.job.load(SeqCst).is_null() && !self.ends.load(SeqCst) {
                    thread::park();
                }
                self.sleeps.store(false, Relaxed);
            }
            let job = self.job.swap(ptr::null_mut(), Acquire);
            if job.is_null() {
                return;
            }
            // SAFETY: the caller keeps it until this thread has said that it is done, once.
            unsafe { Job::take_part(job, index) };
        }
    }
}

impl Job {
    /// # Safety
    /// The job lives, and this thread counts among those that are left.
    unsafe fn take_part(job: *const Self, index: usize) {
        // SAFETY: it lives by the caller's promise, until `left` says otherwise; `work` with it.
        let caller = unsafe {
            let job = &*job;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (*job.work)(index))) {
                *job.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            job.caller.clone()
        };
        // SAFETY: as above; the job may be gone after it.
        let left = unsafe { (*job).left.fetch_sub(1, AcqRel) };
        if left == SLEEPS + 1 {
            caller.unpark();
        }
    }

    /// Until all others are done.
    fn wait(&self) {
        if awake_until(|| self.left.load(Acquire) == 0) {
            return;
        }
        let mut left = self.left.fetch_or(SLEEPS, AcqRel);
        while left & !SLEEPS != 0 {
            thread::park();
            left = self.left.load(Acquire);
        }
    }
}

/// Waits awake for a short time; whether it came.
fn awake_until(came: impl Fn() -> bool) -> bool {
    for _ in 0..LOOKS {
        if came() {
            return true;
        }
        std::hint::spin_loop();
    }
    let began = Instant::now();
    while began.elapsed() < AWAKE {
        if came() {
            return true;
        }
        thread::yield_now();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn team(threads: usize) -> Team {
        Team::new(threads, 64 << 10, |_| {}).expect("threads can be started")
    }

    /// Which indices worked, as bits.
    fn indices(team: &Team, threads: usize) -> u64 {
        let seen = AtomicU64::new(0);
        team.run(threads, |index| {
            let before = seen.fetch_or(1 << index, SeqCst);
            assert_eq!(before & 1 << index, 0, "once each");
        });
        seen.into_inner()
    }

    #[test]
    fn as_many_work_as_are_asked_for_and_there() {
        let team = team(4);
        for (asked, worked) in [(0, 1), (1, 1), (2, 0b11), (3, 0b111), (4, 0b1111), (9, 0b1111)] {
            assert_eq!(indices(&team, asked), worked);
        }
    }

    #[test]
    fn those_who_sleep_are_woken_and_callers_take_turns() {
        let team = team(3);
        let pauses = [0, 20, 70, 200].map(Duration::from_micros);
        thread::scope(|scope| {
            for caller in 0..3 {
                let team = &team;
                scope.spawn(move || {
                    for turn in 0..400 {
                        assert_eq!(indices(team, 3), 0b111);
                        thread::sleep(pauses[(turn + caller) % 4]);
                    }
                });
            }
        });
    }

    #[test]
    fn the_caller_sleeps_until_the_last_is_done() {
        let team = team(3);
        for late in [1, 2] {
            let done = AtomicUsize::new(0);
            team.run(3, |index| {
                if index == late {
                    thread::sleep(Duration::from_millis(5));
                }
                done.fetch_add(1, SeqCst);
            });
            assert_eq!(done.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = team(3);
        for culprit in 0..3 {
            let done = AtomicUsize::new(0);
            let panic = catch_unwind(AssertUnwindSafe(|| {
                team.run(3, |index| {
                    assert_ne!(index, culprit, "culprit");
                    done.fetch_add(1, SeqCst);
                });
            }));
            let panic = panic.expect_err("it panicked");
            assert!(panic.downcast_ref::<String>().is_some_and(|text| text.contains("culprit")));
            assert_eq!(done.into_inner(), 2, "the others finished");
            assert_eq!(indices(&team, 3), 0b111);
        }
    }
}
