//! What a user sees while it runs: a bar on a terminal, nothing elsewhere.

use crate::interrupt::Interrupt;
use crate::load::Watch;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A bar and the user's wish to stop.
#[derive(Debug)]
pub struct Meter {
    pub interrupt: Interrupt,
    bar: ProgressBar,
}

impl Meter {
    /// Draws on standard error if that is a terminal.
    pub fn new(interrupt: Interrupt) -> Self {
        let is_seen = std::io::stderr().is_terminal();
        let target = if is_seen { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent}% {prefix}") {
            bar.set_style(style);
        }
        Self { interrupt, bar }
    }

    /// Begins a phase of about this many seconds.
    pub fn start(&self, what: &str, seconds: f64) {
        self.bar.reset();
        self.bar.set_length((seconds * 1e3) as u64);
        self.bar.set_message(what.to_owned());
        self.bar.set_prefix("");
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
        self.bar.set_position(measured.as_millis() as u64);
    }

    fn stop_flag(&self) -> &AtomicBool {
        self.interrupt.flag()
    }
}
