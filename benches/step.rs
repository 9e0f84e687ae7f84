//! One training step of a small model, with its state in memory and on disk.
//!
//! The difference is what moving the state costs where the step is far too small to hide it. The disk is that of the temporary
//! directory; set `TMPDIR` to measure another.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::path::Path;
use terrace::models::{ModelConfig, RandomSource, Row, TokenBatch, build};
use terrace::{BatchLimits, DType, Engine, EngineConfig, IoConfig, MicroBatch, TrainingConfig, cpu_backend};

const SEQUENCES: usize = 2;
const LENGTH: usize = 128;

fn step(c: &mut Criterion) {
    let model = ModelConfig::parse(
        r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}"#,
    )
    .expect("a valid configuration");
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let batch = batch(&model);
    let mut group = c.benchmark_group("train_step");
    group.sample_size(10).throughput(Throughput::Elements((SEQUENCES * LENGTH) as u64));
    for (name, disk) in [("state in memory", None), ("state on disk", Some(directory.path()))] {
        let mut engine = engine(&model, disk);
        group.bench_function(name, |b| {
            b.iter(|| engine.train_step(std::slice::from_ref(&batch), 1e-4).expect("a step"));
        });
    }
    group.finish();
}

fn engine(model: &ModelConfig, disk: Option<&Path>) -> Engine {
    let limits = BatchLimits {
        sequences: SEQUENCES,
        length: LENGTH,
        micro_batches: 1,
        cache_length: 0,
        cache_pages: 0,
    };
    let training = Some(TrainingConfig::default());
    let config = EngineConfig { training, ..EngineConfig::new(DType::BF16, limits) };
    let threads = config.threads;
    let mut builder = Engine::builder(config)
        .backend(cpu_backend(threads, &IoConfig::default()).expect("the CPU is always there"));
    if let Some(disk) = disk {
        builder = builder.disks([disk]);
    }
    let sample = TokenBatch::new(model).blank(SEQUENCES, LENGTH);
    builder.create(build(model), &sample, &mut RandomSource::new(1)).expect("a small model fits")
}

fn batch(model: &ModelConfig) -> MicroBatch {
    let ids: Vec<u32> = (0..LENGTH as u32).map(|i| i * 37 % model.vocab as u32).collect();
    let labels: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
    let row = Row { ids: &ids, labels: &labels };
    TokenBatch::new(model).train(&[row; SEQUENCES], SEQUENCES, LENGTH).expect("rows fit")
}

criterion_group!(benches, step);
criterion_main!(benches);
