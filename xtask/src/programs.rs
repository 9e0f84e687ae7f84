//! The programs that a command of Cargo's builds.

use std::path::{Path, PathBuf};

use crate::command::Step;

/// A program that Cargo built.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Of which package.
    pub package: String,
    /// Where that package is, which is where Cargo runs its tests.
    pub folder: PathBuf,
    /// The target's name.
    pub name: String,
    /// The executable.
    pub file: PathBuf,
}

/// Builds and says what there is then.
///
/// # Errors
/// The command fails, or builds no program.
pub fn build(root: &Path, step: impl Fn() -> Step) -> Result<Vec<Program>, String> {
    step().run(root)?;
    // Nothing is left to build, so this only says what there is.
    let messages = step().arguments(["--message-format=json"]).read_quietly(root).unwrap_or_default();
    let programs: Vec<_> = messages.lines().filter_map(program).collect();
    if programs.is_empty() { Err(format!("`{}` built no program", step())) } else { Ok(programs) }
}

/// The program that a message of Cargo's is about, if it is about one.
fn program(message: &str) -> Option<Program> {
    let text = |text: &str, key: &str| {
        let start = text.find(key)? + key.len();
        Some(text[start..start + text[start..].find('"')?].to_owned())
    };
    let file = text(message, "\"executable\":\"")?;
    let target = &message[message.find("\"target\":{")?..];
    let id = text(message, "\"package_id\":\"path+file://")?;
    let (folder, rest) = id.split_once('#')?;
    // A package that is named like its folder is not named again.
    let package = match rest.split_once('@') {
        Some((package, _)) => package,
        None => folder.rsplit('/').next()?,
    };
    Some(Program {
        package: package.to_owned(),
        folder: PathBuf::from(folder),
        name: text(target, "\"name\":\"")?,
        file: PathBuf::from(file),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_messages() {
        let message = |id: &str, executable: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"package_id\":\"path+file:///p/{id}\",\
                 \"target\":{{\"kind\":[\"test\"],\"name\":\"conformance\",\"src_path\":\"/p/x.rs\"}},\"executable\":{executable}}}"
            )
        };
        let of = |id: &str| program(&message(id, "\"/t/release/deps/conformance-0f\""));
        let expected = |package: &str, folder: &str| Program {
            package: package.to_owned(),
            folder: PathBuf::from(folder),
            name: "conformance".to_owned(),
            file: PathBuf::from("/t/release/deps/conformance-0f"),
        };
        assert_eq!(of("kernels#terrace-kernels@0.1.0"), Some(expected("terrace-kernels", "/p/kernels")));
        assert_eq!(of("terrace#0.1.0"), Some(expected("terrace", "/p/terrace")));
        assert_eq!(program(&message("kernels#terrace-kernels@0.1.0", "null")), None);
        assert_eq!(program("{\"reason\":\"build-finished\",\"success\":true}"), None);
    }
}
