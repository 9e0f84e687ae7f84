//! How long a step takes: its [schedule](terrace_zero::Schedule) in virtual time.
//!
//! The [floor](crate::floor) lets every resource work from the first moment of a step to its last. The order of a step does not: an
//! update that waits for the gradient's norm leaves the disk little to do in backward, and one that follows backward little in
//! forward; weights cannot be read further ahead than there are slots for. So a step is played, group by group, on resources that do
//! what they were measured to do:
//!
//! - *Actors* (`step.rs`) are those of the engine: compute, block after block; the fetch of weights, as far ahead as slots and the
//!   gate of a pending update allow, and their uploads; the update, which reads some chunks ahead of the one that it is at, and
//!   writes those behind it.
//! - *Resources* (`machine.rs`) are the disks, the link, the device and the cores. Who uses one at the same time shares it in equal
//!   parts. Reads and writes share the disks as in the floor. On a machine without a card compute, updates, checksums and the
//!   system's part of disk I/O share the cores. Rates are those of a training step, where they were measured, and not the best of a single product.
//!
//! Of several ranks one is played, and all others of its node keep step with it: disks and cores do what all of them need together.
//! Weights are gathered when a rank's part of them is on the device, as far ahead as there are slots there; gradients are scattered
//! when a block has computed, before the next one does, for which the device has no second memory. Both share network and peers.
//!
//! Some steps follow each other until they are alike, whose time is what is expected. The same schedule always takes the same. A device with
//! memory of its own updates the state that it has when the norm is known, before its next kernels: what that takes by its bytes is added.
//!
//! Left out are `fdatasync` and the manifest of a commit, latencies, the bandwidth of host memory
//! that resources share, and beside a card the system's own time for disk I/O and the checksums of spilled activations and parked gradients. All micro-batches of a pass go
//! through a block at once, and its gradients are parked at once. Groups of very many chunks are updated in fewer, larger pieces.
//!
//! Left out, too, is that a disk does first what compute waits for ([`Urgency`](terrace_aio::Urgency)): whoever uses it has an equal part. The
//! parts that urgency gives were tried: no nearer to the engine (`tests/virtual_time.rs`), and more often a step that takes longer on a
//! faster machine.

mod machine;
mod step;

use crate::floor::Capabilities;
use step::Run;
use terrace_zero::{Schedule, StepWork};

/// Steps that are played: the first has no update before it, the second finds more read ahead than those that follow, and where the disk is hardly
/// idle it takes some more until they alternate.
const STEPS: usize = 8;
/// The last of them, whose mean is taken: where the disk is hardly idle a step that finds much read ahead leaves little to the next.
const MEASURED: usize = 2;

/// Pieces, about, that all updates of a step are cut into. More take longer to play and change nothing.
const PIECES: usize = 512;

/// Seconds of a step of `work`; `None` if nothing is known that takes any. Work without a schedule is all done beside each other.
///
/// Where clipping delays updates, every step is clipped.
pub fn step_seconds(work: &StepWork, can: &Capabilities) -> Option<f64> {
    if work.schedule.passes.is_empty() {
        return Some(at_once(work, can)).filter(|seconds| *seconds > 0.0);
    }
    played(work, &work.schedule, can)
}

/// The same where no step is clipped; `None` if that makes no difference.
pub fn unclipped_step_seconds(work: &StepWork, can: &Capabilities) -> Option<f64> {
    played(work, &work.schedule.unclipped()?, can)
}

fn played(work: &StepWork, schedule: &Schedule, can: &Capabilities) -> Option<f64> {
    let mut run = Run::new(schedule, work.unified, can);
    let mut ends = [0.0; STEPS];
    for end in &mut ends {
        *end = run.step()?;
    }
    let seconds = (ends[STEPS - 1] - ends[STEPS - 1 - MEASURED]) / MEASURED as f64;
    let seconds = seconds + per(work.device_memory_bytes as f64, can.device_memory);
    Some(seconds).filter(|seconds| *seconds > 0.0)
}

/// The slowest resource.
fn at_once(work: &StepWork, can: &Capabilities) -> f64 {
    let (read, write) = (work.disk_read_bytes as f64, work.disk_write_bytes as f64);
    let (up, down) = (work.upload_bytes as f64, work.download_bytes as f64);
    let compute = per(work.operations as f64, can.training.or(can.operations));
    let cores = per(work.parameters as f64, can.updates) + handling(read + write, work.unified, can);
    [
        if work.unified { compute + cores } else { compute.max(cores) },
        can.disk_seconds(read, write),
        per(up, can.upload),
        per(down, can.download),
        per(up + down, can.both),
        per(work.exchanged().network_bytes as f64, can.network),
        per(work.exchanged().peer_bytes as f64, can.peers),
    ]
    .into_iter()
    .fold(0.0, f64::max)
}

/// Seconds of the cores for bytes that disks carry: their checksums and, where these cores compute, too, what the system takes of them.
fn handling(bytes: f64, unified: bool, can: &Capabilities) -> f64 {
    per(bytes, can.checksums) + per(bytes, can.by_cores.disks.filter(|_| unified))
}

fn per(amount: f64, rate: Option<f64>) -> f64 {
    rate.map_or(0.0, |rate| amount / rate)
}

#[cfg(test)]
mod tests;
