//! `cargo xtask test`: everything a change must pass, in the order that fails soonest.

use std::path::Path;

use crate::command::Step;
use crate::programs::{self, Program};

/// Examples that run by themselves, and what makes them short.
const EXAMPLES: [(&str, &[&str]); 6] = [
    ("async_read", &[]),
    ("tokio", &[]),
    ("adamw_on_a_slice", &[]),
    ("embed_your_own_block", &[]),
    ("finetune_folder", &[]),
    ("step_against_floor", &["tiny", "1"]),
];

/// Runs every check, stopping at the first that fails.
///
/// # Errors
/// Names the command that failed.
pub fn run(root: &Path) -> Result<(), String> {
    crate::tidy::run(root)?;
    let steps = [
        Step::new("cargo fmt --all -- --check"),
        // All targets: examples, tests and benches are compiled here too.
        Step::new("cargo clippy --workspace --all-targets -- -D warnings"),
        Step::new("cargo clippy -p terrace-aio --all-targets --features tokio_uring -- -D warnings"),
        // What may wait for another thread has a limit, so that one that waits for ever is named.
        Step::new("cargo test --workspace --release").minutes(60),
        // The engine behind a feature, in the suites that every engine runs.
        Step::new(
            "cargo test -p terrace-aio --release --features tokio_uring --test conformance --test real_disk --test unprivileged",
        ),
        // Every interleaving of a ticket's two halves. The switch rebuilds everything, hence a folder of its own.
        Step::new("cargo test -p terrace-aio --no-default-features --release --test loom_ticket --target-dir target/loom")
            .environment("RUSTFLAGS", "--cfg terrace_loom"),
        // Benchmarks run once, small.
        Step::new("cargo bench --workspace -- --test").minutes(30),
        Step::new("cargo doc --workspace --no-deps").environment("RUSTDOCFLAGS", "-D warnings"),
    ];
    steps.iter().try_for_each(|step| step.run(root))?;
    examples(root)?;
    crate::cuda_check::ends(root)?;
    if crate::cuda_mock::has_compiler(root) {
        crate::cuda_mock::run(root, &[])
    } else {
        eprintln!("cuda-mock: not run: g++ not found");
        Ok(())
    }
}

/// Runs the examples. They are built with the features that the whole has, as its tests were: Cargo would build most crates again for each
/// of them alone.
fn examples(root: &Path) -> Result<(), String> {
    let programs = programs::build(root, || Step::new("cargo build --release --workspace --examples"))?;
    for (example, arguments) in EXAMPLES {
        let program = programs.iter().find(|program| program.name == example);
        let Program { file, .. } = program.ok_or(format!("no example is named {example}"))?;
        Step::of_file(file).arguments(arguments.iter().copied()).minutes(10).run(root)?;
    }
    Ok(())
}
