//! Training state that a command looks at without training.

use super::args::{DiskEngine, StateArgs};
use crate::config::run;
use crate::error::CliError;
use std::path::PathBuf;
use terrace_aio::engine::{EngineChoice, EngineConfig as IoConfig, open_default};
use terrace_tiers::{Access, Recovery, StoreView, TierError};

/// The folders, whichever way they were given.
pub fn dirs(args: &StateArgs) -> &[PathBuf] {
    if args.disk.is_empty() { &args.dirs } else { &args.disk }
}

/// Opens the state that the flags name.
///
/// # Errors
/// There is none, it is in use, or what says how it is laid out is damaged.
pub fn open(args: &StateArgs, access: Access) -> Result<StoreView, CliError> {
    let dirs = dirs(args);
    if let Some(what) = run::given_twice(dirs) {
        return Err(CliError::Usage(what));
    }
    let choice = match args.engine {
        DiskEngine::Auto => EngineChoice::Auto,
        DiskEngine::Uring => EngineChoice::Uring,
        DiskEngine::Threads => EngineChoice::Threads,
    };
    let io = open_default(&IoConfig { choice, ..IoConfig::default() }).map_err(CliError::failed)?;
    StoreView::open(&io, dirs, access).map_err(|error| match error {
        TierError::Locked { dir, lock } => CliError::Failed(format!(
            "{} is in use: a training runs there, or another command (it holds {}). Wait for it, or stop the training with \
             Ctrl-C, which commits the running step",
            dir.display(),
            lock.display()
        )),
        error @ TierError::NoState { .. } => {
            let default = run::default_disk(&dirs[0]);
            CliError::Failed(match default.join("manifest.bin").exists() {
                true => format!("{error}; the state of a run without --disk is in {0}: give --disk {0}", default.display()),
                false => no_state(&error, "give each --disk of the run, or .terrace in its --output"),
            })
        }
        other => CliError::failed(other),
    })
}

/// Says that there is no state, and `what_to_do` unless the store knows better.
pub fn no_state(error: &TierError, what_to_do: &str) -> String {
    match error {
        TierError::NoState { detail, .. } if detail.contains("; ") => error.to_string(),
        _ => format!("{error}; {what_to_do}"),
    }
}

/// Says what was damaged and has a substitute, a line each.
pub fn say(recoveries: &[Recovery]) {
    recoveries.iter().for_each(|recovery| eprintln!("note: {recovery}"));
}

/// The directories as flags.
pub fn flags(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| format!("--disk {}", dir.display())).collect::<Vec<_>>().join(" ")
}
