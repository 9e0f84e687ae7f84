//! Signals between blocks: checkpointed block inputs and their gradients.
//!
//! With M micro-batches in a round and L blocks, L−1 boundaries carry a signal each way. All live in leases of one pool, sized for
//! the widest boundary:
//! - *on host:* every boundary's signal of every micro-batch stays, `(L−1)·M + 1` slots; in backward a gradient takes the slot
//!   that its boundary's checkpoint has left.
//! - *on disk:* only the M signals of the current boundary (and one spare) stay; a copy of each goes to a scratch volume
//!   through [`SPILL_SLOTS`] slots and is read back one micro-batch ahead.
//!
//! Gradients that wait for the last of several rounds take a slot each besides. Micro-batches are counted within their round.

use crate::Result;
use crate::lane::Signal;
use crate::rounds::Rounds;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use terrace_aio::{FileId, IoEngine, Urgency};
use terrace_device::Device;
use terrace_tiers::{Lease, PendingRead, Pool, Scratch, ScratchChunk, Striping};

/// Slots for signals on their way to or from disk: two writes or reads in flight and one in use.
pub(crate) const SPILL_SLOTS: usize = 3;

#[derive(Debug)]
pub(crate) struct Activations {
    pool: Pool,
    boundaries: usize,
    micro_batches: usize,
    /// Checkpoints in memory, by boundary and micro-batch.
    kept: HashMap<(usize, usize), Signal>,
    spill: Option<Spill>,
    /// How long compute has waited for the disk.
    waited: Duration,
}

#[derive(Debug)]
struct Spill {
    scratch: Scratch,
    pool: Pool,
    ahead: Option<((usize, usize), PendingRead)>,
    /// Of the signal that was written last, by boundary.
    bytes: Vec<usize>,
}

impl Spill {
    /// Starts to read a checkpoint that backward comes to next into a lease of its length.
    fn read(&self, (boundary, m): (usize, usize), micro_batches: usize, lease: Lease) -> Result<PendingRead> {
        Ok(self.scratch.read_as(Urgency::Soon, chunk(boundary, m, micro_batches), lease)?)
    }
}

impl Activations {
    /// Slots of the signal pool for a step of `rounds` over `boundaries` boundaries.
    pub(crate) fn slots(boundaries: usize, rounds: Rounds, on_disk: bool) -> usize {
        let checkpoints = if on_disk { rounds.together } else { boundaries * rounds.together };
        checkpoints + 1 + rounds.waiting()
    }

    /// Whether checkpoints at `boundary` go to disk, where any do: backward uses those at the last one at once.
    pub(crate) fn can_spill(boundary: usize, boundaries: usize) -> bool {
        boundary + 1 < boundaries
    }

    pub(crate) fn new(
        boundaries: usize,
        rounds: Rounds,
        signal_bytes: usize,
        device: &dyn Device,
        disk: Option<(&Arc<dyn IoEngine>, &Striping)>,
    ) -> Result<Self> {
        let slots = Self::slots(boundaries, rounds, disk.is_some());
        let micro_batches = rounds.together;
        let spill = match disk {
            None => None,
            Some((engine, striping)) => Some(Spill {
                scratch: Scratch::create(
                    engine,
                    striping,
                    "activations.bin",
                    boundaries * micro_batches,
                    signal_bytes,
                )?,
                pool: Pool::new("spilled activations", SPILL_SLOTS, signal_bytes)?
                    .pinned_for(device)
                    .registered_with(engine),
                ahead: None,
                bytes: vec![0; boundaries],
            }),
        };
        let pool = Pool::new("activations", slots, signal_bytes)?.pinned_for(device);
        Ok(Self { pool, boundaries, micro_batches, kept: HashMap::new(), spill, waited: Duration::ZERO })
    }

    /// A slot for a signal of `bytes`.
    pub(crate) fn slot(&self, bytes: usize) -> Lease {
        self.pool.acquire(bytes)
    }

    /// Keeps the signal at `boundary` as the next block's input and as a checkpoint for backward.
    pub(crate) fn keep(&mut self, boundary: usize, m: usize, mut signal: Signal) -> Result {
        if let Some(spill) = &mut self.spill
            && Self::can_spill(boundary, self.boundaries)
        {
            let lease = signal.into_host()?;
            spill.bytes[boundary] = lease.len();
            let began = Instant::now();
            let mut copy = spill.pool.acquire(lease.len());
            self.waited += began.elapsed();
            copy.copy_from_slice(&lease);
            spill.scratch.write(chunk(boundary, m, self.micro_batches), copy)?;
            signal = Signal::Host(lease);
        }
        self.kept.insert((boundary, m), signal);
        Ok(())
    }

    /// Takes the input of the next block in forward; give it back with [`checkpoint`](Self::checkpoint).
    pub(crate) fn take(&mut self, boundary: usize, m: usize) -> Signal {
        self.kept.remove(&(boundary, m)).expect("a signal is kept before it is taken")
    }

    /// After its use in forward: stays in memory, or was spilled already and leaves.
    pub(crate) fn checkpoint(&mut self, boundary: usize, m: usize, signal: Lease) {
        if self.spill.is_none() {
            self.kept.insert((boundary, m), Signal::Host(signal));
        }
    }

    /// Takes a checkpoint in backward, reading it back if it was spilled, and starts reading the one that follows.
    pub(crate) fn recall(&mut self, boundary: usize, m: usize) -> Result<Signal> {
        if let Some(signal) = self.kept.remove(&(boundary, m)) {
            self.read_ahead(boundary, m)?;
            return Ok(signal);
        }
        let began = Instant::now();
        let spill = self.spill.as_mut().expect("a checkpoint is in memory or spilled");
        let read = match spill.ahead.take() {
            Some((at, read)) if at == (boundary, m) => read,
            _ => spill.read((boundary, m), self.micro_batches, spill.pool.acquire(spill.bytes[boundary]))?,
        };
        let signal = read.wait()?;
        self.waited += began.elapsed();
        self.read_ahead(boundary, m)?;
        Ok(Signal::Host(signal))
    }

    /// Backward visits boundaries downwards and micro-batches upwards within each.
    fn read_ahead(&mut self, boundary: usize, m: usize) -> Result {
        let following = if m + 1 < self.micro_batches {
            Some((boundary, m + 1))
        } else {
            boundary.checked_sub(1).map(|b| (b, 0))
        };
        let Some(at) = following.filter(|at| !self.kept.contains_key(at)) else { return Ok(()) };
        if let Some(spill) = &mut self.spill
            && spill.ahead.is_none()
            && let Some(lease) = spill.pool.try_acquire(spill.bytes[at.0])
        {
            spill.ahead = Some((at, spill.read(at, self.micro_batches, lease)?));
        }
        Ok(())
    }

    /// Seconds that compute waited for the disk since the last call.
    pub(crate) fn take_waited(&mut self) -> f64 {
        std::mem::take(&mut self.waited).as_secs_f64()
    }

    /// The boundary whose signal is at `offset` of a file.
    pub(crate) fn boundary_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let ScratchChunk(place) = self.spill.as_ref()?.scratch.chunk_at(file, offset)?;
        Some(place / self.micro_batches)
    }

    /// Forgets everything of a step that failed or ended.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        if let Some(spill) = &mut self.spill {
            spill.ahead = None;
        }
    }
}

fn chunk(boundary: usize, m: usize, micro_batches: usize) -> ScratchChunk {
    ScratchChunk(boundary * micro_batches + m)
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_aio::engine::{EngineConfig, open_default};
    use terrace_device::host::HostDevice;

    /// Each comes back with the bytes that it had, those that are read ahead from another boundary among them.
    #[test]
    fn signals_of_different_sizes_are_spilled() {
        const BYTES: [usize; 4] = [8192, 4096, 12_288, 4096];
        let folder = tempfile::tempdir().unwrap();
        let io = open_default(&EngineConfig::default()).unwrap();
        let striping = Striping::equal(&[folder.path().to_owned()]);
        let rounds = Rounds::vertical(2);
        let device = HostDevice::unified();
        let mut all = Activations::new(BYTES.len(), rounds, 12_288, &device, Some((&io, &striping))).unwrap();
        let content = |boundary: usize, m: usize| (16 * boundary + m + 1) as u8;
        for (boundary, bytes) in BYTES.into_iter().enumerate() {
            for m in 0..2 {
                let mut lease = all.slot(bytes);
                lease.fill(content(boundary, m));
                all.keep(boundary, m, Signal::Host(lease)).unwrap();
            }
            // The last ones stay for backward.
            for m in 0..if boundary + 1 < BYTES.len() { 2 } else { 0 } {
                let lease = all.take(boundary, m).into_host().unwrap();
                all.checkpoint(boundary, m, lease);
            }
        }
        for (boundary, bytes) in BYTES.into_iter().enumerate().rev() {
            for m in 0..2 {
                let signal = all.recall(boundary, m).unwrap().into_host().unwrap();
                assert_eq!(signal.len(), bytes);
                assert!(signal.iter().all(|&byte| byte == content(boundary, m)), "{boundary}, {m}");
            }
        }
    }
}
