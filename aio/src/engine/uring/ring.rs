//! Setting a ring up with what this kernel has, and waiting on it.

use io_uring::{IoUring, Probe, opcode};
use std::io;

/// How a ring is to be set up.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Wish {
    /// Submissions that can wait to be entered.
    pub entries: u32,
    /// Completions that can wait to be reaped without the kernel keeping them aside.
    pub completions: u32,
    pub sq_poll: bool,
    pub io_poll: bool,
}

/// How long SQPOLL's kernel thread spins before it sleeps, in milliseconds.
const SQ_POLL_IDLE_MS: u32 = 50;

/// A ring, and by the kernel's names what it was set up with.
pub(super) fn set_up(wish: Wish) -> io::Result<(IoUring, Vec<&'static str>)> {
    // The best first. Kernels refuse flags that they do not know with EINVAL: DEFER_TASKRUN came with 6.1,
    // SINGLE_ISSUER with 6.0, COOP_TASKRUN with 5.19. SQPOLL may be forbidden to users before 5.11.
    let attempts: &[&[&'static str]] = if wish.sq_poll {
        &[&["sqpoll", "single_issuer"], &["sqpoll"]]
    } else {
        &[&["single_issuer", "defer_taskrun"], &["coop_taskrun"], &[]]
    };
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for flags in attempts {
        match build(wish, flags) {
            Ok(mut ring) => {
                check_features(wish, &ring)?;
                check_operations(&ring)?;
                check_entering(wish, &mut ring)?;
                return Ok((ring, flags.to_vec()));
            }
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

fn build(wish: Wish, flags: &[&str]) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_clamp().setup_cqsize(wish.completions.max(wish.entries));
    if wish.io_poll {
        builder.setup_iopoll();
    }
    for flag in flags {
        match *flag {
            "sqpoll" => builder.setup_sqpoll(SQ_POLL_IDLE_MS),
            "single_issuer" => builder.setup_single_issuer(),
            // With the flag, entering without a wait lets completions through too: the driver does so while it waits on
            // another ring.
            "defer_taskrun" => builder.setup_defer_taskrun().setup_taskrun_flag(),
            "coop_taskrun" => builder.setup_coop_taskrun(),
            other => unreachable!("{other} is not among the attempts"),
        };
    }
    builder.build(wish.entries)
}

/// Before Linux 5.11 a kernel thread that polls for submissions takes registered files alone: anything else fails with EBADF.
fn check_features(wish: Wish, ring: &IoUring) -> io::Result<()> {
    if wish.sq_poll && !ring.params().is_feature_sqpoll_nonfixed() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "polling for submissions needs Linux 5.11"));
    }
    Ok(())
}

fn check_operations(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
    ];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

/// A filter may let rings be made and forbid `io_uring_enter`: an operation that does nothing finds out.
fn check_entering(wish: Wish, ring: &mut IoUring) -> io::Result<()> {
    if wish.io_poll {
        // Nothing but transfers can be polled for; the ring beside it has tried.
        return Ok(());
    }
    // SAFETY: the entry points to nothing.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.map_err(io::Error::other)?;
    while ring.completion().next().is_none() {
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// `struct io_uring_getevents_arg` with the minimum wait that Linux 6.12 added (see `io_uring_enter(2)`).
#[repr(C)]
struct WaitArgument {
    sigmask: u64,
    sigmask_bytes: u32,
    min_wait_us: u32,
    timeout: u64,
}

const ENTER_GETEVENTS: u32 = 1;
const ENTER_SQ_WAKEUP: u32 = 1 << 1;
const ENTER_EXT_ARG: u32 = 1 << 3;

/// Submits, and sleeps until `want` completions are there or, once `min_wait_us` is over, at least one.
/// The kernel must have `IORING_FEAT_MIN_TIMEOUT`.
pub(super) fn submit_and_gather(ring: &mut IoUring, want: u32, min_wait_us: u32) -> io::Result<()> {
    let mut submissions = ring.submission();
    submissions.sync();
    let (to_submit, needs_wakeup) = (submissions.len(), submissions.need_wakeup());
    drop(submissions);
    let to_submit = u32::try_from(to_submit).map_err(io::Error::other)?;
    let mut flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
    if needs_wakeup {
        flags |= ENTER_SQ_WAKEUP;
    }
    let argument = WaitArgument { sigmask: 0, sigmask_bytes: 0, min_wait_us, timeout: 0 };
    // SAFETY: the argument has the layout the flag promises and outlives the call; the entries that are submitted keep
    // the promises made when they were pushed.
    unsafe { ring.submitter().enter(to_submit, want, flags, Some(&argument)) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use io_uring::types;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    #[test]
    fn submitting_without_waiting_lets_completions_through() {
        let mut byte = 0_u8;
        let (reader, mut writer) = io::pipe().unwrap();
        // Where io_uring is forbidden there is nothing to try.
        let wish = Wish { entries: 4, completions: 8, ..Wish::default() };
        let Ok((mut ring, _)) = set_up(wish) else { return };
        let entry = opcode::Read::new(types::Fd(reader.as_raw_fd()), &raw mut byte, 1).build();
        // SAFETY: the byte and the pipe outlive the ring.
        unsafe { ring.submission().push(&entry) }.unwrap();
        ring.submit().unwrap();
        writer.write_all(b"x").unwrap();
        let began = Instant::now();
        while ring.completion().is_empty() && began.elapsed() < Duration::from_secs(5) {
            ring.submit().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(ring.completion().next().map(|entry| entry.result()), Some(1));
    }
}
