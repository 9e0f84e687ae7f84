//! Threads that stay on one core.
//!
//! A thread that moves leaves its caches behind and, on a machine with several memory nodes, what it has touched first. One that
//! stays cannot make way for other programs that want the same core.

/// Keeps the calling thread on one of the cores that it may run on: the `index`-th, counted on from the first after the last. False
/// where the system does not say which these are, or does not allow it; the thread then runs wherever it did before.
pub fn stay_on_core(index: usize) -> bool {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let core = index.checked_rem(cores.len()).map(|place| cores[place]);
    core.is_some_and(core_affinity::set_for_current)
}

/// What threads of a pool do when they start, by index: if they are `pinned`, [each stays](stay_on_core).
pub fn on_start(pinned: bool) -> impl Fn(usize) + Send + Sync + 'static {
    move |index| {
        let _ = pinned && stay_on_core(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn threads_stay_on_a_core() {
        let allowed = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("Linux says");
            let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            line.expect("it is there").trim().to_owned()
        };
        let all = core_affinity::get_core_ids().expect("Linux says");
        for index in 0..all.len() + 1 {
            let stayed = std::thread::spawn(move || stay_on_core(index).then(allowed)).join();
            assert_eq!(stayed.expect("no panic"), Some(all[index % all.len()].id.to_string()));
        }
        assert_eq!(core_affinity::get_core_ids().map(|cores| cores.len()), Some(all.len()), "others do not");
    }
}
