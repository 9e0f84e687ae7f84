//! Counts what passes: operations, bytes, errors, time, and a histogram of latencies.
//!
//! Counting costs two clock readings and a handful of relaxed additions a request. Numbers of one snapshot may be a
//! request apart from each other while requests are in flight; they are exact when none is.

use super::{Action, pass_files_on};
use crate::{FileId, IoBuf, IoEngine, IoError, Request, Ticket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Buckets of the latency histogram: bucket `i` counts latencies in `[2^i, 2^(i+1))` microseconds, bucket 0 also those
/// below, the last also those above.
pub const LATENCY_BUCKETS: usize = 32;

/// Counts the requests that pass through it.
#[derive(Debug)]
pub struct StatsLayer {
    upstream: Arc<dyn IoEngine>,
    counters: Arc<Counters>,
}

/// Everything counted since the layer was made, or between two snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Read requests.
    pub read: ActionStats,
    /// Write requests.
    pub write: ActionStats,
    /// Syncs; they have no bytes.
    pub sync: ActionStats,
    /// Requests submitted and not yet done.
    pub in_flight: u64,
}

/// The counts of one kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActionStats {
    /// Requests that succeeded.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Time from submission to completion, summed over all requests.
    pub busy: Duration,
    /// Histogram of the same times. See [`LATENCY_BUCKETS`].
    pub latencies: [u64; LATENCY_BUCKETS],
}

#[derive(Debug, Default)]
struct Counters {
    actions: [ActionCounters; 3],
    in_flight: AtomicU64,
}

#[derive(Debug, Default)]
struct ActionCounters {
    ops: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    busy_nanos: AtomicU64,
    latencies: [AtomicU64; LATENCY_BUCKETS],
}

impl StatsLayer {
    /// Counts over `upstream`.
    pub fn new(upstream: Arc<dyn IoEngine>) -> Self {
        Self { upstream, counters: Arc::default() }
    }

    /// The counts so far.
    pub fn snapshot(&self) -> Stats {
        let [read, write, sync] = self.counters.actions.each_ref().map(ActionCounters::snapshot);
        Stats { read, write, sync, in_flight: self.counters.in_flight.load(Relaxed) }
    }

    fn count(&self, action: Action, bytes: u64, submit: impl FnOnce() -> Ticket) -> Ticket {
        let counters = Arc::clone(&self.counters);
        counters.in_flight.fetch_add(1, Relaxed);
        let start = Instant::now();
        submit().observed(move |result: &Result<IoBuf, IoError>| {
            counters.actions[action as usize].add(start.elapsed(), result.is_ok().then_some(bytes));
            counters.in_flight.fetch_sub(1, Relaxed);
        })
    }
}

impl IoEngine for StatsLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        self.count(request.kind.into(), request.bytes(), || self.upstream.submit(request))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.count(Action::Sync, 0, || self.upstream.sync(file))
    }
}

impl Stats {
    /// What was counted after `earlier`; `in_flight` stays as it is now.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            read: self.read.since(&earlier.read),
            write: self.write.since(&earlier.write),
            sync: self.sync.since(&earlier.sync),
            in_flight: self.in_flight,
        }
    }
}

impl ActionStats {
    /// The latency in microseconds that a fraction `quantile` of the requests did not exceed, rounded up to its
    /// bucket's end; `None` without requests.
    pub fn latency_us(&self, quantile: f64) -> Option<u64> {
        let total: u64 = self.latencies.iter().sum();
        let rank = ((total as f64 * quantile).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        let bucket = self.latencies.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map(|bucket| 1 << (bucket + 1))
    }

    fn since(&self, earlier: &Self) -> Self {
        let latencies = std::array::from_fn(|i| self.latencies[i].saturating_sub(earlier.latencies[i]));
        Self {
            ops: self.ops.saturating_sub(earlier.ops),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            errors: self.errors.saturating_sub(earlier.errors),
            busy: self.busy.saturating_sub(earlier.busy),
            latencies,
        }
    }
}

impl ActionCounters {
    fn add(&self, latency: Duration, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => {
                self.ops.fetch_add(1, Relaxed);
                self.bytes.fetch_add(bytes, Relaxed);
            }
            None => drop(self.errors.fetch_add(1, Relaxed)),
        }
        // 2^64 nanoseconds are 584 years.
        self.busy_nanos.fetch_add(latency.as_nanos() as u64, Relaxed);
        let micros = (latency.as_micros() as u64).max(1);
        let bucket = (micros.ilog2() as usize).min(LATENCY_BUCKETS - 1);
        self.latencies[bucket].fetch_add(1, Relaxed);
    }

    fn snapshot(&self) -> ActionStats {
        ActionStats {
            ops: self.ops.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            errors: self.errors.load(Relaxed),
            busy: Duration::from_nanos(self.busy_nanos.load(Relaxed)),
            latencies: self.latencies.each_ref().map(|count| count.load(Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_come_from_the_histogram() {
        let counters = ActionCounters::default();
        for _ in 0..99 {
            counters.add(Duration::from_micros(100), Some(10));
        }
        counters.add(Duration::from_millis(50), None);
        let stats = counters.snapshot();
        assert_eq!((stats.ops, stats.bytes, stats.errors), (99, 990, 1));
        assert_eq!(stats.latency_us(0.5), Some(128));
        assert_eq!(stats.latency_us(0.99), Some(128));
        assert_eq!(stats.latency_us(1.0), Some(65536));
        assert_eq!(ActionStats::default().latency_us(0.5), None);
        assert_eq!(stats.since(&stats).ops, 0);
    }
}
