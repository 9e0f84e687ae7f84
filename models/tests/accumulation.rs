//! Horizontal accumulation: what it takes and moves. That it changes no number is tested in `placement.rs`.

#[path = "engine_support/mod.rs"]
mod support;

use support::{Setup, weights_hash};
use terrace_kernels::{DType, View, ViewMut};
use terrace_models::{Model, RandomSource};
use terrace_tiers::Tier;
use terrace_zero::{
    Accumulation, Block, Context, Engine, Gradients, Mode, Outlook, OutputSpec, ParamSpec, PlanningRuns,
    Result, Weights, WindowOverrides,
};

fn plan(setup: &Setup) -> Outlook {
    let setup = setup.on_cpu();
    let blocks = Model::new(setup.model.clone()).blocks;
    let runs = PlanningRuns::default();
    Engine::outlook(setup.config(), &setup.backend(), blocks, &setup.sample(), &runs).unwrap()
}

/// Count and bytes of the terms that begin so.
fn term(outlook: &Outlook, tier: Tier, purpose: &str) -> (u64, u64) {
    let terms = outlook.memory.entries().iter();
    let terms = terms.filter(|term| term.tier == tier && term.purpose.starts_with(purpose));
    terms.fold((0, 0), |(count, bytes), term| (count + term.count, bytes + term.bytes()))
}

fn both(setup: &Setup) -> [Outlook; 2] {
    let of = |accumulation| plan(&Setup { accumulation, ..setup.clone() });
    [of(Accumulation::Vertical), of(Accumulation::Horizontal)]
}

#[test]
fn activations_of_one_micro_batch_and_sums_of_gradients() {
    for (tied, on_disk, discrete) in
        [(false, false, false), (true, false, false), (false, true, false), (true, true, true)]
    {
        let overrides = WindowOverrides {
            gradients_on_disk: Some(on_disk),
            activations_on_disk: Some(on_disk),
            kept_blocks: Some(3),
            ..WindowOverrides::default()
        };
        // Unclipped, so that what is kept has memory of its own.
        let base = Setup { clip: None, ..Setup::on_disk(tied, vec!["nowhere".into()]) };
        let base = Setup { micro_batches: 8, discrete, ..base };
        let [vertical, horizontal] = both(&Setup { overrides, ..base.clone() });
        // Boundaries of five blocks; gradients of tied embeddings wait for seven others.
        let waiting = if tied { 7 } else { 0 };
        let slots = |outlook| term(outlook, Tier::Host, "activations and their gradients").0;
        assert_eq!(slots(&vertical), if on_disk { 9 } else { 4 * 8 + 1 });
        assert_eq!(slots(&horizontal), if on_disk { 2 } else { 4 + 1 } + waiting);
        let arena = if discrete { Tier::Device } else { Tier::Host };
        let kept = |outlook| term(outlook, arena, "activations that 3 of 3 blocks keep").1;
        assert_eq!(kept(&vertical), 8 * kept(&horizontal));
        let elements = vertical.work.parameters;
        assert_eq!(term(&vertical, Tier::Host, "sums of gradients").1, 0);
        let sums = term(&horizontal, Tier::Host, "sums of gradients").1;
        let parked = term(&horizontal, Tier::Disk, "parked sums of gradients").1;
        if on_disk {
            assert!(parked >= 4 * elements && sums > 0, "{parked} bytes on disk, {sums} in memory");
        } else {
            assert!(sums >= 4 * elements && parked == 0, "{sums} bytes for {elements} elements");
        }
        assert_eq!(vertical.work.operations, horizontal.work.operations);
        // Micro-batches one by one are one round if there is one.
        let [vertical, horizontal] = both(&Setup { micro_batches: 1, overrides, ..base });
        assert_eq!(vertical.memory, horizontal.memory);
        assert_eq!(vertical.work, horizontal.work);
    }
}

/// By hand, in elements of groups: what a step of four micro-batches moves besides what it does all together.
#[test]
fn weights_and_sums_travel_for_every_micro_batch() {
    let sizes = |tied: bool| -> Vec<u64> {
        let blocks = Model::new(support::small_llama(tied)).blocks;
        let aligned = |spec: &ParamSpec| (spec.elements() as u64).next_multiple_of(64);
        blocks.iter().map(|b| b.params().iter().map(aligned).sum::<u64>().next_multiple_of(4096)).collect()
    };
    for (tied, on_disk) in [(false, false), (true, false), (true, true)] {
        let overrides = WindowOverrides {
            weight_slots: Some(1),
            gradients_on_disk: Some(on_disk),
            activations_on_disk: Some(false),
            ..WindowOverrides::default()
        };
        let base = Setup { micro_batches: 4, overrides, ..Setup::on_disk(tied, vec!["nowhere".into()]) };
        let sizes = sizes(tied);
        let all: u64 = sizes.iter().sum();
        let [vertical, horizontal] = both(&base);
        assert_eq!(vertical.work.parameters, all);
        // With one slot for all layers each of three more rounds reads everything, the middle layer in both directions and so,
        // where it is used forward and by the head, the tied embedding. What is used again at once is not read again: the last
        // layer, which is about the head, and where rounds meet the first layer, and the embedding of its own.
        let round = all + sizes[2] + if tied { sizes[0] } else { 0 };
        let sums = if on_disk { 3 * 4 * all } else { 0 };
        let more = horizontal.work.disk_read_bytes - vertical.work.disk_read_bytes;
        assert_eq!(more, 3 * 2 * round + sums, "tied: {tied}, {sizes:?}");
        let written = horizontal.work.disk_write_bytes - vertical.work.disk_write_bytes;
        assert_eq!(written, sums);
    }
}

#[test]
fn state_goes_on_with_either() {
    let dir = tempfile::tempdir().unwrap();
    let vertical = Setup { micro_batches: 3, ..Setup::new(true) };
    let expected = vertical.run(4).1;
    let on_disk = Setup { micro_batches: 3, ..Setup::on_disk(true, vec![dir.path().join("disk")]) };
    let horizontal = Setup { accumulation: Accumulation::Horizontal, ..on_disk.clone() };
    horizontal.continue_to(&mut horizontal.create(), 2);
    on_disk.continue_to(&mut on_disk.resume().unwrap(), 3);
    let mut engine = horizontal.resume().unwrap();
    horizontal.continue_to(&mut engine, 4);
    assert_eq!(weights_hash(&mut engine), expected);
}

/// A block that says it borrows a parameter of another.
#[derive(Debug)]
struct Borrowing(Box<dyn Block>, Vec<String>);

impl Block for Borrowing {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn params(&self) -> &[ParamSpec] {
        self.0.params()
    }

    fn borrowed(&self) -> &[String] {
        &self.1
    }

    fn output(&self, sequences: usize, length: usize, dtype: DType, mode: Mode) -> OutputSpec {
        self.0.output(sequences, length, dtype, mode)
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        y: ViewMut<'_>,
    ) -> Result {
        self.0.forward(cx, weights, x, y)
    }

    fn backward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        dy: Option<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradients: &mut Gradients<'_>,
    ) -> Result {
        self.0.backward(cx, weights, x, dy, dx, gradients)
    }
}

/// The blocks of `setup`, of which the last layer says that it borrows the first parameter of block `from`.
fn borrowing(setup: &Setup, from: usize) -> Vec<Box<dyn Block>> {
    let mut blocks = Model::new(setup.model.clone()).blocks;
    let name = blocks[from].params()[0].name.clone();
    let layer = blocks.remove(3);
    blocks.insert(3, Box::new(Borrowing(layer, vec![name])));
    blocks
}

/// Nothing is added to its accumulator, whose memory held something else before.
#[test]
fn a_parameter_that_is_borrowed_and_not_used_has_no_gradient_from_there() {
    for discrete in [false, true] {
        let setup = Setup { discrete, micro_batches: 2, ..Setup::new(true) };
        let mut source = RandomSource::for_config(&setup.model, 7);
        let blocks = borrowing(&setup, 1);
        let engine = Engine::create(setup.config(), setup.backend(), blocks, &setup.sample(), &mut source);
        let mut engine = engine.unwrap();
        setup.continue_to(&mut engine, 2);
        assert_eq!(weights_hash(&mut engine), setup.run(2).1);
    }
}

/// Sums in another order would be other numbers.
#[test]
fn networks_that_share_otherwise_are_refused() {
    let setup = Setup { accumulation: Accumulation::Horizontal, ..Setup::new(true) };
    for (from, users) in [(1, "2 blocks"), (0, "3 blocks")] {
        let (blocks, runs) = (borrowing(&setup, from), PlanningRuns::default());
        let error = Engine::outlook(setup.config(), &setup.backend(), blocks, &setup.sample(), &runs);
        let error = error.expect_err("refused").to_string();
        for part in ["horizontal accumulation cannot", users, "Accumulate vertically"] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
    }
}
