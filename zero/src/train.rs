//! One training step: forward, backward, update, commit.
//!
//! Accumulation is layer-major ("vertical", GreedySnake, arXiv 2512.17570): every micro-batch of the step runs through a block
//! before the next block's weights are needed, so weights travel twice a step whatever the number of micro-batches. Horizontal
//! accumulation does the same in several rounds (`rounds.rs`).

use crate::block::Parts;
use crate::device_weights::DeviceWeights;
use crate::engine::{Engine, Signals, Unsaved};
use crate::failure::not_finite;
use crate::fetch::{Fetcher, Order, Ready};
use crate::gradient_parts::{
    Accumulator, Destination, Filling, Leaving, gradients_of, params_behind, parts_of,
};
use crate::gradients::GradientPark;
use crate::kept::KeptInStep;
use crate::lane::Signal;
use crate::overlap::{Bench, Follower, Gate, Pending, defer, follow, join};
use crate::pass::Pass;
use crate::plan::packed;
use crate::rounds::Rounds;
use crate::runs::Runs;
use crate::scale::LossScale;
use crate::state::Stored;
use crate::timeline::{Resource, Timeline};
use crate::update::{ChunkAt, Items, Updater};
use crate::{
    Activations, BatchUse, EngineError, HostTensor, MicroBatch, Mode, Result, StepRates, StepReport,
};
use crossbeam::channel::unbounded;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use terrace_device::Region;
use terrace_kernels::{DType, Packing, Tensor};
use terrace_optimizer::{DeviceOptimizer, StepArgs, clip_coefficient, optimizer};
use terrace_tiers::Tier;

/// What only training uses.
struct Training<'a> {
    pass: Pass<'a>,
    inputs: &'a [Vec<Tensor>],
    activations: &'a mut Activations,
    kept: KeptInStep<'a>,
    park: &'a GradientPark,
    rounds: Rounds,
    sums: Option<&'a GradientPark>,
    packing: Option<&'a mut Packing>,
    /// Gradients of signals on their way down the blocks, by micro-batch.
    signals: Vec<Option<Signal>>,
    runs: &'a Runs,
    pool: &'a rayon::ThreadPool,
    step: u64,
    loss_terms: u64,
    /// A loss that is not finite has a gradient that is not, which a loss scale takes for an overflow.
    may_overflow: bool,
}

/// Who updates a group whose gradient is complete.
enum Update<'a> {
    /// Nobody before the whole gradient is known.
    Later,
    /// Whoever completed it.
    Here(Updater<'a>, &'a Stored),
    /// A thread that hears of it.
    There(Follower<'a>),
}

/// What became of a step's update.
struct Updated {
    /// The loss scale after it.
    scale: Option<LossScale>,
    /// Set if it is still to be done, or some of it.
    deferred: Option<(StepArgs, Option<Vec<ChunkAt>>)>,
}

/// Time in which compute waited.
#[derive(Default)]
struct Stopwatch(Duration);

impl Stopwatch {
    fn time<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        self.0 += began.elapsed();
        result
    }
}

impl Engine {
    /// Runs one optimizer step over all micro-batches. `rates` is a learning rate, or [`StepRates`].
    ///
    /// State on disk is committed with every step. Where the update waits for the norm of the whole gradient (clipping, a loss
    /// scale) it runs during the next step's forward, or beside backward while norms change nothing, and so does what else backward
    /// left no time for, unless [`WindowOverrides::overlap`](crate::WindowOverrides) says otherwise. So does the commit, then;
    /// [`flush`](Self::flush) makes up for a next step. A process that is killed before has the step before on disk.
    ///
    /// # Errors
    /// A shape that was not planned, numbers that blocks [cannot compute with](crate::Block::check), a loss or gradient that is not finite,
    /// or a failing tier. The last committed step is then still intact.
    pub fn train_step(&mut self, batches: &[MicroBatch], rates: impl Into<StepRates>) -> Result<StepReport> {
        self.train_step_noting(batches, rates, |_| Vec::new())
    }

    /// As [`train_step`](Self::train_step); what `note` makes of the report (of everything but the commit) is committed with
    /// the step, and [`noted`](Self::noted) gives it after a resume. What a trainer writes elsewhere after a step can be
    /// lost when the process is killed between the two; this cannot. Of state that is not on disk a save has the note of its step.
    ///
    /// # Errors
    /// As [`train_step`](Self::train_step), and where the note is longer than 16 000 bytes: what is committed after an update, that of
    /// the next step or of [`flush`](Self::flush).
    pub fn train_step_noting(
        &mut self,
        batches: &[MicroBatch],
        rates: impl Into<StepRates>,
        note: impl FnOnce(&StepReport) -> Vec<u8>,
    ) -> Result<StepReport> {
        self.check_batches(batches)?;
        let StepRates { lr, betas } = rates.into();
        self.step_args(lr, 1.0).check()?;
        self.refresh()?;
        // What is pending has an optimizer of its own.
        self.set_betas(betas)?;
        let began = Instant::now();
        let loss_terms: u64 = batches.iter().map(|b| b.loss_terms).sum();
        if loss_terms == 0 {
            let message =
                format!("step {} has no target that carries loss: every label is masked", self.step + 1);
            return Err(EngineError::Batch(message));
        }
        self.lane.take_moved();
        let inputs =
            batches.iter().map(|b| self.lane.tensors(&b.inputs)).collect::<Result<Vec<Vec<Tensor>>>>()?;
        let loss_scale = self.loss_scale.map(|scale| scale.scale());
        let mut report = StepReport { step: self.step + 1, loss_terms, loss_scale, ..StepReport::default() };
        let pending = self.pending.take();
        let result = self.forward_backward(batches, &inputs, lr, pending, &mut report);
        drop(inputs);
        let left = match result {
            Ok(left) => left,
            Err(error) => return Err(self.give_up_before_update(error)),
        };
        report.compute_seconds = began.elapsed().as_secs_f64();
        let Updated { scale, deferred } = match self.update(lr, left, &mut report) {
            Ok(updated) => updated,
            Err(error) if self.config.update_follows() => return Err(self.give_up(error)),
            Err(error) => return Err(self.give_up_before_update(error)),
        };
        report.seconds = began.elapsed().as_secs_f64();
        [report.upload_bytes, report.download_bytes] = self.lane.take_moved();
        report.device_peak_bytes = self.device_peak_bytes();
        let committing = Instant::now();
        let step = self.step + 1;
        let note = note(&report);
        let words = scale.as_ref().map_or_else(|| note.clone(), |scale| scale.words(&note));
        let words = if self.config.commits_at_saves() {
            let changed = !report.skipped || self.unsaved.as_ref().is_some_and(|unsaved| unsaved.changed);
            self.unsaved = Some(Unsaved { changed, words });
            None
        } else {
            Some(words)
        };
        if let (Some((args, left)), Some(optimizer)) = (deferred, &self.optimizer) {
            self.pending = Some(Pending { step, args, optimizer: Arc::clone(optimizer), left, words });
        } else if let (Some(stored), Some(words)) = (self.home.stored(), words) {
            let committed = if report.skipped {
                stored.commit_unchanged(step, &words)
            } else {
                stored.commit(step, &words)
            };
            committed.map_err(|error| self.give_up(error))?;
            if let Some(timeline) = &self.config.timeline {
                timeline.note(Resource::Commit, committing, format!("step {step}"));
            }
        }
        self.loss_scale = scale;
        self.step = step;
        self.note = note;
        report.commit_seconds = committing.elapsed().as_secs_f64();
        report.seconds = began.elapsed().as_secs_f64();
        self.home.note_step(&report);
        Ok(report)
    }

    /// Most bytes of a device's own memory in use so far; 0 where there is none.
    fn device_peak_bytes(&self) -> u64 {
        if self.lane.unified {
            return 0;
        }
        // All but the arena is taken at the beginning and kept.
        let unused = self.plan.windows.arena_bytes.saturating_sub(self.lane.arena.peak());
        self.plan.memory.total(Tier::Device) - unused as u64
    }

    /// Does what is left of the last step: its update and its commit. Nothing, where they were not deferred. Dropping the engine
    /// does it, too, but cannot say what failed.
    ///
    /// # Errors
    /// A tier failed. The last committed step is then still intact.
    pub fn flush(&mut self) -> Result {
        self.lane.settle();
        let Some(pending) = self.pending.take() else { return self.refresh() };
        let bench = self.bench().expect("only a training engine defers updates");
        let result = pending.run(bench, &self.home, &Gate::default());
        result.map_err(|error| self.give_up(error))
    }

    fn bench(&self) -> Option<Bench<'_>> {
        let Self { runs, kinds, update_slots: slots, plan, pool, park, config, .. } = self;
        let (spec, timeline) = (&plan.spec, config.timeline.as_deref());
        Some(Bench { runs, kinds, slots, spec, pool, park: park.as_ref()?, timeline })
    }

    fn check_batches(&self, batches: &[MicroBatch]) -> Result {
        let limits = self.config.limits;
        if self.optimizer.is_none() {
            return Err(EngineError::Config(
                "this engine was built for frozen weights and cannot train".into(),
            ));
        }
        if batches.len() != limits.micro_batches {
            let message = format!(
                "a step of {} micro-batches was planned, not {}",
                limits.micro_batches,
                batches.len()
            );
            return Err(EngineError::Batch(message));
        }
        batches.iter().try_for_each(|batch| {
            batch.check_as_planned(&limits, &self.inputs)?;
            self.network.check(batch, BatchUse::Loss)
        })
    }

    /// Gives the chunks, in order, that an update beside backward did not come to.
    fn forward_backward(
        &mut self,
        batches: &[MicroBatch],
        inputs: &[Vec<Tensor>],
        lr: f64,
        pending: Option<Pending>,
        report: &mut StepReport,
    ) -> Result<Vec<ChunkAt>> {
        let args = self.step_args(lr, self.loss_scale.map_or(1.0, |current| current.inverse()));
        let speculates = self.speculates();
        let Self {
            config,
            backend,
            network,
            kinds,
            runs,
            optimizer,
            plan,
            lane,
            home,
            weight_slots,
            device_weights,
            device_state,
            park,
            rounds,
            sums,
            signals,
            kept_away,
            packing,
            update_slots,
            pool,
            step,
            loss_scale,
            ..
        } = self;
        let (home, network, lane, kinds, runs) = (&*home, &*network, &*lane, &*kinds, &*runs);
        let Signals::Training(activations) = signals else { unreachable!("checked: this engine trains") };
        let park = park.as_ref().expect("a training engine parks gradients");
        let optimizer = optimizer.as_deref().expect("a training engine has an optimizer");
        let (spec, slots, pool, timeline) = (&plan.spec, &*update_slots, &*pool, config.timeline.as_deref());
        let bench = Bench { runs, kinds, slots, spec, pool, park, timeline };
        let copies = speculates.then_some(&plan.windows.caching);
        let updater = Updater { speculates: copies, ..bench.updater(optimizer, args) };
        let follows = config.update_follows() || speculates;
        let immediate = home.stored().filter(|_| follows).map(|stored| (updater, stored));
        let gate = Gate::default();
        let pass = Pass {
            network,
            backend,
            lane,
            config,
            mode: Mode::Train,
            sequences: batches[0].sequences,
            length: batches[0].length,
            loss_scale: (report.loss_scale.unwrap_or(1.0) / report.loss_terms as f64) as f32,
            suffix: String::new(),
        };
        let (loss_terms, step, may_overflow) = (report.loss_terms, *step + 1, loss_scale.is_some());
        let (rounds, sums, signals) = (*rounds, sums.as_ref(), inputs.iter().map(|_| None).collect());
        let mut training = Training {
            pass,
            inputs,
            activations,
            kept: KeptInStep::new(plan.windows.keeping, kept_away.as_mut(), pool),
            park,
            rounds,
            sums,
            packing: packing.as_mut(),
            signals,
            runs,
            pool,
            step,
            loss_terms,
            may_overflow,
        };
        let state = device_state.as_ref();
        let room = plan.windows.device_room;
        let room = device_weights.take(backend, network, room, state)?;
        let items = rounds.order(network);
        let (slots, mut left) = (weight_slots.as_ref(), Vec::new());
        *device_weights = std::thread::scope(|scope| -> Result<DeviceWeights> {
            let order = Order { items, gate: pending.as_ref().map(|_| &gate), ahead: None, on_demand: &[] };
            if let Some(pending) = &pending {
                pending.open(&gate);
            }
            // Offers its first slots while the update reads its first chunk.
            let fetcher = Fetcher::start(scope, lane, home, kinds, slots, order, room);
            let reads_ahead = immediate.is_none();
            let deferred = pending.map(|pending| defer(scope, pending, bench, home, &gate, reads_ahead));
            let deferred = deferred.transpose()?;
            let mut fetcher = fetcher?;
            left = training.all_rounds(scope, &mut fetcher, deferred, immediate, report)?;
            report.weights_stall_seconds = fetcher.stalled.as_secs_f64();
            training.note_waits(report);
            Ok(fetcher.finish())
        })?;
        device_weights.let_go(state);
        Ok(left)
    }

    /// Updates what backward has not, leaves that for later, or skips the step if its scaled gradient overflowed. `left` is what an
    /// update beside backward did not come to.
    fn update(&mut self, lr: f64, left: Vec<ChunkAt>, report: &mut StepReport) -> Result<Updated> {
        let began = Instant::now();
        let training = self.config.training.as_ref().expect("a training engine");
        let park = self.park.as_ref().expect("a training engine parks gradients");
        park.land_all(&self.pool)?;
        let norm = park.norm_squared(&self.lane)?.norm();
        if let (Err(_), Some(_), Some(error)) =
            (&norm, self.loss_scale, self.overflow_without_end(report.loss))
        {
            return Err(error);
        }
        let scale = match self.loss_scale {
            Some(scale) => Some(scale.after(self.step + 1, self.step, norm.is_err())?),
            None => None,
        };
        report.grad_norm = match (norm, self.loss_scale) {
            (Ok(norm), current) => norm / current.map_or(1.0, |current| current.scale()),
            (Err(_), None) => return Err(self.norm_not_finite()),
            (Err(_), Some(_)) => {
                park.settle()?;
                park.clear();
                self.validate(false, left, report)?;
                self.unclipped = 0;
                report.skipped = true;
                report.grad_norm = f64::NAN;
                return Ok(Updated { scale, deferred: None });
            }
        };
        let mut deferred = None;
        let clip = training.clip.map_or(1.0, |max| clip_coefficient(report.grad_norm, max));
        let args = self.step_args(lr, clip * self.loss_scale.map_or(1.0, |current| current.inverse()));
        self.update_on_device(&args)?;
        if training.waits_for_norm() || self.home.disk().is_none() {
            if let Some(left) = self.validate(clip == 1.0, left, report)? {
                deferred = (!left.is_empty()).then_some((args, Some(left)));
            } else if self.config.overrides.overlap() && self.is_deferrable() {
                deferred = Some((args, None));
            } else {
                let optimizer = self.optimizer.as_deref().expect("a training engine has an optimizer");
                let bench = self.bench().expect("a training engine parks gradients");
                let updater = bench.updater(optimizer, args);
                let stalled = updater.run(&self.home, park, Items::all(updater.spec, park))?;
                report.state_stall_seconds += stalled.as_secs_f64();
            }
        } else if !left.is_empty() {
            deferred = Some((args, Some(left)));
        }
        self.unclipped = if clip == 1.0 { self.unclipped + 1 } else { 0 };
        self.device_weights.outdate();
        report.update_seconds = began.elapsed().as_secs_f64();
        Ok(Updated { scale, deferred })
    }

    /// Gives the device the update of the state that it has.
    fn update_on_device(&self, args: &StepArgs) -> Result {
        let Self { device_state: Some(state), device_optimizer: Some(optimizer), park: Some(park), .. } =
            self
        else {
            return Ok(());
        };
        let gradients = park.on_device.as_ref().expect("gradients of state on the device are there, too");
        state.update(optimizer, args, &self.runs, &self.kinds, gradients)
    }

    /// Whether something else than the update computes while it runs, or waits for the disk.
    fn is_deferrable(&self) -> bool {
        self.home.disk().is_some() || !self.lane.unified
    }

    /// Makes the optimizer one with these betas, or the configured ones.
    fn set_betas(&mut self, betas: Option<(f64, f64)>) -> Result {
        if betas == self.betas {
            return Ok(());
        }
        let (Some(training), Some(current)) = (&self.config.training, &self.optimizer) else { return Ok(()) };
        let configured = training.optimizer;
        let algorithm = betas.map_or(configured, |(beta1, beta2)| configured.with_betas(beta1, beta2));
        let layout = *current.layout();
        self.optimizer = Some(optimizer(algorithm, layout)?.into());
        if let (Some(on_device), Some(kernels)) = (&mut self.device_optimizer, &self.backend.updates) {
            *on_device = DeviceOptimizer::new(kernels, algorithm, layout)?;
        }
        self.betas = betas;
        Ok(())
    }

    fn step_args(&self, lr: f64, grad_scale: f32) -> StepArgs {
        let weight_decay = self.config.training.as_ref().map_or(0.0, |t| t.optimizer.weight_decay());
        StepArgs { step: self.updates() + 1, lr, grad_scale, weight_decay }
    }
}

impl<'a> Training<'a> {
    /// Forward and backward of all micro-batches, beside what the last step has `deferred`. Gives what
    /// [`backward_and_update`](Self::backward_and_update) does of the last round.
    fn all_rounds<'scope, 'e>(
        &mut self,
        scope: &'scope Scope<'scope, 'e>,
        fetcher: &mut Fetcher<'_>,
        mut deferred: Option<ScopedJoinHandle<'scope, Result>>,
        mut immediate: Option<(Updater<'e>, &'e Stored)>,
        report: &mut StepReport,
    ) -> Result<Vec<ChunkAt>>
    where
        'a: 'e,
    {
        let timeline = self.pass.config.timeline.as_deref();
        let mut waited = Stopwatch::default();
        let mut rounds = || -> Result<Vec<ChunkAt>> {
            let mut loss = self.pass.lane.tensor(&zero_loss())?;
            let mut left = Vec::new();
            for round in self.rounds.all() {
                let forward = self.forward(fetcher, &mut loss, &round);
                // Two updates at once would mix two steps. One alone may go on: gradients are parked from here on, and those of the
                // last step were all taken before the last group's weights could be fetched.
                if immediate.is_some() {
                    join_last(&mut deferred, &mut waited, timeline)?;
                }
                forward?;
                let update = immediate.take_if(|_| self.rounds.is_last(&round));
                (report.loss, loss, left) =
                    self.backward_and_update(scope, fetcher, loss, &round, update, &mut waited)?;
            }
            Ok(left)
        };
        let result = rounds();
        // Its error is the cause of the other, if both failed.
        join_last(&mut deferred, &mut waited, timeline)?;
        report.state_stall_seconds = waited.0.as_secs_f64();
        result
    }

    /// Forward of a round through all blocks but the last, whose forward is part of its backward.
    fn forward(&mut self, fetcher: &mut Fetcher<'_>, loss: &mut Tensor, round: &Range<usize>) -> Result {
        for block in 0..self.pass.network.last() {
            let ready = self.pass.fetch(fetcher, block)?;
            let began = Instant::now();
            let places = packed::places(&mut self.packing, &self.pass, block, round.len());
            let weights = self.pass.weights(block, &ready, &places);
            for (at, m) in round.clone().enumerate() {
                let x = match block.checked_sub(1) {
                    Some(b) => Some(self.pass.lane.load(self.activations.take(b, at), self.pass.signal(b))?),
                    None => None,
                };
                let spec = self.pass.signal(block);
                let mut y = self.pass.lane.target(self.activations.slot(spec.bytes()), spec)?;
                let mut cx = self.pass.context(&self.inputs[m], loss);
                cx.kept = self.kept.ask(block);
                cx.lasting = self.park.turns.of(block).unwrap_or(&self.pass.lane.arena);
                let x_view = x.as_ref().map(crate::lane::Loaded::view);
                self.pass.network.blocks[block].forward(&mut cx, &weights, x_view, y.view_mut())?;
                let kept = cx.kept;
                // What is waited for comes down first.
                let y = self.pass.lane.pass_and_keep(y)?;
                self.kept.hold((block, m, at), kept, self.pass.lane)?;
                if let (Some(b), Some(x)) = (block.checked_sub(1), x) {
                    self.activations.checkpoint(b, at, x.into_host()?);
                }
                self.activations.keep(block, at, y)?;
            }
            drop(weights);
            self.pass.release(fetcher, ready)?;
            self.pass.computed(began, "forward", block)?;
        }
        Ok(())
    }

    /// Backward of a round, and beside it the update of what `immediate` may update. Gives what [`backward`](Self::backward) does,
    /// and the chunks, in order, that the update did not come to.
    fn backward_and_update<'scope, 'e>(
        &mut self,
        scope: &'scope Scope<'scope, 'e>,
        fetcher: &mut Fetcher<'_>,
        loss: Tensor,
        round: &Range<usize>,
        immediate: Option<(Updater<'e>, &'e Stored)>,
        waited: &mut Stopwatch,
    ) -> Result<(f64, Tensor, Vec<ChunkAt>)>
    where
        'a: 'e,
    {
        let mut following = None;
        let mut update = match immediate {
            None => Update::Later,
            Some((updater, stored)) if !self.pass.config.overrides.overlap() => Update::Here(updater, stored),
            Some((updater, stored)) => {
                let (sender, chunks) = unbounded();
                let follower = Follower::new(updater.spec, sender, updater.speculates);
                following = Some((follow(scope, updater, stored, self.park, chunks.clone())?, chunks));
                Update::There(follower)
            }
        };
        // The thread that is waited for, here or by a panic, may need the memory of what is still on its way down.
        let ending = following.is_some().then(|| self.park.ending());
        let result = self.backward(fetcher, loss, round, &mut update, waited);
        let result = match (&ending, result) {
            (Some(_), Ok(ended)) => self.park.land_all(self.pool).map(|()| ended),
            (_, result) => result,
        };
        drop(ending);
        let mut left = match update {
            Update::There(follower) => follower.end().collect(),
            Update::Later | Update::Here(..) => Vec::new(),
        };
        if let Some((thread, chunks)) = following {
            left.extend(chunks.try_iter());
            left.sort_unstable();
            waited.time(|| join(thread))?;
        }
        let (mean, loss) = result?;
        Ok((mean, loss, left))
    }

    /// Backward of a round through all blocks but those that wait for a later one. Gives the mean loss, which only the last round
    /// knows, and the tensor for the next round's.
    fn backward(
        &mut self,
        fetcher: &mut Fetcher<'_>,
        loss: Tensor,
        round: &Range<usize>,
        update: &mut Update<'_>,
        waited: &mut Stopwatch,
    ) -> Result<(f64, Tensor)> {
        let network = self.pass.network;
        let is_last = self.rounds.is_last(round);
        let (mut loss, mut mean) = (loss, f64::NAN);
        self.kept.turn_round()?;
        // What the round before sent last had all of forward, and takes no memory from backward.
        self.sums.map_or(Ok(()), |sums| sums.land_all(self.pool))?;
        for block in (0..=network.last()).rev() {
            if self.rounds.waits(block) && !is_last {
                continue;
            }
            let ready = self.pass.fetch(fetcher, block)?;
            let began = Instant::now();
            let groups = network.groups_of(block);
            let parts = self.leaving_parts(block);
            let params = |group: usize| params_behind(network, block, &parts, group);
            let mut accumulators = Vec::with_capacity(groups.len());
            for &group in &groups {
                let bytes = Accumulator::bytes(network, group, &params(group));
                accumulators.push(self.pass.lane.arena.alloc(bytes)?);
            }
            // Goes on from what the rounds before added, or an earlier use of the group.
            let before = self.sums.filter(|_| !self.rounds.waits(block)).unwrap_or(self.park);
            let begin = |(&group, mut acc): (&usize, Region)| {
                let is_sum = before.begin(self.pass.backend, self.pass.lane, group, &mut acc, self.pool)?;
                Ok(Accumulator::new(network, group, params(group), acc, is_sum))
            };
            let accumulators: Result<Vec<_>> = groups.iter().zip(accumulators).map(begin).collect();
            let mut accumulators = accumulators?;
            let mut leaving = self.leaving(block, parts);
            self.block_backward(block, &ready, (&groups, &mut accumulators), &mut leaving, &mut loss, round)?;
            for (&group, acc) in groups.iter().zip(&mut accumulators) {
                acc.complete(self.pass.backend, network, group)?;
            }
            self.pass.release(fetcher, ready)?;
            if block == network.last() && is_last {
                // Before the first update of the step: a loss that is not finite must not reach the state.
                mean = self.read_loss(loss)?;
                loss = self.pass.lane.tensor(&zero_loss())?;
            }
            self.park_all(block, (&groups, &mut accumulators), leaving, (!is_last).then_some(before))?;
            drop(accumulators);
            self.pass.computed(began, "backward", block)?;
            // The update of what stays on the device waits for the end of backward.
            if is_last && groups.contains(&block) && block < self.park.groups_of_host() {
                match update {
                    Update::Later => {}
                    Update::Here(updater, stored) => {
                        self.park.land_all(self.pool)?;
                        let items = Items::of_group(updater.spec, block).collect();
                        waited.0 += updater.stream(stored, self.park, &mut Items::Known(items))?;
                    }
                    Update::There(follower) => {
                        // As planned: what speculates has the plan of an update that waits.
                        if follower.speculates.is_none() {
                            self.park.land_all(self.pool)?;
                        }
                        follower.complete(block, self.park);
                    }
                }
            }
        }
        Ok((mean, loss))
    }

    /// The parts of a block whose gradients leave before its backward ends.
    fn leaving_parts(&self, block: usize) -> Vec<Range<usize>> {
        // Those of state on the device stay there.
        let comes = block < self.park.groups_of_host();
        if comes { parts_of(self.pass.network, block, &self.rounds) } else { Vec::new() }
    }

    /// Who takes them.
    fn leaving(&self, block: usize, parts: Vec<Range<usize>>) -> Option<Leaving<'a>> {
        let Pass { network, backend, lane, .. } = self.pass;
        (!parts.is_empty()).then(|| Leaving {
            park: self.park,
            network,
            to: Destination { backend, lane, last_use: true, pool: self.pool },
            filling: Filling::of(block),
            frozen: self.runs.frozen(block).collect(),
            parts: parts.into_iter(),
        })
    }

    fn block_backward(
        &mut self,
        block: usize,
        ready: &[Ready],
        (groups, accumulators): (&[usize], &mut [Accumulator]),
        leaving: &mut Option<Leaving<'_>>,
        loss: &mut Tensor,
        round: &Range<usize>,
    ) -> Result {
        let (network, lane) = (self.pass.network, self.pass.lane);
        let places = packed::places(&mut self.packing, &self.pass, block, round.len());
        let weights = self.pass.weights(block, ready, &places);
        for (at, m) in self.rounds.backward_of(block, round).enumerate() {
            let below = block.checked_sub(1).map(|b| self.pass.signal(b));
            let x = match (block.checked_sub(1), &below) {
                (Some(b), Some(spec)) => Some(lane.load(self.activations.recall(b, at)?, spec.clone())?),
                _ => None,
            };
            let dy = match self.signals[m].take() {
                Some(signal) => Some(lane.load(signal, self.pass.signal(block))?),
                None => None,
            };
            let mut dx = match below {
                Some(spec) => Some(lane.target(self.activations.slot(spec.bytes()), spec)?),
                None => None,
            };
            let kept = self.kept.take(block, m, &self.pass)?;
            let kernels = &self.pass.backend.kernels;
            let parts = leaving.as_mut().map(|leaving| leaving as &mut dyn Parts);
            let mut gradients = gradients_of(kernels, network, block, groups, accumulators, parts);
            let mut cx = self.pass.context(&self.inputs[m], loss);
            cx.kept = kept;
            network.blocks[block].backward(
                &mut cx,
                &weights,
                x.as_ref().map(crate::lane::Loaded::view),
                dy.as_ref().map(crate::lane::Loaded::view),
                dx.as_mut().map(crate::lane::Target::view_mut),
                &mut gradients,
            )?;
            drop((x, dy));
            self.kept.bring_next(lane)?;
            if let Some(dx) = dx {
                let waits = self.rounds.waits(block - 1);
                self.signals[m] = Some(if waits { lane.pass_down(dx)? } else { lane.pass(dx)? });
            }
        }
        Ok(())
    }

    /// Parks the gradients of a block's groups: for the update, or as what is summed so far in `sums`.
    fn park_all(
        &self,
        block: usize,
        (groups, accumulators): (&[usize], &mut [Accumulator]),
        mut leaving: Option<Leaving<'_>>,
        sums: Option<&GradientPark>,
    ) -> Result {
        let (began, waited) = (Instant::now(), self.waited_for_room());
        let Pass { backend, lane, .. } = self.pass;
        for (&group, acc) in groups.iter().zip(accumulators) {
            if let Some(sums) = sums {
                sums.park(backend, lane, group, &acc.region, false, self.pool)?;
                continue;
            }
            self.forget_frozen(group, acc)?;
            match leaving.take_if(|_| group == block) {
                Some(leaving) => leaving.end(acc)?,
                None => self.park.park(backend, lane, group, &acc.region, group == block, self.pool)?,
            }
        }
        self.pass.note_wait(began, self.waited_for_room() - waited, "room for gradients of", block);
        Ok(())
    }

    /// How long backward has waited for updates or the disk to take earlier gradients.
    fn waited_for_room(&self) -> Duration {
        self.parks().map(GradientPark::waited).sum()
    }

    /// What the whole step has waited for besides weights.
    fn note_waits(&mut self, report: &mut StepReport) {
        report.activations_stall_seconds = self.activations.take_waited() + self.kept.take_waited();
        report.gradients_stall_seconds = self.parks().map(GradientPark::take_waited).sum();
    }

    fn parks(&self) -> impl Iterator<Item = &GradientPark> {
        std::iter::once(self.park).chain(self.sums)
    }

    /// Frozen parameters have no gradient, so that the norm is that of what is trained.
    fn forget_frozen(&self, group: usize, acc: &mut Accumulator) -> Result {
        self.runs.frozen(group).try_for_each(|frozen| acc.clear(self.pass.backend, &frozen))
    }

    fn read_loss(&self, loss: Tensor) -> Result<f64> {
        let bytes = self.pass.lane.read(loss)?;
        let sum = f64::from_le_bytes(bytes.try_into().expect("the loss is one f64"));
        let mean = sum / self.loss_terms as f64;
        if mean.is_finite() || self.may_overflow {
            Ok(mean)
        } else {
            Err(not_finite("loss", self.step, self.step == 1, Some(self.step - 1)))
        }
    }
}

/// Waits for the update of the step before, if nobody has.
fn join_last(
    thread: &mut Option<ScopedJoinHandle<'_, Result>>,
    waited: &mut Stopwatch,
    timeline: Option<&Timeline>,
) -> Result {
    let Some(thread) = thread.take() else { return Ok(()) };
    let waiting = Instant::now();
    waited.time(|| join(thread))?;
    if let Some(timeline) = timeline {
        timeline.note(Resource::Wait, waiting, "the last update".to_owned());
    }
    Ok(())
}

pub(crate) fn zero_loss() -> HostTensor {
    HostTensor { dtype: DType::F64, dims: vec![1], bytes: vec![0; 8] }
}
