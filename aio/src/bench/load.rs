//! The measuring loop: a fixed number of blocks in flight per directory, driven by one thread.
//!
//! **What is in the timed region.** Between `begin` and `end` of a [`Tally`] this thread does, per batch of completions:
//! one lock to take the batch from the completion queue (sleeping only when it is empty) and one clock reading; per
//! operation: claim the ticket, record one latency and a few sums in memory that exists, pick the next block, submit it.
//! Nothing is allocated per operation: buffers come from one mapping, the lists of completed slots are made before. With `validate` the content is made and checked in here too, and counts.
//!
//! **What is counted.** The rate is that of the steady state: operations that complete from the end of the warm-up to
//! the deadline. What is in flight at the deadline is waited for outside the timed region, as what is in flight when the
//! warm-up ends is counted inside. Through the page cache that would flatter, so there the interval ends with the
//! `fdatasync` and everything counts. A run of a fixed number of operations ends with the last of them.

use super::cpu::CpuTime;
use super::histogram::Histogram;
use super::mix::{Op, Schedule};
use super::pattern::{Key, PAGE_BYTES};
use crate::{CompletionQueue, FileId, IoBuf, IoEngine, IoError, OpKind, Request, Ticket};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest this thread sleeps before it looks at the clock and at an interrupt.
const NAP: Duration = Duration::from_millis(50);

/// The loop sleeps until this share of what is in flight is done: one wake for many completions.
const ENOUGH_SHARE: usize = 8;

/// Windows of a time series at most; beyond, two become one.
const WINDOWS_MAX: usize = 1024;

/// Mismatches that are remembered with their place.
const MISMATCHES_KEPT: usize = 16;

/// One directory's share of the load.
#[derive(Debug)]
pub struct Lane {
    pub file: FileId,
    pub path: PathBuf,
    pub key: Key,
    pub schedule: Schedule,
    /// Operations left to submit; `None` for as long as the clock says.
    pub left: Option<u64>,
}

/// When to measure.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Run before anything is counted.
    pub warm_up: Duration,
    /// Measure this long; `None` runs until every lane's operations are done.
    pub length: Option<Duration>,
    /// One window of the time series.
    pub window: Duration,
}

/// How the loop behaves.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Make and check the content of every block.
    pub validate: bool,
    /// The measured interval ends with the `fdatasync`, and what is in flight at the deadline counts.
    pub count_sync: bool,
}

/// What is told while it runs, and asked.
pub trait Watch {
    /// Called about as often as a window ends.
    fn progress(&mut self, measured: Duration, bytes: u64);
    /// Whether to stop early.
    fn stop_flag(&self) -> &AtomicBool;
}

/// A block whose content is not what was written there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    pub path: PathBuf,
    pub offset: u64,
}

/// One kind's operations.
#[derive(Debug, Clone)]
pub struct Side {
    pub bytes: u64,
    pub ops: u64,
    pub latency: Histogram,
}

/// Everything that was counted.
#[derive(Debug)]
pub struct Tally {
    pub read: Side,
    pub write: Side,
    /// Bytes read and written per lane.
    pub lanes: Vec<[u64; 2]>,
    /// Bytes read and written per window.
    pub series: Vec<[u64; 2]>,
    pub window: Duration,
    pub seconds: f64,
    /// The `fdatasync` after the last write, part of `seconds` only with [`Manner::count_sync`].
    pub sync_seconds: f64,
    pub cpu: CpuTime,
    pub interrupted: bool,
    pub mismatches: Vec<Mismatch>,
    pub mismatches_count: u64,
    began_ns: u64,
}

/// The loop's state.
pub struct Load<'a> {
    engine: &'a dyn IoEngine,
    lanes: Vec<Lane>,
    slots: Vec<Slot>,
    completions: CompletionQueue,
    /// Prepared and not submitted, with their slots; and their tickets, for a moment.
    requests: Vec<Request>,
    requesting: Vec<usize>,
    tickets: Vec<Ticket>,
    block_bytes: usize,
    manner: Manner,
    in_flight: usize,
    clock: Instant,
    tally: Tally,
    error: Option<IoError>,
}

/// One place in a lane's window.
struct Slot {
    lane: usize,
    state: SlotState,
    op: Op,
    submitted_ns: u64,
}

enum SlotState {
    Idle(IoBuf),
    InFlight(Ticket),
    /// Its buffer went back with an error.
    Lost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    WarmUp,
    Measuring,
    /// Nothing more is submitted.
    Draining,
    /// The same, stopped before anything was measured: nothing counts.
    Abandoned,
}

impl Timing {
    /// The timing of a measurement of `seconds`.
    pub fn of(warm_up: f64, seconds: f64) -> Self {
        let window = Duration::from_secs_f64((seconds / 100.0).clamp(0.01, 1.0));
        let (warm_up, length) = (Duration::from_secs_f64(warm_up), Some(Duration::from_secs_f64(seconds)));
        Self { warm_up, length, window }
    }

    /// The timing of a fixed number of operations.
    pub fn of_passes() -> Self {
        Self { warm_up: Duration::ZERO, length: None, window: Duration::from_millis(100) }
    }
}

impl<'a> Load<'a> {
    /// Makes everything the loop needs. Each lane gets the same number of the buffers.
    pub fn new(engine: &'a dyn IoEngine, lanes: Vec<Lane>, buffers: Vec<IoBuf>, manner: Manner) -> Self {
        let block_bytes = buffers.first().map_or(PAGE_BYTES, |buffer| buffer.len());
        let depth = buffers.len() / lanes.len().max(1);
        let slots_count = buffers.len();
        let completions = CompletionQueue::new(slots_count);
        let slot = |(index, buffer)| Slot {
            lane: index / depth.max(1),
            state: SlotState::Idle(buffer),
            op: Op { kind: OpKind::Read, block: 0 },
            submitted_ns: 0,
        };
        let slots = buffers.into_iter().take(depth * lanes.len()).enumerate().map(slot).collect();
        let (clock, tally) = (Instant::now(), Tally::new(lanes.len()));
        Self {
            engine,
            lanes,
            slots,
            completions,
            requests: Vec::with_capacity(slots_count),
            requesting: Vec::with_capacity(slots_count),
            tickets: Vec::with_capacity(slots_count),
            block_bytes,
            manner,
            in_flight: 0,
            clock,
            tally,
            error: None,
        }
    }

    /// Runs until the time is over, the operations are done or the watch says stop; nothing is in flight afterwards.
    ///
    /// # Errors
    /// The first transfer that failed.
    pub fn run(mut self, timing: Timing, watch: &mut dyn Watch) -> Result<Tally, IoError> {
        self.tally.window = timing.window;
        self.clock = Instant::now();
        let mut phase = Phase::WarmUp;
        if timing.warm_up.is_zero() {
            phase = self.begin(0);
        }
        let mut batch: Vec<usize> = Vec::with_capacity(self.slots.len());
        (0..self.slots.len()).for_each(|slot| self.prepare_next(slot, self.now()));
        self.submit_prepared();
        let mut window_seen = 0;
        while self.in_flight > 0 {
            let enough = (self.in_flight / ENOUGH_SHARE).max(1);
            self.completions.wait_timeout(enough, NAP, &mut batch);
            let now = self.now();
            let is_over = self.error.is_some() || self.is_over(timing, phase, now, watch);
            for slot in batch.drain(..) {
                self.complete(slot, now, phase);
                if !is_over && matches!(phase, Phase::WarmUp | Phase::Measuring) {
                    self.prepare_next(slot, now);
                }
            }
            self.submit_prepared();
            phase = self.next_phase(phase, timing, now, is_over);
            let window = self.tally.window_at(now);
            if phase == Phase::Measuring && window != window_seen {
                window_seen = window;
                watch.progress(self.tally.elapsed(now), self.tally.bytes());
            }
        }
        self.finish(phase)
    }

    fn is_over(&self, timing: Timing, phase: Phase, now: u64, watch: &dyn Watch) -> bool {
        let measured_enough =
            |length: Duration| phase == Phase::Measuring && self.tally.elapsed(now) >= length;
        timing.length.is_some_and(measured_enough) || watch.stop_flag().load(Ordering::Relaxed)
    }

    /// The phase after a batch that was counted in `phase`.
    fn next_phase(&mut self, phase: Phase, timing: Timing, now: u64, is_over: bool) -> Phase {
        match phase {
            Phase::WarmUp if is_over => {
                self.tally.interrupted = true;
                Phase::Abandoned
            }
            Phase::WarmUp if now >= timing.warm_up.as_nanos() as u64 => self.begin(now),
            Phase::Measuring if is_over => {
                self.tally.interrupted = timing.length.is_none_or(|length| self.tally.elapsed(now) < length);
                if !self.manner.count_sync {
                    self.tally.end(now);
                }
                Phase::Draining
            }
            phase => phase,
        }
    }

    fn begin(&mut self, now: u64) -> Phase {
        self.tally.clear();
        self.tally.began_ns = now;
        self.tally.cpu = CpuTime::now();
        Phase::Measuring
    }

    fn finish(mut self, phase: Phase) -> Result<Tally, IoError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        if phase == Phase::Measuring && !self.manner.count_sync {
            self.tally.end(self.now());
        }
        let before = self.now();
        let files = self.lanes.iter().map(|lane| lane.file);
        let syncs: Vec<Ticket> = files.map(|file| self.engine.sync(file)).collect();
        syncs.into_iter().try_for_each(|ticket| ticket.wait().map(drop))?;
        let now = self.now();
        self.tally.sync_seconds = (now - before) as f64 / 1e9;
        if self.manner.count_sync && phase != Phase::Abandoned {
            self.tally.end(now);
        }
        Ok(self.tally)
    }

    /// Claims a slot's ticket if it is done, and counts it if this is being measured.
    fn complete(&mut self, index: usize, now: u64, phase: Phase) {
        let slot = &mut self.slots[index];
        let SlotState::InFlight(ticket) = std::mem::replace(&mut slot.state, SlotState::Lost) else { return };
        // Reported as done: this does not block.
        let result = ticket.wait();
        self.in_flight -= 1;
        let counts = phase == Phase::Measuring || (phase == Phase::Draining && self.manner.count_sync);
        match result {
            Ok(buffer) => {
                if counts {
                    let latency = now.saturating_sub(slot.submitted_ns);
                    self.tally.count(slot.lane, slot.op.kind, self.block_bytes as u64, latency, now);
                }
                if self.manner.validate && slot.op.kind == OpKind::Read {
                    self.tally.check(&self.lanes[slot.lane], slot.op, &buffer);
                }
                slot.state = SlotState::Idle(buffer);
            }
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }

    /// Prepares a slot's next operation, if the slot is idle and its lane has one left.
    fn prepare_next(&mut self, index: usize, now: u64) {
        let slot = &mut self.slots[index];
        let lane = &mut self.lanes[slot.lane];
        if lane.left == Some(0) || !matches!(slot.state, SlotState::Idle(_)) {
            return;
        }
        let SlotState::Idle(mut buffer) = std::mem::replace(&mut slot.state, SlotState::Lost) else { return };
        lane.left = lane.left.map(|left| left - 1);
        slot.op = lane.schedule.next_op();
        slot.submitted_ns = now;
        let offset = slot.op.block * self.block_bytes as u64;
        let request = match slot.op.kind {
            OpKind::Read => Request::read(lane.file, offset, buffer),
            OpKind::Write => {
                if self.manner.validate {
                    lane.key.fill(&mut buffer, offset / PAGE_BYTES as u64);
                    slot.submitted_ns = self.clock.elapsed().as_nanos() as u64;
                }
                Request::write(lane.file, offset, buffer)
            }
        };
        self.requests.push(request);
        self.requesting.push(index);
    }

    /// Submits what was prepared, at once.
    fn submit_prepared(&mut self) {
        self.engine.submit_all(&mut self.requests, &mut self.tickets);
        self.in_flight += self.requesting.len();
        for (index, ticket) in self.requesting.drain(..).zip(self.tickets.drain(..)) {
            self.slots[index].state = SlotState::InFlight(self.completions.track(ticket, index));
        }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }
}

impl Tally {
    fn new(lanes: usize) -> Self {
        let side = || Side { bytes: 0, ops: 0, latency: Histogram::new() };
        Self {
            read: side(),
            write: side(),
            lanes: vec![[0; 2]; lanes],
            series: Vec::with_capacity(WINDOWS_MAX),
            window: NAP,
            seconds: 0.0,
            sync_seconds: 0.0,
            cpu: CpuTime::default(),
            interrupted: false,
            mismatches: Vec::with_capacity(MISMATCHES_KEPT),
            mismatches_count: 0,
            began_ns: 0,
        }
    }

    /// Bytes moved in both directions.
    pub fn bytes(&self) -> u64 {
        self.read.bytes + self.write.bytes
    }

    /// Operations in both directions.
    pub fn ops(&self) -> u64 {
        self.read.ops + self.write.ops
    }

    fn clear(&mut self) {
        for side in [&mut self.read, &mut self.write] {
            (side.bytes, side.ops) = (0, 0);
            side.latency.clear();
        }
        self.lanes.fill([0; 2]);
        self.series.clear();
    }

    fn end(&mut self, now: u64) {
        self.cpu = self.cpu.until_now();
        self.seconds = self.elapsed(now).as_secs_f64();
    }

    fn elapsed(&self, now: u64) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.began_ns))
    }

    fn window_at(&self, now: u64) -> usize {
        (now.saturating_sub(self.began_ns) / (self.window.as_nanos() as u64).max(1)) as usize
    }

    fn count(&mut self, lane: usize, kind: OpKind, bytes: u64, latency_ns: u64, now: u64) {
        let side = if kind == OpKind::Read { &mut self.read } else { &mut self.write };
        side.bytes += bytes;
        side.ops += 1;
        side.latency.record(latency_ns);
        let which = usize::from(kind == OpKind::Write);
        self.lanes[lane][which] += bytes;
        let mut window = self.window_at(now);
        while window >= WINDOWS_MAX {
            self.halve_windows();
            window = self.window_at(now);
        }
        if window >= self.series.len() {
            self.series.resize(window + 1, [0; 2]);
        }
        self.series[window][which] += bytes;
    }

    /// Two windows become one, so that a run of any length fits.
    fn halve_windows(&mut self) {
        let len = self.series.len().div_ceil(2);
        for index in 0..len {
            let mut sum = self.series[2 * index];
            if let Some(second) = self.series.get(2 * index + 1) {
                sum = [sum[0] + second[0], sum[1] + second[1]];
            }
            self.series[index] = sum;
        }
        self.series.truncate(len);
        self.window *= 2;
    }

    fn check(&mut self, lane: &Lane, op: Op, bytes: &[u8]) {
        let start = op.block * bytes.len() as u64;
        let Some(at) = lane.key.mismatch(bytes, start / PAGE_BYTES as u64) else { return };
        let mismatch = Mismatch { path: lane.path.clone(), offset: start + at as u64 };
        self.mismatches_count += 1;
        if self.mismatches.len() < MISMATCHES_KEPT && !self.mismatches.contains(&mismatch) {
            self.mismatches.push(mismatch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineConfig, ThreadsEngine};
    use crate::{OpenMode, bench::mix::Direction};

    /// Asks for a stop from the start.
    struct Stopped(AtomicBool);

    impl Watch for Stopped {
        fn progress(&mut self, _: Duration, _: u64) {}

        fn stop_flag(&self) -> &AtomicBool {
            &self.0
        }
    }

    #[test]
    fn nothing_counts_of_a_run_that_is_stopped_while_it_warms_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for count_sync in [false, true] {
            let engine =
                ThreadsEngine::new(&EngineConfig { direct: false, ..EngineConfig::default() }).unwrap();
            let file = engine.open(&path, OpenMode::CreateNew { len: 1 << 20 }).unwrap();
            let lane = Lane {
                file,
                path: path.clone(),
                key: Key { seed: 0, file: 0 },
                schedule: Schedule::new(Direction::Write, 256, None),
                left: None,
            };
            let buffers = (0..8).map(|_| IoBuf::zeroed(PAGE_BYTES)).collect();
            let load = Load::new(&engine, vec![lane], buffers, Manner { validate: false, count_sync });
            let tally = load.run(Timing::of(60.0, 60.0), &mut Stopped(AtomicBool::new(true))).unwrap();
            assert!(tally.interrupted);
            assert_eq!((tally.seconds, tally.ops(), tally.bytes()), (0.0, 0, 0), "{count_sync}");
            assert!(tally.series.is_empty() && tally.lanes == [[0; 2]]);
            engine.close(file).unwrap();
            std::fs::remove_file(&path).unwrap();
        }
    }
}
