//! Ctrl-C: the first asks for what was measured so far, the second ends the process at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use terrace_aio::signals::on_stop;

/// Whether the user wants to stop. Files that are not to be kept have no name any more, so nothing stays behind.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
}

impl Interrupt {
    /// Listens for SIGINT, SIGTERM and, without `nohup`, SIGHUP.
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let handler = interrupt.clone();
        let caught = on_stop(move || {
            if handler.flag.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
            eprintln!("\naio-bench: stopping; once more to stop at once");
        });
        if let Err(error) = caught {
            eprintln!("aio-bench: interrupts are not caught: {error}");
        }
        interrupt
    }

    /// Whether the user has asked to stop.
    pub fn requested(&self) -> bool {
        self.flag.load(Ordering::SeqCst)
    }

    /// The flag itself.
    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }
}
