//! The file of a calibration: JSON that `aio-bench tune` writes a section of and `terrace calibrate` another.
//!
//! ```text
//! { "version": 1,
//!   "disk": { … },                the settings and rates of disks, see terrace_aio::profile
//!   "calibration": { "version": 1, "machine": { … }, "memory": { … }, … } }
//! ```
//!
//! Each section has a version of its own, and neither tool touches what it does not write, but that `tune` takes `disks_together` out of the
//! calibration, which is of the directories that were in `disk` before. A reader of disks alone reads files of both.

use super::Machine;
use crate::error::advice;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use terrace_aio::profile::{DiskProfile, PROFILE_VERSION, PathProfile, replace_file};

/// Version of the `calibration` section.
pub const CALIBRATION_VERSION: u64 = 1;

/// What a profile says.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Profile {
    /// Disks and the settings of the disk engine.
    pub disk: Option<DiskProfile>,
    /// Everything else.
    pub calibration: Option<Calibration>,
}

/// The `calibration` section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// See [`CALIBRATION_VERSION`].
    pub version: u64,
    /// Of what.
    pub machine: Machine,
    /// Whether it was short.
    pub quick: bool,
    /// Whether rates of disks are what they keep up over a minute, syncs counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sustained: bool,
    /// All directories of the `disk` section at once.
    #[serde(default)]
    pub disks_together: Option<Rates>,
    /// Host memory.
    #[serde(default)]
    pub memory: Option<MemoryRates>,
    /// Matrix products on the CPU.
    #[serde(default)]
    pub gemm: Vec<Gemm>,
    /// Forward and backward of a decoder layer on the CPU.
    #[serde(default)]
    pub training: Vec<TrainingRate>,
    /// Updates with AdamW, by state format.
    #[serde(default)]
    pub optimizer: Vec<OptimizerRate>,
    /// Checksums of state, all threads.
    #[serde(default)]
    pub checksum_bytes_per_second: Option<f64>,
    /// The same, a thread alone.
    #[serde(default)]
    pub checksum_bytes_per_core_second: Option<f64>,
    /// What disks carry while the processor computes, for every second of a core that it loses to that: to the system, and on a virtual
    /// machine to its host.
    #[serde(default)]
    pub disk_bytes_per_core_second: Option<f64>,
    /// The card; `null` where there is none.
    #[serde(default)]
    pub card: Option<Card>,
}

/// Rates of disks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Reading alone.
    pub read_bytes_per_second: f64,
    /// Writing alone.
    pub write_bytes_per_second: f64,
    /// Reading and writing as much: the sum of both directions.
    pub mixed_bytes_per_second: f64,
}

impl From<&PathProfile> for Rates {
    fn from(path: &PathProfile) -> Self {
        Self {
            read_bytes_per_second: path.read_bytes_per_second,
            write_bytes_per_second: path.write_bytes_per_second,
            mixed_bytes_per_second: path.mixed_bytes_per_second,
        }
    }
}

/// Rates of host memory, all threads. Bytes are those read plus those written.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRates {
    /// Reading.
    pub read_bytes_per_second: f64,
    /// Copying.
    pub copy_bytes_per_second: f64,
    /// Changing in place.
    pub update_bytes_per_second: f64,
}

/// One shape of matrix product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// Type of the operands, `bf16`, `f16` or `f32`, or format of the weights, `int8` or `int4`. Profiles of before those were measured
    /// have no `f16` and no formats.
    pub dtype: String,
    /// What a decoder layer does with it.
    pub of: String,
    /// Rows, columns and inner size.
    pub shape: [usize; 3],
    /// Two per multiplication and addition.
    pub operations_per_second: f64,
}

/// How fast a small model is trained, apart from its update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingRate {
    /// Type of weights and activations, `bf16`, `f16` or `f32`.
    pub dtype: String,
    /// Two per multiplication and addition.
    pub operations_per_second: f64,
}

/// How fast one format of state is updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerRate {
    /// `fp32`, `split`, `bf16` or `compact`.
    pub state: String,
    /// Type of the weights, `bf16`, `f16` or `f32`.
    pub weights: String,
    /// Parameters per second, all threads.
    pub parameters_per_second: f64,
    /// The same, a thread alone: where memory binds it is more than its part.
    #[serde(default)]
    pub parameters_per_core_second: Option<f64>,
}

/// A card and its link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// From pinned host memory.
    pub upload_bytes_per_second: f64,
    /// To pinned host memory.
    pub download_bytes_per_second: f64,
    /// Both at once: the sum.
    pub both_bytes_per_second: f64,
    /// Its own memory, read and written.
    pub device_memory_bytes_per_second: f64,
    /// Matrix products on it.
    pub gemm: Vec<Gemm>,
    /// Forward and backward of a layer on it.
    #[serde(default)]
    pub training: Vec<TrainingRate>,
}

/// A profile that later runs find without being told.
#[derive(Debug)]
pub enum Found {
    /// It is of this machine.
    Fits(Box<Profile>),
    /// It is not, or cannot be read; why.
    Unfit(String),
    /// There is none.
    Nothing,
}

impl Profile {
    /// Reads a profile.
    ///
    /// # Errors
    /// What is wrong with the text, for a message that already names the file.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let document: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        match document.get("version").and_then(Value::as_u64) {
            Some(PROFILE_VERSION) => {}
            Some(other) => {
                return Err(format!("format version {other}, this build reads {PROFILE_VERSION}"));
            }
            None => return Err("no \"version\": not a profile of Terrace".to_owned()),
        }
        let disk = match document.get("disk") {
            Some(_) => Some(DiskProfile::from_json(text)?),
            None => None,
        };
        let calibration = document.get("calibration").map(Calibration::from_value).transpose()?;
        if disk.is_none() && calibration.is_none() {
            return Err("no \"disk\" and no \"calibration\" section".to_owned());
        }
        Ok(Self { disk, calibration })
    }

    /// Reads the file at `path`.
    ///
    /// # Errors
    /// It cannot be read or is no profile; the message does not name it.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| told(&e))?;
        Self::from_json(&text)
    }

    /// What can be read of the file at `path`, section by section, and why the rest cannot be. Nothing of a file that is not there.
    pub fn salvage(path: &Path) -> (Self, Option<String>) {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return (Self::default(), None),
            Err(e) => return (Self::default(), Some(told(&e))),
        };
        let why = match Self::from_json(&text) {
            Ok(profile) => return (profile, None),
            Err(why) => why,
        };
        let alone = |section: &str| {
            let document: Value = serde_json::from_str(&text).ok()?;
            let part = json!({ "version": document.get("version")?, section: document.get(section)? });
            Self::from_json(&part.to_string()).ok()
        };
        let disk = alone("disk").and_then(|profile| profile.disk);
        let calibration = alone("calibration").and_then(|profile| profile.calibration);
        (Self { disk, calibration }, Some(why))
    }

    /// Where later runs look: `$XDG_CACHE_HOME/terrace/profile.json`, else `~/.cache/terrace/profile.json`.
    pub fn default_path() -> Option<PathBuf> {
        let absolute =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let root = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(root.join("terrace/profile.json"))
    }

    /// The profile at the default place, if it is of the machine `here`.
    pub fn find(here: &Machine) -> Found {
        let Some(path) = Self::default_path().filter(|path| path.exists()) else { return Found::Nothing };
        match Self::read(&path) {
            Err(why) => Found::Unfit(format!("{}: {why}", path.display())),
            Ok(profile) => match profile.difference(here) {
                Some(why) => Found::Unfit(format!("{}: {why}", path.display())),
                None => Found::Fits(Box::new(profile)),
            },
        }
    }

    /// Why this is not of the machine `here`.
    pub fn difference(&self, here: &Machine) -> Option<String> {
        self.calibration.as_ref()?.machine.difference(here)
    }

    /// Without rates of disks unless every one of `dirs` was measured; `whole` makes of each the path that is looked for.
    #[must_use]
    pub fn for_disks(self, whole: impl Fn(&DiskProfile, &Path) -> PathBuf, dirs: &[PathBuf]) -> Self {
        let covers = |disk: &DiskProfile| dirs.iter().all(|dir| disk.path_of(&whole(disk, dir)).is_some());
        Self { disk: self.disk.filter(covers), ..self }
    }

    /// Writes the sections that are there to `path`, and leaves others in it as they are.
    ///
    /// # Errors
    /// The file exists and is something else, or it cannot be written; the message does not name it.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        let document = match std::fs::read_to_string(path) {
            Ok(text) => match serde_json::from_str::<Value>(&text) {
                Ok(Value::Object(map)) if map.contains_key("version") => map,
                _ => return Err("the file exists and is no profile; move it away or name another".into()),
            },
            Err(e) if e.kind() == ErrorKind::NotFound => Map::new(),
            Err(e) => return Err(told(&e)),
        };
        self.write_into(document, path)
    }

    /// As [`write`](Self::write), at a place that is Terrace's own: what cannot be read there is left out.
    ///
    /// # Errors
    /// It cannot be written; the message does not name it.
    pub fn replace(&self, path: &Path) -> Result<(), String> {
        let (kept, _) = Self::salvage(path);
        let found = std::fs::read_to_string(path).ok().and_then(|text| serde_json::from_str(&text).ok());
        let Value::Object(mut document) = found.unwrap_or_default() else {
            return self.write_into(Map::new(), path);
        };
        for (section, is_read) in [("disk", kept.disk.is_some()), ("calibration", kept.calibration.is_some())]
        {
            if !is_read {
                document.remove(section);
            }
        }
        self.write_into(document, path)
    }

    /// Puts the sections that are there into `document`, and that to `path`.
    fn write_into(&self, mut document: Map<String, Value>, path: &Path) -> Result<(), String> {
        document.insert("version".into(), PROFILE_VERSION.into());
        if let Some(disk) = &self.disk {
            document.insert("disk".into(), json!(disk));
        }
        if let Some(calibration) = &self.calibration {
            document.insert("calibration".into(), json!(calibration));
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| told(&e))?;
        }
        replace_file(path, &format!("{:#}\n", Value::Object(document))).map_err(|e| told(&e))
    }

    /// The sections as a document.
    pub fn to_json(&self) -> Value {
        let mut document = json!({ "version": PROFILE_VERSION });
        if let Some(disk) = &self.disk {
            document["disk"] = json!(disk);
        }
        if let Some(calibration) = &self.calibration {
            document["calibration"] = json!(calibration);
        }
        document
    }
}

fn told(error: &std::io::Error) -> String {
    format!("{error}; {}", advice(error))
}

impl Calibration {
    /// Nothing measured yet.
    pub fn new(machine: Machine, quick: bool) -> Self {
        Self {
            version: CALIBRATION_VERSION,
            machine,
            quick,
            sustained: false,
            disks_together: None,
            memory: None,
            gemm: Vec::new(),
            training: Vec::new(),
            optimizer: Vec::new(),
            checksum_bytes_per_second: None,
            checksum_bytes_per_core_second: None,
            disk_bytes_per_core_second: None,
            card: None,
        }
    }

    fn from_value(value: &Value) -> Result<Self, String> {
        match value.get("version").and_then(Value::as_u64) {
            Some(CALIBRATION_VERSION) => {}
            Some(other) => {
                return Err(format!(
                    "in \"calibration\": version {other}, this build reads {CALIBRATION_VERSION}; run `terrace calibrate` again"
                ));
            }
            None => return Err("in \"calibration\": no \"version\"".to_owned()),
        }
        let found = Self::deserialize(value).map_err(|e| format!("in \"calibration\": {e}"))?;
        found.check().map(|()| found)
    }

    fn check(&self) -> Result<(), String> {
        if self.machine.threads == 0 {
            return Err("in \"calibration\": 0 in \"machine.threads\" is no number of threads".into());
        }
        match self.rates().iter().find(|(_, rate)| !rate.is_finite() || *rate <= 0.0) {
            Some((key, rate)) => {
                Err(format!("in \"calibration\": {rate} in \"{key}\" is no rate; rates are positive numbers"))
            }
            None => Ok(()),
        }
    }

    /// All rates that are there, with their keys.
    fn rates(&self) -> Vec<(&'static str, f64)> {
        let mut rates = Vec::new();
        if let Some(r) = &self.disks_together {
            rates.extend([
                ("disks_together.read_bytes_per_second", r.read_bytes_per_second),
                ("disks_together.write_bytes_per_second", r.write_bytes_per_second),
                ("disks_together.mixed_bytes_per_second", r.mixed_bytes_per_second),
            ]);
        }
        if let Some(r) = &self.memory {
            rates.extend([
                ("memory.read_bytes_per_second", r.read_bytes_per_second),
                ("memory.copy_bytes_per_second", r.copy_bytes_per_second),
                ("memory.update_bytes_per_second", r.update_bytes_per_second),
            ]);
        }
        let mut all = |key, found: &mut dyn Iterator<Item = f64>| rates.extend(found.map(|rate| (key, rate)));
        all("gemm.operations_per_second", &mut self.gemm.iter().map(|gemm| gemm.operations_per_second));
        all(
            "training.operations_per_second",
            &mut self.training.iter().map(|rate| rate.operations_per_second),
        );
        all(
            "optimizer.parameters_per_second",
            &mut self.optimizer.iter().map(|rate| rate.parameters_per_second),
        );
        let mut alone = self.optimizer.iter().filter_map(|rate| rate.parameters_per_core_second);
        all("optimizer.parameters_per_core_second", &mut alone);
        all("checksum_bytes_per_second", &mut self.checksum_bytes_per_second.into_iter());
        all("checksum_bytes_per_core_second", &mut self.checksum_bytes_per_core_second.into_iter());
        all("disk_bytes_per_core_second", &mut self.disk_bytes_per_core_second.into_iter());
        if let Some(card) = &self.card {
            all(
                "card.gemm.operations_per_second",
                &mut card.gemm.iter().map(|gemm| gemm.operations_per_second),
            );
            all(
                "card.training.operations_per_second",
                &mut card.training.iter().map(|rate| rate.operations_per_second),
            );
            rates.extend([
                ("card.upload_bytes_per_second", card.upload_bytes_per_second),
                ("card.download_bytes_per_second", card.download_bytes_per_second),
                ("card.both_bytes_per_second", card.both_bytes_per_second),
                ("card.device_memory_bytes_per_second", card.device_memory_bytes_per_second),
            ]);
        }
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_aio::profile::PathProfile;

    fn calibration() -> Calibration {
        Calibration {
            memory: Some(MemoryRates {
                read_bytes_per_second: 3e10,
                copy_bytes_per_second: 2e10,
                update_bytes_per_second: 2e10,
            }),
            checksum_bytes_per_second: Some(1e10),
            ..Calibration::new(Machine::here(2, None), true)
        }
    }

    fn disk() -> DiskProfile {
        let paths = vec![PathProfile {
            path: "/mnt/a".into(),
            read_bytes_per_second: 4e9,
            write_bytes_per_second: 2e9,
            mixed_bytes_per_second: 3e9,
        }];
        let (engine, block_bytes) = ("threads".into(), 1 << 20);
        DiskProfile { engine, block_bytes, queue_depth: 32, rings: 1, register: true, threads: 4, paths }
    }

    #[test]
    fn sections_stand_beside_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/profile.json");
        Profile { disk: Some(disk()), calibration: None }.write(&path).unwrap();
        Profile { disk: None, calibration: Some(calibration()) }.write(&path).unwrap();
        let both = Profile::read(&path).unwrap();
        assert_eq!(both, Profile { disk: Some(disk()), calibration: Some(calibration()) });
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(DiskProfile::from_json(&text).unwrap(), disk(), "who reads disks alone reads this");
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert_eq!(Profile::from_json(&both.to_json().to_string()).unwrap(), both);
    }

    #[test]
    fn another_file_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.json");
        std::fs::write(&path, "[1]").unwrap();
        let profile = Profile { disk: None, calibration: Some(calibration()) };
        assert!(profile.write(&path).unwrap_err().contains("no profile"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "[1]");
    }

    #[test]
    fn what_is_no_profile_is_replaced_where_it_is_terrace_s_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        let profile = Profile { disk: None, calibration: Some(calibration()) };
        for (text, why) in [
            ("", "not JSON"),
            ("{\"version\": 1, \"cal", "not JSON"),
            ("[1]", "no \"version\""),
            ("{}", "no \"version\""),
            ("{\"version\": 9, \"disk\": {}}", "format version 9"),
        ] {
            std::fs::write(&path, text).unwrap();
            let (kept, lost) = Profile::salvage(&path);
            assert!(kept == Profile::default() && lost.unwrap().contains(why), "{text}");
            profile.replace(&path).unwrap();
            assert_eq!(Profile::read(&path).unwrap(), profile, "{text}");
        }
        std::fs::write(&path, [0xFF, 0]).unwrap();
        assert!(Profile::salvage(&path).1.unwrap().contains("UTF-8"));
        profile.replace(&path).unwrap();
        assert_eq!(Profile::salvage(&path), (profile, None));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Profile::salvage(&path), (Profile::default(), None));
    }

    #[test]
    fn sections_that_cannot_be_read_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        let both = Profile { disk: Some(disk()), calibration: Some(calibration()) };
        let damaged = |change: &dyn Fn(&mut Value)| {
            let mut document = both.to_json();
            document["notes"] = "kept".into();
            change(&mut document);
            std::fs::write(&path, document.to_string()).unwrap();
            let (kept, lost) = Profile::salvage(&path);
            (kept, lost.unwrap())
        };
        let alone = Profile { disk: None, calibration: Some(calibration()) };
        let no_rate = |d: &mut Value| d["disk"]["paths"][0]["read_bytes_per_second"] = Value::Null;
        let unknown = |d: &mut Value| d["disk"]["wind"] = 1.into();
        for (change, key) in [(&no_rate as &dyn Fn(&mut Value), "f64"), (&unknown, "wind")] {
            let (kept, lost) = damaged(change);
            assert!(kept == alone && lost.contains(key), "{lost}");
            alone.replace(&path).unwrap();
            assert_eq!(Profile::read(&path).unwrap(), alone, "a section is kept that nobody can read");
            assert!(std::fs::read_to_string(&path).unwrap().contains("\"notes\": \"kept\""));
        }
        let (kept, lost) = damaged(&|d| d["calibration"]["wind"] = 1.into());
        assert!(kept == Profile { disk: Some(disk()), calibration: None } && lost.contains("wind"), "{lost}");
        alone.replace(&path).unwrap();
        assert_eq!(Profile::read(&path).unwrap(), both);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = Profile { disk: None, calibration: Some(calibration()) }.to_json();
        let broken = |change: &dyn Fn(&mut Value)| {
            let mut document = good.clone();
            change(&mut document);
            Profile::from_json(&document.to_string()).unwrap_err()
        };
        assert!(broken(&|d| d["version"] = 9.into()).contains("format version 9"));
        let future = broken(&|d| d["calibration"]["version"] = 2.into());
        assert!(future.contains("version 2") && future.contains("terrace calibrate"), "{future}");
        assert!(broken(&|d| d["calibration"]["wind"] = 1.into()).contains("wind"));
        let rate = "memory.read_bytes_per_second";
        let memory = broken(&|d| d["calibration"]["memory"]["read_bytes_per_second"] = 0.into());
        assert!(memory.contains(&format!("0 in \"{rate}\" is no rate")), "{memory}");
        let idle = json!([{ "dtype": "bf16", "operations_per_second": -1 }]);
        let training = broken(&|d| d["calibration"]["training"] = idle.clone());
        assert!(training.contains("-1 in \"training.operations_per_second\""), "{training}");
        let threads = broken(&|d| d["calibration"]["machine"]["threads"] = 0.into());
        assert!(threads.contains("0 in \"machine.threads\""), "{threads}");
        assert!(Profile::from_json("{").unwrap_err().contains("not JSON"));
        assert!(Profile::from_json("{\"version\": 1}").unwrap_err().contains("section"));
    }

    #[test]
    fn disks_count_only_if_all_were_measured() {
        let profile = Profile { disk: Some(disk()), calibration: Some(calibration()) };
        let as_is = |_: &DiskProfile, dir: &Path| dir.to_owned();
        assert!(profile.clone().for_disks(as_is, &["/mnt/a/run".into()]).disk.is_some());
        let other = profile.for_disks(as_is, &["/mnt/a/run".into(), "/mnt/b".into()]);
        assert!(other.disk.is_none() && other.calibration.is_some());
    }
}
