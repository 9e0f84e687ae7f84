//! Scalars for TensorBoard: an event file of its own for every start of a run.
//!
//! ```text
//! record: | bytes 8 | masked CRC-32C of the length 4 | bytes | masked CRC-32C of them 4 |
//! ```
//! Each record holds an `Event` in the encoding of Protocol Buffers, of which only what scalars need is written: `wall_time`
//! (1, double), `step` (2, varint), `file_version` (3, string, in the first), and `summary` (5), whose `value`s (1) have a `tag`
//! (1, string) and a `simple_value` (2, float). The formats are TensorFlow's: `tensorflow/core/lib/io/record_writer.h`,
//! `tensorflow/core/util/event.proto` and `tensorflow/core/framework/summary.proto`.

use crate::metrics::StepMetrics;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Appends the scalars of steps to an event file.
#[derive(Debug)]
pub struct EventWriter {
    file: BufWriter<File>,
    path: PathBuf,
    /// Whether its folder was made for it.
    made_folder: bool,
}

impl EventWriter {
    /// Makes a file in `folder`, which is made, too, if there is none.
    ///
    /// # Errors
    /// The folder or the file cannot be made.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let made_folder = !folder.exists();
        std::fs::create_dir_all(folder)?;
        let (seconds, process) = (wall_time() as u64, std::process::id());
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.terrace.{process}"));
        let mut writer = Self { file: BufWriter::new(File::create_new(&path)?), path, made_folder };
        let mut event = Message::default();
        event.double(1, wall_time());
        event.bytes(3, b"brain.Event:2");
        writer.record(&event.0)?;
        writer.file.flush()?;
        Ok(writer)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, of a run that did not begin.
    pub fn discard(self) {
        // What stays there says nothing.
        let _ = std::fs::remove_file(&self.path);
        if let Some(folder) = self.path.parent().filter(|_| self.made_folder) {
            let _ = std::fs::remove_dir(folder);
        }
    }

    /// Writes what a step did; what it has no number for is left out.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&mut self, metrics: &StepMetrics) -> io::Result<()> {
        let mut summary = Message::default();
        for (tag, value) in scalars(metrics) {
            let mut message = Message::default();
            message.bytes(1, tag.as_bytes());
            message.float(2, value as f32);
            summary.bytes(1, &message.0);
        }
        let mut event = Message::default();
        event.double(1, wall_time());
        event.varint(2, metrics.step);
        event.bytes(5, &summary.0);
        self.record(&event.0)?;
        // Whoever looks at a run that goes on wants its last step.
        self.file.flush()
    }

    fn record(&mut self, bytes: &[u8]) -> io::Result<()> {
        let len = (bytes.len() as u64).to_le_bytes();
        self.file.write_all(&len)?;
        self.file.write_all(&masked_crc(&len).to_le_bytes())?;
        self.file.write_all(bytes)?;
        self.file.write_all(&masked_crc(bytes).to_le_bytes())
    }
}

/// Tags and values of a step.
fn scalars(metrics: &StepMetrics) -> Vec<(String, f64)> {
    let optional = [
        ("train/loss", metrics.loss),
        ("train/grad_norm", metrics.grad_norm),
        ("train/loss_scale", metrics.loss_scale),
        ("speed/floor_seconds", metrics.floor_seconds),
        ("speed/floor_fraction", metrics.floor_fraction),
    ];
    let mut scalars: Vec<(String, f64)> =
        optional.into_iter().filter_map(|(tag, value)| Some((tag.to_owned(), value?))).collect();
    scalars.extend(
        [
            ("train/learning_rate", metrics.lr),
            ("train/tokens", metrics.tokens as f64),
            ("speed/step_seconds", metrics.step_seconds),
            ("speed/tokens_per_second", metrics.tokens_per_second),
            ("disk/read_bytes", metrics.disk_read_bytes as f64),
            ("disk/write_bytes", metrics.disk_write_bytes as f64),
            ("disk/written_bytes", metrics.disk_written_bytes as f64),
            ("link/upload_bytes", metrics.upload_bytes as f64),
            ("link/download_bytes", metrics.download_bytes as f64),
            ("memory/host_peak_bytes", metrics.host_peak_bytes as f64),
            ("memory/device_peak_bytes", metrics.device_peak_bytes as f64),
        ]
        .map(|(tag, value)| (tag.to_owned(), value)),
    );
    scalars.extend(metrics.stall_seconds.iter().map(|(what, value)| (format!("stall/{what}"), *value)));
    scalars.retain(|(_, value)| value.is_finite());
    scalars
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// CRC-32C, rotated and shifted so that the sum of bytes that hold sums is still a good one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A message in the encoding of Protocol Buffers, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(&mut self, field: u64, wire_type: u64) {
        self.raw_varint(field << 3 | wire_type);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.raw_varint(value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_the_specification() {
        // The examples of protobuf.dev's page on encoding: field 1 is 150, field 2 is "testing".
        let mut message = Message::default();
        message.varint(1, 150);
        message.bytes(2, b"testing");
        assert_eq!(message.0, b"\x08\x96\x01\x12\x07testing");
        let mut message = Message::default();
        message.double(1, 1.0);
        message.float(2, 1.0);
        assert_eq!(message.0, b"\x09\0\0\0\0\0\0\xf0\x3f\x15\0\0\x80\x3f");
    }

    #[test]
    fn checksums_are_those_of_the_specification() {
        // RFC 3720, B.4: 32 bytes of zeros.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc(&[0; 32]), 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn records_have_their_lengths_and_sums() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(&folder.path().join("runs/one")).unwrap();
        for step in 1..=3 {
            let stall_seconds = [("weights".to_owned(), 0.5)].into();
            let metrics = StepMetrics {
                step,
                loss: Some(2.5),
                floor_seconds: Some(0.5),
                tokens: 3,
                disk_written_bytes: 8,
                stall_seconds,
                ..StepMetrics::default()
            };
            writer.append(&metrics).unwrap();
        }
        let bytes = std::fs::read(writer.path()).unwrap();
        let (mut at, mut records) = (0, Vec::new());
        while at < bytes.len() {
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let len = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            assert_eq!(word(at + 8), masked_crc(&bytes[at..at + 8]));
            let record = &bytes[at + 12..at + 12 + len];
            assert_eq!(word(at + 12 + len), masked_crc(record));
            records.push(record.to_vec());
            at += len + 16;
        }
        assert_eq!(records.len(), 4);
        let has = |record: &[u8], part: &[u8]| record.windows(part.len()).any(|window| window == part);
        assert!(has(&records[0], b"brain.Event:2"));
        for part in [
            &b"train/loss\x15\0\0\x20\x40"[..],
            b"train/tokens\x15\0\0\x40\x40",
            b"stall/weights\x15\0\0\0\x3f",
            b"speed/floor_seconds\x15\0\0\0\x3f",
            b"speed/tokens_per_second",
            b"disk/written_bytes\x15\0\0\0\x41",
            b"link/upload_bytes",
            b"link/download_bytes",
        ] {
            assert!(has(&records[3], part), "{part:?}");
        }
        assert!(!has(&records[3], b"grad_norm"), "there is none");
    }
}
