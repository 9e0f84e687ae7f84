//! Decorators: an engine over an engine, adding one behaviour each.
//!
//! They compose in any order, since all they need of the engine below is [`IoEngine`](crate::IoEngine). They see completions through
//! [`Ticket::observed`](crate::Ticket::observed), so the caller waits for the same ticket that the engine
//! resolves, without a thread or a copy in between. Only what must hold a completion back (the throttle, and
//! delays among the faults) makes tickets of its own, which a thread resolves.
//!
//! The [`Urgency`](crate::Urgency) of a request goes down with it. Layers that let requests wait themselves (the throttle, and the disk of
//! a virtual clock) let the urgent go first, as engines do; delays among the faults do not.
//!
//! A file belongs to the engine at the bottom: its [`FileId`](crate::FileId) is valid through every layer above.

mod fault;
mod relay;
mod stats;
mod throttle;
mod timed;
mod trace;

pub use fault::{FaultConfig, FaultLayer};
pub use stats::{ActionStats, LATENCY_BUCKETS, Stats, StatsLayer};
pub use throttle::{ThrottleConfig, ThrottleLayer};
pub use timed::TimedLayer;
pub use trace::{TraceEvent, TraceLayer};

use crate::OpKind;

/// What a layer tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// A read request.
    Read,
    /// A write request.
    Write,
    /// A sync of a file.
    Sync,
}

impl From<OpKind> for Action {
    fn from(kind: OpKind) -> Self {
        match kind {
            OpKind::Read => Self::Read,
            OpKind::Write => Self::Write,
        }
    }
}

/// Inside an `impl IoEngine`: every method but `submit` and `sync`, passed on to the engine in the named field.
#[macro_export]
macro_rules! pass_files_on {
    ($engine:ident) => {
        fn name(&self) -> &str {
            self.$engine.name()
        }

        fn open(
            &self,
            path: &std::path::Path,
            mode: $crate::OpenMode,
        ) -> Result<$crate::FileId, $crate::IoError> {
            self.$engine.open(path, mode)
        }

        fn close(&self, file: $crate::FileId) -> Result<(), $crate::IoError> {
            self.$engine.close(file)
        }

        fn path(&self, file: $crate::FileId) -> Option<std::path::PathBuf> {
            self.$engine.path(file)
        }

        fn len(&self, file: $crate::FileId) -> Result<u64, $crate::IoError> {
            self.$engine.len(file)
        }

        fn exists(&self, path: &std::path::Path) -> bool {
            self.$engine.exists(path)
        }

        fn remove(&self, path: &std::path::Path) -> Result<(), $crate::IoError> {
            self.$engine.remove(path)
        }

        fn file_facts(&self, file: $crate::FileId) -> Result<$crate::FileFacts, $crate::IoError> {
            self.$engine.file_facts(file)
        }

        fn punch_hole(&self, file: $crate::FileId, offset: u64, len: u64) -> Result<(), $crate::IoError> {
            self.$engine.punch_hole(file, offset, len)
        }

        unsafe fn register(&self, start: std::ptr::NonNull<u8>, len: usize) -> $crate::Registration {
            // SAFETY: the caller's promise is passed on.
            unsafe { self.$engine.register(start, len) }
        }

        fn facts(&self) -> $crate::EngineFacts {
            self.$engine.facts()
        }
    };
}
use crate::pass_files_on;
