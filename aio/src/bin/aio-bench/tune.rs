//! A short sweep whose result is written down: an `aio` section that DeepSpeed's loader accepts, and Terrace's profile.

use crate::failure::Failure;
use crate::files::DataFile;
use crate::interrupt::Interrupt;
use crate::measure::{Measured, Settings};
#[cfg(feature = "tokio_uring")]
use crate::options::Engine;
use crate::options::Tune;
use crate::progress::Meter;
use crate::report;
use crate::run;
use crate::sweep::{self, Grid, Points};
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use terrace_aio::bench::mix::{Direction, Mix};
use terrace_aio::profile::{DiskProfile, PathProfile, can_name, replace_file};

/// An optimizer reads and writes the same number of bytes.
const MIX: Mix = Mix { read: 1, write: 1 };

/// A JSON file with a section of ours, and whatever else stands in it.
#[derive(Debug)]
struct Target {
    path: PathBuf,
    document: Map<String, Value>,
    sections: &'static [&'static str],
}

/// Finds settings and writes them. Gives the exit code.
pub fn run(options: &Tune, interrupt: Interrupt) -> Result<u8, Failure> {
    let targets = targets(&options.output)?;
    let place = &options.place;
    if let Some(dir) = place.dirs.iter().find(|dir| !can_name(dir)) {
        return Err(Failure::usage(format!(
            "--dir {}: its path is not UTF-8, and a profile cannot name it: give another folder on the same disk",
            dir.display()
        )));
    }
    #[cfg(feature = "tokio_uring")]
    if options.grid.engines.contains(&Engine::TokioUring) {
        return Err(Failure::usage(
            "a profile cannot name tokio-uring: leave it out of --engines, or sweep with it",
        ));
    }
    let grid = Grid::new(&options.grid, false, place.seed, place.dirs.len())?;
    let plan = place.files(grid.block_max(), 2, 1)?;
    grid.check_fits(&plan)?;
    let mut files = plan.open()?;
    let mut meter = Meter::new(interrupt);
    let mut points = Points::default();
    let tuned = tune(&grid, &mut files, &mut points, &mut meter);
    meter.clear();
    let Some((chosen, measured)) = tuned? else { return Ok(130) };
    let sections = sections(&chosen, &measured)?;
    // What was measured is said, also where a file of it cannot be written.
    let mut written = Ok(());
    for target in targets {
        let this = target.write(&sections);
        if this.is_ok() && !options.json {
            report::print(&format!("wrote {}\n", target.path.display()))?;
        }
        written = written.and(this);
    }
    if options.json {
        report::print(&format!("{:#}\n", Value::Object(sections)))?;
    } else {
        report::print(&summary(&measured, &points.notes))?;
    }
    written.map(|()| 0)
}

/// The best settings for a mixed load and each direction's figures with them; `None` when it was interrupted.
fn tune(
    grid: &Grid,
    files: &mut [DataFile],
    points: &mut Points,
    meter: &mut Meter,
) -> Result<Option<(Settings, Vec<Measured>)>, Failure> {
    sweep::prepare(grid, files, points, meter)?;
    let mixed = Direction::Mixed(MIX);
    grid.explore(mixed, files, points, meter)?;
    let Some(chosen) = points.best(mixed).map(|point| point.settings.clone()) else { return Ok(None) };
    let mut measured = Vec::new();
    for direction in [Direction::Read, Direction::Write, mixed] {
        measured.push(grid.measure(&chosen, direction, files, meter)?);
    }
    run::finish(files, &chosen, meter)?;
    Ok((!meter.interrupt.requested()).then_some((chosen, measured)))
}

fn sections(chosen: &Settings, measured: &[Measured]) -> Result<Map<String, Value>, Failure> {
    let [read, write, mixed] = measured else {
        return Err(Failure::failed("not every direction was measured: run it again".to_owned()));
    };
    let rate = |of: &Measured, index: usize| of.dir_rates().nth(index).map_or(0.0, |(_, rate)| rate * 1e9);
    let path = |(index, dir): (usize, &PathBuf)| {
        let path = dir.canonicalize().map_err(|e| Failure::io("examining", dir, &e))?;
        Ok(PathProfile {
            path,
            read_bytes_per_second: rate(read, index),
            write_bytes_per_second: rate(write, index),
            mixed_bytes_per_second: rate(mixed, index),
        })
    };
    let profile = DiskProfile {
        engine: mixed.engine.clone(),
        block_bytes: chosen.block_bytes as usize,
        queue_depth: chosen.queue_depth,
        rings: chosen.rings,
        register: chosen.register,
        threads: chosen.threads(mixed.dirs.len()),
        paths: mixed.dirs.iter().enumerate().map(path).collect::<Result<_, Failure>>()?,
    };
    let document = profile.to_json();
    DiskProfile::from_json(&document.to_string()).map_err(|e| {
        Failure::failed(format!("the measurement was too short for a profile ({e}): raise --seconds"))
    })?;
    let parallelism = if profile.engine == "threads" { profile.threads } else { profile.rings };
    let mut sections = Map::new();
    sections.insert("version".to_owned(), document["version"].clone());
    sections.insert("disk".to_owned(), document["disk"].clone());
    let aio = json!({
        "block_size": profile.block_bytes,
        "queue_depth": profile.queue_depth,
        "intra_op_parallelism": parallelism,
        "single_submit": false,
        "overlap_events": true,
    });
    sections.insert("aio".to_owned(), aio);
    Ok(sections)
}

fn summary(measured: &[Measured], notes: &[String]) -> String {
    let mut text = String::new();
    for result in measured {
        let (title, rate, settings) = (result.title(), result.gigabytes_per_second(), &result.settings);
        let (block, depth) = (crate::units::size(settings.block_bytes), settings.queue_depth);
        text += &format!("{title}: {rate:.3} GB/s with {block} x {depth}, {}\n", result.engine);
    }
    notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    text
}

/// The files to write, refused before anything is measured if they are not of our kind.
fn targets(output: &Path) -> Result<Vec<Target>, Failure> {
    if output.extension().is_some_and(|extension| extension == "json") && !output.is_dir() {
        report::check_file(output)?;
        return Ok(vec![Target::open(output.to_owned(), &["version", "disk", "aio"])?]);
    }
    if output.exists() && !output.is_dir() {
        let shown = output.display();
        return Err(Failure::usage(format!(
            "{shown} is a file: --output takes a folder, or a file that ends in .json"
        )));
    }
    std::fs::create_dir_all(output).map_err(|e| Failure::io("creating", output, &e))?;
    Ok(vec![
        Target::open(output.join("aio.json"), &["aio"])?,
        Target::open(output.join("profile.json"), &["version", "disk"])?,
    ])
}

impl Target {
    fn open(path: PathBuf, sections: &'static [&'static str]) -> Result<Self, Failure> {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Ok(Self { path, document: Map::new(), sections });
            }
            Err(e) => return Err(Failure::io("reading", &path, &e)),
        };
        let document = match serde_json::from_str(&text) {
            Ok(Value::Object(document)) => document,
            _ => Map::new(),
        };
        let has_aio = document.get("aio").is_some_and(Value::is_object);
        // `terrace calibrate` without a disk writes none of that.
        let is_calibration =
            document.contains_key("version") && document.get("calibration").is_some_and(Value::is_object);
        let has_disk =
            DiskProfile::from_json(&text).is_ok() || is_calibration && !document.contains_key("disk");
        let is_ours = if sections.contains(&"disk") { has_disk } else { has_aio };
        if !is_ours {
            let (shown, kind) =
                (path.display(), if sections.contains(&"disk") { "profile" } else { "\"aio\" section" });
            return Err(Failure::failed(format!(
                "{shown} exists and has no {kind}: move it away or choose another --output"
            )));
        }
        Ok(Self { path, document, sections })
    }

    /// Replaces our sections, and keeps the others but for what they say of all directories at once, and of how long they were measured.
    fn write(&self, sections: &Map<String, Value>) -> Result<(), Failure> {
        let mut document = self.document.clone();
        for (name, section) in sections.iter().filter(|(name, _)| self.sections.contains(&name.as_str())) {
            document.insert(name.clone(), section.clone());
        }
        // Of the directories that were in `disk` before.
        if self.sections.contains(&"disk")
            && let Some(calibration) = document.get_mut("calibration").and_then(Value::as_object_mut)
        {
            calibration.remove("disks_together");
            calibration.remove("sustained");
        }
        let text = format!("{:#}\n", Value::Object(document));
        replace_file(&self.path, &text).map_err(|e| Failure::io("writing", &self.path, &e))
    }
}
