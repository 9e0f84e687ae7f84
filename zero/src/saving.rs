//! Saves beside the steps that follow them.
//!
//! What a save writes is in memory, where the next step changes it. But a step only reads weights until its update, and that goes through
//! the groups in their order. So a thread takes the groups in the same order, copies them chunk by chunk into the slots that go to the
//! disk, and commits when all are written. A [`Gate`] says how far it has come; who is about to change a group of resident state waits for
//! it there ([`Resident::change`](crate::state::Resident::change)), so that a step waits only if the disk is slower than forward and
//! backward. Of state on disk it writes the copies, and an update waits for the commit
//! ([`Stored::settle`](crate::state::Stored::settle)): what has no copy goes to the generation that is being committed. An update of the
//! step to be saved that is [still to be done](crate::overlap) does all of this at its end instead. State that is on the device is
//! copied from there before the thread starts.
//!
//! Hazard (a group is updated while it is being copied): the thread shares the group's memory until the gate is open for it, and
//! whoever changes it has it alone or stops.

use crate::cache::{GroupCopies, write_copies};
use crate::engine::Engine;
use crate::export::AfterCommit;
use crate::overlap::{Ending, Gate};
use crate::state::{StateHome, StateKinds, Stored};
use crate::update::UpdateSlots;
use crate::{EngineError, Result};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use terrace_tiers::{DiskStore, Pool, TierError};

/// The saves of an engine's resident state.
#[derive(Debug, Default)]
pub(crate) struct Saves {
    /// Where they go; opened at the first.
    pub(crate) store: Option<Arc<DiskStore>>,
    /// It was closed after a commit of which is not known whether it happened, and could not be opened again.
    is_out_of_sight: bool,
    /// There was a commit before.
    was_committed: bool,
    /// The one that is being written.
    under_way: Option<Saving>,
    /// Why one that nobody waited for was not.
    failed: Option<EngineError>,
    /// The one chunk that the plan has for exports, made for the first.
    export_buffer: Option<Pool>,
}

impl Saves {
    /// The buffer that exports read through, of `bytes`.
    pub(crate) fn export_buffer(&mut self, bytes: usize) -> Result<Pool> {
        if let Some(pool) = &self.export_buffer {
            return Ok(pool.clone());
        }
        let pool = Pool::new("exported weights", 1, bytes)?;
        Ok(self.export_buffer.insert(pool).clone())
    }
}

/// A save under way. Dropping it waits for its end.
#[derive(Debug)]
pub(crate) struct Saving(Option<JoinHandle<Result>>);

/// What the thread of a save works on.
struct Saver {
    store: Arc<DiskStore>,
    kinds: StateKinds,
    slots: Arc<UpdateSlots>,
    step: u64,
    words: Vec<u8>,
}

impl Saver {
    /// Writes what is in memory of every group, and commits it with what is written already; `after` begins then. `gate` opens for
    /// every group that is copied.
    fn run(self, groups: Vec<GroupCopies>, gate: &Gate, after: Option<AfterCommit>) -> Result {
        // Ends after what the groups share is let go of, also when something fails.
        let _ending = Ending(gate);
        for (group, copies) in groups.into_iter().enumerate() {
            write_copies(&self.store, &self.kinds, &self.slots, group, &copies)?;
            drop(copies);
            gate.open_up_to(group + 1);
        }
        self.store.commit(self.step, &self.words)?;
        after.into_iter().for_each(|begin| begin(&self.store));
        Ok(())
    }
}

impl Saving {
    /// Waits for its end.
    fn wait(mut self) -> std::thread::Result<Result> {
        self.0.take().expect("only this takes it").join()
    }

    /// The same, with a panic of its own.
    pub(crate) fn finish(self) -> Result {
        self.wait().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    fn start(run: impl FnOnce() -> Result + Send + 'static) -> Result<Self> {
        let thread = Builder::new().name("terrace-save".into()).spawn(run);
        let thread =
            thread.map_err(|e| EngineError::Config(format!("cannot start the thread of a save: {e}")))?;
        Ok(Self(Some(thread)))
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        // Whoever wants to know how it ended waits for it.
        self.0.take().map(JoinHandle::join);
    }
}

fn no_room_for_a_save(error: TierError) -> TierError {
    let smaller = "choose EngineConfig::disks on another disk, or a smaller StateFormat";
    error.too_small_for("a save of the training state", smaller)
}

impl Engine {
    /// Makes the current step durable. State on disk is [flushed](Self::flush) and, if it waits for a save, committed; resident
    /// state is written to the configured directories, out of place, so that the previous save survives a crash during this one;
    /// not so where it is [kept once](crate::Durability::None).
    ///
    /// # Errors
    /// There is no directory, or it cannot be written. The previous save is then intact, unless the state is kept once, and saving
    /// may be tried again; not so where it is kept once and whether its commit happened is not known.
    pub fn save(&mut self) -> Result {
        self.flush()?;
        if self.home.disk().is_some() {
            self.begin_commit(None)?;
            return self.end_commit();
        }
        self.end_save();
        if self.is_saved() {
            return Ok(());
        }
        self.begin_save(None)?;
        self.wait_for_save()
    }

    /// Waits for saves that [`export_beside`](Self::export_beside) began.
    ///
    /// # Errors
    /// One of them failed since this was last called. The save before it is then intact, unless the state is kept once or a later one
    /// worked, and saving may be tried again.
    pub fn finish_save(&mut self) -> Result {
        if self.home.disk().is_some() {
            return self.end_commit();
        }
        self.end_save();
        self.saves.failed.take().map_or(Ok(()), Err)
    }

    /// Says so where saves of resident state have no room in the configured directories, which need not be there yet: better before
    /// there is something to be lost.
    ///
    /// # Errors
    /// There is too little room, or a directory cannot be examined.
    pub fn require_room_for_saves(&self) -> Result {
        let is_needed =
            self.home.disk().is_none() && self.saves.store.is_none() && !self.config.disks.is_empty();
        if !is_needed {
            return Ok(());
        }
        let room = DiskStore::require_room(&self.plan.spec, &self.config.striping()?);
        Ok(room.map_err(no_room_for_a_save)?)
    }

    /// Whether resident state is saved as it is.
    pub(crate) fn is_saved(&self) -> bool {
        let whole =
            |store: &&Arc<DiskStore>| store.is_committed() && !store.is_changing() && !store.is_uncertain();
        self.saves.under_way.is_none()
            && self.saves.store.as_ref().filter(whole).is_some_and(|s| s.committed().step == self.step)
    }

    /// Waits for the save under way, and remembers why it failed: what follows is not to fail with it.
    pub(crate) fn end_save(&mut self) {
        if let Err(error) = self.wait_for_save() {
            tracing::debug!(%error, "a save failed");
            self.saves.failed.get_or_insert(error);
        }
    }

    fn wait_for_save(&mut self) -> Result {
        let Some(saving) = self.saves.under_way.take() else { return Ok(()) };
        let ended = saving.wait();
        if !matches!(ended, Ok(Ok(()))) {
            self.give_up_save();
        }
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Begins to write what a save of state on disk has to, and to commit the steps since the last, beside what follows: its update waits for
    /// the commit. State on the device is copied before. `after` begins with the commit.
    pub(crate) fn begin_commit(&mut self, after: Option<AfterCommit>) -> Result {
        self.end_commit()?;
        let Some(stored) = self.home.stored() else { return Ok(()) };
        let begun = match &self.unsaved {
            Some(unsaved) if unsaved.changed => self.write_from_device(&stored.store).and_then(|()| {
                let saver = self.saver(&stored.store, unsaved.words.clone());
                let copies = stored.cache.shared();
                // Updates wait for the commit, and so for no group.
                stored.saved_by(Saving::start(move || saver.run(copies, &Gate::default(), after))?);
                Ok(())
            }),
            unsaved => {
                let unchanged = unsaved.as_ref().map(|u| stored.commit_unchanged(self.step, &u.words));
                unchanged.unwrap_or(Ok(())).map(|()| after.into_iter().for_each(|begin| begin(&stored.store)))
            }
        };
        self.unsaved = None;
        begun.map_err(|error| self.give_up(error))
    }

    /// Leaves what a save of state on disk has to write, and its commit, to the update that is still to be done, as if every step were
    /// committed; `after` begins then. Gives that back where there is no such update, or state on the device to be copied first.
    pub(crate) fn commit_with_pending(&mut self, after: AfterCommit) -> Option<AfterCommit> {
        let (Some(stored), Some(pending), None) = (self.home.stored(), &mut self.pending, &self.device_state)
        else {
            return Some(after);
        };
        let Some(unsaved) = self.unsaved.take() else { return Some(after) };
        pending.words = Some(unsaved.words);
        stored.after_commit().push(after);
        None
    }

    /// Waits for the commit under way.
    fn end_commit(&mut self) -> Result {
        let ended = self.home.stored().map_or(Ok(()), Stored::end_save);
        ended.map_err(|error| self.give_up(error))
    }

    /// Begins to save resident state, which is flushed, beside what follows. `after` begins with the commit.
    pub(crate) fn begin_save(&mut self, after: Option<AfterCommit>) -> Result {
        if self.config.disks.is_empty() {
            return Err(EngineError::Config(
                "saving needs a directory for the state: set EngineConfig::disks".into(),
            ));
        }
        self.end_save();
        let store = match &self.saves.store {
            Some(store) => Arc::clone(store),
            None => Arc::clone(self.saves.store.insert(Arc::new(self.place_for_saves()?))),
        };
        let begun = self.write_from_device(&store).and_then(|()| self.start_saver(&store, after));
        match begun {
            Ok(saving) => self.saves.under_way = saving,
            Err(error) => {
                self.give_up_save();
                return Err(error);
            }
        }
        Ok(())
    }

    /// A new store, or the one that was closed.
    fn place_for_saves(&self) -> Result<DiskStore> {
        if self.saves.is_out_of_sight {
            match DiskStore::open(&self.backend.io, &self.config.disks) {
                // The commit did not happen, and there was none before it.
                Err(TierError::NoState { .. }) if !self.saves.was_committed => {}
                found => return Ok(found?),
            }
        }
        let striping = self.config.striping()?;
        let store = DiskStore::create(&self.backend.io, &striping, self.plan.spec.clone());
        Ok(store.map_err(no_room_for_a_save)?)
    }

    fn start_saver(&self, store: &Arc<DiskStore>, after: Option<AfterCommit>) -> Result<Option<Saving>> {
        let StateHome::Resident(resident) = &self.home else { return Ok(None) };
        let words = self.loss_scale.map_or_else(|| self.note.clone(), |scale| scale.words(&self.note));
        let saver = self.saver(store, words);
        let (gate, saved) = (Arc::new(Gate::default()), resident.shared());
        let run = {
            let gate = Arc::clone(&gate);
            move || saver.run(saved, &gate, after)
        };
        let saving = Saving::start(run)?;
        resident.saved_by(gate);
        Ok(Some(saving))
    }

    fn saver(&self, store: &Arc<DiskStore>, words: Vec<u8>) -> Saver {
        let (kinds, slots) = (self.kinds.clone(), Arc::clone(&self.update_slots));
        Saver { store: Arc::clone(store), kinds, slots, step: self.step, words }
    }

    /// After a save that failed: what it left in flight must not meet a second one.
    fn give_up_save(&mut self) {
        let Some(mut store) = self.saves.store.take() else { return };
        store.abandon();
        // What is kept once is all in memory: the next save writes it anew.
        if self.config.keeps_once() || !store.is_uncertain() {
            self.saves.store = Some(store);
            return;
        }
        // Which step is live is found out by opening it again. Nobody reads where a commit failed, but who did may still be about to
        // let go of it.
        let was_committed = store.is_committed();
        let store = loop {
            match Arc::try_unwrap(store) {
                Ok(store) => break store,
                Err(shared) => store = shared,
            }
            std::thread::yield_now();
        };
        drop(store);
        (self.saves.is_out_of_sight, self.saves.was_committed) = (true, was_committed);
        self.saves.store = self.place_for_saves().ok().map(Arc::new);
    }
}
