//! The library in the hands of who embeds it: what cannot be is refused by an error, and the engine goes on.

use std::sync::Arc;
use terrace::models::{ModelConfig, RandomSource, TokenBatch, build};
use terrace::tiers::{Access, DiskStore, StoreView};
use terrace::{
    BatchLimits, DType, Engine, EngineConfig, IoConfig, IoEngine, Result, TrainingConfig, aio, cpu_backend,
};

const LIMITS: BatchLimits =
    BatchLimits { sequences: 2, length: 4, micro_batches: 1, cache_length: 32, cache_pages: 0 };

fn model() -> ModelConfig {
    let text = r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}"#;
    ModelConfig::parse(text).unwrap()
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
        let refused = refusal(engine(limits, Some(TrainingConfig::default())));
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
