//! What the disks of a machine were measured to do, and the settings that got it.
//!
//! `aio-bench tune` writes a profile; whoever opens an engine or stripes over several disks reads it. The file is
//! JSON with a version, and other sections may stand beside `disk`: they are kept by those who own them.
//!
//! ```
//! use terrace_aio::profile::DiskProfile;
//! let text = r#"{"version": 1, "disk": {"engine": "uring", "block_bytes": 1048576, "queue_depth": 32,
//!     "rings": 1, "register": true, "paths": [{"path": "/mnt/a", "read_bytes_per_second": 7e9,
//!     "write_bytes_per_second": 5e9, "mixed_bytes_per_second": 6e9}]}}"#;
//! let profile = DiskProfile::from_json(text)?;
//! assert_eq!(profile.engine_config().queue_depth, 32);
//! assert_eq!(profile.weights(&["/mnt/a/run".into(), "/mnt/b".into()]), None); // /mnt/b was not measured
//! # Ok::<(), String>(())
//! ```

use crate::engine::{EngineChoice, EngineConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Version of the profile's format.
pub const PROFILE_VERSION: u64 = 1;

/// The `disk` section of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskProfile {
    /// "uring" or "threads".
    pub engine: String,
    /// See [`EngineConfig::block_bytes`].
    pub block_bytes: usize,
    /// See [`EngineConfig::queue_depth`].
    pub queue_depth: usize,
    /// See [`EngineConfig::rings`].
    pub rings: usize,
    /// See [`EngineConfig::register`].
    pub register: bool,
    /// See [`EngineConfig::threads`].
    #[serde(default = "default_threads")]
    pub threads: usize,
    /// One entry per measured directory.
    pub paths: Vec<PathProfile>,
}

/// What one directory's disk was measured to do with these settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathProfile {
    /// The directory, absolute.
    pub path: PathBuf,
    /// Sequential reading alone.
    pub read_bytes_per_second: f64,
    /// Sequential writing alone.
    pub write_bytes_per_second: f64,
    /// Reading and writing at once, one byte read per byte written: the sum of both directions.
    pub mixed_bytes_per_second: f64,
}

fn default_threads() -> usize {
    EngineConfig::default().threads
}

impl DiskProfile {
    /// Reads the `disk` section of a profile.
    ///
    /// # Errors
    /// What is wrong with the text, for a message that already names the file.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let document: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        match document.get("version").and_then(Value::as_u64) {
            Some(PROFILE_VERSION) => {}
            Some(other) => return Err(format!("format version {other}, this build reads {PROFILE_VERSION}")),
            None => return Err("no \"version\": not a profile of Terrace".to_owned()),
        }
        let section = document.get("disk").ok_or("no \"disk\" section: write one with `aio-bench tune`")?;
        let profile = Self::deserialize(section).map_err(|e| format!("in \"disk\": {e}"))?;
        profile.check().map(|()| profile)
    }

    fn check(&self) -> Result<(), String> {
        self.choice()?;
        let settings = [
            ("block_bytes", self.block_bytes),
            ("queue_depth", self.queue_depth),
            ("rings", self.rings),
            ("threads", self.threads),
        ];
        if let Some((key, _)) = settings.iter().find(|(_, value)| *value == 0) {
            return Err(format!("in \"disk\": 0 in \"{key}\" moves nothing; it must be at least 1"));
        }
        for entry in &self.paths {
            let rates =
                [entry.read_bytes_per_second, entry.write_bytes_per_second, entry.mixed_bytes_per_second];
            if rates.iter().any(|rate| !rate.is_finite() || *rate <= 0.0) {
                let path = entry.path.display();
                return Err(format!("in \"disk\": the rates of {path} must be positive numbers"));
            }
        }
        Ok(())
    }

    fn choice(&self) -> Result<EngineChoice, String> {
        match self.engine.as_str() {
            // A tuned ring may be forbidden where the profile is used: fall back, with the warning that gives.
            "uring" => Ok(EngineChoice::Auto),
            "threads" => Ok(EngineChoice::Threads),
            other => Err(format!("in \"disk\": engine {other:?} is neither \"uring\" nor \"threads\"")),
        }
    }

    /// The profile as a document with this one section.
    pub fn to_json(&self) -> Value {
        json!({ "version": PROFILE_VERSION, "disk": self })
    }

    /// The engine's settings.
    pub fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            choice: self.choice().unwrap_or_default(),
            block_bytes: self.block_bytes,
            queue_depth: self.queue_depth,
            rings: self.rings,
            register: self.register,
            threads: self.threads,
            ..EngineConfig::default()
        }
    }

    /// The measured directory that `dir` is, or is inside of.
    pub fn path_of(&self, dir: &Path) -> Option<&PathProfile> {
        let inside = self.paths.iter().filter(|entry| dir.starts_with(&entry.path));
        inside.max_by_key(|entry| entry.path.components().count())
    }

    /// The mixed rate of the measured directory that `dir` is, or is inside of.
    pub fn rate_of(&self, dir: &Path) -> Option<f64> {
        Some(self.path_of(dir)?.mixed_bytes_per_second)
    }

    /// The rate of each directory, for sharing work in proportion; `None` unless every one was measured.
    pub fn weights(&self, dirs: &[PathBuf]) -> Option<Vec<f64>> {
        dirs.iter().map(|dir| self.rate_of(dir)).collect()
    }
}

/// Replaces the file of a profile as a whole: whoever reads meanwhile, and who comes after a kill, sees the old one or the new one.
///
/// # Errors
/// It cannot be written, or its folder not; then the old one stays.
pub fn replace_file(path: &Path, text: &str) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let half = path.with_file_name(format!(".{name}.{}", std::process::id()));
    std::fs::write(&half, text).and_then(|()| std::fs::rename(&half, path)).inspect_err(|_| {
        // What could not take its place is of no use.
        let _ = std::fs::remove_file(&half);
    })
}

/// Whether a profile, which is text, can hold the path of the directory `dir`.
pub fn can_name(dir: &Path) -> bool {
    dir.canonicalize().map_or(true, |whole| whole.to_str().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> DiskProfile {
        let entry = |path: &str, rate| PathProfile {
            path: path.into(),
            read_bytes_per_second: rate,
            write_bytes_per_second: rate,
            mixed_bytes_per_second: rate,
        };
        DiskProfile {
            engine: "uring".into(),
            block_bytes: 2 << 20,
            queue_depth: 16,
            rings: 2,
            register: false,
            threads: 3,
            paths: vec![entry("/", 1e9), entry("/mnt/a", 3e9), entry("/mnt/a/b", 2e9)],
        }
    }

    #[test]
    fn it_survives_its_own_json() {
        let profile = profile();
        assert_eq!(DiskProfile::from_json(&profile.to_json().to_string()).unwrap(), profile);
        let config = profile.engine_config();
        assert_eq!((config.block_bytes, config.rings, config.register), (2 << 20, 2, false));
    }

    #[test]
    fn the_nearest_measured_directory_counts() {
        let dirs = ["/x", "/mnt/a", "/mnt/a/c", "/mnt/a/b/d", "/mnt/ab"].map(PathBuf::from);
        assert_eq!(profile().weights(&dirs).unwrap(), [1e9, 3e9, 3e9, 2e9, 1e9]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let broken = |from: &str, to: &str| {
            let text = profile().to_json().to_string();
            assert!(text.contains(from), "{from} is in {text}");
            DiskProfile::from_json(&text.replace(from, to)).unwrap_err()
        };
        assert!(broken("\"version\":1", "\"version\":7").contains("version 7"));
        assert!(broken("uring", "libaio").contains("libaio"));
        assert!(broken("queue_depth", "queue_deep").contains("queue_deep"));
        assert!(broken("3000000000.0", "-1.0").contains("/mnt/a"));
        for key in ["block_bytes", "queue_depth", "rings", "threads"] {
            let mut document = profile().to_json();
            document["disk"][key] = 0.into();
            let error = DiskProfile::from_json(&document.to_string()).unwrap_err();
            assert!(error.contains(&format!("in \"disk\": 0 in \"{key}\"")), "{error}");
        }
        assert!(DiskProfile::from_json("{").unwrap_err().contains("not JSON"));
        assert!(DiskProfile::from_json("{\"version\":1}").unwrap_err().contains("aio-bench tune"));
    }
}
