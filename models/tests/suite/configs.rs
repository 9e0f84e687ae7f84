//! Configurations of released models, old and new spellings, and what is refused.

use crate::fixture::{Fixture, numbers};
use serde_json::{Value, json};
use terrace_kernels::{GateFunction, Scores};
use terrace_models::{
    Family, Mixture, ModelConfig, Multipliers, Norms, QkNorm, RopeScaling, SharedExpert, build, param_count,
};
use terrace_zero::ParamSpec;

#[test]
fn old_and_new_spellings_are_the_same_model() {
    for name in ["llama31", "mistral"] {
        let fixture = Fixture::new(name);
        let old = ModelConfig::parse(&fixture.json("config_old.json").to_string()).unwrap();
        assert_eq!(old, ModelConfig::from_folder(&fixture.folder).unwrap());
    }
}

#[test]
fn released_models_have_the_published_sizes() {
    // Llama 3.1 8B: 8,030,261,248 parameters.
    let llama = ModelConfig::parse(
        r#"{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "use_cache": true, "vocab_size": 128256}"#,
    );
    let llama = llama.unwrap();
    assert_eq!(param_count(&llama), 8_030_261_248);
    assert_eq!((llama.head_size, llama.eos_ids.len(), llama.rope.theta), (128, 3, 500_000.0));
    assert!(matches!(llama.rope.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));

    // Qwen2.5 0.5B: 494,032,768 parameters, the table counted once.
    let qwen = ModelConfig::parse(
        r#"{"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 151643, "hidden_act": "silu",
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true,
            "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    let qwen = qwen.unwrap();
    assert_eq!((param_count(&qwen), qwen.qkv_bias), (494_032_768, true));
    assert!(qwen.windows.iter().all(Option::is_none));

    // Qwen3 0.6B: 596,049,920 parameters.
    let qwen = ModelConfig::parse(
        r#"{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
            "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    assert_eq!(param_count(&qwen.unwrap()), 596_049_920);
}

#[test]
fn released_models_with_fused_projections_dropout_or_layers_without_positions() {
    // Phi 4: 14,659,507,200 parameters.
    let phi = ModelConfig::parse(
        r#"{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 100257,
            "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3",
            "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384, "pad_token_id": 100349, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}"#,
    );
    let phi = phi.unwrap();
    assert_eq!((param_count(&phi), phi.pad_id, phi.rope.theta), (14_659_507_200, Some(100_349), 250_000.0));
    assert!(phi.only_in_training.is_empty() && phi.windows.iter().all(Option::is_none));

    // Phi 4 mini: 3,836,021,760 parameters; three quarters of each head are rotated.
    let divisors = vec!["1.5"; 48].join(", ");
    let mini = ModelConfig::parse(&format!(
        r#"{{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 199999,
            "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
            "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3", "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999,
            "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {{"long_factor": [{divisors}], "short_factor": [{divisors}], "type": "longrope"}},
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "use_cache": true, "vocab_size": 200064}}"#
    ));
    let mini = mini.unwrap();
    assert_eq!((param_count(&mini), mini.rope.size, mini.head_size), (3_836_021_760, 96, 128));
    assert_eq!((mini.rope.short_positions(), mini.positions_max), (Some(4096), 131_072));
    assert!((mini.rope.attention_factor() - 1.190_238).abs() < 1e-6);

    // Seed-OSS 36B: 36,151,104,512 parameters.
    let seed = ModelConfig::parse(
        r#"{"architectures": ["SeedOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.1,
            "attention_out_bias": false, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
            "mlp_bias": false, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 155136}"#,
    );
    let seed = seed.unwrap();
    assert_eq!((param_count(&seed), seed.qkv_bias, seed.output_bias), (36_151_104_512, true, false));
    assert_eq!(seed.only_in_training, [("attention_dropout", 0.1), ("residual_dropout", 0.1)]);

    // SmolLM3 3B: 3,075,098,624 parameters; every fourth layer is not rotated.
    let smol = ModelConfig::parse(
        r#"{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 128012,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 65536,
            "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "use_sliding_window": false,
            "vocab_size": 128256}"#,
    );
    let smol = smol.unwrap();
    assert_eq!((param_count(&smol), smol.tied), (3_075_098_624, true));
    assert_eq!(smol.unrotated, [3, 7, 11, 15, 19, 23, 27, 31, 35]);
}

#[test]
fn released_models_whose_norms_follow() {
    // OLMo 2 7B: 7,298,617,344 parameters.
    let olmo = ModelConfig::parse(
        r#"{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32", "use_cache": false,
            "vocab_size": 100352}"#,
    );
    let olmo = olmo.unwrap();
    assert_eq!((param_count(&olmo), olmo.norms), (7_298_617_344, Norms::After));
    assert_eq!(
        (olmo.qk_norm, olmo.pad_id, olmo.rope.theta),
        (Some(QkNorm::AllHeads), Some(100_277), 500_000.0)
    );
    assert_eq!(olmo.window_rope, None);
}

#[test]
fn gemmas_add_one_to_norms_and_multiply_embeddings() {
    // Gemma 2B: 2,506,172,416 parameters.
    let gemma = ModelConfig::parse(
        r#"{"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 2,
            "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
            "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 256000}"#,
    );
    let gemma = gemma.unwrap();
    assert_eq!((param_count(&gemma), gemma.tied, gemma.norms), (2_506_172_416, true, Norms::Before));
    // Its folders say `gelu` and mean the other.
    assert_eq!((gemma.gate_function, gemma.norm_plus_one), (GateFunction::GeluTanh, true));
    assert_eq!((gemma.multipliers.embedding, gemma.multipliers.attention), (2048f32.sqrt(), None));

    // Gemma 3 1B: 999,885,952 parameters; every sixth layer sees everything.
    let gemma = ModelConfig::parse(
        r#"{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
            "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
            "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "use_cache": true, "vocab_size": 262144}"#,
    );
    let gemma = gemma.unwrap();
    assert_eq!((param_count(&gemma), gemma.tied, gemma.norms), (999_885_952, true, Norms::Both));
    assert_eq!((gemma.gate_function, gemma.qk_norm), (GateFunction::GeluTanh, Some(QkNorm::PerHead)));
    assert_eq!((gemma.multipliers.attention, gemma.head_size), (Some(1.0 / 16.0), 256));
    assert_eq!((gemma.rope.theta, gemma.window_rope.as_ref().unwrap().theta), (1e6, 1e4));
    let full: Vec<usize> = (0..26).filter(|layer| gemma.windows[*layer].is_none()).collect();
    assert_eq!((full, gemma.windows[0]), (vec![5, 11, 17, 23], Some(512)));
    assert_eq!(gemma.eos_ids, [1, 106]);
}

#[test]
fn released_models_with_experts() {
    let of = |text: &str| ModelConfig::parse(text).unwrap();
    // Mixtral 8x7B: 46,702,792,704 parameters.
    let mixtral = of(
        r#"{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 32000}"#,
    );
    assert_eq!(param_count(&mixtral), 46_702_792_704);
    assert!(mixtral.mixture.as_ref().unwrap().normalize && mixtral.windows == [None; 32]);
    assert!(mixtral.only_in_training.is_empty());
    let one_layer = ModelConfig { layers: 1, windows: vec![None], chunks: vec![None], ..mixtral };
    let params = build(&one_layer)[1].params().to_vec();
    let names: Vec<_> =
        params.into_iter().map(|param| param.name).filter(|name| name.contains("moe")).collect();
    // Its experts go in stages, and come first.
    assert_eq!((names.len(), names[24].as_str()), (25, "model.layers.0.block_sparse_moe.gate.weight"));
    assert_eq!(names[23], "model.layers.0.block_sparse_moe.experts.7.w2.weight");

    // Qwen 3 30B-A3B: 30,532,122,624 parameters.
    let qwen = of(
        r#"{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    assert_eq!(param_count(&qwen), 30_532_122_624);
    let expected = Mixture {
        experts: 128,
        chosen: 8,
        feed_forward: 768,
        scores: Scores::Softmax,
        groups: None,
        has_score_biases: false,
        normalize: true,
        scale: 1.0,
        weighs_inputs: false,
        biased: false,
        shared: None,
        is_beside_dense: false,
        experts_at_once: None,
        dense_layers: Vec::new(),
    };
    assert_eq!(qwen.mixture, Some(expected));

    // Qwen 2 57B-A14B: 57,408,658,944 parameters.
    let qwen = of(
        r#"{"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2_moe",
            "moe_intermediate_size": 2560, "norm_topk_prob": false, "num_attention_heads": 28, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4, "output_router_logits": false,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 20480, "sliding_window": 65536, "tie_word_embeddings": false,
            "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}"#,
    );
    let shared = Some(SharedExpert { feed_forward: 20480, is_gated: true });
    assert_eq!((param_count(&qwen), qwen.mixture.as_ref().unwrap().shared), (57_408_658_944, shared));
    assert!(qwen.qkv_bias && qwen.windows == [None; 28] && qwen.constants().is_empty());

    // GLM 4.5 Air: 106,852,245,504 parameters without the layer that predicts further tokens.
    let glm = of(
        r#"{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": true, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
            "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": false, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": true, "use_qk_norm": false,
            "vocab_size": 151552}"#,
    );
    assert_eq!((param_count(&glm), glm.qk_norm, glm.rope.size), (106_852_245_504, None, 64));
    let mixture = glm.mixture.as_ref().unwrap();
    assert_eq!((mixture.dense_layers.as_slice(), mixture.scores), (&[0][..], Scores::Sigmoid));
    assert_eq!(mixture.shared, Some(SharedExpert { feed_forward: 1408, is_gated: false }));
    let constants = glm.constants();
    let first = ParamSpec::new("model.layers.1.mlp.gate.e_score_correction_bias", &[128]);
    assert_eq!((constants.len(), &constants[0]), (45, &first));

    // OLMoE 1B-7B: 6,919,161,856 parameters.
    let olmoe = of(
        r#"{"architectures": ["OlmoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "clip_qkv": null,
            "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024,
            "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false, "num_attention_heads": 16,
            "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": false, "pad_token_id": 1, "rope_scaling": null, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
            "vocab_size": 50304}"#,
    );
    assert_eq!((param_count(&olmoe), olmoe.qk_norm), (6_919_161_856, Some(QkNorm::AllHeads)));
}

/// What GLM 4.5 leaves out, and what is refused of it.
#[test]
fn experts_with_one_beside_them() {
    let glm = |more: Value| {
        let mut config = json!({"architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 3});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(config)
    };
    let absent = glm(json!({"head_dim": 16})).unwrap();
    let mixture = absent.mixture.unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.feed_forward, mixture.scale), (128, 8, 1408, 1.0));
    assert_eq!((mixture.dense_layers.as_slice(), absent.rope.size), (&[0][..], 8));
    let several = glm(json!({"n_shared_experts": 3, "moe_intermediate_size": 10})).unwrap().mixture.unwrap();
    assert_eq!(several.shared, Some(SharedExpert { feed_forward: 30, is_gated: false }));
    assert_eq!(glm(json!({"n_shared_experts": 0})).unwrap().mixture.unwrap().shared, None);
    let all_dense = glm(json!({"first_k_dense_replace": 92})).unwrap();
    assert!((0..3).all(|layer| all_dense.mixture_of(layer).is_none()) && all_dense.constants().is_empty());
    for (more, parts) in [
        (json!({"n_group": 8, "topk_group": 9}), ["topk_group", "is 9, of 8 groups"]),
        (json!({"n_shared_experts": 1u64 << 31}), ["n_shared_experts", "that is too many"]),
        (json!({"routed_scaling_factor": -1}), ["routed_scaling_factor", "must be positive"]),
        (json!({"partial_rotary_factor": 0.3, "head_dim": 10}), ["partial_rotary_factor", "3 of the 10"]),
        (json!({"head_dim": 6}), ["partial_rotary_factor", "3 of the 6"]),
    ] {
        let error = glm(more).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// Which layers have experts, what an absent entry means, and what is refused.
#[test]
fn experts_of_some_layers() {
    let qwen = |more: Value| {
        let mut config = json!({"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(config)
    };
    let dense = |more| qwen(more).unwrap().mixture.unwrap().dense_layers;
    assert_eq!(dense(json!({})), [0; 0]);
    assert_eq!(dense(json!({"decoder_sparse_step": 3})), [0, 1, 3, 4]);
    assert_eq!(dense(json!({"decoder_sparse_step": 2, "mlp_only_layers": [3, 9]})), [0, 2, 3, 4]);
    let absent = qwen(json!({})).unwrap().mixture.unwrap();
    assert_eq!((absent.experts, absent.chosen, absent.feed_forward, absent.normalize), (128, 8, 768, false));
    assert_eq!(qwen(json!({"num_local_experts": 16})).unwrap().mixture.unwrap().experts, 16);
    assert_eq!(qwen(json!({"use_sliding_window": true})).unwrap().windows, [Some(4096); 6]);

    for (more, parts) in [
        (json!({"num_experts_per_tok": 9, "num_experts": 8}), ["num_experts_per_tok", "is 9, of 8 experts"]),
        (json!({"num_experts": 1_000_000}), ["num_experts", "more than 4096"]),
        (json!({"num_experts": 4096, "num_hidden_layers": 65}), ["num_experts", "more than 262144 in all"]),
        (json!({"mlp_only_layers": "all"}), ["mlp_only_layers", "an array of numbers"]),
        (json!({"clip_qkv": 8.0}), ["clip_qkv", "null"]),
    ] {
        let message = qwen(more).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    // What only training computes.
    let balanced = qwen(json!({"output_router_logits": true, "router_aux_loss_coef": 0.02})).unwrap();
    assert_eq!(balanced.only_in_training, [("router_aux_loss_coef", 0.02)]);
    let noisy = json!({"architectures": ["MixtralForCausalLM"], "router_jitter_noise": 0.1});
    assert_eq!(parse(noisy).unwrap().only_in_training, [("router_jitter_noise", 0.1)]);
}

/// Granite 3.1 8B: 8,170,848,256 parameters.
#[test]
fn models_may_multiply_what_they_compute() {
    let granite = |more: Value| {
        let mut config = json!({"architectures": ["GraniteForCausalLM"], "vocab_size": 49_155, "hidden_size": 4096,
            "intermediate_size": 12_800, "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "tie_word_embeddings": true});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ModelConfig::parse(&config.to_string())
    };
    let all = json!({"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.007_812_5,
        "logits_scaling": 16.0});
    let found = granite(all).unwrap();
    let expected = Multipliers {
        embedding: 12.0,
        embedding_is_rounded: false,
        residual: 0.22,
        attention: Some(1.0 / 128.0),
        logits: 1.0 / 16.0,
    };
    assert_eq!((param_count(&found), found.multipliers), (8_170_848_256, expected));
    // The class multiplies scores by 1 where nothing is said.
    let expected = Multipliers { attention: Some(1.0), ..Multipliers::NONE };
    assert_eq!(granite(json!({})).unwrap().multipliers, expected);
    for (key, value) in
        [("logits_scaling", 0.0), ("attention_multiplier", -1.0), ("residual_multiplier", 1e-300)]
    {
        let message = granite(json!({key: value})).unwrap_err().to_string();
        assert!(message.contains(key) && message.contains("positive"), "{message}");
    }
}

/// OLMo 3 7B: 7,298,011,136 parameters.
#[test]
fn layers_with_a_window_may_have_another_rotary_embedding() {
    let olmo = |more: Value| {
        let mut config = json!({"architectures": ["Olmo3ForCausalLM"], "vocab_size": 100_278, "hidden_size": 4096,
            "intermediate_size": 11_008, "max_position_embeddings": 65_536, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "sliding_window": 4096});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ModelConfig::parse(&config.to_string()).unwrap()
    };
    let yarn = json!({"attention_factor": 1.2, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn"});
    // The older spelling: the scaling is for layers that see everything, every fourth.
    let older = olmo(json!({"rope_scaling": yarn, "rope_theta": 500_000}));
    assert_eq!((param_count(&older), older.positions_max), (7_298_011_136, 65_536));
    let full: Vec<usize> = (0..32).filter(|layer| older.windows[*layer].is_none()).collect();
    assert_eq!(full, [3, 7, 11, 15, 19, 23, 27, 31]);
    let window = older.window_rope.as_ref().unwrap();
    assert_eq!((older.rope.attention_factor(), window.attention_factor(), window.theta), (1.2, 1.0, 5e5));

    // The same as transformers 5 writes it; and one embedding for both kinds.
    let mut of_full = yarn;
    of_full["rope_theta"] = json!(5e5);
    assert_eq!(olmo(json!({"rope_parameters": {"full_attention": of_full}})), older);
    let plain = olmo(json!({}));
    assert_eq!((plain.rope.theta, plain.window_rope.as_ref()), (5e5, Some(&plain.rope)));
}

/// What configurations leave out where the classes differ.
#[test]
fn defaults_follow_the_family() {
    let of = |architecture: &str| {
        let absent =
            json!({"architectures": [architecture], "num_key_value_heads": 4, "vocab_size": 200_000});
        let config = parse(absent).unwrap();
        let dropouts = config.only_in_training.len();
        (config.norm_eps, config.rope.theta, config.tied, config.pad_id, config.head_size, dropouts)
    };
    assert_eq!(of("LlamaForCausalLM"), (1e-6, 1e4, false, None, 16, 0));
    assert_eq!(of("Qwen3ForCausalLM"), (1e-6, 1e4, false, None, 128, 0));
    assert_eq!(of("Phi3ForCausalLM"), (1e-5, 1e4, false, Some(32_000), 16, 0));
    assert_eq!(of("SeedOssForCausalLM"), (1e-6, 1e4, false, Some(1), 128, 2));
    assert_eq!(of("SmolLM3ForCausalLM"), (1e-6, 2e6, true, Some(128_004), 16, 0));
    assert_eq!(of("Olmo2ForCausalLM"), (1e-5, 1e4, false, Some(1), 16, 0));
    assert_eq!(of("GemmaForCausalLM"), (1e-6, 1e4, true, Some(0), 256, 0));
    assert_eq!(of("Gemma2ForCausalLM"), (1e-6, 1e4, true, Some(0), 256, 0));
    assert_eq!(of("Gemma3ForCausalLM"), (1e-6, 1e6, true, Some(0), 256, 0));
    let null = json!({"architectures": ["Phi3ForCausalLM"], "pad_token_id": null});
    assert_eq!(parse(null).unwrap().pad_id, None);
    let listed = json!({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1, 1]});
    assert_eq!(parse(listed).unwrap().unrotated, [0]);
}

/// Every key of every kind of scaling, as transformers takes it.
#[test]
fn rotary_frequencies_are_those_of_transformers() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rope.json");
    let cases: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for case in cases {
        let config = parse(case["config"].clone()).unwrap();
        let short = config.rope.short_positions();
        let long = short.map(|positions| ("long_inv_freq", positions + 1));
        assert_eq!(long.is_some(), case.get("long_inv_freq").is_some(), "{}", case["config"]);
        for (key, positions) in [("inv_freq", short.unwrap_or(2048))].into_iter().chain(long) {
            let expected: Vec<f64> = numbers(&case[key]);
            let found = config.rope.inverse_frequencies(positions);
            assert_eq!(found.len(), expected.len());
            let off = |(a, b): (f64, f64)| (a - b).abs() / b;
            let worst = found.iter().map(|f| f64::from(*f)).zip(expected).map(off).fold(0.0, f64::max);
            assert!(worst < 1e-6, "{}: {key} off by {worst}", case["config"]);
        }
        let (factor, expected) = (config.rope.attention_factor(), case["attention_factor"].as_f64().unwrap());
        assert!((f64::from(factor) - expected).abs() < 1e-7, "{}: {factor}", case["config"]);
    }
}

#[test]
fn no_token_is_not_an_end() {
    let ends = |ids: Value| parse(json!({"eos_token_id": ids})).unwrap().eos_ids;
    assert_eq!((ends(json!(-1)), ends(json!([-1, 3])), ends(json!(null))), (vec![], vec![3], vec![]));
}

/// Where nobody asks for them, numbers that are none are no reason to refuse a model.
#[test]
fn configurations_that_python_wrote() {
    let text = |entry: &str| {
        format!(
            "\u{FEFF}{{\"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": 128, \"hidden_size\": 64, \"intermediate_size\": 96, \
             \"num_hidden_layers\": 2, \"num_attention_heads\": 4, {entry}}}"
        )
    };
    let with = |entry: &str| ModelConfig::parse(&text(entry)).map_err(|e| e.to_string());
    with("\"time_step_limit\": [0.0, Infinity]").unwrap();
    for (entry, place) in [
        ("\"rms_norm_eps\": NaN", "`rms_norm_eps` must be a number"),
        (
            "\"rope_scaling\": {\"type\": \"linear\", \"factor\": Infinity}",
            "`rope_scaling.factor` must be a number",
        ),
    ] {
        let message = with(entry).unwrap_err();
        assert!(message.contains(place), "{message}");
    }
}

#[test]
fn windows_follow_the_family() {
    let windows = |changes: Value| parse(changes).unwrap().windows;
    assert_eq!(windows(json!({"sliding_window": 5})), [None, None], "Llama has none");
    let mistral = json!("MistralForCausalLM");
    assert_eq!(windows(json!({"architectures": [mistral], "sliding_window": 5})), [Some(5), Some(5)]);
    assert_eq!(windows(json!({"architectures": [mistral], "sliding_window": null})), [None, None]);
    assert_eq!(windows(json!({"architectures": [mistral]})), [Some(4096), Some(4096)]);
    let kinds = json!({"architectures": [mistral], "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]});
    assert_eq!(windows(kinds), [None, Some(5)], "which transformers calls Ministral");
    let mut qwen =
        json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 5, "max_window_layers": 1});
    assert_eq!(windows(qwen.clone()), [None, None], "off by default");
    qwen["use_sliding_window"] = true.into();
    assert_eq!(windows(qwen.clone()), [None, Some(5)]);
    qwen["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_eq!(windows(qwen.clone()), [Some(5), None]);
    qwen["layer_types"] = json!(["sliding_attention"]);
    assert!(parse(qwen).unwrap_err().to_string().contains("1 entries for 2 layers"));
}

/// As the families' classes in transformers 5 have it.
#[test]
fn positions_follow_the_family() {
    let positions = |architecture: &str| {
        let config = parse(json!({"architectures": [architecture], "max_position_embeddings": null}));
        config.unwrap().positions_max
    };
    let families = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"];
    assert_eq!(families.map(positions), [2048, 131_072, 32_768, 32_768]);
}

/// Of a folder to which only the scaling was added, and of one that has the positions it leads to.
#[test]
fn yarn_stretches_positions() {
    for positions in [32_768, 131_072] {
        let scaling = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
        let config = parse(json!({"max_position_embeddings": positions, "rope_scaling": scaling}));
        assert_eq!(config.unwrap().positions_max, 131_072);
    }
}

/// Whose owner was told to leave the positions as they were, as those of yarn; and those who say the longer context under another name.
#[test]
fn linear_scaling_and_other_names_stretch_positions() {
    let positions = |more: Value| {
        let mut config = json!({"max_position_embeddings": 4096});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(config).unwrap().positions_max
    };
    let linear = json!({"type": "linear", "factor": 4.0});
    assert_eq!(positions(json!({})), 4096);
    assert_eq!(positions(json!({ "rope_scaling": linear })), 16_384);
    assert_eq!(positions(json!({"rope_scaling": linear, "max_sequence_length": 16_384})), 16_384);
    assert_eq!(positions(json!({"max_sequence_length": 16_384, "n_positions": 2048})), 16_384);
    // The frequencies of longer sequences would be others.
    let dynamic = json!({"type": "dynamic", "factor": 4.0});
    assert_eq!(positions(json!({"rope_scaling": dynamic, "max_sequence_length": 16_384})), 4096);
}

/// As the families' classes in transformers 5 have it.
#[test]
fn end_tokens_follow_the_family() {
    let ends = |architecture: &str, more: Value| {
        let mut config = json!({"architectures": [architecture], "vocab_size": 200_000});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(config).unwrap().eos_ids
    };
    let families = ["LlamaForCausalLM", "MistralForCausalLM", "SeedOssForCausalLM"];
    families.into_iter().for_each(|family| assert_eq!(ends(family, json!({})), [2], "{family}"));
    assert_eq!(ends("Phi3ForCausalLM", json!({})), [32_000]);
    assert_eq!(ends("SmolLM3ForCausalLM", json!({})), [128_001]);
    assert_eq!(ends("Olmo2ForCausalLM", json!({})), [50_279]);
    assert_eq!(ends("Gemma2ForCausalLM", json!({})), [1]);
    assert_eq!(ends("Gemma3ForCausalLM", json!({})), [1]);
    assert_eq!(ends("Qwen3ForCausalLM", json!({})), [0; 0]);
    assert_eq!(ends("LlamaForCausalLM", json!({"eos_token_id": null})), [0; 0]);
    assert_eq!(ends("LlamaForCausalLM", json!({"eos_token_id": 7})), [7]);
}

#[test]
fn biases_follow_the_family() {
    let biases = |architecture: &str| {
        let config =
            parse(json!({"architectures": [architecture], "attention_bias": true, "mlp_bias": true}));
        let config = config.unwrap();
        (config.qkv_bias, config.output_bias, config.mlp_bias)
    };
    assert_eq!(biases("LlamaForCausalLM"), (true, true, true));
    assert_eq!(biases("MistralForCausalLM"), (false, false, false));
    assert_eq!(biases("Qwen2ForCausalLM"), (true, false, false));
    assert_eq!(biases("Qwen3ForCausalLM"), (true, true, false));
    assert_eq!(biases("Phi3ForCausalLM"), (false, false, false));
    assert_eq!(biases("SeedOssForCausalLM"), (true, false, true));
    assert_eq!(biases("SmolLM3ForCausalLM"), (true, true, true));
    assert_eq!(biases("Olmo2ForCausalLM"), (true, true, false));
    assert_eq!(biases("GraniteForCausalLM"), (true, true, true));
    assert_eq!(biases("GemmaForCausalLM"), (true, true, false));
    assert_eq!(biases("Gemma2ForCausalLM"), (true, true, false));
    assert_eq!(biases("Gemma3ForCausalLM"), (true, true, false));
    let unnamed = json!({"architectures": null, "model_type": "qwen3"});
    assert_eq!(parse(unnamed).unwrap().family, Family::Qwen3);
}

#[test]
fn functions_of_the_gate() {
    for (name, function) in [
        (json!("silu"), GateFunction::Silu),
        (json!("swish"), GateFunction::Silu),
        (json!(null), GateFunction::Silu),
        (json!("gelu"), GateFunction::Gelu),
        (json!("gelu_new"), GateFunction::GeluTanh),
        (json!("gelu_pytorch_tanh"), GateFunction::GeluTanh),
    ] {
        assert_eq!(parse(json!({"hidden_act": name})).unwrap().gate_function, function, "{name}");
    }
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let refused = [
        (json!({"architectures": ["GPT2LMHeadModel"]}), vec!["GPT2LMHeadModel", "LlamaForCausalLM, Mistral"]),
        (json!({"architectures": null}), vec!["model_type (none)"]),
        (json!({"hidden_act": "quick_gelu"}), vec!["hidden_act", "quick_gelu", "\"gelu_pytorch_tanh\""]),
        (json!({"hidden_act": 3}), vec!["hidden_act", "a string", "3"]),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "relu"}),
            vec!["hidden_activation", "\"relu\"", "\"gelu_pytorch_tanh\""],
        ),
        (json!({"attn_logit_softcapping": 50.0}), vec!["attn_logit_softcapping", "50", "not capped"]),
        (
            json!({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 0.0}),
            vec!["attn_logit_softcapping", "positive"],
        ),
        (json!({"final_logit_softcapping": 30.0}), vec!["final_logit_softcapping", "30", "not capped"]),
        (
            json!({"use_bidirectional_attention": true}),
            vec!["use_bidirectional_attention", "a token sees those before it"],
        ),
        (json!({"quantization_config": {"quant_method": "gptq"}}), vec!["quantization_config", "gptq"]),
        (
            json!({"model_type": "mistral"}),
            vec!["`model_type` is \"mistral\" and `architectures` names LlamaForCausalLM"],
        ),
        (
            json!({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}),
            vec!["no_rope_layers", "1 entries for 2 layers"],
        ),
        (
            json!({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": "none"}),
            vec!["no_rope_layers", "array of numbers"],
        ),
        (json!({"hidden_size": null}), vec!["`hidden_size` is missing"]),
        (json!({"hidden_size": 0}), vec!["hidden_size", "positive integer", "found 0"]),
        (json!({"hidden_size": "64"}), vec!["hidden_size", "positive integer", "\"64\""]),
        (
            json!({"num_hidden_layers": 4_000_000_000_u64}),
            vec!["num_hidden_layers", "4000000000", "65536 layers"],
        ),
        (json!({"hidden_size": 66}), vec!["66", "num_attention_heads = 4"]),
        (json!({"num_key_value_heads": 3}), vec!["num_key_value_heads", "is 3", "num_attention_heads = 4"]),
        (json!({"head_dim": 15}), vec!["head_dim", "15", "even"]),
        (json!({"head_dim": 1024}), vec!["head_dim", "1024", "more than 576"]),
        (json!({"rms_norm_eps": 0}), vec!["rms_norm_eps", "positive"]),
        (json!({"tie_word_embeddings": "yes"}), vec!["tie_word_embeddings", "true or false"]),
        (json!({"eos_token_id": "</s>"}), vec!["eos_token_id", "token id"]),
    ];
    check_refusals(refused);
    assert!(ModelConfig::parse("{").unwrap_err().to_string().contains("not JSON"));
    assert!(ModelConfig::parse("[]").unwrap_err().to_string().contains("not a JSON object"));
}

#[test]
fn rotary_embeddings_that_cannot_be_are_refused_by_name() {
    check_refusals([
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            vec!["`max_position_embeddings` is missing", "dynamic"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "su", "factor": 2.0}}),
            vec!["\"su\"", "\"yarn\"", "longrope"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "longrope"}, "max_position_embeddings": 64}),
            vec!["`rope_parameters.short_factor` is missing"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2]}}),
            vec!["rope_parameters.short_factor", "has 2 numbers", "must have 8", "16 elements"],
        ),
        (json!({"rope_parameters": {"rope_type": "yarn"}}), vec!["`rope_parameters.factor` is missing"]),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 0}}),
            vec!["attention_factor", "positive"],
        ),
        (
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": -9}}),
            vec!["rope_scaling.mscale", "attention factor of -"],
        ),
        (json!({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}}), vec!["rope_theta"]),
        (
            json!({"architectures": ["Olmo3ForCausalLM"],
                   "max_position_embeddings": 64, "rope_parameters": {"sliding_attention": {"rope_type": "dynamic", "factor": 2.0}}}),
            vec!["layers with a window", "changes with the length", "\"yarn\""],
        ),
        (
            json!({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": {"rope_type": "default"}},
                   "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
            vec!["`rope_scaling` says something else than rope_parameters"],
        ),
        (json!({"partial_rotary_factor": 0.5}), vec!["partial_rotary_factor", "0.5"]),
        (json!({"rope_scaling": {"rope_type": "linear"}}), vec!["`rope_scaling.factor` is missing"]),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": -1}}), vec!["factor", "-1", "positive"]),
        (
            json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4}}),
            vec!["`rope_scaling` says something else than rope_parameters"],
        ),
        (
            json!({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "default", "rope_theta": 1e4}}),
            vec!["`rope_scaling` says something else than rope_parameters"],
        ),
        (
            json!({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "yarn", "factor": 4}}),
            vec!["`rope_scaling` says something else than rope_parameters"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}),
            vec!["`rope_parameters.full_attention` holds parameters of its own"],
        ),
        (
            json!({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 4.0}}),
            vec!["rope scaling type of Phi3ForCausalLM", "\"linear\"", "\"longrope\""],
        ),
        (
            json!({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "su", "short_factor": [1.0, 0.0]}}),
            vec!["rope_scaling.short_factor", "has 2 numbers", "must have 8"],
        ),
        (
            json!({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.2}),
            vec!["partial_rotary_factor", "3 of the 16 elements", "even"],
        ),
        (
            json!({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0}),
            vec!["partial_rotary_factor", "positive"],
        ),
    ]);
}

/// Configurations, and what the message of each names.
fn check_refusals(refused: impl IntoIterator<Item = (Value, Vec<&'static str>)>) {
    for (changes, parts) in refused {
        let message = parse(changes.clone()).expect_err(&changes.to_string()).to_string();
        for part in parts {
            assert!(message.contains(part), "{changes}: {message:?} names {part:?}");
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = ModelConfig::from_folder(folder.path()).unwrap_err().to_string();
    assert!(message.contains("config.json"), "{message}");
}

/// A small Llama with some entries changed.
fn parse(changes: Value) -> Result<ModelConfig, terrace_models::ModelError> {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    });
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    config.as_object_mut().unwrap().extend(changes);
    ModelConfig::parse(&config.to_string())
}
