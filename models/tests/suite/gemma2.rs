//! Gemma 2: sizes of released models, what their configurations leave out, and caps.

use crate::fixture::Fixture;
use crate::runner::Runner;
use serde_json::{Value, json};
use terrace_kernels::{DType, GateFunction, cpu};
use terrace_models::{Family, Model, ModelConfig, Multipliers, Norms, param_count};

/// The configuration of Gemma 2 2B, as published.
fn released() -> Value {
    json!({
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "use_cache": true, "vocab_size": 256_000
    })
}

fn with(changes: &Value) -> Result<ModelConfig, String> {
    let mut config = released();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    ModelConfig::parse(&config.to_string()).map_err(|e| e.to_string())
}

#[test]
fn released_models_have_their_sizes() {
    let small = with(&json!({})).unwrap();
    assert_eq!((small.family, param_count(&small)), (Family::Gemma2, 2_614_341_888));
    assert_eq!((small.tied, small.norms, small.norm_plus_one), (true, Norms::Both, true));
    assert_eq!((small.gate_function, small.qk_norm), (GateFunction::GeluTanh, None));
    assert_eq!((small.score_cap, small.logit_cap), (Some(50.0), Some(30.0)));
    let multipliers = Multipliers {
        embedding: 2304f32.sqrt(),
        embedding_is_rounded: true,
        attention: Some(1.0 / 16.0),
        ..Multipliers::NONE
    };
    assert_eq!(small.multipliers, multipliers);
    // Every other layer has a window, the first one too.
    let windows: Vec<_> = (0..26).map(|layer: usize| layer.is_multiple_of(2).then_some(4096)).collect();
    assert_eq!((small.windows, small.window_rope, small.rope.theta), (windows, None, 1e4));

    let medium = with(&json!({
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8
    }));
    assert_eq!(param_count(&medium.unwrap()), 9_241_705_984);
    // Queries are multiplied by another number than the root of their heads' size.
    let large = with(&json!({
        "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_hidden_layers": 46,
        "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144
    }));
    let large = large.unwrap();
    assert_eq!(param_count(&large), 27_227_128_320);
    assert_eq!((large.head_size, large.multipliers.attention), (128, Some(1.0 / 12.0)));
}

/// What transformers fills in; null means that nothing is capped.
#[test]
fn absent_entries_are_those_of_the_class() {
    let mut bare = released();
    let stays = [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    ];
    bare.as_object_mut().unwrap().retain(|key, _| stays.contains(&key.as_str()));
    assert_eq!(ModelConfig::parse(&bare.to_string()).unwrap(), with(&json!({})).unwrap());
    let null = with(&json!({"attn_logit_softcapping": null, "final_logit_softcapping": null})).unwrap();
    assert_eq!((null.score_cap, null.logit_cap), (None, None));
    let listed =
        with(&json!({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}));
    assert_eq!(listed.unwrap().windows, [None, Some(4096)]);
}

#[test]
fn what_is_refused_is_named() {
    for (changes, named) in [
        (json!({"attn_logit_softcapping": 0.0}), ["attn_logit_softcapping", "positive"]),
        (json!({"attn_logit_softcapping": -50.0}), ["attn_logit_softcapping", "positive"]),
        (json!({"attn_logit_softcapping": 1e-45}), ["attn_logit_softcapping", "tiny"]),
        (json!({"attn_logit_softcapping": "50"}), ["attn_logit_softcapping", "a number"]),
        (json!({"final_logit_softcapping": 0.0}), ["final_logit_softcapping", "positive"]),
        (json!({"use_bidirectional_attention": true}), ["use_bidirectional_attention", "before it"]),
        (json!({"query_pre_attn_scalar": 0}), ["query_pre_attn_scalar", "positive"]),
        (json!({"hidden_activation": "relu"}), ["hidden_activation", "relu"]),
    ] {
        let error = with(&changes).unwrap_err();
        named.iter().for_each(|name| assert!(error.contains(name), "{changes}: {error}"));
    }
    // No released model caps scores of latents.
    let mut latent = ModelConfig::from_folder(&Fixture::new("deepseek_v2").folder).unwrap();
    latent.score_cap = Some(50.0);
    let error = latent.check().unwrap_err().to_string();
    assert!(error.contains("attn_logit_softcapping") && error.contains("latent"), "{error}");
}

/// A cap that is far above all scores and logits changes next to nothing, which is what no cap gives.
#[test]
fn a_cap_far_away_is_none() {
    let fixture = Fixture::new("gemma2");
    let ids = fixture.arrays("logits.safetensors")["input_ids"].ids();
    let logits = |score_cap, logit_cap| {
        let mut config = ModelConfig::from_folder(&fixture.folder).unwrap();
        (config.score_cap, config.logit_cap) = (score_cap, logit_cap);
        let mut runner =
            Runner::new(Model::new(config), cpu::kernel_set(2), DType::F32, &mut fixture.weights());
        let batch = fixture.batches(&runner.model.config).prefill(&[&ids[..20]], 20).unwrap();
        let mut cache = runner.cache(1, 20);
        runner.generate(&batch, &mut cache).swap_remove(0)
    };
    let (none, far, near) = (logits(None, None), logits(Some(1e4), Some(1e4)), logits(Some(1.5), None));
    let furthest = |of: &[f32]| crate::parity::furthest(of, &none);
    assert!(furthest(&far) < 1e-4 && furthest(&near) > 1e-2, "{} {}", furthest(&far), furthest(&near));
}
