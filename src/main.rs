//! The `terrace` command.
#![forbid(unsafe_code)]

use clap::Parser;
use std::io::Write;
use std::process::ExitCode;
use terrace::cli::{self, args::Cli};
use terrace::warnings;
use terrace_aio::signals::report_large_files;

fn main() -> ExitCode {
    let cli = Cli::parse();
    warnings::show();
    // Where it cannot be caught, a file that is too large ends the process as ever.
    let _ = report_large_files();
    match cli::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Where nobody can read it, the exit code is left.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            error.exit_code()
        }
    }
}
