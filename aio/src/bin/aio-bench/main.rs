//! `aio-bench`: what a disk can really do, through the engine that the rest of Terrace uses.
//!
//! [`run`] measures each direction once, [`sweep`] tries settings, [`tune`] writes the best ones down and [`compare`]
//! runs fio beside it. All of them make their files in [`files`], put a load on them with [`terrace_aio::bench::load`] and say what the
//! figures mean in [`diagnosis`].

mod compare;
mod diagnosis;
mod failure;
mod files;
mod fio;
mod html;
mod interrupt;
mod measure;
mod memory;
mod options;
mod progress;
mod report;
mod run;
mod space;
mod sustained;
mod sweep;
mod tune;
mod units;

use clap::Parser;
use interrupt::Interrupt;
use options::{Cli, Command};
use std::process::ExitCode;
use terrace_aio::signals::report_large_files;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Where it cannot be caught, a file that is too large ends the process as ever.
    let _ = report_large_files();
    let interrupt = Interrupt::listen();
    let outcome = match &cli.command {
        None => run::run(&cli.run, interrupt),
        Some(Command::Sweep(options)) => sweep::run(options, interrupt),
        Some(Command::Tune(options)) => tune::run(options, interrupt),
        Some(Command::Compare(options)) => compare::run(options, interrupt),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("aio-bench: {failure}");
            ExitCode::from(failure.code)
        }
    }
}
