//! What the libraries warn of, on stderr as the commands' own warnings are.

use std::fmt;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Shows the warnings of all threads from here on.
pub fn show() {
    // Who has one already keeps it.
    let _ = tracing::subscriber::set_global_default(subscriber(std::io::stderr));
}

fn subscriber(to: impl for<'w> MakeWriter<'w> + Send + Sync + 'static) -> impl Subscriber {
    let fields = debug_fn(|writer, field, value| match field.name() {
        "message" => write!(writer, "{value:?}"),
        name => write!(writer, "; {name}: {value:?}"),
    });
    let builder = tracing_subscriber::fmt().with_max_level(Level::WARN).with_writer(to);
    builder.fmt_fields(fields).event_format(Line).finish()
}

/// `warning: message; name: value`.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let is_error = *event.metadata().level() == Level::ERROR;
        write!(writer, "{}: ", if is_error { "error" } else { "warning" })?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_reads_as_a_warning_of_the_commands() {
        let lines = Lines::default();
        let to = lines.clone();
        tracing::subscriber::with_default(subscriber(move || to.clone()), || {
            tracing::warn!(dir = %"/data", error = %io::Error::from_raw_os_error(1), "no locks here");
            tracing::error!("the engine stops");
            tracing::info!("not said");
        });
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        let denied = "Operation not permitted (os error 1)";
        assert_eq!(
            text,
            format!("warning: no locks here; dir: /data; error: {denied}\nerror: the engine stops\n")
        );
    }
}
