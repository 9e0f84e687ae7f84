//! The floor of a step: no step of a plan is shorter than the slowest resource needs for its share at its measured best.
//!
//! `T ≥ max(operations / products, parameters / updates, cores, disk, uploads / up, downloads / down, memory bytes / memory, network, peers)`
//!
//! Where the device is the CPU, products, updates, checksums and what the system takes for disk I/O have the same *cores*, whose time is
//! the sum of what each of them needs: of updates and checksums, what they take of a thread that has the memory to itself, over all threads. (What all threads take together
//! would be too much: where memory binds, fewer of them are as fast and leave cores to others.)
//!
//! A drive shares reading and writing: `R/B_r + W/B_w`, or less where the measured mixed load showed that both go on beside each
//! other: then as much as is read and written alike goes at the mixed rate, and the rest alone. With several drives each takes
//! its part, and together they are no faster than they were together.

use crate::calibrate::{Calibration, Gemm, MemoryRates, OptimizerRate, Profile, Rates};
use crate::predict::{step_seconds, unclipped_step_seconds};
use serde::Serialize;
use std::path::PathBuf;
use terrace_kernels::{DType, QuantFormat};
use terrace_optimizer::StateFormat;
use terrace_zero::StepWork;

/// What resources can do; `None` for what nobody knows, which bounds nothing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Capabilities {
    /// Operations per second of matrix products on the device.
    pub operations: Option<f64>,
    /// Operations per second of forward and backward of a whole layer there.
    pub training: Option<f64>,
    /// Bytes per second of checksums.
    pub checksums: Option<f64>,
    /// Parameters per second of the update.
    pub updates: Option<f64>,
    /// What threads that did nothing else, and had the memory to themselves each, would do of both.
    pub by_cores: ByCores,
    /// Computing was measured at length, as `calibrate` does: what a step would take follows. A start measures single products.
    pub predicts: bool,
    /// The drives, each with its part of the bytes.
    pub disks: Vec<(f64, Rates)>,
    /// All drives at once.
    pub disks_together: Option<Rates>,
    /// Bytes per second to the device.
    pub upload: Option<f64>,
    /// Bytes per second from it.
    pub download: Option<f64>,
    /// Bytes per second to and from it at once.
    pub both: Option<f64>,
    /// Bytes per second of host memory.
    pub memory: Option<f64>,
    /// Bytes per second of the memory of a device that has its own.
    pub device_memory: Option<f64>,
    /// Bytes per second of a node's network, in each direction at once.
    pub network: Option<f64>,
    /// Bytes per second between a device and others of its node, in each direction at once.
    pub peers: Option<f64>,
}

/// A thread's rates times the threads.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ByCores {
    /// Parameters per second of the update.
    pub updates: Option<f64>,
    /// Bytes per second of checksums.
    pub checksums: Option<f64>,
    /// Bytes per second that disks could carry if that were all that the cores did.
    pub disks: Option<f64>,
}

/// Seconds that each resource needs for a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Floor {
    /// By resource, only those that are used and known.
    pub seconds: Vec<(&'static str, f64)>,
    /// What a step is [expected](crate::predict) to take, in the order in which it does its work.
    pub expected: Option<f64>,
    /// The same where no step is clipped, if that makes a difference.
    pub unclipped: Option<f64>,
    /// What is used and not known, where a time is only to be said if all is.
    pub unknown: Vec<Unknown>,
}

/// The name of the disk in an [`Unknown`].
pub const DISK: &str = "the disk";

/// A resource that is used and of whose speed nothing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Unknown {
    /// Its name in words.
    pub resource: &'static str,
    /// The flags that say it.
    pub flags: &'static str,
}

impl Capabilities {
    /// What `profile` says about a run of this kind on `dirs`, whose parts of the state are `shares` (equal parts if `None`).
    pub fn of(
        profile: &Profile,
        dtype: DType,
        state: Option<StateFormat>,
        on_card: bool,
        dirs: &[PathBuf],
        shares: Option<&[f64]>,
    ) -> Self {
        let mut found = Self::default();
        if let Some(disk) = &profile.disk {
            let rates: Option<Vec<Rates>> =
                dirs.iter().map(|dir| disk.path_of(dir).map(Rates::from)).collect();
            found.disks = rates.unwrap_or_default().into_iter().map(|rates| (1.0, rates)).collect();
            found = found.with_shares(shares.unwrap_or(&vec![1.0; dirs.len()]));
        }
        let Some(calibration) = &profile.calibration else { return found };
        let all = profile.disk.as_ref().map_or(0, |disk| disk.paths.len());
        found.disks_together = calibration.disks_together.filter(|_| all == dirs.len() && all > 1);
        found.memory = calibration.memory.map(|m: MemoryRates| {
            m.read_bytes_per_second.max(m.copy_bytes_per_second).max(m.update_bytes_per_second)
        });
        let form = dtype.to_string();
        let update = state.and_then(|state| optimizer_rate(calibration, state, &form));
        found.updates = update.map(|rate| rate.parameters_per_second);
        found.checksums = calibration.checksum_bytes_per_second;
        let threads = calibration.machine.threads as f64;
        found.by_cores = ByCores {
            updates: update.and_then(|rate| rate.parameters_per_core_second).map(|rate| rate * threads),
            checksums: calibration.checksum_bytes_per_core_second.map(|rate| rate * threads),
            disks: calibration.disk_bytes_per_core_second.map(|rate| rate * threads),
        };
        if let Some(card) = calibration.card.as_ref().filter(|_| on_card) {
            found.upload = Some(card.upload_bytes_per_second);
            found.download = Some(card.download_bytes_per_second);
            found.both = Some(card.both_bytes_per_second);
            found.device_memory = Some(card.device_memory_bytes_per_second);
        }
        found.operations = products(calibration, on_card).and_then(|products| product_rate(products, &form));
        let of_card = calibration.card.as_ref().map(|card| &card.training);
        let training = if on_card { of_card } else { Some(&calibration.training) };
        found.training = training
            .into_iter()
            .flatten()
            .filter(|rate| rate.dtype == form)
            .map(|rate| rate.operations_per_second)
            .reduce(f64::max);
        found
    }

    /// The same with products of weights in `format`, as far as `profile` knows them. What little has other weights, the attention and a tied
    /// head, counts with them.
    #[must_use]
    pub fn with_weights(self, profile: &Profile, format: QuantFormat, on_card: bool) -> Self {
        let products = profile.calibration.as_ref().and_then(|calibration| products(calibration, on_card));
        let rate = |format: QuantFormat| product_rate(products?, &format.to_string());
        // Of the same size, and hardly slower.
        let alike = if format == QuantFormat::Mxfp4 { QuantFormat::Int4 } else { format };
        let operations = rate(format).or_else(|| rate(alike));
        Self { operations, training: None, ..self }
    }

    /// The same where the drives take these parts, in any unit, of the bytes.
    #[must_use]
    pub fn with_shares(mut self, shares: &[f64]) -> Self {
        let whole: f64 = shares.iter().sum();
        if shares.len() == self.disks.len() {
            self.disks.iter_mut().zip(shares).for_each(|(disk, share)| disk.0 = share / whole);
        }
        self
    }

    /// Seconds of all drives for so many bytes; 0 where nothing is known.
    pub fn disk_seconds(&self, read: f64, write: f64) -> f64 {
        let each = self.disks.iter().map(|(part, rates)| disk_seconds(read * part, write * part, *rates));
        let together = self.disks_together.map_or(0.0, |rates| disk_seconds(read, write, rates));
        each.fold(together, f64::max)
    }
}

impl Floor {
    /// The floor of `work`.
    pub fn new(work: &StepWork, can: &Capabilities) -> Self {
        let mut seconds = Vec::new();
        let mut add = |name, amount: u64, rate: Option<f64>| {
            if let Some(rate) = rate
                && amount > 0
            {
                seconds.push((name, amount as f64 / rate));
            }
        };
        add("compute", work.operations, can.operations);
        add("optimizer", work.parameters, can.updates);
        add("upload", work.upload_bytes, can.upload);
        add("download", work.download_bytes, can.download);
        // A link that carries more in one direction than both together carried was measured badly; both then take the sum.
        let both = can.both.map(|both| both.max(can.upload.unwrap_or(0.0)).max(can.download.unwrap_or(0.0)));
        add("link", work.upload_bytes + work.download_bytes, both);
        add("memory", work.memory_bytes, can.memory);
        add("device memory", work.device_memory_bytes, can.device_memory);
        let exchanged = work.exchanged();
        add("network", exchanged.network_bytes, can.network);
        add("peers", exchanged.peer_bytes, can.peers);
        seconds.extend(core_seconds(work, can).map(|cores| ("cores", cores)));
        let (read, write) = (work.disk_read_bytes as f64, work.disk_write_bytes as f64);
        let disk = can.disk_seconds(read, write);
        if disk > 0.0 {
            seconds.push(("disk", disk));
        }
        let mut floor = Self { seconds, ..Self::default() };
        // Host memory, which everything shares, has no phases.
        let least = floor.bound().map_or(0.0, |(_, seconds)| seconds);
        let [expected, unclipped] = [step_seconds(work, can), unclipped_step_seconds(work, can)];
        floor.expected = expected.map(|seconds| seconds.max(least));
        floor.unclipped = unclipped.map(|seconds| seconds.max(least));
        floor
    }

    /// The same, without a time for the whole where something that `work` uses is not known. Memory of a device that has its own is
    /// looked at if it `may_bind`, as in generation.
    pub fn complete(work: &StepWork, can: &Capabilities, may_bind: bool) -> Self {
        let mut floor = Self::new(work, can);
        let exchanged = work.exchanged();
        let link = work.upload_bytes + work.download_bytes;
        let disk = work.disk_read_bytes + work.disk_write_bytes;
        let device_memory = if may_bind { work.device_memory_bytes } else { 0 };
        for (resource, flags, amount, is_known) in [
            ("compute", "--tflops", work.operations, can.operations.is_some()),
            ("the link", "--link", link, can.upload.is_some() && can.download.is_some()),
            ("host memory", "--dram", work.memory_bytes, can.memory.is_some()),
            ("the card's memory", "--gpu-bandwidth", device_memory, can.device_memory.is_some()),
            (DISK, "--disk-read and --disk-write", disk, !can.disks.is_empty()),
            ("the network", "--network-bandwidth", exchanged.network_bytes, can.network.is_some()),
            ("the link to other cards", "--peer-bandwidth", exchanged.peer_bytes, can.peers.is_some()),
        ] {
            if amount > 0 && !is_known {
                floor.unknown.push(Unknown { resource, flags });
            }
        }
        if !floor.unknown.is_empty() {
            (floor.expected, floor.unclipped) = (None, None);
        }
        floor
    }

    /// The resource that binds and its seconds; `None` if nothing is known, or not enough.
    pub fn bound(&self) -> Option<(&'static str, f64)> {
        if !self.unknown.is_empty() {
            return None;
        }
        self.seconds.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Seconds of a drive for so many bytes.
fn disk_seconds(read: f64, write: f64, rates: Rates) -> f64 {
    let (read_rate, write_rate) = (rates.read_bytes_per_second, rates.write_bytes_per_second);
    let alone = read / read_rate + write / write_rate;
    let both = read.min(write);
    let mixed =
        2.0 * both / rates.mixed_bytes_per_second + (read - both) / read_rate + (write - both) / write_rate;
    alone.min(mixed)
}

/// Products of the card, or of the processor where there is none in use.
fn products(calibration: &Calibration, on_card: bool) -> Option<&[Gemm]> {
    if on_card { calibration.card.as_ref().map(|card| &card.gemm[..]) } else { Some(&calibration.gemm) }
}

/// The best of all shapes of operands, or weights, in `form`.
fn product_rate(gemm: &[Gemm], form: &str) -> Option<f64> {
    gemm.iter().filter(|gemm| gemm.dtype == form).map(|gemm| gemm.operations_per_second).reduce(f64::max)
}

fn optimizer_rate<'a>(
    calibration: &'a Calibration,
    state: StateFormat,
    weights: &str,
) -> Option<&'a OptimizerRate> {
    let state = state.to_string();
    calibration.optimizer.iter().find(|rate| rate.state == state && rate.weights == weights)
}

/// What the cores need where they are the device: products, and as much of updates, and of the checksums and the I/O of what disks move, as
/// is known. `None` if that is products alone.
fn core_seconds(work: &StepWork, can: &Capabilities) -> Option<f64> {
    let seconds = |amount: u64, rate: Option<f64>| rate.map_or(0.0, |rate| amount as f64 / rate);
    let products = seconds(work.operations, can.operations);
    let carried = work.disk_read_bytes + work.disk_write_bytes;
    let others = seconds(work.parameters, can.by_cores.updates)
        + seconds(carried, can.by_cores.checksums)
        + seconds(carried, can.by_cores.disks);
    (work.unified && products > 0.0 && others > 0.0).then_some(products + others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_zero::Traffic;

    fn rates(read: f64, write: f64, mixed: f64) -> Rates {
        Rates { read_bytes_per_second: read, write_bytes_per_second: write, mixed_bytes_per_second: mixed }
    }

    fn traffic(network_bytes: u64, peer_bytes: u64) -> Traffic {
        Traffic { network_bytes, peer_bytes }
    }

    fn work() -> StepWork {
        StepWork {
            operations: 12_000,
            tokens: 8,
            parameters: 100,
            state: Some(StateFormat::Split),
            disk_read_bytes: 1600,
            disk_write_bytes: 1200,
            upload_bytes: 400,
            download_bytes: 200,
            memory_bytes: 5000,
            ..StepWork::default()
        }
    }

    #[test]
    fn by_hand() {
        let can = Capabilities {
            operations: Some(3000.0),
            updates: Some(50.0),
            disks: vec![(1.0, rates(400.0, 200.0, 250.0))],
            disks_together: None,
            upload: Some(100.0),
            download: Some(50.0),
            both: Some(120.0),
            memory: Some(2500.0),
            ..Capabilities::default()
        };
        let floor = Floor::new(&work(), &can);
        // Disk: 1600/400 + 1200/200 = 10; mixed 2·1200/250 + 400/400 = 10.6 is no less.
        let expected = [
            ("compute", 4.0),
            ("optimizer", 2.0),
            ("upload", 4.0),
            ("download", 4.0),
            ("link", 5.0),
            ("memory", 2.0),
            ("disk", 10.0),
        ];
        assert_eq!(floor.seconds, expected);
        assert_eq!(floor.bound(), Some(("disk", 10.0)));
        // Never less than the floor, whatever binds.
        let memory = Capabilities { memory: Some(100.0), ..Capabilities::default() };
        assert_eq!(
            Floor::new(&work(), &Capabilities { operations: Some(3000.0), ..memory }).expected,
            Some(50.0)
        );
        let faster = Capabilities { disks: vec![(1.0, rates(400.0, 200.0, 400.0))], ..can };
        // Both directions beside each other: 2·1200/400 + 400/400 = 7.
        assert_eq!(Floor::new(&work(), &faster).bound(), Some(("disk", 7.0)));
    }

    #[test]
    fn cores_do_what_there_is_no_card_for() {
        let by_cores = ByCores { updates: Some(80.0), checksums: Some(1400.0), disks: None };
        let can = Capabilities {
            operations: Some(3000.0),
            updates: Some(50.0),
            by_cores,
            ..Capabilities::default()
        };
        let on_cores = StepWork { unified: true, ..work() };
        // 12000/3000 + 100/80 + (1600 + 1200)/1400.
        assert_eq!(
            Floor::new(&on_cores, &can).seconds,
            [("compute", 4.0), ("optimizer", 2.0), ("cores", 7.25)]
        );
        assert_eq!(Floor::new(&work(), &can).seconds, [("compute", 4.0), ("optimizer", 2.0)]);
        let disks_too = ByCores { disks: Some(5600.0), ..by_cores };
        assert_eq!(
            Floor::new(&on_cores, &Capabilities { by_cores: disks_too, ..can.clone() }).bound(),
            Some(("cores", 7.75))
        );
        let in_memory = StepWork { disk_read_bytes: 0, disk_write_bytes: 0, ..on_cores.clone() };
        assert_eq!(Floor::new(&in_memory, &can).bound(), Some(("cores", 5.25)));
        // A profile without a thread's rates says nothing about cores.
        let older = Capabilities { by_cores: ByCores::default(), ..can };
        assert_eq!(Floor::new(&on_cores, &older).bound(), Some(("compute", 4.0)));
    }

    #[test]
    fn what_ranks_exchange() {
        let (gathers, scatters) = (traffic(300, 500), traffic(100, 250));
        let can = Capabilities { network: Some(50.0), peers: Some(250.0), ..Capabilities::default() };
        let floor = Floor::new(&StepWork { gathers, scatters, ..work() }, &can);
        assert_eq!(floor.seconds, [("network", 8.0), ("peers", 3.0)]);
        assert_eq!(floor.expected, Some(8.0));
        assert_eq!(Floor::new(&work(), &can).seconds, []);
    }

    #[test]
    fn drives_take_their_parts() {
        let (fast, slow) = (rates(400.0, 400.0, 400.0), rates(100.0, 100.0, 100.0));
        let mut can = Capabilities { disks: vec![(0.75, fast), (0.25, slow)], ..Capabilities::default() };
        // 2100/400 and 700/100.
        assert_eq!(Floor::new(&work(), &can).bound(), Some(("disk", 7.0)));
        can.disks_together = Some(rates(200.0, 200.0, 200.0));
        assert_eq!(Floor::new(&work(), &can).bound(), Some(("disk", 14.0)));
    }

    #[test]
    fn a_time_is_that_of_everything() {
        let part = Capabilities { operations: Some(3000.0), memory: Some(10.0), ..Capabilities::default() };
        let floor = Floor::complete(&work(), &part, true);
        let flags: Vec<_> = floor.unknown.iter().map(|unknown| unknown.flags).collect();
        assert_eq!(flags, ["--link", "--disk-read and --disk-write"]);
        assert_eq!((floor.bound(), floor.expected, floor.seconds.len()), (None, None, 2));
        let disks = vec![(1.0, rates(400.0, 400.0, 400.0))];
        let all = Capabilities { upload: Some(9.0), download: Some(9.0), disks, ..part };
        assert_eq!(Floor::complete(&work(), &all, true), Floor::new(&work(), &all));
        let ranks = StepWork { gathers: traffic(1, 1), device_memory_bytes: 1, ..work() };
        assert_eq!(Floor::complete(&ranks, &all, true).unknown.len(), 3);
        assert_eq!(Floor::complete(&ranks, &all, false).unknown.len(), 2);
    }

    #[test]
    fn what_is_not_known_bounds_nothing() {
        assert_eq!(Floor::new(&work(), &Capabilities::default()).bound(), None);
        let can = Capabilities { operations: Some(3000.0), ..Capabilities::default() };
        assert_eq!(Floor::new(&work(), &can).seconds, [("compute", 4.0)]);
    }
}
