//! The engine under a virtual clock, beside what is expected of it: how well it hides its disk does not depend on the machine that
//! tests it, nor on what else that does.
//!
//! Threads, kernels, store and update are the real ones. Products take the time of their operations, and a disk that of its bytes; all the rest takes none.
//! So a step takes as long as the order of the work makes it take. It is compared with its floor, the longer of what computing alone and
//! the disk alone take, and with what the [predictor](terrace::predict) makes of the plan's schedule.
#![cfg(target_os = "linux")]
#![allow(missing_docs)]

#[path = "../models/tests/engine_support/timed.rs"]
mod timed;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use terrace::aio::engine::{SimConfig, SimEngine};
use terrace::aio::layer::{ThrottleConfig, TimedLayer};
use terrace::aio::{FileId, IoEngine, Request, Ticket, Urgency, VirtualClock};
use terrace::calibrate::Rates;
use terrace::floor::Capabilities;
use terrace::models::{ModelConfig, RandomSource, Row, TokenBatch, build};
use terrace::predict::{step_seconds, unclipped_step_seconds};
use terrace::{
    Backend, BatchLimits, DType, Engine, EngineConfig, IoConfig, MicroBatch, Placement, StepWork,
    TrainingConfig, WindowOverrides, cpu_backend,
};
use timed::timed;

/// Virtual seconds of a step in memory.
const COMPUTE: f64 = 10.0;
const SEQUENCES: usize = 2;
const LENGTH: usize = 16;
/// The steps before them find empty windows, or have not seen yet that nothing is clipped.
const STEPS: [usize; 2] = [5, 3];

/// A disk that does everything in the order in which it comes.
#[derive(Debug)]
struct InTurn {
    disk: TimedLayer,
}

impl IoEngine for InTurn {
    terrace::aio::pass_files_on!(disk);

    fn submit(&self, request: Request) -> Ticket {
        self.disk.submit(request.with_urgency(Urgency::Whenever))
    }

    fn sync(&self, file: FileId) -> Ticket {
        self.disk.sync(file)
    }
}

/// A model and its one batch.
struct Training {
    model: ModelConfig,
    batch: MicroBatch,
}

/// How an engine trains.
#[derive(Debug, Clone, Copy)]
struct Way {
    clip: Option<f64>,
    copies: bool,
    overlap: bool,
    /// Chunks whose state is on its way at once.
    slots: usize,
    /// Whether the disk does first what is waited for.
    urgency: bool,
}

/// Half of the state is in slots, so that the disk is given seconds of work at once.
const MANY: usize = 18;

/// With as few slots as there are where memory is short.
const WAY: Way = Way { clip: None, copies: false, overlap: true, slots: 3, urgency: true };

impl Training {
    fn new() -> Self {
        let model = ModelConfig::parse(
            r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 64,
                "intermediate_size": 192, "num_hidden_layers": 8, "num_attention_heads": 2}"#,
        )
        .unwrap();
        let ids: Vec<u32> = (0..LENGTH as u32).map(|i| i * 37 % 256).collect();
        let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        let rows = vec![Row { ids: &ids, labels: &labels }; SEQUENCES];
        let batch = TokenBatch::new(&model).train(&rows, SEQUENCES, LENGTH).unwrap();
        Self { model, batch }
    }

    /// An engine with its state in memory, or on a disk of so many bytes a second.
    fn engine(&self, clock: &Arc<VirtualClock>, operation: f64, disk: Option<f64>, way: Way) -> Engine {
        let limits = BatchLimits {
            sequences: SEQUENCES,
            length: LENGTH,
            micro_batches: 1,
            cache_length: 0,
            cache_pages: 0,
        };
        let overrides = WindowOverrides {
            // As many as a layer of a large model has.
            chunk_elements: Some(1 << 14),
            update_slots: Some(way.slots),
            overlap: Some(way.overlap),
            ..WindowOverrides::default()
        };
        let mut config = EngineConfig {
            training: Some(TrainingConfig { clip: way.clip, ..TrainingConfig::default() }),
            overrides,
            threads: 1,
            cache_bytes: if way.copies { u64::MAX } else { 0 },
            ..EngineConfig::new(DType::BF16, limits)
        };
        let mut backend = cpu_backend(1, &IoConfig::default()).unwrap();
        backend.kernels = timed(backend.kernels, clock, operation);
        if let Some(rate) = disk {
            (config.placement, config.disks) = (Placement::Disk, vec!["/disk".into()]);
            let calm = SimConfig {
                short_one_in: 0,
                interrupt_one_in: 0,
                delay_ticks_max: 0,
                queue_depth: 1024,
                ..SimConfig::default()
            };
            let rates = ThrottleConfig {
                read_bytes_per_second: rate,
                write_bytes_per_second: rate,
                is_shared: true,
                ..ThrottleConfig::default()
            };
            let disk = TimedLayer::new(Arc::new(SimEngine::new(calm)), Arc::clone(clock), rates);
            let io: Arc<dyn IoEngine> = if way.urgency { Arc::new(disk) } else { Arc::new(InTurn { disk }) };
            backend = Backend { io, ..backend };
        }
        let sample = TokenBatch::new(&self.model).blank(SEQUENCES, LENGTH);
        Engine::create(config, backend, build(&self.model), &sample, &mut RandomSource::new(1)).unwrap()
    }

    /// Virtual seconds of a step in the long run.
    fn seconds(&self, engine: &mut Engine, clock: &VirtualClock) -> f64 {
        let mut train = |steps| {
            for _ in 0..steps {
                engine.train_step(std::slice::from_ref(&self.batch), 1e-4).unwrap();
            }
            clock.now().as_secs_f64()
        };
        let began = train(STEPS[0]);
        (train(STEPS[1]) - began) / STEPS[1] as f64
    }
}

/// What a disk makes of a step.
#[derive(Debug)]
struct Found {
    seconds: f64,
    floor: f64,
    expected: f64,
}

/// Trains on a disk that takes `slowness` times as long as computing does.
fn on_disk(way: Way, slowness: f64) -> Found {
    // One at a time: a clock waits for all threads of its process.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let training = Training::new();
    let clock = Arc::new(VirtualClock::new().unwrap());
    // Of an operation, and their number, with which a step in memory takes as long as it is said to: the same for all.
    static OPERATIONS: OnceLock<(f64, f64)> = OnceLock::new();
    let &(operation, flops) = OPERATIONS.get_or_init(|| {
        let mut memory = training.engine(&clock, 1e-9, None, WAY);
        let operation = 1e-9 * COMPUTE / training.seconds(&mut memory, &clock);
        (operation, memory.flops_per_step() as f64)
    });
    let work = training.engine(&clock, 0.0, Some(f64::INFINITY), way).step_work();
    let bytes = (work.disk_read_bytes + work.disk_write_bytes) as f64;
    let rate = bytes / (COMPUTE * slowness);
    let mut engine = training.engine(&clock, operation, Some(rate), way);
    let seconds = training.seconds(&mut engine, &clock);
    let rates =
        Rates { read_bytes_per_second: rate, write_bytes_per_second: rate, mixed_bytes_per_second: rate };
    let can = Capabilities {
        training: Some(flops / COMPUTE),
        disks: vec![(1.0, rates)],
        ..Capabilities::default()
    };
    Found { seconds, floor: COMPUTE.max(COMPUTE * slowness), expected: expected(&work, way, &can) }
}

fn expected(work: &StepWork, way: Way, can: &Capabilities) -> f64 {
    let unclipped = if way.clip == NEVER { unclipped_step_seconds(work, can) } else { None };
    unclipped.or_else(|| step_seconds(work, can)).unwrap()
}

const ALWAYS: Option<f64> = Some(1e-6);
const NEVER: Option<f64> = Some(1e6);

/// Seconds to the floor, on disks that take a part of the time that computing does, and a multiple of it.
fn check(way: Way, bounds: [(f64, f64); 4]) {
    for (slowness, bound) in bounds {
        let found = on_disk(way, slowness);
        let Found { seconds, floor, expected } = found;
        println!(
            "{way:?}, {slowness}: {seconds:.3} s, {:.3} × floor, {:.3} × expected",
            seconds / floor,
            seconds / expected
        );
        assert!(seconds <= floor * bound, "{way:?}, {slowness}: {found:?}");
        assert!((seconds / expected - 1.0).abs() < 0.1, "{way:?}, {slowness}: {found:?}");
    }
}

#[test]
fn without_clipping_updates_hide_behind_backward() {
    check(WAY, [(0.25, 1.06), (0.5, 1.10), (2.0, 1.07), (4.0, 1.03)]);
}

#[test]
fn a_limit_that_no_gradient_reaches_costs_next_to_nothing() {
    check(Way { clip: NEVER, ..WAY }, [(0.25, 1.06), (0.5, 1.10), (2.0, 1.11), (4.0, 1.09)]);
}

/// All of the state is read, updated and written during forward.
#[test]
fn steps_that_are_clipped_hide_what_forward_can() {
    check(Way { clip: ALWAYS, ..WAY }, [(0.25, 1.06), (0.5, 1.19), (2.0, 1.31), (4.0, 1.12)]);
}

#[test]
fn with_copies_in_memory_steps_that_are_clipped_are_at_the_floor() {
    check(Way { clip: ALWAYS, copies: true, ..WAY }, [(0.25, 1.01), (0.5, 1.01), (2.0, 1.02), (4.0, 1.01)]);
}

/// What overlap is worth: without it disk and compute take turns.
#[test]
fn without_overlap_a_step_takes_longer() {
    for (slowness, least) in [(0.5, 1.2), (2.0, 1.2)] {
        let [beside, after] = [true, false].map(|overlap| on_disk(Way { overlap, ..WAY }, slowness).seconds);
        println!("{slowness}: {:.3}", after / beside);
        assert!(after > beside * least, "{slowness}: {beside} s, and {after} s without overlap");
    }
}

#[test]
fn with_many_update_slots_compute_does_not_wait_for_what_they_hold() {
    check(Way { slots: MANY, ..WAY }, [(0.25, 1.06), (0.5, 1.10), (2.0, 1.11), (4.0, 1.09)]);
    let clipped = Way { clip: ALWAYS, slots: MANY, ..WAY };
    check(clipped, [(0.25, 1.04), (0.5, 1.06), (2.0, 1.08), (4.0, 1.06)]);
}

/// What urgency is worth: on a disk that does everything in turn weights wait for all that the slots hold.
#[test]
fn without_urgency_a_step_with_many_update_slots_takes_longer() {
    for (slowness, least) in [(0.5, 1.1), (2.0, 1.1)] {
        let way = Way { clip: ALWAYS, slots: MANY, ..WAY };
        let [first, in_turn] = [true, false].map(|urgency| on_disk(Way { urgency, ..way }, slowness).seconds);
        println!("{slowness}: {:.3}", in_turn / first);
        assert!(in_turn > first * least, "{slowness}: {first} s, and {in_turn} s in turn");
    }
}
