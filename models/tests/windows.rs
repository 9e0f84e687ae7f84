//! Windows fixed by hand: those with which no step can work are refused with what would, before anything is written.

#[path = "engine_support/mod.rs"]
mod support;

use support::Setup;
use terrace_kernels::DType;
use terrace_models::{Model, RandomSource};
use terrace_optimizer::{Algorithm, Lion, StateFormat};
use terrace_tiers::{Tier, TierError};
use terrace_zero::{
    Durability, Engine, EngineConfig, EngineError, HostTensor, Outlook, Placement, PlanningRuns,
    WindowOverrides,
};

fn refused(setup: &Setup, overrides: WindowOverrides, parts: &[&str]) {
    let setup = Setup { overrides, ..setup.clone() };
    let error = setup.try_create().expect_err("refused").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn chunks_that_cut_blocks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    for state in [StateFormat::Split, StateFormat::Fp32, StateFormat::Bf16, StateFormat::Compact] {
        let on_disk = Setup { state, ..Setup::on_disk(true, vec![disk.clone()]) };
        for setup in [Setup { state, ..Setup::new(true) }, on_disk] {
            for (elements, nearest) in
                [(0, "16384"), (1, "16384"), (33, "16384"), (10_000, "16384"), (16_384 + 32, "32768")]
            {
                let overrides = WindowOverrides { chunk_elements: Some(elements), ..setup.overrides };
                let named = format!("chunks of {elements} elements cannot be used");
                refused(&setup, overrides, &[&named, "multiple of 16384", nearest]);
            }
        }
    }
    assert!(!disk.exists(), "nothing is written before the windows are checked");
}

#[test]
fn what_no_step_can_work_with_is_refused() {
    let setup = Setup::new(true);
    let create = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = setup.config();
        change(&mut config);
        let (model, sample) = (Model::new(setup.model.clone()), setup.batches(0).swap_remove(0));
        let mut source = RandomSource::new(1);
        Engine::create(config, setup.backend(), model.blocks, &sample, &mut source).map(drop)
    };
    create(&|_| {}).unwrap();
    let clip = |clip: f64| create(&|config| config.training.as_mut().unwrap().clip = Some(clip));
    for (result, words) in [
        (clip(0.0), "TrainingConfig::clip is 0"),
        (clip(-1.0), "TrainingConfig::clip is -1"),
        (clip(f64::NAN), "TrainingConfig::clip is NaN"),
        (create(&|config| config.limits.sequences = 0), "BatchLimits::sequences is 0"),
        (create(&|config| config.limits.micro_batches = 0), "BatchLimits::micro_batches is 0"),
        (create(&|config| config.overrides.weight_slots = Some(0)), "WindowOverrides::weight_slots is 0"),
        (
            create(&|config| config.overrides.update_slots = Some(usize::MAX)),
            "WindowOverrides::update_slots is 18446744073709551615",
        ),
    ] {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Inputs that somebody else's batches have, or that lack some of their bytes.
#[test]
fn batches_that_are_not_those_that_were_planned() {
    let setup = Setup::new(true);
    let mut engine = setup.create();
    type Change = fn(&mut Vec<HostTensor>);
    let cases: [(Change, &str, bool); 4] = [
        (|inputs| inputs.truncate(5), "batches of 6 inputs were planned, not 5", true),
        (|inputs| inputs[1].dtype = DType::F32, "input 1 was planned in i32, not f32", true),
        (|inputs| inputs[2].bytes.truncate(3), "input 2 of ", true),
        (|inputs| inputs[0].dims.insert(0, 1), "input 0 was planned as ", false),
    ];
    for (change, words, evaluates) in cases {
        let mut batches = setup.batches(0);
        change(&mut batches[0].inputs);
        let error = engine.train_step(&batches, 1e-3).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
        if evaluates {
            let error = engine.evaluate(&batches[0]).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
    assert_eq!(engine.step(), 0);
    engine.train_step(&setup.batches(0), 1e-3).unwrap();
}

#[test]
fn any_chunk_that_is_not_refused_works() {
    let dir = tempfile::tempdir().unwrap();
    let expected = Setup { state: StateFormat::Compact, ..Setup::new(true) }.run(2);
    for elements in [16_384, 3 * 16_384] {
        let setup = Setup {
            state: StateFormat::Compact,
            overrides: WindowOverrides { chunk_elements: Some(elements), ..WindowOverrides::default() },
            ..Setup::on_disk(true, vec![dir.path().join(elements.to_string())])
        };
        assert_eq!(setup.run(2), expected, "{elements}");
    }
}

#[test]
fn frozen_weights_have_no_norm() {
    let setup = Setup::new(true);
    let create = |elements: usize| {
        let overrides = WindowOverrides { chunk_elements: Some(elements), ..WindowOverrides::default() };
        let config = EngineConfig { training: None, overrides, ..setup.config() };
        let mut source = RandomSource::for_config(&setup.model, 7);
        let blocks = Model::new(setup.model.clone()).blocks;
        Engine::create(config, setup.backend(), blocks, &setup.sample(), &mut source)
    };
    assert!(create(192).is_ok());
    let error = create(100).unwrap_err().to_string();
    assert!(error.contains("a multiple of 64, for example 128"), "{error}");
}

#[test]
fn windows_without_slots_are_refused() {
    let setup = Setup::new(true);
    let none = WindowOverrides::default();
    refused(&setup, WindowOverrides { weight_slots: Some(0), ..none }, &["weight_slots is 0"]);
    refused(&setup, WindowOverrides { update_slots: Some(0), ..none }, &["update_slots is 0"]);
    refused(&setup, WindowOverrides { gradient_groups: Some(0), ..none }, &["gradient_groups is 0"]);
}

fn outlook(setup: &Setup) -> terrace_zero::Result<Outlook> {
    let blocks = Model::new(setup.model.clone()).blocks;
    let runs = PlanningRuns::default();
    Engine::outlook(setup.config(), &setup.backend(), blocks, &setup.sample(), &runs)
}

/// Gradients come down whole where the device has room for that; where it has not, by chunks, and still to host memory.
#[test]
fn gradients_come_down_whole_where_there_is_room() {
    for (placement, clip) in [
        (Placement::Disk, Some(0.5)),
        (Placement::Host, Some(0.5)),
        (Placement::Host, None),
        (Placement::Disk, None),
    ] {
        let overrides = WindowOverrides {
            chunk_elements: Some(1 << 14),
            device_groups: Some(0),
            state_groups: Some(0),
            kept_blocks: Some(0),
            kept_on_host: Some(0),
            ..WindowOverrides::default()
        };
        let disks = vec!["nowhere".into()];
        let setup = Setup { discrete: true, placement, clip, disks, overrides, ..Setup::new(false) };
        let of = |gradients_whole, device_budget| {
            let overrides = WindowOverrides { gradients_whole, ..overrides };
            outlook(&Setup { overrides, device_budget, ..setup.clone() }).unwrap()
        };
        let by_chunks = of(Some(false), u64::MAX).memory.total(Tier::Device);
        let most = of(None, u64::MAX);
        let follows = placement == Placement::Disk && clip.is_none();
        assert_eq!(most.windows.gradients_whole, Some(!follows), "{placement:?}, {clip:?}");
        assert_eq!(most.memory.total(Tier::Device) > by_chunks, !follows, "{placement:?}, {clip:?}");
        let least = of(None, by_chunks).windows;
        let found = (least.gradients_whole, least.gradients_on_disk);
        assert_eq!(found, (Some(false), Some(false)), "{placement:?}, {clip:?}");
    }
}

/// The last groups stay on the device, as many as there is room for.
#[test]
fn what_a_device_has_room_for_stays_there() {
    for placement in [Placement::Host, Placement::Disk] {
        let disks = vec!["nowhere".into()];
        let setup = Setup { discrete: true, placement, disks, ..Setup::new(false) };
        let of = |device_groups, device_budget| {
            let kept_blocks = Some(0);
            let state_groups = Some(0);
            let overrides =
                WindowOverrides { device_groups, state_groups, kept_blocks, ..WindowOverrides::default() };
            outlook(&Setup { overrides, device_budget, ..setup.clone() })
        };
        let roomy = of(None, u64::MAX).unwrap();
        let groups = roomy.windows.device_groups.unwrap();
        assert!(groups > 3, "all {groups} groups");
        let mut seen = Vec::new();
        for staying in 0..=groups {
            let fixed = of(Some(staying), u64::MAX).unwrap();
            let bytes = fixed.memory.total(Tier::Device);
            let found = of(None, bytes).unwrap();
            // Slots for what streams may take more than places for it.
            let found_groups = found.windows.device_groups.unwrap();
            assert!(found_groups >= staying && found.memory.total(Tier::Device) <= bytes);
            assert!(found.work.upload_bytes <= fixed.work.upload_bytes);
            seen.push(fixed.work.upload_bytes);
            let next = of(Some(found_groups + 1), u64::MAX).unwrap();
            assert!(found_groups == groups || next.memory.total(Tier::Device) > bytes);
        }
        // The last block's weights are used twice in a row, which needs one upload anyhow.
        assert!(seen[0] == seen[1] && seen[1..].is_sorted_by(|more, less| more > less), "{seen:?}");
        assert_eq!(of(None, u64::MAX).unwrap().work, of(Some(groups), u64::MAX).unwrap().work);
    }
}

/// Without a host's memory to fall back on, all state is on the device; else what the host has no room for, or what the device
/// has room for beside all weights.
#[test]
fn a_device_holds_the_state_that_the_plan_gives_it() {
    let setup = Setup { discrete: true, ..Setup::new(false) };
    let bytes = |outlook: &Outlook, tier: Tier, what: &str| -> u64 {
        let entries = outlook.memory.entries().iter();
        entries
            .filter(|e| e.tier == tier && e.purpose.starts_with(what))
            .map(terrace_tiers::PlanEntry::bytes)
            .sum()
    };
    let here = outlook(&setup).unwrap();
    let all = here.windows.state_groups.unwrap();
    assert_eq!(here.windows.device_groups, Some(all));
    let state = bytes(&here, Tier::Device, "state on the device");
    assert!(state > here.parameters * 12 && bytes(&here, Tier::Host, "resident state") == 0);
    assert_eq!((bytes(&here, Tier::Host, "gradients"), here.work.parameters), (0, 0));
    // The host, alone and with what the device has room for.
    let host = Setup { placement: Placement::Host, ..setup.clone() };
    let fixed = |groups| {
        let overrides = WindowOverrides { state_groups: Some(groups), ..WindowOverrides::default() };
        outlook(&Setup { overrides, ..host.clone() }).unwrap()
    };
    let alone = fixed(0);
    assert!(bytes(&alone, Tier::Host, "resident state") > alone.parameters * 12);
    assert_eq!(outlook(&host).unwrap().windows.state_groups, Some(all), "there is room for all of it");
    let (roomy, tight) = (alone.memory.total(Tier::Host), fixed(all).memory.total(Tier::Host));
    let mut seen = Vec::new();
    for tenth in 0..=10 {
        let budget = tight + (roomy - tight) * tenth / 10;
        // No room for all weights beside what the plan needs there anyhow.
        let device_groups = Some(0);
        let overrides = WindowOverrides { device_groups, ..WindowOverrides::default() };
        let found = outlook(&Setup { host_budget: budget, overrides, ..host.clone() }).unwrap();
        let groups = found.windows.state_groups.unwrap();
        assert!(found.memory.total(Tier::Host) <= budget);
        assert!(groups == 0 || fixed(groups - 1).memory.total(Tier::Host) > budget, "{groups} groups");
        seen.push(groups);
    }
    assert!(seen[0] == all && seen[10] == 0 && seen.is_sorted_by(|more, less| more >= less), "{seen:?}");
    // Nobody has room.
    let device_budget = alone.memory.total(Tier::Device) / 4;
    assert!(outlook(&Setup { host_budget: roomy - 1, device_budget, ..host.clone() }).is_err());
}

/// Beside a disk a device has state only where nothing but saves writes it there, which is then neither read nor written in a step.
#[test]
fn a_device_holds_state_beside_a_disk_that_saves_write() {
    let dir = tempfile::tempdir().unwrap();
    let disks = vec![dir.path().join("disk")];
    let steps = Setup { discrete: true, ..Setup::on_disk(false, disks) };
    let saves = Setup { durability: Durability::Checkpoint, ..steps.clone() };
    let of = |setup: &Setup, state_groups: Option<usize>| {
        let overrides = WindowOverrides { state_groups, ..WindowOverrides::default() };
        outlook(&Setup { overrides, ..setup.clone() }).unwrap()
    };
    assert_eq!(of(&steps, None).windows.state_groups, Some(0));
    let all = of(&saves, None);
    assert_eq!(all.windows.state_groups, all.windows.device_groups, "there is room for all of it");
    assert_eq!((all.work.disk_read_bytes, all.work.disk_write_bytes), (0, 0));
    let (none, some) = (of(&saves, Some(0)), of(&saves, Some(2)));
    let (state, fewer) = (12, none.work.parameters - some.work.parameters);
    assert!(fewer > 0 && some.work.parameters > 0);
    assert_eq!(none.work.disk_write_bytes - some.work.disk_write_bytes, state * fewer);
    assert!(none.work.disk_read_bytes - some.work.disk_read_bytes >= state * fewer);
    assert!(some.memory.total(Tier::Host) < none.memory.total(Tier::Host), "gradients stay on the device");
    assert_eq!(some.memory.total(Tier::Disk), none.memory.total(Tier::Disk), "a save writes all");
    let part = of(&Setup { host_part: Some(0.5), ..saves }, None);
    assert!(part.work.parameters > 0 && part.work.parameters < none.work.parameters);
}

/// DeepSpeed's `ratio`: the host's part of the parameters, as near as groups come.
#[test]
fn the_host_holds_its_part_of_the_state() {
    let part = |host_part: f64| {
        let setup = Setup { placement: Placement::Host, discrete: true, ..Setup::new(false) };
        outlook(&Setup { host_part: Some(host_part), ..setup }).unwrap()
    };
    let all = part(1.0).work.parameters;
    let mut before = 0;
    for twentieth in 0..=20 {
        let found = part(f64::from(twentieth) / 20.0);
        assert!(found.work.parameters >= before);
        before = found.work.parameters;
        let off = (before as f64 / all as f64 - f64::from(twentieth) / 20.0).abs();
        assert!(off < 0.25, "{before} of {all} at {twentieth}/20");
    }
    assert_eq!((part(0.0).work.parameters, before), (0, all));
    // No kernel, no state there.
    let lion = Setup {
        placement: Placement::Host,
        discrete: true,
        optimizer: Algorithm::Lion(Lion::default()),
        ..Setup::new(false)
    };
    let error = outlook(&Setup { host_part: Some(0.5), ..lion.clone() }).unwrap_err().to_string();
    assert!(error.contains("lion") && error.contains("AdamW"), "{error}");
    assert_eq!(outlook(&lion).unwrap().windows.state_groups, Some(0));
    // Where the device is the host there is nothing to share.
    let unified = Setup { discrete: false, ..lion };
    assert_eq!(outlook(&Setup { host_part: Some(0.5), ..unified }).unwrap().work.parameters, all);
}

/// Given as overrides, the windows of a plan leave the planner no choice but that plan, however much memory there is.
#[test]
fn the_windows_of_a_plan_give_that_plan() {
    let mut seen: Vec<WindowOverrides> = Vec::new();
    for (tied, clip, discrete, overlap, placement) in [
        (true, Some(0.5), false, None, Placement::Disk),
        (false, None, false, None, Placement::Disk),
        (true, None, true, None, Placement::Disk),
        (false, None, false, Some(false), Placement::Disk),
        (true, Some(0.5), true, None, Placement::Host),
        (false, Some(0.5), true, None, Placement::Host),
    ] {
        let overrides = WindowOverrides { overlap, ..WindowOverrides::default() };
        let disks = vec!["nowhere".into()];
        let cache_bytes = u64::MAX;
        let setup = Setup { clip, discrete, overrides, placement, disks, cache_bytes, ..Setup::new(tied) };
        let roomy = outlook(&setup).unwrap().memory.total(Tier::Host);
        for part in 1..=200 {
            let budget = roomy * part / 200;
            let Ok(planned) = outlook(&Setup { host_budget: budget, ..setup.clone() }) else { continue };
            if seen.contains(&planned.windows) && part % 20 != 0 {
                continue;
            }
            seen.push(planned.windows);
            let again =
                outlook(&Setup { overrides: planned.windows, host_budget: u64::MAX, ..setup.clone() });
            let again = again.unwrap();
            assert_eq!(again.windows, planned.windows, "within {budget}");
            assert_eq!(again.memory.entries(), planned.memory.entries(), "{:?}", planned.windows);
            assert_eq!(again.work, planned.work, "{:?}", planned.windows);
        }
    }
    // The budgets made the planner use each of its means.
    let mut differ = 0;
    let mut twice = |values: Vec<String>| {
        assert!(values.iter().any(|value| *value != values[0]), "all are {}", values[0]);
        differ += 1;
    };
    let of = |what: fn(&WindowOverrides) -> String| seen.iter().map(what).collect::<Vec<_>>();
    twice(of(|w| format!("{:?} weight slots", w.weight_slots)));
    twice(of(|w| format!("chunks of {:?}", w.chunk_elements)));
    twice(of(|w| format!("{:?} update slots", w.update_slots)));
    twice(of(|w| format!("{:?} groups of gradients", w.gradient_groups)));
    twice(of(|w| format!("gradients on disk: {:?}", w.gradients_on_disk)));
    twice(of(|w| format!("activations on disk: {:?}", w.activations_on_disk)));
    twice(of(|w| format!("signals stay: {:?}", w.signals_stay)));
    twice(of(|w| format!("gradients come whole: {:?}", w.gradients_whole)));
    twice(of(|w| format!("{:?} blocks keep", w.kept_blocks)));
    twice(of(|w| format!("weights of {:?} groups", w.copied_weights)));
    twice(of(|w| format!("all of {:?} groups", w.copied_groups)));
    twice(of(|w| format!("weights of {:?} groups on the device", w.device_groups)));
    twice(of(|w| format!("state of {:?} groups on the device", w.state_groups)));
    twice(of(|w| format!("overlap: {:?}", w.overlap)));
    assert_eq!(differ, 14, "every field of {:?}", seen[0]);
}

/// What a plan takes is enough for it, also where all weights are less than slots as long as a large vocabulary's.
#[test]
fn a_plan_fits_in_what_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    let model = terrace_models::ModelConfig { vocab: 5000, ..Setup::new(true).model };
    let overrides = WindowOverrides { chunk_elements: Some(1 << 14), ..WindowOverrides::default() };
    let base = Setup { model, discrete: true, overrides, ..Setup::new(true) };
    let disks = vec![dir.path().join("disk")];
    let plan = |setup: &Setup| {
        let blocks = Model::new(setup.model.clone()).blocks;
        Engine::plan_only(setup.config(), &setup.backend(), blocks, &setup.sample())
    };
    for placement in [Placement::Disk, Placement::Host] {
        let setup = Setup { placement, disks: disks.clone(), ..base.clone() };
        let most = plan(&setup).unwrap().total(Tier::Device);
        plan(&Setup { device_budget: most, ..setup.clone() })
            .unwrap_or_else(|e| panic!("{placement:?}: {e}"));
        let refused =
            plan(&Setup { device_budget: 0, ..setup.clone() }).expect_err("nothing fits in nothing");
        let EngineError::Tier(TierError::Plan(refusal)) = refused else { panic!("{placement:?}: {refused}") };
        assert!(
            refusal.minimum <= most,
            "{placement:?}: {} is the least, and {most} are enough",
            refusal.minimum
        );
        plan(&Setup { device_budget: refusal.minimum, ..setup })
            .unwrap_or_else(|e| panic!("{placement:?}: {e}"));
    }
}
