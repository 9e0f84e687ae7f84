//! Why the program ends without having done what was asked, in one line.

use std::fmt;
use std::io;
use std::path::Path;
use terrace_aio::IoError;

/// A message and an exit code.
#[derive(Debug)]
pub struct Failure {
    message: String,
    /// 1 failed, 2 wrong usage.
    pub code: u8,
}

impl Failure {
    /// Something went wrong.
    pub fn failed(message: String) -> Self {
        Self { message, code: 1 }
    }

    /// The command line cannot be meant that way.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }

    /// The operating system refused.
    pub fn io(doing: &str, path: &Path, error: &io::Error) -> Self {
        let advice = match error.raw_os_error() {
            Some(libc::EROFS) => "the file system is mounted read-only: choose another directory",
            Some(libc::EACCES | libc::EPERM) => {
                "check the owner and the permissions, or choose another directory"
            }
            Some(libc::ENOSPC | libc::EDQUOT) => "free some space or lower --file-size",
            Some(libc::ENOENT | libc::ENOTDIR) => "check the path",
            _ => "see the message for the cause",
        };
        Self::failed(format!("{doing} {}: {error}; {advice}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Self {
        Self::failed(error.to_string())
    }
}
