//! Sequences that share the pages of one key/value cache.

use crate::card;
use crate::quantized::wide;
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, cpu};
use terrace_models::{Model, ModelConfig, RandomSource, TokenBatch};
use terrace_zero::{Backend, BatchLimits, CACHE_PAGE, Engine, EngineConfig, KvCache};

const LONGEST: usize = 150;
const CACHE: usize = 4 * CACHE_PAGE;

fn config() -> ModelConfig {
    ModelConfig { positions_max: CACHE, ..wide(false) }
}

fn engine(sequences: usize, cache_pages: usize) -> Engine {
    let limits =
        BatchLimits { sequences, length: LONGEST, micro_batches: 1, cache_length: CACHE, cache_pages };
    let config = EngineConfig { threads: 2, ..EngineConfig::new(DType::F32, limits) };
    let io = open_default(&IoConfig::default()).unwrap();
    let backend = card::backend(&io).unwrap_or_else(|| Backend {
        device: Arc::new(HostDevice::unified()),
        kernels: cpu::kernel_set(2),
        updates: None,
        kernel_scratch_bytes: cpu::scratch_bytes(2) as u64,
        io,
    });
    let model = Model::new(self::config());
    let sample = TokenBatch::new(&model.config).blank(sequences, LONGEST);
    let mut source = RandomSource::for_config(&model.config, 1);
    Engine::create(config, backend, model.blocks, &sample, &mut source).unwrap()
}

fn prompt(seed: usize, length: usize) -> Vec<u32> {
    (0..length).map(|t| ((seed * 31 + t * t * 7 + t) % 101) as u32).collect()
}

/// Runs rows `ids` of sequences over the cache.
fn pass(engine: &mut Engine, cache: &mut KvCache, rows: &[(usize, &[u32])]) -> Vec<Vec<f32>> {
    let (sequences, ids): (Vec<usize>, Vec<&[u32]>) = rows.iter().copied().unzip();
    let starts: Vec<usize> = sequences.iter().map(|&sequence| cache.lengths()[sequence]).collect();
    let added: Vec<usize> = ids.iter().map(|ids| ids.len()).collect();
    let longest = *added.iter().max().unwrap();
    let batch = TokenBatch::new(&config()).generate(&ids, &starts, longest).unwrap();
    let logits = engine.logits(&batch, cache, &sequences, &added).unwrap();
    logits.chunks_exact(101).map(<[f32]>::to_vec).collect()
}

/// The logits after each of the pieces of one sequence that has the cache for itself.
fn alone(pieces: &[&[u32]]) -> Vec<Vec<f32>> {
    let mut engine = engine(1, 0);
    let mut cache = engine.new_cache(1).unwrap();
    pieces.iter().flat_map(|piece| pass(&mut engine, &mut cache, &[(0, piece)])).collect()
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    let furthest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < 1e-4, "{what}: {furthest}");
}

#[test]
fn sequences_come_and_go() {
    let (a, b, c) = (prompt(1, 140), prompt(2, 5), prompt(3, 70));
    let (of_a, of_b, of_c) =
        (alone(&[&a, &[7]]), alone(&[&b, &[8], &[9], &[10]]), alone(&[&c, &[11], &[12]]));
    // a needs three pages, b one, c two: only in a's.
    let mut engine = engine(2, 4);
    let mut cache = engine.new_cache(2).unwrap();
    let first = pass(&mut engine, &mut cache, &[(0, &a), (1, &b)]);
    assert_eq!(cache.free_pages(), 0);
    assert_close("a's prompt", &first[0], &of_a[0]);
    assert_close("b's prompt", &first[1], &of_b[0]);
    let second = pass(&mut engine, &mut cache, &[(1, &[8]), (0, &[7])]);
    assert_close("b goes on", &second[0], &of_b[1]);
    assert_close("a goes on", &second[1], &of_a[1]);
    cache.clear(0);
    assert_eq!((cache.free_pages(), cache.lengths()), (3, &[0, 7 - 1][..]));
    let third = pass(&mut engine, &mut cache, &[(0, &c)]);
    assert_close("c's prompt", &third[0], &of_c[0]);
    let fourth = pass(&mut engine, &mut cache, &[(0, &[11]), (1, &[9])]);
    assert_close("c goes on", &fourth[0], &of_c[1]);
    assert_close("b goes on", &fourth[1], &of_b[2]);
    let fifth = pass(&mut engine, &mut cache, &[(1, &[10])]);
    assert_close("b alone", &fifth[0], &of_b[3]);
    let last = pass(&mut engine, &mut cache, &[(0, &[12])]);
    assert_close("c alone", &last[0], &of_c[2]);
}

#[test]
fn a_full_cache_is_refused() {
    let mut engine = engine(2, 4);
    let mut cache = engine.new_cache(2).unwrap();
    pass(&mut engine, &mut cache, &[(0, &prompt(1, 140)), (1, &prompt(2, 60))]);
    let batches = TokenBatch::new(&config());
    let mut refusal = |ids: &[u32], at: usize| {
        let batch = batches.generate(&[ids], &[cache.lengths()[at]], ids.len()).unwrap();
        engine.logits(&batch, &mut cache, &[at], &[ids.len()]).unwrap_err().to_string()
    };
    let words = refusal(&prompt(3, 5), 1);
    assert!(words.contains("no page is left in the key/value cache of 4 × 64 positions"), "{words}");
    let words = refusal(&prompt(3, 120), 0);
    assert!(words.contains("260 positions do not fit the key/value cache of 256"), "{words}");
    // What was there is still there.
    cache.clear(0);
    let found = pass(&mut engine, &mut cache, &[(1, &prompt(3, 5))]);
    assert_close("after a refusal", &found[0], &alone(&[&prompt(2, 60), &prompt(3, 5)])[1]);
}
