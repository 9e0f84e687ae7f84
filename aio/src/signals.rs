//! Signals that ask a process to stop, and one that would stop it for a file that is too large.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::io;
use std::sync::Arc;

/// Has `handler` called, on a thread of its own, for every SIGINT, SIGTERM and SIGHUP from here on; not for SIGHUP where the process was
/// started to ignore it, as by `nohup`.
///
/// # Errors
/// The signals cannot be caught, or no thread can be started.
pub fn on_stop(mut handler: impl FnMut() + Send + 'static) -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let hangup = (!ignores(&status, SIGHUP)).then_some(SIGHUP);
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hangup))?;
    let thread = std::thread::Builder::new().name("signals".into());
    thread.spawn(move || signals.forever().for_each(|_| handler()))?;
    Ok(())
}

/// Has a write beyond the limit of a file's size (`ulimit -f`) fail as one to a full disk does, where it would end the process without a word.
///
/// # Errors
/// The signal cannot be caught.
pub fn report_large_files() -> io::Result<()> {
    // Whoever writes is told all the same.
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Whether a process with this `/proc/<pid>/status` ignores a signal.
fn ignores(status: &str, signal: i32) -> bool {
    has_bit(status, "SigIgn:", signal as u32 - 1)
}

/// Whether the mask after `name` in a `/proc/<pid>/status` has a bit; not, if there is no such mask.
pub fn has_bit(status: &str, name: &str, bit: u32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_what_is_ignored() {
        let status =
            "Name:\tx\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000004002\n";
        assert!(ignores(status, SIGHUP) && ignores(status, 13));
        assert!(!ignores(status, SIGINT) && !ignores(status, SIGTERM) && !ignores("", SIGHUP));
    }
}
