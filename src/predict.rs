//! How long a step takes: forward and backward take turns, and everything else goes on beside them.
//!
//! The [floor](crate::floor) lets every resource work from the first moment of a step to its last. The order of a step does not: an
//! update that waits for the gradient's norm leaves the disk little to do in backward, and one that follows backward little in
//! forward. So each of the two takes as long as the slowest of what it has to do,
//!
//! `T = max(compute, disk, link in forward) + max(compute, disk, link in backward)`,
//!
//! where on a machine without a card the update and the checksums need the cores that compute. Rates are those of a training step,
//! where they were measured, and not the best of a single product. Horizontal accumulation is taken for one round.

use crate::floor::Capabilities;
use terrace_zero::{Phases, StepWork, UpdateTime};

/// What one of the two has to do.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    operations: f64,
    /// Parameters that are updated beside it.
    updates: f64,
    read: f64,
    write: f64,
    up: f64,
    down: f64,
    network: f64,
    peers: f64,
}

/// Steps in which the part of an update that trails is looked for.
const TRAILING_STEPS: usize = 64;

/// Seconds of a step of `work`; `None` if nothing is known that takes any.
pub fn step_seconds(work: &StepWork, can: &Capabilities) -> Option<f64> {
    let seconds = |trailing| {
        let [forward, backward] = loads(work, [trailing, 1.0 - trailing]);
        [forward.seconds(work, can), backward.seconds(work, can)]
    };
    let [forward, backward] = match work.phases.update {
        UpdateTime::Deferred => {
            let [forward, mut backward] = loads(work, [1.0, 0.0]);
            let seconds = forward.seconds(work, can);
            // Copies are written as soon as the update is through, which may be before forward is.
            let update = can.disk_seconds(forward.read, forward.write).max(forward.cores(can));
            let late = work.phases.late_write_bytes as f64;
            let part = (seconds - update).max(0.0) / can.disk_seconds(0.0, late).max(f64::MIN_POSITIVE);
            backward.write -= late * part.min(1.0);
            [seconds, backward.seconds(work, can)]
        }
        UpdateTime::Beside(most) => {
            // Backward does not wait for an update that can trail, which does what it can meanwhile.
            let trailing = |step: usize| most * step as f64 / TRAILING_STEPS as f64;
            let [_, least] = seconds(most);
            let enough = |&step: &usize| seconds(trailing(step))[1] <= least * (1.0 + 1e-9);
            seconds(trailing((0..=TRAILING_STEPS).find(enough).unwrap_or(TRAILING_STEPS)))
        }
        UpdateTime::After => {
            let Phases { update_read_bytes, update_write_bytes, .. } = work.phases;
            let alone = Load {
                updates: work.parameters as f64,
                read: update_read_bytes as f64,
                write: update_write_bytes as f64,
                ..Load::default()
            };
            let [forward, backward] = loads(work, [0.0, 0.0]);
            [forward.seconds(work, can), backward.seconds(work, can) + alone.seconds(work, can)]
        }
    };
    Some(forward + backward).filter(|seconds| *seconds > 0.0)
}

/// Forward and backward, each with its part of the update.
fn loads(work: &StepWork, [beside_forward, beside_backward]: [f64; 2]) -> [Load; 2] {
    let Phases {
        forward_operations,
        update_read_bytes,
        update_write_bytes,
        late_write_bytes,
        gradient_write_bytes,
        spilled_bytes,
        ..
    } = work.phases;
    let (forward_operations, spilled) = (forward_operations as f64, spilled_bytes as f64);
    let (read, write) = (update_read_bytes as f64, update_write_bytes as f64);
    let backward_write = (late_write_bytes + gradient_write_bytes) as f64;
    // Weights above all, which both read.
    let reads_left = work.disk_read_bytes as f64 - read - spilled;
    let writes_left = work.disk_write_bytes as f64 - write - backward_write - spilled;
    let parameters = work.parameters as f64;
    let forward = Load {
        operations: forward_operations,
        updates: parameters * beside_forward,
        read: reads_left / 2.0 + read * beside_forward,
        write: writes_left / 2.0 + spilled + write * beside_forward,
        up: work.upload_bytes as f64 / 2.0,
        down: 0.0,
        network: work.gathers.network_bytes as f64 / 2.0,
        peers: work.gathers.peer_bytes as f64 / 2.0,
    };
    let backward = Load {
        operations: work.operations as f64 - forward_operations,
        updates: parameters * beside_backward,
        read: reads_left / 2.0 + spilled + read * beside_backward,
        write: writes_left / 2.0 + backward_write + write * beside_backward,
        up: work.upload_bytes as f64 / 2.0,
        // Gradients come down as backward makes them.
        down: work.download_bytes as f64,
        network: work.gathers.network_bytes as f64 / 2.0 + work.scatters.network_bytes as f64,
        peers: work.gathers.peer_bytes as f64 / 2.0 + work.scatters.peer_bytes as f64,
    };
    [forward, backward]
}

fn per(amount: f64, rate: Option<f64>) -> f64 {
    rate.map_or(0.0, |rate| amount / rate)
}

impl Load {
    /// Seconds of the processor's cores for what is not compute.
    fn cores(self, can: &Capabilities) -> f64 {
        per(self.updates, can.updates) + per(self.read + self.write, can.checksums)
    }

    fn seconds(self, work: &StepWork, can: &Capabilities) -> f64 {
        let compute = per(self.operations, can.training.or(can.operations));
        let cores = self.cores(can);
        let busy = if work.unified { compute + cores } else { compute.max(cores) };
        [
            busy,
            can.disk_seconds(self.read, self.write),
            per(self.up, can.upload),
            per(self.down, can.download),
            per(self.up + self.down, can.both),
            per(self.network, can.network),
            per(self.peers, can.peers),
        ]
        .into_iter()
        .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Rates;

    /// Nine seconds of compute and a disk that needs twelve, ten of them for the update.
    fn work(update: UpdateTime) -> StepWork {
        StepWork {
            operations: 900,
            parameters: 100,
            disk_read_bytes: 700,
            disk_write_bytes: 500,
            unified: true,
            phases: Phases {
                update,
                forward_operations: 300,
                update_read_bytes: 500,
                update_write_bytes: 500,
                ..Phases::default()
            },
            ..StepWork::default()
        }
    }

    fn can() -> Capabilities {
        let rates = Rates {
            read_bytes_per_second: 100.0,
            write_bytes_per_second: 100.0,
            mixed_bytes_per_second: 100.0,
        };
        Capabilities { operations: Some(100.0), disks: vec![(1.0, rates)], ..Capabilities::default() }
    }

    fn seconds(work: StepWork, can: &Capabilities) -> f64 {
        step_seconds(&work, can).unwrap()
    }

    #[test]
    fn a_deferred_update_leaves_the_disk_idle_in_backward() {
        // Forward: 1 + 10 of disk. Backward: 6 of compute.
        assert!((seconds(work(UpdateTime::Deferred), &can()) - 17.0).abs() < 1e-9);
        let mut late = work(UpdateTime::Deferred);
        (late.phases.update_write_bytes, late.phases.late_write_bytes) = (100, 400);
        // What copies let wait is done beside backward: 1 + 6 of disk, then 1 + 4 beside 6 of compute.
        assert!((seconds(late, &can()) - 13.0).abs() < 1e-9);
        // With copies of everything 2 of forward's 3 are left for it, and 8 to backward, besides 1 for weights.
        let Phases { update_read_bytes, update_write_bytes, late_write_bytes, .. } = &mut late.phases;
        (late.disk_read_bytes, late.disk_write_bytes) = (200, 1000);
        (*update_read_bytes, *update_write_bytes, *late_write_bytes) = (0, 0, 1000);
        assert!((seconds(late, &can()) - 12.0).abs() < 1e-9);
    }

    #[test]
    fn an_update_that_trails_keeps_the_disk_busy() {
        // Forward: 3 of compute. Backward: 1 + 10 of disk.
        assert!((seconds(work(UpdateTime::Beside(0.0)), &can()) - 14.0).abs() < 1e-9);
        let enough = seconds(work(UpdateTime::Beside(1.0)), &can());
        assert!((12.0..12.2).contains(&enough), "{enough}");
    }

    #[test]
    fn an_update_with_nothing_beside_it_takes_its_own_time() {
        // 3 of compute forward, 6 backward, 10 of disk.
        assert!((seconds(work(UpdateTime::After), &can()) - 19.0).abs() < 1e-9);
    }

    #[test]
    fn cores_are_shared_without_a_card_only() {
        let can = Capabilities { updates: Some(10.0), operations: Some(100.0), ..Capabilities::default() };
        let shared = work(UpdateTime::Deferred);
        assert!((seconds(shared, &can) - 19.0).abs() < 1e-9);
        // The card needs 3 and 6, the cores 10 beside forward.
        assert!((seconds(StepWork { unified: false, ..shared }, &can) - 16.0).abs() < 1e-9);
    }

    #[test]
    fn a_training_steps_own_rate_counts_more_than_a_products() {
        let can = Capabilities { training: Some(50.0), operations: Some(100.0), ..Capabilities::default() };
        assert!((seconds(work(UpdateTime::Deferred), &can) - 18.0).abs() < 1e-9);
        assert_eq!(step_seconds(&work(UpdateTime::Deferred), &Capabilities::default()), None);
    }
}
