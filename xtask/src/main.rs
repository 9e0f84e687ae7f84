//! `cargo xtask <task>`: everything that is done to the project rather than by it.

#![forbid(unsafe_code)]

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask <task>

  tidy [--shrink]         check what the compiler does not: file and function lengths, banned calls and words, dead
                          files, dependency direction; --shrink lowers the ratchet to what is left
  test                    everything a change must pass: format, clippy, tests, benches, docs
  cuda-mock [-p CRATE]... build the driver of device/mock/ with g++ and run the tests of CUDA code on it
  cuda-shim               build the CUDA kernels as a library that runs them on the CPU (needs g++)
  cuda-check              compile the CUDA kernels for every generation of cards (needs Python, to get NVRTC)
  bench [--host NAME] [-p CRATE]... [-- CRITERION ARGS]
                          run the benchmarks and append the result to benches/record/<date>-<host>.md
  gpu-pack [--output DIR] make a folder that proves and measures the CUDA backend on a machine with a card (CONTRIBUTING.md)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = xtask::project_root();
    let result = match arguments.as_slice() {
        ["tidy"] => xtask::tidy::run(&root),
        ["tidy", "--shrink"] => xtask::tidy::shrink(&root),
        ["test"] => xtask::test::run(&root),
        ["cuda-check"] => xtask::cuda_check::run(&root),
        ["cuda-mock", rest @ ..] => xtask::cuda_mock::run(&root, rest),
        ["cuda-shim"] => xtask::cuda_shim::build(&root).map(|library| eprintln!("{}", library.display())),
        ["gpu-pack", rest @ ..] => xtask::gpu_pack::run(&root, rest),
        ["bench", rest @ ..] => xtask::bench::run(&root, rest),
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
