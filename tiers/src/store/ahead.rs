//! Syncs ahead of a commit.
//!
//! A commit's sync makes the drive write down all it has taken since the last one. Some drives serve nothing else meanwhile: the virtual disk
//! of the machines where this was measured takes 0.3 to 0.7 s for a gigabyte, and weights that a step needs are not read before it ends.
//! Syncs along the way, each of a group's share, are short enough for the windows to hide, and leave little to the commit's.
//!
//! Hazard (an error that is told once): the system says that written bytes were lost to the first sync after it, and the next may say that
//! all is well. So a sync ahead that failed fails the commit.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use terrace_aio::{IoError, Ticket};

/// Commits that waited less than this for their sync are left alone.
const PAYS_FROM: Duration = Duration::from_millis(20);
/// After so many commits in a row that took hardly less with syncs ahead of them there are no more.
const MISSES_MAX: u32 = 3;

/// When a store [syncs ahead](crate::DiskStore::sync_ahead) of its commits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SyncAhead {
    /// Never.
    #[default]
    Never,
    /// If commits wait long for their sync otherwise, and as long as they wait less with it.
    Auto,
    /// Whenever a group's share was written.
    Always,
}

/// What commits have shown of it.
#[derive(Debug, Default)]
pub(super) struct Experience(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// What the last sync took that had none ahead of it.
    alone: Duration,
    misses: u32,
}

impl Experience {
    pub(super) fn pays(&self, mode: SyncAhead) -> bool {
        match mode {
            SyncAhead::Never => false,
            SyncAhead::Always => true,
            SyncAhead::Auto => {
                let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                seen.alone >= PAYS_FROM && seen.misses < MISSES_MAX
            }
        }
    }

    /// A commit's sync took so long, with or without others ahead of it.
    pub(super) fn note(&self, was_ahead: bool, took: Duration) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !was_ahead {
            seen.alone = took;
        } else if took * 2 > seen.alone {
            seen.misses += 1;
        } else {
            seen.misses = 0;
        }
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
    /// Counts bytes whose writing begins, and whether it is time for a sync: there is none under way, and they are a share.
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
        let all = std::mem::take(&mut self.tickets).into_iter().map(|ticket| ticket.wait().map(drop));
        all.fold(Ok(()), Result::and)
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
        assert!(!experience.pays(SyncAhead::Auto), "nothing is known yet");
        experience.note(false, millis(5));
        assert!(!experience.pays(SyncAhead::Auto), "there is little to gain");
        experience.note(false, millis(300));
        assert!(experience.pays(SyncAhead::Auto));
        // A drive to which it is all the same how much there is.
        for took in [290, 280, 40, 300, 290] {
            experience.note(true, millis(took));
            assert!(experience.pays(SyncAhead::Auto), "{took}");
        }
        experience.note(true, millis(310));
        assert!(!experience.pays(SyncAhead::Auto));
    }
}
