//! `cargo xtask cuda-mock`: the tests of CUDA code on a driver that plays a card, for machines without one.
//!
//! The driver and the compiler are built from `device/mock/` with g++; each package's `cuda_mock` tests find them by
//! `LD_LIBRARY_PATH` and bring their kernels as a library of their own.

use std::path::{Path, PathBuf};

use crate::command::Step;

/// A shared library, by its file's name, and its sources.
type Library = (&'static str, &'static [&'static str]);

/// Found by every package.
const LIBRARIES: [Library; 2] = [
    ("libcuda.so.1", &["device/mock/driver.cpp", "device/mock/machine.cpp"]),
    ("libnvrtc.so.13", &["device/mock/nvrtc.cpp"]),
];

/// Packages with a test target `cuda_mock`, and the library with their kernels.
const PACKAGES: [(&str, Library); 1] =
    [("terrace-device", ("libterrace_device_kernels.so", &["device/mock/test_kernels.cpp"]))];

const COMPILER: &str =
    "g++ -std=c++17 -O1 -g -Wall -Wextra -Werror -fPIC -shared -pthread -fvisibility=hidden";

/// Builds the libraries and runs the tests of the packages that `arguments` name (`-p NAME`; all without any).
///
/// # Errors
/// There is no g++, a package has no such tests, or something failed.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut chosen = Vec::new();
    for pair in arguments.chunks(2) {
        let known = |name: &str| PACKAGES.iter().find(|(package, _)| *package == name);
        match pair {
            ["-p", name] => chosen.push(known(name).ok_or(format!("`{name}` has no `cuda_mock` tests"))?),
            _ => return Err(format!("unknown argument `{}`: see `cargo xtask help`", pair[0])),
        }
    }
    if chosen.is_empty() {
        chosen.extend(&PACKAGES);
    }
    if !has_compiler(root) {
        return Err("g++ not found: it builds the mock driver".to_owned());
    }
    let folder = folder(root)?;
    LIBRARIES.iter().try_for_each(|library| build(root, &folder, library).map(drop))?;
    // The loader asks for the plain names first, which on a machine with a card would find the real ones.
    for (name, _) in LIBRARIES {
        let plain = folder.join(name.split_inclusive(".so").next().expect("a name is not empty"));
        let _ = std::fs::remove_file(&plain);
        std::os::unix::fs::symlink(name, &plain)
            .map_err(|e| format!("cannot link {}: {e}", plain.display()))?;
    }
    for (package, kernels) in chosen {
        let kernels = build(root, &folder, kernels)?;
        Step::new(&format!("cargo test --release -p {package} --test cuda_mock -- --ignored"))
            .environment("LD_LIBRARY_PATH", search_path(&folder))
            .environment("TERRACE_SHIM_LIBRARY", kernels.display().to_string())
            .run(root)?;
    }
    Ok(())
}

/// Whether [`run`] can build anything.
pub fn has_compiler(root: &Path) -> bool {
    Step::new("g++ --version").read_quietly(root).is_some()
}

fn build(root: &Path, folder: &Path, (name, sources): &Library) -> Result<PathBuf, String> {
    let output = folder.join(name);
    // A process that has the old file mapped keeps it.
    let _ = std::fs::remove_file(&output);
    Step::new(COMPILER)
        .arguments(sources.iter().copied())
        .arguments([&*format!("-Wl,-soname,{name}"), "-ldl", "-o", &*output.to_string_lossy()])
        .run(root)?;
    Ok(output)
}

/// `cuda-mock` in the folder that Cargo builds in.
fn folder(root: &Path) -> Result<PathBuf, String> {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir));
    let folder = target.join("cuda-mock");
    std::fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    Ok(folder)
}

fn search_path(folder: &Path) -> String {
    let others = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let separator = if others.is_empty() { "" } else { ":" };
    format!("{}{separator}{others}", folder.display())
}
