//! What a plan says of where things are, against what the engine that was built from it is seen to move: requests to the disk by what
//! they carry, copies over the link, and what blocks are given in backward. And that the bytes are those of the memory plan.

#[path = "engine_support/mod.rs"]
mod support;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use support::{Setup, narrow};
use terrace_aio::layer::{Action, TraceLayer};
use terrace_kernels::{DType, View, ViewMut};
use terrace_models::{Model, RandomSource};
use terrace_tiers::{MemoryPlan, Tier};
use terrace_zero::{
    Accumulation, Block, Content, Context, Durability, Engine, EngineConfig, Gradients, GroupPlacement, Kept,
    KvSpec, Mode, OutputSpec, ParamSpec, Place, Placed, Placement, Resource, Result, Timeline, Weights,
    WindowOverrides,
};

/// Steps that are looked at, after as many that are not.
const STEPS: u64 = 2;

/// A block that says in backward whether it was given what it had computed.
#[derive(Debug)]
struct Watched {
    block: Box<dyn Block>,
    given: Arc<Mutex<HashSet<String>>>,
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

    fn output(&self, sequences: usize, length: usize, dtype: DType, mode: Mode) -> OutputSpec {
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
        self.block.forward(cx, weights, x, y)
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
        if matches!(cx.kept, Kept::Left(_)) {
            self.given.lock().unwrap().insert(self.name().to_owned());
        }
        self.block.backward(cx, weights, x, dy, dx, gradients)
    }
}

/// What the looked-at steps did.
struct Seen {
    placement: Vec<GroupPlacement>,
    memory: MemoryPlan,
    /// Bytes by what was done with what, as `Read layers.0 weights`.
    disk: HashMap<(Action, String), u64>,
    /// Copies over the link of all steps, those before included, by name, as `weights of layers.0`.
    copies: HashMap<String, u64>,
    given: HashSet<String>,
}

impl Seen {
    fn of(setup: &Setup) -> Self {
        let trace = Arc::new(TraceLayer::new(setup.backend().io, 1 << 20));
        let timeline = Arc::new(Timeline::new(1 << 20));
        let setup = Setup { io: Some(Arc::clone(&trace) as _), ..setup.clone() };
        let config = EngineConfig { timeline: Some(Arc::clone(&timeline)), ..setup.config() };
        let given = Arc::default();
        let watch = |block| -> Box<dyn Block> { Box::new(Watched { block, given: Arc::clone(&given) }) };
        let blocks = Model::new(setup.model.clone()).blocks.into_iter().map(watch).collect();
        let mut source = RandomSource::for_config(&setup.model, 7);
        let mut engine =
            Engine::create(config, setup.backend(), blocks, &setup.sample(), &mut source).unwrap();
        // Where steps are not committed, nobody waits for their last writes but a save.
        let train_to = |engine: &mut Engine, steps| {
            setup.continue_to(engine, steps);
            if setup.durability != Durability::Step {
                engine.save().unwrap();
            }
        };
        train_to(&mut engine, STEPS);
        drop(trace.drain());
        // Planning runs and the first steps are over.
        given.lock().unwrap().clear();
        train_to(&mut engine, 2 * STEPS);
        let (mut disk, mut copies) = (HashMap::new(), HashMap::new());
        for event in trace.drain() {
            if let Some(what) = engine.contents_at(event.file, event.offset) {
                *disk.entry((event.action, what)).or_default() += event.len;
            }
        }
        let (placement, memory) = (engine.placement(), engine.memory_plan().clone());
        // Copies are noted by a thread that looks at them, and ends with the engine.
        drop(engine);
        // Waits have the names of what is waited for.
        let mut spans = timeline.drain();
        spans.retain(|span| matches!(span.resource, Resource::Upload | Resource::Download));
        spans.into_iter().for_each(|span| *copies.entry(span.name).or_default() += 1);
        let given = given.lock().unwrap().clone();
        Self { placement, memory, disk, copies, given }
    }

    fn disk(&self, action: Action, what: &str) -> u64 {
        self.disk.get(&(action, what.to_owned())).copied().unwrap_or(0)
    }

    fn copies(&self, name: &str) -> u64 {
        self.copies.get(name).copied().unwrap_or(0)
    }
}

/// The place of one kind of a group, which may be there or not.
struct At {
    tier: Option<Tier>,
    host_copy: bool,
    device_copy: bool,
    saved: bool,
}

fn at(place: Place) -> At {
    match place {
        Place::Recomputed => At { tier: None, host_copy: false, device_copy: false, saved: false },
        Place::In { home, host_copy, device_copy, saved, .. } => {
            At { tier: Some(home), host_copy, device_copy, saved }
        }
    }
}

/// Compares what is said of one kind of a group with what was seen.
fn is_seen(seen: &Seen, setup: &Setup, name: &str, part: &Placed) {
    let (at, bytes) = (at(part.place), STEPS * part.bytes);
    let what = match part.content {
        Content::Input => format!("{name} input"),
        Content::GradientSum => format!("{name} sums of gradients"),
        Content::Activations => format!("{name} activations"),
        content => format!("{name} {}", content.words()),
    };
    let (read, written) = (seen.disk(Action::Read, &what), seen.disk(Action::Write, &what));
    let told = format!("{what} is said to be in {}: {read} read, {written} written", part.place);
    match part.content {
        Content::Activations => {
            assert_eq!(seen.given.contains(name), at.tier.is_some(), "{told}");
            // Without what an arena rounds up.
            assert_eq!(written > bytes / 2, at.tier == Some(Tier::Disk), "{told}");
            assert!(written <= bytes && read == written, "{told}");
            // Up and down, of all steps and of tensors of every micro-batch.
            let crosses = setup.discrete && matches!(at.tier, Some(Tier::Host | Tier::Disk));
            assert_eq!(seen.copies(&format!("activations of {name}")) > 0, crosses, "{told}");
        }
        Content::State(kind) => {
            let by_saves = setup.durability != Durability::Step && at.host_copy;
            // Of what waits for a save there was one.
            let expected = match at.tier {
                _ if by_saves || at.saved => part.bytes,
                Some(Tier::Disk) => bytes,
                _ => 0,
            };
            assert_eq!(written, expected, "{told}");
            assert_eq!(read > 0, at.tier == Some(Tier::Disk) && !at.host_copy, "{told}");
            if kind.words() == "weights" && setup.discrete {
                let sent = seen.copies(&format!("weights of {name}"));
                match (at.tier, at.device_copy) {
                    (Some(Tier::Device), _) => assert_eq!(sent, 0, "{told}"),
                    (_, true) => assert_eq!(sent, 2 * STEPS, "{told}"),
                    // At most once for each use; less often where nothing else took the slot between two.
                    (_, false) => assert!(sent >= 2 * STEPS, "{told}: {sent}"),
                }
            }
        }
        // What two blocks use is parked by both.
        _ => {
            assert_eq!(written > 0, at.tier == Some(Tier::Disk), "{told}");
            assert_eq!(written % part.bytes, 0, "{told}");
            assert_eq!(read, written, "{told}");
            if part.content == Content::Gradient && setup.discrete {
                let down = seen.copies(&format!("gradient of {name}"));
                assert_eq!(down > 0, at.tier != Some(Tier::Device), "{told}: {down}");
            }
        }
    }
}

/// The bytes of the table are those of the memory plan, as far as it tells them apart.
fn adds_up(seen: &Seen, setup: &Setup) {
    let plan = &seen.memory;
    let planned = |tier: Tier, is: &dyn Fn(&str) -> bool| -> u64 {
        let entries = plan.entries().iter().filter(|e| e.tier == tier && is(&e.purpose));
        entries.map(terrace_tiers::PlanEntry::bytes).sum()
    };
    let placement = &seen.placement;
    let parts: Vec<&Placed> = placement.iter().flat_map(|group| &group.parts).collect();
    let sum = |is: &dyn Fn(&Placed, At) -> bool, rounded: fn(u64) -> u64| -> u64 {
        parts.iter().filter(|part| is(part, at(part.place))).map(|part| rounded(part.bytes)).sum()
    };
    let (page, region) =
        (|bytes: u64| bytes.next_multiple_of(4096), |bytes: u64| bytes.next_multiple_of(256).max(256));
    let kinds: HashSet<&str> = parts
        .iter()
        .filter(|part| matches!(part.content, Content::State(_)))
        .map(|part| part.content.words())
        .collect();
    for kind in kinds {
        let of = |tier| move |part: &Placed, at: At| part.content.words() == kind && at.tier == Some(tier);
        let term = format!("resident state: {kind}");
        assert_eq!(planned(Tier::Host, &|p| p == term), sum(&of(Tier::Host), |bytes| bytes), "{term}");
        let copied = |part: &Placed, at: At| part.content.words() == kind && at.host_copy;
        let term = format!("copies of state on disk: {kind}");
        assert_eq!(planned(Tier::Host, &|p| p == term), sum(&copied, page), "{term}");
        let term = format!(": {kind}");
        let here = |p: &str| p.starts_with("state on the device") && p.ends_with(&term);
        assert_eq!(planned(Tier::Device, &here), sum(&of(Tier::Device), region), "on the device{term}");
    }
    let stay = planned(Tier::Device, &|p| p.starts_with("weights that stay on the device"));
    let copied_there = |part: &Placed, at: At| matches!(part.content, Content::State(_)) && at.device_copy;
    assert_eq!(stay, sum(&copied_there, region), "weights that stay");
    let gradients =
        |tier| move |part: &Placed, at: At| part.content == Content::Gradient && at.tier == Some(tier);
    let here = sum(&gradients(Tier::Device), region);
    let groups = parts.iter().filter(|part| gradients(Tier::Device)(part, at(part.place))).count() as u64;
    let sums = if groups > 0 { region(8 * groups) } else { 0 };
    assert_eq!(planned(Tier::Device, &|p| p.starts_with("gradients of state on the device")), here + sums);
    // Two generations, or one; in whole stripes and with a header for each file.
    let state = |part: &Placed, at: At| {
        let saved = matches!(part.place, Place::In { saved: true, .. });
        matches!(part.content, Content::State(_)) && (at.tier == Some(Tier::Disk) || saved)
    };
    let rounding = (setup.disks.len() as u64).max(1) * (1 << 21);
    let stored = planned(Tier::Disk, &|p| p.starts_with("training state"));
    let generations = if setup.durability == Durability::None { 1 } else { 2 };
    let least = generations * sum(&state, |bytes| bytes);
    assert!(
        (least..=least + rounding).contains(&stored) && (stored > 0) == (least > 0),
        "{stored} of {least}"
    );
    let kept = |part: &Placed, at: At| part.content == Content::Activations && at.tier == Some(Tier::Host);
    let held = planned(Tier::Host, &|p| p == "kept activations");
    let least = if setup.discrete { sum(&kept, |bytes| bytes / 2) } else { 0 };
    assert!(held >= least && (held > 0) == (least > 0), "kept on the host: {held} of {least}");
    let kept = |part: &Placed, at: At| part.content == Content::Activations && at.tier == Some(Tier::Disk);
    let (least, stored) = (sum(&kept, |bytes| bytes / 2), planned(Tier::Disk, &|p| p.starts_with("kept")));
    assert!(stored >= least && (stored > 0) == (least > 0), "kept on disk: {stored} of {least}");
    // A block's gradient and what it keeps share the memory of the larger, or they do not.
    let in_turns = |place: Place| matches!(place, Place::In { in_turns: true, .. });
    let tier = if setup.discrete { Tier::Device } else { Tier::Host };
    let alone = |part: &Placed, at: At| {
        part.content == Content::Activations && at.tier == Some(tier) && !in_turns(part.place)
    };
    let term = planned(tier, &|p| p.ends_with("blocks keep for backward"));
    assert_eq!(term, sum(&alone, |bytes| bytes), "kept");
    let turns = placement.iter().filter(|group| group.parts.iter().any(|part| in_turns(part.place)));
    let bytes = |part: &Placed| match part.content {
        Content::Activations | Content::Gradient => part.bytes,
        _ => 0,
    };
    let turns = turns.map(|group| page(group.parts.iter().map(bytes).max().unwrap_or(0))).sum::<u64>();
    let term = planned(tier, &|p| p.ends_with("in turns with their gradients"));
    assert_eq!(term, turns, "kept in turns");
}

fn cases(dir: &std::path::Path) -> Vec<(&'static str, Setup)> {
    // Every step is over when it ends, so that what steps move can be told apart.
    let alone = WindowOverrides { overlap: Some(false), ..narrow() };
    let base = Setup { overrides: WindowOverrides { kept_blocks: Some(1), ..alone }, ..Setup::new(true) };
    let on_disk = |name: &str, overrides| {
        let disks = [1, 2].map(|disk| dir.join(format!("{name} {disk}"))).to_vec();
        let disk_weights = Some(vec![3.0, 2.0]);
        Setup { placement: Placement::Disk, disks, disk_weights, overrides, ..base.clone() }
    };
    let copies = |weights, groups| WindowOverrides {
        copied_weights: Some(weights),
        copied_groups: Some(groups),
        ..alone
    };
    let spilled =
        WindowOverrides { gradients_on_disk: Some(true), activations_on_disk: Some(true), ..copies(0, 0) };
    let on_device = WindowOverrides { state_groups: Some(1), device_groups: Some(3), ..base.overrides };
    vec![
        ("none", base.clone()),
        ("host", Setup { placement: Placement::Host, ..base.clone() }),
        ("disk", on_disk("disk", copies(0, 0))),
        ("disk, copies", on_disk("copies", copies(3, 1))),
        ("disk, all copied", on_disk("all", copies(9, 9))),
        ("disk, spilled", on_disk("spilled", WindowOverrides { kept_blocks: Some(2), ..spilled })),
        (
            "disk, activations kept there",
            on_disk("kept", WindowOverrides { kept_blocks: Some(0), kept_on_disk: Some(9), ..copies(0, 0) }),
        ),
        (
            "disk, some activations kept there",
            on_disk("some", WindowOverrides { kept_blocks: Some(1), kept_on_disk: Some(1), ..spilled }),
        ),
        (
            "disk, unclipped",
            Setup {
                clip: None,
                ..on_disk("unclipped", WindowOverrides { kept_blocks: Some(2), ..copies(1, 0) })
            },
        ),
        (
            "disk, one after the other",
            Setup { accumulation: Accumulation::Horizontal, ..on_disk("horizontal", spilled) },
        ),
        ("discrete, none", Setup { discrete: true, ..base.clone() }),
        (
            "discrete, host",
            Setup { discrete: true, placement: Placement::Host, overrides: on_device, ..base.clone() },
        ),
        (
            "discrete, activations on the host",
            Setup {
                discrete: true,
                placement: Placement::Host,
                overrides: WindowOverrides { kept_blocks: Some(1), kept_on_host: Some(1), ..on_device },
                ..base.clone()
            },
        ),
        (
            "discrete, activations on the host and on disk",
            Setup {
                discrete: true,
                ..on_disk(
                    "elsewhere",
                    WindowOverrides {
                        kept_blocks: Some(0),
                        kept_on_host: Some(1),
                        kept_on_disk: Some(1),
                        ..copies(0, 0)
                    },
                )
            },
        ),
        (
            "discrete, disk",
            Setup {
                discrete: true,
                ..on_disk("weights stay", WindowOverrides { device_groups: Some(2), ..copies(2, 1) })
            },
        ),
        (
            "discrete, disk written by saves",
            Setup {
                discrete: true,
                durability: Durability::Checkpoint,
                ..on_disk(
                    "saves",
                    WindowOverrides { state_groups: Some(2), device_groups: Some(3), ..copies(1, 1) },
                )
            },
        ),
    ]
}

#[test]
fn everything_is_where_the_plan_says() {
    let dir = tempfile::tempdir().unwrap();
    let mut told = HashSet::new();
    for (case, setup) in cases(dir.path()) {
        println!("{case}");
        let seen = Seen::of(&setup);
        let placement = &seen.placement;
        for group in placement {
            for part in &group.parts {
                is_seen(&seen, &setup, &group.name, part);
                told.insert((part.content.words(), part.place.to_string()));
            }
        }
        adds_up(&seen, &setup);
    }
    // The cases have all that there is.
    for (content, place) in [
        ("weights", "host"),
        ("weights", "disk"),
        ("weights", "disk + host copy"),
        ("weights", "disk + device copy"),
        ("weights", "disk + host copy + device copy"),
        ("weights", "host + device copy"),
        ("weights", "device"),
        ("weights", "device + disk at saves"),
        ("first moments", "disk + host copy"),
        ("gradients", "host"),
        ("gradients", "disk"),
        ("gradients", "device"),
        ("sums of gradients between micro-batches", "disk"),
        ("inputs of blocks", "host"),
        ("inputs of blocks", "disk"),
        ("activations of blocks", "host"),
        ("activations of blocks", "host, in turns"),
        ("activations of blocks", "device"),
        ("activations of blocks", "recomputed"),
    ] {
        assert!(told.contains(&(content, place.to_owned())), "no case has {content} in {place}: {told:#?}");
    }
}
