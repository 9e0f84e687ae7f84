//! The actors of a step.

use super::machine::{Job, Lane, Machine};
use super::{PIECES, handling, per};
use crate::floor::Capabilities;
use std::collections::VecDeque;
use terrace_zero::{BlockPass, GroupUpdate, Schedule, Traffic, UpdateTime, WeightUse};

/// Slots that let reading, updating and writing go on beside each other, where a piece is more than a chunk.
const PIECE_SLOTS: usize = 3;

/// Steps, one after the other.
pub(super) struct Run<'a> {
    schedule: &'a Schedule,
    can: &'a Capabilities,
    machine: Machine,
    unified: bool,
    compute: Compute,
    fetch: Fetch<'a>,
    update: Update,
    /// What this step's update leaves to the next.
    left: Vec<Piece>,
}

/// Compute on its way through the blocks.
struct Compute {
    pass: usize,
    stage: Stage,
    /// Spilled activations of the next pass, on their way back.
    recall: Option<Job>,
    /// What blocks keep, on its way up for the next pass.
    rising: Option<Job>,
    /// Spilled activations on their way to disk.
    spilled: VecDeque<((), Job)>,
    /// Gradients on their way to disk, and down from the device.
    parking: Option<Job>,
    landing: Option<Job>,
}

/// What compute waits for.
#[derive(Clone, Copy)]
enum Stage {
    /// The weights and the spilled activations of a pass.
    Weights,
    /// The gradients that it goes on from.
    Gradients(Job),
    /// Its inputs.
    Inputs(Job),
    /// Its operations.
    Operations(Job),
    /// What ranks scatter of it, through the network and to peers.
    Scatters([Job; 2]),
    /// Room for what it leaves.
    Room,
    /// What it leaves, on its way down.
    Outputs(Job),
}

/// Weights on their way to compute. Uses are counted in the order of the step.
struct Fetch<'a> {
    uses: Vec<&'a WeightUse>,
    requested: usize,
    reading: VecDeque<(f64, Job)>,
    verifying: VecDeque<((), Job)>,
    staged: usize,
    uploading: VecDeque<(usize, Job)>,
    /// What ranks gather, through the network and from peers.
    gathering: VecDeque<[Job; 2]>,
    /// Uploads, and gathers after them, in flight or waiting for their use, and how many may be.
    ahead: usize,
    ahead_max: usize,
    /// Places for them and for those in use, and how many are.
    places: usize,
    in_use: usize,
    ready: usize,
    /// Uses of the passes that have begun.
    taken: usize,
    /// Free slots, by class.
    slots: Vec<usize>,
}

/// Chunks of state on their way through the update.
struct Update {
    queue: VecDeque<Piece>,
    reading: VecDeque<(Piece, Job)>,
    /// The first of the next step, in the slots that this one has left.
    ahead: VecDeque<(Piece, Job)>,
    updating: Option<(Piece, Job)>,
    writing: VecDeque<(Piece, Job)>,
    slots: usize,
    /// Groups below this are updated, as far as compute waits for it.
    updated: usize,
    /// And are on disk.
    written: usize,
    /// Chunks of gradients in memory.
    parked: f64,
}

/// One or several chunks of a group's update, or of its copies.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    part: usize,
    /// The group's weights are new when it is done.
    is_last: bool,
    core_seconds: f64,
    read: f64,
    write: f64,
    parked: f64,
}

impl<'a> Run<'a> {
    pub(super) fn new(schedule: &'a Schedule, unified: bool, can: &'a Capabilities) -> Self {
        let is_coarse = schedule.groups.iter().any(|group| pieces(schedule, group) < group.chunks);
        let slots = if is_coarse { schedule.update_slots.min(PIECE_SLOTS) } else { schedule.update_slots };
        Self {
            schedule,
            can,
            machine: Machine::new(can, unified),
            unified,
            compute: Compute::default(),
            fetch: Fetch::new(schedule),
            update: Update::new(slots.max(1)),
            left: Vec::new(),
        }
    }

    /// Plays a step; gives the moment at which it ends.
    pub(super) fn step(&mut self) -> Option<f64> {
        self.begin();
        loop {
            while self.fetch() | self.upload() | self.update() | self.compute() {}
            if self.compute.pass == self.schedule.passes.len() && self.has_ended() {
                return Some(self.machine.now);
            }
            if !self.machine.advance() {
                debug_assert!(
                    self.machine.has_work(),
                    "everybody waits for somebody in pass {}",
                    self.compute.pass
                );
                return None;
            }
        }
    }

    fn begin(&mut self) {
        self.fetch = Fetch::new(self.schedule);
        self.compute = Compute::default();
        let update = &mut self.update;
        if let Some(first) = self.left.first() {
            (update.updated, update.written) = (first.group, first.group);
        }
        update.queue.extend(self.left.drain(..).skip(update.ahead.len()));
        update.reading.append(&mut update.ahead);
    }

    /// Whether a step whose passes are over may end; what its update leaves is then known.
    fn has_ended(&mut self) -> bool {
        let is_over = match self.schedule.update {
            UpdateTime::Beside => {
                self.update.is_idle() && (!self.left.is_empty() || self.update.is_settled())
            }
            UpdateTime::After | UpdateTime::InTurn | UpdateTime::Deferred => self.update.is_settled(),
        };
        let has_landed = self.compute.landing.is_none_or(|job| self.machine.is_done(job));
        if is_over && has_landed && self.schedule.update == UpdateTime::Deferred {
            self.left = self.all_pieces();
        }
        is_over && has_landed
    }

    /// What follows the last pass.
    fn end_passes(&mut self) {
        match self.schedule.update {
            UpdateTime::After => self.update.queue.extend(self.all_pieces()),
            UpdateTime::Beside => {
                self.left = self.update.queue.drain(..).collect();
                let groups = self.schedule.groups.iter().enumerate();
                for (late, _) in groups.filter(|(_, group)| group.is_late) {
                    self.left.extend(self.pieces(late));
                }
                self.left.sort_by_key(|piece| (piece.group, piece.part));
            }
            UpdateTime::InTurn | UpdateTime::Deferred => {}
        }
    }

    /// Goes as far as it can without waiting, as all that follow; false if that is nowhere.
    fn compute(&mut self) -> bool {
        let Some(pass) = self.schedule.passes.get(self.compute.pass) else { return false };
        let is_done = |job| self.machine.is_done(job);
        match self.compute.stage {
            Stage::Weights => return self.start(pass),
            Stage::Gradients(job) if is_done(job) => {
                let job = self.machine.submit(Lane::Up, pass.upload_bytes as f64);
                self.compute.stage = Stage::Inputs(job);
            }
            Stage::Inputs(job) if is_done(job) => {
                let next = self.schedule.passes.get(self.compute.pass + 1);
                self.compute.recall = next
                    .filter(|next| next.spill_read_bytes > 0)
                    .map(|next| self.machine.submit(Lane::ReadScratch, next.spill_read_bytes as f64));
                // Piece by piece, beside what is read of it.
                self.compute.rising = next
                    .filter(|next| next.early_upload_bytes > 0)
                    .map(|next| self.machine.submit(Lane::Up, next.early_upload_bytes as f64));
                let job = self.machine.submit(Lane::Compute, self.compute_seconds(pass));
                self.compute.stage = Stage::Operations(job);
            }
            Stage::Operations(job) if is_done(job) => {
                // What crossed has left its slot already.
                let here = pass.weights.iter().filter(|weights| weights.upload_bytes == 0);
                here.for_each(|weights| self.fetch.release(weights));
                let Traffic { network_bytes, peer_bytes } = pass.scatters;
                self.compute.stage = Stage::Scatters([
                    self.machine.submit(Lane::ScatterNetwork, network_bytes as f64),
                    self.machine.submit(Lane::ScatterPeers, peer_bytes as f64),
                ]);
            }
            Stage::Scatters(jobs) if jobs.into_iter().all(is_done) => self.compute.stage = Stage::Room,
            Stage::Room => return self.leave(pass),
            Stage::Outputs(job) if is_done(job) => {
                let follows = matches!(self.schedule.update, UpdateTime::Beside | UpdateTime::InTurn);
                let is_late = |&group: &usize| self.schedule.groups[group].is_late;
                if let Some(group) = pass.completes.filter(|group| follows && !is_late(group)) {
                    self.update.queue.extend(self.pieces(group));
                }
                self.fetch.in_use = 0;
                self.compute.pass += 1;
                self.compute.stage = Stage::Weights;
                if self.compute.pass == self.schedule.passes.len() {
                    self.end_passes();
                }
            }
            _ => return false,
        }
        true
    }

    /// Begins a pass when its weights and activations are there.
    fn start(&mut self, pass: &BlockPass) -> bool {
        // Two updates at once would mix two steps.
        let joins = pass.is_backward && self.schedule.update == UpdateTime::Beside;
        if joins && self.update.written != usize::MAX {
            return false;
        }
        let in_turn = self.schedule.update == UpdateTime::InTurn;
        if in_turn && !(self.update.queue.is_empty() && self.update.is_idle()) {
            return false;
        }
        if self.fetch.ready < self.fetch.taken + pass.weights.len() {
            return false;
        }
        if pass.spill_read_bytes > 0 {
            let job = self.compute.recall;
            let job =
                job.unwrap_or_else(|| self.machine.submit(Lane::ReadScratch, pass.spill_read_bytes as f64));
            self.compute.recall = Some(job);
            if !self.machine.is_done(job) {
                return false;
            }
        }
        if pass.early_upload_bytes > 0 {
            let job = self.compute.rising;
            let job = job.unwrap_or_else(|| self.machine.submit(Lane::Up, pass.early_upload_bytes as f64));
            self.compute.rising = Some(job);
            if !self.machine.is_done(job) {
                return false;
            }
        }
        self.fetch.taken += pass.weights.len();
        self.fetch.in_use = pass.weights.iter().filter(|weights| weights.comes()).count();
        self.fetch.ahead -= self.fetch.in_use;
        let job = self.machine.submit(Lane::ReadScratch, pass.gradient_read_bytes as f64);
        self.compute.stage = Stage::Gradients(job);
        true
    }

    /// Sends on what a pass leaves when there is room for it.
    fn leave(&mut self, pass: &BlockPass) -> bool {
        let machine = &mut self.machine;
        let Compute { spilled, parking, landing, stage, .. } = &mut self.compute;
        while arrived(spilled, machine).is_some() {}
        let spill_fits = pass.spill_write_bytes == 0 || spilled.len() < self.schedule.spills_ahead;
        let parked = pass.completes.map_or(0, |group| self.schedule.groups[group].parked_chunks) as f64;
        let most = self.schedule.gradient_chunks.map_or(f64::INFINITY, |chunks| chunks as f64 + 0.5);
        let gradients_fit = self.update.parked < 0.5 || self.update.parked + parked <= most;
        let is_free = |job: &Option<Job>| job.is_none_or(|job| machine.is_done(job));
        if !spill_fits || !gradients_fit || !is_free(parking) || !is_free(landing) {
            return false;
        }
        self.update.parked += if self.schedule.gradient_chunks.is_some() { parked } else { 0.0 };
        if pass.spill_write_bytes > 0 {
            spilled.push_back(((), machine.submit(Lane::WriteScratch, pass.spill_write_bytes as f64)));
        }
        if pass.gradient_write_bytes > 0 {
            *parking = Some(machine.submit(Lane::WriteScratch, pass.gradient_write_bytes as f64));
        }
        *stage = Stage::Outputs(machine.submit(Lane::Down, pass.download_bytes as f64));
        if pass.late_download_bytes > 0 {
            *landing = Some(machine.submit(Lane::Down, pass.late_download_bytes as f64));
        }
        true
    }

    fn compute_seconds(&self, pass: &BlockPass) -> f64 {
        let spilled = pass.spill_read_bytes + pass.spill_write_bytes;
        let scratch = (spilled + pass.gradient_read_bytes + pass.gradient_write_bytes) as f64;
        let handling = if self.unified { handling(scratch, self.unified, self.can) } else { 0.0 };
        per(pass.operations as f64, self.can.training.or(self.can.operations)) + handling
    }

    /// Reads weights as far ahead as slots and the gate of the update allow.
    fn fetch(&mut self) -> bool {
        let (fetch, machine) = (&mut self.fetch, &mut self.machine);
        let before = (fetch.requested, fetch.reading.len(), fetch.staged);
        while let Some(weights) = fetch.uses.get(fetch.requested) {
            let reads = weights.read_bytes > 0;
            let open = if reads { self.update.written } else { self.update.updated };
            if open <= weights.group || (reads && fetch.slots[weights.class] == 0) {
                break;
            }
            if reads {
                fetch.slots[weights.class] -= 1;
            }
            let bytes = weights.read_bytes as f64;
            fetch.reading.push_back((bytes, machine.submit(Lane::ReadWeights, bytes)));
            fetch.requested += 1;
        }
        while let Some(bytes) = arrived(&mut fetch.reading, machine) {
            let seconds = handling(bytes, self.unified, self.can);
            fetch.verifying.push_back(((), machine.submit(Lane::Verify, seconds)));
        }
        while arrived(&mut fetch.verifying, machine).is_some() {
            fetch.staged += 1;
        }
        before != (fetch.requested, fetch.reading.len(), fetch.staged)
    }

    /// Sends weights to the device and gathers them there, a few uses ahead.
    fn upload(&mut self) -> bool {
        let (fetch, machine) = (&mut self.fetch, &mut self.machine);
        let mut moved = false;
        while fetch.ready + fetch.gathering.len() + fetch.uploading.len() < fetch.staged {
            let at = fetch.ready + fetch.gathering.len() + fetch.uploading.len();
            let weights = fetch.uses[at];
            let is_full = fetch.ahead == fetch.ahead_max || fetch.ahead + fetch.in_use == fetch.places;
            if weights.comes() && is_full {
                break;
            }
            fetch.ahead += usize::from(weights.comes());
            let job = machine.submit(Lane::UpWeights, weights.upload_bytes as f64);
            fetch.uploading.push_back((at, job));
            moved = true;
        }
        while let Some(at) = arrived(&mut fetch.uploading, machine) {
            let weights = fetch.uses[at];
            if weights.upload_bytes > 0 {
                fetch.release(weights);
            }
            let Traffic { network_bytes, peer_bytes } = weights.gathers;
            fetch.gathering.push_back([
                machine.submit(Lane::GatherNetwork, network_bytes as f64),
                machine.submit(Lane::GatherPeers, peer_bytes as f64),
            ]);
            moved = true;
        }
        while fetch.gathering.front().is_some_and(|jobs| jobs.iter().all(|&job| machine.is_done(job))) {
            fetch.gathering.pop_front();
            fetch.ready += 1;
            moved = true;
        }
        moved
    }

    /// Reads the next pieces, updates one, writes the last ones.
    fn update(&mut self) -> bool {
        let (update, machine) = (&mut self.update, &mut self.machine);
        let mut moved = false;
        while update.in_slots() < update.slots
            && let Some(piece) = update.queue.pop_front()
        {
            update.reading.push_back((piece, machine.submit(Lane::ReadState, piece.read)));
            moved = true;
        }
        if update.updating.is_none()
            && let Some(piece) = arrived(&mut update.reading, machine)
        {
            update.updating = Some((piece, machine.submit(Lane::Update, piece.core_seconds)));
            moved = true;
        }
        if let Some((piece, _)) = update.updating.take_if(|(_, job)| machine.is_done(*job)) {
            update.parked -= piece.parked;
            if piece.is_last {
                let next = update.reading.front();
                update.updated = update.updated.max(open_behind(piece, next, &update.queue));
            }
            update.writing.push_back((piece, machine.submit(Lane::WriteState, piece.write)));
            moved = true;
        }
        while let Some(piece) = arrived(&mut update.writing, machine) {
            if piece.is_last {
                let next = update.writing.front().or(update.updating.as_ref()).or(update.reading.front());
                update.written = update.written.max(open_behind(piece, next, &update.queue));
            }
            moved = true;
        }
        let next =
            if self.schedule.update == UpdateTime::Deferred && update.is_settled() && update.ahead.is_empty()
            {
                self.all_pieces()
            } else {
                Vec::new()
            };
        let (update, machine) = (&mut self.update, &mut self.machine);
        for piece in next.into_iter().take(update.slots) {
            update.ahead.push_back((piece, machine.submit(Lane::ReadState, piece.read)));
            moved = true;
        }
        // Groups that were updated before are passed over.
        if update.is_idle() && update.queue.is_empty() {
            update.updated = usize::MAX;
        }
        if update.is_settled() {
            update.written = usize::MAX;
        }
        moved
    }

    fn all_pieces(&self) -> Vec<Piece> {
        let groups = 0..self.schedule.groups.len();
        let late = groups.clone().flat_map(|group| self.late_pieces(group));
        groups.flat_map(|group| self.pieces(group)).chain(late).collect()
    }

    /// A group's update, cut into pieces.
    fn pieces(&self, group: usize) -> impl Iterator<Item = Piece> + use<> {
        let found = &self.schedule.groups[group];
        let [read, write] = [found.read_bytes, found.write_bytes].map(|bytes| bytes as f64);
        let seconds =
            per(found.parameters as f64, self.can.updates) + handling(read + write, self.unified, self.can);
        let bounded = self.schedule.gradient_chunks.is_some();
        let parked = if bounded { found.parked_chunks as f64 } else { 0.0 };
        cut(pieces(self.schedule, found), group, [seconds, read, write, parked])
    }

    /// The writing of a group's copies.
    fn late_pieces(&self, group: usize) -> impl Iterator<Item = Piece> + use<> {
        let found = &self.schedule.groups[group];
        let write = found.late_write_bytes as f64;
        let count = if write > 0.0 { pieces(self.schedule, found) } else { 0 };
        cut(count, group, [handling(write, self.unified, self.can), 0.0, write, 0.0])
    }
}

/// The first of a queue, if its job is done.
fn arrived<T>(queue: &mut VecDeque<(T, Job)>, machine: &Machine) -> Option<T> {
    let (_, job) = queue.front()?;
    if machine.is_done(*job) { queue.pop_front().map(|(arrived, _)| arrived) } else { None }
}

/// Groups below what this gives need not wait any more when the last piece of a group is through: those up to the next one that is
/// under way or, if none is, queued.
fn open_behind(last: Piece, under_way: Option<&(Piece, Job)>, queue: &VecDeque<Piece>) -> usize {
    let next = under_way.map(|(piece, _)| piece).or(queue.front());
    next.map_or(0, |next| next.group).max(last.group + 1)
}

/// How many pieces a group's update is cut into.
fn pieces(schedule: &Schedule, group: &GroupUpdate) -> usize {
    group.chunks.min(PIECES / schedule.groups.len()).max(1)
}

fn cut(count: usize, group: usize, whole: [f64; 4]) -> impl Iterator<Item = Piece> {
    let [core_seconds, read, write, parked] = whole.map(|amount| amount / count as f64);
    (0..count).map(move |part| {
        let is_last = part + 1 == count;
        Piece { group, part, is_last, core_seconds, read, write, parked }
    })
}

impl Default for Compute {
    fn default() -> Self {
        let (recall, rising, spilled, parking, landing) = (None, None, VecDeque::new(), None, None);
        Self { pass: 0, stage: Stage::Weights, recall, rising, spilled, parking, landing }
    }
}

impl<'a> Fetch<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let ahead = schedule.uploads_ahead;
        let together = schedule.passes.iter().map(|pass| pass.weights.len()).max().unwrap_or(0);
        Self {
            uses: schedule.passes.iter().flat_map(|pass| &pass.weights).collect(),
            requested: 0,
            reading: VecDeque::new(),
            verifying: VecDeque::new(),
            staged: 0,
            uploading: VecDeque::new(),
            gathering: VecDeque::new(),
            ahead: 0,
            ahead_max: ahead.max(together),
            places: ahead + together,
            in_use: 0,
            ready: 0,
            taken: 0,
            slots: schedule.weight_slots.clone(),
        }
    }

    fn release(&mut self, weights: &WeightUse) {
        if weights.read_bytes > 0 {
            self.slots[weights.class] += 1;
        }
    }
}

impl Update {
    fn new(slots: usize) -> Self {
        let (queue, reading, writing) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (updated, written) = (usize::MAX, usize::MAX);
        let ahead = VecDeque::new();
        Self { queue, reading, ahead, updating: None, writing, slots, updated, written, parked: 0.0 }
    }

    fn in_slots(&self) -> usize {
        self.reading.len() + usize::from(self.updating.is_some()) + self.writing.len()
    }

    /// What was begun is updated.
    fn is_idle(&self) -> bool {
        self.reading.is_empty() && self.updating.is_none()
    }

    /// All is updated and written.
    fn is_settled(&self) -> bool {
        self.is_idle() && self.queue.is_empty() && self.writing.is_empty()
    }
}
