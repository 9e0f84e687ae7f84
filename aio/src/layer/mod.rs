//! Decorators: an engine over an engine, adding one behaviour each.
//!
//! They compose in any order, since all they need of the engine below is [`IoEngine`](crate::IoEngine). They see completions through
//! [`Ticket::observed`](crate::Ticket::observed), so the caller waits for the same ticket that the engine
//! resolves, without a thread or a copy in between. Only what must hold a completion back (the throttle, and
//! delays among the faults) makes tickets of its own, which a relay thread resolves.
//!
//! A file belongs to the engine at the bottom: its [`FileId`](crate::FileId) is valid through every layer above.

mod fault;
mod relay;
mod stats;
mod throttle;
mod trace;

pub use fault::{FaultConfig, FaultLayer};
pub use stats::{ActionStats, LATENCY_BUCKETS, Stats, StatsLayer};
pub use throttle::{ThrottleConfig, ThrottleLayer};
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

/// The methods of [`IoEngine`](crate::IoEngine) about files, which every layer passes on to `self.upstream`.
macro_rules! pass_files_on {
    () => {
        fn name(&self) -> &str {
            self.upstream.name()
        }

        fn open(
            &self,
            path: &std::path::Path,
            mode: crate::OpenMode,
        ) -> Result<crate::FileId, crate::IoError> {
            self.upstream.open(path, mode)
        }

        fn close(&self, file: crate::FileId) -> Result<(), crate::IoError> {
            self.upstream.close(file)
        }

        fn path(&self, file: crate::FileId) -> Option<std::path::PathBuf> {
            self.upstream.path(file)
        }

        fn len(&self, file: crate::FileId) -> Result<u64, crate::IoError> {
            self.upstream.len(file)
        }

        fn exists(&self, path: &std::path::Path) -> bool {
            self.upstream.exists(path)
        }

        fn remove(&self, path: &std::path::Path) -> Result<(), crate::IoError> {
            self.upstream.remove(path)
        }
    };
}
use pass_files_on;
