//! The CUDA backend on the driver of `device/mock/`: `cargo xtask cuda-mock` builds that and runs these.
//!
//! A driver starts once per process and reads its settings then, so every test runs itself again as a process of its own
//! ([`scene`]).

mod compiler;
mod errors;
mod kernels;
mod order;
#[path = "../suite/mod.rs"]
mod suite;

use std::ffi::CString;
use std::process::{Command, Output};

/// Runs `body` in a process whose mock driver has these settings, and expects it to succeed.
fn scene(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if let Some(output) = scene_output(name, settings, body) {
        assert!(
            output.status.success(),
            "{settings:?}: {}\n{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// As [`scene`], and gives the process's output; nothing in that process itself.
fn scene_output(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var_os("TERRACE_MOCK_SCENE").is_some() {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("TERRACE_MOCK_SCENE", name).envs(settings.iter().copied());
    let output = command.output().unwrap();
    let ran = String::from_utf8_lossy(&output.stdout).contains("running 1 test");
    assert!(ran, "`{name}` is the test's path: {output:?}");
    Some(output)
}

/// How often the mock driver's function was called.
fn calls(function: &str) -> i64 {
    let function = CString::new(function).unwrap();
    // SAFETY: a name that ends in a zero; the driver is loaded already.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: the handle was just opened.
    let counter = unsafe { libc::dlsym(driver, c"terrace_mock_calls".as_ptr()) };
    assert!(!counter.is_null(), "the driver is the mock");
    // SAFETY: the mock defines it so.
    let counter: extern "C" fn(*const libc::c_char) -> libc::c_long = unsafe { std::mem::transmute(counter) };
    counter(function.as_ptr())
}
