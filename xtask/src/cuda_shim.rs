//! `cargo xtask cuda-shim`: the CUDA kernels as a library that runs them on the CPU.
//!
//! Every `kernels/src/cuda/*.cu` is compiled by the C++ compiler behind `kernels/shim/terrace_shim.hpp`, which says what
//! the library can do and which interface it has.

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

use crate::command::Step;

/// The library's file.
const LIBRARY: &str = "libterrace_shim.so";

/// Denormals, NaNs and the order of sums are kept as written. Shared memory is thread-local and declared `extern`, which
/// g++ would reach through an initializer that nobody defines.
const FLAGS: &str = "-std=c++17 -O2 -g -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-extern-tls-init -ffp-contract=off -Wall -Wextra \
                     -Werror -Wno-unknown-pragmas -Wno-unused-function -Wno-unused-parameter";

/// Kernels that test the shim, below the project's root: in the library, and no part of the project's own.
const SELF_TEST: &str = "kernels/shim/selftest_mma.cu";

/// A source file of kernels.
pub struct Source {
    /// Its name without the extension.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// The names of its kernels, in the order of the text.
    pub kernels: Vec<String>,
}

/// Builds the library where it is not newer than its sources, and returns its path.
///
/// # Errors
/// There is no C++ compiler, or a kernel does not compile.
pub fn build(root: &Path) -> Result<PathBuf, String> {
    let mut sources = sources(root)?;
    sources.push(source(root.join(SELF_TEST))?);
    let folder = crate::target_folder(root, "cuda-shim")?;
    let library = folder.join(LIBRARY);
    let compiler = compiler();
    let headers = ["kernels/src/cuda/common.cuh", "kernels/src/cuda/mma.cuh"];
    let shared = newest(root, &["kernels/shim", headers[0], headers[1], "xtask/src/cuda_shim.rs"]);
    let mut files = Vec::new();
    for source in &sources {
        let wrapper = write(&folder.join(format!("{}.cpp", source.name)), &wrapper(root, source))?;
        files.push((wrapper, newest(root, &[&source.path.display().to_string()]).max(shared)));
    }
    let registry = write(&folder.join("registry.cpp"), &registry(root, &sources))?;
    files.push((registry, newest(root, &["kernels/src/cuda"]).max(shared)));
    let objects: Vec<String> = files.iter().map(|(file, _)| object(file).display().to_string()).collect();
    // Those whose object is older than what it is made of.
    files.retain(|(file, since)| modified(&object(file)) <= *since);
    compile(root, &compiler, &files)?;
    if !files.is_empty() || !library.exists() {
        Step::new(&compiler)
            .arguments(["-shared", "-Wl,--no-undefined", "-o"])
            .arguments([library.display().to_string().as_str()])
            .arguments(objects.iter().map(String::as_str))
            .run(root)?;
    }
    Ok(library)
}

/// Whether the library can be believed: builds and runs the shim's own test.
///
/// # Errors
/// There is no C++ compiler, or the shim misses what it must catch.
pub fn selftest(root: &Path) -> Result<(), String> {
    let program = crate::target_folder(root, "cuda-shim")?.join("selftest").display().to_string();
    Step::new(&compiler())
        .arguments(FLAGS.split_whitespace())
        .arguments(["kernels/shim/selftest.cpp", "-o", &program])
        .run(root)?;
    Step::new(&program).run(root)
}

/// The kernels' sources by name.
///
/// # Errors
/// They cannot be read, or two kernels have one name.
pub fn sources(root: &Path) -> Result<Vec<Source>, String> {
    let folder = root.join("kernels/src/cuda");
    let entries = fs::read_dir(&folder).map_err(|e| format!("cannot read {}: {e}", folder.display()))?;
    let mut sources = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        sources.push(source(path)?);
    }
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    let mut names: Vec<&String> = sources.iter().flat_map(|source| &source.kernels).collect();
    names.sort();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("two kernels are called `{}`", pair[0]));
    }
    Ok(sources)
}

fn source(path: PathBuf) -> Result<Source, String> {
    let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    Ok(Source { name, kernels: kernels(&text), path })
}

/// The names in `extern "C" __global__ void NAME(`, with `__launch_bounds__(…)` anywhere before the name.
fn kernels(text: &str) -> Vec<String> {
    let name = |definition: &str| {
        let mut rest = definition;
        loop {
            let word: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let after = rest[word.len()..].trim_start();
            match word.as_str() {
                "" => return None,
                "void" => rest = after,
                "__launch_bounds__" => rest = after[after.find(')')? + 1..].trim_start(),
                _ => return after.starts_with('(').then_some(word),
            }
        }
    };
    let opening = "extern \"C\" __global__ ";
    text.match_indices(opening).filter_map(|(at, _)| name(&text[at + opening.len()..])).collect()
}

fn wrapper(root: &Path, source: &Source) -> String {
    let cuda = root.join("kernels/src/cuda");
    let entries: String =
        source.kernels.iter().map(|kernel| format!("    TERRACE_SHIM_KERNEL({kernel}),\n")).collect();
    format!(
        "#include \"{shim}/terrace_shim.hpp\"\nTERRACE_SHIM_BEGIN\n#include \"{common}\"\n{mma}#include \"{source}\"\n\
         TERRACE_SHIM_END\nextern const terrace_kernel {name}_kernels[];\nconst terrace_kernel {name}_kernels[] = {{\n\
         {entries}    {{nullptr, 0, nullptr, nullptr}},\n}};\n",
        shim = root.join("kernels/shim").display(),
        common = cuda.join("common.cuh").display(),
        mma = if source.name.ends_with("_mma") {
            format!("#include \"{}\"\n", cuda.join("mma.cuh").display())
        } else {
            String::new()
        },
        source = source.path.display(),
        name = source.name,
    )
}

fn registry(root: &Path, sources: &[Source]) -> String {
    let list = |text: fn(&str) -> String| sources.iter().map(|source| text(&source.name)).collect::<String>();
    format!(
        "#include \"{shim}/terrace_shim.hpp\"\n{declarations}\
         extern \"C\" __attribute__((visibility(\"default\"))) const terrace_kernel *terrace_shim_find(const char *name) {{\n\
         \x20   for (const terrace_kernel *kernel : {{{arrays}}})\n\
         \x20       for (; kernel->name; kernel++)\n\
         \x20           if (std::strcmp(kernel->name, name) == 0) return kernel;\n\
         \x20   return nullptr;\n}}\n\
         extern \"C\" __attribute__((visibility(\"default\"))) void terrace_shim_order(const char *seed) {{\n\
         \x20   terrace_shim::order = seed;\n}}\n",
        shim = root.join("kernels/shim").display(),
        declarations = list(|name| format!("extern const terrace_kernel {name}_kernels[];\n")),
        arrays = list(|name| format!("{name}_kernels, ")),
    )
}

/// Compiles files, as many at a time as there are processors.
fn compile(root: &Path, compiler: &str, files: &[(PathBuf, Option<SystemTime>)]) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((file, _)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            Step::new(compiler)
                .arguments(FLAGS.split_whitespace())
                .arguments(["-c", &file.display().to_string(), "-o", &object(file).display().to_string()])
                .run(root)?;
        }
        Ok(())
    };
    let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a step reports its errors"))
    })
}

fn object(file: &Path) -> PathBuf {
    file.with_extension("o")
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned())
}

fn write(path: &Path, text: &str) -> Result<PathBuf, String> {
    fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    Ok(path.to_path_buf())
}

/// The latest change of files, and of files in folders.
fn newest(root: &Path, paths: &[&str]) -> Option<SystemTime> {
    let of = |path: PathBuf| {
        let inside =
            fs::read_dir(&path).into_iter().flatten().filter_map(|entry| modified(&entry.ok()?.path()));
        inside.chain(modified(&path)).max()
    };
    paths.iter().filter_map(|path| of(root.join(path))).max()
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found() {
        let text = "\
extern \"C\" __global__ void plain(int n) {}
extern \"C\" __global__ void __launch_bounds__(256) bounded(int n) {}
extern \"C\" __global__ __launch_bounds__(128, 2) void
broken_line(int n) {}
__global__ void not_for_the_driver(int n) {}
";
        assert_eq!(kernels(text), ["plain", "bounded", "broken_line"]);
    }
}
