//! `terrace demo`: the whole loop on made data, without a download.

use super::args::{Cli, Command, DemoArgs, FinetuneArgs, GenerateArgs};
use super::{finetune, generate, print_json, print_text, shown};
use crate::config::ByteSize;
use crate::demo::{self, SEQ_LEN};
use crate::error::CliError;
use clap::Parser;
use serde_json::json;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Instant;
use terrace_models::{Model, RandomSource};

/// Host memory of the demo when no flag says otherwise.
const HOST_MEMORY: u64 = 256 << 20;

/// Runs the command.
///
/// # Errors
/// The folder cannot be written, or training or generation fails.
pub fn demo(args: &DemoArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let began = Instant::now();
    let output = &args.output;
    let trained = output.join("trained");
    // One that was stopped is not gone on with: its model has no weights that a run could begin with.
    if ["config.json", "metrics.jsonl"].iter().any(|name| trained.join(name).exists()) {
        return Err(CliError::Usage(format!(
            "{} already holds a demo, or a part of one; remove it or give another --output",
            output.display()
        )));
    }
    eprintln!("1. writing stories, a tokenizer and a model configuration to {}", output.display());
    let files = demo::prepare(output, args.seed)?;

    let mut finetune_args = finetune_args(args, &files.model, &files.train, &trained)?;
    finetune_args.placement = args.placement.clone();
    if finetune_args.placement.host_memory.is_none() {
        finetune_args.placement.host_memory = Some(ByteSize(HOST_MEMORY));
    }
    if finetune_args.placement.disk.is_empty()
        && finetune_args.placement.offload.is_none_or(|o| o == super::args::Offload::Disk)
    {
        finetune_args.placement.disk = vec![output.join("state")];
    }
    let budget = finetune_args.placement.host_memory.map_or(HOST_MEMORY, |b| b.0);
    eprintln!(
        "2. training a fresh model for {} steps within {} of memory",
        args.steps,
        finetune::size(budget)
    );
    let model = Model::from_folder(&files.model).map_err(CliError::failed)?;
    let mut source = RandomSource::for_config(&model.config, args.seed);
    let stopped = |error| match error {
        CliError::Interrupted => CliError::Stopped,
        other => other,
    };
    let trained_summary = finetune::train(&finetune_args, threads, model, &mut source).map_err(stopped)?;

    eprintln!("3. generating from {}", trained.display());
    let generate_args = generate_args(&trained, &files.prompt, args.seed)?;
    let stories = generate::continue_prompts(&generate_args, threads)?;
    let seconds = began.elapsed().as_secs_f64();
    if args.json {
        return print_json(&json!({
            "training": trained_summary,
            "stories": stories,
            "model": shown(&trained),
            "seconds": seconds,
        }));
    }
    for story in &stories {
        print_text(&format!("{}{}", files.prompt, story.text.as_deref().unwrap_or_default()))?;
    }
    eprintln!("\ndone in {seconds:.0} s. What there is now:");
    for (what, path) in [
        ("stories", files.train.as_path()),
        ("fresh model's configuration", files.model.as_path()),
        ("trained model", trained.as_path()),
        ("metrics of every step", &trained.join("metrics.jsonl")),
    ] {
        eprintln!("  {what:28} {}", path.display());
    }
    eprintln!(
        "try: terrace generate --model {} --prompt \"Once upon a time\" --temperature 0.8",
        trained.display()
    );
    Ok(())
}

/// The demo is an ordinary fine-tuning run; its flags are what a user would type.
fn finetune_args(
    args: &DemoArgs,
    model: &Path,
    data: &Path,
    output: &Path,
) -> Result<FinetuneArgs, CliError> {
    let (steps, seq_len, seed) = (args.steps.to_string(), SEQ_LEN.to_string(), args.seed.to_string());
    let path = |p: &Path| p.display().to_string();
    let (model, data, output) = (path(model), path(data), path(output));
    let line = [
        "terrace",
        "finetune",
        "--model",
        &model,
        "--data",
        &data,
        "--output",
        &output,
        "--steps",
        &steps,
        "--seq-len",
        &seq_len,
        "--batch-size",
        "4",
        "--learning-rate",
        "3e-3",
        "--betas",
        "0.9,0.95",
        "--weight-decay",
        "0.1",
        "--warmup-steps",
        "10",
        "--scheduler",
        "cosine",
        "--seed",
        &seed,
        "--pack",
    ];
    match parse(&line)? {
        Command::Finetune(parsed) => Ok(*parsed),
        _ => unreachable!("the line says finetune"),
    }
}

fn generate_args(model: &Path, prompt: &str, seed: u64) -> Result<GenerateArgs, CliError> {
    let (model, seed) = (model.display().to_string(), seed.to_string());
    let line = [
        "terrace",
        "generate",
        "--model",
        &model,
        "--prompt",
        prompt,
        "--max-new-tokens",
        "120",
        "--temperature",
        "0.7",
        "--top-p",
        "0.95",
        "--seed",
        &seed,
    ];
    match parse(&line)? {
        Command::Generate(parsed) => Ok(*parsed),
        _ => unreachable!("the line says generate"),
    }
}

fn parse(line: &[&str]) -> Result<Command, CliError> {
    Ok(Cli::try_parse_from(line).map_err(|e| CliError::Usage(e.to_string()))?.command)
}
