//! Commands that are printed before they run.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// A command that takes no less says how long it took.
const SECONDS_SAID_MIN: u64 = 10;

/// The status with which `timeout` ends a command.
const TIMED_OUT: i32 = 124;
/// Sends a command a signal when the process that started it ends.
const WITH_ITS_PARENT: [&str; 3] = ["/usr/bin/setpriv", "--pdeathsig", "TERM"];

/// A command that will run in the project root.
pub struct Step {
    program: String,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
    minutes_max: Option<u32>,
}

impl Step {
    /// The command written as one line; arguments are separated by spaces.
    pub fn new(line: &str) -> Self {
        let mut words = line.split_whitespace().map(str::to_owned);
        let program = words.next().expect("a step names its program");
        Self { program, arguments: words.collect(), environment: Vec::new(), minutes_max: None }
    }

    /// The program in a file.
    pub fn of_file(file: &Path) -> Self {
        let program = file.display().to_string();
        Self { program, arguments: Vec::new(), environment: Vec::new(), minutes_max: None }
    }

    /// Adds arguments verbatim.
    pub fn arguments<'a>(mut self, more: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(more.into_iter().map(str::to_owned));
        self
    }

    /// Sets a variable for the command.
    pub fn environment(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Ends the command, and all that it started, if it runs for longer, or if this process ends, by Ctrl-C for example: it has a group
    /// of its own, which the terminal's signals do not reach.
    pub fn minutes(self, limit: u32) -> Self {
        Self { minutes_max: Some(limit), ..self }
    }

    /// Runs it with the terminal's output, and says how long it took if that was long.
    ///
    /// # Errors
    /// When it cannot start or does not succeed.
    pub fn run(&self, root: &Path) -> Result<(), String> {
        eprintln!("$ {self}");
        let began = Instant::now();
        let status = self.command(root).status().map_err(|e| format!("cannot start `{self}`: {e}"))?;
        let seconds = began.elapsed().as_secs();
        if seconds >= SECONDS_SAID_MIN {
            eprintln!("({seconds} s: {self})");
        }
        match (status.code(), self.minutes_max) {
            (Some(0), _) => Ok(()),
            (Some(TIMED_OUT), Some(minutes)) => Err(format!("`{self}` took more than {minutes} minutes")),
            _ => Err(format!("`{self}` failed: {status}")),
        }
    }

    /// Runs it, passing its standard output on and returning it too.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_and_read(&self, root: &Path) -> Result<String, String> {
        eprintln!("$ {self}");
        let start = self.command(root).stdout(Stdio::piped()).spawn();
        let mut child = start.map_err(|e| format!("cannot start `{self}`: {e}"))?;
        let output = child.stdout.take().expect("standard output is piped");
        let mut text = String::new();
        for line in BufReader::new(output).lines() {
            let line = line.map_err(|e| format!("cannot read the output of `{self}`: {e}"))?;
            println!("{line}");
            text.push_str(&line);
            text.push('\n');
        }
        let status = child.wait().map_err(|e| format!("`{self}`: {e}"))?;
        if status.success() { Ok(text) } else { Err(format!("`{self}` failed: {status}")) }
    }

    /// Its standard output without printing anything, trimmed; None when it fails.
    pub fn read_quietly(&self, root: &Path) -> Option<String> {
        let output = self.command(root).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    }

    fn command(&self, root: &Path) -> Command {
        let mut command = match self.minutes_max {
            None => Command::new(&self.program),
            Some(minutes) => {
                let [ends, rest @ ..] = WITH_ITS_PARENT;
                let mut command = Command::new(if Path::new(ends).exists() { ends } else { "timeout" });
                if Path::new(ends).exists() {
                    command.args(rest).arg("timeout");
                }
                command.arg(format!("{minutes}m")).arg(&self.program);
                command
            }
        };
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir(root);
        command
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, value) in &self.environment {
            write!(f, "{name}={value:?} ")?;
        }
        write!(f, "{}", self.program)?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}
