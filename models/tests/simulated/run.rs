//! Lives through a setting and checks, all the way, what must hold.

use crate::setting::{Life, STEPS, Setting, Training, Trouble};
use crate::support::{Setup, hash_of, weights_hash};
use crate::world::{Liar, Lie, Mood, Pace, World};
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use terrace_aio::engine::SimEngine;
use terrace_aio::layer::{Action, FaultConfig, FaultLayer, ThrottleConfig, TimedLayer};
use terrace_aio::{IoEngine, VirtualClock};
use terrace_device::sim::{SimDevice, SimDeviceConfig};
use terrace_tiers::{TRAINING_SCRATCH, Tier, TierError};
use terrace_zero::{Durability, Engine, EngineError, Exporting, Placement, StepReport, WeightReader};

/// What is broken on purpose.
#[derive(Debug, Clone, Copy, Default)]
pub struct Broken {
    /// What the disk engine says that is not so.
    pub lie: Option<Lie>,
    /// Streams forget one wait in this many.
    pub lost_wait_one_in: u32,
}

/// What came about in a seed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Events {
    /// Requests that failed.
    pub faults: u64,
    /// Power cuts before the run was over.
    pub cuts: u64,
    /// Of the two, those that left no state.
    pub beginnings: u64,
    /// Times that state which is kept once was not whole, and was refused.
    pub losses: u64,
    /// Times that state was taken up again.
    pub resumes: u64,
    /// Times that a copy of its header or layout could not be read, and the other was.
    pub recoveries: u64,
    /// Times that it was newer than anybody had been told.
    pub untold: u64,
    /// Steps trained.
    pub steps: u64,
    /// Of them, those whose update ran before the norm was known, and was kept.
    pub kept: u64,
    /// Those in which it was in vain.
    pub in_vain: u64,
    /// Engines that went on after a request that failed.
    pub persevered: u64,
    /// Steps whose weights were read beside the next ones.
    pub exported: u64,
    /// Those that were given up with their step.
    pub unexported: u64,
}

/// What a training gives, whatever is done to it.
#[derive(Debug, PartialEq, Eq)]
pub struct Expected {
    /// Loss, norm and whether it was skipped, for every step.
    pub steps: Vec<(u64, u64, bool)>,
    /// The loss of the same batch before the first step and after every one.
    evaluated: Vec<u64>,
    /// Of all weights, before the first step and after every one.
    hashes: Vec<u64>,
}

/// How a life ended.
#[derive(Debug)]
struct Ended {
    /// The last step that is known to be on disk.
    known: Option<u64>,
    /// The last step that may be.
    possible: Option<u64>,
    error: Option<EngineError>,
    /// What says how the state is laid out was read from another copy, which the engine says.
    is_recovered: bool,
    /// The engine told of a failure before, and went on.
    has_told: bool,
}

impl Ended {
    fn well(known: Option<u64>, possible: Option<u64>) -> Self {
        Self { known, possible, error: None, is_recovered: false, has_told: false }
    }

    fn with(known: Option<u64>, possible: Option<u64>, error: EngineError) -> Self {
        Self { error: Some(error), ..Self::well(known, possible) }
    }
}

impl Expected {
    /// What the plain run of a training gives.
    pub fn of(training: Training) -> Arc<Self> {
        type Results = HashMap<Training, Arc<OnceLock<Arc<Expected>>>>;
        static KNOWN: OnceLock<Mutex<Results>> = OnceLock::new();
        let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let place = Arc::clone(known.entry(training).or_default());
        drop(known);
        Arc::clone(place.get_or_init(|| Arc::new(Self::compute(training))))
    }

    fn compute(training: Training) -> Self {
        let setup = training.plain();
        let mut engine = setup.create();
        let mut expected = Self { steps: Vec::new(), evaluated: Vec::new(), hashes: Vec::new() };
        loop {
            let batch = &setup.batches(0)[0];
            let evaluation = engine.evaluate(batch).unwrap_or_else(|e| panic!("evaluating plainly: {e}"));
            expected.evaluated.push(evaluation.loss_sum.to_bits());
            expected.hashes.push(weights_hash(&mut engine));
            if engine.step() == STEPS {
                return expected;
            }
            let report = engine.train_step(&setup.batches(engine.step()), training.rates(engine.step()));
            expected.steps.push(numbers(&report.unwrap_or_else(|e| panic!("training plainly: {e}"))));
        }
    }
}

fn numbers(report: &StepReport) -> (u64, u64, bool) {
    (report.loss.to_bits(), report.grad_norm.to_bits(), report.skipped)
}

/// Lives through all of it.
///
/// # Panics
/// If anything is not as it must be.
pub fn run(setting: &Setting, broken: Broken) -> Events {
    let expected = Expected::of(setting.training);
    let mut events = Events::default();
    let mut disk = Arc::new(SimEngine::new(setting.disk.clone()));
    let mut stored = None;
    for (number, life) in setting.lives.iter().enumerate() {
        let (world, clock) = match life.mood {
            Mood::Timed(pace) => timed(&disk, pace),
            mood => (Arc::new(World::new(&disk, mood, setting.seed ^ number as u64)) as _, None),
        };
        let io: Arc<dyn IoEngine> = match broken.lie {
            Some(lie) => Arc::new(Liar::new(world, lie, setting.seed)),
            None => world,
        };
        let faults = Arc::new(FaultLayer::new(io, FaultConfig::default()));
        match life.trouble {
            Trouble::Fail { action, nth, kind } => faults.fail_nth(action, nth, kind),
            Trouble::Cut { after, .. } => disk.power_cut_after(after),
            Trouble::None | Trouble::Stop { .. } => {}
        }
        let mut run = Run {
            setting,
            life,
            clock,
            expected: &expected,
            broken,
            events: &mut events,
            is_touched: false,
            faults: &faults,
            abandoned_failures: 0,
            exports: Vec::new(),
            beside: None,
            failed: None,
            reading: None,
            has_trained: false,
        };
        let ended = run.live(Arc::clone(&faults) as _, stored);
        let (is_touched, abandoned) = (run.is_touched, run.abandoned_failures);
        check_error(life.trouble, &ended, &disk, faults.injected(), abandoned);
        events.faults += faults.injected();
        // Whatever still happens on this disk happens now.
        drop(faults);
        if let Trouble::Cut { image, .. } = life.trouble {
            events.cuts += u64::from(disk.is_cut());
            disk = Arc::new(disk.crash(image));
        }
        if number + 1 < setting.lives.len() {
            stored = find(setting, &disk, &ended, is_touched, &mut events);
        }
    }
    events
}

/// A clock, and the seconds that an operation of a product takes of it.
type Clock = (Arc<VirtualClock>, f64);

/// A disk in virtual time, and the clock with the pace of products.
fn timed(disk: &Arc<SimEngine>, pace: Pace) -> (Arc<dyn IoEngine>, Option<Clock>) {
    let Pace { read_bytes_per_second, write_bytes_per_second, is_shared, operation } = pace;
    let config = ThrottleConfig {
        read_bytes_per_second,
        write_bytes_per_second,
        is_shared,
        ..ThrottleConfig::default()
    };
    let clock = Arc::new(VirtualClock::new().expect("the system says what threads do"));
    (Arc::new(TimedLayer::new(Arc::clone(disk) as _, Arc::clone(&clock), config)), Some((clock, operation)))
}

/// Says what is wrong with the error that a life ended with, if any. Of the failures `injected`, those that were `abandoned` may have
/// gone unnoticed.
fn check_error(trouble: Trouble, ended: &Ended, disk: &SimEngine, injected: u64, abandoned: u64) {
    let text = ended.error.as_ref().map(ToString::to_string);
    let is_due = match trouble {
        Trouble::None | Trouble::Stop { .. } => false,
        Trouble::Fail { .. } => injected > 0,
        Trouble::Cut { .. } => disk.is_cut(),
    };
    let Some(text) = text else {
        // A cut can come when all is done, between the last commit and the end.
        let is_noticed = ended.is_recovered
            || ended.has_told
            || abandoned == injected
            || matches!(trouble, Trouble::Cut { .. });
        assert!(!is_due || is_noticed, "nobody noticed that a request failed: {ended:?}");
        return;
    };
    assert!(is_due, "an error without a cause: {text}");
    if ended.has_told {
        let is_same = matches!(
            ended.error,
            Some(
                EngineError::Lost { .. }
                    | EngineError::Tier(TierError::Uncertain { .. } | TierError::Changing { .. })
            )
        );
        return assert!(is_same, "a second error where one request failed: {text}");
    }
    check_words(trouble, &text);
}

/// Says what is wrong with the words of an error, if anything.
fn check_words(trouble: Trouble, text: &str) {
    let reason = match trouble {
        Trouble::Fail { kind: terrace_aio::IoErrorKind::NoSpace, .. } => "No space left",
        Trouble::Fail { .. } => "Input/output error",
        _ => "the simulated power is gone",
    };
    assert!(text.contains(reason), "the error says what happened: {text}");
    assert!(text.contains("/sim/disk") && text.contains(".bin"), "the error names the file: {text}");
}

/// The step that is on the disk; what a life left there must be whole. State that is kept once need not be if the life may have
/// touched it; then it says so, and the next life starts over.
fn find(
    setting: &Setting,
    disk: &Arc<SimEngine>,
    ended: &Ended,
    is_touched: bool,
    events: &mut Events,
) -> Option<u64> {
    let io: Arc<dyn IoEngine> = Arc::new(World::new(disk, Mood::Eager, 0));
    match Engine::stored(&io, &setting.disks) {
        Ok(state) => {
            let is_possible = [ended.known, ended.possible].contains(&Some(state.step));
            assert!(is_possible, "found step {}, expected {ended:?}", state.step);
            events.untold += u64::from(Some(state.step) != ended.known);
            Some(state.step)
        }
        Err(EngineError::Tier(TierError::NoState { .. })) if ended.known.is_none() => {
            events.beginnings += u64::from(ended.error.is_some());
            None
        }
        Err(EngineError::Tier(TierError::Changing { step, .. })) if setting.once => {
            assert!(is_touched, "the state is refused, and nothing was written, {ended:?}");
            let is_possible = [ended.known, ended.possible].contains(&Some(step));
            assert!(is_possible, "step {step} was last whole, {ended:?}");
            start_over(setting, &io);
            events.losses += 1;
            None
        }
        Err(error) => panic!("the state cannot be opened, {ended:?}: {error}"),
    }
}

/// Nothing is made over state that is refused; whoever wants to start over removes it.
fn start_over(setting: &Setting, io: &Arc<dyn IoEngine>) {
    let calm = Life { trouble: Trouble::None, placement: Placement::Disk, ..setting.lives[0].clone() };
    let setup = Setup { io: Some(Arc::clone(io)), ..setting.setup(&calm) };
    let refused = setup.try_create().map(drop).expect_err("it is not overwritten").to_string();
    assert!(refused.contains("/sim/disk0") && refused.contains("Durability::"), "{refused}");
    for dir in &setting.disks {
        for file in ["manifest.bin", "state.bin"] {
            let path = dir.join(file);
            if io.exists(&path) {
                io.remove(&path).expect("a simulated disk removes a file");
            }
        }
    }
}

/// One life.
struct Run<'a> {
    setting: &'a Setting,
    life: &'a Life,
    clock: Option<Clock>,
    expected: &'a Expected,
    broken: Broken,
    events: &'a mut Events,
    /// Something may have been written to the state since it was last known to be whole.
    is_touched: bool,
    faults: &'a FaultLayer,
    /// Failures that nobody may have asked about: of writes in steps whose update was in vain, which were abandoned, and of reads
    /// whether a file that an earlier life left behind is scratch, which is left alone where that cannot be read.
    abandoned_failures: u64,
    /// Hashes of weights, with their steps.
    exports: Vec<(u64, Exporting<Result<u64, EngineError>>)>,
    /// The step of state in memory that is being saved beside those that follow.
    beside: Option<u64>,
    /// What was possible after the failure that the engine went on from.
    failed: Option<Option<u64>>,
    /// The step whose weights could not be read.
    reading: Option<u64>,
    /// A step was trained.
    has_trained: bool,
}

impl Run<'_> {
    fn live(&mut self, io: Arc<dyn IoEngine>, stored: Option<u64>) -> Ended {
        let lost_wait_one_in = self.broken.lost_wait_one_in;
        let card =
            self.life.card.map(|config| SimDevice::new(SimDeviceConfig { lost_wait_one_in, ..config }));
        let mut setup = self.setting.setup(self.life);
        setup.io = Some(io);
        setup.clock.clone_from(&self.clock);
        if let Some(card) = &card {
            setup.device = Some(Arc::new(card.clone()));
        }
        if self.life.is_tight {
            setup = setup.tight();
        } else if let Some(eighths) = self.life.host_eighths {
            setup = setup.between(Tier::Host, eighths);
        } else if let Some(eighths) = self.life.card_eighths {
            setup = setup.between(Tier::Device, eighths);
        }
        let leaves_scratch = self.is_scratch_left(&setup);
        let engine = if stored.is_some() { setup.resume() } else { setup.try_create() };
        let mut engine = match engine {
            Ok(engine) => engine,
            // A creation may have committed the first step without having learned of it.
            Err(error) => return Ended::with(stored, stored.or(Some(0)), error),
        };
        let is_recovered = !engine.recoveries().is_empty();
        assert!(!is_recovered || matches!(self.life.trouble, Trouble::Fail { .. }), "nothing is damaged");
        self.events.recoveries += u64::from(is_recovered);
        if leaves_scratch {
            self.abandoned_failures += self.faults.injected();
        }
        assert_eq!(engine.step(), stored.unwrap_or(0), "the step of a new engine");
        let noted = engine.noted();
        assert!(noted.is_empty() || noted == note(engine.step()), "the note of step {}", engine.step());
        self.events.resumes += u64::from(stored.is_some());
        let mut ended = self.train(&setup, &mut engine, stored);
        if leaves_scratch && setup.placement != Placement::Disk {
            // Its first save looked for it.
            self.abandoned_failures = self.faults.injected();
        }
        check_memory(&setup, &engine, card.as_ref());
        match self.life.trouble {
            Trouble::Stop { is_lost: true, .. } => lose(engine),
            _ => drop(engine),
        }
        ended.is_recovered = is_recovered;
        self.end_exports(&mut ended);
        ended
    }

    /// Whether a life before this one left scratch behind.
    fn is_scratch_left(&self, setup: &Setup) -> bool {
        let paths = setup.disks.iter().flat_map(|dir| TRAINING_SCRATCH.map(|name| dir.join(name)));
        paths.into_iter().any(|path| self.faults.exists(&path))
    }

    /// Trains until the end or the trouble.
    fn train(&mut self, setup: &Setup, engine: &mut Engine, stored: Option<u64>) -> Ended {
        let on_disk = setup.placement == Placement::Disk;
        let mut saved = if on_disk { Some(engine.step()) } else { stored };
        loop {
            let Some(ended) = self.go_on(setup, engine, stored, &mut saved) else { continue };
            let Some(ended) = self.persevere(engine, ended, &mut saved) else { continue };
            return Ended { has_told: self.failed.is_some(), ..ended };
        }
    }

    /// One step and what is to be done before it; how it ended, if it did.
    fn go_on(
        &mut self,
        setup: &Setup,
        engine: &mut Engine,
        stored: Option<u64>,
        saved: &mut Option<u64>,
    ) -> Option<Ended> {
        let on_disk = setup.placement == Placement::Disk;
        let waits_for_saves = setup.durability != Durability::Step;
        let step = engine.step();
        if let Some(ended) = self.after_step(setup, engine, saved) {
            return Some(ended);
        }
        if let Trouble::Stop { step: stop, is_lost } = self.life.trouble
            && step >= stop
        {
            // An engine that ends well does what is left of the last step; one that is lost does not.
            let known = match is_lost {
                _ if waits_for_saves => *saved,
                true if on_disk => Some(step.saturating_sub(1).max(stored.unwrap_or(0))),
                false if on_disk => Some(step),
                _ => *saved,
            };
            let is_step = on_disk && !waits_for_saves;
            return Some(Ended::well(known, if is_step { Some(step) } else { self.beside.or(*saved) }));
        }
        if step == STEPS {
            return Some(self.end(engine, on_disk, waits_for_saves, saved));
        }
        self.is_touched |= on_disk;
        let failures = self.faults.injected();
        let rates = self.setting.training.rates(step);
        match engine.train_step_noting(&setup.batches(step), rates, |report| note(report.step)) {
            Ok(report) => {
                if report.speculated == Some(false) && self.is_write_failing() {
                    self.abandoned_failures += self.faults.injected() - failures;
                }
                let expected = self.expected.steps[step as usize];
                assert_eq!(numbers(&report), expected, "loss and norm of step {}", step + 1);
                self.has_trained = true;
                self.events.steps += 1;
                self.events.kept += u64::from(report.speculated == Some(true));
                self.events.in_vain += u64::from(report.speculated == Some(false));
                None
            }
            Err(error) if on_disk => {
                let under_way = engine.step() + u64::from(!waits_for_saves);
                Some(self.failed(Some(engine.step()), error, under_way))
            }
            Err(error) => Some(Ended::with(*saved, self.beside.or(*saved), error)),
        }
    }

    /// After the last step.
    fn end(
        &mut self,
        engine: &mut Engine,
        on_disk: bool,
        waits_for_saves: bool,
        saved: &mut Option<u64>,
    ) -> Ended {
        if !on_disk {
            let error = self.settle(engine, saved).err();
            self.check_weights(engine);
            return Ended { error, ..Ended::well(*saved, self.beside.or(*saved)) };
        }
        // Where steps do not wait for it, a save is a flush.
        match engine.save() {
            Ok(()) => {
                self.is_touched = false;
                assert!(!self.has_trained || engine.noted() == note(STEPS), "the note of the last step");
                self.check_weights(engine);
                Ended::well(Some(STEPS), Some(STEPS))
            }
            Err(error) => {
                let under_way = if waits_for_saves { STEPS } else { engine.step() + 1 };
                self.failed(Some(engine.step()), error, under_way)
            }
        }
    }

    /// After a request that failed the engine may go on, from the step that it says. Gives how it ended if it does not.
    fn persevere(&mut self, engine: &mut Engine, mut ended: Ended, saved: &mut Option<u64>) -> Option<Ended> {
        let Some(error) = &ended.error else { return Some(ended) };
        if let Some(possible) = self.failed {
            // Nothing is written where it is not known which commit is the last.
            if matches!(error, EngineError::Tier(TierError::Uncertain { .. })) {
                ended.possible = possible;
            }
            return Some(ended);
        }
        let is_lost = matches!(error, EngineError::Lost { .. });
        if is_lost || !self.life.perseveres || !matches!(self.life.trouble, Trouble::Fail { .. }) {
            return Some(ended);
        }
        check_words(self.life.trouble, &error.to_string());
        self.failed = Some(ended.possible);
        self.events.persevered += 1;
        // What could not be read may be what could not be written; then a save says so, too, and is one of the step if not.
        if self.reading.take() == Some(engine.step()) && engine.save().is_ok() {
            (*saved, self.beside, self.is_touched) = (Some(engine.step()), None, false);
            return None;
        }
        // State that is kept once may be of no step.
        if let Some(durable) = engine.durable_step() {
            let is_known = [ended.known, ended.possible].contains(&Some(durable));
            assert!(is_known, "step {durable} is said to be durable, {ended:?}");
            *saved = Some(durable);
        }
        self.beside = None;
        None
    }

    /// What was exported must be the weights of its step, or say why not.
    fn end_exports(&mut self, ended: &mut Ended) {
        for (step, export) in std::mem::take(&mut self.exports) {
            match export.wait() {
                Some(Ok(hash)) => {
                    assert_eq!(
                        hash, self.expected.hashes[step as usize],
                        "the exported weights of step {step}"
                    );
                    self.events.exported += 1;
                }
                Some(Err(error)) => {
                    ended.error.get_or_insert(error);
                }
                None => {
                    let is_lost = matches!(self.life.trouble, Trouble::Stop { is_lost: true, .. });
                    let is_told = ended.error.is_some() || ended.has_told;
                    assert!(is_lost || is_told, "the weights of step {step} were not exported");
                    self.events.unexported += 1;
                }
            }
        }
    }

    /// State on disk after an error: what is known to be committed, or the commit that was under way.
    fn failed(&self, known: Option<u64>, error: EngineError, under_way: u64) -> Ended {
        // A commit beside the steps comes before that of any of them, unless it is known to have happened.
        let beside = self.beside.filter(|step| Some(*step) != known);
        let possible = if self.is_told() { known } else { beside.or(Some(under_way)) };
        Ended::with(known, possible, error)
    }

    /// Whether a commit that failed is certain not to have happened.
    fn is_told(&self) -> bool {
        matches!(self.life.trouble, Trouble::Fail { action: Action::Read | Action::Write, .. })
    }

    fn is_write_failing(&self) -> bool {
        matches!(self.life.trouble, Trouble::Fail { action: Action::Write, .. })
    }

    /// Evaluates, looks at weights, saves and exports, as the setting says; how it ended, if that failed.
    fn after_step(&mut self, setup: &Setup, engine: &mut Engine, saved: &mut Option<u64>) -> Option<Ended> {
        let step = engine.step();
        let Life { evaluates, looks, is_patient, .. } = self.life;
        if evaluates[step as usize] || looks[step as usize] {
            if *is_patient && let Err(error) = self.settle(engine, saved) {
                return Some(self.save_failed(setup, engine, *saved, step, error));
            }
            if let Err(error) = self.read(setup, engine) {
                self.reading = Some(step);
                if setup.placement == Placement::Disk && setup.durability == Durability::Step {
                    return Some(self.failed(Some(engine.step()), error, engine.step() + 1));
                }
                return Some(Ended::with(*saved, self.beside.or(*saved), error));
            }
        }
        match self.save(setup, engine, saved) {
            Ok(()) => None,
            Err(error) => Some(self.save_failed(setup, engine, *saved, step, error)),
        }
    }

    /// A save of `step` failed.
    fn save_failed(
        &self,
        setup: &Setup,
        engine: &Engine,
        saved: Option<u64>,
        step: u64,
        error: EngineError,
    ) -> Ended {
        if setup.placement != Placement::Disk {
            let possible = if self.is_told() { saved } else { Some(step) };
            return Ended::with(saved, self.beside.or(possible), error);
        }
        match setup.durability {
            Durability::Step => self.failed(Some(engine.step()), error, engine.step() + 1),
            _ => self.failed(saved, error, step),
        }
    }

    /// Uses the weights without changing them.
    fn read(&self, setup: &Setup, engine: &mut Engine) -> Result<(), EngineError> {
        let step = engine.step() as usize;
        if self.life.evaluates[step] {
            let evaluation = engine.evaluate(&setup.batches(0)[0])?;
            let expected = self.expected.evaluated[step];
            assert_eq!(
                evaluation.loss_sum.to_bits(),
                expected,
                "the loss of an evaluation after step {step}"
            );
        }
        if self.life.looks[step] {
            let hash = hash_of(&mut engine.weights()?)?;
            assert_eq!(hash, self.expected.hashes[step], "the weights after step {step}");
        }
        Ok(())
    }

    fn save(
        &mut self,
        setup: &Setup,
        engine: &mut Engine,
        saved: &mut Option<u64>,
    ) -> Result<(), EngineError> {
        let step = engine.step();
        if self.life.saves[step as usize] {
            self.settle(engine, saved)?;
            self.is_touched = true;
            engine.save()?;
            (*saved, self.is_touched) = (Some(step), false);
        }
        if self.life.exports[step as usize] {
            self.settle(engine, saved)?;
            self.is_touched = true;
            let is_slow = self.life.has_slow_readers && self.clock.is_none();
            let export = move |weights: &mut dyn WeightReader| {
                if is_slow {
                    std::thread::sleep(Duration::from_millis(2));
                }
                hash_of(weights)
            };
            self.exports.push((step, engine.export_beside(export)?));
            match setup.durability {
                Durability::Step if setup.placement == Placement::Disk => {}
                _ => self.beside = Some(step),
            }
        }
        Ok(())
    }

    /// Waits for the save that goes on beside the steps.
    fn settle(&mut self, engine: &mut Engine, saved: &mut Option<u64>) -> Result<(), EngineError> {
        let Some(step) = self.beside else { return Ok(()) };
        engine.finish_save()?;
        // Steps since then have overwritten state on disk, where it is kept once.
        self.is_touched = self.life.placement == Placement::Disk && engine.step() > step;
        (*saved, self.beside) = (Some(step), None);
        Ok(())
    }

    /// Compares all weights, where reading them cannot fail.
    fn check_weights(&self, engine: &mut Engine) {
        let is_calm = matches!(self.life.trouble, Trouble::None | Trouble::Stop { .. });
        if is_calm || self.life.placement != Placement::Disk {
            assert_eq!(
                weights_hash(engine),
                self.expected.hashes[STEPS as usize],
                "the weights of the last step"
            );
        }
    }
}

/// Compares what was allocated and used with what was planned.
fn check_memory(setup: &Setup, engine: &Engine, card: Option<&SimDevice>) {
    let plan = engine.memory_plan();
    let host = plan.total(Tier::Host);
    assert!(host <= setup.host_budget, "{host} bytes are planned in {}", setup.host_budget);
    let Some(card) = card else { return };
    let (bytes, peak) = card.arena_bytes();
    let planned = plan.total(Tier::Device);
    assert!(
        peak <= bytes && bytes <= planned,
        "{peak} of {bytes} bytes are used where {planned} are planned"
    );
    let pinned = card.pinned_bytes();
    assert!(pinned <= host, "{pinned} bytes are pinned where {host} are planned");
}

fn note(step: u64) -> Vec<u8> {
    format!("note of step {step}").into_bytes()
}

/// Ends an engine as a panic does, which leaves its deferred update undone.
fn lose(engine: Engine) {
    let panic = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let _engine = engine;
        std::panic::resume_unwind(Box::new("lost"));
    }));
    assert!(panic.is_err());
}
