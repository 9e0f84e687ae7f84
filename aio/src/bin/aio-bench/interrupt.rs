//! Ctrl-C: the first asks for what was measured so far, the second ends the process at once.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Whether the user wants to stop, and which named files must not stay behind.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
    leftovers: Arc<Mutex<Vec<PathBuf>>>,
}

impl Interrupt {
    /// Listens for SIGINT, SIGTERM and SIGHUP.
    pub fn listen() -> Self {
        let interrupt = Self::default();
        let handler = interrupt.clone();
        let caught = ctrlc::set_handler(move || {
            if handler.flag.swap(true, Ordering::SeqCst) {
                handler.remove_leftovers();
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

    /// Removes `path` even if the process is ended at once.
    pub fn remember(&self, path: PathBuf) {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).push(path);
    }

    /// Removes what was remembered.
    pub fn remove_leftovers(&self) {
        for path in self.leftovers.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // Nothing can be done about a file that cannot be removed.
            let _ = std::fs::remove_file(path);
        }
    }
}
