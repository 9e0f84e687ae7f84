//! Llama 4: what its configuration says, and experts that files hold together, the other way round.

use crate::composite::tensors;
use crate::fixture::Fixture;
use crate::gpt_oss::Places;
use serde_json::{Value, json};
use terrace_kernels::{RopePairs, Scores};
use terrace_models::{
    Model, ModelConfig, QkNorm, QueryFactor, RopeScaling, SafetensorsSource, SharedExpert, build,
    export_folder, param_count,
};
use terrace_zero::WeightSource;

/// A folder of Scout, as it says it.
fn scout() -> Value {
    json!({
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200_080, "eoi_token_index": 200_081,
        "image_token_index": 200_092, "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "attention_bias": false, "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200_000,
            "eos_token_id": [200_001, 200_007, 200_008], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
            "max_position_embeddings": 10_485_760, "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
            "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16,
            "output_router_logits": true, "pad_token_id": 200_018, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                "rope_type": "llama3"
            },
            "rope_theta": 500_000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_cache": true,
            "use_qk_norm": true, "vocab_size": 202_048
        },
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"}
    })
}

fn of_text(changes: Value) -> Result<ModelConfig, String> {
    let mut config = scout();
    let Value::Object(changes) = changes else { panic!("{changes} is no object") };
    config["text_config"].as_object_mut().unwrap().extend(changes);
    ModelConfig::parse(&config.to_string()).map_err(|error| error.to_string())
}

fn text(changes: Value) -> ModelConfig {
    of_text(changes).unwrap()
}

/// Parameters as transformers counts them of the text model, on the meta device.
#[test]
fn released_models_have_their_sizes() {
    let scout = text(json!({}));
    assert_eq!(param_count(&scout), 107_769_861_120);
    assert_eq!((scout.positions_max, scout.pad_id, scout.tied), (10_485_760, Some(200_018), false));
    assert_eq!(scout.eos_ids, [200_001, 200_007, 200_008]);
    assert_eq!((scout.rope_pairs, scout.rope.size, scout.rope.theta), (RopePairs::Neighbours, 128, 5e5));
    // The class gives logits of routers and adds no loss.
    assert!(scout.only_in_training.is_empty());
    assert_eq!(scout.qk_norm, Some(QkNorm::PerRotatedHeadWithoutWeights));
    assert_eq!(scout.unrotated, [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]);
    let seen = |layer: usize| (scout.chunks[layer], scout.windows[layer]);
    assert!((0..48).all(|layer| seen(layer) == ((layer % 4 != 3).then_some(8192), None)));
    let factor = QueryFactor { beta: 0.1, original_positions: 8192, first: 1, unrotated_alone: true };
    assert_eq!(scout.query_factor, Some(factor));
    let mixture = scout.mixture.unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.feed_forward), (16, 1, 8192));
    assert_eq!((mixture.scores, mixture.normalize, mixture.weighs_inputs), (Scores::Sigmoid, false, true));
    assert_eq!(mixture.shared, Some(SharedExpert { feed_forward: 8192, is_gated: false }));
    assert!(mixture.dense_layers.is_empty());

    let maverick = text(json!({
        "attn_temperature_tuning": false, "interleave_moe_layer_step": 2, "max_position_embeddings": 1_048_576,
        "num_local_experts": 128, "rope_scaling": null, "use_qk_norm": false
    }));
    assert_eq!(param_count(&maverick), 400_711_848_960);
    assert_eq!((maverick.feed_forward, maverick.qk_norm, maverick.query_factor), (16_384, None, None));
    assert_eq!(maverick.rope.scaling, RopeScaling::Default);
    assert_eq!(maverick.mixture_of(0), None);
    assert!(maverick.mixture_of(1).is_some());
}

/// Of what a folder leaves out.
#[test]
fn defaults_are_those_of_the_class() {
    let given = json!({"model_type": "llama4", "text_config": {}});
    let found = ModelConfig::parse(&given.to_string()).unwrap();
    assert_eq!(param_count(&found), 107_769_861_120);
    assert_eq!((found.head_size, found.kv_heads, found.positions_max), (128, 8, 131_072));
    assert_eq!((found.eos_ids.as_slice(), found.norm_eps, found.rope.theta), (&[2][..], 1e-5, 5e5));
    let alone = json!({
        "architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "intermediate_size": 8192, "num_attention_heads": 40,
        "num_hidden_layers": 48, "vocab_size": 202_048
    });
    let alone = ModelConfig::parse(&alone.to_string()).unwrap();
    assert_eq!(ModelConfig { is_part: true, ..alone }, found);
}

#[test]
fn layers_differ() {
    let chunks = |changes: Value| text(changes).chunks[..5].to_vec();
    let (some, all) = (Some(8192), None);
    assert_eq!(chunks(json!({"attention_chunk_size": null})), [all; 5]);
    assert_eq!(chunks(json!({"no_rope_layer_interval": 2})), [some, all, some, all, some]);
    // What is listed goes first, whatever has positions.
    let kinds = ["full_attention"; 47].into_iter().chain(["chunked_attention"]).collect::<Vec<_>>();
    let listed = text(json!({"layer_types": kinds, "attention_chunk_size": 5}));
    assert_eq!((listed.chunks[46], listed.chunks[47], listed.unrotated.len()), (None, Some(5), 12));
    let unrotated = [[0, 1].repeat(12), [1; 24].to_vec()].concat();
    let listed = text(json!({"no_rope_layers": unrotated}));
    assert_eq!((listed.unrotated.len(), listed.chunks[2], listed.chunks[3]), (12, None, Some(8192)));
    let dense = |changes: Value| text(changes).mixture.unwrap().dense_layers;
    assert_eq!(dense(json!({"moe_layers": [1, 3, 46, 47]})).len(), 44);
    assert_eq!(dense(json!({"interleave_moe_layer_step": 24})).len(), 46);
    // Weights of norms of queries and keys are none.
    let config = text(json!({"num_hidden_layers": 1, "num_local_experts": 2}));
    let names: Vec<String> = build(&config)[1].params().iter().map(|param| param.name.clone()).collect();
    assert!(names.iter().any(|name| name.ends_with("0.feed_forward.shared_expert.up_proj.weight")));
    assert!(!names.iter().any(|name| name.contains("qk_norm") || name.contains("q_norm")), "{names:?}");
}

#[test]
fn queries_grow_with_their_positions() {
    let factor = text(json!({"floor_scale": 4, "attn_scale": 0.5})).query_factor.unwrap();
    let expected = |steps: f64| (1.0 + 0.5 * (1.0 + steps).ln()) as f32;
    let found = [0, 2, 3, 6, 7, 11].map(|position| factor.at(position));
    assert_eq!(found, [0.0, 0.0, 1.0, 1.0, 2.0, 3.0].map(expected));
    // As the first folders say it.
    assert_eq!(text(json!({"attn_temperature_tuning": 4})).query_factor, text(json!({})).query_factor);
    for none in [
        json!({"attn_temperature_tuning": false}),
        json!({"attn_temperature_tuning": 0}),
        json!({"attn_scale": 0.0}),
    ] {
        assert_eq!(text(none).query_factor, None);
    }
}

/// Where the two factors are one, no wavelength lies between long and short.
#[test]
fn frequencies_are_kept_or_divided() {
    let config = text(json!({}));
    let plain = RopeScaling::Default;
    let kept = terrace_models::Rope { scaling: plain, ..config.rope.clone() }.inverse_frequencies(1);
    let found = config.rope.inverse_frequencies(1);
    let divided = kept.iter().zip(&found).filter(|(kept, found)| **found == **kept / 16.0).count();
    let same = kept.iter().zip(&found).filter(|(kept, found)| kept == found).count();
    assert_eq!((divided + same, divided), (64, 29));
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (changes, parts) in [
        (json!({"layer_types": vec!["chunked_attention"; 47]}), ["layer_types", "47 entries for 48"]),
        (json!({"layer_types": vec!["sliding_attention"; 48]}), ["sliding_attention", "chunked_attention"]),
        (
            json!({"layer_types": vec!["chunked_attention"; 48], "attention_chunk_size": null}),
            ["attention_chunk_size", "null"],
        ),
        (json!({"attention_chunk_size": 0}), ["text_config.attention_chunk_size", "positive"]),
        (json!({"no_rope_layers": [1, 0]}), ["no_rope_layers", "2 entries for 48"]),
        (json!({"attn_temperature_tuning": "yes"}), ["attn_temperature_tuning", "true or false"]),
        (json!({"num_experts_per_tok": 17}), ["num_experts_per_tok", "of 16 experts"]),
        (
            json!({"quantization_config": {"quant_method": "compressed-tensors"}}),
            ["quantization_config", "compressed-tensors"],
        ),
    ] {
        let message = of_text(changes).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let mut by_hand = text(json!({"num_hidden_layers": 2}));
    by_hand.windows[1] = Some(4);
    by_hand.chunks[1] = Some(4);
    assert!(by_hand.check().unwrap_err().to_string().contains("one of the two"));
    by_hand.chunks.pop();
    assert!(by_hand.check().unwrap_err().to_string().contains("attention_chunk_size"));
    let mut by_hand = text(json!({}));
    by_hand.mixture.as_mut().unwrap().biased = true;
    assert!(by_hand.check().unwrap_err().to_string().contains("multiply their inputs"));
}

/// Experts so wide that they are written and read in several pieces.
#[test]
fn wide_experts_come_back() {
    let mut config = Fixture::new("llama4").json("config.json");
    for (key, value) in [("intermediate_size", 20_000), ("num_local_experts", 2), ("num_hidden_layers", 1)] {
        config[key] = value.into();
    }
    config["layer_types"] = json!(["full_attention"]);
    config["moe_layers"] = json!([0]);
    let model = Model::new(ModelConfig::parse(&config.to_string()).unwrap());
    let mut places = Places(model.blocks.iter().flat_map(|block| block.params().to_vec()).collect());
    let out = tempfile::tempdir().unwrap();
    export_folder(&mut places, None, out.path(), u64::MAX, &config.to_string()).unwrap();
    let mut source = SafetensorsSource::for_model(out.path(), &model).unwrap();
    for param in &places.0 {
        for start in [0, param.elements() / 3] {
            let mut values = vec![f32::NAN; param.elements() - start];
            source.read(param, start, &mut values).unwrap();
            let wrong = values.iter().zip(start..).find(|(value, at)| **value != places.value(param, *at));
            assert_eq!(wrong, None, "{} from {start}", param.name);
        }
    }
    let written = tensors(out.path());
    let at = |name: &str, index: usize| {
        let bytes = &written[&format!("model.layers.0.feed_forward.experts.{name}")].2;
        f32::from_le_bytes(bytes.as_chunks::<4>().0[index])
    };
    let value = |name: &str, index: usize| {
        let name = format!("model.layers.0.feed_forward.experts.{name}.weight");
        places.value(places.0.iter().find(|param| param.name == name).unwrap(), index)
    };
    // [experts, inputs, outputs of gate, then those of up]; of experts, outputs and inputs.
    let of_wide = |expert: usize, input: usize, output: usize| (expert * 32 + input) * 40_000 + output;
    assert_eq!(at("gate_up_proj", of_wide(1, 5, 12_345)), value("1.gate_proj", 12_345 * 32 + 5));
    assert_eq!(at("gate_up_proj", of_wide(0, 31, 20_000 + 19_999)), value("0.up_proj", 19_999 * 32 + 31));
    assert_eq!(at("down_proj", (20_000 + 777) * 32 + 3), value("1.down_proj", 3 * 20_000 + 777));
}
