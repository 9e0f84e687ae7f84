//! `cargo xtask test`: everything a change must pass, in the order that fails soonest.

use std::path::Path;

use crate::command::Step;

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
        // Benchmarks and examples run once, small.
        Step::new("cargo bench --workspace -- --test").minutes(30),
        Step::new("cargo run --release --quiet -p terrace-aio --example async_read").minutes(10),
        Step::new("cargo run --release --quiet -p terrace-aio --example tokio").minutes(10),
        Step::new("cargo run --release --quiet -p terrace-optimizer --example adamw_on_a_slice").minutes(10),
        Step::new("cargo run --release --quiet --example embed_your_own_block").minutes(10),
        Step::new("cargo run --release --quiet --example finetune_folder").minutes(10),
        Step::new("cargo run --release --quiet --example step_against_floor -- tiny 1").minutes(10),
        Step::new("cargo doc --workspace --no-deps").environment("RUSTDOCFLAGS", "-D warnings"),
    ];
    steps.iter().try_for_each(|step| step.run(root))?;
    crate::cuda_check::ends(root)?;
    if crate::cuda_mock::has_compiler(root) {
        crate::cuda_mock::run(root, &[])
    } else {
        eprintln!("cuda-mock: not run: g++ not found");
        Ok(())
    }
}
