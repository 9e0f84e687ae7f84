//! Work that waits for a device, in one queue per device.
//!
//! A request is enqueued on every device that it touches, and the next piece comes from the device with the fewest
//! operations in flight. So a slow device fills its own queue and nobody else's, and every device is kept busy as
//! long as it has work.

use super::job::Job;
use super::split::{Cursor, Piece};
use std::collections::VecDeque;
use std::sync::Arc;

/// The queues.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    /// Operations in flight at once on each device.
    depth: usize,
    in_flight: usize,
}

#[derive(Debug)]
struct Lane {
    device: u64,
    /// Requests with pieces that were not taken yet, oldest first.
    queue: VecDeque<Waiting>,
    in_flight: usize,
}

#[derive(Debug)]
struct Waiting {
    job: Arc<Job>,
    cursor: Cursor,
    /// The piece before the cursor. A request whose last piece was taken is not kept.
    next: Piece,
}

/// A piece that was taken and belongs to whoever took it.
#[derive(Debug)]
pub(crate) struct Taken {
    /// To be given to [`Lanes::done`] afterwards.
    pub lane: usize,
    pub job: Arc<Job>,
    pub piece: Piece,
}

impl Lanes {
    pub fn new(depth: usize) -> Self {
        Self { lanes: Vec::new(), depth, in_flight: 0 }
    }

    /// Enqueues a request on every device that it touches.
    pub fn admit(&mut self, job: Arc<Job>) {
        let devices = job.devices();
        for &device in &devices {
            let mut cursor = Cursor::on(device);
            let Some(next) = job.next_piece(&mut cursor) else { continue };
            let waiting = Waiting { job: Arc::clone(&job), cursor, next };
            self.lane(device).queue.push_back(waiting);
        }
    }

    fn lane(&mut self, device: u64) -> &mut Lane {
        let found = self.lanes.iter().position(|lane| lane.device == device);
        let index = found.unwrap_or_else(|| {
            self.lanes.push(Lane { device, queue: VecDeque::with_capacity(self.depth), in_flight: 0 });
            self.lanes.len() - 1
        });
        &mut self.lanes[index]
    }

    /// Takes the next piece; `None` when no device has both work and room.
    pub fn take(&mut self) -> Option<Taken> {
        let ready = |lane: &&mut Lane| !lane.queue.is_empty() && lane.in_flight < self.depth;
        let (index, lane) = self
            .lanes
            .iter_mut()
            .enumerate()
            .filter(|(_, lane)| ready(&lane))
            .min_by_key(|(_, l)| l.in_flight)?;
        lane.in_flight += 1;
        self.in_flight += 1;
        let waiting = lane.queue.front_mut().expect("the lane was seen to have work");
        let piece = waiting.next;
        let job = if let Some(next) = waiting.job.next_piece(&mut waiting.cursor) {
            waiting.next = next;
            Arc::clone(&waiting.job)
        } else {
            lane.queue.pop_front().expect("seen above").job
        };
        Some(Taken { lane: index, job, piece })
    }

    /// A piece that was taken from `lane` is finished.
    pub fn done(&mut self, lane: usize) {
        self.lanes[lane].in_flight -= 1;
        self.in_flight -= 1;
    }

    /// Pieces that were taken and are not done.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether nothing waits to be taken.
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.queue.is_empty())
    }

    /// Whether every known device has as many operations in flight as it may.
    pub fn is_full(&self) -> bool {
        !self.lanes.is_empty() && self.lanes.iter().all(|lane| lane.in_flight >= self.depth)
    }

    /// Whether some device is busy, and every busy one has as many operations in flight as it may.
    pub fn busy_are_full(&self) -> bool {
        self.in_flight > 0
            && self.lanes.iter().all(|lane| lane.in_flight == 0 || lane.in_flight >= self.depth)
    }
}
