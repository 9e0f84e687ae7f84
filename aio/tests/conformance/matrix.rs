//! The engines that do real I/O, in every surrounding they may meet.
//!
//! A test is an engine on a kind of drive; inside it every combination of direct or cached, registered memory or not,
//! one directory or three on drives of their own, and whole, short or failing transfers runs every case. A failure
//! names its combination.

use crate::cases::{CASES, FAULT_CASES};
use crate::loop_disk::LoopDisk;
use crate::rig::{Rig, failures_of, host_place};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
#[cfg(feature = "tokio_uring")]
use terrace_aio::engine::TokioUringEngine;
use terrace_aio::engine::{EngineConfig, ThreadsEngine, UringEngine};
use terrace_aio::layer::{FaultConfig, FaultLayer};
use terrace_aio::{IoEngine, IoError};

/// Bytes of a loop drive: what the largest case needs, and some.
const DRIVE_BYTES: u64 = 48 << 20;

/// Declares one test for every engine on every drive.
macro_rules! matrix {
    ($($(#[$gate:meta])* $engine:ident { $($test:ident on $drive:ident),* $(,)? })*) => {
        $($(#[$gate])* mod $engine {
            $(#[test] fn $test() { super::run(stringify!($engine), super::$engine, super::Drive::$drive); })*
        })*
    };
}

matrix! {
    uring { host on Host, sectors_of_512_bytes on Sectors512, sectors_of_4096_bytes on Sectors4096 }
    threads { host on Host, sectors_of_512_bytes on Sectors512, sectors_of_4096_bytes on Sectors4096 }
    #[cfg(feature = "tokio_uring")]
    tokio_uring { host on Host, sectors_of_512_bytes on Sectors512, sectors_of_4096_bytes on Sectors4096 }
}

fn uring(config: &EngineConfig) -> Result<Arc<dyn IoEngine>, IoError> {
    Ok(Arc::new(UringEngine::new(config)?))
}

fn threads(config: &EngineConfig) -> Result<Arc<dyn IoEngine>, IoError> {
    Ok(Arc::new(ThreadsEngine::new(config)?))
}

#[cfg(feature = "tokio_uring")]
fn tokio_uring(config: &EngineConfig) -> Result<Arc<dyn IoEngine>, IoError> {
    Ok(Arc::new(TokioUringEngine::new(config)?))
}

type Open = fn(&EngineConfig) -> Result<Arc<dyn IoEngine>, IoError>;

/// What the files lie on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drive {
    /// The drive the project is built on.
    Host,
    Sectors512,
    Sectors4096,
}

/// What happens to transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfers {
    Whole,
    /// Every request takes many operations and every operation several system calls.
    Short,
    /// A layer on top delays results and, in the cases about that, fails requests.
    Faulty,
}

#[derive(Debug, Clone, Copy)]
struct Combination {
    engine: &'static str,
    drive: Drive,
    direct: bool,
    register: bool,
    paths: usize,
    transfers: Transfers,
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direct = if self.direct { "direct" } else { "cached" };
        let register = if self.register { "registered" } else { "not registered" };
        let Self { engine, drive, paths, transfers, .. } = self;
        write!(f, "{engine} / {drive:?} / {direct} / {register} / {paths} path(s) / {transfers:?} transfers")
    }
}

/// Every combination of an engine on a drive.
fn combinations(engine: &'static str, drive: Drive) -> Vec<Combination> {
    let mut all = Vec::new();
    for direct in [true, false] {
        for register in [true, false] {
            for paths in [1, 3] {
                for transfers in [Transfers::Whole, Transfers::Short, Transfers::Faulty] {
                    all.push(Combination { engine, drive, direct, register, paths, transfers });
                }
            }
        }
    }
    if drive == Drive::Host {
        // A journal that commits with every file made is slow, and the loop drives cover what does not depend on it.
        all.retain(|c| {
            let is_usual = c.direct && c.register && c.transfers == Transfers::Whole;
            let is_worst = !c.direct && !c.register && c.transfers == Transfers::Short;
            c.paths == 1 && (is_usual || is_worst)
        });
    }
    all
}

/// The places on a drive, and what keeps them; none where the drive cannot be made.
fn places(drive: Drive) -> Option<(Vec<PathBuf>, Vec<LoopDisk>)> {
    let sector = match drive {
        Drive::Host => return Some((vec![host_place()], Vec::new())),
        Drive::Sectors512 => 512,
        Drive::Sectors4096 => 4096,
    };
    let disks: Result<Vec<_>, String> = (0..3).map(|_| LoopDisk::new(DRIVE_BYTES, sector)).collect();
    match disks {
        Ok(disks) => Some((disks.iter().map(LoopDisk::path).collect(), disks)),
        Err(error) if drive == Drive::Sectors512 => {
            println!("three directories on the host's drive instead of three loop drives: {error}");
            Some((vec![host_place(); 3], Vec::new()))
        }
        Err(error) => {
            println!("skipped: there is no drive with sectors of {sector} bytes: {error}");
            None
        }
    }
}

fn run(name: &'static str, open: Open, drive: Drive) {
    if let Err(error) = open(&EngineConfig::default()) {
        assert!(name != "threads", "{error}");
        println!("skipped: {error}");
        return;
    }
    let Some((places, _disks)) = places(drive) else { return };
    let mut failed = Vec::new();
    for combination in combinations(name, drive) {
        println!("{combination}");
        let fixture = || combination.rig(open, &places[..combination.paths]);
        let mut cases = failures_of(CASES, fixture);
        if combination.transfers == Transfers::Faulty {
            cases.extend(failures_of(FAULT_CASES, fixture));
        }
        failed.extend(cases.into_iter().map(|case| format!("{combination}: {case}")));
    }
    assert!(failed.is_empty(), "failed:\n{}", failed.join("\n"));
}

impl Combination {
    fn config(self) -> EngineConfig {
        let Self { direct, register, .. } = self;
        let whole = EngineConfig { block_bytes: 64 << 10, direct, register, ..EngineConfig::default() };
        match self.transfers {
            Transfers::Whole | Transfers::Faulty => whole,
            Transfers::Short => {
                let block_bytes = 20_000;
                EngineConfig { block_bytes, queue_depth: 3, threads: 2, transfer_bytes_max: 5000, ..whole }
            }
        }
    }

    fn rig(self, open: Open, places: &[PathBuf]) -> Rig {
        let engine = open(&self.config()).unwrap();
        let mut rig = if self.transfers == Transfers::Faulty {
            let config = FaultConfig {
                delay_one_in: 10,
                delay_max: Duration::from_micros(100),
                ..FaultConfig::default()
            };
            let faults = Arc::new(FaultLayer::new(engine, config));
            let mut rig = Rig::on_disk(Arc::clone(&faults) as Arc<dyn IoEngine>, places);
            rig.faults = Some(faults);
            rig
        } else {
            Rig::on_disk(engine, places)
        };
        if self.register {
            rig = rig.with_registered_memory();
        }
        rig
    }
}
