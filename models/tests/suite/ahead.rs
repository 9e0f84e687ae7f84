//! Passes of frozen weights from disk: what the next one needs first is read before it begins.

use crate::card;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_aio::IoEngine;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_aio::layer::StatsLayer;
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, cpu};
use terrace_models::{Model, RandomSource, TokenBatch};
use terrace_zero::{Backend, BatchLimits, Engine, EngineConfig, KvCache, Placement, WindowOverrides};

use crate::quantized::wide;

const PROMPT: [u32; 3] = [3, 14, 15];
const PASSES: u64 = 4;

fn engine(discrete: bool, weight_slots: usize, dir: &std::path::Path, io: Arc<dyn IoEngine>) -> Engine {
    let limits = BatchLimits { sequences: 1, length: 3, micro_batches: 1, cache_length: 12, cache_pages: 0 };
    let overrides = WindowOverrides {
        weight_slots: Some(weight_slots),
        device_groups: Some(1),
        ..WindowOverrides::default()
    };
    let config = EngineConfig {
        placement: Placement::Disk,
        disks: vec![dir.to_owned()],
        threads: 1,
        overrides,
        ..EngineConfig::new(DType::F32, limits)
    };
    let backend = card::backend(&io).unwrap_or_else(|| Backend {
        device: Arc::new(if discrete { HostDevice::discrete() } else { HostDevice::unified() }),
        kernels: cpu::kernel_set(1),
        updates: None,
        kernel_scratch_bytes: cpu::scratch_bytes(1) as u64,
        io,
    });
    let model = Model::new(wide(false));
    let sample = TokenBatch::new(&model.config).blank(1, 3);
    let mut source = RandomSource::for_config(&model.config, 1);
    Engine::create(config, backend, model.blocks, &sample, &mut source).unwrap()
}

fn pass(engine: &mut Engine, cache: &mut KvCache, first: bool) -> Vec<f32> {
    let model = wide(false);
    let batches = TokenBatch::new(&model);
    if first {
        return engine.logits(&batches.prefill(&[&PROMPT[..]], 3).unwrap(), cache, &[0], &[3]).unwrap();
    }
    engine.logits(&batches.decode(&[7], cache.lengths()).unwrap(), cache, &[0], &[1]).unwrap()
}

#[test]
fn the_next_pass_is_read_ahead() {
    for (discrete, weight_slots) in [(false, 1), (false, 3), (true, 1), (true, 3)] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let stats = Arc::new(StatsLayer::new(open_default(&IoConfig::default()).unwrap()));
        let mut engine = engine(discrete, weight_slots, dir.path(), Arc::clone(&stats) as _);
        let unified = !discrete && card::backend(&(Arc::clone(&stats) as _)).is_none();
        let mut cache = engine.new_cache(1).unwrap();
        let read = || stats.snapshot().read.bytes;
        let mut seen = Vec::new();
        for number in 0..PASSES {
            let before = read();
            pass(&mut engine, &mut cache, number == 0);
            // The reads of the next pass end by themselves.
            let began = Instant::now();
            let mut last = read();
            loop {
                std::thread::sleep(Duration::from_millis(20));
                let now = read();
                if now == last || began.elapsed() > Duration::from_secs(20) {
                    break;
                }
                last = now;
            }
            seen.push(last - before);
        }
        let work = engine.step_work().disk_read_bytes;
        let rest = &seen[2..];
        let words = format!("{seen:?} with {weight_slots} slots, discrete {discrete}; {work} a pass");
        if weight_slots > 1 {
            // What is still in memory when the pass ends is not read again.
            assert!(rest.iter().all(|bytes| *bytes <= work * 11 / 10), "{words}");
        } else {
            assert!(rest.iter().all(|bytes| *bytes == rest[0] && *bytes >= work), "{words}");
            // The first pass reads what the second begins with, too, and once what stays on the device.
            let ahead = seen[0] - rest[0];
            assert!(ahead > 0, "{words}");
            assert!(!unified || ahead < rest[0], "no more than there are slots for: {words}");
        }
        engine.remove_state().unwrap();
    }
}

/// A pass that is given up leaves reads behind that the next one does without.
#[test]
fn reads_ahead_change_no_bit() {
    let io = || open_default(&IoConfig::default()).unwrap();
    let logits = |discrete: bool, again: bool| -> Vec<Vec<f32>> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut engine = engine(discrete, 2, dir.path(), io());
        let mut all = Vec::new();
        for _ in 0..if again { 2 } else { 1 } {
            let mut cache = engine.new_cache(1).unwrap();
            all = (0..PASSES).map(|number| pass(&mut engine, &mut cache, number == 0)).collect();
        }
        all
    };
    let expected = logits(false, false);
    assert!(expected.windows(2).all(|pair| pair[0] != pair[1]));
    for (discrete, again) in [(false, true), (true, false), (true, true)] {
        assert_eq!(logits(discrete, again), expected, "discrete {discrete}, again {again}");
    }
}
