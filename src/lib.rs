//! Train and run language models that are larger than the memory of the machine.
//!
//! This crate is the facade over the engine's crates and the library behind the `terrace` command: configuration, data,
//! sampling, progress. The engine itself is in [`terrace_zero`], the model families in [`terrace_models`].
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod data;
pub mod demo;
pub mod error;
pub mod generate;
pub mod interrupt;
pub mod metrics;
pub mod progress;
