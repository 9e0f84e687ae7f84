//! Calls that do not belong where they are.

use std::path::Path;

use super::Finding;
use super::source::{Tree, find_word, line_of};

/// A call, where it is allowed, and what to do instead.
struct Rule {
    call: &'static str,
    allowed: fn(&Path) -> bool,
    instead: &'static str,
}

const RULES: [Rule; 6] = [
    Rule { call: "dbg!", allowed: nowhere, instead: "remove it" },
    Rule { call: "todo!", allowed: nowhere, instead: "write it, or return an error" },
    Rule { call: "unimplemented!", allowed: nowhere, instead: "write it, or return an error" },
    Rule { call: "println!", allowed: outside_libraries, instead: "use tracing, or return the text" },
    Rule { call: "print!", allowed: outside_libraries, instead: "use tracing, or return the text" },
    Rule { call: "process::exit", allowed: in_main, instead: "return an error to main" },
];

/// Every banned call.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in tree.rust() {
        for rule in RULES.iter().filter(|rule| !(rule.allowed)(path)) {
            for at in find_word(&file.code, rule.call) {
                let message = format!("`{}` does not belong here: {}", rule.call, rule.instead);
                findings.push(Finding { path: path.to_path_buf(), line: line_of(&file.code, at), message });
            }
        }
    }
    findings
}

fn nowhere(_: &Path) -> bool {
    false
}

/// Binaries and whatever is not below a `src/`: examples, benches, tests, build scripts. The command line and this
/// crate are programs although they have modules.
fn outside_libraries(path: &Path) -> bool {
    let in_source = path.iter().any(|part| part == "src");
    !in_source || in_main(path) || path.starts_with("src/cli") || path.starts_with("xtask")
}

fn in_main(path: &Path) -> bool {
    // A second Ctrl-C ends the process from the signal handler, where there is nobody to return an error to.
    path.ends_with("src/main.rs")
        || path == Path::new("src/interrupt.rs")
        || path.parent().is_some_and(|p| p.iter().any(|part| part == "bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn banned_calls_are_found_where_they_are_banned() {
        let text = "// dbg!(1)\nfn f() { println!(\"todo!()\"); eprintln!(); std::process::exit(1); }\n";
        let lines = |path| {
            let calls = check(&Tree::of([(path, text)]));
            calls.into_iter().map(|f| f.message.split('`').nth(1).unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(lines("aio/src/lib.rs"), ["println!", "process::exit"]);
        assert_eq!(lines("aio/examples/x.rs"), ["process::exit"]);
        assert_eq!(lines("src/cli/plan.rs"), ["process::exit"]);
        assert!(lines("src/main.rs").is_empty());
        assert!(lines("aio/src/bin/aio-bench/main.rs").is_empty());
        assert_eq!(check(&Tree::of([("x.rs", "fn f() { dbg!(1); todo!() }")])).len(), 2);
    }
}
