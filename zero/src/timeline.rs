//! What an engine did when, for looking at: spans on a lane for every resource that works by itself.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What was busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// The thread that drives blocks. On a device with streams of its own, the time in which it gave them work.
    Compute,
    /// A device with streams of its own, computing or waiting for what a block computes with.
    Device,
    /// The same thread, waiting.
    Wait,
    /// The optimizer's update of a chunk, with its checksums.
    Update,
    /// The optimizer, waiting for its state or gradients.
    UpdateWait,
    /// Making a step durable.
    Commit,
    /// The link to a device with memory of its own.
    Upload,
    /// The link from it.
    Download,
}

impl Resource {
    /// A name for pictures.
    pub fn words(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Device => "device",
            Self::Wait => "compute waits",
            Self::Update => "optimizer",
            Self::UpdateWait => "optimizer waits",
            Self::Commit => "commit",
            Self::Upload => "uploads",
            Self::Download => "downloads",
        }
    }
}

/// One piece of work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// What was busy.
    pub resource: Resource,
    /// With what, for example `forward layers.3`.
    pub name: String,
    /// When it began, counted from [`Timeline::epoch`].
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
}

/// Remembers the latest spans. Given to an engine in [`EngineConfig::timeline`](crate::EngineConfig).
#[derive(Debug)]
pub struct Timeline {
    epoch: Instant,
    spans_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: VecDeque<Span>,
    forgotten: u64,
}

impl Timeline {
    /// Remembers the last `spans_max` spans.
    pub fn new(spans_max: usize) -> Self {
        Self { epoch: Instant::now(), spans_max, kept: Mutex::default() }
    }

    /// The moment that spans count from.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Takes the spans, in the order in which they ended.
    pub fn drain(&self) -> Vec<Span> {
        self.lock().spans.drain(..).collect()
    }

    /// Spans that were forgotten for later ones.
    pub fn forgotten(&self) -> u64 {
        self.lock().forgotten
    }

    /// Notes work that began at `began` and ends now.
    pub fn note(&self, resource: Resource, began: Instant, name: String) {
        let (start, end) = (began.saturating_duration_since(self.epoch), self.epoch.elapsed());
        let mut kept = self.lock();
        if kept.spans.len() >= self.spans_max {
            kept.spans.pop_front();
            kept.forgotten += 1;
        }
        if self.spans_max > 0 {
            kept.spans.push_back(Span { resource, name, start, end });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_spans_stay() {
        let timeline = Timeline::new(2);
        for name in ["a", "b", "c"] {
            timeline.note(Resource::Compute, Instant::now(), name.to_owned());
        }
        assert_eq!(timeline.forgotten(), 1);
        let spans = timeline.drain();
        let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
        assert_eq!(names, ["b", "c"]);
        assert!(spans.iter().all(|span| span.start <= span.end));
        assert!(timeline.drain().is_empty());
    }

    #[test]
    fn nothing_is_kept_without_room() {
        let timeline = Timeline::new(0);
        timeline.note(Resource::Commit, Instant::now(), String::new());
        assert_eq!((timeline.drain().len(), timeline.forgotten()), (0, 1));
    }
}
