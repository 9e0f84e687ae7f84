//! Placement never changes numbers: the same training gives the same bits wherever the state lives, whatever the windows,
//! the disk engine, the device mode and the number of threads.

#[path = "engine_support/mod.rs"]
mod support;

use support::{Setup, small_llama, weights_hash};
use terrace_aio::engine::EngineChoice;
use terrace_kernels::DType;
use terrace_models::{Mixture, Model, ModelConfig, RandomSource, Row, TILE_ROWS, TokenBatch};
use terrace_optimizer::{Algorithm, GroupLr, GroupRule, LossScaleConfig, StateFormat};
use terrace_zero::{Accumulation, BatchLimits, Durability, Engine, EngineConfig, Placement, WindowOverrides};

const STEPS: u64 = 4;

fn tiny_windows() -> WindowOverrides {
    WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(2),
        gradients_on_disk: Some(true),
        activations_on_disk: Some(true),
        device_groups: Some(1),
        ..WindowOverrides::default()
    }
}

fn keeping(blocks: usize) -> WindowOverrides {
    WindowOverrides { kept_blocks: Some(blocks), ..WindowOverrides::default() }
}

/// Some groups stay on the device, or none; where it is not said, all do.
fn staying(base: &Setup, dir: &std::path::Path) -> Vec<(String, Setup)> {
    let mut all = Vec::new();
    for (device_groups, uploads_ahead) in [
        (Some(0), None),
        (Some(0), Some(0)),
        (Some(0), Some(1)),
        (Some(2), None),
        (Some(2), Some(0)),
        (None, None),
    ] {
        let overrides = WindowOverrides { device_groups, uploads_ahead, ..WindowOverrides::default() };
        let here = Setup { overrides, discrete: true, ..base.clone() };
        let words = format!("discrete, {device_groups:?} groups stay, {uploads_ahead:?} come ahead");
        let disks = vec![dir.join(format!("stay-{device_groups:?}-{uploads_ahead:?}"))];
        let overrides = WindowOverrides { weight_slots: Some(1), ..overrides };
        let there = Setup { placement: Placement::Disk, disks, overrides, ..here.clone() };
        all.push((format!("host, {words}"), Setup { placement: Placement::Host, ..here }));
        all.push((format!("disk, {words}"), there));
    }
    all
}

/// Some blocks keep on disk, through as many buffers as they would have or as few as can be, or of a card in the host's memory.
fn keeping_elsewhere(base: &Setup, dir: &std::path::Path) -> Vec<(String, Setup)> {
    let cases = [
        (0, 0, 3, None, 1, false),
        (0, 0, 3, Some(1), 2, false),
        (1, 0, 2, Some(3), 1, false),
        (2, 0, 1, None, 2, false),
        (0, 0, 3, None, 1, true),
        (0, 3, 0, None, 2, true),
        (1, 1, 1, Some(1), 1, true),
        (0, 1, 1, None, 1, true),
    ];
    let setup = |(number, (here, on_host, on_disk, kept_slots, threads, discrete))| {
        let windows = if number % 2 == 0 { WindowOverrides::default() } else { tiny_windows() };
        let (kept_blocks, kept_on_host, kept_on_disk) = (Some(here), Some(on_host), Some(on_disk));
        let overrides = WindowOverrides { kept_blocks, kept_on_host, kept_on_disk, kept_slots, ..windows };
        let disks = ["a", "b"].map(|name| dir.join(format!("kept-{number}-{name}"))).to_vec();
        let setup = Setup { placement: Placement::Disk, disks, overrides, threads, discrete, ..base.clone() };
        let words =
            format!("{here} blocks keep, {on_host} on the host, {on_disk} on disk, {kept_slots:?} buffers");
        (format!("{words}, discrete: {discrete}"), setup)
    };
    let mut all: Vec<(String, Setup)> = cases.into_iter().enumerate().map(setup).collect();
    // Without a disk.
    let overrides =
        WindowOverrides { kept_blocks: Some(1), kept_on_host: Some(2), ..WindowOverrides::default() };
    let host = Setup { placement: Placement::Host, discrete: true, overrides, ..base.clone() };
    all.push(("host, two blocks keep there".to_owned(), host));
    all
}

/// The device holds and updates the state of some groups, or of all; the host, or a disk, that of the others.
fn on_device(base: &Setup, dir: &std::path::Path) -> Vec<(String, Setup)> {
    let mut all = Vec::new();
    // Others have no kernel there.
    let has_kernel = matches!(base.optimizer, Algorithm::AdamW(_) | Algorithm::Adam(_));
    for (placement, state_groups) in [
        (Placement::None, None),
        (Placement::None, Some(0)),
        (Placement::None, Some(2)),
        (Placement::Host, Some(0)),
        (Placement::Host, Some(1)),
        (Placement::Host, Some(3)),
        (Placement::Disk, Some(1)),
        (Placement::Disk, Some(3)),
        (Placement::Disk, Some(64)),
    ] {
        if state_groups > Some(0) && !has_kernel {
            continue;
        }
        for (device_groups, overlap) in [(None, None), (Some(0), Some(false))] {
            let chunk_elements = device_groups.map(|_| 1 << 14);
            let overrides = WindowOverrides {
                device_groups,
                state_groups,
                overlap,
                chunk_elements,
                ..WindowOverrides::default()
            };
            let words =
                format!("state of {state_groups:?} groups and weights of {device_groups:?} on the device");
            let setup = Setup { placement, overrides, discrete: true, ..base.clone() };
            let setup = match placement {
                Placement::Disk => Setup {
                    disks: vec![dir.join(&words)],
                    durability: Durability::Checkpoint,
                    cache_bytes: if device_groups.is_none() { 200_000 } else { 0 },
                    ..setup
                },
                _ => setup,
            };
            if placement == Placement::Disk {
                let disks = vec![dir.join(format!("{words}, once"))];
                let once = Setup { durability: Durability::None, disks, ..setup.clone() };
                all.push((format!("{placement}, {words}, overlap {overlap:?}, kept once"), once));
            }
            all.push((format!("{placement}, {words}, overlap {overlap:?}"), setup));
        }
    }
    all
}

/// Copies of state on disk, and steps that are not committed.
fn unsaved(base: &Setup, dir: &std::path::Path) -> Vec<(String, Setup)> {
    let disk = |name: &str, paths: usize| {
        let disks = (0..paths).map(|i| dir.join(format!("{name}-{i}"))).collect();
        Setup { placement: Placement::Disk, disks, ..base.clone() }
    };
    let mut all = Vec::new();
    // Weights of some groups; those of all groups and all state of some; all state of all.
    for cache_bytes in [100_000, 500_000, u64::MAX] {
        let copies = |name: &str| Setup {
            cache_bytes,
            overrides: tiny_windows(),
            ..disk(&format!("copies-{cache_bytes}-{name}"), 1)
        };
        let waits = WindowOverrides { overlap: Some(false), ..WindowOverrides::default() };
        let discrete = Setup { discrete: true, threads: 2, ..copies("discrete") };
        all.push((format!("{cache_bytes} bytes of copies"), copies("host")));
        all.push((format!("{cache_bytes} bytes of copies, discrete"), discrete));
        let waiting = Setup { overrides: waits, ..copies("waiting") };
        all.push((format!("{cache_bytes} bytes of copies, compute waits for updates"), waiting));
        let saved = Setup { durability: Durability::Checkpoint, ..copies("saved") };
        all.push((format!("{cache_bytes} bytes of copies, nothing saved"), saved));
        let once = Setup { durability: Durability::None, ..copies("once") };
        all.push((format!("{cache_bytes} bytes of copies, kept once"), once));
    }
    let saved = |name: &str, durability: Durability, discrete: bool| Setup {
        durability,
        overrides: tiny_windows(),
        discrete,
        ..disk(name, 2)
    };
    for durability in [Durability::Checkpoint, Durability::None] {
        for discrete in [false, true] {
            let words = format!("tiny windows, durability {durability:?}, discrete {discrete}");
            all.push((words.clone(), saved(&words, durability, discrete)));
        }
    }
    all
}

/// Every variant of a setup, named.
fn variants(base: &Setup, dir: &std::path::Path) -> Vec<(String, Setup)> {
    let disk = |name: &str, paths: usize| {
        let disks = (0..paths).map(|i| dir.join(format!("{name}-{i}"))).collect();
        Setup { placement: Placement::Disk, disks, ..base.clone() }
    };
    let mut all = vec![
        ("host".to_owned(), Setup { placement: Placement::Host, ..base.clone() }),
        ("none, two threads".to_owned(), Setup { threads: 2, ..base.clone() }),
        ("none, discrete".to_owned(), Setup { discrete: true, ..base.clone() }),
        ("host, discrete".to_owned(), Setup { placement: Placement::Host, discrete: true, ..base.clone() }),
        (
            "host, discrete, compute waits for updates".to_owned(),
            Setup {
                placement: Placement::Host,
                discrete: true,
                overrides: WindowOverrides { overlap: Some(false), ..WindowOverrides::default() },
                ..base.clone()
            },
        ),
        ("one path".to_owned(), disk("one", 1)),
        ("three paths".to_owned(), disk("three", 3)),
        (
            "three paths of different speed".to_owned(),
            Setup {
                overrides: tiny_windows(),
                disk_weights: Some(vec![3.0, 1.0, 1.5]),
                ..disk("weighted", 3)
            },
        ),
        ("tiny windows".to_owned(), Setup { overrides: tiny_windows(), ..disk("tiny", 1) }),
        (
            "compute waits for updates".to_owned(),
            Setup {
                overrides: WindowOverrides { overlap: Some(false), ..WindowOverrides::default() },
                ..disk("waiting", 1)
            },
        ),
        (
            "compute waits for updates in tiny windows".to_owned(),
            Setup {
                overrides: WindowOverrides { overlap: Some(false), ..tiny_windows() },
                ..disk("waiting-tiny", 1)
            },
        ),
        (
            "tiny windows, discrete, two threads".to_owned(),
            Setup { overrides: tiny_windows(), discrete: true, threads: 2, ..disk("tiny-discrete", 2) },
        ),
        (
            "tiny windows, discrete, signals go down and up again".to_owned(),
            Setup {
                overrides: WindowOverrides { signals_stay: Some(false), ..tiny_windows() },
                discrete: true,
                ..disk("crossing", 1)
            },
        ),
    ];
    all.extend(staying(base, dir));
    all.extend(on_device(base, dir));
    all.extend(unsaved(base, dir));
    // Without an override all blocks of so small a model keep their intermediates.
    for blocks in 0..=base.model.layers {
        let on_disk = WindowOverrides { kept_blocks: Some(blocks), ..tiny_windows() };
        let here = Setup { overrides: keeping(blocks), ..base.clone() };
        let elsewhere = Setup { overrides: on_disk, discrete: true, ..disk(&format!("keep-{blocks}"), 1) };
        all.push((format!("none, {blocks} blocks keep, two threads"), Setup { threads: 2, ..here.clone() }));
        all.push((format!("none, {blocks} blocks keep, discrete"), Setup { discrete: true, ..here }));
        all.push((format!("tiny windows, {blocks} blocks keep, discrete"), elsewhere));
    }
    all.extend(keeping_elsewhere(base, dir));
    if terrace_aio::engine::UringEngine::probe().is_ok() {
        let uring = Setup { choice: EngineChoice::Uring, overrides: tiny_windows(), ..disk("uring", 3) };
        all.push(("io_uring, three paths, tiny windows".to_owned(), uring));
    } else {
        println!("io_uring is forbidden here: its variant was not run");
    }
    all
}

fn check(base: &Setup) {
    let dir = tempfile::tempdir().unwrap();
    let base = &Setup { overrides: keeping(0), ..base.clone() };
    let expected = base.run(STEPS);
    assert!(expected.0[0].is_finite() && expected.0[3] < expected.0[0] + 1.0, "it trains: {:?}", expected.0);
    // On a card, whose kernels may be emulated, one number type has the first, third and so on, and the others the rest.
    let is_turn =
        |number: usize| !support::card::is_named() || number % 2 == usize::from(base.dtype == DType::F32);
    for (number, (name, setup)) in variants(base, dir.path()).into_iter().enumerate() {
        if is_turn(number) {
            assert_eq!(setup.run(STEPS), expected, "{name}");
        }
    }
}

/// With the micro-batches one after the other: the bits of all of them together, wherever anything is parked in between.
fn check_horizontal(base: &Setup) {
    let dir = tempfile::tempdir().unwrap();
    let base = &Setup { micro_batches: 3, overrides: keeping(0), ..base.clone() };
    let expected = base.run(STEPS);
    let base = &Setup { accumulation: Accumulation::Horizontal, ..base.clone() };
    assert_eq!(base.run(STEPS), expected, "none");
    for (name, setup) in variants(base, dir.path()) {
        println!("{name}");
        assert_eq!(setup.run(STEPS), expected, "{name}");
    }
}

#[test]
fn horizontal_accumulation_tied() {
    check_horizontal(&Setup::new(true));
    check_horizontal(&Setup { clip: None, ..Setup::new(true) });
}

#[test]
fn horizontal_accumulation_untied() {
    check_horizontal(&Setup::new(false));
    check_horizontal(&Setup { clip: None, ..Setup::new(false) });
}

#[test]
fn horizontal_accumulation_of_other_types() {
    check_horizontal(&Setup { dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
    check_horizontal(&Setup { state: StateFormat::Compact, clip: None, ..Setup::new(true) });
    // The first steps overflow and are skipped.
    let scale = LossScaleConfig { initial_scale_power: 26, hysteresis: 1, ..LossScaleConfig::default() };
    let f16 = Setup { dtype: DType::F16, state: StateFormat::Fp32, ..Setup::new(true) };
    check_horizontal(&Setup { loss_scale: Some(scale), ..f16 });
}

#[test]
fn horizontal_accumulation_of_parameter_groups() {
    let groups = vec![
        GroupRule::new("*.1.self_attn.k_proj*").frozen(),
        GroupRule::new("*embed*").lr(GroupLr::Own(1e-3)).weight_decay(0.0),
    ];
    check_horizontal(&Setup { groups: groups.clone(), ..Setup::new(true) });
    check_horizontal(&Setup { groups, clip: None, ..Setup::new(false) });
}

#[test]
fn bf16_with_split_state_tied() {
    check(&Setup::new(true));
}

#[test]
fn bf16_with_split_state_untied_without_clipping() {
    check(&Setup { clip: None, ..Setup::new(false) });
}

#[test]
fn bf16_with_split_state_tied_without_clipping() {
    check(&Setup { clip: None, ..Setup::new(true) });
}

#[test]
fn f32() {
    check(&Setup { dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
}

fn model(architecture: &str, rest: &str) -> ModelConfig {
    let text = format!(
        r#"{{"architectures":["{architecture}"],"vocab_size":97,"hidden_size":48,"intermediate_size":112,
        "num_hidden_layers":3,"num_attention_heads":4,"max_position_embeddings":64,"rms_norm_eps":1e-5,
        "rope_theta":10000.0,"hidden_act":"silu",{rest}}}"#
    );
    ModelConfig::parse(&text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Experts in two layers of three, more of them than some micro-batches have tokens for.
fn with_experts() -> ModelConfig {
    model(
        "Qwen3MoeForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"tie_word_embeddings":true,"num_experts":24,"num_experts_per_tok":3,
        "moe_intermediate_size":32,"norm_topk_prob":true,"mlp_only_layers":[1]"#,
    )
}

fn gpt_oss() -> ModelConfig {
    model(
        "GptOssForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"sliding_window":5,"num_local_experts":12,"num_experts_per_tok":3,
        "rope_scaling":{"rope_type":"linear","factor":2.0}"#,
    )
}

/// Beside the experts is one that all tokens go through; chosen with what batches bring in the first, with a share of each token in the second.
fn with_shared() -> [ModelConfig; 2] {
    let glm = r#""num_key_value_heads":2,"n_routed_experts":6,"num_experts_per_tok":2,"moe_intermediate_size":24,
        "n_shared_experts":2,"routed_scaling_factor":1.5,"use_qk_norm":true,"first_k_dense_replace":1"#;
    let qwen = r#""num_key_value_heads":2,"num_experts":6,"num_experts_per_tok":2,"moe_intermediate_size":24,
        "shared_expert_intermediate_size":40,"mlp_only_layers":[1]"#;
    [model("Glm4MoeForCausalLM", glm), model("Qwen2MoeForCausalLM", qwen)]
}

/// Chunks of positions, a layer that sees all and has none; experts whose inputs are multiplied, beside one that all tokens go through.
fn llama4() -> ModelConfig {
    model(
        "Llama4ForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"intermediate_size_mlp":96,"num_local_experts":6,"num_experts_per_tok":2,
        "moe_layers":[1,2],"no_rope_layers":[1,0,1],"attention_chunk_size":5,"floor_scale":3,"attn_scale":0.5"#,
    )
}

/// Layers with a window, and one whose heads are others and whose keys are values; capped logits, and numbers of the files that multiply layers.
fn heads_by_layer() -> ModelConfig {
    model(
        "Gemma4ForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"global_head_dim":24,"num_global_key_value_heads":1,"attention_k_eq_v":true,
        "sliding_window":5,"hidden_size_per_layer_input":0,"final_logit_softcapping":4.0"#,
    )
}

/// The same with experts beside the feed-forward of all tokens.
fn beside_dense() -> ModelConfig {
    model(
        "Gemma4ForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"global_head_dim":24,"sliding_window":5,"hidden_size_per_layer_input":0,
        "enable_moe_block":true,"num_experts":6,"top_k_experts":2,"moe_intermediate_size":24"#,
    )
}

/// Two layers of the gated delta rule before one of attention with a gate.
fn recurrent() -> ModelConfig {
    model(
        "Qwen3_5ForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"tie_word_embeddings":true,"full_attention_interval":3,
        "linear_num_key_heads":2,"linear_num_value_heads":6,"linear_key_head_dim":20,"linear_value_head_dim":12"#,
    )
}

/// The same with experts in one layer of three.
fn recurrent_with_experts() -> ModelConfig {
    model(
        "Qwen3NextForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"full_attention_interval":3,"linear_num_key_heads":2,"linear_num_value_heads":4,
        "linear_key_head_dim":12,"linear_value_head_dim":20,"num_experts":6,"num_experts_per_tok":2,"moe_intermediate_size":24,
        "shared_expert_intermediate_size":40,"mlp_only_layers":[0,2]"#,
    )
}

#[test]
fn the_delta_rule() {
    check(&Setup { model: recurrent_with_experts(), ..Setup::new(true) });
    check(&Setup { model: recurrent(), ..Setup::new(true) });
    check_horizontal(&Setup {
        model: recurrent(),
        dtype: DType::F32,
        state: StateFormat::Fp32,
        ..Setup::new(true)
    });
}

/// Keys and values of a latent, queries of another, and values as short as an odd number; experts in groups.
fn with_latents() -> ModelConfig {
    model(
        "DeepseekV3ForCausalLM",
        r#""num_key_value_heads":4,"kv_lora_rank":20,"q_lora_rank":28,"qk_nope_head_dim":12,"qk_rope_head_dim":8,"v_head_dim":9,
        "n_routed_experts":8,"num_experts_per_tok":2,"n_group":4,"topk_group":2,"moe_intermediate_size":24,"first_k_dense_replace":1"#,
    )
}

/// Attention and feed-forward side by side, in a layer with a window and two without positions.
fn side_by_side() -> ModelConfig {
    model(
        "Cohere2ForCausalLM",
        r#""num_key_value_heads":2,"sliding_window":5,"logit_scale":0.5,
        "layer_types":["sliding_attention","full_attention","full_attention"]"#,
    )
}

/// Queries are multiplied by a number that grows with each fourth position.
fn with_query_factors() -> ModelConfig {
    model(
        "Ministral3ForCausalLM",
        r#""num_key_value_heads":2,"head_dim":16,"rope_parameters":{"rope_type":"yarn","factor":16.0,
        "original_max_position_embeddings":4,"llama_4_scaling_beta":0.5}"#,
    )
}

#[test]
fn halves_side_by_side() {
    check(&Setup { model: side_by_side(), ..Setup::new(true) });
    let (dtype, state) = (DType::F32, StateFormat::Fp32);
    check_horizontal(&Setup { model: side_by_side(), dtype, state, ..Setup::new(true) });
}

#[test]
fn queries_multiplied_by_their_positions() {
    check(&Setup { model: with_query_factors(), ..Setup::new(true) });
}

#[test]
fn latents() {
    let model = with_latents();
    check(&Setup { model: model.clone(), ..Setup::new(true) });
    check_horizontal(&Setup { model, dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
}

#[test]
fn heads_that_differ_by_layer() {
    check(&Setup { model: heads_by_layer(), ..Setup::new(true) });
    let (dtype, state) = (DType::F32, StateFormat::Fp32);
    check_horizontal(&Setup { model: heads_by_layer(), dtype, state, ..Setup::new(true) });
}

#[test]
fn experts_beside_what_is_dense() {
    check(&Setup { model: beside_dense(), ..Setup::new(true) });
    let (dtype, state) = (DType::F32, StateFormat::Fp32);
    check_horizontal(&Setup { model: beside_dense(), dtype, state, ..Setup::new(true) });
}

#[test]
fn shared_experts() {
    for model in with_shared() {
        check(&Setup { model: model.clone(), ..Setup::new(true) });
        check_horizontal(&Setup { model, dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
    }
}

#[test]
fn attention_sinks_and_experts_with_biases() {
    check(&Setup { model: gpt_oss(), ..Setup::new(true) });
}

#[test]
fn experts() {
    check(&Setup { model: with_experts(), ..Setup::new(true) });
    check(&Setup { model: with_experts(), clip: None, ..Setup::new(true) });
}

/// So many experts' gradients are complete before those of the next begin.
fn staged(model: ModelConfig, experts_at_once: usize) -> ModelConfig {
    let mixture = model.mixture.map(|mixture| Mixture { experts_at_once: Some(experts_at_once), ..mixture });
    ModelConfig { mixture, ..model }
}

/// With one micro-batch their gradients leave the block before it ends: in chunks that two stages share, whole, or to state that is where they
/// are. With several they stay.
#[test]
fn experts_in_stages() {
    for (model, at_once, dtype, clip) in [
        (with_experts(), 7, DType::BF16, Some(1.0)),
        (gpt_oss(), 5, DType::BF16, None),
        (with_shared()[0].clone(), 2, DType::BF16, Some(1.0)),
        (llama4(), 4, DType::BF16, Some(1.0)),
        (with_shared()[1].clone(), 1, DType::F32, Some(1.0)),
    ] {
        let model = staged(model, at_once);
        let state = if dtype == DType::F32 { StateFormat::Fp32 } else { StateFormat::Split };
        let base = Setup { model, dtype, state, clip, ..Setup::new(true) };
        check(&Setup { micro_batches: 1, ..base.clone() });
        if dtype == DType::F32 {
            check(&base);
            check_horizontal(&base);
        }
    }
}

#[test]
fn experts_in_other_types() {
    let model = with_experts();
    check(&Setup { model: model.clone(), dtype: DType::F32, state: StateFormat::Fp32, ..Setup::new(true) });
    check_horizontal(&Setup { model, ..Setup::new(true) });
}

/// What blocks keep is not the same in every family: head norms, biases, windows of attention, one key head for all queries, norms or
/// numbers that follow, experts.
#[test]
fn every_family_keeps() {
    for model in [
        model("Qwen3ForCausalLM", r#""num_key_value_heads":2,"head_dim":16,"tie_word_embeddings":true"#),
        model("Qwen2ForCausalLM", r#""num_key_value_heads":1,"tie_word_embeddings":false"#),
        model("MistralForCausalLM", r#""num_key_value_heads":4,"sliding_window":5"#),
        model(
            "Olmo3ForCausalLM",
            r#""num_key_value_heads":2,"sliding_window":5,"layer_types":["sliding_attention","full_attention","sliding_attention"],
            "rope_parameters":{"full_attention":{"rope_type":"linear","factor":4.0}}"#,
        ),
        model(
            "GraniteForCausalLM",
            r#""num_key_value_heads":2,"embedding_multiplier":3.0,"residual_multiplier":0.3,"attention_multiplier":0.2,
            "logits_scaling":2.0"#,
        ),
        model(
            "Gemma3ForCausalLM",
            r#""num_key_value_heads":2,"head_dim":16,"sliding_window":5,"sliding_window_pattern":2"#,
        ),
        heads_by_layer(),
        beside_dense(),
        model("MixtralForCausalLM", r#""num_key_value_heads":2,"sliding_window":5,"num_local_experts":4"#),
        model("OlmoeForCausalLM", r#""num_key_value_heads":2,"num_experts":6,"num_experts_per_tok":2"#),
        with_experts(),
        gpt_oss(),
        llama4(),
        with_shared()[0].clone(),
        with_shared()[1].clone(),
        recurrent(),
        with_latents(),
        side_by_side(),
        with_query_factors(),
        model(
            "Glm4ForCausalLM",
            r#""num_key_value_heads":2,"head_dim":16,"attention_bias":true,"partial_rotary_factor":0.5"#,
        ),
        model(
            "HunYuanMoEV1ForCausalLM",
            r#""num_key_value_heads":2,"head_dim":16,"num_experts":6,"moe_topk":[2,2,2]"#,
        ),
        model(
            "LlamaForCausalLM",
            r#""num_key_value_heads":2,"attention_bias":true,"mlp_bias":true,"tie_word_embeddings":true"#,
        ),
    ] {
        for (dtype, state) in [(DType::BF16, StateFormat::Split), (DType::F32, StateFormat::Fp32)] {
            let base = Setup { model: model.clone(), dtype, state, micro_batches: 3, ..Setup::new(true) };
            let expected = Setup { overrides: keeping(0), ..base.clone() }.run(3);
            for (blocks, discrete) in [(1, true), (2, false), (3, true), (usize::MAX, false)] {
                let setup = Setup { overrides: keeping(blocks), discrete, ..base.clone() };
                let mut engine = setup.create();
                assert_eq!(engine.kept_blocks(), (blocks.min(3), 3));
                let losses = setup.continue_to(&mut engine, 3);
                assert_eq!(
                    (losses, weights_hash(&mut engine)),
                    expected,
                    "{:?}: {blocks} in {dtype}",
                    model.family
                );
            }
        }
    }
}

/// What is kept of rows that make more than one tile.
#[test]
fn every_tile_keeps() {
    let length = TILE_ROWS + 60;
    let shared = with_shared()[0].clone();
    let in_stages = [staged(with_experts(), 9), staged(shared.clone(), 4), staged(gpt_oss(), 5)];
    for model in [small_llama(true), with_experts(), shared, beside_dense()].into_iter().chain(in_stages) {
        let model = ModelConfig { positions_max: length, ..model };
        let run = |blocks| {
            let base = Setup { overrides: keeping(blocks), model: model.clone(), ..Setup::new(true) };
            let limits = BatchLimits { sequences: 1, length, micro_batches: 1, ..base.config().limits };
            let config = EngineConfig { limits, ..base.config() };
            let batches = TokenBatch::for_source(&model, &mut RandomSource::new(7)).unwrap();
            let mut source = RandomSource::for_config(&model, 7);
            let blocks = Model::new(model.clone()).blocks;
            let sample = batches.blank(1, length);
            let mut engine = Engine::create(config, base.backend(), blocks, &sample, &mut source).unwrap();
            let ids: Vec<u32> = (0..length as u32).map(|i| i * 31 % 97).collect();
            let labels: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
            let batch = batches.train(&[Row { ids: &ids, labels: &labels }], 1, length).unwrap();
            let report = engine.train_step(&[batch], 1e-3).unwrap();
            (report.loss, weights_hash(&mut engine))
        };
        assert_eq!(run(3), run(0), "{:?}", model.family);
    }
}

#[test]
fn reduced_state_formats() {
    for state in [StateFormat::Bf16, StateFormat::Compact] {
        println!("{state}");
        check(&Setup { state, ..Setup::new(true) });
        check(&Setup { state, clip: None, ..Setup::new(false) });
    }
}

#[test]
fn every_algorithm() {
    for name in ["adam", "adagrad", "lion", "sgd"] {
        println!("{name}");
        let optimizer: Algorithm = name.parse().unwrap();
        for state in [StateFormat::Split, StateFormat::Compact] {
            check(&Setup { optimizer, state, ..Setup::new(true) });
        }
    }
}

#[test]
fn parameter_groups() {
    // Runs of one and of several parameters, in the middle and at the ends of groups, one of them frozen.
    let groups = vec![
        GroupRule::new("*.1.self_attn.k_proj*").frozen(),
        GroupRule::new("*norm*").weight_decay(0.0),
        GroupRule::new("*embed*").lr(GroupLr::Own(1e-3)).weight_decay(0.0),
        GroupRule::new("*.up_proj*").lr(GroupLr::Scale(2.0)),
    ];
    for state in [StateFormat::Split, StateFormat::Fp32, StateFormat::Bf16, StateFormat::Compact] {
        println!("{state}");
        check(&Setup { state, groups: groups.clone(), ..Setup::new(true) });
    }
    check(&Setup { clip: None, groups: groups.clone(), ..Setup::new(true) });
    let optimizer = "lion".parse().unwrap();
    check(&Setup { optimizer, groups, ..Setup::new(false) });
}

/// The embedding has six chunks, the last of another size, in slots enough that three of them are updated side by side.
#[test]
fn chunks_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Setup::new(true).model;
    model.vocab = 1900;
    let groups = vec![GroupRule::new("*embed*").lr(GroupLr::Own(1e-3)).weight_decay(0.0)];
    for state in [StateFormat::Split, StateFormat::Compact] {
        for clip in [Some(0.5), None] {
            let base =
                Setup { model: model.clone(), state, clip, groups: groups.clone(), ..Setup::new(true) };
            let expected = base.run(STEPS);
            // Nothing is copied; weights alone; all state of some groups.
            for cache_bytes in [0, 200_000, 900_000] {
                for gradients_on_disk in [false, true] {
                    let name = format!("{state}, {clip:?}, {cache_bytes}, {gradients_on_disk}");
                    let overrides = WindowOverrides {
                        chunk_elements: Some(1 << 14),
                        update_slots: Some(9),
                        gradients_on_disk: Some(gradients_on_disk),
                        ..WindowOverrides::default()
                    };
                    let setup = Setup {
                        placement: Placement::Disk,
                        disks: vec![dir.path().join(&name)],
                        cache_bytes,
                        threads: 3,
                        overrides,
                        ..base.clone()
                    };
                    assert_eq!(setup.run(STEPS), expected, "{name}");
                }
            }
        }
    }
}

/// Chunks of state in host memory are updated together, a group at a time, and gradients come down whole or by chunks.
#[test]
fn groups_at_once() {
    let mut model = Setup::new(true).model;
    model.vocab = 1900;
    let groups = vec![
        GroupRule::new("*embed*").lr(GroupLr::Own(1e-3)).weight_decay(0.0),
        GroupRule::new("*layers.1.mlp*").frozen(),
    ];
    for (state, tied) in [(StateFormat::Split, true), (StateFormat::Compact, false)] {
        for clip in [Some(0.5), None] {
            let model = terrace_models::ModelConfig { tied, ..model.clone() };
            let base = Setup { model, state, clip, groups: groups.clone(), ..Setup::new(tied) };
            let expected = base.run(STEPS);
            for (chunk_elements, threads) in [(1 << 14, 1), (1 << 14, 3), (1 << 16, 2)] {
                for (discrete, whole, overlap) in
                    [(false, false, true), (true, true, true), (true, false, true), (true, true, false)]
                {
                    let overrides = WindowOverrides {
                        chunk_elements: Some(chunk_elements),
                        gradients_whole: Some(whole),
                        overlap: Some(overlap),
                        ..WindowOverrides::default()
                    };
                    let placement = Placement::Host;
                    let setup = Setup { placement, discrete, threads, overrides, ..base.clone() };
                    let name = format!("{state}, {clip:?}, {chunk_elements}, {discrete}, {whole}, {overlap}");
                    assert_eq!(setup.run(STEPS), expected, "{name}");
                }
            }
        }
    }
}

#[test]
fn the_two_state_formats_give_the_same_bits() {
    let split = Setup::new(false);
    let fp32 = Setup { state: StateFormat::Fp32, ..Setup::new(false) };
    assert_eq!(split.run(STEPS), fp32.run(STEPS));
}

/// The canary: a change in the data must change the hash, or the comparisons above prove nothing.
#[test]
fn another_gradient_gives_another_hash() {
    let base = Setup::new(true);
    assert_ne!(base.run(STEPS).1, Setup { clip: Some(0.4), ..base.clone() }.run(STEPS).1);
}
