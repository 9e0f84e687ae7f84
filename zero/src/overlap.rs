//! Updates beside other work, in the exact order of their use.
//!
//! An update that waits for the norm of the whole gradient cannot run during backward. It need not run before the next step
//! begins, either: a group's new weights are first used when the next forward reaches it. So the update is *deferred*: a thread
//! of its own goes through the groups in the order of forward, just ahead of it, and a [`Gate`] holds back the fetch of every
//! group that it has not reached. When it is through, it commits the step. Weights and losses are those of an update that runs
//! at once, since each group is still updated before its next use and from the same gradient.
//!
//! State in host memory is updated so, too, for a device with memory of its own, which computes meanwhile. Where the CPU does
//! both there would be nothing to gain.
//!
//! State of which there is a copy in memory is written when all groups are updated: forward needs the copy alone, and the disk, which
//! would be idle in backward, writes then. So the thread's end, and the commit, are waited for after backward.
//!
//! An update that waits for nothing, or that is done before the norm is known (`speculation.rs`), runs on such a thread too, group
//! after group as backward completes their gradients. What it has not come to when backward ends is deferred in the same way, so that
//! the disk goes on through the next forward.
//!
//! Fetch is ahead of compute, so that it mostly waits for the update. It *offers* memory for the groups that it waits for, and the
//! update leaves their new weights there on the way to the disk. Where the update came first, they are read from the disk.
//!
//! The disk has little to do in backward. When an update is through, the first chunks of the next one are read into the slots that it
//! has left ([`UpdateSlots::read_ahead`]).
//!
//! Hazard (a group is fetched while the update still writes it): the gate opens when all of a group's chunks have been handed
//! to the store, and the store's fence makes the read wait for them. What was offered is taken after that, too.

use crate::cache::Caching;
use crate::gradients::GradientPark;
use crate::runs::Runs;
use crate::state::{StateHome, StateKinds, Stored};
use crate::timeline::{Resource, Timeline};
use crate::update::{ChunkAt, Items, UpdateSlots, Updater};
use crate::{EngineError, Result};
use crossbeam::channel::{Receiver, Sender};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use std::time::Instant;
use terrace_optimizer::{Optimizer, StepArgs};
use terrace_tiers::{Lease, StoreSpec};

/// The update of a step whose gradient is complete, and its commit.
pub(crate) struct Pending {
    /// The number of the step.
    pub(crate) step: u64,
    pub(crate) args: StepArgs,
    /// That of the step: schedules move its betas.
    pub(crate) optimizer: Arc<dyn Optimizer>,
    /// What backward has not updated, in order; `None` for everything.
    pub(crate) left: Option<Vec<ChunkAt>>,
    /// What is committed with it; `None` if that waits for a save.
    pub(crate) words: Option<Vec<u8>>,
}

/// What every update of an engine works on.
#[derive(Clone, Copy)]
pub(crate) struct Bench<'a> {
    pub(crate) runs: &'a Runs,
    pub(crate) kinds: &'a StateKinds,
    pub(crate) slots: &'a UpdateSlots,
    pub(crate) spec: &'a StoreSpec,
    pub(crate) pool: &'a rayon::ThreadPool,
    pub(crate) park: &'a GradientPark,
    pub(crate) timeline: Option<&'a Timeline>,
}

/// How far an update has come; groups are updated in their order.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    progress: Mutex<Progress>,
    moved: Condvar,
    /// By group.
    offers: Mutex<HashMap<usize, Offer>>,
}

/// Memory for the weights of a group that is not updated yet.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) lease: Lease,
    /// Chunks whose new weights are in it.
    pub(crate) chunks: usize,
}

#[derive(Debug, Default)]
struct Progress {
    /// Groups below this one are updated.
    done: usize,
    /// The update came to its end, well or not.
    ended: bool,
}

impl Gate {
    /// Whether [`wait`](Self::wait) would not.
    pub(crate) fn is_open(&self, group: usize) -> bool {
        let progress = self.lock();
        progress.done > group || progress.ended
    }

    /// Waits until a group is updated; false if it never will be.
    pub(crate) fn wait(&self, group: usize) -> bool {
        let waiting = |progress: &mut Progress| progress.done <= group && !progress.ended;
        let progress = self.moved.wait_while(self.lock(), waiting).unwrap_or_else(PoisonError::into_inner);
        progress.done > group
    }

    /// Offers memory for the weights of a group, to be had back through [`take_back`](Self::take_back) when the gate is open.
    pub(crate) fn offer(&self, group: usize, lease: Lease) {
        self.offers().insert(group, Offer { lease, chunks: 0 });
    }

    /// Leaves the new weights of a chunk, which are those from byte `start` of its group, where memory is offered for them.
    pub(crate) fn leave(&self, group: usize, start: usize, weights: &[u8]) {
        // Nobody else looks for it before the gate opens, and those who ask whether it has do not wait for the copy.
        let Some(mut offer) = self.offers().remove(&group) else { return };
        offer.lease[start..start + weights.len()].copy_from_slice(weights);
        offer.chunks += 1;
        self.offers().insert(group, offer);
    }

    /// What was offered for a group that is updated.
    pub(crate) fn take_back(&self, group: usize) -> Offer {
        self.offers().remove(&group).expect("it was offered, and the update is through with it")
    }

    fn offers(&self) -> MutexGuard<'_, HashMap<usize, Offer>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens it for groups below this one.
    pub(crate) fn open_up_to(&self, groups: usize) {
        let mut progress = self.lock();
        // Groups without parameters are passed over.
        progress.done = progress.done.max(groups);
        drop(progress);
        self.moved.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a gate's waiting, also when its thread panics.
pub(crate) struct Ending<'a>(pub(crate) &'a Gate);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.moved.notify_all();
    }
}

impl<'a> Bench<'a> {
    /// The update of a step.
    pub(crate) fn updater(self, optimizer: &'a dyn Optimizer, args: StepArgs) -> Updater<'a> {
        let Self { runs, kinds, slots, spec, pool, timeline, .. } = self;
        Updater {
            optimizer,
            args,
            runs,
            kinds,
            slots,
            spec,
            pool,
            timeline,
            leaves_copies: false,
            speculates: None,
            gate: None,
        }
    }
}

impl Pending {
    /// Whether copies are written after all groups, beside the next backward; not if that has an update of its own.
    fn writes_copies_last(&self) -> bool {
        self.left.is_none()
    }

    /// Opens the gate for the groups that backward has updated.
    pub(crate) fn open(&self, gate: &Gate) {
        gate.open_up_to(self.left.as_ref().and_then(|left| left.first()).map_or(0, |first| first.0));
    }

    /// Updates what is left from the parked gradients and, on disk, commits the step. `gate` learns how far it is.
    pub(crate) fn run(&self, bench: Bench<'_>, home: &StateHome, gate: &Gate) -> Result {
        let _ending = Ending(gate);
        let mut updater = bench.updater(&*self.optimizer, self.args);
        updater.leaves_copies = self.writes_copies_last();
        updater.gate = Some(gate);
        match &self.left {
            None => updater.run(home, bench.park, Items::all(bench.spec, bench.park))?,
            Some(left) => updater.run(home, bench.park, left.iter().copied())?,
        };
        // Groups without parameters, that are updated already, or whose state is on the device may come last.
        gate.open_up_to(bench.spec.groups.len());
        let (Some(stored), Some(words)) = (home.stored(), &self.words) else { return Ok(()) };
        // Where saves alone commit, no update wrote any.
        if self.writes_copies_last() || stored.saves {
            stored.cache.write(&stored.store, bench.kinds, bench.slots)?;
        }
        let began = Instant::now();
        stored.commit(self.step, words)?;
        if let Some(timeline) = bench.timeline {
            timeline.note(Resource::Commit, began, format!("step {}", self.step));
        }
        Ok(())
    }
}

/// Starts [`Pending::run`] on a thread. `reads_ahead` for the next one if it may be of the same kind.
pub(crate) fn defer<'scope, 'a>(
    scope: &'scope Scope<'scope, 'a>,
    pending: Pending,
    bench: Bench<'a>,
    home: &'a StateHome,
    gate: &'a Gate,
    reads_ahead: bool,
) -> Result<ScopedJoinHandle<'scope, Result>> {
    Builder::new()
        .name("terrace-update".into())
        .spawn_scoped(scope, move || {
            pending.run(bench, home, gate)?;
            if let (Some(stored), None, true) = (home.stored(), &pending.left, reads_ahead) {
                bench.slots.read_ahead(stored, bench.kinds, bench.spec, bench.park);
            }
            Ok(())
        })
        .map_err(|error| {
            drop(Ending(gate));
            cannot_start(&error)
        })
}

/// Tells a thread that updates beside backward which chunks it can update.
pub(crate) struct Follower<'a> {
    spec: &'a StoreSpec,
    chunks: Sender<ChunkAt>,
    /// Which groups have copies, where the update may have to be done again.
    pub(crate) speculates: Option<&'a Caching>,
    /// Chunks whose gradients are complete, but still on their way down.
    landing: VecDeque<ChunkAt>,
    /// Chunks that wait for the norm.
    later: Vec<ChunkAt>,
}

impl<'a> Follower<'a> {
    pub(crate) fn new(spec: &'a StoreSpec, chunks: Sender<ChunkAt>, speculates: Option<&'a Caching>) -> Self {
        Self { spec, chunks, speculates, landing: VecDeque::new(), later: Vec::new() }
    }

    /// The gradient of a group is complete. Passes on every chunk that is in host memory or on disk.
    pub(crate) fn complete(&mut self, group: usize, park: &GradientPark) {
        let items = Items::of_group(self.spec, group);
        if self.speculates.is_some_and(|caching| caching.has_all(group)) {
            self.later.extend(items);
            return;
        }
        self.landing.extend(items);
        while let Some(&chunk) = self.landing.front().filter(|chunk| park.has(**chunk)) {
            // Whether it can still be heard of is found out when its thread is waited for.
            let _ = self.chunks.send(chunk);
            self.landing.pop_front();
        }
    }

    /// The thread ends when it has updated what it knows of. Gives what it was not told of.
    pub(crate) fn end(self) -> impl Iterator<Item = ChunkAt> {
        self.later.into_iter().chain(self.landing)
    }
}

/// Starts a thread that updates the chunks it is told of, until nobody can tell it of any more.
pub(crate) fn follow<'scope, 'a>(
    scope: &'scope Scope<'scope, 'a>,
    updater: Updater<'a>,
    stored: &'a Stored,
    park: &'a GradientPark,
    chunks: Receiver<ChunkAt>,
) -> Result<ScopedJoinHandle<'scope, Result>> {
    let run = move || {
        let result = updater.stream(stored, park, &mut Items::Coming(chunks.clone()));
        if result.is_err() {
            // Whoever parks the rest of the gradient needs the memory of what is parked.
            chunks.iter().for_each(|chunk| park.forget(chunk));
        }
        result.map(drop)
    };
    Builder::new()
        .name("terrace-update".into())
        .spawn_scoped(scope, run)
        .map_err(|error| cannot_start(&error))
}

/// Waits for such a thread.
pub(crate) fn join(thread: ScopedJoinHandle<'_, Result>) -> Result {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn cannot_start(error: &std::io::Error) -> EngineError {
    EngineError::Config(format!("cannot start the thread of the optimizer: {error}"))
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("step", &self.step).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_tiers::Pool;

    #[test]
    fn what_is_left_where_it_was_offered_is_had_back() {
        let pool = Pool::new("test", 2, 8).unwrap();
        let gate = Gate::default();
        gate.leave(0, 0, &[1; 4]);
        gate.offer(0, pool.acquire(8));
        gate.offer(1, pool.acquire(6));
        gate.leave(0, 4, &[2; 4]);
        gate.leave(1, 0, &[3; 4]);
        gate.leave(1, 4, &[4; 2]);
        gate.open_up_to(2);
        assert!(gate.wait(1) && gate.is_open(0) && !gate.is_open(2));
        let late = gate.take_back(0);
        assert_eq!(
            (late.chunks, &late.lease[4..]),
            (1, &[2; 4][..]),
            "the first chunk came before the offer"
        );
        let whole = gate.take_back(1);
        assert_eq!((whole.chunks, &*whole.lease), (2, &[3, 3, 3, 3, 4, 4][..]));
    }
}
