//! Reads what `fixtures/make_fixtures.py` wrote.

use crate::runner::Runner;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use terrace_kernels::{DType, KernelSet, cpu, reference};
use terrace_models::{Model, ModelConfig, Row, SafetensorsSource, TokenBatch};
use terrace_zero::MicroBatch;

pub const NAMES: [&str; 53] = [
    "llama2",
    "llama31",
    "llama_biased",
    "llama_gelu",
    "llama_gelu_tanh",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3_long",
    "seed_oss",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "exaone4",
    "glm",
    "glm4",
    "ernie4_5",
    "ernie4_5_moe",
    "cohere",
    "cohere2",
    "hunyuan",
    "hunyuan_moe",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "minimax_m2",
    "olmoe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "llama4",
    "llama4_vision",
    "gemma3_vision",
    "gemma4_vision",
    "gemma4_unified",
    "mistral3",
    "ministral3",
    "qwen2_5_vl",
    "qwen3_5_vision",
    "qwen3_vl",
];

/// The backends that every parity test runs on.
pub fn backends() -> Vec<(&'static str, KernelSet)> {
    vec![("reference", reference::kernel_set()), ("cpu", cpu::kernel_set(2))]
}

pub struct Fixture {
    pub name: &'static str,
    pub folder: PathBuf,
}

/// A tensor of an auxiliary file.
pub struct Array {
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// The weights of a model folder, which are all there.
pub fn weights_of(folder: &Path) -> SafetensorsSource {
    SafetensorsSource::for_model(folder, &Model::from_folder(folder).unwrap()).unwrap()
}

impl Fixture {
    pub fn new(name: &'static str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        Self { name, folder }
    }

    pub fn all() -> impl Iterator<Item = Self> {
        NAMES.into_iter().map(Self::new)
    }

    /// A builder of batches for its weights and a configuration.
    pub fn batches(&self, config: &ModelConfig) -> TokenBatch {
        TokenBatch::for_model(&self.folder, config).unwrap()
    }

    pub fn runner(&self, kernels: KernelSet, dtype: DType) -> Runner {
        let model = Model::from_folder(&self.folder).unwrap();
        Runner::new(model, kernels, dtype, &mut self.weights())
    }

    /// The weights, whatever the names of their tensors in the files.
    pub fn weights(&self) -> SafetensorsSource {
        weights_of(&self.folder)
    }

    /// All tensors of a file.
    pub fn arrays(&self, file: &str) -> HashMap<String, Array> {
        let bytes = std::fs::read(self.folder.join(file)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let array = |view: safetensors::tensor::TensorView<'_>| Array {
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        };
        file.tensors().into_iter().map(|(name, view)| (name, array(view))).collect()
    }

    pub fn json(&self, file: &str) -> Value {
        serde_json::from_str(&std::fs::read_to_string(self.folder.join(file)).unwrap()).unwrap()
    }
}

impl Array {
    pub fn floats(&self) -> Vec<f32> {
        self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn ids(&self) -> Vec<u32> {
        self.bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

/// The micro-batches of each training step.
pub fn steps(train: &Value, batches: &TokenBatch) -> Vec<Vec<MicroBatch>> {
    let length = train["length"].as_u64().unwrap() as usize;
    let micro_batch = |rows: &Value| {
        let rows: Vec<(Vec<u32>, Vec<i32>)> = rows
            .as_array()
            .unwrap()
            .iter()
            .map(|row| (numbers(&row["ids"]), numbers(&row["labels"])))
            .collect();
        let rows: Vec<Row<'_>> = rows.iter().map(|(ids, labels)| Row { ids, labels }).collect();
        batches.train(&rows, rows.len(), length).unwrap()
    };
    let steps = train["steps"].as_array().unwrap().iter();
    steps.map(|step| step.as_array().unwrap().iter().map(micro_batch).collect()).collect()
}

pub fn numbers<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).unwrap()
}
