//! What a process may not do: limits and system calls that fail, for tests that start it.

use std::io;

/// Whether a system call succeeded.
pub fn ok(status: i32) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// An instruction of a filter.
pub fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

/// Lets this process have no more of a resource. Only a system call: it may run between fork and exec.
pub fn limit(resource: libc::__rlimit_resource_t, most: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: a system call on a structure that outlives it.
    ok(unsafe { libc::setrlimit(resource, &raw const limit) })
}

/// Has this process, all its threads, and what it starts, live under a filter. Only system calls: it may run between fork and exec.
pub fn obey(filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the filter outlives the calls, and the kernel only reads it.
    unsafe {
        ok(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
        ok(libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) as i32)
    }
}
