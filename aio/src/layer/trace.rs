//! Remembers the last requests: what, where, from when to when.

use super::{Action, pass_files_on};
use crate::{FileId, IoEngine, Request, Segment, Ticket};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Records requests when they end, in a ring that forgets the oldest.
#[derive(Debug)]
pub struct TraceLayer {
    upstream: Arc<dyn IoEngine>,
    ring: Arc<Ring>,
    next_request: AtomicU64,
    epoch: Instant,
}

/// One file range of a finished request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEvent {
    /// Counts requests in the order of submission; the segments of one request share it.
    pub request: u64,
    /// What was done.
    pub action: Action,
    /// The file.
    pub file: FileId,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes; 0 for a sync.
    pub len: u64,
    /// When the request was submitted, counted from the layer's creation.
    pub start: Duration,
    /// When it was done.
    pub end: Duration,
    /// Whether it succeeded.
    pub ok: bool,
}

#[derive(Debug)]
struct Ring {
    events: Mutex<VecDeque<TraceEvent>>,
    events_max: usize,
    forgotten: AtomicU64,
}

impl TraceLayer {
    /// Remembers the last `events_max` events over `upstream`.
    pub fn new(upstream: Arc<dyn IoEngine>, events_max: usize) -> Self {
        let ring = Ring { events: Mutex::default(), events_max, forgotten: AtomicU64::new(0) };
        Self { upstream, ring: Arc::new(ring), next_request: AtomicU64::new(0), epoch: Instant::now() }
    }

    /// The events in the ring, in the order in which their requests ended.
    pub fn events(&self) -> Vec<TraceEvent> {
        self.ring.lock().iter().copied().collect()
    }

    /// Takes the events out of the ring.
    pub fn drain(&self) -> Vec<TraceEvent> {
        self.ring.lock().drain(..).collect()
    }

    /// Events that the ring had to forget.
    pub fn forgotten(&self) -> u64 {
        self.ring.forgotten.load(Relaxed)
    }

    /// The moment that event times count from.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    fn record(&self, action: Action, segments: &[Segment], submit: impl FnOnce() -> Ticket) -> Ticket {
        let request = self.next_request.fetch_add(1, Relaxed);
        let (ring, epoch) = (Arc::clone(&self.ring), self.epoch);
        let ranges: SmallVec<[(FileId, u64, u64); 4]> =
            segments.iter().map(|s| (s.file, s.offset, s.len as u64)).collect();
        let start = epoch.elapsed();
        submit().observed(move |result| {
            let (end, ok) = (epoch.elapsed(), result.is_ok());
            for (file, offset, len) in ranges {
                ring.push(TraceEvent { request, action, file, offset, len, start, end, ok });
            }
        })
    }
}

impl IoEngine for TraceLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let segments = request.segments.clone();
        self.record(request.kind.into(), &segments, || self.upstream.submit(request))
    }

    fn sync(&self, file: FileId) -> Ticket {
        let whole = Segment { file, offset: 0, start: 0, len: 0 };
        self.record(Action::Sync, &[whole], || self.upstream.sync(file))
    }
}

impl Ring {
    fn lock(&self) -> MutexGuard<'_, VecDeque<TraceEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: TraceEvent) {
        let mut events = self.lock();
        if events.len() >= self.events_max {
            self.forgotten.fetch_add(1, Relaxed);
            events.pop_front();
        }
        if self.events_max > 0 {
            events.push_back(event);
        }
    }
}
