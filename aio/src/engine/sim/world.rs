//! The simulation's state: open files, requests in flight, the operations that wait, and the logical clock.
//!
//! Nothing here resolves a ticket: what is finished is handed out, to be delivered after the lock is released.

use super::disk::Disk;
use super::{OpKind, SimConfig};
use crate::engine::files::{still_open, unknown};
use crate::engine::job::{check_segments, doing, read_only, transfer_error};
use crate::engine::progress::{Failure, Progress, Step};
use crate::engine::split::{Alignment, Cursor, Piece, Route};
use crate::engine::{FileId, OpenMode, Request, Segment};
use crate::random::Random;
use crate::urgency::Line;
use crate::{Completer, IoBuf, IoError, IoErrorKind, Urgency};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// A ticket to resolve and what with, and the buffer of a failed request, which goes home first.
#[derive(Debug)]
pub(super) struct Finished {
    pub completer: Completer,
    pub result: Result<IoBuf, IoError>,
    pub parked: Option<IoBuf>,
}

#[derive(Debug)]
pub(super) struct World {
    pub config: SimConfig,
    pub disk: Disk,
    random: Random,
    open: BTreeMap<FileId, Handle>,
    next_file: u32,
    /// Requests in flight by id; ids grow with submission.
    requests: BTreeMap<u64, Active>,
    next_request: u64,
    /// Requests with pieces that do not wait yet.
    unissued: Line<u64>,
    waiting: Vec<Op>,
    next_order: u64,
    clock: u64,
    operations: u64,
    /// The operation count at which the power goes.
    cut_at: Option<u64>,
    is_cut: bool,
}

#[derive(Debug, Clone)]
struct Handle {
    path: PathBuf,
    writable: bool,
}

#[derive(Debug)]
struct Active {
    /// `None` for a sync.
    kind: Option<OpKind>,
    buf: IoBuf,
    segments: SmallVec<[Segment; 4]>,
    paths: SmallVec<[PathBuf; 1]>,
    cursor: Cursor,
    /// Pieces that were issued and are not finished.
    waiting_pieces: usize,
    all_issued: bool,
    error: Option<IoError>,
    completer: Completer,
    /// For a sync: writes that had not completed when it was submitted. It does not cover them.
    uncovered: Vec<u64>,
}

#[derive(Debug)]
struct Op {
    request: u64,
    piece: Piece,
    progress: Option<Progress>,
    ready_at: u64,
    /// Breaks ties in the order of submission.
    order: u64,
}

impl World {
    pub fn new(config: SimConfig, disk: Disk) -> Self {
        Self {
            random: Random::new(config.seed),
            config,
            disk,
            open: BTreeMap::new(),
            next_file: 0,
            requests: BTreeMap::new(),
            next_request: 0,
            unissued: Line::with_capacity(0),
            waiting: Vec::new(),
            next_order: 0,
            clock: 0,
            operations: 0,
            cut_at: None,
            is_cut: false,
        }
    }

    pub fn after_crash(&self, seed: u64) -> Self {
        let disk = self.disk.after_crash(&mut Random::new(seed));
        Self::new(SimConfig { seed, ..self.config.clone() }, disk)
    }

    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    pub fn operations(&self) -> u64 {
        self.operations
    }

    pub fn is_full(&self) -> bool {
        self.requests.len() >= self.config.queue_depth.max(1)
    }

    pub fn is_busy(&self, file: FileId) -> bool {
        self.requests.values().any(|active| active.segments.iter().any(|s| s.file == file))
    }

    /// How many operations happen before `submit` returns: some disks are fast.
    pub fn steps_after_submit(&mut self) -> u64 {
        if self.random.one_in(2) { self.random.below(4) } else { 0 }
    }

    pub fn cut_after(&mut self, operations: u64) -> Vec<Finished> {
        self.cut_at = Some(self.operations + operations);
        self.cut_if_due()
    }

    /// Takes the power away: everything in flight fails.
    pub fn cut(&mut self) -> Vec<Finished> {
        self.is_cut = true;
        self.waiting.clear();
        self.unissued.clear();
        let requests = std::mem::take(&mut self.requests);
        let fail = |active: Active| {
            let (path, segment) = (&active.paths[0], &active.segments[0]);
            let error = closed(doing(active.kind), path, segment.offset, segment.len as u64);
            Finished::failed(active.completer, error, Some(active.buf))
        };
        requests.into_values().map(fail).collect()
    }

    pub fn open(&mut self, path: &Path, mode: OpenMode) -> (Result<FileId, IoError>, Vec<Finished>) {
        let finished = match mode {
            OpenMode::CreateNew { len } => match self.create(path, len) {
                Ok(finished) => finished,
                Err(error) => return (Err(error), Vec::new()),
            },
            _ if self.is_cut => return (Err(closed("opening", path, 0, 0)), Vec::new()),
            _ if self.disk.file(path).is_none() => {
                return (Err(os_error("opening", path, 0, libc::ENOENT)), Vec::new());
            }
            _ => Vec::new(),
        };
        if self.is_cut {
            return (Err(closed("creating", path, 0, 0)), finished);
        }
        let id = FileId(self.next_file);
        self.next_file += 1;
        self.open.insert(id, Handle { path: path.to_owned(), writable: mode != OpenMode::Read });
        (Ok(id), finished)
    }

    fn create(&mut self, path: &Path, len: u64) -> Result<Vec<Finished>, IoError> {
        if self.is_cut {
            return Err(closed("creating", path, 0, len));
        }
        if self.disk.file(path).is_some() {
            return Err(os_error("creating", path, len, libc::EEXIST));
        }
        let fits = len <= self.config.capacity_bytes.saturating_sub(self.disk.used_bytes());
        match usize::try_from(len) {
            Ok(bytes) if fits => self.disk.create(path, bytes),
            _ => return Err(os_error("creating", path, len, libc::ENOSPC)),
        }
        Ok(self.count_operation())
    }

    pub fn close(&mut self, file: FileId) -> Result<(), IoError> {
        self.open.remove(&file).map(drop).ok_or_else(|| unknown("closing", file))
    }

    pub fn path(&self, file: FileId) -> Option<PathBuf> {
        self.open.get(&file).map(|handle| handle.path.clone())
    }

    pub fn len(&self, file: FileId) -> Result<u64, IoError> {
        let handle = self.open.get(&file).ok_or_else(|| unknown("examining", file))?;
        match self.disk.file(&handle.path) {
            Some(found) if !self.is_cut => Ok(found.current().len() as u64),
            _ => Err(closed("examining", &handle.path, 0, 0)),
        }
    }

    pub fn remove(&mut self, path: &Path) -> (Result<(), IoError>, Vec<Finished>) {
        if self.is_cut {
            return (Err(closed("removing", path, 0, 0)), Vec::new());
        }
        if self.open.values().any(|handle| handle.path == path) {
            return (Err(still_open(path)), Vec::new());
        }
        if !self.disk.remove(path) {
            return (Err(os_error("removing", path, 0, libc::ENOENT)), Vec::new());
        }
        let finished = self.count_operation();
        (if self.is_cut { Err(closed("removing", path, 0, 0)) } else { Ok(()) }, finished)
    }

    pub fn transfer(&mut self, request: Request, completer: Completer) -> Vec<Finished> {
        let Request { kind, buf, segments, urgency } = request;
        let handles = check_segments(doing(Some(kind)), kind, buf.len(), &segments, |id| {
            self.open.get(&id).cloned().ok_or_else(|| unknown(doing(Some(kind)), id))
        })
        .and_then(|handles: Vec<Handle>| self.check_handles(kind, &segments, &handles).map(|()| handles));
        let handles = match handles {
            Ok(handles) => handles,
            Err(error) => {
                return vec![Finished::failed(completer, error, Some(buf))];
            }
        };
        if segments.iter().all(|s| s.len == 0) {
            return vec![Finished { completer, result: Ok(buf), parked: None }];
        }
        let paths = handles.into_iter().map(|handle| handle.path).collect();
        self.admit(Some(kind), urgency, (buf, completer), segments, paths);
        Vec::new()
    }

    fn check_handles(&self, kind: OpKind, segments: &[Segment], handles: &[Handle]) -> Result<(), IoError> {
        for (segment, handle) in segments.iter().zip(handles) {
            if kind == OpKind::Write && !handle.writable {
                return Err(read_only(&handle.path, segment));
            }
            if self.is_cut {
                return Err(closed(doing(Some(kind)), &handle.path, segment.offset, segment.len as u64));
            }
        }
        Ok(())
    }

    pub fn sync(&mut self, file: FileId, completer: Completer) -> Vec<Finished> {
        let Some(handle) = self.open.get(&file) else {
            return vec![Finished::failed(completer, unknown("syncing", file), None)];
        };
        if self.is_cut {
            return vec![Finished::failed(completer, closed("syncing", &handle.path, 0, 0), None)];
        }
        let paths = SmallVec::from_iter([handle.path.clone()]);
        let segments = SmallVec::from_iter([Segment { file, offset: 0, start: 0, len: 0 }]);
        self.admit(None, Urgency::default(), (IoBuf::empty(), completer), segments, paths);
        Vec::new()
    }

    fn admit(
        &mut self,
        kind: Option<OpKind>,
        urgency: Urgency,
        (buf, completer): (IoBuf, Completer),
        segments: SmallVec<[Segment; 4]>,
        paths: SmallVec<[PathBuf; 1]>,
    ) {
        let id = self.next_request;
        self.next_request += 1;
        let uncovered = if kind.is_none() { self.requests.keys().copied().collect() } else { Vec::new() };
        let active = Active {
            kind,
            buf,
            segments,
            paths,
            cursor: Cursor::default(),
            waiting_pieces: 0,
            all_issued: false,
            error: None,
            completer,
            uncovered,
        };
        self.requests.insert(id, active);
        self.unissued.push(urgency, id);
        self.issue();
    }

    /// Lets pieces of the oldest requests wait, urgent ones first, up to the depth.
    fn issue(&mut self) {
        while self.waiting.len() < self.config.queue_depth.max(1) {
            let Some(queue) = self.unissued.turn() else { return };
            let id = queue[0];
            let active = self.requests.get_mut(&id).expect("an unissued request is in flight");
            let sector = Alignment { offset: self.config.sector_bytes.max(1), memory: 1 };
            let alignments: SmallVec<[Alignment; 4]> = active.segments.iter().map(|_| sector).collect();
            let block_bytes = self.config.block_bytes.max(1);
            let next = |cursor: &mut Cursor| match active.kind {
                Some(_) => cursor.next(&active.segments, &alignments, |_| true, 0, block_bytes),
                None => cursor.next_sync(),
            };
            let piece = next(&mut active.cursor).expect("a request leaves the list with its last piece");
            active.all_issued = next(&mut active.cursor.clone()).is_none();
            active.waiting_pieces += 1;
            let unit = if piece.route == Route::Edge { 1 } else { sector.offset };
            let progress =
                active.kind.map(|kind| Progress::new(kind, piece.len, unit, self.config.transfer_bytes_max));
            if active.all_issued {
                queue.pop_front();
            }
            let order = self.next_order;
            self.next_order += 1;
            self.wait(Op { request: id, piece, progress, ready_at: 0, order });
        }
    }

    fn wait(&mut self, mut op: Op) {
        op.ready_at = self.clock + self.random.below(self.config.delay_ticks_max.saturating_add(1));
        self.waiting.push(op);
    }

    /// Performs the operation that is due first; `false` if none waits.
    pub fn advance(&mut self) -> (bool, Vec<Finished>) {
        let due = (0..self.waiting.len()).min_by_key(|&i| (self.waiting[i].ready_at, self.waiting[i].order));
        let Some(index) = due else { return (false, Vec::new()) };
        let mut op = self.waiting.swap_remove(index);
        self.clock = self.clock.max(op.ready_at);
        let step = self.perform(&mut op);
        let finished = self.count_operation();
        if self.is_cut {
            return (true, finished);
        }
        match step {
            Step::Continue => {
                self.wait(op);
                (true, Vec::new())
            }
            Step::Done => (true, self.finish(&op, None)),
            Step::Fail(failure) => (true, self.finish(&op, Some(failure))),
        }
    }

    fn perform(&mut self, op: &mut Op) -> Step {
        let active = self.requests.get_mut(&op.request).expect("a waiting operation's request is in flight");
        let path = &active.paths[op.piece.segment];
        let used = self.disk.used_bytes();
        let file = self.disk.file_mut(path).expect("an open file is not removed");
        let (Some(progress), Some(kind)) = (&mut op.progress, active.kind) else {
            let uncovered = &active.uncovered;
            let id = op.request;
            file.sync(|request| request < id && !uncovered.contains(&request));
            return Step::Done;
        };
        if self.random.one_in(self.config.interrupt_one_in) {
            return progress.complete(Err(libc::EINTR));
        }
        let range = progress.next();
        let sector = self.config.sector_bytes.max(1);
        let is_whole = (op.piece.offset + range.start as u64).is_multiple_of(sector as u64)
            && range.len().is_multiple_of(sector);
        if op.piece.route != Route::Edge && !is_whole {
            return progress.complete(Err(libc::EINVAL));
        }
        let mut len = range.len();
        if self.random.one_in(self.config.short_one_in) {
            len = 1 + self.random.below(len as u64) as usize;
            if op.piece.route != Route::Edge {
                // A drive stops between sectors.
                len = len.next_multiple_of(sector);
            }
        }
        let offset = op.piece.offset + range.start as u64;
        if file.is_bad(&(offset..offset + len as u64)) {
            return progress.complete(Err(libc::EIO));
        }
        let Ok(at) = usize::try_from(offset) else { return progress.complete(Err(libc::EFBIG)) };
        let start = op.piece.start + range.start;
        progress.complete(match kind {
            OpKind::Read => Ok(file.read(at, &mut active.buf[start..start + len])),
            OpKind::Write => {
                // As a full disk does: first what still fits, then the error.
                let room = self.config.capacity_bytes.saturating_sub(used);
                let end_max = (file.current().len() as u64).saturating_add(room);
                let fits = len.min(usize::try_from(end_max.saturating_sub(offset)).unwrap_or(usize::MAX));
                if fits == 0 {
                    Err(libc::ENOSPC)
                } else {
                    file.write(op.request, at, &active.buf[start..start + fits]);
                    Ok(fits)
                }
            }
        })
    }

    /// Ends an operation, and its request with the last one.
    fn finish(&mut self, op: &Op, failure: Option<Failure>) -> Vec<Finished> {
        let active = self.requests.get_mut(&op.request).expect("a finished operation's request is in flight");
        active.waiting_pieces -= 1;
        if let Some(failure) = failure {
            let (segment, path) = (&active.segments[op.piece.segment], &active.paths[op.piece.segment]);
            let at = match failure {
                Failure::Eof => self.disk.file(path).map_or(0, |file| file.current().len() as u64),
                _ => op.piece.offset + op.progress.as_ref().map_or(0, Progress::known_bytes) as u64,
            };
            let error = transfer_error(active.kind, path, segment, at, failure);
            active.error.get_or_insert(error);
            if !active.all_issued {
                active.all_issued = true;
                self.unissued.retain(|&id| id != op.request);
            }
        }
        let is_finished = active.all_issued && active.waiting_pieces == 0;
        let finished = if is_finished { self.requests.remove(&op.request) } else { None };
        self.issue();
        let Some(active) = finished else { return Vec::new() };
        vec![match active.error {
            None => Finished { completer: active.completer, result: Ok(active.buf), parked: None },
            Some(error) => Finished::failed(active.completer, error, Some(active.buf)),
        }]
    }

    fn count_operation(&mut self) -> Vec<Finished> {
        self.operations += 1;
        self.cut_if_due()
    }

    fn cut_if_due(&mut self) -> Vec<Finished> {
        if self.cut_at.is_some_and(|at| self.operations >= at) { self.cut() } else { Vec::new() }
    }
}

impl Finished {
    fn failed(completer: Completer, error: IoError, parked: Option<IoBuf>) -> Self {
        Self { completer, result: Err(error), parked }
    }
}

fn closed(doing: &'static str, path: &Path, offset: u64, len: u64) -> IoError {
    let detail = "the simulated power is gone".to_owned();
    IoError::new(IoErrorKind::Closed, doing, path, offset, len, detail)
}

fn os_error(doing: &'static str, path: &Path, len: u64, errno: i32) -> IoError {
    IoError::from_os(doing, path, 0, len, &io::Error::from_raw_os_error(errno))
}
