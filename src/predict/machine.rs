//! Resources in virtual time: lanes of jobs, each lane in its order, that share what they run on.

use crate::floor::Capabilities;
use std::collections::VecDeque;

/// Who uses a resource for what. Jobs of a lane are done one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// The device, in seconds; on a unified machine it is the cores.
    Compute,
    /// Cores, in seconds: updates and the checksums of what they read and write.
    Update,
    /// Cores, in seconds: checksums of weights.
    Verify,
    /// Disks, in bytes, as all that follow.
    ReadWeights,
    ReadState,
    ReadScratch,
    WriteState,
    WriteScratch,
    /// The link, in bytes, as all that follow.
    UpWeights,
    Up,
    Down,
    /// The network of a node, in bytes into it and as many out of it.
    GatherNetwork,
    ScatterNetwork,
    /// The links of a device to others of its node, in bytes to it and as many from it.
    GatherPeers,
    ScatterPeers,
}

const LANES: usize = Lane::ScatterPeers as usize + 1;
const CORES: &[Lane] = &[Lane::Compute, Lane::Update, Lane::Verify];
const READS: &[Lane] = &[Lane::ReadWeights, Lane::ReadState, Lane::ReadScratch];
const WRITES: &[Lane] = &[Lane::WriteState, Lane::WriteScratch];
const UPS: &[Lane] = &[Lane::UpWeights, Lane::Up];
const DOWNS: &[Lane] = &[Lane::Down];
const NETWORK: &[Lane] = &[Lane::GatherNetwork, Lane::ScatterNetwork];
const PEERS: &[Lane] = &[Lane::GatherPeers, Lane::ScatterPeers];

/// What is left of a job below which it is done: rounding, not work.
const ROUNDING: f64 = 1e-9;

/// A job that was submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Job {
    lane: Lane,
    /// How many jobs of the lane are done when it is.
    number: usize,
}

/// Bytes per second in each direction, alone and beside the other.
#[derive(Debug, Clone, Copy)]
struct TwoWay {
    alone: [f64; 2],
    beside: [f64; 2],
}

#[derive(Debug, Default)]
struct Queue {
    /// What is left of the first, and all of the others.
    amounts: VecDeque<f64>,
    submitted: usize,
    done: usize,
}

/// All resources at one instant.
#[derive(Debug)]
pub(super) struct Machine {
    queues: [Queue; LANES],
    /// Compute needs the cores, too.
    unified: bool,
    disk: Option<TwoWay>,
    link: TwoWay,
    /// Bytes per second in each direction at once.
    network: f64,
    peers: f64,
    /// Seconds since the beginning.
    pub(super) now: f64,
}

impl Machine {
    pub(super) fn new(can: &Capabilities, unified: bool) -> Self {
        let disk = (can.disk_seconds(1.0, 1.0) > 0.0).then(|| TwoWay {
            alone: [1.0 / can.disk_seconds(1.0, 0.0), 1.0 / can.disk_seconds(0.0, 1.0)],
            // As many bytes either way: that is where beside each other may be faster than in turns.
            beside: [1.0 / can.disk_seconds(1.0, 1.0); 2],
        });
        let (up, down) = (can.upload.unwrap_or(f64::INFINITY), can.download.unwrap_or(f64::INFINITY));
        let part = can.both.map_or(1.0, |both| (both.max(up).max(down) / (up + down)).min(1.0));
        let link = TwoWay { alone: [up, down], beside: [up * part, down * part] };
        let [network, peers] = [can.network, can.peers].map(|rate| rate.unwrap_or(f64::INFINITY));
        Self { queues: Default::default(), unified, disk, link, network, peers, now: 0.0 }
    }

    /// Puts a job at the end of its lane. What takes no time is done at once.
    pub(super) fn submit(&mut self, lane: Lane, amount: f64) -> Job {
        let takes_none = match lane {
            _ if CORES.contains(&lane) => false,
            _ if READS.contains(&lane) || WRITES.contains(&lane) => self.disk.is_none(),
            _ if UPS.contains(&lane) => self.link.alone[0].is_infinite(),
            _ if NETWORK.contains(&lane) => self.network.is_infinite(),
            _ if PEERS.contains(&lane) => self.peers.is_infinite(),
            _ => self.link.alone[1].is_infinite(),
        };
        if takes_none || amount <= 0.0 {
            return Job { lane, number: 0 };
        }
        let queue = &mut self.queues[lane as usize];
        queue.amounts.push_back(amount);
        queue.submitted += 1;
        Job { lane, number: queue.submitted }
    }

    pub(super) fn is_done(&self, job: Job) -> bool {
        self.queues[job.lane as usize].done >= job.number
    }

    /// Goes on to the end of the next job; false if there is none that ends.
    pub(super) fn advance(&mut self) -> bool {
        let rates = self.rates();
        let seconds = |(queue, rate): (&Queue, &f64)| queue.amounts.front().map(|left| left / rate);
        let ends = self.queues.iter().zip(&rates).filter_map(seconds);
        let Some(next) = ends.reduce(f64::min).filter(|next| next.is_finite()) else { return false };
        self.now += next;
        for (queue, rate) in self.queues.iter_mut().zip(rates) {
            let Some(left) = queue.amounts.front_mut() else { continue };
            if *left <= rate * next * (1.0 + ROUNDING) {
                queue.amounts.pop_front();
                queue.done += 1;
            } else {
                *left -= rate * next;
            }
        }
        true
    }

    /// Whether a job is left, perhaps one that never ends.
    pub(super) fn has_work(&self) -> bool {
        self.queues.iter().any(|queue| !queue.amounts.is_empty())
    }

    /// What each lane that has work gets now: lanes on one resource get the same.
    fn rates(&self) -> [f64; LANES] {
        let mut rates = [f64::INFINITY; LANES];
        let mut share = |lanes: &[Lane], rate: f64| {
            let each = rate / self.busy(lanes).max(1) as f64;
            lanes.iter().for_each(|&lane| rates[lane as usize] = each);
        };
        if self.unified {
            share(CORES, 1.0);
        } else {
            share(&CORES[..1], 1.0);
            share(&CORES[1..], 1.0);
        }
        share(NETWORK, self.network);
        share(PEERS, self.peers);
        for (two_way, there, back) in [(self.disk, READS, WRITES), (Some(self.link), UPS, DOWNS)] {
            let Some(two_way) = two_way else { continue };
            let both = self.busy(there) > 0 && self.busy(back) > 0;
            let [to, from] = if both { two_way.beside } else { two_way.alone };
            share(there, to);
            share(back, from);
        }
        rates
    }

    fn busy(&self, lanes: &[Lane]) -> usize {
        lanes.iter().filter(|&&lane| !self.queues[lane as usize].amounts.is_empty()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibrate::Rates;

    fn disk(read: f64, write: f64, mixed: f64) -> Capabilities {
        let rates = Rates {
            read_bytes_per_second: read,
            write_bytes_per_second: write,
            mixed_bytes_per_second: mixed,
        };
        Capabilities { disks: vec![(1.0, rates)], ..Capabilities::default() }
    }

    fn end(machine: &mut Machine) -> f64 {
        while machine.advance() {}
        machine.now
    }

    #[test]
    fn jobs_share_what_they_run_on() {
        for (unified, seconds) in [(true, 6.0), (false, 5.0)] {
            let mut machine = Machine::new(&Capabilities::default(), unified);
            let first = machine.submit(Lane::Compute, 1.0);
            let update = machine.submit(Lane::Update, 1.0);
            let second = machine.submit(Lane::Compute, 4.0);
            assert!(machine.advance());
            assert!(machine.is_done(first) && machine.is_done(update) && !machine.is_done(second));
            assert_eq!(machine.now, if unified { 2.0 } else { 1.0 });
            assert_eq!(end(&mut machine), seconds);
        }
    }

    #[test]
    fn a_disk_goes_as_fast_as_its_bytes_together() {
        for (mixed, seconds) in [(10.0, 30.0), (20.0, 20.0)] {
            let can = disk(10.0, 10.0, mixed);
            let mut machine = Machine::new(&can, true);
            let weights = machine.submit(Lane::ReadWeights, 50.0);
            machine.submit(Lane::ReadState, 150.0);
            machine.submit(Lane::WriteState, 100.0);
            assert!(machine.advance() && machine.is_done(weights));
            assert!((end(&mut machine) - seconds).abs() < 1e-9);
            assert!((machine.now - can.disk_seconds(200.0, 100.0)).abs() < 1e-9);
        }
    }

    #[test]
    fn a_link_may_carry_less_both_ways_than_twice() {
        let link =
            |both| Capabilities { upload: Some(10.0), download: Some(10.0), both, ..Capabilities::default() };
        for (both, seconds) in [(None, 10.0), (Some(15.0), 40.0 / 3.0), (Some(1.0), 20.0)] {
            let mut machine = Machine::new(&link(both), false);
            machine.submit(Lane::UpWeights, 100.0);
            machine.submit(Lane::Down, 100.0);
            assert!((end(&mut machine) - seconds).abs() < 1e-9);
        }
    }

    #[test]
    fn gathers_and_scatters_share_a_network_and_nothing_else() {
        let can = Capabilities { network: Some(10.0), peers: Some(50.0), ..Capabilities::default() };
        let mut machine = Machine::new(&can, false);
        let gather = machine.submit(Lane::GatherNetwork, 10.0);
        machine.submit(Lane::ScatterNetwork, 30.0);
        let peers = machine.submit(Lane::GatherPeers, 50.0);
        assert!(machine.advance() && machine.is_done(peers) && !machine.is_done(gather));
        assert_eq!(machine.now, 1.0);
        assert!(machine.advance() && machine.is_done(gather));
        assert_eq!((machine.now, end(&mut machine)), (2.0, 4.0));
    }

    #[test]
    fn what_never_ends_is_not_waited_for() {
        let link =
            |rate| Capabilities { upload: Some(rate), download: Some(rate), ..Capabilities::default() };
        let mut machine = Machine::new(&link(0.0), false);
        machine.submit(Lane::Up, 1.0);
        assert!(!machine.advance() && machine.has_work());
    }

    #[test]
    fn what_is_not_known_takes_no_time() {
        let mut machine = Machine::new(&Capabilities::default(), false);
        let lanes = [Lane::ReadState, Lane::WriteScratch, Lane::Up, Lane::Down];
        for lane in lanes.into_iter().chain(NETWORK.iter().chain(PEERS).copied()) {
            let job = machine.submit(lane, 1.0);
            assert!(machine.is_done(job));
        }
        assert!(!machine.advance());
    }
}
