//! `--durability`: what a run that does not end well leaves on disk.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// When state on disk becomes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DurabilityFlag {
    /// With every step
    #[default]
    Step,
    /// With --save-every, Ctrl-C and the end
    Checkpoint,
    /// With Ctrl-C and the end; kept once, in half the space, and lost if the run is killed or fails
    None,
}

impl DurabilityFlag {
    /// Whether steps are not committed, so that some of the state may be written by saves alone.
    pub fn waits_for_saves(self) -> bool {
        self != Self::Step
    }

    /// What a run with state on disk risks, if it is worth a word.
    pub fn note(self, saves: bool, resumes: bool) -> Option<&'static str> {
        match (self, saves) {
            (Self::Checkpoint, false) if resumes => Some(
                "--durability checkpoint without --save-every: a run that is killed goes on from the step that it was resumed at",
            ),
            (Self::Checkpoint, false) => {
                Some("--durability checkpoint without --save-every: a run that is killed has to start over")
            }
            (Self::None, false) => Some(
                "--durability none keeps the state once: a run that is killed or fails has to start over; --save-every would leave model \
                 folders to start from",
            ),
            (Self::None, true) => Some(
                "--durability none keeps the state once: a run that is killed or fails has to start over, from the last model folder of \
                 --save-every",
            ),
            (Self::Step, _) | (Self::Checkpoint, true) => None,
        }
    }
}

impl From<DurabilityFlag> for terrace_zero::Durability {
    fn from(flag: DurabilityFlag) -> Self {
        match flag {
            DurabilityFlag::Step => Self::Step,
            DurabilityFlag::Checkpoint => Self::Checkpoint,
            DurabilityFlag::None => Self::None,
        }
    }
}
