//! One suite for every engine and every layer: a new one adds a fixture here and nothing else.
//!
//! A fixture makes a fresh [`Rig`]; `cases` holds what every engine promises. Each fixture is one test, which runs all
//! cases and names those that failed. Engines that do real I/O are declared in `matrix`. The canaries are engines
//! broken on purpose: the suite must fail them.

mod canary;
mod cases;
#[path = "../support/loop_disk.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod loop_disk;
mod matrix;
mod pool;
mod rig;

use rig::{Rig, assert_conforms, host_place};
use std::sync::Arc;
use std::time::Duration;
use terrace_aio::IoEngine;
use terrace_aio::engine::{EngineConfig, SimConfig, SimEngine, ThreadsEngine};
use terrace_aio::layer::{FaultConfig, FaultLayer, StatsLayer, ThrottleConfig, ThrottleLayer, TraceLayer};

fn threads() -> Arc<dyn IoEngine> {
    let config = EngineConfig { block_bytes: 64 << 10, ..EngineConfig::default() };
    Arc::new(ThreadsEngine::new(&config).unwrap())
}

fn on_disk(engine: Arc<dyn IoEngine>) -> Rig {
    Rig::on_disk(engine, &[host_place()])
}

fn sim(config: SimConfig) -> Arc<dyn IoEngine> {
    Arc::new(SimEngine::new(config))
}

#[test]
fn sim_conforms() {
    for seed in 0..10 {
        println!("seed {seed}");
        assert_conforms(|| Rig::in_memory(sim(SimConfig { seed, ..SimConfig::default() })));
    }
}

#[test]
fn sim_conforms_with_sectors() {
    for sector_bytes in [512, 4096] {
        for seed in 0..3 {
            println!("sectors of {sector_bytes} bytes, seed {seed}");
            let config = SimConfig { seed, sector_bytes, transfer_bytes_max: 20_000, ..SimConfig::default() };
            assert_conforms(|| Rig::in_memory(sim(config.clone())));
        }
    }
}

#[test]
fn sim_conforms_when_it_behaves() {
    let config =
        SimConfig { short_one_in: 0, interrupt_one_in: 0, delay_ticks_max: 0, ..SimConfig::default() };
    assert_conforms(|| Rig::in_memory(sim(config.clone())));
}

#[test]
fn stats_conform() {
    assert_conforms(|| Rig::in_memory(Arc::new(StatsLayer::new(sim(SimConfig::default())))));
}

#[test]
fn trace_conforms() {
    assert_conforms(|| on_disk(Arc::new(TraceLayer::new(threads(), 100))));
}

#[test]
fn throttle_conforms() {
    let config = ThrottleConfig {
        read_bytes_per_second: 2e9,
        write_bytes_per_second: 1e9,
        is_shared: true,
        ..ThrottleConfig::default()
    };
    assert_conforms(|| on_disk(Arc::new(ThrottleLayer::new(threads(), config))));
}

#[test]
fn fault_conforms_with_delays() {
    let config =
        FaultConfig { delay_one_in: 3, delay_max: Duration::from_micros(100), ..FaultConfig::default() };
    assert_conforms(|| Rig::in_memory(Arc::new(FaultLayer::new(sim(SimConfig::default()), config))));
}

#[test]
fn layers_conform_together() {
    assert_conforms(|| {
        let throttled = ThrottleLayer::new(threads(), ThrottleConfig::default());
        let faulty = FaultLayer::new(Arc::new(throttled), FaultConfig::default());
        let traced = TraceLayer::new(Arc::new(faulty), 10);
        on_disk(Arc::new(StatsLayer::new(Arc::new(traced))))
    });
}
