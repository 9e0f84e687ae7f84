//! `cargo xtask cuda-mock`: the tests of CUDA code on a driver that plays a card, for machines without one.
//!
//! The driver and the compiler are built from `device/mock/` with g++; the tests of each package find them by
//! `LD_LIBRARY_PATH` and bring their kernels as a library of their own.

use std::path::{Path, PathBuf};

use crate::command::Step;
use crate::cuda_shim;
use crate::programs::{self, Program};

/// A shared library, by its file's name, and its sources.
type Library = (&'static str, &'static [&'static str]);

/// Found by every package.
const LIBRARIES: [Library; 4] = [
    ("libcuda.so.1", &["device/mock/driver.cpp", "device/mock/machine.cpp"]),
    ("libnvrtc.so.13", &["device/mock/nvrtc.cpp"]),
    ("libnvrtc.so.12", &["device/mock/nvrtc_12.cpp"]),
    ("libcublasLt.so.13", &["kernels/shim/cublaslt.cpp"]),
];

/// Tests that need a card.
struct Suite {
    package: &'static str,
    /// Its test targets.
    targets: &'static [&'static str],
    /// Which of their tests, in the words of a test's executable.
    tests: &'static str,
    /// Builds the library with their kernels, in the folder if it is theirs alone.
    kernels: fn(&Path, &Path) -> Result<PathBuf, String>,
}

const SUITES: [Suite; 6] = [
    Suite {
        package: "terrace-device",
        targets: &["cuda_mock"],
        tests: "--ignored",
        kernels: |root, folder| {
            build(root, folder, &("libterrace_device_kernels.so", &["device/mock/test_kernels.cpp"]))
        },
    },
    // The suites that every backend passes: the library's name makes them run on the card.
    Suite {
        package: "terrace-kernels",
        targets: &["conformance", "tensor_cores"],
        // Those two are of the CPU alone.
        tests: "--include-ignored --skip threads::matmul --skip threads::products_with_epilogues",
        kernels: |root, _| {
            cuda_shim::selftest(root)?;
            cuda_shim::build(root)
        },
    },
    // State updated by kernels, byte for byte as by the loops of the CPU.
    Suite {
        package: "terrace-optimizer",
        targets: &["on_device"],
        tests: "--include-ignored",
        kernels: |root, _| cuda_shim::build(root),
    },
    // Parity with torch and placement on the card, which the variable below selects.
    Suite {
        package: "terrace-models",
        targets: &["suite", "placement", "fp16"],
        tests: "engine:: quantized::placement quantized::logits bf16_with_split_state_untied_without_clipping f32 \
                placement_changes_nothing keys::numbers demand::",
        kernels: |root, _| cuda_shim::build(root),
    },
    // Horizontal accumulation, and device memory as planned, also by a step that fails.
    Suite {
        package: "terrace-models",
        targets: &["accumulation", "keeping"],
        tests: "state_goes_on_with_either a_step_that_fails every_block_and_micro_batch",
        kernels: |root, _| cuda_shim::build(root),
    },
    Suite {
        package: "terrace",
        targets: &["cuda_mock"],
        tests: "--ignored",
        kernels: |root, _| cuda_shim::build(root),
    },
];

const COMPILER: &str = "g++ -std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-unknown-pragmas \
                        -Wno-unused-function -fno-extern-tls-init -fPIC -shared -pthread -fvisibility=hidden";

/// Builds the libraries and runs the tests of the packages that `arguments` name (`-p NAME`; all without any).
///
/// # Errors
/// There is no g++, a package has no such tests, or something failed.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let mut chosen = Vec::new();
    for pair in arguments.chunks(2) {
        match pair {
            ["-p", name] => {
                let before = chosen.len();
                chosen.extend(SUITES.iter().filter(|suite| suite.package == *name));
                if chosen.len() == before {
                    return Err(format!("`{name}` has no tests for a card"));
                }
            }
            _ => return Err(format!("unknown argument `{}`: see `cargo xtask help`", pair[0])),
        }
    }
    if !has_compiler(root) {
        return Err("g++ not found: it builds the mock driver".to_owned());
    }
    // All of them with the features that the whole has, as `cargo test --workspace` built them; Cargo would build most crates again for one
    // package alone.
    let command = if chosen.is_empty() {
        chosen.extend(&SUITES);
        "cargo test --release --no-run --workspace".to_owned()
    } else {
        let packages: String = chosen.iter().map(|suite| format!(" -p {}", suite.package)).collect();
        format!("cargo test --release --no-run{packages}")
    };
    let programs = programs::build(root, || Step::new(&command))?;
    let folder = crate::target_folder(root, "cuda-mock")?;
    LIBRARIES.iter().try_for_each(|library| build(root, &folder, library).map(drop))?;
    // The loader asks for the plain names first, which on a machine with a card would find the real ones.
    for (name, _) in LIBRARIES.iter().filter(|(name, _)| !name.ends_with(".12")) {
        let plain = folder.join(name.split_inclusive(".so").next().expect("a name is not empty"));
        let _ = std::fs::remove_file(&plain);
        std::os::unix::fs::symlink(name, &plain)
            .map_err(|e| format!("cannot link {}: {e}", plain.display()))?;
    }
    for Suite { package, targets, tests, kernels } in chosen {
        let kernels = kernels(root, &folder)?;
        for target in *targets {
            let is_it = |program: &&Program| program.package == *package && program.name == *target;
            let program =
                programs.iter().find(is_it).ok_or(format!("`{command}` built no {target} of {package}"))?;
            Step::of_file(&program.file)
                .arguments(tests.split_whitespace())
                .environment("LD_LIBRARY_PATH", search_path(&folder))
                .environment("TERRACE_SHIM_LIBRARY", kernels.display().to_string())
                // Threads of a block in another order at every launch; a seed that is set decides which.
                .environment(
                    "TERRACE_SHIM_ORDER",
                    std::env::var("TERRACE_SHIM_ORDER").unwrap_or("1".to_owned()),
                )
                .environment("TERRACE_TEST_DEVICE", "cuda:0".to_owned())
                // What the mock compiler makes must not be taken for a real compiler's.
                .environment("XDG_CACHE_HOME", folder.join("cache").display().to_string())
                .run(&program.folder)?;
        }
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

fn search_path(folder: &Path) -> String {
    let others = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let separator = if others.is_empty() { "" } else { ":" };
    format!("{}{separator}{others}", folder.display())
}
