//! Figures for people, and as JSON and CSV.

use crate::failure::Failure;
use crate::html;
use crate::measure::Measured;
use crate::options::Output;
use crate::units;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use terrace_aio::bench::histogram::Histogram;
use terrace_aio::bench::load::{Mismatch, Side};

/// What a command found, in every form that [`Output`] can ask for.
pub trait Findings {
    /// The table.
    fn text(&self) -> String;
    /// One document.
    fn json(&self) -> Value;
    /// Rows under a header.
    fn csv(&self) -> String;
    /// A page with charts.
    fn html(&self) -> String;
}

/// Everything a run has to say.
#[derive(Debug, Default)]
pub struct Report {
    pub results: Vec<Measured>,
    /// What a reader must know about the figures.
    pub notes: Vec<String>,
    pub file_bytes: u64,
    pub validated: bool,
    pub mismatches: Vec<Mismatch>,
    pub mismatches_count: u64,
    pub interrupted: bool,
}

/// The quantiles that are reported, with their names.
pub const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999)];

/// The columns of the CSV file.
pub const CSV_HEADER: &str = "record,direction,dir,engine,block_bytes,queue_depth,rings,registered,direct,start_seconds,\
                              seconds,bytes,gigabytes_per_second,iops,latency_us_p50,latency_us_p95,latency_us_p99,\
                              latency_us_p99_9,latency_us_max,cpu_seconds_per_gigabyte,limited_by";

impl Findings for Report {
    fn text(&self) -> String {
        let mut text = String::new();
        if let Some(first) = self.results.first() {
            text += &heading(first, self.file_bytes);
        }
        let mut rows = vec![header_row()];
        for result in &self.results {
            rows.extend(rows_of(result));
        }
        if rows.len() > 1 {
            text += &table(&rows);
        }
        for result in &self.results {
            let diagnosis = result.diagnose();
            let _ =
                writeln!(text, "{} limited by: {} ({})", result.title(), diagnosis.limit, diagnosis.evidence);
            text += &sustained_text(result);
        }
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        if self.validated && !self.interrupted && self.mismatches_count == 0 {
            text += "every block that was read back held what was written\n";
        }
        if self.interrupted {
            text += "interrupted: these are the figures up to then\n";
        }
        text
    }

    fn json(&self) -> Value {
        let first = self.results.first();
        let setting = |value: &dyn Fn(&Measured) -> Value| first.map_or(Value::Null, value);
        json!({
            "engine": setting(&|m| json!(m.engine)),
            "features": setting(&|m| json!(m.facts.features)),
            "fallbacks": setting(&|m| json!(m.facts.fallbacks)),
            "dirs": setting(&|m| json!(shown(&m.dirs))),
            "block_bytes": setting(&|m| json!(m.settings.block_bytes)),
            "queue_depth": setting(&|m| json!(m.settings.queue_depth)),
            "rings": setting(&|m| json!(m.settings.rings)),
            "threads": setting(&|m| json!(m.settings.threads(m.dirs.len()))),
            "registered": setting(&|m| json!(m.is_registered)),
            "direct": setting(&|m| json!(m.is_direct)),
            "random": setting(&|m| json!(m.workload.random)),
            "file_bytes": self.file_bytes,
            "validated": self.validated,
            "mismatches": self.mismatches.iter().map(mismatch_json).collect::<Vec<_>>(),
            "mismatches_count": self.mismatches_count,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "results": self.results.iter().map(result_json).collect::<Vec<_>>(),
        })
    }

    /// One row per result, per directory and per window of time.
    fn csv(&self) -> String {
        let mut text = format!("{CSV_HEADER}\n");
        for result in &self.results {
            text += &csv_result(result);
            for (dir, rate) in result.dir_rates() {
                let dir = csv_quoted(&dir.display().to_string());
                let _ = writeln!(text, "dir,{},{dir},,,,,,,,,,{rate:.6},,,,,,,,", result.title());
            }
            let window = result.tally.window.as_secs_f64();
            for (index, bytes) in result.windows().iter().enumerate() {
                let (start, rate) = (index as f64 * window, *bytes as f64 / 1e9 / window);
                let _ = writeln!(
                    text,
                    "window,{},,,,,,,,{start:.3},{window:.3},{bytes},{rate:.6},,,,,,,,",
                    result.title()
                );
            }
        }
        text
    }

    fn html(&self) -> String {
        html::run_page(self)
    }
}

/// Prints the table or the document, and writes the files that were asked for.
pub fn publish(output: &Output, findings: &impl Findings) -> Result<(), Failure> {
    if output.json {
        print(&format!("{:#}\n", findings.json()))?;
    } else {
        print(&findings.text())?;
    }
    if let Some(path) = &output.csv {
        write_file(path, &findings.csv())?;
    }
    if let Some(path) = &output.html {
        write_file(path, &findings.html())?;
    }
    Ok(())
}

/// Prints; a reader that went away is no error.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::io("writing to", Path::new("standard output"), &e))
        }
        _ => Ok(()),
    }
}

/// Paths in a document, which holds text.
pub fn shown(paths: &[PathBuf]) -> Vec<Cow<'_, str>> {
    paths.iter().map(|path| path.to_string_lossy()).collect()
}

/// Writes a report's file, naming it when that fails.
pub fn write_file(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|e| Failure::io("writing", path, &e))
}

/// `["engine", …]` aligned in columns, the first to the left and the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ =
                if column == 0 { write!(line, "{cell:<width$}") } else { write!(line, "  {cell:>width$}") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn heading(first: &Measured, file_bytes: u64) -> String {
    let settings = &first.settings;
    let dirs: Vec<String> = first.dirs.iter().map(|dir| dir.display().to_string()).collect();
    format!(
        "{}: {} x {} per directory, {}, {}, {}, {} files, engine {}\n",
        dirs.join(" "),
        units::size(settings.block_bytes),
        first.depth / first.dirs.len().max(1),
        if first.workload.random { "random" } else { "sequential" },
        if first.is_direct { "direct" } else { "buffered" },
        if first.is_registered { "registered" } else { "not registered" },
        units::size(file_bytes),
        first.engine,
    )
}

fn header_row() -> Vec<String> {
    ["", "GB/s", "IOPS", "p50", "p95", "p99", "p99.9", "max", "CPU s/GB"].map(str::to_owned).to_vec()
}

fn rows_of(result: &Measured) -> Vec<Vec<String>> {
    let cpu = format!("{:.4}", result.cpu_seconds_per_gigabyte());
    let (rate, iops) = (result.gigabytes_per_second(), result.iops());
    let mut rows = vec![row(result.title(), rate, iops, &result.latency(), cpu)];
    if result.workload.direction.mix().is_some() {
        for (name, side) in sides(result) {
            let rate = result.side_gigabytes_per_second(side);
            let iops = if result.tally.ops() == 0 {
                0.0
            } else {
                iops * side.ops as f64 / result.tally.ops() as f64
            };
            rows.push(row(format!("  {name}"), rate, iops, &side.latency, String::new()));
        }
    }
    if result.dirs.len() > 1 {
        let line = |(dir, rate): (&Path, f64)| vec![format!("  {}", dir.display()), format!("{rate:.3}")];
        rows.extend(result.dir_rates().map(line));
    }
    rows
}

fn row(name: String, rate: f64, iops: f64, latency: &Histogram, cpu: String) -> Vec<String> {
    let mut row = vec![name, format!("{rate:.3}"), format!("{iops:.0}")];
    row.extend(QUANTILES.map(|(_, share)| units::latency(latency.quantile(share))));
    row.extend([units::latency(latency.max()), cpu]);
    row
}

fn sides(result: &Measured) -> [(&'static str, &Side); 2] {
    [("read", &result.tally.read), ("write", &result.tally.write)]
}

fn sustained_text(result: &Measured) -> String {
    let Some(sustained) = &result.sustained else { return String::new() };
    let mut text = format!(
        "{} over time: {:.3} GB/s at first, {:.3} GB/s in the last third ({:.0} %)",
        result.title(),
        sustained.first_gigabytes_per_second,
        sustained.last_third_gigabytes_per_second,
        sustained.kept * 100.0
    );
    let _ = match &sustained.drop {
        Some(drop) => writeln!(
            text,
            "; it dropped from {:.3} to {:.3} GB/s after {:.1} s and {}",
            drop.before_gigabytes_per_second,
            drop.after_gigabytes_per_second,
            drop.seconds,
            units::about(drop.bytes)
        ),
        None => writeln!(text, "; no lasting drop"),
    };
    text
}

/// A latency histogram's figures.
pub fn latency_json(latency: &Histogram) -> Map<String, Value> {
    let us = |ns: u64| json!(ns as f64 / 1e3);
    let name = |name: &str| format!("latency_us_{}", name.replace('.', "_"));
    let mut map: Map<String, Value> =
        QUANTILES.iter().map(|(q, share)| (name(q), us(latency.quantile(*share)))).collect();
    map.insert("latency_us_mean".to_owned(), json!(latency.mean() / 1e3));
    map.insert("latency_us_max".to_owned(), us(latency.max()));
    map
}

/// One result's document.
pub fn result_json(result: &Measured) -> Value {
    let (tally, diagnosis) = (&result.tally, result.diagnose());
    let mut document = json!({
        "direction": result.workload.direction.name(),
        "mix": result.workload.direction.mix().map(|mix| mix.to_string()),
        "bytes": tally.bytes(),
        "operations": tally.ops(),
        "seconds": tally.seconds,
        "sync_seconds": tally.sync_seconds,
        "gigabytes_per_second": result.gigabytes_per_second(),
        "iops": result.iops(),
        "cpu_seconds": tally.cpu.process,
        "cpu_seconds_per_gigabyte": result.cpu_seconds_per_gigabyte(),
        "interrupted": tally.interrupted,
        "limited_by": diagnosis.limit,
        "evidence": diagnosis.evidence,
        "gain_at_twice_the_depth": result.gain_at_twice_the_depth,
        "sustained": result.sustained,
        "dirs": result.dir_rates().map(|(dir, rate)| json!({"dir": dir.to_string_lossy(), "gigabytes_per_second": rate})).collect::<Vec<_>>(),
        "series": {
            "window_seconds": tally.window.as_secs_f64(),
            "read_bytes": tally.series.iter().map(|w| w[0]).collect::<Vec<_>>(),
            "write_bytes": tally.series.iter().map(|w| w[1]).collect::<Vec<_>>(),
        },
    });
    let side = |side: &Side| {
        let mut map = latency_json(&side.latency);
        map.insert("bytes".to_owned(), json!(side.bytes));
        map.insert("gigabytes_per_second".to_owned(), json!(result.side_gigabytes_per_second(side)));
        Value::Object(map)
    };
    if let Value::Object(map) = &mut document {
        map.extend(latency_json(&result.latency()));
        for (name, value) in sides(result).into_iter().filter(|(_, value)| value.ops > 0) {
            map.insert(name.to_owned(), side(value));
        }
    }
    document
}

fn mismatch_json(mismatch: &Mismatch) -> Value {
    json!({ "file": mismatch.path.to_string_lossy(), "offset": mismatch.offset })
}

/// One result's row.
pub fn csv_result(result: &Measured) -> String {
    let (settings, latency) = (&result.settings, result.latency());
    let us = |ns: u64| format!("{:.1}", ns as f64 / 1e3);
    let mut cells = vec![
        "total".to_owned(),
        result.title(),
        csv_quoted(&result.dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(" ")),
        result.engine.clone(),
        settings.block_bytes.to_string(),
        settings.queue_depth.to_string(),
        settings.rings.to_string(),
        result.is_registered.to_string(),
        result.is_direct.to_string(),
        "0".to_owned(),
        format!("{:.6}", result.tally.seconds),
        result.tally.bytes().to_string(),
        format!("{:.6}", result.gigabytes_per_second()),
        format!("{:.1}", result.iops()),
    ];
    cells.extend(QUANTILES.map(|(_, share)| us(latency.quantile(share))));
    cells.extend([us(latency.max()), format!("{:.6}", result.cpu_seconds_per_gigabyte())]);
    cells.push(result.diagnose().limit.to_owned());
    cells.join(",") + "\n"
}

/// A cell that may hold commas.
pub fn csv_quoted(text: &str) -> String {
    if text.contains([',', '"', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// Refuses early what [`publish`] could not write.
pub fn check_output(output: &Output) -> Result<(), Failure> {
    [&output.csv, &output.html].into_iter().flatten().try_for_each(|path| check_file(path))
}

/// Refuses a path that a user gave for a file and that cannot be one.
pub fn check_file(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !parent.is_dir() {
        return Err(Failure::usage(format!("{shown}: there is no such folder to write it to")));
    }
    if path.is_dir() {
        return Err(Failure::usage(format!("{shown} is a folder: name a file")));
    }
    Ok(())
}
