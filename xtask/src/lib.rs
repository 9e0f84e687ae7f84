//! Project tasks, run as `cargo xtask <task>`; see `main.rs` for the list.
//!
//! They use nothing but the standard library, so that checking the project never waits for its dependencies.

#![forbid(unsafe_code)]

pub mod bench;
pub mod command;
pub mod cuda_check;
pub mod cuda_mock;
pub mod cuda_shim;
pub mod gpu_pack;
pub mod programs;
pub mod test;
pub mod tidy;

use std::path::{Path, PathBuf};

/// The root of the checkout that this binary was built from.
pub fn project_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask/ lies in the project root").to_path_buf()
}

/// A folder of this name where Cargo builds, made if it is missing.
///
/// # Errors
/// It cannot be made.
pub fn target_folder(root: &Path, name: &str) -> Result<PathBuf, String> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
    let folder = target.join(name);
    std::fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    Ok(folder)
}
