//! Gemma 4: heads that differ from layer to layer, as configurations say it, and what of them is refused.

use crate::composite::tensors;
use crate::export::Copying;
use crate::fixture::Fixture;
use serde_json::{Value, json};
use terrace_kernels::{DType, GateFunction};
use terrace_models::{
    DecoderBlock, KvHeads, ModelConfig, ModelError, Norms, QkNorm, RopeScaling, export_folder, param_count,
};
use terrace_zero::Block;

/// The text of the 31B.
fn dense() -> Value {
    json!({
        "attention_bias": false, "attention_dropout": 0.0, "attention_k_eq_v": true, "bos_token_id": 2, "enable_moe_block": false,
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
        "intermediate_size": 21504, "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": true, "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": false, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}
        }
    })
}

/// What the classes with one embedding of all kinds of input leave out is another matter.
#[test]
fn the_unified_part_has_defaults_of_its_own() {
    let text = json!({"model_type": "gemma4_unified_text", "attention_k_eq_v": true, "num_global_key_value_heads": 1});
    let whole = json!({"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "text_config": text});
    let gemma = ModelConfig::parse(&whole.to_string()).unwrap();
    assert_eq!((gemma.windows[0], gemma.positions_max, gemma.layers), (Some(1024), 262_144, 30));
    assert_eq!(
        (gemma.heads_of(0), gemma.heads_of(5)),
        (KvHeads { count: 4, size: 256 }, KvHeads { count: 1, size: 512 })
    );
}

fn composite(text: &Value) -> Result<ModelConfig, ModelError> {
    let whole = json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106, 50], "model_type": "gemma4",
        "tie_word_embeddings": true, "vision_config": {"model_type": "gemma4_vision"}, "audio_config": null, "text_config": text
    });
    ModelConfig::parse(&whole.to_string())
}

/// Two layers and some changes.
fn parse(changes: Value) -> Result<ModelConfig, ModelError> {
    let mut config = json!({
        "architectures": ["Gemma4ForCausalLM"], "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size_per_layer_input": 0,
    });
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    config.as_object_mut().unwrap().extend(changes);
    ModelConfig::parse(&config.to_string())
}

/// 30,697,345,280 parameters, as transformers counts them.
#[test]
fn the_dense_model_has_its_size() {
    let gemma = composite(&dense()).unwrap();
    assert_eq!((param_count(&gemma), gemma.is_part, gemma.tied), (30_697_345_280, true, true));
    let full: Vec<usize> = (0..60).filter(|layer| gemma.windows[*layer].is_none()).collect();
    assert_eq!((full.len(), full[0], gemma.windows[0]), (10, 5, Some(1024)));
    let [of_window, of_full] = [(16, 256), (4, 512)].map(|(count, size)| KvHeads { count, size });
    assert_eq!((gemma.heads_of(4), gemma.heads_of(5)), (of_window, of_full));
    assert_eq!((gemma.query_width(4), gemma.query_width(5)), (8192, 16_384));
    assert_eq!((gemma.kv_width(4), gemma.kv_width(5)), (4096, 2048));
    let names = |layer| DecoderBlock::new(&gemma, layer).params().iter().map(|p| p.name.clone()).collect();
    let has_values = |names: Vec<String>| names.iter().any(|name| name.contains("v_proj"));
    assert!(has_values(names(4)) && !has_values(names(5)));
    // Generation keeps as much as each layer needs.
    let kept = |layer| DecoderBlock::new(&gemma, layer).kv().map(|kv| (kv.heads, kv.head_size));
    assert_eq!((kept(4), kept(5)), (Some((16, 256)), Some((4, 512))));
    assert_eq!(
        (gemma.norms, gemma.norm_plus_one, gemma.qk_norm),
        (Norms::Both, false, Some(QkNorm::PerHead))
    );
    assert_eq!((gemma.multipliers.attention, gemma.logit_cap), (Some(1.0), Some(30.0)));
    assert_eq!((gemma.gate_function, gemma.eos_ids.as_slice()), (GateFunction::GeluTanh, &[1, 106, 50][..]));
    assert_eq!((gemma.pad_id, gemma.positions_max), (Some(0), 262_144));
    let (rope, window) = (&gemma.rope, gemma.window_rope.as_ref().unwrap());
    assert_eq!((rope.theta, rope.size, window.theta, window.size), (1e6, 512, 1e4, 256));
    let frequencies = rope.inverse_frequencies(0);
    assert_eq!((frequencies.len(), frequencies.iter().filter(|f| **f != 0.0).count()), (256, 64));
    let constants = gemma.constants();
    assert_eq!((constants.len(), &*constants[59].name), (60, "model.layers.59.layer_scalar"));

    // What the rotary embeddings are where nothing is said.
    let mut text = dense();
    drop(text.as_object_mut().unwrap().remove("rope_parameters"));
    assert_eq!(composite(&text).unwrap(), gemma);
}

/// With the sizes of the 26B-A4B 25,233,141,760 parameters, as transformers counts them.
#[test]
fn the_model_with_experts_has_its_size() {
    let mut text = dense();
    let changes = json!({
        "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_global_key_value_heads": 2,
        "num_hidden_layers": 30, "num_key_value_heads": 8, "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
        "moe_intermediate_size": 704
    });
    let Value::Object(changes) = changes else { unreachable!() };
    text.as_object_mut().unwrap().extend(changes);
    let gemma = composite(&text).unwrap();
    assert_eq!(param_count(&gemma), 25_233_141_760);
    let mixture = gemma.mixture.as_ref().unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.feed_forward), (128, 8, 704));
    assert!(mixture.is_beside_dense && mixture.normalize && gemma.feed_forward == 2112);
}

/// transformers saves what it made of the entries for all layers.
#[test]
fn heads_are_said_of_kinds_of_layers_or_layer_by_layer() {
    let gemma = composite(&dense()).unwrap();
    let layers: Vec<usize> = (0..60).filter(|layer| layer % 6 == 5).collect();
    let by_layer = |layers: &[usize]| -> Value {
        let heads =
            |layer: &usize| (format!("{layer:02}"), json!({"head_dim": 512, "num_key_value_heads": 4}));
        Value::Object(layers.iter().map(heads).collect())
    };
    let saved = |others: Value| {
        let mut text = dense();
        let entries = text.as_object_mut().unwrap();
        ["global_head_dim", "num_global_key_value_heads"].iter().for_each(|key| drop(entries.remove(*key)));
        entries.insert("per_layer_config".into(), others);
        composite(&text)
    };
    assert_eq!(saved(by_layer(&layers)).unwrap(), gemma);
    assert_eq!(saved(json!({})).unwrap().full_heads, None, "it is not read together with the other spelling");
    let message = saved(by_layer(&layers[1..])).unwrap_err().to_string();
    assert!(message.contains("layer 11 with other heads"), "{message}");
    let message = saved(json!({"60": {}})).unwrap_err().to_string();
    assert!(message.contains("per_layer_config.60") && message.contains("none of 60 layers"), "{message}");
    let message = saved(json!({"5": {"intermediate_size": 7}})).unwrap_err().to_string();
    assert!(message.contains("\"intermediate_size\"") && message.contains("\"head_dim\""), "{message}");
}

#[test]
fn absent_entries_are_those_of_the_class() {
    let config = parse(json!({})).unwrap();
    assert_eq!(config.full_heads, Some(KvHeads { count: 2, size: 512 }));
    assert_eq!((config.windows.as_slice(), config.logit_cap), (&[Some(512), None][..], None));
    // Other heads for keys go with keys that are values.
    let heads = json!({"num_global_key_value_heads": 1, "global_head_dim": 16});
    assert_eq!(parse(heads.clone()).unwrap().full_heads, None);
    let mut both = heads;
    both["attention_k_eq_v"] = true.into();
    assert_eq!(parse(both).unwrap().full_heads, Some(KvHeads { count: 1, size: 16 }));
    // Nor is it the last layer that has a window.
    let kinds = json!({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9});
    assert_eq!(parse(kinds).unwrap().windows, [None, None]);
    let linear = json!({"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let linear = parse(json!({"rope_parameters": linear})).unwrap();
    assert_eq!((linear.rope.size, &linear.rope.scaling), (512, &RopeScaling::Linear { factor: 4.0 }));
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let proportional =
        |part: f64| json!({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": part});
    let ropes = |full: Value| json!({"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}});
    let refused = [
        (
            json!({"hidden_size_per_layer_input": null}),
            vec!["hidden_size_per_layer_input", "256", "0 (layers"],
        ),
        (json!({"num_kv_shared_layers": 1}), vec!["num_kv_shared_layers", "1", "keys and values of its own"]),
        (json!({"use_double_wide_mlp": true}), vec!["use_double_wide_mlp", "true"]),
        (json!({"enable_moe_block": true}), vec!["`num_experts` is missing"]),
        (
            json!({"use_bidirectional_attention": "all"}),
            vec!["use_bidirectional_attention", "\"all\"", "\"vision\""],
        ),
        (json!({"use_bidirectional_attention": true}), vec!["use_bidirectional_attention", "a string"]),
        (json!({"attn_logit_softcapping": 50.0}), vec!["attn_logit_softcapping", "50"]),
        (json!({"final_logit_softcapping": 0.0}), vec!["final_logit_softcapping", "positive"]),
        (json!({"global_head_dim": 1024}), vec!["1024", "more than 576"]),
        (json!({"global_head_dim": 15}), vec!["15", "even"]),
        (
            json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}),
            vec!["num_key_value_heads", "is 3", "num_attention_heads = 4"],
        ),
        (
            ropes(json!({"rope_type": "proportional"})),
            vec!["rope_parameters.full_attention.rope_theta", "missing"],
        ),
        (ropes(proportional(1.5)), vec!["partial_rotary_factor", "1.5", "at most 1"]),
        (
            ropes(json!({"rope_theta": 1e4, "partial_rotary_factor": 0.5})),
            vec!["partial_rotary_factor", "0.5"],
        ),
        (
            json!({"rope_parameters": {"full_attention": proportional(0.5)}}),
            vec!["sliding_attention` is missing"],
        ),
    ];
    for (changes, parts) in refused {
        let message = parse(changes.clone()).expect_err(&changes.to_string()).to_string();
        for part in parts {
            assert!(message.contains(part), "{changes}: {message:?} names {part:?}");
        }
    }
}

/// What multiplies the layers is in exports as it was in the folder, and an export without that folder is refused.
#[test]
fn exports_have_what_multiplies_layers() {
    let fixture = Fixture::new("gemma4");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let (before, out) = (tensors(&fixture.folder), tempfile::tempdir().unwrap());
    let export = |source| {
        let mut reader = Copying::new(&fixture.folder, DType::F32);
        export_folder(&mut reader, source, out.path(), u64::MAX, &config)
    };
    export(Some(&*fixture.folder)).unwrap();
    assert!(tensors(out.path()) == before && before.contains_key("model.layers.1.layer_scalar"));
    let message = export(None).unwrap_err().to_string();
    assert!(message.contains("the folder it came from"), "{message}");
}
