//! gpt-oss: what its configuration says, and experts that files hold together, as MXFP4 or not.

use crate::composite::{Tensors, tensors};
use crate::export::Copying;
use crate::fixture::Fixture;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::path::Path;
use terrace_kernels::{DType, GateFunction};
use terrace_models::{Model, ModelConfig, RopeScaling, SafetensorsSource, export_folder, param_count};
use terrace_zero::{ParamSpec, WeightReader, WeightSource};

fn fixture() -> Fixture {
    Fixture::new("gpt_oss")
}

/// As the folder of 20B says it.
fn released() -> Value {
    let kinds: Vec<&str> = ["sliding_attention", "full_attention"].into_iter().cycle().take(24).collect();
    json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": kinds, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": false
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088
    })
}

fn parse(config: &Value) -> Result<ModelConfig, String> {
    ModelConfig::parse(&config.to_string()).map_err(|error| error.to_string())
}

#[test]
fn the_released_model_has_its_size() {
    let config = parse(&released()).unwrap();
    assert_eq!(param_count(&config), 20_914_757_184);
    assert_eq!((config.gate_function, config.has_sinks), (GateFunction::ClampedSwish, true));
    assert_eq!((config.windows[0], config.windows[1]), (Some(128), None));
    assert_eq!((config.positions_max, config.only_in_training.is_empty()), (131_072, true));
    // What is left out is filled in.
    let mut short = released();
    let left_out = [
        "layer_types",
        "rope_scaling",
        "rope_theta",
        "attention_bias",
        "sliding_window",
        "head_dim",
        "swiglu_limit",
    ];
    left_out.iter().for_each(|key| drop(short.as_object_mut().unwrap().remove(*key)));
    // The class has its own activation, whatever this says.
    short["hidden_act"] = "gelu".into();
    let filled = parse(&short).unwrap();
    assert!(matches!(filled.rope.scaling, RopeScaling::Yarn { truncate: false, .. }));
    let frequencies = |config: &ModelConfig| config.rope.inverse_frequencies(4096);
    assert_eq!(frequencies(&filled), frequencies(&config));
    assert_eq!(filled.rope.attention_factor(), config.rope.attention_factor());
    assert_eq!(ModelConfig { rope: config.rope.clone(), ..filled }, config);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (key, value, parts) in [
        ("swiglu_limit", json!(5.0), ["swiglu_limit", "7"]),
        ("swiglu_alpha", json!(1.0), ["swiglu_alpha", "1.702"]),
        ("quantization_config", json!({"quant_method": "fp8"}), ["quantization_config", "fp8"]),
        ("architectures", json!(["LlamaForCausalLM"]), ["model_type", "gpt_oss"]),
    ] {
        let mut config = released();
        config[key] = value;
        let message = parse(&config).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let llama = json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama"});
    let mut config = released();
    config.as_object_mut().unwrap().extend(llama.as_object().unwrap().clone());
    let message = parse(&config).unwrap_err();
    assert!(message.contains("quantization_config") && message.contains("mxfp4"), "{message}");
}

/// Tensors as the weights of a folder.
pub fn write(folder: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// The fixture with its experts of layer 0 as blocks and scales, and the same as transformers dequantizes them.
fn packed() -> (Tensors, Tensors) {
    let mut whole = tensors(&fixture().folder);
    let bytes = std::fs::read(fixture().folder.join("mxfp4.safetensors")).unwrap();
    let mut packed = whole.clone();
    for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors() {
        let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        if name.ends_with("_proj") {
            packed.remove(&name);
            whole.insert(name, tensor);
        } else {
            packed.insert(name, tensor);
        }
    }
    (packed, whole)
}

/// A folder with all experts as blocks and scales.
pub fn write_published(folder: &Path) {
    let (mut packed, _) = packed();
    let of_first: Tensors = packed
        .iter()
        .filter(|(name, _)| name.ends_with("_blocks") || name.ends_with("_scales"))
        .map(|(name, tensor)| (name.replace("layers.0", "layers.1"), tensor.clone()))
        .collect();
    packed.retain(|name, _| !(name.contains("layers.1.mlp.experts") && name.ends_with("_proj")));
    packed.extend(of_first);
    write(folder, &packed);
    std::fs::copy(fixture().folder.join("config.json"), folder.join("config.json")).unwrap();
}

#[test]
fn blocks_are_read_as_transformers_dequantizes_them() {
    let model = Model::from_folder(&fixture().folder).unwrap();
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (packed, whole) = packed();
    write(folders[0].path(), &packed);
    write(folders[1].path(), &whole);
    let [mut packed, mut whole] =
        [0, 1].map(|index| SafetensorsSource::for_model(folders[index].path(), &model).unwrap());
    assert!(packed.unused(&model).is_empty() && whole.unused(&model).is_empty());
    let mut of_experts = 0;
    for param in model.blocks.iter().flat_map(|block| block.params()) {
        let [mut a, mut b] = [vec![f32::NAN; param.elements()], vec![f32::NAN; param.elements()]];
        packed.read(param, 0, &mut a).unwrap();
        whole.read(param, 0, &mut b).unwrap();
        assert_eq!(a, b, "{}", param.name);
        of_experts += usize::from(param.name.contains("layers.0.mlp.experts"));
        // Any range.
        for (start, end) in [
            (1, 2),
            (param.elements() / 3, param.elements() / 2),
            (5.min(param.elements() - 1), param.elements()),
        ] {
            for source in [&mut packed, &mut whole] {
                let mut range = vec![f32::NAN; end.max(start) - start];
                source.read(param, start, &mut range).unwrap();
                assert_eq!(range, a[start..end.max(start)], "{} {start}", param.name);
            }
        }
    }
    assert_eq!(of_experts, 5 * 6);
}

#[test]
fn an_export_has_no_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let (packed, whole) = packed();
    write(folder.path(), &packed);
    let mut config = fixture().json("config.json");
    config["quantization_config"] = json!({"quant_method": "mxfp4"});
    let text = config.to_string();
    std::fs::write(folder.path().join("config.json"), &text).unwrap();
    let out = tempfile::tempdir().unwrap();
    for shard_bytes in [20_000, u64::MAX] {
        let mut reader = Copying::new(folder.path(), DType::F32);
        export_folder(&mut reader, Some(folder.path()), out.path(), shard_bytes, &text).unwrap();
        let written = tensors(out.path());
        assert!(written.keys().eq(whole.keys()), "{:?}", written.keys());
        for (name, (dtype, shape, data)) in &written {
            let (of, expected_shape, expected) = &whole[name];
            assert_eq!((dtype, shape), (&Dtype::F32, expected_shape), "{name}");
            let widened: Vec<u8> = match of {
                Dtype::F32 => expected.clone(),
                _ => expected
                    .as_chunks::<2>()
                    .0
                    .iter()
                    .flat_map(|b| half::bf16::from_le_bytes(*b).to_f32().to_le_bytes())
                    .collect(),
            };
            assert!(*data == widened, "{name}");
        }
        let model = Model::from_folder(out.path()).unwrap();
        assert!(SafetensorsSource::for_model(out.path(), &model).is_ok());
        let text = std::fs::read_to_string(out.path().join("config.json")).unwrap();
        assert!(!text.contains("quantization_config"), "{text}");
    }
}

/// Weights that say where they are.
pub struct Places(pub Vec<ParamSpec>);

impl Places {
    pub fn value(&self, param: &ParamSpec, index: usize) -> f32 {
        let place = self.0.iter().position(|other| other.name == param.name).unwrap();
        (place * 1_000_003 + index) as f32
    }
}

impl WeightReader for Places {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.0.clone()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> terrace_zero::Result {
        for (at, bytes) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *bytes = self.value(param, start + at).to_le_bytes();
        }
        Ok(())
    }
}

/// Experts so wide that they are written and read in several pieces.
#[test]
fn wide_experts_come_back() {
    let mut config = fixture().json("config.json");
    for (key, value) in [("intermediate_size", 20_000), ("num_local_experts", 2), ("num_hidden_layers", 1)] {
        config[key] = value.into();
    }
    config["layer_types"] = json!(["full_attention"]);
    let model = Model::new(parse(&config).unwrap());
    let mut places = Places(model.blocks.iter().flat_map(|block| block.params().to_vec()).collect());
    let out = tempfile::tempdir().unwrap();
    export_folder(&mut places, None, out.path(), u64::MAX, &config.to_string()).unwrap();
    let mut source = SafetensorsSource::for_model(out.path(), &model).unwrap();
    for param in &places.0 {
        let mut values = vec![f32::NAN; param.elements()];
        source.read(param, 0, &mut values).unwrap();
        let wrong = values.iter().enumerate().find(|(at, value)| **value != places.value(param, *at));
        assert_eq!(wrong, None, "{}", param.name);
    }
    let written = &tensors(out.path())["model.layers.0.mlp.experts.gate_up_proj"];
    let at = |expert: usize, input: usize, output: usize| {
        let index = (expert * 32 + input) * 40_000 + output;
        f32::from_le_bytes(written.2.as_chunks::<4>().0[index])
    };
    let param = |name: &str| {
        places
            .0
            .iter()
            .find(|param| param.name == format!("model.layers.0.mlp.experts.{name}.weight"))
            .unwrap()
    };
    assert_eq!(written.1, [2, 32, 40_000]);
    assert_eq!(at(1, 5, 2 * 12_345), places.value(param("1.gate_proj"), 12_345 * 32 + 5));
    assert_eq!(at(0, 31, 2 * 19_999 + 1), places.value(param("0.up_proj"), 19_999 * 32 + 31));
}

#[test]
fn damaged_blocks_are_named() {
    let model = Model::from_folder(&fixture().folder).unwrap();
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let folder = tempfile::tempdir().unwrap();
        let (mut packed, _) = packed();
        change(&mut packed);
        write(folder.path(), &packed);
        SafetensorsSource::for_model(folder.path(), &model).unwrap_err().to_string()
    };
    let scales = "model.layers.0.mlp.experts.down_proj_scales";
    let message = refused(&|packed| drop(packed.remove(scales)));
    assert!(message.contains(scales), "{message}");
    let message = refused(&|packed| packed.get_mut(scales).unwrap().0 = Dtype::I8);
    assert!(message.contains(scales) && message.contains("I8"), "{message}");
    let blocks = "model.layers.0.mlp.experts.gate_up_proj_blocks";
    let message = refused(&|packed| packed.get_mut(blocks).unwrap().1 = vec![5, 128, 2, 8]);
    assert!(message.contains(blocks) && message.contains("[5, 128, 1, 16]"), "{message}");
    let message = refused(&|packed| drop(packed.remove(blocks)));
    assert!(message.contains("no tensor `model.layers.0.mlp.experts.gate_up_proj`"), "{message}");
}
