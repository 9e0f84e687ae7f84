//! `--save-total-limit`: which of a run's saved model folders stay.
//!
//! A folder loses its name before its files go, so that a process that ends meanwhile leaves nothing that looks like a save.

use crate::error::CliError;
use crate::progress::Progress;
use std::path::{Path, PathBuf};
use terrace_models::{holds_weights, remove_partials};
use terrace_zero::sync_dir;

/// What a folder that is being removed is called, after a dot and its name.
const REMOVED: &str = ".removed";

/// The step that a saved model folder is of, by its name: exactly as saves are called. Others number in their own ways.
pub fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("checkpoint-")?.parse().ok()?;
    (name == format!("checkpoint-{step}")).then_some(step)
}

/// The saved model folders in `output`, with their steps, the oldest first.
///
/// # Errors
/// The folder cannot be looked at.
pub fn saves(output: &Path) -> Result<Vec<(u64, PathBuf)>, CliError> {
    let numbered = entries(output)?.into_iter().filter_map(|(name, path)| Some((step_of(&name)?, path)));
    let mut saves: Vec<_> = numbered.filter(|(_, path)| holds_weights(path)).collect();
    saves.sort();
    Ok(saves)
}

/// What is called like a save after every `every` steps in `output`, and is no folder.
///
/// # Errors
/// The folder cannot be looked at.
pub fn in_the_way(output: &Path, every: u64) -> Result<Option<PathBuf>, CliError> {
    let is_save = |name: &str| step_of(name).is_some_and(|step| step.is_multiple_of(every));
    let found = entries(output)?.into_iter().find(|(name, path)| is_save(name) && !path.is_dir());
    Ok(found.map(|(_, path)| path))
}

/// Removes what a process that ended while it wrote saves or removed them left under temporary names.
///
/// # Errors
/// As [`prune`].
pub fn sweep(output: &Path) -> Result<(), CliError> {
    for (name, path) in entries(output)? {
        let whole = name.strip_prefix('.').and_then(|name| name.strip_suffix(REMOVED));
        if whole.and_then(step_of).is_some() {
            std::fs::remove_dir_all(&path).map_err(|e| failed("removing", &path, &e))?;
        } else if step_of(&name).is_some() && path.is_dir() {
            remove_partials(&path).map_err(CliError::failed)?;
        }
    }
    Ok(())
}

fn failed(doing: &str, path: &Path, error: &std::io::Error) -> CliError {
    CliError::Failed(format!("{doing} {}: {error}", path.display()))
}

/// What is in a folder and has a name in UTF-8.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>, CliError> {
    let read = || -> std::io::Result<Vec<_>> {
        let entries = std::fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
        let named = entries.into_iter().filter_map(|e| Some((e.file_name().into_string().ok()?, e.path())));
        Ok(named.collect())
    };
    read().map_err(|e| failed("reading", folder, &e))
}

/// The first of the paths for one, two and so on where nothing is.
pub fn first_free(name: impl Fn(u32) -> PathBuf) -> PathBuf {
    (1..).map(name).find(|path| !path.exists()).expect("numbers do not end before files do")
}

/// Gives the saves of an earlier run in the same folder other names, `checkpoint-N.1` and so on, under which they are none of this run's: it
/// would count them, remove others for them, and take one for its own of that step. `aside` gets what they were called and where they are now.
///
/// # Errors
/// The folder cannot be looked at, or one of them cannot be renamed.
pub fn set_aside(output: &Path, aside: &mut Vec<(PathBuf, PathBuf)>) -> Result<(), CliError> {
    for (step, path) in saves(output)? {
        let free = first_free(|number| output.join(format!("checkpoint-{step}.{number}")));
        std::fs::rename(&path, &free).map_err(|e| failed("renaming", &path, &e))?;
        aside.push((path, free));
    }
    sync_dir(output).map_err(|e| failed("syncing", output, &e))
}

/// Removes the oldest `checkpoint-N` folders of `output` until `limit` are left, and gives their paths. Folders with other
/// names, of steps after `step`, or without a model in them are not this run's, and stay. Step `step` is saved.
///
/// # Errors
/// A folder cannot be looked at or removed.
pub fn prune(output: &Path, step: u64, limit: usize) -> Result<Vec<PathBuf>, CliError> {
    let is_saved = |error| CliError::Failed(format!("{error}; the training itself is saved"));
    remove_oldest(output, step, limit).map_err(is_saved)
}

fn remove_oldest(output: &Path, step: u64, limit: usize) -> Result<Vec<PathBuf>, CliError> {
    let saved: Vec<_> = saves(output)?.into_iter().filter(|(number, _)| *number <= step).collect();
    let surplus = saved.len().saturating_sub(limit);
    let old: Vec<(u64, PathBuf)> = saved.into_iter().take(surplus).collect();
    for (number, path) in &old {
        let removed = output.join(format!(".checkpoint-{number}{REMOVED}"));
        std::fs::rename(path, &removed).map_err(|e| failed("removing", path, &e))?;
        sync_dir(output).map_err(|e| failed("syncing", output, &e))?;
        std::fs::remove_dir_all(&removed).map_err(|e| failed("removing", &removed, &e))?;
    }
    Ok(old.into_iter().map(|(_, path)| path).collect())
}

/// Says which folders are gone.
pub fn say_removed(removed: &[PathBuf], progress: &Progress) {
    removed.iter().for_each(|old| progress.note(&format!("removed {}", old.display())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path();
        let others = ["best-3", "checkpoint-+1", "checkpoint-002", "checkpoint-x"];
        for name in
            ["checkpoint-2", "checkpoint-10", "checkpoint-4", "checkpoint-90"].into_iter().chain(others)
        {
            std::fs::create_dir(output.join(name)).unwrap();
            std::fs::write(output.join(name).join("model.safetensors"), "").unwrap();
        }
        // What has no weights is no save, and takes no place of one.
        std::fs::create_dir(output.join("checkpoint-1")).unwrap();
        std::fs::write(output.join("checkpoint-1/config.json"), "{}").unwrap();
        std::fs::write(output.join("checkpoint-3"), "a file").unwrap();
        assert_eq!(prune(output, 10, 2).unwrap(), [output.join("checkpoint-2")]);
        assert!(prune(output, 10, 2).unwrap().is_empty());
        assert_eq!(prune(output, 10, 1).unwrap(), [output.join("checkpoint-4")]);
        let mut left: Vec<_> = std::fs::read_dir(output).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        let mut kept: Vec<_> = ["checkpoint-1", "checkpoint-10", "checkpoint-3", "checkpoint-90"]
            .into_iter()
            .chain(others)
            .collect();
        kept.sort_unstable();
        assert_eq!(left, kept);
        let cut_off = output.join(".checkpoint-2.removed");
        std::fs::create_dir(&cut_off).unwrap();
        std::fs::write(cut_off.join("model.safetensors"), "half").unwrap();
        let theirs = [".checkpoint-x.removed", ".checkpoint-+1.removed"].map(|name| output.join(name));
        theirs.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        // What exports that were cut off left in saves; the last is of somebody else.
        let partials = [".model.safetensors.partial", ".config.json.partial", ".mine.partial"]
            .map(|name| output.join("checkpoint-1").join(name));
        partials.iter().for_each(|path| std::fs::write(path, "half").unwrap());
        sweep(output).unwrap();
        assert_eq!(partials.each_ref().map(|path| path.exists()), [false, false, true]);
        assert!(!cut_off.exists() && theirs.iter().all(|path| path.exists()));
        assert!(output.join("checkpoint-10").exists() && output.join("checkpoint-90").exists());
        let none = output.join("none");
        let error = prune(&none, 1, 1).unwrap_err().to_string();
        assert!(error.contains("reading") && error.ends_with("; the training itself is saved"), "{error}");
        // Of what is done before a run has saved anything.
        for error in [super::set_aside(&none, &mut Vec::new()), sweep(&none), saves(&none).map(drop)] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains("none: ") && !error.contains("saved"), "{error}");
        }
    }

    #[test]
    fn an_earlier_runs_saves_are_none_of_this_one() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path();
        let save = |step: u32| {
            let path = output.join(format!("checkpoint-{step}"));
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("model.safetensors"), "").unwrap();
        };
        save(2);
        save(4);
        let theirs = output.join("checkpoint-002");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::write(theirs.join("model.safetensors"), "").unwrap();
        let aside = ["checkpoint-2.1", "checkpoint-4.1"].map(|name| output.join(name));
        let set_aside = || {
            let mut aside = Vec::new();
            super::set_aside(output, &mut aside).unwrap();
            aside.into_iter().map(|(_, now)| now).collect::<Vec<_>>()
        };
        assert_eq!(set_aside(), aside);
        assert!(set_aside().is_empty());
        save(4);
        assert_eq!(set_aside(), [output.join("checkpoint-4.2")]);
        save(6);
        assert!(prune(output, 6, 1).unwrap().is_empty());
        assert!(aside.iter().all(|path| path.exists()) && theirs.exists());
    }
}
