//! The project itself is tidy.

#[test]
fn the_project_is_tidy() {
    if let Err(findings) = xtask::tidy::run(&xtask::project_root()) {
        panic!("\n{findings}\n");
    }
}
