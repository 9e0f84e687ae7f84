//! The `terrace` command.
#![forbid(unsafe_code)]

use clap::Parser;
use std::io::Write;
use std::process::ExitCode;
use terrace::cli::{self, args::Cli};
use terrace::warnings;

fn main() -> ExitCode {
    let cli = Cli::parse();
    warnings::show();
    match cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where nobody can read it, the exit code is left.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            error.exit_code()
        }
    }
}
