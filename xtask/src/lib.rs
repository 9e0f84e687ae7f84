//! Project tasks, run as `cargo xtask <task>`; see `main.rs` for the list.
//!
//! They use nothing but the standard library, so that checking the project never waits for its dependencies.

#![forbid(unsafe_code)]

pub mod bench;
pub mod command;
pub mod cuda_mock;
pub mod cuda_shim;
pub mod test;
pub mod tidy;

use std::path::{Path, PathBuf};

/// The root of the checkout that this binary was built from.
pub fn project_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask/ lies in the project root").to_path_buf()
}
