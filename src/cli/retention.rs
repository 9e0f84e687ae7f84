//! `--save-total-limit`: which of a run's saved model folders stay.

use crate::error::CliError;
use std::path::{Path, PathBuf};

/// Removes the oldest `checkpoint-N` folders of `output` until `limit` are left, and gives their paths. Folders with other
/// names, of steps after `step`, or without a model in them are not this run's, and stay.
///
/// # Errors
/// A folder cannot be looked at or removed.
pub fn prune(output: &Path, step: u64, limit: usize) -> Result<Vec<PathBuf>, CliError> {
    let failed = |doing: &str, path: &Path, e: std::io::Error| {
        CliError::Failed(format!("{doing} {}: {e}; the training itself is saved", path.display()))
    };
    let mut saved = Vec::new();
    for entry in std::fs::read_dir(output).map_err(|e| failed("reading", output, e))? {
        let entry = entry.map_err(|e| failed("reading", output, e))?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("checkpoint-")?.parse::<u64>().ok());
        let path = entry.path();
        if let Some(number) = number.filter(|number| *number <= step)
            && path.join("config.json").is_file()
        {
            saved.push((number, path));
        }
    }
    saved.sort();
    let surplus = saved.len().saturating_sub(limit);
    let old: Vec<PathBuf> = saved.into_iter().take(surplus).map(|(_, path)| path).collect();
    for path in &old {
        std::fs::remove_dir_all(path).map_err(|e| failed("removing", path, e))?;
    }
    Ok(old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path();
        for name in
            ["checkpoint-2", "checkpoint-10", "checkpoint-4", "checkpoint-90", "checkpoint-x", "best-3"]
        {
            std::fs::create_dir(output.join(name)).unwrap();
            std::fs::write(output.join(name).join("config.json"), "{}").unwrap();
        }
        std::fs::create_dir(output.join("checkpoint-1")).unwrap();
        std::fs::write(output.join("checkpoint-3"), "a file").unwrap();
        assert_eq!(prune(output, 10, 2).unwrap(), [output.join("checkpoint-2")]);
        assert!(prune(output, 10, 2).unwrap().is_empty());
        assert_eq!(prune(output, 10, 1).unwrap(), [output.join("checkpoint-4")]);
        let mut left: Vec<_> = std::fs::read_dir(output).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        let kept =
            ["best-3", "checkpoint-1", "checkpoint-10", "checkpoint-3", "checkpoint-90", "checkpoint-x"];
        assert_eq!(left, kept);
        assert!(prune(&output.join("none"), 1, 1).unwrap_err().to_string().contains("reading"));
    }
}
