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
        Step::new("cargo test --workspace --release"),
        Step::new("cargo bench --workspace --no-run"),
        Step::new("cargo doc --workspace --no-deps").environment("RUSTDOCFLAGS", "-D warnings"),
    ];
    steps.iter().try_for_each(|step| step.run(root))
}
