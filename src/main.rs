//! The `terrace` command.
#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use terrace::cli::{self, args::Cli};

fn main() -> ExitCode {
    match cli::run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            error.exit_code()
        }
    }
}
