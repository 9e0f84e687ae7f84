//! Tiles change rounding at most: a batch that needs several tiles agrees with its sequences one by one.

use crate::parity::furthest;
use crate::runner::Runner;
use std::collections::HashMap;
use terrace_kernels::{DType, reference};
use terrace_models::{Mixture, Model, ModelConfig, RandomSource, Row, TILE_ROWS, TokenBatch};

#[test]
fn layers_beyond_one_tile() {
    for architecture in [
        "Qwen3ForCausalLM",
        "Olmo2ForCausalLM",
        "GraniteForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "OlmoeForCausalLM",
        "Llama4ForCausalLM",
    ] {
        compare(config(architecture, 16, 4, 8, TILE_ROWS), 4, TILE_ROWS / 3);
    }
    let experts = r#""enable_moe_block": true, "top_k_experts": 2, "moe_intermediate_size": 8,"#;
    let more = format!("{OF_GEMMA4} {experts}");
    compare(config_with("Gemma4ForCausalLM", &more, 16, 4, 8, TILE_ROWS), 4, TILE_ROWS / 3);
}

/// Experts whose gradients are complete one after the other give what all of them give at once but for the order of sums; so do their tiles.
#[test]
fn experts_in_stages() {
    stages_agree(&config("OlmoeForCausalLM", 16, 4, 8, TILE_ROWS));
    stages_agree(&config("Llama4ForCausalLM", 16, 4, 8, TILE_ROWS));
}

fn stages_agree(base: &ModelConfig) {
    let staged = |at_once| {
        let mixture = base.mixture.clone().map(|mixture| Mixture { experts_at_once: at_once, ..mixture });
        ModelConfig { mixture, ..base.clone() }
    };
    compare(staged(Some(2)), 4, TILE_ROWS / 3);
    compare(staged(Some(1)), 1, 30);
    let gradients = |model: ModelConfig| {
        let mut source = RandomSource::for_config(&model, 3);
        let batches = TokenBatch::for_source(&model, &mut source).unwrap();
        let ids: Vec<u32> = (0..3000).map(|i| (i * 7919 % model.vocab) as u32).collect();
        let labels: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let batch = batches.train(&[Row { ids: &ids, labels: &labels }], 1, ids.len()).unwrap();
        let mut runner = Runner::new(Model::new(model), reference::kernel_set(), DType::F32, &mut source);
        runner.scratch_bytes = 64 << 20;
        let mut gradients = HashMap::new();
        runner.train(&batch, 1.0 / batch.loss_terms as f32, &mut gradients);
        gradients
    };
    let base = ModelConfig { positions_max: 3000, ..base.clone() };
    let expected = gradients(base.clone());
    for at_once in [1, 2] {
        let mixture =
            base.mixture.clone().map(|mixture| Mixture { experts_at_once: Some(at_once), ..mixture });
        for (name, gradient) in gradients(ModelConfig { mixture, ..base.clone() }) {
            let off = furthest(&gradient, &expected[&name]);
            assert!(off <= 1e-6, "gradient of {name} is off by {off}");
        }
    }
}

#[test]
fn logits_beyond_one_tile() {
    // At this vocabulary a tile has the minimum of 128 rows.
    for architecture in ["Qwen3ForCausalLM", "Gemma4ForCausalLM"] {
        compare(config(architecture, 70_000, 4, 8, 128), 3, 60);
    }
}

const OF_GEMMA4: &str = r#""hidden_size_per_layer_input": 0, "global_head_dim": 4, "attention_k_eq_v": true, "final_logit_softcapping": 2.0,"#;

const OF_LLAMA4: &str = r#""intermediate_size_mlp": 8, "num_local_experts": 3, "attention_chunk_size": 100, "use_qk_norm": false,"#;

fn config(
    architecture: &str,
    vocab: usize,
    hidden: usize,
    feed_forward: usize,
    positions: usize,
) -> ModelConfig {
    let more = match architecture {
        "Gemma4ForCausalLM" => OF_GEMMA4,
        "Llama4ForCausalLM" => OF_LLAMA4,
        _ => "",
    };
    config_with(architecture, more, vocab, hidden, feed_forward, positions)
}

fn config_with(
    architecture: &str,
    more: &str,
    vocab: usize,
    hidden: usize,
    feed_forward: usize,
    positions: usize,
) -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{{more} "architectures": ["{architecture}"], "vocab_size": {vocab}, "hidden_size": {hidden},
            "intermediate_size": {feed_forward}, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 2, "attention_bias": true, "initializer_range": 0.5,
            "max_position_embeddings": {positions}}}"#
    ))
    .unwrap()
}

fn compare(config: ModelConfig, sequences: usize, length: usize) {
    let vocab = config.vocab;
    let mut source = RandomSource::for_config(&config, 3);
    let batches = TokenBatch::for_source(&config, &mut source).unwrap();
    let mut runner = Runner::new(Model::new(config), reference::kernel_set(), DType::F32, &mut source);
    runner.scratch_bytes = 64 << 20;
    let ids: Vec<u32> = (0..sequences * length).map(|i| (i * 7919 % vocab) as u32).collect();
    let labels: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let rows: Vec<Row<'_>> =
        ids.chunks(length).zip(labels.chunks(length)).map(|(ids, labels)| Row { ids, labels }).collect();

    let (mut together, mut apart) = (HashMap::new(), HashMap::new());
    let batch = batches.train(&rows, sequences, length).unwrap();
    let scale = 1.0 / batch.loss_terms as f32;
    let loss = runner.train(&batch, scale, &mut together);
    let mut sum = 0.0;
    for row in rows {
        sum += runner.train(&batches.train(&[row], 1, length).unwrap(), scale, &mut apart);
    }
    assert!((loss - sum).abs() <= 1e-6 * sum.abs(), "{loss} and {sum}");
    for (name, gradient) in together {
        let off = furthest(&gradient, &apart[&name]);
        assert!(off <= 1e-6, "gradient of {name} is off by {off}");
    }
}
