//! `--trace`: disk operations as a timeline in Chrome's trace format, for Perfetto or chrome://tracing.

use super::session::Session;
use crate::error::CliError;
use serde_json::json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes what the session's disk did. One lane for reads, one for writes, one for syncs.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, session: &Session) -> Result<(), CliError> {
    let Some(trace) = &session.trace else { return Ok(()) };
    let failed = |e: std::io::Error| CliError::Failed(format!("writing {}: {e}", path.display()));
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    write!(file, "[").map_err(failed)?;
    for (index, event) in trace.drain().into_iter().enumerate() {
        let lane = format!("disk {:?}", event.action).to_lowercase();
        let line = json!({
            "name": format!("{} bytes", event.len),
            "cat": "disk",
            "ph": "X",
            "pid": 1,
            "tid": lane,
            "ts": event.start.as_secs_f64() * 1e6,
            "dur": (event.end - event.start).as_secs_f64() * 1e6,
            "args": { "file": event.file.0, "offset": event.offset, "ok": event.ok },
        });
        write!(file, "{}{line}", if index == 0 { "\n" } else { ",\n" }).map_err(failed)?;
    }
    writeln!(file, "\n]").map_err(failed)?;
    file.flush().map_err(failed)?;
    if trace.forgotten() > 0 {
        eprintln!("note: {} is missing the {} earliest operations", path.display(), trace.forgotten());
    }
    Ok(())
}
