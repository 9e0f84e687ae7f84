//! `cargo xtask cuda-check`: compiles every CUDA kernel for every generation of cards that it is meant for.
//!
//! The compilers are NVRTC from Python wheels, a new one and one that writes PTX for older drivers (`gpu-pack` takes it), in an
//! environment of their own below the folder Cargo builds in; they need no card and no toolkit. `kernels/shim/compile.py` calls them and
//! prints registers and spills. Where there is no Python or a wheel cannot be had, the command says what was not compiled and succeeds.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::Step;
use crate::cuda_shim;

/// A version of NVRTC.
pub struct Compiler {
    /// What pip installs.
    wheel: &'static str,
    /// The library, below the folder that wheels are installed to.
    library: &'static str,
    /// Generations of cards, as the device's compiler asks for them.
    architectures: &'static [&'static str],
}

/// The compiler for Ampere, its smaller cards, Ada, Hopper, Blackwell and its smaller cards. Other versions of NVRTC take the same
/// sources; this one's results are comparable.
const NEW: Compiler = Compiler {
    wheel: "nvidia-cuda-nvrtc==13.0.88",
    library: "nvidia/cu13/lib/libnvrtc.so.13",
    architectures: &["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"],
};

/// The compiler of PTX that travels: a driver refuses PTX of a newer CUDA than its own.
pub const OLD: Compiler = Compiler {
    wheel: "nvidia-cuda-nvrtc-cu12==12.1.105",
    library: "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    architectures: &["sm_80"],
};

/// Compiles all kernels.
///
/// # Errors
/// A kernel does not compile, or compiles with a warning.
pub fn run(root: &Path) -> Result<(), String> {
    [NEW, OLD].iter().try_for_each(|compiler| compile(root, compiler, compiler.architectures))
}

/// Compiles all kernels for the oldest generation by the old compiler and for the newest by the new one, in a third of the time: enough as long
/// as no kernel has parts that only some generations compile. If one has, all are compiled for all.
///
/// # Errors
/// As [`run`].
pub fn ends(root: &Path) -> Result<(), String> {
    if has_parts(&root.join("kernels/src/cuda"))? {
        return run(root);
    }
    compile(root, &OLD, &OLD.architectures[..1])?;
    compile(root, &NEW, &NEW.architectures[NEW.architectures.len() - 1..])
}

/// Whether any file in `folder` asks for which generation it is compiled.
fn has_parts(folder: &Path) -> Result<bool, String> {
    let failed = |why| format!("{}: {why}", folder.display());
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh");
        if is_source && fs::read_to_string(&path).map_err(failed)?.contains("__CUDA_ARCH") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn compile(root: &Path, compiler: &Compiler, architectures: &[&str]) -> Result<(), String> {
    let (python, library) = match compiler.install(root)? {
        Ok(found) => found,
        Err(missing) => {
            eprintln!("NOT RUN: no kernel was compiled by {}, since {missing}", compiler.wheel);
            return Ok(());
        }
    };
    let sources = cuda_shim::sources(root)?;
    let files: Vec<String> = sources.iter().map(|source| source.path.display().to_string()).collect();
    Step::new(&format!("{} kernels/shim/compile.py", python.display()))
        .arguments([&*library.display().to_string(), "kernels/src/cuda"])
        .arguments(files.iter().map(String::as_str))
        .arguments(["--", "--std=c++17", "--"])
        .arguments(architectures.iter().copied())
        .run(root)
}

impl Compiler {
    /// A folder with the library under the name that the loader asks for first, if it can be had.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn folder(&self, root: &Path) -> Result<Option<PathBuf>, String> {
        let library = match self.install(root)? {
            Ok((_, library)) => library,
            Err(missing) => {
                eprintln!("NOT WRITTEN: no PTX, since {missing}");
                return Ok(None);
            }
        };
        let folder = library.parent().expect("a library lies in a folder").to_path_buf();
        let plain = folder.join("libnvrtc.so");
        if !plain.exists() {
            std::os::unix::fs::symlink(&library, &plain)
                .map_err(|e| format!("cannot link {}: {e}", plain.display()))?;
        }
        Ok(Some(folder))
    }

    /// A Python and the compiler's library, installed if they are not there yet; why not, where they cannot be had.
    fn install(&self, root: &Path) -> Result<Result<(PathBuf, PathBuf), String>, String> {
        let folder = crate::target_folder(root, "cuda-tools")?;
        let python = folder.join("bin/python");
        if let Some(library) = self.find(&folder) {
            return Ok(Ok((python, library)));
        }
        let install = || {
            Step::new("python3 --version").read_quietly(root).ok_or("python3 was not found")?;
            Step::new("python3 -m venv").arguments([&*folder.display().to_string()]).run(root)?;
            Step::new(&format!(
                "{} -m pip install --quiet --disable-pip-version-check --timeout 20 --retries 2 {}",
                python.display(),
                self.wheel
            ))
            .run(root)?;
            self.find(&folder).ok_or(format!("{} brought no {}", self.wheel, self.library))
        };
        Ok(install().map(|library| (python.clone(), library)))
    }

    fn find(&self, folder: &Path) -> Option<PathBuf> {
        let entries = fs::read_dir(folder.join("lib")).ok()?;
        let site = |entry: std::io::Result<fs::DirEntry>| Some(entry.ok()?.path().join("site-packages"));
        entries.filter_map(site).map(|site| site.join(self.library)).find(|path| path.exists())
    }
}
