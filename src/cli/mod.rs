//! The command line: what can be asked, and the commands.

pub mod args;
pub mod calibrate;
mod checks;
pub mod demo;
mod durability;
mod earlier;
pub mod eval;
pub mod export;
pub mod finetune;
mod finetune_checks;
pub(crate) mod flags;
mod floor;
mod frozen_knobs;
pub mod generate;
mod identity;
pub mod inputs;
pub mod inspect;
mod keeping;
mod knobs;
pub mod pinned;
mod placement;
pub mod plan;
mod plan_args;
mod plan_generate;
mod plan_refusal;
mod ranks;
pub mod report;
mod retention;
mod saving;
pub mod session;
mod stored;
mod trace;
mod values;

use crate::error::CliError;
use args::{Cli, Command, ReportArgs};
use serde::Serialize;
use std::path::Path;

/// Runs a command.
///
/// # Errors
/// The command failed; the error knows its exit code.
pub fn run(cli: Cli) -> Result<(), CliError> {
    match cli.command {
        Command::Report(args) => report(&args),
        Command::Plan(args) => plan::plan(&args, cli.threads),
        Command::Calibrate(args) => calibrate::calibrate(&args, cli.threads),
        Command::Finetune(args) => finetune::finetune(&args, cli.threads),
        Command::Generate(args) => generate::generate(&args, cli.threads),
        Command::Eval(args) => eval::eval(&args, cli.threads),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Export(args) => export::export(&args),
        Command::Demo(args) => demo::demo(&args, cli.threads),
    }
}

/// Prints the one JSON document of `--json` to stdout.
///
/// # Errors
/// Standard output cannot be written.
pub fn print_json(document: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(document).map_err(CliError::failed)?;
    print_text(&text)
}

/// A path in a document, which holds text: what a message would show of one that is none.
fn shown(path: impl AsRef<Path>) -> String {
    path.as_ref().to_string_lossy().into_owned()
}

/// Prints; a reader that has seen enough is no error.
fn print_text(text: &str) -> Result<(), CliError> {
    use std::io::{ErrorKind, Write};
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("writing to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn report(args: &ReportArgs) -> Result<(), CliError> {
    if let Some(folder) = &args.ptx {
        checks::writable("--ptx", folder)?;
        let files = terrace_kernels::cuda::write_ptx(folder).map_err(CliError::failed)?;
        eprintln!("{files} files with kernels are in {}", folder.display());
    }
    let report = report::Report::collect(|| {
        terrace_aio::engine::UringEngine::probe().map(|_| ()).map_err(|e| e.to_string())
    });
    if args.json { print_json(&report) } else { print_text(report.to_string().trim_end()) }
}
