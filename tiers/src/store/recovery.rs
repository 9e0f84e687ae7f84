//! What was found damaged when a store was opened, and what is used in its place. Nothing of it is an error: whoever works with
//! the store says it.

use super::manifest::{Found, Manifest, PassedOver, Slot};
use crate::DamagedCopy;
use crate::volume::Volume;
use std::fmt;
use std::path::{Path, PathBuf};

/// Something that was damaged and had a substitute.
#[derive(Debug, Clone)]
pub enum Recovery {
    /// One of two copies of what says how the store is laid out.
    Copy {
        /// The one that is not used.
        copy: DamagedCopy,
        /// Whether it was written anew.
        is_mended: bool,
    },
    /// One of two commits: damaged, unreadable, or ended by a power cut.
    Commit {
        /// The first directory.
        dir: PathBuf,
        /// Steps done in the one that is used.
        step: u64,
        /// The step that the header of the other one names, which was the newest; `None` if nothing says whether it was.
        lost: Option<u64>,
    },
}

impl Recovery {
    /// Of a store whose state is that of `slot`.
    pub(super) fn all(
        dir: &Path,
        manifest: &Manifest,
        volume: &Volume,
        slot: Option<(&Slot, Option<PassedOver>)>,
        is_mended: bool,
    ) -> Vec<Self> {
        let copies = manifest.damaged_copies().chain(volume.damaged_copies());
        let copies = copies.map(|copy| Self::Copy { copy: copy.clone(), is_mended });
        let commit = slot.and_then(|(slot, passed_over)| {
            let lost = match passed_over? {
                PassedOver::Newest { step } => Some(step),
                PassedOver::Either => None,
            };
            Some(Self::Commit { dir: dir.to_owned(), step: slot.step, lost })
        });
        copies.chain(commit).collect()
    }
}

impl PassedOver {
    /// What `newest` is used in the place of. Numbers of slots follow each other, so a header that names another one is damaged.
    pub(super) fn of(found: &[Found; 2], newest: &Slot) -> Option<Self> {
        let claim = found.iter().find_map(|found| match found {
            Found::Torn(claim) => Some(*claim),
            Found::Unreadable => Some(None),
            Found::Blank | Found::GivenUp(_) | Found::Whole(_) => None,
        })?;
        let Some(claim) = claim else { return Some(Self::Either) };
        if claim.sequence.checked_add(1) == Some(newest.sequence) {
            return None;
        }
        if newest.sequence.checked_add(1) != Some(claim.sequence) {
            return Some(Self::Either);
        }
        // With the same step it has the same state, or is the mark that it is going to change.
        (claim.step != newest.step).then_some(Self::Newest { step: claim.step })
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NOT_WHOLE: &str = "is not whole (damaged, unreadable, or ended by a power cut)";
        match self {
            Self::Copy { copy, is_mended: true } => {
                write!(f, "{copy}; it was written anew from the other")
            }
            Self::Copy { copy, is_mended: false } => write!(f, "{copy}; the other is used"),
            Self::Commit { dir, step, lost: Some(lost) } => write!(
                f,
                "the newest commit in {}, step {lost} by its header, {NOT_WHOLE}; going on from step {step}, the one before",
                dir.display()
            ),
            Self::Commit { dir, step, lost: None } => write!(
                f,
                "one of the two commits in {} {NOT_WHOLE}, the newest or the one before; going on from step {step}, the other",
                dir.display()
            ),
        }
    }
}
