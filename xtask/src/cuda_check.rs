//! `cargo xtask cuda-check`: compiles every CUDA kernel for every generation of cards that it is meant for.
//!
//! The compiler is NVRTC from a Python wheel, in an environment of its own below the folder Cargo builds in; it needs no
//! card and no toolkit. `kernels/shim/compile.py` calls it and prints registers and spills. Where there is no Python or
//! the wheel cannot be had, the command says that nothing was compiled and succeeds.

use std::path::{Path, PathBuf};

use crate::command::Step;
use crate::cuda_shim;

/// The compiler. Other versions of NVRTC take the same sources; this one's results are comparable.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";

/// Ampere, its smaller cards, Ada, Hopper, Blackwell and its smaller cards, as the device's compiler asks for them.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Compiles all kernels.
///
/// # Errors
/// A kernel does not compile, or compiles with a warning.
pub fn run(root: &Path) -> Result<(), String> {
    let folder = crate::target_folder(root, "cuda-tools")?;
    let (python, library) = match compiler(root, &folder) {
        Ok(found) => found,
        Err(missing) => {
            eprintln!("NOT RUN: no kernel was compiled, since {missing}");
            return Ok(());
        }
    };
    let sources = cuda_shim::sources(root)?;
    let files: Vec<String> = sources.iter().map(|source| source.path.display().to_string()).collect();
    Step::new(&format!("{} kernels/shim/compile.py", python.display()))
        .arguments([&*library.display().to_string(), "kernels/src/cuda"])
        .arguments(files.iter().map(String::as_str))
        .arguments(["--", "--std=c++17", "--"])
        .arguments(ARCHITECTURES)
        .run(root)
}

/// The folder with the compiler, if it can be had.
///
/// # Errors
/// The folder's parent cannot be made.
pub fn environment(root: &Path) -> Result<Option<PathBuf>, String> {
    let folder = crate::target_folder(root, "cuda-tools")?;
    let found = compiler(root, &folder);
    Ok(found.map_err(|missing| eprintln!("NOT WRITTEN: no PTX, since {missing}")).is_ok().then_some(folder))
}

/// A Python and the compiler's library, installed if they are not there yet.
fn compiler(root: &Path, folder: &Path) -> Result<(PathBuf, PathBuf), String> {
    let python = folder.join("bin/python");
    if let Some(library) = library(folder) {
        return Ok((python, library));
    }
    Step::new("python3 --version").read_quietly(root).ok_or("python3 was not found")?;
    Step::new("python3 -m venv").arguments([&*folder.display().to_string()]).run(root)?;
    Step::new(&format!(
        "{} -m pip install --quiet --disable-pip-version-check --timeout 20 --retries 2 {WHEEL}",
        python.display()
    ))
    .run(root)?;
    let library = library(folder).ok_or(format!("{WHEEL} brought no libnvrtc.so"))?;
    Ok((python, library))
}

fn library(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder.join("lib")).ok()?;
    let file = "site-packages/nvidia/cu13/lib/libnvrtc.so.13";
    entries.filter_map(|entry| Some(entry.ok()?.path().join(file))).find(|path| path.exists())
}
