//! Folders that hold more than a language model.

use crate::export::Copying;
use crate::fixture::Fixture;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use terrace_kernels::DType;
use terrace_models::{Model, ModelConfig, SafetensorsSource, export_folder, param_count};

const COMPOSITES: [&str; 9] = [
    "gemma3_vision",
    "gemma4_vision",
    "gemma4_unified",
    "llama4_vision",
    "mistral3",
    "ministral3",
    "qwen2_5_vl",
    "qwen3_5_vision",
    "qwen3_vl",
];

pub type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// All tensors of a folder.
pub fn tensors(folder: &Path) -> Tensors {
    let mut all = Tensors::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !(name.starts_with("model") && name.ends_with(".safetensors")) {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
            all.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    all
}

#[test]
fn the_rest_travels_into_exports_as_it_is() {
    for name in COMPOSITES {
        let fixture = Fixture::new(name);
        let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
        let before = tensors(&fixture.folder);
        let out = tempfile::tempdir().unwrap();
        for shard_bytes in [20_000, u64::MAX] {
            let mut reader = Copying::new(&fixture.folder, DType::F32);
            export_folder(&mut reader, Some(&fixture.folder), out.path(), shard_bytes, &config).unwrap();
            let after = tensors(out.path());
            assert!(before == after, "{name}: {:?}", after.keys());
        }
        // In another type, over itself.
        let mut reader = Copying::new(&fixture.folder, DType::BF16);
        export_folder(&mut reader, Some(out.path()), out.path(), 30_000, &config).unwrap();
        let model = Model::from_folder(out.path()).unwrap();
        let source = SafetensorsSource::for_model(out.path(), &model).unwrap();
        assert!(source.unused(&model).is_empty());
        let of_rest = ["vis", "projector", "layer_scalar"];
        let of_model = |name: &str| !of_rest.iter().any(|rest| name.contains(rest));
        let after = tensors(out.path());
        assert!(before.keys().eq(after.keys()));
        for (tensor, stored) in &after {
            match of_model(tensor) {
                true => assert_eq!(stored.0, safetensors::Dtype::BF16, "{tensor}"),
                false => assert!(*stored == before[tensor], "{tensor}"),
            }
        }
        let written: Value =
            serde_json::from_str(&std::fs::read_to_string(out.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(written["dtype"], "bfloat16");
        let mut expected: Value = serde_json::from_str(&config).unwrap();
        expected["dtype"] = "bfloat16".into();
        if expected["text_config"]["dtype"].is_string() {
            expected["text_config"]["dtype"] = "bfloat16".into();
        }
        assert_eq!(written, expected);
    }
}

#[test]
fn an_export_without_the_rest_is_refused() {
    let fixture = Fixture::new("gemma3_vision");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let refused = |source: Option<&Path>| {
        let out = tempfile::tempdir().unwrap();
        let mut reader = Copying::new(&fixture.folder, DType::F32);
        let error = export_folder(&mut reader, source, out.path(), u64::MAX, &config).unwrap_err();
        assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
        error.to_string()
    };
    let message = refused(None);
    assert!(message.contains("the folder it came from"), "{message}");
    let empty = tempfile::tempdir().unwrap();
    let message = refused(Some(empty.path()));
    assert!(message.contains("model.safetensors"), "{message}");
}

#[test]
fn a_missing_tensor_is_named() {
    let fixture = Fixture::new("gemma3_vision");
    let model = Model::from_folder(&fixture.folder).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(fixture.folder.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let rest = stored.tensors().into_iter().filter(|(name, _)| !name.contains("layers.1.mlp.up_proj"));
    safetensors::serialize_to_file(rest, None, &folder.path().join("model.safetensors")).unwrap();
    let message = SafetensorsSource::for_model(folder.path(), &model).unwrap_err().to_string();
    assert!(message.contains("no tensor `language_model.model.layers.1.mlp.up_proj.weight`"), "{message}");
}

fn parse(config: &Value) -> ModelConfig {
    ModelConfig::parse(&config.to_string()).unwrap()
}

/// As their folders say it.
#[test]
fn released_models_have_the_published_sizes() {
    // Gemma 3 4B leaves out what its class fills in.
    let gemma = parse(&json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106], "model_type": "gemma3",
        "initializer_range": 0.02, "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}
    }));
    assert_eq!(param_count(&gemma), 3_880_263_168);
    assert_eq!((gemma.vocab, gemma.heads, gemma.kv_heads, gemma.head_size), (262_208, 8, 4, 256));
    assert_eq!((gemma.eos_ids.as_slice(), gemma.pad_id, gemma.tied), (&[1, 106][..], Some(0), true));
    // They are stretched already.
    assert_eq!(gemma.positions_max, 131_072);
    assert_eq!(gemma.windows.iter().filter(|window| **window == Some(1024)).count(), 29);
    // Mistral Small 3.1.
    let mistral = parse(&json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1e9, "sliding_window": null,
            "use_cache": true, "vocab_size": 131072
        }
    }));
    assert_eq!(param_count(&mistral), 23_572_403_200);
    assert_eq!((mistral.tied, mistral.windows[0], mistral.rope.theta), (false, None, 1e9));
    // Ministral 3 8B, of which the class fills in the sizes; its queries are multiplied behind the context of its training.
    let ministral = parse(&json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "text_config": {"hidden_size": 4096, "model_type": "ministral3", "tie_word_embeddings": false}
    }));
    assert_eq!(param_count(&ministral), 8_489_553_920);
    assert_eq!((ministral.positions_max, ministral.rope.theta, ministral.windows[0]), (262_144, 1e6, None));
    let factor = ministral.query_factor.unwrap();
    assert_eq!((factor.beta, factor.original_positions), (0.1, 16_384));
    assert_eq!([0, 16_383, 16_384].map(|position| factor.at(position)), [1.0, 1.0, 1.069_314_7]);
    let spelled = parse(&json!({
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "text_config": {
            "hidden_size": 4096, "max_position_embeddings": 262144, "model_type": "ministral3", "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"
            }
        }
    }));
    assert_eq!((spelled.rope, spelled.query_factor), (ministral.rope, ministral.query_factor));
    // Qwen 2.5 VL says it among the rest.
    let qwen = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
        "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 152064,
        "vision_config": {"depth": 32, "hidden_size": 1280}, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}
    });
    let flat = parse(&qwen);
    assert_eq!(param_count(&flat), 7_615_616_512);
    assert_eq!((flat.rope.theta, flat.qkv_bias, flat.is_part), (1e6, true, true));
    // What newer savers make of it.
    let mut nested = json!({"architectures": qwen["architectures"], "model_type": "qwen2_5_vl", "tie_word_embeddings": false});
    let mut text = qwen.clone();
    let entries = text.as_object_mut().unwrap();
    ["architectures", "vision_config", "rope_theta", "rope_scaling", "tie_word_embeddings"]
        .iter()
        .for_each(|key| drop(entries.remove(*key)));
    text["model_type"] = "qwen2_5_vl_text".into();
    text["rope_parameters"] =
        json!({"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]});
    nested["text_config"] = text;
    assert_eq!(parse(&nested), flat);
    // LLaVA 1.5 relies on the defaults of a Llama.
    let llava = parse(&json!({
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "pad_token_id": 32001,
        "text_config": {
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
            "vocab_size": 32064
        }
    }));
    assert_eq!(param_count(&llava), 6_738_939_904);
    assert_eq!((llava.pad_id, llava.positions_max), (None, 4096));
}

#[test]
fn either_place_ties_the_head() {
    let null = Value::Null;
    for (name, whole, text, tied) in [
        ("qwen3_vl", &json!(false), &json!(false), false),
        ("qwen3_vl", &json!(true), &json!(false), true),
        ("qwen3_vl", &json!(false), &json!(true), true),
        ("qwen3_vl", &null, &json!(true), true),
        ("qwen3_vl", &null, &null, false),
        ("gemma3_vision", &null, &json!(false), false),
        ("gemma3_vision", &null, &null, true),
        ("llama4_vision", &null, &null, false),
        // Newer savers write true for the whole where nothing was said, whatever there is.
        ("mistral3", &json!(true), &json!(false), false),
        ("mistral3", &json!(true), &null, true),
        ("mistral3", &json!(false), &json!(true), true),
        ("mistral3", &null, &null, false),
    ] {
        let mut config = Fixture::new(name).json("config.json");
        config["tie_word_embeddings"] = whole.clone();
        config["text_config"]["tie_word_embeddings"] = text.clone();
        assert_eq!(parse(&config).tied, tied, "{name}: {whole} {text}");
    }
}

#[test]
fn what_is_not_computed_is_refused_where_it_stands() {
    let refused = |change: fn(&mut Value)| {
        let mut config = Fixture::new("mistral3").json("config.json");
        change(&mut config);
        ModelConfig::parse(&config.to_string()).unwrap_err().to_string()
    };
    let message = refused(|config| config["text_config"]["model_type"] = "mistral4".into());
    assert!(message.contains("text_config.model_type") && message.contains("\"mistral\""), "{message}");
    let message = refused(|config| config["text_config"]["hidden_size"] = "wide".into());
    assert!(message.contains("text_config.hidden_size"), "{message}");
    let message = refused(|config| config["quantization_config"] = json!({"quant_method": "awq"}));
    assert!(message.contains("awq"), "{message}");
    let message = refused(|config| config["eos_token_id"] = "end".into());
    assert!(message.contains("`eos_token_id`"), "{message}");
    let message = refused(|config| drop(config.as_object_mut().unwrap().remove("text_config")));
    assert!(message.contains("`text_config` is missing"), "{message}");
    let message = refused(|config| config["architectures"] = json!(["Idefics9ForConditionalGeneration"]));
    assert!(message.contains("Mistral3ForConditionalGeneration"), "{message}");
}
