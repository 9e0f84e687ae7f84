//! What a user sees while it runs: a bar on a terminal, nothing elsewhere.

use crate::interrupt::Interrupt;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use terrace_aio::bench::load::Watch;

/// A bar and the user's wish to stop.
#[derive(Debug)]
pub struct Meter {
    pub interrupt: Interrupt,
    bar: ProgressBar,
    length_ms: u64,
}

impl Meter {
    /// Draws on standard error if that is a terminal.
    pub fn new(interrupt: Interrupt) -> Self {
        let is_seen = std::io::stderr().is_terminal();
        let target = if is_seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        Self { interrupt, bar, length_ms: 0 }
    }

    /// Begins a phase of this many seconds.
    pub fn start(&mut self, what: &str, seconds: f64) {
        self.begin(what, (seconds * 1e3) as u64);
    }

    /// Begins a phase whose length is not known.
    pub fn start_pass(&mut self, what: &str) {
        self.begin(what, 0);
    }

    fn begin(&mut self, what: &str, length_ms: u64) {
        self.length_ms = length_ms;
        let template = if length_ms > 0 { "{msg} {wide_bar} {percent}% {prefix}" } else { "{msg} {prefix}" };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        self.bar.set_length(length_ms.max(1));
        self.bar.set_prefix("");
        self.bar.set_message(what.to_owned());
        self.bar.reset();
    }

    /// Takes the bar away.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl Watch for Meter {
    fn progress(&mut self, measured: Duration, bytes: u64) {
        if self.bar.is_hidden() {
            return;
        }
        let rate = bytes as f64 / 1e9 / measured.as_secs_f64().max(1e-9);
        self.bar.set_prefix(format!("{rate:.2} GB/s"));
        if self.length_ms > 0 {
            self.bar.set_position(measured.as_millis() as u64);
        }
    }

    fn stop_flag(&self) -> &AtomicBool {
        self.interrupt.flag()
    }
}
