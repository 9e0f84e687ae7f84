//! Several ranks on the command line: how many of them are planned, and how fast they exchange bytes.

use super::values::count;
use crate::config::ByteSize;
use crate::error::CliError;
use crate::floor::Capabilities;
use clap::Args;
use std::num::NonZeroUsize;
use terrace_zero::{Ranks, Traffic};

const HEADING: &str = "Several cards, each with batches of its own and an equal part of all state (ZeRO-3)";

/// The ranks of `terrace plan`.
#[derive(Debug, Clone, Args)]
pub struct RanksArgs {
    /// Cards in all. --batch-size, --grad-accum, --device-memory, --gpu-memory, --gpu-bandwidth, --link and --tflops are then those of
    /// each; --host-memory, --dram, --disk-cache, --disk-space, --disk-read and --disk-write, or the profile's, those of a node
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "1", help_heading = HEADING)]
    pub ranks: NonZeroUsize,
    /// Nodes, each with as many of the cards
    #[arg(long, value_name = "M", allow_negative_numbers = true, value_parser = count::<NonZeroUsize>, default_value = "1", help_heading = HEADING)]
    pub nodes: NonZeroUsize,
    /// Bytes per second into a node, and as many out of it at the same time, such as 100GB
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, requires = "ranks", help_heading = HEADING)]
    pub network_bandwidth: Option<ByteSize>,
    /// Bytes per second to a card from others of its node (NVLink, PCIe), and as many from it, such as 150GB
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, requires = "ranks", help_heading = HEADING)]
    pub peer_bandwidth: Option<ByteSize>,
}

impl RanksArgs {
    /// The ranks that are meant; `unified` if they would compute in the memory of their host.
    ///
    /// # Errors
    /// Nodes cannot be equal, or there is no card.
    pub fn ranks(&self, unified: bool) -> Result<Ranks, CliError> {
        let ranks = Ranks::new(self.ranks, self.nodes)?;
        if ranks.are_several() && unified {
            return Err(CliError::Usage(format!(
                "--ranks {} are cards, and this plan computes on the CPU: describe a card with --gpu-memory and --link, or choose one \
                 with --device",
                self.ranks
            )));
        }
        Ok(ranks)
    }

    /// The rates, with their flags.
    pub(super) fn rates(&self) -> [(&'static str, Option<ByteSize>); 2] {
        [("--network-bandwidth", self.network_bandwidth), ("--peer-bandwidth", self.peer_bandwidth)]
    }

    /// Adds what the flags say to what is known.
    pub fn add_to(&self, can: &mut Capabilities) {
        let rate = |size: Option<ByteSize>| size.map(|size| size.0 as f64);
        (can.network, can.peers) = (rate(self.network_bandwidth), rate(self.peer_bandwidth));
    }

    /// What ranks exchange in a step, and what of it has no time for want of a flag.
    pub fn exchanged(&self, traffic: Traffic) -> String {
        let Traffic { network_bytes, peer_bytes } = traffic;
        let [network, peers] = [network_bytes, peer_bytes].map(terrace_tiers::ByteSize);
        let mut text = format!(
            "between ranks: {network} into a node and as much out of it, {peers} to a card from others of its node and back"
        );
        for ((flag, rate), bytes) in self.rates().into_iter().zip([network_bytes, peer_bytes]) {
            if rate.is_none() && bytes > 0 {
                text += &format!("; no time for that without {flag}");
            }
        }
        text
    }
}

/// What figures are of, where there are several ranks.
pub fn words(ranks: Ranks) -> String {
    let nodes = match ranks.nodes() {
        1 => "on one node".to_owned(),
        nodes => format!("{} on each of {nodes} nodes", ranks.per_node()),
    };
    format!(
        "{} ranks, {nodes}: device memory, operations and link are those of a card; host memory, disk and network those of a node",
        ranks.count()
    )
}
