//! Ctrl-C: the first asks the run to stop after the step that is running, the second ends the process at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use terrace_aio::signals::on_stop;
use terrace_zero::{EngineError, ParamSpec, WeightSource};

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

/// Weights that are read until the user wants to stop: then reading fails, so that who loads them cleans up as after any failure.
#[derive(Debug)]
pub struct Interruptible<S> {
    source: S,
    interrupt: Interrupt,
}

impl<S> Interruptible<S> {
    /// `source`, until `interrupt` says so.
    pub fn new(source: S, interrupt: Interrupt) -> Self {
        Self { source, interrupt }
    }
}

impl<S: WeightSource> WeightSource for Interruptible<S> {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> terrace_zero::Result {
        if self.interrupt.requested() {
            return Err(EngineError::Interrupted);
        }
        self.source.read(param, start, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ones;

    impl WeightSource for Ones {
        fn read(&mut self, _: &ParamSpec, _: usize, out: &mut [f32]) -> terrace_zero::Result {
            out.fill(1.0);
            Ok(())
        }
    }

    #[test]
    fn weights_are_read_until_the_user_stops_it() {
        let interrupt = Interrupt::default();
        let mut source = Interruptible::new(Ones, interrupt.clone());
        let (param, mut out) = (ParamSpec::new("w", &[2]), [0.0; 2]);
        source.read(&param, 0, &mut out).unwrap();
        assert_eq!(out, [1.0; 2]);
        interrupt.flag().store(true, Ordering::SeqCst);
        out.fill(0.0);
        assert!(matches!(source.read(&param, 0, &mut out), Err(EngineError::Interrupted)));
        assert_eq!(out, [0.0; 2], "nothing was read");
    }
}
