//! One suite for every device; a backend adds a fixture.

mod suite;

use terrace_device::host::{HostDevice, POISON};
use terrace_device::sim::{SimDevice, SimDeviceConfig};
use terrace_device::{Bytes, BytesMut, Device, StreamKind};

#[test]
fn host_unified() {
    suite::all(&HostDevice::unified());
}

#[test]
fn host_discrete() {
    suite::all(&HostDevice::discrete());
}

#[test]
fn simulated() {
    for seed in 0..50 {
        for early_one_in in [0, 1, 2, 8] {
            suite::all(&SimDevice::new(SimDeviceConfig { seed, early_one_in, ..SimDeviceConfig::default() }));
        }
    }
}

/// The canary: code that skips the wait must see poison, or discrete mode proves nothing.
#[test]
fn a_missing_wait_reads_poison() {
    let device = HostDevice::discrete();
    let stream = device.stream(StreamKind::Upload).unwrap();
    let src = vec![7u8; 64];
    let mut dst = vec![0u8; 64];
    // SAFETY: both vectors outlive the event, which is waited for below; reading early is the point of the test.
    unsafe { stream.copy(Bytes::from_host(&src), BytesMut::from_host(&mut dst)).unwrap() };
    let event = stream.record().unwrap();
    assert!(!event.is_done());
    assert!(dst.iter().all(|&b| b == POISON));
    event.synchronize().unwrap();
    assert_eq!(dst, src);
}

#[test]
fn an_exhausted_arena_says_how_much_it_has() {
    let arena = HostDevice::unified().arena(4096).unwrap();
    let _held = arena.alloc(4000).unwrap();
    let message = arena.alloc(512).unwrap_err().to_string();
    assert!(message.contains("4096") && message.contains("512"), "{message}");
}
