//! What an earlier run left in the output folder, under other names from before a new one has state there: whoever resumes that takes
//! what has the plain names for its own.

use super::retention;
use crate::error::{CliError, advice};
use std::path::{Path, PathBuf};
use terrace_zero::sync_dir;

/// Files and folders that got other names.
#[derive(Debug, Default)]
pub struct Earlier {
    /// What they were called, and are.
    metrics: Option<(PathBuf, PathBuf)>,
    saves: Vec<(PathBuf, PathBuf)>,
}

impl Earlier {
    /// Gives the metrics of an earlier run and its saved models other names. An empty file takes the name of the metrics: what else is in
    /// the folder is still a run's.
    ///
    /// # Errors
    /// One of them cannot be renamed; then all have their names.
    pub fn set_aside(metrics: &Path, output: &Path) -> Result<Self, CliError> {
        let mut earlier = Self::default();
        if std::fs::metadata(metrics).map_or(0, |file| file.len()) > 0 {
            let free = retention::first_free(|number| metrics.with_extension(format!("jsonl.{number}")));
            std::fs::rename(metrics, &free).and_then(|()| std::fs::File::create_new(metrics)).map_err(
                |e| CliError::Failed(format!("renaming {}: {e}; {}", metrics.display(), advice(&e))),
            )?;
            earlier.metrics = Some((metrics.to_owned(), free));
        }
        match retention::set_aside(output, &mut earlier.saves) {
            Ok(()) => Ok(earlier),
            Err(error) => {
                earlier.put_back();
                Err(error)
            }
        }
    }

    /// Gives everything its name back: the run did not begin.
    pub fn put_back(&self) {
        let all = self.saves.iter().chain(&self.metrics);
        for (name, now) in all.clone() {
            if let Err(e) = std::fs::rename(now, name) {
                eprintln!("warning: what an earlier run left is in {} now: {e}", now.display());
            }
        }
        if let Some(folder) = all.clone().next().and_then(|(name, _)| name.parent()) {
            // What is not durable is found under either name.
            let _ = sync_dir(folder);
        }
    }

    /// Says where it is.
    pub fn say(&self) {
        if let Some((_, now)) = &self.metrics {
            eprintln!("note: the metrics of an earlier run are in {} now", now.display());
        }
        if let [(_, first), others @ ..] = &self.saves[..] {
            let more = if others.is_empty() {
                String::new()
            } else {
                format!(", and {} more of them", others.len())
            };
            eprintln!("note: a saved model of an earlier run is in {} now{more}", first.display());
        }
    }
}
