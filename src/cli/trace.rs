//! `--trace`: what the engine and the disk did when. A file in Chrome's trace format, for Perfetto or chrome://tracing, or,
//! if its name ends in `.html`, a page that shows the timeline by itself.

use super::session::Session;
use crate::error::CliError;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;
use terrace_aio::layer::{Action, TraceEvent};
use terrace_zero::{Engine, KvCache, Resource, Span};

/// The page; the events take the place of its marker.
const PAGE: &str = include_str!("trace.html");
const MARKER: &str = "/*EVENTS*/";

/// One bar of the timeline.
struct Bar {
    lane: &'static str,
    name: String,
    category: &'static str,
    start: Duration,
    end: Duration,
    /// The operation of a disk that it is.
    operation: Option<TraceEvent>,
}

/// Whose files requests went to, for their names: while they are open.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// The engine that was seen.
    pub engine: &'a Engine,
    /// Its key/value cache.
    pub cache: Option<&'a KvCache>,
}

/// Writes what the session's engine and disk did, if there is a file to write it to.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: Option<&Path>, session: &Session, seen: Seen<'_>) -> Result<(), CliError> {
    let Some(path) = path else { return Ok(()) };
    let bars = bars(session, seen);
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

/// Lanes in the order in which a reader meets them: what computes, what it waits for, what moves bytes for it.
const LANES: [&str; 11] = [
    "compute",
    "compute waits",
    "device",
    "optimizer",
    "optimizer waits",
    "commit",
    "uploads",
    "downloads",
    "disk read",
    "disk write",
    "disk sync",
];

/// Rows of lanes. Where several of one are busy at once they lie side by side, for a bar must not cover another.
#[derive(Default)]
struct Rows(BTreeMap<&'static str, Vec<Duration>>);

impl Rows {
    /// The row of `lane` for what begins and ends so. What began earlier was asked about earlier.
    fn row(&mut self, lane: &'static str, start: Duration, end: Duration) -> usize {
        let rows = self.0.entry(lane).or_default();
        let row = rows.iter().position(|busy_until| *busy_until <= start).unwrap_or(rows.len());
        rows.resize(rows.len().max(row + 1), Duration::ZERO);
        rows[row] = end;
        row
    }

    /// Every row's lane, its number in it, and its name, in the order of [`LANES`].
    fn all(&self) -> impl Iterator<Item = (&'static str, usize, String)> {
        LANES.into_iter().flat_map(|lane| {
            let count = self.0.get(lane).map_or(0, Vec::len);
            (0..count).map(move |row| {
                (lane, row, if row == 0 { lane.to_owned() } else { format!("{lane} {}", row + 1) })
            })
        })
    }
}

/// Everything that was done, in the order in which it began.
fn bars(session: &Session, seen: Seen<'_>) -> Vec<Bar> {
    let timeline = session.timeline.as_ref();
    let epoch = timeline.map(|timeline| timeline.epoch());
    let spans = timeline.map_or_else(Vec::new, |timeline| timeline.drain());
    let mut bars: Vec<Bar> = spans
        .into_iter()
        .map(|Span { resource, name, start, end }| Bar {
            lane: resource.words(),
            name,
            category: match resource {
                Resource::Device => "device",
                Resource::Upload | Resource::Download => "link",
                _ => "engine",
            },
            start,
            end,
            operation: None,
        })
        .collect();
    if let Some(trace) = &session.trace {
        // Both clocks are the same; only their zeros differ.
        let later = epoch.map_or(Duration::ZERO, |epoch| trace.epoch().saturating_duration_since(epoch));
        bars.extend(trace.drain().into_iter().map(|event| disk_bar(&event, later, session, seen)));
    }
    bars.sort_by_key(|bar| bar.start);
    bars
}

fn disk_bar(event: &TraceEvent, later: Duration, session: &Session, seen: Seen<'_>) -> Bar {
    let (lane, verb) = match event.action {
        Action::Read => ("disk read", "read"),
        Action::Write => ("disk write", "write"),
        Action::Sync => ("disk sync", "sync"),
    };
    let file = || Some(session.backend.io.path(event.file)?.file_name()?.to_string_lossy().into_owned());
    let Seen { engine, cache } = seen;
    let cached = || engine.cache_contents_at(cache?, event.file, event.offset);
    let what = engine.contents_at(event.file, event.offset).or_else(cached).or_else(file);
    Bar {
        lane,
        // A file that is closed by now has no name any more.
        name: format!("{verb} {}", what.unwrap_or_else(|| format!("{} bytes", event.len))),
        category: "disk",
        start: event.start + later,
        end: event.end + later,
        operation: Some(*event),
    }
}

/// The bars, which are in the order in which they began, after the names of their lanes.
fn write_events(file: &mut impl Write, bars: &[Bar]) -> io::Result<()> {
    let mut rows = Rows::default();
    let places: Vec<usize> = bars.iter().map(|bar| rows.row(bar.lane, bar.start, bar.end)).collect();
    let mut numbers = BTreeMap::new();
    let mut events =
        vec![json!({ "name": "process_name", "ph": "M", "pid": 1, "args": { "name": "terrace" } })];
    for (index, (lane, row, name)) in rows.all().enumerate() {
        let number = index + 1;
        numbers.insert((lane, row), number);
        for (what, args) in
            [("thread_name", json!({ "name": name })), ("thread_sort_index", json!({ "sort_index": number }))]
        {
            events.push(json!({ "name": what, "ph": "M", "pid": 1, "tid": number, "args": args }));
        }
    }
    let args = |event: &TraceEvent| json!({ "file": event.file.0, "offset": event.offset, "bytes": event.len, "ok": event.ok });
    let bar = |(bar, row): (&Bar, usize)| {
        json!({
            "name": bar.name,
            "cat": bar.category,
            "ph": "X",
            "pid": 1,
            "tid": numbers[&(bar.lane, row)],
            "ts": bar.start.as_secs_f64() * 1e6,
            "dur": bar.end.saturating_sub(bar.start).as_secs_f64() * 1e6,
            "args": bar.operation.as_ref().map_or(json!({}), args),
        })
    };
    write!(file, "[")?;
    let bars = bars.iter().zip(places).map(bar);
    // One at a time: all at once would take many times their memory.
    for (index, event) in events.into_iter().chain(bars).enumerate() {
        // A page must not end before its script does.
        let line = event.to_string().replace('<', "\\u003c");
        write!(file, "{}{line}", if index == 0 { "\n" } else { ",\n" })?;
    }
    write!(file, "\n]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn bar(lane: &'static str, name: &str, start: u64, end: u64) -> Bar {
        let [start, end] = [start, end].map(Duration::from_millis);
        Bar { lane, name: name.into(), category: "engine", start, end, operation: None }
    }

    #[test]
    fn no_bar_covers_another_and_lanes_are_named_in_order() {
        let bars = [
            bar("disk read", "a", 0, 5),
            bar("optimizer", "<b>", 1, 4),
            bar("optimizer", "c", 2, 3),
            bar("compute", "d", 2, 9),
            bar("optimizer", "e", 4, 6),
        ];
        let mut written = Vec::new();
        write_events(&mut written, &bars).unwrap();
        let text = String::from_utf8(written).unwrap();
        assert!(!text.contains('<'), "{text}");
        let events: Vec<Value> = serde_json::from_str(&text).unwrap();
        let of =
            |name: &str| -> Vec<&Value> { events.iter().filter(|event| event["name"] == name).collect() };
        let names: Vec<&Value> = of("thread_name").iter().map(|event| &event["args"]["name"]).collect();
        assert_eq!(names, ["compute", "optimizer", "optimizer 2", "disk read"]);
        let order: Vec<&Value> =
            of("thread_sort_index").iter().map(|event| &event["args"]["sort_index"]).collect();
        assert_eq!(order, [1, 2, 3, 4]);
        let lane = |name: &str| of(name)[0]["tid"].as_u64().unwrap();
        assert_eq!(["a", "<b>", "c", "d", "e"].map(lane), [4, 2, 3, 1, 2]);
        assert_eq!(of("process_name")[0]["args"]["name"], "terrace");
    }

    #[test]
    fn every_lane_has_a_place() {
        for resource in [
            Resource::Compute,
            Resource::Device,
            Resource::Wait,
            Resource::Update,
            Resource::UpdateWait,
            Resource::Commit,
            Resource::Upload,
            Resource::Download,
        ] {
            assert!(LANES.contains(&resource.words()), "{resource:?}");
        }
    }
}
