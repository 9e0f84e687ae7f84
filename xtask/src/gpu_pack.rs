//! `cargo xtask gpu-pack`: a folder with all that proves and measures the CUDA backend on a machine with a card.
//!
//! Machines with cards are often rented by the minute, without a Rust toolchain and without a network. So everything is
//! built here: the commands, the tests that make sense on a card, the benchmark, and scripts for the peers; `run.sh` in
//! the folder runs it. Nothing in it asks for a path of this machine: tests are compiled to look for fixtures below the
//! folder they run in (`scripts/gpu/rustc-relative.sh`), and fixtures travel at their place in the project.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command::Step;
use crate::programs::{self, Program};

/// What fits through the narrowest door it was made for.
const BYTES_MAX: u64 = 60 << 20;

/// That of CUDA 12.1: what drivers of early 2023 translate.
const PTX_VERSION_MAX: (u32, u32) = (8, 1);

/// Programs of one command of Cargo's: the command, and what each file is called in the folder.
struct Programs {
    command: &'static str,
    /// The program's name, or `*` for any, and its path in the folder, with `*` for its name.
    places: &'static [(&'static str, &'static str)],
}

const PROGRAMS: [Programs; 6] = [
    Programs {
        command: "cargo build --release -p terrace -p terrace-aio --bins",
        places: &[("terrace", "bin/terrace"), ("aio-bench", "bin/aio-bench")],
    },
    // The suites run on a card if a library of kernels is named, whatever it is.
    Programs {
        command: "cargo test --release --no-run -p terrace-kernels --test conformance",
        places: &[("conformance", "tests/kernels-conformance")],
    },
    Programs {
        command: "cargo test --release --no-run -p terrace-optimizer --test on_device",
        places: &[("on_device", "tests/kernels-update")],
    },
    Programs {
        command: "cargo test --release --no-run -p terrace-models --test suite --test placement --test fp16 --test keeping \
                  --test accumulation --test packed",
        places: &[("*", "tests/models-*")],
    },
    Programs {
        command: "cargo build --release -p terrace-kernels --bench cuda",
        places: &[("cuda", "bin/cuda-bench")],
    },
    Programs {
        command: "cargo build --release -p terrace-kernels --example kernel_dump",
        places: &[("kernel_dump", "bin/kernel-dump")],
    },
];

/// Files that are copied as they are: folders from the project's root, and where their files go.
const FILES: [(&str, &str); 2] = [("scripts/gpu", "."), ("models/tests/fixtures", "models/tests/fixtures")];

/// What a pack says of itself, by which it is known.
const ABOUT: &str = "about.json";

/// What compiles the project's own crates for the pack.
const WRAPPER: &str = "rustc-relative.sh";

/// Files in those folders that are of no use elsewhere.
const LEFT_OUT: [&str; 3] = [WRAPPER, "make_fixtures.py", "__pycache__"];

/// Makes the folder that `arguments` name (`--output DIR`; `gpu-pack` where Cargo builds without).
///
/// # Errors
/// Something does not build, `strip` or `gzip` is missing, or the folder is too large.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let folder = match arguments {
        [] => crate::target_folder(root, "gpu-pack")?,
        ["--output", folder] => {
            std::path::absolute(folder).map_err(|e| format!("cannot use {folder}: {e}"))?
        }
        _ => return Err("usage: cargo xtask gpu-pack [--output DIR]".to_owned()),
    };
    refuse_others(&folder)?;
    // Before the folder is one of the changes.
    let about = about(root);
    // What an earlier pack left would travel, too; only what a pack holds is removed.
    for old in ["bin", "tests", "models", "ptx"] {
        let old = folder.join(old);
        if old.exists() {
            fs::remove_dir_all(&old).map_err(|e| format!("cannot empty {}: {e}", old.display()))?;
        }
    }
    fs::create_dir_all(&folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))?;
    write(&folder.join(ABOUT), &about)?;
    for programs in &PROGRAMS {
        for Program { name, file, .. } in build(root, programs.command)? {
            if let Some(place) = place(programs.places, &name) {
                squeeze(root, &file, &folder.join(place))?;
            }
        }
    }
    write_ptx(root, &folder.join("ptx"))?;
    for (from, to) in FILES {
        copy(&root.join(from), &folder.join(to))?;
    }
    let (bytes, mut files) = sizes(&folder)?;
    files.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    for (bytes, file) in files.iter().take(15) {
        eprintln!("{:>7.1} MiB  {}", *bytes as f64 / f64::from(1 << 20), file.display());
    }
    let summary =
        format!("{}: {} files, {:.1} MiB", folder.display(), files.len(), bytes as f64 / 1_048_576.0);
    if bytes > BYTES_MAX {
        return Err(format!("{summary}: more than {} MiB; leave some tests out", BYTES_MAX >> 20));
    }
    eprintln!("{summary}");
    Ok(())
}

/// Refuses a folder that holds something and is no pack: parts of it would be removed.
fn refuse_others(folder: &Path) -> Result<(), String> {
    let is_empty = fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_none());
    if is_empty || folder.join(ABOUT).is_file() {
        return Ok(());
    }
    Err(format!("{} holds something else than a pack; give a new folder, or an empty one", folder.display()))
}

/// The kernels as PTX, for a machine without NVRTC, where NVRTC can be had here.
fn write_ptx(root: &Path, folder: &Path) -> Result<(), String> {
    let Some(compiler) = crate::cuda_check::OLD.folder(root)? else { return Ok(()) };
    Step::new("cargo run --release --quiet -- report --ptx")
        .arguments([&*folder.display().to_string()])
        .environment("LD_LIBRARY_PATH", compiler.display().to_string())
        .run(root)?;
    for (path, _) in entries(folder)? {
        let ptx = fs::read(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let version = ptx_version(&ptx).ok_or_else(|| format!("{} holds no PTX", path.display()))?;
        if version > PTX_VERSION_MAX {
            return Err(format!(
                "{} is PTX {}.{}, too new for older drivers",
                path.display(),
                version.0,
                version.1
            ));
        }
    }
    Ok(())
}

/// The version of the language that the PTX in a file is in.
fn ptx_version(file: &[u8]) -> Option<(u32, u32)> {
    const BEFORE: &[u8] = b"\n.version ";
    let start = file.windows(BEFORE.len()).position(|window| window == BEFORE)? + BEFORE.len();
    let line = file[start..].split(u8::is_ascii_whitespace).next()?;
    let (major, minor) = std::str::from_utf8(line).ok()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The programs that a command of Cargo's builds, without this machine's paths in them.
fn build(root: &Path, command: &str) -> Result<Vec<Program>, String> {
    let wrapper = root.join("scripts/gpu").join(WRAPPER);
    programs::build(root, || {
        Step::new(command)
            .environment("RUSTC_WORKSPACE_WRAPPER", wrapper.display().to_string())
            .environment("TERRACE_PACK_ROOT", root.display().to_string())
    })
}

fn place(places: &[(&str, &str)], name: &str) -> Option<String> {
    let (_, place) = places.iter().find(|(wanted, _)| ["*", name].contains(wanted))?;
    Some(place.replace('*', name))
}

/// Copies a program without symbols and compressed; `run.sh` unpacks it.
fn squeeze(root: &Path, from: &Path, to: &Path) -> Result<(), String> {
    make_parent(to)?;
    let paths = [from, to].map(|path| path.display().to_string());
    Step::new("strip -o").arguments([&*paths[1], &*paths[0]]).run(root)?;
    Step::new("gzip -9").arguments([&*paths[1]]).run(root)
}

/// Copies the files of a folder, and of those in it.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    for (path, is_folder) in entries(from)? {
        let name = path.file_name().expect("an entry has a name");
        if LEFT_OUT.iter().any(|left_out| name == *left_out) {
            continue;
        }
        let to = to.join(name);
        if is_folder {
            copy(&path, &to)?;
        } else {
            make_parent(&to)?;
            fs::copy(&path, &to).map_err(|e| format!("cannot copy {}: {e}", path.display()))?;
        }
    }
    Ok(())
}

/// Bytes of all files below a folder, and each.
fn sizes(folder: &Path) -> Result<(u64, Vec<(u64, PathBuf)>), String> {
    let mut files = Vec::new();
    for (path, is_folder) in entries(folder)? {
        if is_folder {
            files.extend(sizes(&path)?.1);
        } else {
            files.push((
                path.metadata().map_err(|e| format!("cannot read {}: {e}", path.display()))?.len(),
                path,
            ));
        }
    }
    Ok((files.iter().map(|(bytes, _)| bytes).sum(), files))
}

/// Paths in a folder in their order, and whether each is a folder.
fn entries(folder: &Path) -> Result<Vec<(PathBuf, bool)>, String> {
    let failed = |e| format!("cannot read {}: {e}", folder.display());
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_folder = path.is_dir();
        entries.push((path, is_folder));
    }
    entries.sort();
    Ok(entries)
}

/// What the pack was made from, as JSON.
fn about(root: &Path) -> String {
    let quiet = |line: &str| Step::new(line).read_quietly(root).unwrap_or_else(|| "unknown".to_owned());
    let changed = !quiet("git status --porcelain").is_empty();
    let fields = [
        ("commit", quiet("git rev-parse --short=12 HEAD")),
        ("compiler", quiet("rustc --version")),
        ("date", quiet("date -u +%F")),
    ];
    let fields: String = fields.iter().map(|(name, value)| format!("\"{name}\":\"{value}\",")).collect();
    format!("{{{fields}\"uncommitted_changes\":{changed}}}\n")
}

fn make_parent(path: &Path) -> Result<(), String> {
    let parent = path.parent().expect("a file lies in a folder");
    fs::create_dir_all(parent).map_err(|e| format!("cannot make {}: {e}", parent.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packs_are_replaced() {
        let folder = std::env::temp_dir().join(format!("terrace-gpu-pack-{}", std::process::id()));
        assert_eq!(refuse_others(&folder), Ok(()), "it is made");
        fs::create_dir_all(folder.join("tests")).unwrap();
        let refused = refuse_others(&folder);
        fs::write(folder.join(ABOUT), "{}").unwrap();
        let taken = refuse_others(&folder);
        fs::remove_dir_all(&folder).unwrap();
        assert!(refused.is_err_and(|why| why.contains("else than a pack")) && taken.is_ok());
    }

    #[test]
    fn ptx_says_its_version() {
        let file = |version: &str| {
            [b"TERRKERN\xff\n//\n.version ", version.as_bytes(), b"\n.target sm_80\n"].concat()
        };
        assert_eq!(ptx_version(&file("8.1")), Some((8, 1)));
        assert!(ptx_version(&file("8.0")).unwrap() <= PTX_VERSION_MAX);
        assert!(ptx_version(&file("9.0")).unwrap() > PTX_VERSION_MAX);
        assert_eq!(ptx_version(b"\x7fELF"), None);
    }

    #[test]
    fn programs_have_places() {
        assert_eq!(place(&[("*", "tests/models-*")], "suite").as_deref(), Some("tests/models-suite"));
        assert_eq!(place(&[("cuda", "bin/cuda-bench")], "cuda").as_deref(), Some("bin/cuda-bench"));
        assert_eq!(place(&[("cuda", "bin/cuda-bench")], "matmul"), None);
    }
}
