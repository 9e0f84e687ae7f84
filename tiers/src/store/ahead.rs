//! Syncs ahead of a commit.
//!
//! A commit's sync makes the drive write down all it has taken since the last one. Some drives serve nothing else meanwhile: the virtual disk
//! of the machines where this was measured takes 0.3 to 0.7 s for a gigabyte, and weights that a step needs are not read before it ends.
//! Syncs along the way, each of a group's share, are short enough for the windows to hide, and leave little to the commit's. They are not
//! free (there, 0.1 s of a core for a gigabyte), so that they are for steps that wait.
//!
//! Hazard (an error that is told once): the system says that written bytes were lost to the first sync after it, and the next may say that
//! all is well. So a sync ahead that failed fails the commit.

use crate::volume::wait_all;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use terrace_aio::{IoError, Ticket};

/// Shorter syncs of a commit are left alone.
const SYNC_MIN: Duration = Duration::from_millis(20);
/// So are steps that waited for less than one in so many parts of their time.
const WAIT_ONE_IN: u32 = 50;
/// So many steps in a row have to wait.
const WAITS: u32 = 2;
/// After so many steps in a row that waited for three quarters of it all the same there is no more syncing ahead.
const MISSES: u32 = 3;

/// When a store [syncs ahead](crate::DiskStore::sync_ahead) of its commits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SyncAhead {
    /// Never.
    #[default]
    Never,
    /// If [steps wait](crate::DiskStore::note_step) and commits have long syncs, and as long as steps wait less with it.
    Auto,
    /// Whenever a group's share was written.
    Always,
}

/// What commits and steps have shown of it.
#[derive(Debug, Default)]
pub(super) struct Experience(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// What the last sync took that had none ahead of it.
    alone: Duration,
    state: State,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// So many steps in a row waited, for this at least.
    Waiting(u32, Duration),
    /// It is done since some steps, which waited for so long before; so many in a row have not gained by it.
    Done { steps: u32, before: Duration, misses: u32 },
    /// It was of no use.
    GivenUp,
}

impl Default for State {
    fn default() -> Self {
        Self::Waiting(0, Duration::MAX)
    }
}

impl Experience {
    pub(super) fn pays(&self, mode: SyncAhead) -> bool {
        match mode {
            SyncAhead::Never => false,
            SyncAhead::Always => true,
            SyncAhead::Auto => matches!(self.lock().state, State::Done { .. }),
        }
    }

    /// A commit's sync took so long, with or without others ahead of it.
    pub(super) fn note_sync(&self, was_ahead: bool, took: Duration) {
        if !was_ahead {
            self.lock().alone = took;
        }
    }

    pub(super) fn note_step(&self, waited: Duration, took: Duration) {
        let mut seen = self.lock();
        seen.state = match seen.state {
            State::Waiting(steps, least) if seen.alone >= SYNC_MIN && waited * WAIT_ONE_IN >= took => {
                let (steps, least) = (steps + 1, least.min(waited));
                match steps {
                    WAITS => State::Done { steps: 0, before: least, misses: 0 },
                    _ => State::Waiting(steps, least),
                }
            }
            State::Waiting(..) => State::default(),
            // In the first one the last commit without goes on.
            State::Done { steps: 0, before, .. } => State::Done { steps: 1, before, misses: 0 },
            State::Done { steps, before, misses } => {
                match if waited * 4 > before * 3 { misses + 1 } else { 0 } {
                    MISSES => State::GivenUp,
                    misses => State::Done { steps, before, misses },
                }
            }
            State::GivenUp => State::GivenUp,
        };
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The syncs ahead of one commit.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Bytes whose writing began after the last one.
    unsynced: u64,
    tickets: Vec<Ticket>,
    /// There was one.
    pub(super) any: bool,
}

impl Ahead {
    /// Counts bytes whose writing begins while it pays, and says whether it is time for a sync: there is none under way, and they are a share.
    pub(super) fn is_due(&mut self, bytes: u64, share: u64) -> bool {
        self.unsynced += bytes;
        self.unsynced >= share && self.tickets.iter().all(Ticket::is_done)
    }

    /// Takes the place of the one before, whose error this gives.
    pub(super) fn begin(&mut self, tickets: Vec<Ticket>) -> Result<(), IoError> {
        let before = self.wait();
        (self.tickets, self.unsynced, self.any) = (tickets, 0, true);
        before
    }

    /// Waits for the last one.
    pub(super) fn wait(&mut self) -> Result<(), IoError> {
        wait_all(std::mem::take(&mut self.tickets))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_done_where_it_pays() {
        let millis = Duration::from_millis;
        let experience = Experience::default();
        assert!(experience.pays(SyncAhead::Always) && !experience.pays(SyncAhead::Never));
        let step = |waited: u64| {
            experience.note_step(millis(waited), millis(4000));
            experience.pays(SyncAhead::Auto)
        };
        experience.note_sync(false, millis(5));
        assert!(!step(300) && !step(300), "they wait for something else");
        experience.note_sync(false, millis(300));
        assert!(!step(300) && !step(70) && !step(300), "one waited less");
        assert!(step(400), "the second in a row");
        // What they wait for now is to be compared with 300.
        assert!(step(500), "the commit before it is still without");
        assert!([290, 280, 40, 300, 290].map(step).iter().all(|done| *done));
        assert!(!step(310), "a drive to which it is all the same how much there is");
        assert!(!step(300) && !step(300) && !step(300));
    }
}
