//! Processor time of this process and of the thread that submits.

/// Seconds, user and system together.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuTime {
    /// Every thread of the process, and the kernel's workers for its rings.
    pub process: f64,
    /// The calling thread alone.
    pub thread: f64,
}

impl CpuTime {
    /// Used so far.
    pub fn now() -> Self {
        Self { process: seconds(libc::RUSAGE_SELF), thread: seconds(libc::RUSAGE_THREAD) }
    }

    /// Used since.
    pub fn until_now(self) -> Self {
        let now = Self::now();
        Self { process: now.process - self.process, thread: now.thread - self.thread }
    }
}

fn seconds(who: libc::c_int) -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills in the structure, which is plain numbers and valid as zeros too.
    let usage = unsafe {
        libc::getrusage(who, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
