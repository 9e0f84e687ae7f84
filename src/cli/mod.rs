//! The command line: what can be asked, and the commands that need no engine.

pub mod args;
