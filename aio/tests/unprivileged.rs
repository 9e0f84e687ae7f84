//! The engines where less is allowed: as an ordinary user, with little lockable memory, and with io_uring forbidden.
//!
//! Each test runs this binary again, as the process it is about; there only [`restricted_process`] runs, and `ROLE`
//! says what is to hold.

#[path = "support/seccomp.rs"]
mod seccomp;

use seccomp::{instruction, limit, obey, ok};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use terrace_aio::engine::{EngineChoice, EngineConfig, open_default};
use terrace_aio::{BufHome, IoBuf, IoEngine, IoErrorKind, OpenMode, Request};

/// The variable that holds the role of the process.
const ROLE: &str = "TERRACE_AIO_TEST_ROLE";

/// The variable that holds the directory it may write to.
const PLACE: &str = "TERRACE_AIO_TEST_PLACE";

/// Users that own nothing. The kernel counts locked memory by user: each test has one of its own.
const NOBODIES: [libc::uid_t; 4] = [65_534, 65_501, 65_502, 65_503];

/// Bytes that are registered.
const REGISTERED_BYTES: usize = 64 << 20;

/// What is taken from a process before it starts.
#[derive(Debug, Clone, Copy, Default)]
struct Restrictions {
    /// It is this user's, without capabilities, where whoever runs the tests is root.
    user: Option<libc::uid_t>,
    /// Bytes it may lock.
    memlock_bytes: Option<u64>,
    /// Which of the io_uring system calls, from one to another, fail with what.
    uring: Option<(libc::c_long, libc::c_long, i32)>,
}

#[test]
fn an_ordinary_user_under_the_usual_memlock_limit() {
    run_as("user", user_with_memlock(NOBODIES[0], 8 << 20));
}

#[test]
fn an_ordinary_user_who_may_lock_little() {
    run_as("user", user_with_memlock(NOBODIES[1], 64 << 10));
}

#[test]
fn an_ordinary_user_who_may_lock_nothing() {
    run_as("lockless", user_with_memlock(NOBODIES[2], 0));
}

#[test]
fn io_uring_forbidden_by_a_filter() {
    run_as("forbidden", Restrictions { uring: all_calls(libc::EPERM), ..Restrictions::default() });
}

#[test]
fn io_uring_unknown_to_the_kernel() {
    run_as("unknown", Restrictions { uring: all_calls(libc::ENOSYS), ..Restrictions::default() });
}

/// A ring can be made and not used: the engine was, and no request of it ever succeeded.
#[test]
fn entering_forbidden_by_a_filter() {
    let uring = Some((libc::SYS_io_uring_enter, libc::SYS_io_uring_enter, libc::EPERM));
    run_as("forbidden", Restrictions { uring, ..Restrictions::default() });
}

#[test]
fn entering_forbidden_while_an_engine_works() {
    run_as("late", Restrictions::default());
}

#[test]
fn everything_at_once() {
    let restrictions = Restrictions { uring: all_calls(libc::EPERM), ..user_with_memlock(NOBODIES[3], 0) };
    run_as("forbidden", restrictions);
}

fn user_with_memlock(user: libc::uid_t, memlock_bytes: u64) -> Restrictions {
    Restrictions { user: Some(user), memlock_bytes: Some(memlock_bytes), uring: None }
}

fn all_calls(errno: i32) -> Option<(libc::c_long, libc::c_long, i32)> {
    Some((libc::SYS_io_uring_setup, libc::SYS_io_uring_register, errno))
}

/// Runs this binary in a role, under restrictions; fails if what it checks does not hold.
fn run_as(role: &str, mut restrictions: Restrictions) {
    let place = tempfile::tempdir().unwrap();
    // SAFETY: a system call without memory.
    if unsafe { libc::geteuid() } != 0 {
        restrictions.user = None;
    }
    if let Some(user) = restrictions.user {
        std::os::unix::fs::chown(place.path(), Some(user), Some(user)).unwrap();
    }
    // Not by its path, which may lie in a directory that is closed to others.
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "restricted_process", "--ignored", "--nocapture"]);
    command.env(ROLE, role).env(PLACE, place.path()).current_dir("/");
    let filter = restrictions.uring.map(refuse_uring);
    // SAFETY: between fork and exec `restrict` only makes system calls, on memory that was made before.
    unsafe { command.pre_exec(move || restrict(restrictions, filter.as_ref())) };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{restrictions:?}: {}", output.status);
    assert!(text.contains(&format!("{role}: everything holds")), "the process has not run its checks");
}

#[test]
#[ignore = "the other tests start it, under restrictions"]
fn restricted_process() {
    let (Ok(role), Some(place)) = (std::env::var(ROLE), std::env::var_os(PLACE)) else {
        println!("not started by another test: there is nothing to check");
        return;
    };
    let place = Path::new(&place);
    match role.as_str() {
        "user" => as_user(place),
        "lockless" => as_lockless(place),
        "forbidden" => without_uring(place, "it is forbidden here"),
        "late" => forbidden_late(place),
        "unknown" => without_uring(place, "this kernel does not have it"),
        role => panic!("no such role: {role}"),
    }
    println!("{role}: everything holds");
}

fn as_user(place: &Path) {
    let choices = [
        (EngineChoice::Auto, "uring"),
        (EngineChoice::Uring, "uring"),
        (EngineChoice::Threads, "threads"),
        #[cfg(feature = "tokio_uring")]
        (EngineChoice::TokioUring, "tokio_uring"),
    ];
    for (choice, name) in choices {
        for register in [true, false] {
            let config = EngineConfig { choice, register, ..EngineConfig::default() };
            let engine = open_default(&config).unwrap();
            println!("{choice:?} opened {}", engine.name());
            assert_eq!(engine.name(), name);
            check_exact(&*engine, place);
            check_registered(&*engine, place);
        }
    }
}

/// Some kernels charge a ring to the memory a user may lock, others do not.
fn as_lockless(place: &Path) {
    let config = EngineConfig { choice: EngineChoice::Uring, ..EngineConfig::default() };
    match open_default(&config) {
        Ok(_) => as_user(place),
        Err(_) => without_uring(place, "the memlock limit (ulimit -l) is too low for it"),
    }
}

fn without_uring(place: &Path, why: &str) {
    let open = |choice| open_default(&EngineConfig { choice, ..EngineConfig::default() });
    let choices = [
        EngineChoice::Uring,
        #[cfg(feature = "tokio_uring")]
        EngineChoice::TokioUring,
    ];
    for choice in choices {
        let error = open(choice).unwrap_err().to_string();
        println!("{choice:?}: {error}");
        assert!(error.contains(why) && error.contains("io_uring"), "{error}");
        assert!(
            error.contains("the threads engine works everywhere"),
            "the message says what to do: {error}"
        );
    }
    let engine = open(EngineChoice::Auto).unwrap();
    assert_eq!(engine.name(), "threads");
    check_exact(&*engine, place);
    check_registered(&*engine, place);
}

/// Requests fail, none hangs, and the engine says why.
fn forbidden_late(place: &Path) {
    let config = EngineConfig { choice: EngineChoice::Uring, ..EngineConfig::default() };
    let Ok(engine) = open_default(&config) else { return };
    check_exact(&*engine, place);
    let path = place.join("late");
    let file = engine.open(&path, OpenMode::CreateNew { len: 1 << 20 }).unwrap();
    obey(&refuse_uring((libc::SYS_io_uring_enter, libc::SYS_io_uring_enter, libc::EPERM))).unwrap();
    for _ in 0..3 {
        let tickets: Vec<_> =
            (0..100).map(|i| engine.submit(Request::write(file, i * 4096, IoBuf::zeroed(4096)))).collect();
        for ticket in tickets {
            assert_eq!(ticket.wait().unwrap_err().kind, IoErrorKind::Closed);
        }
    }
    let said = engine.facts().fallbacks;
    assert!(
        said.iter().any(|said| said.contains("the engine has stopped") && said.contains("os error 1")),
        "{said:?}"
    );
    engine.close(file).unwrap();
    engine.remove(&path).unwrap();
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i >> 11) as u8).collect()
}

fn check_exact(engine: &dyn IoEngine, place: &Path) {
    let path = place.join("exact");
    let bytes = pattern(3_000_001);
    let file = engine.open(&path, OpenMode::CreateNew { len: bytes.len() as u64 }).unwrap();
    let mut buf = IoBuf::zeroed(bytes.len());
    buf.copy_from_slice(&bytes);
    engine.submit(Request::write(file, 0, buf)).wait().unwrap();
    engine.sync(file).wait().unwrap();
    for (offset, len) in [(0, bytes.len()), (1, 2_999_999), (4096, 1 << 20)] {
        let got = engine.submit(Request::read(file, offset as u64, IoBuf::zeroed(len))).wait().unwrap();
        assert!(got[..] == bytes[offset..offset + len], "{len} bytes at {offset}");
    }
    engine.close(file).unwrap();
    engine.remove(&path).unwrap();
}

/// Memory that lives as long as any buffer of it.
struct Memory {
    start: NonNull<u8>,
    _owner: IoBuf,
}

// SAFETY: the pointer is only used to make buffers, each of its own part.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl BufHome for Memory {
    fn give_back(&self, _: usize) {}
}

/// Registers more than most users may lock: granted or not, the memory works.
fn check_registered(engine: &dyn IoEngine, place: &Path) {
    const PART: usize = 1 << 20;
    let mut owner = IoBuf::zeroed(REGISTERED_BYTES);
    let start = NonNull::new(owner.as_mut_ptr()).unwrap();
    let home = Arc::new(Memory { start, _owner: owner });
    // SAFETY: `home` outlives the registration.
    let registration = unsafe { engine.register(start, REGISTERED_BYTES) };
    let facts = engine.facts();
    println!("registered: {}, {facts:?}", registration.is_some());
    let limit = memlock_limit();
    // SAFETY: a system call without memory.
    if unsafe { libc::geteuid() } != 0 {
        assert!(facts.registered_bytes <= limit, "{} registered of {limit}", facts.registered_bytes);
    }
    assert_eq!(registration.is_some(), facts.registered_bytes > 0);
    let part = |index: usize| {
        let home = Arc::clone(&home);
        // SAFETY: the part is aligned and initialized, as alive as its home, and used by one buffer at a time.
        unsafe { IoBuf::from_home(home.start.add(index * PART), PART, home, index) }
    };
    let path = place.join("registered");
    let bytes = pattern(8 * PART);
    let file = engine.open(&path, OpenMode::CreateNew { len: bytes.len() as u64 }).unwrap();
    let writes: Vec<_> = bytes
        .chunks(PART)
        .enumerate()
        .map(|(i, bytes)| {
            let mut buf = part(8 * i);
            buf.copy_from_slice(bytes);
            engine.submit(Request::write(file, (i * PART) as u64, buf))
        })
        .collect();
    writes.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    let reads: Vec<_> =
        (0..8).map(|i| engine.submit(Request::read(file, (i * PART) as u64, part(8 * i + 1)))).collect();
    for (ticket, bytes) in reads.into_iter().zip(bytes.chunks(PART)) {
        assert!(ticket.wait().unwrap()[..] == *bytes);
    }
    drop(registration);
    assert_eq!(engine.facts().registered_bytes, 0);
    engine.close(file).unwrap();
    engine.remove(&path).unwrap();
}

fn memlock_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a writable structure.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    limit.rlim_cur
}

/// A seccomp filter under which these system calls fail.
fn refuse_uring((first, last, errno): (libc::c_long, libc::c_long, i32)) -> [libc::sock_filter; 5] {
    let (first, last) = (first as u32, last as u32);
    [
        // The number of the system call is the first word of what a filter sees.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, first),
        instruction(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, last),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// Takes away what the restrictions say. Only system calls: it runs between fork and exec.
fn restrict(restrictions: Restrictions, filter: Option<&[libc::sock_filter; 5]>) -> io::Result<()> {
    if let Some(bytes) = restrictions.memlock_bytes {
        limit(libc::RLIMIT_MEMLOCK, bytes)?;
    }
    if let Some(user) = restrictions.user {
        // SAFETY: system calls without memory of ours.
        unsafe {
            ok(libc::setgroups(0, std::ptr::null()))?;
            ok(libc::setresgid(user, user, user))?;
            ok(libc::setresuid(user, user, user))?;
        }
    }
    filter.map_or(Ok(()), |filter| obey(filter))
}
