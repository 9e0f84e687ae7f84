//! Fails requests on purpose: at random from a seed, or exactly the n-th one.
//!
//! A request that is made to fail never reaches the engine below: nothing of it happens. For writes that happen in
//! part, use the simulated disk and cut its power.

use super::relay::Relay;
use super::{Action, pass_files_on};
use crate::random::Random;
use crate::{FileId, IoEngine, IoError, IoErrorKind, Request, Ticket};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Results that wait for their delay before `submit` blocks.
const DELAYED_MAX: usize = 1024;

/// Which requests fail by chance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultConfig {
    /// Determines which requests are hit, for a given order of submission.
    pub seed: u64,
    /// One read in this many fails with EIO; 0 for none.
    pub read_error_one_in: u32,
    /// One write in this many fails with EIO; 0 for none.
    pub write_error_one_in: u32,
    /// One write in this many fails with ENOSPC; 0 for none.
    pub no_space_one_in: u32,
    /// One request in this many is reported late; 0 for none.
    pub delay_one_in: u32,
    /// How late at most.
    pub delay_max: Duration,
}

/// Injects errors and delays.
#[derive(Debug)]
pub struct FaultLayer {
    /// Started with the first delay. Declared before the engine below, which its results come from.
    relay: OnceLock<Relay>,
    upstream: Arc<dyn IoEngine>,
    config: FaultConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    random: Random,
    /// Requests seen, by action.
    counts: BTreeMap<Action, u64>,
    /// What the n-th request of an action fails with.
    planned: BTreeMap<(Action, u64), IoErrorKind>,
    injected: u64,
}

enum Verdict {
    Pass,
    Fail(IoErrorKind),
    Delay(Duration),
}

impl FaultLayer {
    /// Injects what `config` says into requests for `upstream`.
    pub fn new(upstream: Arc<dyn IoEngine>, config: FaultConfig) -> Self {
        let state = State {
            random: Random::new(config.seed),
            counts: BTreeMap::new(),
            planned: BTreeMap::new(),
            injected: 0,
        };
        Self { relay: OnceLock::new(), upstream, config, state: Mutex::new(state) }
    }

    /// Makes the `nth` request of that action from now on fail; 0 is the next one.
    pub fn fail_nth(&self, action: Action, nth: u64, kind: IoErrorKind) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let count = state.counts.get(&action).copied().unwrap_or(0);
        state.planned.insert((action, count + nth), kind);
    }

    /// Requests failed on purpose so far.
    pub fn injected(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).injected
    }

    fn judge(&self, action: Action) -> Verdict {
        let mut guard = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        let count = state.counts.entry(action).or_insert(0);
        let index = *count;
        *count += 1;
        let config = &self.config;
        let (io_one_in, space_one_in) = match action {
            Action::Read => (config.read_error_one_in, 0),
            Action::Write => (config.write_error_one_in, config.no_space_one_in),
            Action::Sync => (0, 0),
        };
        // All dice are thrown for every request, so that one knob does not change what another one hits.
        let io_fails = state.random.one_in(io_one_in);
        let space_fails = state.random.one_in(space_one_in);
        let is_late = state.random.one_in(config.delay_one_in);
        let delay = config.delay_max.mul_f64(state.random.below(1 << 20) as f64 / f64::from(1 << 20));
        let failure = state
            .planned
            .remove(&(action, index))
            .or(io_fails.then_some(IoErrorKind::Device))
            .or(space_fails.then_some(IoErrorKind::NoSpace));
        match failure {
            Some(kind) => {
                state.injected += 1;
                Verdict::Fail(kind)
            }
            None if is_late => Verdict::Delay(delay),
            None => Verdict::Pass,
        }
    }

    fn delayed(&self, ticket: Ticket, delay: Duration) -> Ticket {
        let relay = self.relay.get_or_init(|| Relay::new("aio-fault", DELAYED_MAX));
        relay.forward(ticket, Instant::now() + delay)
    }

    fn path_of(&self, file: Option<FileId>) -> PathBuf {
        file.and_then(|file| self.upstream.path(file)).unwrap_or_default()
    }
}

impl IoEngine for FaultLayer {
    pass_files_on!(upstream);

    fn submit(&self, request: Request) -> Ticket {
        let action = Action::from(request.kind);
        match self.judge(action) {
            Verdict::Pass => self.upstream.submit(request),
            Verdict::Delay(delay) => self.delayed(self.upstream.submit(request), delay),
            Verdict::Fail(kind) => {
                let doing = if action == Action::Read { "reading" } else { "writing" };
                let first = request.segments.first();
                let path = self.path_of(first.map(|s| s.file));
                let (offset, len) = first.map_or((0, 0), |s| (s.offset, s.len as u64));
                drop(request);
                Ticket::ready(Err(made_error(kind, doing, &path, offset, len)))
            }
        }
    }

    fn sync(&self, file: FileId) -> Ticket {
        match self.judge(Action::Sync) {
            Verdict::Pass => self.upstream.sync(file),
            Verdict::Delay(delay) => self.delayed(self.upstream.sync(file), delay),
            Verdict::Fail(kind) => {
                Ticket::ready(Err(made_error(kind, "syncing", &self.path_of(Some(file)), 0, 0)))
            }
        }
    }
}

/// The error as the operating system would have said it, where it has a word for it.
fn made_error(kind: IoErrorKind, doing: &'static str, path: &Path, offset: u64, len: u64) -> IoError {
    let errno = match kind {
        IoErrorKind::Device => libc::EIO,
        IoErrorKind::NoSpace => libc::ENOSPC,
        IoErrorKind::Denied => libc::EROFS,
        _ => return IoError::new(kind, doing, path, offset, len, "injected fault".to_owned()),
    };
    IoError::from_os(doing, path, offset, len, &io::Error::from_raw_os_error(errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{SimConfig, SimEngine};
    use crate::{IoBuf, OpenMode};

    fn over_sim(config: FaultConfig) -> (FaultLayer, FileId) {
        let layer = FaultLayer::new(Arc::new(SimEngine::new(SimConfig::default())), config);
        let file = layer.open("/a".as_ref(), OpenMode::CreateNew { len: 4096 }).unwrap();
        (layer, file)
    }

    #[test]
    fn exactly_the_nth_write_fails() {
        let (layer, file) = over_sim(FaultConfig::default());
        layer.fail_nth(Action::Write, 2, IoErrorKind::NoSpace);
        for i in 0..5 {
            let result = layer.submit(Request::write(file, 8, IoBuf::zeroed(16))).wait();
            match result {
                Ok(_) => assert_ne!(i, 2),
                Err(error) => {
                    assert_eq!((i, error.kind, error.offset, error.len), (2, IoErrorKind::NoSpace, 8, 16));
                    assert_eq!(error.path, Path::new("/a"));
                }
            }
        }
        layer.fail_nth(Action::Sync, 0, IoErrorKind::Device);
        assert_eq!(layer.sync(file).wait().unwrap_err().kind, IoErrorKind::Device);
        layer.sync(file).wait().unwrap();
        assert_eq!(layer.injected(), 2);
    }

    #[test]
    fn the_seed_determines_what_fails() {
        let run = |seed| -> Vec<bool> {
            let config = FaultConfig { seed, read_error_one_in: 3, ..FaultConfig::default() };
            let (layer, file) = over_sim(config);
            (0..50).map(|_| layer.submit(Request::read(file, 0, IoBuf::zeroed(8))).wait().is_ok()).collect()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
        assert!(run(1).contains(&true) && run(1).contains(&false));
    }
}
