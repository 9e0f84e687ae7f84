//! Work that waits for a device, in one queue per device.
//!
//! A request is enqueued on every device that it touches, and the next piece comes from the device with the fewest
//! operations in flight. So a slow device fills its own queue and nobody else's, and every device is kept busy as
//! long as it has work. Pieces of urgent requests go first, also ahead of what is left of a request that was begun.

use super::job::Job;
use super::split::{Cursor, Piece};
use crate::urgency::Line;
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
    /// Requests with pieces that were not taken yet.
    line: PieceLine,
    in_flight: usize,
}

/// Requests whose pieces are taken one after the other.
#[derive(Debug)]
pub(crate) struct PieceLine(Line<Waiting>);

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

    /// Enqueues a request on every device that it touches. Nothing of it is taken meanwhile, and the queues alone hold
    /// on to it afterwards.
    #[expect(clippy::needless_pass_by_value, reason = "the caller is to let go of the job")]
    pub fn admit(&mut self, job: Arc<Job>) {
        let devices = job.devices();
        for &device in &devices {
            self.lane(device).line.push(Arc::clone(&job), Cursor::on(device));
        }
    }

    fn lane(&mut self, device: u64) -> &mut Lane {
        let found = self.lanes.iter().position(|lane| lane.device == device);
        let index = found.unwrap_or_else(|| {
            self.lanes.push(Lane { device, line: PieceLine::with_capacity(self.depth), in_flight: 0 });
            self.lanes.len() - 1
        });
        &mut self.lanes[index]
    }

    /// Takes the next piece; `None` when no device has both work and room.
    pub fn take(&mut self) -> Option<Taken> {
        let ready = |lane: &&mut Lane| !lane.line.is_empty() && lane.in_flight < self.depth;
        let (index, lane) = self
            .lanes
            .iter_mut()
            .enumerate()
            .filter(|(_, lane)| ready(lane))
            .min_by_key(|(_, l)| l.in_flight)?;
        lane.in_flight += 1;
        self.in_flight += 1;
        let (job, piece) = lane.line.take().expect("the lane was seen to have work");
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
        self.lanes.iter().all(|lane| lane.line.is_empty())
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

impl PieceLine {
    /// An empty line that takes so many requests of each urgency without allocating.
    pub fn with_capacity(capacity: usize) -> Self {
        Self(Line::with_capacity(capacity))
    }

    /// Lets the pieces wait that `cursor` has not come to; a request without one does not wait.
    pub fn push(&mut self, job: Arc<Job>, mut cursor: Cursor) {
        if let Some(next) = job.next_piece(&mut cursor) {
            self.0.push(job.urgency(), Waiting { job, cursor, next });
        }
    }

    /// Takes the piece whose turn it is. With the last one of a request the line lets go of its job.
    pub fn take(&mut self) -> Option<(Arc<Job>, Piece)> {
        let queue = self.0.turn()?;
        let waiting = queue.front_mut()?;
        let piece = waiting.next;
        if let Some(next) = waiting.job.next_piece(&mut waiting.cursor) {
            waiting.next = next;
            return Some((Arc::clone(&waiting.job), piece));
        }
        Some((queue.pop_front()?.job, piece))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Requests of an urgency that wait.
    #[cfg(feature = "tokio_uring")]
    pub fn len(&self, urgency: crate::Urgency) -> usize {
        self.0.len(urgency)
    }
}

#[cfg(test)]
mod tests {
    use super::super::files::FileTable;
    use super::super::job::JobPool;
    use super::super::{FileId, OpKind, OpenMode, Request, Segment};
    use super::*;
    use crate::{IoBuf, Ticket, Urgency};

    const BLOCK: usize = 4096;

    struct Rig {
        table: FileTable,
        jobs: JobPool,
        files: Vec<FileId>,
        _dir: tempfile::TempDir,
    }

    /// Files on as many devices, numbered from zero.
    fn rig(devices: u64) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let table = FileTable::new(false);
        let open = |device| {
            let path = dir.path().join(format!("{device}"));
            let file = table.open(&path, OpenMode::CreateNew { len: 100 * BLOCK as u64 }).unwrap();
            table.pretend_device(file, device);
            file
        };
        let files = (0..devices).map(open).collect();
        Rig { table, jobs: JobPool::default(), files, _dir: dir }
    }

    impl Rig {
        /// A read of `blocks` blocks from each of some files.
        fn job(&self, files: &[usize], blocks: usize) -> (Arc<Job>, Ticket) {
            self.job_of(Urgency::default(), files, blocks)
        }

        fn job_of(&self, urgency: Urgency, files: &[usize], blocks: usize) -> (Arc<Job>, Ticket) {
            let part = |(index, &file): (usize, &usize)| Segment {
                file: self.files[file],
                offset: 0,
                start: index * blocks * BLOCK,
                len: blocks * BLOCK,
            };
            let segments = files.iter().enumerate().map(part).collect();
            let buf = IoBuf::zeroed(files.len() * blocks * BLOCK);
            let request = Request::new(OpKind::Read, buf, segments).with_urgency(urgency);
            let mut job = None;
            let ticket = self.jobs.transfer(request, &self.table, BLOCK, |made| job = Some(made));
            (job.unwrap(), ticket)
        }
    }

    #[test]
    fn a_slow_device_fills_its_own_queue_only() {
        let rig = rig(2);
        let mut lanes = Lanes::new(3);
        let ((slow, slow_ticket), (fast, fast_ticket)) = (rig.job(&[0], 50), rig.job(&[1], 20));
        lanes.admit(slow);
        let mut stuck = Vec::new();
        while let Some(taken) = lanes.take() {
            stuck.push(taken);
        }
        assert_eq!((stuck.len(), lanes.in_flight()), (3, 3));
        assert!(lanes.is_full() && lanes.busy_are_full());
        // Nothing of the slow device ever ends, and the fast one is served to the end.
        lanes.admit(fast);
        for _ in 0..20 {
            let taken = lanes.take().expect("the fast device has room");
            assert_eq!(taken.job.file(&taken.piece).device, 1);
            lanes.done(taken.lane);
            rig.jobs.finish_piece(taken.job, Ok(()));
        }
        assert!(lanes.take().is_none() && !lanes.is_empty());
        assert_eq!(fast_ticket.wait().unwrap().len(), 20 * BLOCK);
        assert!(!slow_ticket.is_done());
    }

    #[test]
    fn one_request_keeps_every_device_busy() {
        let rig = rig(3);
        let mut lanes = Lanes::new(2);
        let (job, ticket) = rig.job(&[0, 1, 2], 4);
        lanes.admit(job);
        let first: Vec<Taken> = std::iter::from_fn(|| lanes.take()).collect();
        let mut devices: Vec<u64> = first.iter().map(|t| t.job.file(&t.piece).device).collect();
        // The least busy device is next, so the first three pieces go to three devices.
        devices[..3].sort_unstable();
        assert_eq!(devices[..3], [0, 1, 2]);
        assert_eq!(devices.len(), 6);
        let mut starts = Vec::new();
        let mut waiting = first;
        while let Some(taken) = waiting.pop() {
            starts.push(taken.piece.start);
            lanes.done(taken.lane);
            rig.jobs.finish_piece(taken.job, Ok(()));
            waiting.extend(lanes.take());
        }
        starts.sort_unstable();
        assert!(starts.into_iter().eq((0..12).map(|index| index * BLOCK)), "every block once");
        assert!(lanes.is_empty() && lanes.in_flight() == 0);
        ticket.wait().unwrap();
    }

    /// The next is chosen when one is done, so that what is in flight stays and the rest of a long request waits.
    #[test]
    fn pieces_of_urgent_requests_go_ahead_of_what_is_left_of_others() {
        let rig = rig(1);
        let mut lanes = Lanes::new(1);
        let ((long, long_ticket), (soon, soon_ticket)) =
            (rig.job(&[0], 3), rig.job_of(Urgency::Soon, &[0], 2));
        lanes.admit(long);
        let mut next = lanes.take();
        lanes.admit(soon);
        let mut done = Vec::new();
        while let Some(taken) = next {
            assert!(lanes.take().is_none(), "one at a time");
            lanes.done(taken.lane);
            rig.jobs.finish_piece(taken.job, Ok(()));
            done.push((taken.piece.start / BLOCK, soon_ticket.is_done(), long_ticket.is_done()));
            next = lanes.take();
        }
        let (yes, no) = (true, false);
        assert_eq!(done, [(0, no, no), (0, no, no), (1, yes, no), (1, yes, no), (2, yes, yes)]);
    }
}
