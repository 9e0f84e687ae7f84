//! `metrics.jsonl`: one object a step.
//!
//! Lines are written whole and flushed, so that a run that is killed leaves at most one broken line at the end; resuming drops
//! it together with the lines of steps that were never committed. The line of a step is also committed with its state: a run
//! that is killed after the commit and before the line gets it back on resuming. Lines are not synced: what a power cut leaves in
//! the place of some is dropped, and counted, and the others move up. They do so within the file, each over bytes that have been
//! read, so that a process that ends meanwhile leaves some of them twice, which the next one drops.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// What one step did. Sizes are bytes, times are seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StepMetrics {
    /// Number of the step, from one.
    pub step: u64,
    /// Mean loss over the step's unmasked tokens; `null` if it is not a number.
    pub loss: Option<f64>,
    /// Global gradient norm before clipping; `null` if it was not computed.
    pub grad_norm: Option<f64>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Tokens without padding.
    pub tokens: u64,
    /// Wall time of the step.
    pub step_seconds: f64,
    /// `tokens` over `step_seconds`.
    pub tokens_per_second: f64,
    /// The time that the slowest resource needs at its measured best; `null` if nothing was measured.
    pub floor_seconds: Option<f64>,
    /// `floor_seconds` over `step_seconds`.
    pub floor_fraction: Option<f64>,
    /// The resource that the floor is made of.
    pub bound_by: Option<String>,
    /// Read from disk.
    pub disk_read_bytes: u64,
    /// Written to disk.
    pub disk_write_bytes: u64,
    /// Written to disk since the run began, by the processes before and by making the state, too.
    pub disk_written_bytes: u64,
    /// Copied from host to device.
    pub upload_bytes: u64,
    /// Copied from device to host.
    pub download_bytes: u64,
    /// Largest use of host memory so far.
    pub host_peak_bytes: u64,
    /// Largest use of device memory so far.
    pub device_peak_bytes: u64,
    /// Time that computing waited, by what it waited for.
    pub stall_seconds: BTreeMap<String, f64>,
    /// What the loss was multiplied with before backward; only in fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Whether the gradient overflowed and the step changed nothing but the loss scale; only in fp16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<bool>,
    /// Whether what was updated before the gradient's norm was known could be kept; only in steps in which something was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculated: Option<bool>,
}

/// Appends to `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    file: File,
    /// Where its lines end.
    end: u64,
    /// Lines that come after and could not be written yet.
    unwritten: Vec<u8>,
    /// By all steps and what came between them.
    disk_written_bytes: u64,
    /// The last line and where it begins.
    last: Option<(u64, StepMetrics)>,
    damaged: usize,
}

impl MetricsWriter {
    /// Opens the file at `path` for the steps after `committed`, the last committed step, 0 at the start of a run. Lines of
    /// later steps are dropped, and damaged ones. `noted` is the line that was committed with that step, if any: it is appended where the
    /// file lacks it.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(path: &Path, committed: u64, noted: &[u8]) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let kept = if committed == 0 { Kept::default() } else { committed_lines(&file, committed)? };
        file.set_len(kept.bytes)?;
        let last_step = kept.last.as_ref().map_or(0, |(_, metrics)| metrics.step);
        let mut writer = Self {
            file,
            end: kept.bytes,
            unwritten: Vec::new(),
            disk_written_bytes: kept.disk_written_bytes,
            last: kept.last,
            damaged: kept.damaged,
        };
        if last_step < committed
            && let Ok(metrics) = serde_json::from_slice(noted)
        {
            // A line that has no room waits like any other.
            let _ = writer.append(&metrics);
        }
        Ok(writer)
    }

    /// How many damaged lines were dropped.
    pub fn damaged(&self) -> usize {
        self.damaged
    }

    /// Appends one step, after those that could not be written before.
    ///
    /// # Errors
    /// The file cannot be written. The step is kept, and tried again with the next.
    pub fn append(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        self.disk_written_bytes += metrics.disk_write_bytes;
        self.put(metrics.clone())
    }

    /// Makes a step the last line, with what was written to disk by now.
    fn put(&mut self, metrics: StepMetrics) -> io::Result<()> {
        let at = self.end + self.unwritten.len() as u64;
        let metrics = StepMetrics { disk_written_bytes: self.disk_written_bytes, ..metrics };
        serde_json::to_writer(&mut self.unwritten, &metrics)?;
        self.unwritten.push(b'\n');
        self.last = Some((at, metrics));
        self.write()
    }

    /// Writes what is not written. Half a line does not stay.
    fn write(&mut self) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.end))?;
        if let Err(error) = self.file.write_all(&self.unwritten) {
            self.file.set_len(self.end)?;
            return Err(error);
        }
        self.end += self.unwritten.len() as u64;
        self.unwritten.clear();
        Ok(())
    }

    /// Steps that wait for the file to be writable.
    pub fn waiting(&self) -> usize {
        self.unwritten.iter().filter(|byte| **byte == b'\n').count()
    }

    /// What the file lacks since it could not be written, in words.
    pub fn lacks(&self) -> String {
        match self.waiting() {
            0 => "what was written to disk after the last step".into(),
            steps => format!("the last {steps} steps of this process"),
        }
    }

    /// Counts what was written to disk and belongs to no step yet: making the state.
    pub fn count(&mut self, bytes: u64) {
        self.disk_written_bytes += bytes;
    }

    /// Adds to the last line what was written to disk after it, by its deferred update and saves.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn count_after_last(&mut self, bytes: u64) -> io::Result<()> {
        self.count(bytes);
        let Some((at, metrics)) = self.last.take().filter(|_| bytes > 0) else { return self.write() };
        match at.checked_sub(self.end) {
            Some(waiting) => self.unwritten.truncate(waiting as usize),
            None => {
                self.file.set_len(at)?;
                self.end = at;
            }
        }
        self.put(metrics)
    }

    /// What was written to disk since the run began, in bytes.
    pub fn disk_written_bytes(&self) -> u64 {
        self.disk_written_bytes
    }
}

/// The lines of a file that belong to committed steps, at its start.
#[derive(Debug, Default)]
struct Kept {
    /// Their length.
    bytes: u64,
    /// The last of them and where it begins.
    last: Option<(u64, StepMetrics)>,
    /// What had been written to disk after it.
    disk_written_bytes: u64,
    /// Whole lines that are no step's, or of one that another has been kept of.
    damaged: usize,
}

/// Moves lines to where those before them end.
fn committed_lines(file: &File, committed: u64) -> io::Result<Kept> {
    let mut reader = BufReader::new(file);
    let (mut kept, mut line, mut at) = (Kept::default(), Vec::new(), 0);
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        if !line.ends_with(b"\n") {
            return Ok(kept);
        }
        let next = kept.last.as_ref().map_or(1, |(_, last)| last.step + 1);
        match serde_json::from_slice::<StepMetrics>(&line) {
            Ok(found) if (next..=committed).contains(&found.step) => {
                if kept.bytes < at {
                    file.write_all_at(&line, kept.bytes)?;
                }
                // Lines that earlier versions wrote have no sum.
                let sum = kept.disk_written_bytes + found.disk_write_bytes;
                kept.disk_written_bytes = found.disk_written_bytes.max(sum);
                kept.last = Some((kept.bytes, found));
                kept.bytes += read as u64;
            }
            Ok(found) if found.step > committed => {}
            _ => kept.damaged += 1,
        }
        at += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: Some(f64::NAN),
            stall_seconds: [("disk".into(), 0.5)].into(),
            disk_write_bytes: 100,
            ..Default::default()
        }
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str::<StepMetrics>(line).unwrap().step).collect()
    }

    #[test]
    fn resuming_drops_what_was_not_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0, &[]).unwrap();
        (1..=4).for_each(|s| writer.append(&step(s)).unwrap());
        writer.file.write_all(b"{\"step\": 5, \"lo").unwrap();
        let mut writer = MetricsWriter::open(&path, 3, &[]).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        assert_eq!(writer.disk_written_bytes(), 300);
        writer.append(&step(4)).unwrap();
        assert_eq!(writer.disk_written_bytes(), 400);
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        let noted = serde_json::to_vec(&step(5)).unwrap();
        MetricsWriter::open(&path, 5, &noted).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4, 5], "killed between the commit and the line");
        MetricsWriter::open(&path, 5, &noted).unwrap().append(&step(6)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6]);
        MetricsWriter::open(&path, 0, &[]).unwrap();
        assert_eq!(steps(&path), [0u64; 0]);
    }

    #[test]
    fn a_damaged_line_costs_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let lines: Vec<String> = (1..=7).map(|s| serde_json::to_string(&step(s)).unwrap() + "\n").collect();
        let zeros = "\0".repeat(40);
        // Of nothing, of a step that is gone, of one that is there, and of no step.
        for damage in
            ["xxx\n", "\n", &format!("{zeros}\n"), &format!("{zeros}{}", lines[1]), &lines[0], "{}\n"]
        {
            std::fs::write(&path, format!("{}{damage}{}{{\"step\": 8", lines[0], lines[2..].concat()))
                .unwrap();
            let mut writer = MetricsWriter::open(&path, 6, &[]).unwrap();
            assert_eq!((writer.damaged(), writer.disk_written_bytes()), (1, 500), "{damage:?}");
            writer.append(&step(7)).unwrap();
            assert_eq!(steps(&path), [1, 3, 4, 5, 6, 7], "{damage:?}");
            assert_eq!(MetricsWriter::open(&path, 7, &[]).unwrap().damaged(), 0);
        }
        // What a process leaves that ended after it had moved a line.
        let moved = lines[2].clone() + &lines[1][lines[2].len().min(lines[1].len())..];
        std::fs::write(&path, format!("{}{moved}{}", lines[0], lines[2..6].concat())).unwrap();
        let writer = MetricsWriter::open(&path, 6, &[]).unwrap();
        assert_eq!((writer.damaged(), steps(&path)), (1, vec![1, 3, 4, 5, 6]));
        let noted = serde_json::to_vec(&step(2)).unwrap();
        std::fs::write(&path, format!("{}xxx\n", lines[0])).unwrap();
        assert_eq!(MetricsWriter::open(&path, 2, &noted).unwrap().damaged(), 1);
        assert_eq!(steps(&path), [1, 2], "the newest line is in the state as well");
    }

    #[test]
    fn what_was_written_is_counted_across_processes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0, &[]).unwrap();
        writer.count(1000);
        (1..=2).for_each(|s| writer.append(&step(s)).unwrap());
        writer.count_after_last(7).unwrap();
        let mut writer = MetricsWriter::open(&path, 2, &[]).unwrap();
        assert_eq!(writer.disk_written_bytes(), 1207);
        writer.count_after_last(3).unwrap();
        writer.append(&step(3)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        let text = std::fs::read_to_string(&path).unwrap();
        let sums =
            text.lines().map(|line| serde_json::from_str::<StepMetrics>(line).unwrap().disk_written_bytes);
        assert_eq!(sums.collect::<Vec<_>>(), [1100, 1210, 1310]);
    }

    /// A disk that is full for a while loses no step.
    #[test]
    fn lines_wait_until_they_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0, &[]).unwrap();
        writer.append(&step(1)).unwrap();
        let able = std::mem::replace(&mut writer.file, File::open(&path).unwrap());
        writer.count_after_last(7).unwrap_err();
        assert_eq!(writer.lacks(), "what was written to disk after the last step");
        writer.last = Some((0, step(1)));
        for s in 2..=3 {
            writer.append(&step(s)).unwrap_err();
            assert_eq!(writer.waiting(), s as usize - 1);
        }
        writer.count_after_last(7).unwrap_err();
        assert_eq!(writer.lacks(), "the last 2 steps of this process");
        assert_eq!(steps(&path), [1]);
        writer.file = able;
        writer.append(&step(4)).unwrap();
        assert_eq!(writer.waiting(), 0);
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        writer.count_after_last(2).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let last: StepMetrics = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!((last.step, last.disk_written_bytes), (4, 416));
    }

    #[test]
    fn the_fields_that_scripts_read() {
        let value = serde_json::to_value(step(1)).unwrap();
        let names: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let contract = "step loss grad_norm lr tokens step_seconds tokens_per_second floor_seconds floor_fraction bound_by \
            disk_read_bytes disk_write_bytes disk_written_bytes upload_bytes download_bytes host_peak_bytes device_peak_bytes stall_seconds";
        assert_eq!(names.join(" "), contract);
        assert!(value["loss"].is_null(), "NaN is null");
        assert_eq!(value["stall_seconds"]["disk"], 0.5);
    }
}
