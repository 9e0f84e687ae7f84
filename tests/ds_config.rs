//! DeepSpeed configuration files: what is honoured, refused and warned about.
#![allow(missing_docs)]

use terrace::cli::args::OptimizerName;
use terrace::config::ds_config::DsOptimizer;
use terrace::config::{DsConfig, DsOffload, ScheduleChoice};
use terrace_optimizer::{LossScaleConfig, MomentumCycle, OneCycle, ScheduleKind, Warmup};

fn read(text: &str) -> DsConfig {
    DsConfig::parse(text, "ds.json").unwrap_or_else(|e| panic!("{text}\n{e}"))
}

/// Every text is refused with a message that contains the reason.
fn refused(cases: &[(&str, &str)]) {
    for (text, reason) in cases {
        let error = DsConfig::parse(text, "ds.json").expect_err(text).to_string();
        assert!(error.starts_with("ds.json:"), "{error} does not name the file");
        assert!(error.contains(reason), "{text}: \"{error}\" does not say \"{reason}\"");
    }
}

#[test]
fn the_batch_triple() {
    for (batch, micro, accum, expected) in [
        ("32", "16", "2", (Some(16), Some(2))),
        ("32", "16", "null", (Some(16), Some(2))),
        ("32", "null", "4", (Some(8), Some(4))),
        ("null", "8", "4", (Some(8), Some(4))),
        ("32", "null", "null", (Some(32), Some(1))),
        ("null", "8", "null", (Some(8), None)),
        ("null", "null", "4", (None, Some(4))),
        ("\"auto\"", "\"auto\"", "\"auto\"", (None, None)),
        ("32", "\"auto\"", "2", (Some(16), Some(2))),
        ("3.2e1", "\"16\"", "2", (Some(16), Some(2))),
    ] {
        let text = format!(
            "{{train_batch_size: {batch}, train_micro_batch_size_per_gpu: {micro}, gradient_accumulation_steps: {accum}}}"
        );
        let config = read(&text);
        assert_eq!(config.batches(None, None).unwrap(), expected, "{text}");
    }
    refused(&[
        (
            r#"{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 17, "gradient_accumulation_steps": 2}"#,
            "33 is not",
        ),
        (
            r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 18, "gradient_accumulation_steps": 1}"#,
            "32 is not",
        ),
        (r#"{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 2}"#, "not a multiple"),
        (r#"{"train_batch_size": 33, "gradient_accumulation_steps": 2}"#, "not a multiple"),
        (r#"{"train_batch_size": 0}"#, "at least 1"),
        (r#"{"train_batch_size": true}"#, "whole number"),
    ]);
}

#[test]
fn numbers_and_booleans() {
    for (number, value) in
        [("8", 8), ("5e8", 500_000_000), ("\"500000000\"", 500_000_000), ("1048576.0", 1 << 20)]
    {
        assert_eq!(
            read(&format!("{{aio: {{block_size: {number}}}}}")).aio_block_size,
            Some(value),
            "{number}"
        );
    }
    for number in ["\"5e8\"", "0.5", "-1", "1e30", "true", "[1]", "{}", "\"x\"", "99999999999999999999"] {
        refused(&[(
            &format!("{{aio: {{block_size: {number}}}}}"),
            "aio.block_size: expected a whole number",
        )]);
    }
    for (word, value) in [
        ("true", true),
        ("false", false),
        ("1", true),
        ("0", false),
        ("\"true\"", true),
        ("\"False\"", false),
        ("\"yes\"", true),
        ("\"no\"", false),
        ("\"on\"", true),
        ("\"0\"", false),
    ] {
        assert_eq!(read(&format!("{{bf16: {{enabled: {word}}}}}")).bf16, Some(value), "{word}");
    }
    for word in ["2", "\"maybe\"", "[]", "-1"] {
        refused(&[(&format!("{{bf16: {{enabled: {word}}}}}"), "bf16.enabled: expected true or false")]);
    }
    assert_eq!(read("{bf16: {enabled: \"auto\"}}").bf16, None);
}

#[test]
fn optimizers() {
    let text = r#"{"optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": "1e-6", "weight_decay": 0.1}}}"#;
    let expected = DsOptimizer {
        name: Some(OptimizerName::Adamw),
        lr: Some(3e-4),
        betas: Some((0.8, 0.99)),
        eps: Some(1e-6),
        weight_decay: Some(0.1),
        ..DsOptimizer::default()
    };
    assert_eq!(read(text).optimizer, Some(expected));
    let auto = r#"{"optimizer": {"type": "adamw", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": true}}}"#;
    let config = read(auto);
    assert_eq!(
        config.optimizer,
        Some(DsOptimizer { name: Some(OptimizerName::Adamw), ..DsOptimizer::default() })
    );
    assert_eq!(config.warnings, Vec::<String>::new());
    let decay = |params: &str| {
        let config = read(&format!("{{optimizer: {{type: \"AdamW\", params: {{{params}}}}}}}"));
        config.optimizer.unwrap().weight_decay
    };
    assert_eq!(decay("torch_adam: true"), Some(0.01), "what torch has where nothing is said");
    assert_eq!(decay("torch_adam: true, weight_decay: 0"), Some(0.0));
    assert_eq!(decay("lr: 1e-3"), None);
    let name = |text: &str| read(text).optimizer.unwrap().name.unwrap();
    assert_eq!(
        name("{optimizer: {type: \"Adam\", params: {adam_w_mode: false, weight_decay: 0.1}}}"),
        OptimizerName::Adam
    );
    let decoupled = "{optimizer: {type: \"AdamW\", params: {adam_w_mode: false}}}";
    assert_eq!(name(decoupled), OptimizerName::Adamw, "only \"Adam\" can be told");
    assert_eq!(name("{optimizer: {type: \"Lion\"}}"), OptimizerName::Lion);
    assert_eq!(
        name("{optimizer: {type: \"SGD\", params: {betas: \"auto\", eps: \"auto\"}}}"),
        OptimizerName::Sgd
    );
    let sgd =
        read("{optimizer: {type: \"SGD\", params: {momentum: 0.8, nesterov: true}}}").optimizer.unwrap();
    assert_eq!((sgd.name, sgd.momentum, sgd.nesterov), (Some(OptimizerName::Sgd), Some(0.8), Some(true)));
    let with = |params: &str| format!("{{optimizer: {{type: \"AdamW\", params: {{{params}}}}}}}");
    refused(&[
        ("{optimizer: {type: \"Lamb\"}}", "\"Lamb\" is not available"),
        ("{optimizer: {type: 3}}", "optimizer.type: expected a string"),
        (&with("max_grad_norm: 1.0"), "set gradient_clipping"),
        (&with("lr: -1"), "must not be negative"),
        (&with("lr: \"fast\""), "expected a finite number"),
        (&with("betas: [0.9]"), "betas: expected an array of two numbers, found 1 in it"),
        (&with("betas: 0.9"), "betas: expected an array of two numbers, found 0.9"),
        (&with("betas: [0.9, \"x\"]"), "betas: expected an array of two numbers, found the string \"x\""),
        (&with("betas: [0.9, 1]"), "below 1"),
        (&with("momentum: 0.9"), "optimizer.params.momentum: unknown key"),
        (&with("amsgrad: true"), "only false is available"),
        ("{optimizer: {type: \"SGD\", params: {betas: [0.1, 0.2]}}}", "optimizer.params.betas: unknown key"),
        (
            "{optimizer: {type: \"Adagrad\", params: {betas: [0.1, 0.2]}}}",
            "optimizer.params.betas: unknown key",
        ),
        ("{optimizer: {type: \"Lion\", params: {eps: 1}}}", "optimizer.params.eps: unknown key"),
    ]);
}

#[test]
fn schedulers() {
    let of = |kind: &str, params: &str| {
        let text = format!("{{scheduler: {{type: \"{kind}\", params: {{{params}}}}}}}");
        read(&text).schedule.unwrap()
    };
    let warmup = |warmup, min_lr| ScheduleKind::WarmupLr { warmup, min_lr };
    let lr = ScheduleChoice::new(warmup(Warmup::Log, 0.0));
    let lr = ScheduleChoice { warmup_steps: 1000, ..lr };
    assert_eq!(of("WarmupLR", ""), lr);
    assert_eq!(of("WarmupLR", "warmup_max_lr: \"auto\""), lr);
    for kind in ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] {
        assert_eq!(of(kind, "warmup_num_steps: \"auto\"").warmup_steps, 0, "as transformers fills it in");
    }
    let max = |kind, params| of(kind, params).base_lr;
    assert_eq!(max("WarmupLR", "warmup_max_lr: 0.5"), Some(0.5));
    assert_eq!(max("WarmupDecayLR", ""), Some(0.001));
    assert_eq!(max("WarmupDecayLR", "warmup_max_lr: \"auto\""), None);
    assert_eq!(of("WarmupLR", "warmup_min_lr: 1e-5").kind, warmup(Warmup::Log, 1e-5));
    let params = "total_num_steps: 9, warmup_num_steps: 0, warmup_max_lr: 1, warmup_type: \"linear\", last_batch_iteration: -1";
    let kind = ScheduleKind::WarmupDecayLr { warmup: Warmup::Linear, min_lr: 0.0 };
    let decay = ScheduleChoice { total_steps: Some(9), base_lr: Some(1.0), ..ScheduleChoice::new(kind) };
    assert_eq!(of("WarmupDecayLR", params), decay);
    let open = of("WarmupDecayLR", "total_num_steps: \"auto\", warmup_num_steps: 5");
    assert_eq!((open.total_steps, open.complete(77, 9.0).total_steps, open.warmup_steps), (None, 77, 5));
    let cosine = of("WarmupCosineLR", "total_num_steps: 50, cos_min_ratio: 0.25");
    assert_eq!((cosine.total_steps, cosine.min_ratio, cosine.base_lr), (Some(50), 0.25, None));
    let cycle = OneCycle { cycle_second_step_size: Some(7), decay_lr_rate: 0.5, ..OneCycle::new(1e-5, 1e-3) };
    let params = "cycle_min_lr: 1e-5, cycle_max_lr: 1e-3, cycle_second_step_size: 7, decay_lr_rate: 0.5";
    assert_eq!(of("OneCycle", params).kind, ScheduleKind::OneCycle(cycle));
    let fixed = format!("{params}, cycle_momentum: false, cycle_min_mom: 0.7");
    assert_eq!(of("OneCycle", &fixed).kind, ScheduleKind::OneCycle(OneCycle { momentum: None, ..cycle }));
    let moved = Some(MomentumCycle { cycle_min_mom: 0.7, ..MomentumCycle::default() });
    let params = format!("{params}, cycle_min_mom: 0.7");
    assert_eq!(of("OneCycle", &params).kind, ScheduleKind::OneCycle(OneCycle { momentum: moved, ..cycle }));
    let range = ScheduleKind::LrRangeTest { step_size: 5, step_rate: 1.0, staircase: true };
    let range = ScheduleChoice { base_lr: Some(0.001), ..ScheduleChoice::new(range) };
    let params = "lr_range_test_step_size: 5, lr_range_test_staircase: true";
    assert_eq!(of("LRRangeTest", params), range);
    refused(&[
        ("{scheduler: {type: \"StepLR\"}}", "\"StepLR\" is not available; use constant"),
        ("{scheduler: {type: \"OneCycle\"}}", "cycle_min_lr: missing"),
        (
            "{scheduler: {type: \"OneCycle\", params: {cycle_min_lr: 1}}}",
            "scheduler.params.cycle_max_lr: missing",
        ),
        ("{scheduler: {}}", "scheduler.type: missing"),
        ("{scheduler: {type: \"WarmupLR\", params: {warmup_type: \"cubic\"}}}", "cubic"),
        ("{scheduler: {type: \"WarmupLR\", params: {total_num_steps: 3}}}", "unknown key"),
    ]);
}

#[test]
fn precision() {
    assert_eq!(read("{}").bf16, None);
    assert_eq!(read("{bfloat16: {enabled: true}}").bf16, Some(true));
    assert_eq!(read("{fp16: {enabled: false, loss_scale: 0}, bf16: {enabled: true}}").bf16, Some(true));
    assert_eq!(read("{fp16: {enabled: false}}").fp16, Some(false));
    let auto = read("{fp16: {enabled: \"auto\"}}");
    assert_eq!((auto.bf16, auto.fp16, auto.loss_scale), (None, None, Some(LossScaleConfig::default())));
    let full = "{fp16: {enabled: true, auto_cast: false, loss_scale: 0, initial_scale_power: 20, loss_scale_window: 50, hysteresis: 3, \
        consecutive_hysteresis: true, min_loss_scale: 2}}";
    let expected = LossScaleConfig {
        loss_scale: 0.0,
        initial_scale_power: 20,
        loss_scale_window: 50,
        hysteresis: 3,
        consecutive_hysteresis: true,
        min_loss_scale: 2.0,
    };
    let full = read(full);
    assert_eq!((full.fp16, full.loss_scale), (Some(true), Some(expected)));
    assert_eq!(full.warnings, ["without effect here: fp16.auto_cast"]);
    let fixed = read("{fp16: {enabled: true, loss_scale: 128}}").loss_scale.unwrap();
    assert_eq!((fixed.loss_scale, fixed.is_dynamic()), (128.0, false));
    refused(&[
        ("{fp16: {enabled: true}, bf16: {enabled: true}}", "choose one"),
        ("{fp16: {enabled: true, loss_scale: true}}", "fp16.loss_scale: expected a finite number"),
        ("{fp16: {enabled: true, loss_scale: -1}}", "must not be negative"),
        (
            "{fp16: {enabled: true, initial_scale_power: 127}}",
            "fp16.initial_scale_power: must be at most 126",
        ),
        ("{fp16: {enabled: true, hysteresis: 0}}", "fp16.hysteresis: must be at least 1, found 0"),
        ("{fp16: {enabled: true, loss_scale_window: 0}}", "fp16.loss_scale_window: must be at least 1"),
        ("{fp16: {enabled: true, min_loss_scale: 0}}", "fp16.min_loss_scale: must be finite and positive"),
        ("{bf16: {enable: true}}", "bf16.enable: unknown key"),
        ("{fp16: {enabled: false, loss: 1}}", "fp16.loss: unknown key"),
        ("{bf16: {}, bfloat16: {}}", "both stand"),
        ("{bf16: true}", "expected an object"),
    ]);
}

#[test]
fn offloading() {
    let zero = |text: &str| read(&format!("{{zero_optimization: {{{text}}}}}"));
    for (text, stage) in [("3", 3), ("\"3\"", 3), ("0", 0), ("2.0", 2)] {
        assert_eq!(zero(&format!("stage: {text}")).stage, Some(stage));
    }
    let nvme = zero(
        "offload_param: {device: \"nvme\", nvme_path: \"/x\"}, offload_optimizer: {device: \"cpu\", ratio: 0.3}",
    );
    assert_eq!(nvme.offload_param, Some(DsOffload::Disk("/x".into())));
    assert_eq!(nvme.offload_optimizer, Some(DsOffload::Host));
    assert_eq!(nvme.offload_ratio, Some(0.3));
    assert_eq!(zero("offload_param: null").offload_param, None);
    assert_eq!(zero("offload_param: {}").offload_param, Some(DsOffload::None));
    assert_eq!(zero("offload_param: {device: \"none\"}").offload_param, Some(DsOffload::None));
    let old = zero("cpu_offload: true, cpu_offload_params: true");
    assert_eq!((old.offload_optimizer, old.offload_param), (Some(DsOffload::Host), Some(DsOffload::Host)));
    assert_eq!(old.warnings.len(), 2);
    assert!(old.warnings[0].contains("zero_optimization.cpu_offload is deprecated"));
    let inside = |text: &str| format!("{{zero_optimization: {{{text}}}}}");
    refused(&[
        (&inside("stage: 4"), "must be 0, 1, 2 or 3"),
        (&inside("stage: -1"), "whole number"),
        (&inside("stages: 3"), "zero_optimization.stages: unknown key"),
        (&inside("offload_param: \"none\""), "expected an object"),
        (&inside("offload_param: {device: \"disk\"}"), "found \"disk\""),
        (&inside("offload_param: {device: \"nvme\"}"), "nvme_path: missing"),
        (&inside("offload_optimizer: {device: \"cpu\", nvme_pth: \"/x\"}"), "nvme_pth: unknown key"),
        (&inside("offload_optimizer: {ratio: 2}"), "between 0 and 1"),
        (
            &inside("offload_optimizer: {device: \"cpu\"}, cpu_offload: true"),
            "the old form of offload_optimizer",
        ),
    ]);
}

#[test]
fn a_usual_file_with_all_its_habits() {
    let config = read(
        r#"// made by hand
        {
            "train_batch_size": 16,   # total
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.5,
            "steps_per_print": 10,
            "bf16": { "enabled": true },
            "my_notes": "keep",
            /* offload everything */
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": true, "allgather_sequential": false, "stage3_allgather_sequential": false,
                "compute_grad_norm": true, "parameter_alignment": 8, "save_muon_momentum_buffer_in_memory": false,
                "reduce_bucket_size": 5e8,
                "offload_optimizer": { "device": "nvme", "nvme_path": "/nvme", "pin_memory": true, "buffer_count": 4, },
            },
            "aio": { "block_size": 1048576, "queue_depth": 16, "thread_count": 2, "typo": 1 },
        }"#,
    );
    assert_eq!(config.batches(None, None).unwrap(), (Some(4), Some(4)));
    assert_eq!(config.gradient_clipping, Some(0.5));
    assert_eq!((config.aio_block_size, config.aio_queue_depth), (Some(1 << 20), Some(16)));
    assert_eq!(config.warnings.len(), 2, "{:?}", config.warnings);
    for name in [
        "steps_per_print",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory",
        "aio.thread_count",
    ] {
        assert_eq!(config.warnings[0].matches(name).count(), 1, "{name}: {:?}", config.warnings);
    }
    assert_eq!(config.warnings[1], "unknown keys, ignored: aio.typo, my_notes");
}

#[test]
fn an_empty_path_is_none() {
    let text = r#"{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ""}}}"#;
    refused(&[(text, "nvme_path: empty")]);
}

#[test]
fn what_would_change_the_training_is_refused_where_it_is_on() {
    for key in ["curriculum_learning", "data_efficiency", "elasticity", "progressive_layer_drop"] {
        refused(&[(&format!("{{{key}: {{enabled: true}}}}"), &format!("{key}: not available"))]);
        read(&format!("{{{key}: {{enabled: false}}}}"));
        read(&format!("{{{key}: {{}}}}"));
    }
    // What it does is said in parts of its parts.
    let compression = |text: &str| format!("{{compression_training: {text}}}");
    for enabled in [
        "{enabled: true}",
        "{weight_quantization: {shared_parameters: {enabled: false}}, sparse_pruning: {shared_parameters: {enabled: \"on\"}}}",
        "{layer_reduction: {enabled: true, keep_number_layer: 5}}",
    ] {
        refused(&[(&compression(enabled), "compression_training: something in it is enabled")]);
    }
    for harmless in [
        "{}",
        "{enabled: false}",
        "{weight_quantization: {shared_parameters: {enabled: false}, different_groups: {}}}",
    ] {
        assert_eq!(read(&compression(harmless)).warnings, ["without effect here: compression_training"]);
    }
}

#[test]
fn errors_carry_line_and_column() {
    for (text, place) in [
        ("{\n  \"train_batch_size\": 1,\n  \"train_batch_size\": 2\n}", "ds.json:3:3: duplicate key"),
        (
            "{\n  \"zero_optimization\": {\n    \"stage\": \"x\" }}",
            "ds.json:3:14: zero_optimization.stage: expected",
        ),
        (
            "{\n  \"zero_optimization\": {\n    \"stage\": 4 }}",
            "ds.json:3:5: zero_optimization.stage: must be",
        ),
        ("[]", "ds.json:1:1: the file holds an array"),
        ("{\"gradient_clipping\": -1}", "ds.json:1:2: gradient_clipping: must not be negative"),
    ] {
        let error = DsConfig::parse(text, "ds.json").unwrap_err().to_string();
        assert!(error.starts_with(place), "{error}");
    }
    let missing = DsConfig::load("/nowhere/ds.json".as_ref()).unwrap_err().to_string();
    assert!(missing.contains("/nowhere/ds.json"), "{missing}");
}
