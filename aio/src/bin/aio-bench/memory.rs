//! Whether the blocks in flight fit in memory: they are all in use at once, and a machine that swaps measures nothing.

use crate::failure::Failure;
use crate::files::FilePlan;
use crate::measure::Settings;
use crate::units;
use terrace_aio::memory::HostMemory;

/// The part of the memory available that blocks take at most: one in this many bytes.
const AVAILABLE_ONE_IN: u64 = 2;

/// Bytes of the blocks in flight in `dirs` files of `data_bytes` each.
pub fn in_flight_bytes(settings: &Settings, data_bytes: u64, dirs: usize) -> u64 {
    let blocks = data_bytes / settings.block_bytes;
    blocks.min(settings.queue_depth as u64).max(1) * settings.block_bytes * dirs as u64
}

/// Whether so many bytes are too many where so many are available, if that is known.
pub fn is_too_much(bytes: u64, available: Option<u64>) -> bool {
    available.is_some_and(|available| bytes > available / AVAILABLE_ONE_IN)
}

/// Refuses settings with which the blocks in flight are too much for the memory that is available.
pub fn check_settings(settings: &Settings, plan: &FilePlan) -> Result<(), Failure> {
    let bytes = in_flight_bytes(settings, plan.data_bytes, plan.dirs.len());
    check(bytes, "--queue-depth or --block-size")
}

/// Refuses blocks that are too much for the memory that is available. `flags` say how many and how large they are.
pub fn check(bytes: u64, flags: &str) -> Result<(), Failure> {
    match HostMemory::now().available {
        Some(free) if is_too_much(bytes, Some(free)) => Err(Failure::failed(format!(
            "the blocks in flight take {} of memory, more than half of the {} that are available: lower {flags}",
            units::about(bytes),
            units::about(free)
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_aio::engine::EngineChoice;

    #[test]
    fn blocks_take_half_of_the_memory_at_most() {
        let settings = Settings {
            engine: EngineChoice::Auto,
            block_bytes: 1 << 20,
            queue_depth: 32,
            rings: 1,
            threads: None,
            register: true,
            sq_poll: false,
            io_poll: false,
            direct: true,
        };
        let bytes = |data_bytes, dirs| in_flight_bytes(&settings, data_bytes, dirs);
        assert_eq!((bytes(1 << 30, 1), bytes(1 << 30, 3)), (32 << 20, 96 << 20));
        assert_eq!(bytes(4 << 20, 2), 8 << 20, "a file has no more blocks than it has");
        let available = Some(64 << 20);
        assert!(!is_too_much(32 << 20, available) && is_too_much((32 << 20) + 1, available));
        assert!(!is_too_much(u64::MAX, None));
    }
}
