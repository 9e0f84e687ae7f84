//! What is wrong is said: every mistake has its exit code and a message that names it, and no state is harmed.
#![allow(missing_docs)]

mod support;

use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use support::{Bench, Shape, SmallDisk, cmd, files, write_rows};

#[test]
fn weights_that_cannot_be_used() {
    let bench = Bench::tiny();
    let weights = bench.path("model").join("model.safetensors");
    let good = fs::read(&weights).unwrap();
    let refused = |parts: &[&str]| {
        bench.finetune("out").args(&["--steps", "1"]).fails(1, parts);
        let model = bench.path("model");
        cmd(&["generate", "--prompt-ids", "1", "--max-new-tokens", "4"])
            .path("--model", &model)
            .fails(1, parts);
        assert!(files(&bench.path("out")).is_empty(), "something was written");
    };
    fs::remove_file(&weights).unwrap();
    refused(&["has no model.safetensors or model.safetensors.index.json"]);
    fs::write(&weights, &good[..good.len() - 100]).unwrap();
    refused(&["model.safetensors is truncated: its header describes", "download it again"]);
    fs::write(&weights, &good[..5]).unwrap();
    refused(&["is not a usable safetensors file", "it has only 5 bytes"]);
    let mut corrupt = good.clone();
    corrupt[8..20].fill(b'x');
    fs::write(&weights, &corrupt).unwrap();
    refused(&["is not a usable safetensors file", "its header"]);
    corrupt[..8].fill(0xff);
    fs::write(&weights, &corrupt).unwrap();
    refused(&["is not a usable safetensors file", "its header claims"]);
    fs::write(&weights, &good).unwrap();
    set(&bench, "intermediate_size", &json!(128));
    refused(&["tensor `model.layers.0.mlp.gate_proj.weight`", "has shape [112, 48]", "[128, 48]"]);
    set(&bench, "intermediate_size", &json!(112));
    set(&bench, "num_hidden_layers", &json!(3));
    refused(&["has no tensor `model.layers.2.input_layernorm.weight` (expected shape [48])"]);
    // A smaller model than there are weights for may be meant.
    set(&bench, "num_hidden_layers", &json!(1));
    let warned = "of its tensors are no parameters of the model that its config.json describes";
    for run in [
        bench.finetune("out").args(&["--steps", "1"]),
        bench.generate("model").args(&["--prompt-ids", "1", "--max-new-tokens", "4"]),
    ] {
        let words = run.ok().stderr;
        assert!(
            words.contains(warned) && words.contains("`model.layers.1.input_layernorm.weight`"),
            "{words}"
        );
    }
    set(&bench, "num_hidden_layers", &json!(2));
    let words = bench.generate("model").args(&["--prompt-ids", "1", "--max-new-tokens", "4"]).ok().stderr;
    assert!(!words.contains(warned), "{words}");
}

#[test]
fn a_missing_shard() {
    let bench = Bench::with(&Shape { shard_bytes: 40_000, ..Shape::TINY });
    let shards: Vec<_> = files(&bench.path("model"));
    let shard = shards.iter().find(|(path, _)| path.to_string_lossy().contains("model-00002")).unwrap();
    fs::remove_file(&shard.0).unwrap();
    let name = shard.0.file_name().unwrap().to_str().unwrap();
    bench.finetune("out").fails(1, &[name, "the download is incomplete"]);
}

#[test]
fn models_that_are_not_supported() {
    let bench = Bench::tiny();
    let run = || bench.finetune("out").args(&["--steps", "1"]);
    set(&bench, "architectures", &json!(["MambaForCausalLM"]));
    run().fails(1, &["architecture \"MambaForCausalLM\" is not supported", "LlamaForCausalLM"]);
    set(&bench, "architectures", &json!(["LlamaForCausalLM"]));
    set(&bench, "hidden_act", &json!("relu"));
    run().fails(1, &["hidden_act", "relu", "is not supported"]);
    fs::write(bench.path("model").join("config.json"), "{").unwrap();
    let model = bench.path("model");
    let config = model.join("config.json").display().to_string();
    let broken = format!("{config}: the file is not JSON: EOF");
    run().fails(1, &[&broken, "correct it or download it again"]);
    let generate = cmd(&["generate", "--prompt-ids", "1"]).path("--model", &model);
    generate.fails(1, &[&broken]);
    fs::write(&config, "[]").unwrap();
    run().fails(1, &[&format!("{config}: the file is not a JSON object")]);
    fs::remove_file(bench.path("model").join("config.json")).unwrap();
    run().fails(1, &["--model ", "the folder has no config.json"]);
    fs::write(model.join("adapter_config.json"), "{}").unwrap();
    run().fails(1, &["--model ", "holds an adapter and no model", "merge_and_unload"]);
}

#[test]
fn adapters_are_not_applied_silently() {
    let bench = Bench::tiny();
    let model = bench.path("model");
    let generate =
        || cmd(&["generate", "--prompt-ids", "1", "--max-new-tokens", "1"]).path("--model", &model);
    let adapter = "adapter_config.json names an adapter, which is not applied";
    assert!(!generate().ok().stderr.contains(adapter));
    fs::write(model.join("adapter_config.json"), "{}").unwrap();
    fs::write(model.join("adapter_model.safetensors"), "").unwrap();
    let said = generate().ok().stderr;
    assert!(said.contains(adapter) && said.contains("merge_and_unload"), "{said}");
    fs::remove_file(model.join("model.safetensors")).unwrap();
    generate().fails(1, &["holds an adapter and no weights of its model", "merge_and_unload"]);
}

#[test]
fn models_with_another_kind_of_tokenizer() {
    let bench = Bench::tiny();
    let model = bench.path("model");
    let _ = fs::remove_file(model.join("tokenizer.json"));
    let generate = || cmd(&["generate", "--prompt", "a", "--max-new-tokens", "1"]).path("--model", &model);
    let advice = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)";
    assert!(!generate().fails(1, &["this file does not exist", "use --prompt-ids"]).stderr.contains(advice));
    fs::write(model.join("vocab.json"), "{}").unwrap();
    assert!(!generate().fails(1, &["this file does not exist"]).stderr.contains(advice));
    fs::write(model.join("merges.txt"), "").unwrap();
    generate().fails(1, &["make it of vocab.json", advice]);
    fs::write(model.join("tokenizer.model"), "").unwrap();
    generate().fails(1, &["make it of tokenizer.model", advice]);
    let data = bench.path("words.jsonl");
    fs::write(&data, "{\"text\": \"words\"}\n").unwrap();
    let eval = cmd(&["eval", "--seq-len", "8"]).path("--model", &model).path("--data", &data);
    eval.fails(1, &["the model folder has no tokenizer", "make it of tokenizer.model", advice]);
}

/// Dropout is of training alone, which does not compute it.
#[test]
fn models_with_dropout_are_not_trained() {
    let bench = Bench::tiny();
    let model = bench.path("model");
    let run = || bench.finetune("out").args(&["--steps", "1"]);
    let plan = || cmd(&["plan", "--seq-len", "24"]).path("--model", &model);
    set(&bench, "attention_dropout", &json!(0.1));
    let parts = ["--model ", "`attention_dropout` is 0.1", "set it to 0.0 to train without"];
    run().fails(2, &parts);
    plan().fails(2, &parts);
    assert!(!bench.path("out").exists(), "something was written");
    plan().args(&["--generate", "--max-new-tokens", "4"]).ok();
    bench.generate("model").args(&["--prompt-ids", "1", "--max-new-tokens", "4"]).ok();
    cmd(&["eval", "--seq-len", "24"]).path("--model", &model).path("--data", &bench.path("data.jsonl")).ok();
    for none in [json!(0.0), json!(0), Value::Null] {
        set(&bench, "attention_dropout", &none);
        plan().ok();
    }
    // A family that has more than one, and has them where its configuration is silent.
    set(&bench, "model_type", &Value::Null);
    set(&bench, "architectures", &json!(["SeedOssForCausalLM"]));
    set(&bench, "residual_dropout", &json!(0.2));
    plan().fails(2, &["`attention_dropout` is 0.1 and `residual_dropout` is 0.2", "set each to 0.0"]);
    set(&bench, "architectures", &json!(["LlamaForCausalLM"]));
    run().ok();
}

#[test]
fn runs_that_would_train_nothing() {
    let bench = Bench::tiny();
    let run = || bench.finetune("out").args(&["--scheduler", "constant"]);
    let model = bench.path("model");
    let parts = ["--max-shard-size", "a file of no bytes holds no weights; give a size such as 5GB"];
    run().args(&["--max-shard-size", "0"]).fails(2, &parts);
    cmd(&["export", "state", "--output", "out", "--max-shard-size", "0GB"])
        .path("--model", &model)
        .fails(2, &parts);
    for groups in
        [&["--param-group", "*,frozen"][..], &["--param-group", "*norm*,frozen", "--param-group", "*,frozen"]]
    {
        run()
            .args(groups)
            .fails(2, &["all parameters are frozen, and nothing is left to train; freeze fewer"]);
    }
    assert!(!bench.path("out/.terrace").join("state.bin").exists(), "state was made");
    run().args(&["--steps", "1", "--param-group", "*norm*,lr=1e-4", "--param-group", "*,frozen"]).ok();

    let run = |steps: &str| bench.finetune("more").args(&["--scheduler", "constant", "--steps", steps]);
    run("3").ok();
    let weights = bench.weights("more");
    let parts = ["is at step 3, and this run would end at step 2: raise --steps", "terrace export"];
    run("2").args(&["--resume"]).fails(2, &parts);
    run("3").args(&["--resume"]).ok();
    assert!(weights == bench.weights("more"), "nothing was left to train");
    run("4").args(&["--resume"]).ok();
    assert_eq!(bench.steps("more"), [1, 2, 3, 4]);
}

#[test]
fn data_that_cannot_be_used() {
    let bench = Bench::tiny();
    let refused = |name: &str, text: &str, parts: &[&str]| {
        let path = bench.path(name);
        fs::write(&path, text).unwrap();
        bench.finetune("out").path("--data", &path).fails(2, &["cannot be used multiple times"]);
        let run = cmd(&["finetune", "--seq-len", "24"])
            .path("--model", &bench.path("model"))
            .path("--output", &bench.path("out"))
            .path("--data", &path);
        run.fails(1, parts);
        assert!(!bench.path("out").join("metrics.jsonl").exists());
    };
    let row = "{\"input_ids\": [1, 2, 3]}\n";
    refused("a.jsonl", &format!("{row}{{\"input_ids\": [1,\n"), &["a.jsonl:2:17: invalid JSON"]);
    refused(
        "open.json",
        "{\n  \"text\": 1\n}\n",
        &["open.json:1:1: invalid JSON", "every line must be a whole"],
    );
    refused("b.jsonl", &format!("{row}\n[1]\n"), &["b.jsonl:3: expected a whole JSON object"]);
    refused(
        "w.jsonl",
        &format!("{row}nope\n"),
        &["w.jsonl:2:2: invalid JSON: no JSON value begins like this; every line"],
    );
    refused("c.jsonl", "{\"words\": 1}\n", &["c.jsonl:1: expected a key \"text\""]);
    refused(
        "d.jsonl",
        &format!("{row}{{\"input_ids\": [1, 96]}}\n"),
        &["d.jsonl:2: token id 96 is outside the model's vocabulary of 96"],
    );
    refused("e.jsonl", "", &["e.jsonl: no data"]);
    refused("f.jsonl", "{\"text\": \"words\"}\n", &["f.jsonl:1:", "the model folder has no tokenizer"]);
    refused("g.txt", "words", &["tokenizer.json", "does not exist"]);
    refused("h.csv", "a,b", &["h.csv: cannot tell the format"]);
    let model = bench.path("model");
    let generate = |words: &[&str]| cmd(&["generate"]).path("--model", &model).args(words);
    generate(&["--prompt", "words"]).fails(1, &["tokenizer.json", "does not exist", "--prompt-ids"]);
    fs::write(bench.path("p.jsonl"), "{\"prompt_ids\": [1]}\n{\"prompt_ids\": [1}\n").unwrap();
    let parts = ["p.jsonl:2:18: invalid JSON: expected `,` or `]`; every line must be a whole JSON object"];
    generate(&["--prompts"]).args(&[bench.path("p.jsonl").to_str().unwrap()]).fails(1, &parts);
    generate(&["--prompts", "-"])
        .input(&bench.path("p.jsonl"))
        .fails(1, &["standard input:2:18: invalid JSON"]);
    for (penalty, word) in [("1e-300", "too close to zero"), ("1e300", "too large"), ("0", "more than zero")]
    {
        let run = generate(&["--prompt-ids", "1", "--repetition-penalty", penalty]);
        run.fails(2, &["--repetition-penalty", word]);
    }
    // The first row says what there is, broken or not; in a text it is no text.
    for first in ["{\"prompt_ids\": [1}", "  {\"prompt_ids\": [1]", "\n{'prompt': 'x'}"] {
        fs::write(bench.path("broken"), format!("{first}\n{{\"prompt_ids\": [1]}}\n")).unwrap();
        let run = generate(&["--prompts", "-"]).input(&bench.path("broken"));
        run.fails(1, &["standard input:", ": invalid JSON: ", "every line must be a whole JSON object"]);
    }
    generate(&["--prompts", "-"]).fails(1, &["standard input: no data"]);
    let outside = "token id 96 is outside the model's vocabulary of 96: ids are from 0 to 95";
    let ended = generate(&["--prompt-ids", "1,96"]).fails(1, &[&format!("--prompt-ids: {outside}")]);
    assert!(!ended.stderr.contains("tokenizer"), "{}", ended.stderr);
    fs::write(bench.path("p.jsonl"), "{\"prompt_ids\": [1]}\n\n{\"prompt_ids\": [96]}\n").unwrap();
    generate(&["--prompts"])
        .args(&[bench.path("p.jsonl").to_str().unwrap()])
        .fails(1, &["p.jsonl: prompt 2: ", outside]);
    for tokens in ["64", &usize::MAX.to_string()] {
        let run = generate(&["--prompt-ids", "1", "--max-new-tokens", tokens]);
        run.fails(2, &["exceed the model's 64 positions"]);
    }
    // Before memory is taken for so many.
    Shape { positions: 40_000, ..Shape::TINY }.write(&bench.path("long"));
    let mut rows = "{\"prompt_ids\": [1]}\n".repeat(70_000);
    rows += &format!("{{\"prompt_ids\": {:?}}}\n", vec![1; 31_000]);
    fs::write(bench.path("many.jsonl"), rows).unwrap();
    let many = cmd(&["generate", "--max-new-tokens", "1"]).path("--model", &bench.path("long"));
    let many = many.path("--prompts", &bench.path("many.jsonl"));
    many.fails(2, &["70001 prompts at once", "31000 tokens", "lower --batch-size to 69273"]);
    generate(&["--prompt", "-words"]).fails(1, &["tokenizer.json", "does not exist"]);
    let small = generate(&["--prompt-ids", "1,2", "--max-new-tokens", "4", "--host-memory", "1KiB"]);
    let refused = small.fails(2, &["--host-memory of 1.00 KiB is too small", "Raise it to"]).stderr;
    assert!(!refused.contains(", or "), "nothing else would do: {refused}");
    let eval = |name: &str| cmd(&["eval"]).path("--model", &model).path("--data", &bench.path(name));
    eval("e.jsonl").fails(1, &["no data"]);
    fs::write(bench.path("l.jsonl"), "{\"input_ids\": [1, 2], \"label\": [-100, 2]}\n").unwrap();
    let said = eval("l.jsonl").ok().stderr;
    assert!(said.contains("l.jsonl:1: the key \"label\" is ignored"), "{said}");
}

#[test]
fn paths_that_lead_nowhere() {
    let bench = Bench::tiny();
    let (model, data) = (bench.path("model"), bench.path("data.jsonl"));
    let eval = |model: &Path, data: &Path| cmd(&["eval"]).path("--model", model).path("--data", data);
    eval(&model, &bench.path("none.jsonl")).fails(1, &["none.jsonl: No such file", "check the path"]);
    // Not about a format that nobody can tell.
    eval(&model, &bench.path("none")).fails(1, &["none: No such file", "check the path"]);
    eval(&model, &model).fails(1, &["model: this is a directory; give one file"]);
    let prompts = cmd(&["generate"]).path("--model", &model).path("--prompts", &model);
    prompts.fails(1, &["model: this is a directory"]);
    eval(&bench.path("none"), &data).fails(1, &["--model ", "none: there is no such folder", "Hugging Face"]);
    eval(&data, &data).fails(1, &["--model ", "data.jsonl: this is a file; give the folder"]);
    let finetune = |output: &Path| {
        cmd(&["finetune", "--steps", "1"])
            .path("--model", &model)
            .path("--data", &data)
            .path("--output", output)
    };
    finetune(&data).fails(1, &["--output ", "data.jsonl: this is not a directory; give a folder"]);
    let parts = ["--output ", "data.jsonl is not a directory"];
    finetune(&data.join("out")).fails(1, &parts);
    // Before anything is read: the data and the prompts are not there.
    let none = bench.path("none.jsonl");
    let runs = [
        bench.finetune("out"),
        eval(&model, &none),
        cmd(&["generate"]).path("--model", &model).path("--prompts", &none),
    ];
    for run in runs {
        let traced = |path: &Path| run.clone().path("--trace", path);
        traced(&model).fails(1, &["--trace ", "model: this is a directory"]);
        traced(&bench.path("no/t.json")).fails(1, &["--trace ", "No such file", "check the path"]);
    }
    let trace = bench.path("t.json");
    eval(&model, &none).path("--trace", &trace).fails(1, &["none.jsonl: No such file"]);
    assert!(!trace.exists(), "a run that is refused leaves nothing");
}

#[test]
fn files_beside_the_weights_that_are_broken() {
    let bench = Bench::tiny();
    let model = bench.path("model");
    let generate =
        || cmd(&["generate", "--prompt-ids", "1", "--max-new-tokens", "2"]).path("--model", &model);
    for (name, parts) in [
        ("generation_config.json", ["generation_config.json: the file is not JSON", "download it again"]),
        ("tokenizer.json", ["tokenizer.json: not a usable tokenizer", "download it again"]),
    ] {
        fs::write(model.join(name), "{").unwrap();
        generate().fails(1, &parts);
    }
    set(&bench, "num_hidden_layers", &json!(4_000_000_000_u64));
    generate().fails(1, &["config.json: `num_hidden_layers` is 4000000000"]);
}

/// What did not begin leaves nothing, and what was there before stays.
#[test]
fn a_run_that_does_not_begin_leaves_nothing() {
    let bench = Bench::tiny();
    let run = |output: &str| bench.finetune(output).args(&["--steps", "2", "--scheduler", "constant"]);
    let no_data = || run("new/out").without("--data").path("--data", &bench.path("none.jsonl"));
    let data = format!("--data {}: No such file", bench.path("none.jsonl").display());
    no_data().fails(1, &[&data, "check the path"]);
    run("new/out").path("--config", &bench.path("none.json")).fails(2, &["none.json"]);
    assert!(!bench.path("new").exists());
    fs::create_dir(bench.path("new")).unwrap();
    no_data().fails(1, &[&data]);
    assert!(bench.path("new").exists() && !bench.path("new/out").exists());
    let folder = run("new/out").without("--data").path("--data", &bench.path("new"));
    folder.fails(1, &[&format!("--data {}", bench.path("new").display())]);

    let durability = |run: support::Cmd| run.args(&["--durability", "checkpoint"]);
    assert!(durability(run("out")).ok().stderr.contains("that is killed has to start over"));
    // Of another learning rate.
    let events = bench.path("events");
    let resumed = run("out").args(&["--resume"]).path("--tensorboard", &events);
    let other = resumed.without("--learning-rate").args(&["--learning-rate", "7e-3"]);
    other.fails(2, &["learning"]);
    assert!(!events.exists());
    // The state says whose model that is.
    fs::remove_file(bench.path("out/metrics.jsonl")).unwrap();
    let said = durability(run("out").without("--steps").args(&["--steps", "3", "--resume"])).ok().stderr;
    assert!(said.contains("goes on from the step that it was resumed at"), "{said}");
    fs::remove_file(bench.path("out/metrics.jsonl")).unwrap();
    fs::remove_file(bench.path("out/.terrace/manifest.bin")).unwrap();
    run("out").fails(2, &["holds a model that no run of finetune wrote"]);
}

#[test]
fn the_model_is_not_overwritten() {
    let bench = Bench::tiny();
    let before = bench.weights("model");
    std::os::unix::fs::symlink(bench.path("model"), bench.path("link")).unwrap();
    for output in ["model", "link", "model/../model"] {
        bench.finetune(output).args(&["--steps", "1"]).fails(2, &["--output ", "is the folder of --model"]);
    }
    assert!(bench.weights("model") == before);
    assert_eq!(files(&bench.path("model")).len(), 2);
    // Saves of another trainer may have optimizer state beside their weights.
    let theirs = bench.path("theirs/checkpoint-3");
    fs::create_dir_all(&theirs).unwrap();
    fs::copy(bench.path("model/model.safetensors"), theirs.join("model.safetensors")).unwrap();
    // A run that saves nothing would give them other names.
    for saves in [&["--save-every", "1"][..], &[]] {
        let run = bench.finetune("theirs").args(&["--steps", "1"]).args(saves);
        run.fails(2, &["theirs holds ", "checkpoint-3, which no run of finetune wrote"]);
        assert_eq!(files(&bench.path("theirs")).len(), 1);
    }
    let run = || bench.finetune("mine").args(&["--steps", "1", "--save-every", "1"]);
    fs::create_dir(bench.path("mine")).unwrap();
    fs::write(bench.path("mine/checkpoint-7"), "a file").unwrap();
    run().fails(2, &["mine/checkpoint-7 is not a folder", "move it away"]);
    assert_eq!(files(&bench.path("mine")).len(), 1);
    fs::rename(bench.path("mine/checkpoint-7"), bench.path("mine/checkpoint-07")).unwrap();
    run().ok();
    fs::remove_dir_all(bench.path("mine/.terrace")).unwrap();
    let again = run().ok();
    assert!(again.stderr.contains("metrics.jsonl.1"), "{}", again.stderr);
}

#[test]
fn what_needs_no_data_is_refused_before_data_is_read() {
    let bench = Bench::tiny();
    let (model, broken) = (bench.path("model"), bench.path("broken.jsonl"));
    fs::write(&broken, "{\n").unwrap();
    let finetune = cmd(&["finetune"]).path("--output", &bench.path("out"));
    let eval = cmd(&["eval"]);
    for command in [finetune, eval] {
        let run = || command.clone().path("--model", &model).path("--data", &broken);
        run().fails(1, &["broken.jsonl:1"]);
        run().args(&["--device", "cuda:99"]).fails(2, &["--device cuda:99: ", "CUDA"]);
        run().path("--disk", &broken).fails(1, &["--disk ", "broken.jsonl: this is not a directory"]);
        run().path("--disk", &broken.join("a/b")).fails(1, &["--disk ", "broken.jsonl is not a directory"]);
    }
    cmd(&["report"]).path("--ptx", &broken).fails(1, &["--ptx ", "broken.jsonl: this is not a directory"]);
}

#[test]
fn configurations_that_make_no_sense() {
    let bench = Bench::tiny();
    for (text, parts) in [
        ("{\"gradient_clipping\": \"much\"}", &["ds.json:1:", "gradient_clipping"][..]),
        (
            "{\n  zero_optimization: { stage: 3, offload_optimizer: { device: \"tape\" } }\n}",
            &["ds.json:2:", "tape"],
        ),
        ("{\n  optimizer: { type: \"Lamb\" }\n}", &["ds.json:2:", "Lamb"]),
        ("{ train_batch_size: 5, train_micro_batch_size_per_gpu: 2 }", &["ds.json:1:", "not a multiple"]),
        (
            "{train_batch_size: 8, train_micro_batch_size_per_gpu: 2, gradient_accumulation_steps: 2}",
            &["ds.json:1:", "8 is not"],
        ),
        ("{ bf16: {", &["ds.json:1:"]),
        (
            "{\n  aio: {\n queue_depth: 100000000 } }",
            &["ds.json:3:", "aio.queue_depth: must be at most 4096, found 100000000"],
        ),
        (
            "{ aio: { block_size: 1073741825 } }",
            &["ds.json:1:", "aio.block_size: must be at most 1073741824"],
        ),
    ] {
        fs::write(bench.path("ds.json"), text).unwrap();
        bench.finetune("out").path("--config", &bench.path("ds.json")).fails(2, parts);
    }
    fs::remove_file(bench.path("ds.json")).unwrap();
    bench.finetune("out").path("--config", &bench.path("ds.json")).fails(2, &["ds.json", "No such file"]);
    let path = bench.path("disk");
    let run = |words: &[&str]| bench.finetune("out").args(&["--steps", "1"]).args(words);
    run(&["--device", "cuda:99"]).fails(2, &["--device cuda:99: ", "CUDA"]);
    run(&["--offload", "none"]).path("--disk", &path).fails(2, &["--disk is of no use with --offload none"]);
    run(&[]).path("--disk", &path).path("--disk", &path).fails(2, &["is given twice"]);
    let huge = cmd(&["finetune", "--batch-size", "4294967295"])
        .path("--model", &bench.path("model"))
        .path("--data", &bench.path("data.jsonl"))
        .path("--output", &bench.path("out"));
    huge.fails(2, &["--batch-size 4294967295 of --seq-len 64 is more tokens than a micro-batch can have"]);
    run(&["--betas", "0.9"]).fails(2, &["--betas"]);
    run(&["--param-group", "*,lr=fast"]).fails(2, &["--param-group", "lr=fast: expected"]);
    run(&["--no-decay", "*norms*"]).fails(2, &["--no-decay *norms*: no parameter", "names are like model."]);
    let groups = ["--no-decay", "*norm*", "--param-group", "*attn,frozen"];
    run(&groups).fails(2, &["--param-group *attn: no parameter"]);
    let long = cmd(&["finetune", "--seq-len", "65"])
        .path("--model", &bench.path("model"))
        .path("--data", &bench.path("data.jsonl"))
        .path("--output", &bench.path("out"));
    long.fails(2, &["--seq-len 65", "max_position_embeddings 64"]);
    // Stretched under another name, as a Vicuna of 16384 positions is; data that is not there comes later.
    set(&bench, "max_sequence_length", &json!(128));
    long.path("--config", &bench.path("none.json")).fails(2, &["none.json"]);
    let harmless = [".terrace/tokens.bin", ".terrace/terrace.lock"];
    assert!(
        files(&bench.path("out")).iter().all(|(path, _)| harmless.iter().any(|name| path.ends_with(name)))
    );
}

#[test]
fn values_of_flags_that_make_no_sense() {
    let bench = Bench::tiny();
    let finetune = [
        ("--learning-rate", "-1", "must not be negative"),
        ("--weight-decay", "-0.5", "must not be negative"),
        ("--learning-rate", "fast", "expected a finite number"),
        ("--epochs", "-2", "must be more than zero"),
        ("--betas", "-1,0.9", "expected two numbers of at least 0 and below 1"),
        ("--batch-size", "0", "must be at least 1"),
        ("--grad-accum", "-3", "must be at least 1"),
        ("--save-every", "0", "must be at least 1"),
        ("--threads", "0", "must be at least 1"),
        ("--threads", "100000", "must be at most 1024"),
        ("--steps", "-1", "must be at least 1"),
        ("--steps", "0", "must be at least 1"),
        ("--steps", "many", "expected a whole number"),
        ("--seed", "99999999999999999999", "more than a 64-bit number can hold"),
        ("--host-memory", "-1", "is not a size"),
    ];
    let run = |command: &str, flag: &str, value: &str, part: &str| {
        let ended =
            cmd(&[command, flag, value]).path("--model", &bench.path("model")).fails(2, &[flag, part]);
        assert!(ended.stderr.contains(&format!("invalid value '{value}'")), "{}", ended.stderr);
    };
    finetune.iter().for_each(|(flag, value, part)| run("finetune", flag, value, part));
    for (flag, value, part) in [
        ("--temperature", "-1", "must not be negative"),
        ("--top-p", "-1", "must be above 0 and at most 1"),
        ("--top-k", "0", "must be at least 1"),
        ("--max-new-tokens", "0", "must be at least 1"),
    ] {
        run("generate", flag, value, part);
    }
    for (ids, part) in [("1,x", "\"x\" is not a token id"), ("-1,2", "\"-1\" is not a token id")] {
        let parts = ["--prompt-ids", part, "whole numbers such as 1,2,3"];
        cmd(&["generate", "--prompt-ids", ids]).path("--model", &bench.path("model")).fails(2, &parts);
    }
}

#[test]
fn a_budget_that_is_too_small() {
    let bench = Bench::tiny();
    for (number, words) in
        [&["--offload", "disk"][..], &["--offload", "disk", "--clip", "0"], &["--offload", "none"]]
            .iter()
            .enumerate()
    {
        let output = format!("out-{number}");
        let run = |budget: &str| {
            bench.finetune(&output).args(&["--steps", "2", "--host-memory", budget]).args(words)
        };
        let refused = run("10KiB").fails(2, &["--host-memory of 10.0 KiB is too small", "Raise it to"]);
        assert!(refused.stderr.contains(": low half of the master weights ("), "{}", refused.stderr);
        if words[1] == "disk" {
            // A line for each class of sizes, and no two of them the same.
            let classes: Vec<&str> =
                refused.stderr.lines().filter_map(|line| line.split("of groups up to ").nth(1)).collect();
            assert!(classes.len() > 1 && classes[0] != classes[1], "{}", refused.stderr);
        }
        let minimum = refused.stderr.split("needs at least ").nth(1).unwrap().split(".\n").next().unwrap();
        let bytes: terrace::config::ByteSize = minimum.parse().unwrap();
        run(&(bytes.0 - bytes.0 / 50).to_string()).fails(2, &["is too small", minimum]);
        assert!(!bench.path(&output).join(".terrace/state.bin").exists());
        // As a person would type it.
        run(&minimum.replace(' ', "")).ok();
        assert_eq!(bench.steps(&output), [1, 2]);
    }
}

#[test]
fn a_disk_that_is_too_small() {
    let bench = Bench::tiny();
    let Some(disk) = SmallDisk::mount(400 << 10) else { return };
    let run = || bench.finetune("out").args(&["--steps", "1"]).path("--disk", disk.path());
    run().fails(1, &["the training state needs", "but only 400 KiB are free", "--disk"]);
    let written: Vec<_> = files(disk.path()).into_iter().filter(|(_, bytes)| *bytes > 0).collect();
    assert!(written.is_empty(), "{written:?}");
    cmd(&["generate", "--prompt-ids", "1", "--max-new-tokens", "4", "--offload", "disk"])
        .path("--model", &bench.path("model"))
        .path("--disk", &tiny_disk(&disk))
        .fails(1, &["a copy of the weights needs", "are free", "choose smaller --weights", "--offload host"]);
    disk.resize(16 << 20);
    run().ok();
}

/// Shrinks the disk until not even the weights fit.
fn tiny_disk(disk: &SmallDisk) -> std::path::PathBuf {
    disk.resize(64 << 10);
    disk.path().to_owned()
}

#[test]
fn a_disk_that_fills_up_while_training() {
    let bench = Bench::tiny();
    // Room for the tokens and some twenty lines of metrics. The state is elsewhere, and preallocated.
    let Some(small) = SmallDisk::mount(20 << 10) else { return };
    let run = |output: &Path| {
        cmd(&["finetune", "--threads", "2", "--seq-len", "24", "--batch-size", "2", "--steps", "60"])
            .path("--model", &bench.path("model"))
            .path("--data", &bench.path("data.jsonl"))
            .path("--output", output)
    };
    run(&bench.path("whole")).ok();
    let output = small.path().join("out");
    let on_small = || run(&output).path("--disk", &bench.path("state"));
    // Lines that cannot be written do not end it, a model that cannot does.
    let told = [
        "warning: writing",
        "metrics.jsonl: No space left",
        "tried again",
        ".partial: No space left",
        "free space",
    ];
    on_small().fails(1, &told);
    small.resize(64 << 10);
    on_small().args(&["--resume"]).fails(1, &["resumed at step 60", ".partial", "No space left"]);
    assert!(!output.join("model.safetensors").exists() && !output.join("config.json").exists());
    small.resize(4 << 20);
    on_small().args(&["--resume"]).ok();
    assert!(fs::read(output.join("model.safetensors")).unwrap() == bench.weights("whole"));
    let text = fs::read_to_string(output.join("metrics.jsonl")).unwrap();
    let steps: Vec<_> =
        text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap()).collect();
    assert!(steps.len() > 5 && steps.is_sorted() && steps[..5] == [1, 2, 3, 4, 5], "{steps:?}");
    assert_eq!(steps.last(), Some(&60), "{steps:?}");
}

#[test]
fn a_read_only_disk() {
    let bench = Bench::tiny();
    let Some(disk) = SmallDisk::mount(16 << 20) else { return };
    let run = || bench.finetune("out").args(&["--steps", "1"]).path("--disk", disk.path());
    disk.make_read_only();
    run().fails(1, &["--disk ", "Read-only file system", "mounted read-only"]);
    let output = disk.path().join("out");
    cmd(&["finetune"])
        .path("--model", &bench.path("model"))
        .path("--data", &bench.path("data.jsonl"))
        .path("--output", &output)
        .fails(1, &["--output ", "Read-only file system", "mounted read-only"]);
}

#[test]
fn two_processes_on_one_directory() {
    let bench = Bench::tiny();
    let other = bench.path("other.jsonl");
    write_rows(&other, 3, 5, Shape::TINY.vocab, 9);
    let run = |output: &str| bench.finetune(output).args(&["--steps", "150"]);
    run("whole").ok();
    let first = run("shared").spawn();
    assert!(first.wait_until(|| bench.steps_so_far("shared") >= 2));
    // Not even another data set may disturb the run that is under way.
    let second = |output: &str| {
        cmd(&["finetune", "--steps", "5", "--seq-len", "24"])
            .path("--model", &bench.path("model"))
            .path("--output", &bench.path(output))
            .path("--data", &other)
    };
    second("shared").fails(1, &["--output ", "another run writes there"]);
    second("shared").args(&["--resume"]).fails(1, &["another run writes there"]);
    let state = second("elsewhere").path("--disk", &bench.path("shared/.terrace"));
    state.fails(1, &["is in use by another process", "terrace.lock"]);
    state.args(&["--resume"]).fails(1, &["is in use by another process"]);
    assert!(first.is_running(), "make the first run longer");
    assert_eq!(first.wait().code(), Some(0));
    assert!(bench.weights("shared") == bench.weights("whole"));
}

#[test]
fn resuming_another_run() {
    let bench = Bench::tiny();
    let model = bench.path("model");
    let other = bench.path("other.jsonl");
    write_rows(&other, 40, 24, Shape::TINY.vocab, 6);
    Shape { layers: 3, ..Shape::TINY }.write(&bench.path("deeper"));
    let run = |words: &[&str], model: &Path, data: &Path| {
        cmd(&["finetune", "--batch-size", "2", "--steps", "4"])
            .path("--model", model)
            .path("--data", data)
            .path("--output", &bench.path("out"))
            .args(words)
    };
    let data = bench.path("data.jsonl");
    let usual = ["--seq-len", "24", "--learning-rate", "1e-3"];
    let advice =
        "leave out --resume to begin a run, or give the --output and each --disk of the one to continue";
    run(&usual, &model, &data).args(&["--resume"]).fails(1, &["holds no training state", advice]);
    run(&usual, &model, &data).ok();
    let weights = bench.weights("out");
    for (words, model, data, part) in [
        (
            &["--seq-len", "24", "--learning-rate", "2e-3"],
            &model,
            &data,
            "--learning-rate was 0.001 and is now 0.002",
        ),
        (&usual, &model, &other, "the rows of --data was checksum "),
        (&usual, &bench.path("deeper"), &data, "the model's config.json was checksum "),
        (&["--seq-len", "16", "--learning-rate", "1e-3"], &model, &data, "--seq-len was 24 and is now 16"),
    ] {
        run(words, model, data)
            .args(&["--resume"])
            .fails(2, &[part, "made by another run", "original settings"]);
    }
    run(&usual, &model, &data).args(&["--resume", "--seed", "7"]).fails(2, &["--seed was 0 and is now 7"]);
    run(&usual, &model, &data)
        .args(&["--resume", "--no-shuffle"])
        .fails(2, &["shuffle was true and is now false"]);
    run(&usual, &model, &data)
        .args(&["--resume", "--no-decay", "*norm*"])
        .fails(2, &["--no-decay was none and is now *norm*,weight-decay=0"]);
    run(&usual, &model, &data).args(&["--resume", "--optimizer", "lion", "--clip", "0"]).fails(
        2,
        &["optimizer was adamw, beta1 0.9", "and is now lion, beta1 0.9", "--clip was 1.0 and is now none"],
    );
    run(&usual, &model, &data).args(&["--resume"]).ok();
    assert!(bench.weights("out") == weights, "the refused runs left the state alone");
}

/// Changes one entry of the model's configuration.
fn set(bench: &Bench, key: &str, value: &Value) {
    let path = bench.path("model").join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config[key] = value.clone();
    fs::write(path, config.to_string()).unwrap();
}

/// On a machine with a driver there is nothing to see.
#[test]
fn a_card_without_a_driver() {
    let report = cmd(&["report", "--json"]).ok().json();
    if !report["gpu_problem"].as_str().is_some_and(|problem| problem.contains("no CUDA driver")) {
        return;
    }
    let said = cmd(&["report"]).ok();
    assert!(said.stdout.contains("not found in"), "{}", said.stdout);
    let bench = Bench::tiny();
    let parts = ["--device cuda:0: no CUDA driver", "libcuda.so.1 was looked for in", "--device cpu"];
    bench.finetune("out").args(&["--steps", "1", "--device", "cuda:0"]).fails(2, &parts);
    let generate = || bench.generate("model").args(&["--prompt-ids", "1"]);
    generate().args(&["--device", "cuda:0"]).fails(2, &parts);
    generate().args(&["--kv", "disk"]).fails(2, &["--kv disk needs a directory", "--disk PATH"]);
    generate().args(&["--kv", "host", "--max-new-tokens", "1"]).ok();
}
