//! Progress on stderr: a bar where there is a terminal, now and then a line where there is none.

use crate::config::ByteSize;
use crate::metrics::StepMetrics;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Time between lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Weight of the newest step in the running mean of step times.
const NEWEST: f64 = 0.2;

/// Shows how a run goes.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
    step_seconds: Option<f64>,
}

impl Progress {
    /// Progress of a run of `total` steps of which `done` are done.
    pub fn new(total: u64, done: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            bar.set_position(done);
            let style = ProgressStyle::with_template("{bar:20.cyan/dim} {msg}");
            // The template is a constant; a bar without style would still count.
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("━━╌"));
            }
            bar
        });
        Self { total, bar, last_line: None, step_seconds: None }
    }

    /// Progress that says nothing.
    pub fn silent() -> Self {
        Self { total: 0, bar: Some(ProgressBar::hidden()), last_line: None, step_seconds: None }
    }

    /// A step is done.
    pub fn step(&mut self, metrics: &StepMetrics) {
        let seconds = match self.step_seconds {
            None => metrics.step_seconds,
            Some(mean) => mean + NEWEST * (metrics.step_seconds - mean),
        };
        self.step_seconds = Some(seconds);
        let left = seconds * self.total.saturating_sub(metrics.step) as f64;
        let text = step_line(metrics, self.total, left);
        if let Some(bar) = &self.bar {
            bar.set_position(metrics.step);
            bar.set_message(text);
            return;
        }
        let due = self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        if due || metrics.step >= self.total {
            self.last_line = Some(Instant::now());
            eprintln!("{text}");
        }
    }

    /// A line beside the progress.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// The run is over; the last line stays.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Shows how far many bytes are, where there is a terminal.
#[derive(Debug)]
pub struct ByteProgress {
    what: String,
    bar: Option<ProgressBar>,
    began: Instant,
}

impl ByteProgress {
    /// Progress of `what` is being done.
    pub fn new(what: String) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
            // The template is a constant; a bar without style would still count.
            if let Ok(style) = ProgressStyle::with_template("{bar:20.cyan/dim} {msg}") {
                bar.set_style(style.progress_chars("━━╌"));
            }
            bar
        });
        Self { what, bar, began: Instant::now() }
    }

    /// `done` bytes of `total` are done.
    pub fn set(&self, done: u64, total: u64) {
        let Some(bar) = &self.bar else { return };
        bar.set_length(total);
        bar.set_position(done);
        let rate = ByteSize((done as f64 / self.began.elapsed().as_secs_f64().max(1e-9)) as u64);
        bar.set_message(format!("{}: {} of {} · {rate}/s", self.what, ByteSize(done), ByteSize(total)));
    }

    /// It is over; the line goes away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// One step in one line.
fn step_line(metrics: &StepMetrics, total: u64, left_seconds: f64) -> String {
    let mut parts = vec![format!("step {}/{total}", metrics.step)];
    parts.push(
        metrics
            .loss
            .filter(|loss| loss.is_finite())
            .map_or("loss –".into(), |loss| format!("loss {loss:.4}")),
    );
    parts.push(format!("{} tok/s", count(metrics.tokens_per_second)));
    let rate = |bytes: u64| ByteSize((bytes as f64 / metrics.step_seconds.max(1e-9)) as u64);
    if metrics.disk_read_bytes + metrics.disk_write_bytes > 0 {
        let (read, write) = (rate(metrics.disk_read_bytes), rate(metrics.disk_write_bytes));
        parts.push(format!("disk {read}/s in, {write}/s out"));
    }
    for (name, bytes) in [("host", metrics.host_peak_bytes), ("device", metrics.device_peak_bytes)] {
        if bytes > 0 {
            parts.push(format!("{name} {}", ByteSize(bytes)));
        }
    }
    if let (Some(fraction), Some(bound)) = (metrics.floor_fraction, &metrics.bound_by) {
        parts.push(format!("{:.0} % of floor (bound by {bound})", fraction * 100.0));
    }
    if metrics.step < total {
        parts.push(format!("{} left", duration(left_seconds)));
    }
    parts.join(" · ")
}

/// `850`, `12.3k`, `4.56M`: three digits.
pub fn count(value: f64) -> String {
    let (value, unit) = match value {
        v if v >= 999.5e3 => (v / 1e6, "M"),
        v if v >= 999.5 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let digits = if value < 9.995 && !(unit.is_empty() && value.fract() == 0.0) {
        2
    } else {
        usize::from(value < 99.95 && !unit.is_empty())
    };
    format!("{value:.digits$}{unit}")
}

/// `42s`, `3m 12s`, `5h 07m`, `3d 04h`.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_in_a_line() {
        let metrics = StepMetrics {
            step: 12,
            loss: Some(3.21449),
            tokens_per_second: 1234.0,
            step_seconds: 2.0,
            disk_read_bytes: 4 << 30,
            disk_write_bytes: 1 << 30,
            host_peak_bytes: 3 << 30,
            floor_fraction: Some(0.876),
            bound_by: Some("disk".into()),
            ..Default::default()
        };
        let expected = "step 12/200 · loss 3.2145 · 1.23k tok/s · disk 2.00 GiB/s in, 512 MiB/s out · host 3.00 GiB · \
            88 % of floor (bound by disk) · 6m 16s left";
        assert_eq!(step_line(&metrics, 200, 376.0), expected);
        let bare = StepMetrics { step: 2, loss: Some(f64::NAN), ..Default::default() };
        assert_eq!(step_line(&bare, 2, 0.0), "step 2/2 · loss – · 0 tok/s");
    }

    #[test]
    fn numbers_for_people() {
        for (value, text) in [
            (0.0, "0"),
            (0.5, "0.50"),
            (7.25, "7.25"),
            (850.0, "850"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.00M"),
            (123e6, "123M"),
        ] {
            assert_eq!(count(value), text);
        }
        for (seconds, text) in
            [(0.4, "0s"), (59.4, "59s"), (192.0, "3m 12s"), (18_420.0, "5h 07m"), (273_600.0, "3d 04h")]
        {
            assert_eq!(duration(seconds), text);
        }
    }
}
