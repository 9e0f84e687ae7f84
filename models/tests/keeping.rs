//! Blocks that keep their intermediates: as many as fit, each micro-batch and block its own, in exactly the memory that was
//! planned, for fewer operations. That they change no number is tested in `placement.rs`.

#[path = "engine_support/mod.rs"]
mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use support::{LR, Setup, card, weights_hash};
use terrace_device::Space;
use terrace_kernels::{View, ViewMut};
use terrace_models::{Model, RandomSource};
use terrace_tiers::Tier;
use terrace_zero::{
    Accumulation, Block, Context, Engine, EngineConfig, EngineError, Gradients, Kept, KvSpec, Mode, Outlook,
    OutputSpec, ParamSpec, Placement, PlanningRuns, Result, Weights, WindowOverrides,
};

fn keeping(setup: &Setup, blocks: usize) -> Setup {
    let overrides = WindowOverrides { kept_blocks: Some(blocks), ..setup.overrides };
    Setup { overrides, ..setup.clone() }
}

fn setups(dir: &std::path::Path) -> Vec<Setup> {
    let mut several = Setup::on_disk(true, vec![dir.join("disk")]);
    several.micro_batches = 3;
    // Packed weights would take what a larger budget leaves.
    several.overrides.packed_bytes = Some(0);
    // Gradients of more groups would take what a larger budget leaves.
    let overrides = WindowOverrides { gradient_groups: Some(2), ..WindowOverrides::default() };
    let unclipped = Setup { clip: None, overrides, ..Setup::on_disk(true, vec![dir.join("unclipped")]) };
    let all = [Setup::new(true), Setup { micro_batches: 1, ..Setup::new(false) }, several, unclipped];
    all.map(|setup| setup.on_cpu()).into()
}

/// What blocks keep and gradients have in turns, as the plan says it, and what only the first have.
fn kept_bytes(engine: &Engine) -> (u64, u64) {
    let terms = |words: &str| {
        let entries = engine.memory_plan().entries().iter();
        entries.filter(|e| e.purpose.contains(words)).map(|e| e.count * e.unit_bytes).sum()
    };
    (terms("blocks keep, in turns with their gradients"), terms("blocks keep for backward"))
}

#[test]
fn as_many_blocks_keep_as_fit() {
    let dir = tempfile::tempdir().unwrap();
    for setup in setups(dir.path()) {
        let fixed: Vec<(u64, u64)> = (0..=3)
            .map(|blocks| {
                let engine = keeping(&setup, blocks).create();
                assert_eq!(engine.kept_blocks(), (blocks, 3));
                let plan = (engine.memory_plan().total(Tier::Host), engine.flops_per_step());
                engine.remove_state().unwrap();
                plan
            })
            .collect();
        println!("{fixed:?}");
        // With one micro-batch the first block that keeps is free: backward begins with it.
        let most = |budget: u64| fixed.iter().rposition(|&(bytes, _)| bytes <= budget);
        for &(bytes, _) in &fixed {
            for budget in [bytes, bytes - 1] {
                let Some(blocks) = most(budget) else { continue };
                let engine = Setup { host_budget: budget, ..setup.clone() }.create();
                assert_eq!(engine.kept_blocks(), (blocks, 3), "{budget} bytes of {fixed:?}");
                assert_eq!(engine.memory_plan().total(Tier::Host), fixed[blocks].0);
                assert_eq!(engine.flops_per_step(), fixed[blocks].1);
                let words = format!("kept by {blocks} of 3 blocks");
                assert!(format!("{engine:?}").contains(&words), "{engine:?}");
                engine.remove_state().unwrap();
            }
        }
        assert!(fixed.is_sorted_by(|a, b| a.1 > b.1), "fewer operations: {fixed:?}");
        // Where gradients have turns, memory of theirs may take what is kept, and nothing is recomputed elsewhere.
        if setup.clip.is_none() {
            assert!(fixed.is_sorted_by(|a, b| a.0 < b.0), "more bytes: {fixed:?}");
        }
    }
}

/// Few tokens leave less than a gradient takes, many leave more; what is planned is the larger.
#[test]
fn what_blocks_keep_takes_turns_with_their_gradients() {
    let dir = tempfile::tempdir().unwrap();
    // Weights of a layer of `small_llama`: two norms, query and output, key and value, gate, up and down, each aligned.
    let gradient: u64 = 2 * (2 * 64 + 2 * 48 * 48 + 2 * 24 * 48 + 3 * 112 * 48);
    for (number, micro_batches) in [1, 2, 3].into_iter().enumerate() {
        let all = |clip| {
            let disks = vec![dir.path().join(format!("{number} {clip:?}"))];
            keeping(&Setup { clip, micro_batches, ..Setup::on_disk(false, disks) }.on_cpu(), 3)
        };
        // Unclipped updates follow backward, and gradients of few groups are there at a time.
        let (in_turns, kept) = kept_bytes(&all(None).create());
        assert_eq!(in_turns, 0);
        let (in_turns, more) = kept_bytes(&all(Some(0.5)).create());
        assert_eq!(more, 0);
        let page = |bytes: u64| bytes.next_multiple_of(4096);
        assert_eq!(in_turns, 3 * page(gradient.max(kept / 3)));
        assert_eq!(micro_batches > 1, kept / 3 > gradient);
    }
}

#[test]
fn what_must_be_kept_and_does_not_fit_is_refused() {
    let overrides = WindowOverrides { chunk_elements: Some(1 << 14), ..WindowOverrides::default() };
    let setup = keeping(&Setup { overrides, ..Setup::new(true) }.on_cpu(), usize::MAX);
    let bytes = setup.create().memory_plan().total(Tier::Host);
    let error = Setup { host_budget: bytes - 1, ..setup }.try_create().expect_err("refused").to_string();
    for part in ["WindowOverrides::kept_blocks None", "activations that 3 of 3 blocks keep", "Raise it to"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

/// What the watched blocks of an engine saw.
#[derive(Debug, Default)]
struct Seen {
    kept: AtomicUsize,
    recomputed: AtomicUsize,
    /// Peak and capacity of the arena.
    arena: Mutex<(usize, usize)>,
    /// Of the last memory in turns.
    lasting: Mutex<Option<(usize, usize)>>,
    fail_next: AtomicBool,
}

/// A block that leaves its input with the rest and looks in backward whether it got its own back.
#[derive(Debug)]
struct Watched {
    block: Box<dyn Block>,
    seen: Arc<Seen>,
}

impl Block for Watched {
    fn name(&self) -> &str {
        self.block.name()
    }

    fn params(&self) -> &[ParamSpec] {
        self.block.params()
    }

    fn borrowed(&self) -> &[String] {
        self.block.borrowed()
    }

    fn output(
        &self,
        sequences: usize,
        length: usize,
        dtype: terrace_kernels::DType,
        mode: Mode,
    ) -> OutputSpec {
        self.block.output(sequences, length, dtype, mode)
    }

    fn kv(&self) -> Option<KvSpec> {
        self.block.kv()
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        weights: &Weights<'_>,
        x: Option<View<'_>>,
        y: ViewMut<'_>,
    ) -> Result {
        self.block.forward(cx, weights, x, y)?;
        if let (Kept::Left(tensors), Some(x)) = (&mut cx.kept, x) {
            let mut copy = terrace_kernels::Tensor::new(cx.arena, x.dtype(), x.shape().dims())?;
            cx.kernels.elementwise.cast(x, copy.view_mut())?;
            tensors.push(copy);
            if !std::ptr::eq(cx.lasting, cx.arena) && x.bytes().space() == Space::Host {
                *self.seen.lasting.lock().unwrap() = Some((cx.lasting.peak(), cx.lasting.capacity()));
            }
        }
        Ok(())
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
        let kept = match &mut cx.kept {
            Kept::Left(tensors) => tensors.pop(),
            Kept::Nothing | Kept::Wanted => None,
        };
        let space = cx.loss.view().bytes().space();
        let real = space != Space::Virtual;
        if real && dy.is_some() && x.is_some() {
            // Memory of a card is not looked into from here.
            if let (Some(kept), Some(x), Space::Host) = (&kept, x, space) {
                assert!(
                    kept.view().bytes().host() == x.bytes().host(),
                    "{} got what another block or micro-batch left",
                    self.name()
                );
            }
            let count = if kept.is_some() { &self.seen.kept } else { &self.seen.recomputed };
            count.fetch_add(1, Relaxed);
            if self.seen.fail_next.swap(false, Relaxed) {
                let detail = "asked to".to_owned();
                return Err(terrace_kernels::KernelError { op: "fail", detail }.into());
            }
        }
        if real {
            *self.seen.arena.lock().unwrap() = (cx.arena.peak(), cx.arena.capacity());
        }
        drop(kept);
        self.block.backward(cx, weights, x, dy, dx, gradients)
    }
}

fn watched(setup: &Setup) -> (Engine, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let watch = |block| -> Box<dyn Block> { Box::new(Watched { block, seen: Arc::clone(&seen) }) };
    let blocks = Model::new(setup.model.clone()).blocks.into_iter().map(watch).collect();
    let mut source = RandomSource::for_config(&setup.model, 7);
    let engine = Engine::create(setup.config(), setup.backend(), blocks, &setup.sample(), &mut source);
    (engine.unwrap_or_else(|e| panic!("{e}")), seen)
}

/// Elsewhere in between: so many blocks on the host, of a card, and so many on disk.
fn elsewhere(setup: &Setup, (on_host, on_disk): (usize, usize), dir: &std::path::Path) -> Setup {
    let (kept_on_host, kept_on_disk) = (Some(on_host), Some(on_disk));
    let overrides = WindowOverrides { kept_on_host, kept_on_disk, ..setup.overrides };
    Setup { overrides, placement: Placement::Disk, disks: vec![dir.join("disk")], ..setup.clone() }
}

#[test]
fn what_comes_back_is_what_was_left_in_the_planned_memory() {
    for (tied, accumulation, clip) in [
        (true, Accumulation::Vertical, Some(0.5)),
        (false, Accumulation::Vertical, None),
        (true, Accumulation::Horizontal, Some(0.5)),
        (false, Accumulation::Horizontal, None),
    ] {
        for (discrete, here, on_host, on_disk, micro_batches) in [
            (false, 0, 0, 1, 2),
            (false, 0, 0, 3, 3),
            (false, 1, 0, 2, 1),
            (false, 2, 0, 1, 6),
            (false, 1, 0, 1, 3),
            // Its memory is the host's.
            (false, 0, 9, 9, 6),
            (true, 0, 0, 3, 2),
            (true, 0, 3, 0, 3),
            (true, 1, 1, 1, 6),
            (true, 0, 1, 1, 1),
            (true, 2, 1, 0, 6),
        ] {
            if !discrete && card::is_named() {
                continue;
            }
            for slots in [None, Some(1)] {
                let dir = tempfile::tempdir().unwrap();
                let base = Setup { micro_batches, accumulation, clip, discrete, ..Setup::new(tied) };
                let mut setup = elsewhere(&keeping(&base, here), (on_host, on_disk), dir.path());
                setup.overrides.kept_slots = slots;
                setup.overrides.chunk_elements = Some(1 << 14);
                let (mut engine, seen) = watched(&setup);
                let on_host = if discrete { on_host } else { 0 };
                let on_disk = on_disk.min(3 - here - on_host);
                let found = (engine.kept_blocks(), engine.kept_elsewhere());
                assert_eq!(found, ((here, 3), (on_host, on_disk)));
                setup.continue_to(&mut engine, 3);
                let counts = (seen.kept.load(Relaxed), seen.recomputed.load(Relaxed));
                let (per_block, blocks) = (3 * micro_batches, here + on_host + on_disk);
                let words = format!(
                    "discrete: {discrete}, {found:?}, {micro_batches} micro-batches, {accumulation:?}"
                );
                assert_eq!(counts, (blocks * per_block, (3 - blocks) * per_block), "{words}");
                let (peak, capacity) = *seen.arena.lock().unwrap();
                assert_eq!(peak, capacity, "{words}, tied: {tied}");
            }
        }
    }
}

/// Of a card: as many blocks as it has room for, then as many as the host has.
#[test]
fn what_a_card_has_no_room_for_is_on_the_host_if_that_has() {
    let base = Setup { discrete: true, placement: Placement::Host, micro_batches: 3, ..Setup::new(false) };
    let (device_groups, state_groups) = (Some(0), Some(0));
    let overrides = WindowOverrides { device_groups, state_groups, ..base.overrides };
    let base = Setup { overrides, ..base };
    let with = |keep_on_host, device_budget, host_budget| {
        let config = EngineConfig { keep_on_host, device_budget, host_budget, ..base.config() };
        let blocks = Model::new(base.model.clone()).blocks;
        Engine::outlook(config, &base.backend(), blocks, &base.sample(), &PlanningRuns::default()).unwrap()
    };
    let kept = |found: &Outlook| (found.windows.kept_blocks.unwrap(), found.windows.kept_on_host.unwrap());
    let all = with(9, u64::MAX, u64::MAX);
    assert_eq!(kept(&all), (3, 0));
    let device = |found: &Outlook| found.memory.total(Tier::Device);
    let host = |found: &Outlook| found.memory.total(Tier::Host);
    // Less and less for the card.
    let mut found = Vec::new();
    let mut budget = device(&all);
    while found.last().is_none_or(|&(here, _)| here > 0) {
        let outlook = with(9, budget, u64::MAX);
        found.push(kept(&outlook));
        assert!(device(&outlook) <= budget);
        budget -= 4096;
    }
    found.dedup();
    assert!(found.iter().all(|&(here, on_host)| here + on_host == 3), "{found:?}");
    assert!(found.len() >= 2 && found.last() == Some(&(0, 3)), "{found:?}");
    // And for the host.
    let tight = budget + 4096;
    let roomy = with(9, tight, u64::MAX);
    let less = with(9, tight, host(&roomy) - 4096);
    assert_eq!((kept(&roomy), kept(&less)), ((0, 3), (0, 2)));
    assert_eq!(kept(&with(0, tight, u64::MAX)).1, 0);
    assert_eq!(kept(&with(1, tight, u64::MAX)).1, 1);
}

/// What neither a card nor the host has room for is on disk, or recomputed where it may not be there.
#[test]
fn what_the_host_has_no_room_for_is_on_disk_or_recomputed() {
    let dir = tempfile::tempdir().unwrap();
    for (micro_batches, placement) in
        [(1, Placement::Disk), (3, Placement::Disk), (1, Placement::Host), (3, Placement::Host)]
    {
        let disks = if placement == Placement::Disk { vec![dir.path().join("disk")] } else { Vec::new() };
        let base = Setup { discrete: true, placement, disks, micro_batches, ..Setup::new(false) };
        let overrides = WindowOverrides {
            kept_blocks: Some(0),
            device_groups: Some(0),
            state_groups: Some(0),
            weight_slots: Some(2),
            update_slots: Some(2),
            chunk_elements: Some(1 << 14),
            gradients_on_disk: Some(false),
            activations_on_disk: Some(false),
            signals_stay: Some(true),
            ..base.overrides
        };
        let base = Setup { overrides, ..base };
        let with = |host_budget| {
            let (keep_on_host, keep_on_disk) = (usize::MAX, usize::MAX);
            let config = EngineConfig { keep_on_host, keep_on_disk, host_budget, ..base.config() };
            let blocks = Model::new(base.model.clone()).blocks;
            Engine::outlook(config, &base.backend(), blocks, &base.sample(), &PlanningRuns::default())
        };
        let none = EngineConfig { host_budget: u64::MAX, ..base.config() };
        let blocks = Model::new(base.model.clone()).blocks;
        let none =
            Engine::outlook(none, &base.backend(), blocks, &base.sample(), &PlanningRuns::default()).unwrap();
        let least = none.memory.total(Tier::Host);
        let all = with(u64::MAX).unwrap().memory.total(Tier::Host);
        let mut found = Vec::new();
        // Down to what a run without any takes, whose plan has to fit; on disk there are buffers besides.
        let last = if placement == Placement::Disk { least + (all - least) / 2 } else { least };
        for budget in (last..=all).rev().step_by(1 << 14) {
            let outlook = with(budget).unwrap_or_else(|e| panic!("{budget}, {micro_batches}: {e}"));
            assert!(outlook.memory.total(Tier::Host) <= budget);
            let windows = outlook.windows;
            found.push((windows.kept_on_host.unwrap(), windows.kept_on_disk.unwrap()));
        }
        found.dedup();
        let is_all = |&(on_host, on_disk): &(usize, usize)| on_host + on_disk == 3;
        match placement {
            Placement::Disk => assert!(found.iter().all(is_all) && found.len() > 1, "{found:?}"),
            _ => assert_eq!(found, [(3, 0), (2, 0), (1, 0), (0, 0)]),
        }
    }
}

/// The canary for mixed-up and for forgotten tensors, and the arena: what was planned is what is taken, to the byte.
#[test]
fn every_block_and_micro_batch_gets_its_own_in_the_planned_memory() {
    for (discrete, tied, accumulation) in [
        (false, true, Accumulation::Vertical),
        (true, true, Accumulation::Vertical),
        (false, true, Accumulation::Horizontal),
        (true, true, Accumulation::Horizontal),
        (true, false, Accumulation::Horizontal),
    ] {
        if !discrete && card::is_named() {
            continue;
        }
        // What many micro-batches do again is not planned again.
        for (blocks, micro_batches) in [(0, 2), (1, 3), (2, 1), (3, 3), (0, 6), (3, 6)] {
            let base = Setup { discrete, micro_batches, accumulation, ..Setup::new(tied) };
            let setup = keeping(&base, blocks);
            let (mut engine, seen) = watched(&setup);
            setup.continue_to(&mut engine, 2);
            let counts = (seen.kept.load(Relaxed), seen.recomputed.load(Relaxed));
            let per_block = 2 * micro_batches;
            assert_eq!(counts, (blocks * per_block, (3 - blocks) * per_block), "kept and recomputed");
            let (peak, capacity) = *seen.arena.lock().unwrap();
            // On a device with its own memory a chunk of gradient is planned for, whether or not one has to come up.
            let planned = if discrete { peak <= capacity } else { peak == capacity };
            assert!(planned, "{peak} of {capacity}: {blocks} blocks, {micro_batches} micro-batches");
            let lasting = *seen.lasting.lock().unwrap();
            assert_eq!(lasting.is_some(), blocks > 0 && !discrete);
            assert!(lasting.is_none_or(|(peak, capacity)| peak == capacity), "{lasting:?}, {blocks} blocks");
        }
    }
}

/// Where the update follows backward, gradients leave the device earlier than where all wait for the norm.
#[test]
fn the_planned_memory_is_exact_wherever_gradients_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut number = 0;
    for (tied, clip) in [(true, None), (false, None), (true, Some(0.5)), (false, Some(0.5))] {
        for (accumulation, gradients_on_disk) in [
            (Accumulation::Vertical, false),
            (Accumulation::Vertical, true),
            (Accumulation::Horizontal, false),
            (Accumulation::Horizontal, true),
        ] {
            for (blocks, signals_stay, whole) in
                [(0, true, true), (0, true, false), (0, false, true), (2, true, true), (2, true, false)]
            {
                number += 1;
                let setup_words = format!("tied: {tied}, {clip:?}, {accumulation:?}, whole: {whole}");
                let overrides = WindowOverrides {
                    chunk_elements: Some(1 << 14),
                    gradients_on_disk: Some(gradients_on_disk),
                    signals_stay: Some(signals_stay),
                    gradients_whole: Some(whole),
                    ..WindowOverrides::default()
                };
                let disks = vec![dir.path().join(number.to_string())];
                let base = Setup { clip, accumulation, overrides, ..Setup::on_disk(tied, disks) };
                let setup = keeping(&Setup { discrete: true, micro_batches: 5, ..base }, blocks);
                let (mut engine, seen) = watched(&setup);
                setup.continue_to(&mut engine, 2);
                let (peak, capacity) = *seen.arena.lock().unwrap();
                assert_eq!(peak, capacity, "{setup_words}, {gradients_on_disk} {blocks} {signals_stay}");
            }
        }
    }
}

/// Gradients of state on the device never leave it.
#[test]
fn the_planned_memory_is_exact_whatever_the_device_updates() {
    for (tied, accumulation) in
        [(true, Accumulation::Vertical), (false, Accumulation::Vertical), (true, Accumulation::Horizontal)]
    {
        for (state_groups, blocks, whole) in [
            (0, 0, true),
            (0, 0, false),
            (1, 0, true),
            (1, 0, false),
            (3, 2, true),
            (3, 2, false),
            (9, 0, true),
        ] {
            let overrides = WindowOverrides {
                chunk_elements: Some(1 << 14),
                state_groups: Some(state_groups),
                gradients_whole: Some(whole),
                ..WindowOverrides::default()
            };
            let base = Setup { placement: Placement::Host, accumulation, overrides, ..Setup::new(tied) };
            let setup = keeping(&Setup { discrete: true, micro_batches: 5, ..base }, blocks);
            let (mut engine, seen) = watched(&setup);
            setup.continue_to(&mut engine, 2);
            let (peak, capacity) = *seen.arena.lock().unwrap();
            assert_eq!(
                peak, capacity,
                "tied: {tied}, {accumulation:?}, {state_groups} groups, {blocks} keep, whole: {whole}"
            );
        }
    }
}

#[test]
fn a_step_that_fails_leaves_nothing_behind() {
    fails_in_a_step(&keeping(&Setup::new(true), 3));
    fails_in_a_step(&keeping(&Setup { discrete: true, ..Setup::new(true) }, 0));
    // Also none of the gradients that are parked between micro-batches.
    let accumulation = Accumulation::Horizontal;
    fails_in_a_step(&keeping(&Setup { accumulation, ..Setup::new(true) }, 3));
    // Nor what is elsewhere in between.
    for (discrete, here, there) in
        [(false, 0, (0, 3)), (false, 1, (0, 1)), (true, 0, (0, 3)), (true, 0, (3, 0)), (true, 1, (1, 1))]
    {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let base = keeping(&Setup { discrete, ..Setup::new(true) }, here);
        let setup = |dir: &std::path::Path| elsewhere(&base, there, dir);
        fails_in_a_step_of(&setup(one.path()), &setup(other.path()));
    }
}

fn fails_in_a_step(setup: &Setup) {
    fails_in_a_step_of(setup, setup);
}

fn fails_in_a_step_of(setup: &Setup, as_is: &Setup) {
    let (mut undisturbed, _) = watched(as_is);
    as_is.continue_to(&mut undisturbed, 2);
    let (mut engine, seen) = watched(setup);
    seen.fail_next.store(true, Relaxed);
    let error = engine.train_step(&setup.batches(0), LR).expect_err("a block failed");
    assert!(matches!(error, EngineError::Kernel(_)), "{error}");
    // Were anything left in the arena, it would not be large enough for another step.
    setup.continue_to(&mut engine, 2);
    assert_eq!(weights_hash(&mut engine), weights_hash(&mut undisturbed));
}
