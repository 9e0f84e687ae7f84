//! What can go wrong between tiers.

use crate::plan::ByteSize;
use std::io::ErrorKind;
use std::path::PathBuf;

/// A failure of a tier or its state on disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// A transfer failed.
    #[error(transparent)]
    Io(#[from] terrace_aio::IoError),
    /// Memory for a pool could not be had.
    #[error(transparent)]
    Device(#[from] terrace_device::DeviceError),
    /// The plan does not fit.
    #[error(transparent)]
    Plan(#[from] PlanRefusal),
    /// What was asked for cannot be.
    #[error("{what} {detail}")]
    Invalid {
        /// Of what.
        what: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// Another process works in the directory.
    #[error("{} is in use by another process (it holds {}); wait for it or choose another directory", dir.display(), lock.display())]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// The lock file.
        lock: PathBuf,
    },
    /// A file operation outside the engine failed.
    #[error("{doing} {}: {source}; {}", path.display(), advice(source))]
    File {
        /// The verb: "creating", "locking".
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file system has too little room for the state.
    #[error(
        "{what} needs {} on {} but only {} are free, {} too little; {}free space, {smaller}",
        ByteSize(*needed), dir.display(), ByteSize(*free), ByteSize(needed.saturating_sub(*free)),
        if *fits_once { "keep it once instead of twice (Durability::None: a run that crashes starts over), " } else { "" }
    )]
    DiskTooSmall {
        /// What needs it.
        what: &'static str,
        /// How to need less, in words.
        smaller: &'static str,
        /// The directory.
        dir: PathBuf,
        /// Bytes needed there.
        needed: u64,
        /// Bytes free there.
        free: u64,
        /// Whether one generation of the state would fit instead of two.
        fits_once: bool,
    },
    /// The paths of a volume and their weights do not go together.
    #[error("the paths for state on disk cannot be striped: {detail}")]
    Striping {
        /// What is wrong with them.
        detail: String,
    },
    /// The directory holds no usable state.
    #[error("{} holds no training state: {detail}", path.display())]
    NoState {
        /// The manifest.
        path: PathBuf,
        /// Why not.
        detail: String,
    },
    /// A directory that new state was to be made in holds state that may still be wanted, or something else in its place.
    #[error("{} {detail}", path.display())]
    StateExists {
        /// The directory or file.
        path: PathBuf,
        /// What it holds and what to do.
        detail: String,
    },
    /// A file belongs to another run, to another place in this one, or to none.
    #[error("{} {detail}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Which place it was looked for in.
        detail: String,
    },
    /// The drive cannot read one of the two slots of the manifest.
    #[error(
        "{cause}. It may be that of the newest commit. If the drive goes on failing, \
         `terrace inspect --verify --restore-previous` with its --disk paths goes on from the other, of step {step}, if that is whole"
    )]
    UnreadableSlot {
        /// What the drive said.
        cause: terrace_aio::IoError,
        /// The step of the other slot.
        step: u64,
    },
    /// A commit failed after it may have reached the disk; nothing can be built on it without looking.
    #[error("an earlier commit to {} failed half-way, so it is unknown which step is live there; open the state again (Engine::resume)", path.display())]
    Uncertain {
        /// The manifest.
        path: PathBuf,
    },
    /// The state cannot go back to an earlier step.
    #[error("{} cannot go back a step: {detail}; nothing was changed", path.display())]
    NoWayBack {
        /// The manifest.
        path: PathBuf,
        /// Why not.
        detail: String,
    },
    /// State with one generation was being overwritten: no step of it is whole.
    #[error("the training state in {} cannot be used: it is kept once (Durability::None) and was being overwritten when its run ended or failed; it was last whole at step {step}. Start again with Engine::create, from an exported model folder (the run's OUTPUT/checkpoint-N) or the original one, in an empty directory or after removing this one; with Durability::Step or Checkpoint a run survives crashes", dir.display())]
    Changing {
        /// The first directory.
        dir: PathBuf,
        /// Optimizer steps done when it was last whole.
        step: u64,
    },
    /// What says how the state is laid out is damaged, or a file is not as it says.
    #[error("the training state in {} is damaged: {detail}. Every step is found by it, so none can be read: restore the directories from a copy, or remove them and start again with Engine::create", path.display())]
    NoLayout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The state on disk is damaged.
    #[error("the training state in {} is damaged: {detail}; `terrace inspect --verify` with its --disk paths says whether the step before is whole and can go back to it; else restore the directories from a copy, or remove them and start again with Engine::create", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the blob's name and position.
        detail: String,
    },
}

fn advice(source: &std::io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::NotADirectory => "choose another path, or remove the file if nothing needs it",
        _ => "check the path, its owner and whether the file system is mounted read-only",
    }
}

impl TierError {
    /// If there is too little room, says so of `what`, which `smaller` would make smaller, instead of training state.
    #[must_use]
    pub fn too_small_for(self, what: &'static str, smaller: &'static str) -> Self {
        match self {
            Self::DiskTooSmall { dir, needed, free, .. } => {
                Self::DiskTooSmall { what, smaller, dir, needed, free, fits_once: false }
            }
            other => other,
        }
    }
}

/// A budget that cannot work, with the numbers and the smallest change that would.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{what} of {} is too small: this run needs at least {}.\n{breakdown}Raise it to {}{}{}", ByteSize(*budget), ByteSize(*minimum).rounded_up(), ByteSize(*minimum).rounded_up(), and(also), or(alternatives))]
pub struct PlanRefusal {
    /// Which budget, for example `EngineConfig::host_budget`.
    pub what: &'static str,
    /// What the user gave.
    pub budget: u64,
    /// The smallest total that works.
    pub minimum: u64,
    /// Other budgets that are too small as well, each with the smallest total that works.
    pub also: Vec<(&'static str, u64)>,
    /// The terms of the smallest plan, a line each.
    pub breakdown: String,
    /// Other knobs that would shrink it; empty if there are none.
    pub alternatives: String,
}

impl PlanRefusal {
    /// The smallest total that works of a budget; 0 if that one is large enough.
    pub fn minimum_of(&self, what: &str) -> u64 {
        let all = std::iter::once((self.what, self.minimum)).chain(self.also.iter().copied());
        all.filter(|(named, _)| *named == what).map(|(_, minimum)| minimum).max().unwrap_or(0)
    }
}

fn and(also: &[(&str, u64)]) -> String {
    also.iter().map(|(what, minimum)| format!(" and {what} to {}", ByteSize(*minimum).rounded_up())).collect()
}

fn or(alternatives: &str) -> String {
    if alternatives.is_empty() { String::new() } else { format!(", or {alternatives}") }
}
