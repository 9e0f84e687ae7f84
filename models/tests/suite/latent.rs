//! DeepSeek and what took over its attention: configurations, and weights as FP8.

use crate::composite::{Tensors, tensors};
use crate::export::Copying;
use crate::fixture::Fixture;
use crate::gpt_oss;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::path::Path;
use terrace_kernels::{DType, ExpertGroups, GroupScore, RopePairs, Scores};
use terrace_models::{
    Fp8, LatentAttention, Model, ModelConfig, ModelError, QkNorm, SafetensorsSource, SharedExpert,
    export_folder, param_count,
};
use terrace_zero::{ParamSpec, WeightSource};

/// DeepSeek V2 Lite.
fn lite() -> Value {
    json!({"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
        "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1,
        "topk_method": "greedy", "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400})
}

/// DeepSeek V3, as it is published.
fn v3() -> Value {
    json!({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
        "quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
        "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
        "vocab_size": 129280})
}

fn changed(mut config: Value, more: &Value) -> Result<ModelConfig, ModelError> {
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ModelConfig::parse(&config.to_string())
}

/// Sizes and scales are those that transformers has for the same configurations.
#[test]
fn released_models() {
    let lite = changed(lite(), &json!({})).unwrap();
    assert_eq!(param_count(&lite), 15_706_484_224);
    let latent = LatentAttention {
        query_rank: None,
        rank: 512,
        plain: 128,
        rotated: 64,
        values: 128,
        pairs: RopePairs::Neighbours,
    };
    assert_eq!((lite.latent, lite.head_size, lite.rope.size), (Some(latent), 192, 64));
    assert_eq!((lite.rope.attention_factor(), lite.multipliers.attention), (1.0, Some(0.114_721_39)));
    let mixture = lite.mixture.as_ref().unwrap();
    assert_eq!((mixture.scores, mixture.groups, mixture.normalize), (Scores::Softmax, None, false));
    assert_eq!(mixture.shared, Some(SharedExpert { feed_forward: 2816, is_gated: false }));
    assert!(mixture.dense_layers == [0] && lite.constants().is_empty() && lite.fp8.is_none());

    let v3 = changed(v3(), &json!({})).unwrap();
    assert_eq!(param_count(&v3), 671_026_404_352);
    assert_eq!((v3.multipliers.attention, v3.latent.unwrap().query_rank), (Some(0.135_233_78), Some(1536)));
    let mixture = v3.mixture.as_ref().unwrap();
    let groups = ExpertGroups { count: 8, kept: 4, by: GroupScore::TwoLargest };
    assert_eq!((mixture.groups, mixture.dense_layers.as_slice()), (Some(groups), &[0, 1, 2][..]));
    assert_eq!((v3.constants().len(), v3.fp8), (58, Some(Fp8 { block: Some([128, 128]) })));

    // Kimi K2, whose model type is its own.
    let of_kimi = json!({"first_k_dense_replace": 1, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "topk_group": 1, "vocab_size": 163840});
    let kimi = changed(self::v3(), &of_kimi).unwrap();
    assert_eq!((param_count(&kimi), kimi.mixture.unwrap().groups), (1_026_408_209_408, None));

    // GLM 4.7 Flash, of which the class's defaults are the sizes.
    let flash = json!({"architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240,
        "num_attention_heads": 20, "num_hidden_layers": 47, "num_key_value_heads": 20, "vocab_size": 154880,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0});
    let flash = changed(flash, &json!({})).unwrap();
    assert_eq!((param_count(&flash), flash.head_size), (29_943_390_976, 256));
    assert_eq!((flash.multipliers.attention, flash.latent.unwrap().values), (Some(0.0625), 256));
    assert_eq!(flash.mixture.unwrap().dense_layers, [0]);
}

/// 228,689,748,992 parameters in transformers. What the folders say beside is what is computed anyway.
#[test]
fn minimax_m2() {
    let config = json!({"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1], "bos_token_id": 200019, "eos_token_id": 200020,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
        "model_type": "minimax_m2", "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
        "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
        "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": false, "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064});
    let config = changed(config, &json!({})).unwrap();
    assert_eq!((param_count(&config), config.rope.size), (228_689_748_992, 64));
    assert_eq!((config.qk_norm, config.fp8), (Some(QkNorm::AllHeads), Some(Fp8 { block: Some([128, 128]) })));
    let first = ParamSpec::new("model.layers.0.block_sparse_moe.e_score_correction_bias", &[256]);
    assert_eq!((config.constants().len(), &config.constants()[0]), (62, &first));
}

#[test]
fn groups_and_kinds_of_layers() {
    let of_v2 = |more: Value| changed(lite(), &more).map(|config| config.mixture.unwrap().groups);
    let grouped = json!({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3});
    let expected = ExpertGroups { count: 8, kept: 3, by: GroupScore::Largest };
    assert_eq!(of_v2(grouped).unwrap(), Some(expected));
    assert_eq!(of_v2(json!({"n_group": 8, "topk_group": 3})).unwrap(), None);
    assert_eq!(changed(v3(), &json!({"topk_group": 8})).unwrap().mixture.unwrap().groups, None);

    let flash = |kinds: Value| {
        let config = json!({"architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 64, "intermediate_size": 64,
            "num_attention_heads": 2, "num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 9});
        changed(config, &json!({ "mlp_layer_types": kinds }))
    };
    assert_eq!(flash(json!(["sparse", "dense", "sparse"])).unwrap().mixture.unwrap().dense_layers, [1]);
    assert_eq!(flash(Value::Null).unwrap().mixture.unwrap().dense_layers, [0]);
    let error = flash(json!(["sparse", "thin", "sparse"])).unwrap_err().to_string();
    assert!(error.contains("mlp_layer_types entry") && error.contains("thin"), "{error}");
    let error = flash(json!(["sparse"])).unwrap_err().to_string();
    assert!(error.contains("mlp_layer_types") && error.contains("1 entries for 3 layers"), "{error}");
}

#[test]
fn what_is_refused() {
    for (of, more, parts) in [
        (lite(), json!({"num_key_value_heads": 8}), ["num_key_value_heads", "keys of all 16 heads"]),
        (lite(), json!({"v_head_dim": 256}), ["v_head_dim", "values larger than keys, of 192"]),
        (lite(), json!({"kv_lora_rank": 513}), ["kv_lora_rank", "latents of more than 512"]),
        (lite(), json!({"qk_rope_head_dim": 63}), ["qk_rope_head_dim", "an even size"]),
        (lite(), json!({"topk_method": "noaux_tc"}), ["topk_method", "group_limited_greedy"]),
        (lite(), json!({"norm_topk_prob": true}), ["norm_topk_prob", "false"]),
        (lite(), json!({"moe_layer_freq": 2}), ["moe_layer_freq", "1 (all layers"]),
        (lite(), json!({"mlp_bias": true}), ["mlp_bias", "false"]),
        (v3(), json!({"n_group": 7}), ["n_group", "does not divide 256"]),
        (v3(), json!({"n_group": 1024, "n_routed_experts": 2048}), ["n_group", "more than 512 groups"]),
        (v3(), json!({"n_group": 256}), ["n_group", "no group has two"]),
        (v3(), json!({"topk_group": 9}), ["topk_group", "is 9, of 8 groups"]),
        (v3(), json!({"n_group": 128, "topk_group": 3}), ["topk_group", "fewer than the 8 of a token"]),
        (
            v3(),
            json!({"num_attention_heads": 4_000_000, "num_key_value_heads": 4_000_000}),
            ["num_attention_heads", "too many"],
        ),
        (v3(), json!({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}), ["fmt", "e5m2"]),
        (
            v3(),
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}),
            ["weight_block_size", "rows"],
        ),
        (v3(), json!({"quantization_config": {"quant_method": "gptq"}}), ["quantization_config", "gptq"]),
        (v3(), json!({"partial_rotary_factor": 0.5}), ["partial_rotary_factor", "1 (all 64 elements"]),
    ] {
        let error = changed(of, &more).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{more}: {error}");
    }
}

const DEQUANTIZED: &str = "dequantized.";

fn fixture() -> Fixture {
    Fixture::new("deepseek_v3")
}

/// The fixture's weights, those of a layer as FP8, and what these stand for.
fn fp8() -> (Tensors, Tensors) {
    let bytes = std::fs::read(fixture().folder.join("fp8.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let of = |tensor: TensorView<'_>| (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
    let all = all.tensors().into_iter().map(|(name, tensor)| (name, of(tensor)));
    let (dequantized, stored): (Tensors, Tensors) = all.partition(|(name, _)| name.starts_with(DEQUANTIZED));
    let bare = |(name, tensor): (String, _)| (name[DEQUANTIZED.len()..].to_owned(), tensor);
    (stored, dequantized.into_iter().map(bare).collect())
}

fn write(folder: &Path, tensors: &Tensors, quantization: Value) -> String {
    write_of(&fixture(), folder, tensors, quantization)
}

fn write_of(fixture: &Fixture, folder: &Path, tensors: &Tensors, quantization: Value) -> String {
    gpt_oss::write(folder, tensors);
    let mut config = fixture.json("config.json");
    config["quantization_config"] = quantization;
    let text = config.to_string();
    std::fs::write(folder.join("config.json"), &text).unwrap();
    text
}

fn of_blocks() -> Value {
    json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [8, 8]})
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn open(folder: &Path) -> Result<SafetensorsSource, ModelError> {
    SafetensorsSource::for_model(folder, &Model::from_folder(folder)?)
}

#[test]
fn weights_with_a_scale_for_each_block() {
    let folder = tempfile::tempdir().unwrap();
    let (stored, dequantized) = fp8();
    write(folder.path(), &stored, of_blocks());
    let mut source = open(folder.path()).unwrap();
    let model = Model::from_folder(folder.path()).unwrap();
    assert_eq!(source.unused(&model), [""; 0]);
    assert!(dequantized.len() > 20, "{:?}", dequantized.keys());
    for (name, (_, shape, bytes)) in &dequantized {
        let (param, expected) = (ParamSpec::new(name, shape), floats(bytes));
        let mut all = vec![f32::NAN; expected.len()];
        source.read(&param, 0, &mut all).unwrap();
        assert_eq!(all, expected, "{name}");
        for (start, end) in [(0, 1), (5, 3 * shape[1] + 2), (expected.len() - 3, expected.len())] {
            let mut range = vec![f32::NAN; end - start];
            source.read(&param, start, &mut range).unwrap();
            assert_eq!(range, expected[start..end], "{name} {start}");
        }
    }
}

#[test]
fn weights_with_one_scale() {
    let name = "model.layers.1.self_attn.o_proj.weight";
    for shape in [vec![], vec![1], vec![1, 1]] {
        let folder = tempfile::tempdir().unwrap();
        let (mut stored, dequantized) = fp8();
        stored.retain(|key, _| !key.ends_with("_scale_inv"));
        for (key, (dtype, shape, bytes)) in &dequantized {
            stored.insert(key.clone(), (*dtype, shape.clone(), bytes.clone()));
        }
        stored.insert(
            name.to_owned(),
            (Dtype::F8_E4M3, dequantized[name].1.clone(), vec![0x3C; dequantized[name].2.len() / 4]),
        );
        stored.insert(
            format!("{name}_scale_inv"),
            (Dtype::BF16, shape, half::bf16::from_f32(3.0).to_le_bytes().to_vec()),
        );
        // Of activations, which are not quantized here.
        let of_inputs = name.replace("weight", "activation_scale");
        stored.insert(of_inputs, (Dtype::F32, vec![1], 2f32.to_le_bytes().to_vec()));
        write(folder.path(), &stored, json!({"quant_method": "fp8", "weight_block_size": null}));
        let mut values = [0.0; 70];
        open(folder.path())
            .unwrap()
            .read(&ParamSpec::new(name, &dequantized[name].1), 9, &mut values)
            .unwrap();
        assert_eq!(values, [4.5; 70]);
        let model = Model::from_folder(folder.path()).unwrap();
        assert_eq!(open(folder.path()).unwrap().unused(&model), [""; 0]);
    }
}

/// What a code stands for, as the format defines it.
fn number(code: u8) -> f32 {
    let (sign, exponent, mantissa) = (code >> 7, i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let magnitude = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if sign == 1 { -magnitude } else { magnitude }
}

/// Files that hold several parameters as one matrix, one after the other or in turns, which no block of scales cares for.
#[test]
fn fused_weights_with_scales() {
    for (name, fused) in
        [("phi3", ["qkv_proj", "gate_up_proj"]), ("qwen3_5", ["self_attn.q_proj", "mlp.up_proj"])]
    {
        let fixture = Fixture::new(name);
        let (codes_dir, numbers_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (mut codes, mut numbers) = (tensors(&fixture.folder), tensors(&fixture.folder));
        let is_fused = |key: &&String| fused.iter().any(|part| key.ends_with(&format!("{part}.weight")));
        let names: Vec<String> = numbers.keys().filter(is_fused).cloned().collect();
        assert!(names.len() >= 3, "{names:?}");
        for key in names {
            let shape = numbers[&key].1.clone();
            let [rows, columns] = [shape[0], shape[1]];
            // All codes but those that are no numbers, and block by block another scale.
            let code = |at: usize| (at * 37 % 127) as u8 | u8::from(at.is_multiple_of(3)) << 7;
            let grid = [rows.div_ceil(12), columns.div_ceil(7)];
            let scale = |block: usize| 1.0 + block as f32 / 8.0;
            let value = |at: usize| number(code(at)) * scale(at / columns / 12 * grid[1] + at % columns / 7);
            let bytes = |values: &mut dyn Iterator<Item = f32>| {
                values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()
            };
            let of_values = bytes(&mut (0..rows * columns).map(value));
            numbers.insert(key.clone(), (Dtype::F32, shape.clone(), of_values));
            codes.insert(key.clone(), (Dtype::F8_E4M3, shape, (0..rows * columns).map(code).collect()));
            let of_scales = bytes(&mut (0..grid[0] * grid[1]).map(scale));
            codes.insert(format!("{key}_scale_inv"), (Dtype::F32, grid.to_vec(), of_scales));
        }
        write_of(
            &fixture,
            codes_dir.path(),
            &codes,
            json!({"quant_method": "fp8", "weight_block_size": [12, 7]}),
        );
        write_of(&fixture, numbers_dir.path(), &numbers, Value::Null);
        let (mut expected, mut found) = (open(numbers_dir.path()).unwrap(), open(codes_dir.path()).unwrap());
        let model = Model::from_folder(codes_dir.path()).unwrap();
        assert_eq!(found.unused(&model), [""; 0]);
        for param in model.blocks.iter().flat_map(|block| block.params()) {
            for (start, end) in [(0, param.elements()), (param.elements() / 3, param.elements() - 1)] {
                let mut ranges = [vec![0.0; end - start], vec![0.0; end - start]];
                expected.read(param, start, &mut ranges[0]).unwrap();
                found.read(param, start, &mut ranges[1]).unwrap();
                assert!(ranges[0] == ranges[1], "{name}: {} from {start}", param.name);
            }
        }
    }
}

#[test]
fn scales_that_are_missing_or_do_not_fit() {
    let name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv";
    type Change = fn(&mut Tensors, &str);
    let cases: [(Change, Value, &str); 4] = [
        (|all, name| drop(all.remove(name)), of_blocks(), "weight_scale_inv"),
        (|all, name| all.get_mut(name).unwrap().1.reverse(), of_blocks(), "weight_scale_inv"),
        (|all, name| all.get_mut(name).unwrap().0 = Dtype::I32, of_blocks(), "I32"),
        (|_, _| (), Value::Null, "F8_E4M3"),
    ];
    for (change, quantization, part) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (mut stored, _) = fp8();
        change(&mut stored, name);
        write(folder.path(), &stored, quantization);
        let error = open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("model.layers.1."), "{error}");
    }
}

#[test]
fn an_export_has_no_fp8() {
    let (folder, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (stored, dequantized) = fp8();
    let text = write(folder.path(), &stored, of_blocks());
    let mut reader = Copying::new(folder.path(), DType::F32);
    export_folder(&mut reader, Some(folder.path()), out.path(), u64::MAX, &text).unwrap();
    let written = tensors(out.path());
    assert!(written.keys().eq(tensors(&fixture().folder).keys()), "{:?}", written.keys());
    for (name, expected) in &dequantized {
        assert_eq!(written[name], *expected, "{name}");
    }
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(out.path().join("config.json")).unwrap()).unwrap();
    assert!(config.get("quantization_config").is_none(), "{config}");
}
