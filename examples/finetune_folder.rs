//! Fine-tunes a Hugging Face model folder from the library, as `terrace finetune` does from the command line.
//!
//! ```text
//! cargo run --release --example finetune_folder                        # makes a tiny model and data itself
//! cargo run --release --example finetune_folder -- MODEL DATA OUTPUT   # a model folder, a .jsonl or .txt, a new folder
//! ```

use serde_json::json;
use std::error::Error;
use std::path::{Path, PathBuf};
use terrace::data::{DataConfig, Dataset, Sampler, TextTokenizer};
use terrace::models::{
    Model, ModelConfig, RandomSource, Row, SafetensorsSource, TokenBatch, build, export_folder,
};
use terrace::optimizer::{Schedule, ScheduleKind};
use terrace::{
    BatchLimits, Block, DType, Engine, EngineConfig, EngineError, IoConfig, MicroBatch, TrainingConfig,
    cpu_backend,
};

/// Sequences in a micro-batch, micro-batches in a step, tokens in a sequence, steps.
const SEQUENCES: usize = 2;
const MICRO_BATCHES: usize = 2;
const LENGTH: usize = 64;
const STEPS: u64 = 20;
/// Bytes of the largest file of an exported model.
const SHARD_BYTES: u64 = 5_000_000_000;
const THREADS: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let work = tempfile::tempdir()?;
    let arguments: Vec<PathBuf> = std::env::args().skip(1).map(PathBuf::from).collect();
    let made = arguments.is_empty();
    let [model, data, output] = match <[PathBuf; 3]>::try_from(arguments) {
        Ok(given) => given,
        Err(_) if made => {
            let (model, data) = make_model_and_data(work.path())?;
            [model, data, work.path().join("trained")]
        }
        Err(_) => return Err("usage: finetune_folder [MODEL DATA OUTPUT]".into()),
    };

    // The model: its shape from config.json, its weights as a source that is read range by range, never as a whole.
    let config_text = std::fs::read_to_string(model.join("config.json"))?;
    let Model { config, blocks } = Model::new(ModelConfig::parse(&config_text)?);
    let described = Model::new(config.clone());
    // Says which tensor is missing or has another shape before anything is written.
    let mut weights = SafetensorsSource::for_model(&model, &described)?;

    // The data: tokenised once into a file in the work directory, then read by sample number.
    let tokenizer = TextTokenizer::find(&model)?;
    let tokenizer_path = TextTokenizer::file_of(&model);
    let data_config = DataConfig { seq_len: LENGTH, pack: false, vocab_size: config.vocab, tokenizer_path };
    let data = Dataset::build(&data, tokenizer.as_ref(), &data_config, work.path())?;
    let sampler = Sampler::new(data.len(), SEQUENCES * MICRO_BATCHES, 0, true);
    let batches = TokenBatch::for_model(&model, &config)?;
    let batches_of = |step: u64| -> Result<Vec<MicroBatch>, Box<dyn Error>> {
        let samples = data.samples(&sampler.batch_indices(step))?;
        let rows: Vec<Row<'_>> = samples.iter().map(|s| Row { ids: &s.ids, labels: &s.labels }).collect();
        rows.chunks(SEQUENCES).map(|rows| Ok(batches.train(rows, SEQUENCES, LENGTH)?)).collect()
    };

    // The engine: all state on disk, at most 64 MiB of memory for everything that is planned.
    let training = Some(TrainingConfig::default());
    // Stored with the state and compared on resuming: whatever must not change in between.
    let identity = json!({ "model": config_text, "data": data.fingerprint() }).to_string();
    let engine_config = EngineConfig { training, identity, ..engine_config(64 << 20) };
    let builder = Engine::builder(engine_config)
        .backend(cpu_backend(THREADS, &IoConfig::default())?)
        .disks([work.path().join("state")]);
    let mut engine = builder.create(blocks, &batches.blank(SEQUENCES, LENGTH), &mut weights)?;
    println!("{} parameters; {}", engine.parameters(), engine.plan_summary());

    let schedule = Schedule {
        kind: ScheduleKind::Cosine,
        warmup_steps: 2,
        total_steps: STEPS,
        base_lr: 3e-3,
        min_ratio: 0.1,
    }
    .checked()?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let report = engine.train_step(&batches_of(step)?, schedule.lr(step))?;
        println!("step {}: loss {:.4}, gradient norm {:.3}", report.step, report.loss, report.grad_norm);
        losses.push(report.loss);
    }

    // The result is a Hugging Face folder again: shards, config.json, and the tokenizer of the folder it came from.
    export_folder(&mut engine.weights()?, Some(&model), &output, SHARD_BYTES, &config_text)?;
    println!("wrote {}", output.display());

    // What was written is what was trained, to the last bit.
    let probe = batches_of(0)?.swap_remove(0);
    let trained = engine.evaluate(&probe)?;
    drop(engine);
    let mut written = SafetensorsSource::for_model(&output, &described)?;
    let mut exported = frozen(described.blocks, &batches, &mut written)?;
    assert_eq!(exported.evaluate(&probe)?, trained);
    if made {
        assert!(losses[losses.len() - 1] < losses[0] - 0.5, "the made model learns: {losses:?}");
    }
    Ok(())
}

/// What both engines of this example have in common.
fn engine_config(host_budget: u64) -> EngineConfig {
    let limits = BatchLimits {
        sequences: SEQUENCES,
        length: LENGTH,
        micro_batches: MICRO_BATCHES,
        cache_length: 0,
        cache_pages: 0,
    };
    EngineConfig { host_budget, threads: THREADS, ..EngineConfig::new(DType::BF16, limits) }
}

/// An engine that only looks: no training state, weights in memory.
fn frozen(
    blocks: Vec<Box<dyn Block>>,
    batches: &TokenBatch,
    weights: &mut dyn terrace::WeightSource,
) -> Result<Engine, EngineError> {
    let backend = cpu_backend(THREADS, &IoConfig::default())?;
    let builder = Engine::builder(engine_config(u64::MAX)).backend(backend);
    builder.create(blocks, &batches.blank(SEQUENCES, LENGTH), weights)
}

/// A Llama of two small layers with random weights, whose tokens are bytes, and this file as pre-tokenized rows.
fn make_model_and_data(folder: &Path) -> Result<(PathBuf, PathBuf), Box<dyn Error>> {
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true
    });
    let text = config.to_string();
    let config = ModelConfig::parse(&text)?;
    let model = folder.join("model");
    let mut engine = frozen(build(&config), &TokenBatch::new(&config), &mut RandomSource::new(1))?;
    export_folder(&mut engine.weights()?, None, &model, SHARD_BYTES, &text)?;

    // Labels default to the ids; rows {"text"}, {"prompt", "completion"} and {"messages"} need a tokenizer in the folder.
    let rows = include_bytes!("finetune_folder.rs").chunks(LENGTH);
    let lines: Vec<String> = rows.map(|ids| json!({ "input_ids": ids }).to_string()).collect();
    let data = folder.join("data.jsonl");
    std::fs::write(&data, lines.join("\n"))?;
    Ok((model, data))
}
