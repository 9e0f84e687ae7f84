//! Configurations of GLM 4, ERNIE 4.5, EXAONE 4, Hunyuan and Command as published: sizes, what absent entries mean, and what is refused.

use serde_json::{Value, json};
use terrace_kernels::{RopePairs, Scores};
use terrace_models::{
    ModelConfig, Norms, QkNorm, RopeScaling, SharedExpert, build, build_quantized, param_count,
};
use terrace_zero::ParamSpec;

/// A configuration with `more` in it.
fn with(mut config: Value, more: Value) -> Result<ModelConfig, String> {
    let Value::Object(more) = more else { panic!("{more} is no object") };
    config.as_object_mut().unwrap().extend(more);
    ModelConfig::parse(&config.to_string()).map_err(|e| e.to_string())
}

fn parse(config: Value) -> ModelConfig {
    with(config, json!({})).unwrap()
}

fn refused(config: &Value, more: Value, parts: &[&str]) {
    let message = with(config.clone(), more).unwrap_err();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

fn names(config: &ModelConfig, layer: usize) -> Vec<String> {
    build(config)[layer + 1].params().iter().map(|param| param.name.clone()).collect()
}

fn glm() -> Value {
    json!({"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151_329, 151_336, 151_338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 13_696, "max_position_embeddings": 32_768, "model_type": "glm4", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151_329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 151_552})
}

#[test]
fn glm_4_has_norms_on_both_sides() {
    // GLM 4 9B 0414: 9,400,279,040 parameters.
    let found = parse(glm());
    assert_eq!((param_count(&found), found.norms), (9_400_279_040, Norms::Both));
    assert_eq!((found.rope.size, found.rope_pairs), (64, RopePairs::Neighbours));
    assert_eq!((found.qkv_bias, found.output_bias, found.mlp_bias), (true, false, false));
    let norms: Vec<String> = names(&found, 3).into_iter().filter(|name| name.contains("norm")).collect();
    let expected =
        ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"];
    assert_eq!(norms, expected.map(|name| format!("model.layers.3.{name}.weight")));
    // GLM 4 32B 0414: 32,566,081,536 parameters.
    let large = json!({"attention_bias": false, "hidden_size": 6144, "intermediate_size": 23_040, "num_attention_heads": 48,
        "num_hidden_layers": 61});
    assert_eq!(param_count(&with(glm(), large).unwrap()), 32_566_081_536);
    // GLM 4 9B of 2024: 9,399,951,360 parameters.
    let older = json!({"architectures": ["GlmForCausalLM"], "model_type": "glm", "rms_norm_eps": 1.562_5e-7});
    let older = with(glm(), older).unwrap();
    assert_eq!((param_count(&older), older.norms, older.rope.size), (9_399_951_360, Norms::Before, 64));
    // What its class fills in, and takes null for.
    let absent = parse(
        json!({"architectures": ["Glm4ForCausalLM"], "vocab_size": 160_000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "eos_token_id": null}),
    );
    assert_eq!((absent.head_size, absent.kv_heads, absent.rope.size), (128, 2, 64));
    assert_eq!((absent.eos_ids, absent.pad_id), (vec![151_329, 151_336, 151_338], Some(151_329)));
    assert!(absent.qkv_bias && absent.norm_eps == 1.562_5e-7);
}

#[test]
fn ernie_4_5_rotates_neighbours() {
    // ERNIE 4.5 0.3B: 360,748,032 parameters.
    let ernie = json!({"architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131_072, "model_type": "ernie4_5",
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_bias": false, "use_cache": false,
        "vocab_size": 103_424});
    let found = parse(ernie.clone());
    assert_eq!((param_count(&found), found.tied), (360_748_032, true));
    assert_eq!((found.rope.size, found.rope_pairs), (128, RopePairs::Neighbours));
    refused(&ernie, json!({"use_bias": true}), &["use_bias", "false (in Ernie4_5ForCausalLM)"]);
    let absent = parse(
        json!({"architectures": ["Ernie4_5ForCausalLM"], "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4}),
    );
    assert_eq!((absent.head_size, absent.kv_heads, absent.rope.theta), (128, 2, 5e5));
    let null = with(ernie, json!({"head_dim": null, "num_key_value_heads": null})).unwrap();
    assert_eq!((null.head_size, null.kv_heads), (64, 16));
}

#[test]
fn ernie_4_5_with_experts() {
    // ERNIE 4.5 21B-A3B: 21,825,436,160 parameters.
    let ernie = json!({"architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 12_288, "max_position_embeddings": 131_072, "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64], "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
        "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": true,
        "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000, "tie_word_embeddings": true, "use_bias": false, "vocab_size": 103_424});
    let found = parse(ernie.clone());
    let mixture = found.mixture.as_ref().unwrap();
    assert_eq!((param_count(&found), found.head_size), (21_825_436_160, 128));
    assert_eq!((mixture.experts, mixture.chosen, mixture.scores), (64, 6, Scores::Softmax));
    assert_eq!((mixture.normalize, mixture.dense_layers.as_slice()), (true, &[0][..]));
    assert_eq!(mixture.shared, Some(SharedExpert { feed_forward: 3072, is_gated: false }));
    let constants = found.constants();
    let first = ParamSpec::new("model.layers.1.mlp.moe_statics.e_score_correction_bias", &[1, 64]);
    assert_eq!((constants.len(), &constants[0]), (27, &first));
    // ERNIE 4.5 300B-A47B: 299,484,160,000 parameters.
    let large = json!({"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 54, "num_attention_heads": 64,
        "num_key_value_heads": 8, "moe_intermediate_size": 3584, "moe_k": 8, "moe_num_shared_experts": 0, "moe_layer_start_index": 3,
        "moe_layer_end_index": 53, "tie_word_embeddings": false});
    let large = with(ernie.clone(), large).unwrap();
    assert_eq!((param_count(&large), large.mixture.as_ref().unwrap().shared), (299_484_160_000, None));

    let dense = |more| with(ernie.clone(), more).unwrap().mixture.unwrap().dense_layers;
    assert_eq!(dense(json!({"moe_layer_end_index": -1})), [0]);
    let all = json!({"num_hidden_layers": 6, "moe_layer_start_index": 0, "moe_layer_end_index": 4, "moe_layer_interval": 2});
    assert_eq!(dense(all), [0, 2, 4, 5]);
    refused(&ernie, json!({"moe_norm_min": 0.5}), &["moe_norm_min", "0.5", "at most"]);
    refused(&ernie, json!({"moe_num_shared_experts": 1u64 << 31}), &["moe_num_shared_experts", "too many"]);
    refused(&ernie, json!({"moe_layer_end_index": -2}), &["moe_layer_end_index", "at least 0"]);
}

#[test]
fn exaone_4_has_no_positions_where_it_sees_everything() {
    // EXAONE 4.0 32B: 32,003,216,384 parameters.
    let kinds: Vec<&str> =
        (1..=64).map(|layer| if layer % 4 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let exaone = json!({"architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27_392,
        "layer_types": kinds, "max_position_embeddings": 131_072, "model_type": "exaone4", "num_attention_heads": 40,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-5,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                         "rope_type": "llama3"},
        "rope_theta": 1_000_000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false,
        "vocab_size": 102_400});
    let found = parse(exaone.clone());
    assert_eq!((param_count(&found), found.norms), (32_003_216_384, Norms::After));
    assert_eq!((found.qk_norm, found.windows[0]), (Some(QkNorm::PerHead), Some(4096)));
    let every_fourth: Vec<usize> = (3..64).step_by(4).collect();
    assert_eq!(found.unrotated, every_fourth);
    // The older spelling.
    let counted = with(exaone.clone(), json!({"layer_types": null, "sliding_window_pattern": 4})).unwrap();
    assert_eq!((&counted.windows, &counted.unrotated), (&found.windows, &found.unrotated));
    refused(&exaone, json!({"layer_types": null}), &["sliding_window_pattern", "LLLG"]);
    // EXAONE 4.0 1.2B: 1,279,391,488 parameters, all layers see everything and are rotated.
    let small = json!({"head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096, "layer_types": vec!["full_attention"; 30],
        "num_attention_heads": 32, "num_hidden_layers": 30, "sliding_window": null, "sliding_window_pattern": null,
        "tie_word_embeddings": true});
    let small = with(exaone, small).unwrap();
    assert_eq!((param_count(&small), small.unrotated.len()), (1_279_391_488, 0));
    assert!(small.windows.iter().all(Option::is_none));
}

#[test]
fn hunyuan_normalizes_what_is_rotated() {
    // Hunyuan 7B: 7,504,568,320 parameters.
    let hunyuan = json!({"architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
        "bos_token_id": 1, "eos_token_id": 127_960, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14_336, "max_position_embeddings": 32_768, "model_type": "hunyuan_v1_dense",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 127_961, "rms_norm_eps": 1e-5,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "type": "dynamic"},
        "rope_theta": 10_000.0, "tie_word_embeddings": true, "use_cache": true, "use_qk_norm": true, "vocab_size": 128_167});
    let found = parse(hunyuan.clone());
    assert_eq!((param_count(&found), found.qk_norm), (7_504_568_320, Some(QkNorm::PerRotatedHead)));
    assert_eq!(
        (&found.rope.scaling, found.positions_max),
        (&RopeScaling::Stretched { alpha: 1000.0 }, 32_768)
    );
    assert_eq!(found.only_in_training, [("attention_dropout", 0.1)]);
    assert!(names(&found, 0).contains(&"model.layers.0.self_attn.query_layernorm.weight".to_owned()));
    // The base 10000·1000^(128/126).
    let second = found.rope.inverse_frequencies(0)[1];
    let expected = (1e4f64 * 1e3f64.powf(128.0 / 126.0)).powf(-2.0 / 128.0);
    assert!((f64::from(second) / expected - 1.0).abs() < 1e-6, "{second} is not {expected}");
    // Without alpha it is the usual one.
    let plain = json!({"rope_scaling": {"factor": 2.0, "type": "dynamic"}});
    assert_eq!(with(hunyuan.clone(), plain).unwrap().rope.scaling, RopeScaling::Dynamic);
    let negative = json!({"rope_scaling": {"alpha": -2.0, "type": "dynamic"}});
    refused(&hunyuan, negative, &["rope_scaling.alpha", "positive"]);

    // Hunyuan A13B: 80,393,183,232 parameters.
    let experts = json!({"architectures": ["HunYuanMoEV1ForCausalLM"], "attention_dropout": 0.0, "intermediate_size": 3072,
        "model_type": "hunyuan_v1_moe", "moe_intermediate_size": vec![3072; 32], "moe_topk": vec![8; 32], "num_experts": 64,
        "num_shared_expert": vec![1; 32], "use_mixed_mlp_moe": true});
    let found = with(hunyuan.clone(), experts.clone()).unwrap();
    let mixture = found.mixture.as_ref().unwrap();
    assert_eq!((param_count(&found), mixture.experts, mixture.chosen), (80_393_183_232, 64, 8));
    assert_eq!(mixture.shared, Some(SharedExpert { feed_forward: 3072, is_gated: false }));
    let names = names(&ModelConfig { layers: 1, windows: vec![None], chunks: vec![None], ..found }, 0);
    assert!(names.contains(&"model.layers.0.mlp.gate.wg.weight".to_owned()));
    assert!(names.contains(&"model.layers.0.mlp.shared_mlp.down_proj.weight".to_owned()));
    let mut several = hunyuan;
    several.as_object_mut().unwrap().extend(experts.as_object().unwrap().clone());
    refused(&several, json!({"moe_topk": [8, 4]}), &["moe_topk", "the same for each layer"]);
    refused(&several, json!({"moe_topk": [0, 0]}), &["moe_topk", "positive"]);
}

#[test]
fn command_has_its_halves_side_by_side() {
    // Command R7B: 8,028,033,024 parameters.
    let command = json!({"architectures": ["Cohere2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 5,
        "cache_implementation": "hybrid", "eos_token_id": 255_001, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14_336, "layer_norm_eps": 1e-5, "logit_scale": 0.25,
        "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
        "position_embedding_type": "rope_gptj", "rope_scaling": null, "rope_theta": 50_000, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": true, "use_gated_activation": true, "use_parallel_block": true,
        "use_parallel_embedding": true, "vocab_size": 256_000});
    let found = parse(command.clone());
    assert_eq!((param_count(&found), found.tied, found.is_beside), (8_028_033_024, true, true));
    assert_eq!((found.norm_centers, found.multipliers.logits, found.norm_eps), (true, 0.25, 1e-5));
    assert_eq!(
        (found.rope_pairs, found.rope.theta, found.windows[0]),
        (RopePairs::Neighbours, 5e4, Some(4096))
    );
    let every_fourth: Vec<usize> = (3..32).step_by(4).collect();
    assert_eq!(found.unrotated, every_fourth);
    let norms = names(&found, 0).into_iter().filter(|name| name.contains("norm")).count();
    assert_eq!(norms, 1);
    // Quantized like others: what is a matrix of a linear layer.
    let quantized = build_quantized(&found, terrace_kernels::QuantFormat::Int8);
    assert_eq!(quantized[1].params().iter().filter(|param| param.quantized.is_some()).count(), 7);
    // Command A: 111,057,580,032 parameters.
    let large = json!({"hidden_size": 12_288, "intermediate_size": 36_864, "num_attention_heads": 96, "num_hidden_layers": 64});
    assert_eq!(param_count(&with(command.clone(), large).unwrap()), 111_057_580_032);

    // Command R of August 2024: 32,296,476,672 parameters, all rotated, without windows.
    let older = json!({"architectures": ["CohereForCausalLM"], "model_type": "cohere", "hidden_size": 8192, "intermediate_size": 24_576,
        "max_position_embeddings": 131_072, "num_attention_heads": 64, "num_hidden_layers": 40, "rope_theta": 4e6, "logit_scale": 0.0625,
        "use_qk_norm": false});
    let found = with(command.clone(), older).unwrap();
    assert_eq!((param_count(&found), found.unrotated.len()), (32_296_476_672, 0));
    assert!(found.windows.iter().all(Option::is_none));
    let named = json!({"architectures": ["CohereForCausalLM"], "model_type": "cohere", "use_qk_norm": true});
    refused(&command, named, &["use_qk_norm", "false (in CohereForCausalLM)"]);
    refused(&command, json!({"logit_scale": 0.0}), &["logit_scale", "positive"]);
    refused(&command, json!({"layer_norm_eps": 0.0}), &["layer_norm_eps", "positive"]);
    // Hand-made ones.
    let bent = ModelConfig { norms: Norms::Both, ..parse(command) };
    assert!(bent.check().unwrap_err().to_string().contains("side by side"));
}
