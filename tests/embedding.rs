//! The library in the hands of who embeds it: what cannot be is refused by an error, and the engine goes on.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace::models::{ModelConfig, RandomSource, Row, TokenBatch, batch, build};
use terrace::tiers::{Access, DiskStore, StoreView};
use terrace::{
    BatchLimits, DType, Engine, EngineConfig, EngineError, HostTensor, IoConfig, IoEngine, MicroBatch,
    Placement, PlanningRuns, Result, StateFormat, TrainingConfig, aio, cpu_backend,
};

const LIMITS: BatchLimits =
    BatchLimits { sequences: 2, length: 4, micro_batches: 1, cache_length: 32, cache_pages: 0 };

fn model() -> ModelConfig {
    let text = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}"#;
    ModelConfig::parse(text).unwrap()
}

fn fp32() -> TrainingConfig {
    TrainingConfig { state: StateFormat::Fp32, ..TrainingConfig::default() }
}

fn engine(limits: BatchLimits, training: Option<TrainingConfig>) -> Result<Engine> {
    let config = EngineConfig { training, host_budget: 64 << 20, ..EngineConfig::new(DType::F32, limits) };
    let builder = Engine::builder(config).backend(cpu_backend(1, &IoConfig::default())?);
    builder.create(build(&model()), &TokenBatch::new(&model()).blank(2, 4), &mut RandomSource::new(0))
}

fn refusal<T>(result: Result<T>) -> String {
    result.err().expect("it is refused").to_string()
}

/// Each of these panicked, or wrote over what another row or an earlier pass had left.
#[test]
fn passes_that_do_not_match_their_cache() {
    let batches = TokenBatch::new(&model());
    let mut engine_a = engine(LIMITS, None).unwrap();
    let mut engine_b = engine(LIMITS, None).unwrap();
    let mut cache = engine_a.new_cache(2).unwrap();
    let batch = batches.prefill(&[&[1, 2, 3], &[4, 5]], 4).unwrap();
    for (sequences, added, words) in [
        (&[0][..], &[3][..], "one sequence and one number"),
        (&[0, 1], &[3], "one sequence and one number"),
        (&[0, 7], &[3, 2], "row 1 continues sequence 7 of a cache of 2"),
        (&[0, 0], &[3, 2], "sequence 0 comes twice"),
        (&[0, 1], &[3, 5], "row 1 of 4 positions cannot add 5"),
        (&[0, 1], &[3, 0], "row 1 adds no position"),
    ] {
        let refused = refusal(engine_a.logits(&batch, &mut cache, sequences, added));
        assert!(refused.contains(words), "{refused}");
    }
    let refused = refusal(engine_b.logits(&batch, &mut cache, &[0, 1], &[3, 2]));
    assert!(refused.contains("another engine's"), "{refused}");
    assert_eq!(cache.lengths(), [0, 0]);
    // Nothing of it is left.
    let after = engine_a.logits(&batch, &mut cache, &[0, 1], &[3, 2]).unwrap();
    let mut cache = engine_b.new_cache(2).unwrap();
    assert_eq!(after, engine_b.logits(&batch, &mut cache, &[0, 1], &[3, 2]).unwrap());
}

/// Their bytes wrapped, and the plan had room for what was left.
#[test]
fn limits_that_no_memory_holds() {
    let huge = usize::MAX;
    for limits in [
        BatchLimits { sequences: huge, length: huge, ..LIMITS },
        BatchLimits { sequences: 1 << 40, length: 1 << 40, ..LIMITS },
        BatchLimits { micro_batches: huge, ..LIMITS },
        BatchLimits { cache_length: huge, ..LIMITS },
        BatchLimits { cache_pages: huge, ..LIMITS },
    ] {
        let refused = refusal(engine(limits, Some(fp32())));
        assert!(refused.starts_with("BatchLimits") && refused.contains("too large"), "{refused}");
    }
}

#[test]
fn batches_that_cannot_be_counted() {
    let batches = TokenBatch::new(&model());
    for refused in [
        batches.train(&[], 1 << 33, 1),
        batches.train(&[], usize::MAX, usize::MAX),
        batches.generate(&[&[1]], &[0], 1 << 33),
        batches.generate(&[&[1]], &[usize::MAX], 1),
    ] {
        refused.unwrap_err();
    }
}

#[test]
fn state_in_no_directory() {
    let io: Arc<dyn IoEngine> = aio::engine::open_default(&IoConfig::default()).unwrap();
    for refused in [
        DiskStore::open(&io, &[]).map(drop).unwrap_err().to_string(),
        StoreView::open(&io, &[], Access::Look).map(drop).unwrap_err().to_string(),
        refusal(Engine::stored(&io, &[])),
    ] {
        assert!(refused.contains("give at least one directory"), "{refused}");
    }
}

/// A batch with one number of an input replaced, which is how a hand goes wrong.
fn replaced(batch: &MicroBatch, input: usize, at: usize, number: i32) -> MicroBatch {
    let mut batch = batch.clone();
    batch.inputs[input].bytes[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes());
    batch
}

fn batch_refusal<T>(result: Result<T>) -> String {
    match result.err().expect("it is refused") {
        EngineError::Batch(message) => message,
        other => panic!("another error: {other:?}"),
    }
}

/// Each of the numbers of a batch that was filled by hand, in training and evaluation.
#[test]
fn numbers_outside_their_tables() {
    let batches = TokenBatch::new(&model());
    let (ids, labels) = ([1, 2, 3, 4], [1, 2, 3, 4]);
    let rows = [Row { ids: &ids, labels: &labels }; 2];
    let batch = batches.train(&rows, 2, 4).unwrap();
    let mut trained = engine(LIMITS, Some(fp32())).unwrap();
    let mut other = engine(LIMITS, Some(fp32())).unwrap();
    for (input, at, number, words) in [
        (batch::IDS, 6, 64, "id 64 at position 2 of row 1 is outside the vocabulary of 64 tokens"),
        (batch::IDS, 0, -1, "id -1 at position 0 of row 0 is outside"),
        (batch::IDS, 7, i32::MAX, "id 2147483647 at position 3 of row 1 is outside"),
        (batch::LABELS, 1, 64, "label 64 at position 1 of row 0 is outside"),
        (batch::LABELS, 1, -5, "5 labels carry loss, and loss_terms of the batch is 6"),
        (batch::STARTS, 1, 3, "row 1 starts at position 3; without a cache, rows start at 0"),
    ] {
        let wrong = replaced(&batch, input, at, number);
        for refused in [
            batch_refusal(trained.train_step(std::slice::from_ref(&wrong), 1e-3)),
            batch_refusal(trained.evaluate(&wrong)),
        ] {
            assert!(refused.contains(words), "{refused}");
        }
    }
    let mut fewer = batch.clone();
    fewer.inputs[batch::IDS] = HostTensor::from_i32(&[5], &[0; 5]);
    let refused = batch_refusal(trained.evaluate(&fewer));
    assert!(refused.contains("input 0 of a batch of 2 × 4 positions is i32, dimensions [8]"), "{refused}");
    // Nothing of it is left.
    let steps = [&mut trained, &mut other].map(|engine| {
        let losses = [0; 3].map(|_| engine.train_step(std::slice::from_ref(&batch), 1e-2).unwrap().loss);
        (engine.step(), losses)
    });
    assert_eq!(steps[0], steps[1]);
}

/// The same in generation, where rows go on from the cache.
#[test]
fn rows_that_are_not_where_they_say() {
    let batches = TokenBatch::new(&model());
    let mut engine_a = engine(LIMITS, None).unwrap();
    let mut engine_b = engine(LIMITS, None).unwrap();
    let prompt = batches.prefill(&[&[1, 2, 3], &[4, 5]], 4).unwrap();
    let begin = |engine: &mut Engine| {
        let mut cache = engine.new_cache(2).unwrap();
        engine.logits(&prompt, &mut cache, &[0, 1], &[3, 2]).unwrap();
        cache
    };
    let (mut cache, mut cache_b) = (begin(&mut engine_a), begin(&mut engine_b));
    let next = batches.decode(&[7, 8], &[3, 2]).unwrap();
    let mut refusal = |batch: &MicroBatch, added: &[usize]| {
        batch_refusal(engine_a.logits(batch, &mut cache, &[0, 1], added))
    };
    for (wrong, words) in [
        (replaced(&next, batch::IDS, 1, 64), "id 64 at position 0 of row 1 is outside"),
        (replaced(&next, batch::STARTS, 1, 0), "row 1 starts at position 0, and the cache has 2"),
        (replaced(&next, batch::STARTS, 0, -1), "row 0 starts at position -1, and the cache has 3"),
        (
            replaced(&next, batch::POSITIONS, 1, 9),
            "token 0 of row 1 is said to be at position 9, and is at 2",
        ),
        (replaced(&next, batch::LAST, 1, 99), "the last of which is token 1 of the batch, not 99"),
        (batches.decode(&[7, 8], &[2, 3]).unwrap(), "row 0 starts at position 2, and the cache has 3"),
        (batches.decode(&[7, 8], &[0, 0]).unwrap(), "row 0 starts at position 0, and the cache has 3"),
    ] {
        let refused = refusal(&wrong, &[1, 1]);
        assert!(refused.contains(words), "{refused}");
    }
    let longer = batches.generate(&[&[7, 8], &[9]], &[3, 2], 2).unwrap();
    let refused = refusal(&longer, &[2, 2]);
    assert!(refused.contains("row 1 adds 2 positions, the last of which is token 3"), "{refused}");
    let mut none = next.clone();
    (none.sequences, none.length) = (2, 0);
    assert!(refusal(&none, &[0, 0]).contains("adds no position"));
    assert_eq!(cache.lengths(), [3, 2]);
    let [after, before] = [(&mut engine_a, &mut cache), (&mut engine_b, &mut cache_b)]
        .map(|(engine, cache)| engine.logits(&next, cache, &[0, 1], &[1, 1]).unwrap());
    assert_eq!(after, before);
}

/// Every entry that takes a sample.
#[test]
fn samples_of_another_shape() {
    let config = |dir: Option<&Path>| EngineConfig {
        training: Some(fp32()),
        disks: dir.iter().map(PathBuf::from).collect(),
        placement: if dir.is_some() { Placement::Disk } else { Placement::None },
        ..EngineConfig::new(DType::F32, LIMITS)
    };
    let backend = || cpu_backend(1, &IoConfig::default()).unwrap();
    let batches = TokenBatch::new(&model());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let blocks = || build(&model());
    let source = || RandomSource::new(0);
    Engine::create(config(Some(dir.path())), backend(), blocks(), &batches.blank(2, 4), &mut source())
        .unwrap();
    let mut lacking = batches.blank(2, 4);
    lacking.inputs.pop();
    let mut torn = batches.blank(2, 4);
    torn.inputs[batch::INV_FREQ].bytes.pop();
    let mut misshapen = batches.blank(2, 4);
    misshapen.inputs[batch::STARTS] = HostTensor::from_i32(&[8], &[0; 8]);
    for (sample, words) in [
        (batches.blank(3, 4), "the sample batch has 3 sequences of 4 positions, BatchLimits 2 of 4"),
        (batches.blank(1, 8), "the sample batch has 1 sequences of 8 positions, BatchLimits 2 of 4"),
        (lacking, "the model reads 6 inputs, not 5"),
        (torn, "input 5 of [8] in f32 has 31 bytes"),
        (misshapen, "input 3 of a batch of 2 × 4 positions is i32, dimensions [2], not i32, [8]"),
    ] {
        let backend = backend();
        for refused in [
            refusal(Engine::create(config(None), backend.clone(), blocks(), &sample, &mut source())),
            refusal(Engine::resume(config(Some(dir.path())), backend.clone(), blocks(), &sample)),
            refusal(Engine::plan_only(config(None), &backend, blocks(), &sample)),
            refusal(Engine::outlook(config(None), &backend, blocks(), &sample, &PlanningRuns::default())),
            refusal(Engine::builder(config(None)).backend(backend.clone()).plan(blocks(), &sample)),
        ] {
            assert!(refused.contains(words), "{refused}");
        }
    }
}
