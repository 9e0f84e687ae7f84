//! Ctrl-C: the first asks the run to stop after the step that is running, the second ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use terrace_aio::signals::on_stop;

/// Whether the user wants to stop.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for SIGINT, SIGTERM and, without `nohup`, SIGHUP. Where they cannot be caught, they end the process as ever; the state on disk
    /// is consistent all the same. A process has one handler of signals, so everything that it runs hears of the same.
    pub fn listen() -> Self {
        static LISTENING: OnceLock<Interrupt> = OnceLock::new();
        LISTENING.get_or_init(Self::catch).clone()
    }

    fn catch() -> Self {
        let interrupt = Self::default();
        let flag = interrupt.clone();
        let caught = on_stop(move || {
            if flag.0.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
            eprintln!("\nstopping after this step; once more to stop at once");
        });
        if let Err(error) = caught {
            tracing::warn!(%error, "interrupts are not caught");
        }
        interrupt
    }

    /// Whether the user has asked to stop.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// The flag itself, for the engine.
    pub fn flag(&self) -> Arc<AtomicBool> {
        self.0.clone()
    }
}
