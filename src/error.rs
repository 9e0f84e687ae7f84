//! How a command ends when it does not end well.

use crate::cli::flags::in_flags;
use std::io::ErrorKind;
use std::process::ExitCode;

/// Why a command stopped. The variant decides the exit code, which scripts rely on.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Flags or a configuration file that make no sense: exit code 2.
    #[error("{}", in_flags(_0))]
    Usage(String),
    /// Something went wrong on the way: exit code 1.
    #[error("{}", in_flags(_0))]
    Failed(String),
    /// The user stopped the run; the last step is committed: exit code 130.
    #[error("interrupted; the last finished step is saved, --resume continues from it")]
    Interrupted,
    /// The user stopped what leaves nothing to continue: exit code 130.
    #[error("interrupted")]
    Stopped,
}

impl CliError {
    /// Wraps any error as [`Failed`](Self::Failed), with its causes.
    pub fn failed(error: impl std::error::Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(source) = cause {
            let text = source.to_string();
            // Many messages already end with their cause.
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            cause = source.source();
        }
        Self::Failed(message)
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Interrupted | Self::Stopped => 130,
        })
    }
}

impl From<terrace_zero::EngineError> for CliError {
    fn from(error: terrace_zero::EngineError) -> Self {
        match error {
            terrace_zero::EngineError::Interrupted => Self::Interrupted,
            terrace_zero::EngineError::Config(message) => Self::Usage(message),
            other @ terrace_zero::EngineError::AnotherRun { .. } => Self::Usage(other.to_string()),
            terrace_zero::EngineError::Tier(terrace_tiers::TierError::Plan(refusal)) => {
                Self::Usage(refusal.to_string())
            }
            other => Self::failed(other),
        }
    }
}

impl From<crate::data::DataError> for CliError {
    fn from(error: crate::data::DataError) -> Self {
        // Every message of a data error names its cause.
        Self::Failed(error.to_string())
    }
}

/// What to do about an error of the operating system with a path that the user gave.
pub(crate) fn advice(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "check the path",
        ErrorKind::PermissionDenied => "check the owner and the permissions of the path",
        ErrorKind::ReadOnlyFilesystem => "the file system is mounted read-only; choose another place",
        ErrorKind::NotADirectory => "a part of the path is a file",
        ErrorKind::IsADirectory => "give the name of a file",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space or choose another place",
        ErrorKind::FileTooLarge => "raise the limit of a file's size (ulimit -f), or choose another place",
        ErrorKind::InvalidData => "the file is not text in UTF-8",
        _ => "check the path and the file system that it is on",
    }
}
