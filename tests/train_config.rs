//! A training run resolved from flags, a configuration file and defaults.
#![allow(missing_docs)]

use clap::Parser;
use std::path::PathBuf;
use terrace::cli::args::{Cli, Command, Dtype, FinetuneArgs, Offload, StateFormat};
use terrace::config::{DsConfig, Length, TrainConfig};
use terrace_optimizer::{AdamW, Algorithm, Schedule, ScheduleKind};

fn adamw(beta1: f64, beta2: f64, weight_decay: f64) -> Algorithm {
    AdamW { beta1, beta2, eps: 1e-8, weight_decay }.into()
}

fn flags(line: &str) -> Box<FinetuneArgs> {
    let words = "terrace finetune --model m --data d --output out".split(' ').chain(line.split_whitespace());
    match Cli::try_parse_from(words).unwrap_or_else(|e| panic!("{e}")).command {
        Command::Finetune(args) => args,
        other => panic!("{other:?}"),
    }
}

fn resolve(line: &str, file: Option<&str>, positions_max: Option<usize>) -> Result<TrainConfig, String> {
    let file = file.map(|text| DsConfig::parse(text, "ds.json").unwrap());
    TrainConfig::combine(&flags(line), file.as_ref(), positions_max).map_err(|e| e.to_string())
}

#[test]
fn defaults() {
    let run = resolve("", None, None).unwrap();
    assert_eq!((run.batch_size, run.grad_accum, run.seq_len), (1, 1, 1024));
    assert_eq!((run.learning_rate, run.optimizer), (1e-5, adamw(0.9, 0.999, 0.0)));
    assert_eq!(run.clip, Some(1.0));
    assert_eq!(run.length, Length::Epochs(1.0));
    let linear = Schedule { kind: ScheduleKind::Linear, total_steps: 9, ..Schedule::constant(1e-5) };
    assert_eq!(run.schedule(9), linear);
    assert_eq!((run.dtype, run.state, run.offload), (Dtype::Bf16, StateFormat::Split, Offload::Disk));
    assert_eq!(run.disks, [PathBuf::from("out/.terrace")]);
    assert!(run.shuffle && run.warnings.is_empty());
}

/// What neither the file nor a flag gives follows from the other two, whichever of them says it.
#[test]
fn a_step_keeps_its_size() {
    let open =
        r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}}"#;
    let fixed = r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}}"#;
    for (line, file, expected) in [
        ("", open, (32, 1)),
        ("--batch-size 8", open, (8, 4)),
        ("--grad-accum 4", open, (8, 4)),
        ("", fixed, (4, 8)),
        ("--batch-size 8", fixed, (8, 4)),
        ("--batch-size 8 --grad-accum 4", fixed, (8, 4)),
    ] {
        let run = resolve(&format!("{line} --scheduler linear"), Some(file), None).unwrap();
        assert_eq!((run.batch_size, run.grad_accum), expected, "{line} {file}");
        assert!(run.warnings.is_empty(), "{line}: {:?}", run.warnings);
    }
    for (line, flag) in [("--batch-size 5", "--batch-size 5"), ("--grad-accum 3", "--grad-accum 3")] {
        let message = resolve(line, Some(open), None).unwrap_err();
        assert!(message.contains("train_batch_size") && message.contains(flag), "{message}");
    }
}

#[test]
fn flags_win_over_the_file() {
    let file = r#"{
        "train_batch_size": 12, "gradient_accumulation_steps": 3, "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2, "betas": [0.7, 0.8]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "bf16": {"enabled": false},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
    }"#;
    let plain = resolve("", Some(file), None).unwrap();
    assert_eq!((plain.batch_size, plain.grad_accum, plain.clip), (4, 3, Some(0.3)));
    assert_eq!((plain.learning_rate, plain.optimizer), (1e-3, adamw(0.7, 0.8, 0.2)));
    assert_eq!((plain.dtype, plain.offload), (Dtype::Fp32, Offload::Disk));
    assert_eq!(plain.disks, [PathBuf::from("/a")]);
    let schedule = plain.schedule(5);
    assert!(matches!(schedule.kind, ScheduleKind::WarmupLr { .. }));
    assert_eq!((schedule.warmup_steps, schedule.base_lr), (4, 1e-3));
    let line = "--batch-size 2 --learning-rate 5e-5 --clip 0 --dtype bf16 --disk /b --scheduler cosine --warmup-steps 2";
    let changed = resolve(line, Some(file), None).unwrap();
    assert_eq!((changed.batch_size, changed.grad_accum, changed.clip), (2, 3, None));
    let warned =
        |warning: &String| warning.contains("6 sequences") && warning.contains("train_batch_size 12");
    assert!(changed.warnings.iter().any(warned), "{:?}", changed.warnings);
    assert_eq!((changed.learning_rate, changed.optimizer.weight_decay()), (5e-5, 0.2));
    assert_eq!(changed.dtype, Dtype::Bf16);
    assert_eq!(changed.disks, [PathBuf::from("/b")]);
    let cosine =
        Schedule { kind: ScheduleKind::Cosine, warmup_steps: 2, total_steps: 5, ..Schedule::constant(5e-5) };
    assert_eq!(changed.schedule(5), cosine);
}

#[test]
fn a_file_alone_keeps_the_default_tier_and_says_what_it_assumes() {
    let run = resolve("", Some("{}"), None).unwrap();
    assert_eq!((run.clip, run.offload, run.dtype), (Some(1.0), Offload::Disk, Dtype::Bf16));
    assert!(run.warnings[0].contains("neither bf16 nor fp16"));
    let mixed = r#"{"bf16": {"enabled": true}, "zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {}}}"#;
    let run = resolve("", Some(mixed), None).unwrap();
    assert_eq!(run.offload, Offload::Host);
    assert!(run.disks.is_empty());
    assert!(run.warnings[0].contains("different devices"), "{:?}", run.warnings);
    assert!(run.warnings[1].contains("falls linearly to 0"), "{:?}", run.warnings);
    let shared = r#"{"bf16": {"enabled": true}, "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}}"#;
    for (line, warns) in [("", false), ("--plan p.json", true)] {
        let run = resolve(line, Some(shared), None).unwrap();
        let warned =
            run.warnings.iter().any(|warning| warning.contains("offload_optimizer.ratio is not used"));
        assert_eq!(warned, warns, "{line}: {:?}", run.warnings);
    }
}

#[test]
fn contradictions_are_refused() {
    let memory_only =
        r#"{"bf16": {"enabled": true}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}"#;
    for (line, file, reason) in [
        ("--seq-len 4096", None, "max_position_embeddings 2048"),
        ("--offload host --disk /a", None, "--disk is of no use"),
        ("--disk /a --disk /a", None, "given twice"),
        ("--disk /proc/self/cwd --disk .", None, "given twice, also as"),
        ("--disk none/here --disk ./none/here", None, "given twice, also as"),
        ("--disk /a", Some(memory_only), "add --offload disk"),
        ("--batch-size 99999999999", None, "is too large: at most 4294967295"),
    ] {
        let error = resolve(line, file, Some(2048)).expect_err(line);
        assert!(error.contains(reason), "{error}");
    }
    assert_eq!(resolve("", None, Some(512)).unwrap().seq_len, 512);
    assert_eq!(resolve("--seq-len 7", None, Some(512)).unwrap().seq_len, 7);
}

#[test]
fn steps_from_epochs() {
    for (line, samples, steps) in [
        ("--steps 7 --epochs 3", 100, 7),
        ("", 100, 100),
        ("--batch-size 3", 10, 4),
        ("--batch-size 2 --grad-accum 2 --epochs 2", 10, 5),
        ("--epochs 0.1 --batch-size 3", 30, 1),
        ("--epochs 0.001", 10, 1),
        ("--epochs 3 --batch-size 7", 7, 3),
    ] {
        assert_eq!(resolve(line, None, None).unwrap().total_steps(samples), steps, "{line}");
    }
}

#[test]
fn inputs_of_a_model_without_tokenizer() {
    use terrace::cli::inputs::FinetuneInputs;
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("m")).unwrap();
    std::fs::write(path("m/config.json"), r#"{"vocab_size": 10, "max_position_embeddings": 4}"#).unwrap();
    std::fs::write(path("d.jsonl"), "{\"input_ids\": [1, 2, 3, 4, 5]}\n".repeat(7)).unwrap();
    let mut args = flags("--batch-size 2 --no-shuffle --epochs 2");
    (args.model, args.data, args.output) = (path("m"), path("d.jsonl"), path("out"));
    let inputs = FinetuneInputs::load(&args).unwrap();
    assert_eq!((inputs.run.seq_len, inputs.steps, inputs.data.len()), (4, 7, 7));
    assert_eq!(inputs.sampler.batch_indices(3), [6, 0]);
    assert_eq!(inputs.data.sample(6).unwrap().ids, [1, 2, 3, 4]);
    std::fs::remove_file(path("m/config.json")).unwrap();
    let error = FinetuneInputs::load(&args).unwrap_err().to_string();
    assert!(error.contains("m/config.json") && error.contains("--model"), "{error}");
}

#[test]
fn number_types() {
    let of = |line: &str, file: Option<&str>| {
        resolve(line, file, None)
            .map(|run| (run.dtype, run.state, run.loss_scale.map(|s| s.initial_scale_power)))
    };
    let (fp16, fp32) = (Some("{fp16: {enabled: true, initial_scale_power: 9}}"), StateFormat::Fp32);
    assert_eq!(of("", fp16), Ok((Dtype::Fp16, fp32, Some(9))));
    assert_eq!(of("--dtype fp16", None), Ok((Dtype::Fp16, fp32, Some(16))));
    assert_eq!(of("--dtype fp16 --state fp32", fp16), Ok((Dtype::Fp16, fp32, Some(9))));
    assert_eq!(of("--dtype bf16", fp16), Ok((Dtype::Bf16, StateFormat::Split, None)));
    assert_eq!(of("", Some("{fp16: {enabled: false}}")), Ok((Dtype::Fp32, fp32, None)));
    let bf16 = Some("{fp16: {enabled: false}, bf16: {enabled: true}}");
    assert_eq!(of("--state compact", bf16), Ok((Dtype::Bf16, StateFormat::Compact, None)));
    for dtype in ["fp16", "fp32"] {
        let error = of(&format!("--dtype {dtype} --state split"), None).unwrap_err();
        assert!(error.contains("--state split is for --dtype bf16"), "{error}");
    }
}

#[test]
fn schedules() {
    let cycle = "OneCycle,cycle_min_lr=1e-5,cycle_max_lr=1e-3,cycle_first_step_size=4";
    let run = resolve(&format!("--scheduler {cycle}"), None, None).unwrap();
    let schedule = run.schedule(9);
    assert_eq!((schedule.lr(4), schedule.betas(4)), (1e-3, Some((0.8, 0.99))));
    assert!(run.warnings.is_empty());
    let run = resolve(&format!("--scheduler {cycle} --optimizer sgd"), None, None).unwrap();
    assert_eq!(run.warnings, ["sgd has no betas: OneCycle moves the learning rate alone"]);
    // What grows without bounds is refused before the run that it would end.
    let growing = format!("--scheduler {cycle},decay_step_size=1,decay_mom_rate=0.02");
    let run = resolve(&growing, None, None).unwrap();
    assert_eq!(run.check_schedule(14).map_err(|e| e.to_string()), Ok(()));
    let error = run.check_schedule(15).unwrap_err().to_string();
    assert!(
        error.contains("before step 15") && error.contains("beta1") && error.contains("decay_mom_rate"),
        "{error}"
    );
    let sgd = resolve(&format!("{growing} --optimizer sgd"), None, None).unwrap();
    assert!(sgd.check_schedule(15).is_ok(), "it has no betas");
    let schedule = |line: &str| resolve(line, None, None).map(|run| run.schedule(9));
    assert_eq!(schedule("--scheduler WarmupLR --warmup-steps 7").unwrap().warmup_steps, 7);
    let constant = Schedule { total_steps: 9, ..Schedule::constant(1e-5) };
    assert_eq!(schedule("--scheduler constant").unwrap(), constant);
    for (line, reason) in [
        (
            format!("--scheduler {cycle} --warmup-steps 7"),
            "--warmup-steps means nothing to --scheduler OneCycle",
        ),
        (format!("--scheduler {cycle},cycle_max_mom=1"), "--scheduler OneCycle: cycle_max_mom is 1"),
        ("--scheduler linear,min_lr_rate=2".into(), "--scheduler linear: min_ratio is 2"),
    ] {
        let error = schedule(&line).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let file =
        format!("{{scheduler: {{type: \"OneCycle\", params: {{{}}}}}}}", cycle[9..].replace('=', ": "));
    let run = resolve("", Some(&file), None).unwrap();
    assert_eq!(run.schedule(9).lr(4), 1e-3);
    for (line, reason) in [
        ("--warmup-steps 3", "--warmup-steps means nothing to the file's scheduler OneCycle"),
        ("--learning-rate 1e-5", "the file's scheduler OneCycle has a rate of its own, cycle_max_lr"),
    ] {
        let error = resolve(line, Some(&file), None).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    let run = resolve("--scheduler linear --learning-rate 1e-4", Some(&file), None).unwrap();
    assert_eq!((run.schedule(9).kind, run.schedule(9).base_lr), (ScheduleKind::Linear, 1e-4));
    for flag in ["LRRangeTest", "WarmupLR,warmup_max_lr=1", cycle] {
        let error = schedule(&format!("--scheduler {flag} --learning-rate 1e-5")).unwrap_err();
        assert!(error.contains("--learning-rate is given as well"), "{error}");
    }
}

/// Rates of the first steps are those of DeepSpeed 0.19.8's schedulers over the optimizer that the file names.
#[test]
fn the_rate_that_a_file_leaves_out() {
    let rate = |line: &str, optimizer: &str, scheduler: &str| {
        let file = format!(
            "{{optimizer: {{{optimizer}}}, scheduler: {{type: {scheduler} warmup_num_steps: 2, warmup_type: \"linear\"}}}}}}"
        );
        let run = resolve(line, Some(&file), None).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert_eq!(run.schedule(9).lr(1), 0.0, "{file}");
        run.schedule(9).lr(3)
    };
    let adam = "type: \"AdamW\", params: {lr: 1e-5}";
    let (warmup, decay) = ("\"WarmupLR\", params: {", "\"WarmupDecayLR\", params: {");
    assert_eq!(rate("", adam, warmup), 1e-5);
    assert_eq!(rate("", adam, &format!("{warmup}warmup_max_lr: \"auto\",")), 1e-5);
    assert_eq!(rate("", adam, &format!("{warmup}warmup_max_lr: 0.5,")), 0.5);
    assert_eq!(rate("", adam, decay), 1e-3);
    assert_eq!(rate("", adam, &format!("{decay}warmup_max_lr: \"auto\",")), 1e-5);
    assert_eq!(rate("--learning-rate 1e-4", adam, warmup), 1e-4);
    assert_eq!(rate("--learning-rate 1e-4", adam, &format!("{warmup}warmup_max_lr: 0.5,")), 1e-4);
    assert_eq!(rate("--warmup-steps 4", adam, warmup), 0.5e-5);
    for (optimizer, expected) in [
        ("type: \"Adam\"", 1e-3),
        ("type: \"Lion\", params: {}", 1e-3),
        ("type: \"SGD\", params: {momentum: 0.5}", 1e-3),
        ("type: \"Adagrad\"", 1e-2),
        ("type: \"Adam\", params: {lr: \"auto\"}", 1e-5),
    ] {
        assert_eq!(rate("", optimizer, warmup), expected, "{optimizer}");
    }
}

#[test]
fn parameter_groups() {
    let line = "--no-decay *norm* --param-group *embed*,lr=1e-6 --no-decay *.bias --param-group *.0.*,frozen";
    let groups = resolve(line, None, None).unwrap().groups;
    let words: Vec<_> = groups.iter().map(ToString::to_string).collect();
    assert_eq!(
        words,
        ["*embed*,lr=0.000001", "*.0.*,frozen", "*norm*,weight-decay=0", "*.bias,weight-decay=0"]
    );
}

#[test]
fn algorithms() {
    use terrace_optimizer::{Adagrad, Adam, Lion, Sgd};
    let named = |line: &str, file: Option<&str>| resolve(line, file, None).map(|run| run.optimizer);
    let lion = Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.3 };
    assert_eq!(named("--optimizer lion --weight-decay 0.3", None), Ok(Algorithm::Lion(lion)));
    assert_eq!(named("--optimizer adagrad", None), Ok(Algorithm::Adagrad(Adagrad::default())));
    let sgd = Sgd { momentum: 0.5, nesterov: false, weight_decay: 0.0 };
    assert_eq!(named("--optimizer sgd --momentum 0.5", None), Ok(Algorithm::Sgd(sgd)));
    // A flag wins over the file, whose other values stay.
    let file = r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "weight_decay": 0.1, "eps": 1e-6}}}"#;
    let adam = Adam { eps: 1e-6, weight_decay: 0.1, ..Adam::default() };
    assert_eq!(named("", Some(file)), Ok(Algorithm::Adam(adam)));
    let adamw = AdamW { eps: 1e-6, weight_decay: 0.1, ..AdamW::default() };
    assert_eq!(named("--optimizer adamw", Some(file)), Ok(Algorithm::AdamW(adamw)));
    let file = |params: &str| format!("{{optimizer: {{type: {params}}}}}");
    let sgd = Algorithm::Sgd(Sgd { momentum: 0.0, nesterov: false, weight_decay: 0.0 });
    assert_eq!(named("", Some(&file("\"SGD\""))), Ok(sgd), "as torch's");
    let lion = Lion { beta1: 0.9, beta2: 0.999, weight_decay: 0.0 };
    assert_eq!(named("", Some(&file("\"Lion\""))), Ok(Algorithm::Lion(lion)), "as DeepSpeed's");
    let auto =
        |kind: &str, key: &str| format!("{{optimizer: {{type: \"{kind}\", params: {{{key}: \"auto\"}}}}}}");
    let sgd = Algorithm::Sgd(Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.0 });
    assert_eq!(named("", Some(&auto("SGD", "momentum"))), Ok(sgd), "as the flag's");
    assert_eq!(named("", Some(&auto("Lion", "betas"))), Ok(Algorithm::Lion(lion)), "as transformers'");
    let adagrad = Algorithm::Adagrad(Adagrad { eps: 1e-8, ..Adagrad::default() });
    assert_eq!(named("", Some(&auto("Adagrad", "eps"))), Ok(adagrad), "as transformers'");
    for line in ["--optimizer sgd --betas 0.9,0.95", "--optimizer lion --eps 1e-6", "--momentum 0.9"] {
        let message = named(line, None).unwrap_err();
        assert!(message.contains("means nothing"), "{message}");
    }
}
