//! Qwen 3.5 and 3 Next: what their configurations say, and what files hold together or apart.

use crate::composite::tensors;
use crate::export::Copying;
use crate::fixture::Fixture;
use serde_json::{Value, json};
use terrace_kernels::{DType, DeltaSpec};
use terrace_models::{Model, ModelConfig, SafetensorsSource, export_folder, param_count};

/// Which layers have the gated delta rule, and what is refused of it.
#[test]
fn the_delta_rule_of_some_layers() {
    // Qwen 3.5 27B: 26,895,998,464 parameters, and 34,660,610,688 of 35B-A3B, without what reads pictures and predicts further tokens.
    let of = |more: Value| {
        let mut config = json!({
            "vocab_size": 248320, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "rms_norm_eps": 1e-6,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": false,
            "max_position_embeddings": 262144, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                "mrope_interleaved": true
            }
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ModelConfig::parse(&config.to_string()).map_err(|error| error.to_string())
    };
    let dense = |more: Value| {
        let mut config = json!({
            "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        of(config)
    };
    let qwen = dense(json!({})).unwrap();
    let spec = DeltaSpec { key_heads: 16, value_heads: 48, key_size: 128, value_size: 128 };
    let delta = qwen.delta.as_ref().unwrap();
    assert_eq!((param_count(&qwen), delta.spec, delta.taps), (26_895_998_464, spec, 4));
    assert_eq!((delta.layers.len(), &delta.layers[..4]), (48, &[0, 1, 2, 4][..]));
    assert_eq!((qwen.rope.size, qwen.norm_plus_one, qwen.gated_attention), (64, true, true));
    let experts = of(json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512
    }));
    let experts = experts.unwrap();
    assert_eq!((param_count(&experts), experts.mixture.unwrap().normalize), (34_660_610_688, true));

    let kinds = |kinds: [&str; 2]| dense(json!({"num_hidden_layers": 2, "layer_types": kinds}));
    assert_eq!(kinds(["full_attention", "linear_attention"]).unwrap().delta.unwrap().layers, [1]);
    let short = dense(json!({"layer_types": ["full_attention"]}));
    for (found, part) in [
        (kinds(["full_attention", "sliding_attention"]), "\"sliding_attention\""),
        (short, "has 1 entries for 64 layers"),
        (dense(json!({"linear_num_value_heads": 40})), "no multiple of linear_num_key_heads = 16"),
        (dense(json!({"linear_key_head_dim": 300})), "more than 256 are not computed"),
        (dense(json!({"linear_conv_kernel_dim": 33})), "more than 32 are not computed"),
        (dense(json!({"linear_value_head_dim": 1u64 << 31})), "are too large"),
        (dense(json!({"linear_num_key_heads": 0})), "linear_num_key_heads"),
    ] {
        let error = found.map(|config| config.delta).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

/// What is read apart is written together, which is read as well, and written again as it is.
#[test]
fn experts_and_gates_are_exported_together() {
    let fixture = Fixture::new("qwen3_5_moe");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for (from, to) in [(fixture.folder.as_path(), first.path()), (first.path(), second.path())] {
        let mut reader = Copying::new(from, DType::F32);
        export_folder(&mut reader, Some(from), to, 40_000, &config).unwrap();
        let model = Model::from_folder(to).unwrap();
        let source = SafetensorsSource::for_model(to, &model).unwrap();
        assert!(source.unused(&model).is_empty(), "{:?}", source.unused(&model));
    }
    let (before, after) = (tensors(&fixture.folder), tensors(first.path()));
    assert!(after == tensors(second.path()));
    let queries = "model.layers.2.self_attn.q_proj.weight";
    assert!(before[queries] == after[queries], "queries and gates take turns as before");
    let together = &after["model.layers.1.mlp.experts.gate_up_proj"];
    let apart =
        |expert: usize, layer: &str| &before[&format!("model.layers.1.mlp.experts.{expert}.{layer}.weight")];
    let (_, dims, _) = apart(0, "gate_proj");
    assert_eq!(together.1, [4, 2 * dims[0], dims[1]]);
    let parts =
        (0..4).flat_map(|expert| ["gate_proj", "up_proj"].map(|layer| apart(expert, layer).2.clone()));
    assert!(together.2 == parts.collect::<Vec<_>>().concat());
}

/// Qwen 3 Next 80B: 79,674,391,296 parameters by transformers' class, and 40,090,596,096 with one feed-forward in the layers that are named.
#[test]
fn qwen_3_next() {
    let of = |more: Value| {
        let mut config = json!({
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16, "rope_theta": 10000000
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ModelConfig::parse(&config.to_string()).unwrap()
    };
    let next = of(json!({}));
    let spec = DeltaSpec { key_heads: 16, value_heads: 32, key_size: 128, value_size: 128 };
    let delta = next.delta.as_ref().unwrap();
    assert_eq!((param_count(&next), delta.spec, delta.taps), (79_674_391_296, spec, 4));
    assert_eq!((delta.layers.len(), &delta.layers[..4]), (36, &[0, 1, 2, 4][..]));
    assert_eq!((next.kv_heads, next.head_size, next.rope.size), (2, 256, 64));
    assert!(next.norm_plus_one && next.gated_attention && next.eos_ids.is_empty() && !next.tied);
    let mixture = next.mixture.as_ref().unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.normalize), (512, 10, true));
    let sparse = of(
        json!({"intermediate_size": 5120, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": false}),
    );
    assert_eq!(param_count(&sparse), 40_090_596_096);
    assert!(sparse.mixture_of(3).is_none() && sparse.mixture_of(4).is_none());
    assert!(!sparse.mixture_of(5).unwrap().normalize);
}

/// What transformers wrote is written again as it was, tensor by tensor, whatever else takes turns in what the delta rule is given.
#[test]
fn inputs_of_the_delta_rule_are_exported_as_they_were() {
    let fixture = Fixture::new("qwen3_next");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    export_folder(&mut reader, Some(&fixture.folder), out.path(), 40_000, &config).unwrap();
    let (before, after) = (tensors(&fixture.folder), tensors(out.path()));
    assert!(before.contains_key("model.layers.0.linear_attn.in_proj_qkvz.weight"));
    assert!(before.contains_key("model.layers.0.mlp.experts.3.gate_proj.weight"));
    assert!(before == after);
    let model = Model::from_folder(out.path()).unwrap();
    let source = SafetensorsSource::for_model(out.path(), &model).unwrap();
    assert!(source.unused(&model).is_empty(), "{:?}", source.unused(&model));
}
