//! A store as somebody sees it who neither trains nor needs the model: both commits that its manifest keeps, the chunks of
//! either, and the way back from the newer to the older.
//!
//! The two slots of the manifest are the last commit and the one before. The chunks of the older are complete until the next
//! step writes its first one, since that step goes to their generation. So after a step that was committed, with no other begun,
//! both steps are there; after a step that was cut off, only the last. Nothing but the checksums tells which it is, so
//! [`StoreView::restore_previous`] wants them verified.
//!
//! Going back overwrites the slot of the *newer* commit with the contents of the older one, under the newer number. The older
//! slot is not touched: cut off at any instant, the write leaves a slot that is not whole, and then the older one counts,
//! which is the same state. A slot with a higher number would have to go to the older one's place, and a torn write there
//! would leave the damaged step as the only one.
//!
//! A view leaves damaged copies of what says how the store is laid out as they are, and names them; opening the store to train
//! writes them anew.
//!
//! A store with one generation has no step before: its older slot is a mark, or names the same chunks. While it is being
//! overwritten it has no last commit either.

use super::extents::Extents;
use super::lock::DirLock;
use super::manifest::{self, Found, Manifest, PassedOver, Slot};
use super::{DATA_FILE, PendingRead, Recovery, hint_at_order, lock_all};
use crate::pool::Lease;
use crate::volume::{Volume, World};
use crate::{BlobKey, StoreSpec, Striping, TierError};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::{IoEngine, OpenMode, Urgency};

/// A store that is looked at. Others may look too; nobody can change it meanwhile.
#[derive(Debug)]
pub struct StoreView {
    pub(super) extents: Extents,
    manifest: Manifest,
    /// Bytes of each directory's file.
    file_bytes: Vec<u64>,
    recoveries: Vec<Recovery>,
    slots: [Found; 2],
    access: Access,
    /// Damaged chunks of each [`Commit`], once it was verified.
    pub(super) damaged: [Option<usize>; 2],
    _locks: Vec<DirLock>,
}

/// What a view may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read. Nothing is created, locked for others who look, or changed.
    Look,
    /// Read, and go back to the previous commit.
    Restore,
}

/// Which of the commits that a manifest keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// The last one: the state that a run resumes from.
    Last,
    /// The one before.
    Previous,
}

/// A commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitFacts {
    /// Optimizer steps done.
    pub step: u64,
    /// Its number among the commits of the store, from one.
    pub sequence: u64,
    /// Which copy of the blobs it names.
    pub generation: u64,
}

/// One of the two slots of the manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotFacts {
    /// Byte offset in the manifest.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What it holds.
    pub state: SlotState,
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotState {
    /// It was never written, or what it held was given up for the other.
    Blank,
    /// A commit.
    Whole(CommitFacts),
    /// The mark that the only generation is being overwritten.
    Changing {
        /// The step that was last whole.
        since_step: u64,
    },
    /// No commit that can be trusted: its bytes are damaged, or the commit was cut off, for example by a power cut.
    Torn {
        /// The step that its header names, if it can be read; it may be wrong.
        claimed_step: Option<u64>,
    },
    /// The drive cannot read it.
    Unreadable,
}

impl StoreView {
    /// Opens the store in `dirs`.
    ///
    /// # Errors
    /// There is none, it is being changed by another process, or its layout or a file's header cannot be read.
    pub fn open(engine: &Arc<dyn IoEngine>, dirs: &[PathBuf], access: Access) -> Result<Self, TierError> {
        super::require_dirs(dirs)?;
        let world = World::of(&**engine);
        for dir in dirs.iter().filter(|_| world == World::Real) {
            if !is_there(dir)? || !dir.is_dir() {
                let detail = "there is no such directory".into();
                return Err(TierError::NoState { path: dir.clone(), detail });
            }
        }
        // A directory without state gets no lock file.
        let path = dirs[0].join(manifest::FILE_NAME);
        let has_manifest = if world == World::Real { is_there(&path)? } else { engine.exists(&path) };
        if !has_manifest {
            let error = TierError::NoState { path, detail: "there is no manifest".into() };
            return Err(hint_at_order(engine, dirs, error));
        }
        let (locks, mode) = match access {
            Access::Restore => (lock_all(world, dirs)?, OpenMode::ReadWrite),
            Access::Look if world == World::Simulated => (Vec::new(), OpenMode::Read),
            Access::Look => (share_all(dirs)?, OpenMode::Read),
        };
        let (manifest, spec) = Manifest::open(engine, &dirs[0], mode)?;
        let (slots, _) = manifest.slots(&spec)?;
        if slots == [Found::Blank, Found::Blank] {
            let detail = "its creation never finished; start again with Engine::create".into();
            return Err(TierError::NoState { path: manifest.path.clone(), detail });
        }
        let volume = Volume::open(engine, dirs, DATA_FILE, spec.volume_bytes(), manifest.id, OpenMode::Read)?;
        let newest = manifest::newest_of(&slots).map(|slot| (slot, PassedOver::of(&slots, slot)));
        Ok(Self {
            recoveries: Recovery::all(&dirs[0], &manifest, &volume, newest, false),
            file_bytes: volume.lengths(),
            extents: Extents::new(spec, volume),
            manifest,
            slots,
            access,
            damaged: [None; 2],
            _locks: locks,
        })
    }

    /// The layout.
    pub fn spec(&self) -> &StoreSpec {
        &self.extents.spec
    }

    /// The directories, and how the state is shared among them.
    pub fn striping(&self) -> &Striping {
        self.extents.volume.striping()
    }

    /// Bytes of each directory's file.
    pub fn file_bytes(&self) -> &[u64] {
        &self.file_bytes
    }

    /// Versions of the formats of the manifest and of the files with the chunks.
    pub fn format_versions(&self) -> (u32, u32) {
        (self.manifest.version, self.extents.volume.version)
    }

    /// What is damaged and has a substitute, which the view uses.
    pub fn recoveries(&self) -> &[Recovery] {
        &self.recoveries
    }

    /// The manifest's file.
    pub fn manifest_path(&self) -> &Path {
        &self.manifest.path
    }

    /// Both slots of the manifest, in the order of their places.
    pub fn slots(&self) -> [SlotFacts; 2] {
        [0, 1].map(|index| {
            let (offset, len) = self.manifest.slot_extent(index);
            let state = match &self.slots[index as usize] {
                Found::Blank | Found::GivenUp(_) => SlotState::Blank,
                Found::Whole(slot) if slot.is_mark => SlotState::Changing { since_step: slot.step },
                Found::Whole(slot) => SlotState::Whole(slot.facts()),
                Found::Torn(claim) => SlotState::Torn { claimed_step: claim.map(|claim| claim.step) },
                Found::Unreadable => SlotState::Unreadable,
            };
            SlotFacts { offset, len, state }
        })
    }

    /// What a commit says; `None` if there is none, or its slot is not whole.
    ///
    /// Where the slot of the newest commit is not whole, the last commit is the one before: a run resumes from it. There is none
    /// while the only generation is being overwritten.
    pub fn commit(&self, commit: Commit) -> Option<CommitFacts> {
        self.slot(commit).map(Slot::facts)
    }

    /// The step that was last whole, if the only generation is being overwritten since: no step can be read then.
    pub fn changing_since(&self) -> Option<u64> {
        self.whole_slots().first().filter(|slot| slot.is_mark).map(|slot| slot.step)
    }

    /// What is wrong where there is no last [commit](Self::commit).
    pub fn no_commit(&self) -> TierError {
        self.manifest.neither_is_whole()
    }

    /// Refuses a store whose only generation is being overwritten.
    ///
    /// # Errors
    /// It is.
    pub fn require_whole(&self) -> Result<(), TierError> {
        let changing = |step| Err(TierError::Changing { dir: self.striping().first().to_owned(), step });
        self.changing_since().map_or(Ok(()), changing)
    }

    /// Whether both commits name the same chunks: the last step changed none of them, or the view went back.
    pub fn is_unchanged(&self) -> bool {
        match (self.slot(Commit::Last), self.slot(Commit::Previous)) {
            (Some(last), Some(previous)) => (last.live, &last.table) == (previous.live, &previous.table),
            _ => false,
        }
    }

    /// Starts reading chunks `chunks` of a blob of a commit into `lease`, which is exactly as long as they are.
    ///
    /// # Panics
    /// If there is no such commit, or the lease has another length.
    pub fn read(&self, commit: Commit, key: BlobKey, chunks: Range<usize>, lease: Lease) -> PendingRead {
        let slot = self.slot(commit).expect("only commits that are there are read");
        let sum = |chunk| (chunk, slot.table[self.extents.entry(key, chunk)]);
        let sums: Vec<(usize, u64)> = chunks.clone().map(sum).collect();
        self.extents.read(key, chunks, slot.live, &sums, (lease, Urgency::Whenever))
    }

    /// Makes the previous commit the last one, durably; gives its step. Of a state that has it already nothing is written. Where the drive
    /// cannot read a slot, which may be that of the newest commit, it is the only one that can be read, and the other place is given up.
    ///
    /// # Errors
    /// There is no such commit, the only generation is being overwritten, it was not found whole by [`verify`](Self::verify), or the manifest cannot be written; the
    /// previous commit is then as it was.
    ///
    /// # Panics
    /// If the view was not opened for it.
    pub fn restore_previous(&mut self) -> Result<u64, TierError> {
        assert_eq!(self.access, Access::Restore, "the view may change the store");
        self.require_whole()?;
        let refused = |detail: &str| {
            Err(TierError::NoWayBack { path: self.manifest.path.clone(), detail: detail.into() })
        };
        if let Some(place) = self.slots.iter().position(|found| *found == Found::Unreadable) {
            return match (self.slot(Commit::Last), self.damaged[Commit::Last as usize]) {
                (Some(readable), Some(0)) => {
                    let (step, next) = (readable.step, readable.sequence.wrapping_add(1));
                    self.manifest.give_up(next)?;
                    self.slots[place] = Found::GivenUp(next);
                    Ok(step)
                }
                (_, None) => refused("the step that can be read was not verified"),
                _ => refused("the only step that can be read is not whole"),
            };
        }
        let (Some(last), Some(previous)) = (self.slot(Commit::Last), self.slot(Commit::Previous)) else {
            return refused("its manifest has no previous step");
        };
        match self.damaged[Commit::Previous as usize] {
            Some(0) => {}
            Some(_) => return refused("the previous step is not whole either"),
            None => return refused("the previous step was not verified"),
        }
        let step = previous.step;
        if !self.is_unchanged() || last.step != step {
            let slot = Slot { sequence: last.sequence, ..previous.clone() };
            self.manifest.write(&slot)?;
            let place = (slot.sequence % 2) as usize;
            self.slots[place] = Found::Whole(slot);
            self.damaged[Commit::Last as usize] = Some(0);
        }
        Ok(step)
    }

    pub(super) fn slot(&self, commit: Commit) -> Option<&Slot> {
        let slots = self.whole_slots();
        if slots.first().is_some_and(|slot| slot.is_mark) {
            return None;
        }
        slots.get(commit as usize).copied().filter(|slot| !slot.is_mark)
    }

    /// The slots that are whole, commits or marks, the newest first.
    fn whole_slots(&self) -> Vec<&Slot> {
        let mut whole: Vec<&Slot> = self
            .slots
            .iter()
            .filter_map(|found| match found {
                Found::Whole(slot) => Some(slot),
                Found::Blank | Found::GivenUp(_) | Found::Torn(_) | Found::Unreadable => None,
            })
            .collect();
        whole.sort_by_key(|slot| std::cmp::Reverse(slot.sequence));
        whole
    }
}

impl Slot {
    fn facts(&self) -> CommitFacts {
        CommitFacts { step: self.step, sequence: self.sequence, generation: self.live }
    }
}

fn share_all(dirs: &[PathBuf]) -> Result<Vec<DirLock>, TierError> {
    dirs.iter().filter_map(|dir| DirLock::share(dir).transpose()).collect()
}

/// Whether there is anything at `path`, which may be where this process must not look.
fn is_there(path: &Path) -> Result<bool, TierError> {
    path.try_exists().map_err(|source| TierError::File {
        doing: "looking for",
        path: path.to_owned(),
        source,
    })
}
