//! Experts that come from disk when tokens go through them.

use crate::card;
use std::path::Path;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_aio::layer::StatsLayer;
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, QuantFormat, cpu};
use terrace_models::{Model, ModelConfig, RandomSource, TokenBatch};
use terrace_zero::{Backend, BatchLimits, Engine, EngineConfig, Placement, WindowOverrides};

/// Positions of a prompt, whose rows choose nearly all experts; of so few that they choose a third; and tokens that follow.
const LENGTH: usize = 40;
const SHORT: usize = 6;
const NEXT: [[u32; 2]; 3] = [[7, 11], [40, 41], [5, 90]];

/// Two of 64 experts a token, in five layers of six.
fn model() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["Qwen3MoeForCausalLM"],"vocab_size":101,"hidden_size":64,"intermediate_size":192,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
        "num_experts":64,"num_experts_per_tok":2,"moe_intermediate_size":128,"norm_topk_prob":true,"mlp_only_layers":[0],
        "initializer_range":0.2}"#,
    )
    .unwrap()
}

/// The same with biases, which belong to experts.
fn biased() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["GptOssForCausalLM"],"vocab_size":101,"hidden_size":64,"intermediate_size":128,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
        "num_local_experts":64,"num_experts_per_tok":2,"sliding_window":9,"rope_scaling":{"rope_type":"linear","factor":2.0},
        "initializer_range":0.2}"#,
    )
    .unwrap()
}

/// Chosen with numbers of the files, and with one beside them that all tokens go through.
fn shared() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["Glm4MoeForCausalLM"],"vocab_size":101,"hidden_size":64,"intermediate_size":192,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
        "n_routed_experts":64,"num_experts_per_tok":2,"moe_intermediate_size":128,"first_k_dense_replace":1,
        "routed_scaling_factor":1.5,"initializer_range":0.2}"#,
    )
    .unwrap()
}

/// Beside a feed-forward that all tokens go through, each with norms of its own; what the layer gives is multiplied.
fn parallel() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["Gemma4ForCausalLM"],"vocab_size":101,"hidden_size":64,"intermediate_size":96,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
        "global_head_dim":32,"hidden_size_per_layer_input":0,"sliding_window":9,"enable_moe_block":true,
        "num_experts":64,"top_k_experts":2,"moe_intermediate_size":128,"initializer_range":0.2}"#,
    )
    .unwrap()
}

/// Whose inputs are multiplied, beside one that all tokens go through.
fn weighed() -> ModelConfig {
    ModelConfig::parse(
        r#"{"architectures":["Llama4ForCausalLM"],"vocab_size":101,"hidden_size":64,"intermediate_size":128,"intermediate_size_mlp":192,
        "num_hidden_layers":6,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"max_position_embeddings":64,
        "num_local_experts":64,"num_experts_per_tok":2,"moe_layers":[1,2,3,4,5],"attention_chunk_size":9,"floor_scale":7,
        "initializer_range":0.2}"#,
    )
    .unwrap()
}

type Describe = fn() -> ModelConfig;

#[derive(Clone, Copy)]
struct Setup {
    model: Describe,
    placement: Placement,
    discrete: bool,
    weight_slots: usize,
    format: Option<QuantFormat>,
    copies: u64,
}

impl Setup {
    fn engine(self, dir: &Path, io: Arc<dyn IoEngine>) -> Engine {
        let limits =
            BatchLimits { sequences: 2, length: LENGTH, micro_batches: 1, cache_length: 64, cache_pages: 0 };
        let overrides = WindowOverrides {
            weight_slots: Some(self.weight_slots),
            chunk_elements: Some(1 << 14),
            device_groups: Some(0),
            ..WindowOverrides::default()
        };
        let config = EngineConfig {
            placement: self.placement,
            disks: vec![dir.to_owned()],
            threads: 2,
            cache_bytes: self.copies,
            overrides,
            ..EngineConfig::new(DType::BF16, limits)
        };
        let backend = card::backend(&io).unwrap_or_else(|| Backend {
            device: Arc::new(if self.discrete { HostDevice::discrete() } else { HostDevice::unified() }),
            kernels: cpu::kernel_set(2),
            updates: None,
            kernel_scratch_bytes: cpu::scratch_bytes(2) as u64,
            io,
        });
        let model = Model::stored_as((self.model)(), self.format);
        let sample = TokenBatch::new(&model.config).blank(2, LENGTH);
        let mut source = RandomSource::for_config(&model.config, 1);
        Engine::create(config, backend, model.blocks, &sample, &mut source).unwrap()
    }

    /// Logits of two conversations one after the other, the second of which begins with few tokens; and bytes read in each pass.
    fn run(self) -> (Vec<Vec<f32>>, Vec<u64>) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let stats = Arc::new(StatsLayer::new(open_default(&IoConfig::default()).unwrap()));
        let mut engine = self.engine(dir.path(), Arc::clone(&stats) as _);
        let model = (self.model)();
        let mut source = RandomSource::for_config(&model, 1);
        let batches = TokenBatch::for_source(&model, &mut source).unwrap();
        let (mut logits, mut bytes) = (Vec::new(), Vec::new());
        for length in [LENGTH, SHORT, LENGTH] {
            let rows =
                [3, 5].map(|step| (0..length).map(|i| (i as u32 * step + 1) % 101).collect::<Vec<_>>());
            let rows = [&rows[0][..], &rows[1][..]];
            let mut cache = engine.new_cache(2).unwrap();
            for step in 0..=NEXT.len() {
                let batch = match step.checked_sub(1) {
                    None => batches.prefill(&rows, length).unwrap(),
                    Some(step) => batches.decode(&NEXT[step], cache.lengths()).unwrap(),
                };
                let added = if step == 0 { [length; 2] } else { [1; 2] };
                let before = stats.snapshot().read.bytes;
                logits.push(engine.logits(&batch, &mut cache, &[0, 1], &added).unwrap());
                bytes.push(stats.snapshot().read.bytes - before);
            }
        }
        engine.remove_state().unwrap();
        (logits, bytes)
    }
}

#[test]
fn experts_that_no_token_chooses_are_not_read() {
    let cases: [(Describe, Option<QuantFormat>); 6] = [
        (model, None),
        (model, Some(QuantFormat::Int8)),
        (biased, None),
        (shared, Some(QuantFormat::Int4)),
        (parallel, None),
        (weighed, None),
    ];
    for (model, format) in cases {
        let memory =
            Setup { model, placement: Placement::None, discrete: false, weight_slots: 1, format, copies: 0 };
        let (expected, _) = memory.run();
        assert!(expected.windows(2).all(|pair| pair[0] != pair[1]));
        for weight_slots in [1, 3] {
            for discrete in [false, true] {
                let disk = Setup { placement: Placement::Disk, discrete, weight_slots, ..memory };
                let (logits, bytes) = disk.run();
                let words = format!("{format:?}, {weight_slots} slots, discrete {discrete}: {bytes:?} read");
                assert!(logits == expected, "{words}");
                // A pass of one token each after another of these; four experts of 64 in five layers, and what all tokens need.
                let (few, all) = (bytes[2].max(bytes[6]), bytes[2].max(bytes[8]));
                assert!(few > 0 && 3 * few < all, "{words}");
            }
        }
    }
}

/// Where copies of a layer's weights are in memory nothing of it is read.
#[test]
fn copies_have_all_experts() {
    let memory = Setup {
        model,
        placement: Placement::None,
        discrete: false,
        weight_slots: 1,
        format: None,
        copies: 0,
    };
    let (expected, _) = memory.run();
    for copies in [1 << 20, 5 << 20, u64::MAX] {
        let (logits, bytes) = Setup { placement: Placement::Disk, copies, ..memory }.run();
        assert!(logits == expected, "{copies} bytes of copies: {bytes:?} read");
        assert!(copies < u64::MAX || bytes.iter().all(|&bytes| bytes == 0), "{bytes:?} read");
    }
}
