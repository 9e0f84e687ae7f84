//! What limited a measurement, with the evidence; nothing is said that was not measured.
//!
//! Little's law ties the figures together: operations in flight on average = operations per second × mean latency in
//! seconds. In a closed loop that is the depth whenever the loop keeps up, so a full queue alone does not show that a
//! deeper one would help; only trying does, and that is what the probe at twice the depth is for.

use serde::Serialize;

/// A thread that is busy for this share of the time has nothing left.
const BUSY: f64 = 0.90;
/// Below this share of the depth in flight on average, the queue was not kept full.
const FULL: f64 = 0.80;
/// A deeper queue helps when it gives this much more.
const HELPS: f64 = 1.10;
/// A rate that falls below this share of where it began was throttled.
const FELL: f64 = 0.80;
/// Fewer windows than this say nothing about a trend.
const WINDOWS_MIN: usize = 6;

/// What is known about one measurement.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    pub ops_per_second: f64,
    pub mean_latency_ns: f64,
    /// Operations that may be in flight, over all directories.
    pub depth: usize,
    /// Processor seconds per second of the submitting thread.
    pub submitter_busy: f64,
    /// Processor seconds per second of everything else in the process.
    pub engine_busy: f64,
    /// Threads that move the bytes.
    pub engine_threads: usize,
    /// A thread polls: it is busy whatever there is to do.
    pub polls: bool,
    /// Processors this process may use.
    pub processors: usize,
    /// Bytes per full window, in order.
    pub windows: &'a [u64],
    /// The rate at twice the depth, as a multiple of the measured rate.
    pub gain_at_twice_the_depth: Option<f64>,
    pub is_direct: bool,
}

/// What limited it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Diagnosis {
    /// "throttled", "cpu", "queue", "submission", "cache", "drive" or "unknown".
    pub limit: &'static str,
    /// Why, in figures.
    pub evidence: String,
}

impl Evidence<'_> {
    /// Operations in flight on average. What was in flight when the measuring began counts with all of its latency, a part of which was
    /// before; a short run would have more of them than there can be.
    pub fn in_flight(&self) -> f64 {
        (self.ops_per_second * self.mean_latency_ns / 1e9).min(self.depth as f64)
    }

    /// The first of the possible limits that the figures show.
    pub fn diagnose(&self) -> Diagnosis {
        let known = self.throttled().or_else(|| self.cpu()).or_else(|| self.queue());
        let (limit, evidence) = known.unwrap_or_else(|| self.rest());
        Diagnosis { limit, evidence }
    }

    fn throttled(&self) -> Option<(&'static str, String)> {
        if self.windows.len() < WINDOWS_MIN {
            return None;
        }
        let third = self.windows.len() / 3;
        let mean = |windows: &[u64]| windows.iter().sum::<u64>() as f64 / windows.len() as f64;
        let (first, last) = (mean(&self.windows[..third]), mean(&self.windows[self.windows.len() - third..]));
        (last < FELL * first).then(|| {
            let fell = (1.0 - last / first) * 100.0;
            let text = format!("the rate fell by {fell:.0} % from the first third of the run to the last");
            ("throttled", text)
        })
    }

    fn cpu(&self) -> Option<(&'static str, String)> {
        let total = self.submitter_busy + self.engine_busy;
        let processors = self.processors.max(1) as f64;
        let per_engine_thread = self.engine_busy / self.engine_threads.max(1) as f64;
        let text = if self.submitter_busy >= BUSY {
            format!("the submitting thread was busy {:.0} % of the time", self.submitter_busy * 100.0)
        } else if per_engine_thread >= BUSY && !self.polls {
            let threads = self.engine_threads;
            let busy = per_engine_thread * 100.0;
            format!("the engine's {threads} thread(s) were busy {busy:.0} % of the time; more rings may help")
        } else if total >= BUSY * processors {
            format!("{total:.2} of {processors:.0} processors were busy")
        } else {
            return None;
        };
        Some(("cpu", text))
    }

    fn queue(&self) -> Option<(&'static str, String)> {
        let (in_flight, depth) = (self.in_flight(), self.depth);
        if in_flight < FULL * depth as f64 && self.ops_per_second > 0.0 {
            let text = format!(
                "{in_flight:.1} of {depth} operations were in flight on average: the queue was not kept full"
            );
            return Some(("submission", text));
        }
        let gain = self.gain_at_twice_the_depth.filter(|gain| *gain >= HELPS)?;
        let (more, twice) = ((gain - 1.0) * 100.0, 2 * depth);
        let text = format!(
            "{depth} in flight were all used, and {twice} gave {more:.0} % more: raise --queue-depth"
        );
        Some(("queue", text))
    }

    fn rest(&self) -> (&'static str, String) {
        let (in_flight, depth) = (self.in_flight(), self.depth);
        let busy = self.submitter_busy + self.engine_busy;
        let seen = format!("{in_flight:.1} of {depth} operations in flight, {busy:.2} processors busy");
        match self.gain_at_twice_the_depth {
            _ if self.ops_per_second == 0.0 => {
                ("unknown", "nothing completed in the measured time".to_owned())
            }
            _ if !self.is_direct => (
                "cache",
                format!("{seen}: through the page cache, so memory and write-back as much as the drive"),
            ),
            Some(gain) => {
                let change = (gain - 1.0) * 100.0;
                let path = "the drive or the path to it (bus, file system, a host's limit)";
                ("drive", format!("{seen}, and twice the depth changed the rate by {change:+.0} %: {path}"))
            }
            None => {
                ("unknown", format!("{seen}: the drive, or too short a queue (a deeper one was not tried)"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVEN: [u64; 9] = [100; 9];

    fn evidence() -> Evidence<'static> {
        Evidence {
            ops_per_second: 1000.0,
            mean_latency_ns: 32e6,
            depth: 32,
            submitter_busy: 0.1,
            engine_busy: 0.2,
            engine_threads: 1,
            polls: false,
            processors: 4,
            windows: &EVEN,
            gain_at_twice_the_depth: Some(1.0),
            is_direct: true,
        }
    }

    #[test]
    fn littles_law_has_the_right_units() {
        // 1000 operations a second that take 32 ms each are 32 at a time.
        assert!((evidence().in_flight() - 32.0).abs() < 1e-9);
        let small = Evidence { ops_per_second: 200_000.0, mean_latency_ns: 80_000.0, ..evidence() };
        assert!((small.in_flight() - 16.0).abs() < 1e-9);
        let at_the_edge = Evidence { mean_latency_ns: 32.8e6, ..evidence() }.diagnose();
        assert!(at_the_edge.evidence.contains("32.0 of 32 operations in flight"), "{at_the_edge:?}");
    }

    #[test]
    fn every_limit_needs_its_evidence() {
        let limit = |evidence: Evidence<'_>| evidence.diagnose().limit;
        assert_eq!(limit(evidence()), "drive");
        assert_eq!(limit(Evidence { gain_at_twice_the_depth: None, ..evidence() }), "unknown");
        assert_eq!(limit(Evidence { gain_at_twice_the_depth: Some(1.3), ..evidence() }), "queue");
        assert_eq!(limit(Evidence { mean_latency_ns: 3e6, ..evidence() }), "submission");
        assert_eq!(limit(Evidence { submitter_busy: 0.97, ..evidence() }), "cpu");
        assert_eq!(limit(Evidence { engine_busy: 0.97, ..evidence() }), "cpu");
        assert_eq!(limit(Evidence { engine_busy: 0.97, engine_threads: 2, ..evidence() }), "drive");
        assert_eq!(limit(Evidence { engine_busy: 1.2, polls: true, ..evidence() }), "drive");
        assert_eq!(limit(Evidence { engine_busy: 3.8, polls: true, ..evidence() }), "cpu");
        assert_eq!(
            limit(Evidence { engine_busy: 1.8, engine_threads: 4, processors: 2, ..evidence() }),
            "cpu"
        );
        assert_eq!(limit(Evidence { is_direct: false, ..evidence() }), "cache");
        assert_eq!(limit(Evidence { ops_per_second: 0.0, ..evidence() }), "unknown");
        let falling = [100, 100, 100, 90, 70, 60, 50, 50, 50];
        assert_eq!(limit(Evidence { windows: &falling, ..evidence() }), "throttled");
        assert_eq!(limit(Evidence { windows: &falling[..5], ..evidence() }), "drive");
    }
}
