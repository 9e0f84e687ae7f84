//! Keys and values on the device, on host and on disk: the same bits, no byte more than needed, and errors that say what failed.

use crate::card;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use terrace_aio::engine::{EngineConfig as IoConfig, SimConfig, SimEngine, open_default};
use terrace_aio::layer::{Action, FaultConfig, FaultLayer, StatsLayer, TraceEvent, TraceLayer};
use terrace_aio::{IoEngine, IoErrorKind};
use terrace_device::Device;
use terrace_device::host::HostDevice;
use terrace_device::sim::{SimDevice, SimDeviceConfig};
use terrace_kernels::{DType, cpu};
use terrace_models::{Model, ModelConfig, RandomSource, TokenBatch};
use terrace_tiers::Tier;
use terrace_zero::{
    Backend, BatchLimits, CACHE_PAGE, Engine, EngineConfig, KvCache, Placement, WindowOverrides,
};

const LONGEST: usize = 150;
const CACHE: usize = 4 * CACHE_PAGE;
const LAYERS: usize = 5;
const BLOCK: usize = 4096;

/// A page of keys is a block and a half of disk in f32, so that pages share blocks.
fn model() -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["LlamaForCausalLM"],"vocab_size":101,"hidden_size":96,"intermediate_size":200,
        "num_hidden_layers":{LAYERS},"num_attention_heads":4,"num_key_value_heads":1,"max_position_embeddings":{CACHE},
        "initializer_range":0.08}}"#
    ))
    .unwrap()
}

/// Three layers of the gated delta rule, which carry what they know, and two of attention.
fn recurrent() -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["Qwen3_5ForCausalLM"],"vocab_size":101,"hidden_size":96,"intermediate_size":200,
        "num_hidden_layers":{LAYERS},"num_attention_heads":4,"num_key_value_heads":1,"head_dim":24,"max_position_embeddings":{CACHE},
        "linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":20,"linear_value_head_dim":12,
        "full_attention_interval":2,"partial_rotary_factor":0.5,"initializer_range":0.08}}"#
    ))
    .unwrap()
}

/// What is kept are latents, once for all heads, and no values.
fn latent() -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["DeepseekV3ForCausalLM"],"vocab_size":101,"hidden_size":96,"intermediate_size":200,
        "num_hidden_layers":{LAYERS},"num_attention_heads":4,"num_key_value_heads":4,"max_position_embeddings":{CACHE},
        "kv_lora_rank":20,"q_lora_rank":28,"qk_nope_head_dim":12,"qk_rope_head_dim":8,"v_head_dim":10,
        "first_k_dense_replace":{LAYERS},"initializer_range":0.08}}"#
    ))
    .unwrap()
}

/// Every other layer with a window, and with other heads than the rest.
fn by_layer() -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["Gemma4ForCausalLM"],"vocab_size":101,"hidden_size":96,"intermediate_size":200,
        "num_hidden_layers":{LAYERS},"num_attention_heads":4,"num_key_value_heads":2,"head_dim":24,"max_position_embeddings":{CACHE},
        "layer_types":["full_attention","sliding_attention","full_attention","sliding_attention","full_attention"],"sliding_window":70,
        "global_head_dim":40,"num_global_key_value_heads":1,"attention_k_eq_v":true,"hidden_size_per_layer_input":0,
        "initializer_range":0.08}}"#
    ))
    .unwrap()
}

type Describe = fn() -> ModelConfig;

struct Place {
    model: Describe,
    kv: Tier,
    device: Arc<dyn Device>,
    placement: Placement,
    /// Layers whose keys and values stay on the device, and in host memory; as many as fit if it is not said.
    held: Option<(usize, usize)>,
    dtype: DType,
    io: Arc<dyn IoEngine>,
    disks: Vec<PathBuf>,
    device_budget: u64,
    cache_bytes: u64,
    /// Weights come one group at a time, for every pass.
    streams: bool,
    /// Where they are, if they are real.
    _dir: Option<TempDir>,
}

impl Place {
    /// With weights in memory, and a directory on a real disk.
    fn new(kv: Tier, device: impl Device + 'static) -> Self {
        let (io, placement) = (open_default(&IoConfig::default()).unwrap(), Placement::None);
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disks = vec![dir.path().join("not yet there")];
        let device = Arc::new(device);
        let (held, dtype) = (Some((0, 0)), DType::F32);
        let (device_budget, cache_bytes, streams) = (u64::MAX, 0, false);
        let _dir = Some(dir);
        let model = model;
        Self {
            model,
            kv,
            device,
            placement,
            held,
            dtype,
            io,
            disks,
            device_budget,
            cache_bytes,
            streams,
            _dir,
        }
    }

    /// With simulated disks, two to stripe over.
    fn simulated(kv: Tier, device: impl Device + 'static, seed: u64) -> Self {
        let disks = ["/sim/a", "/sim/b"].map(PathBuf::from).to_vec();
        let io = Arc::new(SimEngine::new(SimConfig { seed, ..SimConfig::default() }));
        Self { io, disks, ..Self::new(kv, device) }
    }

    /// Of at most two sequences.
    fn engine(&self, cache_pages: usize) -> terrace_zero::Result<Engine> {
        let limits =
            BatchLimits { sequences: 2, length: LONGEST, micro_batches: 1, cache_length: CACHE, cache_pages };
        let config = EngineConfig {
            threads: 2,
            kv_tier: self.kv,
            overrides: WindowOverrides {
                kv_on_device: self.held.map(|held| held.0),
                kv_on_host: self.held.map(|held| held.1),
                weight_slots: self.streams.then_some(1),
                device_groups: self.streams.then_some(0),
                ..WindowOverrides::default()
            },
            device_budget: self.device_budget,
            cache_bytes: self.cache_bytes,
            placement: self.placement,
            disks: self.disks.clone(),
            ..EngineConfig::new(self.dtype, limits)
        };
        let backend = card::backend(&self.io).unwrap_or_else(|| Backend {
            device: Arc::clone(&self.device),
            kernels: cpu::kernel_set(2),
            updates: None,
            kernel_scratch_bytes: cpu::scratch_bytes(2) as u64,
            io: Arc::clone(&self.io),
        });
        let model = Model::new((self.model)());
        let sample = TokenBatch::new(&model.config).blank(2, LONGEST);
        let mut source = RandomSource::for_config(&model.config, 1);
        Engine::create(config, backend, model.blocks, &sample, &mut source)
    }
}

fn prompt(seed: usize, length: usize) -> Vec<u32> {
    (0..length).map(|t| ((seed * 31 + t * t * 7 + t) % 101) as u32).collect()
}

/// Runs rows of ids over the cache.
fn pass(
    engine: &mut Engine,
    cache: &mut KvCache,
    rows: &[(usize, &[u32])],
) -> terrace_zero::Result<Vec<u32>> {
    pass_of(model, engine, cache, rows)
}

fn pass_of(
    model: Describe,
    engine: &mut Engine,
    cache: &mut KvCache,
    rows: &[(usize, &[u32])],
) -> terrace_zero::Result<Vec<u32>> {
    let (sequences, ids): (Vec<usize>, Vec<&[u32]>) = rows.iter().copied().unzip();
    let starts: Vec<usize> = sequences.iter().map(|&sequence| cache.lengths()[sequence]).collect();
    let added: Vec<usize> = ids.iter().map(|ids| ids.len()).collect();
    let longest = *added.iter().max().unwrap();
    let model = model();
    let batches = TokenBatch::for_source(&model, &mut RandomSource::for_config(&model, 1)).unwrap();
    let batch = batches.generate(&ids, &starts, longest).unwrap();
    let logits = engine.logits(&batch, cache, &sequences, &added)?;
    Ok(logits.into_iter().map(f32::to_bits).collect())
}

/// Sequences that come, go on together and alone, leave their pages to others, and cross pages.
fn story(engine: &mut Engine) -> terrace_zero::Result<Vec<Vec<u32>>> {
    story_of(model, engine)
}

fn story_of(model: Describe, engine: &mut Engine) -> terrace_zero::Result<Vec<Vec<u32>>> {
    let pass = |engine: &mut Engine, cache: &mut KvCache, rows: &[(usize, &[u32])]| {
        pass_of(model, engine, cache, rows)
    };
    let (a, b, c) = (prompt(1, 140), prompt(2, 5), prompt(3, 70));
    let mut cache = engine.new_cache(2)?;
    let mut seen = vec![
        pass(engine, &mut cache, &[(0, &a), (1, &b)])?,
        pass(engine, &mut cache, &[(1, &[8]), (0, &[7])])?,
    ];
    cache.clear(0);
    // Alone, into pages beside those of the other, which waits.
    seen.push(pass(engine, &mut cache, &[(0, &c)])?);
    // An emulated card is slow.
    let steps = if on_card() { 2 } else { CACHE_PAGE as u32 - 2 };
    for step in 0..steps {
        seen.push(pass(engine, &mut cache, &[(0, &[step]), (1, &[step + 9])])?);
    }
    seen.push(pass(engine, &mut cache, &[(1, &prompt(4, 30))])?);
    seen.push(pass(engine, &mut cache, &[(0, &[1]), (1, &[2])])?);
    Ok(seen)
}

/// Whether every engine here computes on a card.
fn on_card() -> bool {
    card::is_named()
}

#[test]
fn numbers_are_those_of_a_cache_on_the_device() {
    let dtypes = if on_card() { &[DType::BF16][..] } else { &[DType::F32, DType::BF16] };
    for &dtype in dtypes {
        let told = |place: Place, name: &str| {
            let place = Place { dtype, ..place };
            let mut engine = place.engine(6).unwrap_or_else(|error| panic!("{name}: {error}"));
            story(&mut engine).unwrap_or_else(|error| panic!("{name}: {error}"))
        };
        let expected = told(Place::new(Tier::Device, HostDevice::unified()), "on the device");
        assert!(expected.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
        for kv in [Tier::Device, Tier::Host, Tier::Disk] {
            for (placement, held) in [
                (Placement::None, (0, 0)),
                (Placement::Host, (2, 0)),
                (Placement::Disk, (1, 2)),
                (Placement::None, (LAYERS, 0)),
            ] {
                let devices = if on_card() { &[true][..] } else { &[false, true] };
                for &discrete in devices {
                    let device = if discrete { HostDevice::discrete() } else { HostDevice::unified() };
                    // In host memory is where a device without memory of its own has it anyway.
                    let held = Some(if discrete { held } else { (held.0 + held.1, 0) });
                    let name =
                        format!("{dtype}, {kv:?}, discrete: {discrete}, weights on {placement}, {held:?}");
                    let place = Place { placement, held, ..Place::new(kv, device) };
                    assert!(told(place, &name) == expected, "{name}");
                }
            }
            // Whenever copies run, and however the disk reorders.
            let seeds = if on_card() { 0 } else { 4 };
            for seed in 0..seeds {
                let device = SimDevice::new(SimDeviceConfig { seed, ..SimDeviceConfig::default() });
                let held = Some((seed as usize % 3, seed as usize % 2));
                let name = format!("{dtype}, {kv:?}, seed {seed}");
                let place = Place { held, ..Place::simulated(kv, device, seed) };
                assert!(told(place, &name) == expected, "{name}");
            }
        }
    }
}

/// Layers whose keys and values are of several sizes.
#[test]
fn layers_with_heads_of_their_own() {
    tells_the_same(by_layer);
}

/// What recurrent layers carry stays where kernels are, wherever keys and values and weights are.
#[test]
fn recurrent_layers_carry_on() {
    tells_the_same(recurrent);
}

#[test]
fn latents_without_values() {
    tells_the_same(latent);
}

fn tells_the_same(model: Describe) {
    let told = |place: Place| story_of(model, &mut place.engine(6).unwrap()).unwrap();
    let place = |kv, device| Place { model, ..Place::new(kv, device) };
    let expected = told(place(Tier::Device, HostDevice::unified()));
    assert!(expected.iter().flatten().all(|&bits| f32::from_bits(bits).is_finite()));
    for kv in [Tier::Host, Tier::Disk] {
        for (placement, held) in [(Placement::None, (0, 0)), (Placement::Disk, (1, 1))] {
            let device = place(kv, HostDevice::discrete());
            let found = told(Place { placement, held: Some(held), ..device });
            assert!(found == expected, "{kv:?}, weights on {placement}, {held:?}");
        }
    }
    for seed in if on_card() { 0..0 } else { 0..4 } {
        let device = SimDevice::new(SimDeviceConfig { seed, ..SimDeviceConfig::default() });
        let kv = if seed % 2 == 0 { Tier::Host } else { Tier::Disk };
        let simulated = Place { model, ..Place::simulated(kv, device, seed) };
        assert!(told(simulated) == expected, "seed {seed}");
    }
}

/// A pass that fails has changed what layers carry, even where all keys and values are at home.
#[test]
fn what_a_failed_pass_carried_is_given_up() {
    let io = open_default(&IoConfig::default()).unwrap();
    let faults = Arc::new(FaultLayer::new(io, FaultConfig::default()));
    let new = Place::new(Tier::Device, HostDevice::unified());
    let (io, placement) = (Arc::clone(&faults) as _, Placement::Disk);
    let mut engine = Place { model: recurrent, io, placement, streams: true, ..new }.engine(0).unwrap();
    let run = |engine: &mut Engine, cache: &mut KvCache, ids: &[u32]| {
        pass_of(recurrent, engine, cache, &[(0, ids)])
    };
    let mut cache = engine.new_cache(1).unwrap();
    let begun = run(&mut engine, &mut cache, &[3, 4, 5]).unwrap();
    let expected = run(&mut engine, &mut cache, &[6]).unwrap();
    drop(cache);
    let mut cache = engine.new_cache(1).unwrap();
    assert_eq!(run(&mut engine, &mut cache, &[3, 4, 5]).unwrap(), begun);
    faults.fail_nth(Action::Read, 4, IoErrorKind::Device);
    let words = run(&mut engine, &mut cache, &[6]).unwrap_err().to_string();
    assert!(words.contains("Input/output error"), "{words}");
    let words = run(&mut engine, &mut cache, &[6]).unwrap_err().to_string();
    assert!(words.contains("recurrent layers") && words.contains("make another"), "{words}");
    drop(cache);
    let mut cache = engine.new_cache(1).unwrap();
    run(&mut engine, &mut cache, &[3, 4, 5]).unwrap();
    assert_eq!(run(&mut engine, &mut cache, &[6]).unwrap(), expected);
}

/// A copy that nobody waits for is found: the test above can fail.
#[test]
fn a_lost_wait_changes_numbers() {
    let expected = story(&mut Place::new(Tier::Device, HostDevice::unified()).engine(6).unwrap()).unwrap();
    for kv in [Tier::Host, Tier::Disk] {
        let differs = |seed| {
            let config = SimDeviceConfig { seed, lost_wait_one_in: 40, early_one_in: 8 };
            let mut engine = Place::simulated(kv, SimDevice::new(config), seed).engine(6).unwrap();
            story(&mut engine).is_ok_and(|seen| seen != expected)
        };
        assert!(on_card() || (0..20).any(differs));
    }
}

/// Positions that are needed come, those that were added go, and blocks that both share.
#[test]
fn no_byte_moves_without_need() {
    let (a, b) = (prompt(1, 140), prompt(2, 5));
    let passes: [&[(usize, &[u32])]; 3] = [&[(0, &a), (1, &b)], &[(0, &[7])], &[(1, &[7]), (0, &[7])]];
    // Bytes read and written by the first passes of a cache that is gone, so that nothing is under way.
    let moved_by = |count: usize| {
        let stats = Arc::new(StatsLayer::new(Arc::new(SimEngine::new(SimConfig::default())) as _));
        let place =
            Place { io: Arc::clone(&stats) as _, ..Place::simulated(Tier::Disk, HostDevice::unified(), 0) };
        let mut engine = place.engine(8).unwrap();
        let mut cache = engine.new_cache(2).unwrap();
        for rows in &passes[..count] {
            pass(&mut engine, &mut cache, rows).unwrap();
        }
        drop(cache);
        let moved = stats.snapshot();
        (moved.read.bytes, moved.write.bytes)
    };
    let totals: Vec<_> = (0..=passes.len()).map(moved_by).collect();
    let moved: Vec<_> = totals.windows(2).map(|two| (two[1].0 - two[0].0, two[1].1 - two[0].1)).collect();
    let position = 24 * 4;
    // Blocks that the keys, or the values, of positions from..to lie in.
    let blocks = |from: usize, to: usize| ((to * position).div_ceil(BLOCK) - from * position / BLOCK) as u64;
    let each = (2 * LAYERS * BLOCK) as u64;
    // The first sequence has the first three pages, the second one the fourth.
    let of_b = |positions| blocks(3 * CACHE_PAGE, 3 * CACHE_PAGE + positions);
    assert_eq!(moved[0], (0, (blocks(0, 140) + of_b(5)) * each), "prompts find nothing and fill pages");
    assert_eq!(moved[1], (blocks(0, 140) * each, each), "one position of one sequence");
    assert_eq!(moved[2], ((blocks(0, 141) + of_b(5)) * each, 2 * each), "one position of both");
}

/// Every request that a cache makes says whose keys and values it carries.
#[test]
fn requests_are_named_by_their_layers() {
    if on_card() {
        return;
    }
    let trace = Arc::new(TraceLayer::new(Arc::new(SimEngine::new(SimConfig::default())) as _, 1 << 12));
    let io = Arc::clone(&trace) as _;
    // Regions are numbered from the first layer that has one.
    let place = Place { io, held: Some((1, 2)), ..Place::simulated(Tier::Disk, HostDevice::discrete(), 0) };
    let mut engine = place.engine(8).unwrap();
    let mut cache = engine.new_cache(2).unwrap();
    let name = |engine: &Engine, cache: &KvCache, event: &TraceEvent| {
        assert_eq!(engine.contents_at(event.file, event.offset), None, "the engine has nothing on disk");
        engine.cache_contents_at(cache, event.file, event.offset)
    };
    let headers = trace.drain();
    assert!(!headers.is_empty() && headers.iter().all(|event| name(&engine, &cache, event).is_none()));
    let (a, b) = (prompt(1, 140), prompt(2, 5));
    pass(&mut engine, &mut cache, &[(0, &a), (1, &b)]).unwrap();
    pass(&mut engine, &mut cache, &[(0, &[7])]).unwrap();
    let mut moved = BTreeMap::<_, u64>::new();
    for event in trace.drain() {
        let what = name(&engine, &cache, &event).unwrap_or_else(|| panic!("{event:?} has no name"));
        *moved.entry((what, event.action == Action::Read)).or_default() += event.len;
    }
    let on_disk = |layer: usize| (format!("layers.{layer} keys and values"), true);
    let reads: Vec<_> = moved.keys().filter(|(_, read)| *read).cloned().collect();
    assert_eq!(reads, [3, 4].map(on_disk));
    assert_eq!(moved[&on_disk(3)], moved[&on_disk(4)]);
    // The last writes may be under way, those of the prompts are over.
    assert_eq!(moved.len(), 4, "{moved:?}");
}

#[test]
fn a_plan_says_where_the_cache_is() {
    let total =
        |kv, device: HostDevice, tier| Place::new(kv, device).engine(0).unwrap().memory_plan().total(tier);
    if on_card() {
        return;
    }
    // Keys and values of 2 × 4 pages, on 4 KiB each.
    let one = 2 * (8 * CACHE_PAGE * 24 * 4) as u64;
    let all = LAYERS as u64 * one;
    let [on_device, on_host] = [Tier::Device, Tier::Host]
        .map(|kv| [Tier::Device, Tier::Host].map(|tier| total(kv, HostDevice::discrete(), tier)));
    assert_eq!(on_host[1] - on_device[1], all);
    // Beside two windows, what lies between them may be placed otherwise.
    let saved = on_device[0] - on_host[0];
    assert!(saved.abs_diff(all - 2 * one) <= one / 8, "{saved}");
    let [device, disk] = [Tier::Device, Tier::Disk].map(|kv| total(kv, HostDevice::unified(), Tier::Host));
    let table = all / BLOCK as u64 * 8;
    assert!((device - disk).abs_diff(all - 3 * one - table) <= one / 8, "{}", device - disk);
    assert!(total(Tier::Disk, HostDevice::unified(), Tier::Disk) >= all);
    assert_eq!(total(Tier::Host, HostDevice::unified(), Tier::Host), device, "without a card it is the same");
}

/// What there is room for stays where it is used, then in host memory, and the rest is on disk.
#[test]
fn a_cache_takes_what_room_there_is() {
    if on_card() {
        return;
    }
    let one = 2 * (8 * CACHE_PAGE * 24 * 4) as u64;
    let held = |kv, discrete: bool, more: [u64; 2]| {
        let place = |held| {
            let device = if discrete { HostDevice::discrete() } else { HostDevice::unified() };
            Place { held, ..Place::new(kv, device) }
        };
        // With nothing held it fits exactly.
        let none = place(Some((0, 0))).engine(0).unwrap();
        let device_budget = none.memory_plan().total(Tier::Device) + more[0];
        let place = Place { device_budget, cache_bytes: more[1], ..place(None) };
        let engine = place.engine(0).unwrap();
        assert!(!discrete || engine.memory_plan().total(Tier::Device) <= device_budget);
        let windows = engine.windows();
        (windows.kv_on_device.unwrap(), windows.kv_on_host.unwrap())
    };
    let nearly = one - one / 4;
    assert_eq!(held(Tier::Host, true, [nearly, 0]), (0, 0));
    assert_eq!(held(Tier::Host, true, [2 * one + nearly, u64::MAX]), (2, 0));
    // Where all are held, they need no windows.
    assert_eq!(held(Tier::Host, true, [3 * one + nearly, u64::MAX]), (LAYERS, 0));
    assert_eq!(held(Tier::Disk, true, [one, 2 * one + nearly]), (1, 2));
    assert_eq!(held(Tier::Disk, true, [0, u64::MAX]), (0, LAYERS));
    assert_eq!(held(Tier::Disk, false, [0, 3 * one + nearly]), (3, 0));
    assert_eq!(held(Tier::Disk, false, [0, u64::MAX]), (LAYERS, 0));
}

#[test]
fn one_cache_at_a_time() {
    for kv in [Tier::Device, Tier::Host, Tier::Disk] {
        let engine = Place::new(kv, HostDevice::discrete()).engine(0).unwrap();
        let first = engine.new_cache(2).unwrap();
        let words = engine.new_cache(1).unwrap_err().to_string();
        assert!(words.contains("it is in use"), "{words}");
        drop(first);
        engine.new_cache(1).unwrap();
    }
}

#[test]
fn a_disk_that_fails_is_named() {
    let faults = FaultConfig { seed: 1, read_error_one_in: 12, ..FaultConfig::default() };
    let io = open_default(&IoConfig::default()).unwrap();
    let place =
        Place { io: Arc::new(FaultLayer::new(io, faults)), ..Place::new(Tier::Disk, HostDevice::unified()) };
    let file = place.disks[0].join("keys-and-values.bin");
    let outcome = place.engine(6).and_then(|mut engine| story(&mut engine));
    let words = outcome.expect_err("one read in twelve fails").to_string();
    assert!(words.contains(&file.display().to_string()), "{words}");
    assert!(!file.exists(), "scratch is removed");
    let none = Place { disks: Vec::new(), ..Place::new(Tier::Disk, HostDevice::unified()) };
    let words = none.engine(6).unwrap_err().to_string();
    assert!(words.contains("a key/value cache on disk needs a directory"), "{words}");
}

/// A pass that fails may have keys and values in use, wherever it fails.
#[test]
fn a_cache_of_a_pass_that_failed_is_given_up() {
    for kv in [Tier::Host, Tier::Disk] {
        for device in [HostDevice::unified(), HostDevice::discrete()] {
            let io = open_default(&IoConfig::default()).unwrap();
            let faults = Arc::new(FaultLayer::new(io, FaultConfig::default()));
            let new = Place::new(kv, device);
            let place =
                Place { io: Arc::clone(&faults) as _, placement: Placement::Disk, streams: true, ..new };
            let mut engine = place.engine(0).unwrap();
            let ids = prompt(1, 70);
            let run = |engine: &mut Engine, cache: &mut KvCache| pass(engine, cache, &[(0, &ids)]);
            let mut cache = engine.new_cache(1).unwrap();
            let expected = run(&mut engine, &mut cache).unwrap();
            drop(cache);
            let mut failed = 0;
            for nth in 0.. {
                let mut cache = engine.new_cache(1).unwrap();
                faults.fail_nth(Action::Read, nth, IoErrorKind::Device);
                let injected = faults.injected();
                let Err(error) = run(&mut engine, &mut cache) else { break };
                assert_eq!(faults.injected(), injected + 1);
                assert!(error.to_string().contains("Input/output error"), "{error}");
                assert_eq!(cache.lengths(), [0]);
                match run(&mut engine, &mut cache) {
                    Ok(found) => assert_eq!(found, expected, "read {nth}"),
                    Err(error) => assert!(error.to_string().contains("make another"), "{error}"),
                }
                drop(cache);
                let mut cache = engine.new_cache(1).unwrap();
                assert_eq!(run(&mut engine, &mut cache).unwrap(), expected, "read {nth}");
                failed += 1;
            }
            assert!(failed > 1);
        }
    }
}
