//! `--trace`: what the engine and the disk did when. A file in Chrome's trace format, for Perfetto or chrome://tracing, or,
//! if its name ends in `.html`, a page that shows the timeline by itself.

use super::session::Session;
use crate::error::CliError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;
use terrace_zero::{Resource, Span};

/// The page; the events take the place of its marker.
const PAGE: &str = include_str!("trace.html");
const MARKER: &str = "/*EVENTS*/";

/// One bar of the timeline.
struct Bar {
    lane: String,
    name: String,
    category: &'static str,
    start: Duration,
    end: Duration,
    args: Value,
}

/// Writes what the session's engine and disk did.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, session: &Session) -> Result<(), CliError> {
    let bars = bars(session);
    let is_page = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("html"));
    let write = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        if is_page {
            let (head, tail) = PAGE.split_once(MARKER).expect("the page has a place for events");
            file.write_all(head.as_bytes())?;
            write_events(&mut file, &bars)?;
            file.write_all(tail.as_bytes())?;
        } else {
            write_events(&mut file, &bars)?;
            writeln!(file)?;
        }
        file.flush()
    };
    write().map_err(|e| CliError::Failed(format!("writing {}: {e}", path.display())))?;
    let forgotten = session.trace.as_ref().map_or(0, |trace| trace.forgotten())
        + session.timeline.as_ref().map_or(0, |timeline| timeline.forgotten());
    if forgotten > 0 {
        eprintln!("note: {} is missing the {forgotten} earliest operations", path.display());
    }
    Ok(())
}

/// Lanes in which several are busy at once: those lie side by side, for a bar must not cover another.
#[derive(Default)]
struct Rows(BTreeMap<String, Vec<Duration>>);

impl Rows {
    /// The row of `lane` for what begins and ends so. What began earlier was asked about earlier.
    fn lane(&mut self, lane: String, start: Duration, end: Duration) -> String {
        let rows = self.0.entry(lane.clone()).or_default();
        let row = rows.iter().position(|busy_until| *busy_until <= start).unwrap_or(rows.len());
        rows.resize(rows.len().max(row + 1), Duration::ZERO);
        rows[row] = end;
        if row == 0 { lane } else { format!("{lane} {}", row + 1) }
    }
}

fn bars(session: &Session) -> Vec<Bar> {
    let mut bars = Vec::new();
    let timeline = session.timeline.as_ref();
    let epoch = timeline.map(|timeline| timeline.epoch());
    let (copies, works): (Vec<Span>, Vec<Span>) = timeline
        .map_or_else(Vec::new, |timeline| timeline.drain())
        .into_iter()
        .partition(|span| matches!(span.resource, Resource::Upload | Resource::Download | Resource::Device));
    for span in works {
        let (lane, name) = (span.resource.words().to_owned(), span.name);
        bars.push(Bar { lane, name, category: "engine", start: span.start, end: span.end, args: json!({}) });
    }
    let mut rows = Rows::default();
    let mut copies = copies;
    copies.sort_by_key(|span| span.start);
    for Span { resource, name, start, end } in copies {
        let lane = rows.lane(resource.words().to_owned(), start, end);
        let category = if resource == Resource::Device { "device" } else { "link" };
        bars.push(Bar { lane, name, category, start, end, args: json!({}) });
    }
    if let Some(trace) = &session.trace {
        // Both clocks are the same; only their zeros differ.
        let later = epoch.map_or(Duration::ZERO, |epoch| trace.epoch().saturating_duration_since(epoch));
        let mut events = trace.drain();
        events.sort_by_key(|event| event.start);
        for event in events {
            let lane = format!("disk {:?}", event.action).to_lowercase();
            let lane = rows.lane(lane, event.start, event.end);
            bars.push(Bar {
                lane,
                name: format!("{} bytes", event.len),
                category: "disk",
                start: event.start + later,
                end: event.end + later,
                args: json!({ "file": event.file.0, "offset": event.offset, "ok": event.ok }),
            });
        }
    }
    bars
}

fn write_events(file: &mut impl Write, bars: &[Bar]) -> io::Result<()> {
    write!(file, "[")?;
    for (index, bar) in bars.iter().enumerate() {
        let line = json!({
            "name": bar.name,
            "cat": bar.category,
            "ph": "X",
            "pid": 1,
            "tid": bar.lane,
            "ts": bar.start.as_secs_f64() * 1e6,
            "dur": bar.end.saturating_sub(bar.start).as_secs_f64() * 1e6,
            "args": bar.args,
        });
        // A page must not end before its script does.
        let line = line.to_string().replace('<', "\\u003c");
        write!(file, "{}{line}", if index == 0 { "\n" } else { ",\n" })?;
    }
    write!(file, "\n]")
}
