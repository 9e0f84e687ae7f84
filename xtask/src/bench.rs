//! `cargo xtask bench`: runs the criterion benchmarks and keeps a dated record of them.
//!
//! A number without its machine and commit means nothing later, so a record carries both. Records of one day and host
//! are sections of one file.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::command::Step;

/// Runs the benchmarks that `arguments` select (all without any) and appends to `benches/record/`.
///
/// # Errors
/// When a benchmark fails, prints no measurement, or the record cannot be written.
pub fn run(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let arguments = Arguments::parse(arguments)?;
    // The pattern leaves out the libraries' own test harness, which does not know criterion's arguments.
    let step = Step::new("cargo bench --bench *")
        .arguments(if arguments.packages.is_empty() { vec!["--workspace"] } else { arguments.packages })
        .arguments(arguments.criterion);
    let conditions = Conditions::of(root);
    let measurements = parse(&step.run_and_read(root)?);
    if measurements.is_empty() {
        return Err("the benchmarks printed no measurement: nothing to record".to_owned());
    }
    let quiet = |line: &str| Step::new(line).read_quietly(root);
    let host =
        arguments.host.map(str::to_owned).or_else(|| quiet("uname -n")).unwrap_or("unknown".to_owned());
    let date = quiet("date -u +%F").ok_or("`date -u +%F` failed")?;
    let path = root.join("benches/record").join(format!("{date}-{host}.md"));
    let section = section(&conditions, &step.to_string(), &measurements);
    append(&path, &format!("# Benchmarks of {date} on {host}\n"), &section)
        .map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    eprintln!("recorded {} measurements in {}", measurements.len(), path.display());
    Ok(())
}

#[derive(Default, Debug, PartialEq)]
struct Arguments<'a> {
    host: Option<&'a str>,
    /// `-p NAME` pairs.
    packages: Vec<&'a str>,
    /// `--` and what follows.
    criterion: Vec<&'a str>,
}

impl<'a> Arguments<'a> {
    fn parse(mut words: &[&'a str]) -> Result<Self, String> {
        let mut parsed = Self::default();
        loop {
            words = match words {
                [] => return Ok(parsed),
                ["--", ..] => {
                    parsed.criterion = words.to_vec();
                    return Ok(parsed);
                }
                ["--host", host, rest @ ..] => {
                    parsed.host = Some(host);
                    rest
                }
                ["-p", package, rest @ ..] => {
                    parsed.packages.extend(["-p", package]);
                    rest
                }
                [word, ..] => return Err(format!("unknown argument `{word}`: see `cargo xtask help`")),
            };
        }
    }
}

/// One line of criterion's report.
#[derive(Debug, PartialEq)]
struct Measurement {
    name: String,
    /// The estimate, with its unit.
    time: String,
    /// Per second, with its unit, where the benchmark says what it counts.
    throughput: Option<String>,
}

/// Reads `name   time:   [low estimate high]` and a following `thrpt:`; a long name has a line of its own.
fn parse(output: &str) -> Vec<Measurement> {
    let mut measurements: Vec<Measurement> = Vec::new();
    let mut last_line = "";
    for line in output.lines() {
        if let Some((name, interval)) = line.split_once("time:") {
            let name = if name.trim().is_empty() { last_line } else { name };
            if let Some(time) = estimate(interval) {
                measurements.push(Measurement { name: name.trim().to_owned(), time, throughput: None });
            }
        } else if let (Some((_, interval)), Some(last)) = (line.split_once("thrpt:"), measurements.last_mut())
        {
            // Later `thrpt:` lines are changes against an earlier run.
            last.throughput = last.throughput.take().or_else(|| estimate(interval));
        }
        last_line = line;
    }
    measurements
}

/// The middle of `[1.0 ms 2.0 ms 3.0 ms]`.
fn estimate(interval: &str) -> Option<String> {
    let words: Vec<&str> = interval.trim().strip_prefix('[')?.strip_suffix(']')?.split_whitespace().collect();
    matches!(words.len(), 6).then(|| format!("{} {}", words[2], words[3]))
}

/// What a measurement depends on besides the code.
struct Conditions {
    commit: String,
    machine: String,
    system: String,
    compiler: String,
}

impl Conditions {
    fn of(root: &Path) -> Self {
        let quiet = |line: &str| Step::new(line).read_quietly(root);
        let unknown = || "unknown".to_owned();
        // Records of before are no part of what is measured.
        let dirty = quiet("git status --porcelain -- . :(exclude)benches/record")
            .is_some_and(|changes| !changes.is_empty());
        let commit = quiet("git rev-parse --short=12 HEAD").unwrap_or_else(unknown);
        let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(unknown);
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let memory = field("/proc/meminfo", "MemTotal").unwrap_or_else(unknown);
        Self {
            commit: if dirty { format!("{commit} with uncommitted changes") } else { commit },
            machine: format!("{cpu}, {cores} cores, {memory} of memory"),
            system: quiet("uname -sr").unwrap_or_else(unknown),
            compiler: quiet("rustc --version").unwrap_or_else(unknown),
        }
    }
}

/// The value of the first `name : value` line of a file of the kernel's.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let value = text.lines().find(|line| line.starts_with(name))?.split_once(':')?.1;
    Some(value.trim().to_owned())
}

fn section(conditions: &Conditions, command: &str, measurements: &[Measurement]) -> String {
    let Conditions { commit, machine, system, compiler } = conditions;
    let mut text = format!("\n## {commit}\n\n- machine: {machine}\n- system: {system}; {compiler}\n");
    text += &format!("- command: `{command}`\n\n| benchmark | time | throughput |\n|---|---|---|\n");
    for Measurement { name, time, throughput } in measurements {
        let throughput = throughput.as_deref().unwrap_or("");
        writeln!(text, "| {name} | {time} | {throughput} |").expect("writing to a String cannot fail");
    }
    text
}

fn append(path: &Path, title: &str, section: &str) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().expect("a record lies in a folder"))?;
    let text = if path.exists() { fs::read_to_string(path)? } else { title.to_owned() };
    fs::write(path, text + section)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_criterion() {
        let output = "\
adamw/short             time:   [1.0000 ms 2.0000 ms 3.0000 ms]
                        thrpt:  [5.0 Melem/s 6.0 Melem/s 7.0 Melem/s]
                 change:
                        time:   [+1.0% +2.0% +3.0%] (p = 0.00 < 0.05)
                        thrpt:  [-1.0% -2.0% -3.0%]
adamw/a rather long name
                        time:   [10.0 ns 11.0 ns 12.0 ns]
";
        let first = Measurement {
            name: "adamw/short".to_owned(),
            time: "2.0000 ms".to_owned(),
            throughput: Some("6.0 Melem/s".to_owned()),
        };
        let second = Measurement {
            name: "adamw/a rather long name".to_owned(),
            time: "11.0 ns".to_owned(),
            throughput: None,
        };
        assert_eq!(parse(output), [first, second]);
    }

    #[test]
    fn reads_arguments() {
        let parsed = Arguments::parse(&["-p", "a", "--host", "h", "-p", "b", "--", "--test"]).unwrap();
        assert_eq!(parsed.packages, ["-p", "a", "-p", "b"]);
        assert_eq!((parsed.host, parsed.criterion), (Some("h"), vec!["--", "--test"]));
        assert!(Arguments::parse(&["--fast"]).is_err());
    }
}
